"""The package's own exceptions."""

from __future__ import annotations


class BackendUnavailable(RuntimeError):
    """A backend that the caller named is not installed or has no device; the text names what is missing."""
