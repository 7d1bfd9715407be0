// CUDA's words, played on a CPU, so that a kernel's arithmetic, indices and barriers are tested where there is no GPU.
//
// Each thread of a block is a fiber: it runs until a barrier, a shuffle or its end, and then the next one runs. Blocks
// follow one another; those of a cooperative launch are threads of the host, whose `thread_local` stands for shared
// memory. `reversed` runs a block's threads from the last to the first: a kernel that lacks a barrier then differs.
// An asynchronous copy is made when it is waited for, not before. Nothing of this says how fast a kernel is.
#pragma once
#include <pthread.h>
#include <setjmp.h>
#include <stdint.h>
#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <thread>
#include <utility>
#include <vector>

#define __global__
#define __device__ static
#define __host__
#define __shared__ static thread_local
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __align__(n) __attribute__((aligned(n)))
#ifndef PLAYED_PASSED
#define PLAYED_PASSED(what)  // what a watcher does when a thread has passed a barrier
#endif
#ifndef PLAYED_OWN
#define PLAYED_OWN  // how a watcher marks functions that are the player's and reach no memory of a kernel's
#endif
#define DYNAMIC_SHARED(type, name) type* name = reinterpret_cast<type*>(played::dynamic_shared)

using std::max;
using std::min;
struct dim3 { unsigned x = 1, y = 1, z = 1; };
struct __align__(8) float2 { float x, y; };
struct __align__(16) float4 { float x, y, z, w; };
struct __align__(16) double2 { double x, y; };
struct __align__(16) int4 { int x, y, z, w; };
struct __align__(16) uint4 { unsigned x, y, z, w; };
using __half = _Float16;
using half = _Float16;
struct __align__(4) __half2 { __half x, y; };
static inline float2 make_float2(float x, float y) { return {x, y}; }
static inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
static inline int4 make_int4(int x, int y, int z, int w) { return {x, y, z, w}; }
static inline float __half2float(__half x) { return static_cast<float>(x); }
static inline __half __float2half(float x) { return static_cast<__half>(x); }
static inline float2 __half22float2(__half2 x) { return {static_cast<float>(x.x), static_cast<float>(x.y)}; }
static inline __half2 __floats2half2_rn(float x, float y) { return {static_cast<__half>(x), static_cast<__half>(y)}; }
template <class T>
static inline void __stcs(T* to, T value) { *to = value; }
static inline float __fmul_rn(float x, float y) { return x * y; }
static inline float rsqrtf(float x) { return 1.0f / std::sqrt(x); }
static inline int __popc(unsigned x) { return __builtin_popcount(x); }
static inline int __ffs(unsigned x) { return __builtin_ffs(x); }

static thread_local dim3 threadIdx, blockIdx, blockDim, gridDim;

