"""Import of public names on first use, so that a program loads only the modules it needs."""

from __future__ import annotations

import sys

TYPE_CHECKING = False  # this module is imported first, and therefore without `typing`; see the package
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from typing import Any


def lazy_names(package: str, homes: Mapping[str, str]) -> Callable[[str], Any]:
    """Return a ``__getattr__`` that imports a package's names from its modules.

    Parameters
    ----------
    package
        Name of the package.
    homes
        Module that defines each name, relative to the package.
    """

    def get(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        import importlib

        value = getattr(importlib.import_module(f"{package}.{homes[name]}"), name)
        setattr(sys.modules[package], name, value)
        return value

    return get
