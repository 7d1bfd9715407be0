// What a GPT-2 step needs beside the other ladders, forward and backward, in fp32. Every kernel writes all of its outputs;
// only encoder_backward adds to what is there. Rows are tokens: (batch, time, channels) is one matrix of batch * time rows.
#include "block.cuh"

// encoder: the token's row of wte and the position's row of wpe, added up

extern "C" __global__ void encoder_forward(const long long* tokens, const float* wte, const float* wpe, float* out,
                                           long long time, long long channels, long long count) {
    long long i = blockIdx.x * (long long)blockDim.x + threadIdx.x;
    if (i >= count) return;
    long long row = i / channels, at = i % channels;
    out[i] = wte[tokens[row] * channels + at] + wpe[row % time * channels + at];
}

// A token may stand in many places: their gradients meet in one row of wte, by atomic additions.
extern "C" __global__ void encoder_backward_tokens(const long long* tokens, const float* d_out, float* d_wte,
                                                   long long channels, long long count) {
    long long i = blockIdx.x * (long long)blockDim.x + threadIdx.x;
    if (i < count) atomicAdd(d_wte + tokens[i / channels] * channels + i % channels, d_out[i]);
}

// A position stands once in every sequence: one thread adds up its element over the batch, in a fixed order.
extern "C" __global__ void encoder_backward_positions(const float* d_out, float* d_wpe, long long batch, long long size) {
    long long i = blockIdx.x * (long long)blockDim.x + threadIdx.x;
    if (i >= size) return;  // size = time * channels
    float total = 0.0f;
    for (long long b = 0; b < batch; ++b) total += d_out[b * size + i];
    d_wpe[i] = total;
}

// layer norm: a warp takes a row, and keeps its mean and scale for the way back

extern "C" __global__ void norm_forward(const float* x, const float* weight, const float* bias, float* y, float* means,
                                        float* scales, long long rows, long long cols, float eps) {
    int lane = threadIdx.x % 32;
    long long row = (blockIdx.x * (long long)blockDim.x + threadIdx.x) / 32;
    if (row >= rows) return;
    x += row * cols, y += row * cols;
    float sum = 0.0f, squares = 0.0f;
    for (long long i = lane; i < cols; i += 32) sum += x[i];
    float mean = warp_sum(sum) / cols;
    for (long long i = lane; i < cols; i += 32) squares += (x[i] - mean) * (x[i] - mean);
    float scale = rsqrtf(warp_sum(squares) / cols + eps);
    for (long long i = lane; i < cols; i += 32) y[i] = (x[i] - mean) * scale * weight[i] + bias[i];
    if (lane == 0) means[row] = mean, scales[row] = scale;
}

// Of x: what would only move the row's mean or its spread is taken out of the gradient.
extern "C" __global__ void norm_backward_x(const float* d_y, const float* x, const float* weight, const float* means,
                                           const float* scales, float* d_x, long long rows, long long cols) {
    int lane = threadIdx.x % 32;
    long long row = (blockIdx.x * (long long)blockDim.x + threadIdx.x) / 32;
    if (row >= rows) return;
    d_y += row * cols, x += row * cols, d_x += row * cols;
    float mean = means[row], scale = scales[row], sum = 0.0f, along = 0.0f;
    for (long long i = lane; i < cols; i += 32) {
        float g = __fmul_rn(d_y[i], weight[i]);
        sum += g, along += g * ((x[i] - mean) * scale);
    }
    sum = warp_sum(sum) / cols, along = warp_sum(along) / cols;
    for (long long i = lane; i < cols; i += 32)
        d_x[i] = scale * (__fmul_rn(d_y[i], weight[i]) - sum - (x[i] - mean) * scale * along);  // rounded as it was summed
}

// Sums over rows: 32 columns a block, so that a warp reads 128 bytes side by side; each of its 8 warps takes every eighth
// row, and shared memory brings the 8 together. One chain over a thousand rows had 2.5 to 4.6 times PyTorch's error: what
// an addition loses is kept and added to the next (Kahan's sum), which memory's time hides.
constexpr int LINES = 8;

