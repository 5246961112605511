"""Packages: exported by one process without a job, loaded on ranks that trace and decide nothing; and what is refused."""

from __future__ import annotations

import re
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._pytree import tree_leaves

import shardwise as sw
from examples import train_gpt
from examples.moe import MoE
from shardwise import Replicate, Shard
from shardwise._torch.compiler import compile_package
from shardwise.comm import pretend
from shardwise.package.export import exported
from shardwise.package.manifest import Manifest, facts_for, read, write
from shardwise.tensor.wrapping import wrap

pytestmark = pytest.mark.skipif(
    torch.__version__ < "2.12" and torch.version.cuda is not None,
    reason="torch 2.11 built for CUDA crashes when it loads AOTInductor packages, its own too",
)

#: As little work for the C++ compiler as can be.
QUICK = {"aot_inductor.compile_wrapper_opt_level": "O0"}
SIZES = {"VOCAB": 32, "WIDTH": 16, "HEADS": 4, "LAYERS": 1, "LENGTH": 8}


@torch.library.custom_op("package_test::positive", mutates_args=())
def positive(x: torch.Tensor) -> torch.Tensor:
    """The rows that start with a positive number: how many depends on data."""
    return x[x[:, 0] > 0].clone()


@positive.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return x.new_empty(torch.library.get_ctx().new_dynamic_size(), x.shape[1])


# ── a model with all that a package may hold ──────────────────────────────────────────────────────────────────────────


class Everything(nn.Module):
    """The example's GPT, and operators that Inductor does not lower: ours, and torch's own."""

    def __init__(self) -> None:
        super().__init__()
        self.gpt = train_gpt.GPT()
        self.register_buffer("count", torch.zeros(4, 2))
        self.register_buffer("table", torch.arange(8.0), persistent=False)
        self.experts = nn.Parameter(torch.randn(4, 16, 8))

    def forward(self, tokens: Any, image: Any, *, offsets: Any, twice: bool) -> dict[str, Any]:
        rows = self.gpt.embed(tokens).flatten(0, 1)[:16]
        self.count += 1
        return {
            "logits": self.gpt(tokens) * (2 if twice else 1),
            "pool": F.max_pool2d(image, 2, return_indices=True),
            "grouped": F.grouped_mm(rows.bfloat16(), self.experts.bfloat16(), offs=offsets),
            "counted": image + positive(self.table.view(4, 2) - 3).sum(),
            "power": (tokens - 16) ** 41,
            "powers": sw.int_pow(tokens - 16, tokens),
            "narrow": torch.tensor([3, 5], dtype=torch.uint8) ** tokens[0, :2] + sw.int_pow(offsets, 3)[:2],
            "scan": image.cumsum(2) + self.table,
            "moved": image.redistribute(placements=[Shard(1)]).flip(1),
            "random": F.dropout(image, 0.5, training=True),
            "sorted": image.sort(-1),
            "same": image,
            "name": "everything",
        }


def small(model: Callable[[], nn.Module]) -> nn.Module:
    """A model of small sizes, the same in every process."""
    for name, size in SIZES.items():
        setattr(train_gpt, name, size)
    torch.manual_seed(3)
    return model()


