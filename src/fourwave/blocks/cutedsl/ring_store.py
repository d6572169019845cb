"""The way out of float32 tiles beside the next tile's products: through a ring of pieces in shared memory, which a warp of its own serves.

A piece is 64 rows x 32 columns, 128 bytes each, swizzled as TMA does; each of the two consumer warpgroups has `slots` of them. A consumer
waits until a slot is ready, writes its sums there (in "load": adds them to what is there), and says that it has; the server hands the
piece to TMA, which clips what lies outside the matrix, and makes the slot ready again when it has been read out. So the consumers never
wait for memory, and what a tile is added to is there before its sums are.

Barriers, one pair for each slot
  ready   1 arrival, the server's; with "load" it announces TMA's bytes
  done    of the consumer's four warps, after each thread's proxy fence
"""

from dataclasses import dataclass

import cutlass
from cutlass import Float32, Int32, cute
from cutlass._mlir.dialects import llvm
from cutlass.cute.nvgpu import cpasync
from cutlass.cutlass_dsl import dsl_user_op

from fourwave.blocks.cutedsl.epilogue import BUFFER_BYTES, ROWS, Output
from fourwave.blocks.cutedsl.ring_order import RingOrder

COLUMNS = 32
CONSUMERS = 2
WARPS = 4


@dsl_user_op
def load_pair(address: Int32, offset: int, *, loc=None, ip=None) -> tuple:
    """Two float32 of shared memory."""
    kind = llvm.StructType.get_literal([Float32.mlir_type] * 2)
    made = llvm.inline_asm(
        kind, [Int32(address).ir_value(loc=loc, ip=ip)], f"ld.shared.v2.f32 {{$0, $1}}, [$2+{offset}];", "=f,=f,r,~{memory}",
        has_side_effects=True, asm_dialect=llvm.AsmDialect.AD_ATT, loc=loc, ip=ip,
    )  # fmt: skip
    return tuple(Float32(llvm.extractvalue(Float32.mlir_type, made, [i], loc=loc, ip=ip)) for i in range(2))


@dsl_user_op
def load(address: Int32, offset: int, *, loc=None, ip=None) -> Float32:
    """A float32 of shared memory."""
    operand = Int32(address).ir_value(loc=loc, ip=ip)
    return Float32(
        llvm.inline_asm(
            Float32.mlir_type, [operand], f"ld.shared.f32 $0, [$1+{offset}];", "=f,r,~{memory}", has_side_effects=True,
            asm_dialect=llvm.AsmDialect.AD_ATT, loc=loc, ip=ip,
        )
    )  # fmt: skip


@dsl_user_op
def load_quad(address: Int32, offset: int, *, loc=None, ip=None) -> tuple:
    """Four float32 of shared memory."""
    kind = llvm.StructType.get_literal([Float32.mlir_type] * 4)
    made = llvm.inline_asm(
        kind, [Int32(address).ir_value(loc=loc, ip=ip)], f"ld.shared.v4.f32 {{$0, $1, $2, $3}}, [$4+{offset}];",
        "=f,=f,=f,=f,r,~{memory}", has_side_effects=True, asm_dialect=llvm.AsmDialect.AD_ATT, loc=loc, ip=ip,
    )  # fmt: skip
    return tuple(Float32(llvm.extractvalue(Float32.mlir_type, made, [i], loc=loc, ip=ip)) for i in range(4))


@dsl_user_op
def store(address: Int32, offset: int, value: Float32, *, loc=None, ip=None) -> None:
    operands = [Int32(address).ir_value(loc=loc, ip=ip), Float32(value).ir_value(loc=loc, ip=ip)]
    llvm.inline_asm(
        None, operands, f"st.shared.f32 [$0+{offset}], $1;", "r,f,~{memory}", has_side_effects=True,
        asm_dialect=llvm.AsmDialect.AD_ATT, loc=loc, ip=ip,
    )  # fmt: skip


