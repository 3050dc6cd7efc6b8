"""``metal-prefill run`` with many prompts: order, options, errors, and a file that survives kills."""

import fcntl
import io
import json
import os
import pty
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from support.programs import Run
from support.scheduled_texts import alone, texts_of

from metal_prefill import Model, Scheduler, cli
from metal_prefill.commands.result_lines import Prompt
from metal_prefill.commands.run_many import in_order

COMMAND = [sys.executable, "-m", "metal_prefill", "run", "--device", "cpu"]
SPEAKERS = ["ROMEO:\n", "JULIET:\n", "HAMLET:\n", "First Citizen:\n", "MENENIUS:\n"]


def write_lines(path: Path, *values: Any) -> Path:
    path.write_text("".join(json.dumps(value) + "\n" for value in values), encoding="utf-8")
    return path


def read_lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


RUN = ("run", "--device", "cpu")


def run(*arguments: str | Path) -> int:
    return cli.main([*RUN, *map(str, arguments)])


@pytest.fixture
def uneven(tmp_path: Path) -> Path:
    """Prompts of which later ones end before earlier ones."""
    return write_lines(
        tmp_path / "uneven.jsonl",
        *({"prompt": speaker, "max_tokens": 40 - 9 * i} for i, speaker in enumerate(SPEAKERS)),
    )


def all_answers(model: Model, prompt: str, max_tokens: int, n: int) -> list[str]:
    """Return the answers of `Model.generate_many` at temperature 1 and with seed 5."""
    return texts_of(model.generate_many([prompt], max_tokens, n=n, temperature=1.0, seed=5), n)


def test_several_answers_are_numbered(bundled: Model, output: Run) -> None:
    texts = all_answers(bundled, SPEAKERS[0], 12, 2)
    assert texts[0] == alone(bundled, SPEAKERS[0], 12, temperature=1.0, seed=5) != texts[1]
    expected = [f"--- answer {i + 1} of 2\n{SPEAKERS[0]}{text}\n" for i, text in enumerate(texts)]
    options = ("--answers", 2, "--temperature", 1, "--seed", 5)
    assert output(*RUN, "-p", SPEAKERS[0], "-n", 12, *options) == "".join(expected)


def test_several_answers_are_one_line_of_results(bundled: Model, tmp_path: Path) -> None:
    prompts, out = write_lines(tmp_path / "in.jsonl", *SPEAKERS[:2], {"prompt": []}), tmp_path / "out.jsonl"
    sampling = ["-n", "6", "--answers", "3", "--temperature", "1", "--seed", "5"]
    options: list[str | Path] = ["--prompts", prompts, *sampling, "-o", out]
    assert run(*options) == 1  # for the empty prompt
    lines = read_lines(out)
    assert [line["prompt"] for line in lines] == [*SPEAKERS[:2], []]
    for speaker, line in zip(SPEAKERS, lines[:2], strict=False):
        first, *others = line["answers"]
        assert first == {
            "continuation": alone(bundled, speaker, 6, temperature=1.0, seed=5),
            "finish_reason": "length",
        }
        assert [answer["continuation"] for answer in others] == all_answers(bundled, speaker, 6, 3)[1:]
        assert others[0] != first
    assert "empty" in lines[2]["error"]
    out.write_text("".join(json.dumps(line) + "\n" for line in lines[:1]))
    assert run(*options) == 1
    assert read_lines(out) == lines


def test_prompts_of_a_file_or_stdin_are_answered_in_order(
    bundled: Model, uneven: Path, monkeypatch: pytest.MonkeyPatch, output: Run
) -> None:
    expected = output(*RUN, "--prompts", uneven, "--streams", "3")
    lines = [json.loads(line) for line in expected.splitlines()]
    assert [line["prompt"] for line in lines] == SPEAKERS
    for i, line in enumerate(lines):
        assert line["continuation"] == alone(bundled, SPEAKERS[i], 40 - 9 * i)
        assert line["finish_reason"] == "length"
    monkeypatch.setattr(sys, "stdin", io.StringIO("\n" + uneven.read_text() + "  \n"))
    assert output(*RUN, "--prompts", "-") == expected
    reader, writer = os.pipe()
    with open(writer, "wb") as file:
        file.write(uneven.read_bytes())
    assert output(*RUN, "--prompts", f"/dev/fd/{reader}") == expected  # as <(command) in a shell
    os.close(reader)


