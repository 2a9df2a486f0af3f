// The page: what the feed says, put where it belongs.

import { Chart } from "./charts.js";
import { Chat } from "./chat.js";
import { Feed, key } from "./feed.js";
import { showFleet } from "./fleet.js";
import { HUES, paint, Picture } from "./cells.js";
import { bytes, number, several, STATES } from "./words.js";

const $ = (id) => document.getElementById(id);
const LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ";
const PROMPT = `# A stack that knows its smallest item.
class MinStack:
    """Push and pop as ever; min() is free."""

    def __init__(self):
        self.items = []
        self.smallest = []

    def push(self, value):
        self.items.append(value)
        least = self.smallest or [value]
        self.smallest.append(min(value, least[-1]))

    def pop(self):
`;

let about = null, frame = null, group = 0, picked = null, last = null;
const slots = new Map(); // sequence → its colour and letter, kept while it is there

// -- theme ---------------------------------------------------------------------------------------

function setTheme(name) {
  if (name) document.documentElement.dataset.theme = name; else delete document.documentElement.dataset.theme;
  $("theme").value = name;
  sessionStorage.setItem("quire-theme", name);
  picture.recolor();
  legend(true);
}

// -- the picture ---------------------------------------------------------------------------------

const picture = new Picture($("picture"), {
  onWalk: (at) => { $("cell").textContent = at < 0 ? restingWords() : cellWords(at); },
  onPick: (id) => pick(id < 0 || id === picked ? null : id),
});

function slotOf(id) {
  if (id < 0) return null;
  if (!slots.has(id)) {
    const taken = new Set([...slots.values()].map((slot) => slot.number));
    let free = 0;
    while (taken.has(free)) free += 1;
    const turn = Math.floor(free / LETTERS.length);
    slots.set(id, { number: free, hue: free % HUES, letter: LETTERS[free % LETTERS.length] + (turn || "") });
  }
  return slots.get(id);
}

function cellWords(at) {
  const cells = frame.cells[group], own = about.groups[group], state = cells.states[at];
  const holder = picture.holders[at], first = at * cells.each;
  const name = cells.each > 1 ? `Cells ${number(first)} to ${number(Math.min(first + cells.each, cells.num_shown) - 1)}` : `Cell ${number(first)}`;
  const words = [name, `${cells.each > 1 ? "mostly " : ""}${STATES[state].name}`];
  if (holder >= 0) words.push(state === "s" ? `by ${slotOf(holder).letter} (sequence ${holder}) and others` : `sequence ${slotOf(holder).letter} (${holder})`);
  if ("hsr".includes(state) && cells.each === 1) {
    const tenths = Number(cells.fills[at]);
    words.push(tenths === 9 ? "full" : tenths ? `about ${Math.round((tenths * own.cell_tokens) / 9)} of ${several(own.cell_tokens, "token")}` : "no token");
  }
  words.push(bytes(own.cell_bytes * cells.each));
  return words.join(", ");
}

const restingWords = () => (picked === null ? "\u00a0" : `Sequence ${slotOf(picked).letter} (${picked}) is picked: its cells stand out.`);

function pick(id) {
  picked = id;
  const places = id === null ? null : placesOf(id);
  picture.pickCells(places);
  $("cell").textContent = restingWords();
  for (const button of $("rows").querySelectorAll("button")) button.setAttribute("aria-pressed", String(Number(button.dataset.id) === picked));
}

function placesOf(id) {
  const sequence = frame?.sequences.find((each) => each.id === id);
  const table = sequence?.tables[group] ?? [];
  const places = new Set();
  for (let i = 0; i < table.length; i += 2) for (let j = 0; j < table[i + 1]; j += 1) places.add(table[i] + j);
  return places;
}

// -- the legend, which is the picture in numbers -------------------------------------------------

