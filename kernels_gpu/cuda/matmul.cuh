// out = W x (+ bias) (+ what is there) for quantized weights. Integers inside a block are exact whatever order they are added in, and the
// blocks' floats are added in ascending order, as kernels_cpu/reference.py says: so one row or hundreds at a time give the same bits.
//
// args: 0..3 planes, 4 blocks in a row, 5 rows, 6 activations, 7 their stride, 8 out float32, 9 its stride, 10 bias (0: none), 11 whether
// to add to what is there, 12 word in the head of the number of activations.

struct Product {
    Planes w;
    i64 n_blocks, rows, x, x_stride, out, out_stride;
    const float *bias;
    bool add;
};

DEVICE Product product(Words args) {
    Product p;
    for (int i = 0; i < 4; i++) p.w.p[i] = (const u8 *)args[i];
    p.n_blocks = args[4], p.rows = args[5], p.x = args[6], p.x_stride = args[7], p.out = args[8], p.out_stride = args[9];
    p.bias = (const float *)args[10], p.add = args[11] != 0;
    return p;
}

DEVICE void put(const Product &p, i64 t, i64 r, float acc) {
    float *to = row_of(p.out, p.out_stride, t) + r;
    float v = add_(acc, p.bias ? p.bias[r] : 0.0f);
    *to = p.add ? add_(v, *to) : v;
}

// ---- up to eight activations: a warp takes R rows, a lane one load of each block -----------------------------------------------------

#define WARPS 4
#define LANES_OF_256 8

// The terms of R rows and N activations that one lane's piece gives, into its places among the warp's.
template <class W, int N, int STRIDE>
DEVICE void piece_terms(const Product &p, i64 row_block, i64 piece, i64 t0, i64 tokens, bool live, float2 (*terms)[STRIDE]) {
    int lane = threadIdx.x & 31;
    int q[W::GROUPS][8];
    i64 block = piece / W::PIECES;
    int part = (int)(piece % W::PIECES);
    if (live) W::load(p.w, row_block + block, part, q);
    if constexpr (W::KIND == 256) {
        Scales s[W::GROUPS];
        if (live)
            for (int g = 0; g < W::GROUPS; g++) s[g] = W::scales(p.w, row_block + block, W::group(part, g));
#pragma unroll
        for (int i = 0; i < N; i++) {
            int total = 0, less = 0;
            const u8 *x = (const u8 *)(p.x + smaller_of(t0 + i, tokens - 1) * p.x_stride) + block * SUPER;
            if (live)
                for (int g = 0; g < W::GROUPS; g++) {
                    int group = W::group(part, g);
                    int v[8];
                    codes_32(x + group * 32, v);
                    int2 d = dots(q[g], v);
                    total += s[g].low * d.x + s[g].high * d.y;
                    if (W::MINIMA) {
                        const short *sums = (const short *)(x + 288) + 2 * group;
                        less += s[g].low_minimum * sums[0] + s[g].high_minimum * sums[1];
                    }
                }
            for (int o = 1; o < 4; o <<= 1) {
                total += swap(total, o);
                if (W::MINIMA) less += swap(less, o);
            }
            if (live && !(lane & 3)) {
                float2 d = W::floats(p.w, row_block + block);
                float value = mul_(real(total), d.x);
                if (W::MINIMA) value = fma_(real(less), -d.y, value);
                terms[i][lane >> 2] = float2{value, *(const float *)(x + 256)};
            }
        }
    } else {
        i64 n = p.n_blocks * 32;
#pragma unroll
        for (int i = 0; i < N; i++) {
            if (!live) continue;
            const u8 *x = (const u8 *)(p.x + smaller_of(t0 + i, tokens - 1) * p.x_stride);
            int v[8];
            codes_32(x + block * 32, v);
            int2 d = dots(q[0], v);
            float2 meta = meta_32(x, n, block);
            Terms t = W::terms(p.w, row_block + block, d.x, d.y, meta.x, meta.y);
            for (int k = 0; k < W::STEPS; k++) terms[i][lane * W::STEPS + k] = t.step[k];
        }
    }
}

