"""Invalid arguments: errors name the value and the limit, and nothing changes."""

import os
import re
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.programs import finished

from metal_prefill import ContextOverflowError, MetalPrefillError, Model, UnsupportedModelError, engine, synth
from metal_prefill._support.arguments import integer, token_array, token_id
from metal_prefill.generation import Scheduler
from metal_prefill.gpu import _self_test

BOOL = np.bool_(True)


class Index:
    """An integer of somebody else's."""

    def __init__(self, value: int) -> None:
        self.value = value

    def __index__(self) -> int:
        return self.value


ACCEPTED: dict[str, Any] = {
    "list": [1, 2, 3],
    "tuple": (1, 2, 3),
    "range": range(1, 4),
    "int8": np.array([1, 2, 3], np.int8),
    "uint64": np.array([1, 2, 3], np.uint64),
    "big-endian": np.array([1, 2, 3], ">i4"),
    "strided": np.array([1, 0, 2, 0, 3, 0])[::2],
    "read-only": np.array([1, 2, 3]),
    "objects": np.array([1, 2, 3], object),
    "objects of NumPy": np.array([np.int64(1), np.uint8(2), 3], object),
    "objects with an index": np.array([Index(1), Index(2), Index(3)], object),
    "nothing masked": np.ma.array([1, 2, 3], mask=[False] * 3),
    "a list of NumPy's integers": [np.int32(1), np.uint64(2), 3],
}
ACCEPTED["read-only"].flags.writeable = False

REFUSED: dict[str, tuple[Any, type[Exception], str]] = {
    "durations": (np.array([1, 2], "m8[s]"), TypeError, r"must be integers, got timedelta64\[s\]"),
    "dates": (np.array([1, 2], "M8[s]"), TypeError, r"must be integers, got datetime64\[s\]"),
    "booleans": ([True, False], TypeError, "must be integers, got bool"),
    "a boolean among integers": ([True, 1], TypeError, "must be integers, got bool"),
    "a NumPy boolean among integers": ((1, BOOL), TypeError, "must be integers, got bool"),
    "an array of booleans": (np.array([True]), TypeError, "must be integers, got bool"),
    "floats": ([1.0, 2.0], TypeError, "must be integers, got float64"),
    "text": ("1" * 2000, TypeError, "^tokens must be a sequence of token ids, got str: encode text"),
    "None": (None, TypeError, "^tokens must be a sequence of token ids, got NoneType"),
    "a list of texts": (["1"], TypeError, "must be integers, got str"),
    "objects that are floats": (
        np.array([1, 2.5], object),
        TypeError,
        "index 1 must be an integer, got float",
    ),
    "objects that are booleans": (np.array([1, True], object), TypeError, "must be an integer, got bool"),
    "objects that are text": (np.array(["x"], object), TypeError, "index 0 must be an integer, got str"),
    "objects outside": (np.array([1, 10], object), ValueError, "token id 10 at index 1 is outside the voc"),
    "masked": (np.ma.array([1, 2], mask=[True, False]), TypeError, "an array with 1 masked"),
    "huge": ([1, 10**30], ValueError, rf"\b{10**30}\b"),
    "negative": ([3, -1], ValueError, "token id -1 at index 1 is outside the vocabulary of 10"),
    "too large, after many": ([3] * 20 + [10], ValueError, "token id 10 at index 20 is outside the voc"),
    "too large": ([3, 10], ValueError, "token id 10 at index 1 is outside the vocabulary of 10"),
    "too large for int32": (np.array([2**32 + 1]), ValueError, f"token id {2**32 + 1} at index 0"),
    "uint64 that wraps": (np.array([2**64 - 1], np.uint64), ValueError, f"token id {2**64 - 1} at index 0"),
    "two dimensions": ([[1, 2]], ValueError, "must be one-dimensional, got 2"),
    "ragged": ([[1], [2, 3]], ValueError, "cannot be converted to an array"),
    "a generator": ((i for i in range(3)), ValueError, "must be one-dimensional, got 0"),
    "nothing": ([], ValueError, "the prompt is empty"),
    "no array": (np.array([]), ValueError, "the prompt is empty"),
}


def test_any_sequence_of_integers_is_a_prompt(bundled: Model) -> None:
    with bundled.session() as session:
        for tokens in ACCEPTED.values():
            session.reset()
            session.forward_prompt(tokens)
            assert session.tokens == [1, 2, 3]
        for many in (range(1, 20), np.arange(1, 20, dtype=np.int16), np.arange(1, 20, dtype=np.uint64)):
            session.reset()
            session.forward_prompt(many)
            assert session.tokens == [*range(1, 20)]


