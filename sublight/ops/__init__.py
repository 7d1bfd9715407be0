"""The ops, one a file; adding one is a file and a line here."""

from sublight.op import BadInput, Op, nearest
from sublight.ops.add import ADD
from sublight.ops.layer_norm import LAYER_NORM
from sublight.ops.rms_norm import RMS_NORM
from sublight.ops.softmax import SOFTMAX

OPS = (ADD, SOFTMAX, LAYER_NORM, RMS_NORM)


def find(name: str) -> Op:
    """The op of that name; a near miss is answered with the names that come close."""
    for op in OPS:
        if op.name == name:
            return op
    raise BadInput(f"unknown op {name!r}: did you mean {nearest(name, [op.name for op in OPS])}?")
