// Hopper's own product, wgmma: a warpgroup of 128 threads multiplies 64 x 256 x 16 out of shared memory, and goes on while
// it is computed. For sm_90a alone: other GPUs have no such instruction.
#include <cuda_fp16.h>
#include <cstdint>

__device__ uint32_t shared_address(const void* p) { return static_cast<uint32_t>(__cvta_generic_to_shared(p)); }

__device__ void copy_async_16(uint32_t to, const void* from) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
}

// How wgmma is told where a tile lies: its start, two distances and the swizzle of 128 bytes (chunk ^ row % 8). Of a, whose
// rows run along the depth, the second distance is that of 8 rows; of b, whose rows run along the columns, the first is
// that of 64 columns, the second that of 8 rows.
__device__ uint64_t tile_at(uint32_t address, uint32_t first, uint32_t second) {
    return uint64_t((address & 0x3ffff) >> 4) | uint64_t(first >> 4) << 16 | uint64_t(second >> 4) << 32 | 1ull << 62;
}

#define FLOATS_8(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), "+f"(d[i + 6]), "+f"(d[i + 7])
#define FLOATS_32(i) FLOATS_8(i), FLOATS_8(i + 8), FLOATS_8(i + 16), FLOATS_8(i + 24)

// d = a @ b, or d + a @ b where `adds`: a start of zeros would be registers written by others, which wgmma waits for.
__device__ __forceinline__ void wgmma(float (&d)[128], uint64_t a, uint64_t b, int adds) {
    asm volatile(
        "{ .reg .pred add; setp.ne.b32 add, %130, 0; wgmma.mma_async.sync.aligned.m64n256k16.f32.f16.f16 {"
        "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
        "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
        "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
        "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, "
        "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, "
        "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, "
        "%96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, "
        "%112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127}, %128, %129, add, 1, 1, 0, 1; }"
        : FLOATS_32(0), FLOATS_32(32), FLOATS_32(64), FLOATS_32(96)
        : "l"(a), "l"(b), "r"(adds));
}

// 128 x 256 of c a block, half of it a warpgroup; four stages of 64 deep. In a turn, the copies of a stage have arrived, the
// products of the turn before may still run, those of the turn before that have ended: their stage is filled anew.
extern "C" __global__ void __launch_bounds__(256, 1)
    matmul_wgmma(const __half* a, const __half* b, __half* c, long long m, long long n, long long k) {
    constexpr int ROWS = 128, COLS = 256, DEPTH = 64, STAGES = 4, GROUP = 8;
    constexpr int A_BYTES = ROWS * DEPTH * 2, B_BYTES = DEPTH * COLS * 2, LINE = 128, PANEL = DEPTH * LINE;
    extern __shared__ unsigned char bytes[];
    uint32_t a_base = (shared_address(bytes) + 1023) / 1024 * 1024, b_base = a_base + STAGES * A_BYTES;
    int down = static_cast<int>(m / ROWS), across = static_cast<int>(n / COLS), id = blockIdx.x;
    int group = id / (GROUP * across), tall = min(GROUP, down - group * GROUP);
    int block_row = group * GROUP + id % (GROUP * across) % tall, block_col = id % (GROUP * across) / tall;
    a += block_row * (long long)ROWS * k, b += block_col * COLS, c += block_row * (long long)ROWS * n + block_col * COLS;
    int a_row = threadIdx.x / 8, a_chunk = threadIdx.x % 8, b_row = threadIdx.x / 32, b_chunk = threadIdx.x % 32;
    const __half* a_from = a + a_row * k + a_chunk * 8;
    const __half* b_from = b + b_row * n + b_chunk * 8;
    uint32_t a_to = a_base + a_row * LINE + (a_chunk ^ a_row % 8) * 16;
    uint32_t b_to = b_base + b_chunk / 8 * PANEL + b_row * LINE + (b_chunk % 8 ^ b_row % 8) * 16;
    auto fetch = [&](int stage) {
#pragma unroll
        for (int i = 0; i < ROWS / 32; ++i) copy_async_16(a_to + stage * A_BYTES + i * 32 * LINE, a_from + i * 32 * k);
#pragma unroll
        for (int i = 0; i < DEPTH / 8; ++i) copy_async_16(b_to + stage * B_BYTES + i * 8 * LINE, b_from + i * 8 * n);
        a_from += DEPTH, b_from += DEPTH * n;
    };
    float sums[128];
    int turns = static_cast<int>(k / DEPTH), team = threadIdx.x / 128;
#pragma unroll
    for (int i = 0; i < STAGES - 2; ++i) {
        if (i < turns) fetch(i);
        asm volatile("cp.async.commit_group;" ::: "memory");
    }
    for (int turn = 0; turn < turns; ++turn) {
        asm volatile("cp.async.wait_group %0;" ::"n"(STAGES - 3) : "memory");
        asm volatile("fence.proxy.async.shared::cta;" ::: "memory");  // what copies wrote, for wgmma to see
        asm volatile("wgmma.wait_group.sync.aligned 1;" ::: "memory");
        __syncthreads();
        asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
        uint32_t left = a_base + turn % STAGES * A_BYTES + team * 64 * LINE, right = b_base + turn % STAGES * B_BYTES;
#pragma unroll
        for (int deep = 0; deep < DEPTH / 16; ++deep)
            wgmma(sums, tile_at(left + deep * 32, 16, 8 * LINE), tile_at(right + deep * 16 * LINE, PANEL, 8 * LINE), turn + deep);
        asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
        if (turn + STAGES - 2 < turns) fetch((turn + STAGES - 2) % STAGES);
        asm volatile("cp.async.commit_group;" ::: "memory");
    }
    asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
    asm volatile("cp.async.wait_group 0;" ::: "memory");
    long long row = threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4;
#pragma unroll
    for (int j = 0; j < 32; ++j) {
        long long at = 8 * j + threadIdx.x % 4 * 2;
        *reinterpret_cast<__half2*>(&c[row * n + at]) = __floats2half2_rn(sums[4 * j], sums[4 * j + 1]);
        *reinterpret_cast<__half2*>(&c[(row + 8) * n + at]) = __floats2half2_rn(sums[4 * j + 2], sums[4 * j + 3]);
    }
}
