/* Which lane a lane reads from, and what an atomic operation leaves in memory. */
#pragma once
#include "formats.h"

/* A buffer resource's four dwords. */
typedef struct { u64 base, records; u32 stride; } Buffer;

static inline Buffer buffer_of(u32 r0, u32 r1, u32 r2, u32 r3) {
#if W == 32 /* gfx1250: base 57 bits, num_records 45, stride 14 from bit 108 (LLVM, AMDGPULegalizerInfo, make.buffer.rsrc with 45-bit num_records) */
    return (Buffer){((u64)(r1 & 0x1ffffff) << 32) | r0, (u64)(r1 >> 25) | (u64)r2 << 7 | (u64)(r3 & 63) << 39, r3 >> 12 & 0x3fff};
#else       /* CDNA3 ISA guide, table of the buffer resource descriptor */
    (void)r3;
    return (Buffer){((u64)(r1 & 0xffff) << 32) | r0, r2, r1 >> 16 & 0x3fff};
#endif
}

/* Lane that lane `l` reads under a DPP control word, or -1 where there is none (beyond its row or the wave). Sources: AMD CDNA3 ISA guide, table
 * "DPP_CTRL enumeration" (quad_perm .. row_bcast31) and LLVM's AMDGPU assembler syntax for row_newbcast (gfx90a on); row_share and row_xmask:
 * AMD RDNA ISA guides. The two meanings of 0x150 agree: every lane of a row reads the row's lane N. */
static inline int dpp_source(i32 ctrl, int l) {
    int row = l & ~15, at = l & 15, n = ctrl & 15;
    if (ctrl < 0x100) return (l & ~3) | (ctrl >> (2 * (l & 3)) & 3);
    switch (ctrl >> 4) {
    case 0x10: return at + n < 16 ? l + n : -1;   /* row_shl */
    case 0x11: return at - n >= 0 ? l - n : -1;   /* row_shr */
    case 0x12: return row | ((at - n) & 15);      /* row_ror */
    case 0x15: return row | n;                    /* row_newbcast, row_share */
    case 0x16: return row | (at ^ n);             /* row_xmask */
    }
    switch (ctrl) {
    case 0x130: return l + 1 < W ? l + 1 : -1;    /* wave_shl */
    case 0x134: return (l + 1) % W;               /* wave_rol */
    case 0x138: return l - 1;                     /* wave_shr; -1 for lane 0 */
    case 0x13c: return (l + W - 1) % W;           /* wave_ror */
    case 0x140: return row | (15 - at);           /* row_mirror */
    case 0x141: return (l & ~7) | (7 - (l & 7));  /* row_half_mirror */
    case 0x142: return l > 15 ? row - 1 : -1;     /* row_bcast:15, each row's last lane to the next row */
    case 0x143: return l > 31 ? 31 : -1;          /* row_bcast:31, to rows 2 and 3 */
    }
    return -1;
}

/* DS_SWIZZLE_B32, AMD CDNA3 ISA guide, LDS instructions: four modes chosen by the offset's upper bits. */
static inline int swizzle_source(u32 offset, int l) {
    u32 i = l & 31, j;
    if (offset >= 0xe000) {                       /* FFT: reverse the bits, keep those under the mask */
        u32 mask = offset & 31, reversed = 0;
        for (int b = 0; b < 5; b++) reversed |= (i >> b & 1) << (4 - b);
        j = (reversed >> __builtin_popcount(mask)) | (i & mask);
    } else if (offset >= 0xc000) {                /* rotate */
        u32 mask = offset & 31, by = offset >> 5 & 31;
        j = (i & mask) | ((offset >> 10 & 1 ? i - by : i + by) & ~mask & 31);
    } else if (offset & 0x8000)                   /* four lanes */
        j = (i & ~3u) | (offset >> (2 * (i & 3)) & 3);
    else                                          /* and, or, xor of the lane's number */
        j = ((i & offset & 31) | (offset >> 5 & 31)) ^ (offset >> 10 & 31);
    return (int)(j & 31) | (l & 32);
}

/* Operations: the numbers of MLIR's AtomicBinOp (mlir/include/mlir/Dialect/LLVMIR/LLVMEnums.td), and compare-and-swap. */
enum { A_XCHG, A_ADD, A_SUB, A_AND, A_NAND, A_OR, A_XOR, A_MAX, A_MIN, A_UMAX, A_UMIN, A_FADD, A_FSUB, A_FMAX, A_FMIN, A_UINC_WRAP, A_UDEC_WRAP,
       A_USUB_COND, A_USUB_SAT, A_LOAD = 30, A_STORE = 31, A_CMPXCHG = 32 };
