"""langchain-openai as a client: optional, because of its many dependencies."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.running_server import Running, running
from support.tools import HERMES, WEATHER

from metal_prefill import Model

langchain_openai = pytest.importorskip("langchain_openai")

PLACES = {"type": "object", "properties": {name: {"type": "number"} for name in ("north", "south")}}
CALLING = r'<tool_call>\{"name": "weather", "arguments": \{"city": "[a-z]{1,3}"\}\}</tool_call>'


def chat_model(server: Running, **options: Any) -> Any:
    """Return LangChain's client for conversations."""
    return langchain_openai.ChatOpenAI(
        **{
            "base_url": f"{server.url}/v1",
            "api_key": "none",
            "model": server.service.names[0],
            "temperature": 0,
            "max_tokens": 12,
            "max_retries": 0,
            **options,
        }
    )


@pytest.fixture(scope="module")
def expected(cpu_model: Model) -> str:
    """Text that the model writes alone."""
    ids = cpu_model.tokenizer.apply_chat_template([{"role": "user", "content": "Who art thou?"}])
    with cpu_model.session() as session:
        return "".join(session.generate(ids, 12, stop=cpu_model.tokenizer.chat_stop))


def test_an_answer_equals_that_of_the_model_alone(server: Running, expected: str) -> None:
    answer = chat_model(server).invoke("Who art thou?")
    assert answer.content == expected
    assert answer.usage_metadata["output_tokens"] == 12
    assert answer.response_metadata["finish_reason"] == "length"


def test_a_stream_equals_the_answer_and_has_usage(server: Running, expected: str) -> None:
    chunks = list(chat_model(server, stream_usage=True).stream("Who art thou?"))
    assert len(chunks) > 2
    whole = chunks[0]
    for chunk in chunks[1:]:
        whole += chunk
    assert whole.content == expected
    assert whole.usage_metadata["output_tokens"] == 12


def test_many_questions_are_batched(server: Running, expected: str) -> None:
    model = chat_model(server)
    assert [answer.content for answer in model.batch(["Who art thou?"] * 6)] == [expected] * 6
    answers = asyncio.run(model.abatch(["Who art thou?"] * 6))
    assert [answer.content for answer in answers] == [expected] * 6


def test_a_structured_answer_follows_its_schema(server: Running) -> None:
    schema = {
        "title": "Person",
        "type": "object",
        "properties": {"age": {"type": "integer", "minimum": 0, "maximum": 99}},
        "required": ["age"],
        "additionalProperties": False,
    }
    model = chat_model(server, max_tokens=40).with_structured_output(schema, method="json_schema")
    found = model.invoke("Who art thou?")
    assert set(found) == {"age"}
    assert 0 <= found["age"] <= 99


def test_tools_are_called(demo_path: Path) -> None:
    def calls(model: Any) -> Iterator[Any]:
        yield model.invoke("How is the weather?").tool_calls
        whole = None
        for chunk in model.stream("How is the weather?"):
            whole = chunk if whole is None else whole + chunk
        assert whole is not None
        yield whole.tool_calls

    with (
        pytest.MonkeyPatch.context() as patch,
        Model(demo_path, device="cpu") as model,
        running(model) as server,
    ):
        patch.setattr(model.tokenizer._templates, "_source", {"tokenizer.chat_template": HERMES}.get)
        client = chat_model(server, max_tokens=60, extra_body={"regex": CALLING}).bind_tools([WEATHER])
        for (call,) in calls(client):
            assert call["name"] == "weather"
            assert set(call["args"]) == {"city"}
            json.dumps(call["args"])


@pytest.mark.parametrize("max_tokens", [1, 8, 32])
def test_a_required_call_truncated_by_max_tokens_is_invalid(demo_path: Path, max_tokens: int) -> None:
    with (
        pytest.MonkeyPatch.context() as patch,
        Model(demo_path, device="cpu") as model,
        running(model) as server,
    ):
        patch.setattr(model.tokenizer._templates, "_source", {"tokenizer.chat_template": HERMES}.get)
        tool = {"name": "weather", "parameters": {**PLACES, "required": ["north", "south"]}}
        client = chat_model(server, max_tokens=max_tokens).bind_tools([tool], tool_choice="weather")
        answer = client.invoke("How is the weather?")
        (call,) = answer.invalid_tool_calls
        assert (call["name"], answer.tool_calls) == ("weather", [])
        assert answer.response_metadata["finish_reason"] == "length"

        # LangChain completes the arguments of streams itself; the finish reason shows that they are
        # incomplete.
        chunks = list(client.stream("How is the weather?"))
        whole = chunks[0]
        for chunk in chunks[1:]:
            whole += chunk
        (piece,) = whole.tool_call_chunks
        assert (piece["name"], piece["args"]) == ("weather", call["args"])
        assert whole.response_metadata["finish_reason"] == "length"


def test_vectors_match_the_model(vector_server: Running, vector_model: Model) -> None:
    # LangChain would count tokens by a tokenizer of OpenAI's, and send their ids.
    embeddings = langchain_openai.OpenAIEmbeddings(
        base_url=f"{vector_server.url}/v1",
        api_key="none",
        model=vector_server.service.names[0],
        check_embedding_ctx_length=False,
    )
    texts = ["a", "b c"]
    assert embeddings.embed_documents(texts) == vector_model.embed(texts).tolist()
