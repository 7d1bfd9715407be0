"""The call that is advised for a written-out attention gives what that gives: profiled for real, then run."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from sublight.diagnose import attention, explain, fakes
from sublight.diagnose.fakes import GEMM, Machine
from sublight.diagnose.rules.unfused_attention import UNFUSED_ATTENTION
from sublight.trace import steps
from sublight.trace.load import load
from sublight.trace.record import Kind

B, H, T, D = 2, 2, 64, 16
SCALE = 0.3  # not the default


def inputs() -> tuple[torch.Tensor, ...]:
    torch.manual_seed(0)
    return tuple(torch.randn(B, H, T, D) for _ in range(3))


def causal_fill(q, k, v):  # type: ignore[no-untyped-def]
    mask = torch.ones(T, T, dtype=torch.bool).triu(1)
    return ((q @ k.transpose(-2, -1)) * SCALE).masked_fill(mask, -math.inf).softmax(-1) @ v, mask


def causal_where(q, k, v):  # type: ignore[no-untyped-def]
    mask = torch.tril(torch.ones(T, T, dtype=torch.bool))
    scores = (q @ k.transpose(-2, -1)) / (1 / SCALE)
    return torch.where(mask, scores, torch.full((), -math.inf)).softmax(-1) @ v, mask


def causal_added(q, k, v):  # type: ignore[no-untyped-def]
    mask = torch.full((T, T), -math.inf).triu(1)
    return ((q @ k.transpose(-2, -1)) * SCALE + mask).softmax(-1) @ v, mask


BUFFER = torch.ones(T, T, dtype=torch.bool).triu(1)  # made before anything is recorded


def from_a_buffer(q, k, v):  # type: ignore[no-untyped-def]
    return ((q @ k.transpose(-2, -1)) * SCALE).masked_fill(BUFFER, -math.inf).softmax(-1) @ v, BUFFER


def window(q, k, v):  # type: ignore[no-untyped-def]
    """From tril, but of another diagonal: a position sees four behind it as well."""
    mask = torch.tril(torch.ones(T, T, dtype=torch.bool), 4)
    return ((q @ k.transpose(-2, -1)) * SCALE).masked_fill(~mask, -math.inf).softmax(-1) @ v, ~mask


def padded(q, k, v):  # type: ignore[no-untyped-def]
    mask = torch.arange(T)[None, None, None, :] >= torch.tensor([T // 2, T])[:, None, None, None]
    return ((q @ k.transpose(-2, -1)) * SCALE).masked_fill(mask, -math.inf).softmax(-1) @ v, mask


def biased(q, k, v):  # type: ignore[no-untyped-def]
    mask = torch.randn(1, H, T, T)
    return ((q @ k.transpose(-2, -1)) * SCALE + mask).softmax(-1) @ v, mask


def plain(q, k, v):  # type: ignore[no-untyped-def]
    return ((q @ k.transpose(-2, -1)) * SCALE).softmax(-1) @ v, None


def scaled_before(q, k, v):  # type: ignore[no-untyped-def]
    return (q @ k.transpose(-2, -1)).softmax(-1) @ v, None


WRITTEN: dict[str, tuple[Callable[..., tuple[torch.Tensor, torch.Tensor | None]], str]] = {
    "causal, filled": (causal_fill, "causal"),
    "causal, where": (causal_where, "causal"),
    "causal, added": (causal_added, "causal"),
    "a buffer": (from_a_buffer, "other"),
    "another diagonal": (window, "other"),
    "padding": (padded, "padding"),
    "a bias": (biased, "other"),
    "no mask": (plain, "none"),
    "scaled before": (scaled_before, "none"),
}


@pytest.mark.parametrize("name", WRITTEN)
def test_the_advised_call_gives_the_same(name: str, tmp_path: Path) -> None:
    written, kind = WRITTEN[name]
    q, k, v = inputs()
    with torch.profiler.profile(record_shapes=True) as profile:
        for _ in range(2):
            with torch.profiler.record_function("step"):
                expected, mask = written(q, k, v)
    profile.export_chrome_trace(str(tmp_path / "trace.json"))
    (trace,) = load(tmp_path / "trace.json")
    case = explain._case(trace, steps.find(trace), fakes.limits("cpu"), ())
    (members, *_) = [group.items for group in case.groups if group.kind == "attention"]
    call = attention.call_for(case, members)
    assert call.mask == kind
    found: dict[str, torch.Tensor] = {}
    exec(call.code, {"torch": torch, "q": q, "k": k, "v": v, "mask": mask, "scale": SCALE}, found)
    torch.testing.assert_close(found["out"], expected)


def made_up(*between: str, behind: str = "", shapes: bool = True) -> attention.Call:
    machine, scores = Machine(), (4, 64, 64)

    def op(name: str, *dims: tuple[int, ...]) -> None:
        machine.op(name, *(dims if shapes else ()), us=300.0, kernel=GEMM if "mm" in name else fakes.ELEMENTWISE)

    with machine.step():
        machine.op("aten::bmm", (4, 64, 16), (4, 16, 64), us=300.0, kernel=GEMM)
        for name in between:
            op(name, scores, {"aten::mul": scores, "aten::div": ()}.get(name, (64, 64)))
        machine.op("aten::_softmax", scores, us=300.0)
        if behind:
            op(behind, scores)
        machine.op("aten::bmm", scores, (4, 64, 16), us=300.0, kernel=GEMM)
    case = fakes.case(machine.trace())
    (group,) = [group for group in case.groups if group.kind == "attention"]
    return attention.call_for(case, group.items)


@pytest.mark.parametrize(("between", "behind"), [(("aten::tanh",), ""), ((), "aten::mul"), (("aten::mul",), "")])
def test_what_the_call_cannot_do_is_not_advised(between: tuple[str, ...], behind: str) -> None:
    """Scores that are capped, or multiplied by a tensor, before or behind the softmax."""
    call = made_up(*between, behind=behind)
    assert call.mask == "not known" and "out =" not in call.code and "flex_attention" in call.code


def test_dropout_goes_with_it() -> None:
    assert "dropout_p=p" in made_up("aten::div", behind="aten::native_dropout").code


def test_two_masks_are_joined() -> None:
    call = made_up("aten::masked_fill", "aten::add")
    assert call.mask == "other" and "attn_mask=mask" in call.code


@pytest.mark.parametrize("name", ["aten::masked_fill", "aten::where", "aten::add"])
def test_without_shapes_a_mask_is_still_seen(name: str) -> None:
    assert "attn_mask=" in made_up(name, shapes=False).code


def test_the_rule_prints_the_call() -> None:
    machine = Machine()
    for _ in range(4):
        with machine.step():
            machine.op("aten::triu", (64, 64), us=3.0)
            machine.op("aten::bmm", (4, 64, 16), (4, 16, 64), us=300.0, kernel=GEMM)
            machine.op("aten::masked_fill", (4, 64, 64), (64, 64), us=300.0)
            machine.op("aten::_softmax", (4, 64, 64), us=300.0)
            machine.op("aten::bmm", (4, 64, 64), (4, 64, 16), us=300.0, kernel=GEMM)
            with machine.range("aten::relu", Kind.OP):
                machine.python(1.0)
    finding = fakes.findings(fakes.case(machine.trace()), [UNFUSED_ATTENTION])[0][0]
    assert "attn_mask=~mask" in finding.fix and "is_causal=True" not in finding.fix.splitlines()[-1], (
        "of which diagonal?"
    )