function legend(anew = false) {
  const body = $("legend");
  if (anew || !body.children.length) {
    body.replaceChildren(...Object.entries(STATES).map(([state, { name, means }]) => {
      const row = document.createElement("tr"), head = document.createElement("th"), icon = document.createElement("canvas");
      row.dataset.state = state;
      head.scope = "row";
      const ratio = window.devicePixelRatio || 1, context = icon.getContext("2d");
      icon.width = icon.height = 14 * ratio;
      context.scale(ratio, ratio);
      icon.setAttribute("aria-hidden", "true");
      paint(context, { x: 0, y: 0, size: 14, state, fill: 1, color: picture.color, hue: picture.color.s0, letter: "" });
      head.append(icon, name);
      row.append(head, cellOf("num", "–"), cellOf("num", "–"), cellOf("", means));
      return row;
    }));
  }
  if (!frame) return;
  const counts = Object.fromEntries([..."ecrhs."].map((state, i) => [state, frame.cells[group].counts[i]]));
  const size = about.groups[group].cell_bytes;
  for (const row of body.children) {
    row.hidden = isPart() && "ce.".includes(row.dataset.state);
    const count = counts[row.dataset.state];
    put(row.children[1], number(count));
    put(row.children[2], bytes(row.dataset.state === "." ? 0 : count * size));
  }
}

function cellOf(name, text) {
  const cell = document.createElement("td");
  if (name) cell.className = name;
  cell.textContent = text;
  return cell;
}

