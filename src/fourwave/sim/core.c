/* The simulator's core: runs a lane program (ops.def) over every workgroup of a launch, on all host cores.
 *
 * A wave is W lanes; a register is W dwords, lane-contiguous, so one instruction is one vectorised loop. Waves of a workgroup take
 * turns and change at barriers; workgroups are spread over host threads. Lanes that branch apart run one side after the other and
 * meet again at the branch's immediate post-dominator, which program.py works out.
 *
 * Order is modelled, not only values (docs/simulator.md):
 *   - A copy to LDS that a wait counter covers is queued at its issue and carried out when a wait reaches it (completion = late), so
 *     that a missing wait leaves the old bytes and is reported.
 *   - Every LDS dword remembers its last writer and this barrier interval's readers. Accesses of different waves, at least one a write,
 *     with no barrier between them, or whose write no wait or fence had completed before that barrier, are a race.
 *   - An LDS read counts as returned at a wait for it or at the first use of its result; one still out when its wave passes a barrier
 *     conflicts with writes after that barrier too.
 *   - Every global access is checked against the launch's allocations.
 * Addresses are those of the host: a kernel's tensors are the caller's CPU tensors.
 */
#include <errno.h>
#include <math.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#ifndef W
#define W 64
#endif

#include "formats.h"
#include "matrix.h"
#include "lanes.h"
#include "gfx1250_state.h"

enum opcode {
#define OP(NAME, SIGNATURE) OP_##NAME,
#include "ops.def"
#undef OP
    OP_COUNT
};

/* Finding kinds, in the order of report.py's KINDS. */
enum { F_MEMORY, F_INIT, F_RACE, F_WAIT, F_BARRIER, F_LIMIT, F_GLOBAL };
/* Checks that can be switched off, one bit each, same order. */

typedef struct {
    u64 lo, hi; /* [lo, hi) */
    i32 writable, id;            /* writable: 0 no, 1 yes, 2 not known yet (see may_store) */
    u64 *writers;                /* per dword: who wrote it in this launch (core's own; see global_write_check) */
    u64 *readers[4];             /* per 16, 4, 2 and 1 bytes: who read them as a whole (core's own; see global_read_check) */
    i32 written, read;           /* read: one bit for each of `readers` that is in use */
} Allocation;

typedef struct {
    i32 kind, line, other_line, wave, other_wave, lane, detail, pad;
    u64 workgroup, address, count;
} Finding;

enum { C_INSTRUCTIONS, C_MFMA, C_LDS_READ_BYTES, C_LDS_WRITE_BYTES, C_GLOBAL_READ_BYTES, C_GLOBAL_WRITE_BYTES, C_COPY_BYTES,
       C_BARRIERS, C_WAITS, C_LDS_READ_CYCLES, C_LDS_READ_IDEAL, C_GLOBAL_INSTRUCTIONS, C_LDS_INSTRUCTIONS, C_GLOBAL_LINES, C_GLOBAL_LINES_IDEAL,
       C_VALU_INSTRUCTIONS, C_COUNTERS };
enum { U_OTHER, U_VALU, U_LDS, U_GLOBAL, U_UNITS }; /* the machine's part that an opcode occupies: program.py's UNITS */

typedef struct {
    const i32 *code;
    i32 code_words, num_registers, num_constants, num_sites, lds_bytes;
    const u32 *constants;        /* registers 0 .. num_constants - 1, the same in every lane */
    u32 grid[3], block[3], cluster[3]; /* cluster: workgroups that run together */
    Allocation *allocations;
    i32 num_allocations;
    u32 checks;
    i32 completion;              /* 0 late, 1 early, 2 at a random moment in between */
    i32 schedule;                /* 0 waves in order, 1 in reverse, else: a seed that orders them anew at every turn */
    i32 num_threads;
    u64 first_workgroup, num_workgroups;
    u64 step_limit;              /* instructions a wave may run; 0: no limit */
    i32 lds_banks;
    i32 stop_at_finding;         /* 1: the first finding ends the launch */
    const uint8_t *units;        /* an opcode's unit */
    i32 num_outputs;
    struct Output { u64 lo, hi; uint8_t *written; } *outputs; /* memory that the kernel is to write: a byte of `written` for each of theirs */
    struct Event { i32 kind, wave, line, detail; u64 address, bytes; } *events; /* trace of the first workgroup */
    i32 max_events, num_events;  /* 0: no trace; num_events: out, may be more than there was room for */
    /* out */
    Finding *findings;
    i32 max_findings, num_findings;
    u64 counters[C_COUNTERS];
    _Atomic u64 next, done, progress;
    _Atomic i32 stop;
} Launch;

/* ---- one dword of LDS, as the checkers see it; or one byte, where some access touched only a part of a dword ---- */
typedef struct {
    u32 write_seq;               /* the writer's count of LDS writes, or of copies where from_copy */
    u32 read_epoch, readers;     /* readers: one bit a wave, valid in read_epoch only */
    u32 late_readers;            /* those of them whose read was issued before the last barrier and may not have returned */
#if W == 32
    u32 earlier_readers;         /* readers of read_epoch - 1: between the halves of a barrier both count */
    u32 dma_readers;             /* stores from LDS under way */
#endif
    i32 write_line, read_line;
    uint8_t writer, bytes, init, in_flight, from_copy, atomic; /* atomic: the last write was one */
    uint8_t split;               /* the dword's bytes have entries of their own, in Group.byte_shadow */
} Shadow;

typedef struct {
    u64 seq;
    const uint8_t *source[W];    /* NULL: out of the buffer's range, zeros */
    u64 lanes;
    u32 lds;                     /* of lane 0 */
    i32 bytes, line;
} Copy;

typedef struct { i32 pc, meet; u64 mask; } Path;

#define MAX_COPIES 128
#define MAX_READS 64
#define MAX_PATHS 256
#define MAX_WAVES 32
#define MAX_MARKS 64
#define IDLE_TURNS 200   /* turns in which no workgroup got on, wrote or ended: they wait for what will not come */
#define CHECKED_PASSES 1024 /* barriers after which a workgroup is looked at: does it come back to the same state? */
#define MAX_PASSES 65536 /* barriers after which others get a turn in any case: it may count how often it looked */
#define MAX_RESIDENT 64 /* workgroups a host thread keeps going at once */

typedef struct {
    u32 *registers;
    Path paths[MAX_PATHS];
    i32 depth, pc;
    u64 exec, full;
    i32 state;                   /* 0 ready, 1 at a barrier, 2 ended, 3 at the second half of a barrier */
    i32 barrier_line;
    u32 epoch;                   /* barriers passed */
    u64 steps;
    /* counters of outstanding work */
    u64 vm_issued, vm_done;      /* vector-memory operations issued; known complete, as many as waits have said */
    Copy *copies;                /* ring */
    u32 copy_head, copy_count;
    u32 lds_seq, lds_done, lds_published;    /* LDS instructions issued / known complete / complete at the last barrier */
    u32 copy_seq, copy_done, copy_published; /* the same for copies into LDS */
    u32 *site_seq;               /* per read site: lds_seq of its latest read */
    struct Read { u32 seq, address[W]; u64 lanes; i32 bytes, line; } *reads; /* ring of the latest LDS reads */
    u32 num_reads;
    u64 marks[MAX_MARKS];        /* asyncmark: what had been issued */
    u32 num_marks;
#if W == 32
    AsyncState async;
#endif
} Wave;

typedef struct Group {
    Launch *launch;
    Wave waves[MAX_WAVES];
    i32 num_waves;
    uint8_t *lds;
    Shadow *shadow, *byte_shadow; /* byte_shadow: made when first needed */
    u64 workgroup;
    u32 group_id[3];
    Finding *findings;
    i32 num_findings;
    u64 counters[C_COUNTERS];
    Allocation *last;
    u64 last_state;              /* of all its registers, when it last used up its turn */
    i32 synchronised;            /* has done an atomic or ordered access of global memory: it may know what others wrote */
    u64 random;
#if W == 32
    Barrier barriers[1 + NAMED_BARRIERS]; /* 0: of the workgroup */
    Cluster *cluster;
    u32 cluster_rank;
#endif
} Group;

/* What the first workgroup does, in the order of its turns: native.py's EVENTS. */
enum { E_TILE_ISSUED, E_TILE_LANDED, E_WAIT, E_BARRIER, E_LDS_READ, E_MATRIX };
static inline void note(Group *g, const Wave *w, i32 kind, i32 line, i32 detail, u64 address, u64 bytes) {
    Launch *L = g->launch;
    if (!L->max_events || g->workgroup != L->first_workgroup) return;
    if (L->num_events < L->max_events) L->events[L->num_events] = (struct Event){kind, (i32)(w - g->waves), line, detail, address, bytes};
    L->num_events++;
}

static void report(Group *g, i32 kind, i32 line, const Wave *w, i32 lane, u64 address, i32 other_wave, i32 other_line, i32 detail) {
    Launch *L = g->launch;
    if (!(L->checks >> kind & 1)) return;
    for (i32 i = 0; i < g->num_findings; i++)
        if (g->findings[i].kind == kind && g->findings[i].line == line && g->findings[i].other_line == other_line &&
            g->findings[i].detail == detail) {
            g->findings[i].count++;
            return;
        }
    if (g->num_findings >= L->max_findings) return;
    if (L->stop_at_finding) atomic_store(&L->stop, 1);
    g->findings[g->num_findings++] = (Finding){kind, line, other_line, (i32)(w - g->waves), other_wave, lane, detail, 0,
                                               g->workgroup, address, 1};
}

static inline u32 next_random(Group *g) {
    g->random = g->random * 6364136223846793005ull + 1442695040888963407ull;
    return (u32)(g->random >> 33);
}

/* ---- global memory ---- */
/* Whether the host lets anyone write to the page: asked once an allocation, before the first store to it. Linux tells with two calls that change
 * nothing: a page that can be made readable and not writable is the one sought. Elsewhere, and on kernels before 5.14, it counts as writable. */
static int may_store(Allocation *a, u64 address) {
    int writable = 1;
#ifdef __linux__
    enum { POPULATE_READ = 22, POPULATE_WRITE = 23 }; /* MADV_..., Linux 5.14 */
    const u64 size = (u64)sysconf(_SC_PAGESIZE);
    void *page = (void *)(uintptr_t)(address & ~(size - 1));
    writable = !(madvise(page, size, POPULATE_WRITE) && errno == EINVAL && !madvise(page, size, POPULATE_READ));
#endif
    a->writable = writable;
    return writable;
}

