"""What `sublight train` does: finds data, model and settings from the options, trains, and shows how it goes."""

from __future__ import annotations

import contextlib
import math
import os
import sys
import time
from dataclasses import asdict, dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from sublight.cli import output
from sublight.cli.options import INTERRUPTED, kind_of
from sublight.cli.train_progress import progress, stops_after_a_step
from sublight.errors import BadInput, one_of
from sublight.units import parse_seconds

if TYPE_CHECKING:
    from sublight.engines.train.data import Data
    from sublight.engines.train.gpt2 import Gpt2
    from sublight.engines.train.limit import ProductLimit
    from sublight.engines.train.loop import Trainer
    from sublight.engines.train.parallel.ranks import Ranks
    from sublight.engines.train.run import Run
    from sublight.engines.train.shape import Shape

QUICK_BYTES = 2_000_000  # of text: what a toy model sees of it in half a minute is less
QUICK_S = 40.0
SAMPLE_TOKENS = 160
SAID_S = 1.0  # lets the first rank print its message: torchrun ends all ranks as soon as one ends


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """The command's words; None and "" where nothing was told."""

    data: str = ""
    out: str = ""
    resume: bool = False
    quick: bool = False
    depth: int | None = None
    size: str = ""
    weights: str = ""
    tokens: str = ""
    context: int | None = None
    batch: int | None = None
    accumulate: int | None = None
    steps: int | None = None
    lr: float | None = None
    warmup: int | None = None
    beta2: float | None = None
    dropout: float | None = None
    clip: float | None = None
    weight_decay: float | None = None
    seed: int | None = None
    mode: str = ""
    attention: str = ""
    parallel: str = ""
    graph: bool = True
    deterministic: bool = False
    dtype: str = ""
    eval_every: int | None = None
    save_every: int | None = None
    time_limit: str = ""
    prompt: str = ""
    device: str = ""
    html: str = ""
    explain: bool = False
    json: str = ""


WITH_RESUME = ("resume", "out", "device", "prompt", "html", "explain", "json")


def command(request: Request) -> None:
    output.check_writable(request.html, request.json)
    output.check_apart((request.html, request.json), (request.data,))
    try:
        request.prompt.encode()
    except UnicodeEncodeError:  # half of a surrogate pair, as a terminal's odd bytes become one
        raise BadInput("--prompt is no Unicode text: write it in UTF-8") from None
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # before torch loads: threads that spin starve a busy machine

    device = device_named(request.device)
    if is_torchrun() or request.parallel:
        status = shared(request, device)
    else:
        with contextlib.ExitStack() as held:
            run, data = resumed(request, held) if request.resume else started(request, held, device)
            if run.settings.parallel:
                raise BadInput(
                    f"{run.folder} is a run of several processes: resume it by torchrun, with any number of them"
                )
            status = train(run, data, device, request.prompt, request)
    if status:
        raise typer.Exit(status)


def is_torchrun() -> bool:
    return "TORCHELASTIC_RUN_ID" in os.environ and "WORLD_SIZE" in os.environ


def shared(request: Request, device: str) -> int:
    """Join the other processes that torchrun has started; only the first prints what is wrong with the request."""
    try:
        return _shared(request, device)
    except BadInput as error:
        if os.environ.get("RANK", "0") == "0" or str(error).startswith("rank "):
            raise
        time.sleep(SAID_S)
        raise typer.Exit(2) from None


