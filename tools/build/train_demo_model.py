# torch has no types that mypy is given here, so its classes and decorators are unknown to it.
# mypy: allow-subclassing-any, allow-untyped-decorators, no-warn-return-any
"""Train the bundled model: a small Llama on Shakespeare, written as a Q4_0 GGUF file.

    python tools/build/train_demo_model.py shakespeare.txt OUT.gguf

The text is "tiny Shakespeare" (1,115,394 bytes, SHA-256 in `TEXT_SHA256`). The last tenth of it is held out:
its first half picks the checkpoint, its second half gives the perplexity that the model card quotes. The run
takes two minutes on one NVIDIA GPU, and under two hours on two CPU cores that multiply bfloat16. The same
seed on the same kind of device, with the same versions of the packages, gives the same file byte for byte.

Needs torch, tokenizers, numpy and gguf.
"""

from __future__ import annotations

import argparse
import copy
import hashlib
import json
import math
import os
import sys
import time
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path

import gguf
import numpy as np
import torch
import torch.nn.functional as F
from gguf import GGMLQuantizationType as QuantType
from gguf import quants
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor, nn

TEXT_SHA256 = "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed"
END_OF_TEXT = "<|endoftext|>"  # id 0; starts every window, so it is both BOS and EOS
BLOCK = 32  # weights that share one scale in Q4_0 and Q8_0


@dataclass(frozen=True)
class Shape:
    """Dimensions of the model: SmolLM-135M's proportions at half its width."""

    vocab: int = 1024
    layers: int = 5
    dim: int = 288
    heads: int = 9
    kv_heads: int = 3
    head_dim: int = 32
    ffn: int = 768
    context: int = 1024
    rope_base: float = 10000.0
    norm_eps: float = 1e-5


@dataclass(frozen=True)
class Recipe:
    """How it is trained. The text is small, so dropout and weight decay are strong."""

    steps: int = 2000
    batch: int = 16  # windows of `context` tokens
    learning_rate: float = 3e-3
    warmup: int = 100
    weight_decay: float = 2.0
    dropout: float = 0.3
    quantize_from: float = 0.7  # fraction of the run after which the weights are seen quantized
    evaluate_every: int = 100
    seed: int = 1


