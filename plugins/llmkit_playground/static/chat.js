// The chat: sends the conversation, shows the answer as it streams in.
const $ = (id) => document.getElementById(id);
const SAMPLING = ["temperature", "top_p", "top_k", "min_p", "repetition_penalty", "seed", "max_tokens"];

export function startChat(ask) {
  const list = $("messages"), prompt = $("prompt"), send = $("send"), stop = $("stop"), usage = $("usage");
  const empty = list.firstElementChild;
  let messages = [];
  let running = null;

  function show(role, text) {
    empty.remove();
    const box = document.createElement("div");
    box.className = `message ${role}`;
    const name = document.createElement("span");
    name.className = "hidden";
    name.textContent = role === "user" ? "You: " : "Model: ";
    const reasoning = document.createElement("div");
    reasoning.className = "reasoning";
    const body = document.createElement("span");
    body.className = "text";
    body.textContent = text;
    box.append(name, reasoning, body);
    list.append(box);
    list.scrollTop = list.scrollHeight;
    return { box, body, reasoning };
  }

  function request() {
    const body = { messages: [], stream: true, stream_options: { include_usage: true } };
    const system = $("system").value.trim();
    if (system) body.messages.push({ role: "system", content: system });
    body.messages.push(...messages);
    for (const name of SAMPLING) {
      if ($(name).value !== "") body[name] = Number($(name).value);
    }
    return body;
  }

  async function answer() {
    const abort = new AbortController();
    running = abort;
    send.hidden = true;
    stop.hidden = false;
    usage.textContent = "";
    const view = show("assistant", "");
    view.box.classList.add("busy");
    const began = performance.now();
    let first = null, text = "", pieces = 0, counts = null, problem = null;
    try {
      const response = await ask("v1/chat/completions", {
        method: "POST", signal: abort.signal, body: JSON.stringify(request()),
        headers: { "content-type": "application/json" },
      });
      if (!response.ok) throw new Error((await response.json()).error.message);
      for await (const event of events(response)) {
        if (event.error) throw new Error(event.error.message);
        if (event.usage) counts = event.usage;
        const delta = event.choices?.[0]?.delta;
        if (!delta) continue;
        if (delta.reasoning) view.reasoning.append(delta.reasoning);
        if (delta.content) { text += delta.content; view.body.append(delta.content); }
        if (delta.content || delta.reasoning) { first ??= performance.now(); pieces += 1; }
        const atEnd = list.scrollHeight - list.scrollTop - list.clientHeight < 80;
        if (atEnd) list.scrollTop = list.scrollHeight;
      }
    } catch (error) {
      if (!abort.signal.aborted) problem = error.message;
    }
    view.box.classList.remove("busy");
    running = null;
    send.hidden = false;
    stop.hidden = true;
    if (problem !== null) {
      const note = document.createElement("p");
      note.className = "error";
      note.textContent = problem;
      view.box.append(note);
    }
    // A conversation in which a turn has no answer could not be gone on with.
    if (text) messages.push({ role: "assistant", content: text });
    else messages.pop();
    usage.textContent = summary(counts, pieces, began, first, abort.signal.aborted);
    prompt.focus();
  }

  $("form").addEventListener("submit", (event) => {
    event.preventDefault();
    const text = prompt.value.trim();
    if (!text || running) return;
    messages.push({ role: "user", content: text });
    show("user", text);
    prompt.value = "";
    resize();
    answer();
  });
  prompt.addEventListener("keydown", (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
      event.preventDefault();
      $("form").requestSubmit();
    }
  });
  function resize() {
    prompt.rows = Math.min(6, prompt.value.split("\n").length);
  }
  prompt.addEventListener("input", resize);
  stop.addEventListener("click", () => running?.abort());
  $("clear").addEventListener("click", () => {
    running?.abort();
    messages = [];
    list.replaceChildren(empty);
    usage.textContent = "";
    prompt.focus();
  });
}

function summary(counts, pieces, began, first, stopped) {
  const parts = [];
  if (counts) {
    const cached = counts.prompt_tokens_details?.cached_tokens ?? 0;
    parts.push(`${counts.prompt_tokens} prompt tokens${cached ? ` (${cached} cached)` : ""}`);
    parts.push(`${counts.completion_tokens} answer tokens`);
  } else if (pieces) {
    parts.push(`${pieces} pieces`);
  }
  if (first !== null) {
    parts.push(`first after ${Math.round(first - began)} ms`);
    const seconds = (performance.now() - first) / 1000;
    if (counts && counts.completion_tokens > 1 && seconds > 0) {
      parts.push(`${((counts.completion_tokens - 1) / seconds).toFixed(1)} tokens/s`);
    }
  }
  if (stopped) parts.push("stopped");
  return parts.join(" · ");
}

// The JSON objects of a stream of server-sent events.
async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const blocks = (rest + value).split("\n\n");
    rest = blocks.pop();
    for (const block of blocks) {
      if (!block.startsWith("data: ")) continue;
      const data = block.slice(6);
      if (data === "[DONE]") return;
      yield JSON.parse(data);
    }
  }
}
