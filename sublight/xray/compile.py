"""Compile our kernels for GPUs that are not here, and read off registers, spills, shared memory and narrow accesses.

What to compile is recorded from the launchers themselves: they run on tensors without data, and every launch is noted
with its types, constants and options instead of being made. So a specialisation cannot be forgotten.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import itertools
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from sublight.backend.record import Launch, noting
from sublight.correct import Inputs
from sublight.cost import Shape
from sublight.errors import nearest
from sublight.gpus import Gpu
from sublight.gpus import find as find_gpu
from sublight.op import Kernel, Op
from sublight.xray import binary, build, ledger
from sublight.xray.occupancy.sm import SMS

if TYPE_CHECKING:
    from sublight.backend.device import Facts

TARGETS = {80: "a100", 90: "h200", 100: "b200", 120: "rtx5090"}
MAX_SHARED_BYTES = {target: SMS[target].shared_bytes_per_block for target in TARGETS}
DTYPES = ("bfloat16", "float32")  # fp16 compiles as bf16 does
_ACCESS = re.compile(r"\b(?:ld|st)\.(?:\w+\.)*?global\S*?(?:\.v([248]))?\.(?:b|u|s|f|bf)(8|16)\b")

Trouble = Literal["shared", "spills", "narrow"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Compiled:
    """A kernel's compiled self."""

    launch: Launch
    target: int
    registers: int
    spill_bytes: int
    shared_bytes: int
    narrow: tuple[str, ...] = ()  # accesses below 4 bytes a lane; empty, too, where nobody looked

    @property
    def problems(self) -> dict[Trouble, str]:
        """Why this must not ship, unless the kernel's record says why it may."""
        found: dict[Trouble, str] = {}
        room = MAX_SHARED_BYTES[self.target]
        if self.shared_bytes > room:
            found["shared"] = f"{self.shared_bytes} bytes of shared memory, {TARGETS[self.target]} has {room}"
        if self.spill_bytes:
            found["spills"] = f"spills {self.spill_bytes} bytes a thread"
        if self.narrow:
            found["narrow"] = ", ".join(self.narrow)
        return found

    def problem(self, kernel: Kernel | None = None) -> str:
        """What its record does not explain; empty where nothing is wrong."""
        explained = {"spills": kernel.spills, "narrow": kernel.narrow} if kernel else {}
        return "; ".join(words for trouble, words in self.problems.items() if not explained.get(trouble))


@contextlib.contextmanager
def recording(target: int, gpu: Gpu | None = None, plan: Facts | None = None) -> Iterator[list[Launch]]:
    """Note Triton launches instead of making them, as planned for that GPU; the tensors may be on any device."""
    from sublight.backend.device import PRETEND, Facts

    plan = plan or Facts(capability=target, shared_bytes=SMS[target].shared_bytes_per_block)
    if gpu is not None and gpu.sms:
        plan = replace(plan, multiprocessors=gpu.sms)
    launches: list[Launch] = []
    token = PRETEND.set(plan)
    try:
        with noting(target, launches):
            yield launches
    finally:
        PRETEND.reset(token)


def launches_of(op: Op, shapes: tuple[Shape, ...], target: int, plan: Facts | None = None) -> list[Launch]:
    """Every distinct specialisation that these shapes take on that GPU, forward and backward."""
    found: dict[str, Launch] = {}
    for shape, dtype in itertools.product(shapes, DTYPES):
        with recording(target, plan=plan) as launches:
            make(op.at(shape), op.inputs(shape, dtype, "meta", 0))
        found.update({launch.key: launch for launch in launches})
    return list(found.values())


def make(op: Op, inputs: Inputs) -> None:
    """Every launch that the op's providers make of these inputs: plain, with gaps between rows, variants, backward."""
    import torch

    gapped = functools.partial(_gapped, flat=op.keys == ("numel",))
    for provider in op.providers.values():
        if provider.why_not(*inputs):
            continue
        result = provider.launch(*inputs)
        provider.launch(*map(gapped, inputs))
        for variant in provider.variants:
            variant(*inputs)
        if provider.backward:
            outputs = result if isinstance(result, tuple) else (result,)
            grads = [torch.ones_like(y) for y in outputs if y.is_floating_point()]
            provider.backward(*grads, *inputs)
            provider.backward(*map(gapped, grads), *map(gapped, inputs))


