"""Records survive JSON unchanged, floors follow from the limits, and a file is written whole or not at all."""

from __future__ import annotations

import dataclasses
import itertools
import json
from dataclasses import replace
from typing import Any

import pytest

from sublight.cost import Cost
from sublight.errors import BadInput
from sublight.results import Limit, Limits, Result, Run, Samples, compare

WRITE, COPY, TRIAD, READ, NODE, VECTOR = 3.0e9, 4.0e9, 4.2e9, 5.0e9, 1e-6, 6e10
FULL = Limit(
    name="hbm_copy",
    unit="B/s",
    value=COPY,
    spec=4.8e9,
    verdict="normal",
    unavailable="never both, but every field must travel",
    spread=1e7,
    n=12,
    detail={"curve": [[1, 4, 2.5e9]], "knee": {"programs": 132}},
)
ROW = Result(
    op="softmax",
    direction="fwd",
    shape={"rows": 4096, "cols": 1024},
    dtype="bfloat16",
    provider="sublight",
    ours=True,
    kernel="_tile_kernel",
    median_s=20e-6,
    floor_s=15e-6,
    bound="memory",
    spread_s=0.1e-6,
    n=10,
    method="graph",
    cache="cold",
    clock_mhz=1980,
    energy_j=0.01,
    call_s=9e-6,
    error=1.25,
    bytes=16_777_216,
    flops=2.5e7,
    note="power cap",
    unavailable="as above",
    commit="0f2c",
)


def limits(kind: str = "cuda", **rates: float) -> Limits:
    return Limits(
        device="NVIDIA H200",
        kind=kind,  # type: ignore[arg-type]
        uuid="GPU-1",
        driver="570.86",
        date="2026-01-02T03:04:05+0000",
        source="cached",
        limits=tuple(Limit(name=name, unit="B/s", value=value) for name, value in rates.items()),
    )


MEASURED = limits(hbm_write=WRITE, hbm_copy=COPY, hbm_triad=TRIAD, hbm_read=READ)
RUN = Run(
    gpu="h200",
    driver="570.86",
    torch="2.11.0",
    triton="3.6.0",
    commit="abc-dirty",
    date="2026-01-02T03:04:05+0000",
    limits=dataclasses.replace(MEASURED, limits=(FULL, Limit(name="peer_copy", unit="B/s", unavailable="one GPU"))),
    rows=(ROW, Result(op="add", direction="fwd", shape={"numel": 3}, dtype="float32", provider="torch")),
    unwell=("throttled (hardware thermal) to 900 MHz",),
)


def through_json(data: Any) -> Any:
    return json.loads(json.dumps(data, allow_nan=False))


# ------------------------------------------------------------------------------------------------ JSON


@pytest.mark.parametrize("record", [FULL, ROW, RUN, RUN.limits], ids=lambda record: type(record).__name__)
def test_the_examples_leave_no_field_at_its_default(record: Any) -> None:
    """Else a round trip that forgets a field would pass."""
    for field in dataclasses.fields(record):
        assert getattr(record, field.name) not in (field.default, ()), field.name


def test_limits_come_back_as_they_went() -> None:
    assert Limits.from_json(through_json(RUN.limits.to_json())) == RUN.limits


def test_limits_have_the_keys_that_were_promised() -> None:
    data = through_json(RUN.limits.to_json())
    assert data["device"] == "NVIDIA H200"
    row, missing = data["limits"]
    promised = {
        "name": "hbm_copy",
        "value": COPY,
        "unit": "B/s",
        "spec": 4.8e9,
        "fraction_of_spec": COPY / 4.8e9,
        "verdict": "normal",
    }
    assert {key: row[key] for key in promised} == promised
    assert missing["unavailable"] == "one GPU"
    assert [missing[key] for key in ("value", "spec", "fraction_of_spec")] == [None, None, None]


def test_a_run_comes_back_as_it_went() -> None:
    assert Run.from_json(through_json(RUN.to_json())) == RUN
    well = replace(RUN, unwell=())
    assert Run.from_json(through_json(well.to_json())) == well


def test_a_run_has_the_keys_that_were_promised() -> None:
    data = through_json(RUN.to_json())
    assert set(data) == {"gpu", "driver", "torch", "triton", "commit", "date", "unwell", "limits", "rows"}
    row = data["rows"][0]
    required = {"op", "direction", "shape", "dtype", "provider", "ours", "kernel", "median_s", "floor_s", "fraction"}
    assert required | {"spread_s", "n", "clock_mhz", "energy_j"} <= set(row)
    assert row["shape"] == {"rows": 4096, "cols": 1024}
    assert row["ours"] is True
    assert row["fraction"] == pytest.approx(0.75)
    assert {"ours", "bytes"} <= set(data["rows"][1]), "what is false or zero is still said"
    assert "median_s" not in data["rows"][1], "what is not known is left out"


