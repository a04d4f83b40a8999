/* Vectors of a length that this CPU has registers for, bfloat16 in them, and e^x. Where WIDE is defined: of 16 floats, AVX-512.
 *
 * VECTOR_CPU: goes before what is called from outside. RUNS_HERE: whether this CPU has the instructions for it.
 */
#include <stdint.h>

/* LANES: of a vector; one that a CPU has no registers for is kept in memory, ten times slower. */
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#ifdef WIDE
#define LANES 16
#define VECTOR_CPU __attribute__((target("arch=x86-64-v4")))
#define RUNS_HERE (__builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq"))
#else
#define LANES 8
#define VECTOR_CPU __attribute__((target("arch=x86-64-v3")))
#define RUNS_HERE (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("bmi2"))
#endif
#else
#define LANES 4
#define VECTOR_CPU
#ifdef WIDE
#define RUNS_HERE 0
#else
#define RUNS_HERE 1
#endif
#endif
#define INLINE static inline __attribute__((always_inline))

typedef float vec __attribute__((vector_size(4 * LANES), aligned(4)));
typedef int32_t ivec __attribute__((vector_size(4 * LANES), aligned(4)));
typedef uint16_t hvec __attribute__((vector_size(2 * LANES), aligned(2)));

/* A number in every lane: one broadcast. (To add it to zeros would take an addition, since they make a 0 of -0; and a
 * function would put lane after lane.) */
#define EVERY(number) ((number) - (vec){0})

/* bfloat16 as floats; and rounded to nearest even, where a NaN stays one. */
INLINE vec widen(hvec halves) { return (vec)(__builtin_convertvector(halves, ivec) << 16); }

INLINE hvec narrow(vec values) {
    ivec bits = (ivec)values, nan = values != values;
    ivec rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    return __builtin_convertvector((nan & 0x7fc0) | (~nan & rounded), hvec);
}

/* yes where mask is set, no elsewhere; the operator ?: does this in C++ only. */
INLINE vec choose(ivec mask, vec yes, vec no) { return (vec)((mask & (ivec)yes) | (~mask & (ivec)no)); }

/* e^x, to about 2 ulp: 2^n p(r), Cody-Waite reduction, the polynomial of Cephes' expf; x is kept within +-87. */
INLINE vec exp_lanes(vec x) {
    const vec zero = {0}, most = zero + 87.0f, rounder = zero + 12582912.0f; /* 1.5 * 2^23: n in the low bits */
    x = choose(x < -most, -most, choose(x > most, most, x));
    vec rounded = x * 1.44269504f + rounder, whole = rounded - rounder;
    vec r = x - whole * 0.693359375f + whole * 2.12194440e-4f;
    vec p = r * 1.9875691500e-4f + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    return p * (vec)(((ivec)rounded - (ivec)rounder + 127) << 23);
}

/* cap tanh(x / cap), as attention.py's scores are capped: tanh y = 1 - 2 / (e^2y + 1). */
INLINE vec cap_lanes(vec x, float cap) { return cap - 2 * cap / (exp_lanes(x * (2 / cap)) + 1.0f); }
