"""A module on meta tensors: the same products as its config's census, forward and backward, and nothing computed."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

from sublight.errors import BadInput
from sublight.predict import census, config, machine
from sublight.predict.module import HOST_CALL_S, predict_module
from sublight.predict.step import Step

H100 = machine.find("h100")


class Block(torch.nn.Module):  # type: ignore[misc]
    """GPT-2's layer, with its sizes."""

    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.first, self.second = torch.nn.LayerNorm(hidden), torch.nn.LayerNorm(hidden)
        self.qkv, self.out = torch.nn.Linear(hidden, 3 * hidden), torch.nn.Linear(hidden, hidden)
        self.up, self.down = torch.nn.Linear(hidden, 4 * hidden), torch.nn.Linear(4 * hidden, hidden)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, hidden = x.shape
        q, k, v = self.qkv(self.first(x)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        y = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(batch, length, hidden))
        return x + self.down(torch.nn.functional.gelu(self.up(self.second(x))))


def flops(found: object, *kinds: str) -> float:
    return sum(op.runs * op.operation.cost.total_flops for op in found.ops if op.operation.kind in kinds)  # type: ignore[attr-defined]


@pytest.mark.parametrize("train", [False, True])
def test_the_products_are_those_of_the_census(train: bool) -> None:
    block = Block(768, 12).bfloat16()
    x = torch.randn(2, 128, 768, dtype=torch.bfloat16, requires_grad=train)
    found = predict_module(block, x, machine=H100, train=train)
    gpt2 = config.load("gpt2")
    ops = census.census(gpt2, Step(mode="train", batch=2, context=128))
    wanted = ("qkv projection", "attention", "output projection", "MLP up", "MLP down")
    names = [name for part in wanted for name in (part, f"{part} (weight)")]
    of_layer = [op for op in ops if op.name in names and (train or op.direction == "fwd")]
    assert flops(found, "product", "attention") == pytest.approx(sum(op.cost.total_flops for op in of_layer))
    assert found.floor_s <= found.expected_s and found.unknown == ()
    assert found.parameter_bytes == 2 * sum(p.numel() for p in block.parameters())
    assert "attention" in str(found) and "H100" in str(found)


def test_the_module_is_left_as_it_is() -> None:
    layer = torch.nn.Linear(8, 8)
    before = layer.weight.clone()
    predict_module(layer, torch.randn(2, 8), machine=H100, train=True)
    assert layer.weight.device.type == "cpu" and torch.equal(layer.weight, before) and layer.weight.grad is None


def test_a_convolution_and_a_norm() -> None:
    net = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3, padding=1), torch.nn.BatchNorm2d(8), torch.nn.ReLU())
    found = predict_module(net, torch.randn(2, 3, 16, 16), machine=H100)
    product = next(op.operation for op in found.ops if op.operation.kind == "product")
    assert product.shape == {"m": 512, "n": 8, "k": 27} and product.cost.total_flops == 2 * 512 * 8 * 27


def test_a_batch_of_products_is_as_many_groups() -> None:
    class Scores(torch.nn.Module):  # type: ignore[misc]
        def forward(self, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
            return torch.bmm(q, k.transpose(1, 2))

    found = predict_module(Scores(), torch.randn(6, 32, 64), torch.randn(6, 48, 64), machine=H100)
    product = next(op.operation for op in found.ops if op.operation.kind == "product")
    assert product.shape == {"m": 6 * 32, "n": 48, "k": 64, "groups": 6}
    assert product.cost.total_flops == 2 * 6 * 32 * 48 * 64


def test_what_cannot_run_on_meta_tensors_is_one_line() -> None:
    class Reads(torch.nn.Module):  # type: ignore[misc]
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * x.sum().item()

    with pytest.raises(BadInput, match="Reads cannot run on meta tensors"):
        predict_module(Reads(), torch.randn(2), machine=H100)


class Remembers(torch.nn.Module):
    """As rotary embeddings keep their tables."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.table, self.calls = torch.nn.Linear(8, 8), None, 0

    def forward(self, x: Any) -> Any:
        self.table, self.calls = x.cos() if self.table is None else self.table, self.calls + 1
        return self.inner(x * self.table)


def test_a_module_keeps_nothing_of_it() -> None:
    module, x = Remembers(), torch.randn(4, 8)
    predict_module(module, x, machine=machine.find("h100"))
    assert module.table is None and module.calls == 0 and module.inner.weight.device.type == "cpu"
    assert module(x).device.type == "cpu"
    with pytest.raises(BadInput, match="not int"):
        predict_module(3, x, machine=machine.find("h100"))


class Masked(torch.nn.Module):  # type: ignore[misc]
    """Asks its data a question, as Hugging Face's models do of their masks."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2 if (x == x).all() else x.cumsum(0).sort().values


def test_a_question_to_the_data_is_taken_as_true_and_said() -> None:
    found = predict_module(Masked(), torch.randn(8, 8), machine=H100)
    assert found.guesses == 1 and {op.operation.name for op in found.ops} >= {"mul", "eq"}
    assert not {"cumsum", "sort"} & {op.operation.name for op in found.ops}
    assert "asks 1 times" in str(found)


class Drops(torch.nn.Module):  # type: ignore[misc]
    """Skips a layer now and then, as Whisper, BART and OPT do when they train."""

    def __init__(self, share: float) -> None:
        super().__init__()
        self.layers, self.share = torch.nn.ModuleList(torch.nn.Linear(8, 8) for _ in range(3)), share

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            if torch.rand([]) < self.share:
                continue
            x = layer(x)
        return x


@pytest.mark.parametrize(("share", "layers"), [(0.0, 3), (0.1, 3), (0.9, 0)])
def test_a_draw_by_chance_turns_out_as_is_likely(share: float, layers: int) -> None:
    found = predict_module(Drops(share), torch.randn(4, 8), machine=H100)
    assert sum(op.runs for op in found.ops if op.operation.kind == "product") == layers and found.guesses == 0


def test_small_ops_wait_for_their_host_and_large_ones_do_not() -> None:
    layers = torch.nn.Sequential(*(torch.nn.ReLU() for _ in range(50)))
    small, large = (predict_module(layers, torch.empty(size, device="meta"), machine=H100) for size in (8, 1 << 30))
    assert small.calls == large.calls == 50 and small.host_s == pytest.approx(50 * HOST_CALL_S)
    assert small.eager_s == small.host_s > small.expected_s and "is the limit" in str(small)
    assert large.eager_s == large.expected_s > large.host_s and "is the limit" not in str(large)