@dsl_user_op
def _store_pair(address: Int32, offset: int, first: Float32, second: Float32, *, loc=None, ip=None) -> None:
    operands = [Int32(address), Float32(first), Float32(second)]
    llvm.inline_asm(
        None, [operand.ir_value(loc=loc, ip=ip) for operand in operands], f"st.shared.v2.f32 [$0+{offset}], {{$1, $2}};",
        "r,f,f,~{memory}", has_side_effects=True, asm_dialect=llvm.AsmDialect.AD_ATT, loc=loc, ip=ip,
    )  # fmt: skip


@dsl_user_op
def _either(first: Float32, second: Float32, which: Int32, *, loc=None, ip=None) -> Float32:
    """`second` where `which`."""
    operands = [Float32(first), Float32(second), Int32(which)]
    code = "{ .reg .pred p; setp.ne.s32 p, $3, 0; selp.f32 $0, $2, $1, p; }"
    return Float32(
        llvm.inline_asm(
            Float32.mlir_type, [operand.ir_value(loc=loc, ip=ip) for operand in operands], code, "=f,f,f,r",
            has_side_effects=False, asm_dialect=llvm.AsmDialect.AD_ATT, loc=loc, ip=ip,
        )
    )  # fmt: skip


@dataclass(frozen=True)
class RingStore:
    """addend  None: out = sums; "load": TMA brings what a piece is added to; "reduce": memory adds the piece to what it holds, where
    subnormals count as zeros
    """

    tile_n: int
    slots: int
    addend: str | None
    column_scaled: bool

    @property
    def output(self) -> Output:
        return Output(Float32, self.addend == "reduce")

    @property
    def pieces(self) -> int:
        """Of a consumer's share of a tile."""
        return self.tile_n // COLUMNS

    @property
    def order(self) -> RingOrder:
        return RingOrder(self.pieces, self.slots, self.addend == "load")

    @property
    def elements(self) -> int:
        return CONSUMERS * self.slots * ROWS * COLUMNS

    def smem(self, storage):
        """[64, 32, slot of consumer 0, then of consumer 1]."""
        layout = self.output.smem_layout(CONSUMERS * self.slots)
        return storage.get_tensor(layout.outer, swizzle=layout.inner)

    def tma(self, out, M, N, G, row_stride, matrix_stride):
        """((atom, coordinates) to out, (atom, coordinates) from it)."""
        matrices = self.output.halves(out, M, N, G, row_stride, matrix_stride)
        to = self.output.tma(matrices)
        if self.addend != "load":
            return to, to
        piece = cute.slice_(self.output.smem_layout(1), (None, None, 0))
        return to, cpasync.make_tiled_tma_atom(cpasync.CopyBulkTensorTileG2SOp(), matrices, piece, (ROWS, COLUMNS))

    @cute.jit
    def fill(self, atom: cute.CopyAtom, target: cute.Tensor, source: cute.Tensor, ready: cute.Pointer):
        """A slot that has been read out is ready, or will be when what its piece is added to has arrived."""
        if cutlass.const_expr(self.addend == "load"):
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive_and_expect_tx(ready, BUFFER_BYTES)
            cute.copy(atom, source, target, tma_bar_ptr=ready)
        else:
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive(ready)

    @cute.jit
    def serve(
        self, atoms: tuple, parts: tuple, ready: cute.Pointer, done: cute.Pointer, turn: Int32, here: tuple, after: tuple,
        more: cutlass.Boolean, first: cutlass.Boolean,
    ):  # fmt: skip
        """The server's share of one tile; returns the next one's turn.

        parts   (shared, global) of the store and of the load: Output.partition
        here    (64-row tile of consumer 0, first piece among the columns', matrix); after: of the next tile, if there are `more`
        first   the tile is the server's first one
        """
        (shared, to), (loaded, source) = parts
        if first:
            for slot in cutlass.range_constexpr(self.slots):
                for consumer in cutlass.range_constexpr(CONSUMERS):
                    own = consumer * self.slots + slot
                    place = (None, here[0] + consumer, here[1] + slot, here[2])
                    self.fill(atoms[1], loaded[(None, own)], source[place], ready + own)
        for j in cutlass.range_constexpr(self.pieces):
            slot = j % self.slots
            for consumer in cutlass.range_constexpr(CONSUMERS):
                own = consumer * self.slots + slot
                cute.arch.mbarrier_wait(done + own, turn ^ (j // self.slots % 2))
                cute.copy(atoms[0], shared[(None, own)], to[(None, here[0] + consumer, here[1] + j, here[2])])
            cute.arch.cp_async_bulk_commit_group()
            freed = self.order.freed(j)
            if cutlass.const_expr(len(freed) > 0):
                cute.arch.cp_async_bulk_wait_group(0 if j in freed else 1, read=True)
                for free in cutlass.range_constexpr(freed[0], freed[-1] + 1):
                    for consumer in cutlass.range_constexpr(CONSUMERS):
                        own = consumer * self.slots + free % self.slots
                        piece = free + self.slots
                        if cutlass.const_expr(piece < self.pieces):
                            place = (None, here[0] + consumer, here[1] + piece, here[2])
                            self.fill(atoms[1], loaded[(None, own)], source[place], ready + own)
                        elif more:
                            place = (None, after[0] + consumer, after[1] + piece - self.pieces, after[2])
                            self.fill(atoms[1], loaded[(None, own)], source[place], ready + own)
        return turn ^ (self.order.turns % 2)

    @cute.jit
    def put(
        self, total: cute.Tensor, slots: Int32, ready: cute.Pointer, done: cute.Pointer, turn: Int32, factors: cute.Tensor,
        scales: cute.Pointer, n0: Int32, N: Int32, thread: Int32,
    ):  # fmt: skip
        """A consumer's tile: total * row factor * column scale (+ what is there). Returns the next one's turn.

        slots   address of the consumer's ones; ready, done: of them; thread: in the warpgroup
        total   a thread's values in wgmma's order: for each 8 columns, two of row lane / 4 and two of row lane / 4 + 8
        """
        lane = thread % 32
        line, pair = lane // 4, lane % 4
        # 16 bytes are the unit of the swizzle: unit u of line l is at u ^ l. 16 lanes have 8 columns of four lines: those of an odd one take
        # other 8 columns, 16 further, first, and so the four are in 32 banks.
        odd = line % 2
        start = slots + (thread // 32 * 16 + line) * 128 + ((pair // 2) ^ line) * 16 + pair % 2 * 8
        start = start ^ (odd * 64)
        for j in cutlass.range_constexpr(self.pieces):
            slot = j % self.slots
            held = cute.make_rmem_tensor(ROWS * COLUMNS // 128, Float32)
            cute.arch.mbarrier_wait(ready + slot, turn ^ (j // self.slots % 2))
            count = cute.size(held)
            for v in cutlass.range_constexpr(0, count, 2):
                address, offset = start ^ (v // 4 * 32), slot * BUFFER_BYTES + v // 2 % 2 * 1024
                if cutlass.const_expr(self.addend == "load"):
                    held[v], held[v + 1] = load_pair(address, offset)
            for v in cutlass.range_constexpr(0, count, 2):
                address, offset = start ^ (v // 4 * 32), slot * BUFFER_BYTES + v // 2 % 2 * 1024
                for c in cutlass.range_constexpr(2):
                    both = [Float32(0.0), Float32(0.0)]
                    for other in cutlass.range_constexpr(2):
                        at = (v + other * count // 2) % count
                        value = total[count * j + at + c] * factors[v // 2 % 2]
                        if cutlass.const_expr(self.column_scaled):
                            value = value * scales[cutlass.min(n0 + COLUMNS * j + at // 4 * 8 + pair * 2 + c, N - 1)]
                        both[other] = value
                    value = _either(both[0], both[1], odd)
                    if cutlass.const_expr(self.addend == "load"):
                        value = value + held[v + c]
                    held[v + c] = value
                _store_pair(address, offset, held[v], held[v + 1])
            told = self.order.told(j)
            if cutlass.const_expr(len(told) > 0):
                cute.arch.fence_proxy("async.shared", space="cta")
                cute.arch.sync_warp()
                with cute.arch.elect_one():
                    for piece in cutlass.range_constexpr(told[0], told[-1] + 1):
                        cute.arch.mbarrier_arrive(done + piece % self.slots)
        return turn ^ (self.order.turns % 2)
