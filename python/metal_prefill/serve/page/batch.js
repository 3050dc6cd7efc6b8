// The running batch, from /activity and /metrics, which are asked while the panel is visible.

import { getJson, getText } from "./api.js";
import { colourOf, pagesPicture, Passes, PrefixTree } from "./charts.js";
import { el, styled } from "./dom.js";
import { bytes, count, counted, decimal } from "./format.js";
import { nameOf } from "./sent.js";

const ACTIVITY_MS = 400;
const METRICS_MS = 1500;
const [MOST_LISTED, MOST_ENDED] = [10, 4];

/** The values of Prometheus's text format that have no labels. */
function parseMetrics(text) {
  const values = {};
  for (const line of text.split("\n")) {
    const found = /^metal_prefill_(\w+) (\S+)$/.exec(line);
    if (found) values[found[1]] = Number(found[2]);
  }
  return values;
}

export class Batch {
  constructor(root) {
    this.root = root;
    this.passes = new Passes();
    this.tree = new PrefixTree();
    this.figures = Object.fromEntries(["Prefill", "Decode", "Busy", "Reused"].map((name) => [name, el("dd", {}, "–")]));
    this.list = el("ul", { class: "requests" });
    this.others = el("p", { class: "hint" });
    this.change = el("p", { class: "hint" });
    this.pages = el("div", {});
    this.problem = el("p", { class: "problem", hidden: true });
    this.before = null; // the metrics before the latest ones, and their time
    const notes = {
      Prefill: "Tokens of prompts computed per second", Decode: "Tokens written per second",
      Busy: "Part of the time in passes", Reused: "Part of all prompt tokens that were found in the prefix cache",
    };
    const group = (title, ...children) => el("section", {}, el("h3", {}, title), children);
    root.append(
      el("div", { class: "part-head" }, el("h2", {}, "Running batch"), this.state = el("span", { class: "hint" })),
      el("div", { class: "scroll" },
        this.problem,
        el("dl", { class: "figures-row" }, Object.entries(this.figures).map(([name, value]) => el("div", { title: notes[name] }, el("dt", {}, name), value))),
        group("Rows per pass", this.passes.node),
        group("Requests", this.list, this.others, this.change),
        group("Pages", this.pages),
        group("Prefix tree", this.tree.node)),
    );
    this.poll(ACTIVITY_MS, () => this.askActivity());
    this.poll(METRICS_MS, () => this.askMetrics());
  }

  get visible() {
    return !document.hidden && this.root.offsetParent !== null;
  }

  /** Repeats a request for as long as the page is open, and waits longer after an error. */
  async poll(pause, ask) {
    for (;;) {
      let wait = pause;
      if (this.visible) {
        try {
          await ask();
          this.problem.hidden = true;
        } catch (error) {
          this.problem.textContent = error.message;
          this.problem.hidden = false;
          wait = 5000;
        }
      }
      await new Promise((resolve) => { setTimeout(resolve, wait); });
    }
  }

  async askActivity() {
    const since = this.passes.latest >= 0 ? `?since=${this.passes.latest}` : "";
    const activity = await getJson(`activity${since}`);
    const { passes, texts, pages, prefixes } = activity;
    this.passes.add(passes, texts);
    const live = texts.filter(({ state }) => state !== "ended");
    const all = live.length + activity.other_texts;
    this.state.textContent = all > 0 ? `${counted(all, "text")} in flight` : "idle";
    this.list.replaceChildren(...this.rows(texts));
    this.others.textContent = activity.other_texts > 0 ? `and ${counted(activity.other_texts, "text")} of other keys` : "";
    const changed = texts.find(({ change }) => change !== null);
    this.change.textContent = changed ? `A prompt repeats an earlier one but for a change at token ${count(changed.change.position)}: `
      + `${counted(changed.change.tokens, "token")} after it had to be computed again.` : "";
    this.pages.replaceChildren(pagesPicture(pages), el("p", { class: "legend" },
      el("span", { class: "key kept" }), `${count(pages.kept)} kept for later prompts`,
      el("span", { class: "key held" }), `${count(Math.max(pages.in_use - pages.kept, 0))} held by running texts`,
      el("span", { class: "hint" }, `${count(pages.in_use)} of ${count(pages.limit)} in use; a page is ${pages.tokens} tokens, ${bytes(pages.bytes)}`)));
    this.tree.update(prefixes, texts);
  }

  /** Texts in flight, then the latest that ended. */
  rows(texts) {
    if (texts.length === 0) return [el("li", { class: "hint" }, "No request yet.")];
    const live = texts.filter(({ state }) => state !== "ended").length; // they come first
    return texts.slice(0, Math.min(live + MOST_ENDED, MOST_LISTED)).map((text) => {
      const ready = text.state === "ended" ? text.prompt_tokens : text.ready_tokens;
      const bar = el("span", { class: "progress" }, styled(el("span"), { width: `${(100 * ready) / text.prompt_tokens}%` }));
      const states = {
        waiting: "waits", prompt: `prompt ${count(text.ready_tokens)}/${count(text.prompt_tokens)}`,
        text: counted(text.tokens, "token"), ended: `${counted(text.tokens, "token")}, ended`,
      };
      const name = nameOf(text.id) ?? "another request";
      return el("li", { class: `request ${text.state} ${colourOf(text)}` },
        el("span", { class: "swatch" }), el("span", { class: "name" }, name + (text.index > 0 ? ` (${text.index + 1})` : "")),
        bar, el("span", { class: "count" }, states[text.state]));
    });
  }

  async askMetrics() {
    const now = { time: performance.now() / 1000, values: parseMetrics(await getText("metrics")) };
    const before = this.before;
    this.before = now;
    const { values } = now;
    if (values.prompt_tokens_total > 0) this.figures.Reused.textContent = `${decimal((100 * values.cached_tokens_total) / values.prompt_tokens_total)}%`;
    if (before === null) return;
    const passed = now.time - before.time;
    const change = (name) => Math.max(values[name] - before.values[name], 0) / passed;
    this.figures.Prefill.textContent = `${count(change("prefill_tokens_total"))} tok/s`;
    this.figures.Decode.textContent = `${count(change("generated_tokens_total"))} tok/s`;
    this.figures.Busy.textContent = `${count(Math.min(100 * change("pass_seconds_total"), 100))}%`;
  }
}
