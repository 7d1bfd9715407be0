"""What `sublight predict` is asked, taken apart: the model, GPUs, steps and data types, and where the answer goes."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace
from itertools import product
from pathlib import Path
from typing import Any

from sublight.cli import output
from sublight.cost.dtypes import find_dtype, is_floating, parse_dtype
from sublight.errors import BadInput, one_of
from sublight.predict import config, estimate, machine, plan, precisions
from sublight.predict.estimate import Prediction
from sublight.predict.machine import Machine
from sublight.predict.model import Model
from sublight.predict.plan import Plan
from sublight.predict.step import ONE_GPU, Mode, Parallel, Precision, Step
from sublight.results import write_file
from sublight.units import parse_quantity

MOST_ROWS = 2000  # GPUs x batches x contexts x steps
MOST_GPUS = 4096  # of a plan
MOST_GRIDS = 4  # GPUs whose grid the page shows
MOST = {"batch": 1 << 20, "context": 1 << 27}
PRODUCTS = ("bfloat16", "float16", "float32", "float8_e4m3fn", "int8", "float4_e2m1fn")
STORED = (*PRODUCTS, "int4")


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """The command's words."""

    model: str = ""
    trace: str = ""
    calibrate: str = ""
    gpus: Sequence[str] = ()
    batches: Sequence[str] = ()
    contexts: Sequence[str] = ()
    modes: Sequence[str] = ()
    dtype: str = ""
    weights: str = ""
    cache: str = ""
    optimizer: str = ""
    checkpointing: bool = False
    eager: bool = False
    lora: int = 0
    price: str = ""
    changes: Sequence[str] = ()
    network: str = ""
    parallel: Parallel = ONE_GPU
    overlap: bool = True
    plan: int = 0
    latency: str = ""
    census: bool = False
    precisions: bool = False
    html: str = ""
    csv: str = ""
    json: str = ""


