"""The process that runs a user's scripts: torch first, with no search for garbage, then the watch and the scripts.

Triton comes after torch: what is put aside is not torn down at the end, and Triton's bindings would print a page about
leaks. Run as `python -m sublight.xray.sanitize.process ORDER`.
"""

from __future__ import annotations

import importlib
import sys

from sublight.xray.load_torch import load_torch


def main(order_file: str) -> None:
    load_torch()
    importlib.import_module("sublight.xray.sanitize.script").main(order_file)


if __name__ == "__main__":
    main(sys.argv[1])
