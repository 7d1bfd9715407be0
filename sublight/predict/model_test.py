"""Parameters and cache bytes are exact: those of the published checkpoints, by their classes on meta tensors."""

from __future__ import annotations

import pytest

from sublight.predict import config, model

PARAMETERS = {  # each counted from its class in transformers 5.22, ResNet from torchvision's
    "llama-2-7b": 6_738_415_616,
    "llama-2-70b": 68_976_648_192,
    "llama-3-8b": 8_030_261_248,
    "llama-3-70b": 70_553_706_496,
    "llama-3.2-1b": 1_235_814_400,
    "llama-3.2-3b": 3_212_749_824,
    "mistral-7b": 7_241_732_096,
    "mixtral-8x7b": 46_702_792_704,
    "qwen2.5-7b": 7_615_616_512,
    "qwen3-0.6b": 596_049_920,
    "qwen3-30b-a3b": 30_532_122_624,
    "gpt-oss-20b": 20_914_757_184,
    "gemma-2-9b": 9_241_705_984,
    "phi-4": 14_659_507_200,
    "deepseek-v3": 671_026_419_200,  # without the layer that predicts a second token
    "gpt2": 124_439_808,
    "gpt2-xl": 1_557_611_200,
    "bert-base": 109_482_240,
    "vit-b-16": 86_567_656,
    "resnet-50": 25_557_032,
}
ACTIVE_BILLIONS = {"mixtral-8x7b": 12.9, "deepseek-v3": 37.0, "qwen3-30b-a3b": 3.3, "qwen3-235b-a22b": 22.0}


@pytest.mark.parametrize("name", PARAMETERS)
def test_parameters_are_the_published_ones(name: str) -> None:
    assert model.parameters(config.load(name)) == PARAMETERS[name]


@pytest.mark.parametrize("name", ACTIVE_BILLIONS)
def test_active_parameters_round_to_the_published_ones(name: str) -> None:
    found = model.parameters(config.load(name), active=True) / 1e9
    assert found == pytest.approx(ACTIVE_BILLIONS[name], rel=0.02)


@pytest.mark.parametrize(
    ("name", "bytes_per_token"),
    [
        ("llama-2-7b", 2 * 32 * 32 * 128 * 2),  # 512 KiB, of the vLLM paper's kind of sum
        ("llama-3-8b", 131_072),
        ("llama-3-70b", 327_680),  # 320 KiB
        ("deepseek-v3", 61 * 576 * 2),  # 70 KB, DeepSeek-V3's report: 512 + 64 numbers a layer
        ("qwen3-235b-a22b", 192_512),
    ],
)
def test_cache_bytes(name: str, bytes_per_token: int) -> None:
    assert model.cache_bytes(config.load(name), 1, 1, 16) == bytes_per_token
    assert model.cache_bytes(config.load(name), 3, 100, 8) == 150 * bytes_per_token


def test_a_window_bounds_the_cache() -> None:
    gemma, oss = config.load("gemma-2-9b"), config.load("gpt-oss-20b")
    assert [(block.count, block.window) for block in gemma.blocks] == [(21, 4096), (21, None)]
    layer = 2 * 8 * 256 * 2
    assert model.cache_bytes(gemma, 1, 8192, 16) == layer * 21 * (4096 + 8192)
    assert {block.window for block in oss.blocks} == {128, None}


def test_an_encoder_has_no_cache() -> None:
    assert model.cache_bytes(config.load("bert-base"), 8, 512, 16) == 0


def test_at_least_25_models_are_known_and_each_names_its_source() -> None:
    names = config.known_names()
    assert len(names) >= 25
    assert all("http" in config.load(name).source for name in names)
