#pragma once
#include "formats.h"

/* ---- the matrix unit ----
 * D = A B + C. A lane holds `per_lane` consecutive k of one row of A (column of B): row lane % m, k from per_lane * (lane / m).
 * D: 16x16, register i of a lane is row 4 * (lane / 16) + i, column lane % 16; 32x32, row 8 * (i / 4) + 4 * (lane / 32) + i % 4,
 * column lane % 32. Source: AMD CDNA3 ISA guide, section 7.1 (matrix fused multiply add), CDNA4 ISA guide for the doubled K;
 * tests/sim/test_mfma.py holds the independent tables.
 * Products of fp16 and bf16 are exact in fp32; they are added one k after another in fp32, nearest even. The guides do not state the order.
 */
enum { T_F32, T_F16, T_BF16 };

static inline void decode(float *out, const u32 *const *in, int m, int k, int type, int dwords) {
    (void)k;
    for (int group = 0; group < W / m; group++)
        for (int v = 0; v < dwords; v++) {
            const u32 *source = in[v] + group * m;
            if (type == T_F32) {
                float *o = out + (group * dwords + v) * m;
                for (int x = 0; x < m; x++) o[x] = as_float(source[x]);
            } else {
                float *o = out + (group * dwords + v) * 2 * m;
                if (type == T_BF16) {
#pragma GCC ivdep
                    for (int x = 0; x < m; x++) { o[x] = as_float(source[x] << 16); o[m + x] = as_float(source[x] & 0xffff0000u); }
                } else
                    for (int x = 0; x < m; x++) { o[x] = half_to_float(source[x] & 0xffff); o[m + x] = half_to_float(source[x] >> 16); }
            }
        }
}

typedef float v16 __attribute__((vector_size(64)));
static inline v16 splat(float f) { return (v16){f, f, f, f, f, f, f, f, f, f, f, f, f, f, f, f}; }

static void mfma(const u32 *const *a, const u32 *const *b, const u32 *const *c, u32 *const *d, int m, int k, int type, int dwords) {
    float fa[64 * 32] __attribute__((aligned(64))), fb[64 * 32] __attribute__((aligned(64)));
    decode(fa, a, m, k, type, dwords); /* [k][row] */
    decode(fb, b, m, k, type, dwords); /* [k][column] */
    if (m == 16) {
        v16 acc[16];
        for (int i = 0; i < 16; i++) { float row[16]; memcpy(row, c[i % 4] + 16 * (i / 4), 64); memcpy(&acc[i], row, 64); }
        for (int kk = 0; kk < k; kk++) {
            v16 column; memcpy(&column, fb + 16 * kk, 64);
            const float *av = fa + 16 * kk;
#pragma GCC unroll 16
            for (int i = 0; i < 16; i++) acc[i] = splat(av[i]) * column + acc[i];
        }
        for (int i = 0; i < 16; i++) memcpy(d[i % 4] + 16 * (i / 4), &acc[i], 64);
    } else {
        v16 out[16][4]; /* by register and half-column, so that d may be c */
        for (int half = 0; half < 2; half++)
            for (int block = 0; block < 2; block++) { /* 16 rows at a time */
                v16 acc[16];
                for (int i = 0; i < 16; i++) {
                    int row = 16 * block + i, reg = 4 * (row / 8) + row % 4, lanes = 32 * ((row / 4) % 2) + 16 * half;
                    memcpy(&acc[i], c[reg] + lanes, 64);
                }
                for (int kk = 0; kk < k; kk++) {
                    v16 column; memcpy(&column, fb + 32 * kk + 16 * half, 64);
                    const float *av = fa + 32 * kk + 16 * block;
#pragma GCC unroll 16
                    for (int i = 0; i < 16; i++) acc[i] = splat(av[i]) * column + acc[i];
                }
                for (int i = 0; i < 16; i++) {
                    int row = 16 * block + i, reg = 4 * (row / 8) + row % 4;
                    memcpy(&out[reg][2 * ((row / 4) % 2) + half], &acc[i], 64);
                }
            }
        for (int reg = 0; reg < 16; reg++)
            for (int part = 0; part < 4; part++) memcpy(d[reg] + 16 * part, &out[reg][part], 64);
    }
}
