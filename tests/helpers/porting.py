"""Writes docs/porting.md (`python -m tests.helpers.porting`): public names of torch.distributed.tensor beside ours."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import torch.distributed.tensor as peer
from torch.distributed import device_mesh
from torch.distributed.tensor import debug

import shardwise as sw

PAGE = Path(__file__).parents[2] / "docs" / "porting.md"
#: The version of torch whose names the page lists.
VERSION = "2.13"

#: Heading, their owner, ours, what stands before the names, and the names: all public ones, and private ones that programs use.
SECTIONS: list[tuple[str, Any, Any, str, tuple[str, ...]]] = [
    ("torch.distributed.tensor", peer, sw, "", (*peer.__all__, "init_device_mesh", "DeviceMesh", "_StridedShard")),
    ("DTensor", peer.DTensor, sw.DTensor, "DTensor.", ("_local_tensor", "_spec")),
    ("Placements", peer.Placement, sw.Placement, "Placement.", ("is_shard", "is_replicate", "is_partial")),
    (
        "DeviceMesh",
        device_mesh.DeviceMesh,
        sw.Mesh,
        "DeviceMesh.",
        ("__getitem__", "__enter__", "__eq__", "__hash__", "_flatten"),
    ),
    ("torch.distributed.tensor.debug", debug, sw.debug, "debug.", tuple(debug.__all__)),
    ("CommDebugMode", debug.CommDebugMode, sw.debug.CommDebugMode, "CommDebugMode.", ("comm_module_counts",)),
]
#: Ours by another name.
RENAMED = {"DeviceMesh": "Mesh", "_StridedShard": "StridedShard"}
#: Theirs that have no signature to read: how they are called.
WRITTEN = {"Shard": "(dim)", "Replicate": "()", "Partial": "(reduce_op='sum')"}
#: What signatures do not show: how ours differs, or what to do without it.
NOTES = {
    "DTensor": "no `isinstance` between the two classes",
    "distribute_tensor": "a tensor that is no leaf keeps its graph (torch: an error); placements also by axis name, or a "
    "`Layout`",
    "Partial": "also band, bor, bxor; torch's equals it",
    "Shard": "also `sizes`, one per rank; torch's equals it",
    "DeviceMesh": "`sw.Mesh`; made by `init_device_mesh`, `sw.init_mesh` or `sw.Mesh.from_torch`; a `DeviceMesh` is taken "
    "wherever a mesh is",
    "init_device_mesh": "without a job the ranks are simulated",
    "_StridedShard": "`sw.StridedShard`: `split_factor`, or the factors of the dim; torch's is taken, and is not equal to it",
    "from_local": "`run_check` lets shapes differ, compares dtype, device and requires_grad, and broadcasts nothing; without "
    "it shapes are compared with the next communication, once for each line of the program",
    "redistribute": "no placements means replicated (torch: an error); also to Partial and to another mesh",
    "to_local": "of a Parameter: a plain tensor; simulated: a `Bundle` of one tensor per rank",
    "device_mesh": "a `sw.Mesh`",
    "placements": "`StridedShard` where a `Shard` cannot say it; given back they make the same tensor",
    "_spec": "`x.layout`",
    "is_shard": "True of a `StridedShard` too",
    "get_rank": "simulated: an error, as no one rank asks",
    "get_local_rank": "simulated: an error, as no one rank asks",
    "get_coordinate": "simulated: an error, as no one rank asks",
    "get_group": "simulated: an error",
    "get_all_groups": "simulated: an error",
    "from_group": "`sw.init_mesh(ranks=…)`",
    "size": "axes also by name",
    "__eq__": "`mesh == device_mesh` holds, `device_mesh == mesh` does not: torch's class decides that",
    "__hash__": "not that of the `DeviceMesh`",
    "_flatten": "the axis is called by the names of its axes",
    "CommDebugMode": "counts communication of Shardwise, not what a program calls by itself",
    "get_comm_counts": "messages are counted as 'p2p'",
    "generate_comm_debug_tracing_table": "a line for each collective, not for each module",
    "generate_json_dump": "`mode.log.records`",
    "log_comm_debug_tracing_table_to_file": "`str(mode.log)`",
    "get_parameter_info": "`p.layout` of each parameter",
    "get_sharding_info": "`p.placements` of each parameter",
    "comm_module_counts": "`mode.log.records` have the operator and the line of each collective",
    "visualize_sharding": "one picture in plain text, also with `use_rich`",
}


def public(owner: Any, names: tuple[str, ...]) -> list[str]:
    """The names of a section: those that are listed, and of a class all public ones."""
    found = [name for name in vars(owner) if not name.startswith("_")] if isinstance(owner, type) else []
    return list(dict.fromkeys([*found, *names]))


def parameters(value: Any) -> dict[str, inspect.Parameter] | None:
    """The parameters of what can be called with some; None of anything else."""
    if not callable(value) and not isinstance(value, staticmethod):
        return None
    try:
        found = inspect.signature(value).parameters
    except ValueError:
        return None
    return {name: told for name, told in found.items() if name != "self"}


def compared(name: str, theirs: Any, ours: Any) -> tuple[str, str]:
    """Whether a name is the same, and how it differs."""
    said = [NOTES[name]] if NOTES.get(name) else []
    if ours is None:
        return "not there", "; ".join(said)
    have, want = parameters(ours), parameters(theirs)
    if name.startswith("__") or (isinstance(theirs, type) and name != "CommDebugMode"):
        have = want = None
    if have is None or want is None:
        return ("differs" if said else "same"), "; ".join(said)
    missing = [word for word in want if word not in have]
    others = [word for word in want if word in have and _default(want[word]) != _default(have[word])]
    more = [word for word in have if word not in want]
    texts = [f"without `{word}`" for word in missing]
    order = [word for word in _positional(want) if word in have]
    if _positional(have)[: len(order)] != order:
        texts.append("arguments in another order")
    texts += [f"`{word}={_default(have[word])}` (torch: `{_default(want[word])}`)" for word in others]
    texts += [f"also `{word}`" for word in more]
    differs = bool(len(texts) > len(more) or said)
    return ("differs" if differs else "same"), "; ".join([*texts, *said])


def _positional(given: dict[str, inspect.Parameter]) -> list[str]:
    return [name for name, told in given.items() if told.kind is not inspect.Parameter.KEYWORD_ONLY]


def _default(parameter: inspect.Parameter) -> str:
    return "" if parameter.default is inspect.Parameter.empty else repr(parameter.default)


def _attributes(owner: Any) -> dict[str, Any]:
    """Attributes that only instances have."""
    return getattr(owner, "__annotations__", {}) if isinstance(owner, type) else {}


def page() -> str:
    """The text of docs/porting.md."""
    lines = [HEAD]
    for heading, theirs, ours, prefix, names in SECTIONS:
        lines += [f"\n## {heading}\n", "| name | | how |", "|---|---|---|"]
        for name in public(theirs, names):
            found = getattr(ours, RENAMED.get(name, name), "an attribute" if name in _attributes(ours) else None)
            verdict, how = compared(name, getattr(theirs, name, None), found)
            lines.append(f"| `{prefix}{name}{WRITTEN.get(name, '') if not prefix else ''}` | {verdict} | {how} |")
    return "\n".join(lines) + "\n"


HEAD = f"""# Porting from torch.distributed.tensor

Every public name of torch {VERSION}, and private names that programs use, beside ours. "Same" means that a call with torch's
arguments is a call of ours; "also" names what ours takes besides. `python -m tests.helpers.porting` writes the table from both
signatures, and a test compares it with them. What signatures do not show is tested in `tests/processes/tensor/test_porting.py`,
`tests/simulated/tensor/test_porting.py` and `tests/simulated/layouts/test_placement.py`.

```python
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor  # before
from shardwise import DTensor, Partial, Replicate, Shard, distribute_tensor  # after
```

Functions of torch that make its own DTensors (`fully_shard`, `parallelize_module`) take `mesh.to_torch()`."""

if __name__ == "__main__":
    PAGE.write_text(page())
