"""Model folders for tasks, and texts on which they are compared with their own libraries.

The tool that records results of transformers and sentence-transformers, and the tests that compare with them,
share these definitions.
"""

import json
from collections.abc import Callable, Mapping
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from metal_prefill.synth._tokenizer import gpt2_vocabulary
from support import encoder_folders, model_folders
from support.bert_relatives import gte
from support.model_folders import CONTEXT, DIM, FFN, HEADS, IDENTITY, Folder, values
from support.places import DATA

RECORD = DATA / "transformers_tasks.json"

QUERY = "who is the king?"
LONG_QUERY = "who is the king, and who was the queen?"
LONG_DOCUMENT = "He is the king, and she was the queen. Long may they live!"
DOCUMENTS = ["The king is dead.", "A rose, by any other name", "", "Long live the King! Éa", "x"]
PAIRS = [("The king is dead.", "He lives"), ("a", "b c d"), ("", "The end")]
TEXTS = ["Angela met the Queen in Rome.", "nothing", "Île-de-Ré, São  Paulo and I", "a b"]
ACTIVE = 20  # values of vectors over the vocabulary that are recorded
STRATEGIES = ("none", "simple", "first", "average", "max")
TAGS = ("B-PER", "O", "I-PER", "B-LOC", "I-LOC")

MODERN_VOCAB = 360
MODERN_SPECIAL = ("[CLS]", "[SEP]", "[PAD]", "[MASK]", "[UNK]")


def _labels(names: tuple[str, ...]) -> dict[str, str]:
    return {str(i): name for i, name in enumerate(names)}


def _sized(folder: Folder) -> Folder:
    """Scale norms and matrices, so that attention and heads have an effect and results differ."""
    for name, array in folder.tensors.items():
        if array.ndim == 1 and "norm" in name.lower() and name.endswith("weight"):
            folder.tensors[name] = array + 1
        elif array.ndim == 2 and "embeddings" not in name:
            folder.tensors[name] = array * 3
        elif array.ndim == 2:
            folder.tensors[name] = array * 8
    return folder


def _with_head(folder: Folder, shapes: Mapping[str, tuple[int, ...]]) -> Folder:
    for i, (name, shape) in enumerate(shapes.items()):
        folder.tensors[name] = values(shape, 1000 + i)
    return _sized(folder)


def _bert_pairs(path: Path) -> Folder:
    folder = model_folders.bert(
        path, "BertForSequenceClassification", model_type="bert", id2label=_labels(("x",))
    )
    head = {"bert.pooler.dense.weight": (DIM, DIM), "bert.pooler.dense.bias": (DIM,)}
    return _with_head(folder, {**head, "classifier.weight": (1, DIM), "classifier.bias": (1,)})


def _electra_pairs(path: Path) -> Folder:
    folder = model_folders.bert(
        path, "ElectraForSequenceClassification", model_type="electra", id2label=_labels(("x",))
    )
    folder.config["embedding_size"] = DIM
    folder.tensors = {name.replace("bert.", "electra.", 1): tensor for name, tensor in folder.tensors.items()}
    head = {"classifier.dense.weight": (DIM, DIM), "classifier.dense.bias": (DIM,)}
    return _with_head(
        folder, {**head, "classifier.out_proj.weight": (1, DIM), "classifier.out_proj.bias": (1,)}
    )


def _electra_tags(path: Path) -> Folder:
    folder = _electra_pairs(path)
    folder.config |= {"architectures": ["ElectraForTokenClassification"], "id2label": _labels(TAGS)}
    folder.tensors = {name: t for name, t in folder.tensors.items() if not name.startswith("classifier.")}
    head = {"classifier.weight": (len(TAGS), DIM), "classifier.bias": (len(TAGS),)}
    folder.tensors |= {name: values(shape, 9) * 3 for name, shape in head.items()}
    return folder


def _gte_pairs(path: Path) -> Folder:
    folder = gte(path)
    folder.config |= {
        "architectures": ["NewForSequenceClassification"],
        "max_position_embeddings": CONTEXT,
        "id2label": _labels(("x",)),
    }
    folder.tensors = {f"new.{name}": tensor for name, tensor in folder.tensors.items()}
    head = {"new.pooler.dense.weight": (DIM, DIM), "new.pooler.dense.bias": (DIM,)}
    return _with_head(folder, {**head, "classifier.weight": (1, DIM), "classifier.bias": (1,)})


