// Pictures of the running batch: rows of passes, pages, the tree of prefixes.

import { el, styled } from "./dom.js";
import { brief, count, counted } from "./format.js";
import { nameOf, textOfRun } from "./sent.js";

const COLOURS = 8;
const MOST_BARS = 48;
const GRID = [1, 4, 16, 64, 256, 1024, 4096];

const colours = new Map(); // by id and number of a text, in the order of appearance

/** The class that colours a text; the same for as long as the page is open. */
export function colourOf(text) {
  const name = `${text.id} ${text.index}`;
  if (!colours.has(name)) colours.set(name, colours.size % COLOURS);
  return `c${colours.get(name)}`;
}

/** Passes as bars; those that /activity adds up are one bar. */
export class Passes {
  constructor() {
    this.bars = [];
    this.latest = -1; // number of the latest pass
    this.picture = el("div", { class: "passes", role: "img" });
    this.node = el("figure", {}, this.picture, el("figcaption", { class: "legend" },
      el("span", { class: "key solid" }), "texts", el("span", { class: "key tint" }), "prompts",
      el("span", { class: "key others" }), "vectors, other keys",
      el("span", { class: "hint" }, "A wide bar is several passes of the same texts.")));
    this.draw();
  }

  /** Adds what /activity tells; passes that it adds up may have grown since they were told before. */
  add(passes, texts) {
    for (const { first, last, ...rows } of passes) {
      const count = last - first + 1;
      const parts = (kind, list) => list.map(([i, n]) => ({ rows: n / count, kind, colour: colourOf(texts[i]) }));
      const bar = { first, last, count, rows: [...parts("solid", rows.texts), ...parts("tint", rows.prompts)] };
      const rest = rows.others + rows.inputs;
      if (rest > 0) bar.rows.push({ rows: rest / count, kind: "others", colour: "" });
      const at = this.bars.findIndex((other) => other.first === first);
      if (at >= 0) this.bars[at] = bar;
      else this.bars.push(bar);
      this.latest = last;
    }
    this.bars.splice(0, this.bars.length - MOST_BARS);
    if (passes.length) this.draw();
  }

  draw() {
    const total = (bar) => bar.rows.reduce((sum, { rows }) => sum + rows, 0);
    const top = 2 ** Math.ceil(Math.log2(Math.max(4, ...this.bars.map(total))));
    const height = (rows) => `${100 * Math.sqrt(Math.min(rows / top, 1))}%`;
    const grid = GRID.filter((value) => value <= top && value * 128 > top).map((value) =>
      styled(el("div", { class: "grid" }, el("span", {}, count(value))), { bottom: height(value) }));
    const bars = this.bars.map((bar) => {
      const rows = counted(Math.round(total(bar)), "row");
      const title = `${bar.count > 1 ? `${counted(bar.count, "pass")} to` : "pass"} ${bar.last}: ${rows}`;
      const parts = bar.rows.map(({ kind, colour, rows }) => styled(el("i", { class: `${kind} ${colour}` }), { flexGrow: rows }));
      return styled(el("div", { class: "pass", title }, parts),
        { height: height(total(bar)), width: `${Math.min(4 + 3 * Math.log2(bar.count), 36)}px` });
    });
    const last = this.bars.at(-1);
    this.picture.ariaLabel = last
      ? `Rows of the latest passes. Pass ${last.last} has ${counted(Math.round(total(last)), "row")} of ${counted(last.rows.length, "request")}.`
      : "Rows of the latest passes. There has been no pass.";
    const nothing = el("p", { class: "hint" }, "Passes appear here as they run.");
    this.picture.replaceChildren(...grid, el("div", { class: "bars" }, last ? bars : nothing));
  }
}

/** Pages of K and V, a square each or for several. */
export function pagesPicture({ in_use: used, kept, limit }) {
  const most = 150;
  const each = Math.max(1, Math.ceil(used / (most * 0.8)));
  const squares = [];
  const add = (kind, pages) => {
    for (let i = 0; i < Math.round(pages / each) && squares.length < most; i += 1) squares.push(el("i", { class: kind }));
  };
  add("kept", kept);
  add("held", Math.max(used - kept, 0));
  add("free", Math.min(limit - used, each * (Math.max(Math.ceil((squares.length + 1) / 25), 2) * 25 - squares.length)));
  return el("div", { class: "squares", role: "img", "aria-label": `${counted(used, "page")} in use, ${count(kept)} of them kept for later prompts` }, squares);
}

/** The prefix tree: tokens to the right, a line for each prompt. */
export class PrefixTree {
  constructor() {
    this.node = el("div", { class: "tree" });
    this.shown = "";
  }

  update(nodes, texts) {
    const named = texts.map((text) => `${text.id} ${nameOf(text.id)}`);
    const state = JSON.stringify([nodes, named]);
    if (state === this.shown) return;
    this.shown = state;
    if (nodes.length === 0) {
      this.node.replaceChildren(el("p", { class: "hint" }, "Prompts appear here, and the prefixes that they share."));
      return;
    }
    const children = nodes.map(() => []);
    const roots = [];
    nodes.forEach((node, i) => (node.parent === null ? roots : children[node.parent]).push(i));
    const end = Math.max(...nodes.map((node) => node.start + node.tokens));
    this.node.replaceChildren(el("ul", { "aria-label": "Prefixes of the latest prompts" },
      roots.map((i) => this.branch(i, nodes, children, texts, end))));
  }

  branch(i, nodes, children, texts, end) {
    const { start, tokens, kept, texts: ending } = nodes[i];
    const below = this.below(i, nodes, children);
    const share = (part, whole) => `${((100 * part) / whole).toFixed(2)}%`;
    const label = el("span", { class: "run-text" });
    const names = [...new Set(ending.map((t) => nameOf(texts[t].id)))].filter((name) => name !== null);
    const bar = el("span", { class: "run" }, styled(el("span", { class: "kept" }), { width: share(kept, tokens) }));
    styled(bar, { marginLeft: share(start, end), width: `max(${share(tokens, end)}, 3px)` });
    const first = below.map((t) => texts[t]).find((text) => nameOf(text.id));
    if (first) {
      textOfRun(first.id, start, Math.min(start + tokens, start + 40)).then((text) => {
        if (text) label.textContent = brief(text, 60);
      });
    }
    const line = el("div", { class: "run-line" }, bar,
      el("span", { class: "run-facts" },
        counted(tokens, "token"), kept < tokens && `, ${count(kept)} kept`,
        below.length > 1 && ` · shared by ${below.length}`, names.length > 0 && ` · ${names.join(", ")}`),
      label);
    return el("li", {}, line, children[i].length > 0 && el("ul", {}, children[i].map((child) => this.branch(child, nodes, children, texts, end))));
  }

  /** Texts whose prompts contain the run of a node. */
  below(i, nodes, children) {
    return [...nodes[i].texts, ...children[i].flatMap((child) => this.below(child, nodes, children))];
  }
}
