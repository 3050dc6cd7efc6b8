"""Common first mistakes: each is answered by a line with the remedy."""

import json
import logging
import os
import shutil
import socket
import sys
from pathlib import Path

import pytest
from support.files import hub_server
from support.folders import model_folders
from support.places import ROOT
from support.programs import Run, finished

from metal_prefill import Model, UnsupportedModelError, _core, engine, synth
from metal_prefill.cli import main


@pytest.fixture
def error_of(capsys: pytest.CaptureFixture[str]) -> Run:
    """Run a command that must fail, and return the one line that it prints."""

    def error_of(*arguments: str | Path) -> str:
        assert main([str(argument) for argument in arguments]) == 1
        captured = capsys.readouterr()
        assert captured.out == ""
        (line,) = captured.err.splitlines()
        assert line.startswith("error: ")
        return line

    return error_of


@pytest.fixture
def run_error(error_of: Run) -> Run:
    """Run a model that cannot be opened, and return the line that says why."""
    return lambda model: error_of("run", "-m", model, "-p", "a", "-n", "1")


def configure(folder: Path, *options: str, **environment: str) -> str:
    """Configure a build that fails; return CMake's output in one line."""
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"  # programs here must not be scripts of pyenv
    cmake, generator = shutil.which("cmake", path=path), shutil.which("ninja", path=path)
    if cmake is None or generator is None:
        pytest.skip("there is no cmake or no ninja")
    (folder / "programs").mkdir()
    (folder / "programs/ninja").symlink_to(generator)
    done = finished(
        [cmake, "-S", ROOT, "-B", folder / "build", "-G", "Ninja", *options],
        env={"PATH": str(folder / "programs"), "HOME": str(folder)} | environment,
    )
    assert done.returncode != 0
    return " ".join(done.stderr.split())


def test_a_missing_compiler_names_packages_to_install(tmp_path: Path) -> None:
    message = configure(tmp_path)
    assert "metal_prefill needs a C++ compiler, and there is none" in message
    for hint in ("apt-get install g++", "xcode-select --install", "--only-binary :all:"):
        assert hint in message


def test_an_old_compiler_is_reported_with_the_required_version(tmp_path: Path) -> None:
    compiler = shutil.which("c++")
    if compiler is None:
        pytest.skip("there is no compiler")
    identity = {"COMPILER": compiler, "COMPILER_ID_RUN": "1", "COMPILER_FORCED": "1"}
    identity |= {"COMPILER_ID": "GNU", "COMPILER_VERSION": "10.2.0"}
    options = [f"-DCMAKE_CXX_{name}={value}" for name, value in identity.items()]
    message = configure(tmp_path, *options, PATH=os.environ["PATH"])
    assert f"{compiler} is GNU 10.2.0, which is too old: install GCC 11 or clang 14" in message


POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a2146\nsize 98123456\n"
SAFETENSORS = (2).to_bytes(8, "little") + b"{}" + bytes(64)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (POINTER, "a Git LFS pointer to the file of 98,123,456 bytes: run `git lfs pull`"),
        (b"\n<!DOCTYPE html><html>Sign in</html>" + bytes(99), "has /resolve/ in place of /blob/"),
        (b'{"error": "Repository not found"}' + bytes(99), "JSON text, such as a server's error message"),
        (SAFETENSORS, "a safetensors file: give its folder"),
        (b"PK\x03\x04" + bytes(99), "a ZIP archive or a PyTorch checkpoint"),
        (b"\x1f\x8b" + bytes(99), "gunzip"),
        (b"tjgg" + bytes(99), "in a format older than GGUF"),
        (b"", "the file is empty"),
    ],
    ids=["LFS", "HTML", "JSON", "safetensors", "ZIP", "gzip", "GGML", "empty"],
)
def test_a_file_of_another_format_is_named(
    tmp_path: Path, run_error: Run, content: bytes, message: str
) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(content)
    line = run_error(path)
    assert line.startswith(f"error: {path}: ")
    assert message in line


@pytest.mark.parametrize("name", ["model.safetensors", "tokenizer.json"])
def test_a_file_of_a_folder_that_was_not_downloaded_is_named(
    tmp_path: Path, run_error: Run, name: str
) -> None:
    folder = model_folders.bert(tmp_path / "folder").write()
    for content, message in (
        (POINTER, "but a Git LFS pointer to the file of 98,123,456 bytes: run `git lfs pull`"),
        (b"<!DOCTYPE html><html>Sign in</html>", "but a web page: download the file itself"),
    ):
        (folder / name).write_bytes(content)
        line = run_error(folder)
        assert line.startswith(f"error: {folder / name}: is not ")
        assert message in line


