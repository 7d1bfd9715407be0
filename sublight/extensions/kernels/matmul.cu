// c (m, n) = a (m, k) @ b (k, n), all row by row; float, then half with sums in float. In the order of the ladder.
#include "block.cuh"

// Sums of floats are taken PART products at a time, and the parts added up: each addition rounds by the size of the sum
// so far, so one chain over k has an error that grows with k, two levels with its square root. cuBLAS does the same.
constexpr int PART = 64;

// One thread, one element of c. Each element of a is read n times, from whatever cache has it.
extern "C" __global__ void matmul_naive(const float* a, const float* b, float* c, long long m, long long n, long long k) {
    long long col = blockIdx.x * 32LL + threadIdx.x, row = blockIdx.y * 8LL + threadIdx.y;
    if (row >= m || col >= n) return;
    float total = 0.0f;
    for (long long first = 0; first < k; first += PART) {
        float sum = 0.0f;
        for (long long i = first; i < first + PART && i < k; ++i) sum += a[row * k + i] * b[i * n + col];
        total += sum;
    }
    c[row * n + col] = total;
}

// A block keeps a 32 x 32 tile of a and of b in shared memory: global memory is read 32 times less.
extern "C" __global__ void __launch_bounds__(1024)
    matmul_tiled(const float* a, const float* b, float* c, long long m, long long n, long long k) {
    constexpr int SIDE = 32;
    __shared__ float a_tile[SIDE][SIDE], b_tile[SIDE][SIDE];
    int x = threadIdx.x, y = threadIdx.y;
    long long col = blockIdx.x * (long long)SIDE + x, row = blockIdx.y * (long long)SIDE + y;
    float total = 0.0f;
    for (long long first = 0; first < k; first += SIDE) {
        a_tile[y][x] = row < m && first + x < k ? a[row * k + first + x] : 0.0f;
        b_tile[y][x] = first + y < k && col < n ? b[(first + y) * n + col] : 0.0f;
        __syncthreads();
        float sum = 0.0f;  // a tile is a part
#pragma unroll
        for (int i = 0; i < SIDE; ++i) sum += a_tile[y][i] * b_tile[i][x];
        total += sum;
        __syncthreads();
    }
    if (row < m && col < n) c[row * n + col] = total;
}

// From here on a block of 256 threads makes 128 x 128 of c: m and n are multiples of 128, k of 16. A thread makes 8 x 8:
// of what it reads from shared memory, 16 words, it makes 64 multiplications, where it was 2 words for one before.
constexpr int BLOCK = 128, DEEP = 8;

__device__ void multiply(float (&sums)[8][8], const float (&left)[8], const float (&right)[8]) {
#pragma unroll
    for (int i = 0; i < 8; ++i)
#pragma unroll
        for (int j = 0; j < 8; ++j) sums[i][j] += left[i] * right[j];
}

// The totals that parts are added to lie in shared memory: 64 registers more would leave room for one block on a
// multiprocessor, where two hide each other's loads. A thread has 64 words of its own there, so there is nothing to wait
// for: 16 times four neighbours, 256 times 16 bytes apart, so that the lanes of a warp are side by side.
__device__ void clear(float4* totals) {
    for (int i = 0; i < 16; ++i) totals[256 * i] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
}
__device__ void add(float4* totals, const float (&part)[8][8]) {
#pragma unroll
    for (int i = 0; i < 16; ++i) {
        float4 four = totals[256 * i];
        const float* more = &part[i / 2][i % 2 * 4];
        totals[256 * i] = make_float4(four.x + more[0], four.y + more[1], four.z + more[2], four.w + more[3]);
        asm volatile("" ::: "memory");  // one after the other: 16 loads in flight would take 64 registers
    }
}
__device__ const float4& total(const float4* totals, int i, int j) { return totals[256 * (2 * i + j / 4)]; }

