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

#include "lanes.h"

#define TILE 32
/* What a weight is made of: see Weight. */
enum codes { FOURS, MIRRORED, TABLED, EIGHTS, FLOATS, HALVES };
#define EACH(codes) ((codes) <= TABLED ? 8 : (codes) <= FLOATS ? 4 : 2) /* in a word */

/* Bytes that are fetched in advance. Memory that is slow to answer wants many, or rows cost all that they compute: with
 * 8192 six rows in bfloat16 take 1.12 of the time of one here, with 1024 1.33. */
#define AHEAD(codes) ((codes) <= TABLED ? 4096 : 8192)

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#include <immintrin.h>
#define PAIRS __attribute__((target("arch=x86-64-v4,avx512bf16,avx512vbmi")))
#define HAS_PAIRS (__builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx512vbmi"))
#else
#define HAS_PAIRS 0
#endif
#define VECTORS (TILE / LANES)

typedef uint8_t bvec __attribute__((vector_size(LANES), aligned(1)));

/* HALVES: bfloat16 as they are, without scales, in one group of an even number of inputs; for bfloat16 rows. Else a
 * weight is scale * code + zero: of EIGHTS -128 to 127, of FOURS 0 to 15, less 8, and of FLOATS what E4M3 has for a byte,
 * of which those without a sign are the table; or scale * table[code], of 4 bits, in bfloat16 where rows are multiplied in
 * pairs. MIRRORED: half of that table is the other's negative. A scale, and a zero, serve `group` inputs of one output.
 * `before`: inputs of the first group that another shard holds.
 * words: [tile][word][TILE], codes of 2, 4 or 8 consecutive inputs, the first lowest; of 4 bits the even inputs in the
 * lower half. scales, zeros: [tile][group][TILE], of so many scale_bits: bfloat16 or float; zeros may be NULL. With
 * scale_bits of 8 scales are exponents of powers of two, or, where there are gains, floats of 8 bits (E4M3), and a weight
 * has its output's gain as well, [tile][TILE]. */