def test_invalid_token_ids_are_rejected() -> None:
    for tokens, error, message in REFUSED.values():
        with pytest.raises(error, match=message):
            token_array(tokens, 10)


@pytest.mark.parametrize(
    "tokens", [range(10**20), range(10**9), np.broadcast_to(np.int8(0), 10**12)], ids=repr
)
def test_more_tokens_than_the_context_holds_are_rejected_early(tokens: Any, bundled: Model) -> None:
    """Reading 10^9 of them would take minutes, or all of the memory."""
    with bundled.session(max_context=64) as session:
        session.forward_prompt([1, 2])
        calls: list[Callable[[Any], Any]] = [
            session.forward_prompt,
            session.forward_prompt_logits,
            session.score,
            session.generate,
            lambda ids: bundled.score_many([ids]),
            lambda ids: bundled.forward_prompts([ids]),
            lambda ids: list(bundled.generate_many([ids])),
            lambda ids: bundled.forward_batch([session], [ids]),
        ]
        for call in calls:
            with pytest.raises(ContextOverflowError, match=r"tokens exceeds? the (context|limit) of"):
                call(tokens)
        assert session.tokens == [1, 2]


def test_the_last_token_that_is_scored_needs_no_room(bundled: Model) -> None:
    with bundled.session(max_context=8) as session:
        assert len(session.score(range(9))) == 8
        session.reset()
        with pytest.raises(ContextOverflowError, match=r"position 0 \+ 9 tokens exceeds the context of 8"):
            session.score(range(10))


@pytest.mark.parametrize(
    "value", [True, BOOL, 1.0, 1.5, "1", None, b"1", np.timedelta64(1, "s"), [1]], ids=repr
)
def test_non_integers_are_named(value: Any, bundled: Model) -> None:
    kind = type(value).__name__
    with pytest.raises(TypeError, match=rf"a token id must be an integer, got {kind}"):
        token_id(value, 10)
    with pytest.raises(TypeError, match=rf"threads must be an integer, got {kind}"):
        integer("threads", value, 1)
    for call in (bundled.forward_token, bundled.forward_token_greedy, bundled.tokenizer.token):
        with pytest.raises(TypeError, match=rf"a token id must be an integer, got {kind}"):
            call(value)
    with pytest.raises(TypeError, match=rf"a token id must be an integer, got {kind}"):
        bundled.tokenizer.decode([1, value])
    with pytest.raises(TypeError, match=rf"position must be an integer, got {kind}"):
        bundled.session().rewind(value)


@pytest.mark.parametrize("value", [np.int8(3), np.uint64(3), Index(3)], ids=lambda v: type(v).__name__)
def test_any_integer_type_is_accepted(value: Any) -> None:
    assert integer("n", value, 0, 3) == 3
    assert token_id(value, 4) == 3


@pytest.mark.parametrize(
    ("option", "value", "limit"),
    [
        ("max_context", 0, "must be at least 1"),
        ("max_context", 2**31, "is outside 1 to 1024, the model's context length"),
        ("max_context", 10**30, "is outside 1 to 1024, the model's context length"),
        ("threads", 0, "must be between 1 and 1024"),
        ("threads", 2**40, "must be between 1 and 1024"),
        ("chunk_tokens", 0, "must be between 1 and 2048"),
        ("chunk_tokens", 2**31, "must be between 1 and 2048"),
        ("kv_memory", 0, "must be between 1 and 9223372036854775807"),
        ("kv_memory", 2**64, "must be between 1 and 9223372036854775807"),
        ("prefix_memory", -1, "must be between 0 and 9223372036854775807"),
    ],
)
def test_out_of_range_options_are_named(demo_path: Path, option: str, value: int, limit: str) -> None:
    options: dict[str, Any] = {option: value}
    with pytest.raises(ValueError, match=rf"^{option}.*{limit}") as caught:
        Model(demo_path, device="cpu", **options)
    assert str(value) in str(caught.value)


@pytest.mark.parametrize("position", [-1, 3, 10**20, -(10**20)])
def test_an_invalid_position_is_named(bundled: Model, position: int) -> None:
    with bundled.session() as session:
        session.forward_prompt([1, 2])
        with pytest.raises(ValueError, match=rf"rewind to position {position}: .* of the session is 2"):
            session.rewind(position)
        assert session.position == 2