OPTIONS = {
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
OF_GPUS = ("trace", "gpus", "changes", "json")  # what a trace needs to know


def command(request: Request) -> None:
    written = (request.html, request.csv, request.json, request.calibrate)
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
    if request.plan or request.latency:
        refuse(
            request, "--plan gives one table and tries every split", ["census", "precisions", "csv", "html", "parallel"]
        )
        return show_plans(request)
    show_steps(request)


def refuse(request: Request, why: str, names: Sequence[str]) -> None:
    """Options that the answer would ignore."""
    plain = Request()
    given = [
        OPTIONS.get(name, f"--{name}")
        for name in names
        if (getattr(request, name) or None) != (getattr(plain, name) or None)
    ]
    if given:
        raise BadInput(f"{why}: leave out {', '.join(given)}")


def calibrate(request: Request) -> None:
    """This machine's GPU, into a file that --gpu takes."""
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
    """Nothing was named: what could be."""
    from sublight.report.predict import models

    of_step = [field.name for field in fields(Request) if field.name not in ("gpus", "json")]
    refuse(request, "no model is named, as in `sublight predict llama-3-8b`", of_step)
    document = models.to_json()
    output.show(models.page(document), document, request.json)


def show_steps(request: Request) -> None:
    from sublight.report.predict import data, terminal

    model, precision, found = answer(request)
    document = data.to_json(model, precision, found, in_every_precision(request, found))
    refuse_misfit(document)
    if request.html:
        write_html(document, found, request.html)
    if request.csv:
        write_file(data.to_csv(found, ops=request.census), Path(request.csv))
    output.show(terminal.page(document, census=request.census), document, request.json)


def in_every_precision(request: Request, found: Sequence[Prediction]) -> tuple[Prediction, ...]:
    """With --precisions: the first step of each kind, on the same GPUs."""
    if not request.precisions:
        return ()
    if request.weights or request.dtype:
        raise BadInput("--precisions shows every data type: leave out --dtype and --weights")
    if all(each.step.trains for each in found):
        raise BadInput("--precisions compares inference, not training: add --mode decode, or leave --mode out")
    machines = {each.machine.label: each.machine for each in found}
    steps = list(dict.fromkeys(each.step for each in found))
    return precisions.side_by_side(
        found[0].model, list(machines.values()), steps, price_per_hour=found[0].price_per_hour
    )


def numbers(words: Iterable[str], what: str) -> list[int]:
    """1,8,64 or 4k as whole numbers above 0."""
    found = []
    for word in words:
        try:
            number = parse_quantity(word)
        except ValueError:
            raise BadInput(f"--{what} {word}: give whole numbers, as in --{what} 1,8,64") from None
        if not 0 < number <= MOST[what]:
            raise BadInput(f"--{what} {word}: it must be from 1 to {MOST[what]}")
        found.append(number)
    return found


def precision_of(request: Request) -> Precision:
    """What is not said follows from the rest: fp8 products have fp8 weights and bf16 activations."""
    products = parse_dtype(request.dtype or "bf16", PRODUCTS)
    weights = parse_dtype(request.weights, STORED) if request.weights else products
    activations = products if find_dtype(products).bits >= 16 and is_floating(products) else "bfloat16"
    cache = parse_dtype(request.cache, STORED) if request.cache else activations
    wide = weights if find_dtype(weights).bits >= 16 else activations
    state = parse_dtype(request.optimizer, ("float32", "bfloat16", "float16")) if request.optimizer else "float32"
    return Precision(
        products=products, activations=activations, weights=weights, cache=cache, gradients=wide, optimizer=state
    )


def price_of(words: str) -> float | None:
    if not words:
        return None
    try:
        price = float(words.removeprefix("$"))
    except ValueError:
        price = -1.0
    if not 0 < price < math.inf:
        raise BadInput(f"--price {words}: give the price of a GPU's hour, as in --price 2.50")
    return price


def modes_of(model: Model, words: Sequence[str]) -> tuple[Mode, ...]:
    possible = estimate.modes_of(model)
    wanted: list[Mode] = []
    for word in words:
        if word not in possible and word in ("prefill", "decode", "forward", "train"):
            raise BadInput(f"{model.name} has no {word} step: use {' or '.join(possible)}")
        one_of("mode", word, possible)
        wanted += [mode for mode in possible if mode == word]
    return tuple(dict.fromkeys(wanted)) or possible


def contexts_of(model: Model, words: Sequence[str]) -> list[int]:
    """An image has as many tokens as patches; a sequence must not be longer than a learned table of positions."""
    if not model.generates and model.family != "encoder":
        if words:
            raise BadInput(f"{model.name} takes images: leave --context out, it has {model.tokens or 1} tokens")
        return [model.tokens or 1]
    found = numbers(words, "context") or [min(4096, model.longest or 4096)]
    if model.positions and max(found) > model.positions:
        raise BadInput(f"{model.name} has {model.positions} positions: --context {max(found)} is longer than that")
    return found


def check_parallel(model: Model, parallel: Parallel) -> None:
    sizes = {"--tp": parallel.tensor, "--pp": parallel.pipeline, "--dp": parallel.data, "--ep": parallel.expert}
    if low := next((name for name, size in sizes.items() if size < 1), ""):
        raise BadInput(f"{low} {sizes[low]}: give how many GPUs, 1 or more")
    if model.family == "convolution" and max(parallel.tensor, parallel.pipeline, parallel.expert) > 1:
        raise BadInput(f"{model.name} is cut by --dp only")
    if parallel.tensor > 1 and model.heads % parallel.tensor:
        raise BadInput(f"--tp {parallel.tensor} does not divide the {model.heads} heads of {model.name}")
    if parallel.pipeline > max(model.layers, 1):
        raise BadInput(f"--pp {parallel.pipeline} is more than the {model.layers} layers of {model.name}")
    experts = next((block.experts for block in model.blocks if block.experts), None)
    if parallel.expert > 1 and experts is None:
        raise BadInput(f"{model.name} has no experts: leave --ep out")
    if experts and experts.count % parallel.expert:
        raise BadInput(f"--ep {parallel.expert} does not divide the {experts.count} experts of {model.name}")
    if parallel.expert > 1 and parallel.expert not in (parallel.tensor, parallel.tensor * parallel.data):
        given = f"--ep {parallel.expert} with --tp {parallel.tensor} --dp {parallel.data}"
        raise BadInput(f"{given}: experts are spread over the tp GPUs, or over all tp x dp of them")


def machines_of(request: Request) -> list[Machine]:
    """Each GPU, and behind it the same with each --what-if."""
    factors = [machine.parse_changes([part.strip() for part in word.split(",")]) for word in request.changes]
    rate = network(request.network)
    found = []
    for name in dict.fromkeys(request.gpus):
        here = replace(machine.find(name), network_bytes_per_s=rate)
        found += [here, *(machine.change(here, each) for each in factors)]
    return found


def _trainable(modes: tuple[Mode, ...], request: Request, precision: Precision) -> tuple[Mode, ...]:
    """Weights of fewer than 16 bits are not trained; adapters beside them are."""
    if "train" not in modes or request.lora or find_dtype(precision.weights).bits >= 16:
        return modes
    if "train" in request.modes:
        raise BadInput(
            f"weights of {find_dtype(precision.weights).bits} bits are not trained: add --weights bf16, or --lora 16"
        )
    return tuple(mode for mode in modes if mode != "train")


def steps_of(request: Request, model: Model, precision: Precision) -> list[Step]:
    replicas = request.parallel.data
    batches = numbers(request.batches, "batch") or [replicas]
    if min(batches) < replicas:
        raise BadInput(
            f"--batch {min(batches)} leaves some of --dp {replicas} GPUs without a sequence: give {replicas} or more"
        )
    contexts = contexts_of(model, request.contexts)
    modes = _trainable(modes_of(model, request.modes), request, precision)
    if request.lora < 0:
        raise BadInput(f"--lora {request.lora}: give the adapters' rank, as in --lora 16")
    if request.lora and model.family == "convolution":
        raise BadInput(f"{model.name} has no products that --lora adapts: leave it out")
    return [
        Step(
            mode=mode,
            batch=batch,
            context=context,
            precision=precision,
            checkpointing=request.checkpointing,
            lora=request.lora or None,
            eager=request.eager,
            parallel=request.parallel,
            overlap=request.overlap,
        )
        for mode, batch, context in product(modes, batches, contexts)
    ]


def answer(request: Request) -> tuple[Model, Precision, tuple[Prediction, ...]]:
    model, precision = config.load(request.model), precision_of(request)
    check_parallel(model, request.parallel)
    price = price_of(request.price)
    machines, steps = machines_of(request), steps_of(request, model, precision)
    if len(machines) * len(steps) > MOST_ROWS:
        raise BadInput(f"{len(machines) * len(steps)} predictions are too many: at most {MOST_ROWS} at once")
    return model, precision, estimate.side_by_side(model, machines, steps, price_per_hour=price)


def show_plans(request: Request) -> None:
    from sublight.report.predict import plans

    target_s, found = best_plans(request)
    document = plans.to_json(found, target_s)
    output.show(plans.page(document), document, request.json)


def show_elsewhere(request: Request) -> None:
    """A recorded step on each GPU."""
    from sublight.diagnose import elsewhere
    from sublight.report.predict import elsewhere as report
    from sublight.trace import load

    machines, path = machines_of(request), Path(request.trace)
    if not path.exists():
        raise BadInput(f"there is no file {path}: give a trace, as torch.profiler or nsys writes it")
    traces = load.load(path)
    document = report.to_json([elsewhere.elsewhere(traces, here, source=path.name) for here in machines])
    output.show(report.page(document), document, request.json)


def write_html(document: dict[str, Any], found: Sequence[Prediction], path: str) -> None:
    """With the grids of the first GPUs, for each step that was asked for but training."""
    from sublight.predict import grid
    from sublight.report.predict import page

    likes = {(each.machine.label, each.step.mode): each for each in reversed(found) if not each.step.trains}
    machines = list(dict.fromkeys(each.machine.label for each in found))[:MOST_GRIDS]
    grids = [
        grid.grid(each.model, each.machine, each.step)
        for (label, _), each in reversed(likes.items())
        if label in machines
    ]
    write_file(page.html(document, found, grids), Path(path))


def refuse_misfit(document: dict[str, Any]) -> None:
    """Where one step was asked for and it does not fit, that is the answer."""
    from sublight.report.predict.terminal import misfit

    rows = document["predictions"]
    if len(rows) == 1 and not rows[0]["fits"] and not document["precisions"]:
        raise BadInput(" ".join([f"{misfit(rows[0])}.", *document["model"]["notes"]]).removesuffix("."))


_SECONDS = {"us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0}


def seconds(words: str, option: str) -> float:
    """
    >>> seconds("30ms", "latency"), seconds("0.5 s", "latency")
    (0.03, 0.5)
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(us|µs|ms|s)", words.strip())
    if not match or not float(match[1]):
        raise BadInput(f"--{option} {words}: give a time, as in --{option} 30ms")
    return float(match[1]) * _SECONDS[match[2]]


def network(words: str) -> float | None:
    """Bytes a second of one GPU to other machines."""
    if not words:
        return None
    try:
        rate = parse_quantity(words.removesuffix("/s"))
    except ValueError:
        rate = 0
    if not rate:
        raise BadInput(f"--network {words}: give one GPU's bytes a second to other machines, as in --network 50GB")
    return float(rate)


def best_plans(request: Request) -> tuple[float | None, tuple[Plan, ...]]:
    """The target in seconds, and the plans for one GPU, one step and one context, best first."""
    model, precision, gpus = config.load(request.model), precision_of(request), request.plan
    if not gpus:
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
    found = plan.plans(model, machines[0], like, gpus, latency_s=target_s, batch=batch, price_per_hour=price)
    if not found:
        lower = "--checkpointing or --lora 16" if like.trains else "--weights int4"
        raise BadInput(f"{model.name} does not fit on {gpus} {machines[0].gpu.name}: take more GPUs, or {lower}")
    return target_s, found
