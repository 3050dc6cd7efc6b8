"""Components of the tokenizers library that segment text, built from the vocabulary of a GGUF file."""

from collections.abc import Sequence
from json import loads
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from tokenizers import Regex, models, normalizers, pre_tokenizers

from metal_prefill.files._gguf_file import GGUFFile
from metal_prefill.text._vocabulary import (
    ENCODER_KINDS,
    MERGES_KEY,
    SPACE,
    SPECIAL_TYPES,
    SPELLED_KEY,
    TokenType,
    Vocabulary,
    begins_word,
)

MAX_WORD_CHARACTERS = 100  # of WordPiece; longer words become the unknown token, as in BERT's tokenizer
# Keys under tokenizer.ggml of files of folders with a Unigram model: the steps of the normalizer in JSON,
# except the character map, which has a separate key; and whether words are split at all white space. Without
# them, the character map is the only step.
STEPS_KEY = "normalizer.steps"
SPLIT_KEY = "split_white_space"
_CONTINUATION = "##"


class Pipeline(NamedTuple):
    """Components of the tokenizers library that text passes before the model."""

    normalizer: normalizers.Normalizer | None
    pre_tokenizer: pre_tokenizers.PreTokenizer | None


def model_of(gguf: GGUFFile, vocabulary: Vocabulary) -> models.Model:
    """Build the model that converts text to ids.

    It cannot produce control or unknown tokens from any text.
    """
    plain = ~np.isin(vocabulary.types, SPECIAL_TYPES)
    plain[list(gguf.metadata.token_ids(SPELLED_KEY, len(vocabulary.tokens)))] = False
    if vocabulary.kind in ENCODER_KINDS:
        plain &= vocabulary.types != TokenType.UNUSED
    return _MODELS[vocabulary.kind](gguf, vocabulary, plain)


def pipeline_of(gguf: GGUFFile, vocabulary: Vocabulary, *, begins: bool = True) -> Pipeline:
    """Build the steps before the model.

    Unless text `begins`, it continues another one, and gets no space before it.
    """
    if vocabulary.kind == "llama":
        return _sentencepiece_pipeline(gguf, vocabulary, begins)
    return {"gpt2": _byte_level, "bert": _bert_words, "t5": _unigram_words}[vocabulary.kind](gguf, vocabulary)


def _numbered(names: Sequence[str | None], vocabulary: Vocabulary) -> list[str]:
    """Return a different name for each token; None and repeated ones are replaced by names that no text has.

    The library numbers other tokens after these.
    """
    spaced = " " in "".join(vocabulary.tokens)
    taken = {*names, *vocabulary.tokens} if spaced else set[str]()
    last = {name: i for i, name in enumerate(names)}

    def unused(i: int) -> str:
        name = f" {i}"  # every pipeline replaces or removes spaces
        while name in taken:
            name += " "
        return name

    return [name if name and last[name] == i else unused(i) for i, name in enumerate(names)]


def _texts(vocabulary: Vocabulary, plain: npt.NDArray[np.bool_]) -> list[str | None]:
    return [
        text if is_plain else None for text, is_plain in zip(vocabulary.tokens, plain.tolist(), strict=True)
    ]


def _byte_level_bpe(gguf: GGUFFile, vocabulary: Vocabulary, plain: npt.NDArray[np.bool_]) -> models.Model:
    texts = _texts(vocabulary, plain)
    ids = {name: i for i, name in enumerate(_numbered(texts, vocabulary))}
    return models.BPE(ids, _merges(gguf, vocabulary, texts), ignore_merges=vocabulary.pre.whole_words)


def _byte_level(gguf: GGUFFile, vocabulary: Vocabulary) -> Pipeline:
    splits = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in vocabulary.pre.patterns]
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    nfc = gguf.metadata.flag("normalizer.nfc", default=vocabulary.pre.nfc)
    return Pipeline(normalizers.NFC() if nfc else None, pre_tokenizers.Sequence([*splits, byte_level]))


def _merges(gguf: GGUFFile, vocabulary: Vocabulary, texts: Sequence[str | None]) -> list[tuple[str, str]]:
    merges = []
    known, plain = set(vocabulary.tokens), set(texts)
    for index, merge in enumerate(gguf.metadata.typed(MERGES_KEY, "array[string]")):
        border = merge.find(" ", 1)  # a piece may begin with a space, but is never empty
        left, right = merge[:border], merge[border + 1 :]
        if border < 0 or not {left, right, left + right} <= known:
            raise gguf.error(f"merge {index} of {MERGES_KEY}, {merge!r}, does not join two tokens to a token")
        if {left, right, left + right} <= plain:
            merges.append((left, right))
    return merges


def _sentencepiece_bpe(gguf: GGUFFile, vocabulary: Vocabulary, plain: npt.NDArray[np.bool_]) -> models.Model:
    scores, texts = _scores(gguf, vocabulary), _texts(vocabulary, plain)
    if MERGES_KEY in gguf.metadata:
        merges = _merges(gguf, vocabulary, texts)
    else:
        merges = _scored_merges(scores, vocabulary, texts)
    names = _numbered(texts, vocabulary)
    unknown = np.flatnonzero(vocabulary.types == TokenType.UNKNOWN)
    unk_token = names[unknown[0]] if unknown.size else None
    ids = {name: i for i, name in enumerate(names)}
    return models.BPE(ids, merges, unk_token=unk_token, fuse_unk=True, byte_fallback=True)


