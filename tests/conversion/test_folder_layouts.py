"""Folders whose parts are in other places than usual, or are not a whole model."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.encoder_tasks import opened
from support.folders import model_folders, task_folders
from support.folders.model_folders import CONTEXT, Folder
from support.servers.running_server import serving

from metal_prefill import Model
from metal_prefill.cli import main
from metal_prefill.errors import GGUFError

TEXTS = ["The king is dead.", "x", "long " * 30]
LIMIT = 12


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    made = model_folders.bert(tmp_path / "m").pool(dense=16)
    made.json("sentence_bert_config.json", {"max_seq_length": LIMIT, "do_lower_case": False})
    return made


def vectors(path: Path) -> Any:
    with Model(path, device="cpu") as model, pytest.warns(UserWarning, match=rf"of 3 .* {LIMIT} tokens"):
        return model.embed(TEXTS, truncate="end")


def test_errors_name_the_options_of_the_interface(
    folder: Folder, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder.write()
    (tmp_path / "t.txt").write_text("long " * 30)
    options = ("-m", str(folder.path), "-f", str(tmp_path / "t.txt"), "-o", str(tmp_path / "v.npy"))
    assert main(["embed", *options]) == 1
    assert f"; --max-context {CONTEXT} allows more" in capsys.readouterr().err
    with serving(folder.path) as server:
        refused = server.post("/v1/embeddings", {"input": "long " * 30}).json()["error"]["message"]
    assert f"; the server's option --max-context {CONTEXT} allows more" in refused


@pytest.mark.parametrize("place", ["../x", "x" * 5000, "x/" * 3000])
def test_a_module_that_is_not_in_the_folder_is_refused_by_name(folder: Folder, place: str) -> None:
    folder.write()
    modules = folder.loaded("modules.json")
    modules[1]["path"] = place
    folder.json("modules.json", modules)
    with pytest.raises(GGUFError, match=r"modules\[1\]\.path is "):
        Model(folder.path, device="cpu")


def test_a_transformer_in_a_folder_of_its_own_is_found(folder: Folder) -> None:
    """Early versions of sentence-transformers wrote such folders."""
    expected = vectors(folder.write())
    modules = folder.loaded("modules.json")
    modules[0]["path"] = "0_Transformer"
    body = folder.path / "0_Transformer"
    body.mkdir()
    for file in [file for file in folder.path.iterdir() if file.is_file() and file.name != "modules.json"]:
        file.rename(body / file.name)
    folder.json("modules.json", modules)
    np.testing.assert_array_equal(vectors(folder.path), expected)
    (body / "config.json").write_text((body / "config.json").read_text().replace("1e-12", "1e-2"))
    assert not np.array_equal(vectors(folder.path), expected)  # not the conversion of the other contents


def test_a_score_of_logits_is_the_difference_of_two_answers(tmp_path: Path) -> None:
    pairs = [("a", "b"), ("a", "no")]
    with opened(task_folders.generative(tmp_path / "m").write()) as model:
        ranked = {item.index: item.score for item in model.rerank("a", [text for _, text in pairs])}
        for i, (query, document) in enumerate(pairs):
            before = model.tokenizer.encode("<s>Judge.</s>", add_bos=False, parse_special=True)
            text = f"Query: {query}\nDocument: {document} Relevant?"
            ids = [*before, *model.tokenizer.encode(text, add_bos=False)]
            logits = model.session().forward_prompt_logits(ids)
            yes, no = (logits[model.tokenizer.encode(word, add_bos=False)[0]] for word in ("yes", "no"))
            assert ranked[i] == pytest.approx(1 / (1 + np.exp(no - yes)), rel=1e-5)
