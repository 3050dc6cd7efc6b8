"""Metadata of PyPI's bindings of Apple's frameworks: selectors with their types, enum values, constants.

The wheels of pyobjc are read as zip files; nothing in them is run or installed.
"""

import ast
import subprocess
import sys
import zipfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

# A wheel for a Mac, on any machine.
PLATFORMS = [
    "macosx_11_0_universal2",
    "macosx_10_13_universal2",
    "macosx_10_9_universal2",
    "macosx_11_0_arm64",
]
WHEELS = {"Metal": "pyobjc-framework-Metal", "Foundation": "pyobjc-framework-Cocoa"}


def download(package: str, folder: Path) -> Path:
    """Return the wheel of a package for macOS, downloaded into a folder unless it is there already.

    The package may be given with a version, ``name==1.0``; each version then needs its own folder.

    Raises
    ------
    RuntimeError
        pip cannot download the wheel.
    """
    prefix = package.partition("==")[0].replace("-", "_").lower() + "-"

    def found() -> list[Path]:
        return sorted(path for path in folder.glob("*.whl") if path.name.lower().startswith(prefix))

    if not found():
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
        command += ["--python-version", "3.12", "--dest", str(folder), package]
        command += [word for platform in PLATFORMS for word in ("--platform", platform)]
        result = subprocess.run(command, capture_output=True, text=True, check=False)
        if result.returncode != 0:
            raise RuntimeError(f"pip download {package} failed:\n{result.stderr}")
    return found()[-1]


@dataclass
class Framework:
    """API of one framework."""

    enums: dict[str, int] = field(default_factory=dict)
    constants: set[str] = field(default_factory=set)
    functions: set[str] = field(default_factory=set)
    # Class to selector to [return type, argument types...]; None for an unknown type. Methods of all
    # protocols are listed under NSObject.
    selectors: dict[str, dict[str, list[str | None]]] = field(default_factory=dict)


def read_framework(wheel: Path, name: str) -> Framework:
    """Return the metadata in the wheel's module of that name."""
    framework = Framework()
    with zipfile.ZipFile(wheel) as archive:
        tree = ast.parse(archive.read(f"{name}/_metadata.py"))
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            _read_assignment(framework, node.targets[0].id, node.value)
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "r":
            _read_registration(framework, node)
    return framework


def _read_assignment(framework: Framework, name: str, value: ast.expr) -> None:
    if name in ("enums", "constants") and isinstance(value, ast.Constant):
        for entry in str(value.value).split("$"):
            key, _, number = entry.partition("@")
            if name == "constants" and key:
                framework.constants.add(key)
            elif number.lstrip("-").isdigit():
                framework.enums[key] = int(number)
    elif name == "functions" and isinstance(value, ast.Dict):
        framework.functions |= {str(key.value) for key in value.keys if isinstance(key, ast.Constant)}


def _read_registration(framework: Framework, call: ast.Call) -> None:
    owner, selector, details = (_literal(argument) for argument in call.args[:3])
    types: list[str | None] = [_type(details.get("retval", {}))]
    arguments = details.get("arguments", {})
    for index in range(selector.count(b":")):
        types.append(_type(arguments.get(index + 2, {})))
    framework.selectors.setdefault(owner.decode(), {})[selector.decode()] = types


def _type(details: dict[str, Any]) -> str | None:
    value = details.get("type")
    return value.decode() if isinstance(value, bytes) else None


def _literal(node: ast.expr) -> Any:
    """Evaluate a literal; calls of sel32or64(a, b) evaluate to b, the 64-bit case."""
    if isinstance(node, ast.Dict):
        return {
            _literal(key): _literal(value) for key, value in zip(node.keys, node.values, strict=True) if key
        }
    if isinstance(node, ast.Call):
        return _literal(node.args[-1])
    return ast.literal_eval(node)
