"""A model as a compiled program in one file.

In the order of imports, which go down only:

    manifest       what a package says of itself, and whether that fits here
    collectives    how programs in packages communicate: without the interpreter's lock
    local_program  the local program of a model, traced in one process for every rank of a job
    export         `export`: a model as a compiled program in one file
    load           `load_package`: that program, ready to be called
"""

from .export import export
from .load import Package, load_package

__all__ = ["Package", "export", "load_package"]
