"""Ops that touch no data: views, allocations, and the ranges that profilers and autograd open around other ops."""

from __future__ import annotations

import re

from sublight.trace.costs.data import requested_dtype
from sublight.trace.costs.shapes import Args, Unknown
from sublight.trace.record import Detail

_VIEWS = """
    view view_as _unsafe_view as_strided as_strided_ reshape _reshape_alias reshape_as flatten unflatten ravel t t_
    transpose transpose_ permute movedim swapaxes swapdims numpy_T mT mH T H adjoint expand expand_as broadcast_to
    broadcast_tensors select slice narrow diagonal unfold squeeze squeeze_ unsqueeze unsqueeze_ split split_with_sizes
    chunk tensor_split unbind unsafe_split unsafe_chunk unsafe_split_with_sizes alias detach detach_ view_as_real
    view_as_complex real imag _conj conj resolve_conj resolve_neg lift_fresh lift_fresh_copy atleast_1d atleast_2d
    _nested_view_from_buffer data set_ set_data
    empty empty_like empty_strided new_empty new_empty_strided empty_permuted resize_ resize_as_ _resize_output_
    result_type can_cast is_nonzero item _local_scalar_dense size numel is_floating_point is_complex is_pinned
    _has_compatible_shallow_copy_type _version output_nr is_leaf requires_grad_ retain_grad record_stream is_same_size
    _assert_async _assert_scalar _assert_tensor_metadata sym_size sym_numel sym_stride _cast_Float
    _autocast_to_full_precision _autocast_to_reduced_precision _use_cudnn_ctc_loss _cudnn_init_dropout_state
    cudnn_is_acceptable _fused_sdp_choice _debug_has_internal_overlap
"""
VIEWS = frozenset(f"aten::{name}" for name in _VIEWS.split())
MAYBE_COPIES = ("aten::to", "aten::type_as", "aten::contiguous")  # the copy itself is an op of its own below them
_RANGES = re.compile(
    r"^(detach_?|alias|view|as_strided|t|transpose|expand|slice|select|unsqueeze|squeeze|permute|split|unbind)$"
    r"|^aten::einsum$"  # its products and permutations are ops inside it
    r"|^autograd::engine::|^torch::autograd::(AccumulateGrad|GraphRoot|CopySlices)|^\w+Backward\d+$"
    r"|^ProfilerStep|^Optimizer\.|^Torch-Compiled Region|^CompiledFunction|^CompiledFxGraph|^## Call CompiledFxGraph"
    r"|^TorchDynamo |^AOTDispatcher|^enumerate\(DataLoader\)|^\[memory\]$|^\[pytorch\||^nn\.Module:|^PyTorch Profiler"
    r"|^DistributedDataParallel\.|^cuda(Launch|Stream|Event|Device|Malloc|Free)"
)


def touches_no_data(name: str, detail: Detail) -> bool:
    if name in VIEWS or _RANGES.search(name):
        return True
    return name in MAYBE_COPIES and not _copies(Args(name=name.removeprefix("aten::"), detail=detail))


def _copies(args: Args) -> bool:
    """Whether these arguments ask for other bytes than there are; without arguments, no: what copies shows below."""
    x = args.tensor(0)
    if x is None:
        return False
    if args.name == "contiguous":
        return not x.is_dense or args.word(1) not in ("", "0")
    try:
        requested = requested_dtype(args)
    except Unknown:
        return False
    return requested is not None and requested != x.dtype
