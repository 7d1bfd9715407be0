"""What a device kernel is, read off its name: the family of its work, tensor cores or not, its data type."""

from __future__ import annotations

import functools
import re

_COMMUNICATION = (
    r"nccl|rccl|msccl|oneccl|nvshmem|rocshmem|symm_?mem|multimem"  # libraries, and what stands on them
    r"|deep_?ep::|(internode|intranode)(_ll)?::|notify_(dispatch|combine)"  # DeepEP: dispatch and combine of experts
    r"|all_?reduce|all_?gather|reduce_?scatter|all_?to_?all|cross_device_reduce|quick_?reduce|(one|two)_?shot"
    r"|userbuffers|lamport|moe_?a2a|pplx|send_?recv|(^|[_:])a2a_"
)
_COMMUNICATES = re.compile(_COMMUNICATION)

# In order: the first pattern found in the lower-case name decides. What stands early is what later patterns also match.
_FAMILIES = tuple(
    (family, re.compile(pattern))
    for family, pattern in (
        ("copy", r"^memcpy|copybuffer|nchwtonhwc|nhwctonchw|batched_transpose|^transpose"),
        ("copy", r"reshape_and_cache|store_?kv_?cache|appendpagedkv|concat_and_cache|copy_page"),  # into a paged cache
        ("memset", r"^memset|fillbuffer|fillfunctor|_memset$"),
        ("communication", _COMMUNICATION),
        ("other", r"^triton_tem_"),  # decided by the ops in its name, in _template
        ("fused", r"^triton_(poi|red|per|for|split_scan|mix|unk)"),
        ("moe", r"topk_?gating|topk_softmax|grouped_topk|moe_fused_gate|moe::dev::(routing|finalize|permute)"),
        ("moe", r"moe_?(align|sum|softmax|sort|permute|unpermute|finalize|gather|forward)|_routing_|finalizemoe"),
        ("moe", r"expt_data|bitmatrix|expert_?(tokens|offsets|first)|expandinputrows|ep_(scatter|gather)"),
        ("attention", r"flash(?!infer)|flash_?(fwd|bwd|attn|mla)|fmha|attention|attn_|sdpa|paged_attn|mha_fwd|mha_bwd"),
        ("attention", r"bwd_kernel_d[kq]|(prefill|decode)with(paged|ragged)?kvcache|merge_?state|masked_multihead"),
        ("attention", r"_fwd_(grouped_)?kernel_stage|(?<![a-z])mla_|_mla_|(?<![a-z])pa_(bf16|fp16|fp8|fwd|decode)"),
        ("rope", r"rotary|(?<!p)rope(?!r)"),  # not "properties"
        ("norm", r"bn_fw|bn_bw|batch_?norm|layer_?norm|rms_?norm|group_?norm|instance_?norm|gammabeta|rowwisemoments"),
        ("norm", r"computeinternalgradients|compute_stats|cucomputegrad|cucomputepart|ln_fwd|ln_bwd|residual_ln"),
        ("norm", r"compute(backward)?fusedparams"),
        ("reduction", r"pooling|max_pool|avg_pool|adaptive_?(average|max|avg)"),
        ("sampling", r"sampling|sample_from|topktopp|top_?p(renorm|mask)|renorm_?prob|multinomial|penalt|verify_tree"),
        ("softmax", r"softmax"),
        (
            "conv",
            r"fprop|dgrad|wgrad|convolv|winograd|conv[123]d|conv_?depthwise|implicit_gemm|implicitgemmconv|igemm_",
        ),
        ("conv", r"cudnn|miopen|im2col|col2im|naive_conv|convolution|conv_fwd|conv_bwd|gridwise_conv"),
        ("matmul", r"(?<!fb)gemm|nvjet|cijk_|xmma|gemv|splitk|dot_kernel|wgmma|matmul|^bmm_|cublas|mm_kernel|_mm_"),
        ("matmul", r"cutlass_\d|cutlass\w*::kernel|epilogue::impl|marlin|machete|mul_mat|[bs]gmv_"),
        ("matmul", r"lora_(expand|shrink)|fused_?moe|(?<![a-z])fmoe|moe_stage|grouped_mm"),  # the experts' products
        ("embedding", r"embedding|splitlookup|compute_grad_weight|sum_and_scatter|krn_partial|partial_segment"),
        ("optimizer", r"multi_tensor_apply|adam|sgd_|lamb(?!da)|adagrad|foreach"),
        ("loss", r"nll_?loss|nllcriterion|cross_entropy|crossentropy|mse_|smooth_l1|binary_cross|kl_div|ctc_loss"),
        ("dropout", r"dropout"),
        ("sort", r"sort|topk|top_k|bitonic|radix|unique"),
        ("index", r"index|bounds_check|gather|scatter|masked_select|nonzero|deviceselect|compact|writeback|take_"),
        ("index", r"token_ids|req_to_token|kv_indices|position_kernel"),  # a serving engine's bookkeeping
        ("copy", r"catarray|copy|transpose|permute|contiguous|to_dense|jagged"),
        ("fft", r"fft"),
        ("pointwise", r"elementwise|pointwise|vectorized|unrolled"),
        ("activation", r"act_and_mul|activation|silu|swiglu|gelu|geglu|glu_"),
        ("quantize", r"quant"),
        ("reduction", r"reduce|reduction|scan|cumsum|cumprod|argmax|argmin|histogram"),
        ("pointwise", r"upsample|triu_tril|distribution|scalepackedtensor|arange|range_|subtensorop|optensor|bcast"),
    )
)
_TEMPLATE = (("attention", "attention"), ("conv", "conv"), ("matmul", "mm"), ("matmul", "linear"))

