"""Copies may complete late, early or at random and waves may take turns in any order: no bit that a kernel writes may depend on it.

A choice of kernels; test_faults.py does it for every one.
"""

from __future__ import annotations

import ctypes
import re
from typing import Any

import pytest
from every_kernel import ARCHS, KernelCall, calls, sessions
from faults import forget_kernels, full_name

from fourwave import sim
from fourwave.sim.harness import ORDERS, Orders
from fourwave.sim.launch import Memory
from fourwave.sim.report import Report

pytestmark = pytest.mark.skipif(sim.unavailable() is not None, reason=f"no simulator: {sim.unavailable()}")

QUICK = (
    r"gfx950 gemm (bf16|fp8) TN 16x64x|gfx942 gemm (bf16|mxfp8|blocks) TN (16|32)x"
    r"|gfx950 (grouped bf16 forward 16x128x64$|quantize 78x146 float16, mxfp8_e4m3)"
)
SLOW = (
    r"gfx9.* gemm \w+( preshuffled)? (TN|NT) (16|32)x|.* gemm (split-K|epilogue): |gfx1250 gemm .* (32x256|32 rows)$"
    r"|.* grouped .* 16x128x\d+( split_k 2)?$|.* quantize 78x146 float16, "
)


def chosen() -> list[Any]:
    """A few at once, small tiles of every kind in slow tests."""
    return [
        pytest.param(call, id=full_name(call), marks=() if re.match(QUICK, full_name(call)) else (pytest.mark.slow,))
        for arch in ARCHS
        for call in calls(arch)
        if re.match(QUICK, full_name(call)) or re.match(SLOW, full_name(call))
    ]


@pytest.mark.parametrize("call", chosen())
def test_orders_do_not_change_a_bit(call: KernelCall) -> None:
    assert {completion for completion, _ in ORDERS} == {"late", "early", "random"}
    orders = Orders()
    with sessions(harness=orders):
        wrong = call.run()
    forget_kernels()
    assert orders.launches and not wrong
    assert not orders.differences


def test_what_depends_on_the_order_is_told() -> None:
    """Copies that nothing waits for, and waves that race: the bytes and the findings are named."""
    memory_bytes = bytearray(8)
    address = ctypes.addressof((ctypes.c_char * 8).from_buffer(memory_bytes))

    class Prepared:
        def encode(self) -> str:
            return "program"

    def simulate(program: str, completion: str = "late", schedule: str = "forward") -> Report:
        memory_bytes[0] += 1 + (completion == "early") + (schedule == "reverse")
        return Report()

    orders = Orders()
    orders("kernel", 0, lambda: (Prepared(), {}), simulate, Memory([(address, address + 8)]))  # type: ignore[arg-type, return-value]
    assert memory_bytes[0] == 1, "the launch's own result stays"
    assert len(orders.differences) == 5
    assert orders.differences[0] == "kernel, completion late, schedule reverse: 1 bytes differ"
