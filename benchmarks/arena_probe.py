"""Does it matter to a kernel who made its memory? Solutions timed by graphs, in memory of several kinds.

    python benchmarks/arena_probe.py                          rms_norm and paged_decode, about 20 s
    python benchmarks/arena_probe.py gemv --json probe.json

This process times; another one makes or opens memory beside it. `past L1` is the same kernel in PyTorch's memory with
every load told to pass the L1 cache by: where another row is as slow, that memory is not cached there.
"""

from __future__ import annotations

import argparse
import ast
import importlib.util
import multiprocessing
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from multiprocessing.connection import Connection
from multiprocessing.reduction import recv_handle, send_handle
from pathlib import Path
from typing import Any

from sublight import timing
from sublight.learn.exercises import find
from sublight.learn.grade import gpu_memory
from sublight.learn.grade.arena import Plan
from sublight.learn.grade.gpu_memory import GpuMemory, Way
from sublight.results import write_json

SMALL_BYTES = 8 << 20  # of a tensor that every program may read again
TIME_S = 0.1
WAYS: tuple[Way, ...] = ("descriptor", "ipc")


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("names", nargs="*", default=["rms_norm", "paged_decode"], help="exercises")
    options.add_argument("--json", type=Path, help="where to write the rows")
    args = options.parse_args()
    multiprocessing.set_start_method("spawn")
    ours, theirs = multiprocessing.Pipe()
    other = multiprocessing.Process(target=serve, args=(theirs,), daemon=True)
    other.start()
    rows = []
    for name in args.names:
        torch_s = 0.0
        print(f"{name} at {find(name).goal.timed_shape}", flush=True)  # type: ignore[union-attr]
        for kind, seconds in probed(name, ours, int(other.pid or 0)):
            torch_s = torch_s or (seconds if isinstance(seconds, float) else 0.0)
            rows.append({"name": name, "kind": kind, "seconds": seconds})
            words = f"{seconds * 1e6:9.1f} µs {seconds / torch_s:6.2f}" if isinstance(seconds, float) else seconds
            print(f"  {kind:58} {words}", flush=True)
    if args.json:
        write_json({"rows": rows}, args.json)
    ours.send(None)
    other.join()


def probed(name: str, ours: Connection, other: int) -> Iterator[tuple[str, float | str]]:
    """Each kind of memory, and a call's seconds in it, or why there are none."""
    import torch

    exercise = find(name)
    goal, problem = exercise.goal, exercise.problem()
    assert goal
    inputs = problem.inputs(goal.timed_shape, goal.dtype, "cuda", 1)
    outputs = problem.outputs(inputs)
    plan = Plan.of(inputs, outputs, 1)
    size_bytes = plan.inputs_bytes + plan.outputs_bytes
    call, past = (function_of(name, past_l1=each) for each in (False, True))

    def timed(call: Callable[..., None], place: Callable[[int], Any], keep: Callable[[Any], bool]) -> float:
        """Tensors that `keep` holds for lie in this memory, all others in PyTorch's."""
        with torch.no_grad():
            ((placed, results),) = plan.tensors(place(size_bytes))
            for tensor, x in zip(placed, inputs, strict=True):
                tensor.copy_(x)
            chosen = [a if keep(a) else b for a, b in zip((*placed, *results), (*inputs, *outputs), strict=True)]
            return timing.measure(partial(call, *chosen), time_limit_s=TIME_S).median_s

    def everything(tensor: Any) -> bool:
        return True

    def is_small(tensor: Any) -> bool:
        return bool(tensor.numel() * tensor.element_size() <= SMALL_BYTES)

    def is_large(tensor: Any) -> bool:
        return not is_small(tensor)

    def of_torch(size_bytes: int) -> Any:
        return torch.empty(size_bytes, dtype=torch.uint8, device="cuda")

    yield "PyTorch's", timed(call, of_torch, everything)
    yield "PyTorch's, loads past L1", tried(lambda: timed(past, of_torch, everything))
    for way in WAYS:
        kinds = (
            ("own", partial(made_here, way), everything),
            ("own, and opened by another process", partial(made_and_shared, way, ours, other), everything),
            ("another process's", partial(of_another, way, ours), everything),
            ("another process's, small tensors in PyTorch's", partial(of_another, way, ours), is_large),
            ("PyTorch's, small tensors in another process's", partial(of_another, way, ours), is_small),
        )
        for kind, place, keep in kinds:
            yield f"{way}: {kind}", tried(partial(in_memory, timed, call, place, keep, size_bytes))