typedef struct {
    int64_t codes, group, num_groups, num_outputs, num_inputs, before, scale_bits;
    const int32_t *words;
    const void *scales, *zeros;
    const float *table, *gains;
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

/* What a float of 8 bits is less than the float that has its exponent and fraction where E4M3 has them, 20 bits lower. */
#define E4M3_LOWER 0x1p120f

/* LANES scales or zeros. */
INLINE vec steps(const Weight *w, const void *from, int64_t at) {
    if (w->scale_bits == 32) return *(const vec *)((const float *)from + at);
    if (w->scale_bits == 8) {
        ivec bytes = __builtin_convertvector(*(const bvec *)((const uint8_t *)from + at), ivec);
        return w->gains ? (vec)(bytes << 20) * E4M3_LOWER : (vec)(bytes << 23);
    }
    return widen(*(const hvec *)((const uint16_t *)from + at));
}

INLINE float number(const Rows *rows, const void *from, int64_t at) {
    if (!rows->is_bfloat16) return ((const float *)from)[at];
    uint32_t bits = (uint32_t)((const uint16_t *)from)[at] << 16;
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

/* LANES of a tensor like x, of which there are `left`; zeros stand for the rest. */
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

/* Of rows [start, stop), which are whole chunks. */
VECTOR_CPU void spread(const Weight *w, const Rows *rows, int64_t start, int64_t stop) {
    int64_t width = w->group * w->num_groups / (rows->in_pairs ? 2 : 1);
    memset(rows->spread + start * width, 0, (stop - start) * width * sizeof(float));
    for (int64_t row = start; row < stop; row++) {
        int64_t r = row % rows->most, first = row - r;
        int64_t R = rows->num_rows - first < rows->most ? rows->num_rows - first : rows->most;
        float *to = rows->spread + first * width + r;
        if (rows->in_pairs) spread_pairs(w, (const uint16_t *)rows->x + row * w->num_inputs, R, (int32_t *)to);
        else spread_numbers(w, rows, row, R, to);
        if (w->codes == FOURS || w->zeros) sum_up(w, rows, row, R, rows->sums + first * w->num_groups + r);
    }
}

/* Of half a table, by the lowest three bits of each code: shuffles look at no more. */
INLINE vec in_half(const vec *half, ivec code) {
#if LANES == 8
    return __builtin_shuffle(half[0], code);
#else
    return __builtin_shuffle(half[0], half[1], code);
#endif
}

/* What codes stand for, by the lowest four bits of each, of which the fourth says in which half. */
VECTOR_CPU INLINE vec looked_up(const float *table, ivec code, enum codes codes) {
    vec low = in_half((const vec *)table, code);
    if (codes == MIRRORED) return (vec)((ivec)low ^ (code & 8) << 28); /* so that sums of six rows stay in registers */
    vec high = in_half((const vec *)(table + 8), code);
#if LANES == 8
    return (vec)_mm256_blendv_ps((__m256)low, (__m256)high, (__m256)(code << 28));
#else
    return choose((code << 28) >> 31, high, low);
#endif
}

/* A code of a word, less what the sums over a group make up for. */
VECTOR_CPU INLINE vec weights_of(const float *table, ivec word, int i, enum codes codes) {
    if (codes == HALVES) return (vec)(i ? word & (int32_t)0xffff0000 : word << 16);
    if (codes == EIGHTS) return __builtin_convertvector((word << (24 - 8 * i)) >> 24, vec);
    if (codes == FLOATS) {
        ivec byte = word << (24 - 8 * i);
        vec size = (vec)((byte >> 4) & 0x07f00000) * E4M3_LOWER;
        return (vec)((ivec)size | (byte & (int32_t)0x80000000));
    }
    ivec code = word >> (4 * (i / 2) + 16 * (i % 2));
    return codes == MIRRORED || codes == TABLED ? looked_up(table, code, codes) : __builtin_convertvector(code & 15, vec);
}

/* R rows by vectors [first, first + num) of a tile: out [R][VECTORS]. */
VECTOR_CPU INLINE void vectors_by_rows(const Weight *w, int64_t tile, const float *x, const float *sums, int64_t R,
                            enum codes codes, int first, int num, vec (*out)[VECTORS]) {
    const int each = EACH(codes);
    const ivec *from = (const ivec *)(w->words + tile * TILE * (w->group / each) * w->num_groups) + first;
    int64_t step = tile * TILE * w->num_groups + first * LANES;
    vec result[6][VECTORS];
    for (int64_t r = 0; r < R; r++)
        for (int b = 0; b < num; b++) result[r][b] = (vec){0};
    for (int64_t g = 0; g < w->num_groups; g++, step += TILE, sums += R) {
        vec chains[6][VECTORS];
#pragma GCC unroll 6
        for (int64_t r = 0; r < R; r++)
#pragma GCC unroll 8
            for (int b = 0; b < num; b++) chains[r][b] = (vec){0} - (codes == FOURS ? 8 * sums[r] : 0);
        for (int64_t k = 0; k < w->group; k += each, from += VECTORS) {
#pragma GCC unroll 2
            for (int line = 0; line < num * LANES; line += 16) __builtin_prefetch((const char *)from + 4 * line + AHEAD(codes));
#pragma GCC unroll 1 /* or all of a word's codes are in registers at once, and sums are not */
            for (int i = 0; i < each; i++, x += R) {
                vec weights[VECTORS];
#pragma GCC unroll 8
                for (int b = 0; b < num; b++) weights[b] = weights_of(w->table, from[b], i, codes);
#pragma GCC unroll 6
                for (int64_t r = 0; r < R; r++) {
                    vec row = EVERY(x[r]);
#pragma GCC unroll 8
                    for (int b = 0; b < num; b++) chains[r][b] += row * weights[b];
                }
            }
        }
#pragma GCC unroll 8
        for (int b = 0; b < num; b++) {
            vec scale = {0}, zero = {0};
            if (codes != HALVES) scale = steps(w, w->scales, step + b * LANES);
            if (w->zeros) zero = steps(w, w->zeros, step + b * LANES);
#pragma GCC unroll 6
            for (int64_t r = 0; r < R; r++) {
                if (codes == HALVES) result[r][b] = chains[r][b];
                else result[r][b] += chains[r][b] * scale;
                if (w->zeros) result[r][b] += sums[r] * zero;
            }
        }
    }
    for (int64_t r = 0; r < R; r++)
        for (int b = 0; b < num; b++) out[r][first + b] = result[r][b];
}

/* By half a tile: the sums of 6 rows fill 12 of AVX2's 16 registers, or 24 of NEON's 32. One row has too few of them to
 * keep a CPU busy, and takes a whole tile. */
VECTOR_CPU INLINE void tile_by_rows(const Weight *w, int64_t tile, const float *x, const float *sums, int64_t R,
                         enum codes codes, vec (*out)[VECTORS]) {
    const int num = R == 1 ? VECTORS : VECTORS / 2;
    vectors_by_rows(w, tile, x, sums, R, codes, 0, num, out);
    if (R > 1) vectors_by_rows(w, tile, x, sums, R, codes, num, num, out);
}

INLINE void store(const Weight *w, const Rows *rows, int64_t tile, const vec *values, int64_t row) {
    int64_t size = rows->is_bfloat16 ? sizeof(uint16_t) : sizeof(float);
    for (int64_t b = 0, out = tile * TILE; b < VECTORS && out < w->num_outputs; b++, out += LANES) {
        int64_t left = w->num_outputs - out;
        char *to = (char *)rows->y + (row * w->num_outputs + out) * size;
        vec value = w->gains ? values[b] * *(const vec *)(w->gains + out) : values[b];
        if (rows->bias) value += numbers(rows, rows->bias, out, left);
        hvec half = narrow(value);
        if (left < LANES) memcpy(to, rows->is_bfloat16 ? (const void *)&half : (const void *)&value, left * size);
        else if (rows->is_bfloat16) *(hvec *)to = half;
        else *(vec *)to = value;
    }
}

/* One case for each number of rows, so that it is a literal and the sums stay in registers. */
#define BY(R, VERB)                                                            \
    case R:                                                                    \
        if (codes == EIGHTS) VERB(w, tile, x, sums, R, EIGHTS, out);           \
        else if (codes == FOURS) VERB(w, tile, x, sums, R, FOURS, out);        \
        else if (codes == MIRRORED) VERB(w, tile, x, sums, R, MIRRORED, out);  \
        else if (codes == TABLED) VERB(w, tile, x, sums, R, TABLED, out);      \
        else if (codes == FLOATS) VERB(w, tile, x, sums, R, FLOATS, out);      \
        else VERB(w, tile, x, sums, R, HALVES, out);                           \
        break;
#define EACH_CHUNK(CASES)                                                                                          \
    const enum codes codes = w->codes;                                                                             \
    for (int64_t tile = first; tile < last; tile++)                                                                \
        for (int64_t row = 0; row < rows->num_rows; row += rows->most) {                                           \
            int64_t R = rows->num_rows - row < rows->most ? rows->num_rows - row : rows->most;                     \
            const float *x = rows->spread + row * w->group * w->num_groups / (rows->in_pairs ? 2 : 1);             \
            const float *sums = rows->sums + row * w->num_groups;                                                  \
            vec out[12][VECTORS];                                                                                      \
            switch (R) { CASES }                                                                                   \
            for (int64_t r = 0; r < R; r++) store(w, rows, tile, out[r], row + r);                                 \
        }

/* Tiles [first, last) of all rows. */
VECTOR_CPU void tiles(const Weight *w, const Rows *rows, int64_t first, int64_t last) {
#define ROWS(R) BY(R, tile_by_rows)
    EACH_CHUNK(ROWS(1) ROWS(2) ROWS(3) ROWS(4) ROWS(5) ROWS(6))
}

#ifdef PAIRS
/* The same for bfloat16 rows where the CPU multiplies pairs of them: codes are exact in bfloat16, products in float.
 * A code of 4 bits is put into the fraction of a number of 16 to 31: 24 times the sum of x is taken off; one of a table is
 * looked up, in bfloat16. */
PAIRS INLINE __m512i code_of(__m512i word, int i) {
    return (__m512i)_mm512_cvtepi32_ps(_mm512_srai_epi32(_mm512_slli_epi32(word, 24 - 8 * i), 24));
}

/* A table in bfloat16. Of 4 bits it is there twice: the fifth bit of an index, which is another code's, then is of no
 * matter. Of FLOATS lower bytes and upper ones are apart, for 64 of its numbers each; places: where those of a word's first
 * two codes, and of its last two, then are found among both, one number after the other. */
typedef struct {
    __m512i twice, lower[2], upper[2], places[2];
} Halves;

#define PLACES(lane, code) 4 * (lane) + (code), 4 * (lane) + (code) + 64, 4 * (lane) + (code) + 1, 4 * (lane) + (code) + 65
#define FOUR_LANES(lane, code) PLACES(lane, code), PLACES(lane + 1, code), PLACES(lane + 2, code), PLACES(lane + 3, code)
#define EVERY_LANE(code) FOUR_LANES(0, code), FOUR_LANES(4, code), FOUR_LANES(8, code), FOUR_LANES(12, code)
static const uint8_t places_of[2][64] = {{EVERY_LANE(0)}, {EVERY_LANE(2)}};

PAIRS INLINE __m256i halves_at(const float *table) { return (__m256i)_mm512_cvtneps_pbh(_mm512_loadu_ps(table)); }

PAIRS INLINE void read_halves(const float *table, enum codes codes, Halves *to) {
    if (codes == MIRRORED || codes == TABLED) to->twice = _mm512_broadcast_i64x4(halves_at(table));
    if (codes != FLOATS) return;
    for (int at = 0; at < 128; at += 16) {
        __m256i some = halves_at(table + at);
        _mm_storeu_si128((__m128i *)((char *)to->lower + at), _mm256_cvtepi16_epi8(some));
        _mm_storeu_si128((__m128i *)((char *)to->upper + at), _mm256_cvtepi16_epi8(_mm256_srli_epi16(some, 8)));
    }
    memcpy(to->places, places_of, sizeof to->places);
}

PAIRS INLINE __m512bh floats_of(const Halves *table, __m512i word, int i) {
    __m512i lower = _mm512_permutex2var_epi8(table->lower[0], word, table->lower[1]);
    __m512i upper = _mm512_permutex2var_epi8(table->upper[0], word, table->upper[1]);
    upper |= word & _mm512_set1_epi8((char)0x80);
    return (__m512bh)_mm512_permutex2var_epi8(lower, table->places[i], upper);
}

PAIRS INLINE __m512bh pair_of(const Halves *table, __m512i word, int i, enum codes codes) {
    if (codes == HALVES) return (__m512bh)word;
    if (codes == MIRRORED || codes == TABLED) return (__m512bh)_mm512_permutexvar_epi16(_mm512_srli_epi16(word, 4 * i), table->twice);
    if (codes == FLOATS) return floats_of(table, word, i);
    if (codes == EIGHTS) return (__m512bh)(code_of(word, 2 * i + 1) | _mm512_srli_epi32(code_of(word, 2 * i), 16));
    __m512i fours = i ? _mm512_srli_epi32(word, 4 * i - 3) : _mm512_slli_epi32(word, 3);
    return (__m512bh)((fours & _mm512_set1_epi32(0x00780078)) | _mm512_set1_epi32(0x41804180));
}

PAIRS INLINE __m512 wide_steps(const Weight *w, const void *from, int64_t at) {
    if (w->scale_bits == 32) return _mm512_loadu_ps((const float *)from + at);
    if (w->scale_bits == 8) {
        __m512i bytes = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)((const uint8_t *)from + at)));
        if (!w->gains) return (__m512)_mm512_slli_epi32(bytes, 23);
        return _mm512_mul_ps((__m512)_mm512_slli_epi32(bytes, 20), _mm512_set1_ps(E4M3_LOWER));
    }
    return (__m512)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)((const uint16_t *)from + at))), 16);
}

