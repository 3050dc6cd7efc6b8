"""Selects the kernels of a source by macros that the host defines when it compiles the source."""

import re
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from .preprocess import preprocess
from .tokens import SourceError

KERNEL = re.compile(r"\bkernel\s+void\s+(\w+)\s*\(")
HOST_NAME = re.compile(r'host_name\s*\(((?:\s*"[^"]*")+)\s*\)')


@dataclass(frozen=True)
class Macros:
    """Macros that a host may define in the options of newLibraryWithSource.

    ``guard`` omits all kernels that no macro of ``selectors`` restores. Their value is 1.
    """

    guard: str | None = None  # None: no macros
    selectors: tuple[str, ...] = ()


NO_MACROS = Macros()


def select(
    path: Path, metal_version: int, flags: list[str], macros: Macros, kernels: list[str]
) -> dict[str, str]:
    """Return the macro that restores each kernel that the guard omits, as the preprocessor does.

    Raises
    ------
    SourceError
        No macro restores a kernel, or several do.
    """
    guard = macros.guard
    if guard is None or guard not in path.read_text(encoding="utf-8"):
        return {}
    # The flags may define the macros, which limits the compiled kernels; the host selects among those.
    own = {guard, *macros.selectors}
    flags = [
        flag for flag in flags if flag.startswith(("-D", "-I")) and flag[2:].partition("=")[0] not in own
    ]

    def remaining(*defined: str) -> set[str]:
        text = preprocess(str(path), metal_version, [*flags, *(f"-D{name}=1" for name in defined)])
        named = {"".join(re.findall(r'"([^"]*)"', names)) for names in HOST_NAME.findall(text)}
        return named | set(KERNEL.findall(text))

    with ThreadPoolExecutor() as pool:
        found = list(pool.map(lambda name: remaining(guard, name), macros.selectors))
    always = remaining(guard)
    by_kernel: dict[str, str] = {}
    for macro, names in zip(macros.selectors, found, strict=True):
        for name in names - always:
            if name in by_kernel:
                raise SourceError(f"{path}:1: error: {by_kernel[name]} and {macro} both select '{name}'")
            by_kernel[name] = macro
    all_names = remaining()
    missing = sorted(name for name in kernels if name in all_names - always and name not in by_kernel)
    if missing:
        raise SourceError(f"{path}:1: error: no macro that was named selects {', '.join(missing)}")
    return by_kernel
