"""Common part of the encoders: opening, prompts, limits, batches."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeAlias

from metal_prefill._support.arguments import integer, items_of, one_of
from metal_prefill._support.tensors import as_tensor
from metal_prefill.engine import Engine
from metal_prefill.errors import MissingExtraError
from metal_prefill.hub._download import fetch_folder
from metal_prefill.hub._local_file import PACKAGED, REPOSITORY, packaged_model
from metal_prefill.model import Model
from metal_prefill.sentence_transformers.util import Array, UnsupportedName
from metal_prefill.tasks._embedding import EncodedTexts, encode_texts
from metal_prefill.tasks._prompts import PromptForm, PromptRules, TextRole, text_role

CUT = PromptRules(truncate="end")  # silently, as in sentence-transformers
ModelName: TypeAlias = "str | os.PathLike[str] | None"

_log = logging.getLogger("metal_prefill")
_DEVICES = {"auto": "auto", "cpu": "cpu", "mps": "metal", "metal": "metal"}
_TYPES = {  # options of `Model`
    **{name: {} for name in ("auto", "float16", "half")},
    "float32": {"compute": "f32", "kv_dtype": "f32"},
    "bfloat16": {"compute": "bf16"},
}
# Arguments of models, tokenizers and configurations that choose how PyTorch or ONNX computes.
_WITHOUT_EFFECT = (
    *("attn_implementation", "device_map", "low_cpu_mem_usage", "use_safetensors", "provider", "file_name"),
    *("export", "provider_options", "session_options", "trust_remote_code", "use_fast", "padding_side"),
    *("reference_compile", "add_pooling_layer", "unpad_inputs", "use_memory_efficient_attention", "padding"),
)


class Encoder:
    """A model of sentence-transformers, opened by :class:`metal_prefill.Model`.

    Arguments are those of sentence-transformers. A name without an owner belongs to the organization of the
    class. ``dtype`` in `model_kwargs` selects `compute` and `kv_dtype` of :class:`metal_prefill.Model`, and
    ``default_task`` its `adapter`. Code of repositories is never executed; `backend`, `config_kwargs` and
    `model_card_data` have no effect.

    Raises
    ------
    NotImplementedError
        An argument selects something that this package does not have.
    """

    organization = "sentence-transformers"

    def __init__(
        self,
        model_name_or_path: ModelName = None,
        *,
        modules: Any = None,
        device: Any = None,
        prompts: Mapping[str, str] | None = None,
        default_prompt_name: str | None = None,
        cache_folder: str | None = None,
        trust_remote_code: bool = False,
        revision: str | None = None,
        local_files_only: bool = False,
        token: str | bool | None = None,
        model_kwargs: Mapping[str, Any] | None = None,
        processor_kwargs: Mapping[str, Any] | None = None,
        tokenizer_kwargs: Mapping[str, Any] | None = None,
        config_kwargs: Mapping[str, Any] | None = None,
        model_card_data: Any = None,
        backend: str = "torch",
    ) -> None:
        if modules is not None or model_name_or_path is None:
            raise NotImplementedError("modules are not supported: name a model or its folder")
        for name, value in (("trust_remote_code", trust_remote_code), ("local_files_only", local_files_only)):
            if value:
                raise NotImplementedError(f"{name} is not supported; for local files, set HF_HUB_OFFLINE=1")
        if backend != "torch":
            _log.warning("backend %r is ignored: metal_prefill computes", backend)
        options = {**(model_kwargs or {}), **(tokenizer_kwargs or {}), **(processor_kwargs or {})}
        dtype = str(options.pop("dtype", options.pop("torch_dtype", "auto"))).removeprefix("torch.")
        max_length = options.pop("model_max_length", None)
        adapter = options.pop("default_task", None)  # name in jina-embeddings
        for key in {**options, **(config_kwargs or {})}:
            if key not in _WITHOUT_EFFECT:
                raise NotImplementedError(f"the argument {key!r} of models and tokenizers is not supported")
        source = {"revision": revision, "token": token, "cache_dir": cache_folder}
        path = _path_of(os.fspath(model_name_or_path), self.organization, source)
        device = one_of("device", "auto" if device is None else str(device), _DEVICES)
        self._options = {"path": path, "device": device, "adapter": adapter, **one_of("dtype", dtype, _TYPES)}
        self._model = Model(**self._options)
        if max_length is not None:
            self.max_seq_length = max_length
        self.prompts = {"query": "", "document": "", **self.engine.prompts.by_name, **(prompts or {})}
        self.default_prompt_name = default_prompt_name or self.engine.prompts.default
        self._prompt(None, None)  # raises an error for an unknown name
        names = {"model_name": os.fspath(model_name_or_path), "base_model": None, "base_model_revision": None}
        self.model_card_data = SimpleNamespace(**names)  # which other libraries, such as mteb, read

    @property
    def engine(self) -> Engine:
        """Engine of the model."""
        return self._model.engine

    @property
    def device(self) -> str:
        """Device of the model, ``"cpu"`` or ``"mps"``."""
        return "cpu" if self.engine.compute else "mps"

    @property
    def tokenizer(self) -> Any:
        """Tokenizer of the model."""
        return self._model.tokenizer

    @property
    def max_seq_length(self) -> int:
        """Number of tokens after which texts are cut, with those that begin and end every text."""
        return self._model.max_context

    @max_seq_length.setter
    def max_seq_length(self, value: int) -> None:
        limit = min(integer("max_seq_length", value, 1), self.engine.config.context_length)
        if limit != self.max_seq_length:
            self._model = Model(**self._options, max_context=limit)

    def get_max_seq_length(self) -> int:
        """Return :attr:`max_seq_length`."""
        return self.max_seq_length

    def get_embedding_dimension(self) -> int:
        """Return the length of vectors."""
        return self.engine.head.width

    def get_sentence_embedding_dimension(self) -> int:
        """Return the length of vectors."""
        return self.get_embedding_dimension()

    def eval(self) -> Encoder:
        """Return the model."""
        return self

    def to(self, device: Any) -> Encoder:
        """Return the model, which stays on its device."""
        self._check_call({}, device)
        return self

    def encode_query(
        self, inputs: Any = None, prompt_name: str | None = None, prompt: str | None = None, **options: Any
    ) -> Any:
        """Compute the vectors of queries, by default with the prompt ``"query"``; see `encode`."""
        return self.encode(inputs, prompt_name or "query", prompt, task="query", **options)

    def encode_document(
        self, inputs: Any = None, prompt_name: str | None = None, prompt: str | None = None, **options: Any
    ) -> Any:
        """Compute the vectors of documents, by default with the prompt ``"document"``; see `encode`."""
        return self.encode(inputs, prompt_name or "document", prompt, task="document", **options)

    def start_multi_process_pool(self, target_devices: Any = None) -> dict[str, Any]:
        """Return a pool without processes: the threads of the engine compute."""
        return {"input": None, "output": None, "processes": []}

    @staticmethod
    def stop_multi_process_pool(pool: Mapping[str, Any]) -> None:
        """Do nothing."""

    def __getattr__(self, name: str) -> Any:
        raise UnsupportedName(f"{type(self).__name__}.{name} is not supported")

    def _prompt(self, prompt: str | None, name: str | None) -> str:
        """Return the text before each text."""
        name = self.default_prompt_name if name is None else name
        if prompt is None and name is not None and name not in self.prompts:
            raise ValueError(f"the prompt {name!r} is not one of {list(self.prompts)}")
        return prompt if prompt is not None else "" if name is None else self.prompts[name]

    def _encoded(
        self, inputs: Any, prompt: str, batch_size: int, show: bool | None, role: TextRole | None = None
    ) -> tuple[Iterator[EncodedTexts], bool]:
        """Return the tokens of batches of texts, and whether there is a single text."""
        single = isinstance(inputs, str)
        parts = batches([inputs] if single else items_of("inputs", inputs), batch_size, show)
        role = (role or text_role(self.engine))._replace(form=PromptForm(prompt))
        return (encode_texts(self.engine, part, role, CUT) for part in parts), single

    def _check_call(self, options: Mapping[str, Any], device: Any) -> None:
        """Raise NotImplementedError for options and devices of a call that are not supported."""
        if unknown := options.keys() - {"task", "pool", "chunk_size"}:
            raise NotImplementedError(f"{type(self).__name__} does not support {', '.join(sorted(unknown))}")
        if (task := options.get("task")) not in (None, "query", "document", self._options["adapter"]):
            hint = f"model_kwargs={ {'default_task': task} }"
            raise NotImplementedError(f"task {task!r} is not that of the model: open one with {hint}")
        for name in device if isinstance(device, (list, tuple)) else [device or "auto"]:
            if one_of("device", str(name), _DEVICES) not in ("auto", _DEVICES[self.device]):
                raise NotImplementedError(f"a model on {self.device} does not move to {name}: open it there")


def batches(items: Sequence[Any], size: int, show: bool | None) -> Iterator[Sequence[Any]]:
    """Divide items into batches, with a progress bar on stderr if wanted or if messages are logged."""
    starts: Any = range(0, len(items), integer("batch_size", size, 1))
    if _log.isEnabledFor(logging.INFO) if show is None else show:
        from rich.console import Console
        from rich.progress import track

        starts = track(starts, "Batches", console=Console(stderr=True))
    return (items[start : start + size] for start in starts)


def returned(array: Array, single: bool, convert_to_numpy: bool, convert_to_tensor: bool) -> Any:
    """Return an array, a tensor or a list of tensors; of a single input its row."""
    result = as_tensor(array) if convert_to_tensor or not convert_to_numpy else array
    return result[0] if single else result if convert_to_tensor or convert_to_numpy else list(result)


def _path_of(name: str, organization: str, options: Mapping[str, Any]) -> str:
    """Return the path of a model, or its name on the Hub."""
    if Path(name).exists() or name in PACKAGED or name.endswith(".gguf") or ":" in name:
        return name
    for short, package in PACKAGED.items():
        if name in (package.title, f"{organization}/{package.title}"):
            try:
                packaged_model(short)
            except MissingExtraError:
                break
            return short
    name = name if "/" in name else f"{organization}/{name}"
    chosen = any(value is not None for value in options.values())
    return os.fspath(fetch_folder(name, **options)) if chosen and REPOSITORY.fullmatch(name) else name