def limit_launches(target: int, plan: Facts | None = None) -> list[Launch]:
    """The kernels that measure this machine's limits, as `limits` launches them."""
    import torch

    from sublight.limits import vector as vector_limit
    from sublight.limits.kernels import cache, device_memory, launch, vector

    x = torch.empty(2**28, device="meta")
    index = torch.empty(2**24, device="meta", dtype=torch.int32)
    with recording(target, plan=plan) as launches:
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
        for _, dtype, _ in vector_limit.KINDS:
            vector.multiply_add(torch.empty(2**20, device="meta", dtype=getattr(torch, dtype)), 200, 2112)
        launch.empty(x)
    return list({each.key: each for each in launches}.values())


def compile_for(launch: Launch, target: int, *, look_for_narrow: bool = False) -> Compiled:
    """About a second, and no GPU."""
    kernel = build.compiled(launch, target)
    used = binary.usage(kernel.asm["cubin"])[kernel.metadata.name]
    return Compiled(
        launch=launch,
        target=target,
        registers=used["REG"],
        spill_bytes=used["STACK"],  # Triton indexes no arrays: what is on the stack was spilled
        shared_bytes=int(kernel.metadata.shared),
        narrow=_narrow(kernel, target) if look_for_narrow and has_narrow(kernel.asm["ptx"]) else (),
    )


def has_narrow(ptx: str) -> bool:
    """Whether to look at the instructions, which takes longer: PTX says the width, not whether lanes differ.

    >>> has_narrow("ld.global.v4.b32 {...}"), has_narrow("st.global.v2.b16 [%rd1]"), has_narrow("@%p1 ld.global.b16")
    (False, False, True)
    """
    return any(int(count or 1) * int(bits) < 32 for count, bits in _ACCESS.findall(ptx))


def _narrow(kernel: Any, target: int) -> tuple[str, ...]:
    """2-byte loads at rows.py:31"""
    from sublight.xray.sass.findings import code_findings

    code = build.code_of_compiled(kernel, find_gpu(TARGETS[target]), name=kernel.metadata.name)
    findings = [each for each in code_findings(code) if each.id in ("narrow-load", "narrow-store")]
    at = [f"{Path(each.place.file).name}:{each.place.line}" if each.place else "an unknown line" for each in findings]
    return tuple(dict.fromkeys(f"{each.id} at {place}" for each, place in zip(findings, at, strict=True)))


def is_odd(launch: Launch) -> bool:
    """Whether there is a size or stride that 16 does not divide, which is all that Triton knows of a number.

    What such numbers lead to begins anywhere, so that Triton moves it element by element.
    """
    numbers = [name for name, kind in launch.signature.items() if str(kind).startswith("i")]
    return has_ones(launch) or any(name not in launch.aligned for name in numbers)


def has_ones(launch: Launch) -> bool:
    """Whether a size is one, which Triton makes a constant: a number, and no tensor."""
    fixed = {parameter.name for parameter in launch.jit.params if parameter.is_constexpr}
    return any(name not in fixed for name in launch.constants)


def kernel_of(op: Op, name: str) -> Kernel:
    """The record behind a launch; a kernel that no record lists is a mistake."""
    for kernel in op.kernels:
        if kernel.name == name:
            return kernel
    raise LookupError(f"{op.name} launches {name}, which its record does not list")


