"use strict";
/* What all parts of the page share, then the small behaviours: theme, tooltips, links, copying, sorting, searching.
   Texts from the trace reach the document through textContent alone. */
const page = {
  data: JSON.parse(document.getElementById("data").textContent),

  /* The twin of sublight.units.text: three significant digits with an SI prefix. */
  text(value, unit) {
    if (value === null || value === undefined || !Number.isFinite(value)) return "–";
    if (value === 0) return `0 ${unit}`;
    const rounded = Number(value.toExponential(2));
    let exponent = 3 * Math.floor(Math.log10(Math.abs(rounded)) / 3 + 1e-12);
    exponent = Math.min(Math.max(exponent, -9), unit === "s" ? 0 : 15);
    const scaled = rounded / 10 ** exponent;
    const digits = Math.abs(scaled) < 1000 ? Math.max(0, 2 - Math.floor(Math.log10(Math.abs(scaled)) + 1e-12)) : 0;
    const prefix = { "-9": "n", "-6": "µ", "-3": "m", 0: "", 3: "k", 6: "M", 9: "G", 12: "T", 15: "P" }[exponent];
    return `${scaled.toFixed(Math.min(digits, 20))} ${prefix}${unit}`;
  },

  ns(value) { return page.text(value / 1e9, "s"); },

  make(name, attributes, words) {
    const svg = ["svg", "g", "line", "circle", "path", "rect", "text", "title"].includes(name);
    const element = svg ? document.createElementNS("http://www.w3.org/2000/svg", name) : document.createElement(name);
    for (const [key, value] of Object.entries(attributes || {})) element.setAttribute(key, value);
    if (words !== undefined) element.textContent = words;
    return element;
  },

  /* A colour of the style sheet as a canvas understands it, in the theme of the moment. */
  colour(name) {
    page.probe ||= document.body.appendChild(page.make("span", { hidden: "" }));
    page.probe.style.color = `var(--${name})`;
    return getComputedStyle(page.probe).color;
  },

  onTheme: [], // to be called when colours change
};

(function theme() {
  const root = document.documentElement;
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const changed = () => page.onTheme.forEach((redraw) => redraw());
  let stored = null;
  try { stored = localStorage.getItem("sublight-theme"); } catch { /* a sandboxed frame has no storage */ }
  const asked = new URLSearchParams(location.search).get("theme") || stored;
  if (asked === "dark" || asked === "light") root.dataset.theme = asked;
  dark.addEventListener("change", changed);
  document.getElementById("theme").addEventListener("click", () => {
    const now = root.dataset.theme || (dark.matches ? "dark" : "light");
    root.dataset.theme = now === "dark" ? "light" : "dark";
    try { localStorage.setItem("sublight-theme", root.dataset.theme); } catch { /* as above */ }
    changed();
  });
})();

page.tip = (function tooltip() {
  const box = document.getElementById("tip");
  return {
    show(words, x, y) {
      box.textContent = words;
      box.hidden = false;
      const { width, height } = box.getBoundingClientRect();
      const room = document.documentElement.clientWidth;
      box.style.left = `${Math.max(8, Math.min(x + 14, room - width - 8))}px`;
      box.style.top = `${y + 18 + height > innerHeight ? Math.max(4, y - height - 12) : y + 18}px`;
    },
    beside(element, words) {
      const at = element.getBoundingClientRect();
      this.show(words, at.left + at.width / 2 - 14, at.bottom - 12);
    },
    hide() { box.hidden = true; },
  };
})();
addEventListener("keydown", (event) => { if (event.key === "Escape") page.tip.hide(); });
addEventListener("scroll", () => page.tip.hide(), { passive: true });

(function stepBar() {
  const light = (part, on) => document.querySelectorAll(`[data-part="${part}"]`).forEach((one) => one.classList.toggle("lit", on));
  for (const segment of document.querySelectorAll(".seg")) {
    const part = segment.dataset.part;
    const show = () => { light(part, true); page.tip.beside(segment, segment.dataset.tip); };
    const hide = () => { light(part, false); page.tip.hide(); };
    segment.addEventListener("pointerenter", show);
    segment.addEventListener("focus", show);
    segment.addEventListener("pointerleave", hide);
    segment.addEventListener("blur", hide);
  }
  for (const row of document.querySelectorAll(".parts tr[data-part]")) {
    row.addEventListener("pointerenter", () => light(row.dataset.part, true));
    row.addEventListener("pointerleave", () => light(row.dataset.part, false));
  }
})();

