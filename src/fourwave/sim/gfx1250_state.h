#pragma once
/* gfx1250: what a wave and a workgroup keep for asynchronous transfers between global memory and LDS, and for barriers in two halves. */

enum { Q_ASYNC, Q_TENSOR, NUM_QUEUES };       /* asynccnt, tensorcnt */
enum { K_LDS, K_ASYNC, K_TENSOR, NUM_KINDS }; /* who completes LDS writes: the wave's LDS operations, and the two queues */
enum { FROM_LDS, FROM_COPY, FROM_ASYNC, FROM_TENSOR }; /* Shadow.from_copy */

#define MAX_TRANSFERS 64
#define NAMED_BARRIERS 16 /* LLVM AMDGPUUsage, "named barriers" */
#define DESCRIPTOR_WORDS 20

typedef struct {
    i32 line, bytes;             /* bytes a lane; 0 for a tensor transfer */
    i32 store;
    u64 lanes;
    uint8_t *global[W];          /* NULL: nothing there (out of bounds, reported) */
    u32 lds[W];
    u32 words[DESCRIPTOR_WORDS];
} Transfer;

typedef struct {
    Transfer *ring;
    u32 head, count;
    u32 issued, done;            /* transfers issued and completed, in order */
} Queue;

/* Per writing wave and kind: how many of its LDS writes are known to be complete. */
typedef u32 Clock[32][NUM_KINDS];

typedef struct {
    Clock gathering, released;
    u32 members, signals;
} Barrier;

typedef struct {
    Queue queues[NUM_QUEUES];
    Clock seen;                  /* what the barriers this wave has waited for vouch for */
    u32 tag;                     /* workgroup barriers signalled; Wave.epoch counts those waited for */
    u32 complete;                /* bit per barrier kind: completed since this wave's last wait */
    i32 joined;                  /* named barrier this wave takes part in, 0: none */
    i32 waits_for;               /* barrier kind the wave waits for */
} AsyncState;

/* Workgroups that run together; on one host thread, so nothing here is atomic. */
typedef struct {
    struct Group *groups[16];
    u32 size, left;              /* workgroups in all, and not ended */
    u32 signals;
} Cluster;
