"""``metal-prefill embed`` and ``rerank``: files of vectors that are continued, and documents in order."""

import errno
import fcntl
import io
import json
import os
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.programs import Run, Terminal
from support.small_models import CLASSIFIERS, write

from metal_prefill import Model
from metal_prefill._support.atomic_write import replacing
from metal_prefill.cli import main
from metal_prefill.commands import embed as embed_command
from metal_prefill.tasks import _embedding

EMBED = ("embed", "--device", "cpu", "-m")


def embed(embedder: Path, *arguments: Any) -> int:
    return main([*EMBED, *map(str, (embedder, *arguments))])


def test_vectors_of_lines_match_the_library(embedder: Path, tmp_path: Path, errors: Run) -> None:
    texts = ["The king", "is  dead.", "Long live"]
    (tmp_path / "t.txt").write_text("The king\nis  dead.\n\nLong live\n")
    files = ("-f", tmp_path / "t.txt", "-o", tmp_path / "v.npy")
    cases: list[dict[str, Any]] = [{}, {"dimensions": 8, "instruction": "query"}]
    for options in cases:
        words = [word for name, value in options.items() for word in (f"--{name}", value)]
        assert "3 texts in" in errors(*EMBED, embedder, *files, *words, code=0)
        with Model(embedder, device="cpu") as model:
            np.testing.assert_array_equal(np.load(tmp_path / "v.npy"), model.embed(texts, **options))
    assert {p.name for p in tmp_path.iterdir()} == {"t.txt", "v.npy"}


def test_texts_may_be_arguments_or_lines_of_stdin_and_vectors_are_printed(
    embedder: Path, monkeypatch: pytest.MonkeyPatch, output: Run
) -> None:
    texts = ["The king", "is dead."]
    with Model(embedder, device="cpu") as model:
        vectors = model.embed(texts)
    lines = [json.loads(line) for line in output(*EMBED, embedder, "--json", *texts).splitlines()]
    assert [line["text"] for line in lines] == texts
    np.testing.assert_array_equal(np.array([line["embedding"] for line in lines], np.float32), vectors)
    monkeypatch.setattr("sys.stdin", io.StringIO("The king\n\nis dead.\n"))
    shown = output(*EMBED, embedder).splitlines()
    for line, text, vector in zip(shown, texts, vectors, strict=True):
        assert line.endswith(f" ... {len(vector)} values]  {text}")
        assert line.startswith(f"[{vector[0]:7.4f} ")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("a", "-f", "t.txt"), "-f and the text 'a' exclude each other"),
        (("a", "--column", "x"), "--column and the text 'a' exclude each other"),
        (("a", "--json", "-o", "v.npy"), "--json prints vectors, and -o writes them"),
        ((), "no texts: pass them as arguments, in a file with -f, or on standard input"),
    ],
)
def test_texts_have_one_source_and_vectors_one_target(
    embedder: Path, monkeypatch: pytest.MonkeyPatch, errors: Run, arguments: tuple[str, ...], message: str
) -> None:
    monkeypatch.setattr("sys.stdin", Terminal())
    assert message in errors(*EMBED, embedder, *arguments)


def test_an_empty_name_of_a_file_is_not_standard_input(embedder: Path, errors: Run) -> None:
    assert errors(*EMBED, embedder, "-f", "", code=1) == "error: '': No such file or directory\n"


