"""Texts and vocabularies to tokenize, and models to compute, for comparisons with llama.cpp and transformers.

The tools that record their results and the tests that compare with them share these definitions.
"""

# ruff: noqa: RUF001  (the look-alikes are intended)

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt

from metal_prefill.files import GGUFFile
from metal_prefill.files._gguf_writer import GGUFWriter
from metal_prefill.synth import TIED
from metal_prefill.text import Tokenizer
from support.places import DATA
from support.small_models import ENCODERS, MODELS, SmallModel

TOKENS = DATA / "llama_cpp_tokens.json"
LOGITS = DATA / "llama_cpp_logits.npz"
PERPLEXITY = DATA / "llama_cpp_perplexity.json"
VECTORS = DATA / "llama_cpp_vectors.npz"
TRANSFORMERS_ENCODERS = DATA / "transformers_encoders.npz"
ENCODERS_OF_LLAMA_CPP = DATA / "llama_cpp_encoders.npz"

BYTE_LEVEL_SPECIALS = {
    "<|endoftext|>": 3,
    "<|im_start|>": 3,
    "<|im_end|>": 3,
    "<|pad|>": 4,
    "    ": 4,
}  # text, type
USER_DEFINED = ("<|user|>", "\n\n", "   ")

VERSE = """\
PROSPERO:
Our revels now are ended. These our actors,
As I foretold you, were all spirits and
Are melted into air, into thin air:
And, like the baseless fabric of this vision,
The cloud-capp'd towers, the gorgeous palaces,
The solemn temples, the great globe itself,
Yea, all which it inherit, shall dissolve
And, like this insubstantial pageant faded,
Leave not a rack behind. We are such stuff
As dreams are made on, and our little life
Is rounded with a sleep.
"""
VERSE_WINDOW = 64  # tokens per window of llama.cpp's recorded perplexity of the verse

PROSE = """\
Before we proceed any further, hear me speak. "Speak, speak!" You are all resolved rather to die than to
famish? It's what they'd've said; I'LL see that WE'RE done, don't you think? The U.S.A.'s 3rd e-mail:
a_b@example.org.
"""


# Texts to tokenize.
TEXTS = [
    "", " ", "  ", "   ", "     ", "\n", "\n\n", "\n\n\n", "\t", "\r\n", " \n", "\n ", " \n \n  x",
    "\t\ta", "\x0b\x0c",  # white space
    "Hello", " Hello", "  Hello", "Hello ", "Hello world", "Hello  world", "Hello\nworld", "a b c",
    "HELLO World",  # words, then contractions
    "it's", "IT'S", "we'll we'LL", "they've they'VE", "I'm I'M'm", "'s't're've'm'll'd", "x' s", "don't",
    "1", "12", "123", "1234", "12345", "1234567890", " 123", "3.14159", "1,000,000", "x1y22z333",
    "٣٤٥ ½ Ⅷ ²",  # numbers
    "...", "!?!?", "a.b,c;d:e", "(x+y)*[z]={}", "$100 + 5% = ~105^2", "C++ <T> #include",
    "--\n--", "«q» „q“ “q”",  # punctuation
    "Übergröße naïve façade", "привет мир", "γειά σου Κόσμε", "שלום עולם", "مرحبا بالعالم", "你好，世界",
    "こんにちは",  # scripts
    "🎭", "🎭🎭 x", "👩‍👩‍👧‍👦", "a\u0301 e\u0301", "\u00a0x\u00a0", "\u3000x", "\u200bx", "\ufeffx",
    "∑∫≠", "\u2581x", "𝔘𝔫𝔦",  # symbols, and characters without a width
    "def f(x):\n    return x + 1\n",
    "\tif (a) {\n\t\tb();\n\t}\n",
    "    four   three  two one",
    '{"key": [1, 2.5, null]}',
    "<|im_start|>user\nhi<|im_end|>", "a<|pad|>b", "<|user|> x <|user|>",
    "<s>[INST] x [/INST]</s>", "<unk>", "<0x41>",  # special tokens
    "\x00", "\x01\x02", "a\x00b", "\x7f\x80\x9f", "\ud7ff\ue000", "\uffff",  # control characters
    *PROSE.splitlines(keepends=True), PROSE, "a" * 100, "ab" * 50, " " * 50, "\n" * 20, "1" * 50, "." * 50,
]  # fmt: skip


@dataclass(frozen=True)
class TokenizerVariant:
    """Settings with which a vocabulary is read."""

    kind: str  # "gpt2" or "llama"
    pre: str = "default"  # name of the pre-tokenizer
    space_prefix: bool = True  # whether text starts with an additional space
    parse_special: bool = False  # whether control tokens are recognized in the text


PRE_TOKENIZERS = (
    "default", "gpt-2", "mpt", "smollm", "llama-bpe", "falcon3", "smaug-bpe", "dbrx", "qwen2",
    "deepseek-r1-qwen", "qwen35", "olmo", "phi-2", "starcoder", "command-r", "stablelm2",
)  # fmt: skip
TOKENIZERS = {
    **{pre: TokenizerVariant("gpt2", pre) for pre in PRE_TOKENIZERS},
    "smollm, special": TokenizerVariant("gpt2", "smollm", parse_special=True),
    "sentencepiece": TokenizerVariant("llama"),
    "sentencepiece, special": TokenizerVariant("llama", parse_special=True),
    "sentencepiece, no prefix": TokenizerVariant("llama", space_prefix=False),
}


@cache
def recorded() -> dict[str, Any]:
    """Return vocabularies, and texts with llama.cpp's tokens."""
    return json.loads(TOKENS.read_text())


