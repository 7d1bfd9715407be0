"""Matrix products by cuBLASLt, by its fastest kernel for a size, with what follows them in the same launch.

PyTorch multiplies by the same library, takes the kernel that a heuristic puts first, and offers neither gelu that
keeps its input nor gelu's gradient. Here `tune` times the heuristic's first kernels against what the caller would do
otherwise, and `product` takes the fastest. The C interface is called by ctypes, on PyTorch's own handle and stream.
cuBLASLt counts by columns: a row-major product is asked for as its transpose.
"""

from __future__ import annotations

import ctypes
import functools
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, NamedTuple

import torch

WORKSPACE_BYTES = 32 * 2**20  # as much as PyTorch gives cuBLASLt on Hopper
_COMPUTE_32F, _SCALE_32F, _TRANSPOSED = 68, 0, 1
_TRANS_A, _TRANS_B, _EPILOGUE, _BIAS, _AUX, _AUX_LD = 3, 4, 7, 8, 11, 12  # attributes of a cublasLtMatmulDesc_t
_MOST_WORKSPACE, _REDUCTIONS, _ALIGNMENTS = 1, 3, (5, 6, 7, 8)  # attributes of a cublasLtMatmulPreference_t
_IN_FP32 = 2  # split-K adds its partial sums in fp32, never rounded to 16 bits first
_KINDS = {torch.bfloat16: 14, torch.float16: 2}
CANDIDATES = 16  # algorithms of the heuristic that are timed
ROUNDS, CALLS = 3, 3  # for each candidate: the best round counts, since another program may disturb one
CHECKED_ROWS, ALIKE = 1024, 2**-6  # bf16 rounds each value to 2**-9 of it: a wrong kernel is far outside
WARM_S = 0.3  # multiply so long before the first timing: a busy GPU has lower clocks, and other winners
_LOCK = threading.Lock()  # a description's pointers are set, then read by the launch


class Epilogue(IntEnum):
    """cublasLtEpilogue_t. GELU's and the bias's gradient in one launch are left out: four times as long on an H200."""

    NONE = 1
    BIAS = 4  # a @ b + bias
    GELU_BIAS = 164  # gelu(a @ b + bias), by tanh; its argument, a @ b + bias, is written to aux
    GELU_GRADIENT = 192  # a @ b times gelu's slope at aux


WITH_BIAS, WITH_AUX = (Epilogue.BIAS, Epilogue.GELU_BIAS), (Epilogue.GELU_BIAS, Epilogue.GELU_GRADIENT)


