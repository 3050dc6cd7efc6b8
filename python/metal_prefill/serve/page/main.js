// Starts the page: the model's name and tasks, the colours, the key.

import { askForKey, getJson } from "./api.js";
import { Batch } from "./batch.js";
import { Chat } from "./chat.js";
import { Compare } from "./compare.js";
import { byId, el } from "./dom.js";
import { count } from "./format.js";

const THEMES = { system: ["◐", "as the system"], light: ["☀", "light"], dark: ["☾", "dark"] };

function startTheme() {
  const button = byId("theme-button");
  const { dataset } = document.documentElement;
  const names = Object.keys(THEMES);
  const show = () => {
    const [sign, label] = THEMES[dataset.theme];
    button.textContent = sign;
    button.ariaLabel = button.title = `Colours: ${label}`;
  };
  button.addEventListener("click", () => {
    dataset.theme = names[(names.indexOf(dataset.theme) + 1) % names.length];
    try {
      localStorage.setItem("theme", dataset.theme);
    } catch {
      // Storage is disabled: the choice lasts until the page is left.
    }
    show();
  });
  show();
}

function describe(model) {
  byId("model").replaceChildren(
    el("span", { class: "model-name", title: model.id }, model.id),
    el("span", { class: "chip" }, model.device),
    el("span", { class: "chip" }, `${count(model.max_model_len)} tokens`));
  document.title = `${model.id} · metal_prefill`;
}

async function start() {
  startTheme();
  byId("key-button").addEventListener("click", async () => {
    if (await askForKey()) location.reload();
  });
  const notice = byId("notice");
  try {
    const [model] = (await getJson("v1/models")).data;
    describe(model);
    new Chat(byId("chat"), model);
    new Compare(byId("compare"), model);
    new Batch(byId("batch"));
    byId("chat-input").focus();
    document.body.dataset.ready = "true";
  } catch (error) {
    byId("model").textContent = "not connected";
    notice.replaceChildren(error.message, " ", el("button", { class: "quiet small", onclick: () => location.reload() }, "Try again"));
    notice.hidden = false;
  }
}

start();
