// out = a b by tiles: a block has 64 x 64 results, a thread 4 x 4 of them in registers; tiles of a and b are shared.

constexpr int TILE = 64, DEPTH = 16, EACH = 4, CHAIN = 64;

__global__ void matmul_kernel(const float* a, const float* b, float* out, int m, int n, int k) {
    __shared__ float left[DEPTH][TILE + 4];
    __shared__ float right[DEPTH][TILE];
    int thread = threadIdx.y * 16 + threadIdx.x;
    int first_row = blockIdx.y * TILE, first_col = blockIdx.x * TILE;
    float total[EACH][EACH] = {};
    for (int begin = 0; begin < k; begin += CHAIN) {  // one chain over all of k rounds twice as much as PyTorch does
        float sum[EACH][EACH] = {};
        for (int start = begin; start < k && start < begin + CHAIN; start += DEPTH) {
            for (int step = 0; step < TILE * DEPTH; step += 256) {
                int at = step + thread;
                int row = first_row + at / DEPTH, i = start + at % DEPTH;
                left[at % DEPTH][at / DEPTH] = row < m && i < k ? a[row * k + i] : 0.0f;
                int j = start + at / TILE, col = first_col + at % TILE;
                right[at / TILE][at % TILE] = j < k && col < n ? b[j * n + col] : 0.0f;
            }
            __syncthreads();
            for (int i = 0; i < DEPTH; ++i)
                for (int y = 0; y < EACH; ++y)
                    for (int x = 0; x < EACH; ++x)
                        sum[y][x] += left[i][threadIdx.y * EACH + y] * right[i][threadIdx.x * EACH + x];
            __syncthreads();
        }
        for (int y = 0; y < EACH; ++y)
            for (int x = 0; x < EACH; ++x) total[y][x] += sum[y][x];
    }
    for (int y = 0; y < EACH; ++y)
        for (int x = 0; x < EACH; ++x) {
            int row = first_row + threadIdx.y * EACH + y, col = first_col + threadIdx.x * EACH + x;
            if (row < m && col < n) out[row * n + col] = total[y][x];
        }
}

void matmul(const float* a, const float* b, float* out, int m, int n, int k) {
    dim3 blocks((n + TILE - 1) / TILE, (m + TILE - 1) / TILE);
    dim3 threads(16, 16);
    matmul_kernel<<<blocks, threads>>>(a, b, out, m, n, k);
}
