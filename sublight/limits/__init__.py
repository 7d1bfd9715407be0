"""The ceilings of this machine, one family a file; adding one is a file and a line here."""

from sublight.limits.cache import CACHE
from sublight.limits.device_memory import DEVICE_MEMORY
from sublight.limits.disk import DISK
from sublight.limits.host_memory import HOST_MEMORY
from sublight.limits.launch import LAUNCH
from sublight.limits.matmul import MATMUL
from sublight.limits.transfer import TRANSFER
from sublight.limits.vector import VECTOR

LIMITS = (DEVICE_MEMORY, CACHE, MATMUL, VECTOR, LAUNCH, TRANSFER, HOST_MEMORY, DISK)
