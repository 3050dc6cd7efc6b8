#!/usr/bin/env python3
"""Compare the emulator's Metal and Foundation headers with Apple's API.

Every selector, enum value, constant and function that the headers declare must exist in Apple's frameworks,
according to the metadata in PyPI's pyobjc wheels, with the same value or type encoding. The headers are
compiled for a Mac, so type encodings are those of the real ABI.

Usage: ``check_metal_api.py``; exits with 1 and a list of differences.
"""

import json
import re
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from apple_metadata import WHEELS, Framework, download, read_framework

INCLUDE = Path(__file__).resolve().parent.parent / "include"
COMPILERS = (*(INCLUDE.parent / "clang_names.txt").read_text().split(), "clang++")
OPTIONS = "-target arm64-apple-macosx13 -x objective-c++ -std=c++20 -fblocks -ffreestanding -Wno-everything"

# Methods that the bindings do not annotate, because bridging them needs no annotation. The names of Metal's
# are those that Apple's metal-cpp sends (MTLHeaderBridge.hpp).
UNANNOTATED = {
    cls: {selector for name in names.split() for selector in (name, f"set{name[0].upper()}{name[1:]}:")}
    for cls, names in {
        "NSObject": "class description",
        "MTLCompileOptions": "preprocessorMacros mathMode mathFloatingPointFunctions languageVersion",
        "MTLComputePipelineDescriptor": "computeFunction maxTotalThreadsPerThreadgroup binaryArchives",
        "MTLBinaryArchiveDescriptor": "url",
    }.items()
}
# The bindings keep one type for a selector of several protocols: this one is MTLIOCommandBuffer's.
AMBIGUOUS = {("MTLCommandBuffer", "status")}
# Inline functions, which a binding does not import.
NOT_EXPORTED = {"NSMakeRange"}


@dataclass
class Declared:
    """Declarations of the headers."""

    protocols: dict[str, dict[str, str]] = field(default_factory=dict)  # selector to type encoding
    classes: dict[str, list[str]] = field(default_factory=dict)  # selectors
    enums: dict[str, int] = field(default_factory=dict)
    constants: set[str] = field(default_factory=set)
    functions: set[str] = field(default_factory=set)


def compile_for_mac(include: Path, text: str, *options: str) -> str:
    """Compile Objective-C++ text with clang for a Mac target, and return the output."""
    compiler = next((path for name in COMPILERS if (path := shutil.which(name))), None)
    if compiler is None:
        raise RuntimeError("clang++ is not installed (Debian: apt-get install clang-19)")
    with tempfile.NamedTemporaryFile("w", suffix=".mm") as source:
        source.write(text)
        source.flush()
        command = [compiler, *OPTIONS.split(), "-I", str(include), *options, "-o", "-", source.name]
        result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode != 0:
        raise RuntimeError(result.stderr)
    return result.stdout


def read_headers(include: Path) -> Declared:
    """Return the declarations of Metal.h and Foundation.h."""
    declared = Declared()
    imports = "#import <Metal/Metal.h>\n"
    tree = json.loads(compile_for_mac(include, imports, "-fsyntax-only", "-Xclang", "-ast-dump=json"))
    for node in flatten(tree["inner"]):
        methods = [inner for inner in node.get("inner", []) if inner["kind"] == "ObjCMethodDecl"]
        if node["kind"] == "ObjCProtocolDecl" and methods:
            declared.protocols[node["name"]] = {}
        elif node["kind"] == "ObjCInterfaceDecl" and "inner" in node:
            declared.classes.setdefault(node["name"], []).extend(method["name"] for method in methods)
        elif node["kind"] == "EnumDecl":
            for constant in node.get("inner", []):
                if constant["kind"] == "EnumConstantDecl":
                    declared.enums[constant["name"]] = int(constant["inner"][0]["value"])
        elif node["kind"] == "VarDecl":
            declared.constants.add(node["name"])
        elif node["kind"] == "FunctionDecl":
            declared.functions.add(node["name"])
    read_encodings(declared, include, imports)
    return declared


