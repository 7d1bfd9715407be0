"""Parameters and corrections from measured rows, and how far they are off on rows that were held out.

Half of the rows, drawn by a fixed seed, fit the parameters of `analytic` and a grid of corrections (`table`); the other
half gives the errors. The tables that are kept are of all rows.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Any

from sublight import cost
from sublight.cost.attention import attended
from sublight.predict import analytic, expected, table
from sublight.predict.analytic import Heads, Rates
from sublight.predict.machine import Machine

POLISH, NUDGE, LEAST_OFF = 40, 1e-3, 0.003  # steps, a parameter's change to see its effect, errors that are none
RIDGE, SMOOTH, ROBUST = 0.01, 0.05, 0.05
SEED = 1
VIEWER_H100 = 3072 * 10**9  # bytes/s of its memory, by LLM-Viewer
PLAIN_BYTES = 4 << 20
MOST_ROWS = 400  # that a fit looks at
STAY = 0.005  # weight of a parameter's way from its start, for one op's own
MOST_ERROR = 0.9  # that is said of an op: more means that nothing is known
LEAST_HELD = 6  # rows of one op that were held out, for an error of its own
LEAST_OF_ONE_OP = 3  # rows of a memory-bound op, for parameters of its own
HEAVY = ("matmul", "linear", "attention", "paged_attention")  # ops that have tables of their own kind
LEAST_ROWS = 40  # of one kind, for a table of a run's own GPU
START = {
    "product": {
        **{"launch_s": 2.2e-6, "cold_s": 8e-7, "prologue_s": 1e-7, "store_s": 5e-7, "least": 4096.0, "split": 2.0},
        **{"split_s": 2.3e-6, "stream": 0.87, "sm_share": 2.0, "blend": 3.4},
    },
    "prefill attention": {
        **{"launch_s": 5.3e-6, "cold_s": 1.7e-6, "prologue_s": 5e-7, "rate": 0.95, "score_s": 6e-11, "overlap": 3.0},
        **{"tail": 0.6, "stream": 0.9, "blend": 2.0, "packs": 1.0},
    },
    "decode attention": {
        **{"launch_s": 4.5e-6, "cold_s": 1.8e-6, "walk_s": 3.9e-6, "walk_elements": 34000.0, "wave_s": 1.9e-6},
        **{"wave_walk_s": 3e-7, "write_s": 4e-11, "rate": 0.5, "rows": 16.0, "stream": 0.92, "blend": 1.7},
    },
    "stream": {
        **{"launch_s": 2e-6, "cold_s": 5e-7, "stream": 0.88, "sm_share": 1.5, "blend": 4.0},
        **{"long": 0.8, "long_backward": 0.6, "odd": 0.4, "odd_most": 0.4, "ramp_s": 1e-6, "ramp": 2.0},
    },
}
CHOICES = {"packs": (1.0, 0.0)}  # parameters that are one thing or another: the fit tries each
START["product fp8"] = START["product"] | {"launch_s": 1e-5}  # with two launches that round its input
SORTING = {  # of a memory-bound op that sorts
    **{"sort_s": 9e-6, "sort_power": 0.5, "sort_odd": 1.6, "sort_odd_power": 0.2, "sort_next": 0.5, "odd_s": 3e-6},
}
JOINING = {"join_s": 3e-6, "ramp_s": 4e-6, "ramp": 3.0}  # of one that adds up rows in one launch, or with a second
MOST = {
    "stream": 1.0,
    "rate": 1.0,
    "rows": 128.0,
    "blend": 12.0,
    "overlap": 12.0,
    "sm_share": 3.0,
    "tail": 1.0,
    "long": 1.0,
    "long_backward": 1.0,
    "odd": 1.0,
    "odd_most": 1.0,
    "sort_next": 1.0,
}


def steps(first: int, last: int, step: int) -> list[float]:
    return [float(value) for value in range(first, last + step, step)]


_HEAD_DIM = [6.0, 7.0, 8.0]
AXES = {  # of the tables, in log2 of `expected`'s sizes
    **{kind: [steps(0, 16, 2), steps(5, 17, 2), steps(5, 17, 2)] for kind in ("product", "product fp8")},
    "prefill attention": [steps(0, 12, 2), steps(4, 16, 2), [0.0, 3.0, 6.0], _HEAD_DIM],
    "decode attention": [steps(0, 12, 2), steps(0, 18, 2), [0.0, 3.0, 6.0], _HEAD_DIM],
    "memory-bound op": [steps(13, 31, 2), steps(6, 17, 1), [0.0, 1.0, 4.0]],
}


@dataclass(frozen=True, slots=True)
class Row:
    """One measured case: its sizes, its seconds, and what the models say of it."""

    sizes: tuple[float, ...]
    seconds: float
    model: Callable[[dict[str, float]], float]
    roofline_s: float
    viewer_s: float
    is_plain: bool = True  # of a memory-bound op: large, in rows that stay on the chip and are aligned
    own_start: Mapping[str, float] = field(default_factory=dict)  # of parameters that few memory-bound ops have


def rates(gpu: Machine) -> Rates:
    return expected.rates_of(gpu, "bfloat16")


def roofline(gpu: Machine, flops: float, moved: float) -> float:
    return max(flops / gpu.peak("bfloat16"), moved / (gpu.gpu.memory_bytes_per_s or 1.0))


def viewer(gpu: Machine, flops: float, moved: float) -> float:
    """LLM-Viewer's formula (hahnyuan/LLM-Viewer at 472f71f): a roofline with its own figure of the H100's memory."""
    bandwidth = VIEWER_H100 if gpu.key == "h100" else gpu.gpu.memory_bytes_per_s or 1.0
    return max(flops / gpu.peak("bfloat16"), moved / bandwidth)


def product_row(
    gpu: Machine, m: int, n: int, k: int, seconds: float, cold: float = 1.0, figures: Rates | None = None
) -> Row:
    spent = cost.find("matmul")({"m": m, "n": n, "k": k}, "bfloat16", "fwd")
    figures = figures or rates(gpu)
    return Row(
        (m, n, k),
        seconds,
        lambda fitted: analytic.product_s(m, n, k, 1, spent.bytes, figures, fitted, cold),
        roofline(gpu, spent.total_flops, spent.bytes),
        viewer(gpu, spent.total_flops, spent.bytes),
    )


def attention_row(gpu: Machine, row: dict[str, str], cold: float = 1.0) -> Row:
    names = ("batch", "q_len", "kv_len", "heads", "kv_heads", "head_dim")
    batch, queries, keys, heads, kv_heads, head_dim = (int(row[name]) for name in names)
    shape = Heads(batch=batch, queries=queries, keys=keys, heads=heads, kv_heads=kv_heads, head_dim=head_dim)
    sizes = dict(zip(names, (batch, queries, keys, heads, kv_heads, head_dim), strict=True)) | {"causal": 1}
    spent = cost.find("attention")(sizes, "bfloat16", "fwd")
    written = 8 * batch * queries * kv_heads * head_dim + 8 * batch * queries  # k and v read and written, and slots
    figures, is_decode = rates(gpu), row["phase"] == "generation"
    moved = spent.bytes + written
    pairs = batch * heads * queries * keys  # LLM-Viewer counts the whole square, and five operations of a softmax
    viewer_bytes = 2 * (batch * heads * queries * head_dim + 2 * batch * keys * heads * head_dim)
    viewer_bytes += 4 * batch * heads * queries * keys if is_decode else 4 * batch * heads * queries * head_dim
    assert attended(queries, keys, causal=True, bottom_right=True) <= queries * keys
    return Row(
        expected.sizes_of(shape),
        float(row["us"]) * 1e-6,
        (lambda fitted: analytic.decode_s(shape, moved, figures, fitted, cold))
        if is_decode
        else (lambda fitted: analytic.prefill_s(shape, moved, figures, fitted, cold=cold)),
        roofline(gpu, spent.total_flops, spent.bytes),
        viewer(gpu, 4.0 * pairs * head_dim + 5.0 * pairs, viewer_bytes),
    )


def fit(rows: Sequence[Row], start: dict[str, float], stay: float = 0.0) -> dict[str, float]:
    """The best of every choice that a parameter may be (`CHOICES`), the others fitted to each."""
    names = [name for name in CHOICES if name in start]
    starts = [start | dict(zip(names, chosen, strict=True)) for chosen in product(*(CHOICES[name] for name in names))]
    every = [descent(rows, each, stay) for each in starts]
    return min(every, key=lambda fitted: errors([row.model(fitted) for row in rows], rows)[0]) if names else every[0]


def descent(rows: Sequence[Row], start: dict[str, float], stay: float) -> dict[str, float]:
    """Descent on the mean |log error|: each parameter up and down by a step that shrinks, then all of them together
    (`polished`), since one may stand in for a part of another.

    `stay` weighs how far a parameter goes from its start: few rows say nothing of some, and noise must not move them.
    """
    rows = rows[:MOST_ROWS]

    def loss(fitted: dict[str, float]) -> float:
        if any(value > MOST.get(name, math.inf) for name, value in fitted.items()):
            return math.inf
        away = stay * sum(abs(math.log(fitted[name] / start[name])) for name in _free(fitted)) if stay else 0.0
        return away + statistics.fmean(abs(math.log(row.model(fitted) / row.seconds)) for row in rows)

    best, least, step = dict(start), loss(start), 0.2
    while step > 0.01:
        before = least
        for name in _free(best):
            for factor in (1 + step, 1 / (1 + step)):
                trial = {**best, name: best[name] * factor}
                if (found := loss(trial)) < least:
                    best, least = trial, found
                    break
        if least > before - 1e-4:
            step /= 2
    return {name: float(f"{value:.4g}") for name, value in polished(rows, best, loss).items()}


def _free(fitted: dict[str, float]) -> list[str]:
    return [name for name in fitted if name not in CHOICES]


def polished(
    rows: Sequence[Row], start: dict[str, float], loss: Callable[[dict[str, float]], float]
) -> dict[str, float]:
    """Gauss and Newton's steps in the logarithms of all parameters, rows weighted so that absolute errors count."""
    import numpy as np

    def logs(fitted: dict[str, float]) -> Any:
        return np.array([math.log(row.model(fitted) / row.seconds) for row in rows])

    best, least, damping = dict(start), loss(start), 1e-2
    names = _free(best)
    for _ in range(POLISH):
        off = logs(best)
        slopes = np.stack([(logs({**best, name: best[name] * (1 + NUDGE)}) - off) / NUDGE for name in names], axis=1)
        weighted = slopes.T / np.maximum(np.abs(off), LEAST_OFF)
        normal = weighted @ slopes
        normal += damping * np.diag(np.diag(normal) + 1e-9)
        step = np.clip(-np.linalg.solve(normal, weighted @ off), -1.0, 1.0)
        trial = best | {name: best[name] * math.exp(along) for name, along in zip(names, step, strict=True)}
        if (found := loss(trial)) < least:
            best, least, damping = trial, found, damping / 4
        elif (damping := damping * 8) > 1e3:
            break
    return best


