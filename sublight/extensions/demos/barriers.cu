// What it costs to wait for one another: lanes of a warp, threads of a block, blocks of the grid.
#include <cooperative_groups.h>

extern "C" __global__ void warp_barriers(long long* cycles, long long rounds) {
    long long start = clock64();
    for (long long i = 0; i < rounds; ++i) __syncwarp();
    if (threadIdx.x == 0 && blockIdx.x == 0) *cycles = clock64() - start;
}

extern "C" __global__ void block_barriers(long long* cycles, long long rounds) {
    long long start = clock64();
    for (long long i = 0; i < rounds; ++i) __syncthreads();
    if (threadIdx.x == 0 && blockIdx.x == 0) *cycles = clock64() - start;
}

extern "C" __global__ void grid_barriers(long long* cycles, long long rounds) {
    long long start = clock64();
    for (long long i = 0; i < rounds; ++i) cooperative_groups::this_grid().sync();
    if (threadIdx.x == 0 && blockIdx.x == 0) *cycles = clock64() - start;
}

// Every block adds one to its own count and shows it; after a barrier each looks at its neighbour's. How often that
// was not there yet is what a barrier of the block does not prevent.
extern "C" __global__ void neighbours_seen(long long* counts, unsigned long long* late, long long rounds, long long grid) {
    for (long long i = 1; i <= rounds; ++i) {
        if (threadIdx.x == 0) atomicExch(reinterpret_cast<unsigned long long*>(counts + blockIdx.x), i);
        if (grid) cooperative_groups::this_grid().sync();
        else __syncthreads();
        if (threadIdx.x == 0) {
            long long seen = atomicAdd(reinterpret_cast<unsigned long long*>(counts + (blockIdx.x + 1) % gridDim.x), 0ull);
            if (seen < i) atomicAdd(late, 1ull);
        }
    }
}

extern "C" __global__ void nothing() {}
