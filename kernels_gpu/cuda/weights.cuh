// Quantized weights as they lie on the card, and how 32 or 64 of them become bytes that dot4 takes.
//
// K-quants of 144 and 176 bytes lie as in the file. The other types of the file have blocks that no aligned load fits, so their parts lie
// in planes: all blocks' nibbles, then all blocks' scales, and so on (layout.py). Types without a struct of their own are expanded to
// int8 codes when they are loaded: Expanded256, Expanded32.
//
// A struct says: KIND, the kind of activations; GROUPS, groups of 32 values that one `load` gives; PIECES, loads in a block of 256 (K
// kinds); STEPS, multiply-adds of floats that a group ends in (kind 32).

struct Planes {
    const u8 *p[4];
};

DEVICE u32 low_nibbles(u32 v) { return v & 0x0f0f0f0fu; }
DEVICE u32 high_nibbles(u32 v) { return v >> 4 & 0x0f0f0f0fu; }
// Four bytes of 0..127, less a number of at most 127 each.
DEVICE int less(u32 v, u32 number) { return (int)(((v | 0x80808080u) - number * 0x01010101u) ^ 0x80808080u); }
// Four bits to the lowest bits of four bytes.
DEVICE u32 spread(u32 bits) { return (bits & 15) * 0x00204081u & 0x01010101u; }

// ---- blocks of 256 --------------------------------------------------------------------------------------------------------------

// Integer scales of one group of 32, and minima, of either half of 16.
struct Scales {
    int low, high, low_minimum, high_minimum;
};

DEVICE u32 byte_of(u32 word, int i) { return word >> 8 * i & 255; }

// Scale and minimum j of the eight in 12 bytes of six bits each.
DEVICE Scales six_bits(uint4 header, int j) {
    int k = j & 3;
    u32 a = byte_of(header.y, k), b = byte_of(header.z, k), c = byte_of(header.w, k);
    int s = (int)(j < 4 ? a & 63 : (c & 15) | a >> 6 << 4);
    int m = (int)(j < 4 ? b & 63 : c >> 4 | b >> 6 << 4);
    return Scales{s, s, m, m};
}

template <int BYTES, bool FIFTH> struct Nibbles256 {
    static const int KIND = 256, GROUPS = 2, PIECES = 4, STEPS = 1;
    static const bool MINIMA = true;
    DEVICE int group(int piece, int g) { return 2 * piece + g; }

    DEVICE void load(Planes w, i64 block, int piece, int (*q)[8]) {
        const u8 *at = w.p[0] + block * BYTES;
        const uint4 *quants = (const uint4 *)(at + (FIFTH ? 48 : 16) + piece * 32);
        for (int i = 0; i < 2; i++) {
            uint4 v = quants[i];
            u32 words[4] = {v.x, v.y, v.z, v.w};
            u32 fifth[4] = {0, 0, 0, 0};
            if (FIFTH) {
                uint4 f = ((const uint4 *)(at + 16))[i];
                fifth[0] = f.x, fifth[1] = f.y, fifth[2] = f.z, fifth[3] = f.w;
            }
            for (int k = 0; k < 4; k++) {
                q[0][4 * i + k] = (int)(low_nibbles(words[k]) | (fifth[k] >> 2 * piece & 0x01010101u) << 4);
                q[1][4 * i + k] = (int)(high_nibbles(words[k]) | (fifth[k] >> (2 * piece + 1) & 0x01010101u) << 4);
            }
        }
    }

    DEVICE Scales scales(Planes w, i64 block, int group) {
        return six_bits(*(const uint4 *)(w.p[0] + block * BYTES), group);
    }

    DEVICE float2 floats(Planes w, i64 block) {
        u32 both = *(const u32 *)(w.p[0] + block * BYTES);
        return float2{half_to_float((u16)both), half_to_float((u16)(both >> 16))};
    }
};

typedef Nibbles256<144, false> Q4_K;
typedef Nibbles256<176, true> Q5_K;

