"""Train a small Unigram model with SentencePiece, and record its tokens of texts.

Run it when one of the texts changes.
"""

import io
import tempfile
from pathlib import Path

import sentencepiece
from record import Records
from support.comparison import VERSE
from support.places import DATA

# Replacements of characters, in the format of a file of rules.
_RULES = "FB01\t66 69\n00A0\t20\n2014\t2C\n"
TEXTS = [
    "But soft, what light through yonder window breaks?",
    "  Two   households\u00a0x ",
    "\ufb01ne \u2014 it is",
    "\u65e5\u672c is the sun",
    "",
    "the\u2014east",
]


def records() -> Records:
    """Write the model, and yield the record."""
    made = io.BytesIO()
    pieces = dict(zip(("pad", "bos", "eos", "unk"), ("[PAD]", "[CLS]", "[SEP]", "[UNK]"), strict=True))
    with tempfile.TemporaryDirectory() as folder:
        rules = Path(folder) / "rules.tsv"
        rules.write_text(_RULES)
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(VERSE.splitlines() * 4),
            model_writer=made,
            model_type="unigram",
            vocab_size=90,
            hard_vocab_limit=False,
            normalization_rule_tsv=str(rules),
            **{f"{name}_id": i for i, name in enumerate(pieces)},
            **{f"{name}_piece": piece for name, piece in pieces.items()},
        )
    (DATA / "small_spm.model").write_bytes(made.getvalue())
    processor = sentencepiece.SentencePieceProcessor(model_proto=made.getvalue())
    yield DATA / "sentencepiece_tokens.json", {text: processor.encode(text) for text in TEXTS}
