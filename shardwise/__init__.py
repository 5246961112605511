"""Shardwise: distributed tensors that mean what one device means."""

from . import composites, debug, flex, p2p, save, windows  # noqa: F401  composites and flex teach torch, windows adds rules
from .comm import Bundle, communication, debug_mode, init_device_mesh, init_mesh, simulate, trace_comm
from .comm.calibrate import calibrate
from .compiled import Program, capture, compile, compile_report, load_artifacts, save_artifacts
from .distribute import distribute_module, distribute_tensor
from .each import each_rank
from .errors import (
    ArgumentError,
    CommunicationError,
    CompileError,
    LayoutError,
    MeshError,
    MismatchError,
    MissingFileError,
    OperatorError,
    PipelineError,
    PlanError,
    RematError,
    ShardwiseError,
    WorldError,
)
from .factories import empty, full, ones, rand, randint, randn, randperm, zeros
from .grouped import grouped_mm
from .identity import VERSION as __version__  # noqa: F401  known by this name
from .int_pow import int_pow
from .layout import Layout
from .layout import make_layout as layout
from .memo import cache_clear, cache_info
from .mesh import Mesh
from .package import Package, export, load_package
from .pipeline import Pipeline, Schedule, pipeline
from .placement import Partial, Placement, Replicate, Shard, StridedShard
from .plan import plan
from .relabel import relabel
from .remat import remat, remat_module
from .ring import ring_attention
from .tensor import DTensor
from .verify.register import rule

__all__ = [
    "ArgumentError",
    "Bundle",
    "CommunicationError",
    "CompileError",
    "DTensor",
    "Layout",
    "LayoutError",
    "Mesh",
    "MeshError",
    "MismatchError",
    "MissingFileError",
    "OperatorError",
    "Package",
    "Partial",
    "Pipeline",
    "PipelineError",
    "Placement",
    "PlanError",
    "Program",
    "RematError",
    "Replicate",
    "Schedule",
    "Shard",
    "ShardwiseError",
    "StridedShard",
    "WorldError",
    "cache_clear",
    "cache_info",
    "calibrate",
    "capture",
    "communication",
    "compile",
    "compile_report",
    "debug",
    "debug_mode",
    "distribute_module",
    "distribute_tensor",
    "each_rank",
    "empty",
    "export",
    "full",
    "grouped_mm",
    "init_device_mesh",
    "init_mesh",
    "int_pow",
    "layout",
    "load_artifacts",
    "load_package",
    "ones",
    "p2p",
    "pipeline",
    "plan",
    "rand",
    "randint",
    "randn",
    "randperm",
    "relabel",
    "remat",
    "remat_module",
    "ring_attention",
    "rule",
    "save",
    "save_artifacts",
    "simulate",
    "trace_comm",
    "zeros",
]
