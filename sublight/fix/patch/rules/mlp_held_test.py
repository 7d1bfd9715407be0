"""What a gated block holds for backward: gate and up, not their product, unless somebody would notice."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

import torch.nn.functional as F
from torch import nn

from sublight import correct
from sublight.fix.patch.model import patch, unpatch
from sublight.fix.patch.rules import mlp
from sublight.fix.patch.rules.mlp_test import HIDDEN, WIDTH, Gated, Halves

DRAWS = 8  # of which the errors are pooled: that of 16 sums alone varies more than twofold


class Block(nn.Module):
    """As Llama has it."""

    def __init__(self, bias: bool = False, width: int = WIDTH, hidden: int = HIDDEN, **drops: float) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(width, hidden, bias=bias), nn.Linear(width, hidden, bias=bias)
        self.down = nn.Linear(hidden, width, bias=bias)
        for name, p in drops.items():  # inner, outer
            self.add_module(name, nn.Dropout(p))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = F.silu(self.gate(x)) * self.up(x)
        y = self.down(self.inner(h) if "inner" in self._modules else h)
        return self.outer(y) if "outer" in self._modules else y


def patched(module: Any) -> Any:
    assert patch(module, rules=(mlp.MLP,)).swapped == 1
    return module


def nodes(y: torch.Tensor) -> set[str]:
    """Of the graph behind y, by name."""
    found, rest = set(), [y.grad_fn]
    while rest:
        if (node := rest.pop()) is not None:
            found.add(node.name())
            rest += [each for each, _ in node.next_functions]
    return found


def is_fused(y: torch.Tensor) -> bool:
    return "_GatedLinearBackward" in nodes(y)


def run(module: Any, x: torch.Tensor, make: Callable[..., Any] = lambda module, x: module(x)) -> list[torch.Tensor]:
    """The result and every gradient, x's last."""
    torch.manual_seed(7)
    x = x.clone().requires_grad_()
    y = make(module, x)
    asked = [p for p in module.parameters() if p.requires_grad]
    return [y, *torch.autograd.grad(y.square().sum(), [*asked, x])]


