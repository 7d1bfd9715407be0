"""Every private name of Triton and PyTorch that this project uses, in one table, each with what it is for.

`from sublight.backend import private` and `private.JITFunction` finds one when it is first used, and keeps it. Where a
version has moved or dropped it, the error names it and what needs it; `missing()` lists all such for `sublight doctor`.
Some of these are reached by attribute (`torch._C.…`), some by import; a layout test holds that no other file does so.
"""

from __future__ import annotations

import importlib
import sys
from dataclasses import dataclass
from typing import Any


class Missing(ImportError):
    """A private part of Triton or PyTorch that this version does not have."""


@dataclass(frozen=True, slots=True)
class Part:
    """Where a name lies, "module:attribute", and what it is used for."""

    path: str
    purpose: str


PARTS = {
    # Triton
    "JITFunction": Part("triton.runtime.jit:JITFunction", "kernels as objects: to record, compile and launch them"),
    "jit": Part("triton.runtime.jit:", "kernels made out of source by xray's checks"),
    "mangle_type": Part("triton.runtime.jit:mangle_type", "the type that Triton gives an argument"),
    "create_function_from_signature": Part(
        "triton.runtime.jit:create_function_from_signature", "arguments bound and typed as a launch would"
    ),
    "Autotuner": Part("triton.runtime.autotuner:Autotuner", "autotuned kernels in other people's scripts"),
    "try_configuration": Part("triton.runtime.autotuner.Autotuner:_bench", "launches that autotune only tries"),
    "driver": Part("triton.runtime.driver:driver", "a GPU that is pretended, and starting Triton early"),
    "interpreter": Part("triton.runtime.interpreter:", "kernels on the CPU, with xray's checks"),
    "GPUTarget": Part("triton.backends.compiler:GPUTarget", "compiling for a GPU that is not here"),
    "ASTSource": Part("triton.compiler:ASTSource", "compiling for a GPU that is not here"),
    "make_backend": Part("triton.compiler.compiler:make_backend", "compiling for a GPU that is not here"),
    "CompilationError": Part("triton.compiler.errors:CompilationError", "complaints of the compiler by line"),
    "code_generator": Part("triton.compiler.code_generator:", "loading the compiler before it is needed"),
    "GluonASTSource": Part(
        "triton.experimental.gluon._runtime:GluonASTSource", "compiling Gluon's kernels for a GPU that is not here"
    ),
    "ir": Part("triton._C.libtriton:ir", "checking that a kernel compiles without compiling it to the end"),
    "cublas": Part("triton._C.libtriton.nvidia:cublas", "other people's scripts that compare with cuBLAS"),
    "AsyncCompileMode": Part("triton.runtime._async_compile:AsyncCompileMode", "compiling kernels side by side"),
    "active_mode": Part("triton.runtime._async_compile:active_mode", "compiling kernels side by side"),
    "triton_key": Part("triton.runtime.cache:triton_key", "hashing Triton once for many processes"),
    "knobs": Part("triton:knobs", "hooks around launches and compiler stages"),
    "TensorDescriptor": Part("triton.tools.tensor_descriptor:TensorDescriptor", "tiles for Hopper's copy engine"),
    "GluonDescriptor": Part(
        "triton.experimental.gluon.nvidia.hopper:TensorDescriptor", "tiles for Hopper's copy engine, in Gluon"
    ),
    # PyTorch
    "Generator": Part("torch._C:Generator", "a generator of the CPU where a GPU is pretended"),
    "parse_schema": Part("torch._C:parse_schema", "the arguments of an op of ours"),
    "current_raw_stream": Part("torch._C:_cuda_getCurrentRawStream", "launching on the current stream"),
    "dispatch_modes": Part("torch._C:_len_torch_dispatch_stack", "whether a dispatch mode is on"),
    "transforms": Part("torch._C._functorch:peek_interpreter_stack", "whether torch.func is transforming"),
    "jit_trace": Part("torch._C:_get_tracing_state", "whether torch.jit is tracing"),
    "forward_ad": Part("torch.autograd.forward_ad:", "whether forward-mode AD is on"),
    "FunctionBase": Part("torch._C:_FunctionBase", "autograd functions without their Python wrapper"),
    "graph_task": Part("torch._C:_current_graph_task_id", "whether a backward pass is running in this thread"),
    "end_allocate_to_pool": Part("torch._C:_cuda_endAllocateToPool", "leaving a graph's memory pool after an error"),
    "matmul_precision": Part("torch._C:_get_float32_matmul_precision", "settings that a captured graph depends on"),
    "flash_sdp": Part("torch._C:_get_flash_sdp_enabled", "settings that a captured graph depends on"),
    "efficient_sdp": Part("torch._C:_get_mem_efficient_sdp_enabled", "settings that a captured graph depends on"),
    "math_sdp": Part("torch._C:_get_math_sdp_enabled", "settings that a captured graph depends on"),
    "parse_to": Part("torch._C._nn:_parse_to", "what Tensor.to was asked for"),
    "foreach_add_": Part("torch:_foreach_add_", "counters of many tensors, by numbers that a graph's capture allows"),
    "foreach_copy_": Part("torch:_foreach_copy_", "many weights written in another data type"),
    "foreach_mul": Part("torch:_foreach_mul", "many gradients scaled by one number on the device"),
    "fused_adamw_": Part("torch:_fused_adamw_", "PyTorch's own AdamW in one launch, which ours is judged against"),
    "saved_tensors_hooks": Part(
        "torch._C._autograd:_top_saved_tensors_default_hooks", "whether what autograd saves is made again in backward"
    ),
    "clear_callbacks": Part("torch._C._autograd:_clear_callbacks", "leaving a profile that failed"),
    "RecordFunctionFast": Part("torch._C._profiler:_RecordFunctionFast", "source lines in a profile"),
    "eval_frame": Part("torch._C._dynamo:eval_frame", "whether torch.compile is compiling"),
    "int_mm": Part("torch:_int_mm", "int8 products by cuBLAS"),
    "scaled_mm": Part("torch:_scaled_mm", "fp8 products by cuBLAS"),
    "comparison": Part("torch.testing._comparison:", "comparing plain tensors without loading distributed ones"),
    "dynamo": Part("torch._dynamo:", "torch.compile's settings, and modules that it wraps"),
    "dynamo_utils": Part("torch._dynamo.utils:", "what torch.compile counts: compilations and graph breaks"),
    "disable_dynamo": Part("torch._compile:_disable_dynamo", "a function outside of graphs, without loading dynamo"),
    "CompileContext": Part("torch._guards:CompileContext", "whether torch.compile is at work on this thread"),
    "TorchDispatchMode": Part(
        "torch.utils._python_dispatch:TorchDispatchMode", "operations seen, or done otherwise, below autograd"
    ),
    "pytree": Part("torch.utils._pytree:", "tensors inside of arguments and results"),
    "DeviceContext": Part("torch.utils._device:DeviceContext", "a default device where a GPU is pretended"),
    "function_modes": Part("torch.overrides:_get_current_function_mode_stack", "modes where a GPU is pretended"),
    "fused_devices": Part(
        "torch.utils._foreach_utils:_get_fused_kernels_supported_devices", "whether an optimizer has fused kernels here"
    ),
    "force_cutlass": Part("torch.sparse.SparseSemiStructuredTensor:_FORCE_CUTLASS", "which library does 2:4 products"),
    "is_exporting_flag": Part("torch.compiler:_is_exporting_flag", "whether a model is being exported"),
    "lazy_call": Part("torch.cuda:_lazy_call", "what is to be done when a script first uses CUDA"),
    "world": Part(
        "torch.distributed.distributed_c10d:_world", "process groups that a script ends before its profile does"
    ),
    "sleep": Part("torch.cuda:_sleep", "a GPU that waits while calls are launched"),
    "has_any_global_hook": Part(
        "torch.nn.modules.module:_has_any_global_hook", "whether hooks of all modules would miss a swapped one"
    ),
    "NormBase": Part("torch.nn.modules.batchnorm:_NormBase", "norms that patch leaves, by their kind"),
    "call_module": Part("torch.nn.modules.module.Module:_call_impl", "where a module's call begins, for source lines"),
}


