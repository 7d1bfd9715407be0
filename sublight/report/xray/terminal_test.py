"""The terminal's page: the right figures beside the right words, in a wide terminal and in a narrow one."""

from __future__ import annotations

import dataclasses
import io
import re
from typing import Any

import pytest
from rich.console import Console, RenderableType

from sublight.report.xray import facts as xray_facts
from sublight.report.xray import fakes as xray_fakes
from sublight.report.xray import summary as xray_summary
from sublight.report.xray import terminal as xray
from sublight.xray.examine import Page
from sublight.xray.record import Access, Finding
from sublight.xray.roof import Bound, Roof


def drawn(shown: RenderableType, width: int = 200) -> str:
    console = Console(width=width, file=io.StringIO(), highlight=False)
    console.print(shown)
    assert isinstance(console.file, io.StringIO)
    return "\n".join(line.rstrip() for line in console.file.getvalue().splitlines())


def row(text: str, begin: str) -> list[str]:
    """The cells of the first line that begins so."""
    line = next(line for line in text.splitlines() if line.strip().startswith(begin))
    return re.split(r"\s{2,}", line.strip())


def named(name: str, gpu: str = "h200", **changed: Any) -> Page:
    return xray_fakes.page(gpu, code=xray_fakes.code(gpu, name=name), **changed)


def with_resources(page: Page, **changed: Any) -> Page:
    used = dataclasses.replace(page.code.resources, **changed)
    return dataclasses.replace(page, code=dataclasses.replace(page.code, resources=used))


WRONG = Finding(id="spill", kernel="k", place=xray_fakes.place(4), detail="8 bytes do not fit.")
TOLD = Finding(id="enough", kernel="k", place=None, detail="Enough.", is_information=True)


def test_one_kernel_has_a_column_for_each_gpu() -> None:
    text = drawn(xray.page([xray_fakes.page(), with_resources(xray_fakes.page("a100"), registers=72)]))
    assert text.startswith("_double  double.py\n  N=512 num_warps=4 grid=256x2\n")
    assert row(text, "registers a thread") == ["registers a thread", "40", "72"]
    assert row(text, "spilled") == ["spilled", "8 B", "8 B"]
    assert row(text, "shared memory a block") == ["shared memory a block", "1.5 KiB", "1.5 KiB"]
    assert row(text, "warps an SM") == ["warps an SM", "48 of 64", "48 of 64"]
    assert row(text, "limited by") == ["limited by", "registers", "registers"]
    assert row(text, "floor") == ["floor", "10.0 µs", "10.0 µs"]
    assert "kernels on" not in text  # one kernel needs no summary


def test_figures_that_say_something_only_sometimes() -> None:
    arrays = with_resources(xray_fakes.page(), spill_bytes=0, stack_bytes=256)
    assert xray_facts.facts(arrays)["stack a thread"] == "256 B" and xray_facts.facts(arrays)["spilled"] == "none"
    assert "stack a thread" not in xray_facts.facts(xray_fakes.page())  # it is what is spilled
    unknown = dataclasses.replace(xray_fakes.page(), occupancy=None, table=(), what_if=None, waves=None, in_flight=None)
    result = xray_facts.facts(with_resources(unknown, threads=None))
    assert result["threads a block"] == "?" and "occupancy" not in result
    assert "num_warps  " not in drawn(xray.page([unknown]))


def test_occupancy_by_size_marks_what_was_compiled_and_what_is_best() -> None:
    used = dataclasses.replace(xray_fakes.code().resources, dynamic_shared_bytes=0, barriers=0, threads=32)
    page = xray_fakes.page(code=xray_fakes.code(resources=used))
    text = drawn(xray.page([page]))
    assert row(text, "num_warps") == ["num_warps", "1", "2", "4", "8", "16", "32"]
    # 40 registers: 12 blocks of 4 warps fill 48 of 64 slots; of one warp 32 blocks are the most
    assert row(text, "h200 occupancy") == ["h200 occupancy", ">50 %", "*75 %", "*75 %", "*75 %", "*75 %", "50 %"]
    cuda = dataclasses.replace(page, code=dataclasses.replace(page.code, ttgir=""))
    _, sizes = (line for line in drawn(xray.page([cuda])).splitlines() if line.startswith("threads a block"))
    assert sizes.split() == ["threads", "a", "block", "32", "64", "128", "256", "512", "1024"]


def test_where_every_size_is_best_none_is_marked() -> None:
    used = dataclasses.replace(xray_fakes.code().resources, registers=64, dynamic_shared_bytes=0, barriers=0)
    text = drawn(xray.page([xray_fakes.page(code=xray_fakes.code(resources=used))]))
    assert row(text, "h200 occupancy") == ["h200 occupancy", "50 %", "50 %", ">50 %", "50 %", "50 %", "50 %"]


