"""Benchmark results: a row for each test of each engine, and tables for terminals and HTML."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from datetime import datetime, timezone

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from metal_prefill._support.messages import counted
from metal_prefill._support.tables import table
from metal_prefill.bench._cases import COMPARED, LONGEST_TEXT, SAMPLING, SHORTEST_TEXT, Case
from metal_prefill.bench._engines import OURS, Identity, Options, why_not
from metal_prefill.bench._model_file import ModelFacts
from metal_prefill.bench._runner import Runner, Spread, ratios, spread, stddev
from metal_prefill.bench._worker import WorkerProcess

NANO = 1e9
_OF_MODEL = ("model_filename", "model_type", "model_size", "model_n_params")
EMULATOR_NOTE = "runs on an emulator: says nothing about the speed of Metal"


@dataclass(frozen=True, kw_only=True)
class Row(Case, Identity):
    """Result of one test of one engine. Names shared with llama-bench have the same meaning.

    Attributes
    ----------
    engine, test : str
        ``metal_prefill`` or a peer; ``pp512`` or ``tg64``, ``tg64x8`` for 8 streams together.
    build, device : str
        Name and version of the engine; where it ran.
    n_prompt, n_gen, n_depth, n_streams, n_texts, choice, text_tokens
        The test, see `metal_prefill.bench._cases.Case`.
    avg_ns, stddev_ns, median_ns : float
        Of `samples_ns`, the durations in nanoseconds; 0 if there are none, for the reason in `note`.
    avg_ts, stddev_ts, median_ts : float
        Of `samples_ts`, the speeds in tokens per second, of all streams together.
    n_dropped, n_degraded : int
        Numbers of samples from a degraded machine that were dropped, and that were kept for lack of better
        ones.
    load_ns : int
        Load time in nanoseconds.
    peak_rss : int
        Largest resident memory of the engine's process over the whole benchmark, in bytes.
    ratio : Spread or None
        In a peer's row, our speed over the peer's: below 1 is a loss.
    of_compared : Spread or None
        Speed over that of the test which this one is compared with, of the same engine: of sampling over
        that of greedy choices, and with drafts over that without.
    """

    engine: str
    test: str
    cpu_info: str
    model_filename: str
    model_type: str
    model_size: int
    model_n_params: int
    compute: str
    kv_dtype: str
    test_time: str
    avg_ns: float
    stddev_ns: float
    median_ns: float
    avg_ts: float
    stddev_ts: float
    median_ts: float
    samples_ns: list[int]
    samples_ts: list[float]
    n_dropped: int
    n_degraded: int
    calibration_ns: int
    load_ns: int
    peak_rss: int
    note: str = ""
    ratio: Spread | None = None
    of_compared: Spread | None = None

    @property
    def measured(self) -> bool:
        return bool(self.samples_ns)

    @property
    def spread(self) -> Spread:
        """Median and range of the speed in tokens per second."""
        return spread(self.samples_ts)


def make_row(
    runner: Runner, worker: WorkerProcess, case: Case, facts: ModelFacts, options: Options, cpu: str
) -> Row:
    """Summarize the samples of one test of one engine, or why it has none."""
    selection, reason = runner.selection(worker, case), why_not(worker.name, case)
    samples_ns = [sample.ns for sample in selection.kept]
    samples_ts = [case.timed_tokens * NANO / ns for ns in samples_ns]
    of_ns, of_ts = samples_ns or [0], samples_ts or [0.0]
    median_ns = spread(of_ns).median
    identity = worker.identity
    notes = [f"not measured: {reason}"] if reason else []
    if case.n_texts and samples_ns:
        notes.append(f"{case.calls * case.n_texts * NANO / median_ns:,.1f} texts/s")
    if "emulat" in identity.device.lower():
        notes.append(EMULATOR_NOTE)
    if selection.n_degraded:
        notes.append(
            f"{selection.n_degraded} of {len(samples_ns)} samples taken while the machine was busy or slow"
        )
    return Row(
        engine=worker.name,
        test=case.name,
        cpu_info=cpu,
        **{name: getattr(facts, name) for name in _OF_MODEL},
        compute=options.compute,
        kv_dtype=options.kv_dtype,
        test_time=datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ"),
        avg_ns=sum(of_ns) / len(of_ns),
        stddev_ns=stddev(of_ns),
        median_ns=median_ns,
        avg_ts=sum(of_ts) / len(of_ts),
        stddev_ts=stddev(of_ts),
        median_ts=spread(of_ts).median,
        samples_ns=samples_ns,
        samples_ts=samples_ts,
        n_dropped=selection.n_dropped,
        n_degraded=selection.n_degraded,
        calibration_ns=runner.calibrator.reference_ns,
        load_ns=worker.load_ns,
        peak_rss=worker.peak_rss,
        note="; ".join(notes),
        **vars(identity),
        **vars(case),
    )


MIB = 1 << 20
_CHOICES = {
    "argmax": "the most probable tokens, chosen by the engine",
    "sampled": "tokens sampled by the engine, " + ", ".join(f"{k} {v}" for k, v in SAMPLING.items()),
    "greedy": "a text copied, one token at a time",
    "lookup": "the same with drafts from the text so far",
}


def rate(value: float) -> str:
    """Format tokens per second with about four digits."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}"


