"""Costs of what a CPU does not run: kernels by name, GPU ops by schema, traces that tell little or are damaged."""

from __future__ import annotations

import importlib
import random
from pathlib import Path
from typing import Any

import pytest

from sublight.cost import Cost
from sublight.trace import costs
from sublight.trace.costs import FAMILIES, cost_of, kernel_dtype, kernel_family, no_cost
from sublight.trace.costs.shapes import OpCost
from sublight.trace.record import EMPTY, Detail

HALF = ("c10::Half",) * 3
KERNELS = {  # name: family, on tensor cores, data type
    "ampere_sgemm_128x64_nn": ("matmul", False, "float32"),
    "volta_sgemm_64x64_nt": ("matmul", False, "float32"),
    "void cutlass::Kernel<cutlass_80_simt_sgemm_128x32_8x5_nn_align1>(Params)": ("matmul", False, "float32"),
    "void cutlass::Kernel<cutlass_80_tensorop_s1688gemm_256x64_16x4_nt_align4>(P)": ("matmul", True, "float32"),
    "void cutlass::Kernel2<cutlass_80_tensorop_bf16_s16816gemm_bf16_128x128_64x3_tn>(P)": ("matmul", True, "bfloat16"),
    "ampere_bf16_s16816gemm_bf16_128x128_ldg8_f2f_stages_32x5_tn": ("matmul", True, "bfloat16"),
    "ampere_fp16_s16816gemm_fp16_64x64_sliced1x2_ldg8_f2f_tn": ("matmul", True, "float16"),
    "volta_fp16_s884gemm_fp16_128x64_ldg8_f2f_nn": ("matmul", True, "float16"),
    "turing_h1688gemm_128x128_ldg8_nn": ("matmul", True, "float16"),
    "sm80_xmma_gemm_f32f32_tf32f32_f32_nn_n_tilesize128x128x16": ("matmul", True, "float32"),
    "sm80_xmma_gemm_f32f32_f32f32_f32_nn_n_tilesize128x128x8_stage3": ("matmul", False, "float32"),
    "sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64_warpgroupsize": ("matmul", True, "bfloat16"),
    "nvjet_tst_64x64_64x16_2x1_2cta_v_bz_bias_TNT": ("matmul", True, "bfloat16"),
    "nvjet_hsh_128x256_64x4_1x2_h_bz_coopA_NNN": ("matmul", True, "float16"),
    "void gemv2T_kernel_val<int, int, float, float, float, float, 128>(P)": ("matmul", False, "float32"),
    "void dot_kernel<float, 128, 0, cublasDotParams<float>>(P)": ("matmul", False, "float32"),
    "void cublasLt::splitKreduce_kernel<32, 16, int, float, float>(P)": ("matmul", False, "float32"),
    "Cijk_Alik_Bljk_BBS_BH_Bias_HA_S_SAV_UserArgs_MT32x64x128_MI16x16x1_SN": ("matmul", True, "bfloat16"),
    "Cijk_Ailk_Bljk_SB_MT64x64x8_SE_K1": ("matmul", False, "float32"),
    "triton_tem_fused_addmm_relu_0": ("matmul", None, None),
    "volta_scudnn_128x64_relu_interior_nn_v1": ("conv", False, "float32"),
    "turing_fp16_h1688cudnn_256x64_ldg8_relu_exp_small_nhwc_tn_v1": ("conv", True, "float16"),
    "volta_fp16_h884cudnn_256x64_ldg8_relu_exp_interior_nhwc_tn_v1": ("conv", True, "float16"),
    "sm80_xmma_fprop_implicit_gemm_indexed_tf32f32_tf32f32_f32_nhwckrsc_nchw": ("conv", True, "float32"),
    "void implicit_convolve_sgemm<float, float, 1024, 6, 7>(P)": ("conv", False, "float32"),
    "void cudnn::winograd_nonfused::winogradForwardData4x4<float, float>(P)": ("conv", False, "float32"),
    "void cudnn::ops::nchwToNhwcKernel<float, float, float, false>(P)": ("copy", None, "float32"),
    "void pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits<64, cutlass::bfloat16_t>>(P)": (
        "attention",
        True,
        "bfloat16",
    ),
    "fmha_cutlassF_f16_aligned_64x64_rf_sm80(PyTorchMemEffAttention::Params)": ("attention", True, "float16"),
    "fmha_cutlassF_f32_aligned_64x64_rf_sm70(P)": ("attention", False, "float32"),
    "cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_3_64x64": ("attention", True, "float16"),
    "ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)": ("communication", None, "bfloat16"),
    "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>>(int)": (
        "pointwise",
        None,
        "float32",
    ),
    "void at::native::vectorized_elementwise_kernel<4, at::native::exp_kernel_cuda(at::X&)::{lambda()#2}>(int)": (
        "pointwise",
        None,
        None,
    ),
    "void at::native::elementwise_kernel<128, 2, at::native::direct_copy_kernel_cuda(at::T&)>(int)": (
        "copy",
        None,
        None,
    ),
    "void at::native::vectorized_elementwise_kernel<4, at::native::FillFunctor<c10::Half>>(int)": (
        "memset",
        None,
        "float16",
    ),
    "void at::native::reduce_kernel<512, 1, at::native::ReduceOp<c10::BFloat16, MeanOps<c10::BFloat16, float>>>(R)": (
        "reduction",
        None,
        "bfloat16",
    ),
    "void (anonymous namespace)::softmax_warp_forward<float, float, float, 10, true>(float*)": (
        "softmax",
        None,
        "float32",
    ),
    "void at::native::(anonymous namespace)::vectorized_layer_norm_kernel<float, float>(int)": (
        "norm",
        None,
        "float32",
    ),
    "void at::native::(anonymous namespace)::multi_tensor_apply_kernel<TensorListMetadata<4>, Adam<float>>(T)": (
        "optimizer",
        None,
        "float32",
    ),
    "void at::native::(anonymous namespace)::CatArrayBatchedCopy<OpaqueType<2u>, unsigned int, 2>(T)": (
        "copy",
        None,
        None,
    ),
    "void at::native::index_elementwise_kernel<128, 4, gpu_index_kernel>(int)": ("index", None, None),
    "void cub::DeviceRadixSortOnesweepKernel<Policy800, false, long, int>(int*)": ("sort", None, None),
    "void fbgemm_gpu::permute_2D_lengths_kernel<int>(int, int)": ("copy", None, None),
    "triton_poi_fused_add_mul_0": ("fused", None, None),
    "triton_red_fused_native_layer_norm_2": ("fused", None, None),
    "triton_per_fused__softmax_1": ("fused", None, None),
    "Memset (Device)": ("memset", None, None),
    "Memcpy HtoD (Pinned -> Device)": ("copy", None, None),
    "my_own_thing": ("other", None, None),
}


