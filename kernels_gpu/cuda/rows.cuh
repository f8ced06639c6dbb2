// Everything that works on one token's row: norms, activation functions, sums, and the forms in which matmuls read rows.

// A quantized value, and what is known of the 32 that it lies among: their scale, the sums of their first and their second 16.
struct Quant {
    float d;
    int q, first, second;
};

// All threads of a warp together; peak: the largest magnitude of the values that share the scale, which becomes `levels`.
DEVICE Quant quantized(float v, float peak, float levels) {
    Quant r;
    float inverse = 0.0f;
    r.d = 0.0f;
    if (peak >= TINY) {
        r.d = div_(peak, levels);
        inverse = div_(levels, peak);
    }
    r.q = nearest(mul_(v, inverse));
    r.first = r.q;
    for (int o = 8; o; o >>= 1) r.first += swap(r.first, o);
    r.second = swap(r.first, 16);
    return r;
}

// What a warp has of 32 values, as int8 with one scale: kind '32' of kernels_cpu/activations.py.
DEVICE void give_32(i64 at, i64 n, i64 i, float v, float peak) {
    Quant r = quantized(v, peak, 127.0f);
    if (i >= n) return;
    ((i8 *)at)[i] = (i8)r.q;
    if (i & 31) return;
    int *meta = (int *)(at + ((n + 63) & -64) + (i >> 5) * META);
    int total = r.first + r.second;
    meta[0] = as_int(r.d);
    meta[1] = as_int(mul_(r.d, real(total)));
    meta[2] = total * -8;
    meta[3] = total * -16;
    meta[4] = total * -128;
    meta[5] = r.first * -16;
    meta[6] = r.second * -16;
}

// What a block of 256 threads has of 256 values: kind '256'.
DEVICE void give_256(i64 at, i64 n, i64 i, float v, float peak) {
    __shared__ float peaks[8];
    __shared__ int sizes[8];
    barrier();
    if (!(i & 31)) peaks[(i >> 5) & 7] = peak;
    barrier();
    for (int w = 0; w < 8; w++) peak = larger(peak, peaks[w]);
    Quant r = quantized(v, peak, 127.0f);
    int size = r.q < 0 ? -r.q : r.q;
    for (int o = 8; o; o >>= 1) size += swap(size, o);
    int other = swap(size, 16);
    if (!(i & 31)) sizes[(i >> 5) & 7] = size < other ? other : size;
    barrier();
    int most = 0;
    for (int w = 0; w < 8; w++) most = most < sizes[w] ? sizes[w] : most;
    if (most > MOST_OF_16) r = quantized(v, peak, 63.0f);
    if (i >= n) return;
    i64 block = at + (i >> 8) * SUPER;
    int k = (int)(i & 255);
    ((i8 *)block)[k] = (i8)r.q;
    if (k == 0) *(float *)(block + 256) = r.d;
    if (k & 31) return;
    ((short *)(block + 264))[k >> 5] = (short)(r.first + r.second);
    ((short *)(block + 288))[k >> 4] = (short)r.first;
    ((short *)(block + 288))[(k >> 4) + 1] = (short)r.second;
    ((int *)(block + 320))[k >> 4] = r.first * -32;
    ((int *)(block + 320))[(k >> 4) + 1] = r.second * -32;
}

// Gives value i of finished row t (all 256 threads, each one of 256 successive values, 0 behind the row's end) to whoever reads it.
DEVICE void give(Words readers, i64 t, i64 n, i64 i, float v) {
    float peak = size_of(v);
    for (int o = 16; o; o >>= 1) peak = larger(peak, swap(peak, o));
    if (readers[0]) give_256(readers[0] + t * readers[1], n, i, v, peak);
    if (readers[2]) give_32(readers[2] + t * readers[3], n, i, v, peak);
    if (readers[4] && i < n) row_of(readers[4], readers[5], t)[i] = v;
}

// ---- norms ----------------------------------------------------------------------------------------------------------------------

#define KEPT 8192

// The row's values where the first warp can read them fast: sums run over 16 lanes in one fixed order.
DEVICE const float *keep(const float *row, i64 n) {
    __shared__ float kept[KEPT];
    if (n > KEPT) return row;
    for (i64 i = threadIdx.x; i < n; i += THREADS) kept[i] = row[i];
    barrier();
    return kept;
}

// Sum of v, or of (v - mean)^2, over 16 lanes: the same in all threads of the block.
template <bool SQUARES> DEVICE float lanes_sum(const float *row, i64 n, float mean) {
    __shared__ float result;
    if (threadIdx.x < 32) {
        float total = 0.0f;
#pragma unroll 8
        for (i64 i = threadIdx.x & 15; i < n; i += 16) {
            float v = SQUARES ? add_(row[i], -mean) : row[i];
            total = SQUARES ? fma_(v, v, total) : add_(total, v);
        }
        total = fold(total);
        if (!threadIdx.x) result = total;
    }
    barrier();
    float all = result;
    barrier();
    return all;
}