// Planes: 128 bytes of low nibbles, 64 of upper bits, 16 scales, d f16.
struct Q6_K {
    static const int KIND = 256, GROUPS = 2, PIECES = 4, STEPS = 1;
    static const bool MINIMA = false;
    DEVICE int group(int piece, int g) { return (piece >> 1) * 4 + (piece & 1) + 2 * g; }

    DEVICE void load(Planes w, i64 block, int piece, int (*q)[8]) {
        const uint4 *low = (const uint4 *)(w.p[0] + block * 128 + piece * 32);
        const uint4 *high = (const uint4 *)(w.p[1] + block * 64 + (piece >> 1) * 32);
        int shift = 2 * (piece & 1);
        for (int i = 0; i < 2; i++) {
            uint4 a = low[i], b = high[i];
            u32 nibbles[4] = {a.x, a.y, a.z, a.w}, upper[4] = {b.x, b.y, b.z, b.w};
            for (int k = 0; k < 4; k++) {
                q[0][4 * i + k] = less(low_nibbles(nibbles[k]) | (upper[k] >> shift & 0x03030303u) << 4, 32);
                q[1][4 * i + k] = less(high_nibbles(nibbles[k]) | (upper[k] >> (shift + 4) & 0x03030303u) << 4, 32);
            }
        }
    }

    DEVICE Scales scales(Planes w, i64 block, int group) {
        const i8 *at = (const i8 *)w.p[2] + block * 16 + 2 * group;
        return Scales{at[0], at[1], 0, 0};
    }

    DEVICE float2 floats(Planes w, i64 block) {
        return float2{half_to_float(((const u16 *)w.p[3])[block]), 0.0f};
    }
};

// Planes: 256 codes; 16 scales; 16 minima (or nothing); d and dmin f32.
template <bool MIN> struct Expanded256 {
    static const int KIND = 256, GROUPS = 2, PIECES = 4, STEPS = 1;
    static const bool MINIMA = MIN;
    DEVICE int group(int piece, int g) { return 2 * piece + g; }

    DEVICE void load(Planes w, i64 block, int piece, int (*q)[8]) {
        const uint4 *codes = (const uint4 *)(w.p[0] + block * 256 + piece * 64);
        for (int i = 0; i < 4; i++) {
            uint4 v = codes[i];
            int *to = q[i >> 1] + 4 * (i & 1);
            to[0] = (int)v.x, to[1] = (int)v.y, to[2] = (int)v.z, to[3] = (int)v.w;
        }
    }

    DEVICE Scales scales(Planes w, i64 block, int group) {
        const i8 *at = (const i8 *)w.p[1] + block * 16 + 2 * group;
        const i8 *less = (const i8 *)w.p[2] + block * 16 + 2 * group;
        return Scales{at[0], at[1], MIN ? less[0] : 0, MIN ? less[1] : 0};
    }

    DEVICE float2 floats(Planes w, i64 block) { return ((const float2 *)w.p[3])[block]; }
};

// ---- blocks of 32 ---------------------------------------------------------------------------------------------------------------

// One group; what it ends in is the first, then (STEPS 2) the second of `steps`.
DEVICE void nibbles_16(uint4 v, int *q) {
    u32 words[4] = {v.x, v.y, v.z, v.w};
    for (int k = 0; k < 4; k++) {
        q[k] = (int)low_nibbles(words[k]);
        q[4 + k] = (int)high_nibbles(words[k]);
    }
}

struct Terms {
    float2 step[2];
};

// acc += dot * dx * d: kernels_cpu/reference.py.
DEVICE Terms scaled(int dot, float dx, float d) { return Terms{{float2{mul_(real(dot), dx), d}, float2{0.0f, 0.0f}}}; }

