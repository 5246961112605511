"""The proof of a plan refuses steps that do not denote their target."""

from __future__ import annotations

from typing import Any

import pytest

import shardwise as sw
from shardwise import Partial, PlanError
from shardwise.layouts.from_placements import make_layout
from shardwise.layouts.layout import Layout
from shardwise.planning.proof import prove
from shardwise.planning.step import Step
from tests.helpers.plans import S0, S1, P, R, mesh_of


def test_the_proof_refuses_what_is_not_so() -> None:
    mesh = mesh_of(2, 2)

    def at(*placements: Any) -> Layout:
        return sw.layout((5, 4), mesh, list(placements))

    wrong = [
        Step("all_gather", ("a",), at(S0, S0), make_layout((5, 4), mesh, {"b": S0})),  # a is not the minor axis
        Step("all_gather", ("a",), at(S0, S1), at(R, R)),  # b is gathered as well
        Step("take", ("a",), at(S0, R), at(S1, R)),  # nobody holds its columns
        Step("take", (), at(P, R), at(R, R)),  # nothing was reduced
        Step("all_reduce", ("a",), at(P, P), at(R, R)),  # b is still partial
        Step("reduce_scatter", ("a",), at(P, R), at(R, S0)),  # a does not shard
        Step("exchange", ("a",), at(S0, S1), at(S1, S0)),  # half of it lies along b
        Step("all_to_all", ("a",), at(S0, R), at(S1, R)),  # five rows are not equal shards
        Step("permute", ("a",), at(S0, R), at(S1, R)),  # rows are not columns
        Step("split", ("a",), at(S0, R), at(P, R)),  # a rank holds its rows only
        Step("embed", ("a",), at(S0, S0), at(P, S0)),
        Step("scale", ("a",), at(P, R), at(Partial("max"), R)),
    ]
    for step in wrong:
        with pytest.raises(PlanError, match="does not denote its target"):
            prove((step,), step.before, step.after)
    with pytest.raises(PlanError, match="end in"):
        prove((), at(S0, R), at(R, R))
    with pytest.raises(PlanError, match="does not start from"):
        prove((Step("take", ("a",), at(R, R), at(S0, R)),), at(S1, R), at(S0, R))
