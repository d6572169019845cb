#pragma once
#include "formats.h"

/* ---- the matrix unit ----
 * D = A B + C for one or more blocks. What an instruction is lies in struct Matrix, which lowering/matrix.py fills.
 *
 * A and B: a lane holds one row of A (column of B) and K / groups values of k, groups being the lanes that share a row.
 * It holds them in pieces of `chunk` consecutive k, piece by piece, the groups taking turns: element e of group g is k
 * = (e / chunk * groups + g) * chunk + e % chunk. Row r of block b in group g: lane r + rows * (b + blocks * g).
 * D, wave64: registers hold four rows at a time (float64: one), rows * columns / 64 registers a block; wave32: lane =
 * column + 16 * (row / 8), register = row % 8, 16-bit results two rows a register.
 * Sources: AMD CDNA3 ISA guide, chapter 7 (matrix arithmetic), and AMD's matrix instruction calculator for wave64; for
 * CDNA4's doubled K and its f8f6f4 forms, and for gfx1250, Triton's layouts and rocjitsu's mma/layout.h.
 * docs/simulator_witnesses.md tells what confirms each one.
 *
 * Arithmetic. AMD's guides state neither the order of the sums nor their rounding. gfx942: as MMA-Sim found on the
 * hardware (Xie et al., arXiv 2511.10909): f32 and f64 forms are one fused multiply-add a k, k ascending, nearest even,
 * subnormals kept; f16, bf16, xf32 and 8-bit forms sum groups of k (struct Matrix's `fused`) aligned to the largest
 * exponent and truncated, see multiply_fused. Nothing is published on gfx950 and gfx1250: there all forms are computed
 * as the chain.
 */
typedef struct {
    i32 m, n, k, blocks;
    i32 format_a, format_b, format_c, format_d;
    i32 chunk_a, chunk_b;
    i32 cbsz, abid, blgp;         /* wave64: which block of A, which lanes of B */
    i32 negate;                   /* bits: 0 A, 1 B, 2 C, 3 |C| */
    i32 clamp;                    /* saturate the int32 result */
    i32 scale_block;              /* k that share a scale; 0: no scales */
    i32 scale_a, scale_b;         /* wave64: byte of the scale register; wave32: upper half of the lanes */
    i32 scale_format_a, scale_format_b;
    i32 fused;                    /* k that are summed at once, aligned and truncated; 0: a chain of fused multiply-adds */
    i32 sparse;                   /* zeros of A are not there */
} Matrix;
#define MATRIX_WORDS ((int)(sizeof(Matrix) / 4))

#define MAX_SIDE 32
#define MAX_OPERAND (128 * MAX_SIDE) /* values of A or B in one block */

typedef float v16 __attribute__((vector_size(64)));
typedef u32 u16v __attribute__((vector_size(64)));
typedef i32 i16v __attribute__((vector_size(64)));

/* Sixteen codes of a float format with up to 16 bits as the bits of their fp32 values, without branches or tables:
 * several times faster than looking 8-bit codes up. tests/sim/test_matrix_formats.py holds it against tables of its own. */
static inline __attribute__((always_inline)) u16v widen(u16v code, const int bits, const int mantissa, const int bias, const u32 top, const int fnuz) {
    u16v sign = code >> (bits - 1) << 31, magnitude = code & ((1u << (bits - 1)) - 1);
    u16v normal = (magnitude << (23 - mantissa)) + ((u32)(127 - bias) << 23), subnormal;
    v16 small = __builtin_convertvector((i16v)magnitude, v16) * as_float((u32)(127 + 1 - bias - mantissa) << 23);
    memcpy(&subnormal, &small, sizeof small);
    u16v is_small = (u16v)(magnitude < 1u << mantissa), value = (is_small & subnormal) | (~is_small & normal);
    if (fnuz) {
        u16v nan = (u16v)(code == 0x80u);
        return (nan & 0x7fc00000u) | (~nan & (sign | value));
    }
    if (top < (1u << (bits - 1)) - 1) {
        u16v special = (u16v)(magnitude > top), as_special = (magnitude << (23 - mantissa) & 0x7fffffu) | 0x7f800000u;
        if (top == 0x7e) as_special |= 0x400000u; /* e4m3's one NaN */
        value = (special & as_special) | (~special & value);
    }
    return sign | value;
}

