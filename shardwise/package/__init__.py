"""The contents page of packages."""

from .export import export
from .load import Package, load_package

__all__ = ["Package", "export", "load_package"]