def test_columns_are_read_and_a_byte_order_mark_is_not_text(
    embedder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = ["The king", 'is, "dead"\nlong', "Long live"]
    quoted = [f'{i},"{text.replace(chr(34), 2 * chr(34))}"' for i, text in enumerate(texts)]
    files = {
        "t.csv": "id,body\r\n" + "\r\n".join([*quoted, "3,", "4"]) + "\r\n",
        "t.tsv": "body\tid\n" + "\n".join(row.split(",", 1)[1] + "\t1" for row in quoted),
        "t.jsonl": "\n".join(json.dumps({"body": text}) for text in texts),
    }
    with Model(embedder, device="cpu") as model:
        expected, first = model.embed(texts), model.embed(texts[:1])
    for name, content in files.items():
        (tmp_path / name).write_bytes(b"\xef\xbb\xbf" + content.encode())
        output = tmp_path / f"{name}.npy"
        assert embed(embedder, "-f", tmp_path / name, "-o", output, "--column", "body") == 0
        np.testing.assert_array_equal(np.load(output), expected)
    (tmp_path / "t.txt").write_text("\ufeffThe king\n", encoding="utf-8")
    assert embed(embedder, "-f", tmp_path / "t.txt", "-o", tmp_path / "v.npy") == 0
    np.testing.assert_array_equal(np.load(tmp_path / "v.npy"), first)
    monkeypatch.setattr("sys.stdin", io.StringIO("\ufeffThe king\n"))
    assert embed(embedder, "-f", "-", "-o", tmp_path / "w.npy") == 0
    np.testing.assert_array_equal(np.load(tmp_path / "w.npy"), first)


def interrupt_block(patch: pytest.MonkeyPatch, block: int) -> list[Any]:
    """Raise KeyboardInterrupt in place of a block of vectors; return a list that gets all blocks."""
    blocks: list[Any] = []
    plain = _embedding.embed_encoded

    def stopping(*positional: Any, **options: Any) -> Any:
        blocks.append(positional)
        if len(blocks) == block:
            raise KeyboardInterrupt
        return plain(*positional, **options)

    patch.setattr(_embedding, "embed_encoded", stopping)
    return blocks


def test_an_interrupted_run_is_resumed(
    embedder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, errors: Run
) -> None:
    texts = [f"text {i}" for i in range(600)]
    (tmp_path / "t.txt").write_text("\n".join(texts))
    arguments = ("-f", tmp_path / "t.txt", "-o", tmp_path / "v.npy")
    blocks = interrupt_block(monkeypatch, 3)
    assert embed(embedder, *arguments) == 130
    assert not (tmp_path / "v.npy").exists()
    part = next(tmp_path.glob(".v.npy.*.part"))
    with open(part, "ab") as file:
        file.write(b"half a row")
    assert "512 done before" in errors(*EMBED, embedder, *arguments, code=0)
    assert len(blocks) == 4  # two earlier blocks, one interrupted, one remaining
    with Model(embedder, device="cpu") as model:
        np.testing.assert_array_equal(np.load(tmp_path / "v.npy"), model.embed(texts))
    assert list(tmp_path.glob(".v.npy*")) == []


@pytest.mark.parametrize(
    "damage",
    [
        lambda part: b"",
        lambda part: part[:3],
        lambda part: part.replace(b"(300, 64)", b"(300, 32)"),  # another width
        lambda part: part + part[128:] * 3,  # more rows than texts
        lambda part: bytes(len(part)),
    ],
)
def test_a_damaged_part_of_an_interrupted_run_is_computed_again(
    embedder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, damage: Callable[[bytes], bytes]
) -> None:
    texts = [f"text {i}" for i in range(300)]
    (tmp_path / "t.txt").write_text("\n".join(texts))
    arguments = ("-f", tmp_path / "t.txt", "-o", tmp_path / "v.npy")
    with monkeypatch.context() as patch:
        patch.setattr(embed_command, "replacing", interrupt)
        assert embed(embedder, *arguments) == 130
    part = next(tmp_path.glob(".v.npy.*.part"))
    whole = part.read_bytes()
    part.write_bytes(damage(whole))
    assert embed(embedder, *arguments) == 0
    assert (tmp_path / "v.npy").read_bytes() == whole
    assert list(tmp_path.glob(".v.npy*")) == []


def test_two_runs_never_write_the_same_file(
    embedder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, errors: Run
) -> None:
    arguments = ("-f", tmp_path / "t.txt", "-o", tmp_path / "v.npy")
    (tmp_path / "t.txt").write_text("\n".join(f"text {i}" for i in range(300)))
    with monkeypatch.context() as patch:
        interrupt_block(patch, 2)
        assert embed(embedder, *arguments) == 130
    part = next(tmp_path.glob(".v.npy.*.part"))
    with open(part, "rb") as held:
        before = held.read()
        fcntl.flock(held, fcntl.LOCK_EX)
        assert f"{tmp_path / 'v.npy'}: another process is writing it" in errors(*EMBED, embedder, *arguments)
        assert part.read_bytes() == before

    def finish(file: Any, operation: int) -> None:  # the other process, between opening the file and the lock
        part.unlink()

    monkeypatch.setattr(fcntl, "flock", finish)
    assert "another process has written it" in errors(*EMBED, embedder, *arguments)


@pytest.mark.parametrize("code", [errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS])
def test_file_systems_without_locks_are_supported(
    embedder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    def unsupported(file: Any, operation: int) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(fcntl, "flock", unsupported)
    part = tmp_path / ".v.npy.0123456789abcdef.part"  # another process may be writing it
    part.touch()
    assert embed(embedder, "a", "b", "-o", tmp_path / "v.npy") == 0
    assert np.load(tmp_path / "v.npy").shape == (2, 64)
    assert part.exists()


def test_errors_of_the_computation_do_not_name_the_output(
    embedder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, errors: Run
) -> None:
    def failed(*_: Any, **__: Any) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(_embedding, "embed_encoded", failed)
    printed = errors(*EMBED, embedder, "a", "-o", tmp_path / "v.npy", code=1)
    assert printed == f"error: {os.strerror(errno.EIO)}\n"


def interrupt(*_: Any) -> None:
    raise KeyboardInterrupt


def test_a_full_disk_is_reported_with_the_name_of_the_file(
    embedder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, errors: Run
) -> None:
    (tmp_path / "t.txt").write_text("a\nb\n")

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    output = tmp_path / "v.npy"
    printed = errors(*EMBED, embedder, "-f", tmp_path / "t.txt", "-o", output, code=1)
    assert printed == f"error: {output}: No space left on device\n"
    with pytest.raises(OSError, match=r"No space left on device: '.*/x'"), replacing(tmp_path / "x") as path:
        path.write_bytes(b"a")
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize("other", ["--compute f32", "--unicode NFC", "another first text"])
def test_a_run_with_other_options_or_texts_is_not_resumed(
    embedder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, other: str
) -> None:
    """Vectors in float32 and in 8 bits are never in the same file."""
    texts = ["cafe\u0301", *(f"text {i}" for i in range(300))]
    arguments = ("-f", tmp_path / "t.txt", "-o", tmp_path / "v.npy")
    options = other.split() if other.startswith("--") else []
    first = texts[0] if options else other
    (tmp_path / "t.txt").write_text("\n".join([first, *texts[1:]]))
    with monkeypatch.context() as patch:
        interrupt_block(patch, 2)
        assert embed(embedder, *arguments, *options) == 130
    assert list(tmp_path.glob(".v.npy.*.part"))
    (tmp_path / "t.txt").write_text("\n".join(texts))
    assert embed(embedder, *arguments) == 0
    with Model(embedder, device="cpu") as model:
        np.testing.assert_array_equal(np.load(tmp_path / "v.npy"), model.embed(texts))
    assert list(tmp_path.glob(".v.npy*")) == []


def test_the_part_that_another_process_is_writing_is_kept(embedder: Path, tmp_path: Path) -> None:
    part = tmp_path / ".v.npy.0123456789abcdef.part"
    with open(part, "wb") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        assert embed(embedder, "a", "-o", tmp_path / "v.npy") == 0
        assert part.exists()
    assert embed(embedder, "a", "-o", tmp_path / "v.npy") == 0
    assert not part.exists()


def test_parts_of_other_outputs_are_kept(embedder: Path, tmp_path: Path) -> None:
    names = [f".{output}.0123456789abcdef.part" for output in ("v[1].npy.b.npy", "v1.npy")]
    for name in (*names, ".v[1].npy.0123456789abcdef.part"):
        (tmp_path / name).touch()
    assert embed(embedder, "a", "-o", tmp_path / "v[1].npy") == 0
    assert {path.name for path in tmp_path.iterdir()} == {"v[1].npy", *names}


def test_a_part_that_cannot_be_opened_does_not_fail_the_command(embedder: Path, tmp_path: Path) -> None:
    """Another process may have removed it, as the target of this link, or it belongs to another user."""
    part = tmp_path / ".v.npy.0123456789abcdef.part"
    part.symlink_to(tmp_path / "removed")
    assert embed(embedder, "a", "-o", tmp_path / "v.npy") == 0
    assert part.is_symlink()


def test_parquet_has_texts_and_vectors(embedder: Path, tmp_path: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    (tmp_path / "t.txt").write_text("a\nb\n")
    assert embed(embedder, "-f", tmp_path / "t.txt", "-o", tmp_path / "v.parquet") == 0
    table = parquet.read_table(tmp_path / "v.parquet").to_pydict()
    assert table["text"] == ["a", "b"]
    with Model(embedder, device="cpu") as model:
        np.testing.assert_array_equal(np.array(table["embedding"], np.float32), model.embed(["a", "b"]))


@pytest.mark.parametrize(
    ("name", "content", "options", "message"),
    [
        ("t.csv", "id,body\n1,a\n", "-o v.npy", "has no column 'text', but 'id', 'body': set --column"),
        ("t.csv", "", "-o v.npy", "has no column 'text', but "),
        ("t.csv", 'text\n"a', "-o v.npy", "line 1: unexpected end of data"),
        ("t.txt", "a\n", "-o v.npy --column body", "--column is 'body', but "),
        ("t.jsonl", '"a"\n5\n', "-o v.npy", 'line 2 is neither a string nor an object with "text"'),
        ("t.jsonl", '"a"\n{"text"\n', "-o v.npy", "line 2 is not JSON"),
        ("t.jsonl", '"a"\n' * 300 + '"\\ud800"\n', "-o v.npy", "text 300: "),
        ("t.txt", b"a\n\xff", "-o v.npy", "t.txt is not UTF-8 text"),
        ("t.txt", "a\n", "-o v.csv", "v.csv: the name must end with .npy or .parquet"),
        ("t.txt", "a\n", "-o nowhere/v.npy", "does not exist"),
        ("t.csv", "embedding\na\n", "-o v.parquet --column embedding", "has the vectors in a column of"),
    ],
)
def test_invalid_usage_is_reported(
    embedder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    errors: Run,
    name: str,
    content: str | bytes,
    options: str,
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path(name).write_bytes(content.encode() if isinstance(content, str) else content)
    assert message in errors(*EMBED, embedder, "-f", name, *options.split())
    assert [p.name for p in tmp_path.iterdir()] == [name]


def test_documents_are_printed_in_order(tmp_path: Path, output: Run, errors: Run) -> None:
    path = write(tmp_path / "m.gguf", CLASSIFIERS["qwen3, yes and no"])
    documents = ["The king is dead.", "A rose", "Long live the cafe\u0301"]
    template = "{query} {document}"
    with Model(path, device="cpu") as model:
        ranked = model.rerank("king", documents, template=template, unicode="NFC")
    command = ["rerank", "--device", "cpu", "-m", path, "--max-context", "200", "-q", "king"]
    command += ["--template", template, "--unicode", "NFC", "--truncate", "end"]
    assert output(*command, *documents).splitlines() == [f"{r.score:.4f}  {r.document}" for r in ranked]
    assert json.loads(output(*command, *documents, "--json", "-n", "1")) == asdict(ranked[0])
    assert "has a classification head" in errors(*command, "a", "--how", "late")
    assert "document 1: " in errors(*command[:-2], "a", "a b " * 900, code=1)
    printed = errors(*command, "a", "a b " * 900, code=0)
    assert "warning: 1 of 2 documents did not fit the context of 200 tokens" in printed


def test_texts_are_truncated_and_counted_or_normalized(embedder: Path, tmp_path: Path, errors: Run) -> None:
    (tmp_path / "t.txt").write_text("a\n" + "a b " * 600 + "\n")
    files = ("-f", tmp_path / "t.txt", "-o", tmp_path / "a.npy")
    assert "text 1: " in errors(*EMBED, embedder, *files, code=1)
    printed = errors(*EMBED, embedder, *files, "--truncate", "end", code=0)
    assert "warning: 1 of 2 texts did not fit the context of 512 tokens" in printed
    assert np.load(tmp_path / "a.npy").shape == (2, 64)
    (tmp_path / "t.txt").write_text("cafe\u0301\n", encoding="utf-8")
    assert embed(embedder, *files, "--unicode", "NFC") == 0
    with Model(embedder, device="cpu") as model:
        np.testing.assert_array_equal(np.load(tmp_path / "a.npy"), model.embed(["caf\u00e9"]))
