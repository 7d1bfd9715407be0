// y[c][r] = x[r][c] for 4-byte elements. One of the two sides is strided; the ladder is about who pays for it.
#include "device.cuh"

constexpr int TILE = 32, ROWS = 8;  // 32 x 8 threads move a tile of 32 x 32, four elements each

extern "C" __global__ void transpose_naive(const float* x, float* y, long long rows, long long cols) {
    long long col = blockIdx.x * (long long)TILE + threadIdx.x, row = blockIdx.y * (long long)TILE + threadIdx.y;
    for (int j = 0; j < TILE; j += ROWS)
        if (row + j < rows && col < cols) y[col * rows + row + j] = x[(row + j) * cols + col];
}

// PITCH is the distance between rows of the tile; SWIZZLE puts column c of row r at c ^ r.
template <int PITCH, bool SWIZZLE>
__device__ void through_shared(const float* x, float* y, long long rows, long long cols) {
    __shared__ float tile[TILE * PITCH];
    long long first_col = blockIdx.x * (long long)TILE, first_row = blockIdx.y * (long long)TILE;
    auto at = [](int row, int col) { return row * PITCH + (SWIZZLE ? col ^ row : col); };
    long long col = first_col + threadIdx.x;
    for (int j = threadIdx.y; j < TILE; j += ROWS)
        if (first_row + j < rows && col < cols) tile[at(j, threadIdx.x)] = x[(first_row + j) * cols + col];
    __syncthreads();
    long long row = first_row + threadIdx.x;
    for (int j = threadIdx.y; j < TILE; j += ROWS)
        if (first_col + j < cols && row < rows) y[(first_col + j) * rows + row] = tile[at(threadIdx.x, j)];
}
extern "C" __global__ void transpose_conflicts(const float* x, float* y, long long rows, long long cols) {
    through_shared<TILE, false>(x, y, rows, cols);
}
extern "C" __global__ void transpose_padded(const float* x, float* y, long long rows, long long cols) {
    through_shared<TILE + 1, false>(x, y, rows, cols);
}
extern "C" __global__ void transpose_swizzled(const float* x, float* y, long long rows, long long cols) {
    through_shared<TILE, true>(x, y, rows, cols);
}

// 256 threads, a tile of 64 x 64, 16 bytes an access on both sides; rows and cols are multiples of 4. The tile's 16
// chunks of a row are swapped by the row's number over four, so that four rows of a column are read in 2 turns of the
// banks, not 16. STREAMED: what is written will not be read again soon, and is the first to leave the L2.
template <bool STREAMED>
__device__ void by_chunks(const float* x, float* y, long long rows, long long cols) {
    constexpr int SIDE = 64, CHUNKS = SIDE / 4;
    __shared__ float4 tile[SIDE][CHUNKS];
    long long first_col = blockIdx.x * (long long)SIDE, first_row = blockIdx.y * (long long)SIDE;
    int chunk = threadIdx.x % CHUNKS, line = threadIdx.x / CHUNKS;  // 16 lines at a time
#pragma unroll
    for (int j = 0; j < SIDE; j += 16) {
        long long row = first_row + line + j, col = first_col + 4 * chunk;
        if (row < rows && col < cols)
            tile[line + j][chunk ^ ((line + j) / 4)] = *reinterpret_cast<const float4*>(x + row * cols + col);
    }
    __syncthreads();
#pragma unroll
    for (int j = 0; j < SIDE; j += 16) {
        long long row = first_row + 4 * chunk, col = first_col + line + j;
        if (row < rows && col < cols) {
            const float* words = reinterpret_cast<const float*>(tile);
            int from = 4 * ((line + j) / 4 ^ chunk) + (line + j) % 4;  // rows 4 chunk to 4 chunk + 3 share a swap
            const float* first = words + 4 * chunk * SIDE + from;
            float4* to = reinterpret_cast<float4*>(y + col * rows + row);
            float4 out = make_float4(first[0], first[SIDE], first[2 * SIDE], first[3 * SIDE]);
            if (STREAMED) __stcs(to, out);
            else *to = out;
        }
    }
}
extern "C" __global__ void transpose_vectorised(const float* x, float* y, long long rows, long long cols) {
    by_chunks<false>(x, y, rows, cols);
}
extern "C" __global__ void transpose_streamed(const float* x, float* y, long long rows, long long cols) {
    by_chunks<true>(x, y, rows, cols);
}
