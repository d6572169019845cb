"""Sums of a tile that the CTAs of a cluster hold in parts, added in the order of their ranks, and the way out.

Each CTA writes its part, transposed, into its shared memory: partial[token, row], padded so that neither side has bank
conflicts. CTA r then reads tokens r, r + split, ... of all CTAs, 4 rows per thread, and stores them.

Or each sends the others what is theirs (send_parts), into their inboxes, whose mbarrier counts the bytes: an arrival at the
cluster's barrier that publishes what was written before waits for all memory, and the last one for out, too.
"""

import cutlass
from cutlass import Float32, Int32, cute
from cutlass._mlir.dialects import llvm
from cutlass._mlir.dialects.nvvm import MemScopeKind
from cutlass.cutlass_dsl import dsl_user_op

from fourwave.blocks.cutedsl.epilogue import activate

PAD = 4  # floats: two tokens apart is 8 banks, so the 4 token pairs and 8 rows that a warp writes are 32 banks
QUAD = 4  # rows of a thread: 16 bytes


def partial_elements(rows, tokens):
    return tokens * (rows + PAD)


def inbox_elements(rows, tokens, split):
    """Of the parts of this CTA's tokens that all CTAs of a cluster hold, [rank, token // split, row]."""
    return split * partial_elements(rows, -(-tokens // split))


def own_tokens(tokens, rank, split):
    """How many of `tokens` are rank's."""
    return (tokens - rank + split - 1) // split


@dsl_user_op
def _send_quad(target: cute.Pointer, barrier: cute.Pointer, values: list, rank: Int32, *, loc=None, ip=None) -> None:
    """Four float32 to where `target` is in the shared memory of CTA `rank` of the cluster, whose `barrier` counts the 16 bytes."""
    llvm.inline_asm(
        None,
        [
            target.toint(loc=loc, ip=ip).to(Int32, loc=loc, ip=ip).ir_value(loc=loc, ip=ip),
            barrier.toint(loc=loc, ip=ip).to(Int32, loc=loc, ip=ip).ir_value(loc=loc, ip=ip),
            Int32(rank).ir_value(loc=loc, ip=ip),
            *[Float32(value).ir_value(loc=loc, ip=ip) for value in values],
        ],
        "{ .reg .b32 t, b; mapa.shared::cluster.u32 t, $0, $2; mapa.shared::cluster.u32 b, $1, $2; "
        "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [t], {$3, $4, $5, $6}, [b]; }",
        "r,r,r,f,f,f,f,~{memory}",
        has_side_effects=True,
        asm_dialect=llvm.AsmDialect.AD_ATT,
        loc=loc,
        ip=ip,
    )


@cute.jit
def _sum_of_slots(
    total: cute.Tensor, partial: cute.Pointer, place: Int32, elements: cutlass.Constexpr, slots: cutlass.Constexpr
):
    """total = quad `place` of `slots` parts of `elements` each, one after the other, added in turn."""
    for slot in cutlass.range_constexpr(slots):
        source = cute.make_tensor(partial + slot * elements, cute.make_layout(elements))
        values = cute.make_rmem_tensor(QUAD, Float32)
        cute.autovec_copy(cute.local_tile(source, (QUAD,), (place,)), values)
        if cutlass.const_expr(slot == 0):
            total.store(values.load())
        else:
            total.store(total.load() + values.load())


@cute.jit
def send_parts(
    partial: cute.Pointer, inbox: cute.Pointer, barrier: cute.Pointer, end: Int32, part: Int32, thread: Int32,
    width: cutlass.Constexpr, tokens: cutlass.Constexpr, split: cutlass.Constexpr, threads: cutlass.Constexpr,
    slots: cutlass.Constexpr,
):  # fmt: skip
    """Send CTA part + 1, part + 2, ... of the cluster the sums of their tokens, of the first `end`.

    inbox, barrier  as others have them; see add_and_store for the rest
    """
    pitch = width + PAD
    quads = width // QUAD
    of_rank = partial_elements(width, -(-tokens // split))
    for distance in cutlass.range_constexpr(1, split):
        owner = (part + distance) % split
        for i in cutlass.range(thread, own_tokens(end, owner, split) * quads, threads, unroll=1):
            token = i // quads
            total = cute.make_rmem_tensor(QUAD, Float32)
            place = (token * split + owner) * (pitch // QUAD) + i % quads
            _sum_of_slots(total, partial, place, partial_elements(width, tokens), slots)
            target = inbox + (part * of_rank + token * pitch + i % quads * QUAD)
            _send_quad(target, barrier, [total[v] for v in range(QUAD)], owner)


@cute.jit
def write_partial(acc: cute.Tensor, partial: cute.Pointer, rows: cutlass.Constexpr, row0: Int32, thread: Int32):
    """acc: accumulators of a warpgroup whose first row is row0, as in Epilogue.store; thread in the warpgroup."""
    pitch = rows + PAD
    blocks = cute.size(acc, mode=[1])
    per_block = cute.size(acc) // blocks
    lane = thread % 32
    target = partial + (row0 + thread // 32 * 16 + lane // 4 + (2 * (lane % 4)) * pitch)
    values = cute.make_tensor(target, cute.make_layout(partial_elements(rows, 2 * per_block)))
    for block in cutlass.range_constexpr(blocks):
        for v in cutlass.range_constexpr(per_block):
            token = 8 * (v // 4) + v % 2
            values[token * pitch + block * 64 + 8 * (v // 2 % 2)] = acc[block * per_block + v]


@dsl_user_op
def _try_wait_cluster(barrier: cute.Pointer, phase: Int32, *, loc=None, ip=None) -> Int32:
    """1 when the barrier's phase is over; then all that other CTAs of the cluster did before they arrived is visible."""
    return Int32(
        llvm.inline_asm(
            Int32.mlir_type,
            [barrier.to_llvm_ptr(loc=loc, ip=ip), Int32(phase).ir_value(loc=loc, ip=ip)],
            "{ .reg .pred p; mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, [$1], $2; selp.s32 $0, 1, 0, p; }",
            "=r,r,r,~{memory}",
            has_side_effects=True,
            asm_dialect=llvm.AsmDialect.AD_ATT,
            loc=loc,
            ip=ip,
        )
    )


@cute.jit
def wait_cluster(barrier: cute.Pointer, phase: Int32):
    """Wait until every CTA of the cluster has arrived, and see what it wrote."""
    done = _try_wait_cluster(barrier, phase)
    while done == 0:
        done = _try_wait_cluster(barrier, phase)


@cute.jit
def arrive_cluster(
    barrier: cute.Pointer,
    split: cutlass.Constexpr,
    share: cutlass.Constexpr,
    column: Int32,
    thread: Int32,
    threads: cutlass.Constexpr,
    publish: cutlass.Constexpr,
):
    """Tell the CTAs column, column + share, ... of the cluster, `split` of them, that all `threads` of this one are here; with `publish`, what they wrote too."""
    cute.arch.barrier(barrier_id=1, number_of_threads=threads)
    if cutlass.const_expr(split > 1):
        if thread < split:
            cute.arch.mbarrier_arrive(barrier, thread * share + column, scope=MemScopeKind.CLUSTER if publish else None)


@cute.jit
def add_and_store(
    partial: cute.Pointer, out: cute.Pointer, out_stride: cutlass.Int64, bias: cute.Pointer, token_scales: cute.Pointer,
    row_scales: cute.Pointer, alpha: Float32, M: Int32, N: Int32, m0: Int32, n0: Int32, part: Int32, thread: Int32,
    share: cutlass.Constexpr, column: Int32,
    rows: cutlass.Constexpr, width: cutlass.Constexpr, tokens: cutlass.Constexpr, split: cutlass.Constexpr, threads: cutlass.Constexpr,
    bias_dtype: cutlass.Constexpr, token_scaled: cutlass.Constexpr, row_scaled: cutlass.Constexpr,
    activation: cutlass.Constexpr, accumulate: cutlass.Constexpr, vector: cutlass.Constexpr, slots: cutlass.Constexpr = 1,
    inbox=None, barrier=None,
):  # fmt: skip
    """This CTA's tokens of the tile whose first element is out[m0, n0]; N is a multiple of 4 with `vector`.

    rows    of the tile, a multiple of 4; width: those that `partial` has room for
    slots   parts in each CTA's `partial`, one after the other, which are added in turn; more than one where it is not split, or
            with an inbox
    inbox   where other CTAs send their parts (send_parts), complete when `barrier` is in its second phase; or None, where they
            are read from their `partial`
    """
    pitch = width + PAD
    quads = width // QUAD
    n = n0 + thread % quads * QUAD
    sources = []
    for r in cutlass.range_constexpr(split if inbox is None else 0):
        base = cute.arch.map_dsmem_ptr(partial, r * share + column) if split > 1 else partial
        for slot in cutlass.range_constexpr(slots):
            part_of_sum = base + slot * partial_elements(width, tokens)
            sources.append(cute.make_tensor(part_of_sum, cute.make_layout(partial_elements(width, tokens))))
    offsets = cute.make_rmem_tensor(QUAD, Float32)
    factors = cute.make_rmem_tensor(QUAD, Float32)
    factors.fill(alpha)
    for c in cutlass.range_constexpr(QUAD):
        if cutlass.const_expr(bias_dtype is not None):
            offsets[c] = Float32(bias[cutlass.min(n + c, N - 1)])
        if cutlass.const_expr(row_scaled):
            factors[c] = alpha * row_scales[cutlass.min(n + c, N - 1)]
    end = cutlass.min(Int32(tokens), M - m0)
    token = thread // quads * split + part
    if cutlass.const_expr(threads % quads > 0):
        if thread >= threads // quads * quads:
            end = Int32(0)  # what these would take, the first threads take in their next turn
    arrived = Int32(0)
    if n < cutlass.min(N, n0 + rows):
        while token < end:
            total = cute.make_rmem_tensor(QUAD, Float32)
            if cutlass.const_expr(inbox is not None):
                place = token * (pitch // QUAD) + thread % quads
                own = cute.make_rmem_tensor(QUAD, Float32)
                _sum_of_slots(own, partial, place, partial_elements(width, tokens), slots)
                if arrived == 0:
                    cute.arch.mbarrier_wait(barrier, 0)
                    arrived = Int32(1)
                of_rank = partial_elements(width, -(-tokens // split))
                for r in cutlass.range_constexpr(split):
                    values = cute.make_rmem_tensor(QUAD, Float32)
                    source = cute.make_tensor(inbox + r * of_rank, cute.make_layout(of_rank))
                    place = token // split * (pitch // QUAD) + thread % quads
                    cute.autovec_copy(cute.local_tile(source, (QUAD,), (place,)), values)
                    for v in cutlass.range_constexpr(QUAD):
                        if part == r:
                            values[v] = own[v]
                    if cutlass.const_expr(r == 0):
                        total.store(values.load())
                    else:
                        total.store(total.load() + values.load())
            for r in cutlass.range_constexpr(len(sources)):
                source = cute.local_tile(sources[r], (QUAD,), (token * (pitch // QUAD) + thread % quads,))
                values = cute.make_rmem_tensor(QUAD, Float32)
                cute.autovec_copy(source, values)
                if cutlass.const_expr(r == 0):
                    total.store(values.load())
                else:
                    total.store(total.load() + values.load())
            result = total.load() * factors.load()
            if cutlass.const_expr(token_scaled):
                result = result * token_scales[m0 + token]
            if cutlass.const_expr(bias_dtype is not None):
                result = result + offsets.load()
            result = activate(result, activation)
            row = out + ((m0 + token) * out_stride + n)
            if cutlass.const_expr(vector):
                row = row.align(QUAD * out.dtype.width // 8)
            target = cute.make_tensor(row, cute.make_layout(QUAD))
            if cutlass.const_expr(accumulate):
                addend = cute.make_rmem_tensor(QUAD, out.dtype)
                if cutlass.const_expr(vector):
                    cute.autovec_copy(target, addend)
                else:
                    for c in cutlass.range_constexpr(QUAD):
                        addend[c] = out.dtype(0.0)
                        if n + c < N:
                            addend[c] = target[c]
                result = result + addend.load().to(Float32)
            converted = cute.make_rmem_tensor(QUAD, out.dtype)
            converted.store(result.to(out.dtype))
            if cutlass.const_expr(vector):
                cute.autovec_copy(converted, target)
            else:
                for c in cutlass.range_constexpr(QUAD):
                    if n + c < N:
                        target[c] = converted[c]
            token += threads // quads * split
