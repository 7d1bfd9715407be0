"""From a launch, PTX or a cubin to `Code`: the one way by which xray compiles and reads what was compiled."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from sublight.backend import private
from sublight.backend.record import OPTIONS, Launch, compilable, no_interpreter
from sublight.errors import BadInput
from sublight.gpus import Gpu
from sublight.xray import binary
from sublight.xray.complaint import complaint, hushed
from sublight.xray.record import Code
from sublight.xray.sass.asm_lines import right_lines


def compiled(launch: Launch, target: int | str) -> Any:
    """Triton's compiled kernel, through its own compiler and assembler; about a second, and no GPU. `target`: a
    capability of NVIDIA's, such as 90, or AMD's name of one of its own, such as gfx942."""
    no_interpreter()
    import triton

    GPUTarget = private.GPUTarget
    ASTSource = private.ASTSource

    jit, names = launch.jit, launch.jit.arg_names
    attributes = {_path(name, names): [["tt.divisibility", 16]] for name in launch.aligned}
    signature = {name: launch.signature.get(name, "constexpr") for name in names}
    given = {name: launch.options[name] for name in names if name in launch.options}  # a Gluon kernel's own num_warps
    constants = {_path(name, names): value for name, value in {**launch.constants, **given}.items()}
    kind = private.GluonASTSource if jit.is_gluon() else ASTSource
    try:
        with hushed() as printed, contextlib.nullcontext() if isinstance(target, str) else right_lines():
            source = kind(jit, signature, constants, attrs=attributes)
            if isinstance(target, str):
                return triton.compile(source, target=GPUTarget("hip", target, 64), options=amd_options(launch.options))
            return triton.compile(source, target=GPUTarget("cuda", target, 32), options=dict(launch.options))
    except Exception as error:  # the compiler's errors have no class in common
        raise complaint(error, printed.text, jit=jit) from error


def amd_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """A launch's options on an AMD GPU: as many threads in warps of 64, and no register limit, which is NVIDIA's.

    >>> amd_options({"num_warps": 32, "maxnreg": 128}), amd_options({"num_warps": 1, "num_stages": 2})
    ({'num_warps': 16}, {'num_warps': 1, 'num_stages': 2})
    """
    warps = {"num_warps": max(1, options["num_warps"] // 2)} if "num_warps" in options else {}
    return {**{name: value for name, value in options.items() if name != "maxnreg"}, **warps}


def code_of(launch: Launch, gpu: Gpu) -> Code:
    """The launch, compiled for that GPU and taken apart."""
    kernel = compiled(launch, compilable(gpu))
    return code_of_compiled(
        kernel,
        gpu,
        name=launch.kernel,
        file=inspect.getsourcefile(launch.jit.fn) or "",
        signature={name: str(kind) for name, kind in launch.signature.items()},
        constants=launch.constants,
        grid=launch.grid,
        arguments=launch.arguments,
        function=launch.jit,
    )


def code_of_compiled(kernel: Any, gpu: Gpu, *, name: str, **known: Any) -> Code:
    """The `Code` of a kernel that Triton compiled, here or when it was launched."""
    shared_bytes, options = kernel.metadata.shared, _options(kernel.metadata._asdict())
    asm = kernel.asm
    (code,) = codes(
        asm["cubin"], gpu, ptx=asm["ptx"], dynamic_shared_bytes=shared_bytes, symbol=kernel.metadata.name, names={}
    )
    return replace(code, name=name, ttgir=asm.get("ttgir", ""), options=options, **known)


def codes(
    cubin: bytes,
    gpu: Gpu,
    *,
    ptx: str = "",
    dynamic_shared_bytes: int = 0,
    threads: int | None = None,
    symbol: str = "",
    names: Mapping[str, str],
    spilled: Mapping[str, int] | None = None,
    file: str = "",
) -> tuple[Code, ...]:
    """Every kernel of a cubin, or the one of that symbol; `names` are the author's, by symbol."""
    used, sass = binary.usage(cubin), binary.disassemble(cubin)
    written = [*binary.entries(ptx), *sass]  # in the order of the source, which the binary does not keep
    codes_of_kernels = []
    for each in dict.fromkeys(name for name in written if name in sass and name in used and symbol in ("", name)):
        own = binary.ptx_of(ptx, each)
        arrays = binary.local_array_bytes(own)
        if arrays and spilled is None:  # the stack is no spill there: the assembler says what is
            spilled = binary.assembled(ptx, binary.architecture(cubin)).spilled
        codes_of_kernels.append(
            Code(
                name=names.get(each, each),
                symbol=each,
                gpu=gpu,
                resources=binary.resources(
                    used[each],
                    sass[each],
                    dynamic_shared_bytes=dynamic_shared_bytes,
                    threads=threads,
                    capability=binary.architecture(cubin),
                    array_bytes=arrays,
                    spilled=(spilled or {}).get(each),
                ),
                sass=sass[each],
                ptx=own,
                file=file,
            )
        )
    if not codes_of_kernels:
        wanted = f"no kernel {symbol!r}" if symbol else "no kernel at all"
        raise BadInput(f"the binary has {wanted}: it has {', '.join(used) or 'nothing to run'}")
    return tuple(codes_of_kernels)


def _path(name: str, names: list[str]) -> tuple[int, ...]:
    """`t.2.1` of (x, t) is (1, 2, 1): Triton counts arguments."""
    first, *rest = name.split(".")
    return (names.index(first), *map(int, rest))


def _options(metadata: Mapping[str, Any]) -> dict[str, Any]:
    return {name: metadata[name] for name in OPTIONS if metadata.get(name) is not None}