def grid(rows: Sequence[Row], base: Sequence[float], axes: Sequence[Sequence[float]]) -> list[float]:
    """Node values whose interpolation is nearest to log(measured / analytic): least absolute error, smooth, near 0."""
    import numpy as np

    counts = [len(axis) for axis in axes]
    nodes = math.prod(counts)
    weights = np.zeros((len(rows), nodes))
    for place, row in enumerate(rows):
        for index, weight in table.corners(axes, [math.log2(size) for size in row.sizes]):
            weights[place, index] += weight
    target = np.array([math.log(row.seconds / seconds) for row, seconds in zip(rows, base, strict=True)])
    penalty = RIDGE * np.eye(nodes)
    places = np.arange(nodes).reshape(counts)
    for axis in range(len(counts)):
        left, right = np.take(places, range(counts[axis] - 1), axis), np.take(places, range(1, counts[axis]), axis)
        for one, other in zip(left.ravel(), right.ravel(), strict=True):
            penalty[[one, other], [one, other]] += SMOOTH
            penalty[[one, other], [other, one]] -= SMOOTH
    importance = np.ones(len(rows))
    for _ in range(6):
        weighted = weights * importance[:, None]
        found = np.linalg.solve(weighted.T @ weights + penalty, weighted.T @ target)
        importance = ROBUST / np.maximum(np.abs(target - weights @ found), 0.02)
    return [round(float(value), 4) for value in found]


