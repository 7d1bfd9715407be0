"""Predicted against counted, and every way in which a machine has no counters; ncu is a script of ours here."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from sublight.gpus import find
from sublight.results import Samples
from sublight.xray.counters import measure as xray
from sublight.xray.counters.ncu_csv_test import WIDE
from sublight.xray.counters.record import Counters, wanted
from sublight.xray.record import Access, AccessKind, Code, Resources, Space

RESOURCES = Resources(
    registers=32, spill_bytes=0, stack_bytes=0, static_shared_bytes=0, dynamic_shared_bytes=0, barriers=0, threads=128
)
ADD = Code(name="_add_kernel", symbol="_add_kernel", gpu=find("h200"), resources=RESOURCES, sass="", grid=(1024,))


def access(space: Space, kind: AccessKind, requests: int, **counts: Any) -> Access:
    return Access(place=None, space=space, kind=kind, bytes_per_thread=4, requests=requests, **counts)


# ------------------------------------------------------------------------------------------------ compare


def test_loads_are_summed_before_they_are_compared() -> None:
    predicted = [
        access("global", "load", 90, sectors=360, ideal_sectors=360),
        access("global", "load", 10, sectors=320, ideal_sectors=40),
        access("global", "store", 100, sectors=430, ideal_sectors=400),
    ]
    counted = Counters(kernel="k", load_requests=1000, load_sectors=6800, store_requests=1000, store_sectors=4000)
    load, store = xray.compare(predicted, counted)
    assert (load.what, load.unit, load.predicted, load.counted) == ("global load", "sectors per request", 6.8, 6.8)
    assert load.difference == pytest.approx(0) and load.is_close
    assert store.difference == pytest.approx(0.075) and store.is_close is False


def test_shared_memory_by_pass_and_by_conflict() -> None:
    predicted = [
        access("shared", "load", 10, wavefronts=320, ideal_wavefronts=10),
        access("shared", "store", 10, wavefronts=10, ideal_wavefronts=10),
    ]
    counted = Counters(
        kernel="k",
        shared_load_requests=20,
        shared_load_wavefronts=640,
        shared_load_conflicts=620,
        shared_store_requests=20,
        shared_store_wavefronts=20,
        shared_store_conflicts=0,
    )
    rows = {(row.what, row.unit): row for row in xray.compare(predicted, counted)}
    assert rows["shared load", "wavefronts per request"].counted == 32
    assert rows["shared load", "n-way conflict"].counted == 32
    assert rows["shared store", "n-way conflict"].counted == 1
    assert rows["shared, all", "n-way conflict"].counted == 660 / 40
    assert all(row.difference == 0 for row in rows.values()) and len(rows) == 5


def test_atomics_and_reductions_are_one_kind() -> None:
    counted = Counters(
        kernel="k", atomic_requests=0, atomic_sectors=0, reduction_requests=10, reduction_sectors=320, copy_sectors=80,
        copy_requests=20, cached_copy_sectors=0, cached_copy_requests=0,
    )  # fmt: skip
    predicted = [access("global", "atomic", 1, sectors=32), access("global", "async copy", 4, sectors=16)]
    assert [row.difference for row in xray.compare(predicted, counted)] == [0, 0]


def test_what_a_counter_of_loads_counts_besides_is_added_to_the_prediction() -> None:
    predicted = [
        access("global", "load", 10, sectors=40),
        access("global", "async copy", 10, sectors=160),
        access("shared", "load", 10, wavefronts=34, ideal_wavefronts=10),
        access("shared", "matrix load", 2, wavefronts=2, ideal_wavefronts=2),
    ]
    counted = Counters(
        kernel="k", load_requests=20, load_sectors=200, shared_load_wavefronts=36, shared_load_conflicts=24,
        shared_load_passes=34, shared_load_requests=10, has_matrix_loads=True,
    )  # fmt: skip
    rows = {(row.what, row.unit): row for row in xray.compare(predicted, counted)}
    assert rows["global load", "sectors per request"].predicted == 10
    assert rows["shared load", "wavefronts per request"].predicted == 3.4
    assert rows["shared load", "n-way conflict"].predicted == 3
    assert [row.difference for row in rows.values() if row.counted] == [0, 0, 0, 0]
    apart = replace(counted, load_requests=20, copy_requests=10, copy_sectors=160)
    assert {row.what: row.predicted for row in xray.compare(predicted, apart)}["global load"] == 4


def test_what_cannot_be_compared_says_why() -> None:
    counted = Counters(kernel="k", load_requests=10, load_sectors=40, store_requests=10, store_sectors=40)
    predicted = [
        access("global", "load", 10, sectors=40),
        access("global", "load", 0, unknown="the index is data"),
        access("global", "atomic", 10, sectors=40),
    ]
    load, store, atomic = xray.compare(predicted, counted)
    assert load.difference is None and load.note == "1 of 2 accesses could not be followed" and load.predicted == 4
    assert store.difference is None and store.note == "not predicted" and store.counted == 4
    assert atomic.difference is None and atomic.note == "not counted" and atomic.is_close is None


def test_bulk_copies_have_no_such_counter() -> None:
    assert xray.compare([access("global", "bulk copy", 1)], Counters(kernel="k")) == []


# ------------------------------------------------------------------------------------------------ ncu


@pytest.fixture
def ncu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A program in place of ncu: it notes its words, and writes what `said` holds (call by call) to the log file."""
    folder = tmp_path / "bin"
    folder.mkdir()
    (folder / "ncu").write_text(
        "#!/bin/sh\n"
        f'echo "$@" $LC_ALL >> {tmp_path}/words\n'
        f"calls=$(wc -l < {tmp_path}/words)\n"
        'while [ "$1" != --log-file ]; do shift; done\n'
        f'cat {tmp_path}/said$calls > "$2"; shift 2\n'
        f'echo "$@" > {tmp_path}/command\n'
    )
    (folder / "ncu").chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")
    return tmp_path


