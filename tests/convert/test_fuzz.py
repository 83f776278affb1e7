"""A short run of the fuzzer; ``benchmarks/convert_fuzz.py`` runs it for as long as one likes."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "convert_fuzz.py"


@pytest.mark.parametrize("seed", [0, 1])
def test_only_expected_errors_come_out(tmp_path, seed):
    spec = importlib.util.spec_from_file_location("convert_fuzz", BENCHMARK)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    seen = module.fuzz(250, seed, tmp_path)
    assert sum(seen.values()) == 250
    assert seen["refused"] > 100
    assert seen["converted"] > 10
