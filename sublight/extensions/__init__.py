"""CUDA C++: kernels that are read step by step, without PyTorch in them, and launched through the driver."""

from sublight.extensions.ladder import Ladder
from sublight.extensions.matmul import MATMUL
from sublight.extensions.reduce import REDUCE
from sublight.extensions.rows import LAYER_NORM, SOFTMAX
from sublight.extensions.scan import COMPACT, SCAN
from sublight.extensions.transformer.attention import ATTENTION, ATTENTION_BACKWARD
from sublight.extensions.transformer.embed import CLASSIFIER, ENCODER, ENCODER_BACKWARD
from sublight.extensions.transformer.linear import LINEAR, LINEAR_BACKWARD
from sublight.extensions.transformer.norm import NORM, NORM_BACKWARD
from sublight.extensions.transformer.pointwise import ADAMW, GELU, GELU_BACKWARD, RESIDUAL
from sublight.extensions.transpose import TRANSPOSE

LADDERS: tuple[Ladder, ...] = (
    REDUCE,
    TRANSPOSE,
    SOFTMAX,
    LAYER_NORM,
    SCAN,
    COMPACT,
    MATMUL,
    ENCODER,
    ENCODER_BACKWARD,
    NORM,
    NORM_BACKWARD,
    ATTENTION,
    ATTENTION_BACKWARD,
    RESIDUAL,
    GELU,
    GELU_BACKWARD,
    CLASSIFIER,
    ADAMW,
    LINEAR,
    LINEAR_BACKWARD,
)
