"""The page at ``/``: static files that load without a key, and no more than that."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from starlette.applications import Starlette
from starlette.routing import Mount
from starlette.testclient import TestClient
from support.servers.running_server import Running, running

from metal_prefill import Model, serve

FOLDER = Path(serve.__file__).parent / "page"
FILES = sorted(path.name for path in FOLDER.iterdir())
PATHS = ["/", *(f"/page/{name}" for name in FILES if name != "index.html")]


@pytest.fixture(scope="module")
def locked(cpu_model: Model) -> Iterator[Running]:
    """Serve with an API key."""
    with running(cpu_model, api_keys=["secret"]) as server:
        yield server


def test_a_file_is_served_without_a_key_and_with_a_strict_policy(locked: Running) -> None:
    for path in PATHS:
        answer = locked.get(path)
        assert answer.status_code == 200
        name = path.removeprefix("/page/") if path != "/" else "index.html"
        assert answer.content == (FOLDER / name).read_bytes()
        media = {"html": "text/html", "css": "text/css", "js": "text/javascript", "svg": "image/svg+xml"}
        assert answer.headers["content-type"].startswith(media[name.rpartition(".")[2]])
        policy = dict(rule.split(" ", 1) for rule in answer.headers["content-security-policy"].split("; "))
        assert policy["default-src"] == "'none'"
        assert policy["script-src"] == policy["style-src"] == policy["connect-src"] == "'self'"
        assert policy["base-uri"] == policy["form-action"] == policy["frame-ancestors"] == "'none'"
        assert policy["require-trusted-types-for"] == "'script'"
        assert not re.search(r"unsafe|https?:|\*|data:", answer.headers["content-security-policy"])
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert answer.headers["referrer-policy"] == "no-referrer"
        assert answer.headers["cross-origin-opener-policy"] == "same-origin"
        assert "set-cookie" not in answer.headers


def test_everything_else_requires_a_key(locked: Running) -> None:
    for path in [
        *("/v1/models", "/metrics", "/activity", "/tokenize", "/page", "/page/", "/page/none.js"),
        *("/x/page/main.js", "/page/main.js/", "/page/../v1/models", "/page/%2e%2e/_keys.py", "//"),
    ]:
        assert locked.get(path).status_code == 401


def test_only_files_of_the_page_are_served(server: Running) -> None:
    for path in ("/page/index.html", "/page/../_keys.py", "/page/%2e%2e/_keys.py", "/page/"):
        assert server.get(path).status_code == 404
    assert server.post("/", {}).status_code == 405


def test_the_page_can_be_disabled(cpu_model: Model) -> None:
    with running(cpu_model, page=False, api_keys=["secret"]) as server:
        for path in PATHS:
            assert server.get(path).status_code == 401
            assert server.get(path, "secret").status_code == 404
        assert server.get("/activity", "secret").status_code == 200


def test_an_app_may_be_mounted_under_a_path(cpu_model: Model) -> None:
    outer = Starlette(
        routes=[Mount("/models/demo", serve.app(cpu_model, serve.Settings(api_keys=["secret"])))]
    )
    with TestClient(outer, "http://localhost") as client:
        html = client.get("/models/demo/").text
        for reference in ("health", *re.findall(r'(?:href|src)="([^"#]+)"', html)):
            assert client.get(f"/models/demo/{reference}").status_code == 200
        for path in ("v1/models", "v1/models/health", "health/health", "nothing/health"):
            assert client.get(f"/models/demo/{path}").status_code == 401
        answer = client.post(
            "/models/demo/v1/completions",
            json={"prompt": "ROMEO:", "max_tokens": 1},
            headers={"authorization": "Bearer secret"},
        )
        assert answer.status_code == 200


def test_files_refer_only_to_each_other() -> None:
    """They have no address of another server and no inline code or style, and parse no string as HTML."""
    forbidden = (
        r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function|DOMParser|srcdoc|"
        r"createContextualFragment|setHTML|<style|\sstyle=|\son\w+=\"|javascript:"
    )
    for name in FILES:
        text = (FOLDER / name).read_text(encoding="utf-8")
        found = re.findall(r"(?:https?:)?//[\w.-]+\.\w+[^\s\"']*", text)
        assert [url for url in found if url != "http://www.w3.org/2000/svg"] == [], name
        assert re.findall(forbidden, text) == [], name
        for module in re.findall(r'(?:from|import) "\./([^"]+)"', text):
            assert module in FILES, f"{name} imports {module}"
    html = (FOLDER / "index.html").read_text(encoding="utf-8")
    assert re.findall(r"<script(?![^>]* src=)", html) == []


def test_models_list_their_capabilities(server: Running, vector_server: Running) -> None:
    model = server.get("/v1/models").json()["data"][0]
    assert model["max_model_len"] == 1024
    assert model["device"].startswith("CPU")
    assert model["tasks"] == ["completion"]
    assert vector_server.get("/v1/models").json()["data"][0]["tasks"][:2] == ["completion", "embedding"]


def test_pooling_makes_vectors_of_any_model(cpu_model: Model) -> None:
    with running(cpu_model, pooling="mean") as server:
        assert server.get("/v1/models").json()["data"][0]["tasks"] == ["completion", "embedding"]
