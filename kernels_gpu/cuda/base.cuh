// What all kernels share. A kernel takes two addresses: its int64 arguments, and the step header of kernels_cpu/head.py. Arguments are
// those of the CPU kernel of the same name unless a kernel says otherwise, and so is the arithmetic: the same float32 operations in the
// same order, so that a layer gives the same bits wherever it is computed. Rows are float32 with room up to a multiple of 16, the rest 0.

#define THREADS 256

enum { TOKENS = 0, OUTPUTS = 1, POSITIONS = 3, TABLES = 4, OUTPUT_ROWS = 5, KV = 6, KV_BLOCK = 7, TILES = 8, N_TILES = 9, PARTS = 18,
       PARTIAL = 19 };

// Offsets in rows of quantized activations, see kernels_cpu/activations.py.
#define SUPER 384
#define MOST_OF_16 1023
#define META 28
#define TINY 1e-30f
#define MASKED -1e30f

typedef const i64 *Words;

DEVICE float number(i64 bits) { return as_float((int)bits); }
DEVICE float *row_of(i64 address, i64 stride, i64 t) { return (float *)(address + t * stride); }
DEVICE float larger(float a, float b) { return a > b ? a : b; }
DEVICE float smaller(float a, float b) { return a < b ? a : b; }
DEVICE i64 smaller_of(i64 a, i64 b) { return a < b ? a : b; }
DEVICE float size_of(float a) { return a < 0.0f ? -a : a; }
DEVICE int position_of(Words head, i64 t) { return ((const int *)head[POSITIONS])[t]; }

// Sum over 16 neighbouring lanes, halves onto each other, as the CPU folds its vectors.
DEVICE float fold(float v) {
    for (int o = 8; o; o >>= 1) v = add_(v, swap(v, o));
    return v;
}

// ---- kernels_cpu/math.py --------------------------------------------------------------------------------------------------------

DEVICE float exponential(float asked) {
    float x = smaller(larger(asked, -87.0f), 88.0f);
    int n = nearest(mul_(x, 1.4426950408889634f));
    float r = fma_(real(n), -0.693359375f, x);
    r = fma_(real(n), 2.12194440054690583e-4f, r);
    float p = fma_(r, (float)(1.0 / 5040.0), (float)(1.0 / 720.0));
    p = fma_(p, r, (float)(1.0 / 120.0));
    p = fma_(p, r, (float)(1.0 / 24.0));
    p = fma_(p, r, (float)(1.0 / 6.0));
    p = fma_(p, r, 0.5f);
    p = fma_(p, r, 1.0f);
    p = fma_(p, r, 1.0f);
    return asked > -87.0f ? mul_(p, as_float((n + 127) << 23)) : 0.0f;
}

DEVICE float sigmoid(float x) { return div_(1.0f, add_(1.0f, exponential(-x))); }
DEVICE float hyperbolic(float x) { return fma_(sigmoid(mul_(x, 2.0f)), 2.0f, -1.0f); }

struct silu {
    DEVICE float of(float x) { return mul_(x, sigmoid(x)); }
};
struct gelu_tanh {
    DEVICE float of(float x) {
        float inner = fma_(mul_(mul_(x, x), 0.044715f), x, x);
        return mul_(x, sigmoid(mul_(inner, 1.5957691216057308f)));
    }
};
struct relu {
    DEVICE float of(float x) { return x > 0.0f ? x : 0.0f; }
};
struct relu_squared {
    DEVICE float of(float x) { return x > 0.0f ? mul_(x, x) : 0.0f; }
};
