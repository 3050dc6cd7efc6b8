"""Endpoints ``/tokenize`` and ``/detokenize``."""

from metal_prefill.serve._chat import chat_tokens
from metal_prefill.serve._endpoint import Reply
from metal_prefill.serve._errors import ApiError
from metal_prefill.serve._forms import ChatForm, DetokenizeForm, TokenizeForm
from metal_prefill.serve._limits import Sender
from metal_prefill.serve._service import Service


async def tokenize(service: Service, form: TokenizeForm, reply: Reply, sender: Sender) -> None:
    """Return the tokens of a text (`prompt` or `content`) or of a conversation."""
    service.check_model(form.model)
    given = [value for value in (form.prompt, form.content, form.messages) if value is not None]
    if len(given) != 1:
        raise ApiError(f"pass exactly one of prompt, content and messages; got {len(given)}", param="prompt")
    tokenizer = service.model.tokenizer

    def encode() -> list[int]:
        if form.messages is not None:
            return chat_tokens(
                service,
                ChatForm(
                    messages=form.messages,
                    tools=form.tools,
                    chat_template_kwargs=form.chat_template_kwargs,
                    add_generation_prompt=form.add_generation_prompt,
                    continue_final_message=form.continue_final_message,
                ),
                fits=False,
            )
        adds = form.add_special_tokens is not False and form.add_special is not False
        text = form.prompt if form.prompt is not None else form.content or ""
        service.check_text(text, "content" if form.prompt is None else "prompt")
        parses = form.parse_special is not False
        return tokenizer.encode(text, add_bos=None if adds else False, parse_special=parses)

    ids = await service.prepare(encode)
    sender.turn.end()
    await reply.json({"tokens": ids, "count": len(ids), "max_model_len": service.model.max_context})


async def detokenize(service: Service, form: DetokenizeForm, reply: Reply, sender: Sender) -> None:
    """Return the text of tokens."""
    service.check_model(form.model)

    def decode() -> str:
        service.check_size(len(form.tokens), "tokens")
        token_bytes = service.model.tokenizer.token_bytes
        service.check_size(sum(len(token_bytes(token)) for token in form.tokens), "tokens")
        return service.model.tokenizer.decode(form.tokens)

    text = await service.prepare(decode)
    sender.turn.end()
    await reply.json({"prompt": text, "content": text})
