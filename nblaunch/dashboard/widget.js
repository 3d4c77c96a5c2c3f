// The dashboard's page side. A Store keeps what frames told (see frames.py); each RunView draws it.
// Whatever comes from a rank reaches the page as text (textContent, attributes set by name), never as markup.

// ---------------------------------------------------------------- building blocks

const SVG = "http://www.w3.org/2000/svg";

/** An HTML element with attributes (functions become listeners) and children (strings become text). */
function h(tag, attributes = {}, ...children) {
  return fill(document.createElement(tag), attributes, children);
}

function svg(tag, attributes = {}, ...children) {
  return fill(document.createElementNS(SVG, tag), attributes, children);
}

function fill(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (typeof value === "function") node.addEventListener(name, value);
    else if (value !== null && value !== undefined && value !== false) node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...children.filter((child) => child !== null && child !== undefined));
  return node;
}

function setText(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

function setAttribute(node, name, value) {
  if (node.getAttribute(name) !== value) node.setAttribute(name, value);
}

function show(node, visible) {
  if (node.hidden === visible) node.hidden = !visible;
}

/** As formats.number in Python. */
function formatNumber(value) {
  if (!Number.isFinite(value)) return String(value).toLowerCase();
  const size = Math.abs(value);
  if (size >= 1e7 || (size > 0 && size < 1e-3)) return value.toExponential(2);
  if (size >= 1000) return Math.round(value).toLocaleString("en");
  if (size === 0) return "0";
  const bound = [100, 10, 1, 0.1, 0.01].findIndex((least) => size >= least);
  return value.toFixed(bound < 0 ? 6 : bound + 1);
}

const formatStep = (step) => step.toLocaleString("en");

// ---------------------------------------------------------------- what the frames told

const MOST_LINES = 500;

/** One metric's buckets, as Curve in curves.py: bucket b holds the steps from b * 2**shift. */
class Series {
  constructor() {
    this.shift = 0;
    this.base = 0;
    this.rows = []; // each: [count, mean, least, greatest, rank means...]
    this.ranks = [];
  }

  /** Take in rows from bucket `first` on, of buckets 2**shift wide. */
  write(shift, first, rows) {
    while (this.rows.length && this.shift < shift) this.mergePairs();
    if (!this.rows.length) [this.shift, this.base] = [shift, first];
    while (first < this.base) {
      this.rows.unshift(null);
      this.base -= 1;
    }
    rows.forEach((row, i) => {
      this.rows[first - this.base + i] = row[0] ? row : null;
    });
    for (let i = 0; i < this.rows.length; i++) this.rows[i] ??= null;
  }

  mergePairs() {
    if (this.base & 1) {
      this.rows.unshift(null);
      this.base -= 1;
    }
    const merged = [];
    for (let i = 0; i < this.rows.length; i += 2) merged.push(mergeRows(this.rows[i], this.rows[i + 1] ?? null));
    this.rows = merged;
    this.base /= 2;
    this.shift += 1;
  }

  stepOf(bucket) {
    return bucket * 2 ** this.shift;
  }

  /** The buckets that hold something: [step, row]. */
  points() {
    const found = [];
    this.rows.forEach((row, i) => row && found.push([this.stepOf(this.base + i), row]));
    return found;
  }
}

function mergeRows(a, b) {
  if (!a || !b) return a || b;
  const count = a[0] + b[0];
  const row = [count, (a[0] * a[1] + b[0] * b[1]) / count, Math.min(a[2], b[2]), Math.max(a[3], b[3])];
  for (let i = 4; i < Math.max(a.length, b.length); i++) {
    const [x, y] = [a[i] ?? NaN, b[i] ?? NaN];
    row[i] = Number.isNaN(x) ? y : Number.isNaN(y) ? x : (x + y) / 2;
  }
  return row;
}

/** All that is known of the run on this page, whatever views there are of it. */
class Store {
  constructor() {
    this.listeners = new Set();
    this.clear();
    this.sequence = -1;
  }

  clear() {
    this.head = {};
    this.remark = "";
    this.extremes = [];
    this.charts = [];
    this.now = [];
    this.failure = null;
    this.notices = [];
    this.displays = new Map();
    this.rows = new Map();
    this.series = new Map();
    this.lines = new Map(); // by number, oldest first
    this.written = 0;
    this.warnings = 0;
  }

  /** Take in a frame; returns false where frames before it were missed. */
  take(frame, curves) {
    if (!frame || frame.seq === undefined) return true;
    const gapless = frame.full || this.sequence < 0 || frame.seq <= this.sequence + 1;
    if (frame.full) this.clear();
    this.sequence = frame.seq;
    for (const part of ["head", "remark", "extremes", "charts", "now", "failure", "notices", "written", "warnings"]) {
      if (part in frame) this[part] = frame[part];
    }
    for (const row of frame.rows ?? []) this.rows.set(row[0], readRow(row));
    if (frame.displays) this.takeDisplays(frame.displays);
    if (frame.lines) this.takeLines(frame.lines);
    if (curves?.byteLength) this.takeCurves(curves);
    for (const [, series] of this.charts) for (const [id, , , , ranks] of series) this.seriesOf(id).ranks = ranks;
    for (const listener of this.listeners) listener();
    return gapless;
  }

  takeDisplays({ keep, new: fresh }) {
    const kept = new Set(keep);
    for (const number of [...this.displays.keys()]) if (!kept.has(number)) this.displays.delete(number);
    for (const [number, rank, kind, data] of fresh) this.displays.set(number, { rank, kind, data });
  }

  takeLines(lines) {
    for (const [number, isError, label, ranks, text] of lines) {
      this.lines.set(number, { number, isError, label, ranks, text });
    }
    for (const number of this.lines.keys()) {
      if (this.lines.size <= MOST_LINES * 2) break;
      this.lines.delete(number);
    }
  }

  takeCurves(view) {
    const data = new DataView(view.buffer, view.byteOffset, view.byteLength);
    for (let at = 0; at < data.byteLength; ) {
      const [id, shift, count, columns] = [0, 4, 8, 12].map((offset) => data.getUint32(at + offset, true));
      const first = data.getFloat64(at + 16, true);
      at += 24;
      const rows = Array.from({ length: count }, (_, r) =>
        Array.from({ length: columns }, (_, c) => data.getFloat32(at + 4 * (r * columns + c), true)),
      );
      at += 4 * count * columns;
      this.seriesOf(id).write(shift, first, rows);
    }
  }

  seriesOf(id) {
    if (!this.series.has(id)) this.series.set(id, new Series());
    return this.series.get(id);
  }

  get over() {
    return ["done", "failed", "stopped"].includes(this.head.status);
  }
}

/** A row's fields by name, in the order of reading.Row. */
function readRow([rank, device, state, flags, note, main, busy, memory, full, peak, memoryTitle, wait, bars, done]) {
  return { rank, device, state, flags, note, main, busy, memory, full, peak, memoryTitle, wait, bars, done };
}

// ---------------------------------------------------------------- ANSI colours

const NAMES = ["black", "red", "green", "yellow", "blue", "magenta", "cyan", "white"];

/** Split a line at its SGR escapes: [[text, {classes, color}], ...]; other escapes are dropped. */
function parseAnsi(text) {
  if (!text.includes("\x1b")) return [[text, null]];
  const parts = [];
  let style = {};
  // eslint-disable-next-line no-control-regex
  for (const piece of text.split(/(\x1b\[[0-9;:]*m)|\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)?|.)/)) {
    if (!piece) continue;
    if (piece.startsWith("\x1b[")) style = nextStyle(style, piece.slice(2, -1).split(/[;:]/).map(Number));
    else parts.push([piece, style]);
  }
  return parts;
}

