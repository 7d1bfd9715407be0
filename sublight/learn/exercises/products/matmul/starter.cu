// out = a b, for a of m x k and b of k x n. It is right, and reads each number of a and b again for each product.

__global__ void matmul_kernel(const float* a, const float* b, float* out, int m, int n, int k) {
    int col = blockIdx.x * 16 + threadIdx.x;
    int row = blockIdx.y * 16 + threadIdx.y;
    if (row >= m || col >= n) return;
    float sum = 0.0f;
    for (int i = 0; i < k; ++i) sum += a[row * k + i] * b[i * n + col];  // TODO: by tiles in shared memory
    out[row * n + col] = sum;
}

void matmul(const float* a, const float* b, float* out, int m, int n, int k) {
    dim3 blocks((n + 15) / 16, (m + 15) / 16);
    dim3 threads(16, 16);
    matmul_kernel<<<blocks, threads>>>(a, b, out, m, n, k);
}
