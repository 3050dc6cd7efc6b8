"""Replays sessions of agents turn by turn, and counts the tokens of each prompt that a server recomputes.

The answers of the assistant are part of the sessions, so that the prompts depend neither on the model nor on
the machine.
"""

import functools
import itertools
import json
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass, replace
from typing import Any, NamedTuple

from metal_prefill.bench._engines import BenchError
from metal_prefill.bench._peers import servers
from metal_prefill.bench._peers.servers import Command, ServerOptions, ServerProcess
from metal_prefill.bench._serving import random_words

TURNS = 5
UNIT = 10  # words

Messages = list[dict[str, str]]
Ask = Callable[[Messages], tuple[int, int]]  # returns the numbers of the prompt's and of the cached tokens


def _history(turns: int, unit: int, seed: int = 0, system: str = "") -> Messages:
    """Return a conversation of this many turns; shorter ones are prefixes of longer ones."""
    messages = [{"role": "system", "content": system + random_words(16 * unit, 1000 + seed)}]
    for i in range(turns):
        messages.append({"role": "user", "content": random_words(4 * unit, 100 * seed + 2 * i + 1)})
        messages.append({"role": "assistant", "content": random_words(3 * unit, 100 * seed + 2 * i + 2)})
    return messages


def _asks(messages: Messages, unit: int, seed: int = 0) -> Messages:
    return [*messages, {"role": "user", "content": random_words(2 * unit, 50_000 + seed)}]


def _results_of_tools(i: int, unit: int) -> Messages:
    messages = _history(0, unit)
    for earlier in range(i):
        messages.append({"role": "user", "content": f"Result: {random_words(10 * unit, earlier)}"})
        messages.append({"role": "assistant", "content": f"I call tool {earlier}."})
    return [*messages, {"role": "user", "content": f"Result: {random_words(10 * unit, i)}"}]


def _edit_in_the_middle(i: int, unit: int) -> Messages:
    messages = _history(4, unit)
    messages[5] = {"role": "user", "content": random_words(4 * unit, 900 + i)}
    return _asks(messages, unit)


def _cut_front(i: int, unit: int) -> Messages:
    messages = _history(2 + i, unit)
    return _asks([messages[0], *messages[1 + 2 * i :]], unit)


def _compaction(i: int, unit: int) -> Messages:
    messages = _history(i, unit)
    if i >= 3:
        summary = {"role": "user", "content": f"Summary: {random_words(5 * unit, 800)}"}
        messages = [messages[0], summary, {"role": "assistant", "content": "Yes."}, *messages[7:]]
    return _asks(messages, unit)


def _three_agents(i: int, unit: int) -> Messages:
    turn, agent = divmod(i, 3)
    return _asks(_history(turn, unit, agent), unit, agent)


class Shape(NamedTuple):
    """Requests of a session, and the server that receives them."""

    # Function of the number of a request, and of the words in a unit of text, that returns the conversation.
    conversation: Callable[[int, int], Messages]
    agents: int = 1  # number of agents that take turns
    # Number of the request before which the server restarts. It stores prefixes, if it can.
    restart: int | None = None
    # Number of agents. The requests of one of them determine the memory of the prefix cache, which only this
    # package's server limits.
    memory_of: int | None = None

    def requests(self, unit: int) -> Iterator[Messages]:
        return (self.conversation(i, unit) for i in range(TURNS * self.agents))

    def of_one_agent(self) -> Iterator[Messages]:
        return itertools.islice(self.requests(UNIT), 0, None, self.memory_of)


SHAPES: dict[str, Shape] = {
    "growing history": Shape(lambda i, unit: _asks(_history(i, unit), unit)),
    "results of tools": Shape(_results_of_tools),
    "edited header": Shape(lambda i, unit: _asks(_history(i, unit, system=f"It is 10:{i:02}. "), unit)),
    "parallel branches": Shape(lambda i, unit: _asks(_history(2, unit), unit, i)),
    "edit in the middle": Shape(_edit_in_the_middle),
    "truncation at the front": Shape(_cut_front),
    "compaction": Shape(_compaction),
    "retries": Shape(lambda i, unit: _asks(_history(2, unit), unit)),
    "three agents in turn": Shape(_three_agents, agents=3),
    "sub-agents of one system prompt": Shape(lambda i, unit: _asks(_history(0, unit), 3 * unit, i)),
    "restart": Shape(_results_of_tools, restart=3),
    "memory too small": Shape(_three_agents, agents=3, memory_of=3),
}


