"""The census against arithmetic that is known otherwise: 2 · parameters · tokens, published FLOPs, sums over GPUs."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from sublight.predict import backward, census, config, forward, model
from sublight.predict.operation import Operation
from sublight.predict.step import Parallel, Precision, Step


def product_flops(ops: tuple[Operation, ...], *, attention: bool = True) -> float:
    kinds = ("product", "attention") if attention else ("product",)
    return sum(op.count * op.cost.total_flops for op in ops if op.kind in kinds)


def in_products(name: str) -> int:
    """Parameters that a token is multiplied with: all but tables, norms and biases."""
    found = config.load(name)
    per_layer = [model.attention_parameters(found) + model.mlp_parameters(found, b.inner) for b in found.blocks]
    biases = found.qkv_bias * 3 * found.hidden + found.out_bias * found.hidden
    biases += found.mlp_bias * (found.blocks[0].inner + found.hidden)
    norms = 2 * found.head_dim * found.qk_norm
    return sum(b.count * (n - biases - norms) for b, n in zip(found.blocks, per_layer, strict=True))


@pytest.mark.parametrize("name", ["llama-3-8b", "qwen3-8b", "gpt2", "llama-2-70b"])
def test_dense_flops_are_twice_parameters_times_tokens_plus_attention(name: str) -> None:
    found, batch, context = config.load(name), 3, 512
    ops = census.census(found, Step(mode="train", batch=batch, context=context))
    tokens, head = batch * context, found.hidden * found.vocab
    forward = tuple(op for op in ops if op.direction == "fwd")
    assert product_flops(forward, attention=False) == 2 * tokens * (in_products(name) + head)
    pairs = batch * found.heads * context * (context + 1) // 2
    assert product_flops(forward) - product_flops(forward, attention=False) == 4 * pairs * found.head_dim * found.layers
    backward = tuple(op for op in ops if op.direction == "bwd")
    assert product_flops(backward, attention=False) == 2 * product_flops(forward, attention=False)


@pytest.mark.parametrize(("name", "giga_multiply_adds"), [("resnet-50", 4.09), ("dit-xl-2", 118.6), ("vit-b-16", 17.6)])
def test_published_flops_of_an_image(name: str, giga_multiply_adds: float) -> None:
    """He et al. and torchvision (4.09), the DiT paper's table (118.6), torchvision's ViT (17.56 with attention)."""
    found = config.load(name)
    ops = census.census(found, Step(mode="forward", batch=2, context=found.tokens or 1))
    assert product_flops(ops) / 2 / 2 / 1e9 == pytest.approx(giga_multiply_adds, rel=0.01)


def test_nobody_needs_the_gradient_of_an_image() -> None:
    """48.598 GFLOP of two images, counted by torch.utils.flop_counter on transformers' ResNet-50."""
    ops = census.census(config.load("resnet-50"), Step(mode="train", batch=2, context=1))
    assert product_flops(ops) == 48_598_155_264


def test_a_prompt_needs_the_head_for_its_last_token_only() -> None:
    found = config.load("llama-3-8b")
    ops = {op.name: op for op in census.census(found, Step(mode="prefill", batch=2, context=64))}
    assert ops["head"].shape["m"] == 2 and ops["qkv projection"].shape == {"m": 128, "n": 6144, "k": 4096}


def test_decoding_reads_weights_and_cache_once() -> None:
    found, batch, context = config.load("llama-3-8b"), 4, 1000
    ops = census.census(found, Step(mode="decode", batch=batch, context=context))
    read = sum(op.count * op.cost.read_bytes for op in ops if op.kind in ("product", "attention"))
    weights = 2 * (model.parameters(found) - found.vocab * found.hidden)
    cache = model.cache_bytes(found, batch, context, 16)
    assert read == pytest.approx(weights + cache, rel=0.01)


def test_a_window_cuts_pairs_and_bytes() -> None:
    mistral, context = config.load("mistral-7b"), 16384
    whole = replace(mistral, blocks=(replace(mistral.blocks[0], window=None),))
    for mode in ("prefill", "decode"):
        cut, full = (
            next(op for op in census.census(m, Step(mode=mode, batch=1, context=context)) if op.kind == "attention")
            for m in (mistral, whole)
        )
        assert cut.cost.total_flops < full.cost.total_flops
        if mode == "decode":
            assert cut.shape["kv_len"] == 4096


def test_latent_attention_keeps_and_reads_the_short_vector() -> None:
    found = config.load("deepseek-v3")
    ops = {op.name: op for op in census.census(found, Step(mode="decode", batch=8, context=4096))}
    latent = ops["latent attention"]
    assert latent.cost.read_bytes == pytest.approx(8 * 4096 * 576 * 2 + 8 * 128 * 576 * 2, rel=0.01)
    assert latent.cost.total_flops == 2 * 8 * 128 * 4096 * (576 + 512)


def test_experts_that_no_token_goes_to_are_not_read() -> None:
    found = config.load("mixtral-8x7b")
    one, many = (census.census(found, Step(mode="decode", batch=b, context=64)) for b in (1, 256))
    up = [next(op for op in ops if op.name == "experts up") for ops in (one, many)]
    assert [op.shape.get("groups") for op in up] == [2, 8] and [op.shape["m"] for op in up] == [2, 512]


def test_moe_flops_are_those_of_active_parameters() -> None:
    found = config.load("qwen3-30b-a3b")
    ops = census.census(found, Step(mode="train", batch=1, context=64))
    forward = tuple(op for op in ops if op.direction == "fwd")
    embedding = found.vocab * found.hidden
    expected = 2 * 64 * (model.parameters(found, active=True) - embedding)
    assert product_flops(forward, attention=False) == pytest.approx(expected, rel=1e-3)


