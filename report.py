"""
Shows runs: `uv run report.py runs/NAME` writes the page runs/NAME/report.html.

A browser can open the page from disk. Several runs share one page, which is written beside the
first run. `--compare` and `--list` print tables in the terminal. A directory of seeds stands for
the runs in it. This file does not cover the content of the page (reporting/page.py).
"""

import sys
from pathlib import Path

import cpu_blas  # noqa: F401  (before mlx)

from flags import Parser, exit_with_error, refuse_unwritable_file, report_mistakes
from machine.output import guard_output
from prompts.examples import format_error
from reporting import answers, page, seeds, verdict
from reporting.history import History, format_before_after, headline_facts, load_history
from text.printable import escape_invisible, make_printable

# errors that reading a record raises if figures are missing from it
DAMAGE = (LookupError, TypeError, AttributeError, ArithmeticError)
MOST_CHARACTERS = 60  # characters of a setting's value in a table
RUN_COLUMNS = [
    "run",
    "task",
    "model",
    "steps",
    "before",
    "after",
    "training",
    "warnings",
    "verdict",
]


# ---- tables for the terminal


def format_table(rows: list[list[str]]) -> str:
    """The rows as a table with aligned columns. The first row contains the column names."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=True)]
        lines.append("  ".join(cells).rstrip())
    rule = "  ".join("-" * width for width in widths)
    return "\n".join([lines[0], rule, *lines[1:]])


def compare_runs(names: list[str]) -> str:
    """
    A table of runs side by side: the settings that differ, the figures, costs and warnings.

    If one of the names is a file of answers, the table compares the answers problem by problem.
    """
    if len(names) > 1 and any(Path(name).is_file() for name in names):
        return format_table(answers.compare_answers(names))
    if sum(len(seeds.seed_run_dirs(name)) for name in names) < 2:
        raise ValueError("--compare needs two runs or more, as --compare runs/A runs/B")

    groups = seeds.load_seed_groups(names)
    runs = []
    for _, group_runs in groups:
        runs += group_runs

    rows = [["", *(escape_invisible(run.name) for run in runs)]]
    rows += compare_settings(runs)
    facts = [headline_facts(run) for run in runs]
    fact_names: dict[str, None] = {}  # a set that keeps its order
    for run_facts in facts:
        fact_names |= dict.fromkeys(run_facts)
    for name in fact_names:
        rows.append([name, *(run_facts.get(name, "-") for run_facts in facts)])
    rows.append(["warnings", *(list_warnings(run) for run in runs)])
    return "\n".join([format_table(rows), *seeds.describe_seed_groups(groups)])


def compare_settings(runs: list[History]) -> list[list[str]]:
    """A row for each setting that differs between runs."""
    keys: dict[str, None] = {}  # a set that keeps its order
    for run in runs:
        keys |= dict.fromkeys(run.settings)

    rows = []
    for key in keys:
        values = [escape_invisible(str(run.settings.get(key, "-"))) for run in runs]
        if len(set(values)) > 1:
            flag = f"--{escape_invisible(str(key)).replace('_', '-')}"
            rows.append([flag, *(value[:MOST_CHARACTERS] for value in values)])
    return rows


def list_warnings(run: History) -> str:
    names = [escape_invisible(str(warning["name"])) for warning in run.warnings]
    return ", ".join(names) or "none"


def list_runs(*folders: str | Path) -> str:
    """A table of the runs in these directories, newest last, and a line for each damaged run."""
    paths: list[Path] = []
    for folder in folders:
        paths += Path(folder).glob("*/config.yaml")
        paths += Path(folder).glob("*/seed-*/config.yaml")
    if not paths:
        places = " and ".join(map(str, folders))
        raise ValueError(f"{places}: no runs there; `uv run train.py` makes one")

    rows = [RUN_COLUMNS]
    damaged = []
    for path in sorted(paths, key=lambda path: path.stat().st_mtime):
        try:
            rows.append(describe_run(load_history(path.parent)))
        except DAMAGE as error:
            damaged.append(make_printable(f"{path.parent} is damaged ({format_error(error)})"))
        except (ValueError, OSError) as error:
            damaged.append(make_printable(str(error)))
    return "\n".join([format_table(rows), *damaged])


def describe_run(run: History) -> list[str]:
    """The row of a run in the list of runs."""
    facts = headline_facts(run)
    judgement = verdict.judge_change(run)
    conclusion = "-"
    if judgement:
        conclusion = "; ".join([judgement.headline, *judgement.signs[:2]])
    cells = [
        str(run.dir),
        str(run.settings.get("task", "-")),
        str(run.settings.get("model", "-")),
        facts["steps"],
        *format_before_after(run),
        facts["training"],
        str(len(run.warnings)),
        conclusion,
    ]
    return [escape_invisible(cell) for cell in cells]


# ---- the command


@guard_output()
@report_mistakes()
def main(argv: list[str] | None = None) -> None:
    parser = Parser("report.py", "Write a page about a run, or compare runs in the terminal.")
    parser.add_argument(
        "runs",
        nargs="*",
        metavar="RUN",
        help="a run, or a directory with one run per seed; a page of several runs goes beside the "
        "first run",
    )
    parser.add_argument(
        "--out",
        type=Path,
        metavar="FILE",
        help="write the page to this file "
        "(default: report.html in RUN, or NAME-against-OTHER.html beside it)",
    )
    parser.add_argument(
        "--compare",
        action="store_true",
        help="print what differs between runs, or between files written by evaluate.py --out",
    )
    parser.add_argument(
        "--list", action="store_true", help="list the runs in the directory RUN (default: runs/)"
    )
    parser.add_argument("--open", action="store_true", help="open the page in a browser")
    args = parser.parse_args(sys.argv[1:] if argv is None else argv)
    try:
        if args.list:
            print(list_runs(*args.runs or ["runs"]))
            return
        if not args.runs:
            raise ValueError("name a run, as runs/NAME; --list shows the runs that exist")
        if args.compare:
            print(compare_runs(args.runs))
            return
        make_page(args.runs, args.out, opens=args.open)
    except DAMAGE as error:
        exit_with_error(f"{' or '.join(args.runs)} is damaged ({format_error(error)})")


def make_page(runs: list[str], out: Path | None, *, opens: bool) -> None:
    """Writes one page about the runs, prints its path, and opens it in a browser if `opens`."""
    if out:
        if out.exists() and not out.is_file():  # the finished page is renamed to `out`
            raise ValueError(f"--out {out} is no file; name another")
        refuse_unwritable_file("--out", out)
    path = page.write_page(runs[0], out, runs[1:])
    for line in seeds.describe_seed_groups(seeds.load_seed_groups(runs)):
        print(line)
    print(path)
    if opens:
        page.open_page(path)


if __name__ == "__main__":
    main()
