// What this page has sent: names for the ids of answers, and tokens of prompts, by which it names the prefix that a
// prompt reused. They stay in this tab.

import { post } from "./api.js";

const MOST = 128; // requests that are remembered

const sent = new Map(); // by id of the answer: {name, ids}
const texts = new Map(); // by id and positions: text of a run of tokens

/** Remembers a request: what it is called, and the tokens of its prompt once they are known. */
export function remember(id, name, ids = null) {
  sent.set(id, { name, ids: ids ?? sent.get(id)?.ids ?? null });
  if (sent.size > MOST) sent.delete(sent.keys().next().value);
}

export const nameOf = (id) => sent.get(id)?.name ?? null;

/** Tokens of a text or of messages. */
export async function tokensOf(input) {
  return (await post("tokenize", input)).tokens;
}

/** The text of tokens. */
export async function textOf(ids) {
  return ids.length ? (await post("detokenize", { tokens: ids })).content : "";
}

/** The text of a run of tokens of a remembered prompt, or null. */
export async function textOfRun(id, start, end) {
  const ids = sent.get(id)?.ids;
  if (!ids || start >= ids.length) return null;
  const place = `${id} ${start} ${end}`;
  if (!texts.has(place)) {
    texts.set(place, textOf(ids.slice(start, end)).catch(() => null));
    if (texts.size > 4 * MOST) texts.delete(texts.keys().next().value);
  }
  return texts.get(place);
}

function shared(a, b) {
  const n = Math.min(a.length, b.length);
  let i = 0;
  while (i < n && a[i] === b[i]) i += 1;
  return i;
}

/** The name of the latest earlier request that shares the longest prefix with these tokens, or null. */
export function sourceOf(id, ids) {
  let best = { name: null, tokens: 1 }; // one token, such as that of the start, is shared by all
  for (const [other, { name, ids: theirs }] of sent) {
    if (other === id || !theirs) continue;
    const tokens = shared(ids, theirs);
    if (tokens >= best.tokens && tokens > 1) best = { name, tokens };
  }
  return best.name;
}
