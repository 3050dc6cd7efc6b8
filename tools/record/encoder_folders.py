"""Record hidden states of Hugging Face transformers for small folders of encoders with random weights.

Run it when a folder of ``tests/support/encoder_folders.py`` changes.
"""

from typing import Any

import torch
import transformers
from record import Records, written
from support import encoder_folders


def records() -> Records:
    """Yield the record."""
    record: dict[str, Any] = {}
    for name, path in written(encoder_folders.RECORDED):
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
    for name, path in written({"masked": encoder_folders.masked}):
        masked = transformers.AutoModelForMaskedLM.from_pretrained(path).float().eval()
        tokenizer = transformers.AutoTokenizer.from_pretrained(path)
        with torch.inference_mode():
            logits = masked(**tokenizer(encoder_folders.TEXT, return_tensors="pt")).logits[0]
        record[name] = torch.log1p(logits.relu()).amax(dim=0).numpy()
    yield encoder_folders.RECORD, record
