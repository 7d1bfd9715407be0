"""Feed-forward blocks in every layout: which child is which is found by trying; values and gradients stay."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

import torch.nn.functional as F
from torch import nn

from sublight import correct
from sublight.fix.patch.conftest import error_of_all
from sublight.fix.patch.model import patch, unpatch
from sublight.fix.patch.record import Left, Swap
from sublight.fix.patch.rules import mlp

WIDTH, HIDDEN = 16, 24
ACTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
}


class Gated(nn.Module):
    """Children in an order and by names that tell nothing."""

    def __init__(
        self, act: Any = F.silu, width: int = WIDTH, hidden: int = HIDDEN, order: tuple[int, ...] = (0, 1, 2)
    ) -> None:
        super().__init__()
        made = [nn.Linear(width, hidden), nn.Linear(width, hidden, bias=False), nn.Linear(hidden, width)]
        for i in order:
            self.add_module(f"w{order.index(i)}", made[i])
        self.order = order
        self.act = act
        self.drop = nn.Dropout(0.2)

    def forward(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        gate, up, down = (self.get_submodule(f"w{self.order.index(i)}") for i in range(3))
        return self.drop(down(self.drop(up(x) * self.act(gate(x))))) * scale


class Halves(nn.Module):
    def __init__(self, act: Any = F.silu, first: bool = True, noise: float = 0.0) -> None:
        super().__init__()
        self.down, self.both = nn.Linear(HIDDEN, WIDTH), nn.Linear(WIDTH, 2 * HIDDEN)
        self.first, self.act, self.noise = first, act, noise

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        one, other = self.both(x).split(HIDDEN, -1)
        h = self.act(one) * other if self.first else one * self.act(other)
        return self.down(F.dropout(h, self.noise, self.training))


class Plain(nn.Module):
    def __init__(self, act: Any) -> None:
        super().__init__()
        self.up, self.down, self.act = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH), act

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.act(self.up(x)))


class Attention(nn.Module):
    """Three projections, no block: it wants a mask."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(self.q(x), self.k(x), self.v(x), mask)


def equal_after_patch(module: Any) -> None:
    other = copy.deepcopy(module)
    assert patch(module, rules=(mlp.MLP,)).swapped == 1
    for training in (False, True):
        module.train(training), other.train(training)
        x = torch.randn(2, 5, WIDTH)
        for each in (module, other):
            torch.manual_seed(7)  # of the dropouts, which are called as before
            each.zero_grad()
            each.result = each(x)
            each.result.square().sum().backward()
        torch.testing.assert_close(module.result, other.result)
        for p, q in zip(module.parameters(), other.parameters(), strict=True):
            torch.testing.assert_close(p.grad, q.grad)
    assert unpatch(module) == 1
    del module.result, other.result


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))), ids=str)
@pytest.mark.parametrize("sizes", [(WIDTH, HIDDEN), (WIDTH, WIDTH)], ids=str)
def test_gate_up_and_down_are_found(order: tuple[int, ...], sizes: tuple[int, int]) -> None:
    equal_after_patch(Gated(F.silu, *sizes, order=order))


@pytest.mark.parametrize("act", ACTS)
def test_the_activation_is_found(act: str) -> None:
    answer = mlp.find(Gated(ACTS[act]), nn.Module())
    assert isinstance(answer, Swap) and answer.op == mlp.GATED_OPS[act]
    equal_after_patch(Gated(ACTS[act]))


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("act", ACTS)
def test_halves_of_one_projection(act: str, first: bool) -> None:
    equal_after_patch(Halves(ACTS[act], first))


@pytest.mark.parametrize("act", [F.gelu, ACTS["gelu_tanh"], lambda x: F.relu(x) ** 2])
def test_plain_blocks_with_a_function(act: Any) -> None:
    equal_after_patch(Plain(act))


@pytest.mark.parametrize("width", [2048, 4096])
def test_wide_blocks_cost_nothing(width: int) -> None:
    with torch.device("meta"):
        module = Gated(ACTS["gelu_tanh"], width, 3 * width)
    answer = mlp.find(module, nn.Module())
    assert isinstance(answer, Swap) and answer.op == "geglu" and "w0 and w1" in answer.what


