"""A model as a compiled program in one file.

In the order of imports, which go down only:

    manifest       description of a package, and its check against this process
    collectives    collectives of packages, which release the interpreter's lock
    local_program  traces the local program of a model in one process for every rank of a job
    export         `export`: a model as a compiled program in one file
    load           `load_package`: loads and runs that program
"""

from .export import export
from .load import Package, load_package

__all__ = ["Package", "export", "load_package"]
