"""Kernels compiled ahead: all that a step needs, and nothing of the model is changed by it."""

from __future__ import annotations

import contextlib
import threading
from typing import Any

import pytest
import torch

import sublight
from sublight.fix.patch import ahead
from sublight.fix.patch.ahead import _compiling, _Filled, begin, compile_for
from sublight.fix.patch.step import as_it_was, is_inert


class Block(torch.nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up = torch.nn.LayerNorm(width), torch.nn.Linear(width, 4 * width)
        self.act, self.down = torch.nn.GELU(), torch.nn.Linear(4 * width, width)
        self.stats = torch.nn.BatchNorm1d(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.stats(x + self.down(self.act(self.up(self.norm(x)))))  # type: ignore[no-any-return]


def test_on_the_cpu_there_is_nothing_to_compile() -> None:
    assert compile_for(Block(8), torch.randn(4, 8)) == 0


def test_a_step_leaves_gradients_buffers_modes_and_random_numbers() -> None:
    model = Block(8)
    model.up.weight.grad = torch.ones_like(model.up.weight)
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    state = torch.get_rng_state()
    with as_it_was(model):
        model(torch.randn(4, 8)).sum().backward()
        model.eval()
    assert all(torch.equal(buffer, before[name]) for name, buffer in model.named_buffers())
    assert torch.equal(model.up.weight.grad, torch.ones_like(model.up.weight)) and model.down.weight.grad is None
    assert model.training and torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize(
    ("value", "inert"),
    [
        (torch.ones(1), True),
        ({"input_ids": torch.ones(1), "use_cache": False, "past_key_values": None}, True),
        ((torch.ones(1), [2, "x", 1.5]), True),
        ({"past_key_values": object()}, False),
        ((torch.ones(1), {"deep": [object()]}), False),
    ],
)
def test_what_a_call_may_leave_traces_in(value: Any, inert: bool) -> None:
    assert is_inert(value) is inert


def test_what_fails_in_the_background_is_not_heard_of() -> None:
    ran = threading.Event()

    def fail() -> None:
        ran.set()
        raise ValueError("nobody hears this")

    begin(fail).join()
    assert ran.is_set()


class Launched:
    """Stands for kernels of ours and of somebody else; notes what comes through to Triton."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        from triton.runtime.jit import JITFunction

        self.through: list[tuple[Any, bool]] = []

        def run(kernel: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
            self.through.append((kernel, warmup))

        monkeypatch.setattr(JITFunction, "run", run)
        self.original = run
        self.ours, self.theirs = JITFunction(kernel), JITFunction(kernel)
        self.theirs.__module__ = "somebody.elses"

    def all(self) -> None:
        for each in (self.ours, self.theirs):
            each.run(grid=(1,), warmup=False)


def kernel() -> None:
    """Never compiled."""


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> Launched:
    pytest.importorskip("triton")
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    return Launched(monkeypatch)


def test_only_our_kernels_are_left_out(launched: Launched) -> None:
    """Somebody else's that tunes itself would keep what it found while nothing ran."""
    with _compiling(torch.device("cuda", 0)):
        launched.all()
    assert launched.through == [(launched.ours, True), (launched.theirs, False)]


def test_other_threads_launch_as_ever(launched: Launched) -> None:
    with _compiling(torch.device("cuda", 0)):
        begin(launched.all).join()
    assert launched.through == [(launched.ours, False), (launched.theirs, False)]


@pytest.mark.parametrize("error", (KeyboardInterrupt, RuntimeError))
def test_triton_launches_again_after_it(launched: Launched, monkeypatch: Any, error: Any) -> None:
    from triton.runtime import _async_compile
    from triton.runtime.jit import JITFunction

    def interrupted(self: Any, *arguments: Any) -> None:
        raise error

    monkeypatch.setattr(_async_compile.AsyncCompileMode, "__exit__", interrupted)
    with pytest.raises(error), _compiling(torch.device("cuda", 0)):
        pass
    assert JITFunction.run is launched.original and _async_compile.active_mode.get() is None


def test_two_threads_that_compile_do_so_one_after_the_other(launched: Launched) -> None:
    from triton.runtime.jit import JITFunction

    entered, other_ended = threading.Event(), threading.Event()

    def other() -> None:
        entered.wait()
        with _compiling(torch.device("cuda", 0)):
            pass
        other_ended.set()

    thread = begin(other)
    with _compiling(torch.device("cuda", 0)):
        entered.set()
        assert not other_ended.wait(0.2)
    thread.join()
    assert other_ended.is_set() and JITFunction.run is launched.original


def test_what_a_kernel_would_have_written_stops_no_gpu() -> None:
    """NaN where a probability is expected, or 2**40 for a place, would."""
    x = torch.randn(3, 4)
    with _Filled():
        made = [torch.empty(5), torch.empty_like(x), x.new_empty(2), torch.empty_strided((2, 2), (2, 1))]
        made += [torch.empty(0, requires_grad=True), torch.empty(2, requires_grad=True)]  # as a checkpoint makes one
        places = torch.empty(6, dtype=torch.int64)
    assert all((each == 1).all() for each in made) and not places.any()


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU, but for kernels."""
    monkeypatch.setattr(ahead, "can_launch", lambda device: True)
    monkeypatch.setattr(ahead, "_compiling", lambda device: contextlib.nullcontext([]))


def test_whatever_the_step_raises_the_first_step_will_tell(steps: None) -> None:
    class Strict(Block):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            raise AssertionError("loss is not finite")

    assert compile_for(Strict(8), torch.randn(4, 8)) == 0


@pytest.mark.parametrize("listens", ("module", "everywhere", "compiled", "on two devices"))
def test_nobody_hears_of_a_step_that_computes_nonsense(steps: None, listens: str) -> None:
    heard: list[Any] = []
    model, x = Block(8), torch.randn(4, 8)
    model.register_buffer("calls", torch.zeros(()))
    if listens == "module":
        model.norm.register_forward_hook(lambda *arguments: heard.append(arguments))
    elif listens == "everywhere":
        handle = torch.nn.modules.module.register_module_forward_hook(lambda *arguments: heard.append(arguments))
    elif listens == "compiled":
        model.compile(backend=lambda graph, inputs: heard.append(graph) or graph.forward)
    else:
        model.act = torch.nn.PReLU(device="meta")  # type: ignore[assignment]
        model.forward = heard.append  # type: ignore[method-assign]
    compile_for(model, x)
    assert not heard
    if listens == "everywhere":
        handle.remove()


def test_a_process_that_ends_waits_for_what_it_began() -> None:
    assert not begin(lambda: None).daemon


@pytest.mark.gpu
@pytest.mark.parametrize("trains", (True, False))
def test_after_it_a_step_compiles_nothing(trains: bool) -> None:
    from triton import knobs

    width = 1536 if trains else 1792  # of no other test: its kernels are not compiled yet
    model = Block(width).to("cuda", torch.bfloat16).train(trains)
    x = torch.randn(64, width, device="cuda", dtype=torch.bfloat16)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    report = sublight.patch(model, x, quiet=True)
    assert report.swapped and all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    compiled: list[str] = []
    knobs.compilation.listener = lambda **arguments: compiled.append(str(arguments["metadata"].get("name")))
    try:
        with torch.set_grad_enabled(trains):
            y = model(x)
        if trains:
            y.sum().backward()
    finally:
        knobs.compilation.listener = None
    assert not compiled and bool(y.isfinite().all())
