"""What `sublight generate` does: checks model, prompts and sampling options, generates, and shows the texts."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from sublight.cli import output
from sublight.cli.engine_options import EngineOptions
from sublight.errors import BadInput, refuse_device

if TYPE_CHECKING:
    from sublight.engines.generate.engine import Engine
    from sublight.engines.generate.engine import Request as TextRequest
    from sublight.engines.generate.sampling import Sampling
    from sublight.engines.generate.vocabulary import Vocabulary
    from sublight.report.draw.console import Progress

SHOWN_EVERY_S = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """The command's words."""

    engine: EngineOptions
    prompts: Sequence[str] = ()
    file: str = ""
    most_new: int = 64
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    repetition: float = 1.0
    presence: float = 0.0
    frequency: float = 0.0
    stop: Sequence[str] = ()
    json: str = ""


def command(request: Request) -> None:
    from sublight.engines.generate import config as configs
    from sublight.engines.generate import vocabulary
    from sublight.engines.generate.sampling import Sampling
    from sublight.report import generate as report
    from sublight.report.draw import console

    if not all(request.stop):
        raise BadInput("--stop '' would end every text at once: give the text to end before, or leave it out")
    if request.most_new < 1:
        raise BadInput(f"--max-new {request.most_new}: give 1 or more")
    output.check_writable(request.json)
    output.check_apart((request.json,), (request.file,))
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # before torch loads: threads that spin starve a busy machine
    folder = request.engine.folder
    config = configs.read(folder)
    words = vocabulary.read(folder, config.vocab)
    how = Sampling(
        temperature=request.temperature,
        top_k=request.top_k,
        top_p=request.top_p,
        min_p=request.min_p,
        seed=request.seed,
        repetition=request.repetition,
        presence=request.presence,
        frequency=request.frequency,
    )
    texts = texts_of(request)
    requests = [  # a seed each: else one prompt, given twice, would be drawn twice alike
        request_of(text, words, replace(how, seed=(how.seed + place) % 2**63), config.ends, request)
        for place, text in enumerate(texts)
    ]
    engine = engine_of(requests, request.engine)
    begin = time.perf_counter()
    with console.progress("generate") as show:
        count = run(engine, requests, show)
    took_s = time.perf_counter() - begin
    document = {
        "model": str(folder),
        "texts": [
            {
                "prompt": text,
                "text": text_of(each, words, request.stop),
                "tokens": each.new,
                "finish": each.finish,
            }
            for text, each in zip(texts, requests, strict=True)
        ],
        "new_tokens": count,
        "tokens_per_s": count / took_s,
    }
    output.show(report.page(document), document, request.json)
    if failed := sum(each.finish == "failed" for each in requests):
        of = f"{failed} of {len(requests)} texts"
        raise BadInput(f"the model's logits for {of} are no numbers: try another --dtype, as bf16 or fp32")


def run(engine: Engine, requests: Sequence[TextRequest], show: Progress | None) -> int:
    """Every text to its end; the number of new tokens. Drawing takes longer than a step of a small model."""
    count, ended, spared, next_s = 0, 0, 0, 0.0  # spared: tokens of texts that ended before their most
    most = sum(each.most_new for each in requests)
    for request, _ in engine.run(requests):
        count += request.finish != "failed"
        if request.finish:
            ended, spared = ended + 1, spared + request.most_new - len(request.new)
        if show and (now := time.perf_counter()) >= next_s:
            show(f"{ended} of {len(requests)} texts, tokens", count + spared, most)
            next_s = now + SHOWN_EVERY_S
    return count


def texts_of(request: Request) -> list[str]:
    """The prompts: those of --prompt, and the lines of the file."""
    texts = list(request.prompts)
    if request.file:
        refuse_device(request.file)
        try:
            lines = Path(request.file).read_text(encoding="utf-8").split("\n")  # not splitlines: a form feed is text
        except OSError as error:
            raise BadInput(f"cannot read {request.file}: {error.strerror}; name a text with a prompt a line") from None
        except UnicodeDecodeError:
            raise BadInput(f"{request.file} is no UTF-8 text: write a prompt a line") from None
        texts += [line for line in lines if line.strip()]
    if not texts:
        raise BadInput("there is no prompt: give --prompt TEXT, or --prompts FILE with one a line")
    return texts


def request_of(text: str, words: Vocabulary, how: Sampling, ends: Sequence[int], request: Request) -> TextRequest:
    from sublight.engines.generate.engine import Request as TextRequest
    from sublight.engines.generate.writer import Writer

    prompt = list(words.encode(text))
    writer = Writer(words, request.stop, prompt)
    stopping: Callable[[list[int]], bool] | None = (lambda new: writer.add(new[-1])) if request.stop else None
    return TextRequest(prompt, request.most_new, how, frozenset(ends), stopping)


def text_of(request: TextRequest, words: Vocabulary, stops: Sequence[str]) -> str:
    """What goes on behind the prompt, up to a stop word, or a token that ends a text."""
    from sublight.engines.generate.writer import Writer

    writer = Writer(words, stops, request.prompt)
    for token in request.new:
        if token in request.ends or writer.add(token):
            break
    return writer.end()


def engine_of(requests: Sequence[TextRequest], options: EngineOptions) -> Engine:
    """The engine, with a cache large enough for these prompts."""
    from sublight.engines.generate.engine import PAGE

    longest = max(len(each.prompt) + each.most_new for each in requests)
    most = max(1, options.batch)
    needed = sum(sorted(-(-(len(each.prompt) + each.most_new) // PAGE) for each in requests)[-most:])
    return options.build(cache=needed * PAGE, longest=longest)
