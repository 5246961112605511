"""Samples for the rules of shardwise/rules/spatial.py."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from shardwise import DTensor
from tests.helpers.one_device import Sample, sample

aten = torch.ops.aten


def _filled(*shape: int) -> Tensor:
    return torch.linspace(-2, 2, torch.Size(shape).numel()).mul(7).sin().view(shape)


# ── convolution ───────────────────────────────────────────────────────────────────────────────────────────────────────

#: Stride, padding, dilation, transposed, output padding, groups.
Words = tuple[list[int], list[int], list[int], bool, list[int], int]
LINE: Words = ([2], [1], [1], False, [0], 1)
PLANE: Words = ([1, 1], [1, 0], [2, 1], False, [0, 0], 1)
BACK: Words = ([2], [1], [1], True, [1], 1)
DEPTH: Words = ([1], [0], [1], False, [0], 3)
SIDES: Words = ([1], [0], [1], False, [0], 4)
UNEQUAL: Words = ([1], [0], [1], True, [0], 2)
BOX: Words = ([1, 1, 2], [0, 0, 0], [1, 1, 1], False, [0, 0, 0], 1)


def _conv(words: Words, *shapes: Any) -> Sample:
    bias = () if len(shapes) > 2 else (None,)
    return sample(lambda *tensors: aten.convolution(*tensors, *bias, *words), *(_filled(*shape) for shape in shapes))


def _conv_backward(words: Words, mask: list[bool], x: tuple[int, ...], weight: tuple[int, ...]) -> Sample:
    out = aten.convolution(_filled(*x), _filled(*weight), None, *words)
    sizes = [out.shape[1]] if mask[2] else None

    def asked(*tensors: Tensor) -> Any:
        outs = aten.convolution_backward(*tensors, sizes, *words, mask)
        return [out for out, wanted in zip(outs, mask, strict=True) if wanted]

    return sample(asked, _filled(*out.shape), _filled(*x), _filled(*weight))


# ── interpolation and padding ─────────────────────────────────────────────────────────────────────────────────────────

SIZES = {1: [4], 2: [3, 5], 3: [2, 3, 1]}
GOALS = {1: [7], 2: [5, 4], 3: [3, 2, 2]}


def _interpolation(name: str, count: int) -> dict[str, list[Sample]]:
    corners = () if "nearest" in name else (False,)
    up, down, shape = getattr(aten, name), getattr(aten, f"{name}_backward"), (3, 2, *SIZES[count])
    return {
        f"aten.{name}": [sample(lambda x: up(x, GOALS[count], *corners), shape)],
        f"aten.{name}_backward": [sample(lambda g: down(g, GOALS[count], list(shape), *corners), (3, 2, *GOALS[count]))],
    }


def _padding(name: str, count: int) -> dict[str, list[Sample]]:
    pad, back, shape = getattr(aten, name), getattr(aten, f"{name}_backward"), (3, 2, *[3, 2, 4][-count:])
    amounts = [1, 2, 1, 0, 1, 1][: 2 * count]
    out = pad(torch.zeros(shape), amounts).shape
    return {
        f"aten.{name}": [sample(lambda x: pad(x, amounts), shape[count % 2 :])],  # also without a batch
        f"aten.{name}_backward": [sample(lambda g, x: back(g, x, amounts), tuple(out), shape)],
    }


def _constant(shape: tuple[int, ...], pad: list[int], value: float = 0) -> Sample:
    return sample(lambda x: aten.constant_pad_nd(x, pad, value), shape)


# ── sampling ──────────────────────────────────────────────────────────────────────────────────────────────────────────

X2, X3, G2, G3 = _filled(3, 2, 4, 3), _filled(3, 2, 2, 3, 2), _filled(3, 2, 5, 2) * 0.9, _filled(3, 2, 1, 3, 3) * 0.9


def _grid_backward(op: Any, x: Tensor, grid: Tensor, mask: list[bool]) -> Sample:
    grad = _filled(*x.shape[:2], *grid.shape[1:-1])
    return sample(lambda g, a, b: op(g, a, b, 0, 0, False, mask), grad, x, grid, atol=1e-4)


def _cudnn_sample(x: Tensor, grid: Tensor) -> Any:
    return aten.cudnn_grid_sampler(x, grid) if isinstance(x, DTensor) else F.grid_sample(x, grid, align_corners=True)


def _cudnn_backward(x: Tensor, grid: Tensor, grad: Tensor) -> Any:
    if isinstance(x, DTensor):
        return aten.cudnn_grid_sampler_backward(x, grid, grad)
    return aten.grid_sampler_2d_backward(grad, x, grid, 0, 0, True, [True, True])


SAMPLES: dict[str, list[Sample]] = {
    "aten.convolution": [
        _conv(LINE, (3, 5, 4), (2, 5, 3), (2,)),
        _conv(BACK, (2, 3, 4), (3, 2, 3), (2,)),
        _conv(DEPTH, (2, 3, 4), (3, 1, 2), (3,)),
        _conv(SIDES, (2, 8, 3), (8, 2, 2)),
        _conv(UNEQUAL, (2, 4, 3), (4, 3, 2), (6,)),
        _conv(BOX, (2, 1, 2, 3, 2), (3, 1, 2, 1, 2)),
    ],
    "aten.convolution_backward": [
        _conv_backward(LINE, [True, True, True], (3, 5, 4), (2, 5, 3)),
        _conv_backward(PLANE, [False, True, False], (3, 2, 3, 4), (3, 2, 2, 2)),
        _conv_backward(BACK, [True, False, False], (2, 3, 4), (3, 2, 3)),
        _conv_backward(DEPTH, [True, True, True], (2, 3, 4), (3, 1, 2)),
        _conv_backward(SIDES, [True, True, False], (2, 8, 3), (8, 2, 2)),
    ],
    "aten.conv_tbc": [sample(lambda x, w, b: aten.conv_tbc(x, w, b, 1), (4, 3, 2), (3, 2, 3), (3,), atol=1e-4)],
    **_interpolation("upsample_nearest1d", 1),
    **_interpolation("upsample_nearest2d", 2),
    **_interpolation("upsample_nearest3d", 3),
    **_interpolation("_upsample_nearest_exact1d", 1),
    **_interpolation("_upsample_nearest_exact2d", 2),
    **_interpolation("_upsample_nearest_exact3d", 3),
    **_interpolation("upsample_linear1d", 1),
    **_interpolation("upsample_bilinear2d", 2),
    **_interpolation("upsample_bicubic2d", 2),
    **_interpolation("upsample_trilinear3d", 3),
    **_interpolation("_upsample_bilinear2d_aa", 2),
    **_interpolation("_upsample_bicubic2d_aa", 2),
    **_padding("reflection_pad1d", 1),
    **_padding("reflection_pad2d", 2),
    **_padding("reflection_pad3d", 3),
    **_padding("replication_pad1d", 1),
    **_padding("replication_pad2d", 2),
    **_padding("replication_pad3d", 3),
    "aten.constant_pad_nd": [
        _constant((5, 3, 2), [1, 2, 0, 0, 2, 3]),
        _constant((5, 3), [-1, 2, 1, -2], 1.5),
        _constant((3, 5), [-2, -1, -3, 4], 1),
        _constant((1, 2), [0, 0, 3, 0], -1.0),
    ],
    "aten.im2col": [
        sample(lambda x: aten.im2col(x, [2, 1], [1, 1], [1, 0], [2, 1]), (3, 5, 3, 4)),
        sample(lambda x: aten.im2col(x, [2, 2], [1, 1], [0, 0], [1, 1]), (3, 3, 4)),
    ],
    "aten.col2im": [
        sample(lambda x: aten.col2im(x, [3, 4], [2, 2], [1, 1], [0, 0], [1, 1]), (3, 8, 6)),
        sample(lambda x: aten.col2im(x, [3, 4], [2, 2], [1, 1], [0, 0], [1, 1]), (12, 6)),
    ],
    "aten.grid_sampler_2d": [sample(lambda x, g: aten.grid_sampler_2d(x, g, 0, 1, False), X2, G2)],
    "aten.grid_sampler_3d": [sample(lambda x, g: aten.grid_sampler_3d(x, g, 0, 0, True), X3, G3)],
    "aten.grid_sampler_2d_backward": [
        _grid_backward(aten.grid_sampler_2d_backward, X2, G2, [True, True]),
        _grid_backward(aten.grid_sampler_2d_backward, X2, G2, [False, True]),
    ],
    "aten.grid_sampler_3d_backward": [_grid_backward(aten.grid_sampler_3d_backward, X3, G3, [True, True])],
    "aten.cudnn_grid_sampler": [sample(_cudnn_sample, X2, G2)],
    "aten.cudnn_grid_sampler_backward": [sample(_cudnn_backward, X2, G2, _filled(3, 2, 2, 5), atol=1e-4)],
}
