/* Number formats: bits to float and back, as the machine's conversion instructions do. */
#pragma once
#include <math.h>
#include <stdint.h>
#include <string.h>

typedef uint32_t u32;
typedef int32_t i32;
typedef uint64_t u64;
typedef int64_t i64;

static inline float as_float(u32 x) { float f; memcpy(&f, &x, 4); return f; }
static inline u32 as_bits(float f) { u32 x; memcpy(&x, &f, 4); return x; }
static inline double as_double(u32 lo, u32 hi) { u64 x = ((u64)hi << 32) | lo; double d; memcpy(&d, &x, 8); return d; }
static inline u64 double_bits(double d) { u64 x; memcpy(&x, &d, 8); return x; }

static inline float half_to_float(u32 h) {
    u32 sign = (h & 0x8000u) << 16, exponent = (h >> 10) & 31, mantissa = h & 1023;
    if (exponent == 31) return as_float(sign | 0x7f800000u | (mantissa << 13));
    if (exponent) return as_float(sign | ((exponent + 112) << 23) | (mantissa << 13));
    float magnitude = (float)mantissa * 0x1p-24f;
    return sign ? -magnitude : magnitude;
}

static inline u32 float_to_half(u32 x) { /* nearest even */
    u32 sign = (x >> 16) & 0x8000u, magnitude = x & 0x7fffffffu;
    if (magnitude > 0x7f800000u) return sign | 0x7e00u | ((magnitude >> 13) & 0x1ffu);
    if (magnitude >= 0x477ff000u) return sign | 0x7c00u;
    if (magnitude < 0x38800000u) { /* subnormal result: adding 0.5 leaves the rounded multiple of 2^-24 in the low bits */
        float shifted = as_float(magnitude) + 0.5f;
        return sign | (as_bits(shifted) - 0x3f000000u);
    }
    u32 rounded = magnitude + 0xfffu + ((magnitude >> 13) & 1);
    return sign | ((rounded - 0x38000000u) >> 13);
}

static inline u32 float_to_half_rtz(u32 x) {
    u32 sign = (x >> 16) & 0x8000u, magnitude = x & 0x7fffffffu;
    if (magnitude > 0x7f800000u) return sign | 0x7e00u | ((magnitude >> 13) & 0x1ffu);
    if (magnitude == 0x7f800000u) return sign | 0x7c00u;
    if (magnitude >= 0x47800000u) return sign | 0x7bffu;
    if (magnitude < 0x38800000u) {
        u32 exponent = magnitude >> 23;
        if (exponent < 103) return sign;
        return sign | (((magnitude & 0x7fffffu) | 0x800000u) >> (126 - exponent));
    }
    return sign | ((magnitude - 0x38000000u) >> 13);
}

static inline u32 float_to_bfloat(u32 x) {
    if ((x & 0x7fffffffu) > 0x7f800000u) return (x >> 16) | 0x40u;
    return (x + 0x7fffu + ((x >> 16) & 1)) >> 16;
}

/* ---- formats of matrix operands and conversions ----
 * OCP: "OCP 8-bit Floating Point Specification" 1.0 (e4m3fn, e5m2) and "OCP Microscaling Formats (MX)" 1.0 (fp6 e2m3
 * and e3m2, fp4 e2m1, e8m0). The fnuz pair has a bias larger by one, no infinity, no negative zero and one NaN, code
 * 0x80 (CDNA3 ISA guide, section on FP8 and BF8 formats). E5M3 is gfx1250's unsigned scale format: LLVM's AMDGPU
 * backend names it, rocjitsu's data_types.h gives bias 15 and NaN 0xff. The order is that of FORMATS in lowering/matrix.py.
 */
enum { T_F32, T_F16, T_BF16, T_FP8, T_BF8, T_FP6, T_BF6, T_FP4, T_FP8_FNUZ, T_BF8_FNUZ, T_E5M3, T_E8M0, T_XF32, T_F64, T_I8, T_U8, T_I4, T_U4,
       T_I32, T_FORMATS };

typedef struct {
    int bits, exponent, mantissa, bias;
    u32 top, overflow, nan; /* codes: largest finite magnitude, what a larger one becomes, NaN */
} Format;

static const Format formats[T_FORMATS] = {
    [T_F16] = {16, 5, 10, 15, 0x7bff, 0x7c00, 0x7e00}, [T_BF16] = {16, 8, 7, 127, 0x7f7f, 0x7f80, 0x7fc0},
    [T_FP8] = {8, 4, 3, 7, 0x7e, 0x7f, 0x7f},          [T_BF8] = {8, 5, 2, 15, 0x7b, 0x7c, 0x7f},
    [T_FP6] = {6, 2, 3, 1, 0x1f, 0x1f, 0x1f},          [T_BF6] = {6, 3, 2, 3, 0x1f, 0x1f, 0x1f},
    [T_FP4] = {4, 2, 1, 1, 7, 7, 7},                   [T_FP8_FNUZ] = {8, 4, 3, 8, 0x7f, 0x80, 0x80},
    [T_BF8_FNUZ] = {8, 5, 2, 16, 0x7f, 0x80, 0x80},    [T_E5M3] = {8, 5, 3, 15, 0xfe, 0xff, 0xff},
    [T_E8M0] = {8}, [T_F32] = {32}, [T_XF32] = {32}, [T_F64] = {64}, [T_I8] = {8}, [T_U8] = {8}, [T_I4] = {4}, [T_U4] = {4}, [T_I32] = {32},
};

