"""The words of `sublight predict`: steps, machines, data types, times, rates; what cannot be is refused in a line."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import product

from sublight.cost.dtypes import find_dtype, is_floating, parse_dtype
from sublight.errors import BadInput, one_of
from sublight.predict import estimate, machine
from sublight.predict.machine import Machine
from sublight.predict.model import Model
from sublight.predict.step import ONE_GPU, Mode, Parallel, Precision, Step
from sublight.units import parse_quantity

LEAST_NETWORK = 10**6  # bytes a second: less is a rate without its unit
MOST = {"batch": 1 << 20, "context": 1 << 27}
PRODUCTS = ("bfloat16", "float16", "float32", "float8_e4m3fn", "int8", "float4_e2m1fn")
STORED = (*PRODUCTS, "int4")
_SECONDS = {"us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0}


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
    lora: int | None = None
    price: str = ""
    changes: Sequence[str] = ()
    network: str = ""
    parallel: Parallel = ONE_GPU
    overlap: bool = True
    plan: int | None = None
    latency: str = ""
    census: bool = False
    precisions: bool = False
    html: str = ""
    csv: str = ""
    json: str = ""


def numbers(words: Iterable[str], what: str) -> list[int]:
    """Parse whole numbers above 0, as in 1,8,64 or 4k."""
    values = []
    for word in words:
        try:
            number = parse_quantity(word)
        except ValueError:
            raise BadInput(f"--{what} {word}: give whole numbers, as in --{what} 1,8,64") from None
        if not 0 < number <= MOST[what]:
            raise BadInput(f"--{what} {word}: it must be from 1 to {MOST[what]}")
        values.append(number)
    return values


def precision_of(request: Request) -> Precision:
    """The data types; unnamed ones follow from the named: fp8 products have fp8 weights and bf16 activations."""
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
    """The contexts: an image has as many tokens as patches, and no sequence may be longer than learned positions."""
    if not model.generates and model.family != "encoder":
        if words:
            size = f"it has {model.tokens} tokens" if model.tokens else "it has no tokens"
            raise BadInput(f"{model.name} takes images: leave --context out, {size}")
        return [model.tokens or 1]
    contexts = numbers(words, "context") or [min(4096, model.longest or 4096)]
    if model.positions and max(contexts) > model.positions:
        raise BadInput(f"{model.name} has {model.positions} positions: --context {max(contexts)} is longer than that")
    return contexts


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
        flags = f"--ep {parallel.expert} with --tp {parallel.tensor} --dp {parallel.data}"
        raise BadInput(f"{flags}: experts are spread over the tp GPUs, or over all tp x dp of them")


def machines_of(request: Request) -> list[Machine]:
    """Each GPU, followed by itself with each --what-if."""
    factors = [machine.parse_changes([part.strip() for part in word.split(",")]) for word in request.changes]
    rate = network(request.network)
    machines = []
    for name in dict.fromkeys(request.gpus):
        here = replace(machine.find(name), network_bytes_per_s=rate)
        machines += [here, *(machine.change(here, each) for each in factors)]
    return machines


def steps_of(request: Request, model: Model, precision: Precision) -> list[Step]:
    replicas = request.parallel.data
    batches = numbers(request.batches, "batch") or [replicas]
    if min(batches) < replicas:
        raise BadInput(
            f"--batch {min(batches)} leaves some of --dp {replicas} GPUs without a sequence: give {replicas} or more"
        )
    contexts = contexts_of(model, request.contexts)
    modes = _trainable(modes_of(model, request.modes), request, precision)
    if request.lora is not None and request.lora < 1:
        raise BadInput(f"--lora {request.lora}: give the adapters' rank, as in --lora 16")
    if request.lora and 0 < model.hidden < request.lora:
        raise BadInput(f"--lora {request.lora}: {model.name} is {model.hidden} wide, and adapters are narrower")
    if request.lora and model.family == "convolution":
        raise BadInput(f"{model.name} has no products that --lora adapts: leave it out")
    return [
        Step(
            mode=mode,
            batch=batch,
            context=context,
            precision=precision,
            checkpointing=request.checkpointing,
            lora=request.lora,
            eager=request.eager,
            parallel=request.parallel,
            overlap=request.overlap,
        )
        for mode, batch, context in product(modes, batches, contexts)
    ]


def _trainable(modes: tuple[Mode, ...], request: Request, precision: Precision) -> tuple[Mode, ...]:
    """Refuse to train weights of fewer than 16 bits, unless adapters beside them are trained."""
    if "train" not in modes or request.lora or find_dtype(precision.weights).bits >= 16:
        return modes
    if "train" in request.modes:
        raise BadInput(
            f"weights of {find_dtype(precision.weights).bits} bits are not trained: add --weights bf16, or --lora 16"
        )
    return tuple(mode for mode in modes if mode != "train")


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
    if rate < LEAST_NETWORK:
        raise BadInput(f"--network {words}: give one GPU's bytes a second to other machines, as in --network 50GB")
    return float(rate)
