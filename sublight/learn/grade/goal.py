"""The goal: the time below which nobody goes at its size, and whether a submission's code allows enough of that."""

from __future__ import annotations

import contextlib

from sublight.cost import Cost
from sublight.gpus import Gpu, UnknownFigure, memory_peak, theoretical_peak
from sublight.learn.verdict import Fault, Verdict
from sublight.results import Limit, Limits

LITTLE_BYTES = 1024  # for one program of many: starting it takes longer than its work
MANY = 4096  # programs
BY_MEMORY = "nothing but device memory holds it back"
ABOVE_LIMIT = 1.02  # more than this of the limit means that the work was not done


def floor_s(gpu: Gpu, cost: Cost) -> float:
    """The largest of bytes over the memory's rate and products over the peak of the units that compute them.

    >>> from sublight.gpus import find
    >>> f"{floor_s(find('h200'), Cost(read_bytes=0, write_bytes=0, flops={'matmul_fp16': 1e12})) * 1e3:.2f} ms"
    '1.01 ms'
    """
    times = [cost.bytes / _memory_rate(gpu, cost.read_bytes, cost.write_bytes)]
    for name, flops in cost.flops.items():
        unit, _, dtype = name.partition("_")
        with contextlib.suppress(UnknownFigure):
            times += [flops / theoretical_peak(gpu, dtype).value] if unit == "matmul" else []
    return max(times)


def _memory_rate(gpu: Gpu, read_bytes: int, write_bytes: int) -> float:
    """The memory rate of a kernel's roof: what was reached on such a GPU, else the vendor's figure."""
    reached = tuple(Limit(name=name, unit="B/s", value=rate) for name, rate in gpu.reached.items())
    known = Limits(device=gpu.name, kind="cuda", limits=reached).memory_rate(read_bytes, write_bytes)
    return known or memory_peak(gpu).value


def held_to_goal(verdict: Verdict) -> list[Fault]:
    """What a correct submission lacks; empty where its code allows what the goal asks."""
    case, fraction = verdict.goal_case, verdict.fraction
    for kernel in verdict.kernels:
        if verdict.is_unknown(kernel):
            text = f"how much {kernel.name} reads and writes cannot be told: {kernel.unfollowed}"
            return [
                Fault(kind="goal", text=f"{text}; let more programs do less each, in loops of known turns", case=case)
            ]
    if fraction is None:
        why = "; ".join(kernel.sentence for kernel in verdict.kernels) or "no kernel was launched at this size"
        return [Fault(kind="goal", text=f"what it reaches cannot be predicted: {why}", case=case)]
    if fraction > ABOVE_LIMIT:
        text = f"it would reach {fraction:.2f} of the limit, which cannot be: at this size it leaves out some work"
        return [Fault(kind="launch", text=text, case=case)]
    for kernel in verdict.kernels:
        if kernel.spill_bytes:
            text = f"{kernel.name} spills {kernel.spill_bytes:,} bytes a thread, which the bound does not count"
            return [Fault(kind="goal", text=f"{text}: take a smaller block, or more warps (num_warps=8)", case=case)]
    if fraction < verdict.goal_fraction:
        slowest = max(verdict.kernels, key=lambda kernel: kernel.seconds or 0.0)
        reached = f"{fraction:.2f}" if fraction >= 0.01 else f"{fraction:.1g}"
        text = f"its code allows {reached} of the {verdict.gpu}'s limit, the goal is {verdict.goal_fraction:g}"
        launches = len(verdict.kernels)
        of = f"{launches} launches one after the other, the slowest: " if launches > 1 else ""
        advice = _advice(verdict, fraction)
        return [Fault(kind="goal", text=f"{text}: {of}{slowest.name}: {slowest.sentence}{advice}", case=case)]
    return []


def _advice(verdict: Verdict, fraction: float) -> str:
    """What follows from the figures of the table for what is to be changed; empty where that is not plain."""
    most = max(kernel.programs for kernel in verdict.kernels)
    if most > MANY and (each := verdict.least_bytes // most) < LITTLE_BYTES:
        return f". Of what must move, each of {most:,} programs has {each:,} bytes: start fewer, with larger blocks"
    if all(kernel.sentence.startswith(BY_MEMORY) for kernel in verdict.kernels):
        how = "read each value once, write it once, keep the rest in registers"
        return f". That is memory traffic, {1 / fraction:.3g} times as long as the limit's: {how}"
    return ""
