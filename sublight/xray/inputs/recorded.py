"""The launches that a script makes, noted while it runs; without a GPU they are noted instead of made."""

from __future__ import annotations

import contextlib
import runpy
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from sublight.backend import private
from sublight.backend.record import Launch, no_interpreter, noting
from sublight.errors import BadInput
from sublight.xray.inputs.python import place_of, said
from sublight.xray.inputs.without_gpu import without_gpu


def record(
    script: str | Path, args: Sequence[str] = (), *, capability: int = 90, tell: Callable[[str], None] | None = None
) -> list[Launch]:
    """Run the script as `python script args` would, and note every Triton launch, its imports' too.

    On a GPU launches are made as well, for that GPU. Without one they change nothing, the script's "cuda" is the CPU,
    and autotune takes its first configuration. What was noted before a failure is kept, and the failure told.
    """
    no_interpreter()
    file = Path(script)
    if not file.is_file():
        raise BadInput(f"no script {str(script)!r}: --record runs a Python file")
    import torch

    has_gpu = torch.cuda.is_available()
    launches: list[Launch] = []
    try:
        with contextlib.ExitStack() as stack:
            stack.enter_context(_as_script(file, args))
            if not has_gpu:
                stack.enter_context(without_gpu(capability))
            stack.enter_context(_untimed(launches, has_gpu=has_gpu))
            stack.enter_context(noting(capability, launches, also_made=has_gpu))
            runpy.run_path(str(file), run_name="__main__")
    except SyntaxError as error:
        raise BadInput(f"{error.filename}:{error.lineno}: {file.name} does not run: {error.msg}") from error
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # a script may leave by sys.exit, which is no failure where it says so
        if not (isinstance(error, SystemExit) and error.code in (None, 0)):
            failure = f"{place_of(error, file)}: {file.name} fails: {said(error)}"
            if not launches:
                raise BadInput(f"{failure}; no kernel had been launched") from error
            if tell:
                tell(f"{failure}; kept are the {len(launches)} launches before it")
    if not launches:
        raise BadInput(f"{file.name} launches no Triton kernel: does it need an argument, or a GPU?")
    return launches


@contextlib.contextmanager
def _as_script(file: Path, args: Sequence[str]) -> Iterator[None]:
    argv, path = sys.argv, list(sys.path)
    sys.argv, sys.path[:0] = [str(file), *args], [str(file.resolve().parent)]
    try:
        with contextlib.redirect_stdout(sys.stderr):  # stdout is the report's
            yield
    finally:
        sys.argv, sys.path[:] = argv, path


@contextlib.contextmanager
def _untimed(launches: list[Launch], *, has_gpu: bool) -> Iterator[None]:
    """Autotune's trials are no launches of the script's; without a GPU there are none, and the first one wins."""
    Autotuner = private.Autotuner

    bench, disk = Autotuner._bench, getattr(Autotuner, "check_disk_cache", None)

    def tried(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not has_gpu:
            return [1.0, 1.0, 1.0]
        count = len(launches)
        try:
            return bench(self, *args, **kwargs)
        finally:
            del launches[count:]

    def measured(self: Any, key: Any, configs: Any, bench_fn: Callable[[], None]) -> bool:
        bench_fn()
        return False

    Autotuner._bench = tried  # type: ignore[method-assign]
    if not has_gpu and disk is not None:
        Autotuner.check_disk_cache = measured  # type: ignore[method-assign]  # what was not timed is not to be kept
    try:
        yield
    finally:
        Autotuner._bench = bench  # type: ignore[method-assign]
        if disk is not None:
            Autotuner.check_disk_cache = disk  # type: ignore[method-assign]
