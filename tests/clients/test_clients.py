"""Clients of other projects work with the server as they are, each in an environment of its own.

``make test-clients`` creates the environments; without one, its test is skipped.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.places import ROOT
from support.running_server import Running, running_with_template
from support.tools import HERMES

import metal_prefill
from metal_prefill import Model

PROGRAMS = Path(__file__).parent / "programs"
ENVIRONMENTS = ROOT / "build" / "clients"


@pytest.fixture(scope="module")
def server(demo_path: Path) -> Iterator[Running]:
    with running_with_template(demo_path, HERMES) as (server, _):
        yield server


def answers(client: str, server: Running) -> Any:
    """Return what the program of a client prints, as JSON."""
    python = ENVIRONMENTS / client / "bin" / "python"
    if not (ENVIRONMENTS / client / ".ready").exists():
        pytest.skip("needs an environment: make test-clients")
    program = PROGRAMS / f"{client.replace('-', '_')}.py"
    home = {"NO_PROXY": "127.0.0.1", "no_proxy": "127.0.0.1", "PYTHONSAFEPATH": "1"}
    done = subprocess.run(
        [python, program, server.url],
        env={**os.environ, **home, "LITELLM_LOCAL_MODEL_COST_MAP": "True"},
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


CITIES = ("Verona", "Padua")


def test_agents_of_openai_call_tools(server: Running) -> None:
    found = answers("openai-agents", server)
    for kind in ("OpenAIChatCompletionsModel", "OpenAIResponsesModel"):
        whole, streamed = found[kind]
        assert whole[0] == ["tool_call_item", "tool_call_output_item", "message_output_item"]
        assert whole[1] in CITIES
        assert streamed == whole


def test_agents_of_pydantic_return_types(server: Running) -> None:
    found = answers("pydantic-ai-slim", server)
    assert found["report"]["city"] in CITIES
    assert found["report"]["days"] in (1, 2)
    assert set(found["colors"]) <= {"red", "blue"}


def test_litellm_answers_calls_and_recognizes_a_long_prompt(server: Running) -> None:
    found = answers("litellm", server)
    assert found["same"]
    assert found["text"]
    assert found["call"][0] == "weather"
    assert found["call"][1]["city"] in CITIES
    assert found["overflow"] == "ContextWindowExceededError"


def test_langchain_answers_calls_and_recognizes_a_long_prompt(server: Running) -> None:
    found = answers("langchain-openai", server)
    assert found["same"]
    assert found["text"]
    assert found["after"]
    assert found["call"][0] == "weather"
    assert found["call"][1]["city"] in CITIES
    assert found["city"] in CITIES
    assert "ContextOverflow" in found["overflow"]


def llm(folder: Path, *arguments: str) -> str:
    """Return what the command-line tool llm prints, with this installation of the package."""
    if not (ENVIRONMENTS / "llm" / ".ready").exists():
        pytest.skip("needs an environment: make test-clients")
    packages = str(Path(metal_prefill.__file__).parents[1])
    code = f"import sys; sys.path.append({packages!r}); from llm.cli import cli; cli()"
    done = subprocess.run(
        [ENVIRONMENTS / "llm" / "bin" / "python", "-c", code, *arguments],
        # The package of the model smollm2 is a plugin, too, which needs llama-cpp-python.
        env={**os.environ, "LLM_USER_PATH": str(folder), "LLM_LOAD_PLUGINS": "metal_prefill"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_llm_continues_a_conversation_with_its_schema(tmp_path: Path) -> None:
    answer = llm(tmp_path, "-m", "metal_prefill/demo", "-o", "max_tokens", "9", "Who art thou?")
    with Model() as model:
        asked = [{"role": "user", "content": "Who art thou?"}]
        options: dict[str, Any] = {"max_tokens": 9, "stop": model.tokenizer.chat_stop}
        first = "".join(model.generate(model.tokenizer.apply_chat_template(asked), **options))
        assert answer == f"{first}\n"
        asked += [{"role": "assistant", "content": first}, {"role": "user", "content": "And why?"}]
        second = "".join(model.generate(model.tokenizer.apply_chat_template(asked), **options))
    assert llm(tmp_path, "-c", "-o", "max_tokens", "9", "And why?") == f"{second}\n"
    age = {"properties": {"age": {"enum": [9, 12]}}, "required": ["age"], "additionalProperties": False}
    typed = llm(
        tmp_path,
        "-m",
        "metal_prefill/demo",
        "--schema",
        json.dumps({"type": "object", **age}),
        "How old art thou?",
    )
    assert json.loads(typed)["age"] in (9, 12)


def test_llm_embeds_texts(tmp_path: Path, minilm_folder: Path) -> None:
    with Model(minilm_folder) as model:
        expected = model.embed(["A rose"])[0]
    found = json.loads(llm(tmp_path, "embed", "-m", "metal_prefill/minilm", "-c", "A rose"))
    np.testing.assert_allclose(found, expected, atol=1e-6)
