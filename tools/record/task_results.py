"""Record results of transformers and sentence-transformers.

They cover ranks, classes, labels of tokens, late interaction, all-MiniLM-L6-v2, and documented uses.
Run it when a folder or a text of `task_folders`, `minilm_texts` or `documented_uses` of ``tests/support``
changes.
"""

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import sentence_transformers
import sentence_transformers.util
import torch
import transformers
from record import Records, written
from sentence_transformers import CrossEncoder, SentenceTransformer, SparseEncoder
from sentence_transformers.multi_vector_encoder import MultiVectorEncoder
from support import documented_uses, minilm_texts
from support.folders import encoder_folders, task_folders
from support.folders.model_folders import CONTEXT
from support.folders.task_folders import (
    CLASSIFIERS,
    DOCUMENTS,
    LATE,
    LONG_DOCUMENT,
    LONG_QUERY,
    MODULES,
    PAIRS,
    QUERY,
    RANKERS,
    STRATEGIES,
    TAGGERS,
    TEXTS,
)

from metal_prefill.hub import resolve_model


def ranks(folder: Path) -> list[float]:
    """Return the score of the query with each document."""
    model = CrossEncoder(str(folder), device="cpu", max_length=CONTEXT)
    return task_folders.rounded(model.predict([(QUERY, text) for text in DOCUMENTS]))


def classes(folder: Path) -> dict[str, Any]:
    """Return logits of texts, and of pairs."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModelForSequenceClassification.from_pretrained(folder).float().eval()
    found: dict[str, Any] = {}
    for name, inputs in (("texts", [(text, None) for text in TEXTS]), ("pairs", PAIRS)):
        with torch.inference_mode():
            logits = torch.cat([model(**tokenizer(*pair, return_tensors="pt")).logits for pair in inputs])
        found[name] = task_folders.rounded(logits)
    return found


def labels(folder: Path) -> dict[str, Any]:
    """Return label, score, start and end of the entities of each text, by strategy."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModelForTokenClassification.from_pretrained(folder).float().eval()
    found: dict[str, Any] = {}
    for strategy in STRATEGIES:
        pipeline = transformers.pipeline(
            "token-classification", model=model, tokenizer=tokenizer, aggregation_strategy=strategy
        )
        kind = "entity" if strategy == "none" else "entity_group"
        found[strategy] = [
            [[e[kind], task_folders.rounded(e["score"]), e["start"], e["end"]] for e in pipeline(text)]
            for text in TEXTS
        ]
    return found


def late(folder: Path) -> dict[str, Any]:
    """Return scores, and the vectors of two queries, the first document and a long one."""
    model = MultiVectorEncoder(str(folder), device="cpu")
    documents = [text for text in DOCUMENTS if text]
    query, long = (np.asarray(model.encode_query(text)) for text in (QUERY, LONG_QUERY))
    *vectors, long_document = (
        np.asarray(rows) for rows in model.encode_document([*documents, LONG_DOCUMENT])
    )
    return {
        "query": query,
        "long_query": long,
        "document": vectors[0],
        "long_document": long_document,
        "scores": np.array([(query @ rows.T).max(axis=1).sum() for rows in vectors]),
    }


def sparse(folder: Path) -> dict[str, list[Any]]:
    """Return ids and weights of the largest values of texts, as queries and as documents."""
    model = SparseEncoder(str(folder), device="cpu")
    encoders = {"query": model.encode_query, "document": model.encode_document}
    found: dict[str, list[Any]] = {}
    for name, encode in encoders.items():
        rows = np.asarray(encode(TEXTS, convert_to_sparse_tensor=False, max_active_dims=task_folders.ACTIVE))
        found[name] = [[row.nonzero()[0].tolist(), task_folders.rounded(row[row.nonzero()])] for row in rows]
    return found


def vectors(folder: Path) -> Any:
    """Return the vectors of texts."""
    return SentenceTransformer(str(folder), device="cpu").encode(TEXTS)


def minilm() -> dict[str, Any]:
    """Return the normalized mean of the states of each text, and the vector of the truncated last one."""
    folder = resolve_model("minilm")
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModel.from_pretrained(folder, dtype=torch.float64).eval()
    found = []
    for text in minilm_texts.TEXTS:
        ids = tokenizer(text, return_tensors="pt", padding=False, truncation=True, max_length=512)
        with torch.no_grad():
            pooled = model(**ids).last_hidden_state[0].mean(dim=0)
        found.append((pooled / pooled.norm()).numpy())
    cut = SentenceTransformer(str(folder), device="cpu").encode(minilm_texts.TEXTS[-1])
    return {"vectors": np.array(found, np.float32), "cut": cut}


def uses() -> dict[str, Any]:
    """Return the results of documented uses."""
    made = {
        "pairs": RANKERS["bert"],
        "classes": CLASSIFIERS["bert"],
        "late": LATE["as they are"],
    }
    with tempfile.TemporaryDirectory() as name:
        folders = {key: str(make(Path(name) / key).write()) for key, make in made.items()}
        paths = documented_uses.Paths(str(resolve_model("minilm")), **folders)
        return {
            topic: documented_uses.plain(use(sentence_transformers, paths))
            for topic, use in documented_uses.USES.items()
        }


def records() -> Records:
    """Yield everything."""
    yield minilm_texts.VECTORS, minilm()
    yield documented_uses.DATA, uses()
    kinds: dict[str, tuple[Callable[[Path], Any], Any]] = {
        "ranks": (ranks, RANKERS),
        "classes": (classes, CLASSIFIERS),
        "labels": (labels, TAGGERS),
    }
    record: dict[str, Any] = {
        kind: {name: compute(folder) for name, folder in written(folders)}
        for kind, (compute, folders) in kinds.items()
    }
    for name, folder in written({"sparse": encoder_folders.routed}):
        record[name] = sparse(folder)
    yield task_folders.RECORD, record
    arrays = {name: vectors(folder) for name, folder in written(MODULES)}
    for name, folder in written(LATE):
        arrays |= {f"{name}/{key}": array for key, array in late(folder).items()}
    yield task_folders.VECTORS, arrays
