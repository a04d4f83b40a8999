/* All-reduce and all-gather between processes of one host, in plain loads and stores of POSIX shared memory.
 *
 * Called through ctypes by shared.py, so it knows neither Python nor torch: pointers, counts and return codes. A call
 * waits for NAP_NS at most and can be repeated with the same arguments; deadlines, signals and the death of a peer are
 * the caller's business. Must not allocate or free anything outside `tp_open` and `tp_close`.
 *
 * The segment: a Flag for each rank, then two slots for each rank, used in turn. A rank writes piece n into slot n % 2,
 * publishes n, waits until everybody has published n, and reads everybody's slot n % 2. It may write piece n + 2 over
 * piece n because by then everybody has published n + 1, and nobody does that before having read piece n.
 */

#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <sched.h>
#include <stdalign.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>
#ifdef __linux__
#include <linux/futex.h>
#include <sys/syscall.h>
#endif
#ifndef MAP_POPULATE
#define MAP_POPULATE 0
#endif

/* Compiled twice, and chosen when loaded: the sums of 256 KB take 40 us instead of 64 with the wider registers. */
#define WIDE
#if defined(__x86_64__) && defined(__GLIBC__) && defined(__has_attribute)
#if __has_attribute(target_clones)
#undef WIDE
#define WIDE __attribute__((target_clones("avx2", "default")))
#endif
#endif

#define VERSION 1 /* shared.py refuses a library of another one */
#define NAP_NS 100000000u
#define POLITE_NS 5000u
#define PAGE 4096u
#define BLOCK 512u /* elements summed at a time: their float32 sums stay in the first cache */

enum { DONE = 0, DIVERGED = -1, CLOSED = -2 }; /* or 1 + the rank that has not come yet */
enum { FLOAT32 = 0, BFLOAT16 = 1, FLOAT16 = 2, BYTES = 3 };

typedef struct {
    alignas(64) _Atomic uint32_t turn;     /* pieces this rank has published; wraps */
    uint64_t call[2];                      /* verb, dtype and size of the message that the piece in each slot is of */
    alignas(64) _Atomic uint32_t sleepers; /* on a line of its own: who waits for `turn` must not take it away */
} Flag;

typedef struct {
    Flag *flags;
    unsigned char *slots;
    size_t mapped, slot;
    uint32_t rank, size;
    uint64_t spin_ns;
    uint32_t turn;  /* of the piece under way, or the last one */
    int published;  /* whether the piece under way is published: a repeated call does not do it again */
    size_t offset;  /* bytes of the message that are through */
} Group;

/* ---- waiting ---- */

