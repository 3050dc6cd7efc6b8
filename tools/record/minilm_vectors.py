"""Record vectors of all-MiniLM-L6-v2 as sentence-transformers defines them.

The mean of the hidden states of each text, divided by its length, and the vector of the last text in
sentence-transformers, which cuts it. Run it when a text of ``tests/support/minilm_texts.py`` changes.
"""

import numpy as np
import torch
import transformers
from record import Records
from sentence_transformers import SentenceTransformer
from support.minilm_texts import TEXTS, VECTORS

from metal_prefill.hub._local_file import packaged_model


def records() -> Records:
    """Yield the record."""
    folder = packaged_model("minilm")
    assert folder is not None
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModel.from_pretrained(folder, dtype=torch.float64).eval()
    vectors = []
    for text in TEXTS:
        ids = tokenizer(text, return_tensors="pt", padding=False, truncation=True, max_length=512)
        with torch.no_grad():
            pooled = model(**ids).last_hidden_state[0].mean(dim=0)
        vectors.append((pooled / pooled.norm()).numpy())
    cut = SentenceTransformer(str(folder), device="cpu").encode(TEXTS[-1])
    yield VECTORS, {"vectors": np.array(vectors, np.float32), "cut": cut}