/* Values of one block, [k][row]. `rows` is a constant where it is called, `stride` the distance of two k. */
#define SPLIT(BITS, VALUE)                                                                                             \
    for (int piece = 0; piece < pieces; piece++)                                                                       \
        for (int g = 0; g < groups; g++) {                                                                             \
            u32 *o = out + (piece * groups + g) * chunk * stride;                                                      \
            int first = rows * (block + blocks * g);                                                                   \
            for (int j = 0; j < chunk; j++, o += stride) {                                                             \
                int at = (piece * chunk + j) * BITS, shift = at % 32;                                                  \
                for (int x = 0; x < rows; x += 16) {                                                                   \
                    u16v c = {0};                                                                                      \
                    memcpy(&c, in[at / 32] + first + x, bytes);                                                        \
                    c = c >> shift;                                                                                    \
                    if (32 % BITS && shift + BITS > 32) {                                                              \
                        u16v high = {0};                                                                               \
                        memcpy(&high, in[at / 32 + 1] + first + x, bytes);                                             \
                        c |= high << (32 - shift);                                                                     \
                    }                                                                                                  \
                    if (BITS < 32) c &= (1u << (BITS % 32)) - 1;                                                       \
                    c = (VALUE);                                                                                       \
                    memcpy(o + x, &c, bytes);                                                                          \
                }                                                                                                      \
            }                                                                                                          \
        }                                                                                                              \
    break
static inline __attribute__((always_inline)) void decode_rows(u32 *restrict out, const u32 *const *in, const int rows, int stride, int k, int blocks, int block,
                                                              int chunk, int format) {
    int groups = W / (rows * blocks), pieces = k / (groups * chunk);
    const int bytes = rows < 16 ? 4 * rows : 64;
    switch (format) {
    case T_F32: SPLIT(32, c);
    case T_XF32: SPLIT(32, c & 0xffffe000u); /* 10 mantissa bits, cut: MMA-Sim */
    case T_BF16: SPLIT(16, c << 16);
    case T_F16: SPLIT(16, widen(c, 16, 10, 15, 0x7bff, 0));
    case T_FP8: SPLIT(8, widen(c, 8, 3, 7, 0x7e, 0));
    case T_BF8: SPLIT(8, widen(c, 8, 2, 15, 0x7b, 0));
    case T_FP8_FNUZ: SPLIT(8, widen(c, 8, 3, 8, 0x7f, 1));
    case T_BF8_FNUZ: SPLIT(8, widen(c, 8, 2, 16, 0x7f, 1));
    case T_FP6: SPLIT(6, widen(c, 6, 3, 1, 0x1f, 0));
    case T_BF6: SPLIT(6, widen(c, 6, 2, 3, 0x1f, 0));
    case T_FP4: SPLIT(4, widen(c, 4, 1, 1, 7, 0));
    case T_I8: SPLIT(8, (c ^ 0x80) - 0x80);
    case T_U8: SPLIT(8, c);
    }
}
#undef SPLIT

static void decode(u32 *out, const u32 *const *in, int rows, int stride, int k, int blocks, int block, int chunk, int format) {
    if (rows == 16) decode_rows(out, in, 16, stride, k, blocks, block, chunk, format);
    else if (rows == 32) decode_rows(out, in, 32, stride, k, blocks, block, chunk, format);
    else decode_rows(out, in, 4, stride, k, blocks, block, chunk, format);
}

static inline v16 splat(float f) { return (v16){f, f, f, f, f, f, f, f, f, f, f, f, f, f, f, f}; }
static inline u16v splat_u(u32 f) { return (u16v){f, f, f, f, f, f, f, f, f, f, f, f, f, f, f, f}; }

