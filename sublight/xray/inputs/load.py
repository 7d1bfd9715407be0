"""Whatever can be named on the command line, as `Code`: an op of ours, a Python or CUDA file, PTX, a cubin, a cache."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sublight.backend.record import Launch
from sublight.cost import parse_dtype
from sublight.errors import BadInput
from sublight.gpus import Gpu
from sublight.gpus import find as find_gpu
from sublight.xray import build
from sublight.xray.record import Code

if TYPE_CHECKING:
    from sublight.op import Op

MOST_THREADS = 1024  # of a block, on every GPU
MOST_LAUNCHES = 32  # of one recorded script
SUFFIXES = (".py", ".cu", ".ptx", ".cubin")
WITHOUT_RUNNING = (".ptx", ".cubin")


def load(
    target: str,
    gpus: Sequence[Gpu],
    *,
    signature: str = "",
    constants: Sequence[str] = (),
    numbers: Mapping[str, int | float] | None = None,
    arguments: Sequence[str] = (),
    shape: str = "",
    dtype: str = "bfloat16",
    threads: int | str | Sequence[int] | None = None,
    shared_bytes: int = 0,
    flags: Sequence[str] = (),
    record: bool = False,
    may_run: bool = True,
    tell: Callable[[str], None] | None = None,
) -> tuple[Code, ...]:
    """Every kernel that the target names, for every GPU; `NAME:KERNEL` picks one.

    A Python file takes `signature`, `constants` and the `numbers` of a launch, or with `record` is run as a script with
    `arguments`; an op takes `shape` and `dtype`; CUDA C++ takes nvcc's `flags`; what does not say its `threads` (256,
    or sides: "32x8") and dynamic `shared_bytes` takes those. `tell` gets what the user should know beside the result,
    else stderr does.
    """
    say = tell or _to_stderr
    path, kernel = parted(target)
    if not may_run and runs(target):
        raise BadInput(
            f"{target} would run code of yours or ours: --no-exec reads only {', '.join(WITHOUT_RUNNING)} files"
        )
    if not gpus and (path is None or path.suffix in (".py", ".cu", ".ptx")):
        raise BadInput(f"{target} is compiled for a GPU, and none is named: add --gpu h100, or another")
    if path is None:
        return _of_op(target, gpus, shape=shape, dtype=dtype, tell=say)
    if path.is_dir():
        from sublight.xray.inputs.binary_files import codes_of_cache

        return codes_of_cache(path, kernel, gpus, tell=say)
    _takes(path, signature=signature, constants=constants, record=record)
    if path.suffix == ".py":
        if record:
            return _of_script(path, kernel, gpus, arguments, tell=say)
        return _of_python(path, kernel, gpus, signature, constants, numbers or {}, tell=say)
    from sublight.xray.inputs import binary_files

    sides = sides_of(threads)
    given: dict[str, Any] = {"threads": math.prod(sides) if sides else None, "shared_bytes": shared_bytes}
    if path.suffix == ".cu":
        from sublight.xray.inputs.cuda import codes_of_cuda

        codes = codes_of_cuda(path, kernel, gpus, flags=flags, **given)
    elif path.suffix == ".ptx":
        codes = binary_files.codes_of_ptx(path, kernel, gpus, **given)
    else:
        codes = binary_files.codes_of_cubin(path, kernel, gpus, tell=say, **given)
    return tuple(replace(code, options={**code.options, "block": sides}) for code in codes) if sides[1:] else codes


def sides_of(threads: int | str | Sequence[int] | None) -> tuple[int, ...]:
    """
    >>> sides_of("32x8"), sides_of(256), sides_of(None)
    ((32, 8), (256,), ())
    """
    if threads is None or threads == "":
        return ()
    words = (
        threads.lower().split("x") if isinstance(threads, str) else [threads] if isinstance(threads, int) else threads
    )
    try:
        sides = tuple(int(size) for size in words)
    except ValueError:
        raise BadInput(f"--threads {threads!r}: write a block's threads, as in 256 or 32x8") from None
    if len(sides) > 3 or min(sides) < 1 or math.prod(sides) > MOST_THREADS:
        raise BadInput(f"--threads {threads}: a block has 1 to {MOST_THREADS} threads, on three sides at most")
    return sides


def load_kernel(
    kernel: Any,
    gpu: Gpu | str = "h100",
    *,
    signature: str | Mapping[str, str] = "",
    constants: Mapping[str, Any] | None = None,
) -> Code:
    """A @triton.jit or @gluon.jit function, or what Triton compiled of one, as Code.

    `load_kernel(k, "h100", signature="x_ptr:*bf16, n:i32", constants={"BLOCK": 1024, "num_warps": 8})`
    """
    from sublight.xray.inputs.python import launch_as_given, unwrapped
    from sublight.xray.inputs.signature import Typed, parse_signature

    gpu = find_gpu(gpu) if isinstance(gpu, str) else gpu
    if hasattr(kernel, "asm") and hasattr(kernel, "metadata"):
        arch = kernel.metadata.target.arch
        if gpu.compute_capability != divmod(arch, 10):
            raise BadInput(f"{kernel.metadata.name} is compiled for sm_{arch}, which is not {gpu.key}'s: name its GPU")
        return build.code_of_compiled(kernel, gpu, name=kernel.metadata.name)
    function = unwrapped(kernel)
    if function is None:
        raise BadInput(
            f"{type(kernel).__name__} is no Triton kernel: give a function with @triton.jit, without TRITON_INTERPRET"
        )
    words = signature if isinstance(signature, str) else ", ".join(f"{name}:{kind}" for name, kind in signature.items())
    parsed = parse_signature(words, [parameter.name for parameter in function.jit.params])
    types = {name: kind for name, kind in parsed.items() if isinstance(kind, Typed)}
    ones = {name: 1 for name, kind in types.items() if kind.is_one}
    return build.code_of(launch_as_given(function, types, {**ones, **(constants or {})}, where="Python"), gpu)


def runs(target: str) -> bool:
    """Whether loading it runs code: an import or a script of the user's, a launcher of ours, or a compiler."""
    path, _ = parted(target)
    return path is None or (path.is_file() and path.suffix not in WITHOUT_RUNNING)


