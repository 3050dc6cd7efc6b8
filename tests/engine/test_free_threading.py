"""Threads that share objects without help from the GIL, and a Python without it, which importing leaves so.

Every Python runs the tests. Those whose objects the GIL protects can fail in free-threaded Python only.
"""

from __future__ import annotations

import asyncio
import os
import sys
import sysconfig
from pathlib import Path

import numpy as np
import pytest
from support.forked import in_child
from support.programs import finished
from support.threads import at_once

from metal_prefill import ClosedError, Model, _core
from metal_prefill.generation import Options
from metal_prefill.generation._sampling import core_sampler

THREADS = 4  # of `at_once`
ROUNDS = 8  # of races that take a moment only
PROMPT = list(range(100, 140))


@pytest.mark.skipif(not sysconfig.get_config_var("Py_GIL_DISABLED"), reason="this Python always has the GIL")
@pytest.mark.parametrize(
    "module", ["metal_prefill.model", "metal_prefill.serve", "_cpu_testing", "_metal_testing"]
)
def test_importing_leaves_the_gil_off(module: str) -> None:
    path = os.pathsep.join(entry for entry in sys.path if entry)
    if module.startswith("_"):
        pytest.importorskip(module)
    program = f"import sys, metal_prefill, {module}; print(sys._is_gil_enabled())"
    done = finished(
        [sys.executable, "-W", "error", "-c", program],
        env={k: v for k, v in os.environ.items() if k != "PYTHON_GIL"} | {"PYTHONPATH": path},
    )
    assert (done.returncode, done.stdout) == (0, "False\n"), done.stderr


def test_a_sampler_makes_one_choice_at_a_time() -> None:
    sampler = core_sampler(Options(temperature=1.0, repeat_penalty=1.1), 1, ())
    logits = np.zeros(64, np.float32)
    choices = 500

    def choose(number: int) -> None:
        for _ in range(choices):
            sampler.allow([bytes([255] * 8)])
            sampler.accept(sampler.choose(logits))
            assert len(sampler.reports) == 0

    at_once(choose)
    assert sampler.position == THREADS * choices


def test_drafts_are_looked_up_in_one_text_by_several_threads() -> None:
    lookup = _core.Lookup()
    appended = 500

    def append(number: int) -> None:
        for _ in range(appended):
            lookup.append(np.array([7], np.int32))
            assert set(lookup.after_match(4)) <= {7}

    at_once(append)
    assert lookup.matched == THREADS * appended - 1


def test_calls_of_threads_on_one_session_run_one_after_another(bundled: Model) -> None:
    session, alone = bundled.session(), bundled.session()
    calls = 12

    def append(number: int) -> None:
        for _ in range(calls):
            before = session.position
            session.forward_token_greedy(5)
            assert before < session.position <= THREADS * calls
            assert set(session.tokens) == {5}

    at_once(append)
    assert session.tokens == [5] * (THREADS * calls)
    alone.forward_prompt(session.tokens)
    assert session.forward_token(6).tobytes() == alone.forward_token(6).tobytes()


def test_a_request_of_several_threads_is_computed_once(bundled: Model) -> None:
    engine = bundled.engine
    for _ in range(ROUNDS):
        request = _core.Request.greedy(engine.session(), np.array(PROMPT[:3], np.int32))

        def compute(number: int, request: _core.Request = request) -> bool:
            try:
                engine.core.forward_batch([request])
            except ValueError:  # of all but the first
                return False
            return True

        assert sum(at_once(compute)) == 1


def test_closing_a_model_lets_other_threads_finish_or_raise(demo_path: Path) -> None:
    for _ in range(ROUNDS):
        model = Model(demo_path, device="cpu", threads=1)

        def use(number: int, model: Model = model) -> None:
            if number % 4 == 0:
                model.close()
                return
            for _ in range(5):
                assert repr(model).startswith("<metal_prefill.Model ")
                try:
                    model.session().forward_prompt(PROMPT[:2])
                except ClosedError:
                    return

        at_once(use)
        with pytest.raises(ClosedError):
            model.session()


def test_closing_a_file_lets_other_threads_read_or_raise(demo_path: Path) -> None:
    from metal_prefill.files import GGUFFile

    with GGUFFile(demo_path) as file:
        expected = file.metadata["tokenizer.ggml.tokens"]
    for _ in range(ROUNDS):
        file = GGUFFile(demo_path)

        def read(number: int, file: GGUFFile = file) -> None:
            if number == 0:
                file.close()
                return
            try:
                assert len(file.mapping) > 0
                assert file.metadata["tokenizer.ggml.tokens"] == expected
            except ClosedError:
                pass

        at_once(read)


def test_texts_of_threads_begin_one_constraint_together(bundled: Model) -> None:
    pytest.importorskip("llguidance")
    texts = at_once(
        lambda number: "".join(
            bundled.session().generate("A:", 12, regex="[0-9]{4}", seed=number, temperature=1)
        ),
        4,
    )
    assert all(len(text) == 4 and text.isdigit() for text in texts)


@pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning")
def test_threads_of_a_forked_process_share_its_first_engine_loop(bundled: Model) -> None:
    async def text(number: int) -> str:
        return "".join([piece async for piece in bundled.generate_async([number + 1], 3)])

    def texts() -> list[str]:
        return at_once(lambda number: asyncio.run(text(number)))

    expected = str(texts())
    assert [in_child(texts) for _ in range(5)] == [expected] * 5
