"""The flame graph in a real browser: zoom, search, order, threads and differences; the console stays empty."""

from __future__ import annotations

from pathlib import Path

import pytest

from sublight.pyprof.fakes import hostile, sampled, traced
from sublight.report.explain.browser_test import CHROMIUM, chromium, driven
from sublight.report.pyprof import page

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no chromium to open the page in (Debian: chromium)")
NAMES = """
  const blocks = () => [...document.querySelectorAll('#graph button')];
  const names = () => blocks().map((block) => block.textContent);
  const width = (name) => parseFloat(blocks().find((block) => block.textContent === name)?.style.width ?? '0');
  const press = (name) => blocks().find((block) => block.textContent === name).click();
  const order = (name) => document.querySelector(`[data-order=${name}]`).click();
"""


def test_a_hostile_profile_leaves_the_console_silent(tmp_path: Path) -> None:
    ran = chromium(tmp_path, page.document(hostile()), "--dump-dom", query="?theme=dark")
    assert [line for line in ran.stderr.splitlines() if "CONSOLE" in line] == []
    assert 'data-theme="dark"' in ran.stdout and "data-node=" in ran.stdout and "<img" not in ran.stdout


def test_zoom_search_and_order(tmp_path: Path) -> None:
    script = (
        NAMES
        + """
      out.heavy = names(); out.hot = width('hot');
      press('cold'); out.zoomed = names(); out.cold = width('cold');
      out.told = document.getElementById('picked').textContent;
      document.getElementById('out').click(); out.back = names();
      order('time'); out.time = blocks().map((b) => [b.textContent, parseFloat(b.style.left)]);
      press('hot'); out.timeZoomed = width('hot');
      send(document.body, KeyboardEvent, 'keydown', { key: 'Escape' }); out.timeBack = width('hot');
      order('heavy');
      const search = document.getElementById('search');
      search.value = 'HOT'; search.dispatchEvent(new Event('input'));
      out.hits = blocks().filter((b) => b.className === 'hit').map((b) => b.textContent);
      out.matches = document.getElementById('matches').textContent;
      search.value = ''; search.dispatchEvent(new Event('input'));
      const choice = document.getElementById('thread');
      choice.value = '1'; choice.dispatchEvent(new Event('change')); out.worker = names();
    """
    )
    out = driven(tmp_path, page.document(sampled()), script)
    assert out["heavy"] == ["all", "<module>", "hot", "cold", "Condition.wait"] and out["hot"] == pytest.approx(60)
    assert sorted(out["zoomed"]) == ["<module>", "all", "cold"] and out["cold"] == pytest.approx(100)
    assert "cold" in out["told"] and "20.0 ms" in out["told"] and out["back"] == out["heavy"]
    assert [name for name, _ in sorted(out["time"][1:], key=lambda one: one[1])] == ["hot", "cold", "Condition.wait"]
    assert out["timeZoomed"] == pytest.approx(100) and out["timeBack"] == pytest.approx(60)
    assert out["hits"] == ["hot"] and out["matches"] == "1 function, 60 % of the time"
    assert out["worker"] == ["all"], "idle time of other threads has no width"


def test_calls_and_differences(tmp_path: Path) -> None:
    out = driven(tmp_path, page.document(traced()), NAMES + "out.names = names(); out.fib = width('fib');")
    assert out["names"] == ["all", "<module>", "fib", "fib", "builtins.len"] and out["fib"] == pytest.approx(80)
    script = (
        NAMES
        + """
      out.names = names(); press('hot'); out.told = document.getElementById('picked').textContent;
      out.orders = document.querySelectorAll('[data-order]').length;
    """
    )
    out = driven(tmp_path, page.document(sampled(slower=2.0), before=sampled()), script)
    assert "hot" in out["names"] and "60.0 ms before, 120 ms after" in out["told"] and out["orders"] == 1