function nextStyle(style, codes) {
  const next = { ...style };
  for (let i = 0; i < codes.length; i++) {
    const code = codes[i];
    if (code === 0) for (const key of Object.keys(next)) delete next[key];
    else if (code === 1) next.bold = true;
    else if (code === 2) next.dim = true;
    else if (code === 3) next.italic = true;
    else if (code === 4) next.underline = true;
    else if (code === 22) delete next.bold, delete next.dim;
    else if (code === 23) delete next.italic;
    else if (code === 24) delete next.underline;
    else if (code === 39) delete next.color;
    else if (code >= 30 && code <= 37) next.color = `var(--nbl-${NAMES[code - 30]})`;
    else if (code >= 90 && code <= 97) next.color = `var(--nbl-${NAMES[code - 90]})`;
    else if (code === 38 || code === 48) {
      const [color, used] = wideColor(codes.slice(i + 1));
      if (code === 38) next.color = color;
      i += used;
    }
  }
  return next;
}

/** The colour after 38 or 48, of 256 or of all, and how many codes it takes. */
function wideColor([kind, a = 0, b = 0, c = 0]) {
  if (kind === 2) return [`rgb(${a | 0}, ${b | 0}, ${c | 0})`, 4];
  if (a < 16) return [`var(--nbl-${NAMES[a % 8]})`, 2];
  if (a >= 232) return [`rgb(${Array(3).fill(8 + 10 * (a - 232)).join(", ")})`, 2];
  const level = (n) => (n ? 55 + 40 * n : 0);
  const cube = a - 16;
  return [`rgb(${level(Math.floor(cube / 36))}, ${level(Math.floor(cube / 6) % 6)}, ${level(cube % 6)})`, 2];
}

function ansiNodes(text) {
  return parseAnsi(text).map(([piece, style]) => {
    if (!style || !Object.keys(style).length) return piece;
    const span = h("span", { class: ["bold", "dim", "italic", "underline"].filter((name) => style[name]).join(" ") });
    if (style.color) span.style.color = style.color;
    span.textContent = piece;
    return span;
  });
}

// ---------------------------------------------------------------- the line at the top

const WORDS = {
  starting: "Starting", running: "Running", stopping: "Stopping", done: "Done", failed: "Failed", stopped: "Stopped",
};
const PATIENCE = 1500; // ms that a Stop may take to be heard before the button says how else to stop

class Head {
  constructor(model) {
    this.state = h("span", { class: "nbl-word", role: "status" });
    this.name = h("span", { class: "nbl-name" });
    this.facts = ["elapsed", "steps", "samples", "left"].map((part) => [part, h("span", { class: `nbl-${part}` })]);
    this.setup = h("span", { class: "nbl-soft" });
    this.stop = h("button", { type: "button", class: "nbl-button nbl-stop", click: () => this.askToStop(model) }, "Stop");
    this.node = h(
      "div", { class: "nbl-head" },
      h("span", { class: "nbl-state" }, h("span", { class: "nbl-dot", "aria-hidden": "true" }), this.state),
      this.name, ...this.facts.map(([, node]) => node), h("span", { class: "nbl-grow" }), this.setup, this.stop,
    );
  }

  askToStop(model) {
    model.send({ kind: "stop" });
    this.stop.disabled = true;
    setText(this.stop, "Stopping…");
    this.timer = setTimeout(() => {
      if (this.status !== "starting" && this.status !== "running") return;
      setText(this.stop, "The cell is busy: interrupt the kernel (■)");
      this.stop.title = "While a cell blocks, the kernel can't hear this button; its own interrupt stops the run.";
    }, PATIENCE);
  }

  draw({ head, over }) {
    this.status = head.status;
    setText(this.state, WORDS[head.status] ?? "");
    setText(this.name, head.name ?? "");
    for (const [part, node] of this.facts) {
      setText(node, head[part] ?? "");
      show(node, Boolean(head[part]));
    }
    setText(this.setup, head.setup ?? "");
    show(this.stop, !over);
    if (head.status === "stopping" && !this.stop.disabled) {
      this.stop.disabled = true;
      setText(this.stop, "Stopping…");
    } else if (head.status === "stopping") setText(this.stop, "Stopping…");
  }