extern "C" __global__ void __launch_bounds__(256, 2)
    matmul_registers(const float* a, const float* b, float* c, long long m, long long n, long long k) {
    __shared__ float a_tile[DEEP][BLOCK + 4], b_tile[DEEP][BLOCK];  // a's tile lies transposed: a column in one line
    int x = threadIdx.x % 16, y = threadIdx.x / 16;
    a += blockIdx.y * (long long)BLOCK * k, b += blockIdx.x * BLOCK, c += blockIdx.y * (long long)BLOCK * n + blockIdx.x * BLOCK;
    DYNAMIC_SHARED(float4, room);
    float4* totals = room + threadIdx.x;
    clear(totals);
    for (long long begin = 0; begin < k; begin += PART) {
        float sums[8][8] = {};
        for (long long first = begin; first < begin + PART && first < k; first += DEEP) {
#pragma unroll 2  // four at a time would spill
            for (int i = threadIdx.x; i < BLOCK * DEEP; i += 256) {
                a_tile[i % DEEP][i / DEEP] = a[(i / DEEP) * k + first + i % DEEP];
                b_tile[i / BLOCK][i % BLOCK] = b[(first + i / BLOCK) * n + i % BLOCK];
            }
            __syncthreads();
#pragma unroll
            for (int i = 0; i < DEEP; ++i) {
                float left[8], right[8];
#pragma unroll
                for (int j = 0; j < 8; ++j) left[j] = a_tile[i][y + 16 * j], right[j] = b_tile[i][x + 16 * j];
                multiply(sums, left, right);
            }
            __syncthreads();
        }
        add(totals, sums);
    }
    for (int i = 0; i < 8; ++i)
        for (int j = 0; j < 8; j += 4) {
            float4 four = total(totals, i, j);
            float* to = &c[(y + 16 * i) * n + x + 16 * j];
            to[0] = four.x, to[16] = four.y, to[32] = four.z, to[48] = four.w;
        }
}

__device__ void set(float (&to)[8], int at, float4 four) { to[at] = four.x, to[at + 1] = four.y, to[at + 2] = four.z, to[at + 3] = four.w; }
__device__ const float4& four_at(const float* from) { return *reinterpret_cast<const float4*>(from); }

// 16 bytes an access, from global and from shared memory: a quarter of the load instructions. A thread's 8 rows and 8
// columns are twice four neighbours.
extern "C" __global__ void __launch_bounds__(256, 2)
    matmul_vectorised(const float* a, const float* b, float* c, long long m, long long n, long long k) {
    __shared__ __align__(16) float a_tile[DEEP][BLOCK + 4], b_tile[DEEP][BLOCK];
    int x = threadIdx.x % 16, y = threadIdx.x / 16;
    a += blockIdx.y * (long long)BLOCK * k, b += blockIdx.x * BLOCK, c += blockIdx.y * (long long)BLOCK * n + blockIdx.x * BLOCK;
    int a_row = threadIdx.x / 2, a_col = threadIdx.x % 2 * 4, b_row = threadIdx.x / 32, b_col = threadIdx.x % 32 * 4;
    DYNAMIC_SHARED(float4, room);
    float4* totals = room + threadIdx.x;
    clear(totals);
    for (long long begin = 0; begin < k; begin += PART) {
        float sums[8][8] = {};
        for (long long first = begin; first < begin + PART && first < k; first += DEEP) {
            float4 four = four_at(a + a_row * k + first + a_col);
            a_tile[a_col][a_row] = four.x, a_tile[a_col + 1][a_row] = four.y;
            a_tile[a_col + 2][a_row] = four.z, a_tile[a_col + 3][a_row] = four.w;
            *reinterpret_cast<float4*>(&b_tile[b_row][b_col]) = four_at(b + (first + b_row) * n + b_col);
            __syncthreads();
#pragma unroll
            for (int i = 0; i < DEEP; ++i) {
                float left[8], right[8];
                set(left, 0, four_at(&a_tile[i][4 * y])), set(left, 4, four_at(&a_tile[i][64 + 4 * y]));
                set(right, 0, four_at(&b_tile[i][4 * x])), set(right, 4, four_at(&b_tile[i][64 + 4 * x]));
                multiply(sums, left, right);
            }
            __syncthreads();
        }
        add(totals, sums);
    }
    for (int i = 0; i < 8; ++i)
        for (int j = 0; j < 8; j += 4)
            *reinterpret_cast<float4*>(&c[(i / 4 * 64 + 4 * y + i % 4) * n + j / 4 * 64 + 4 * x]) = total(totals, i, j);
}

