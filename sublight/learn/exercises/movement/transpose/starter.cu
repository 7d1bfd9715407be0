// out = x turned: out[col][row] = x[row][col]. It is right, and each store of a warp touches 32 sectors.

__global__ void transpose_kernel(const float* x, float* out, int rows, int cols) {
    int col = blockIdx.x * 32 + threadIdx.x;
    int row = blockIdx.y * 32 + threadIdx.y;
    for (int step = 0; step < 32; step += 8)
        if (row + step < rows && col < cols) out[col * rows + row + step] = x[(row + step) * cols + col];  // TODO
}

void transpose(const float* x, float* out, int rows, int cols) {
    dim3 blocks((cols + 31) / 32, (rows + 31) / 32);
    dim3 threads(32, 8);
    transpose_kernel<<<blocks, threads>>>(x, out, rows, cols);
}
