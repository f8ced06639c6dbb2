// The KV cache and attention over its blocks, laid out as kernels_cpu/kv.py says and computed in the order of kernels_cpu/attention.py:
// steps of 64 positions, parts of 512 merged in order. A block of threads takes one kv head of one tile of rows, or one part of that.

#define STEP 64
#define PART 512
#define QUERIES 8
#define BLOCK 16

// ---- how values lie in a block of 16 positions --------------------------------------------------------------------------------------

struct kv_f32 {
    typedef float Value;
    DEVICE float get(float v) { return v; }
    DEVICE float put(float v) { return v; }
};
struct kv_f16 {
    typedef u16 Value;
    DEVICE float get(u16 v) { return half_to_float(v); }
    DEVICE u16 put(float v) { return float_to_half(v); }
};
struct kv_bf16 {
    typedef u16 Value;
    DEVICE float get(u16 v) { return as_float((int)((u32)v << 16)); }
    DEVICE u16 put(float v) {
        u32 bits = (u32)as_int(v);
        return (u16)((bits >> 16) + (((bits & 0xffff) + 0x7fff + (bits >> 16 & 1)) >> 16));
    }
};

template <class T> struct Plain {
    typedef typename T::Value Value;
    static const int UNIT = sizeof(Value);
    DEVICE i64 head_bytes(int n) { return (i64)n * BLOCK * UNIT; }

    // One head's n values to position `slot`; a warp together.
    DEVICE void write_k(i64 part, int slot, const float *source, int n) {
        for (int i = threadIdx.x & 31; i < n; i += 32) ((Value *)part)[i * BLOCK + slot] = T::put(source[i]);
    }
    DEVICE void write_v(i64 part, int slot, const float *source, int n) {
        int wide = (n + 15) & -16;
        for (int i = threadIdx.x & 31; i < n; i += 32) ((Value *)part)[slot * wide + i] = T::put(source[i]);
    }

    // Two queries' products with one key.
    DEVICE float2 dot(i64 part, int slot, int dim, const float *a, const float *b) {
        float2 acc = float2{0.0f, 0.0f};
        const Value *k = (const Value *)part + slot;
#pragma unroll 8
        for (int d = 0; d < dim; d++) {
            float v = T::get(k[d * BLOCK]);
            acc.x = fma_(v, a[d], acc.x);
            acc.y = fma_(v, b[d], acc.y);
        }
        return acc;
    }
    DEVICE float value(i64 part, int slot, int d, int wide) { return T::get(((const Value *)part)[slot * wide + d]); }
};

template <int LEVELS> struct ScaledValues {
    static const int HALF = LEVELS == 7 ? 2 : 1;  // values in a byte
    DEVICE i64 head_bytes(int n) { return n * BLOCK / HALF + n / 32 * BLOCK * 2; }

    // A warp's quant of its 32 values; the scale goes to `at`.
    DEVICE int quantize(float v, u16 *at) {
        float peak = size_of(v);
        for (int o = 16; o; o >>= 1) peak = larger(peak, swap(peak, o));
        u16 bits = float_to_half(div_(peak, (float)LEVELS));
        float d = half_to_float(bits);
        if (!(threadIdx.x & 31)) *at = bits;
        int q = nearest(mul_(v, d > 0.0f ? div_(1.0f, d) : 0.0f));
        return q < -LEVELS ? -LEVELS : q > LEVELS ? LEVELS : q;
    }
    DEVICE void write_k(i64 part, int slot, const float *source, int n) {
        int lane = threadIdx.x & 31;
        u16 *scales = (u16 *)(part + n * BLOCK / HALF);
        for (int g = 0; g < n / 32; g++) {
            int i = g * 32 + lane, q = quantize(source[i], scales + g * BLOCK + slot);
            int other = swap(q, 1);
            if (HALF == 1) ((i8 *)part)[i * BLOCK + slot] = (i8)q;
            else if (!(lane & 1)) ((u8 *)part)[(i >> 1) * BLOCK + slot] = (u8)((q + 8) | (other + 8) << 4);
        }
    }
    DEVICE void write_v(i64 part, int slot, const float *source, int n) {
        int lane = threadIdx.x & 31;
        u16 *scales = (u16 *)(part + n * BLOCK / HALF);
        for (int g = 0; g < n / 32; g++) {
            int i = g * 32 + lane, q = quantize(source[i], scales + slot * (n / 32) + g);
            int other = swap(q, 16);
            if (HALF == 1) ((i8 *)part)[slot * n + i] = (i8)q;
            else if (lane < 16) ((u8 *)part)[slot * (n / 2) + g * 16 + lane] = (u8)((q + 8) | (other + 8) << 4);
        }
    }
    DEVICE float2 dot(i64 part, int slot, int dim, const float *a, const float *b) {
        float2 acc = float2{0.0f, 0.0f};
        const u16 *scales = (const u16 *)(part + dim * BLOCK / HALF);
        for (int g = 0; g < dim / 32; g++) {
            float scale = half_to_float(scales[g * BLOCK + slot]);
#pragma unroll 8
            for (int d = g * 32; d < g * 32 + 32; d++) {
                int q = HALF == 1 ? ((const i8 *)part)[d * BLOCK + slot]
                                  : (((const u8 *)part)[(d >> 1) * BLOCK + slot] >> 4 * (d & 1) & 15) - 8;
                float v = mul_(real(q), scale);  // exact: 8 bits times 11
                acc.x = fma_(v, a[d], acc.x);
                acc.y = fma_(v, b[d], acc.y);
            }
        }
        return acc;
    }
    DEVICE float value(i64 part, int slot, int d, int wide) {
        const u16 *scales = (const u16 *)(part + wide * BLOCK / HALF);
        int q = HALF == 1 ? ((const i8 *)part)[slot * wide + d]
                          : (((const u8 *)part)[slot * (wide / 2) + (d >> 5) * 16 + (d & 15)] >> (d & 16 ? 4 : 0) & 15) - 8;
        return mul_(real(q), half_to_float(scales[slot * (wide / 32) + (d >> 5)]));
    }
};

