"""Tunables of the Hopper GEMM kernel, the default choice with its reasons, and the one rule for what the kernel supports.

Imports neither CuTe DSL nor torch.cuda: the rule can be asked anywhere.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from fourwave.ops.gemm.problem import GemmProblem

NUM_SMS = 132  # H100 SXM, H200
SMEM_BYTES = 227 * 1024  # dynamic shared memory of one CTA
BARRIER_BYTES = 1024  # mbarriers, and what aligning the buffers to 1024 bytes can waste
SWIZZLE_BYTES = 128  # a row of a shared-memory tile: the widest swizzle of TMA and wgmma
STORE_ROWS = 64  # rows of an output buffer: one wgmma's
STORE_BYTES = STORE_ROWS * SWIZZLE_BYTES
MAX_ACCUMULATORS = 192  # per thread; of at most 255 registers, the rest holds addresses and the epilogue's values
MAX_EXTENT = 2**31 - 2**12  # TMA coordinates are int32, and rounding up to a tile must not overflow
MAX_STRIDE_BYTES = 2**40  # of a tensor map
DTYPES = (torch.bfloat16, torch.float16)
FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
OUTPUTS = (torch.float32, torch.bfloat16, torch.float16)
ACTIVATIONS = (None, "relu", "silu", "gelu_tanh", "gelu")


@dataclass(frozen=True)
class HopperConfig:
    """tile_*: output tile of a CTA (of a consumer warpgroup where schedule is "pingpong") and its reduction step.

    schedule      "cooperative": the consumer warpgroups split one tile's rows;
                  "pingpong": each has a tile of its own, so that one stores while the other multiplies
    consumers     consumer warpgroups
    num_stages    shared-memory buffers per operand
    store_stages  output buffers of 64 rows x 128 bytes per consumer warpgroup
    cluster_*     CTAs that load each other's operands by multicast: cluster_m share B, cluster_n share A
    group         clusters side by side in a band, along `along`, that is walked through together (L2 reuse)
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

    def __str__(self) -> str:
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
        return self.cluster_m * self.cluster_n


def store_columns(out_dtype: torch.dtype) -> int:
    return SWIZZLE_BYTES // out_dtype.itemsize


def smem_bytes(config: HopperConfig, elem_bytes: int) -> int:
    stage = (config.tile_m + config.tile_n) * config.tile_k * elem_bytes
    return config.num_stages * stage + config.consumers * config.store_stages * STORE_BYTES + BARRIER_BYTES


def why_unsupported(problem: GemmProblem, config: HopperConfig | None, promote: bool = False) -> str | None:
    """Why the Hopper GEMM kernel cannot do this problem with this configuration (None: the default), or None.

    promote: FP8 with the sum moved to float32 registers every 128 k.
    Alignment and strides are not part of a problem: the launcher copies an operand that TMA cannot address.
    """
    if problem.layout not in ("TN", "NN", "NT"):
        return f"layout {problem.layout!r}: the kernel has TN, NN and NT"
    if (reason := problem.why_refused()) is not None:
        return reason
    if problem.a_dtype in FP8 and problem.b_dtype in FP8:
        if problem.layout != "TN":
            return f"layout {problem.layout} with FP8 operands: wgmma reads 8-bit operands with K contiguous only"
    elif problem.a_dtype != problem.b_dtype or problem.a_dtype not in DTYPES:
        return (
            f"operands are {problem.a_dtype} and {problem.b_dtype}: the kernel takes bfloat16 or float16, one for both, "
            "or float8_e4m3fn and float8_e5m2"
        )
    if problem.out_dtype not in OUTPUTS:
        return f"out is {problem.out_dtype}: the kernel writes float32, bfloat16 and float16"
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
    return _why_config_unsupported(config, problem.a_dtype.itemsize, problem.out_dtype, promote)