def train_tokenizer(text: str, vocab: int) -> Tokenizer:
    """Byte-level BPE with the pre-tokenizer that GGUF calls "smollm": single digits, then GPT-2's words."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator([text], trainer)
    return tokenizer


class Text:
    """One split of the text as token ids, divided into windows that each start with END_OF_TEXT."""

    def __init__(self, text: str, tokenizer: Tokenizer, context: int) -> None:
        encoding = tokenizer.encode(text)
        self.ids = torch.tensor(encoding.ids)
        self.bytes = len(text.encode())
        self.context = context
        line_starts = [0] + [i + 1 for i, ch in enumerate(text[:-1]) if ch == "\n"]
        first_chars = np.array([begin for begin, _ in encoding.offsets])
        starts = np.unique(np.searchsorted(first_chars, line_starts))
        self.line_starts = torch.from_numpy(starts[starts <= len(self.ids) - context])

    def _windows(self, starts: Tensor, length: int) -> tuple[Tensor, Tensor]:
        targets = self.ids[starts[:, None] + torch.arange(length)]
        inputs = torch.cat([torch.zeros(len(starts), 1, dtype=targets.dtype), targets[:, :-1]], dim=1)
        return inputs, targets

    def random_batch(self, size: int, rng: torch.Generator) -> tuple[Tensor, Tensor]:
        """Draw inputs and targets [size, context], windows that begin at random lines."""
        pick = torch.randint(len(self.line_starts), (size,), generator=rng)
        return self._windows(self.line_starts[pick], self.context)

    def all_windows(self) -> list[tuple[Tensor, Tensor]]:
        """Cut the whole split once into inputs and targets [1, up to context]."""
        starts = range(0, len(self.ids), self.context)
        return [self._windows(torch.tensor([s]), min(self.context, len(self.ids) - s)) for s in starts]


@torch.no_grad()
def fake_q4_0(w: Tensor) -> Tensor:
    """Round `w` as Q4_0 does: per 32 weights, integers -8..7 times a float16 scale, the largest at -8."""
    blocks = w.reshape(-1, BLOCK)
    largest = blocks.gather(1, blocks.abs().argmax(dim=1, keepdim=True))
    scale = largest / -8
    inverse = torch.where(scale == 0, 0, 1 / scale)
    q = torch.trunc(blocks * inverse + 8.5).clamp(0, 15) - 8
    return (q * scale.half().float()).reshape(w.shape)


@torch.no_grad()
def fake_q8_0(w: Tensor) -> Tensor:
    """Round `w` as Q8_0 does: per 32 weights, integers -127..127 times a float16 scale."""
    blocks = w.reshape(-1, BLOCK)
    scale = blocks.abs().amax(dim=1, keepdim=True) / 127
    inverse = torch.where(scale == 0, 0, 1 / scale)
    return ((blocks * inverse).round() * scale.half().float()).reshape(w.shape)


class Linear(nn.Module):
    """y = x W^T, with W seen through Q4_0 while `quantized`; gradients pass straight through the rounding."""

    def __init__(self, in_dim: int, out_dim: int, std: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(out_dim, in_dim) * std)
        self.quantized = False

    def forward(self, x: Tensor) -> Tensor:
        """Map x [..., in_dim] to [..., out_dim]."""
        w = self.weight
        if self.quantized:
            w = w + (fake_q4_0(w) - w).detach()
        return F.linear(x, w)


class Norm(nn.Module):
    """RMSNorm, computed in float32."""

    def __init__(self, dim: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """Scale x [..., dim] to a root mean square of 1, times the weights."""
        return F.rms_norm(x.float(), (x.shape[-1],), self.weight, self.eps)


def rope(x: Tensor, base: float) -> Tensor:
    """Rotate the pairs (2i, 2i+1) of x [batch, head, position, head_dim], as GGUF orders them in a Llama."""
    positions, head_dim = x.shape[-2:]
    frequency = base ** (-torch.arange(0, head_dim, 2, device=x.device, dtype=torch.float32) / head_dim)
    angle = torch.arange(positions, device=x.device, dtype=torch.float32)[:, None] * frequency
    even, odd = x.float().unflatten(-1, (-1, 2)).unbind(-1)
    cos, sin = angle.cos(), angle.sin()
    return torch.stack([even * cos - odd * sin, even * sin + odd * cos], dim=-1).flatten(-2).to(x.dtype)


class Block(nn.Module):
    """One layer: attention, then the feed-forward network, each added to the residual stream."""

    def __init__(self, shape: Shape, dropout: float) -> None:
        super().__init__()
        self.shape, self.dropout = shape, dropout
        std = shape.dim**-0.5
        out_std = std / math.sqrt(
            2 * shape.layers
        )  # keeps the residual stream's variance independent of depth
        kv_dim = shape.kv_heads * shape.head_dim
        self.attn_norm = Norm(shape.dim, shape.norm_eps)
        self.attn_q = Linear(shape.dim, shape.heads * shape.head_dim, std)
        self.attn_k = Linear(shape.dim, kv_dim, std)
        self.attn_v = Linear(shape.dim, kv_dim, std)
        self.attn_output = Linear(shape.heads * shape.head_dim, shape.dim, out_std)
        self.ffn_norm = Norm(shape.dim, shape.norm_eps)
        self.ffn_gate = Linear(shape.dim, shape.ffn, std)
        self.ffn_up = Linear(shape.dim, shape.ffn, std)
        self.ffn_down = Linear(shape.ffn, shape.dim, out_std)

    def forward(self, x: Tensor) -> Tensor:
        """Map x [batch, position, dim] to the same shape."""
        x = x + F.dropout(self.attention(self.attn_norm(x)), self.dropout, self.training)
        h = self.ffn_norm(x)
        h = F.dropout(F.silu(self.ffn_gate(h)) * self.ffn_up(h), self.dropout, self.training)
        return x + F.dropout(self.ffn_down(h), self.dropout, self.training)

    def attention(self, x: Tensor) -> Tensor:
        """Causal attention over normalized x [batch, position, dim]; a KV head serves heads / kv_heads."""
        s = self.shape
        q = rope(self.attn_q(x).unflatten(-1, (s.heads, s.head_dim)).transpose(1, 2), s.rope_base)
        k = rope(self.attn_k(x).unflatten(-1, (s.kv_heads, s.head_dim)).transpose(1, 2), s.rope_base)
        v = self.attn_v(x).unflatten(-1, (s.kv_heads, s.head_dim)).transpose(1, 2)
        group = s.heads // s.kv_heads
        k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
        att = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.attn_output(att.transpose(1, 2).flatten(-2))


class Llama(nn.Module):
    """The model; its parameters carry the names of their tensors in GGUF."""

    def __init__(self, shape: Shape, dropout: float) -> None:
        super().__init__()
        self.dropout = dropout
        self.quantized = False
        self.token_embd = nn.Parameter(torch.randn(shape.vocab, shape.dim) * 0.02)
        self.blk = nn.ModuleList(Block(shape, dropout) for _ in range(shape.layers))
        self.output_norm = Norm(shape.dim, shape.norm_eps)

    def quantize(self, on: bool) -> None:
        """See the matrices through Q4_0 and the embedding through Q8_0, or plainly."""
        self.quantized = on
        for module in self.modules():
            if isinstance(module, Linear):
                module.quantized = on

    def forward(self, ids: Tensor) -> Tensor:
        """Map ids [batch, position] to logits [batch, position, vocab]; the embedding is also the head."""
        embd = self.token_embd
        if self.quantized:
            embd = embd + (fake_q8_0(embd) - embd).detach()
        x = F.dropout(F.embedding(ids, embd), self.dropout, self.training)
        for block in self.blk:
            x = block(x)
        x = F.dropout(self.output_norm(x), self.dropout, self.training)
        return F.linear(x, embd).float()

    def loss(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Mean negative log likelihood of the targets, in nats a token."""
        return F.cross_entropy(self(inputs).flatten(0, 1), targets.flatten())


