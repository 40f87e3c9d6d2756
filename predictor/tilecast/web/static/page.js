// Sends the form without leaving the page, and copies texts. The page also works without this file.
"use strict";
const form = document.getElementById("job");
const answer = document.getElementById("answer");
const state = document.getElementById("state");
let running = null;

form.addEventListener("submit", async (event) => {
  event.preventDefault();
  if (running) running.abort();
  const own = running = new AbortController();
  const began = performance.now();
  const show = () => { state.textContent = `searching, ${Math.round((performance.now() - began) / 1000)} s`; };
  const clock = setInterval(show, 1000);
  show();
  try {
    const response = await fetch("answer", { method: "POST", body: new URLSearchParams(new FormData(form)), signal: own.signal });
    answer.innerHTML = await response.text();
    state.textContent = `${((performance.now() - began) / 1000).toFixed(1)} s`;
  } catch (error) {
    if (own.signal.aborted) return;
    state.textContent = "no answer from the server; try again";
  } finally {
    clearInterval(clock);
  }
});

// A pasted command says its own sequence length and batch; the example's would take precedence over them.
form.elements.pasted.addEventListener("input", () => {
  const pasted = form.elements.pasted.value.trim();
  const isCommand = pasted && !pasted.startsWith("{");
  for (const field of [form.elements.seq, form.elements.batch]) {
    if (isCommand && field.value === field.defaultValue) field.value = "";
    else if (!isCommand && !field.value) field.value = field.defaultValue;
  }
});

answer.addEventListener("click", async (event) => {
  const button = event.target.closest("[data-copy]");
  if (!button) return;
  await navigator.clipboard.writeText(button.parentElement.querySelector("pre").textContent);
  button.textContent = "Copied";
});
