"""Import of public names on first use, so that a program loads only the modules it needs."""

from __future__ import annotations

import sys
from types import ModuleType

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


class _FormerPath(ModuleType):
    """Alias of a module under its former name."""

    def __init__(self, name: str, target: str) -> None:
        super().__init__(name, f"The former name of :mod:`{target}`.")
        self._target = target

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # requested by tools that inspect every module
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        import importlib

        return getattr(importlib.import_module(self._target), name)


def keep_former_paths(package: str, targets: Mapping[str, str]) -> None:
    """Register aliases for the former names of modules, which are loaded on first use.

    Parameters
    ----------
    package
        Name of the package.
    targets
        Current module by former name, both relative to the package.
    """
    for former, target in targets.items():
        module = _FormerPath(f"{package}.{former}", f"{package}.{target}")
        sys.modules[module.__name__] = module
        setattr(sys.modules[package], former, module)
