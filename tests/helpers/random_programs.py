"""Random programs, as data that hypothesis draws: steps over a growing pool of values, on random layouts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from hypothesis import strategies as st
from torch import Tensor

from shardwise import Partial, Replicate, Shard

MESHES = [{"a": 2}, {"a": 3}, {"a": 4}, {"a": 2, "b": 2}, {"a": 3, "b": 2}, {"a": 2, "b": 2, "c": 2}]

#: Meshes of so many ranks.
MESHES_OF: dict[int, list[dict[str, int]]] = {2: [{"a": 2}], 4: [{"a": 4}, {"a": 2, "b": 2}]}

Draw = Callable[..., Any]
Step = Callable[..., Tensor]


def bounded(x: Tensor) -> Tensor:
    """Keeps values of a long product near 1, so that comparisons stay meaningful."""
    return torch.tanh(x)


def unary(draw: Draw, pool: list[Tensor]) -> tuple[str, Step, list[int]]:
    names = ["neg", "exp", "sin", "sigmoid", "relu", "abs", "square", "softmax", "log_softmax", "cumsum", "layer_norm"]
    name = draw(st.sampled_from(names))
    i = draw(st.integers(0, len(pool) - 1))
    dim = draw(st.integers(0, max(pool[i].ndim - 1, 0)))
    if name == "layer_norm":
        shape = pool[i].shape[dim:] if pool[i].ndim else ()
        if not shape or 0 in shape:
            return "tanh", torch.tanh, [i]
        return f"layer_norm({list(shape)})", lambda x: torch.layer_norm(x, shape), [i]
    if name in ("softmax", "log_softmax", "cumsum"):
        if not pool[i].ndim:
            return "tanh", torch.tanh, [i]
        return f"{name}(dim={dim})", lambda x: getattr(torch, name)(x, dim), [i]
    return name, lambda x: getattr(torch, name)(bounded(x)), [i]


def binary(draw: Draw, pool: list[Tensor]) -> tuple[str, Step, list[int]]:
    name = draw(st.sampled_from(["add", "sub", "mul", "maximum", "div", "where", "lerp"]))
    i = draw(st.integers(0, len(pool) - 1))
    fits = [j for j, other in enumerate(pool) if _broadcasts(pool[i].shape, other.shape)]
    j = draw(st.sampled_from(fits))
    steps: dict[str, Step] = {
        "div": lambda x, y: x / (2 + torch.sigmoid(y)),
        "where": lambda x, y: torch.where(x > 0.1, x, y * 2.0),
        "lerp": lambda x, y: torch.lerp(x.expand(torch.broadcast_shapes(x.shape, y.shape)), y, 0.3),
    }
    return name, steps.get(name, lambda x, y: getattr(torch, name)(x, y)), [i, j]


def _broadcasts(a: Any, b: Any) -> bool:
    return all(m == n or 1 in (m, n) for m, n in zip(reversed(a), reversed(b), strict=False))


def product(draw: Draw, pool: list[Tensor]) -> tuple[str, Step, list[int]] | None:
    pairs = [
        (i, j)
        for i, x in enumerate(pool)
        for j, y in enumerate(pool)
        if x.ndim >= 1 and y.ndim == 2 and x.shape[-1] == y.shape[0] and x.numel()
    ]
    if not pairs:
        i = draw(st.integers(0, len(pool) - 1))
        if pool[i].ndim != 2:
            return None
        return "x @ x.T", lambda x: bounded(x) @ bounded(x).t(), [i]
    i, j = draw(st.sampled_from(pairs))
    return "matmul", lambda x, y: bounded(x) @ bounded(y), [i, j]


def reduction(draw: Draw, pool: list[Tensor]) -> tuple[str, Step, list[int]] | None:
    i = draw(st.integers(0, len(pool) - 1))
    x = pool[i]
    if not x.ndim or 0 in x.shape:
        return None
    dim, keep = draw(st.integers(0, x.ndim - 1)), draw(st.booleans())
    name = draw(st.sampled_from(["sum", "mean", "amax", "var", "logsumexp", "norm", "prod"]))
    steps: dict[str, Step] = {
        "var": lambda x: torch.var(x, dim, correction=0, keepdim=keep),
        "norm": lambda x: torch.linalg.vector_norm(x + 0.5, 2, dim, keep),
        "prod": lambda x: torch.prod(1 + 0.1 * bounded(x), dim, keep),
    }
    step = steps.get(name, lambda x: getattr(torch, name)(x, dim, keepdim=keep))
    return f"{name}(dim={dim}, keepdim={keep})", step, [i]


def reshaping(draw: Draw, pool: list[Tensor]) -> tuple[str, Step, list[int]] | None:
    i = draw(st.integers(0, len(pool) - 1))
    x = pool[i]
    if not x.ndim:
        return "unsqueeze", lambda x: x.unsqueeze(0), [i]
    a, b = draw(st.integers(0, x.ndim - 1)), draw(st.integers(0, x.ndim - 1))
    low, high = sorted((draw(st.integers(0, x.shape[a])), draw(st.integers(0, x.shape[a]))))
    splits = [n for n in range(1, x.shape[a] + 1) if x.shape[a] % n == 0]
    options: list[tuple[str, Step]] = [
        (f"transpose({a}, {b})", lambda x: x.transpose(a, b)),
        (f"narrow({a}, {low}:{high})", lambda x: x.narrow(a, low, high - low)),
        (f"unsqueeze({a})", lambda x: x.unsqueeze(a)),
        (f"cat(dim={a})", lambda x: torch.cat([x, x.narrow(a, low, high - low)], a)),
        (f"flip({a})", lambda x: x.flip(a)),
    ]
    if x.ndim > 1:
        options.append((f"flatten({min(a, b)}, {max(a, b)})", lambda x: x.flatten(min(a, b), max(a, b))))
    if splits and x.shape[a]:
        n = draw(st.sampled_from(splits))
        options.append((f"unflatten({a}, {n})", lambda x: x.unflatten(a, (n, x.shape[a] // n))))
        index = draw(st.integers(0, x.shape[a] - 1))
        options.append((f"select({a}, {index})", lambda x: x.select(a, index)))
    name, step = draw(st.sampled_from(options))
    return name, step, [i]


KINDS = [unary, unary, binary, binary, product, reduction, reshaping, reshaping]


@st.composite
def programs(
    draw: Draw, meshes: list[dict[str, int]] = MESHES
) -> tuple[dict[str, int], list[Tensor], list[Any], list[tuple[str, Step, list[int]]]]:
    """A mesh, input tensors with a layout each, and steps."""
    mesh = draw(st.sampled_from(meshes))
    inputs, layouts = [], []
    width = draw(st.integers(1, 6))
    for number in range(draw(st.integers(1, 3))):
        shape = draw(st.lists(st.sampled_from([width, 1, 2, 3, 4, 5, 7]), min_size=1, max_size=3))
        generator = torch.Generator().manual_seed(number)
        inputs.append(torch.randn(shape, generator=generator))
        options = [Replicate(), Partial(), *(Shard(d) for d in range(len(shape)))]
        placed = {axis: draw(st.sampled_from(options)) for axis in draw(st.permutations(list(mesh)))}
        layouts.append(placed)
    pool, steps = [x.clone() for x in inputs], []
    for _ in range(draw(st.integers(5, 15))):
        step = draw(st.sampled_from(KINDS))(draw, pool)
        if step is not None:
            value = step[1](*(pool[i] for i in step[2]))
            if value.numel() <= 4096:
                steps.append(step)
                pool.append(value)
    return mesh, inputs, layouts, steps


def run(steps: list[tuple[str, Step, list[int]]], inputs: list[Any]) -> list[Any]:
    """Every value of the program."""
    pool = list(inputs)
    for _, step, sources in steps:
        pool.append(step(*(pool[i] for i in sources)))
    return pool


def describe(mesh: Any, inputs: list[Tensor], layouts: list[Any], steps: list[Any]) -> str:
    lines = [f"mesh {mesh}"]
    lines += [f"v{i} = {list(x.shape)} {p}" for i, (x, p) in enumerate(zip(inputs, layouts, strict=True))]
    lines += [f"v{len(inputs) + i} = {name}({', '.join(f'v{j}' for j in of)})" for i, (name, _, of) in enumerate(steps)]
    return "\n".join(lines)


def same_everywhere(program: Any) -> None:
    """Fail where ranks drew different programs: run, they would wait for one another for ever."""
    texts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(texts, describe(*program))
    assert texts == texts[:1] * len(texts), "ranks drew different programs:\n\n" + "\n\n".join(texts)
