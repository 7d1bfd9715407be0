"""The order in which programs take the tiles of a product, and in which its sums are made."""

from __future__ import annotations

from sublight.backend.jit import tl, triton


@triton.jit
def tile_of(program, down, across, GROUP: tl.constexpr):
    """The tile of a program: rows of tiles in groups of GROUP, column by column inside of a group.

    Programs that run at once then share both operands in the L2: 132 of them in a row of tiles read 132 pieces of B for
    one of A, in groups of 8 about 17 of B for 8 of A.
    """
    if GROUP == 1:
        return program // across, program % across
    else:
        group = program // (GROUP * across)
        first = group * GROUP
        size = tl.minimum(down - first, GROUP)
        place = program - group * (GROUP * across)
        return first + place % size, place // size


@triton.jit
def add_product(acc, a, b, PRECISION: tl.constexpr):
    """acc + a @ b. By plain multiply-adds in fp32 the sums of each block begin anew: one chain over all of k would lose
    twice what cuBLAS loses. (The last argument has no effect, but it keeps Triton from making one chain of it.)"""
    if PRECISION == "ieee" and a.dtype == tl.float32:
        return acc + tl.dot(a, b, input_precision="ieee", max_num_imprecise_acc=1)
    else:
        return tl.dot(a, b, acc, input_precision=PRECISION)
