// y = exp(x - max) / sum, row by row. The row is read three times, twice, once; then one long row by many blocks.
#include "block.cuh"

struct Partial { float max, sum; };  // of a part of a row: its largest x, and the sum of exp(x - max)

__device__ Partial merged(Partial a, Partial b) {
    float top = fmaxf(a.max, b.max);
    if (top == -INFINITY) return {top, 0.0f};  // nothing yet: -inf - -inf would be NaN
    return {top, a.sum * expf(a.max - top) + b.sum * expf(b.max - top)};
}

extern "C" __global__ void __launch_bounds__(1024) softmax_three_reads(const float* x, float* y, long long cols) {
    x += blockIdx.x * cols, y += blockIdx.x * cols;
    float top = -INFINITY, sum = 0.0f;
    for (long long i = threadIdx.x; i < cols; i += blockDim.x) top = fmaxf(top, x[i]);
    top = block_max(top);
    for (long long i = threadIdx.x; i < cols; i += blockDim.x) sum += expf(x[i] - top);
    sum = block_sum(sum);
    for (long long i = threadIdx.x; i < cols; i += blockDim.x) y[i] = expf(x[i] - top) / sum;
}

__device__ Partial block_partial(Partial mine) {
    float top = block_max(mine.max);
    return {top, block_sum(top == -INFINITY ? 0.0f : mine.sum * expf(mine.max - top))};
}

extern "C" __global__ void __launch_bounds__(1024) softmax_online(const float* x, float* y, long long cols) {
    x += blockIdx.x * cols, y += blockIdx.x * cols;
    Partial mine = {-INFINITY, 0.0f};
    for (long long i = threadIdx.x; i < cols; i += blockDim.x) mine = merged(mine, {x[i], 1.0f});
    Partial row = block_partial(mine);
    for (long long i = threadIdx.x; i < cols; i += blockDim.x) y[i] = expf(x[i] - row.max) / row.sum;
}

// The whole row lies in the block's registers, PACKS x 16 bytes a thread; cols is a multiple of 4.
template <int PACKS>
__device__ void registers(const float* x, float* y, long long cols) {
    const float4* from = reinterpret_cast<const float4*>(x + blockIdx.x * cols);
    float4* to = reinterpret_cast<float4*>(y + blockIdx.x * cols);
    long long packs = cols / 4;
    float4 held[PACKS];
    float top = -INFINITY, sum = 0.0f;
#pragma unroll
    for (int j = 0; j < PACKS; ++j) {
        long long i = threadIdx.x + j * (long long)blockDim.x;
        held[j] = i < packs ? from[i] : make_float4(-INFINITY, -INFINITY, -INFINITY, -INFINITY);
    }
#pragma unroll
    for (int j = 0; j < PACKS; ++j)
        top = fmaxf(fmaxf(top, fmaxf(held[j].x, held[j].y)), fmaxf(held[j].z, held[j].w));
    top = block_max(top);
#pragma unroll
    for (int j = 0; j < PACKS; ++j) {
        held[j] = make_float4(expf(held[j].x - top), expf(held[j].y - top), expf(held[j].z - top), expf(held[j].w - top));
        sum += (held[j].x + held[j].y) + (held[j].z + held[j].w);
    }
    sum = block_sum(sum);
#pragma unroll
    for (int j = 0; j < PACKS; ++j) {
        long long i = threadIdx.x + j * (long long)blockDim.x;
        if (i < packs) to[i] = make_float4(held[j].x / sum, held[j].y / sum, held[j].z / sum, held[j].w / sum);
    }
}
#define REGISTERS(PACKS)                                                                                             \
    extern "C" __global__ void __launch_bounds__(1024) softmax_registers_##PACKS(const float* x, float* y, long long cols) { \
        registers<PACKS>(x, y, cols);                                                                                \
    }
REGISTERS(1)
REGISTERS(2)
REGISTERS(4)
REGISTERS(8)

// `parts` blocks share a row, and the grid holds as many rows at a time as it has groups of `parts`. Each block leaves
// its part's maximum and sum; past the barrier every block merges those of its row. cols is a multiple of 4.
extern "C" __global__ void __launch_bounds__(512)
    softmax_cooperative(const float* x, float* y, Partial* partials, long long rows, long long cols, long long parts) {
    long long part = blockIdx.x % parts, groups = gridDim.x / parts, packs = cols / 4;
    long long begin = packs * part / parts, end = packs * (part + 1) / parts;
    for (long long first = 0; first < rows; first += groups) {  // as many turns for every block: all meet at the barrier
        long long row = first + blockIdx.x / parts;
        const float4* from = reinterpret_cast<const float4*>(x + row * cols);
        if (row < rows) {
            Partial mine = {-INFINITY, 0.0f};
            for (long long i = begin + threadIdx.x; i < end; i += blockDim.x) {
                float4 four = from[i];
                float top = fmaxf(fmaxf(four.x, four.y), fmaxf(four.z, four.w));
                if (top > -INFINITY)
                    mine = merged(mine, {top, (expf(four.x - top) + expf(four.y - top)) + (expf(four.z - top) + expf(four.w - top))});
            }
            Partial own = block_partial(mine);
            if (threadIdx.x == 0) partials[row * parts + part] = own;
        }
        grid_sync();
        if (row < rows) {
            Partial mine = {-INFINITY, 0.0f};
            for (long long i = threadIdx.x; i < parts; i += blockDim.x) mine = merged(mine, partials[row * parts + i]);
            Partial whole = block_partial(mine);
            float4* to = reinterpret_cast<float4*>(y + row * cols);
            for (long long i = begin + threadIdx.x; i < end; i += blockDim.x) {
                float4 four = from[i];
                to[i] = make_float4(expf(four.x - whole.max) / whole.sum, expf(four.y - whole.max) / whole.sum,
                                    expf(four.z - whole.max) / whole.sum, expf(four.w - whole.max) / whole.sum);
            }
        }
    }
}
