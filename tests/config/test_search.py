"""Reading the config file of the channel search."""

from __future__ import annotations

from pathlib import Path

import pytest

from openwork.config import (
    AutoPruneConfig,
    ChannelSetting,
    Cost,
    LayerOverride,
    RetrainConfig,
    load_auto_prune_config,
    parse_auto_prune_config,
)
from openwork.errors import ConfigError, FileError


def test_amct_sample() -> None:
    config = parse_auto_prune_config(
        "compress_ratio: 1.4\nascend_optimized: false\nmax_prune_ratio: 0.8\ntest_iteration: 2\n"
    )
    assert config == AutoPruneConfig(1.4, False, 0.8, 2)


def test_defaults() -> None:
    config = parse_auto_prune_config("compress_ratio: 2")
    assert config == AutoPruneConfig(2.0, True, 1.0, 1, RetrainConfig(), None, Cost.BITOPS)


@pytest.mark.parametrize("cost", list(Cost))
def test_cost(cost: Cost) -> None:
    assert parse_auto_prune_config(f"compress_ratio: 2 cost: {cost.value}").cost is cost


@pytest.mark.parametrize("beside", [True, False])
def test_override_file(beside: bool, tmp_path: Path) -> None:
    override = tmp_path / "override.cfg"
    override.write_text(
        'skip_layers: "fc" override_layer_configs { layer_name: "conv1" prune_config { filter_pruner {'
        " balanced_l2_norm_filter_prune { prune_ratio: 0.3 } } } }"
    )
    path = tmp_path / "search.cfg"
    path.write_text(f'compress_ratio: 2 override_prune_cfg: "{"override.cfg" if beside else override}"')
    config = load_auto_prune_config(path)
    assert config.override.skip_layers == ("fc",)
    assert config.override.override_layer_configs == (LayerOverride("conv1", ChannelSetting(0.3)),)
    assert config.override_path == str(override)


BAD = {
    "missing": ("test_iteration: 1", "compress_ratio is missing; it is required"),
    "empty": ("", "compress_ratio is missing"),
    "one": ("compress_ratio: 1", "compress_ratio is 1.0; it must be greater than 1 and finite"),
    "below one": ("compress_ratio: 0.5", "compress_ratio is 0.5"),
    "nan": ("compress_ratio: nan", "compress_ratio is nan"),
    "infinite": ("compress_ratio: inf", "compress_ratio is inf"),
    "twice": ("compress_ratio: 2\ncompress_ratio: 3", "line 2: compress_ratio is given twice"),
    "no cap": (
        "compress_ratio: 2 max_prune_ratio: 0",
        "max_prune_ratio is 0.0; it must be greater than 0 and at most 1",
    ),
    "cap above one": ("compress_ratio: 2 max_prune_ratio: 1.5", "max_prune_ratio is 1.5"),
    "cap not a number": ("compress_ratio: 2 max_prune_ratio: nan", "max_prune_ratio is nan"),
    "no iteration": ("compress_ratio: 2 test_iteration: 0", "test_iteration is 0; it must be at least 1"),
    "negative iterations": ("compress_ratio: 2 test_iteration: -4", "test_iteration is -4"),
    "fractional iterations": (
        "compress_ratio: 2 test_iteration: 1.5",
        "test_iteration: Couldn't parse integer: 1.5",
    ),
    "unknown cost": (
        "compress_ratio: 2 cost: MAC",
        "cost: unknown value 'MAC'; did you mean 'MACS'? (allowed: BITOPS, MACS, PARAMS, ACTIVATION_MEMORY, LATENCY)",
    ),
    "unknown field": (
        "compres_ratio: 2",
        "unknown field 'compres_ratio' in AutoChannelPruneConfig; did you mean 'compress_ratio'",
    ),
    "empty override": ('compress_ratio: 2 override_prune_cfg: ""', "override_prune_cfg is empty"),
}


@pytest.mark.parametrize(("text", "words"), BAD.values(), ids=BAD.keys())
def test_bad_text(text: str, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_auto_prune_config(text, "search.cfg")
    assert words in str(caught.value)
    assert str(caught.value).startswith("search.cfg")


def test_override_file_missing(tmp_path: Path) -> None:
    path = tmp_path / "search.cfg"
    path.write_text('compress_ratio: 2 override_prune_cfg: "gone.cfg"')
    with pytest.raises(FileError, match=r"gone\.cfg does not exist"):
        load_auto_prune_config(path)


FORBIDDEN = {
    "prune_config": "prune_config { n_out_of_m_pruner { l1_selective_prune {} } }",
    "batch_num": "batch_num: 3",
    "retrain_data_quant_config": "retrain_data_quant_config {}",
    "retrain_weight_quant_config": "retrain_weight_quant_config {}",
    "quant_skip_layers": 'quant_skip_layers: "a"',
    "quant_skip_types": 'quant_skip_types: "Linear"',
    "fakequant_precision_mode": "fakequant_precision_mode: FORCE_FP16_QUANT",
    "target": "target: ASCEND",
    "override_layer_configs['a'] must not set quantisation": (
        'override_layer_configs { layer_name: "a" retrain_data_quant_config {} }'
    ),
    "override_layer_types['Linear'] must not set n_out_of_m_pruner": (
        'override_layer_types { layer_type: "Linear" prune_config { n_out_of_m_pruner { l1_selective_prune {} } } }'
    ),
}


@pytest.mark.parametrize(("words", "text"), FORBIDDEN.items(), ids=FORBIDDEN.keys())
def test_override_with_a_field_of_no_meaning(words: str, text: str, tmp_path: Path) -> None:
    override = tmp_path / "override.cfg"
    override.write_text(text)
    path = tmp_path / "search.cfg"
    path.write_text(f'compress_ratio: 2 override_prune_cfg: "{override}"')
    with pytest.raises(ConfigError) as caught:
        load_auto_prune_config(path)
    assert words in str(caught.value)
    assert str(override) in str(caught.value)
    assert "filter_pruner overrides" in str(caught.value)
