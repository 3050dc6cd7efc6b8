"""Texts on which tokenizers of encoders differ: any code point, accents, controls, very long words."""

from collections.abc import Iterator
from random import Random

COUNT = 1_000

# First and last code points.
_RANGES = (
    *((0x20, 0x7E), (0x41, 0x5A), (0x61, 0x7A), (0x30, 0x39)),  # ASCII: all, letters, digits
    *((0x00, 0x1F), (0x7F, 0x9F)),  # control characters
    # Letters with accents.
    *((0xA0, 0x17F), (0x180, 0x24F), (0x370, 0x3FF), (0x400, 0x52F), (0x1E00, 0x1FFF)),
    *((0x300, 0x36F), (0x1AB0, 0x1AFF), (0x20D0, 0x20FF), (0xFE20, 0xFE2F)),  # combining marks
    *((0x590, 0x6FF), (0x900, 0xDFF), (0xE00, 0xFFF)),  # Semitic, Indic, Thai, Tibetan
    *((0x3000, 0x30FF), (0x3400, 0x4DBF), (0x4E00, 0x9FFF), (0xAC00, 0xD7A3), (0xF900, 0xFAFF)),  # East Asian
    *((0x20000, 0x2A6DF), (0x2F800, 0x2FA1F)),  # ideographs of the second plane
    *((0x2000, 0x206F), (0x2070, 0x218F), (0x2190, 0x27BF), (0xFF00, 0xFFEF)),  # spaces, numbers, symbols
    *((0x1D400, 0x1D7FF), (0x1F100, 0x1F2FF), (0x1F300, 0x1FAFF)),  # mathematical letters, squares, emoji
    # Private, noncharacters, tags.
    *((0xE000, 0xF8FF), (0xFDD0, 0xFDEF), (0xFFF0, 0xFFFF), (0xE0000, 0xE01EF)),
    *((0x0, 0xD7FF), (0xE000, 0x10FFFF)),  # all except surrogates
)
_SPACES = (
    " \t\n\r\x0b\x0c\x1c\x1f\x85\u00a0\u1680\u2002\u2028\u2029\u202f"
    "\u205f\u3000\u200b\u2060\ufeff\u180e\u2581"
)
_ACCENTED = (
    "e\u0301 E\u0301 \u00e9 A\u030a \u212b i\u0307 \u0130 \u0131 \u00df \u1e9e \ufb01 "
    "\u01c5 \u03a3\u03c2 \u0345 \u1fb3"
)
_EMOJI = (
    *("\U0001f469\u200d\U0001f469\u200d\U0001f467", "\U0001f1e9\U0001f1ea", "\u2764\ufe0f", "1\ufe0f\u20e3"),
)
_WORDS = (
    "prefill processes whole prompts in one call; it decodes, scores, embeds and reranks unaffable "
    "Tokenizers don't can't it's Köln naïve façade 3.14 1,000 C++ e-mail foo_bar http://example.org "
    "$5 #tag @user"
)


def _piece(random: Random) -> str:
    kind = random.random()
    if kind < 0.35:
        first, last = random.choice(_RANGES)
        return "".join(chr(random.randint(first, last)) for _ in range(random.choice((1, 1, 2, 5))))
    if kind < 0.5:
        return random.choice(_SPACES) * random.choice((1, 1, 2, 9))
    if kind < 0.6:
        return random.choice(_ACCENTED.split())
    if kind < 0.65:
        return random.choice(_EMOJI)
    if kind < 0.68:  # a base with many marks
        return "a" + "".join(chr(random.randint(0x300, 0x36F)) for _ in range(random.choice((2, 10, 40))))
    if kind < 0.7:  # may exceed the maximum length of a word
        return random.choice(("x", "ab", "é", "中", "\u0301", "🎭")) * random.choice((40, 99, 100, 101, 300))
    word = random.choice(_WORDS.split())
    return random.choice((word, word.upper(), word.title(), word + " ", " " + word))


def hostile_text(random: Random) -> str:
    """Return a text of up to 12 pieces."""
    return "".join(_piece(random) for _ in range(random.randrange(1, 13)))


def hostile_texts(count: int = COUNT, seed: int = 33) -> Iterator[str]:
    """Yield hostile texts, starting with the empty text."""
    random = Random(seed)
    yield ""
    for _ in range(count - 1):
        yield hostile_text(random)
