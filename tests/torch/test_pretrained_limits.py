"""When the config of a transformer must not change: what is computed from it would be another, or others need it."""

from __future__ import annotations

import logging
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from nets.zoo import allow_torchvision
from openwork.torch import prune, verify

allow_torchvision()
transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.zoo

IDS = torch.randint(5, 90, (2, 7), generator=torch.Generator().manual_seed(0))
INPUTS = {"input_ids": IDS}
TEXT = {"vocab_size": 99, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
TEXT |= {"intermediate_size": 96, "max_position_embeddings": 64}


class _Config(transformers.PretrainedConfig):
    model_type = "openwork_test"

    def __init__(self, width: int = 64, inner: int = 96, ids: tuple[int, ...] = (64,), **more: Any) -> None:
        super().__init__(**more)
        self.width, self.inner, self.ids = width, inner, list(ids)
        self.a = self.b = 64


class _Net(transformers.PreTrainedModel):
    config_class = _Config
    base_model_prefix = ""

    def __init__(self, config: _Config) -> None:
        super().__init__(config)
        self.embed = nn.Embedding(99, config.width)
        self.up, self.down = nn.Linear(config.width, config.inner), nn.Linear(config.inner, config.width)
        self.head = nn.Linear(config.width, 5)
        self.more(config)
        self.post_init()

    def more(self, config: _Config) -> None:
        """What a model computes from its config beside the layers."""

    def _init_weights(self, module: nn.Module) -> None: ...

    def after(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def forward(self, input_ids: torch.Tensor) -> Any:
        x = self.after(self.embed(input_ids))
        return (self.head(x + self.down(torch.relu(self.up(x)))),)


def _sines(length: int, width: int) -> torch.Tensor:
    table = torch.zeros(length, width)
    angles = torch.arange(length)[:, None] * torch.exp(torch.arange(0, width, 2) * -(math.log(1e4) / width))
    table[:, 0::2], table[:, 1::2] = torch.sin(angles), torch.cos(angles)
    return table


class _NumberInForward(_Net):
    def after(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.tensor(self.config.width**0.5, dtype=x.dtype)


class _SmallTable(_Net):
    length = 128

    def more(self, config: _Config) -> None:
        self.register_buffer("table", _sines(self.length, config.width), persistent=False)

    def after(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.table[: x.shape[1]]


class _LargeTable(_SmallTable):
    length = 2048


class _LooseTensor(_Net):
    def more(self, config: _Config) -> None:
        self.scale = torch.tensor(float(config.width), device="cpu")

    def after(self, x: torch.Tensor) -> torch.Tensor:
        return x / self.scale


class _RefusesOthers(_Net):
    def __init__(self, config: _Config) -> None:
        if config.width != 64:
            raise SystemExit(3)
        print("built")
        super().__init__(config)


def _warnings(caplog: Any) -> list[str]:
    return [r.message for r in caplog.records if r.name == "openwork" and r.levelno == logging.WARNING]


@pytest.mark.parametrize(
    ("kind", "why"),
    [
        (_NumberInForward, "the model that the class builds computes something else"),
        (_SmallTable, "the class computes table from it"),
        (_LargeTable, "the class computes table from it"),
        (_LooseTensor, "the class computes scale from it"),
        (_RefusesOthers, "no values give"),
    ],
)
def test_the_config_stays_where_the_class_would_compute_something_else(
    kind: Any, why: str, caplog: Any, capsys: Any
) -> None:
    torch.manual_seed(0)
    model = kind(_Config()).eval()
    capsys.readouterr()
    pruned, plan = prune(model, INPUTS)
    assert verify(model, pruned, plan, INPUTS) < 1e-5
    assert pruned.config.width == 64
    (message,) = _warnings(caplog)
    assert f"the config of {kind.__name__} keeps its old sizes ({why}" in message
    assert not capsys.readouterr().out


def test_numbers_that_are_equal_by_chance_stay(caplog: Any) -> None:
    class Paired(_Net):
        def __init__(self, config: _Config) -> None:
            if config.a != config.b:
                raise ValueError("a and b must be equal")
            super().__init__(config)

    pruned, _ = prune(Paired(_Config(ids=(64,) * 400)), INPUTS)
    assert (pruned.config.width, pruned.config.inner) == (32, 48)
    assert (pruned.config.a, pruned.config.b) == (64, 64)
    assert pruned.config.ids == [64] * 400
    assert not _warnings(caplog)


def test_values_that_the_config_itself_refuses(tmp_path: Path, caplog: Any) -> None:
    """45 channels are no multiple of 2 heads, which the config of Llama checks when it is written."""
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**TEXT, num_key_value_heads=2)).eval()
    pruned, _ = prune(model, INPUTS, ratio=0.3)
    assert pruned.config.hidden_size == 64
    assert len(_warnings(caplog)) == 1
    pruned.save_pretrained(tmp_path)


def test_positions_that_are_not_saved(caplog: Any) -> None:
    """Marian's table of sines is a parameter that save_pretrained leaves out."""
    sizes = {"vocab_size": 99, "d_model": 64, "encoder_layers": 1, "decoder_layers": 1, "pad_token_id": 98}
    sizes |= {"encoder_attention_heads": 4, "decoder_attention_heads": 4, "decoder_start_token_id": 98}
    sizes |= {"encoder_ffn_dim": 96, "decoder_ffn_dim": 96, "max_position_embeddings": 64}

    class Logits(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.core = transformers.MarianMTModel(transformers.MarianConfig(**sizes))

        def forward(self, **given: torch.Tensor) -> Any:
            return self.core(**given).logits

    pruned, _ = prune(Logits().eval(), {"input_ids": IDS, "decoder_input_ids": IDS[:, :5]})
    assert pruned.core.config.d_model == 64
    assert "embed_positions.weight from it" in _warnings(caplog)[0]


@pytest.mark.parametrize("alone", [False, True])
def test_a_config_of_two_models(alone: bool, caplog: Any) -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            config = transformers.BertConfig(**TEXT)
            self.a, self.b = transformers.BertModel(config), transformers.BertModel(config)
            self.head, self.other = nn.Linear(64, 3), nn.Linear(64, 3)

        def forward(self, ids: torch.Tensor) -> Any:
            return self.head(self.a(ids).last_hidden_state[:, 0]), self.other(self.b(ids).last_hidden_state[:, -1])

    pruned, _ = prune(Two().eval(), IDS, skip=["b"] if alone else [])
    assert pruned.a.config is pruned.b.config
    if alone:
        assert pruned.a.config.hidden_size == 64
        assert "it is shared by several models" in _warnings(caplog)[0]
    else:
        assert pruned.a.config.hidden_size == 32
        assert not _warnings(caplog)


@pytest.mark.parametrize("filled", [True, False])
def test_a_cache_among_the_inputs_is_not_touched(filled: bool) -> None:
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**TEXT, num_key_value_heads=2)).eval()
    cache: Any = transformers.DynamicCache()
    if filled:
        with torch.no_grad():
            cache = model(IDS).past_key_values
    given = {"input_ids": IDS[:, :1], "past_key_values": cache}
    pruned, plan = prune(model, given)
    assert verify(model, pruned, plan, given) < 1e-5
    assert cache.get_seq_length() == (7 if filled else 0)
    assert not filled or cache.layers[0].keys.device.type == "cpu"


def test_gradient_checkpointing_goes_along() -> None:
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**TEXT, num_key_value_heads=2)).train()
    model.gradient_checkpointing_enable()
    pruned, plan = prune(model, INPUTS)
    assert verify(model, pruned, plan, INPUTS) < 1e-5
    again, _ = prune(pruned, INPUTS)
    again(**INPUTS)[0].sum().backward()