# ------------------------------------------------------------------------------------------------ samples


def test_median_and_spread() -> None:
    samples = Samples(times_s=(5.0, 1.0, 2.0, 4.0, 3.0, 100.0, 6.0), method="wall")
    assert (samples.n, samples.median_s) == (7, 4.0)
    assert samples.spread_s == pytest.approx((6.0 - 2.0) / 2)
    assert Samples(times_s=(1.0,), method="wall").spread_s == 0


@pytest.mark.parametrize(("value", "spec", "fraction"), [(3.0, 4.0, 0.75), (None, 4.0, None), (3.0, None, None)])
def test_fraction_of_spec(value: float | None, spec: float | None, fraction: float | None) -> None:
    assert Limit(name="x", unit="", value=value, spec=spec).fraction_of_spec == fraction


# ------------------------------------------------------------------------------------------------ rates and floors


@pytest.mark.parametrize(
    ("read", "write", "rate"),
    [(0, 7, WRITE), (7, 7, COPY), (1 << 30, 1 << 30, COPY), (14, 7, TRIAD), (2 << 30, 1 << 30, TRIAD), (7, 0, READ)],
)
def test_what_was_measured_is_what_is_used(read: int, write: int, rate: float) -> None:
    assert MEASURED.memory_rate(read, write) == pytest.approx(rate, rel=1e-14)


def test_between_measurements_time_per_byte_is_interpolated() -> None:
    quarter = MEASURED.memory_rate(1, 3)
    assert quarter == pytest.approx(2 / (1 / WRITE + 1 / COPY))
    rates = [MEASURED.memory_rate(read, 1000 - read) for read in range(1001)]
    assert all(low < high for low, high in itertools.pairwise(rates))


def test_the_nearest_measurement_stands_in_for_a_missing_one() -> None:
    copy_only = limits(hbm_copy=COPY)
    for mix in ((1, 0), (0, 1), (1, 1), (2, 1)):
        assert copy_only.memory_rate(*mix) == pytest.approx(COPY)
    no_triad = limits(hbm_copy=COPY, hbm_read=READ)
    assert no_triad.memory_rate(2, 1) == pytest.approx(1 / (2 / 3 / COPY + 1 / 3 / READ))
    assert no_triad.memory_rate(0, 1) == pytest.approx(COPY)


def test_no_rate_where_nothing_is_known_or_moved() -> None:
    assert limits().memory_rate(1, 1) is None
    assert limits(host_copy=COPY).memory_rate(1, 1) is None, "the host's memory is not the GPU's"
    assert limits("cpu", host_copy=COPY).memory_rate(1, 1) == pytest.approx(COPY)
    assert MEASURED.memory_rate(0, 0) is None


@pytest.mark.parametrize(
    ("cost", "seconds", "bound"),
    [
        (Cost(read_bytes=4 * 10**6, write_bytes=4 * 10**6, flops={"vector_fp32": 6e5}), 8e6 / COPY, "memory"),
        (Cost(read_bytes=100, write_bytes=100, flops={"vector_fp32": 6.0}), NODE, "launch"),
        (Cost(read_bytes=100, write_bytes=100, launches=3), 3 * NODE, "launch"),
        (Cost(read_bytes=100, write_bytes=100, flops={"vector_fp32": 6e10, "matmul_bf16": 1e30}), 1.0, "vector_fp32"),
        (Cost(read_bytes=0, write_bytes=10**8, from_host_bytes=10**8), 1.0, "h2d_pinned"),
        (Cost(read_bytes=10**8, write_bytes=0, to_host_bytes=10**8), 2.0, "d2h_pinned"),
        (Cost(read_bytes=10**8, write_bytes=10**8, link_bytes=10**8), 0.5, "peer_copy"),
    ],
)
def test_the_floor_is_the_largest_and_names_its_bound(cost: Cost, seconds: float, bound: str) -> None:
    transfers = {"h2d_pinned": 1e8, "d2h_pinned": 5e7, "peer_copy": 2e8}
    floor = limits(hbm_copy=COPY, launch_graph_node=NODE, launch_eager=1.0, vector_fp32=VECTOR, **transfers).floor(cost)
    assert floor is not None
    assert (floor.seconds, floor.bound) == (pytest.approx(seconds), bound)


