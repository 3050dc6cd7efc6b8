"""The examples run as their docstrings show, in seconds, with the bundled model."""

import csv
import json
import re
import runpy
import sys
from contextlib import redirect_stdout
from pathlib import Path

import numpy as np
import pytest
from support.places import ROOT
from support.programs import Run

from metal_prefill import Model, synth

EXAMPLES = ROOT / "examples"
DATA = EXAMPLES / "data"


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Run a program with arguments, and return its output."""
    printed = tmp_path_factory.mktemp("printed") / "out.txt"

    def run(name: str, *arguments: str | Path) -> str:
        monkeypatch.setattr(sys, "argv", [name, *map(str, arguments)])
        with printed.open("w") as file, redirect_stdout(file):  # which a program may close
            runpy.run_path(str(EXAMPLES / name), run_name="__main__")
        return printed.read_text()

    return run


def test_rows_of_a_csv_file_are_labelled(tmp_path: Path, run: Run) -> None:
    output = tmp_path / "labelled.csv"
    run("classify_csv.py", DATA / "reviews.csv", "--labels", "love,death", "-o", output)
    with output.open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    with (DATA / "reviews.csv").open(newline="", encoding="utf-8") as file:
        assert [(row["id"], row["text"]) for row in rows] == [
            tuple(row.values()) for row in csv.DictReader(file)
        ]
    assert {row["label"] for row in rows} <= {"love", "death"}
    assert all(0.5 <= float(row["probability"]) <= 1 for row in rows)


@pytest.mark.real_model
@pytest.mark.usefixtures("smollm2_path")
def test_a_real_model_classifies_a_review(run: Run) -> None:
    rows = list(csv.DictReader(run("classify_csv.py", DATA / "reviews.csv", "-m", "smollm2").splitlines()))
    assert [row["label"] for row in rows[:4]] == ["positive", "negative", "positive", "negative"]


def test_the_nearest_paragraph_contains_the_words_of_the_query(tmp_path: Path, run: Run) -> None:
    paragraphs = ["The king is dead, long live the king.", "Bread needs flour, water and yeast."]
    (tmp_path / "a.md").write_text("# Title\n\n" + "\n\n".join(paragraphs))
    (tmp_path / "more").mkdir()
    (tmp_path / "more" / "b.md").write_text("The Seine flows through Paris and ends in the sea.\n")
    for query in paragraphs:
        assert run("search_folder.py", tmp_path, query, "-n", "1").startswith(f"1.000  a.md: {query}")
    lines = run("search_folder.py", tmp_path, "Seine").splitlines()
    assert sorted(line.split()[1] for line in lines) == ["a.md:", "a.md:", "more/b.md:"]


def test_stored_vectors_are_used_until_a_text_changes(tmp_path: Path, run: Run) -> None:
    model, kept, texts = tmp_path / "embedder.gguf", tmp_path / "kept.npz", tmp_path / "texts"
    synth.synthesize(model, preset="tiny-embedding")
    texts.mkdir()
    (texts / "a.md").write_text("One two three four five six.")
    arguments = (texts, "one", "-m", model, "--vectors", kept)
    first = run("search_folder.py", *arguments)
    with np.load(kept) as stored:
        content, vectors = stored["content"], stored["vectors"]
    assert vectors.shape == (1, 64)
    np.savez(kept, content=content, vectors=-vectors)
    assert run("search_folder.py", *arguments).split()[0] == f"{-float(first.split()[0]):.3f}"
    (texts / "a.md").write_text("One two three four five seven.")
    run("search_folder.py", *arguments)
    with np.load(kept) as stored:
        assert stored["content"] != content


def test_a_document_is_computed_once_for_all_questions_and_runs(tmp_path: Path, run: Run) -> None:
    arguments = ("ask_document.py", DATA / "emails" / "complaint.txt", "What?", "Who?", "-n", "8")
    first, again = (run(*arguments, "--save", tmp_path / "kept") for _ in range(2))
    with Model() as model:
        text = (DATA / "emails" / "complaint.txt").read_text(encoding="utf-8")
        n = len(model.tokenizer.encode(f"Read this text.\n\n{text}\n\n"))
    assert first.startswith(f"document: {n} tokens, 0 of them loaded")
    assert again.startswith(f"document: {n} tokens, {n} of them loaded")
    reused = [int(found) for found in re.findall(r"\((\d+) of \d+ tokens reused", first)]
    assert len(reused) == 2
    assert min(reused) >= n
    answers = [[line for line in text.splitlines() if line.startswith("A:")] for text in (first, again)]
    assert answers[0] == answers[1]


def test_each_email_becomes_a_record_that_satisfies_the_schema(run: Run) -> None:
    jsonschema = pytest.importorskip("jsonschema")
    pytest.importorskip("llguidance", reason="needs the extra guide")
    schema = runpy.run_path(str(EXAMPLES / "extract_json.py"))["SCHEMA"]
    emails = sorted((DATA / "emails").glob("*.txt"))
    records = [json.loads(line) for line in run("extract_json.py", *emails).splitlines()]
    assert [record.pop("file") for record in records] == [path.name for path in emails]
    for record in records:
        jsonschema.validate(record, schema)


def test_an_email_that_does_not_fit_does_not_stop_the_others(tmp_path: Path, run: Run) -> None:
    pytest.importorskip("llguidance", reason="needs the extra guide")
    long, short = tmp_path / "long.txt", tmp_path / "short.txt"
    long.write_text("word " * 3000)
    short.write_text("From: Anna\n\nAre you open?")
    first, second = map(json.loads, run("extract_json.py", long, short).splitlines())
    assert "context" in first["error"]
    assert second["kind"]


def test_rows_of_a_table_are_embedded_once_and_found_by_words_and_meaning(tmp_path: Path, run: Run) -> None:
    duckdb = pytest.importorskip("duckdb")
    texts = ["The king is dead.", None, "Long live the queen.", *[f"Row {i} of the table." for i in range(7)]]
    path = tmp_path / "plays.duckdb"
    with duckdb.connect(path) as database:
        database.execute('CREATE TABLE lines ("the text" VARCHAR)')
        database.executemany("INSERT INTO lines VALUES (?)", [[text] for text in texts])
    arguments = ("embed_table.py", path, "lines", "the text", "Long live the queen!", "-n", "1")
    first = run(*arguments, "--block", "4")
    assert first.splitlines()[0] == "9 rows embedded"
    assert first.splitlines()[1].endswith("  Long live the queen.")

    def vectors() -> dict[str | None, object]:
        with duckdb.connect(path) as database:
            return dict(database.execute("SELECT * FROM lines").fetchall())

    whole = vectors()
    assert [text for text, vector in whole.items() if vector is None] == [None]
    with duckdb.connect(path) as database:  # as if the run had been interrupted
        database.execute("UPDATE lines SET embedding = NULL WHERE \"the text\" LIKE 'Row%'")
    assert run(*arguments).splitlines() == ["7 rows embedded", *first.splitlines()[1:]]
    assert vectors() == whole
    assert run(*arguments).splitlines()[0] == "0 rows embedded"