  remove() {
    clearTimeout(this.timer);
  }
}

// ---------------------------------------------------------------- failure and notices

class Cause {
  constructor() {
    this.node = h("section", { class: "nbl-cause", role: "alert", hidden: true });
  }

  draw({ failure }) {
    if (failure === this.drawn) return;
    this.drawn = failure;
    show(this.node, Boolean(failure));
    if (!failure) return;
    const parts = [h("b", {}, failure.title), h("pre", {}, ...excerptLines(failure.excerpt))];
    const folds = h("div", { class: "nbl-folds" });
    if (failure.text) folds.append(fold("whole traceback", h("pre", {}, failure.text)));
    if (failure.others.length) {
      const items = failure.others.map((title) => h("li", {}, title));
      folds.append(fold(`what followed on ${failure.others.length} more rank${items.length > 1 ? "s" : ""}`, h("ul", {}, ...items)));
    }
    this.node.replaceChildren(...parts, folds);
  }
}

function excerptLines(excerpt) {
  return excerpt.split("\n").map((line) =>
    h("span", { class: line.startsWith("--->") ? "nbl-here" : /^ +\^+$/.test(line) ? "nbl-caret" : "" }, `${line}\n`),
  );
}

function fold(summary, ...content) {
  return h("details", {}, h("summary", {}, summary), ...content);
}

class Notices {
  constructor() {
    this.node = h("ul", { class: "nbl-notices", hidden: true, "aria-label": "Notices" });
  }

  draw({ notices }) {
    if (notices === this.drawn) return;
    this.drawn = notices;
    show(this.node, notices.length > 0);
    this.node.replaceChildren(
      ...notices.map(([level, rank, text]) =>
        h("li", { class: level === "warning" ? "nbl-warn" : "" }, `${rank >= 0 ? `rank ${rank}: ` : ""}${text}`),
      ),
    );
  }
}

// ---------------------------------------------------------------- ranks

const FOLD_ABOVE = 16;
const FLAG_WORDS = [
  ["f", "failed"], ["x", "stopped"], ["s", "silent"], ["k", "stuck"], ["l", "late"], ["w", "waits for data"],
  ["u", "less busy"],
];
const MARKS = { f: "✕", x: "", s: "?", k: "…", l: "‹", w: "‹", u: "‹" };

const flagClass = (flags, late = /[kl]/) =>
  flags.includes("f") ? "nbl-dead" : flags.includes("s") ? "nbl-silent" : late.test(flags) ? "nbl-late" : "";

const flagWords = (flags) => FLAG_WORDS.filter(([flag]) => flags.includes(flag)).map(([, word]) => word);

class Ranks {
  constructor() {
    this.pinned = new Set();
    this.rows = new Map();
    this.strip = new Strip((rank) => this.togglePin(rank));
    this.titles = Object.fromEntries(
      ["rank", "progress", "main", "device", "memory", "data wait"].map((title) => [title, h("th", { scope: "col" }, title)]),
    );
    this.body = h("tbody");
    this.table = h("table", { class: "nbl-ranks" }, h("thead", {}, h("tr", {}, ...Object.values(this.titles))), this.body);
    this.node = h("section", { "aria-label": "Ranks" }, this.strip.node, this.table);
  }

  togglePin(rank) {
    if (!this.pinned.delete(rank)) this.pinned.add(rank);
    this.draw(this.store);
  }

  draw(store) {
    this.store = store;
    const all = [...store.rows.values()].sort((a, b) => a.rank - b.rank);
    const folded = all.length > FOLD_ABOVE;
    show(this.node, all.length > 0);
    show(this.strip.node, folded);
    if (folded) this.strip.draw(all, this.pinned);
    const reasons = new Map(store.extremes);
    for (const rank of this.pinned) if (!reasons.get(rank)) reasons.set(rank, "chosen");
    const shown = folded ? [...reasons.keys()].map((rank) => store.rows.get(rank)).filter(Boolean) : all;
    setText(this.titles.rank, folded ? "extremes" : "rank");
    setText(this.titles.main, store.head.main ?? "");
    const used = {
      main: all.some((row) => row.main), busy: all.some((row) => row.busy >= 0),
      memory: all.some((row) => row.memory), wait: all.some((row) => row.wait >= 0),
    };
    for (const [name, is] of Object.entries(used)) this.table.classList.toggle(`nbl-no-${name}`, !is);
    this.place(shown.map((row) => [row, folded ? reasons.get(row.rank) : ""]));
  }

  place(shown) {
    const wanted = new Set(shown.map(([row]) => row.rank));
    for (const [rank, view] of this.rows) {
      if (wanted.has(rank)) continue;
      view.node.remove();
      this.rows.delete(rank);
    }
    shown.forEach(([row, reason], i) => {
      if (!this.rows.has(row.rank)) this.rows.set(row.rank, new RankRow());
      const view = this.rows.get(row.rank);
      if (this.body.children[i] !== view.node) this.body.insertBefore(view.node, this.body.children[i] ?? null);
      view.draw(row, reason);
    });
  }
}

class RankRow {
  constructor() {
    this.name = h("b");
    this.device = h("span", { class: "nbl-soft" });
    this.reason = h("span", { class: "nbl-reason" });
    this.note = h("div", { class: "nbl-note" });
    this.bars = h("div", { class: "nbl-bars-list" });
    this.main = h("td", { class: "nbl-num nbl-main" });
    this.busy = new Meter("device utilisation");
    this.memory = new Meter("memory");
    this.peak = h("div", { class: "nbl-peak" });
    this.wait = h("td", { class: "nbl-num nbl-wait" });
    this.node = h(
      "tr", {},
      h("th", { scope: "row", class: "nbl-rank" }, this.name, this.device, this.reason),
      h("td", { class: "nbl-bars" }, this.bars, this.note), this.main,
      h("td", { class: "nbl-busy" }, this.busy.node), h("td", { class: "nbl-memory" }, this.memory.node, this.peak), this.wait,
    );
  }

