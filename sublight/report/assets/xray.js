/* Links the panes: a line that is pointed at or held lights all that comes from it. One listener a page for each kind
   of event; a kernel's rows are built when it is first shown. */
(function xray() {
  const articles = [...document.querySelectorAll("article.kernel")];
  const kernels = page.data.kernels, views = new Map();
  const REST_MS = 140; // a pointer that rests this long moves the other panes
  let at = -1, held = null, resting = 0, search = { hits: [], at: -1 };

  function build(index) {
    if (views.has(index)) return views.get(index);
    const article = articles[index], panes = new Map();
    for (const pane of article.querySelectorAll(".pane")) {
      const body = pane.querySelector(".body"), waiting = body.querySelector("template");
      if (waiting) waiting.replaceWith(waiting.content);
      const rows = [...body.querySelectorAll(".l")], byKey = new Map();
      rows.forEach((row, place) => {
        const key = row.dataset.k ?? row.dataset.n;
        if (key === undefined) return;
        if (!byKey.has(Number(key))) byKey.set(Number(key), []);
        byKey.get(Number(key)).push(place);
      });
      panes.set(pane.dataset.pane, { pane, body, rows, byKey, map: pane.querySelector(".map"), found: [], cursor: -1 });
    }
    const keys = kernels[index].keys;
    const linked = [...new Set(keys.flatMap((key) => key.lines))].sort((a, b) => a - b);
    const view = { article, panes, keys, linked, file: kernels[index].file, marked: { lit: [], over: [] } };
    views.set(index, view);
    return view;
  }

  /* What belongs to a source line, or to a row's key: places of rows, pane by pane. */
  function gather(view, chosen) {
    const keys = chosen.line !== undefined
      ? view.keys.flatMap((key, number) => (key.lines.includes(chosen.line) ? [number] : [])) : [chosen.key];
    const lines = chosen.line !== undefined ? [chosen.line] : view.keys[chosen.key].lines;
    const out = new Map();
    for (const [name, one] of view.panes) {
      let places = name === "source" ? lines.map((line) => line - 1).filter((place) => one.rows[place]) // all of its lines are rows
        : keys.flatMap((key) => one.byKey.get(key) || []);
      if (!places.length && name !== "source" && chosen.key !== undefined) { // a listing that does not tell calls apart
        const like = view.keys.flatMap((key, number) => (key.lines[0] === lines[0] ? [number] : []));
        places = like.flatMap((key) => one.byKey.get(key) || []);
      }
      out.set(name, places.sort((a, b) => a - b));
    }
    return { places: out, lines, keys };
  }

  function mark(view, kind, gathered) {
    view.marked[kind].forEach((row) => row.classList.remove(kind));
    view.marked[kind] = [];
    if (!gathered) return;
    for (const [name, places] of gathered.places) {
      for (const place of places) {
        const row = view.panes.get(name).rows[place];
        row.classList.add(kind);
        view.marked[kind].push(row);
      }
    }
  }

  function reveal(one, place, always) {
    const row = one.rows[place], { body } = one;
    if (!row || one.pane.hidden) return;
    const top = row.offsetTop - body.scrollTop;
    if (always || top < 18 || top > body.clientHeight * 0.7) body.scrollTop = row.offsetTop - body.clientHeight / 3;
  }

  const visible = (one, places) => places.some((place) => {
    const top = one.rows[place].offsetTop - one.body.scrollTop;
    return top >= 0 && top < one.body.clientHeight - 18;
  });

  /* Where lit rows lie in the whole listing. */
  function chart(one) {
    const total = one.rows.length || 1, runs = [];
    for (const place of one.found) {
      const last = runs[runs.length - 1];
      if (last && place - last[1] <= Math.max(1, total / 400)) last[1] = place; else runs.push([place, place]);
    }
    one.map.replaceChildren(...runs.map(([from, to]) =>
      page.make("i", { style: `top:${100 * from / total}%;height:${100 * (to - from + 1) / total}%` })));
  }

  const NAMES = { source: "source", ttgir: "TTGIR", ptx: "PTX", sass: "SASS" };
  function tell(view, gathered) {
    const words = [];
    if (gathered) {
      words.push(`${view.file}:${gathered.lines.join(" ← ")}`);
      const through = [...new Set(gathered.keys.flatMap((key) => view.keys[key].through))];
      if (through.length) words.push(`through ${through.slice(0, 4).join(", ")}${through.length > 4 ? ", …" : ""}`);
      for (const [name, places] of gathered.places) if (name !== "source") words.push(`${places.length} ${NAMES[name]}`);
    }
    view.article.querySelector(".now").textContent = words.join(" · ");
  }

  function hold(chosen, from) {
    const view = views.get(at);
    held = chosen;
    const gathered = chosen && gather(view, chosen);
    mark(view, "over", null);
    mark(view, "lit", gathered);
    tell(view, gathered);
    for (const [name, one] of view.panes) {
      one.found = gathered ? gathered.places.get(name) : [];
      one.cursor = -1;
      one.pane.querySelector(".lit-count").textContent = gathered ? String(one.found.length) : "";
      one.pane.querySelectorAll("[data-step]").forEach((button) => { button.disabled = !one.found.length; });
      chart(one);
    }
    for (const [name, one] of view.panes) if (name !== from && one.found.length) reveal(one, one.found[0]); // after all writing
  }

  const chosenBy = (row) => (row.dataset.n !== undefined ? { line: Number(row.dataset.n) } : { key: Number(row.dataset.k) });
  const same = (a, b) => a && b && a.line === b.line && a.key === b.key;

  /* To the next run of lit rows of a pane. */
  function step(one, by) {
    const starts = one.found.filter((place, index) => !index || place > one.found[index - 1] + 1);
    if (!starts.length) return;
    const middle = one.body.scrollTop + one.body.clientHeight / 3;
    const below = starts.findIndex((place) => one.rows[place].offsetTop > middle); // of where the reader is
    const now = starts.includes(one.cursor) ? starts.indexOf(one.cursor) : below < 0 ? starts.length - 1 : below - (by > 0 ? 1 : 0);
    one.cursor = starts[(now + by + 2 * starts.length) % starts.length];
    reveal(one, one.cursor, true);
  }

  function move(by) { // through the source lines that have code
    const view = views.get(at);
    if (!view.linked.length) return;
    const now = held ? gather(view, held).lines[0] : kernelLine(view);
    const place = view.linked.indexOf(now);
    const next = view.linked[Math.min(Math.max(place + (held ? by : 0), 0), view.linked.length - 1)];
    hold({ line: next });
  }

  const kernelLine = (view) => { // where its first instruction comes from
    const rows = (view.panes.get("sass") || view.panes.get("ptx") || { rows: [] }).rows;
    const first = rows.find((row) => row.dataset.k !== undefined);
    return first ? view.keys[Number(first.dataset.k)].lines.at(-1) : view.linked[0];
  };

  function select(index) {
    if (index === at || !articles[index]) return;
    const line = at >= 0 && held ? gather(views.get(at), held).lines[0] : undefined;
    const before = at >= 0 ? views.get(at) : null;
    if (before) hold(null);
    articles.forEach((article, number) => { article.hidden = number !== index; });
    at = index;
    const view = build(index);
    if (before) for (const [name, one] of view.panes) show(name, !before.panes.get(name)?.pane.hidden);
    document.querySelectorAll("#kernels .sheet").forEach((one) => { one.hidden = !one.querySelector(`[data-k="${index}"]`); });
    document.querySelectorAll("#kernels [data-k]").forEach((one) => one.classList.toggle("on", Number(one.dataset.k) === index));
    document.querySelector("nav").replaceChildren(...[...view.article.querySelectorAll("section[id]")].map((section) =>
      page.make("a", { href: `#${section.id}` }, section.id.startsWith("panes") ? "code" : section.id.replace(/-\d+$/, ""))));
    const source = view.panes.get("source"), begin = source.byKey.get(kernelLine(view));
    if (begin) source.body.scrollTop = source.rows[Math.max(0, begin[0] - 3)].offsetTop;
    if (line !== undefined && view.file === before.file && view.linked.includes(line)) hold({ line });
    find("");
  }

  function show(name, on) {
    const view = views.get(at), one = view.panes.get(name);
    if (!one) return;
    one.pane.hidden = !on;
    view.article.querySelector(`[data-toggle="${name}"]`).setAttribute("aria-pressed", String(on));
    if (on && one.found.length) reveal(one, one.found[0]);
  }

  function find(words) {
    const view = views.get(at), wanted = words.trim().toLowerCase();
    search.hits.forEach(({ row }) => row.classList.remove("hit", "hit-now"));
    search = { hits: [], at: -1 };
    if (wanted) {
      for (const one of view.panes.values()) {
        if (one.pane.hidden) continue;
        one.texts ||= one.rows.map((row) => row.querySelector("code").textContent.toLowerCase());
        one.texts.forEach((text, place) => { if (text.includes(wanted)) search.hits.push({ one, place, row: one.rows[place] }); });
      }
      search.hits.forEach(({ row }) => row.classList.add("hit"));
    }
    view.article.querySelector(".matches").textContent = wanted ? `${search.hits.length} rows` : "";
    if (search.hits.length) nextHit(1);
  }

  function nextHit(by) {
    if (!search.hits.length) return;
    search.hits[search.at]?.row.classList.remove("hit-now");
    search.at = (search.at + by + search.hits.length) % search.hits.length;
    const { one, place, row } = search.hits[search.at];
    row.classList.add("hit-now");
    reveal(one, place);
    views.get(at).article.querySelector(".matches").textContent = `${search.at + 1} of ${search.hits.length} rows`;
  }

  document.addEventListener("pointerover", (event) => {
    const told = event.target.closest("[data-tip]");
    if (told && !told.classList.contains("seg")) page.tip.beside(told, told.dataset.tip); else page.tip.hide();
    const row = event.target.closest(".l[data-n],.l[data-k]"), view = views.get(at);
    clearTimeout(resting);
    if (event.pointerType === "touch") return;
    const gathered = row && gather(view, chosenBy(row));
    mark(view, "over", gathered);
    if (!held) tell(view, gathered);
    if (!row || held) return;
    const from = row.closest(".pane").dataset.pane;
    resting = setTimeout(() => {
      for (const [name, one] of view.panes) {
        const places = gathered.places.get(name);
        if (name !== from && places.length && !one.pane.hidden && !visible(one, places)) reveal(one, places[0], true);
      }
    }, REST_MS);
  });

  document.addEventListener("click", (event) => { // before explain.js: what it scrolls to has to be shown
    const link = event.target.closest("a[data-line]");
    if (!link) return;
    select(Number(link.getAttribute("href").replace("#panes-", "")));
    hold({ line: Number(link.dataset.line) });
  }, true);

  document.addEventListener("click", (event) => {
    const picked = event.target.closest("[data-pick]"), toggle = event.target.closest("[data-toggle]");
    const stepper = event.target.closest("[data-step]"), row = event.target.closest(".l[data-n],.l[data-k]");
    const map = event.target.closest(".map"), view = views.get(at);
    if (picked) select(Number(picked.dataset.pick));
    else if (toggle) show(toggle.dataset.toggle, toggle.getAttribute("aria-pressed") !== "true");
    else if (stepper) step(view.panes.get(stepper.closest(".pane").dataset.pane), Number(stepper.dataset.step));
    else if (map) {
      const one = view.panes.get(map.closest(".pane").dataset.pane), box = map.getBoundingClientRect();
      one.body.scrollTop = (event.clientY - box.top) / box.height * one.body.scrollHeight - one.body.clientHeight / 2;
    } else if (row && getSelection().isCollapsed) {
      const chosen = chosenBy(row);
      hold(same(held, chosen) ? null : chosen, row.closest(".pane").dataset.pane);
    }
  });

  document.addEventListener("input", (event) => { if (event.target.matches(".tools input")) find(event.target.value); });
  document.addEventListener("keydown", (event) => {
    const view = views.get(at);
    if (event.target.matches("input")) {
      if (event.key === "Enter") nextHit(event.shiftKey ? -1 : 1);
      if (event.key === "Escape") { event.target.value = ""; find(""); event.target.blur(); }
      return;
    }
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const pane = [...view.panes.keys()]["1234".indexOf(event.key)];
    if (event.key === "j" || event.key === "k") move(event.key === "j" ? 1 : -1);
    else if (event.key === "n" || event.key === "p") {
      for (const [name, one] of view.panes) if (name !== "source") step(one, event.key === "n" ? 1 : -1);
    } else if (pane) show(pane, view.panes.get(pane).pane.hidden);
    else if (event.key === "Escape") hold(null);
    else if (event.key === "/") { event.preventDefault(); view.article.querySelector(".tools input").focus(); }
  });

  select(0);
  const asked = Number(new URLSearchParams(location.search).get("line"));
  if (asked) hold({ line: asked });
})();
