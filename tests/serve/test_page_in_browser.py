"""The page in a real browser, and its picture in the README: ``make test-page``."""

import itertools
import json
import os
import re
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from support.places import ROOT
from support.scheduled_texts import alone
from support.servers.page import CONTRASTS, NAMELESS, NARROW, WIDE, Pages, ask, choose, facts, send
from support.servers.running_server import Running, running, wait_until

from metal_prefill import Model

PARTS = ("chat", "compare", "batch")
# The lowest contrast of WCAG 2.2, level AA.
LEAST_CONTRAST = 4.5


def test_a_text_is_continued_and_its_prefill_explained(pages: Pages, demo_path: Path) -> None:
    with Model(demo_path, device="cpu") as model, running(model) as server:
        page = pages.open(server)
        choose(page, max="12", temperature="0")
        card = ask(page, "ROMEO:\nBut soft, what light")
        assert card.locator(".answer").text_content() == alone(model, "ROMEO:\nBut soft, what light", 12)
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
    page.locator("#chat").get_by_role("radio", name="Chat").click()
    choose(page, max="20")
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
        choose(page, max="1000")
        send(page, "ROMEO:\n")
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
        send(page, "word " * 3000)
        page.locator("#chat .problem", has_text="exceeds the context of 1024").wait_for()
    page.locator("#batch .problem", has_text="The server does not answer.").wait_for()


def test_the_running_batch_is_drawn(pages: Pages, demo_path: Path) -> None:
    with Model(demo_path, device="cpu") as model, running(model) as server:
        page = pages.open(server)
        choose(page, max="200")
        for end in ("so that there are two", "and another end"):
            ask(page, f"A long text that has some more tokens than a page of them has, {end}. " * 4)
        page.locator("#batch .request", has_text="answer 2").wait_for()
        assert page.locator("#batch .request").count() == 2
        page.locator("#batch .passes .tint").first.wait_for(state="attached")
        assert page.locator("#batch .passes .solid").count() > 0
        assert "row" in page.locator("#batch .passes").get_attribute("aria-label")
        kept = int(model.stats()["prefix_bytes"] / model.stats()["kv_page_bytes"])
        page.locator("#batch .squares i.kept").nth(kept - 1).wait_for(state="attached")
        assert page.locator("#batch .squares i.kept").count() == kept
        page.locator("#batch .run-facts", has_text="shared by 2").wait_for()
        page.locator("#batch .run-text", has_text="A long text that has").first.wait_for()
        page.locator("#batch dd", has_text=re.compile(r"\d%")).first.wait_for()


def test_two_prompts_are_compared(pages: Pages, demo_path: Path) -> None:
    second = "To be, or not to be, that is the question. " * 9
    first = second + "A"
    with Model(demo_path, device="cpu") as model, running(model) as server:
        page = pages.open(server)
        page.get_by_role("radio", name="Compare").click()
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
    event = {"id": hostile, "choices": [{"index": 0, "text": hostile, "finish_reason": None}]}
    with running(cpu_model, names=[hostile]) as server:
        page = pages.open(server)
        assert page.locator(".model-name").inner_text() == hostile
        body = f"data: {json.dumps(event)}\n\ndata: {json.dumps({'error': {'message': hostile}})}\n\n"
        page.route(
            "**/v1/completions", lambda route: route.fulfill(body=body, content_type="text/event-stream")
        )
        send(page, hostile)
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
    for name in ("compare", "chat"):
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


README_PICTURE = ROOT / "docs/images/page.png"
MOST_PICTURE_BYTES = 300_000
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


@pytest.mark.real_model
def test_the_picture_of_the_readme(pages: Pages, smollm2_path: Path, tmp_path: Path) -> None:
    """With ``PAGE_PICTURE=1``, the picture replaces that of the README."""
    with (
        Model(smollm2_path, device="cpu") as model,
        running(model, names=["SmolLM2-135M-Instruct"]) as server,
    ):
        # The first request also reads the chat template.
        server.post("/v1/chat/completions", {"messages": QUESTION, "max_tokens": 1, "prompt_cache_key": "x"})
        page = pages.open(server, color_scheme="light", viewport={"width": 1400, "height": 940})
        choose(page, system=LIBRARIAN, temperature="0", max="60")
        page.locator(".options summary").click()
        ask(page, "Where do I find a play about two families?")
        clients = [threading.Thread(target=read, args=(server, *client)) for client in CLIENTS]
        for client in clients:
            client.start()
            page.wait_for_timeout(250)
        send(page, "And a map of the stars?")
        page.locator("#chat .prefill").nth(1).wait_for()
        page.locator("#chat summary", has_text="Prompt").nth(1).click()
        page.locator("#chat mark.computed").wait_for(state="attached")
        page.wait_for_timeout(600)
        picture = README_PICTURE if os.environ.get("PAGE_PICTURE") else tmp_path / "page.png"
        page.screenshot(path=picture)
        for client in clients:
            client.join()
    assert 20_000 < picture.stat().st_size < MOST_PICTURE_BYTES