def parted(target: str) -> tuple[Path | None, str]:
    """The file or folder and the kernel; no file where it is an op's name.

    >>> parted("softmax:_row_kernel")
    (None, '_row_kernel')
    """
    parts = target.split(":")  # a kernel's name may have colons too: ns::scale
    for count in range(len(parts), 0, -1):
        words, kernel = ":".join(parts[:count]), ":".join(parts[count:])
        path = Path(words).expanduser()
        try:
            if words and path.is_file():
                return _readable(path), kernel
            if words and path.is_dir() and not ("/" not in words and _is_op(words)):
                return path, kernel
        except OSError as error:  # a folder that is closed, a name that is too long
            raise BadInput(f"{words[:80]} cannot be read: {error.strerror}") from None
    name, _, kernel = target.partition(":")
    if _is_op(name):
        return None, kernel
    if Path(name).suffix or "/" in name:
        raise BadInput(f"no file {name!r}: give an op's name, FILE.py, .cu, .ptx, .cubin or a Triton cache folder")
    from sublight.ops import find

    find(name)  # says which ops are near
    raise AssertionError(name)


def _is_op(name: str) -> bool:
    from sublight.ops import OPS

    return any(op.name == name for op in OPS)


def _readable(path: Path) -> Path:
    """By its name; of another name, what begins as ELF: its machine says whether it is a cubin."""
    if path.suffix in SUFFIXES:
        return path
    with path.open("rb") as file:
        if file.read(4) == b"\x7fELF":
            return path
    raise BadInput(f"{path} is no file that xray reads: it reads {', '.join(SUFFIXES)}")


def _takes(path: Path, *, signature: str, constants: Sequence[str], record: bool) -> None:
    if path.suffix == ".py":
        if record and (signature or constants):
            raise BadInput("--record finds types and constants by itself: leave --sig and --const out")
        return
    if signature or constants or record:
        raise BadInput(f"--sig, --const and --record are for Python files, {path.name} is none: leave them out")


