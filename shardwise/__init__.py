"""Shardwise: distributed tensors that mean what one device means."""

from . import debug, p2p
from .base.caches import cache_clear, cache_info
from .comm import Bundle, communication, debug_mode, init_device_mesh, init_mesh, simulate, trace_comm
from .comm.calibrate import calibrate
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
    RankError,
    RematError,
    ShardwiseError,
    WorldError,
)
from .kernels.grouped_mm import grouped_mm
from .kernels.int_pow import int_pow
from .layouts.from_placements import make_layout as layout
from .layouts.layout import Layout
from .layouts.mesh import Mesh
from .layouts.placement import Partial, Placement, Replicate, Shard, StridedShard
from .package import Package, export, load_package
from .pipeline import Pipeline, Schedule, pipeline
from .planning.plan import plan
from .programs import Program, capture, compile, compile_report, load_artifacts, save_artifacts
from .propagation.table import VERSION as __version__  # noqa: F401  known by this name
from .remat import policies as save
from .remat import remat, remat_module
from .rules.ring_attention import ring_attention
from .tensor.distribute import distribute_module, distribute_tensor
from .tensor.dtensor import DTensor
from .tensor.each_rank import each_rank
from .tensor.factories import empty, full, ones, rand, randint, randn, randperm, zeros
from .tensor.relabel import relabel
from .verify.register import rule

__all__ = ["Bundle", "DTensor", "distribute_module", "distribute_tensor", "each_rank"]
__all__ += ["empty", "full", "ones", "rand", "randint", "randn", "randperm", "zeros"]
__all__ += ["Layout", "Mesh", "init_device_mesh", "init_mesh", "layout", "relabel", "simulate"]
__all__ += ["Partial", "Placement", "Replicate", "Shard", "StridedShard"]
__all__ += ["calibrate", "communication", "debug", "debug_mode", "p2p", "plan", "trace_comm"]
__all__ += ["Program", "capture", "compile", "compile_report", "load_artifacts", "save_artifacts"]
__all__ += ["Package", "export", "load_package"]
__all__ += ["Pipeline", "Schedule", "pipeline", "remat", "remat_module", "save"]
__all__ += ["grouped_mm", "int_pow", "ring_attention"]
__all__ += ["cache_clear", "cache_info", "rule"]
__all__ += ["ArgumentError", "LayoutError", "MeshError", "MissingFileError", "OperatorError", "PlanError", "ShardwiseError"]
__all__ += ["CommunicationError", "CompileError", "MismatchError", "PipelineError", "RankError", "RematError", "WorldError"]
