"""GEMM: out[M, N] = act(alpha * op(a) @ op(b) + bias) (+ out). The public functions are fourwave.gemm and fourwave.explain."""
