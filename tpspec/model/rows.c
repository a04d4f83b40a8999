/* What a few rows do between two matrix products, on a CPU: norm, rope and cache write, attention, gate.
 *
 * The same mathematics as steps.py in torch, which is the reference; here each row is computed alone and in one order,
 * so its bits never depend on the rows beside it, and nothing is dispatched a dozen times for a few thousand numbers.
 * C11 with GCC's vector types; no threads. Knows no sequences and no drafts: rows, slots and who sees whom.
 * rows_wide.c is the same for CPUs with longer vectors.
 */
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "lanes.h"

#define MAX_DIM 576 /* head dimension */

typedef int8_t cvec __attribute__((vector_size(LANES), aligned(1)));

/* Who sees whom: rows of one span, as model/batch.py's Span says. */
typedef struct {
    int64_t first_row, num_rows, start, held_from, num_runs;
    const int64_t *runs;    /* (first slot, count) pairs of positions [held_from, start + num_rows) */
    const int64_t *parents; /* of each row, -1: follows the cache; NULL: a chain */
} Span;

/* What is the same in every call of a model. kv_of: the kv head of each query head, ascending. */
typedef struct {
    int64_t num_heads, num_kv_heads, head_dim, num_slots;
    const int64_t *kv_of;
} Heads;

/* Keys and values of a layer, [kv heads, slots, head_dim]: elements, or where there are scales [kv heads, slots] codes of
 * 8 bits, number = scale * code. Both may be the same: keys that are their own values. */
typedef struct {
    void *keys, *values;
    float *key_scales, *value_scales;
} Cache;

enum gate { SILU, GELU, CLAMPED };

INLINE vec same(vec values) { return values; }

/* LANES numbers, or the first `count` of them and zeros. */
INLINE vec floats(const float *from, int64_t count) {
    if (count >= LANES) return *(const vec *)from;
    float some[LANES] = {0};
    memcpy(some, from, count * sizeof *some);
    return *(const vec *)some;
}

INLINE float sum_lanes(vec x) {
    float lanes[LANES];
    memcpy(lanes, &x, sizeof lanes);
    for (int width = LANES / 2; width; width /= 2)
        for (int i = 0; i < width; i++) lanes[i] += lanes[i + width];
    return lanes[0];
}

/* LANES vectors -> the vector of their sums, by halving: every sum in the same order. */
INLINE vec sums_of(vec *x) {
#if LANES == 16
    const ivec low8 = {0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23};
    const ivec high8 = {8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31};
    const ivec low4 = {0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27};
    const ivec high4 = {4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23, 28, 29, 30, 31};
    const ivec low2 = {0, 1, 4, 5, 8, 9, 12, 13, 16, 17, 20, 21, 24, 25, 28, 29};
    const ivec high2 = {2, 3, 6, 7, 10, 11, 14, 15, 18, 19, 22, 23, 26, 27, 30, 31};
    const ivec even = {0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30};
    const ivec odd = {1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31};
#elif LANES == 8
    const ivec low4 = {0, 1, 2, 3, 8, 9, 10, 11}, high4 = {4, 5, 6, 7, 12, 13, 14, 15};
    const ivec low2 = {0, 1, 4, 5, 8, 9, 12, 13}, high2 = {2, 3, 6, 7, 10, 11, 14, 15};
    const ivec even = {0, 2, 4, 6, 8, 10, 12, 14}, odd = {1, 3, 5, 7, 9, 11, 13, 15};
#else
    const ivec low2 = {0, 1, 4, 5}, high2 = {2, 3, 6, 7}, even = {0, 2, 4, 6}, odd = {1, 3, 5, 7};
#endif
#if LANES >= 16
    for (int i = 0; i < 8; i++)
        x[i] = __builtin_shuffle(x[2 * i], x[2 * i + 1], low8) + __builtin_shuffle(x[2 * i], x[2 * i + 1], high8);
#endif
#if LANES >= 8
    for (int i = 0; i < 4; i++)
        x[i] = __builtin_shuffle(x[2 * i], x[2 * i + 1], low4) + __builtin_shuffle(x[2 * i], x[2 * i + 1], high4);
#endif
    for (int i = 0; i < 2; i++)
        x[i] = __builtin_shuffle(x[2 * i], x[2 * i + 1], low2) + __builtin_shuffle(x[2 * i], x[2 * i + 1], high2);
    return __builtin_shuffle(x[0], x[1], even) + __builtin_shuffle(x[0], x[1], odd);
}

/* Slots of the keys a row may see: those of the cache, then those of its ancestors and its own. */
INLINE int64_t cached_slots(const Span *span, int64_t first_key, int64_t *slots) {
    int64_t count = 0, position = span->held_from;
    for (int64_t run = 0; run < span->num_runs; run++)
        for (int64_t i = 0; i < span->runs[2 * run + 1]; i++, position++)
            if (position >= first_key && position < span->start) slots[count++] = span->runs[2 * run] + i;
    return count;
}

INLINE void own_slots(const Span *span, int64_t *slots) {
    int64_t position = span->held_from;
    for (int64_t run = 0; run < span->num_runs; run++)
        for (int64_t i = 0; i < span->runs[2 * run + 1]; i++, position++)
            if (position >= span->start) slots[position - span->start] = span->runs[2 * run] + i;
}

/* Slots of the rows a row follows within its span, oldest first, itself last. */
INLINE int64_t lineage(const Span *span, int64_t row, const int64_t *own, int64_t *line) {
    int64_t depth = 0;
    for (int64_t at = row; at >= 0; at = span->parents ? span->parents[at] : at - 1) depth++;
    int64_t place = depth;
    for (int64_t at = row; at >= 0; at = span->parents ? span->parents[at] : at - 1) line[--place] = own[at];
    return depth;
}

/* Scores -> weights in place; what pads them to whole vectors becomes 0. Returns the sum of the weights, and of that of
 * `sink`, a score beside the others, which may be NULL. */
INLINE float soften(float *scores, int64_t count, const float *sink) {
    for (int64_t i = count; i % LANES; i++) scores[i] = scores[0];
    vec most = *(vec *)scores, sums = {0};
    for (int64_t i = LANES; i < count; i += LANES) most = choose(*(vec *)&scores[i] > most, *(vec *)&scores[i], most);
    float peak = most[0];
    for (int64_t j = 1; j < LANES; j++) peak = most[j] > peak ? most[j] : peak;
    if (sink && *sink > peak) peak = *sink;
    for (int64_t i = 0; i < count; i += LANES) {
        *(vec *)&scores[i] = exp_lanes(*(vec *)&scores[i] - peak);
        for (int64_t j = i + LANES > count ? count - i : LANES; j < LANES; j++) scores[i + j] = 0;
        sums += *(vec *)&scores[i];
    }
    return sum_lanes(sums) + (sink ? exp_lanes(EVERY(*sink - peak))[0] : 0);
}

/* What compiled.py must find, so that a library left over from other sources is not called, nor one on a CPU without the
 * instructions that it is made of. */
int64_t rows_version(void) { return RUNS_HERE ? 8 : 0; }

#define ELEMENT uint16_t
#define VECTOR hvec
#define NAME(verb) verb##_bfloat16
#define WIDEN widen
#define NARROW narrow
#include "rows.inc"
#undef ELEMENT
#undef VECTOR
#undef NAME
#undef WIDEN
#undef NARROW

#define ELEMENT float
#define VECTOR vec
#define NAME(verb) verb##_float32
#define WIDEN same
#define NARROW same
#include "rows.inc"