def everything(mesh: sw.Mesh) -> tuple[nn.Module, tuple[Any, ...], dict[str, Any]]:
    """The model on a mesh, and its inputs."""
    model = small(Everything)
    train_gpt.distribute(model.gpt, mesh)
    torch.manual_seed(5)
    model.experts = nn.Parameter(sw.distribute_tensor(model.experts.detach(), mesh, [Shard(0)]))
    model.count = sw.distribute_tensor(model.count, mesh, [Shard(0)])
    tokens = sw.distribute_tensor(torch.randint(32, (4, 8)), mesh, [Replicate()])
    image = sw.distribute_tensor(torch.randn(2, 4, 8, 8), mesh, [Shard(2)])
    offsets = sw.distribute_tensor(torch.tensor([3, 3, 11, 16], dtype=torch.int32), mesh, [Replicate()])
    return model, (tokens, image), {"offsets": offsets, "twice": True}


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Exported here, where there is no job, for two ranks."""
    path = tmp_path_factory.mktemp("package") / "everything.pt2"
    mesh = sw.init_mesh(tp=2)
    model, args, kwargs = everything(mesh)
    sw.export(model, args, mesh, path, kwargs=kwargs, options=QUICK)
    return path


def whole(value: Any) -> Any:
    """The whole tensors of a nested value."""
    if isinstance(value, dict | tuple):
        several = value.values() if isinstance(value, dict) else value
        return [whole(item) for item in several]
    return [value.full_tensor()] if isinstance(value, sw.DTensor) else []


def run_both(path: Path) -> None:
    """The package gives what the model gives, twice, and neither traces nor decides."""
    mesh = sw.init_mesh(tp=2)
    model, args, kwargs = everything(mesh)
    twin, _, _ = everything(mesh)
    sw.cache_clear()
    program = sw.load_package(path, model)
    torch.manual_seed(7)
    found = [program(*args, **kwargs), program(*args, **kwargs)]
    info = sw.cache_info()
    assert info["decisions"].misses + info["decisions"].hits + info["plans"].misses + info["plans"].hits == 0
    torch.manual_seed(7)
    with torch.no_grad():
        want = [twin(*args, **kwargs), twin(*args, **kwargs)]
    torch.testing.assert_close(whole(found), whole(want), rtol=1e-5, atol=1e-6)
    layouts = [[x.layout for x in tree_leaves(results) if isinstance(x, sw.DTensor)] for results in (found, want)]
    assert all(one is other for one, other in zip(*layouts, strict=True))
    assert found[0]["random"].full_tensor().ne(found[1]["random"].full_tensor()).any()
    assert model.count.full_tensor().eq(2).all() and twin.count.full_tensor().eq(2).all()
    assert type(found[0]["sorted"]) is tuple and found[0]["name"] == "everything"
    with sw.debug_mode():
        again = program(*args, **kwargs)
    with pytest.raises(sw.MismatchError, match="differ in"), sw.debug_mode():
        program(*args, **kwargs) if torch.distributed.get_rank() else args[1].full_tensor()
    torch.testing.assert_close(whole(again["logits"]), whole(want[1]["logits"]), rtol=1e-5, atol=1e-6)


def test_two_ranks_run_what_one_process_exported(package: Path, pool: Any) -> None:
    pool(2).run(run_both, package)


def test_bad_inputs_are_named(package: Path, pool: Any) -> None:
    pool(2).run(try_bad_inputs, package)


def try_bad_inputs(path: Path) -> None:
    """Every rank raises the same, before anything communicates, and the program works afterwards."""
    mesh = sw.init_mesh(tp=2)
    model, (tokens, image), kwargs = everything(mesh)
    program = sw.load_package(path, mesh=mesh)
    with pytest.raises(
        sw.OperatorError, match=r"takes 18 parameters and buffers; bind them first: load_package\(path, parameters"
    ):
        program(tokens, image, **kwargs)
    state = model.state_dict()
    calls: list[tuple[Callable[[], Any], str]] = [
        (
            lambda: program.bind({}),
            "the package has 18 parameters and buffers, given are 0 tensors, and 'experts' is not among",
        ),
        (
            lambda: program.bind({**state, "experts": torch.zeros(4, 16, 9)}),
            "parameter experts is a DTensor f32[4@tp, 16, 8] in this package, given is a plain tensor torch.float32 [4, 16, 9]",
        ),
        (
            lambda: program.bind({**state, "experts": state["experts"].redistribute(placements=[Replicate()])}),
            "given is a DTensor f32[4, 16, 8], of another layout; redistribute it",
        ),
    ]
    whole_experts = state["experts"].full_tensor()
    program.bind({**state, "experts": whole_experts})  # a plain tensor is distributed
    more = {"f": torch.float64, "i": torch.int32}
    simulated = tokens
    with sw.simulate(2):
        simulated = sw.distribute_tensor(torch.zeros(4, 8, dtype=torch.int64), sw.init_mesh(tp=2), [Replicate()])
    calls += [
        (lambda: program(tokens, **kwargs), "the package takes 4 inputs (tokens, image, offsets, twice), given are 3"),
        (
            lambda: program(image, tokens, **kwargs),
            "input tokens is a DTensor i64[4, 8] in this package, given is a DTensor f32",
        ),
        (lambda: program(tokens, image[:1], **kwargs), "given is a DTensor f32[1, 4, 8@tp, 8], of another shape; export"),
        (lambda: program(tokens.to(more["i"]), image, **kwargs), "a DTensor i32[4, 8], of another dtype; export"),
        (lambda: program(tokens, image.redistribute(placements=[Shard(0)]), **kwargs), "of another layout; redistribute it"),
        (
            lambda: program(torch.zeros(4, 8), image, **kwargs),
            "a plain tensor torch.float32 [4, 8] on cpu; distribute it on the",
        ),
        (lambda: program(simulated, image, **kwargs), "on the simulated mesh (tp=2); it belongs on the mesh (tp=2)"),
        (
            lambda: program(tokens, image, offsets=kwargs["offsets"], twice=False),
            "input twice is True in this package, given is F",
        ),
        (lambda: program(tokens, image, **kwargs, extra=1), "given are 5; call it as the example was"),
        (lambda: program([tokens], image, **kwargs), "given are 4 in another structure; call it as the example was"),
        (lambda: program(None, image, **kwargs), "input tokens is a DTensor i64[4, 8] in this package, given is a NoneType"),
    ]
    for call, text in calls:
        with sw.trace_comm() as log, pytest.raises(sw.OperatorError, match=re.escape(text)):
            call()
        assert [record for record in log.records if record.operator != "redistribute"] == []
    lying = wrap(sw.DTensor, torch.zeros(1, 8, dtype=torch.int64), tokens.layout)  # from_local would find it out
    with pytest.raises(sw.OperatorError, match=re.escape("tokens: this rank holds [1, 8] on cpu, the program takes [4, 8]")):
        program(lying, image, **kwargs)
    with torch.no_grad():
        want = model(tokens, image, **kwargs)["logits"]
        elsewhere = image.permute(0, 1, 3, 2).contiguous().permute(0, 1, 3, 2)  # other strides are copied
        torch.testing.assert_close(program(tokens, elsewhere, **kwargs)["logits"].full_tensor(), want.full_tensor())
        model.experts.mul_(2)  # experts were given whole; this one is not theirs
        assert program.parameters["experts"] is model.experts.layout


@pytest.mark.slow
@pytest.mark.parametrize(("axes", "ranks"), [({"tp": 4}, 4), ({"dp": 2, "tp": 2}, 4), ({"dp": 2, "tp": 1}, 2)])
def test_the_example_on_meshes(axes: dict[str, int], ranks: int, tmp_path: Path, pool: Any) -> None:
    mesh = sw.init_mesh(**axes)
    model, tokens = example(mesh)
    sw.export(model, (tokens,), mesh, tmp_path / "gpt.pt2", options=QUICK)
    pool(ranks).run(run_example, tmp_path / "gpt.pt2", axes)


def example(mesh: sw.Mesh) -> tuple[nn.Module, Any]:
    """The example's model on a mesh, and tokens."""
    model = train_gpt.distribute(small(train_gpt.GPT), mesh)
    cut = {"dp": Shard(0)} if "dp" in mesh.axes else {}
    return model, sw.distribute_tensor(torch.randint(32, (4, 8)), mesh, cut)