def test_checkpointing_runs_layers_again_and_lora_trains_thin_products() -> None:
    found = config.load("llama-3.2-1b")
    step = Step(mode="train", batch=2, context=256)
    plain = product_flops(census.census(found, step))
    again = product_flops(census.census(found, replace(step, checkpointing=True)))
    head = 2 * 512 * found.vocab * found.hidden
    assert again - plain == pytest.approx((plain - 3 * head) / 3, rel=0.05)
    adapted = census.census(found, replace(step, lora=16))
    assert not [op for op in adapted if op.name == "MLP up (weight)"]


@pytest.mark.parametrize(("name", "printed"), [("llama-3.2-1b", 11_272_192), ("llama-3-8b", 41_943_040)])
def test_adapters_are_as_many_as_peft_prints(name: str, printed: int) -> None:
    """Of rank 16 beside each linear layer: q, k and v have one each, so have gate and up."""
    step = Step(mode="train", batch=1, context=1, lora=16)
    assert backward.trained(config.load(name), step) == printed


def test_adapters_are_beside_the_matrices_of_the_checkpoint() -> None:
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1, "num_attention_heads": 4}
    apart, joined = (config.from_config({**sizes, "model_type": kind, "vocab_size": 9}) for kind in ("llama", "phi3"))
    step = Step(mode="train", batch=1, context=1, lora=2)
    assert backward.trained(apart, step) - backward.trained(joined, step) == 2 * 3 * 64  # three thin ones read x more


@pytest.mark.parametrize("ways", [2, 4])
def test_tensor_parallel_parts_add_up(ways: int) -> None:
    found = config.load("llama-3-70b")
    step = Step(mode="prefill", batch=1, context=128)
    one = product_flops(census.census(found, step))
    part = census.census(found, replace(step, parallel=Parallel(tensor=ways)))
    assert product_flops(part) * ways == pytest.approx(one, rel=1e-6)
    links = [op for op in part if op.kind == "link"]
    assert sum(op.count for op in links) == 2 * found.layers


def test_weights_of_four_bits_are_read_with_their_scales() -> None:
    found = config.load("llama-3-8b")
    step = Step(mode="decode", batch=1, context=64)
    wide, narrow = (
        next(op for op in census.census(found, replace(step, precision=p)) if op.name == "norm + MLP up")
        for p in (Precision(), Precision(weights="int4"))
    )
    numel = 28672 * 4096
    assert wide.cost.read_bytes - narrow.cost.read_bytes == numel * 2 - (numel // 2 + numel // 128 * 2)
    assert wide.cost.total_flops == narrow.cost.total_flops


def test_one_token_has_norms_and_activations_inside_the_products() -> None:
    """What is done stays the same, launches are fewer; not where a link, experts or PyTorch's own ops stand between."""
    found, step = config.load("llama-3-8b"), Step(mode="decode", batch=1, context=64)
    ops, apart = (census.census(found, replace(step, eager=eager)) for eager in (False, True))
    names = {op.name for op in ops}
    assert {"norm + qkv projection", "norm + MLP up", "activation + MLP down", "norm + head"} < names
    assert not names & {"norm", "MLP activation"} and {"norm", "MLP activation"} < {op.name for op in apart}
    flops, launches = ([sum(op.count * getattr(op.cost, what) for op in each) for each in (ops, apart)]
                       for what in ("total_flops", "launches"))  # fmt: skip
    assert flops[0] == flops[1] and launches[1] - launches[0] == 65 + 32
    for other in (replace(step, batch=2), replace(step, parallel=Parallel(tensor=2)), replace(step, mode="prefill")):
        assert "norm" in {op.name for op in census.census(found, other)}
    assert "norm" in {op.name for op in census.census(config.load("mixtral-8x7b"), step)}


@pytest.mark.parametrize("tokens", [1, 7, 1000])
def test_touched_experts_stay_within_bounds(tokens: int) -> None:
    found = forward.touched(64, 4, tokens)
    assert min(4, 64) <= found <= min(64, 4 * tokens) and isinstance(found, int)
    assert math.isclose(forward.touched(64, 64, tokens), 64)


@pytest.mark.parametrize("name", config.known_names())
def test_every_known_model_has_a_census(name: str) -> None:
    found = config.load(name)
    modes = ("prefill", "decode", "train") if found.generates else ("forward", "train")
    for mode in modes:
        ops = census.census(found, Step(mode=mode, batch=2, context=found.tokens or 128))
        assert all(op.cost.bytes > 0 and op.count > 0 for op in ops)
        assert len({(op.name, op.direction, tuple(op.shape.items())) for op in ops}) == len(ops)


def test_heads_of_keys_that_gpus_do_not_divide_are_kept_twice() -> None:
    found = config.load("phi-4")  # 10 of them
    part = census.census(found, Step(mode="decode", batch=1, context=64, parallel=Parallel(tensor=4)))
    assert next(op for op in part if op.name == "attention").shape["kv_heads"] == 3


def test_gradients_of_spread_experts_stay_where_they_are() -> None:
    found, step = config.load("qwen3-30b-a3b"), Step(mode="train", batch=8, context=16)
    spread, whole = (replace(step, parallel=Parallel(data=8, expert=expert)) for expert in (8, 1))
    sent, every = (
        next(op for op in census.census(found, each) if op.name == backward.GRADIENTS).shape["numel"]
        for each in (spread, whole)
    )
    experts = 48 * 128 * 3 * 2048 * 768
    assert every == model.parameters(found) and sent == every - experts
