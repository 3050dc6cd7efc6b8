"""The first page and the task pages: snippets run in order and print the documented output."""

import itertools
import os
import re
import shlex
import socket
import sys
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from support.files.hub_server import Repo, serve
from support.folders import encoder_folders
from support.places import ROOT
from support.programs import finished, serving

DOCS = ROOT / "docs"
PAGES = [DOCS / "index.md", *sorted((DOCS / "tasks").glob("*.md"))]
FENCE = re.compile(r"^```(\w*)([^\n]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
MODELS = {"smollm2": "smollm2_path", "minilm": "minilm_folder"}  # fixtures that skip if one is missing
TAGS = {"", "guide", "serve", *MODELS}  # requirements of a snippet

# Runs numbered snippets as if they were one program, and marks where the output of each begins.
RUNNER = """
import subprocess, sys
from pathlib import Path
names = {"__name__": "__main__"}
for file in sorted(Path(sys.argv[1]).iterdir()):
    print(f"@@{file.stem}@@", flush=True)
    if file.suffix == ".sh":
        subprocess.run(["bash", "-euo", "pipefail", str(file)], check=True)
    else:
        exec(compile(file.read_text(), str(file), "exec"), names)
    sys.stdout.flush()
"""


@dataclass(frozen=True)
class Snippet:
    """A fenced block of the page, and its documented output."""

    line: int
    language: str
    tag: str
    code: str
    output: str | None


def snippets(page: Path) -> list[Snippet]:
    text = page.read_text(encoding="utf-8")
    blocks = list(FENCE.finditer(text))
    found = []
    for i, block in enumerate(blocks):
        if block[1] in ("text", "yaml"):
            continue
        following = blocks[i + 1] if i + 1 < len(blocks) else None
        directly = following is not None and not text[block.end() : following.start()].strip()
        output = following[3] if directly and following is not None and following[1] == "text" else None
        line = text.count("\n", 0, block.start()) + 2
        found.append(Snippet(line, block[1], block[2].strip(), block[3], output))
    return found


def tagged(page: Path, tag: str) -> list[Snippet]:
    return [s for s in snippets(page) if s.tag == tag]


def run(page: Path, chosen: list[Snippet], folder: Path, demo_path: Path) -> None:
    """Run snippets in one process and compare their output."""
    code, work = folder / "code", folder / "work"
    code.mkdir()
    work.mkdir()
    (work / "docs").symlink_to(DOCS)  # as in a checkout
    for snippet in chosen:
        suffix = {"python": "py", "sh": "sh"}[snippet.language]
        # Blank lines in front make line numbers in a traceback those of the page.
        (code / f"{snippet.line:04}.{suffix}").write_text("\n" * (snippet.line - 1) + snippet.code)
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    env = {k: v for k, v in os.environ.items() if not k.startswith(("HF_", "METAL_PREFILL_"))}
    repos = {"QuantFactory/SmolLM-135M-GGUF": Repo({"SmolLM-135M.Q4_0.gguf": demo_path.read_bytes()})}
    if any("openai/privacy-filter" in snippet.code for snippet in chosen):  # with random weights
        files = encoder_folders.private_parts(folder / "parts").write().iterdir()
        repos["openai/privacy-filter"] = Repo({file.name: file.read_bytes() for file in files})
    with serve(repos) as hub:
        env |= {"PATH": path, "HF_HOME": str(folder / "hub"), "HF_ENDPOINT": hub.url, "NO_PROXY": "127.0.0.1"}
        child = finished([sys.executable, "-c", RUNNER, str(code)], cwd=work, env=env)
    parts = re.split(r"^@@(\d+)@@\n", child.stdout, flags=re.MULTILINE)
    printed = dict(zip(parts[1::2], parts[2::2], strict=True))
    assert child.returncode == 0, f"{page.name}, at or after line {max(printed)}:\n{child.stderr}"
    for snippet in chosen:
        actual = printed[f"{snippet.line:04}"]
        if snippet.output is not None:
            expected = ".*".join(re.escape(part) for part in snippet.output.strip().split("..."))
            message = f"{page.name}, line {snippet.line}, prints\n{textwrap.indent(actual, '    ')}"
            assert re.fullmatch(expected, actual.strip(), re.DOTALL), message


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_block_is_a_snippet_or_its_output(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    languages = [block[1] for block in FENCE.finditer(text)]
    assert set(languages) <= {"python", "sh", "text", "yaml"}  # the last: tests/serve/test_client_habits.py
    assert text.count("```") == 2 * len(languages)
    found = snippets(page)
    assert {s.tag for s in found} <= TAGS
    outputs = [s for s in found if s.output is not None]
    assert languages.count("text") == len(outputs), "an output follows no snippet"


def runs() -> Iterator[Any]:
    """Yield each page and the tag of some of its snippets."""
    for page, tag in itertools.product(PAGES, ("", "guide", *MODELS)):
        if tagged(page, tag):
            marks = [pytest.mark.real_model] if tag in MODELS else []
            yield pytest.param(page, tag, id=f"{page.stem} {tag}".strip(), marks=marks)


@pytest.mark.parametrize(("page", "tag"), [*runs()])
def test_a_page_runs_from_top_to_bottom(
    page: Path, tag: str, tmp_path: Path, demo_path: Path, request: pytest.FixtureRequest
) -> None:
    if tag == "guide":
        pytest.importorskip("llguidance", reason="needs the extra guide")
    if tag in MODELS:
        request.getfixturevalue(MODELS[tag])
    run(page, tagged(page, tag), tmp_path, demo_path)


def test_the_page_of_the_server_runs_with_a_server(tmp_path: Path, demo_path: Path) -> None:
    """Its first snippet starts the server."""
    pytest.importorskip("openai")
    (page,) = (page for page in PAGES if tagged(page, "serve"))
    command, *chosen = tagged(page, "serve")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    argv = [sys.executable, "-m", "metal_prefill", *shlex.split(command.code.replace("8080", port))[1:]]
    with serving(argv) as (server, url):
        assert url.endswith(f":{port}")
        run(page, [replace(s, code=s.code.replace("8080", port)) for s in chosen], tmp_path, demo_path)
        server.terminate()
        assert server.wait(30) == 0
