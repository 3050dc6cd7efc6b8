"""The version is defined once, and a release whose tag, version and changelog differ is rejected."""

from importlib import metadata
from pathlib import Path

import pytest
import release
from support.places import ROOT

import metal_prefill


def test_the_package_has_the_version_of_pyproject() -> None:
    stated = release.stated_version((ROOT / "pyproject.toml").read_text())
    assert metal_prefill.__version__ == metadata.version("metal_prefill") == stated


def test_the_version_is_in_no_other_source() -> None:
    version = release.stated_version((ROOT / "pyproject.toml").read_text())
    folders = [*(ROOT / "python").rglob("*.py"), *(ROOT / "cpp").rglob("*.*")]
    sources = [ROOT / "CMakeLists.txt", ROOT / "Makefile", *folders]
    assert len(sources) > 50
    assert [path for path in sources if f'"{version}"' in path.read_text(encoding="utf-8")] == []


def test_the_steps_that_are_left_name_files_and_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "some.whl").write_bytes(bytes(1_500_000))
    monkeypatch.setattr(release, "FILES", tmp_path)
    text = release.steps()
    assert "1.5 MB  some.whl" in text
    assert f"git tag -a v{metadata.version('metal_prefill')} " in text