static inline int allowed(Group *g, u64 address, u32 bytes, int write) {
    Allocation *a = g->last;
    if (!(a && address >= a->lo && address <= a->hi && bytes <= a->hi - address)) {
        Launch *L = g->launch;
        i32 lo = 0, hi = L->num_allocations;
        while (lo < hi) {
            i32 middle = (lo + hi) / 2;
            if (L->allocations[middle].lo <= address) lo = middle + 1; else hi = middle;
        }
        if (!lo) return 0;
        a = &L->allocations[lo - 1];
        if (address > a->hi || bytes > a->hi - address) return 0;
        g->last = a;
    }
    return !write || a->writable == 1 || (a->writable && may_store(a, address));
}

/* Detail of the finding for an access that is not `allowed`: 0 a read, 1 a store outside every allocation, 24 a store to read-only memory. */
static inline i32 refusal(Group *g, u64 address, u32 bytes, int write) { return !write ? 0 : allowed(g, address, bytes, 0) ? 24 : 1; }

/* Races through global memory. A dword's writer: workgroup + 1 (32 bits), wave (6), barriers its wave had passed (22), bytes written (4).
 * A reader's word stands for 16, 4, 2 or 1 bytes that were read as a whole: workgroup + 1 (28), barriers passed (22), wave (5), another wave that
 * read them in the same interval (5), whether there is one (1), whether other workgroups read them, too (1).
 * Found, in any order: plain stores to the same bytes by two workgroups, or by two waves of one with no barrier between; a plain load and a plain
 * store of the same bytes by two waves of a workgroup with no barrier between, or by two workgroups, where the later one has done no atomic or
 * ordered operation that could have told it so. Which flag guards which bytes is not followed; a load counts as done where it is issued.
 * Host threads share the words. An access first leaves its own word, in one atomic step, then looks for the other side's, both in one order for
 * all threads (sequentially consistent): of two accesses that race one sees the other for certain, and both may, which then count as two. */
static inline u64 writer_word(const Group *g, const Wave *w, u64 mask) {
    return (g->workgroup + 1) << 32 | (u64)(w - g->waves) << 26 | (u64)(w->epoch & 0x3fffff) << 4 | mask;
}

#define READER(WORKGROUP, EPOCH, WAVE) ((u64)((WORKGROUP) + 1) << 36 | (u64)((EPOCH) & 0x3fffff) << 14 | (u64)(WAVE) << 9)
enum { READER_OTHER = 4, READER_SECOND = 2, READER_GROUPS = 1 }; /* where the other wave's number is, and the two flags */
static const u32 READ_SHIFT[4] = {4, 2, 1, 0};

static inline void note_read(Allocation *a, u64 reader, u64 address, u32 bytes) {
    for (u64 at = address, end = address + bytes; at < end;) {
        u32 level = 0;
        while ((at & ((1u << READ_SHIFT[level]) - 1)) || end - at < 1u << READ_SHIFT[level]) level++;
        u64 *word = &a->readers[level][(at >> READ_SHIFT[level]) - (a->lo >> READ_SHIFT[level])], old = __atomic_load_n(word, __ATOMIC_RELAXED), next;
        if (!(__atomic_load_n(&a->read, __ATOMIC_SEQ_CST) >> level & 1)) __atomic_fetch_or(&a->read, 1 << level, __ATOMIC_SEQ_CST);
        do {
            if (old >> 9 == reader >> 9) break;
            if (!old) next = reader;
            else if (old >> 36 != reader >> 36) next = reader | READER_GROUPS;
            else if (old >> 14 != reader >> 14) next = reader | (old & READER_GROUPS);
            else if (!(old & READER_SECOND)) next = old | (reader >> 9 & 31) << READER_OTHER | READER_SECOND;
            else break;
        } while (!__atomic_compare_exchange_n(word, &old, next, 0, __ATOMIC_SEQ_CST, __ATOMIC_RELAXED));
        at += 1u << READ_SHIFT[level];
    }
}

/* A store to bytes that others read. */
static void read_before(Group *g, Wave *w, u64 address, u32 bytes, i32 lane, i32 line) {
    const Allocation *a = g->last;
    const u64 mine = READER(g->workgroup, w->epoch, w - g->waves);
    for (u32 level = 0; level < 4; level++) {
        if (!(__atomic_load_n(&a->read, __ATOMIC_SEQ_CST) >> level & 1)) continue;
        const u32 shift = READ_SHIFT[level];
        for (u64 n = address >> shift; n <= (address + bytes - 1) >> shift; n++) {
            u64 old = __atomic_load_n(&a->readers[level][n - (a->lo >> shift)], __ATOMIC_SEQ_CST);
            if (!old || old == mine) continue;
            u64 at = n << shift < address ? address : n << shift;
            if ((old >> 36 != mine >> 36 || old & READER_GROUPS) && !g->synchronised) report(g, F_GLOBAL, line, w, lane, at, -1, -1, 4);
            if (old >> 14 == mine >> 14) {
                i32 me = (i32)(w - g->waves), first = old >> 9 & 31, second = old & READER_SECOND ? (i32)(old >> READER_OTHER & 31) : me;
                if (first != me || second != me) report(g, F_GLOBAL, line, w, lane, at, first != me ? first : second, -1, 5);
            }
        }
    }
}

/* value: the bytes that are about to be stored. Waves of one workgroup that store the same (a uniform value, by all) do not race. */
static inline void global_write_check(Group *g, Wave *w, u64 address, u32 bytes, const uint8_t *value, i32 lane, i32 line) {
    Allocation *a = g->last;
    if (!a->writers) return;
    if (!__atomic_load_n(&a->written, __ATOMIC_SEQ_CST)) __atomic_store_n(&a->written, 1, __ATOMIC_SEQ_CST);
    for (u64 at = address & ~3ull; at < address + bytes; at += 4) {
        u64 first = at < address ? address - at : 0, last = address + bytes - at < 4 ? address + bytes - at : 4;
        u64 mask = (15u << first) & (15u >> (4 - last)), *word = &a->writers[(at - (a->lo & ~3ull)) >> 2], mine = writer_word(g, w, mask);
        u64 old = __atomic_load_n(word, __ATOMIC_RELAXED), next;
        do next = old >> 4 == mine >> 4 ? old | mask : mine;
        while (old != next && !__atomic_compare_exchange_n(word, &old, next, 0, __ATOMIC_SEQ_CST, __ATOMIC_RELAXED));
        if (old & mask) {
            if (old >> 32 != mine >> 32) report(g, F_GLOBAL, line, w, lane, at, -1, -1, 0);
            else if ((old >> 26 & 63) != (mine >> 26 & 63) && (old >> 4 & 0x3fffff) == (w->epoch & 0x3fffff)
                     && memcmp((const uint8_t *)(uintptr_t)(at + first), value + (at + first - address), last - first))
                report(g, F_GLOBAL, line, w, lane, at, (i32)(old >> 26 & 63), -1, 1);
        }
    }
    if (__atomic_load_n(&a->read, __ATOMIC_SEQ_CST)) read_before(g, w, address, bytes, lane, line);
}

/* A lane's dwords, one after the other; 64: what `dest` of run_wave has room for. */
static inline void gather(uint8_t value[256], u32 *const *registers, i32 n, i32 lane) {
    for (i32 i = 0; i < n; i++) memcpy(value + 4 * i, &registers[i][lane], 4);
}

/* After a plain store of the lanes: a lane whose bytes did not stay, since another lane's went to the same place. */
static void stored_twice(Group *g, Wave *w, const u64 *at, u64 lanes, i32 bytes, i32 n, u32 *const *values, i32 line) {
    if (!(g->launch->checks >> F_GLOBAL & 1)) return;
    for (i32 l = 0; l < W; l++) {
        if (!(lanes >> l & 1)) continue;
        i32 same = 1;
        if (bytes >= 4) for (i32 i = 0; i < n; i++) same &= !memcmp((const uint8_t *)(uintptr_t)at[l] + 4 * i, &values[i][l], 4);
        else same = !memcmp((const void *)(uintptr_t)at[l], &values[0][l], bytes);
        for (i32 m = 0; m < W && !same; m++) /* no such lane: another thread's workgroup, which the writers' words tell */
            if (m != l && (lanes >> m & 1) && at[m] < at[l] + bytes && at[l] < at[m] + bytes) { report(g, F_GLOBAL, line, w, l, at[l], -1, -1, 6); break; }
    }
}

/* Marks what a store wrote of the launch's outputs. */
static void output_written(Launch *L, u64 address, u64 bytes) {
    for (i32 i = 0; i < L->num_outputs; i++) {
        struct Output *o = &L->outputs[i];
        u64 lo = address > o->lo ? address : o->lo, hi = address + bytes < o->hi ? address + bytes : o->hi;
        if (lo < hi) memset(o->written + (lo - o->lo), 1, hi - lo);
    }
}

static inline void global_read_check(Group *g, Wave *w, u64 address, u32 bytes, i32 lane, i32 line) {
    Allocation *a = g->last;
    if (!a->writers) return;
    note_read(a, READER(g->workgroup, w->epoch, w - g->waves), address, bytes);
    if (!__atomic_load_n(&a->written, __ATOMIC_SEQ_CST)) return;
    for (u64 at = address & ~3ull; at < address + bytes; at += 4) {
        u64 first = at < address ? address - at : 0, last = address + bytes - at < 4 ? address + bytes - at : 4;
        u64 mask = (15u << first) & (15u >> (4 - last)), old = __atomic_load_n(&a->writers[(at - (a->lo & ~3ull)) >> 2], __ATOMIC_SEQ_CST);
        if (!(old & mask)) continue;
        if (old >> 32 != g->workgroup + 1) { if (!g->synchronised) report(g, F_GLOBAL, line, w, lane, at, -1, -1, 2); }
        else if ((old >> 26 & 63) != (u64)(w - g->waves) && (old >> 4 & 0x3fffff) == (w->epoch & 0x3fffff)) report(g, F_GLOBAL, line, w, lane, at, (i32)(old >> 26 & 63), -1, 3);
    }
}

