"""Operands that Hopper's matrix unit does not read, written in bfloat16 for it: MX codes with their scales, and float32.

1x32     out[r, c] = code[r, c] * scale of its block, which bfloat16 holds exactly: a code has at most 4 significant bits. Results
         past its range, scales above 2^119 and below 2^-116 or so, become Inf, and subnormals or 0
float32  x = x1 + x2 + x3, each x rounded to bfloat16 and the rest passed on, 8 + 8 + 8 bits. Copies of the three lie beside each
         other along the reduction, in the order of `slices`, so that one product of the copies of both operands sums
             a3 b1 + a1 b3 + a2 b2 + a2 b1 + a1 b2 + a1 b1
         What is left out, a2 b3 + a3 b2 + a3 b3, is below 2^-23 of |a b|. Each copy ends in zeros, at a multiple of 8 along the
         reduction. Inf has no rest; Inf times the zeros of the other operand is NaN

A CTA of 256 threads has a tile of 128 x 128; a warp 16 rows of it, a thread 8 rows of 8 columns: 16 lanes write 256 bytes of a
row, and the 8 rows share a block of scales along the columns.
"""

from dataclasses import dataclass

import cuda.bindings.driver as cuda
from cutlass import Int32, Int64, cute

from fourwave.blocks.cutedsl import access
from fourwave.blocks.cutedsl.access import assembly
from fourwave.blocks.cutedsl.convert import NAN

TILE = 128
THREADS = 256
LINE = 8  # rows and columns of a thread
BLOCK = 32  # elements of a scale


