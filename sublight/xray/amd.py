"""Compile our kernels for AMD's GPUs, which are not here, with the back end that Triton's wheel carries.

    python -m sublight.xray.amd [gfx942|gfx950] [OP …]

A line a kernel and target: vector and scalar registers, what is spilled, local memory. What is written in NVIDIA's
assembly is left out of a kernel by `takes_ptx`, or, where a whole kernel is (two probes of `limits`, Gluon's for
Hopper), the kernel is: the list says so. That a kernel compiles is no proof that it is right or fast there.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any

from sublight.backend.device import PLAIN, PRETEND, Facts
from sublight.backend.record import Launch

WAVEFRONT, MOST_THREADS = 64, 1024  # lanes of a wavefront, threads of a work group
LOCAL_BYTES = {"gfx942": 64 * 1024, "gfx950": 160 * 1024}  # of a compute unit, as gpus.toml has it
PLANS = {
    gfx: Facts(capability=PLAIN, multiprocessors=units, shared_bytes=LOCAL_BYTES[gfx], backend="hip")
    for gfx, units in (("gfx942", 304), ("gfx950", 256))
}
NVIDIA_ONLY = {"_shared_chase_kernel", "_shared_read_kernel"}  # of limits: written in PTX as a whole
_COUNT = re.compile(r"\.(vgpr_count|sgpr_count|vgpr_spill_count|sgpr_spill_count):\s+(\d+)")


@dataclass(frozen=True, slots=True, kw_only=True)
class AmdCompiled:
    """A kernel's compiled self on an AMD GPU, or why there is none."""

    kernel: str
    gfx: str
    vgprs: int = 0
    sgprs: int = 0
    spills: int = 0  # registers
    local_bytes: int = 0
    threads: int = 0
    error: str = ""

    @property
    def problem(self) -> str:
        """Why it could not run there."""
        if self.error:
            return self.error
        if self.local_bytes > LOCAL_BYTES[self.gfx]:
            return f"{self.local_bytes} bytes of local memory, a compute unit has {LOCAL_BYTES[self.gfx]}"
        if self.threads > MOST_THREADS:
            return f"{self.threads} threads a program, a work group has {MOST_THREADS}"
        return ""


def counts(assembly: str) -> dict[str, int]:
    """What AMD's assembler notes of a kernel.

    >>> counts("    .sgpr_count:     18\\n    .sgpr_spill_count: 0\\n    .vgpr_count:     7\\n")
    {'sgpr_count': 18, 'sgpr_spill_count': 0, 'vgpr_count': 7}
    """
    return {name: int(number) for name, number in _COUNT.findall(assembly)}


def compile_for(launch: Launch, gfx: str) -> AmdCompiled:
    """About a second, and no GPU."""
    from sublight.errors import BadInput
    from sublight.xray.build import amd_options, compiled

    threads = WAVEFRONT * int(amd_options(launch.options).get("num_warps", 4))
    try:
        kernel: Any = compiled(launch, gfx)
    except BadInput as error:
        return AmdCompiled(kernel=launch.kernel, gfx=gfx, threads=threads, error=str(error).splitlines()[0])
    numbers = counts(kernel.asm["amdgcn"])
    return AmdCompiled(
        kernel=launch.kernel,
        gfx=gfx,
        vgprs=numbers.get("vgpr_count", 0),
        sgprs=numbers.get("sgpr_count", 0),
        spills=numbers.get("vgpr_spill_count", 0) + numbers.get("sgpr_spill_count", 0),
        local_bytes=int(kernel.metadata.shared),
        threads=threads,
    )


def launches(gfx: str, names: Collection[str] = ()) -> Iterator[tuple[str, Launch]]:
    """Of each kernel and data type the most demanding launch that our ops make of their shapes there, of all ops and
    the probes of `limits`, or of the ops of these names."""
    from sublight.ops import OPS
    from sublight.xray import compile as xray

    plan = PLANS[gfx]
    for launch in () if names else xray.limit_launches(PLAIN, plan):
        yield "limits", launch
    for op in OPS:
        if names and op.name not in names:
            continue
        for launch in xray.most_demanding(xray.launches_of(op, (*op.shapes, *op.test_shapes), PLAIN, plan)):
            yield op.name, launch


def main() -> None:
    """Exit 1 where a kernel does not compile or could not run."""
    import argparse
    import os
    import sys

    from sublight.cost import COSTS
    from sublight.errors import nearest

    parser = argparse.ArgumentParser(prog="python -m sublight.xray.amd", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("word", nargs="*", metavar="gfx942|gfx950|OP", help="one of the two GPUs, and these ops alone")
    words = parser.parse_args().word
    if os.environ.get("TRITON_INTERPRET") == "1":
        sys.exit("sublight: TRITON_INTERPRET=1 makes kernels that cannot be compiled: unset it")
    wanted = [word for word in words if word in PLANS] or list(PLANS)
    names = [word for word in words if word not in PLANS]
    known = list(COSTS)  # the ops by name; the ops themselves are imported below
    if unknown := next((name for name in names if name not in known), ""):
        parser.error(f"unknown op {unknown!r}: use {nearest(unknown, known)}")
    PRETEND.set(PLANS[wanted[0]])  # before ops are imported: what they hold of PTX is decided then
    failed = count = 0
    done: set[str] = set()  # ops share kernels
    for gfx in wanted:
        for owner, launch in launches(gfx, names):
            key = f"{gfx} {launch.key}"
            if key in done:
                continue
            done.add(key)
            if launch.kernel in NVIDIA_ONLY or launch.jit.is_gluon():
                print(f"{owner:<14} {launch.kernel:<30} {gfx}  left out: written for NVIDIA's GPUs", flush=True)
                continue
            built = compile_for(launch, gfx)
            print(
                f"{owner:<14} {launch.kernel:<30} {gfx}  {built.vgprs:>3} vector, {built.sgprs:>3} scalar registers  "
                f"{built.spills:>3} spilled  {built.local_bytes:>6} B local  {built.problem}",
                flush=True,
            )
            count += 1
            failed += bool(built.problem)
    print(f"{count - failed} of {count} kernels compile for {' and '.join(wanted)}, and fit")
    sys.exit(1 if failed or not count else 0)  # what was not compiled was not shown to compile


if __name__ == "__main__":
    main()
