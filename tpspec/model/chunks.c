/* Attention of many rows, as of a prompt's chunk, on a CPU: block after block of keys, beside a running maximum (Milakov,
 * Gimelshein, arXiv 1805.02867; Dao, FlashAttention-2, arXiv 2307.08691).
 *
 * attention.py's `fused` is the reference, and half as fast where vectors have 16 floats; elsewhere it is as fast, and
 * runs. Here a lane of a vector is a row, and one number of a key or value is multiplied by rows side by side: nothing is
 * summed across lanes, arithmetic is float32, and a row's bits do not depend on the rows beside it. Knows no sequences and
 * no pages: rows, keys and a mask.
 */
#include <stdint.h>
#include <string.h>

#define WIDE
#include "lanes.h"

#define MAX_DIM 576 /* head dimension, a multiple of LANES */
#define KEYS 64     /* of a block */
#define VECTORS 3   /* of rows that are computed side by side, at most */
#define TOGETHER 8  /* keys, or numbers of a value, in a turn: with 3 vectors of rows 24 sums in 32 registers */
#define UNSEEN -1e30f /* the score of a key that a row does not see */

/* One layer's attention. q, out: [heads, rows, dim]; keys, values: [heads, keys, dim], so many numbers from head to head;
 * the keys may be their own values; mask, which may be NULL: [rows, keys], 0 where a row sees a key. All are bfloat16 or
 * all float. sinks, which may be NULL: [heads, rows], a score beside those of the keys. cap: see lanes.h; 0: none. */
typedef struct {
    int64_t is_bfloat16, num_heads, num_rows, num_keys, dim, key_stride, value_stride;
    const void *q, *keys, *values, *mask;
    const float *sinks;
    void *out;
    float scale, cap;
} Call;

/* `count` numbers from `at` on, as floats; and back. */
INLINE void get(const Call *call, const void *from, int64_t at, int64_t count, float *to) {
    if (!call->is_bfloat16) memcpy(to, (const float *)from + at, count * sizeof *to);
    else
        for (int64_t i = 0; i < count; i += LANES)
            *(vec *)(to + i) = widen(*(const hvec *)((const uint16_t *)from + at + i));
}

INLINE void put(const Call *call, const float *from, int64_t count, int64_t at) {
    if (!call->is_bfloat16) memcpy((float *)call->out + at, from, count * sizeof *from);
    else
        for (int64_t i = 0; i < count; i += LANES)
            *(hvec *)((uint16_t *)call->out + at + i) = narrow(*(const vec *)(from + i));
}

INLINE int is_unseen(const Call *call, int64_t at) {
    return call->is_bfloat16 ? ((const uint16_t *)call->mask)[at] != 0 : ((const uint32_t *)call->mask)[at] != 0;
}

/* How many pairs of `rows` rows and `count` keys do not meet. */
INLINE int64_t num_unseen(const Call *call, int64_t row, int64_t rows, int64_t key, int64_t count) {
    int64_t num = 0;
    for (int64_t r = row; call->mask && r < row + rows; r++) {
        int64_t at = r * call->num_keys + key;
        int32_t some = 0;
        if (call->is_bfloat16)
            for (int64_t k = 0; k < count; k++) some += ((const uint16_t *)call->mask)[at + k] != 0;
        else
            for (int64_t k = 0; k < count; k++) some += ((const uint32_t *)call->mask)[at + k] != 0;
        num += some;
    }
    return num;
}

/* TOGETHER numbers of each of `count` lines by N vectors of the line: sums [TOGETHER][N] go on from what they are. The
 * numbers of a line are `next` apart, lines `line` apart. */
INLINE void multiply(const vec *rows, const float *numbers, int64_t count, int64_t line, int64_t next, int N, vec *sums_at) {
    vec sums[TOGETHER][VECTORS];
#pragma GCC unroll 8
    for (int j = 0; j < TOGETHER; j++)
#pragma GCC unroll 3
        for (int n = 0; n < N; n++) sums[j][n] = sums_at[j * N + n];
    for (int64_t i = 0; i < count; i++, rows += N, numbers += line) {
#pragma GCC unroll 8
        for (int j = 0; j < TOGETHER; j++) {
            vec number = EVERY(numbers[j * next]);
#pragma GCC unroll 3
            for (int n = 0; n < N; n++) sums[j][n] += number * rows[n];
        }
    }
#pragma GCC unroll 8
    for (int j = 0; j < TOGETHER; j++)
#pragma GCC unroll 3
        for (int n = 0; n < N; n++) sums_at[j * N + n] = sums[j][n];
}

