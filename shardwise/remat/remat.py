"""`remat`: run a function so that its backward recomputes intermediate results, except those that a policy saves.

>>> import torch, shardwise as sw
>>> x = torch.ones(3, requires_grad=True)
>>> remat(lambda x: x.sin().cos(), x, save=sw.save.nothing).sum().backward()
>>> x.grad
tensor([-0.4029, -0.4029, -0.4029])
"""

from __future__ import annotations

from collections.abc import Callable
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

import torch
from torch import nn

from .._torch.patches import install_for_regions
from .._torch.replacements import HOOKS
from ..base.argument_checks import a_function, a_module, a_text
from ..errors import RematError
from .block import Block, kept_values
from .policies import Policy, checked, default
from .record_replay import BlockRun
from .traced import traced_remat

__all__ = ["kept_values", "remat", "remat_module"]
HOOKS.sees_regions = BlockRun


def remat(function: Callable[..., Any], *args: Any, save: Policy = default, **kwargs: Any) -> Any:
    """`function(*args, **kwargs)`, whose backward recomputes the intermediate results that the policy `save` does not save.

    The second run draws the same random numbers, under the same autocast, and ends when it has what the backward needs. It has
    to compute the same values: otherwise the backward raises a RematError that names the first difference.

    >>> import shardwise as sw
    >>> w = torch.ones(2, 2, requires_grad=True)
    >>> remat(lambda x: (x @ w).relu(), torch.ones(2, 2), save=sw.save.matmuls | sw.save.collectives).sum().item()
    8.0
    """
    a_function(function, "remat: function")
    return _remat(_name(function), function, checked(save, "save="), *args, **kwargs)


def _remat(name: str, function: Callable[..., Any], save: Policy, /, *args: Any, **kwargs: Any) -> Any:
    if torch.compiler.is_compiling():
        return traced_remat(function, args, kwargs, save, name)
    if not torch.is_grad_enabled():
        return function(*args, **kwargs)
    install_for_regions()
    return Block(function, name, save)(args, kwargs)


def remat_module(model: nn.Module, select: str = "*", save: Policy = default) -> nn.Module:
    """Apply `remat` to the submodules with such names; gives the model itself.

    `*` stands for one part of a name: "blocks.*" is every block, and nothing inside one. A module that was selected before gets
    the new policy.

    >>> import shardwise as sw
    >>> model = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2), nn.ReLU()))
    >>> remat_module(model, "1", save=sw.save.matmuls)(torch.ones(1, 2)).shape
    torch.Size([1, 2])
    """
    a_module(model, "remat_module: model")
    a_text(select, "remat_module: select", "a text with the name of submodules, such as 'blocks.*'")
    checked(save, "save=")
    modules, wanted = {name: module for name, module in model.named_modules() if name}, select.split(".")
    parts = {name: name.split(".") for name in modules}
    found = [name for name in modules if len(parts[name]) == len(wanted) and all(map(fnmatchcase, parts[name], wanted))]
    if not found:
        raise RematError(
            f"no module of {type(model).__name__} is called select={select!r}; its modules are {', '.join(list(modules)[:20])}"
        )
    for name in found:
        modules[name].forward = partial(_remat, name, partial(type(modules[name]).forward, modules[name]), save)
    return model


def _name(function: Any) -> str:
    name = getattr(function, "__qualname__", None)
    return _name(function.func) if name is None and isinstance(function, partial) else name or type(function).__name__
