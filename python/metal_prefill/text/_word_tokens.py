"""Tokens of ASCII text by its words, of which WordPiece makes tokens one by one."""

from __future__ import annotations

import re
from collections.abc import Iterable

from tokenizers import Tokenizer as Segmenter

from metal_prefill.text._encoder_vocabulary import MAX_WORD_CHARACTERS
from metal_prefill.text._segmentation import segmented

# BERT's tokenizer removes other control characters, and changes text beyond ASCII in several ways.
_OTHER = re.compile(r"[^\t\n\r -~]")
_WORD = re.compile(r"[0-9A-Za-z]+|[!-/:-@\[-`{-~]")  # each punctuation mark is a word


class WordTokens:
    """WordPiece by looking up words, in a quarter to a half of the time of the tokenizers library.

    A word that is a token becomes that token; the library converts the others of a text together. Words of
    texts are not remembered, or the time of a text would tell whether another one had the same words.

    Parameters
    ----------
    segmenter
        WordPiece segmenter.
    lowercase
        Whether it converts text to lower case.
    spelled
        Tokens that the segmenter recognizes by their spelling.
    """

    def __init__(self, segmenter: Segmenter, *, lowercase: bool, spelled: Iterable[str] = ()) -> None:
        self._spelled = tuple({text.lower().strip() for text in spelled})
        self._segmenter = segmenter
        self._lowercase = lowercase
        self._tokens = {
            word: token
            for word, token in segmenter.get_vocab().items()
            if len(word) <= MAX_WORD_CHARACTERS and _WORD.fullmatch(word)
        }

    def encode(self, text: str) -> list[int] | None:
        """Return the ids that the segmenter makes of a text; None if the text is not plain ASCII words."""
        if _OTHER.search(text):
            return None
        if self._spelled and any(map(text.lower().__contains__, self._spelled)):
            return None
        words, tokens = _WORD.findall(text.lower() if self._lowercase else text), self._tokens
        try:
            return [tokens[word] for word in words]
        except KeyError:
            made = self._segmented([word for word in dict.fromkeys(words) if word not in tokens])
        ids: list[int] = []
        for word in words:
            if word in tokens:
                ids.append(tokens[word])
            else:
                ids += made[word]
        return ids

    def _segmented(self, words: list[str]) -> dict[str, list[int]]:
        encoding = segmented(self._segmenter, " ".join(words))
        made: dict[str, list[int]] = {word: [] for word in words}
        for place, token in zip(encoding.word_ids, encoding.ids, strict=True):
            assert place is not None  # only special tokens have no word
            made[words[place]].append(token)
        return made
