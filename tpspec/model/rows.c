/* What a few rows do between two matrix products, on a CPU: norm, rope and cache write, attention, linear attention, short
 * convolution, gate.
 *
 * The same mathematics as torch_steps.py, which is the reference; here each row is computed alone and in one order,
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
#define MAX_SIGHT 8 /* rows that a convolution sees */

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

/* A layer with linear attention, as model/delta_net.py's Mixer says: Mamba-2 where there are skips, and conv_biases only
 * there, or NULL, and norm NULL there alone. num_decays: of a head, 1 or key_dim. left: [num_left, X] elements, `length` rows a slot. */
typedef struct {
    int64_t num_keys, num_values, key_dim, value_dim, num_decays, num_before, length, num_left;
    const int64_t *key_of;
    const float *kernel, *decays, *biases, *norm, *skips, *conv_biases;
    float eps, most_written;
    float *states; /* [slots, H, K, V] */
    void *left;
} Delta;

/* A layer with a short convolution, as model/short_conv.py's GatedConv says; biases may be NULL. left: [num_left, width]
 * elements, `length` rows a slot. */
typedef struct {
    int64_t width, num_before, length, num_left;
    const float *kernel, *biases;
    void *left;
} Conv;

/* How a span goes on from its state, as model/courses.py's Course says. */
typedef struct {
    int64_t slot, is_fresh, num_kept, first, num_chained, num_rows;
    const int64_t *parents, *sights, *before;
} Course;

enum gate { SILU, GELU, CLAMPED, LIMITED };

INLINE vec same(vec values) { return values; }

/* LANES numbers, or the first `count` of them and zeros. */
INLINE vec floats(const float *from, int64_t count) {
    if (count >= LANES) return *(const vec *)from;
    float some[LANES] = {0};
    memcpy(some, from, count * sizeof *some);
    return *(const vec *)some;
}

INLINE void put_floats(float *to, vec values, int64_t count) {
    if (count >= LANES) *(vec *)to = values;
    else memcpy(to, &values, count * sizeof *to);
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

/* Scores -> weights in place; what pads them to whole vectors becomes 0. cap: see lanes.h; 0: none. Returns the sum of the
 * weights, and of that of `sink`, a score beside the others, which may be NULL. */
INLINE float soften(float *scores, int64_t count, float cap, const float *sink) {
    for (int64_t i = count; i % LANES; i++) scores[i] = scores[0];
    for (int64_t i = 0; cap && i < count; i += LANES) *(vec *)&scores[i] = cap_lanes(*(vec *)&scores[i], cap);
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

INLINE int64_t mixed_width(const Delta *at) {
    return 2 * at->num_keys * at->key_dim + at->num_values * at->value_dim;
}

INLINE int64_t num_rates(const Delta *at) { return at->num_values * (1 + at->num_decays); }

/* A row of a tree, in the order in which states go from one to the next. */
typedef struct {
    int64_t row, depth;
    int is_leaf;
} Step;

/* All rows, children before siblings. Returns the greatest depth, that of the root being 0. */
INLINE int64_t depth_first(const int64_t *parents, int64_t count, Step *steps) {
    int64_t done = 1, deepest = 0;
    steps[0] = (Step){0, 0, count == 1};
    for (int64_t row = 0, depth = 0, child = 1; row >= 0;) {
        while (child < count && parents[child] != row) child++;
        if (child < count) {
            row = child++, depth++;
            steps[done++] = (Step){row, depth, 1};
            steps[done - 2].is_leaf = steps[done - 2].depth >= depth;
            if (depth > deepest) deepest = depth;
        } else {
            child = row + 1, row = parents[row], depth--;
        }
    }
    return deepest;
}

/* The gated delta rule (Yang et al., arXiv 2412.06464, equation 10) for `num` vectors of a head's values, and the last
 * of them of `count` numbers: the state behind a row, from that before it, and what the row is answered. to: may be
 * `from`, or NULL. decays: `next` apart for each number of a key; 0: one for all. skip: NULL, or what a value counts in
 * its row's answer, of a state that takes values as they are. */
INLINE void rule(const float *from, float *to, const float *q, const float *k, const float *v, float write,
                 const float *decays, int64_t next, const float *skip, int64_t K, int64_t V, int num, int64_t count,
                 float *answer) {
    vec sums[4] = {{0}}, answers[4] = {{0}};
    for (int64_t key = 0; key < K && !skip; key++) {
        float faded = decays[key * next] * k[key];
        for (int n = 0; n < num; n++) sums[n] += faded * floats(from + key * V + n * LANES, count);
    }
    for (int n = 0; n < num; n++) sums[n] = (floats(v + n * LANES, count) - sums[n]) * write;
    for (int64_t key = 0; key < K; key++)
        for (int n = 0; n < num; n++) {
            vec now = decays[key * next] * floats(from + key * V + n * LANES, count) + k[key] * sums[n];
            if (to) put_floats(to + key * V + n * LANES, now, count);
            answers[n] += q[key] * now;
        }
    for (int n = 0; n < num; n++) {
        if (skip) answers[n] += *skip * floats(v + n * LANES, count);
        put_floats(answer + n * LANES, answers[n], count);
    }
}

/* The same for a whole head h, of a row as delta.inc has it. */
VECTOR_CPU static void taken_in(const Delta *at, const float *row, int64_t h, const float *from, float *to, float *answer) {
    int64_t G = at->num_keys, K = at->key_dim, V = at->value_dim, M = mixed_width(at), i = 0;
    const float *q = row + at->key_of[h] * K, *k = q + G * K, *v = row + 2 * G * K + h * V;
    const float write = row[M + h], *decays = row + M + at->num_values + h * at->num_decays;
    const float *skip = at->skips ? at->skips + h : NULL;
    int64_t next = at->num_decays > 1;
    for (; i + 4 * LANES <= V; i += 4 * LANES)
        rule(from + i, to ? to + i : NULL, q, k, v + i, write, decays, next, skip, K, V, 4, LANES, answer + i);
    for (; i < V; i += LANES)
        rule(from + i, to ? to + i : NULL, q, k, v + i, write, decays, next, skip, K, V, 1, V - i, answer + i);
}

/* What compiled.py must find, so that a library left over from other sources is not called, nor one on a CPU without the
 * instructions that it is made of. */
int64_t rows_version(void) { return RUNS_HERE ? 21 : 0; }

#define ELEMENT uint16_t
#define VECTOR hvec
#define NAME(verb) verb##_bfloat16
#define WIDEN widen
#define NARROW narrow
#include "rows.inc"
#include "delta.inc"
#include "conv.inc"
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
#include "delta.inc"
#include "conv.inc"
