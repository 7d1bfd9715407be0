// out = x * y + z, in two kernels. It is right, and moves more than it must.

__global__ void multiply_kernel(const float* x, const float* y, float* out, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) out[i] = x[i] * y[i];
}

__global__ void add_kernel(const float* z, float* out, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) out[i] = out[i] + z[i];
}

void multiply_add(const float* x, const float* y, const float* z, float* out, int n) {
    int threads = 256;
    int blocks = (n + threads - 1) / threads;
    // TODO: one kernel, so that the product never leaves the chip
    multiply_kernel<<<blocks, threads>>>(x, y, out, n);
    add_kernel<<<blocks, threads>>>(z, out, n);
}
