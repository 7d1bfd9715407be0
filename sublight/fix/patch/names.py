"""Names that mean something in a forward's code: what acts, what asks for a setting, what a tensor has of its own."""

from __future__ import annotations

import torch

ACTS = frozenset(
    [
        *("print", "open", "eval", "exec", "compile", "globals", "locals", "vars", "id", "input", "setattr"),
        *("delattr", "breakpoint", "__import__", "next"),
    ]
)
OF_WHOLE_NUMBERS = frozenset(
    ["log", "log2", "log10", "isqrt", "gcd", "lcm"]
)  # of math: a size that enters leaves no trace
SETTINGS = frozenset(  # of PyTorch and of this machine: a branch may follow
    [
        *("is_autocast_enabled", "is_autocast_cpu_enabled", "get_autocast_dtype", "get_autocast_gpu_dtype"),
        *("are_deterministic_algorithms_enabled", "is_deterministic_algorithms_warn_only_enabled"),
        *("get_num_threads", "get_default_dtype", "get_default_device", "is_inference_mode_enabled", "is_compiling"),
        *("is_dynamo_compiling", "is_tracing", "is_available", "is_initialized", "device_count", "current_device"),
        *("get_float32_matmul_precision", "initial_seed", "backends", "version", "__version__", "_C"),
        *("current_stream", "is_current_stream_capturing", "distributed", "get_rng_state", "mps", "xpu", "cuda"),
        *(
            "autocast",
            "amp",
            "custom_fwd",
            "custom_bwd",
            "manual_seed",
            "seed",
            "fork_rng",
            "use_deterministic_algorithms",
        ),
    ]
)
ASKING = ("is_", "are_", "get_", "has_", "current_", "set_")  # how PyTorch names functions that ask, or set
OF_TENSORS = frozenset(
    ["is_tensor", "is_floating_point", "is_complex", "is_grad_enabled", "is_scripting", "set_grad_enabled"]
)  # or tried
SIZES = frozenset(["shape", "size", "len", "numel", "nelement"])
KNOWN = frozenset(  # attributes that no user has set
    name
    for kind in (
        torch.Tensor,
        torch.Size,
        torch.dtype,
        torch.device,
        torch.finfo,
        torch.nn.Module,
        str,
        dict,
        list,
        float,
    )
    for name in dir(kind)
) - {"__dict__"}