def _why_config_unsupported(config: HopperConfig, elem_bytes: int, out_dtype: torch.dtype, promote: bool) -> str | None:
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
    ):
        value = getattr(config, name)
        if not isinstance(value, int) or value < 1:
            return f"{name}={value!r}: an int of at least 1 is needed"
    if config.schedule not in ("cooperative", "pingpong"):
        return f"schedule {config.schedule!r}: there are cooperative and pingpong"
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
    accumulators = config.warpgroup_m * config.tile_n // 128 * (2 if promote else 1)
    if promote and config.schedule == "pingpong":
        return "pingpong with promotion: the additions need another warpgroup's products beside them"
    if accumulators > MAX_ACCUMULATORS:
        return f"{accumulators} accumulators per thread: at most {MAX_ACCUMULATORS}"
    if config.consumers == 3 and accumulators > 128:
        return f"{accumulators} accumulators per thread: three consumer warpgroups leave room for 128"
    if config.num_stages < 2:
        return f"num_stages={config.num_stages}: a tile is loaded while another is multiplied, so at least 2"
    if config.cluster_m not in (1, 2, 4) or config.cluster_n not in (1, 2, 4) or config.cluster_size > 4:
        return f"cluster {config.cluster_m}x{config.cluster_n}: powers of two, at most 4 CTAs"
    if (config.tile_m // 64) % config.cluster_n or (config.tile_n // 64) % config.cluster_m:
        return f"cluster {config.cluster_m}x{config.cluster_n}: each CTA loads its share of a tile in slices of 64 rows"
    if config.along not in ("m", "n"):
        return f"bands along {config.along!r}: along m or n"
    buffers = config.warpgroup_m // STORE_ROWS * (config.tile_n // store_columns(out_dtype))
    if buffers % config.store_stages:
        return (
            f"store_stages={config.store_stages}: it must divide the {buffers} buffers that a warpgroup stores per tile"
        )
    smem = smem_bytes(config, elem_bytes)
    if smem > SMEM_BYTES:
        return f"{smem} bytes of shared memory: a CTA has {SMEM_BYTES}"
    return None


# The tiles that the default is chosen from. Left out, because they won nowhere by more than noise on the 81 LLM shapes
# (docs/hopper.md): 128x256 cooperative, 192x128 with three consumers, 64x256 pingpong, other band widths.
WIDE = HopperConfig(256, 128, cluster_m=1, cluster_n=2)
SQUARE = HopperConfig(128, 128, schedule="pingpong", num_stages=6)
LONG = HopperConfig(128, 192, schedule="pingpong", cluster_m=1, cluster_n=2)
HUGE = HopperConfig(256, 192, num_stages=3, cluster_m=1, cluster_n=2)
HALF = HopperConfig(128, 64, schedule="pingpong", num_stages=8, cluster_m=1)
LOW = HopperConfig(64, 128, schedule="pingpong", num_stages=8, cluster_m=1)
SMALL = HopperConfig(64, 64, schedule="pingpong", num_stages=12, store_stages=1, cluster_m=1)
_CANDIDATES = (WIDE, SQUARE, LONG, HUGE, HALF, LOW, SMALL)
# With promotion, which doubles the accumulators.
PROMOTING_LONG = HopperConfig(128, 192, store_stages=3, cluster_m=1, cluster_n=2)
PROMOTING_SQUARE = HopperConfig(128, 128, num_stages=6)
PROMOTING_LOW = HopperConfig(64, 128, consumers=1, num_stages=8, cluster_m=1)
_PROMOTING = (PROMOTING_LONG, PROMOTING_SQUARE, PROMOTING_LOW)

# A model of the time, its constants from one H200 (docs/hopper.md). Rates are relative to WIDE on full waves.
_SM_FLOPS = 5.9e12  # of WIDE's main loop, per SM and second
_STORE_SECONDS = 0.8e-6  # of a 256x128 tile, where nothing else runs meanwhile
_RATES = {HALF: 0.58, LOW: 0.56, SMALL: 0.42, PROMOTING_SQUARE: 0.92, PROMOTING_LOW: 0.4}
# SQUARE hides its stores and reads more shared memory per product than WIDE. The first outweighs the second where tiles
# are short and the chip is at its power limit, which a BF16 call of less than half a millisecond does not bring it to.
_SQUARE_K_BYTES = 16384  # at most
_SQUARE_VOLUME = 2.4e11  # M * N * K, at least, where operands have two bytes
# Over many long tiles CTAs drift apart and share less through L2; the larger a tile, the less it needs to.
# M * N * K * sqrt(bytes of K / 16384) from where SQUARE and LONG lose to WIDE, and WIDE to HUGE.
_DRIFT_VOLUMES = 6e12, 2.5e13


@functools.lru_cache(maxsize=4096)
def candidates(problem: GemmProblem, promote: bool = False) -> tuple[HopperConfig, ...]:
    """The configurations that the default is chosen from, those that this problem allows."""
    tile_k = SWIZZLE_BYTES // problem.a_dtype.itemsize
    tiles = [replace(config, tile_k=tile_k) for config in (_PROMOTING if promote else _CANDIDATES)]
    return tuple(config for config in tiles if why_unsupported(problem, config, promote) is None)


def _rate(problem: GemmProblem, config: HopperConfig) -> float:
    config = replace(config, tile_k=WIDE.tile_k)
    volume = problem.M * problem.N * problem.K
    k_bytes = problem.K * problem.a_dtype.itemsize
    drift = volume * (k_bytes / 16384) ** 0.5
    short = k_bytes <= _SQUARE_K_BYTES and (volume >= _SQUARE_VOLUME or problem.a_dtype in FP8)
    if config == HUGE:
        return 1.02 if drift > _DRIFT_VOLUMES[1] else 0.97
    if config in (SQUARE, LONG) and drift > _DRIFT_VOLUMES[0]:
        return 0.8
    if config == SQUARE:
        return 1.01 if short else 0.97
    if config == LONG:
        return 0.98 if short else 0.95
    return _RATES.get(config, 1.0)


def _seconds(problem: GemmProblem, config: HopperConfig) -> tuple[float, int]:
    """(modelled time of the busiest CTA, its tiles)."""
    clusters = NUM_SMS // config.cluster_size
    tiles = -(-problem.M // (config.tile_m * config.cluster_m)) * -(-problem.N // (config.tile_n * config.cluster_n))
    per_cta = -(-tiles // clusters)
    area = config.tile_m * config.tile_n
    k_steps = -(-problem.K // config.tile_k)
    multiply = 2 * area * k_steps * config.tile_k / (_SM_FLOPS * _rate(problem, config))
    store = _STORE_SECONDS * area / (256 * 128)
    # Pingpong hides every store but the last behind the other warpgroup's products.
    stores = per_cta if config.schedule == "cooperative" else 1
    return per_cta * multiply + stores * store, per_cta


@functools.lru_cache(maxsize=4096)
def default_config(problem: GemmProblem, promote: bool = False) -> tuple[HopperConfig, list[str]]:
    """The candidate of least modelled time, and why."""
    modelled = {config: _seconds(problem, config) for config in candidates(problem, promote)}
    best = min(modelled, key=lambda config: modelled[config][0])
    seconds, per_cta = modelled[best]
    reasons = [f"least modelled time of {len(modelled)} tiles: {seconds * 1e6:.1f} us, {per_cta} tiles per CTA"]
    for config, (other, _) in modelled.items():
        if config != best and other < 1.1 * seconds:
            reasons.append(f"{config.tile_m}x{config.tile_n} {config.schedule}: {other * 1e6:.1f} us")
    return best, reasons
