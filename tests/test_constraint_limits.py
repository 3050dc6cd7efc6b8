"""Hostile constraints: each is a ConstraintError, within limits of size, depth, time and memory."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.forked import in_child

from metal_prefill import ConstraintError, Model
from metal_prefill.generation import _constraint, _constraint_check
from metal_prefill.generation._constraint import Constraint
from metal_prefill.generation._constraint_check import MOST_CHARACTERS, MOST_DEPTH, try_out

pytest.importorskip("llguidance", reason="needs the extra guide")

Source = dict[str, Any]


@pytest.fixture
def model(demo_path: Path) -> Iterator[Model]:
    """Open the bundled model, which has no constraint yet."""
    with Model(demo_path, device="cpu", threads=1) as model:
        yield model


def rules(n: int) -> Source:
    lines = [f"r{i}: r{i + 1}" for i in range(n)]
    return {"grammar": "\n".join(["start: r0", *lines, f'r{n}: "a"'])}


def terminals(n: int) -> Source:
    lines = [f'T{i}: "b" T{i + 1}' for i in reversed(range(n))]
    return {"grammar": "\n".join([f'T{n}: "a"', *lines, "start: T0"])}


def definitions(link: Callable[[Source], Any]) -> Callable[[int], Source]:
    """Return what makes a chain of definitions, each with the next as `link` puts it there."""

    def schema(n: int) -> Source:
        chain: Source = {f"d{i}": link({"$ref": f"#/$defs/d{i + 1}"}) for i in range(n)}
        return {"json_schema": {"$ref": "#/$defs/d0", "$defs": {**chain, f"d{n}": {"type": "null"}}}}

    return schema


CHAINS: dict[str, Callable[[int], Source]] = {
    "rules": rules,
    "terminals": terminals,
    "objects": definitions(lambda ref: {"type": "object", "properties": {"x": ref}, "required": ["x"]}),
    "references": definitions(lambda ref: ref),
    "anyOf": definitions(lambda ref: {"anyOf": [ref, {"type": "integer"}]}),
    "allOf": definitions(lambda ref: {"allOf": [ref]}),
    "oneOf": definitions(lambda ref: {"oneOf": [ref]}),
    "arrays": definitions(lambda ref: {"type": "array", "items": ref, "minItems": 1, "maxItems": 1}),
}


def refused(model: Model, **source: Any) -> str:
    """Return why a constraint is refused; afterwards another one still compiles."""
    with pytest.raises(ConstraintError) as caught:
        Constraint(model.tokenizer, **source)
    assert Constraint(model.tokenizer, regex="[ab]").mask()
    return str(caught.value)


@pytest.mark.parametrize("chain", CHAINS)
def test_a_chain_within_the_limit_compiles(model: Model, chain: str) -> None:
    assert Constraint(model.tokenizer, **CHAINS[chain](MOST_DEPTH - 3)).mask()


@pytest.mark.parametrize("chain", CHAINS)
def test_a_chain_beyond_the_limit_is_refused(model: Model, chain: str) -> None:
    message = refused(model, **CHAINS[chain](4000))
    assert f"each naming the next, exceeds the limit of {MOST_DEPTH}" in message


@pytest.mark.parametrize("chain", ["rules", "terminals", "objects", "references"])
def test_a_source_that_overflows_the_stack_ends_a_worker_only(
    model: Model, monkeypatch: pytest.MonkeyPatch, chain: str
) -> None:
    """Without a limit on depth, 30,000 of each would end the process."""
    monkeypatch.setattr(_constraint_check, "MOST_DEPTH", 10**6)
    monkeypatch.setattr(_constraint_check, "MOST_CHARACTERS", 10**8)
    message = refused(model, **CHAINS[chain](30_000))
    assert "recurses too deeply" in message or "too large" in message


def test_definitions_that_refer_to_themselves_are_no_chain(model: Model) -> None:
    tree = {"type": "object", "properties": {"next": {"$ref": "#/$defs/tree"}, "up": {"$ref": "#"}}}
    names = {f"d{i}": {"$ref": "#/$defs/tree"} for i in range(2 * MOST_DEPTH)}
    schema = {"anyOf": [{"$ref": f"#/$defs/{name}"} for name in names], "$defs": {**names, "tree": tree}}
    assert Constraint(model.tokenizer, json_schema=schema).mask()


def test_names_in_strings_patterns_and_comments_are_not_rules(model: Model) -> None:
    lines = [f'r{i}: "r{i + 1}" /r{i + 1}:/ // r{i + 1}' for i in range(2 * MOST_DEPTH)]
    grammar = "\n".join(["start: " + " | ".join(f"r{i}" for i in range(2 * MOST_DEPTH)), *lines])
    assert Constraint(model.tokenizer, grammar=grammar).mask()


def test_a_large_source_is_refused(model: Model) -> None:
    message = refused(model, regex="a" * (MOST_CHARACTERS + 1))
    assert message == "regex: 1,048,577 characters exceed the limit of 1,048,576"


def test_a_schema_that_is_nested_too_deeply_is_refused(model: Model) -> None:
    schema: Source = {"type": "null"}
    for _ in range(50_000):
        schema = {"not": schema}
    assert "recursion" in refused(model, json_schema=schema)
    text = '{"not":' * 50_000 + "{}" + "}" * 50_000
    assert "recursion" in refused(model, json_schema=text)


def test_the_time_of_a_source_is_bounded(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_constraint_check, "CPU_SECONDS", 0.01)
    with pytest.raises(
        ConstraintError, match=r"regex: compiling it takes more than 0\.01 s of processor time"
    ):
        Constraint(model.tokenizer, regex="(a{900}){900}")


@pytest.mark.skipif(sys.platform != "linux", reason="macOS ignores limits on memory")
def test_the_memory_of_a_source_is_bounded(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_constraint_check, "MEMORY", 4 << 20)
    with pytest.raises(ConstraintError, match="regex: compiling it takes more than 4 MiB of memory"):
        Constraint(model.tokenizer, regex="(a{900}){900}")


@pytest.mark.parametrize("source", ["regex", "error"])
def test_a_known_source_is_neither_tried_nor_compiled_again(
    model: Model, monkeypatch: pytest.MonkeyPatch, source: str
) -> None:
    sources = {"regex": {"regex": "[ab]{3}"}, "error": {"regex": "("}}

    def made() -> bytes | str:
        try:
            return Constraint(model.tokenizer, **sources[source]).mask()
        except ConstraintError as error:
            return str(error)

    first = made()
    monkeypatch.setattr(_constraint, "try_out", None)
    monkeypatch.setattr(_constraint, "compile_source", None)
    assert made() == first


def test_texts_of_one_constraint_do_not_share_its_state(model: Model) -> None:
    a, c = (model.tokenizer.encode(letter, add_bos=False)[0] for letter in "ac")
    texts = [Constraint(model.tokenizer, regex="[ab]c") for _ in range(2)]
    for text in texts:
        text.take(a)
    for text in (*texts, Constraint(model.tokenizer, regex="ac")):
        assert not text.complete
    texts[0].take(c)
    assert texts[0].complete
    assert not texts[1].complete


def test_few_constraints_are_kept(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_constraint, "MOST_KEPT", 2)
    tried: list[str] = []

    def counted(spelling: Any, kind: str, source: str) -> str:
        tried.append(source)
        return try_out(spelling, kind, source)

    monkeypatch.setattr(_constraint, "try_out", counted)
    for source in ("a", "b", "a", "c", "a", "b"):
        Constraint(model.tokenizer, regex=source)
    assert tried == ["a", "b", "c", "b"]


def test_many_threads_get_their_own_answers(model: Model) -> None:
    found: dict[int, str] = {}

    def compile_one(i: int) -> None:
        try:
            Constraint(model.tokenizer, regex="(" if i % 3 == 0 else f"a{i}")
            found[i] = ""
        except ConstraintError as error:
            found[i] = str(error)

    threads = [threading.Thread(target=compile_one, args=(i,)) for i in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [i for i in sorted(found) if "unclosed group" in found[i]] == [0, 3, 6, 9]
    assert [i for i in sorted(found) if not found[i]] == [1, 2, 4, 5, 7, 8, 10, 11]


def test_ctrl_c_while_a_worker_compiles_is_ctrl_c(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    Constraint(model.tokenizer, regex="a")

    def interrupted(self: Any) -> bytes:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(_constraint_check._Worker, "_answer", interrupted)
        with pytest.raises(KeyboardInterrupt):
            Constraint(model.tokenizer, regex="(")
    assert Constraint(model.tokenizer, regex="c").forced() == model.tokenizer.encode("c", add_bos=False)


def test_ctrl_c_while_a_string_is_written_in_tokens_is_ctrl_c(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tokenizer is called by llguidance, which takes an exception there for a failure."""
    constraint = Constraint(model.tokenizer, json_schema={"const": "a long text without a choice"})
    real = type(model.tokenizer).encode

    def interrupted(*arguments: Any, **named: Any) -> list[int]:
        signal.raise_signal(signal.SIGINT)
        return real(*arguments, **named)

    monkeypatch.setattr(type(model.tokenizer), "encode", interrupted)
    with pytest.raises(KeyboardInterrupt):
        constraint.forced()
    with pytest.raises(KeyboardInterrupt):
        Constraint(model.tokenizer, json_schema={"const": "another text"})


