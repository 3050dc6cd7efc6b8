"""Hooks of mkdocs: pages of the site that are not files in docs/, and links between files of the repository.

Markdown files elsewhere in the repository become pages, as does each example. The pages of the reference are
made from the public names of the package. Links to files of the
repository become links to their pages; a link to a file without a page is a warning, and so an error.
"""

import ast
import logging
import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[2]
EXAMPLES = sorted(path.name for path in (ROOT / "examples").glob("*.py"))
# Page of each file outside of docs/, by path in the repository.
PAGES = {
    "CHANGELOG.md": "project/changelog.md",
    "CONTRIBUTING.md": "project/contributing.md",
    "README.md": "project/readme.md",
    "SECURITY.md": "project/security.md",
    "emulator/README.md": "project/emulator.md",
    "examples/README.md": "examples/index.md",
    **{f"examples/{name}": f"examples/{name.removesuffix('.py')}.md" for name in EXAMPLES},
}
ORIGINS = {page: origin for origin, page in PAGES.items()}
PACKAGES = (
    *("generation", "text", "tasks", "files", "hub"),
    *("conversion", "serve", "integrations", "bench", "synth"),
)
# Modules whose public names a page of the reference documents.
REFERENCE = {
    "index": ("Models and sessions", "metal_prefill"),
    "errors": ("Errors", "metal_prefill"),
    **{name: (name.capitalize(), f"metal_prefill.{name}") for name in PACKAGES},
    "sentence_transformers": ("sentence-transformers", "metal_prefill.sentence_transformers"),
}
LINK = re.compile(r"(\]\()([^)#\s]+)([^)]*\))")
FENCE = re.compile(r"^(```\w+) \w+$", re.MULTILINE)  # the tag determines which test runs the snippet

log = logging.getLogger("mkdocs.hooks.docs_hooks")


def public_names(module: str) -> list[str]:
    """Return the names in ``__all__`` of a module, without importing it."""
    package = ROOT / "python" / module.replace(".", "/") / "__init__.py"
    for statement in ast.parse(package.read_text(encoding="utf-8")).body:
        if isinstance(statement, ast.Assign) and ast.unparse(statement.targets[0]) == "__all__":
            return list(ast.literal_eval(statement.value))
    raise ValueError(f"{package} has no __all__")


def reference(page: str) -> str:
    """Return the Markdown of a page of the reference."""
    title, module = REFERENCE[page]
    names = public_names(module)
    if module == "metal_prefill":
        documented = {name for other, (_, m) in REFERENCE.items() if m != module for name in public_names(m)}
        names.sort(key=lambda name: name not in ("Model", "Session"))  # most readers look for these
        names = [
            name for name in names if name.endswith("Error") == (page == "errors") and name not in documented
        ]
    return "\n\n".join([f"# {title}", *(f"::: {module}.{name}" for name in names)])


def example(name: str) -> str:
    """Return the Markdown of an example: its docstring and its code."""
    text = (ROOT / "examples" / name).read_text(encoding="utf-8")
    module = ast.parse(text)
    docstring = (ast.get_docstring(module) or "").replace("``", "`")
    end = module.body[0].end_lineno
    code = "\n".join(text.splitlines()[end:]).strip("\n")
    return f"# {name}\n\n{docstring}\n\n```python\n{code}\n```\n"


def on_files(files: Files, config: Any) -> Files:
    """Add the pages that are not files in docs/."""
    for origin, page in PAGES.items():
        name = posixpath.basename(origin)
        content = example(name) if name in EXAMPLES else (ROOT / origin).read_text(encoding="utf-8")
        files.append(File.generated(config, page, content=content))
    for page in REFERENCE:
        files.append(File.generated(config, f"reference/{page}.md", content=reference(page)))
    return files


def on_page_markdown(markdown: str, page: Page, config: Any, files: Files) -> str:
    """Adapt links and fences of a page to the site."""
    source = page.file.src_uri
    origin = ORIGINS.get(source, f"docs/{source}")

    def adapt(match: re.Match[str]) -> str:
        target = match[2]
        if "://" in target or target.startswith("mailto:"):
            return match[0]
        path = posixpath.normpath(posixpath.join(posixpath.dirname(origin), target))
        found = path.removeprefix("docs/") if path.startswith("docs/") else PAGES.get(path)
        if found is None:
            log.warning("%s links %s, which has no page", origin, path)
            return match[0]
        return match[1] + posixpath.relpath(found, posixpath.dirname(source) or ".") + match[3]

    pieces = re.split(r"(^```.*?^```$)", FENCE.sub(r"\1", markdown), flags=re.MULTILINE | re.DOTALL)
    return "".join(piece if piece.startswith("```") else LINK.sub(adapt, piece) for piece in pieces)
