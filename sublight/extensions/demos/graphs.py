"""One function as a TorchScript graph, as dynamo's FX graph and as a CUDA graph: what each holds, forgets and costs."""

from __future__ import annotations

import ctypes
import re
import statistics
import time
import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from sublight.extensions.demos.demo import Cell, Demo, Figures, Table
from sublight.extensions.demos.gpu import Gpu
from sublight.extensions.driver import call

if TYPE_CHECKING:
    import torch

SIZE = 64  # small, so that what a call costs beside its arithmetic shows
ROUNDS, CALLS = 7, 20
_KERNEL_NODE = 0  # CU_GRAPH_NODE_TYPE_KERNEL
KINDS = ("kernel", "memcpy", "memset", "host", "graph", "empty")  # the driver's numbers


def function(x: torch.Tensor, scale: float) -> torch.Tensor:
    """The function to capture: a product, and a branch that Python decides."""
    import torch

    y = torch.relu(x @ x)
    if scale > 1:
        return y * scale + 1
    return y - 1


class Dynamo:
    """A back end for torch.compile that runs dynamo's graphs uncompiled, and keeps them."""

    def __init__(self) -> None:
        import torch

        self.graphs: list[torch.fx.GraphModule] = []
        self.call = torch.compile(function, backend=self._keep, dynamic=False)

    def _keep(self, graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Callable[..., Any]:
        self.graphs.append(graph)
        return graph.forward


def traced(x: torch.Tensor, scale: float) -> Any:
    import torch

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # TorchScript is no longer developed, and the tracer says what it bakes in
        return torch.jit.trace(lambda argument: function(argument, scale), (x,))


def script_nodes(script: Any) -> list[str]:
    """The lines of the TorchScript graph that call an operator."""
    return [node.kind() for node in script.graph.nodes() if node.kind().startswith("aten::")]


def fx_nodes(graph: torch.fx.GraphModule) -> list[str]:
    """The FX graph's calls, without its inputs and outputs."""
    return [
        str(getattr(node.target, "__name__", node.target)) for node in graph.graph.nodes if node.op.startswith("call_")
    ]


class KernelNode(ctypes.Structure):
    """CUDA_KERNEL_NODE_PARAMS_v2"""

    _fields_ = (
        ("function", ctypes.c_void_p),
        ("grid", ctypes.c_uint * 3),
        ("threads", ctypes.c_uint * 3),
        ("shared_bytes", ctypes.c_uint),
        ("arguments", ctypes.c_void_p),
        ("extra", ctypes.c_void_p),
        ("kernel", ctypes.c_void_p),
        ("context", ctypes.c_void_p),
    )


def cuda_nodes(graph: int) -> list[str]:
    """The nodes of a captured graph, in the driver's order: a kernel's name and its grid."""
    count = ctypes.c_size_t()
    call("cuGraphGetNodes", ctypes.c_void_p(graph), None, ctypes.byref(count))
    nodes = (ctypes.c_void_p * count.value)()
    call("cuGraphGetNodes", ctypes.c_void_p(graph), nodes, ctypes.byref(count))
    described = []
    for node in nodes:
        kind = ctypes.c_int()
        call("cuGraphNodeGetType", ctypes.c_void_p(node), ctypes.byref(kind))
        if kind.value != _KERNEL_NODE:
            described.append(KINDS[kind.value] if kind.value < len(KINDS) else f"node of kind {kind.value}")
            continue
        launch, name = KernelNode(), ctypes.c_char_p()
        call("cuGraphKernelNodeGetParams_v2", ctypes.c_void_p(node), ctypes.byref(launch))
        query = ("cuFuncGetName", launch.function) if launch.function else ("cuKernelGetName", launch.kernel)
        call(query[0], ctypes.byref(name), ctypes.c_void_p(query[1]))
        described.append(f"{plain_name((name.value or b'?').decode())[:48]} {'x'.join(map(str, launch.grid))}")
    return described


def plain_name(mangled: str) -> str:
    """The names in a C++ symbol, without its types.

    >>> plain_name("_ZN2at6native29vectorized_elementwise_kernelILi4EEEvv"), plain_name("gemm_kernel")
    ('at::native::vectorized_elementwise_kernel', 'gemm_kernel')
    """
    if not (start := re.match(r"_ZN?", mangled)):
        return mangled
    names, at = [], start.end()
    while length := re.match(r"\d+", mangled[at:]):
        at += length.end() + int(length[0])
        names.append(mangled[at - int(length[0]) : at])
    return "::".join(names) or mangled


def captured(x: torch.Tensor, scale: float) -> tuple[Any, torch.Tensor]:
    """The graph, not yet made executable, and the tensor that each replay fills."""
    import torch

    side = torch.cuda.Stream()
    with torch.cuda.stream(side):  # the first call allocates workspaces, which is not allowed during capture
        function(x, scale)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph(keep_graph=True)
    with torch.cuda.graph(graph):
        out = function(x, scale)
    return graph, out


def _contents(name: str, what: str, nodes: list[str]) -> tuple[Cell, ...]:
    return name, what, len(nodes), ", ".join(nodes)


def tables(device: str) -> tuple[Table, ...]:
    import torch

    x = torch.randn(SIZE, SIZE, device=device, generator=torch.Generator(device).manual_seed(0)) / SIZE
    dynamo, script = Dynamo(), traced(x, 2.0)
    dynamo.call(x, 2.0)
    contents = [
        _contents("TorchScript", "operators, for an interpreter in C++", script_nodes(script)),
        _contents("dynamo's FX graph", "Python's calls, for a compiler", fx_nodes(dynamo.graphs[0])),
    ]
    works: list[tuple[str, Callable[[], Any]]] = [
        ("Python, op by op", lambda: function(x, 2.0)),
        ("TorchScript", lambda: script(x)),
        ("FX graph, behind dynamo's guards", lambda: dynamo.call(x, 2.0)),
    ]
    other = x + 1 / SIZE
    changes = [_changes("TorchScript", lambda given, scale: script(given), x, other)]
    if device == "cuda":
        graph, out = captured(x, 2.0)
        contents.append(
            _contents("CUDA graph", "launches, with grid and addresses", cuda_nodes(graph.raw_cuda_graph()))
        )

        def replay(argument: torch.Tensor, scale: float) -> torch.Tensor:
            graph.replay()
            return out

        works.append(("CUDA graph", graph.replay))
        changes.append(_changes("CUDA graph", replay, x, other))
    times = tuple((name, _call_s(work, device)) for name, work in works)
    changes.insert(1, _changes("dynamo's FX graph", dynamo.call, x, other))
    return (
        Table(
            title="What each graph of relu(x @ x) * scale + 1 holds",
            columns=(("graph", ""), ("its nodes are", ""), ("nodes", "count"), ("which", "")),
            rows=tuple(contents),
        ),
        Table(
            title="Called again with something else: is the result right?",
            columns=(("graph", ""), ("the tensor's values", ""), ("another tensor", ""), ("the other branch", "")),
            rows=tuple(changes),
            note=f"dynamo checks its guards at each call, and made {len(dynamo.graphs)} graphs: one for each branch. "
            "The others hold what was seen when they were made.",
        ),
        Table(
            title=f"One call, {SIZE} x {SIZE} fp32, host and {device.upper()}",
            columns=(("", ""), ("time", "s")),
            rows=times,
        ),
    )


def _changes(name: str, run: Callable[[Any, float], Any], x: torch.Tensor, other: torch.Tensor) -> tuple[Cell, ...]:
    """Whether results are still right after each change of an input; x gets its old values back."""
    kept = x.clone()
    verdicts = []
    for argument, scale, values in ((x, 2.0, other), (other, 2.0, None), (x, 0.5, None)):
        if values is not None:
            x.copy_(values)
        verdicts.append("right" if run(argument, scale).allclose(function(argument, scale), atol=1e-4) else "wrong")
        x.copy_(kept)
    return name, *verdicts


def _call_s(work: Callable[[], Any], device: str) -> float:
    """Seconds of a call: many in a row, the last one awaited; the median of several rounds after one that warms up."""
    import torch

    def wait() -> None:
        if device == "cuda":
            torch.cuda.synchronize()

    samples = []
    for _ in range(ROUNDS):
        wait()
        start = time.perf_counter()
        for _ in range(CALLS):
            work()
        wait()
        samples.append((time.perf_counter() - start) / CALLS)
    return statistics.median(samples)


def run(gpu: Gpu) -> Figures:
    return Figures(tables=tables("cuda"))


def offline() -> Figures:
    try:
        import torch  # noqa: F401
    except ImportError:
        return Figures(missing=("no PyTorch: pip install torch",))
    return Figures(tables=tables("cpu"), missing=("CUDA graph: needs a GPU",))


GRAPHS = Demo(
    name="graphs",
    question="What are a TorchScript graph, dynamo's FX graph and a CUDA graph of one function to each other?",
    expect="TorchScript and FX hold operators and stand before the launches: one for an interpreter in C++, one in "
    "Python's own terms for a compiler, with guards that notice another branch. A CUDA graph stands behind them: "
    "launches with their grids and addresses, nothing of Python, the shortest call, and it is right only where nothing "
    "but the values in its own tensors changes.",
    run=run,
    offline=offline,
)
