"""What kind of work an op or a kernel is, by name alone: for those whose cost the trace does not tell."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence

from sublight.trace.costs import (
    attention,
    communication,
    conv,
    data,
    matmul,
    normalization,
    optimizer,
    pointwise,
    reduction,
)
from sublight.trace.costs.kernels import kernel_family
from sublight.trace.costs.shapes import Handler

# by table: its family, after the names that are something else
_TABLES: tuple[tuple[Mapping[str, Handler], str, tuple[tuple[str, str], ...]], ...] = (
    (matmul.OPS, "matmul", ()),
    (conv.OPS, "conv", ()),
    (attention.OPS, "attention", ()),
    (normalization.OPS, "norm", (("softmax", r"softmax"),)),
    (pointwise.OPS, "pointwise", (("dropout", r"dropout|masked_scale"), ("memset", r"^(fill|zero|full|ones)"))),
    (reduction.OPS, "reduction", (("loss", r"loss|cross_entropy"), ("pointwise", r"upsample"))),
    (
        data.OPS,
        "copy",
        (
            ("embedding", r"embedding"),
            ("sort", r"sort|unique|topk"),
            ("fft", r"fft"),
            ("index", r"index|gather|scatter|take|masked_select|nonzero|bincount|histc"),
        ),
    ),
    (optimizer.OPS, "optimizer", ()),
)
_AROUND = ("memset", "copy", "other")  # what a kernel of another kind may need before it


def _families() -> Iterator[tuple[str, str]]:
    for table, usual, others in _TABLES:
        for name in table:
            base = name.rpartition("::")[2]
            yield name, next((family for family, pattern in others if re.search(pattern, base)), usual)


OP_FAMILIES = dict(_families())


def family_of(name: str, kernels: Sequence[str] = ()) -> str:
    """The family of an op that ran these kernels, or of a kernel.

    >>> family_of("aten::addmm_", ["Memset (Device)", "my_kernel"]), family_of("mylib::op", ["Memset", "ampere_sgemm"])
    ('matmul', 'matmul')
    >>> family_of("vllm::unified_attention_with_output"), family_of("mylib::op")
    ('attention', 'other')
    """
    if known := OP_FAMILIES.get(name) or OP_FAMILIES.get(name.removesuffix("_")):
        return known
    if communication.NAME.search(name):
        return "communication"
    if (named := kernel_family(name)[0]) != "other":
        return named
    families = [kernel_family(kernel)[0] for kernel in kernels]
    return next((family for family in families if family not in _AROUND), families[0] if families else "other")
