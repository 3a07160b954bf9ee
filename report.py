"""
Writes a page about runs: `uv run report.py runs/NAME` writes runs/NAME/report.html.

A browser can open the page from disk. If several runs are named, one page shows all of them. This
page is written beside the first run. `--compare` and `--list` print tables in the terminal instead
of writing a page. A directory with one run per seed can be named in place of its runs. This file
does not cover the content of the page (reporting/page.py).
"""

import shlex
import sys
from pathlib import Path

import cpu_blas  # noqa: F401  (before mlx)

from disk import run_changes, run_files
from flags import Parser, exit_on_mistakes, exit_with_error, refuse_unwritable_file
from machine.output import guard_output
from prompts.examples import format_error
from reporting import answers, page, paired, run_table, seeds, verdict
from reporting.history import History, format_figure_before_after, headline_facts, load_history
from reporting.terminal_table import fit_or_transpose_comparison, fit_table, format_table
from text import wrapping
from text.commands import command_prefix
from text.printable import escape_and_redact_for_printing, escape_invisible

# the errors that reading a record raises if figures are missing from the record
DAMAGE = (LookupError, TypeError, AttributeError, ArithmeticError)
MOST_CHARACTERS = 60  # the most characters of a setting's value that a table shows
# Below a comparison that is wider than the terminal, report.py prints the command for a CSV table.
# If the output is not a terminal, the comparison may be this many columns wide.
WIDEST = 160
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


def format_run_comparison(paths: list[str], width: int | None = None) -> str:
    """
    Returns a table of the differing settings, the figures, the costs and the warnings of runs.

    If one of the paths is a file with answers, the table compares the answers problem by problem.
    width: the number of columns of the terminal; None if the output is no terminal, so that
    the table may have any width.
    """
    if len(paths) > 1 and any(Path(path).is_file() for path in paths):
        return fit_table(answers.make_answer_comparison_table(paths), width)
    if sum(len(seeds.run_dirs_of_seeds(path)) for path in paths) < 2:
        raise ValueError("--compare needs at least two runs, for example --compare runs/A runs/B")

    groups = seeds.load_seed_groups(paths)
    runs = []
    for _, group_runs in groups:
        runs += group_runs

    rows = [["", *(escape_invisible(run.name) for run in runs)]]
    rows += rows_of_differing_settings(runs)
    rows += rows_of_differing_commits(runs)
    for name, digests in paired.digests_of_differing_files(runs).items():
        rows.append([f"content of {name}", *digests])
    facts = [headline_facts(run) for run in runs]
    fact_names: dict[str, None] = {}  # used as a set that keeps its order
    for run_facts in facts:
        fact_names |= dict.fromkeys(run_facts)
    for name in fact_names:
        rows.append([name, *(run_facts.get(name, "-") for run_facts in facts)])
    rows.append(["warnings", *(format_warning_names(run) for run in runs)])
    lines = seeds.describe_spreads_and_differences(groups)
    lines += paired.describe_paired_differences(groups)
    natural_table = format_table(rows)
    if len(natural_table.split("\n", 1)[0]) > (width or WIDEST):
        names = " ".join(shlex.quote(path) for path in paths)
        lines.append(f"one row per run: {command_prefix('report.py')} --csv {names}")
    return "\n".join([fit_or_transpose_comparison(rows, width), *lines])


def rows_of_differing_settings(runs: list[History]) -> list[list[str]]:
    """Returns a table row for each setting whose value is not the same in all runs."""
    keys: dict[str, None] = {}  # used as a set that keeps its order
    for run in runs:
        keys |= dict.fromkeys(run.settings)

    rows = []
    for key in keys:
        values = [escape_invisible(str(run.settings.get(key, "-"))) for run in runs]
        if len(set(values)) > 1:
            flag = f"--{escape_invisible(str(key)).replace('_', '-')}"
            rows.append([flag, *map(keep_end_of_long_value, values)])
    return rows


def rows_of_differing_commits(runs: list[History]) -> list[list[str]]:
    """
    Returns a row with the version of Gwen that each run used: the commit and uncommitted changes.

    Returns no row if all runs used the same version.
    """
    versions = []
    for run in runs:
        version = str(run.env.get("commit") or "unknown")[:10]
        if run.env.get("uncommitted_changes"):
            version += f", changes {run.env['uncommitted_changes']}"
        versions.append(escape_invisible(version))
    return [["commit of Gwen", *versions]] if len(set(versions)) > 1 else []


def keep_end_of_long_value(value: str) -> str:
    """Returns the end of a long value, because long paths differ at their ends."""
    if len(value) <= MOST_CHARACTERS:
        return value
    return f"\u2026{value[-MOST_CHARACTERS:]}"


def format_warning_names(run: History) -> str:
    names = [escape_invisible(str(warning["name"])) for warning in run.warnings]
    return ", ".join(names) or "none"