template <class Value>
__device__ void column_sums(float* out, long long rows, long long cols, Value value) {
    __shared__ float partial[LINES][32];
    int lane = threadIdx.x % 32, line = threadIdx.x / 32;
    long long col = blockIdx.x * 32LL + lane;
    float total = 0.0f, lost = 0.0f;
    if (col < cols)
        for (long long row = line; row < rows; row += LINES) {
            float next = value(row, col) - lost, sum = total + next;
            lost = (sum - total) - next, total = sum;
        }
    partial[line][lane] = total;
    __syncthreads();
    for (int by = LINES / 2; by; by /= 2) {
        if (line < by) partial[line][lane] += partial[line + by][lane];
        __syncthreads();
    }
    if (line == 0 && col < cols) out[col] = partial[0][lane];
    __syncthreads();  // so that the next call may write partial again
}

extern "C" __global__ void sum_of_rows(const float* x, float* out, long long rows, long long cols) {
    column_sums(out, rows, cols, [=](long long row, long long col) { return x[row * cols + col]; });
}

extern "C" __global__ void norm_backward_weight(const float* d_y, const float* x, const float* means, const float* scales,
                                                float* d_weight, float* d_bias, long long rows, long long cols) {
    column_sums(d_weight, rows, cols, [=](long long row, long long col) {
        return __fmul_rn(d_y[row * cols + col], (x[row * cols + col] - means[row]) * scales[row]);
    });
    column_sums(d_bias, rows, cols, [=](long long row, long long col) { return d_y[row * cols + col]; });
}

// The plainest way to the same: every element of every row is added to its column by an atomic addition.
extern "C" __global__ void norm_backward_weight_atomics(const float* d_y, const float* x, const float* means,
                                                        const float* scales, float* d_weight, float* d_bias,
                                                        long long rows, long long cols) {
    long long i = blockIdx.x * (long long)blockDim.x + threadIdx.x, row = i / cols, col = i % cols;
    if (row >= rows) return;
    atomicAdd(d_weight + col, d_y[i] * ((x[i] - means[row]) * scales[row]));
    atomicAdd(d_bias + col, d_y[i]);
}

// attention: qkv is (batch, time, 3, heads, size). A row of scores is one query's, over the keys up to its own place.

struct Head { long long batch, head, heads, time, size, width; };  // one head of one sequence; width = heads * size

__device__ Head head_of(long long index, long long time, long long heads, long long size) {
    return {index / heads, index % heads, heads, time, size, heads * size};
}
// Where its queries (0), keys (1) or values (2) begin; tokens are 3 * width apart, in `out` width.
__device__ long long part(Head at, int which) { return (at.batch * at.time * 3 + which) * at.width + at.head * at.size; }
__device__ long long out_of(Head at) { return at.batch * at.time * at.width + at.head * at.size; }

// As it is written down: all scores into memory, a softmax of each row, and their product with the values.
extern "C" __global__ void attention_scores(const float* qkv, float* scores, long long time, long long heads, long long size,
                                            float scale, long long count) {
    long long i = blockIdx.x * (long long)blockDim.x + threadIdx.x;
    if (i >= count) return;  // count = batch * heads * time * time
    long long key = i % time, query = i / time % time;
    Head at = head_of(i / (time * time), time, heads, size);
    const float *q = qkv + part(at, 0) + query * 3 * at.width, *k = qkv + part(at, 1) + key * 3 * at.width;
    float dot = 0.0f;
    for (long long j = 0; j < size; ++j) dot += q[j] * k[j];
    scores[i] = key <= query ? dot * scale : -INFINITY;
}
extern "C" __global__ void attention_softmax(float* scores, long long rows, long long time) {
    int lane = threadIdx.x % 32;
    long long row = (blockIdx.x * (long long)blockDim.x + threadIdx.x) / 32;
    if (row >= rows) return;
    scores += row * time;
    float most = -INFINITY, sum = 0.0f;
    for (long long i = lane; i < time; i += 32) most = fmaxf(most, scores[i]);
    most = warp_max(most);
    for (long long i = lane; i < time; i += 32) sum += expf(scores[i] - most);
    sum = warp_sum(sum);
    for (long long i = lane; i < time; i += 32) scores[i] = expf(scores[i] - most) / sum;
}
extern "C" __global__ void attention_values(const float* qkv, const float* scores, float* out, long long time,
                                            long long heads, long long size, long long count) {
    long long i = blockIdx.x * (long long)blockDim.x + threadIdx.x;
    if (i >= count) return;  // count = batch * time * heads * size, as out is
    long long j = i % size, head = i / size % heads, query = i / (size * heads) % time;
    Head at = head_of(i / (size * heads * time) * heads + head, time, heads, size);
    const float *v = qkv + part(at, 2) + j, *row = scores + ((at.batch * heads + head) * time + query) * time;
    float total = 0.0f;
    for (long long key = 0; key <= query; ++key) total += row[key] * v[key * 3 * at.width];
    out[i] = total;
}

