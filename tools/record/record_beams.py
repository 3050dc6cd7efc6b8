"""Record results of the beam search of Hugging Face transformers.

Writes ``tests/data/transformers_beams.json``, with which ``tests/generation/test_beams.py`` compares without
transformers. The model is a table: the logits after a token at a position are a row of it::

    pip install torch transformers
    python tools/record/record_beams.py
"""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from transformers.modeling_outputs import CausalLMOutput

FILE = Path(__file__).parents[2] / "tests" / "data" / "transformers_beams.json"
VOCAB, MOST = 6, 7  # MOST: tokens of a text


class Table(transformers.PreTrainedModel, transformers.GenerationMixin):  # type: ignore[misc]
    """Logits by position and token."""

    config_class = transformers.PretrainedConfig
    main_input_name = "input_ids"

    def __init__(self, rows: Any) -> None:
        super().__init__(transformers.PretrainedConfig(vocab_size=VOCAB))
        self.rows = torch.nn.Parameter(torch.tensor(rows))
        self.post_init()

    def forward(self, input_ids: Any, **_: Any) -> CausalLMOutput:
        """Return logits, ``[beams, tokens, vocab]``."""
        return CausalLMOutput(logits=self.rows[torch.arange(input_ids.shape[1]), input_ids])

    def prepare_inputs_for_generation(self, input_ids: Any, **_: Any) -> dict[str, Any]:
        """Pass the ids on."""
        return {"input_ids": input_ids}


def main() -> None:
    """Write the file."""
    cases = []
    choices = itertools.product(
        (2, 3, 5), (0.0, 1.0, 2.0, -1.0), (False, True, "never"), ([5], [4, 5]), (0, 3)
    )
    for seed, (beams, penalty, early, stops, least) in enumerate(choices):
        rows = np.random.default_rng(seed).normal(size=(MOST, VOCAB, VOCAB)) * 1.5
        found = Table(rows).generate(
            torch.tensor([[0]]),
            max_new_tokens=MOST,
            min_new_tokens=least or None,
            num_beams=beams,
            num_return_sequences=beams,
            length_penalty=penalty,
            early_stopping=early,
            eos_token_id=stops,
            pad_token_id=0,
            do_sample=False,
            use_cache=False,
            output_scores=True,
            return_dict_in_generate=True,
        )
        texts = []
        for ids, score in zip(found.sequences[:, 1:].tolist(), found.sequences_scores.tolist(), strict=True):
            end = next((i + 1 for i, token in enumerate(ids) if token in stops), len(ids))
            texts.append({"tokens": ids[:end], "score": score})
        cases.append(
            {
                "seed": seed,
                "num_beams": beams,
                "length_penalty": penalty,
                "early_stopping": early,
                "stop": stops,
                "min_tokens": least,
                "texts": texts,
            }
        )
    lines = ",\n".join(json.dumps(case) for case in cases)
    FILE.write_text(f'{{"transformers": "{transformers.__version__}", "cases": [\n{lines}\n]}}\n')


if __name__ == "__main__":
    main()
