// A table too large for one block's shared memory: four blocks of a cluster hold a quarter each and read one another's.
#include <cooperative_groups.h>

constexpr int BLOCKS = 4;
constexpr int PART = 24 * 1024;  // floats that a block holds: 96 KiB
constexpr int LOOKUPS = 1024;

// Places below a limit that look random: of each lane its own, or of a warp 32 neighbours.
struct Places {
    unsigned state, lane;
    bool together;
    __device__ Places(long long neighbours) : lane(threadIdx.x % 32), together(neighbours) {
        unsigned thread = blockIdx.x * blockDim.x + threadIdx.x;
        state = (together ? thread / 32 : thread) * 2654435761u + 1;
    }
    __device__ unsigned below(unsigned limit) {
        state = state * 1664525u + 1013904223u;
        return together ? 32 * __umulhi(state, limit / 32) + lane : __umulhi(state, limit);
    }
};

extern "C" __global__ void lookup_global(const float* table, float* out, long long neighbours) {
    Places places(neighbours);
    float total = 0;
    #pragma unroll 8
    for (int i = 0; i < LOOKUPS; ++i) total += table[places.below(BLOCKS * PART)];
    if (total == -1.0f) *out = total;
}

// The quarter that a block itself holds: how fast shared memory would be, were it large enough.
extern "C" __global__ void lookup_own(const float* table, float* out, long long neighbours) {
    extern __shared__ float held[];
    for (int i = threadIdx.x; i < PART; i += blockDim.x) held[i] = table[i];
    __syncthreads();
    Places places(neighbours);
    float total = 0;
    #pragma unroll 8
    for (int i = 0; i < LOOKUPS; ++i) total += held[places.below(PART)];
    if (total == -1.0f) *out = total;
}

// Clusters are of sm_90 and later; for others the kernel is empty, and is not launched.
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
#define CLUSTER __cluster_dims__(BLOCKS, 1, 1)
#else
#define CLUSTER
#endif

extern "C" __global__ void CLUSTER lookup_cluster(const float* table, float* out, long long neighbours) {
#if __CUDA_ARCH__ >= 900
    extern __shared__ float held[];
    auto cluster = cooperative_groups::this_cluster();
    const float* mine = table + cluster.block_rank() * PART;
    for (int i = threadIdx.x; i < PART; i += blockDim.x) held[i] = mine[i];
    cluster.sync();
    Places places(neighbours);
    float total = 0;
    #pragma unroll 8
    for (int i = 0; i < LOOKUPS; ++i) {
        unsigned place = places.below(BLOCKS * PART);
        total += cluster.map_shared_rank(held, place / PART)[place % PART];
    }
    if (total == -1.0f) *out = total;
    cluster.sync();  // a block's shared memory is gone when it ends: none ends while others may read it
#endif
}
