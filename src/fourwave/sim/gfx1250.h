#pragma once
/* gfx1250: asynchronous transfers between global memory and LDS (asynccnt), the tensor data mover (tensorcnt), barriers in two halves.
 *
 * Transfers of one wave and one counter complete in order, each as late as a wait allows (completion = late); bytes move then.
 * A multicast mask names the workgroups of the cluster that take part: every one of them issues its own load, and the data land in the
 * LDS of the issuer, at the address it gave. Source: ROCm/rocm-systems emulation/rocjitsu, vm/amdgpu/cluster_lds_multicast (a mask does not
 * copy one requester's data into its peers' LDS); FlyDSL's tdm_ops.py says the same of merged requests (early_timeout).
 */

/* ---- tensor descriptors: AMD CDNA5 ISA guide, sections 10.11.1 to 10.11.6, as rocjitsu's shared/tensor_dma.h and Triton's TDMUtility.cpp
 * read them. Dimension 0 is the innermost; its stride is 1. ---- */
typedef struct {
    u64 global, stride[5];       /* bytes; elements */
    u32 lds, size, rank, tensor[5], tile[5];
    u32 pad_interval, pad_amount; /* bytes; 0: none */
    u32 rows, index[16];         /* gather */
    u32 mask;
    int active, gather;
    i32 fault;                   /* 0, or the finding's detail: 9 malformed, 10 not modelled */
} Tensor;

static inline u64 field_of(const u32 *words, u32 bit, u32 width) {
    u64 value = 0;
    for (u32 i = 0; i < width; i++) value |= (u64)(words[(bit + i) / 32] >> ((bit + i) % 32) & 1) << i;
    return value;
}

static Tensor read_descriptor(const u32 *w, int store) {
    const u32 *g0 = w, *g1 = w + 4, *g2 = w + 12, *g3 = w + 16;
    Tensor t = {0};
    u32 count = g0[0] & 3;
    t.active = count != 0;
    if (!t.active) return t;
    t.gather = g0[0] >> 31;
    t.lds = g0[1];
    t.global = (u64)g0[2] | (u64)(g0[3] & 0x1ffffff) << 32;
    t.mask = g1[0] & 0xffff;
    t.size = 1u << field_of(g1, 16, 2);
    if (field_of(g1, 20, 1) && !store) { /* padding is of loads only */
        t.pad_interval = 4u << (field_of(g1, 22, 3) + 1);
        t.pad_amount = 4 * (field_of(g1, 25, 7) + 1);
    }
    t.tensor[0] = field_of(g1, 48, 32); t.tensor[1] = field_of(g1, 80, 32);
    t.tile[0] = field_of(g1, 112, 16); t.tile[1] = field_of(g1, 128, 16);
    t.stride[0] = 1; t.stride[1] = field_of(g1, 160, 48); t.stride[2] = field_of(g1, 208, 48);
    if (g0[3] >> 30 != 2 || count > 1) t.fault = 9;
    if (field_of(g1, 18, 1)) t.fault = 10; /* arrives at an LDS barrier */
    if (t.gather) {
        u32 wide = g0[0] >> 30 & 1;
        t.rank = 2;
        t.rows = t.tile[1];
        if (!t.tile[0] || !t.rows || t.rows > (wide ? 8 : 16)) t.fault = 9;
        for (u32 i = 0; i < 16; i++) {
            u32 at = wide ? i : i / 2;
            if (at >= 8) break;
            u32 word = at < 4 ? g2[at] : g3[at - 4];
            t.index[i] = wide ? word : word >> (16 * (i & 1)) & 0xffff;
        }
        return t;
    }
    if (g0[0] >> 30 & 1) t.fault = 9;
    if (field_of(g1, 19, 1)) { t.fault = 10; return t; } /* iterate */
    t.tile[2] = field_of(g1, 144, 16); t.tile[3] = field_of(g2, 112, 16); t.tile[4] = field_of(g3, 80, 16);
    t.tensor[2] = g2[0]; t.tensor[3] = g2[1]; t.tensor[4] = field_of(g3, 48, 32);
    t.stride[3] = field_of(g2, 64, 48); t.stride[4] = field_of(g3, 0, 48);
    for (t.rank = 5; t.rank && !t.tile[t.rank - 1]; t.rank--) {}
    for (u32 d = 0; d < t.rank; d++) if (!t.tile[d]) t.fault = 9;
    return t;
}

