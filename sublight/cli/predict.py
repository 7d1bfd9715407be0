"""What `sublight predict` does: steps with their floors, plans for many GPUs, a trace elsewhere, a calibration."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from sublight.cli import output
from sublight.cli.predict_words import (
    Request,
    check_parallel,
    contexts_of,
    machines_of,
    modes_of,
    numbers,
    precision_of,
    price_of,
    seconds,
    steps_of,
)
from sublight.errors import BadInput
from sublight.predict import config, estimate, plan, precisions
from sublight.predict.estimate import Prediction
from sublight.predict.model import Model
from sublight.predict.plan import Plan
from sublight.predict.step import Precision
from sublight.results import write_file

MOST_ROWS = 2000  # rows of one answer: GPUs x batches x contexts x steps
MOST_GPUS = 4096  # the most that a plan may spread over
MOST_GRIDS = 4  # GPUs whose grid the page shows
OPTIONS = {
    "model": "the model",
    "gpus": "--gpu",
    "changes": "--what-if",
    "trace": "--from",
    "batches": "--batch",
    "contexts": "--context",
    "modes": "--mode",
    "parallel": "--tp, --pp, --dp or --ep",
    "overlap": "--no-overlap",
}
CALIBRATES = "--calibrate measures this machine's GPU, and predicts nothing yet"
OF_GPUS = ("trace", "gpus", "changes", "json")  # options that also apply to a recorded trace


def command(request: Request) -> None:
    written = (request.html, request.csv, request.json, request.calibrate)
    output.check_named(html=request.html, csv=request.csv, calibrate=request.calibrate)
    output.check_writable(*written)
    output.check_apart(written, [request.model, request.trace, *request.gpus])
    if request.calibrate:
        others = [field.name for field in fields(Request) if field.name not in ("calibrate", "gpus", "json")]
        refuse(replace(request, gpus=()) if list(request.gpus) == ["h100"] else request, CALIBRATES, [*others, "gpus"])
        return calibrate(request)
    if request.model and request.trace:
        raise BadInput(f"name a model or a trace, not both: leave out {request.model} or --from {request.trace}")
    if not request.model and not request.trace:
        return show_models(request)
    if request.trace:
        refuse(
            request, "--from takes GPUs alone", [field.name for field in fields(Request) if field.name not in OF_GPUS]
        )
        return show_elsewhere(request)
    if request.plan is not None or request.latency:
        refuse(
            request, "--plan gives one table and tries every split", ["census", "precisions", "csv", "html", "parallel"]
        )
        return show_plans(request)
    show_steps(request)


def refuse(request: Request, why: str, names: Sequence[str]) -> None:
    """Refuse options that the answer would ignore."""
    plain = Request()
    flags = [OPTIONS.get(name, f"--{name}") for name in names if _given(request, name) != _given(plain, name)]
    if flags:
        raise BadInput(f"{why}: leave out {', '.join(flags)}")


def _given(request: Request, name: str) -> Any:
    """An option's value; an empty text or list counts as not given (None), a 0 as given."""
    value = getattr(request, name)
    return value if isinstance(value, int) else value or None


def calibrate(request: Request) -> None:
    """Measure this machine's GPU into a file that --gpu takes."""
    from sublight.predict import calibrate as measuring
    from sublight.report.draw import console
    from sublight.report.predict import calibration
    from sublight.results import write_json

    path = Path(request.calibrate)
    if path.suffix != ".json":
        raise BadInput(f"--calibrate {path}: name a .json file, as in --calibrate mine.json")
    with console.progress("calibrate") as progress:
        document = measuring.run(path.stem, progress=progress).to_json()
    write_json(document, path)
    output.show(calibration.page(document, str(path)), document, request.json)


def show_models(request: Request) -> None:
    """List the known models, where none was named."""
    from sublight.report.predict import models

    of_step = [field.name for field in fields(Request) if field.name not in ("gpus", "json")]
    refuse(request, "no model is named, as in `sublight predict llama-3-8b`", of_step)
    document = models.to_json()
    output.show(models.page(document), document, request.json)


def show_steps(request: Request) -> None:
    from sublight.report.predict import data, terminal

    model, precision, predictions = answer(request)
    document = data.to_json(model, precision, predictions, in_every_precision(request, predictions))
    refuse_misfit(document)
    if request.html:
        write_html(document, predictions, request.html)
    if request.csv:
        write_file(data.to_csv(predictions, ops=request.census), Path(request.csv))
    output.show(terminal.page(document, census=request.census), document, request.json)


