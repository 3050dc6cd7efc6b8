"""Segmenters of text, which the tokenizers library builds from the vocabulary of a GGUF file."""

from typing import Any

import numpy as np
import numpy.typing as npt
from tokenizers import Regex, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Segmenter

from metal_prefill.files._gguf_file import GGUFFile
from metal_prefill.text._vocabulary import (
    MERGES_KEY,
    SPACE,
    SPECIAL_TYPES,
    SPELLED_KEY,
    TokenType,
    Vocabulary,
    begins_word,
)

MAX_WORD_CHARACTERS = 100  # of WordPiece; longer words become the unknown token, as in BERT's tokenizer
# Key under tokenizer.ggml of files of folders: names of the normalizer's steps. Without it, the character map
# is the only one.
STEPS_KEY = "normalizer.steps"
CHARSMAP = "charsmap"
STEPS: dict[str, normalizers.Normalizer] = {
    "lowercase": normalizers.Lowercase(),
    "nfc": normalizers.NFC(),
    "nfkc": normalizers.NFKC(),
    "nfkd": normalizers.NFKD(),
    "strip_accents": normalizers.StripAccents(),
    "opening_quotes": normalizers.Replace("``", '"'),
    "closing_quotes": normalizers.Replace("''", '"'),
    "strip": normalizers.Strip(),
    "strip_end": normalizers.Strip(left=False, right=True),
    "join_spaces": normalizers.Replace(Regex(" {2,}"), " "),
    "join_white_space": normalizers.Replace(Regex(r"\s{2,}|[\n\r\t]"), " "),
}
# Those that remove spaces, of which others are kept.
SPACE_STEPS = ("strip", "strip_end", "join_spaces", "join_white_space")
_CONTINUATION = "##"
_NO_WORD = " "  # a piece that no word contains, because words contain no white space


def segmenter_of(gguf: GGUFFile, vocabulary: Vocabulary) -> Segmenter:
    """Build a segmenter that converts text without special tokens to ids.

    It cannot produce control or unknown tokens from any text.
    """
    special = np.isin(vocabulary.types, SPECIAL_TYPES)
    special[list(gguf.metadata.token_ids(SPELLED_KEY, len(vocabulary.tokens)))] = True
    if vocabulary.kind in _OF_ENCODERS:
        plain_or_spelled = ~special & (vocabulary.types != TokenType.UNUSED)
        return _OF_ENCODERS[vocabulary.kind](gguf, vocabulary, plain_or_spelled)
    plain = {token: i for i, token in enumerate(vocabulary.tokens) if not special[i]}
    return (_byte_level_bpe if vocabulary.kind == "gpt2" else _sentencepiece_bpe)(gguf, vocabulary, plain)


def _byte_level_bpe(gguf: GGUFFile, vocabulary: Vocabulary, plain: dict[str, int]) -> Segmenter:
    segmenter = Segmenter(
        models.BPE(plain, _merges(gguf, vocabulary, plain), ignore_merges=vocabulary.pre.whole_words)
    )
    splits = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in vocabulary.pre.patterns]
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    segmenter.pre_tokenizer = pre_tokenizers.Sequence([*splits, byte_level])
    if gguf.metadata.flag("normalizer.nfc", default=vocabulary.pre.nfc):
        segmenter.normalizer = normalizers.NFC()
    return segmenter


def _merges(gguf: GGUFFile, vocabulary: Vocabulary, plain: dict[str, int]) -> list[tuple[str, str]]:
    merges = []
    known = set(vocabulary.tokens)
    for index, merge in enumerate(gguf.metadata.typed(MERGES_KEY, "array[string]")):
        border = merge.find(" ", 1)  # a piece may begin with a space, but is never empty
        left, right = merge[:border], merge[border + 1 :]
        if border < 0 or not {left, right, left + right} <= known:
            raise gguf.error(f"merge {index} of {MERGES_KEY}, {merge!r}, does not join two tokens to a token")
        if {left, right, left + right} <= plain.keys():
            merges.append((left, right))
    return merges


def _sentencepiece_bpe(gguf: GGUFFile, vocabulary: Vocabulary, plain: dict[str, int]) -> Segmenter:
    scores = _scores(gguf, vocabulary)
    if MERGES_KEY in gguf.metadata:  # and merges do not follow from scores
        merges = _merges(gguf, vocabulary, plain)
    else:
        merges = _scored_merges(scores, vocabulary, plain)
    unknown = np.flatnonzero(vocabulary.types == TokenType.UNKNOWN)
    known = dict(plain)
    unk_token = None
    if unknown.size:
        unk_token = vocabulary.tokens[unknown[0]]
        known[unk_token] = int(unknown[0])
    return Segmenter(models.BPE(known, merges, unk_token=unk_token, fuse_unk=True, byte_fallback=True))


