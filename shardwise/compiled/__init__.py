"""The contents page of compiling."""

from .artifacts import load_artifacts, save_artifacts
from .job import Compilation, compile, compile_report

__all__ = ["Compilation", "compile", "compile_report", "load_artifacts", "save_artifacts"]
