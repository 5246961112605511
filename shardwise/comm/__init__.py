"""The transport, through which every communication goes, and the worlds behind it: process groups or simulated ranks.

In the order of imports, which go down only:

    source_lines      the lines of the user's program that led here
    policy            `communication`: whether operators may communicate on their own account
    interception      where rematerialisation records or replays what was communicated or drawn
    messages          `Batch`: messages between ranks, described in the same way on every rank
    transport         the one interface that every communication goes through
    encoding          encodings of tensors for collectives, since backends know few dtypes and lose NaN
    simulated         the transport to N ranks in this process
    absent            what a rank holds of a tensor on a mesh that it is not in: a shape without data
    host_collectives  collectives on hosts, by messages to every peer
    aliases           aliases for process groups, and groups that call a hook before each collective of an alias
    store             the job's store: topics, signs of life, whether another rank's process has ended
    failures          failures of one rank raise on all: a text in the job's store, and closed groups to wake ranks that wait
    agreement         ranks compare a text that must be the same on all
    delivery          messages over a process group: one launch, and tensors registered with their work
    tracing           what steers a trace; whether the traced program belongs to one rank only
    processes         the transport to `torch.distributed` process groups
    pretended         the transport to a job that is not there, for tracing
    watch/            what watches communication: logs and debug mode
    worlds            `init_mesh`, `simulate`: which world a mesh lives in
    calibrate         `calibrate`: what the links of each axis cost, measured
"""

from ..layouts.layout import PerRank
from .policy import check, communication
from .processes import Processes
from .simulated import Bundle, Simulated
from .transport import Transport
from .watch.log import Log, Record, note
from .watch.watched import debug_mode, trace_comm
from .worlds import init_device_mesh, init_mesh, pretend, seen, simulate, transport

__all__ = [
    "Bundle",
    "Log",
    "PerRank",
    "Processes",
    "Record",
    "Simulated",
    "Transport",
    "check",
    "communication",
    "debug_mode",
    "init_device_mesh",
    "init_mesh",
    "note",
    "pretend",
    "seen",
    "simulate",
    "trace_comm",
    "transport",
]
