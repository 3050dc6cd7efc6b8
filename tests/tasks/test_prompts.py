"""Prompts of queries and documents: of the file, of cards that a name identifies, of an architecture."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.folders import model_folders
from support.folders.model_folders import Folder

from metal_prefill import Model
from metal_prefill.conversion import convert
from metal_prefill.tasks import prompt_names
from metal_prefill.tasks._prompts import PromptRules, prompt_form

SEARCH = "Represent this sentence for searching relevant passages: "


def opened(folder: Folder, name: str = "m") -> Model:
    path = convert(folder.pool().write(), folder.path / "m.gguf", name=name)
    return Model(path, device="cpu")


def stated(tmp_path: Path, **settings: Any) -> Folder:
    folder = model_folders.bert(tmp_path / "m")
    folder.json("config_sentence_transformers.json", settings)
    return folder


def same(model: Model, text: str, instruction: str | None, whole: str) -> None:
    """Check that a prompt and a text have the tokens of the whole."""
    form = prompt_form(model.engine, instruction)
    ids = form.tokens(model.tokenizer, text, PromptRules())
    assert ids == model.tokenizer.encode(whole, add_bos=False)


@pytest.mark.parametrize(
    ("name", "query", "document"),
    [
        ("Bge Small En v1.5", SEARCH, ""),
        ("mxbai-embed-large-v1", SEARCH, ""),
        ("snowflake-arctic-embed-m", SEARCH, ""),
        ("Snowflake Arctic Embed L v2.0", "query: ", ""),
        ("e5-small-v2", "query: ", "passage: "),
        ("Multilingual E5 Base", "query: ", "passage: "),
        ("bge-m3", "", ""),
        ("all-MiniLM-L6-v2", "", ""),
        ("gte-small", "", ""),
        ("pplx-embed-v1-0.6B", "", ""),
        ("modernbert-embed-base", "search_query: ", "search_document: "),
    ],
)
def test_prompts_are_found_by_model_name(tmp_path: Path, name: str, query: str, document: str) -> None:
    with opened(model_folders.bert(tmp_path / "m"), name) as model:
        same(model, "a rose", "query", f"{query}a rose")
        same(model, "a rose", "document", f"{document}a rose")
        same(model, "a rose", "passage", f"{document}a rose")
        assert {"query", "document"} <= set(prompt_names(model))


def test_an_unknown_model_has_no_named_prompts(tmp_path: Path) -> None:
    with opened(model_folders.bert(tmp_path / "m")) as model:
        assert prompt_names(model) == []
        with pytest.raises(
            ValueError, match=r"no prompts of queries and documents are known for bert: m\.gguf"
        ):
            model.embed(["a"], instruction="query")
        same(model, "a rose", "find: ", "find: a rose")


def test_prompts_of_a_folder_are_stored_in_the_file(tmp_path: Path) -> None:
    prompts = {"query": "find: ", "passage": "text: ", "Clustering": "group: ", "unused": None}
    with opened(stated(tmp_path, prompts=prompts), "e5-small") as model:
        assert model.engine.gguf.metadata["metal_prefill.prompts.query"] == "find: "
        assert prompt_names(model) == ["Clustering", "document", "passage", "query"]
        same(model, "a rose", "query", "find: a rose")
        same(model, "a rose", "document", "text: a rose")
        same(model, "a rose", "Clustering", "group: a rose")


@pytest.mark.parametrize(("name", "known"), [("m", "none"), ("e5-small", "'document', 'query'")])
def test_a_misspelled_name_of_a_prompt_is_refused(tmp_path: Path, name: str, known: str) -> None:
    with opened(model_folders.bert(tmp_path / "m"), name) as model:
        for word in ("qeury", "doc-ument"):
            with pytest.raises(
                ValueError, match=rf"instruction '{word}' is not a prompt of m\.gguf.*: {known}\."
            ):
                model.embed(["a"], instruction=word)
        same(model, "a rose", "qeury {text}", "qeury a rose")
        same(model, "a", "为这个句子生成表示", "为这个句子生成表示a")


def test_the_default_prompt_of_a_folder_is_that_without_an_instruction(tmp_path: Path) -> None:
    settings = {"prompts": {"query": "find: "}, "default_prompt_name": "query"}
    with opened(stated(tmp_path, **settings)) as model:
        same(model, "a rose", None, "find: a rose")
        same(model, "a rose", "document", "a rose")
        same(model, "a rose", "{text}", "a rose")


def test_control_tokens_in_prompts_of_the_file_are_encoded(tmp_path: Path) -> None:
    with opened(stated(tmp_path, prompts={"query": "[MASK] "})) as model:
        ids = model.tokenizer.encode("a rose", add_bos=False)
        special = model.tokenizer.frame.text([model.tokenizer.mask_id or 0, *ids])
        states = model.embed(["a rose"], pooling="none", instruction="query")[0]
        assert len(states) == len(special)
        # In a text, or in a prompt of the caller, the same letters can be text.
        spelled = model.embed(
            ["a rose"], pooling="none", instruction="[MASK] {text}", split_special_tokens=True
        )[0]
        split = model.embed(["[MASK] a rose"], pooling="none", split_special_tokens=True)[0]
        assert len(spelled) == len(split) > len(special)
        states = model.embed(["a [MASK]"], pooling="none", instruction="query", split_special_tokens=True)[0]
        ids = model.tokenizer.encode("a [MASK]", add_bos=False)
        assert len(states) == len(model.tokenizer.frame.text([model.tokenizer.mask_id or 0, *ids]))


def test_a_text_continues_the_word_before_it(tmp_path: Path) -> None:
    with opened(stated(tmp_path, prompts={"query": "[MASK] a ro"})) as model:
        states = model.embed(["se"], pooling="none", instruction="query", split_special_tokens=True)[0]
        np.testing.assert_array_equal(states, model.embed(["[MASK] a rose"], pooling="none")[0])


def test_prefixes_of_pylate_are_prompts(tmp_path: Path) -> None:
    settings = {"query_prefix": "[Q] ", "document_prefix": "[D] ", "prompts": {"query": "[Q] find: "}}
    with opened(stated(tmp_path, **settings)) as model:
        metadata = model.engine.gguf.metadata
        assert metadata["metal_prefill.prompts.query"] == "[Q] find: "
        assert metadata["metal_prefill.prompts.document"] == "[D] "
        skipped = metadata["metal_prefill.skipped_tokens"]
        assert isinstance(skipped, np.ndarray)
        assert {model.tokenizer.token(int(i)) for i in skipped} >= {"▁.", "▁,", "▁!"}
