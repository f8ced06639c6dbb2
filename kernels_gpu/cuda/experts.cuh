// Mixtures of experts: kernels_cpu/experts.py says what each array holds and how ties are broken.

#define LEAST_SUM 6.103515625e-5f

struct Best {
    float value;
    int index;
};

// Index of the largest, the first of equals; a warp together.
DEVICE int best_of(const float *row, int n) {
    Best best = Best{row[0], 0};
    for (int i = threadIdx.x & 31; i < n; i += 32)
        if (row[i] > best.value || (row[i] == best.value && i < best.index)) best = Best{row[i], i};
    for (int o = 16; o; o >>= 1) {
        Best other = Best{swap(best.value, o), swap(best.index, o)};
        if (other.value > best.value || (other.value == best.value && other.index < best.index)) best = other;
    }
    return best.index;
}

DEVICE void drop_groups(float *asked, int n, int n_groups, int n_used) {
    int size = n / n_groups;
    for (int round = 0; round < n_groups - n_used; round++) {
        int worst = -1;
        float least = 0.0f;
        for (int g = 0; g < n_groups; g++) {
            float first = MASKED, second = MASKED;
            for (int i = 0; i < size; i++) {
                float v = asked[g * size + i];
                if (v > first) second = first, first = v;
                else if (v > second) second = v;
            }
            float total = add_(first, second);
            if (first > MASKED && (worst < 0 || total <= least)) worst = g, least = total;
        }
        for (int i = 0; i < size; i++) asked[worst * size + i] = MASKED;
    }
}

// A warp takes one token.
DEVICE void route(Words args, Words head) {
    i64 t = blockIdx.x;
    if (t >= head[TOKENS]) return;
    int n = (int)args[2], k = (int)args[3], lane = threadIdx.x & 31;
    float *scores = row_of(args[0], args[1], t), *asked = row_of(args[12], args[13], t);
    const float *bias = (const float *)args[5];
    int *choices = (int *)args[10] + k * t;
    float *weights = (float *)args[11] + k * t;
    if (args[4] == 0) {
        float peak = MASKED, total = 0.0f;
        for (int i = lane; i < n; i += 32) peak = larger(peak, scores[i]);
        for (int o = 16; o; o >>= 1) peak = larger(peak, swap(peak, o));
        for (int i = lane & 15; i < n; i += 16) total = add_(total, exponential(add_(scores[i], -peak)));
        float inverse = div_(1.0f, fold(total));
        together();
        for (int i = lane; i < n; i += 32) scores[i] = mul_(exponential(add_(scores[i], -peak)), inverse);
    } else if (args[4] == 1) {
        for (int i = lane; i < n; i += 32) scores[i] = sigmoid(scores[i]);
    }
    for (int i = lane; i < n; i += 32) asked[i] = bias ? add_(scores[i], bias[i]) : scores[i];
    together();
    if (!lane && args[8] > args[9]) drop_groups(asked, n, (int)args[8], (int)args[9]);
    together();
    for (int s = 0; s < k; s++) {
        int best = best_of(asked, n);
        together();
        if (!lane) {
            choices[s] = best;
            weights[s] = scores[best];
            asked[best] = 2.0f * MASKED;
        }
        together();
    }
    if (lane) return;
    if (args[4] == 2) {
        float top = weights[0];
        for (int s = 0; s < k; s++) weights[s] = exponential(add_(weights[s], -top));
    }
    float factor = number(args[7]);
    if (args[4] == 2 || args[6]) {
        float total = 0.0f;
        for (int s = 0; s < k; s++) total = add_(total, weights[s]);
        factor = div_(factor, larger(total, LEAST_SUM));
    }
    for (int s = 0; s < k; s++) weights[s] = mul_(weights[s], factor);
}

// One block: every expert's pairs counted, then placed, in ascending order.
DEVICE void sort(Words args, Words head) {
    const int *choices = (const int *)args[0];
    int n = (int)args[1], pairs = (int)(head[TOKENS] * args[2]);
    int *order = (int *)args[3], *places = (int *)args[4], *starts = (int *)args[5], *active = (int *)args[6];
    for (int e = threadIdx.x; e < n; e += THREADS) {
        int count = 0;
        for (int p = 0; p < pairs; p++) count += choices[p] == e;
        starts[e + 1] = count;
    }
    barrier();
    if (!threadIdx.x) {
        int n_active = 0;
        starts[0] = 0;
        for (int e = 0; e < n; e++) {
            if (starts[e + 1]) active[n_active++] = e;
            starts[e + 1] += starts[e];
        }
        *(int *)args[7] = n_active;
    }
    barrier();
    for (int e = threadIdx.x; e < n; e += THREADS) {
        int place = starts[e];
        for (int p = 0; p < pairs; p++)
            if (choices[p] == e) {
                order[place] = p;
                places[p] = place++;
            }
    }
}

// A block: 256 values of one place of the order. Scratch rows are not needed.
DEVICE void gather(Words args, Words head) {
    VALUE_OF(args[2]);
    if (t >= head[TOKENS] * args[12]) return;
    int pair = ((const int *)args[3])[t];
    float v = i < n ? row_of(args[0], args[1], pair / args[12])[i] : 0.0f;
    if (args[13]) v = mul_(v, ((const float *)args[13])[pair]);
    give(args + 4, t, n, i, v);
}

// args: 0..12 as matmul's, bias and out of the first expert; 13 rows from one expert's matrix to the next's in the planes, 14 the first
// expert's first row there, 15 bytes from bias to bias, 16 starts, 17 active, 18 n_active, 19 rows of activations.
struct Chosen {
    bool any;
    i64 before, tokens;
};

DEVICE Chosen choose(Product &p, Words args) {
    if ((i64)blockIdx.y >= *(const int *)args[18]) return Chosen{false, 0, 0};
    i64 e = ((const int *)args[17])[blockIdx.y];
    i64 start = ((const int *)args[16])[e], tokens = ((const int *)args[16])[e + 1] - start;
    p.x += start * p.x_stride;
    p.out += start * p.out_stride;
    if (p.bias) p.bias = (const float *)((i64)p.bias + e * args[15]);
    return Chosen{true, args[14] + e * args[13], tokens};
}

template <class W, int N, int R> DEVICE void expert_matvec(Words args, Words head) {
    Product p = product(args);
    Chosen c = choose(p, args);
    i64 first = ((i64)blockIdx.x * WARPS + (threadIdx.x >> 5)) * R;
    if (!c.any || first >= p.rows) return;
    for (i64 t = 0; t < c.tokens; t += N) warp_rows<W, N, R>(p, c.before * p.n_blocks, first, t, c.tokens);
}

template <class W, int N> DEVICE void expert_floats(Words args, Words head) {
    Product p = product(args);
    Chosen c = choose(p, args);
    if (!c.any) return;
    for (i64 t = 0; t < c.tokens; t += N) float_rows<W, N>(p, c.before, t, c.tokens);
}

DEVICE void combine(Words args, Words head) {
    VALUE_OF(args[2]);
    if (t >= head[TOKENS] || i >= n) return;
    int k = (int)args[5];
    float total = 0.0f;
    for (int s = 0; s < k; s++) {
        i64 pair = t * k + s;
        float weight = args[3] ? ((const float *)args[3])[pair] : 1.0f;
        total = fma_(row_of(args[0], args[1], ((const int *)args[4])[pair])[i], weight, total);
    }
    float *x = row_of(args[6], args[7], t);
    x[i] = args[8] ? fma_(total, number(args[9]), x[i]) : mul_(total, number(args[9]));
}
