"""Convolution, pooling, norms and recurrent layers through autograd, compared with one device; and what they move."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shardwise as sw
from shardwise import DTensor, OperatorError, Partial, Replicate, Shard
from tests.helpers.one_device import MESHES, distributed, equal, placements_of, sample

aten = torch.ops.aten


def filled(*shape: int) -> Tensor:
    """Values of both signs, no two of them close."""
    count = torch.Size(shape).numel()
    return ((torch.arange(count) * 37) % (count + 1) / count - 0.45).view(shape)


#: A module, its input, and whether it gives indices or states too.
MODULES: dict[str, tuple[Callable[[], nn.Module], Tensor]] = {
    "Conv1d": (lambda: nn.Conv1d(5, 3, 3, padding=1), filled(3, 5, 6)),
    "Conv2d": (lambda: nn.Conv2d(2, 3, 2, stride=2, dilation=2, padding_mode="reflect", padding=1), filled(3, 2, 4, 5)),
    "Conv2d of one image": (lambda: nn.Conv2d(4, 4, 2, groups=4, bias=False), filled(4, 3, 3)),
    "Conv3d": (lambda: nn.Conv3d(2, 4, 2, groups=2), filled(3, 2, 2, 3, 2)),
    "ConvTranspose1d": (lambda: nn.ConvTranspose1d(2, 3, 3, stride=2, output_padding=1), filled(3, 2, 3)),
    "ConvTranspose2d": (lambda: nn.ConvTranspose2d(4, 4, 2, groups=2), filled(3, 4, 2, 3)),
    "ConvTranspose3d": (lambda: nn.ConvTranspose3d(2, 1, 2), filled(3, 2, 1, 2, 2)),
    "MaxPool1d": (lambda: nn.MaxPool1d(2, return_indices=True), filled(3, 5, 7)),
    "MaxPool2d": (lambda: nn.MaxPool2d(2, return_indices=True), filled(3, 2, 5, 7)),
    "MaxPool3d": (lambda: nn.MaxPool3d((2, 1, 3), ceil_mode=True, return_indices=True), filled(3, 2, 4, 2, 4)),
    "AvgPool1d": (lambda: nn.AvgPool1d(3, 2, 1), filled(3, 5, 7)),
    "AvgPool3d": (lambda: nn.AvgPool3d(2), filled(1, 2, 4, 4, 5)),
    "LPPool2d": (lambda: nn.LPPool2d(2, 2), filled(3, 2, 4, 4) + 1),
    "BatchNorm1d": (lambda: nn.BatchNorm1d(3), filled(5, 3)),
    "BatchNorm2d": (lambda: nn.BatchNorm2d(2, affine=False), filled(5, 2, 3, 2)),
    "BatchNorm3d": (lambda: nn.BatchNorm3d(2), filled(3, 2, 1, 2, 2)),
    "InstanceNorm1d": (lambda: nn.InstanceNorm1d(3, affine=True, track_running_stats=True), filled(5, 3, 4)),
    "LocalResponseNorm": (lambda: nn.LocalResponseNorm(2), filled(3, 5, 4)),
    "Upsample": (lambda: nn.Upsample(scale_factor=1.5, mode="bilinear"), filled(3, 2, 4, 2)),
    "CircularPad2d": (lambda: nn.CircularPad2d(1), filled(3, 2, 3, 2)),
    "Unfold": (lambda: nn.Unfold(2), filled(3, 5, 3, 2)),
    "RNN": (lambda: nn.RNN(4, 3), filled(2, 5, 4)),
    "GRU": (lambda: nn.GRU(4, 3, batch_first=True), filled(5, 2, 4)),
    "LSTM": (lambda: nn.LSTM(4, 3, num_layers=2, bidirectional=True), filled(2, 5, 4)),
    "LSTMCell": (lambda: nn.LSTMCell(4, 3), filled(5, 4)),
}


def flat(value: Any) -> list[Tensor]:
    """The tensors of a result, states included."""
    return [x for item in value for x in flat(item)] if isinstance(value, tuple) else [value]


def run(module: nn.Module, state: dict[str, Tensor], x: Tensor, cotangents: list[Any]) -> tuple[list[Tensor], list[Tensor]]:
    """The results, and the gradients of input and parameters; buffers are updated in `state`."""
    outs = flat(torch.func.functional_call(module, state, (x,)))
    leaves = [x, *(t for t in state.values() if t.requires_grad)]
    floats = [out for out in outs if out.requires_grad]
    torch.autograd.backward(floats, cotangents[: len(floats)] if cotangents else [torch.ones_like(out) for out in floats])
    return outs, [leaf.grad for leaf in leaves if leaf.grad is not None]


@pytest.mark.parametrize("mesh", ["2", "3", "2x2"])
@pytest.mark.parametrize("name", MODULES)
def test_modules_are_those_of_one_device(name: str, mesh: str) -> None:
    torch.manual_seed(0)
    make, x = MODULES[name]
    module = make()
    state = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    dense = {key: t.detach().clone().requires_grad_(t.requires_grad) for key, t in state.items()}
    outs = flat(torch.func.functional_call(module, dense, (x,)))
    shapes = [out.shape for out in outs if out.requires_grad or out.is_floating_point()]
    cotangents = [filled(*shape) for shape in shapes]
    dense = {key: t.detach().clone().requires_grad_(t.requires_grad) for key, t in state.items()}
    want, grads = run(module, dense, x.clone().requires_grad_(), cotangents)
    counters = {key for key, t in state.items() if t.ndim == 0}
    tensors = [x, *(t.detach() for key, t in state.items() if key not in counters)]
    for placements in placements_of(sample(module, *tensors), MESHES[mesh], 3, seed=len(name)):
        spread = [distributed(t, MESHES[mesh], p) for t, p in zip(tensors, placements, strict=True)]
        rest = iter(spread[1:])
        placed = {k: t.clone() if k in counters else next(rest).requires_grad_(t.requires_grad) for k, t in state.items()}
        about = f"{name} of {[repr(one.layout) for one in spread]}"
        whole = [distributed(c, MESHES[mesh], [Replicate()] * MESHES[mesh].ndim) for c in cotangents]
        got, found = run(module, placed, spread[0].requires_grad_(), whole)
        for one, other in zip(got, want, strict=True):
            equal(one.detach(), other.detach(), about)
        for one, other in zip(found, grads, strict=True):
            torch.testing.assert_close(one.full_tensor(), other, atol=1e-4, rtol=1e-4, msg=lambda m, a=about: f"{a}\n{m}")
        for key, t in placed.items():
            if not t.requires_grad:
                equal(t, dense[key], f"{key} after {about}")


#: A function of [4, 6, 8, 12] shard at a dim, and the collectives it may make.
MOVES: dict[str, tuple[Callable[[Any], Any], int, dict[str, int]]] = {
    "max_pool2d, batch": (lambda x: F.max_pool2d(x, 3, 1, 1), 0, {}),
    "max_pool2d, channels": (lambda x: F.max_pool2d(x, 3, 1, 1), 1, {}),
    "max_pool2d, windows": (lambda x: F.max_pool2d(x, 2, return_indices=True), 2, {}),
    "max_pool2d, windows across borders": (lambda x: F.max_pool2d(x, 3), 2, {"p2p": 1}),
    "max_pool2d, windows that overlap": (lambda x: F.max_pool2d(x, 3, 1), 2, {"p2p": 1}),
    "avg_pool2d, windows": (lambda x: F.avg_pool2d(x, 2), 3, {}),
    "adaptive_avg_pool2d": (lambda x: F.adaptive_avg_pool2d(x, 3), 3, {"all_to_all": 1}),
    "conv2d, batch": (lambda x: F.conv2d(x, filled(3, 6, 3, 3), filled(3)), 0, {}),
    "conv2d, channels": (lambda x: F.conv2d(x, filled(3, 6, 3, 3), filled(3)), 1, {}),
    "conv2d of each channel": (lambda x: F.conv2d(x, filled(6, 1, 3, 3), groups=6), 1, {}),
    "conv2d, plane": (lambda x: F.conv2d(x, filled(3, 6, 3, 3)), 2, {"p2p": 1}),
    "pad": (lambda x: F.pad(x, (1, 2, -1, 3)), 2, {}),
    "interpolate": (lambda x: F.interpolate(x, scale_factor=2), 1, {}),
    "unfold, channels": (lambda x: F.unfold(x, 2), 1, {}),
    "fold, batch": (lambda x: F.fold(x.flatten(2).repeat(1, 2, 1), (9, 13), 2), 0, {}),
    "grid_sample, batch": (lambda x: F.grid_sample(x, filled(4, 5, 5, 2), align_corners=True), 0, {}),
    "batch_norm": (lambda x: F.batch_norm(x, None, None, training=True), 0, {"all_reduce": 2}),
    "batch_norm, channels": (lambda x: F.batch_norm(x, None, None, training=True), 1, {}),
    "instance_norm": (F.instance_norm, 0, {}),
}


@pytest.mark.parametrize("name", MOVES)
def test_what_is_moved(name: str) -> None:
    function, dim, counts = MOVES[name]
    x = distributed(filled(4, 6, 8, 12), sw.init_mesh(tp=2), [Shard(dim)])
    with sw.trace_comm() as log:
        function(x)
    assert log.counts() == counts and not log.fallbacks, str(log)


@pytest.mark.parametrize("kind", ["sum", "avg", "max", "min", "product"])
def test_partial_values_pass_where_values_are_only_placed(kind: str) -> None:
    x = filled(2, 3, 4, 4)
    nearest = [lambda t: F.interpolate(t, scale_factor=0.5), lambda t: F.interpolate(t, size=3, mode="nearest-exact")]
    for function in (*nearest, lambda t: F.pad(t, (1, -2)), lambda t: F.unfold(t, 2, stride=2)):
        out = function(distributed(x, MESHES["2"], [Partial(kind)]))
        assert out.placements == (Partial(kind),), repr(out)
        equal(out, function(x), kind)


def test_a_constant_is_not_added_up() -> None:
    x = filled(2, 3)
    for kind, kept in (("sum", False), ("product", False), ("avg", True), ("max", True)):
        out = F.pad(distributed(x, MESHES["2"], [Partial(kind)]), (1, 1), value=3)
        assert (out.placements == (Partial(kind),)) is kept, repr(out)
        equal(out, F.pad(x, (1, 1), value=3), kind)
    zeros = F.pad(distributed(x, MESHES["2"], [Partial()]), (1, 1))
    assert zeros.placements == (Partial(),)


def test_averages_are_linear() -> None:
    x = filled(2, 3, 4, 4)
    for function in (lambda t: F.avg_pool2d(t, 3, 1, 1), lambda t: F.adaptive_avg_pool2d(t, 2), lambda t: F.avg_pool2d(t, 2)):
        for dim in (0, 1) if function(x).numel() == x.numel() else (0, 1, 2):
            out = function(distributed(x, MESHES["2x2"], [Partial(), Shard(dim)]))
            assert out.placements[0] == Partial(), repr(out)
            equal(out, function(x), "average")


def test_indices_count_the_whole_plane() -> None:
    x = distributed(filled(1, 1, 8, 8), MESHES["2x2"], [Shard(2), Shard(3)])
    with sw.communication("forbid"):
        values, index = F.max_pool2d(x, 2, return_indices=True)
    assert values.placements == index.placements == (Shard(2), Shard(3))
    restored = F.max_unpool2d(values, index, 2)
    equal(restored, F.max_unpool2d(*F.max_pool2d(filled(1, 1, 8, 8), 2, return_indices=True), 2), "unpool")


def test_synchronized_batch_norm_is_told_apart() -> None:
    x = distributed(filled(4, 3), MESHES["2"], [Shard(0)])
    with pytest.raises(OperatorError) as error:
        aten.batch_norm_stats(x, 1e-5)
    assert str(error.value) == (
        "SyncBatchNorm of f32[4@a, 3] would share the statistics of local batches; those of a DTensor are of the global batch "
        "already: use BatchNorm, without convert_sync_batchnorm"
    )
    module = nn.SyncBatchNorm(3)  # outside a job it is plain batch norm
    assert isinstance(module(x), DTensor)


def test_averages_of_integers_are_rounded_once() -> None:
    x = torch.tensor([[-8, 6], [0, 5]])[None]
    for function in (lambda t: F.avg_pool2d(t, 2), lambda t: F.avg_pool2d(t, 2, 1, divisor_override=-2)):
        equal(function(distributed(x, MESHES["2"], [Partial()])), function(x), "average")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("function", [F.conv2d, F.conv_transpose2d, F.conv3d], ids=lambda function: function.__name__)
def test_memory_formats_of_convolutions_are_those_of_one_device(function: Any, dtype: torch.dtype) -> None:
    dims, mesh = 3 if function is F.conv3d else 2, sw.init_mesh(dp=2)
    last = torch.channels_last if dims == 2 else torch.channels_last_3d
    x, weight = filled(4, 4, *[5] * dims).to(dtype), filled(4, 4, *[3] * dims).to(dtype)

    def run(x: Any, weight: Any) -> list[Any]:
        x, weight = x.requires_grad_(), weight.requires_grad_()
        y = function(x, weight).relu()
        return [y, *torch.autograd.grad(y.sum(), (x, weight))]

    for one, other in [(x, weight), (x.to(memory_format=last), weight), (x, weight.to(memory_format=last))]:
        want = run(one.detach().clone(), other.detach().clone())
        for cut, cut_weight in [(Shard(0), Replicate()), (Replicate(), Shard(0)), (Shard(2), Replicate())]:
            got = run(sw.distribute_tensor(one, mesh, [cut]), sw.distribute_tensor(other, mesh, [cut_weight]))
            for mine, torchs in zip(got, want, strict=True):
                torch.testing.assert_close(mine.full_tensor(), torchs)
                assert mine.stride() == torchs.stride()
