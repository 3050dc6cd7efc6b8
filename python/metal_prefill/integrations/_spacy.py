"""Pipe of spaCy that finds entities with a model for token classification, once both packages are installed.

>>> import spacy
>>> nlp = spacy.blank("en")
>>> nlp.add_pipe("metal_prefill", config={"model": "dslim/bert-base-NER"})
>>> [(entity.text, entity.label_) for entity in nlp("Angela Merkel lives in Berlin.").ents]
[('Angela Merkel', 'PER'), ('Berlin', 'LOC')]
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from spacy.language import Language
from spacy.util import filter_spans, minibatch

from metal_prefill.model import Model


class EntityPipe:
    """Sets ``doc.ents``; documents of a batch go through the model together.

    An entity covers whole tokens of spaCy: one that ends within a token includes the token. Overlapping
    entities are reduced to the longest.
    """

    def __init__(self, model: Model, options: dict[str, Any]) -> None:
        self._model, self._options = model, options

    def __call__(self, doc: Any) -> Any:
        """Set the entities of a document, and return it."""
        (doc,) = self._labelled([doc])
        return doc

    def pipe(self, stream: Iterable[Any], *, batch_size: int) -> Iterator[Any]:
        """Set the entities of documents, and yield them."""
        for batch in minibatch(stream, size=batch_size):
            yield from self._labelled(batch)

    def _labelled(self, docs: list[Any]) -> list[Any]:
        for doc, entities in zip(
            docs, self._model.label_tokens([doc.text for doc in docs], **self._options), strict=True
        ):
            spans = (
                doc.char_span(entity.start, entity.end, label=entity.label, alignment_mode="expand")
                for entity in entities
            )
            doc.ents = filter_spans([span for span in spans if span is not None])
        return docs


@Language.factory(  # type: ignore[misc,untyped-decorator,unused-ignore]
    "metal_prefill",
    assigns=["doc.ents", "token.ent_iob", "token.ent_type"],
    default_config={"strategy": "first", "truncate": "error", "model_options": {}},
)
def create_pipe(
    nlp: Any, name: str, model: str, strategy: str, truncate: str, model_options: dict[str, Any]
) -> EntityPipe:
    """Return the pipe; strategy and truncate are those of :meth:`metal_prefill.Model.label_tokens`."""
    return EntityPipe(Model(model, **model_options), {"strategy": strategy, "truncate": truncate})
