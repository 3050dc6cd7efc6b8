"""A task of mteb without a download, for a model that this package opens."""

import json
import sys

import datasets
import mteb
from mteb.abstasks.sts import AbsTaskSTS
from mteb.models import SentenceTransformerEncoderWrapper

from metal_prefill.sentence_transformers import SentenceTransformer

FOLDER, *TEXTS = sys.argv[1:]


class Pairs(AbsTaskSTS):
    """Similarity of each text with the next one."""

    metadata = mteb.TaskMetadata(
        name="Pairs",
        description="Pairs of texts",
        type="STS",
        dataset={"path": "none/none", "revision": "1"},
        eval_splits=["test"],
        eval_langs=["eng-Latn"],
        main_score="cosine_spearman",
    )

    def load_data(self, **options):
        """Make the data."""
        pairs = {
            "sentence1": TEXTS,
            "sentence2": TEXTS[1:] + TEXTS[:1],
            "score": [float(i) for i in range(len(TEXTS))],
        }
        self.dataset = datasets.DatasetDict(test=datasets.Dataset.from_dict(pairs))
        self.data_loaded = True


model = SentenceTransformerEncoderWrapper(SentenceTransformer(FOLDER, device="cpu"))
(result,) = mteb.evaluate(model, Pairs(), cache=None).task_results
print(json.dumps({"name": model.mteb_model_meta.name, "score": result.get_score()}))
