// What prefill did for an answer: a bar of reused and computed tokens, the times, and the prompt itself.

import { el, styled } from "./dom.js";
import { count, counted, rate, seconds } from "./format.js";
import { sourceOf, textOf } from "./sent.js";

/** A bar of tokens: reused ones first, then computed ones. */
export function tokenBar(reused, computed) {
  const part = (kind, tokens) => tokens > 0 && styled(el("span", { class: kind }), { flexGrow: tokens });
  const label = `${counted(reused, "token")} reused, ${count(computed)} computed`;
  return el("div", { class: "tokens", role: "img", "aria-label": label }, part("reused", reused), part("computed", computed));
}

function fact(label, value, title) {
  return el("div", { class: "fact", title }, el("dt", {}, label), el("dd", {}, value));
}

/** The facts of an answer.
 *
 * `usage` and `timings` are those of the server, or null for a stopped answer; `firstToken` is in seconds, as this page
 * measured it.
 */
export function prefillFacts({ id, usage, timings, firstToken, ids }) {
  const facts = el("dl", { class: "facts" });
  const node = el("div", { class: "prefill" }, facts);
  const first = () => fact("First token", seconds(firstToken), "From the request to the first piece of text, in this browser");
  if (!usage) {
    if (firstToken !== null) facts.append(first());
    return node;
  }
  const reused = usage.prompt_tokens_details?.cached_tokens ?? 0;
  const computed = usage.prompt_tokens - reused;
  const source = reused > 0 && ids ? sourceOf(id, ids) : null;
  const { queue_seconds: queue, prefill_seconds: prefill, decode_seconds: decode } = timings;
  node.prepend(tokenBar(reused, computed));
  facts.append(
    fact("Prompt", counted(usage.prompt_tokens, "token")),
    fact("Reused", reused ? `${count(reused)} · ${source ?? "an earlier request"}` : "none"),
    fact("Prefill", `${count(computed)} in ${seconds(prefill)} · ${rate(computed, prefill)}`,
      `Computed tokens and their time${queue > 0.0005 ? `, after ${seconds(queue)} in the queue` : ""}`),
    fact("Decode", usage.completion_tokens > 1 ? rate(usage.completion_tokens - 1, decode) : "–",
      `${counted(usage.completion_tokens, "token")}; the rate excludes the first`),
  );
  if (firstToken !== null) facts.append(first());
  if (ids) node.append(promptDetails(ids, reused));
  return node;
}

/** The prompt as the model gets it, with the reused part marked; its text is fetched when it is opened. */
export function promptDetails(ids, reused) {
  const text = el("p", { class: "prompt-text" });
  const details = el("details", { class: "prompt" }, el("summary", {}, "Prompt as the model reads it"), text);
  details.addEventListener("toggle", async () => {
    if (!details.open || text.hasChildNodes()) return;
    try {
      const [before, after] = await Promise.all([textOf(ids.slice(0, reused)), textOf(ids.slice(reused))]);
      text.replaceChildren(
        reused > 0 && el("mark", { class: "reused", title: "reused" }, before) || "",
        el("mark", { class: "computed", title: "computed" }, after),
      );
      details.scrollIntoView({ block: "nearest" });
    } catch (error) {
      text.textContent = error.message;
    }
  });
  return details;
}
