"""Tunables of the Hopper GEMM kernels, the shared memory that they take, and the one rule for what the kernels support.

Imports neither CuTe DSL nor torch.cuda: the rule can be asked anywhere. Which tiles there are: sm90_tiles.py; which of them runs:
sm90_choice.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from fourwave.ops.gemm.problem import PACKED_E2M1, SWIGLU

if TYPE_CHECKING:
    from fourwave.ops.gemm.problem import GemmProblem

NUM_SMS = 132  # H100 SXM, H200
FOURS_SMS = 120  # of those, what clusters of four or eight can cover
SMEM_BYTES = 227 * 1024  # dynamic shared memory of one CTA
HALF_SMEM_BYTES = 113 * 1024  # of each of two CTAs on one SM
ALONE_BYTES = HALF_SMEM_BYTES + 1024  # of a CTA that shall be alone on an SM
BARRIER_BYTES = 1024  # mbarriers, and what aligning the buffers to 1024 bytes can waste
SWIZZLE_BYTES = 128  # a row of a shared-memory tile: the widest swizzle of TMA and wgmma
STORE_ROWS = 64  # rows of an output buffer: one wgmma's
STORE_BYTES = STORE_ROWS * SWIZZLE_BYTES
SCALE_STEPS = 4  # k steps whose scales are loaded together: 16 bytes of a row, the least that TMA takes
MAX_ACCUMULATORS = 192  # per thread; of at most 255 registers, the rest holds addresses and the epilogue's values
MAX_EXTENT = 2**31 - 2**12  # TMA coordinates are int32, and rounding up to a tile must not overflow
PACKED_ROWS = 256  # of a, at most, with weights in MX
PACKED_STEP = 128  # k of a stage then
STREAMED_ROWS = 32  # of a, at most, in a streamed tile
STREAMED_AT_ONCE = 8  # tokens whose sums have shared memory of their own
STREAMED_STEP = 64  # k of a warp's stage
STREAMED_ACCUMULATORS = {1: 128, 2: 128, 3: 80, 4: 64}  # per thread, by warpgroups of a CTA, which share 64 K registers
MAX_STRIDE_BYTES = 2**40  # of a tensor map
DTYPES = (torch.bfloat16, torch.float16)
FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
OUTPUTS = (torch.float32, torch.bfloat16, torch.float16)
ACTIVATIONS = (None, "relu", "silu", "gelu_tanh", "gelu", SWIGLU)
_SCALINGS = (None, "tensor", "row")
_MORE = ("swiglu", "preactivation", "bias_grad", "out:tensor")  # of the kernel in sm90.py, not of sm90_swapped.py
_FEATURES = frozenset(
    [
        *(f"scaling:{a}x{b}" for a in _SCALINGS for b in _SCALINGS),
        "scaling:1x128x128x128",
        "scaling:Nonex1x32",
        "b_preshuffled",
        *_MORE,
    ]
)


@dataclass(frozen=True)
class HopperConfig:
    """tile_*: output tile of a CTA (of a consumer warpgroup where schedule is "pingpong") and its reduction step.

    schedule      "cooperative": the consumer warpgroups split one tile's rows;
                  "pingpong": each has a tile of its own, so that one stores while the other multiplies;
                  "swapped": another kernel, for few rows (sm90_swapped.py); b rides wgmma's rows. tile_m and tile_n are
                  then multiples of 8 up to 128, with preshuffled weights tile_n of 16 up to 256; consumers, store_stages,
                  cluster_m and group mean nothing
                  "streamed": a third one, for up to 32 rows and preshuffled MXFP4 weights (sm90_streamed.py). tile_m and tile_n
                  are multiples of 8 and 16, num_stages is each warp's; store_stages, cluster_m and group mean nothing
    consumers     consumer warpgroups; "streamed": a CTA has these only
    num_stages    shared-memory buffers per operand
    store_stages  output buffers of 64 rows x 128 bytes per consumer warpgroup
    cluster_*     CTAs that load each other's operands by multicast: cluster_m share B, cluster_n share A
    group         clusters side by side in a band, along `along`, that is walked through together (L2 reuse)
    split         "swapped", "streamed": CTAs of a cluster that share a tile's reduction
    overlap       the grid may be set up while the one before it on the stream ends (programmatic dependent launch)
    """

    tile_m: int = 128
    tile_n: int = 256
    tile_k: int = 64
    schedule: str = "cooperative"
    consumers: int = 2
    num_stages: int = 4
    store_stages: int = 2
    cluster_m: int = 2
    cluster_n: int = 1
    group: int = 8
    along: str = "m"
    split: int = 1
    overlap: bool = True

    def __str__(self) -> str:
        if self.schedule == "swapped":
            return (
                f"{self.tile_m}x{self.tile_n}x{self.tile_k} swapped, {self.num_stages} stages, split {self.split}, "
                f"shared by {self.cluster_n}"
                f"{'' if self.overlap else ', no overlap'}"
            )
        if self.schedule == "streamed":
            return (
                f"{self.tile_m}x{self.tile_n}x{self.tile_k} streamed, {4 * self.consumers} warps, {self.num_stages} stages, "
                f"split {self.split}{'' if self.overlap else ', no overlap'}"
            )
        return (
            f"{self.tile_m}x{self.tile_n}x{self.tile_k} {self.schedule}, {self.num_stages} stages, "
            f"cluster {self.cluster_m}x{self.cluster_n}, bands of {self.group} along {self.along}"
        )

    @property
    def warpgroup_m(self) -> int:
        """Rows of a tile that one consumer warpgroup multiplies."""
        return self.tile_m if self.schedule == "pingpong" else self.tile_m // self.consumers

    @property
    def cluster_size(self) -> int:
        if self.schedule == "streamed":
            return self.split
        return (self.split if self.schedule == "swapped" else self.cluster_m) * self.cluster_n

    @property
    def few_rows(self) -> bool:
        """Whether b rides the matrix unit's rows, and the output goes to memory by ordinary stores."""
        return self.schedule in ("swapped", "streamed")


