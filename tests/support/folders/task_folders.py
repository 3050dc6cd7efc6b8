"""Model folders for tasks, and texts for comparisons with transformers and sentence-transformers.

The tool that records their results and the tests that compare with them share these definitions.
"""

import json
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from metal_prefill.synth._tokenizer import gpt2_vocabulary
from support.folders import encoder_folders
from support.folders.model_folders import (
    CONTEXT,
    DIM,
    FFN,
    HEADS,
    IDENTITY,
    Folder,
    Shapes,
    Values,
    bert,
    linear,
    llama,
    values,
    weights,
)
from support.folders.torch_files import write_torch_file
from support.places import DATA

RECORD, VECTORS = DATA / "transformers_tasks.json", DATA / "sentence_transformers_vectors.npz"

QUERY = "who is the king?"
LONG_QUERY = "who is the king, and who was the queen?"
LONG_DOCUMENT = "He is the king, and she was the queen. Long may they live!"
DOCUMENTS = ["The king is dead.", "A rose, by any other name", "", "Long live the King! Éa", "x"]
PAIRS = [("The king is dead.", "He lives"), ("a", "b c d"), ("", "The end")]
TEXTS = ["Angela met the Queen in Rome.", "nothing", "Île-de-Ré, São  Paulo and I", "a b"]
ACTIVE = 20  # recorded values of vectors over the vocabulary
STRATEGIES = ("none", "simple", "first", "average", "max")
TAGS = ("B-PER", "O", "I-PER", "B-LOC", "I-LOC")

MODERN_VOCAB = 360
MODERN_SPECIAL = ("[CLS]", "[SEP]", "[PAD]", "[MASK]", "[UNK]")


def _labels(names: tuple[str, ...]) -> dict[str, str]:
    return {str(i): name for i, name in enumerate(names)}


def _sized(folder: Folder) -> Folder:
    """Scale norms and matrices so that attention and heads affect results."""
    for name, array in folder.tensors.items():
        if array.ndim == 1 and "norm" in name.lower() and name.endswith("weight"):
            folder.tensors[name] = array + 1
        elif array.ndim == 2 and "embeddings" not in name:
            folder.tensors[name] = array * 3
        elif array.ndim == 2:
            folder.tensors[name] = array * 8
    return folder


def _headed(
    folder: Folder, *layers: str, output: str = "classifier", labels: tuple[str, ...] = ("x",)
) -> Folder:
    """Add a head: layers as wide as the states, and an output for each label."""
    shapes: Shapes = {}
    for layer in layers:
        shapes |= linear(layer)
    folder.config["id2label"] = _labels(labels)
    return _sized(folder.add(shapes | linear(output, len(labels)), 1000))


def _bert(path: Path, name: str = "Model", variant: str = "uncased") -> Folder:
    return bert(path, f"Bert{name}", variant, model_type="bert")


def _bert_texts(path: Path, labels: tuple[str, ...] = ("x",), **config: Any) -> Folder:
    folder = _headed(_bert(path, "ForSequenceClassification"), "bert.pooler.dense", labels=labels)
    folder.config |= config
    return folder


def _electra_pairs(path: Path) -> Folder:
    folder = bert(path, "ElectraForSequenceClassification", model_type="electra", embedding_size=DIM)
    folder.tensors = {name.replace("bert.", "electra.", 1): tensor for name, tensor in folder.tensors.items()}
    return _headed(folder, "classifier.dense", output="classifier.out_proj")


def _electra_tags(path: Path) -> Folder:
    folder = _electra_pairs(path)
    folder.config |= {"architectures": ["ElectraForTokenClassification"], "id2label": _labels(TAGS)}
    folder.tensors = {name: t for name, t in folder.tensors.items() if not name.startswith("classifier.")}
    for name, shape in linear("classifier", len(TAGS)).items():
        folder.add({name: shape}, 9, size=3)
    return folder