def answer(request: Request) -> tuple[Model, Precision, tuple[Prediction, ...]]:
    model, precision = config.load(request.model), precision_of(request)
    check_parallel(model, request.parallel)
    price = price_of(request.price)
    machines, steps = machines_of(request), steps_of(request, model, precision)
    if len(machines) * len(steps) > MOST_ROWS:
        raise BadInput(f"{len(machines) * len(steps)} predictions are too many: at most {MOST_ROWS} at once")
    return model, precision, estimate.side_by_side(model, machines, steps, price_per_hour=price)


def refuse_misfit(document: dict[str, Any]) -> None:
    """Where the only step asked for does not fit into memory, saying so is the answer."""
    from sublight.report.predict.terminal import misfit

    rows = document["predictions"]
    if len(rows) == 1 and not rows[0]["fits"] and not document["precisions"]:
        raise BadInput(" ".join([f"{misfit(rows[0])}.", *document["model"]["notes"]]).removesuffix("."))


def in_every_precision(request: Request, predictions: Sequence[Prediction]) -> tuple[Prediction, ...]:
    """The steps in other data types, for --precisions: the first of each kind, on the same GPUs."""
    if not request.precisions:
        return ()
    if request.weights or request.dtype:
        raise BadInput("--precisions shows every data type: leave out --dtype and --weights")
    if all(each.step.trains for each in predictions):
        raise BadInput("--precisions compares inference, not training: add --mode decode, or leave --mode out")
    machines = {each.machine.label: each.machine for each in predictions}
    steps = list(dict.fromkeys(each.step for each in predictions))
    return precisions.side_by_side(
        predictions[0].model, list(machines.values()), steps, price_per_hour=predictions[0].price_per_hour
    )


def write_html(document: dict[str, Any], predictions: Sequence[Prediction], path: str) -> None:
    """Write the page, with grids over batch and context of the first GPUs, for each step but training."""
    from sublight.predict import grid
    from sublight.report.predict import page

    likes = {(each.machine.label, each.step.mode): each for each in reversed(predictions) if not each.step.trains}
    machines = list(dict.fromkeys(each.machine.label for each in predictions))[:MOST_GRIDS]
    grids = [
        grid.grid(each.model, each.machine, each.step)
        for (label, _), each in reversed(likes.items())
        if label in machines
    ]
    write_file(page.html(document, predictions, grids), Path(path))


def show_plans(request: Request) -> None:
    from sublight.report.predict import plans

    target_s, ways = best_plans(request)
    document = plans.to_json(ways, target_s)
    output.show(plans.page(document), document, request.json)


def best_plans(request: Request) -> tuple[float | None, tuple[Plan, ...]]:
    """The latency to hold, in seconds, and the plans for one GPU, one step and one context, best first."""
    model, precision, gpus = config.load(request.model), precision_of(request), request.plan
    if gpus is None:
        raise BadInput(f"--latency {request.latency} needs --plan N, of how many GPUs")
    if not 1 <= gpus <= MOST_GPUS:
        raise BadInput(f"--plan {gpus}: give how many GPUs, from 1 to {MOST_GPUS}")
    machines, modes = machines_of(request), modes_of(model, request.modes or ["decode"] * model.generates)
    contexts, batches = contexts_of(model, request.contexts), numbers(request.batches, "batch")
    for what, several in (("GPU", machines), ("mode", modes), ("context", contexts), ("batch", batches)):
        if len(several) > 1:
            raise BadInput(f"--plan takes one {what}, not {len(several)}")
    target_s = seconds(request.latency, "latency") if request.latency else None
    like = replace(steps_of(request, model, precision)[0], mode=modes[0])
    batch, price = batches[0] if batches else None, price_of(request.price)
    plans = plan.plans(model, machines[0], like, gpus, latency_s=target_s, batch=batch, price_per_hour=price)
    if not plans:
        lower = "--checkpointing or --lora 16" if like.trains else "--weights int4"
        raise BadInput(f"{model.name} does not fit on {gpus} {machines[0].gpu.name}: take more GPUs, or {lower}")
    return target_s, plans


def show_elsewhere(request: Request) -> None:
    """Show a recorded step on each GPU."""
    from sublight.diagnose import elsewhere
    from sublight.report.predict import elsewhere as report
    from sublight.trace import load

    machines, path = machines_of(request), Path(request.trace)
    if not path.exists():
        raise BadInput(f"there is no file {path}: give a trace, as torch.profiler or nsys writes it")
    traces = load.load(path)
    document = report.to_json([elsewhere.elsewhere(traces, here, source=path.name) for here in machines])
    output.show(report.page(document), document, request.json)