/* ---- LDS with its checkers ---- */
#if W == 32 /* gfx1250: a barrier has two halves, and vouches for what each wave had completed when it signalled */
static inline u32 published(const Group *g, const Wave *w, const Shadow *s) { (void)g; return w->async.seen[s->writer][s->from_copy ? s->from_copy - 1 : 0]; }
static inline u32 read_tag(const Wave *w) { return w->async.tag; }
static inline u32 *readers_of(Shadow *s, u32 tag) {
    if (s->read_epoch == tag + 1) return &s->earlier_readers;
    if (s->read_epoch != tag) {
        s->earlier_readers = s->read_epoch + 1 == tag ? s->readers : 0;
        s->read_epoch = tag; s->readers = 0; s->late_readers = 0;
    }
    return &s->readers;
}
static inline u32 other_readers(const Shadow *s, const Wave *w, u32 bit) {
    u32 age = s->read_epoch - w->epoch;
    return ((age < 2 ? s->readers : 0) | (age - 1 < 2 ? s->earlier_readers : 0)) & ~bit;
}
#else
static inline u32 published(const Group *g, const Wave *w, const Shadow *s) { (void)w; return s->from_copy ? g->waves[s->writer].copy_published : g->waves[s->writer].lds_published; }
static inline u32 read_tag(const Wave *w) { return w->epoch; }
static inline u32 *readers_of(Shadow *s, u32 tag) {
    if (s->read_epoch != tag) { s->read_epoch = tag; s->readers = 0; s->late_readers = 0; }
    return &s->readers;
}
static inline u32 other_readers(const Shadow *s, const Wave *w, u32 bit) { return s->read_epoch == w->epoch ? s->readers & ~bit : 0; }
#endif

/* The entries of the bytes of [address, end) that lie in the dword at `at`: the dword's own, or, once the dword has seen an access to a part of
 * it, a run of its bytes' entries, so that waves which keep to their own bytes do not meet. */
static inline Shadow *shadows(Group *g, u32 at, u32 address, u32 end, u32 *count) {
    Shadow *s = &g->shadow[at >> 2];
    u32 first = at < address ? address - at : 0, last = end - at < 4 ? end - at : 4;
    if (last - first == 4 && !s->split) { *count = 1; return s; }
    if (!s->split) {
        if (!g->byte_shadow) g->byte_shadow = malloc(sizeof(Shadow) * (g->launch->lds_bytes + 8));
        s->split = 1;
        for (u32 i = 0; i < 4; i++) {
            Shadow *b = &g->byte_shadow[at + i];
            *b = *s;
            b->bytes = s->bytes >> i & 1 ? 15 : 0;
            b->init = s->init >> i & 1 ? 15 : 0;
        }
    }
    *count = last - first;
    return g->byte_shadow + at + first;
}

static inline void lds_read_check(Group *g, Wave *w, u32 address, u32 bytes, i32 lane, i32 line) {
    u32 wave = (u32)(w - g->waves), bit = 1u << wave, end = address + bytes;
    for (u32 at = address & ~3u; at < end; at += 4) {
        u32 n;
        for (Shadow *s = shadows(g, at, address, end, &n); n--; s++) {
            if (__builtin_expect(s->in_flight, 0))
                report(g, F_WAIT, line, w, lane, at, s->writer, s->write_line, wave != s->writer);
            else if (s->writer != wave && s->bytes &&
                     (i32)(s->write_seq - published(g, w, s)) > 0)
                report(g, F_RACE, line, w, lane, at, s->writer, s->write_line, 0);
            if (s->init != 15 && !s->in_flight) report(g, F_INIT, line, w, lane, at, -1, -1, 0);
            *readers_of(s, read_tag(w)) |= bit;
            s->read_line = line;
        }
    }
}

static inline void lds_write_check(Group *g, Wave *w, u32 address, u32 bytes, i32 lane, i32 line, int copy) {
    u32 wave = (u32)(w - g->waves), bit = 1u << wave, end = address + bytes;
    for (u32 at = address & ~3u; at < end; at += 4) {
        u32 n;
        for (Shadow *s = shadows(g, at, address, end, &n); n--; s++) {
            if (s->in_flight && !(copy >= FROM_ASYNC && s->writer == wave && s->from_copy == copy)) /* those complete in order */
                report(g, F_RACE, line, w, lane, at, s->writer, s->write_line, s->writer == wave ? 5 : 2);
            else {
                u32 others = other_readers(s, w, bit);
                if (others) {
                    u32 late = others == (s->late_readers & ~bit);
                    report(g, F_RACE, line, w, lane, at, __builtin_ctz(others), s->read_line, late ? 3 : 1);
                }
                if (s->writer != wave && s->bytes &&
                    (i32)(s->write_seq - published(g, w, s)) > 0)
                    report(g, F_RACE, line, w, lane, at, s->writer, s->write_line, 2);
            }
            s->writer = wave;
            s->bytes = s->init = 15;
            s->write_line = line;
            s->from_copy = copy;
            s->atomic = 0;
#if W == 32
            if (s->dma_readers) report(g, F_RACE, line, w, lane, at, -1, s->read_line, 4);
            s->write_seq = copy >= FROM_ASYNC ? w->async.queues[copy - FROM_ASYNC].issued : w->lds_seq;
#else
            s->write_seq = copy ? w->copy_seq : w->lds_seq;
#endif
            s->in_flight = copy != FROM_LDS;
        }
    }
}

/* An atomic operation on LDS reads and writes; atomics of different waves need nothing between them. */
static inline void lds_atomic_check(Group *g, Wave *w, u32 address, u32 bytes, i32 lane, i32 line, i32 op) {
    u32 wave = (u32)(w - g->waves), bit = 1u << wave;
    for (u32 at = address & ~3u; at < address + bytes; at += 4) {
        u32 n;
        for (Shadow *s = shadows(g, at, address, address + bytes, &n); n--; s++) {
            if (s->in_flight) report(g, op == A_LOAD ? F_WAIT : F_RACE, line, w, lane, at, s->writer, s->write_line, op == A_LOAD ? wave != s->writer : 2);
            else {
                u32 others = other_readers(s, w, bit);
                if (others && op != A_LOAD) report(g, F_RACE, line, w, lane, at, __builtin_ctz(others), s->read_line, 1);
                if (s->writer != wave && s->bytes && !s->atomic &&
                    (i32)(s->write_seq - published(g, w, s)) > 0)
                    report(g, F_RACE, line, w, lane, at, s->writer, s->write_line, op == A_LOAD ? 0 : 2);
                if (op != A_STORE && op != A_XCHG && s->init != 15) report(g, F_INIT, line, w, lane, at, -1, -1, 0);
            }
            if (op == A_LOAD) continue;
            s->writer = wave; s->bytes = s->init = 15; s->write_line = line; s->write_seq = w->lds_seq;
            s->from_copy = s->in_flight = 0; s->atomic = 1;
        }
    }
}

/* Bytes between two lanes' places in LDS: 4 for copies of a dword, 16 for three or four (CDNA4 ISA guide, section 9.1.9; LLVM's
 * AMDGPUDMAOperations). */
static inline i32 lane_stride(i32 bytes) { return bytes <= 4 ? 4 : 16; }

/* The bytes of a copy have arrived. */
static void landed(Group *g, u32 address, u32 bytes) {
    for (u32 at = address & ~3u, n; at < address + bytes; at += 4)
        for (Shadow *s = shadows(g, at, address, address + bytes, &n); n--; s++) s->in_flight = 0;
}

static void land(Group *g, Wave *w, Copy *c) {
    for (i32 lane = 0; lane < W; lane++) {
        if (!(c->lanes >> lane & 1)) continue;
        u32 at = c->lds + (u32)(lane * lane_stride(c->bytes));
        if (c->source[lane]) memcpy(g->lds + at, c->source[lane], c->bytes); else memset(g->lds + at, 0, c->bytes);
        landed(g, at, (u32)c->bytes);
    }
    w->copy_done++;
}

/* Complete all but the newest `outstanding` vector-memory operations of the wave. */
static void wait_vm(Group *g, Wave *w, u64 outstanding) {
    if (w->vm_issued > outstanding && w->vm_issued - outstanding > w->vm_done) w->vm_done = w->vm_issued - outstanding;
    while (w->copy_count) {
        Copy *c = &w->copies[w->copy_head];
        if (c->seq + outstanding > w->vm_issued) break;
        land(g, w, c);
        w->copy_head = (w->copy_head + 1) % MAX_COPIES;
        w->copy_count--;
    }
}

/* completion = random: the oldest few copies may have landed by now. */
static inline void land_some(Group *g, Wave *w) {
    for (u32 n = next_random(g) & 3; n && w->copy_count; n--) wait_vm(g, w, w->vm_issued - w->copies[w->copy_head].seq);
}

static void issue_copy(Group *g, Wave *w, const uint8_t **source, u64 lanes, u32 lds, i32 bytes, i32 line) {
    Launch *L = g->launch;
    if (w->copy_count == MAX_COPIES) wait_vm(g, w, w->vm_issued - w->copies[w->copy_head].seq);
    w->vm_issued++;
    w->copy_seq++;
    Copy *c = &w->copies[(w->copy_head + w->copy_count) % MAX_COPIES];
    c->seq = w->vm_issued; c->lanes = 0; c->lds = lds; c->bytes = bytes; c->line = line;
    for (i32 lane = 0; lane < W; lane++) {
        if (!(lanes >> lane & 1)) continue;
        u32 at = lds + (u32)(lane * lane_stride(bytes));
        if (at + bytes > (u32)L->lds_bytes || at + bytes < at) { report(g, F_MEMORY, line, w, lane, at, -1, -1, 2); continue; }
        lds_write_check(g, w, at, bytes, lane, line, 1);
        c->lanes |= 1ull << lane;
        c->source[lane] = source[lane];
        g->counters[C_COPY_BYTES] += bytes;
    }
    w->copy_count++;
    /* vmcnt holds six bits: the 64th operation waits for the first (CDNA3 ISA, section 4.4, s_waitcnt). */
    wait_vm(g, w, 63);
    if (L->completion == 1) wait_vm(g, w, 0);
    if (L->completion == 2) land_some(g, w);
}

/* Keep an LDS read in mind until it is known to have returned: until a wait for it, or the use of its result, before which the compiler puts one. */
static void remember_read(Wave *w, i32 site, const u32 *address, u64 lanes, i32 bytes, i32 line) {
    w->site_seq[site] = w->lds_seq;
    struct Read *r = &w->reads[w->num_reads++ % MAX_READS];
    r->seq = w->lds_seq; r->lanes = lanes; r->bytes = bytes; r->line = line;
    memcpy(r->address, address, sizeof r->address);
}