function put(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

// -- sequences -----------------------------------------------------------------------------------

function rows() {
  const body = $("rows");
  const there = new Map([...body.querySelectorAll("tr[data-id]")].map((row) => [Number(row.dataset.id), row]));
  if (!frame.sequences.length) {
    if (there.size || !body.children.length) {
      const cell = cellOf("quiet", "Nothing runs."), row = document.createElement("tr");
      cell.colSpan = 5;
      row.append(cell);
      body.replaceChildren(row);
    }
  } else {
    if (!there.size) body.replaceChildren();
    for (const sequence of frame.sequences) {
      const row = there.get(sequence.id) ?? newRow(sequence);
      there.delete(sequence.id);
      if (!row.parentElement) body.append(row);
      row.dataset.state = sequence.state;
      put(row.children[1], sequence.state + (sequence.preemptions && sequence.state === "running" ? `, preempted ${sequence.preemptions}×` : ""));
      put(row.children[2], `${number(sequence.computed)} / ${number(sequence.max_tokens)}`);
      put(row.children[3], `${number(sequence.cached)} / ${number(sequence.prompt)}`);
      put(row.children[4], tableWords(sequence.tables[group] ?? []));
    }
    for (const row of there.values()) row.remove();
  }
  const words = [`${number(frame.num_running)} running`, `${number(frame.num_waiting)} waiting`];
  if (frame.num_more) words.push(`${number(frame.num_more)} of them not listed`);
  if (isPart()) words.push(`of this key; others hold about ${frame.others_percent} %`);
  put($("how-many"), words.join(", "));
}

function newRow(sequence) {
  const row = document.createElement("tr"), head = document.createElement("td"), button = document.createElement("button");
  const slot = slotOf(sequence.id), name = document.createElement("span");
  name.className = "name";
  name.style.background = `var(--s${slot.hue})`;
  name.textContent = slot.letter;
  button.type = "button";
  button.dataset.id = sequence.id;
  button.setAttribute("aria-pressed", String(sequence.id === picked));
  button.setAttribute("aria-label", `Sequence ${slot.letter}, number ${sequence.id}: show its cells`);
  button.append(name, String(sequence.id));
  button.addEventListener("click", () => pick(sequence.id === picked ? null : sequence.id));
  head.append(button);
  row.dataset.id = sequence.id;
  row.append(head, cellOf("state", ""), cellOf("num", ""), cellOf("num", ""), cellOf("table", ""));
  return row;
}

function tableWords(table) {
  const parts = [];
  for (let i = 0; i < table.length && parts.length < 24; i += 2) parts.push(table[i + 1] > 1 ? `${table[i]}–${table[i] + table[i + 1] - 1}` : `${table[i]}`);
  return parts.join(" ") + (table.length > 48 ? " …" : "");
}

// -- bytes, time, budget -------------------------------------------------------------------------

// Whether this key is shown its own sequences only.
const isPart = () => frame.others_percent !== null;

function memory() {
  const { committed, used, ceiling, capacity } = frame.memory, wasted = committed - used - frame.memory.cached;
  const cached = isPart() ? (capacity * frame.others_percent) / 100 : frame.memory.cached;
  put($("committed"), bytes(committed));
  put($("of-ceiling"), `committed of ${bytes(ceiling)}${isPart() ? " for this key" : ceiling < capacity ? `, the ceiling now; the capacity is ${bytes(capacity)}` : ""}`);
  const share = (count) => `${((count / capacity) * 100).toFixed(3)}%`;
  for (const [name, count] of Object.entries({ used, cached, wasted })) $("bar").querySelector(`.${name}`).style.width = share(count);
  const mark = $("bar").querySelector(".ceiling");
  mark.hidden = ceiling >= capacity;
  mark.style.left = `calc(${share(ceiling)} - 2px)`;
  const words = `${bytes(used)} used, ${isPart() ? `others about ${frame.others_percent} %` : `${bytes(cached)} cached`}, ${bytes(wasted)} wasted`;
  put($("bar-words"), words);
  $("bar").setAttribute("aria-label", `Of ${bytes(capacity)}: ${words}`);
  put($("elastic"), frame.elastic ? `The ceiling: ${frame.elastic}.` : "");
}

// The pool, and each tier. What tiers bring is found in the pool, so it counts in both rows.
function tiers() {
  $("tiers").hidden = !frame.tiers.length;
  if (!frame.tiers.length) return;
  const { used, cached, ceiling } = frame.memory, known = (value, say) => (value === null ? "–" : say(value));
  const lines = [["Pool", "ok", "–", `${bytes(used + cached)} of ${bytes(ceiling)}`, number(frame.counters.hits)]];
  for (const tier of frame.tiers) lines.push([tier.name, tier.state, known(tier.records, number), known(tier.used, bytes) + known(tier.capacity, (most) => ` of ${bytes(most)}`).replace("–", ""), number(tier.hits)]);
  const body = $("places");
  while (body.children.length > lines.length) body.lastChild.remove();
  lines.forEach((line, i) => {
    let row = body.children[i];
    if (!row) {
      const head = document.createElement("th");
      row = document.createElement("tr");
      head.scope = "row";
      row.append(head, cellOf("state", ""), cellOf("num", ""), cellOf("num", ""), cellOf("num", ""));
      body.append(row);
    }
    row.dataset.state = line[1];
    line.forEach((text, j) => put(row.children[j], text));
  });
}

const WINDOW_S = 5;
const chartOf = (title, format, top) => new Chart($("charts"), { title, format, top });
const charts = {
  hits: chartOf(`Hit rate, ${WINDOW_S} s`, (value) => `${value.toFixed(0)} %`, 100),
  rate: chartOf(`Tokens a second, ${WINDOW_S} s`, number),
  committed: chartOf("Committed", bytes),
  preemptions: chartOf("Preemptions", number),
};
const window_ = []; // counters of the last seconds, for rates

function time(at) {
  $("time").hidden = isPart();
  if (isPart()) return;
  window_.push([at, frame.counters]);
  while (window_.length > 2 && window_[0][0] < at - WINDOW_S * 1000) window_.shift();
  const [then, before] = window_[0], now = frame.counters, seconds = (at - then) / 1000;
  const asked = now.queries - before.queries;
  charts.rate.add(at, seconds > 0 ? (now.generated - before.generated) / seconds : 0);
  charts.hits.add(at, asked ? ((now.hits - before.hits) / asked) * 100 : null);
  charts.committed.add(at, frame.memory.committed);
  charts.preemptions.add(at, now.preemptions - (first_.preemptions ??= now.preemptions));
}
const first_ = {};

function ledger() {
  const lines = about.ledger.map((term) => [term.label, term.bytes, term.source, ""]);
  const total = about.ledger.reduce((sum, term) => sum + term.bytes, 0);
  lines.push([`KV memory (${about.rule})`, total, about.bound, "total"]);
  $("ledger").replaceChildren(...lines.map(([label, count, source, name]) => {
    const row = document.createElement("tr"), head = document.createElement("th");
    head.scope = "row";
    head.textContent = label;
    row.className = name;
    row.append(head, cellOf("num", bytes(count)), cellOf("", source));
    return row;
  }));
}

// -- the feed ------------------------------------------------------------------------------------

function onAbout(told) {
  about = told;
  frame = null;
  const options = [`--cache ${about.strategy}`, `--block-size ${about.block_size}`, `--max-num-seqs ${about.max_num_seqs}`, `--max-model-len ${about.max_model_len}`];
  $("about").replaceChildren(about.model, ...options.flatMap((text) => [" ", Object.assign(document.createElement("span"), { textContent: text })]));
  const select = $("group");
  select.replaceChildren(...about.groups.map(({ label }, index) => new Option(label, String(index))));
  group = Math.min(group, about.groups.length - 1);
  select.value = String(group);
  $("groups").hidden = about.groups.length < 2;
  chatsOf(about);
  ledger();
}

function onFleet(fleet) {
  if (document.body.dataset.shows !== "fleet") {
    document.body.dataset.shows = "fleet";
    document.title = "Quire: fleet";
    $("fleet").hidden = false;
    chatsOf(fleet);
  }
  put($("about"), fleet.model);
  showFleet(fleet, { body: $("replicas"), words: $("fleet-words") });
}

// Whether the model is asked with messages.
function chatsOf({ chats }) {
  chat.chats = chats;
  put($("prompt-label"), chats ? "Message" : "Prompt, which the model goes on with");
}

function onFrame(told, at) {
  frame = told;
  const there = new Set(frame.sequences.map(({ id }) => id));
  for (const cells of frame.cells) for (let i = 0; i < cells.holders.length; i += 2) there.add(cells.holders[i]);
  for (const id of slots.keys()) if (!there.has(id)) slots.delete(id);
  for (const { id } of frame.sequences) slotOf(id);
  last = at;
  draw();
  time(at);
}

function draw() {
  const cells = frame.cells[group], own = about.groups[group];
  if (picked !== null) {
    if (frame.sequences.some(({ id }) => id === picked)) picture.picked = placesOf(picked);
    else pick(null);
  }
  picture.show(cells, slotOf);
  if (picked !== null) picture.redraw();
  $("nothing").hidden = cells.states.length > 0;
  put($("nothing"), isPart() ? "No sequence of this key holds memory. Ask something, and its blocks appear here." : "Nothing is committed. Ask something, and its blocks appear here.");
  const unit = own.cell_tokens > 1 ? `room for the keys and values of ${several(own.cell_tokens, "token")}` : "room for one sequence’s state";
  put($("scale"), `A cell is ${unit}: ${bytes(own.cell_bytes)} in ${own.label}.${own.in_rows ? " A row is one sequence’s addresses." : ""}${cells.each > 1 ? ` Each cell of the picture stands for ${cells.each} of ${number(cells.num_cells)}.` : ""}`);
  $("picture").setAttribute("aria-label", `${several(cells.states.length, "cell")} of memory, ${own.label}`);
  memory();
  tiers();
  legend();
  rows();
}

function onLink(state, words) {
  $("link").className = `link ${state}`;
  put($("link"), words);
  if (state === "denied") { $("key").hidden = false; $("key-text").focus(); }
  if (state === "live") $("key").hidden = true;
  // While nothing changes nothing comes: time goes on in the charts all the same.
  clearInterval(onLink.ticking);
  if (state === "live") {
    onLink.ticking = setInterval(() => {
      if (frame && last !== null) { last += 1000; if (performance.now() - onFrame.seen > 1500) time(last); }
    }, 1000);
  }
}

const feed = new Feed({
  onAbout,
  onFleet,
  onFrame: (told, at) => { onFrame.seen = performance.now(); onFrame(told, at); },
  onLink,
});

$("theme").addEventListener("change", () => setTheme($("theme").value));
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => { picture.recolor(); legend(true); });
$("group").addEventListener("change", () => { group = Number($("group").value); pick(null); if (frame) draw(); });
$("key").addEventListener("submit", (event) => {
  event.preventDefault();
  key.set($("key-text").value.trim());
  $("key-text").value = "";
  feed.open();
});
$("prompt").value = PROMPT;
const chat = new Chat({ form: $("chat"), prompt: $("prompt"), maxTokens: $("max-tokens"), two: $("two"), stop: $("stop"), answers: $("answers") });
setTheme(sessionStorage.getItem("quire-theme") ?? "");
feed.open();
