"""Prompts that repeat an earlier one but for an early change are found, and reported with what they cost."""

import re

import numpy as np
import pytest
from support.running_server import running, wait_until

from metal_prefill import Model
from metal_prefill.serve._activity import Change, change_of

WORDS = np.random.default_rng(3).integers(10, 5000, 400).astype(np.int32)
OTHERS = np.random.default_rng(4).integers(10, 5000, 400).astype(np.int32)


def joined(*parts: object) -> np.ndarray:
    return np.concatenate([np.asarray(part, np.int32) for part in parts])


DATED = joined(WORDS[:20], [1, 2, 3], WORDS[20:300])


@pytest.mark.parametrize(
    ("prompt", "earlier", "expected"),
    [
        (joined(WORDS[:20], [1, 7, 3], WORDS[20:300]), [DATED], Change(21, 281)),
        (joined(WORDS[:20], [1, 7, 7, 3], WORDS[20:300]), [DATED], Change(21, 281)),  # a token longer
        (joined(WORDS[:20], [1], WORDS[20:300]), [DATED], Change(21, 280)),  # shorter
        (joined(WORDS[:20], [9, 2, 3], WORDS[20:300], OTHERS[:90]), [OTHERS, DATED], Change(20, 282)),
        (DATED, [DATED], None),
        (joined(DATED, OTHERS), [DATED], None),  # the conversation continues
        (DATED[:200], [DATED], None),
        (joined(DATED[:100], OTHERS[:100]), [DATED], None),  # another question
        (joined(WORDS[:20], OTHERS), [DATED], None),
        (joined(WORDS[:20], [7], WORDS[21:80]), [WORDS[:80]], None),  # too few tokens
        (DATED, [], None),
        (joined(WORDS[:20], [7], WORDS[21:]), [WORDS, joined(WORDS[:20], [7], WORDS[21:])], None),
    ],
)
def test_what_follows_a_change_is_found(
    prompt: np.ndarray, earlier: list[np.ndarray], expected: Change | None
) -> None:
    assert change_of(prompt, earlier) == expected


def test_a_changed_prompt_is_reported_to_its_key_and_counted(cpu_model: Model) -> None:
    # Of pairs of prompts, the second ones change a token.
    prompts = {
        "the first key": [WORDS[:200] % 250, joined(WORDS[:9] % 250, [251], WORDS[10:200] % 250)],
        "the second key": [joined([252], WORDS[1:200] % 250)],
    }
    with running(cpu_model, api_keys=list(prompts)) as server:
        for key, sent in prompts.items():
            headers = {"authorization": f"Bearer {key}"}
            for prompt in sent:
                body = {"prompt": prompt.tolist(), "max_tokens": 1}
                assert server.post("/v1/completions", body, headers=headers).status_code == 200
            wait_until(lambda: not server.service.loop._running)
            texts = server.get("/activity", headers=headers).json()["texts"]
            changes = [text["change"] for text in texts]
            assert changes == ([{"position": 9, "tokens": 190}, None] if len(sent) == 2 else [None])
        metrics = server.get("/metrics", headers=headers).text
    found = dict(re.findall(r"^metal_prefill_(changed\w+|repeated\w+_total) (\S+)$", metrics, re.MULTILINE))
    created = {name for name in found if name.endswith("_created")}
    assert {name: float(value) for name, value in found.items() if name not in created} == {
        "changed_prompts_total": 1,
        "changed_position": 9,
        "repeated_tokens_total": 190,
    }
