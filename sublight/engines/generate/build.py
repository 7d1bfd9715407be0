"""An engine from a model's folder: data type, packing of weights, and how many tokens its cache holds."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from sublight.engines.generate import config as configs
from sublight.engines.generate import layers
from sublight.engines.generate import weights as reading
from sublight.engines.generate.engine import PAGE, Engine
from sublight.engines.generate.llama import Llama
from sublight.errors import BadInput, one_of
from sublight.fix.quantize.model import WAYS

DTYPES = ("float32", "bfloat16", "float16")
SHORT = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
PACKED = {"int4": "w4a16", "int8": "w8a16"}  # words for ways that people use
CPU_CACHE_BYTES = 1 << 30  # of a cache whose size nobody gave …
GPU_CACHE = 0.9  # … and on a GPU, of the memory that is free once the weights are there


@dataclass(frozen=True, slots=True, kw_only=True)
class Build:
    """What a user may say of an engine; what is left out is derived."""

    folder: Path
    device: str  # cuda or cpu
    mode: str = "ours"
    dtype: str = ""
    weights: str = ""
    batch: int = 64  # texts at a time
    chunk: int = 512  # tokens of a step
    cache: int = 0  # tokens; 0: as many as fit
    longest: int = 0  # tokens of a text; 0: as the model was made for
    graphs: bool = True


def build(how: Build) -> Engine:
    """Everything is checked before weights are read."""
    if how.batch < 1 or how.chunk < 1 or how.cache < 0 or how.longest < 0:
        raise BadInput(f"--batch {how.batch}, --chunk {how.chunk}, --cache {how.cache}: give 1 or more")
    mode: Any = one_of("mode", how.mode, layers.MODES)
    config = configs.read(how.folder)
    words = how.weights.removesuffix(reading.HEAD)
    packing = PACKED.get(words, words)
    if how.weights:
        one_of("way of --weights", packing, (*WAYS, *PACKED))
    if how.longest > config.longest:
        raise BadInput(f"{how.longest} tokens are more than the model's {config.longest} positions: ask for fewer")
    dtype = getattr(torch, dtype_of(how, config))
    weights = reading.load(config, how.folder, dtype=dtype, device=how.device, how=packing + how.weights[len(words) :])
    longest = how.longest or config.longest
    model = Llama(config, weights, mode=mode, longest=longest)
    pages = -(-(how.cache or cache_tokens(config, dtype, how.device, how.batch * longest)) // PAGE)
    return Engine(model, pages=pages, most_texts=how.batch, most_tokens=how.chunk, graphs=how.graphs)


def dtype_of(how: Build, config: configs.Config) -> str:
    """fp32 on a CPU; on a GPU bf16, or fp16 where others packed to four bits: their scales are in fp16, which bf16
    rounds."""
    usual = "float32" if how.device == "cpu" else "float16" if config.packing.is_four_bits else "bfloat16"
    return one_of("dtype", SHORT.get(how.dtype, how.dtype) or usual, DTYPES)


def cache_tokens(config: configs.Config, dtype: torch.dtype, device: str, most: int) -> int:
    """How many tokens the cache gets: as many as fit into free memory, but no more than all texts can use."""
    token_bytes = 2 * config.layers * config.kv_heads * config.head_dim * dtype.itemsize
    free = GPU_CACHE * torch.cuda.mem_get_info()[0] if device == "cuda" else float(CPU_CACHE_BYTES)
    tokens = min(most, int(free) // token_bytes)
    if tokens < PAGE:
        raise BadInput(f"no room for a cache: a token takes {token_bytes} bytes; pack the weights (--weights w4a16)")
    return tokens
