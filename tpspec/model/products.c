/* y = x W^T + b on a CPU, for weights of 8 or 4 bits, or in bfloat16: reads them once for a handful of rows.
 *
 * What quantized.py's DequantizedLinear does in torch, which is the reference; here a row's sums run in one order, so its
 * bits never depend on the rows beside it. Knows a matrix in tiles of 32 outputs; must not know what it belongs to.
 */
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#ifdef _OPENMP
#include <omp.h>
#endif

#define LANES 16
#define TILE (2 * LANES)
/* Bytes that are fetched in advance. Memory that is slow to answer wants many, or rows cost all that they compute: with
 * 8192 six rows in bfloat16 take 1.12 of the time of one here, with 1024 1.33. */
#define AHEAD(bits) ((bits) == 4 ? 4096 : 8192)

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#include <immintrin.h>
#define EVERY_CPU __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#define PAIRS __attribute__((target("arch=x86-64-v4,avx512bf16")))
#define HAS_PAIRS __builtin_cpu_supports("avx512bf16")
#else
#define EVERY_CPU
#define HAS_PAIRS 0
#endif
#define INLINE static inline __attribute__((always_inline))

typedef float vec __attribute__((vector_size(4 * LANES), aligned(4)));
typedef int32_t ivec __attribute__((vector_size(4 * LANES), aligned(4)));
typedef uint16_t hvec __attribute__((vector_size(2 * LANES), aligned(2)));

/* Of 16 bits: bfloat16 as it is, without scales, in one group of an even number of inputs; for bfloat16 rows where the CPU
 * multiplies pairs, and no others. Else a weight is scale * code + zero (8 bits: -128 to 127), or scale * (code - 8) + zero (4 bits: 0 to 15); a scale, and a
 * zero, serve `group` inputs of one output. `before`: inputs of the first group that another shard holds.
 * words: [tile][word][TILE], codes of 2, 4 or 8 consecutive inputs, the first lowest; of 4 bits the even inputs in the
 * lower half. scales, zeros: [tile][group][TILE], bfloat16, or float where `is_wide`; zeros may be NULL. */
typedef struct {
    int64_t bits, group, num_groups, num_outputs, num_inputs, before, is_wide;
    const int32_t *words;
    const void *scales, *zeros;
} Weight;

/* The rows of a call, and where their results go. x, y and bias (which may be NULL) are bfloat16 or float.
 * spread: inputs of up to `most` rows side by side, [chunk][input][row] floats, or where `in_pairs`
 * [chunk][input / 2][row] pairs of bfloat16; zeros where other shards' inputs stand. sums: of a group's inputs,
 * [chunk][group][row]. */
typedef struct {
    const void *bias, *x;
    int64_t is_bfloat16, in_pairs, most, num_rows;
    void *y;
    float *spread, *sums;
} Rows;

INLINE vec widen(hvec halves) { return (vec)(__builtin_convertvector(halves, ivec) << 16); }

/* 16 scales or zeros. */
INLINE vec steps(const Weight *w, const void *from, int64_t at) {
    if (w->is_wide) return *(const vec *)((const float *)from + at);
    return widen(*(const hvec *)((const uint16_t *)from + at));
}

/* To bfloat16, nearest even; a NaN stays one. */
INLINE hvec narrow(vec values) {
    ivec bits = (ivec)values, is_nan = values != values;
    return __builtin_convertvector((is_nan & 0x7fc0) | (~is_nan & ((bits + 0x7fff + ((bits >> 16) & 1)) >> 16)), hvec);
}

