"""Generative rerankers of sentence-transformers, which score a pair by the logits of two tokens."""

from pathlib import Path
from typing import Any

from metal_prefill.conversion._fields import Fields
from metal_prefill.conversion._folder_vocabulary import FolderVocabulary
from metal_prefill.conversion._modules import transformer_settings
from metal_prefill.errors import ChatTemplateError
from metal_prefill.files._metadata_keys import RERANK_TEMPLATE_KEY
from metal_prefill.text._chat_template import ChatTemplate

_ANSWERS = {"true_token_id": "yes", "false_token_id": "no"}
# Templates with these read the content of a message as a list of parts (sentence_transformers.base.modality).
_OF_PARTS = ("content[0]", "message.content[", ".type", "'type'", '"type"')


def rerank_metadata(folder: Path, place: Path, vocabulary: FolderVocabulary) -> dict[str, Any]:
    """Return the template of a pair, by its full key, with ``{query}`` and ``{document}``."""
    settings = Fields.read(place / "config.json")
    settings.require("module_input_name", ("causal_logits",), "causal_logits")
    for name, answer in _ANSWERS.items():
        if settings.values.get(name) != vocabulary.by_text.get(answer, -1):
            raise settings.unsupported(f"{name} is not the token {answer!r}")
    stated = Fields.read_if_present(folder / "config_sentence_transformers.json")
    default = stated.string("default_prompt_name", default="") if stated.has("default_prompt_name") else ""
    prompt = stated.object("prompts").values.get(default)
    variables: dict[str, Any] = {}
    for module in transformer_settings(folder):
        variables |= module.object("processing_kwargs").object("chat_template").values
    template = _rendered(settings, vocabulary, prompt if isinstance(prompt, str) else "", variables)
    if not all(part in template for part in ("{query}", "{document}")):
        raise settings.unsupported("the chat template has no place for messages of a query and a document")
    return {RERANK_TEMPLATE_KEY: template}


def _rendered(settings: Fields, vocabulary: FolderVocabulary, prompt: str, variables: dict[str, Any]) -> str:
    source = vocabulary.chat_template
    if not isinstance(source, str):
        raise settings.unsupported("needs a chat template")
    texts = {"system": prompt, "query": "{query}", "document": "{document}"}
    in_parts = any(pattern in source for pattern in _OF_PARTS)
    messages = [
        {"role": role, "content": [{"type": "text", "text": text}] if in_parts else text}
        for role, text in texts.items()
        if text
    ]
    try:
        pieces = ChatTemplate(source, ()).render(messages, variables)
    except ChatTemplateError as error:
        raise settings.unsupported(f"the chat template fails for a pair: {error}") from None
    return "".join(text for text, _ in pieces)
