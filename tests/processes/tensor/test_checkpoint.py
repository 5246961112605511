"""What is stored on ranks comes back: by torch.distributed.checkpoint in any layout, by torch.save on its own rank only."""

from __future__ import annotations

import copy
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save, save_file, save_model
from torch import Tensor, nn
from torch.distributed.checkpoint.staging import BlockingAsyncStager
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
)
from torch.utils._pytree import tree_leaves

import shardwise as sw
from shardwise import DTensor, Mesh, Partial, Replicate, Shard
from shardwise.errors import OperatorError, ShardwiseError, WorldError
from shardwise.layouts.layout import Layout
from tests.helpers.layout_moves import layouts

TOLD = "save whole tensors (x.full_tensor() on every rank, then torch.save on one), or use torch.distributed.checkpoint"
SHAPES = [(5, 7), (3,), (4, 2, 3), (0, 4), ()]


@pytest.fixture(autouse=True)
def alone() -> Any:
    """torch warns of a checkpoint that one process stores or loads by itself."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield


def values(shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.arange(float(torch.Size(shape).numel())).view(shape).to(dtype) + 1


def spread(shape: tuple[int, ...], layout: Layout) -> DTensor:
    return sw.distribute_tensor(values(shape), layout.mesh, layout.replace(stride=None), src_data_rank=None)


def some_layouts(shape: tuple[int, ...], mesh: Mesh, turn: int) -> list[Layout]:
    """Every fifth layout of a tensor: uneven and chosen sizes, orders of axes, strided shardings."""
    every = [layout for layout in layouts(shape, mesh, ()) if not layout.partials]
    return every[turn % 5 :: 5] or every[:1]


def tensors(mesh: Mesh, turn: int) -> dict[str, Any]:
    return {
        f"{shape}/{i}": spread(shape, layout) for shape in SHAPES for i, layout in enumerate(some_layouts(shape, mesh, turn))
    }


def zeros(mesh: Mesh, names: list[str]) -> dict[str, DTensor]:
    """Tensors to load into: each in the next layout of its shape, so never in the one that it was stored in."""
    found = {}
    for number, name in enumerate(names):
        shape = next(shape for shape in SHAPES if name.startswith(f"{shape}/"))
        every = some_layouts(shape, mesh, number % 5 + 1)
        layout = every[number % len(every)]
        found[name] = sw.distribute_tensor(torch.zeros(shape), mesh, layout, src_data_rank=None)
    return found


def store(path: Path) -> list[str]:
    state: dict[str, Any] = tensors(sw.init_mesh(a=2, b=2), 0)
    pair = sw.init_mesh(a=2, ranks=[3, 1])
    state["(5, 7)/pair"] = sw.distribute_tensor(values((5, 7)), pair, [Shard(1, (2, 5))])
    state["(5, 7)/half"] = sw.distribute_tensor(values((5, 7)), sw.init_mesh(a=4)["a"], [Shard(0)])
    names = list(state)
    dcp.save({**state, "plain": torch.ones(2), "number": 7}, checkpoint_id=path)
    return names


def check_loaded(state: dict[str, Any], path: Path) -> None:
    plain: dict[str, Any] = {"plain": torch.zeros(2), "number": 0}
    dcp.load(together := {**state, **plain}, checkpoint_id=path)
    for name, x in state.items():
        shape = next(shape for shape in SHAPES if name.startswith(f"{shape}/"))
        whole = x.full_tensor() if isinstance(x, DTensor) else x
        assert torch.equal(whole, values(shape)), f"{name} {x!r}: {whole}"
    assert together["number"] == 7 and together["plain"].sum() == 2


def load(path: Path, names: list[str], axes: dict[str, int]) -> None:
    check_loaded(zeros(sw.init_mesh(**axes), names), path)


def test_a_checkpoint_comes_back_in_any_layout_on_any_ranks(pool: Any, tmp_path: Path) -> None:
    names = pool(4).run(store, tmp_path)[0]
    assert len(names) > 30
    pool(4).run(load, tmp_path, names, {"a": 2, "b": 2})
    pool(2).run(load, tmp_path, names, {"a": 2, "b": 1})
    load(tmp_path, names, {"a": 3, "b": 2})  # simulated
    check_loaded({name: torch.zeros(next(s for s in SHAPES if name.startswith(f"{s}/"))) for name in names}, tmp_path)


def test_what_a_simulated_world_stored_comes_back_on_ranks(pool: Any, tmp_path: Path) -> None:
    state = tensors(sw.init_mesh(a=2, b=2), 4)
    dcp.save({**state, "plain": torch.ones(2), "number": 7}, checkpoint_id=tmp_path)
    pool(4).run(load, tmp_path, list(state), {"a": 2, "b": 2})


def test_views_and_gradients_notice_what_was_loaded(tmp_path: Path) -> None:
    x = sw.distribute_tensor(values((4, 6)), sw.init_mesh(a=4), [Shard(0)])
    dcp.save({"x": x * 2}, checkpoint_id=tmp_path)
    rows = x.view(2, 12)  # a copy here, as data has to move, and a view on one device
    squares = (x.requires_grad_() * x).sum()
    dcp.load({"x": x.detach()}, checkpoint_id=tmp_path)
    assert torch.equal(rows.full_tensor(), 2 * values((2, 12)))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        squares.backward()


def try_partial(path: Path) -> list[str]:
    mesh = sw.init_mesh(a=2)
    x = DTensor.from_local(torch.ones(3), mesh, [Partial()])
    whole = sw.ones(3, mesh=mesh, placements=[Replicate()])
    dcp.save({"x": whole}, checkpoint_id=path / "whole")
    told = []
    for call in (
        lambda: dcp.save({"x": x}, checkpoint_id=path / "part"),
        lambda: dcp.load({"x": x}, checkpoint_id=path / "whole"),
    ):
        with pytest.raises(BaseException) as caught:  # torch wraps what the ranks raised
            call()
        told.append(str(caught.value))
    return told


def test_partial_values_are_refused(pool: Any, tmp_path: Path) -> None:
    for rank in pool(2).run(try_partial, tmp_path):
        for text in rank:
            assert "f32[3 | sum@a] is Partial(sum) over a, so no rank holds its values; store x.redistribute(" in text


# ── state dicts ───────────────────────────────────────────────────────────────────────────────────────────────────────


def trained() -> tuple[nn.Module, Any]:
    """A model after one step, some of it distributed, in a job or simulated."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5))
    mesh = sw.init_mesh(tp=2)
    linear = model[0]
    linear.weight = nn.Parameter(sw.distribute_tensor(linear.weight.detach(), mesh, [Shard(0)]))
    linear.bias = nn.Parameter(sw.distribute_tensor(linear.bias.detach(), mesh, [Replicate()]))
    optimizer = torch.optim.Adam(linear.parameters())
    linear(sw.ones(2, 3, mesh=mesh, placements=[Replicate()])).sum().backward()
    optimizer.step()
    return model, optimizer


