// Host memory that is mapped into the GPU's addresses: a kernel reads it over the bus, with no copy before.

extern "C" __global__ void read_all(const float4* x, float* out, long long count) {
    float total = 0;
    long long step = static_cast<long long>(gridDim.x) * blockDim.x;
    for (long long i = blockIdx.x * static_cast<long long>(blockDim.x) + threadIdx.x; i < count; i += step) {
        float4 four = x[i];
        total += four.x + four.y + four.z + four.w;
    }
    if (total == -1.0f) *out = total;
}

// One sector of 32 bytes in `every`: what a kernel reads that needs little of much.
extern "C" __global__ void read_some(const float4* x, float* out, long long count, long long every) {
    float total = 0;
    long long step = static_cast<long long>(gridDim.x) * blockDim.x;
    for (long long i = blockIdx.x * static_cast<long long>(blockDim.x) + threadIdx.x; 2 * i * every < count; i += step)
        total += x[2 * i * every].x;
    if (total == -1.0f) *out = total;
}