_NO_TENSOR_CORES = re.compile(
    r"simt|sgemm|scudnn|dgemm|hgemm|cgemm|zgemm|gemv|dot_kernel|gemmk1|gemmsn|gemm_?smalln|splitkreduce|"
    r"convolve_sgemm|engine<float|depthwise|im2col|col2im|naive_conv|f32f32_f32f32_f32(?!.*tf32)|gemm_f32_f32"
)
_TENSOR_CORES = re.compile(
    r"tensorop|tensor_?core|hmma|imma|gmma|nvjet|tf32|tfloat32|xdl|884|1688|16816|16832|161616|bf16|bfloat16|fp16|(?<![a-z])f16|"
    r"e4m3|e5m2|e2m1|fp8|fp4|i8i8|half|_mma_|sm100a"
)
_ROCBLAS = re.compile(r"cijk_")
_ROCBLAS_MATRIX = re.compile(r"_mi\d")
_ROCBLAS_TYPES = re.compile(r"Cijk_[A-Za-z]+_[A-Za-z]+_([A-Z0-9]+)_")
_AROUND_ATTENTION = re.compile(r"dot_do_o|convert_dq|combine|convert_dkv|preprocess|postprocess|zero_")
_FMHA_FLOAT = re.compile(r"fmha_cutlass[fb]_f32\w*_sm(50|70|75)")
_OPAQUE = re.compile(r"OpaqueType<(\d+)")
_NVJET = {"h": "float16", "t": "bfloat16", "s": "float32", "q": "float8_e4m3fn", "d": "float64", "i": "int8"}
_ROCBLAS_DTYPES = (
    *(("F8", "float8_e4m3fn"), ("B8", "float8_e5m2"), ("I8", "int8"), ("4XI8", "int8")),
    *(("BB", "bfloat16"), ("B", "bfloat16"), ("H", "float16"), ("S", "float32"), ("D", "float64")),
)
_DTYPE_WORDS = (  # the one that stands first in the name decides: the element type comes before the accumulator's
    ("bfloat16", re.compile(r"BFloat16|bfloat16|bf16|Bfloat16|DF16b")),
    (
        "float16",
        re.compile(r"Half\b|HalfE|DF16_|__half|\bhalf\b|half_t|fp16|(?<![a-z])f16|h884|h1688|h16816|hgemm|[hs]884"),
    ),
    ("float8_e4m3fn", re.compile(r"e4m3|E4m3|fp8")),
    ("float8_e5m2", re.compile(r"e5m2|E5m2")),
    ("float64", re.compile(r"\bdouble\b|dgemm|d884")),
    ("float32", re.compile(r"\bfloat\b|tf32|tfloat32|(?<![a-z])f32|sgemm|scudnn|tensorop_s1688|fp32")),
)


