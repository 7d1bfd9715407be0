// What stands before a tile, without a second launch: each tile shows its own sum as soon as it has it, and its sum with
// all before it as soon as it has that; a warp looks back over 32 tiles at a time until it meets one that has both.
// One word holds flag and sum, so that whoever reads the flag has the sum with it.
#pragma once
#include "block.cuh"

constexpr unsigned long long OWN = 1ull << 32, WHOLE = 2ull << 32;

// Tiles are numbered in the order in which blocks begin: a tile waits only for tiles whose blocks run already.
__device__ unsigned next_tile(unsigned long long* ticket) {
    __shared__ unsigned tile;
    if (threadIdx.x == 0) tile = static_cast<unsigned>(atomicAdd(ticket, 1ull));
    __syncthreads();
    return tile;
}

// The sum of all tiles before this one, in every thread; `sum` is this tile's. `shown` has a word a tile, zero before.
__device__ unsigned before_tile(unsigned long long* shown, long long tile, unsigned sum) {
    __shared__ unsigned before;
    if (threadIdx.x < 32) {
        int lane = threadIdx.x;
        if (lane == 0) store_release(shown + tile, (tile ? OWN : WHOLE) | sum);
        unsigned total = 0;
        for (long long last = tile - 1; last >= 0; last -= 32) {
            long long mine = last - lane;  // lane 0 looks at the nearest tile
            unsigned long long word = WHOLE;  // before the first tile there is nothing
            if (mine >= 0)
                do word = load_acquire(shown + mine);
                while (word < OWN);
            unsigned whole = __ballot_sync(ALL_LANES, word >= WHOLE);
            int nearest = whole ? __ffs(whole) - 1 : 31;  // no lane beyond the nearest whole sum counts
            total += warp_sum(lane <= nearest ? static_cast<unsigned>(word) : 0u);
            if (whole) break;
        }
        if (lane == 0) {
            if (tile) store_release(shown + tile, WHOLE | (total + sum));
            before = total;
        }
    }
    __syncthreads();
    return before;
}

// Inclusive, within a warp.
template <class T>
__device__ T warp_scan(T value) {
    for (int by = 1; by < 32; by *= 2) {
        T other = __shfl_up_sync(ALL_LANES, value, by);
        if (threadIdx.x % 32 >= by) value += other;
    }
    return value;
}

// Inclusive, within a block; `total` becomes the block's sum.
template <class T>
__device__ T block_scan(T value, T& total) {
    __shared__ T sums[32];
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = blockDim.x / 32;
    value = warp_scan(value);
    if (lane == 31) sums[warp] = value;
    __syncthreads();
    T upto = warp_scan(lane < warps ? sums[lane] : T(0));  // every warp for itself: no second barrier for the result
    total = __shfl_sync(ALL_LANES, upto, warps - 1);
    T before = __shfl_sync(ALL_LANES, upto, warp ? warp - 1 : 0);
    __syncthreads();
    return value + (warp ? before : T(0));
}
