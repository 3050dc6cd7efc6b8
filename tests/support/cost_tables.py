"""Published speeds, predictions of the cost model for the same work, and the tables of the documents."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from math import ceil, floor
from statistics import median
from typing import Any

from metal_prefill.files import ModelConfig
from metal_prefill.gpu._cost_model import Chip, Prediction, Shape, Work, find_chip, plan, predict, time_of
from support import peer_work
from support.places import DATA
from support.uniform_shape import uniform_shape

PUBLISHED: list[dict[str, Any]] = json.loads((DATA / "published_speeds.json").read_text())["rows"]


def config(
    layers: int, dim: int, heads: int, kv_heads: int, head: int, ffn: int, vocab: int, **more: Any
) -> ModelConfig:
    """Return the configuration of a Llama of these dimensions."""
    return ModelConfig(
        architecture="llama",
        n_layers=layers,
        dim=dim,
        n_heads=heads,
        n_kv_heads=kv_heads,
        key_dim=head,
        value_dim=head,
        ffn_dim=ffn,
        vocab_size=vocab,
        context_length=4096,
        norm_eps=1e-5,
        rope_dim=head,
        **more,
    )


CONFIGS = {
    "SmolLM-135M": config(30, 576, 9, 3, 64, 1536, 49152),
    "Llama-3.2-1B": config(16, 2048, 32, 8, 64, 8192, 128256),
    "Qwen3-0.6B": replace(config(28, 1024, 16, 8, 128, 3072, 151936), architecture="qwen3"),
    "Gemma3-270M": replace(config(18, 640, 4, 1, 256, 2048, 262144), architecture="gemma3"),
}


def shape_named(model: str) -> Shape:
    """Return the shape of a model with layers in Q4_0 and embedding in Q8_0."""
    return uniform_shape(CONFIGS[model], "q4_0", "q8_0")


def predict_ours(model: str, chip: Chip, tokens: int, position: int = 0, **options: Any) -> Prediction:
    """Predict this engine: a prompt that a program waits for, or a token while the next is in flight."""
    dispatches = plan(
        shape_named(model), tokens, position=position, family=chip.family, gpu=chip.gpu, **options
    )
    return predict(chip, dispatches, tokens, waits=int(tokens > 1))


def seconds(chip: Chip, works: list[Work]) -> float:
    """Return the predicted time of a GPU."""
    return sum(time_of(chip, work).total for work in works) / 1e6


def _works(row: dict[str, Any]) -> list[Work]:
    if row["engine"] == "llama.cpp":
        weight_bytes = {"Q4_0": peer_work.Q4_0, "Q4_K_M": peer_work.Q4_K_M}[row["type"]]
        return peer_work.llama_cpp(
            peer_work.SHAPES[row["model"]], row["tokens"], row.get("position", 0), weight_bytes
        )
    if row["engine"] == "mlx-lm":
        return peer_work.mlx(peer_work.SHAPES[row["model"]], row["tokens"], row["chip"] == "m5")
    return peer_work.original_decode()


def with_cores(chip: Chip, cores: int) -> Chip:
    """Return the variant of a chip that has fewer GPU cores, such as an M1 with seven."""
    return replace(chip, cores=cores, l2_gbs=chip.l2_gbs * cores / chip.cores)


def chip_of(row: dict[str, Any]) -> Chip:
    """Return the chip of a published speed, with as many cores as it had."""
    chip = find_chip(row["chip"])
    return with_cores(chip, row["cores"]) if "cores" in row else chip


@dataclass(frozen=True)
class Compared:
    """A published speed and the prediction for it.

    Attributes
    ----------
    row
        As in the file.
    host
        Seconds that its engine's host takes for a pass, fitted.
    predicted
        Tokens a second.
    """

    row: dict[str, Any]
    host: float
    predicted: float

    @property
    def ratio(self) -> float:
        """Published over predicted."""
        return float(self.row["speed"]) / self.predicted


def _missing(row: dict[str, Any]) -> float:
    """Return the seconds of a pass that the GPU's predicted time does not explain."""
    return float(row["tokens"] / row["speed"]) - seconds(chip_of(row), _works(row))


@cache
def host_seconds() -> dict[tuple[str, bool], float]:
    """Return the host's time in a pass, by engine and by whether the pass is a prompt: the fits' median."""
    kinds = {("llama.cpp", False), ("mlx-lm", True)}
    return {
        (engine, prompt): median(
            _missing(row)
            for row in PUBLISHED
            if row["use"] == "fit" and row["engine"] == engine and (row["tokens"] > 1) == prompt
        )
        for engine, prompt in kinds
    }


@cache
def compared() -> list[Compared]:
    """Compare all published speeds."""
    results = []
    for row in PUBLISHED:
        host = host_seconds().get((row["engine"], row["tokens"] > 1), 0.0)
        results.append(Compared(row, host, row["tokens"] / (seconds(chip_of(row), _works(row)) + host)))
    return results


def spread() -> dict[str, tuple[float, float]]:
    """Return the lowest and highest ratio of all held-out figures, rounded outwards."""
    found = {}
    for kind in ("prompt", "token"):
        prompt = kind == "prompt"
        ratios = [c.ratio for c in compared() if c.row["use"] != "fit" and (c.row["tokens"] > 1) == prompt]
        found[kind] = (floor(min(ratios) * 100) / 100, ceil(max(ratios) * 100) / 100)
    return found


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)