@dataclass(frozen=True)
class Decode:
    """One specialisation: __call__ is the launcher, kernel the device code.

    code     "e4m3fn", "e5m2" or "e2m1"; None: float32
    k_last   the reduction runs along the rows, and so do blocks of scales; else along the columns
    whole_chunks  the starts of rows allow loads of 8 elements, and C is a multiple of 8: else they are taken one by one
    slices   of float32: which of x1, x2, x3 (0, 1, 2) each copy holds
    """

    code: str | None
    k_last: bool
    whole_chunks: bool
    slices: tuple[int, ...] = ()

    @cute.jit
    def __call__(
        self, x: Int64, x_stride: Int64, scale: Int64, out: Int64, out_stride: Int64, copy_stride: Int64, R: Int32, C: Int32,
        rows: Int32, columns: Int32, stream: cuda.CUstream,
    ):  # fmt: skip
        """Addresses; strides in bytes, of x's and out's rows and between copies. rows, columns: of one copy in out, from R and C
        on zeros; columns is a multiple of 8."""
        self.kernel(x, x_stride, scale, out, out_stride, copy_stride, R, C, rows, columns).launch(
            grid=((rows + TILE - 1) // TILE * ((columns + TILE - 1) // TILE), 1, 1), block=(THREADS, 1, 1), stream=stream
        )  # fmt: skip

    @cute.kernel
    def kernel(
        self, x: Int64, x_stride: Int64, scale: Int64, out: Int64, out_stride: Int64, copy_stride: Int64, R: Int32, C: Int32,
        rows: Int32, columns: Int32,
    ):  # fmt: skip
        # The product may be set up meanwhile; it waits for this grid to end.
        cute.arch.griddepcontrol_launch_dependents()
        tiles_n = (columns + TILE - 1) // TILE
        tile = cute.arch.block_idx()[0]
        tile_m = tile // tiles_n
        thread = cute.arch.thread_idx()[0]
        row = tile_m * TILE + thread // 16 * LINE
        column = (tile - tile_m * tiles_n) * TILE + thread % 16 * LINE
        self.body(x, x_stride, scale, out, out_stride, copy_stride, R, C, rows, columns, row, column)

    # -- Python that runs while the kernel is traced: every `if` is decided then

    def body(self, x, x_stride, scale, out, out_stride, copy_stride, R, C, rows, columns, row, column):
        words = self.load(x, x_stride, R, C, row, column)
        target = out + Int64(row) * out_stride + Int64(column) * 2
        if self.code is None:
            for i in range(LINE):
                made = [_three(*words[i][j : j + 2]) for j in range(0, LINE, 2)]
                for copy, each in enumerate(self.slices):
                    values = [pair[each] for pair in made]
                    self._store(target + out_stride * i + copy_stride * copy, values, row + i, rows, column, columns)
            return
        scales = self.scales_of(scale, R, C, row, column)
        for i in range(LINE):
            values = _values(self.code, words[i])
            pairs = [_pair(*values[j : j + 2], *scales[i][j : j + 2]) for j in range(0, LINE, 2)]
            self._store(target + out_stride * i, pairs, row + i, rows, column, columns)

    def load(self, x, x_stride, R, C, row, column):
        """The thread's elements, [row][word]: 8 float32, or the bytes of 8 codes in 2 Int32 (e2m1: 1); zeros past the matrix."""
        bits = {"e2m1": 4, None: 32}.get(self.code, 8)
        start = x + Int64(row) * x_stride + Int64(column) * bits // 8
        words = []
        for i in range(LINE):
            address = start + x_stride * i
            if self.whole_chunks:
                limit = access.where_less(column, C, R, Int32(0))
                words.append([
                    word
                    for at in range(0, LINE * bits // 8, 16)
                    for word in access.load_words(address + at, min(4, LINE * bits // 32), row + i, limit)
                ])  # fmt: skip
                continue
            elements = []
            for j in range(0, LINE, 2 if bits == 4 else 1):
                limit = access.where_less(column + j, C, R, Int32(0))
                at = address + j * bits // 8
                if bits == 32:
                    elements += access.load_words(at, 1, row + i, limit)
                else:
                    elements.append(_load_byte(at, row + i, limit))
            if bits != 32:
                elements = [
                    elements[j] | (elements[j + 1] << 8) | (elements[j + 2] << 16) | (elements[j + 3] << 24)
                    for j in range(0, len(elements), 4)
                ]
            words.append(elements)
        return words

    def scales_of(self, scale, R, C, row, column):
        """Of the thread's elements, [row][column]: bits of float32."""
        if self.k_last:
            blocks = (C + BLOCK - 1) // BLOCK
            limit = access.where_less(column, C, R, Int32(0))
            return [
                [_scale(_load_byte(scale + Int64(row + i) * blocks + column // BLOCK, row + i, limit))] * LINE
                for i in range(LINE)
            ]  # fmt: skip
        start = scale + Int64(row // BLOCK) * C + column
        of_columns = []
        for j in range(LINE):
            limit = access.where_less(column + j, C, R, Int32(0))
            of_columns.append(_scale(_load_byte(start + j, row, limit)))
        return [of_columns] * LINE

    def _store(self, address, pairs, row, rows, column, columns):
        access.store_words(address, pairs, row, access.where_less(column, columns, rows, Int32(0)))


# -- numbers travel as Int32 that hold their bits


def _load_byte(address, row, limit):
    """8 bits; zero unless row < limit."""
    text = "{ .reg .pred p; setp.lt.s32 p, $2, $3; mov.b32 $0, 0; @p ld.global.nc.u8 $0, [$1]; }"
    return assembly(text, "=&r,l,r,r", [address, row, limit])


def _scale(code):
    """float32 of an E8M0 code: 2^(code - 127), of which that of 0 is subnormal; 255 is NaN."""
    text = (
        "{ .reg .pred p; shl.b32 $0, $1, 23; setp.eq.u32 p, $1, 0; selp.b32 $0, 0x00400000, $0, p; "
        f"setp.eq.u32 p, $1, 255; selp.b32 $0, {NAN:#x}, $0, p; }}"
    )
    return assembly(text, "=&r,r", [code])


def _values(code, words):
    """float32 of 8 codes."""
    if code == "e2m1":
        return [_e2m1(words[0], 4 * j) for j in range(LINE)]
    kind = "e4m3x2" if code == "e4m3fn" else "e5m2x2"
    values = []
    for word in words:
        for half in ("l", "h"):
            text = (
                "{ .reg .b16 l, h, a, b; .reg .b32 t; .reg .f32 x, y; mov.b32 {l, h}, $2; "
                f"cvt.rn.f16x2.{kind} t, {half}; mov.b32 {{a, b}}, t; cvt.f32.f16 x, a; cvt.f32.f16 y, b; "
                "mov.b32 $0, x; mov.b32 $1, y; }"
            )
            values += assembly(text, "=r,=r,r", [word], 2)
    return values


def _e2m1(word, shift):
    """float32 of the code in 4 bits of a word: its magnitude's bits are the top of a float32 2^126 times as small."""
    text = (
        f"{{ .reg .b32 m, s; .reg .f32 x; shr.u32 m, $1, {shift}; and.b32 s, m, 8; and.b32 m, m, 7; shl.b32 m, m, 22; "
        "shl.b32 s, s, 28; or.b32 m, m, s; mov.b32 x, m; mul.rn.f32 x, x, 0f7E800000; mov.b32 $0, x; }"
    )
    return assembly(text, "=r,r", [word])


def _pair(low, high, low_scale, high_scale):
    """Two products, rounded to bfloat16, the first in the low half."""
    text = (
        "{ .reg .f32 a, b, s, t; mov.b32 a, $1; mov.b32 b, $2; mov.b32 s, $3; mov.b32 t, $4; mul.rn.f32 a, a, s; "
        "mul.rn.f32 b, b, t; cvt.rn.bf16x2.f32 $0, b, a; }"
    )
    return assembly(text, "=r,r,r,r,r", [low, high, low_scale, high_scale])


def _three(low, high):
    """The three bfloat16 of two float32, as pairs. What rounds past the largest bfloat16 stays at it, with a larger rest."""
    parts = []
    for value in (low, high):
        text = (
            "{ .reg .pred p; .reg .b32 m, f; .reg .f32 x, y, z, n; mov.b32 n, 0; mov.b32 x, $3; "
            "cvt.rn.bf16x2.f32 f, x, n; and.b32 m, $3, 0x7fffffff; setp.lt.u32 p, m, 0x7f800000; "
            # finite: at most 0x7f7f0000 in magnitude
            "and.b32 m, f, 0x7fffffff; min.u32 m, m, 0x7f7f0000; and.b32 $0, f, 0x80000000; or.b32 m, m, $0; "
            "selp.b32 f, m, f, p; mov.b32 $0, f; mov.b32 y, f; sub.rn.f32 z, x, y; selp.f32 z, z, n, p; "
            "cvt.rn.bf16x2.f32 f, z, n; mov.b32 $1, f; mov.b32 y, f; sub.rn.f32 z, z, y; cvt.rn.bf16x2.f32 $2, z, n; }"
        )
        parts.append(assembly(text, "=&r,=&r,=&r,r", [value], 3))
    return [access.permute_bytes(a, b, 0x7632) for a, b in zip(*parts, strict=True)]
