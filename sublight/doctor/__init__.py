"""What is installed, what works here, what does not, and the fix for each. Needs neither torch nor a GPU."""

from __future__ import annotations

from collections.abc import Sequence

from sublight import __version__
from sublight.doctor import gpu, kept, packages, tools
from sublight.doctor.record import Check


def examine() -> tuple[Check, ...]:
    """All checks, in the order in which a person would set a machine up."""
    return (
        packages.python(),
        Check(name="sublight", state="ok", found=__version__, needed_for="everything", required=True),
        *(packages.package(*row) for row in packages.PACKAGES),
        *packages.torch_and_runtime(),
        gpu.device(),
        gpu.driver(),
        *(tools.tool(*row) for row in tools.TOOLS),
        gpu.counters(),
        tools.c_compiler(),
        tools.cpp_compiler(),
        *tools.extensions(),
        *gpu.backend(),
        kept.cache(),
        kept.limits(),
    )


def broken(checks: Sequence[Check]) -> bool:
    """Whether something is missing that every verb needs."""
    return any(check.required and check.state != "ok" for check in checks)
