"""The schedule of the gfx1250 GEMM kernel, read from a trace of the simulator: what each step waits for, issues, reads and multiplies.

    steps = trace_steps(problem)
    print(markdown(steps))
    Path("schedule.svg").write_text(svg(steps))

A step of a wave begins at its wait for the data mover (tensorcnt). The simulator lets a tile land as late as its waits allow: at the
wait that needs it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fourwave.ops.gemm.gfx1250_config import Geometry
    from fourwave.ops.gemm.problem import GemmProblem
    from fourwave.sim.report import Event

TENSORCNT = 2
WAVES = 4


@dataclass(frozen=True)
class Place:
    """Where a tile lies in LDS. kind: "stage" of codes, or "page" of scales; operand: "a" or "b"; whole: all of its rows."""

    kind: str
    number: int
    operand: str
    whole: bool = True

    def __str__(self) -> str:
        return f"{self.kind} {self.number}"


@dataclass
class Step:
    """All four waves' step: 0 is the first of the main loop, -1 the prologue.

    waits     tensorcnt's operand
    landed    places whose tiles the step's wait completed, and the step that issued each
    issued    what each wave issued
    read      stages of codes, and pages of scales, that fragments were read from
    products  matrix instructions of a wave, before and after the step's barrier
    """

    number: int
    waits: set[int] = field(default_factory=set)
    landed: dict[str, set[int]] = field(default_factory=dict)
    issued: dict[int, list[Place]] = field(default_factory=dict)
    read: set[str] = field(default_factory=set)
    products: tuple[int, int] = (0, 0)


def trace_steps(problem: GemmProblem) -> list[Step]:
    """Prologue and main loop of the first workgroup. problem: without further outputs, whose epilogue is left out."""
    import torch

    from fourwave import sim
    from fourwave.ops.gemm import amd
    from fourwave.ops.gemm.config import default_config
    from fourwave.ops.gemm.gfx1250_config import geometry
    from fourwave.ops.gemm.problem import GemmTensors

    def zeros(shape: tuple[int, ...] | None, dtype: torch.dtype) -> torch.Tensor | None:
        return None if shape is None else torch.zeros(shape, dtype=torch.uint8).view(dtype)

    def codes(shape: tuple[int, int], dtype: torch.dtype) -> torch.Tensor:
        rows, columns = shape
        return torch.zeros(rows, columns // 2 if dtype == torch.uint8 else columns).to(dtype)

    tensors = GemmTensors(
        codes(problem.a_shape, problem.a_dtype), codes(problem.b_shape, problem.b_dtype),
        torch.empty(problem.M, problem.N, dtype=problem.out_dtype),
        a_scale=zeros(problem.a_scale_shape, torch.float8_e8m0fnu), b_scale=zeros(problem.b_scale_shape, torch.float8_e8m0fnu),
    )  # fmt: skip
    config, _ = default_config(problem, "gfx1250")
    with sim.session(arch="gfx1250", on_finding="raise", trace=True, workgroups=range(1)) as report:
        amd.run(problem, config, "gfx1250", tensors)
    return read_steps(report.launches[0].events, geometry(problem, config))


def read_steps(events: Sequence[Event], geo: Geometry) -> list[Step]:
    """Of a kernel's whole trace: its last wait of each wave before the epilogue is the drain's, which is no step."""
    steps: dict[int, Step] = {}
    now = dict.fromkeys(range(WAVES), -2)  # each wave's step; -2: before the prologue's wait
    passed = dict.fromkeys(range(WAVES), False)  # the step's barrier
    began: dict[tuple[int, int], list[int]] = {}  # steps that issued tiles by wave and address, oldest first
    products = {wave: [0, 0] for wave in range(WAVES)}
    landing: list[tuple[int, str, int]] = []
    for event in events:
        wave = event.wave
        step = steps.setdefault(max(now[wave], -1), Step(max(now[wave], -1)))
        if event.kind == "tile landed" and not event.detail:
            landing.append((wave, str(place_of(event, geo)), began[wave, event.address].pop(0)))
        elif event.kind == "wait" and event.detail == TENSORCNT:
            now[wave] += 1
            passed[wave] = False
            step = steps.setdefault(now[wave], Step(now[wave]))
            step.waits.add(event.address)
            if wave == 0:
                products[0] = [0, 0]
            for _, place, issued in landing:
                step.landed.setdefault(place, set()).add(issued)
            landing = []
        elif event.kind == "barrier":
            passed[wave] = True
        elif event.kind == "tile issued" and not event.detail:
            began.setdefault((wave, event.address), []).append(max(now[wave], -1))
            step.issued.setdefault(wave, []).append(place_of(event, geo))
        elif event.kind == "LDS read" and now[wave] >= -1:
            step.read.add(str(place_of(event, geo)))
        elif event.kind == "matrix" and wave == 0:
            products[0][passed[0]] += 1
            step.products = products[0][0], products[0][1]
    numbers = sorted(number for number, step in steps.items() if number == -1 or step.products != (0, 0))
    return [steps[number] for number in numbers]


def place_of(event: Event, geo: Geometry) -> Place:
    """Of a tile, or of what is read, by its address in LDS."""
    address = event.address
    if address < geo.first_page:
        number, at = divmod(address, geo.stage)
        side = geo.a if at < geo.a.code_bytes else geo.b
        whole = event.bytes == side.stored_rows * side.row_bytes
        return Place("stage", number, "a" if side is geo.a else "b", whole)
    number, at = divmod(address - geo.first_page, geo.page)
    return Place("page", number, "a" if at < geo.a.scale_bytes else "b")


def markdown(steps: Sequence[Step]) -> str:
    """A table, a row for each step."""
    lines = [
        "| step | its wait | completes (issued in step) | multiplies | out of | waves 0 and 1 issue | waves 2 and 3 issue |",
        "|---|---|---|---|---|---|---|",
    ]
    read: set[str] = set()  # in the step before: what this one multiplies
    for step in steps:
        name = "prologue" if step.number < 0 else str(step.number)
        waits = ", ".join(f"tensorcnt {count}" for count in sorted(step.waits))
        landed = "; ".join(
            f"{place} ({', '.join('prologue' if s < 0 else str(s) for s in sorted(since))})" for place, since in sorted(step.landed.items())
        )  # fmt: skip
        before, after = step.products
        products = f"tile {step.number}: {before} + {after} products" if before + after else ""
        issued = ["; ".join(issued_by(step, pair)) for pair in ((0, 1), (2, 3))]
        lines.append(
            f"| {name} | {waits} | {landed} | {products} | {', '.join(sorted(read))} | {issued[0]} | {issued[1]} |"
        )
        read = step.read
    return "\n".join(lines)


def issued_by(step: Step, waves: Sequence[int]) -> list[str]:
    """Equal places of two waves together."""
    found: list[str] = []
    for places in zip(*(step.issued.get(wave, []) for wave in waves), strict=True):
        parts = [
            f"{'' if place.kind == 'page' else 'all of ' if place.whole else 'half of '}{place.operand}" for place in places
        ]  # fmt: skip
        what = "halves of " + places[0].operand if parts[0] == parts[1] and not places[0].whole else ", ".join(parts)
        found.append(f"{'scales of ' if places[0].kind == 'page' else ''}{what}: {places[0]}")
    return found


WIDTH, HEIGHT, LEFT, TOP = 46, 26, 96, 30  # of a step and of a row, and of what is beside and above them, in pixels
LOADING, LANDED, MULTIPLYING = "#9ecae1", "#a1d99b", "#fdae6b"
FIRST_PART = 0.25  # of a step: multiplied before its barrier, after which it issues and reads


def svg(steps: Sequence[Step]) -> str:
    """A figure: for each place in LDS when a tile is on its way and when it is read, and what is multiplied meanwhile."""
    names = sorted({place for step in steps for place in step.landed}, key=lambda name: (name.startswith("page"), name))
    rows = {name: i for i, name in enumerate([*names, "multiplying"])}
    last = steps[-1].number
    width, height = LEFT + (last + 2) * WIDTH + 10, TOP + len(rows) * HEIGHT + 34
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" font-family="sans-serif" font-size="11">',
        f'<rect width="{width}" height="{height}" fill="white"/>',
    ]

    def x(step: float) -> float:
        return LEFT + (step + 1) * WIDTH

    def text(at: float, y: float, words: str, anchor: str = "middle") -> None:
        out.append(f'<text x="{at:g}" y="{y:g}" text-anchor="{anchor}">{words}</text>')

    def bar(name: str, first: float, end: float, color: str, words: str = "") -> None:
        y = TOP + rows[name] * HEIGHT + 3
        size = f'width="{(end - first) * WIDTH:g}" height="{HEIGHT - 6}"'
        out.append(f'<rect x="{x(first):g}" y="{y}" {size} fill="{color}" stroke="#555" stroke-width="0.5"/>')
        if words:
            text((x(first) + x(end)) / 2, y + 14, words)

    for step in steps:
        text(x(step.number + 0.5), 20, "prologue" if step.number < 0 else str(step.number))
        out.append(
            f'<line x1="{x(step.number):g}" y1="24" x2="{x(step.number):g}" y2="{TOP + len(rows) * HEIGHT}" stroke="#ccc"/>'
        )
        for name, since in step.landed.items():
            for issued in since:
                # Landed by the step's wait, read after its barrier, multiplied in the next step.
                began = issued + FIRST_PART if issued >= 0 else -1.0
                landed = step.number if step.number >= 0 else -0.4
                is_code = name.startswith("stage")
                bar(name, began, landed, LOADING, f"tile {step.number + 1}" if is_code and landed - began > 1 else "")
                if is_code:
                    bar(name, max(landed, step.number + FIRST_PART), step.number + 1, LANDED)
        if step.products != (0, 0):
            bar("multiplying", step.number, step.number + 1, MULTIPLYING, str(step.number))
    for name, row in rows.items():
        text(LEFT - 8, TOP + row * HEIGHT + 17, name if name == "multiplying" else f"LDS {name}", "end")
    pages = {name: [s.number for s in steps if name in s.read] for name in names if name.startswith("page")}
    for name, read in pages.items():
        for number in read:
            bar(name, number + FIRST_PART if number >= 0 else -0.4, number + 1, LANDED)
    y = TOP + len(rows) * HEIGHT + 22
    for i, (color, words) in enumerate(
        ((LOADING, "on its way from memory"), (LANDED, "read into registers"), (MULTIPLYING, "tile that is multiplied"))
    ):
        out.append(f'<rect x="{LEFT + i * 190}" y="{y - 10}" width="12" height="12" fill="{color}" stroke="#555"/>')
        text(LEFT + i * 190 + 18, y, words, "start")
    return "\n".join([*out, "</svg>", ""])
