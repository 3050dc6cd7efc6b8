// Chat, or completion for a base model: answers as they are written, and what prefill did for each.

import { events, ServerError } from "./api.js";
import { el, field } from "./dom.js";
import { rate, seconds } from "./format.js";
import { prefillFacts } from "./prefill.js";
import { nameOf, remember, tokensOf } from "./sent.js";

const EXAMPLES = {
  chat: ["What is gravity?", "Write a haiku about the sea.", "Explain a prefix cache to a child."],
  completion: ["ROMEO:\n", "The capital of France is", "Once upon a time"],
};

export class Chat {
  constructor(root, model) {
    this.turns = []; // {user, answer}, as they were sent
    this.number = 0; // of the latest answer
    this.running = null; // AbortController of the answer that is being written
    this.log = el("div", { class: "log", role: "log", "aria-label": "Conversation", tabindex: "0" });
    this.input = el("textarea", {
      id: "chat-input", rows: "1", "aria-label": "Message", spellcheck: "false",
      oninput: () => this.fit(),
      onkeydown: (event) => this.key(event),
    });
    this.send = el("button", { class: "strong", type: "submit" }, "Send");
    this.stop = el("button", { class: "stop", type: "button", hidden: true, onclick: () => this.running?.abort() }, "Stop");
    const mode = (kind) => el("input", { type: "radio", name: "mode", onchange: () => this.choose(kind) });
    this.mode = { chat: mode("chat"), completion: mode("completion") };
    const number = (value, min, max, step) => el("input", { type: "number", value, min, max, step, inputmode: "decimal" });
    this.system = el("textarea", { rows: "2", spellcheck: "false" });
    this.temperature = number("0.7", "0", "5", "0.1");
    this.maxTokens = number("256", "1", "100000", "1");
    this.seed = el("input", { type: "number", step: "1", placeholder: "new each time" });
    this.systemField = field("chat-system", "System message", this.system);
    root.append(
      el("div", { class: "part-head" },
        el("div", { class: "choice", role: "radiogroup", "aria-label": "Kind of request" },
          el("label", {}, this.mode.chat, "Chat"), el("label", {}, this.mode.completion, "Completion")),
        el("button", { class: "quiet", type: "button", onclick: () => this.clear() }, "New"),
      ),
      this.log,
      el("form", { class: "composer", onsubmit: (event) => { event.preventDefault(); this.submit(); } },
        el("div", { class: "composer-row" }, this.input, this.stop, this.send),
        el("div", { class: "composer-foot" },
          el("details", { class: "options" }, el("summary", {}, "Options"),
            el("div", { class: "fields" },
              this.systemField,
              field("chat-temperature", "Temperature", this.temperature),
              field("chat-max", "Most tokens", this.maxTokens),
              field("chat-seed", "Seed", this.seed))),
          el("span", { class: "hint keys" }, el("kbd", {}, "Enter"), " sends, ", el("kbd", {}, "Shift"), "+", el("kbd", {}, "Enter"),
            " starts a line, ", el("kbd", {}, "Esc"), " stops"))),
    );
    root.addEventListener("keydown", (event) => {
      if (event.key === "Escape" && this.running) this.running.abort();
    });
    this.choose(model.tasks.includes("chat") ? "chat" : "completion");
    if (!model.tasks.includes("completion")) this.disable(`${model.id} generates no text.`);
  }

  choose(kind) {
    this.kind = kind;
    this.mode[kind].checked = true;
    this.systemField.hidden = kind !== "chat";
    this.input.placeholder = kind === "chat" ? "Ask something" : "Text that the model continues";
    this.clear();
  }

  disable(reason) {
    this.input.disabled = this.send.disabled = true;
    this.log.replaceChildren(el("p", { class: "empty" }, reason));
  }

  clear() {
    this.running?.abort();
    this.turns = [];
    this.log.replaceChildren(el("div", { class: "empty" },
      el("p", {}, this.kind === "chat"
        ? "Each answer shows what prefill did: how much of the prompt was reused, and how fast the rest was computed."
        : "The model continues the text. Continue an answer to see its prompt reused."),
      el("div", { class: "examples" }, EXAMPLES[this.kind].map((text) =>
        el("button", { type: "button", class: "example", onclick: () => { this.input.value = text; this.submit(); } }, text.trim())))));
  }

  fit() {
    this.input.style.height = "auto";
    this.input.style.height = `${Math.min(this.input.scrollHeight + 2, 240)}px`;
  }

