"""The way that a warp takes through the code outside of loops, where branches give it several.

Compilers keep a piece of code twice: whole blocks without a mask, the last one with; a wide and a narrow row. A warp
issues one of them. Which one is told by how many memory accesses a followed warp made there: of all ways with about as
many, the shortest is taken, so that no time is claimed that a warp may not spend.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from sublight.xray.sass.instruction import Instruction
from sublight.xray.sass.kinds import Kind, kind_of
from sublight.xray.sass.loops import Flow, graph_of, reverse_postorder

MOVES: tuple[Kind, ...] = ("global load", "global store", "global atomic", "async copy")

_Ways = dict[int, tuple[int, int, int]]  # accesses on the way -> instructions, the block before, accesses until there


def path_outside(instructions: Sequence[Instruction], flow: Flow, accesses: float | None) -> tuple[int, ...]:
    """Instructions outside of loops that a warp with so many accesses issues there; None: with as many as there are."""
    if not instructions:
        return ()
    graph, ends = graph_of(instructions)
    outside = set(flow.outside)
    back = {(index, loop.first) for loop in flow.loops for index in loop.members}
    order = reverse_postorder(graph)
    place = {block: number for number, block in enumerate(order)}
    length = {block: sum(index in outside for index in range(block, ends[block])) for block in order}
    moves = {
        block: sum(index in outside and kind_of(instructions[index]) in MOVES for index in range(block, ends[block]))
        for block in order
    }
    ways: dict[int, _Ways] = {0: {moves[0]: (length[0], -1, 0)}}
    last: dict[tuple[int, int], int] = {}  # where the code ends -> instructions until there
    for block in order:
        onward = [
            after for after in graph[block] if (ends[block] - 1, after) not in back and place[after] > place[block]
        ]
        for made, (issued, _, _) in ways.get(block, {}).items():
            if not onward:
                last[block, made] = issued
            for after in onward:
                found, total = ways.setdefault(after, {}), made + moves[after]
                if total not in found or found[total][0] > issued + length[after]:
                    found[total] = (issued + length[after], block, made)
    wanted = max(made for _, made in last) if accesses is None else accesses
    end, made = min(last, key=lambda way: (abs(way[1] - wanted), last[way]))
    walked = [index for index in _walked(end, made, ways, ends) if index in outside]
    exits = [number for number, index in enumerate(walked) if instructions[index].opcode == "EXIT"]
    return tuple(walked[: exits[0] + 1] if wanted == 0 and exits else walked)  # without accesses, it left at once


def _walked(end: int, made: int, ways: Mapping[int, _Ways], ends: Mapping[int, int]) -> list[int]:
    """From the end back to the beginning, and every instruction between."""
    blocks, block = [], end
    while block >= 0:
        blocks.append(block)
        _, block, made = ways[block][made]
    return [index for start in sorted(blocks) for index in range(start, ends[start])]