def test_options_of_a_line_override_those_of_the_command(bundled: Model, tmp_path: Path) -> None:
    sampled = {"temperature": 0.9, "top_k": 40, "top_p": 0.9, "min_p": 0.01, "repeat_penalty": 1.1, "seed": 7}
    prompts = write_lines(
        tmp_path / "prompts.jsonl",
        SPEAKERS[0],
        {"prompt": SPEAKERS[0], "max_tokens": 3},
        {"prompt": SPEAKERS[1], **sampled},
        {"prompt": SPEAKERS[0], "stop": ["tell", "never"]},
        {"prompt": [1, 2, 3]},
    )
    assert run("--prompts", prompts, "-n", "9", "--seed", "3", "-o", tmp_path / "out.jsonl") == 0
    assert [line["continuation"] for line in read_lines(tmp_path / "out.jsonl")] == [
        alone(bundled, SPEAKERS[0], 9),
        alone(bundled, SPEAKERS[0], 3),
        alone(bundled, SPEAKERS[1], 9, **sampled),
        alone(bundled, SPEAKERS[0], 9, stop=["tell", "never"]),
        alone(bundled, [1, 2, 3], 9),
    ]
    assert read_lines(tmp_path / "out.jsonl")[3]["finish_reason"] == "stop"


def test_one_prompt_with_an_output_file_is_a_line(bundled: Model, tmp_path: Path, output: Run) -> None:
    """It replaces an incomplete line that is longer."""
    cut = json.dumps({"prompt": SPEAKERS[0], "continuation": "long " * 1000})[:-2]
    (tmp_path / "out.jsonl").write_text(cut, encoding="utf-8")
    assert output(*RUN, "-p", SPEAKERS[0], "-n", "5", "-o", tmp_path / "out.jsonl") == ""
    (line,) = read_lines(tmp_path / "out.jsonl")
    assert line.pop("options")["max_tokens"] == 5
    assert line == {
        "prompt": SPEAKERS[0],
        "continuation": alone(bundled, SPEAKERS[0], 5),
        "finish_reason": "length",
    }


INVALID = [
    ("{", "not JSON"),
    ("5", 'object with "prompt"'),
    ('{"text": "a"}', 'object with "prompt"'),
    ('{"prompt": 5}', "neither a string nor a list"),
    ('{"prompt": []}', "empty"),
    ('{"prompt": [1, 5000]}', "token id 5000"),
    ('{"prompt": [1, 1e3]}', "neither a string nor a list"),
    (json.dumps([1] * 1025), 'object with "prompt"'),
    (json.dumps({"prompt": [1] * 1025}), "context of 1024"),
    ('{"prompt": "a", "max_token": 5}', "unknown option 'max_token'"),
    ('{"prompt": "a", "max_tokens": 0}', "max_tokens must be at least 1"),
    ('{"prompt": "a", "max_tokens": true}', "'max_tokens' has the wrong type"),
    ('{"prompt": "a", "temperature": "hot"}', "'temperature' has the wrong type"),
    ('{"prompt": "a", "temperature": NaN}', "temperature must be finite"),
    ('{"prompt": "a", "seed": -1}', "seed must not be negative, got -1"),
    ('{"prompt": "a", "stop": [""]}', "stop string is empty"),
    ('{"prompt": "a", "stop": [1]}', "'stop' has the wrong type"),
    ('{"prompt": "\\ud800"}', "surrogates"),
]


def test_an_error_of_a_prompt_is_a_line_and_the_others_continue(
    bundled: Model, tmp_path: Path, errors: Run
) -> None:
    prompts, out = tmp_path / "prompts.jsonl", tmp_path / "out.jsonl"
    lines = [json.dumps(SPEAKERS[0]), *(line for line, _ in INVALID), json.dumps(SPEAKERS[1])]
    prompts.write_text("\n".join(lines), encoding="utf-8")
    n = len(INVALID)
    message = f"error: {n} of {n + 2} prompts failed; {out} has their errors"
    assert message in errors(*RUN, "--prompts", prompts, "-n", 4, "-o", out, code=1)
    first, *failed, last = read_lines(out)
    for (line, message), found in zip(INVALID, failed, strict=True):
        assert message in found["error"], line
        assert "continuation" not in found
    assert first["continuation"] == alone(bundled, SPEAKERS[0], 4)
    assert last["continuation"] == alone(bundled, SPEAKERS[1], 4)


