/* One step on a canvas: threads, then streams; findings as bands. All times are nanoseconds from the step's start. */
(function timeline() {
  const data = page.data.timeline;
  if (!data) return;
  const canvas = document.getElementById("lanes"), ruler = document.getElementById("ruler");
  const picked = document.getElementById("picked"), status = document.getElementById("view");
  const ROW = 17, HEAD = 20, RULER = 58, MAP = 22, NEAREST = 50; // pixels, and the fewest nanoseconds in view
  const KINDS = ["k-op", "k-call", "k-kernel", "k-copy", "k-memset", "k-range", "k-range", "k-python", "k-range", "k-wait", "k-wait"];
  const whole = { from: 0, to: data.window_ns };
  let view = { ...whole }, band = null, pin = null, hover = null, colours = {}, queued = false;

  // where each track lies, from top to bottom
  const heads = [];
  const tracks = [];
  let height = 0;
  for (const lane of data.lanes) {
    heads.push({ y: height, name: lane.name, stream: lane.kind === "stream" });
    const own = data.tracks.filter((track) => track.lane === lane.id);
    const deepest = Math.max(...own.map((track) => track.depth));
    own.forEach((track) => tracks.push({ ...track, y: height + HEAD + track.depth * ROW, laneName: lane.name, stream: lane.kind === "stream" }));
    height += HEAD + (deepest + 1) * ROW + 5;
  }
  tracks.sort((a, b) => a.y - b.y);

  const width = () => canvas.clientWidth;
  const toX = (ns) => (ns - view.from) / (view.to - view.from) * width();
  const toNs = (x) => view.from + x / width() * (view.to - view.from);

  function readColours() {
    const names = ["paper", "raise", "ink", "faint", "line", "accent", "k-ink", ...new Set(KINDS), ...new Set(data.bands.map((one) => `c-${one.c}`))];
    colours = Object.fromEntries(names.map((name) => [name, page.colour(name)]));
  }

  function context(target, tall) {
    const scale = devicePixelRatio || 1, wide = target.clientWidth;
    if (target.width !== Math.round(wide * scale) || target.height !== Math.round(tall * scale)) {
      target.width = Math.round(wide * scale);
      target.height = Math.round(tall * scale);
      target.style.height = `${tall}px`;
    }
    const pen = target.getContext("2d");
    pen.setTransform(scale, 0, 0, scale, 0, 0);
    pen.clearRect(0, 0, wide, tall);
    pen.font = "11.5px system-ui, sans-serif";
    pen.textBaseline = "middle";
    return pen;
  }

  const firstAfter = (track, ns) => { // blocks of a track do not overlap: their ends are sorted as their starts are
    let low = 0, high = track.s.length;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (track.s[middle] + track.d[middle] < ns) low = middle + 1; else high = middle;
    }
    return low;
  };

  function drawTrack(pen, track) {
    let filled = -1; // the last pixel drawn: thousands of blocks on one are drawn once
    for (let at = firstAfter(track, view.from); at < track.s.length && track.s[at] < view.to; at += 1) {
      const left = Math.max(-2, toX(track.s[at])), right = Math.min(width() + 2, toX(track.s[at] + track.d[at]));
      if (right < filled) continue;
      const wide = Math.max(right - left, 0.8);
      pen.fillStyle = colours[KINDS[track.k[at]]];
      pen.globalAlpha = track.m[at] ? 0.55 : 1;
      pen.fillRect(left, track.y, Math.max(wide - (wide > 3 ? 0.7 : 0), 0.8), ROW - 2);
      pen.globalAlpha = 1;
      filled = left + 0.6;
      if (wide > 28) {
        const words = track.m[at] ? `${track.m[at][0]} events` : data.texts[track.n[at]];
        pen.save();
        pen.beginPath();
        pen.rect(left, track.y, wide - 3, ROW - 2);
        pen.clip();
        pen.fillStyle = colours["k-ink"];
        pen.fillText(words.slice(0, Math.ceil(wide / 4)), Math.max(left, 0) + 4, track.y + ROW / 2 - 0.5);
        pen.restore();
      }
    }
  }

  function outline(pen, block, colour, thick) {
    const { track, at } = block, left = toX(track.s[at]), right = toX(track.s[at] + track.d[at]);
    pen.strokeStyle = colour;
    pen.lineWidth = thick;
    pen.strokeRect(left, track.y + 0.5, Math.max(2, right - left), ROW - 3);
  }

  function drawBands(pen, tall) {
    data.bands.forEach((one) => {
      const left = toX(one.s), right = Math.max(toX(one.e), left + 2), strong = band === one;
      if (right < 0 || left > width()) return;
      pen.fillStyle = pen.strokeStyle = colours[`c-${one.c}`];
      pen.globalAlpha = strong ? 0.2 : 0.09;
      pen.fillRect(left, 0, right - left, tall);
      pen.globalAlpha = strong ? 1 : 0.5;
      pen.lineWidth = strong ? 1.5 : 0.75;
      pen.strokeRect(left, -2, right - left, tall + 4);
      pen.globalAlpha = 1;
    });
  }

  function drawLaunch(pen) { // from the call on the host to the kernel that is held
    const { track, at } = pin;
    if (!track.l || track.l[at] === null) return;
    const calling = (one) => { // is an API call open on this track at that moment?
      const call = firstAfter(one, track.l[at] + 1);
      return !one.stream && call < one.s.length && one.s[call] <= track.l[at] && [1, 10].includes(one.k[call]);
    };
    const host = tracks.find(calling);
    if (!host) return;
    const x1 = toX(track.l[at]), y1 = host.y + ROW - 2, x2 = toX(track.s[at]), y2 = track.y;
    pen.strokeStyle = colours.accent;
    pen.lineWidth = 1.5;
    pen.beginPath();
    pen.moveTo(x1, y1);
    pen.bezierCurveTo(x1, (y1 + y2) / 2, x2, (y1 + y2) / 2, x2, y2);
    pen.stroke();
  }

  function tickStep(most) {
    const raw = (view.to - view.from) / most, base = 10 ** Math.floor(Math.log10(raw));
    return [1, 2, 5, 10].map((n) => n * base).find((n) => n >= raw);
  }

  /* As many digits as tell one tick from the next. */
  function tickText(ns, step) {
    const [unit, size] = view.to >= 1e9 ? ["s", 1e9] : view.to >= 1e6 ? ["ms", 1e6] : view.to >= 1e3 ? ["µs", 1e3] : ["ns", 1];
    return `${(ns / size).toFixed(Math.max(0, -Math.floor(Math.log10(step / size) + 1e-9)))} ${unit}`;
  }

  function drawRuler() {
    const pen = context(ruler, RULER), wide = width();
    const scale = (ns) => ns / data.window_ns * wide;
    pen.fillStyle = colours.raise; // the map: the whole step, what is busy in it, and the part in view
    pen.fillRect(0, 0, wide, MAP);
    const devices = tracks.filter((track) => track.stream);
    const work = devices.length ? [2, 3, 4] : [0]; // kernels, copies and memsets; without a device, ops
    pen.fillStyle = colours[devices.length ? "k-kernel" : "k-op"];
    for (const track of devices.length ? devices : tracks) {
      let filled = -1;
      for (let at = 0; at < track.s.length; at += 1) {
        const left = scale(track.s[at]), right = scale(track.s[at] + track.d[at]);
        if (right < filled || !work.includes(track.k[at])) continue;
        pen.fillRect(left, 5, Math.max(0.5, right - left), MAP - 10);
        filled = left + 0.5;
      }
    }
    data.bands.forEach((one) => {
      pen.fillStyle = colours[`c-${one.c}`];
      pen.fillRect(scale(one.s), MAP - 4, Math.max(2, scale(one.e) - scale(one.s)), 3);
    });
    pen.strokeStyle = colours.accent;
    pen.lineWidth = 1.5;
    pen.strokeRect(scale(view.from) + 0.75, 0.75, Math.max(3, scale(view.to) - scale(view.from) - 1.5), MAP - 1.5);
    pen.fillStyle = colours.faint;
    const step = tickStep(wide / 90);
    for (let tick = Math.ceil(view.from / step) * step; tick <= view.to; tick += step) {
      pen.fillRect(toX(tick), MAP + 2, 1, 5);
      pen.fillText(tickText(tick, step), toX(tick) + 4, MAP + 9);
    }
    let used = -Infinity; // numbers of findings, where there is room for them
    data.bands.slice().sort((a, b) => a.s - b.s).forEach((one) => {
      const x = Math.min(wide - 10, Math.max(10, (Math.max(toX(one.s), 0) + Math.min(toX(one.e), wide)) / 2));
      if (toX(one.e) < 0 || toX(one.s) > wide || (x - used < 18 && band !== one)) return;
      used = x;
      pen.fillStyle = colours[`c-${one.c}`];
      pen.beginPath();
      pen.arc(x, RULER - 11, 8, 0, 7);
      pen.fill();
      pen.fillStyle = colours.paper;
      pen.textAlign = "center";
      pen.fillText(String(one.f + 1), x, RULER - 10.5);
      pen.textAlign = "start";
    });
  }

  function draw() {
    queued = false;
    const pen = context(canvas, height);
    drawBands(pen, height);
    heads.forEach((head) => {
      pen.fillStyle = colours.line;
      pen.fillRect(0, head.y, width(), 1);
    });
    tracks.forEach((track) => drawTrack(pen, track));
    heads.forEach((head) => {
      pen.font = "600 11.5px system-ui, sans-serif";
      pen.fillStyle = colours.faint;
      pen.fillText(head.name, 8, head.y + HEAD / 2 + 1);
      pen.font = "11.5px system-ui, sans-serif";
    });
    if (hover) outline(pen, hover, colours.ink, 1);
    if (pin) { outline(pen, pin, colours.accent, 2); drawLaunch(pen); }
    drawRuler();
  }
  const redraw = () => { if (!queued) { queued = true; requestAnimationFrame(draw); } };

  function show(from, to) {
    const span = Math.min(whole.to, Math.max(NEAREST, to - from));
    const start = Math.min(Math.max(0, from + (to - from - span) / 2), whole.to - span);
    view = { from: start, to: start + span };
    canvas.dataset.from = view.from;
    canvas.dataset.to = view.to;
    canvas.dataset.band = band ? `${band.f}:${band.p}` : "";
    status.textContent = `${page.ns(span)} of ${page.ns(data.window_ns)}, from ${tickText(start, span / 20)}`;
    redraw();
  }
  const zoom = (factor, ns = (view.from + view.to) / 2) => show(ns - (ns - view.from) * factor, ns + (view.to - ns) * factor);
  const pan = (share) => { const by = share * (view.to - view.from); show(view.from + by, view.to + by); };
  const reset = () => { band = null; document.querySelectorAll(".card.lit").forEach((card) => card.classList.remove("lit")); show(0, whole.to); };

  page.showPlace = (finding, place) => {
    band = data.bands.find((one) => one.f === finding && one.p === place) || null;
    if (!band) return;
    document.querySelectorAll(".card").forEach((card) => card.classList.toggle("lit", Number(card.dataset.finding) === finding));
    const margin = Math.max(0.4 * (band.e - band.s), 10_000);
    show(band.s - margin, band.e + margin);
  };

  function find(x, y) {
    const track = tracks.find((one) => y >= one.y && y < one.y + ROW);
    if (!track) return null;
    const ns = toNs(x), slack = 2 / width() * (view.to - view.from);
    const at = firstAfter(track, ns - slack);
    return at < track.s.length && track.s[at] <= ns + slack ? { track, at } : null;
  }

  function facts({ track, at }) {
    const many = track.m[at], out = [];
    out.push([many ? "longest" : "name", data.texts[track.n[at]]]);
    out.push(["duration", page.ns(track.d[at])]);
    if (many) out.push(["merged", `${many[0]} short events, ${page.ns(many[1])} in all`]);
    if (data.texts[track.x[at]]) out.push([track.k[at] === 0 ? "inputs" : "details", data.texts[track.x[at]]]);
    if (track.o && track.o[at]) out.push(["launched by", data.texts[track.o[at]]]);
    if (track.l && track.l[at] !== null && !many) out.push(["launched", `${page.ns(Math.max(0, track.s[at] - track.l[at]))} before it ran`]);
    out.push(["kind", data.kinds[track.k[at]]], ["starts at", page.ns(track.s[at])], ["lane", track.laneName]);
    return out;
  }

  function hold(block) {
    pin = block;
    picked.hidden = !block;
    if (block) {
      const list = page.make("dl");
      facts(block).forEach(([name, words]) => list.append(page.make("dt", {}, name), page.make("dd", {}, words)));
      picked.replaceChildren(list);
    }
    redraw();
  }

  function walk(key) { // from event to event, without a mouse
    if (!pin) { const track = tracks.find((one) => firstAfter(one, view.from) < one.s.length); if (track) hold({ track, at: firstAfter(track, view.from) }); return; }
    let { track, at } = pin;
    if (key === "ArrowLeft" || key === "ArrowRight") at = Math.min(track.s.length - 1, Math.max(0, at + (key === "ArrowRight" ? 1 : -1)));
    else {
      const next = tracks[tracks.indexOf(track) + (key === "ArrowDown" ? 1 : -1)];
      if (!next) return;
      at = Math.min(firstAfter(next, track.s[at]), next.s.length - 1);
      track = next;
    }
    hold({ track, at });
    const middle = track.s[at] + track.d[at] / 2, half = (view.to - view.from) / 2;
    if (middle < view.from || middle > view.to) show(middle - half, middle + half);
  }

  const actions = { left: () => pan(-0.25), right: () => pan(0.25), in: () => zoom(0.5), out: () => zoom(2), reset };
  document.querySelectorAll("[data-do]").forEach((button) => button.addEventListener("click", () => actions[button.dataset.do]()));
  canvas.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    if (event.shiftKey && event.key.startsWith("Arrow")) { walk(event.key); event.preventDefault(); return; }
    const action = { "+": "in", "=": "in", "-": "out", _: "out", ArrowLeft: "left", ArrowRight: "right", 0: "reset", Home: "reset" }[event.key];
    if (action) { actions[action](); event.preventDefault(); }
    if (event.key === "Escape") hold(null);
  });

  // a wheel that is already scrolling the page goes on scrolling it when the canvas slides under the pointer
  let scrolled = -1e9;
  addEventListener("wheel", (event) => { if (event.target !== canvas) scrolled = event.timeStamp; }, { passive: true });
  canvas.addEventListener("wheel", (event) => {
    if (event.timeStamp - scrolled < 300 && !event.ctrlKey) { scrolled = event.timeStamp; return; }
    const sideways = event.shiftKey ? event.deltaY || event.deltaX : event.deltaX;
    if (event.shiftKey || Math.abs(event.deltaX) > Math.abs(event.deltaY)) { event.preventDefault(); pan(sideways / 800); return; }
    if (event.deltaY > 0 && view.to - view.from >= whole.to) return; // nothing left to zoom out of: scroll on
    event.preventDefault();
    zoom(Math.exp(Math.max(-1, Math.min(1, event.deltaY / 300))), toNs(event.offsetX));
  }, { passive: false });

  const fingers = new Map();
  let moved = 0;
  canvas.addEventListener("pointerdown", (event) => {
    fingers.set(event.pointerId, event.offsetX);
    moved = 0;
    try { canvas.setPointerCapture(event.pointerId); } catch { /* the pointer is gone already */ }
  });
  canvas.addEventListener("pointermove", (event) => {
    if (!fingers.has(event.pointerId)) {
      hover = find(event.offsetX, event.offsetY);
      if (hover) page.tip.show(facts(hover).slice(0, 5).map(([name, words]) => (name === "name" ? words : `${name}: ${words}`)).join("\n"), event.clientX, event.clientY);
      else page.tip.hide();
      redraw();
      return;
    }
    const before = [...fingers.values()], was = fingers.get(event.pointerId);
    fingers.set(event.pointerId, event.offsetX);
    moved += Math.abs(event.offsetX - was);
    if (fingers.size === 1) { pan((was - event.offsetX) / width()); canvas.classList.add("drag"); page.tip.hide(); return; }
    const now = [...fingers.values()], gap = Math.abs(now[0] - now[1]);
    if (gap > 4) zoom(Math.abs(before[0] - before[1]) / gap, toNs((now[0] + now[1]) / 2));
  });
  const lift = (event) => {
    const alone = fingers.size === 1;
    if (fingers.delete(event.pointerId) && alone && moved < 4 && event.type === "pointerup") hold(find(event.offsetX, event.offsetY));
    canvas.classList.remove("drag");
  };
  canvas.addEventListener("pointerup", lift);
  canvas.addEventListener("pointercancel", lift);
  canvas.addEventListener("pointerleave", () => { hover = null; page.tip.hide(); redraw(); });
  canvas.addEventListener("dblclick", reset);
  const seek = (event) => { // the map: its middle goes where the pointer is
    if (event.type === "pointermove" && !event.buttons) return;
    const middle = event.offsetX / width() * data.window_ns, half = (view.to - view.from) / 2;
    show(middle - half, middle + half);
  };
  ruler.addEventListener("pointerdown", seek);
  ruler.addEventListener("pointermove", seek);
  page.onTheme.push(() => { readColours(); redraw(); });
  new ResizeObserver(() => requestAnimationFrame(redraw)).observe(canvas);
  readColours();
  const first = data.bands[0]; // the first finding that shows itself here, with some of the step around it
  if (first) {
    const margin = Math.max(2 * (first.e - first.s), data.window_ns / 12);
    band = first;
    show(first.s - margin, first.e + margin);
  } else reset();
  draw();
})();
