"""``metal-prefill chat``: a conversation in a terminal or through pipes."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

from metal_prefill.chat import Conversation
from metal_prefill.commands import common
from metal_prefill.errors import MetalPrefillError

HELP = """\
/reset       forget the conversation
/save FILE   write the conversation and its cache
/load FILE   continue a saved one
/help        this list
/quit        end; so does Ctrl-D
Ctrl-C stops an answer."""

EXAMPLE = "echo 'Who art thou?' | metal-prefill chat -n 20"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    common.add_model_arguments(parser)
    parser.add_argument("--system", metavar="TEXT", help="system message, before the first message")
    parser.add_argument("--load", metavar="FILE", help="continue a saved conversation")
    what = "maximum number of tokens in an answer"
    common.add_number(parser, "-n --max-tokens", what, 256, common.not_negative)
    parser.add_argument(
        "--stats",
        action="store_true",
        help="print the numbers of reused and computed tokens after each answer",
    )
    common.add_sampling_arguments(parser)


def execute(arguments: argparse.Namespace) -> None:
    """Run the conversation until the input ends."""
    stdin = common.standard_input()
    with common.open_model(arguments, generates=True) as model:
        conversation = Conversation(model, system=arguments.system, max_context=arguments.max_context)
        with closing(conversation):
            if arguments.load:
                conversation.load(arguments.load)
            if model.tokenizer.chat_template is None:
                _say(
                    f"note: {model.engine.name} has no chat template, so it continues texts rather than "
                    "answers. Models for chat are called instruct or chat, such as -m smollm2."
                )
            chat = _Chat(conversation, arguments)
            if stdin.isatty():
                _say(f"{model.engine.name} on {model.device}. /help lists the commands.")
                _talk(chat)
            else:
                for line in stdin:
                    if not chat.take(line):
                        return


def _talk(chat: _Chat) -> None:
    """Read messages from a terminal; errors and Ctrl-C do not end the conversation."""
    with suppress(ImportError):
        import readline  # noqa: F401  (gives input() history and editing)
    while True:
        try:
            if not chat.take(input("> ")):
                return
        except KeyboardInterrupt:
            _say("\n/quit or Ctrl-D ends the conversation")
        except EOFError:
            _say("")
            return
        except (MetalPrefillError, OSError, ValueError) as error:
            _say(f"error: {error}")


class _Chat:
    """Handler of input lines, which are messages or commands."""

    def __init__(self, conversation: Conversation, arguments: argparse.Namespace) -> None:
        self._conversation = conversation
        self._max_tokens: int = arguments.max_tokens
        self._stats: bool = arguments.stats
        self._options = {**common.sampling_options(arguments), **common.speculation(arguments)}
        self._commands: dict[str, Callable[[str], object]] = {
            "/reset": lambda _: conversation.reset(),
            "/save": lambda name: conversation.save(_path(name)),
            "/load": lambda name: conversation.load(_path(name)),
            "/help": lambda _: _say(HELP),
        }

    def take(self, line: str) -> bool:
        """Process a line; return False if it ends the conversation."""
        line = line.strip()
        name, _, rest = line.partition(" ")
        if name == "/quit":
            return False
        if name in self._commands:
            self._commands[name](rest.strip())
        elif line.startswith("/"):
            raise ValueError(f"unknown command {name}; /help lists the commands")
        elif line:
            self._answer(line)
        return True

    def _answer(self, text: str) -> None:
        begin = read = time.perf_counter()
        prompt = 0

        def progress(done: int, total: int) -> None:
            nonlocal prompt, read
            prompt, read = done, time.perf_counter()

        options: dict[str, Any] = {**self._options, "progress": progress}
        with closing(self._conversation.answer(text, self._max_tokens, **options)) as pieces:
            try:
                for piece in pieces:
                    print(piece, end="", flush=True)
            except KeyboardInterrupt:
                _say(" [stopped]")
            finally:
                print(flush=True)
        if self._conversation.forgotten:
            _say(f"[context full: dropped the oldest {self._conversation.forgotten} messages]")
        if self._stats:
            session, answer_s = self._conversation.session, time.perf_counter() - read
            reused = int(session.stats()["tokens_reused"])
            _say(
                f"[prompt: {prompt} tokens, {reused} reused, {1e3 * (read - begin):.0f} ms"
                f" | answer: {session.position - prompt} tokens, {1e3 * answer_s:.0f} ms]"
            )


def _path(name: str) -> Path:
    if not name:
        raise ValueError("name a file, as in /save talk.session")
    return Path(name).expanduser()


def _say(text: str) -> None:
    sys.stdout.flush()  # keep the order of the answer and messages on stderr
    print(text, file=sys.stderr, flush=True)