enum { AT_I32, AT_I64, AT_F32, AT_F64, AT_2F16, AT_2BF16 };

static inline i32 atomic_bytes(i32 type) { return type == AT_I64 || type == AT_F64 ? 8 : 4; }

static inline double atomic_float(i32 op, double a, double b) {
    switch (op) {
    case A_FADD: return a + b;
    case A_FSUB: return a - b;
    case A_FMAX: return a != a ? b : b != b ? a : a > b || (a == b && !signbit(a)) ? a : b;
    default: return a != a ? b : b != b ? a : a < b || (a == b && signbit(a)) ? a : b;
    }
}
static inline float atomic_single(i32 op, float a, float b) {
    return op == A_FADD ? a + b : op == A_FSUB ? a - b : (float)atomic_float(op, a, b); /* minimum and maximum are exact in double */
}

/* What memory holds after the operation; `x` the old contents, `v` the operand (the compared value for A_CMPXCHG, whose new one is `v2`). */
static inline u64 atomic_result(i32 op, i32 type, u64 x, u64 v, u64 v2) {
    int wide = type == AT_I64;
    switch (op) {
    case A_XCHG: case A_STORE: return v;
    case A_LOAD: return x;
    case A_ADD: return x + v;
    case A_SUB: return x - v;
    case A_AND: return x & v;
    case A_NAND: return ~(x & v);
    case A_OR: return x | v;
    case A_XOR: return x ^ v;
    case A_MAX: return wide ? ((i64)x > (i64)v ? x : v) : ((i32)x > (i32)v ? x : v);
    case A_MIN: return wide ? ((i64)x < (i64)v ? x : v) : ((i32)x < (i32)v ? x : v);
    case A_UMAX: return x > v ? x : v;
    case A_UMIN: return x < v ? x : v;
    case A_UINC_WRAP: return x >= v ? 0 : x + 1;
    case A_UDEC_WRAP: return x == 0 || x > v ? v : x - 1;
    case A_USUB_COND: return x >= v ? x - v : x;
    case A_USUB_SAT: return x >= v ? x - v : 0;
    case A_CMPXCHG: return x == v ? v2 : x;
    }
    switch (type) {
    case AT_F32: return as_bits(atomic_single(op, as_float((u32)x), as_float((u32)v)));
    case AT_F64: return double_bits(atomic_float(op, as_double((u32)x, x >> 32), as_double((u32)v, v >> 32)));
    case AT_2F16: {
        u32 lo = float_to_half(as_bits(atomic_single(op, half_to_float(x & 0xffff), half_to_float(v & 0xffff))));
        return lo | float_to_half(as_bits(atomic_single(op, half_to_float(x >> 16 & 0xffff), half_to_float(v >> 16 & 0xffff)))) << 16;
    }
    default: {
        u32 lo = float_to_bfloat(as_bits(atomic_single(op, as_float((u32)x << 16), as_float((u32)v << 16))));
        return lo | float_to_bfloat(as_bits(atomic_single(op, as_float((u32)x & 0xffff0000u), as_float((u32)v & 0xffff0000u)))) << 16;
    }
    }
}

/* The operation on memory that other host threads may be working on; returns the old contents. */
static inline u64 atomic_global(void *at, i32 op, i32 type, u64 v, u64 v2) {
    if (atomic_bytes(type) == 8) {
        u64 *m = at, old = __atomic_load_n(m, __ATOMIC_SEQ_CST);
        while (!__atomic_compare_exchange_n(m, &old, atomic_result(op, type, old, v, v2), 0, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST)) {}
        return old;
    }
    u32 *m = at, old = __atomic_load_n(m, __ATOMIC_SEQ_CST);
    while (!__atomic_compare_exchange_n(m, &old, (u32)atomic_result(op, type, old, v, v2), 0, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST)) {}
    return old;
}

/* Upper dword of generic addresses of LDS: the Linux driver's LDS aperture of gfx9 lies at 1 << 48 (amdkfd, kfd_flat_memory.c). */
#define LDS_APERTURE 0x00010000u