/* Reads still out when the wave has passed a barrier count as reads of the interval that begins. */
static void carry_reads(Group *g, Wave *w) {
    u32 bit = 1u << (w - g->waves), n = w->num_reads < MAX_READS ? w->num_reads : MAX_READS;
    for (u32 i = 0; i < n; i++) {
        struct Read *r = &w->reads[i];
        if ((i32)(r->seq - w->lds_done) <= 0) continue;
        for (int lane = 0; lane < W; lane++) {
            if (!(r->lanes >> lane & 1) || r->address[lane] + r->bytes > (u32)g->launch->lds_bytes) continue;
            for (u32 at = r->address[lane] & ~3u; at < r->address[lane] + r->bytes; at += 4) {
                u32 n;
                for (Shadow *s = shadows(g, at, r->address[lane], r->address[lane] + r->bytes, &n); n--; s++) {
                    *readers_of(s, read_tag(w)) |= bit;
                    if (s->read_epoch == read_tag(w)) s->late_readers |= bit;
                    s->read_line = r->line;
                }
            }
        }
    }
}

enum { U_NEG, U_ABS, U_SQRT, U_RCP, U_RSQ, U_EXP2, U_LOG2, U_EXP, U_LOG, U_SIN, U_COS, U_TANH, U_FLOOR, U_CEIL, U_TRUNC, U_RINT, U_ROUND, U_ERF };

#include "counters.h"

static float unary(i32 which, float x) {
    switch (which) {
    case U_SQRT: return sqrtf(x);
    case U_RCP: return 1.0f / x;
    case U_RSQ: return (float)(1.0 / sqrt((double)x));
    case U_EXP2: return exp2f(x);
    case U_LOG2: return log2f(x);
    case U_EXP: return expf(x);
    case U_LOG: return logf(x);
    case U_SIN: return sinf(x);
    case U_COS: return cosf(x);
    case U_TANH: return tanhf(x);
    case U_FLOOR: return floorf(x);
    case U_CEIL: return ceilf(x);
    case U_TRUNC: return truncf(x);
    case U_RINT: return rintf(x);
    case U_ROUND: return roundf(x);
    case U_ERF: return erff(x);
    }
    return x;
}

static inline float maxnum(float a, float b) { return a != a ? b : b != b ? a : (a > b || (a == b && !signbit(a))) ? a : b; }
static inline float minnum(float a, float b) { return a != a ? b : b != b ? a : (a < b || (a == b && signbit(a))) ? a : b; }
static inline int compare_bits(double a, double b) { return a == b ? 1 : a > b ? 2 : a < b ? 4 : 8; }

static inline u32 to_i32(double x) { return x != x ? 0 : x >= 2147483647.0 ? 0x7fffffffu : x <= -2147483648.0 ? 0x80000000u : (u32)(i32)x; }
static inline u32 to_u32(double x) { return x != x || x <= 0 ? 0 : x >= 4294967295.0 ? 0xffffffffu : (u32)x; }
static inline u64 to_i64(double x) { return x != x ? 0 : x >= 0x1p63 ? INT64_MAX : x <= -0x1p63 ? (u64)INT64_MIN : (u64)(i64)x; }
static inline u64 to_u64(double x) { return x != x || x <= 0 ? 0 : x >= 0x1p64 ? UINT64_MAX : (u64)x; }

static inline u32 perm_byte(u64 both, u32 select) { /* V_PERM_B32, CDNA3 ISA guide, VOP3A opcodes */
    if (select >= 13) return 0xff;
    if (select == 12) return 0;
    if (select >= 8) return (both >> (16 * (select - 8) + 15) & 1) ? 0xff : 0;
    return both >> (8 * select) & 0xff;
}

#define R(word) (reg + (size_t)(word) * W)
#define EACH(BODY)                                                                    \
    do {                                                                              \
        if (exec == full) {                                                           \
            _Pragma("GCC ivdep") for (int l = 0; l < W; l++) { BODY; }                \
        } else {                                                                      \
            for (int l = 0; l < W; l++) if (exec >> l & 1) { BODY; }                  \
        }                                                                             \
    } while (0)
#define BINARY(NAME, EXPR)                                                            \
    case OP_##NAME: { u32 *d = R(p[2]); const u32 *a = R(p[3]), *b = R(p[4]); EACH(d[l] = (EXPR)); p += 5; break; }
#define UNARY_(NAME, EXPR)                                                            \
    case OP_##NAME: { u32 *d = R(p[2]); const u32 *a = R(p[3]); EACH(d[l] = (EXPR)); p += 4; break; }
#define WIDE(NAME, EXPR)                                                              \
    case OP_##NAME: {                                                                 \
        u32 *dl = R(p[2]), *dh = R(p[3]);                                             \
        const u32 *al = R(p[4]), *ah = R(p[5]), *bl = R(p[6]), *bh = R(p[7]);         \
        EACH(u64 x = ((u64)ah[l] << 32) | al[l]; u64 y = ((u64)bh[l] << 32) | bl[l];  \
             u64 z = (u64)(EXPR); dl[l] = (u32)z; dh[l] = (u32)(z >> 32));            \
        p += 8; break; }
#define WIDE_COMPARE(NAME, EXPR)                                                      \
    case OP_##NAME: {                                                                 \
        u32 *d = R(p[2]);                                                             \
        const u32 *al = R(p[3]), *ah = R(p[4]), *bl = R(p[5]), *bh = R(p[6]);         \
        EACH(u64 x = ((u64)ah[l] << 32) | al[l]; u64 y = ((u64)bh[l] << 32) | bl[l]; d[l] = (EXPR)); \
        p += 7; break; }
#define DOUBLE(NAME, EXPR)                                                            \
    case OP_##NAME: {                                                                 \
        u32 *dl = R(p[2]), *dh = R(p[3]);                                             \
        const u32 *al = R(p[4]), *ah = R(p[5]), *bl = R(p[6]), *bh = R(p[7]);         \
        EACH(double x = as_double(al[l], ah[l]); double y = as_double(bl[l], bh[l]);  \
             u64 z = double_bits(EXPR); dl[l] = (u32)z; dh[l] = (u32)(z >> 32));      \
        p += 8; break; }
#define FLOAT2(EXPR) (as_bits(({ float x = as_float(a[l]), y = as_float(b[l]); EXPR; })))

static inline void load_dwords(u32 *const *d, i32 n, i32 lane, const uint8_t *source, i32 bytes) {
    if (bytes >= 4)
        for (i32 i = 0; i < n; i++) memcpy(&d[i][lane], source + 4 * i, 4);
    else {
        u32 value = 0;
        memcpy(&value, source, bytes);
        d[0][lane] = value;
    }
}

#include "transpose.h"
#if W == 32
#include "gfx1250.h"
#define ASYNC_ISSUED(w) ((u64)(w)->async.queues[Q_ASYNC].issued)
#define wait_async(g, w, outstanding) wait_queue(g, w, Q_ASYNC, (u32)(outstanding))
#else
#define ASYNC_ISSUED(w) ((w)->vm_issued)
#define wait_async(g, w, outstanding) wait_vm(g, w, outstanding)
#endif

#define POISON 0xffffffffu

/* The size operand of plain loads and stores: bytes, and above them the alignment in bytes that the operation states (0: none). */
#define BYTES(word) ((word) & 0xff)
#define MISALIGNED(word) ((u32)((word) >> 8) ? (u32)((word) >> 8) - 1 : 0)

/* A load that reaches past its allocation, once reported: the dwords that exist have their values, as on the machine. */
static inline void load_what_exists(Group *g, u32 *const *d, i32 n, i32 lane, u64 x, u64 bytes) {
    for (i32 i = 0; i < n; i++) {
        u64 left = bytes > 4 * (u64)i ? bytes - 4 * i : 0;
        d[i][lane] = left ? POISON : 0; /* none left: past a buffer's range */
        if (left >= 4 && allowed(g, x + 4 * i, 4, 0)) memcpy(&d[i][lane], (const uint8_t *)(uintptr_t)(x + 4 * i), 4);
    }
}

#define QUANTUM 400000 /* instructions after which a wave that meets a branch lets others go on: it may be waiting for one of them */


