"""Record likelihoods of lm-eval with transformers for a small model file of the tests.

Run it when a text of ``tests/support/choice_task.py`` changes.
"""

import tempfile
from pathlib import Path

from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM
from record import Records
from support import choice_task


def records() -> Records:
    """Yield the answers of the backend ``hf``: likelihoods of choices, and of whole texts."""
    with tempfile.TemporaryDirectory() as folder:
        path = choice_task.model(Path(folder))
        # Transformers dequantizes the file.
        backend = HFLM(str(path.parent), gguf_file=path.name, device="cpu", dtype="float32", batch_size=4)
        choices = [Instance("loglikelihood", {}, pair, 0) for pair in choice_task.CHOICES]
        texts = [Instance("loglikelihood_rolling", {}, (text,), 0) for text in choice_task.TEXTS]
        answers = zip(choice_task.CHOICES, backend.loglikelihood(choices), strict=True)
        requests = [[*pair, *answer] for pair, answer in answers]
        yield choice_task.FILE, {"requests": requests, "rolling": backend.loglikelihood_rolling(texts)}