def run_example(path: Path, axes: dict[str, int]) -> None:
    """On every rank the package gives what the model gives, to the layout."""
    model, tokens = example(sw.init_mesh(**axes))
    found = sw.load_package(path, model)(tokens)
    with torch.no_grad():
        want = model(tokens)
    assert found.layout is want.layout
    torch.testing.assert_close(found.full_tensor(), want.full_tensor())


@pytest.mark.parametrize(
    ("axes", "ranks"),
    [({"dp": 2, "ep": 2}, 4), *(pytest.param({"ep": n}, n, marks=pytest.mark.slow) for n in (2, 4))],
)
def test_a_mixture_of_experts(axes: dict[str, int], ranks: int, tmp_path: Path, pool: Any) -> None:
    """How many tokens move is data, another number at each call and on each rank; some experts have none."""
    mesh = sw.init_mesh(**axes)
    layer, (x, *_) = experts(mesh)
    sw.export(layer, (x,), mesh, tmp_path / "moe.pt2", options=QUICK)
    pool(ranks).run(run_experts, tmp_path / "moe.pt2", axes)


def experts(mesh: sw.Mesh) -> tuple[nn.Module, list[Any]]:
    """The example's layer, and several batches of tokens; of the last one all tokens are the same."""
    torch.manual_seed(3)
    layer = MoE(16, 32, 8, mesh=mesh)
    batches = [torch.randn(8, 16), torch.randn(8, 16), torch.randn(1, 16).repeat(8, 1)]
    return layer, [sw.distribute_tensor(x, mesh, [Shard(0)] * mesh.ndim) for x in batches]