// A warp takes one query and walks over its keys with a running maximum and sum: no score ever reaches memory. A lane
// holds elements lane, lane + 32, … of the head, HELD of them at most: heads of up to 128.
constexpr int HELD = 4;

__device__ void hold(float (&to)[HELD], const float* from, int lane, long long size) {
    for (int i = 0; i < HELD; ++i) to[i] = lane + 32 * i < size ? from[lane + 32 * i] : 0.0f;
}
__device__ float dot(const float (&a)[HELD], const float (&b)[HELD]) {
    float total = 0.0f;
    for (int i = 0; i < HELD; ++i) total += a[i] * b[i];
    return warp_sum(total);
}

extern "C" __global__ void attention_online(const float* qkv, float* out, float* lse, long long time, long long heads,
                                            long long size, float scale, long long queries) {
    int lane = threadIdx.x % 32;
    long long index = (blockIdx.x * (long long)blockDim.x + threadIdx.x) / 32, query = index % time;
    if (index >= queries) return;  // queries = batch * heads * time
    Head at = head_of(index / time, time, heads, size);
    float q[HELD], k[HELD], v[HELD], total[HELD] = {}, most = -INFINITY, sum = 0.0f;
    hold(q, qkv + part(at, 0) + query * 3 * at.width, lane, size);
    for (long long key = 0; key <= query; ++key) {
        hold(k, qkv + part(at, 1) + key * 3 * at.width, lane, size);
        hold(v, qkv + part(at, 2) + key * 3 * at.width, lane, size);
        float score = dot(q, k) * scale, larger = fmaxf(most, score);
        float shrink = expf(most - larger), weight = expf(score - larger);
        sum = sum * shrink + weight;
        for (int i = 0; i < HELD; ++i) total[i] = total[i] * shrink + weight * v[i];
        most = larger;
    }
    for (int i = 0; i < HELD; ++i)
        if (lane + 32 * i < size) out[out_of(at) + query * at.width + lane + 32 * i] = total[i] / sum;
    if (lane == 0) lse[index] = most + logf(sum);
}