Call = Callable[[Model], object]
NUMBERS: list[tuple[Call, str]] = [
    (lambda m: m.generate([1], -1), "max_tokens must not be negative, got -1"),
    (lambda m: Scheduler(m, max_streams=0), "max_streams must be at least 1, got 0"),
    (lambda m: Scheduler(m).submit([1], 0), "max_tokens must be at least 1, got 0"),
    (lambda m: next(m.generate_many(["a"], 2, n=0)), "^n must be between 1 and 4096, got 0$"),
    (lambda m: next(m.generate_many(["a"], 2, n=2**70)), f"^n must be between 1 and 4096, got {2**70}$"),
    (lambda m: Scheduler(m).submit_answers("a", 4097, 2), "^n must be between 1 and 4096, got 4097$"),
]


def test_invalid_numbers_of_tokens_texts_and_streams_are_named(bundled: Model) -> None:
    for call, message in NUMBERS:
        with pytest.raises(ValueError, match=message):
            call(bundled)
    with pytest.raises(TypeError, match="max_tokens must be an integer, got float"):
        bundled.generate([1], 1.5)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("options", "error", "said"),
    [
        ({"temperature": "1"}, TypeError, "temperature must be a number, got str"),
        ({"temperature": 10**400}, ValueError, "temperature must be finite and not negative, got 1000"),
        ({"top_k": 1.5}, TypeError, "top_k must be an integer, got float"),
        ({"top_p": None}, TypeError, "top_p must be a number, got NoneType"),
        ({"repeat_penalty": 10**400}, ValueError, "repeat_penalty must be positive and finite, got 1000"),
        ({"presence_penalty": [1]}, TypeError, "presence_penalty must be a number, got list"),
        ({"logit_bias": [1]}, TypeError, "logit_bias must be a mapping of token ids to numbers, got list"),
        ({"logit_bias": {1: "2"}}, TypeError, "logit_bias of token 1 must be a number, got str"),
        ({"logit_bias": {1.5: 2}}, TypeError, "a token id of logit_bias must be an integer, got float"),
        ({"logit_bias": {1024: 2}}, ValueError, "token id 1024 is outside the vocabulary of 1024"),
        ({"temprature": 1}, TypeError, "'temprature' is not an option .* temperature,"),
        ({"seed": "3", "temperature": 1}, TypeError, "seed must be an integer, got str"),
        ({"stop": 5.5}, TypeError, "stop must be a str, a token id or a sequence of them, got float"),
        ({"stop": b"a"}, TypeError, "stop must be a str, a token id or a sequence of them, got bytes"),
        ({"stop": [5.5]}, TypeError, "a token id must be an integer, got float"),
        ({"stop": [True]}, TypeError, "a token id must be an integer, got bool"),
        ({"stop": [1 << 20]}, ValueError, "token id 1048576 is outside the vocabulary of 1024"),
        ({"stop": -1}, ValueError, "token id -1 is outside the vocabulary"),
        ({"stop": ["a", ""]}, ValueError, "a stop string is empty"),
        ({"min_tokens": -1}, ValueError, "min_tokens must not be negative, got -1"),
        ({"logprobs": -1}, ValueError, "logprobs must be between 0 and 1000, got -1"),
        ({"logprobs": 1001}, ValueError, "logprobs must be between 0 and 1000, got 1001"),
        ({"prompt_logprobs": True}, ValueError, "prompt_logprobs .* requires logprobs"),
    ],
)
def test_invalid_text_options_are_named(
    bundled: Model, options: dict[str, Any], error: type[Exception], said: str
) -> None:
    with pytest.raises(error, match=f"^{said}"):
        bundled.session().stream("a", 2, **options)


def test_max_tokens_may_exceed_the_context(bundled: Model) -> None:
    with bundled.session(max_context=16) as session:
        pieces = list(session.stream("ROMEO:", 10**30, min_tokens=10**30))
        assert pieces[-1].finish_reason == "context"
        assert session.position == 16


@pytest.mark.parametrize("text", [5, b"a", None, ["a"]], ids=lambda text: type(text).__name__)
def test_non_texts_are_named(bundled: Model, text: Any) -> None:
    with pytest.raises(TypeError, match=f"^text must be a str, got {type(text).__name__}$"):
        bundled.tokenizer.encode(text)