def _scores(gguf: GGUFFile, vocabulary: Vocabulary) -> npt.NDArray[Any]:
    scores = gguf.metadata.numbers("tokenizer.ggml.scores", "float", len(vocabulary.tokens))
    if not np.isfinite(scores).all():
        raise gguf.error("tokenizer.ggml.scores contains a value that is not finite")
    return scores


def _scored_merges(
    scores: npt.NDArray[Any], vocabulary: Vocabulary, texts: Sequence[str | None]
) -> list[tuple[str, str]]:
    # SentencePiece merges by the score of the result, but the library merges by the rank of the pair.
    # Every pair that forms a token therefore gets a rank in the order of the scores.
    plain = {text: i for i, text in enumerate(texts) if text is not None}
    ranked = sorted(
        (token for token, i in plain.items() if int(vocabulary.types[i]) != TokenType.BYTE),
        key=lambda token: -scores[plain[token]],
    )
    return [
        (token[:at], token[at:])
        for token in ranked
        for at in range(1, len(token))
        if token[:at] in plain and token[at:] in plain
    ]


def _sentencepiece_pipeline(gguf: GGUFFile, vocabulary: Vocabulary, begins: bool) -> Pipeline:
    scheme = vocabulary.prepend_scheme(gguf)
    if scheme:
        scheme = "never" if scheme == "first" and not begins else scheme
        return Pipeline(None, pre_tokenizers.Metaspace(SPACE, prepend_scheme=scheme, split=False))
    prepends = begins and gguf.metadata.flag("add_space_prefix", default=True)
    prepend = normalizers.Prepend(SPACE) if prepends else None
    if not vocabulary.spelling(gguf, "normalized"):  # this is faster
        return Pipeline(prepend, pre_tokenizers.Metaspace(SPACE, prepend_scheme="never", split=False))
    replace = normalizers.Replace(" ", SPACE)
    return Pipeline(normalizers.Sequence([prepend, replace]) if prepend else replace, None)


def _word_piece(gguf: GGUFFile, vocabulary: Vocabulary, plain: npt.NDArray[np.bool_]) -> models.Model:
    """Build a WordPiece model.

    In a file, tokens at the beginning of a word begin with U+2581, and others, which BERT writes as
    ``##ing``, have no mark.
    """
    unknown = _unknown_id(gguf, vocabulary, "[UNK]")
    plain[unknown] = False

    pieces = [
        (text[1:] if begins_word(text) else _CONTINUATION + text) if is_plain and text else None
        for text, is_plain in zip(vocabulary.tokens, plain.tolist(), strict=True)
    ]
    for i in np.flatnonzero(plain & (vocabulary.types == TokenType.USER_DEFINED)).tolist():
        pieces[i] = vocabulary.spelled(i)
    names = _numbered(pieces, vocabulary)
    return models.WordPiece(
        {name: i for i, name in enumerate(names)},
        unk_token=names[unknown],
        max_input_chars_per_word=MAX_WORD_CHARACTERS,
    )


def _bert_words(gguf: GGUFFile, vocabulary: Vocabulary) -> Pipeline:
    lowercase = gguf.metadata.flag("normalizer.lowercase", default=True)
    normalizer = normalizers.BertNormalizer(
        clean_text=gguf.metadata.flag("normalizer.clean_text", default=True),
        handle_chinese_chars=gguf.metadata.flag("normalizer.handle_chinese_chars", default=True),
        strip_accents=gguf.metadata.flag("normalizer.strip_accents", default=lowercase),
        lowercase=lowercase,
    )
    return Pipeline(normalizer, pre_tokenizers.BertPreTokenizer())


def _unigram(gguf: GGUFFile, vocabulary: Vocabulary, plain: npt.NDArray[np.bool_]) -> models.Model:
    scores = _scores(gguf, vocabulary)
    unknown = _unknown_id(gguf, vocabulary, "<unk>")
    texts = _texts(vocabulary, plain)
    names = _numbered(texts, vocabulary)
    # The lowest score of the tokens that text produces sets the score of unknown characters.
    kept = np.where([bool(text) for text in texts], scores, scores.max()).tolist()
    bytes_of_all = {f"<0x{byte:02X}>" for byte in range(256)} <= set(vocabulary.tokens)
    return models.Unigram(list(zip(names, kept, strict=True)), unk_id=unknown, byte_fallback=bytes_of_all)