@torch.no_grad()
def evaluate(model: Llama, text: Text, device: torch.device) -> float:
    """Mean negative log likelihood of a whole split in float32, in nats a token."""
    model.eval()
    total = sum(model.loss(x.to(device), y.to(device)).item() * y.numel() for x, y in text.all_windows())
    model.train()
    return total / len(text.ids)


def learning_rate(step: int, recipe: Recipe) -> float:
    """Warm up linearly, then follow a cosine to zero."""
    if step < recipe.warmup:
        return recipe.learning_rate * (step + 1) / recipe.warmup
    progress = (step - recipe.warmup) / max(1, recipe.steps - recipe.warmup)
    return recipe.learning_rate * 0.5 * (1 + math.cos(math.pi * progress))


def train(shape: Shape, recipe: Recipe, fit: Text, pick: Text, device: torch.device) -> Llama:
    """Train on `fit`; the quantized checkpoint that does best on `pick` is returned."""
    torch.manual_seed(recipe.seed)
    model = Llama(shape, recipe.dropout).to(device)
    matrices = [p for p in model.parameters() if p.ndim == 2]
    vectors = [p for p in model.parameters() if p.ndim == 1]
    optimizer = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": recipe.weight_decay}, {"params": vectors, "weight_decay": 0.0}],
        betas=(0.9, 0.98),
        fused=device.type == "cuda",
    )
    rng = torch.Generator().manual_seed(recipe.seed)
    best, best_state = math.inf, copy.deepcopy(model.state_dict())
    begin = time.monotonic()
    for step in range(recipe.steps):
        if step == int(recipe.quantize_from * recipe.steps):
            model.quantize(True)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, recipe)
        inputs, targets = (t.to(device) for t in fit.random_batch(recipe.batch, rng))
        with torch.autocast(device.type, torch.bfloat16):
            loss = model.loss(inputs, targets)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if (step + 1) % recipe.evaluate_every == 0 or step + 1 == recipe.steps:
            held_out = evaluate(model, pick, device)
            kept = model.quantized and held_out < best
            if kept:
                best, best_state = held_out, copy.deepcopy(model.state_dict())
            print(
                f"step {step + 1:5d}  train {loss.item():.4f}  held out {held_out:.4f}"
                f"{'  as Q4_0' if model.quantized else ''}{'  kept' if kept else ''}"
                f"  {time.monotonic() - begin:.0f} s",
                flush=True,
            )
    model.load_state_dict(best_state)
    return model


def tensor_name(parameter: str) -> str:
    """Return the GGUF name of a parameter."""
    return parameter if parameter.endswith(".weight") else parameter + ".weight"


