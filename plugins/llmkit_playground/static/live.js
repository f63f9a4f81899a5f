// The live view: asks for the state of the engine once a second while the page is in sight.
const $ = (id) => document.getElementById(id);
const SVG = "http://www.w3.org/2000/svg";
const NAMES = ["free", "cached", "in_use", "shared"];

export function startLiveView(ask) {
  let before = null, last = null, shownPlugins = "";

  async function turn() {
    try {
      const response = await ask("playground/state");
      if (!response.ok) throw new Error(`status ${response.status}`);
      const state = await response.json();
      showHealth(state);
      showNumbers(state, before);
      showSteps(state.steps);
      showBlocks(state.blocks);
      const plugins = JSON.stringify(state.plugins);
      if (plugins !== shownPlugins) showPlugins(state.plugins);
      shownPlugins = plugins;
      before = { tokens: state.generation_tokens, time: performance.now() };
      last = state;
    } catch {
      status("bad", "server not reachable");
      before = null;
    }
  }

  async function run() {
    for (;;) {
      if (!document.hidden) await turn();
      await new Promise((done) => setTimeout(done, 1000));
    }
  }
  const redraw = () => last && showBlocks(last.blocks);
  window.addEventListener("resize", redraw);
  window.matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
  run();
}

function status(kind, text) {
  const pill = $("health");
  if (pill.textContent !== text) pill.textContent = text;
  pill.className = `pill status ${kind}`;
}

function showHealth(state) {
  $("model").textContent = state.model;
  document.title = `${state.model} – llmkit`;
  const health = state.health;
  const restarts = health.restarts ? `, ${health.restarts} restarts` : "";
  if (!health.alive) status("bad", `engine ended${health.error ? `: ${health.error}` : ""}`);
  else if (!health.ready) status("warn", `engine is being started again${restarts}`);
  else if (health.stuck_s > state.stuck_after_s) status("bad", `stuck for ${Math.round(health.stuck_s)} s`);
  else if (state.sleep_level !== null) status("warn", `asleep, level ${state.sleep_level}`);
  else status("ok", `ready${restarts}`);
}

function showNumbers(state, before) {
  const put = (id, value) => { $(id).textContent = typeof value === "number" ? value.toLocaleString("en") : value; };
  put("running", state.running);
  put("waiting", state.waiting);
  put("preemptions", state.preemptions);
  put("hits", state.prefix_queries ? `${Math.round((100 * state.prefix_hits) / state.prefix_queries)} %` : "–");
  put("done", Object.values(state.requests).reduce((a, b) => a + b, 0));
  if (before) {
    const seconds = (performance.now() - before.time) / 1000;
    put("rate", Math.max(0, Math.round((state.generation_tokens - before.tokens) / seconds)));
  }
}

function showSteps(steps) {
  const svg = $("spark");
  svg.replaceChildren();
  if (!steps.length) { $("step-note").textContent = "no step yet"; return; }
  const budget = steps[steps.length - 1][2];
  const most = Math.max(...steps.map((step) => step[1]));
  // A decode step of a few tokens must be seen beside a budget of thousands.
  const scale = (tokens) => Math.log2(1 + tokens) / Math.log2(1 + Math.max(budget, most));
  const width = 360 / 120;
  steps.forEach(([, tokens], i) => {
    const bar = document.createElementNS(SVG, "rect");
    const height = Math.max(1, 62 * scale(tokens));
    const place = { x: 360 - (steps.length - i) * width, y: 72 - height, width: width * 0.75, height };
    for (const [name, value] of Object.entries(place)) bar.setAttribute(name, value.toFixed(2));
    svg.append(bar);
  });
  const line = document.createElementNS(SVG, "line");
  const y = (72 - 62 * scale(budget)).toFixed(2);
  for (const [name, value] of Object.entries({ x1: 0, x2: 360, y1: y, y2: y })) line.setAttribute(name, value);
  svg.append(line);
  const latest = steps[steps.length - 1][1];
  const words = `last ${latest}, most ${most}, budget ${budget} (logarithmic)`;
  $("step-note").textContent = words;
  svg.setAttribute("aria-label", `Tokens per step: ${words}`);
}

function showBlocks(blocks) {
  if (!blocks) return;
  const canvas = $("map"), style = getComputedStyle(document.documentElement);
  const probe = $("legend").children;
  const colors = NAMES.map((_, i) => getComputedStyle(probe[3 - i], "::before").backgroundColor);
  const width = canvas.clientWidth, ratio = window.devicePixelRatio || 1;
  const count = blocks.states.length;
  const cell = count > 700 ? 8 : count > 250 ? 11 : 15;
  const columns = Math.max(1, Math.floor(width / cell)), rows = Math.ceil(count / columns);
  canvas.width = width * ratio;
  canvas.height = rows * cell * ratio;
  canvas.style.height = `${rows * cell}px`;
  const context = canvas.getContext("2d");
  context.scale(ratio, ratio);
  for (let i = 0; i < count; i += 1) {
    context.fillStyle = colors[Number(blocks.states[i])] || style.color;
    context.fillRect((i % columns) * cell, Math.floor(i / columns) * cell, cell - 2, cell - 2);
  }
  const total = Object.values(blocks.counts).reduce((a, b) => a + b, 0);
  const used = total - blocks.counts.free - blocks.counts.cached;
  const per = blocks.per_cell > 1 ? `, ${blocks.per_cell} a cell` : "";
  $("kv-note").textContent = `${used} of ${total} held, ${blocks.block_size} tokens each${per}`;
  NAMES.forEach((name, i) => { probe[3 - i].lastElementChild.textContent = blocks.counts[name]; });
  const words = NAMES.map((name) => `${blocks.counts[name]} ${name.replace("_", " ")}`).join(", ");
  canvas.setAttribute("aria-label", `Map of the KV blocks: ${words}`);
}

function showPlugins(plugins) {
  $("plugins").replaceChildren(...plugins.map((plugin) => {
    const item = document.createElement("li");
    const add = (tag, name, text, to = item) => {
      const element = document.createElement(tag);
      if (name) element.className = name;
      element.textContent = text;
      to.append(element);
      return element;
    };
    add("span", "kind", plugin.kind);
    add("strong", "", plugin.name);
    add("span", "why", plugin.reason);
    const rejected = Object.entries(plugin.rejected);
    if (rejected.length) {
      const details = document.createElement("details");
      add("summary", "", `why not ${rejected.map(([name]) => name).join(", ")}`, details);
      for (const [name, reason] of rejected) add("p", "", `${name}: ${reason}`, details);
      item.append(details);
    }
    return item;
  }));
}