def test_several_prompts_print_the_same_as_alone_and_an_error_is_the_exit_code(
    bundled: Model, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("-p", SPEAKERS[0], "-p", "long " * 1025, "-p", SPEAKERS[1], "-n", "12") == 1
    captured = capsys.readouterr()
    assert captured.out == "".join(f"{speaker}{alone(bundled, speaker, 12)}\n" for speaker in SPEAKERS[:2])
    assert captured.err.startswith("error: prompt 2: ")
    assert "exceeds the context of 1024" in captured.err.splitlines()[0]
    assert "1 of 3 prompts failed" in captured.err


def test_earlier_results_are_kept_and_their_errors_are_the_exit_code(tmp_path: Path, errors: Run) -> None:
    prompts = write_lines(tmp_path / "prompts.jsonl", {"prompt": []}, "a", {"prompt": []})
    out, command = tmp_path / "out.jsonl", (*RUN, "--prompts", prompts, "-n", 2)
    there = [{"prompt": [], "error": "x"}, {"prompt": "a", "continuation": "of an earlier run"}]
    write_lines(out, *there)
    for left in ("1 prompt in", "0 prompts in"):
        printed = errors(*command, "-o", out, code=1)
        assert left in printed
        assert "2 of 3 prompts failed" in printed
        assert read_lines(out)[:2] == there
        assert len(read_lines(out)) == 3
    assert errors(*command, code=1).endswith("error: 2 of 3 prompts failed\n")  # to stdout


def test_a_file_truncated_anywhere_is_completed(uneven: Path, tmp_path: Path) -> None:
    whole, out = tmp_path / "whole.jsonl", tmp_path / "out.jsonl"
    assert run("--prompts", uneven, "-o", whole) == 0
    data = whole.read_bytes()
    for cut in (0, 1, 10, len(data) // 3, len(data) // 2, -2, -1):
        out.write_bytes(data[:cut])
        assert run("--prompts", uneven, "-o", out) == 0
        assert out.read_bytes() == data


def test_a_killed_run_is_resumed(tmp_path: Path, errors: Run) -> None:
    prompts = write_lines(
        tmp_path / "prompts.jsonl",
        # Results after the long one wait for it.
        *(
            {"prompt": f"{SPEAKERS[i % 5]}{i} ", "max_tokens": 200 if i == 12 else 5 + i % 7}
            for i in range(25)
        ),
    )
    killed, whole = tmp_path / "killed.jsonl", tmp_path / "whole.jsonl"
    command = [*COMMAND, "--prompts", str(prompts), "-o", str(killed)]
    with subprocess.Popen(command, stderr=subprocess.DEVNULL) as process:
        while process.poll() is None and not (killed.exists() and killed.read_bytes().count(b"\n") >= 5):
            time.sleep(0.002)
        process.send_signal(signal.SIGKILL)
    assert process.returncode == -signal.SIGKILL
    lines = killed.read_bytes().count(b"\n")
    assert 5 <= lines < 25
    assert f"{lines} prompts done before" in errors(*RUN, "--prompts", prompts, "-o", killed, code=0)
    assert run("--prompts", prompts, "-o", whole) == 0
    assert killed.read_bytes() == whole.read_bytes()
    assert [line["prompt"] for line in read_lines(whole)] == [f"{SPEAKERS[i % 5]}{i} " for i in range(25)]


@pytest.mark.parametrize(
    "content",
    [
        b'{"prompt": "another", "continuation": ""}\n',
        b'{"prompt": "another", "conti',
        b"{}\n",
        b"[]\n",
        b"notes of mine\n",
        b"[" * 100_000 + b"\n",
        b"GGUF\x03\x00\x00\x00 a model without any line end",
        b"".join(json.dumps({"prompt": p, "error": ""}).encode() + b"\n" for p in [*SPEAKERS, "more"]),
        b"".join(json.dumps({"prompt": p, "error": ""}).encode() + b"\n" for p in SPEAKERS) + b'{"p',
    ],
    ids=["another", "cut", "no prompt", "list", "text", "deep", "binary", "a line more", "a cut line more"],
)
def test_an_unrelated_file_is_rejected_and_kept(
    content: bytes, uneven: Path, tmp_path: Path, errors: Run
) -> None:
    out = tmp_path / "out.jsonl"
    out.write_bytes(content)
    assert f"{out}: line" in errors(*RUN, "--prompts", uneven, "-o", out)
    assert out.read_bytes() == content


@pytest.mark.parametrize(
    ("before", "now", "difference"),
    [
        (["-n", "4"], ["-n", "5"], "max_tokens 4, not 5"),
        (["--temperature", "1", "--seed", "3"], ["--temperature", "1"], "seed 3, not null"),
        (["--answers", "2"], [], "answers 2, not 1"),
        ([], ["--stop", "x"], 'stop [], not ["x"]'),
        ([], ["-m", "smollm2"], 'model null, not "smollm2"'),
    ],
)
def test_results_with_other_options_are_rejected_and_kept(
    before: list[str], now: list[str], difference: str, tmp_path: Path, errors: Run
) -> None:
    prompts, out = write_lines(tmp_path / "in.jsonl", *SPEAKERS[:2]), tmp_path / "out.jsonl"
    same: list[str | Path] = ["--prompts", prompts, "-n", "4", "-o", out]
    assert run(*same, *before) == 0
    content = b"".join(out.read_bytes().splitlines(keepends=True)[:1])
    out.write_bytes(content)
    assert f"{out}: its results were computed with {difference};" in errors(*RUN, *same, *now)
    assert out.read_bytes() == content
    assert run(*same, *before) == 0
    assert len(read_lines(out)) == 2


def test_a_file_in_use_by_another_process_is_rejected(uneven: Path, tmp_path: Path, errors: Run) -> None:
    with open(tmp_path / "out.jsonl", "wb") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        printed = errors(*RUN, "--prompts", uneven, "-o", tmp_path / "out.jsonl")
    assert "another process is writing it" in printed


def test_devices_are_not_valid_outputs(errors: Run) -> None:
    assert "/dev/null: is a device" in errors(*RUN, "-p", "a", "-o", "/dev/null", code=1)


def test_a_result_is_written_when_those_before_it_are_done(bundled: Model) -> None:
    lengths = [4, 30, 2, 2]
    prompts = iter([Prompt(SPEAKERS[i], {"max_tokens": n}) for i, n in enumerate(lengths)])
    scheduler = Scheduler(bundled)
    results = in_order(scheduler, prompts, {})
    assert next(results).prompt.text == SPEAKERS[0]
    assert scheduler.streams == 1  # the long one: later ones are done and wait for it
    assert [next(results).prompt.text for _ in range(3)] == SPEAKERS[1:4]
    assert next(results, None) is None


def test_a_terminal_shows_progress_separately_from_results(uneven: Path) -> None:
    terminal, end = pty.openpty()
    environment = os.environ | {"TERM": "xterm", "COLUMNS": "80"}
    with subprocess.Popen(
        [*COMMAND, "--prompts", str(uneven)], stdout=subprocess.PIPE, stderr=end, env=environment
    ) as process:
        os.close(end)
        assert process.stdout is not None
        out = process.stdout.read()
        shown = b""
        try:
            while part := os.read(terminal, 4096):
                shown += part
        except OSError:  # Linux's error when the other end is closed
            pass
    os.close(terminal)
    assert process.returncode == 0
    assert [json.loads(line)["prompt"] for line in out.splitlines()] == SPEAKERS
    assert b"5/5 prompts" in shown
    assert b"continuation" not in shown


def test_a_prompt_that_never_fits_does_not_affect_others(bundled: Model) -> None:
    prompts = [Prompt("ROMEO:" * 40), Prompt("ROMEO:")]
    with Model(device="cpu", kv_memory=1, prefix_memory=0) as small:  # one page of 64 positions
        long, short = in_order(Scheduler(small), iter(prompts), {"max_tokens": 4})
    assert "exceeds kv_memory" in long.error
    assert short.error == ""
    assert "".join(short.answers[0].pieces) == alone(bundled, "ROMEO:", 4)
