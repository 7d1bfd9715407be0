"""A step is right by the one rule (`sublight/correct.py`), wherever its kernels run."""

from __future__ import annotations

from collections.abc import Sequence

from sublight.correct import Error, error, forward_errors, settled
from sublight.cost import Shape
from sublight.extensions.ladder import Ladder, Rung


def error_of(
    ladder: Ladder, rung: Rung, shape: Shape, dtype: str, device: str, *, reversed: bool = False, times: int = 8
) -> Error | None:
    """Pooled over the ladder's draws, more where luck may have decided; None where the step takes no such inputs."""
    if ladder.why_not(rung, *ladder.inputs(shape, dtype, device, 0)):
        return None
    call, yardstick = ladder.call(rung, reversed=reversed), rung.yardstick or ladder.reference

    def draw(seed: int) -> Sequence[Error]:
        inputs = ladder.inputs(shape, dtype, device, seed)
        if dtype == "float64" and ladder.truth:
            return [error("output", call(*inputs), yardstick(*inputs), ladder.truth(*inputs))]
        return forward_errors(
            lambda *tensors: rung.judged(call(*tensors)), lambda *tensors: rung.judged(yardstick(*tensors)), inputs
        )

    return settled(draw, ladder.draws, times=times)
