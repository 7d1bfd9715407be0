"""The work that an op cannot do without, by arithmetic alone: FLOPs and bytes; nothing heavy is imported here."""

from sublight.cost.dtypes import DTYPES, ITEMSIZE, SPELLINGS, parse_dtype
from sublight.cost.record import DIRECTIONS, Cost, Direction, Shape, shape_text

__all__ = ["DIRECTIONS", "DTYPES", "ITEMSIZE", "SPELLINGS", "Cost", "Direction", "Shape", "parse_dtype", "shape_text"]