// Rows first .. first + R of the matrix (row_blocks: blocks before its first) for activations t0 .. t0 + N.
template <class W, int N, int R> DEVICE void warp_rows(const Product &p, i64 row_blocks, i64 first, i64 t0, i64 tokens) {
    const int STEPS = W::KIND == 256 ? LANES_OF_256 : 32 * W::STEPS;  // of one row and activation in one turn
    const int STRIDE = STEPS + 1;                                     // so that lanes read different banks
    __shared__ float2 all[WARPS][R * N][STRIDE];
    int lane = threadIdx.x & 31;
    float2 (*terms)[STRIDE] = all[threadIdx.x >> 5];
    i64 pieces = p.n_blocks * W::PIECES;
    float acc = 0.0f;
    for (i64 from = 0; from < pieces; from += 32) {
        bool live = from + lane < pieces;
#pragma unroll
        for (int r = 0; r < R; r++) {
            i64 row = smaller_of(first + r, p.rows - 1);
            piece_terms<W, N, STRIDE>(p, row_blocks + row * p.n_blocks, from + lane, t0, tokens, live, terms + r * N);
        }
        together();
        int steps = (int)smaller_of(STEPS, (pieces - from) / W::PIECES * W::STEPS);
        if (lane < R * N)
            for (int k = 0; k < steps; k++) acc = fma_(terms[lane][k].x, terms[lane][k].y, acc);
        together();
    }
    i64 row = first + lane / N, t = t0 + lane % N;
    if (lane < R * N && row < p.rows && t < tokens) put(p, t, row, acc);
}

template <class W, int N, int R> DEVICE void matvec(Words args, Words head) {
    Product p = product(args);
    i64 first = ((i64)blockIdx.x * WARPS + (threadIdx.x >> 5)) * R, tokens = head[args[12]];
    if (first >= p.rows) return;
    for (i64 t = 0; t < tokens; t += N) warp_rows<W, N, R>(p, 0, first, t, tokens);
}

// ---- more: tiles of 64 rows and 32 activations, 8 results a thread --------------------------------------------------------------------

#define TILE_M 64
#define TILE_N 32

template <class W> DEVICE void tiles(Words args, Words head) {
    __shared__ int codes[TILE_M][65], given[TILE_N][65];
    __shared__ Scales scales_of[W::KIND == 256 ? TILE_M : 1][8];
    __shared__ float2 floats_of[TILE_M];
    Product p = product(args);
    i64 tokens = head[args[12]], row0 = (i64)blockIdx.x * TILE_M, t0 = (i64)blockIdx.y * TILE_N;
    if (t0 >= tokens) return;
    int tid = threadIdx.x, mine = tid >> 4, column = tid & 15;  // rows mine + 16 i, activations column + 16 j
    i64 groups = p.n_blocks * (W::KIND / 32);
    float acc[4][2] = {};
    for (i64 from = 0; from < groups; from += 8) {
        int n_groups = (int)smaller_of(8, groups - from);
        for (int k = tid; k < TILE_M * (8 / W::GROUPS); k += THREADS) {
            int r = k % TILE_M, piece = k / TILE_M;
            i64 row = smaller_of(row0 + r, p.rows - 1), block = row * p.n_blocks + (W::KIND == 256 ? from / 8 : from + piece);
            if (piece * W::GROUPS >= n_groups) continue;
            int q[W::GROUPS][8];
            W::load(p.w, block, W::KIND == 256 ? piece : 0, q);
            for (int g = 0; g < W::GROUPS; g++) {
                int group = piece;
                if constexpr (W::KIND == 256) {
                    group = W::group(piece, g);
                    scales_of[r][group] = W::scales(p.w, block, group);
                    floats_of[r] = W::floats(p.w, block);
                }
                for (int i = 0; i < 8; i++) codes[r][group * 8 + i] = q[g][i];
            }
        }
        for (int k = tid; k < TILE_N * 64; k += THREADS) {
            int t = k >> 6, i = k & 63;
            const u8 *x = (const u8 *)(p.x + smaller_of(t0 + t, tokens - 1) * p.x_stride);
            if (i < n_groups * 8) given[t][i] = *(const int *)(activations(x, W::KIND, from + (i >> 3)) + 4 * (i & 7));
        }
        barrier();
#pragma unroll
        for (int i = 0; i < 4; i++)
#pragma unroll
            for (int j = 0; j < 2; j++) {
                int r = mine + 16 * i, t = column + 16 * j;
                const u8 *x = (const u8 *)(p.x + smaller_of(t0 + t, tokens - 1) * p.x_stride);
                if constexpr (W::KIND == 256) {
                    int total = 0, less = 0;
                    x += from / 8 * SUPER;
#pragma unroll 2
                    for (int g = 0; g < 8; g++) {
                        int2 d = dots(codes[r] + 8 * g, given[t] + 8 * g);
                        Scales s = scales_of[r][g];
                        total += s.low * d.x + s.high * d.y;
                        if (W::MINIMA) {
                            const short *sums = (const short *)(x + 288) + 2 * g;
                            less += s.low_minimum * sums[0] + s.high_minimum * sums[1];
                        }
                    }
                    float value = mul_(real(total), floats_of[r].x);
                    if (W::MINIMA) value = fma_(real(less), -floats_of[r].y, value);
                    acc[i][j] = fma_(value, *(const float *)(x + 256), acc[i][j]);
                } else {
                    i64 block = smaller_of(row0 + r, p.rows - 1) * p.n_blocks + from;
                    for (int g = 0; g < n_groups; g++) {
                        int2 d = dots(codes[r] + 8 * g, given[t] + 8 * g);
                        float2 meta = meta_32(x, p.n_blocks * 32, from + g);
                        Terms s = W::terms(p.w, block + g, d.x, d.y, meta.x, meta.y);
                        for (int k = 0; k < W::STEPS; k++) acc[i][j] = fma_(s.step[k].x, s.step[k].y, acc[i][j]);
                    }
                }
            }
        barrier();
    }
#pragma unroll
    for (int i = 0; i < 4; i++)
#pragma unroll
        for (int j = 0; j < 2; j++) {
            i64 row = row0 + mine + 16 * i, t = t0 + column + 16 * j;
            if (row < p.rows && t < tokens) put(p, t, row, acc[i][j]);
        }
}

