"""Import of names on first use, so that a program loads only the modules it needs."""

from __future__ import annotations

import sys

TYPE_CHECKING = False  # this module is imported first, and therefore without `typing`; see the package
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any


class LateFunctions:
    """Functions of a module as methods of the same names; the first use of one imports the module."""

    def __init__(self, module: str) -> None:
        self._module = module

    def __getattr__(self, name: str) -> Any:
        return _LateFunction(self._module, name)


class _LateFunction:
    def __init__(self, module: str, name: str) -> None:
        self._home = module, name

    def __get__(self, instance: object, owner: type) -> Any:
        import importlib

        module, name = self._home
        setattr(owner, name, getattr(importlib.import_module(module), name))
        return getattr(owner if instance is None else instance, name)


def lazy_names(package: str, **modules: str) -> Callable[[str], Any]:
    """Return a ``__getattr__`` that imports names, divided by spaces, of a package from its modules."""
    homes = {name: module for module, names in modules.items() for name in names.split()}

    def get(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        import importlib

        from metal_prefill._support.interruptions import whole_interruptions

        with whole_interruptions():
            module = importlib.import_module(f"{package}.{homes[name]}")
        value = getattr(module, name)
        setattr(sys.modules[package], name, value)
        return value

    return get
