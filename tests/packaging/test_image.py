"""The image with the server; `make test-image` executes its steps."""

from pathlib import Path

import image
import pytest

STEPS = image.instructions(image.DOCKERFILE.read_text(encoding="utf-8"))


def arguments(name: str) -> list[str]:
    return [argument for found, argument in STEPS if found == name]


def test_the_image_serves_as_a_user_without_privileges_from_a_volume() -> None:
    (user,) = arguments("USER")
    assert user.isdigit()
    assert user != "0"
    assert any(f"--uid {user} " in step for step in arguments("RUN"))
    assert arguments("VOLUME") == arguments("WORKDIR") == ["/models"]
    assert '"serve"' in arguments("ENTRYPOINT")[0]
    assert "'/health'" in arguments("HEALTHCHECK")[0]


def test_both_stages_have_the_same_base() -> None:
    build, final = arguments("FROM")
    assert build == f"{final} AS build"  # the extension needs the C++ library that it was linked with


def test_the_context_has_what_the_build_needs(tmp_path: Path) -> None:
    image.copy_context(tmp_path)
    for name in ("pyproject.toml", "CMakeLists.txt", "README.md", "LICENSE", "emulator/stubs.pat"):
        assert (tmp_path / name).is_file()
    assert {path.name for path in tmp_path.iterdir() if path.is_dir()} == {
        *("cmake", "cpp", "emulator", "python", "shaders")
    }


def test_an_unknown_base_is_refused(tmp_path: Path) -> None:
    with pytest.raises(image.ImageError, match=r"base is python:3\.13-slim; only debian:<release>-slim"):
        image.new_root("python:3.13-slim", tmp_path)
