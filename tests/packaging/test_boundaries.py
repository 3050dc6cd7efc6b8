"""Allowed dependencies: imports of the Python package, includes of the engines and the shaders.

Each rule is a function of all sources that returns violations, one line each. It is applied to the sources,
and to sources with a planted violation.
"""

from __future__ import annotations

import ast
import functools
import posixpath
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest
from support.places import ROOT

FOLDERS = {"cpp": ("*.h", "*.cpp", "*.mm"), "shaders": ("*.h", "*.metal"), "python": ("*.py",)}

Sources = Mapping[str, str]  # text of each file, by its path from the root
Rule = Callable[[Sources], list[str]]

BINDINGS = "cpp/python/"  # one source for each subject
MODULE = BINDINGS + "module.cpp"
BINDINGS_OF_ENGINES = ("cpp/python/cpu.", "cpp/python/metal.")  # limits of the machine; recorded passes
# Folders of cpp in order: each may include those before it.
ROOMS = ("base", "model", "cache", "sampling", "engine", "cpu", "metal", "python")
SHARED_WITH_SHADERS = tuple(
    f"shaders/{name}.h"
    for name in (
        *(
            "args",
            "args_fields",
            "attention",
            "clamped_silu",
            "gated_delta",
            "grids",
            "position_bias",
            "quants",
        ),
        "token_tiles",
    )
)
INCLUDE = re.compile(r'^\s*#\s*(?:include|import)\s*([<"])([^>"]+)[>"]', re.MULTILINE)


@pytest.fixture(scope="module")
def sources() -> dict[str, str]:
    """All sources that the rules are about."""
    paths = [
        path for folder, kinds in FOLDERS.items() for kind in kinds for path in (ROOT / folder).rglob(kind)
    ]
    found = {path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8") for path in paths}
    # Only the names of the emulator's files matter: rules about who may include them.
    return found | {path.relative_to(ROOT).as_posix(): "" for path in (ROOT / "emulator").rglob("*.h")}


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


def the_engines_do_not_know_each_other(sources: Sources) -> list[str]:
    other = {"cpp/cpu/": "cpp/metal/", "cpp/metal/": "cpp/cpu/"}
    return [
        f"{path} includes {target}"
        for engine in other
        for path, target in includes(sources, engine)
        if target.startswith(other[engine])
    ]


def rooms_include_in_one_direction(sources: Sources) -> list[str]:
    def room(path: str) -> str:
        return path.split("/")[1]

    return [
        f"{path} includes {target}"
        for path, target in includes(sources, "cpp/")
        if target.startswith("cpp/")
        if ROOMS.index(room(target)) > ROOMS.index(room(path))
    ]


def bindings_use_engines_in_one_place(sources: Sources) -> list[str]:
    return [
        f"{path} includes {target}"
        for path, target in includes(sources, BINDINGS)
        if target.startswith(("cpp/cpu/", "cpp/metal/")) and not path.startswith(BINDINGS_OF_ENGINES)
    ]


def the_bindings_alone_know_python(sources: Sources) -> list[str]:
    return [
        f"{path} includes {target}"
        for path, target in includes(sources, "cpp/")
        if target.startswith(("nanobind/", "Python.h")) and not path.startswith(BINDINGS)
    ]


def the_engine_does_not_know_the_emulator(sources: Sources) -> list[str]:
    included = [
        f"{path} includes {target}"
        for folder in ("cpp/", "shaders/")
        for path, target in includes(sources, folder)
        if target.startswith("emulator/") and path != MODULE
    ]
    asked = [
        f"{path} tests for the emulator"
        for path, text in sources.items()
        if path.startswith(("cpp/", "shaders/")) and path != MODULE
        if re.search(r"^\s*#\s*(if|ifdef|ifndef|elif)\b.*EMULATOR", text, re.MULTILINE)
    ]
    return included + asked


APPLES_FRAMEWORK = "MetalPerformancePrimitives/"  # whose headers shaders include


def shaders_and_host_share_few_headers(sources: Sources) -> list[str]:
    host = [
        f"{path} includes {target}"
        for path, target in includes(sources, "cpp/")
        if target.startswith("shaders/") and target not in SHARED_WITH_SHADERS
    ]
    shaders = [
        f"{path} includes {target}"
        for path, target in includes(sources, "shaders/")
        if "/" in target and not target.startswith(("shaders/", APPLES_FRAMEWORK))
    ]
    return host + shaders


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
def nodes_of(text: str) -> list[Any]:
    """Nodes of a module of the kinds that rules are about."""
    kinds = (ast.Import, ast.ImportFrom, ast.Attribute, ast.FunctionDef, ast.AsyncFunctionDef)
    return [node for node in ast.walk(ast.parse(text)) if isinstance(node, kinds)]


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
            modules[name] = nodes_of(text)

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
    graph = imports(sources)
    finished: set[str] = set()

    def circle(module: str, trail: list[str]) -> list[str] | None:
        if module in trail:
            return [*trail[trail.index(module) :], module]
        if module in finished or module not in graph:
            return None
        found = next((c for target in sorted(graph[module]) if (c := circle(target, [*trail, module]))), None)
        finished.add(module)
        return found

    return [" -> ".join(found) for module in graph if (found := circle(module, []))]


NAMED_TUPLE = {"_asdict", "_fields", "_make", "_replace"}  # public, and named so that no field clashes


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


def python_knows_native_code_by_the_bindings_alone(sources: Sources) -> list[str]:
    others = {"metal_prefill._metal_testing", "ctypes", "cffi", "support", "embed_shaders", "scanner"}
    return [
        f"{module} imports {target}"
        for module, targets in imports(sources).items()
        for target in sorted(targets & others)
    ]


def the_package_does_not_control_the_emulator(sources: Sources) -> list[str]:
    return [
        f"{path} uses {used}"
        for path, text in sources.items()
        if path.startswith("python/")
        for used in re.findall(r"""_core\.emulator\b|getattr\(_core, ["']emulator["']""", text)
    ]


def no_module_uses_private_attributes_of_others(sources: Sources) -> list[str]:
    """Objects of the same module may access each other, as a copy does with its original."""
    found = []
    for path, text in sources.items():
        if not path.startswith("python/"):
            continue
        nodes = nodes_of(text)
        attributes = [node for node in nodes if isinstance(node, ast.Attribute)]
        own = {node.name for node in nodes if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))}
        own |= {
            node.attr for node in attributes if isinstance(node.value, ast.Name) and node.value.id == "self"
        }
        modules = {
            (alias.asname or alias.name).partition(".")[0]
            for node in nodes
            if isinstance(node, (ast.Import, ast.ImportFrom))
            for alias in node.names
        }
        found += [
            f"{path} uses {ast.unparse(node)}"
            for node in attributes
            if re.match(r"_[a-z]", node.attr) and node.attr not in own | NAMED_TUPLE
            if not (isinstance(node.value, ast.Name) and node.value.id in modules)
        ]
    return found


