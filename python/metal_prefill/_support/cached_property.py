"""Attributes that are computed on first access."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import Any, Generic, TypeVar, overload

Value = TypeVar("Value")


class cached_property(Generic[Value]):  # named after the functools class
    """Variant of `functools.cached_property` with a lock that is safe after a fork.

    The version in Python 3.12 and later has no lock, so that several threads could build the same tokenizer
    at once. In earlier versions, the lock stays held in a forked child if another thread of the parent held
    it.
    """

    def __init__(self, compute: Callable[[Any], Value]) -> None:
        self._compute = compute
        self._renew_lock()
        os.register_at_fork(after_in_child=self._renew_lock)  # its holder may not exist in the child
        self.__doc__ = compute.__doc__

    def _renew_lock(self) -> None:
        self._lock = threading.RLock()

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    @overload
    def __get__(self, instance: None, owner: type) -> cached_property[Value]: ...

    @overload
    def __get__(self, instance: object, owner: type) -> Value: ...

    def __get__(self, instance: object | None, owner: type) -> cached_property[Value] | Value:
        if instance is None:
            return self
        # Later accesses find the value in the instance dictionary and do not reach this descriptor.
        known = vars(instance)
        with self._lock:
            if self._name not in known:
                known.setdefault(self._name, self._compute(instance))
            value: Value = known[self._name]
        return value
