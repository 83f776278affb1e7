"""What each package offers: the names, the signatures that AMCT's scripts rely on, and what an import costs."""

from __future__ import annotations

import inspect
import subprocess
import sys
from importlib import import_module

import pytest

# AMCT's functions for PyTorch: parameters in order, with defaults; further keywords of our own may follow.
AMCT = {
    "set_logging_level": "print_level='info', save_level='info'",
    "create_prune_retrain_model": "model, input_data, config_defination, record_file",
    "restore_prune_retrain_model": (
        "model, input_data, record_file, config_defination, pth_file, state_dict_name=None"
    ),
    "save_prune_retrain_model": (
        "model, save_path, input_data, input_names=None, output_names=None, dynamic_axes=None"
    ),
    "create_compressed_retrain_model": "model, input_data, config_defination, record_file",
    "restore_compressed_retrain_model": (
        "model, input_data, config_defination, record_file, pth_file, state_dict_name=None"
    ),
    "save_compressed_retrain_model": (
        "model, record_file, save_path, input_data, input_names=None, output_names=None, dynamic_axes=None"
    ),
    "auto_channel_prune_search": (
        "model, config, input_data, output_cfg, sensitivity='TaylorLossSensitivity', search_alg='GreedySearch'"
    ),
}
# The same for TensorFlow.
AMCT_TENSORFLOW = {
    "set_logging_level": "print_level='info', save_level='info'",
    "auto_channel_prune_search": (
        "graph, output_nodes, config, input_data, output_cfg, sensitivity='TaylorLossSensitivity', "
        "search_alg='GreedySearch'"
    ),
    "create_prune_retrain_model": "graph, outputs, record_file, config_defination",
    "save_prune_retrain_model": "pb_model, outputs, record_file, save_path",
    "create_compressed_retrain_model": "graph, config_defination, outputs, record_file",
    "save_compressed_retrain_model": "pb_model, outputs, record_file, save_path",
}
NATIVE = {
    "analyze": "model, inputs",
    "prune": "model, inputs, ratio=0.5, round_to=1, importance='balanced_l2', skip=()",
    "verify": "model, pruned, plan, inputs",
    "verify_sparsity": "model, n=2, m=4",
}

# Package -> the names that users may rely on.
OFFERED = {
    "openwork": {"__version__"},
    "openwork.cli": {"main"},
    "openwork.errors": {
        "ConfigError", "ConversionError", "FileError", "ModelError", "NothingToPruneError", "OpenworkError",
        "RecordError", "UnsupportedModelError", "WeightsError",
    },
    "openwork.torch": {"Analysis", "PrunePlan", *NATIVE, *AMCT},
    "openwork.tensorflow": {
        "GraphAnalysis", "KerasAnalysis", "PrunePlan", "analyze", "analyze_graph", "prune", "prune_graph",
        "prune_saved_model", "verify", "verify_graph", *AMCT_TENSORFLOW,
    },
    "openwork.importance": {"Importance", "get", "names"},
    "openwork.config": {"RetrainConfig", "kept_channels", "load_retrain_config", "save_retrain_config"},
    "openwork.record": {"Record", "load_record", "save_record"},
    "openwork.search": {
        "DynamicProgrammingSearch", "GreedySearch", "SearchChannelBase", "SensitivityBase", "SearchProblem",
    },
    "openwork.sparsity": {"Not24Error", "Packed24", "Pattern24", "check24", "pack24", "unpack24"},
    "openwork.torch.sparse24": {"apply_24", "finalize", "load_masks", "masks_of", "verify_sparsity"},
}  # fmt: skip


def parameters(function: object) -> list[str]:
    """Parameters as they are written, without annotations; own keyword-only ones are left out."""
    assert callable(function)
    return [
        str(parameter.replace(annotation=inspect.Parameter.empty))
        for parameter in inspect.signature(function).parameters.values()
        if parameter.kind is not inspect.Parameter.KEYWORD_ONLY
    ]


@pytest.mark.parametrize("package", OFFERED)
def test_packages_offer_what_is_listed(package: str) -> None:
    if package == "openwork.tensorflow":
        pytest.importorskip("tensorflow")
    module = import_module(package)
    missing = OFFERED[package] - set(module.__all__)
    assert not missing
    assert len(set(module.__all__)) == len(module.__all__)
    for name in module.__all__:
        assert getattr(module, name) is not None


