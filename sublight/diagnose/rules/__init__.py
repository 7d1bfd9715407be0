"""The causes that `explain` knows, one a file: each looks at a Case and proposes a Change, whose saving is replayed."""

from __future__ import annotations

from sublight.diagnose.rules.allocator_thrash import ALLOCATOR_THRASH
from sublight.diagnose.rules.anomaly_mode import ANOMALY_MODE
from sublight.diagnose.rules.data_loading import DATA_LOADING
from sublight.diagnose.rules.dense_embedding import DENSE_EMBEDDING
from sublight.diagnose.rules.exposed_communication import EXPOSED_COMMUNICATION
from sublight.diagnose.rules.exposed_copy import EXPOSED_COPY
from sublight.diagnose.rules.float64 import FLOAT64
from sublight.diagnose.rules.fp32 import FP32_WHERE_BF16_SERVES
from sublight.diagnose.rules.graph_break import GRAPH_BREAK
from sublight.diagnose.rules.growing_cat import GROWING_CAT
from sublight.diagnose.rules.host_bound import HOST_BOUND
from sublight.diagnose.rules.host_sync import HOST_SYNC
from sublight.diagnose.rules.launch_bound import LAUNCH_BOUND
from sublight.diagnose.rules.needless_autograd import NEEDLESS_AUTOGRAD
from sublight.diagnose.rules.no_tensor_cores import NO_TENSOR_CORES
from sublight.diagnose.rules.pageable_copy import PAGEABLE_COPY
from sublight.diagnose.rules.rank_imbalance import RANK_IMBALANCE
from sublight.diagnose.rules.recompilation import RECOMPILATION
from sublight.diagnose.rules.redundant_copy import REDUNDANT_CAST_OR_COPY
from sublight.diagnose.rules.repeated_line import REPEATED_LINE
from sublight.diagnose.rules.slow_kernel import SLOW_KERNEL
from sublight.diagnose.rules.small_grid import SMALL_GRID
from sublight.diagnose.rules.start_up import START_UP
from sublight.diagnose.rules.unfused_attention import UNFUSED_ATTENTION
from sublight.diagnose.rules.unfused_norm import UNFUSED_NORM
from sublight.diagnose.rules.unfused_optimizer import UNFUSED_OPTIMIZER
from sublight.diagnose.rules.unfused_pointwise import UNFUSED_POINTWISE
from sublight.diagnose.rules.weight_bound import WEIGHT_BOUND
from sublight.diagnose.rules.worker_restart import WORKER_RESTART

RULES = (
    LAUNCH_BOUND,
    HOST_SYNC,
    DATA_LOADING,
    HOST_BOUND,
    PAGEABLE_COPY,
    EXPOSED_COPY,
    NO_TENSOR_CORES,
    UNFUSED_POINTWISE,
    UNFUSED_ATTENTION,
    UNFUSED_NORM,
    UNFUSED_OPTIMIZER,
    ALLOCATOR_THRASH,
    REDUNDANT_CAST_OR_COPY,
    SMALL_GRID,
    SLOW_KERNEL,
    EXPOSED_COMMUNICATION,
    RANK_IMBALANCE,
    RECOMPILATION,
    GRAPH_BREAK,
    FP32_WHERE_BF16_SERVES,
    START_UP,
    ANOMALY_MODE,
    REPEATED_LINE,
    DENSE_EMBEDDING,
    WORKER_RESTART,
    WEIGHT_BOUND,
    FLOAT64,
    GROWING_CAT,
    NEEDLESS_AUTOGRAD,
)
