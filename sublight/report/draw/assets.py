"""What a page is made of: files that lie beside this package, and data that can stand inside a script element."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

ASSETS = Path(__file__).parents[1] / "assets"


@cache
def asset(name: str) -> str:
    return (ASSETS / name).read_text(encoding="utf-8")


def json_text(data: Any) -> str:
    """JSON that can stand inside a script element: nothing in it can end one.

    >>> json_text(["</script>", "a & b"])
    '["\\\\u003c/script\\\\u003e","a \\\\u0026 b"]'
    """
    words = json.dumps(data, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    for sign in "<>&\u2028\u2029":  # in JSON these signs stand only within strings, where an escape means the same
        words = words.replace(sign, f"\\u{ord(sign):04x}")
    return words
