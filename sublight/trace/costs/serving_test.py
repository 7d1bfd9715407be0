"""Kernels and ops of serving engines: what each is, where a graph's replay leaves nothing but the name."""

from __future__ import annotations

from typing import Any

import pytest

from sublight.trace.costs import FAMILIES, cost_of, family_of, kernel_family
from sublight.trace.record import Detail

B16, F8, I32, F32, I64 = "c10::BFloat16", "c10::Float8_e4m3fn", "int", "float", "long int"

KERNELS = {
    # vLLM
    "void vllm::rms_norm_kernel<c10::BFloat16>(c10::BFloat16*, c10::BFloat16 const*, float, int)": "norm",
    "std::enable_if<(((8)>(0)))&&(X), void>::type vllm::fused_add_rms_norm_kernel<c10::BFloat16, 8>(P)": "norm",
    "void vllm::act_and_mul_kernel<c10::BFloat16, &(vllm::silu_kernel<float>(float)), true>(P)": "activation",
    "void vllm::rotary_embedding_kernel<c10::Half, true>(long const*, c10::Half*)": "rope",
    "void vllm::paged_attention_v2_kernel<float, 128, (vllm::Fp8KVCacheDataType)0, false, 512>(P)": "attention",
    "void vllm::paged_attention_v2_reduce_kernel<unsigned short, 128, 128, 512>(unsigned short*)": "attention",
    "void vllm::concat_and_cache_mla_kernel<__nv_bfloat16, (vllm::Fp8KVCacheDataType)0>(P)": "copy",
    "void vllm::cross_device_reduce_1stage<__nv_bfloat16, 4>(vllm::RankData*)": "communication",
    "void vllm::moe::topkGatingSoftmax<8, 128, 4, 16, 32, int>(float const*, bool const*, float*)": "moe",
    "void vllm::moe::moe_align_block_size_kernel<int>(int const*)": "moe",
    "void vllm::moe::count_and_sort_expert_tokens_kernel<int>(int const*)": "moe",
    "void vllm::moe::moe_sum_kernel<c10::BFloat16, 8>(c10::BFloat16*)": "moe",
    "fused_moe_kernel": "matmul",
    "void vllm::dynamic_per_token_scaled_fp8_quant_kernel<c10::BFloat16>(c10::Float8_e4m3fn*)": "quantize",
    "void vllm::segmented_max_reduction<c10::BFloat16>(float*)": "reduction",
    "_per_token_group_quant_fp8": "quantize",
    "void marlin::Marlin<__nv_bfloat16, 1125899906909960l, 256, 1, 8, 8, false, 4, 8, false>(int4 const*)": "matmul",
    "void vllm::awq::gemm_forward_4bit_cuda_m16nXk32<128>(int, int)": "matmul",
    "void vllm::merge_attn_states_kernel<__nv_bfloat16, uint4, 128>(__nv_bfloat16*)": "attention",
    "kernel_unified_attention_3d": "attention",
    "_fwd_grouped_kernel_stage1": "attention",
    "_lora_expand_kernel": "matmul",
    "void vllm::apply_repetition_penalties_kernel<float>(float*)": "sampling",
    "_w8a8_block_fp8_matmul": "matmul",
    # FlashInfer
    "void flashinfer::BatchDecodeWithPagedKVCacheKernel<(flashinfer::PosEncodingMode)0, 2u, 4u>(P)": "attention",
    "void flashinfer::BatchPrefillWithPagedKVCacheKernel<KernelTraits<(flashinfer::MaskMode)1>>(P)": "attention",
    "void flashinfer::BatchPrefillWithRaggedKVCacheKernel<KernelTraits<(flashinfer::MaskMode)1>>(P)": "attention",
    "void flashinfer::SinglePrefillWithKVCacheKernel<flashinfer::KernelTraits<>>(Params)": "attention",
    "void flashinfer::PersistentVariableLengthMergeStatesKernel<8u, 16u, 8u, 4u, __nv_bfloat16>(P)": "attention",
    "void flashinfer::norm::RMSNormKernel<8u, __nv_bfloat16>(__nv_bfloat16*)": "norm",
    "void flashinfer::norm::FusedAddRMSNormKernel<8u, __nv_bfloat16>(__nv_bfloat16*)": "norm",
    "void flashinfer::activation::act_and_mul_kernel<__nv_bfloat16, &silu>(__nv_bfloat16*)": "activation",
    "void flashinfer::BatchQKApplyRotaryPosIdsCosSinCacheHeadParallelismKernel<false, 128u, 8u, 16u>(P)": "rope",
    "void flashinfer::sampling::TopKTopPSamplingFromProbKernel<1024u>(float*)": "sampling",
    "void flashinfer::sampling::TopPRenormProbKernel<1024u>(float*)": "sampling",
    "void flashinfer::AppendPagedKVCacheKernel<128u, 8u>(P)": "copy",
    "void flashinfer::trtllm_allreduce_fusion::allreduce_fusion_kernel_oneshot_lamport<1>(P)": "communication",
    # FlashAttention
    "void flash::flash_fwd_splitkv_combine_kernel<Flash_fwd_kernel_traits<128>>(flash::Flash_fwd_params)": "attention",
    "void cutlass::device_kernel<flash::enable_sm90_or_later<flash::FlashAttnFwdSm90<2>>>(P)": "attention",
    "flash::prepare_varlen_num_blocks_kernel(int)": "attention",
    # SGLang
    "void deep_gemm::sm90_fp8_gemm_1d2d_impl<7168u, 4096u>(float*)": "matmul",
    "void moe_fused_gate_kernel_dynamic<cutlass::bfloat16_t>(void*)": "moe",
    "write_req_to_token_pool_triton": "index",
    "_fwd_kernel_stage2": "attention",
    "ep_scatter_triton_kernel": "moe",
    # TensorRT-LLM
    "void tensorrt_llm::kernels::generalRmsNorm<__nv_bfloat16, __nv_bfloat16, false>(P)": "norm",
    "void tensorrt_llm::kernels::applyBiasRopeUpdateKVCacheV2<__nv_bfloat16, 128>(P)": "rope",
    "fmha_v2_flash_attention_bf16_64_256_S_q_paged_kv_128_causal_sm90_kernel": "attention",
    "void mmha::masked_multihead_attention_kernel<unsigned short, 128>(P)": "attention",
    "void tensorrt_llm::kernels::cutlass_kernels::expandInputRowsKernel<__nv_bfloat16>(P)": "moe",
    "void tensorrt_llm::kernels::cutlass_kernels::finalizeMoeRoutingKernel<__nv_bfloat16>(P)": "moe",
    "void tensorrt_llm::kernels::cutlass_kernels::doActivationKernel<__nv_bfloat16>(P)": "activation",
    "void tensorrt_llm::kernels::twoShotAllReduceKernel<__nv_bfloat16, 8>(P)": "communication",
    # AITER, CK
    "_ZN5aiter49fmoe_bf16_pertokenFp8_g1u1_vs_silu_1tg_ps_32x512E": "matmul",
    "void ck_tile::kentry<256, 1, ck_tile::FmhaFwdKernel<ck_tile::BlockFmhaPipelineQRKSVSAsync<>>>(P)": "attention",
    "_ZN7ck_tile6kentryILi1ENS_16MoeSortingKernelINS_17MoeSortingProblemEE": "moe",
    # DeepEP
    "void deep_ep::internode_ll::dispatch<true, false, 7168>(void*)": "communication",
    "void deep_ep::intranode::combine<__nv_bfloat16, 8, 768>(void*)": "communication",
    # triton_kernels
    "_p_matmul_ogs_NNT_bf16xbf16xmxfp4_128x256x128x1_swiglu": "matmul",
    "_expt_data_compute": "moe",
    "_swiglu": "activation",
    # Liger
    "_rms_norm_forward_kernel": "norm",
    "_swiglu_forward_kernel": "activation",
    "_triton_rope": "rope",
    "liger_cross_entropy_kernel": "loss",
    # others
    "void mul_mat_q<(ggml_type)12, 64, 8, false>(char const*)": "matmul",
    "void kDequantizeBlockwise<__nv_bfloat16, 512, 64, 8, 2>(float*)": "quantize",
    "void selective_scan_fwd_kernel<Selective_Scan_fwd_kernel_traits<64>>(SSMParamsBase)": "reduction",
    "void causal_conv1d_fwd_kernel<Causal_conv1d_fwd_kernel_traits<128, 4>>(ConvParamsBase)": "conv",
}
OPS = {
    "vllm::unified_attention_with_output": "attention",
    "vllm::unified_attention": "attention",
    "vllm::moe_forward": "moe",
    "_moe_C::topk_softmax": "moe",
    "sgl_kernel::fused_add_rmsnorm": "norm",
    "_C_custom_ar::all_reduce": "communication",
    "fbgemm::split_embedding_codegen_lookup_rowwise_adagrad_function": "embedding",
    "record_param_comms": "communication",
    "aten::cudnn_convolution": "conv",
    "aten::_fused_adamw_": "optimizer",
    "aten::einsum": "other",  # whatever it runs is an op of its own inside it
}


