"""One row by fewer launches: Hugging Face's tokens, the model is left as it was, and which layers it is for."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

import sublight
from sublight.fix.attention import one_row
from sublight.fix.attention.paged_cache import paged_cache
from sublight.fix.graph.fake import Fake
from sublight.fix.quantize.linear import PackedLinear
from sublight.ops.matmul.packing import dequantize, quantize_weight

pytestmark = pytest.mark.usefixtures("one_thread")
COMMON: dict[str, Any] = {
    **{"vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4},
    **{"num_key_value_heads": 2, "max_position_embeddings": 128, "bos_token_id": None, "eos_token_id": None},
    **{"pad_token_id": 0},
}
LLAMA_3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA_3 |= {"original_max_position_embeddings": 32, "rope_theta": 1e4}


def model_of(family: str, dtype: Any = torch.float64, **more: Any) -> Any:
    """fp64, which PyTorch's ops compute."""
    torch.manual_seed(5)
    config = getattr(transformers, f"{family}Config")(**COMMON | more)
    made = getattr(transformers, f"{family}ForCausalLM")(config).eval().to(dtype)
    for parameter in made.parameters():
        torch.nn.init.normal_(parameter, mean=float(parameter.dim() == 1), std=0.3)
    return made


def prompt(seed: int, device: str = "cpu") -> dict[str, Any]:
    ids = torch.randint(1, 97, (1, 11), generator=torch.Generator().manual_seed(seed)).to(device)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "max_new_tokens": 6, "do_sample": False}


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """As if every weight could be streamed; the rows that were."""
    monkeypatch.setattr(one_row, "why_not_streamed", lambda *args: "")
    real, found = one_row.streamed, []

    def counted(x: Any, *args: Any, **options: Any) -> Any:
        found.append(len(x))
        return real(x, *args, **options)

    monkeypatch.setattr(one_row, "streamed", counted)
    return found


@pytest.mark.parametrize(
    ("family", "more"),
    [
        ("Llama", {"rope_parameters": LLAMA_3, "attention_bias": True, "mlp_bias": True}),
        ("Mistral", {"sliding_window": 9}),
        ("Qwen2", {"tie_word_embeddings": True}),
    ],
)
def test_tokens_are_hugging_faces(family: str, more: dict[str, Any], streams: list[int]) -> None:
    model = model_of(family, **more)
    expected = [model.generate(**prompt(seed)) for seed in (1, 2)]
    before = {name: x.clone() for name, x in model.state_dict().items()}
    if family == "Llama":
        sublight.patch(model, only=["norm"], quiet=True)
    for _ in range(2):
        with paged_cache(model, batch=1, tokens=17, page=4, backend=Fake()) as cache:
            assert not cache.why_not_rows
            for seed, tokens in zip((1, 2), expected, strict=True):
                cache.reset()
                assert torch.equal(model.generate(**prompt(seed), past_key_values=cache), tokens)
            assert "1 captured" in str(cache.report()), "one graph for both"
    assert set(streams) == {1}
    assert all(x.nbytes == x.untyped_storage().nbytes() for x in model.parameters()), "laid apart again"
    after = model.state_dict()
    assert all(torch.equal(x, after[name]) for name, x in before.items()), "the same values under the same names"
    sublight.unpatch(model)
    assert not any("forward" in vars(module) for module in model.modules())
    assert torch.equal(model.generate(**prompt(1)), expected[0])


def test_memory_and_what_holds_the_parameters(streams: list[int], tmp_path: Path) -> None:
    model = model_of("Qwen2")
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    attention, expected = model.model.layers[1].self_attn, model.generate(**prompt(1))

    def held() -> int:
        kept = {p.untyped_storage().data_ptr(): p.untyped_storage().nbytes() for p in model.parameters()}
        return sum(kept.values())

    before = held()
    with torch.inference_mode(), paged_cache(model, batch=1, tokens=17, backend=Fake()):
        assert held() == before
        names = ("q_proj", "k_proj", "v_proj")
        assert len({getattr(attention, name).weight.untyped_storage().data_ptr() for name in names}) == 1
        model.save_pretrained(tmp_path / "inside")
    model.save_pretrained(tmp_path / "after")
    for name in ("inside", "after"):
        again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / name, dtype=torch.float64)
        assert torch.equal(again.generate(**prompt(1)), expected)
    assert held() == before
    model.train()
    model(prompt(1)["input_ids"]).logits.sum().backward()
    was = attention.k_proj.weight.clone()
    optimizer.step()
    assert torch.equal(attention.k_proj.weight, was - attention.k_proj.weight.grad), "parameters still learn"


def _moved(model: Any) -> None:
    model.float().double()


def _loaded(model: Any) -> None:
    model.load_state_dict({name: x * 1.1 for name, x in model.state_dict().items()}, assign=True)


def _loaded_in_place(model: Any) -> None:
    model.load_state_dict({name: x * 1.1 for name, x in model.state_dict().items()})


def _another(model: Any) -> None:
    attention = model.model.layers[0].self_attn
    attention.v_proj = copy.deepcopy(attention.v_proj)
    attention.v_proj.weight.data *= 2


def _listened(model: Any) -> None:
    model.model.layers[0].mlp.up_proj.register_forward_hook(lambda module, given, out: out * 2)