// Back: weights are computed again from the kept logarithm of their sum. A query's warp makes d_q; a key's warp walks over
// the queries behind it and makes d_k and d_v, so that nobody adds to what another writes.
extern "C" __global__ void attention_backward_dots(const float* d_out, const float* out, float* dots, long long rows,
                                                   long long size) {
    int lane = threadIdx.x % 32;
    long long row = (blockIdx.x * (long long)blockDim.x + threadIdx.x) / 32;
    if (row >= rows) return;  // rows = batch * time * heads
    float a[HELD], b[HELD];
    hold(a, d_out + row * size, lane, size), hold(b, out + row * size, lane, size);
    float total = dot(a, b);
    if (lane == 0) dots[row] = total;
}
extern "C" __global__ void attention_backward_q(const float* qkv, const float* d_out, const float* lse, const float* dots,
                                                float* d_qkv, long long time, long long heads, long long size, float scale,
                                                long long queries) {
    int lane = threadIdx.x % 32;
    long long index = (blockIdx.x * (long long)blockDim.x + threadIdx.x) / 32, query = index % time;
    if (index >= queries) return;
    Head at = head_of(index / time, time, heads, size);
    float q[HELD], k[HELD], v[HELD], g[HELD], total[HELD] = {};
    hold(q, qkv + part(at, 0) + query * 3 * at.width, lane, size);
    hold(g, d_out + out_of(at) + query * at.width, lane, size);
    float own = dots[(at.batch * time + query) * heads + at.head];
    for (long long key = 0; key <= query; ++key) {
        hold(k, qkv + part(at, 1) + key * 3 * at.width, lane, size);
        hold(v, qkv + part(at, 2) + key * 3 * at.width, lane, size);
        float weight = expf(dot(q, k) * scale - lse[index]), by = weight * (dot(g, v) - own) * scale;
        for (int i = 0; i < HELD; ++i) total[i] += by * k[i];
    }
    for (int i = 0; i < HELD; ++i)
        if (lane + 32 * i < size) d_qkv[part(at, 0) + query * 3 * at.width + lane + 32 * i] = total[i];
}
extern "C" __global__ void attention_backward_kv(const float* qkv, const float* d_out, const float* lse, const float* dots,
                                                 float* d_qkv, long long time, long long heads, long long size, float scale,
                                                 long long keys) {
    int lane = threadIdx.x % 32;
    long long index = (blockIdx.x * (long long)blockDim.x + threadIdx.x) / 32, key = index % time;
    if (index >= keys) return;
    Head at = head_of(index / time, time, heads, size);
    float q[HELD], k[HELD], v[HELD], g[HELD], to_k[HELD] = {}, to_v[HELD] = {};
    hold(k, qkv + part(at, 1) + key * 3 * at.width, lane, size);
    hold(v, qkv + part(at, 2) + key * 3 * at.width, lane, size);
    for (long long query = key; query < time; ++query) {
        hold(q, qkv + part(at, 0) + query * 3 * at.width, lane, size);
        hold(g, d_out + out_of(at) + query * at.width, lane, size);
        float weight = expf(dot(q, k) * scale - lse[index - key + query]);
        float by = weight * (dot(g, v) - dots[(at.batch * time + query) * heads + at.head]) * scale;
        for (int i = 0; i < HELD; ++i) to_k[i] += by * q[i], to_v[i] += weight * g[i];
    }
    for (int i = 0; i < HELD; ++i)
        if (lane + 32 * i < size) {
            d_qkv[part(at, 1) + key * 3 * at.width + lane + 32 * i] = to_k[i];
            d_qkv[part(at, 2) + key * 3 * at.width + lane + 32 * i] = to_v[i];
        }
}

// residual and GELU: nothing but bytes; four elements an access in the second steps

extern "C" __global__ void residual_forward(const float* a, const float* b, float* out, long long count) {
    long long i = blockIdx.x * (long long)blockDim.x + threadIdx.x;
    if (i < count) out[i] = a[i] + b[i];
}
extern "C" __global__ void residual_forward_4(const float4* a, const float4* b, float4* out, long long packs) {
    long long i = blockIdx.x * (long long)blockDim.x + threadIdx.x;
    if (i >= packs) return;
    float4 x = a[i], y = b[i];
    out[i] = make_float4(x.x + y.x, x.y + y.y, x.z + y.z, x.w + y.w);
}

constexpr float ROOT_2_PI = 0.7978845608028654f, CUBIC = 0.044715f;

