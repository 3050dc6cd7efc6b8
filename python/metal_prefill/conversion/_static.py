"""Models without layers, whose vector of a text is the mean of a table's rows: StaticEmbedding, model2vec."""

from collections.abc import Mapping
from functools import partial
from pathlib import Path

from metal_prefill.conversion._body import STATIC, modules_of
from metal_prefill.conversion._fields import Fields
from metal_prefill.conversion._weights import FILE, FloatArray, Index, Weight, read_weights
from metal_prefill.errors import GGUFError
from metal_prefill.files._metadata_keys import LENGTH_KEYS

CLASS = "StaticModel"  # of model2vec
_TABLE = "embedding.weight"


def static_configuration(folder: Path, body: Path) -> Fields | None:
    """Return what ``config.json`` would contain for a table; None if a folder has no such model."""
    stated = Fields.read_if_present(body / "config.json")
    listed = modules_of(folder) if (folder / "modules.json").is_file() else []
    kinds = [module.string("type").rpartition(".")[2] for module in listed]
    if kinds[:1] != [STATIC] and (kinds or stated.values.get("model_type") != "model2vec"):
        return None
    weight = table(read_weights(body))[_TABLE]
    if len(weight.shape) != 2:
        raise GGUFError(f"{weight.file}: tensor {weight.name} has shape {weight.shape}, expected a matrix")
    values = {"architectures": [CLASS], "vocab_size": weight.shape[0], "hidden_size": weight.shape[1]}
    return Fields(
        body / FILE, {**values, "normalize": not kinds and stated.boolean("normalize", default=False)}
    )


def table(weights: Mapping[str, Weight]) -> dict[str, Weight]:
    """Return the table of a folder, a row for each token.

    Tokens of model2vec may share rows (``mapping``), which a factor of each token multiplies (``weights``).
    """
    if "embeddings" not in weights:
        return dict(weights)
    rows, mapping, factors = (weights.get(name) for name in ("embeddings", "mapping", "weights"))
    assert rows is not None
    tokens = next((weight.shape[0] for weight in (mapping, factors) if weight is not None), rows.shape[0])
    for weight in (mapping, factors):
        if weight is not None and weight.shape != (tokens,):
            raise GGUFError(
                f"{weight.file}: tensor {weight.name} has shape {weight.shape}, expected ({tokens},)"
            )
    shape = (tokens, *rows.shape[1:])
    values = partial(_values, rows, mapping, factors)
    return {_TABLE: rows.computed(values, name=_TABLE, shape=shape)}


def _values(rows: Weight, mapping: Weight | None, factors: Weight | None, index: Index) -> FloatArray:
    chosen = index
    if mapping is not None:
        all_rows = mapping.integers()
        if all_rows.min() < 0 or all_rows.max() >= rows.shape[0]:
            raise GGUFError(
                f"{mapping.file}: tensor {mapping.name} has rows {all_rows.min()} to {all_rows.max()}, of "
                f"{rows.shape[0]}"
            )
        chosen = all_rows[index]
    values = rows.rows(chosen)
    return values if factors is None else values * factors.rows(index)[:, None]


def static_lengths(body: Path) -> dict[str, int]:
    """Return the most tokens of a text by its full key: those after which the tokenizer itself cuts texts."""
    truncation = Fields.read(body / "tokenizer.json").object("truncation")
    return {f"{LENGTH_KEYS}text": truncation.integer("max_length")} if truncation.values else {}