def _roberta(path: Path, task: str) -> Folder:
    return bert(path, f"XLMRobertaFor{task}Classification", "unigram", model_type="xlm-roberta")


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
    outside: Shapes = {"embeddings.tok_embeddings": (MODERN_VOCAB, DIM), "embeddings.norm": (DIM,)}
    shapes = weights("model.", {**outside, "final_norm": (DIM,)})
    layer: Shapes = {"attn.Wqkv": (3 * DIM, DIM), "attn.Wo": (DIM, DIM), "mlp_norm": (DIM,)}
    layer |= {"mlp.Wi": (2 * FFN, DIM), "mlp.Wo": (DIM, FFN)}
    for i in range(4):
        shapes |= weights(f"model.layers.{i}.", {"attn_norm": (DIM,), **layer} if i else layer)
    head: Shapes = {"head.dense.weight": (DIM, DIM), "head.norm.weight": (DIM,)}
    folder = Folder(path, settings, {}).add(shapes).add(head | linear("classifier", len(labels)), 1000)
    return _sized(folder)


def modern_body(path: Path, **config: Any) -> Folder:
    """Make a folder of a ModernBERT without a head."""
    folder, prefix = _modern(path, "ModernBertModel", ("x",), **config), "model."
    del folder.config["id2label"]
    folder.tensors = {n.removeprefix(prefix): t for n, t in folder.tensors.items() if n.startswith(prefix)}
    return folder


def _write_byte_level(path: Path) -> None:
    """Write a tokenizer of bytes and merges, as in ModernBERT."""
    vocabulary = gpt2_vocabulary(MODERN_VOCAB)
    fixed = len(vocabulary.tokens) - len(vocabulary.merges)
    # Special tokens have the first ids; as many merges are omitted.
    kept = [t for t, kind in zip(vocabulary.tokens[:fixed], vocabulary.types, strict=False) if kind == 1]
    merges = vocabulary.merges[: MODERN_VOCAB - len(MODERN_SPECIAL) - len(kept)]
    tokens = [*MODERN_SPECIAL, *kept, *(merge.replace(" ", "") for merge in merges)]
    ids = {token: i for i, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(ids, [(left, right) for left, right in map(str.split, merges)]))
    tokenizer.add_special_tokens(list(MODERN_SPECIAL))
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:0 [SEP]:0",
        special_tokens=[("[CLS]", 0), ("[SEP]", 1)],
    )
    tokenizer.save(str(path / "tokenizer.json"))
    names = {"cls": "[CLS]", "sep": "[SEP]", "pad": "[PAD]", "mask": "[MASK]", "unk": "[UNK]"}
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": CONTEXT,
        "model_input_names": ["input_ids", "attention_mask"],
        **{f"{name}_token": token for name, token in names.items()},
    }
    (path / "tokenizer_config.json").write_text(json.dumps(settings))


def late_interaction(path: Path) -> Folder:
    """Make a folder with a token projection, prompts and excluded tokens."""
    return _projecting(_sized(_bert(path)))


def _projecting(folder: Folder) -> Folder:
    places = {
        "": "base.modules.transformer.Transformer",
        "1_Dense": "base.modules.dense.Dense",
        "2_MultiVectorMask": "multi_vector_encoder.modules.multi_vector_mask.MultiVectorMask",
        "3_Normalize": "sentence_transformer.modules.normalize.Normalize",
    }
    tokens: dict[str, Any] = {"module_input_name": "token_embeddings"}
    folder.modules(places, "sentence_transformers.")
    folder.dense("1_Dense", 16, DIM, **tokens, module_output_name="token_embeddings")
    skipped = {"skiplist_words": list(".,!?"), "skiplist_tasks": ["document"]}
    folder.json("2_MultiVectorMask/config.json", skipped)
    folder.json("3_Normalize/config.json", tokens)
    prompts = {"query": "query: ", "document": "passage: "}
    folder.json("config_sentence_transformers.json", {"model_type": "MultiVectorEncoder", "prompts": prompts})
    return folder


