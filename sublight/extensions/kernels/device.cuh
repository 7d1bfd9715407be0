// What the kernels use beyond plain CUDA C++: barriers across the grid, asynchronous copies, tensor cores.
// A host compiler takes played.h instead, which plays all of it, and CUDA's own words, on a CPU.
#pragma once
#ifndef __CUDACC__
#include "played.h"
#else
#include <cooperative_groups.h>
#include <cuda_fp16.h>
#include <mma.h>

#define DYNAMIC_SHARED(type, name) extern __shared__ __align__(16) unsigned char name##_bytes[]; \
    type* name = reinterpret_cast<type*>(name##_bytes)

// Every block of the grid has come here, and sees what the others wrote before. Only in a cooperative launch, which
// promises that all blocks are resident: otherwise those that wait would keep the rest from starting.
__device__ __forceinline__ void grid_sync() { cooperative_groups::this_grid().sync(); }

// 16 bytes from global to shared memory past the registers; the thread goes on at once (sm_80 and later).
__device__ __forceinline__ void copy_async_16(void* shared, const void* global) {
    unsigned address = static_cast<unsigned>(__cvta_generic_to_shared(shared));
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(address), "l"(global) : "memory");
}
__device__ __forceinline__ void copy_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int PENDING>  // all groups but the newest PENDING have arrived, for this thread
__device__ __forceinline__ void copy_async_wait() { asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory"); }

// Four 8x8 matrices of halves; lane l gives the address of row l % 8 of matrix l / 8, and gets of each matrix the two
// elements that mma wants of it: those of row l / 4, columns 2 (l % 4) and the next.
__device__ __forceinline__ void load_matrices(unsigned (&to)[4], const void* row) {
    unsigned address = static_cast<unsigned>(__cvta_generic_to_shared(row));
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3]) : "r"(address) : "memory");
}
// The same, each matrix transposed: for an operand whose other dimension is the contiguous one.
__device__ __forceinline__ void load_matrices_transposed(unsigned (&to)[4], const void* row) {
    unsigned address = static_cast<unsigned>(__cvta_generic_to_shared(row));
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3]) : "r"(address) : "memory");
}
// d (16x8, float) += a (16x16, half) @ b (16x8, half), by the 32 lanes of a warp together.
__device__ __forceinline__ void mma_16x8x16(float (&d)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
                 "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
// Read and write a flag and what it announces, seen by all blocks: a release store orders earlier writes before it.
__device__ __forceinline__ unsigned long long load_acquire(const unsigned long long* from) {
    unsigned long long value;
    asm volatile("ld.acquire.gpu.global.u64 %0, [%1];" : "=l"(value) : "l"(from) : "memory");
    return value;
}
__device__ __forceinline__ void store_release(unsigned long long* to, unsigned long long value) {
    asm volatile("st.release.gpu.global.u64 [%0], %1;" ::"l"(to), "l"(value) : "memory");
}
#endif
