// A learner's CUDA C++ on a CPU, under watch: `played.h` runs the kernels, and every access is looked at.
//
// GCC's -fsanitize=thread puts a call before each load and store; the calls are answered here, not by its own library.
// Tensors lie between stretches of memory that nobody may touch, so an index that is out of bounds is seen before it
// does harm: its thread ends there. Shared memory has a section of its own; of each place the last reader and writer
// are known, and how many barriers they had passed.
#pragma once
namespace watched { static void passed(int what); }
#define PLAYED_PASSED(what) watched::passed(what)
#define PLAYED_OWN __attribute__((no_sanitize("thread"), noinline))
#include "played.h"

#include <stdio.h>
#include <time.h>

#undef __shared__
#define __shared__ static __attribute__((section("played_shared")))
#define __constant__ static
#define __restrict __restrict__
extern "C" unsigned char __start_played_shared[] __attribute__((weak));
extern "C" unsigned char __stop_played_shared[] __attribute__((weak));
#define UNWATCHED PLAYED_OWN

using cudaStream_t = void*;
using cudaError_t = int;
constexpr int cudaSuccess = 0;
#define __expf expf  // the C library has names of its own like these
#define __logf logf
static inline float __fdividef(float x, float y) { return x / y; }
static inline float __frsqrt_rn(float x) { return 1.0f / std::sqrt(x); }
template <class T>
static inline T __ldg(const T* from) { return *from; }
static inline cudaError_t cudaGetLastError() { return cudaSuccess; }
static inline cudaError_t cudaDeviceSynchronize() { return cudaSuccess; }

