"""Memory and synchronisation primitives of the CDNA kernels, as FlyDSL trace-time helpers.

One place holds the low-level operations, so that kernels read as data movement:
  Buffer       bounds-checked view of global memory (raw buffer resource): loads, stores, direct loads to LDS
  lds_*        reads and writes at a byte offset inside LDS
  wait_*       s_waitcnt with the count spelled by its meaning

Every offset is in bytes. A buffer access at an offset that is not below num_bytes reads zeros and drops stores
(AMD CDNA3 and CDNA4 ISA guides, buffer range checking, raw buffers: stride 0, no swizzle). Kernels use that for all
masking: a lane that must not touch memory gets the offset OUT_OF_RANGE, so there are no branches. soffset stays 0,
because whether it takes part in the range check differs between the guides.
"""

from flydsl import expr as fx
from flydsl._mlir import ir
from flydsl._mlir.dialects import arith as _arith
from flydsl._mlir.dialects import llvm as _llvm
from flydsl._mlir.dialects import rocdl as _rocdl
from flydsl.expr import rocdl
from flydsl.expr.meta import dsl_loc_tracing
from flydsl.expr.typing import as_ir_value

OUT_OF_RANGE = -(2**31)  # 0x8000_0000 as an unsigned offset; num_bytes never exceeds it
MAX_BUFFER_BYTES = 2**31  # bytes one buffer resource may span, so that OUT_OF_RANGE is out of range

# 32-bit raw data format, no swizzle, add-tid off: word 3 of the resource on gfx942 and gfx950.
_RSRC_WORD3 = (7 << 12) | (4 << 15)


def vector_type(count, dtype):
    return ir.VectorType.get([count], dtype.ir_type)


def _i32(value):
    return as_ir_value(fx.Int32(value))


def _global_ptr():
    return ir.Type.parse("!llvm.ptr<1>")


@dsl_loc_tracing
def uniform(value):
    """The same value, known to the compiler to be equal in all lanes of the wave (readfirstlane)."""
    return fx.Int32(_rocdl.readfirstlane(fx.Int32.ir_type, as_ir_value(value)))


@dsl_loc_tracing
def select(condition, if_true, if_false):
    return fx.Boolean(condition).select(fx.Int32(if_true), fx.Int32(if_false))


def minimum(a, b):
    """min of two signed integers of the same type."""
    return (a < b).select(a, b)


