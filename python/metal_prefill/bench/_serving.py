"""Server benchmark: many concurrent clients send the same requests to each server, in alternation."""

import json
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from functools import partial
from statistics import median
from typing import Any

import numpy as np

from metal_prefill.bench._engines import OURS, BenchError
from metal_prefill.bench._peers.servers import ServerProcess
from metal_prefill.bench._runner import Progress, Spread, ratios, spread
from metal_prefill.text._tokenizer import Tokenizer

SHARED_TOKENS = 300  # of the prefix shared by all prompts
OWN_TOKENS = 40
ANSWER_TOKENS = 64

WORDS = (
    "the a of and to in that it was for on with as at by from this which one all were when there can an your "
    "how said each she time water people word many other about out then them these so some her would make "
    "like him into has look two more write go see number no way could my than first been call who oil its "
    "now find long down day did get come made may part over new sound take only little work know place year"
)


def random_words(count: int, seed: int) -> str:
    return " ".join(np.random.default_rng(seed).choice(WORDS.split(), count))


def text_of(tokenizer: Tokenizer, tokens: int, seed: int) -> str:
    """Return a deterministic text of words, of about the given number of tokens."""
    ids = tokenizer.encode(random_words(tokens, seed), add_bos=False)
    return tokenizer.decode(ids[:tokens])


def prompts(tokenizer: Tokenizer, clients: int, round_: int) -> list[str]:
    """Return the prompts of a round: a shared prefix, followed by a text of each prompt."""
    shared = text_of(tokenizer, SHARED_TOKENS, 0)
    seeds = [1 + 100_000 * clients + 1000 * round_ + client for client in range(clients)]
    return [f"{shared}\n\n{text_of(tokenizer, OWN_TOKENS, seed)}" for seed in seeds]


@dataclass(frozen=True)
class Answer:
    text: str  # text of the answer
    first_s: float  # seconds from the request to the first piece of text


def ask(server: ServerProcess, prompt: str) -> Answer:
    """Send a request and read its answer as a stream."""
    body = {"model": server.model, "prompt": prompt, "max_tokens": ANSWER_TOKENS, "temperature": 0}
    begin = time.perf_counter()
    first = 0.0
    pieces: list[str] = []
    with server.asked("POST", "/v1/completions", {**body, "stream": True}) as response:
        for line in response:
            if not line.startswith(b"data: {"):
                continue
            chunk = json.loads(line[6:])
            if "error" in chunk:
                raise BenchError(f"{server.name}: {chunk['error']}")
            text = "".join(choice.get("text") or "" for choice in chunk["choices"])
            if text and not pieces:
                first = time.perf_counter() - begin
            pieces += [text] if text else []
    if not pieces:
        raise BenchError(f"{server.name}: an answer has no text")
    return Answer("".join(pieces), first)


def ask_all(server: ServerProcess, requests: Sequence[str]) -> tuple[float, list[Answer]]:
    """Send requests at the same time; return the seconds until all are answered, and the answers."""
    with ThreadPoolExecutor(len(requests)) as clients:
        begin = time.perf_counter()
        answers = list(clients.map(partial(ask, server), requests))
        return time.perf_counter() - begin, answers


@dataclass
class ServingRow:
    """Result of one server with one number of clients."""

    server: str
    clients: int
    # Of all clients together, one of each round. Tokens are counted from the answers by one tokenizer, the
    # same for all servers.
    tokens_per_second: list[float] = field(default_factory=list)
    # Time to the first token: the median over the clients of a round, and the longest.
    first_token_s: list[float] = field(default_factory=list)
    slowest_first_token_s: list[float] = field(default_factory=list)

    def add(self, seconds: float, answers: Sequence[Answer], tokenizer: Tokenizer) -> None:
        tokens = sum(len(tokenizer.encode(answer.text, add_bos=False)) for answer in answers)
        self.tokens_per_second.append(tokens / seconds)
        self.first_token_s.append(median(answer.first_s for answer in answers))
        self.slowest_first_token_s.append(max(answer.first_s for answer in answers))


@dataclass
class ServingResults:
    """Rows of one benchmark of servers, by server, ours first, then by clients.

    Attributes
    ----------
    rows : list of ServingRow
    model : str
        File name.
    threads : int
    machine : str
    """

    rows: list[ServingRow]
    model: str
    threads: int
    machine: str

    def row(self, server: str, clients: int) -> ServingRow:
        """Return a row; raises KeyError if there is none."""
        for row in self.rows:
            if (row.server, row.clients) == (server, clients):
                return row
        raise KeyError(f"{server} was not measured with {clients} clients")

    def speedup(self, row: ServingRow) -> Spread:
        """Return our tokens per second over those of a row, round by round; below 1 is a loss."""
        return ratios(self.row(OURS, row.clients).tokens_per_second, row.tokens_per_second)

    def sooner(self, row: ServingRow) -> Spread:
        """Return the time to the first token of a row over ours, round by round; below 1 is a loss."""
        return ratios(row.first_token_s, self.row(OURS, row.clients).first_token_s)

    def to_json(self) -> str:
        """Return everything as JSON."""
        return json.dumps(asdict(self), indent=2)

    def __rich__(self) -> Any:
        from metal_prefill._support.tables import table

        title = (
            f"{self.model}, {self.threads} threads, {self.machine}\n"
            f"{SHARED_TOKENS} tokens that all prompts share, {OWN_TOKENS} own, {ANSWER_TOKENS} answered; "
            "median (min-max) of rounds"
        )
        header = (
            "server",
            "clients",
            "tok/s of all",
            "first token, ms",
            "slowest, ms",
            "speed ratio",
            "sooner",
        )
        return table(title, header, map(self._cells, self.rows))

    def _cells(self, row: ServingRow) -> list[str]:
        return [
            row.server,
            str(row.clients),
            spread(row.tokens_per_second).text("{:,.1f}".format),
            spread([1e3 * seconds for seconds in row.first_token_s]).text("{:,.0f}".format),
            f"{median(row.slowest_first_token_s) * 1e3:,.0f}",
            *(
                ratio(row).text("{:.2f}".format, "x") if row.server != OURS else ""
                for ratio in (self.speedup, self.sooner)
            ),
        ]


def measure(
    servers: Sequence[ServerProcess],
    clients: Sequence[int],
    rounds: int,
    tokenizer: Tokenizer,
    progress: Progress,
) -> list[ServingRow]:
    """Measure servers in alternation, round by round, after a warm-up round for each number of clients."""
    rows = {(server, count): ServingRow(server.name, count) for server in servers for count in clients}
    for count in clients:
        for round_ in range(rounds + 1):
            requests = prompts(tokenizer, count, round_)
            for server in servers:
                progress(f"{server.name}, {count} clients", round_, rounds + 1)
                seconds, answers = ask_all(server, requests)
                if round_ > 0:
                    rows[server, count].add(seconds, answers, tokenizer)
    return list(rows.values())
