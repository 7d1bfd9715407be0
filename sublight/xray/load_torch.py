"""Load torch with no search for garbage.

Loading torch makes hundreds of thousands of objects and hardly any garbage. Python's collector looks at them again and
again meanwhile, and once more when the process ends: 0.45 s of 2.5 s of `xray --record` and 0.6 of the 3.6 s of
`xray --run`. So what torch loads is put aside for good, and a script that runs after it has a collector that works as
ever.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import sys


def load_torch() -> None:
    """Nothing where it is loaded, or not installed: who needs it says so. Nor where the collector is off."""
    if "torch" in sys.modules or not gc.isenabled():
        return
    gc.disable()
    with contextlib.suppress(ImportError):
        importlib.import_module("torch")
    gc.freeze()
    gc.enable()
