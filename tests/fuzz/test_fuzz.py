"""Random inputs that are almost right: model files, saved states, chat templates, arguments.

For any input, a call returns or raises an error of the package; it neither ends the process nor hangs. The
suite runs a few seconds of each with a fixed seed; ``make fuzz MINUTES=n`` runs longer, with a new seed each
time and under sanitizers. A failing input is kept in ``build/fuzz``; moved to ``regressions``, it is tried
first in all later runs.
"""

from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.files.gguf_mutator import mutate, take_apart
from support.files.state_mutator import mutate_state
from support.fuzzing import SECONDS, damaged, fuzz, sentence
from support.small_models import write
from support.tiny_models import TINY_ENCODERS, TINY_EXPERTS, TINY_MODELS

from metal_prefill import ChatTemplateError, MetalPrefillError, Model
from metal_prefill._support.arguments import token_array
from metal_prefill.text import ChatTemplate
from metal_prefill.text._template_limits import FILTERS, STR_METHODS

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")  # of texts that lost their ends
FILES = {**TINY_MODELS, **TINY_EXPERTS, **TINY_ENCODERS}


@pytest.fixture(scope="module", params=TINY_MODELS)
def opened(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Model]:
    path = write(tmp_path_factory.mktemp("fuzz") / "m.gguf", TINY_MODELS[request.param])
    with Model(path, device="cpu", threads=1) as model:
        yield model


@pytest.fixture(scope="module", params=FILES)
def model_file(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("fuzz") / "m.gguf", FILES[request.param])


def use_model(path: Path, _: Random) -> None:
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


def test_model_files(model_file: Path) -> None:
    parts = take_apart(model_file)
    assert parts.assemble() == model_file.read_bytes()
    fuzz("gguf", 40, partial(mutate, parts), use_model)


def test_saved_states(opened: Model, tmp_path: Path) -> None:
    path = tmp_path / "s.session"
    with opened.session() as session:
        session.forward_prompt(range(5))
        session.save(path)

    def run(path: Path, _: Random) -> None:
        with suppress(MetalPrefillError), opened.load_session(path) as session:
            session.forward_token(1)

    fuzz("state", 80, partial(mutate_state, path.read_bytes()), run)


# Templates, which may be valid or not.
TEMPLATE = {
    "statement": [
        *("text", "{% break %}", "{% continue %}", "{# #}", "{{ @value }}", "{{ @value }}"),
        "{% for x in @value %}@statement{% else %}@statement{% endfor %}",
        "{% for m in messages if @value %}@statement@statement{% endfor %}",
        "{% for x in range(99999) %}@statement{% endfor %}",
        "{% if @value %}@statement{% elif @value %}@statement{% endif %}",
        "{% set ns.x = @value %}@statement",
        "{% set x = @value %}@statement",
        "{% set x %}@statement{% endset %}",
        "{% macro f(x) %}@statement{% endmacro %}{{ f(@value) }}",
        "{% call f(@value) %}@statement{% endcall %}",
        "{% filter @filter %}@statement{% endfilter %}",
        "{% generation %}@statement{% endgeneration %}",
        "{% block b@digit %}@statement{% endblock %}",
    ],
    "value": [
        *("messages", "m", "x", "ns", "ns.x", "loop", "loop.index", "bos_token", "nothing", "caller", "f"),
        *("range", "0", "1", "-1", "3", "99999", "3000000000", "1e300", "''", "'a'", "'<|im_end|>'", "none"),
        *("true", "[]", "{}", "@value", "(@value @operator @value)", "(@value is @test)"),
        *("(@value | @filter)", "(@value | @filter(@value))", "(@value | @filter(@value, @value))"),
        *("(@value).@method()", "(@value).@method(@value)", "(@value).@method(@value, @value)"),
        *("[@value, @value]", "(@value, @value)", "{'a': @value, 'b': @value}", "dict(a=@value, b=@value)"),
        *("@value[@value]", "@value[@value:@value]", "(@value if @value else @value)", "range(@value)"),
    ],
    "operator": ["+", "-", "*", "/", "//", "%", "**", "~", "==", "<", "in", "and", "or"],
    "test": [
        *("defined", "none", "string", "mapping", "iterable"),
        *("eq(1)", "in([1])", "divisibleby(2)", "sameas(x)"),
    ],
    "filter": list(FILTERS),
    "method": list(STR_METHODS),
    "digit": list("012345678"),
}


def write_template(random: Random) -> str:
    source = "{% set ns = namespace(x='ab') %}"
    source += "".join(sentence(TEMPLATE, "statement", random, 4) for _ in range(random.randrange(1, 5)))
    if random.random() < 0.1:
        source = damaged(source, random, ("", "{%", "}}", "\ud800", "\0", "(", "'"))
    return source


def test_chat_templates() -> None:
    messages = [{"role": "user", "content": "Hi <|im_end|>"}, {"role": "assistant", "content": "Yes"}]

    def run(path: Path, _: Random) -> None:
        source = path.read_bytes().decode("utf-8", "surrogatepass")
        with suppress(ChatTemplateError):
            pieces = ChatTemplate(source, ["<|im_end|>", "<s>"]).render(messages, {"bos_token": "<s>"})
            assert all(isinstance(piece, str) for piece, _ in pieces)

    fuzz("template", 40, lambda random: write_template(random).encode("utf-8", "surrogatepass"), run)


# The same inputs in each run of the suite, and others in each of `make fuzz`.
ARGUMENTS = settings(
    max_examples=100 + int(20 * SECONDS),
    derandomize=not SECONDS,
    database=None,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
SCALARS = st.one_of(
    *(st.integers(), st.integers(0, 9), st.booleans(), st.floats(), st.none()),
    *(st.text("1\u0661\ud800", max_size=2), st.binary(max_size=2)),
)
LISTS = st.lists(SCALARS, max_size=6)
TOKENS = st.one_of(
    *(LISTS, st.lists(st.integers(0, 9)), st.tuples(SCALARS, SCALARS), st.lists(LISTS, max_size=3), SCALARS)
)
DTYPES = ["i1", "u1", ">i4", "i8", "u8", "f2", "f8", "?", "m8[s]", "M8[s]", "O", "U2", "c16"]


@ARGUMENTS
@given(TOKENS, st.sampled_from(DTYPES), st.booleans())
def test_token_ids(tokens: Any, dtype: str, as_array: bool) -> None:
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


def tokens_after(call: str, tokens: list[int], value: Any) -> list[int]:
    if call == "rewind":
        return tokens[:value]
    if call == "forward_token":
        return [*tokens, value]
    # The last token that is scored is not read.
    return [*tokens, *(value if call == "forward_prompt" else value[:-1])]


IDS = st.lists(st.integers(-1, 290), max_size=20)
STEPS = st.one_of(
    st.tuples(st.just("forward_prompt"), IDS),
    st.tuples(st.just("forward_token"), st.integers(-1, 290)),
    st.tuples(st.just("rewind"), st.integers(-2, 40)),
    st.tuples(st.just("score"), IDS),
)


@settings(ARGUMENTS, max_examples=30 + int(6 * SECONDS))
@given(steps=st.lists(STEPS, max_size=8))
def test_calls_in_any_order(opened: Model, steps: list[tuple[str, Any]]) -> None:
    """After any sequence of calls, a session has the tokens of those that succeeded."""
    with opened.session(max_context=32) as session:
        expected: list[int] = []
        for name, value in steps:
            with suppress(ValueError):
                getattr(session, name)(value)
                expected = tokens_after(name, expected, value)
            assert session.tokens == expected
            assert session.position == len(expected) <= 32
