"""The command line: ATC's spelling, exit codes, one-line errors, whole files or none."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys

import numpy as np
import onnx
import pytest
from onnx import helper

from convert_models import finite_24, info, initializer, model_of, session
from openwork.cli import main


def run(capsys, *arguments):
    """Exit code, stdout, stderr."""
    code = 0
    try:
        main([str(argument) for argument in arguments])
    except SystemExit as end:
        code = end.code or 0
    captured = capsys.readouterr()
    return code, captured.out, captured.err


@pytest.fixture
def model(tmp_path):
    rng = np.random.default_rng(3)
    nodes = [
        helper.make_node("Conv", ["x", "c"], ["a"], name="stem"),
        helper.make_node("GlobalAveragePool", ["a"], ["p"], name="pool"),
        helper.make_node("Flatten", ["p"], ["f"], name="flat"),
        helper.make_node("MatMul", ["f", "m"], ["y"], name="head"),
    ]
    built = model_of(
        nodes,
        [info("x", ["n", 8, "h", "w"])],
        [info("y", ["n", 5])],
        [initializer("c", finite_24(rng, (16, 8, 3, 3), 1)), initializer("m", rng.random((16, 5), np.float32) + 1)],
    )
    path = tmp_path / "model.onnx"
    path.write_bytes(built.SerializeToString())
    return path


@pytest.mark.parametrize("form", ["--{}={}", "--{} {}"])
def test_atc_spelling(tmp_path, capsys, model, form):
    (tmp_path / "out").mkdir()
    options = {
        "model": model,
        "framework": 5,
        "output": tmp_path / "out" / "model",
        "sparsity": 1,
        "input_shape": "x:1,8,6,6",
        "log": "error",
    }
    arguments = " ".join(form.format(key, value) for key, value in options.items()).split(" ")
    code, out, err = run(capsys, "convert", *arguments)
    assert (code, err) == (0, "")
    assert sorted(os.listdir(tmp_path / "out")) == ["model.json", "model.onnx"]
    assert "2:4 -> Conv2DCompress" in out
    assert "not 2:4: 20 of 20 groups have more than two non-zeros, the first at [0, 0]" in out
    assert "1 of 2 layers qualify" in out
    report = json.loads((tmp_path / "out" / "model.json").read_text())
    assert report["summary"] == {
        "layers": 2,
        "qualifying": 1,
        "weight_bytes_before": 16 * 8 * 9 * 4 + 320,
        "weight_bytes_after": 16 * 9 * (16 + 1) + 320,
    }
    assert set(report["layers"][0]["targets"]) == {"ascend", "tensorrt", "cpu"}
    assert report["file_bytes_after"] == os.path.getsize(tmp_path / "out" / "model.onnx")
    shape = onnx.load(tmp_path / "out" / "model.onnx").graph.input[0].type.tensor_type.shape
    assert [dim.dim_value for dim in shape.dim] == [1, 8, 6, 6]
    code, out, _ = run(capsys, "decompress", tmp_path / "out" / "model.onnx", tmp_path / "back.onnx")
    assert code == 0


def test_sparsity_0_converts_without_compressing(tmp_path, capsys, model):
    for extra in ([], ["--sparsity=0"]):
        code, _, _ = run(capsys, "convert", "--model", model, "--output", tmp_path / "o", *extra)
        assert code == 0
        assert (tmp_path / "o.onnx").read_bytes() == model.read_bytes()
        assert json.loads((tmp_path / "o.json").read_text())["layers"][0]["compressed_operator"] is None


def test_out_nodes_cuts_the_model(tmp_path, capsys, model):
    code, _, _ = run(
        capsys, "convert", "--model", model, "--output", tmp_path / "o", "--sparsity=1", "--out_nodes", "pool:0"
    )
    assert code == 0
    cut = onnx.load(tmp_path / "o.onnx")
    assert [node.op_type for node in cut.graph.node] == ["Conv2DCompress", "GlobalAveragePool"]
    x = np.ones((1, 8, 5, 5), np.float32)
    whole = onnx.load(model)
    whole.graph.output.append(info("p", ["n", 16, 1, 1]))
    (tmp_path / "whole.onnx").write_bytes(whole.SerializeToString())
    expected = session(tmp_path / "whole.onnx").run(["p"], {"x": x})[0]
    assert session(tmp_path / "o.onnx").run(None, {"x": x})[0].tobytes() == expected.tobytes()


def test_strict_has_its_own_exit_code_and_writes_nothing(tmp_path, capsys, model):
    code, _, err = run(capsys, "convert", f"--model={model}", f"--output={tmp_path}/o", "--sparsity=1", "--strict")
    assert code == 3
    assert err == f"openwork: error: {model}: --strict: MatMul 'head' does not qualify: " + (
        "not 2:4: 20 of 20 groups have more than two non-zeros, the first at [0, 0]\n"
    )
    assert sorted(os.listdir(tmp_path)) == ["model.onnx"]


WRONG = {
    "sparsity": (["--sparsity=2"], "--sparsity 2: allowed: 0 (off), 1 (2:4)"),
    "sparsity word": (["--sparsity", "yes"], "--sparsity 'yes': allowed: 0 (off), 1 (2:4)"),
    "framework": (["--framework=4"], "--framework 4: allowed: 3 (TensorFlow), 5 (ONNX)"),
    "emit": (["--emit=trt"], "--emit 'trt': allowed: onnx, dense, nvidia, ascend"),
    "container": (["--container=zip"], "--container 'zip': allowed: npz, safetensors"),
    "log": (["--log=loud"], "--log 'loud': allowed: debug, info, warning, error, null"),
    "option": (["--sparsty=1"], "--sparsty: no such option; did you mean '--sparsity'?"),
    "missing model": (["--model=nothing.onnx"], "model nothing.onnx does not exist"),
    "folder": (["--model=."], "model . is a folder; an .onnx file is needed"),
    "output folder": (["--output=no/such/place"], "the folder no/such does not exist"),
    "output is a folder name": (["--output=./"], "a path without suffix is needed"),
    "input_shape": (["--input_shape=x:a,b"], "--input_shape 'x:a,b': not of the form name:1,3,224,224"),
    "input_shape zero": (["--input_shape=x:0,8,6,6"], "lengths of at least 1, -1 for dynamic"),
    "input_shape name": (["--input_shape=z:1"], "--input_shape: the model has no input 'z'; allowed: 'x'"),
    "input_shape rank": (["--input_shape=x:1"], "--input_shape x:[1]: the model's input has the shape [-1, 8, -1, -1]"),
    "input_shape size": (["--input_shape=x:1,9,5,5"], "the model's input has the shape [-1, 8, -1, -1]"),
    "out_nodes": (["--out_nodes=poll:0"], "--out_nodes 'poll:0': no such node or tensor; did you mean 'pool'?"),
    "out_nodes place": (["--out_nodes=pool:4"], "--out_nodes 'pool:4': node 'pool' has 1 outputs"),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_options_are_one_line(tmp_path, capsys, model, case):
    arguments, words = WRONG[case]
    code, out, err = run(capsys, "convert", f"--model={model}", f"--output={tmp_path}/o", "--sparsity=1", *arguments)
    assert code == 1
    assert out == ""
    assert err.startswith("openwork: error: ")
    assert err.count("\n") == 1
    assert words in err
    assert os.listdir(tmp_path) == ["model.onnx"]


def broken(kind, path):
    data = path.read_bytes()
    built = onnx.ModelProto.FromString(data)
    if kind == "empty":
        return b""
    if kind == "text":
        return b"hello, this is no model at all\n"
    if kind == "truncated":
        return data[: len(data) // 2]
    if kind == "truncated at the end":
        return data[:-1]
    if kind == "cyclic":
        built.graph.node[1].input[0] = "y"
    if kind == "unknown name":
        built.graph.node[1].input[0] = "nobody"
    if kind == "twice":
        built.graph.node[1].output[0] = "a"
    if kind == "new opset":
        built.opset_import[0].version = 99
    if kind == "old opset":
        built.opset_import[0].version = 6
    if kind == "short weight":
        built.graph.initializer[0].raw_data = bytes(8)
    if kind == "many axes":
        built.graph.initializer[0].dims.extend([1] * 60)
    if kind == "no graph":
        built.ClearField("graph")
    if kind == "no opset":
        del built.opset_import[:]
    return built.SerializeToString()


BROKEN = {
    "empty": "not an ONNX model",
    "text": "not an ONNX model",
    "truncated": "cut short",
    "truncated at the end": "cut short",
    "cyclic": "the graph is cyclic: ",
    "unknown name": "GlobalAveragePool 'pool' reads 'nobody', which nothing makes",
    "twice": "the name 'a' is defined twice",
    "new opset": "opset 99 is not supported; allowed: 7 to ",
    "old opset": "opset 6 is not supported; allowed: 7 to ",
    "short weight": "tensor 'c' of shape [16, 8, 3, 3] and type float needs 4,608 bytes; its data has 8",
    "many axes": "tensor 'c' has 64 axes; at most 32 are read",
    "no graph": "not an ONNX model: there is no graph in it",
    "no opset": "imports no version of the ONNX operators",
}


@pytest.mark.parametrize("kind", BROKEN)
@pytest.mark.parametrize("command", ["convert", "inspect"])
def test_broken_models_are_one_line(tmp_path, capsys, model, kind, command):
    path = tmp_path / "broken.onnx"
    path.write_bytes(broken(kind, model))
    arguments = [f"--model={path}", f"--output={tmp_path}/o", "--sparsity=1"] if command == "convert" else [path]
    code, out, err = run(capsys, command, *arguments)
    assert (code, out) == (1, "")
    assert err.startswith("openwork: error: ")
    assert err.count("\n") == 1
    assert BROKEN[kind] in err
    assert sorted(os.listdir(tmp_path)) == ["broken.onnx", "model.onnx"]


def test_the_input_is_never_replaced(tmp_path, capsys, model):
    before = model.read_bytes()
    code, _, err = run(capsys, "convert", f"--model={model}", f"--output={tmp_path}/model", "--sparsity=1")
    assert code == 1
    assert "would replace the input" in err
    (tmp_path / "link.onnx").symlink_to(model)
    code, _, err = run(capsys, "convert", f"--model={model}", f"--output={tmp_path}/link", "--sparsity=1")
    assert "would replace the input" in err
    code, _, err = run(capsys, "decompress", model, model)
    assert code == 1
    assert model.read_bytes() == before


def test_decompress_refuses_a_model_that_was_not_compressed(tmp_path, capsys, model):
    code, _, err = run(capsys, "decompress", model, tmp_path / "o.onnx")
    assert code == 1
    assert "nothing to decompress" in err
    assert not (tmp_path / "o.onnx").exists()


def test_decompress_refuses_changed_metadata(tmp_path, capsys, model):
    run(capsys, "convert", f"--model={model}", f"--output={tmp_path}/o", "--sparsity=1")
    changed = onnx.load(tmp_path / "o.onnx")
    changed.graph.initializer[0].name = "elsewhere"
    changed.graph.node[0].input[1] = "elsewhere"
    (tmp_path / "o.onnx").write_bytes(changed.SerializeToString())
    code, _, err = run(capsys, "decompress", tmp_path / "o.onnx", tmp_path / "back.onnx")
    assert code == 1
    assert "was changed since" in err


def test_folder_that_cannot_be_written(tmp_path, capsys, model):
    if os.geteuid() == 0:
        pytest.skip("the superuser may write everywhere")
    folder = tmp_path / "locked"
    folder.mkdir()
    folder.chmod(0o500)
    code, _, err = run(capsys, "convert", f"--model={model}", f"--output={folder}/o", "--sparsity=1")
    assert code == 1
    assert "cannot be written" in err


def test_full_disk_leaves_nothing(tmp_path, model):
    """A limit on the size of files stands for a full disk: writing fails half-way."""
    folder = tmp_path / "out"
    folder.mkdir()
    (folder / "o.onnx").write_bytes(b"an older result")

    def limit():
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1024, 1024))

    done = subprocess.run(
        [sys.executable, "-m", "openwork", "convert", f"--model={model}", f"--output={folder}/o", "--sparsity=1"],
        capture_output=True,
        text=True,
        preexec_fn=limit,
        check=False,
    )
    assert done.returncode == 1
    assert "cannot be written: File too large" in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert os.listdir(folder) == ["o.onnx"]
    assert (folder / "o.onnx").read_bytes() == b"an older result"


def test_inspect_prints_the_same_and_writes_nothing(tmp_path, capsys, model):
    code, table, _ = run(capsys, "inspect", model)
    assert code == 0
    _, converted, _ = run(capsys, "convert", f"--model={model}", f"--output={tmp_path}/o", "--sparsity=1")
    assert converted.splitlines()[:3] == table.splitlines()[:3]
    code, text, _ = run(capsys, "inspect", "--json", tmp_path / "o.onnx")
    assert json.loads(text)["summary"]["qualifying"] == 1
    assert sorted(os.listdir(tmp_path)) == ["model.onnx", "o.json", "o.onnx"]


def test_names_in_the_file_cannot_steer_the_terminal(tmp_path, capsys, model):
    built = onnx.load(model)
    built.graph.node[0].name = "a\x1b[31mred\nline"
    model.write_bytes(built.SerializeToString())
    _, out, _ = run(capsys, "inspect", model)
    assert "\x1b" not in out
    assert len(out.splitlines()) == 5


def test_run_check(tmp_path, capsys, model):
    run(capsys, "convert", f"--model={model}", f"--output={tmp_path}/o", "--sparsity=1")
    inputs = tmp_path / "in.npz"
    np.savez(inputs, x=np.ones((2, 8, 7, 9), np.float32))
    arguments = ["--input", inputs, "--input_shape", "x:3,8,5,5", "--repeats", "2", "--random=2"]
    code, out, _ = run(capsys, "run-check", model, tmp_path / "o.onnx", *arguments)
    assert code == 0
    assert "output y [3, 5]: equal bit for bit" in out
    assert "3 inputs" in out
    other = onnx.load(model)
    weight = np.frombuffer(other.graph.initializer[1].raw_data, np.float32) + 1
    other.graph.initializer[1].raw_data = weight.tobytes()
    (tmp_path / "other.onnx").write_bytes(other.SerializeToString())
    code, out, err = run(capsys, "run-check", model, tmp_path / "other.onnx", *arguments)
    assert code == 1
    assert "different by up to" in out
    assert "give different outputs" in err
    code, _, err = run(capsys, "run-check", model, tmp_path / "nothing.onnx")
    assert code == 1
    assert "does not exist" in err
    code, _, err = run(capsys, "run-check", model, model, "--input", model)
    assert code == 1
    assert "not an .npz file" in err
    (tmp_path / "bad.onnx").write_bytes(b"bad")
    code, _, err = run(capsys, "run-check", model, tmp_path / "bad.onnx")
    assert code == 1
    assert err.count("\n") == 1


def test_help_shows_an_example(capsys):
    for command in ("convert", "inspect", "decompress", "run-check"):
        code, out, _ = run(capsys, command, "--help")
        assert code == 0
        assert f"openwork {command} " in out
        assert "Example:" in out


def test_tensorflow_without_tensorflow(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    (tmp_path / "m.pb").write_bytes(b"x")
    code, _, err = run(capsys, "convert", f"--model={tmp_path}/m.pb", "--framework=3", f"--output={tmp_path}/o")
    assert code == 1
    assert err.count("\n") == 1
    assert 'needs tensorflow, which is not installed; install it with: pip install "openwork[tensorflow]"' in err
    code, _, err = run(capsys, "convert", "--model=none.pb", "--framework=3", f"--output={tmp_path}/o")
    assert "none.pb does not exist" in err
