"""
Writes the tables of flags in `docs/reference.md`, those of TRL's names in `docs/trl.md` and those of what fits in
`docs/memory.md`: `uv run python -m docs.reference`.

They stand between two marks; the rest of the pages is written by hand. A test fails when a table is out of date or a
run writes a metric that `docs/reference.md` does not explain.
"""

import itertools
from collections.abc import Iterable
from pathlib import Path
from unittest import mock

import cpu_blas  # noqa: F401  (before mlx)
import mlx.core as mx

import preflight
from config import SETTINGS
from flags import Setting, flag_of, foreign_names
from machine import chips, gpu

PAGE, TRL, MEMORY = (Path(__file__).with_name(name) for name in ("reference.md", "trl.md", "memory.md"))
SIZES, CHIPS = (8, 16, 24, 32, 64), "M1, M2, M3, M4, M5, M4 Pro, M5 Pro, M4 Max, M5 Max".split(", ")
BEGIN, END = "by `uv run python -m docs.reference`. -->\n", "\n<!-- end -->"


def flag_row(setting: Setting) -> str:
    """One row of a table of flags: name, default, meaning."""
    meaning, default = setting.field.metadata["help"], setting.shown_default
    if setting.choices:
        meaning += f" ({', '.join(f'`{choice}`' for choice in setting.choices)})"
    return f"| `{flag_of(setting.key)}` | {f'`{default}`' if default else ''} | {meaning} |"


def section(title: str, header: list[str], rows: list[str]) -> list[str]:
    """The lines of a section that is one Markdown table."""
    return ["", title, "", f"| {' | '.join(header)} |", "|---" * len(header) + "|", *rows]


def filled(path: Path, lines: list[str]) -> str:
    """A page with these lines between its marks."""
    before, begin, rest = path.read_text(encoding="utf-8").partition(BEGIN)
    _, end, after = rest.partition(END)
    return before + begin + "\n".join(lines) + "\n" + end + after


def page() -> str:
    """The whole of `docs/reference.md`."""
    lines = []
    for title, settings in itertools.groupby(SETTINGS.values(), key=lambda setting: setting.title):
        lines += section(f"### {title}", ["flag", "default", "meaning"], [flag_row(one) for one in settings])
    return filled(PAGE, lines)


def trl_page() -> str:
    """The whole of `docs/trl.md`."""
    lines = []
    for title, names in foreign_names().items():
        useful = {name: meaning for name, meaning in names.items() if meaning[0] in ("same", "renamed")}
        rows = [
            f"| {', '.join(f'`{name}`' for name in alike)} | {said or kind} |"
            for (kind, said), alike in itertools.groupby(useful, key=lambda name: useful[name])
        ]
        if title == "older names":  # of Gwen itself and of others: the command answers them
            continue
        lines += section(f"## {title[0].upper()}{title[1:]}", ["name", "here"], rows)
        if absent := [f"`{name}`" for name, (kind, _) in names.items() if kind == "missing"]:
            lines += ["", f"Missing: {', '.join(absent)}."]
    return filled(TRL, lines)


def memory_page() -> str:
    """The whole of `docs/memory.md`: what each Mac trains, by the estimate that a run prints."""
    known = {chip.name: chip for chip in chips.load()}

    def fits(gigabytes: int, chip: chips.Chip) -> dict[str, preflight.Fit]:
        return {fit.model: fit for fit in preflight.fits(preflight.room_of(gigabytes << 30), chip, mx.float16)}

    with mock.patch.object(gpu, "on_gpu", lambda: True):
        by_size = [fits(size, known["M4"]) for size in SIZES]
        by_chip = [fits(max(known[name].memory) >> 30, known[name]) for name in CHIPS]
    models = by_size[-1]
    needs = [[one[model].cells[0] if model in one else "" for one in by_size] for model in models]
    times = [[one[model].cells[1] if model in one else "" for one in by_chip] for model in models]
    lines = section("### GB, by the memory of the Mac", ["model", *map(str, SIZES)], rows_of(models, needs))
    return filled(MEMORY, lines + section("### Seconds a step, by chip", ["model", *CHIPS], rows_of(models, times)))


def rows_of(names: Iterable[str], cells: list[list[str]]) -> list[str]:
    return [f"| {' | '.join([name, *its])} |" for name, its in zip(names, cells, strict=True)]


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
    TRL.write_text(trl_page(), encoding="utf-8")
    MEMORY.write_text(memory_page(), encoding="utf-8")
