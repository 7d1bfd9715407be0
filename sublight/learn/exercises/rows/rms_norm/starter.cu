// RMSNorm of each row: out = x / sqrt(mean of x * x + eps) * weight, with the eps that PyTorch takes for float32.

constexpr float EPS = 1.1920929e-07f;

__global__ void rms_norm_kernel(const float* x, const float* weight, float* out, int cols) {
    // TODO: a block has a row; the sum of squares through shared memory, then the results
}

void rms_norm(const float* x, const float* weight, float* out, int rows, int cols) {
    rms_norm_kernel<<<rows, 256>>>(x, weight, out, cols);
}