@pytest.mark.parametrize("change", [_moved, _loaded, _loaded_in_place, _another, _listened])
def test_a_layer_that_is_changed_meanwhile_is_seen(change: Any, streams: list[int]) -> None:
    """Inside of the context, before anything is captured: tokens are those of the changed model."""
    model = model_of("Qwen2")
    with paged_cache(model, batch=1, tokens=17, backend=Fake()) as cache:
        change(model)
        found = model.generate(**prompt(1), past_key_values=cache)
    assert torch.equal(found, model.generate(**prompt(1)))


class Wrapped(torch.nn.Linear):
    pass


def _hook(model: Any) -> None:
    model.model.layers[1].mlp.up_proj.register_forward_hook(lambda *args: None)


def _own_forward(model: Any) -> None:
    norm = model.model.layers[0].input_layernorm
    norm.forward = lambda x: x


def _shared(model: Any) -> None:
    attention = model.model.layers[0].self_attn
    attention.k_proj = attention.v_proj


def _sliced(model: Any) -> None:
    weight = model.model.layers[0].mlp.down_proj.weight
    weight.data = torch.cat((weight.data, weight.data))[: len(weight)]


def _wrapped(model: Any) -> None:
    model.model.layers[0].self_attn.o_proj.__class__ = Wrapped


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (_hook, "Linear has hooks"),
        (_own_forward, "LlamaRMSNorm has hooks, or a forward of its own"),
        (_wrapped, "several kinds"),
        (lambda model: model.train(), "call its eval()"),
        (lambda model: setattr(model.model.layers[1].mlp, "act_fn", torch.nn.GELU()), "the activation is GELU"),
        (lambda model: model.model.layers.append(model.model.layers[0]), "layers share weights"),
        (_shared, "layers share weights"),
        (lambda model: model.model.layers[0].input_layernorm.float(), "several data types"),
        (_sliced, "parts of other tensors"),
    ],
)
def test_layers_that_are_not_as_they_were_made_run_their_own_code(change: Any, reason: str, streams: list[int]) -> None:
    model = model_of("Llama", num_hidden_layers=2)
    assert not one_row.why_not(model)
    change(model)
    assert reason in one_row.why_not(model)


def test_what_else_runs_its_own_code(streams: list[int]) -> None:
    assert "GemmaDecoderLayer is not a layer of" in one_row.why_not(model_of("Gemma", head_dim=8))
    model = model_of("Llama")
    for options in ({"batch": 2}, {"batch": 1, "scope": "none"}):
        with paged_cache(model, tokens=17, **options) as cache:
            assert cache.why_not_rows == "it is for one text inside of a graph"
    with paged_cache(model, batch=1, tokens=17, backend=Fake()) as cache:
        expected = model(prompt(1)["input_ids"][:, :3], use_cache=False).logits  # many rows, with a gradient
        assert expected.requires_grad and not streams
        model.generate(**prompt(1), past_key_values=cache)
        assert streams


def test_packed_layers_are_laid_together() -> None:
    weights = [torch.randn(rows, 64) for rows in (6, 4, 5)]
    layers = []
    for weight in weights:
        packed, scales, zeros = quantize_weight(weight, 4, 32)
        layers.append(PackedLinear(packed, scales, zeros, torch.nn.Parameter(weight[:, 0]), bits=4, in_features=64))
    expected = torch.cat([layer.weight for layer in layers])
    joined = one_row.Joined(layers)
    whole = joined.product
    assert joined.holds
    assert torch.equal(dequantize(whole.packed, whole.scales, whole.zeros, 4, 64), expected)
    assert torch.equal(whole.bias, torch.cat([weight[:, 0] for weight in weights]))
    assert layers[1].packed.data_ptr() == whole.packed[6:].data_ptr() and torch.equal(layers[1].weight, expected[6:10])
    joined.apart()
    assert not joined.holds and torch.equal(layers[1].weight, expected[6:10])


@pytest.mark.gpu
@pytest.mark.parametrize("how", ["", "w4a16"])
def test_a_hopper_gives_what_its_layers_give(how: str) -> None:
    """Logits of a step against float64's, no further than twice what the model's own code is."""
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs a Hopper GPU")
    sizes = {"hidden_size": 1024, "intermediate_size": 2048, "num_attention_heads": 16, "num_key_value_heads": 4}
    model = model_of("Llama", torch.bfloat16, **sizes).cuda()
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.03)
    if how:
        sublight.quantize(model, how, rounds=0, keep=False, quiet=True)
    given = prompt(1, "cuda")
    ids = torch.randint(1, 97, (20,), device="cuda")

    def steps(scope: Any) -> Any:
        with torch.no_grad(), paged_cache(model, batch=1, tokens=40, scope=scope) as cache:
            assert bool(cache.why_not_rows) == (scope == "none")
            found = [model(given["input_ids"], past_key_values=cache).logits[0, -1]]
            found += [model(each.view(1, 1), past_key_values=cache).logits[0, -1] for each in ids]
            return torch.stack(found).double()

    theirs, ours = steps("none"), steps("head")
    if how:
        for layer in model.model.layers:
            for part in (layer.self_attn, layer.mlp):
                for name, module in list(part.named_children()):
                    if isinstance(module, PackedLinear):
                        made = torch.nn.Linear(module.in_features, module.out_features, bias=False, device="cuda")
                        made.weight.data = module.weight.data
                        setattr(part, name, made)
    with torch.no_grad():
        exact = model.double()(torch.cat((given["input_ids"], ids[None]), 1)).logits[0, 10:]
    error, bound = ((x - exact).pow(2).mean().sqrt() for x in (ours, theirs))
    assert error <= 2 * bound, (error, bound)
