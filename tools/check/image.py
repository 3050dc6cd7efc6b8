"""Execute the steps of packaging/Dockerfile without Docker, start its server, and check what it returns.

    python tools/check/image.py FOLDER    # as root, with debootstrap; FOLDER takes 2 GB: make test-image

A stage is a root file system that debootstrap makes; its steps are executed in it with chroot. The server
then runs as the image's user, with a folder of all-MiniLM-L6-v2 in its volume.
"""

import argparse
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
import urllib.request
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
DOCKERFILE = ROOT / "packaging/Dockerfile"
MODEL = "all-MiniLM-L6-v2"
TEXT, VALUES = "a photo of a cat", (0.0327, 0.0912, 0.0279, 0.0235)  # computed by sentence-transformers
START_SECONDS = 120


class ImageError(Exception):
    """A step fails, or the server does."""


@dataclass
class Stage:
    """A root file system, and the settings of the instructions so far."""

    root: Path
    environment: dict[str, str] = field(default_factory=lambda: {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin"})
    user: str = "0"
    directory: str = "/"
    volumes: list[str] = field(default_factory=list)
    health: list[str] = field(default_factory=list)
    entry: list[str] = field(default_factory=list)

    def command(self, *arguments: str) -> list[str]:
        """Return the command that runs a program in the root, with a /proc that ends with it."""
        mounted = 'mount -t proc proc "$1/proc" && root=$1 user=$2 directory=$3 && shift 3 && '
        mounted += 'exec /usr/sbin/chroot --userspec="$user" "$root" /bin/sh -c '
        mounted += '\'cd "$0" && exec "$@"\' "$directory" "$@"'
        inner = ["sh", "-c", mounted, "sh", str(self.root), f"{self.user}:", self.directory, *arguments]
        return ["unshare", "--mount", *inner]

    def run(self, *arguments: str, **options: str) -> int:
        """Run a program in the root; return its exit status."""
        return subprocess.run(
            self.command(*arguments), env=self.environment | options, check=False
        ).returncode


def instructions(text: str) -> list[tuple[str, str]]:
    """Return the instructions of a Dockerfile and their arguments."""
    lines = [line for line in text.splitlines() if line.strip() and not line.startswith("#")]
    joined = "\n".join(lines).replace("\\\n", " ")
    return [(line.split(maxsplit=1)[0], line.split(maxsplit=1)[1]) for line in joined.splitlines()]


def new_root(image: str, folder: Path) -> Path:
    """Make a root file system of Debian in place of an image such as debian:trixie-slim."""
    found = re.fullmatch(r"debian:(\w+)-slim", image)
    if not found:
        raise ImageError(f"the base is {image}; only debian:<release>-slim can be made without a registry")
    archive = folder / f"{found[1]}.tar"
    if not archive.exists():
        made = folder / "debootstrap"
        shutil.rmtree(made, ignore_errors=True)
        command: list[str | Path] = ["debootstrap", "--variant=minbase", found[1], made]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        subprocess.run(["tar", "-cf", archive.with_suffix(".part"), "-C", made, "."], check=True)
        shutil.rmtree(made)
        archive.with_suffix(".part").rename(archive)
    root = folder / "root"
    root.mkdir()
    subprocess.run(["tar", "-xf", archive, "-C", root], check=True)
    return root


def copy_context(target: Path) -> None:
    """Copy the files of the checkout that the image's .dockerignore lets through."""
    first, *patterns = Path(f"{DOCKERFILE}.dockerignore").read_text().split()
    if first != "*" or any(not re.fullmatch(r"![\w./]+", pattern) for pattern in patterns):
        raise ImageError(f"{DOCKERFILE.name}.dockerignore must ignore * and allow single paths")
    names = [pattern[1:] for pattern in patterns]
    for name in names:
        source, copied = ROOT / name, target / name
        copied.parent.mkdir(parents=True, exist_ok=True)
        if source.is_dir():
            shutil.copytree(source, copied, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(source, copied)


def build(folder: Path) -> Stage:
    """Execute all steps; return the last stage."""
    stages: dict[str, Stage] = {}
    stage = Stage(folder)
    for name, argument in instructions(DOCKERFILE.read_text()):
        print(f"{name} {argument[:100]}", flush=True)
        if name == "FROM":
            image, *alias = argument.split(" AS ")
            place = folder / f"stage-{len(stages)}"
            shutil.rmtree(place, ignore_errors=True)
            new_root(image, folder).rename(place)
            stage = stages[alias[0] if alias else ""] = Stage(place)
            shutil.copy("/etc/resolv.conf", place / "etc/resolv.conf")  # as Docker does
        elif name == "RUN":
            # Settings of pip on this machine, such as of a mirror, are those of the build.
            pip = {key: value for key, value in os.environ.items() if key.startswith("PIP_")}
            if "PIP_CERT" in pip:
                shutil.copy(pip["PIP_CERT"], stage.root / "tmp/certificates.pem")
                pip["PIP_CERT"] = "/tmp/certificates.pem"
            if status := stage.run("/bin/sh", "-c", argument, **pip):
                raise ImageError(f"RUN {argument}: exit status {status}")
        elif name == "COPY":
            *options, source, target = argument.split()
            place = stage.root / target.lstrip("/")
            if options:
                other = stages[options[0].removeprefix("--from=")]
                shutil.copytree(other.root / source.lstrip("/"), place, symlinks=True)
            else:
                copy_context(place)
        elif name == "ENV":
            stage.environment |= dict(pair.split("=", 1) for pair in shlex.split(argument))
        elif name == "USER":
            stage.user = argument
        elif name == "WORKDIR":
            stage.directory = argument
        elif name == "VOLUME":
            stage.volumes.append(argument)
        elif name == "HEALTHCHECK":
            stage.health = json.loads(argument[argument.index("[") :])
        elif name == "ENTRYPOINT":
            stage.entry = json.loads(argument)
        elif name != "EXPOSE":
            raise ImageError(f"the instruction {name} is not implemented in {Path(__file__).name}")
    return stage


def get(path: str, body: Any = None) -> Any:
    """Return the answer of the server to a request."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(
        f"http://127.0.0.1:8080{path}", data, {"Content-Type": "application/json"}
    )
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(request, timeout=60) as answer:
        return json.load(answer)


def check(stage: Stage, model: Path) -> None:
    """Start the server as the image does, and check its user, health, vectors and end."""
    if stage.user in ("0", "root") or not stage.user.isdigit():
        raise ImageError(f"the user is {stage.user}: it must be a number other than 0")
    (volume,) = stage.volumes
    place = stage.root / volume.lstrip("/") / MODEL
    shutil.copytree(model, place, dirs_exist_ok=True)
    if stage.run(*stage.health) == 0:
        raise ImageError("the health check succeeds without a server")
    server = subprocess.Popen(stage.command(*stage.entry, "-m", MODEL), env=stage.environment)
    try:
        for _ in range(START_SECONDS):
            if server.poll() is not None:
                raise ImageError(f"the server ended with status {server.returncode}")
            if stage.run(*stage.health) == 0:
                break
            time.sleep(1)
        else:
            raise ImageError(f"the server is not healthy after {START_SECONDS} s")
        status = Path(f"/proc/{server.pid}/status").read_text()
        (user,) = re.findall(r"^Uid:\t(\d+)", status, re.MULTILINE)
        if user != stage.user:
            raise ImageError(f"the server runs as user {user}, not as {stage.user}")
        vector = get("/v1/embeddings", {"input": [TEXT], "model": MODEL})["data"][0]["embedding"]
        if len(vector) != 384 or any(abs(a - b) > 0.001 for a, b in zip(vector, VALUES, strict=False)):
            raise ImageError(f"the vector of {TEXT!r} has {len(vector)} values, {vector[:4]}, not {VALUES}")
        written = {path.stat().st_uid for path in (stage.root / volume.lstrip("/") / "cache").rglob("*")}
        if written != {int(stage.user)}:
            raise ImageError(f"files of users {sorted(written)} are in the cache, not of {stage.user} alone")
    finally:
        server.terminate()
    if status_of_end := server.wait(60):
        raise ImageError(f"the server ends with status {status_of_end} after SIGTERM")
    print(f"health and a vector of {len(vector)} values, as user {user}")


def main() -> int:
    """Run the command line; see the module docstring."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, help="folder for the root file systems")
    parser.add_argument("--model", type=Path, required=True, help=f"folder of {MODEL}")
    options = parser.parse_args()
    if os.geteuid() != 0 or shutil.which("debootstrap") is None:
        raise ImageError("needs root, and debootstrap (apt-get install debootstrap)")
    folder: Path = options.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    shutil.rmtree(folder / "root", ignore_errors=True)
    check(build(folder), options.model)
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except (ImageError, subprocess.CalledProcessError) as error:
        sys.exit(f"image: {error}")
