"""Models of the command-line tool llm, 0.36 or later, once both packages are installed.

``metal_prefill/demo`` is the bundled model and ``metal_prefill/smollm2`` that of a package; both take another
one as the option ``model``. ``metal_prefill/minilm`` embeds texts.

    llm -m metal_prefill/smollm2 "What is gravity?"
    llm -m metal_prefill/demo -o model owner/repo:file.gguf "Hello"
    llm embed -m metal_prefill/minilm -c "A rose"
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import lru_cache
from typing import Any

import llm
from llm.parts import TextPart
from pydantic import Field

from metal_prefill.model import Model

_NAMES = {"demo": None, "smollm2": "smollm2"}  # of models that write, and their files


class _Named:
    """A model of llm with a name and a default file."""

    def __init__(self, name: str, file: str | None) -> None:
        self.model_id = f"metal_prefill/{name}"
        self._file = file
        self._open = lru_cache(maxsize=1)(Model)  # the last one stays open


class ChatModel(_Named, llm.Model):  # type: ignore[misc,unused-ignore]
    """A model that answers, with the chat template of its file."""

    can_stream = True
    supports_schema = True

    class Options(llm.Options):  # type: ignore[misc,unused-ignore]
        """Options of an answer."""

        model: str | None = Field(description="file, folder, owner/repo or owner/repo:file", default=None)
        max_tokens: int = Field(description="Maximum length of the answer in tokens", default=512, ge=1)
        temperature: float = Field(description="Divisor of the logits; 0 is greedy", default=0.0, ge=0)
        seed: int | None = Field(description="Seed of the random choice", default=None, ge=0)

    def execute(self, prompt: Any, stream: bool, response: Any, conversation: Any) -> Iterator[str]:
        """Yield the parts of the answer to a prompt, which includes the messages before it."""
        options = prompt.options
        model = self._open(options.model or self._file)
        tokenizer = model.tokenizer
        ids = tokenizer.apply_chat_template(_messages(prompt.messages))
        how: dict[str, Any] = {"stop": tokenizer.chat_stop(), "temperature": options.temperature}
        if prompt.schema:
            how["json_schema"] = prompt.schema
        written = 0
        with model.session() as session:
            for piece in session.stream(ids, options.max_tokens, seed=options.seed, **how):
                written += 1
                if piece.text:
                    yield piece.text
        response.set_usage(input=len(ids), output=written)


def _messages(given: Iterable[Any]) -> list[dict[str, str]]:
    """Return messages as templates expect them; llm repeats the system message in each turn."""
    messages: list[dict[str, str]] = []
    for message in given:
        text = "".join(part.text for part in message.parts if isinstance(part, TextPart))
        made = {"role": message.role, "content": text}
        if message.role != "system" or made not in messages:
            messages.append(made)
    return messages


class TextModel(_Named, llm.EmbeddingModel):  # type: ignore[misc,unused-ignore]
    """A model that embeds texts."""

    supports_text = True
    batch_size = 256

    def embed_batch(self, items: Iterable[str | bytes]) -> Iterator[list[float]]:
        texts = [item if isinstance(item, str) else item.decode("utf-8") for item in items]
        yield from self._open(self._file).embed(texts).tolist()


@llm.hookimpl  # type: ignore[misc,untyped-decorator,unused-ignore]
def register_models(register: Callable[..., None]) -> None:
    for name, file in _NAMES.items():
        register(ChatModel(name, file))


@llm.hookimpl  # type: ignore[misc,untyped-decorator,unused-ignore]
def register_embedding_models(register: Callable[..., None]) -> None:
    register(TextModel("minilm", "minilm"))