/* Visit the tile's runs: bytes contiguous in LDS and in global memory (NULL: outside the tensor). A run ends with its row, its padding
 * interval, or the tensor's edge. */
typedef void (*Visit)(Group *g, Wave *w, uint8_t *global, u32 lds, u32 bytes, i32 line);

static void visit_row(Group *g, Wave *w, const Tensor *t, u64 element, u64 row, u32 inside, i32 line, Visit visit) {
    u32 length = t->tile[0] * t->size, edge = inside * t->size;
    for (u32 at = 0; at < length;) {
        u64 dense = row * length + at;
        u32 n = length - at;
        if (at < edge && edge - at < n) n = edge - at;
        if (t->pad_interval && t->pad_interval - dense % t->pad_interval < n) n = t->pad_interval - dense % t->pad_interval;
        u64 lds = t->lds + dense + (t->pad_interval ? dense / t->pad_interval * t->pad_amount : 0);
        visit(g, w, at < edge ? (uint8_t *)(uintptr_t)(t->global + element * t->size + at) : NULL, lds > 0x7fffffff ? 0x7fffffff : (u32)lds, n, line);
        at += n;
    }
}

static void visit_tensor(Group *g, Wave *w, const Tensor *t, i32 line, Visit visit) {
    u32 first = t->tensor[0] < t->tile[0] ? t->tensor[0] : t->tile[0];
    if (t->gather) {
        for (u32 i = 0; i < t->rows; i++) visit_row(g, w, t, t->index[i] * t->stride[1], i, t->index[i] < t->tensor[1] ? first : 0, line, visit);
        return;
    }
    if (!t->rank) return;
    u32 at[5] = {0};
    for (u64 row = 0;; row++) {
        u64 element = 0;
        u32 inside = first, d;
        for (d = 1; d < t->rank; d++) {
            element += at[d] * t->stride[d];
            if (at[d] >= t->tensor[d]) inside = 0;
        }
        for (d = 0; d < t->rank; d++) if (!t->tensor[d]) inside = 0;
        visit_row(g, w, t, element, row, inside, line, visit);
        for (d = 1; d < t->rank && ++at[d] == t->tile[d]; d++) at[d] = 0;
        if (d >= t->rank) return;
    }
}

/* ---- what a run of bytes does at its issue and when it completes ---- */
static int lds_holds(Group *g, Wave *w, u32 lds, u32 bytes, i32 line, int store) {
    if ((u64)lds + bytes <= (u64)g->launch->lds_bytes) return 1;
    report(g, F_MEMORY, line, w, 0, lds, -1, -1, store ? 2 : 3);
    return 0;
}

static void begin_load(Group *g, Wave *w, uint8_t *global, u32 lds, u32 bytes, i32 line, i32 lane, int from) {
    if (!lds_holds(g, w, lds, bytes, line, 0)) return;
    lds_write_check(g, w, lds, bytes, lane, line, from);
    g->counters[C_COPY_BYTES] += bytes;
    if (!global) return;
    if (!allowed(g, (u64)(uintptr_t)global, bytes, 0)) report(g, F_MEMORY, line, w, lane, (u64)(uintptr_t)global, -1, -1, 0);
    else global_read_check(g, w, (u64)(uintptr_t)global, bytes, lane, line);
}

static void end_load(Group *g, uint8_t *global, u32 lds, u32 bytes) {
    if ((u64)lds + bytes > (u64)g->launch->lds_bytes) return;
    if (global && allowed(g, (u64)(uintptr_t)global, bytes, 0)) memcpy(g->lds + lds, global, bytes); else memset(g->lds + lds, 0, bytes);
    landed(g, lds, bytes);
}

