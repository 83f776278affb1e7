"""Results on shapes that are not computed by torch, beside those that are: shape, strides, type; and the errors."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from openwork.torch.shape_results import ShapeResults, like
from openwork.torch.watch import Watcher


class _Computing(Watcher):
    def on_call(self, call, run):
        return self.compute(call, run)


def _x(*shape, dtype=torch.float32):
    return torch.empty(shape, dtype=dtype, device="meta")


LAYOUTS = {
    "plain": lambda: _x(2, 6, 5, 4),
    "permuted": lambda: _x(2, 5, 4, 6).permute(0, 3, 1, 2),
    "channels_last": lambda: _x(2, 6, 5, 4).to(memory_format=torch.channels_last),
    "sliced": lambda: _x(2, 6, 5, 9)[..., ::2][..., :4],
    "expanded": lambda: _x(2, 6, 1, 4).expand(2, 6, 5, 4),
    "half": lambda: _x(2, 6, 5, 4, dtype=torch.bfloat16),
    "integer": lambda: _x(2, 6, 5, 4, dtype=torch.int64),
}
CALLS = {
    "relu": torch.relu,
    "relu_": lambda x: (x + 0).relu_(),
    "add": lambda x: x + x,
    "add a number": lambda x: x + 1,
    "add a float": lambda x: x + 0.5,
    "add broadcast": lambda x: x + _x(6, 1, 1, dtype=x.dtype),
    "broadcast both ways": lambda x: x[:, :1] + _x(6, 1, 4, dtype=x.dtype),
    "broadcast from the left": lambda x: _x(5, 4, dtype=x.dtype) * x,
    "mixed types": lambda x: x * _x(2, 6, 5, 4),
    "complex": lambda x: x * 1j,
    "clamp": lambda x: x.clamp(0, 1),
    "clamp by tensors": lambda x: torch.clamp(x, x, x),
    "div": lambda x: x / 2,
    "div trunc": lambda x: torch.div(x, 2, rounding_mode="trunc"),
    "mean": lambda x: x.float().mean((2, 3), keepdim=True),
    "cat": lambda x: torch.cat([x, x], 1),
    "roll": lambda x: torch.roll(x, (1, 1), (2, 3)),
    "where": lambda x: torch.where(x > 0, x, 0),
    "softmax": lambda x: x.float().softmax(1),
    "topk": lambda x: torch.topk(x, 2, 1),
    "interpolate": lambda x: F.interpolate(x.float(), size=(7, 3), mode="bilinear"),
    "interpolate by factor": lambda x: F.interpolate(x.float(), scale_factor=2),
    "conv": lambda x: F.conv2d(x.float(), _x(8, 3, 3, 3), _x(8), (2, 1), 1, 1, 2),
    "conv same": lambda x: F.conv2d(x.float(), _x(8, 6, 3, 3), None, 1, "same"),
    "conv1d": lambda x: F.conv1d(x[..., 0].float(), _x(8, 6, 3), _x(8), padding=2, dilation=2),
    "conv unbatched": lambda x: F.conv2d(x[0].float(), _x(8, 6, 3, 3)),
    "linear": lambda x: F.linear(x.float(), _x(7, 4), _x(7)),
    "linear, square": lambda x: F.linear(x.float(), _x(4, 4)),
    "layer_norm": lambda x: F.layer_norm(x.float(), (4,), _x(4), _x(4)),
    "batch_norm": lambda x: F.batch_norm(x.float(), _x(6), _x(6), _x(6), _x(6)),
    "rms_norm": lambda x: F.rms_norm(x.float(), (4,), _x(4)),
    "attention": lambda x: F.scaled_dot_product_attention(x.float(), x.float(), x.float()),
    "matmul": lambda x: x.float() @ x.float().transpose(-1, -2),
    "einsum": lambda x: torch.einsum("nchw,nchv->nhvw", x.float(), x.float()),
    "view": lambda x: x.reshape(2, -1),
    "split": lambda x: x.split([2, 4], 1),
}


def _told(value):
    if isinstance(value, torch.Tensor):
        return value.shape, value.stride(), value.dtype, value.device
    return [_told(item) for item in value]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", CALLS)
def test_as_torch_computes_it(name, layout) -> None:
    x = LAYOUTS[layout]()
    expected = _told(CALLS[name](x))
    results = ShapeResults()
    for _ in range(2):  # computed, then remembered
        with _Computing(meta=True, results=results):
            assert _told(CALLS[name](x)) == expected


def test_a_result_is_a_new_tensor_each_time() -> None:
    x, results = _x(2, 6), ShapeResults()
    with _Computing(meta=True, results=results):
        assert torch.roll(x, 1, 1) is not torch.roll(x, 1, 1)
        assert x.add_(1) is x


ERRORS = {
    "conv": lambda: F.conv2d(_x(1, 5, 8, 8), _x(8, 6, 3, 3)),
    "conv too small": lambda: F.conv2d(_x(1, 6, 2, 2), _x(8, 6, 3, 3)),
    "linear": lambda: F.linear(_x(2, 5), _x(7, 4)),
    "add": lambda: _x(2, 5) + _x(2, 4),
    "add_": lambda: _x(2, 1).add_(_x(2, 4)),
    "cat": lambda: torch.cat([_x(2, 5), _x(3, 4)], 1),
    "attention": lambda: F.scaled_dot_product_attention(_x(2, 4, 8), _x(2, 4, 7), _x(2, 4, 7)),
}


@pytest.mark.parametrize("name", ERRORS)
def test_what_torch_refuses_is_refused(name) -> None:
    with pytest.raises((RuntimeError, ValueError)):
        ERRORS[name]()
    with _Computing(meta=True, results=ShapeResults()), pytest.raises((RuntimeError, ValueError)):
        ERRORS[name]()


def test_tensors_with_gaps_are_left_to_torch() -> None:
    assert like(_x(4, 6)[:, ::2]) is None
    assert like(_x(4, 1).expand(4, 3)) is None
    assert like(_x(4, 6).t()).stride() == (1, 6)