/* Run a wave until it reaches a barrier or its end, or has used up its turn. */
static void run_wave(Group *g, Wave *w) {
    Launch *L = g->launch;
    const i32 *code = L->code, *p = code + w->pc;
    u32 *reg = w->registers;
    u64 exec = w->exec, steps = 0, ran[U_UNITS] = {0};
    const uint8_t *units = L->units;
    const u64 full = W == 64 ? ~0ull : 0xffffffffull;
    int ordered = 0;
    u32 *dest[64];
    uint8_t value[256];
    const u32 *src[3][64];

    for (;;) {
        steps++;
        ran[units[p[0]]]++;
        i32 line = p[1];
        switch (p[0]) {
        case OP_END:
            if (w->depth > 1) { /* other lanes still have a way to go */
                u64 gone = exec;
                w->depth--;
                for (i32 i = 0; i < w->depth; i++) w->paths[i].mask &= ~gone;
                while (w->depth > 1 && !w->paths[w->depth - 1].mask) w->depth--;
                exec = w->paths[w->depth - 1].mask;
                if (exec && w->paths[w->depth - 1].pc >= 0) { p = code + w->paths[w->depth - 1].pc; break; }
            }
            w->state = 2;
            goto leave;
        case OP_JUMP:
            p = code + p[2];
            if (L->step_limit && w->steps + steps > L->step_limit) goto stopped;
            if (steps > QUANTUM) goto leave;
            break;
        case OP_BRANCH: {
            const u32 *c = R(p[2]);
            u64 taken = 0;
            if (steps > QUANTUM) goto leave;
            for (int l = 0; l < W; l++) taken |= (u64)(c[l] & 1) << l;
            taken &= exec;
            u64 other = exec & ~taken;
            if (L->step_limit && w->steps + steps > L->step_limit) goto stopped;
            if (!other) { p = code + p[3]; break; }
            if (!taken) { p = code + p[4]; break; }
            i32 yes = p[3], no = p[4], meet = p[5];
            Path *top = &w->paths[w->depth - 1];
            if (w->depth + 2 >= MAX_PATHS) { report(g, F_LIMIT, line, w, 0, 0, -1, -1, 1); w->state = 2; atomic_store(&L->stop, 1); goto leave; }
            if (top->meet == meet && meet >= 0 && (yes == meet || no == meet)) {
                /* lanes that leave a loop wait in the entry below, which already resumes at the meeting point */
                exec = yes == meet ? other : taken;
                top->mask = exec;
                p = code + (yes == meet ? no : yes);
                break;
            }
            top->pc = meet; /* with its mask, resumes when both sides have arrived */
            if (no != meet) w->paths[w->depth++] = (Path){no, meet, other};
            if (yes != meet) w->paths[w->depth++] = (Path){yes, meet, taken};
            top = &w->paths[w->depth - 1];
            exec = top->mask;
            p = code + top->pc;
            break;
        }
        case OP_JOIN: {
            i32 here = (i32)(p - code);
            p += 2;
            while (w->depth > 1 && w->paths[w->depth - 1].meet == here) { /* this side has arrived */
                Path *next = &w->paths[--w->depth - 1];
                exec = next->mask;
                if (next->pc != here) { p = code + next->pc; break; } /* the other side, not run yet */
            }
            break;
        }
        case OP_UNREACHABLE: report(g, F_BARRIER, line, w, 0, 0, -1, -1, 3); w->state = 2; goto leave;
        case OP_MOVN: {
            i32 n = p[2];
            const i32 *q = p + 3;
            if (exec == full)
                for (i32 i = 0; i < n; i++, q += 2) memcpy(R(q[0]), R(q[1]), 4 * W);
            else
                for (i32 i = 0; i < n; i++, q += 2) {
                    u32 *d = R(q[0]); const u32 *a = R(q[1]);
                    for (int l = 0; l < W; l++) if (exec >> l & 1) d[l] = a[l];
                }
            p = q;
            break;
        }
        BINARY(ADD, a[l] + b[l]) BINARY(SUB, a[l] - b[l]) BINARY(MUL, a[l] * b[l])
        BINARY(AND, a[l] & b[l]) BINARY(OR, a[l] | b[l]) BINARY(XOR, a[l] ^ b[l])
        BINARY(SHL, b[l] < 32 ? a[l] << (b[l] & 31) : 0) BINARY(LSHR, b[l] < 32 ? a[l] >> (b[l] & 31) : 0)
        BINARY(ASHR, (u32)((i32)a[l] >> (b[l] < 32 ? b[l] : 31)))
        BINARY(UDIV, b[l] ? a[l] / b[l] : POISON) BINARY(UREM, b[l] ? a[l] % b[l] : POISON)
        BINARY(SDIV, b[l] ? (u32)((i64)(i32)a[l] / (i32)b[l]) : POISON) BINARY(SREM, b[l] ? (u32)((i64)(i32)a[l] % (i32)b[l]) : POISON)
        BINARY(SMIN, (i32)a[l] < (i32)b[l] ? a[l] : b[l]) BINARY(SMAX, (i32)a[l] > (i32)b[l] ? a[l] : b[l])
        BINARY(UMIN, a[l] < b[l] ? a[l] : b[l]) BINARY(UMAX, a[l] > b[l] ? a[l] : b[l])
        BINARY(UMULH, (u32)(((u64)a[l] * b[l]) >> 32)) BINARY(SMULH, (u32)(((i64)(i32)a[l] * (i32)b[l]) >> 32))
        BINARY(EQ, a[l] == b[l]) BINARY(NE, a[l] != b[l]) BINARY(SLT, (i32)a[l] < (i32)b[l]) BINARY(SLE, (i32)a[l] <= (i32)b[l])
        BINARY(ULT, a[l] < b[l]) BINARY(ULE, a[l] <= b[l])
        case OP_SELECT: { u32 *d = R(p[2]); const u32 *c = R(p[3]), *a = R(p[4]), *b = R(p[5]); EACH(d[l] = c[l] ? a[l] : b[l]); p += 6; break; }
        case OP_EXTRACT: { u32 *d = R(p[2]); const u32 *a = R(p[3]); u32 s = p[4], m = p[5]; EACH(d[l] = (a[l] >> s) & m); p += 6; break; }
        case OP_SEXTRACT: { u32 *d = R(p[2]); const u32 *a = R(p[3]); u32 s = p[4], m = p[5]; EACH(d[l] = (u32)((i32)(a[l] << s) >> m)); p += 6; break; }
        case OP_INSERT: { u32 *d = R(p[2]); const u32 *a = R(p[3]), *b = R(p[4]); u32 s = p[5], m = p[6]; EACH(d[l] = (a[l] & ~(m << s)) | ((b[l] & m) << s)); p += 7; break; }
        UNARY_(CTPOP, (u32)__builtin_popcount(a[l])) UNARY_(CTLZ, a[l] ? (u32)__builtin_clz(a[l]) : 32) UNARY_(CTTZ, a[l] ? (u32)__builtin_ctz(a[l]) : 32)
        UNARY_(BITREV, ({ u32 v = a[l]; v = ((v >> 1) & 0x55555555) | ((v & 0x55555555) << 1); v = ((v >> 2) & 0x33333333) | ((v & 0x33333333) << 2);
                          v = ((v >> 4) & 0x0f0f0f0f) | ((v & 0x0f0f0f0f) << 4); __builtin_bswap32(v); }))
        case OP_PERM: {
            u32 *d = R(p[2]); const u32 *a = R(p[3]), *b = R(p[4]), *s = R(p[5]);
            EACH(u64 both = ((u64)a[l] << 32) | b[l]; u32 v = 0; for (int i = 0; i < 4; i++) v |= perm_byte(both, s[l] >> (8 * i) & 0xff) << (8 * i); d[l] = v);
            p += 6; break;
        }
        case OP_ALIGNBYTE: { u32 *d = R(p[2]); const u32 *a = R(p[3]), *b = R(p[4]), *s = R(p[5]); EACH(d[l] = (u32)((((u64)a[l] << 32) | b[l]) >> (8 * (s[l] & 3)))); p += 6; break; }
        case OP_LOOKUP: { u32 *d = R(p[2]); const u32 *s = R(p[3]); i32 n = p[4]; const i32 *v = p + 5; EACH(d[l] = s[l] < (u32)n ? R(v[s[l]])[l] : POISON); p = v + n; break; }
        case OP_STOW: { u32 *d = R(p[2]); const u32 *s = R(p[3]), *v = R(p[4]), *o = R(p[5]); u32 i = p[6]; EACH(d[l] = s[l] == i ? v[l] : o[l]); p += 7; break; }
        WIDE(ADD64, x + y) WIDE(SUB64, x - y) WIDE(MUL64, x * y)
        WIDE(SHL64, y < 64 ? x << y : 0) WIDE(LSHR64, y < 64 ? x >> y : 0) WIDE(ASHR64, (i64)x >> (y < 64 ? y : 63))
        WIDE(UDIV64, y ? x / y : ~0ull) WIDE(UREM64, y ? x % y : ~0ull)
        WIDE(SDIV64, !y ? ~0ull : y == ~0ull ? 0 - x : (u64)((i64)x / (i64)y)) WIDE(SREM64, !y ? ~0ull : y == ~0ull ? 0 : (u64)((i64)x % (i64)y))
        WIDE(SMIN64, (i64)x < (i64)y ? x : y) WIDE(SMAX64, (i64)x > (i64)y ? x : y) WIDE(UMIN64, x < y ? x : y) WIDE(UMAX64, x > y ? x : y)
        WIDE_COMPARE(EQ64, x == y) WIDE_COMPARE(NE64, x != y) WIDE_COMPARE(SLT64, (i64)x < (i64)y) WIDE_COMPARE(SLE64, (i64)x <= (i64)y)
        WIDE_COMPARE(ULT64, x < y) WIDE_COMPARE(ULE64, x <= y)
        BINARY(FADD, FLOAT2(x + y)) BINARY(FSUB, FLOAT2(x - y)) BINARY(FMUL, FLOAT2(x * y)) BINARY(FDIV, FLOAT2(x / y)) BINARY(FREM, FLOAT2(fmodf(x, y)))
        case OP_FMA: { u32 *d = R(p[2]); const u32 *a = R(p[3]), *b = R(p[4]), *c = R(p[5]); EACH(d[l] = as_bits(fmaf(as_float(a[l]), as_float(b[l]), as_float(c[l])))); p += 6; break; }
        BINARY(FMAXNUM, FLOAT2(maxnum(x, y))) BINARY(FMINNUM, FLOAT2(minnum(x, y)))
        BINARY(FMAXIMUM, FLOAT2(x != x || y != y ? NAN : maxnum(x, y))) BINARY(FMINIMUM, FLOAT2(x != x || y != y ? NAN : minnum(x, y)))
        BINARY(COPYSIGN, (a[l] & 0x7fffffffu) | (b[l] & 0x80000000u))
        case OP_FCMP: { u32 *d = R(p[2]); const u32 *a = R(p[3]), *b = R(p[4]); u32 m = p[5]; EACH(d[l] = (compare_bits(as_float(a[l]), as_float(b[l])) & m) != 0); p += 6; break; }
        case OP_FUNARY: {
            u32 *d = R(p[2]); const u32 *a = R(p[3]); i32 which = p[4];
            if (which == U_NEG) EACH(d[l] = a[l] ^ 0x80000000u);
            else if (which == U_ABS) EACH(d[l] = a[l] & 0x7fffffffu);
            else EACH(d[l] = as_bits(unary(which, as_float(a[l]))));
            p += 5; break;
        }
        BINARY(FPOW, FLOAT2(powf(x, y)))
        UNARY_(SITOFP, as_bits((float)(i32)a[l])) UNARY_(UITOFP, as_bits((float)a[l]))
        UNARY_(FPTOSI, to_i32(as_float(a[l]))) UNARY_(FPTOUI, to_u32(as_float(a[l])))
        BINARY(SITOFP64, as_bits((float)(i64)(((u64)b[l] << 32) | a[l]))) BINARY(UITOFP64, as_bits((float)(((u64)b[l] << 32) | a[l])))
        case OP_FPTOSI64: { u32 *dl = R(p[2]), *dh = R(p[3]); const u32 *a = R(p[4]); EACH(u64 z = to_i64(as_float(a[l])); dl[l] = (u32)z; dh[l] = z >> 32); p += 5; break; }
        case OP_FPTOUI64: { u32 *dl = R(p[2]), *dh = R(p[3]); const u32 *a = R(p[4]); EACH(u64 z = to_u64(as_float(a[l])); dl[l] = (u32)z; dh[l] = z >> 32); p += 5; break; }
        UNARY_(F32_TO_BF16, float_to_bfloat(a[l])) UNARY_(BF16_TO_F32, a[l] << 16) UNARY_(F32_TO_F16, float_to_half(a[l]))
        UNARY_(F16_TO_F32, as_bits(half_to_float(a[l]))) UNARY_(F32_TO_F16_RTZ, float_to_half_rtz(a[l]))
        DOUBLE(DFADD, x + y) DOUBLE(DFSUB, x - y) DOUBLE(DFMUL, x * y) DOUBLE(DFDIV, x / y)
        case OP_DFMA: {
            u32 *dl = R(p[2]), *dh = R(p[3]);
            const u32 *al = R(p[4]), *ah = R(p[5]), *bl = R(p[6]), *bh = R(p[7]), *cl = R(p[8]), *ch = R(p[9]);
            EACH(u64 z = double_bits(fma(as_double(al[l], ah[l]), as_double(bl[l], bh[l]), as_double(cl[l], ch[l]))); dl[l] = (u32)z; dh[l] = z >> 32);
            p += 10; break;
        }
        case OP_DFCMP: { u32 *d = R(p[2]); const u32 *al = R(p[3]), *ah = R(p[4]), *bl = R(p[5]), *bh = R(p[6]); u32 m = p[7]; EACH(d[l] = (compare_bits(as_double(al[l], ah[l]), as_double(bl[l], bh[l])) & m) != 0); p += 8; break; }
        case OP_F32_TO_F64: { u32 *dl = R(p[2]), *dh = R(p[3]); const u32 *a = R(p[4]); EACH(u64 z = double_bits(as_float(a[l])); dl[l] = (u32)z; dh[l] = z >> 32); p += 5; break; }
        BINARY(F64_TO_F32, as_bits((float)as_double(a[l], b[l])))
        case OP_SI32_TO_F64: { u32 *dl = R(p[2]), *dh = R(p[3]); const u32 *a = R(p[4]); EACH(u64 z = double_bits((i32)a[l]); dl[l] = (u32)z; dh[l] = z >> 32); p += 5; break; }
        case OP_UI32_TO_F64: { u32 *dl = R(p[2]), *dh = R(p[3]); const u32 *a = R(p[4]); EACH(u64 z = double_bits(a[l]); dl[l] = (u32)z; dh[l] = z >> 32); p += 5; break; }
        BINARY(F64_TO_SI32, to_i32(as_double(a[l], b[l])))
        case OP_LANE_ID: { u32 *d = R(p[2]); EACH(d[l] = l); p += 3; break; }
        case OP_THREAD_ID: {
            u32 *d = R(p[2]), base = (u32)(w - g->waves) * W, x = L->block[0], y = L->block[1];
            if (p[3] == 0) EACH(d[l] = (base + l) % x); else if (p[3] == 1) EACH(d[l] = (base + l) / x % y); else EACH(d[l] = (base + l) / x / y);
            p += 4; break;
        }
        case OP_GROUP_ID: { u32 *d = R(p[2]), v = g->group_id[p[3]]; EACH(d[l] = v); p += 4; break; }
        case OP_WAVE_ID: { u32 *d = R(p[2]), v = (u32)(w - g->waves); EACH(d[l] = v); p += 3; break; }
#include "ops_lanes.inc"

        /* ---- memory ---- */
        case OP_LDS_LOAD: {
            u32 offset = p[2]; const u32 *address = R(p[3]); i32 bytes = BYTES(p[4]), n = p[6];
            const u32 misaligned = MISALIGNED(p[4]);
            for (i32 i = 0; i < n; i++) dest[i] = R(p[7 + i]);
            u32 at[W];
            for (int l = 0; l < W; l++) at[l] = address[l] + offset;
            w->lds_seq++;
            if (L->completion == 2) land_some(g, w);
            remember_read(w, p[5], at, exec, bytes, line);
            count_banks(g, at, exec, bytes);
            if (exec) note(g, w, E_LDS_READ, line, 0, at[__builtin_ctzll(exec)], bytes);
            for (int l = 0; l < W; l++) {
                if (!(exec >> l & 1)) continue;
                u32 x = at[l];
                if (x + bytes > (u32)L->lds_bytes || x + bytes < x) { report(g, F_MEMORY, line, w, l, x, -1, -1, 2); for (i32 i = 0; i < n; i++) dest[i][l] = POISON; continue; }
                if (x & misaligned) report(g, F_MEMORY, line, w, l, x, -1, -1, 22);
                lds_read_check(g, w, x, bytes, l, line);
                load_dwords(dest, n, l, g->lds + x, bytes);
            }
            g->counters[C_LDS_READ_BYTES] += (u64)bytes * __builtin_popcountll(exec);
            p += 7 + n; break;
        }
        case OP_LDS_STORE: {
            u32 offset = p[2]; const u32 *address = R(p[3]); i32 bytes = BYTES(p[4]), n = p[5];
            const u32 misaligned = MISALIGNED(p[4]);
            w->lds_seq++;
            for (int l = 0; l < W; l++) {
                if (!(exec >> l & 1)) continue;
                u32 x = address[l] + offset;
                if (x + bytes > (u32)L->lds_bytes || x + bytes < x) { report(g, F_MEMORY, line, w, l, x, -1, -1, 3); continue; }
                if (x & misaligned) report(g, F_MEMORY, line, w, l, x, -1, -1, 22);
                lds_write_check(g, w, x, bytes, l, line, 0);
                if (bytes >= 4) for (i32 i = 0; i < n; i++) memcpy(g->lds + x + 4 * i, &R(p[6 + i])[l], 4);
                else memcpy(g->lds + x, &R(p[6])[l], bytes);
            }
            g->counters[C_LDS_WRITE_BYTES] += (u64)bytes * __builtin_popcountll(exec);
            p += 6 + n; break;
        }
        case OP_DS_READ_TR16_B64: {
            /* Sixteen lanes read sixteen 8-byte pieces: four lanes make a row of sixteen 16-bit elements, four rows. Lane i gets column i,
             * row r in element r. Source: AMD CDNA4 ISA guide, DS_READ_B64_TR_B16. */
            u32 offset = p[2]; const u32 *address = R(p[3]); u32 *d0 = R(p[5]), *d1 = R(p[6]);
            uint16_t piece[W][4]; u32 at[W];
            w->lds_seq++;
            for (int l = 0; l < W; l++) {
                u32 x = at[l] = address[l] + offset;
                memset(piece[l], 0xff, 8);
                if (!(exec >> l & 1)) continue;
                if (x + 8 > (u32)L->lds_bytes || x + 8 < x) { report(g, F_MEMORY, line, w, l, x, -1, -1, 2); continue; }
                if (x & 7) report(g, F_MEMORY, line, w, l, x, -1, -1, 4);
                lds_read_check(g, w, x, 8, l, line);
                memcpy(piece[l], g->lds + x, 8);
            }
            remember_read(w, p[4], at, exec, 8, line);
            if (exec != w->full) report(g, F_BARRIER, line, w, 0, 0, -1, -1, 2); /* EXEC must be all ones: CDNA4 ISA guide, section 11.4 */
            count_banks(g, at, exec, 8);
            for (int l = 0; l < W; l++) {
                if (!(exec >> l & 1)) continue;
                int base = l & ~15, i = l & 15;
                u32 e[4];
                for (int r = 0; r < 4; r++) e[r] = piece[base + 4 * r + i / 4][i % 4];
                d0[l] = e[0] | e[1] << 16; d1[l] = e[2] | e[3] << 16;
            }
            g->counters[C_LDS_READ_BYTES] += 8ull * __builtin_popcountll(exec);
            p += 7; break;
        }
        case OP_GLOBAL_LOAD: case OP_GLOBAL_STORE: {
            int write = p[0] == OP_GLOBAL_STORE;
            i64 offset = p[2]; const u32 *lo = R(p[3]), *hi = R(p[4]); i32 bytes = BYTES(p[5]), n = p[6], in_lds = 0;
            const u64 misaligned = MISALIGNED(p[5]);
            u64 at[W], lanes = 0;
            w->vm_issued++;
            for (i32 i = 0; i < n; i++) dest[i] = R(p[7 + i]);
            for (int l = 0; l < W; l++) {
                if (!(exec >> l & 1)) continue;
                u64 x = (((u64)hi[l] << 32) | lo[l]) + offset;
                if (!allowed(g, x, bytes, write)) {
                    if (x >> 32 == LDS_APERTURE && (u64)(u32)x + bytes <= (u64)L->lds_bytes) { /* a generic address of LDS */
                        if (!in_lds++) w->lds_seq++;
                        if (write) lds_write_check(g, w, (u32)x, bytes, l, line, 0); else lds_read_check(g, w, (u32)x, bytes, l, line);
                        if (!write) load_dwords(dest, n, l, g->lds + (u32)x, bytes);
                        else if (bytes >= 4) for (i32 i = 0; i < n; i++) memcpy(g->lds + (u32)x + 4 * i, &dest[i][l], 4);
                        else memcpy(g->lds + (u32)x, &dest[0][l], bytes);
                        continue;
                    }
                    report(g, F_MEMORY, line, w, l, x, -1, -1, refusal(g, x, bytes, write));
                    if (!write) load_what_exists(g, dest, n, l, x, bytes);
                    continue;
                }
                at[l] = x; lanes |= 1ull << l;
                if (x & misaligned) report(g, F_MEMORY, line, w, l, x, -1, -1, 22);
                if (ordered) {} else if (write) { gather(value, dest, n, l); global_write_check(g, w, x, bytes, value, l, line); } else global_read_check(g, w, x, bytes, l, line);
                if (write && L->num_outputs) output_written(L, x, bytes);
                if (!write) load_dwords(dest, n, l, (const uint8_t *)(uintptr_t)x, bytes);
                else if (bytes >= 4) for (i32 i = 0; i < n; i++) memcpy((uint8_t *)(uintptr_t)x + 4 * i, &dest[i][l], 4);
                else memcpy((void *)(uintptr_t)x, &dest[0][l], bytes);
            }
            if (write && !ordered) stored_twice(g, w, at, lanes, bytes, n, dest, line);
            count_lines(g, at, lanes, bytes);
            g->counters[write ? C_GLOBAL_WRITE_BYTES : C_GLOBAL_READ_BYTES] += (u64)bytes * __builtin_popcountll(exec);
            if (in_lds && in_lds == __builtin_popcountll(exec)) w->vm_issued--; /* the compiler makes an LDS instruction of it */
            ordered = 0;
            p += 7 + n; break;
        }
        case OP_BUFFER_LOAD: case OP_BUFFER_STORE: case OP_BUFFER_LOAD_LDS: {
            /* Raw buffer addressing, stride 0: a dword at offset o = voffset + instruction offset (+ soffset) is in range while
             * o + 4 <= num_records; out of range reads give zero, writes are dropped, each dword by itself. The first sum wraps at 32 bits,
             * the second does not. Source: AMD CDNA3 ISA guide, section 9.1.5 (buffer addressing, range checking); for the part of soffset
             * and the wrapping, rocjitsu's addr_calc_buffer.h, which follows gfx950. */
            int kind = p[0];
            u64 imm = (u32)p[2];
            const u32 *r0 = R(p[3]), *r1 = R(p[4]), *r2 = R(p[5]), *r3 = R(p[6]), *voffset = R(p[7]), *soffset = R(p[8]);
            i32 bytes = p[9], n = 0;
            const uint8_t *source[W];
            u64 lanes = 0, at[W], served = 0, whole = 0;
            if (kind != OP_BUFFER_LOAD_LDS) { n = p[10]; for (i32 i = 0; i < n; i++) dest[i] = R(p[11 + i]); w->vm_issued++; }
            for (int l = 0; l < W; l++) {
                if (!(exec >> l & 1)) continue;
                const Buffer resource = buffer_of(r0[l], r1[l], r2[l], r3[l]);
                u64 base = resource.base, records = resource.records;
                u32 stride = resource.stride;
                u64 o = (u64)(u32)(voffset[l] + imm) + soffset[l];
                if ((voffset[l] + imm) >> 32) report(g, F_MEMORY, line, w, l, o, -1, -1, 23);
                if (stride) report(g, F_MEMORY, line, w, l, base, -1, -1, 5);
                u64 x = base + o;
                u64 inside = o >= records ? 0 : records - o >= (u64)bytes ? (u64)bytes : bytes < 4 ? 0 : (records - o) & ~3ull;
                if (inside && !allowed(g, x, inside, kind == OP_BUFFER_STORE)) {
                    report(g, F_MEMORY, line, w, l, x, -1, -1, refusal(g, x, inside, kind == OP_BUFFER_STORE));
                    if (kind == OP_BUFFER_LOAD) { load_what_exists(g, dest, n, l, x, inside); continue; }
                    inside = 0;
                }
                if (inside) {
                    at[l] = x; served |= 1ull << l;
                    if (inside == (u64)bytes) whole |= 1ull << l;
                    if (kind == OP_BUFFER_STORE) { gather(value, dest, n, l); global_write_check(g, w, x, inside, value, l, line); } else global_read_check(g, w, x, inside, l, line);
                    if (kind == OP_BUFFER_STORE && L->num_outputs) output_written(L, x, inside);
                }
                if (kind == OP_BUFFER_LOAD) {
                    if (inside == (u64)bytes) load_dwords(dest, n, l, (const uint8_t *)(uintptr_t)x, bytes);
                    else {
                        for (i32 i = 0; i < n; i++) dest[i][l] = 0;
                        for (u64 b = 0; b + 4 <= inside; b += 4) memcpy(&dest[b / 4][l], (const uint8_t *)(uintptr_t)x + b, 4);
                    }
                } else if (kind == OP_BUFFER_STORE) {
                    if (bytes >= 4) for (u64 b = 0; b + 4 <= inside; b += 4) memcpy((uint8_t *)(uintptr_t)x + b, &dest[b / 4][l], 4);
                    else if (inside) memcpy((void *)(uintptr_t)x, &dest[0][l], bytes);
                } else {
                    /* whole or nothing: a copy that straddles the end of the range is reported, its bytes read as zero */
                    if (inside && inside != (u64)bytes) { report(g, F_MEMORY, line, w, l, x, -1, -1, 6); inside = 0; }
                    source[l] = inside ? (const uint8_t *)(uintptr_t)x : NULL;
                    lanes |= 1ull << l;
                }
            }
            if (kind == OP_BUFFER_STORE) stored_twice(g, w, at, whole, bytes, n, dest, line);
            count_lines(g, at, served, bytes);
            if (kind == OP_BUFFER_LOAD_LDS) {
                /* LDS address = the wave's base (first lane) + instruction offset + lane * lane_stride: CDNA3 ISA guide, section 9.1.9 (memory buffer load to LDS) */
                u32 lds = R(p[10])[exec ? __builtin_ctzll(exec) : 0] + (u32)imm;
                const u32 *base = R(p[10]);
                for (int l = 0; l < W; l++) if ((exec >> l & 1) && base[l] + (u32)imm != lds) { report(g, F_MEMORY, line, w, l, base[l], -1, -1, 7); break; }
                if (lanes) issue_copy(g, w, source, lanes, lds, bytes, line); else w->vm_issued++;
                p += 11;
            } else {
                g->counters[kind == OP_BUFFER_STORE ? C_GLOBAL_WRITE_BYTES : C_GLOBAL_READ_BYTES] += (u64)bytes * __builtin_popcountll(exec);
                p += 11 + n;
            }
            break;
        }
        case OP_GLOBAL_LOAD_LDS: {
            i64 imm = p[2]; const u32 *lo = R(p[3]), *hi = R(p[4]); i32 bytes = p[5];
            const uint8_t *source[W]; u64 lanes = 0, at[W];
            for (int l = 0; l < W; l++) {
                if (!(exec >> l & 1)) continue;
                u64 x = at[l] = (((u64)hi[l] << 32) | lo[l]) + imm;
                if (!allowed(g, x, bytes, 0)) { report(g, F_MEMORY, line, w, l, x, -1, -1, 0); continue; }
                global_read_check(g, w, x, bytes, l, line);
                source[l] = (const uint8_t *)(uintptr_t)x; lanes |= 1ull << l;
            }
            count_lines(g, at, lanes, bytes);
            u32 lds = R(p[6])[exec ? __builtin_ctzll(exec) : 0] + (u32)imm;
            if (lanes) issue_copy(g, w, source, lanes, lds, bytes, line); else w->vm_issued++;
            p += 7; break;
        }
        /* ---- order ---- */
        case OP_WAIT:
            g->counters[C_WAITS]++;
            if (p[2] >= 0) wait_vm(g, w, p[2]);
            if (p[3] >= 0 && (i32)(w->lds_seq - p[3] - w->lds_done) > 0) w->lds_done = w->lds_seq - p[3];
            p += 4; break;
        case OP_FENCE: /* a release waits for the wave's own LDS writes; copies to LDS are the kernel's to wait for (docs/simulator.md) */
            if (p[2]) w->lds_done = w->lds_seq;
            if (p[2] == 2) wait_vm(g, w, 0); /* beyond the workgroup: the compiler waits for vector memory, too */
            p += 4; break;
        case OP_BARRIER:
            g->counters[C_BARRIERS]++;
            if (exec != w->full) report(g, F_BARRIER, line, w, 0, 0, -1, -1, 0);
            if (L->completion == 2) land_some(g, w);
            w->barrier_line = line;
            w->state = 1;
            p += 2;
            goto leave;
        case OP_USED: {
            i32 n = p[2];
            for (i32 i = 0; i < n; i++) { u32 seq = w->site_seq[p[3 + i]]; if ((i32)(seq - w->lds_done) > 0) w->lds_done = seq; }
            p += 3 + n; break;
        }
        case OP_ORDERED: g->synchronised = ordered = 1; p += 2; break;
        case OP_NOTE: p += 3; break;
#include "ops_matrix.inc"
#include "ops_gfx1250.inc"
        default:
            report(g, F_LIMIT, line, w, 0, p[0], -1, -1, 2);
            w->state = 2;
            atomic_store(&L->stop, 1);
            goto leave;
        }
    }
stopped:
    report(g, F_LIMIT, p[1], w, 0, 0, -1, -1, 0);
    w->state = 2;
    atomic_store(&L->stop, 1);
leave:
    w->pc = (i32)(p - code);
    w->exec = exec;
    if (w->state != 2) w->paths[w->depth - 1].mask = exec;
    w->steps += steps;
    g->counters[C_INSTRUCTIONS] += steps;
    g->counters[C_VALU_INSTRUCTIONS] += ran[U_VALU];
    g->counters[C_LDS_INSTRUCTIONS] += ran[U_LDS];
    g->counters[C_GLOBAL_INSTRUCTIONS] += ran[U_GLOBAL];
}