namespace watched {
constexpr int MOST_BUFFERS = 16, MOST_NOTES = 24, MOST_LAUNCHES = 64, MOST_THREADS = 1024, MOST_PARTS = 136;
enum Kind { OUT_OF_BOUNDS, INPUT_WRITTEN, RACE, UNWRITTEN, SHARED_RACE, SHARED_UNWRITTEN, ON_HOST, MISALIGNED,
            BAD_LAUNCH, BARRIERS };  // as play.py names them
struct Seen { int launch, block, thread, epoch; };
struct Buffer {
    unsigned char* at;
    long long bytes;
    int item, is_output;
    Seen* writers;  // of each element of an output
};
struct Note { int kind, buffer, block, thread, other, is_write, line; long long place; void* pc; };
struct Launch { char text[768]; int blocks, ran; int* counts; };  // counts: elements stored, by output and block
struct Cell { int block, writer, writer_epoch, writer_turn, reader, reader_epoch, reader_turn; };
constexpr unsigned UNWRITTEN_BITS = 0x7fc0deadu;  // NaN, and not the poison of tensors
constexpr long long GUARD_BYTES = 256ll << 20;

static Buffer buffers[MOST_BUFFERS];
static int buffer_count, output_count, launch_count, note_count, block_serial, has_atomics, is_inside, is_reversed;
static int sample_parts, sample_least;
static double sample_s;
static unsigned long long luck;
static Note notes[MOST_NOTES];
static Launch launches[MOST_LAUNCHES];
static int epochs[MOST_THREADS], turns[MOST_THREADS];  // barriers of the block, of the warp, that each thread passed
static int here_block, here_run;
static Cell* shared_cells;
static size_t shared_bytes;
static unsigned char* dynamic_at;  // where dynamic shared memory begins

UNWATCHED static void note(Kind kind, int buffer, long long place, int other, int is_write, void* pc, int line = 0) {
    for (int i = 0; i < note_count; ++i)
        if (notes[i].kind == kind && notes[i].pc == pc && notes[i].buffer == buffer) return;
    if (note_count == MOST_NOTES) return;
    int thread = is_inside ? played::block->current : 0;
    notes[note_count++] = {kind, buffer, here_block, thread, other, is_write, line, place, pc};
}
UNWATCHED static void passed(int what) {
    if (what == played::BLOCK || what == played::GRID) ++epochs[played::block->current];
    else if (what == played::WARP) ++turns[played::block->current];
}
UNWATCHED static void end_thread() {  // it would reach memory that is not there
    played::block->fibers[played::block->current].copies.clear();
    played::wait(played::DONE);
}
UNWATCHED static bool is_ordered(int other, int other_epoch, int other_turn) {
    int me = played::block->current;
    if (other == me || other_epoch != epochs[me]) return true;
    return other / 32 == me / 32 && other_turn != turns[me];
}
UNWATCHED static void of_shared(size_t at, bool is_write, void* pc) {
    Cell& cell = shared_cells[at];
    int me = played::block->current;
    if (cell.block != block_serial) cell = {block_serial, -1, 0, 0, -1, 0, 0};
    bool races = cell.writer >= 0 && !is_ordered(cell.writer, cell.writer_epoch, cell.writer_turn);
    int other = cell.writer;
    if (is_write && !races && cell.reader >= 0 && !is_ordered(cell.reader, cell.reader_epoch, cell.reader_turn)) {
        races = true;
        other = cell.reader;
    }
    if (races) note(SHARED_RACE, -1, at, other, is_write, pc);
    if (!is_write && cell.writer < 0) note(SHARED_UNWRITTEN, -1, at, -1, 0, pc);
    if (is_write) cell.writer = me, cell.writer_epoch = epochs[me], cell.writer_turn = turns[me];
    else if (cell.reader < 0 || is_ordered(cell.reader, cell.reader_epoch, cell.reader_turn))
        cell.reader = me, cell.reader_epoch = epochs[me], cell.reader_turn = turns[me];
}
UNWATCHED static void of_output(int which, long long offset, int size, bool is_write, bool is_atomic, void* pc) {
    Buffer& buffer = buffers[which];
    int me = played::block->current;
    for (long long at = offset / buffer.item; at <= (offset + size - 1) / buffer.item; ++at) {
        Seen& seen = buffer.writers[at];
        bool is_new = seen.launch == 0;
        bool is_other = seen.launch == launch_count && seen.thread >= 0 && (seen.block != here_block || seen.thread != me);
        bool is_apart = seen.block == here_block && seen.epoch != epochs[me];
        if (!is_atomic && is_other && !is_apart) note(RACE, which, at, seen.thread, is_write, pc);
        if (!is_write && is_new) note(UNWRITTEN, which, at, -1, 0, pc);
        if (is_write) {
            seen = {launch_count, here_block, is_atomic ? -1 : me, epochs[me]};
            Launch& launch = launches[launch_count - 1];
            if (launch.counts) ++launch.counts[(which - (buffer_count - output_count)) * launch.blocks + here_run];
        }
    }
}
UNWATCHED static void access(void* p, int size, bool is_write, bool is_atomic, void* pc) {
    unsigned char* at = static_cast<unsigned char*>(p);
    for (int i = 0; i < buffer_count; ++i) {
        long long offset = at - buffers[i].at;
        if (offset < -GUARD_BYTES || offset >= buffers[i].bytes + GUARD_BYTES) continue;
        if (!is_inside) return note(ON_HOST, i, offset / buffers[i].item, -1, is_write, pc);
        if (offset < 0 || offset + size > buffers[i].bytes) {
            note(OUT_OF_BOUNDS, i, offset < 0 ? -1 : offset / buffers[i].item, -1, is_write, pc);
            return end_thread();
        }
        if (is_atomic) has_atomics = 1;
        if (buffers[i].is_output) of_output(i, offset, size, is_write, is_atomic, pc);
        else if (is_write) note(INPUT_WRITTEN, i, offset / buffers[i].item, -1, 1, pc);
        return;
    }
    if (!is_inside || is_atomic) return;
    size_t in_static = at - __start_played_shared, fixed = __stop_played_shared - __start_played_shared;
    if (at >= __start_played_shared && in_static < fixed) of_shared(in_static, is_write, pc);
    else if (at >= dynamic_at && at < dynamic_at + shared_bytes) of_shared(fixed + (at - dynamic_at), is_write, pc);
}
UNWATCHED static double now_s() {
    timespec time;
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &time);
    return time.tv_sec + 1e-9 * time.tv_nsec;
}
UNWATCHED static unsigned drawn(unsigned below) {
    luck = luck * 6364136223846793005ull + 1442695040888963407ull;
    return (luck >> 33) % below;
}
UNWATCHED static bool run_one(unsigned which, int run, dim3 grid, dim3 threads, size_t dynamic, void (*body)(void*), void* call) {
    here_block = which;
    here_run = run;
    ++block_serial;
    std::memset(epochs, 0, sizeof epochs);
    std::memset(turns, 0, sizeof turns);
    for (unsigned char* at = __start_played_shared; at + 4 <= __stop_played_shared; at += 4) std::memcpy(at, &UNWRITTEN_BITS, 4);
    is_inside = 1;
    int fault = played::run_block(played::place(which, grid), grid, threads, dynamic, body, call, is_reversed);
    is_inside = 0;
    if (fault) note(BARRIERS, -1, 0, -1, 0, nullptr);
    return !fault;
}
UNWATCHED static void run_grid(Launch& launch, dim3 grid, dim3 threads, size_t dynamic, void (*body)(void*), void* call) {
    unsigned total = grid.x * grid.y * grid.z;
    unsigned parts = sample_parts && total > unsigned(sample_parts) ? sample_parts : total;
    launch.blocks = parts;
    launch.counts = static_cast<int*>(std::calloc(size_t(parts) * (output_count ? output_count : 1), sizeof(int)));
    size_t fixed = __stop_played_shared - __start_played_shared;
    shared_bytes = dynamic;
    if (!played::room.shared) played::room.shared = static_cast<unsigned char*>(std::aligned_alloc(128, played::SHARED_BYTES));
    dynamic_at = played::room.shared;
    std::free(shared_cells);
    shared_cells = static_cast<Cell*>(std::calloc(fixed + dynamic + 1, sizeof(Cell)));
    double end_s = now_s() + sample_s;
    unsigned order[MOST_PARTS];
    if (parts < total) {
        for (unsigned i = 0; i < parts; ++i) order[i] = i;
        for (unsigned i = parts - 1; i > 2; --i) std::swap(order[i], order[2 + drawn(i - 1)]);  // first, last, then chance
        std::swap(order[1], order[parts - 1]);
    }
    for (unsigned i = 0; i < parts; ++i) {
        unsigned which = i;
        if (parts < total) {
            unsigned long long begin = (unsigned long long)order[i] * total / parts;
            unsigned long long end = (order[i] + 1ull) * total / parts;
            which = i == 0 ? 0 : i == 1 ? total - 1 : begin + drawn(end - begin);
            if (i >= unsigned(sample_least) && now_s() > end_s) break;
        }
        if (!run_one(which, i, grid, threads, dynamic, body, call)) break;
        ++launch.ran;
    }
}
UNWATCHED static int written(char* to, size_t room, const void* pointer) {
    for (int i = 0; i < buffer_count; ++i) {
        long long offset = static_cast<const unsigned char*>(pointer) - buffers[i].at;
        if (offset >= 0 && offset <= buffers[i].bytes) return snprintf(to, room, "[%d, %lld]", i, offset);
    }
    return snprintf(to, room, "[-1, 0]");
}
template <class T>
static int words(char* to, size_t room, const T& value) {
    if constexpr (std::is_pointer_v<T>) return written(to, room, value);
    else if constexpr (std::is_integral_v<T>) return snprintf(to, room, "%lld", static_cast<long long>(value));
    else if constexpr (std::is_floating_point_v<T>) return snprintf(to, room, "\"%.9g\"", static_cast<double>(value));
    else return snprintf(to, room, "null");
}
static inline dim3 sides(dim3 of) { return of; }
static inline dim3 sides(long long of) { return {static_cast<unsigned>(of), 1, 1}; }
struct Config { dim3 grid, threads; size_t shared; };
template <class G, class T>
static inline Config config(G grid, T threads, size_t shared = 0, void* = nullptr) {
    return {sides(grid), sides(threads), shared};
}
template <class... P>
struct Launcher {
    void (*kernel)(P...);
    const char* name;
    Config how;
    void operator()(P... arguments) {
        if (launch_count == MOST_LAUNCHES) return;
        Launch& launch = launches[launch_count++];
        char* to = launch.text;
        char* end = to + sizeof launch.text - 1;
        dim3 g = how.grid, t = how.threads;
        to += snprintf(to, end - to, "{\"name\": \"%s\", \"grid\": [%u, %u, %u], \"threads\": [%u, %u, %u], \"shared\": %zu, \"arguments\": [",
                       name, g.x, g.y, g.z, t.x, t.y, t.z, how.shared);
        int first = 1;
        ((to += first ? 0 : snprintf(to, end - to, ", "), first = 0, to += words(to, end - to, arguments)), ...);
        snprintf(to, end - to, "]");
        launch.ran = launch.blocks = 0;
        unsigned long long threads = 1ull * t.x * t.y * t.z, blocks = 1ull * g.x * g.y * g.z;
        if (!threads || threads > MOST_THREADS || !blocks || g.x > 2147483647u || g.y > 65535 || g.z > 65535)
            return note(BAD_LAUNCH, -1, threads, -1, 0, __builtin_return_address(0));
        std::tuple<std::remove_cv_t<P>...> kept(arguments...);
        std::apply([&](auto&... each) {
            void* pointers[] = {&each..., nullptr};
            played::Call<P...> call{kernel, pointers};
            run_grid(launch, g, t, how.shared, played::body<P...>, &call);
        }, kept);
    }
};
template <class... P>
static inline Launcher<P...> launched(void (*kernel)(P...), const char* name, Config how) { return {kernel, name, how}; }
}  // namespace watched

