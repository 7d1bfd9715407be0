// y[i] = x[0] + … + x[i] for 32-bit whole numbers: three launches that move 4 n words, then one that moves 2 n.
#include "lookback.cuh"

constexpr int THREADS = 256;

// One tile of 256: log2(256) rounds, in each of which every thread adds the one `by` before it. Two buffers take turns,
// so that a round needs one barrier. `sums` gets each tile's sum.
extern "C" __global__ void __launch_bounds__(256) scan_hillis_steele(const int* x, int* y, int* sums, long long n) {
    __shared__ int tile[2][THREADS];
    long long i = blockIdx.x * (long long)THREADS + threadIdx.x;
    tile[0][threadIdx.x] = i < n ? x[i] : 0;
    __syncthreads();
    int from = 0;
    for (int by = 1; by < THREADS; by *= 2, from ^= 1) {
        int value = tile[from][threadIdx.x];
        if (threadIdx.x >= by) value += tile[from][threadIdx.x - by];
        tile[from ^ 1][threadIdx.x] = value;
        __syncthreads();
    }
    if (i < n) y[i] = tile[from][threadIdx.x];
    if (threadIdx.x == THREADS - 1) sums[blockIdx.x] = tile[from][threadIdx.x];
}

// 16 neighbours a thread, as four accesses of 16 bytes; past the end zeros. n is a multiple of 4.
constexpr int ITEMS = 16;
__device__ int load_items(int (&items)[ITEMS], const int* x, long long first, long long n) {
    int sum = 0;
#pragma unroll
    for (int j = 0; j < ITEMS; j += 4) {
        int4 four = first + j < n ? *reinterpret_cast<const int4*>(x + first + j) : make_int4(0, 0, 0, 0);
        items[j] = sum += four.x, items[j + 1] = sum += four.y, items[j + 2] = sum += four.z, items[j + 3] = sum += four.w;
    }
    return sum;
}
__device__ void store_items(const int (&items)[ITEMS], int before, int* y, long long first, long long n) {
#pragma unroll
    for (int j = 0; j < ITEMS; j += 4)
        if (first + j < n)
            *reinterpret_cast<int4*>(y + first + j) = make_int4(items[j] + before, items[j + 1] + before,
                                                                items[j + 2] + before, items[j + 3] + before);
}

extern "C" __global__ void __launch_bounds__(256) scan_shuffle(const int* x, int* y, int* sums, long long n) {
    long long first = (blockIdx.x * (long long)THREADS + threadIdx.x) * ITEMS;
    int items[ITEMS], total;
    int own = load_items(items, x, first, n);
    int before = block_scan(own, total) - own;
    store_items(items, before, y, first, n);
    if (threadIdx.x == 0) sums[blockIdx.x] = total;
}

// The second half of both: to each tile but the first, all that stands before it. `sums` is scanned.
extern "C" __global__ void scan_add(int* y, const int* sums, long long tile, long long n) {
    for (long long i = tile + blockIdx.x * (long long)blockDim.x + threadIdx.x; i < n; i += (long long)gridDim.x * blockDim.x)
        y[i] += sums[i / tile - 1];
}

extern "C" __global__ void __launch_bounds__(256)
    scan_lookback(const int* x, int* y, unsigned long long* shown, unsigned long long* ticket, long long n) {
    long long tile = next_tile(ticket), first = (tile * THREADS + threadIdx.x) * ITEMS;
    int items[ITEMS], total;
    int own = load_items(items, x, first, n);
    int upto = block_scan(own, total);
    int before = static_cast<int>(before_tile(shown, tile, static_cast<unsigned>(total)));
    store_items(items, before + upto - own, y, first, n);
}