def whole_state(path: Path | None) -> dict[str, Any]:
    model, optimizer = trained()
    found: dict[str, Any] = {}
    for offload in (False, True):
        options = StateDictOptions(full_state_dict=True, cpu_offload=offload)
        found[f"model {offload}"] = get_model_state_dict(model, options=options)
        found[f"optimizer {offload}"] = get_optimizer_state_dict(model, optimizer, options=options)
    if path is not None and dist.get_rank() == 0:
        torch.save(found, path)
    want = dict(model.state_dict())
    if not path or dist.get_rank() == 0:
        for name, x in found["model True"].items():
            whole = want[name].full_tensor() if isinstance(want[name], DTensor) else want[name]
            assert type(x) is Tensor and torch.equal(x, whole)
    else:
        [whole.full_tensor() for whole in want.values() if isinstance(whole, DTensor)]
        assert found["model True"] == {}
    assert type(found["model False"]["0.weight"]) is Tensor and found["model False"]["0.weight"].shape == (5, 3)
    return found


def test_a_full_state_dict_is_whole(pool: Any, tmp_path: Path) -> None:
    pool(2).run(whole_state, tmp_path / "state")
    saved, here = torch.load(tmp_path / "state", weights_only=False), whole_state(None)
    for kind in here:
        found, want = (tree_leaves(state[kind]) for state in (saved, here))
        assert all(torch.equal(x, y) if isinstance(x, Tensor) else x == y for x, y in zip(found, want, strict=True))
    moments = saved["optimizer True"]["state"]["0.weight"]
    assert type(moments["exp_avg"]) is Tensor and moments["exp_avg"].shape == (5, 3)