UNWATCHED static cudaError_t cudaMemsetAsync(void* to, int value, size_t bytes, void* = nullptr) {
    for (int i = 0; i < watched::buffer_count; ++i) {
        watched::Buffer& buffer = watched::buffers[i];
        long long offset = static_cast<unsigned char*>(to) - buffer.at;
        if (offset < 0 || offset >= buffer.bytes) continue;
        if (offset + (long long)bytes > buffer.bytes) {
            watched::note(watched::OUT_OF_BOUNDS, i, buffer.bytes / buffer.item, -1, 1, __builtin_return_address(0));
            return 1;
        }
        if (buffer.is_output)
            for (size_t at = offset / buffer.item; at < (offset + bytes) / buffer.item; ++at) buffer.writers[at] = {-1, 0, -1, 0};
        std::memset(to, value, bytes);
    }
    return cudaSuccess;
}
UNWATCHED static cudaError_t cudaMemset(void* to, int value, size_t bytes) { return cudaMemsetAsync(to, value, bytes); }

extern "C" {
#define WATCHED_SIZE(size)                                                                                             \
    UNWATCHED void __tsan_read##size(void* p) { watched::access(p, size, false, false, __builtin_return_address(0)); }  \
    UNWATCHED void __tsan_write##size(void* p) { watched::access(p, size, true, false, __builtin_return_address(0)); } \
    UNWATCHED void __tsan_unaligned_read##size(void* p) { watched::access(p, size, false, false, __builtin_return_address(0)); } \
    UNWATCHED void __tsan_unaligned_write##size(void* p) { watched::access(p, size, true, false, __builtin_return_address(0)); }
WATCHED_SIZE(1) WATCHED_SIZE(2) WATCHED_SIZE(4) WATCHED_SIZE(8) WATCHED_SIZE(16)
UNWATCHED void __tsan_read_range(void* p, size_t size) { watched::access(p, int(size), false, false, __builtin_return_address(0)); }
UNWATCHED void __tsan_write_range(void* p, size_t size) { watched::access(p, int(size), true, false, __builtin_return_address(0)); }
UNWATCHED void __tsan_init() {}
UNWATCHED void __tsan_func_entry(void*) {}
UNWATCHED void __tsan_func_exit() {}
UNWATCHED void __tsan_vptr_update(void**, void*) {}
UNWATCHED void __tsan_vptr_read(void**) {}
UNWATCHED void __tsan_atomic_thread_fence(int) { __atomic_thread_fence(__ATOMIC_SEQ_CST); }
#define WATCHED_ATOMIC(bits, type)                                                                                     \
    UNWATCHED type __tsan_atomic##bits##_load(const volatile type* p, int) {                                           \
        watched::access((void*)p, sizeof(type), false, true, __builtin_return_address(0));                             \
        return *p;                                                                                                     \
    }                                                                                                                  \
    UNWATCHED void __tsan_atomic##bits##_store(volatile type* p, type value, int) {                                    \
        watched::access((void*)p, sizeof(type), true, true, __builtin_return_address(0));                              \
        *p = value;                                                                                                    \
    }                                                                                                                  \
    UNWATCHED int __tsan_atomic##bits##_compare_exchange_strong(volatile type* p, type* expected, type value, int, int) { \
        watched::access((void*)p, sizeof(type), true, true, __builtin_return_address(0));                              \
        if (*p == *expected) { *p = value; return 1; }                                                                 \
        *expected = *p;                                                                                                \
        return 0;                                                                                                      \
    }                                                                                                                  \
    UNWATCHED int __tsan_atomic##bits##_compare_exchange_weak(volatile type* p, type* expected, type value, int a, int b) { \
        return __tsan_atomic##bits##_compare_exchange_strong(p, expected, value, a, b);                                \
    }                                                                                                                  \
    UNWATCHED type __tsan_atomic##bits##_compare_exchange_val(volatile type* p, type expected, type value, int, int) { \
        watched::access((void*)p, sizeof(type), true, true, __builtin_return_address(0));                              \
        type before = *p;                                                                                              \
        if (before == expected) *p = value;                                                                            \
        return before;                                                                                                 \
    }