__device__ float gelu(float x) { return 0.5f * x * (1.0f + tanhf(ROOT_2_PI * (x + CUBIC * x * x * x))); }
__device__ float gelu_slope(float x) {
    float t = tanhf(ROOT_2_PI * (x + CUBIC * x * x * x));
    return 0.5f * (1.0f + t) + 0.5f * x * (1.0f - t * t) * (ROOT_2_PI * (1.0f + 3.0f * CUBIC * x * x));
}
extern "C" __global__ void gelu_forward(const float* x, float* y, long long count) {
    long long i = blockIdx.x * (long long)blockDim.x + threadIdx.x;
    if (i < count) y[i] = gelu(x[i]);
}
extern "C" __global__ void gelu_forward_4(const float4* x, float4* y, long long packs) {
    long long i = blockIdx.x * (long long)blockDim.x + threadIdx.x;
    if (i >= packs) return;
    float4 v = x[i];
    y[i] = make_float4(gelu(v.x), gelu(v.y), gelu(v.z), gelu(v.w));
}
extern "C" __global__ void gelu_backward(const float* d_y, const float* x, float* d_x, long long count) {
    long long i = blockIdx.x * (long long)blockDim.x + threadIdx.x;
    if (i < count) d_x[i] = d_y[i] * gelu_slope(x[i]);
}

// classifier: loss of each row and the gradient of its logits in one kernel. In a step the gradient takes the logits' own
// place, so that the largest tensor is there once. Columns from `vocabulary` on are padding: gradient zero.
extern "C" __global__ void __launch_bounds__(256) classifier(const float* logits, const long long* targets, float* losses,
                                                             float* d_logits, long long vocabulary, long long cols,
                                                             float d_loss) {
    const float* row = logits + blockIdx.x * cols;
    float* to = d_logits + blockIdx.x * cols;
    long long target = targets[blockIdx.x];
    float most = -INFINITY, sum = 0.0f;
    for (long long i = threadIdx.x; i < vocabulary; i += blockDim.x) most = fmaxf(most, row[i]);
    most = block_max(most);
    for (long long i = threadIdx.x; i < vocabulary; i += blockDim.x) sum += expf(row[i] - most);
    sum = block_sum(sum);
    if (threadIdx.x == 0) losses[blockIdx.x] = logf(sum) - (row[target] - most);
    __syncthreads();  // the loss is taken before the logit is written over
    for (long long i = threadIdx.x; i < cols; i += blockDim.x)
        to[i] = i < vocabulary ? (expf(row[i] - most) / sum - (i == target ? 1.0f : 0.0f)) * d_loss : 0.0f;
}

// The same by one pass for maximum and sum: a larger maximum shrinks the sum so far. A row is read twice instead of thrice.
extern "C" __global__ void __launch_bounds__(256) classifier_online(const float* logits, const long long* targets,
                                                                    float* losses, float* d_logits, long long vocabulary,
                                                                    long long cols, float d_loss) {
    const float* row = logits + blockIdx.x * cols;
    float* to = d_logits + blockIdx.x * cols;
    long long target = targets[blockIdx.x];
    float mine = -INFINITY, sum = 0.0f;
    for (long long i = threadIdx.x; i < vocabulary; i += blockDim.x) {
        float x = row[i], larger = fmaxf(mine, x);
        sum = sum * expf(mine - larger) + expf(x - larger), mine = larger;
    }
    float most = block_max(mine);
    sum = block_sum(mine == -INFINITY ? 0.0f : sum * expf(mine - most));  // a thread without an element has none
    if (threadIdx.x == 0) losses[blockIdx.x] = logf(sum) - (row[target] - most);
    __syncthreads();
    for (long long i = threadIdx.x; i < cols; i += blockDim.x)
        to[i] = i < vocabulary ? (expf(row[i] - most) / sum - (i == target ? 1.0f : 0.0f)) * d_loss : 0.0f;
}

// AdamW: one pass over parameter, gradient and both moments; in a step each output takes its input's place. What does not
// depend on the element comes computed in double: 1 - 0.9f alone would be 2.4e-7 away from 0.1.
extern "C" __global__ void adamw(const float* parameter, const float* gradient, const float* first, const float* second,
                                 float* new_parameter, float* new_first, float* new_second, long long count, float keep,
                                 float beta1, float rest1, float beta2, float rest2, float rate, float root, float eps) {
    long long i = blockIdx.x * (long long)blockDim.x + threadIdx.x;
    if (i >= count) return;
    float g = gradient[i], m = beta1 * first[i] + rest1 * g, v = beta2 * second[i] + rest2 * g * g;
    new_first[i] = m, new_second[i] = v;
    new_parameter[i] = parameter[i] * keep - rate * (m / (sqrtf(v) / root + eps));
}