def test_counting_asks_for_every_metric_of_these_kernels(ncu: Path) -> None:
    (ncu / "said1").write_text(WIDE)
    rows = xray.count(["python", "my script.py"], ["_add_kernel", "void mine::transpose<float>(float*)"])
    assert [row.name for row in rows] == ["transpose", "_add_kernel"]
    words = (ncu / "words").read_text()
    assert "--clock-control none --csv --page raw --print-units base" in words and words.endswith("py C.UTF-8\n")
    assert "--kernel-name regex:^(_add_kernel|transpose)$" in words
    assert all(name in words for name in wanted()) and "long_scoreboard" in words
    assert (ncu / "command").read_text().strip() == "python my script.py"


def test_metrics_that_this_version_lacks_are_left_out(ncu: Path) -> None:
    (ncu / "said1").write_text("==ERROR== Failed to find metric launch__occupancy_limit_barriers\n")
    (ncu / "said2").write_text(WIDE)
    assert len(xray.count(["python"])) == 2
    first, second = (ncu / "words").read_text().splitlines()
    assert "limit_barriers" in first and "limit_barriers" not in second and "limit_warps" in second


@pytest.mark.parametrize(
    ("said", "reason"),
    [
        ("==ERROR== ERR_NVGPUCTRPERM - The user does not have permission to access counters\n", "SYS_ADMIN"),
        ("==PROF== Connected\n==WARNING== No kernels were profiled.\n", "No kernels were profiled"),
        ("==ERROR== The application returned an error code (1).\n", "counted nothing: The application returned"),
        ("", "said no why"),
    ],
)
def test_no_counters_have_a_reason(ncu: Path, said: str, reason: str) -> None:
    (ncu / "said1").write_text(said)
    with pytest.raises(xray.Unavailable, match=reason) as caught:
        xray.count(["python"])
    assert "\n" not in str(caught.value)


def test_no_ncu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(xray.shutil, "which", lambda name: None)
    with pytest.raises(xray.Unavailable, match="not on the PATH"):
        xray.count([sys.executable])


def test_counters_are_joined_by_name_and_grid() -> None:
    rows = [
        Counters(kernel="void _add_kernel(int*)", grid=(8, 1, 1)),
        Counters(kernel="_add_kernel", grid=(1024, 1, 1)),
    ]
    assert xray.counters_of(ADD, rows) is rows[1]
    assert xray.counters_of(replace(ADD, grid=()), rows) is rows[0]
    assert xray.counters_of(replace(ADD, grid=(5,)), rows) is rows[0]
    assert xray.counters_of(replace(ADD, name="_mul_kernel", symbol="_mul_kernel"), rows) is None


# ------------------------------------------------------------------------------------------------ measure


def test_without_a_gpu_everything_has_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    (row,) = xray.measure([(ADD, None)], command=["python"])
    assert row.samples is None and row.counters is None
    assert "no GPU here" in row.no_time and "--import" in row.no_counters