def errors(predicted: Iterable[float], rows: Sequence[Row]) -> tuple[float, float]:
    """Median and 90th percentile of |predicted / measured - 1|."""
    found = sorted(abs(seconds / row.seconds - 1) for seconds, row in zip(predicted, rows, strict=True))
    return round(statistics.median(found), 4), round(found[math.ceil(0.9 * len(found)) - 1], 4)


def corrected(rows: Sequence[Row], base: Sequence[float], axes: Any, values: Sequence[float]) -> list[float]:
    logs = [table.interpolate(axes, values, [math.log2(size) for size in row.sizes]) for row in rows]
    return [seconds * math.exp(log) for seconds, log in zip(base, logs, strict=True)]


def halves(rows: Sequence[Any]) -> tuple[list[Any], list[Any]]:
    import numpy as np

    order = np.random.default_rng(SEED).permutation(len(rows))
    return [rows[place] for place in order[::2]], [rows[place] for place in order[1::2]]


def checked(
    kind: str, here: Machine, rows: list[Row], source: str
) -> tuple[dict[str, float], dict[str, Any], dict[str, Any]]:
    """Parameters, the table of all rows, and the errors on the half that neither saw."""
    axes = AXES[kind]
    known, held = halves(rows)
    fitted = fit(known, START[kind])
    base = {id(row): row.model(fitted) for row in rows}
    known_base, held_base = [base[id(row)] for row in known], [base[id(row)] for row in held]
    values = grid(known, known_base, axes)
    table_error = errors(corrected(held, held_base, axes, values), held)
    check = {
        "what": f"{kind}, {here.key}",
        "rows": len(held),
        "table": table_error,
        "analytic": errors(held_base, held),
        "roofline": errors([row.roofline_s for row in held], held),
        "viewer": errors([row.viewer_s for row in held], held),
    }
    made = {
        "gpu": here.key,
        "architecture": here.gpu.architecture or "",
        "kind": kind,
        "axes": axes,
        "values": grid(rows, [base[id(row)] for row in rows], axes),
        "median_error": table_error[0],
        "p90_error": table_error[1],
        "rows": len(rows),
        "source": source,
    }
    return fitted, made, check


