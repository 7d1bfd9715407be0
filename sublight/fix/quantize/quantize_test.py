"""Packed layers in a model: what is taken, what is left, there and back, files, others' checkpoints."""

from __future__ import annotations

import copy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")
F = torch.nn.functional

import sublight
from sublight.errors import BadInput
from sublight.fix.quantize import files
from sublight.fix.quantize.checkpoints import AWQ_ORDER, from_awq, from_gptq
from sublight.fix.quantize.linear import PackedLinear
from sublight.fix.quantize.model import quantize, unquantize
from sublight.ops.matmul.packing import dequantize

WIDTH, VOCAB = 128, 40


class Model(torch.nn.Module):
    def __init__(self, *, tied: bool = False) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(VOCAB, WIDTH)
        self.up, self.down = torch.nn.Linear(WIDTH, 2 * WIDTH), torch.nn.Linear(2 * WIDTH, WIDTH, bias=False)
        self.odd = torch.nn.Linear(WIDTH, 100)
        self.small = torch.nn.Linear(100, WIDTH)
        self.head = torch.nn.Linear(WIDTH, VOCAB, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def get_output_embeddings(self) -> Any:
        return self.head

    def forward(self, ids: Any, labels: Any = None) -> Any:
        x = self.embed(ids)
        x = x + self.down(F.silu(self.up(x)))
        logits = self.head(x + self.small(self.odd(x)))
        return SimpleNamespace(logits=logits, loss=None if labels is None else F.cross_entropy(logits.mT, labels))


def batch() -> tuple[Any, Any]:
    ids = torch.randint(VOCAB, (2, 9), generator=torch.Generator().manual_seed(0))
    return ids, ids.roll(-1, 1)


def test_layers_are_packed_and_come_back_bit_by_bit() -> None:
    torch.manual_seed(0)
    model, (ids, labels) = Model(), batch()
    before, state = model(ids).logits, copy.deepcopy(model.state_dict())
    weight = model.up.weight
    done = quantize(model, verify=(ids, labels))
    by_name = {name: row for row in done.rows for name in row.names}
    assert {name for name, row in by_name.items() if row.is_changed} == {"up", "down", "odd"}
    assert "output head" in by_name["head"].reason and "do not divide k = 100" in by_name["small"].reason
    assert done.change.startswith("loss ") and "%" in done.change
    assert isinstance(model.up, PackedLinear) and not isinstance(model.head, PackedLinear)
    assert by_name["up"].after_bytes < by_name["up"].before_bytes / 7  # 4 bits of 32, and scales
    off = (model(ids).logits - before).norm() / before.norm()
    assert 0 < off < 0.1
    assert sublight.unpatch(model) == 3
    assert model.up.weight is weight and torch.equal(model(ids).logits, before)
    assert all(torch.equal(x, state[name]) for name, x in model.state_dict().items())


@pytest.mark.parametrize(("how", "least", "most"), [("w8a16", 0.0, 0.005), ("w4a16", 0.005, 0.1), ("w2a16", 0.1, 1.0)])
def test_fewer_bits_change_more(how: str, least: float, most: float) -> None:
    torch.manual_seed(0)
    model, (ids, _) = Model(), batch()
    before = model(ids).logits
    quantize(model, how, skip=())
    assert least < (model(ids).logits - before).norm() / before.norm() < most


def test_a_packed_layer_is_the_layer_of_the_weight_it_stands_for() -> None:
    torch.manual_seed(0)
    layer = torch.nn.Sequential(torch.nn.Linear(256, 24))
    quantize(layer)
    x = torch.randn(3, 5, 256, requires_grad=True)
    y = layer(x)
    expected = F.linear(x, layer[0].weight, layer[0].bias)
    torch.testing.assert_close(y, expected)
    torch.testing.assert_close(*(torch.autograd.grad(z.square().sum(), x)[0] for z in (y, expected)))
    assert layer[0].bias.requires_grad  # what lies beside the weight is trained on
    with torch.autocast("cpu", torch.bfloat16):
        assert layer(x).dtype == torch.bfloat16


def test_what_something_hangs_on_is_left() -> None:
    model = Model(tied=True)
    model.up.register_forward_hook(lambda *_: None)
    model.down.weight.data[0, 0] = float("nan")
    torch.nn.utils.parametrize.register_parametrization(model.odd, "weight", torch.nn.Identity())
    reasons = {name: row.reason for row in quantize(model, skip=()).rows for name in row.names}
    assert "shares" in reasons["head"] and "hooks" in reasons["up"] and "finite" in reasons["down"]
    assert "odd" not in reasons or "parameter" in reasons["odd"]  # torch gives it a class of its own
    assert not any(isinstance(module, PackedLinear) for module in model.modules())


def test_names_and_patterns_are_skipped() -> None:
    done = quantize(Model(), skip=("up", "d*"))
    assert {row.reason for row in done.rows if set(row.names) & {"up", "down"}} == {"skipped, as asked"}


def test_gpt2s_own_layers() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(n_layer=1, n_embd=128, n_head=2, vocab_size=64, n_positions=32)
    torch.manual_seed(0)
    model = transformers.GPT2LMHeadModel(config).eval()
    ids = torch.randint(64, (1, 8))
    before = model(ids).logits
    done = quantize(model, "w8a16")
    assert done.changed == 4
    assert (model(ids).logits - before).norm() / before.norm() < 0.01
    unquantize(model)
    assert torch.equal(model(ids).logits, before)


def test_a_file_there_and_back(tmp_path: Path) -> None:
    pytest.importorskip("safetensors")
    torch.manual_seed(0)
    model, (ids, _) = Model(tied=True), batch()
    quantize(model)
    sublight.save_quantized(model, tmp_path / "packed.safetensors")
    torch.manual_seed(1)
    other = Model(tied=True)
    assert sublight.load_quantized(other, tmp_path / "packed.safetensors") == 3
    assert torch.equal(other(ids).logits, model(ids).logits)
    with pytest.raises(BadInput, match="not here any more"):
        sublight.unpatch(other)
    (tmp_path / "broken.safetensors").write_bytes(b"nothing")
    for file, words in (("none", "not a file"), ("broken.safetensors", "no safetensors file")):
        with pytest.raises(BadInput, match=words):
            sublight.load_quantized(Model(), tmp_path / file)
    with pytest.raises(BadInput, match="which this model has not"):
        sublight.load_quantized(torch.nn.Sequential(torch.nn.Linear(2, 2)), tmp_path / "packed.safetensors")


def words_of(values: Any, order: tuple[int, ...]) -> Any:
    """Eight values (…, 8 * n) a word, place i holding the value at order[i]: AWQ's and GPTQ's definition."""
    eights = values.view(*values.shape[:-1], -1, 8).to(torch.int64)
    words = sum(eights[..., order[i]] << (4 * i) for i in range(8))
    return torch.where(words >= 2**31, words - 2**32, words).int()


@pytest.mark.parametrize("kind", ("gptq", "awq"))
def test_others_checkpoints(kind: str) -> None:
    generator = torch.Generator().manual_seed(0)
    k, n, group = 256, 24, 64
    values = torch.randint(16, (k, n), generator=generator)
    zeros = torch.randint(1, 16, (k // group, n), generator=generator)
    scales, bias = (
        torch.rand(k // group, n, generator=generator).half() + 0.5,
        torch.randn(n, generator=generator).half(),
    )
    whole = (values - zeros.repeat_interleave(group, 0)) * scales.float().repeat_interleave(group, 0)  # (in, out)
    tensors = {"scales": scales, "bias": bias}
    if kind == "gptq":
        plain = tuple(range(8))
        tensors |= {
            "qweight": words_of(values.T.contiguous(), plain).T.contiguous(),
            "qzeros": words_of(zeros - 1, plain),
            "g_idx": torch.arange(k, dtype=torch.int32) // group,
        }
        layer = from_gptq(tensors)
    else:
        tensors |= {"qweight": words_of(values, AWQ_ORDER), "qzeros": words_of(zeros, AWQ_ORDER)}
        layer = from_awq(tensors)
    assert torch.equal(layer.weight, whole.half().T) and torch.equal(layer.bias, bias)


def test_a_checkpoint_that_does_not_fit_is_refused() -> None:
    k, n = 128, 8
    tensors = {
        "qweight": torch.zeros(k // 8, n, dtype=torch.int32), "qzeros": torch.zeros(1, 1, dtype=torch.int32),
        "scales": torch.ones(1, n),
    }  # fmt: skip
    assert from_gptq(tensors).out_features == n
    for change, words in (
        ({"g_idx": torch.zeros(k, dtype=torch.int32) + 1}, "another order"),
        ({"scales": torch.ones(2, n)}, "do not fit"),
        ({"scales": torch.ones(0, n)}, "do not fit"),
        ({"scales": torch.tensor(1.0)}, "are matrices"),
        ({"qweight": torch.zeros(k // 8, n)}, "int32"),
    ):
        with pytest.raises(BadInput, match=words):
            from_gptq(tensors | change)
    with pytest.raises(BadInput, match="qzeros is not here"):
        from_awq({name: x for name, x in tensors.items() if name != "qzeros"})


def test_bad_input_is_refused_in_one_line(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    model = Model()
    for call, words in (
        (lambda: quantize(3), "takes a torch.nn.Module, not int"),
        (lambda: quantize(model, "w4"), "unknown way 'w4'"),
        (lambda: quantize(model, skip=("lm_head",)), "names no module"),
        (lambda: quantize(model, skip=[0]), "a layer's name in quotes"),  # type: ignore[list-item]
        (lambda: quantize(model, skip=5), "a list of layers' names"),  # type: ignore[arg-type]
        (lambda: quantize(model, group=0), "a whole number of weights"),
        (lambda: quantize(model, rounds=1.5), "a whole number of rounds"),  # type: ignore[arg-type]
        (lambda: sublight.save_quantized(None, "a file"), "takes a torch.nn.Module, not NoneType"),
        (lambda: quantize(torch.nn.Linear(128, 8)), "wrap it"),
    ):
        with pytest.raises(BadInput, match=words):
            call()
    assert not any(isinstance(module, PackedLinear) for module in model.modules())
    sublight.quantize(model)
    out = capsys.readouterr().out
    words = " ".join(out.split())
    assert "3 layers packed: " in words and "sublight.unpatch(model) undoes it" in words
    assert max(map(len, out.splitlines())) <= 80


class Tied(torch.nn.Module):
    """One layer under two names, a matrix that two parameters read, one of them turned, and a part of it."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.first = self.again = torch.nn.Linear(128, 128)
        self.norm = torch.nn.BatchNorm1d(128)
        self.drop = torch.nn.Dropout(0.5)
        whole = torch.randn(8, 8)
        self.whole, self.turned = torch.nn.Parameter(whole), torch.nn.Parameter(whole.T)
        self.part = torch.nn.Parameter(whole[:4])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.drop(self.norm(self.again(self.first(x))))


def test_a_layer_of_two_names_is_packed_under_both() -> None:
    model, x = Tied(0), torch.randn(4, 128)
    before = model.eval()(x)
    quantize(model)
    assert model.first is model.again and isinstance(model.again, PackedLinear)
    assert unquantize(model) == 1 and type(model.first) is torch.nn.Linear
    assert model.first is model.again and torch.equal(model(x), before)


def test_verifying_leaves_the_model_as_it_was() -> None:
    model, x = Tied(0).train(), torch.randn(64, 128)
    state = {name: value.clone() for name, value in model.norm.state_dict().items()}
    assert float(quantize(model, "w8a16", verify=x).change.split("%")[0].rpartition(" ")[2]) < 1, "no dropout in it"
    assert all(torch.equal(value, state[name]) for name, value in model.norm.state_dict().items())
    assert model.drop.training and model.first.training


def test_undone_in_what_the_model_has_become() -> None:
    model = Tied(0)
    quantize(model)
    model.half()
    unquantize(model)
    assert {p.dtype for p in model.parameters()} == {torch.float16}


def test_what_is_put_in_a_layers_place_comes_back_with_it() -> None:
    """A state that is assigned, not copied, is of other parameters: a bias, and weights that are trained sparse."""
    for training in (False, True):
        model = torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH), torch.nn.ReLU())
        sublight.sparsify(model, training=True, quiet=True) if training else quantize(model)
        state = {name: x + 1 if x.is_floating_point() else x for name, x in model.state_dict().items()}
        model.load_state_dict(state, assign=True)
        assert sublight.unpatch(model) == 1
        assert torch.equal(model[0].bias, state["0.bias"])
        assert torch.equal(model[0].weight, state["0.weight"]) if training else "0.weight" not in state


@pytest.mark.parametrize(
    ("dtype", "how", "weights"),
    [
        (torch.float16, "w8a16", torch.linspace(-1e-5, 1e-5, 128)),  # steps of 8e-8 where float16 has 6e-8
        (torch.float16, "w4a16", torch.linspace(-1e-7, 1e-7, 128)),  # no step at all
        (torch.bfloat16, "w8a16", torch.linspace(5.0, 6.0, 128)),  # a zero of -1265, which bfloat16 has to within 4
        (torch.float16, "w4a16", torch.tensor([3e4] * 127 + [3e4 + 32])),  # a zero beyond float16
    ],
)
def test_what_scales_cannot_hold_is_left(dtype: Any, how: str, weights: Any) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(128, 2).to(dtype))
    model[0].weight.data.copy_(weights)
    before = model[0].weight.clone()
    (row,) = quantize(model, how).rows
    assert not row.is_changed and "too coarse" in row.reason and torch.equal(model[0].weight, before)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("offset", [0.0, 2.5])  # beyond 0: a zero outside of the codes, of -510 in 8 bits
def test_ordinary_weights_are_packed_to_half_a_step(dtype: Any, bits: int, offset: float) -> None:
    """In bfloat16, too, whose scales have 8 bits themselves: they are rounded up, and codes go by what is stored."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(256, 64))
    if offset:
        model[0].weight.data.copy_(torch.linspace(offset - 0.5, offset + 0.5, 64).repeat(64, 4))
    model.to(dtype)
    weight = model[0].weight.detach().float()
    (row,) = quantize(model, f"w{bits}a16", group=64).rows
    assert row.is_changed
    grouped = weight.view(64, -1, 64)
    step = (grouped.amax(-1) - grouped.amin(-1)) / (2**bits - 1)
    layer = model[0]
    packed = dequantize(layer.packed, layer.scales.float(), layer.zeros.float(), bits, 256)
    off = (packed - weight).view_as(grouped).abs().amax(-1)
    assert bool((off <= 0.51 * (1 + 2**-7) * step).all())


def test_tensors_that_share_memory_come_back_as_they_were(tmp_path: Path) -> None:
    model, other = Tied(0), Tied(1)
    quantize(model)
    sublight.save_quantized(model, tmp_path / "a.safetensors")
    assert sublight.load_quantized(other, tmp_path / "a.safetensors") == 1 and other.first is other.again
    state = other.state_dict()
    assert all(torch.equal(x, state[name]) for name, x in model.state_dict().items())
    assert [path.name for path in tmp_path.iterdir()] == ["a.safetensors"]
    with pytest.raises(BadInput, match="cannot be written"):
        sublight.save_quantized(model, tmp_path / "none" / "a.safetensors")


def test_a_file_that_does_not_fit_changes_nothing(tmp_path: Path) -> None:
    model, file = torch.nn.Sequential(torch.nn.Linear(128, 8)), tmp_path / "a.safetensors"
    quantize(model)
    sublight.save_quantized(model, file)
    more = torch.nn.Sequential(torch.nn.Linear(128, 8), torch.nn.Linear(8, 2))
    for other, words in (
        (more, "only in one of them"),
        (torch.nn.Sequential(torch.nn.Linear(256, 8)), r"packs 0 as \(8, 128\), and it is \(8, 256\)"),
        (torch.nn.Sequential(torch.nn.Linear(128, 8, bias=False)), "only in one of them"),
        (torch.nn.Sequential(torch.nn.ReLU()), "no linear layer"),
        (model, "is a PackedLinear here"),
    ):
        kinds = [type(module) for module in other]
        with pytest.raises(BadInput, match=words):
            sublight.load_quantized(other, file)
        assert [type(module) for module in other] == kinds


def test_a_file_of_another_packing_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, file = torch.nn.Sequential(torch.nn.Linear(128, 8)), tmp_path / "a.safetensors"
    quantize(model)
    with monkeypatch.context() as patch:
        patch.setattr(files, "VERSION", 1)
        sublight.save_quantized(model, file)
    with pytest.raises(BadInput, match="another version"):
        sublight.load_quantized(torch.nn.Sequential(torch.nn.Linear(128, 8)), file)


def test_one_name_to_skip_needs_no_tuple() -> None:
    model = Model()
    first = next(name for name, module in model.named_modules() if type(module) is torch.nn.Linear)
    assert (first,) in [row.names for row in quantize(model, skip=first).rows if not row.is_changed]
