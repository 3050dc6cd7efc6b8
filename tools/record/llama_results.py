"""Record results of llama.cpp on the test vocabularies and small models.

Run it when a text, a vocabulary or a model of the catalogue changes.
"""

import json
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from io import BytesIO
from pathlib import Path
from typing import Any, TypeAlias

import llama_cpp
import numpy as np
import numpy.typing as npt
import sentencepiece
from gguf import GGUFReader
from record import Records
from support import comparison, small_models
from support.folders import llama_cpp_folders
from support.places import ROOT
from support.small_models import SmallModel
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

BYTE_LEVEL_TOKENS = 640
SENTENCEPIECE_TOKENS = 700
UNREACHABLE_TOKENS = 60  # byte-level tokens that no merge makes: only a whole word can match one

Compute: TypeAlias = Callable[[Path, SmallModel], npt.NDArray[np.float32]]


def train_byte_level(texts: list[str]) -> dict[str, Any]:
    """Train merges across every border between words, numbers and spaces.

    With such merges a wrong split of the text changes the tokens.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    trainer = trainers.BpeTrainer(
        vocab_size=BYTE_LEVEL_TOKENS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
        min_frequency=1,
        max_token_length=12,
    )
    tokenizer.train_from_iterator(texts, trainer)
    model = json.loads(tokenizer.to_str())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].get)
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"]]
    specials = comparison.BYTE_LEVEL_SPECIALS
    return {
        "tokens": [*specials, *tokens],
        "types": [*specials.values(), *[1] * len(tokens)],
        "merges": merges[:-UNREACHABLE_TOKENS],
    }


def train_sentencepiece(texts: list[str]) -> dict[str, Any]:
    """Train a SentencePiece BPE vocabulary with all bytes and some user-defined symbols."""
    model = BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=(t for text in texts for t in text.split("\n") if t and t.isprintable()),
        model_writer=model,
        model_type="bpe",
        vocab_size=SENTENCEPIECE_TOKENS,
        byte_fallback=True,
        character_coverage=0.98,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        allow_whitespace_only_pieces=True,
        split_by_unicode_script=False,
        user_defined_symbols=list(comparison.USER_DEFINED),
        minloglevel=2,
    )
    spm = sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())
    ids = range(spm.vocab_size())

    def kind(i: int) -> int:
        if spm.id_to_piece(i) in comparison.USER_DEFINED:
            return 4
        return 2 if spm.is_unknown(i) else 3 if spm.is_control(i) else 6 if spm.is_byte(i) else 1

    return {
        "tokens": [spm.id_to_piece(i) for i in ids],
        "types": [kind(i) for i in ids],
        "scores": [spm.get_score(i) for i in ids],
    }


def tokens_of(folder: Path) -> str:
    """Return the tokens of every text with every vocabulary."""
    texts = comparison.TEXTS
    corpus = [text for text in texts for _ in range(3) if "<" not in text]  # without special tokens
    vocabularies = {"gpt2": train_byte_level(corpus), "llama": train_sentencepiece(corpus)}
    expected: dict[str, list[list[int]]] = {}
    for name, variant in comparison.TOKENIZERS.items():
        path = comparison.write_vocabulary(folder / "vocabulary.gguf", vocabularies[variant.kind], variant)
        llama = llama_cpp.Llama(str(path), vocab_only=True, verbose=False)
        expected[name] = [
            llama.tokenize(text.encode(), add_bos=False, special=variant.parse_special) for text in texts
        ]
        llama.close()
    record = {
        "origin": f"llama.cpp as of llama-cpp-python {llama_cpp.__version__}; "
        f"vocabularies trained by tokenizers and sentencepiece {sentencepiece.__version__}",
        "vocabularies": vocabularies,
        "expected": expected,
    }
    lines = json.dumps(record, ensure_ascii=True, separators=(",", ":"))
    return lines.replace('],"', '],\n"')


def all_logits(path: Path, tokens: list[int]) -> npt.NDArray[np.float64]:
    """Compute the logits after every token with llama.cpp's defaults."""
    llama = llama_cpp.Llama(str(path), n_ctx=len(tokens), logits_all=True, verbose=False)
    llama.eval(tokens)
    logits: npt.NDArray[np.float64] = llama.scores[: len(tokens)].astype(np.float64)
    llama.close()
    return logits


