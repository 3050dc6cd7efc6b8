"""Attributes that are computed when they are first asked for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, TypeVar, overload

Value = TypeVar("Value")


class cached_property(Generic[Value]):  # as functools names its own
    """As `functools.cached_property`, without the lock that it has before Python 3.12.

    A process that is forked while another thread holds that lock would wait for it for ever. Here several
    threads may compute the value; all of them get the one that was there first.
    """

    def __init__(self, compute: Callable[[Any], Value]) -> None:
        self._compute = compute
        self.__doc__ = compute.__doc__

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    @overload
    def __get__(self, instance: None, owner: type) -> cached_property[Value]: ...

    @overload
    def __get__(self, instance: object, owner: type) -> Value: ...

    def __get__(self, instance: object | None, owner: type) -> cached_property[Value] | Value:
        if instance is None:
            return self
        # From now on the attribute is found in the dictionary, before this.
        value: Value = vars(instance).setdefault(self._name, self._compute(instance))
        return value