/* LDS is read by another engine than the wave's LDS operations: the wave's own stores, too, must have been waited for. */
static void begin_store(Group *g, Wave *w, uint8_t *global, u32 lds, u32 bytes, i32 line, i32 lane) {
    if (!global || !lds_holds(g, w, lds, bytes, line, 1)) return; /* what is dropped is not read: Triton's tiles end in padding past LDS */
    u32 wave = (u32)(w - g->waves);
    if (!allowed(g, (u64)(uintptr_t)global, bytes, 1)) report(g, F_MEMORY, line, w, lane, (u64)(uintptr_t)global, -1, -1, refusal(g, (u64)(uintptr_t)global, bytes, 1));
    else global_write_check(g, w, (u64)(uintptr_t)global, bytes, g->lds + lds, lane, line);
    for (u32 at = lds & ~3u; at < lds + bytes; at += 4) {
        u32 n;
        for (Shadow *s = shadows(g, at, lds, lds + bytes, &n); n--; s++) {
            if (s->in_flight) report(g, F_WAIT, line, w, lane, at, s->writer, s->write_line, wave != s->writer);
            else if (s->writer == wave && s->from_copy == FROM_LDS && s->bytes && (i32)(s->write_seq - w->lds_done) > 0)
                report(g, F_WAIT, line, w, lane, at, s->writer, s->write_line, 3);
            else if (s->writer != wave && s->bytes && (i32)(s->write_seq - published(g, w, s)) > 0)
                report(g, F_RACE, line, w, lane, at, s->writer, s->write_line, 0);
            if (s->init != 15 && !s->in_flight) report(g, F_INIT, line, w, lane, at, -1, -1, 0);
            s->dma_readers++;
            s->read_line = line;
        }
    }
    g->counters[C_LDS_READ_BYTES] += bytes;
}

static void end_store(Group *g, Wave *w, uint8_t *global, u32 lds, u32 bytes, i32 line) {
    if ((u64)lds + bytes > (u64)g->launch->lds_bytes || !global) return;
    if (allowed(g, (u64)(uintptr_t)global, bytes, 1)) {
        memcpy(global, g->lds + lds, bytes);
        g->counters[C_GLOBAL_WRITE_BYTES] += bytes;
        if (g->launch->num_outputs) output_written(g->launch, (u64)(uintptr_t)global, bytes);
    }
    for (u32 at = lds & ~3u; at < lds + bytes; at += 4) {
        u32 n;
        for (Shadow *s = shadows(g, at, lds, lds + bytes, &n); n--; s++) {
            s->dma_readers--;
            *readers_of(s, read_tag(w)) |= 1u << (w - g->waves);
            s->read_line = line;
        }
    }
}

static void tensor_load_begins(Group *g, Wave *w, uint8_t *global, u32 lds, u32 bytes, i32 line) { begin_load(g, w, global, lds, bytes, line, 0, FROM_TENSOR); }
static void tensor_load_ends(Group *g, Wave *w, uint8_t *global, u32 lds, u32 bytes, i32 line) { (void)w; (void)line; end_load(g, global, lds, bytes); }
static void tensor_store_begins(Group *g, Wave *w, uint8_t *global, u32 lds, u32 bytes, i32 line) { begin_store(g, w, global, lds, bytes, line, 0); }
static void tensor_store_ends(Group *g, Wave *w, uint8_t *global, u32 lds, u32 bytes, i32 line) { end_store(g, w, global, lds, bytes, line); }

/* Of a tile, gaps left out: rows times columns times the size of an element (read_descriptor). */
static u64 tensor_bytes(const u32 *words) { return (u64)(words[8] & 0xffff) * (words[7] >> 16) << (words[4] >> 16 & 3); }

/* ---- queues ---- */
static void complete_oldest(Group *g, Wave *w, Queue *q) {
    Transfer *x = &q->ring[q->head];
    if (x->bytes) {
        for (i32 lane = 0; lane < W; lane++) {
            if (!(x->lanes >> lane & 1)) continue;
            if (x->store) end_store(g, w, x->global[lane], x->lds[lane], x->bytes, x->line); else end_load(g, x->global[lane], x->lds[lane], x->bytes);
        }
    } else if (x->lanes) {
        Tensor t = read_descriptor(x->words, x->store);
        visit_tensor(g, w, &t, x->line, x->store ? tensor_store_ends : tensor_load_ends);
        note(g, w, E_TILE_LANDED, x->line, x->store, x->words[1], tensor_bytes(x->words));
    }
    q->head = (q->head + 1) % MAX_TRANSFERS;
    q->count--;
    q->done++;
}

