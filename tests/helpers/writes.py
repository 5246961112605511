"""Calls of every operator of torch that writes to an argument, for comparison with one device.

`writers()` are the overloads; `calls()` gives each the arguments of its functional form: recorded while torch's database of
operators runs, or made here. `compared` runs one with plain tensors and DTensors among what it writes to. `out_of_database`
does the same with the `out=` of torch's own functions, which are often made of several operators.
"""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

import shardwise as sw
from shardwise import Replicate, Shard
from shardwise.base.schema import functional_form, schema_of
from shardwise.verify.spread import difference, spread

aten = torch.ops.aten
MESH = sw.Mesh(("a",), (2,), range(2), "cpu", "simulated")
#: Most elements of a recorded call, and how many calls of a form are kept.
LARGEST, KEPT = 2000, 2


def distributed(x: Tensor, dim: int | None) -> Any:
    """A DTensor sharded along a dim, if it has it."""
    return spread(x, MESH, [Replicate() if dim is None or not x.ndim else Shard(dim % x.ndim)])


#: How written tensors are given, by their number.
KINDS: dict[str, Callable[[Tensor, int], Any]] = {
    "cut": lambda x, i: distributed(x, 0),
    "shard last": lambda x, i: distributed(x, -1),
    "replicated": lambda x, i: distributed(x, None),
    "plain": lambda x, i: x.clone(),
    "shard and plain": lambda x, i: distributed(x, 0) if i % 2 == 0 else x.clone(),
    "plain and shard": lambda x, i: distributed(x, 0) if i % 2 else x.clone(),
}


def writers() -> list[Any]:
    """Every overload of aten that writes to an argument."""
    found = []
    for full in sorted(torch._C._dispatch_get_all_op_names()):
        name, _, overload = full.removeprefix("aten::").partition(".")
        op = getattr(getattr(aten, name, None), overload or "default", None) if full.startswith("aten::") else None
        if op is not None and schema_of(op).written:
            found.append(op)
    return found


def several(op: Any) -> bool:
    """Whether an operator writes to more than one tensor."""
    facts = schema_of(op)
    return len(facts.written) > 1 or any("List" in str(a.type) for a in op._schema.arguments if a.name in facts.written)


@dataclass(frozen=True)
class Call:
    """An operator and what it reads: the arguments of its functional form, by name."""

    op: Any
    inputs: dict[str, Any]

    def __str__(self) -> str:
        return str(self.op)


class Recorder(TorchDispatchMode):
    """Notes calls of some operators, with copies of their arguments."""

    def __init__(self, wanted: set[Any]) -> None:
        super().__init__()
        self.noted: dict[Any, list[dict[str, Any]]] = {op: [] for op in wanted}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = schema_of(func).named(args, kwargs or {})
        held = self.noted.get(func)
        size = sum(x.numel() for x in tree_leaves(given) if isinstance(x, Tensor))
        if held is not None and len(held) < KEPT and size <= LARGEST:
            held.append(tree_map_only(Tensor, lambda x: x.detach().resolve_conj().resolve_neg().clone(), given))
        return func(*args, **(kwargs or {}))


def recorded(wanted: set[Any], names: Callable[[str], bool] = lambda name: True) -> dict[Any, list[dict[str, Any]]]:
    """Calls of some operators that samples of torch's database make, forward and backward."""
    from shardwise.verify import samples

    recorder = Recorder(wanted)
    several = [op for name, op in samples.operators().items() if names(name)]
    samples.run_under(recorder, several, (torch.float32, torch.int64), 3)
    return recorder.noted


def calls(ops: list[Any], names: Callable[[str], bool] = lambda name: True) -> Iterator[Call]:
    """Calls of operators, recorded and made."""
    forms = {op: functional_form(op) for op in ops}
    found = recorded({form for form in forms.values() if form is not None}, names)
    for op, form in forms.items():
        for inputs in [*found.get(form, []), *made(op)]:
            yield Call(op, inputs)


def runs(call: Call) -> bool:
    """Whether a call runs on one device."""
    try:
        _run(call, lambda x, i: x.clone(), lambda x: x.clone())
    except Exception:  # no kernel here, or arguments of another overload
        return False
    return True


