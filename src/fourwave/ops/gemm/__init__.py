"""GEMM: out[M, N] = act(alpha * op(a) @ op(b) + bias) (+ out). Public: fourwave.gemm, fourwave.explain."""
