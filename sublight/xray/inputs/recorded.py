"""The launches that a script makes, noted while it runs; without a GPU they are noted instead of made."""

from __future__ import annotations

import contextlib
import functools
import runpy
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from sublight.backend import private
from sublight.backend.listen import listening
from sublight.backend.record import Launch, no_interpreter
from sublight.errors import BadInput
from sublight.gpus import Gpu
from sublight.gpus import find as find_gpu
from sublight.xray.inputs.pretended import gpu_pretended, note
from sublight.xray.inputs.python import message_of, place_of
from sublight.xray.pretend.replaced import replaced

Tell = Callable[[str], None]


def record(
    script: str | Path, args: Sequence[str] = (), *, gpu: Gpu | None = None, tell: Tell | None = None
) -> list[Launch]:
    """Run the script as `python script args` would, and note every Triton launch, its imports' too.

    On a GPU launches are made as well, for that GPU. Without one they change nothing, the script's "cuda" is the CPU,
    comparisons of results hold, autotune takes its first configuration, and a benchmark runs once at its first size if
    nothing was launched before.
    What was noted before a failure is kept, and the failure told.
    """
    no_interpreter()
    file, gpu = Path(script), gpu or find_gpu("h100")
    if not file.is_file():
        raise BadInput(f"no script {str(script)!r}: --record runs a Python file")
    import torch

    has_gpu = torch.cuda.is_available()
    launches: list[Launch] = []
    if tell and not has_gpu:
        tell(f"no GPU here, {gpu.key} is pretended: launches are noted and not made, so results mean nothing")
    try:
        with contextlib.ExitStack() as stack:
            stack.enter_context(_as_script(file, args))
            if has_gpu:
                stack.enter_context(_without_trials(launches))
                stack.enter_context(listening(functools.partial(note, gpu, launches, proceeds=True)))
            else:
                stack.enter_context(gpu_pretended(gpu, launches))
            runpy.run_path(str(file), run_name="__main__")
    except SyntaxError as error:
        raise BadInput(f"{place_of(error, file)}: {file.name} does not run: {error.msg}") from error
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # a script may leave by sys.exit, which is no failure where it says so
        if not (isinstance(error, SystemExit) and error.code in (None, 0)):
            failure = f"{place_of(error, file)}: {file.name} fails: {message_of(error)}"
            if not launches:
                raise BadInput(f"{failure}; no kernel had been launched") from error
            if tell:
                tell(f"{failure}; kept are the {len(launches)} launches before it")
    if not launches:
        raise BadInput(
            f"{file.name} launches no Triton kernel on {gpu.key}: does it need an argument, or another GPU (--gpu)?"
        )
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
def _without_trials(launches: list[Launch]) -> Iterator[None]:
    """On a GPU: what autotune tries is no launch of the script's."""
    bench = private.try_configuration

    def tried(self: Any, *args: Any, **kwargs: Any) -> Any:
        count = len(launches)
        try:
            return bench(self, *args, **kwargs)
        finally:
            del launches[count:]

    with replaced(private.Autotuner, {"_bench": tried}):
        yield
