"""The table of changes to torch: every target is there as expected, installing is undone exactly, importing changes nothing."""

import json
import subprocess
import sys

import pytest
import torch

import shardwise as sw
from shardwise._torch import patches
from shardwise._torch.patches import PATCHES, Patch, install_patches, uninstall
from shardwise.errors import WorldError

MOMENTS = ("tensors", "tracing", "regions")
VERSION = tuple(map(int, torch.__version__.split(".")[:2]))
HERE = [row for row in PATCHES if row.versions[0] <= VERSION <= row.versions[1]]


@pytest.fixture
def untouched():
    """torch as it is by itself; afterwards with what was installed before."""
    before = list(patches._undo)
    uninstall()
    yield
    uninstall()
    for moment in before:
        install_patches(moment)


def values() -> list[object]:
    return [row.find()[2] for row in HERE]


def kernels() -> dict[str, bool]:
    key = "PythonTLSSnapshot"
    ops = [value for value in values() if isinstance(value, torch._ops.OpOverload)]
    return {op.name(): torch._C._dispatch_has_kernel_for_dispatch_key(op.name(), key) for op in ops}


@pytest.mark.parametrize("row", HERE, ids=lambda row: row.target)
def test_target_is_as_expected(row, untouched):
    row.find()
    assert row.moment in MOMENTS
    assert row.feature


def test_installing_changes_torch_and_taking_out_restores_it(untouched):
    before, registered = values(), kernels()
    assert registered
    assert not any(registered.values())
    for moment in MOMENTS:
        install_patches(moment)
        install_patches(moment)  # does nothing
    for row, value in zip(HERE, before, strict=True):
        module, _, path = row.target.partition(":")
        holder = sys.modules[module]
        *outer, name = path.split(".")
        for part in outer:
            holder = getattr(holder, part)
        now = vars(holder).get(name, getattr(holder, name))
        assert isinstance(value, torch._ops.OpOverload) or now is not value, row.target
    assert all(torch._C._dispatch_has_kernel_for_dispatch_key(name, "PythonTLSSnapshot") for name in registered)
    uninstall()
    assert all(now is value for now, value in zip(values(), before, strict=True))
    assert kernels() == registered
    assert not hasattr(torch.Tensor, "__coerce_same_metadata_as_tangent__")


def test_patches_work_again_after_they_were_taken_out(untouched):
    with sw.simulate(2):
        mesh = sw.init_mesh(dp=2)
        install_patches("tensors")  # an interned mesh may be there already
        x = sw.distribute_tensor(torch.tensor([0, 7]), mesh, [sw.Shard(0)])
        with pytest.raises(sw.OperatorError, match="one_hot of class 7"):
            torch.nn.functional.one_hot(x, 4)


def test_missing_target_names_the_feature_that_is_lost(untouched, monkeypatch):
    row = next(row for row in PATCHES if row.target.endswith("_must_be_in_forward"))
    renamed = row._replace(target=row.target.replace("_must_be_in_forward", "_must_stay_in_forward"))
    monkeypatch.setattr(patches, "PATCHES", (renamed,))
    with pytest.raises(
        WorldError, match=r"partitioners._must_stay_in_forward is missing; without it Shardwise loses compiled training"
    ):
        install_patches("tracing")
    assert not patches._undo


def test_target_with_other_parameters_names_both():
    row = Patch("tracing", "a feature", "textwrap:dedent", "self text", lambda value: value)
    with pytest.raises(
        WorldError, match=r"textwrap.dedent has \(text\) where Shardwise expects \(self text\); .* loses a feature"
    ):
        row.find()


FRESH = """
import importlib, json, sys, torch
LISTS = ("torch.optim.optimizer", "torch.utils._foreach_utils")
lists = [importlib.import_module(name) for name in LISTS]
state_dicts = importlib.import_module("torch.distributed._state_dict_utils")
config = importlib.import_module("torch._functorch.config")
def look():
    return [state_dicts._iterate_state_dict, *(module._foreach_supported_types for module in lists),
            *(len(module._foreach_supported_types) for module in lists), config.enable_autograd_cache,
            hasattr(torch.Tensor, "__coerce_same_metadata_as_tangent__")]
before = look()
import shardwise as sw
from shardwise._torch import patches
same = [old is new for old, new in zip(before, look())]
compiler = [name for name in ("torch._dynamo", "torch._inductor", "torch._functorch.partitioners") if name in sys.modules]
kernels = [op for op in ("aten::one_hot", "aten::kron.out")
           if torch._C._dispatch_has_kernel_for_dispatch_key(op, "PythonTLSSnapshot")]
installed = list(patches._undo)
with sw.simulate(2):
    sw.init_mesh(dp=2)
print(json.dumps([same, compiler, kernels, installed, list(patches._undo), "torch._dynamo" in sys.modules]))
"""


def test_importing_changes_nothing_and_imports_no_compiler():
    done = subprocess.run([sys.executable, "-c", FRESH], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    same, compiler, kernels, installed, with_mesh, traces = json.loads(done.stdout.splitlines()[-1])
    assert all(same)
    assert (compiler, kernels, installed) == ([], [], [])
    assert with_mesh == ["tensors"]
    assert not traces