def refill(path: Path) -> None:
    saved = torch.load(path, weights_only=False)["model True"]
    for broadcast in (False, True):
        model, _ = trained()
        with torch.no_grad():
            model[0].weight.zero_()
        given = saved if not broadcast or dist.get_rank() == 0 else {}
        set_model_state_dict(model, given, options=StateDictOptions(full_state_dict=True, broadcast_from_rank0=broadcast))
        assert isinstance(model[0].weight, DTensor) and model[0].weight.placements == (Shard(0),)
        assert torch.equal(model[0].weight.full_tensor(), saved["0.weight"])


def test_a_full_state_dict_fills_a_distributed_model(pool: Any, tmp_path: Path) -> None:
    pool(2).run(whole_state, tmp_path / "state")
    pool(2).run(refill, tmp_path / "state")


def stage(path: Path, at_once: bool) -> None:
    """Stored from a copy on the host, which writes that come later do not reach."""
    x = sw.distribute_tensor(values((5, 7)), sw.init_mesh(a=2), [Shard(0)])
    if at_once:
        staged = BlockingAsyncStager().stage({"x": x})
        x.zero_()
        dcp.save(staged, checkpoint_id=path)
    else:
        dcp.async_save({"x": x}, checkpoint_id=path).result()
    found = {"x": torch.zeros(5, 7)}
    dcp.load(found, checkpoint_id=path)
    assert torch.equal(found["x"], values((5, 7)))


@pytest.mark.parametrize("at_once", [True, False])
def test_staged_copies_are_whole(at_once: bool, pool: Any, tmp_path: Path) -> None:
    pool(2).run(stage, tmp_path, at_once)


# ── safetensors ───────────────────────────────────────────────────────────────────────────────────────────────────────


def write_safely(path: Path) -> list[str]:
    """How safetensors' functions are refused; then what the refusal names is done."""
    model, _ = trained()
    linear, told = model[0], []
    for call in (
        lambda: save_file(dict(linear.state_dict()), path),
        lambda: save(dict(linear.state_dict())),
        lambda: save_model(linear, str(path)),
        linear.weight.untyped_storage,
    ):
        with pytest.raises(OperatorError) as caught:
            call()
        told.append(str(caught.value))
    whole = {name: x.detach().full_tensor() for name, x in linear.state_dict().items()}
    if dist.get_rank() == 0:
        save_file(whole, path)
    dist.barrier()
    with torch.no_grad():
        linear.weight.zero_()
    linear.load_state_dict(load_file(path))
    assert torch.equal(linear.weight.detach().full_tensor(), whole["weight"])
    return told


def test_safetensors_is_refused_with_what_to_do(pool: Any, tmp_path: Path) -> None:
    for told in pool(2).run(write_safely, tmp_path / "file"):
        assert len(told) == 4
        assert all("has no memory of its own, its shards lie on 2 ranks. To store it whole" in text for text in told)


@pytest.mark.slow
def test_save_pretrained_is_refused_with_what_to_do(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 32}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes))
    layer = model.model.layers[0].mlp.up_proj
    plain = layer.weight.detach()
    layer.weight = nn.Parameter(sw.distribute_tensor(plain, sw.init_mesh(tp=2), [Shard(0)]))
    with pytest.raises(OperatorError, match=r"model\.save_pretrained\(path, state_dict=whole\)"):
        model.save_pretrained(tmp_path)
    whole = {name: x.full_tensor() if isinstance(x, DTensor) else x for name, x in model.state_dict().items()}
    model.save_pretrained(tmp_path, state_dict=whole)
    assert torch.equal(transformers.LlamaForCausalLM.from_pretrained(tmp_path).model.layers[0].mlp.up_proj.weight, plain)


# ── torch.save ────────────────────────────────────────────────────────────────────────────────────────────────────────