// linear layers: c = a @ b (+ bias), any sizes; a is stored as (m, k) or (k, m), b as (k, n) or (n, k), so that the weight's
// (out, in) and both gradients need no transposed copy. A block of 256 threads makes 64 x 64, a thread 4 x 4. Sums are
// taken 16 products at a time, 16 such sums at a time, and then added up: short chains round less.
constexpr int SIDE = 64, DEEP = 16, PARTS = 16;

template <bool A_TURNED, bool B_TURNED>
__device__ void linear(const float* a, const float* b, const float* bias, float* c, long long m, long long n, long long k) {
    __shared__ float a_tile[DEEP][SIDE + 1], b_tile[DEEP][SIDE + 1];
    long long first_row = blockIdx.y * (long long)SIDE, first_col = blockIdx.x * (long long)SIDE;
    int x = threadIdx.x % 16, y = threadIdx.x / 16, turn = 0;
    float totals[4][4] = {}, parts[4][4] = {};
    for (long long first = 0; first < k; first += DEEP) {
        for (int i = threadIdx.x; i < SIDE * DEEP; i += 256) {  // neighbours in memory by neighbouring threads
            int at = A_TURNED ? i % SIDE : i / DEEP, deep = A_TURNED ? i / SIDE : i % DEEP;
            bool is_there = first_row + at < m && first + deep < k;
            a_tile[deep][at] = is_there ? a[A_TURNED ? (first + deep) * m + first_row + at : (first_row + at) * k + first + deep] : 0.0f;
            at = B_TURNED ? i / DEEP : i % SIDE, deep = B_TURNED ? i % DEEP : i / SIDE;
            is_there = first_col + at < n && first + deep < k;
            b_tile[deep][at] = is_there ? b[B_TURNED ? (first_col + at) * k + first + deep : (first + deep) * n + first_col + at] : 0.0f;
        }
        __syncthreads();
        float sums[4][4] = {};
        for (int deep = 0; deep < DEEP; ++deep) {
            float left[4], right[4];
            for (int i = 0; i < 4; ++i) left[i] = a_tile[deep][y + 16 * i], right[i] = b_tile[deep][x + 16 * i];
            for (int i = 0; i < 4; ++i)
                for (int j = 0; j < 4; ++j) sums[i][j] += left[i] * right[j];
        }
        bool is_full = ++turn % PARTS == 0 || first + DEEP >= k;
        for (int i = 0; i < 4; ++i)
            for (int j = 0; j < 4; ++j) {
                parts[i][j] += sums[i][j];
                if (is_full) totals[i][j] += parts[i][j], parts[i][j] = 0.0f;
            }
        __syncthreads();
    }
    for (int i = 0; i < 4; ++i)
        for (int j = 0; j < 4; ++j) {
            long long row = first_row + y + 16 * i, col = first_col + x + 16 * j;
            if (row < m && col < n) c[row * n + col] = totals[i][j] + (bias ? bias[col] : 0.0f);
        }
}
extern "C" __global__ void __launch_bounds__(256) linear_forward(const float* a, const float* b, const float* bias, float* c,
                                                                 long long m, long long n, long long k) {
    linear<false, true>(a, b, bias, c, m, n, k);
}
extern "C" __global__ void __launch_bounds__(256) linear_backward_x(const float* a, const float* b, float* c, long long m,
                                                                    long long n, long long k) {
    linear<false, false>(a, b, nullptr, c, m, n, k);
}
extern "C" __global__ void __launch_bounds__(256) linear_backward_weight(const float* a, const float* b, float* c, long long m,
                                                                         long long n, long long k) {
    linear<true, false>(a, b, nullptr, c, m, n, k);
}