def _unigram_words(gguf: GGUFFile, vocabulary: Vocabulary) -> Pipeline:
    key = f"tokenizer.ggml.{STEPS_KEY}"
    charsmap = read_charsmap(gguf)
    if key in gguf.metadata:
        steps = _steps(gguf, key)
        splits = gguf.metadata.flag(SPLIT_KEY, default=False)
    else:
        steps = [{"type": "Precompiled"}] if charsmap is not None else []
        splits = gguf.metadata.flag("remove_extra_whitespaces", default=True)
    made = []
    for step in steps:
        normalizer = normalizer_of(step, charsmap)
        if normalizer is None:
            raise gguf.error(f"{key} contains {step!r:.200}, which is not supported")
        made.append(normalizer)
    prepends = gguf.metadata.flag("add_space_prefix", default=True)
    words: list[pre_tokenizers.PreTokenizer] = [
        pre_tokenizers.Metaspace(SPACE, prepend_scheme="always" if prepends else "never")
    ]
    if splits:
        words.insert(0, pre_tokenizers.WhitespaceSplit())
    return Pipeline(normalizers.Sequence(made) if made else None, pre_tokenizers.Sequence(words))


def _steps(gguf: GGUFFile, key: str) -> list[Any]:
    try:
        steps = loads(gguf.metadata.typed(key, "string"))
    except (ValueError, RecursionError):
        steps = None
    if not isinstance(steps, list):
        raise gguf.error(f"{key} is not a list in JSON")
    return steps


def normalizer_of(step: Any, charsmap: bytes | None) -> normalizers.Normalizer | None:
    """Build a step of a normalizer, as ``tokenizer.json`` describes it; None if it is not a published one.

    Other regular expressions could take any time, and other replacements any memory.
    """
    match step:
        case {"type": "Precompiled"} if charsmap is not None:
            return normalizers.Precompiled(charsmap)
        case {"type": "Lowercase" | "NFC" | "NFKC" | "NFKD" | "StripAccents" as kind}:
            return getattr(normalizers, kind)()
        case {"type": "Strip", "strip_left": bool(left), "strip_right": bool(right)}:
            return normalizers.Strip(left, right)
        case {"type": "Replace", "pattern": {"String": "``" | "''" as quotes}, "content": '"'}:
            return normalizers.Replace(quotes, '"')
        case {"type": "Replace", "pattern": {"Regex": " {2,}"}, "content": " " | "\u2581" as space}:
            return normalizers.Replace(Regex(" {2,}"), space)
        case {"type": "Replace", "pattern": {"Regex": r"\s{2,}|[\n\r\t]" as spaces}, "content": " "}:
            return normalizers.Replace(Regex(spaces), " ")
    return None


_MODELS = {"gpt2": _byte_level_bpe, "llama": _sentencepiece_bpe, "bert": _word_piece, "t5": _unigram}


def _unknown_id(gguf: GGUFFile, vocabulary: Vocabulary, spelling: str) -> int:
    tokens = vocabulary.tokens
    stated = gguf.metadata.token_id("unknown", len(tokens))
    if stated is not None:
        return stated
    if spelling not in tokens:
        raise gguf.error(f"tokenizer.ggml.unknown_token_id is missing, and no token is spelled {spelling}")
    return tokens.index(spelling)


KEY = "tokenizer.ggml.precompiled_charsmap"
_BLOCK = 256  # units; the children of a node are in one block


def read_charsmap(gguf: GGUFFile) -> bytes | None:
    """Return the character map of a file, or None if it has none."""
    value = gguf.metadata.typed(KEY, "array[uint8]", "array[int8]", default=None)
    if value is None:
        return None
    content: bytes = value.tobytes()
    problem = _problem_of(content) if content else None
    if problem is not None:
        raise gguf.error(f"{KEY} is damaged: {problem}")
    return content or None


def _problem_of(content: bytes) -> str | None:
    size = int.from_bytes(content[:4], "little")
    if len(content) < 4 or not 0 < size <= len(content) - 4 or size % (4 * _BLOCK):
        return f"its trie has {size} bytes, must have a multiple of {4 * _BLOCK}, at most {len(content) - 4}"
    units = np.frombuffer(content, "<u4", size // 4, 4).astype(np.int64)
    texts = np.frombuffer(content, np.uint8, offset=4 + size)
    try:
        content[4 + size :].decode()
    except UnicodeDecodeError as error:
        return f"replacement at byte {error.start} is not valid UTF-8"
    nodes = np.flatnonzero(units < 2**31)
    if units[0] >= 2**31:
        return "the root of its trie is a value"
    children = nodes ^ ((units[nodes] >> 10) << np.where(units[nodes] & 0x200, 8, 0))
    outside = np.flatnonzero(children >= len(units))
    if outside.size:
        return f"node {nodes[outside[0]]} of its trie leads to {children[outside[0]]}, of {len(units)}"
    # The value of a node is in the first of its children, and counts bytes of the replacement texts.
    values = units[children[(units[nodes] & 0x100) != 0]] & 0x7FFFFFFF
    starts = np.append(texts & 0xC0 != 0x80, True)  # whether a character begins, with the end of the texts
    wrong = values[(values >= len(starts)) | ~starts[np.minimum(values, len(texts))]]
    if wrong.size:
        return f"a value of its trie is {wrong[0]}, must begin a text in {len(texts)} bytes"
    return None
