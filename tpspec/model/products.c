/* y = x W^T + b for weights of 8 or 4 bits, on a CPU: reads the codes once for up to MOST_ROWS rows.
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
#define MOST_ROWS 6 /* with two vectors and two chains each, their sums fill 24 of AVX-512's 32 registers */
#define AHEAD 1024  /* bytes that are fetched in advance: half as long again for int4, where a page's end stalls */

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#define EVERY_CPU __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define EVERY_CPU
#endif
#define INLINE static inline __attribute__((always_inline))

typedef float vec __attribute__((vector_size(4 * LANES), aligned(4)));
typedef int32_t ivec __attribute__((vector_size(4 * LANES), aligned(4)));
typedef uint16_t hvec __attribute__((vector_size(2 * LANES), aligned(2)));

/* A weight is scale * code (8 bits: -127 to 127), or scale * (code - 8) + zero (4 bits: 0 to 15); a scale, and a zero,
 * serve `group` inputs of one output. `before`: inputs of the first group that another shard holds. */
typedef struct {
    int64_t bits, group, num_groups, num_outputs, num_inputs, before;
    const int32_t *words;           /* [tile][word][TILE]: 32 / bits consecutive codes of an output, the lowest bits first */
    const uint16_t *scales, *zeros; /* [tile][group][TILE], bfloat16; zeros: 4 bits only */
} Weight;

/* The rows of a call, and where their results go. x, y and bias (which may be NULL) are bfloat16 or float. */
typedef struct {
    const void *bias, *x;
    int64_t is_bfloat16, num_rows;
    void *y;
    float *spread, *sums;
} Rows;

INLINE vec widen(hvec halves) { return (vec)(__builtin_convertvector(halves, ivec) << 16); }

