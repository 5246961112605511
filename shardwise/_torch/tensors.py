"""Private names of torch's tensors, operators, dispatcher and autograd, each with the reason it is needed.

Supported: torch 2.11 to 2.13. Nothing outside of this folder touches `torch._*`.
"""

from __future__ import annotations

import contextlib
import contextvars
import importlib
from collections.abc import Callable, Iterator
from operator import attrgetter
from typing import Any

import torch
import torch._decomp  # the table of decompositions is filled on import
import torch._meta_registrations  # Python meta kernels give output shapes of many operators
import torch.distributed._functional_collectives  # gives the collective operators their fake kernels, for tracing
from torch._ops import OpOverload as OpOverload
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode
from torch.utils._python_dispatch import is_traceable_wrapper_subclass_type
from torch.utils._pytree import tree_flatten as tree_flatten
from torch.utils._pytree import tree_leaves as tree_leaves
from torch.utils._pytree import tree_map_only as tree_map_only
from torch.utils._pytree import tree_unflatten as tree_unflatten

#: The only constructor of a tensor subclass that holds no memory of its own. In the order size, strides, storage offset, memory
#: format, dtype, layout, device its arguments are parsed in three quarters of the time that names take.
make_wrapper = torch.Tensor._make_wrapper_subclass

#: Turning the Python torch-function protocol off halves the cost of an operator on a subclass.
no_torch_function: Any = torch._C._disabled_torch_function_impl

#: Operator → a Python function of other operators; serves operators that have no rule.
decompositions: dict[Any, Any] = torch._decomp.decomposition_table

#: In the block operators skip what autograd would do, which costs more than some of them.
below_autograd: Any = torch._C._AutoDispatchBelowAutograd

#: Which memory format the strides of a tensor are like, contiguous or not; the public function asks for one and for both.
format_like: Any = torch._prims_common.suggest_memory_format

#: How many dispatch modes (tracers, say) see the operators that run now; no public function tells.
dispatch_modes: Any = torch._C._len_torch_dispatch_stack

#: Given a key and False: in the block operators see that key again, which dispatch to a subclass hides from what it calls.
excludes: Any = torch._C._SetExcludeDispatchKeyGuard

#: Whether a class of tensors wraps others, and says which.
is_wrapper: Any = is_traceable_wrapper_subclass_type

#: Whether the backward that runs now leaves the graph as it is, so that another can follow.
keeps_graph: Any = torch._C._autograd._get_current_graph_task_keep_graph


def alias(x: torch.Tensor) -> torch.Tensor:
    """A tensor over the same memory, for use below autograd, where views would not see the writes to one another."""
    with excludes(torch._C.DispatchKey.ADInplaceOrView, False):
        return x.detach()


@contextlib.contextmanager
def knows_conjugates() -> Iterator[None]:
    """In the block a tensor that is marked as a conjugate or a negative is read as one: for operators that make such tensors
    themselves, and run where dispatch to a subclass has hidden that."""
    with excludes(torch._C.DispatchKey.Conjugate, False), excludes(torch._C.DispatchKey.Negative, False):
        yield


#: Whether two tensors share memory, also of those that have none of their own while a program is traced.
is_alias: Any = vars(torch._C)["_is_alias_of"]


def context_of_backward() -> contextvars.Context | None:
    """In a thread in which autograd runs a backward: the context of the thread that asked for it, if torch keeps one."""
    found = torch._C._get_obj_in_tls("context") if torch._C._is_key_in_tls("context") else None
    return found if isinstance(found, contextvars.Context) else None


def storage_of(x: torch.Tensor) -> int:
    """Which storage a tensor lies in, as a number: tensors without data that stand for others in a trace have storages too."""
    return int(x.untyped_storage()._cdata)


#: Runs an operator on a wrapper itself, not on what it wraps: how the sizes of a wrapper change in place.
no_dispatch: Any = torch._C._DisableTorchDispatch

#: The compiled function under an overload: calling it saves a Python frame.
raw_call: Any = attrgetter("_op")


def is_batched(x: torch.Tensor) -> bool:
    """Whether a tensor is many at once, by `vmap` or by `is_grads_batched`: only its dispatch keys tell."""
    return "Batched" in repr(torch._C._dispatch_keys(x))