def run_experts(path: Path, axes: dict[str, int]) -> None:
    layer, batches = experts(sw.init_mesh(**axes))
    torch.manual_seed(3)
    dense = MoE(16, 32, 8)
    program = sw.load_package(path, layer)
    for x in batches:
        found = program(x)
        with torch.no_grad():
            want, alone = layer(x), dense(x.full_tensor())
        assert found.layout is want.layout
        torch.testing.assert_close(found.full_tensor(), want.full_tensor())
        torch.testing.assert_close(found.full_tensor(), alone)


# ── the text ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def gpt_of_four() -> tuple[sw.Mesh, nn.Module, Any]:
    mesh = sw.init_mesh(dp=2, tp=2)
    return mesh, *example(mesh)


def experts_of_four() -> tuple[sw.Mesh, nn.Module, Any]:
    mesh = sw.init_mesh(dp=2, ep=2)
    layer, (x, *_) = experts(mesh)
    return mesh, layer, x


@pytest.mark.parametrize(
    ("made", "needs"),
    [
        (gpt_of_four, (b"shardwise::rank_number", b"shardwise::step")),
        (experts_of_four, (b"shardwise::grouped_mm", b"shardwise::rows")),
    ],
)
def test_the_program_is_the_same_text_for_every_rank(made: Any, needs: tuple[bytes, ...], tmp_path: Path) -> None:
    """The program that the compiler is given: it need not fuse operators in the same way twice."""
    mesh, model, tokens = made()
    texts = []
    for rank in (0, 3):
        with pretend(mesh, rank):
            program, manifest = exported(model, (tokens,), {}, mesh)
        texts.append((manifest, str(program.graph)))
    assert texts[0] == texts[1]
    path = tmp_path / "3.pt2"
    with pretend(mesh, 3):
        compile_package(program, str(path), {"aot_inductor.package_cpp_only": True})
    with zipfile.ZipFile(path) as archive:
        every = b"".join(archive.read(name) for name in archive.namelist() if name.endswith((".cpp", "wrapper.json")))
    assert all(text in every for text in (*needs, mesh.alias(mesh.axes[1:]).encode()))


def test_a_job_exports_the_same(pool: Any) -> None:
    assert len({local_text(), *pool(2).run(local_text)}) == 1