def cold_of(row: dict[str, Any], gpu: Machine) -> float:
    """What of a row's inputs the L2 had lost: buffers were used in turn, `buffer_sets` of them."""
    return (
        analytic.cold_share(row["bytes"] * row["buffer_sets"], gpu.gpu.l2_bytes or 1) if "buffer_sets" in row else 1.0
    )


def rows_of_run(here: Machine, cases: Iterable[dict[str, Any]], least: int = LEAST_ROWS) -> dict[str, list[Row]]:
    """Products and attention of a run, by the kind of table that they make; kinds with too few rows make none."""
    found: dict[str, list[Row]] = {"product": [], "prefill attention": [], "decode attention": []}
    for row in cases:
        shape = row["shape"]
        if row["op"] in ("matmul", "linear") and row["direction"] == "fwd":
            sizes = shape["m"], shape["n"], shape["k"]
            found["product"].append(product_row(here, *sizes, row["median_s"], cold_of(row, here)))
        if row["op"] in ("attention", "paged_attention") and row["direction"] == "fwd" and shape.get("causal", 1):
            phase = "generation" if shape["q_len"] == 1 else "context"
            words = {name: str(size) for name, size in shape.items()} | {"phase": phase}
            kind = "decode attention" if phase == "generation" else "prefill attention"
            found[kind].append(attention_row(here, words | {"us": str(row["median_s"] * 1e6)}, cold_of(row, here)))
    return {kind: rows for kind, rows in found.items() if len(rows) >= least}


