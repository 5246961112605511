"""The contents page of compiling."""

from .artifacts import load_artifacts, save_artifacts
from .capture import Program, capture
from .job import Compilation, compile, compile_report
from .ways import WAYS

__all__ = ["WAYS", "Compilation", "Program", "capture", "compile", "compile_report", "load_artifacts", "save_artifacts"]