def local_text() -> str:
    """The local program of the example, on every rank of a job, or in no job."""
    mesh = sw.init_mesh(tp=2)
    model, tokens = example(mesh)
    with pretend(mesh):
        program, manifest = exported(model, (tokens,), {}, mesh)
    return f"{program.graph} {manifest}"


# ── what is refused when it is exported ───────────────────────────────────────────────────────────────────────────────


def refused(function: Callable[..., Any], *args: Any, mesh: sw.Mesh) -> str:
    with pretend(mesh), pytest.raises(sw.CompileError) as caught:
        exported(function, args, {}, mesh)
    return str(caught.value)


def test_unequal_shards_are_refused_by_name() -> None:
    mesh = sw.init_mesh(tp=2)
    x, odd = sw.ones(4, 6, mesh=mesh, placements=[Shard(0)]), sw.ones(5, 6, mesh=mesh, placements=[Shard(0)])
    unequal = (
        "dim 0 of f32[5@tp, 6], of size 5, falls into unequal shards (3, 2) over tp: the program would be of one rank only"
    )
    assert f"input x: {unequal}" in refused(lambda x: x + 1, odd, mesh=mesh)
    model = nn.Linear(5, 2)
    model.weight = nn.Parameter(sw.distribute_tensor(torch.ones(2, 5), mesh, [Shard(1)]))
    assert "parameter weight: dim 1 of f32[2, 5@tp], of size 5" in refused(model, x, mesh=mesh)
    inside = refused(lambda x: torch.cat([x, x[:1]]) * 2, x, mesh=mesh)
    assert "one rank only; choose sizes that the axes divide" in inside and "test_package.py:" in inside


def test_what_cannot_be_in_a_package_is_refused() -> None:
    mesh, other = sw.init_mesh(tp=2), sw.init_mesh(tp=4)
    x, stray = sw.ones(4, mesh=mesh, placements=[Shard(0)]), torch.zeros(4)
    assert "input x lives on the mesh (tp=4), the package is for (tp=2)" in refused(
        lambda x: x, sw.ones(4, mesh=other), mesh=mesh
    )
    few = sw.init_mesh(tp=1, ranks=[1])
    text = "a program for the 2 ranks of mesh (tp=2) uses the mesh (tp=1) of ranks [1]"
    assert text in refused(lambda x: x.redistribute(few, [Replicate()]) + 1, x, mesh=mesh)
    assert "input x is a object; a package takes tensors, numbers" in refused(lambda x: x, object(), mesh=mesh)
    assert "the function computes nothing from its inputs" in refused(lambda x: 3, x, mesh=mesh)
    text = "a result is, or has a size, that depends on data ([u0, 3]): a package gives static shapes"
    assert text in refused(lambda x: (x + 1, positive(torch.eye(3))), x, mesh=mesh)
    assert "writes to a plain tensor [4]" in refused(lambda x: x + stray.add_(1), x, mesh=mesh)
    assert stray.eq(0).all()
    with pretend(mesh):
        held = sw.DTensor.from_local(torch.ones(2), sw.Mesh.read("cpu;processes;tp=2;;;auto;"), [Shard(0)], run_check=False)
    assert "the function uses the DTensor f32[4@tp]" in refused(lambda x: x + held, x, mesh=mesh)


def test_meshes_that_a_function_names_are_those_of_the_job() -> None:
    mesh = sw.init_mesh(tp=2)
    x = sw.ones(4, 6, mesh=mesh, placements=[Shard(0)])
    with pretend(mesh, 1):
        named = exported(lambda x: x.redistribute(mesh, [Shard(1)]) + sw.ones(4, 6, mesh=mesh), (x,), {}, mesh)[1]
    ((_, slot),) = named.results
    assert str(slot) == "DTensor f32[4, 6@tp]" and slot.layout.mesh.world == "processes"


