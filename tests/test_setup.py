"""Packages of the system: installed by one script, which says so in one line, and only as root."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from support.missing import REQUIRE_METAL, fail_or_skip

ROOT = Path(__file__).parents[1]
SETUP = ROOT / "tools" / "setup_packages.sh"
TOOLS = ("bash", "dirname", "sort", "cut", "head", "cat")

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="installs with apt-get")


class System:
    """A system whose commands are those in a folder; apt-get notes how it is called."""

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
        """Put a command there."""
        path = self.folder / name
        path.write_text(f"#!{shutil.which('bash')}\n{body}\n")
        path.chmod(0o755)

    def setup(self, user: int) -> str:
        """Run the script as some user; return what it printed."""
        self.add("id", f"echo {user}")
        done = subprocess.run(
            [SETUP], env=os.environ | {"PATH": str(self.folder)}, capture_output=True, text=True, check=True
        )
        assert done.stdout == ""
        return done.stderr

    @property
    def installed(self) -> list[str]:
        """Packages that apt-get was asked to install."""
        calls = [line.split() for line in self.log.read_text().splitlines()]
        words = [word for call in calls if "install" in call for word in call]
        return [word for word in words if not word.startswith("-") and word != "install"]


def files(folder: Path) -> list[Path]:
    return [path for path in sorted(folder.rglob("*")) if path.is_file()]


@pytest.fixture
def system(tmp_path: Path) -> System:
    """Return a system without clang, qemu and llvm-symbolizer."""
    return System(tmp_path)


def test_root_installs_what_is_missing_and_says_so_in_one_line(system: System) -> None:
    (line,) = system.setup(user=0).splitlines()
    assert {"clang-19", "lld-19", "llvm-19", "libclang-rt-19-dev", "qemu-user"} <= set(system.installed)
    assert line.startswith("setup: installing with apt-get")
    assert line.endswith(" ".join(system.installed))


def test_others_are_told_the_command_and_nothing_is_installed(system: System) -> None:
    (line,) = system.setup(user=1000).splitlines()
    assert "sudo apt-get install clang-19 lld-19 libclang-rt-19-dev llvm-19 qemu-user" in line
    assert not system.log.exists()


def test_what_is_there_is_not_installed(system: System) -> None:
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


def test_a_failure_of_apt_get_is_said_and_does_not_end_the_build(system: System) -> None:
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


def test_the_workflow_requires_the_gpu_of_a_mac_and_measures_speed_on_a_mac_of_ones_own() -> None:
    jobs = re.split(r"\n  (?=\w+:\n)", (ROOT / ".github/workflows/ci.yml").read_text())
    (macos,) = [job for job in jobs if "runs-on: macos" in job]
    (speed,) = [job for job in jobs if "metal_prefill.bench" in job]
    assert 'METAL_PREFILL_REQUIRE_METAL: "1"' in macos
    assert "runs-on: [self-hosted, macOS, ARM64]" in speed
    assert 'METAL_PREFILL_REQUIRE_METAL: "1"' in speed
