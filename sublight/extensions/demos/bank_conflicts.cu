// A warp's read of shared memory, lanes `stride` apart: how many turns do the 32 banks take?

constexpr int WORDS = 4096;
constexpr int AT_ONCE = 16;

// The instruction itself, volatile twice: for nvcc, and for ptxas, which would move the same load out of the loop.
__device__ float load(unsigned address, float) {
    float value;
    asm volatile("ld.volatile.shared.f32 %0, [%1];" : "=f"(value) : "r"(address));
    return value;
}
__device__ float load(unsigned address, float4) {
    float4 value;
    asm volatile("ld.volatile.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(value.x), "=f"(value.y), "=f"(value.z), "=f"(value.w) : "r"(address));
    return value.x + value.y + value.z + value.w;
}

template <typename T>
__device__ void read_strided(float* out, long long* cycles, int stride, int rounds) {
    __shared__ __align__(16) float held[WORDS];
    for (int i = threadIdx.x; i < WORDS; i += blockDim.x) held[i] = i;
    __syncthreads();
    unsigned first = static_cast<unsigned>(__cvta_generic_to_shared(held)) + threadIdx.x % 32 * stride * sizeof(T);
    float total = 0;
    long long start = clock64();
    for (int i = 0; i < rounds / AT_ONCE; ++i) {
        #pragma unroll
        for (int j = 0; j < AT_ONCE; ++j)  // the same step for all lanes leaves their banks' pattern as it is
            total += load(first + j * 32 * static_cast<unsigned>(sizeof(T)), T());
    }
    __syncthreads();
    if (threadIdx.x == 0) *cycles = clock64() - start;
    if (total == -1.0f) *out = total;
}

extern "C" __global__ void read_4(float* out, long long* cycles, long long stride, long long rounds) {
    read_strided<float>(out, cycles, stride, rounds);
}

extern "C" __global__ void read_16(float* out, long long* cycles, long long stride, long long rounds) {
    read_strided<float4>(out, cycles, stride, rounds);
}