/* acc[m][n] += a[k][m] b[k][n], all rows MAX_SIDE apart in acc. */
static void multiply_f32(const float *a, const float *b, float *acc, int m, int n, int k) {
    if (n < 16) {
        for (int i = 0; i < m; i++)
            for (int j = 0; j < n; j++) {
                float sum = acc[i * MAX_SIDE + j];
                for (int kk = 0; kk < k; kk++) sum = fmaf(a[kk * m + i], b[kk * n + j], sum);
                acc[i * MAX_SIDE + j] = sum;
            }
        return;
    }
    for (int top = 0; top < m; top += 16)
        for (int left = 0; left < n; left += 16) {
            v16 sum[16];
            for (int i = 0; i < 16; i++) memcpy(&sum[i], acc + (top + i) * MAX_SIDE + left, 64);
            for (int kk = 0; kk < k; kk++) {
                v16 column; memcpy(&column, b + kk * n + left, 64);
                const float *row = a + kk * m + top;
#pragma GCC unroll 16
                for (int i = 0; i < 16; i++) sum[i] = splat(row[i]) * column + sum[i];
            }
            for (int i = 0; i < 16; i++) memcpy(acc + (top + i) * MAX_SIDE + left, &sum[i], 64);
        }
}

/* The fused sums of gfx942's f16, bf16, xf32 and 8-bit forms, by MMA-Sim's amd_fused_dot_rd_add (microsoft/MMA-Sim,
 * simulator/arithmetic.py). Every product is a significand and an exponent, the sum of its factors' (a subnormal has
 * its format's least exponent; zero -126). In a group of k, products are cut toward zero at 24 bits below the largest
 * exponent and added; 8-bit formats do so for even and odd k apart, and cut the two sums downward at 24 bits below the
 * larger exponent. That sum, cut downward at 31 bits, and C, cut downward at 24 bits, below the larger of their
 * exponents (8-bit formats: C counts as zero more than 25 below) are added and rounded once, to nearest even. */
typedef struct { i32 exponent[MAX_OPERAND], significand[MAX_OPERAND]; } Parts; /* [k][row]; signed, an integer of mantissa + 1 bits */

static int split_parts(Parts *to, const u32 *values, int count, int mantissa, int least) {
    int finite = 1, most = -1000;
    for (int i = 0; i < count; i++) {
        i32 field = values[i] >> 23 & 255, e = field ? field - 127 : -126, bits = (i32)(values[i] & 0x7fffffu) | (field ? 0x800000 : 0), down = 23 - mantissa;
        if (e < least) { down += least - e; e = least; }
        bits = down > 31 ? 0 : bits >> down;
        finite &= field != 255;
        to->exponent[i] = bits ? e : -126;
        to->significand[i] = values[i] >> 31 ? -bits : bits;
        most = e > most ? e : most;
    }
    return finite ? most : 1000;
}

typedef i32 v8i __attribute__((vector_size(32)));
typedef i64 v8l __attribute__((vector_size(64)));
typedef double v8d __attribute__((vector_size(64)));
typedef float v8f __attribute__((vector_size(32)));
static inline v8i larger_of(v8i x, v8i y) { v8i take = x > y; return (take & x) | (~take & y); }
static inline v8i at_most(v8i x, i32 most) { v8i over = x > most; return (over & most) | (~over & x); }

/* Eight columns: add the group's sums, in units of 2^-24 of 2^top, to C and round. */
static inline __attribute__((always_inline)) void round_sums(float *c, const i32 *top0, const i32 *sum0, const i32 *top1, const i32 *sum1, const int count, const int eight) {
    v8i e, s, bits = {0};
    memcpy(&e, top0, sizeof e); memcpy(&s, sum0, sizeof s); memcpy(&bits, c, 4 * count);
    if (eight) {
        v8i e1, s1;
        memcpy(&e1, top1, sizeof e1); memcpy(&s1, sum1, sizeof s1);
        v8i larger = larger_of(e, e1);
        s = (s >> at_most(larger - e, 31)) + (s1 >> at_most(larger - e1, 31));
        e = larger;
    }
    v8i field = bits >> 23 & 255, normal = field != 0, sign = bits >> 31;
    v8i ec = (normal & (field - 127)) | (~normal & -126), sc = (bits & 0x7fffff) | (normal & 0x800000);
    sc = (sc ^ sign) - sign;
    v8i larger = larger_of(e, ec), c_part = sc * 2 >> at_most(larger - ec, 31);
    if (eight) c_part &= ~(v8i)(ec < larger - 25);
    v8l total = (__builtin_convertvector(s, v8l) << 7 >> __builtin_convertvector(at_most(larger - e, 63), v8l)) + (__builtin_convertvector(c_part, v8l) << 7);
    v8l unit = (__builtin_convertvector(larger, v8l) + (1023 - 31)) << 52;
    v8d power; memcpy(&power, &unit, sizeof power);
    v8f result = __builtin_convertvector(__builtin_convertvector(total, v8d) * power, v8f);
    memcpy(c, &result, 4 * count);
}

