"""What `release_check.py` runs where the wheel is installed: one feature a call, compared with the same program on one device.

    python release_probes.py capture
    torchrun --nproc-per-node 2 release_probes.py processes

It is copied to a folder outside the checkout, with the guides and what compares their output, so `import shardwise` can only
be what was installed.
"""

import contextlib
import importlib.metadata
import io
import re
import runpy
import sys
from pathlib import Path

import torch
from torch import nn

import shardwise as sw
from shardwise import Shard
from tests.docs.scripts import SCRIPTS, check_output, promised

PACKAGE = "model.pt2"


def readme():
    """Every Python block of the README that the wheel carries as its description prints what stands below it."""
    text = importlib.metadata.metadata("shardwise").get_payload()
    blocks = re.findall(r"```python\n(.*?)```\n(?:\n```text\n(.*?)```\n)?", text, re.S)
    assert blocks, "the wheel's description has no Python block"
    for code, shown in blocks:
        check_output(printed(lambda code=code: exec(compile(code, "README.md", "exec"), {})), shown, "README.md")


def guides():
    """The tour and every guide print what they show."""
    for path in SCRIPTS:
        print(path.name, flush=True)
        check_output(printed(lambda path=path: runpy.run_path(str(path))), promised(path.read_text()), path.name)


def printed(program):
    """What a program prints."""
    with contextlib.redirect_stdout(io.StringIO()) as output:
        program()
    return output.getvalue()


def eager():
    """A training step operator by operator, simulated."""
    compare(lambda step: step)


def capture():
    """The same step traced once to a local program, simulated."""
    compare(sw.capture)


def compiled():
    """The same step compiled by Inductor, on the ranks of a job."""
    assert mesh().world == "processes", "run it under torchrun"
    compare(sw.compile)


def processes():
    """The step operator by operator on the ranks of a job, and a layout that moves."""
    assert mesh().world == "processes", "run it under torchrun"
    compare(lambda step: step)
    x = sw.distribute_tensor(torch.arange(12.0).reshape(4, 3), mesh(), [Shard(0)])
    torch.testing.assert_close(x.redistribute(placements=[Shard(1)]).full_tensor(), torch.arange(12.0).reshape(4, 3))


def export():
    """Write a package, in one process and without a job."""
    model, _, x = distributed(nn.Linear(16, 32))
    sw.export(Noisy(model), (x,), mesh(), PACKAGE)


def load():
    """Load that package on the ranks of a job; random numbers reach operators that it calls by name, with a dtype."""
    model, plain, x = distributed(nn.Linear(16, 32))
    program = sw.load_package(PACKAGE, parameters=Noisy(model))
    (result, noise), (_, other) = program(x), program(x)
    torch.testing.assert_close(result.full_tensor(), plain(x.full_tensor()))
    assert noise.dtype == torch.float32 and noise.full_tensor().ne(other.full_tensor()).any()


class Noisy(nn.Module):
    """What a layer gives, and as many random numbers."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x):
        y = self.layer(x)
        return y, torch.rand_like(y)


# ── one program on one device and on two ranks ──


def mesh():
    """Two ranks: those of the job, if there is one, otherwise simulated."""
    return sw.init_mesh(tp=2)


def distributed(plain):
    """A linear layer sharded by its outputs, the same on one device, and an input for both."""
    torch.manual_seed(0)
    plain.reset_parameters()
    model = nn.Linear(plain.in_features, plain.out_features)
    for name, value in plain.named_parameters():
        setattr(model, name, nn.Parameter(sw.distribute_tensor(value.detach().clone(), mesh(), [Shard(0)])))
    return model, plain, sw.distribute_tensor(torch.randn(8, plain.in_features), mesh(), {})


def compare(transform):
    """Three steps of AdamW give the losses and the weight that they give on one device."""
    model, plain, x = distributed(nn.Linear(16, 32))
    losses = training(model, x, transform)
    torch.testing.assert_close(losses, training(plain, x.full_tensor(), lambda step: step))
    torch.testing.assert_close(model.weight.full_tensor(), plain.weight)


def training(model, x, transform):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

    def step(x):
        loss = torch.relu(model(x)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    run = transform(step)
    return torch.tensor([run(x).detach().item() for _ in range(3)])


PROBES = {probe.__name__: probe for probe in (readme, guides, eager, capture, compiled, processes, export, load)}

if __name__ == "__main__":
    assert Path(sw.__file__).is_relative_to(sys.prefix), f"{sw.__file__} is not what was installed in {sys.prefix}"
    torch.set_num_threads(1)
    PROBES[sys.argv[1]]()
