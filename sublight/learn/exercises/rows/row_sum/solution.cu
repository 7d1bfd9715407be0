// The sum of each row: a block has a row; parts are added in shared memory, with a barrier before each step.

__global__ void row_sum_kernel(const float* x, float* out, int cols) {
    __shared__ float part[256];
    const float* row = x + blockIdx.x * cols;
    float sum = 0.0f;
    for (int col = threadIdx.x; col < cols; col += blockDim.x) sum += row[col];
    part[threadIdx.x] = sum;
    for (int half = blockDim.x / 2; half > 0; half /= 2) {
        __syncthreads();
        if (threadIdx.x < half) part[threadIdx.x] += part[threadIdx.x + half];
    }
    if (threadIdx.x == 0) out[blockIdx.x] = part[0];
}

void row_sum(const float* x, float* out, int rows, int cols) {
    row_sum_kernel<<<rows, 256>>>(x, out, cols);
}
