"""What `sublight generate` is asked, taken apart: the model, the prompts, how tokens are chosen; and what it shows."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from sublight.cli import output
from sublight.cli.engine_options import EngineOptions
from sublight.errors import BadInput

if TYPE_CHECKING:
    from sublight.engines.generate.engine import Engine
    from sublight.engines.generate.engine import Request as TextRequest
    from sublight.engines.generate.sampling import Sampling
    from sublight.engines.generate.vocabulary import Vocabulary


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
    requests = [request_of(text, words, how, config.ends, request) for text in texts]
    engine = engine_of(requests, request.engine)
    begin, count = time.perf_counter(), 0
    with console.progress("generate") as show:
        for _, _ in engine.run(requests):
            count += 1
            if show:
                done = sum(bool(each.finish) for each in requests)
                show(f"{count} tokens", done, len(requests))
    document = {
        "model": str(folder),
        "texts": [
            {
                "prompt": text,
                "text": cut(words.decode(each.new), request.stop),
                "tokens": each.new,
                "finish": each.finish,
            }
            for text, each in zip(texts, requests, strict=True)
        ],
        "new_tokens": count,
        "tokens_per_s": count / (time.perf_counter() - begin),
    }
    output.show(report.page(document), document, request.json)


def texts_of(request: Request) -> list[str]:
    """Of --prompt and of the file, a line each."""
    texts = list(request.prompts)
    if request.file:
        try:
            lines = Path(request.file).read_text(encoding="utf-8").splitlines()
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

    def is_stopped(new: list[int]) -> bool:
        made = words.decode(new)
        return any(stop in made for stop in request.stop)

    stopping: Callable[[list[int]], bool] | None = is_stopped if request.stop else None
    prompt = list(words.encode(text))
    return TextRequest(prompt, request.most_new, how, frozenset(ends), stopping)


def engine_of(requests: Sequence[TextRequest], options: EngineOptions) -> Engine:
    """With a cache for what was asked."""
    from sublight.engines.generate.engine import PAGE

    longest = max(len(each.prompt) + each.most_new for each in requests)
    most = max(1, options.batch)
    needed = sum(sorted(-(-(len(each.prompt) + each.most_new) // PAGE) for each in requests)[-most:])
    return options.build(cache=needed * PAGE, longest=longest)


def cut(text: str, stops: Sequence[str]) -> str:
    """What stands before the first stop word.

    >>> cut("one two three", ["three", "two"])
    'one '
    """
    return text[: min((text.find(stop) for stop in stops if stop in text), default=len(text))]