WATCHED_ATOMIC(8, unsigned char) WATCHED_ATOMIC(16, unsigned short) WATCHED_ATOMIC(32, unsigned) WATCHED_ATOMIC(64, unsigned long long)

struct WatchedLine { const char* file; unsigned line, column; };
UNWATCHED void __ubsan_handle_type_mismatch_v1(WatchedLine* where, void* p) {
    for (int i = 0; i < watched::buffer_count; ++i) {
        long long offset = static_cast<unsigned char*>(p) - watched::buffers[i].at;
        if (offset >= 0 && offset < watched::buffers[i].bytes)
            watched::note(watched::MISALIGNED, i, offset / watched::buffers[i].item, -1, 0, where, where->line);
    }
}

// What the grader calls.
UNWATCHED void watched_begin(int reversed, int parts, int least, double seconds, unsigned long long seed) {
    for (int i = 0; i < watched::launch_count; ++i) std::free(watched::launches[i].counts), watched::launches[i].counts = nullptr;
    for (int i = 0; i < watched::buffer_count; ++i) std::free(watched::buffers[i].writers);
    watched::buffer_count = watched::output_count = watched::launch_count = watched::note_count = watched::has_atomics = 0;
    watched::is_reversed = reversed;
    watched::sample_parts = parts < watched::MOST_PARTS ? parts : watched::MOST_PARTS;
    watched::sample_least = least;
    watched::sample_s = seconds;
    watched::luck = seed;
}
UNWATCHED void watched_tensor(void* at, long long bytes, int item, int is_output) {
    watched::Seen* writers = is_output ? static_cast<watched::Seen*>(std::calloc(bytes / item + 1, sizeof(watched::Seen))) : nullptr;
    watched::buffers[watched::buffer_count++] = {static_cast<unsigned char*>(at), bytes, item, is_output, writers};
    watched::output_count += is_output;
}
UNWATCHED int watched_note(int which, long long* to) {  // 0: there is no such
    if (which >= watched::note_count) return 0;
    const watched::Note& note = watched::notes[which];
    long long values[] = {note.kind, note.buffer, note.place, note.block, note.thread, note.other, note.is_write, note.line, (long long)note.pc};
    std::memcpy(to, values, sizeof values);
    return 1;
}
UNWATCHED int watched_launches() { return watched::launch_count; }
UNWATCHED const char* watched_launch(int which) { return watched::launches[which].text; }
UNWATCHED int watched_ran(int which) { return watched::launches[which].ran; }
UNWATCHED int watched_count(int which, int output, int run) {
    const watched::Launch& launch = watched::launches[which];
    return launch.counts ? launch.counts[output * launch.blocks + run] : 0;
}
UNWATCHED int watched_has_atomics() { return watched::has_atomics; }
}
