"""Folders whose logits are recorded, and the check of a folder's logits."""

from pathlib import Path

import numpy as np
import numpy.typing as npt

from metal_prefill import Model
from support import decoder_folders, expert_folders, gpt_folders, layered_folders, recurrent_folders
from support.recurrent_folders import IDS, ROWS

RECORDED = (
    recurrent_folders.RECORDED
    | decoder_folders.RECORDED
    | expert_folders.RECORDED
    | gpt_folders.RECORDED
    | layered_folders.RECORDED
)


def check_logits(path: Path, expected: npt.NDArray[np.float32]) -> None:
    """Check the logits after some tokens of the prompt of the record."""
    with Model(path, device="cpu", compute="f32", kv_dtype="f32") as model, model.session() as session:
        logits = np.stack([session.forward_prompt_logits(IDS[i : i + 1]) for i in range(len(IDS))])[ROWS]
    np.testing.assert_allclose(logits, expected, rtol=0, atol=1e-5 * np.abs(expected).max())
