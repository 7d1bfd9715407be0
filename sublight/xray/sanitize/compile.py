"""Does the compiler take what the interpreter took? The kernels that ran are rebuilt elsewhere and compiled.

In the process that interprets, Triton's own library is interpreted too, so another process compiles. It gets the code
of each kernel and of the helpers it calls, with the globals they use, and never runs the script again. Run as
`python -m sublight.xray.sanitize.compile`, beside the process that interprets: it loads Triton, then reads the names of
two files, [JOBS, ANSWERS], from its standard input.
"""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import io
import json
import marshal
import os
import pickle
import re
import signal
import sys
import tempfile
import types
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sublight.backend import private
from sublight.gpus import find as find_gpu
from sublight.xray.sanitize.job import Job

TARGETS = (80, 90)
_DIAGNOSIS = re.compile(
    r"^(?:loc\(\")?(?P<file>[^\s\"]+?)\"?:(?P<line>\d+):\d+\)?: error: (?P<words>.*)$", re.MULTILINE
)


class NotSent(Exception):
    """A global that the kernel uses and that could not be sent: whether the compiler takes it is not known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """What the compiler said, on which targets, and where."""

    file: str
    line: int
    message: str
    targets: tuple[int, ...]
    is_everywhere: bool


class _Unpickler(pickle.Unpickler):
    def __init__(self, data: bytes, functions: list[Any]) -> None:
        super().__init__(io.BytesIO(data))
        self.functions = functions

    def persistent_load(self, pid: Any) -> Any:
        import importlib

        if pid[0] == "module":
            return _imported(pid[1])
        if pid[0] == "library":
            return getattr(importlib.import_module(pid[1]), pid[2])
        return self.functions[pid[1]]


def _imported(name: str) -> Any:
    """A module of the user's may want a GPU to be imported."""
    import importlib

    try:
        return importlib.import_module(name)
    except Exception:
        from sublight.xray.pretend.torch_cuda import OnCpu, cuda_of
        from sublight.xray.pretend.triton_driver import driver_of

        gpu = find_gpu("h100")
        with cuda_of(gpu), driver_of(gpu), OnCpu():
            return importlib.import_module(name)


def _rebuilt(job: Job) -> tuple[Any, dict[str, Any], list[Any]]:
    """The kernel as a function of the compiler's, its constants, and all functions."""
    import triton

    runtime = private.jit

    sources = pickle.loads(job.functions)
    made: list[Any] = []
    for one in sources:
        code = marshal.loads(one["code"])
        cells = tuple(types.CellType() for _ in one["closure"])
        fn = types.FunctionType(
            code, {"__builtins__": __builtins__, "__name__": one["module"]}, one["name"], None, cells
        )
        fn.__qualname__, fn.__module__ = one["qualname"], one["module"]
        fn.__annotations__ = {
            name: triton.language.constexpr if kind == "constexpr" else kind
            for name, kind in one["annotations"].items()
            if kind
        }
        made.append((fn, one))
    functions: list[Any] = []
    for fn, one in made:  # defaults first: a JITFunction looks at the signature
        fn.__defaults__ = pickle_or(one["defaults"], functions)
        fn.__kwdefaults__ = pickle_or(one["kwdefaults"], functions)
        is_constexpr = one["kind"] == "ConstexprFunction"
        functions.append(
            runtime.ConstexprFunction(fn) if is_constexpr else runtime.JITFunction(fn, noinline=one["noinline"])
        )
    for fn, one in made:
        fn.__globals__["__unsent__"] = [name for name, data in one["globals"].items() if data is None]
        for name, data in one["globals"].items():
            if data is not None:
                try:
                    fn.__globals__[name] = _Unpickler(data, functions).load()
                except Exception:  # nothing, unless the compiler asks for it
                    fn.__globals__["__unsent__"].append(name)
        for cell, data in zip(fn.__closure__ or (), one["closure"], strict=True):
            if data is not None:
                cell.cell_contents = _Unpickler(data, functions).load()
    return functions[0], _Unpickler(job.constants, functions).load(), functions


def pickle_or(data: bytes | None, functions: list[Any]) -> Any:
    return None if data is None else _Unpickler(data, functions).load()


def refusal(job: Job, targets: tuple[int, ...] = TARGETS) -> Refusal | None:
    """Compile for each target; what the compiler says where it refuses. Only where Triton does not interpret."""
    kernel, constants, functions = _rebuilt(job)
    answers = {target: _compile(job, kernel, constants, functions, target) for target in targets}
    refusals = {target: answer for target, answer in answers.items() if answer}
    if not refusals:
        return None
    file, line, message = next(iter(refusals.values()))
    return Refusal(
        file=file, line=line, message=message, targets=tuple(refusals), is_everywhere=len(refusals) == len(targets)
    )


