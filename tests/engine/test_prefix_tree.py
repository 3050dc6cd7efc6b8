"""The prefix tree: lookups, eviction order, and number of steps."""

import random
from typing import Any

import pytest
from support.kernels.cpu_testing import cpu_testing

PAGE = 64
Node = tuple[Any, ...]  # a namespace, and the token of each page


def tokens_of(path: Node, last: int = PAGE) -> list[int]:
    """Return pages that hold one token over and over, the last one `last` times."""
    pages = [[token] * PAGE for token in path[1:]]
    pages[-1] = pages[-1][:last]
    return [token for page in pages for token in page]


def tree_of(max_pages: int, pool_pages: int | None = None, state_pages: int = 0) -> Any:
    return cpu_testing().PrefixTree(max_pages, pool_pages or 2 * max_pages, state_pages)


class Oracle:
    """The same policy, written as it is defined, without regard to the number of steps."""

    def __init__(self, max_pages: int) -> None:
        self._max_pages = max_pages
        self._clock = self._prompts = 0
        self.used: dict[Node, int] = {}  # nodes, and when each was used
        self.prompt: dict[Node, int] = {}  # number of prompts up to then
        self.interval: dict[Node, int] = {}  # prompts between its last uses, or those of its parent
        self.length: dict[Node, int] = {}  # tokens of a node's page
        self.held: list[set[Node]] = []

    def _walk(self, path: Node, last: int) -> tuple[int, list[Node]]:
        nodes: list[Node] = []
        known = 0
        for end in range(2, len(path) + 1):
            wanted = last if end == len(path) else PAGE
            if path[:end] not in self.used:
                break
            nodes.append(path[:end])
            known += min(wanted, self.length[path[:end]])
            if self.length[path[:end]] < wanted:
                break
        return known, nodes

    def known(self, path: Node, last: int) -> int:
        return self._walk(path, last)[0]

    def _use(self, path: Node) -> None:
        self._clock += 1
        for end in range(2, len(path) + 1):
            self.used[path[:end]] = self._clock
            self.prompt[path[:end]] = self._prompts

    def find(self, path: Node, last: int) -> tuple[int, list[Node]]:
        known, nodes = self._walk(path, last)
        self._prompts += 1
        for node in nodes:
            self.interval[node] = self._prompts - self.prompt[node]
        if nodes:
            self._use(nodes[-1])
        return known, nodes

    def insert(self, path: Node, last: int) -> None:
        self._prompts += 1
        for end in range(2, len(path) + 1):
            length = last if end == len(path) else PAGE
            if self.length.get(path[:end], 0) < length:  # a page with fewer of the same tokens is replaced
                self.length[path[:end]] = length
                self.interval[path[:end]] = self.interval.get(path[: end - 1], 0)
                for held in self.held:
                    held.discard(path[:end])
        self._use(path)
        while len(self.used) > self._max_pages:
            oldest = self._oldest(self._leaves())
            due = self.prompt[oldest] + self.interval[oldest]
            soon = self._prompts < due <= self._prompts + self.interval.get(path, 0)
            if soon and len(path) > 2 and path in self._leaves():
                self._drop(path)
                path = path[:-1]
            else:
                self._drop(oldest)

    def _leaves(self) -> list[Node]:
        followed = {node[:-1] for node in self.used}
        return [node for node in self.used if node not in followed]

    def _oldest(self, leaves: list[Node]) -> Node:
        return min(leaves, key=self.used.__getitem__)

    def _drop(self, node: Node) -> None:
        del self.used[node], self.length[node]
        for held in self.held:
            held.discard(node)

    def evict(self) -> bool:
        leaves = self._leaves()
        while leaves:
            oldest = self._oldest(leaves)
            if not self._is_held(oldest):
                self._drop(oldest)
                return True
            self._use(oldest)  # a page that is held is in use
            leaves.remove(oldest)
        unused = [node for node in self.used if not self._is_held(node)]
        if not unused:
            return False
        oldest = min(unused, key=lambda node: (self.used[node], -len(node)))
        for node in [node for node in self.used if node[: len(oldest)] == oldest]:
            self._drop(node)
        return True

    def _is_held(self, node: Node) -> bool:
        return any(node in held for held in self.held)


@pytest.mark.parametrize("seed", range(8))
def test_pages_are_evicted_in_the_order_of_the_policy(seed: int) -> None:
    max_pages = 24
    chance = random.Random(seed)
    tree, oracle = tree_of(max_pages, 4 * max_pages), Oracle(max_pages)
    held: list[tuple[list[int], set[Node]]] = []
    prompts: list[tuple[Node, int]] = []
    for _ in range(400):
        path = (chance.choice(["", "a", "b"]), *(chance.randrange(3) for _ in range(chance.randrange(1, 6))))
        last = chance.choice([PAGE, PAGE, 20, 40])
        prompts.append((path, last))
        match chance.randrange(5):
            case 0 | 1:
                assert tree.insert(path[0], tokens_of(path, last))
                oracle.insert(path, last)
            case 2:
                positions, pages, _ = tree.find(path[0], tokens_of(path, last))
                expected, nodes = oracle.find(path, last)
                assert positions == expected
                # A session holds all of them, or some in which it has written and others not.
                kept = [chance.random() < 0.7 for _ in pages] if len(held) < 4 else [False] * len(pages)
                tree.release([page for page, keep in zip(pages, kept, strict=True) if not keep])
                if any(kept):
                    of_session = {node for node, keep in zip(nodes, kept, strict=True) if keep}
                    held.append(([page for page, keep in zip(pages, kept, strict=True) if keep], of_session))
                    oracle.held.append(of_session)
            case 3:
                assert tree.evict() == oracle.evict()
            case 4 if held and chance.random() < 0.2:
                pages, of_session = held.pop(chance.randrange(len(held)))
                oracle.held = [other for other in oracle.held if other is not of_session]
                tree.release(pages)
        assert tree.pages == len(oracle.used)
        assert tree.namespaces == len({node[0] for node in oracle.used})
        for p, n in chance.sample(prompts, min(len(prompts), 20)):
            assert tree.known(p[0], tokens_of(p, n)) == oracle.known(p, n), (p, n)
    for pages, _ in held:
        tree.release(pages)
    assert tree.pages_in_use == tree.pages
    while tree.evict():
        pass
    assert (tree.pages, tree.namespaces, tree.pages_in_use) == (0, 0, 0)