def tensor_args(*dims: Any, types: tuple[str, ...], concrete: tuple[str, ...] = (), strides: Any = ()) -> Detail:
    return Detail(dims=dims, types=types, concrete=concrete, strides=strides)


def known(name: str, detail: Detail, **options: Any) -> OpCost:
    found = cost_of(name, detail, **options)
    assert found is not None, name
    assert found.family in FAMILIES
    return found


@pytest.mark.parametrize("name", KERNELS)
def test_kernels_are_told_by_their_names(name: str) -> None:
    family, tensor_cores, dtype = KERNELS[name]
    assert kernel_family(name) == (family, tensor_cores)
    assert kernel_dtype(name) == dtype
    assert family in FAMILIES


@pytest.mark.parametrize(
    ("kernels", "limit"),
    [
        ((), "matmul_fp32"),
        (("ampere_sgemm_128x64_nn",), "matmul_fp32"),
        (("cutlass_80_tensorop_s1688gemm_64x64", "void splitKreduce_kernel<float>"), "matmul_tf32"),
        (("triton_tem_fused_mm_0",), "matmul_tf32"),  # may run as TF32: the floor stays below what is possible
    ],
)
def test_float32_products_count_as_what_their_kernels_are(kernels: tuple[str, ...], limit: str) -> None:
    detail = tensor_args((64, 32), (32, 16), types=("float", "float"))
    assert known("aten::mm", detail, kernels=kernels).cost.flops == {limit: 2 * 64 * 32 * 16}


def test_eight_bits() -> None:
    fp8 = "c10::Float8_e4m3fn"
    detail = tensor_args(
        (64, 32),
        (32, 16),
        (),
        (),
        (),
        (),
        (),
        (),
        types=(fp8, fp8, "float", "float", "", "", "Scalar", "Scalar"),
        concrete=("", "", "", "", "", "", "15", "True"),
    )
    found = known("aten::_scaled_mm", detail)
    assert found.cost.flops == {"matmul_fp8": 2 * 64 * 32 * 16}
    assert (found.cost.read_bytes, found.cost.write_bytes) == (64 * 32 + 32 * 16, 2 * 64 * 16)