PAIRS INLINE void tile_by_pairs(const Weight *w, int64_t tile, const float *x, const float *sums, int64_t R,
                                enum codes codes, vec (*out)[VECTORS]) {
    const int each = EACH(codes);
    const __m512i *from = (const __m512i *)(w->words + tile * TILE * (w->group / each) * w->num_groups);
    int64_t step = tile * TILE * w->num_groups;
    const int32_t *pairs = (const int32_t *)x;
    Halves table;
    read_halves(w->table, codes, &table);
    __m512 result[12][2];
    for (int64_t r = 0; r < R; r++) result[r][0] = result[r][1] = _mm512_setzero_ps();
    for (int64_t g = 0; g < w->num_groups; g++, step += TILE, sums += R) {
        __m512 chains[12][2];
#pragma GCC unroll 12
        for (int64_t r = 0; r < R; r++) chains[r][0] = chains[r][1] = _mm512_set1_ps(codes == FOURS ? -24 * sums[r] : 0);
        for (int64_t k = 0; k < w->group; k += each, from += 2) {
            __m512i low = _mm512_loadu_si512(from), high = _mm512_loadu_si512(from + 1);
            __builtin_prefetch((const char *)from + AHEAD(codes));
            __builtin_prefetch((const char *)from + AHEAD(codes) + sizeof *from);
#pragma GCC unroll 4
            for (int i = 0; i < each / 2; i++, pairs += R) {
                __m512bh first = pair_of(&table, low, i, codes), second = pair_of(&table, high, i, codes);
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
            __m512 scale = _mm512_setzero_ps(), zero = _mm512_setzero_ps();
            if (codes != HALVES) scale = wide_steps(w, w->scales, step + b * 16);
            if (w->zeros) zero = wide_steps(w, w->zeros, step + b * 16);
#pragma GCC unroll 12
            for (int64_t r = 0; r < R; r++) {
                if (codes == HALVES) result[r][b] = chains[r][b];
                else result[r][b] += chains[r][b] * scale;
                if (w->zeros) result[r][b] += sums[r] * zero;
            }
        }
    }
    for (int64_t r = 0; r < R; r++) memcpy(out[r], result[r], sizeof *out);
}

PAIRS static void tiles_by_pairs(const Weight *w, const Rows *rows, int64_t first, int64_t last) {
#define PAIRED(R) BY(R, tile_by_pairs)
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
    /* The sums of 12 rows by a tile, in one chain, fill 24 of AVX-512's 32 registers. */
    Rows rows = {bias, x, is_bfloat16, in_pairs, in_pairs ? 12 : 6, num_rows, y, scratch, scratch + width * num_rows};
    void (*compute)(const Weight *, const Rows *, int64_t, int64_t) = in_pairs ? tiles_by_pairs : tiles;
#ifdef _OPENMP
    int64_t num_chunks = (num_rows + rows.most - 1) / rows.most;
    if (num_chunks <= 1) spread(w, &rows, 0, num_rows); /* sooner done than waited for */
#pragma omp parallel num_threads(num_threads) if (num_threads > 1)
    {
        int64_t num = omp_get_num_threads(), own = omp_get_thread_num();
        if (num_chunks > 1) {
            int64_t stop = num_chunks * (own + 1) / num * rows.most;
            spread(w, &rows, num_chunks * own / num * rows.most, stop < num_rows ? stop : num_rows);
#pragma omp barrier
        }
        compute(w, &rows, num_tiles * own / num, num_tiles * (own + 1) / num);
    }
#else
    (void)num_threads;
    spread(w, &rows, 0, num_rows);
    compute(w, &rows, 0, num_tiles);
#endif
    free(scratch);
    return 0;
}

/* Whether 12 rows in bfloat16 are multiplied at once, pair by pair. */
int multiplies_pairs(void) { return HAS_PAIRS; }

/* What products.py must find, so that a library left over from other sources is not called, nor any on a CPU without the
 * instructions that it is made of. */
int64_t products_version(void) { return RUNS_HERE ? 9 : 0; }
