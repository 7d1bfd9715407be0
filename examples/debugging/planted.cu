// Four mistakes, one for each tool of compute-sanitizer. A block of 64 threads.

// memcheck: one thread too many, for x and y have 32 elements.
extern "C" __global__ void out_of_bounds(const float* x, float* y) {
    if (threadIdx.x <= 32) y[threadIdx.x] = 2 * x[threadIdx.x];  // planted: <= for <
}

// racecheck: a thread reads what another has not yet written.
extern "C" __global__ void missing_barrier(const float* x, float* y) {
    __shared__ float held[64];
    held[threadIdx.x] = x[threadIdx.x % 32];
    y[threadIdx.x % 32] = held[63 - threadIdx.x];  // planted: no __syncthreads() before it
}

// initcheck: memory that nobody has written.
extern "C" __global__ void never_written(const float* x, float* y) {
    if (threadIdx.x < 32) y[threadIdx.x] = x[threadIdx.x] + 1;  // planted: x comes from cuMemAlloc as it is
}

// synccheck: half of a warp waits at a barrier that the other half does not come to.
extern "C" __global__ void divided_barrier(const float* x, float* y) {
    if (threadIdx.x % 32 < 16) __syncthreads();  // planted
    y[threadIdx.x % 32] = x[threadIdx.x % 32];
}
