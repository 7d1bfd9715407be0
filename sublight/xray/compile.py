"""Compile our kernels for GPUs that are not here, and read off registers, spills and shared memory.

What to compile is recorded from the launchers themselves: they run on tensors without data, and every launch is noted
with its types, constants and options instead of being made. So a specialisation cannot be forgotten.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import re
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sublight.op import Kernel, Op, Shape

TARGETS = {80: "a100", 90: "h200", 100: "b200", 120: "rtx5090"}
MAX_SHARED_BYTES = {80: 163 * 1024, 90: 227 * 1024, 100: 227 * 1024, 120: 99 * 1024}  # of one block
OPTIONS = ("num_warps", "num_stages", "num_ctas", "maxnreg")
DTYPES = ("bfloat16", "float32")  # fp16 compiles as bf16 does
_TYPES = {
    "float64": "*fp64",
    "float32": "*fp32",
    "float16": "*fp16",
    "bfloat16": "*bf16",
    "float8_e4m3fn": "*fp8e4nv",
    "int64": "*i64",
    "int32": "*i32",
    "int16": "*i16",
    "int8": "*i8",
    "uint8": "*u8",
    "bool": "*i1",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """One specialisation of a kernel: enough to compile it anywhere."""

    kernel: str
    jit: Any
    signature: Mapping[str, str]
    constants: Mapping[str, Any]
    aligned: tuple[str, ...]  # pointers and numbers that are multiples of 16, as Triton finds out at run time
    options: Mapping[str, Any]

    @property
    def key(self) -> str:
        return f"{self.kernel} {dict(self.signature)} {dict(self.constants)} {self.aligned} {dict(self.options)}"

    @property
    def size(self) -> int:
        """Elements that one program holds, for picking the most demanding specialisation."""
        product = 1
        for value in self.constants.values():
            product *= value if isinstance(value, int) and value > 1 else 1
        return product


@dataclass(frozen=True, slots=True, kw_only=True)
class Compiled:
    """A kernel's compiled self."""

    launch: Launch
    target: int
    registers: int
    spill_bytes: int
    shared_bytes: int

    @property
    def problem(self) -> str:
        """Why this must not ship; empty where nothing is wrong."""
        room = MAX_SHARED_BYTES[self.target]
        if self.shared_bytes > room:
            return f"{self.shared_bytes} bytes of shared memory, {TARGETS[self.target]} has {room}"
        return f"spills {self.spill_bytes} bytes a thread" if self.spill_bytes else ""