def test_links_are_as_fast_as_all_of_them_together() -> None:
    one_of_seven = Limit(name="peer_copy", unit="B/s", value=48e9, spec=448e9)
    mesh = Limits(device="a mesh of GPUs", kind="cuda", limits=(one_of_seven,))
    assert mesh.link_rate() == 448e9
    assert limits(hbm_copy=COPY).link_rate() is None
    assert limits(hbm_copy=1e12).floor(Cost(read_bytes=0, write_bytes=0, link_bytes=10**9)) is None


def test_a_cpu_has_its_own_launch() -> None:
    floor = limits("cpu", host_copy=COPY, launch_eager=2.0, launch_graph_node=9.0).floor(
        Cost(read_bytes=1, write_bytes=1)
    )
    assert floor is not None
    assert (floor.seconds, floor.bound) == (2.0, "launch")


def test_no_floor_where_no_limit_is_known() -> None:
    assert limits(matmul_bf16=1.0).floor(Cost(read_bytes=1, write_bytes=1, flops={"vector_fp32": 1.0})) is None


@pytest.mark.parametrize(
    ("median", "floor", "fraction"), [(4.0, 3.0, 0.75), (None, 3.0, None), (4.0, None, None), (0.0, 3.0, None)]
)
def test_fraction_of_the_limit(median: float | None, floor: float | None, fraction: float | None) -> None:
    assert dataclasses.replace(ROW, median_s=median, floor_s=floor).fraction == fraction


# ------------------------------------------------------------------------------------------------ compare


def timed(seconds: float | None, spread: float | None = 0.0, provider: str = "torch") -> Result:
    return dataclasses.replace(ROW, provider=provider, median_s=seconds, spread_s=spread)


@pytest.mark.parametrize(
    ("before", "after", "verdict"),
    [
        (timed(1.0), timed(1.019), "same"),
        (timed(1.0), timed(1.021), "slower"),
        (timed(1.0), timed(0.981), "same"),
        (timed(1.0), timed(0.979), "faster"),
        (timed(1.0, None), timed(1.021, None), "slower"),
        (timed(1.0, 0.01), timed(1.03, 0.0), "same"),  # 4 × 1 % of noise
        (timed(1.0, 0.0), timed(1.03, 0.0103), "same"),  # in either run
        (timed(1.0, 0.01), timed(1.05, 0.0), "slower"),
        (timed(1.0, 0.01), timed(1.05, 0.0105), "same"),  # 4 × √2 %
        (timed(1.0, 0.01), timed(1.06, 0.0106), "slower"),
    ],
)
def test_a_change_counts_beyond_the_noise(before: Result, after: Result, verdict: str) -> None:
    (change,) = compare([before], [after])
    assert change.verdict == verdict
    assert change.ratio == pytest.approx((after.median_s or 0) / 1.0)
    assert change.key == before.key


def test_only_rows_of_both_runs_are_compared() -> None:
    before = [timed(1.0, provider="torch"), timed(1.0, provider="liger"), timed(None, provider="quack")]
    after = [timed(2.0, provider="quack"), timed(3.0, provider="torch"), timed(None, provider="liger")]
    assert [(change.key[-1], change.ratio) for change in compare(before, after)] == [("torch", 3.0)]


@pytest.mark.parametrize(
    "other",
    [{"op": "add"}, {"direction": "bwd"}, {"shape": {"rows": 1, "cols": 1}}, {"dtype": "float32"}, {"provider": "x"}],
    ids=str,
)
def test_rows_of_different_cases_are_not_compared(other: dict[str, Any]) -> None:
    assert compare([ROW], [dataclasses.replace(ROW, **other)]) == []


def test_a_newer_run_renews_its_own_rows_and_each_keeps_its_commit() -> None:
    row = replace(ROW, commit="")
    other = replace(row, provider="torch")
    run = replace(RUN, gpu="h200", commit="old", rows=(row, other))
    newer = replace(run, commit="new", rows=(replace(row, median_s=1e-6),))
    merged = run.merged(newer)
    assert [(row.key, row.commit) for row in merged.rows] == [(row.key, "new"), (other.key, "old")]
    assert merged.rows[0].median_s == 1e-6 and merged.commit == "new"
    assert [row.commit for row in merged.merged(replace(newer, commit="newest")).rows] == ["newest", "old"]
    with pytest.raises(BadInput, match="results of h200, those of h100"):
        run.merged(replace(newer, gpu="h100"))
