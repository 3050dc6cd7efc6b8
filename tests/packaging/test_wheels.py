"""Wheels, installed without a compiler; `make test-wheels` runs this on those in build/wheels/dist.

Not part of ``make test``: ``METAL_PREFILL_WHEELS`` names the folder of the wheels.
"""

import os
import platform
import re
import shutil
import subprocess
import sys
import urllib.request
from collections.abc import Callable
from functools import cache
from pathlib import Path

import build_wheels
import pytest
from support.places import ROOT
from support.programs import finished, output, serving
from zig import WheelError

FOLDER = os.environ.get("METAL_PREFILL_WHEELS")
# Their modules need no module for tests; together they use all of the extension.
SUITE = (
    *("files/test_gguf_file.py", "text/test_tokenizer.py", "generation/test_sampling.py"),
    *("tasks/test_scoring.py", "storage/saved_sessions"),
)

pytestmark = [
    pytest.mark.skipif(FOLDER is None, reason="METAL_PREFILL_WHEELS names no folder (make test-wheels)"),
    pytest.mark.timeout(900),
]


def wheels_folder() -> Path:
    return Path(FOLDER or "").resolve()


@cache
def wheels(target: str) -> list[Path]:
    """Return the wheels for a platform of build_wheels.py."""
    return sorted(wheels_folder().glob(f"*{'*_'.join(target.split('_', 1))}.whl"))


def wheel_for(version: str, target: str = build_wheels.NATIVE) -> Path:
    minor = int(version.rstrip("t").partition(".")[2])
    for wheel in wheels(target):
        python, abi = wheel.name.split("-")[2:4]
        built = int(python.removeprefix("cp3"))
        if abi.endswith("t") != version.endswith("t"):
            continue
        if minor == built or (abi == "abi3" and minor > built):
            return wheel
    pytest.skip(f"there is no wheel for Python {version} on {target} in {FOLDER}")


def main_job() -> str:
    """Return the README's first program, which prints the shape of the logits and the file of the package."""
    code, _ = re.findall(
        r"^```python\n(.*?)^```$", (ROOT / "README.md").read_text(), re.MULTILINE | re.DOTALL
    )
    return f"{code}import metal_prefill\nprint(logits.shape, metal_prefill.__file__)\n"


class Environment:
    """An environment of a Python with a wheel, and a PATH with nothing else."""

    def __init__(self, version: str, folder: Path) -> None:
        try:
            python = build_wheels.find_python(version)
        except WheelError as error:
            pytest.skip(str(error))
        subprocess.run([python, "-m", "venv", folder], check=True)
        self.bin = folder / "bin"
        self.work = folder / "work"
        self.work.mkdir()
        self.env = {k: v for k, v in os.environ.items() if not k.startswith(("METAL_PREFILL_", "PYTHON"))}
        self.env |= {"PATH": str(self.bin), "HOME": str(folder)}

    def run(self, *command: str | Path) -> str:
        """Run a program of the environment; return its output."""
        return output([self.bin / command[0], *command[1:]], env=self.env, cwd=self.work)

    def check_main_job(self) -> None:
        shape, file = self.run("python", "-c", main_job()).rsplit(" ", 1)
        assert shape == "(1024,)"
        assert "/site-packages/" in file