def _rounded(value: float) -> str:
    digits = 3 if value >= 1000 else 2
    step = 10.0 ** (len(str(int(value))) - digits)
    return f"{round(value / step) * step:,.0f}"


def in_range(prediction: Prediction) -> str:
    """Return a prediction as the pages have it."""
    low, high = prediction.tokens_per_second_range
    return f"{_rounded(low)} to {_rounded(high)}"


def chips_table() -> str:
    """Return predictions for SmolLM-135M by chip; decode is the token after 128."""
    lengths = (8, 32, 128, 512, 2048)
    rows = []
    for name in ("M1", "M2", "M3", "M4", "M4 Pro", "M4 Max", "M5"):
        chip = find_chip(name.lower().replace(" ", "-"))
        cells = [predict_ours("SmolLM-135M", chip, 1, 128)]
        cells += [predict_ours("SmolLM-135M", chip, n) for n in lengths]
        rows.append([name, *map(in_range, cells)])
    return _table(["chip", "decode", "8 tokens", *(str(n) for n in lengths[1:])], rows)


def peers_table() -> str:
    """Return MLX's published speeds next to predictions for the same prompts."""
    rows = []
    for row in PUBLISHED:
        if row["engine"] != "mlx-lm":
            continue
        ours = predict_ours(row["model"], find_chip(row["chip"]), row["tokens"])
        low, high = (end / row["speed"] for end in ours.tokens_per_second_range)
        verdict = f"{ours.tokens_per_second / row['speed']:.2f} ({low:.2f} to {high:.2f})"
        rows.append(
            [row["model"], row["chip"], str(row["tokens"]), f"{row['speed']:,}", in_range(ours), verdict]
        )
    return _table(["model", "chip", "tokens", "MLX, published", "predicted", "ratio (range)"], rows)


def units_table() -> str:
    """Return predictions for an M5 with and without its matrix units."""
    lengths, m5 = (32, 128, 512, 2048), find_chip("m5")
    rows = []
    for name, units in (("`matmul_tensor`, on the matrix units", True), ("`matmul`", False)):
        predicted = [predict_ours("SmolLM-135M", m5, n, matmul_tensor=units) for n in lengths]
        rows.append([name, *map(in_range, predicted)])
    return _table(["products", "32 tokens", *map(str, lengths[1:])], rows)


# Parts of a pass, by how the names of their kernels begin; the first that fits.
_PARTS = {
    "attention": ("attention", "rope_attention"),
    "norms": ("rmsnorm_f", "rmsnorm_add", "rmsnorm_in_place"),
    "rope and append": ("rope_append",),
    "embedding and argmax": ("embed", "argmax"),
    "head": (),  # the products with the vocabulary's rows
    "projections of a layer": ("",),
}


def shares_table() -> str:
    """Return how the time of passes on an M4 is divided."""
    columns = [predict_ours("SmolLM-135M", find_chip("m4"), n, 128 if n == 1 else 0) for n in (1, 32, 512)]
    vocab = CONFIGS["SmolLM-135M"].vocab_size
    cells: dict[str, list[str]] = {part: [] for part in _PARTS}
    overhead = []
    for column in columns:
        sums = dict.fromkeys(_PARTS, 0.0)
        bounds: dict[str, dict[str, float]] = {part: {} for part in _PARTS}
        for d, time in zip(column.dispatches, column.times, strict=True):
            part = next(part for part, stems in _PARTS.items() if d.kernel.startswith(stems))
            if d.args.get("out_dim") == vocab:
                part = "head"
            sums[part] += time.total
            bounds[part][time.bound] = bounds[part].get(time.bound, 0.0) + time.total
        whole = sum(sums.values())
        overhead.append(f"{sum(time.overhead for time in column.times) / whole:.0%}")
        for part, microseconds in sums.items():
            bound = max(bounds[part], key=lambda name: bounds[part][name]) if bounds[part] else ""
            cells[part].append(f"{microseconds / whole:.0%} ({bound})" if bound else "")
    order = sorted(_PARTS, key=lambda part: -float(cells[part][2].split("%")[0] or 0))
    rows = [[part, *cells[part]] for part in order]
    rows.append(["overhead of all dispatches, contained in these", *overhead])
    return _table(["", "decode", "32 tokens", "512 tokens"], rows)


def published_table() -> str:
    """Return all published speeds with the predictions and errors."""
    rows = []
    for c in compared():
        r = c.row
        work = f"prompt of {r['tokens']}" if r["tokens"] > 1 else "decode"
        cores = f", {r['cores']} cores" if "cores" in r else ""
        digits = 1 if r["speed"] < 100 else 0
        rows.append(
            [
                f"{r['engine']}, {r['model']} {r['type']}, {work}",
                r["chip"] + cores,
                f"{r['speed']:,.{digits}f}",
                f"{c.predicted:,.{digits}f}",
                f"{round(100 * (1 / c.ratio - 1)):+d}%",
                r["use"],
            ]
        )
    return _table(["", "chip", "published", "predicted", "error", "use"], rows)


TABLES = {
    "cost_model.md": {
        "chips": chips_table,
        "peers": peers_table,
        "units": units_table,
        "shares": shares_table,
    },
    "measurements/cost-model.md": {"published": published_table},
}


def with_tables(page: str, text: str) -> str:
    """Return the text of a page with its generated tables renewed."""
    for name, table in TABLES[page].items():
        begin, end = f"<!-- table: {name} -->\n", "\n<!-- end -->"
        first = text.index(begin) + len(begin)
        text = text[:first] + table() + text[text.index(end, first) :]
    return text
