"""Which world a mesh lives in: `init_mesh` finds it, `simulate` forces it, `transport` opens it."""

from __future__ import annotations

import atexit
import contextlib
import math
import os
from collections.abc import Iterable, Iterator, Sequence
from typing import cast

import torch
import torch.distributed as dist

from .._torch.compiler import tracing_context
from ..base.argument_checks import a_device, a_text, integer, integers, optional, several, shown
from ..base.settings import Setting
from ..errors import MeshError
from ..layouts.mesh import MOST_RANKS, Mesh, root_meshes
from .pretended import Pretended
from .processes import Processes
from .simulated import Simulated
from .transport import Transport
from .watch.log import watching
from .watch.watched import Watched

_transports: dict[str, Transport] = {"processes": Processes(), "simulated": Simulated()}
#: The job that programs are traced for in this thread, where it is not there.
_pretended: Setting[Pretended | None] = Setting("pretend", None)
_simulated_ranks: Setting[int] = Setting("simulate", 0, reaches_threads=True)
#: Axes with their sizes.
Shape = tuple[tuple[str, int], ...]
#: The worlds and shapes of the meshes that were asked for; not the meshes, which end when nobody holds them.
_asked_for: set[tuple[str, Shape]] = set()


def transport(mesh: Mesh, operator: str = "") -> Transport:
    """The transport to the world behind a mesh; `operator` names, for the logs, on whose behalf it is opened.

    >>> mesh = Mesh(("tp",), (2,), range(2), "cpu", "simulated")
    >>> type(transport(mesh)).__name__
    'Simulated'
    """
    watch = watching.get()
    found = (_pretended.get() if mesh.world == "processes" else None) or _transports[mesh.world]
    if watch is None or tracing_context() is not None:  # tracing communicates nothing
        return found
    session = watch.checks.session() if watch.checks is not None and mesh.world == "processes" else None
    return cast(Transport, Watched(found, operator, session)) if watch.logs or session is not None else found


@contextlib.contextmanager
def simulate(ranks: int) -> Iterator[None]:
    """Meshes made inside the block live in a simulated world of so many ranks, also under torchrun.

    >>> with simulate(8):
    ...     init_mesh(dp=2, tp=4)
    Mesh(dp=2, tp=4)
    """
    with _simulated_ranks.set(integer(ranks, "simulate: ranks", 1)):
        yield


@contextlib.contextmanager
def pretend(mesh: Mesh, rank: int | None = None) -> Iterator[None]:
    """In the block programs are traced for a job with this mesh, which need not be there, as one of its ranks (the first) sees
    it; nothing communicates. Meshes of a simulated world that a program names are those of the job."""
    pretended = Pretended(mesh, mesh.ranks[0] if rank is None else rank)
    try:
        with _pretended.set(pretended):
            yield
    finally:
        pretended.leave()


def seen(mesh: Mesh) -> Mesh:
    """A mesh that a program names, in the job for which it is traced, if it is traced for one that is pretended."""
    if mesh.world != "simulated" or _pretended.get() is None:
        return mesh
    return Mesh.read(mesh.text.replace(";simulated;", ";processes;", 1))


def init_mesh(
    *,
    device: str | None = None,
    ranks: Iterable[int] | None = None,
    slow: str | Iterable[str] = (),
    groups: str = "auto",
    **axes: int,
) -> Mesh:
    """A mesh of named axes over the running job's ranks, or over simulated ranks where there is no job.

    Collective over its ranks where they are processes: the groups that plans may use are made here.

    In order: inside `simulate(n)`, its ranks; else the initialised torch.distributed job; else, started by torchrun,
    that job, which is initialised here; else as many simulated ranks as the mesh has. Later axes vary faster.

    `slow` names the axes whose links are slow, as between machines: plans and operators then prefer the others. With
    `groups="explicit"` only groups over one axis, and those that `mesh.flatten` made, are used.

    >>> init_mesh(dp=2, tp=4).axis_sizes
    {'dp': 2, 'tp': 4}
    >>> init_mesh(dp=2, tp=4, slow=("dp",), groups="explicit")
    Mesh(dp=2, tp=4, slow=('dp',), groups='explicit')
    """
    return _init(axes, device, ranks, slow, groups)