def test_the_roof_of_one_gpu_has_its_reasons() -> None:
    text = drawn(xray.page([xray_fakes.page()]))
    assert row(text, "floor") == ["floor", "10.0 µs", "48 MB at 4.8 TB/s"]
    assert row(text, "transactions") == ["transactions", "12.5 µs", "1.25", "60 MB in sectors"]
    assert row(text, "issue") == ["issue", "–", "how often the loop at line 10 turns is not known"]
    nothing = Roof(bounds=(Bound(name="floor", seconds=None, detail="the grid is not known: give --grid"),))
    text = drawn(xray.page([xray_fakes.page(roof=nothing)]))
    assert "no time can be told: the grid is not known: give --grid" in text and "no faster than" not in text


def test_accesses_are_by_line_and_what_is_poor_is_marked() -> None:
    text = drawn(xray.page([xray_fakes.page()]))
    assert row(text, "9  global load") == ["9", "global load", "16", "16", "16"]
    assert row(text, "11  global store") == ["11", "global store", "4", "32", "4"]
    assert row(text, "10  shared load") == ["10", "shared load", "16", "8-way"]
    assert row(text, "global load") == ["global load", "16", "its address depends on data"]
    console = Console(width=120, file=io.StringIO(), force_terminal=True, highlight=False, color_system="standard")
    console.print(xray.page([xray_fakes.page()]))
    assert isinstance(console.file, io.StringIO)
    red = re.findall(r"\x1b\[1;31m([^\x1b]*)", console.file.getvalue())
    assert [words.strip() for words in red] == ["32", "8-way", "spill"]


def test_several_accesses_of_a_line_are_one_row_and_many_rows_are_cut() -> None:
    given: dict[str, Any] = {"space": "global", "kind": "load", "bytes_per_thread": 4, "requests": 2}
    twice = [Access(place=xray_fakes.place(9), sectors=sectors, ideal_sectors=8, **given) for sectors in (8, 24)]
    (joined,) = xray_facts.joined(twice)
    assert (joined.requests, joined.sectors_per_request, xray_facts.over_ideal(joined)) == (4, 8.0, 2.0)
    many = tuple(
        Access(place=xray_fakes.place(line), sectors=8, ideal_sectors=8, **given)
        for line in range(100, 101 + xray.MOST_ACCESSES)
    )
    text = drawn(xray.page([xray_fakes.page(accesses=many)]))
    assert "1 more row: --html and --json have them all" in text
    assert text.count("global load") - text.count(" 1 global load") == xray.MOST_ACCESSES


def test_tables_that_differ_name_their_gpu() -> None:
    same = drawn(xray.page([xray_fakes.page(), xray_fakes.page("a100")]))
    assert same.count("memory access") == same.count("\ninstructions ") == 1 and "memory access," not in same
    apart = drawn(xray.page([xray_fakes.page(), xray_fakes.page("a100", accesses=xray_fakes.accesses()[:1])]))
    assert "memory access, h200" in apart and "memory access, a100" in apart


def test_findings_come_before_information_and_name_their_gpus() -> None:
    text = drawn(xray.page([xray_fakes.page(findings=(TOLD, WRONG)), xray_fakes.page("a100", findings=(TOLD,))]))
    assert "  spill  double.py:4\n    8 bytes do not fit. (h200)\n  enough\n    Enough.\n" in text
    assert "nothing to mend" not in text
    known = tuple(each for each in xray_fakes.accesses() if not each.unknown)
    fine = drawn(xray.page([xray_fakes.page(findings=(TOLD,), accesses=known)]))
    assert "  nothing to mend in the code\n  enough\n    Enough.\n  note: One note." in fine
    part = drawn(xray.page([xray_fakes.page(findings=(TOLD,))]))
    assert "nothing to mend in what could be seen" in part, "an address that depends on data"


def test_of_several_kernels_a_summary_and_what_is_to_be_mended() -> None:
    pages = [named("first", findings=(WRONG, TOLD)), named("second", findings=(), accesses=())]
    text = drawn(xray.page(pages, target="k.py"))
    lines = text.splitlines()
    assert lines[0] == "2 kernels of k.py on h200"
    assert re.split(r"\s{2,}", lines[1]) == [
        "kernel", "regs", "spilled", "shared", "occupancy", "limited by", "sectors", "conflict", "to mend",
    ]  # fmt: skip
    assert row(text, "first") == ["first", "40", "8 B", "1.5 KiB", "75 %", "registers", "8 ×", "8-way", "1"]
    assert row(text, "second") == ["second", "40", "8 B", "1.5 KiB", "75 %", "registers", "–", "–", "none"]
    unseen = dataclasses.replace(xray_fakes.accesses()[0], unknown="it depends on data")
    pages = [named("first", findings=()), named("second", findings=(), accesses=(unseen,))]
    assert row(drawn(xray.page(pages)), "second")[-1] == "–", "what was not looked at is not right for that"
    assert "  spill  double.py:4  first\n    8 bytes do not fit.\n" in text and "enough" not in text
    assert lines[-1] == "one kernel's whole page: k.py:first; all of them: --full"
    assert "registers a thread" not in text
    whole = drawn(xray.page(pages, target="k.py", full=True))
    assert whole.splitlines()[0] == lines[0] and whole.count("registers a thread") == 2 and "--full" not in whole


