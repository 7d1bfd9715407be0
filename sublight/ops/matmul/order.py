"""The order in which programs take the tiles of a product."""

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
