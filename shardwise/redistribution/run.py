"""Runs plans: takes a local value and a Plan, gives the local value of the plan's target.

One function for each kind of step, all through the transport. Where a program is traced that all ranks will run, the steps in
which ranks differ become `shardwise::` operators: they hold layouts as text, and find out when they run which rank they are on.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple
from urllib.parse import unquote

import torch
from torch import SymInt, Tensor

from .._torch.compiler import keep_alive
from .._torch.groups import AsyncTensor
from .._torch.tensors import collectives, is_alias
from ..base.caches import memo
from ..comm import PerRank, Transport, transport
from ..comm.interception import watched
from ..comm.policy import check
from ..comm.tracing import current, steering, tracing
from ..comm.transport import check_shards
from ..layouts.layout import Layout
from ..layouts.mesh import Mesh, quote
from ..layouts.text import Form, form_of
from ..planning.plan import Plan, plan
from ..planning.step import Step
from .between_meshes import transfer
from .shards import pack
from .step_kernels import divided, equal_counts, exchanging, filled, local_work, ranks, reduction, varying


def move(local: Tensor, have: Layout, want: Layout | Plan, operator: str = "", max_bytes: int | None = None) -> Tensor:
    """The local value of `want`, from that of `have`; `local` itself where nothing has to change.

    `operator` is on whose behalf data moves: what the user asked for, and gradients, are not refused. A plan in the place of a
    layout is not either: `permit` was asked about all plans of its operator. `max_bytes` bounds what a rank holds on the way.
    """
    if have is want:
        return local
    steps = want if isinstance(want, Plan) else plan(have, want, max_bytes)
    if steps is not want and operator and operator != "gradient" and steps.collectives:
        check(operator, steps.bytes, lambda: f"{have} → {want}")
    operator, mesh, shape = operator or "redistribute", steps.have.mesh, have.shape
    world, parts = transport(mesh, operator), (part for layout in steps.layouts for dim in form_of(layout).dims for part in dim)
    if is_symbolic(shape) and any(part.sizes is not None for part in parts):
        shape = torch.Size(int(size) for size in shape)  # shards of given sizes are of one size only
    if isinstance(local, AsyncTensor):
        local = local.trigger_wait()
    by = Running(world, world.traced(local), shape)
    if by.traced:
        current()  # torch is patched for a trace that communicates
        if steering.get().whole_moves and max_bytes is None:  # such an operator does not say how much it may hold
            return torch.ops.shardwise.move(local, shape, form_of(steps.have).text, form_of(steps.want).text, operator)
    elif steps.collectives:
        for line, given, shards in world.assumed(mesh):
            check_shards(world.shapes(given, mesh), shards, mesh.root, line)
        return watched(operator, (steps.have, steps.want), local, lambda: _run(local, steps, by))
    return _run(local, steps, by)


def permit(plans: Sequence[Plan], inputs: Sequence[Layout], operator: str) -> None:
    """Warn or raise, before any of an operator's moves, as `communication` was told."""
    sent = [steps for steps in plans if steps.collectives]

    def describe() -> str:
        needed = ", ".join(f"{steps.have} → {steps.want}" for steps in sent)
        return f"it takes {', '.join(map(repr, inputs))} and needs {needed}"

    if sent:
        check(operator, sum([steps.bytes for steps in sent]), describe)


def _run(local: Tensor, steps: Plan, by: Running) -> Tensor:
    for step in steps.steps:
        local = _RUN[step.kind](local, step, by)
    return local


class Running(NamedTuple):
    """Through which transport steps run, whether they are traced, and the shape of the global tensor."""

    transport: Transport
    traced: bool
    shape: Sequence[int]


def is_symbolic(shape: Sequence[int]) -> bool:
    """Whether a size is a symbol of a trace."""
    return any(isinstance(size, SymInt) for size in shape)


def _part(part: str, x: Tensor, step: Step, by: Running) -> Tensor:
    """Run what a step does with one rank's tensor before or after its communication."""
    kernel = local_work(step)[part]
    if not kernel:
        return x
    if by.traced and (is_symbolic(by.shape) or part in varying(step)):
        return torch.ops.shardwise.step(x, by.shape, write(step), part)
    return by.transport.each(kernel[0], step.before.mesh, x, *kernel[1:])


# ── one function for each kind ────────────────────────────────────────────────────────────────────────────────────────


def _all_reduce(x: Tensor, step: Step, by: Running) -> Tensor:
    kind, scale = reduction(step)
    return divided(by.transport.all_reduce(x, kind, step.before.mesh, step.axes), scale)


def _reduce_scatter(x: Tensor, step: Step, by: Running) -> Tensor:
    kind, scale = reduction(step)
    part = by.transport.reduce_scatter(_part("before", x, step, by), kind, step.before.mesh, step.axes)
    return divided(_part("after", part, step, by), scale)


def _all_gather(x: Tensor, step: Step, by: Running) -> Tensor:
    whole = by.transport.all_gather(_part("before", x, step, by), step.before.mesh, step.axes)
    return _part("after", whole, step, by)


