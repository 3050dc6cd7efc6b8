"""Kernels at the end of the model: argmax and log probability."""

import numpy as np
from support.kernels.kernel_harness import CANDIDATE, CONSTANTS, Array, Floats, Output, Run, check, make_args

INF, NAN = np.float32(np.inf), np.float32(np.nan)
NONE = CONSTANTS["ARGMAX_NONE"]


def argmax_of_rows(run: Run, logits: Floats, groups: int = 16, threads: int = 256) -> Array:
    rows, n = logits.shape
    partial, result = Output([rows, groups], CANDIDATE), Output([rows], CANDIDATE)
    run(
        "argmax_stage1",
        logits,
        partial.buffer,
        make_args("ArgmaxArgs", n=n),
        groups=(groups, rows),
        threads=(threads,),
    )
    run(
        "argmax_stage2",
        partial.check(),
        result.buffer,
        make_args("ArgmaxArgs", n=groups),
        groups=(rows,),
        threads=(32,),
    )
    return result.check()


def argmax(run: Run, logits: Floats, groups: int = 16, threads: int = 256) -> Array:
    return argmax_of_rows(run, logits[None], groups, threads)[0]


def test_argmax_of_several_rows(run: Run) -> None:
    for rows in [2, 5, 33]:
        logits = np.random.default_rng(rows).standard_normal((rows, 4097), np.float32)
        logits[1] = np.nan
        winners = argmax_of_rows(run, logits)
        assert winners["index"][1] == NONE
        others = np.arange(rows) != 1
        np.testing.assert_array_equal(winners["index"][others], logits[others].argmax(1))
        np.testing.assert_array_equal(winners["value"][others], logits[others].max(1))


def test_argmax_returns_index_and_value(run: Run) -> None:
    for n in [1, 31, 32, 33, 255, 4096, 4097, 49152]:
        logits = np.random.default_rng(n).standard_normal(n, np.float32)
        winner = argmax(run, logits)
        assert winner["index"] == logits.argmax()
        assert winner["value"] == logits.max()


def test_argmax_with_any_number_of_threads(run: Run) -> None:
    for groups, threads in [(1, 32), (7, 64), (40, 1024)]:
        logits = np.random.default_rng(5).standard_normal(5000, np.float32)
        assert argmax(run, logits, groups, threads)["index"] == logits.argmax()


def test_the_lowest_index_wins_ties(run: Run) -> None:
    for ties in [[0, 4999], [17, 18], [17, 17 + 4096], [4097, 4998], [31, 32, 255, 256]]:
        logits = np.random.default_rng(6).standard_normal(5000, np.float32)
        logits[ties] = 100
        assert argmax(run, logits)["index"] == ties[0]


def test_argmax_of_special_values(run: Run) -> None:
    for values, index in [
        ({}, 0),  # all equal
        ({7: INF}, 7),
        ({7: INF, 3: NAN, 290: INF}, 7),
        ({0: NAN}, 1),
        ({i: NAN for i in range(299)}, 299),
        ({i: -INF for i in range(299)}, 299),
        ({i: NAN for i in range(40)} | {i: -INF for i in range(40, 300)}, 40),
        ({5: np.float32(-NAN)}, 0),
        ({i: np.float32(-1) for i in range(300)} | {40: np.float32(-0.0), 90: np.float32(0)}, 40),
    ]:
        logits = np.zeros(300, np.float32)
        for i, value in values.items():
            logits[i] = value
        winner = argmax(run, logits)
        assert winner["index"] == index
        assert winner["value"] == logits[index]


def test_log_prob(run: Run) -> None:
    for vocab in [1, 300, 49152]:
        rng = np.random.default_rng(vocab)
        logits = (20 * rng.standard_normal((4, vocab)) + 300).astype(np.float32)
        targets = np.array([0, vocab - 1, -1, vocab // 2], np.int32)
        buffers = (logits, targets, Output([4]), make_args("LogProbArgs", vocab_size=vocab))
        check(run, "log_prob", *buffers, within=1e-5, groups=(4,), threads=(256,))
