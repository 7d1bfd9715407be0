"""The file that a capture writes: the profiler's own trace, with what it cannot know added under the key "sublight"."""

from __future__ import annotations

import contextlib
import json
import os
import platform
import re
import shutil
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sublight.backend import private

_ALLOCATOR = ("num_alloc_retries", "num_device_alloc", "num_device_free", "num_ooms", "segment.all.allocated")
_COMPILE = "_compile.compile_inner"  # dynamo's own clock around one frame's compilation


def write(raw: Path, path: Path, meta: Mapping[str, Any], *, rename: Mapping[str, str] | None = None) -> None:
    """Put `meta` after the first brace of a profiler's export: the rest is copied, not parsed.

    `rename` is for ranges whose meaning was not known when they were opened.
    """
    with open(raw, "rb") as source, open(path, "wb") as target:
        insert(source, target, meta, rename=rename)


def insert(source: Any, target: Any, meta: Mapping[str, Any], *, rename: Mapping[str, str] | None = None) -> None:
    """Copy a JSON object with one more key in front; events get other names, or with "" none and no length.

    >>> import io
    >>> out = io.BytesIO()
    >>> insert(io.BytesIO(b' {"traceEvents": []}'), out, {"version": 1})
    >>> out.getvalue()
    b'{"sublight": {"version": 1},"traceEvents": []}'
    """
    head = source.read(1 << 16)
    brace = head.index(b"{") + 1
    target.write(b'{"sublight": ' + json.dumps(meta, allow_nan=False).encode() + b",")
    if not rename:
        target.write(head[brace:])
        shutil.copyfileobj(source, target, 1 << 20)
        return
    source.seek(brace)
    names = re.compile(rb'"name": "(' + b"|".join(re.escape(name.encode()) for name in rename) + rb')"')
    for line in source:  # the profiler puts an event's kind, category and name on one line
        if found := names.search(line):
            new = rename[found[1].decode()].encode()
            line = line.replace(found[0], b'"name": "' + new + b'"')
            line = line if new else line.replace(b'"ph": "X"', b'"ph": "M"')  # a remark, which nobody draws
        target.write(line)


def machine() -> dict[str, Any]:
    """What ran it: the host's processor, how busy it is, and torch's version."""
    import torch

    versions = {"torch": str(torch.__version__), "python": platform.python_version()}
    busy = {"load": os.getloadavg()[0], "cores": os.cpu_count() or 1} if hasattr(os, "getloadavg") else {}
    mine = {"cores_to_use": len(os.sched_getaffinity(0))} if hasattr(os, "sched_getaffinity") else {}
    return {"cpu": _cpu_name(), "threads": torch.get_num_threads(), **versions, **busy, **mine}


def _cpu_name() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def peak_memory_bytes() -> int:
    """The peak memory of the device where CUDA is in use, else of this process."""
    import torch

    if torch.cuda.is_initialized():
        return int(torch.cuda.max_memory_allocated())
    try:
        import resource
    except ImportError:  # Windows
        return 0
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return int(peak if sys.platform == "darwin" else peak * 1024)


@dataclass(frozen=True, slots=True, kw_only=True)
class Counters:
    """The allocator's and the compiler's counts at one moment."""

    allocator: Mapping[str, int] = field(default_factory=dict)
    compiles: int = 0
    compile_s: float = 0.0
    graph_breaks: Mapping[str, int] = field(default_factory=dict)
    reasons: tuple[str, ...] = ()  # why each of the last compilations was needed; "" for a first one

    @classmethod
    def now(cls) -> Counters:
        import torch

        stats = torch.cuda.memory_stats() if torch.cuda.is_initialized() else {}
        utils = private.loaded("dynamo_utils")
        if utils is None:  # nothing was compiled
            return cls(allocator=_chosen(stats))
        seconds = list(getattr(utils, "compilation_time_metrics", {}).get(_COMPILE, ()))
        breaks: dict[str, int] = {}
        for reason, count in dict(utils.counters.get("graph_break", {})).items():
            short = short_reason(reason)
            breaks[short] = breaks.get(short, 0) + count
        return cls(
            allocator=_chosen(stats),
            compiles=len(seconds),
            compile_s=float(sum(seconds)),
            graph_breaks=breaks,
            reasons=_reasons(utils),
        )


def dynamo_meta(start: Counters, begin: Counters, end: Counters) -> dict[str, Any]:
    """What the compiler did: compilations inside the measured window, and the graph breaks since the start.

    A graph break happens once, when a frame is compiled, and costs every step from then on.
    """
    breaks = {
        reason: count - start.graph_breaks.get(reason, 0)
        for reason, count in end.graph_breaks.items()
        if count > start.graph_breaks.get(reason, 0)
    }
    compiles = end.compiles - begin.compiles
    return {
        "compiles_in_window": compiles,
        "compile_s_in_window": end.compile_s - begin.compile_s,
        "compiles": end.compiles - start.compiles,
        "graph_breaks": breaks,
        "recompile_reasons": [reason for reason in end.reasons[-compiles:] if reason and compiles],
    }


def short_reason(reason: str) -> str:
    """The first line of a graph break's reason, and its explanation where it has one.

    >>> short_reason("Failed to trace\\n  Explanation: no print.\\n  Hint: x")
    'Failed to trace: no print.'
    """
    lines = [line.strip() for line in reason.splitlines() if line.strip()] or [""]
    why = next((line.removeprefix("Explanation:").strip() for line in lines if line.startswith("Explanation:")), "")
    return f"{lines[0]}: {why}" if why else lines[0]


def _reasons(utils: Any) -> tuple[str, ...]:
    with contextlib.suppress(AttributeError, TypeError):
        reasons = [getattr(metrics, "recompile_reason", None) or "" for metrics in utils.get_compilation_metrics()]
        return tuple(reason.splitlines()[0] if reason else "" for reason in reasons)
    return ()


def _chosen(stats: Mapping[str, Any]) -> dict[str, int]:
    return {name: int(stats[name]) for name in _ALLOCATOR if name in stats}
