"""The zoo: public image networks and small random-weight transformers, with what Torch-Pruning made of them.

No network is downloaded: all weights are random. `torch_pruning` is the share of multiply-accumulates that
Torch-Pruning 1.6.1 kept (zero configuration, width ratio 0.5), or what went wrong.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from nets import checks, transformer_configs
from nets.micro import perturb
from nets.vision import allow_torchvision

__all__ = ["SAMPLE", "ZOO", "ZooNet", "allow_torchvision", "find", "randomise_norm_statistics"]

# source, name, input size, Torch-Pruning 1.6.1: share of MACs kept, or how it failed.
_IMAGE_NETS = """
torchvision resnet18 224 0.267
torchvision resnet50 224 0.259
torchvision resnext50_32x4d 224 0.260
torchvision wide_resnet50_2 224 0.254
torchvision densenet121 224 0.265
torchvision mobilenet_v2 224 0.291
torchvision mobilenet_v3_small 224 0.323
torchvision mobilenet_v3_large 224 0.290
torchvision efficientnet_b0 224 0.289
torchvision efficientnet_v2_s 224 0.256
torchvision mnasnet1_0 224 0.293
torchvision regnet_y_400mf 224 0.277
torchvision regnet_x_400mf 224 0.262
torchvision squeezenet1_1 224 0.331
torchvision googlenet 224 0.271
torchvision inception_v3 299 0.252
torchvision alexnet 224 0.276
torchvision vgg11_bn 224 0.254
torchvision shufflenet_v2_x1_0 224 fails
torchvision convnext_tiny 224 0.258
torchvision vit_b_32 224 0.679
torchvision swin_t 224 endless
torchvision swin_v2_t 256 endless
torchvision maxvit_t 224 endless
torchvision fcn_resnet50 224 0.252
torchvision deeplabv3_mobilenet_v3_large 224 0.257
torchvision lraspp_mobilenet_v3_large 224 0.282
timm ghostnet_100 224 0.760
timm hrnet_w18_small 224 0.256
timm res2net50_14w_8s 224 fails
timm seresnet50 224 0.259
timm resnest14d 224 0.408
timm dla34 224 0.261
timm dpn68 224 fails
timm cspdarknet53 224 fails
timm vovnet39a 224 0.251
timm rexnet_100 224 endless
timm mixnet_s 224 fails
timm tinynet_a 192 0.279
timm repvgg_a0 224 0.254
timm mobileone_s0 224 0.269
timm fastvit_t8 256 fails
timm efficientformer_l1 224 fails
timm mobilevit_xxs 256 fails
timm levit_128s 224 fails
timm poolformer_s12 224 fails
timm pvt_v2_b0 224 fails
timm coat_lite_tiny 224 fails
timm cait_xxs24_224 224 fails
timm xcit_nano_12_p16_224 224 fails
timm deit_tiny_patch16_224 224 fails
timm beit_base_patch16_224 224 0.560
timm mixer_s32_224 224 fails
timm resmlp_12_224 224 fails
timm gmlp_ti16_224 224 fails
timm convmixer_768_32 224 0.269
timm edgenext_xx_small 256 fails
timm swin_tiny_patch4_window7_224 224 fails
timm nf_resnet50 256 fails
timm botnet26t_256 256 endless
timm inception_next_tiny 224 fails
timm caformer_s18 224 fails
timm focalnet_tiny_srf 224 endless
timm mvitv2_tiny 224 0.347
timm tf_efficientnet_lite0 224 0.274
timm mobilenetv4_conv_small 224 0.276
timm skresnet18 224 fails
timm selecsls42 224 0.252
"""


@dataclass(frozen=True)
class ZooNet:
    """One network of the zoo.

    Attributes:
        source: ``torchvision``, ``timm`` or ``transformers``.
        name: its name there.
        size: height and width of the input image; 0 for networks that read something else.
        torch_pruning: share of MACs kept, ``fails`` or ``endless``; empty where not tried.
        shrink: regular expressions; of the parameters each matches, at least one must lose rows (axis 0).
    """

    source: str
    name: str
    size: int
    torch_pruning: str = ""
    shrink: tuple[str, ...] = ()

    @property
    def torch_pruning_kept(self) -> float | None:
        """Share of MACs that Torch-Pruning kept, or None where it gave no model."""
        return float(self.torch_pruning) if self.torch_pruning[:1].isdigit() else None

    def build(self) -> nn.Module:
        """The model in evaluation mode, random weights (the same at each call), norm statistics randomised."""
        allow_torchvision()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            model = self._factory()()
            randomise_norm_statistics(model, self.inputs(batch=2))
        return model.eval()

    def _factory(self) -> Callable[[], nn.Module]:
        if self.source == "timm":
            import timm

            return functools.partial(timm.create_model, self.name, pretrained=False)
        if self.source == "torchvision":
            return functools.partial(_torchvision, self.name)
        return transformer_configs.MODELS[self.name].build

    def inputs(self, batch: int = 1, size: int | None = None) -> Any:
        """Example inputs: an image tensor, or a dict of keyword tensors for transformers."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(1)
            if self.source == "transformers":
                return transformer_configs.MODELS[self.name].inputs(batch)
            return torch.randn(batch, 3, size or self.size, size or self.size)


def _torchvision(name: str) -> nn.Module:
    from torchvision import models

    options: dict[str, Any] = {"weights": None}
    if name.startswith(("fcn", "deeplab", "lraspp")):
        options["weights_backbone"] = None
    if name in ("googlenet", "inception_v3"):
        options["init_weights"] = False  # scipy's truncated normal takes half a minute
    return models.get_model(name, **options)


