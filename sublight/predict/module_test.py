"""A module on meta tensors: the same products as its config's census, forward and backward, and nothing computed."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

from sublight import units
from sublight.errors import BadInput
from sublight.predict import census, config, estimate, machine
from sublight.predict.memory_test import DOCS, HALF, measured_step_s
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


def test_rows_that_do_not_begin_at_whole_vectors_take_longer_on_the_gpu_where_they_did() -> None:
    """Within a fifth of what cuBLAS took on an H200 (docs/products.md)."""
    h200 = machine.find("h200")
    for m, n, k, step, measured_s in (
        (4096, 100000, 700, 4, 2856.3e-6),
        (8192, 8190, 512, 2, 308.0e-6),
        (8192, 50257, 768, 1, 6630.4e-6),
        (128, 8192, 4095, 1, 79.2e-6),
    ):
        layer, x = (each.bfloat16().to("meta") for each in (torch.nn.Linear(k, 1, bias=False), torch.empty(m, k)))
        layer.weight = torch.nn.Parameter(torch.empty(n, k, dtype=torch.bfloat16, device="meta"))
        (product,) = predict_module(layer, x, machine=h200).ops
        assert product.operation.row_step == step and product.timed.how == "analytic"
        assert product.expected_s == pytest.approx(measured_s, rel=0.2)
        (elsewhere,) = predict_module(layer, x, machine=machine.find("a100")).ops
        even = predict_module(torch.nn.Linear(k // 8 * 8, n // 8 * 8, bias=False, device="meta", dtype=torch.bfloat16),
                              x[:, : k // 8 * 8].contiguous(), machine=machine.find("a100"))  # fmt: skip
        assert elsewhere.expected_s == pytest.approx(even.expected_s, rel=0.1)


def test_a_convolution_s_gradients_are_products() -> None:
    """Two, each as large as the forward pass; of a transposed one, a row for each pixel of its input."""
    for layer, shape in (
        (torch.nn.Conv2d(64, 128, 3, padding=1), {"m": 8192, "n": 128, "k": 576}),
        (torch.nn.ConvTranspose2d(64, 32, 4, 2, 1), {"m": 8192, "n": 512, "k": 64}),
    ):
        x = torch.randn(8, 64, 32, 32, requires_grad=True)
        found = predict_module(layer, x, machine=H100, train=True)
        products = [op.operation for op in found.ops if op.operation.kind == "product"]
        forward = 2.0 * shape["m"] * shape["n"] * shape["k"]
        assert shape in [op.shape for op in products] and len(products) == 3
        assert [op.cost.total_flops for op in products] == [forward] * 3
        assert all(op.expected_s > op.floor_s for op in found.ops if op.operation.kind == "product")


class Checkpointed(torch.nn.Module):  # type: ignore[misc]
    def __init__(self, again: bool) -> None:
        super().__init__()
        self.inner = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.GELU(), torch.nn.Linear(64, 64))
        self.again = again

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.again:
            return torch.utils.checkpoint.checkpoint(self.inner, x, use_reentrant=False)
        return self.inner(x)


def test_a_checkpoint_runs_again_in_the_backward_pass() -> None:
    x = torch.randn(8, 64, requires_grad=True)
    plain, again = (
        flops(predict_module(Checkpointed(each), x, machine=H100, train=True), "product") for each in (False, True)
    )
    assert again == plain / 6 * 7  # what the last product gives, nobody needs again


def test_attention_without_heads_and_what_cannot_be_counted() -> None:
    class Plain(torch.nn.Module):  # type: ignore[misc]
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.nn.functional.scaled_dot_product_attention(x, x, x)

    (op,) = predict_module(Plain(), torch.randn(64, 32), machine=H100).ops
    assert op.operation.shape["heads"] == 1 and op.operation.cost.total_flops == 4 * 64 * 64 * 32
    layer, x = torch.nn.Linear(8, 8), torch.randn(2, 8)
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(BadInput, match="autocast does not reach"):
        predict_module(layer, x, machine=H100)
    assert "cuDNN launches fewer" in str(predict_module(torch.nn.LSTM(8, 8), torch.randn(3, 2, 8), machine=H100))


def hugging_face(name: str) -> Any:
    """The models of benchmarks/end_to_end.py, without data."""
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "vocab_size": 128256}
    sizes |= {"num_attention_heads": 32, "num_key_value_heads": 8, "tie_word_embeddings": True}
    with torch.device("meta"):
        if name == "gpt2":
            plain = transformers.GPT2Config(resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
            return transformers.GPT2LMHeadModel(plain).bfloat16()
        return transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes)).bfloat16()


def decoding_s(model: Any) -> float:
    """A token under a graph: at 600 of 768 places of a static cache."""
    from transformers import StaticCache

    cache = StaticCache(config=model.config, max_cache_len=768)
    with torch.no_grad():
        model(torch.zeros(1, 600, dtype=torch.long, device="meta"), past_key_values=cache, use_cache=True)
    token, place = (torch.zeros(*size, dtype=torch.long, device="meta") for size in ((1, 1), (1,)))
    more = {"past_key_values": cache, "cache_position": place, "use_cache": True}
    return predict_module(model.eval(), input_ids=token, machine=machine.find("h200"), **more).expected_s


def training_s(model: Any, name: str, batch: int, length: int) -> float:
    """A step with AdamW, of which the module knows nothing."""
    ids, h200 = torch.zeros(batch, length, dtype=torch.long, device="meta"), machine.find("h200")
    step = Step(mode="train", batch=batch, context=length, precision=HALF)
    ops = estimate.predict(config.load(name), h200, step).ops
    adam_s = next(op.expected_s for op in ops if op.operation.name == "optimizer")
    return predict_module(model.train(), input_ids=ids, labels=ids, machine=h200, train=True).expected_s + adam_s


HUGGING_FACE = (  # part of the run, its file and variant, what docs/predict.md says is predicted
    ("llama-train", "end_to_end_h200.json", "eager", "152 ms", "−8 %"),
    ("gpt2-train", "end_to_end_h200_calls.json", "eager", "86.2 ms", "+7 %"),
    ("llama-decode", "end_to_end_h200.json", "graph", "2.55 ms", "−8 %"),
)


@pytest.mark.parametrize(("part", "file", "variant", "predicted", "off"), HUGGING_FACE)
def test_steps_of_hugging_face_s_code_as_it_is_hold_the_bar(
    part: str, file: str, variant: str, predicted: str, off: str
) -> None:
    """Within 10 %; other versions of transformers call a few ops more or fewer."""
    measured_s = measured_step_s(file, part=part, variant=variant)
    model = hugging_face("gpt2" if part == "gpt2-train" else "llama-3.2-1b")
    if part == "llama-decode":
        found_s = decoding_s(model)
    else:
        found_s = training_s(model, *(("gpt2", 16, 1024) if part == "gpt2-train" else ("llama-3.2-1b", 4, 2048)))
    assert found_s == pytest.approx(measured_s, rel=0.10)
    assert found_s == pytest.approx(float(predicted.split()[0]) / 1e3, rel=0.02)
    assert f"| {units.text(measured_s, 's')} | {predicted} | {off} |" in DOCS.read_text(encoding="utf-8")