def test_torch_offers_nothing_unlisted() -> None:
    module = import_module("openwork.torch")
    assert set(module.__all__) <= {"Analysis", "PrunePlan", *NATIVE, *AMCT}


@pytest.mark.parametrize("name", AMCT)
def test_amct_functions_have_amct_signatures(name: str) -> None:
    function = getattr(import_module("openwork.torch"), name)
    assert ", ".join(parameters(function)) == AMCT[name]


@pytest.mark.parametrize("name", AMCT_TENSORFLOW)
def test_amct_functions_for_tensorflow_have_amct_signatures(name: str) -> None:
    pytest.importorskip("tensorflow")
    function = getattr(import_module("openwork.tensorflow"), name)
    assert ", ".join(parameters(function)) == AMCT_TENSORFLOW[name]
    text = inspect.getdoc(function) or ""
    assert "Args:" in text
    assert "Raises:" in text


@pytest.mark.parametrize("name", NATIVE)
def test_native_functions_start_with_the_documented_parameters(name: str) -> None:
    found = ", ".join(parameters(getattr(import_module("openwork.torch"), name)))
    assert found == NATIVE[name] or found.startswith(NATIVE[name] + ", ")


@pytest.mark.parametrize("name", [*AMCT, *NATIVE])
def test_public_functions_have_docstrings_with_their_errors(name: str) -> None:
    function = getattr(import_module("openwork.torch"), name)
    text = inspect.getdoc(function) or ""
    assert "Args:" in text or name in ("set_logging_level",)
    assert "Raises:" in text


def test_errors_are_the_builtins_a_caller_would_expect() -> None:
    errors = import_module("openwork.errors")
    expected = {
        "ConfigError": ValueError, "ConversionError": ValueError, "FileError": OSError, "ModelError": RuntimeError,
        "NothingToPruneError": RuntimeError, "RecordError": ValueError, "UnsupportedModelError": TypeError,
        "WeightsError": ValueError,
    }  # fmt: skip
    for name, builtin in expected.items():
        assert issubclass(getattr(errors, name), builtin)
        assert issubclass(getattr(errors, name), errors.OpenworkError)


HEAVY = ("numpy", "onnx", "onnxruntime", "scipy", "sklearn", "tensorflow", "torch")


@pytest.mark.parametrize(
    ("module", "forbidden"),
    [
        ("openwork", HEAVY),
        ("openwork.cli", HEAVY),
        ("openwork.errors", HEAVY),
        ("openwork.demo.command", HEAVY),
        ("openwork.graph.plan", ("onnx", "tensorflow", "torch")),
        ("openwork.graph.operators", ("onnx", "tensorflow", "torch")),
        ("openwork.importance", ("onnx", "tensorflow", "torch")),
        ("openwork.config", ("onnx", "scipy", "tensorflow", "torch")),
        ("openwork.record", ("onnx", "scipy", "tensorflow", "torch")),
        ("openwork.search", ("onnx", "tensorflow", "torch")),
        ("openwork.sparsity", ("onnx", "tensorflow", "torch")),
        ("openwork.convert.command", ("onnxruntime", "tensorflow", "torch")),
        ("openwork.retrain.search", ("onnx", "onnxruntime", "tensorflow", "torch")),
        ("openwork.retrain.latency", ("onnx", "onnxruntime", "tensorflow", "torch")),
        ("openwork.torch", ("onnx", "onnxruntime", "tensorflow", "sklearn")),
        ("openwork.tensorflow", ("onnx", "onnxruntime", "torch")),
    ],
)
def test_imports_load_only_their_own_framework(module: str, forbidden: tuple[str, ...]) -> None:
    if module == "openwork.tensorflow":
        pytest.importorskip("tensorflow")
    code = f"import sys, {module}; print(*(name for name in {forbidden!r} if name in sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.split() == []


def test_typed() -> None:
    (folder,) = import_module("openwork").__path__
    assert __import__("pathlib").Path(folder, "py.typed").exists()


def test_tensorflow_offers_functions_where_modules_could_stand_in_their_place() -> None:
    module = import_module("openwork.tensorflow")
    assert all(inspect.isfunction(getattr(module, name)) for name in ("analyze", "prune", "verify"))