class Buffer:
    """num_bytes of global memory from a 64-bit address; loads past the end give zeros, stores past it vanish."""

    @dsl_loc_tracing
    def __init__(self, tensor, byte_offset, num_bytes):
        """tensor: kernel argument; byte_offset: Int64, uniform; num_bytes: Int64, uniform, 0 .. MAX_BUFFER_BYTES."""
        self._base = fx.get_iter(tensor).llvm_ptr
        base = _llvm.getelementptr(
            _global_ptr(), self._base, [as_ir_value(fx.Int64(byte_offset))], [-(2**31)], fx.Int8.ir_type, None
        )
        self.rsrc = _rocdl.make_buffer_rsrc(
            ir.Type.parse("!llvm.ptr<8>"),
            base,
            as_ir_value(fx.Int16(0)),
            as_ir_value(fx.Int64(num_bytes)),
            _i32(_RSRC_WORD3),
        )

    @dsl_loc_tracing
    def otherwise(self, condition, other):
        """This buffer where condition (uniform) holds, else other."""
        chosen = object.__new__(Buffer)
        chosen.rsrc = _arith.select(as_ir_value(fx.Boolean(condition)), self.rsrc, other.rsrc)
        return chosen

    @dsl_loc_tracing
    def load(self, offset, count, dtype):
        """count elements of dtype per lane, in registers; more than 16 bytes take two loads."""
        size = count * dtype.width // 8
        if size > 16:
            half = count // 2
            low, high = self.load(offset, half, dtype), self.load(offset + size // 2, half, dtype)
            return low.shuffle(high, list(range(count)))
        result = vector_type(count, dtype) if count > 1 else dtype.ir_type
        value = _rocdl.raw_ptr_buffer_load(result, self.rsrc, _i32(offset), _i32(0))
        return fx.Vector(value) if count > 1 else fx.Vector.filled(1, dtype(value), dtype)

    @dsl_loc_tracing
    def store(self, value, offset):
        """Store a Vector per lane; a one-element Vector is stored as its scalar."""
        raw = as_ir_value(value[0]) if value.numel == 1 else as_ir_value(value)
        _rocdl.raw_ptr_buffer_store(raw, self.rsrc, _i32(offset), _i32(0))

    @dsl_loc_tracing
    def atomic_max(self, value, offset):
        """max(memory, value) of signed 32-bit integers, per lane, at any lane that is in range."""
        _rocdl.raw_ptr_buffer_atomic_smax(fx.Int32.ir_type, as_ir_value(value), self.rsrc, _i32(offset), _i32(0))

    @dsl_loc_tracing
    def load_to_lds(self, lds, lds_offset, offset):
        """16 bytes per lane straight into LDS: lane l's land at lds_offset + 16 * l.

        lds_offset must be uniform over the wave. The load counts in vmcnt; the compiler does not wait for it
        (wait_loads does). Lanes that are out of range write zeros, for which the hardware's own rule is used
        (triton-lang/triton, pull request 11435, tells it apart from global_load_lds, which leaves LDS as it was).
        """
        _rocdl.raw_ptr_buffer_load_async_lds(
            self.rsrc, _lds_address(lds, lds_offset), _i32(16), _i32(offset), _i32(0), _i32(0)
        )


def lds_struct(sizes):
    """The type of a workgroup's LDS: arrays of bytes, 16-byte aligned, by name."""
    fields = {name: fx.Array[fx.Uint8, size, 16] for name, size in sizes.items()}
    return fx.struct(type("Storage", (), {"__annotations__": fields}))


@dsl_loc_tracing
def _lds_address(lds, byte_offset):
    return _llvm.getelementptr(
        ir.Type.parse("!llvm.ptr<3>"), lds.llvm_ptr, [_i32(byte_offset)], [-(2**31)], fx.Int8.ir_type, None
    )


@dsl_loc_tracing
def lds_read(lds, byte_offset, count, dtype):
    """count elements per lane, 1 to 16 bytes in all, from an address that is a multiple of that size."""
    result = vector_type(count, dtype) if count > 1 else dtype.ir_type
    value = _llvm.LoadOp(result, _lds_address(lds, byte_offset), alignment=count * dtype.width // 8).result
    return fx.Vector(value) if count > 1 else fx.Vector.filled(1, dtype(value), dtype)


@dsl_loc_tracing
def lds_read_transposed(lds, byte_offset, dtype, bits=None):
    """gfx950, 8 bytes per lane: the transpose of a block of n rows and 16 columns for each 16 lanes.

    16-bit dtype: ds_read_b64_tr_b16, n = 4: lane 4 * q + p points at row q, columns 4 * p + 0..3; lane r receives
    column r, rows 0..3. Int32 (8-bit elements): ds_read_b64_tr_b8, n = 8: lane 2 * q + p points at row q, columns
    8 * p + 0..7; lane r receives column r, rows 0..7. bits 4: ds_read_b64_tr_b4, n = 16: lane q points at row q; lane r
    receives column r, rows 0..15. AMD CDNA4 ISA guide, section 11.4.
    """
    address = _lds_address(lds, byte_offset)
    if bits == 4:
        return fx.Vector(_rocdl.ds_read_tr4_b64_(vector_type(2, dtype), address))
    if dtype.width == 32:
        return fx.Vector(_rocdl.ds_read_tr8_b64_(vector_type(2, dtype), address))
    return fx.Vector(_rocdl.ds_read_tr16_b64_(vector_type(4, dtype), address))


@dsl_loc_tracing
def permute_bytes(high, low, selectors):
    """v_perm_b32 (llvm.amdgcn.perm) on Int32: byte i of the result is byte selectors >> 8 * i of low (0-3) or high (4-7)."""
    operands = [as_ir_value(high), as_ir_value(low), _i32(selectors)]
    return fx.Int32(_llvm.call_intrinsic(fx.Int32.ir_type, "llvm.amdgcn.perm", operands, [], []))


def transpose_bytes(words, columns):
    """words: Int32 of four rows, `columns` (1, 2 or 4) bytes each from the lowest on; returns `columns` Int32 of four
    rows' bytes each."""
    out = []
    for pair in range(0, columns, 2):
        # Rows 0, 1 and rows 2, 3 of two columns side by side; then the four bytes of each column.
        sides = [permute_bytes(words[i + 1], words[i], 0x05010400 + 0x02020202 * (pair // 2)) for i in (0, 2)]
        out += [
            permute_bytes(sides[1], sides[0], selectors) for selectors in (0x05040100, 0x07060302)[: columns - pair]
        ]
    return out


# DPP controls: AMD CDNA3 ISA guide, "DPP_CTRL enumeration". The lanes whose number differs in one bit.
QUAD_XOR = {0: 0xB1, 1: 0x4E}  # quad_perm 1, 0, 3, 2 and 2, 3, 0, 1
ALL_BANKS = 0xF  # of a row of sixteen lanes; a bank is four


@dsl_loc_tracing
def move_lanes(value, keep, control, banks=ALL_BANKS):
    """value (Int32) of the lane that control says; `keep` in the lanes of the other banks."""
    moved = _rocdl.update_dpp(fx.Int32.ir_type, as_ir_value(keep), as_ir_value(value), control, 0xF, banks, True)
    return fx.Int32(moved)


@dsl_loc_tracing
def swap_lanes(a, b, lanes):
    """gfx950, Int32: (a, b) after every second run of `lanes` (16 or 32) lanes of a, the second first, has changed places with
    the run before it of b (v_permlane16_swap_b32, v_permlane32_swap_b32: AMD CDNA4 ISA guide)."""
    swap = {16: _rocdl.permlane16_swap, 32: _rocdl.permlane32_swap}[lanes]
    pair = swap(ir.Type.parse("!llvm.struct<(i32, i32)>"), as_ir_value(a), as_ir_value(b), False, False)
    return tuple(fx.Int32(_llvm.extractvalue(fx.Int32.ir_type, pair, [i])) for i in (0, 1))


@dsl_loc_tracing
def lds_write(lds, byte_offset, value, num_bytes=16):
    """num_bytes per lane (ds_write_b128, b64), so aligned. Raw barriers do not wait for it: wait_lds() first."""
    _llvm.StoreOp(as_ir_value(value), _lds_address(lds, byte_offset), alignment=num_bytes)


@dsl_loc_tracing
def wait_loads(in_flight):
    """Until at most in_flight of this wave's global loads and direct loads to LDS are outstanding, oldest first."""
    assert 0 <= in_flight <= 63, "vmcnt has six bits"
    rocdl.s_waitcnt(vmcnt=in_flight)


@dsl_loc_tracing
def wait_lds():
    """Until all of this wave's LDS reads and writes are done."""
    rocdl.s_waitcnt(lgkmcnt=0)


@dsl_loc_tracing
def barrier():
    """Every wave of the workgroup arrives. Waits for no memory operation by itself (s_barrier on gfx942/gfx950)."""
    _rocdl.s_barrier()


@dsl_loc_tracing
def keep_order():
    """The compiler moves nothing across this point (llvm.amdgcn.sched.barrier 0). No instruction is issued."""
    rocdl.sched_barrier(0)


@dsl_loc_tracing
def interleave(mfmas, *, writes=0, loads=0, reads=0):
    """Spread the memory instructions issued since the last keep_order() over the matrix instructions that follow.

    A wave issues in order: memory instructions in one block would leave the matrix unit idle. LDS writes come first
    (they free the registers that the loads fill), then global loads (they have the longest way), then LDS reads.
    A hint to the scheduler; no instruction is issued.
    """
    share = mfmas // max(1, writes + loads + reads)
    for mask, count in ((rocdl.mask_dswr, writes), (rocdl.mask_vmem_rd, loads), (rocdl.mask_dsrd, reads)):
        for _ in range(count):
            rocdl.sched_group_barrier(mask, 1, 0)
            if share:
                rocdl.sched_group_barrier(rocdl.mask_mfma, share, 0)
    rest = mfmas - share * (writes + loads + reads)
    if rest:
        rocdl.sched_group_barrier(rocdl.mask_mfma, rest, 0)
