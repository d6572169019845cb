"""The documents: their Python runs and prints what they show, their links lead somewhere, their commands and tables hold."""

import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer

from fourwave import formats
from fourwave.backends import registry
from fourwave.cli.app import app

ROOT = Path(__file__).parents[1]
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").glob("*.md")])
FRAGMENTS = ("docs/simulator.md",)  # its Python is about a kernel that the reader has
FENCE = re.compile(r"^```(\w*)\n(.*?)^```\n", re.MULTILINE | re.DOTALL)
SIM_MISSING = registry.get("sim:gfx950").unavailable()


def name(page: Path) -> str:
    return str(page.relative_to(ROOT))


def snippets():
    """(page, number, code, output shown right after it or None) of each Python fence."""
    for page in PAGES:
        if name(page) in FRAGMENTS:
            continue
        text = page.read_text(encoding="utf-8")
        fences = list(FENCE.finditer(text))
        for number, fence in enumerate(fences):
            if fence[1] != "python":
                continue
            after = fences[number + 1] if number + 1 < len(fences) else None
            shown = after is not None and after[1] == "text" and not text[fence.end() : after.start()].strip()
            yield pytest.param(fence[2], after[2] if shown and after else None, id=f"{name(page)}-{number}")


def comparable(text: str) -> list[str]:
    """Lines without what differs from run to run: durations."""
    return [re.sub(r"\d+\.\d+ s\b", "# s", line.rstrip()) for line in text.strip().splitlines()]


# Runs each folder's reverse.py in a child: one import of PyTorch for all of them, and nothing that one leaves to the next.
RUNNER = """
import os, runpy, sys, traceback
import fourwave

for line in sys.stdin:
    if not (child := os.fork()):
        code = 1
        try:
            os.chdir(line.rstrip("\\n"))
            for number, name in ((1, "out"), (2, "err")):
                os.dup2(os.open(name, os.O_CREAT | os.O_WRONLY | os.O_APPEND), number)
            sys.argv = ["reverse.py"]
            runpy.run_path("reverse.py", run_name="__main__")
            code = 0
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else int(end.code is not None)
        except BaseException:
            traceback.print_exc()
        sys.stdout.flush()
        os._exit(code)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


@pytest.fixture(scope="module")
def runner():
    with subprocess.Popen(
        [sys.executable, "-c", RUNNER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        yield process
        assert process.stdin is not None
        process.stdin.close()  # its loop ends


@pytest.mark.skipif(SIM_MISSING is not None, reason=f"simulator: {SIM_MISSING}")
@pytest.mark.parametrize(("code", "shown"), list(snippets()))
def test_python_runs_and_prints_what_is_shown(runner, tmp_path, code, shown):
    # A file of its own: FlyDSL reads a kernel's source. The simulator names it in its findings.
    (tmp_path / "reverse.py").write_text(code, encoding="utf-8")
    print(tmp_path, file=runner.stdin, flush=True)
    status = runner.stdout.readline().strip()
    out, errors = ((tmp_path / name).read_text(encoding="utf-8") for name in ("out", "err"))
    assert status == "0", errors
    assert "False" not in out or shown is not None
    if shown is not None:
        assert comparable(out) == comparable(shown)


def test_there_are_snippets():
    assert len(list(snippets())) >= 3


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_links_lead_to_files(page):
    for link in re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text(encoding="utf-8")):
        if not link.startswith("https://"):
            assert (page.parent / link).exists(), link


def commands():
    """Each `fourwave ...` line of a shell fence."""
    for page in PAGES:
        for fence in FENCE.finditer(page.read_text(encoding="utf-8")):
            if fence[1] in ("", "sh"):
                for line in fence[2].splitlines():
                    match = re.match(r"(?:\$ )?(?:.*\| *)?(?:[A-Z_]+=\S+ )?fourwave (.*)", line)
                    if match:
                        yield pytest.param(match[1].partition("  #")[0], id=f"{name(page)}: {match[0][:60]}")


@pytest.mark.parametrize("line", list(commands()))
def test_commands_take_these_options(line):
    """Parses each command without running it: an unknown command or option, or a value that does not fit, raises."""
    words = shlex.split(line)
    command: Any = typer.main.get_command(app)
    while words and words[0] in getattr(command, "commands", ()):
        command = command.commands[words.pop(0)]
    if words not in (["--help"], ["--version"]):
        command.make_context("fourwave", words)


def test_every_command_is_in_the_reference():
    text = (ROOT / "docs" / "cli.md").read_text(encoding="utf-8")
    for command in ("demo", "check", "doctor", "explain", "sim", "bench sim"):
        assert f"## fourwave {command}" in text
    root: Any = typer.main.get_command(app)
    for leaf in (*root.commands.values(), *root.commands["bench"].commands.values()):
        for parameter in leaf.params:
            for option in parameter.opts:
                if option.startswith("--") and option != "--help":
                    assert f"`{option}" in text, f"{leaf.name} {option}"


def table_value(text: str) -> float:
    """448, 2⁻⁶ or 3.3895·10³⁸ as a number."""
    plain = text.translate(str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁻−", "0123456789--"))
    if text[0] == "2" and len(text) > 1 and text[1] in "⁰¹²³⁴⁵⁶⁷⁸⁹⁻":
        return 2.0 ** int(plain[1:])
    mantissa, _, power = plain.partition("·10")
    return float(mantissa) * 10.0 ** int(power or 0)


def test_format_table_is_what_the_code_has():
    rows = re.findall(
        r"^\| `(\w+)` \|(.*)\|$", (ROOT / "docs" / "formats.md").read_text(encoding="utf-8"), re.MULTILINE
    )
    assert [row[0] for row in rows] == [fmt.name for fmt in formats.ALL]
    for format_name, rest in rows:
        fmt = formats.get(format_name)
        bits, fields, bias, largest, normal, subnormal, inf, nan, negative_zero, *_ = (
            c.strip() for c in rest.split("|")
        )
        assert int(bits) == fmt.bits and int(bias) == fmt.bias
        assert fields == f"{int(fmt.has_sign)}, {fmt.exponent_bits}, {fmt.mantissa_bits}"
        assert table_value(largest) == pytest.approx(fmt.max, rel=1e-4)
        assert table_value(normal) == fmt.smallest_normal
        assert (subnormal == "none") is (not fmt.has_zero)
        if fmt.has_zero:
            assert table_value(subnormal) == fmt.smallest
        assert (inf == "none") is (not fmt.has_inf) and (nan == "none") is (not fmt.has_nan)
        if fmt.has_inf:
            assert int(inf.split(",")[0], 16) == fmt.inf_code
        assert (negative_zero == "none") is (not fmt.has_negative_zero)
