"""
Writes the generated tables of the docs: `uv run python -m docs.reference`.

The tables are the flags in `docs/reference.md`, TRL's names in `docs/trl.md`, and the models that
each Mac can train in `docs/memory.md`. Each page has its tables between two marks; the rest of the
page is written by hand. A test fails if a table is out of date, or if a run writes a metric that
`docs/reference.md` does not explain.
"""

import itertools
from collections.abc import Iterable
from pathlib import Path
from unittest import mock

import cpu_blas  # noqa: F401  (before mlx)
import mlx.core as mx

from config import SETTINGS
from flags import Setting, flag_of
from forecast import memory_estimate, time_estimate
from machine import chips, gpu
from settings.sources import COMMAND
from text.foreign_names import load_foreign_names

PAGE = Path(__file__).with_name("reference.md")
TRL = Path(__file__).with_name("trl.md")
MEMORY = Path(__file__).with_name("memory.md")
MAC_MEMORY_GB = (8, 16, 24, 32, 64)  # GiB
BEGIN = "by `uv run python -m docs.reference`. -->\n"
END = "\n<!-- end -->"


def code_list(names: Iterable[str]) -> str:
    """The names in Markdown's code font, separated by commas."""
    return ", ".join(f"`{name}`" for name in names)


def table_row(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


def section(title: str, header: list[str], rows: list[str]) -> list[str]:
    """The lines of a section that is one Markdown table."""
    return ["", title, "", table_row(header), "|---" * len(header) + "|", *rows]


def filled_page(path: Path, lines: list[str]) -> str:
    """The text of a page, with these lines between its marks."""
    before, begin, rest = path.read_text(encoding="utf-8").partition(BEGIN)
    _, end, after = rest.partition(END)
    return before + begin + "\n".join(lines) + "\n" + end + after


# ---- flags


def flag_row(setting: Setting) -> str:
    """One row of a table of flags: name, default, meaning."""
    meaning = setting.field.metadata["help"]
    if setting.choices:
        meaning += f" ({code_list(setting.choices)})"
    default = f"`{setting.shown_default}`" if setting.shown_default else ""
    return table_row([f"`{flag_of(setting.key)}`", default, meaning])


def flags_page() -> str:
    """`docs/reference.md` with its tables of flags."""
    rows = []
    for name, (metavar, text) in COMMAND.items():
        usage = f"{flag_of(name)} {metavar}".strip()
        rows.append(table_row([f"`{usage}`", text]))
    lines = section("### The command", ["flag", "meaning"], rows)
    for title, settings in itertools.groupby(SETTINGS.values(), key=lambda setting: setting.title):
        rows = [flag_row(setting) for setting in settings]
        lines += section(f"### {title}", ["flag", "default", "meaning"], rows)
    return filled_page(PAGE, lines)


# ---- TRL's names


def trl_page() -> str:
    """`docs/trl.md` with its tables of TRL's and PEFT's names."""
    lines = []
    for title, names in load_foreign_names().items():
        if title in ("values", "older names"):  # only the command answers them
            continue
        heading = f"## {title[0].upper()}{title[1:]}"
        lines += section(heading, ["name", "here"], rename_rows(names))
        for kind in ("same", "missing"):
            of_kind = [name for name, row in names.items() if row[0] == kind]
            if of_kind:
                lines += ["", f"{kind.capitalize()}: {code_list(of_kind)}."]
    return filled_page(TRL, lines)


def rename_rows(names: dict[str, tuple[str, str]]) -> list[str]:
    """Rows of the names that Gwen calls otherwise. Neighbours with one name in Gwen share a row."""
    gwen_names = {}
    for name, (kind, advice) in names.items():
        if kind == "renamed":
            gwen_names[name] = advice.partition(";")[0]
    groups = itertools.groupby(gwen_names, key=gwen_names.__getitem__)
    return [table_row([code_list(group), gwen_name]) for gwen_name, group in groups]


# ---- models that fit


def memory_page() -> str:
    """`docs/memory.md` with the models that each Mac can train, by the memory estimate of a run."""
    needs = [memory_needs(memory_gb) for memory_gb in MAC_MEMORY_GB]
    rows = []
    for name in needs[-1]:  # the largest Mac trains all of them
        rows.append(table_row([name, *(need.get(name, "") for need in needs)]))
    header = ["model", *map(str, MAC_MEMORY_GB)]
    return filled_page(MEMORY, section("### GB, by the memory of the Mac", header, rows))


def memory_needs(memory_gb: int) -> dict[str, str]:
    """The GB that training takes, for each model that fits into a Mac with this memory."""
    chip = next(chip for chip in chips.load_chips() if chip.name == "M4")
    with mock.patch.object(gpu, "on_gpu", lambda: True):
        limit = memory_estimate.gpu_memory_limit(memory_gb << 30)
        models = list(time_estimate.models_that_fit(limit, chip, mx.float16))
    return {name: f"{num_bytes / 1e9:.1f}" for name, num_bytes, _ in models}


if __name__ == "__main__":
    PAGE.write_text(flags_page(), encoding="utf-8")
    TRL.write_text(trl_page(), encoding="utf-8")
    MEMORY.write_text(memory_page(), encoding="utf-8")