def compared(call: Call, read: int | None, kind: str) -> str | None:
    """How a call, its other arguments sharded along dim `read`, differs from one device; None where it does not."""
    facts = schema_of(call.op)
    want = _run(call, lambda x, i: x.clone(), lambda x: x.clone())
    got = _run(call, KINDS[kind], lambda x: distributed(x, read))
    for name in facts.written:
        text = difference(got[1].get(name), want[1].get(name))
        if text is not None:
            return f"{name}: {text}"
    new = [i for i, name in enumerate(facts.returns) if name is None]
    results, wanted = (list(r[0]) if isinstance(r[0], tuple | list) else [r[0]] for r in (got, want))
    for i, name in enumerate(facts.returns):
        if name is not None and results[i] is not got[1][name]:
            return f"result {i} is not the argument {name}"
    return difference([results[i] for i in new], [wanted[i] for i in new])


def _run(call: Call, written: Callable[[Tensor, int], Any], read: Callable[[Tensor], Any]) -> tuple[Any, dict[str, Any]]:
    """The results, and all arguments as they are after the call."""
    facts = schema_of(call.op)
    given = {name: value for name, value in call.inputs.items() if name in facts.names}
    if facts.outs:
        form = functional_form(call.op)
        outs = form(**tree_map_only(Tensor, torch.clone, call.inputs))
        given |= dict(zip(facts.outs, (outs,) if len(schema_of(form).returns) == 1 else outs, strict=False))
        for name in facts.outs:
            given[name] = tree_map_only(
                Tensor, lambda x: torch.full_like(x, 77 if x.dtype is not torch.bool else 1), given[name]
            )
    number = 0

    def placed(value: Any, name: str) -> Any:
        nonlocal number
        if isinstance(value, list | tuple):
            return [placed(item, name) for item in value]
        if not isinstance(value, Tensor):
            return value
        if name not in facts.written:
            return read(value)
        number += 1
        return written(value, number - 1)

    given = {name: placed(value, name) for name, value in given.items()}
    with torch.no_grad():
        return call.op(**given), given


# ── `out=` of functions of the database ───────────────────────────────────────────────────────────────────────────────


def with_out() -> list[str]:
    """The functions of the database that take `out=`."""
    from shardwise.verify import samples

    return [name for name, op in samples.operators().items() if op.supports_out and not samples.uninitialised(name)]


def out_of_database(name: str, limit: int) -> list[str]:
    """How samples of a function differ from one device in what they write to `out=`."""
    from shardwise.verify import samples

    texts = []
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        for case in samples.chosen(samples.cases(samples.operators()[name], None, limit), limit):
            try:
                found = case.run(case.tensors)
                want = tree_map_only(Tensor, torch.full_like, found, fill_value=1)
                given = case.op(*case.args, **case.kwargs, out=want)
            except Exception:  # not on one device either
                continue
            if samples.is_random(case):
                continue
            outs = {kind for i, kind in enumerate(KINDS) if i < 4 or isinstance(found, tuple | list)}
            for read, kind in itertools.product((0, -1), sorted(outs)):
                text = _with_out(case, found, want, (given is want, read, kind))
                texts += [f"{name}, read {read}, written {kind}: {text}"] if text is not None else []
    return texts


def _with_out(case: Any, found: Any, want: Any, how: tuple[bool, int, str]) -> str | None:
    returned, read, kind = how
    numbers = iter(range(100))
    outs = tree_map_only(Tensor, lambda x: KINDS[kind](torch.full_like(x, 1), next(numbers)), found)
    args, kwargs = case.given([distributed(x, read) for x in case.tensors])
    try:
        got = case.op(*args, **kwargs, out=outs)
    except Exception as error:
        return repr(error)
    if returned and any(one is not other for one, other in zip(tree_leaves(got), tree_leaves(outs), strict=True)):
        return "gives back another tensor than out="
    return difference(outs, want)


# ── calls that no sample makes ────────────────────────────────────────────────────────────────────────────────────────


def made(op: Any) -> list[dict[str, Any]]:
    """Calls of an operator that samples of the database do not make."""
    name = op._schema.name.removeprefix("aten::")
    make = MADE.get(name.rstrip("_"))
    if make is not None:
        given = schema_of(op).named(make(), {})
        needed = [a.name for a in op._schema.arguments if not a.has_default_value() and not a.is_out]
        return [given] if set(needed) == set(given) & set(needed) else []
    return [_lists(op)] if name.startswith(("_foreach_", "_fused_ad", "_fused_sgd")) else []


