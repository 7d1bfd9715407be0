"""sublight: how far below its limits a GPU runs, why, and how to close the gap.

Everything loads when it is first used: `import sublight` costs milliseconds and brings neither torch nor triton.
"""

from __future__ import annotations

import functools
import re
from pathlib import Path
from typing import Any

__version__ = "0.1.0"

_FUNCTIONS = (  # names in sublight.api
    *("bench_ops", "explain", "graph", "measure", "measure_limits", "patch", "patched"),
    *("load_ipython_extension", "load_quantized", "predict_module", "profile", "quantize", "range"),
    *("save_quantized", "sparsify", "step", "unpatch", "why"),
)
_OPS_FOLDER = Path(__file__).parent / "ops"
_OP_NAME = re.compile(r'^[A-Z0-9_]+ = Op\(\n    name="(\w+)"', re.MULTILINE)
_ELSEWHERE = {  # name -> its module, for what has no op record
    "AdamW": "sublight.ops.adamw.optimizer",
    "MoE": "sublight.ops.moe.layer",
    "decode_mxfp4": "sublight.ops.matmul.codebooks",
    "decode_nf4": "sublight.ops.matmul.codebooks",
    "einsum": "sublight.ops.matmul.einsum",
    "fp8_linear": "sublight.ops.matmul.fp8_linear",
    "quantize_weight": "sublight.ops.matmul.packing",
}
_MODULES = ("bench", "gpus", "learn", "limits", "ops", "results", "units", "xray")


def __getattr__(name: str) -> Any:
    import importlib

    if name in _FUNCTIONS:
        value = getattr(importlib.import_module("sublight.api"), name)
    elif name in _ELSEWHERE:
        value = getattr(importlib.import_module(_ELSEWHERE[name]), name)
    elif name in _MODULES:
        value = importlib.import_module(f"sublight.{name}")
    elif _is_op(name):  # by the folder's files, not by OPS: a mistyped name must not cost an import of torch
        value = importlib.import_module("sublight.ops").find(name).call
    else:
        raise AttributeError(f"module 'sublight' has no attribute {name!r}")
    globals()[name] = value  # the next look-up costs nothing
    return value


def __dir__() -> list[str]:
    return sorted({"__version__", *_FUNCTIONS, *_ELSEWHERE, *_MODULES, *_op_names()})


def _is_op(name: str) -> bool:
    return name in _op_names()


@functools.cache
def _op_names() -> frozenset[str]:
    """The names in the records of the folder's files: a family of ops may share one."""
    files = (file for file in _OPS_FOLDER.rglob("*.py") if not file.name.endswith("_test.py"))
    return frozenset(name for file in files for name in re.findall(_OP_NAME, file.read_text(encoding="utf-8")))