def _bert_logits(path: Path) -> Folder:
    """Return the same with an unchanged output."""
    folder = _bert_pairs(path)
    folder.config["sentence_transformers"] = {"activation_fn": IDENTITY}
    return folder


def _bert_classes(path: Path) -> Folder:
    names = ("contradiction", "entailment", "neutral")
    folder = model_folders.bert(
        path, "BertForSequenceClassification", model_type="bert", id2label=_labels(names)
    )
    head = {"bert.pooler.dense.weight": (DIM, DIM), "bert.pooler.dense.bias": (DIM,)}
    return _with_head(folder, {**head, "classifier.weight": (3, DIM), "classifier.bias": (3,)})


def _bert_topics(path: Path) -> Folder:
    """Return the same with independent labels."""
    folder = _bert_classes(path)
    folder.config["problem_type"] = "multi_label_classification"
    return folder


def _bert_tags(path: Path) -> Folder:
    folder = model_folders.bert(
        path, "BertForTokenClassification", "cased", model_type="bert", id2label=_labels(TAGS)
    )
    return _with_head(folder, {"classifier.weight": (len(TAGS), DIM), "classifier.bias": (len(TAGS),)})


def _roberta_pairs(path: Path) -> Folder:
    folder = model_folders.bert(
        path,
        "XLMRobertaForSequenceClassification",
        "unigram",
        model_type="xlm-roberta",
        id2label=_labels(("x",)),
    )
    head = {"classifier.dense.weight": (DIM, DIM), "classifier.dense.bias": (DIM,)}
    return _with_head(
        folder, {**head, "classifier.out_proj.weight": (1, DIM), "classifier.out_proj.bias": (1,)}
    )


def _roberta_tags(path: Path) -> Folder:
    folder = model_folders.bert(
        path, "XLMRobertaForTokenClassification", "unigram", model_type="xlm-roberta", id2label=_labels(TAGS)
    )
    return _with_head(folder, {"classifier.weight": (len(TAGS), DIM), "classifier.bias": (len(TAGS),)})


def _modern(path: Path, name: str, labels: tuple[str, ...], **config: Any) -> Folder:
    """Make a folder of a ModernBERT class."""
    path.mkdir(parents=True, exist_ok=True)
    _write_byte_level(path)
    settings = {
        "architectures": [name],
        "model_type": "modernbert",
        "hidden_size": DIM,
        "num_hidden_layers": 4,
        "intermediate_size": FFN,
        "num_attention_heads": HEADS,
        "max_position_embeddings": CONTEXT,
        "norm_eps": 1e-5,
        "local_attention": 8,
        "global_attn_every_n_layers": 3,
        "global_rope_theta": 160000.0,
        "local_rope_theta": 10000.0,
        "vocab_size": MODERN_VOCAB,
        **{f"{kind}_token_id": i for i, kind in enumerate(("cls", "sep", "pad"))},
        "id2label": _labels(labels),
        **config,
    }
    shapes: dict[str, tuple[int, ...]] = {
        "model.embeddings.tok_embeddings.weight": (MODERN_VOCAB, DIM),
        "model.embeddings.norm.weight": (DIM,),
        "model.final_norm.weight": (DIM,),
    }
    for layer in range(4):
        prefix = f"model.layers.{layer}."
        if layer:
            shapes[prefix + "attn_norm.weight"] = (DIM,)
        shapes |= {
            prefix + "attn.Wqkv.weight": (3 * DIM, DIM),
            prefix + "attn.Wo.weight": (DIM, DIM),
            prefix + "mlp_norm.weight": (DIM,),
            prefix + "mlp.Wi.weight": (2 * FFN, DIM),
            prefix + "mlp.Wo.weight": (DIM, FFN),
        }
    tensors = {key: values(shape, i) for i, (key, shape) in enumerate(shapes.items())}
    head = {
        "head.dense.weight": (DIM, DIM),
        "head.norm.weight": (DIM,),
        "classifier.weight": (len(labels), DIM),
        "classifier.bias": (len(labels),),
    }
    return _with_head(Folder(path, settings, tensors), head)