@contextlib.contextmanager
def recording(target: int) -> Iterator[list[Launch]]:
    """Note Triton launches instead of making them, as planned for that GPU."""
    from triton.runtime.jit import JITFunction

    from sublight.ops.rows import PRETEND, Facts

    launches: list[Launch] = []

    def note(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        launches.append(_launch(self, args, kwargs))

    original = JITFunction.run
    JITFunction.run = note  # type: ignore[method-assign]
    token = PRETEND.set(Facts(capability=target, shared_bytes=MAX_SHARED_BYTES[target]))
    try:
        yield launches
    finally:
        PRETEND.reset(token)
        JITFunction.run = original  # type: ignore[method-assign]


def launches_of(op: Op, shapes: tuple[Shape, ...], target: int) -> list[Launch]:
    """Every distinct specialisation that these shapes take on that GPU, forward and backward."""
    import torch

    gapped = functools.partial(_gapped, flat=op.keys == ("numel",))
    found: dict[str, Launch] = {}
    for shape in shapes:
        for dtype in DTYPES:
            inputs = op.inputs(shape, dtype, "meta", 0)
            with recording(target) as launches:
                result = op.launch(*inputs)
                op.launch(*map(gapped, inputs))
                for variant in op.variants:
                    variant(*inputs)
                if op.launch_backward:
                    outputs = result if isinstance(result, tuple) else (result,)
                    grads = [torch.empty_like(y) for y in outputs if y.is_floating_point()]
                    op.launch_backward(*grads, *inputs)
                    op.launch_backward(*map(gapped, grads), *map(gapped, inputs))
            found.update({launch.key: launch for launch in launches})
    return list(found.values())


def limit_launches(target: int) -> list[Launch]:
    """The kernels that measure this machine's limits, as `limits` launches them."""
    import torch

    from sublight.limits import cache, device_memory, vector
    from sublight.limits import launch as launch_limit

    x = torch.empty(2**28, device="meta")
    index = torch.empty(2**24, device="meta", dtype=torch.int32)
    with recording(target) as launches:
        for block, warps in device_memory.FLAT:
            device_memory.copy(x, x, block, warps)
            device_memory.write(x, block, warps)
            device_memory.triad(x, x, x, block, warps)
        for block, warps, programs in device_memory.READERS:
            device_memory.read(x, x, block, warps, 132 * programs)
        cache.l2_read(x[: 2**22], x, 20, 528)
        cache.chase(index, index, 4096)
        cache.shared_chase(index, 4096)
        cache.shared_read(index, 2000, 264)
        for _, dtype, _ in vector.KINDS:
            vector.multiply_add(torch.empty(2**20, device="meta", dtype=getattr(torch, dtype)), 200, 2112)
        launch_limit.empty(x)
    return list({launch.key: launch for launch in launches}.values())


def compile_for(launch: Launch, target: int) -> Compiled:
    """Through Triton's own compiler and assembler; about a second, and no GPU."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    from triton.experimental.gluon._runtime import GluonASTSource

    names = launch.jit.arg_names
    attrs = {(names.index(name),): [["tt.divisibility", 16]] for name in launch.aligned}
    signature = {name: launch.signature.get(name, "constexpr") for name in names}
    kind = GluonASTSource if launch.jit.is_gluon() else ASTSource
    constants = {**launch.constants, **({"num_warps": launch.options["num_warps"]} if "num_warps" in names else {})}
    source = kind(launch.jit, signature, constants, attrs=attrs)
    kernel = triton.compile(source, target=GPUTarget("cuda", target, 32), options=dict(launch.options))
    usage = _resource_usage(kernel.asm["cubin"], Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump")
    return Compiled(
        launch=launch,
        target=target,
        registers=usage["REG"],
        spill_bytes=usage["STACK"],
        shared_bytes=int(kernel.metadata.shared),
    )


def kernel_of(op: Op, name: str) -> Kernel:
    """The record behind a launch; a kernel that no record lists is a mistake."""
    for kernel in op.kernels:
        if kernel.name == name:
            return kernel
    raise LookupError(f"{op.name} launches {name}, which its record does not list")


def _launch(jit: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Launch:
    import torch

    options = {name: value for name, value in kwargs.items() if name in OPTIONS}
    given = dict(zip(jit.arg_names, args, strict=False))
    given |= {name: value for name, value in kwargs.items() if name not in options}
    signature: dict[str, str] = {}
    constants: dict[str, Any] = {}
    aligned: list[str] = []
    for parameter in jit.params:
        if parameter.name in OPTIONS:  # a Gluon kernel may ask for its own warps
            continue
        value = given[parameter.name]
        if parameter.is_constexpr or (isinstance(value, int) and value == 1):
            constants[parameter.name] = value
        elif isinstance(value, torch.Tensor):
            signature[parameter.name] = _TYPES[str(value.dtype).removeprefix("torch.")]
            aligned.append(parameter.name)
        elif isinstance(value, float):
            signature[parameter.name] = "fp32"
        else:
            signature[parameter.name] = "i32" if abs(value) < 2**31 else "i64"
            if value % 16 == 0:
                aligned.append(parameter.name)
    return Launch(
        kernel=jit.__name__,
        jit=jit,
        signature=signature,
        constants=constants,
        aligned=tuple(aligned),
        options=options,
    )


def _gapped(x: Any, *, flat: bool) -> Any:
    """The same values, with rows that do not follow one another in memory; a weight or bias is left as it is."""
    if x.dim() == 1 and flat:
        x = x[: x.shape[0] // 2 * 2].view(2, -1) if x.shape[0] > 1 else x.view(1, 1)
    return x.new_empty(*x.shape[:-1], 2 * x.shape[-1])[..., : x.shape[-1]] if x.dim() > 1 else x


def _resource_usage(cubin: bytes, cuobjdump: Path) -> dict[str, int]:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        told = subprocess.run([cuobjdump, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    return {name: int(value) for name, value in re.findall(r"\b(REG|STACK):(\d+)", told)}


def check(ops: tuple[Op, ...], targets: tuple[int, ...], *, thorough: bool) -> Iterator[tuple[str, Compiled, str]]:
    """Compile and judge: every specialisation, or of each kernel and data type the most demanding one."""
    for target in targets:
        for launch in limit_launches(target):
            compiled = compile_for(launch, target)
            yield "limits", compiled, compiled.problem
    done: dict[tuple[str, int], Compiled] = {}  # ops share kernels: each is listed for every op, and compiled once
    for op, target in itertools.product(ops, targets):
        launches = launches_of(op, (*op.shapes, *op.test_shapes), target)
        for launch in launches if thorough else _most_demanding(launches):
            kernel = kernel_of(op, launch.kernel)
            if target not in kernel.targets:
                continue
            known = (launch.key, target)
            compiled = done[known] if known in done else done.setdefault(known, compile_for(launch, target))
            problem = compiled.problem
            yield op.name, compiled, "" if kernel.spills and "spill" in problem else problem


def _most_demanding(launches: list[Launch]) -> list[Launch]:
    best: dict[tuple[str, str], Launch] = {}
    for launch in launches:
        group = (launch.kernel, str(sorted({kind for kind in launch.signature.values() if kind.startswith("*")})))
        if group not in best or launch.size > best[group].size:
            best[group] = launch
    return list(best.values())


def main() -> None:
    """`python -m sublight.xray.compile [--all-targets]`: a line a kernel, exit 1 where one has a problem."""
    import os
    import sys

    if os.environ.get("TRITON_INTERPRET") == "1":
        sys.exit("sublight: TRITON_INTERPRET=1 makes kernels that cannot be compiled: unset it")
    from sublight.ops import OPS

    everything = "--all-targets" in sys.argv[1:]
    targets = tuple(TARGETS) if everything else (90,)
    failed = count = 0
    for owner, compiled, problem in check(OPS, targets, thorough=everything):
        launch = compiled.launch
        pointers = "/".join(sorted({kind for kind in launch.signature.values() if kind.startswith("*")}))
        blocks = " ".join(f"{name}={value}" for name, value in launch.constants.items())
        print(
            f"{owner:<11} {launch.kernel:<26} {pointers:<12} sm_{compiled.target:<3} {compiled.registers:>3} registers "
            f"{compiled.shared_bytes:>6} B shared  {launch.options.get('num_warps', 4):>2} warps  {blocks}  {problem}",
            flush=True,
        )
        count += 1
        failed += bool(problem)
    print(f"{count - failed} of {count} kernels compile, fit, and spill nothing unexplained")
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