/* Sixteen (four) columns of one row: the products of every `step`-th k of a group, cut and added. */
static inline __attribute__((always_inline)) void sum_group(const Parts *a, const Parts *b, int m, int n, int i, int first, int k0, int last, int step, int left,
                                                            const int bytes, i32 *top, i32 *sum) {
    i16v most, total = {0}, eb = {0}, sb = {0};
    for (int l = 0; l < 16; l++) most[l] = -100000;
    for (int k = k0; k < last; k += step) {
        memcpy(&eb, b->exponent + k * n + first, bytes);
        i16v e = eb + a->exponent[k * m + i], over = e > most;
        most = (over & e) | (~over & most);
    }
    for (int k = k0; k < last; k += step) {
        memcpy(&eb, b->exponent + k * n + first, bytes);
        memcpy(&sb, b->significand + k * n + first, bytes);
        i16v by = most - eb - a->exponent[k * m + i], far = by > 31;
        by = (far & 31) | (~far & by);
        i16v product = sb * a->significand[k * m + i], sign = product >> 31;
        i16v cut = ((product ^ sign) - sign) << left >> by;
        total += (cut ^ sign) - sign;
    }
    memcpy(top, &most, sizeof most);
    memcpy(sum, &total, sizeof total);
}

static inline __attribute__((always_inline)) void multiply_fused(const Matrix *x, const Parts *a, const Parts *b, float *acc, int mantissa, const int width,
                                                                 const int eight) {
    int m = x->m, n = x->n, left = 24 - 2 * mantissa;
    for (int i = 0; i < m; i++)
        for (int first = 0; first < n; first += width)
            for (int k0 = 0; k0 < x->k; k0 += x->fused) {
                i32 sum[2][16], top[2][16];
                int last = k0 + x->fused < x->k ? k0 + x->fused : x->k;
                sum_group(a, b, m, n, i, first, k0, last, 1 + eight, left, 4 * width, top[0], sum[0]);
                if (eight) sum_group(a, b, m, n, i, first, k0 + 1, last, 2, left, 4 * width, top[1], sum[1]);
                float *c = acc + i * MAX_SIDE + first;
                for (int j = 0; j < width; j += 8) round_sums(c + j, top[0] + j, sum[0] + j, top[1] + j, sum[1] + j, width < 8 ? width : 8, eight);
            }
}

/* The same where a factor or C is no finite number, or a product may pass fp32's range: those decide the result. */
static int fused_special(const Matrix *x, const float *a, const float *b, float *c, int i, int j) {
    float *sum = c + i * MAX_SIDE + j;
    double total = *sum;
    int up = 0, down = 0;
    for (int k = 0; k < x->k; k++) {
        double product = (double)a[k * x->m + i] * b[k * x->n + j];
        total += product;
        up |= product >= 0x1p128 && !isinf(product);
        down |= product <= -0x1p128 && !isinf(product);
    }
    if (!isinf(total) && total == total && !up && !down) return 0;
    *sum = isinf(total) || total != total ? (float)total : up && down ? NAN : up ? INFINITY : -INFINITY;
    return 1;
}

static void multiply_i32(const u32 *a, const u32 *b, u32 *acc, int m, int n, int k) {
    if (n < 16) {
        for (int i = 0; i < m; i++)
            for (int j = 0; j < n; j++)
                for (int kk = 0; kk < k; kk++) acc[i * MAX_SIDE + j] += a[kk * m + i] * b[kk * n + j];
        return;
    }
    for (int top = 0; top < m; top += 16)
        for (int left = 0; left < n; left += 16) {
            u16v sum[16];
            for (int i = 0; i < 16; i++) memcpy(&sum[i], acc + (top + i) * MAX_SIDE + left, 64);
            for (int kk = 0; kk < k; kk++) {
                u16v column; memcpy(&column, b + kk * n + left, 64);
                const u32 *row = a + kk * m + top;
#pragma GCC unroll 16
                for (int i = 0; i < 16; i++) sum[i] += splat_u(row[i]) * column;
            }
            for (int i = 0; i < 16; i++) memcpy(acc + (top + i) * MAX_SIDE + left, &sum[i], 64);
        }
}

