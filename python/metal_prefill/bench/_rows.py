"""Rows of a benchmark: the results of each test of each engine."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from statistics import median

from metal_prefill.bench._cases import COMPARED, Case, Choice
from metal_prefill.bench._client import Worker
from metal_prefill.bench._engines import OURS, Options
from metal_prefill.bench._model_file import ModelFacts
from metal_prefill.bench._runner import Selection, Spread, ratios, spread, stddev

NANO = 1e9
EMULATOR_NOTE = "runs on an emulator: says nothing about the speed of Metal"


@dataclass
class Row:
    """Result of one test of one engine. Names shared with llama-bench have the same meaning.

    Attributes
    ----------
    engine, test : str
        ``metal_prefill`` or a peer; ``pp512`` or ``tg64``, ``tg64x8`` for 8 streams together.
    build, device : str
        Name and version of the engine; where it ran.
    n_prompt, n_gen, n_depth : int
        Timed prompt tokens, timed decoded tokens, tokens in the context before; of each stream.
    n_streams : int
        Sequences that go through the model together; 0 where there is one, by the calls for one.
    n_texts : int
        Texts to embed; 0 in other tests.
    text_tokens : int
        Tokens of each text to embed; 0 in other tests, and where lengths differ.
    choice : str
        How the engine chose the tokens that were timed: ``"argmax"``, ``"sampled"``, ``"greedy"``,
        ``"lookup"``, see `metal_prefill.bench._cases`; empty where they were given.
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
    build: str
    device: str
    settings: str
    cpu_info: str
    model_filename: str
    model_type: str
    model_size: int
    model_n_params: int
    n_threads: int
    compute: str
    kv_dtype: str
    n_prompt: int
    n_gen: int
    n_depth: int
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
    n_streams: int = 0
    choice: Choice = ""
    n_texts: int = 0
    text_tokens: int = 0
    of_compared: Spread | None = None

    @property
    def measured(self) -> bool:
        return bool(self.samples_ns)

    @property
    def spread(self) -> Spread:
        """Median and range of the speed in tokens per second."""
        return spread(self.samples_ts)


def make_row(
    worker: Worker,
    case: Case,
    selection: Selection,
    facts: ModelFacts,
    options: Options,
    calibration_ns: int,
    cpu: str,
    reason: str = "",
) -> Row:
    """Summarize the samples of one test of one engine, or why it has none."""
    samples_ns = [sample.ns for sample in selection.kept]
    samples_ts = [case.timed_tokens * NANO / ns for ns in samples_ns]
    of_ns, of_ts = samples_ns or [0], samples_ts or [0.0]
    identity = worker.identity
    notes = [f"not measured: {reason}"] if reason else []
    if case.n_texts and samples_ns:
        texts = case.calls * case.n_texts
        notes.append(f"{texts * NANO / float(median(samples_ns)):,.1f} texts/s")
    if "emulat" in identity.device.lower():
        notes.append(EMULATOR_NOTE)
    if selection.n_degraded:
        notes.append(
            f"{selection.n_degraded} of {len(samples_ns)} samples taken while the machine was busy or slow"
        )
    return Row(
        engine=worker.name,
        test=case.name,
        build=identity.build,
        device=identity.device,
        settings=identity.settings,
        cpu_info=cpu,
        model_filename=facts.model_filename,
        model_type=facts.model_type,
        model_size=facts.model_size,
        model_n_params=facts.model_n_params,
        n_threads=identity.threads,
        compute=options.compute,
        kv_dtype=options.kv_dtype,
        test_time=datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ"),
        avg_ns=sum(of_ns) / len(of_ns),
        stddev_ns=stddev(of_ns),
        median_ns=spread(of_ns).median,
        avg_ts=sum(of_ts) / len(of_ts),
        stddev_ts=stddev(of_ts),
        median_ts=spread(of_ts).median,
        samples_ns=samples_ns,
        samples_ts=samples_ts,
        n_dropped=selection.n_dropped,
        n_degraded=selection.n_degraded,
        calibration_ns=calibration_ns,
        load_ns=worker.load_ns,
        peak_rss=worker.peak_rss(),
        note="; ".join(notes),
        **vars(case),
    )


@dataclass
class Rows:
    """Rows of one benchmark.

    Attributes
    ----------
    rows : list of Row
        By engine, ours first, then by test.
    """

    rows: list[Row] = field(default_factory=list)

    def __post_init__(self) -> None:
        ours = {row.test: row for row in self.rows if row.engine == OURS}
        for row in self.rows:
            if row.engine != OURS and row.test in ours and row.measured and ours[row.test].measured:
                row.ratio = ratios(ours[row.test].samples_ts, row.samples_ts)
        by_choice = {(row.engine, row.choice): row for row in self.rows}
        for row in self.rows:
            other = by_choice.get((row.engine, COMPARED.get(row.choice, "")))
            if row.choice in COMPARED and other is not None and row.measured and other.measured:
                row.of_compared = ratios(row.samples_ts, other.samples_ts)

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


def in_order(rows: Sequence[Row], engines: Sequence[str]) -> list[Row]:
    """Sort rows by engine; tests keep their order."""
    return sorted(rows, key=lambda row: engines.index(row.engine))