def test_equal_inputs_are_different_inputs() -> None:
    mesh = sw.init_mesh(tp=2)
    x = sw.ones(4, mesh=mesh, placements=[Shard(0)])
    with pretend(mesh):
        manifest = exported(lambda x, y: (x.add_(1), y), ((x, x), {"n": 2})[0], {}, mesh)[1]
    assert manifest.order == (0, 1) and [place for place, _ in manifest.writes] == [0]


# ── what is refused when it is loaded ─────────────────────────────────────────────────────────────────────────────────


NOTHING = '[1, {"type": "builtins.tuple", "context": "null", "children_spec": []}]'


def written(path: Path, change: dict[str, Any]) -> Path:
    """A package without a program, of this process but for a change."""
    mesh = sw.Mesh.read("cpu;processes;dp=2,tp=2;;;auto;")
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("package/version", "1")
    write(path, Manifest({**facts_for(mesh, 4), **change}, (), (), NOTHING, (), (), NOTHING, ()))
    return path


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "torch": ({"torch": "2.9.1"}, f"is for torch 2.9.1, this is torch {torch.__version__}; export the model again"),
    "version": ({"version": "9.9"}, "is for Shardwise 9.9, this is Shardwise "),
    "rules": ({"library": "0.1.0 code rules"}, "with other rules or code (code rules, here "),
    "chip": ({"chip": "CPU of another kind"}, "has kernels for CPU of another kind, here is CPU "),
    "device": ({"mesh": "cuda;processes;tp=2;;;auto;"}, "is for the device 'cuda', and there is none here"),
    "job": ({}, "is for a job of 4 ranks with the mesh (dp=2, tp=2) on cpu, and no job is running; start it by torchrun"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    change, text = REFUSED[name]
    path = written(tmp_path / "file.pt2", change)
    with pytest.raises(sw.CompileError, match=re.escape(text)) as caught:
        sw.load_package(path)
    assert str(caught.value).startswith(f"package {str(path)!r} ")


def test_refused_for_another_mesh_or_job(tmp_path: Path, pool: Any) -> None:
    path = written(tmp_path / "file.pt2", {})
    text = "is for the mesh (dp=2, tp=2) on cpu, given is (dp=2, tp=2) on cpu (simulated); make such a mesh, or export for this"
    with pytest.raises(sw.CompileError, match=re.escape(text)):
        sw.load_package(path, mesh=sw.init_mesh(dp=2, tp=2))
    told = (
        "is for a job of 4 ranks with the mesh (dp=2, tp=2) on cpu, this one has 2 ranks; start 4, or export for a mesh of this"
    )
    assert [told in text for text in pool(2).run(why_refused, path)] == [True, True]


def why_refused(path: Path) -> str:
    with pytest.raises(sw.CompileError) as caught:
        sw.load_package(path)
    return str(caught.value)


CUTS: list[tuple[Callable[[bytes], bytes], str]] = [
    (lambda data: data[:-40], "is cut short or damaged: "),
    (
        lambda data: data.replace(b'"facts"', b'"fucts"', 1),
        "is cut short or damaged: its bytes are not those that were written; copy or export it again",
    ),
    (lambda data: b"", "is cut short or damaged: "),
]


@pytest.mark.parametrize(("cut", "text"), CUTS)
def test_damaged(cut: Callable[[bytes], bytes], text: str, tmp_path: Path) -> None:
    path = written(tmp_path / "file.pt2", {})
    path.write_bytes(cut(path.read_bytes()))
    with pytest.raises(sw.CompileError, match=re.escape(text)):
        read(path)


def test_other_archives_and_no_file(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "other.pt2", "w") as archive:
        archive.writestr("model/version", "1")
    with pytest.raises(sw.CompileError, match=r"was not written by sw\.export; export the model again with this library"):
        sw.load_package(tmp_path / "other.pt2")
    with pytest.raises(FileNotFoundError):
        sw.load_package(tmp_path / "none.pt2")