@functools.lru_cache(maxsize=16384)
def kernel_family(kernel_name: str) -> tuple[str, bool | None]:
    """The family of a kernel's work, and whether it runs on tensor cores: None where that does not apply or show.

    >>> kernel_family("ampere_sgemm_128x64_nn"), kernel_family("nvjet_tst_64x64_64x16_2x1_2cta_v_bz_bias_TNT")
    (('matmul', False), ('matmul', True))
    >>> kernel_family("triton_poi_fused_add_0"), kernel_family("my_kernel")
    (('fused', None), ('other', None))
    """
    name = _without_parameters(kernel_name).lower()
    family = _first_family(name)
    if family == "other" and (by_parameters := _first_family(kernel_name.lower())) != "communication":
        family = by_parameters
    if name.startswith("triton_tem_"):
        return next((family for family, word in _TEMPLATE if word in name), "fused"), None
    if family == "attention":
        return family, None if _AROUND_ATTENTION.search(name) else not _FMHA_FLOAT.search(name)
    if family in ("matmul", "conv"):
        return family, _on_tensor_cores(name)
    return family, None


@functools.lru_cache(maxsize=16384)
def is_communication(kernel_name: str) -> bool:
    """Whether a kernel talks to other devices; what a function takes as its arguments says nothing of what it does.

    >>> is_communication("ncclDevKernel_Generic(ncclDevKernelArgsStorage<4096ul>)")
    True
    >>> is_communication("void (anonymous namespace)::internode_ll::dispatch<true, 3, 10, 7168>(void*, float*)")
    True
    >>> is_communication("void at::native::reduce_kernel<512, 1>(float)"), is_communication("gather_kernel(ncclComm)")
    (False, False)
    """
    return _COMMUNICATES.search(_without_parameters(kernel_name).lower()) is not None


def _first_family(name: str) -> str:
    return next((family for family, pattern in _FAMILIES if pattern.search(name)), "other")


def _without_parameters(name: str) -> str:
    """The name with its template arguments: what a function takes says little about what it is.

    >>> _without_parameters("void (anonymous namespace)::copy_kernel<float (*)(int), 4>(SoftmaxParams)")
    'void (anonymous namespace)::copy_kernel<float (*)(int), 4>'
    """
    depth = 0
    for at, letter in enumerate(name):
        if letter == "<":
            depth += 1
        elif letter == ">" and name[at - 1] != "-":
            depth -= 1
        elif letter == "(" and depth <= 0 and at and not name.startswith("(anonymous", at) and name[at - 1] != " ":
            return name[:at]
    return name


def _on_tensor_cores(name: str) -> bool | None:
    if _ROCBLAS.search(name):
        return bool(_ROCBLAS_MATRIX.search(name))
    if (
        "tensorop" in name or "tf32" in name or "tfloat32" in name
    ):  # before the words for the element type of what is around it
        return True
    if _NO_TENSOR_CORES.search(name):
        return False
    if _TENSOR_CORES.search(name):
        return True
    return False if "winograd" in name or "fft" in name else None


@functools.lru_cache(maxsize=16384)
def kernel_dtype(kernel_name: str) -> str | None:
    """The data type of what a kernel works on, where its name tells; TF32 works on float32.

    >>> kernel_dtype("sm80_xmma_gemm_f32f32_tf32f32_f32_nn_n"), kernel_dtype("nvjet_hsh_64x8_64x16")
    ('float32', 'float16')
    """
    if kernel_name.startswith("nvjet_"):
        return _NVJET.get(kernel_name[6:7])
    if rocblas := _ROCBLAS_TYPES.search(kernel_name):
        return next((dtype for start, dtype in _ROCBLAS_DTYPES if rocblas[1].startswith(start)), None)
    found = [(match.start(), dtype) for dtype, word in _DTYPE_WORDS if (match := word.search(kernel_name))]
    return min(found)[1] if found else None


def kernel_itemsize(kernel_name: str) -> int | None:
    """Bytes of an element where the name gives the size alone: copies do not care what the bits mean."""
    opaque = _OPAQUE.search(kernel_name)
    return int(opaque[1]) if opaque and int(opaque[1]) in (1, 2, 4, 8, 16) else None


def reduced_flops(kernel_name: str) -> float | None:
    """The factor by which a convolution's algorithm saves multiplications over the direct one; None: unknown."""
    name = kernel_name.lower()
    if "winograd" in name:
        return 4.0  # tiles of 4x4 outputs, the largest in use: 144 products become 36
    return None if "fft" in name else 1.0
