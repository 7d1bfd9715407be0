"""unfused-attention: product, softmax, product, with the scores written to memory and read back."""

from __future__ import annotations

from sublight import units
from sublight.diagnose.case import Case, Change, Rule
from sublight.diagnose.rules.unfused_pointwise import propose


def check(case: Case) -> Change | None:
    return propose(case, "attention", _title, _FIX)


def _title(ops: float, groups: float, spent: float, fused: float) -> str:
    return (
        f"attention written out as {ops:.0f} ops a step takes {units.text(spent, 's')}, mostly moving the scores; "
        f"a fused kernel takes about {units.text(fused, 's')}"
    )


_FIX = """\
# q, k, v: (batch, heads, length, dim)
out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)"""

UNFUSED_ATTENTION = Rule(id="unfused-attention", check=check)