  draw(row, reason) {
    setAttribute(this.node, "class", flagClass(row.flags));
    setText(this.name, String(row.rank));
    setText(this.device, row.device);
    const late = /^[luw]*l/.test(row.flags); // only behind: said beside the rank, so that the row stays as high as others
    const ended = row.note && row.bars.length && !row.bars[0][3]; // said where the time left stood
    setText(this.reason, late ? row.note : reason === row.note ? "" : reason || "");
    this.reason.classList.toggle("nbl-warn", late);
    setText(this.note, late || ended ? "" : row.note || (row.bars.length ? "" : row.state));
    this.drawBars(ended ? [[...row.bars[0].slice(0, 3), row.note], ...row.bars.slice(1)] : row.bars);
    setText(this.main, row.main);
    this.main.classList.toggle("nbl-bad", row.main === "nan" || row.main.endsWith("inf"));
    this.busy.draw(row.busy < 0 ? -1 : row.busy / 100, row.busy < 0 ? "" : `${row.busy} %`, row.flags.includes("u"));
    this.memory.draw(row.full, row.memory, row.full > 0.95);
    setAttribute(this.memory.node, "title", row.memoryTitle);
    setText(this.peak, row.peak);
    setText(this.wait, row.wait < 0 ? "" : `${Math.round(row.wait * 100)} %`);
    this.wait.classList.toggle("nbl-warn", row.flags.includes("w"));
  }

  drawBars(bars) {
    while (this.bars.children.length > bars.length) this.bars.lastChild.remove();
    while (this.bars.children.length < bars.length) this.bars.append(barNode());
    bars.forEach(([depth, label, done, right], i) => {
      const [text, track, end] = this.bars.children[i].children;
      text.style.paddingInlineStart = `${Math.min(depth, 3) * 8}px`;
      setText(text, label);
      setAttribute(text, "title", label);
      setAttribute(track, "aria-label", label);
      track.classList.toggle("nbl-unknown", done < 0);
      if (done >= 0) setAttribute(track, "aria-valuenow", String(Math.round(done * 100)));
      track.firstChild.style.width = done < 0 ? "0" : `${done * 100}%`;
      setText(end, right);
    });
  }
}

function barNode() {
  return h(
    "div", { class: "nbl-bar" }, h("span", { class: "nbl-label" }),
    h("span", { class: "nbl-track", role: "progressbar", "aria-valuemin": "0", "aria-valuemax": "100" }, h("i")),
    h("span", { class: "nbl-num nbl-right" }),
  );
}

class Meter {
  constructor(label) {
    this.fill = h("i");
    this.track = h("span", { class: "nbl-track", "aria-hidden": "true" }, this.fill);
    this.text = h("span", { "aria-label": label });
    this.node = h("span", { class: "nbl-meter" }, this.track, this.text);
  }

  draw(fraction, text, unusual) {
    show(this.track, fraction >= 0);
    this.fill.style.width = `${Math.max(0, fraction) * 100}%`;
    setText(this.text, text);
    this.node.classList.toggle("nbl-unusual", unusual);
  }
}

/** Many ranks as cells, shaded by one quantity; what deviates is outlined and marked. */
class Strip {
  constructor(choose) {
    this.choose = choose;
    this.quantity = "done";
    this.select = h(
      "select", { "aria-label": "Shade the ranks by", change: () => ((this.quantity = this.select.value), this.redraw()) },
      ...[["done", "progress"], ["main", "main metric"], ["busy", "utilisation"], ["full", "memory"]].map(
        ([value, label]) => h("option", { value }, label),
      ),
    );
    this.legend = h("span", { class: "nbl-soft" });
    this.cells = h("div", { class: "nbl-cells", role: "group", "aria-label": "All ranks", keydown: (e) => this.move(e) });
    this.node = h(
      "div", { class: "nbl-strip", hidden: true },
      h("div", { class: "nbl-strip-head" }, h("label", { class: "nbl-soft" }, "ranks by ", this.select), this.legend), this.cells,
    );
  }

  redraw() {
    this.draw(this.all, this.pinned);
  }

  draw(all, pinned) {
    [this.all, this.pinned] = [all, pinned];
    while (this.cells.children.length < all.length) this.cells.append(this.cell());
    const values = all.map((row) => this.valueOf(row));
    const known = values.filter((value) => value !== null);
    const [low, high] = [Math.min(...known), Math.max(...known)];
    const span = Math.max(high - low, this.quantity === "main" ? Math.abs(high) * 0.02 : 0.05) || 1;
    setText(this.legend, known.length ? `${this.write(low)} (light) to ${this.write(high)} (dark)` : "not known yet");
    all.forEach((row, i) => {
      const cell = this.cells.children[i];
      const share = values[i] === null ? 0 : 1 - (high - values[i]) / span;
      cell.firstChild.style.opacity = String(0.22 + 0.68 * Math.max(0, share));
      cell.classList.toggle("nbl-strong", share > 0.45 && values[i] !== null);
      const flag = [...row.flags][0];
      setText(cell.lastChild, flag ? `${row.rank}${MARKS[flag]}` : String(row.rank));
      const marked = flagClass(row.flags, /[kluw]/);
      for (const name of ["nbl-dead", "nbl-silent", "nbl-late"]) cell.classList.toggle(name, marked === name);
      setAttribute(cell, "aria-pressed", String(pinned.has(row.rank)));
      const value = values[i] === null ? "" : `, ${this.write(values[i])}`;
      const label = [`rank ${row.rank}${value}`, ...flagWords(row.flags)].join(", ");
      setAttribute(cell, "aria-label", label);
      setAttribute(cell, "title", row.note ? `${label}: ${row.note}` : label);
    });
  }

  cell() {
    const index = this.cells.children.length;
    const node = h("button", { type: "button", tabindex: index ? "-1" : "0" }, h("i"), h("span"));
    node.addEventListener("click", () => this.choose(this.all[index].rank));
    return node;
  }