typedef Plain<kv_f32> cache_f32;
typedef Plain<kv_f16> cache_f16;
typedef Plain<kv_bf16> cache_bf16;
typedef ScaledValues<127> cache_q8_0;
typedef ScaledValues<7> cache_q4_0;

// ---- writing ------------------------------------------------------------------------------------------------------------------------

// One head: its own RMS norm if it has one, then the rotation; a warp together.
DEVICE void prepare(float *x, int dim, const float *weight, float eps, int n_rot, const float *table, bool halves) {
    int lane = threadIdx.x & 31;
    if (weight) {
        float squares = 0.0f;
        if (dim & 15) {
            for (int i = 0; i < dim; i++) squares = add_(squares, mul_(x[i], x[i]));
        } else {
            for (int i = lane & 15; i < dim; i += 16) squares = fma_(x[i], x[i], squares);
            squares = fold(squares);
        }
        float scale = div_(1.0f, root(add_(div_(squares, real(dim)), eps)));
        together();
        for (int i = lane; i < dim; i += 32) x[i] = mul_(mul_(x[i], scale), weight[i]);
        together();
    }
    if (n_rot) {
        rotate_head(x, n_rot, table, halves);
        together();
    }
}

template <class C, int DIM, int DIM_V> DEVICE void rope_kv(Words args, Words head) {
    i64 t = blockIdx.x, n_heads = args[6], n_kv = args[7];
    if (t >= head[TOKENS]) return;
    float *q = row_of(args[0], args[1], t), *k = row_of(args[2], args[3], t), *v = row_of(args[4], args[5], t);
    float eps = number(args[10]), scale = number(args[15]);
    int n_rot = (int)args[11], position = position_of(head, t);
    const float *table = n_rot ? (const float *)head[args[12] / 8] + (i64)position * n_rot : nullptr;
    const int *blocks = (const int *)((const i64 *)head[TABLES])[t];
    i64 layer = head[KV] + (i64)blocks[position >> 4] * head[KV_BLOCK] + args[14];
    i64 k_bytes = C::head_bytes(DIM), v_bytes = C::head_bytes((DIM_V + 15) & -16);
    for (i64 h = threadIdx.x >> 5; h < n_heads + 2 * n_kv; h += THREADS / 32) {
        if (h < n_heads) {
            prepare(q + h * DIM, DIM, (const float *)args[8], eps, n_rot, table, args[13]);
            for (int i = threadIdx.x & 31; i < DIM; i += 32) q[h * DIM + i] = mul_(q[h * DIM + i], scale);
        } else if (h < n_heads + n_kv) {
            i64 g = h - n_heads;
            prepare(k + g * DIM, DIM, (const float *)args[9], eps, n_rot, table, args[13]);
            C::write_k(layer + g * k_bytes, position & 15, k + g * DIM, DIM);
        } else {
            i64 g = h - n_heads - n_kv;
            C::write_v(layer + n_kv * k_bytes + g * v_bytes, position & 15, v + g * DIM_V, DIM_V);
        }
    }
}

// ---- reading ------------------------------------------------------------------------------------------------------------------------

struct Found {
    float peak, sum;
};

DEVICE Found merged(Found old, Found fresh, float *of_old, float *of_fresh) {
    float peak = larger(old.peak, fresh.peak);
    float a = exponential(add_(old.peak, -peak)), b = exponential(add_(fresh.peak, -peak));
    *of_old = a;
    *of_fresh = b;
    return Found{peak, fma_(old.sum, a, mul_(fresh.sum, b))};
}

