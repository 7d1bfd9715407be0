// The same sum, with one access in flight a thread or with four; how many blocks a multiprocessor holds is set from
// outside, by shared memory that nothing uses.

extern "C" __global__ void one_in_flight(const float* x, float* out, long long count) {
    float total = 0;
    long long step = static_cast<long long>(gridDim.x) * blockDim.x;
    #pragma unroll 1
    for (long long i = blockIdx.x * static_cast<long long>(blockDim.x) + threadIdx.x; i < count; i += step) total += x[i];
    if (total == -1.0f) *out = total;
}

extern "C" __global__ void four_in_flight(const float* x, float* out, long long count) {
    float total = 0;
    long long step = static_cast<long long>(gridDim.x) * blockDim.x;
    #pragma unroll 1
    for (long long i = blockIdx.x * static_cast<long long>(blockDim.x) + threadIdx.x; i + 3 * step < count; i += 4 * step) {
        float a = x[i], b = x[i + step], c = x[i + 2 * step], d = x[i + 3 * step];
        total += (a + b) + (c + d);
    }
    if (total == -1.0f) *out = total;
}