@dataclass(frozen=True)
class Turn:
    """One request of a session."""

    server: str
    shape: str
    number: int  # of the request in its session
    # Tokens of the prompt, and the number that the server computed.
    prompt_tokens: int
    computed_tokens: int
    seconds: float  # time to the answer, which has one token


def replay(server: str, start: Callable[[], Ask], shape: str) -> Iterator[Turn]:
    """Send the requests of a session, one after another, to a new server made by `start`."""
    ask = start()
    for number, messages in enumerate(SHAPES[shape].requests(UNIT)):
        if number == SHAPES[shape].restart:
            ask = start()
        begin = time.perf_counter()
        prompt, cached = ask(messages)
        yield Turn(server, shape, number, prompt, prompt - cached, time.perf_counter() - begin)


def measured(name: str, options: ServerOptions, command: Command, shape: str) -> Iterator[Turn]:
    """Replay a session on a new server.

    Raises BenchError if the server does not answer, or does not report the tokens that it reuses.
    """
    wanted = SHAPES[shape]
    if wanted.memory_of is not None:
        with closing(servers.ServerProcess(name, options, command)) as server:
            for messages in wanted.of_one_agent():
                _ask(server, messages)
            pages = _answer_of(server, "GET", "/activity")["pages"]
        options = replace(options, prefix_memory=pages["kept"] * pages["bytes"])
    with tempfile.TemporaryDirectory() as store, ExitStack() as running:
        if wanted.restart is not None:
            options = replace(options, prefix_store=store)

        def start() -> Ask:
            running.close()
            server = servers.ServerProcess(name, options, command)
            running.callback(server.close)
            return functools.partial(_ask, server)

        yield from replay(name, start, shape)


def _ask(server: ServerProcess, messages: Messages) -> tuple[int, int]:
    body = {"model": server.model, "messages": messages, "max_tokens": 1, "temperature": 0}
    answer = _answer_of(server, "POST", "/v1/chat/completions", body)
    try:
        prompt = int(answer["usage"]["prompt_tokens"])
        if "prompt_n" in answer.get("timings", {}):  # tokens that llama-server computed
            return prompt, prompt - int(answer["timings"]["prompt_n"])
        return prompt, int(answer["usage"]["prompt_tokens_details"]["cached_tokens"])
    except (KeyError, TypeError) as error:
        raise BenchError(f"{server.name} does not report cached tokens: {error!r}") from error


def _answer_of(server: ServerProcess, method: str, path: str, body: Any = None) -> Any:
    with server.asked(method, path, body) as response:
        return json.loads(response.read())


@dataclass
class AgentResults:
    """Turns of sessions, by shape, then by server.

    Attributes
    ----------
    turns : list of Turn
    model : str
        File name.
    machine : str
    """

    turns: list[Turn]
    model: str
    machine: str

    def to_json(self) -> str:
        """Return everything as JSON."""
        return json.dumps(asdict(self), indent=2)

    def __rich__(self) -> Any:
        from metal_prefill._support.tables import table

        title = f"{self.model}, {self.machine}: computed tokens of each prompt, by turn"
        header = ("session", "server", "prompts", "computed", "first token, ms", "in later turns, ms")
        return table(title, header, self._rows(), names=2)

    def _rows(self) -> Iterator[tuple[str, ...]]:
        for shape in SHAPES:
            for server in dict.fromkeys(turn.server for turn in self.turns if turn.shape == shape):
                turns = [t for t in self.turns if (t.shape, t.server) == (shape, server)]
                first, *later = (f"{turn.seconds * 1e3:,.0f}" for turn in turns)
                prompts = " ".join(str(turn.prompt_tokens) for turn in turns)
                computed = " ".join(str(turn.computed_tokens) for turn in turns)
                yield shape, server, prompts, computed, first, " ".join(later)
