// A known share of tensor work, to hold GPM's counter against: on each SM bursts of products by wgmma, each burst back to
// back, then nothing until the period is over. The kernel counts its products and its cycles itself.
#include "../extensions/kernels/matmul_hopper.cu"

__device__ long long nanoseconds() {
    long long now;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
    return now;
}

// seen: of each block its products of 64 x 256 x 16, the SM's cycles, and nanoseconds. One block of 128 threads an SM.
extern "C" __global__ void __launch_bounds__(128, 1)
    tensor_duty(long long* seen, long long groups, long long period_cycles, long long run_ns) {
    constexpr int TOGETHER = 8;  // products of a group; the next is issued while one is under way
    __shared__ __align__(1024) unsigned char tiles[16 * 1024];
    __shared__ long long began;
    __shared__ int goes_on;
    for (int i = threadIdx.x; i < 4 * 1024; i += blockDim.x) reinterpret_cast<int*>(tiles)[i] = 0;
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    uint64_t left = tile_at(shared_address(tiles), 16, 1024), right = tile_at(shared_address(tiles) + 8 * 1024, 2048, 1024);
    float sums[128];
    long long products = 0, first = clock64(), first_ns = nanoseconds();
    for (;;) {
        __syncthreads();
        if (threadIdx.x == 0) began = clock64(), goes_on = nanoseconds() - first_ns < run_ns;
        __syncthreads();
        if (!goes_on) break;
        for (int group = 0; group < groups; ++group) {
            asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
            for (int i = 0; i < TOGETHER; ++i) wgmma(sums, left, right, group + i);
            asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
            asm volatile("wgmma.wait_group.sync.aligned 1;" ::: "memory");
        }
        asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
        products += groups * TOGETHER;
        while (clock64() - began < period_cycles) __nanosleep(100);
    }
    if (threadIdx.x == 0) {
        long long* mine = seen + 3 * blockIdx.x;
        mine[0] = products, mine[1] = clock64() - first, mine[2] = nanoseconds() - first_ns;
    }
    float total = 0;
    for (int i = 0; i < 128; ++i) total += sums[i];
    if (total != 0) seen[0] = -1;  // zeros by zeros: never, but so the products are needed
}
