// A table too large for one block's shared memory: four blocks of a cluster hold a quarter each and read one another's.
#include <cooperative_groups.h>

constexpr int BLOCKS = 4;
constexpr int PART = 24 * 1024;  // floats that a block holds: 96 KiB
constexpr int LOOKUPS = 1024;

struct Random {
    unsigned state;
    __device__ Random() : state((blockIdx.x * blockDim.x + threadIdx.x) * 2654435761u + 1) {}
    __device__ unsigned below(unsigned limit) {
        state = state * 1664525u + 1013904223u;
        return __umulhi(state, limit);
    }
};

extern "C" __global__ void lookup_global(const float* table, float* out) {
    Random random;
    float total = 0;
    #pragma unroll 8
    for (int i = 0; i < LOOKUPS; ++i) total += table[random.below(BLOCKS * PART)];
    if (total == -1.0f) *out = total;
}

// The quarter that a block itself holds: how fast shared memory would be, were it large enough.
extern "C" __global__ void lookup_own(const float* table, float* out) {
    extern __shared__ float held[];
    for (int i = threadIdx.x; i < PART; i += blockDim.x) held[i] = table[i];
    __syncthreads();
    Random random;
    float total = 0;
    #pragma unroll 8
    for (int i = 0; i < LOOKUPS; ++i) total += held[random.below(PART)];
    if (total == -1.0f) *out = total;
}

// Clusters are of sm_90 and later; for others the kernel is empty, and is not launched.
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
#define CLUSTER __cluster_dims__(BLOCKS, 1, 1)
#else
#define CLUSTER
#endif

extern "C" __global__ void CLUSTER lookup_cluster(const float* table, float* out) {
#if __CUDA_ARCH__ >= 900
    extern __shared__ float held[];
    auto cluster = cooperative_groups::this_cluster();
    const float* mine = table + cluster.block_rank() * PART;
    for (int i = threadIdx.x; i < PART; i += blockDim.x) held[i] = mine[i];
    cluster.sync();
    Random random;
    float total = 0;
    #pragma unroll 8
    for (int i = 0; i < LOOKUPS; ++i) {
        unsigned place = random.below(BLOCKS * PART);
        total += cluster.map_shared_rank(held, place / PART)[place % PART];
    }
    if (total == -1.0f) *out = total;
    cluster.sync();  // a block's shared memory is gone when it ends: none ends while others may read it
#endif
}
