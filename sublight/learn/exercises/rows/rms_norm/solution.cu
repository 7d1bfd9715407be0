// RMSNorm of each row: a block has a row; one sum through shared memory.

constexpr float EPS = 1.1920929e-07f;

__global__ void rms_norm_kernel(const float* x, const float* weight, float* out, int cols) {
    __shared__ float part[256];
    const float* row = x + blockIdx.x * cols;
    float squares = 0.0f;
    for (int col = threadIdx.x; col < cols; col += blockDim.x) squares += row[col] * row[col];
    part[threadIdx.x] = squares;
    for (int half = blockDim.x / 2; half > 0; half /= 2) {
        __syncthreads();
        if (threadIdx.x < half) part[threadIdx.x] += part[threadIdx.x + half];
    }
    __syncthreads();
    float scale = 1.0f / sqrtf(part[0] / cols + EPS);
    for (int col = threadIdx.x; col < cols; col += blockDim.x)
        out[blockIdx.x * cols + col] = row[col] * scale * weight[col];
}

void rms_norm(const float* x, const float* weight, float* out, int rows, int cols) {
    rms_norm_kernel<<<rows, 256>>>(x, weight, out, cols);
}