@pytest.mark.parametrize(
    ("module", "reason"),
    [
        (Gated(F.relu), "silu, gelu"),
        (Gated(nn.Sigmoid()), "silu, gelu"),
        (Halves(noise=0.3), "training"),
        (Plain(nn.GELU()), None),  # the activation is a module: its own rule
        (Plain(F.relu), None),
        (Attention(), None),
        (nn.Sequential(nn.Linear(WIDTH, HIDDEN), nn.GELU(), nn.Linear(HIDDEN, WIDTH)), None),
        (nn.TransformerEncoderLayer(WIDTH, 2), None),
    ],
)
def test_what_is_left(module: Any, reason: str | None) -> None:
    answer = mlp.find(module, nn.Module())
    assert answer is None if reason is None else isinstance(answer, Left) and reason in answer.reason


def test_hooks_are_called() -> None:
    module = Gated(nn.SiLU())
    patch(module, rules=(mlp.MLP,))
    x, heard = torch.randn(2, WIDTH), []
    module.w0.register_forward_hook(lambda *arguments: heard.append("w0"))
    module(x)
    handle = module.act.register_forward_hook(lambda *arguments: heard.append("act"))
    module(x)
    assert heard == ["w0", "w0", "act"]
    unpatch(module)
    assert isinstance(mlp.find(module, nn.Module()), Left)
    handle.remove()
    assert isinstance(mlp.find(module, nn.Module()), Swap)


def test_other_calls_get_the_modules_own_forward() -> None:
    module = Gated().eval()
    x = torch.randn(2, WIDTH)
    expected = module(x, 3.0)
    patch(module, rules=(mlp.MLP,))
    assert torch.equal(module(x, 3.0), expected) and torch.equal(module(x=x, scale=3.0), expected)


def test_under_autocast_and_a_compiler() -> None:
    module = Gated(nn.SiLU()).eval()
    x = torch.randn(2, WIDTH)
    with torch.autocast("cpu", torch.bfloat16):
        expected = module(x)
        patch(module, rules=(mlp.MLP,))
        torch.testing.assert_close(module(x), expected)
    torch.testing.assert_close(torch.compile(module, backend="eager", fullgraph=True)(x), module(x))


FAMILIES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "Llama": ("LlamaConfig", "LlamaForCausalLM", {}),
    "Gemma": ("GemmaConfig", "GemmaForCausalLM", {"head_dim": 8}),
    "Phi-3": ("Phi3Config", "Phi3ForCausalLM", {}),
    "Qwen3": ("Qwen3Config", "Qwen3ForCausalLM", {"head_dim": 8}),
    "GPT-2": ("GPT2Config", "GPT2LMHeadModel", {"n_positions": 64}),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_families(family: str) -> None:
    transformers = pytest.importorskip("transformers")
    from sublight.fix.patch.rules import ACTIVATION, EMBEDDING, MLP, NORM, SOFTMAX

    config, kind, options = FAMILIES[family]
    sizes = {"vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "pad_token_id": 0}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2} if family != "GPT-2" else {"n_head": 4}
    model = getattr(transformers, kind)(getattr(transformers, config)(**sizes, **options)).eval()
    ids = torch.randint(1, 96, (2, 9))
    exact = copy.deepcopy(model).double()
    for each in (model, exact):
        each(input_ids=ids, labels=ids).loss.backward()
    before = [p.grad.clone() for p in model.parameters()]
    keys = list(model.state_dict())
    found = patch(model, rules=(MLP, NORM, ACTIVATION, SOFTMAX, EMBEDDING))
    assert {"GPT-2": "activation"}.get(family, "mlp") in {row.rule for row in found.rows if row.is_swapped}
    model.zero_grad()
    model(input_ids=ids, labels=ids).loss.backward()
    after, truth = ([p.grad for p in each.parameters()] for each in (model, exact))
    assert (error := error_of_all(after, before, truth)).ok, error
    assert keys == list(model.state_dict())


@pytest.mark.gpu
@pytest.mark.parametrize("module", [Gated(nn.SiLU()), Halves(), Halves(first=False), Gated(F.gelu)])
def test_on_the_gpu(module: Any) -> None:
    module = copy.deepcopy(module).to("cuda", torch.bfloat16).eval()
    plain = copy.deepcopy(module)
    truth = copy.deepcopy(plain).double()
    x = torch.randn(2, 5, WIDTH, device="cuda", dtype=torch.bfloat16)
    assert patch(module, x, rules=(mlp.MLP,)).swapped == 1

    def draw(seed: int) -> list[correct.Error]:
        x = torch.randn(2, 5, WIDTH, generator=torch.Generator().manual_seed(seed)).to("cuda", torch.bfloat16)
        return [correct.error("y", module(x), plain(x), truth(x.double()))]

    error = correct.settled(draw)
    assert error.ok, error
