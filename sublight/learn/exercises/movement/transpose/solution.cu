// out = x turned: a tile goes through shared memory, so that loads and stores both run along rows.

__global__ void transpose_kernel(const float* x, float* out, int rows, int cols) {
    __shared__ float tile[32][33];  // one column more, so that a column's 32 places are in 32 banks
    int col = blockIdx.x * 32 + threadIdx.x;
    int row = blockIdx.y * 32 + threadIdx.y;
    for (int step = 0; step < 32; step += 8)
        if (row + step < rows && col < cols) tile[threadIdx.y + step][threadIdx.x] = x[(row + step) * cols + col];
    __syncthreads();
    int out_col = blockIdx.y * 32 + threadIdx.x;
    int out_row = blockIdx.x * 32 + threadIdx.y;
    for (int step = 0; step < 32; step += 8)
        if (out_row + step < cols && out_col < rows)
            out[(out_row + step) * rows + out_col] = tile[threadIdx.x][threadIdx.y + step];
}

void transpose(const float* x, float* out, int rows, int cols) {
    dim3 blocks((cols + 31) / 32, (rows + 31) / 32);
    dim3 threads(32, 8);
    transpose_kernel<<<blocks, threads>>>(x, out, rows, cols);
}
