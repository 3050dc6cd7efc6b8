"""``metal-prefill predict``: predicted speed on another GPU."""

import argparse
import json
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

from metal_prefill.commands import common
from metal_prefill.files._gguf_file import GGUFFile
from metal_prefill.gpu._cost_model import CHIPS, Prediction, Shape, predict, predict_run, shape_of
from metal_prefill.gpu._trace import HOST_CLOCK, read_trace
from metal_prefill.synth import PRESETS, write_preset_outline

NOTE = (
    "predicted: computed from published figures of the chip, not measured; the range covers the model's "
    "errors on published speeds"
)

EXAMPLE = "metal-prefill predict --chip m4 -p 512"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    common.add_option(parser, "--chip", "GPU to predict for", "m4", choices=tuple(CHIPS))
    which = parser.add_mutually_exclusive_group()
    which.add_argument(
        "--trace",
        type=Path,
        metavar="FILE",
        help="predict the dispatches in a file written by `metal-prefill trace`, and show both times",
    )
    which.add_argument("-m", "--model", metavar="FILE", help=common.MODEL_HELP)
    what = "model shape, with weights in Q4_0 and embedding in Q8_0"
    common.add_option(which, "--preset", what, "smollm-135m", choices=tuple(PRESETS))
    count = common.not_negative
    common.add_number(parser, "-p --prompt", "tokens of the prompt (default: 512)", type=count)
    common.add_number(
        parser, "-n --n-gen", "tokens to decode after the prompt, predicted separately", 0, count
    )
    common.add_option(parser, "--kv-dtype", "number format of the KV cache", "f16", choices=("f16", "f32"))
    parser.add_argument(
        "--fused-norm",
        action="store_true",
        help="decode with norms fused into the products that follow; on a GPU, the package measures which is "
        "faster",
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")


def _shape(arguments: argparse.Namespace) -> Shape:
    if (path := common.model_path(arguments.model)) is not None:
        with GGUFFile(path) as gguf:
            return shape_of(gguf)
    with (
        tempfile.TemporaryDirectory() as folder,
        GGUFFile(write_preset_outline(Path(folder) / "model.gguf", arguments.preset)) as gguf,
    ):
        return shape_of(gguf)


def predictions(arguments: argparse.Namespace) -> list[tuple[str, Prediction]]:
    """Return the requested predictions with their benchmark names."""
    chip = CHIPS[arguments.chip]
    if arguments.trace is not None:
        if arguments.prompt is not None or arguments.n_gen:
            raise ValueError("--trace sets the tokens; omit -p and -n")
        if arguments.fused_norm or arguments.kv_dtype != "f16":
            raise ValueError("--trace sets the kernels; omit --fused-norm and --kv-dtype")
        steps, metadata = read_trace(arguments.trace)
        if not steps:
            raise ValueError(f"{arguments.trace} has no dispatches")
        listed = [list(step.dispatches) for step in steps]
        if metadata.get("clock") == HOST_CLOCK:  # times on the emulator's CPU are not comparable
            listed = [[replace(d, start=0.0, end=0.0) for d in dispatches] for dispatches in listed]
        decode = [d for dispatches in listed[1:] for d in dispatches]
        found = [(f"pp{steps[0].tokens}", predict(chip, listed[0], steps[0].tokens))]
        return found + ([(f"tg{len(steps) - 1}", predict(chip, decode, len(steps) - 1))] if decode else [])
    prompt = 512 if arguments.prompt is None else arguments.prompt
    shape = _shape(arguments)
    if not prompt and not arguments.n_gen:
        raise ValueError("nothing to predict: set -p or -n")
    if arguments.n_gen and not shape.config.generates:
        raise ValueError("-n predicts decoding, which the model, an encoder, does not do")
    limit = shape.config.context_length
    if prompt + arguments.n_gen > limit:
        raise ValueError(f"{prompt + arguments.n_gen} tokens exceed the model's context of {limit}")
    options = {"kv_type": arguments.kv_dtype, "fused_norm": arguments.fused_norm}
    return predict_run(chip, shape, prompt, arguments.n_gen, **options)


def _measured(prediction: Prediction) -> dict[str, float]:
    """Return the measured microseconds by kernel, if the dispatches have times."""
    times: dict[str, float] = {}
    for d in prediction.dispatches:
        if d.end > d.start:
            times[d.kernel] = times.get(d.kernel, 0.0) + (d.end - d.start) * 1e6
    return times


def as_json(name: str, prediction: Prediction) -> dict[str, Any]:
    """Return a prediction as JSON."""
    measured = _measured(prediction)
    return {
        "test": name,
        "predicted": True,
        "chip": prediction.chip.name,
        "tokens": prediction.tokens,
        "predicted_seconds": prediction.seconds,
        "predicted_ts": prediction.tokens_per_second,
        "predicted_ts_range": list(prediction.tokens_per_second_range),
        "dispatches": len(prediction.dispatches),
        **({"trace_seconds": sum(measured.values()) / 1e6} if measured else {}),
        "kernels": [
            {
                "kernel": row.kernel,
                "dispatches": row.dispatches,
                "predicted_us": row.microseconds,
                "bound": row.bound,
                **({"trace_us": measured[row.kernel]} if row.kernel in measured else {}),
            }
            for row in prediction.by_kernel()
        ],
    }


def execute(arguments: argparse.Namespace) -> None:
    """Print the predictions."""
    found = predictions(arguments)
    if arguments.json:
        print(json.dumps([as_json(name, prediction) for name, prediction in found], indent=1))
        return
    from metal_prefill._support.tables import table

    console = common.console()
    for name, prediction in found:
        total, measured = prediction.seconds * 1e6, _measured(prediction)
        low, high = prediction.tokens_per_second_range
        title = f"{name} on {prediction.chip.name}, predicted: {low:,.0f} to {high:,.0f} tok/s"
        rows = [(row.kernel, row.dispatches, row.microseconds, row.bound) for row in prediction.by_kernel()]
        cells = [
            [kernel, bound, str(count), f"{time:,.1f}", f"{time / total:.1%}"]
            for kernel, count, time, bound in (*rows, ("total", len(prediction.dispatches), total, ""))
        ]
        header = ["kernel", "bound by", "dispatches", "predicted µs", "share"]
        if measured:
            header.append("in the trace µs")
            times = measured | {"total": sum(measured.values())}
            cells = [[*row, f"{times.get(row[0], 0):,.1f}"] for row in cells]
        console.print(table(title, header, cells, names=2))
    console.print(NOTE, highlight=False)
