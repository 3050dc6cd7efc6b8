"""Settings of other programs in docs/tasks/clients.md, with the requests that these programs send."""

import base64
import re
from typing import Any

import numpy as np
import yaml
from support.places import ROOT
from support.running_server import Running, events, running

from metal_prefill import Model

DOCUMENTS = ["The king is dead.", "Long live the queen.", "A rose"]
KEY = {"authorization": "Bearer none"}


def settings(heading: str) -> Any:
    text = (ROOT / "docs/tasks/clients.md").read_text(encoding="utf-8")
    (section,) = re.findall(rf"^## {heading}\n(.*?)(?=^## |\Z)", text, re.MULTILINE | re.DOTALL)
    (block,) = re.findall(r"^```yaml\n(.*?)^```$", section, re.MULTILINE | re.DOTALL)
    return yaml.safe_load(block)


def path(url: str, port: int, add: str = "") -> str:
    """Return the path of an address with one of the page's ports, as a client joins it with a name."""
    found = re.fullmatch(rf"http://[\w.]+:{port}(/.*)", url)
    assert found is not None
    return found[1].rstrip("/") + add


def test_open_webui_chats_embeds_and_ranks(
    server: Running, vector_server: Running, vector_model: Model, ranker: tuple[Running, Model]
) -> None:
    variables = settings("Open WebUI")["services"]["open-webui"]["environment"]
    chat = path(variables["OPENAI_API_BASE_URL"], 8080)
    assert server.get(f"{chat}/models", headers=KEY).json()["data"][0]["id"] == "demo"
    body = {"model": "demo", "messages": [{"role": "user", "content": "Who art thou?"}]}
    answer = events(server.post(f"{chat}/chat/completions", {**body, "stream": True}, headers=KEY))
    assert "".join(part["choices"][0]["delta"].get("content") or "" for part in answer)
    asked = {**body, "stream": False, "max_completion_tokens": 9}
    title = server.post(f"{chat}/chat/completions", asked, headers=KEY)
    assert title.json()["choices"][0]["message"]["content"]
    rows = embedded(vector_server, path(variables["RAG_OPENAI_API_BASE_URL"], 8081, "/embeddings"))
    np.testing.assert_allclose(rows, vector_model.embed(DOCUMENTS), atol=1e-6)
    check_ranks(ranker, path(variables["RAG_EXTERNAL_RERANKER_URL"], 8082), top_n=len(DOCUMENTS))


def embedded(server: Running, where: str, **options: Any) -> list[Any]:
    name = server.get("/v1/models").json()["data"][0]["id"]
    made = server.post(where, {"input": DOCUMENTS, "model": name, **options}, headers=KEY)
    return [row["embedding"] for row in made.json()["data"]]


def check_ranks(ranker: tuple[Running, Model], where: str, **options: Any) -> None:
    server, model = ranker
    asked = {"model": "ranks", "query": "king", "documents": DOCUMENTS, **options}
    ranked = server.post(where, asked, headers=KEY).json()["results"]
    expected = {one.index: one.score for one in model.rerank("king", DOCUMENTS)}
    assert {one["index"]: one["relevance_score"] for one in ranked} == expected


def test_continue_chats_completes_embeds_and_ranks(
    server: Running, vector_server: Running, vector_model: Model, ranker: tuple[Running, Model]
) -> None:
    models = {role: model for model in settings("Continue")["models"] for role in model["roles"]}
    options = {"max_tokens": 9, "temperature": 0, "stop": ["<|endoftext|>", "/src/", "```"], "stream": True}
    content = [{"type": "text", "text": "Who art thou?"}]
    assert models["chat"]["provider"] == "openai"
    body = {"model": "demo", "messages": [{"role": "user", "content": content}], **options}
    body["stream_options"] = {"include_usage": True}
    where = path(models["chat"]["apiBase"], 8080, "/chat/completions")
    assert events(server.post(where, body, headers=KEY))[-1]["usage"]["completion_tokens"] == 9

    assert models["autocomplete"]["useLegacyCompletionsEndpoint"]
    body = {"model": "demo", "prompt": "<|fim_prefix|>a<|fim_suffix|>b<|fim_middle|>", **options}
    completed = events(
        server.post(path(models["autocomplete"]["apiBase"], 8080, "/completions"), body, headers=KEY)
    )
    assert "".join(part["choices"][0]["text"] for part in completed)

    where = path(models["embed"]["apiBase"], 8081, "/embeddings")
    rows = embedded(vector_server, where, encoding_format="base64")
    vectors = [np.frombuffer(base64.b64decode(row), np.float32) for row in rows]
    np.testing.assert_allclose(vectors, vector_model.embed(DOCUMENTS), atol=1e-6)
    assert models["rerank"]["provider"] == "cohere"
    check_ranks(ranker, path(models["rerank"]["apiBase"], 8082, "/rerank"))


def test_a_container_reaches_the_server_if_its_name_is_allowed(cpu_model: Model) -> None:
    base = settings("Open WebUI")["services"]["open-webui"]["environment"]["OPENAI_API_BASE_URL"]
    name = base.partition("//")[2].partition(":")[0]
    for allowed, status in (([], 403), ([name], 200)):
        with running(cpu_model, allowed_hosts=allowed) as server:
            assert server.get("/v1/models", headers={"host": f"{name}:{server.port}"}).status_code == status