DEVICE float inverse_of(Found all, const float *sinks, i64 h) {
    float norm = all.sum;
    if (sinks) norm = add_(norm, exponential(add_(sinks[h], -all.peak)));
    return div_(1.0f, norm);
}

DEVICE i64 lowest(i64 position, i64 window) {
    if (window <= 0) return 0;
    i64 first = position + 1 - window;
    return (first > 0 ? first : 0) / STEP * STEP;
}

template <int DIM, int WIDE> struct Room {
    float q[QUERIES][DIM];
    float scores[QUERIES][STEP];
    float out[QUERIES][WIDE], total[QUERIES][WIDE];
    Found state[QUERIES], all[QUERIES];
    float fade[QUERIES], fresh[QUERIES];
    float slope[QUERIES];
    int position[QUERIES];
};

// One step: positions first .. first + 63 for all queries.
template <class C, int DIM, int WIDE, int CAP, int SLOPED>
DEVICE void step(Room<DIM, WIDE> &room, const int *table, i64 keys, i64 values, i64 pool_block, i64 first, i64 last, i64 window, float cap) {
    int tid = threadIdx.x;
    {
        int key = tid & (STEP - 1), a = tid / STEP, b = a + QUERIES / 2;
        i64 start = first + (key & -BLOCK), at = first + key;
        float2 s = float2{0.0f, 0.0f};
        if (start <= last) s = C::dot(keys + (i64)table[start >> 4] * pool_block, key & 15, DIM, room.q[a], room.q[b]);
        float both[2] = {s.x, s.y};
        for (int i = 0; i < 2; i++) {
            int query = i ? b : a;
            i64 position = room.position[query];
            float v = both[i];
            if (CAP) v = mul_(hyperbolic(div_(v, cap)), cap);
            if (SLOPED) v = fma_(add_(real(key & 15), real((int)(start - position))), room.slope[query], v);
            if (at > position || (window > 0 && at < position + 1 - window)) v = MASKED;
            room.scores[query][key] = v;
        }
    }
    barrier();
    {
        int query = tid >> 5, lane = tid & 15;
        float *s = room.scores[query];
        float peak = larger(larger(s[lane], s[lane + 16]), larger(s[lane + 32], s[lane + 48]));
        for (int o = 8; o; o >>= 1) peak = larger(peak, swap(peak, o));
        Found old = room.state[query];
        float fresh = larger(old.peak, peak), total = 0.0f, weights[4];
        for (int b = 0; b < 4; b++) {
            weights[b] = exponential(add_(s[b * 16 + lane], -fresh));
            total = add_(total, weights[b]);
        }
        total = fold(total);
        float fade = exponential(add_(old.peak, -fresh));
        together();
        if ((tid & 31) < 16)
            for (int b = 0; b < 4; b++) s[b * 16 + lane] = weights[b];
        if (!(tid & 31)) {
            room.fade[query] = fade;
            room.state[query] = Found{fresh, fma_(old.sum, fade, total)};
        }
    }
    barrier();
    int n_keys = (int)smaller_of(last + 1 - first, STEP);
    for (int k = tid; k < 2 * WIDE; k += THREADS) {
        int d = k % WIDE, q0 = k / WIDE * (QUERIES / 2);
        float acc[QUERIES / 2];
        for (int i = 0; i < QUERIES / 2; i++) acc[i] = mul_(room.out[q0 + i][d], room.fade[q0 + i]);
        for (int b = 0; b * BLOCK < n_keys; b++) {
            i64 part = values + (i64)table[(first >> 4) + b] * pool_block;
#pragma unroll 4
            for (int i = 0; i < BLOCK && b * BLOCK + i < n_keys; i++) {
                float v = C::value(part, i, d, WIDE);
                for (int j = 0; j < QUERIES / 2; j++) acc[j] = fma_(v, room.scores[q0 + j][b * BLOCK + i], acc[j]);
            }
        }
        for (int i = 0; i < QUERIES / 2; i++) room.out[q0 + i][d] = acc[i];
    }
    barrier();
}

template <int DIM, int WIDE> DEVICE void clear(Room<DIM, WIDE> &room, bool all) {
    for (int i = threadIdx.x; i < QUERIES * WIDE; i += THREADS) (all ? room.total : room.out)[i / WIDE][i % WIDE] = 0.0f;
    if (threadIdx.x < QUERIES) (all ? room.all : room.state)[threadIdx.x] = Found{MASKED, 0.0f};
}