static inline int is_small(int format) { return format >= T_FP8 && format <= T_E8M0; }

static double decode_small(int format, u32 code) {
    const Format *f = &formats[format];
    if (format == T_E8M0) return code == 255 ? NAN : ldexp(1.0, (int)code - 127);
    u32 sign = format == T_E5M3 ? 0 : code >> (f->bits - 1) & 1, magnitude = format == T_E5M3 ? code : code & ((1u << (f->bits - 1)) - 1);
    int e = (int)(magnitude >> f->mantissa);
    double m = magnitude & ((1u << f->mantissa) - 1), value;
    if (format == T_FP8_FNUZ || format == T_BF8_FNUZ) {
        if (code == 0x80) return NAN;
    } else if (magnitude > f->top) /* fp4 and fp6 have no such code */
        return format == T_BF8 && magnitude == f->overflow ? (sign ? -INFINITY : INFINITY) : sign ? -NAN : NAN;
    value = e ? ldexp(m + (1 << f->mantissa), e - f->bias - f->mantissa) : ldexp(m, 1 - f->bias - f->mantissa);
    return sign ? -value : value;
}

/* What every code of a format with up to eight bits is worth. */
static float small_values[T_FORMATS][256];
__attribute__((constructor)) static void fill_small_values(void) {
    for (int format = T_FP8; format <= T_E8M0; format++)
        for (u32 code = 0; code < 1u << formats[format].bits; code++) small_values[format][code] = (float)decode_small(format, code);
}

/* x in a format, rounded once to nearest even, or stochastically: the discarded bits, as many as the source's mantissa
 * is longer than the result's, plus as many of the seed's highest, and a carry rounds up. For a result below the normal
 * range the source is shifted, and cut there, first. A magnitude past the largest becomes the format's NaN or infinity,
 * as with MODE.FP16_OVFL = 0 (fp4 and fp6 have neither and saturate). Sources: CDNA3 and CDNA4 ISA guides,
 * V_CVT_PK_FP8_F32, V_CVT_SR_FP8_F32; AMD's host model of the conversions, HIP's amd_hip_ocp_host.hpp (from_float,
 * from_float_sr). They are silent, or not of one mind, on what NaN becomes in fp4 and fp6 (here: the largest, as HIP's
 * header) and on a NaN's payload. */
static u32 encode_small(double x, int format, int stochastic, u32 seed, int source_mantissa) {
    const Format *f = &formats[format];
    int fnuz = format == T_FP8_FNUZ || format == T_BF8_FNUZ;
    u32 sign = signbit(x) && format != T_E5M3 ? 1u << (f->bits - 1) : 0, code;
    if (x != x) return fnuz ? f->nan : sign | f->nan;
    x = fabs(x);
    if (x == 0) return fnuz ? 0 : sign;
    int e, least = 1 - f->bias;
    if (isinf(x)) return fnuz ? f->overflow : sign | f->overflow;
    frexp(x, &e);
    e--; /* x = 1.m * 2^e */
    if (stochastic) {
        int dropped = source_mantissa - f->mantissa;
        u64 whole = (u64)ldexp(x, source_mantissa - e);
        if (e > least + (1 << f->exponent)) return fnuz ? f->overflow : sign | f->overflow;
        if (e < least) { whole = least - e >= 32 ? 0 : whole >> (least - e); e = least; }
        whole = (whole + (seed >> (32 - dropped))) >> dropped;
        code = ((u32)(e - least) << f->mantissa) + (u32)whole;
    } else {
        if (e < least) e = least;
        double units = nearbyint(ldexp(x, f->mantissa - e));
        if (e > least + (1 << f->exponent)) return fnuz ? f->overflow : sign | f->overflow;
        code = ((u32)(e - least) << f->mantissa) + (u32)units; /* a whole 2^mantissa is the implicit one, or the carry into the exponent */
    }
    if (code > f->top) return fnuz ? f->overflow : sign | f->overflow;
    return fnuz && !code ? 0 : sign | code;
}

/* Round a + b, b any double, once to fp32: the double sum is made odd where it was inexact, which keeps the second
 * rounding from seeing a tie. */
static inline float add_once(float a, double b) {
    double x = a, s = x + b, t = s - x, error = (x - (s - t)) + (b - t);
    if (error != 0 && !isinf(s) && s == s) {
        u64 bits = double_bits(s);
        if (!(bits & 1)) {
            bits += (error > 0) == (s > 0) ? 1 : -1;
            s = as_double((u32)bits, (u32)(bits >> 32));
        }
    }
    return (float)s;
}