  move(event) {
    const step = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: 8, ArrowUp: -8 }[event.key];
    const cells = [...this.cells.children];
    const from = cells.indexOf(event.target);
    if (!step || from < 0) return;
    event.preventDefault();
    event.stopPropagation();
    const to = cells[Math.min(cells.length - 1, Math.max(0, from + step))];
    cells[from].tabIndex = -1;
    to.tabIndex = 0;
    to.focus();
  }

  valueOf(row) {
    if (this.quantity === "main") return row.main ? Number(row.main.replaceAll(",", "")) : null;
    const value = this.quantity === "busy" ? row.busy / 100 : row[this.quantity];
    return value >= 0 ? value : null;
  }

  write(value) {
    return this.quantity === "main" ? formatNumber(value) : `${Math.round(value * 100)} %`;
  }
}

// ---------------------------------------------------------------- charts

const FIRST_CHARTS = 6;
const HEIGHT = 116;
const MARGIN = { left: 42, right: 6, top: 6, bottom: 4 };

class Charts {
  constructor() {
    this.charts = new Map();
    this.all = false;
    this.more = h("button", { type: "button", class: "nbl-button nbl-more", click: () => this.toggleAll() });
    this.grid = h("div", { class: "nbl-charts" });
    this.node = h("section", { "aria-label": "Metrics", hidden: true }, this.grid, this.more);
  }

  toggleAll() {
    this.all = !this.all;
    this.draw(this.store);
  }

  draw(store) {
    this.store = store;
    const hidden = store.charts.length - FIRST_CHARTS;
    show(this.node, store.charts.length > 0);
    show(this.more, hidden > 0);
    setText(this.more, this.all ? "Show fewer" : `Show ${hidden} more`);
    const visible = this.all ? store.charts : store.charts.slice(0, FIRST_CHARTS);
    this.discard(new Set(visible.map(chartKey)));
    let at = 0;
    visible.forEach(([title, series], i) => {
      const now = store.now.slice(at, (at += series.length));
      const key = chartKey([title, series]);
      if (!this.charts.has(key)) this.charts.set(key, new Chart());
      const chart = this.charts.get(key);
      if (this.grid.children[i] !== chart.node) this.grid.insertBefore(chart.node, this.grid.children[i] ?? null);
      chart.draw(title, series, now, store);
    });
  }

  /** Take away the charts that are no longer shown. */
  discard(kept) {
    for (const [key, chart] of this.charts) {
      if (kept.has(key)) continue;
      chart.remove();
      this.charts.delete(key);
    }
  }

  remove() {
    this.discard(new Set());
  }
}

/** A chart is known by its least series: its title changes when a validation series joins. */
const chartKey = ([, series]) => Math.min(...series.map(([id]) => id));

/** One chart: of each series the mean over ranks and the band from least to greatest; on demand every rank's line. */
class Chart {
  constructor() {
    this.options = { ranks: false, log: false, smooth: false };
    this.cursor = null;
    this.width = 280;
    this.title = h("span", { class: "nbl-title" });
    this.legend = h("span", { class: "nbl-legend" });
    this.buttons = Object.keys(this.options).map((name) => this.toggle(name));
    this.plot = svg("svg", {
      class: "nbl-plot", height: HEIGHT, tabindex: "0", role: "img",
      pointermove: (e) => this.point(e), pointerleave: () => this.setCursor(null),
      click: () => this.flip("ranks"), keydown: (e) => this.key(e), blur: () => this.setCursor(null),
    });
    [this.from, this.to] = [h("span"), h("span")];
    this.readout = h("output", { class: "nbl-readout" });
    this.node = h(
      "figure", { class: "nbl-chart" },
      h("figcaption", {}, this.title, this.legend, this.readout), this.plot,
      h("div", { class: "nbl-under" }, this.from, h("span", { class: "nbl-toggles" }, ...this.buttons), this.to),
    );
    this.observer = new ResizeObserver(([entry]) => {
      const width = Math.round(entry.contentRect.width);
      if (width && width !== this.width) (this.width = width), this.paint();
    });
    this.observer.observe(this.plot);
  }

  toggle(name) {
    return h("button", { type: "button", class: "nbl-toggle", "aria-pressed": "false", click: () => this.flip(name) }, name);
  }

  flip(name) {
    this.options[name] = !this.options[name];
    this.buttons.forEach((button) => setAttribute(button, "aria-pressed", String(this.options[button.textContent])));
    this.paint();
  }

  draw(title, layout, now, store) {
    [this.layout, this.store] = [layout, store];
    setText(this.title, title);
    const entries = layout.map(([, label, , bad], i) => ({ label, bad, now: now[i] ?? [""] }));
    const key = JSON.stringify(entries);
    if (key !== this.legendKey) {
      this.legendKey = key;
      this.legend.replaceChildren(...entries.map((entry, i) => legendEntry(entry, i, entries.length > 1)));
    }
    const spoken = entries.map((e) => `${e.label} ${e.now[0]}${e.now.length > 1 ? `, ranks from ${e.now[1]} to ${e.now[2]}` : ""}`);
    setAttribute(this.plot, "aria-label", `${title}: ${spoken.join("; ")}. Arrow keys read values, Enter shows ranks.`);
    this.paint();
  }

  paint() {
    if (!this.store) return;
    this.lines = this.layout.map(([id]) => this.store.seriesOf(id)).map((series) => ({ series, points: series.points() }));
    const scale = (this.scale = this.makeScale());
    const parts = scale.ticks.flatMap((tick) => this.tickNodes(tick));
    this.lines.forEach((line, i) => parts.push(...this.lineNodes(line, i)));
    if (this.cursor !== null) parts.push(...this.cursorNodes());
    setAttribute(this.plot, "width", String(this.width));
    setAttribute(this.plot, "viewBox", `0 0 ${this.width} ${HEIGHT}`);
    this.plot.replaceChildren(...parts);
    setText(this.from, scale.empty ? "" : formatStep(scale.first));
    setText(this.to, scale.empty ? "" : `step ${formatStep(scale.last)}`);
    this.read();
  }