// Two tiles of each operand: while one is multiplied, cp.async fills the other past the registers. a's tile lies as a
// does, since a copy cannot transpose: a thread's rows are 16 apart, and a padded line keeps them in different banks. One
// block runs on a multiprocessor either way, so registers hold the totals, too.
extern "C" __global__ void __launch_bounds__(256)
    matmul_pipelined(const float* a, const float* b, float* c, long long m, long long n, long long k) {
    constexpr int DEPTH = 16, LINE = DEPTH + 4;
    __shared__ __align__(16) float a_tile[2][BLOCK * LINE], b_tile[2][DEPTH * BLOCK];
    int x = threadIdx.x % 16, y = threadIdx.x / 16;
    a += blockIdx.y * (long long)BLOCK * k, b += blockIdx.x * BLOCK, c += blockIdx.y * (long long)BLOCK * n + blockIdx.x * BLOCK;
    auto fetch = [&](int stage, long long first) {
#pragma unroll
        for (int i = threadIdx.x; i < BLOCK * DEPTH / 4; i += 256) {
            int row = i / (DEPTH / 4), col = i % (DEPTH / 4) * 4;
            copy_async_16(&a_tile[stage][row * LINE + col], a + row * k + first + col);
            row = i / (BLOCK / 4), col = i % (BLOCK / 4) * 4;
            copy_async_16(&b_tile[stage][row * BLOCK + col], b + (first + row) * n + col);
        }
        copy_async_commit();
    };
    float sums[8][8] = {}, totals[8][8] = {};
    fetch(0, 0);
    int stage = 0;
    for (long long first = 0; first < k; first += DEPTH, stage ^= 1) {
        copy_async_wait<0>();
        __syncthreads();  // this stage has arrived for all threads, and all have done with the other one
        if (first + DEPTH < k) fetch(stage ^ 1, first + DEPTH);
#pragma unroll
        for (int i = 0; i < DEPTH; i += 4) {
            float4 lefts[8];
#pragma unroll
            for (int j = 0; j < 8; ++j) lefts[j] = four_at(&a_tile[stage][(y + 16 * j) * LINE + i]);
#pragma unroll
            for (int deep = 0; deep < 4; ++deep) {
                float left[8], right[8];
#pragma unroll
                for (int j = 0; j < 8; ++j)
                    left[j] = deep == 0 ? lefts[j].x : deep == 1 ? lefts[j].y : deep == 2 ? lefts[j].z : lefts[j].w;
                set(right, 0, four_at(&b_tile[stage][(i + deep) * BLOCK + 4 * x]));
                set(right, 4, four_at(&b_tile[stage][(i + deep) * BLOCK + 64 + 4 * x]));
                multiply(sums, left, right);
            }
        }
        if ((first + DEPTH) % PART == 0 || first + DEPTH == k)
#pragma unroll
            for (int i = 0; i < 64; ++i) totals[i / 8][i % 8] += sums[i / 8][i % 8], sums[i / 8][i % 8] = 0.0f;
    }
#pragma unroll
    for (int i = 0; i < 8; ++i)
#pragma unroll
        for (int j = 0; j < 8; j += 4)
            *reinterpret_cast<float4*>(&c[(y + 16 * i) * n + j / 4 * 64 + 4 * x]) =
                make_float4(totals[i][j], totals[i][j + 1], totals[i][j + 2], totals[i][j + 3]);
}

