"""Unusual texts: scripts, spaces, marks and spellings of tokens, in any order."""

from random import Random

from support.comparison import BYTE_LEVEL_SPECIALS, USER_DEFINED, texts

# First and last code points of classes that tokenizers treat differently; none contains surrogates.
RANGES = (
    *((0x20, 0x7E), (0x30, 0x39), (0x41, 0x5A), (0x61, 0x7A)),  # ASCII: all, digits, letters
    *((0x00, 0x1F), (0x7F, 0x9F)),  # control characters
    *((0xA0, 0x24F), (0x370, 0x52F), (0x590, 0x6FF), (0x900, 0x97F), (0xE00, 0xE7F)),  # alphabets
    *((0x3040, 0x30FF), (0x4E00, 0x4EFF), (0xAC00, 0xACFF)),  # scripts of East Asia
    *((0x300, 0x36F), (0x2000, 0x206F), (0x2070, 0x209C), (0x2150, 0x2188)),  # marks, spaces, numbers
    *((0x2200, 0x22FF), (0x1D400, 0x1D4FF), (0x1F300, 0x1F64F), (0xFE00, 0xFE0F)),  # symbols
)
SPACES = (" ", "  ", "   ", "\n", "\n\n", "\r\n", "\t", " \n", "\n ", "\u00a0", "\u3000", "\u2028", "\x0b")
CONTRACTIONS = ("'s", "'T", "'re", "'VE", "'m", "'ll", "'D", "\u2019s", "''")
SPELLINGS = (
    *BYTE_LEVEL_SPECIALS,
    *USER_DEFINED,
    *("<s>", "</s>", "<unk>", "<0x41>", "<0xFF>", "<|im_", "|>", "<"),
)
WRITTEN = texts()


def _piece(random: Random) -> str:
    kind = random.random()
    if kind < 0.45:
        first, last = random.choice(RANGES)
        return "".join(chr(random.randint(first, last)) for _ in range(random.choice((1, 1, 2, 4, 9))))
    if kind < 0.65:
        return random.choice(SPACES)
    if kind < 0.75:
        return random.choice(CONTRACTIONS)
    if kind < 0.85:
        return random.choice(SPELLINGS)
    written = random.choice(WRITTEN)
    begin = random.randrange(len(written) + 1)
    return written[begin : begin + random.choice((1, 3, 12))]


def write_text(random: Random) -> str:
    """Make a text of up to 12 pieces, some of them repeated."""
    pieces = [_piece(random) for _ in range(random.randrange(1, 13))]
    return "".join(piece * random.choice((1, 1, 1, 1, 2, 7)) for piece in pieces)
