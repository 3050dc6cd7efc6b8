"""Benchmark finding, inserting and evicting pages of the prefix tree, by its number of pages.

It needs a build with METAL_PREFILL_TESTING, such as that of `make test`.
Each prompt has a distinct first page, so that one node has as many children as there are prompts.
"""

from __future__ import annotations

import argparse
import importlib
import time
from typing import Any

PAGE = 64
PAGES = (100, 1_000, 10_000, 100_000)


def tokens_of(prompt: int, pages: int) -> list[int]:
    """Return a prompt that shares no page with others."""
    return [prompt] * PAGE * pages


def measured(pages: int, depth: int, count: int) -> tuple[float, float, float]:
    """Return the microseconds per page of finding, inserting and evicting `count` prompts."""
    tree: Any = importlib.import_module("_cpu_testing").PrefixTree(2 * pages, 2 * pages)
    prompts = pages // depth
    for prompt in range(prompts):
        tree.insert("", tokens_of(prompt, depth))
    count = min(count, prompts // 2)
    old = [tokens_of(prompt, depth) for prompt in range(count)]
    new = [tokens_of(prompts + prompt, depth) for prompt in range(count)]
    start = time.perf_counter()
    for tokens in old:
        tree.release(tree.find("", tokens)[1])
    found = time.perf_counter()
    for tokens in new:
        tree.insert("", tokens)
    inserted = time.perf_counter()
    for _ in range(count * depth):
        tree.evict()
    evicted = time.perf_counter()
    micro = 1e6 / (count * depth)
    return (found - start) * micro, (inserted - found) * micro, (evicted - inserted) * micro


def main() -> None:
    """Print a line for each number of pages."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--depth", type=int, default=1, metavar="N", help="pages per prompt (default: 1)")
    parser.add_argument(
        "--count", type=int, default=1000, metavar="N", help="maximum number of prompts (default: 1000)"
    )
    arguments = parser.parse_args()
    print("microseconds per page; finding and inserting include the conversion of tokens from Python")
    print(f"{'pages':>8} {'find':>8} {'insert':>8} {'evict':>8}")
    for pages in PAGES:
        find, insert, evict = measured(pages, arguments.depth, arguments.count)
        print(f"{pages:8} {find:8.2f} {insert:8.2f} {evict:8.2f}")


if __name__ == "__main__":
    main()
