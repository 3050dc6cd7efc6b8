"""System packages: installed by one script, with a one-line report, and only as root."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from support.missing import REQUIRE_METAL, fail_or_skip, skip_where_the_cpu_is_selected

ROOT = Path(__file__).parents[1]
SETUP = ROOT / "tools" / "setup_packages.sh"
TOOLS = ("bash", "dirname", "sort", "cut", "head", "cat")

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="installs with apt-get")


class System:
    """A system whose commands are those in a folder; apt-get records its arguments."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.log = folder / "apt-get.log"
        for tool in TOOLS:
            found = shutil.which(tool)
            assert found is not None
            (folder / tool).symlink_to(found)
        self.add("apt-get", f'echo "$*" >> {self.log}')
        self.add("apt-cache", "for n in 13 12; do echo libstdc++-$n-dev-arm64-cross - cross; done")
        self.add("uname", 'case "$1" in -s) echo Linux ;; -m) echo x86_64 ;; esac')

    def add(self, name: str, body: str = "") -> None:
        """Add a command to it."""
        path = self.folder / name
        path.write_text(f"#!{shutil.which('bash')}\n{body}\n")
        path.chmod(0o755)

    def setup(self, user: int) -> str:
        """Run the script as some user; return its output."""
        self.add("id", f"echo {user}")
        done = subprocess.run(
            [SETUP], env=os.environ | {"PATH": str(self.folder)}, capture_output=True, text=True, check=True
        )
        assert done.stdout == ""
        return done.stderr

    @property
    def installed(self) -> list[str]:
        """Packages passed to apt-get."""
        calls = [line.split() for line in self.log.read_text().splitlines()]
        words = [word for call in calls if "install" in call for word in call]
        return [word for word in words if not word.startswith("-") and word != "install"]


def files(folder: Path) -> list[Path]:
    return [path for path in sorted(folder.rglob("*")) if path.is_file()]


@pytest.fixture
def system(tmp_path: Path) -> System:
    """Return a system without clang, qemu and llvm-symbolizer."""
    return System(tmp_path)


def test_root_installs_missing_packages_and_reports_them(system: System) -> None:
    (line,) = system.setup(user=0).splitlines()
    assert {"clang-19", "lld-19", "llvm-19", "libclang-rt-19-dev", "qemu-user"} <= set(system.installed)
    assert line.startswith("setup: installing with apt-get")
    assert line.endswith(" ".join(system.installed))


def test_other_users_get_the_command_and_nothing_is_installed(system: System) -> None:
    (line,) = system.setup(user=1000).splitlines()
    assert "sudo apt-get install clang-19 lld-19 libclang-rt-19-dev llvm-19 qemu-user" in line
    assert not system.log.exists()


def test_installed_packages_are_not_installed_again(system: System) -> None:
    system.add("clang++-20")
    system.add("llvm-symbolizer")
    (line,) = system.setup(user=0).splitlines()
    assert not {"clang-19", "llvm-19"} & set(system.installed)
    assert "qemu-user" in line


def test_arm_machines_need_no_emulated_arm(system: System) -> None:
    system.add("uname", 'case "$1" in -s) echo Linux ;; -m) echo aarch64 ;; esac')
    system.setup(user=0)
    assert "clang-19" in system.installed
    assert "qemu-user" not in system.installed


def test_a_failure_of_apt_get_is_reported_and_does_not_stop_the_build(system: System) -> None:
    system.add("apt-get", "exit 100")
    announced, failed = system.setup(user=0).splitlines()
    assert "installing" in announced
    assert "apt-get failed" in failed


def test_no_other_script_installs_packages() -> None:
    scripts = [ROOT / "Makefile", *(f for name in ("tools", ".ci") for f in files(ROOT / name))]
    runs = re.compile(r"^[^#\n]*apt-get +(-\S+ +)*(update|install) +-", re.MULTILINE)
    assert [path for path in scripts if runs.search(path.read_text(errors="replace"))] == [SETUP]


@pytest.mark.parametrize("variable", REQUIRE_METAL)
def test_a_missing_gpu_fails_where_one_is_required(monkeypatch: pytest.MonkeyPatch, variable: str) -> None:
    for other in REQUIRE_METAL:
        monkeypatch.delenv(other, raising=False)
    with pytest.raises(pytest.skip.Exception, match="no GPU here"):
        fail_or_skip("no GPU here", *REQUIRE_METAL)
    monkeypatch.setenv(variable, "1")
    with pytest.raises(pytest.fail.Exception, match="no GPU here"):
        fail_or_skip("no GPU here", *REQUIRE_METAL)