def _all_to_all(x: Tensor, step: Step, by: Running) -> Tensor:
    if not local_work(step) or (by.traced and not step.before.even):
        return _exchange(x, step, by)
    counts = (x.numel() // step.ranks,) * step.ranks if by.traced else equal_counts(step)
    received = by.transport.all_to_all(_part("before", x, step, by), counts, counts, step.before.mesh, step.axes)
    return _part("after", received, step, by)


def _exchange(x: Tensor, step: Step, by: Running) -> Tensor:
    """Every rank sends to every other what that one gets from it; what it has itself does not travel."""
    if by.traced:
        return wait_tensor(torch.ops.shardwise.exchange(x, by.shape, write(step)))
    if step.kind == "transfer":
        return transfer(x, step, by.transport)
    mesh, how = step.before.mesh, exchanging(step)
    packed = by.transport.each(pack, mesh, x, how.size, how.going)
    received = by.transport.all_to_all(packed, how.send, how.receive, mesh, step.axes)
    return by.transport.each(filled, mesh, x, received, how.shape, how.coming, how.own)


def _scale(x: Tensor, step: Step, by: Running) -> Tensor:
    """A partial average is over as many times the value as it has ranks."""
    up, down = ranks("avg", step.after, step.axes), ranks("avg", step.before, step.axes)
    return divided(x if up == 1 else x * up, down)


_RUN: dict[str, Callable[[Tensor, Step, Running], Tensor]] = {
    "all_reduce": _all_reduce,
    "reduce_scatter": _reduce_scatter,
    "all_gather": _all_gather,
    "all_to_all": _all_to_all,
    **dict.fromkeys(("permute", "exchange", "transfer"), _exchange),
    **dict.fromkeys(("take", "split", "embed"), partial(_part, "alone")),
    "scale": _scale,
}


# ── steps as operators ────────────────────────────────────────────────────────────────────────────────────────────────


def write(step: Step) -> str:
    """A step as text without sizes; `read` reads it in any process."""
    return " | ".join([step.kind, ",".join(map(quote, step.axes)), form_of(step.before).text, form_of(step.after).text])


@memo("steps read", limit=4096)
def read(text: str, shape: tuple[int, ...], dtype: torch.dtype) -> Step:
    """The step that a text tells, of a tensor of a shape."""
    kind, axes, *forms = text.split(" | ")
    names = tuple(map(unquote, axes.split(","))) if axes else ()
    return Step(kind, names, *(Form.read(form).layout(shape, dtype) for form in forms))


torch.library.define("shardwise::move", "(Tensor x, SymInt[] shape, str have, str want, str operator) -> Tensor")
torch.library.define("shardwise::step", "(Tensor x, SymInt[] shape, str step, str part) -> Tensor")
torch.library.define("shardwise::exchange", "(Tensor x, SymInt[] shape, str step) -> Tensor")


def _fresh(out: Tensor, x: Tensor) -> Tensor:
    """What an operator may give back: nothing that shares memory with what it took. Below autograd no view says it is one."""
    out = out.contiguous()
    return out.clone() if is_alias(out, x) else out


def _own(out: Tensor, x: Tensor, before: Mesh, after: Mesh) -> Tensor:
    if before is not after:
        return out.contiguous().clone()
    return transport(after).each(_fresh, after, out, x)


def _move(x: Tensor, shape: Sequence[int], have: str, want: str, operator: str) -> Tensor:
    before, after = (Form.read(form).layout(shape, x.dtype) for form in (have, want))
    with tracing(whole_moves=False):
        return _own(move(x, before, plan(before, after), operator), x, before.mesh, after.mesh)


def _step(x: Tensor, shape: Sequence[int], text: str, part: str) -> Tensor:
    step = read(text, tuple(shape), x.dtype)
    kernel, mesh = local_work(step)[part], step.before.mesh
    return _own(transport(mesh).each(kernel[0], mesh, x, *kernel[1:]), x, mesh, mesh)


def _exchange_now(x: Tensor, shape: Sequence[int], text: str) -> Tensor:
    step = read(text, tuple(shape), x.dtype)
    by = Running(transport(step.before.mesh), False, step.before.shape)
    return _own(_RUN[step.kind](x, step, by), x, step.before.mesh, step.after.mesh)


# What they give, where only shapes are asked for. Sizes that are symbols are those of even shards.


def _new_local(x: Tensor, shape: Sequence[int], form: str) -> Tensor:
    layout = Form.read(form).layout(shape, x.dtype)
    return transport(layout.mesh).each(x.new_empty, layout.mesh, PerRank(layout.local_shape))


def _step_fake(x: Tensor, shape: Sequence[int], text: str, part: str) -> Tensor:
    kind, _, _, after = text.split(" | ")
    if part != "before":
        return _new_local(x, shape, after)
    if kind == "all_to_all":
        return x.new_empty((x.numel(),))
    layout = Form.read(after).layout(shape, x.dtype)
    if kind != "reduce_scatter" or not layout.even:  # shards of different shapes lie flat, each in the room of the largest
        return _step(x, shape, text, part)
    first, *rest = layout.local_shape(0)  # one shard behind the other
    return x.new_empty((x.numel() // max(math.prod((first, *rest)), 1) * first, *rest))


# What one rank does not need another one may: no rank leaves out a communication as dead code. Inductor looks for waits only.
keep_alive(torch.ops.shardwise.move.default)
keep_alive(torch.ops.shardwise.exchange.default)
wait_tensor = collectives.wait_tensor.default

torch.library.impl("shardwise::move", "CompositeExplicitAutograd", _move)
torch.library.register_fake("shardwise::move", lambda x, shape, have, want, operator: _new_local(x, shape, want))
torch.library.impl("shardwise::step", "CompositeExplicitAutograd", _step)
torch.library.register_fake("shardwise::step", _step_fake)
torch.library.impl("shardwise::exchange", "CompositeExplicitAutograd", _exchange_now)
torch.library.register_fake("shardwise::exchange", lambda x, shape, text: _new_local(x, shape, text.split(" | ")[3]))