@pytest.mark.parametrize("name", KERNELS)
def test_kernels_of_serving_engines(name: str) -> None:
    assert kernel_family(name)[0] == KERNELS[name]
    assert KERNELS[name] in FAMILIES


@pytest.mark.parametrize("name", OPS)
def test_ops_by_their_names(name: str) -> None:
    assert family_of(name) == OPS[name]


@pytest.mark.parametrize(
    ("kernels", "family"),
    [
        (("Memset (Device)", "nvjet_tst_192x192_64x4_2x1_v_bz_coopB_bias_TNN"), "matmul"),
        (("void vllm::reshape_and_cache_flash_kernel<float>(P)", "fmhaSm100aKernel_QkvE4m3"), "attention"),
        (("Memset (Device)",), "memset"),
        (("my_kernel",), "other"),
        ((), "other"),
    ],
)
def test_an_unknown_op_is_what_its_kernels_are(kernels: tuple[str, ...], family: str) -> None:
    assert family_of("mylib::op", kernels) == family


def arguments(*given: Any) -> Detail:
    """Tensors as (data type, sizes …), scalars as they are."""
    tensors = [each if isinstance(each, tuple) else () for each in given]
    return Detail(
        dims=tuple(each[1:] for each in tensors),
        types=tuple(each[0] if each else "Scalar" for each in tensors),
        concrete=tuple("" if isinstance(each, tuple) else str(each) for each in given),
    )