/* Links within the page by hand: in a notebook's frame their address is the notebook's. */
document.addEventListener("click", (event) => {
  const link = event.target.closest("a[href^='#']");
  if (!link) return;
  event.preventDefault();
  const target = document.getElementById(link.getAttribute("href").slice(1));
  if (!target) return;
  target.scrollIntoView();
  target.focus({ preventScroll: true });
  if (link.dataset.place && page.showPlace) page.showPlace(...link.dataset.place.split(":").map(Number));
});

(function copying() {
  const byHand = (words) => { // where the clipboard's own interface is refused
    const area = page.make("textarea", { class: "hidden" });
    area.value = words;
    document.body.append(area);
    area.select();
    const done = document.execCommand("copy");
    area.remove();
    return done;
  };
  document.querySelectorAll(".copy").forEach((button) => button.addEventListener("click", async () => {
    const words = button.parentElement.querySelector("code").textContent;
    let done = false;
    try { await navigator.clipboard.writeText(words); done = true; } catch { done = byHand(words); }
    button.textContent = done ? "copied" : "not allowed";
    setTimeout(() => { button.textContent = "copy"; }, 1500);
  }));
})();

(function opTable() {
  const table = document.getElementById("optable");
  if (!table) return;
  const body = table.tBodies[0];
  const heads = [...table.tHead.rows[0].cells];
  // a row for equal calls, and the rows of their places, which follow it wherever it goes
  const groups = [...body.querySelectorAll("tr[data-group]")].map((row) => ({
    row, places: [...body.querySelectorAll(`tr[data-of="${row.dataset.group}"]`)], button: row.querySelector(".open"),
  }));
  const numeric = heads.map((_, column) => groups[0] && groups[0].row.cells[column].dataset.v !== undefined);
  const text = (row) => [...row.cells].map((cell) => `${cell.textContent} ${cell.querySelector("[title]")?.title || ""}`).join(" ").toLowerCase();
  groups.forEach((group) => { group.words = [group.row, ...group.places].map(text); });
  const open = (group, on) => {
    group.button?.setAttribute("aria-expanded", on);
    group.places.forEach((row) => { row.hidden = !on; });
  };
  groups.forEach((group) => group.button?.addEventListener("click", () => open(group, group.button.getAttribute("aria-expanded") !== "true")));
  const sort = (column) => {
    // first click: largest first for figures, A to Z for words
    const now = heads[column].getAttribute("aria-sort");
    const down = now === "none" ? numeric[column] : now === "ascending";
    heads.forEach((head, at) => head.setAttribute("aria-sort", at !== column ? "none" : down ? "descending" : "ascending"));
    const key = (row) => (numeric[column] ? Number(row.cells[column].dataset.v) : row.cells[column].textContent);
    const order = (a, b) => (numeric[column] ? a - b : a.localeCompare(b, undefined, { numeric: true }));
    const sorted = groups.map((group) => [key(group.row), group]).sort((a, b) => (down ? -1 : 1) * order(a[0], b[0]));
    body.append(...sorted.flatMap((pair) => [pair[1].row, ...pair[1].places]));
  };
  heads.forEach((head, column) => head.firstElementChild.addEventListener("click", () => sort(column)));
  const search = document.getElementById("search");
  const matches = document.getElementById("matches");
  const all = matches.textContent;
  const filter = () => {
    const wanted = search.value.toLowerCase().split(/\s+/).filter(Boolean);
    const found = (words) => wanted.every((word) => words.includes(word));
    let count = 0;
    groups.forEach((group) => {
      const inPlaces = wanted.length > 0 && !found(group.words[0]) && group.words.slice(1).some(found);
      group.row.hidden = !found(group.words[0]) && !inPlaces;
      open(group, inPlaces);
      if (inPlaces) group.places.forEach((row, at) => { row.hidden = !found(group.words[at + 1]); });
      count += group.row.hidden ? 0 : 1;
    });
    matches.textContent = wanted.length ? `${count} of ${groups.length} ops` : all;
  };
  search.addEventListener("input", filter);
  search.addEventListener("keydown", (event) => { if (event.key === "Escape") { search.value = ""; filter(); } });
})();
