"""What is changed after `patch` counts: the module's own code runs again, and says so once."""

from __future__ import annotations

import copy
import io
import os
import pickle
import threading
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

from torch import nn

from sublight.fix.patch.model import is_patched, patch, unpatch
from sublight.fix.patch.trials import batch, model
from sublight.report import patch as report

WIDTH = 16


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(WIDTH, 24), nn.Linear(WIDTH, 24)
        self.down, self.act = nn.Linear(24, WIDTH), nn.SiLU()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.act(self.gate(x)) * self.up(x))  # type: ignore[no-any-return]


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.RMSNorm(WIDTH, eps=1e-6), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x)
        x = x + y
        return self.norm(x)  # type: ignore[no-any-return]


class FunctionGated(Gated):
    def __init__(self) -> None:
        super().__init__()
        del self.act
        self.act = nn.functional.silu


class Config:
    def __init__(self) -> None:
        self.limit: float | None = None
        self.unread = 1


class Configured(Gated):
    """Its config says whether it clamps."""

    def __init__(self) -> None:
        super().__init__()
        self.config = Config()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate = self.gate(x)
        if self.config.limit is not None:
            gate = gate.clamp(max=self.config.limit)
        return self.down(self.act(gate) * self.up(x))  # type: ignore[no-any-return]


class Other(nn.LayerNorm):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * 3


def rows() -> torch.Tensor:
    return torch.randn(3, 4, WIDTH, generator=torch.Generator().manual_seed(2))


def ids() -> torch.Tensor:
    return torch.randint(0, 9, (3, 4), generator=torch.Generator().manual_seed(2))


def logits() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(6, 5, generator=torch.Generator().manual_seed(2)), torch.tensor([0, 1, 2, 3, 4, 0])


def put(name: str, value: Any) -> Callable[[Any], None]:
    def change(module: Any) -> None:
        *path, last = name.split(".")
        for each in path:
            module = getattr(module, each)
        setattr(module, last, value)

    return change


def other_class(module: Any) -> None:
    module.__class__ = Other


CHANGES: dict[str, tuple[Callable[[], Any], Callable[[Any], None], Callable[[], Any]]] = {
    "norm.eps": (lambda: nn.LayerNorm(WIDTH), put("eps", 0.5), rows),
    "rms.eps": (lambda: nn.RMSNorm(WIDTH, eps=1e-6), put("eps", 0.5), rows),
    "norm.bias": (lambda: nn.LayerNorm(WIDTH), put("bias", None), rows),
    "Softmax.dim": (lambda: nn.Softmax(-1), put("dim", 0), rows),
    "GELU.approximate": (lambda: nn.GELU(), put("approximate", "tanh"), rows),
    "mlp.act": (Gated, put("act", nn.GELU()), rows),
    "mlp.act by function": (FunctionGated, put("act", nn.functional.gelu), rows),
    "mlp.gate": (Gated, put("gate", nn.Sequential(nn.Linear(WIDTH, 24), nn.Tanh())), rows),
    "mlp.down": (Gated, put("down", nn.Sequential(nn.Linear(24, WIDTH), nn.Tanh())), rows),
    "mlp.config": (Configured, put("config.limit", 0.1), rows),
    "loss.weight": (nn.CrossEntropyLoss, put("weight", torch.arange(5.0)), logits),
    "loss.label_smoothing": (nn.CrossEntropyLoss, put("label_smoothing", 0.3), logits),
    "Embedding.max_norm": (lambda: nn.Embedding(9, WIDTH), put("max_norm", 0.1), ids),
    "Embedding.scale": (lambda: nn.Embedding(9, WIDTH), put("scale_grad_by_freq", True), ids),
    "layer.norm.eps": (Layer, put("norm.eps", 0.5), rows),
    "layer.norm": (Layer, put("norm", nn.LayerNorm(WIDTH)), rows),
    "layer.norm.forward": (Layer, put("norm.forward", lambda x: x * 2), rows),
    "class": (lambda: nn.LayerNorm(WIDTH), other_class, rows),
}


def outcome(module: Any, inputs: Any) -> list[torch.Tensor]:
    module.zero_grad()
    inputs = inputs if isinstance(inputs, tuple) else (inputs,)
    y = module(*inputs)
    if y.requires_grad:
        y.square().sum().backward()
    return [y.detach(), *(p.grad.clone() for p in module.parameters() if p.grad is not None)]


@pytest.mark.filterwarnings("ignore:.*has changed since sublight.patch")
@pytest.mark.parametrize("case", CHANGES)
def test_what_is_changed_after_it_counts(case: str) -> None:
    make, change, inputs = CHANGES[case]
    torch.manual_seed(0)
    plain = make()
    module = copy.deepcopy(plain)
    assert patch(module).swapped
    for each in (plain, module):
        change(each)
    torch.testing.assert_close(outcome(module, inputs()), outcome(plain, inputs()))


def test_it_says_so_once() -> None:
    module = nn.LayerNorm(WIDTH)
    patch(module)
    module(rows())
    module.eps = 0.5
    with pytest.warns(UserWarning, match=r"LayerNorm has changed since sublight.patch \(eps\)"):
        module(rows())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        module(rows())


def test_what_its_code_does_not_read_may_change() -> None:
    module = Configured()
    patch(module)
    module.config.unread = 2
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        module(rows())
    module.config.limit = 1.0  # which it does read: so it was still patched
    with pytest.warns(UserWarning, match="has changed since sublight.patch"):
        module(rows())


