#pragma once
/* Transposing loads: lanes read pieces of a small matrix and receive its transpose.
 *
 * gfx950 (way 0): sixteen lanes read rows of sixteen elements, one row after another, lane i receives column i. AMD CDNA4 ISA guide, section
 * 11.4 and DS_READ_B64_TR_B16/B8/B4, DS_READ_B96_TR_B6; ck_tile's DefaultTranspose (Quad16, Quad8) has the same lane map for 16 and 8 bits.
 * gfx1250 (way 1): ROCm/rocm-systems emulation/rocjitsu, isa/arch/amdgpu/shared/ds_transpose.h.
 * Both at 16, 8 and 4 bits also by Triton's kernels (tests/sim/test_transpose_triton.py); 6 bits have one source each.
 */
static inline u32 get_bits(const u32 *words, u32 at, u32 bits) {
    u64 pair = words[at / 32];
    if (at % 32 + bits > 32) pair |= (u64)words[at / 32 + 1] << 32;
    return (u32)(pair >> (at % 32)) & ((1u << bits) - 1);
}

static inline void put_bits(u32 *words, u32 at, u32 bits, u32 value) { /* words start as zeros */
    words[at / 32] |= value << (at % 32);
    if (at % 32 + bits > 32) words[at / 32 + 1] |= value >> (32 - at % 32);
}

/* Lane and element that element e of `lane` comes from; n elements a lane. */
static inline void transpose_source(u32 lane, u32 e, u32 n, i32 bits, i32 way, u32 *from, u32 *element) {
    if (way == 0) {
        u32 i = lane & 15;
        *from = (lane & ~15u) + e * (16 / n) + i / n;
        *element = i % n;
    } else if (bits == 16) {
        *from = (lane & ~7u) + e; *element = lane & 7;
    } else if (bits == 8) {
        *from = (lane & ~15u) + 8 * (e / 4) + 4 * (lane / 8 % 2) + e % 4; *element = lane & 7;
    } else if (bits == 4) {
        *from = 16 * (e / 8) + 8 * (lane / 16) + e % 8; *element = lane & 15;
    } else {
        *from = 8 * (e / 4) + e % 4 + 4 * (lane / 16); *element = lane & 15;
    }
}

static void transpose(u32 (*piece)[4], u32 *const *d, i32 dwords, i32 bits, i32 way, u64 exec) {
    u32 n = 32 * dwords / bits;
    for (u32 lane = 0; lane < W; lane++) {
        if (!(exec >> lane & 1)) continue;
        u32 out[4] = {0}, from, element;
        for (u32 e = 0; e < n; e++) {
            transpose_source(lane, e, n, bits, way, &from, &element);
            put_bits(out, e * bits, bits, get_bits(piece[from], element * bits, bits));
        }
        for (i32 i = 0; i < dwords; i++) d[i][lane] = out[i];
    }
}
