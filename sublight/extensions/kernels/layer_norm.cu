// y = (x - mean) / sqrt(variance + eps) * weight + bias, row by row; the steps of softmax.cu.
// The variance is the mean of squared distances from the mean, never mean(x^2) - mean^2, which cancels.
#include "block.cuh"

extern "C" __global__ void __launch_bounds__(1024) layer_norm_three_reads(
    const float* x, const float* weight, const float* bias, float* y, long long cols, float eps) {
    x += blockIdx.x * cols, y += blockIdx.x * cols;
    float sum = 0.0f, squares = 0.0f;
    for (long long i = threadIdx.x; i < cols; i += blockDim.x) sum += x[i];
    float mean = block_sum(sum) / cols;
    for (long long i = threadIdx.x; i < cols; i += blockDim.x) squares += (x[i] - mean) * (x[i] - mean);
    float scale = rsqrtf(block_sum(squares) / cols + eps);
    for (long long i = threadIdx.x; i < cols; i += blockDim.x) y[i] = (x[i] - mean) * scale * weight[i] + bias[i];
}

__device__ float4 normed(float4 x, float mean, float scale, float4 weight, float4 bias) {
    return make_float4((x.x - mean) * scale * weight.x + bias.x, (x.y - mean) * scale * weight.y + bias.y,
                       (x.z - mean) * scale * weight.z + bias.z, (x.w - mean) * scale * weight.w + bias.w);
}

__device__ float distance(float4 x, float mean) {
    float a = x.x - mean, b = x.y - mean, c = x.z - mean, d = x.w - mean;
    return (a * a + b * b) + (c * c + d * d);
}

template <int PACKS>
__device__ void registers(const float* x, const float* weight, const float* bias, float* y, long long cols, float eps) {
    const float4* from = reinterpret_cast<const float4*>(x + blockIdx.x * cols);
    float4* to = reinterpret_cast<float4*>(y + blockIdx.x * cols);
    long long packs = cols / 4;
    float4 held[PACKS];
    float sum = 0.0f, squares = 0.0f;
#pragma unroll
    for (int j = 0; j < PACKS; ++j) {
        long long i = threadIdx.x + j * (long long)blockDim.x;
        held[j] = i < packs ? from[i] : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    }
#pragma unroll
    for (int j = 0; j < PACKS; ++j) sum += (held[j].x + held[j].y) + (held[j].z + held[j].w);
    float mean = block_sum(sum) / cols;
#pragma unroll
    for (int j = 0; j < PACKS; ++j)
        if (threadIdx.x + j * (long long)blockDim.x < packs) squares += distance(held[j], mean);
    float scale = rsqrtf(block_sum(squares) / cols + eps);
#pragma unroll
    for (int j = 0; j < PACKS; ++j) {
        long long i = threadIdx.x + j * (long long)blockDim.x;
        if (i < packs)
            to[i] = normed(held[j], mean, scale, reinterpret_cast<const float4*>(weight)[i],
                           reinterpret_cast<const float4*>(bias)[i]);
    }
}
#define REGISTERS(PACKS)                                                                                   \
    extern "C" __global__ void __launch_bounds__(1024) layer_norm_registers_##PACKS(                       \
        const float* x, const float* weight, const float* bias, float* y, long long cols, float eps) {     \
        registers<PACKS>(x, weight, bias, y, cols, eps);                                                   \
    }
REGISTERS(1)
REGISTERS(2)
REGISTERS(4)
REGISTERS(8)

// As softmax_cooperative; a part leaves its count, mean and sum of squared distances from its own mean, and parts are
// merged by Chan's formula: the squares of a whole are the parts' and what the parts' means are apart.
struct Moments { float count, mean, squares; };

__device__ Moments merged(Moments a, Moments b) {
    float count = a.count + b.count;
    if (count == 0.0f) return a;
    float apart = b.mean - a.mean;
    return {count, a.mean + apart * (b.count / count), a.squares + b.squares + apart * apart * (a.count * b.count / count)};
}

extern "C" __global__ void __launch_bounds__(512) layer_norm_cooperative(
    const float* x, const float* weight, const float* bias, float* y, Moments* partials, long long rows, long long cols,
    long long parts, float eps) {
    long long part = blockIdx.x % parts, groups = gridDim.x / parts, packs = cols / 4;
    long long begin = packs * part / parts, end = packs * (part + 1) / parts;
    for (long long first = 0; first < rows; first += groups) {
        long long row = first + blockIdx.x / parts;
        const float4* from = reinterpret_cast<const float4*>(x + row * cols);
        if (row < rows && begin < end) {
            float sum = 0.0f, squares = 0.0f, count = 4.0f * (end - begin);
            for (long long i = begin + threadIdx.x; i < end; i += blockDim.x)
                sum += (from[i].x + from[i].y) + (from[i].z + from[i].w);
            float mean = block_sum(sum) / count;
            for (long long i = begin + threadIdx.x; i < end; i += blockDim.x) squares += distance(from[i], mean);
            squares = block_sum(squares);
            if (threadIdx.x == 0) partials[row * parts + part] = {count, mean, squares};
        } else if (row < rows && threadIdx.x == 0) {
            partials[row * parts + part] = {0.0f, 0.0f, 0.0f};
        }
        grid_sync();
        if (row < rows) {
            Moments whole = {0.0f, 0.0f, 0.0f};  // parts are few: each thread merges all of them, in the same order
            for (long long i = 0; i < parts; ++i) whole = merged(whole, partials[row * parts + i]);
            float scale = rsqrtf(whole.squares / cols + eps);
            float4* to = reinterpret_cast<float4*>(y + row * cols);
            for (long long i = begin + threadIdx.x; i < end; i += blockDim.x)
                to[i] = normed(from[i], whole.mean, scale, reinterpret_cast<const float4*>(weight)[i],
                               reinterpret_cast<const float4*>(bias)[i]);
        }
    }
}