class _Algorithm(ctypes.Structure):
    """cublasLtMatmulHeuristicResult_t."""

    _fields_ = (
        ("data", ctypes.c_uint64 * 8),
        ("workspace_bytes", ctypes.c_size_t),
        ("status", ctypes.c_int),
        ("waves", ctypes.c_float),
        ("reserved", ctypes.c_int * 4),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Factor:
    """A matrix as it lies in memory."""

    rows: int
    cols: int
    apart: int  # elements from one row to the next, or from one column to the next where `by_columns`
    by_columns: bool

    @classmethod
    def of(cls, x: torch.Tensor) -> Factor | None:
        """How this matrix lies in memory; None where neither a row's nor a column's elements are neighbours."""
        rows, cols = x.shape
        if x.stride(1) == 1 and x.stride(0) >= cols:
            return cls(rows=rows, cols=cols, apart=x.stride(0), by_columns=False)
        if x.stride(0) == 1 and x.stride(1) >= rows:
            return cls(rows=rows, cols=cols, apart=x.stride(1), by_columns=True)
        return None


@functools.cache
def _library() -> ctypes.CDLL | None:
    """The libcublasLt that PyTorch has loaded; None without CUDA."""
    if not torch.version.cuda:
        return None
    try:
        return ctypes.CDLL(f"libcublasLt.so.{torch.version.cuda.split('.')[0]}")
    except OSError:
        return None


def why_not(a: torch.Tensor, b: torch.Tensor) -> str:
    """Why `product` does not take these factors; empty where it does."""
    if not a.is_cuda or a.device != b.device:
        return "cuBLASLt is for NVIDIA GPUs"
    if a.dtype not in _KINDS or b.dtype != a.dtype:
        return "cuBLASLt's epilogues are for bf16 and fp16"
    if Factor.of(a) is None or Factor.of(b) is None or a.shape[1] != b.shape[0]:
        return "the factors do not lie by rows or columns, or do not fit"
    if any(size % 8 for x in (a, b) for size in x.shape):
        return "cuBLASLt's epilogues need sizes that 8 divides"
    return "" if _library() is not None else "libcublasLt is not there"


class _Product:
    """One kind of product: its description, and the algorithms that cuBLASLt's heuristic puts first."""

    def __init__(self, kind: Kind) -> None:
        a, b, dtype, epilogue, alignment, _ = kind
        library = _library()
        assert library is not None
        self._lt = library
        rows, cols = a.rows, b.cols
        self.description = self._made("cublasLtMatmulDescCreate", _COMPUTE_32F, _SCALE_32F)
        # cuBLASLt's A is our b, its B our a: both transposed, as is the result
        self._describe(_TRANS_A, ctypes.c_int32(_TRANSPOSED if b.by_columns else 0))
        self._describe(_TRANS_B, ctypes.c_int32(_TRANSPOSED if a.by_columns else 0))
        self._describe(_EPILOGUE, ctypes.c_uint32(epilogue))
        if epilogue in WITH_AUX:
            self._describe(_AUX_LD, ctypes.c_int64(cols))
        self._kind = _KINDS[dtype]
        self._layouts = (self._layout(b), self._layout(a), self._layout_of(cols, rows, cols))
        preference = self._made("cublasLtMatmulPreferenceCreate")
        self._prefer(preference, _MOST_WORKSPACE, ctypes.c_uint64(WORKSPACE_BYTES))
        self._prefer(preference, _REDUCTIONS, ctypes.c_uint32(_IN_FP32))
        for each in _ALIGNMENTS:
            self._prefer(preference, each, ctypes.c_uint32(alignment))
        # the heuristic looks at pointers for their alignment alone
        if epilogue in WITH_BIAS:
            self._describe(_BIAS, ctypes.c_uint64(256))
        if epilogue in WITH_AUX:
            self._describe(_AUX, ctypes.c_uint64(256))
        self.algorithms = (_Algorithm * CANDIDATES)()
        count = ctypes.c_int(0)
        left, right, out = self._layouts
        status = library.cublasLtMatmulAlgoGetHeuristic(
            ctypes.c_void_p(torch.cuda.current_blas_handle()), self.description, left, right, out, out, preference,
            CANDIDATES, self.algorithms, ctypes.byref(count),
        )  # fmt: skip
        library.cublasLtMatmulPreferenceDestroy(preference)
        self.count = 0 if status else count.value  # none: cuBLASLt has no kernel for this

    def _made(self, name: str, *args: int) -> ctypes.c_void_p:
        handle = ctypes.c_void_p()
        _checked(name, getattr(self._lt, name)(ctypes.byref(handle), *args))
        return handle

    def _layout(self, x: Factor) -> ctypes.c_void_p:
        rows, cols = (x.rows, x.cols) if x.by_columns else (x.cols, x.rows)
        return self._layout_of(rows, cols, x.apart)

    def _layout_of(self, rows: int, cols: int, apart: int) -> ctypes.c_void_p:
        layout = ctypes.c_void_p()
        sizes = (ctypes.c_uint64(rows), ctypes.c_uint64(cols), ctypes.c_int64(apart))
        name = "cublasLtMatrixLayoutCreate"
        _checked(name, self._lt.cublasLtMatrixLayoutCreate(ctypes.byref(layout), self._kind, *sizes))
        return layout

    def _describe(self, attribute: int, value: Any) -> None:
        name = "cublasLtMatmulDescSetAttribute"
        size = ctypes.c_size_t(ctypes.sizeof(value))
        _checked(name, self._lt.cublasLtMatmulDescSetAttribute(self.description, attribute, ctypes.byref(value), size))

    def _prefer(self, preference: ctypes.c_void_p, attribute: int, value: Any) -> None:
        size = ctypes.c_size_t(ctypes.sizeof(value))
        name = "cublasLtMatmulPreferenceSetAttribute"
        _checked(name, self._lt.cublasLtMatmulPreferenceSetAttribute(preference, attribute, ctypes.byref(value), size))

    def launch(
        self, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, bias: torch.Tensor | None, aux: torch.Tensor | None,
        choice: int, workspace: torch.Tensor,
    ) -> None:  # fmt: skip
        one, zero = ctypes.c_float(1.0), ctypes.c_float(0.0)
        stream = torch.cuda.current_stream(a.device).cuda_stream
        left, right, result = self._layouts
        with _LOCK:
            if bias is not None:
                self._describe(_BIAS, ctypes.c_uint64(bias.data_ptr()))
            if aux is not None:
                self._describe(_AUX, ctypes.c_uint64(aux.data_ptr()))
            status = self._lt.cublasLtMatmul(
                ctypes.c_void_p(torch.cuda.current_blas_handle()), self.description,
                ctypes.byref(one), ctypes.c_void_p(b.data_ptr()), left, ctypes.c_void_p(a.data_ptr()), right,
                ctypes.byref(zero), ctypes.c_void_p(out.data_ptr()), result, ctypes.c_void_p(out.data_ptr()), result,
                ctypes.byref(self.algorithms[choice]), ctypes.c_void_p(workspace.data_ptr()),
                ctypes.c_size_t(WORKSPACE_BYTES), ctypes.c_void_p(stream),
            )  # fmt: skip
        _checked("cublasLtMatmul", status)


class LaunchFailed(RuntimeError):
    """cuBLASLt refused a launch; the message has its status, a number."""


def _checked(name: str, status: int) -> None:
    if status:
        raise LaunchFailed(f"{name} failed with status {status}")


class Kind(NamedTuple):
    """What an algorithm is chosen for: products that share all of this share the choice."""

    a: Factor
    b: Factor
    dtype: torch.dtype
    epilogue: Epilogue
    alignment: int
    device: torch.device


@functools.cache
def _chosen() -> dict[Kind, tuple[_Product, int]]:
    """The algorithm that `tune` chose for each kind of product, in this process."""
    return {}


@functools.cache
def _workspace(device: torch.device, stream: int) -> torch.Tensor:
    """A workspace for each stream: two products at once must not share one. It is never freed: graphs may hold it."""
    return _new_workspace(device)


def _new_workspace(device: torch.device) -> torch.Tensor:
    return torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=device)