def _scores(gguf: GGUFFile, vocabulary: Vocabulary) -> npt.NDArray[Any]:
    scores = gguf.metadata.numbers("tokenizer.ggml.scores", "float", len(vocabulary.tokens))
    if not np.isfinite(scores).all():
        raise gguf.error("tokenizer.ggml.scores contains a value that is not finite")
    return scores


def _scored_merges(
    scores: npt.NDArray[Any], vocabulary: Vocabulary, plain: dict[str, int]
) -> list[tuple[str, str]]:
    # SentencePiece merges by the score of the result, but the library merges by the rank of the pair.
    # Every pair that forms a token therefore gets a rank in the order of the scores.
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


def _word_piece(
    gguf: GGUFFile,
    vocabulary: Vocabulary,
    plain: npt.NDArray[np.bool_],  # whether text may produce each token
) -> Segmenter:
    """Build a WordPiece segmenter.

    In a file, tokens at the beginning of a word begin with U+2581, and others, which BERT writes as
    ``##ing``, have no mark.
    """
    pieces = {}
    spelled = set(np.flatnonzero(vocabulary.types == TokenType.USER_DEFINED).tolist())
    for i in np.flatnonzero(plain).tolist():
        text = vocabulary.tokens[i]
        if i in spelled:
            pieces[vocabulary.spelled(i)] = i
        elif begins_word(text):
            pieces[text[1:]] = i
        elif text:
            pieces[_CONTINUATION + text] = i
    pieces[_NO_WORD] = _unknown_id(gguf, vocabulary, "[UNK]")
    segmenter = Segmenter(
        models.WordPiece(pieces, unk_token=_NO_WORD, max_input_chars_per_word=MAX_WORD_CHARACTERS)
    )
    lowercase = gguf.metadata.flag("normalizer.lowercase", default=True)
    segmenter.normalizer = normalizers.BertNormalizer(
        clean_text=gguf.metadata.flag("normalizer.clean_text", default=True),
        handle_chinese_chars=gguf.metadata.flag("normalizer.handle_chinese_chars", default=True),
        strip_accents=gguf.metadata.flag("normalizer.strip_accents", default=lowercase),
        lowercase=lowercase,
    )
    segmenter.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    return segmenter


def _unigram(gguf: GGUFFile, vocabulary: Vocabulary, plain: npt.NDArray[np.bool_]) -> Segmenter:
    """Build a Unigram segmenter; its parameters are those of `_word_piece`."""
    tokens = vocabulary.tokens
    key = f"tokenizer.ggml.{STEPS_KEY}"
    steps = gguf.metadata.get(key, [CHARSMAP])
    if not isinstance(steps, list) or not all(name == CHARSMAP or name in STEPS for name in steps):
        raise gguf.error(f"{key} must be a list of {CHARSMAP}, {', '.join(STEPS)}, is {steps!r}")
    scores = _scores(gguf, vocabulary)
    unknown = _unknown_id(gguf, vocabulary, "<unk>")
    # Tokens are numbered by their position, so those that text must not produce are renamed: U+2581 occurs in
    # a word only at its beginning. The lowest score of the others sets the score of unknown characters.
    highest = float(scores.max())
    pieces = [
        (token, float(score)) if is_plain and token else (f"{SPACE}{SPACE}{i}", highest)
        for i, (token, score, is_plain) in enumerate(zip(tokens, scores, plain, strict=True))
    ]
    bytes_of_all = {f"<0x{byte:02X}>" for byte in range(256)} <= set(tokens)
    segmenter = Segmenter(models.Unigram(pieces, unk_id=unknown, byte_fallback=bytes_of_all))
    charsmap = read_charsmap(gguf)
    known = STEPS if charsmap is None else {**STEPS, CHARSMAP: normalizers.Precompiled(charsmap)}
    made = [known[name] for name in steps if name in known]
    if made:
        segmenter.normalizer = normalizers.Sequence(made)
    prepends = gguf.metadata.flag("add_space_prefix", default=True)
    words: list[pre_tokenizers.PreTokenizer] = [
        pre_tokenizers.Metaspace(SPACE, prepend_scheme="always" if prepends else "never")
    ]
    if not any(step in SPACE_STEPS for step in steps) and gguf.metadata.flag(
        "remove_extra_whitespaces", default=True
    ):
        words.insert(0, pre_tokenizers.WhitespaceSplit())
    segmenter.pre_tokenizer = pre_tokenizers.Sequence(words)
    return segmenter


_OF_ENCODERS = {"bert": _word_piece, "t5": _unigram}


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
