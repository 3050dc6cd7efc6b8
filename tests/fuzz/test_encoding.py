"""Random texts, with every supported way to split text into tokens.

A text round-trips through its tokens, whole and piece by piece; its words never become control tokens. If
llama.cpp is installed, the ids are compared with its ids.
"""

from pathlib import Path
from random import Random

import pytest
from support import comparison
from support.fuzzing import fuzz

from metal_prefill.files import GGUFFile
from metal_prefill.text import Tokenizer

SPACE = "\u2581"  # a space in SentencePiece's vocabularies


# First and last code points of classes that tokenizers treat differently; none contains surrogates.
RANGES = (
    *((0x20, 0x7E), (0x30, 0x39), (0x41, 0x5A), (0x61, 0x7A)),  # ASCII: all, digits, letters
    *((0x00, 0x1F), (0x7F, 0x9F)),  # control characters
    *((0xA0, 0x24F), (0x370, 0x52F), (0x590, 0x6FF), (0x900, 0x97F), (0xE00, 0xE7F)),  # alphabets
    *((0x3040, 0x30FF), (0x4E00, 0x4EFF), (0xAC00, 0xACFF)),  # scripts of East Asia
    *((0x300, 0x36F), (0x2000, 0x206F), (0x2070, 0x209C), (0x2150, 0x2188)),  # marks, spaces, numbers
    *((0x2200, 0x22FF), (0x1D400, 0x1D4FF), (0x1F300, 0x1F64F), (0xFE00, 0xFE0F)),  # symbols
)
WHITE_SPACE: tuple[str, ...] = (*" \n\t\x0b\u00a0\u2028\u3000", "  ", "   ", "\n\n", "\r\n", " \n", "\n ")
CONTRACTIONS = ("'s", "'T", "'re", "'VE", "'m", "'ll", "'D", "\u2019s", "''")
SPELLINGS = (
    *comparison.BYTE_LEVEL_SPECIALS,
    *comparison.USER_DEFINED,
    *("<s>", "</s>", "<unk>", "<0x41>", "<0xFF>", "<|im_", "|>", "<"),
)


def _piece(random: Random) -> str:
    kind = random.random()
    if kind < 0.45:
        first, last = random.choice(RANGES)
        return "".join(chr(random.randint(first, last)) for _ in range(random.choice((1, 1, 2, 4, 9))))
    if kind < 0.65:
        return random.choice(WHITE_SPACE)
    if kind < 0.75:
        return random.choice(CONTRACTIONS)
    if kind < 0.85:
        return random.choice(SPELLINGS)
    written = random.choice(comparison.TEXTS)
    begin = random.randrange(len(written) + 1)
    return written[begin : begin + random.choice((1, 3, 12))]


def write_text(random: Random) -> str:
    """Make a text of up to 12 pieces, some of them repeated."""
    pieces = [_piece(random) for _ in range(random.randrange(1, 13))]
    return "".join(piece * random.choice((1, 1, 1, 1, 2, 7)) for piece in pieces)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("vocabularies")
    vocabularies = comparison.recorded()["vocabularies"]
    return {
        name: comparison.write_vocabulary(folder / f"{i}.gguf", vocabularies[variant.kind], variant)
        for i, (name, variant) in enumerate(comparison.TOKENIZERS.items())
    }


@pytest.fixture(scope="module")
def tokenizers(files: dict[str, Path]) -> dict[str, Tokenizer]:
    return {name: Tokenizer(GGUFFile(path)) for name, path in files.items()}


def write(random: Random) -> bytes:
    """Return a tokenizer's name and a text for it."""
    return f"{random.choice(tuple(comparison.TOKENIZERS))}\n{write_text(random)}".encode()


def test_texts_round_trip_without_control_tokens(tokenizers: dict[str, Tokenizer]) -> None:
    def run(path: Path, _: Random) -> None:
        name, text = path.read_bytes().decode().split("\n", 1)
        tokenizer, variant = tokenizers[name], comparison.TOKENIZERS[name]
        ids = tokenizer.encode(text, add_bos=False, parse_special=variant.parse_special)
        decoder = tokenizer.decoder(skip_special=False)
        streamed = "".join(decoder.step(i) for i in ids) + decoder.flush()
        whole = tokenizer.decode(ids, skip_special=False)
        if variant.kind == "llama" and variant.space_prefix:
            # A stream continues a text: it keeps the spaces that the tokenizer inserts before stretches
            # of plain text.
            assert streamed.replace(" ", "") == whole.replace(" ", "")
        else:
            assert streamed == whole
        if variant.kind == "gpt2" or SPACE not in text:
            assert whole == comparison.decoded(tokenizer, text, parse_special=variant.parse_special)
        if not variant.parse_special:
            assert not any(tokenizer.is_special(i) for i in ids)
            assert tokenizer.encode(text, add_bos=False, strict=True) == ids

    fuzz("text", 300, write, run)


def test_ids_match_llama_cpp(files: dict[str, Path], tokenizers: dict[str, Tokenizer]) -> None:
    llama_cpp = pytest.importorskip("llama_cpp", reason="llama.cpp is not installed")
    peers = {name: llama_cpp.Llama(str(path), vocab_only=True, verbose=False) for name, path in files.items()}

    def run(path: Path, _: Random) -> None:
        name, text = path.read_bytes().decode().split("\n", 1)
        special = comparison.TOKENIZERS[name].parse_special
        expected = peers[name].tokenize(text.encode(), add_bos=False, special=special)
        assert tokenizers[name].encode(text, add_bos=False, parse_special=special) == expected

    fuzz("text", 300, write, run)
    for peer in peers.values():
        peer.close()