def _shared(request: Request, device: str) -> int:
    from sublight.engines.train.settings import PARALLEL

    if request.parallel:
        one_of("parallel", request.parallel, PARALLEL)
    if not is_torchrun():
        example = f"torchrun --nproc-per-node 2 -m sublight train --parallel {request.parallel}"
        raise BadInput(f"--parallel {request.parallel} is for processes that torchrun starts: {example} …")
    if request.explain:
        raise BadInput("--explain is for one process: `sublight explain` takes a folder with a trace of each rank")
    if not request.resume and not request.parallel:
        raise BadInput("torchrun starts several processes: say how they share the work, as in --parallel ddp")
    from sublight.engines.train import data
    from sublight.engines.train import run as runs
    from sublight.engines.train.parallel import ranks as processes

    with processes.joined(device) as ranks, contextlib.ExitStack() as held:
        make = resumed if request.resume else partial(started, device=device)
        folder = ranks.first_does(lambda: str(make(request, held)[0].folder))
        run = runs.opened(Path(folder))
        if not run.settings.parallel:
            raise BadInput(f"{folder} is a run of one process: resume it without torchrun")
        try:
            return train(run, data.opened(run.tokens), device, request.prompt, request, ranks)
        except RuntimeError as error:
            if not processes.is_about_another(error):
                raise
            again = f"torchrun … -m sublight train --resume --out {folder}"
            raise BadInput(f"rank {ranks.rank}: another rank is gone; `{again}` goes on from its checkpoint") from None


def device_named(words: str) -> str:
    import torch

    kind = kind_of(words)
    if kind == "cuda" and not torch.cuda.is_available():
        raise BadInput("no GPU that torch can use here: `sublight doctor` says why, or use --device cpu")
    return str(kind or ("cuda" if torch.cuda.is_available() else "cpu"))


def resumed(request: Request, held: contextlib.ExitStack) -> tuple[Run, Data]:
    """The run that a folder's checkpoint continues, for this process alone until `held` ends; options that would change
    how it began are refused."""
    from sublight.engines.train import data, run

    plain = Request()
    given = [f.name for f in fields(Request) if getattr(request, f.name) != getattr(plain, f.name)]
    if other := [name.replace("_", "-") for name in given if name not in WITH_RESUME]:
        what = "the data" if other[0] == "data" else f"--{other[0]}"
        raise BadInput(f"--resume goes on with the settings that the run has: leave {what} out")
    found = run.opened(run.newest_folder(request.out))
    held.enter_context(run.alone(found.folder))
    tokens = data.opened(found.tokens)
    tokens.tokenizer.encode(request.prompt)  # complains before anything is computed
    return found, tokens


def started(request: Request, held: contextlib.ExitStack, device: str) -> tuple[Run, Data]:
    """A new run's folder, with everything that resuming needs, for this process alone until `held` ends."""
    from sublight.engines.train import data, huggingface, run

    if request.size and request.depth is not None:
        raise BadInput(f"--size {request.size} and --depth {request.depth} both give the model: leave one out")
    if request.weights and (request.size or request.depth is not None):
        raise BadInput(f"--from {request.weights} gives the model's sizes: leave --size and --depth out")
    weights = Path(request.weights) if request.weights else None
    shape = huggingface.read_shape(weights) if weights else None
    check_words(request, device)
    like_it = shape or shape_of(request, device, vocab=1)  # the vocabulary matters to no setting
    settings_of(request, like_it, device).check(like_it)
    path = Path(request.data) if request.data else None
    quick_bytes = QUICK_BYTES if request.quick else None
    with run.new(request.out, held) as folder:
        found = data.prepare(path, tokens_of(request, weights), folder / run.TOKENS, most_bytes=quick_bytes)
        shape = shape or shape_of(request, device, found.tokenizer.vocab)
        if found.tokenizer.vocab > shape.vocab:
            raise BadInput(
                f"the data has tokens up to {found.tokenizer.vocab - 1}, the model {shape.vocab}: tokenize it alike"
            )
        settings = settings_of(request, shape, device)
        settings.check(shape)
        found.check(settings.context)
        found.tokenizer.encode(request.prompt)  # complains before anything is computed
        new = run.Run(folder=folder, shape=shape, settings=settings, weights=str(weights.resolve()) if weights else "")
        new.write()
    return new, found


