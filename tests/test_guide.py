"""The user's guide: every snippet runs, in order, and prints what the page says."""

from __future__ import annotations

import os
import re
import shlex
import socket
import subprocess
import sys
import textwrap
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from support.hub_server import Repo, serve

GUIDE = Path(__file__).parents[1] / "docs" / "guide.md"
FENCE = re.compile(r"^```(\w*)([^\n]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)

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
    """A fenced block of the page, and the output that it is said to have."""

    line: int
    language: str
    tag: str
    code: str
    output: str | None


def snippets() -> list[Snippet]:
    text = GUIDE.read_text(encoding="utf-8")
    blocks = list(FENCE.finditer(text))
    found = []
    for i, block in enumerate(blocks):
        if block[1] == "text":
            continue
        following = blocks[i + 1] if i + 1 < len(blocks) else None
        directly = following is not None and not text[block.end() : following.start()].strip()
        output = following[3] if directly and following is not None and following[1] == "text" else None
        line = text.count("\n", 0, block.start()) + 2
        found.append(Snippet(line, block[1], block[2].strip(), block[3], output))
    return found


def run(chosen: list[Snippet], folder: Path, demo_path: Path) -> None:
    """Run snippets in one process and compare what each prints."""
    code, work = folder / "code", folder / "work"
    code.mkdir()
    work.mkdir()
    for snippet in chosen:
        suffix = {"python": "py", "sh": "sh"}[snippet.language]
        # Blank lines in front make the lines of a traceback those of the page.
        (code / f"{snippet.line:04}.{suffix}").write_text("\n" * (snippet.line - 1) + snippet.code)
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    env = {k: v for k, v in os.environ.items() if not k.startswith(("HF_", "METAL_PREFILL_"))}
    model = demo_path.read_bytes()
    with serve({"QuantFactory/SmolLM-135M-GGUF": Repo({"SmolLM-135M.Q4_0.gguf": model})}) as hub:
        env |= {"PATH": path, "HF_HOME": str(folder / "hub"), "HF_ENDPOINT": hub.url, "NO_PROXY": "127.0.0.1"}
        child = subprocess.run(
            [sys.executable, "-c", RUNNER, str(code)],
            cwd=work,
            env=env,
            capture_output=True,
            text=True,
            check=False,
        )
    parts = re.split(r"^@@(\d+)@@\n", child.stdout, flags=re.MULTILINE)
    printed = dict(zip(parts[1::2], parts[2::2], strict=True))
    assert child.returncode == 0, f"{GUIDE.name}, at or after line {max(printed)}:\n{child.stderr}"
    for snippet in chosen:
        actual = printed[f"{snippet.line:04}"]
        if snippet.output is not None:
            expected = ".*".join(re.escape(part) for part in snippet.output.strip().split("..."))
            message = f"{GUIDE.name}, line {snippet.line}, prints\n{textwrap.indent(actual, '    ')}"
            assert re.fullmatch(expected, actual.strip(), re.DOTALL), message


def test_every_block_is_a_snippet_or_its_output() -> None:
    text = GUIDE.read_text(encoding="utf-8")
    languages = [block[1] for block in FENCE.finditer(text)]
    assert set(languages) == {"python", "sh", "text"}
    assert text.count("```") == 2 * len(languages)
    outputs = [s for s in snippets() if s.output is not None]
    assert languages.count("text") == len(outputs), "an output follows no snippet"


def test_the_guide_runs_from_top_to_bottom(tmp_path: Path, demo_path: Path) -> None:
    pytest.importorskip("huggingface_hub")
    run([s for s in snippets() if s.tag == ""], tmp_path, demo_path)


def test_the_guide_on_ray(tmp_path: Path, demo_path: Path) -> None:
    """Part of ``make test-ray``."""
    pytest.importorskip("ray.data", reason="needs the extra ray")
    chosen = [s for s in snippets() if s.tag == "ray"]
    assert chosen
    setup = "import ray\nray.init(num_cpus=3, include_dashboard=False, log_to_driver=False)\n"
    run([Snippet(1, "python", "", setup, None), *chosen], tmp_path, demo_path)


def test_the_guide_of_the_server(tmp_path: Path, demo_path: Path) -> None:
    pytest.importorskip("openai")
    command, *chosen = [s for s in snippets() if s.tag == "serve"]
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    argv = [sys.executable, "-m", "metal_prefill.cli", *shlex.split(command.code.replace("8080", port))[1:]]
    with subprocess.Popen(argv, stderr=subprocess.PIPE, text=True) as server:
        try:
            assert server.stderr is not None
            assert port in server.stderr.readline()
            run([replace(s, code=s.code.replace("8080", port)) for s in chosen], tmp_path, demo_path)
        finally:
            server.terminate()
        assert server.wait(30) == 0


def test_the_guide_under_constraints(tmp_path: Path, demo_path: Path) -> None:
    pytest.importorskip("llguidance", reason="needs the extra guide")
    chosen = [s for s in snippets() if s.tag == "guide"]
    assert chosen
    setup = "from metal_prefill import Model\nmodel = Model()\n"
    run([Snippet(1, "python", "", setup, None), *chosen], tmp_path, demo_path)
