"""The streaming product of one row: its Gluon source played here on tensors, who takes which product, the rule."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

import re

from sublight import correct
from sublight.backend.device import PRETEND, Facts
from sublight.ops.matmul import fragments, stream
from sublight.ops.matmul.packing import quantize_weight
from sublight.ops.matmul.row_linear import plan_stream, reference

HOPPER = Facts(capability=90, shared_bytes=232448, multiprocessors=132)


class Memory:
    """A place in shared memory."""

    def __init__(self, tensor: Any) -> None:
        self.tensor = tensor
        self.shape, self.dtype = list(tensor.shape), tensor.dtype

    def index(self, at: int) -> Memory:
        return Memory(self.tensor[at])

    def load(self, layout: Any) -> Any:
        return self.tensor.clone()

    def store(self, values: Any) -> None:
        self.tensor.copy_(values)


class Pointer:
    def __init__(self, tensor: Any, at: Any = 0) -> None:
        self.tensor, self.at, self.dtype = tensor, at, SimpleNamespace(element_ty=tensor.dtype)

    def __add__(self, more: Any) -> Pointer:
        return Pointer(self.tensor, self.at + more)


def copied_in(desc: Any, place: Any, bar: Any, to: Memory) -> None:
    """What the copy engine brings: zeros for what lies outside."""
    to.tensor.zero_()
    inside = [slice(at, min(at + size, whole)) for at, size, whole in zip(place, desc.block, desc.shape, strict=True)]
    part = desc.view[tuple(inside)]
    to.tensor[tuple(slice(0, size) for size in part.shape)] = part


def assembly(text: str, constraints: str, given: Any, **options: Any) -> Any:
    if parts := re.search(r"shr\.u32 t, \$1, (\d+); lop3\.b32 \$0, t, (\d+), (\d+), 0xEA", text):
        by, mask, one = map(int, parts.groups())
        word = given[0].to(torch.int64) & 0xFFFFFFFF
        return as_words(((word >> by) & mask) | one)
    assert "mma.sync.aligned.m16n8k16.row.col" in text, text
    kind = torch.bfloat16 if ".bf16." in text else torch.float16
    a0, a1, a2, a3, b0, b1 = (x.view(-1, 8, 4).view(kind).float() for x in given[:6])  # warp, group, 2 * quarter
    left = torch.cat([torch.cat([a0, a2], 2), torch.cat([a1, a3], 2)], 1)
    right = torch.cat([b0, b1], 2).mT
    product = left @ right  # warp, 16, 8
    upper, lower = (x.reshape(-1, 4, 2) for x in (product[:, :8], product[:, 8:]))
    parts = (upper[..., 0], upper[..., 1], lower[..., 0], lower[..., 1])
    return tuple(part.reshape(-1) + c for part, c in zip(parts, given[6:], strict=True))


def as_words(x: Any) -> Any:
    return torch.where(x >= 2**31, x - 2**32, x).to(torch.int32)


def stored(at: Pointer, values: Any, mask: Any) -> None:
    at.tensor.view(-1)[at.at[mask]] = values[mask]


def loaded(at: Pointer, mask: Any, other: float) -> Any:
    return torch.where(mask, at.tensor.view(-1)[torch.where(mask, at.at, 0)], other)


def _fake_language(program: list[int]) -> SimpleNamespace:
    layouts = {
        name: lambda *sizes, **more: (sizes, more)
        for name in ("BlockedLayout", "SliceLayout", "DistributedLinearLayout", "SwizzledSharedLayout")
    }

    def specialised(partitions: Any, warps: Any, registers: Any) -> None:
        for function, given in reversed(partitions):  # all is brought first: the ring has room for it
            function(*given)

    return SimpleNamespace(
        **layouts,
        NVMMASharedLayout=lambda *sizes, **more: (sizes, more),
        constexpr=int,
        bfloat16=torch.bfloat16,
        float32=torch.float32,
        int32=torch.int32,
        int64=torch.int64,
        static_range=range,
        program_id=lambda axis: program[0],
        num_programs=lambda axis: program[1],
        arange=lambda first, end, layout: torch.arange(first, end),
        zeros=lambda shape, dtype, layout: torch.zeros(shape, dtype=dtype),
        to_tensor=torch.tensor,
        reshape=lambda x, shape: x.reshape(shape),
        permute=lambda x, order: x.permute(order),
        expand_dims=lambda x, axis: x.unsqueeze(axis),
        broadcast=lambda x, y: torch.broadcast_tensors(x, y),
        convert_layout=lambda x, layout, assert_trivial=False: x.contiguous(),
        split=lambda x: (x[..., 0], x[..., 1]),
        join=lambda x, y: torch.stack([x, y], -1),
        sum=lambda x, axis: x.sum(axis),
        rsqrt=torch.rsqrt,
        exp=torch.exp,
        load=loaded,
        store=stored,
        inline_asm_elementwise=assembly,
        allocate_shared_memory=lambda dtype, shape, layout: Memory(torch.full(shape, 77, dtype=dtype)),
        warp_specialize=specialised,
    )


@pytest.fixture
def played(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The kernel as a function of its plan and tensors, by PyTorch."""
    program = [0, 1]
    language = _fake_language(program)
    nothing = SimpleNamespace(
        init=lambda *a, **b: None, wait=lambda *a, **b: None, expect=lambda *a, **b: None, arrive=lambda *a, **b: None
    )
    nothing.MBarrierLayout = lambda: None
    monkeypatch.setattr(stream, "hopper", SimpleNamespace(mbarrier=nothing, fence_async_shared=lambda: None))
    monkeypatch.setattr(stream, "tile_in", copied_in)
    monkeypatch.setattr(stream, "meet", lambda: None)
    monkeypatch.setattr(
        stream, "seen_as", lambda place, dtype, shape, layout: Memory(place.tensor.view(-1).view(dtype).view(shape))
    )
    for module in (stream, fragments):
        monkeypatch.setattr(module, "gl", language)
        for name, each in list(vars(module).items()):
            if hasattr(each, "fn") and hasattr(each, "arg_names"):
                monkeypatch.setattr(module, name, each.fn)
    for name in ("_WARPS", "_HALF_ROWS", "_LINE_WORDS", "_THREADS"):
        monkeypatch.setattr(stream, name, int(getattr(stream, name)))
    monkeypatch.setattr(stream, "slot_of", stream.slot_of.fn if hasattr(stream.slot_of, "fn") else stream.slot_of)

    def run(*args: Any) -> Any:
        token = PRETEND.set(HOPPER)
        plan = plan_stream(*args)
        PRETEND.reset(token)
        (step,) = plan.steps
        names = ("x", "weight", "scales", "zeros", "norm_weight", "bias", "residual")
        tensors = dict(zip(names, args[:7], strict=True))
        buffer = plan.buffers["y"]
        tensors["y"] = torch.full(buffer.shape, float("nan"), dtype=buffer.dtype)
        given = [tensors[name] for name in step.on]
        for at, view in step.views.items():
            whole = torch.as_strided(given[at].reshape(-1), view.shape, view.strides)
            given[at] = SimpleNamespace(view=whole, shape=view.shape, block=view.block, layout=None)
        given = [x if isinstance(x, SimpleNamespace) else Pointer(x) for x in given]
        constants = {**step.constants, "STAGES": 100}
        program[1] = programs = min(3, step.grid[0])  # several tiles each
        for number in range(programs):
            program[0] = number
            stream._stream_kernel(*given, *step.numbers, **constants)
        return tensors["y"]

    yield run


