"""bf16 rounds as torch does, which is what a GPU does."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import torch

from sublight import correct
from sublight.xray.sanitize.bf16 import add_at, added, by_tensor_cores, narrow, running, widen

SPECIAL = [
    0.0,
    -0.0,
    1.0,
    256.5,
    257.0,
    1.00390625,
    1.01171875,
    3.3961775e38,
    3.4e38,
    1e-40,
    float("inf"),
    -float("inf"),
]


def bits_of(x: torch.Tensor) -> np.ndarray:
    return x.bfloat16().view(torch.int16).numpy().view(np.uint16)


def test_every_fp32_near_a_tie_rounds_as_torch_does() -> None:
    upper = np.arange(0, 0x10000, 7, dtype=np.uint32) << 16
    lower = np.array([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF], np.uint32)
    values = (upper[:, None] | lower).reshape(-1).view(np.float32)
    values = np.concatenate([values[~np.isnan(values)], np.array(SPECIAL, np.float32)])
    np.testing.assert_array_equal(narrow(values), bits_of(torch.from_numpy(values)))


def test_nan_stays_nan() -> None:
    payloads = np.array([0x7F800001, 0x7FFFFFFF, 0xFF800001], np.uint32).view(np.float32)
    assert np.isnan(widen(narrow(payloads))).all()


def test_widening_is_exact() -> None:
    bits = np.arange(0x10000, dtype=np.uint16)
    wanted = torch.from_numpy(bits.view(np.int16)).view(torch.bfloat16).float().numpy()
    np.testing.assert_array_equal(widen(bits), wanted)


def test_sums_and_products_are_rounded_once() -> None:
    torch.manual_seed(1)
    x, y = torch.randn(10_000).bfloat16(), torch.randn(10_000).bfloat16()
    a, b = widen(bits_of(x)), widen(bits_of(y))
    np.testing.assert_array_equal(narrow(a + b), bits_of(x + y))
    np.testing.assert_array_equal(narrow(a * b), bits_of(x * y))


def test_atomic_adds_take_lanes_in_turn() -> None:
    """256 + 1 is 256 in bf16, so one after another is not the same as all at once."""
    cells = narrow(np.array([256.0, 0.0], np.float32))

    def load(at: np.ndarray, mask: np.ndarray, other: np.ndarray, kind: np.dtype) -> np.ndarray:
        return cells[at.astype(int)]

    def store(at: np.ndarray, value: np.ndarray, mask: np.ndarray) -> None:
        cells[at.astype(int)] = value

    at, ones = np.array([0, 0, 1, 0, 1], np.uint64), narrow(np.ones(5, np.float32))
    before = add_at(SimpleNamespace(load=load, store=store), at, ones, np.array([True, True, True, True, False]))
    assert widen(cells).tolist() == [256.0, 1.0]
    assert widen(before).tolist() == [256.0, 256.0, 0.0, 256.0, 0.0]


def test_a_sum_is_rounded_in_pairs() -> None:
    torch.manual_seed(2)
    x = torch.randn(4, 64).bfloat16()
    pairs = x
    while pairs.shape[1] > 1:
        pairs = pairs[:, : pairs.shape[1] // 2] + pairs[:, pairs.shape[1] // 2 :]
    np.testing.assert_array_equal(added(bits_of(x), 1), bits_of(pairs[:, 0]))
    assert added(bits_of(x), 1, keep=True).shape == (4, 1) and added(bits_of(x), None).shape == ()
    assert added(bits_of(x), None, keep=True).shape == (1, 1)
    ones = running(narrow(np.ones(300, np.float32)), 0, np.add)
    assert widen(ones)[[99, 255, 299]].tolist() == [100.0, 256.0, 256.0]


def test_a_product_in_16_bits_is_as_right_as_pytorchs() -> None:
    """As in a check of `learn`: a second operand that lies along k, whose sums PyTorch takes apart on a CPU."""

    def draw(seed: int) -> list[correct.Error]:
        generator = torch.Generator().manual_seed(seed)
        a, b = (torch.randn(side, 128, generator=generator).half() for side in (3, 17))
        ours = by_tensor_cores(a.numpy(), b.T.numpy(), np.zeros((3, 17), np.float32))
        return [correct.error("c", torch.from_numpy(ours), a.float() @ b.T.float(), a.double() @ b.T.double())]

    error = correct.settled(draw, 64, times=1)
    assert error.ratio < 1.5, error  # one after another, they are 1.6 to 3.4 times as far off