def _lists(op: Any) -> dict[str, Any]:
    """Arguments of an operator on lists, by their types."""
    generator = torch.Generator().manual_seed(0)
    given: dict[str, Any] = {}
    for argument in op._schema.arguments:
        kind, name = str(argument.type), argument.name
        if argument.alias_info is not None and argument.alias_info.is_write and argument.is_out:
            continue
        if name == "state_steps":
            given[name] = [torch.tensor(2.0), torch.tensor(3.0)]
        elif kind == "List[Tensor]" and not (name == "tensors" and given):
            given[name] = [torch.rand(n, generator=generator) + 0.5 for n in ((4, 3), (5,))]
        elif kind == "Tensor":
            given[name] = torch.tensor([0.5, 0.25]) if name == "scalars" else torch.tensor(0.5)
        elif kind == "List[number]":
            given[name] = [0.5, 0.25]
        elif kind in ("number", "float") and not argument.has_default_value():
            given[name] = 0.5
        elif kind == "bool" and not argument.has_default_value():
            given[name] = False
    return given


def _x(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def _norm(*more: Any) -> Any:
    return lambda: (_x(4, 3, 5), _x(3, seed=1), _x(3, seed=2), _x(3, seed=3), _x(3, seed=4).exp(), *more)


def _lstm() -> Any:
    return (_x(4, 20), _x(4, 20, seed=1), _x(4, 5, seed=2), _x(20, seed=3), _x(20, seed=4))


MADE: dict[str, Callable[[], tuple[Any, ...]]] = {
    "_amp_foreach_non_finite_check_and_unscale": lambda: (
        [_x(4, 3), torch.tensor([1.0, torch.inf, 0.0, 2.0])],
        torch.zeros(1),
        torch.tensor([0.5]),
    ),
    "_amp_update_scale": lambda: (torch.tensor([8.0]), torch.tensor([1], dtype=torch.int32), torch.tensor([0.0]), 2.0, 0.5, 2),
    "_aminmax": lambda: (_x(4, 3),),
    "_batch_norm_no_update": _norm(0.1, 1e-5),
    "_batch_norm_with_update": _norm(0.1, 1e-5),
    "_native_batch_norm_legit": _norm(True, 0.1, 1e-5),
    "_native_batch_norm_legit_no_training": _norm(0.1, 1e-5),
    "native_batch_norm": _norm(True, 0.1, 1e-5),
    "native_batch_norm_backward": lambda: (
        *(_x(4, 3, 5), _x(4, 3, 5, seed=1), _x(3), _x(3), _x(3).exp(), _x(3, seed=2), _x(3, seed=3).exp()),
        *(True, 1e-5, [True, True, True]),
    ),
    "batch_norm_update_stats": lambda: (_x(4, 3, 5), _x(3), _x(3, seed=1).exp(), 0.1),
    "fake_quantize_per_tensor_affine_cachemask": lambda: (_x(4, 3), 0.1, 0, -3, 4),
    "fake_quantize_per_channel_affine_cachemask": lambda: (
        _x(4, 3),
        torch.full((4,), 0.1),
        torch.zeros(4, dtype=torch.int32),
        0,
        -3,
        4,
    ),
    "_fused_moving_avg_obs_fq_helper": lambda: (
        _x(4, 3),
        torch.ones(1, dtype=torch.int64),
        torch.ones(1, dtype=torch.int64),
        torch.tensor([-1.0]),
        torch.tensor([1.0]),
        torch.tensor([0.1]),
        torch.tensor([0], dtype=torch.int32),
        0.1,
        -3,
        4,
        0,
    ),
    "histogram": lambda: (_x(12), torch.tensor([-3.0, 0.0, 3.0])),
    "_thnn_fused_lstm_cell": _lstm,
    "_unique": lambda: (torch.tensor([3, 1, 3, 2]), True, True),
    "unique_dim": lambda: (torch.tensor([[3, 1], [3, 1], [2, 2]]), 0, True, True, True),
    "unique_dim_consecutive": lambda: (torch.tensor([[3, 1], [3, 1], [2, 2]]), 0, True, True),
    "split_copy": lambda: (_x(4, 3), 2),
    "unsafe_split_with_sizes": lambda: (_x(4, 3), [1, 3]),
    "_weight_norm_interface": lambda: (_x(4, 3), _x(4, 1, seed=1)),
    "_pack_padded_sequence": lambda: (_x(4, 3, 2), torch.tensor([4, 3, 1]), False),
}
