"""Modules that train in FP8, MXFP8 and MXFP4. docs/modules.md, docs/recipes.md."""

from fourwave.nn.base import QuantizedModule, prepare
from fourwave.nn.context import autocast, checkpoint
from fourwave.nn.convert import convert
from fourwave.nn.grouped_linear import GroupedLinear
from fourwave.nn.layernorm_linear import LayerNormLinear
from fourwave.nn.layernorm_mlp import LayerNormMLP
from fourwave.nn.linear import Linear
from fourwave.nn.moe_mlp import MoEMLP

__all__ = [
    "GroupedLinear", "LayerNormLinear", "LayerNormMLP", "Linear", "MoEMLP", "QuantizedModule", "autocast", "checkpoint", "convert",
    "prepare",
]  # fmt: skip
