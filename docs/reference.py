"""
Writes the tables of flags in `docs/reference.md` and those of TRL's names in `docs/trl.md`: `uv run python -m
docs.reference`.

They stand between two marks; the rest of both pages is written by hand. A test fails when a table is out of date or a
run writes a metric that `docs/reference.md` does not explain.
"""

import itertools
from pathlib import Path

import cpu_blas  # noqa: F401  (before mlx)

from config import SETTINGS  # all that the reference knows of the code, besides how a flag is read
from flags import Setting, choices_of, flag_of, foreign_names

PAGE, TRL = (Path(__file__).with_name(name) for name in ("reference.md", "trl.md"))
BEGIN, END = "by `uv run python -m docs.reference`. -->\n", "\n<!-- end -->"


def flag_row(setting: Setting) -> str:
    """One row of a table of flags: name, default, meaning."""
    value, field = setting.default, setting.field
    if field.type is bool:
        value = "on" if value else "off"
    elif setting.is_automatic:
        value = "auto"
    elif isinstance(value, list):
        value = " ".join(value)
    default = f"`{value}`" if value not in (None, "", {}) else ""
    meaning = field.metadata["help"]
    if choices := choices_of(field.type):
        meaning += f" ({', '.join(f'`{choice}`' for choice in choices)})"
    return f"| `{flag_of(setting.key)}` | {default} | {meaning} |"


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


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
    TRL.write_text(trl_page(), encoding="utf-8")
