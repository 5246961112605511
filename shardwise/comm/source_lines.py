"""The lines of the user's program that led here, for errors and logs.

Knows nothing of meshes and tensors.
"""

from __future__ import annotations

import contextlib
import functools
import os
import sys
from types import FrameType
from typing import NamedTuple

import torch


class Line(NamedTuple):
    """A line of the user's program."""

    path: str
    number: int

    def __str__(self) -> str:
        return f"{os.path.basename(self.path)}:{self.number}"


#: What paths begin with that are not the user's; compilers write code to no file, or to a module of torch wherever its file is.
_LIBRARIES = (*(os.path.dirname(path) + os.sep for path in (os.path.dirname(__file__), torch.__file__)), "<eval_with_key>")
#: Programs that this library wrote have this name in place of a file's.
CAPTURED = "<captured program>"
_PASSED_THROUGH = (contextlib.__file__, functools.__file__, CAPTURED)


def callers(most: int) -> list[Line]:
    """The innermost lines outside Shardwise and torch, at most so many; none in a thread that has no line of the user's.

    >>> len(callers(1))
    1
    """
    frame: FrameType | None = sys._getframe(1)
    lines = list[Line]()
    while frame is not None and len(lines) < most:
        path, module = frame.f_code.co_filename, str(frame.f_globals.get("__name__"))
        if not path.startswith(_LIBRARIES) and path not in _PASSED_THROUGH and not module.startswith("torch."):
            lines.append(Line(path, frame.f_lineno))
        frame = frame.f_back
    return lines


def caller() -> Line:
    """The innermost line outside Shardwise and torch; `<autograd>:0` in a thread that has no line of the user's.

    >>> caller().number > 0
    True
    """
    return next(iter(callers(1)), Line("<autograd>", 0))
