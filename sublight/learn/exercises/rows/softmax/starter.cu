// Softmax of each row: exp(x - max) / sum. A block has a row.

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

__global__ void softmax_kernel(const float* x, float* out, int cols) {
    const float* row = x + blockIdx.x * cols;
    float top = -INFINITY;
    for (int col = threadIdx.x; col < cols; col += blockDim.x) top = fmaxf(top, row[col]);
    top = largest_of_block(top);
    float sum = 1.0f;  // TODO: the sum of exp(row[col] - top) over the whole row
    for (int col = threadIdx.x; col < cols; col += blockDim.x)
        out[blockIdx.x * cols + col] = expf(row[col] - top) / sum;
}

void softmax(const float* x, float* out, int rows, int cols) {
    softmax_kernel<<<rows, 256>>>(x, out, cols);
}