/* To bfloat16, nearest even; a NaN stays one. */
INLINE uint16_t narrow(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return value != value ? 0x7fc0 : (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
}

INLINE float number(const Rows *rows, const void *from, int64_t at) {
    if (!rows->is_bfloat16) return ((const float *)from)[at];
    uint32_t bits = (uint32_t)((const uint16_t *)from)[at] << 16;
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

/* Fills spread, x as floats in chunks of up to MOST_ROWS, [chunk][input][row], with zeros where other shards' inputs
 * stand, and sums, those of each group, [chunk][group][row]. */
EVERY_CPU void spread(const Weight *w, const Rows *rows) {
    int64_t width = w->group * w->num_groups;
    memset(rows->spread, 0, rows->num_rows * width * sizeof(float));
    memset(rows->sums, 0, rows->num_rows * w->num_groups * sizeof(float));
    for (int64_t first = 0; first < rows->num_rows; first += MOST_ROWS) {
        int64_t R = rows->num_rows - first < MOST_ROWS ? rows->num_rows - first : MOST_ROWS;
        float *to = rows->spread + first * width, *sum = rows->sums + first * w->num_groups;
        for (int64_t r = 0; r < R; r++)
            for (int64_t k = 0; k < w->num_inputs; k++) {
                float value = number(rows, rows->x, (first + r) * w->num_inputs + k);
                to[(w->before + k) * R + r] = value;
                sum[(w->before + k) / w->group * R + r] += value;
            }
    }
}

/* R rows by a tile: out [R][TILE]. Two chains of sums for each vector, for even and odd inputs. */
INLINE void tile_by_rows(const Weight *w, int64_t tile, const float *x, const float *sums, int64_t R, int bits, vec (*out)[2]) {
    const int each = 32 / bits;
    const ivec *from = (const ivec *)(w->words + tile * TILE * (w->group / each) * w->num_groups);
    const hvec *scales = (const hvec *)(w->scales + tile * TILE * w->num_groups);
    const hvec *zeros = bits == 4 ? (const hvec *)(w->zeros + tile * TILE * w->num_groups) : NULL;
    for (int64_t r = 0; r < R; r++) out[r][0] = out[r][1] = (vec){0};
    for (int64_t g = 0; g < w->num_groups; g++, scales += 2, sums += R) {
        vec chains[2][MOST_ROWS][2];
#pragma GCC unroll 6
        for (int64_t r = 0; r < R; r++) {
            chains[0][r][0] = chains[0][r][1] = (vec){0} - (bits == 4 ? 8 * sums[r] : 0);
            chains[1][r][0] = chains[1][r][1] = (vec){0};
        }
        for (int64_t k = 0; k < w->group; k += each, from += 2) {
            ivec low = from[0], high = from[1];
            __builtin_prefetch((const char *)from + AHEAD);
            __builtin_prefetch((const char *)from + AHEAD + sizeof *from);
#pragma GCC unroll 8
            for (int i = 0; i < each; i++, x += R) {
                vec weights[2];
                if (bits == 8) {
                    weights[0] = __builtin_convertvector((low << (24 - 8 * i)) >> 24, vec);
                    weights[1] = __builtin_convertvector((high << (24 - 8 * i)) >> 24, vec);
                } else {
                    weights[0] = __builtin_convertvector((low >> 4 * i) & 15, vec);
                    weights[1] = __builtin_convertvector((high >> 4 * i) & 15, vec);
                }
#pragma GCC unroll 6
                for (int64_t r = 0; r < R; r++) {
                    chains[i & 1][r][0] += x[r] * weights[0];
                    chains[i & 1][r][1] += x[r] * weights[1];
                }
            }
        }
#pragma GCC unroll 2
        for (int b = 0; b < 2; b++) {
            vec scale = widen(scales[b]);
#pragma GCC unroll 6
            for (int64_t r = 0; r < R; r++) {
                out[r][b] += (chains[0][r][b] + chains[1][r][b]) * scale;
                if (bits == 4) out[r][b] += sums[r] * widen(zeros[b]);
            }
        }
        if (bits == 4) zeros += 2;
    }
}

INLINE void rows_of(const Weight *w, int64_t tile, const float *x, const float *sums, int64_t R, vec (*out)[2]) {
    if (w->bits == 8) tile_by_rows(w, tile, x, sums, R, 8, out);
    else tile_by_rows(w, tile, x, sums, R, 4, out);
}

INLINE void store(const Weight *w, const Rows *rows, int64_t tile, const float *values, int64_t row) {
    for (int64_t i = 0, out = tile * TILE; i < TILE && out < w->num_outputs; i++, out++) {
        int64_t at = row * w->num_outputs + out;
        float value = rows->bias ? values[i] + number(rows, rows->bias, out) : values[i];
        if (rows->is_bfloat16) ((uint16_t *)rows->y)[at] = narrow(value);
        else ((float *)rows->y)[at] = value;
    }
}

/* Tiles [first, last) of all rows. */
EVERY_CPU void tiles(const Weight *w, const Rows *rows, int64_t first, int64_t last) {
    for (int64_t tile = first; tile < last; tile++)
        for (int64_t row = 0; row < rows->num_rows; row += MOST_ROWS) {
            const float *x = rows->spread + row * w->group * w->num_groups, *sums = rows->sums + row * w->num_groups;
            int64_t R = rows->num_rows - row < MOST_ROWS ? rows->num_rows - row : MOST_ROWS;
            vec out[MOST_ROWS][2];
            switch (R) { /* a literal, so that the sums stay in registers */
            case 1: rows_of(w, tile, x, sums, 1, out); break;
            case 2: rows_of(w, tile, x, sums, 2, out); break;
            case 3: rows_of(w, tile, x, sums, 3, out); break;
            case 4: rows_of(w, tile, x, sums, 4, out); break;
            case 5: rows_of(w, tile, x, sums, 5, out); break;
            default: rows_of(w, tile, x, sums, 6, out);
            }
            for (int64_t r = 0; r < R; r++) store(w, rows, tile, (const float *)out[r], row + r);
        }
}

/* x [num_rows, num_inputs] -> y [num_rows, num_outputs]. Returns 0, or -1 when there is no memory. */
int product(const Weight *w, const void *bias, const void *x, int64_t is_bfloat16, int64_t num_rows, void *y,
            int64_t num_threads) {
    int64_t width = w->group * w->num_groups, num_tiles = (w->num_outputs + TILE - 1) / TILE;
    float *scratch = malloc((width + w->num_groups) * num_rows * sizeof *scratch);
    if (!scratch && num_rows) return -1;
    Rows rows = {bias, x, is_bfloat16, num_rows, y, scratch, scratch + width * num_rows};
    spread(w, &rows);
#ifdef _OPENMP
#pragma omp parallel num_threads(num_threads) if (num_threads > 1)
    {
        int64_t num = omp_get_num_threads(), own = omp_get_thread_num();
        tiles(w, &rows, num_tiles * own / num, num_tiles * (own + 1) / num);
    }
#else
    tiles(w, &rows, 0, num_tiles);
#endif
    free(scratch);
    return 0;
}

/* What products.py must find, so that a library left over from other sources is not called. */
int64_t products_version(void) { return 1; }
