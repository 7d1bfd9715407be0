"""Launches that begin before the last one has ended: on Hopper, and only where a plan has `launch_pdl` with them.

A kernel that was launched so may do what depends on no launch before it (read weights, older keys), then waits. One
that lets the next begin says so as soon as it runs: the next one finds room beside it, and waits by itself. Who waits
sees all that was written by every launch before, since the one before has waited, too.
"""

from __future__ import annotations

from sublight.backend.jit import gl, gluon, tl, triton


@triton.jit
def next_may_begin():
    tl.inline_asm_elementwise(
        "griddepcontrol.launch_dependents; mov.u32 $0, 0;", "=r", [], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit
def wait_for_the_last():
    """From here on, what the launch before wrote can be read."""
    tl.inline_asm_elementwise(
        "griddepcontrol.wait; mov.u32 $0, 0;", "=r", [], dtype=tl.int32, is_pure=False, pack=1
    )  # fmt: skip


@gluon.jit
def gluon_next_may_begin():
    gl.inline_asm_elementwise(
        "griddepcontrol.launch_dependents; mov.u32 $0, 0;", "=r", [], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def gluon_wait_for_the_last():
    """From here on, what the launch before wrote can be read."""
    gl.inline_asm_elementwise(
        "griddepcontrol.wait; mov.u32 $0, 0;", "=r", [], dtype=gl.int32, is_pure=False, pack=1
    )  # fmt: skip
