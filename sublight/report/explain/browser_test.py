"""The page in a real browser: it draws, sorts, searches and zooms, fits a phone, and its console stays empty."""

from __future__ import annotations

import dataclasses
import html
import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from sublight.diagnose.record import Place
from sublight.report.explain import fakes as explain_fakes
from sublight.report.explain import page as explain_page
from sublight.report.explain import trace_fakes

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no chromium to open the page in (Debian: chromium)")

WATCH = """<script>
window.failed = [];
window.alert = (words) => failed.push('alert ' + words);
window.onerror = (words) => { failed.push(String(words)); };
addEventListener('unhandledrejection', (event) => failed.push(String(event.reason)));
console.error = (...words) => failed.push(words.join(' '));
</script>"""
DRIVE = """<script>
const pause = () => new Promise((done) => setTimeout(done, 50));
const send = (target, kind, name, more) =>
  target.dispatchEvent(new kind(name, { bubbles: true, cancelable: true, ...more }));
(async () => {
  const out = {};
  try { await (async (out) => { %s })(out); } catch (error) { failed.push(error.stack); }
  const told = document.createElement('pre');
  told.id = 'outcome';
  told.textContent = JSON.stringify({ ...out, failed });
  document.body.append(told);
})();
</script>"""


def chromium(tmp_path: Path, document: str, *options: str, query: str = "") -> subprocess.CompletedProcess[str]:
    file = tmp_path / "page.html"
    file.write_text(document, encoding="utf-8")
    command = [
        str(CHROMIUM), "--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--window-size=1280,900",
        f"--user-data-dir={tmp_path / 'profile'}", "--enable-logging=stderr", "--virtual-time-budget=6000", *options,
        f"file://{file}{query}",
    ]  # fmt: skip
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


def driven(tmp_path: Path, document: str, script: str) -> dict[str, Any]:
    """What the script noted, in a copy of the page whose policy lets it run; nothing may have failed."""
    document = re.sub(r'<meta http-equiv="Content-Security-Policy"[^>]*>', WATCH, document, count=1)
    document = document.replace("</body>", (DRIVE % script) + "</body>")
    dumped = chromium(tmp_path, document, "--dump-dom").stdout
    match = re.search(r'<pre id="outcome">(.*?)</pre>', dumped, flags=re.S)
    assert match, "the script did not come to its end"
    out: dict[str, Any] = json.loads(html.unescape(match[1]))
    assert out.pop("failed") == []
    return out


@pytest.mark.parametrize(
    ("made", "query"),
    [
        (explain_fakes.explanation, ""),
        (explain_fakes.explanation, "?theme=dark"),
        (explain_fakes.on_cpu, ""),
        (explain_fakes.hostile, ""),
        (lambda: explain_fakes.explanation(trace=None, ops=(), findings=(), ranges=()), ""),
        (lambda: explain_fakes.explanation(trace=trace_fakes.crowd(50_000), window_s=(0.0, 0.0)), ""),
    ],
    ids=["gpu", "dark", "cpu", "hostile", "bare", "crowd"],
)
def test_the_console_is_silent(tmp_path: Path, made: Any, query: str) -> None:
    """The page as written, its policy in force."""
    explanation = made()
    ran = chromium(tmp_path, explain_page.document(explanation), "--dump-dom", query=query)
    assert [line for line in ran.stderr.splitlines() if "CONSOLE" in line] == []
    assert ("data-from=" in ran.stdout) == (explanation.trace is not None), "the timeline was not drawn"
    assert ("<circle" in ran.stdout) == bool(explanation.ops)
    assert ('data-theme="dark"' in ran.stdout) == bool(query)


def test_the_watch_sees_errors(tmp_path: Path) -> None:
    document = explain_page.document(explain_fakes.explanation()).replace('"use strict";', '"use strict"; missing();')
    ran = chromium(tmp_path, document, "--dump-dom")
    assert any("CONSOLE" in line for line in ran.stderr.splitlines())  # the policy refuses a script that was changed
    with pytest.raises(AssertionError):
        driven(tmp_path, document, "")


