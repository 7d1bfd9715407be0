"""Which step of the ladder takes what, asked of the steps themselves: the table in the docs is made here."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from sublight.backend.device import PRETEND, Facts
from sublight.ops.attention.attention import WAYS, why_not
from sublight.ops.attention.extras import Extras


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
    options: dict[str, Any] = field(default_factory=dict)  # of `why_not`


FEATURES = (
    Feature(name="full, causal", options={"causal": True}),
    Feature(name="sliding window", options={"causal": True, "window": 64}),
    Feature(name="soft cap", options={"softcap": 50.0}),
    Feature(name="ALiBi", options={"extras": Extras(has_slopes=True)}),
    Feature(name="sinks", options={"extras": Extras(has_sinks=True)}),
    Feature(name="dropout", options={"extras": Extras(dropout=0.1)}),
    Feature(name="packed sequences", options={"extras": Extras(sequences=4)}),
    Feature(name="shared heads (GQA, MQA)", kv_heads=1),
    Feature(name="q_len other than kv_len", q_len=17),
    Feature(name="heads of 64", head_dim=64),
    Feature(name="heads of 16 to 256, by 8", head_dim=80),
    Feature(name="fp16", dtype=torch.float16),
    Feature(name="fp32", dtype=torch.float32),
)


def table(gpu: Facts | None = None) -> list[str]:
    """A line a feature, a column a step, in Markdown; on an H200 unless told."""
    lines = [f"| | {' | '.join(f'`{name}`' for name in WAYS)} |", f"| --- |{' --- |' * len(WAYS)}"]
    token = PRETEND.set(gpu or Facts())
    try:
        for each in FEATURES:
            q = torch.empty(1, each.heads, each.q_len, each.head_dim, dtype=each.dtype, device="meta")
            k = torch.empty(1, each.kv_heads, each.kv_len, each.head_dim, dtype=each.dtype, device="meta")
            cells = ("no" if why_not(name, q, k, k, **each.options) else "yes" for name in WAYS)
            lines.append(f"| {each.name} | {' | '.join(cells)} |")
    finally:
        PRETEND.reset(token)
    return lines


if __name__ == "__main__":
    print("\n".join(table()))
