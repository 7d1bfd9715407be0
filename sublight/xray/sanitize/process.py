"""The process that runs a user's scripts: torch first, with no search for garbage, then the watch and the scripts.

Loading torch makes hundreds of thousands of objects and hardly any garbage. Python's collector looks at them again and
again meanwhile, and once more when the process ends: 0.6 of the 3.6 s of `xray --run`. So what torch loads is put aside
for good, and the script has a collector that works as ever. Triton comes after that: what is put aside is not torn
down at the end, and Triton's bindings would print a page about leaks. Run as `python -m sublight.xray.sanitize.process
ORDER`.
"""

from __future__ import annotations

import gc
import importlib
import sys


def main(order_file: str) -> None:
    gc.disable()
    importlib.import_module("torch")
    gc.freeze()
    gc.enable()
    importlib.import_module("sublight.xray.sanitize.script").main(order_file)


if __name__ == "__main__":
    main(sys.argv[1])
