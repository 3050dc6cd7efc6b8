"""The page in a real browser: ``make test-page``.

The page may send requests only to its own server, and its console must stay empty; each test checks both.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import shutil
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.running_server import Running, running, wait_until

from metal_prefill import Model, hub

sync_api = pytest.importorskip(
    "playwright.sync_api", reason="the page's tests need playwright: make test-page"
)

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
PARTS = ("chat", "compare", "vectors", "batch")
WIDE, NARROW = {"width": 1440, "height": 900}, {"width": 360, "height": 720}
README_PICTURE = Path(__file__).parents[2] / "docs/images/page.png"
MOST_PICTURE_BYTES = 300_000
# The lowest contrast of WCAG 2.2, level AA.
LEAST_CONTRAST = 4.5

# The contrast of each visible text with its background.
CONTRASTS = """() => {
  const canvas = new OffscreenCanvas(1, 1).getContext("2d", { willReadFrequently: true });
  const channels = (colour) => {
    canvas.clearRect(0, 0, 1, 1);
    canvas.fillStyle = colour;
    canvas.fillRect(0, 0, 1, 1);
    return [...canvas.getImageData(0, 0, 1, 1).data];
  };
  const linear = (x) => (x <= 0.04045 ? x / 12.92 : ((x + 0.055) / 1.055) ** 2.4);
  const weights = [0.2126, 0.7152, 0.0722];
  const light = (colour) => weights.reduce((sum, weight, i) => sum + weight * linear(colour[i] / 255), 0);
  const left_out = "svg, noscript, :disabled, .skip, .visually-hidden";
  const found = [];
  for (const node of document.querySelectorAll("body *")) {
    const own = [...node.childNodes].some((child) => child.nodeType === 3 && child.data.trim());
    if (!own || !node.checkVisibility({ visibilityProperty: true }) || node.closest(left_out)) continue;
    let opacity = 1;
    let behind = null;
    for (let up = node; up; up = up.parentElement) {
      opacity *= Number(getComputedStyle(up).opacity);
      const ground = channels(getComputedStyle(up).backgroundColor);
      if (!behind && ground[3] === 255) behind = ground;
    }
    const text = channels(getComputedStyle(node).color);
    const seen = text.map((x, i) => opacity * x + (1 - opacity) * behind[i]);
    const [low, high] = [light(seen), light(behind)].sort((a, b) => a - b);
    found.push([(high + 0.05) / (low + 0.05), node.textContent.trim().slice(0, 40)]);
  }
  return found;
}"""
# Controls without a name for screen readers.
NAMELESS = """() => {
  const controls = "button, input, textarea, summary, [role=button], [role=img], [role=log]";
  const named = (node) => node.labels?.length || node.getAttribute("aria-label") || node.textContent.trim();
  const found = [...document.querySelectorAll(controls)].filter((node) => !named(node));
  return found.map((node) => node.outerHTML);
}"""


def browser_path() -> str:
    """Return the browser to test with; skip the tests without one."""
    if found := os.environ.get("CHROMIUM"):
        return found
    for name in BROWSERS:
        if found := shutil.which(name):
            return found
    pytest.skip("no Chromium found: apt-get install chromium, or set CHROMIUM to its path")


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    path = browser_path()
    # Chromium's sandbox does not start for root.
    flags = ["--no-sandbox"] if os.geteuid() == 0 else []
    with sync_api.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=path, args=flags)
        yield browser
        browser.close()


class Pages:
    """Opens pages, and records forbidden requests and messages."""

    def __init__(self, browser: Any) -> None:
        self._browser = browser
        self._contexts: list[Any] = []
        self.problems: list[str] = []

    def open(self, server: Running, *, ready: bool = True, **options: Any) -> Any:
        """Open the page in a separate context."""
        context = self._browser.new_context(**{"viewport": WIDE, **options})
        context.set_default_timeout(60_000)
        self._contexts.append(context)
        page = context.new_page()
        page.on("console", lambda message: self._note_console(message))
        page.on("pageerror", lambda error: self.problems.append(f"exception: {error}"))
        page.on("request", lambda request: self._note_request(request.url, server.url))
        page.goto(f"{server.url}/")
        if ready:
            page.locator("body[data-ready]").wait_for()
        return page

    def _note_console(self, message: Any) -> None:
        # Chromium reports each answer with an error status; tests check those themselves.
        if message.type in ("error", "warning") and "Failed to load resource" not in message.text:
            self.problems.append(f"console: {message.text}")

    def _note_request(self, url: str, own: str) -> None:
        if not url.startswith(f"{own}/"):
            self.problems.append(f"request to {url}")

    def close(self) -> None:
        """Close all pages."""
        for context in self._contexts:
            context.close()


@pytest.fixture
def pages(browser: Any) -> Iterator[Pages]:
    pages = Pages(browser)
    yield pages
    pages.close()
    assert pages.problems == []


def ask(page: Any, text: str) -> Any:
    """Send a text, and return the card of its finished answer."""
    cards = page.locator("#chat .card")
    before = cards.count()
    page.fill("#chat-input", text)
    page.press("#chat-input", "Enter")
    card = cards.nth(before)
    card.locator(".prefill").wait_for()
    return card


def facts(card: Any) -> dict[str, str]:
    """Return the facts of prefill by their names."""
    names = card.locator(".prefill dt").all_inner_texts()
    return dict(zip(names, card.locator(".prefill dd").all_inner_texts(), strict=True))


def test_a_text_is_continued_and_its_prefill_explained(pages: Pages, demo_path: Path) -> None:
    with Model(demo_path, device="cpu") as model, running(model) as server:
        page = pages.open(server)
        page.locator(".options summary").click()
        page.fill("#chat-max", "12")
        page.fill("#chat-temperature", "0")
        card = ask(page, "ROMEO:\nBut soft, what light")
        with model.session() as session:
            expected = "".join(session.generate("ROMEO:\nBut soft, what light", 12))
        assert card.locator(".answer").text_content() == expected
        found = facts(card)
        n = len(model.tokenizer.encode("ROMEO:\nBut soft, what light"))
        assert found["Prompt"] == f"{n} tokens"
        assert found["Reused"] == "none"
        assert re.fullmatch(rf"{n} in [\d.]+ m?s · [\d,.]+ tok/s", found["Prefill"])
        assert re.fullmatch(r"[\d,.]+ tok/s", found["Decode"])
        assert re.fullmatch(r"[\d,.]+ m?s", found["First token"])
        card.get_by_role("button", name="Continue").click()
        again = page.locator("#chat .card").nth(1)
        again.locator(".prefill").wait_for()
        assert re.fullmatch(r"\d+ · answer 1", facts(again)["Reused"])
        again.locator("summary").click()
        again.locator("mark.computed").wait_for(state="attached")
        shown = again.locator(".prompt-text").text_content()
        assert "But soft, what light" in shown
        assert again.locator("mark.reused").count() == 1


def test_a_conversation_reuses_its_earlier_messages(pages: Pages, server: Running) -> None:
    page = pages.open(server)
    page.get_by_role("radio", name="Chat", exact=True).click()
    page.locator(".options summary").click()
    page.fill("#chat-max", "20")
    ask(page, "Who art thou, and what is thy name?")
    reused = facts(ask(page, "And whence comest thou?"))["Reused"]
    assert reused.endswith("· answer 1")
    page.get_by_role("button", name="New").click()
    assert page.locator("#chat .card").count() == 0


def slow_down(server: Running) -> None:
    """Slow passes down so that a text can be stopped; those of the bundled model are too fast."""
    counted = server.service.loop._after_pass
    assert counted is not None

    def wait(scheduler: Any) -> None:
        counted(scheduler)
        time.sleep(0.03)

    server.service.loop._after_pass = wait


@pytest.mark.parametrize("way", ["button", "key"])
def test_an_answer_can_be_stopped(pages: Pages, cpu_model: Model, way: str) -> None:
    with running(cpu_model) as server:
        slow_down(server)
        page = pages.open(server)
        page.locator(".options summary").click()
        page.fill("#chat-max", "1000")
        page.fill("#chat-input", "ROMEO:\n")
        page.press("#chat-input", "Enter")
        page.locator("#chat .answer", has_text=re.compile(".{20}", re.DOTALL)).wait_for()
        if way == "button":
            page.get_by_role("button", name="Stop").click()
        else:
            page.press("#chat-input", "Escape")
        page.locator("#chat .status", has_text="stopped").wait_for()
        wait_until(lambda: server.service._texts == 0)
        assert page.locator("#chat .answer").text_content() != ""
        assert page.get_by_role("button", name="Send").is_visible()
        assert page.get_by_role("button", name="Try again").is_visible()


def test_errors_of_the_server_are_shown(pages: Pages, cpu_model: Model) -> None:
    with running(cpu_model) as server:
        page = pages.open(server)
        page.fill("#chat-input", "word " * 3000)
        page.press("#chat-input", "Enter")
        page.locator("#chat .problem", has_text="exceeds the context of 1024").wait_for()
    page.locator("#batch .problem", has_text="The server does not answer.").wait_for()


def test_the_running_batch_is_drawn(pages: Pages, demo_path: Path) -> None:
    with Model(demo_path, device="cpu") as model, running(model) as server:
        page = pages.open(server)
        page.locator(".options summary").click()
        page.fill("#chat-max", "200")
        ask(
            page, "A long text that has some more tokens than a page of them has, so that there are two. " * 4
        )
        ask(page, "A long text that has some more tokens than a page of them has, and another end. " * 4)
        page.locator("#batch .request", has_text="answer 2").wait_for()
        assert page.locator("#batch .request").count() == 2
        page.locator("#batch .passes rect.tint").first.wait_for(state="attached")
        assert page.locator("#batch .passes rect.solid").count() > 0
        assert "row" in page.locator("#batch .passes").get_attribute("aria-label")
        kept = int(model.stats()["prefix_bytes"] / model.stats()["kv_page_bytes"])
        page.locator("#batch .squares i.kept").nth(kept - 1).wait_for(state="attached")
        assert page.locator("#batch .squares i.kept").count() == kept
        page.locator("#batch .run-facts", has_text="shared by 2").wait_for()
        page.locator("#batch .run-text", has_text="A long text that has").first.wait_for()
        page.locator("#batch dd", has_text=re.compile(r"\d%")).first.wait_for()


def test_two_prompts_are_compared(pages: Pages, demo_path: Path) -> None:
    first, second = (
        "To be, or not to be, that is the question. " * 9 + "A",
        "To be, or not to be, that is the question. " * 9,
    )
    with Model(demo_path, device="cpu") as model, running(model) as server:
        page = pages.open(server)
        page.get_by_role("tab", name="Compare").click()
        page.fill("#compare-first", first)
        page.fill("#compare-second", second)
        page.get_by_role("button", name="Compare").click()
        page.locator(".headline").wait_for()
        ids = [model.tokenizer.encode(text) for text in (first, second)]
    shared = next(i for i, (a, b) in enumerate(itertools.zip_longest(*ids)) if a != b)
    rows = page.locator(".figures tbody tr")
    numbers = [rows.nth(i).locator(".number").all_inner_texts() for i in range(3)]
    assert [cells[1:] for cells in numbers] == [
        ["0", str(len(ids[0]))],
        ["0", str(len(ids[1]))],
        [str(shared), str(len(ids[1]) - shared)],
    ]
    assert f"{100 * shared / len(ids[1]):.1f}%" in page.locator(".headline").inner_text()


def test_vectors_are_projected_on_their_principal_components(
    pages: Pages, vector_model: Model, vector_server: Running
) -> None:
    texts = ["to be", "or not to be", "that is", "the question", "whether 'tis nobler", "in the mind"]
    page = pages.open(vector_server)
    page.get_by_role("tab", name="Vectors").click()
    page.fill("#vectors-input", "\n".join(texts))
    page.get_by_role("button", name="Show").click()
    page.locator(".scatter").wait_for()
    vectors = vector_model.embed(texts).astype(np.float64)
    left, sizes, _ = np.linalg.svd(vectors - vectors.mean(0), full_matrices=False)
    explained = sizes**2 / (sizes**2).sum()
    labels = page.locator(".scatter .axis").all_text_contents()
    assert [int(re.findall(r"(\d+)%", label)[0]) for label in labels] == np.round(
        100 * explained[:2]
    ).tolist()
    places = [
        re.findall(r"[\d.]+", dot.get_attribute("transform")) for dot in page.locator(".scatter .dot").all()
    ]
    found = np.array(places, np.float64)
    for axis in range(2):  # up to its sign, and to the scale of the picture
        expected = left[:, axis] * sizes[axis]
        assert abs(np.corrcoef(found[:, axis], expected)[0, 1]) > 0.9999
    similar = vectors @ vectors.T
    for i in (0, 1):
        assert page.locator(".chosen-text").inner_text() == texts[i]
        nearest = sorted((j for j in range(len(texts)) if j != i), key=lambda j: -similar[i, j])[:3]
        items = page.locator(".neighbours li").all_inner_texts()
        assert [item.split(" ", 1)[1].strip() for item in items] == [texts[j] for j in nearest]
        page.locator(".scatter .dot").nth(i).focus()
        page.keyboard.press("ArrowRight")


def test_a_model_without_vectors_is_reported(pages: Pages, server: Running) -> None:
    page = pages.open(server)
    page.get_by_role("tab", name="Vectors").click()
    assert "--pooling mean" in page.locator("#vectors .empty").inner_text()
    assert page.get_by_role("button", name="Show").is_disabled()


def test_the_key_is_requested_and_kept_in_the_tab(pages: Pages, cpu_model: Model) -> None:
    key = "schlüssel ✓"
    with running(cpu_model, api_keys=[key]) as server:
        page = pages.open(server, ready=False)
        page.fill("#key-input", "wrong")
        page.press("#key-input", "Enter")
        page.locator("#key-problem", has_text="Incorrect API key provided").wait_for()
        page.fill("#key-input", key)
        page.get_by_role("button", name="Use this key").click()
        page.locator("body[data-ready]").wait_for()
        assert key not in page.evaluate("() => JSON.stringify(localStorage) + document.cookie")
        assert key not in page.url
        page.reload()
        page.locator("body[data-ready]").wait_for()
        other = pages.open(server, ready=False)
        other.locator("#key-dialog[open]").wait_for()
        other.keyboard.press("Escape")
        other.locator("#notice", has_text="You didn't provide an API key").wait_for()
        assert other.locator("#chat-input").count() == 0


def test_hostile_names_and_texts_are_escaped(pages: Pages, cpu_model: Model) -> None:
    hostile = "<img src=x onerror='window.broken=1'><script>window.broken=1</script><b>bold</b>"
    event = {
        "id": hostile,
        "choices": [{"index": 0, "text": hostile, "finish_reason": None}],
    }
    with running(cpu_model, names=[hostile]) as server:
        page = pages.open(server)
        assert page.locator(".model-name").inner_text() == hostile
        body = f"data: {json.dumps(event)}\n\ndata: {json.dumps({'error': {'message': hostile}})}\n\n"
        page.route(
            "**/v1/completions", lambda route: route.fulfill(body=body, content_type="text/event-stream")
        )
        page.fill("#chat-input", hostile)
        page.press("#chat-input", "Enter")
        page.locator("#chat .card .problem").wait_for()
        for part in (".question", ".answer", ".problem"):
            assert hostile in page.locator(f"#chat .card {part}").text_content()
        assert page.evaluate("() => window.broken") is None
        assert page.locator("main img, main script, main b").count() == 0
        # The policy itself: a string is not parsed, and a script that is not a file does not run.
        assert page.evaluate(
            "() => { try { document.body.innerHTML = '<b>x</b>'; return false; } catch { return true; } }"
        )
    pages.problems = [problem for problem in pages.problems if "TrustedHTML" not in problem]


def test_everything_is_reachable_by_keyboard(pages: Pages, server: Running) -> None:
    page = pages.open(server)
    assert page.evaluate("() => document.activeElement.id") == "chat-input"
    page.locator("#tab-chat").focus()
    for name in ("compare", "vectors", "chat"):
        page.keyboard.press("ArrowRight")
        assert page.evaluate("() => document.activeElement.id") == f"tab-{name}"
        assert page.locator(f"#{name}").is_visible()
    reached = []
    page.evaluate("() => document.activeElement.blur()")
    for _ in range(20):
        page.keyboard.press("Tab")
        reached.append(
            page.evaluate("() => document.activeElement.id || document.activeElement.textContent.trim()")
        )
    for control in ("Skip to the content", "tab-chat", "theme-button", "New", "chat-input", "Options"):
        assert control in reached
    assert page.evaluate(NAMELESS) == []


def test_colours_follow_the_system_and_the_choice(pages: Pages, server: Running) -> None:
    page = pages.open(server, color_scheme="light")

    def ground() -> str:
        return str(page.evaluate("() => getComputedStyle(document.body).backgroundColor"))

    light = ground()
    page.emulate_media(color_scheme="dark")
    dark = ground()
    assert light != dark
    button = page.locator("#theme-button")
    for label, expected in (("light", light), ("dark", dark)):
        button.click()
        assert button.get_attribute("aria-label") == f"Colours: {label}"
        assert ground() == expected
    page.emulate_media(color_scheme="light")
    page.reload()
    page.locator("body[data-ready]").wait_for()
    assert ground() == dark
    button.click()
    assert ground() == light


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("size", [WIDE, NARROW], ids=["wide", "narrow"])
def test_the_page_is_legible_at_every_size(
    pages: Pages, server: Running, scheme: str, size: dict[str, int]
) -> None:
    page = pages.open(server, color_scheme=scheme, viewport=size)
    ask(page, "ROMEO:\n")
    for part in PARTS:
        tab = page.locator(f"#tab-{part}")
        if not tab.is_visible():  # the batch is next to the chat
            continue
        tab.click()
        if part == "compare":
            page.get_by_role("button", name="Compare").click()
            page.locator(".headline").wait_for()
        if part == "batch":
            page.locator("#batch .request").first.wait_for()
        assert [found for found in page.evaluate(CONTRASTS) if found[0] < LEAST_CONTRAST] == []
        overflow = page.evaluate("() => document.scrollingElement.scrollWidth - innerWidth")
        assert overflow <= 0


@pytest.mark.real_model
def test_the_picture_of_the_readme(pages: Pages, tmp_path: Path) -> None:
    """With ``PAGE_PICTURE=1``, the picture replaces that of the README."""
    try:
        path = hub.resolve_model("smollm2")
    except Exception as error:
        if os.environ.get("METAL_PREFILL_REQUIRE_MODEL", "0") not in ("", "0"):
            raise
        pytest.skip(f"needs SmolLM2-135M-Instruct: {error}")
    with Model(path, device="cpu") as model, running(model, names=["SmolLM2-135M-Instruct"]) as server:
        # The first request also reads the chat template.
        server.post("/v1/chat/completions", {"messages": QUESTION, "max_tokens": 1, "prompt_cache_key": "x"})
        page = pages.open(server, color_scheme="light", viewport={"width": 1400, "height": 940})
        page.locator(".options summary").click()
        page.fill("#chat-system", LIBRARIAN)
        page.fill("#chat-temperature", "0")
        page.fill("#chat-max", "60")
        page.locator(".options summary").click()
        ask(page, "Where do I find a play about two families?")
        clients = [threading.Thread(target=read, args=(server, *client)) for client in CLIENTS]
        for client in clients:
            client.start()
            page.wait_for_timeout(250)
        page.fill("#chat-input", "And a map of the stars?")
        page.press("#chat-input", "Enter")
        page.locator("#chat .prefill").nth(1).wait_for()
        page.locator("#chat summary", has_text="Prompt").nth(1).click()
        page.locator("#chat mark.computed").wait_for(state="attached")
        page.wait_for_timeout(600)
        picture = README_PICTURE if os.environ.get("PAGE_PICTURE") else tmp_path / "page.png"
        page.screenshot(path=picture)
        for client in clients:
            client.join()
    assert 20_000 < picture.stat().st_size < MOST_PICTURE_BYTES


LIBRARIAN = (
    "You are the librarian of a small town. Answer in one sentence and name the shelf. Shelf A holds plays "
    "and poems, shelf B travel, shelf C the sciences, shelf D letters and diaries, shelf E maps."
)
QUESTION = [{"role": "user", "content": "Who are you?"}]
CLIENTS = [
    ("I look for a book about Italy and the sea.", 90),
    ("Do you have the letters of painters?", 120),
    ("Who wrote about the planets?", 200),
    ("Which maps may I borrow?", 260),
]


def read(server: Running, question: str, max_tokens: int) -> None:
    """Ask the librarian a question, with an answer of fixed length."""
    messages = [{"role": "system", "content": LIBRARIAN}, {"role": "user", "content": question}]
    body = {
        "messages": messages,
        "max_tokens": max_tokens,
        "min_tokens": max_tokens,
        "temperature": 0.8,
        "seed": 1,
    }
    server.post("/v1/chat/completions", body)
