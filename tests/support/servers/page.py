"""Opens the server's page in Chromium, and reads its contents."""

import os
from typing import Any

import pytest

from support.places import ROOT
from support.programs import finished
from support.servers.running_server import Running

WIDE, NARROW = {"width": 1440, "height": 900}, {"width": 360, "height": 720}

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
    find = ". tools/build/setup_common.sh; find_browser"
    found = os.environ.get("CHROMIUM") or finished(["bash", "-c", find], cwd=ROOT).stdout.strip()
    if not found:
        pytest.skip("no Chromium found: apt-get install chromium, or set CHROMIUM to its path")
    return found


class Pages:
    """Opens pages, and records forbidden requests and messages."""

    def __init__(self, browser: Any) -> None:
        self._browser = browser
        self._contexts: list[Any] = []
        self.problems: list[str] = []

    def open(self, server: Running, *, ready: bool = True, **options: Any) -> Any:
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
        # Chromium reports each answer with an error status, which tests check themselves.
        if message.type in ("error", "warning") and "Failed to load resource" not in message.text:
            self.problems.append(f"console: {message.text}")

    def _note_request(self, url: str, own: str) -> None:
        if not url.startswith(f"{own}/"):
            self.problems.append(f"request to {url}")

    def close(self) -> None:
        for context in self._contexts:
            context.close()


def choose(page: Any, **options: str) -> None:
    """Set options of the chat."""
    page.locator(".options summary").click()
    for name, value in options.items():
        page.fill(f"#chat-{name}", value)


def send(page: Any, text: str) -> None:
    page.fill("#chat-input", text)
    page.press("#chat-input", "Enter")


def ask(page: Any, text: str) -> Any:
    """Send a text, and return the card of its finished answer."""
    cards = page.locator("#chat .card")
    before = cards.count()
    send(page, text)
    card = cards.nth(before)
    card.locator(".prefill").wait_for()
    return card


def facts(card: Any) -> dict[str, str]:
    names = card.locator(".prefill dt").all_inner_texts()
    return dict(zip(names, card.locator(".prefill dd").all_inner_texts(), strict=True))
