"""Shardwise: distributed tensors that mean what one device means."""

from . import flex, save  # noqa: F401  flex teaches torch, when imported
from .comm import Bundle, communication, init_mesh, simulate, trace_comm
from .comm.calibrate import calibrate
from .compiled import Program, capture, compile, compile_report, load_artifacts, save_artifacts
from .errors import (
    CommunicationError,
    CompileError,
    LayoutError,
    MeshError,
    OperatorError,
    PlanError,
    RematError,
    ShardwiseError,
    WorldError,
)
from .factories import empty, full, ones, rand, randint, randn, randperm, zeros
from .identity import VERSION as __version__  # noqa: F401  known by this name
from .layout import Layout
from .layout import make_layout as layout
from .memo import cache_clear, cache_info
from .mesh import Mesh
from .package import Package, export, load_package
from .placement import Partial, Placement, Replicate, Shard
from .plan import plan
from .relabel import relabel
from .remat import remat, remat_module
from .tensor import DTensor, distribute_tensor
from .verify.register import rule

__all__ = [
    "Bundle",
    "CommunicationError",
    "CompileError",
    "DTensor",
    "Layout",
    "LayoutError",
    "Mesh",
    "MeshError",
    "OperatorError",
    "Package",
    "Partial",
    "Placement",
    "PlanError",
    "Program",
    "RematError",
    "Replicate",
    "Shard",
    "ShardwiseError",
    "WorldError",
    "cache_clear",
    "cache_info",
    "calibrate",
    "capture",
    "communication",
    "compile",
    "compile_report",
    "distribute_tensor",
    "empty",
    "export",
    "full",
    "init_mesh",
    "layout",
    "load_artifacts",
    "load_package",
    "ones",
    "plan",
    "rand",
    "randint",
    "randn",
    "randperm",
    "relabel",
    "remat",
    "remat_module",
    "rule",
    "save",
    "save_artifacts",
    "simulate",
    "trace_comm",
    "zeros",
]
