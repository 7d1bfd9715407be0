"""Processes that a script starts: what they launch is watched too, and told to the process that started them.

They are forked, whatever the script asked for: a process that is spawned would load Triton without the watch, and write
wherever a wrong kernel writes.
"""

from __future__ import annotations

import multiprocessing.context
import multiprocessing.util
import os
import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from sublight.xray.sanitize.interpreter import Session


@contextmanager
def watching(session: Session, folder: Path) -> Iterator[None]:
    """Children that end in here leave what they found in a folder; it is added to the session at the end."""
    contexts: dict[str, Any] = multiprocessing.context._concrete_contexts  # type: ignore[attr-defined]
    kept, is_on = dict(contexts), True
    if "fork" in contexts:
        contexts.update(dict.fromkeys(contexts, contexts["fork"]))

    def begin(_: Any) -> None:
        import torch

        if is_on:  # else a later process, of another script
            torch.set_num_threads(1)  # OpenMP's threads do not live through a fork
            session.forget()
            multiprocessing.util.Finalize(None, hand_over, exitpriority=0)

    def hand_over() -> None:
        file = folder / f"child-{os.getpid()}.pickle"
        file.write_bytes(pickle.dumps(session.results()))

    multiprocessing.util.register_after_fork(begin, begin)
    try:
        yield
    finally:
        is_on = False
        contexts.update(kept)
        for file in sorted(folder.glob("child-*.pickle")):
            session.add_results(pickle.loads(file.read_bytes()))
            file.unlink()