// Half the bytes: eight halves an access of 16 bytes, in shared memory as pairs; products and sums are floats.
extern "C" __global__ void __launch_bounds__(256)
    matmul_half2(const __half* a, const __half* b, __half* c, long long m, long long n, long long k) {
    constexpr int DEPTH = 16, LINE = DEPTH / 2 + 4;  // in pairs; the padding keeps lines aligned to 16 bytes
    __shared__ __align__(16) __half2 a_tile[BLOCK * LINE], b_tile[DEPTH * BLOCK / 2];
    int x = threadIdx.x % 16, y = threadIdx.x / 16;
    a += blockIdx.y * (long long)BLOCK * k, b += blockIdx.x * BLOCK, c += blockIdx.y * (long long)BLOCK * n + blockIdx.x * BLOCK;
    int a_row = threadIdx.x / 2, a_pack = threadIdx.x % 2, b_row = threadIdx.x / 16, b_pack = threadIdx.x % 16;
    float sums[8][8] = {};
    for (long long first = 0; first < k; first += DEPTH) {
        *reinterpret_cast<uint4*>(&a_tile[a_row * LINE + 4 * a_pack]) =
            *reinterpret_cast<const uint4*>(a + a_row * k + first + 8 * a_pack);
        *reinterpret_cast<uint4*>(&b_tile[b_row * BLOCK / 2 + 4 * b_pack]) =
            *reinterpret_cast<const uint4*>(b + (first + b_row) * n + 8 * b_pack);
        __syncthreads();
#pragma unroll
        for (int i = 0; i < DEPTH; i += 2) {
            float2 lefts[8];
#pragma unroll
            for (int j = 0; j < 8; ++j) lefts[j] = __half22float2(a_tile[(y + 16 * j) * LINE + i / 2]);
#pragma unroll
            for (int deep = 0; deep < 2; ++deep) {
                float left[8], right[8];
#pragma unroll
                for (int j = 0; j < 8; ++j) left[j] = deep ? lefts[j].y : lefts[j].x;
#pragma unroll
                for (int j = 0; j < 8; j += 2) {
                    float2 pair = __half22float2(b_tile[(i + deep) * BLOCK / 2 + x + 8 * j]);
                    right[j] = pair.x, right[j + 1] = pair.y;
                }
                multiply(sums, left, right);
            }
        }
        __syncthreads();
    }
#pragma unroll
    for (int i = 0; i < 8; ++i)
#pragma unroll
        for (int j = 0; j < 8; j += 2)
            *reinterpret_cast<__half2*>(&c[(y + 16 * i) * n + 2 * x + 16 * j]) = __floats2half2_rn(sums[i][j], sums[i][j + 1]);
}

