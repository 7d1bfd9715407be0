// Sums within a warp and within a block, which several ladders end with.
#pragma once
#include "device.cuh"

constexpr unsigned ALL_LANES = 0xffffffffu;

template <class T>
struct __align__(16) Pack {  // one access of 16 bytes
    T at[16 / sizeof(T)];
};

// In every lane: each step exchanges with the lane whose number differs in one bit, and no memory is touched.
template <class T>
__device__ T warp_sum(T value) {
    for (int by = 16; by; by /= 2) value += __shfl_xor_sync(ALL_LANES, value, by);
    return value;
}

__device__ float warp_max(float value) {
    for (int by = 16; by; by /= 2) value = fmaxf(value, __shfl_xor_sync(ALL_LANES, value, by));
    return value;
}

// In every thread. Shuffles within each warp, 32 words of shared memory across them, shuffles again.
template <class T>
__device__ T block_sum(T value) {
    __shared__ T partial[32];
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = blockDim.x / 32;
    value = warp_sum(value);
    if (lane == 0) partial[warp] = value;
    __syncthreads();
    value = warp_sum(lane < warps ? partial[lane] : T(0));
    __syncthreads();  // so that the next call may write partial again
    return value;
}

__device__ float block_max(float value) {
    __shared__ float partial[32];
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = blockDim.x / 32;
    value = warp_max(value);
    if (lane == 0) partial[warp] = value;
    __syncthreads();
    value = warp_max(lane < warps ? partial[lane] : -INFINITY);
    __syncthreads();
    return value;
}
