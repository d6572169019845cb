"""The only module that reads environment variables.

FOURWAVE_BACKEND    backend for calls that name none: ``auto`` (default), ``native``, ``flydsl``, ``sim``, ``sim:gfx942``,
                    ``sim:gfx950``, or one per precision, ``bf16=sim,fp32=native``. Read on every call, so a change of
                    ``os.environ`` takes effect at once.
"""

from __future__ import annotations

import os

BACKEND_VARIABLE = "FOURWAVE_BACKEND"


def backend() -> str | None:
    """Value of FOURWAVE_BACKEND, or None when it is unset or empty."""
    return os.environ.get(BACKEND_VARIABLE) or None