// ---- weights in floats: four threads a row, each one chain of every fourth product ------------------------------------------------------

struct F32 {
    typedef float Value;
    DEVICE float of(float v) { return v; }
};
struct F16 {
    typedef u16 Value;
    DEVICE float of(u16 v) { return half_to_float(v); }
};
struct BF16 {
    typedef u16 Value;
    DEVICE float of(u16 v) { return as_float((int)((u32)v << 16)); }
};

// Rows of the matrix that starts `before` rows into the plane; 4 in args is the number of values in a row.
template <class W, int N> DEVICE void float_rows(const Product &p, i64 before, i64 t0, i64 tokens) {
    int lane = threadIdx.x & 3;
    i64 row = (i64)blockIdx.x * (32 * WARPS / 4) + (threadIdx.x >> 2), n = p.n_blocks, whole = n & -4;
    const typename W::Value *w = (const typename W::Value *)p.w.p[0] + (before + smaller_of(row, p.rows - 1)) * n;
    const float *x[N];
    float acc[N];
    for (int i = 0; i < N; i++) x[i] = row_of(p.x, p.x_stride, smaller_of(t0 + i, tokens - 1)), acc[i] = 0.0f;
#pragma unroll 4
    for (i64 k = lane; k < whole; k += 4) {
        float v = W::of(w[k]);
        for (int i = 0; i < N; i++) acc[i] = fma_(x[i][k], v, acc[i]);
    }
    if (!lane)
        for (i64 k = whole; k < n; k++) {
            float v = W::of(w[k]);
            for (int i = 0; i < N; i++) acc[i] = fma_(x[i][k], v, acc[i]);
        }
    for (int i = 0; i < N; i++) {
        float total = add_(acc[i], swap(acc[i], 1));
        total = add_(total, swap(total, 2));
        if (!lane && row < p.rows && t0 + i < tokens) put(p, t0 + i, row, total);
    }
}

template <class W, int N> DEVICE void floats(Words args, Words head) {
    i64 tokens = head[args[12]], t0 = (i64)blockIdx.y * N;
    if (t0 >= tokens) return;
    float_rows<W, N>(product(args), 0, t0, tokens);
}

// ---- the values themselves --------------------------------------------------------------------------------------------------------------

// For checks: what the planes hold, as float32. A block takes 256 or 32 values; args: 0..3 planes, 4 blocks, 5 out.
template <class W> DEVICE void values(Words args, Words head) {
    Planes w = product(args).w;
    i64 block = blockIdx.x;
    int k = threadIdx.x & 31, piece = threadIdx.x >> 5;
    if (block >= args[4] || piece >= W::PIECES) return;
    int q[W::GROUPS][8];
    W::load(w, block, piece, q);
    for (int g = 0; g < W::GROUPS; g++) {
        float code = real((int)(i8)(q[g][k >> 2] >> 8 * (k & 3))), v;
        int group = 0;
        if constexpr (W::KIND == 256) {
            group = W::group(piece, g);
            Scales s = W::scales(w, block, group);
            float2 d = W::floats(w, block);
            v = mul_(mul_(d.x, real(k < 16 ? s.low : s.high)), code);
            if (W::MINIMA) v = add_(v, -mul_(d.y, real(k < 16 ? s.low_minimum : s.high_minimum)));
        } else {
            // Of one value alone, the step that its half ends in; then the step of the sum, if that is what the second one is.
            Terms t = W::terms(w, block, 1, 1, 1.0f, 1.0f);
            v = mul_(code, t.step[W::HALVES && k >= 16 ? 1 : 0].y);
            if (W::STEPS == 2 && !W::HALVES) v = add_(v, t.step[1].y);
        }
        ((float *)args[5])[block * W::KIND + group * 32 + k] = v;
    }
}
