"use strict";
/* The flame graph: a thread's tree from the outermost call down, as wide as the time below it; or the same in time.
   Names reach the document through textContent alone. */
(function flame() {
  const data = JSON.parse(document.getElementById("data").textContent);
  const graph = document.getElementById("graph"), tip = document.getElementById("tip");
  const search = document.getElementById("search"), matches = document.getElementById("matches");
  const out = document.getElementById("out"), picked = document.getElementById("picked");
  const choice = document.getElementById("thread");
  const ROW = 17, LEAST_PX = 0.7;
  const view = { thread: 0, order: "heavy", node: 0, from: 0, to: 0, words: "" };

  /* The twin of sublight.units.text. */
  function text(value) {
    if (data.unit === "calls") return `${Math.round(value).toLocaleString("en")} calls`;
    if (!value) return "0 s";
    const rounded = Number(value.toExponential(2)), size = Math.abs(rounded);
    const exponent = Math.min(Math.max(3 * Math.floor(Math.log10(size) / 3 + 1e-12), -9), 0);
    const scaled = rounded / 10 ** exponent;
    const digits = Math.abs(scaled) < 1000 ? Math.max(0, 2 - Math.floor(Math.log10(Math.abs(scaled)) + 1e-12)) : 0;
    return `${scaled.toFixed(digits)} ${{ "-9": "n", "-6": "µ", "-3": "m", 0: "" }[exponent]}s`;
  }
  const percent = (share) => `${(100 * share).toFixed(share >= 0.0995 || share === 0 ? 0 : 1)} %`;

  const threads = data.threads.map((thread) => {
    const nodes = thread.nodes.map(([parent, name, own, idle, calls, lines, before = 0], at) =>
      ({ at, parent, name, own, idle, calls, lines, before, total: own, totalBefore: before, width: Math.max(own, before), below: [], depth: 0 }));
    for (const node of nodes) if (node.parent >= 0) { nodes[node.parent].below.push(node); node.depth = nodes[node.parent].depth + 1; }
    for (let at = nodes.length - 1; at > 0; at--) {
      const node = nodes[at], parent = nodes[node.parent];
      parent.total += node.total; parent.totalBefore += node.totalBefore; parent.width += node.width;
    }
    for (const node of nodes) node.below.sort((a, b) => b.width - a.width);
    const ends = thread.spans.map(([, start, long]) => start + long);
    return { ...thread, nodes, begin: thread.spans.length ? Math.min(...thread.spans.map((s) => s[1])) : 0,
      end: ends.reduce((most, end) => Math.max(most, end), 0) };
  });
  const label = (node) => node.name < 0 ? "all" : data.functions[node.name][0];
  const where = (node) => node.name < 0 ? "" : data.functions[node.name][1];
  const now = () => threads[view.thread];

  function colour(node) {
    if (data.diff) {
      const most = Math.max(node.total, node.totalBefore) || 1, change = (node.total - node.totalBefore) / most;
      const depth = Math.min(Math.abs(change) * 90, 75).toFixed(0);
      return `color-mix(in srgb, ${change > 0 ? "var(--f0)" : "var(--f1)"} ${depth}%, var(--k-range))`;
    }
    if (node.name < 0) return "var(--k-range)";
    const file = where(node);
    if (file === "builtin") return "var(--k-copy)";
    let hash = 0;
    for (const sign of file.split(":")[0]) hash = (hash * 31 + sign.charCodeAt(0)) % 9973;
    return ["var(--k-op)", "var(--k-call)", "var(--k-kernel)", "var(--k-python)", "var(--k-memset)", "var(--k-wait)"][hash % 6];
  }

  const found = (node) => view.words !== "" && node.name >= 0 && `${label(node)} ${where(node)}`.toLowerCase().includes(view.words);

  /* [node, left, width, depth] of all that can be seen, in shares of the graph's width */
  function heavyBlocks() {
    const blocks = [], top = now().nodes[view.node], wide = graph.clientWidth || 1000;
    for (let node = top; node; node = now().nodes[node.parent]) blocks.push([node, 0, 1, node.depth]);
    const walk = (node, left, share) => {
      let at = left;
      for (const child of node.below) {
        const width = node.width ? share * child.width / node.width : 0;
        if (width * wide < LEAST_PX) break; // the rest is smaller
        blocks.push([child, at, width, child.depth]);
        walk(child, at, width);
        at += width;
      }
    };
    walk(top, 0, 1);
    return blocks;
  }
  function timeBlocks() {
    const blocks = [], wide = graph.clientWidth || 1000, long = (view.to - view.from) || 1, thread = now();
    for (const [at, start, took] of thread.spans) {
      const left = Math.max((start - view.from) / long, 0), right = Math.min((start + took - view.from) / long, 1);
      if ((right - left) * wide >= LEAST_PX) blocks.push([thread.nodes[at], left, right - left, thread.nodes[at].depth - 1, start, took]);
    }
    return blocks;
  }

  function draw() {
    const blocks = view.order === "time" ? timeBlocks() : heavyBlocks();
    const parts = document.createDocumentFragment();
    let deepest = 0;
    for (const [node, left, width, depth, start, took] of blocks) {
      const block = document.createElement("button");
      block.type = "button";
      block.tabIndex = -1;
      block.style.cssText = `left:${(100 * left).toFixed(4)}%;width:${(100 * width).toFixed(4)}%;top:${ROW * depth}px;background:${colour(node)}`;
      block.dataset.node = node.at;
      if (start !== undefined) { block.dataset.start = start; block.dataset.took = took; }
      block.textContent = width * graph.clientWidth > 22 ? label(node) : "";
      block.setAttribute("aria-label", `${label(node)} ${where(node)} ${text(node.total)}`);
      if (view.words) block.className = found(node) ? "hit" : "faint";
      else if (view.order === "heavy" && view.node && depth < now().nodes[view.node].depth) block.className = "above";
      parts.append(block);
      deepest = Math.max(deepest, depth);
    }
    graph.style.height = `${ROW * (deepest + 1) + 4}px`;
    graph.replaceChildren(parts);
    out.disabled = view.order === "time" ? view.from === now().begin && view.to === now().end : view.node === 0;
    matched();
  }

  /* What share of the thread's time is in functions that match, each stack once. */
  function matched() {
    if (!view.words) { matches.textContent = ""; return; }
    let sum = 0, names = new Set();
    const walk = (node, inside) => {
      const hit = inside || found(node);
      if (found(node)) names.add(node.name);
      if (hit && !inside) sum += node.total;
      for (const child of node.below) walk(child, hit);
    };
    walk(now().nodes[0], false);
    const all = now().nodes[0].total || 1;
    matches.textContent = `${names.size} function${names.size === 1 ? "" : "s"}, ${percent(sum / all)} of the time`;
  }

  function words(node, block) {
    const all = now().nodes[0].total || 1, lines = [`${label(node)}  ${where(node)}`];
    if (data.diff) lines.push(`total ${text(node.totalBefore)} before, ${text(node.total)} after`, `own ${text(node.before)} before, ${text(node.own)} after`);
    else lines.push(`total ${text(node.total)} (${percent(node.total / all)}), own ${text(node.own)} (${percent(node.own / all)})`);
    if (block && block.dataset.took) lines.push(`here ${text(Number(block.dataset.took))}, from ${text(Number(block.dataset.start))} on`);
    if (node.calls) lines.push(`${node.calls.toLocaleString("en")} calls`);
    if (node.idle > 0) lines.push(`idle ${text(node.idle)} of its own`);
    for (const [line, own] of node.lines) if (own > 0) lines.push(`line ${line}: ${text(own)}`);
    return lines;
  }

  function zoom(node, block) {
    if (view.order === "time" && block) {
      view.from = Number(block.dataset.start);
      view.to = view.from + Number(block.dataset.took);
    } else view.node = node.at;
    picked.replaceChildren(...words(node, block).map((line) => { const p = document.createElement("div"); p.textContent = line; return p; }));
    draw();
  }
  function zoomOut() { view.node = 0; view.from = now().begin; view.to = now().end; picked.textContent = ""; draw(); }

  graph.addEventListener("click", (event) => {
    const block = event.target.closest("button");
    if (block) zoom(now().nodes[block.dataset.node], block);
  });
  graph.addEventListener("pointermove", (event) => {
    const block = event.target.closest("button");
    tip.hidden = !block;
    if (!block) return;
    tip.textContent = words(now().nodes[block.dataset.node], block).join("\n");
    tip.style.left = `${Math.max(8, Math.min(event.clientX + 14, innerWidth - tip.offsetWidth - 8))}px`;
    tip.style.top = `${Math.max(8, Math.min(event.clientY + 16, innerHeight - tip.offsetHeight - 8))}px`;
  });
  graph.addEventListener("pointerleave", () => { tip.hidden = true; });
  out.addEventListener("click", zoomOut);
  document.querySelectorAll("[data-order]").forEach((button) => button.addEventListener("click", () => {
    view.order = button.dataset.order;
    document.querySelectorAll("[data-order]").forEach((other) => other.setAttribute("aria-pressed", String(other === button)));
    zoomOut();
  }));
  search.addEventListener("input", () => { view.words = search.value.trim().toLowerCase(); draw(); });
  addEventListener("keydown", (event) => {
    if (event.key === "/" && document.activeElement !== search) { event.preventDefault(); search.focus(); }
    if (event.key === "Escape") { if (search.value) { search.value = view.words = ""; draw(); } else zoomOut(); }
  });
  addEventListener("resize", draw);
  choice.addEventListener("change", () => { view.thread = Number(choice.value); zoomOut(); });
  threads.forEach((thread, at) => {
    const option = document.createElement("option");
    option.value = at;
    option.textContent = `${thread.name} · ${text(thread.nodes[0].total)}`;
    choice.append(option);
  });
  choice.hidden = threads.length < 2;

  const root = document.documentElement;
  const wanted = new URLSearchParams(location.search).get("theme");
  if (wanted) root.dataset.theme = wanted;
  document.getElementById("theme").addEventListener("click", () => {
    const dark = root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
    root.dataset.theme = dark ? "light" : "dark";
  });
  const timed = document.querySelector("[data-order=time]");
  if (timed && !threads.some((thread) => thread.spans.length)) timed.disabled = true;
  if (threads.length) zoomOut();
  else graph.textContent = "nothing was seen";
})();
