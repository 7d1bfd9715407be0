"""CUDA C++: kernels that are read step by step, without PyTorch in them, and launched through the driver."""

from sublight.extensions.ladder import Ladder
from sublight.extensions.matmul import MATMUL
from sublight.extensions.reduce import REDUCE
from sublight.extensions.rows import LAYER_NORM, SOFTMAX
from sublight.extensions.scan import COMPACT, SCAN
from sublight.extensions.transpose import TRANSPOSE

LADDERS: tuple[Ladder, ...] = (REDUCE, TRANSPOSE, SOFTMAX, LAYER_NORM, SCAN, COMPACT, MATMUL)
