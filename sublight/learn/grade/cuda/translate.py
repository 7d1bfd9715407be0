"""A learner's CUDA C++ as C++ that a host compiler takes: launches become calls, dynamic shared memory a pointer.

Lines stay where they are, so that a compiler's complaint and a debugger's place name the learner's own line.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from sublight.learn.verdict import Fault

_LAUNCH = re.compile(r"([A-Za-z_]\w*(?:\s*<[^<>;(){}]*>)?)\s*<<<")
_DYNAMIC = re.compile(r"extern\s+__shared__\s+([\w ]+?)\s+(\w+)\s*\[\s*\]\s*;")
_INCLUDE = re.compile(r"^[ \t]*#[ \t]*include[ \t]*[<\"]([^>\"\n]*)[>\"]", re.MULTILINE)
_SKIPPED = re.compile(r'//[^\n]*|/\*.*?\*/|"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])*\'', re.DOTALL)
_WORDS = re.compile(r"\b(asm|__asm__|thrust|cub|cublas\w*|cooperative_groups|dlopen|system|fork|thread|pthread\w*)\b")
HEADERS = ("cuda_runtime.h", "math.h", "cmath", "cfloat", "float.h", "climits", "cstdint", "stdint.h")


def scan(source: str, function: str) -> list[Fault]:
    """What a submission may not contain, by line; empty where it may be compiled."""
    plain = without_comments(source)
    faults = [
        Fault(kind="scan", line=_line(source, each.start()), text=f"#include <{each[1]}>: only {', '.join(HEADERS)}")
        for each in _INCLUDE.finditer(source)
        if each[1] not in HEADERS
    ]
    for each in _WORDS.finditer(plain):
        text = f"{each[1]} is not for this exercise: write the kernel yourself"
        faults.append(Fault(kind="scan", line=_line(source, each.start()), text=text))
    if not faults and not re.search(rf"\bvoid\s+{function}\s*\(", plain):
        text = f"there is no function {function}: keep the starter's `void {function}(…)`"
        faults.append(Fault(kind="missing", text=text))
    return faults


def without_comments(source: str) -> str:
    """The same length: comments and strings become blanks."""
    return _SKIPPED.sub(lambda each: re.sub(r"[^\n]", " ", each[0]), source)


def for_host(source: str) -> str:
    """
    >>> for_host("k<<<n / 2, 256>>>(x);")
    'watched::launched(k, "k", watched::config(n / 2, 256))(x);'
    >>> for_host("extern __shared__ float part[];")
    'DYNAMIC_SHARED(float, part);'
    """
    source = _INCLUDE.sub(lambda each: "" if each[1] == "cuda_runtime.h" else each[0], source)
    source = _DYNAMIC.sub(r"DYNAMIC_SHARED(\1, \2);", source)
    plain, parts, at = without_comments(source), [], 0
    for each in _LAUNCH.finditer(plain):
        end = plain.find(">>>", each.end())
        if end < 0 or each.start() < at:
            continue
        kernel, how = each[1].strip(), source[each.end() : end]
        parts += [source[at : each.start()], f'watched::launched({kernel}, "{kernel}", watched::config({how}))']
        at = end + 3
    return "".join([*parts, source[at:]])


def call_of(function: str, pointers: Sequence[str], numbers: int) -> str:
    """What the grader calls by addresses: types come from here, so a changed signature does not compile."""
    given = [f"({kind})p[{place}]" for place, kind in enumerate(pointers)]
    given += [f"n[{place}]" for place in range(numbers)]
    return f'extern "C" void learn_call(void** p, const int* n) {{ {function}({", ".join(given)}); }}'


C_TYPES: Mapping[str, str] = {"float32": "float", "int32": "int", "int64": "long long", "float16": "__half"}


def pointer_of(dtype: str, *, is_output: bool) -> str:
    """
    >>> pointer_of("float32", is_output=False), pointer_of("int32", is_output=True)
    ('const float*', 'int*')
    """
    return f"{'' if is_output else 'const '}{C_TYPES[dtype]}*"


def _line(source: str, at: int) -> int:
    return source.count("\n", 0, at) + 1
