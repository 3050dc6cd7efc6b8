"""Segmentation of text with the vocabularies of encoders: WordPiece, and SentencePiece's Unigram model."""

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt
from tokenizers import Regex, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Segmenter

from metal_prefill.errors import GGUFError
from metal_prefill.files._gguf_file import GGUFFile

SPACE = "\u2581"  # begins a token at the beginning of a word
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


def begins_word(text: str) -> bool:
    """Return whether a token of WordPiece begins words; a single U+2581 is the character inside a word."""
    return text.startswith(SPACE) and text != SPACE


def word_piece(
    gguf: GGUFFile,
    tokens: Sequence[str],  # text of each id
    plain: npt.NDArray[np.bool_],  # whether text may produce each token
    spelled: Mapping[int, str],  # spellings of user-defined tokens, by id
) -> Segmenter:
    """Build a WordPiece segmenter.

    In a file, tokens at the beginning of a word begin with U+2581, and others, which BERT writes as
    ``##ing``, have no mark.
    """
    vocabulary = {}
    for i in map(int, np.flatnonzero(plain)):
        text = tokens[i]
        if i in spelled:
            vocabulary[spelled[i]] = i
        elif begins_word(text):
            vocabulary[text[1:]] = i
        elif text:
            vocabulary[_CONTINUATION + text] = i
    vocabulary[_NO_WORD] = _unknown_id(gguf, tokens, "[UNK]")
    segmenter = Segmenter(
        models.WordPiece(vocabulary, unk_token=_NO_WORD, max_input_chars_per_word=MAX_WORD_CHARACTERS)
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


def unigram(gguf: GGUFFile, tokens: Sequence[str], plain: npt.NDArray[np.bool_]) -> Segmenter:
    """Build a Unigram segmenter; its parameters are those of `word_piece`."""
    key = f"tokenizer.ggml.{STEPS_KEY}"
    steps = gguf.metadata.get(key, [CHARSMAP])
    if not isinstance(steps, list) or not all(name == CHARSMAP or name in STEPS for name in steps):
        raise GGUFError(f"{gguf.path}: {key} must be a list of {CHARSMAP}, {', '.join(STEPS)}, is {steps!r}")
    scores = gguf.metadata.numbers("tokenizer.ggml.scores", "float", len(tokens))
    if not np.isfinite(scores).all():
        raise GGUFError(f"{gguf.path}: tokenizer.ggml.scores contains a value that is not finite")
    unknown = _unknown_id(gguf, tokens, "<unk>")
    # Tokens are numbered by their position, so those that text must not produce are renamed: U+2581 occurs in
    # a word only at its beginning. The lowest score of the others sets the score of unknown characters.
    highest = float(scores.max())
    vocabulary = [
        (token, float(score)) if is_plain and token else (f"{SPACE}{SPACE}{i}", highest)
        for i, (token, score, is_plain) in enumerate(zip(tokens, scores, plain, strict=True))
    ]
    bytes_of_all = {f"<0x{byte:02X}>" for byte in range(256)} <= set(tokens)
    segmenter = Segmenter(models.Unigram(vocabulary, unk_id=unknown, byte_fallback=bytes_of_all))
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


def _unknown_id(gguf: GGUFFile, tokens: Sequence[str], spelling: str) -> int:
    stated = gguf.metadata.token_id("unknown", len(tokens))
    if stated is not None:
        return stated
    if spelling not in tokens:
        raise GGUFError(
            f"{gguf.path}: tokenizer.ggml.unknown_token_id is missing, and no token is spelled {spelling}"
        )
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
        raise GGUFError(f"{gguf.path}: {KEY} is damaged: {problem}")
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
