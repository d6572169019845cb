"""One device for the modules of a test and for its inputs.

Without `device=` the modules of fourwave.te are on the GPU where there is one, and most tests' inputs are on the CPU. So for the time of a
test the modules' default is the CPU; what is marked `each_device` runs on a GPU, too, and puts its inputs where the modules are.
"""

from __future__ import annotations

import pytest
import torch

from fourwave.te import distributed, modules

_DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"))]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if metafunc.definition.get_closest_marker("each_device"):
        metafunc.parametrize("_default_device", _DEVICES, indirect=True)


@pytest.fixture(autouse=True)
def _default_device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if getattr(request, "param", "cpu") == "cpu":
        monkeypatch.setattr(modules, "_device", lambda device: device)
        monkeypatch.setattr(distributed, "_random", lambda: torch)
