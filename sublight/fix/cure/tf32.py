"""Products of float32 on the tensor cores, with 10 bits of mantissa: the user's to decide, and named as such."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from sublight.fix.cure.record import Changes, Cure, Edit

NAME = "TF32"
LINE = 'torch.set_float32_matmul_precision("high")'


@contextlib.contextmanager
def install(changes: Changes) -> Iterator[None]:
    import torch

    before = torch.get_float32_matmul_precision()
    if before != "highest":
        changes.left[NAME] = "the script has it already"
    elif not torch.cuda.is_available():
        changes.left[NAME] = "no GPU that torch can use here"
    else:
        changes.did[NAME] = "products of float32 on the tensor cores, with 10 bits of mantissa"
        torch.set_float32_matmul_precision("high")
        if changes.script:
            changes.edit(Edit(kind="import", file=changes.script, line=0, text=LINE))
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


TF32 = Cure(
    name=NAME,
    treats=("no-tensor-cores",),
    line=LINE,
    where="once, before the model runs",
    install=install,
    needs_gpu=True,
    tolerance=1e-2,
)
