"""Record token ids of Hugging Face transformers for small vocabularies of encoders.

Run it when a text or a variant of ``tests/support/folders/encoder_tokenizers.py`` changes.
"""

import tempfile
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import sentencepiece
import transformers
from record import Records
from sentencepiece import sentencepiece_model_pb2
from support.folders import encoder_tokenizers as recorded
from support.folders.encoder_tokenizers import VARIANTS, Variant
from support.hostile_texts import hostile_texts
from support.places import ROOT
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, trainers

WORD_PIECES = 1500
UNIGRAM_PIECES = 1200
SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")


def training_texts() -> list[str]:
    """Return texts of the project, and some with other scripts and accents."""
    pages = [path.read_text(encoding="utf-8") for path in sorted((ROOT / "docs").glob("*.md"))[:8]]
    return [*pages, *list(hostile_texts(400, seed=1))]


def train_word_piece(texts: list[str]) -> dict[str, int]:
    """Train a vocabulary with upper and lower case, so that all variants differ."""
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=False, strip_accents=False)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    trainer = trainers.WordPieceTrainer(
        vocab_size=WORD_PIECES, special_tokens=list(SPECIAL), show_progress=False, limit_alphabet=900
    )
    tokenizer.train_from_iterator([*texts, *(text.lower() for text in texts)], trainer)
    return tokenizer.get_vocab()


def train_unigram(texts: list[str]) -> tuple[list[tuple[str, float]], bytes]:
    """Train pieces and scores in the order of XLM-R, and return SentencePiece's character map."""
    output = BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=(line for text in texts for line in text.split("\n") if line.isprintable()),
        model_writer=output,
        model_type="unigram",
        vocab_size=UNIGRAM_PIECES,
        character_coverage=0.99,
        hard_vocab_limit=False,
        normalization_rule_name="nmt_nfkc",
        minloglevel=2,
    )
    model = sentencepiece_model_pb2.ModelProto()
    model.ParseFromString(output.getvalue())
    pieces = [(piece.piece, piece.score) for piece in model.pieces[3:]]
    special = [(text, 0.0) for text in ("<s>", "<pad>", "</s>", "<unk>")]
    return [*special, *pieces, ("<mask>", 0.0)], model.normalizer_spec.precompiled_charsmap


def make(variant: Variant, words: dict[str, int], pieces: Any, charsmap: bytes) -> Any:
    """Make a tokenizer of transformers."""
    if variant.vocabulary == "wordpiece":
        return transformers.BertTokenizer(vocab=words, **variant.options)
    options = (
        {**variant.options, "_spm_precompiled_charsmap": charsmap} if variant.charsmap else variant.options
    )
    return transformers.XLMRobertaTokenizer(vocab=pieces, **options)


def records() -> Records:
    """Yield the record."""
    texts = training_texts()
    words, (pieces, charsmap) = train_word_piece(texts), train_unigram(texts)
    hostile = list(hostile_texts())
    record: dict[str, Any] = {}
    for name, variant in VARIANTS.items():
        tokenizer = make(variant, words, pieces, charsmap)
        with tempfile.TemporaryDirectory() as folder:
            tokenizer.save_pretrained(folder)
            for file in ("tokenizer.json", "tokenizer_config.json"):
                record[f"{name}: {file}"] = np.frombuffer((Path(folder) / file).read_bytes(), np.uint8)
        ids = tokenizer(hostile)["input_ids"]
        record[f"{name}: ids"] = recorded.packed(ids)
        pairs = tokenizer(
            hostile[: recorded.PAIRS], hostile[1 : recorded.PAIRS + 1], return_token_type_ids=True
        )
        record[f"{name}: pairs"] = recorded.packed(pairs["input_ids"])
        record[f"{name}: types"] = recorded.packed(pairs["token_type_ids"])
    yield recorded.RECORD, record
