// A part of memory that is used again and again, and a stream of other bytes that would push it out of the L2.

// Line i of 128 bytes holds the number of another line: all of them, in an order that no prefetcher guesses
// (a linear congruential sequence, whose period is `lines`, a power of two).
extern "C" __global__ void link_lines(long long* hot, long long lines) {
    long long step = static_cast<long long>(gridDim.x) * blockDim.x;
    for (long long i = blockIdx.x * static_cast<long long>(blockDim.x) + threadIdx.x; i < lines; i += step)
        hot[i * 16] = (i * 1103515245 + 12345) & (lines - 1);
}

// Each thread follows the lines from its own start: every load waits for the one before it.
extern "C" __global__ void follow(const long long* hot, long long* out, long long lines, long long hops) {
    long long line = (blockIdx.x * static_cast<long long>(blockDim.x) + threadIdx.x) * 7919 & (lines - 1);
    for (long long hop = 0; hop < hops; ++hop) line = hot[line * 16];
    if (line < 0) *out = line;  // never: without a use the loads would be left out
}

extern "C" __global__ void pass_through(const float4* x, float* out, long long count) {
    float total = 0;
    long long step = static_cast<long long>(gridDim.x) * blockDim.x;
    for (long long i = blockIdx.x * static_cast<long long>(blockDim.x) + threadIdx.x; i < count; i += step) {
        float4 four = x[i];
        total += four.x + four.y + four.z + four.w;
    }
    if (total == -1.0f) *out = total;
}
