"""A CUDA C++ submission on the CPU: its library is called on tensors that the grader owns, and tells what it did."""

from __future__ import annotations

import ctypes
import json
import mmap
import os
from multiprocessing.connection import Connection
from typing import Any

from sublight.learn.grade import child
from sublight.learn.grade.buffers import Spec
from sublight.learn.grade.sandbox import Budget, confine

GUARD_BYTES = 256 << 20  # as watched.h has it
_ITEMS = {"float32": 4, "int32": 4, "int64": 8, "float16": 2}
_NOTE = 9  # numbers of one
_NONE, _FIXED, _ANONYMOUS, _NO_RESERVE = 0, 0x10, 0x20, 0x4000
KINDS = (  # as watched.h numbers them
    "out-of-bounds", "input-written", "race", "uninitialised-read", "shared-race", "shared-uninitialised", "host-access",
    "misaligned", "bad-launch", "barriers",
)  # fmt: skip


def prepared() -> child.Serve:
    def serve(channel: Connection, order: dict[str, Any]) -> None:
        with child.answering(channel) as answer:
            try:
                library = ctypes.CDLL(order["library"])
                confine(Budget(**order["budget"]), programs=False)
                answer(failure=None)
                turn, known = 0, {}
                for case in child.orders(channel):
                    answer(**_ran(library, case, known, is_reversed=turn % 2 == 1))
                    turn += 1
            except BaseException as error:
                answer(failure=child.failure_of(error, order["source"]))

    return serve


def _ran(library: Any, case: dict[str, Any], known: dict[Spec, int], *, is_reversed: bool) -> dict[str, Any]:
    """One call, and all that was seen of it; every second one runs a block's threads from the last to the first."""
    inputs, outputs = ([Spec.from_json(spec) for spec in case[name]] for name in ("inputs", "outputs"))
    sample = case.get("sample", {"parts": 0, "least": 0, "seconds": 0.0})
    library.watched_begin(
        int(is_reversed), sample["parts"], sample["least"], ctypes.c_double(sample["seconds"]),
        ctypes.c_ulonglong(int.from_bytes(os.urandom(8), "little")),
    )  # fmt: skip
    addresses = []
    for spec in (*inputs, *outputs):
        if spec not in known:
            known[spec] = _guarded(spec.file)
        addresses.append(known[spec])
        library.watched_tensor(ctypes.c_void_p(known[spec]), ctypes.c_longlong(os.path.getsize(spec.file)),
                               _ITEMS[spec.dtype], int(spec in outputs))  # fmt: skip
    pointers = (ctypes.c_void_p * len(addresses))(*addresses)
    numbers = (ctypes.c_int * len(case["numbers"]))(*case["numbers"])
    library.learn_call(pointers, numbers)
    return _seen(library, len(outputs))


def _seen(library: Any, outputs: int) -> dict[str, Any]:
    library.watched_launch.restype = ctypes.c_char_p
    made = [json.loads(library.watched_launch(each).decode() + "}") for each in range(library.watched_launches())]
    values, findings = (ctypes.c_longlong * _NOTE)(), []
    while library.watched_note(len(findings), values):
        names = ("kind", "tensor", "place", "block", "thread", "other", "is_write", "line", "pc")
        findings.append(dict(zip(names, values, strict=True)))
    return {
        "failure": None,
        "notes": findings,
        "base": _base(library),
        "launches": len(made),
        "made": made,
        "written": [
            [
                {
                    "total": _product(launch["grid"]),
                    "counts": [library.watched_count(each, output, run) for run in range(library.watched_ran(each))],
                }
                for each, launch in enumerate(made)
                if library.watched_ran(each)
            ]
            for output in range(outputs)
        ],
        "has_atomics": bool(library.watched_has_atomics()),
        "kernels": list(dict.fromkeys(launch["name"] for launch in made)),
        "torch": {},
        "has_returned": False,
    }


def _product(sizes: list[int]) -> int:
    total = 1
    for size in sizes:
        total *= size
    return total


def _base(library: Any) -> int:
    """Where the library begins: addresses of its code count from there."""

    class Info(ctypes.Structure):
        _fields_ = (("name", ctypes.c_char_p), ("base", ctypes.c_void_p), ("symbol", ctypes.c_char_p),
                    ("address", ctypes.c_void_p))  # fmt: skip

    info = Info()
    ctypes.CDLL(None).dladdr(ctypes.cast(library.learn_call, ctypes.c_void_p), ctypes.byref(info))
    return int(info.base or 0)


def _guarded(file: str) -> int:
    """A tensor's file in the middle of memory that nobody may touch."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    size = os.path.getsize(file)
    pages = -(-size // mmap.PAGESIZE) * mmap.PAGESIZE
    kind = mmap.MAP_PRIVATE | _ANONYMOUS | _NO_RESERVE
    whole = libc.mmap(None, ctypes.c_size_t(pages + 2 * GUARD_BYTES), _NONE, kind, -1, ctypes.c_long(0))
    descriptor = os.open(file, os.O_RDWR)
    at = libc.mmap(ctypes.c_void_p(whole + GUARD_BYTES), ctypes.c_size_t(size), mmap.PROT_READ | mmap.PROT_WRITE,
                   mmap.MAP_SHARED | _FIXED, descriptor, ctypes.c_long(0))  # fmt: skip
    os.close(descriptor)
    if at != whole + GUARD_BYTES:
        raise MemoryError(f"no room for {file}: errno {ctypes.get_errno()}")
    return int(at)
