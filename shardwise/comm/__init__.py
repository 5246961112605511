"""Every communication goes through here: `door(mesh)` gives the world behind a mesh."""

from ..layout import PerRank
from .debug import debug_mode
from .door import Door
from .groups import Processes
from .policy import check, communication
from .record import Log, Record, note_decomposed, note_fallback, trace_comm
from .simulated import Bundle, Simulated
from .worlds import door, init_device_mesh, init_mesh, pretend, seen, simulate

__all__ = [
    "Bundle",
    "Door",
    "Log",
    "PerRank",
    "Processes",
    "Record",
    "Simulated",
    "check",
    "communication",
    "debug_mode",
    "door",
    "init_device_mesh",
    "init_mesh",
    "note_decomposed",
    "note_fallback",
    "pretend",
    "seen",
    "simulate",
    "trace_comm",
]
