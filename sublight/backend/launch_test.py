"""Quick launches: the same kernel with the same arguments as Triton's own launch, or Triton's own launch."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from triton import knobs
from triton.runtime.jit import JITFunction

from sublight.backend import device, launch, listen, private
from sublight.backend.jit import tl, triton
from sublight.backend.launch import Step, quick_launch, watching


@triton.jit
def _twice_kernel(x_ptr, y_ptr, cols, BLOCK: tl.constexpr):
    place = tl.program_id(0) * cols + tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y_ptr + place, 2 * tl.load(x_ptr + place))


@JITFunction  # compiled, though other tests run by the interpreter
def _kernel(x_ptr, y_ptr, n, scale, BLOCK: tl.constexpr, NEGATE: tl.constexpr = False):
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + place, mask=place < n, other=0.0) * scale
    tl.store(y_ptr + place, -x if NEGATE else x, mask=place < n)


class Compiled:
    """Stands for Triton's compiled kernel; notes what its C function is called with."""

    function, packed_metadata = 1234, (4, 1, 0)

    def __init__(self, **changes: Any) -> None:
        self.calls: list[tuple[Any, ...]] = []
        launcher = {
            **{"global_scratch_size": 0, "profile_scratch_size": 0, "launch_cooperative_grid": False},
            **{"launch_pdl": False, "launch": lambda *args: self.calls.append(args)},
        }
        self.run = SimpleNamespace(**(launcher | changes))
        self.metadata = SimpleNamespace(tensordesc_meta=None)


