"""Rules that turn texts into prompts: Unicode normalization, and texts that do not fit the context."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from tokenizers import normalizers

from metal_prefill._support.arguments import one_of
from metal_prefill.errors import GGUFError

if TYPE_CHECKING:
    from metal_prefill.text._tokenizer import Tokenizer

Item = TypeVar("Item")

# As in the tokenizers of models that normalize. `unicodedata.normalize` takes quadratic time for a sequence
# of combining marks.
_NFC = normalizers.NFC()


class errors_of:
    """Context that puts the name of a text before the message of a ValueError about it."""

    __slots__ = ("_name",)

    def __init__(self, name: str) -> None:
        self._name = name

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        # A GGUFError is one of the vocabulary, which is read for the first text.
        if isinstance(error, ValueError) and not isinstance(error, GGUFError):
            raise ValueError(f"{self._name}: {error}") from None


def numbered(items: Iterable[Item], noun: str) -> Iterator[Item]:
    """Yield items; the message of a ValueError about the next one begins with `noun` and its number."""
    done = 0
    try:
        for item in items:
            yield item
            done += 1
    except ValueError:
        with errors_of(f"{noun} {done}"):
            raise


class PromptRules(NamedTuple):
    """Options of how texts become prompts; see :meth:`metal_prefill.Model.embed`."""

    truncate: str = "error"
    unicode: str | None = None
    split_special_tokens: bool | None = None

    def checked(self) -> PromptRules:
        """Return the rules; raises ValueError for an unknown one."""
        one_of("truncate", self.truncate, {"error": None, "end": None})
        if self.unicode is not None:
            one_of("unicode", self.unicode, {"NFC": None})
        if self.split_special_tokens not in (True, False, None):
            kind = type(self.split_special_tokens).__name__
            raise TypeError(f"split_special_tokens must be a bool or None, got {kind}")
        return self

    def parses(self, tokenizer: Tokenizer) -> bool:
        """Return whether texts spell special tokens: by default those of encoders, as in transformers."""
        return not (tokenizer.causal if self.split_special_tokens is None else self.split_special_tokens)

    def normalized(self, text: str) -> str:
        """Return a text in the Unicode form asked for."""
        return text if self.unicode is None else _NFC.normalize_str(text)


def shortened(
    tokenizer: Tokenizer,
    text: str,
    excess_of: Callable[[str], int],  # returns by how many tokens the prompt of a text exceeds the context
) -> str:
    """Cut off the end of a text, so that the prompt that contains it fits."""
    while text and (excess := excess_of(text)) > 0:
        spans = tokenizer.encode_spans(text)
        # The tokens at the cut may change, and some are no whole characters: what is left is counted again.
        end = spans[max(len(spans) - excess, 0)].start if spans else 0
        text = text[: min(end, len(text) - 1)]
    return text


def cut_message(cut: Sequence[int], count: int, context: int, noun: str) -> str:
    """Return a message that counts and names the texts that lost their ends."""
    return (
        f"{len(cut)} of {count} {noun}s did not fit the context of {context} tokens and "
        f"lost their ends: {named(cut, noun)}"
    )


def warn_of_cut(cut: Sequence[int], count: int, context: int, noun: str) -> None:
    """Warn the caller of a model's method of the texts that lost their ends."""
    if cut:
        warnings.warn(cut_message(cut, count, context, noun), stacklevel=3)


def named(indices: Sequence[int], noun: str) -> str:
    """Name texts in a message: all of a few, the first ones of many."""
    return f"{noun} {', '.join(map(str, indices[:10]))}{', ...' if len(indices) > 10 else ''}"