def made(mesh: Mesh) -> dict[str, DTensor]:
    x = values((4, 6))
    return {
        "cut": sw.distribute_tensor(x, mesh, [Replicate(), Shard(0)]),
        "twice": sw.distribute_tensor(x, mesh, [Shard(0), Shard(1)]),
        "copies": sw.distribute_tensor(x, mesh, [Replicate(), Replicate()]),
        "sum": sw.distribute_tensor(x, mesh, [Replicate(), Replicate()]).redistribute(placements=[Replicate(), Partial()]),
    }


def save_each(path: Path) -> None:
    for name, x in made(sw.init_mesh(a=2, b=2)).items():
        torch.save({"x": nn.Parameter(x)}, path / f"{name}.{dist.get_rank()}")
        assert torch.equal(copy.deepcopy(x)._local, x._local)


def load_from(path: Path, other: int) -> dict[str, Any]:
    """What loading the files of another rank gives, or how it is refused."""
    found: dict[str, Any] = {}
    for name in ("cut", "twice", "copies", "sum"):
        try:
            x = torch.load(path / f"{name}.{(dist.get_rank() + other) % 4}", weights_only=bool(other % 2))["x"]
            assert x.requires_grad and isinstance(x, nn.Parameter)
            found[name] = torch.equal(x.detach().full_tensor(), values((4, 6)))
        except ShardwiseError as error:
            found[name] = str(error)
    return found


def test_a_shard_is_loaded_only_where_it_belongs(pool: Any, tmp_path: Path) -> None:
    pool(4).run(save_each, tmp_path)
    assert pool(4).run(load_from, tmp_path, 0) == [dict.fromkeys(("cut", "twice", "copies", "sum"), True)] * 4
    for rank, found in enumerate(pool(4).run(load_from, tmp_path, 2)):  # two ranks on: another along a, the same along b
        assert found["cut"] is True and found["copies"] is True and found["sum"] is True
        text = (
            f"the file has what rank {(rank + 2) % 4} held of it, and this is rank {rank} of 4; load it on the rank that saved"
        )
        assert text in found["twice"] and TOLD in found["twice"]
    for found in pool(4).run(load_from, tmp_path, 1):
        assert found["copies"] is True and all(TOLD in found[name] for name in ("cut", "twice", "sum"))


def test_a_shard_is_refused_in_a_smaller_job_and_without_one(pool: Any, tmp_path: Path) -> None:
    pool(4).run(save_each, tmp_path)
    for found in pool(2).run(load_from, tmp_path, 0):
        assert all("and this is rank" in text and TOLD in text for text in found.values())
    with pytest.raises(WorldError, match="and this is a process without a job; load it on the rank that saved it"):
        torch.load(tmp_path / "cut.0", weights_only=False)
    x = torch.load(tmp_path / "copies.3", weights_only=True)["x"]
    assert torch.equal(x.detach().full_tensor(), values((4, 6)))


def load_simulated(path: Path) -> bool:
    x = torch.load(path, weights_only=True)
    return torch.equal(x.full_tensor(), values((4, 6))) and x.mesh.world == "simulated"


def test_a_simulated_tensor_is_whole_in_every_process(pool: Any, tmp_path: Path) -> None:
    torch.save(made(sw.init_mesh(a=2, b=2))["twice"], tmp_path / "file")
    assert pool(2).run(load_simulated, tmp_path / "file") == [True, True]


def test_a_pickle_of_other_shards_is_refused() -> None:
    x = made(sw.init_mesh(a=2, b=2))["twice"]
    rebuild, (local, layout, *rest) = x.__reduce_ex__(2)
    assert torch.equal(rebuild(local, layout, *rest).full_tensor(), values((4, 6)))
    with pytest.raises(WorldError, match="it lies in 4 shards, given are 3"):
        rebuild(sw.Bundle(local.shards[:3]), layout, *rest)
    with pytest.raises(OperatorError, match=r"holds torch.float32 \[2, 3\] of it, and here is a tensor torch.float32 \[3, 2\]"):
        rebuild(sw.Bundle([shard.t() for shard in local.shards]), layout, *rest)