static void start_group(Group *g, u64 index) {
    Launch *L = g->launch;
    g->workgroup = index;
    g->synchronised = 0;
    g->group_id[0] = index % L->grid[0];
    g->group_id[1] = index / L->grid[0] % L->grid[1];
    g->group_id[2] = index / L->grid[0] / L->grid[1];
#if W == 32
    start_async(g);
#endif
    memset(g->lds, 0xff, L->lds_bytes);
    for (i32 i = 0; i < (L->lds_bytes + 3) / 4; i++) g->shadow[i] = (Shadow){.write_line = -1, .read_line = -1, .writer = 0, .read_epoch = 0xffffffffu};
    u32 threads = L->block[0] * L->block[1] * L->block[2];
    for (i32 i = 0; i < g->num_waves; i++) {
        Wave *w = &g->waves[i];
        u32 left = threads - i * W;
        w->full = left >= 64 ? ~0ull : (1ull << left) - 1;
        if (W == 32) w->full &= 0xffffffffull;
        w->pc = 0; w->exec = w->full; w->depth = 1;
        w->paths[0] = (Path){-1, -1, w->full};
        w->state = 0; w->epoch = 0; w->steps = 0;
        w->vm_issued = w->vm_done = 0; w->copy_head = w->copy_count = 0;
        w->lds_seq = w->lds_done = w->lds_published = 0;
        w->copy_seq = w->copy_done = w->copy_published = 0;
        w->num_reads = 0; w->num_marks = 0;
        memset(w->site_seq, 0, sizeof(u32) * (L->num_sites + 1));
        for (i32 c = 0; c < L->num_constants; c++) {
            u32 *r = w->registers + (size_t)c * W, v = L->constants[c];
            for (int l = 0; l < W; l++) r[l] = v;
        }
        for (size_t r = (size_t)L->num_constants * W; r < (size_t)L->num_registers * W; r++) w->registers[r] = POISON;
    }
}