def store_columns(dtype: torch.dtype) -> int:
    """Of an output, that go through one buffer."""
    return min(64, SWIZZLE_BYTES // dtype.itemsize)


def out_tile_n(problem: GemmProblem, config: HopperConfig) -> int:
    """Columns of out that a tile makes: swiglu makes one of two."""
    return config.tile_n * problem.out_columns // problem.N


def stores(problem: GemmProblem, config: HopperConfig) -> int:
    """Buffers that a warpgroup fills per tile, of out and of the preactivation."""
    count = out_tile_n(problem, config) // store_columns(problem.out_dtype)
    if problem.preactivation_dtype is not None:
        count += config.tile_n // store_columns(problem.preactivation_dtype)
    return config.warpgroup_m // STORE_ROWS * count


def stores_late(problem: GemmProblem, config: HopperConfig) -> bool:
    """Whether a tile is stored while the next one's first products run (sm90.Gemm.late)."""
    return promotes(problem) and config.warpgroup_m == STORE_ROWS and stores(problem, config) == config.store_stages


def more_outputs(problem: GemmProblem) -> bool:
    """Whether the kernel has arguments for z, the bias gradient, and the scale and amax of a quantized out."""
    return not (problem.preactivation_dtype is problem.bias_grad_dtype is problem.out_scaling is None)


def packed(problem: GemmProblem) -> bool:
    """Whether b is MXFP4 or MXFP8 (e4m3fn), which only the kernels for few rows multiply, with bfloat16."""
    return problem.b_dtype in (PACKED_E2M1, torch.float8_e4m3fn) and problem.b_scaling == "1x32"


def tile_k(problem: GemmProblem) -> int:
    """The reduction step of a stage, the only one there is."""
    return PACKED_STEP if packed(problem) else SWIZZLE_BYTES // problem.a_dtype.itemsize


def promotes(problem: GemmProblem) -> bool:
    """Whether the matrix unit's sums are moved to float32 registers every 128 k."""
    return problem.a_dtype in FP8 and (not problem.fast_accum or problem.a_scaling == "1x128")


def clusters(config: HopperConfig, num_sms: int = NUM_SMS) -> int:
    """Clusters of a grid that fills the chip."""
    # A cluster's SMs are of one group of 16 or 18, some of which are switched off: of NUM_SMS, 30 clusters of 4 and 15 of 8
    # fit (cudaOccupancyMaxActiveClusters).
    if config.cluster_size > 2 and config.few_rows:
        num_sms = num_sms * FOURS_SMS // NUM_SMS
    return num_sms // config.cluster_size


def cluster_tiles(problem: GemmProblem, config: HopperConfig) -> int:
    """What clusters take turns at: the tiles of a cluster's CTAs together. (CTAs that split a reduction have one.)"""
    in_m = 1 if config.few_rows else config.cluster_m
    return -(-problem.M // (config.tile_m * in_m)) * -(-problem.N // (config.tile_n * config.cluster_n))


def num_clusters(problem: GemmProblem, config: HopperConfig, num_sms: int) -> int:
    """Of the grid, on a device of `num_sms`. Tiles for few rows count on what NUM_SMS have room for: where those have one tile each,
    every tile gets a cluster, which waits where the device has fewer multiprocessors."""
    tiles = cluster_tiles(problem, config)
    if config.few_rows and single_tile(problem, config):
        return tiles
    return min(tiles, clusters(config, num_sms))


def single_tile(problem: GemmProblem, config: HopperConfig) -> bool:
    """Whether no cluster of the grid has more than one (swapped or streamed) tile."""
    return cluster_tiles(problem, config) <= clusters(config)


def scale_slots(num_stages: int) -> int:
    """Buffers of the scales of SCALE_STEPS k steps that need no barriers of their own: consumers read a buffer in the first of its
    steps, and the producer, which fills it with the first one's load, is at most num_stages steps ahead."""
    return -(-num_stages // SCALE_STEPS)


def smem_bytes(config: HopperConfig, elem_bytes: int, block_scaled: bool = False, sums: bool = False) -> int:
    """sums: with a bias gradient, whose column of ones is a tile of 8 rows."""
    stage = (config.tile_m + config.tile_n) * config.tile_k * elem_bytes
    scales = 0
    if block_scaled:  # of a's rows, and of each of b's blocks in 128 bytes
        scales = scale_slots(config.num_stages) * (4 * SCALE_STEPS * config.tile_m + 128 * -(-config.tile_n // 128))
    stores = config.consumers * config.store_stages * STORE_BYTES + (8 * SWIZZLE_BYTES if sums else 0)
    return config.num_stages * stage + stores + scales + BARRIER_BYTES


def swapped_smem_bytes(problem: GemmProblem, config: HopperConfig) -> int:
    width = -(-config.tile_n // 64) * 64
    stage_a, stage_b = config.tile_m * SWIZZLE_BYTES, config.tile_n * SWIZZLE_BYTES
    more = (width - config.tile_n) * SWIZZLE_BYTES
    scales = 0
    if packed(problem):  # codes of 64 or 128 bytes and 16 scales a row
        stage_a = 2 * stage_a
        if problem.b_dtype == PACKED_E2M1:
            stage_b, more = stage_b // 2, more // 2
        row_scales = 4 if problem.b_preshuffled else 16  # of a stage, in bytes
        scales = config.num_stages * -(-config.tile_n * row_scales // 128) * 128 + (width - config.tile_n) * 16
    stages = config.num_stages * (stage_a + stage_b) + more
    partial = 4 * config.tile_m * (width + 4)
    together = max(stages, partial) if single_tile(problem, config) else stages + partial
    return together + scales + 2 * BARRIER_BYTES  # rounded up to 1024 as a whole


def streamed_smem_bytes(problem: GemmProblem, config: HopperConfig) -> int:
    warps = 4 * config.consumers
    scales = -(-config.tile_n * 2 // 128) * 128
    stages = warps * config.num_stages * (config.tile_m * 128 + config.tile_n * 32 + scales)
    partial = warps * 4 * (config.tile_n + 4)  # for each token
    together = (
        max(stages + 16, partial * config.tile_m)
        if single_tile(problem, config)
        else stages + partial * STREAMED_AT_ONCE
    )
    inbox = 0
    if config.split > 1 and single_tile(problem, config):  # of the parts that the other CTAs send
        inbox = 4 * (config.tile_n + 4) * -(-config.tile_m // config.split) * config.split
    return max(together + inbox + 8 * warps * config.num_stages + 2 * BARRIER_BYTES, ALONE_BYTES)


def why_unsupported(problem: GemmProblem, config: HopperConfig | None) -> str | None:
    """Why the Hopper GEMM kernel cannot do this problem with this configuration (None: the default), or None.

    Alignment and strides are not part of a problem: the launcher copies an operand that TMA cannot address.
    """
    if problem.layout not in ("TN", "NN", "NT"):
        return f"layout {problem.layout!r}: the kernel has TN, NN and NT"
    if (reason := problem.why_refused(_FEATURES)) is not None:
        return reason
    if problem.b_preshuffled and (problem.b_dtype, problem.b_scaling) != (PACKED_E2M1, "1x32"):
        return (
            "b is preshuffled, an order for AMD's matrix units: this kernel has one for MXFP4 with few rows of bfloat16"
        )
    if problem.b_scaling == "1x32":
        if not packed(problem) or problem.a_dtype != torch.bfloat16:
            return f"{problem.a_dtype} with {problem.b_dtype} in blocks of 32: the kernel takes bfloat16 with weights in MXFP4 or MXFP8 (e4m3fn)"
        if problem.layout != "TN" or problem.M > PACKED_ROWS or problem.K % 32:
            return (
                f"{problem.M}x{problem.N}x{problem.K} {problem.layout} with weights in MX: the kernel takes TN with up to "
                f"{PACKED_ROWS} rows and K in whole blocks of 32"
            )
        if problem.b_preshuffled and (problem.N % 16 or problem.K % 64 or problem.K >= 2**30):
            return (
                f"N={problem.N} and K={problem.K} with preshuffled weights: their order is of 16 rows and 64 of K, and 2 K words "
                "of 16 rows are counted in 32 bits"
            )
        if more_outputs(problem) or problem.activation == SWIGLU:
            return "swiglu, saved preactivation, bias gradient or quantized result with weights in MX: a swapped tile has none of these"
    elif problem.a_dtype in FP8 and problem.b_dtype in FP8:
        if problem.layout != "TN":
            return f"layout {problem.layout} with FP8 operands: wgmma reads 8-bit operands with K contiguous only"
    elif problem.a_dtype != problem.b_dtype or problem.a_dtype not in DTYPES:
        return (
            f"operands are {problem.a_dtype} and {problem.b_dtype}: the kernel takes bfloat16 or float16, one for both, "
            "or float8_e4m3fn and float8_e5m2"
        )
    if problem.out_scaling is not None:
        if problem.out_dtype not in FP8:
            return f"out is {problem.out_dtype}: the kernel quantizes to float8_e4m3fn and float8_e5m2"
    elif problem.out_dtype not in OUTPUTS:
        return f"out is {problem.out_dtype}: the kernel writes float32, bfloat16 and float16"
    if problem.activation == SWIGLU and problem.a_scaling == "1x128":
        return "swiglu with scales 1x128 and 128x128: the halves of b may divide a block of its scales between them"
    if problem.bias_dtype is not None and problem.bias_dtype not in OUTPUTS:
        return f"bias is {problem.bias_dtype}: the kernel reads float32, bfloat16 and float16"
    if problem.activation not in ACTIVATIONS:
        return f"activation {problem.activation!r}: the kernel has {', '.join(a for a in ACTIVATIONS if a)}"
    for name in ("M", "N", "K"):
        if getattr(problem, name) > MAX_EXTENT:
            return f"{name}={getattr(problem, name)}: TMA coordinates are 32-bit, at most {MAX_EXTENT}"
    if config is None:
        return None
    if not isinstance(config, HopperConfig):
        return f"config is a {type(config).__name__}: the Hopper kernel takes a HopperConfig"
    if config.schedule == "swapped":
        return _why_swapped_unsupported(problem, config)
    if config.schedule == "streamed":
        return why_streamed_unsupported(problem, config)
    if packed(problem):
        return f"schedule {config.schedule!r} with weights in MX: a swapped tile takes them, and a streamed one MXFP4 that is preshuffled"
    return _why_config_unsupported(problem, config)


def _why_config_unsupported(problem: GemmProblem, config: HopperConfig) -> str | None:
    elem_bytes, promote = problem.a_dtype.itemsize, promotes(problem)
    for name in (
        "tile_m",
        "tile_n",
        "tile_k",
        "consumers",
        "num_stages",
        "store_stages",
        "cluster_m",
        "cluster_n",
        "group",
        "split",
    ):
        value = getattr(config, name)
        if not isinstance(value, int) or value < 1:
            return f"{name}={value!r}: an int of at least 1 is needed"
    if config.schedule not in ("cooperative", "pingpong"):
        return f"schedule {config.schedule!r}: there are cooperative, pingpong and swapped, and streamed for preshuffled MXFP4 weights"
    if config.split != 1:
        return f"split={config.split}: only a swapped or streamed tile's reduction is split"
    if config.consumers not in (1, 2, 3) or (config.schedule == "pingpong" and config.consumers != 2):
        return f"{config.consumers} consumer warpgroups: 1 to 3 when cooperative, 2 for pingpong"
    if config.warpgroup_m % 64 or config.warpgroup_m * config.consumers < config.tile_m:
        return f"tile_m={config.tile_m}: each consumer warpgroup needs a multiple of 64 rows"
    if config.tile_n % 8 or not 8 <= config.tile_n <= 256:
        return f"tile_n={config.tile_n}: wgmma takes multiples of 8 up to 256"
    if config.tile_n % 64:
        return f"tile_n={config.tile_n}: operands and output lie in shared memory in columns of 128 bytes, so 64 must divide it"
    if config.tile_m > 256:
        return f"tile_m={config.tile_m}: a TMA box has at most 256 rows"
    if config.tile_k * elem_bytes != SWIZZLE_BYTES:
        return (
            f"tile_k={config.tile_k}: a row of a tile is {SWIZZLE_BYTES} bytes, {SWIZZLE_BYTES // elem_bytes} elements"
        )
    if promote and config.schedule == "pingpong":
        return "pingpong with promotion: the additions need another warpgroup's products beside them"
    accumulators = config.warpgroup_m * config.tile_n // 128
    if promote:
        accumulators += 64 * config.tile_n // 128
    if accumulators > MAX_ACCUMULATORS:
        return f"{accumulators} accumulators per thread: at most {MAX_ACCUMULATORS}"
    if config.consumers == 3 and accumulators > 128:
        return f"{accumulators} accumulators per thread: three consumer warpgroups leave room for 128"
    if config.num_stages < 2:
        return f"num_stages={config.num_stages}: a tile is loaded while another is multiplied, so at least 2"
    if config.cluster_m not in (1, 2, 4) or config.cluster_n not in (1, 2, 4) or config.cluster_size > 4:
        return f"cluster {config.cluster_m}x{config.cluster_n}: powers of two, at most 4 CTAs"
    # Slices of whole swizzle periods; of operands whose M or N is contiguous those are 64 elements of it.
    rows = 8 if problem.a_dtype in FP8 else 64
    if config.tile_m % (rows * config.cluster_n) or config.tile_n % (rows * config.cluster_m):
        return f"cluster {config.cluster_m}x{config.cluster_n}: each CTA loads its share of a tile in slices of {rows} rows"
    if config.along not in ("m", "n"):
        return f"bands along {config.along!r}: along m or n"
    if problem.activation == SWIGLU:
        if config.tile_n % 128:
            return f"tile_n={config.tile_n} with swiglu: each half of a tile's columns is stored in pieces of 64, so 128 must divide it"
        if config.tile_n // 128 % config.cluster_m:
            return (
                f"cluster {config.cluster_m}x{config.cluster_n} with swiglu: each CTA loads its share of either half of "
                f"{config.tile_n} columns in slices of 64"
            )
    buffers = stores(problem, config)
    if buffers % config.store_stages:
        return (
            f"store_stages={config.store_stages}: it must divide the {buffers} buffers that a warpgroup stores per tile"
        )
    smem = smem_bytes(config, elem_bytes, problem.a_scaling == "1x128", problem.bias_grad_dtype is not None)
    if smem > SMEM_BYTES:
        return f"{smem} bytes of shared memory: a CTA has {SMEM_BYTES}"
    return None


def _why_swapped_unsupported(problem: GemmProblem, config: HopperConfig) -> str | None:
    if more_outputs(problem) or problem.activation == SWIGLU:
        return "a swapped tile has no swiglu, saved preactivation, bias gradient or quantized result: other tiles have"
    rows = (16, 256) if problem.b_preshuffled else (8, 128)
    for name, step, most in (("tile_m", 8, 128), ("tile_n", *rows)):
        value = getattr(config, name)
        if not isinstance(value, int) or value % step or not step <= value <= most:
            return f"{name}={value!r}: a swapped tile takes multiples of {step} up to {most}"
    if config.tile_n > 192 and config.tile_m > 64:
        return (
            f"tile_m={config.tile_m}, tile_n={config.tile_n}: four consumer warpgroups have registers for 64 rows of a"
        )
    if problem.layout == "NT":
        return "layout NT with a swapped tile: a's K must be contiguous"
    if problem.layout == "NN" and config.tile_n % 64:
        return f"tile_n={config.tile_n}: where N is b's contiguous dimension, a swapped tile takes 64 or 128"
    if config.tile_k != tile_k(problem):
        return f"tile_k={config.tile_k}: a stage of these operands has {tile_k(problem)} k"
    if config.split not in (1, 2, 4, 8):
        return f"split={config.split}: 1, 2, 4 or 8 CTAs"
    if config.cluster_n not in (1, 2, 4) or config.cluster_size > 8:
        return f"cluster_n={config.cluster_n}, split={config.split}: 1, 2 or 4 CTAs share rows of a, and a cluster has up to 8"
    if config.tile_m // 8 % config.cluster_n:
        return f"cluster_n={config.cluster_n}: each CTA loads its share of {config.tile_m} rows in slices of 8"
    if config.split > -(-problem.K // config.tile_k):
        return f"split={config.split}: each CTA needs a k step, and K={problem.K} has {-(-problem.K // config.tile_k)}"
    if not isinstance(config.num_stages, int) or config.num_stages < 2:
        return f"num_stages={config.num_stages}: a tile is loaded while another is multiplied, so at least 2"
    if problem.a_scaling == "1x128" and problem.M * -(-problem.K // 128) > MAX_EXTENT:
        return f"M={problem.M}, K={problem.K}: a swapped tile numbers a's scales with 32 bits"
    smem = swapped_smem_bytes(problem, config)
    if smem > SMEM_BYTES:
        return f"{smem} bytes of shared memory: a CTA has {SMEM_BYTES}"
    return None


def why_streamed_unsupported(problem: GemmProblem, config: HopperConfig) -> str | None:
    if not problem.b_preshuffled:
        return "a streamed tile has weights in MXFP4 that are preshuffled (fw.preshuffle)"
    if more_outputs(problem) or problem.activation == SWIGLU:
        return "a streamed tile has no swiglu, saved preactivation, bias gradient or quantized result"
    for name, step, most in (("tile_m", 8, STREAMED_ROWS), ("tile_n", 16, 256)):
        value = getattr(config, name)
        if not isinstance(value, int) or value % step or not step <= value <= most:
            return f"{name}={value!r}: a streamed tile takes multiples of {step} up to {most}"
    if problem.M > config.tile_m:
        return f"tile_m={config.tile_m} and M={problem.M}: a streamed tile has all rows"
    if config.tile_k != STREAMED_STEP:
        return f"tile_k={config.tile_k}: a stage has {STREAMED_STEP} k"
    if config.consumers not in (1, 2, 3, 4):
        return f"consumers={config.consumers!r}: a streamed tile takes 1 to 4 warpgroups"
    if config.split not in (1, 2, 4, 8):
        return f"split={config.split}: 1, 2, 4 or 8 CTAs"
    if config.cluster_n != 1:
        return f"cluster_n={config.cluster_n}: a streamed tile's rows of a are not shared"
    if not isinstance(config.num_stages, int) or not 1 <= config.num_stages <= 16:
        return f"num_stages={config.num_stages}: a warp takes 1 to 16"
    accumulators = config.tile_m * config.tile_n // 32
    most = STREAMED_ACCUMULATORS[config.consumers]
    if accumulators > most:
        return f"{accumulators} accumulators per thread: with {4 * config.consumers} warps there is room for {most}"
    smem = streamed_smem_bytes(problem, config)
    if smem > SMEM_BYTES:
        return f"{smem} bytes of shared memory: a CTA has {SMEM_BYTES}"
    return None