def test_an_mlx_folder_is_rejected_with_an_alternative(tmp_path: Path, run_error: Run) -> None:
    settings = {"model_type": "llama", "architectures": ["LlamaForCausalLM"]}
    (tmp_path / "model.safetensors").write_bytes(SAFETENSORS)
    for key, value, method in (
        ("quantization", {"group_size": 64, "bits": 4}, "MLX"),
        ("quantization_config", {"quant_method": "gptq", "bits": 4}, "gptq"),
    ):
        (tmp_path / "config.json").write_text(json.dumps(settings | {key: value}))
        line = run_error(tmp_path)
        assert f"the weights are quantized by {method} ({key}); open the original model" in line


def test_a_folder_of_gguf_files_names_one(tmp_path: Path, run_error: Run) -> None:
    (tmp_path / "b.gguf").touch()
    (tmp_path / "a.gguf").touch()
    assert f"name one, such as {tmp_path / 'a.gguf'}" in run_error(tmp_path)


@pytest.mark.parametrize(
    ("name", "nearest"), [("gemma9", "gemma4"), ("qwen2x", "qwen2"), ("rwkv6", None)], ids=str
)
def test_an_unknown_architecture_names_similar_ones_and_where_to_ask(
    tmp_path: Path, name: str, nearest: str | None
) -> None:
    path = tmp_path / "m.gguf"
    synth.synthesize(path, preset="tiny")
    content = path.read_bytes()
    before, after = b"\x05" + bytes(7) + b"llama", len(name).to_bytes(8, "little") + name.encode()
    assert content.count(before) >= 1
    path.write_bytes(content.replace(before, after, 1))
    with pytest.raises(UnsupportedModelError, match=f"architecture {name} is not supported") as caught:
        Model(path, device="cpu")
    message = str(caught.value)
    if nearest is None:
        assert "nearest" not in message
    else:
        assert f"the nearest that is supported is {nearest};" in message
    form = (ROOT / ".github/ISSUE_TEMPLATE/model.yml").read_text(encoding="utf-8").splitlines()[0]
    assert form.removeprefix("name: ") in message


def test_a_prompt_without_room_names_the_limit_and_remedies(error_of: Run) -> None:
    line = error_of("run", "-p", "word " * 3000)
    assert "exceeds the context of 1024: shorten the text, or use a model with a longer context" in line


def test_a_busy_port_names_the_option(error_of: Run) -> None:
    pytest.importorskip("starlette", reason="needs the extra serve")
    with socket.create_server(("127.0.0.1", 0)) as busy:
        port = busy.getsockname()[1]
        line = error_of("serve", "--port", str(port))
    assert f"cannot listen on 127.0.0.1:{port}: Address already in use" in line
    assert "choose another port with --port" in line


@pytest.mark.parametrize(("spec", "status"), [("owner/repo:a.gguf", 404), ("owner/repo", 200)])
def test_a_proxy_that_answers_for_the_hub_is_reported(
    tmp_path: Path, run_error: Run, monkeypatch: pytest.MonkeyPatch, spec: str, status: int
) -> None:
    with hub_server.serve({}, sign_in=status) as hub:
        hub_server.use_hub(monkeypatch, hub.url, tmp_path)
        line = run_error(spec)
    assert f"a web page with status {status}, as proxies and sign-in pages send" in line
    assert "HTTPS_PROXY" in line


@pytest.mark.parametrize(
    ("built", "reason"),
    [
        (["avx512vnni", "avx2", "scalar"], "this processor runs none of avx512vnni, avx2"),
        (["scalar"], "pip install -v"),
    ],
    ids=["old processor", "old compiler"],
)
def test_an_old_processor_causes_one_warning(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    built: list[str],
    reason: str,
) -> None:
    synth.synthesize(tmp_path / "tiny.gguf", preset="tiny")
    engine.announce_slow_kernels.cache_clear()
    monkeypatch.setattr(_core, "kernel_sets", lambda: ["scalar"])
    monkeypatch.setattr(_core, "built_sets", lambda: built)
    monkeypatch.delenv("METAL_PREFILL_CPU_ISA", raising=False)
    with caplog.at_level(logging.WARNING, logger="metal_prefill"):
        for _ in range(2):
            Model(tmp_path / "tiny.gguf", device="cpu").close()
    (record,) = caplog.records
    assert record.getMessage().startswith("using scalar kernels, which are many times slower: ")
    assert reason in record.getMessage()
    engine.announce_slow_kernels.cache_clear()
    monkeypatch.setenv("METAL_PREFILL_CPU_ISA", "scalar")  # on purpose
    Model(tmp_path / "tiny.gguf", device="cpu").close()
    assert len(caplog.records) == 1
