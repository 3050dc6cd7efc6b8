"""A local task with four choices for lm-eval, and a small random model."""

import json
from pathlib import Path
from typing import Any

from metal_prefill import synth
from support.places import DATA

FILE = DATA / "transformers_likelihoods.json"
QUESTIONS = (
    ("Who went to the woods?", ("the teacher", "a man who wished to live", "nobody", "42 hens!"), 1),
    ("What is the sea made of?", ("salt water", "stone", "light and air", "bread"), 0),
    ("Is this a question?", ("no", "yes", "perhaps it is, perhaps not", "ask again"), 1),
    ("Name a colour.", ("Tuesday", "seven", "green", "to run"), 2),
    ("", ("one", "two", "three", "nr"), 3),  # the last one is the model's own text
)
# Whole texts: short, and of several contexts of the model.
TEXTS = ("To be, or not to be", "A", " ".join(f"The {i}th man went to the sea." for i in range(60)))


def model(folder: Path) -> Path:
    return synth.synthesize(folder / "model.gguf", preset="tiny", vocab=2048, seed=17)


def task(folder: Path) -> dict[str, Any]:
    """Write the questions, and return the task description for lm-eval."""
    file = folder / "questions.jsonl"
    lines = [
        json.dumps({"question": question, "choices": list(choices), "answer": answer})
        for question, choices, answer in QUESTIONS
    ]
    file.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return {
        "task": "four_choices",
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(file)}},
        "test_split": "test",
        "output_type": "multiple_choice",
        "doc_to_text": "Question: {{question}}\nAnswer:",
        "doc_to_choice": "{{choices}}",
        "doc_to_target": "{{answer}}",
        "metric_list": [{"metric": "acc"}, {"metric": "acc_norm"}],
    }


def evaluate(lm: Any, folder: Path) -> dict[str, Any]:
    """Evaluate a model with lm-eval; return its scores, and each request with its answer."""
    from lm_eval import simple_evaluate

    found = simple_evaluate(lm, tasks=[task(folder)], log_samples=True, bootstrap_iters=0)
    requests = [
        [*arguments, *response]
        for sample in found["samples"]["four_choices"]
        for arguments, response in zip(sample["arguments"], sample["filtered_resps"], strict=True)
    ]
    scores = {name: found["results"]["four_choices"][f"{name},none"] for name in ("acc", "acc_norm")}
    return {"scores": scores, "requests": requests}
