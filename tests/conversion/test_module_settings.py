"""Settings of the modules of sentence-transformers: a model follows each of them, or it is refused."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.encoder_tasks import opened
from support.folders import model_folders, task_folders
from support.folders.model_folders import CONTEXT, IDENTITY, Folder, read
from support.folders.task_folders import DOCUMENTS, QUERY
from support.kernels.float64 import sigmoid, softmax

from metal_prefill import ContextOverflowError
from metal_prefill.conversion import convert

SETTINGS = "config_sentence_transformers.json"


def bert(path: Path) -> Folder:
    return model_folders.bert(path).pool(dense=16)


def test_settings_without_an_effect_are_accepted(tmp_path: Path) -> None:
    folder = bert(tmp_path / "m")
    folder.json(
        "sentence_bert_config.json",
        {
            "do_lower_case": True,  # as the tokenizer does
            "transformer_task": "feature-extraction",
            "module_output_name": "token_embeddings",
            "model_args": {"trust_remote_code": True},
        },
    )
    folder.merge("2_Dense/config.json", use_residual=False, module_input_name="sentence_embedding")
    convert(folder.write(), tmp_path / "m.gguf")


@pytest.mark.parametrize("listed", [True, False])
def test_the_activation_of_a_listed_module_is_followed(tmp_path: Path, listed: bool) -> None:
    folder = task_folders.RANKERS["bert"](tmp_path / "m")
    if listed:
        folder.modules({"": "Transformer"})
    folder.json(SETTINGS, {"model_type": "CrossEncoder", "activation_fn": IDENTITY})
    with opened(folder.write()) as model:
        scores = [item.score for item in model.rerank(QUERY, DOCUMENTS)]
    with opened(task_folders.RANKERS["bert, output as it is"](tmp_path / "n").write()) as model:
        outputs = np.array([item.score for item in model.rerank(QUERY, DOCUMENTS)])
    expected = outputs if listed else sigmoid(outputs)
    np.testing.assert_allclose(scores, expected, rtol=1e-5)


@pytest.mark.parametrize("activation", ["Identity", "Sigmoid"])
def test_several_classes_have_the_activation_of_their_folder(tmp_path: Path, activation: str) -> None:
    folder = task_folders.CLASSIFIERS["bert"](tmp_path / "m")
    folder.json(SETTINGS, {"activation_fn": f"torch.nn.modules.activation.{activation}"})
    folder.modules({"": "Transformer"})
    with opened(folder.write()) as model:
        found = model.classify(DOCUMENTS)
    logits = found.log_likelihoods
    expected = (sigmoid if activation == "Sigmoid" else softmax)(logits)
    assert logits.shape[1] > 1
    np.testing.assert_allclose(found.probabilities, expected, rtol=1e-5)


def test_control_tokens_and_parts_of_words_are_left_out(tmp_path: Path) -> None:
    folder = task_folders.late_interaction(tmp_path / "m")
    folder.merge("2_MultiVectorMask/config.json", skiplist_words=["[SEP]", "##e", "the", "nothing like it"])
    fields, _ = read(convert(folder.write(), tmp_path / "m.gguf"))
    ids = folder.loaded("tokenizer.json")["model"]["vocab"]
    assert list(fields["metal_prefill.skipped_tokens"]) == [
        ids[word] for word in ("[SEP]", "##e", "the") if word in ids
    ]


@pytest.mark.parametrize("inputs", [["input_ids", "attention_mask"], ["input_ids", "token_type_ids"]])
def test_pairs_have_types_if_the_tokenizer_gives_them(tmp_path: Path, inputs: list[str]) -> None:
    folder = task_folders.RANKERS["bert"](tmp_path / "m")
    folder.merge("tokenizer_config.json", model_input_names=inputs)
    types = folder.tensors["bert.embeddings.token_type_embeddings.weight"]
    with opened(folder.write()) as model:
        made = model.tokenizer.frame.pair([5], [6])
        scores = [item.score for item in model.rerank(QUERY, DOCUMENTS)]
    assert set(made.types) == ({0, 1} if "token_type_ids" in inputs else {0})
    types[1] = types[0]  # all tokens have the first type
    folder.merge("tokenizer_config.json", model_input_names=["input_ids", "token_type_ids"])
    with opened(folder.write()) as model:
        expected = [item.score for item in model.rerank(QUERY, DOCUMENTS)]
    assert np.allclose(scores, expected, rtol=1e-5) == ("token_type_ids" not in inputs)


@pytest.mark.parametrize(
    ("module", "tokenizer", "limit"),
    [
        ({"max_seq_length": 20}, {"model_max_length": 30}, 20),
        ({"max_seq_length": None}, {"model_max_length": 30}, 30),
        ({}, {"model_max_length": int(1e30)}, CONTEXT),
        ({"max_seq_length": 4 * CONTEXT}, {"model_max_length": 30}, CONTEXT),
        ({"query_length": 12, "document_length": CONTEXT}, {"model_max_length": 20}, 20),
    ],
)
def test_texts_are_as_long_as_in_sentence_transformers(
    tmp_path: Path, module: dict[str, Any], tokenizer: dict[str, Any], limit: int
) -> None:
    folder = bert(tmp_path / "m")
    folder.json("sentence_bert_config.json", module)
    folder.merge("tokenizer_config.json", **tokenizer)
    folder.json(SETTINGS, {"prompts": {"query": "", "document": ""}})
    path = convert(folder.write(), tmp_path / "m.gguf")
    limits = {None: limit, "query": module.get("query_length", limit)}
    limits["document"] = module.get("document_length", limit)
    with opened(path) as model, opened(path, max_context=CONTEXT) as whole:
        for instruction, most in limits.items():
            text = "x " * (most - 2)  # with a token at both ends
            (vector,) = model.embed([text], instruction=instruction)
            np.testing.assert_array_equal(vector, whole.embed([text])[0])
            with pytest.raises(ContextOverflowError, match=rf"text 0: {most + 1} tokens exceed the .*{most}"):
                model.embed([text + "x"], instruction=instruction)
            with pytest.warns(UserWarning, match=f"of {most} tokens and lost their ends"):
                cut = model.embed([text + "x " * 9], instruction=instruction, truncate="end")
            np.testing.assert_array_equal(cut[0], vector)


def test_pairs_are_as_long_as_in_sentence_transformers(tmp_path: Path) -> None:
    folder = task_folders.RANKERS["bert"](tmp_path / "m")
    folder.merge("tokenizer_config.json", model_max_length=20)
    path = convert(folder.write(), tmp_path / "m.gguf")
    with opened(path) as model, opened(path, max_context=CONTEXT) as whole:
        with pytest.raises(ContextOverflowError, match=r"document 0: \d+ tokens exceed the context of 20"):
            model.rerank("x", ["x " * 18])
        with pytest.warns(UserWarning, match="the context of 20 tokens and lost their ends"):
            (cut,) = model.rerank("x", ["x " * 18], truncate="end")
        (short,) = whole.rerank("x", ["x " * 16])  # with the query and three tokens around both
        assert cut.score == short.score != whole.rerank("x", ["x " * 18])[0].score


def test_empty_prompts_take_precedence_over_those_of_a_card(tmp_path: Path) -> None:
    folder = bert(tmp_path / "e5-small")
    with opened(folder.write()) as model:
        text, query = model.embed(["x"])[0], model.embed(["x"], instruction="query")[0]
        assert not np.array_equal(text, query)
    folder.json(SETTINGS, {"prompts": {"query": "", "document": ""}})
    with opened(folder.write()) as model:
        np.testing.assert_array_equal(model.embed(["x"], instruction="query")[0], text)


def test_texts_of_a_decoder_are_as_long_as_its_context(tmp_path: Path) -> None:
    folder = model_folders.llama(tmp_path / "m")
    folder.merge("tokenizer_config.json", model_max_length=16)
    fields, _ = read(convert(folder.write(), tmp_path / "m.gguf"))
    assert not any(key.startswith("metal_prefill.max_tokens") for key in fields)
