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