namespace played {
constexpr size_t STACK_BYTES = 96 * 1024, SHARED_BYTES = 256 * 1024;
enum Fault { NONE, BARRIERS, UNWAITED_COPY, UNALIGNED_COPY };  // as played.py names them
enum Wait { RUN, WARP, BLOCK, GRID, DONE };
struct Copy { void* to; const void* from; int group; };
struct Fiber {
    ucontext_t context;  // for its first turn; later ones jump, since swapcontext makes two system calls
    jmp_buf place;
    bool begun, is_free;  // free: it has run its thread to the end, and waits for one of another block
    dim3 index;
    Wait wait;
    std::vector<Copy> copies;  // asynchronous ones that nobody has waited for
    int groups;
};
struct Slot { unsigned char bytes[64]; };
struct Block {
    Fiber* fibers;
    int count;
    std::vector<Slot> slots;  // what each lane shows to its warp
    ucontext_t start;
    jmp_buf scheduler;
    int current;
    int fault;
    void (*body)(void*);
    void* argument;
};
static thread_local Block* block;
static thread_local unsigned char* dynamic_shared;
static pthread_barrier_t grid_barrier;

struct Room {  // a host thread's, kept from block to block: to make it anew for each costs more than most kernels
    std::vector<Fiber> fibers;
    unsigned char *stacks = nullptr, *shared = nullptr;  // stacks: one for each of the fibers
    ~Room() { std::free(stacks), std::free(shared); }
};
static thread_local Room room;

PLAYED_OWN static inline dim3 place(unsigned i, dim3 of) { return {i % of.x, i / of.x % of.y, i / (of.x * of.y)}; }
static inline int lane_of(int thread) { return thread % 32; }
PLAYED_OWN static inline void enter(int which) {
    Fiber& next = block->fibers[which];
    block->current = which;
    threadIdx = next.index;
    if (_setjmp(block->scheduler)) return;
    if (next.begun) _longjmp(next.place, 1);
    next.begun = true;
    swapcontext(&block->start, &next.context);
}
PLAYED_OWN static inline void wait(Wait what) {
    Fiber& self = block->fibers[block->current];
    self.wait = what;
    if (!_setjmp(self.place)) _longjmp(block->scheduler, 1);
    PLAYED_PASSED(what);
}
PLAYED_OWN static void fiber_main() {
    while (true) {  // a thread of each block
        block->body(block->argument);
        Fiber& self = block->fibers[block->current];
        if (!self.copies.empty()) block->fault = UNWAITED_COPY;
        self.is_free = true;
        wait(DONE);
    }
}
// Frees those of [begin, end) that wait for `what`, if all that have not ended do.
PLAYED_OWN static inline bool release(int begin, int end, Wait what) {
    int waiting = 0;
    for (int i = begin; i < end; ++i) {
        Wait now = block->fibers[i].wait;
        if (now == what) ++waiting;
        else if (now != DONE) return false;
    }
    if (!waiting) return false;
    if (what == GRID) pthread_barrier_wait(&grid_barrier);
    for (int i = begin; i < end; ++i)
        if (block->fibers[i].wait == what) block->fibers[i].wait = RUN;
    return true;
}
// The block's fault: threads that wait at different barriers hang on a GPU, or it is undefined what they do.
PLAYED_OWN static int run_block(dim3 where, dim3 grid, dim3 threads, size_t shared_bytes, void (*body)(void*),
                                void* argument, bool reversed) {
    int count = threads.x * threads.y * threads.z;
    if (int(room.fibers.size()) < count) {
        std::free(room.stacks);
        room.stacks = static_cast<unsigned char*>(std::malloc(count * STACK_BYTES));
        room.fibers = std::vector<Fiber>(count);
    }
    Block own{room.fibers.data(), count};
    if (!room.shared) room.shared = static_cast<unsigned char*>(std::aligned_alloc(128, SHARED_BYTES));
    std::memset(room.shared, 0xff, shared_bytes);  // NaN, where a kernel reads what it has not written
    own.slots.resize(count);
    own.body = body;
    own.fault = NONE;
    own.argument = argument;
    dynamic_shared = room.shared;
    block = &own;
    blockIdx = where;
    gridDim = grid;
    blockDim = threads;
    for (int i = 0; i < count; ++i) {
        Fiber& fiber = own.fibers[i];
        fiber.index = place(i, threads);
        fiber.wait = RUN;
        fiber.copies.clear();
        fiber.groups = 0;
        if (fiber.is_free) {
            fiber.is_free = false;
            continue;
        }
        fiber.begun = false;  // it is new, or stuck in the middle of another block
        getcontext(&fiber.context);
        fiber.context.uc_stack.ss_sp = room.stacks + i * STACK_BYTES;
        fiber.context.uc_stack.ss_size = STACK_BYTES;
        fiber.context.uc_link = nullptr;
        makecontext(&fiber.context, fiber_main, 0);
    }
    while (true) {
        bool moved = false;
        for (int i = 0; i < count; ++i) {
            int which = reversed ? count - 1 - i : i;
            if (own.fibers[which].wait == RUN) {
                enter(which);
                moved = true;
            }
        }
        for (int begin = 0; begin < count; begin += 32) moved |= release(begin, std::min(begin + 32, count), WARP);
        moved |= release(0, count, BLOCK);
        moved |= release(0, count, GRID);
        if (!moved) break;
    }
    for (int i = 0; i < count; ++i)
        if (own.fibers[i].wait != DONE) return BARRIERS;
    return own.fault;
}
static int run_grid(dim3 grid, dim3 threads, size_t shared_bytes, bool cooperative, bool reversed, void (*body)(void*), void* argument) {
    unsigned count = grid.x * grid.y * grid.z;
    int failed = 0;
    if (!cooperative) {
        for (unsigned i = 0; i < count; ++i)
            failed = failed ? failed : run_block(place(i, grid), grid, threads, shared_bytes, body, argument, reversed);
        return failed;
    }
    pthread_barrier_init(&grid_barrier, nullptr, count);
    std::vector<std::thread> blocks;
    std::vector<int> results(count);
    for (unsigned i = 0; i < count; ++i)
        blocks.emplace_back([=, &results] {
            results[i] = run_block(place(i, grid), grid, threads, shared_bytes, body, argument, reversed);
        });
    for (auto& each : blocks) each.join();
    pthread_barrier_destroy(&grid_barrier);
    for (int result : results) failed = failed ? failed : result;
    return failed;
}
template <class... A>
struct Call { void (*kernel)(A...); void** arguments; };
template <class... A, size_t... I>
static void apply(Call<A...>* call, std::index_sequence<I...>) {
    call->kernel(*static_cast<std::remove_cv_t<A>*>(call->arguments[I])...);
}
template <class... A>
static void body(void* call) { apply(static_cast<Call<A...>*>(call), std::index_sequence_for<A...>{}); }
template <class... A>
static int launch(void (*kernel)(A...), const unsigned* sizes, int cooperative, int reversed, void** arguments) {
    Call<A...> call{kernel, arguments};
    return run_grid({sizes[0], sizes[1], sizes[2]}, {sizes[3], sizes[4], sizes[5]}, sizes[6], cooperative, reversed,
                    body<A...>, &call);
}
// What every lane of the warp shows, for as long as `read` runs.
template <class T, class Read>
static inline auto exchange(const T& mine, Read read) {
    static_assert(sizeof(T) <= sizeof(Slot), "a slot is too small");
    int self = block->current;
    std::memcpy(&block->slots[self], &mine, sizeof(T));
    wait(WARP);
    const Slot* warp = &block->slots[self - lane_of(self)];
    auto result = read([warp](int lane) { T shown; std::memcpy(&shown, &warp[lane], sizeof(T)); return shown; });
    wait(WARP);
    return result;
}
template <class T, class U>
static inline T add(T* to, U value) {  // whole: blocks of a cooperative launch run at the same time
    T before, after;
    __atomic_load(to, &before, __ATOMIC_SEQ_CST);
    do after = before + static_cast<T>(value);
    while (!__atomic_compare_exchange(to, &before, &after, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST));
    return before;
}
}  // namespace played

