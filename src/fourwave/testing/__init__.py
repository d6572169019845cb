"""Tools for testing GEMM kernels, one's own included: inputs, poisoned buffers, error bounds, shape classes, whole cases.

inputs.spread       operands whose rows and K blocks differ by decades; inputs.view puts them in NaN-padded buffers
buffers.poisoned    an output full of NaN with guard bytes around it
bounds.gemm_bound   how far a right result may be from the float64 truth, element by element
bounds.assert_within  compares every element and names the worst
shapes.GEMM_SHAPES  the shape classes that tests, `fourwave check` and the tuner share
cases.GemmCase      one call of fw.gemm with all of the above
"""

from fourwave.testing import bounds, buffers, cases, inputs, shapes
from fourwave.testing.bounds import assert_within, gemm_bound
from fourwave.testing.cases import CaseResult, GemmCase

__all__ = ["CaseResult", "GemmCase", "assert_within", "bounds", "buffers", "cases", "gemm_bound", "inputs", "shapes"]
