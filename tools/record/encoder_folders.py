"""Record hidden states of Hugging Face transformers for small folders of encoders with random weights.

Run it when a folder of ``tests/support/encoder_folders.py`` changes.
"""

import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from support import encoder_folders


def main() -> None:
    """Write the record."""
    record: dict[str, Any] = {}
    for name, make in encoder_folders.RECORDED.items():
        with tempfile.TemporaryDirectory() as folder:
            path = make(Path(folder) / "m").write()
            kind = transformers.T5EncoderModel if name.startswith("t5") else transformers.AutoModel
            model = kind.from_pretrained(path, attn_implementation="eager").float().eval()
        routed: dict[str, Any] = (
            {"output_router_logits": True} if name in encoder_folders.PRIVACY_FILTERS else {}
        )
        for ids in encoder_folders.texts():
            with torch.inference_mode():
                output = model(input_ids=torch.from_numpy(ids)[None], **routed)
            record[f"{name}/{len(ids)}"] = encoder_folders.rows_of(output.last_hidden_state[0].numpy())
            if routed:
                best = torch.stack(output.router_logits).sort(descending=True).values
                used = model.config.num_experts_per_tok
                margins = (best[..., used - 1] - best[..., used]).amin(dim=0)
                record[f"{name}/{len(ids)}/margins"] = encoder_folders.rows_of(margins.numpy())
    with tempfile.TemporaryDirectory() as folder:
        path = encoder_folders.masked(Path(folder) / "m").write()
        masked = transformers.AutoModelForMaskedLM.from_pretrained(path).float().eval()
        tokenizer = transformers.AutoTokenizer.from_pretrained(path)
    with torch.inference_mode():
        logits = masked(**tokenizer(encoder_folders.TEXT, return_tensors="pt")).logits[0]
    record["masked"] = torch.log1p(logits.relu()).amax(dim=0).numpy()
    np.savez_compressed(encoder_folders.RECORD, allow_pickle=False, **record)
    print(f"{encoder_folders.RECORD}: {encoder_folders.RECORD.stat().st_size:,} bytes")
