"""Clients of other projects and classes of `integrations`, each in an environment of its own."""

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.folders import model_folders
from support.folders.task_folders import DOCUMENTS, RANKERS, TEXTS
from support.places import ROOT
from support.programs import output
from support.scheduled_texts import alone, answer_alone
from support.servers.running_server import Running, running, running_with_template
from support.tools import HERMES

import metal_prefill
from metal_prefill import Model
from metal_prefill.conversion import convert

PROGRAMS = Path(__file__).parent / "programs"


def environment(client: str) -> Path:
    """Return the Python of an environment; without one, the test is skipped."""
    folder = ROOT / "build" / "clients" / client
    if not (folder / ".ready").exists():
        pytest.skip("needs an environment: make test-clients")
    return folder / "bin" / "python"


def within(client: str, code: str, *arguments: str | Path, **variables: str) -> str:
    """Return what code prints in an environment that finds this installation of the package, too."""
    python = environment(client)
    packages = str(Path(metal_prefill.__file__).parents[1])
    code = f"import sys; sys.path.append({packages!r}); {code}"
    env = {**os.environ, **variables}
    return output([python, "-c", code, *arguments], env=env, stdin=subprocess.DEVNULL)


@pytest.fixture(scope="module")
def reranker(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Path of a small cross-encoder."""
    folder = tmp_path_factory.mktemp("reranker")
    return convert(RANKERS["bert"](folder / "folder").write(), folder / "model.gguf")


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with running_with_template(HERMES) as server:
        yield server


def answers(client: str, *arguments: str, program: str = "") -> Any:
    """Return what the program of a client prints, as JSON."""
    python = environment(client)
    path = PROGRAMS / f"{program or client.replace('-', '_')}.py"
    home = {"NO_PROXY": "127.0.0.1", "no_proxy": "127.0.0.1", "PYTHONSAFEPATH": "1"}
    env = {**os.environ, **home, "LITELLM_LOCAL_MODEL_COST_MAP": "True"}
    return json.loads(output([python, path, *arguments], env=env).splitlines()[-1])


CITIES = ("Verona", "Padua")


def test_agents_of_openai_call_tools(server: Running) -> None:
    found = answers("openai-agents", server.url)
    for kind in ("OpenAIChatCompletionsModel", "OpenAIResponsesModel"):
        whole, streamed = found[kind]
        assert whole[0] == ["tool_call_item", "tool_call_output_item", "message_output_item"]
        assert whole[1] in CITIES
        assert streamed == whole


def test_agents_of_pydantic_return_types(server: Running) -> None:
    found = answers("pydantic-ai-slim", server.url)
    assert found["report"]["city"] in CITIES
    assert found["report"]["days"] in (1, 2)
    assert set(found["colors"]) <= {"red", "blue"}


def test_litellm_answers_calls_ranks_and_recognizes_a_long_prompt(
    server: Running, embedder: Path, reranker: Path
) -> None:
    with (
        Model(embedder, device="cpu") as vectors,
        Model(reranker, device="cpu") as ranks,
        running(vectors, names=["vectors"]) as second,
        running(ranks, names=["ranks"]) as third,
    ):
        found = answers("litellm", server.url, second.url, third.url, *DOCUMENTS)
        np.testing.assert_array_equal(np.array(found["vectors"], np.float32), vectors.embed(DOCUMENTS))
        best = ranks.rerank(DOCUMENTS[0], DOCUMENTS, 2)
        assert found["ranks"] == [[one.index, one.score] for one in best]
    assert found["same"]
    assert found["text"]
    assert found["call"][0] == "weather"
    assert found["call"][1]["city"] in CITIES
    assert found["overflow"] == "ContextWindowExceededError"


def test_langchain_answers_calls_and_recognizes_a_long_prompt(server: Running) -> None:
    found = answers("langchain-openai", server.url)
    assert found["same"]
    assert found["text"]
    assert found["after"]
    assert found["call"][0] == "weather"
    assert found["call"][1]["city"] in CITIES
    assert found["city"] in CITIES
    assert "ContextOverflow" in found["overflow"]


@pytest.mark.parametrize("client", ["openai", "openai-2"])
def test_openai_answers_types_and_calls(server: Running, client: str) -> None:
    found = answers(client, server.url, program="openai")
    assert (int(found["version"].split(".")[0]) < 3) == (client == "openai-2")
    assert found["same"]
    assert found["text"]
    assert found["call"] == found["streamed_call"]
    assert found["call"][0] == "Weather"
    assert found["parts"] > 1
    assert {found["call"][1], *found["cities"]} <= set(CITIES)
    assert found["after"]
    assert found["completion"]
    assert found["overflow"] == "context_length_exceeded"


def test_instructor_returns_types(server: Running) -> None:
    found = answers("instructor", server.url)
    for whole, partial in found.values():
        assert whole == partial
        assert whole["city"] in CITIES
        assert whole["days"] in (1, 2)


def test_cohere_ranks_documents(reranker: Path) -> None:
    with Model(reranker, device="cpu") as model, running(model, names=["ranks"]) as server:
        found = answers("cohere", server.url, DOCUMENTS[0], *DOCUMENTS)
        best = model.rerank(DOCUMENTS[0], DOCUMENTS, 2)
    assert found == [[one.index, one.score] for one in best]


def llm(folder: Path, *arguments: str) -> str:
    """Return what the command-line tool llm prints."""
    # The package of the model smollm2 is a plugin, too, which needs llama-cpp-python.
    plugins = {"LLM_USER_PATH": str(folder), "LLM_LOAD_PLUGINS": "metal_prefill"}
    return within("llm", "from llm.cli import cli; cli()", *arguments, **plugins)


def test_llm_continues_a_conversation_with_its_schema(tmp_path: Path) -> None:
    answer = llm(tmp_path, "-m", "metal_prefill/demo", "-o", "max_tokens", "9", "Who art thou?")
    with Model() as model:
        asked = [{"role": "user", "content": "Who art thou?"}]
        first = answer_alone(model, asked, 9)
        assert answer == f"{first}\n"
        asked += [{"role": "assistant", "content": first}, {"role": "user", "content": "And why?"}]
        second = answer_alone(model, asked, 9)
    assert llm(tmp_path, "-c", "-o", "max_tokens", "9", "And why?") == f"{second}\n"
    age = {"properties": {"age": {"enum": [9, 12]}}, "required": ["age"], "additionalProperties": False}
    schema = json.dumps({"type": "object", **age})
    typed = llm(tmp_path, "-m", "metal_prefill/demo", "--schema", schema, "How old art thou?")
    assert json.loads(typed)["age"] in (9, 12)


def test_llm_embeds_texts(tmp_path: Path, minilm_folder: Path) -> None:
    with Model(minilm_folder) as model:
        expected = model.embed(["A rose"])[0]
    found = json.loads(llm(tmp_path, "embed", "-m", "metal_prefill/minilm", "-c", "A rose"))
    np.testing.assert_allclose(found, expected, atol=1e-6)


def test_lines_in_lancedb_are_embedded_once_and_found(tmp_path: Path) -> None:
    lines = ["The king is dead.", "", "Long live the queen.", *(f"Row {i} of the table." for i in range(7))]
    example = str(ROOT / "examples" / "search_lancedb.py")
    code = f"import runpy; runpy.run_path({example!r}, run_name='__main__')"

    def found(database: str, count: int) -> list[str]:
        (tmp_path / "lines.txt").write_text("\n".join(lines[:count]))
        arguments = (tmp_path / "lines.txt", "Long live the queen", "--database", tmp_path / database)
        return within("lancedb", code, *arguments, "-n", "1", "--block", "4").splitlines()

    def stored(database: str) -> str:
        read = "import lancedb; t = lancedb.connect(sys.argv[1]).open_table('texts').to_arrow().to_pylist()"
        print_ = "print(sorted((row['text'], row['vector']) for row in t))"
        return within("lancedb", f"{read}; {print_}", tmp_path / database)

    whole = found("a", len(lines))
    assert whole[0] == "9 lines embedded"
    assert whole[1].endswith("  Long live the queen.")
    assert found("b", 4)[0] == "3 lines embedded"
    assert found("b", len(lines)) == ["6 lines embedded", *whole[1:]]
    assert found("b", len(lines))[0] == "0 lines embedded"
    assert stored("b") == stored("a")


PROMPTS = [DOCUMENTS[0], DOCUMENTS[1], DOCUMENTS[3]]
MESSAGES = [
    {"role": "system", "content": "Speak thou briefly."},
    {"role": "user", "content": "Who art thou?"},
]


def found_by(client: str, *arguments: str | Path) -> Any:
    """Return what a program prints as JSON."""
    program = str(PROGRAMS / f"{client.replace('-', '_')}.py")
    printed = within(client, f"import runpy; runpy.run_path({program!r}, run_name='__main__')", *arguments)
    return json.loads(printed.splitlines()[-1])


def test_langchain_classes_return_what_the_model_does(
    demo_path: Path, embedder: Path, reranker: Path
) -> None:
    found = found_by("langchain-core", demo_path, embedder, reranker, *PROMPTS)
    later = found.pop("asynchronous")
    assert {name: found[name] for name in later} == later
    with Model(demo_path, device="cpu") as model:
        answer = answer_alone(model, MESSAGES, 12)
        assert found["answer"] == found["streamed"] == answer
        assert found["stopped"] == answer.partition(" ")[0]
        assert found["stopped_by_word"] == [answer.partition(answer[4:8])[0]] * 3
        assert found["stops"] == ["\n\n", answer[4:8], "!"]
        assert found["tokens"] == len(model.tokenizer.encode(PROMPTS[0], add_bos=False))
        assert found["batch"] == [answer_alone(model, [{"role": "user", "content": p}], 12) for p in PROMPTS]
    assert found["typed"] in ("aye", "nay")
    assert found["schema"] == {"word": found["typed"]}
    check_vectors(found, embedder)
    check_ranks([[found["place"], found["relevance_score"]] for found in found["ranked"]], reranker)


def test_llama_index_classes_return_what_the_model_does(
    demo_path: Path, embedder: Path, reranker: Path
) -> None:
    found = found_by("llama-index-core", demo_path, embedder, reranker, *PROMPTS)
    later = found.pop("asynchronous")
    assert {name: found[name] for name in later} == later
    with Model(demo_path, device="cpu") as model:
        assert found["window"] == model.max_context
        assert [found["answer"]] * 2 == found["streamed"] == [answer_alone(model, MESSAGES, 12)] * 2
        text = "".join(model.generate("ROMEO:", 12))
        assert [found["text"]] * 2 == found["completed"] == [text] * 2
        assert found["batch"] == [alone(model, prompt, 12) for prompt in PROMPTS]
    check_vectors(found, embedder)
    check_ranks([[int(place), score] for place, score in found["ranked"]], reranker)


def check_ranks(found: list[Any], path: Path) -> None:
    with Model(path, device="cpu") as model:
        assert found == [[one.index, one.score] for one in model.rerank(PROMPTS[0], PROMPTS, 2)]


def check_vectors(found: dict[str, Any], path: Path) -> None:
    with Model(path, device="cpu") as model:
        np.testing.assert_array_equal(found["documents"], model.embed(PROMPTS, dimensions=8))
        (query,) = model.embed(PROMPTS[:1], dimensions=8, instruction="query")
        np.testing.assert_array_equal(found["query"], query)
        assert not np.array_equal(found["query"], found["documents"][0])


def test_mteb_scores_the_vectors_of_the_model(tmp_path: Path) -> None:
    folder = model_folders.bert(tmp_path / "folder", model_type="bert")
    folder.pool("mean_tokens")
    path = folder.write()
    texts = [*PROMPTS, *TEXTS[:2]]
    found = found_by("mteb", path, *texts)
    with Model(path, device="cpu") as model:
        vectors = model.embed(texts)
    places = np.argsort(np.argsort((vectors * np.roll(vectors, -1, axis=0)).sum(axis=1)))  # ranks
    assert found["name"] == str(path)
    assert abs(found["score"] - np.corrcoef(places, np.arange(len(texts)))[0, 1]) < 1e-6
