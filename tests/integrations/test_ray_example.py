"""The example for Ray on a cluster of two hosts, each a network namespace of this machine.

Part of ``make test-ray``. Creating the hosts needs root.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from support.places import ROOT
from support.programs import finished

from metal_prefill import Model

pytest.importorskip("ray.data", reason="needs the extra ray")

pytestmark = pytest.mark.timeout(600)

QUESTIONS = ROOT / "examples/data/questions.jsonl"
ADDRESSES = ("10.213.7.1", "10.213.7.2")
PORT = 6399


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)


@pytest.fixture
def hosts() -> Iterator[list[list[str]]]:
    """Return for each of two hosts the command that runs a program on it."""
    if sys.platform != "linux" or os.geteuid() != 0:
        pytest.skip("network namespaces need Linux and root")
    names = [f"metal-prefill-{os.getpid()}-{i}" for i in range(2)]
    cables = [f"mp{os.getpid()}n{i}" for i in range(2)]
    with ExitStack() as stack:
        for name in names:
            ip("netns", "add", name)
            stack.callback(ip, "netns", "delete", name)
        ip("link", "add", cables[0], "netns", names[0], "type", "veth", "peer", cables[1], "netns", names[1])
        for name, cable, address in zip(names, cables, ADDRESSES, strict=True):
            ip("-n", name, "address", "add", f"{address}/24", "dev", cable)
            for device in ("lo", cable):
                ip("-n", name, "link", "set", device, "up")
        yield [["ip", "netns", "exec", name] for name in names]


@pytest.fixture
def cluster(hosts: list[list[str]], tmp_path: Path) -> Iterator[str]:
    """Start Ray on both hosts and return its address."""
    ray = [sys.executable, "-m", "ray.scripts.scripts", "start", "--block", "--num-cpus=1"]
    ray += ["--disable-usage-stats", f"--object-store-memory={100 << 20}"]
    head = ["--head", f"--port={PORT}", "--include-dashboard=false", f"--temp-dir=/tmp/mp{os.getpid()}"]
    address = f"{ADDRESSES[0]}:{PORT}"
    env = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    with ExitStack() as stack:
        for run, ip_address, role in zip(hosts, ADDRESSES, (head, [f"--address={address}"]), strict=True):
            log = stack.enter_context((tmp_path / f"{ip_address}.log").open("w"))
            node = subprocess.Popen(
                [*run, *ray, f"--node-ip-address={ip_address}", *role], env=env, stdout=log, stderr=log
            )
            stack.callback(node.wait, 60)
            stack.callback(node.send_signal, signal.SIGTERM)
            wait_for(node, Path(log.name), "--block")
        yield address


def wait_for(node: subprocess.Popen[bytes], log: Path, text: str) -> None:
    """Wait until a program has printed a text."""
    deadline = time.monotonic() + 120
    while text not in log.read_text():
        assert node.poll() is None, log.read_text()
        assert time.monotonic() < deadline, log.read_text()
        time.sleep(0.2)


def right_answers() -> int:
    """Answer the questions without Ray; return how many answers are right."""
    right = 0
    with Model(device="cpu") as model:
        for task in map(json.loads, QUESTIONS.read_text().splitlines()):
            prompts = [model.tokenizer.encode(f"{task['question']} {choice}") for choice in task["choices"]]
            scores = [model.score(prompt).sum(dtype="float64") for prompt in prompts]
            right += scores.index(max(scores)) == task["answer"]
    return right


def test_each_host_computes_a_part_of_an_evaluation(hosts: list[list[str]], cluster: str) -> None:
    command = [*hosts[0], sys.executable, str(ROOT / "examples/evaluate_on_ray.py"), str(QUESTIONS)]
    command += ["--address", cluster, "--actors", "2", "--batch-size", "4"]
    done = finished(command)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert f"right: {right_answers()} of 8" in lines
    computed = {address: n for address, n in (line.split(": ") for line in lines if line.startswith("10."))}
    assert computed.keys() == set(ADDRESSES)
    assert sum(int(n.split()[0]) for n in computed.values()) == 24