// Tensor cores through CUDA's own C++: 8 warps, each 32 x 64 of c as 2 x 4 fragments of 16 x 16.
extern "C" __global__ void __launch_bounds__(256)
    matmul_wmma(const __half* a, const __half* b, __half* c, long long m, long long n, long long k) {
    using namespace nvcuda;
    constexpr int DEPTH = 32, A_LINE = DEPTH + 8, B_LINE = BLOCK + 8, C_LINE = 20;
    __shared__ __align__(32) __half a_tile[BLOCK * A_LINE], b_tile[DEPTH * B_LINE];
    __shared__ __align__(32) float c_tile[8][16 * C_LINE];  // a warp's fragment on its way out
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32, row = warp / 2 * 32, col = warp % 2 * 64;
    a += blockIdx.y * (long long)BLOCK * k, b += blockIdx.x * BLOCK, c += blockIdx.y * (long long)BLOCK * n + blockIdx.x * BLOCK;
    wmma::fragment<wmma::accumulator, 16, 16, 16, float> sums[2][4];
    for (auto& line : sums)
        for (auto& each : line) wmma::fill_fragment(each, 0.0f);
    for (long long first = 0; first < k; first += DEPTH) {
        for (int i = threadIdx.x; i < BLOCK * DEPTH / 8; i += 256) {
            int at = i / (DEPTH / 8), pack = i % (DEPTH / 8) * 8;
            *reinterpret_cast<uint4*>(&a_tile[at * A_LINE + pack]) = *reinterpret_cast<const uint4*>(a + at * k + first + pack);
            at = i / (BLOCK / 8), pack = i % (BLOCK / 8) * 8;
            *reinterpret_cast<uint4*>(&b_tile[at * B_LINE + pack]) = *reinterpret_cast<const uint4*>(b + (first + at) * n + pack);
        }
        __syncthreads();
#pragma unroll
        for (int i = 0; i < DEPTH; i += 16) {
            wmma::fragment<wmma::matrix_a, 16, 16, 16, half, wmma::row_major> left[2];
            wmma::fragment<wmma::matrix_b, 16, 16, 16, half, wmma::row_major> right[4];
#pragma unroll
            for (int j = 0; j < 2; ++j) wmma::load_matrix_sync(left[j], &a_tile[(row + 16 * j) * A_LINE + i], A_LINE);
#pragma unroll
            for (int j = 0; j < 4; ++j) wmma::load_matrix_sync(right[j], &b_tile[i * B_LINE + col + 16 * j], B_LINE);
#pragma unroll
            for (int p = 0; p < 2; ++p)
#pragma unroll
                for (int q = 0; q < 4; ++q) wmma::mma_sync(sums[p][q], left[p], right[q], sums[p][q]);
        }
        __syncthreads();
    }
#pragma unroll
    for (int p = 0; p < 2; ++p)
#pragma unroll
        for (int q = 0; q < 4; ++q) {
            wmma::store_matrix_sync(c_tile[warp], sums[p][q], C_LINE, wmma::mem_row_major);
            __syncwarp();
            int at = lane / 2, half_line = lane % 2 * 8;  // a lane takes 8 of a line: 16 bytes of halves
            __half2 out[4];
            for (int i = 0; i < 4; ++i)
                out[i] = __floats2half2_rn(c_tile[warp][at * C_LINE + half_line + 2 * i], c_tile[warp][at * C_LINE + half_line + 2 * i + 1]);
            *reinterpret_cast<uint4*>(&c[(row + 16 * p + at) * n + col + 16 * q + half_line]) = *reinterpret_cast<uint4*>(out);
            __syncwarp();
        }
}

