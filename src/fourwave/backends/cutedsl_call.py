"""Calls a function that CuTe DSL compiled with little host work: DSL's own call converts every argument anew."""

from __future__ import annotations

import ctypes
import struct
import threading
from typing import Any


class PackedCall:
    """A loaded kernel with an argument block for each thread: a call writes the block and jumps.

    The calling convention, one address per argument and one for the result, is that of MLIR's packed interface; the DSL
    version range in pyproject.toml holds it.

    executor   of CuTe DSL: compiled.to(None)
    arguments  name to format (struct's letters) of each run-time argument, in the launcher's order
    """

    def __init__(self, executor: Any, arguments: dict[str, str]) -> None:
        self._executor = executor  # keeps the module loaded
        self._function = executor.capi_func
        self._formats = "".join(arguments.values())
        self._local = threading.local()

    def _block(self) -> tuple[Any, ...]:
        layout = "@" + self._formats
        size = struct.calcsize(layout)
        # The result, an int, after the arguments.
        block = bytearray(size + 8)
        base = ctypes.addressof(ctypes.c_char.from_buffer(block))
        offsets = [
            struct.calcsize("@" + self._formats[: i + 1]) - struct.calcsize(letter)
            for i, letter in enumerate(self._formats)
        ]
        at = -(-size // 4) * 4
        packed = (ctypes.c_void_p * (len(offsets) + 1))(*(base + offset for offset in (*offsets, at)))
        made = struct.Struct(layout).pack_into, block, packed, ctypes.c_int32.from_buffer(block, at)
        self._local.block = made
        return made

    def launch(self, *values: int | float) -> None:
        """Raises RuntimeError when the launch failed."""
        try:
            pack, block, packed, result = self._local.block
        except AttributeError:
            pack, block, packed, result = self._block()
        pack(block, 0, *values)
        self._function(packed)
        if result.value:
            raise RuntimeError(f"the launch failed with CUDA error {result.value}")
