"""A pytest fixture for tests of FlyDSL kernels: `fourwave_sim`. In the test suite's top conftest.py:

    pytest_plugins = ["fourwave.sim.pytest_plugin"]

(It is not registered for every suite of the environment, since loading it loads PyTorch.) Then, in a test:

    @pytest.mark.fourwave_sim(arch="gfx942", schedule="reverse")     # optional; the options of fourwave.sim.session
    def test_my_kernel(fourwave_sim):
        my_launcher(a, b, out)                                        # CPU tensors
        assert ...
        assert fourwave_sim.launches

The test runs inside a session; it fails at its end if a checker found something, with the findings as the reason. A test that wants to see
findings takes them out of `fourwave_sim.findings`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from .report import Report


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers", "fourwave_sim(arch, **options): how the fourwave_sim fixture simulates (fourwave.sim.session)"
    )


@pytest.fixture
def fourwave_sim(request: pytest.FixtureRequest) -> Iterator[Report]:
    """The Report of a simulator session that the test runs in; findings fail the test. Skips where the simulator cannot run."""
    from fourwave import sim

    marker = request.node.get_closest_marker("fourwave_sim")
    options = dict(marker.kwargs) if marker else {}
    if marker and marker.args:
        options.setdefault("arch", marker.args[0])
    arch = options.get("arch", "gfx950")
    if arch in sim.ARCHS and (reason := sim.unavailable(arch)):  # another arch is a mistake, which the session names
        pytest.skip(f"fourwave.sim cannot run here: {reason}")
    with sim.session(**options) as report:
        yield report
    if report.findings:
        pytest.fail(str(report), pytrace=False)
