"""Numbers of tokens after which sentence-transformers cuts texts, as metadata."""

from pathlib import Path

from metal_prefill.conversion import _colbert
from metal_prefill.conversion._body import body_folder
from metal_prefill.conversion._fields import Fields
from metal_prefill.conversion._modules import transformer_settings
from metal_prefill.files._metadata_keys import LENGTH_KEYS


def max_tokens(folder: Path, context: int, expanded: int = 0) -> dict[str, int]:
    """Return the most tokens of texts, queries and documents below the context, by their full keys.

    Queries of late interaction have room for the tokens to which they are `expanded`.
    """
    read = Fields.read_if_present
    modules = transformer_settings(folder)
    models = (*modules, read(folder / "config_sentence_transformers.json"))
    stated = {
        "text": [
            *((module, "max_seq_length") for module in modules),
            (read(body_folder(folder) / "tokenizer_config.json"), "model_max_length"),
        ],
        "query": [(model, "query_length") for model in models],
        "document": [
            *((model, "document_length") for model in models),
            (read(folder / _colbert.FILE), "doc_maxlen"),
        ],
    }
    found: dict[str, int] = {}
    for name, places in stated.items():
        length = next((_number(fields, key, context) for fields, key in places if fields.has(key)), None)
        # A limit of all texts would hold for queries and documents, too, without theirs.
        if length is not None and (length < context or found):
            found[f"{LENGTH_KEYS}{name}"] = length
    if 0 < found.get(f"{LENGTH_KEYS}text", 0) < expanded:
        query = f"{LENGTH_KEYS}query"
        found[query] = max(found.get(query, 0), expanded)
    return found


def _number(fields: Fields, key: str, context: int) -> int:
    value = fields.values[key]
    # Tokenizers without a limit state a huge number.
    return context if isinstance(value, (int, float)) and value >= context else fields.integer(key)
