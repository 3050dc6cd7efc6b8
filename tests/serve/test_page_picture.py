"""The picture of the page in the README: ``PAGE_PICTURE=1 make test-page`` renews it."""

import os
import threading
from pathlib import Path

import pytest
from support.page import Pages, ask
from support.places import ROOT
from support.running_server import Running, running

from metal_prefill import Model, hub

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
