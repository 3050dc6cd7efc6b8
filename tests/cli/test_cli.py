"""The command line: output and exit codes."""

import io
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import warnings
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest
from support import comparison
from support.programs import Run, Terminal, finished
from support.scheduled_texts import alone

import metal_prefill
from metal_prefill import Model, _core, bench, cli
from metal_prefill._support import messages
from metal_prefill.commands import common
from metal_prefill.commands.perplexity import perplexity, windows
from metal_prefill.files import GGUFFile, _gguf_file
from metal_prefill.generation import Options

COMMAND = [sys.executable, "-m", "metal_prefill"]
PROMPT = "ROMEO:\n"


def spawn(*arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen([*COMMAND, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_help_lists_every_command(output: Run) -> None:
    out = output("--help")
    for name in cli.COMMANDS:
        assert re.search(rf"^\s+{name}\b", out, re.MULTILINE), name


def test_a_missing_command_is_a_usage_error(errors: Run) -> None:
    assert "usage:" in errors()


def imported_by(code: str, late: tuple[str, ...]) -> str:
    """Run code in a separate Python process, and return the imported modules with these prefixes."""
    code += f"; import sys; print([m for m in sys.modules if m.startswith({late!r})])"
    out = finished([sys.executable, "-c", code], check=True).stdout
    return out.splitlines()[-1]


def test_help_loads_no_library() -> None:
    late = ("metal_prefill.commands", "metal_prefill.bench", "rich", "numpy")
    assert imported_by("from metal_prefill import cli; cli.main(['--help'])", late) == "[]"


def test_the_first_token_loads_no_unneeded_library() -> None:
    """Such libraries take a third of the time of the import."""
    late = (
        *("asyncio", "concurrent", "difflib", "email", "importlib.metadata", "importlib.resources"),
        *("metal_prefill.gpu", "multiprocessing", "numpy.ma.", "shutil", "socket", "ssl", "subprocess"),
        "zipfile",
    )
    Model(device="cpu").close()  # the first one measures the processor and stores the result
    code = "from metal_prefill import Model; next(Model(device='cpu', threads=1).generate('ROMEO:', 1))"
    assert imported_by(code, late) == "[]"


def test_run_continues_a_prompt_of_an_option_a_file_or_stdin_as_the_model_does(
    bundled: Model, tmp_path: Path, output: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = alone(bundled, PROMPT, 20)
    assert len(expected) > 20
    (tmp_path / "prompt.txt").write_text(PROMPT, encoding="utf-8")
    monkeypatch.setattr(sys, "stdin", io.StringIO(PROMPT))
    for given in (("-p", PROMPT), ("-f", tmp_path / "prompt.txt"), ("-f", "-")):
        assert output("run", *given, "-n", "20", "--device", "cpu") == PROMPT + expected + "\n"


def test_options_of_the_engine_reach_the_model(demo_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[tuple[object, dict[str, object]]] = []
    monkeypatch.setattr(metal_prefill, "Model", lambda path, **options: opened.append((path, options)))
    words = f"run -m {demo_path} -p a -t 3 --device cpu --compute f32 --kv-dtype f32 --max-context 77"
    arguments = [*words.split(), "--no-mmap", "--pack-cache"]
    common.open_model(cli.make_parser("run").parse_args(arguments))
    options = {"threads": 3, "device": "cpu", "compute": "f32", "kv_dtype": "f32", "max_context": 77}
    assert opened == [(demo_path, {**options, "mmap": False, "pack_cache": True})]


def test_sampling_options_default_to_those_of_the_library() -> None:
    given = common.sampling_options(cli.make_parser("run").parse_args(["run", "-p", "a"]))
    assert given.pop("seed") is None
    assert given.items() <= asdict(Options()).items()


def test_run_reads_the_file_without_mapping_on_request(
    output: Run, demo_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither the model nor the draft model may end the process when its file is truncated."""
    options = ["run", "-m", str(demo_path), "--speculate", str(demo_path), "-p", PROMPT, "-n", "6"]
    expected = output(*options, "--device", "cpu")
    monkeypatch.setattr(_gguf_file, "_map_file", lambda path: pytest.fail(f"{path} is mapped"))
    assert output(*options, "--device", "cpu", "--no-mmap") == expected


def test_run_reports_prompt_and_decode_separately(bundled: Model, errors: Run) -> None:
    line = errors("run", "-p", PROMPT, "-n", "20", code=0)
    match = re.search(
        r"prompt: (\d+) tokens, ([\d.]+) tok/s\s+\|\s+decode: (\d+) tokens, ([\d.]+) tok/s", line
    )
    assert match
    assert int(match[1]) == len(bundled.tokenizer.encode(PROMPT))
    assert int(match[3]) == 19  # the first of the 20 comes from the prompt's own logits
    assert float(match[2]) > 0
    assert float(match[4]) > 0
    assert "tok/s" not in errors("run", "-p", PROMPT, "-n", "0", code=0)  # nothing is computed


def test_run_stops_before_the_stop_text_or_writes_the_prompt_alone(output: Run) -> None:
    word = output("run", "-p", PROMPT, "-n", "60").removeprefix(PROMPT).split()[3]
    assert word not in output("run", "-p", PROMPT, "-n", "60", "--stop", word).removeprefix(PROMPT)
    assert output("run", "-p", PROMPT, "-n", "0") == PROMPT + "\n"


def test_info_counts_every_byte_of_the_tensors(output: Run, demo_path: Path) -> None:
    out = output("info")
    with GGUFFile(demo_path) as gguf:
        for kind in {tensor.type_name for tensor in gguf.tensors.values()}:
            size = sum(tensor.nbytes for tensor in gguf.tensors.values() if tensor.type_name == kind)
            assert re.search(rf"{kind}\b.*\b{size:,}\b", out), kind
    assert re.search(r"n_kv_heads\W+3\b", out)
    assert "conv_taps" not in out  # 0, the default
    assert re.search(r"tokenizer\W+gpt2 \(smollm\)", out)
    assert re.search(rf"cpu\W+available, with {_core.kernel_sets()[0]}\b", out)
    speedup = _core.pair_speedup()
    assert (f"bfloat16 pairs measured {speedup:.1f} times" in out) == (speedup > 0)


def test_synth_writes_a_model_that_runs_and_info_shows_it(tmp_path: Path, output: Run, errors: Run) -> None:
    path = tmp_path / "tiny.gguf"
    message = errors("synth", path, "--preset", "tiny", "--context", "333", code=0)
    assert f"{path.stat().st_size:,} bytes" in message
    assert output("run", "-m", path, "-p", "ab", "-n", "3").startswith("ab")
    named = output("info", "-m", path)
    assert output("info", path) == named
    assert re.search(r"context_length\W+333\b", named)
    assert "name the model once: -m FILE or FILE" in errors("info", path, "-m", path)


def test_the_speed_of_an_encoder_with_experts_is_predicted(output: Run) -> None:
    (predicted,) = json.loads(output("predict", "--preset", "privacy-filter", "-p", "300", "--json"))
    kernels = {kernel["kernel"]: kernel["dispatches"] for kernel in predicted["kernels"]}
    assert kernels["matmul_experts_swiglu_q4_0"] == kernels["choose_experts_f32"] == 8


def test_label_predicts_labels_in_words(bundled: Model, tmp_path: Path, output: Run) -> None:
    file = tmp_path / "texts.txt"
    file.write_text("O Romeo\n\nThe king is dead\n")
    words, template = ["love", "death"], "{text}: of {label}"
    command = ["label", "-f", str(file), "--labels", "love, death", "--template", template]
    found = bundled.classify(["O Romeo", "The king is dead"], words, template)
    lines = [json.loads(line) for line in output(*command, "--device", "cpu", "--json").splitlines()]
    assert [line["label"] for line in lines] == found.best
    for line, values in zip(lines, found.probabilities.tolist(), strict=True):
        assert line["probabilities"] == dict(zip(words, values, strict=True))
    default = output("label", "-f", file, "--labels", "love,death", "--device", "cpu", "--json")
    first = json.loads(default.splitlines()[0])
    assert first["probabilities"] != lines[0]["probabilities"]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("run -p a --fly", "metal-prefill run: error: unrecognized arguments: --fly"),
        ("bench serve --fly", "metal-prefill bench serve: error: unrecognized arguments: --fly"),
        ("bench serving", "argument MODE: invalid choice: 'serving' (choose from "),
        ("run -p a --top-p 2", "--top-p must be above 0 and at most 1, got 2.0"),
        ("run -p a --max-context 2000", "--max-context 2000 is outside 1 to 1024"),
        ("rerank -q a b", "no template is known for llama: pass --template"),
        ("label a", "has no classification head (cls.output.weight): pass --labels"),
        ("label a --template '{text} {label}'", "--template requires --labels"),
        ("label a --labels a,", "must be labels separated by commas, got 'a,'"),
        ("embed a", "set --pooling, such as 'mean' or 'last', as the model's card requires"),
        ("bench --demo -n 0 --streams 2", "of which there are none: --n-gen 0"),
        (
            "bench --demo --compare onnxruntime",
            "onnxruntime is measured on embeddings only: use `metal-prefill bench embed`",
        ),
        ("synth m.gguf --dim 65", "--dim 65: not a multiple of --heads 9, so pass --head-dim"),
        ("synth m.gguf --preset mamba2-130m --heads 4", "--heads 4, but --kv-heads 0: use both"),
    ],
)
def test_errors_name_options_of_the_command(line: str, message: str, errors: Run) -> None:
    assert message in errors(*shlex.split(line))


def test_the_server_names_fields_of_requests() -> None:
    message = "leave how='late' out, or set `label`; kv_dtype='f32' helps; x=3"
    fields = 'leave "how": "late" out, or set "label"; the server\'s option --kv-dtype f32 helps; x=3'
    assert messages.as_fields(message) == fields


@pytest.mark.parametrize(
    "message",
    ["/tmp/seed=3/m.gguf: no", "seed=3/m.gguf: no", "m-seed=3.gguf: no", "prompt 'seed=3'", 'text "seed=3"'],
)
def test_names_in_paths_and_quoted_texts_stay(message: str) -> None:
    assert messages.as_options(message, {"seed": "--seed"}) == message
    assert messages.as_fields(message.replace("seed", "label")) == message.replace("seed", "label")


def test_warnings_of_the_parser_are_messages_for_users(monkeypatch: pytest.MonkeyPatch, errors: Run) -> None:
    def make_parser(wanted: str | None) -> None:
        warnings.warn("an option is old", stacklevel=1)
        raise SystemExit(2)

    monkeypatch.setattr(cli, "make_parser", make_parser)
    assert errors("run") == "warning: an option is old\n"


def test_messages_recommend_commands_that_exist() -> None:
    for method, command in messages._COMMANDS.items():
        assert hasattr(bench if method.startswith("run_") else Model, method)
        assert "in Python" in command or command.split()[1].strip("`") in cli.COMMANDS


USAGE_ERRORS = (
    *("fly", "run", "run -p a -f b", "run -p a -n -1", "run -p a -n many", "run -p a -t 0"),
    *("run -p a --device cuda", "run -p a --temperature -1", "run -p a --stop ''"),
    *("run -p a --seed -1", "run -p a --answers 0", "synth", "bench -p 0", "perplexity"),
    *("bench -p 32,32 --demo", "bench -p 5000 --demo", "bench -p '' -n 0 --demo"),
    *("bench --demo -m model.gguf", "bench --demo --compare nobody"),
    *("run -p a --prompts b", "run -p a -p b -n 0", "run -p a -p b --temperature -1"),
    *("run -p a -p b --stop ''", "run -p a -p b --streams 0"),
)


def test_usage_errors_exit_with_two(capsys: pytest.CaptureFixture[str]) -> None:
    for line in USAGE_ERRORS:
        assert cli.main(shlex.split(line)) == 2, line
        printed = capsys.readouterr().err
        assert "error: " in printed, line
        assert "prompt 1" not in printed, line  # it is not an error of one of several
        assert "Traceback" not in printed, line


def test_a_missing_file_exits_with_one_and_a_list_of_what_a_model_may_be(tmp_path: Path, errors: Run) -> None:
    path = tmp_path / "none.gguf"
    for command in ("run -p a -m", "info -m", "bench -m"):
        (line,) = errors(*command.split(), path, code=1).splitlines()
        assert line.startswith(
            f"error: {path}: No such file or directory; a model is a GGUF file, a folder, "
        )
        assert "smollm2" in line
    assert errors("run", "-f", path, code=1) == f"error: {path}: No such file or directory\n"
    unset = errors("run", "-p", "a", "-m", "", code=1)  # such as a variable of the shell
    assert unset.startswith("error: '': No such")


def test_a_missing_folder_is_reported_before_any_work(
    tmp_path: Path, errors: Run, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("metal_prefill.bench.run", lambda *_, **__: pytest.fail("measured all the same"))
    folder = tmp_path / "none"
    assert cli.main(["bench", "--demo", "--json", str(folder / "out.json")]) == 1
    assert capsys.readouterr() == ("", f"error: {folder / 'out.json'}: No such file or directory\n")
    message = errors("synth", folder / "out.gguf", "--preset", "tiny", code=1)
    assert message == f"error: {folder / 'out.gguf'}: No such file or directory\n"


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize("arguments", [("run", "-p", PROMPT, "-n", "1"), ("--help",), ("run", "--help")])
def test_a_full_disk_is_reported(arguments: tuple[str, ...], unbuffered: str) -> None:
    env = {**os.environ, "PYTHONUNBUFFERED": unbuffered}
    with open("/dev/full", "w") as full:
        command = [*COMMAND, *arguments]
        process = finished(command, stdout=full, stderr=subprocess.PIPE, capture_output=False, env=env)
    assert process.returncode == 1
    assert process.stderr == "error: No space left on device\n"


@pytest.mark.parametrize(("encoding", "plus_minus"), [("ascii", "\\xb1"), ("ascii:replace", "?")])
def test_characters_that_a_terminal_lacks_are_escaped_unless_set_otherwise(
    tmp_path: Path, encoding: str, plus_minus: str
) -> None:
    (tmp_path / "text.txt").write_text("to be or not to be, that is the question")
    command = [*COMMAND, "perplexity", "-f", str(tmp_path / "text.txt"), "-c", "8"]
    found = finished(command, env={**os.environ, "PYTHONIOENCODING": encoding})
    assert (found.returncode, found.stderr) == (0, "")
    assert f" {plus_minus} " in found.stdout


@pytest.mark.skipif(sys.platform == "darwin", reason="names of files are UTF-8")
def test_names_that_are_not_utf_8_are_printed_as_their_bytes(embedder: Path, tmp_path: Path) -> None:
    (tmp_path / "\udcff.gguf").symlink_to(embedder)
    options = {"cwd": tmp_path, "env": {**os.environ, "LC_ALL": "C"}, "errors": "surrogateescape"}
    found = finished([*COMMAND, "info", "-m", "\udcff.gguf"], **options)
    assert found.stdout.startswith("\udcff.gguf: GGUF version"), found.stderr


def test_a_traceback_is_printed_on_request(
    tmp_path: Path, errors: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("METAL_PREFILL_TRACEBACK", "1")
    assert "Traceback" in errors("info", "-m", tmp_path / "none.gguf", code=1)


def test_an_interrupt_of_the_first_imports_ends_cleanly() -> None:
    """A real signal may come sooner, while Python itself starts."""
    interrupted = (
        "import builtins, runpy, sys\n"
        "original = builtins.__import__\n"
        "def interrupting(name, *rest, **options):\n"
        "    if name == 'argparse':\n"
        "        raise KeyboardInterrupt\n"
        "    return original(name, *rest, **options)\n"
        "builtins.__import__ = interrupting\n"
        "sys.modules.pop('argparse', None)\n"
    )
    for entry in (
        "runpy.run_module('metal_prefill', run_name='__main__')",
        "from importlib.metadata import entry_points\n"
        "(command,) = entry_points(group='console_scripts', name='metal-prefill')\n"
        "sys.exit(command.load()())",
    ):
        run = finished([sys.executable, "-c", interrupted + entry])
        assert (run.returncode, run.stderr) == (cli.EXIT_INTERRUPTED, "interrupted\n")


def test_little_is_imported_before_interrupts_end_cleanly() -> None:
    """The command line handles Ctrl-C once its entry point is imported, and with it the package."""
    folder = Path(metal_prefill.__file__).parents[1]
    code = (
        f"import sys; sys.path.append({str(folder)!r}); before = set(sys.modules)\n"
        "import metal_prefill.__main__; print(*(set(sys.modules) - before))"
    )
    run = finished([sys.executable, "-ISc", code], check=True)
    imported = {name for name in run.stdout.split() if not name.startswith("metal_prefill")}
    assert imported <= {"__future__", "types"}


def test_an_interrupt_ends_cleanly() -> None:
    # Sampled text ends at no fixed point; the context of 1024 takes far longer than the first character.
    process = spawn("run", "-p", PROMPT, "-n", "1000", "--temperature", "1", "--seed", "1", "-t", "1")
    assert process.stdout is not None
    process.stdout.read(len(PROMPT) + 1)
    process.send_signal(signal.SIGINT)
    _, error = process.communicate(timeout=60)
    assert process.returncode == 130
    assert error == "interrupted\n"


def test_a_closed_pipe_ends_quietly() -> None:
    process = spawn("run", "-p", PROMPT, "-n", "1000", "--temperature", "1", "--seed", "1")
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.read(1)
    process.stdout.close()
    error = process.stderr.read()
    process.stderr.close()
    assert process.wait(timeout=60) == 141
    assert error == ""


@pytest.mark.parametrize("arguments", [("info",), ("--help",)])
def test_a_pipe_that_is_closed_before_any_output_ends_quietly(arguments: tuple[str, ...]) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    command = [*COMMAND, *arguments]
    process = finished(command, stdout=writer, stderr=subprocess.PIPE, capture_output=False)
    os.close(writer)
    assert (process.returncode, process.stderr) == (141, "")


def test_windows_start_with_bos_and_drop_the_remainder() -> None:
    assert windows(range(10), 4, bos=99) == [[99, 1, 2, 3], [99, 5, 6, 7]]
    assert windows(range(10), 4, bos=None) == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert windows(range(3), 4, bos=None) == []


def test_perplexity_counts_second_halves_only() -> None:
    # A window of 8 scores tokens 5, 6 and 7: entries 4, 5 and 6 of the log probabilities.
    log_probs = np.array([-50, -50, -50, -50, -1, -2, -3], np.float32)
    result = perplexity(lambda window: log_probs, [[0] * 8, [0] * 8])
    assert result.value == pytest.approx(np.exp(2.0))
    assert result.n_scored == 6
    assert result.n_windows == 2
    variance = 2 / 3
    assert result.error == pytest.approx(np.exp(2.0) * np.sqrt(variance / 5))


@pytest.mark.parametrize("compute", ["int8", "f32"])
def test_perplexity_matches_llama_cpp(compute: str, tmp_path: Path, output: Run) -> None:
    recorded = json.loads(comparison.PERPLEXITY.read_text())
    (tmp_path / "verse.txt").write_text(comparison.VERSE)
    options = ["-f", str(tmp_path / "verse.txt"), "-c", str(comparison.VERSE_WINDOW), "--compute", compute]
    pattern = r"perplexity ([\d.]+) ± [\d.]+ over (\d+) tokens in (\d+ windows?) of"
    match = re.match(pattern, output("perplexity", *options))
    assert match
    assert float(match[1]) == pytest.approx(recorded["perplexity"], rel=0.005)
    assert int(match[2]) == recorded["tokens"]
    one = re.match(pattern, output("perplexity", *options, "--windows", "1"))
    assert one
    assert one[3] == "1 window"


def test_a_text_shorter_than_a_window_is_a_usage_error(tmp_path: Path, errors: Run) -> None:
    file = tmp_path / "short.txt"
    file.write_text("To be", encoding="utf-8")
    assert "fewer than a window of 512: use a longer text, or set --window" in errors(
        "perplexity", "-f", file
    )


def test_progress_is_not_shown_in_a_pipe() -> None:
    with common.progress_bar("prompt", "tokens") as progress:
        assert progress is None


def test_progress_is_shown_in_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("TERM", "xterm")
    with common.progress_bar("prompt", "tokens") as progress:
        assert progress is not None
        progress(1024, 4096)
    shown = terminal.getvalue()
    assert "prompt" in shown
    assert "1,024/4,096 tokens" in re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", shown)


def test_texts_follow_a_json_schema(tmp_path: Path, output: Run, errors: Run) -> None:
    pytest.importorskip("llguidance", reason="needs the extra guide")
    schema = tmp_path / "schema.json"
    schema.write_text('{"enum": ["ROMEO", "JULIET"]}')
    command = ("run", "--device", "cpu", "--json-schema", schema)
    assert output(*command, "-p", "He: ").strip() in ('He: "ROMEO"', 'He: "JULIET"')
    texts = output(*command, "-p", "A", "-p", "B").split()
    assert [line[1:] in ('"ROMEO"', '"JULIET"') for line in texts] == [True, True]
    schema.write_text('{"type": "nope"}')
    assert "Invalid type: nope" in errors(*command, "-p", "A", code=1)
    schema.write_text('{"type": ')
    assert "schema.json is not JSON" in errors(*command, "-p", "A")


def test_a_closed_standard_input_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, errors: Run
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "stdin", None)  # as Python sets it for `<&-` in a shell
    for line in ("run -f -", "run --prompts - -o a.jsonl", "chat", "embed -f - -o a.npy", "rerank -q a -f -"):
        (error,) = errors(*line.split()).splitlines()
        assert "standard input is closed" in error