def test_the_table_sorts_and_searches(tmp_path: Path) -> None:
    script = """
      const heads = [...document.querySelectorAll('#optable th')];
      const rows = () => [...document.querySelectorAll('#optable tbody tr')].filter((row) => !row.hidden);
      const column = (at) => rows().map((row) => row.cells[at].textContent);
      const values = (at) => rows().map((row) => Number(row.cells[at].dataset.v));
      out.before = heads[5].getAttribute('aria-sort');
      heads[3].querySelector('button').click();
      out.down = [heads[3].getAttribute('aria-sort'), heads[5].getAttribute('aria-sort'), values(3)];
      heads[3].querySelector('button').click();
      out.up = [heads[3].getAttribute('aria-sort'), values(3)];
      heads[0].querySelector('button').click();
      out.names = column(0);
      const search = document.getElementById('search');
      search.value = 'GELU model.py:40';
      send(search, Event, 'input');
      out.found = column(0);
      out.matches = document.getElementById('matches').textContent;
      search.value = 'no such op';
      send(search, Event, 'input');
      out.none = column(0).length;
      send(search, KeyboardEvent, 'keydown', { key: 'Escape' });
      out.all = column(0).length;
      out.sticky = getComputedStyle(heads[0]).position;
    """
    explanation = explain_fakes.explanation()
    out = driven(tmp_path, explain_page.document(explanation), script)
    calls = sorted(row.calls for row in explanation.ops)
    assert out["before"] == "descending"
    assert out["down"] == ["descending", "none", calls[::-1]]
    assert out["up"] == ["ascending", calls]
    assert out["names"][0] == "aten::_foreach_add_" and out["names"][-1].startswith("mylib::")
    assert sorted(out["found"]) == ["aten::gelu", "aten::gelu_backward"]
    assert out["matches"] == f"2 of {len(explanation.ops)} ops"
    assert (out["none"], out["all"], out["sticky"]) == (0, len(explanation.ops), "sticky")


def test_rows_of_equal_ops_open_sort_and_are_searched(tmp_path: Path) -> None:
    first, *rest = explain_fakes.explanation().ops
    layers = tuple(
        dataclasses.replace(first, module=f"layer.{n}", source="net.py:7", device_s=first.device_s / 24)
        for n in range(24)
    )
    script = """
      const rows = () => [...document.querySelectorAll('#optable tbody tr')];
      const seen = () => rows().filter((row) => !row.hidden).length;
      const button = document.querySelector('.open');
      out.closed = [seen(), button.getAttribute('aria-expanded')];
      button.click();
      out.opened = [seen(), button.getAttribute('aria-expanded')];
      document.querySelectorAll('#optable th')[3].querySelector('button').click();
      const group = rows().findIndex((row) => row.contains(button));
      out.follow = rows().slice(group + 1, group + 25).every((row) => row.dataset.of !== undefined);
      button.click();
      const search = document.getElementById('search');
      search.value = 'layer.17';
      send(search, Event, 'input');
      out.found = rows().filter((row) => !row.hidden).map((row) => row.cells[9].textContent);
      send(search, KeyboardEvent, 'keydown', { key: 'Escape' });
      out.again = seen();
      const card = document.querySelectorAll('.card')[1];
      const arrow = () => getComputedStyle(card.querySelector('summary'), '::before').transform;
      const closed = arrow();
      card.open = true;
      out.arrow = closed !== 'none' && closed !== arrow();
      out.cards = [...document.querySelectorAll('.card')].map((one) => one.open);
    """
    explanation = explain_fakes.explanation(ops=(*layers, *rest))
    out = driven(tmp_path, explain_page.document(explanation), script)
    alone = len(rest)
    assert out["closed"] == [alone + 1, "false"] and out["opened"] == [alone + 25, "true"]
    assert out["follow"] and out["again"] == alone + 1
    assert out["found"] == ["net.py:7, 24 modules", "net.py:7 in layer.17"]
    assert out["arrow"] and out["cards"][0] and not any(out["cards"][2:])


def test_the_timeline_opens_at_the_first_finding(tmp_path: Path) -> None:
    whole = explain_fakes.explanation()
    begin = trace_fakes.STEP_NS / 1e9
    short = dataclasses.replace(
        whole.findings[0], places=(Place(start_s=begin + 0.015, end_s=begin + 0.0152, label="here"),)
    )
    script = (
        "const at = document.getElementById('lanes').dataset; out.view = [Number(at.from), Number(at.to), at.band];"
    )
    document = explain_page.document(dataclasses.replace(whole, findings=(short, *whole.findings[1:])))
    first, last, band = driven(tmp_path, document, script)["view"]
    assert band == "0:0" and first < 15e6 < 15.2e6 < last and last - first < trace_fakes.STEP_NS / 3


