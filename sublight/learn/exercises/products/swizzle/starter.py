"""The order of tiles. Read the page: `sublight learn show swizzle`. Check your work: `sublight learn check swizzle`."""


def tile_of(program: int, down: int, across: int, group: int) -> tuple[int, int]:
    """Row and column of this program's tile."""
    # TODO: in groups of `group` rows of tiles, column by column inside of a group
    return program // across, program % across


def swizzle(down: int, across: int, group: int) -> tuple[list[int], list[int]]:
    tiles = [tile_of(program, down, across, group) for program in range(down * across)]
    return [row for row, _ in tiles], [col for _, col in tiles]
