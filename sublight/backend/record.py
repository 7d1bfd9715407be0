"""One launch of a Triton kernel: what is needed to compile it anywhere, and to follow what it reads and writes.

Launches are recorded from the code that makes them: every one is noted with its types, constants, options, grid and
arguments. Types and constants come from Triton's own rules, so what is compiled is what a GPU would get.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from sublight.backend.listen import Proceed, Request, listening
from sublight.errors import BadInput
from sublight.gpus import Gpu

OPTIONS = ("num_warps", "num_stages", "num_ctas", "maxnreg")
MIN_CAPABILITY = 75  # below this, Triton and its wheel's assembler promise nothing
_OF_RUNTIME = (
    "debug",
    "instrumentation_mode",
    "fpsan_homomorphic_casts",
    "device",
    "stream",
)  # say nothing of the code


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """One specialisation of a kernel: enough to compile it anywhere.

    Where an argument is a tuple, its items are named `name.0`, `name.1` in `constants` and `aligned`.
    """

    kernel: str
    jit: Any
    signature: Mapping[str, Any]  # argument -> type; of a tuple, a tuple of types
    constants: Mapping[str, Any]
    aligned: tuple[str, ...]  # pointers and numbers that are multiples of 16, as Triton finds out at run time
    options: Mapping[str, Any]
    grid: tuple[int, ...] = ()
    arguments: Mapping[str, Any] = field(default_factory=dict)

    @property
    def key(self) -> str:
        """A key that is equal for launches that share their compiled code."""
        constants = {name: getattr(value, "cache_key", value) for name, value in self.constants.items()}  # of functions
        return f"{self.kernel} {dict(self.signature)} {constants} {self.aligned} {dict(self.options)}"

    @property
    def size(self) -> int:
        """Elements that one program holds, for picking the most demanding specialisation."""
        product = 1
        for value in self.constants.values():
            product *= value if isinstance(value, int) and value > 1 else 1
        return product


def capability_of(gpu: Gpu) -> int:
    """Compute capability as Triton's targets have it: 90 for an H200. GPUs of other vendors have none: an error."""
    if gpu.compute_capability is None:
        raise BadInput(f"xray reads NVIDIA code, {gpu.key} is {gpu.vendor}'s: use --gpu h100, a100, …")
    major, minor = gpu.compute_capability
    return 10 * major + minor


def compilable(gpu: Gpu) -> int:
    """The capability of a GPU that Triton compiles for."""
    capability = capability_of(gpu)
    if capability < MIN_CAPABILITY:
        raise BadInput(
            f"nothing compiles for {gpu.key} (sm_{capability}) any more: use a GPU from sm_{MIN_CAPABILITY} on"
        )
    return capability


def no_interpreter() -> None:
    """Fail under the interpreter: there kernels are plain Python, which cannot be compiled."""
    import os

    if os.environ.get("TRITON_INTERPRET") == "1":
        raise BadInput("TRITON_INTERPRET=1 makes kernels that cannot be compiled: unset it")


@contextlib.contextmanager
def noting(capability: int, launches: list[Launch], *, also_made: bool = False) -> Iterator[None]:
    """Note Triton launches; they are made as well where there is a GPU for it, and the caller says so."""

    def note(request: Request, proceed: Proceed) -> Any:
        launches.append(
            launch_of(request.kernel, request.args, request.kwargs, grid=request.grid, capability=capability)
        )
        return proceed(request) if also_made else None

    with listening(note):
        yield


def launch_of(jit: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], *, grid: Any, capability: int) -> Launch:
    """The `Launch` that Triton would make of these arguments: types and constants, on any device or on none."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler.compiler import make_backend
    from triton.runtime.jit import create_function_from_signature

    backend = make_backend(GPUTarget("cuda", capability, 32))
    bind = create_function_from_signature(jit.signature, jit.params, backend)
    bound, specialization, _ = bind(*args, **kwargs)
    names = [parameter.name for parameter in jit.params]
    options = {name: value for name, value in kwargs.items() if name not in names and name not in _OF_RUNTIME}
    options |= {name: bound[name] for name in names if name in OPTIONS}  # a Gluon kernel may ask for its own warps
    signature: dict[str, Any] = {}
    constants: dict[str, Any] = {}
    aligned: list[str] = []
    for name, (kind, attribute) in zip(names, specialization, strict=True):
        if name in OPTIONS:
            continue
        if kind != "constexpr":
            signature[name] = kind
        for path, kind_of_one, attribute_of_one, value in _leaves(name, kind, attribute, bound[name]):
            if kind_of_one == "constexpr":
                constants[path] = value
            elif isinstance(attribute_of_one, str) and "D" in attribute_of_one:  # divisible by 16
                aligned.append(path)
    return Launch(
        kernel=jit.__name__,
        jit=jit,
        signature=signature,
        constants=constants,
        aligned=tuple(aligned),
        options=options,
        grid=tuple(int(size) for size in (grid(bound) if callable(grid) else grid or ())),
        arguments=bound,
    )


def _leaves(path: str, kind: Any, attribute: Any, value: Any) -> Iterator[tuple[str, Any, Any, Any]]:
    """Path, type, attribute and value of an argument, or of every item of one that is a tuple."""
    if not isinstance(kind, tuple):
        yield path, kind, attribute, value
        return
    attributes = attribute if isinstance(attribute, tuple | list) else (attribute,) * len(kind)
    for index, parts in enumerate(zip(kind, attributes, value, strict=True)):
        yield from _leaves(f"{path}.{index}", *parts)