def filled(pages: int, depth: int) -> Any:
    """Return a tree of prompts of `depth` pages, each with a distinct first page."""
    tree = tree_of(pages)
    for first in range(pages // depth):
        assert tree.insert("", tokens_of(("", first, *range(depth - 1))))
    assert tree.pages == pages
    return tree


@pytest.mark.parametrize("depth", [1, 10])
@pytest.mark.parametrize("pages", [100, 10_000])
def test_an_eviction_takes_constant_time(pages: int, depth: int) -> None:
    tree = filled(pages, depth)
    before = tree.examined
    for _ in range(50):
        assert tree.evict()
    assert tree.examined - before == 50


@pytest.mark.parametrize("pages", [100, 10_000])
def test_an_insertion_examines_one_neighbour(pages: int) -> None:
    tree = filled(pages, 1)
    for _ in range(10):
        assert tree.evict()
    before = tree.examined
    for token in range(pages, pages + 10):
        assert tree.insert("", [token] * PAGE)
    assert tree.examined - before <= 10


@pytest.mark.parametrize("pages", [100, 10_000])
def test_pages_in_use_are_skipped_once(pages: int) -> None:
    tree = filled(pages, 1)
    held = [page for token in range(50) for page in tree.find("", [token] * PAGE)[1]]
    for token in range(50, pages):
        tree.release(tree.find("", [token] * PAGE)[1])  # used after those that are held
    before = tree.examined
    for _ in range(50):
        assert tree.evict()
    assert tree.examined - before == 100
    assert [tree.known("", [token] * PAGE) for token in (0, 49, 50, 99)] == [PAGE, PAGE, 0, 0]
    tree.release(held)


def test_states_of_earlier_turns_are_dropped_before_pages() -> None:
    """A conversation grows by half a page in each turn; a state takes the memory of two pages."""
    tree = tree_of(34, 100, state_pages=2)
    other = tokens_of(("", 100, 101, 102))
    assert tree.insert("", other, [2 * PAGE, len(other)])
    for turn in range(1, 31):
        prompt = tokens_of(("", *range(15)))[: turn * PAGE // 2]
        found = tree.usable("", prompt)
        assert found == (turn - 1) * PAGE // 2  # the end of the last prompt
        tree.release(tree.find("", prompt)[1])
        intervals = range(found // (2 * PAGE) * 2 * PAGE + 2 * PAGE, len(prompt), 2 * PAGE)
        assert tree.insert("", prompt, [*intervals, len(prompt)])
    assert tree.known("", prompt) == 15 * PAGE
    # 15 pages, 7 states between them, and two ends of prompts; not what another had used before.
    assert (tree.pages, tree.states_in_use) == (15, 7 + 2)
    assert tree.known("", other) == 0


def test_states_that_only_the_tree_holds_are_evicted_next_to_pages_in_use() -> None:
    tree = tree_of(30, 100, state_pages=2)
    prompt = tokens_of(("", 1, 2, 3, 4))
    assert tree.insert("", prompt, [100, 2 * PAGE, 200, len(prompt)])
    _, pages, state = tree.find("", prompt)
    assert (tree.states_in_use, state.position) == (4, len(prompt))
    assert [tree.evict() for _ in range(4)] == [True, True, True, False]
    assert tree.usable("", prompt) == len(prompt)
    assert tree.pages == 4
    del state
    assert tree.evict()
    assert (tree.states_in_use, tree.known("", prompt)) == (0, len(prompt))
    tree.release(pages)


def test_a_longer_page_takes_over_the_states_of_the_one_that_it_replaces() -> None:
    tree = tree_of(30, 100, state_pages=2)
    prompt = tokens_of(("", 1, 2))
    assert tree.insert("", prompt[:80], [30, 80])
    assert tree.insert("", prompt[:90], [90])
    assert [tree.usable("", prompt[:n]) for n in (29, 79, 89, 128)] == [0, 30, 80, 90]
    assert tree.states_in_use == 3
    while tree.evict():
        pass
    assert (tree.states_in_use, tree.pages, tree.pages_in_use) == (0, 0, 0)


def test_branches_of_a_page_share_its_states() -> None:
    """Each continues from the state before the first token in which it differs, whichever page is found."""
    tree = tree_of(30, 100, state_pages=2)
    shared = tokens_of(("", 1, 2), 40)
    assert tree.insert("", [*shared, *[3] * 10], [len(shared)])
    for branch in (5, 4, 9, 7, 6):
        prompt = [*shared, *[branch] * 10]
        assert tree.usable("", prompt) == len(shared)
        assert tree.insert("", prompt)
    assert (tree.states_in_use, tree.pages) == (1, 7)
    while tree.evict():
        pass
    assert (tree.states_in_use, tree.pages) == (0, 0)