def write_gguf(path: Path, model: Llama, shape: Shape, tokenizer: Tokenizer) -> None:
    """Write the model with its matrices as Q4_0, the embedding as Q8_0 and the norms as F32."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_name("Shakespeare 5M")
    writer.add_description("Demonstration model of metal_prefill, trained on the plays of Shakespeare")
    writer.add_license("mit")
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_Q4_0)
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    writer.add_vocab_size(shape.vocab)
    writer.add_context_length(shape.context)
    writer.add_embedding_length(shape.dim)
    writer.add_block_count(shape.layers)
    writer.add_feed_forward_length(shape.ffn)
    writer.add_head_count(shape.heads)
    writer.add_head_count_kv(shape.kv_heads)
    writer.add_rope_dimension_count(shape.head_dim)
    writer.add_rope_freq_base(shape.rope_base)
    writer.add_layer_norm_rms_eps(shape.norm_eps)

    bpe = json.loads(tokenizer.to_str())["model"]
    tokens = sorted(bpe["vocab"], key=bpe["vocab"].__getitem__)
    control, normal = gguf.TokenType.CONTROL, gguf.TokenType.NORMAL
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types([control if token == END_OF_TEXT else normal for token in tokens])
    writer.add_token_merges([" ".join(pair) for pair in bpe["merges"]])
    writer.add_bos_token_id(tokens.index(END_OF_TEXT))
    writer.add_eos_token_id(tokens.index(END_OF_TEXT))
    writer.add_add_bos_token(True)
    writer.add_add_space_prefix(False)

    for name, parameter in model.state_dict().items():
        values = parameter.float().cpu().numpy()
        if values.ndim == 1:
            kind = QuantType.F32
        else:
            kind = QuantType.Q8_0 if name == "token_embd" else QuantType.Q4_0
        writer.add_tensor(tensor_name(name), quants.quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def read_gguf(path: Path, shape: Shape) -> Llama:
    """Load the file of `write_gguf`, with the weights dequantized to float32."""
    tensors = {t.name: quants.dequantize(t.data, t.tensor_type) for t in gguf.GGUFReader(path).tensors}
    model = Llama(shape, dropout=0.0)
    model.load_state_dict({n: torch.tensor(tensors[tensor_name(n)]) for n in model.state_dict()})
    return model


def describe(name: str, nats: float, text: Text) -> str:
    """Word a loss in nats a token as loss, perplexity and bits a byte."""
    bits_a_byte = nats * len(text.ids) / math.log(2) / text.bytes
    return f"{name}: loss {nats:.4f}, perplexity {math.exp(nats):.3f}, {bits_a_byte:.4f} bits a byte"


def main() -> None:
    """Train, write the file, and report the loss before quantization and of the file."""
    parser = argparse.ArgumentParser(description="Train the demo model and write it as GGUF.")
    parser.add_argument("text", type=Path, help="tiny Shakespeare as one text file")
    parser.add_argument("out", type=Path, help="GGUF file to write")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    for name, default in asdict(Recipe()).items():
        parser.add_argument("--" + name.replace("_", "-"), type=type(default), default=default)
    arguments = vars(parser.parse_args())

    os.environ.setdefault(
        "CUBLAS_WORKSPACE_CONFIG", ":4096:8"
    )  # cuBLAS is deterministic only with a fixed workspace
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # a help in debugging that costs time
    raw = arguments["text"].read_bytes()
    if hashlib.sha256(raw).hexdigest() != TEXT_SHA256:
        sys.exit(f"{arguments['text']}: not the text that the model card describes (SHA-256 {TEXT_SHA256})")
    text = raw.decode()
    shape, recipe = Shape(), Recipe(**{name: arguments[name] for name in asdict(Recipe())})
    device = torch.device(arguments["device"])

    cuts = [0, len(text) * 90 // 100, len(text) * 95 // 100, len(text)]
    cuts[1:3] = [text.index("\n\n", cut) + 2 for cut in cuts[1:3]]  # between two speeches
    tokenizer = train_tokenizer(text[: cuts[1]], shape.vocab)
    fit, pick, held_out = (Text(text[begin:end], tokenizer, shape.context) for begin, end in pairwise(cuts))
    print(
        f"{shape}\n{recipe}\n{device}, {len(fit.ids)} + {len(pick.ids)} + {len(held_out.ids)} tokens",
        flush=True,
    )

    model = train(shape, recipe, fit, pick, device)
    print(f"{sum(p.numel() for p in model.parameters())} parameters")
    model.quantize(False)
    print(describe("held out, float32", evaluate(model, held_out, device), held_out))
    write_gguf(arguments["out"], model, shape, tokenizer)
    shipped = read_gguf(arguments["out"], shape).to(device)
    print(describe("held out, Q4_0 file", evaluate(shipped, held_out, device), held_out))
    print(describe("checkpoint choice, Q4_0 file", evaluate(shipped, pick, device), pick))
    digest = hashlib.sha256(arguments["out"].read_bytes()).hexdigest()
    print(f"{arguments['out']}: {arguments['out'].stat().st_size} bytes, SHA-256 {digest}")


if __name__ == "__main__":
    main()