def test_cudnn_has_no_bias_and_padding_first() -> None:
    dims = ((8, 64, 56, 56), (128, 64, 3, 3), (), (), (), (), (), (), ())
    lists = ("ScalarList",) * 3 + ("Scalar",) * 4
    detail = tensor_args(
        *dims,
        types=("c10::Half", "c10::Half", *lists),
        concrete=("", "", "[1, 1]", "[2, 2]", "[1, 1]", "1", "True", "False", "True"),
    )
    found = known("aten::cudnn_convolution", detail)
    assert found.cost.flops == {"matmul_fp16": 2 * 8 * 128 * 28 * 28 * 64 * 9}
    assert found.cost.write_bytes == 2 * 8 * 128 * 28 * 28
    assert found.shape == "8x64x56x56 * 128x64x3x3 -> 8x128x28x28"
    winograd = known("aten::cudnn_convolution", detail, kernels=("volta_scudnn_winograd_128x128_ldg1",))
    assert winograd.cost.total_flops == found.cost.total_flops / 4


def test_flash_attention_of_the_gpu() -> None:
    q, kv = (2, 8, 128, 64), (2, 2, 128, 64)
    detail = tensor_args(
        q,
        kv,
        kv,
        (),
        (),
        (),
        (),
        types=(*HALF, "Scalar", "Scalar", "Scalar", ""),
        concrete=("", "", "", "0.", "True", "False", ""),
    )
    found = known("aten::_scaled_dot_product_flash_attention", detail)
    assert found.cost.flops == {"matmul_fp16": 2 * 2 * 8 * (128 * 129 // 2) * 128}
    assert found.cost.read_bytes == 2 * (2 * 8 + 2 * 2 * 2) * 128 * 64
    assert found.shape == "2x8x128x64, 2x2x128x64 causal"


def test_flash_attn_package_has_heads_third() -> None:
    q = (2, 128, 8, 64)
    types = (*HALF, "Scalar", "Scalar", "Scalar", "Scalar", "Scalar")
    words = ("", "", "", "0.", "0.125", "False", "-1", "-1")
    detail = tensor_args(q, q, q, (), (), (), (), (), types=types, concrete=words)
    assert known("flash_attn::_flash_attn_forward", detail).cost.total_flops == 2 * 2 * 8 * 128 * 128 * 128
    near = tensor_args(q, q, q, (), (), (), (), (), types=types, concrete=(*words[:6], "15", "0"))
    assert known("flash_attn::_flash_attn_forward", near).cost.total_flops == 2 * 2 * 8 * 128 * 16 * 128


def test_packed_sequences_count_as_equally_long() -> None:
    q = (1024, 8, 64)
    detail = tensor_args(
        q,
        q,
        q,
        (9,),
        (9,),
        (),
        (),
        (),
        (),
        (),
        types=(*HALF, "int", "int", *["Scalar"] * 5),
        concrete=("", "", "", "", "", "200", "200", "0.", "False", "False"),
    )
    found = known("aten::_flash_attention_forward", detail)
    assert found.cost.total_flops == 2 * 8 * (1024 * 1024 // 8) * 128


def test_traces_of_2021_have_shapes_alone() -> None:
    found = known("aten::mm", Detail(dims=((64, 32), (32, 16))))
    assert (found.dtype, found.cost.read_bytes) == ("float32", 4 * (64 * 32 + 32 * 16))
    half = known("aten::mm", Detail(dims=((64, 32), (32, 16))), kernels=("volta_fp16_s884gemm_fp16_128x64_nn",))
    assert (half.dtype, half.cost.read_bytes) == ("float16", 2 * (64 * 32 + 32 * 16))
    assert known("aten::add", Detail(dims=((64, 32), (64, 32), ()))).cost.read_bytes == 2 * 4 * 64 * 32
    words = ("float", "float", *["GenericList"] * 3, "Int", "Bool", "Bool", "Bool")
    conv = tensor_args((32, 64, 56, 56), (64, 64, 3, 3), *[()] * 7, types=words)
    assert cost_of("aten::cudnn_convolution", conv) is None  # the stride is not known


def test_lists_take_the_data_type_that_kernels_tell() -> None:
    detail = tensor_args(((8, 16), (8,)), ((8, 16), (8,)), (), types=("TensorList", "TensorList", "Scalar"))
    assert known("aten::_foreach_add_", detail).cost.bytes == 4 * 3 * 136
    kernel = "void multi_tensor_apply_kernel<TensorListMetadata<2>, BinaryOpListAlphaFunctor<c10::BFloat16, 2>>(T)"
    assert known("aten::_foreach_add_", detail, kernels=(kernel,)).cost.bytes == 2 * 3 * 136
    opaque = "void CatArrayBatchedCopy_contig<OpaqueType<2u>, unsigned int, 2, 128, 1>(T)"
    cat = known("aten::cat", tensor_args(((8, 16), (8, 16)), (), types=("TensorList", "Scalar")), kernels=(opaque,))
    assert (cat.cost.bytes, cat.dtype) == (2 * 2 * 256, "2-byte")


def test_inductor_counts_each_tensor_once_and_caps_tables() -> None:
    types = ("c10::BFloat16", "c10::BFloat16", "Scalar")
    plain = known("triton_poi_fused_gelu_0", tensor_args((4, 64), (4, 64), (), types=types, concrete=("", "", "256")))
    assert (plain.family, plain.cost.read_bytes, plain.cost.write_bytes) == ("fused", 512, 512)
    table = tensor_args((8,), (50257, 64), (8, 64), (), types=("long int", *types), concrete=("", "", "", "512"))
    found = known("triton_poi_fused_embedding_0", table)
    assert (found.cost.read_bytes, found.cost.write_bytes) == (8 * 8 + 2 * 512, 2 * 512)
    rows = tensor_args(
        (4, 64), (4,), (), (), types=("float", "float", "Scalar", "Scalar"), concrete=("", "", "4", "64")
    )
    summed = known("triton_per_fused_sum_0", rows)
    assert (summed.cost.read_bytes, summed.cost.write_bytes) == (4 * 256, 16)


def test_collectives() -> None:
    result = {"name": "_allgather_base", "in_elements": 25136, "out_elements": 201088, "dtype": "BFloat16"}
    found = known("record_param_comms", Detail(collective=result))
    assert (found.family, found.cost.read_bytes, found.cost.write_bytes) == ("communication", 2 * 25136, 2 * 201088)
    assert found.cost.link_bytes == 0, "without the size of the group nothing is known of the links"
    in_group = known("record_param_comms", Detail(collective={**result, "group_size": 8}))
    assert in_group.cost.link_bytes == 2 * 7 * 25136
    uneven = {**result, "name": "all_to_allv", "group_size": 8}
    assert known("record_param_comms", Detail(collective=uneven)).cost.link_bytes == 0
    base = tensor_args((8, 100), (1, 100), types=("float", "float"))
    gathered = known("c10d::_allgather_base_", base)
    assert (gathered.cost.read_bytes, gathered.cost.write_bytes) == (400, 3200)
    reduced = known("c10d::allreduce_", tensor_args(((100,),), types=("TensorList",)))
    assert (reduced.cost.read_bytes, reduced.cost.write_bytes) == (400, 400)


@pytest.mark.parametrize(
    ("name", "family", "cost"),
    [
        ("Memcpy DtoD (Device -> Device)", "copy", Cost(read_bytes=1000, write_bytes=1000)),
        ("Memcpy HtoD (Pinned -> Device)", "copy", Cost(read_bytes=0, write_bytes=1000, from_host_bytes=1000)),
        ("Memcpy DtoH (Device -> Pageable)", "copy", Cost(read_bytes=1000, write_bytes=0, to_host_bytes=1000)),
        ("Memcpy PtoP (Device -> Device)", "copy", Cost(read_bytes=1000, write_bytes=0, link_bytes=1000)),
        ("Memcpy HtoH (Pinned -> Pageable)", "copy", Cost(read_bytes=0, write_bytes=0)),
        ("Memset (Device)", "memset", Cost(read_bytes=0, write_bytes=1000)),
    ],
)
def test_copies_of_the_device(name: str, family: str, cost: Cost) -> None:
    found = known(name, EMPTY, bytes=1000)
    assert (found.family, found.cost) == (family, cost)
    assert cost_of(name, EMPTY) is None


@pytest.mark.parametrize(
    ("name", "detail"),
    [
        ("aten::mm", EMPTY),  # no shapes were recorded
        ("aten::mm", tensor_args((4, 5), (6, 7), types=("float", "float"))),  # shapes that do not fit
        ("aten::einsum", tensor_args((), ((2, 3), (3, 4)), types=("", "TensorList"))),
        ("aten::index", tensor_args((100, 16), (), types=("float", ""))),  # the indices were not recorded
        ("aten::index", tensor_args((100, 16), ((100,),), types=("float", "TensorList"))),  # may be a mask
        ("aten::cat", tensor_args((), (), types=("TensorList", "Scalar"))),  # a list without its shapes
        ("aten::embedding_dense_backward", tensor_args((8, 16), (8,), types=("float", "long int"))),
        ("aten::conv2d", tensor_args((4, 16, 8, 8), (32, 16, 3, 3), types=("float", "float"))),
        ("aten::convolution_backward", EMPTY),
        ("vllm::moe_forward", tensor_args((888, 3072), (888, 128), types=("c10::BFloat16", "c10::BFloat16"))),
        ("mylib::my_op", tensor_args((8,), types=("float",))),
        ("AddmmBackward0", tensor_args((4, 8), types=("float",))),
        ("ProfilerStep#3", EMPTY),
        ("record_param_comms", EMPTY),
        ("triton_poi_fused_add_0", EMPTY),
        ("triton_tem_fused_flex_attention_0", tensor_args((2, 8, 128, 64), types=("float",))),
        ("", EMPTY),
    ],
)
def test_what_is_not_known_is_none(name: str, detail: Detail) -> None:
    assert cost_of(name, detail) is None


@pytest.mark.parametrize(
    "name",
    [
        *("aten::view", "aten::as_strided", "aten::empty", "aten::detach", "aten::t", "aten::transpose", "aten::slice"),
        *("aten::reshape", "aten::to", "detach", "autograd::engine::evaluate_function: MmBackward0", "MmBackward0"),
        *("ProfilerStep#4", "Optimizer.step#AdamW.step", "Torch-Compiled Region: 0/1", "aten::_local_scalar_dense"),
    ],
)
def test_bookkeeping(name: str) -> None:
    assert no_cost(name)


@pytest.mark.parametrize("name", ["aten::mm", "aten::add_", "aten::copy_", "aten::clone", "MyBackward", "triton_poi_0"])
def test_work_is_no_bookkeeping(name: str) -> None:
    assert not no_cost(name)


def test_every_table_is_listed() -> None:
    folder = Path(costs.__file__).parent
    files = [path.stem for path in folder.glob("*.py") if "\nOPS: dict[str, Handler] = {" in path.read_text()]
    tables = [importlib.import_module(f"sublight.trace.costs.{name}").OPS for name in files if name != "__init__"]
    assert {id(table) for table in tables} == {id(table) for table in costs.TABLES}


def test_nothing_is_both_costed_and_bookkeeping() -> None:
    both = {
        name for name in costs.OPS if no_cost(name) and name not in ("aten::to", "aten::type_as", "aten::contiguous")
    }
    assert both == set()
    assert sum(len(table) for table in costs.TABLES) == len(costs.OPS)  # no op stands in two tables


def test_damaged_details_never_raise() -> None:
    """Every op with arguments of any kind: a cost that is not negative, or None."""
    draw = random.Random(0)
    shapes: list[Any] = [
        (),
        (0,),
        (4,),
        (4, 16),
        (2, 3, 8, 8),
        (-1, 4),
        (2**62, 2**62),
        ((4,), (5, 6)),
        "x",
        None,
        (None,),
        7,
    ]
    types = ["float", "c10::BFloat16", "long int", "Scalar", "ScalarList", "TensorList", "", "nonsense", "bool"]
    words = ["", "0", "1", "-1", "[1, 1]", "[0, 0]", "[]", "[x]", "True", "False", "nan", "1e999", "9" * 30, "[-3, 2]"]
    names = [
        *costs.OPS,
        "aten::add_",
        "aten::mul_",
        "record_param_comms",
        "triton_poi_fused_0",
        "triton_tem_fused_mm_0",
    ]
    found = 0
    for name in names:
        for _ in range(60):
            count = draw.randrange(13)
            detail = Detail(
                dims=tuple(draw.choice(shapes) for _ in range(count)),
                strides=tuple(draw.choice(shapes) for _ in range(draw.choice((0, count)))),
                types=tuple(draw.choice(types) for _ in range(draw.choice((0, count, count)))),
                concrete=tuple(draw.choice(words) for _ in range(draw.choice((0, count)))),
            )
            cost = cost_of(name, detail, kernels=draw.choice(((), ("nvjet_tst",), ("volta_sgemm",))))
            no_cost(name, detail)
            if cost is not None:
                found += 1
                assert cost.cost.read_bytes >= 0 and cost.cost.write_bytes >= 0, (name, detail)
                assert all(flops >= 0 for flops in cost.cost.flops.values()), (name, detail)
    assert found > 1000
