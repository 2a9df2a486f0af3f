// The picture of a group's cells. Only what has changed is drawn; what a cell is, is seen by its
// shape as well: held is solid, shared hatched, cached a square in a square, spare a slash, empty a
// frame.

const colors = ["--paper", "--panel", "--ink", "--empty", "--cached", "--none", "--flash", "--focus"];

// Colours of sequences, as many as there are letters. Each stands out from the panel (4.5 to 1, so
// that a letter can be read on it) and from the others, also for eyes that see no green.
const hues = {
  light: ("#0072b2 #b84a00 #00775a #a03f7c #7d5a00 #4c5fc0 #8a2f3b #4d6b13 #19375f #0000c8 #b90aff #004100 #6e0f96 "
    + "#5a00ff #e60064 #d700b4 #5a4b73 #5a2341 #554100 #23554b #0046d7 #9b50d7 #3c2382 #be2846 #825fa0 #730064").split(" "),
  dark: ("#56b4e9 #ff8c42 #30c798 #e79bc8 #eec04c #93a8ff #ff8f94 #b6d15b #be4bff #c3f5ff #009b00 #00ffb4 #faf500 "
    + "#ff415f #00e6ff #9b73c8 #14967d #ffebaa #ebc8e6 #f505fa #a0fa5a #c39600 #9b825f #aad2b9 #fa64c8 #fa87ff").split(" "),
};
export const HUES = hues.light.length;

const COLUMNS = [8, 16, 24, 32, 40, 48, 64, 80, 96, 128, 160];
const SMALLEST = 6, LARGEST = 34; // pixels of a cell

export class Picture {
  constructor(canvas, { onWalk, onPick }) {
    this.canvas = canvas;
    this.context = canvas.getContext("2d");
    this.onWalk = onWalk;
    this.onPick = onPick;
    this.drawn = [];
    this.at = -1; // the cell that is looked at
    this.picked = null; // a sequence
    this.flashed = new Set();
    canvas.addEventListener("keydown", (event) => this.key(event));
    canvas.addEventListener("pointermove", (event) => this.look(this.under(event), false));
    canvas.addEventListener("pointerleave", () => this.look(-1, false));
    canvas.addEventListener("click", (event) => this.pick(this.under(event)));
    canvas.addEventListener("blur", () => this.look(-1, false));
    new ResizeObserver(() => this.redraw()).observe(canvas.parentElement);
    this.recolor();
  }

  recolor() {
    const root = document.documentElement, style = getComputedStyle(root);
    this.color = Object.fromEntries(colors.map((name) => [name.slice(2), style.getPropertyValue(name).trim()]));
    hues[style.colorScheme].forEach((hue, i) => {
      this.color[`s${i}`] = hue;
      root.style.setProperty(`--s${i}`, hue);
    });
    this.redraw();
  }

  // cells: of a frame; slotOf: a sequence's colour and letter; places: of the sequence that is picked
  show(cells, slotOf) {
    const holders = new Int32Array(cells.states.length).fill(-1);
    for (let i = 0, at = 0; i < cells.holders.length; i += 2) {
      holders.fill(cells.holders[i], at, at + cells.holders[i + 1]);
      at += cells.holders[i + 1];
    }
    this.slotOf = slotOf;
    const alike = this.cells && this.cells.states.length === cells.states.length && this.cells.row_cells === cells.row_cells;
    const before = alike ? this.cells : null, owners = this.holders;
    this.cells = cells;
    this.holders = holders;
    if (!before) { this.drawn = []; this.redraw(); return; }
    const changed = [];
    for (let i = 0; i < holders.length; i += 1) {
      if (before.states[i] !== cells.states[i] || before.fills[i] !== cells.fills[i] || owners[i] !== holders[i]) {
        changed.push(i);
      }
    }
    const stale = this.flashed;
    const quiet = matchMedia("(prefers-reduced-motion: reduce)").matches;
    this.flashed = new Set(quiet ? [] : changed.filter((i) => "hs".includes(cells.states[i]) && !"hs".includes(before.states[i])));
    for (const i of new Set([...stale, ...changed])) this.draw(i);
  }

  layout() {
    const width = this.canvas.parentElement.clientWidth;
    const count = Math.max(1, this.cells.states.length), inRow = this.cells.row_cells || count;
    const rows = Math.ceil(count / inRow);
    const tall = Math.max(220, Math.min(460, window.innerHeight * 0.5));
    // The fewest columns, a round number of them, with which all of it is seen at once.
    let columns = COLUMNS.find((each) => {
      const size = Math.min(LARGEST, Math.floor(width / each));
      return each * LARGEST >= width && Math.ceil(inRow / each) * rows * size <= tall;
    }) ?? Math.floor(width / SMALLEST);
    columns = Math.max(8, Math.min(columns, Math.floor(width / SMALLEST)));
    const size = Math.max(SMALLEST, Math.min(LARGEST, Math.floor(width / columns)));
    columns = Math.min(columns, inRow);
    const lines = Math.ceil(inRow / columns), gap = rows > 1 ? Math.max(2, Math.round(size / 3)) : 0;
    Object.assign(this, { size, columns, lines, gap, inRow, rows });
    const height = rows * (lines * size + gap);
    const ratio = window.devicePixelRatio || 1;
    this.canvas.width = Math.round(width * ratio);
    this.canvas.height = Math.round(Math.max(height, size) * ratio);
    this.canvas.style.height = `${Math.max(height, size)}px`;
    this.context.setTransform(ratio, 0, 0, ratio, 0, 0);
  }

