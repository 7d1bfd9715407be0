"""What kernels are written with: Triton and Gluon where they are installed, stand-ins elsewhere (macOS, no GPU).

Under a stand-in, ops still import, cost, and run through PyTorch: only launching one of our kernels needs the real
thing. Only a missing `triton` counts as "not installed": whatever else goes wrong while importing it is an error that
must be seen, since it would otherwise turn every kernel off in silence. Gluon is part of Triton and experimental: where
its names have moved, the kernels written in it are out, and `why_no_gluon` says so.
"""

from __future__ import annotations

import importlib.util
from typing import Any

AVAILABLE = importlib.util.find_spec("triton") is not None


class _Kernel:
    """Keeps the name of a kernel that cannot be launched."""

    def __init__(self, function: Any) -> None:
        self.fn, self.__name__ = function, function.__name__

    def __getitem__(self, grid: Any) -> Any:
        raise ImportError(
            why_no_gluon or "our kernels need triton: pip install triton (Linux only), or use provider 'torch'"
        )


class _Language:
    @staticmethod
    def constexpr(value: Any) -> Any:
        return value


class _Triton:
    @staticmethod
    def jit(function: Any = None, **options: Any) -> Any:
        """`@triton.jit`, and `@triton.jit(do_not_specialize=…)`."""
        return _Kernel if function is None else _Kernel(function)

    @staticmethod
    def constexpr_function(function: Any) -> Any:
        return function


triton: Any = _Triton()
tl: Any = _Language()
gluon: Any = triton
gl: Any = tl
libdevice: Any = None
async_copy: Any = None
copy_in: Any = None  # global to shared memory without passing through registers
hopper: Any = None  # Gluon's module for Hopper: barriers, warpgroup products
tile_in: Any = None  # Hopper's copy engine (TMA): a block of a tensor to shared memory …
tile_out: Any = None  # … and back …
tile_add: Any = None  # … added to what is there
small_product: Any = None  # tensor-core product of one warp, accumulated in registers
seen_as: Any = None  # reinterpret shared memory as another data type, shape and layout
meet: Any = None  # barrier among the warps of a Gluon partition
why_no_gluon = "" if AVAILABLE else "triton is not installed"

if AVAILABLE:
    import triton as _triton
    from triton import language as _tl
    from triton.language.extra import libdevice as _libdevice

    triton, tl, libdevice = _triton, _tl, _libdevice
    try:
        from triton.experimental import gluon as _gluon
        from triton.experimental.gluon import language as _gl
        from triton.experimental.gluon.language.nvidia import hopper as _hopper
        from triton.experimental.gluon.language.nvidia.ampere import async_copy as _async_copy
        from triton.experimental.gluon.language.nvidia.ampere import mma_v2 as _mma_v2

        # renamed between Triton 3.6 and 3.9
        copy_in = getattr(_async_copy, "async_load", None) or _async_copy.async_copy_global_to_shared
        tile_in = getattr(_hopper.tma, "async_load", None) or _hopper.tma.async_copy_global_to_shared
        tile_out = getattr(_hopper.tma, "async_store", None) or _hopper.tma.async_copy_shared_to_global
        meet = getattr(_gl, "thread_barrier", None) or _gl.barrier
        _method = "reinterpret" if hasattr(_gl.shared_memory_descriptor, "reinterpret") else "_reinterpret"

        @_gl._core.builtin
        def seen_as(place: Any, dtype: Any, shape: Any, layout: Any, _semantic: Any = None) -> Any:
            return getattr(place, _method)(dtype, shape, layout, _semantic=_semantic)

        tile_add = getattr(_hopper.tma, "async_atomic_add", None)
        if tile_add is None:  # up to Triton 3.6 the instruction has no name in Gluon
            from triton._C.libtriton import ir as _ir

            @_gl._core.builtin
            def tile_add(desc: Any, coordinates: Any, source: Any, _semantic: Any = None) -> None:
                places = _semantic._convert_to_ir_values(coordinates, require_i64=False)
                _semantic.builder.create_async_tma_reduce(
                    _ir.DESCRIPTOR_REDUCE_KIND.ADD, desc.handle, places, source.handle
                )

        gluon, gl, async_copy, hopper, small_product = _gluon, _gl, _async_copy, _hopper, _mma_v2
    except (ImportError, AttributeError) as error:
        why_no_gluon = f"Gluon of triton {triton.__version__} has moved: {error}"

__all__ = [
    *(
        "AVAILABLE",
        "async_copy",
        "cdiv",
        "copy_in",
        "gl",
        "gluon",
        "hopper",
        "libdevice",
        "meet",
        "next_power_of_2",
        "tl",
    ),
    *("seen_as", "small_product", "tile_add", "tile_in", "tile_out", "triton", "why_no_gluon"),
]


def cdiv(a: int, b: int) -> int:
    """a / b, rounded up. Triton's own `cdiv` and `next_power_of_2` work in kernels too, and cost a launcher 5 µs."""
    return -(-a // b)


def next_power_of_2(n: int) -> int:
    """
    >>> next_power_of_2(1), next_power_of_2(5), next_power_of_2(8)
    (1, 8, 8)
    """
    return 1 << (n - 1).bit_length()