# Heads for weights and for vectors of tokens.
SPARSE = {"weight": values((1, DIM), 1) * 5, "bias": values((1,), 2) + 1}
COLBERT = {"weight": values((24, DIM), 3), "bias": values((24,), 4)}


def hybrid(path: Path) -> Folder:
    """Make a folder in the form of bge-m3, with heads saved by torch."""
    folder = bert(path, "XLMRobertaModel", "unigram").pool("cls_token")
    write_torch_file(path / "sparse_linear.pt", SPARSE)
    write_torch_file(path / "colbert_linear.pt", COLBERT)
    return folder


def _expanded(folder: Folder, **expansion: Any) -> Folder:
    folder.json("sentence_bert_config.json", {"query_expansion": {"token": None, **expansion}})
    return folder


def _pylate(path: Path) -> Folder:
    folder = late_interaction(path)
    folder.modules(
        {"": "sentence_transformers.models.Transformer", "1_Dense": "pylate.models.Dense.Dense"}, ""
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
    folder = _sized(_bert(path))
    tokenizer = folder.loaded("tokenizer.json")
    vocabulary = tokenizer["model"]["vocab"]
    vocabulary |= {f"[unused{i}]": len(vocabulary) + i for i in range(2)}
    folder.json("tokenizer.json", tokenizer)
    folder.config |= {"architectures": ["HF_ColBERT"], "vocab_size": len(vocabulary)}
    folder.tensors = {f"bert.{name}": tensor for name, tensor in folder.tensors.items()}
    words = "bert.embeddings.word_embeddings.weight"
    folder.tensors[words] = values((len(vocabulary), DIM), 7) * 8
    for name, shape in {**linear("bert.pooler.dense"), "linear.weight": (16, DIM)}.items():
        folder.add({name: shape})
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
    """Make a ModernBERT folder with a window that excludes the text at the end of an expanded query."""
    return _expanded(_projecting(modern_body(path)), strategy="min", attend=False, length=34)


def _listed(folder: Folder, *kinds: str) -> Folder:
    """List modules of sentence-transformers, the first of which is in the folder itself."""
    return folder.modules({f"{i}_{kind}" if i else "": kind for i, kind in enumerate(kinds)})


def _pooling(path: Path, mode: str, *after: str, **config: Any) -> Folder:
    folder = _listed(_sized(_bert(path)), "Transformer", "Pooling", *after)
    folder.json(
        "1_Pooling/config.json", {"word_embedding_dimension": DIM, f"pooling_mode_{mode}": True, **config}
    )
    return folder


def _chained(path: Path) -> Folder:
    """Make a folder whose vectors are normalized before and after a LayerNorm between dense layers."""
    width, tanh = 24, "torch.nn.Tanh"
    folder = _pooling(path, "mean_tokens", "Normalize", "Dense", "LayerNorm", "Dropout", "Dense", "Normalize")
    folder.json("4_LayerNorm/config.json", {"dimension": width})
    norm = {"norm.weight": values((width,), 2) + 1, "norm.bias": values((width,), 3)}
    save_file(norm, folder.path / "4_LayerNorm" / "model.safetensors")
    folder.json("5_Dropout/config.json", {"dropout": 0.5})
    folder.dense("3_Dense", width, DIM, size=10, activation_function=tanh)
    return folder.dense("6_Dense", 12, width, size=10, activation_function=tanh)


def _without_prompt(path: Path) -> Folder:
    """Make a folder whose vectors exclude the tokens of the prompt."""
    folder = _pooling(path, "mean_tokens", include_prompt=False)
    prompts = {"prompts": {"query": "who says: "}, "default_prompt_name": "query"}
    folder.json("config_sentence_transformers.json", prompts)
    return folder


def static(path: Path, variant: str = "uncased") -> Folder:
    """Make a folder without layers: StaticEmbedding."""
    folder = _listed(bert(path, variant=variant), "StaticEmbedding", "Normalize")
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


PAIR_TEMPLATE = (
    "{% for m in messages if m.role == 'system' %}<s>{{ m.content }}</s>{% endfor %}"
    "Query: {{ messages | selectattr('role', 'eq', 'query') | map(attribute='content') | first }}\n"
    "Document: {{ (messages | selectattr('role', 'eq', 'document') | first).content }}"
    "{% if add_generation_prompt %} Relevant?{% endif %}"
)


def generative(path: Path, template: str = PAIR_TEMPLATE, **scores: int) -> Folder:
    """Make a generative reranker as CrossEncoder of sentence-transformers saves it."""
    made = llama(path)
    kinds = {"": "base.modules.transformer.Transformer", "1": "cross_encoder.modules.logit_score.LogitScore"}
    made.modules(kinds, "sentence_transformers.")
    kwargs = {"chat_template": {"add_generation_prompt": True}}
    made.json(
        "sentence_bert_config.json", {"transformer_task": "text-generation", "processing_kwargs": kwargs}
    )
    prompts = {"prompts": {"web": "Judge."}, "default_prompt_name": "web"}
    made.json("config_sentence_transformers.json", prompts)
    tokenizer = made.loaded("tokenizer.json")
    ids = tokenizer["model"]["vocab"]
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized", "special"), False)
    if "yes" not in ids:
        tokenizer["added_tokens"].append({"id": 300, "content": "yes", **flags})
    made.json("tokenizer.json", tokenizer)
    answers = {"true_token_id": ids.get("yes", 300), "false_token_id": ids["no"]}
    made.json("1/config.json", {**answers, **scores})
    (path / "chat_template.jinja").write_text(template)
    return made


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
# Cross-encoders with a single output, classifiers of texts or pairs, and token classifiers.
_MODERN = partial(_modern, name="ModernBertForSequenceClassification", labels=("x",))
_CLASSES = ("contradiction", "entailment", "neutral")
RANKERS: dict[str, Callable[[Path], Folder]] = {
    "bert": _bert_texts,
    "bert, output as it is": partial(_bert_texts, sentence_transformers={"activation_fn": IDENTITY}),
    "electra": _electra_pairs,
    "gte": partial(encoder_folders.folder, name="gte, pairs"),
    "albert": partial(encoder_folders.folder, name="albert, pairs"),
    "electra, projected": partial(encoder_folders.folder, name="electra, pairs"),
    "deberta": partial(encoder_folders.folder, name="deberta, pairs"),
    "xlm-roberta": lambda path: _headed(
        _roberta(path, "Sequence"), "classifier.dense", output="classifier.out_proj"
    ),
    "modernbert": partial(_MODERN, classifier_pooling="mean"),
    "modernbert, first token": _MODERN,
}
CLASSIFIERS: dict[str, Callable[[Path], Folder]] = {
    "distilbert": partial(encoder_folders.folder, name="distilbert, classes"),
    "bert": partial(_bert_texts, labels=_CLASSES),
    "bert, independent labels": partial(
        _bert_texts, labels=_CLASSES, problem_type="multi_label_classification"
    ),
    "modernbert": partial(_MODERN, labels=("low", "middle", "high"), classifier_pooling="mean"),
}
TAGGERS: dict[str, Callable[[Path], Folder]] = {
    "bert": lambda path: _headed(_bert(path, "ForTokenClassification", "cased"), labels=TAGS),
    "electra": _electra_tags,
    "deberta": partial(encoder_folders.folder, name="deberta, tags"),
    "xlm-roberta": lambda path: _headed(_roberta(path, "Token"), labels=TAGS),
    "modernbert": partial(_modern, name="ModernBertForTokenClassification", labels=TAGS),
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
    return json.loads(RECORD.read_text(encoding="utf-8"))


@cache
def recorded_vectors() -> dict[str, Values]:
    with np.load(VECTORS) as arrays:
        return dict(arrays)


def rounded(array: Any) -> Any:
    """Return numbers with the precision of float32."""
    return np.vectorize(lambda x: float(f"{x:.8g}"))(np.asarray(array, np.float64)).tolist()