def open_variant(path: Path, variant: TokenizerVariant, **changes: Any) -> Tokenizer:
    """Open a recorded vocabulary with the settings of a variant."""
    vocabulary = {**recorded()["vocabularies"][variant.kind], **changes}
    return Tokenizer(GGUFFile(write_vocabulary(path, vocabulary, variant)))


def write_vocabulary(path: Path, vocabulary: dict[str, Any], variant: TokenizerVariant) -> Path:
    """Write a file that holds a vocabulary and no tensors."""
    writer = GGUFWriter(None, "llama")
    if "name" in vocabulary:
        writer.add_name(vocabulary["name"])
    writer.add_context_length(512)
    writer.add_embedding_length(32)
    writer.add_block_count(1)
    writer.add_feed_forward_length(32)
    writer.add_head_count(1)
    writer.add_layer_norm_rms_eps(1e-5)
    ids = {"bos": 0, "eos": 0} if variant.kind == "gpt2" else {"unk": 0, "bos": 1, "eos": 2}
    given = {name: vocabulary.get(name) for name in ("tokens", "types", "scores", "merges")}
    writer.add_vocabulary(SimpleNamespace(model=variant.kind, pre=variant.pre, ids=ids, **given))
    writer.add_add_space_prefix(variant.space_prefix)
    writer.write_header(path, [])
    writer.close()
    return path


PARTLY_ROTATED = ("qwen35", "gptneox", "phi2", "stablelm")


# In float32, these differ from other models only in numbers: dimensions, the vocabulary, constants.
_ALIKE = {
    *("16-bit floats", "gqa 1", "gqa 8", *(f"head_dim {n}" for n in (16, 32, 64, 80, 128))),
    *("narrower than its heads", "separate output", "vocabulary of 301", "vocabulary of 1021, separate"),
    *("sentencepiece", "long context", "smollm shape", "wide feed-forward"),
    *("gpt2, heads of 26", "phi2, heads of 26", "qwen35, attention first and last"),
    *("gemma4, windows alone", "gemma4, gate and up of two types"),
}


def compared_models() -> Iterator[tuple[str, SmallModel]]:
    """Return the models that are compared with llama.cpp, in float32 unless they test a tensor type.

    In float32, llama.cpp's rounding of activations does not hide differences. llama.cpp requires heads of one
    width, most of them rotated completely. It supports windows of exaone4 only in models of 64 layers, and
    none of starcoder2. It requires heads as wide as the model in lfm2. In qwen35 it requires keys and values
    of one width in the gated delta rule, and a fixed interval between layers with attention. Models with
    different layers are not compared.
    """
    for name, model in MODELS.items():
        scan = model.scan
        if (
            name in _ALIKE
            or model.layered is not None
            or (model.rope_dims and model.architecture not in PARTLY_ROTATED)
            or model.value_width != model.head_dim
            or (model.architecture in ("exaone4", "starcoder2") and model.window)
            or (model.architecture in ("lfm2", "lfm2moe") and model.heads * model.head_dim != model.dim)
            or (model.architecture == "qwen35" and scan is not None and scan.inner != scan.state * scan.heads)
        ):
            continue
        if not name.startswith(("type ", "mixed ")):
            output = TIED if model.output_type == TIED else "F32"
            model = replace(model, types={"*": "F32"}, embedding="F32", output_type=output)
        yield name, model


# Lengths of the texts with recorded vectors: shorter and longer than windows and pages.
VECTOR_LENGTHS = (1, 5, 20, 64, 100)
SEPARATOR = 3  # in the vocabularies of small encoders, of which the first five tokens are special


def random_texts(
    vocab: int, first: int = 0, lengths: Iterable[int] = VECTOR_LENGTHS
) -> Iterator[npt.NDArray[np.int64]]:
    """Yield a text of each length, whose tokens are at least `first`."""
    for n in lengths:
        yield np.random.default_rng(n).integers(first, vocab, n)


# One encoder of each architecture, in float32.
OF_LLAMA_CPP = {
    name: replace(model, types={"*": "F32"}, embedding="F32")
    for name, model in ENCODERS.items()
    if name == model.architecture
}
# Transformers' nomic-bert has no biases.
OF_TRANSFORMERS = {
    name: model for name, model in OF_LLAMA_CPP.items() if not model.qkv_bias and name != "jina-bert-v2"
}


def encoder_tokens(model: SmallModel) -> Iterator[npt.NDArray[np.int64]]:
    """Yield texts for an encoder; one is a pair."""
    for tokens in random_texts(model.vocab, first=5):
        tokens[len(tokens) // 2] = SEPARATOR
        yield tokens


def segments_of(tokens: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Return the segment of each token, 0 or 1: the first segment ends with a separator."""
    before = np.concatenate([[0], np.cumsum(tokens == SEPARATOR)[:-1]])
    return (before > 0).astype(np.int64)


def tokens_for(model: SmallModel) -> npt.NDArray[np.int64]:
    """Return a prompt that is longer than every window."""
    return np.random.default_rng(3).integers(0, model.vocab, 100)


def decoded(tokenizer: Tokenizer, text: str, *, parse_special: bool) -> str:
    """Return the decoded tokens of a text: includes the spaces inserted before all parts except the first."""
    if not tokenizer.space_prefix:
        return text
    parts = tokenizer.split(text, parse_special)
    spelled = (
        tokenizer.token(part).replace("\u2581", " ") if isinstance(part, int) else f" {part}"
        for part in parts
    )
    return "".join(spelled).removeprefix(" ")
