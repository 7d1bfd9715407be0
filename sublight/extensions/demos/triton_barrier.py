"""A Triton kernel with `tl.debug_barrier`, or without: for what the compiler makes of it."""

from __future__ import annotations

import triton
import triton.language as tl

from sublight.backend import private


def _copy_kernel(x_ptr, y_ptr, BARRIER: tl.constexpr):  # type: ignore[no-untyped-def]
    places = tl.program_id(0) * 128 + tl.arange(0, 128)
    x = tl.load(x_ptr + places)
    if BARRIER:
        tl.debug_barrier()
    tl.store(y_ptr + places, x)


def ptx_of(target: int, *, barrier: bool) -> str:
    source = private.ASTSource(
        fn=private.JITFunction(_copy_kernel),  # not triton.jit, which makes no compiled kernel under TRITON_INTERPRET
        signature={"x_ptr": "*fp32", "y_ptr": "*fp32", "BARRIER": "constexpr"},
        constexprs={(2,): barrier},
    )
    options = {"enable_fp_fusion": True}  # Triton warns unless this is set
    return str(triton.compile(source, target=private.GPUTarget("cuda", target, 32), options=options).asm["ptx"])