def _write_byte_level(path: Path) -> None:
    """Write a tokenizer of bytes and merges, as ModernBERT has."""
    vocabulary = gpt2_vocabulary(MODERN_VOCAB)
    fixed = len(vocabulary.tokens) - len(vocabulary.merges)
    # The first ids are those of the special tokens; as many merges are omitted.
    kept = [t for t, kind in zip(vocabulary.tokens[:fixed], vocabulary.types, strict=False) if kind == 1]
    merges = vocabulary.merges[: MODERN_VOCAB - len(MODERN_SPECIAL) - len(kept)]
    tokens = [*MODERN_SPECIAL, *kept, *(merge.replace(" ", "") for merge in merges)]
    ids = {token: i for i, token in enumerate(tokens)}
    special = [
        {
            "id": ids[token],
            "content": token,
            "special": True,
            **dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False),
        }
        for token in MODERN_SPECIAL
    ]
    first, last = ({"SpecialToken": {"id": token, "type_id": 0}} for token in MODERN_SPECIAL[:2])
    a, b = ({"Sequence": {"id": name, "type_id": 0}} for name in "AB")
    tokenizer = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": special,
        "normalizer": {"type": "NFC"},
        "pre_tokenizer": {
            "type": "ByteLevel",
            "add_prefix_space": False,
            "trim_offsets": True,
            "use_regex": True,
        },
        "post_processor": {
            "type": "TemplateProcessing",
            "single": [first, a, last],
            "pair": [first, a, last, b, last],
            "special_tokens": {
                token: {"id": token, "ids": [ids[token]], "tokens": [token]} for token in MODERN_SPECIAL[:2]
            },
        },
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": ids,
            "merges": [merge.split(" ") for merge in merges],
        },
    }
    (path / "tokenizer.json").write_text(json.dumps(tokenizer))
    names = {"cls": "[CLS]", "sep": "[SEP]", "pad": "[PAD]", "mask": "[MASK]", "unk": "[UNK]"}
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": CONTEXT,
        "model_input_names": ["input_ids", "attention_mask"],
        **{f"{name}_token": token for name, token in names.items()},
    }
    (path / "tokenizer_config.json").write_text(json.dumps(settings))


def late_interaction(path: Path) -> Folder:
    """Make a folder with token projection, prompts and tokens that are not compared."""
    return _projecting(_sized(model_folders.bert(path, model_type="bert")))


def _projecting(folder: Folder) -> Folder:
    kinds = (
        ("sentence_transformers.base.modules.transformer.Transformer", ""),
        ("sentence_transformers.base.modules.dense.Dense", "1_Dense"),
        (
            "sentence_transformers.multi_vector_encoder.modules.multi_vector_mask.MultiVectorMask",
            "2_MultiVectorMask",
        ),
        ("sentence_transformers.sentence_transformer.modules.normalize.Normalize", "3_Normalize"),
    )
    folder.json(
        "modules.json",
        [{"idx": i, "name": str(i), "path": place, "type": kind} for i, (kind, place) in enumerate(kinds)],
    )
    dense = {"in_features": DIM, "out_features": 16, "bias": False, "activation_function": IDENTITY}
    folder.json(
        "1_Dense/config.json",
        {**dense, "module_input_name": "token_embeddings", "module_output_name": "token_embeddings"},
    )
    save_file({"linear.weight": values((16, DIM))}, folder.path / "1_Dense" / "model.safetensors")
    folder.json(
        "2_MultiVectorMask/config.json", {"skiplist_words": list(".,!?"), "skiplist_tasks": ["document"]}
    )
    folder.json("3_Normalize/config.json", {"module_input_name": "token_embeddings"})
    folder.json(
        "config_sentence_transformers.json",
        {"model_type": "MultiVectorEncoder", "prompts": {"query": "query: ", "document": "passage: "}},
    )
    return folder


def _expanded(folder: Folder, **expansion: Any) -> Folder:
    folder.json("sentence_bert_config.json", {"query_expansion": {"token": None, **expansion}})
    return folder


