// Connects the page's parts.

import { call, keepKey } from "./api.js";
import { Conversation } from "./conversation.js";
import { watchEngine } from "./engine.js";
import { themeButton } from "./theme.js";

const at = (id) => document.getElementById(id);
const conversation = new Conversation(at("turns"));

async function loadModels() {
  try {
    const { data } = await (await call("v1/models")).json();
    const names = data.map(({ id }) => id);
    at("first").replaceChildren(...names.map((name) => new Option(name, name)));
    at("second").replaceChildren(new Option("no other model", ""), ...names.map((name) => new Option(name, name)));
    at("title").textContent = names.join(", ");
    at("key").hidden = true;
    say("");
    at("version").textContent = (await (await call("version")).json()).version;
  } catch (problem) {
    if (at("key").hidden) say(problem.message);
  }
}

function say(text) {
  at("problem").textContent = text;
  at("problem").hidden = text === "";
}

function number(id) {
  return at(id).value === "" ? undefined : Number(at(id).value);
}

async function send() {
  const message = at("message").value;
  if (message.trim() === "" || at("send").disabled || !at("first").value) return;
  const settings = {
    system: at("system").value,
    temperature: number("temperature"),
    max_tokens: number("max-tokens"),
    inTurn: at("in-turn").checked,
  };
  at("message").value = "";
  at("send").disabled = true;
  at("stop").disabled = false;
  const isAnswered = await conversation.send(message, [at("first").value, at("second").value].filter(Boolean), settings);
  if (!isAnswered && at("message").value === "") at("message").value = message;
  at("send").disabled = false;
  at("stop").disabled = true;
}

at("compose").addEventListener("submit", (event) => {
  event.preventDefault();
  send();
});
at("message").addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  send();
});
at("settings").addEventListener("submit", (event) => event.preventDefault());
at("second").addEventListener("change", () => {
  at("in-turn-field").hidden = at("second").value === "";
});
at("stop").addEventListener("click", () => {
  conversation.stop();
  at("message").focus();
});
at("new").addEventListener("click", () => {
  conversation.clear();
  at("message").focus();
});
document.addEventListener("key-needed", ({ detail }) => {
  at("key-problem").textContent = detail;
  at("key").hidden = false;
  at("key-value").focus();
});
at("key").addEventListener("submit", (event) => {
  event.preventDefault();
  keepKey(at("key-value").value);
  at("key-value").value = "";
  loadModels();
});

themeButton(at("theme"));
watchEngine(at("charts"), at("engine-problem"));
loadModels();