HIDDEN, LOGITS = (B16, 32, 64), (B16, 32, 8)
UP, DOWN = (B16, 8, 2 * 16, 64), (B16, 8, 64, 16)  # eight experts, 16 wide inside
WEIGHTS, CHOSEN = (F32, 32, 2), (I32, 32, 2)
# op, arguments, family, bytes read, bytes written, FLOPs
COSTS = (
    ("sgl_kernel::rmsnorm", (HIDDEN, HIDDEN, (B16, 64)), "norm", 2 * 2048 + 128, 4096, 4 * 2048),
    ("sgl_kernel::fused_add_rmsnorm", (HIDDEN, HIDDEN, (B16, 64)), "norm", 8192 + 128, 8192, 5 * 2048),
    ("_C::silu_and_mul", ((B16, 32, 32), HIDDEN), "activation", 4096, 2048, 9 * 1024),
    ("_C::static_scaled_fp8_quant", ((F8, 32, 64), HIDDEN, (F32, 1)), "quantize", 4096, 2048, 2048),
    ("_C::dynamic_scaled_fp8_quant", ((F8, 32, 64), HIDDEN, (F32, 1)), "quantize", 4096, 2048 + 4, 3 * 2048),
    ("_C::per_token_group_fp8_quant", (HIDDEN, (F8, 32, 64), (F32, 32, 1)), "quantize", 4096, 2048 + 128, 3 * 2048),
    ("_C::rotary_embedding", ((I64, 32), HIDDEN, HIDDEN, 64), "rope", 8192 + 256, 8192, 3 * 4096),
    ("sgl_kernel::apply_rope_pos_ids_cos_sin_cache", (HIDDEN, HIDDEN, HIDDEN, HIDDEN, (F32, 4096, 64), (I64, 32)),
     "rope", 8192 + 256, 8192, 3 * 4096),
    ("_C_cache_ops::concat_and_cache_mla", ((B16, 32, 512), (B16, 32, 64), (B16, 9, 16, 576), (I64, 32)),
     "copy", 2 * 32 * 576 + 256, 2 * 32 * 576, 0),
    ("_moe_C::topk_softmax", (WEIGHTS, CHOSEN, CHOSEN, LOGITS), "moe", 512, 512, 5 * 256),
    ("sgl_kernel::topk_softmax", (WEIGHTS, CHOSEN, LOGITS), "moe", 512, 512, 5 * 256),
    ("_moe_C::moe_align_block_size", (CHOSEN, 8, 16), "moe", 256, 256, 0),
    ("_moe_C::moe_sum", ((B16, 32, 2, 64), HIDDEN), "moe", 8192, 4096, 4096),
    ("vllm::inplace_fused_experts", (HIDDEN, UP, DOWN, WEIGHTS, CHOSEN), "matmul",
     4096 + 2 * 8 * (32 * 64 + 64 * 16) + 512, 4096, 2 * 64 * (32 * 64 + 64 * 16)),
    # one token goes to two experts: two of the eight are read
    ("sglang::outplace_fused_experts", ((B16, 1, 64), UP, DOWN, (F32, 1, 2), (I32, 1, 2)), "matmul",
     128 + 2 * 2 * (32 * 64 + 64 * 16) + 16, 128, 2 * 2 * (32 * 64 + 64 * 16)),
    ("aten::_grouped_mm", ((B16, 32, 64), (B16, 8, 64, 16), (I32, 8)), "matmul",
     2 * (2048 + 8192), 2 * 512, 2 * 512 * 64),
    ("aten::_grouped_mm", ((B16, 64, 32), (B16, 32, 16), (I32, 8)), "matmul",  # the gradient of the matrices
     2 * (2048 + 512), 2 * 8 * 64 * 16, 2 * 64 * 16 * 32),
    ("aten::_scaled_grouped_mm", ((F8, 32, 64), (F8, 8, 64, 16), (F32, 32), (F32, 8, 16), (I32, 8)), "matmul",
     2048 + 8192, 2 * 512, 2 * 512 * 64),
    ("_C::cutlass_scaled_mm", ((B16, 32, 16), (F8, 32, 64), (F8, 64, 16), (F32, 32, 1), (F32, 1, 16)), "matmul",
     2048 + 1024 + 128 + 64, 1024, 2 * 512 * 64),
    ("fbgemm::f8f8bf16_rowwise", ((F8, 32, 64), (F8, 16, 64), (F32, 32), (F32, 16)), "matmul",
     2048 + 1024 + 128 + 64, 1024, 2 * 512 * 64),
    ("aten::_weight_int4pack_mm", ((B16, 1, 64), (I32, 2, 4, 32, 2), 32, (B16, 2, 16, 2)), "matmul",
     128 + 4 * 512 + 128, 32, 2 * 16 * 64),
    ("_C::paged_attention_v1", ((B16, 1, 8, 64), (B16, 1, 8, 64), (B16, 90, 2, 8, 16, 8), (B16, 90, 2, 64, 16), 2, 0.1,
                                (I32, 1, 40), (I32, 1), 16, 600), "attention",
     1024 + 2 * 2 * 2 * 600 * 64, 1024, 4 * 8 * 600 * 64),
    ("_C_custom_ar::all_reduce", (7, HIDDEN, HIDDEN, 0, 4096), "communication", 4096, 4096, 0),
)  # fmt: skip