def format_run_list(*folders: str | Path, width: int | None = None) -> str:
    """
    Returns a table of the runs in some directories, newest last, and a line per damaged run.

    width: the number of columns of the terminal; None if the output is no terminal, so that
    the table may have any width.
    """
    paths: list[Path] = []
    for folder in folders:
        paths += Path(folder).glob("*/config.yaml")
        paths += Path(folder).glob("*/seed-*/config.yaml")
    if not paths:
        places = " and ".join(map(str, folders))
        raise ValueError(f"found no runs in {places}; start one with `{command_prefix()}`")

    rows = [RUN_COLUMNS]
    damaged = []
    for path in sorted(paths, key=lambda path: path.stat().st_mtime):
        try:
            rows.append(run_list_row(load_history(path.parent)))
        except DAMAGE as error:
            damaged.append(
                escape_and_redact_for_printing(f"{path.parent} is damaged ({format_error(error)})")
            )
        except (ValueError, OSError) as error:
            damaged.append(escape_and_redact_for_printing(str(error)))
    return "\n".join([fit_table(rows, width), *damaged])


def run_list_row(run: History) -> list[str]:
    """Returns the row of a run in the table of runs."""
    facts = headline_facts(run)
    judgement = verdict.reach_verdict_on_held_out_change(run)
    conclusion = "-"
    if judgement:
        conclusion = "; ".join([judgement.headline, *judgement.signs[:2]])
    measure_changes = run_changes.changes_that_affect_evaluations(run.changes)
    if measure_changes:
        conclusion += f"; {run_changes.describe_changes(measure_changes)}"
    cells = [
        str(run.dir),
        str(run.settings.get("task", "-")),
        str(run.settings.get("model", "-")),
        facts["steps"],
        *format_figure_before_after(run),
        facts["training"],
        str(len(run.warnings)),
        conclusion,
    ]
    return [escape_invisible(cell) for cell in cells]


# ---- the command


@guard_output()
@exit_on_mistakes()
def main(argv: list[str] | None = None) -> None:
    parser = Parser("report.py", "Write a page about one or more runs, or compare runs in tables.")
    parser.add_argument(
        "runs",
        nargs="*",
        metavar="RUN",
        help="a run, or a directory with one run per seed; the page of several runs is written "
        "beside the first run",
    )
    parser.add_argument(
        "--out",
        type=Path,
        metavar="FILE",
        help="write the page to this file (default: report.html in the directory of the run; for "
        "several runs, A-against-B.html beside the first, where A and B are the names of the runs)",
    )
    parser.add_argument(
        "--compare",
        action="store_true",
        help="compare runs, or files written by evaluate.py --out, in a table",
    )
    parser.add_argument(
        "--csv",
        action="store_true",
        help="print a CSV table with one row per run, or write this table to the --out file; the "
        "columns include the held-out figures with their intervals, the seconds and tokens of the "
        "training, the warnings, and the settings that differ between the runs",
    )
    parser.add_argument(
        "--list",
        action="store_true",
        help="list the runs in a directory; name the directory in place of RUN (default: runs/)",
    )
    parser.add_argument("--open", action="store_true", help="open the page in a browser")
    args = parser.parse_args(sys.argv[1:] if argv is None else argv)
    width = wrapping.terminal_width()
    try:
        if args.list:
            wrapping.print_wrapped(format_run_list(*args.runs or ["runs"], width=width))
            return
        if not args.runs:
            raise ValueError("no run is named; name one, such as runs/NAME, or use --list")
        if args.csv:
            write_or_print_csv(args.runs, args.out)
            return
        if args.compare:
            wrapping.print_wrapped(format_run_comparison(args.runs, width))
            return
        write_page_and_print_figure_differences(args.runs, args.out, opens=args.open)
    except DAMAGE as error:
        exit_with_error(f"{' or '.join(args.runs)} is damaged ({format_error(error)})")


def write_or_print_csv(paths: list[str], out: Path | None) -> None:
    """Writes a CSV table of all runs to the file `out`, or prints the table if `out` is None."""
    run_dirs: list[str] = []
    for path in paths:
        run_dirs += seeds.run_dirs_of_seeds(path)
    text = run_table.format_csv([load_history(run_dir) for run_dir in run_dirs])
    if out is None:
        print(text, end="")
        return
    refuse_unwritable_file("--out", out)
    run_files.write_text_atomically(out, text)
    print(out)


def write_page_and_print_figure_differences(
    runs: list[str], out: Path | None, *, opens: bool
) -> None:
    """
    Writes one page about all named runs, and prints the page's path.

    Before the path, prints how much the held-out figure varies between the seeds of a run, and how
    much the figure of each further run differs from that of the first.

    opens: whether to open the page in a browser too.
    """
    if out:
        if out.exists() and not out.is_file():  # renaming the finished page to `out` would fail
            raise ValueError(f"--out {out} is not a regular file; name another file")
        refuse_unwritable_file("--out", out)
    path = page.write_page(runs[0], out, runs[1:])
    groups = seeds.load_seed_groups(runs)
    lines = seeds.describe_spreads_and_differences(groups)
    lines += paired.describe_paired_differences(groups)
    for line in lines:
        wrapping.print_wrapped(line)
    print(path)
    if opens:
        page.open_page_in_browser(path)


if __name__ == "__main__":
    main()