def equal(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> bool:
    torch.testing.assert_close(ours, theirs)
    return len(ours) > 2


@pytest.mark.parametrize("module", [Block(), Block(bias=True), Halves(), Halves(first=False), Halves(F.gelu), Gated()])
def test_training_holds_no_product(module: Any) -> None:
    module.eval()  # but for Gated's dropout
    plain, wide = copy.deepcopy(module), copy.deepcopy(module).double()
    module = patched(module)

    def draw(seed: int) -> list[correct.Error]:
        x = torch.randn(3, 5, WIDTH, generator=torch.Generator().manual_seed(seed))
        ours, theirs, truth = run(module, x), run(plain, x), run(wide, x.double())
        assert is_fused(ours[0]) and not is_fused(theirs[0])
        return [correct.error("", *triple) for triple in zip(ours, theirs, truth, strict=True)]

    error = correct.settled(draw, DRAWS)
    assert error.ok, error


def held(module: Any, x: torch.Tensor) -> list[torch.Tensor]:
    """What a call leaves for backward, each memory once; not what the module owns."""
    found: dict[int, torch.Tensor] = {}
    own = {p.data_ptr() for p in module.parameters()}
    with torch.autograd.graph.saved_tensors_hooks(lambda x: found.setdefault(x.data_ptr(), x), lambda x: x):
        module.result = module(x)
    del module.result
    return [x for at, x in found.items() if at not in own]


@pytest.mark.parametrize("module", [Block(), Block(bias=True), Halves()])
def test_gate_and_up_are_all_that_is_held(module: Any) -> None:
    x = torch.randn(3, 5, WIDTH)
    plain = held(module, x)
    found = held(patched(module), x)
    one = 4 * 3 * 5 * HIDDEN
    sizes = [each.numel() * each.element_size() for each in found]
    assert sum(sizes) == 2 * one + 4 * 3 * 5 * WIDTH  # gate and up; x, for the first projections
    assert sum(each.numel() * each.element_size() for each in plain) >= sum(sizes) + one
    gate, up = module.both(x).chunk(2, -1) if hasattr(module, "both") else (module.gate(x), module.up(x))
    h = (F.silu(gate) * up).flatten()
    assert any(each.numel() == h.numel() and torch.allclose(each.flatten(), h) for each in plain)
    assert not any(each.numel() == h.numel() and torch.allclose(each.flatten(), h) for each in found)


HOOKS: dict[str, Callable[..., Any]] = {
    "forward": lambda down, hear: down.register_forward_hook(hear),
    "with kwargs": lambda down, hear: down.register_forward_hook(hear, with_kwargs=True),
    "before forward": lambda down, hear: down.register_forward_pre_hook(hear),
    "backward": lambda down, hear: down.register_full_backward_hook(hear),
    "before backward": lambda down, hear: down.register_full_backward_pre_hook(hear),
    "any forward": lambda down, hear: nn.modules.module.register_module_forward_hook(hear),
    "before any forward": lambda down, hear: nn.modules.module.register_module_forward_pre_hook(hear),
    "any backward": lambda down, hear: nn.modules.module.register_module_full_backward_hook(hear),
    "before any backward": lambda down, hear: nn.modules.module.register_module_full_backward_pre_hook(hear),
}


@pytest.mark.parametrize("hook", HOOKS)
def test_who_listens_to_the_last_projection_hears(hook: str) -> None:
    module, heard = patched(Block()), []
    theirs = run(copy.deepcopy(module), x := torch.randn(2, WIDTH))

    def hear(module: Any, *arguments: Any) -> None:
        heard.append(module)

    handle = HOOKS[hook](module.down, hear)
    ours = run(module, x)
    handle.remove()
    assert module.down in heard and not is_fused(ours[0]) and equal(ours, theirs)
    assert is_fused(run(module, x)[0])


def test_other_projections_are_called() -> None:
    class Adapted(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return 2 * super().forward(x)

    def own_forward(module: Block) -> None:
        module.down.forward = lambda x: 2 * nn.Linear.forward(module.down, x)

    def adapted(module: Block) -> None:
        module.down.__class__ = Adapted

    def normed(module: Block) -> None:
        nn.utils.parametrizations.weight_norm(module.down)
        module.down.parametrizations.weight.original0.data *= 2

    for change in (own_forward, adapted, normed):
        module, x = patched(Block()), torch.randn(2, WIDTH)
        before = module(x)
        change(module)
        after = module(x)
        assert not is_fused(after)
        torch.testing.assert_close(after, 2 * before)
    module.down = nn.Linear(HIDDEN, WIDTH)
    assert is_fused(module(x))
    module.down.compile(backend="eager")
    assert not is_fused(module(x))
    torch._dynamo.reset()


@pytest.mark.parametrize(
    ("module", "fused"),
    [
        (Block(inner=0.5), False),
        (Block(inner=0.0), True),
        (Block(inner=0.5).eval(), True),
        (Block(outer=0.5), True),
        (Gated(), False),
    ],
)
def test_dropout_before_and_after_it(module: Any, fused: bool) -> None:
    theirs = run(copy.deepcopy(module), x := torch.randn(2, 9, WIDTH))
    ours = run(patched(module), x)
    assert is_fused(ours[0]) is fused and equal(ours, theirs)
    if hasattr(module, "inner"):
        module.inner.register_forward_hook(lambda *arguments: None)
        assert not is_fused(module(x))


def test_what_is_frozen() -> None:
    x = torch.randn(2, WIDTH)
    module = patched(Block(bias=True))
    plain = copy.deepcopy(module)
    unpatch(plain)
    for frozen, fused in (("down.weight", False), ("down.bias", True), ("gate.weight", True), ("up.weight", True)):
        for each in (module, plain):
            each.requires_grad_(True).get_parameter(frozen).requires_grad_(False)
        assert equal(run(module, x), run(plain, x))
        assert is_fused(module(x)) is fused
    module.requires_grad_(False).down.requires_grad_(True)
    assert not is_fused(module(x))  # neither gate nor up is held
    assert is_fused(module(x.clone().requires_grad_()))
    with torch.no_grad():
        assert module(x).grad_fn is None


def test_backward_twice_leaves_what_others_hold() -> None:
    module, seen = patched(Block(bias=True)), {}
    for name in ("gate", "up"):
        module.get_submodule(name).register_forward_hook(lambda m, args, out, name=name: seen.update({name: out}))
    y = module(torch.randn(2, 9, WIDTH))
    before = {name: out.detach().clone() for name, out in seen.items()}
    first, second = (torch.autograd.grad(y.square().sum(), module.parameters(), retain_graph=True) for _ in range(2))
    assert is_fused(y) and all(map(torch.equal, first, second))
    assert all(torch.equal(seen[name], before[name]) for name in before)
    with torch.no_grad():
        seen["gate"].mul_(2)
    with pytest.raises(RuntimeError, match="inplace"):  # as PyTorch says of whatever it holds
        y.sum().backward()


def test_gradients_of_gradients() -> None:
    module, x = patched(Block()), torch.randn(2, WIDTH)
    plain = copy.deepcopy(module)
    unpatch(plain)

    def second(module: Any, x: torch.Tensor) -> torch.Tensor:
        (dx,) = torch.autograd.grad(module(x).square().sum(), x, create_graph=True)
        return dx

    ours = run(module, x, second)
    assert is_fused(module(x)) and equal(ours, run(plain, x, second))


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_checkpoints(use_reentrant: bool) -> None:
    from torch.utils.checkpoint import checkpoint

    def grads(module: Any, x: torch.Tensor) -> list[torch.Tensor]:
        y = checkpoint(module, x.clone().requires_grad_(), use_reentrant=use_reentrant)
        assert not is_fused(y)  # what is made again up to the last tensor that is held must be PyTorch's
        module.zero_grad()
        y.square().sum().backward()
        return [p.grad for p in module.parameters()]

    module, x = Block(), torch.randn(2, 9, WIDTH)
    theirs = grads(module, x)
    assert equal(grads(patched(module), x), theirs)


def test_autocast_and_compilers_have_it_as_before() -> None:
    module, x = patched(Block()), torch.randn(2, WIDTH)
    plain = copy.deepcopy(module)
    unpatch(plain)
    with torch.autocast("cpu", torch.bfloat16):
        ours, theirs = run(module, x), run(plain, x)
    assert not is_fused(ours[0]) and equal(ours, theirs)
    compiled = torch.compile(module, backend="eager", fullgraph=True)
    ours = run(compiled, x)
    assert not is_fused(ours[0]) and equal(ours, run(plain, x))
    torch._dynamo.reset()
    torch.testing.assert_close(torch.func.functional_call(module, dict(plain.named_parameters()), x), plain(x))
    torch.testing.assert_close(torch.func.vmap(module)(x), plain(x))
    assert torch.jit.trace(module, x)(x).shape == x.shape
    assert any(node.target == "down" for node in torch.fx.symbolic_trace(module).graph.nodes)


def test_wrapped_for_many_gpus(one_process: None) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    module, x = Block(bias=True), torch.randn(2, 9, WIDTH)
    module(x).square().sum().backward()
    theirs = [p.grad for p in module.parameters()]
    module.zero_grad()
    sharded, whole = patched(copy.deepcopy(module)), nn.parallel.DistributedDataParallel(patched(module))
    fully_shard(sharded, mesh=init_device_mesh("cpu", (1,)), reshard_after_forward=True)
    for wrapped in (whole, sharded):
        y = wrapped(x)
        assert is_fused(y)
        y.square().sum().backward()
    torch.testing.assert_close([p.grad for p in module.parameters()], theirs)
    torch.testing.assert_close([p.grad.full_tensor() for p in sharded.parameters()], theirs)


@pytest.mark.gpu
@pytest.mark.parametrize("module", [Block(), Block(bias=True), Halves(), Halves(first=False), Halves(F.gelu)])
def test_training_on_the_gpu_is_as_right_as_pytorch(module: Any) -> None:
    plain = copy.deepcopy(module).to("cuda", torch.bfloat16)
    swapped = patched(copy.deepcopy(plain))

    def draw(seed: int) -> list[correct.Error]:
        x = torch.randn(16, 128, WIDTH, generator=torch.Generator().manual_seed(seed)).to("cuda", torch.bfloat16)
        truth = run(copy.deepcopy(plain).double(), x.double())
        ours, theirs = run(swapped, x), run(plain, x)
        assert is_fused(ours[0])
        return [correct.error(str(i), *triple) for i, triple in enumerate(zip(ours, theirs, truth, strict=True))]

    error = correct.settled(draw)
    assert error.ok, error


@pytest.mark.gpu
def test_the_peak_of_memory_is_lower_by_the_products(monkeypatch: pytest.MonkeyPatch) -> None:
    layers, width, hidden, tokens = 6, 256, 2048, 8192
    model = nn.Sequential(*(Block(width=width, hidden=hidden) for _ in range(layers))).to("cuda", torch.bfloat16)
    x = torch.randn(tokens, width, device="cuda", dtype=torch.bfloat16)

    def peak_bytes() -> int:
        for _ in range(2):  # the first compiles
            model.zero_grad()
            torch.cuda.reset_peak_memory_stats()
            model(x).sum().backward()
        return torch.cuda.max_memory_allocated()

    before = peak_bytes()
    assert patch(model, rules=(mlp.MLP,)).swapped == layers
    after = peak_bytes()
    monkeypatch.setattr(mlp, "holds_product", lambda *tensors: False)
    holding = peak_bytes()
    product = 2 * tokens * hidden
    assert before - after >= layers * product
    # the last layer's own backward holds its product, in its gradient's place, beside two gradients and one of x's size
    assert holding - after >= (layers - 1) * product - x.nbytes - 2**20
