"""Models in several files, as the reference library and llama.cpp's tool write them."""

import shutil
from collections.abc import Callable
from pathlib import Path

import gguf as reference
import numpy as np
import pytest
from support.gguf_bytes import U16, entry, gguf, scalar, tensor
from support.small_models import MODELS, write

from metal_prefill import GGUFError, Model
from metal_prefill.files import GGUFFile
from metal_prefill.files._gguf_file import is_later_part, part_names


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


def test_another_part_names_the_first(split: Path) -> None:
    part = split.with_name("model-00002-of-00003.gguf")
    with pytest.raises(GGUFError, match=r"is a part of a split model .*; open .*model-00001-of-00003\.gguf"):
        GGUFFile(part)


def test_a_part_that_is_missing_is_named(split: Path, tmp_path: Path) -> None:
    shutil.copy(split, tmp_path)
    with pytest.raises(GGUFError, match=r"part 2 of 3 is missing: model-00002-of-00003\.gguf"):
        GGUFFile(tmp_path / split.name)


def test_a_part_with_another_name_is_refused(split: Path, tmp_path: Path) -> None:
    path = Path(shutil.copy(split, tmp_path / "model.gguf"))
    with pytest.raises(GGUFError, match="its name must end in -00001-of-<count>"):
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