def check_words(request: Request, device: str) -> None:
    """Check names among the options before any text is read."""
    from sublight.engines.train import layers, settings, shape

    for what, word, known in (
        ("size", request.size, shape.SIZES),
        ("mode", request.mode, layers.MODES),
        ("attention", request.attention, layers.ATTENTIONS),
        ("dtype", dtype_named(request.dtype), settings.DTYPES),
    ):
        if word:
            one_of(what, word, known)
    layers.attention_by(request.attention or "ours", device, deterministic=request.deterministic)  # type: ignore[arg-type]


def dtype_named(words: str) -> str:
    return {"bf16": "bfloat16", "fp32": "float32"}.get(words, words)


def tokens_of(request: Request, weights: Path | None) -> str:
    if weights and not request.tokens and not request.data.endswith(".bin"):
        if not (weights / "tokenizer.json").exists():
            raise BadInput(f"{weights} has no tokenizer.json: name one with --tokens, or give a .bin of tokens")
        return str(weights / "tokenizer.json")
    if request.quick and not request.tokens and not request.data.endswith(".bin"):
        with contextlib.suppress(ImportError):
            import tokenizers  # noqa: F401

            return "bpe:1024"  # with BPE a toy model writes words before it could have learned to spell
    return request.tokens


def shape_of(request: Request, device: str, vocab: int) -> Shape:
    from sublight.engines.train import shape

    on_gpu = device == "cuda"
    room = 1024 if on_gpu else 64 if request.quick else 128
    room = room if request.context is None else request.context
    if room < 1:
        raise BadInput(f"--context {room}: give 1 or more")
    wide = shape.padded_vocab(vocab)
    if request.size:
        return shape.by_size(request.size, context=room, vocab=wide)
    depth = request.depth if request.depth is not None else (12 if on_gpu else 2 if request.quick else 4)
    return shape.by_depth(depth, context=room, vocab=wide)