def _pylate(path: Path) -> Folder:
    folder = late_interaction(path)
    kinds = (("sentence_transformers.models.Transformer", ""), ("pylate.models.Dense.Dense", "1_Dense"))
    folder.json(
        "modules.json",
        [{"idx": i, "name": str(i), "path": place, "type": kind} for i, (kind, place) in enumerate(kinds)],
    )
    folder.json(
        "config_sentence_transformers.json",
        {
            "model_type": "ColBERT",
            "query_prefix": "query: ",
            "document_prefix": "passage: ",
            "query_length": 30,
            "document_length": 38,
            "attend_to_expansion_tokens": False,
            "do_query_expansion": True,
            "skiplist_words": list(".,!?"),
        },
    )
    return folder


def stanford(path: Path, **settings: Any) -> Folder:
    """Make a checkpoint of Stanford's ColBERT: the projection is a tensor of the model."""
    folder = _sized(model_folders.bert(path, model_type="bert"))
    tokenizer = json.loads((path / "tokenizer.json").read_bytes())
    vocabulary = tokenizer["model"]["vocab"]
    vocabulary |= {f"[unused{i}]": len(vocabulary) + i for i in range(2)}
    folder.json("tokenizer.json", tokenizer)
    folder.config |= {"architectures": ["HF_ColBERT"], "vocab_size": len(vocabulary)}
    folder.tensors = {f"bert.{name}": tensor for name, tensor in folder.tensors.items()}
    words = "bert.embeddings.word_embeddings.weight"
    folder.tensors[words] = values((len(vocabulary), DIM), 7) * 8
    folder.tensors |= {
        "bert.pooler.dense.weight": values((DIM, DIM)),
        "bert.pooler.dense.bias": values((DIM,)),
        "linear.weight": values((16, DIM)),
    }
    folder.json(
        "artifact.metadata",
        {
            "query_token_id": "[unused0]",
            "doc_token_id": "[unused1]",
            "query_token": "[Q]",
            "doc_token": "[D]",
            "dim": 16,
            "similarity": "cosine",
            "mask_punctuation": True,
            "attend_to_mask_tokens": False,
            "query_maxlen": 32,
            "doc_maxlen": 180,
            "interaction": "colbert",
            **settings,
        },
    )
    return folder


def _modern_late(path: Path) -> Folder:
    """Make a ModernBERT folder whose window does not reach from the end of an expanded query to the text."""
    folder = _modern(path, "ModernBertModel", ("x",))
    del folder.config["id2label"]
    prefix = "model."
    folder.tensors = {
        name.removeprefix(prefix): tensor
        for name, tensor in folder.tensors.items()
        if name.startswith(prefix)
    }
    return _expanded(_projecting(folder), strategy="min", attend=False, length=34)


def _listed(folder: Folder, *kinds: str) -> Folder:
    """List modules of sentence-transformers, the first of which is in the folder itself."""
    package = "sentence_transformers.models"
    folder.json(
        "modules.json",
        [
            {"idx": i, "name": str(i), "path": f"{i}_{kind}" if i else "", "type": f"{package}.{kind}"}
            for i, kind in enumerate(kinds)
        ],
    )
    return folder


def _pooling(path: Path, mode: str, *after: str, **config: Any) -> Folder:
    folder = _listed(_sized(model_folders.bert(path, model_type="bert")), "Transformer", "Pooling", *after)
    folder.json(
        "1_Pooling/config.json", {"word_embedding_dimension": DIM, f"pooling_mode_{mode}": True, **config}
    )
    return folder


def _chained(path: Path) -> Folder:
    """Make a folder whose vectors are normalized before and after a LayerNorm between dense layers."""
    width = 24
    folder = _pooling(path, "mean_tokens", "Normalize", "Dense", "LayerNorm", "Dropout", "Dense", "Normalize")
    folder.json("4_LayerNorm/config.json", {"dimension": width})
    norm = {"norm.weight": values((width,), 2) + 1, "norm.bias": values((width,), 3)}
    save_file(norm, folder.path / "4_LayerNorm" / "model.safetensors")
    folder.json("5_Dropout/config.json", {"dropout": 0.5})
    for i, (rows, columns) in ((3, (width, DIM)), (6, (12, width))):
        dense = {
            "in_features": columns,
            "out_features": rows,
            "bias": False,
            "activation_function": "torch.nn.Tanh",
        }
        folder.json(f"{i}_Dense/config.json", dense)
        save_file(
            {"linear.weight": values((rows, columns)) * 10}, folder.path / f"{i}_Dense/model.safetensors"
        )
    return folder