/* Let every wave of the workgroup run once, and release a full barrier; 1 when the workgroup has ended. */
static int step_group(Group *g) {
    Launch *L = g->launch;
    i32 order[MAX_WAVES], waiting = 0, ended = 0;
#if W == 32
    release_waves(g);
#endif
    for (i32 i = 0; i < g->num_waves; i++) order[i] = L->schedule == 1 ? g->num_waves - 1 - i : i;
    if (L->schedule > 1)
        for (i32 i = g->num_waves - 1; i > 0; i--) {
            i32 j = next_random(g) % (i + 1), t = order[i];
            order[i] = order[j]; order[j] = t;
        }
    for (i32 i = 0; i < g->num_waves; i++)
        if (g->waves[order[i]].state == 0) run_wave(g, &g->waves[order[i]]);
    if (atomic_load(&L->stop)) return 1;
    for (i32 i = 0; i < g->num_waves; i++) { waiting += g->waves[i].state == 1; ended += g->waves[i].state == 2; }
    if (waiting + ended < g->num_waves) return 0; /* some have used up their turn */
    if (waiting) {
        if (ended) /* some waves left for good while others wait at a barrier */
            for (i32 i = 0; i < g->num_waves; i++)
                if (g->waves[i].state == 1) { report(g, F_BARRIER, g->waves[i].barrier_line, &g->waves[i], 0, 0, -1, -1, 1); break; }
        for (i32 i = 0; i < g->num_waves; i++) {
            Wave *w = &g->waves[i];
            w->lds_published = w->lds_done;
            w->copy_published = w->copy_done;
            if (w->state == 1) { w->state = 0; w->epoch++; carry_reads(g, w); }
        }
        return 0;
    }
    for (i32 i = 0; i < g->num_waves; i++) { /* copies that nothing waited for */
        Wave *w = &g->waves[i];
        if (w->copy_count) report(g, F_WAIT, w->copies[w->copy_head].line, w, 0, w->copies[w->copy_head].lds, -1, -1, 2);
    }
#if W == 32
    end_async(g);
#endif
    return 1;
}