def _compile(
    job: Job, kernel: Any, constants: dict[str, Any], functions: list[Any], target: int
) -> tuple[str, int, str] | None:
    """The frontend and Triton's own passes, down to LLVM's IR: what comes after does not refuse."""
    ir = private.ir
    GPUTarget = private.GPUTarget
    ASTSource = private.ASTSource
    make_backend = private.make_backend

    source = ASTSource(kernel, dict(job.signature), constants)
    chosen = GPUTarget("cuda", target, 32)
    backend = make_backend(chosen)
    stages: dict[str, Any] = {}
    with _errors_of_the_compiler() as errors:
        try:
            options = backend.parse_options(dict(job.options))
            backend.add_stages(stages, options, source.language)
            context = ir.context()
            ir.load_dialects(context)
            backend.load_dialects(context)
            module = source.make_ir(
                chosen, options, backend.get_codegen_implementation(options), backend.get_module_map(), context
            )
            metadata: dict[str, Any] = {"target": chosen, **options.__dict__}
            for stage in ("ttir", "ttgir"):
                module = stages[stage](module, metadata)
        except Exception as error:
            return _message_of(error, kernel, functions, errors())
    return None


def _message_of(error: BaseException, kernel: Any, functions: list[Any], printed: str) -> tuple[str, int, str] | None:
    """The compiler's message at its line, without the dump."""
    CompilationError = private.CompilationError

    deepest: Any = None
    at: BaseException | None = error
    words = ""
    while at is not None:
        if isinstance(at, CompilationError):
            deepest = at
            words = str(at.error_message or words)
        elif str(at):
            words = str(at)
        at = at.__cause__ or (at.__context__ if not at.__suppress_context__ else None)
    if deepest is not None:
        if unsent := [name for name in _unsent(functions) if f"{name} is not defined" in words]:
            raise NotSent(f"{unsent[0]} could not be sent to the compiler")
        owner = next((jit for jit in functions if jit.src == deepest.src), None)
        if owner is not None:
            return (
                owner.fn.__code__.co_filename,
                _definition(owner) + getattr(deepest.node, "lineno", 1) - 1,
                _one_line(words),
            )
        return kernel.fn.__code__.co_filename, _definition(kernel), _one_line(words)
    if found := _DIAGNOSIS.search(printed):
        return found["file"], int(found["line"]), _one_line(found["words"])
    return kernel.fn.__code__.co_filename, _definition(kernel), _one_line(words or repr(error))


def _unsent(functions: list[Any]) -> set[str]:
    """Globals that could not be sent from the other process: missing them is our fault, not the kernel's."""
    return {name for jit in functions for name in jit.fn.__globals__.get("__unsent__", ())}


def _definition(jit: Any) -> int:
    """The line of `def`, below the decorators."""
    lines, first = inspect.getsourcelines(jit.fn)
    return first + next((i for i, line in enumerate(lines) if re.match(r"\s*def\s", line)), 0)


def _one_line(words: str) -> str:
    """
    >>> _one_line("ValueError('a is wrong')\\n  module { ... }")
    'ValueError: a is wrong'
    """
    line = next((line.strip() for line in words.splitlines() if line.strip()), "no message")
    parts = re.fullmatch(r"(\w+)\((['\"])(.*)\2,?\)", line)
    line = re.sub(r"(\s|\\n)+", " ", f"{parts[1]}: {parts[3]}" if parts else line)
    kept = re.match(r".{100,}?[.!](?= [A-Z])", line)  # advice that goes on and on
    return kept[0] if kept else line


@contextlib.contextmanager
def _errors_of_the_compiler() -> Iterator[Any]:
    """MLIR prints its diagnoses to the second file descriptor."""
    sys.stderr.flush()
    kept = os.dup(2)
    with tempfile.TemporaryFile() as file:
        os.dup2(file.fileno(), 2)

        def printed() -> str:
            file.seek(0)
            return file.read().decode(errors="replace")

        try:
            yield printed
        finally:
            os.dup2(kept, 2)
            os.close(kept)


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the other processes': the one that started this ends it
    for name in ("jit", "ir", "ASTSource", "make_backend"):
        getattr(private, name)
    names = sys.stdin.read()
    if not names:  # no kernel ran
        return
    jobs_file, answers_file = json.loads(names)
    Path(answers_file).write_text(json.dumps(_answers(pickle.loads(Path(jobs_file).read_bytes()))), encoding="utf-8")


def _answers(jobs: list[Job]) -> list[Any]:
    answers: list[Any] = []
    own = list(sys.path)
    for job in jobs:
        sys.path[:] = job.path or own
        try:
            refused = refusal(job)
            answers.append(None if refused is None else dataclasses.asdict(refused))
        except Exception as error:  # it could not be rebuilt here: say so, and blame nobody
            answers.append({"unknown": str(error) if isinstance(error, NotSent) else repr(error)})
    return answers


if __name__ == "__main__":
    main()
