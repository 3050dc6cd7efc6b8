"""Tokenizers of any size for synthetic models.

Pieces are built from letters in a fixed order, so a vocabulary depends only on its size. It is consistent:
every merge joins two tokens to a third, no token occurs twice, and all 256 bytes have tokens, so that every
text can be encoded and decoded without change.
"""

from collections.abc import Iterator
from itertools import count, islice

from metal_prefill.conversion._folder_vocabulary import WrittenVocabulary
from metal_prefill.text._vocabulary import BYTES, SPACE

# Token types of GGUF.
NORMAL, UNKNOWN, CONTROL, BYTE = 1, 2, 3, 6

_LETTERS = "etaoinshrdlcumwfgypbvkjxqz"  # by frequency in English
_LONGEST = 12  # letters in a piece
_GPT2_SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
_BERT_SPECIALS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
_SPM_SPECIALS = ("<unk>", "<s>", "</s>")


def _merges(space: str) -> Iterator[tuple[str, str]]:
    """Yield pairs of pieces that join to longer pieces; `space` precedes the first letter of words."""
    pieces = [space, *_LETTERS]
    known = set(pieces)
    for total in count():
        for i in range(min(total + 1, len(pieces))):
            if total - i >= len(pieces):
                continue
            left, right = pieces[i], pieces[total - i]
            if right[0] == space or len(left) + len(right) > _LONGEST or left + right in known:
                continue
            known.add(left + right)
            pieces.append(left + right)
            yield left, right


def gpt2_vocabulary(size: int) -> WrittenVocabulary:
    """Byte-level BPE: three control tokens, the 256 bytes, then one token for each merge."""
    alphabet = sorted(BYTES, key=lambda character: BYTES[character])
    fixed = [*_GPT2_SPECIALS, *alphabet]
    if size <= len(fixed):  # llama.cpp refuses a file without merges
        raise ValueError(f"vocab {size}: a byte-level vocabulary needs at least {len(fixed) + 1} tokens")
    merges = list(islice(_merges(alphabet[ord(" ")]), size - len(fixed)))
    types = [CONTROL] * len(_GPT2_SPECIALS) + [NORMAL] * (size - len(_GPT2_SPECIALS))
    return WrittenVocabulary(
        model="gpt2",
        tokens=fixed + [left + right for left, right in merges],
        types=types,
        pre="smollm",
        merges=[f"{left} {right}" for left, right in merges],
        ids={"bos": 0, "eos": 0},
    )


def llama_vocabulary(size: int) -> WrittenVocabulary:
    """SentencePiece's kind: <unk>, <s>, </s>, the 256 bytes, the letters, then pieces of falling score."""
    fixed = [*_SPM_SPECIALS, *(f"<0x{byte:02X}>" for byte in range(256))]
    letters = [SPACE, *_LETTERS]
    if size < len(fixed) + len(letters):
        raise ValueError(
            f"vocab {size}: a SentencePiece vocabulary needs at least {len(fixed) + len(letters)} tokens"
        )
    pieces = [left + right for left, right in islice(_merges(SPACE), size - len(fixed) - len(letters))]
    # The pair with the highest-scoring piece is joined first; single letters have the lowest scores, as in
    # SentencePiece.
    scores = [0.0] * len(fixed) + [-float(len(pieces) + i) for i in range(len(letters))]
    return WrittenVocabulary(
        model="llama",
        tokens=fixed + letters + pieces,
        types=[UNKNOWN, CONTROL, CONTROL] + [BYTE] * 256 + [NORMAL] * (size - len(fixed)),
        scores=scores + [-float(rank) for rank in range(len(pieces))],
        ids={"bos": 1, "eos": 2},
    )


def bert_vocabulary(size: int) -> WrittenVocabulary:
    """WordPiece: five control tokens, then pieces that begin a word and pieces that continue one."""
    characters = [*_LETTERS, *"0123456789.,:;!?'-"]
    fixed = [
        *_BERT_SPECIALS,
        *(f"{SPACE}{character}" for character in characters),  # as GGUF marks pieces that begin a word
        *characters,
    ]
    if size < len(fixed):
        raise ValueError(f"vocab {size}: a WordPiece vocabulary needs at least {len(fixed)} tokens")
    joined = (left + right for left, right in _merges(SPACE))
    known = set(fixed)
    pieces = list(islice((piece for piece in joined if piece not in known), size - len(fixed)))
    return WrittenVocabulary(
        model="bert",
        tokens=fixed + pieces,
        types=[CONTROL] * len(_BERT_SPECIALS) + [NORMAL] * (size - len(_BERT_SPECIALS)),
        ids={"bos": 2, "eos": 3, "unk": 1, "sep": 3, "pad": 0, "mask": 4},
    )


VOCABULARIES = {"gpt2": gpt2_vocabulary, "llama": llama_vocabulary, "bert": bert_vocabulary}
"""Functions that generate a vocabulary of a given size, by the tokenizer model's name in GGUF."""
