# One virtual environment for everything; each target makes what it needs.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
TORCH  ?= torch==2.13.0
TORCHVISION ?= torchvision==0.28.0
# Spinning OpenMP threads of several processes on few cores slow each other down by orders of magnitude.
export OMP_WAIT_POLICY := passive
export OMP_NUM_THREADS ?= 1

.PHONY: help env test lint zoo demo demo-tf proto clean
help:            ## this list
	@grep -hE '^[a-z-]+: .*##' $(MAKEFILE_LIST) | sed 's/:.*##/\t/'

$(VENV)/.ready: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade "pip<26.2"
	$(BIN)/python -m pip install --quiet "$(TORCH)"
	$(BIN)/python -m pip install --quiet "$(TORCH)" "$(TORCHVISION)" -e ".[dev]"
	@touch $@

env: $(VENV)/.ready    ## the virtual environment with all that development needs

lint: env        ## style and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

test: lint       ## style, types and the whole test-suite
	$(BIN)/python -m pytest -n 2 --dist worksteal

zoo: env         ## every network of the zoo, not only the sample that `make test` runs
	$(BIN)/python benchmarks/zoo_coverage.py

demo: env        ## the main job: train, prune, retrain, export, compare
	OMP_NUM_THREADS=2 $(BIN)/python -m openwork demo

demo-tf: env     ## the same with a TensorFlow graph: train, search, prune, retrain, save, convert, compare
	OMP_NUM_THREADS=2 $(BIN)/python -m openwork demo-tf

proto:           ## the compiled schemas, after a change of a .proto file (needs protoc 27 or later)
	cd src/openwork/config && protoc -I. --descriptor_set_out=schema.desc retrain_config.proto search_config.proto
	cd src/openwork/record && protoc -I. --include_imports --descriptor_set_out=schema.desc scale_offset_record.proto

clean:           ## remove the virtual environment and caches
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache
