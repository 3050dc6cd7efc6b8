"""Attributes that are computed when they are first asked for."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import Any, Generic, TypeVar, overload

Value = TypeVar("Value")


class cached_property(Generic[Value]):  # as functools names its own
    """As `functools.cached_property`, with a lock that a forked process does not wait for.

    Python has none from 3.12 on, so that many threads may build the same tokenizer at once. Before, it has
    one that a child finds locked for ever where another thread of its parent computed.
    """

    def __init__(self, compute: Callable[[Any], Value]) -> None:
        self._compute = compute
        self._begin()
        self.__doc__ = compute.__doc__

    def _begin(self) -> None:
        self._process, self._lock = os.getpid(), threading.RLock()

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    @overload
    def __get__(self, instance: None, owner: type) -> cached_property[Value]: ...

    @overload
    def __get__(self, instance: object, owner: type) -> Value: ...

    def __get__(self, instance: object | None, owner: type) -> cached_property[Value] | Value:
        if instance is None:
            return self
        if self._process != os.getpid():  # who holds the lock may not be in this process
            self._begin()
        # Once it is there, the attribute is found in the dictionary, before this.
        known = vars(instance)
        with self._lock:
            if self._name not in known:
                known.setdefault(self._name, self._compute(instance))
            value: Value = known[self._name]
        return value
