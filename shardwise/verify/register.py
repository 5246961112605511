"""`rule`: a rule for a user's own operator, proven on the samples the user gives before it is taken into the table."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ..base.argument_checks import a_function, a_text, choice, flag, instance, integers, optional, refuse, several
from ..base.schema import schema_of
from ..errors import OperatorError
from ..layouts.placement import KINDS
from ..propagation.notation import Rule
from ..propagation.table import TABLE
from ..propagation.table import rule as add_row
from ..tensor.dispatch import forget
from .calls import Sample
from .soundness import Trial, check


def rule(op: Any, sentence: str, *, samples: Sequence[tuple[Any, ...]], **words: Any) -> None:
    """Say how an operator of your own may be sharded, as in `"m k, k n -> m n"`; `samples` are arguments to prove it with.

    `words` are those of `propagation.notation.Rule`: `linear`, `lost`, `passes`, `whole`, `kernel` and so on. All that the
    rule allows is tried on the samples, and it is refused, with a counterexample, where one device gives something else. An
    operator has one rule: a second is refused.

    >>> import shardwise as sw
    >>> @torch.library.custom_op("example::twice", mutates_args=())
    ... def twice(x: torch.Tensor) -> torch.Tensor:
    ...     return x * 2
    >>> _ = twice.register_fake(torch.empty_like)
    >>> sw.rule("example::twice", "... -> ...", samples=[(torch.randn(4, 3),)], linear=((0,),))
    >>> x = sw.ones(4, 3, mesh=sw.init_mesh(tp=2), placements=[sw.Shard(0)])
    >>> twice(x)
    DTensor(f32[4@tp, 3], mesh=(tp=2))
    """
    overload = _overload(op)
    a_text(sentence, "rule: sentence", "a text such as 'm k, k n -> m n'")
    samples = several(samples, "rule: samples", "several tuples of arguments of the operator")
    _check_words(words)
    facts = schema_of(overload)
    _check_operator(facts, samples)
    add_row(f"{overload._schema.name}.{overload._overloadname}", sentence, **words)
    forget()
    try:
        _prove(facts.name, TABLE[f"{facts.name}.{overload._overloadname}"], overload, samples)
    except BaseException:
        TABLE.pop(f"{facts.name}.{overload._overloadname}")
        raise
    finally:
        forget()


def _overload(op: Any) -> Any:
    """The operator overload that is meant by a name, an overload, a packet or what `torch.library.custom_op` gives."""
    if isinstance(op, str):
        namespace, _, rest = op.partition("::")
        name, _, overload = rest.partition(".")
        packet = getattr(getattr(torch.ops, namespace), name, None) if name else None
        found = getattr(packet, overload or "default", None)
        if found is None:
            raise OperatorError(f"sw.rule(op={op!r}): no such operator; name one as 'library::operator', after it is defined")
        return found
    op = getattr(op, "_opoverload", op)  # what custom_op gives
    found = op if hasattr(op, "_schema") else getattr(op, "default", None)
    if not hasattr(found, "_schema"):
        refuse("rule: op", "an operator, such as torch.ops.library.operator, or its name, as 'library::operator'", op)
    return found


def _check_words(words: dict[str, Any]) -> None:
    for name, value in words.items():
        what = f"rule: {name}"
        if name in ("rounds", "copies", "zipped"):
            flag(value, what)
        elif name in ("kernel", "program", "function", "gives"):
            optional(a_function, value, what)
        elif name in ("lost", "together"):
            optional(choice, value, what, KINDS)
        elif name == "linear":
            for together in several(value, what, "several tuples of positions of tensor arguments"):
                integers(together, what, 0)
        elif name in ("whole", "static", "free", "passes", "unoffered"):
            optional(instance, value, (str, tuple, list, set, frozenset), what, "a text, or several")
        else:
            known = "see shardwise.propagation.notation.Rule for those there are"
            raise OperatorError(f"sw.rule: {name}= is no word of a rule; {known}")


def _check_operator(facts: Any, samples: Sequence[Any]) -> None:
    if facts.name.partition(".")[0] in ("aten", "prims", "shardwise"):
        raise OperatorError(f"sw.rule is for operators of your own; {facts.name} is served by Shardwise")
    if facts.written:
        raise OperatorError(
            f"{facts.name} writes to {', '.join(facts.written)}: a rule speaks of results; give the operator a form that "
            "returns new tensors"
        )
    if not samples:
        raise OperatorError(
            f"sw.rule({facts.name!r}) needs samples=[(x, ...), ...]: the rule is proven on them before it is used. Give small "
            "tensors with different sizes, all above 1, and one sample for each way the other arguments change the result"
        )
    for sample in samples:
        if not isinstance(sample, tuple):
            refuse(f"each of the samples of {facts.name}", "a tuple of its arguments", sample)


def _prove(name: str, row: Rule, overload: Any, samples: Sequence[tuple[Any, ...]]) -> None:
    for arguments in samples:
        try:
            _, found = check(Sample(overload, arguments, {}), row)
        except NotImplementedError as error:
            raise OperatorError(
                f"{name} cannot be run on tensors without data, which tells the shapes of its results: register that with "
                f"torch.library.register_fake ({error})"
            ) from error
        if found:
            raise OperatorError(_refusal(name, row.text, found[0]))


def _refusal(name: str, sentence: str, found: Trial) -> str:
    shapes = ", ".join(str(list(tensor.shape)) for tensor in found.sample.tensors)
    placed = ", ".join(str(list(placement)) for placement in found.placements)
    choice = next((c for c in found.choices or () if any(s is not None for s in c.wants)), None)
    left = next((s for s in choice.results if isinstance(s, str)), None) if choice else None
    if choice is None:
        meaning = "with the moves that it needs"
        remedy = "Check the sentence: one pattern for each tensor argument and result, in the order of the operator's schema."
    elif (label := choice.label) is None:
        meaning = f"where a partial {next(s for s in choice.wants if isinstance(s, str))} is said to pass"
        remedy = "Leave these arguments out of linear= (the operator is not additive in them), or the kind out of passes=."
    elif left is not None:
        meaning = f"where {label!r} is sharded and the result is said to be Partial({left})"
        remedy = f"Say what sharding {label!r} leaves, as lost='max', or that it cannot be sharded: whole={label!r}."
    else:
        meaning = f"where {label!r} is sharded"
        remedy = f"If {label!r} cannot be sharded, say whole={label!r}; if shards need another function, give kernel=."
    return (
        f"the rule {sentence!r} of {name} is refused: on tensors {shapes} with placements {placed} on {found.mesh}, "
        f"{meaning}, it {found.text}, which one device gives. {remedy}"
    )
