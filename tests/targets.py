"""The backends that tests run on, each with the device that its operands live on."""

from __future__ import annotations


class Target:
    """A backend and the device that its operands live on."""

    def __init__(self, backend: str, device: str) -> None:
        self.backend, self.device = backend, device

    @property
    def simulated(self) -> bool:
        return self.backend.startswith("sim")

    def __str__(self) -> str:
        return f"{self.backend}-{self.device}"


TARGETS = [
    Target("native", "cpu"),
    Target("native", "cuda"),
    Target("sim:gfx950", "cpu"),
    Target("sim:gfx942", "cpu"),
    Target("flydsl", "cuda"),
    Target("hopper", "cuda"),
]
