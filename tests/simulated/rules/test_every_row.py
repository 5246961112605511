"""Every row of the rule table is compared with the dense operator, on every placement of its samples."""

from __future__ import annotations

import importlib
import pkgutil

import pytest

import tests.samples
from shardwise.propagation.table import TABLE
from tests.helpers.one_device import MESHES, Sample, check, placements_of

SAMPLES: dict[str, list[Sample]] = {}
for module in pkgutil.iter_modules(tests.samples.__path__):
    SAMPLES |= importlib.import_module(f"tests.samples.{module.name}").SAMPLES


#: How many placements of a sample are tried on each mesh; `shardwise verify` tries others.
FEW, MANY = {"2": 16, "3": 8, "2x2": 12, "2x2x2": 3}, {"2": 60, "3": 25, "2x2": 40, "2x2x2": 6}


@pytest.mark.parametrize("name", sorted(SAMPLES))
def test_rule_means_the_dense_operator(name: str, pytestconfig: pytest.Config) -> None:
    for number, one in enumerate(SAMPLES[name]):
        for mesh, limit in (MANY if pytestconfig.getoption("--slow") else FEW).items():
            for placements in placements_of(one, MESHES[mesh], limit, seed=number):
                check(one, MESHES[mesh], placements)


def test_every_rule_has_a_sample() -> None:
    own = {name for name in TABLE if name.partition(".")[0] in ("aten", "prims", "shardwise")}  # not those that users add
    assert sorted(own - set(SAMPLES)) == []