def test_models_that_draw_numbers_in_evaluation() -> None:
    class Drawing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(8, 16), nn.Linear(16, 4)

        def forward(self, x: torch.Tensor) -> Any:
            return self.b(self.a(x + torch.rand(x.shape[0], 1)).relu())

    model, x = Drawing(), torch.rand(3, 8)
    pruned, plan = prune(model, x)
    before = torch.get_rng_state()
    assert verify(model, pruned, plan, x) < 1e-5
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("ratio", [0.5, 0.3])
def test_attributes_of_other_modules_of_a_class(ratio: float) -> None:
    """A length that an attribute of the layer stated once is not looked for where there is no such attribute."""
    sizes = {"vocab_size": 99, "d_model": 64, "num_layers": 2, "attention_heads": 4, "ffn_dim": 96}
    model = transformers.XGLMForCausalLM(transformers.XGLMConfig(**sizes, max_position_embeddings=64)).eval()
    pruned, plan = prune(model, INPUTS, ratio=ratio)
    assert verify(model, pruned, plan, INPUTS) < 1e-5
    plain = transformers.XLMConfig(vocab_size=99, emb_dim=64, n_layers=2, n_heads=4, max_position_embeddings=64)
    model = transformers.XLMWithLMHeadModel(plain).eval()
    pruned, plan = prune(model, INPUTS, ratio=ratio)
    assert verify(model, pruned, plan, INPUTS) < 1e-5