@pytest.mark.parametrize(
    ("n", "k", "bits", "gated", "extras"),
    [
        *((70, 1024, 4, False, "norm"), (20, 3072, 4, True, "norm bias"), (33, 2048, 4, False, "bias residual")),
        *((37, 128, 16, False, "residual"), (21, 1152, 16, True, "norm bias"), (9, 4096, 2, True, "")),
    ],
)
@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16))
def test_the_source_played(n: int, k: int, bits: int, gated: bool, extras: str, dtype: Any, played: Any) -> None:
    """Rows and pieces that are whole tiles and others, more tiles than programs, every option."""
    draw = torch.Generator().manual_seed(n)
    made: dict[str, Any] = {"generator": draw, "dtype": dtype}
    rows = n * (2 if gated else 1)
    weight = torch.randn(rows, k, **made)
    packed = (weight, None, None) if bits == 16 else quantize_weight(weight, bits, 512 // bits)
    norm = torch.randn(k, **made) if "norm" in extras else None
    bias = torch.randn(rows, **made) if "bias" in extras else None
    residual = torch.randn(1, n, **made) if "residual" in extras else None
    rest = (norm, bias, residual, bits, 1e-5, gated)
    x = torch.randn(1, k, **made)
    (error,) = correct.forward_errors(
        lambda x: played(x, *packed, *rest),
        lambda x: reference(x, *wide(packed, x.dtype), *(wide((each,), x.dtype)[0] for each in rest[:3]), *rest[3:]),
        (x,),
    )
    assert error.ok, error


def wide(tensors: Any, dtype: Any) -> tuple[Any, ...]:
    return tuple(x.to(dtype) if x is not None and x.is_floating_point() else x for x in tensors)
