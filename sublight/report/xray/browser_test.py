"""The panes in a real browser: lines light what comes from them, both ways, and the console stays empty."""

from __future__ import annotations

from pathlib import Path

import pytest

from sublight.report.explain.browser_test import CHROMIUM, chromium, driven
from sublight.report.xray import fakes as xray_fakes
from sublight.report.xray import page as xray_page

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no chromium to open the page in (Debian: chromium)")


def test_a_hostile_kernel_leaves_the_console_silent(tmp_path: Path) -> None:
    """The page as written, its policy in force."""
    document = xray_page.document([xray_fakes.hostile(), xray_fakes.view("a100")])
    ran = chromium(tmp_path, document, "--dump-dom", query="?theme=dark&line=4")
    assert [line for line in ran.stderr.splitlines() if "CONSOLE" in line] == []
    assert 'data-theme="dark"' in ran.stdout and 'class="l lit"' in ran.stdout


def test_lines_light_what_comes_from_them(tmp_path: Path) -> None:
    script = """
      const view = () => document.querySelector('article:not([hidden])');
      const number = (row) => row.firstChild.textContent;
      const lit = (pane, kind = 'lit') => [...view().querySelectorAll(`.p-${pane} .${kind}`)].map(number);
      const line = (n) => view().querySelector(`.p-source [data-n="${n}"]`);
      const sass = (n) => [...view().querySelectorAll('.p-sass .l')].find((row) => number(row) === n);
      const press = (key) => send(document.body, KeyboardEvent, 'keydown', { key });
      send(line(10), PointerEvent, 'pointerover', { pointerType: 'mouse' });
      out.over = [lit('source', 'over'), lit('sass', 'over'), lit('sass')];
      out.told = view().querySelector('.now').textContent;
      line(4).click();
      out.held = [lit('source'), lit('sass'), lit('ttgir')];
      line(4).click();
      out.gone = lit('sass');
      sass('0060').click();
      out.back = [lit('source'), lit('sass'), lit('ttgir'), lit('ptx').length];
      press('Escape');
      press('j');
      out.first = lit('source');
      press('j'); press('j');
      out.third = lit('source');
      press('2');
      const toggle = view().querySelector('[data-toggle=ttgir]');
      out.hidden = [view().querySelector('.p-ttgir').hidden, toggle.getAttribute('aria-pressed')];
      const box = view().querySelector('.tools input');
      box.value = 'fadd';
      send(box, Event, 'input');
      out.found = [lit('sass', 'hit'), lit('sass', 'hit-now'), view().querySelector('.matches').textContent];
      send(box, KeyboardEvent, 'keydown', { key: 'Enter' });
      out.next = lit('sass', 'hit-now');
      document.querySelector('[data-pick="1"]').click();
      out.second = [view().id, lit('source'), lit('sass'), view().querySelector('.p-ttgir').hidden];
      document.querySelector('.findings a[data-line="4"]').click();
      out.link = [view().id, lit('source')];
      const elsewhere = document.querySelector('.findings a[data-line]');
      elsewhere.dataset.line = 6;
      elsewhere.click();
      out.empty = [lit('source'), lit('sass')];
    """
    document = xray_page.document([xray_fakes.view(), xray_fakes.view("a100")])
    out = driven(tmp_path, document, script)
    assert out["over"] == [["10"], ["0030", "0040", "0050"], []]
    assert out["told"] == "double.py:10 · through standard.py:314, standard.py:287 · 6 TTGIR · 3 PTX · 3 SASS"
    assert out["held"] == [["4"], ["0050", "0060", "0070"], ["14", "15"]]
    assert out["gone"] == []
    assert out["back"] == [["4", "11"], ["0060", "0070"], ["15"], 1]  # PTX has no such chain: what line 4 made there
    assert out["first"] == ["7"] and out["third"] == ["9"]
    assert out["hidden"] == [True, "false"]
    assert out["found"] == [["0030", "0050"], ["0030"], "1 of 2 rows"] and out["next"] == ["0050"]
    assert out["second"] == ["kernel-1", ["9"], ["0020"], True]  # what was held and hidden stays so
    assert out["empty"] == [["6"], []]  # a line that no instruction comes from
    assert out["link"] == ["kernel-0", ["4"]]


def test_the_sheet_of_the_kernel_that_is_picked_shows(tmp_path: Path) -> None:
    other = xray_fakes.view(code=xray_fakes.code(name="_other"))
    script = """
      const shown = () => [...document.querySelectorAll('.sheet')].map((one) => one.hidden ? 0 : one.clientHeight > 0);
      const on = () => [...document.querySelectorAll('.summary tr.on')].map((one) => one.dataset.k);
      out.first = [shown(), on()];
      document.querySelector('.summary tr[data-k="1"] td:last-child').click();
      out.second = [shown(), on(), document.querySelector('article:not([hidden])').id];
    """
    out = driven(tmp_path, xray_page.document([xray_fakes.view(), other]), script)
    assert out["first"] == [[True, 0], ["0"]]
    assert out["second"] == [[0, True], ["1"], "kernel-1"]


def test_times_and_tables_keep_to_their_columns(tmp_path: Path) -> None:
    """Bars have a width, and nothing hangs over what stands beside it."""
    script = """
      const box = (one) => one.getBoundingClientRect();
      const bars = [...document.querySelectorAll('.roof .bar-of')];
      out.wide = Math.max(...bars.map((one) => box(one).width)) > 60;
      out.inside = [...document.querySelectorAll('.part')].map((part) =>
        [...part.querySelectorAll('dd *, .loop *')].every((one) => box(one).right <= box(part).right + 1));
    """
    out = driven(tmp_path, xray_page.document([xray_fakes.view()]), script)
    assert out["wide"] and out["inside"] == [True] * 4


def test_the_other_panes_scroll_to_what_is_held(tmp_path: Path) -> None:
    nops = "".join(f"        /*{address:04x}*/ NOP ;\n" for address in range(0x1000, 0x4000, 16))
    begins = '\t//## File "/home/me/double.py", line 9\n'
    code = xray_fakes.code(sass=xray_fakes.SASS.replace(begins, nops + begins))
    script = """
      const body = document.querySelector('.p-sass .body');
      out.before = body.scrollTop;
      document.querySelector('[data-n="9"]').click();
      const row = document.querySelector('.p-sass .lit');
      out.inside = row.offsetTop > body.scrollTop && row.offsetTop < body.scrollTop + body.clientHeight;
      out.after = body.scrollTop;
      out.ticks = document.querySelectorAll('.p-sass .map i').length;
      const shown = [...document.querySelectorAll('.pane')];
      out.fits = document.documentElement.scrollWidth <= innerWidth && shown.every((pane) => pane.clientWidth > 200);
    """
    out = driven(tmp_path, xray_page.document([xray_fakes.view(code=code)]), script)
    assert out["before"] == 0 and out["after"] > 5000
    assert out["inside"] and out["fits"] and out["ticks"] == 1
