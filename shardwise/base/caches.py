"""Bounded caches on pure functions, each with a name, and tables of interned values; `cache_info()` shows the caches.

Threads share them. Look-ups take no lock; whoever adds something does, and of two threads that add the same the first wins.

>>> @memo("squares", limit=2)
... def square(n): return n * n
>>> square(3), square(3), cache_info()["squares"]
(9, 9, CacheInfo(hits=1, misses=1, size=1, limit=2))
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from functools import wraps
from typing import Any, NamedTuple, TypeVar, cast
from weakref import WeakValueDictionary

from .argument_checks import choice

#: The caches of what was chosen by its price and by the groups at hand: they must forget when either changes.
CHOICES = ("decisions", "plans")

Function = TypeVar("Function", bound=Callable[..., Any])
T = TypeVar("T")

#: Held while something is added to a cache or a table, and by whoever empties one. A thread that holds it may add more.
_adding = threading.RLock()


def intern(table: WeakValueDictionary[Any, T], content: Hashable, make: Callable[[], T]) -> T:
    """The one value of a content in a table, made if there is none: for a content that was not found there.

    >>> class Name:
    ...     pass
    >>> names = WeakValueDictionary()
    >>> first = intern(names, "dp", Name)
    >>> intern(names, "dp", Name) is first
    True
    """
    with _adding:
        found = table.get(content)
        if found is None:
            found = table[content] = make()
        return found


class CacheInfo(NamedTuple):
    """How often a cache knew the answer, how often not, how many answers it holds and may hold."""

    hits: int
    misses: int
    size: int
    limit: int


@dataclass(slots=True)
class Cache:
    """A dictionary with a bound: the oldest entry leaves when a new one comes. Readers use `entries.get` directly.

    Hits are counted without a lock, so some of those that threads have at the same moment are not counted.
    """

    name: str
    limit: int
    entries: dict[Hashable, Any] = field(default_factory=dict)
    hits: int = 0
    misses: int = 0

    def put(self, key: Hashable, value: Any) -> Any:
        """Keep an answer that was not known; gives the one that is kept, which may be another thread's."""
        with _adding:
            self.misses += 1
            if len(self.entries) >= self.limit:
                self.entries.pop(next(iter(self.entries)), None)
            return self.entries.setdefault(key, value)

    def clear(self) -> None:
        """Forget all answers, and how often there were any."""
        with _adding:
            self.entries.clear()
            self.hits = self.misses = 0

    def info(self) -> CacheInfo:
        """The numbers of this cache."""
        return CacheInfo(self.hits, self.misses, len(self.entries), self.limit)


_caches: dict[str, Cache] = {}


def new_cache(name: str, limit: int) -> Cache:
    """A cache that `cache_info` and `cache_clear` know."""
    _caches[name] = Cache(name, limit)
    return _caches[name]


def memo(name: str, limit: int) -> Callable[[Function], Function]:
    """Remember the answers of a pure function; those for arguments without a hash are worked out anew."""

    def wrap(function: Function) -> Function:
        cache = new_cache(name, limit)

        @wraps(function)
        def remembered(*args: Any) -> Any:
            try:
                found = cache.entries.get(args, cache)
            except TypeError:  # sizes that are symbols of a trace: what holds for them is forgotten with the trace
                return function(*args)
            if found is cache:
                found = cache.put(args, function(*args))
            else:
                cache.hits += 1
            return found

        return cast(Function, remembered)

    return wrap


class CacheReport(dict[str, CacheInfo]):
    """The caches by name; `.hits`, `.misses`, `.size` and `.limit` are of all together."""

    hits = property(lambda self: sum(info.hits for info in self.values()))
    misses = property(lambda self: sum(info.misses for info in self.values()))
    size = property(lambda self: sum(info.size for info in self.values()))
    limit = property(lambda self: sum(info.limit for info in self.values()))


def cache_info() -> CacheReport:
    """What every cache holds.

    >>> cache_info().size <= cache_info().limit
    True
    """
    return CacheReport({name: cache.info() for name, cache in _caches.items()})


def cache_clear(*names: str) -> None:
    """Forget what the named caches hold; without a name, everything that was decided and planned.

    >>> cache_clear("plans")
    >>> cache_info()["plans"].size
    0
    """
    for name in names:
        choice(name, "cache_clear: a name of *names", sorted(_caches))
    for name in names or _caches:
        _caches[name].clear()