@pytest.mark.parametrize("name", ["layers", "vocab", "context", "ffn"])
def test_synthetic_models_have_limits(tmp_path: Path, name: str) -> None:
    options: dict[str, Any] = {name: 99999999999}
    with pytest.raises(ValueError, match=rf"{name}=99999999999: must be at most 2147483647"):
        synth.synthesize(tmp_path / "m.gguf", preset="tiny", **options)
    assert list(tmp_path.iterdir()) == []


def test_a_closed_output_is_reported_once() -> None:
    run = [sys.executable, "-m", "metal_prefill", "run", "-p", "ROMEO:", "-n", "3", "--device", "cpu"]
    done = finished(["sh", "-c", 'exec "$@" >&-', "sh", *run])
    assert (done.returncode, done.stderr) == (1, "error: standard output is closed\n")
    done = finished(["sh", "-c", 'exec "$@" 2>&-', "sh", *run])
    assert done.returncode == 0
    assert done.stdout.startswith("ROMEO:")


def test_an_error_without_a_message_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    from metal_prefill.cli import report

    class Nameless(MetalPrefillError):
        pass

    for error in (MemoryError(), Nameless()):
        report(error, {})
    assert capsys.readouterr().err == "error: MemoryError\nerror: Nameless\n"


@pytest.mark.parametrize(
    ("program", "code", "said"),
    [
        (["-m", "metal_prefill", "run", "-p", "ROMEO:"], 130, r"interrupted\n"),
        (["-c", "from metal_prefill import Model"], -signal.SIGINT, r"Traceback.*\nKeyboardInterrupt\n"),
    ],
    ids=["command", "library"],
)
def test_interrupting_an_import_raises_keyboard_interrupt(
    tmp_path: Path, program: list[str], code: int, said: str
) -> None:
    """NumPy makes an ImportError of it, which speaks of a bad installation."""
    (tmp_path / "numpy.py").write_text(
        "import os, signal\n"
        "try:\n"
        "    os.kill(os.getpid(), signal.SIGINT)\n"
        "    for _ in range(1000): pass\n"
        "except KeyboardInterrupt:\n"
        "    raise ImportError('your installation of NumPy is bad') from None\n"
    )
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    done = finished([sys.executable, *program], env={**os.environ, "PYTHONPATH": path})
    assert (done.returncode, done.stdout) == (code, "")
    assert re.fullmatch(said, done.stderr, re.DOTALL)
    assert "bad" not in done.stderr


def test_notes_must_be_text(bundled: Model, tmp_path: Path) -> None:
    with bundled.session() as session:
        session.forward_prompt([1])
        session.notes = 5  # type: ignore[assignment]
        with pytest.raises(TypeError, match=r"^notes must be a str, got int$"):
            session.save(tmp_path / "a.session")
        session.notes = "\ud800"
        with pytest.raises(ValueError, match="surrogates not allowed"):
            session.save(tmp_path / "a.session")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("value", [1, None, "yes", np.ones(2)])
def test_options_of_prompts_are_named(bundled: Model, value: Any) -> None:
    with bundled.session() as session:
        for call in (
            lambda **options: session.forward_prompt([1, 2], **options),
            lambda **options: session.forward_prompt_logits([1, 2], **options),
            lambda **options: bundled.forward_batch([session], [[1, 2]], **options),
        ):
            with pytest.raises(TypeError, match=f"^reuse must be a bool, got {type(value).__name__}$"):
                call(reuse=value)
            if value is not None:
                with pytest.raises(TypeError, match=r"^progress must be callable or None, got "):
                    call(progress=value)
        assert session.position == 0


def test_a_number_is_not_the_path_of_a_saved_session(bundled: Model, tmp_path: Path) -> None:
    with (tmp_path / "a").open("w") as file:
        with pytest.raises(TypeError, match="int"):
            bundled.load_session(file.fileno())  # type: ignore[arg-type]
        os.fstat(file.fileno())  # it is open


def test_a_model_that_the_gpu_does_not_take_opens_on_the_cpu_unless_the_gpu_is_named(
    demo_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*arguments: Any) -> None:
        raise UnsupportedModelError("the Metal engine has no such step")

    monkeypatch.delenv("METAL_PREFILL_DEVICE", raising=False)
    monkeypatch.setattr(engine, "resolve_device", lambda device: "metal")
    monkeypatch.setattr(_self_test, "build_checked", refuse)
    with Model(demo_path) as model:
        assert model.device.startswith("CPU")
    assert "using the CPU engine: the Metal engine has no such step" in caplog.text
    with pytest.raises(UnsupportedModelError, match="no such step"):
        Model(demo_path, device="metal")