@pytest.fixture(autouse=True)
def stream(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if not request.node.get_closest_marker("gpu"):
        monkeypatch.setitem(vars(private), "current_raw_stream", lambda device: 7)


@pytest.fixture
def tensors() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.empty(64), torch.empty(64)


def step_of(*numbers: Any, **constants: Any) -> Step:
    return Step(_kernel, (3,), *(numbers or (64, 0.5)), **(constants or {"BLOCK": 32}))


def test_the_c_function_of_triton_3_6(tensors: Any) -> None:
    compiled = Compiled()
    assert quick_launch(compiled, step_of(), 2)(tensors, ())
    x, y = (tensor.data_ptr() for tensor in tensors)
    assert compiled.calls == [
        (3, 1, 1, 7, 1234, False, False, None, None, (4, 1, 0), None, None, None, x, y, 64, 0.5, 32, False)
    ]


def test_the_c_function_of_later_versions(tensors: Any) -> None:
    compiled = Compiled(arg_annotations="annotations", kernel_signature="signature")
    assert quick_launch(compiled, step_of(), 2)(tensors, ())
    x, y = (tensor.data_ptr() for tensor in tensors)
    fixed = (3, 1, 1, 7, 1234, False, False, (4, 1, 0), None, None, None, None, None, "annotations", "signature")
    assert compiled.calls == [(*fixed, (x, y, 64, 0.5, 32, False))]


@pytest.mark.parametrize("changes", [{}, {"arg_annotations": "a", "kernel_signature": "s"}])
def test_a_free_number_is_the_calls_own(tensors: Any, changes: dict[str, str]) -> None:
    compiled = Compiled(**changes)
    step = step_of(64, "scale", BLOCK=32)
    quick = quick_launch(compiled, step, 2)
    assert step.free == ("scale",) and quick(tensors, (0.25,)) and quick(tensors, (4.0,))
    given = [call[-1] if changes else call[-6:] for call in compiled.calls]
    assert [numbers[2:4] for numbers in given] == [(64, 0.25), (64, 4.0)]


@pytest.mark.parametrize("changes", [{"global_scratch_size": 128}, {"profile_scratch_size": 1}])
def test_what_needs_more_than_a_launch_is_left_to_triton(changes: dict[str, int]) -> None:
    assert quick_launch(Compiled(**changes), step_of(), 2) is None


def test_who_watches_sees_every_launch(tensors: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = Compiled()
    quick = quick_launch(compiled, step_of(), 2)
    seen: list[str] = []
    knobs.runtime.launch_enter_hook.add(seen.append)
    try:
        assert not quick(tensors, ())
    finally:
        knobs.runtime.launch_enter_hook.remove(seen.append)
    with listen.listening(lambda request, proceed: None):
        assert not quick(tensors, ())
    monkeypatch.setattr(JITFunction, "run", lambda *args, **kwargs: None)  # somebody else's interception
    assert not quick(tensors, ())
    assert compiled.calls == []


class Route:
    """A process in which no quick launch was tried yet; what it launches Triton's way is noted."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, compiled: Any) -> None:
        self.public: list[Any] = []
        monkeypatch.setattr(launch._Route, "checked", False)
        monkeypatch.setattr(launch._Route, "reason", "")
        monkeypatch.setattr(launch, "is_interpreted", lambda: False)
        monkeypatch.setattr(launch, "self_check", lambda index: None)
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)

        def run(kernel: Any, *args: Any, **kwargs: Any) -> Any:
            self.public.append(args)
            return compiled

        monkeypatch.setattr(JITFunction, "run", run)


def test_the_first_launch_is_tritons_the_second_quick(tensors: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = Compiled()
    route, step = Route(monkeypatch, compiled), step_of()
    for _ in range(3):
        step(*tensors)
    assert len(route.public) == 1 and len(compiled.calls) == 2 and launch.why_slow() == ""


@pytest.mark.parametrize("renamed", ["launch", "global_scratch_size", "launch_pdl"], ids=lambda name: f"without {name}")
def test_a_renamed_part_of_triton_means_its_public_launch(
    renamed: str, tensors: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled = Compiled()
    delattr(compiled.run, renamed)
    route = Route(monkeypatch, compiled)
    with pytest.warns(RuntimeWarning, match=renamed):
        step_of()(*tensors)
    step = step_of()
    for _ in range(3):
        step(*tensors)  # says nothing more
    assert len(route.public) == 4 and renamed in launch.why_slow()


def test_a_trial_that_gives_other_numbers_means_tritons_launch(tensors: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = Compiled()
    route = Route(monkeypatch, compiled)

    def differs(index: int) -> None:
        raise RuntimeError("a trial launch gave [1.0]…, not [0.0]…")

    monkeypatch.setattr(launch, "self_check", differs)
    step = step_of()
    with pytest.warns(RuntimeWarning, match="a trial launch gave"):
        step(*tensors)
    step(*tensors)
    assert len(route.public) == 2 and compiled.calls == []


def test_while_a_graph_is_captured_nothing_is_tried(tensors: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    route = Route(monkeypatch, Compiled())
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    monkeypatch.setattr(launch, "self_check", lambda index: pytest.fail("it would have to wait for the GPU"))
    step = step_of()
    step(*tensors)
    step(*tensors)
    assert len(route.public) == 2 and not launch._Route.checked and step._quick is None


def test_a_step_is_for_one_kind_of_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    Route(monkeypatch, None)
    step, room = step_of(), torch.empty(65)
    token = launch.CHECKED.set(True)
    try:
        step(room[:64], room[:64])
        with pytest.raises(AssertionError, match="was planned for"):
            step(room[1:], room[:64])
        with pytest.raises(AssertionError, match="was planned for"):
            step(room[:64].half(), room[:64])
    finally:
        launch.CHECKED.reset(token)


def test_watching_notes_the_steps_that_are_taken(tensors: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    Route(monkeypatch, Compiled())
    first, second = step_of(), step_of()
    first(*tensors)
    with watching() as outer:
        first(*tensors)
        with watching() as inner:
            second(*tensors)
    second(*tensors)
    assert outer == [first, second] and inner == [second]


def test_threads_take_turns_in_the_interpreter() -> None:
    """It keeps the program that it is in, and what it has replaced in its language, for the whole process."""
    if not device.is_interpreted():
        pytest.skip("for the interpreter")
    x = torch.arange(12.0).repeat(40, 1)
    step = Step(_twice_kernel, (40, 3), 12, BLOCK=4)
    results = [torch.empty_like(x) for _ in range(8)]
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda y: step(x, y), results))
    assert all(bool((y == 2 * x).all()) for y in results)


@pytest.mark.gpu
def test_on_a_gpu_quick_launches_give_what_triton_gives() -> None:
    step = Step(_kernel, (4,), 100, 0.5, BLOCK=32)
    for seed in range(3):
        x = torch.randn(100, device="cuda", generator=torch.Generator("cuda").manual_seed(seed))
        y = torch.full_like(x, float("nan"))
        step(x, y)
        assert torch.equal(y, x * 0.5)
    assert launch.why_slow() == "" and step._quick is not None
