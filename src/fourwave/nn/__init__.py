"""Modules that train in FP8, MXFP8 and MXFP4. docs/modules.md, docs/recipes.md."""

from fourwave.nn.base import QuantizedModule, prepare
from fourwave.nn.context import autocast, checkpoint
from fourwave.nn.linear import Linear

__all__ = ["Linear", "QuantizedModule", "autocast", "checkpoint", "prepare"]
