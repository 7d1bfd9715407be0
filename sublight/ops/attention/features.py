"""Which step of the ladder takes what, and where a call without a name goes, asked of the steps and of the plan: the
table in the docs is made here."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from sublight.backend.device import PRETEND, Facts
from sublight.ops.attention.attention import plan
from sublight.ops.attention.extended import why_no_way
from sublight.ops.attention.extras import Extras
from sublight.ops.attention.ladder import WAYS, why_not, widened


@dataclass(frozen=True, slots=True, kw_only=True)
class Feature:
    """A call that has it; the rest of the call is plain."""

    name: str
    dtype: torch.dtype = torch.bfloat16
    heads: int = 4
    kv_heads: int = 4
    q_len: int = 128
    kv_len: int = 128
    head_dim: int = 128
    value_dim: int = 0  # 0: head_dim
    options: dict[str, Any] = field(default_factory=dict)  # of `why_not`


FEATURES = (
    Feature(name="full, causal", options={"causal": True}),
    Feature(name="sliding window", options={"causal": True, "window": 64}),
    Feature(name="soft cap", options={"softcap": 50.0}),
    Feature(name="ALiBi", options={"extras": Extras(has_slopes=True)}),
    Feature(name="sinks", options={"extras": Extras(has_sinks=True)}),
    Feature(name="dropout", options={"extras": Extras(dropout=0.1)}),
    Feature(name="prefix-LM", options={"causal": True, "extras": Extras(has_prefix=True)}),
    Feature(name="own `mask_mod`, `score_mod`", options={"extras": Extras(mods="own")}),
    Feature(name="packed sequences", options={"extras": Extras(sequences=4)}),
    Feature(name="shared heads (GQA, MQA)", kv_heads=1),
    Feature(name="q_len other than kv_len", q_len=17),
    Feature(name="heads of 64", head_dim=64),
    Feature(name="heads of 16 to 256, by 8", head_dim=80),
    Feature(name="fp16", dtype=torch.float16),
    Feature(name="fp8 without a gradient, read as bf16", dtype=torch.float8_e4m3fn),
    Feature(name="fp32", dtype=torch.float32),
    Feature(name="fp64", dtype=torch.float64),
    Feature(name="heads of 20", head_dim=20),
    Feature(name="values of another size", value_dim=64),
)


def table(gpu: Facts | None = None) -> list[str]:
    """A line a feature, a column a step, in Markdown; on an H200 by default."""
    columns = [*(f"`{name}`" for name in WAYS), "without a name"]
    lines = [f"| | {' | '.join(columns)} |", f"| --- |{' --- |' * len(columns)}"]
    token = PRETEND.set(gpu or Facts())
    try:
        for each in FEATURES:
            q = torch.empty(1, each.heads, each.q_len, each.head_dim, dtype=each.dtype, device="meta")
            k = torch.empty(1, each.kv_heads, each.kv_len, each.head_dim, dtype=each.dtype, device="meta")
            q, k = widened(q, k)
            v = k if not each.value_dim else k[..., : each.value_dim]
            cells = ["no" if why_not(name, q, k, v, **each.options) else "yes" for name in WAYS]
            lines.append(f"| {each.name} | {' | '.join((*cells, _unnamed(each, q, k, v)))} |")
    finally:
        PRETEND.reset(token)
    return lines


def _unnamed(feature: Feature, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> str:
    """Where the plan sends such a call, and the first words of its reason where that is PyTorch."""
    provider = "flash"
    if "extras" in feature.options:
        reason = why_no_way(q, k, v)
    else:
        made = plan(q, k, v, **feature.options)
        provider, reason = made.provider, made.reason if made.provider == "torch" else ""
    short = reason.split(": name")[0].split(": on")[0]  # without what to do about it, without figures
    return f"PyTorch: {short}" if reason else f"`{provider}`"


if __name__ == "__main__":
    print("\n".join(table()))