def randomise_norm_statistics(model: nn.Module, inputs: Any = None) -> None:
    """Move norm statistics, norm weights and constant parameters (layer scales) away from 0 and 1.

    With `inputs`, batch-norm statistics are first those of one training pass, so that signals neither vanish nor
    explode in deep networks; then each channel's are moved by up to half.
    """
    perturb(model)
    batch_norm = nn.modules.batchnorm._BatchNorm
    norms = [m for m in model.modules() if isinstance(m, batch_norm) and m.track_running_stats]
    if not norms or inputs is None:
        return
    momenta = [norm.momentum for norm in norms]
    training = {module: module.training for module in model.modules()}
    for norm in norms:
        norm.momentum = 1.0
    with torch.no_grad():
        model.train()
        checks.example_call(model, inputs)
        for norm, momentum in zip(norms, momenta):
            norm.momentum = momentum
            mean, variance = norm.get_buffer("running_mean"), norm.get_buffer("running_var")
            variance.clamp_(min=0.05).mul_(torch.empty_like(variance).uniform_(0.5, 1.5))
            mean.add_(torch.empty_like(mean).uniform_(-0.5, 0.5) * variance.sqrt())
    for module, mode in training.items():
        module.training = mode


ZOO: dict[str, ZooNet] = {}
for _line in _IMAGE_NETS.split("\n"):
    if _line:
        _source, _name, _size, _kept = _line.split()
        ZOO[_name] = ZooNet(_source, _name, int(_size), _kept)
for _name, _model in transformer_configs.MODELS.items():
    ZOO[_name] = ZooNet("transformers", _name, 0, "", _model.shrink)


def find(name: str) -> ZooNet:
    """The network of the zoo called `name`, or any other: ``timm:NAME:SIZE``, ``torchvision:NAME:SIZE``.

    Raises:
        KeyError: neither.
    """
    source, _, rest = name.partition(":")
    if source in ("timm", "torchvision") and rest:
        model, _, size = rest.partition(":")
        return ZooNet(source, model, int(size or 224))
    return ZOO[name]


# Beside the zoo: more structures, among them timm's own miniature networks.
EXTRA = (
    tuple(
        f"timm:test_{name}:160"
        for name in (
            "byobnet",
            "coatnet",
            "convnext",
            "convnext2",
            "convnext3",
            "efficientnet",
            "efficientnet_evos",
            "efficientnet_gn",
            "efficientnet_ln",
            "mambaout",
            "maxvit",
            "nfnet",
            "resnet",
            "vit",
            "vit2",
            "vit3",
            "vit4",
            "vit_relpos",
        )
    )
    + tuple(
        f"timm:{name}"
        for name in (
            "convnextv2_atto:224",
            "efficientvit_b0:224",
            "efficientvit_m0:224",
            "repghostnet_050:224",
            "mobilevitv2_050:256",
            "fbnetc_100:224",
            "lcnet_050:224",
            "ecaresnet26t:256",
            "gcresnet33ts:256",
            "halonet26t:256",
            "lambda_resnet26t:256",
            "sebotnet33ts_256:256",
            "eca_botnext26ts_256:256",
            "coatnet_nano_rw_224:224",
            "crossvit_tiny_240:240",
            "convit_tiny:224",
            "visformer_tiny:224",
            "twins_svt_small:224",
            "tnt_s_legacy_patch16_224:224",
            "nest_tiny:224",
            "sequencer2d_s:224",
            "volo_d1_224:224",
            "davit_tiny:224",
            "gcvit_xxtiny:224",
            "hiera_tiny_224:224",
            "eva02_tiny_patch14_224:224",
            "repvit_m0_9:224",
            "mambaout_femto:224",
            "fasternet_t0:224",
            "tiny_vit_5m_224:224",
            "inception_resnet_v2:299",
            "xception41:299",
            "hgnetv2_b0:224",
            "ese_vovnet19b_dw:224",
            "pit_ti_224:224",
            "swinv2_cr_tiny_ns_224:224",
            "regnetz_b16:224",
            "skresnext50_32x4d:224",
            "legacy_seresnext26_32x4d:224",
            "efficientnet_cc_b0_4e:224",
            "cs3darknet_s:256",
            "gernet_s:224",
            "levit_conv_128s:224",
            "swiftformer_xs:224",
            "shvit_s1:224",
            "nextvit_small:224",
            "starnet_s1:224",
            "rdnet_tiny:224",
            "resnetv2_50:224",
            "resnetblur50:224",
        )
    )
    + tuple(
        f"torchvision:{name}"
        for name in (
            "densenet169:224",
            "efficientnet_v2_m:224",
            "shufflenet_v2_x0_5:224",
            "regnet_y_800mf:224",
            "vgg16:224",
            "squeezenet1_0:224",
            "mnasnet0_5:224",
            "convnext_small:224",
        )
    )
)


# What `make test` runs: quick, and each with another structure (name -> input size, 0 = its own).
SAMPLE: dict[str, int] = {
    "resnet18": 64,
    "mobilenet_v3_small": 64,
    "densenet121": 64,
    "shufflenet_v2_x1_0": 64,
    "regnet_x_400mf": 64,
    "ghostnet_100": 64,
    "mixnet_s": 64,
    "skresnet18": 64,
    "deit_tiny_patch16_224": 0,
    "hf_bert": 0,
    "hf_gpt2": 0,
    "hf_llama": 0,
    "hf_t5": 0,
    "timm:test_convnext3:160": 0,
    "timm:test_nfnet:160": 0,
    "timm:test_vit3:160": 0,
}