@pytest.mark.parametrize(("op", "given", "family", "read", "written", "flops"), COSTS, ids=[row[0] for row in COSTS])
def test_costs_by_hand(op: str, given: tuple[Any, ...], family: str, read: int, written: int, flops: float) -> None:
    found = cost_of(op, arguments(*given))
    assert found is not None
    assert found.family == family and family in FAMILIES
    assert (found.cost.read_bytes, found.cost.write_bytes, found.cost.total_flops) == (read, written, flops)


def test_a_batch_of_unknown_lengths_has_no_cost() -> None:
    q, cache = (B16, 4, 8, 64), (B16, 90, 2, 64, 16)
    given = (q, q, cache, cache, 2, 0.1, (I32, 4, 40), (I32, 4), 16, 600)
    assert cost_of("_C::paged_attention_v1", arguments(*given)) is None
    assert family_of("_C::paged_attention_v1") == "attention"


def test_experts_of_8_bits_are_held_against_the_rate_of_8_bits() -> None:
    up, down = (F8, *UP[1:]), (F8, *DOWN[1:])
    found = cost_of("vllm::inplace_fused_experts", arguments(HIDDEN, up, down, WEIGHTS, CHOSEN))
    assert found is not None and set(found.cost.flops) == {"matmul_fp8"}
