"""Small tokenizers of each kind, as ``tokenizer.json`` describes them."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from metal_prefill import text
from metal_prefill.text._vocabulary import PRE_TOKENIZERS
from support.comparison import VERSE
from support.files.gguf_reader import GGUFReader
from support.folders import encoder_tokenizers

Json = dict[str, Any]

_SPACES = {"type": "Replace", "pattern": {"String": " "}, "content": "\u2581"}
_BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
_TEXTS = [VERSE, VERSE.lower(), "0 1 2 3 4 5 6 7 8 9 the king is dead, long live! a-b_c", "\u00e9 \u00fc"]
# The pattern of Mistral's models since Nemo, as published.
TEKKEN_PATTERN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def _train(
    tokenizer: Tokenizer, size: int, special: list[str], alphabet: list[str], texts: list[str]
) -> None:
    trainer = trainers.BpeTrainer(
        vocab_size=size, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)


def trained_byte_level(pattern: str | None, size: int, texts: list[str]) -> Tokenizer:
    """Return a byte-level tokenizer with two control tokens, by default a Llama 3 model's."""
    tokenizer = Tokenizer(models.BPE(ignore_merges=pattern is None))
    split = pre_tokenizers.Split(Regex(pattern or PRE_TOKENIZERS["llama-bpe"].patterns[0]), "isolated")
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, byte_level])
    _train(tokenizer, size, ["<s>", "</s>"], pre_tokenizers.ByteLevel.alphabet(), texts)
    return tokenizer


def _with_tool(made: Json) -> Tokenizer:
    """Return a tokenizer with a token ``<tool>`` that is matched in any text."""
    tokenizer = Tokenizer.from_str(json.dumps(made))
    tokenizer.add_tokens([AddedToken("<tool>", normalized=False)])
    return tokenizer


def _framed(made: Json, single: str, pair: str) -> Json:
    tokenizer = _with_tool(made)
    ids = {token["content"]: token["id"] for token in made["added_tokens"]}
    used = [(name, ids[name]) for name in ids if name in f"{single} {pair}".split()]
    tokenizer.post_processor = processors.TemplateProcessing(single=single, pair=pair, special_tokens=used)
    return json.loads(tokenizer.to_str())


# The pattern of Granite Embedding 97M multilingual, and of other models with the vocabulary of GPT-4o.
GPT_4O_PATTERN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|"
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|"
    r"\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def byte_level(pattern: str | None = None) -> Json:
    """Return a byte-level tokenizer, by default a Llama 3 model's."""
    made = json.loads(trained_byte_level(pattern, 420, _TEXTS).to_str())
    return _framed(made, "<s> $A", "<s> $A <s> $B")


def _byte_fallback() -> Json:
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    _train(tokenizer, 700, ["<unk>", "<s>", "</s>", *_BYTES], [], _TEXTS)
    made: Json = json.loads(tokenizer.to_str())
    made["added_tokens"] = made["added_tokens"][:3]
    return _framed(made, "<s> $A", "<s> $A <s> $B")


def llama_2() -> Json:
    """Return a tokenizer whose normalizer adds a space before each text, as in Llama 2."""
    prepend = {"type": "Prepend", "prepend": "\u2581"}
    normalizer = {"type": "Sequence", "normalizers": [prepend, _SPACES]}
    return {**_byte_fallback(), "normalizer": normalizer, "pre_tokenizer": None}


def mistral() -> Json:
    """Return a tokenizer that adds a space before the first text only, as in Mistral."""
    words = {"type": "Metaspace", "replacement": "\u2581", "prepend_scheme": "first", "split": False}
    return {**_byte_fallback(), "normalizer": None, "pre_tokenizer": words}


def gemma() -> Json:
    """Return a tokenizer that adds no space, as in Gemma."""
    split = {"type": "Split", "pattern": {"String": " "}, "behavior": "MergedWithPrevious", "invert": False}
    return {**_byte_fallback(), "normalizer": dict(_SPACES), "pre_tokenizer": split}


def _recorded(variant: str) -> Json:
    return json.loads(encoder_tokenizers.recorded()[f"{variant}: tokenizer.json"].tobytes())


def word_piece() -> Json:
    return json.loads(_with_tool(_recorded("uncased")).to_str())


def unigram() -> Json:
    """Return the tokenizer of XLM-R."""
    return json.loads(_with_tool(_recorded("unigram as written")).to_str())


TOKENIZERS: dict[str, Callable[[], Json]] = {
    "byte level": byte_level,
    "llama 2": llama_2,
    "mistral": mistral,
    "gemma": gemma,
    "word piece": word_piece,
    "unigram": unigram,
}


_BYTE_FALLBACK = (decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse())
_STRIPPED = decoders.Sequence([*_BYTE_FALLBACK, decoders.Strip(" ", 1, 0)])
# As in the folders of such models.
DECODERS = {
    "byte level": decoders.ByteLevel(),
    "llama 2": _STRIPPED,
    "mistral": _STRIPPED,
    "gemma": decoders.Sequence(list(_BYTE_FALLBACK)),
    "word piece": decoders.WordPiece(cleanup=False),
    "unigram": decoders.Metaspace(),
}


def of_file(path: Path) -> Tokenizer:
    """Return the library's tokenizer of a model file with a byte-level vocabulary and single digits."""
    fields = GGUFReader(path).fields
    vocab = {token: i for i, token in enumerate(fields["tokenizer.ggml.tokens"].contents())}
    merges = [tuple(merge.split(" ")) for merge in fields["tokenizer.ggml.merges"].contents()]
    tokenizer = Tokenizer(models.BPE(vocab, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def write(folder: Path, made: Json, settings: Json | None = None, **config: Any) -> Path:
    """Write a folder with the files of a tokenizer."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tokenizer.json").write_text(json.dumps(made))
    (folder / "tokenizer_config.json").write_text(json.dumps(settings or {}))
    vocab = made["model"]["vocab"]
    numbers = range(len(vocab)) if isinstance(vocab, list) else vocab.values()
    size = max(*numbers, *(token["id"] for token in made["added_tokens"])) + 1
    (folder / "config.json").write_text(json.dumps({"vocab_size": size, "type_vocab_size": 2, **config}))
    return folder


def opened(
    folder: Path, made: Json, settings: Json | None = None, **config: Any
) -> tuple[text.Tokenizer, Tokenizer]:
    """Write a folder with these files; return its tokenizer, and the library's."""
    path = write(folder, made, settings, **config)
    return encoder_tokenizers.open_folder(path), Tokenizer.from_file(str(path / "tokenizer.json"))
