// Softmax of each row: a block has a row; the maximum and the sum each go through shared memory.

__device__ float largest_of_block(float mine) {
    __shared__ float part[256];
    part[threadIdx.x] = mine;
    for (int half = blockDim.x / 2; half > 0; half /= 2) {
        __syncthreads();
        if (threadIdx.x < half) part[threadIdx.x] = fmaxf(part[threadIdx.x], part[threadIdx.x + half]);
    }
    __syncthreads();
    return part[0];
}

__device__ float sum_of_block(float mine) {
    __shared__ float part[256];
    part[threadIdx.x] = mine;
    for (int half = blockDim.x / 2; half > 0; half /= 2) {
        __syncthreads();
        if (threadIdx.x < half) part[threadIdx.x] += part[threadIdx.x + half];
    }
    __syncthreads();
    return part[0];
}

__global__ void softmax_kernel(const float* x, float* out, int cols) {
    const float* row = x + blockIdx.x * cols;
    float top = -INFINITY;
    for (int col = threadIdx.x; col < cols; col += blockDim.x) top = fmaxf(top, row[col]);
    top = largest_of_block(top);
    float sum = 0.0f;
    for (int col = threadIdx.x; col < cols; col += blockDim.x) sum += expf(row[col] - top);
    sum = sum_of_block(sum);
    for (int col = threadIdx.x; col < cols; col += blockDim.x)
        out[blockIdx.x * cols + col] = expf(row[col] - top) / sum;
}

void softmax(const float* x, float* out, int rows, int cols) {
    softmax_kernel<<<rows, 256>>>(x, out, cols);
}
