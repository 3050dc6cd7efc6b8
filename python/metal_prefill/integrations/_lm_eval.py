"""Model class for EleutherAI's lm-eval.

Needs the extra ``eval`` (``pip install 'metal_prefill[eval]'``). Importing this module registers the model
``metal-prefill``; running it as a program runs ``lm_eval`` with that model::

    python -m metal_prefill.lm_eval --model metal-prefill --model_args path=model.gguf --tasks arc_easy

Requests are batched, shared contexts are computed once, and the head only for the rows of continuations.
"""

from __future__ import annotations

from typing import Any

from metal_prefill.errors import MissingExtraError
from metal_prefill.hub._local_file import resolve_model
from metal_prefill.integrations import _evaluation
from metal_prefill.model import Model

try:
    from lm_eval.api.model import LM
    from lm_eval.api.registry import register_model
except ImportError as error:
    raise MissingExtraError(f"evaluation needs: pip install 'metal_prefill[eval]' ({error})") from error

MAX_NEW_TOKENS = 256  # for tasks that set no limit


@register_model("metal-prefill", "metal_prefill")
class MetalPrefillLM(LM):  # type: ignore[misc]
    """Model for lm-eval.

    Parameters
    ----------
    path
        GGUF file, or ``owner/repo:file`` on the Hugging Face Hub; None for the bundled model.
    batch_size, max_batch_size
        Ignored: passes are filled automatically.
    device
        ``"cpu"`` or ``"metal"`` (``lm_eval --device``). Any other value selects ``"auto"``, because the
        harness passes a CUDA device by default.
    options
        Options of :class:`metal_prefill.Model`, such as ``threads`` and ``compute``.
    """

    def __init__(
        self,
        path: str | None = None,
        batch_size: Any = None,
        max_batch_size: Any = None,
        device: str | None = None,
        **options: Any,
    ) -> None:
        super().__init__()
        ours = device if device in ("cpu", "metal") else "auto"
        self.model = Model(None if path is None else resolve_model(path), device=ours, **options)
        self._templated = False

    def loglikelihood(self, requests: list[Any], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        """Return the log likelihood of each continuation, and whether greedy decoding would produce it."""
        pairs = [request.args for request in requests]
        return _evaluation.loglikelihood(self.model, pairs, templated=self._templated)

    def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = False) -> list[float]:
        """Return the log likelihood of each text."""
        return _evaluation.loglikelihood_rolling(self.model, [request.args[0] for request in requests])

    def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
        """Return the greedy continuation of each prompt."""
        parsed = []
        for request in requests:
            prompt, options = request.args
            if options.get("do_sample") or options.get("temperature", 0):
                raise ValueError("metal-prefill generates greedily: temperature must be 0")
            stop = options.get("until", ())
            limit = options.get("max_gen_toks", options.get("max_tokens", MAX_NEW_TOKENS))
            parsed.append((prompt, limit, (stop,) if isinstance(stop, str) else tuple(stop)))
        return _evaluation.generate_until(self.model, parsed, templated=self._templated)

    def apply_chat_template(
        self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
    ) -> str:
        """Render messages as text (``--apply_chat_template``).

        The harness concatenates texts before it requests their tokens. After the first call, text that spells
        a control token is therefore encoded as that token in all requests, as in the harness's other models.

        Parameters
        ----------
        chat_history
            Messages, each with ``role`` and ``content``.
        add_generation_prompt
            Append the assistant header. If False, end with the content of the last message, which the answer
            continues.
        """
        self._templated = True
        pieces = self.model.tokenizer.chat_pieces(chat_history, None, add_generation_prompt, {})
        text = "".join(piece for piece, _ in pieces)
        if add_generation_prompt:
            return text
        last = chat_history[-1]["content"].rstrip()
        return text[: text.rindex(last) + len(last)]

    def chat_template(self, chat_template: bool | str = False) -> str:
        """Return the file's chat template, of which the harness records a hash; "" if none is requested.

        Raises ValueError if the file has no chat template, or a template is selected by name.
        """
        if not chat_template:
            return ""
        if isinstance(chat_template, str):
            raise ValueError(
                f"--apply_chat_template takes no name, got {chat_template!r}: a file has one template"
            )
        if (source := self.model.tokenizer.chat_template) is None:
            name = self.model.engine.name
            raise ValueError(f"{name} has no chat template: leave out --apply_chat_template")
        return source

    @property
    def tokenizer_name(self) -> str:
        """Name of the tokenizer in the harness's cache keys."""
        return self.model.path.name