def tried(call: Callable[[], float]) -> float | str:
    """A number, or the error in a line: the other rows go on."""
    try:
        return call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def in_memory(timed: Any, call: Any, place: Any, keep: Any, size_bytes: int) -> float:
    with place(size_bytes) as memory:
        return float(timed(call, memory.pages, keep))


@contextmanager
def made_here(way: Way, size_bytes: int) -> Iterator[GpuMemory]:
    memory = gpu_memory.make(size_bytes, way)
    try:
        yield memory
    finally:
        memory.close()


@contextmanager
def made_and_shared(way: Way, ours: Connection, other: int, size_bytes: int) -> Iterator[GpuMemory]:
    with made_here(way, size_bytes) as memory:
        ours.send(("open", memory.size_bytes, memory.handle))
        if not memory.handle:
            send_handle(ours, memory.descriptor, other)
        heard(ours)
        try:
            yield memory
        finally:
            ours.send(("close", 0, ""))
            heard(ours)


@contextmanager
def of_another(way: Way, ours: Connection, size_bytes: int) -> Iterator[GpuMemory]:
    ours.send(("make", size_bytes, way))
    whole_bytes, handle = heard(ours)
    descriptor = -1 if handle else recv_handle(ours)
    try:
        memory = gpu_memory.opened(whole_bytes, descriptor=descriptor, handle=handle)
        try:
            yield memory
        finally:
            memory.close()
    finally:
        ours.send(("close", 0, ""))
        heard(ours)


def heard(channel: Connection) -> Any:
    """The other process's answer; what went wrong there is raised here."""
    answer = channel.recv()
    if isinstance(answer, str):
        raise RuntimeError(answer)
    return answer


def serve(channel: Connection) -> None:
    """The other process: makes and opens memory as it is asked to."""
    memory: GpuMemory | None = None
    while order := channel.recv():
        do, size_bytes, word = order
        try:
            if do == "make":
                memory = gpu_memory.make(size_bytes, word)
                channel.send((memory.size_bytes, memory.handle))
                if not memory.handle:
                    send_handle(channel, memory.descriptor, 0)
                continue
            if do == "open":
                memory = gpu_memory.opened(size_bytes, descriptor=-1 if word else recv_handle(channel), handle=word)
                memory.pages(size_bytes)[:1].cpu()  # it is really mapped
            elif memory:
                memory.close()
            channel.send(())
        except Exception as error:
            channel.send(f"{type(error).__name__}: {error}")


class PastL1(ast.NodeTransformer):
    """Every tl.load gets a cache modifier that passes L1 by."""

    def visit_Call(self, node: ast.Call) -> ast.Call:
        self.generic_visit(node)
        if isinstance(node.func, ast.Attribute) and node.func.attr == "load":
            node.keywords.append(ast.keyword("cache_modifier", ast.Constant(".cg")))
        return node


def function_of(name: str, *, past_l1: bool) -> Callable[..., None]:
    """The solution's function, from a file: Triton reads a kernel's source."""
    source = find(name).solution()
    tree = ast.parse(source)
    file = Path(tempfile.mkdtemp()) / f"{name}.py"
    file.write_text(ast.unparse(PastL1().visit(tree)) if past_l1 else source, encoding="utf-8")
    spec = importlib.util.spec_from_file_location(f"probe_{name}_{past_l1}", file)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return getattr(module, name)  # type: ignore[no-any-return]


if __name__ == "__main__":
    main()