def test_the_timeline_zooms_pans_and_tells(tmp_path: Path) -> None:
    script = """
      const canvas = document.getElementById('lanes');
      const view = async () => { await pause(); return [Number(canvas.dataset.from), Number(canvas.dataset.to)]; };
      const at = (x, y) => {
        const box = canvas.getBoundingClientRect();
        return { clientX: box.left + x, clientY: box.top + y, pointerId: 7 };
      };
      out.wide = canvas.clientWidth;
      out.whole = await view();
      send(canvas, WheelEvent, 'wheel', { deltaY: -200, ...at(out.wide / 4, 30) });
      out.wheel = await view();
      send(canvas, KeyboardEvent, 'keydown', { key: 'ArrowRight' });
      out.right = await view();
      send(canvas, KeyboardEvent, 'keydown', { key: '+' });
      out.plus = await view();
      send(canvas, KeyboardEvent, 'keydown', { key: '-' });
      out.minus = await view();
      send(canvas, PointerEvent, 'pointerdown', at(400, 30));
      send(canvas, PointerEvent, 'pointermove', at(300, 30));
      send(canvas, PointerEvent, 'pointerup', at(300, 30));
      out.drag = await view();
      send(canvas, PointerEvent, 'pointerdown', at(400, 30));
      send(canvas, PointerEvent, 'pointerdown', { ...at(500, 30), pointerId: 8 });
      send(canvas, PointerEvent, 'pointermove', { ...at(600, 30), pointerId: 8 });
      send(canvas, PointerEvent, 'pointerup', { ...at(600, 30), pointerId: 8 });
      send(canvas, PointerEvent, 'pointerup', at(400, 30));
      out.pinch = await view();
      send(canvas, MouseEvent, 'dblclick', at(300, 30));
      out.reset = await view();
      const tip = document.getElementById('tip'), picked = document.getElementById('picked');
      out.quiet = [tip.hidden, picked.hidden];
      send(canvas, PointerEvent, 'pointermove', at(100, 28));
      out.tip = tip.hidden ? null : tip.textContent;
      send(canvas, PointerEvent, 'pointerdown', at(100, 28));
      send(canvas, PointerEvent, 'pointerup', at(100, 28));
      out.picked = picked.hidden ? null : picked.textContent;
      send(canvas, KeyboardEvent, 'keydown', { key: 'ArrowDown', shiftKey: true });
      out.walked = picked.textContent;
      send(canvas, KeyboardEvent, 'keydown', { key: 'Escape' });
      out.dropped = picked.hidden;
      document.querySelector('[data-place="1:2"]').click();
      out.place = await view();
      out.band = canvas.dataset.band;
      out.lit = [...document.querySelectorAll('.card.lit')].map((card) => card.dataset.finding);
      out.focus = document.activeElement.id;
      document.querySelector('[data-do=reset]').click();
      out.button = await view();
    """
    explanation = explain_fakes.explanation()
    out = driven(tmp_path, explain_page.document(explanation), script)
    whole = [0, trace_fakes.STEP_NS]
    span = {name: view[1] - view[0] for name, view in out.items() if isinstance(view, list) and len(view) == 2}
    assert out["whole"] == out["reset"] == out["button"] == whole
    assert span["wheel"] < 0.6 * whole[1]
    before, after = 0.25 * whole[1], out["wheel"][0] + 0.25 * span["wheel"]
    assert after == pytest.approx(before, rel=0.01), "the time under the pointer moved"
    assert out["right"][0] > out["wheel"][0] and span["right"] == pytest.approx(span["wheel"])
    assert span["plus"] == pytest.approx(span["right"] / 2)
    assert span["minus"] == pytest.approx(span["right"])
    moved = out["drag"][0] - out["minus"][0]
    assert moved == pytest.approx(100 / out["wide"] * span["minus"], rel=0.01)
    assert span["pinch"] == pytest.approx(span["drag"] / 2, rel=0.01)
    assert out["quiet"] == [True, True]
    assert out["tip"].startswith("ProfilerStep#1\nduration: 19.9 ms")
    assert "ProfilerStep#1" in out["picked"] and "enumerate(DataLoader)" in out["walked"] and out["dropped"]
    start, end = (
        (1e9 * edge) - trace_fakes.STEP_NS
        for edge in (explanation.findings[1].places[2].start_s, explanation.findings[1].places[2].end_s)
    )
    assert out["place"][0] < start < end < out["place"][1]
    assert span["place"] < 4 * (end - start)
    assert (out["band"], out["lit"], out["focus"]) == ("1:2", ["1"], "timeline")


