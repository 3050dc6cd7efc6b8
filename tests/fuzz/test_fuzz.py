"""Random inputs that are almost right: model files, saved states, chat templates, arguments.

For any input, a call returns or raises an error of the package; it neither ends the process nor hangs. The
suite runs a few seconds of each with a fixed seed; ``make fuzz MINUTES=n`` runs longer, with a new seed each
time and under sanitizers. A failing input is kept in ``build/fuzz``; moved to ``regressions``, it is tried
first in all later runs.
"""

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.fuzzing import SECONDS, TIMEOUT, kept, regressions, rounds
from support.gguf_mutator import mutate, take_apart
from support.small_models import write
from support.state_mutator import mutate_state
from support.template_writer import write_template
from support.tiny_models import TINY_ENCODERS, TINY_EXPERTS, TINY_MODELS

from metal_prefill import ChatTemplateError, MetalPrefillError, Model
from metal_prefill.session import token_array
from metal_prefill.text import ChatTemplate

pytestmark = [
    pytest.mark.timeout(TIMEOUT),
    pytest.mark.filterwarnings("ignore::UserWarning"),  # of texts that lost their ends
]
FILES = {**TINY_MODELS, **TINY_EXPERTS, **TINY_ENCODERS}


@pytest.fixture(scope="module", params=TINY_MODELS)
def small(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("fuzz") / "m.gguf", TINY_MODELS[request.param])


@pytest.fixture(scope="module", params=FILES)
def model_file(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("fuzz") / "m.gguf", FILES[request.param])


def use_model(path: Path) -> None:
    """Use a model file as a user does, and accept only the package's own errors."""
    with suppress(MetalPrefillError), Model(path, device="cpu", threads=1, prefix_memory=0) as model:
        with suppress(MetalPrefillError):
            if model.config.has_head:
                assert not np.isnan(model.session().forward_prompt_logits([1, 2, 3])).any()
            elif model.engine.head.pooling == "mean":
                assert not np.isnan(model.embed(["Hello, world"], truncate="end")).any()
        with suppress(MetalPrefillError):
            tokenizer = model.tokenizer
            ids = tokenizer.encode("Hello, world 123 \u00e9", add_bos=False)
            tokenizer.decode(ids)
            tokenizer.apply_chat_template([{"role": "user", "content": "Hi"}])


def test_model_files(model_file: Path, tmp_path: Path) -> None:
    parts = take_apart(model_file)
    assert parts.assemble() == model_file.read_bytes()
    path = tmp_path / "m.gguf"

    def run(content: bytes) -> None:
        with kept("gguf", content):
            path.write_bytes(content)
            use_model(path)

    for content in regressions("gguf"):
        run(content)
    for random in rounds(75):
        run(mutate(parts, random))


def test_saved_states(small: Path, tmp_path: Path) -> None:
    path = tmp_path / "s.session"
    with Model(small, device="cpu", threads=1) as model:
        with model.session() as session:
            session.forward_prompt(range(5))
            session.save(path)
        plain = path.read_bytes()

        def run(content: bytes) -> None:
            with kept("state", content):
                path.write_bytes(content)
                with suppress(MetalPrefillError), model.load_session(path) as session:
                    session.forward_token(1)

        for content in regressions("state"):
            run(content)
        for random in rounds(150):
            run(mutate_state(plain, random))


def test_chat_templates() -> None:
    messages = [{"role": "user", "content": "Hi <|im_end|>"}, {"role": "assistant", "content": "Yes"}]

    def run(source: str) -> None:
        with kept("template", source.encode("utf-8", "surrogatepass")), suppress(ChatTemplateError):
            pieces = ChatTemplate(source, ["<|im_end|>", "<s>"]).render(messages, {"bos_token": "<s>"})
            assert all(isinstance(piece, str) for piece, _ in pieces)

    for content in regressions("template"):
        run(content.decode("utf-8", "surrogatepass"))
    for random in rounds(100):
        run(write_template(random))


def hypothesis_test(count: int) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Have the same inputs in each run of the suite, and others in each of ``make fuzz``."""
    from hypothesis import HealthCheck, settings

    return settings(
        max_examples=count + int(count * SECONDS / 10),
        derandomize=not SECONDS,
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )


def test_token_ids() -> None:
    pytest.importorskip("hypothesis", reason="needs the extra test")
    from hypothesis import given
    from hypothesis import strategies as st

    scalars = st.one_of(
        st.integers(),
        st.integers(0, 9),
        st.booleans(),
        st.floats(),
        st.text(max_size=2),
        st.none(),
        st.binary(max_size=2),
    )
    lists = st.lists(scalars, max_size=6)
    dtypes = st.sampled_from(
        ["i1", "u1", ">i4", "i8", "u8", "f2", "f8", "?", "m8[s]", "M8[s]", "O", "U2", "c16"]
    )

    @hypothesis_test(200)
    @given(
        st.one_of(
            lists,
            st.lists(st.integers(0, 9)),
            st.tuples(scalars, scalars),
            st.lists(lists, max_size=3),
            scalars,
        ),
        dtypes,
        st.booleans(),
    )
    def check(tokens: Any, dtype: str, as_array: bool) -> None:
        if as_array:
            try:
                with np.errstate(all="ignore"):
                    tokens = np.array(tokens, dtype)
            except (TypeError, ValueError, OverflowError):
                return
        try:
            array = token_array(tokens, 10)
        except (TypeError, ValueError):
            return
        # Accepted ids were integers of the vocabulary, unchanged and not booleans.
        assert array.dtype == np.int32
        assert array.tolist() == [int(t) for t in tokens]
        assert all(0 <= t < 10 and not isinstance(t, (bool, np.bool_, float)) for t in tokens)

    check()


CALLS = {"prompt": "forward_prompt", "token": "forward_token", "rewind": "rewind", "score": "score"}


def tokens_after(call: str, tokens: list[int], value: Any) -> list[int]:
    if call == "rewind":
        return tokens[:value]
    if call == "token":
        return [*tokens, value]
    return [*tokens, *(value if call == "prompt" else value[:-1])]  # the last scored token is not read


def test_calls_in_any_order(small: Path) -> None:
    """After any sequence of calls, a session has the tokens of those that succeeded."""
    pytest.importorskip("hypothesis", reason="needs the extra test")
    from hypothesis import given
    from hypothesis import strategies as st

    ids = st.lists(st.integers(-1, 290), max_size=20)
    step = st.one_of(
        st.tuples(st.just("prompt"), ids),
        st.tuples(st.just("token"), st.integers(-1, 290)),
        st.tuples(st.just("rewind"), st.integers(-2, 40)),
        st.tuples(st.just("score"), ids),
    )
    with Model(small, device="cpu", threads=1) as model:

        @hypothesis_test(60)
        @given(st.lists(step, max_size=8))
        def check(steps: list[tuple[str, Any]]) -> None:
            with model.session(max_context=32) as session:
                expected: list[int] = []
                for name, value in steps:
                    with suppress(ValueError):
                        getattr(session, CALLS[name])(value)
                        expected = tokens_after(name, expected, value)
                    assert session.tokens == expected
                    assert session.position == len(expected) <= 32

        check()
