"""The key under which torch keeps a compiled function, without compiling it."""

from __future__ import annotations

import importlib
from typing import Any

import torch


class Known(Exception):
    """Carries a key, before anything is compiled."""


def key_of(function: Any, *args: Any) -> str:
    """The key under which torch would keep the compiled function."""
    cache = importlib.import_module("torch._functorch._aot_autograd.autograd_cache")
    find, found = cache.autograd_cache_key, []

    def caught(*given: Any, **words: Any) -> Any:
        found.append(find(*given, **words)[0])
        raise Known

    cache.autograd_cache_key = caught
    torch._dynamo.reset()
    try:
        torch.compile(function, fullgraph=True, backend=stop_after_key(found))(*args)
    except Exception as error:
        if not found:
            raise
        assert "Known" in str(error) or found, error
    finally:
        cache.autograd_cache_key = find
    return found[0]


def stop_after_key(found: list[str]) -> Any:
    def backend(gm: Any, inputs: Any) -> Any:
        compile_fx = importlib.import_module("torch._inductor.compile_fx").compile_fx

        def stop(*args: Any, **words: Any) -> Any:
            raise Known

        return compile_fx(gm, inputs, inner_compile=stop)

    return backend
