"""unfused-norm: LayerNorm or RMSNorm written out as mean, variance, rsqrt and products."""

from __future__ import annotations

from sublight import units
from sublight.diagnose.case import Case, Change, Rule
from sublight.diagnose.rules.unfused_pointwise import propose
from sublight.fix.cure.norms import NORMS


def check(case: Case) -> Change | None:
    return propose(case, "norm", _title, _FIX, NORMS.line)


def _title(ops: float, groups: float) -> str:
    return f"norms are written out as {units.count(ops)} ops a step"


_FIX = """\
# over the last dimension, with your eps
y = F.layer_norm(x, x.shape[-1:], weight, bias, eps)   # with a mean; F.rms_norm(x, x.shape[-1:], weight, eps) without
y = sublight.layer_norm(x, weight, bias, eps)          # the same as one kernel of ours"""

UNFUSED_NORM = Rule(id="unfused-norm", check=check)
