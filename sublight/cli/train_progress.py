"""What a user sees and does while `sublight train` runs: a line that keeps itself up to date, and Ctrl-C."""

from __future__ import annotations

import contextlib
import signal
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from sublight.results import TOO_GOOD
from sublight.units import text as units_text

if TYPE_CHECKING:
    from sublight.engines.train.limit import ProductLimit
    from sublight.engines.train.loop import Progress, Trainer
    from sublight.engines.train.run import Run


@contextlib.contextmanager
def stops_after_a_step(trainer: Trainer) -> Iterator[None]:
    """Ctrl-C and `kill` end the run behind the step that runs, with a checkpoint; a second Ctrl-C ends it at once."""

    def stop(number: int, _: object) -> None:
        if trainer.stop_wanted:
            raise KeyboardInterrupt
        trainer.stop_wanted = True

    before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def progress(run: Run, known: ProductLimit | None) -> Iterator[Any]:
    """A line on stderr that keeps itself up to date; where stderr is no terminal, a line now and then."""
    from rich.console import Console
    from rich.live import Live
    from rich.text import Text

    console = Console(stderr=True, highlight=False)
    every = max(1, run.settings.steps // 20)
    if not console.is_terminal:

        def say(now: Progress) -> None:
            if now.step % every == 0 or now.step == now.steps:
                print(words_of(now, run, known), file=sys.stderr, flush=True)

        yield say
        return
    with Live(console=console, auto_refresh=False, transient=True) as live:

        def show(now: Progress) -> None:
            live.update(Text(words_of(now, run, known), no_wrap=True, overflow="ellipsis"), refresh=True)

        yield show


def words_of(now: Progress, run: Run, known: ProductLimit | None) -> str:
    held_out = "" if now.held_out_loss is None else f"  held out {now.held_out_loss:.3f}"
    minutes, seconds = divmod(round(now.left_s), 60)
    left = f"{minutes // 60} h {minutes % 60} min" if minutes >= 60 else f"{minutes}:{seconds:02d}"
    words = f"step {now.step}/{now.steps}  loss {now.loss:.3f}{held_out}  {left} left  {now.tokens_per_s:,.0f} tok/s"
    if known:
        mfu = now.tokens_per_s * run.shape.train_flops_per_token / known.flops_per_s
        words += f"  MFU {100 * mfu:.0f} %" if mfu <= TOO_GOOD else "  MFU –, the limit is too low: `sublight limits`"
    return f"{words}  {units_text(now.memory_bytes, 'B')}"  # memory stands last: a narrow terminal cuts the line's end