def test_times_and_counters_of_each_launch(ncu: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (ncu / "said1").write_text(WIDE)
    samples = Samples(times_s=(1e-6,) * 3, method="graph")
    monkeypatch.setattr(xray, "_no_gpu", lambda: "")
    monkeypatch.setattr(xray, "_timed", lambda code, function, limit: (samples, True, ""))
    other = replace(ADD, name="_mul_kernel", symbol="_mul_kernel")
    add, mul = xray.measure([(ADD, None), (other, None)], command=["python", "x.py"])
    assert add.samples is samples and add.is_cold and add.counters and add.counters.registers == 16
    assert not add.no_counters and mul.counters is None and "no launch of _mul_kernel" in mul.no_counters
    (row,) = xray.measure([(ADD, None)])
    assert row.samples is samples and row.counters is None and "--record" in row.no_counters
    monkeypatch.setattr(xray.shutil, "which", lambda name: None)
    (row,) = xray.measure([(ADD, None)], command=["python"])
    assert row.samples is samples and "not on the PATH" in row.no_counters


def test_a_launch_is_made_again_as_it_was_recorded() -> None:
    class Function:
        def __getitem__(self, grid: tuple[int, ...]) -> Any:
            return lambda **named: (grid, named)

    code = replace(ADD, constants={"BLOCK": 128}, options={"num_warps": 4, "maxnreg": None})
    assert xray.launch_of(code, Function(), {"n": 7})() == ((1024,), {"n": 7, "BLOCK": 128, "num_warps": 4})


def test_copies_keep_strides_alignment_and_sharing() -> None:
    torch = pytest.importorskip("torch")
    base = torch.arange(24.0)
    arguments = {"x": base[1:13].view(3, 4).t(), "row": base[0:4], "wide": base[:4].expand(5, 4), "n": 3}
    same, copy = xray.copies(arguments, 2)
    assert same["x"] is arguments["x"] and copy["n"] == 3
    assert torch.equal(copy["x"], arguments["x"]) and copy["x"].stride() == (1, 4) and copy["x"].storage_offset() == 1
    assert copy["x"].data_ptr() != arguments["x"].data_ptr() and copy["wide"].stride() == (0, 1)
    copy["row"][1] = -1
    assert copy["x"][0, 0] == -1 and copy["wide"][4, 1] == -1 and base[1] == 1


def test_what_cannot_be_timed_says_why() -> None:
    torch = pytest.importorskip("torch")
    assert "--record" in xray._timed(replace(ADD, grid=()), object(), 0.1)[2]
    table = torch.tensor([2**46])
    assert (
        "not go to the GPU: a tensor of its launch holds addresses"
        in xray._timed(replace(ADD, arguments={"x": table}), object(), 0.1)[2]
    )


@pytest.mark.gpu
@pytest.mark.gpu_alone
def test_a_kernel_is_timed_on_the_gpu() -> None:
    torch = pytest.importorskip("torch")
    from sublight.backend.jit import tl, triton

    @triton.jit
    def _copy_kernel(x_ptr, y_ptr, n, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
        at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        tl.store(y_ptr + at, tl.load(x_ptr + at, mask=at < n), mask=at < n)

    x = torch.randn(2**22, device="cuda")
    y = torch.empty_like(x)
    code = replace(
        ADD, name="_copy_kernel", symbol="_copy_kernel", grid=(2**12,), options={"num_warps": 4},
        arguments={"x_ptr": x, "y_ptr": y, "n": x.numel()}, constants={"BLOCK": 1024},
    )  # fmt: skip
    (row,) = xray.measure([(code, _copy_kernel)], time_limit_s=0.1)
    assert row.samples and row.is_cold and 2e-6 < row.samples.median_s < 1e-3
    assert torch.equal(x, y)


def test_arguments_go_to_the_gpu_as_they_lie() -> None:
    """Two views of one storage stay views of one; what has no data is zeros; numbers are left alone."""
    torch = pytest.importorskip("torch")
    x = torch.arange(12.0).view(3, 4)
    given = {"x": x[1:], "turned": x.t(), "none": torch.empty(2, 3, device="meta"), "n": 12, "pair": (x[0], 3)}
    placed = xray.on_gpu(given, "cpu")
    assert placed["x"].tolist() == x[1:].tolist() and placed["turned"].stride() == (1, 4) and placed["n"] == 12
    x.zero_()
    assert placed["turned"].sum() == 66, "a copy"
    placed["x"][0, 0] = 100
    assert placed["turned"][0, 1] == 100 and placed["pair"][0].tolist() == [0, 1, 2, 3] and placed["pair"][1] == 3
    assert placed["none"].tolist() == [[0.0] * 3] * 2