  makeScale() {
    const points = this.lines.flatMap((line) => line.points);
    if (!points.length) return { empty: true, ticks: [], x: () => 0, y: () => 0, first: 0, last: 0 };
    let [low, high, first, last] = [Infinity, -Infinity, Infinity, -Infinity];
    let positive = Infinity;
    for (const [step, row] of points) {
      [low, high] = [Math.min(low, row[2]), Math.max(high, row[3])];
      [first, last] = [Math.min(first, step), Math.max(last, step)];
      if (row[2] > 0) positive = Math.min(positive, row[2]);
    }
    const log = this.options.log && positive < Infinity && high > 0;
    if (log) low = Math.max(low, positive);
    const [bottom, top, ticks] = log ? logTicks(low, high) : linearTicks(low, high);
    const warp = log ? (value) => Math.log10(Math.max(value, bottom)) : (value) => value;
    const inner = HEIGHT - MARGIN.top - MARGIN.bottom;
    const across = this.width - MARGIN.left - MARGIN.right;
    return {
      ticks, first, last,
      x: (step) => MARGIN.left + (last > first ? (across * (step - first)) / (last - first) : across / 2),
      y: (value) => MARGIN.top + inner * (1 - (warp(value) - warp(bottom)) / (warp(top) - warp(bottom))),
    };
  }

  tickNodes(tick) {
    const y = this.scale.y(tick);
    return [
      svg("line", { class: "nbl-grid", x1: MARGIN.left, x2: this.width - MARGIN.right, y1: y, y2: y }),
      svg("text", { x: MARGIN.left - 6, y: y + 3.5, "text-anchor": "end" }, tickText(tick)),
    ];
  }

  lineNodes({ series, points }, i) {
    const { x, y } = this.scale;
    if (!points.length) return [];
    const nodes = [];
    const up = points.map(([step, row]) => `${x(step).toFixed(1)} ${y(row[3]).toFixed(1)}`);
    const down = points.map(([step, row]) => `${x(step).toFixed(1)} ${y(row[2]).toFixed(1)}`).reverse();
    nodes.push(svg("path", { class: `nbl-band nbl-series-${i}`, d: `M${[...up, ...down].join("L")}Z` }));
    if (this.options.ranks && series.ranks.length > 1) nodes.push(...this.rankNodes(series, points, i));
    const means = points.map(([, row]) => row[1]);
    const path = (values) => `M${points.map(([step], k) => `${x(step).toFixed(1)} ${y(values[k]).toFixed(1)}`).join("L")}`;
    if (this.options.smooth) nodes.push(svg("path", { class: `nbl-line nbl-faint nbl-series-${i}`, d: path(means) }));
    nodes.push(svg("path", { class: `nbl-line nbl-series-${i}`, d: path(this.options.smooth ? smooth(means) : means) }));
    if (points.length === 1) {
      nodes.push(svg("circle", { class: `nbl-dot-mark nbl-series-${i}`, cx: x(points[0][0]), cy: y(means[0]), r: 3 }));
    }
    return nodes;
  }

  rankNodes(series, points, i) {
    const { x, y } = this.scale;
    return series.ranks.map((rank, column) => {
      const own = points.filter(([, row]) => Number.isFinite(row[4 + column]));
      const d = own.map(([step, row]) => `${x(step).toFixed(1)} ${y(row[4 + column]).toFixed(1)}`).join("L");
      const near = this.nearest?.rank === rank && this.nearest?.series === i;
      return svg("path", { class: `nbl-own nbl-series-${i}${near ? " nbl-near" : ""}`, d: d ? `M${d}` : "M0 0" });
    });
  }

  // ---- the pointer, or the arrow keys

  point(event) {
    const box = this.plot.getBoundingClientRect();
    this.pointerY = event.clientY - box.top;
    if (!this.scale || this.scale.empty) return;
    this.setCursor(this.closest(event.clientX - box.left));
  }

  /** The step, of those that have a value, that is nearest to a place on the plot. */
  closest(place) {
    let [best, distance] = [null, Infinity];
    for (const { points } of this.lines) {
      for (const [step] of points) {
        const away = Math.abs(this.scale.x(step) - place);
        if (away < distance) [best, distance] = [step, away];
      }
    }
    return best;
  }

  key(event) {
    const steps = [...new Set(this.lines?.flatMap(({ points }) => points.map(([step]) => step)) ?? [])].sort((a, b) => a - b);
    const at = this.cursor === null ? steps.length : steps.findIndex((step) => step >= this.cursor);
    const to = { ArrowLeft: at - 1, ArrowRight: at + 1, Home: 0, End: steps.length - 1 }[event.key];
    if (event.key === "Enter" || event.key === " ") this.flip("ranks");
    else if (event.key === "Escape") this.setCursor(null);
    else if (to !== undefined && steps.length) this.setCursor(steps[Math.min(steps.length - 1, Math.max(0, to))]);
    else return;
    event.preventDefault();
    event.stopPropagation();
  }

  setCursor(step) {
    this.cursor = step;
    this.paint();
  }

  /** What a series last had at the cursor; one that is logged rarely has no value of this very step. */
  rowAt({ points }) {
    return points.findLast(([step]) => step <= this.cursor)?.[1];
  }

  cursorNodes() {
    const x = this.scale.x(this.cursor);
    const nodes = [svg("line", { class: "nbl-cursor", x1: x, x2: x, y1: MARGIN.top, y2: HEIGHT - MARGIN.bottom })];
    this.lines.forEach((line, i) => {
      const row = this.rowAt(line);
      if (row) nodes.push(svg("circle", { class: `nbl-dot-mark nbl-series-${i}`, cx: x, cy: this.scale.y(row[1]), r: 3 }));
    });
    return nodes;
  }

