"""What the CDNA grouped GEMM kernels share: the launcher, and what a workgroup finds out about its work."""

from types import SimpleNamespace
from typing import Any

import flydsl.compiler as flyc
from flydsl import expr as fx

from fourwave.blocks.flydsl.block128 import BLOCK_K, SCALE_STEPS, GlobalScales128, ScalePart, Scales128
from fourwave.blocks.flydsl.control import when
from fourwave.blocks.flydsl.epilogue import Epilogue, Partials, store_tile
from fourwave.blocks.flydsl.groups import Sizes, matrix_view, vector_view
from fourwave.blocks.flydsl.loaders import FragmentScales, GlobalTile, StagedCodes, StagedTile
from fourwave.blocks.flydsl.memory import OUT_OF_RANGE, Buffer, keep_order, minimum, select, uniform
from fourwave.blocks.flydsl.mma import FORMATS
from fourwave.blocks.flydsl.schedule import k_part, num_tiles, output_tile
from fourwave.blocks.flydsl.tiles import CHUNK_BYTES, MMA_M, MMA_N, WAVE, WORKGROUP, log2
from fourwave.blocks.flydsl.turned import TurnedCodes, TurnedColumns
from fourwave.ops.gemm.config import code_format
from fourwave.ops.grouped_gemm.config import block_scaled, brings_scales, dequantizes, scale_extents
from fourwave.ops.grouped_gemm.preshuffle import K_BLOCK
from fourwave.ops.grouped_gemm.preshuffle import ROWS as SHUFFLED_ROWS

AT_ONCE = 4  # sums of which all parts are loaded together
_TYPES = {"float32": fx.Float32, "bfloat16": fx.BFloat16, "float16": fx.Float16}


def name_of(dtype):
    return str(dtype).removeprefix("torch.")


def operand_format(problem, arch):
    """Of what is multiplied."""
    if dequantizes(problem, arch):
        return FORMATS["bfloat16", "bfloat16"]
    return FORMATS[name_of(problem.a_dtype), name_of(problem.b_dtype)]


def epilogue(spec):
    problem = spec.problem
    whole = ("tensor", "row")
    return Epilogue(
        spec.arch,
        _TYPES[name_of(problem.out_dtype)],
        bias_dtype=None if problem.bias_dtype is None else _TYPES[name_of(problem.bias_dtype)],
        accumulate=problem.accumulate,
        a_scaling=problem.a_scaling if problem.a_scaling in whole else None,
        b_scaling=problem.b_scaling if problem.b_scaling in whole else None,
        vectorised=spec.vectorised,
    )


def launcher(kernel, spec, geo):
    """A FlyDSL JIT function that launches kernel(arguments), arguments by name, and where K is split, the kernel that adds the
    parts (_reduction).

    a, b, out as in GroupedTensors, 8-bit types as bytes; m_sizes as 32-bit words; a_scale, b_scale flat
    a_stride, a_k_stride   elements of a_scale between rows and blocks of k; both 0: layout "groups"
    b_group_stride, b_stride, b_k_stride   of b_scale, between groups, columns (or 128 of them), blocks of k
    bias    [G + 1, N], the last row zeros
    workspace  float32, config.workspace_shape, where K is split
    tiles   workgroups for each part of K
    """
    split = spec.config.split_k
    reduction: Any = None if split == 1 else _reduction(spec, geo)

    @flyc.jit
    def launch_grouped_gemm(
        a: fx.Tensor, b: fx.Tensor, out: fx.Tensor, m_sizes: fx.Tensor, a_scale: fx.Tensor, b_scale: fx.Tensor,
        bias: fx.Tensor, workspace: fx.Tensor,
        G: fx.Int32, M: fx.Int32, N: fx.Int32, K: fx.Int32, a_stride: fx.Int32, a_k_stride: fx.Int32,
        b_group_stride: fx.Int32, b_stride: fx.Int32, b_k_stride: fx.Int32, tiles: fx.Int32,
        stream: fx.Stream = fx.Stream(None),
    ):  # fmt: skip
        arguments = SimpleNamespace(
            a=a, b=b, out=out, m_sizes=m_sizes, a_scale=a_scale, b_scale=b_scale, bias=bias, workspace=workspace,
            G=G, M=M, N=N, K=K, a_stride=a_stride, a_k_stride=a_k_stride, b_group_stride=b_group_stride, b_stride=b_stride, b_k_stride=b_k_stride,
        )  # fmt: skip
        kernel(arguments).launch(grid=(tiles * split, 1, 1), block=(WORKGROUP, 1, 1), stream=stream)
        if fx.const_expr(reduction is not None):
            reduction(arguments).launch(grid=(tiles, 1, 1), block=(WORKGROUP, 1, 1), stream=stream)

    return launch_grouped_gemm


