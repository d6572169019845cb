"""The command line, `fourwave`.

app.py      the commands, their options and help texts; imports nothing heavy
console.py  where output goes: results on stdout, progress on stderr, both fit for a pipe
demo.py, check.py, doctor.py, explain.py, bench.py    one command each, imported when it runs

Exit status: 0 right, 1 something measured is wrong (error over bound, findings, cosine), 2 the call cannot run
(bad option, missing package, backend without a device).
"""

from __future__ import annotations


def main() -> None:
    """Entry point of the `fourwave` script."""
    from fourwave.cli.app import app

    app()