/* Where row r, column j of block b of D lies: register and lane (a float64's register counts pairs). */
typedef struct { int height, across, per_block, per_register; } Layout;
static Layout layout_of(const Matrix *x, int wide) {
    Layout y = {wide ? 1 : 4, W / x->n, x->m * x->n / W, 1};
    int quarter = x->m * x->n / y.height;
    if (quarter < W) y.per_register = W / quarter;
    return y;
}
static inline void place(const Matrix *x, const Layout *y, int r, int j, int b, int *reg, int *lane) {
#if W == 64
    int group = r / y->height; /* height is 1 or 4, the rest powers of two as well, but unknown here: divisions only for the odd shapes */
    if (x->blocks == 1 && y->height == 4) {
        int side = x->n == 16 ? 4 : 2;
        *reg = (side == 4 ? 0 : group / 2 * 4) + r % 4;
        *lane = (side == 4 ? group * 16 : group % 2 * 32) + j;
        return;
    }
    *reg = b * y->per_block + group / y->across * y->height + r % y->height;
    *lane = b % y->per_register * x->n + group % y->across * y->per_register * x->n + j;
#else
    (void)y; (void)b; (void)x;
    *reg = 8 * (r / 16) + r % 8;
    *lane = r % 16 / 8 * 16 + j;
#endif
}

/* A scale's row (or column) and K block -> its value. */
static inline u32 scale_code(const u32 *const *scales, int row, int kb, int which, int side) {
#if W == 64
    return scales[0][row + side * kb] >> (8 * which) & 255; /* a lane's byte covers the K block of its lane group */
#else
    int lane = side == 32 ? row : row + 16 * (which & 1);
    return scales[kb / 4][lane] >> (8 * (kb % 4)) & 255;
#endif
}

/* Scales by K block and row. Returns 0 where values times scales could leave fp32's range, or are NaN. */
static int read_scales(float *factors, const u32 *const *scales, int side, int blocks, int which, int format) {
    int in_range = 1;
    for (int kb = 0; kb < blocks; kb++)
        for (int r = 0; r < side; r++) {
            float s = factors[kb * side + r] = small_values[format][scale_code(scales, r, kb, which, side)];
            in_range &= s == 0 || (s >= 0x1p-40f && s <= 0x1p40f);
        }
    return in_range;
}

static inline __attribute__((always_inline)) void scale_rows(float *restrict values, const float *restrict factors, const int side, int k, int block) {
    for (int kb = 0; kb < k / block; kb++, factors += side)
        for (int kk = 0; kk < block; kk++, values += side)
            for (int r = 0; r < side; r++) values[r] *= factors[r];
}
static void apply_scales(float *values, const float *factors, int side, int k, int block) {
    if (side == 16) scale_rows(values, factors, 16, k, block); else scale_rows(values, factors, 32, k, block);
}

/* V_MED3_F32: the middle of three; with a NaN, the smallest of the others (CDNA3 ISA guide). */
static inline float med3(float a, float b, float c) {
    if (a != a || b != b || c != c) return fminf(fminf(a, b), c);
    float most = fmaxf(fmaxf(a, b), c);
    return most == a ? fmaxf(b, c) : most == b ? fmaxf(a, c) : fmaxf(a, b);
}

static void multiply_f64(const Matrix *x, const u32 *const *a, const u32 *const *b, const u32 *const *c, u32 out[][W]) {
    Layout y = layout_of(x, 1);
    u32 low[2] = {0, 0}, high[2] = {x->negate & 1 ? 0x80000000u : 0, x->negate & 2 ? 0x80000000u : 0}, high_c = x->negate & 4 ? 0x80000000u : 0;
    for (int block = 0; block < x->blocks; block++)
        for (int i = 0; i < x->m; i++)
            for (int j = 0; j < x->n; j++) {
                int reg, lane;
                place(x, &y, i, j, block, &reg, &lane);
                double sum = as_double(c[2 * reg][lane], c[2 * reg + 1][lane] ^ high_c);
                for (int kk = 0; kk < x->k; kk++) {
                    int la = i + x->m * (block + x->blocks * kk), lb = j + x->n * (block + x->blocks * kk); /* one value a lane */
                    sum = fma(as_double(a[0][la] ^ low[0], a[1][la] ^ high[0]), as_double(b[0][lb] ^ low[1], b[1][lb] ^ high[1]), sum);
                }
                u64 bits = double_bits(sum);
                out[2 * reg][lane] = (u32)bits;
                out[2 * reg + 1][lane] = (u32)(bits >> 32);
            }
}