// The tensor cores' own instruction: 128 x 256 of c a block, 64 x 64 a warp, so that each operand that a warp loads
// meets eight or four others; three stages of 64 deep in flight; chunks of 16 bytes swapped by their row's number, so that
// the eight rows of a matrix lie in eight different banks; operands of the next 16 are loaded while these are
// multiplied; blocks that follow one another share rows and columns, which then come from the L2.
extern "C" __global__ void __launch_bounds__(256, 1)
    matmul_mma(const __half* a, const __half* b, __half* c, long long m, long long n, long long k) {
    constexpr int ROWS = 128, COLS = 256, DEPTH = 64, STAGES = 3, GROUP = 8;
    constexpr int A_BYTES = ROWS * DEPTH * 2, B_BYTES = DEPTH * COLS * 2;
    DYNAMIC_SHARED(unsigned char, shared);  // STAGES of a, STAGES of b
    int down = static_cast<int>(m / ROWS), across = static_cast<int>(n / COLS), id = blockIdx.x;
    int group = id / (GROUP * across), tall = min(GROUP, down - group * GROUP);  // the last group may be lower
    int block_row = group * GROUP + id % (GROUP * across) % tall, block_col = id % (GROUP * across) / tall;
    a += block_row * (long long)ROWS * k, b += block_col * COLS, c += block_row * (long long)ROWS * n + block_col * COLS;
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32, row = warp / 4 * 64, col = warp % 4 * 64;
    auto a_at = [&](int stage, int r, int chunk) { return shared + stage * A_BYTES + r * (DEPTH * 2) + ((chunk ^ r % 8) * 16); };
    auto b_at = [&](int stage, int r, int chunk) {
        return shared + STAGES * A_BYTES + stage * B_BYTES + r * (COLS * 2) + ((chunk ^ r % 8) * 16);
    };
    int a_row = threadIdx.x / 8, a_chunk = threadIdx.x % 8, b_row = threadIdx.x / 32, b_chunk = threadIdx.x % 32;
    const __half* a_from = a + a_row * k + a_chunk * 8;  // 32 rows of a and 8 of b at a time: their swaps stay the same
    const __half* b_from = b + b_row * n + b_chunk * 8;
    unsigned char *a_to = a_at(0, a_row, a_chunk), *b_to = b_at(0, b_row, b_chunk);
    auto fetch = [&](int stage) {  // the next 64 deep
#pragma unroll
        for (int i = 0; i < ROWS / 32; ++i)
            copy_async_16(a_to + stage * A_BYTES + i * 32 * DEPTH * 2, a_from + i * 32 * k);
#pragma unroll
        for (int i = 0; i < DEPTH / 8; ++i)
            copy_async_16(b_to + stage * B_BYTES + i * 8 * COLS * 2, b_from + i * 8 * n);
        a_from += DEPTH, b_from += DEPTH * n;
    };
    unsigned left[2][4][4], right[2][4][4];  // of this 16 deep and of the next; right[.][j] is 16 columns
    auto load = [&](int slot, int stage, int deep) {
#pragma unroll
        for (int i = 0; i < 4; ++i)  // rows by lane % 16, the upper 8 of 16 deep by lane / 16: a0 a1 a2 a3 of mma
            load_matrices(left[slot][i], a_at(stage, row + 16 * i + lane % 16, deep * 2 + lane / 16));
#pragma unroll
        for (int j = 0; j < 4; ++j)  // rows of b are the depth: transposed; 8 columns, then the next 8
            load_matrices_transposed(right[slot][j], b_at(stage, deep * 16 + lane % 16, (col + 16 * j) / 8 + lane / 16));
    };
    float sums[4][8][4] = {};
    int turns = static_cast<int>(k / DEPTH);
#pragma unroll
    for (int i = 0; i < STAGES - 1; ++i) {
        if (i < turns) fetch(i);
        copy_async_commit();  // an empty group where there is nothing left: the count of groups stays true
    }
    copy_async_wait<STAGES - 2>();
    __syncthreads();
    load(0, 0, 0);
    for (int turn = 0; turn < turns; ++turn) {
        int stage = turn % STAGES;
#pragma unroll
        for (int deep = 0; deep < DEPTH / 16; ++deep) {
            if (deep == DEPTH / 16 - 1) {  // the next turn's first operands: its stage must be here
                copy_async_wait<STAGES - 2>();
                __syncthreads();
                load((deep + 1) % 2, (turn + 1) % STAGES, 0);
            } else {
                load((deep + 1) % 2, stage, deep + 1);
            }
            if (deep == 0) {  // the stage that the turn before has done with: its barrier is behind us
                int ahead = turn + STAGES - 1;
                if (ahead < turns) fetch(ahead % STAGES);
                copy_async_commit();
            }
#pragma unroll
            for (int i = 0; i < 4; ++i)
#pragma unroll
                for (int j = 0; j < 8; ++j)
                    mma_16x8x16(sums[i][j], left[deep % 2][i], right[deep % 2][j / 2][j % 2 * 2], right[deep % 2][j / 2][j % 2 * 2 + 1]);
        }
    }
    copy_async_wait<0>();
#pragma unroll
    for (int i = 0; i < 4; ++i)
#pragma unroll
        for (int j = 0; j < 8; ++j) {
            long long r = row + 16 * i + lane / 4, at = col + 8 * j + lane % 4 * 2;
            *reinterpret_cast<__half2*>(&c[r * n + at]) = __floats2half2_rn(sums[i][j][0], sums[i][j][1]);
            *reinterpret_cast<__half2*>(&c[(r + 8) * n + at]) = __floats2half2_rn(sums[i][j][2], sums[i][j][3]);
        }
}
