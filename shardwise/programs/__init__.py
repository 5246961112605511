"""A distributed function as a local program of plain operators and collectives: capture and compile.

In the order of imports, which go down only:

    passes/        graph passes on local programs
    constructors   constructors of DTensors as operators of a traced program
    training_step  whole training steps as one program: optimizer methods, gradients of leaves
    show           a local program as text to read
    assemble       a local program as a Python function
    capture        `capture`: a distributed function as a local program, also in debug mode
    job/           compiles a program once for the whole job
"""

from .capture import Program, capture
from .constructors import WAYS
from .job.artifacts import load_artifacts, save_artifacts
from .job.compile import Compilation, compile, compile_report

__all__ = ["WAYS", "Compilation", "Program", "capture", "compile", "compile_report", "load_artifacts", "save_artifacts"]