DEVICE float rms_scale(const float *row, i64 n, float eps) {
    float mean = div_(lanes_sum<true>(row, n, 0.0f), real((int)n));
    return div_(1.0f, root(add_(mean, eps)));
}

DEVICE void norm(Words args, Words head) {
    i64 t = blockIdx.x, chosen = args[17], n = args[2];
    if (t >= head[chosen ? OUTPUTS : TOKENS]) return;
    i64 at = chosen ? ((const int *)head[chosen / 8])[t] : t;
    const float *row = row_of(args[0], args[1], at);
    const float *weight = (const float *)args[3], *bias = (const float *)args[6];
    float scale = 1.0f, mean = 0.0f, eps = number(args[4]);
    if (args[5]) row = keep(row, n);
    if (args[5] == 1) scale = rms_scale(row, n, eps);
    if (args[5] == 2) {
        mean = div_(lanes_sum<false>(row, n, 0.0f), real((int)n));
        float variance = div_(lanes_sum<true>(row, n, mean), real((int)n));
        scale = div_(1.0f, root(add_(variance, eps)));
    }
    for (i64 first = 0; first < n; first += THREADS) {
        i64 i = first + threadIdx.x;
        float v = 0.0f;
        if (i < n) {
            v = row[i];
            if (args[5] == 2) v = add_(v, -mean);
            if (args[5]) v = mul_(v, scale);
            if (args[5] && weight) v = mul_(v, weight[i]);
            if (args[5] && bias) v = add_(v, bias[i]);
        }
        if (args[7] && i < n) row_of(args[7], args[8], t)[i] = v;
        give(args + 9, t, n, i, v);
    }
}

DEVICE void norm_add(Words args, Words head) {
    i64 t = blockIdx.x, n = args[2];
    if (t >= head[TOKENS]) return;
    const float *y = keep(row_of(args[0], args[1], t), n);
    const float *weight = (const float *)args[3];
    float *x = row_of(args[5], args[6], t);
    float scale = rms_scale(y, n, number(args[4]));
    for (i64 i = threadIdx.x; i < n; i += THREADS) x[i] = add_(x[i], mul_(mul_(y[i], scale), weight[i]));
}

// ---- heads: a warp each ---------------------------------------------------------------------------------------------------------

// Whole vectors of 16 lane by lane, then the rest one by one, as kernels_cpu/heads.py.
template <bool SQUARES> DEVICE float head_sum(const float *x, int n, float mean) {
    float total = 0.0f, rest = 0.0f;
    int whole = n & -16;
    for (int i = threadIdx.x & 15; i < whole; i += 16) {
        float v = SQUARES ? add_(x[i], -mean) : x[i];
        total = SQUARES ? fma_(v, v, total) : add_(total, v);
    }
    for (int i = whole; i < n; i++) {
        float v = SQUARES ? add_(x[i], -mean) : x[i];
        rest = SQUARES ? fma_(v, v, rest) : add_(rest, v);
    }
    return add_(fold(total), rest);
}

DEVICE void norm_heads(Words args, Words head) {
    i64 t = blockIdx.x;
    int n = (int)args[3], kind = (int)args[8], lane = threadIdx.x & 31;
    if (t >= head[TOKENS] * args[9]) return;
    float eps = number(args[7]);
    for (i64 h = threadIdx.x >> 5; h < args[2]; h += THREADS / 32) {
        float *x = row_of(args[0], args[1], t) + h * n;
        const float *weight = args[4] ? (const float *)(args[4] + h * args[5]) : nullptr;
        const float *bias = args[6] ? (const float *)(args[6] + h * args[5]) : nullptr;
        float mean = kind == 2 ? div_(head_sum<false>(x, n, 0.0f), real(n)) : 0.0f;
        float squares = head_sum<true>(x, n, mean);
        float scale = kind == 3 ? div_(1.0f, larger(root(squares), eps)) : div_(1.0f, root(add_(div_(squares, real(n)), eps)));
        together();
        for (int i = lane; i < n; i += 32) {
            float v = mul_(add_(x[i], -mean), scale);
            if (weight) v = mul_(v, weight[i]);
            if (bias) v = add_(v, bias[i]);
            x[i] = v;
        }
    }
}

// Rotates pairs of one head's first n values; table: n / 2 cosines, then as many sines.
DEVICE void rotate_head(float *x, int n, const float *table, bool halves) {
    int half = n >> 1;
    for (int i = threadIdx.x & 31; i < half; i += 32) {
        int a = halves ? i : 2 * i, b = halves ? half + i : 2 * i + 1;
        float p = x[a], q = x[b], c = table[i], s = table[half + i];
        x[a] = fma_(p, c, -mul_(q, s));
        x[b] = fma_(q, c, mul_(p, s));
    }
}

