"""The loops of a kernel: natural loops of its control flow graph, each with the instructions that are its own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from sublight.xray.record import Place
from sublight.xray.sass.instruction import Instruction

Graph = Mapping[int, Sequence[int]]  # index of an instruction that begins a block -> those of its successors


@dataclass(frozen=True, slots=True, kw_only=True)
class Loop:
    """A loop, by the indices of its instructions."""

    first: int  # where it is entered
    latch: int  # the jump back
    depth: int  # 1: in no other loop
    parent: int | None  # which of the loops it is in
    members: tuple[int, ...]  # of it and of the loops in it
    own: tuple[int, ...]  # of it alone: what one turn issues once

    def place(self, instructions: Sequence[Instruction], file: str) -> Place | None:
        """The line of its jump back, which compilers give the line that says `for` or `while`."""
        return instructions[self.latch].place(file)


@dataclass(frozen=True, slots=True, kw_only=True)
class Flow:
    """What a warp whose lanes stay together can reach, and its loops from the outermost to the innermost."""

    reached: tuple[int, ...]
    outside: tuple[int, ...]  # reached, and in no loop
    loops: tuple[Loop, ...]


def flow(instructions: Sequence[Instruction]) -> Flow:
    """Blocks, dominators, back edges, and the natural loop of each.

    Paths that only a warp with diverged lanes takes (BRA.DIV) are left out: the compiler keeps a second copy of the
    code there. A function that is called (a division's slow path) counts once, outside the loops that call it.
    """
    if not instructions:
        return Flow(reached=(), outside=(), loops=())
    graph, ends = graph_of(instructions)
    order = reverse_postorder(graph)
    dominators = _dominators(graph, order)
    bodies: dict[int, set[int]] = {}
    latches: dict[int, int] = {}
    before: dict[int, list[int]] = {block: [] for block in order}
    for block in order:
        for after in graph[block]:
            before[after].append(block)
    for block in order:
        for head in graph[block]:
            if _dominates(head, block, dominators):
                bodies.setdefault(head, {head}).update(_reaching(block, head, before))
                latches[head] = max(latches.get(head, 0), ends[block] - 1)  # of several `continue`s, the last
    loops = _nested({head: _members(blocks, ends) for head, blocks in bodies.items()}, latches)
    reached = _members(set(order), ends)
    in_loops = {index for loop in loops for index in loop.members}
    return Flow(reached=reached, outside=tuple(index for index in reached if index not in in_loops), loops=loops)


def graph_of(instructions: Sequence[Instruction]) -> tuple[Graph, Mapping[int, int]]:
    """Each block's successors, and where it ends."""
    index_of = {each.address: index for index, each in enumerate(instructions)}
    starts = {0}
    for index, each in enumerate(instructions):
        if each.is_jump or not each.falls_through:
            starts.add(index + 1)
        starts.update(index_of[target] for target in each.targets if target in index_of)
    ordered = sorted(start for start in starts if start < len(instructions))
    ends = dict(zip(ordered, [*ordered[1:], len(instructions)], strict=True))
    graph: dict[int, list[int]] = {}
    for start, end in ends.items():
        last = instructions[end - 1]
        after = [] if "DIV" in last.modifiers else [index_of[target] for target in last.targets if target in index_of]
        if last.falls_through and end < len(instructions):
            after.append(end)
        graph[start] = after
    return graph, ends


def reverse_postorder(graph: Graph) -> list[int]:
    seen, done = {0}, []
    stack = [(0, iter(graph[0]))]
    while stack:
        block, rest = stack[-1]
        for after in rest:
            if after not in seen:
                seen.add(after)
                stack.append((after, iter(graph[after])))
                break
        else:
            done.append(block)
            stack.pop()
    return done[::-1]


def _dominators(graph: Graph, order: list[int]) -> dict[int, int]:
    """The block that every path to a block passes last, for each (Cooper, Harvey and Kennedy's iteration)."""
    rank = {block: number for number, block in enumerate(order)}
    above = {0: 0}
    changed = True
    while changed:
        changed = False
        for block in order:
            for after in graph[block]:
                if after == 0:
                    continue
                one, other = block, above.get(after, block)
                while one != other:
                    if rank[one] < rank[other]:
                        one, other = other, one
                    one = above[one]
                if above.get(after) != one:
                    above[after], changed = one, True
    return above


def _dominates(head: int, block: int, above: Mapping[int, int]) -> bool:
    while block != head and above[block] != block:
        block = above[block]
    return block == head


def _reaching(block: int, head: int, before: Mapping[int, list[int]]) -> set[int]:
    """The blocks that come to this one without passing the head."""
    found, stack = {head}, [block]
    while stack:
        here = stack.pop()
        if here not in found:
            found.add(here)
            stack.extend(before[here])
    return found


def _members(blocks: set[int], ends: Mapping[int, int]) -> tuple[int, ...]:
    return tuple(index for block in sorted(blocks) for index in range(block, ends[block]))


def _nested(bodies: Mapping[int, tuple[int, ...]], latches: Mapping[int, int]) -> tuple[Loop, ...]:
    """The loops by size, so that a loop comes after the one around it."""
    heads = sorted(bodies, key=lambda head: (-len(bodies[head]), head))
    sets = {head: set(bodies[head]) for head in heads}
    loops: list[Loop] = []
    for number, head in enumerate(heads):
        around = [outer for outer in range(number) if head in sets[heads[outer]]]
        inner = set().union(*(sets[other] for other in heads[number + 1 :] if other in sets[head]))
        loops.append(
            Loop(
                first=head,
                latch=latches[head],
                depth=len(around) + 1,
                parent=around[-1] if around else None,
                members=bodies[head],
                own=tuple(index for index in bodies[head] if index not in inner),
            )
        )
    return tuple(loops)