static uint64_t now_ns(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

static inline void relax(void)
{
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("isb");
#endif
}

static inline int has_come(Flag *flag, uint32_t turn)
{
    return (int32_t)(atomic_load_explicit(&flag->turn, memory_order_acquire) - turn) >= 0;
}

/* Release: the slot, and every read of the turn before, come first. Sequentially consistent against `sleep_on`: either
 * this rank sees the sleeper, or the kernel sees the new turn and does not let it sleep. */
static void publish(Flag *flag, uint32_t turn)
{
    atomic_store(&flag->turn, turn);
#ifdef __linux__
    if (atomic_load(&flag->sleepers))
        syscall(SYS_futex, &flag->turn, FUTEX_WAKE, INT32_MAX, NULL, NULL, 0);
#endif
}

static void sleep_on(Flag *flag, uint32_t turn, uint64_t ns, uint64_t slept)
{
    struct timespec limit = {(time_t)(ns / 1000000000u), (long)(ns % 1000000000u)};
#ifdef __linux__
    (void)slept;
    atomic_fetch_add(&flag->sleepers, 1);
    uint32_t seen = atomic_load(&flag->turn);
    if ((int32_t)(seen - turn) < 0)
        syscall(SYS_futex, &flag->turn, FUTEX_WAIT, seen, &limit, NULL, 0);
    atomic_fetch_sub(&flag->sleepers, 1);
#else
    uint64_t nap = 1000 + slept / 4; /* grows with the wait: a quarter too late at worst */
    if (nap < ns)
        limit = (struct timespec){0, (long)nap};
    (void)flag, (void)turn;
    nanosleep(&limit, NULL);
#endif
}

/* Whether the rank behind `flag` has published `turn`: spins, then sleeps. */
static int await(Flag *flag, uint32_t turn, uint64_t spin_ns)
{
    if (has_come(flag, turn))
        return 1;
    uint64_t begin = now_ns(), waited = 0;
    while (waited < spin_ns) {
        for (int i = 0; i < 16; i++) {
            relax();
            if (has_come(flag, turn))
                return 1;
        }
        waited = now_ns() - begin;
        if (waited > POLITE_NS)
            sched_yield(); /* the rank that is waited for may have been put on this very core */
    }
    while (!has_come(flag, turn)) {
        if (waited >= NAP_NS)
            return 0;
        sleep_on(flag, turn, NAP_NS - waited, waited);
        waited = now_ns() - begin;
    }
    return 1;
}

/* ---- one piece of a message ---- */

static unsigned char *slot_of(const Group *g, uint32_t rank)
{
    return g->slots + (2 * (size_t)rank + (g->turn & 1)) * g->slot;
}

static int exchange(Group *g, const void *x, size_t bytes, uint64_t call)
{
    if (!g->published) {
        g->turn++;
        memcpy(slot_of(g, g->rank), x, bytes);
        g->flags[g->rank].call[g->turn & 1] = call;
        publish(&g->flags[g->rank], g->turn);
        g->published = 1;
    }
    for (uint32_t rank = 0; rank < g->size; rank++)
        if (rank != g->rank && !await(&g->flags[rank], g->turn, g->spin_ns))
            return 1 + (int)rank;
    for (uint32_t rank = 0; rank < g->size; rank++)
        if (g->flags[rank].call[g->turn & 1] != call)
            return DIVERGED;
    g->published = 0;
    return DONE;
}

/* ---- sums: float32, in rank order, rounded once to the nearest, ties to even ---- */

typedef union {
    uint32_t u;
    float f;
} Word;

static inline float from_bfloat16(uint16_t h)
{
    return (Word){.u = (uint32_t)h << 16}.f;
}

static inline uint16_t to_bfloat16(float value)
{
    uint32_t u = (Word){.f = value}.u;
    uint32_t rounded = (u + 0x7FFF + ((u >> 16) & 1)) >> 16;
    return (uint16_t)((u & 0x7FFFFFFF) > 0x7F800000 ? 0x7FC0 : rounded);
}

/* Both ways of float16: F. Giesen, https://gist.github.com/rygorous/2156668 (public domain). */
static inline float from_float16(uint16_t h)
{
    const Word smallest = {.u = 113u << 23};
    Word w = {.u = (uint32_t)(h & 0x7FFF) << 13};
    uint32_t exponent = w.u & (0x7C00u << 13);
    w.u += (127u - 15u) << 23;
    if (exponent == 0x7C00u << 13) {
        w.u += (128u - 16u) << 23;
    } else if (exponent == 0) {
        w.u += 1u << 23;
        w.f -= smallest.f;
    }
    w.u |= (uint32_t)(h & 0x8000) << 16;
    return w.f;
}

static inline uint16_t to_float16(float value)
{
    const Word magic = {.u = ((127u - 15u) + (23u - 10u) + 1u) << 23};
    Word w = {.f = value};
    uint32_t sign = w.u & 0x80000000u, half;
    w.u ^= sign;
    if (w.u >= (127u + 16u) << 23) {
        half = w.u > 255u << 23 ? 0x7E00 : 0x7C00;
    } else if (w.u < 113u << 23) {
        w.f += magic.f;
        half = w.u - magic.u;
    } else {
        half = (w.u - ((127u - 15u) << 23) + 0xFFF + ((w.u >> 13) & 1)) >> 13;
    }
    return (uint16_t)(half | sign >> 16);
}

WIDE static void add(float *restrict sum, const void *restrict part, size_t count, int dtype)
{
    const uint16_t *narrow = part;
    const float *wide = part;
    if (dtype == FLOAT32)
        for (size_t i = 0; i < count; i++)
            sum[i] += wide[i];
    else if (dtype == BFLOAT16)
        for (size_t i = 0; i < count; i++)
            sum[i] += from_bfloat16(narrow[i]);
    else
        for (size_t i = 0; i < count; i++)
            sum[i] += from_float16(narrow[i]);
}

WIDE static void round_into(void *restrict out, const float *restrict sum, size_t count, int dtype)
{
    uint16_t *narrow = out;
    if (dtype == FLOAT32)
        memcpy(out, sum, count * sizeof *sum);
    else if (dtype == BFLOAT16)
        for (size_t i = 0; i < count; i++)
            narrow[i] = to_bfloat16(sum[i]);
    else
        for (size_t i = 0; i < count; i++)
            narrow[i] = to_float16(sum[i]);
}

static void sum_slots(const Group *g, unsigned char *out, size_t bytes, int dtype)
{
    float sum[BLOCK];
    size_t width = dtype == FLOAT32 ? 4 : 2;
    for (size_t at = 0; at < bytes; at += BLOCK * width) {
        size_t left = (bytes - at) / width, count = left < BLOCK ? left : BLOCK;
        for (size_t i = 0; i < count; i++)
            sum[i] = -0.0f; /* the zero that changes nothing: 0.0 + -0.0 would lose the sign */
        for (uint32_t rank = 0; rank < g->size; rank++)
            add(sum, slot_of(g, rank) + at, count, dtype);
        round_into(out + at, sum, count, dtype);
    }
}

/* ---- what shared.py calls ---- */

int tp_version(void)
{
    return VERSION;
}

/* x becomes the sum of everybody's x. DONE, DIVERGED, CLOSED, or 1 + a rank that is late: then call again. */
int tp_all_reduce(Group *g, void *x, size_t bytes, int dtype)
{
    if (!g)
        return CLOSED;
    for (unsigned char *at = x; g->offset < bytes;) {
        size_t left = bytes - g->offset, piece = left < g->slot ? left : g->slot;
        int code = exchange(g, at + g->offset, piece, (uint64_t)bytes << 8 | (uint64_t)dtype);
        if (code)
            return code;
        sum_slots(g, at + g->offset, piece, dtype);
        g->offset += piece;
    }
    g->offset = 0;
    return DONE;
}

/* Everybody's x into out, one after the other in rank order. Returns as tp_all_reduce does. */
int tp_all_gather(Group *g, const void *x, size_t bytes, void *out)
{
    if (!g)
        return CLOSED;
    for (const unsigned char *at = x; g->offset < bytes;) {
        size_t left = bytes - g->offset, piece = left < g->slot ? left : g->slot;
        int code = exchange(g, at + g->offset, piece, (uint64_t)bytes << 8 | BYTES);
        if (code)
            return code;
        for (uint32_t rank = 0; rank < g->size; rank++)
            memcpy((unsigned char *)out + rank * bytes + g->offset, slot_of(g, rank), piece);
        g->offset += piece;
    }
    g->offset = 0;
    return DONE;
}

#ifdef __linux__
/* What shm_open does there, without the library that it is in before glibc 2.34. */
static int open_shared(const char *name, int flags)
{
    char path[128];
    snprintf(path, sizeof path, "/dev/shm%s", name);
    return open(path, flags | O_NOFOLLOW | O_CLOEXEC, 0600);
}

int tp_unlink(const char *name)
{
    char path[128];
    snprintf(path, sizeof path, "/dev/shm%s", name);
    return unlink(path);
}
#else
static int open_shared(const char *name, int flags)
{
    return shm_open(name, flags, 0600);
}

int tp_unlink(const char *name)
{
    return shm_unlink(name);
}
#endif

static void *map(const char *name, int create, size_t bytes)
{
    int file = open_shared(name, create ? O_RDWR | O_CREAT | O_EXCL : O_RDWR);
    if (file < 0)
        return MAP_FAILED;
    struct stat found;
    void *start = MAP_FAILED;
    int error = 0;
    if (create && ftruncate(file, (off_t)bytes))
        error = errno;
#ifdef __linux__
    else if (create) /* a full /dev/shm is an error here, and would be a SIGBUS later */
        error = posix_fallocate(file, 0, (off_t)bytes);
#endif
    if (!error && fstat(file, &found) == 0 && (size_t)found.st_size < bytes)
        error = EINVAL;
    if (!error && (start = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, file, 0)) == MAP_FAILED)
        error = errno;
    close(file);
    if (error && create)
        tp_unlink(name);
    errno = error;
    return start;
}

/* NULL, with errno, when it cannot be made (create) or mapped. slot: bytes of a piece, a multiple of 64. */
Group *tp_open(const char *name, int create, uint32_t rank, uint32_t size, size_t slot, uint64_t spin_ns)
{
    size_t head = (size * sizeof(Flag) + PAGE - 1) / PAGE * PAGE, bytes = head + 2 * slot * size;
    Group *g = calloc(1, sizeof *g);
    if (!g)
        return NULL;
    void *start = map(name, create, bytes);
    if (start == MAP_FAILED) {
        free(g);
        return NULL;
    }
    *g = (Group){.flags = start, .slots = (unsigned char *)start + head, .mapped = bytes, .slot = slot};
    g->rank = rank, g->size = size, g->spin_ns = spin_ns;
    return g;
}

void tp_close(Group *g)
{
    if (!g)
        return;
    munmap(g->flags, g->mapped);
    free(g);
}
