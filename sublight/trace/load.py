"""A trace file of any kind, or a folder of them with one a rank."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from sublight.errors import BadInput
from sublight.trace.read import chrome
from sublight.trace.record import Trace

ENDINGS = (".json", ".json.gz", ".sqlite", ".nsys-rep")
_SQLITE = b"SQLite format 3\x00"
FOREIGN = {  # by ending: what it is, and what to do
    ".xplane.pb": "an XPlane profile of JAX or TensorFlow, not a Chrome trace: JAX writes *.trace.json.gz beside it, "
    "and jax.profiler.trace(..., create_perfetto_trace=True) perfetto_trace.json.gz; name one of these",
    ".pftrace": "a Perfetto trace in its binary form, not a Chrome trace: `traceconv json FILE out.json` converts it",
    ".ncu-rep": "a report of Nsight Compute, on single kernels: explain takes a step, from torch.profiler or nsys",
    ".qdrep": "a report of an old Nsight Systems: `nsys export --type sqlite FILE` converts it",
}
FOREIGN[".perfetto-trace"] = FOREIGN[".pftrace"]


def is_trace(path: Path) -> bool:
    """Whether this is for loading rather than for running: by its name, else by its first bytes."""
    if path.is_dir() or path.name.endswith((*ENDINGS, ".gz", *FOREIGN)):
        return True
    if path.suffix == ".py" or not path.is_file():
        return False
    with path.open("rb") as file:
        first = file.read(4096)
    if first.startswith((_SQLITE, b"\x1f\x8b")) or first.lstrip(b"\xef\xbb\xbf \t\r\n")[:1] in (b"{", b"["):
        return True
    return bool(_foreign(path.name, first))


def _foreign(name: str, first: bytes) -> str:
    """What a file is that is no trace for us, by its name or its first bytes; empty where neither tells."""
    if ending := next((ending for ending in FOREIGN if name.endswith(ending)), ""):
        return FOREIGN[ending]
    if first[:1] == b"\n" and (b"/host:" in first or b"/device:" in first):  # field 1 of a protocol buffer
        return FOREIGN[".xplane.pb"]
    return ""


def load(path: Path) -> list[Trace]:
    """The traces of a file or a folder; of a folder, those that can be read, unless none can."""
    if path.is_dir():
        return _folder(path)
    if not path.exists():
        raise BadInput(f"there is no file {path}")
    return _file(path)


def _file(path: Path) -> list[Trace]:
    try:
        with path.open("rb") as file:
            first = file.read(4096)
    except OSError as error:
        raise BadInput(f"cannot read {path}: {error.strerror}") from None
    database = first.startswith(_SQLITE)
    if not database and (what := _foreign(path.name, first)):
        raise BadInput(f"{path} is {what}")
    if database or path.name.endswith((".sqlite", ".nsys-rep")):
        from sublight.trace.read import nsight  # with its tables, which a Chrome trace does not need

        return nsight.load(path)
    return [chrome.load(path)]


def _folder(path: Path) -> list[Trace]:
    files = sorted(file for file in path.iterdir() if file.name.endswith(ENDINGS))
    if not files and (runs := sorted(path.glob("plugins/profile/*/"))):  # where JAX puts them, by date
        return _folder(runs[-1])
    if not files:
        raise BadInput(f"{path} holds no trace: none of its files ends in {', '.join(ENDINGS)}")
    traces: list[Trace] = []
    errors: list[str] = []
    of_rank: dict[int, dict[str, None]] = {}  # the files of each rank that says its number
    for file in files:
        try:
            found = _file(file)
        except BadInput as error:
            errors.append(str(error))
            continue
        traces += found
        for trace in found:
            if trace.rank is not None:
                of_rank.setdefault(trace.rank, {})[file.name] = None
    for rank, names in of_rank.items():
        if len(names) > 1:  # other runs, or the same at other times: to compare them as ranks would blame one of them
            raise BadInput(f"{path} holds {len(names)} traces of rank {rank} ({', '.join(names)}): name one of them")
    if not traces:
        raise BadInput(f"no trace of {path} can be read: {errors[0]}")
    first = traces[0]
    return [replace(first, lost=(*first.lost, *(f"{error}." for error in errors))), *traces[1:]]
