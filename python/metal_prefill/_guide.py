"""Constraints on a text: which tokens may come next, and which must. The rules are those of llguidance."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol
from weakref import WeakKeyDictionary, proxy

from metal_prefill.errors import ConstraintError, MissingExtraError

if TYPE_CHECKING:
    from metal_prefill.tokenizer import Tokenizer

# As models write JSON: one space after commas and colons, and no choice where space may be. What has no
# choice need not be sampled.
_JSON_STYLE = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
_SHOWN = 200  # characters of a message


class Vocabulary(Protocol):
    """The tokens of a model, as llguidance has prepared them."""


_prepared: WeakKeyDictionary[Tokenizer, Vocabulary] = WeakKeyDictionary()


def _vocabulary(tokenizer: Tokenizer) -> Vocabulary:
    """Prepare a tokenizer for constraints, which takes a moment the first time."""
    if tokenizer in _prepared:
        return _prepared[tokenizer]
    try:
        import llguidance
    except ImportError as error:
        raise MissingExtraError(
            "constrained output needs the package llguidance: pip install 'metal_prefill[guide]'"
        ) from error
    wrapped = llguidance.TokenizerWrapper(_Spelled(tokenizer))
    vocabulary: Vocabulary = llguidance.LLTokenizer(
        wrapped, n_vocab=tokenizer.vocab_size, eos_token=sorted(tokenizer.stop_ids) or None
    )
    _prepared[tokenizer] = vocabulary
    return vocabulary


class _Spelled:
    """The vocabulary as llguidance asks for it."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        ids = range(tokenizer.vocab_size)
        self._tokenizer = proxy(tokenizer)  # which the prepared vocabulary must not keep alive
        self.eos_token_id = min(tokenizer.stop_ids, default=0)
        self.bos_token_id = tokenizer.bos_id
        self.tokens = [tokenizer.token_bytes(i) for i in ids]
        self.special_token_ids = [i for i in ids if tokenizer.is_special(i)]

    def __call__(self, text: bytes | str) -> list[int]:
        if isinstance(text, bytes):
            text = text.decode("utf-8")
        ids: list[int] = self._tokenizer.encode(text, add_bos=False)
        return ids


class Guide:
    """The constraint of one text, token by token.

    Parameters
    ----------
    tokenizer
        Of the model.
    json_schema
        The text is JSON that a schema describes: a mapping, or its JSON.
    regex
        The whole text matches it.
    grammar
        Lark grammar, from its rule `start`.

    Raises
    ------
    ValueError
        More than one of them is given.
    ConstraintError
        It cannot be read, or nothing satisfies it.
    MissingExtraError
        llguidance is not installed.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        json_schema: Mapping[str, Any] | str | None = None,
        regex: str | None = None,
        grammar: str | None = None,
    ) -> None:
        given = {"json_schema": json_schema, "regex": regex, "grammar": grammar}
        names = [name for name, value in given.items() if value is not None]
        if len(names) != 1:
            raise ValueError(f"a text has one constraint at most, got {' and '.join(names)}")
        self._what = names[0]
        vocabulary: Any = _vocabulary(tokenizer)
        from llguidance import LLMatcher

        try:
            if json_schema is not None:
                schema = json_schema if isinstance(json_schema, str) else json.dumps(json_schema)
                source = LLMatcher.grammar_from_json_schema(schema, defaults=_JSON_STYLE)
            elif regex is not None:
                source = LLMatcher.grammar_from_regex(regex)
            else:
                source = LLMatcher.grammar_from_lark(str(grammar))
        except (TypeError, ValueError) as error:
            raise ConstraintError(f"{self._what}: {error}") from None
        self._matcher: Any = LLMatcher(vocabulary, source, log_level=0)
        self._unused: Any = self._matcher.deep_copy()
        self._taken: list[int] = []
        self._mask: bytes | None = None  # of the next token, once it is known
        self._check()
        self.mask()

    def _check(self) -> None:
        if self._matcher.is_error():
            message = " ".join(self._matcher.get_error().split())
            if message.startswith("NoExtensionBias"):
                message = "no text satisfies it"
            raise ConstraintError(f"{self._what}: {message[:_SHOWN]}")

    def take(self, token: int) -> None:
        """Continue with a token that the mask allows."""
        self._mask = None
        self._taken.append(token)
        self._matcher.consume_token(token)
        self._check()

    def forced(self) -> list[int]:
        """Return the tokens that must come next: at each of them the mask allows no other."""
        tokens: list[int] = self._matcher.compute_ff_tokens()
        return tokens

    def ahead(self, guesses: Sequence[int]) -> list[bytes]:
        """Return the mask after each guess, up to one that is not allowed or ends the text."""
        masks: list[bytes] = []
        if not guesses:
            return masks
        # With the matcher itself, not a copy: it remembers what it works out for a mask.
        matcher, taken = self._matcher, 0
        for guess in guesses[: matcher.validate_tokens(list(guesses))]:
            matcher.consume_token(guess)
            taken += 1
            if matcher.is_stopped():
                break
            mask = matcher.compute_bitmask()
            if matcher.is_error():  # such as too complex; not an error of the text
                break
            masks.append(mask)
        if not matcher.rollback(taken):
            self._matcher = self._unused.deep_copy()
            self._matcher.consume_tokens(self._taken)
        return masks

    def mask(self) -> bytes:
        """Return which tokens may come next, a bit for each, in words of 32 from the lowest bit on."""
        if self._mask is None:
            mask: bytes = self._matcher.compute_bitmask()
            self._check()
            self._mask = mask
        return self._mask

    @property
    def complete(self) -> bool:
        """Whether the constraint is met and nothing can follow."""
        return bool(self._matcher.is_stopped())

    @property
    def met(self) -> bool:
        """Whether the text may end here."""
        return bool(self._matcher.is_accepting())