// Planes: nibbles; (fifth bits;) d f16, or d and minimum f16.
template <bool FIFTH, bool MIN> struct Nibbles32 {
    static const int KIND = 32, GROUPS = 1, PIECES = 1, STEPS = MIN ? 2 : 1;
    static const bool HALVES = false;

    DEVICE void load(Planes w, i64 block, int piece, int (*q)[8]) {
        nibbles_16(((const uint4 *)w.p[0])[block], q[0]);
        u32 fifth = FIFTH ? ((const u32 *)w.p[1])[block] : 0;
        for (int k = 0; k < 8; k++) {
            u32 v = (u32)q[0][k];
            if (FIFTH) v |= spread(fifth >> 4 * k) << 4;
            q[0][k] = MIN ? (int)v : less(v, FIFTH ? 16 : 8);
        }
    }

    // sum: the activations' own d times their sum.
    DEVICE Terms terms(Planes w, i64 block, int low, int high, float dx, float sum) {
        if (!MIN) return scaled(low + high, dx, half_to_float(((const u16 *)w.p[2])[block]));
        u32 both = ((const u32 *)w.p[2])[block];
        Terms t = scaled(low + high, dx, half_to_float((u16)both));
        t.step[1] = float2{sum, half_to_float((u16)(both >> 16))};
        return t;
    }
};

typedef Nibbles32<false, false> Q4_0;
typedef Nibbles32<false, true> Q4_1;
typedef Nibbles32<true, false> Q5_0;
typedef Nibbles32<true, true> Q5_1;

DEVICE void codes_32(const u8 *at, int *q) {
    for (int i = 0; i < 2; i++) {
        uint4 v = ((const uint4 *)at)[i];
        q[4 * i] = (int)v.x, q[4 * i + 1] = (int)v.y, q[4 * i + 2] = (int)v.z, q[4 * i + 3] = (int)v.w;
    }
}

// Planes: codes; d f16.
struct Q8_0 {
    static const int KIND = 32, GROUPS = 1, PIECES = 1, STEPS = 1;
    static const bool HALVES = false;
    DEVICE void load(Planes w, i64 block, int piece, int (*q)[8]) { codes_32(w.p[0] + block * 32, q[0]); }
    DEVICE Terms terms(Planes w, i64 block, int low, int high, float dx, float sum) {
        return scaled(low + high, dx, half_to_float(((const u16 *)w.p[1])[block]));
    }
};

// Planes: codes; d f32 of the group, or of either half.
template <bool TWO> struct Expanded32 {
    static const int KIND = 32, GROUPS = 1, PIECES = 1, STEPS = TWO ? 2 : 1;
    static const bool HALVES = TWO;
    DEVICE void load(Planes w, i64 block, int piece, int (*q)[8]) { codes_32(w.p[0] + block * 32, q[0]); }
    DEVICE Terms terms(Planes w, i64 block, int low, int high, float dx, float sum) {
        const float *d = (const float *)w.p[1] + block * (HALVES ? 2 : 1);
        if (!HALVES) return scaled(low + high, dx, d[0]);
        Terms t = scaled(low, dx, d[0]);
        t.step[1] = scaled(high, dx, d[1]).step[0];
        return t;
    }
};

// ---- activations beside them ----------------------------------------------------------------------------------------------------

// Dot products of a group's halves of 16 with 32 activations.
DEVICE int2 dots(const int *q, const int *x) {
    int low = 0, high = 0;
    for (int k = 0; k < 4; k++) {
        low = dot4(q[k], x[k], low);
        high = dot4(q[4 + k], x[4 + k], high);
    }
    return int2{low, high};
}

// Activations 32 i .. 32 i + 31 of a row.
DEVICE const u8 *activations(const u8 *x, int kind, i64 i) { return kind == 256 ? x + (i >> 3) * SUPER + (i & 7) * 32 : x + i * 32; }

// What a float of kind 32 needs of them: d, and d times their sum.
DEVICE float2 meta_32(const u8 *x, i64 n, i64 i) {
    const int *meta = (const int *)(x + ((n + 63) & -64) + i * META);
    return float2{as_float(meta[0]), as_float(meta[1])};
}