INLINE float number(const Rows *rows, const void *from, int64_t at) {
    if (!rows->is_bfloat16) return ((const float *)from)[at];
    uint32_t bits = (uint32_t)((const uint16_t *)from)[at] << 16;
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

/* 16 of a tensor like x, of which there are `left`; zeros stand for the rest. */
INLINE vec numbers(const Rows *rows, const void *from, int64_t at, int64_t left) {
    vec values = {0};
    if (left < LANES)
        for (int64_t i = 0; i < left; i++) values[i] = number(rows, from, at + i);
    else values = rows->is_bfloat16 ? widen(*(const hvec *)((const uint16_t *)from + at)) : *(const vec *)((const float *)from + at);
    return values;
}

/* Puts one of the R rows of a chunk where products look for it. */
INLINE void spread_pairs(const Weight *w, const uint16_t *from, int64_t R, int32_t *to) {
    int64_t i = w->before % 2, k = (w->before + 1) / 2;
    if (i) memcpy((uint16_t *)(to + (k - 1) * R) + 1, from, sizeof *from);
    for (; i + 1 < w->num_inputs; i += 2, k++) memcpy(to + k * R, from + i, sizeof *to);
    if (i < w->num_inputs) memcpy(to + k * R, from + i, sizeof *from);
}

INLINE void spread_numbers(const Weight *w, const Rows *rows, int64_t row, int64_t R, float *to) {
    for (int64_t i = 0; i < w->num_inputs; i++) to[(w->before + i) * R] = number(rows, rows->x, row * w->num_inputs + i);
}

INLINE void sum_up(const Weight *w, const Rows *rows, int64_t row, int64_t R, float *sums) {
    for (int64_t g = 0, from = 0; g < w->num_groups; g++) {
        int64_t end = (g + 1) * w->group - w->before;
        vec lanes = {0};
        if (end > w->num_inputs) end = w->num_inputs;
        for (int64_t i = from; i < end; i += LANES) lanes += numbers(rows, rows->x, row * w->num_inputs + i, end - i);
        float sum = 0;
        for (int i = 0; i < LANES; i++) sum += lanes[i];
        sums[g * R] = sum;
        from = end;
    }
}

EVERY_CPU void spread(const Weight *w, const Rows *rows) {
    int64_t width = w->group * w->num_groups / (rows->in_pairs ? 2 : 1);
    memset(rows->spread, 0, rows->num_rows * width * sizeof(float));
    for (int64_t row = 0; row < rows->num_rows; row++) {
        int64_t r = row % rows->most, first = row - r;
        int64_t R = rows->num_rows - first < rows->most ? rows->num_rows - first : rows->most;
        float *to = rows->spread + first * width + r;
        if (rows->in_pairs) spread_pairs(w, (const uint16_t *)rows->x + row * w->num_inputs, R, (int32_t *)to);
        else spread_numbers(w, rows, row, R, to);
        if (w->bits == 4 || w->zeros) sum_up(w, rows, row, R, rows->sums + first * w->num_groups + r);
    }
}

/* Code i of 32 / bits in a word, less what the sums over a group make up for. */
INLINE vec weights_of(ivec word, int i, int bits) {
    if (bits == 8) return __builtin_convertvector((word << (24 - 8 * i)) >> 24, vec);
    return __builtin_convertvector((word >> (4 * (i / 2) + 16 * (i % 2))) & 15, vec);
}

/* R rows by a tile: out [R][TILE]. Two chains of sums for each vector, for even and odd inputs. */
INLINE void tile_by_rows(const Weight *w, int64_t tile, const float *x, const float *sums, int64_t R, int bits, vec (*out)[2]) {
    const int each = 32 / bits;
    const ivec *from = (const ivec *)(w->words + tile * TILE * (w->group / each) * w->num_groups);
    int64_t step = tile * TILE * w->num_groups;
    for (int64_t r = 0; r < R; r++) out[r][0] = out[r][1] = (vec){0};
    for (int64_t g = 0; g < w->num_groups; g++, step += TILE, sums += R) {
        vec chains[2][6][2];
#pragma GCC unroll 6
        for (int64_t r = 0; r < R; r++) {
            chains[0][r][0] = chains[0][r][1] = (vec){0} - (bits == 4 ? 8 * sums[r] : 0);
            chains[1][r][0] = chains[1][r][1] = (vec){0};
        }
        for (int64_t k = 0; k < w->group; k += each, from += 2) {
            ivec low = from[0], high = from[1];
            __builtin_prefetch((const char *)from + AHEAD(bits));
            __builtin_prefetch((const char *)from + AHEAD(bits) + sizeof *from);
#pragma GCC unroll 8
            for (int i = 0; i < each; i++, x += R) {
                vec first = weights_of(low, i, bits), second = weights_of(high, i, bits);
#pragma GCC unroll 6
                for (int64_t r = 0; r < R; r++) {
                    chains[i & 1][r][0] += x[r] * first;
                    chains[i & 1][r][1] += x[r] * second;
                }
            }
        }
#pragma GCC unroll 2
        for (int b = 0; b < 2; b++) {
            vec scale = steps(w, w->scales, step + b * LANES), zero = {0};
            if (w->zeros) zero = steps(w, w->zeros, step + b * LANES);
#pragma GCC unroll 6
            for (int64_t r = 0; r < R; r++) {
                out[r][b] += (chains[0][r][b] + chains[1][r][b]) * scale;
                if (w->zeros) out[r][b] += sums[r] * zero;
            }
        }
    }
}

INLINE void store(const Weight *w, const Rows *rows, int64_t tile, const vec *values, int64_t row) {
    int64_t size = rows->is_bfloat16 ? sizeof(uint16_t) : sizeof(float);
    for (int64_t b = 0, out = tile * TILE; b < 2 && out < w->num_outputs; b++, out += LANES) {
        int64_t left = w->num_outputs - out;
        char *to = (char *)rows->y + (row * w->num_outputs + out) * size;
        vec value = rows->bias ? values[b] + numbers(rows, rows->bias, out, left) : values[b];
        hvec half = narrow(value);
        memcpy(to, rows->is_bfloat16 ? (const void *)&half : (const void *)&value, (left < LANES ? left : LANES) * size);
    }
}

/* One case for each number of rows, so that it is a literal and the sums stay in registers. */
#define BY(R, VERB, OTHERS)                                          \
    case R:                                                          \
        if (w->bits == 8) VERB(w, tile, x, sums, R, 8, out);         \
        else if (w->bits == 4) VERB(w, tile, x, sums, R, 4, out);    \
        else OTHERS;                                                 \
        break;
#define EACH_CHUNK(CASES)                                                                                          \
    for (int64_t tile = first; tile < last; tile++)                                                                \
        for (int64_t row = 0; row < rows->num_rows; row += rows->most) {                                           \
            int64_t R = rows->num_rows - row < rows->most ? rows->num_rows - row : rows->most;                     \
            const float *x = rows->spread + row * w->group * w->num_groups / (rows->in_pairs ? 2 : 1);             \
            const float *sums = rows->sums + row * w->num_groups;                                                  \
            vec out[12][2];                                                                                        \
            switch (R) { CASES }                                                                                   \
            for (int64_t r = 0; r < R; r++) store(w, rows, tile, out[r], row + r);                                 \
        }

/* Tiles [first, last) of all rows. */
EVERY_CPU void tiles(const Weight *w, const Rows *rows, int64_t first, int64_t last) {
#define ROWS(R) BY(R, tile_by_rows, __builtin_trap())
    EACH_CHUNK(ROWS(1) ROWS(2) ROWS(3) ROWS(4) ROWS(5) ROWS(6))
}

#ifdef PAIRS
/* The same for bfloat16 rows where the CPU multiplies pairs of them: codes are exact in bfloat16, products in float.
 * A code of 4 bits is put into the fraction of a number of 16 to 31: 24 times the sum of x is taken off. */
PAIRS static inline __attribute__((always_inline)) ivec pair_of(ivec word, int i, int bits) {
    if (bits == 16) return word;
    if (bits == 4) return ((i ? word >> (4 * i - 3) : word << 3) & 0x00780078) | 0x41804180;
    return (ivec)weights_of(word, 2 * i + 1, 8) | ((ivec)weights_of(word, 2 * i, 8) >> 16 & 0xffff);
}

PAIRS static inline __attribute__((always_inline)) void tile_by_pairs(const Weight *w, int64_t tile, const float *x,
                                                                      const float *sums, int64_t R, int bits, vec (*out)[2]) {
    const int each = 32 / bits;
    const ivec *from = (const ivec *)(w->words + tile * TILE * (w->group / each) * w->num_groups);
    int64_t step = tile * TILE * w->num_groups;
    const int32_t *pairs = (const int32_t *)x;
    for (int64_t r = 0; r < R; r++) out[r][0] = out[r][1] = (vec){0};
    for (int64_t g = 0; g < w->num_groups; g++, step += TILE, sums += R) {
        __m512 chains[12][2];
#pragma GCC unroll 12
        for (int64_t r = 0; r < R; r++) chains[r][0] = chains[r][1] = _mm512_set1_ps(bits == 4 ? -24 * sums[r] : 0);
        for (int64_t k = 0; k < w->group; k += each, from += 2) {
            ivec low = from[0], high = from[1];
            __builtin_prefetch((const char *)from + AHEAD(bits));
            __builtin_prefetch((const char *)from + AHEAD(bits) + sizeof *from);
#pragma GCC unroll 4
            for (int i = 0; i < each / 2; i++, pairs += R) {
                __m512bh first = (__m512bh)pair_of(low, i, bits), second = (__m512bh)pair_of(high, i, bits);
#pragma GCC unroll 12
                for (int64_t r = 0; r < R; r++) {
                    __m512bh row = (__m512bh)_mm512_set1_epi32(pairs[r]);
                    chains[r][0] = _mm512_dpbf16_ps(chains[r][0], row, first);
                    chains[r][1] = _mm512_dpbf16_ps(chains[r][1], row, second);
                }
            }
        }
#pragma GCC unroll 2
        for (int b = 0; b < 2; b++) {
            vec scale = {0}, zero = {0};
            if (bits != 16) scale = steps(w, w->scales, step + b * LANES);
            if (w->zeros) zero = steps(w, w->zeros, step + b * LANES);
#pragma GCC unroll 12
            for (int64_t r = 0; r < R; r++) {
                if (bits == 16) {
                    out[r][b] = (vec)chains[r][b];
                    continue;
                }
                out[r][b] += (vec)chains[r][b] * scale;
                if (w->zeros) out[r][b] += sums[r] * zero;
            }
        }
    }
}

PAIRS static void tiles_by_pairs(const Weight *w, const Rows *rows, int64_t first, int64_t last) {
#define PAIRED(R) BY(R, tile_by_pairs, tile_by_pairs(w, tile, x, sums, R, 16, out))
    EACH_CHUNK(PAIRED(1) PAIRED(2) PAIRED(3) PAIRED(4) PAIRED(5) PAIRED(6) PAIRED(7) PAIRED(8) PAIRED(9) PAIRED(10)
               PAIRED(11) PAIRED(12))
}
#else
#define tiles_by_pairs tiles
#endif

/* x [num_rows, num_inputs] -> y [num_rows, num_outputs]. Returns 0, or -1 when there is no memory. */
int product(const Weight *w, const void *bias, const void *x, int64_t is_bfloat16, int64_t num_rows, void *y,
            int64_t num_threads) {
    int64_t width = w->group * w->num_groups, num_tiles = (w->num_outputs + TILE - 1) / TILE;
    int64_t in_pairs = is_bfloat16 && HAS_PAIRS;
    float *scratch = malloc((width + w->num_groups) * num_rows * sizeof *scratch);
    if (!scratch && num_rows) return -1;
    /* The sums of 6 rows, in two chains, or of 12 in one, fill 24 of AVX-512's 32 registers. */
    Rows rows = {bias, x, is_bfloat16, in_pairs, in_pairs ? 12 : 6, num_rows, y, scratch, scratch + width * num_rows};
    spread(w, &rows);
    void (*compute)(const Weight *, const Rows *, int64_t, int64_t) = in_pairs ? tiles_by_pairs : tiles;
#ifdef _OPENMP
#pragma omp parallel num_threads(num_threads) if (num_threads > 1)
    {
        int64_t num = omp_get_num_threads(), own = omp_get_thread_num();
        compute(w, &rows, num_tiles * own / num, num_tiles * (own + 1) / num);
    }
#else
    (void)num_threads;
    compute(w, &rows, 0, num_tiles);
#endif
    free(scratch);
    return 0;
}

/* Whether weights of 16 bits may be given. */
int multiplies_pairs(void) { return HAS_PAIRS; }

/* What products.py must find, so that a library left over from other sources is not called. */
int64_t products_version(void) { return 3; }