def _table(results: BenchResults) -> Table:
    """Return a row for each test, with a column for each engine, and for each peer one of ratios."""
    ours = results.rows[0]
    columns: list[tuple[str, ...]] = [("test", *results.tests, "load s", "peak MiB")]
    for engine in results.engines:
        rows = [results.row(engine, test) for test in results.tests]
        speeds = (row.spread.text(rate) if row.measured else "" for row in rows)
        first = rows[0]
        columns.append((engine, *speeds, f"{first.load_ns / NANO:.2f}", f"{first.peak_rss / MIB:.0f}"))
        if engine != OURS:
            speeds = ("" if row.ratio is None else row.ratio.text("{:.2f}".format, "x") for row in rows)
            load, peak = first.load_ns / ours.load_ns, first.peak_rss / ours.peak_rss
            columns.append(("ratio", *speeds, f"{load:.2f}x", f"{peak:.2f}x"))
    header, *cells = zip(*columns, strict=True)
    title = f"{ours.model_type}, {ours.model_size / MIB:.0f} MiB, {counted(ours.n_threads, 'thread')}, "
    return table(f"{title}{ours.cpu_info}\ntok/s, median (min-max)", header, cells)


def _captions(results: BenchResults) -> Iterator[str]:
    for engine in results.engines:
        row = results.row(engine, results.tests[0])
        yield f"{engine}: {row.build}, {row.device}, {row.settings}"
    if len(results.engines) > 1:
        yield "ratio: our speed to the peer's, or the peer's load time or memory to ours; below 1 is a loss"
    for row in results.rows:
        if row.n_depth and not row.n_streams and not row.choice:
            yield f"{row.test}: tokens one by one, from a context of {row.n_depth} on"
            break
    streams = max((row.n_streams for row in results.rows), default=0)
    if streams:
        yield f"x{streams}: {counted(streams, 'sequence')} in each pass; tok/s counts the tokens of all"
    for choice, meaning in _CHOICES.items():
        if test := next((row.test for row in results.rows if row.choice == choice), None):
            yield f"{test}: {meaning}"
    if test := next((row.test for row in results.rows if row.n_texts and not row.text_tokens), None):
        yield f"{test}: vectors of texts of {SHORTEST_TEXT} to {LONGEST_TEXT} tokens"
    if test := next((row.test for row in results.rows if row.text_tokens), None):
        yield f"{test}: vectors of texts, tokens of each and number of texts in a call"
    for row in results.rows:
        if row.of_compared is not None:
            compared = COMPARED[row.choice]
            test = next(other.test for other in results.rows if other.choice == compared)
            ratio = row.of_compared.text("{:.3f}".format)
            yield f"{row.engine} {row.test}: {ratio} of the speed of {test}, samples in turns"
    yield from (f"note: {note}" for note in results.notes())


@dataclass
class BenchResults:
    """Rows of one benchmark; a table in a terminal and in a notebook.

    Attributes
    ----------
    rows : list of Row
        By engine, ours first, then by test.
    """

    rows: list[Row] = field(default_factory=list)

    def __post_init__(self) -> None:
        measured = {(row.engine, row.test): row for row in self.rows if row.measured}
        by_choice = {(row.engine, row.choice): row for row in measured.values()}

        def compared(row: Row) -> Row:
            ours = None if row.engine == OURS else measured.get((OURS, row.test))
            other = by_choice.get((row.engine, COMPARED[row.choice])) if row.choice in COMPARED else None
            return replace(
                row,
                ratio=None if ours is None else ratios(ours.samples_ts, row.samples_ts),
                of_compared=None if other is None else ratios(row.samples_ts, other.samples_ts),
            )

        self.rows = [compared(row) if row.measured else row for row in self.rows]

    @property
    def engines(self) -> list[str]:
        """Names of the engines, in order."""
        return list(dict.fromkeys(row.engine for row in self.rows))

    @property
    def tests(self) -> list[str]:
        """Names of the tests, in order."""
        return list(dict.fromkeys(row.test for row in self.rows))

    def row(self, engine: str, test: str) -> Row:
        """Return the row of one test of one engine; raises KeyError if there is none."""
        for row in self.rows:
            if (row.engine, row.test) == (engine, test):
                return row
        raise KeyError(f"{engine} has no test {test}")

    def notes(self) -> list[str]:
        """Return the notes that qualify the numbers."""
        tests: dict[tuple[str, str], list[str]] = {}
        for row in self.rows:
            if row.note:
                tests.setdefault((row.engine, row.note), []).append(row.test)
        notes = [f"{engine} {', '.join(names)}: {note}" for (engine, note), names in tests.items()]
        dropped = sum(row.n_dropped for row in self.rows)
        if dropped:
            notes.append(f"{dropped} samples were taken while the machine was busy or slow, and repeated")
        return notes

    def to_json(self) -> str:
        """Return the rows as a JSON array of objects."""
        return json.dumps([asdict(row) for row in self.rows], indent=2)

    def __rich__(self) -> RenderableType:
        if not self.rows:
            return Text("no results")
        return Group(_table(self), *(Text(line, style="dim") for line in _captions(self)))

    def _repr_html_(self) -> str:
        console = Console(record=True, width=1000, file=io.StringIO())
        console.print(self)
        return console.export_html(inline_styles=True, code_format="<pre>{code}</pre>")
