"""Settings of other programs in docs/tasks/clients.md: their addresses take what these programs send."""

import re
from typing import Any

import yaml
from support.places import ROOT
from support.servers.running_server import Running

DOCUMENTS = ["The king is dead.", "Long live the queen.", "A rose"]
RANKED = {"model": "ranks", "query": "king", "documents": DOCUMENTS}


def settings(heading: str) -> Any:
    text = (ROOT / "docs/tasks/clients.md").read_text(encoding="utf-8")
    (section,) = re.findall(rf"^## {heading}\n(.*?)(?=^## |\Z)", text, re.MULTILINE | re.DOTALL)
    (block,) = re.findall(r"^```yaml\n(.*?)^```$", section, re.MULTILINE | re.DOTALL)
    return yaml.safe_load(block)


def ask(server: Running, url: str, port: int, body: Any, add: str = "") -> None:
    """Send a request to an address with one of the page's ports, joined with a name as a client does."""
    host, path = url.split(f":{port}/")
    assert re.fullmatch(r"http://[\w.]+", host)
    answer = server.post(f"/{path.rstrip('/')}{add}", body, key="none")
    assert answer.status_code == 200, answer.text


def test_open_webui_chats_embeds_and_ranks(server: Running, vector_server: Running, ranker: Running) -> None:
    variables = settings("Open WebUI")["services"]["open-webui"]["environment"]
    body = {"model": "demo", "messages": [{"role": "user", "content": "Who art thou?"}]}
    # The answer, and its title.
    for more in ({"stream": True}, {"stream": False, "max_completion_tokens": 9}):
        ask(server, variables["OPENAI_API_BASE_URL"], 8080, {**body, **more}, "/chat/completions")
    vectors = {"input": DOCUMENTS, "model": "vectors"}
    ask(vector_server, variables["RAG_OPENAI_API_BASE_URL"], 8081, vectors, "/embeddings")
    ask(ranker, variables["RAG_EXTERNAL_RERANKER_URL"], 8082, {**RANKED, "top_n": len(DOCUMENTS)})


def test_continue_chats_completes_embeds_and_ranks(
    server: Running, vector_server: Running, ranker: Running
) -> None:
    models = {role: model for model in settings("Continue")["models"] for role in model["roles"]}
    options = {"max_tokens": 9, "temperature": 0, "stop": ["<|endoftext|>", "/src/", "```"], "stream": True}
    content = [{"type": "text", "text": "Who art thou?"}]
    body: dict[str, Any] = {"model": "demo", "messages": [{"role": "user", "content": content}], **options}
    body["stream_options"] = {"include_usage": True}
    assert models["chat"]["provider"] == "openai"
    ask(server, models["chat"]["apiBase"], 8080, body, "/chat/completions")
    assert models["autocomplete"]["useLegacyCompletionsEndpoint"]
    body = {"model": "demo", "prompt": "<|fim_prefix|>a<|fim_suffix|>b<|fim_middle|>", **options}
    ask(server, models["autocomplete"]["apiBase"], 8080, body, "/completions")
    vectors = {"input": DOCUMENTS, "model": "vectors", "encoding_format": "base64"}
    ask(vector_server, models["embed"]["apiBase"], 8081, vectors, "/embeddings")
    assert models["rerank"]["provider"] == "cohere"
    ask(ranker, models["rerank"]["apiBase"], 8082, RANKED, "/rerank")
