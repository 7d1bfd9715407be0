"""The order of tiles: groups of rows of tiles, and inside of a group column by column."""


def tile_of(program: int, down: int, across: int, group: int) -> tuple[int, int]:
    number = program // (group * across)
    first = number * group
    size = min(down - first, group)
    place = program - number * group * across
    return first + place % size, place // size


def swizzle(down: int, across: int, group: int) -> tuple[list[int], list[int]]:
    tiles = [tile_of(program, down, across, group) for program in range(down * across)]
    return [row for row, _ in tiles], [col for _, col in tiles]
