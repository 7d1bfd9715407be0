"""What can be swapped: one kind of module a file, tried in this order."""

from __future__ import annotations

from sublight.fix.record import Rule
from sublight.fix.rules.activation import ACTIVATION
from sublight.fix.rules.embedding import EMBEDDING
from sublight.fix.rules.lm_head import LM_HEAD
from sublight.fix.rules.loss import LOSS
from sublight.fix.rules.mlp import MLP
from sublight.fix.rules.norm import NORM
from sublight.fix.rules.residual_norm import RESIDUAL_NORM
from sublight.fix.rules.rope import ROPE
from sublight.fix.rules.softmax import SOFTMAX

RULES: tuple[Rule, ...] = (LM_HEAD, RESIDUAL_NORM, ROPE, MLP, NORM, ACTIVATION, SOFTMAX, EMBEDDING, LOSS)