static void wait_queue(Group *g, Wave *w, i32 which, u32 outstanding) {
    Queue *q = &w->async.queues[which];
    while (q->count > outstanding) complete_oldest(g, w, q);
}

static Transfer *issue_transfer(Group *g, Wave *w, i32 which, i32 line, int store) {
    Queue *q = &w->async.queues[which];
    if (q->count == MAX_TRANSFERS - 1) complete_oldest(g, w, q); /* the counters hold six bits */
    q->issued++;
    Transfer *x = &q->ring[(q->head + q->count++) % MAX_TRANSFERS];
    x->line = line; x->store = store; x->bytes = 0; x->lanes = 0;
    return x;
}

static void after_issue(Group *g, Wave *w, i32 which) {
    i32 completion = g->launch->completion;
    if (completion == 1) wait_queue(g, w, which, 0);
    if (completion == 2) for (u32 n = next_random(g) & 3; n && w->async.queues[which].count; n--) complete_oldest(g, w, &w->async.queues[which]);
}

static int multicast_leaves_out(Group *g, Wave *w, u32 mask, i32 line) {
    if (!mask || mask >> g->cluster_rank & 1) return 0;
    report(g, F_MEMORY, line, w, 0, mask, -1, -1, 11);
    return 1;
}

static void issue_tensor(Group *g, Wave *w, const u32 *words, i32 line, int store) {
    Tensor t = read_descriptor(words, store);
    Transfer *x = issue_transfer(g, w, Q_TENSOR, line, store);
    if (t.active && t.fault) report(g, t.fault == 10 ? F_LIMIT : F_MEMORY, line, w, 0, 0, -1, -1, t.fault == 10 ? 4 : 9);
    else if (t.active && (store || !multicast_leaves_out(g, w, t.mask, line))) {
        memcpy(x->words, words, sizeof x->words);
        x->lanes = 1;
        note(g, w, E_TILE_ISSUED, line, store, words[1], tensor_bytes(words));
        visit_tensor(g, w, &t, line, store ? tensor_store_begins : tensor_load_begins);
    }
    after_issue(g, w, Q_TENSOR);
}

/* ---- barriers ---- */
static inline void merge_clock(Clock into, Clock from) {
    for (i32 s = 0; s < MAX_WAVES; s++) for (i32 k = 0; k < NUM_KINDS; k++) if ((i32)(from[s][k] - into[s][k]) > 0) into[s][k] = from[s][k];
}

enum { B_WORKGROUP, B_NAMED, B_CLUSTER };

static void complete_barrier(Group *g, i32 index) {
    Barrier *b = &g->barriers[index];
    b->signals = 0;
    memcpy(b->released, b->gathering, sizeof b->released);
    for (i32 i = 0; i < g->num_waves; i++)
        if (!index || g->waves[i].async.joined == index) g->waves[i].async.complete |= 1u << (index ? B_NAMED : B_WORKGROUP);
}

static void complete_cluster_barrier(Cluster *c) {
    c->signals = 0;
    for (u32 i = 0; i < c->size; i++)
        for (i32 k = 0; c->groups[i] && k < c->groups[i]->num_waves; k++) c->groups[i]->waves[k].async.complete |= 1u << B_CLUSTER;
}