static pthread_mutex_t merge = PTHREAD_MUTEX_INITIALIZER;

static Group *new_group(Launch *L, u64 seed) {
    Group *g = calloc(1, sizeof *g);
    u32 threads = L->block[0] * L->block[1] * L->block[2];
    g->launch = L;
    g->random = seed;
    g->num_waves = (threads + W - 1) / W;
    g->lds = aligned_alloc(64, (L->lds_bytes + 127) / 64 * 64);
    g->shadow = malloc(sizeof(Shadow) * (L->lds_bytes / 4 + 2));
    g->findings = calloc(L->max_findings, sizeof(Finding));
    for (i32 i = 0; i < g->num_waves; i++) {
        g->waves[i].registers = aligned_alloc(64, (size_t)L->num_registers * W * 4 + 64);
        g->waves[i].copies = malloc(sizeof(Copy) * MAX_COPIES);
        g->waves[i].site_seq = malloc(sizeof(u32) * (L->num_sites + 1));
        g->waves[i].reads = malloc(sizeof(struct Read) * MAX_READS);
#if W == 32
        for (i32 q = 0; q < NUM_QUEUES; q++) g->waves[i].async.queues[q].ring = malloc(sizeof(Transfer) * MAX_TRANSFERS);
#endif
    }
    return g;
}

static void end_group(Group *g) { /* adds what it counted and found to the launch */
    Launch *L = g->launch;
    pthread_mutex_lock(&merge);
    for (i32 i = 0; i < C_COUNTERS; i++) L->counters[i] += g->counters[i];
    for (i32 i = 0; i < g->num_findings; i++) {
        i32 j = 0;
        Finding *f = &g->findings[i];
        for (; j < L->num_findings; j++)
            if (L->findings[j].kind == f->kind && L->findings[j].line == f->line && L->findings[j].other_line == f->other_line && L->findings[j].detail == f->detail) break;
        if (j < L->num_findings) {
            // The lowest workgroup stands for all, whichever host thread came first.
            const u64 count = L->findings[j].count + f->count;
            if (f->workgroup < L->findings[j].workgroup) L->findings[j] = *f;
            L->findings[j].count = count;
        }
        else if (L->num_findings < L->max_findings) L->findings[L->num_findings++] = *f;
    }
    pthread_mutex_unlock(&merge);
    for (i32 i = 0; i < g->num_waves; i++) { free(g->waves[i].registers); free(g->waves[i].copies); free(g->waves[i].site_seq); free(g->waves[i].reads); }
#if W == 32
    for (i32 i = 0; i < g->num_waves; i++) for (i32 q = 0; q < NUM_QUEUES; q++) free(g->waves[i].async.queues[q].ring);
#endif
    free(g->lds); free(g->shadow); free(g->byte_shadow); free(g->findings); free(g);
}

/* The workgroup started as the n-th: clusters one after another, in them x fastest. */
static u64 workgroup_at(const Launch *L, u64 n) {
    u64 size = (u64)L->cluster[0] * L->cluster[1] * L->cluster[2], id[3], rank = n % size, cluster = n / size;
    if (size == 1) return n;
    for (i32 i = 0; i < 3; i++) {
        u64 across = L->grid[i] / L->cluster[i];
        id[i] = cluster % across * L->cluster[i] + rank % L->cluster[i];
        cluster /= across; rank /= L->cluster[i];
    }
    return id[0] + L->grid[0] * (id[1] + L->grid[1] * id[2]);
}

static inline u64 barriers_passed(const Group *g) {
#if W == 32
    return g->counters[C_BARRIERS]; /* waves pass one by one */
#else
    return g->waves[0].epoch;
#endif
}

/* Whether any wave's registers or place differ from the last time this was asked: one that only spins comes back to the same. */
static int state_changed(Group *g) {
    u64 hash = 1469598103934665603ull;
    for (i32 i = 0; i < g->num_waves; i++) {
        const Wave *w = &g->waves[i];
        const u64 *words = (const u64 *)w->registers, n = (u64)g->launch->num_registers * W / 2;
        for (u64 r = 0; r < n; r++) hash = (hash ^ words[r]) * 1099511628211ull;
        hash = (hash ^ (u64)w->pc ^ (w->exec << 1)) * 1099511628211ull;
    }
    int changed = hash != g->last_state;
    g->last_state = hash;
    return changed;
}

/* A host thread: takes the launch's workgroups in order. A workgroup whose waves have all used up their turns may be waiting for another one
 * (split-K, stream-K): it is put aside, up to MAX_RESIDENT of them, and the thread goes on with the next. */
static void *worker(void *argument) {
    Launch *L = argument;
    Group *resident[MAX_RESIDENT], *spare = NULL;
    i32 count = 0, turn = 0, more = 1;
    u64 seed = L->schedule + 1, seen = 0;
    i32 idle = 0, stuck = 0, size = (i32)(L->cluster[0] * L->cluster[1] * L->cluster[2]);
    while (!atomic_load(&L->stop)) {
        /* the next cluster once those at hand are all stuck; without clusters, every workgroup that stops at once */
        if (more && count + size <= MAX_RESIDENT && (size == 1 || !count || stuck > 2 * count)) {
            u64 index = atomic_fetch_add(&L->next, size);
            if (index >= L->num_workgroups) { more = 0; continue; }
            turn = count;
            stuck = 0;
            for (i32 i = 0; i < size; i++) {
                Group *g = spare ? spare : new_group(L, seed++);
                spare = NULL;
                start_group(g, workgroup_at(L, L->first_workgroup + index + i));
#if W == 32
                join_cluster(g, i ? resident[count - 1]->cluster : NULL, size);
#endif
                resident[count++] = g;
            }
        }
        if (!count) break;
        Group *g = resident[turn];
        int ended = 0, waits = 0;
        u64 before, wrote = g->counters[C_GLOBAL_WRITE_BYTES], passes = 0;
        do { /* as long as it gets on from barrier to barrier, and not in a circle, as one that looks for another's flag between them does */
            before = barriers_passed(g);
            ended = step_group(g);
            if (barriers_passed(g) == before) break;
            if (++passes % CHECKED_PASSES == 0) {
                if (state_changed(g)) atomic_fetch_add(&L->progress, 1); else waits = 1;
            }
        } while (!ended && !waits && passes < MAX_PASSES);
        if (ended) {
            atomic_fetch_add(&L->done, 1);
#if W == 32
            leave_cluster(g);
#endif
            resident[turn] = resident[--count];
            if (spare) end_group(g); else spare = g;
        }
        stuck++;
        if (ended || g->counters[C_GLOBAL_WRITE_BYTES] != wrote || (!waits && (passes || state_changed(g)))) { atomic_fetch_add(&L->progress, 1); stuck = 0; }
        if (seen != atomic_load(&L->progress)) { seen = atomic_load(&L->progress); idle = 0; }
        else if (!more && ++idle > IDLE_TURNS * count) {
            report(g, F_LIMIT, L->code[g->waves[0].pc + 1], &g->waves[0], 0, 0, -1, -1, 3);
            atomic_store(&L->stop, 1);
        }
        turn = count ? (turn + 1) % count : 0;
    }
    while (count) end_group(resident[--count]);
    if (spare) end_group(spare);
    return NULL;
}

/* The words of who wrote and who read an allocation, in one mapping: its untouched pages cost nothing. */
static u64 words_of(const Allocation *a, u32 shift) { return ((a->hi - a->lo) >> shift) + 2; }
static u64 watched_bytes(const Allocation *a) { return 8 * (2 * words_of(a, 2) + words_of(a, 4) + words_of(a, 1) + words_of(a, 0)); }
static void watch(Allocation *a) {
    u64 *words = mmap(NULL, watched_bytes(a), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    a->writers = words == MAP_FAILED ? NULL : words;
    words += words_of(a, 2);
    for (i32 level = 0; level < 4 && a->writers; level++) { a->readers[level] = words; words += words_of(a, READ_SHIFT[level]); }
}

/* 0: ran; 1: the workgroup has more waves than a workgroup may have. */
int fourwave_sim_run(Launch *L) {
    u32 threads = L->block[0] * L->block[1] * L->block[2];
    if ((threads + W - 1) / W > MAX_WAVES || !threads) return 1;
    for (i32 i = 0; i < L->num_allocations && L->checks >> F_GLOBAL & 1; i++) watch(&L->allocations[i]);
    i32 n = L->num_threads, started = 0;
    if ((u64)n > L->num_workgroups) n = (i32)L->num_workgroups;
    pthread_t *ids = malloc(sizeof(pthread_t) * (n + 1));
    for (; started < n - 1; started++)
        if (pthread_create(&ids[started], NULL, worker, L)) break;
    worker(L);
    for (i32 i = 0; i < started; i++) pthread_join(ids[i], NULL);
    free(ids);
    for (i32 i = 0; i < L->num_allocations; i++) if (L->allocations[i].writers) munmap(L->allocations[i].writers, watched_bytes(&L->allocations[i]));
    return 0;
}

int fourwave_sim_sizes(u64 *out) { out[0] = sizeof(Launch); out[1] = sizeof(Finding); out[2] = sizeof(Allocation); out[3] = W; out[4] = OP_COUNT; return 0; }