#define PLAY(name)                                                                                            \
    extern "C" int played_##name(const unsigned* sizes, int cooperative, int reversed, void** arguments) {    \
        return played::launch(name, sizes, cooperative, reversed, arguments);                                 \
    }

static inline void __syncthreads() { played::wait(played::BLOCK); }
static inline void __syncwarp() { played::wait(played::WARP); }
static inline void __threadfence() { __atomic_thread_fence(__ATOMIC_SEQ_CST); }
static inline void grid_sync() { played::wait(played::GRID); }
template <class T, class U>
static inline T atomicAdd(T* to, U value) { return played::add(to, value); }
template <class T>
static inline T __shfl_sync(unsigned, T mine, int lane) {
    return played::exchange(mine, [=](auto shown) { return shown(lane % 32); });
}
template <class T>
static inline T __shfl_down_sync(unsigned, T mine, int by) {
    int lane = played::lane_of(played::block->current);
    return played::exchange(mine, [=](auto shown) { return lane + by < 32 ? shown(lane + by) : mine; });
}
template <class T>
static inline T __shfl_up_sync(unsigned, T mine, int by) {
    int lane = played::lane_of(played::block->current);
    return played::exchange(mine, [=](auto shown) { return lane - by >= 0 ? shown(lane - by) : mine; });
}
template <class T>
static inline T __shfl_xor_sync(unsigned, T mine, int by) {
    int lane = played::lane_of(played::block->current);
    return played::exchange(mine, [=](auto shown) { return shown(lane ^ by); });
}
static inline unsigned __ballot_sync(unsigned, bool mine) {
    int first = played::block->current - played::lane_of(played::block->current);
    int lanes = std::min(32, played::block->count - first);
    return played::exchange(mine, [=](auto shown) {
        unsigned bits = 0;
        for (int lane = 0; lane < lanes; ++lane) bits |= unsigned(shown(lane)) << lane;
        return bits;
    });
}
static inline void copy_async_16(void* shared, const void* global) {
    played::Fiber& self = played::block->fibers[played::block->current];
    if (reinterpret_cast<uintptr_t>(shared) % 16 || reinterpret_cast<uintptr_t>(global) % 16) {
        played::block->fault = played::UNALIGNED_COPY;
        return;
    }
    self.copies.push_back({shared, global, self.groups});
}
static inline void copy_async_commit() { ++played::block->fibers[played::block->current].groups; }
template <int PENDING>
static inline void copy_async_wait() {
    played::Fiber& self = played::block->fibers[played::block->current];
    std::vector<played::Copy> later;
    for (const played::Copy& copy : self.copies)
        if (copy.group < self.groups - PENDING) std::memcpy(copy.to, copy.from, 16);
        else later.push_back(copy);
    self.copies = later;
}
static inline unsigned played_pair(const __half* row, int at, int stride) {
    __half pair[2] = {row[at], row[at + stride]};
    unsigned bits;
    std::memcpy(&bits, pair, 4);
    return bits;
}
static inline void load_matrices(unsigned (&to)[4], const void* row) {
    int lane = played::lane_of(played::block->current);
    played::exchange(row, [&](auto shown) {
        for (int i = 0; i < 4; ++i)
            to[i] = played_pair(static_cast<const __half*>(shown(8 * i + lane / 4)), 2 * (lane % 4), 1);
        return 0;
    });
}
static inline void load_matrices_transposed(unsigned (&to)[4], const void* row) {
    int lane = played::lane_of(played::block->current);
    played::exchange(row, [&](auto shown) {
        for (int i = 0; i < 4; ++i) {
            const __half* first = static_cast<const __half*>(shown(8 * i + 2 * (lane % 4)));
            const __half* second = static_cast<const __half*>(shown(8 * i + 2 * (lane % 4) + 1));
            __half pair[2] = {first[lane / 4], second[lane / 4]};
            std::memcpy(&to[i], pair, 4);
        }
        return 0;
    });
}
static inline void mma_16x8x16(float (&d)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
    struct Operands { __half a[8], b[4]; } mine;
    std::memcpy(mine.a, a, 16);
    std::memcpy(&mine.b[0], &b0, 4);
    std::memcpy(&mine.b[2], &b1, 4);
    int row = played::lane_of(played::block->current) / 4, col = 2 * (played::lane_of(played::block->current) % 4);
    played::exchange(mine, [&](auto shown) {
        for (int i = 0; i < 4; ++i) {
            int m = row + 8 * (i / 2), n = col + i % 2;
            for (int k = 0; k < 16; ++k) {
                int part = (m / 8 ? 2 : 0) + (k >= 8 ? 4 : 0) + k % 2;  // a0 a1: row, a2 a3: row + 8, a4.. columns + 8
                __half left = shown(m % 8 * 4 + k % 8 / 2).a[part];
                __half right = shown(n * 4 + k % 8 / 2).b[(k >= 8 ? 2 : 0) + k % 2];
                d[i] += static_cast<float>(left) * static_cast<float>(right);
            }
        }
        return 0;
    });
}
// A fragment's elements lie 8 to a lane in the matrix's order: where CUDA puts them is its own affair.
namespace nvcuda::wmma {
struct matrix_a {};
struct matrix_b {};
struct accumulator {};
struct row_major {};
enum layout_t { mem_row_major };
template <class Use, int M, int N, int K, class T, class Layout = void>
struct fragment { T x[8]; };
template <class F>
static inline void fill_fragment(F& to, float value) { for (auto& each : to.x) each = value; }
static inline int element(int i) { return 8 * played::lane_of(played::block->current) + i; }
template <class F, class T>
static inline void load_matrix_sync(F& to, const T* from, unsigned stride) {
    for (int i = 0; i < 8; ++i) to.x[i] = from[element(i) / 16 * stride + element(i) % 16];
    __syncwarp();
}
template <class D, class A, class B>
static inline void mma_sync(D& d, const A& a, const B& b, const D& c) {
    struct Operands { __half a[8], b[8]; } mine;
    std::memcpy(mine.a, a.x, 16);
    std::memcpy(mine.b, b.x, 16);
    played::exchange(mine, [&](auto shown) {
        for (int i = 0; i < 8; ++i) {
            int row = element(i) / 16, col = element(i) % 16;
            float sum = c.x[i];
            for (int k = 0; k < 16; ++k)
                sum += static_cast<float>(shown((16 * row + k) / 8).a[k % 8]) *
                       static_cast<float>(shown((16 * k + col) / 8).b[col % 8]);
            d.x[i] = sum;
        }
        return 0;
    });
}
template <class F>
static inline void store_matrix_sync(float* to, const F& from, unsigned stride, layout_t) {
    for (int i = 0; i < 8; ++i) to[element(i) / 16 * stride + element(i) % 16] = from.x[i];
    __syncwarp();
}
}  // namespace nvcuda::wmma

static inline unsigned long long load_acquire(const unsigned long long* from) {
    return __atomic_load_n(from, __ATOMIC_ACQUIRE);
}
static inline void store_release(unsigned long long* to, unsigned long long value) {
    __atomic_store_n(to, value, __ATOMIC_RELEASE);
}
