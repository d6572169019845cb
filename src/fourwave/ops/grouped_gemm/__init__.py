"""Grouped GEMM: fw.grouped_gemm (api.py), its wgrad, and the kernels behind them."""