DEVICE void rotate(Words args, Words head) {
    i64 t = blockIdx.x;
    if (t >= head[TOKENS]) return;
    int n = (int)args[4];
    const float *table = (const float *)head[args[5] / 8] + (i64)position_of(head, t) * n;
    for (i64 h = threadIdx.x >> 5; h < args[2]; h += THREADS / 32) rotate_head(row_of(args[0] + h * args[3], args[1], t), n, table, args[6]);
}

// ---- value by value: a block is 256 values of one row -----------------------------------------------------------------------------

#define VALUE_OF(N) i64 i = (i64)blockIdx.x * THREADS + threadIdx.x, n = (N), t = blockIdx.y

// args: as the CPU's, 12 rows a token.
template <class A> DEVICE void gated(Words args, Words head) {
    VALUE_OF(args[3]);
    if (t >= head[TOKENS] * args[12]) return;
    float v = 0.0f;
    if (i < n) {
        float *gate = row_of(args[0], args[2], t);
        gate[i] = v = mul_(A::of(gate[i]), row_of(args[1], args[2], t)[i]);
    }
    give(args + 4, t, n, i, v);
}

// args: as the CPU's, 13 rows a token.
DEVICE void gated_limited(Words args, Words head) {
    VALUE_OF(args[3]);
    if (t >= head[TOKENS] * args[13]) return;
    float limit = number(args[12]), v = 0.0f;
    if (i < n) {
        float *gate = row_of(args[0], args[2], t), g = smaller(gate[i], limit);
        float u = larger(smaller(row_of(args[1], args[2], t)[i], limit), -limit);
        gate[i] = v = mul_(mul_(g, sigmoid(mul_(g, 1.702f))), add_(u, 1.0f));
    }
    give(args + 4, t, n, i, v);
}

// args: as the CPU's, 11 rows a token.
template <class A> DEVICE void activated(Words args, Words head) {
    VALUE_OF(args[2]);
    if (t >= head[TOKENS] * args[11]) return;
    float v = 0.0f;
    if (i < n) {
        float *x = row_of(args[0], args[1], t);
        x[i] = v = A::of(x[i]);
    }
    give(args + 3, t, n, i, v);
}

DEVICE void xielu(Words args, Words head) {
    VALUE_OF(args[2]);
    if (t >= head[TOKENS]) return;
    float v = i < n ? row_of(args[0], args[1], t)[i] : 0.0f;
    float p = number(args[11]), m = number(args[12]), b = number(args[13]), eps = number(args[14]);
    float low = smaller(v, 0.0f);
    float below = mul_(add_(add_(exponential(smaller(low, eps)), -1.0f), -low), m);
    float above = v > 0.0f ? mul_(mul_(v, v), p) : 0.0f;
    v = fma_(v, b, add_(above, below));
    if (i < n) row_of(args[0], args[1], t)[i] = v;
    give(args + 3, t, n, i, v);
}

DEVICE void add(Words args, Words head) {
    VALUE_OF(args[4]);
    if (t >= head[TOKENS] || i >= n) return;
    float scale = args[6] ? sigmoid(*row_of(args[6], args[7], t)) : number(args[5]);
    float *x = row_of(args[2], args[3], t);
    x[i] = fma_(row_of(args[0], args[1], t)[i], scale, x[i]);
}

DEVICE void scale(Words args, Words head) {
    VALUE_OF(args[2]);
    if (t >= head[TOKENS] || i >= n) return;
    float *x = row_of(args[0], args[1], t);
    float v = mul_(x[i], number(args[3]));
    x[i] = args[4] ? mul_(v, ((const float *)args[4])[i]) : v;
}

DEVICE void clamp(Words args, Words head) {
    VALUE_OF(args[2]);
    if (t >= head[TOKENS] || i >= n) return;
    float *x = row_of(args[0], args[1], t), limit = number(args[3]);
    x[i] = larger(smaller(x[i], limit), -limit);
}

DEVICE void scale_by_position(Words args, Words head) {
    VALUE_OF(args[2]);
    if (t >= head[TOKENS] || i >= n) return;
    float *x = row_of(args[0], args[1], t);
    x[i] = mul_(x[i], ((const float *)head[args[3] / 8])[position_of(head, t)]);
}

// args: 0 logits, 1 row stride, 2 n, 3 cap (float bits).
DEVICE void soft_cap(Words args, Words head) {
    VALUE_OF(args[2]);
    if (t >= head[OUTPUTS] || i >= n) return;
    float *x = row_of(args[0], args[1], t), cap = number(args[3]);
    x[i] = mul_(hyperbolic(div_(x[i], cap)), cap);
}