/* D may share registers with any operand, so it is written last. scales: A's registers, then B's. */
static void multiply_matrix(const Matrix *x, const u32 *const *a, const u32 *const *b, const u32 *const *c, const u32 *const *scales, int num_scales,
                            u32 *const *d, int num_d) {
    u32 values_a[MAX_OPERAND] __attribute__((aligned(64))), values_b[MAX_OPERAND] __attribute__((aligned(64)));
    u32 acc[MAX_SIDE * MAX_SIDE] __attribute__((aligned(64)));
    u32 out[32][W], moved[8][W];
    const u32 *moved_b[8];
    if (x->format_a == T_F64) {
        multiply_f64(x, a, b, c, out);
        for (int i = 0; i < num_d; i++) memcpy(d[i], out[i], sizeof out[i]);
        return;
    }
    if (x->blgp) { /* CDNA3 ISA guide, table of BLGP: B's lanes as seen by the multiplier */
        int dwords = (x->k * x->n * x->blocks * formats[x->format_b].bits + 32 * W - 1) / (32 * W);
        for (int i = 0; i < dwords; i++) {
            for (int l = 0; l < W; l++) {
                int lane = x->blgp == 1 ? l % 32 : x->blgp == 2 ? l % 32 + 32 : x->blgp == 3 ? (l + 16) % 64 : l % 16 + 16 * (x->blgp - 4);
                moved[i][l] = b[i][lane % W];
            }
            moved_b[i] = moved[i];
        }
        b = moved_b;
    }
    Layout y = layout_of(x, 0);
    int integer = x->format_d == T_I32, narrow = x->format_d == T_F16 || x->format_d == T_BF16, narrow_c = x->format_c == T_F16 || x->format_c == T_BF16;
    for (int block = 0; block < x->blocks; block++) {
#if W == 32
        int halves = x->m / 16, dwords = x->k * 16 * formats[x->format_a].bits / (32 * W);
        for (int h = 0; h < halves; h++) decode(values_a + 16 * h, a + h * dwords, 16, x->m, x->k, 1, 0, x->chunk_a, x->format_a);
#else
        int from = x->cbsz ? (block >> x->cbsz << x->cbsz) + x->abid : block;
        decode(values_a, a, x->m, x->m, x->k, x->blocks, from, x->chunk_a, x->format_a);
#endif
        decode(values_b, b, x->n, x->n, x->k, x->blocks, block, x->chunk_b, x->format_b);
        int step = x->n < 16 ? x->n : 16; /* columns that lie side by side */
        for (int r = 0; r < x->m; r++)
            for (int j = 0; j < x->n; j += step) {
                int reg, lane;
                u32 *to = acc + r * MAX_SIDE + j;
                place(x, &y, r, j, block, &reg, &lane);
                if (narrow_c)
                    for (int i = 0; i < step; i++) {
                        u32 half = c[reg / 2][lane + i] >> (16 * (reg % 2)) & 0xffff;
                        to[i] = x->format_c == T_BF16 ? half << 16 : as_bits(half_to_float(half));
                    }
                else memcpy(to, c[reg] + lane, 4 * step);
            }
        if (x->negate & 12)
            for (int i = 0; i < MAX_SIDE * MAX_SIDE; i++) acc[i] = (x->negate & 8 ? acc[i] & 0x7fffffffu : acc[i]) ^ (x->negate & 4 ? 0x80000000u : 0);
        if (integer) {
            if (x->clamp) {
                u32 sum[MAX_SIDE * MAX_SIDE] = {0};
                multiply_i32(values_a, values_b, sum, x->m, x->n, x->k);
                for (int i = 0; i < MAX_SIDE * MAX_SIDE; i++) {
                    i64 total = (i64)(i32)acc[i] + (i32)sum[i];
                    acc[i] = total > INT32_MAX ? 0x7fffffffu : total < INT32_MIN ? 0x80000000u : (u32)total;
                }
            } else multiply_i32(values_a, values_b, acc, x->m, x->n, x->k);
        } else {
            float *fa = (float *)values_a, *fb = (float *)values_b, *sum = (float *)acc;
            float scale_a[8 * MAX_SIDE], scale_b[8 * MAX_SIDE];
            int plain = 1;
            if (x->scale_block) {
                int blocks = x->k / x->scale_block;
                plain = read_scales(scale_a, scales, x->m, blocks, x->scale_a, x->scale_format_a);
                plain &= read_scales(scale_b, scales + num_scales / 2, x->n, blocks, x->scale_b, x->scale_format_b);
                if (plain) {
                    apply_scales(fa, scale_a, x->m, x->k, x->scale_block);
                    apply_scales(fb, scale_b, x->n, x->k, x->scale_block);
                }
            }
            if (x->fused) {
                static const int least[T_FORMATS] = {[T_F16] = -14, [T_BF16] = -126, [T_XF32] = -126, [T_FP8_FNUZ] = -7, [T_BF8_FNUZ] = -15};
                static const int mantissas[T_FORMATS] = {[T_F16] = 10, [T_BF16] = 7, [T_XF32] = 10, [T_FP8_FNUZ] = 3, [T_BF8_FNUZ] = 3};
                Parts pa, pb; /* e5m2's significand has a bit to spare, so that both 8-bit formats have as many */
                int mantissa = mantissas[x->format_a];
                int most = split_parts(&pa, values_a, x->k * x->m, mantissa, least[x->format_a]) + split_parts(&pb, values_b, x->k * x->n, mantissa, least[x->format_b]);
                int special = most >= 126;
                for (int i = 0; i < x->m; i++)
                    for (int j = 0; j < x->n; j++) special |= (acc[i * MAX_SIDE + j] >> 23 & 255) == 255;
                float before[MAX_SIDE * MAX_SIDE];
                if (special) memcpy(before, sum, sizeof before);
                if (x->n < 16) multiply_fused(x, &pa, &pb, sum, mantissa, 4, 0);
                else if (x->fused == 16) multiply_fused(x, &pa, &pb, sum, mantissa, 16, 1);
                else multiply_fused(x, &pa, &pb, sum, mantissa, 16, 0);
                if (special)
                    for (int i = 0; i < x->m; i++)
                        for (int j = 0; j < x->n; j++)
                            if (fused_special(x, fa, fb, before, i, j)) sum[i * MAX_SIDE + j] = before[i * MAX_SIDE + j];
            } else if (x->sparse) { /* what A lacks multiplies nothing, be it with an infinity */
                for (int i = 0; i < x->m; i++)
                    for (int j = 0; j < x->n; j++) {
                        float total = sum[i * MAX_SIDE + j];
                        for (int kk = 0; kk < x->k; kk++)
                            if (fa[kk * x->m + i] != 0) total = fmaf(fa[kk * x->m + i], fb[kk * x->n + j], total);
                        sum[i * MAX_SIDE + j] = total;
                    }
            } else if (plain) multiply_f32(fa, fb, sum, x->m, x->n, x->k);
            else
                for (int i = 0; i < x->m; i++)
                    for (int j = 0; j < x->n; j++)
                        for (int kk = 0; kk < x->k; kk++) {
                            int kb = kk / x->scale_block;
                            double product = (double)fa[kk * x->m + i] * fb[kk * x->n + j] * ((double)scale_a[kb * x->m + i] * scale_b[kb * x->n + j]);
                            sum[i * MAX_SIDE + j] = add_once(sum[i * MAX_SIDE + j], product);
                        }
        }
        for (int r = 0; r < x->m; r++)
            for (int j = 0; j < x->n; j += step) {
                int reg, lane;
                const u32 *value = acc + r * MAX_SIDE + j;
                place(x, &y, r, j, block, &reg, &lane);
                if (narrow)
                    for (int i = 0; i < step; i++) {
                        u32 half = x->format_d == T_BF16 ? float_to_bfloat(value[i]) : float_to_half(value[i]);
                        u32 *o = &out[reg / 2][lane + i];
                        *o = reg % 2 ? (*o & 0xffff) | half << 16 : half;
                    }
                else memcpy(out[reg] + lane, value, 4 * step);
            }
    }
    for (int i = 0; i < num_d; i++) memcpy(d[i], out[i], sizeof out[i]);
}