def flatten(nodes: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the nodes with the contents of ``extern "C"`` in place."""
    result = []
    for node in nodes:
        result += flatten(node.get("inner", [])) if node["kind"] == "LinkageSpecDecl" else [node]
    return result


def read_encodings(declared: Declared, include: Path, imports: str) -> None:
    """Fill in the type encodings of protocol methods, as clang compiles them."""
    text = imports + "@class Protocol;\n"
    text += "".join(
        f"Protocol* use_{name}() {{ return @protocol({name}); }}\n" for name in declared.protocols
    )
    ir = compile_for_mac(include, text, "-S", "-emit-llvm")
    strings = dict(re.findall(r'(@OBJC_METH_VAR_\w+(?:\.\d+)?) = .*? c"(.*?)\\00"', ir))
    lists = re.findall(r'@"_OBJC_\$_PROTOCOL_(?:INSTANCE|CLASS)_METHODS_(?:OPT_)?(\w+)" = (.*)', ir)
    for protocol, entries in lists:
        pairs = re.findall(r"{ ptr (@OBJC_METH_VAR_NAME\S*), ptr (@OBJC_METH_VAR_TYPE\S*),", entries)
        declared.protocols[protocol] |= {strings[selector]: strings[types] for selector, types in pairs}


def split_encoding(encoding: str) -> list[str]:
    """Return the types in a method's encoding: return value, then arguments without receiver and selector.

    Frame offsets, qualifiers and the contents of pointed-to structs are dropped; a bool is ``B``.

    >>> split_encoding("v48@0:8r^@16r^Q24{_NSRange=QQ}32")
    ['v', '^@', '^Q', '{_NSRange=QQ}']
    """
    types = []
    position = 0
    while position < len(encoding):
        end = skip_type(encoding, position)
        types.append(normalize(encoding[position:end]))
        position = end
        while position < len(encoding) and encoding[position].isdigit():
            position += 1
    return types[:1] + types[3:]


def skip_type(encoding: str, position: int) -> int:
    """Return the end of the type that starts at a position."""
    while encoding[position] in "rnNoORVA^":
        position += 1
    first = encoding[position]
    if first in "{[(":
        depth = 0
        while True:
            depth += {"{": 1, "[": 1, "(": 1, "}": -1, "]": -1, ")": -1}.get(encoding[position], 0)
            position += 1
            if depth == 0:
                return position
    if encoding[position : position + 2] == "@?":
        return position + 2
    return position + 1


def normalize(type_encoding: str) -> str:
    """Return a type encoding in the form in which both sides are compared."""
    text = re.sub(r"^[rnNoORVA]+", "", type_encoding).replace("Z", "B")
    return re.sub(r"\^\{(\w+|\?)=.*\}", r"^{\1}", text)


def check_methods(declared: Declared, apple: dict[str, Framework]) -> list[str]:
    """Return the differences between methods.

    Only names of Metal's classes are checked: pyobjc annotates few methods of Foundation's.
    """
    owners: list[tuple[str, str, dict[str, str]]]  # name, name of its annotations, methods
    owners = [(name, "NSObject", methods) for name, methods in declared.protocols.items()]
    owners += [
        (name, name, dict.fromkeys(selectors, ""))
        for name, selectors in declared.classes.items()
        if name.startswith("MTL")
    ]
    problems = []
    for owner, annotated_as, methods in owners:
        framework = apple["Metal" if owner.startswith("MTL") else "Foundation"]
        annotated = framework.selectors.get(annotated_as, {})
        for selector, encoding in methods.items():
            where = f"-[{owner} {selector}]"
            if selector not in annotated and selector not in UNANNOTATED.get(owner, set()):
                problems.append(f"{where}: unknown to Apple's framework")
            elif encoding and selector in annotated and (owner, selector) not in AMBIGUOUS:
                problems += compare_types(where, split_encoding(encoding), annotated[selector])
    return problems


def compare_types(where: str, ours: list[str], apple: list[str | None]) -> list[str]:
    """Return the differences from the types in the bindings, which name unnamed structs."""
    names = ["the result", *(f"argument {index + 1}" for index in range(len(apple) - 1))]
    return [
        f"{where}: {name} is {mine}, Apple's is {other}"
        for name, mine, other in zip(names, ours, apple, strict=True)
        if other is not None and re.sub(r"{\w+=", "{?=", mine) != re.sub(r"{\w+=", "{?=", normalize(other))
    ]


def check_values(declared: Declared, apple: dict[str, Framework]) -> list[str]:
    """Return the differences between enum values, constants and functions."""
    enums = {name: value for framework in apple.values() for name, value in framework.enums.items()}
    problems = []
    for name, value in declared.enums.items():
        if name not in enums:
            problems.append(f"{name}: unknown to Apple's framework")
        elif enums[name] % 2**64 != value % 2**64:
            problems.append(f"{name}: is {value}, Apple's is {enums[name]}")
    for kind in ("constants", "functions"):
        known = set[str]().union(*(getattr(framework, kind) for framework in apple.values()))
        unknown = getattr(declared, kind) - known - NOT_EXPORTED
        problems += [f"{name}: unknown to Apple's framework" for name in sorted(unknown)]
    return problems


def read_apple(cache: Path) -> dict[str, Framework]:
    """Return the API of Apple's frameworks; the folder caches the wheels."""
    return {name: read_framework(download(package, cache), name) for name, package in WHEELS.items()}


def check(include: Path, apple: dict[str, Framework]) -> tuple[list[str], str]:
    """Return the differences and a summary of the comparison."""
    declared = read_headers(include)
    problems = check_methods(declared, apple) + check_values(declared, apple)
    methods = sum(len(methods) for methods in declared.protocols.values())
    summary = (
        f"{methods} methods of {len(declared.protocols)} protocols, {len(declared.enums)} enum values, "
        f"{len(declared.constants)} constants, {len(declared.functions)} functions"
    )
    return problems, summary


def main() -> int:
    """Run the program; see the module docstring."""
    with tempfile.TemporaryDirectory() as folder:
        problems, summary = check(INCLUDE, read_apple(Path(folder)))
    print("\n".join(problems) if problems else f"all as in Apple's frameworks: {summary}")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