/* id: -1 the workgroup's, -3 the cluster's, above 0 a named one. Returns whether this is the phase's first signal; -1 for an id unknown here. */
static i32 signal_barrier(Group *g, Wave *w, i32 id, i32 line, u32 members) {
    if (id == -3) { /* one wave of each workgroup signals (LLVM AMDGPUUsage, cluster barriers) */
        i32 first = g->cluster->signals++ == 0;
        if (g->cluster->signals >= g->cluster->size) complete_cluster_barrier(g->cluster);
        return first;
    }
    if (id != -1 && (id < 1 || id > NAMED_BARRIERS)) { report(g, F_LIMIT, line, w, 0, (u64)id, -1, -1, 5); return -1; }
    i32 index = id == -1 ? 0 : id;
    Barrier *b = &g->barriers[index];
    if (members) b->members = members;
    AsyncState *a = &w->async;
    u32 self = (u32)(w - g->waves);
    a->seen[self][K_LDS] = w->lds_done;
    a->seen[self][K_ASYNC] = a->queues[Q_ASYNC].done;
    a->seen[self][K_TENSOR] = a->queues[Q_TENSOR].done;
    merge_clock(b->gathering, a->seen);
    if (!index) { a->tag++; carry_reads(g, w); }
    i32 first = b->signals++ == 0;
    if (b->signals >= b->members) complete_barrier(g, index);
    return first;
}

/* 1: passed. */
static int pass_barrier(Group *g, Wave *w, i32 id) {
    i32 kind = id == -3 ? B_CLUSTER : id == -1 ? B_WORKGROUP : B_NAMED;
    AsyncState *a = &w->async;
    if (!(a->complete >> kind & 1)) { a->waits_for = kind; return 0; }
    a->complete &= ~(1u << kind);
    if (kind == B_WORKGROUP) { w->epoch++; merge_clock(a->seen, g->barriers[0].released); }
    if (kind == B_NAMED && a->joined) merge_clock(a->seen, g->barriers[a->joined].released);
    return 1;
}

static void start_async(Group *g) {
    memset(g->barriers, 0, sizeof g->barriers);
    g->barriers[0].members = g->num_waves;
    for (i32 i = 0; i < g->num_waves; i++) {
        AsyncState *a = &g->waves[i].async;
        for (i32 q = 0; q < NUM_QUEUES; q++) { Transfer *ring = a->queues[q].ring; a->queues[q] = (Queue){.ring = ring}; }
        memset(a->seen, 0, sizeof a->seen);
        a->tag = a->complete = 0;
        a->joined = 0; a->waits_for = -1;
    }
}

/* What is left when the workgroup has ended: loads that nothing waited for. Stores complete by themselves. */
static void end_async(Group *g) {
    for (i32 i = 0; i < g->num_waves; i++)
        for (i32 q = 0; q < NUM_QUEUES; q++) {
            Queue *queue = &g->waves[i].async.queues[q];
            for (; queue->count; complete_oldest(g, &g->waves[i], queue)) {
                Transfer *x = &queue->ring[queue->head];
                if (!x->store && x->lanes) report(g, F_WAIT, x->line, &g->waves[i], 0, x->bytes ? x->lds[__builtin_ctzll(x->lanes)] : x->words[1], -1, -1, 2);
            }
        }
}

/* Let waves whose barrier is complete go on. 1 if all that are left wait for barriers that nothing in this workgroup will complete. */
static int release_waves(Group *g) {
    i32 blocked = 0, ended = 0, cluster = 0;
    for (i32 i = 0; i < g->num_waves; i++) {
        Wave *w = &g->waves[i];
        if (w->state == 3 && w->async.complete >> w->async.waits_for & 1) w->state = 0;
        blocked += w->state == 3; ended += w->state == 2;
        cluster += w->state == 3 && w->async.waits_for == B_CLUSTER;
    }
    if (!blocked || blocked + ended < g->num_waves || (cluster && g->cluster->left > 1)) return 0;
    for (i32 i = 0; i < g->num_waves; i++) {
        Wave *w = &g->waves[i];
        if (w->state != 3) continue;
        report(g, F_BARRIER, w->barrier_line, w, 0, 0, -1, -1, ended ? 1 : 4);
        w->async.complete |= 1u << w->async.waits_for; /* go on, to find more */
        w->state = 0;
    }
    return 1;
}

static void join_cluster(Group *g, Cluster *c, i32 size) {
    if (!c) { c = calloc(1, sizeof *c); c->size = (u32)size; }
    g->cluster = c;
    g->cluster_rank = c->left;
    c->groups[c->left++] = g;
}

static void leave_cluster(Group *g) {
    g->cluster->groups[g->cluster_rank] = NULL;
    if (!--g->cluster->left) free(g->cluster);
    g->cluster = NULL;
}
