"""Models from the Hub: against a cache on the disk, and against a server that speaks the Hub's protocol."""

import json
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.files.hub_server import Hub, Repo, serve, use_hub
from support.folders import model_folders
from support.folders.entity_folders import RECORDED

from metal_prefill import HubError, Model, hub
from metal_prefill.hub import _download
from metal_prefill.hub._repository import safe_answers, within

FILES = {
    "README.md": b"# A model",
    "tiny.Q4_0.gguf": b"four bits",
    "tiny.Q8_0.gguf": b"eight bits",
    "more/tiny.F16.gguf": b"sixteen bits",
}

UNREACHABLE = "http://127.0.0.1:9"


class Client:
    """A user of the Hub with an empty cache."""

    def __init__(self, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.home, self._monkeypatch = home, monkeypatch

    def ask(self, *specs: str, url: str | None = None, offline: bool = False, **options: Any) -> list[Any]:
        """Return the path of each file or folder, or the message of an error.

        `url` replaces that of the Hub; `offline` is a setting of the user.
        """
        answers: list[Path | str] = []
        with self._monkeypatch.context() as patch:
            if url is not None:
                use_hub(patch, url, self.home)
            patch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", offline)
            for spec in specs:
                try:
                    answers.append(
                        hub.fetch(*spec.split(":"), **options) if options else hub.resolve_model(spec)
                    )
                except HubError as error:
                    answers.append(str(error))
        return answers


TOKENIZER = ("tokenizer.json", "tokenizer_config.json")


@pytest.fixture(scope="module")
def served() -> Iterator[Hub]:
    with serve({}) as hub_server:
        yield hub_server


@pytest.fixture
def server(served: Hub) -> Hub:
    """Return a Hub with these repositories alone."""
    served.repos = {
        "tiny/model": Repo(dict(FILES), revisions=("main", "v1")),
        "tiny/secret": Repo({"a.gguf": b"hidden"}, token="sesame"),
        "tiny/gated": Repo({"a.gguf": b"behind a gate"}, gated=True),
        "tiny/empty": Repo({"README.md": b"nothing here"}),
        "tiny/adapter": Repo({"adapter_config.json": b"{}", "adapter_model.safetensors": b""}),
    }
    served.requests.clear()
    return served


@pytest.fixture
def client(server: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Client:
    monkeypatch.delenv("HF_TOKEN", raising=False)
    monkeypatch.setattr("huggingface_hub.constants.HF_TOKEN_PATH", str(tmp_path / "token"))
    use_hub(monkeypatch, server.url, tmp_path / "home")
    return Client(tmp_path / "home", monkeypatch)


@pytest.mark.parametrize("name", ["q-00001-of-00003.gguf", "parts/q-00001-*", "parts/*"])
def test_all_parts_of_a_file_are_fetched(client: Client, server: Hub, name: str) -> None:
    folder = "" if "/" not in name else "parts/"
    files = {f"{folder}q-0000{i}-of-00003.gguf": bytes([i]) for i in (1, 2, 3)}
    server.repos["tiny/split"] = Repo({"README.md": b"", "other.gguf": b"x", **files})
    (first,) = client.ask(f"tiny/split:{name}")
    assert first.name == "q-00001-of-00003.gguf"
    found = {folder + path.name: path.read_bytes() for path in first.parent.glob("q-*")}
    assert found == files


def contents(folder: Path) -> dict[str, bytes]:
    return {p.relative_to(folder).as_posix(): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def test_a_model_folder_is_fetched_whole(client: Client, server: Hub) -> None:
    names = ("config.json", "tokenizer.json", "model.safetensors", "modules.json", "1_Pooling/config.json")
    adapter = "adapters/retrieval/adapter_"
    wanted = {name: b"{}" for name in (*names, f"{adapter}config.json", f"{adapter}model.safetensors")}
    others = {"pytorch_model.bin": b"x", "onnx/model.onnx": b"x", "model-1-of-2.safetensors": b"x"}
    server.repos["tiny/folder"] = Repo({**wanted, **others})
    (path,) = client.ask("tiny/folder")
    assert contents(path) == wanted
    server.requests.clear()
    assert client.ask("tiny/folder", offline=True) == [path]
    assert server.requests == []


@pytest.mark.parametrize("weights", ["model.safetensors", "pytorch_model.bin"])
def test_a_folder_of_gliner_is_fetched(client: Client, server: Hub, weights: str) -> None:
    names = ("gliner_config.json", "tokenizer.json", "labels_tokenizer/tokenizer.json")
    wanted = {**dict.fromkeys(names, b"{}"), weights: b"weights"}
    other = {} if weights == "pytorch_model.bin" else {"pytorch_model.bin": b"x"}
    server.repos["tiny/entities"] = Repo({**wanted, **other})
    (path,) = client.ask("tiny/entities")
    assert contents(path) == wanted


@pytest.mark.usefixtures("own_cache", "client")
def test_a_model_opens_a_repository_by_its_name(server: Hub, tmp_path: Path) -> None:
    folder = model_folders.llama(tmp_path / "made").write()
    server.repos["bard/plays"] = Repo({p.name: p.read_bytes() for p in folder.iterdir()})
    with Model(folder, device="cpu") as model, Model("bard/plays", device="cpu") as fetched:
        assert fetched.path.name.rpartition("-")[0] == "plays"
        assert fetched.forward_prompt([1, 2, 3]) == model.forward_prompt([1, 2, 3])


@pytest.mark.usefixtures("own_cache", "client")
@pytest.mark.parametrize("name", ["bert", "modernbert and bert"])
def test_a_folder_of_gliner_takes_what_it_lacks_from_its_encoders(
    server: Hub, tmp_path: Path, name: str
) -> None:
    folder = RECORDED[name](tmp_path / "made")
    path = folder.write()
    places = {"encoder": (folder.path, "model_name", "encoder_config")}
    if "labels_encoder" in folder.config:
        labels = folder.path / "labels_tokenizer"
        places["labels"] = (labels, "labels_encoder", "labels_encoder_config")
    config = dict(folder.config)
    for repo, (place, key, settings) in places.items():
        encoder = json.dumps(folder.config[settings]).encode()
        tokenizer = {name: (place / name).read_bytes() for name in TOKENIZER}
        server.repos[f"bard/{repo}"] = Repo({"config.json": encoder, "pytorch_model.bin": b"x", **tokenizer})
        config |= {key: f"bard/{repo}", settings: None}
    weights = (folder.path / "model.safetensors").read_bytes()
    server.repos["bard/entities"] = Repo(
        {"gliner_config.json": json.dumps(config).encode(), "model.safetensors": weights}
    )
    with Model(path, device="cpu") as model, Model("bard/entities", device="cpu") as fetched:
        found, expected = (
            opened.find_entities(["Ada was born"], ["person"], threshold=0.0) for opened in (fetched, model)
        )
        assert found == expected


def test_files_are_fetched_by_name_and_by_pattern(client: Client) -> None:
    specs = ["tiny/model:tiny.Q8_0.gguf", "tiny/model:*Q4_0.gguf", "tiny/model:more/*", "tiny/model:*F16*"]
    paths = client.ask(*specs)
    assert [p.read_bytes() for p in paths] == [b"eight bits", b"four bits", b"sixteen bits", b"sixteen bits"]
    assert [p.name for p in paths] == ["tiny.Q8_0.gguf", "tiny.Q4_0.gguf", "tiny.F16.gguf", "tiny.F16.gguf"]


@pytest.mark.parametrize("name", ["tiny.Q4_0.gguf", "*Q4_0.gguf"])
def test_a_cached_file_is_not_fetched_again(client: Client, server: Hub, name: str) -> None:
    first = client.ask(f"tiny/model:{name}")
    server.requests.clear()
    assert client.ask(f"tiny/model:{name}") == first
    assert not any(request.startswith("GET /tiny/model/resolve") for request in server.requests)
    assert "*" in name or server.requests == []


@pytest.mark.parametrize("how", [{"url": UNREACHABLE}, {"offline": True}], ids=["server down", "offline"])
def test_the_cache_is_used_without_the_hub(client: Client, server: Hub, how: dict[str, Any]) -> None:
    names = ("*Q4_0.gguf", "tiny.Q8_0.gguf", "more/*")
    fetched = client.ask(*(f"tiny/model:{name}" for name in names))
    server.requests.clear()
    specs = [f"tiny/model:{name}" for name in (*names, "*.gguf", "*Q2_K*")]
    *found, several, missing, other = client.ask(*specs, "tiny/other:*", **how)
    assert found == fetched
    assert "3 files" in several
    assert "in the cache" in missing
    assert "tiny.Q4_0.gguf" in missing
    assert "tiny/other is not in the cache, and the Hub is unreachable" in other
    assert server.requests == []


def test_unavailable_files_and_folders_are_reported(client: Client) -> None:
    messages = {
        "tiny/model": "tiny/model does not have config.json and model.safetensors; write tiny/model:FILE for "
        "one of more/tiny.F16.gguf, tiny.Q4_0.gguf, tiny.Q8_0.gguf",
        "tiny/empty": "tiny/empty does not have config.json and model.safetensors, and no GGUF files",
        "tiny/adapter": "tiny/adapter does not have config.json and model.safetensors, but an adapter "
        "(adapter_config.json), and no GGUF files",
        "tiny/absent": "repository tiny/absent does not exist on the Hub, or is private",
        "tiny/model:*.gguf": "3 files in tiny/model match '*.gguf'; name one of more/tiny.F16.gguf, "
        "tiny.Q4_0.gguf, tiny.Q8_0.gguf",
        "tiny/model:tiny.Q2_K.gguf": "no file in tiny/model matches 'tiny.Q2_K.gguf'; available models: "
        "more/tiny.F16.gguf, tiny.Q4_0.gguf, tiny.Q8_0.gguf",
        "tiny/absent:a.gguf": "repository tiny/absent does not exist on the Hub, or is private",
        "tiny/secret:a.gguf": "repository tiny/secret does not exist on the Hub, or is private",
        "tiny/gated:a.gguf": "tiny/gated is gated: request access on its page, then log in or set HF_TOKEN",
        "tiny/empty:*.gguf": "no file in tiny/empty matches '*.gguf'; it contains no GGUF files",
    }
    assert client.ask(*messages) == list(messages.values())


def test_revisions_and_tokens(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    (tagged,) = client.ask("tiny/model:*Q4_0.gguf", revision="v1")
    assert tagged.read_bytes() == b"four bits"
    assert client.ask("tiny/model:*Q4_0.gguf", revision="v9") == ["tiny/model has no revision 'v9'"]
    (secret,) = client.ask("tiny/secret:a.gguf", token="sesame")
    assert secret.read_bytes() == b"hidden"
    monkeypatch.setenv("HF_TOKEN", "sesame")
    assert client.ask("tiny/secret:*") == [secret]


def test_an_interrupted_download_is_resumed(client: Client, server: Hub) -> None:
    content = bytes(range(256)) * 400
    server.repos["tiny/long"] = Repo({"a.gguf": content}, cut={"a.gguf"})
    (path,) = client.ask("tiny/long:a.gguf")
    assert path.read_bytes() == content
    assert server.requests.count("GET /tiny/long/resolve/main/a.gguf") == 2


def test_a_file_removed_during_a_download_is_reported(client: Client, server: Hub) -> None:
    server.repos["tiny/hasty"] = Repo({}, vanished=("a.gguf",))
    (message,) = client.ask("tiny/hasty:*")
    assert "cannot download a.gguf from tiny/hasty" in message


@pytest.mark.usefixtures("client")
def test_a_model_is_opened_from_the_hub(server: Hub, demo_path: Path) -> None:
    server.repos["bard/plays"] = Repo({"bard.Q4_0.gguf": demo_path.read_bytes()})
    fetched = Model.from_pretrained("bard/plays", "*Q4_0.gguf", device="cpu", max_context=64)
    with fetched, Model(demo_path, device="cpu") as model:
        assert fetched.max_context == 64
        assert fetched.forward_prompt([1, 2, 3]) == model.forward_prompt([1, 2, 3])


@pytest.mark.parametrize(
    "spec",
    [
        *("/tmp/m.gguf", "dir/model.gguf", "/tmp/x:y.gguf", "a/b/c:d.gguf", "a/b:"),
        *("smollm", "SmolLM2", "smollm2.gguf", "./smollm2", Path("/tmp")),
    ],
)
def test_other_names_are_paths(spec: str | Path) -> None:
    assert hub.resolve_model(spec) == Path(spec)


def test_a_local_file_takes_precedence_over_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tiny").mkdir()
    (tmp_path / "tiny" / "model:a.gguf").write_bytes(b"local")
    assert hub.resolve_model("tiny/model:a.gguf").read_bytes() == b"local"


UNREACHABLE_HUB = "{} is not in the cache, and the Hub is unreachable: its "
NO_NAME = "cannot download a.gguf from {}: its "
# Answers of a hub, and errors about repositories whose files are not in the cache.
INVALID_ANSWERS: list[tuple[dict[str, Any], str]] = [
    *(
        ({"listing": listing}, UNREACHABLE_HUB)
        for listing in (
            b"<!DOCTYPE html><html><body>Log in to the hotel's network</body></html>",
            *(b"", b"[]", b"null", b"[" * 100_000, b'{"siblings": "\xff"}'),
            *(
                b'{"id": "tiny/odd", "siblings": %s}' % files
                for files in (
                    *(b"null", b"[{}]", b'[{"rfilename": ["a.gguf"]}]'),
                    *(b'[{"rfilename": "../../a.gguf"}]', b'[{"rfilename": "/a.gguf"}]'),
                )
            ),
        )
    ),
    ({"status": 500}, UNREACHABLE_HUB),
    *(
        ({"headers": {name: value}}, NO_NAME)
        for name, value in (
            *(("ETag", None), ("ETag", '""'), ("ETag", '".."'), ("ETag", '"../../outside"')),
            *(("ETag", 'W/"../../outside"'), ("ETag", '"/tmp/outside"'), ("ETag", '"..\\\\..\\\\outside"')),
            *(("ETag", '"' + "a" * 300 + '"'), ("X-Linked-ETag", '"../../outside"')),
            *(("X-Repo-Commit", None), ("X-Repo-Commit", "../../../../outside")),
        )
    ),
]


def test_invalid_answers_are_errors_unless_the_file_is_cached(client: Client, server: Hub) -> None:
    cached, others = ([f"tiny/{kind}{i}" for i in range(len(INVALID_ANSWERS))] for kind in ("known", "new"))
    server.repos.update((name, Repo({"a.gguf": b"content"})) for name in cached)
    first = client.ask(*(f"{name}:*.gguf" for name in cached))
    assert [path.read_bytes() for path in first] == [b"content"] * len(cached)
    kept = contents(client.home)
    for names in (cached, others):
        for name, (answers, _) in zip(names, INVALID_ANSWERS, strict=True):
            server.repos[name] = Repo({"a.gguf": b"content"}, **answers)
    server.requests.clear()
    assert client.ask(*(f"{name}:*.gguf" for name in cached)) == first
    found = client.ask(*(f"{name}:*.gguf" for name in others))
    for name, answer, (answers, message) in zip(others, found, INVALID_ANSWERS, strict=True):
        assert message.format(name) in str(answer), answers
    assert contents(client.home) == kept
    assert not any(request.startswith("GET") and "/resolve/" in request for request in server.requests)


def test_an_endless_listing_is_limited(client: Client, server: Hub) -> None:
    server.repos["tiny/endless"] = Repo({"a.gguf": b"a"}, endless=True, listing=b" " * 65536)
    (message,) = client.ask("tiny/endless:*.gguf")
    assert f"the Hub is unreachable: its response has more than {16 << 20} bytes" in message


def test_a_hub_that_never_answers_times_out(
    client: Client, server: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_ETAG_TIMEOUT", 2)
    server.repos["tiny/silent"] = Repo({"a.gguf": b"a"}, silent=True)
    (message,) = client.ask("tiny/silent:*.gguf")
    assert "the Hub is unreachable" in message


def test_a_call_that_takes_too_long_is_abandoned() -> None:
    never = threading.Event()
    with pytest.raises(TimeoutError, match=r"no complete response within 0.01 s"):
        within(0.01, never.wait)
    never.set()
    assert within(60, lambda: 7) == 7
    with pytest.raises(KeyError):
        within(60, lambda: os.environ["NO_SUCH_VARIABLE"])


def test_headers_that_change_between_requests_are_rejected(server: Hub, tmp_path: Path) -> None:
    """The library repeats the request, and may get another answer than the checked one."""
    library: Any = _download.import_hub()
    server.repos["tiny/hostile"] = Repo({"a.gguf": b"a"}, headers={"ETag": '"../../outside"'})

    def hooks() -> list[Any]:
        return list(library.utils.get_session().event_hooks["response"])

    before = hooks()
    with (
        pytest.raises(HubError, match=r"ETag '\"../../outside\"' is not a valid file name"),
        safe_answers(library),
    ):
        library.hf_hub_download("tiny/hostile", "a.gguf", cache_dir=tmp_path, endpoint=server.url)
    assert hooks() == before
    assert [p for p in tmp_path.rglob("*") if p.is_file()] == []