def __getattr__(name: str) -> Any:
    if name not in PARTS:
        raise AttributeError(f"{name} is not in the table of private parts")
    value = find(name)
    globals()[name] = value
    return value


def find(name: str) -> Any:
    part = PARTS[name]
    module, _, attribute = part.path.partition(":")
    try:
        value = _module(module)
        return getattr(value, attribute) if attribute else value
    except (ImportError, AttributeError) as error:
        library = module.split(".")[0]
        version = getattr(_module(library), "__version__", "?")
        raise Missing(
            f"{library} {version} has no {part.path.replace(':', '.')}, needed for: {part.purpose}"
        ) from error


def loaded(name: str) -> Any:
    """The private part, if its module is imported already; None if it is not, or if this version lacks the part."""
    try:
        return find(name) if PARTS[name].path.partition(":")[0] in sys.modules else None
    except Missing:
        return None


def _module(path: str) -> Any:
    """A module by its name; or an object inside a module, as the parts of torch._C are."""
    try:
        return importlib.import_module(path)
    except ModuleNotFoundError:
        parent, _, last = path.rpartition(".")
        if not parent:
            raise
        return getattr(_module(parent), last)


def missing(*, without: tuple[str, ...] = ()) -> list[str]:
    """What this Triton and this PyTorch lack, a sentence each; `without` are libraries that are not installed."""
    sentences = []
    for name, part in PARTS.items():
        if part.path.split(".")[0].split(":")[0] not in without:
            try:
                find(name)
            except Missing as error:
                sentences.append(str(error))
    return sentences