def kind_of(
    a: torch.Tensor, b: torch.Tensor, epilogue: Epilogue, bias: torch.Tensor | None, aux: torch.Tensor | None,
    out: torch.Tensor | None = None,
) -> Kind | None:  # fmt: skip
    """The kind of this product; None where cuBLASLt does not take these tensors."""
    if (bias is not None) != (epilogue in WITH_BIAS) or (aux is not None) != (epilogue in WITH_AUX):
        raise ValueError(f"{epilogue.name} takes another set of bias and aux")
    left, right = Factor.of(a), Factor.of(b)
    if left is None or right is None or why_not(a, b):
        return None
    if out is not None and (out.dtype != a.dtype or not out.is_contiguous()):
        return None
    places = [x.data_ptr() for x in (a, b, bias, aux, out) if x is not None]
    alignment = next(size for size in (256, 128, 64, 32, 16, 8, 4, 2) if all(place % size == 0 for place in places))
    return Kind(left, right, a.dtype, epilogue, alignment, a.device)


def product(
    a: torch.Tensor,
    b: torch.Tensor,
    epilogue: Epilogue = Epilogue.NONE,
    *,
    bias: torch.Tensor | None = None,
    aux: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor | None:
    """a @ b, row-major, in `out` if there is one; bias and aux are read or written as the epilogue says. None where no
    timing chose it."""
    if not _chosen() or (kind := kind_of(a, b, epilogue, bias, aux, out)) is None:
        return None
    known, choice = _chosen().get(kind, (None, 0))
    if known is None:
        return None
    if out is None:
        out = torch.empty((a.shape[0], b.shape[1]), dtype=a.dtype, device=a.device)
    workspace = _workspace(a.device, torch.cuda.current_stream(a.device).cuda_stream)
    known.launch(a, b, out, bias, aux, choice, workspace)
    return out


def tune(
    a: torch.Tensor,
    b: torch.Tensor,
    epilogue: Epilogue = Epilogue.NONE,
    *,
    bias: torch.Tensor | None = None,
    aux: torch.Tensor | None = None,
    rival: Callable[[], torch.Tensor],
    beside: Callable[[], object] = lambda: None,
) -> dict[str, Any]:
    """Choose for products like this one: the fastest of the heuristic's first, with what must run `beside` it, if that
    is faster than the `rival`, and gives what that gives. Waits for the device; gives what was measured, in seconds."""
    kind = kind_of(a, b, epilogue, bias, aux)
    if kind is None:
        return {"choice": None, "why": why_not(a, b)}
    known = _Product(kind)
    out = torch.empty((a.shape[0], b.shape[1]), dtype=a.dtype, device=a.device)
    workspace = _new_workspace(a.device)

    def launch(choice: int) -> None:
        known.launch(a, b, out, bias, aux, choice, workspace)
        beside()

    calls: list[Callable[[], object]] = [rival]
    calls += [functools.partial(launch, choice) for choice in range(known.count)]
    best_s = [float("inf")] * len(calls)
    refused: set[int] = set()
    for _ in range(ROUNDS):
        for i, call in enumerate(calls):
            if i in refused:
                continue
            try:
                best_s[i] = min(best_s[i], _elapsed_s(call))
            except LaunchFailed:  # what the heuristic proposes need not run on every GPU
                refused.add(i)
    best = min(range(len(calls)), key=best_s.__getitem__)
    _chosen().pop(kind, None)
    if best:
        launch(best - 1)
        if not _is_alike(out, rival()):
            return {"choice": None, "why": "cuBLASLt's fastest kernel gives something else"}
        _chosen()[kind] = known, best - 1
    return {"choice": best - 1 if best else None, "rival_s": best_s[0], "first_s": best_s[1] if known.count else None,
            "best_s": best_s[best]}  # fmt: skip


def _is_alike(ours: torch.Tensor, theirs: torch.Tensor) -> bool:
    """Whether the first and the last rows of both are the same but for rounding."""
    rows = min(CHECKED_ROWS, len(ours))
    ends = (slice(0, rows), slice(len(ours) - rows, len(ours)))
    pairs = [(ours[end].float(), theirs[end].float()) for end in ends]
    return all(bool((x - y).norm() <= ALIKE * y.norm()) for x, y in pairs)


def warm(device: torch.device, dtype: torch.dtype) -> None:
    """Multiply large matrices for a while, so that `tune` times the GPU at the clocks of a busy one."""
    a = torch.randn(8192, 8192, device=device, dtype=dtype)
    begin = time.perf_counter()
    while time.perf_counter() - begin < WARM_S:
        for _ in range(8):
            torch.mm(a, a)
        torch.cuda.synchronize(device)


def _elapsed_s(call: Callable[[], object]) -> float:
    call()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(CALLS):
        call()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) * 1e-3 / CALLS
