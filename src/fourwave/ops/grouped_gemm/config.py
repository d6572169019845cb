"""Tunables of the CDNA grouped GEMM kernels."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class GroupedConfig:
    """tile_*: output tile and reduction step of a workgroup; waves_m x waves_n = 4 waves share it.

    num_stages  LDS buffers per operand
    group_m     rows of tiles in a band that neighbouring workgroups walk through together (L2 reuse)
    """

    tile_m: int = 128
    tile_n: int = 128
    tile_k: int = 128
    num_stages: int = 4
    waves_m: int = 2
    waves_n: int = 2
    group_m: int = 8