def _reduction(spec, geo):
    """Adds the parts of each tile, part 0 first, and runs the epilogue: each result is one fixed sum (ops/gemm/cdna.py)."""
    epi, split = epilogue(spec), spec.config.split_k

    @flyc.kernel(known_block_size=[WORKGROUP, 1, 1])
    def grouped_gemm_reduction(arguments):
        work = Work(arguments, spec.problem, geo)
        when(work.active, lambda: add(work))

    def add(work):
        parts = [work.partials(part) for part in range(split)]
        acc = []
        for first in range(0, geo.frags_m * geo.frags_n, AT_ONCE):
            chunk = slice(first, first + AT_ONCE)
            total = parts[0].load(chunk)
            for part in parts[1:]:
                total = [so_far + value for so_far, value in zip(total, part.load(chunk), strict=True)]
            acc += total
            # The compiler would load everything first, and have no registers for it.
            keep_order()
        work.store(acc, epi)

    return grouped_gemm_reduction


class Work:
    """One workgroup's tile: where it lies, and which k it sums.

    active       Boolean: False for workgroups past the last tile
    group        groups.Group; of rows in no group, one that reads nothing
    m0, n0       first row and column of the tile, in out or in the group's part of it
    k_first      k where the first K tile begins; k_end: past the last k
    num_k_tiles  K tiles there are
    """

    def __init__(self, arguments, problem, geo, split=1, step_k=None, codes=False, tiles=None):
        """split: parts of K, of whole steps of step_k (a step of the main loop); only where rows are split. codes: config.dequantizes.
        tiles: (a, b) as they lie in global memory, where that is not as geo has them."""
        self.arguments, self.problem, self.geo, self.split, self.step_k = arguments, problem, geo, split, step_k
        self.blocks, self.codes = block_scaled(problem), codes
        # As they lie in global memory.
        self.tile_a, self.tile_b = tiles or (geo.a, geo.b)
        self.thread = fx.Int32(fx.thread_idx.x)
        self.lane = self.thread % WAVE
        self.wave = uniform(self.thread // WAVE)
        self.wave_m, self.wave_n = self.wave // geo.waves_n, self.wave % geo.waves_n
        words = problem.m_sizes_dtype.itemsize // 4
        if problem.split == "rows":
            self._find_rows(Sizes(arguments.m_sizes, words, arguments.G, arguments.M, self.lane))
        else:
            self._find_columns(Sizes(arguments.m_sizes, words, arguments.G, arguments.K, self.lane))
        self.num_k_tiles = num_tiles(self.k_end - self.k_first, geo.tile_k)

    def _find_rows(self, sizes):
        arguments, geo = self.arguments, self.geo
        rows, tiles = sizes.totals(geo.tile_m)
        tiles_m = tiles + num_tiles(arguments.M - minimum(rows, arguments.M), geo.tile_m)
        tiles_n = num_tiles(arguments.N, geo.tile_n)
        workgroup, self.tiles = fx.Int32(fx.block_idx.x), tiles_m * tiles_n
        self.active = workgroup < self.tiles * self.split
        workgroup = minimum(workgroup, self.tiles * self.split - 1)
        self.tile, self.part, k_first, k_end = k_part(workgroup, self.tiles, arguments.K, self.step_k, self.split)
        t, n_tile = output_tile(self.tile, tiles_m, tiles_n, geo.group_m)
        t, n_tile = uniform(t), uniform(n_tile)
        self.group = group = sizes.with_tile(t, geo.tile_m)
        self.m0, self.n0 = group.first + group.m_tile * geo.tile_m, n_tile * geo.tile_n
        # Always true but for sizes that add up to more rows than there are.
        self.active = self.active & (self.m0 < group.end)
        none = group.index == arguments.G
        self.k_first, self.k_end = select(none, 0, k_first), select(none, 0, k_end)
        # Weights of the last group stand for those of none: an address that nothing is read from.
        self.weights = fx.Int64(minimum(group.index, arguments.G - 1))

    def _find_columns(self, sizes):
        arguments, geo = self.arguments, self.geo
        tiles_m, tiles_n = num_tiles(arguments.M, geo.tile_m), num_tiles(arguments.N, geo.tile_n)
        # Tiles of all groups one below the other: bands of tiles share operands inside a group.
        m_tile, n_tile = output_tile(fx.Int32(fx.block_idx.x), tiles_m * arguments.G, tiles_n, geo.group_m)
        self.active = fx.Boolean(True)
        index = fx.Int32(fx.Uint32(m_tile) // fx.Uint32(tiles_m))
        index = uniform(index)
        self.group = group = sizes.with_index(index)
        self.m0, self.n0 = (m_tile - index * tiles_m) * geo.tile_m, n_tile * geo.tile_n
        # K tiles lie where blocks of scales do, so the first one may begin before the group. An empty group has none: a NaN
        # scale of the block around it would meet zeros.
        self.k_first = group.first
        if self.blocks:
            block_k = 32 if self.codes else BLOCK_K
            self.k_first = select(group.first < group.end, group.first & -block_k, group.end)
        self.k_end = group.end
        self.weights = fx.Int64(index)

    # ---- operands ----------------------------------------------------------------------------------------------------

    def global_a(self):
        a = self.arguments.a
        columns, stride = fx.get_scalar(a.shape[1]), fx.get_scalar(a.stride[0])
        if self.problem.split == "rows":
            # Rows of the next group would do no harm, but cost bandwidth.
            end = minimum(self.group.end, self.m0 + self.geo.tile_m)
            view = matrix_view(a, fx.Int64(0), end, columns, stride)
            return GlobalTile(view, self.tile_a, self.m0, self.k_end, self.thread)
        return self._of_rows(a, self.tile_a, self.m0, columns, stride)

    def global_b(self):
        b = self.arguments.b
        if self.problem.split != "rows":
            return self._of_rows(b, self.tile_b, self.n0, fx.get_scalar(b.shape[1]), fx.get_scalar(b.stride[0]))
        if self.problem.b_preshuffled:
            return PreshuffledTile(self)
        offset = self.weights * fx.Int64(fx.get_scalar(b.stride[0]))
        view = matrix_view(b, offset, fx.get_scalar(b.shape[1]), fx.get_scalar(b.shape[2]), fx.get_scalar(b.stride[1]))
        return GlobalTile(view, self.tile_b, self.n0, self.k_end, self.thread)

    def _of_rows(self, tensor, tile, column0, columns, stride):
        view = matrix_view(tensor, fx.Int64(0), self.k_end, columns, stride)
        if self.blocks:
            return LateTile(view, tile, column0, self.k_end, self.thread, self.group.first)
        return GlobalTile(view, tile, column0, self.k_end, self.thread)

    def staged_a(self, dtype):
        """gfx942: a on its way through registers; dtype: of its elements."""
        tile = self.global_a()
        if not self.codes:
            return self._staged(tile, self.geo.a, dtype)
        arguments = self.arguments
        scale = arguments.a_scale
        if self.problem.split == "rows":
            end = minimum(self.group.end, self.m0 + self.geo.tile_m)
            columns = _whole_words(self._scale_blocks(arguments.K))
            view = matrix_view(scale, fx.Int64(0), end, columns, arguments.a_stride)
        else:
            view = self._scales_of_rows(scale, arguments.M, arguments.a_k_stride)
        return self._dequantized(tile, view, self.geo.a, self.problem.a_dtype, self.m0)

    def staged_b(self, dtype):
        """As staged_a."""
        tile = self.global_b()
        if not self.codes:
            return self._staged(tile, self.geo.b, dtype)
        arguments = self.arguments
        scale = arguments.b_scale
        offset = self.weights * fx.Int64(arguments.b_group_stride)
        if self.problem.split != "rows":
            view = self._scales_of_rows(scale, arguments.N, arguments.b_k_stride)
        elif self.geo.b.k_contiguous:
            columns = _whole_words(self._scale_blocks(arguments.K))
            view = matrix_view(scale, offset, arguments.N, columns, arguments.b_stride)
        else:
            blocks = self._scale_blocks(arguments.K)
            view = matrix_view(scale, offset, blocks, _whole_words(arguments.N), arguments.b_k_stride)
        return self._dequantized(tile, view, self.geo.b, self.problem.b_dtype, self.n0)

    def _staged(self, tile, image, dtype):
        return StagedTile(tile, dtype, self.thread) if image.k_contiguous else TurnedColumns(tile, image, self.thread)

    def _dequantized(self, tile, scale, image, dtype, row0):
        kind = GroupedCodes if image.k_contiguous else TurnedCodes
        return kind(tile, scale, image, code_format(dtype), row0, self.k_end, self.thread)

    def _scales_of_rows(self, scale, columns, pitch):
        return matrix_view(scale, fx.Int64(0), self._scale_blocks(self.k_end), _whole_words(columns), pitch)

    @staticmethod
    def _scale_blocks(k):
        return (k + 31) >> 5

    def k0(self, tile_index):
        """First k of the K tile that is multiplied as number tile_index; past the last one, a k that is past all.

        Split rows: groups begin their steps at different eighths of K. Dies work on different groups, and rows that are a power
        of two of bytes apart would otherwise have all of them at the few memory channels of one column at a time. Inside a
        group the order is one, so that its workgroups share what their die's L2 holds; it depends on nothing but the group.
        """
        if self.problem.split != "rows":
            return self.k_first + tile_index * self.geo.tile_k
        step_k, tile_k = self.step_k, self.geo.tile_k
        steps = num_tiles(self.k_end - self.k_first, step_k)
        first = ((self.group.index & 7) * steps) >> 3
        k = tile_index * tile_k
        step = (k >> log2(step_k)) + first
        step = select(step < steps, step, step - steps)
        inside = k < steps * step_k
        return select(inside, self.k_first + step * step_k + (k & (step_k - 1)), self.k_end + step_k)

    # ---- scales ------------------------------------------------------------------------------------------------------

    def scales(self, parts, lds, places):
        """((global, reader) of a, of b). places: offsets in lds."""
        arguments, geo = self.arguments, self.geo
        a, b = parts
        group, m0, n0 = self.group, self.m0, self.n0
        size_a, size_b = a.elem_bytes, b.elem_bytes
        stride, k_stride = arguments.a_stride, arguments.a_k_stride
        b_stride, b_k_stride = arguments.b_stride, arguments.b_k_stride
        left_m, left_n = arguments.M - m0, arguments.N - n0
        first_n = n0
        base_a = fx.Int64(0)
        if self.problem.split == "rows":
            left_m = group.end - m0
            base_b = self.weights * fx.Int64(arguments.b_group_stride)
        else:
            base_b = fx.Int64(0)
        first_m = m0
        if a.kind == "rows" and self.problem.split == "rows":
            in_groups = arguments.a_stride == 0
            stride, k_stride = select(in_groups, 1, stride), select(in_groups, group.end - group.first, k_stride)
            k_blocks = (arguments.K + (BLOCK_K - 1)) >> 7
            base_a = fx.Int64(group.first) * fx.Int64(k_blocks)
            first_m = m0 - group.first
        if b.kind == "cells":
            first_n = n0 >> 7
            left_n = ((arguments.N + (BLOCK_K - 1)) >> 7) - first_n
        base_a = (base_a + fx.Int64(first_m) * fx.Int64(stride)) * size_a
        base_b = (base_b + fx.Int64(first_n) * fx.Int64(b_stride)) * size_b
        k = (self.k_first if self.problem.split == "rows" else group.first, self.k_end, self.thread)
        return (
            (
                GlobalScales128(arguments.a_scale, a, base_a, stride * size_a, k_stride * size_a, left_m, *k),
                self._reader(a, lds, places[0], geo.a, self.wave_m * geo.wave_tile_m, geo.frags_m),
            ),
            (
                GlobalScales128(arguments.b_scale, b, base_b, b_stride * size_b, b_k_stride * size_b, left_n, *k),
                self._reader(b, lds, places[1], geo.b, self.wave_n * geo.wave_tile_n, geo.frags_n),
            ),
        )

    def _reader(self, part, lds, place, tile, first, count):
        """Of the scales of `count` fragments of a wave's part of the tile that begins at `first`."""
        if part.kind.startswith("mx"):
            return FragmentScales(part.scale_tile, lds, place, first, count, self.lane, SCALE_STEPS)
        return Scales128(part, lds, place, self._places(part, tile, first, count))

    def _places(self, part, tile, first, count):
        """What Scales128 calls rows, for `count` fragments of a wave's part of the tile that begins at `first`."""
        lane = self.lane
        if part.kind == "cells":
            return [((self.n0 & (BLOCK_K - 1)) + first) >> 7]
        if part.kind == "columns":
            # A lane's run of columns of one group of fragments, four at a time; see columns().
            group, run = tile.group, tile.run
            return [
                first + p * group * MMA_N + (lane // MMA_M) * run + c
                for p in range(count // group)
                for c in range(0, run, 4)
            ]
        return [first + i * MMA_M + lane % MMA_M for i in range(count)]

    def columns(self, values):
        """For each fragment of b a Vector of the lane's four columns, of what a reader of "columns" returned."""
        group, run = self.geo.b.group, self.geo.b.run
        if group == 1:
            return values
        place = {self.geo.b.run_element(e): e for e in range(run)}
        out = []
        for p in range(0, len(values), group):
            flat = [vector[i] for vector in values[p : p + group] for i in range(4)]
            out += [fx.Vector.from_elements([flat[place[q, r]] for r in range(4)], fx.Float32) for q in range(group)]
        return out

    # ---- result ------------------------------------------------------------------------------------------------------

    def partials(self, part):
        """Where the sums of one part of K lie in the workspace."""
        number = part * self.tiles + self.tile
        return Partials(self.arguments.workspace, number, self.geo.frags_m * self.geo.frags_n, self.thread)

    def finish(self, acc, epi):
        """The end of a kernel: the epilogue, or partial sums where K is split."""
        if self.split == 1:
            self.store(acc, epi)
        else:
            self.partials(self.part).store(acc)

    def store(self, acc, epi):
        arguments = self.arguments
        rows, out = arguments.M, arguments.out
        scale, bias = arguments.b_scale, arguments.bias
        if epi.bias_dtype is not None:
            # Rows in no group have the row of zeros behind the last group's.
            bias = vector_view(bias, fx.Int64(self.group.index) * fx.Int64(arguments.N), arguments.N)
        if self.problem.split == "rows":
            # Rows past the group's are other workgroups'.
            rows = self.group.end
            if epi.b_scaling is not None:
                count = arguments.N if epi.b_scaling == "row" else fx.Int32(1)
                scale = vector_view(scale, self.weights * fx.Int64(arguments.b_group_stride), count)
        else:
            offset = self.weights * fx.Int64(fx.get_scalar(out.stride[0]))
            out = matrix_view(out, offset, rows, arguments.N, fx.get_scalar(out.stride[1]))
        told = SimpleNamespace(
            M=rows,
            N=arguments.N,
            K=arguments.K,
            out=out,
            alpha=fx.Float32(1.0),
            a_scale=arguments.a_scale,
            b_scale=scale,
            bias=bias,
        )
        store_tile(acc, epi, told, self.m0, self.n0, self.geo, self.wave_m, self.wave_n, self.lane)


def scale_parts(problem, config, geo, arch):
    """(a, b) of the block scales that lie in LDS, or () where there are none."""
    if not brings_scales(problem, arch):
        return ()
    (kind_a, extent_a), (kind_b, extent_b) = scale_extents(problem, config)
    return ScalePart(kind_a, extent_a, geo.a), ScalePart(kind_b, extent_b, geo.b)


def _whole_words(columns):
    """Bytes of a row of scales, which amd.run pads: loads of words give nothing where a word is not whole."""
    return (columns + 3) & -4


class GroupedCodes(StagedCodes):
    """StagedCodes of the tile of codes `source`, whose K is contiguous.

    Scales travel as words, and the byte is chosen when they are used: single bytes would be packed where they are loaded, which waits
    for them.
    """

    def __init__(self, source, scale, image, code_format, row0, K, thread):
        super().__init__(source.tensor, scale, image, code_format, row0, K, thread)
        self.source = source
        self.values += 1  # which byte of the words

    def load(self, k0):
        codes = self.load_codes(k0)
        # A tile's 64 k are two bytes of one word.
        block, block_of_chunk = k0 >> 5, self.chunk >> 1
        first = block & -4
        used_rows = minimum(self.scale_rows - self.row0, fx.Int32(self.image.extent))
        num_bytes = (used_rows - 1) * fx.Int32(self.scale_row_bytes) + self.scale_columns - first
        base = fx.Int64(self.row0) * self.scale_row_bytes + fx.Int64(first)
        scales = Buffer(self.scale, base, select(k0 < self.K, num_bytes, 0))
        inside = self.chunk * CHUNK_BYTES < self.K - k0
        words = [
            scales.load(select(inside, offset - block_of_chunk, OUT_OF_RANGE), 1, fx.Int32)
            for offset in self.scale_offsets
        ]
        return [*codes, *words, fx.Vector.filled(1, ((block & 3) + block_of_chunk) * 8, fx.Int32)]

    def store(self, values, lds, stage_offset):
        *values, shift = values
        words = [fx.Int32(fx.Uint32(word[0]) >> fx.Uint32(shift[0])) for word in values[self.tile.loads :]]
        values = [*values[: self.tile.loads], *(fx.Vector.filled(1, word, fx.Int32) for word in words)]
        super().store(values, lds, stage_offset)


class LateTile(GlobalTile):
    """A tile of a matrix whose rows before `first` (Int32, uniform) read as zeros; K is not contiguous."""

    def __init__(self, tensor, tile, row0, K, thread, first):
        super().__init__(tensor, tile, row0, K, thread)
        self.first = first
        line, _ = tile.first_chunk(thread)
        self.lines = [tile.source_row(line + i * tile.lines_per_load) for i in range(tile.loads)]

    def step(self, k0):
        buffer, offsets = super().step(k0)
        before = self.first - k0
        return buffer, [
            select(row >= before, offset, OUT_OF_RANGE) for row, offset in zip(self.lines, offsets, strict=True)
        ]


class PreshuffledTile:
    """Fragments of preshuffled weights [N, K] of one group, straight from global memory (preshuffle.py)."""

    def __init__(self, work):
        arguments, geo = work.arguments, work.geo
        b = arguments.b
        self.tensor, self.K, self.end, self.count = b, arguments.K, work.k_end, geo.frags_n
        self.columns = arguments.N - work.n0
        # Rows of 16 follow each other at 16 * K bytes; n0 is a multiple of 16.
        self.base = work.weights * fx.Int64(fx.get_scalar(b.stride[0])) + fx.Int64(work.n0) * fx.Int64(arguments.K)
        block_rows = arguments.K * SHUFFLED_ROWS
        lane = work.lane
        self.offsets = []
        for j in range(geo.frags_n):
            row = work.wave_n * geo.wave_tile_n + geo.b.fragment_row(j, lane % MMA_M)
            in_block = (lane // MMA_M) * (MMA_M * CHUNK_BYTES) + (row % SHUFFLED_ROWS) * CHUNK_BYTES
            self.offsets.append((row // SHUFFLED_ROWS) * block_rows + in_block)

    @property
    def loads(self):
        """Loads per K tile of 128."""
        return 2 * self.count

    def load(self, k0):
        """Fragments of the 128 k from k0 (Int32, uniform) on; zeros from K on."""
        halves = []
        for half in range(2):
            k = k0 + half * K_BLOCK
            # 64 of K of 16 rows are 1024 bytes.
            byte_offset = self.base + fx.Int64(k) * SHUFFLED_ROWS
            left = fx.Int64(self.columns) * fx.Int64(self.K) - fx.Int64(k) * SHUFFLED_ROWS
            left = minimum(left, fx.Int64(2**31))
            halves.append(Buffer(self.tensor, byte_offset, (k < self.end).select(left, fx.Int64(0))))
        out = []
        for offset in self.offsets:
            low, high = (buffer.load(offset, 4, fx.Int32) for buffer in halves)
            out.append(low.shuffle(high, list(range(8))))
        return out
