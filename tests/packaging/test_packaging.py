"""The recipe for conda-forge names the version and the requirements of this package."""

import json
import re
from pathlib import Path

import pytest
from support.places import ROOT

RECIPE = (ROOT / "packaging/conda/recipe.yaml").read_text(encoding="utf-8")
PROJECT = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
BUILD_ONLY = {"cmake", "nanobind", "ninja", "pip", "scikit-build-core"}
CONDA_NAMES = {"xxhash": "python-xxhash"}


def requirements(text: str) -> set[tuple[str, str]]:
    return set(re.findall(r"([\w-]+) ?>=([\d.]+)", text))


def listed(name: str) -> str:
    """Return the text of a list of strings in pyproject.toml."""
    found = re.search(rf"^{name} = \[(.*?)\]", PROJECT, flags=re.MULTILINE | re.DOTALL)
    assert found is not None
    return found[1]


def test_the_conda_recipe_matches_the_package_version() -> None:
    (version,) = re.findall(r'^version = "(.*)"$', PROJECT, flags=re.MULTILINE)
    assert re.findall(r'^  version: "(.*)"$', RECIPE, flags=re.MULTILINE) == [version]


def test_the_conda_recipe_matches_the_requirements() -> None:
    run = RECIPE[RECIPE.index("  run:\n") : RECIPE.index("\ntests:")]
    expected = {(CONDA_NAMES.get(name, name), least) for name, least in requirements(listed("dependencies"))}
    (python,) = re.findall(r'^requires-python = ">=(.*)"$', PROJECT, flags=re.MULTILINE)
    assert requirements(run) == expected | {("python", python)}


def test_the_conda_recipe_matches_the_build_tools() -> None:
    build = RECIPE[RECIPE.index("  build:\n", RECIPE.index("requirements:")) : RECIPE.index("  run:\n")]
    assert requirements(build) == requirements(listed("build"))


@pytest.mark.parametrize("platform", ["linux-64", "linux-aarch64", "osx-arm64"])
def test_the_conda_recipe_renders_with_the_pins_of_conda_forge(platform: str) -> None:
    rattler = pytest.importorskip("rattler_build", reason="needs py-rattler-build (make test-wheels)")
    pins = {"python": ["3.13.* *_cp313"], "c_stdlib": ["sysroot"], "cxx_compiler": ["gxx"]}
    rendered = rattler.Stage0Recipe.from_file(ROOT / "packaging/conda/recipe.yaml").render(
        rattler.VariantConfig(pins),
        rattler.RenderConfig(platform=rattler.PlatformConfig(target_platform=platform)),
    )
    (recipe,) = [variant.recipe for variant in rendered]
    requirements = recipe.requirements.to_dict()
    assert recipe.package.name == "metal-prefill"
    assert f"gxx_{platform}" in requirements["build"]
    assert recipe.build.string.startswith("py313h")


def test_the_conda_recipe_builds_against_a_channel_of_empty_packages(tmp_path: Path) -> None:
    """The solver finds every requirement, and the script runs, with a Python that records its arguments."""
    rattler = pytest.importorskip("rattler_build", reason="needs py-rattler-build (make test-wheels)")
    stub = "mkdir $PREFIX/bin && cd $PREFIX/bin && "
    stub += "printf '#!/bin/sh\\necho $* >>${0%%/bin/python}/arguments\\n' >python && chmod +x python"
    names = set(re.findall(r"^    - ([\w-]+)(?: >=[\d.]+)?$", RECIPE, flags=re.MULTILINE))
    assert {"python", "numpy", "nanobind"} <= names
    channel = tmp_path / "channel"
    for name in sorted(names | {"gxx_linux-64", "sysroot_linux-64"}):
        version, script = ("3.13.0", stub) if name == "python" else ("99", "true")
        recipe = {"package": {"name": name, "version": version}, "build": {"script": [script]}}
        path = tmp_path / "recipes" / name / "recipe.yaml"
        path.parent.mkdir(parents=True)
        path.write_text(json.dumps(recipe), encoding="utf-8")  # JSON is YAML
        (package,) = rattler.Stage0Recipe.from_file(path).render(rattler.VariantConfig())
        package.run_build(output_dir=channel, channels=[])
    pins = rattler.VariantConfig({"python": ["3.13.*"], "c_stdlib": ["sysroot"], "cxx_compiler": ["gxx"]})
    (package,) = rattler.Stage0Recipe.from_file(ROOT / "packaging/conda/recipe.yaml").render(pins)
    (built,) = package.run_build(output_dir=channel, channels=[channel.as_uri()]).packages
    package = rattler.Package.from_file(built)
    assert {depended.split()[0] for depended in package.depends} == names - BUILD_ONLY
    assert package.files == ["arguments", "bin/metal-prefill"]