def _of_op(
    target: str, gpus: Sequence[Gpu], *, shape: str, dtype: str, tell: Callable[[str], None]
) -> tuple[Code, ...]:
    from sublight.cost import shape_text
    from sublight.ops import find
    from sublight.xray.inputs.op import launches_of_op

    name, _, kernel = target.partition(":")
    op, dtype = find(name), parse_dtype(dtype)
    codes: list[Code] = []
    for gpu in gpus:
        of_op = launches_of_op(op, gpu, kernel=kernel, shape=shape, dtype=dtype)
        codes += [
            replace(build.code_of(launch, gpu), at=f"{shape_text(at)} {dtype}", accepted=_accepted(op, launch.kernel))
            for launch, at in zip(of_op.launches, of_op.shapes, strict=True)
        ]
        for why, kernels in (("other shapes run", of_op.others), ("calls hardly ever meet", of_op.unmet)):
            if kernels:
                named = ", ".join(f"{each} ({shape_text(at)})" for each, at in kernels.items())
                tell(f"{why} {named}: not shown; {name}:{next(iter(kernels))} or --shape shows them")
    return tuple(codes)


def _accepted(op: Op, kernel: str) -> dict[str, str]:
    """What the op's record says of its spills and narrow accesses."""
    record = next(each for each in op.kernels if each.name == kernel)
    words = {"spill": record.spills, "narrow-load": record.narrow, "narrow-store": record.narrow}
    return {name: why for name, why in words.items() if why}


def _of_python(
    file: Path,
    kernel: str,
    gpus: Sequence[Gpu],
    signature: str,
    constants: Sequence[str],
    numbers: Mapping[str, int | float],
    *,
    tell: Callable[[str], None],
) -> tuple[Code, ...]:
    from sublight.xray.inputs.python import launches_in

    _must_compile(gpus)
    tell(f"importing {file.name} runs it")
    launches = launches_in(file, kernel, signature, constants, numbers)
    return _compiled([(launch, gpu) for gpu in gpus for launch in launches], tell)


def _of_script(
    file: Path, kernel: str, gpus: Sequence[Gpu], arguments: Sequence[str], *, tell: Callable[[str], None]
) -> tuple[Code, ...]:
    _must_compile(gpus)
    launches = _recorded(file, kernel, arguments, gpus[0], tell)
    return _compiled([(launch, gpu) for gpu in gpus for launch in launches], tell)


def _must_compile(gpus: Sequence[Gpu]) -> None:
    """Said before anything of the user's runs."""
    from sublight.backend.record import compilable

    for gpu in gpus:
        compilable(gpu)


def _compiled(wanted: Sequence[tuple[Launch, Gpu]], tell: Callable[[str], None]) -> tuple[Code, ...]:
    """The kernels that compile; `tell` hears of the others (fp8 on an old GPU). Where none does, the first's error."""
    found: list[Code] = []
    failures: list[BadInput] = []
    for launch, gpu in wanted:
        try:
            found.append(build.code_of(launch, gpu))
        except BadInput as error:
            failures.append(
                BadInput(f"{error} ({gpu.key})" if len({each.key for _, each in wanted}) > 1 else str(error))
            )
    if not found and failures:
        raise failures[0]
    for words in dict.fromkeys(map(str, failures)):
        tell(f"left out: {words}")
    return tuple(found)


def _recorded(file: Path, kernel: str, arguments: Sequence[str], gpu: Gpu, tell: Callable[[str], None]) -> list[Launch]:
    """Each specialisation once: its first launch."""
    from sublight.xray.inputs.recorded import record

    launches = record(file, arguments, gpu=gpu, tell=tell)
    distinct: dict[str, Launch] = {}
    for launch in launches:
        if kernel in ("", launch.kernel):
            distinct.setdefault(launch.key, launch)
    if not distinct:
        known = ", ".join(dict.fromkeys(launch.kernel for launch in launches))
        raise BadInput(f"{file.name} launches no {kernel!r}: it launches {known}")
    if len(distinct) > MOST_LAUNCHES:
        tell(
            f"{file.name} launches {len(distinct)} kernels: the first {MOST_LAUNCHES} are shown, {file}:KERNEL is one's"
        )
    return list(distinct.values())[:MOST_LAUNCHES]


def _to_stderr(words: str) -> None:
    print(f"sublight: {words}", file=sys.stderr)