  read() {
    show(this.legend, this.cursor === null);
    show(this.readout, this.cursor !== null);
    if (this.cursor === null) return;
    const several = this.lines.length > 1;
    const texts = this.lines.map((line, i) => {
      const row = this.rowAt(line);
      if (!row) return null;
      const spread = several || this.options.ranks || row[2] === row[3] ? "" : ` (${formatNumber(row[2])} to ${formatNumber(row[3])})`;
      return `${several ? `${this.layout[i][1]} ` : ""}${formatNumber(row[1])}${spread}`;
    });
    this.nearest = this.options.ranks ? this.nearestRank() : null;
    if (this.nearest) texts.unshift(`rank ${this.nearest.rank} ${formatNumber(this.nearest.value)}`);
    setText(this.readout, `step ${formatStep(this.cursor)} · ${texts.filter(Boolean).join(" · ")}`);
  }

  nearestRank() {
    let best = null;
    this.lines.forEach((line, i) => {
      const row = this.rowAt(line);
      if (!row || line.series.ranks.length < 2) return;
      line.series.ranks.forEach((rank, column) => {
        const value = row[4 + column];
        const away = Math.abs(this.scale.y(value) - (this.pointerY ?? 0));
        if (Number.isFinite(value) && (!best || away < best.away)) best = { rank, value, away, series: i };
      });
    });
    return best;
  }

  remove() {
    this.observer.disconnect();
    this.node.remove();
  }
}

function legendEntry({ label, bad, now }, i, several) {
  const title = now.length > 1 ? `mean of ranks; from ${now[1]} to ${now[2]}` : "";
  return h(
    "span", { class: `nbl-entry nbl-series-${i}`, title: bad || title },
    several ? h("span", { class: "nbl-key", "aria-hidden": "true" }) : null, several ? `${label} ` : null,
    h("span", { class: `nbl-now${bad ? " nbl-bad" : ""}` }, now[0] ?? ""), bad ? h("span", { class: "nbl-bad" }, ` ${bad}`) : null,
  );
}

/** Bottom, top and about three round ticks between. */
function linearTicks(low, high) {
  if (low === high) [low, high] = [low - (Math.abs(low) * 0.1 || 1), high + (Math.abs(high) * 0.1 || 1)];
  const rough = (high - low) / 3;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = power * [1, 2, 2.5, 5, 10].find((factor) => factor * power >= rough * 0.999);
  const ticks = [];
  for (let k = Math.ceil(low / step - 1e-9); k * step <= high + step * 1e-9; k++) ticks.push(Number((k * step).toPrecision(12)));
  const room = (high - low) * 0.06;
  return [low - room, high + room, ticks];
}

function logTicks(low, high) {
  const [from, to] = [Math.floor(Math.log10(low)), Math.ceil(Math.log10(high))];
  const every = Math.max(1, Math.ceil((to - from) / 3));
  let ticks = [];
  for (let power = from; power <= to; power += every) ticks.push(10 ** power);
  if (to - from <= 1) ticks = [1, 2, 5, 10].map((factor) => factor * 10 ** from);
  ticks = ticks.filter((tick) => tick >= low * 0.9 && tick <= high * 1.1);
  return [low / 1.1, high * 1.1, ticks];
}

function tickText(value) {
  const size = Math.abs(value);
  if (value === 0) return "0";
  if (size >= 1e6 || size < 1e-3) return value.toExponential(0).replace("e+", "e");
  if (size >= 1e4) return `${Number((value / 1000).toPrecision(3))}k`;
  return String(Number(value.toPrecision(4)));
}

/** An exponential mean that starts without a bias. */
function smooth(values, weight = 0.85) {
  let [sum, norm] = [0, 0];
  return values.map((value) => {
    sum = weight * sum + (1 - weight) * value;
    norm = weight * norm + (1 - weight);
    return sum / norm;
  });
}

// ---------------------------------------------------------------- output

const MOST_TABS = 10;

class Output {
  constructor() {
    this.chosen = "all";
    this.following = true;
    this.drawnUpTo = -1;
    this.tabs = h("div", { class: "nbl-tabs", role: "tablist", "aria-label": "Output of", keydown: (e) => this.move(e) });
    this.pick = h("select", { "aria-label": "Output of", change: () => this.choose(this.pick.value), hidden: true });
    this.warnings = h("span", { class: "nbl-warn" });
    this.count = h("span", { class: "nbl-soft" });
    this.log = h("div", { class: "nbl-log", role: "log", "aria-live": "off", tabindex: "0", scroll: () => this.scrolled() });
    this.newest = h("button", { type: "button", class: "nbl-button nbl-newest", click: () => this.follow() }, "newest ↓");
    this.node = h(
      "section", { class: "nbl-out", "aria-label": "Output", hidden: true },
      h("div", { class: "nbl-out-head" }, this.tabs, this.pick, h("span", { class: "nbl-grow" }), this.count, this.warnings),
      h("div", { class: "nbl-log-frame" }, this.log, this.newest),
    );
    this.nodes = new Map();
  }

  draw(store) {
    this.store = store;
    show(this.node, store.lines.size > 0);
    this.drawChoices([...store.rows.keys()].sort((a, b) => a - b));
    if (store.failure && !this.opened && store.failure.rank >= 0) {
      this.opened = true;
      if ([...store.lines.values()].some((line) => line.ranks.includes(store.failure.rank))) this.choose(String(store.failure.rank));
    }
    setText(this.warnings, store.warnings ? `${store.warnings} warning${store.warnings > 1 ? "s" : ""}` : "");
    this.drawLines();
  }

  drawChoices(ranks) {
    const key = ranks.join();
    if (key === this.choices) return;
    this.choices = key;
    const entries = [["all", "all"], ...ranks.map((rank) => [String(rank), `rank ${rank}`])];
    const many = ranks.length > MOST_TABS;
    show(this.tabs, !many);
    show(this.pick, many);
    const tab = ([value, label]) =>
      h("button", { type: "button", role: "tab", "data-value": value, click: () => this.choose(value) }, label);
    this.tabs.replaceChildren(...entries.map(tab));
    this.pick.replaceChildren(...entries.map(([value, label]) => h("option", { value }, label)));
    this.mark();
  }

