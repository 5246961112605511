"""Every exception Shardwise raises.

    ShardwiseError
    ├── ArgumentError        an argument of a wrong type, or of a value that no call takes
    │   └── MissingFileError a file to read that is not there
    ├── MeshError            a mesh that cannot be: unknown axis, wrong size, ranks the world does not have
    ├── LayoutError          a layout that cannot be: wrong dim, too few placements, mixed Partials
    ├── PlanError            a redistribution that cannot be planned: too little memory, no groups, another world
    ├── OperatorError        an operator that cannot take these layouts
    ├── CommunicationError   communication that `sw.communication("forbid")` refused
    ├── RematError           a block that is not the same the second time, or cannot be run twice
    ├── PipelineError        a pipeline that cannot be: a schedule out of order, a batch that does not divide, shared parameters
    ├── CompileError         a program that another rank failed to compile, or artifacts that do not fit here
    ├── MismatchError        ranks that are about to communicate different things, found by `sw.debug_mode()`
    ├── RankError            another rank failed, or does not answer, so that this one cannot go on
    └── WorldError           the world around: ranks that disagree, a value that differs between simulated ranks

Each is raised from facts that every rank knows, before any communication, so all ranks raise it alike; a CompileError tells
each rank what it waited for, a MismatchError tells all what one of them found, and a RankError what one of them raised.
"""


class ShardwiseError(Exception):
    """The root of all errors of this library."""


class ArgumentError(ShardwiseError, TypeError, ValueError):
    """An argument that no call takes: its text names the parameter, what it was given and what is allowed."""


class MissingFileError(ArgumentError, FileNotFoundError):
    """A file to read that is not there."""


class MeshError(ShardwiseError, ValueError):
    """A mesh that cannot be built or an axis it does not have."""


class LayoutError(ShardwiseError, ValueError):
    """A layout that cannot be."""


class PlanError(ShardwiseError, RuntimeError):
    """A redistribution that cannot be planned as asked."""


class OperatorError(ShardwiseError, RuntimeError):
    """An operator that cannot take the layouts it was given."""


class CommunicationError(ShardwiseError, RuntimeError):
    """Communication where the caller forbade it."""


class RematError(ShardwiseError, RuntimeError):
    """A block that was computed a second time and was not the same, or that cannot be computed twice."""


class PipelineError(ShardwiseError, ValueError):
    """A pipeline that cannot be built or run as asked."""


class CompileError(ShardwiseError, RuntimeError):
    """A program that another rank failed to compile, or artifacts that do not fit here."""


class MismatchError(ShardwiseError, RuntimeError):
    """Ranks that are about to communicate different things, or one that the others wait for in vain."""


class RankError(ShardwiseError, RuntimeError):
    """Another rank failed, or does not answer, so that this one cannot go on."""


class WorldError(ShardwiseError, RuntimeError):
    """Ranks that disagree, or a world that is not there."""


class Unsettled(TypeError):  # so that a look-up by what has no hash fails as any other does
    """A signal, no error: in a trace with symbolic sizes something depends on the very size, which has to be specialised."""