/* Scores [count][N] -> weights in place, of one vector of rows; what is in out [dim][N] fades as the maximum grows. */
INLINE void soften(vec *scores, int64_t count, int some_unseen, int N, vec *most, vec *total, vec *out, int64_t dim) {
    vec top = *most, sum = {0};
    for (int64_t k = 0; k < count; k++) top = choose(scores[k * N] > top, scores[k * N], top);
    for (int64_t k = 0; k < count; k++) {
        vec weight = exp_lanes(scores[k * N] - top);
        if (some_unseen) weight = choose(scores[k * N] < EVERY(UNSEEN / 10), (vec){0}, weight);
        scores[k * N] = weight, sum += weight;
    }
    vec faded = exp_lanes(*most - top);
    for (int64_t e = 0; e < dim; e++) out[e * N] *= faded;
    *total = *total * faded + sum, *most = top;
}

/* `rows` rows of a head, N vectors of them. dim and N are literals where it matters. */
INLINE void rows_of(const Call *call, int64_t head, int64_t row, int64_t rows, int64_t dim, int N) {
    float keys[KEYS * MAX_DIM], others[KEYS * MAX_DIM], flat[MAX_DIM];
    float *values = call->values == call->keys ? keys : others;
    vec q[MAX_DIM * VECTORS], out[MAX_DIM * VECTORS], scores[KEYS * VECTORS], most[VECTORS], total[VECTORS];
    int64_t first = (head * call->num_rows + row) * dim;
    memset(q, 0, dim * N * sizeof *q), memset(out, 0, dim * N * sizeof *out);
    for (int64_t r = 0; r < rows; r++) {
        get(call, call->q, first + r * dim, dim, flat);
        for (int64_t e = 0; e < dim; e++) ((float *)q)[e * N * LANES + r] = flat[e] * call->scale;
    }
    for (int n = 0; n < N; n++) most[n] = EVERY(UNSEEN), total[n] = (vec){0};
    for (int64_t r = 0; call->sinks && r < rows; r++)
        ((float *)most)[r] = call->sinks[head * call->num_rows + row + r], ((float *)total)[r] = 1;
    for (int64_t key = 0; key < call->num_keys; key += KEYS) {
        int64_t count = call->num_keys - key < KEYS ? call->num_keys - key : KEYS;
        int64_t unseen = num_unseen(call, row, rows, key, count);
        if (unseen == rows * count) continue;
        get(call, call->keys, head * call->key_stride + key * dim, count * dim, keys);
        if (values == others) get(call, call->values, head * call->value_stride + key * dim, count * dim, values);
        memset(keys + count * dim, 0, (KEYS - count) * dim * sizeof *keys);
        memset(scores, 0, KEYS * N * sizeof *scores);
        for (int64_t k = 0; k < count; k += TOGETHER) multiply(q, keys + k * dim, dim, 1, dim, N, scores + k * N);
        for (int64_t i = 0; call->cap && i < count * N; i++) scores[i] = cap_lanes(scores[i], call->cap);
        for (int64_t r = 0; unseen && r < rows; r++)
            for (int64_t k = 0; k < count; k++)
                if (is_unseen(call, (row + r) * call->num_keys + key + k))
                    ((float *)scores)[k * N * LANES + r] = UNSEEN;
        for (int n = 0; n < N; n++) soften(scores + n, count, unseen != 0, N, most + n, total + n, out + n, dim);
        for (int64_t e = 0; e < dim; e += TOGETHER) multiply(scores, values + e, count, dim, 1, N, out + e * N);
    }
    for (int n = 0; n < N; n++)
        for (int64_t e = 0; e < dim; e++) out[e * N + n] /= total[n];
    for (int64_t r = 0; r < rows; r++) {
        for (int64_t e = 0; e < dim; e++) flat[e] = ((float *)out)[e * N * LANES + r];
        put(call, flat, dim, first + r * dim);
    }
}

#define BY(DIM)                                                         \
    if (rows <= LANES) rows_of(call, head, row, rows, DIM, 1);          \
    else if (rows <= 2 * LANES) rows_of(call, head, row, rows, DIM, 2); \
    else rows_of(call, head, row, rows, DIM, 3);

VECTOR_CPU static void some_rows(const Call *call, int64_t head, int64_t row) {
    int64_t rows = call->num_rows - row < VECTORS * LANES ? call->num_rows - row : VECTORS * LANES;
    if (call->dim == 64) { BY(64) }
    else if (call->dim == 128) { BY(128) }
    else { BY(call->dim) }
}

void attend(const Call *call, int64_t num_threads) {
    int64_t each = VECTORS * LANES, num = (call->num_rows + each - 1) / each;
#ifdef _OPENMP
#pragma omp parallel for num_threads(num_threads) schedule(dynamic) if (num_threads > 1)
#else
    (void)num_threads;
#endif
    for (int64_t i = 0; i < call->num_heads * num; i++) some_rows(call, i / num, i % num * each);
}

/* What chunks.py must find, so that a library left over from other sources is not called, nor any on a CPU without the
 * instructions that it is made of. */
int64_t chunks_version(void) { return RUNS_HERE ? 4 : 0; }
