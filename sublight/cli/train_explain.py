"""`sublight train --explain`: some steps more, under the profiler, and the page that tells where their time went.

They come when everything is saved: what they do to the weights is lost.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

from sublight.errors import BadInput

if TYPE_CHECKING:
    from sublight.engines.train.loop import Trainer

WARMUP, TIMED, PROFILED = 1, 3, 3  # how many steps of each
MOST_S = 120.0
SHOWN = 4  # how many of the largest parts are listed


def explained(trainer: Trainer, page: Path) -> list[str]:
    """Run some steps more and write the page; returns its gist in some lines."""
    from sublight.diagnose.explain import explain
    from sublight.report.explain import page as pages
    from sublight.trace.capture.profile import Profile, step

    lr = trainer.settings.lr_at(trainer.settings.steps - 1)
    profile = Profile(warmup=WARMUP, timed=TIMED, profiled=PROFILED, time_limit_s=MOST_S)
    with profile:
        for _ in range(WARMUP + TIMED + PROFILED + 1):
            trainer.try_step(lr)
            step()
    if profile.trace is None:
        why = profile.captured.reason if profile.captured is not None else "nothing was recorded"
        raise BadInput(f"--explain: {why}")
    report = explain([profile.trace], source=f"sublight train, {trainer.run.folder}")
    pages.write(report, page)
    by_family: Counter[str] = Counter()
    for row in report.ops:
        by_family[row.family] += row.device_s  # type: ignore[assignment]
    shares = ", ".join(f"{name} {100 * own_s / report.step_s:.0f} %" for name, own_s in by_family.most_common(SHOWN))
    return [f"a step of {1e3 * report.step_s:.4g} ms: {shares}", f"where its time goes: {page}"]
