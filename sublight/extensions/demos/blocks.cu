// Reading and copying with as many blocks as one likes: each thread walks over the input, 16 bytes an access.

extern "C" __global__ void read_by(const float4* x, float* out, long long count) {
    float total = 0;
    long long step = static_cast<long long>(gridDim.x) * blockDim.x;
    long long i = blockIdx.x * static_cast<long long>(blockDim.x) + threadIdx.x;
    for (; i + 3 * step < count; i += 4 * step) {
        float4 a = x[i], b = x[i + step], c = x[i + 2 * step], d = x[i + 3 * step];
        total += a.x + a.y + a.z + a.w + b.x + b.y + b.z + b.w + c.x + c.y + c.z + c.w + d.x + d.y + d.z + d.w;
    }
    for (; i < count; i += step) total += x[i].x + x[i].y + x[i].z + x[i].w;
    if (total == -1.0f) *out = total;
}

extern "C" __global__ void copy_by(const float4* x, float4* y, long long count) {
    long long step = static_cast<long long>(gridDim.x) * blockDim.x;
    long long i = blockIdx.x * static_cast<long long>(blockDim.x) + threadIdx.x;
    for (; i + 3 * step < count; i += 4 * step) {
        float4 a = x[i], b = x[i + step], c = x[i + 2 * step], d = x[i + 3 * step];
        y[i] = a, y[i + step] = b, y[i + 2 * step] = c, y[i + 3 * step] = d;
    }
    for (; i < count; i += step) y[i] = x[i];
}
