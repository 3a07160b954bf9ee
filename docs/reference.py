"""
Writes the generated tables into three pages of the docs: `uv run python -m docs.reference`.

The tables list the flags (`docs/reference.md`), the names that TRL and PEFT use for Gwen's settings
(`docs/trl.md`), and the models that each Mac can train (`docs/memory.md`). Each page has its
generated tables between two HTML comments; the rest of the page is written by hand. A test fails if
a table is out of date, or if a run writes a metric that `docs/reference.md` does not explain.
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


def markdown_code_list(names: Iterable[str]) -> str:
    """The names in Markdown's code font, separated by commas: "`a`, `b`"."""
    return ", ".join(f"`{name}`" for name in names)


def markdown_table_row(cells: Iterable[str]) -> str:
    """One row of a Markdown table, with these cells."""
    return f"| {' | '.join(cells)} |"


def table_section_lines(title: str, header: list[str], rows: list[str]) -> list[str]:
    """The lines of a section of a page: the title, and a Markdown table below it."""
    return ["", title, "", markdown_table_row(header), "|---" * len(header) + "|", *rows]


def page_with_generated_lines(path: Path, lines: list[str]) -> str:
    """The text of a page after its generated part is replaced by these lines."""
    before, begin, rest = path.read_text(encoding="utf-8").partition(BEGIN)
    _, end, after = rest.partition(END)
    return before + begin + "\n".join(lines) + "\n" + end + after


# ---- flags


def flag_table_row(setting: Setting) -> str:
    """The row of a flag in a Markdown table of flags: name, default, meaning."""
    meaning = setting.field.metadata["help"]
    if setting.choices:
        meaning += f" ({markdown_code_list(setting.choices)})"
    default = f"`{setting.default_as_text}`" if setting.default_as_text else ""
    return markdown_table_row([f"`{flag_of(setting.key)}`", default, meaning])


def flags_page_text() -> str:
    """The text of `docs/reference.md` with up-to-date tables of flags."""
    rows = []
    for name, (metavar, text) in COMMAND.items():
        usage = f"{flag_of(name)} {metavar}".strip()
        rows.append(markdown_table_row([f"`{usage}`", text]))
    lines = table_section_lines("### The command", ["flag", "meaning"], rows)
    for title, settings in itertools.groupby(SETTINGS.values(), key=lambda setting: setting.title):
        rows = [flag_table_row(setting) for setting in settings]
        lines += table_section_lines(f"### {title}", ["flag", "default", "meaning"], rows)
    return page_with_generated_lines(PAGE, lines)


# ---- TRL's names


def trl_page_text() -> str:
    """The text of `docs/trl.md` with up-to-date tables of TRL's and PEFT's names."""
    lines = []
    for title, names in load_foreign_names().items():
        if title in ("values", "older names"):  # these names are not listed on the page
            continue
        rows = renamed_setting_rows(names)
        lines += table_section_lines(f"## {title}", ["name", "here"], rows)
        for kind in ("same", "missing"):
            of_kind = [name for name, row in names.items() if row[0] == kind]
            if of_kind:
                lines += ["", f"{kind.capitalize()}: {markdown_code_list(of_kind)}."]
    return page_with_generated_lines(TRL, lines)


def renamed_setting_rows(foreign_names: dict[str, tuple[str, str]]) -> list[str]:
    """
    The table rows for the TRL and PEFT settings that have a different name in Gwen.

    Consecutive settings that correspond to the same Gwen setting share a row.
    """
    gwen_names = {}
    for name, (kind, advice) in foreign_names.items():
        if kind == "renamed":
            gwen_names[name] = advice.partition(";")[0]
    groups = itertools.groupby(gwen_names, key=gwen_names.__getitem__)
    return [
        markdown_table_row([markdown_code_list(group), gwen_name]) for gwen_name, group in groups
    ]


# ---- models that fit


def memory_page_text() -> str:
    """The text of `docs/memory.md` with an up-to-date table of the models that fit each Mac."""
    needs = [training_gigabytes_of_fitting_models(memory_gb) for memory_gb in MAC_MEMORY_GB]
    rows = []
    for name in needs[-1]:  # the largest Mac can train every model in the table
        rows.append(markdown_table_row([name, *(need.get(name, "") for need in needs)]))
    header = ["model", *map(str, MAC_MEMORY_GB)]
    return page_with_generated_lines(
        MEMORY,
        table_section_lines("### GB that training needs, by the Mac's memory in GB", header, rows),
    )


def training_gigabytes_of_fitting_models(memory_gb: int) -> dict[str, str]:
    """The estimated GB that training needs, for each model that fits a Mac with this memory."""
    chip = next(chip for chip in chips.load_chips() if chip.name == "M4")
    with (
        mock.patch.object(gpu, "on_gpu", lambda: True),
        mock.patch.object(gpu, "can_run_metal_kernels", lambda: True),
    ):
        limit = memory_estimate.gpu_memory_limit(memory_gb << 30)
        models = list(time_estimate.find_models_that_fit(limit, chip, mx.float16))
    return {name: f"{num_bytes / 1e9:.1f}" for name, num_bytes, _ in models}


if __name__ == "__main__":
    PAGE.write_text(flags_page_text(), encoding="utf-8")
    TRL.write_text(trl_page_text(), encoding="utf-8")
    MEMORY.write_text(memory_page_text(), encoding="utf-8")
