// The sum of n numbers, six steps from one atomic a number to one pass at the speed of memory.
// `out` is zero before all steps but the last.
#include "block.cuh"

constexpr int THREADS = 256;

template <class T>
__device__ void atomics(const T* x, T* out, long long n) {
    long long i = blockIdx.x * (long long)THREADS + threadIdx.x;
    if (i < n) atomicAdd(out, x[i]);
}

template <class T>
__device__ void shared(const T* x, T* out, long long n) {
    __shared__ T tile[THREADS];
    long long i = blockIdx.x * (long long)THREADS + threadIdx.x;
    tile[threadIdx.x] = i < n ? x[i] : T(0);
    __syncthreads();
    for (int half = THREADS / 2; half; half /= 2) {
        if (threadIdx.x < half) tile[threadIdx.x] += tile[threadIdx.x + half];
        __syncthreads();
    }
    if (threadIdx.x == 0) atomicAdd(out, tile[0]);
}

template <class T>
__device__ void shuffle(const T* x, T* out, long long n) {
    long long i = blockIdx.x * (long long)THREADS + threadIdx.x;
    T sum = warp_sum(i < n ? x[i] : T(0));
    if (threadIdx.x % 32 == 0) atomicAdd(out, sum);
}

template <class T>
__device__ void two_level(const T* x, T* out, long long n) {
    long long i = blockIdx.x * (long long)THREADS + threadIdx.x;
    T sum = block_sum(i < n ? x[i] : T(0));
    if (threadIdx.x == 0) atomicAdd(out, sum);
}

// What one thread reads: packs of 16 bytes, four at a time before the first is used, then what four do not divide.
template <class T>
__device__ T thread_sum(const T* x, long long n) {
    constexpr int WIDTH = 16 / sizeof(T), AHEAD = 4;
    const Pack<T>* packs = reinterpret_cast<const Pack<T>*>(x);
    long long count = n / WIDTH, stride = (long long)gridDim.x * blockDim.x;
    long long i = blockIdx.x * (long long)blockDim.x + threadIdx.x;
    T sums[AHEAD] = {};
    for (; i + (AHEAD - 1) * stride < count; i += AHEAD * stride) {
        Pack<T> held[AHEAD];
#pragma unroll
        for (int j = 0; j < AHEAD; ++j) held[j] = packs[i + j * stride];
#pragma unroll
        for (int j = 0; j < AHEAD; ++j)
#pragma unroll
            for (int k = 0; k < WIDTH; ++k) sums[j] += held[j].at[k];
    }
    for (; i < count; i += stride)
        for (int k = 0; k < WIDTH; ++k) sums[0] += packs[i].at[k];
    long long last = count * WIDTH + blockIdx.x * (long long)blockDim.x + threadIdx.x;
    if (last < n) sums[1] += x[last];  // fewer than WIDTH: the first threads take one each
    return (sums[0] + sums[1]) + (sums[2] + sums[3]);
}

template <class T>
__device__ void vectorised(const T* x, T* out, long long n) {
    T sum = block_sum(thread_sum(x, n));
    if (threadIdx.x == 0) atomicAdd(out, sum);
}

template <class T>
__device__ void cooperative(const T* x, T* out, T* partial, long long n) {
    T sum = block_sum(thread_sum(x, n));
    if (threadIdx.x == 0) partial[blockIdx.x] = sum;
    grid_sync();
    if (blockIdx.x) return;
    T total = T(0);
    for (int i = threadIdx.x; i < gridDim.x; i += blockDim.x) total += partial[i];
    total = block_sum(total);
    if (threadIdx.x == 0) *out = total;
}

#define STEP(name, T) \
    extern "C" __global__ void __launch_bounds__(512) reduce_##name##_##T(const T* x, T* out, long long n) { name<T>(x, out, n); }
#define STEPS(T)                                                                                                    \
    STEP(atomics, T)                                                                                                \
    STEP(shared, T)                                                                                                 \
    STEP(shuffle, T)                                                                                                \
    STEP(two_level, T)                                                                                              \
    STEP(vectorised, T)                                                                                             \
    extern "C" __global__ void __launch_bounds__(512) reduce_cooperative_##T(const T* x, T* out, T* partial, long long n) { \
        cooperative<T>(x, out, partial, n);                                                                         \
    }
STEPS(float)
STEPS(double)
