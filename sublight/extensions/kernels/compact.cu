// The elements whose mask is true, one after the other, and how many they are: who decides where each one goes?
#include "lookback.cuh"

constexpr int THREADS = 256;

// Each kept element asks one counter for its place. The order is lost.
extern "C" __global__ void compact_atomics(const float* x, const bool* mask, float* y, unsigned long long* count, long long n) {
    long long i = blockIdx.x * (long long)THREADS + threadIdx.x;
    if (i < n && mask[i]) y[atomicAdd(count, 1ull)] = x[i];
}

// A warp asks once for all its kept elements: a ballot says how many, and how many stand before each.
extern "C" __global__ void compact_ballot(const float* x, const bool* mask, float* y, unsigned long long* count, long long n) {
    long long i = blockIdx.x * (long long)THREADS + threadIdx.x;
    int lane = threadIdx.x % 32;
    bool kept = i < n && mask[i];
    unsigned keepers = __ballot_sync(ALL_LANES, kept);
    unsigned long long first = 0;
    if (lane == 0 && keepers) first = atomicAdd(count, (unsigned long long)__popc(keepers));
    first = __shfl_sync(ALL_LANES, first, 0);
    if (kept) y[first + __popc(keepers & ((1u << lane) - 1))] = x[i];
}

// The order stays: a scan over the mask gives each kept element its place. 16 elements a thread, gathered in shared
// memory first, so that neighbours are written by neighbours. n is a multiple of 16.
extern "C" __global__ void __launch_bounds__(256)
    compact_lookback(const float* x, const bool* mask, float* y, unsigned long long* count, unsigned long long* shown,
                     unsigned long long* ticket, long long n) {
    constexpr int ITEMS = 16, TILE = THREADS * ITEMS;
    __shared__ float kept[TILE];
    long long tile = next_tile(ticket), first = tile * TILE + threadIdx.x * ITEMS;
    Pack<unsigned char> bits = {};
    if (first < n) bits = *reinterpret_cast<const Pack<unsigned char>*>(mask + first);
    unsigned own = 0, total;
#pragma unroll
    for (int j = 0; j < ITEMS; ++j) own += bits.at[j] != 0;
    unsigned at = block_scan(own, total) - own;
#pragma unroll
    for (int j = 0; j < ITEMS; j += 4) {
        if (first >= n) break;
        float4 four = *reinterpret_cast<const float4*>(x + first + j);
        if (bits.at[j]) kept[at++] = four.x;
        if (bits.at[j + 1]) kept[at++] = four.y;
        if (bits.at[j + 2]) kept[at++] = four.z;
        if (bits.at[j + 3]) kept[at++] = four.w;
    }
    unsigned before = before_tile(shown, tile, total);  // its barrier also makes `kept` whole
    for (unsigned i = threadIdx.x; i < total; i += THREADS) y[(long long)before + i] = kept[i];
    if (tile == gridDim.x - 1 && threadIdx.x == 0) *count = (unsigned long long)before + total;
}