def perplexity() -> str:
    """Compute the perplexity of the verse under the bundled model, as llama.cpp's perplexity tool does.

    The windows do not overlap and start with the BOS token; each scores the tokens at n / 2 + 1 to n - 1.
    """
    path = next((ROOT / "python" / "metal_prefill" / "data").glob("*.gguf"))
    llama = llama_cpp.Llama(str(path), vocab_only=True, verbose=False)
    ids, bos = llama.tokenize(comparison.VERSE.encode()), llama.token_bos()
    llama.close()
    n = comparison.VERSE_WINDOW
    losses = []
    for begin in range(0, len(ids) - n + 1, n):
        window = [bos, *ids[begin + 1 : begin + n]]
        logits = all_logits(path, window)
        log_total = np.logaddexp.reduce(logits, axis=1)
        losses += [log_total[i] - logits[i, window[i + 1]] for i in range(n // 2, n - 1)]
    record = {
        "origin": f"llama.cpp as of llama-cpp-python {llama_cpp.__version__}",
        "perplexity": float(np.exp(np.mean(losses))),
        "tokens": len(losses),
    }
    return json.dumps(record, indent=2)


@contextmanager
def opened(path: Path, tokens: int, *, embeddings: bool = False) -> Iterator[tuple[Any, Any]]:
    """Open a model, and a context for a number of tokens, with plain kernels and a float32 cache."""
    model_params = llama_cpp.llama_model_default_params()
    model_params.use_extra_bufts = False  # no repacked weights: AMX fails on them in some virtual machines
    model = llama_cpp.llama_model_load_from_file(str(path).encode(), model_params)
    if not model:
        raise RuntimeError(f"llama.cpp cannot load {path}")
    params = llama_cpp.llama_context_default_params()
    params.n_ctx = params.n_batch = params.n_ubatch = tokens
    params.type_k = params.type_v = llama_cpp.GGML_TYPE_F32
    params.flash_attn_type = llama_cpp.LLAMA_FLASH_ATTN_TYPE_DISABLED
    params.embeddings = embeddings
    context = llama_cpp.llama_init_from_model(model, params)
    yield model, context
    llama_cpp.llama_free(context)
    llama_cpp.llama_model_free(model)


def last_logits(path: Path, tokens: npt.NDArray[np.int64]) -> npt.NDArray[np.float32]:
    """Compute the logits after the last token."""
    with opened(path, len(tokens)) as (model, context):
        ids = (llama_cpp.llama_token * len(tokens))(*tokens.tolist())
        if llama_cpp.llama_decode(context, llama_cpp.llama_batch_get_one(ids, len(tokens))) != 0:
            raise RuntimeError(f"llama.cpp cannot compute {path}")
        n_vocab = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(model))
        logits: npt.NDArray[np.float32] = np.ctypeslib.as_array(
            llama_cpp.llama_get_logits_ith(context, -1), (n_vocab,)
        ).copy()
    return logits


def vector(path: Path, tokens: npt.NDArray[np.int64], width: int) -> npt.NDArray[np.float32]:
    """Compute the pooled vector of a text, or the outputs of its classes."""
    with opened(path, max(len(tokens), 64), embeddings=True) as (model, context):
        batch = llama_cpp.llama_batch_init(len(tokens), 0, 1)
        batch.n_tokens = len(tokens)
        for i, token in enumerate(tokens.tolist()):
            batch.token[i], batch.pos[i], batch.n_seq_id[i], batch.logits[i] = token, i, 1, True
            batch.seq_id[i][0] = 0
        has_encoder = llama_cpp.llama_model_has_encoder(model)
        if (llama_cpp.llama_encode if has_encoder else llama_cpp.llama_decode)(context, batch) != 0:
            raise RuntimeError(f"llama.cpp cannot compute {path}")
        values: npt.NDArray[np.float32] = np.ctypeslib.as_array(
            llama_cpp.llama_get_embeddings_seq(context, 0), (width,)
        ).copy()
        llama_cpp.llama_batch_free(batch)
    return values


def vectors_of(path: Path, model: SmallModel) -> npt.NDArray[np.float32]:
    """Compute the vectors of texts with an embedding model, or the probabilities of classes."""
    width = len(model.labels) or model.dim
    return np.array([vector(path, tokens, width) for tokens in comparison.random_texts(model.vocab)])


def means_of(path: Path, model: SmallModel) -> npt.NDArray[np.float32]:
    """Compute the mean of the hidden states of an encoder, for which llama.cpp has one token type."""
    return np.array([vector(path, tokens, model.dim) for tokens in comparison.random_texts(model.vocab, 5)])


def folder_means() -> Iterator[tuple[str, npt.NDArray[np.float32]]]:
    """Compute the mean of the hidden states of files with the keys of llama.cpp's converter."""
    for name in llama_cpp_folders.FOLDERS:
        with tempfile.TemporaryDirectory() as folder:
            path = llama_cpp_folders.written(Path(folder), name)
            width = GGUFReader(path).fields[f"{name.partition(',')[0]}.embedding_length"].contents()
            yield name, np.array([vector(path, t, width) for t in comparison.random_texts(300, 5)])


def records() -> Records:
    """Yield all results."""
    yield llama_cpp_folders.RECORD, dict(folder_means())
    pooled = small_models.EMBEDDERS | small_models.CLASSIFIERS
    # llama.cpp returns a probability of 1 for a single label.
    several = [(name, model) for name, model in pooled.items() if len(model.labels) != 1]
    kinds: dict[Path, tuple[Iterable[tuple[str, SmallModel]], Compute]] = {
        comparison.LOGITS: (
            comparison.compared_models(),
            lambda path, model: last_logits(path, comparison.tokens_for(model)),
        ),
        comparison.VECTORS: (several, vectors_of),
        comparison.ENCODERS_OF_LLAMA_CPP: (comparison.OF_LLAMA_CPP.items(), means_of),
    }
    with tempfile.TemporaryDirectory() as folder:
        yield comparison.TOKENS, tokens_of(Path(folder))
        for place, (models, compute) in kinds.items():
            recorded = {}
            for name, model in models:
                recorded[name] = compute(small_models.write(Path(folder) / "model.gguf", model), model)
                print(f"{name}: {recorded[name].std():.3f}")
            yield place, recorded
    yield comparison.PERPLEXITY, perplexity()
