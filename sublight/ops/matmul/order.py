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
def add_product(acc, lost, a, b, PRECISION: tl.constexpr):
    """acc + a @ b, and what its roundings have lost so far, which belongs to the sum in the end.

    By plain multiply-adds in fp32 the sums of each block begin anew, and what is lost as they are added up is kept: one
    chain over all of k would lose six times what PyTorch does where it has few rows. (`max_num_imprecise_acc` has no
    effect, but it keeps Triton from making one chain of it.) Tensor cores are left their own sums, and nothing is kept.
    """
    if PRECISION == "ieee" and a.dtype == tl.float32:
        product = tl.dot(a, b, input_precision="ieee", max_num_imprecise_acc=1)
        total = acc + product
        return total, lost + (product - (total - acc))
    else:
        return tl.dot(a, b, acc, input_precision=PRECISION), lost


@triton.jit
def whole_sum(acc, lost, PRECISION: tl.constexpr):
    """With what `add_product` kept; a sum that has left fp32's range stays as it is."""
    if PRECISION == "ieee":
        return acc + tl.where(tl.abs(acc) < float("inf"), lost, 0.0)
    else:
        return acc


@triton.jit
def add_block(acc, a, b, PRECISION: tl.constexpr):
    """acc + a @ b, the sums of each block anew in fp32. What their addition loses is not kept: for sums that shrink on
    the way, as attention's do."""
    if PRECISION == "ieee" and a.dtype == tl.float32:
        return acc + tl.dot(a, b, input_precision="ieee", max_num_imprecise_acc=1)
    else:
        return tl.dot(a, b, acc, input_precision=PRECISION)