def test_a_class_whose_forward_is_replaced_runs_the_new_one(monkeypatch: pytest.MonkeyPatch) -> None:
    module = Gated()
    patch(module)
    monkeypatch.setattr(Gated, "forward", lambda self, x: x * 7)
    with pytest.warns(UserWarning, match="its class's forward"):
        assert torch.equal(module(rows()), rows() * 7)


@pytest.mark.filterwarnings("ignore:.*has changed since sublight.patch")
@pytest.mark.parametrize("make", (Gated, Layer))
def test_a_hook_for_all_modules_hears_every_call(make: Callable[[], Any]) -> None:
    plain = make()
    module = copy.deepcopy(plain)
    patch(module)
    heard: list[str] = []
    handle = nn.modules.module.register_module_forward_hook(lambda each, *rest: heard.append(type(each).__name__))
    try:
        plain(rows())
        expected, heard[:] = list(heard), []
        module(rows())
    finally:
        handle.remove()
    assert heard == expected and len(expected) > 1


def test_a_copy_is_patched_and_unchanged() -> None:
    module = nn.Sequential(Gated(), Layer(), FunctionGated())
    patch(module)
    copied = copy.deepcopy(module)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        torch.testing.assert_close(copied(rows()), module(rows()))
    assert sum(map(is_patched, copied.modules())) == sum(map(is_patched, module.modules()))


def test_compiled_it_sees_a_child_that_lacks_a_setting() -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate, self.up, self.down = nn.Linear(16, 24), nn.Linear(16, 24), nn.Linear(24, 16)
            self.act = nn.SiLU()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.down(self.act(self.gate(x)) * self.up(x))  # type: ignore[no-any-return]

    torch._dynamo.reset()
    module, x = Block(), torch.randn(3, 16)
    plain = copy.deepcopy(module)
    assert patch(module).swapped == 1
    module.act, plain.act = nn.Tanh(), nn.Tanh()
    compiled = torch.compile(module, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(x), plain(x))


def test_compiled_it_sees_a_change_too() -> None:
    plain = nn.LayerNorm(WIDTH)
    module = copy.deepcopy(plain)
    patch(module)
    compiled = torch.compile(module, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(rows()), plain(rows()))
    module.eps = plain.eps = 0.5
    torch.testing.assert_close(compiled(rows()), plain(rows()))


def test_a_loaded_pickle_can_be_patched() -> None:
    found = model()
    patch(found)
    loaded = pickle.loads(pickle.dumps(found))
    assert patch(loaded).swapped == 3 and unpatch(loaded) == 3
    file = io.BytesIO()
    torch.save(found, file)
    file.seek(0)
    again = torch.load(file, weights_only=False)
    assert patch(again).swapped == 3
    torch.testing.assert_close(again(batch()), found(batch()))


class WideNorm(nn.Module):
    """As Llama's: its first op makes a tensor of its own, whatever came in."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(WIDTH) + 0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.to(torch.float32)
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
        return self.weight * wide.to(x.dtype)


def test_a_tensor_of_inference_mode_may_come_in() -> None:
    plain = WideNorm()
    module = copy.deepcopy(plain)
    assert patch(module).swapped == 1
    with torch.inference_mode():
        x = rows()
    for each in (plain, module):
        each(x).sum().backward()
    torch.testing.assert_close(module.weight.grad, plain.weight.grad)


def test_four_threads_may_patch_one_model() -> None:
    found, swaps = model(), []
    threads = [threading.Thread(target=lambda: swaps.append(patch(found).swapped)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(swaps) == [0, 0, 0, 3] and unpatch(found) == 3
    assert not any("forward" in vars(module) for module in found.modules())


def test_a_second_patch_says_that_it_was_one() -> None:
    found = model()
    patch(found)
    second = patch(found)
    assert "patched already: 3 modules" in report.sentence(second)


@pytest.fixture
def on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    yield


def test_on_a_cpu_it_says_that_pytorchs_ops_run(on_a_cpu: None) -> None:
    assert any("on a CPU, where PyTorch's ops run" in note for note in patch(model()).notes)


def test_verify_and_measure_say_when_they_did_nothing(on_a_cpu: None) -> None:
    report = patch(model(), verify=batch(), measure=batch())
    assert {note.split()[0] for note in report.notes if "did nothing" in note} == {"verify", "measure"}


def test_the_soft_cap_of_a_config_counts() -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": 53, "hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 1, "head_dim": 8}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "pad_token_id": 0, "eos_token_id": None}
    plain = transformers.Gemma2ForCausalLM(transformers.Gemma2Config(**sizes, **heads))
    found = copy.deepcopy(plain)
    patch(found)
    tokens = torch.randint(1, 53, (2, 7))
    for each in (plain, found):
        each.config.final_logit_softcapping = 0.01
    with pytest.warns(UserWarning, match="logits has changed"):
        ours = found(input_ids=tokens, labels=tokens)
    torch.testing.assert_close(ours.loss, plain(input_ids=tokens, labels=tokens).loss)
    assert ours.logits is not None


@pytest.mark.parametrize("columns", (80, 100))
def test_the_table_can_be_read(columns: int) -> None:
    from rich.console import Console

    class Clamped(Gated):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.down((self.act(self.gate(x)) * self.up(x)).clamp(-7, 7))  # type: ignore[no-any-return]

    console = Console(width=columns, record=True, file=io.StringIO())
    console.print(report.page(patch(nn.Sequential(Clamped(), Gated(), Layer(), nn.Softmax(0)))))
    shown = console.export_text()
    assert "…" not in shown and max(map(len, shown.splitlines())) <= columns
    assert shown.count("swapped  ") == 3 and shown.count("left  ") == 2
    for word in ("values", "not", "proven:", "activation", "dimension"):
        assert word in shown
