"""Predictions as plain data: JSON, and rows of a CSV file. The terminal and the page print these same figures."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from typing import Any

from sublight.predict import model as models
from sublight.predict import precisions
from sublight.predict.estimate import Prediction, TimedOperation
from sublight.predict.model import Model
from sublight.predict.step import Precision


def of_model(model: Model, precision: Precision) -> dict[str, Any]:
    from sublight.cost.dtypes import find_dtype

    return {
        "name": model.name,
        "source": model.source,
        "family": model.family,
        "parameters": models.parameters(model),
        "active_parameters": models.parameters(model, active=True),
        "layers": model.layers,
        "cache_bytes_per_token": models.cache_bytes(model, 1, 1, find_dtype(precision.cache).bits),
        "notes": notes_of(model, find_dtype(precision.weights).bits),
    }


def notes_of(model: Model, weight_bits: int) -> list[str]:
    """Notes on what is counted differently from the model's config."""
    notes = []
    if model.is_part:
        notes.append("Of a larger model, its text part alone is counted (text_config).")
    if model.family == "convolution":
        notes.append(f"Its images are {model.image} x {model.image}.")
    if weight_bits < 16 and model.family != "convolution":
        notes.append(f"Its layers' weights have {weight_bits} bits; what lies before and behind them stays in 16.")
    if model.stored and weight_bits >= 16:
        notes.append(
            f"Its weights are published as {model.stored}, and counted here in {weight_bits} bits: "
            "--weights fp8 or int4 counts them in 8 or 4."
        )
    return notes


def of_operation(op: TimedOperation, total_s: float) -> dict[str, Any]:
    """An op as plain data: times for all its runs, FLOPs and bytes for one."""
    operation = op.operation
    return {
        "name": operation.name,
        "op": operation.op,
        "direction": operation.direction,
        "shape": dict(operation.shape),
        "dtype": operation.dtype,
        "count": op.runs,
        "flops": operation.cost.total_flops,
        "bytes": operation.cost.bytes,
        "intensity": operation.intensity,
        "bound": op.bound,
        "floor_s": op.floor_s,
        "expected_s": op.expected_s,
        "hidden_s": op.hidden_s,
        "share": op.expected_s / total_s if total_s else 0.0,
        "how": op.timed.how,
        "error": op.timed.error,
    }


def of_prediction(found: Prediction) -> dict[str, Any]:
    """A prediction as plain data; a step that does not fit has its memory and what would fit, but no time."""
    step = found.step
    head = {
        "gpu": found.machine.key,
        "gpu_name": found.machine.gpu.name,
        "what_if": dict(found.machine.factors),
        "gpus": found.gpus,
        "parallel": step.parallel.text,
        "mode": step.mode,
        "batch": step.batch,
        "context": step.context,
        "fits": found.fits,
        "largest_batch": found.largest_batch,
        "memory_bytes": {**found.memory.kinds(), "total": found.memory.total, "room": int(found.room_bytes)},
    }
    if not found.fits:
        return head
    return head | {
        "expected_s": found.expected_s,
        "floor_s": found.floor_s,
        "hidden_s": found.hidden_s,
        "clock_share": found.clock_share,
        "error": found.error,
        "how": dict(found.how),
        "bound": found.bottleneck,
        "bounds": dict(found.bounds),
        "tokens_per_s": found.tokens_per_s,
        "mfu": found.mfu,
        "joules_per_token": found.joules_per_token,
        "price_per_million_tokens": found.price_per_million,
        "ops": [of_operation(op, found.expected_s) for op in found.ops],
    }


def of_precision(precision: Precision) -> dict[str, Any]:
    """The data types as plain data, with how much they raised the measured model's perplexity."""
    types = {name: getattr(precision, name) for name in ("products", "weights", "cache")}
    measured = precisions.rise(precision.products, precision.weights)
    rise = {"least": measured.least, "most": measured.most} if measured else None
    return types | {"perplexity_rise": rise, "perplexity_of": precisions.source()}


def to_json(
    model: Model, precision: Precision, predictions: Sequence[Prediction], beside: Sequence[Prediction] = ()
) -> dict[str, Any]:
    """The whole JSON; `beside`: the same steps in other data types."""
    return {
        "model": of_model(model, precision),
        "precision": of_precision(precision),
        "predictions": [of_prediction(prediction) for prediction in predictions],
        "precisions": [
            {name: value for name, value in of_prediction(each).items() if name != "ops"}
            | {"precision": of_precision(each.step.precision)}
            for each in beside
        ],
    }


_FLAT = (
    *("gpu", "gpus", "parallel", "mode", "batch", "context", "fits", "largest_batch", "expected_s", "error", "how"),
    *("floor_s", "bound", "tokens_per_s", "mfu", "joules_per_token", "price_per_million_tokens"),
)
_KINDS = ("weights", "cache", "activations", "gradients", "optimizer", "total", "room")


def to_csv(predictions: Sequence[Prediction], *, ops: bool = False) -> str:
    """CSV with a line for each prediction; with `ops` a line for each of its ops."""
    lines: list[Mapping[str, Any]] = []
    for prediction in predictions:
        data = of_prediction(prediction)
        if ops:
            step = {name: data[name] for name in ("gpu", "parallel", "mode", "batch", "context")}
            lines += [step | {**op, "shape": _shape(op["shape"])} for op in data.get("ops", ())]
        else:
            held = {f"{kind}_bytes": data["memory_bytes"].get(kind, 0) for kind in _KINDS}
            flat = data | ({"how": _ways(data["how"])} if data["fits"] else {})
            lines.append({name: flat.get(name) for name in _FLAT} | held)
    out = io.StringIO()
    if lines:
        writer = csv.DictWriter(out, fieldnames=list(lines[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(lines)
    return out.getvalue()


def _ways(shares: Mapping[str, float]) -> str:
    """Of the time, by how it is known: 0.9 measured, 0.1 analytic."""
    return ", ".join(f"{share:.3g} {way}" for way, share in sorted(shares.items(), key=lambda pair: -pair[1]))


def _shape(shape: Mapping[str, int]) -> str:
    return " ".join(f"{name}={size}" for name, size in shape.items())
