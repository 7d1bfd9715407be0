"""Launch one kernel of a cubin on small inputs, for a debugger or a sanitizer to watch: no PyTorch, no other kernel.

python examples/debugging/launch.py FILE.cubin out_of_bounds
python examples/debugging/launch.py FILE.cubin matmul_tiled
"""

from __future__ import annotations

import ctypes
import sys
from pathlib import Path

from sublight.extensions.demos.gpu import Buffer, Gpu
from sublight.extensions.driver import call, pointers_to

SIDE = 64  # of the square matrices


def allocated(count: int) -> Buffer:
    """Memory as the driver gives it: nothing is written to it."""
    address = ctypes.c_uint64()
    call("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(4 * count))
    return Buffer(address.value, 4 * count)


def main() -> None:
    path, kernel = sys.argv[1:]
    gpu = Gpu()
    gpu.load(Path(path).read_bytes())
    if kernel == "matmul_tiled":
        a, b, c = (allocated(SIDE * SIDE) for _ in range(3))
        gpu.write(a, [float(i % 7) for i in range(SIDE * SIDE)])
        gpu.write(b, [float(i % 5) for i in range(SIDE * SIDE)])
        pointers, _kept = pointers_to((a, b, c, SIDE, SIDE, SIDE))
        sizes = (SIDE // 32, SIDE // 32, 1, 32, 32, 1, 0, None, pointers, None)
        call("cuLaunchKernel", gpu.function(kernel), *sizes)
    else:
        x, y = allocated(32), allocated(32)
        if kernel != "never_written":
            gpu.write(x, [float(i) for i in range(32)])
        gpu.launch(kernel, 1, 64, x, y)
    gpu.synchronize()
    print(f"{kernel} ended")


if __name__ == "__main__":
    main()