def is_transforming() -> bool:
    """Whether a function is being transformed by `torch.func`: no tensor may be asked for gradients then."""
    return torch._C._functorch.peek_interpreter_stack() is not None


def flex_operators() -> list[tuple[Any, Callable[..., Any]]]:
    """The operators of flex attention, each with what it means in terms of others. They take functions, so they have no schema,
    and ask each class of tensors for a function of its own."""
    found: Any = importlib.import_module("torch._higher_order_ops.flex_attention")
    return [(found.flex_attention, found.math_attention), (found.flex_attention_backward, found.sdpa_dense_backward)]


def rule_for(operator: Any, cls: type) -> Callable[..., Any]:
    """What an operator that takes functions does with tensors of a class."""
    return operator.python_key_table[cls]


class _Reached(Exception):
    """Carries the operator that a probe met, and with which arguments."""


class _Probe(torch.Tensor):
    """Stops at the first operator it meets, and tells which. (A dispatch mode could, but imports the compiler: two seconds.)"""

    __torch_function__ = no_torch_function

    @classmethod
    def __torch_dispatch__(cls, *call: Any, **_: Any) -> Any:
        raise _Reached(call[0], *map(_by_id, call[2:]))


def _by_id(value: Any) -> Any:
    """The value with tensors replaced by what tells them apart, so that it can be compared."""
    if isinstance(value, dict):
        return {name: _by_id(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_by_id(item) for item in value]
    return id(value) if isinstance(value, torch.Tensor) else value


def _reached(call: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
    try:
        call(*args, **kwargs)
    except (_Reached, RuntimeError, TypeError, ValueError) as error:
        return error.args if isinstance(error, _Reached) else None
    return None


def probe(shape: Any, stride: Any, dtype: torch.dtype) -> Any:
    """A tensor for `quick_call`."""
    return make_wrapper(_Probe, shape, stride, dtype=dtype, device=torch.device("cpu"))


def quick_call(func: OpOverload, args: list[Any], kwargs: dict[str, Any]) -> Any:
    """The quickest way to call an operator with arguments of these kinds (probes stand for tensors): torch's generated binding,
    which parses them in less than half the time, if with them it reaches this overload first, and hands on the same: its
    defaults may differ (`torch._C._nn.mse_loss` does not reduce)."""
    name = func._schema.name.partition("::")[2]
    wanted = _reached(func._op, args, kwargs)
    for holder in (torch, torch._C._nn, torch.Tensor) if func.namespace == "aten" else ():
        binding = getattr(holder, name, None)
        if binding is not None and wanted is not None and _reached(binding, args, kwargs) == wanted:
            return binding
    return func._op


#: Which arguments an operator writes to is told by its schema only.
schema: Any = attrgetter("_schema")

#: The collectives that trace and that Inductor knows; the public ones do neither under every transform.
collectives: Any = torch.ops._c10d_functional


def composite(func: OpOverload) -> bool:
    """Whether an operator is only a composition of others (seen as itself under inference mode and inside programs)."""
    return bool(func.has_kernel_for_dispatch_key(torch._C.DispatchKey.CompositeImplicitAutograd))


def runs_on_hosts(func: OpOverload) -> bool:
    """Whether an operator has a kernel for tensors of the CPU, its own or by composition."""
    return bool(torch._C._dispatch_has_computed_kernel_for_dispatch_key(func.name(), "CPU"))


def overloads(func: OpOverload, name: str) -> list[OpOverload]:
    """The overloads of the operator of that name in the namespace of `func`."""
    packet = getattr(getattr(torch.ops, func.namespace), name, None)
    return [] if packet is None else [getattr(packet, overload) for overload in packet.overloads()]


#: What a tensor is a view of; autograd alone knows.
base_of: Any = torch.Tensor._base


def no_modes() -> Any:
    """In the block no tracer sees what is done: what a decision finds out about shapes is no part of a traced program."""
    return torch.utils._python_dispatch._disable_current_modes()


def reader(name: str) -> Callable[[Any], Any]:
    """A method of tensors that gives a number, also inside `torch.tensor([…])`, which keeps operators from tensors of Python
    classes while it reads its list: it would read memory that they do not have."""
    read = getattr(torch.Tensor, name)

    def method(self: Any) -> Any:
        with excludes(torch._C.DispatchKey.Python, False), excludes(torch._C.DispatchKey.PythonTLSSnapshot, False):
            return read(self)

    return method
