"""Allowed dependencies: imports of the Python package, includes of the engines, shaders and emulator.

Each rule is a function of all sources that returns violations, one line each. It is applied to the sources,
and to sources with a planted violation.
"""

from __future__ import annotations

import ast
import functools
import graphlib
import posixpath
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import pytest
from support.places import ROOT

FOLDERS = {
    "cpp": ("*.h", "*.cpp", "*.mm"),
    "emulator": ("*.h", "*.cpp", "*.mm", "*.metal", "*.py"),
    "shaders": ("*.h", "*.metal"),
    "python": ("*.py",),
}

Sources = Mapping[str, str]  # text of each file, by its path from the root
Rule = Callable[[Sources], list[str]]

MODULE = "cpp/python/module.cpp"
# Folders of cpp in order: each may include those before it.
ROOMS = (
    "base", "model", "cache", "sampling", "cpu/kernels", "engine", "cpu", "metal/plan", "metal/device",
    "python",
)  # fmt: skip
SHARED_WITH_SHADERS = (
    "args|args_fields|attention|clamped_silu|gated_delta|grids|position_bias|quants|token_tiles"
)
INCLUDE = re.compile(r'^\s*#\s*(?:include|import)\s*([<"])([^>"]+)[>"]', re.MULTILINE)


@pytest.fixture(scope="module")
def sources() -> dict[str, str]:
    """All sources that the rules are about."""
    paths = [
        path for folder, kinds in FOLDERS.items() for kind in kinds for path in (ROOT / folder).rglob(kind)
    ]
    return {path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8") for path in paths}


def includes(sources: Sources, within: str) -> Iterator[tuple[str, str]]:
    """Yield each file of a folder and each file that it includes: a path, or a name if it is foreign."""
    for path, text in sources.items():
        if not path.startswith(within):
            continue
        for quote, name in INCLUDE.findall(text):
            roots = [posixpath.dirname(path)] if quote == '"' else []
            candidates = [
                posixpath.normpath(f"{root}/{name}") for root in (*roots, "cpp", "shaders", "emulator")
            ]
            yield path, next((c for c in candidates if c in sources), name)


def rooms_include_in_one_direction(sources: Sources) -> list[str]:
    def room(path: str) -> int:
        return ROOMS.index(posixpath.dirname(path.removeprefix("cpp/")))

    return [
        f"{path} includes {target}"
        for path, target in includes(sources, "cpp/")
        if target.startswith("cpp/")
        if room(target) > room(path)
    ]


def recording_a_pass_needs_no_metal(sources: Sources) -> list[str]:
    graph: dict[str, list[str]] = {}
    for path, target in includes(sources, ""):
        graph.setdefault(path, []).append(target)
    todo = [path for path in sources if path.startswith("cpp/metal/plan/")]
    reached = dict.fromkeys(todo)
    while todo:
        new = [target for target in graph.get(todo.pop(), []) if target not in reached]
        reached.update(dict.fromkeys(new))
        todo += new
    return [
        f"{path} includes {target}"
        for path in reached
        for target in graph.get(path, [])
        if target.startswith(("Metal/", "Foundation/", "objc/"))
    ]


@functools.cache
def imports_of(text: str) -> list[Any]:
    """Return the imports of a module."""
    return [node for node in ast.walk(ast.parse(text)) if isinstance(node, (ast.Import, ast.ImportFrom))]


def imports(sources: Sources) -> dict[str, set[str]]:
    """Return the modules that each module of the package imports anywhere, also for type checkers alone.

    Modules of the package have their full names, others only the first part.
    """
    modules: dict[str, list[Any]] = {}
    for path, text in sources.items():
        if path.startswith("python/"):
            name = (
                path.removeprefix("python/").removesuffix(".py").removesuffix("/__init__").replace("/", ".")
            )
            modules[name] = imports_of(text)

    def home(name: str) -> str:
        if name.partition(".")[0] != "metal_prefill":
            return name.partition(".")[0]
        # Any other name is an attribute of its package, or a native module.
        return name if name in modules or name.rpartition(".")[2] in NATIVE else name.rpartition(".")[0]

    found: dict[str, set[str]] = {}
    for name, nodes in modules.items():
        found[name] = set()
        for node in nodes:
            if isinstance(node, ast.Import):
                found[name] |= {home(alias.name) for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                assert not node.level, f"{name} has a relative import"
                within_package = f"{node.module}.".startswith("metal_prefill.")
                found[name] |= {
                    home(f"{node.module}.{alias.name}" if within_package else str(node.module))
                    for alias in node.names
                }
    return found


NATIVE = ("_core", "_metal_testing")
PROGRAMS = (
    "metal_prefill.__main__",
    "metal_prefill.bench.__main__",
    "metal_prefill.lm_eval",
)  # of `python -m`
# Modules and folders in order: each may import those before it.
LAYERS = (
    "errors", "_support", "files", "storage", "gpu", "text", "conversion", "hub", "engine", "generation",
    "session", "tasks", "model", "sentence_transformers", "chat", "synth", "serve", "integrations", "bench",
    "commands", "cli",
)  # fmt: skip


def no_module_imports_itself_through_others(sources: Sources) -> list[str]:
    try:
        graphlib.TopologicalSorter(imports(sources)).prepare()
    except graphlib.CycleError as error:
        return [" -> ".join(reversed(error.args[1]))]
    return []


def dependencies_point_in_one_direction(sources: Sources) -> list[str]:
    def layer(module: str) -> int:
        return LAYERS.index(module.split(".")[1])

    return [
        f"{module} imports {target}"
        for module, targets in imports(sources).items()
        if module not in (*PROGRAMS, "metal_prefill")
        for target in sorted(targets)
        if target.startswith("metal_prefill.") and target.rpartition(".")[2] not in NATIVE
        if layer(target) > layer(module)
    ]


def locks_survive_a_fork(sources: Sources) -> list[str]:
    """Each lock that a forked process may need has a `ForkHandler`; a child never uses Metal."""
    lock = re.compile(r"std::(?:recursive_|shared_)?mutex\s+\w+;")
    handler = re.compile(r"ForkHandler fork_handler_|void before_fork\(\)")
    return [
        f"{path} has a lock without a ForkHandler"
        for path, text in sources.items()
        if path.startswith("cpp/") and not path.startswith(("cpp/metal/", "cpp/base/fork_handler"))
        if len(lock.findall(text)) > len(handler.findall(text))
    ]


@dataclass(frozen=True)
class Forbidden:
    """A rule that one kind of files or modules, `where`, has none of `what`."""

    of: Callable[[Sources], Iterable[tuple[str, str]]]
    where: str  # regular expressions
    what: str

    def __call__(self, sources: Sources) -> list[str]:
        return [
            f"{place} has {found[0].strip()}"
            for place, text in self.of(sources)
            if re.match(self.where, place) and (found := re.search(f"{self.what}.*", text, re.MULTILINE))
        ]


def included(sources: Sources) -> Iterator[tuple[str, str]]:
    return includes(sources, "")


def imported(sources: Sources) -> Iterator[tuple[str, str]]:
    return ((module, target) for module, targets in imports(sources).items() for target in targets)


def written(sources: Sources) -> Iterable[tuple[str, str]]:
    return sources.items()


ENGINE = f"(?!{MODULE})(cpp|shaders)/"
# For each rule, lines that it must find if they are added to a file.
PLANTED: dict[Rule, list[tuple[str, str]]] = {
    # The engines do not know each other.
    Forbidden(included, "cpp/cpu/", "^cpp/metal/"): [
        ("cpp/cpu/engine.cpp", '#include "../metal/plan/ops.h"'),
    ],
    Forbidden(included, "cpp/metal/", "^cpp/cpu/"): [
        ("cpp/metal/device/engine.mm", '#include "../../cpu/threads.h"'),
        ("cpp/metal/device/engine.mm", "#include <cpu/threads.h>"),
    ],
    rooms_include_in_one_direction: [
        ("cpp/engine/engine.cpp", '#include "../metal/plan/ops.h"'),
        ("cpp/cache/pages.cpp", '#include "../engine/engine.h"'),
        ("cpp/cpu/kernels/isa.cpp", '#include "../../engine/engine.h"'),
        ("cpp/cpu/kernels/packing.cpp", '#include "../weights.h"'),
        ("cpp/metal/plan/view.h", '#include "../device/buffers.h"'),
    ],
    # Of the bindings, those of the limits of the machine and of recorded passes alone know an engine.
    Forbidden(included, r"cpp/python/(?!(cpu|metal)\.)", "^cpp/(cpu|metal)/"): [
        (MODULE, '#include "../cpu/threads.h"')
    ],
    # The bindings alone know Python.
    Forbidden(included, "cpp/(?!python/)", r"^(nanobind/|Python\.h)"): [
        ("cpp/engine/engine.h", "#include <nanobind/nanobind.h>"),
        ("cpp/metal/plan/ops.h", "#include <Python.h>"),
    ],
    # The engine does not know the emulator, and the package does not control it.
    Forbidden(included, ENGINE, "^emulator/"): [
        ("cpp/metal/device/engine.mm", '#include "../../../emulator/emulator.h"'),
        ("cpp/engine/engine.cpp", "#include <emulator.h>"),
    ],
    Forbidden(written, ENGINE, r"^\s*#\s*(if|ifdef|ifndef|elif)\b.*EMULATOR"): [
        ("shaders/matmul.metal", "#ifdef METAL_PREFILL_EMULATOR")
    ],
    # The emulator does not depend on the package.
    Forbidden(included, "emulator/", "^(cpp|shaders)/"): [
        ("emulator/metal/device.mm", '#include "../../cpp/base/errors.h"'),
        ("emulator/cpu/executor.cpp", "#include <quants.h>"),
    ],
    Forbidden(written, r"emulator/.*\.py", r"^\s*(from|import) metal_prefill\b"): [
        ("emulator/tests/conftest.py", "from metal_prefill import _core")
    ],
    Forbidden(written, "python/", r"""_core\.emulator\b|getattr\(_core, ["']emulator["']"""): [
        ("python/metal_prefill/gpu/_trace.py", "_core.emulator.set_history_depth(1)"),
        ("python/metal_prefill/gpu/_trace.py", '_emulator = getattr(_core, "emulator", None)'),
    ],
    # Shaders and host share few headers; shaders also include Apple's framework.
    Forbidden(included, "cpp/", rf"^shaders/(?!({SHARED_WITH_SHADERS})\.h$)"): [
        ("cpp/metal/plan/ops_attention.mm", '#include "../../../shaders/rope.h"')
    ],
    Forbidden(included, "shaders/", "^(?!shaders/|MetalPerformancePrimitives/).*/"): [
        ("shaders/rope.h", '#include "../cpp/model/model.h"')
    ],
    recording_a_pass_needs_no_metal: [
        ("cpp/metal/plan/ops.mm", "#import <Metal/Metal.h>"),
        ("cpp/metal/plan/tuning.h", "#import <Foundation/Foundation.h>"),
    ],
    no_module_imports_itself_through_others: [
        ("python/metal_prefill/session.py", "if TYPE_CHECKING:\n    from metal_prefill.model import Model"),
        ("python/metal_prefill/_support/arguments.py", "def f():\n    import metal_prefill.session"),
        ("python/metal_prefill/bench/_runner.py", "from metal_prefill.bench._report import BenchResults"),
        ("python/metal_prefill/bench/_report.py", "from metal_prefill.bench import _report"),
    ],
    dependencies_point_in_one_direction: [
        ("python/metal_prefill/model.py", "from metal_prefill import cli"),
        ("python/metal_prefill/hub/_download.py", "from metal_prefill.bench._model_file import cache_dir"),
        ("python/metal_prefill/text/_tokenizer.py", "def f():\n    import metal_prefill.session"),
        ("python/metal_prefill/bench/_runner.py", "from metal_prefill.commands import common"),
    ],
    # Python knows native code by the bindings alone, and errors know nothing of the package.
    Forbidden(imported, "", r"^(metal_prefill\._metal_testing|ctypes|cffi|support|embed_shaders|scanner)$"): [
        ("python/metal_prefill/model.py", "from metal_prefill import _metal_testing"),
        ("python/metal_prefill/session.py", "import ctypes"),
    ],
    Forbidden(imported, r"metal_prefill\.errors$", "^metal_prefill"): [
        ("python/metal_prefill/errors.py", "from metal_prefill import _core")
    ],
    locks_survive_a_fork: [
        ("cpp/cpu/kv_pages.h", "mutable std::mutex mutex_;"),
        ("cpp/sampling/lookup.h", "std::mutex mutex_;"),
    ],
    # In Python 3.11 its lock is held while an attribute is computed.
    Forbidden(written, "python/", r"functools.*\bcached_property\b(?!`)"): [
        ("python/metal_prefill/model.py", "from functools import cached_property")
    ],
}


def name_of(rule: Rule) -> str:
    return f"{rule.of.__name__}-{rule.where}" if isinstance(rule, Forbidden) else rule.__name__


@pytest.mark.parametrize("rule", PLANTED, ids=name_of)
def test_the_sources_keep(rule: Rule, sources: Sources) -> None:
    assert rule(sources) == []


@pytest.mark.parametrize("rule", PLANTED, ids=name_of)
def test_planted_mistakes_are_found(rule: Rule, sources: Sources) -> None:
    for path, line in PLANTED[rule]:
        (found,) = rule({**sources, path: f"{sources[path]}\n{line}\n"})
        module = path.removeprefix("python/").removesuffix(".py").replace("/", ".")
        assert path in found or module in found, line