def _without_prompt(path: Path) -> Folder:
    """Make a folder whose vectors leave out the tokens of the prompt."""
    folder = _pooling(path, "mean_tokens", include_prompt=False)
    prompts = {"prompts": {"query": "who says: "}, "default_prompt_name": "query"}
    folder.json("config_sentence_transformers.json", prompts)
    return folder


def static(path: Path, variant: str = "uncased") -> Folder:
    """Make a folder without layers: StaticEmbedding."""
    folder = _listed(model_folders.bert(path, variant=variant), "StaticEmbedding", "Normalize")
    name = "embeddings.word_embeddings.weight"
    return Folder(path, {"model_type": "model2vec"}, {"embedding.weight": folder.tensors[name]})


def _model2vec(path: Path) -> Folder:
    """Make a folder of model2vec whose tokens share rows."""
    folder = static(path)
    table = folder.tensors.pop("embedding.weight")
    rng = np.random.default_rng(1)
    folder.tensors = {"embeddings": table[:100]}
    folder.tensors["mapping"] = rng.integers(0, 100, len(table))  # type: ignore[assignment]
    folder.tensors["weights"] = rng.random(len(table))  # type: ignore[assignment]
    return folder


# Modules after the transformer, or instead of it.
MODULES: dict[str, Callable[[Path], Folder]] = {
    **{
        mode: partial(_pooling, mode=mode)
        for mode in (
            *("cls_token", "max_tokens", "mean_tokens", "mean_sqrt_len_tokens"),
            *("weightedmean_tokens", "lasttoken"),
        )
    },
    "a chain": _chained,
    "without the prompt": _without_prompt,
    "static": static,
    "static, unigram": partial(static, variant="unigram"),
    "model2vec": _model2vec,
}
# Cross-encoders with a single output, classifiers of texts or pairs, and labels of tokens.
RANKERS: dict[str, Callable[[Path], Folder]] = {
    "bert": _bert_pairs,
    "bert, output as it is": _bert_logits,
    "electra": _electra_pairs,
    "gte": _gte_pairs,
    "albert": partial(encoder_folders.pairs, name="albert"),
    "electra, projected": partial(encoder_folders.pairs, name="electra"),
    "deberta": partial(encoder_folders.pairs, name="deberta"),
    "xlm-roberta": _roberta_pairs,
    "modernbert": lambda path: _modern(
        path, "ModernBertForSequenceClassification", ("x",), classifier_pooling="mean"
    ),
    "modernbert, first token": lambda path: _modern(path, "ModernBertForSequenceClassification", ("x",)),
}
CLASSIFIERS: dict[str, Callable[[Path], Folder]] = {
    "bert": _bert_classes,
    "bert, independent labels": _bert_topics,
    "modernbert": lambda path: _modern(
        path, "ModernBertForSequenceClassification", ("low", "middle", "high"), classifier_pooling="mean"
    ),
}
TAGGERS: dict[str, Callable[[Path], Folder]] = {
    "bert": _bert_tags,
    "electra": _electra_tags,
    "deberta": partial(encoder_folders.tags, labels=TAGS),
    "xlm-roberta": _roberta_tags,
    "modernbert": lambda path: _modern(path, "ModernBertForTokenClassification", TAGS),
}
# Late interaction, by how queries are expanded.
LATE: dict[str, Callable[[Path], Folder]] = {
    "as they are": late_interaction,
    "unseen": lambda path: _expanded(late_interaction(path), strategy="min", attend=False, length=32),
    "seen, fixed": lambda path: _expanded(late_interaction(path), strategy="fixed", attend=True, length=32),
    "PyLate": _pylate,
    "modernbert": _modern_late,
}


@cache
def recorded() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(RECORD.read_text(encoding="utf-8"))
    return found


def rounded(array: Any) -> Any:
    """Return numbers with the digits that float32 has."""
    return np.vectorize(lambda x: float(f"{x:.8g}"))(np.asarray(array, np.float64)).tolist()
