"""Evaluate a model on multiple-choice questions, spread over the machines of a Ray cluster.

A question with each of its choices is a prompt; the most probable prompt has the model's answer. If a machine
fails, another one computes its rows again. Needs the extra ray: ``pip install 'metal_prefill[ray]'``.

    ray start --head                                # on one machine
    ray start --address=HEAD:6379                   # on each of the others
    python examples/evaluate_on_ray.py examples/data/questions.jsonl --address auto --actors 2 -m smollm2

Without ``--address``, Ray starts on this machine alone. A model file must have the same path on each machine.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from typing import Any

import numpy as np
import numpy.typing as npt
import ray

from metal_prefill.integrations import ScorePrompts


class ScoreRows(ScorePrompts):
    """Add the log probability of a row's prompt, and the address of the machine that computed it."""

    def __call__(self, batch: dict[str, npt.NDArray[Any]]) -> dict[str, npt.NDArray[Any]]:
        """Score a batch. The question is the same for all its choices, so it may remain in the sum."""
        scores = super().__call__(batch)["log_probs"]
        node = ray.util.get_node_ip_address()
        totals = np.array([float(values.sum(dtype=np.float64)) for values in scores])
        return {
            "id": batch["id"],
            "choice": batch["choice"],
            "score": totals,
            "node": np.full(len(totals), node),
        }


def main() -> None:
    """Score all choices and print the share of right answers."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("file", help='lines of JSON: {"question": ..., "choices": [...], "answer": 0}')
    parser.add_argument("--address", help="address of a Ray cluster, or auto")
    parser.add_argument("--actors", type=int, default=1, help="copies of the model (default: 1)")
    parser.add_argument("--batch-size", type=int, default=16, help="prompts of a batch (default: 16)")
    parser.add_argument("-m", "--model", help="GGUF file, owner/repo:file on the Hub, or smollm2")
    arguments = parser.parse_args()

    with open(arguments.file, encoding="utf-8") as file:
        tasks = [json.loads(line) for line in file]
    rows = [
        {"id": i, "choice": j, "prompt": f"{task['question']} {choice}"}
        for i, task in enumerate(tasks)
        for j, choice in enumerate(task["choices"])
    ]
    ray.init(address=arguments.address)
    ray.data.DataContext.get_current().wait_for_min_actors_s = 300  # so that all machines take part
    blocks = max(1, len(rows) // arguments.batch_size)
    scores = ray.data.from_items(rows, override_num_blocks=blocks).map_batches(
        ScoreRows,
        fn_constructor_kwargs={"model": arguments.model},
        compute=ray.data.ActorPoolStrategy(size=arguments.actors),
        num_cpus=1,
        scheduling_strategy="SPREAD",  # over machines
        batch_size=arguments.batch_size,
    )
    scored = scores.take_all()
    best = {i: max((r for r in scored if r["id"] == i), key=lambda r: r["score"]) for i in range(len(tasks))}
    right = sum(best[i]["choice"] == task["answer"] for i, task in enumerate(tasks))
    print(f"right: {right} of {len(tasks)}")
    for node, n in sorted(Counter(row["node"] for row in scored).items()):
        print(f"{node}: {n} prompts")


if __name__ == "__main__":
    main()
