// Two prompts with a common prefix: how much of the second one is reused, and the time that it saves.

import { post } from "./api.js";
import { el, field, styled } from "./dom.js";
import { count, decimal, seconds } from "./format.js";
import { promptDetails, tokenBar } from "./prefill.js";
import { remember, tokensOf } from "./sent.js";

const SHARED = `You are the librarian of a small town. You answer in one sentence, you name the shelf, and you never invent a book.
Shelf A holds plays and poems, shelf B travel, shelf C the sciences, shelf D letters and diaries, shelf E maps.
Books marked with a star may be read in the library only. The library opens at nine and closes at six, on Sundays at noon.
`;
const FIRST = `${SHARED}\nReader: Where do I find a play about two families?\nLibrarian:`;
const SECOND = `${SHARED}\nReader: May I take the star map home?\nLibrarian:`;

const fresh = () => `page ${crypto.getRandomValues(new Uint32Array(4)).join("-")}`;

export class Compare {
  constructor(root, model) {
    const area = (value) => {
      const node = el("textarea", { rows: "11", spellcheck: "false" });
      node.value = value;
      return node;
    };
    this.first = area(FIRST);
    this.second = area(SECOND);
    this.button = el("button", { class: "strong", type: "submit" }, "Compare");
    this.results = el("div", { class: "results", "aria-live": "polite" });
    root.append(
      el("div", { class: "part-head" }, el("h2", {}, "Two prompts that share a prefix")),
      el("div", { class: "scroll" },
        el("p", { class: "lead" }, "Each prompt is computed in full, then the second one once more after the first. ",
          "What both begin with is then found in the prefix cache."),
        el("form", { class: "pair", onsubmit: (event) => { event.preventDefault(); this.run(); } },
          field("compare-first", "First prompt", this.first),
          field("compare-second", "Second prompt", this.second),
          el("div", { class: "buttons" }, this.button)),
        this.results),
    );
    if (!model.tasks.includes("completion")) {
      this.button.disabled = true;
      this.results.append(el("p", { class: "empty" }, `${model.id} generates no text.`));
    }
  }

  async run() {
    this.button.disabled = true;
    this.results.replaceChildren(el("p", { class: "status" }, "computing …"));
    try {
      const [first, second] = [this.first.value, this.second.value];
      // Prefixes are found only among requests with the same prompt_cache_key: a new one has none.
      const shared = fresh();
      const whole = await this.measure(second, fresh());
      const before = await this.measure(first, shared);
      const after = await this.measure(second, shared);
      this.show(before, after, whole, await tokensOf({ prompt: second }));
    } catch (error) {
      this.results.replaceChildren(el("p", { class: "problem", role: "alert" }, error.message));
    }
    this.button.disabled = false;
  }

  async measure(prompt, cacheKey) {
    const answer = await post("v1/completions", { prompt, max_tokens: 1, temperature: 0, prompt_cache_key: cacheKey });
    remember(answer.id, "a comparison");
    const reused = answer.usage.prompt_tokens_details.cached_tokens;
    return { reused, computed: answer.usage.prompt_tokens - reused, time: answer.timings.prefill_seconds };
  }

  show(before, after, whole, ids) {
    const saved = whole.time - after.time;
    const most = Math.max(...[before, after, whole].map(({ time }) => time));
    const percent = (100 * after.reused) / (after.reused + after.computed);
    const row = (name, { reused, computed, time }) => {
      const bar = styled(tokenBar(reused, computed), { width: `${Math.max((100 * time) / most, 1)}%` });
      return el("tr", {},
        el("th", { scope: "row" }, name),
        el("td", { class: "wide time-bar" }, bar),
        el("td", { class: "number" }, seconds(time)),
        el("td", { class: "number" }, count(reused)),
        el("td", { class: "number" }, count(computed)));
    };
    this.results.replaceChildren(
      el("p", { class: "headline" },
        el("strong", {}, `${decimal(percent)}%`), " of the second prompt was reused",
        saved > 0
          ? [", which saved ", el("strong", {}, seconds(saved)), ` (${decimal(whole.time / after.time)} times as fast).`]
          : ". Both took about the same time: longer shared prefixes save more."),
      el("table", { class: "figures" },
        el("thead", {}, el("tr", {},
          el("th", { scope: "col" }, "Prefill"), el("th", { scope: "col", class: "wide" }, el("span", { class: "visually-hidden" }, "Time, as a bar")),
          el("th", { scope: "col", class: "number" }, "Time"), el("th", { scope: "col", class: "number" }, "Reused"),
          el("th", { scope: "col", class: "number" }, "Computed"))),
        el("tbody", {}, row("First, in full", before), row("Second, in full", whole), row("Second, after the first", after))),
      el("p", { class: "legend" }, el("span", { class: "key reused" }), "reused", el("span", { class: "key computed" }), "computed",
        el("span", { class: "hint" }, "Lengths of the bars are times.")),
      promptDetails(ids, after.reused),
    );
  }
}