def test_the_summary_keeps_kernels_together_and_tells_twins_apart() -> None:
    small, large = (xray_fakes.code(name="copy", constants={"N": n, "M": 1}) for n in (512, 4096))
    other = xray_fakes.code("a100", name="copy", constants={"N": 512, "M": 1})
    views = [xray_fakes.view(code=code) for code in (small, large, other)]
    found = xray_summary.rows(views)
    assert [(each.at, each.label, each.cells["GPU"]) for each in found] == [
        (0, "copy N=512", "h200"), (2, "copy", "a100"), (1, "copy N=4096", "h200"),
    ]  # fmt: skip
    assert "GPU" in xray_summary.shown(found) and "tensor cores" not in xray_summary.shown(found)
    cores = xray_summary.rows([xray_fakes.view(tensor_core="HGMMA")])
    assert "tensor cores" in xray_summary.shown(cores) and cores[0].cells["tensor cores"] == "HGMMA"
    assert found[0].bad == {"spilled", "sectors", "conflict", "to mend"}
    fine = dataclasses.replace(small, resources=dataclasses.replace(small.resources, spill_bytes=0))
    (good,) = xray_summary.rows([xray_fakes.view(code=fine, accesses=xray_fakes.accesses()[:1], findings=(TOLD,))])
    assert good.bad == frozenset() and good.cells["sectors"] == "ideal" and good.cells["to mend"] == "none"
    # two specialisations of one kernel are whole pages, for its name was given
    pages = [xray_fakes.page(code=code) for code in (small, large)]
    assert drawn(xray.page(pages)).count("registers a thread") == 2


def test_kernels_are_grouped_over_gpus_and_never_with_others() -> None:
    codes = [xray_fakes.code(gpu, name=name) for gpu in ("h200", "a100") for name in ("a", "b")]
    assert xray_facts.same_kernels(codes) == [[0, 2], [1, 3]]
    assert xray_facts.same_kernels([codes[0], codes[3]]) == [[0], [1]]
    assert xray_facts.same_kernels([codes[0], codes[0]]) == [[0], [1]]  # two specialisations
    typed = dataclasses.replace(codes[2], signature={"x_ptr": "*bf16"})
    assert xray_facts.same_kernels([codes[0], typed]) == [[0], [1]]


@pytest.mark.parametrize("width", [60, 80, 100, 120])
def test_a_narrow_terminal_loses_columns_before_figures(width: int) -> None:
    pages = [named("_trailing_backward_kernel", gpu) for gpu in ("a100", "h200")] + [named("_row", "h200")]
    for shown in (xray.page(pages, full=True), xray.page(pages)):
        text = drawn(shown, width)
        assert max(map(len, text.splitlines())) <= width
        assert row(text, "_trailing")[1:4] == ["a100", "40", "8 B"]
        assert "75 %" in text and text.count("to mend") >= 1
    whole = drawn(xray.page(pages, full=True), width)
    assert row(whole, "11  global store")[:5] == ["11", "global store", "4", "32", "4"]
    assert row(whole, "outside loops")[1:3] == ["9", "24"]
    assert ("limited by" in whole.split("\n\n")[0]) == (width >= 120)
    assert ("_trailing_backward_kernel" in drawn(xray.page(pages), width).split("\n\n")[0]) == (width >= 100)


def test_what_a_kernel_is_called_is_no_markup() -> None:
    name = "[bold]k[/bold]"
    assert name in drawn(xray.page([named(name)]))
    assert row(drawn(xray.page([named(name), named("other")], target="[a]")), name)[0] == name
    bad = dataclasses.replace(WRONG, detail="[red]see[/red]", id="[x]")
    assert "  [x]  double.py:4\n    [red]see[/red]" in drawn(xray.page([xray_fakes.page(findings=(bad,))]))
    unknown = (dataclasses.replace(xray_fakes.accesses()[3], unknown="[b]why[/b]"),)
    assert "[b]why[/b]" in drawn(xray.page([xray_fakes.page(accesses=unknown)]))


def test_json_has_every_kernel() -> None:
    data = xray.to_json([xray_fakes.page(), xray_fakes.page("a100")])
    assert [(each["name"], each["gpu"], each["registers"]) for each in data["kernels"]] == [
        ("_double", "h200", 40), ("_double", "a100", 40),
    ]  # fmt: skip