@pytest.fixture(
    scope="module",
    params=["3.10", "3.11", "3.13", "3.14t"],
    ids=["oldest", "3.11", "newest", "free-threaded"],
)
def environment(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Environment:
    version: str = request.param
    made = Environment(version, tmp_path_factory.mktemp(f"python-{version}"))
    wheel_for(version)
    options: list[str | Path] = ["--quiet", "--only-binary=:all:", "--find-links", wheels_folder()]
    # Of safetensors, only a release candidate has a wheel for free-threaded Python.
    candidates = ["safetensors>=0.9rc0"] if version.endswith("t") else []
    made.run("pip", "install", *options, "metal-prefill[serve]", *candidates)
    return made


def test_the_main_job_runs(environment: Environment) -> None:
    environment.check_main_job()
    text = environment.run("metal-prefill", "run", "-p", "ROMEO:", "-n", "16")
    assert len(text) > 16


def test_the_wheel_has_the_kernels_of_every_processor(environment: Environment) -> None:
    code = "from metal_prefill import _core; print(*_core.built_sets())"
    assert environment.run("python", "-c", code).split() == list(build_wheels.KERNELS[platform.machine()])


def test_the_wheel_runs_on_a_processor_without_avx(environment: Environment) -> None:
    qemu = shutil.which("qemu-x86_64")
    if qemu is None or platform.machine() != "x86_64":
        pytest.skip("there is no qemu-x86_64 (make setup), or this is not an x86 processor")
    code = "from metal_prefill import Model; print(len(''.join(Model().generate('ROMEO:', 3))) > 0)"
    command = [qemu, "-cpu", "Nehalem", str(environment.bin / "python"), "-c", code]
    done = finished(command, env=environment.env)
    assert done.stdout == "True\n", done.stderr
    assert "using scalar kernels, which are many times slower: this processor runs none of amx" in done.stderr


def test_the_server_extra_works(environment: Environment) -> None:
    command: list[str | Path] = [environment.bin / "metal-prefill", "serve", "--port", "0"]
    with serving(command, env=environment.env) as (server, url):
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        with opener.open(f"{url}/health", timeout=60) as answer:
            assert answer.status == 200
        server.terminate()
        assert server.wait(60) == 0


def test_the_suite_passes(environment: Environment) -> None:
    environment.run(
        "pip", "install", "--quiet", "--only-binary=:all:", "pytest", "pytest-timeout", "hypothesis"
    )
    files = [ROOT / "tests" / name for name in SUITE]
    command = ["-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "not emulator", "-k", "not metal"]
    output = environment.run("python", *command, "-c", ROOT / "pyproject.toml", "--rootdir", ROOT, *files)
    (passed,) = re.findall(r"(\d+) passed", output)
    assert int(passed) > 100


def test_uvx_runs_the_command(tmp_path: Path) -> None:
    uv = pytest.importorskip("uv", reason="needs uv (pip install uv)")
    wheel_for("3.12")
    command = [uv.find_uv_bin(), "tool", "run", "--python", build_wheels.find_python("3.12")]
    command += ["--find-links", wheels_folder(), "metal-prefill", "--version"]
    assert output(command, env=os.environ | {"UV_CACHE_DIR": str(tmp_path)}).startswith("metal-prefill ")


def install_for(wheel: Path, site: Path, *tags: str) -> None:
    """Install a wheel, and what it requires, for Python 3.13 of another platform."""
    command: list[str | Path] = [sys.executable, "-m", "pip", "install", "--quiet", "--target", site]
    command += ["--only-binary=:all:", "--implementation", "cp", "--python-version", "3.13"]
    for tag in (*tags, "any"):
        command += ["--platform", tag]
    subprocess.run([*command, wheel], check=True)


@pytest.fixture(scope="module")
def emulated_arm(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., str]:
    """Run Debian's Python for 64-bit Arm, with the wheel, on an emulated processor."""
    qemu = shutil.which("qemu-aarch64")
    root = Path(os.environ.get("METAL_PREFILL_ARM_PYTHON", "nowhere")).resolve()
    python = root / "usr/bin/python3.13"
    if qemu is None or not python.exists():
        pytest.skip("no qemu-aarch64 (make setup), or no Python for Arm (tools/build/fetch_arm_python.sh)")
    site = tmp_path_factory.mktemp("arm")
    older = (f"manylinux_2_{glibc}_aarch64" for glibc in range(17, 29))  # pip extends no tag
    install_for(wheel_for("3.13", "manylinux_aarch64"), site, *older, "manylinux2014_aarch64")

    def run(processor: str, *arguments: str) -> str:
        environment = {"PYTHONPATH": str(site), "HOME": str(site), "PATH": str(site / "bin")}
        return output([qemu, "-L", root, "-cpu", processor, python, *arguments], env=environment, cwd=site)

    return run


@pytest.mark.parametrize(
    ("processor", "kernels"), [("cortex-a53", "neon"), ("neoverse-n1", "neon_dotprod"), ("max", "neon_i8mm")]
)
def test_the_main_job_runs_on_an_emulated_arm_processor(
    emulated_arm: Callable[..., str], processor: str, kernels: str
) -> None:
    code = main_job() + "from metal_prefill import _core; print(_core.kernel_sets()[0])"
    first, fastest = emulated_arm(processor, "-c", code).splitlines()
    assert first.startswith("(1024,) ")
    assert fastest == kernels
    text = emulated_arm(processor, "-m", "metal_prefill", "run", "-p", "ROMEO:", "-n", "4")
    assert len(text) > 4


@pytest.fixture(scope="module")
def musl(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., str]:
    """Run a Python made for musl, with the wheel."""
    root = Path(os.environ.get("METAL_PREFILL_MUSL_PYTHON", "nowhere")).resolve()
    if not (root / "loader").exists():
        pytest.skip("there is no Python for musl (tools/build/make_musl_python.sh)")
    site, machine = tmp_path_factory.mktemp("musl"), platform.machine()
    tags = (f"musllinux_1_{minor}_{machine}" for minor in (1, 2))
    install_for(wheel_for("3.13", f"musllinux_{machine}"), site, *tags)

    def run(*arguments: str) -> str:
        command: list[str | Path] = [root / "loader", root / "bin/python3.13", *arguments]
        return output(command, env={"PYTHONPATH": str(site), "HOME": str(site)}, cwd=site)

    return run


def test_the_main_job_runs_with_musl(musl: Callable[..., str]) -> None:
    code = main_job() + "import sysconfig; print(sysconfig.get_config_var('SOABI'))"
    first, interface = musl("-c", code).splitlines()
    assert first.startswith("(1024,) ")
    assert interface.endswith("-musl")
    assert len(musl("-m", "metal_prefill", "run", "-p", "ROMEO:", "-n", "16")) > 16


def test_the_source_distribution_builds(tmp_path: Path) -> None:
    found = sorted(wheels_folder().glob("*.tar.gz"))
    if not found:
        pytest.skip("there is no source distribution (make release-check)")
    made = Environment("3.12", tmp_path / "built")
    made.env["PATH"] += f":{os.environ['PATH']}"  # the compiler
    made.run("pip", "install", "--quiet", *found)
    made.check_main_job()
