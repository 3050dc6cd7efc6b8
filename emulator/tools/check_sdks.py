"""Find names in Objective-C++ sources that an older SDK of macOS does not have.

The release of PyPI's pyobjc-framework-Metal made from an SDK lists Metal's names in that SDK. A source that
uses a name of the headers here that the SDK lacks does not compile with it; ``@available`` does not help.
"""

import re
from pathlib import Path

from apple_metadata import WHEELS, Framework, download, read_framework
from check_metal_api import INCLUDE, Declared, read_headers

# The last version of the bindings made from the SDK of each macOS.
SDKS = {"13": "9.2", "14": "10.3.2", "15": "11.1"}
# Methods that the bindings do not annotate, and the first SDK whose metal-cpp sends them.
UNANNOTATED_SINCE = {
    name: "15"
    for name in ("mathMode", "setMathMode", "mathFloatingPointFunctions", "setMathFloatingPointFunctions")
}
FENCE = re.compile(r"\s*#\s*if __MAC_OS_X_VERSION_MAX_ALLOWED >= (\d+)$")
SUFFIXES = (".h", ".mm", ".cpp", ".inc")


def too_new(declared: Declared, apple: Framework, sdk: str) -> set[str]:
    """Return the identifiers that the headers declare and an SDK does not."""
    known = {selector for methods in apple.selectors.values() for selector in methods}
    selectors = {
        selector
        for protocol, methods in declared.protocols.items()
        if protocol.startswith("MTL")
        for selector in methods
    }
    names = {name for name in declared.enums.keys() - apple.enums.keys() if name.startswith("MTL")}
    names |= {name for name in declared.functions - apple.functions if name.startswith("MTL")}
    names |= {selector.split(":")[0] for selector in selectors - known}
    return names | {name for name, since in UNANNOTATED_SINCE.items() if int(since) > int(sdk)}


def uses(folder: Path, names: set[str], sdk: int) -> list[str]:
    """Return the places at which sources in a folder use one of the names, outside of comments and strings.

    Ignores code that an ``#if`` excludes with this SDK.
    """
    found = []
    for path in sorted(path for path in folder.rglob("*") if path.suffix in SUFFIXES):
        fences: list[bool] = []  # for each #if around a line, whether this SDK skips its contents
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            if directive := re.match(r"\s*#\s*(if|else|elif|endif)", line):
                fence = FENCE.match(line)
                if directive[1] == "if":
                    fences.append(fence is not None and sdk * 10000 < int(fence[1]))
                elif directive[1] == "endif":
                    fences.pop()
                else:
                    fences[-1] = False
            if any(fences):
                continue
            code = re.sub(r'"(\\.|[^"\\])*"', '""', line).split("//")[0]
            found += [f"{path}:{number}: {name}" for name in re.findall(r"\w+", code) if name in names]
    return found


def check(folders: list[Path], cache: Path) -> list[str]:
    """Return the uses of names that an SDK lacks; the folder caches the bindings."""
    declared = read_headers(INCLUDE)
    problems = []
    for sdk, version in SDKS.items():
        wheel = download(f"{WHEELS['Metal']}=={version}", cache / f"sdk-{sdk}")
        names = too_new(declared, read_framework(wheel, "Metal"), sdk)
        for folder in folders:
            problems += [f"{use} is not in the SDK of macOS {sdk}" for use in uses(folder, names, int(sdk))]
    return problems