def test_a_forked_process_has_workers_of_its_own(model: Model) -> None:
    Constraint(model.tokenizer, regex="a")

    def compile_another() -> None:
        assert not _constraint_check._workers.idle
        assert Constraint(model.tokenizer, regex="b").mask()
        _constraint_check._workers.close()

    assert in_child(compile_another) == "None"
    assert Constraint(model.tokenizer, regex="c").mask()


def test_workers_end_with_the_process() -> None:
    program = (
        "from metal_prefill import Model\n"
        "from metal_prefill.generation import _constraint_check\n"
        "from metal_prefill.generation._constraint import Constraint\n"
        "Constraint(Model(device='cpu', threads=1).tokenizer, regex='a')\n"
        "print(_constraint_check._workers.idle[0]._process.pid)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stderr == ""
    with pytest.raises(ProcessLookupError):
        os.kill(int(done.stdout), 0)


def test_a_worker_that_cannot_start_is_named(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    _constraint_check._workers.close()
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(ConstraintError, match="did not start: /bin/false, status 1"):
        Constraint(model.tokenizer, regex="a")
    monkeypatch.undo()
    assert Constraint(model.tokenizer, regex="b").mask()


def test_the_depth_of_a_schema_takes_time_in_proportion_to_its_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts that contain one another and are all referred to are not walked for each reference."""
    schema: Source = {"type": "null"}
    for _ in range(300):
        schema = {"not": schema, "enum": [[]] * 300}
    schema["anyOf"] = [{"$ref": "#" + "/not" * i} for i in range(1, 300)]
    walked, real = 0, _constraint_check._inner

    def counted(part: Any, besides: Any = ()) -> list[Any]:
        nonlocal walked
        inner = real(part, besides)
        walked += len(inner)
        return inner

    monkeypatch.setattr(_constraint_check, "_inner", counted)
    _constraint_check._definitions(json.dumps(schema))
    assert walked < 2.1 * 300 * 303
