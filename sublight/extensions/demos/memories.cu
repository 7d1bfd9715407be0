// The same lookups in a table of 16 KiB that lies in global, constant, texture or shared memory; and what texture
// units do besides: values between the pixels of an image.

constexpr int ENTRIES = 4096;
constexpr int LOOKUPS = 512;
__constant__ float constant_table[ENTRIES];

// Where lane and round look: every warp at the same few entries in turn, a warp at one entry anywhere, at neighbours
// anywhere, or each lane anywhere.
struct Places {
    unsigned state, offset, mask;
    __device__ Places(long long pattern) {
        unsigned lane = threadIdx.x % 32, warp = (blockIdx.x * blockDim.x + threadIdx.x) / 32;
        state = (pattern == 3 ? warp * 32 + lane : pattern == 0 ? 0 : warp) * 2654435761u + 1;
        offset = pattern == 2 ? lane : 0;
        mask = pattern == 0 ? 255 : ENTRIES - 1;
    }
    __device__ int next() {
        state = state * 1664525u + 1013904223u;
        return ((state >> 12) + offset) & mask;
    }
};

extern "C" __global__ void lookup_global(const float* table, float* out, long long pattern) {
    Places places(pattern);
    float total = 0;
    #pragma unroll 8
    for (int i = 0; i < LOOKUPS; ++i) total += table[places.next()];
    if (total == -1.0f) *out = total;
}

extern "C" __global__ void lookup_constant(float* out, long long pattern) {
    Places places(pattern);
    float total = 0;
    #pragma unroll 8
    for (int i = 0; i < LOOKUPS; ++i) total += constant_table[places.next()];
    if (total == -1.0f) *out = total;
}

extern "C" __global__ void lookup_texture(long long texture, float* out, long long pattern) {
    Places places(pattern);
    float total = 0;
    #pragma unroll 8
    for (int i = 0; i < LOOKUPS; ++i) total += tex1Dfetch<float>(texture, places.next());
    if (total == -1.0f) *out = total;
}

extern "C" __global__ void lookup_shared(const float* table, float* out, long long pattern) {
    __shared__ float held[ENTRIES];
    for (int i = threadIdx.x; i < ENTRIES; i += blockDim.x) held[i] = table[i];
    __syncthreads();
    Places places(pattern);
    float total = 0;
    #pragma unroll 8
    for (int i = 0; i < LOOKUPS; ++i) total += held[places.next()];
    if (total == -1.0f) *out = total;
}

// A square image turned by 30 degrees, values between four pixels. Pixel centres are at 0.5, 1.5, …, as a texture's.
__device__ float2 turned(int x, int y, int side) {
    float u = x - side / 2.0f, v = y - side / 2.0f;
    return make_float2(0.8660254f * u - 0.5f * v + side / 2.0f, 0.5f * u + 0.8660254f * v + side / 2.0f);
}

extern "C" __global__ void turn_by_texture(long long texture, float* out, long long side) {
    int i = blockIdx.x * blockDim.x + threadIdx.x, x = i % side, y = i / side;
    float2 place = turned(x, y, side);
    out[i] = tex2D<float>(texture, place.x, place.y);
}

extern "C" __global__ void turn_by_loads(const float* image, float* out, long long side) {
    int i = blockIdx.x * blockDim.x + threadIdx.x, x = i % side, y = i / side;
    float2 place = turned(x, y, side);
    float u = place.x - 0.5f, v = place.y - 0.5f, left = floorf(u), top = floorf(v);
    int last = side - 1;
    int x0 = min(max(int(left), 0), last), x1 = min(max(int(left) + 1, 0), last);
    int y0 = min(max(int(top), 0), last), y1 = min(max(int(top) + 1, 0), last);
    float a = u - left, b = v - top;
    float above = (1 - a) * image[y0 * side + x0] + a * image[y0 * side + x1];
    float below = (1 - a) * image[y1 * side + x0] + a * image[y1 * side + x1];
    out[i] = (1 - b) * above + b * below;
}

// Values from 0 to 1 that look random.
extern "C" __global__ void fill_image(float* image) {
    unsigned i = blockIdx.x * blockDim.x + threadIdx.x, mixed = i * 2654435761u;
    image[i] = ((mixed ^ (mixed >> 15)) * 2246822519u >> 8) / 16777216.0f;
}

extern "C" __global__ void largest_difference(const float* a, const float* b, int* most) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    atomicMax(most, __float_as_int(fabsf(a[i] - b[i])));  // of positive floats the bits are in the numbers' order
}
