// Requests to the server that delivered the page, and the API key: in memory, and in this tab's sessionStorage.

import { byId } from "./dom.js";

const BASE = new URL(".", document.baseURI);
const STORED = "metal_prefill key";

let key = readStored();
let asking = null; // the promise of the dialog that is open

function readStored() {
  try {
    return sessionStorage.getItem(STORED) ?? "";
  } catch {
    return "";
  }
}

function setKey(value) {
  key = value;
  try {
    if (value) sessionStorage.setItem(STORED, value);
    else sessionStorage.removeItem(STORED);
  } catch {
    // Storage is disabled: the key is kept in memory alone.
  }
}

/** An answer of the server with an error. */
export class ServerError extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

/** Asks for the key in a dialog; resolves to whether one was entered. */
export function askForKey(problem = "") {
  asking ??= new Promise((resolve) => {
    const dialog = byId("key-dialog");
    const input = byId("key-input");
    byId("key-problem").textContent = problem;
    byId("key-problem").hidden = !problem;
    byId("key-button").hidden = false;
    input.value = dialog.returnValue = "";
    byId("key-cancel").onclick = () => dialog.close();
    dialog.addEventListener("close", () => {
      const entered = dialog.returnValue === "use";
      if (entered) setKey(input.value.trim());
      asking = null;
      resolve(entered);
    }, { once: true });
    dialog.showModal();
  });
  return asking;
}

async function problemOf(response) {
  let message = `${response.status} ${response.statusText}`;
  try {
    const body = await response.json();
    if (typeof body.error?.message === "string") message = body.error.message;
  } catch {
    // The answer is not JSON: a proxy made it.
  }
  return new ServerError(response.status, message);
}

/** Headers can hold no other characters than those of a byte: a key is sent as UTF-8. */
function authorization() {
  return `Bearer ${String.fromCharCode(...new TextEncoder().encode(key))}`;
}

/** Sends a request and returns the response; asks for the key where one is missing. */
async function send(path, { body, signal } = {}) {
  for (;;) {
    const used = key;
    const headers = {};
    if (used) headers.authorization = authorization();
    if (body !== undefined) headers["content-type"] = "application/json";
    let response;
    try {
      response = await fetch(new URL(path, BASE), {
        method: body === undefined ? "GET" : "POST",
        headers,
        body: body === undefined ? undefined : JSON.stringify(body),
        signal,
        cache: "no-store",
        credentials: "omit",
      });
    } catch (error) {
      if (error.name === "AbortError") throw error;
      throw new ServerError(0, "The server does not answer.");
    }
    if (response.ok) return response;
    const error = await problemOf(response);
    if (response.status !== 401) throw error;
    if (key !== used) continue; // another request has asked meanwhile
    if (!(await askForKey(used ? error.message : ""))) throw error;
  }
}

export const getJson = async (path) => (await send(path)).json();
export const getText = async (path) => (await send(path)).text();
export const post = async (path, body) => (await send(path, { body })).json();

/** Yields the events of a streamed answer; an event with an error is thrown. */
export async function* events(path, body, signal) {
  const response = await send(path, { body: { ...body, stream: true, stream_options: { include_usage: true } }, signal });
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) throw new ServerError(0, "The connection ended before the answer did.");
      const parts = (rest + value).split("\n\n");
      rest = parts.pop();
      for (const part of parts) {
        const data = part.startsWith("data: ") ? part.slice(6) : "";
        if (data === "[DONE]") return;
        if (!data) continue;
        const event = JSON.parse(data);
        if (event.error) throw new ServerError(0, event.error.message);
        yield event;
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}