def test_bar_dots_and_theme_answer(tmp_path: Path) -> None:
    script = """
      const tip = document.getElementById('tip');
      const segment = document.querySelector('.seg[data-part=data]');
      segment.focus();
      out.bar = tip.textContent;
      out.lit = document.querySelector('.parts tr.lit th').textContent;
      segment.blur();
      out.hidden = tip.hidden;
      const dot = document.querySelector('.dot[tabindex="0"]');
      dot.focus();
      out.dot = tip.textContent;
      send(dot, KeyboardEvent, 'keydown', { key: 'ArrowRight' });
      out.next = tip.textContent;
      out.stops = document.querySelectorAll('.dot[tabindex="0"]').length;
      document.activeElement.blur();
      const paper = () => getComputedStyle(document.body).backgroundColor;
      const first = paper();
      document.getElementById('theme').click();
      out.themes = [document.documentElement.dataset.theme, first !== paper()];
      document.querySelector('.copy').click();
      await pause();
      out.copied = document.querySelector('.copy').textContent;
      const memory = [...document.querySelectorAll('#mem text')].map((one) => one.textContent);
      out.peak = memory.filter((words) => words.startsWith('peak'));
      const quantities = [0, 4.273e12, 1.04e-6, 999.6e9, 0.02, 1e-3, 1e-6];
      out.units = quantities.map((value) => page.text(value, value < 1 ? 's' : 'B/s'));
      out.skip = document.querySelector('a').getAttribute('href');
    """
    out = driven(tmp_path, explain_page.document(explain_fakes.explanation()), script)
    assert out["bar"] == "idle: data loading: 6.20 ms, 31 % of the step"
    assert (out["lit"], out["hidden"]) == ("idle: data loading", True)
    assert out["dot"].startswith("aten::mm 8192x4096, 4096x1024 bf16\n2.28 ms, floor 1.07 ms, 47 % of the limit")
    assert out["next"].startswith("aten::addmm") and out["stops"] == 1
    assert out["themes"][0] in ("dark", "light") and out["themes"][1]
    assert out["copied"] in ("copied", "not allowed")
    assert out["peak"] == ["peak 10.5 GB"]
    assert out["units"] == ["0 s", "4.27 TB/s", "1.04 µs", "1.00 TB/s", "20.0 ms", "1.00 ms", "1.00 µs"]
    assert out["skip"] == "#findings"


@pytest.mark.parametrize(
    ("made", "columns"),
    [
        (explain_fakes.explanation, 375),
        (explain_fakes.explanation, 768),
        (explain_fakes.explanation, 1280),
        (explain_fakes.on_cpu, 375),
        (explain_fakes.hostile, 375),
    ],
)
def test_no_page_scrolls_sideways(tmp_path: Path, made: Any, columns: int) -> None:
    """In a frame as narrow as a phone: a browser's own window is never that narrow."""
    inside = html.escape(explain_page.document(made()))
    frame = f'<iframe style="width:{columns}px;height:900px;border:0" srcdoc="{inside}"></iframe>'
    script = """
      await pause(); await pause();
      const inside = document.querySelector('iframe').contentDocument;
      out.wide = [inside.documentElement.scrollWidth, inside.documentElement.clientWidth];
      out.drawn = Number(inside.getElementById('lanes').dataset.to) > 0;
    """
    page = f"<!doctype html><html><head>{WATCH}</head><body>{frame}</body></html>"
    out = driven(tmp_path, page, script)
    assert out["wide"] == [columns, columns]
    assert out["drawn"]


def test_a_notebook_frame_draws_in_silence(tmp_path: Path) -> None:
    """Sandboxed, without an address or storage of its own."""
    page = f"<!doctype html><html><body>{explain_page.repr_html(explain_fakes.explanation())}</body></html>"
    ran = chromium(tmp_path, page, "--dump-dom")
    assert ran.returncode == 0
    assert [line for line in ran.stderr.splitlines() if "CONSOLE" in line] == []