def errors_know_nothing_of_the_package(sources: Sources) -> list[str]:
    return [
        f"metal_prefill.errors imports {target}"
        for target in sorted(imports(sources)["metal_prefill.errors"])
        if target.startswith("metal_prefill")
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
    ] + [
        f"{path} holds a lock of Python 3.11 while it computes an attribute"
        for path, text in sources.items()
        if path.startswith("python/") and re.search(r"functools.*\bcached_property\b(?!`)", text)
    ]


# For each rule, lines that it must find where they are added to a file.
PLANTED: dict[Rule, list[tuple[str, str]]] = {
    the_engines_do_not_know_each_other: [
        ("cpp/cpu/engine.cpp", '#include "../metal/plan/ops.h"'),
        ("cpp/metal/device/engine.mm", '#include "../../cpu/threads.h"'),
        ("cpp/metal/device/engine.mm", "#include <cpu/threads.h>"),
    ],
    rooms_include_in_one_direction: [
        ("cpp/engine/engine.cpp", '#include "../metal/plan/ops.h"'),
        ("cpp/cache/pages.cpp", '#include "../engine/engine.h"'),
    ],
    bindings_use_engines_in_one_place: [(MODULE, '#include "../cpu/threads.h"')],
    the_bindings_alone_know_python: [
        ("cpp/engine/engine.h", "#include <nanobind/nanobind.h>"),
        ("cpp/metal/plan/ops.h", "#include <Python.h>"),
    ],
    the_engine_does_not_know_the_emulator: [
        ("cpp/metal/device/engine.mm", '#include "../../../emulator/emulator.h"'),
        ("cpp/engine/engine.cpp", "#include <emulator.h>"),
        ("shaders/matmul.metal", "#ifdef METAL_PREFILL_EMULATOR"),
    ],
    shaders_and_host_share_few_headers: [
        ("cpp/metal/plan/ops_attention.mm", '#include "../../../shaders/rope.h"'),
        ("shaders/rope.h", '#include "../cpp/model/model.h"'),
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
    no_module_uses_private_attributes_of_others: [
        ("python/metal_prefill/model.py", "def f(engine):\n    return engine._core"),
        ("python/metal_prefill/serve/_chat.py", "stream._text = None"),
    ],
    python_knows_native_code_by_the_bindings_alone: [
        ("python/metal_prefill/model.py", "from metal_prefill import _metal_testing"),
        ("python/metal_prefill/session.py", "import ctypes"),
    ],
    the_package_does_not_control_the_emulator: [
        ("python/metal_prefill/gpu/_trace.py", "_core.emulator.set_history_depth(1)"),
        ("python/metal_prefill/gpu/_trace.py", '_emulator = getattr(_core, "emulator", None)'),
    ],
    locks_survive_a_fork: [
        ("cpp/cpu/kv_pages.h", "mutable std::mutex mutex_;"),
        ("cpp/sampling/lookup.h", "std::mutex mutex_;"),
        ("python/metal_prefill/model.py", "from functools import cached_property"),
    ],
    errors_know_nothing_of_the_package: [
        ("python/metal_prefill/errors.py", "from metal_prefill import _core")
    ],
}


@pytest.mark.parametrize("rule", PLANTED, ids=lambda rule: rule.__name__)
def test_the_sources_keep(rule: Rule, sources: Sources) -> None:
    assert rule(sources) == []


@pytest.mark.parametrize("rule", PLANTED, ids=lambda rule: rule.__name__)
def test_planted_mistakes_are_found(rule: Rule, sources: Sources) -> None:
    for path, line in PLANTED[rule]:
        (found,) = rule({**sources, path: f"{sources[path]}\n{line}\n"})
        module = path.removeprefix("python/").removesuffix(".py").replace("/", ".")
        assert path in found or module in found, line
