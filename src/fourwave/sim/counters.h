/* What is only counted: nothing here reaches an output or a finding, so harness.py leaves this file out of its fingerprint. */

/* Lanes that ds_read_b128 serves together, as measured by others: blocks/flydsl/tiles.py says by whom. Each row of 16 (64 banks) or 8 lanes is a
 * group; the same again 32 lanes on. */
static const int8_t B128_LANES[2][32] = {
    {0, 1, 2, 3, 20, 21, 22, 23, 4, 5, 6, 7, 16, 17, 18, 19, 8, 9, 10, 11, 28, 29, 30, 31, 12, 13, 14, 15, 24, 25, 26, 27},
    {0, 1, 2, 3, 12, 13, 14, 15, 20, 21, 22, 23, 24, 25, 26, 27, 4, 5, 6, 7, 8, 9, 10, 11, 16, 17, 18, 19, 28, 29, 30, 31},
};

/* Lanes of an LDS read are served in groups; count the cycles a group needs (banks are 4 bytes wide) and the least possible. Lanes of narrower
 * reads, and gfx1250's, are taken in order. */
static void count_banks(Group *g, const u32 *address, u64 exec, i32 bytes) {
    i32 banks = g->launch->lds_banks, per_cycle = banks * 4 / (bytes > 8 ? 16 : bytes); /* 0 banks: not counted */
    if (!banks || bytes < 4) return;
    if (per_cycle > W) per_cycle = W;
    u32 rows[64][W]; /* distinct bank rows seen, per bank */
    for (i32 first = 0; first < W; first += per_cycle) {
        uint8_t depth[64] = {0};
        i32 worst = 0;
        for (i32 place = first; place < first + per_cycle; place++) {
            i32 lane = bytes > 8 && W == 64 ? (place & 32) + B128_LANES[banks == 64][place & 31] : place;
            if (!(exec >> lane & 1)) continue;
            for (i32 b = 0; b < bytes; b += 4) {
                u32 word = (address[lane] + b) >> 2, bank = word % banks, row = word / banks;
                i32 i = 0;
                while (i < depth[bank] && rows[bank][i] != row) i++;
                if (i == depth[bank]) { rows[bank][i] = row; depth[bank]++; if (depth[bank] > worst) worst = depth[bank]; }
            }
        }
        g->counters[C_LDS_READ_CYCLES] += worst;
        g->counters[C_LDS_READ_IDEAL] += worst ? 1 : 0;
    }
}

/* Lines of 128 bytes that one access to global memory touches, and the fewest its bytes could lie in: the L2 cache lines of
 * CDNA3 (AMD CDNA 3 white paper), taken for the other archs, too. */
#define LINE_BYTES 128
static void count_lines(Group *g, const u64 *address, u64 lanes, i32 bytes) {
    if (!g->launch->lds_banks) return; /* counted with the banks */
    u64 seen[2 * W];
    i32 count = 0, served = 0;
    for (i32 lane = 0; lane < W; lane++) {
        if (!(lanes >> lane & 1)) continue;
        served++;
        for (u64 line = address[lane] / LINE_BYTES; line <= (address[lane] + bytes - 1) / LINE_BYTES; line++) {
            i32 i = count - 1;
            while (i >= 0 && seen[i] != line) i--;
            if (i < 0) seen[count++] = line;
        }
    }
    g->counters[C_GLOBAL_LINES] += count;
    g->counters[C_GLOBAL_LINES_IDEAL] += ((u64)served * bytes + LINE_BYTES - 1) / LINE_BYTES;
}