def _init(
    axes: dict[str, int], device: str | None, ranks: Iterable[int] | None, slow: str | Iterable[str], groups: str
) -> Mesh:
    for axis, length in axes.items():
        integer(length, f"init_mesh: axis {axis}", 1, MOST_RANKS)
    optional(a_device, device, "init_mesh: device")
    size = math.prod(axes.values())
    if size > MOST_RANKS:
        raise MeshError(f"init_mesh({_axes_text(axes)}): a mesh has at most {MOST_RANKS:,} ranks, got {size:,}")
    chosen = tuple(range(size)) if ranks is None else integers(ranks, "init_mesh: ranks", 0)
    there, world = _simulated_ranks.get(), "simulated"
    if not there and (there := join(device or "cpu")):
        world = "processes"
    _check_fits(axes, chosen, there or max((size, *(rank + 1 for rank in chosen))), world)
    on_gpus = world == "processes" and "nccl" in dist.get_backend_config()
    mesh = Mesh(tuple(axes), axes.values(), chosen, device or ("cuda" if on_gpus else "cpu"), world, None, slow, groups)
    transport(mesh).ready(mesh)
    _asked_for.add((world, tuple(mesh.axis_sizes.items())))
    return mesh


def made_shapes(world: str) -> set[Shape]:
    """Axes and sizes of the meshes that the user made so far in a world: of simulated ones, those of `init_mesh`, as the
    verifier makes some of its own.

    >>> mesh = init_mesh(rows=3)
    >>> (("rows", 3),) in made_shapes(mesh.world)
    True
    """
    alive = {tuple(mesh.axis_sizes.items()) for mesh in root_meshes() if mesh.world == world == "processes"}
    return alive | {shape for its, shape in _asked_for if its == world}


def init_device_mesh(device_type: str, mesh_shape: Sequence[int], *, mesh_dim_names: Sequence[str] | None = None) -> Mesh:
    """A mesh, by the name and with the arguments that `torch.distributed` has; axes without names are called dim0, dim1, ….

    >>> init_device_mesh("cpu", (2, 4), mesh_dim_names=("dp", "tp")), init_device_mesh("cpu", (2,))
    (Mesh(dp=2, tp=4), Mesh(dim0=2))
    """
    shape = integers(mesh_shape, "init_device_mesh: mesh_shape", 1)
    for size in shape:
        integer(size, "init_device_mesh: mesh_shape", 1, MOST_RANKS)
    names = tuple(f"dim{i}" for i in range(len(shape)))
    if mesh_dim_names is not None:
        names = several(mesh_dim_names, "init_device_mesh: mesh_dim_names", "a name for each axis")
    names = tuple(a_text(name, "init_device_mesh: mesh_dim_names") for name in names)
    if len(names) != len(shape) or len(set(names)) != len(names):
        raise MeshError(
            f"init_device_mesh: each axis has one size (mesh_shape) and one name (mesh_dim_names), and these differ, got "
            f"{shape} and {names}"
        )
    device = a_device(device_type, "init_device_mesh: device_type")
    return _init(dict(zip(names, shape, strict=True)), device, None, (), "auto")


def _check_fits(axes: dict[str, int], ranks: tuple[int, ...], there: int, world: str) -> None:
    outside = [rank for rank in ranks if not 0 <= rank < there]
    if not outside:
        return
    text = _axes_text(axes)
    more = "sw.simulate(n)" if world == "simulated" else "torchrun --nproc-per-node"
    if len(ranks) > there:
        raise MeshError(
            f"mesh ({text}) has {len(ranks)} ranks, the world has {there}; use smaller axes or start more ranks ({more})"
        )
    raise MeshError(f"mesh ({text}) asks for ranks {shown(outside)}, the world has ranks 0 to {there - 1}; choose from those")


def _axes_text(axes: dict[str, int]) -> str:
    return ", ".join(f"{name}={size}" for name, size in axes.items())


def join(device: str) -> int:
    """The number of ranks of the job, which is joined here if torchrun started this process; 0 where there is none."""
    if not dist.is_initialized():
        if not {"RANK", "WORLD_SIZE"} <= os.environ.keys():
            return 0
        if device.startswith("cuda"):
            torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
        dist.init_process_group("nccl" if device.startswith("cuda") else "gloo")
        atexit.register(lambda: dist.destroy_process_group() if dist.is_initialized() else None)
    return dist.get_world_size()