def jobs_of(workflow: str) -> dict[str, str]:
    """Return the text of each job of a workflow by its name."""
    text = (ROOT / ".github/workflows" / workflow).read_text().split("\njobs:\n")[1]
    parts = re.split(r"^  ([\w-]+):\n", text, flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def test_the_gpu_of_a_hosted_runner_cannot_fail_the_workflow() -> None:
    jobs = {name: job for name, job in jobs_of("ci.yml").items() if "runs-on: macos" in job}
    assert set(jobs) == {"macos", "macos-gpu"}
    assert "METAL_PREFILL_DEVICE: cpu\n" in jobs["macos"]
    assert "continue-on-error" not in jobs["macos"]
    assert "\n    continue-on-error: true\n" in jobs["macos-gpu"]
    assert 'METAL_PREFILL_REQUIRE_METAL: "1"' in jobs["macos-gpu"]
    pyproject = (ROOT / "pyproject.toml").read_text()
    (wheels,) = re.findall(r"\[tool\.cibuildwheel\.macos\]\n(?:.+\n)+", pyproject)
    assert 'METAL_PREFILL_DEVICE = "cpu"' in wheels


def test_the_gpu_report_of_a_hosted_runner_is_kept_if_tests_fail() -> None:
    steps = jobs_of("ci.yml")["macos-gpu"].split("\n      - ")
    (doctor,) = [step for step in steps if "metal-prefill doctor" in step]
    (upload,) = [step for step in steps if "actions/upload-artifact" in step]
    assert "if: always()" in doctor
    assert "if: always()" in upload
    written = re.findall(r"doctor\.\w+", doctor)
    assert set(written) == {"doctor.json", "doctor.txt"}
    assert "path: doctor.*" in upload


def test_speed_is_measured_on_self_hosted_macs() -> None:
    (speed,) = [job for job in jobs_of("ci.yml").values() if "metal_prefill.bench" in job]
    assert "runs-on: [self-hosted, macOS, ARM64]" in speed
    assert 'METAL_PREFILL_REQUIRE_METAL: "1"' in speed


def test_the_gpu_is_not_used_if_the_cpu_is_selected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("METAL_PREFILL_DEVICE", "cpu")
    with pytest.raises(pytest.skip.Exception, match="METAL_PREFILL_DEVICE selects the CPU"):
        skip_where_the_cpu_is_selected()
    monkeypatch.setenv("METAL_PREFILL_DEVICE", "metal")
    skip_where_the_cpu_is_selected()


# Runs this Python, which then takes itself for another version.
OTHER_VERSION = f"""#!/bin/bash
[ "$1" = -c ] || exec {sys.executable} "$@"
exec {sys.executable} -c "import sys; sys.version_info = ({{version}}, 6, 'final', 0)
$2"
"""


@pytest.mark.parametrize(("version", "refused"), [("3, 9", True), ("3, 10", False)])
def test_make_rejects_an_old_python_first(tmp_path: Path, version: str, refused: bool) -> None:
    make, git = shutil.which("make"), shutil.which("git")
    if make is None or git is None:
        pytest.skip("there is no make or no git")
    programs, tree = tmp_path / "programs", tmp_path / "tree"
    for folder in (programs, tree):
        folder.mkdir()
    python = programs / "python3"
    python.write_text(OTHER_VERSION.format(version=version))
    python.chmod(0o755)
    shutil.copy(ROOT / "Makefile", tree)
    subprocess.run([git, "init", "-q", tree], check=True)
    path = f"{programs}:{os.environ['PATH']}"
    # A folder that is a file: `python3 -m venv` fails there immediately.
    (tree / ".venv").write_text("")
    done = subprocess.run(
        [make, "-C", tree, ".venv/.ready"],
        env=os.environ | {"PATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode != 0
    assert ("is Python 3.9.6; metal_prefill needs 3.10 or later" in done.stderr) == refused
    assert ("-m venv' failed" in done.stderr) != refused
    if refused:
        assert "https://www.python.org/downloads/" in done.stderr
        assert "uv python install" in done.stderr