def settings_of(request: Request, shape: Shape, device: str) -> Any:
    """The settings: those given as options, the rest chosen for this machine."""
    from sublight.engines.train.settings import WARMUP, Settings, default_lr
    from sublight.limits import busy

    on_gpu = device == "cuda"
    steps = request.steps if request.steps is not None else 350 if request.quick else 5000 if on_gpu else 1000
    batch = request.batch if request.batch is not None else 32 if on_gpu else 16
    try:
        limit_s = parse_seconds(request.time_limit) if request.time_limit else QUICK_S if request.quick else math.inf
    except ValueError:
        raise BadInput(f"--time-limit {request.time_limit}: give a time, as in --time-limit 10min") from None
    every = max(1, min(250, steps // 10))
    plain = Settings(
        steps=steps,
        batch=batch,
        context=shape.context if request.context is None else request.context,
        lr=4e-3 if request.quick and not on_gpu else default_lr(shape),
        warmup=round(WARMUP * steps),
        dtype=dtype_named(request.dtype) or ("bfloat16" if on_gpu else "float32"),
        eval_every=every,
        save_every=every,
        threads=busy.threads(),
        time_limit_s=limit_s,
    )
    names = (
        *("accumulate", "lr", "warmup", "beta2", "dropout", "clip", "weight_decay", "seed", "eval_every", "save_every"),
        *("mode", "attention", "parallel", "graph", "deterministic"),
    )
    given: dict[str, Any] = {name: getattr(request, name) for name in names}
    return replace(plain, **{name: value for name, value in given.items() if value is not None and value != ""})


def train(run: Run, data: Data, device: str, prompt: str, request: Request, ranks: Ranks | None = None) -> int:
    """Train, then sample, save and show; returns the exit status. Of several ranks only the first shows."""
    from sublight.engines.train import limit, log
    from sublight.report import train as report
    from sublight.results import write_file

    is_shown = ranks is None or ranks.is_first
    known = limit.product_limit(device, run.settings.dtype, run.settings.threads)
    if known and ranks is not None and device == "cuda":
        known = replace(known, flops_per_s=known.flops_per_s * ranks.world)
    with progress(run, known) if is_shown else contextlib.nullcontext() as watch:
        trainer = made(run, data, device, watch, ranks)
        document = described(trainer, known, device, prompt)
        if is_shown:
            print(f"{report.heading(document)}\n{report.derived(document)}", file=sys.stderr)
            if trainer.step:
                print(f"goes on at step {trainer.step}", file=sys.stderr)
        with stops_after_a_step(trainer):
            trainer.train()
    model = trainer.whole_model()
    if model is None:
        return INTERRUPTED if trainer.stop_wanted else 0
    document = finished(document, trainer, model, prompt)
    rows = log.read(run.folder / log.NAME)
    page = Path(request.html) if request.html else run.folder / "loss.html"
    write_file(report.html(document, rows), page)
    is_done = trainer.step >= run.settings.steps
    notes = [f"loss curve: {page}", *document["notes"]]
    if not is_done:
        notes.append(f"to go on: sublight train --resume --out {run.folder}")
    if request.explain:
        from sublight.cli.train_explain import explained

        notes += explained(trainer, run.folder / "explain.html")
    document["notes"] = notes
    output.show(report.page(document), document, request.json)
    return INTERRUPTED if trainer.stop_wanted else 0


def made(run: Run, data: Data, device: str, watch: Any, ranks: Ranks | None) -> Trainer:
    import torch

    if ranks is not None:
        from sublight.engines.train.parallel.trainer import SharedTrainer

        return SharedTrainer(run, data, ranks, watch)
    from sublight.engines.train.loop import Trainer

    return Trainer(run, data, torch.device(device), watch)


def described(trainer: Trainer, known: ProductLimit | None, device: str, prompt: str) -> dict[str, Any]:
    """What the JSON and the page say of the run before its first step."""
    import torch

    run, data = trainer.run, trainer.data
    return {
        "folder": str(run.folder),
        "data": data.name,
        "tokens": data.tokenizer.words,
        "train_tokens": int(data.train.size),
        "device": torch.cuda.get_device_name() if device == "cuda" else f"CPU, threads: {run.settings.threads}",
        "parameters": run.shape.parameters,
        "shape": asdict(run.shape),
        "settings": run.settings.to_json(),
        "limit_tokens_per_s": known.flops_per_s / run.shape.train_flops_per_token if known else None,
        "limit_source": known.source if known else None,
        "prompt": prompt,
        "notes": [],
    }


def finished(document: dict[str, Any], trainer: Trainer, model: Gpt2, prompt: str) -> dict[str, Any]:
    """The final figures and a sample, after the weights are saved."""
    from sublight.engines.train import huggingface
    from sublight.engines.train.sample import sample

    tokenizer, run = trainer.data.tokenizer, trainer.run
    ids = tokenizer.encode(prompt).tolist()
    drawn = sample(model, ids, SAMPLE_TOKENS, vocab=tokenizer.vocab, seed=run.settings.seed)
    notes = []
    best = trainer.best_model()
    try:
        huggingface.save(model, run.folder / "model")
        notes.append(f"weights for Hugging Face: {run.folder / 'model'}")
        if best is not None:
            huggingface.save(best, run.folder / "best")
            notes.append(
                f"held-out loss was {trainer.best.loss:.3f} after {trainer.best.step} steps: {run.folder / 'best'}"
            )
        if document_of := tokenizer.to_json().get("document"):
            from sublight.results import write_file

            write_file(document_of, run.folder / "model" / "tokenizer.json")
    except BadInput as error:  # no safetensors, or a full disk: the checkpoint still has the weights
        notes.append(f"no weights for Hugging Face: {error}")
    return document | {
        "step": trainer.step,
        "first_loss": trainer.first_loss,
        "loss": trainer.last_loss,
        "held_out_loss": trainer.held_out_loss,
        "best": asdict(trainer.best),
        "tokens_per_s": trainer.tokens_per_s,
        "memory_bytes": trainer.memory_bytes,
        "sample": tokenizer.decode(drawn),
        "notes": notes,
    }
