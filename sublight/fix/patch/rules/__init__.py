"""What can be swapped: one kind of module a file, tried in this order."""

from __future__ import annotations

from sublight.fix.patch.record import Rule
from sublight.fix.patch.rules.activation import ACTIVATION
from sublight.fix.patch.rules.attention import ATTENTION
from sublight.fix.patch.rules.causal_mask import CAUSAL_MASK
from sublight.fix.patch.rules.embedding import EMBEDDING
from sublight.fix.patch.rules.linear import LINEAR
from sublight.fix.patch.rules.lm_head import LM_HEAD
from sublight.fix.patch.rules.loss import LOSS
from sublight.fix.patch.rules.mlp import MLP
from sublight.fix.patch.rules.norm import NORM
from sublight.fix.patch.rules.residual_norm import RESIDUAL_NORM
from sublight.fix.patch.rules.rope import ROPE
from sublight.fix.patch.rules.sdpa import HF_SDPA
from sublight.fix.patch.rules.softmax import SOFTMAX

RULES: tuple[Rule, ...] = (
    LM_HEAD,
    RESIDUAL_NORM,
    ROPE,
    MLP,
    NORM,
    ACTIVATION,
    SOFTMAX,
    EMBEDDING,
    LOSS,
    ATTENTION,
    CAUSAL_MASK,
    HF_SDPA,
    LINEAR,
)
