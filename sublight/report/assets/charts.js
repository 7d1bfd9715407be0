/* The roofline and the memory curve, as SVG at the width there is: text keeps its size on a phone. */
(function charts() {
  const { make } = page;
  const COLOURS = ["f1", "c-data", "c-floor", "c-python", "f2", "c-sync", "c-communication", "c-unknown"];
  const redrawn = (holder, draw) => {
    let width = 0;
    const again = () => {
      const now = Math.round(holder.clientWidth);
      if (now && now !== width) { width = now; holder.replaceChildren(...draw(width)); }
    };
    new ResizeObserver(() => requestAnimationFrame(again)).observe(holder);  // not in the observer: it may resize
    again();
  };
  const decades = (low, high) => {
    const out = [];
    for (let power = Math.ceil(Math.log10(low) - 1e-9); power <= Math.log10(high) + 1e-9; power += 1) out.push(10 ** power);
    return out;
  };
  const bare = (value, unit) => page.text(value, unit).replace(/\.0+(?= )/, "");

  function roofline(chart, width) {
    const height = Math.max(300, Math.min(460, width * 0.55));
    const strip = chart.dots.some((dot) => dot.intensity === null) ? 74 : 0; // ops without arithmetic, left of the axis
    const left = 66, right = 12, top = 14, bottom = 44;
    const counted = chart.dots.filter((dot) => dot.intensity !== null);
    const slope = chart.roofs.find((roof) => !roof.flat);
    const flats = chart.roofs.filter((roof) => roof.flat);
    const ridge = slope ? Math.max(0, ...flats.map((roof) => roof.value / slope.value)) : 0;
    const xs = counted.map((dot) => dot.intensity);
    const x0 = 10 ** Math.floor(Math.log10(Math.min(0.5, ...xs)));
    const x1 = Math.max(2.5 * ridge, 2 * Math.max(1, ...xs));
    // a byte rate stands at the height that it would have at the left edge: the memory roof runs on into the strip
    const rate = (dot) => (dot.intensity === null ? dot.rate * x0 : dot.rate);
    const rates = chart.dots.map(rate);
    const y1 = 2 * Math.max(...flats.map((roof) => roof.value), ...rates, slope ? slope.value * x0 : 0);
    const y0 = Math.max(Math.min(...rates, slope ? slope.value * x0 : Infinity) / 2, y1 / 1e9);
    const part = (value, low, high) => Math.log(value / low) / Math.log(high / low);
    const x = (value) => left + strip + (width - left - strip - right) * part(value, x0, x1);
    const y = (value) => height - bottom - (height - top - bottom) * part(Math.max(value, y0), y0, y1);
    const svg = make("svg", { viewBox: `0 0 ${width} ${height}`, role: "group", "aria-label": "Roofline of the ops" });
    const floor = height - bottom;
    const every = width < 520 ? 2 : 1;
    decades(x0, x1).forEach((tick, at) => {
      svg.append(make("line", { class: "grid", x1: x(tick), x2: x(tick), y1: top, y2: floor }));
      if (at % every === 0) svg.append(make("text", { x: x(tick), y: floor + 17, "text-anchor": "middle" }, String(Number(tick.toPrecision(1)))));
    });
    decades(y0, y1).forEach((tick, at) => {
      svg.append(make("line", { class: "grid", x1: left, x2: width - right, y1: y(tick), y2: y(tick) }));
      if (at % every === 0) svg.append(make("text", { x: left - 8, y: y(tick) + 4, "text-anchor": "end" }, bare(tick, width < 520 ? "F/s" : "FLOP/s")));
    });
    svg.append(make("text", { x: (left + strip + width - right) / 2, y: height - 6, "text-anchor": "middle" }, "FLOP for each byte moved"));
    if (strip) {
      svg.append(make("line", { class: "grid", x1: left, x2: left, y1: top, y2: floor }));
      svg.append(make("text", { x: left + strip / 2, y: floor + 17, "text-anchor": "middle" }, "none:"));
      svg.append(make("text", { x: left + strip / 2, y: floor + 31, "text-anchor": "middle" }, "by B/s"));
    }
    const peak = Math.max(0, ...flats.map((roof) => roof.value)) || y1;
    if (slope) {
      const end = Math.min(x1, peak / slope.value), startX = left, startY = y(slope.value * x0);
      const path = `M${strip ? startX : x(x0)} ${startY}L${x(x0)} ${startY}L${x(end)} ${y(slope.value * end)}`;
      svg.append(make("path", { class: "roof", d: path }));
      const middle = x0 * (end / x0) ** 0.36, angle = Math.atan2(y(slope.value * end) - startY, x(end) - x(x0)) * 180 / Math.PI;
      const at = `translate(${x(middle)} ${y(slope.value * middle) - 7}) rotate(${angle})`;
      svg.append(make("text", { class: "roofname", transform: at, "text-anchor": "middle" }, slope.label));
    }
    for (const roof of flats) {
      const from = slope ? Math.max(x0, roof.value / slope.value) : x0;
      svg.append(make("line", { class: "roof", x1: x(from), x2: width - right, y1: y(roof.value), y2: y(roof.value), "stroke-dasharray": "5 4" }));
      svg.append(make("text", { class: "roofname", x: width - right, y: y(roof.value) - 5, "text-anchor": "end" }, roof.label));
    }
    const most = Math.max(...chart.dots.map((dot) => dot.time));
    const group = make("g", { role: "list" });
    const alone = chart.dots.filter((dot) => dot.intensity === null);
    chart.dots.slice().reverse().forEach((dot) => { // the longest last: they lie on top
      const radius = 3 + 11 * Math.sqrt(dot.time / most);
      const spread = alone.length > 1 ? (alone.indexOf(dot) % 5 - Math.min(4, alone.length - 1) / 2) * 11 : 0;
      const cx = dot.intensity === null ? left + strip / 2 + spread : x(dot.intensity);
      const fill = `var(--${COLOURS[Math.min(chart.families.indexOf(dot.family), COLOURS.length - 1)]})`;
      const words = dot.label.join("\n");
      const mark = make("circle", { class: "dot", cx, cy: y(rate(dot)), r: radius, style: `fill:${fill}`, tabindex: "-1", role: "listitem", "aria-label": words });
      const show = () => page.tip.beside(mark, words);
      mark.addEventListener("pointerenter", show);
      mark.addEventListener("focus", show);
      mark.addEventListener("pointerleave", () => page.tip.hide());
      mark.addEventListener("blur", () => page.tip.hide());
      group.append(mark);
    });
    const marks = [...group.children].reverse(); // by time, longest first
    marks[0].setAttribute("tabindex", "0");
    group.addEventListener("keydown", (event) => {
      const move = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
      if (!move) return;
      event.preventDefault();
      const now = marks.indexOf(event.target);
      const next = marks[(now + move + marks.length) % marks.length];
      marks[now].setAttribute("tabindex", "-1");
      next.setAttribute("tabindex", "0");
      next.focus();
    });
    svg.append(group);
    const legend = make("ul", { class: "legend" });
    chart.families.forEach((family, at) => {
      const item = make("li");
      item.append(make("i", { style: `background:var(--${COLOURS[Math.min(at, COLOURS.length - 1)]})` }), family || "other");
      legend.append(item);
    });
    return [legend, svg];
  }

  function memory(log, width) {
    const height = Math.max(160, Math.min(230, width * 0.3));
    const left = 66, right = 12, top = 22, bottom = 26, floor = height - bottom;
    const x = (ns) => left + (width - left - right) * Math.min(1, Math.max(0, ns / log.span_ns));
    const high = 1.08 * Math.max(1, log.peak_bytes);
    const y = (bytes) => floor - (floor - top) * (bytes / high);
    const svg = make("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": `Allocated memory, peak ${page.text(log.peak_bytes, "B")}` });
    const step = [1, 2, 5, 10].map((n) => n * 10 ** Math.floor(Math.log10(high / 4))).find((n) => high / n <= 5) || high;
    for (let tick = 0; tick < high; tick += step) {
      svg.append(make("line", { class: "grid", x1: left, x2: width - right, y1: y(tick), y2: y(tick) }));
      svg.append(make("text", { x: left - 8, y: y(tick) + 4, "text-anchor": "end" }, bare(tick, "B")));
    }
    const [from, to] = log.window;
    svg.append(make("rect", { class: "window", x: x(from), y: top, width: Math.max(1, x(to) - x(from)), height: floor - top }));
    [0, 0.5, 1].forEach((share) => svg.append(make("text", { x: x(share * log.span_ns), y: height - 8, "text-anchor": ["start", "middle", "end"][2 * share] }, page.ns(share * log.span_ns))));
    let path = "", last = y(log.b[0]);
    log.t.forEach((time, at) => { // it holds its value until the next event
      path += at ? `H${x(time).toFixed(1)}V${y(log.b[at]).toFixed(1)}` : `M${x(time).toFixed(1)} ${last.toFixed(1)}`;
    });
    path += `H${x(log.span_ns).toFixed(1)}`;
    svg.append(make("path", { class: "area", d: `${path}V${floor}H${x(log.t[0]).toFixed(1)}Z` }), make("path", { class: "edge", d: path }));
    const px = x(log.peak_ns);
    svg.append(make("circle", { class: "peak", cx: px, cy: y(log.peak_bytes), r: 3 }));
    const anchor = px < width / 3 ? "start" : px > 2 * width / 3 ? "end" : "middle";
    svg.append(make("text", { class: "peak", x: px, y: y(log.peak_bytes) - 8, "text-anchor": anchor }, `peak ${page.text(log.peak_bytes, "B")}`));
    const cursor = make("line", { class: "grid", y1: top, y2: floor, visibility: "hidden" });
    svg.append(cursor);
    svg.addEventListener("pointermove", (event) => {
      const box = svg.getBoundingClientRect();
      const ns = ((event.clientX - box.left) * width / box.width - left) / (width - left - right) * log.span_ns;
      let at = log.t.findIndex((time) => time > ns);
      at = at < 0 ? log.t.length - 1 : at - 1;
      if (at < 0 || ns > log.span_ns) { page.tip.hide(); return; }
      for (const [key, value] of [["x1", x(ns)], ["x2", x(ns)], ["visibility", "visible"]]) cursor.setAttribute(key, value);
      page.tip.show(`${page.text(log.b[at], "B")} at ${page.ns(Math.max(0, ns))}`, event.clientX, event.clientY);
    });
    svg.addEventListener("pointerleave", () => { page.tip.hide(); cursor.setAttribute("visibility", "hidden"); });
    return [svg];
  }

  const { roofline: roofs, memory: log } = page.data;
  if (roofs) redrawn(document.getElementById("roof"), (width) => roofline(roofs, width));
  if (log) redrawn(document.getElementById("mem"), (width) => memory(log, width));
})();
