"""Both ends of the transformer: token and position tables, and the classifier with its loss and gradient."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from sublight.correct import Inputs
from sublight.cost import Shape
from sublight.extensions.ladder import Ladder, Rung, Runner
from sublight.extensions.transformer import launch
from sublight.extensions.transformer.ladder import drawn, gradients, of_transformer, whole, words

if TYPE_CHECKING:
    from torch import Tensor

D_LOSS = 0.125


def _encode(wte: Tensor, wpe: Tensor, tokens: Tensor) -> Tensor:
    import torch

    return torch.nn.functional.embedding(tokens, wte) + wpe[: tokens.shape[1]]


def _encoder_inputs(shape: Shape, dtype: str, device: str, seed: int) -> Inputs:
    randn = drawn(device, seed)
    tokens = whole((shape["batch"], shape["time"]), shape["vocabulary"], device, seed)
    return randn(shape["vocabulary"], shape["channels"]), randn(shape["time"], shape["channels"]), tokens


def _encoder_backward_inputs(shape: Shape, dtype: str, device: str, seed: int) -> Inputs:
    wte, wpe, tokens = _encoder_inputs(shape, dtype, device, seed)
    return drawn(device, seed + 2)(*tokens.shape, wte.shape[1]), wte, wpe, tokens


def _encoder_backward(runner: Runner, d_out: Tensor, wte: Tensor, wpe: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
    d_wte, d_wpe = wte.new_zeros(wte.shape), wpe.new_empty(wpe.shape)
    launch.encoder_backward(runner, d_out, tokens, d_wte, d_wpe)
    return d_wte, d_wpe


ENCODER_SHAPES = {"float32": ({"batch": 8, "time": 1024, "channels": 768, "vocabulary": 50257},)}
ENCODER_TESTS = (
    {"batch": 1, "time": 1, "channels": 3, "vocabulary": 2},
    {"batch": 3, "time": 5, "channels": 36, "vocabulary": 7},
)
ENCODER = Ladder(
    **of_transformer("encoder", "a token's row of one table and its position's of another, added up"),
    reference=_encode,
    inputs=_encoder_inputs,
    cost=lambda shape, dtype: words(
        shape["batch"] * shape["time"] * (shape["channels"] + 2) + shape["time"] * shape["channels"],
        shape["batch"] * shape["time"] * shape["channels"],
    ),
    shapes=ENCODER_SHAPES,
    test_shapes=ENCODER_TESTS,
    rungs=(
        Rung(
            name="element",
            kernels=("encoder_forward",),
            launch=lambda runner, wte, wpe, tokens: launch.encoder(runner, tokens, wte, wpe),
            change="A thread for each element: neighbours read neighbours of both tables' rows and write side by side.",
        ),
    ),
)
ENCODER_BACKWARD = Ladder(
    **of_transformer("encoder_backward", "the gradients of both tables"),
    reference=gradients(_encode, 2),
    inputs=_encoder_backward_inputs,
    cost=lambda shape, dtype: words(
        shape["batch"] * shape["time"] * (shape["channels"] + 2),
        (shape["vocabulary"] + shape["time"]) * shape["channels"],
    ),
    shapes=ENCODER_SHAPES,
    test_shapes=ENCODER_TESTS,
    rungs=(
        Rung(
            name="atomics",
            kernels=("encoder_backward_tokens", "encoder_backward_positions"),
            launch=_encoder_backward,
            change="A token's row gets an atomic addition from every place where it stands, in any order; a position's "
            "row is summed over the batch by one thread an element, always in the same.",
        ),
    ),
)


def _classify(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    import torch

    losses = torch.nn.functional.cross_entropy(logits, targets, reduction="none")
    rows = torch.arange(len(targets), device=logits.device)
    d_logits = torch.softmax(logits, -1)
    d_logits[rows, targets] -= 1
    return losses, d_logits * D_LOSS


def _classifier(kernel: str) -> Callable[..., tuple[Tensor, Tensor]]:
    def run(runner: Runner, logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        d_logits = logits.new_empty(logits.shape)
        losses = launch.classifier(
            runner, logits, targets, d_logits, vocabulary=logits.shape[-1], d_loss=D_LOSS, kernel=kernel
        )
        return losses, d_logits

    return run


CLASSIFIER = Ladder(
    **of_transformer("classifier", "cross entropy of each row, and the gradient of its logits"),
    reference=_classify,
    inputs=lambda shape, dtype, device, seed: (
        3 * drawn(device, seed)(shape["rows"], shape["cols"]),
        whole((shape["rows"],), shape["cols"], device, seed),
    ),
    cost=lambda shape, dtype: words(
        shape["rows"] * shape["cols"] + 2 * shape["rows"], shape["rows"] * (shape["cols"] + 1)
    ),
    shapes={"float32": ({"rows": 4096, "cols": 50257},)},
    test_shapes=({"rows": 2, "cols": 1}, {"rows": 3, "cols": 300}, {"rows": 2, "cols": 1025}),
    rungs=(
        Rung(
            name="three_reads",
            kernels=("classifier",),
            launch=_classifier("classifier"),
            change="A block takes a row: a pass for the maximum, one for the sum, one that writes the gradient. The "
            "loss costs one more load; neither probabilities nor their logarithms are ever stored.",
        ),
        Rung(
            name="online",
            kernels=("classifier_online",),
            launch=_classifier("classifier_online"),
            change="Maximum and sum in one pass: a row of 200 KB comes from the L2 once less, for an exponential more "
            "an element.",
        ),
    ),
)
