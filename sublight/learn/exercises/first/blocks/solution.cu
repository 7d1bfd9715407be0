// Copy by as many blocks as the GPU holds at a time: every multiprocessor is full, and nobody waits for a second turn.

__global__ void blocks_kernel(const float* x, float* out, int n) {
    int step = gridDim.x * blockDim.x;
    for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += step) out[i] = x[i];
}

void blocks(const float* x, float* out, int n) {
    int count = 132 * 8;  // multiprocessors of an H200, blocks that each holds
    int threads = 256;
    blocks_kernel<<<count, threads>>>(x, out, n);
}