def _gapped(x: Any, *, flat: bool) -> Any:
    """The same values, with rows that do not follow one another in memory; a weight or bias is left as it is."""
    if x.dim() == 1 and flat:
        x = x[: x.shape[0] // 2 * 2].view(2, -1) if x.shape[0] > 1 else x.view(1, 1)
    if x.dim() < 2:
        return x
    wide = x.new_zeros(*x.shape[:-1], 2 * x.shape[-1])[..., : x.shape[-1]]
    return wide.copy_(x)


class Compiler:
    """Compiles each specialisation once, and none that `known` has figures of."""

    def __init__(self, known: Mapping[str, ledger.Figures] | None = None) -> None:
        self.known = known or {}
        self.figures: dict[str, ledger.Figures] = {}  # of all that was asked for
        self.compiled = 0

    def __call__(self, launch: Launch, target: int, *, look_for_narrow: bool = False) -> Compiled:
        key = ledger.key_of(launch, target, look_for_narrow=look_for_narrow)
        figures = self.figures.get(key) or self.known.get(key)
        if figures is None:
            self.compiled += 1
            compiled = compile_for(launch, target, look_for_narrow=look_for_narrow)
            figures = compiled.registers, compiled.spill_bytes, compiled.shared_bytes, compiled.narrow
        self.figures[key] = figures
        registers, spill_bytes, shared_bytes, narrow = figures
        return Compiled(
            launch=launch,
            target=target,
            registers=registers,
            spill_bytes=spill_bytes,
            shared_bytes=shared_bytes,
            narrow=narrow,
        )


def check(
    ops: tuple[Op, ...],
    targets: tuple[int, ...],
    *,
    thorough: bool,
    quick: bool = False,
    compiler: Compiler | None = None,
) -> Iterator[tuple[str, Compiled, str]]:
    """Compile and judge: every specialisation; or of each kernel and data type (`quick`: each kernel) the largest, and
    of those with a size of one."""
    compiler = compiler or Compiler()  # ops share kernels: each is listed for every op, compiled once
    for target in targets:
        for launch in limit_launches(target):
            compiled = compiler(launch, target, look_for_narrow=True)
            yield "limits", compiled, compiled.problem()
    for op, target in itertools.product(ops, targets):
        launches = launches_of(op, (*op.shapes, *op.test_shapes), target)
        even = {_group(launch) for launch in launches if not is_odd(launch)}
        if not thorough:
            ones = [launch for launch in launches if has_ones(launch)]
            chosen = [each for part in (launches, ones) for each in most_demanding(part, by_type=not quick)]
            launches = list({launch.key: launch for launch in chosen}.values())
        for launch in launches:
            kernel = kernel_of(op, launch.kernel)
            if target not in kernel.targets:
                continue
            # a size of one explains narrow accesses; an odd one does if there is an even one that has no such excuse
            look = not kernel.narrow and not has_ones(launch) and not (is_odd(launch) and _group(launch) in even)
            compiled = compiler(launch, target, look_for_narrow=look)
            yield op.name, compiled, compiled.problem(kernel)


def most_demanding(launches: list[Launch], *, by_type: bool = True) -> list[Launch]:
    """For each kernel and data type the launch that holds most."""
    best: dict[tuple[str, str], Launch] = {}
    for launch in launches:
        group = _group(launch) if by_type else (launch.kernel, "")
        if group not in best or launch.size > best[group].size:
            best[group] = launch
    return list(best.values())


def _group(launch: Launch) -> tuple[str, str]:
    return launch.kernel, str(sorted({kind for kind in launch.signature.values() if kind.startswith("*")}))


def _arguments(names: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m sublight.xray.compile", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("op", nargs="*", metavar="OP", help="ops to compile, as in softmax; all unless named")
    parser.add_argument(
        "--quick", action="store_true", help="of each kernel its largest launch, by the ledger where it has it"
    )
    parser.add_argument("--all-targets", action="store_true", help="every GPU that a kernel is for; else an H200")
    parser.add_argument("--write", action="store_true", help="write the ledger; with ops, their rows over what it has")
    given = parser.parse_args()
    if unknown := next((name for name in given.op if name not in names), ""):
        parser.error(f"unknown op {unknown!r}: use {nearest(unknown, names)}")
    return given


def main() -> None:
    """`python -m sublight.xray.compile [--quick | --all-targets] [--write]`: a line a kernel; exit 1 for a problem.

    With `--quick`, what the ledger has is not compiled; `--write` compiles all the same, and writes the ledger.
    """
    import os
    import sys

    if os.environ.get("TRITON_INTERPRET") == "1":
        sys.exit("sublight: TRITON_INTERPRET=1 makes kernels that cannot be compiled: unset it")
    from sublight.ops import OPS

    given = _arguments([op.name for op in OPS])
    everything, quick, is_written = given.all_targets, given.quick, given.write
    ops = tuple(op for op in OPS if not given.op or op.name in given.op)
    kept = ledger.read()
    compiler = Compiler(kept if quick and not is_written else None)
    targets = tuple(TARGETS) if everything else (90,)
    failed = count = 0
    for owner, compiled, problem in check(ops, targets, thorough=everything, quick=quick, compiler=compiler):
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
    if is_written:
        ledger.write({**kept, **compiler.figures} if given.op else compiler.figures)
    elif wrong := [key for key, figures in compiler.figures.items() if kept.get(key, figures) != figures]:
        print(f"the ledger is not what was found here, for {len(wrong)} kernels, as {wrong[0]}: write it anew")
        failed += 1
    elif quick and kept and compiler.compiled:
        print(f"{compiler.compiled} kernels are not in the ledger: python -m sublight.xray.compile --quick --write")
    print(f"{count - failed} of {count} kernels compile, fit, and have no spill or narrow access unexplained")
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