  redraw() {
    if (!this.cells) return;
    this.layout();
    for (let i = 0; i < this.cells.states.length; i += 1) this.draw(i);
  }

  place(i) {
    const row = Math.floor(i / this.inRow), inside = i % this.inRow;
    return [(inside % this.columns) * this.size, row * (this.lines * this.size + this.gap) + Math.floor(inside / this.columns) * this.size];
  }

  under(event) {
    if (!this.cells) return -1;
    const box = this.canvas.getBoundingClientRect();
    const x = Math.floor((event.clientX - box.left) / this.size), y = event.clientY - box.top;
    const row = Math.floor(y / (this.lines * this.size + this.gap));
    const line = Math.floor((y - row * (this.lines * this.size + this.gap)) / this.size);
    if (x >= this.columns || line >= this.lines) return -1;
    const i = row * this.inRow + line * this.columns + x;
    return line * this.columns + x < this.inRow && i < this.cells.states.length ? i : -1;
  }

  draw(i) {
    const [x, y] = this.place(i), size = this.size, context = this.context;
    context.clearRect(x, y, size, size);
    const holder = this.holders[i], slot = this.slotOf(holder);
    paint(context, {
      x, y, size, state: this.cells.states[i], fill: Number(this.cells.fills[i]) / 9,
      color: this.color, hue: slot ? this.color[`s${slot.hue}`] : this.color.cached, letter: slot?.letter ?? "",
    });
    const gap = size > 9 ? 1 : 0.5, inner = size - 2 * gap;
    if (this.picked && !this.picked.has(i)) {
      context.globalAlpha = 0.72; context.fillStyle = this.color.panel;
      context.fillRect(x, y, size, size); context.globalAlpha = 1;
    }
    if (i === this.at || this.flashed.has(i)) {
      context.lineWidth = i === this.at ? 2 : 1;
      context.strokeStyle = i === this.at ? this.color.focus : this.color.flash;
      const inset = context.lineWidth / 2;
      context.strokeRect(x + gap + inset - 0.5, y + gap + inset - 0.5, inner - 2 * inset + 1, inner - 2 * inset + 1);
    }
  }

  pickCells(places) {
    this.picked = places;
    this.redraw();
  }

  look(i, speak) {
    if (i === this.at || !this.cells) return;
    const before = this.at;
    this.at = i;
    if (before >= 0 && before < this.cells.states.length) this.draw(before);
    if (i >= 0) this.draw(i);
    this.onWalk(i, speak);
  }

  pick(i) {
    this.onPick(i >= 0 ? this.holders[i] : -1);
  }

  key(event) {
    if (!this.cells) return;
    const last = this.cells.states.length - 1, page = this.columns * 8;
    const step = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: this.columns, ArrowUp: -this.columns, PageDown: page, PageUp: -page }[event.key];
    if (event.key === "Enter" || event.key === " ") this.pick(this.at);
    else if (event.key === "Escape") this.onPick(-1);
    else if (event.key === "Home") this.look(0, true);
    else if (event.key === "End") this.look(last, true);
    else if (step) {
      const next = this.at < 0 ? 0 : this.at + step;
      if (next >= 0 && next <= last) this.look(next, true);
    } else return;
    event.preventDefault();
  }
}

// One cell, also for the legend.
export function paint(context, { x, y, size, state, fill, color, hue, letter }) {
  const gap = size > 9 ? 1 : 0.5, inner = size - 2 * gap, left = x + gap, top = y + gap;
  if (state === ".") {
    const dot = Math.max(1, Math.round(size / 8));
    context.fillStyle = color.none;
    context.fillRect(x + (size - dot) / 2, y + (size - dot) / 2, dot, dot);
    return;
  }
  if (state === "e") {
    context.strokeStyle = color.none; context.lineWidth = 1;
    context.strokeRect(left + 0.5, top + 0.5, inner - 1, inner - 1);
    return;
  }
  if (state === "c") {
    context.fillStyle = color.empty;
    context.fillRect(left, top, inner, inner);
    const dot = Math.max(2, Math.round(inner / 2.4));
    context.fillStyle = color.cached;
    context.fillRect(left + (inner - dot) / 2, top + (inner - dot) / 2, dot, dot);
    return;
  }
  context.fillStyle = color.empty;
  context.fillRect(left, top, inner, inner);
  if (state === "r") {
    context.strokeStyle = hue; context.lineWidth = Math.max(1, size / 12);
    context.beginPath(); context.moveTo(left + 1, top + inner - 1); context.lineTo(left + inner - 1, top + 1); context.stroke();
    return;
  }
  const height = Math.max(2, inner * fill);
  context.fillStyle = hue;
  context.fillRect(left, top + inner - height, inner, height);
  if (state === "s") {
    context.save();
    context.beginPath(); context.rect(left, top, inner, inner); context.clip();
    context.strokeStyle = color.panel; context.lineWidth = Math.max(1, size / 9);
    const step = Math.max(3, size / 2.6);
    context.beginPath();
    for (let d = -inner; d < inner * 2; d += step) { context.moveTo(left + d, top + inner); context.lineTo(left + d + inner, top); }
    context.stroke();
    context.restore();
  } else if (letter && size >= 15 && fill > 0.7) {
    context.fillStyle = color.panel;
    context.font = `600 ${Math.round(size * 0.5)}px ${getComputedStyle(document.body).fontFamily}`;
    context.textAlign = "center"; context.textBaseline = "middle";
    context.fillText(letter, x + size / 2, y + size / 2 + 0.5);
  }
}
