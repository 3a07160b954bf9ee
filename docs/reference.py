"""
Writes the tables of flags in `docs/reference.md`, those of TRL's names in `docs/trl.md` and those of what fits in
`docs/memory.md`: `uv run python -m docs.reference`.

They stand between two marks; the rest of the pages is written by hand. A test fails when a table is out of date or a
run writes a metric that `docs/reference.md` does not explain.
"""

import itertools
from pathlib import Path
from unittest import mock

import cpu_blas  # noqa: F401  (before mlx)
import mlx.core as mx

import preflight
from config import SETTINGS
from flags import Setting, flag_of, load_foreign_names
from machine import chips, gpu
from settings.sources import COMMAND

PAGE, TRL, MEMORY = (
    Path(__file__).with_name(name) for name in ("reference.md", "trl.md", "memory.md")
)
SIZES = (8, 16, 24, 32, 64)
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


def fill_page(path: Path, lines: list[str]) -> str:
    """A page with these lines between its marks."""
    before, begin, rest = path.read_text(encoding="utf-8").partition(BEGIN)
    _, end, after = rest.partition(END)
    return before + begin + "\n".join(lines) + "\n" + end + after


def page() -> str:
    rows = [
        f"| `{f'{flag_of(name)} {metavar}'.strip()}` | {text} |"
        for name, (metavar, text) in COMMAND.items()
    ]
    lines = section("### The command", ["flag", "meaning"], rows)
    for title, settings in itertools.groupby(SETTINGS.values(), key=lambda setting: setting.title):
        lines += section(
            f"### {title}", ["flag", "default", "meaning"], [flag_row(one) for one in settings]
        )
    return fill_page(PAGE, lines)


def trl_page() -> str:
    lines = []
    for title, names in load_foreign_names().items():
        if title in ("values", "older names"):  # the command answers them
            continue
        renamed = {
            name: said.partition(";")[0]
            for name, (kind, said) in names.items()
            if kind == "renamed"
        }
        alike = itertools.groupby(renamed, key=renamed.__getitem__)
        rows = [f"| {', '.join(f'`{name}`' for name in its)} | {said} |" for said, its in alike]
        lines += section(f"## {title[0].upper()}{title[1:]}", ["name", "here"], rows)
        for kind in ("same", "missing"):
            if its := [f"`{name}`" for name, row in names.items() if row[0] == kind]:
                lines += ["", f"{kind.capitalize()}: {', '.join(its)}."]
    return fill_page(TRL, lines)


def memory_page() -> str:
    """The whole of `docs/memory.md`: what each Mac trains, by the estimate that a run prints."""
    chip = next(one for one in chips.load_chips() if one.name == "M4")
    with mock.patch.object(gpu, "on_gpu", lambda: True):
        found = [
            list(
                preflight.models_that_fit(preflight.gpu_memory_limit(size << 30), chip, mx.float16)
            )
            for size in SIZES
        ]
    needs = [{name: f"{need / 1e9:.1f}" for name, need, _ in fits} for fits in found]
    rows = [
        f"| {' | '.join([name, *(one.get(name, '') for one in needs)])} |" for name in needs[-1]
    ]
    return fill_page(
        MEMORY, section("### GB, by the memory of the Mac", ["model", *map(str, SIZES)], rows)
    )


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
    TRL.write_text(trl_page(), encoding="utf-8")
    MEMORY.write_text(memory_page(), encoding="utf-8")