  mark() {
    for (const tab of this.tabs.children) {
      const chosen = tab.dataset.value === this.chosen;
      setAttribute(tab, "aria-selected", String(chosen));
      tab.tabIndex = chosen ? 0 : -1;
    }
    this.pick.value = this.chosen;
  }

  move(event) {
    const tabs = [...this.tabs.children];
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (!step) return;
    const to = tabs[(tabs.findIndex((tab) => tab.dataset.value === this.chosen) + step + tabs.length) % tabs.length];
    event.preventDefault();
    event.stopPropagation();
    this.choose(to.dataset.value);
    to.focus();
  }

  choose(value) {
    this.chosen = value;
    this.nodes.clear();
    this.log.replaceChildren();
    this.following = true;
    this.mark();
    if (this.store) this.drawLines();
  }

  drawLines() {
    const rank = this.chosen === "all" ? null : Number(this.chosen);
    const lines = [...this.store.lines.values()].filter((line) => rank === null || line.ranks.includes(rank));
    for (const line of lines.slice(-MOST_LINES)) {
      const node = this.nodes.get(line.number);
      if (!node) this.append(line, rank);
      else if (rank === null) setText(node.firstChild, `[${line.label}] `);
    }
    for (const [number, node] of this.nodes) {
      if (this.nodes.size <= MOST_LINES) break;
      node.remove();
      this.nodes.delete(number);
    }
    const unseen = this.store.written - this.store.lines.size;
    setText(this.count, rank === null && this.store.written > MOST_LINES && unseen > 0 ? `${formatStep(this.store.written)} lines, the newest shown` : "");
    if (this.following) this.log.scrollTop = this.log.scrollHeight;
    show(this.newest, !this.following);
  }

  append(line, rank) {
    const warning = line.isError && /Warning: /.test(line.text);
    const node = h("div", { class: warning ? "nbl-warn" : line.isError ? "nbl-err" : "" });
    node.append(h("span", { class: "nbl-soft" }, rank === null ? `[${line.label}] ` : ""), ...ansiNodes(line.text));
    this.nodes.set(line.number, node);
    const later = [...this.nodes.keys()].find((number) => number > line.number);
    this.log.insertBefore(node, later === undefined ? null : this.nodes.get(later));
  }

  scrolled() {
    this.following = this.log.scrollHeight - this.log.scrollTop - this.log.clientHeight < 8;
    show(this.newest, !this.following);
  }

  follow() {
    this.following = true;
    this.drawLines();
  }
}

// ---------------------------------------------------------------- what other ranks displayed

class Displays {
  constructor() {
    this.nodes = new Map();
    this.summary = h("summary");
    this.list = h("div");
    this.node = h("details", { class: "nbl-displays", hidden: true, toggle: () => this.draw(this.store) }, this.summary, this.list);
  }

  draw(store) {
    this.store = store;
    const { displays } = store;
    show(this.node, displays.size > 0);
    setText(this.summary, `Displayed by other ranks (${displays.size})`);
    if (!this.node.open) return;
    for (const [number, node] of this.nodes) {
      if (displays.has(number)) continue;
      node.remove();
      this.nodes.delete(number);
    }
    for (const [number, shown] of displays) {
      if (this.nodes.has(number)) continue;
      const node = h("div", { class: "nbl-display" }, h("span", { class: "nbl-soft" }, `rank ${shown.rank}`), displayNode(shown));
      this.nodes.set(number, node);
      this.list.append(node);
    }
  }
}

/** Pictures as pictures, HTML in a frame that may run nothing and reach nothing, the rest as text. */
function displayNode({ rank, kind, data }) {
  const label = `shown by rank ${rank}`;
  if (kind === "image/svg+xml") return h("img", { alt: label, src: `data:${kind};charset=utf-8,${encodeURIComponent(data)}` });
  if (kind.startsWith("image/")) return h("img", { alt: label, src: `data:${kind};base64,${data.replace(/\s/g, "")}` });
  if (kind === "text/html") return h("iframe", { title: label, sandbox: "", srcdoc: data });
  return h("pre", {}, data);
}

// ---------------------------------------------------------------- the whole

class RunView {
  constructor(store, model, el) {
    this.store = store;
    this.foot = h("div", { class: "nbl-foot", hidden: true });
    this.parts = [new Head(model), new Cause(), new Notices(), new Ranks(), new Charts(), new Output(), new Displays()];
    this.node = h("div", { class: "nbl", role: "region" }, ...this.parts.map((part) => part.node), this.foot);
    el.append(this.node);
    this.listener = () => this.schedule();
    store.listeners.add(this.listener);
    this.draw();
  }

  /** Draw at the next repaint: a page in the background draws nothing. */
  schedule() {
    this.frame ??= requestAnimationFrame(() => {
      this.frame = undefined;
      this.draw();
    });
  }

  draw() {
    const { store } = this;
    setAttribute(this.node, "data-status", store.head.status ?? "starting");
    setAttribute(this.node, "aria-label", `Run ${store.head.name ?? ""}`);
    for (const part of this.parts) part.draw(store);
    const foot = store.head.closing || store.remark;
    show(this.foot, Boolean(foot));
    setText(this.foot, foot ?? "");
  }

  remove() {
    this.store.listeners.delete(this.listener);
    cancelAnimationFrame(this.frame);
    for (const part of this.parts) part.remove?.();
    this.node.remove();
  }
}

/** One store a model; anywidget calls this once for each. */
export default () => {
  const store = new Store();
  return {
    initialize({ model }) {
      const take = () => {
        if (!store.take(model.get("frame"), model.get("curves"))) model.send({ kind: "sync" });
      };
      model.on("change:frame", take);
      take();
    },
    render({ model, el }) {
      const view = new RunView(store, model, el);
      return () => view.remove();
    },
  };
};