  key(event) {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
      event.preventDefault();
      this.submit();
    }
  }

  submit() {
    const text = this.input.value;
    if (this.running || !text.trim() || this.input.disabled) return;
    this.input.value = "";
    this.fit();
    this.ask(text);
  }

  /** The path and body of a request for an answer to `text`. */
  request(text) {
    const body = { max_tokens: Math.max(1, Math.trunc(Number(this.maxTokens.value)) || 256), temperature: Number(this.temperature.value) || 0 };
    if (this.seed.value !== "") body.seed = Math.trunc(Number(this.seed.value));
    if (this.kind === "completion") return ["v1/completions", { ...body, prompt: text }];
    const messages = this.turns.flatMap(({ user, answer }) => [{ role: "user", content: user }, { role: "assistant", content: answer }]);
    if (this.system.value.trim()) messages.unshift({ role: "system", content: this.system.value });
    return ["v1/chat/completions", { ...body, reasoning_format: "none", messages: [...messages, { role: "user", content: text }] }];
  }

  /** Sends a message, or a text to continue, and shows the answer while it is written. */
  async ask(text) {
    if (this.running) return;
    const [path, body] = this.request(text);
    this.running = new AbortController();
    const { signal } = this.running;
    this.number += 1;
    const answer = new Answer(this.number, text, this.kind);
    this.log.querySelector(".empty")?.remove();
    this.log.append(answer.node);
    this.busy(true);
    this.scroll(true);
    try {
      for await (const event of events(path, body, signal)) {
        answer.take(event);
        this.scroll();
      }
      answer.end();
    } catch (error) {
      const stopped = error.name === "AbortError";
      if (!stopped && !(error instanceof ServerError)) console.error(error);
      answer.end(stopped ? el("span", {}, "stopped") : el("span", { class: "problem", role: "alert" }, error.message));
      answer.addButton("Try again", () => { answer.node.remove(); this.ask(text); });
    }
    this.running = null;
    this.busy(false);
    if (answer.text && this.kind === "chat") this.turns.push({ user: text, answer: answer.text });
    if (answer.text && this.kind === "completion") answer.addButton("Continue", () => this.ask(text + answer.text));
    await this.explain(answer, this.kind === "completion" ? { prompt: text } : { messages: body.messages });
    this.scroll();
  }

  /** Shows what prefill did, once the tokens of the prompt are known. */
  async explain(answer, input) {
    if (!answer.id) return;
    let ids = null;
    try {
      ids = await tokensOf(input);
    } catch {
      // The facts are shown without the prompt.
    }
    answer.foot.prepend(prefillFacts({ ...answer, ids }));
    remember(answer.id, nameOf(answer.id), ids);
  }

  busy(is) {
    this.send.hidden = is;
    this.stop.hidden = !is;
    this.log.setAttribute("aria-busy", String(is));
    for (const input of Object.values(this.mode)) input.disabled = is;
    if (document.activeElement === document.body || document.activeElement === this.send || document.activeElement === this.stop) this.input.focus();
  }

  /** Follows the text, unless the reader has scrolled up. */
  scroll(always = false) {
    const { scrollHeight, scrollTop, clientHeight } = this.log;
    if (always || scrollHeight - scrollTop - clientHeight < 120) this.log.scrollTop = scrollHeight;
  }
}

/** A message, and its answer so far. */
class Answer {
  constructor(number, question, kind) {
    this.name = `answer ${number}`;
    this.text = "";
    this.id = null;
    this.pieces = 0;
    this.begin = performance.now();
    this.firstToken = null; // seconds from the request to the first piece of text
    this.usage = this.timings = null;
    this.body = el("p", { class: "answer writing" }, "");
    this.status = el("p", { class: "status" }, "prefill …");
    this.foot = el("div", { class: "card-foot" }, this.status);
    this.node = el("article", { class: `card ${kind}`, "aria-label": `Answer ${number}` },
      el("p", { class: "question" }, el("span", { class: "visually-hidden" }, "You: "), question),
      el("h3", { class: "who" }, `Answer ${number}`), this.body, this.foot);
  }

  take(event) {
    if (!this.id) remember(event.id, this.name);
    this.id = event.id;
    if (event.usage) [this.usage, this.timings] = [event.usage, event.timings];
    const choice = event.choices[0];
    const piece = choice?.delta ? choice.delta.content : choice?.text;
    if (!piece) return;
    const passed = (performance.now() - this.begin) / 1000;
    this.firstToken ??= passed;
    this.pieces += 1;
    this.text += piece;
    this.body.firstChild.data = this.text;
    this.status.textContent = `first token ${seconds(this.firstToken)} · ${rate(this.pieces - 1, passed - this.firstToken)}`;
  }

  /** Ends the answer, with a note if it is not complete. */
  end(note = null) {
    this.body.classList.remove("writing");
    this.body.hidden = !this.text;
    this.status.replaceChildren(note ?? "");
    this.status.hidden = note === null;
  }

  addButton(label, action) {
    this.foot.append(el("button", { class: "quiet small", type: "button", onclick: (event) => { event.target.remove(); action(); } }, label));
  }
}