def stream_row(gpu: Machine, row: dict[str, Any]) -> Row:
    moved, rate = row["bytes"], gpu.gpu.memory_bytes_per_s or 1.0
    rows, figures, cold = (
        expected.rows_of(row["op"], row["shape"], row["direction"]),
        expected.rates_of(gpu),
        cold_of(row, gpu),
    )
    launches = cost.find(row["op"])(row["shape"], "bfloat16", row["direction"]).launches
    return Row(
        expected.stream_sizes(moved, rows),
        row["median_s"],
        lambda fitted: analytic.stream_s(moved, launches, figures, fitted, rows, cold),
        moved / rate,
        moved / rate,
        is_plain=moved >= PLAIN_BYTES and rows.is_plain,
        own_start=SORTING if rows.sorted else JOINING if rows.sums == "alone" else {},
    )


def of_one_op(rows: list[Row], fitted: dict[str, float], axes: Any) -> tuple[dict[str, float], list[float]]:
    """One op's own parameters, where it has enough rows, and the correction that is left."""
    start = {**fitted, **dict(pair for row in rows for pair in row.own_start.items())}
    own = fit(rows, start, STAY) if len(rows) >= LEAST_OF_ONE_OP else start
    return own, grid(rows, [row.model(own) for row in rows], axes) if rows else [0.0] * math.prod(map(len, axes))


def _errors_of(kind: str, predicted: list[tuple[str, float, Row]]) -> dict[str, float]:
    """The errors on this op's held-out rows; on all ops' where it has few."""
    own = [(seconds, row) for name, seconds, row in predicted if name == kind]
    if len(own) < LEAST_HELD:
        own = [(seconds, row) for _, seconds, row in predicted]
    median, most = errors([seconds for seconds, _ in own], [row for _, row in own])
    return {"median_error": median, "p90_error": min(most, MOST_ERROR)}


def streams(
    here: Machine, cases: Iterable[dict[str, Any]], source: str
) -> tuple[dict[str, float], list[dict[str, Any]], list[dict[str, Any]]]:
    """One small table an op and direction; the parameters are of all of them together. Errors of all rows, and of those
    that are long enough to be bound by memory, with rows that stay on the chip and are aligned."""
    axes = AXES["memory-bound op"]
    light = [row for row in cases if row.get("bytes") and row.get("bound") in ("memory", "launch")]
    light = [row for row in light if row["op"] not in HEAVY]
    rows = [(f"stream {row['op']} {row['direction']}", stream_row(here, row)) for row in light]
    known, held = halves(rows)
    fitted = fit([row for _, row in known], START["stream"])
    predicted: list[tuple[str, float, Row]] = []
    made: list[dict[str, Any]] = []
    for kind in sorted({name for name, _ in rows}):
        of_kind, out, every = ([row for name, row in part if name == kind] for part in (known, held, rows))
        own, values = of_one_op(of_kind, fitted, axes)
        times = corrected(out, [row.model(own) for row in out], axes, values)
        predicted += [(kind, seconds, row) for seconds, row in zip(times, out, strict=True)]
        own, values = of_one_op(every, fitted, axes)
        made.append(
            {
                "gpu": here.key,
                "architecture": here.gpu.architecture or "",
                "kind": kind,
                "axes": axes,
                "values": values,
                "rows": len(every),
                "source": source,
                "parameters": own,
            }
        )
    made = [row | _errors_of(row["kind"], predicted) for row in made]
    every = [row for _, row in held]
    plain = [row for row in every if row.is_plain]
    of_row = {id(row): seconds for _, seconds, row in predicted}
    checks = [
        {
            "what": f"{words}, {here.key}",
            "rows": len(rest),
            "table": errors([of_row[id(row)] for row in rest], rest),
            "analytic": errors([row.model(fitted) for row in rest], rest),
            "roofline": errors([row.roofline_s for row in rest], rest),
            "viewer": errors([row.viewer_s for row in rest], rest),
        }
        for words, rest in (("memory-bound ops", every), ("of these, 4 MB and more in plain rows", plain))
        if rest
    ]
    return fitted, made, checks