template <class C, int DIM, int DIM_V, int CAP, int SLOPED> DEVICE void attention(Words args, Words head) {
    const int WIDE = (DIM_V + 15) & -16;
    __shared__ Room<DIM, WIDE> room;
    i64 n_heads = args[2], n_kv = args[3], group = n_heads / n_kv, window = args[7];
    i64 tile = blockIdx.x, kv_head = blockIdx.y, part = blockIdx.z, parts = head[PARTS];
    if (tile >= head[N_TILES] || part >= parts) return;
    const int *rows = (const int *)head[TILES] + 2 * tile;
    i64 row0 = rows[0], n_queries = rows[1] * group, k_bytes = C::head_bytes(DIM), v_bytes = C::head_bytes(WIDE);
    const int *table = (const int *)((const i64 *)head[TABLES])[row0];
    i64 keys = head[KV] + args[6] + kv_head * k_bytes, values = head[KV] + args[6] + n_kv * k_bytes + kv_head * v_bytes;
    const float *sinks = (const float *)args[11];
    int tid = threadIdx.x;
    for (i64 base = 0; base < n_queries; base += QUERIES) {
        int queries = (int)smaller_of(n_queries - base, QUERIES);
        barrier();
        for (int k = tid; k < QUERIES * DIM; k += THREADS) {
            i64 v = smaller_of(base + k / DIM, n_queries - 1);
            room.q[k / DIM][k % DIM] = row_of(args[0], args[1], row0 + v / group)[(kv_head * group + v % group) * DIM + k % DIM];
        }
        if (tid < QUERIES) {
            i64 v = smaller_of(base + tid, n_queries - 1);
            room.position[tid] = position_of(head, row0 + v / group);
            room.slope[tid] = SLOPED ? ((const float *)args[12])[kv_head * group + v % group] : 0.0f;
        }
        clear(room, true);
        barrier();
        i64 last = room.position[QUERIES - 1], low = lowest(room.position[0], window);
        i64 end = last + 1;
        if (parts > 1) {
            if (low < part * PART) low = part * PART;
            end = smaller_of(end, (part + 1) * PART);
        }
        bool first_part = true;
        while (low < end || (parts > 1 && first_part)) {
            first_part = false;
            i64 border = smaller_of((low / PART + 1) * PART, end);
            clear(room, false);
            barrier();
            for (; low < border; low += STEP)
                step<C, DIM, WIDE, CAP, SLOPED>(room, table, keys, values, head[KV_BLOCK], low, last, window, number(args[8]));
            low = border;
            if (parts > 1) break;
            if (tid < QUERIES) room.all[tid] = merged(room.all[tid], room.state[tid], &room.fade[tid], &room.fresh[tid]);
            barrier();
            for (int k = tid; k < QUERIES * WIDE; k += THREADS) {
                int i = k / WIDE, d = k % WIDE;
                room.total[i][d] = fma_(room.total[i][d], room.fade[i], mul_(room.out[i][d], room.fresh[i]));
            }
            barrier();
        }
        for (int k = tid; k < queries * WIDE; k += THREADS) {
            int i = k / WIDE, d = k % WIDE;
            i64 h = kv_head * group + (base + i) % group, row = row0 + (base + i) / group;
            if (parts > 1) {
                i64 at = head[PARTIAL] + ((tile * n_heads + kv_head * group + base + i) * parts + part) * (64 + WIDE * 4);
                if (!d) *(Found *)at = room.state[i];
                ((float *)(at + 64))[d] = room.out[i][d];
            } else if (d < DIM_V) {
                row_of(args[4], args[5], row)[h * DIM_V + d] = mul_(room.total[i][d], inverse_of(room.all[i], sinks, h));
            }
        }
    }
}

// Merges the parts that `attention` left, in order: a block is one head of one row.
template <int DIM_V> DEVICE void attention_merge(Words args, Words head) {
    const int WIDE = (DIM_V + 15) & -16;
    i64 n_heads = args[2], tile = blockIdx.x, h = blockIdx.y, parts = head[PARTS];
    if (tile >= head[N_TILES] || parts == 1) return;
    i64 row = ((const int *)head[TILES])[2 * tile], position = position_of(head, row);
    for (int d = threadIdx.x; d < DIM_V; d += THREADS) {
        Found all = Found{MASKED, 0.0f};
        float total = 0.0f;
        for (i64 part = lowest(position, args[7]) / PART; part <= position / PART; part++) {
            i64 at = head[PARTIAL] + ((tile * n_heads + h) * parts + part) * (64 + WIDE * 4);
            float a, b;
            all = merged(all, *(const Found *)at, &a, &b);
            total = fma_(total, a, mul_(((const float *)(at + 64))[d], b));
        }
        row_of(args[4], args[5], row)[h * DIM_V + d] = mul_(total, inverse_of(all, (const float *)args[11], h));
    }
}
