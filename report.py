"""
Looks at runs: `uv run report.py runs/NAME` writes runs/NAME/report.html, a page that opens from disk; with more runs
after it, a page of all of them beside it. `--compare` and `--list` print tables for the terminal. A directory of seeds
stands for its runs. The page itself is in reporting/page.py.
"""

import sys
from pathlib import Path

import cpu_blas  # noqa: F401  (before mlx)

from flags import (
    Parser,
    escape_invisible,
    exit_with_error,
    make_printable,
    refuse_unwritable_file,
    report_mistakes,
)
from machine.output import guard_output
from problems.examples import format_error
from reporting import answers, page, seeds, verdict
from reporting.history import format_before_after, headline_facts, load_history

DAMAGE = (
    LookupError,
    TypeError,
    AttributeError,
    ArithmeticError,
)  # of records without their figures

# ---- tables for the terminal


def format_table(rows: list[list[str]]) -> str:
    """Columns under each other, the first row being their names."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]
    return "\n".join([lines[0], "  ".join("-" * width for width in widths), *lines[1:]])


def compare_runs(names: list[str]) -> str:
    """What differs between runs: settings, figures, costs; of files of answers and runs, problem by problem."""
    if len(names) > 1 and any(Path(name).is_file() for name in names):
        return format_table(answers.compare_answers(names))
    if sum(len(seeds.seed_runs(name)) for name in names) < 2:
        raise ValueError("--compare needs two runs or more, as --compare runs/A runs/B")
    settings = seeds.load_seed_groups(names)
    runs = [run for _, runs in settings for run in runs]
    rows = [["", *(escape_invisible(run.name) for run in runs)]]
    for key in dict.fromkeys(key for run in runs for key in run.settings):
        values = [escape_invisible(str(run.settings.get(key, "-"))) for run in runs]
        if len(set(values)) > 1:
            rows.append(
                [
                    f"--{escape_invisible(str(key)).replace('_', '-')}",
                    *(value[:60] for value in values),
                ]
            )
    known = dict.fromkeys(name for run in runs for name in headline_facts(run))
    rows += [[name, *(headline_facts(run).get(name, "-") for run in runs)] for name in known]
    rows.append(
        [
            "warnings",
            *(
                ", ".join(escape_invisible(str(w["name"])) for w in run.warnings) or "none"
                for run in runs
            ),
        ]
    )
    return "\n".join([format_table(rows), *seeds.describe_seed_groups(settings)])


def list_runs(*folders: str | Path) -> str:
    """The runs under directories, the newest last, and a line for each that is damaged."""
    paths = [
        file
        for one in folders
        for part in ("*", "*/seed-*")
        for file in Path(one).glob(f"{part}/config.yaml")
    ]
    if not paths:
        raise ValueError(
            f"{' and '.join(map(str, folders))}: no runs there; `uv run train.py` makes one"
        )
    rows, damaged = (
        [["run", "task", "model", "steps", "before", "after", "training", "warnings", "verdict"]],
        [],
    )
    for path in sorted(paths, key=lambda path: path.stat().st_mtime):
        try:
            run = load_history(path.parent)
            known, own = (
                headline_facts(run),
                [str(run.settings.get(key, "-")) for key in ("task", "model")],
            )
            judged = verdict.judge_change(run)
            figures = [
                known["steps"],
                *format_before_after(run),
                known["training"],
                str(len(run.warnings)),
            ]
            figures.append(
                "; ".join([judged.headline, *judged.signs[:2]]) if judged else "-"
            )  # what gives it away
            rows.append([escape_invisible(cell) for cell in (str(run.dir), *own, *figures)])
        except DAMAGE as error:
            damaged.append(make_printable(f"{path.parent} is damaged ({format_error(error)})"))
        except (ValueError, OSError) as error:
            damaged.append(make_printable(str(error)))
    return "\n".join([format_table(rows), *damaged])


# ---- the command


@guard_output()
@report_mistakes()
def main(argv: list[str] | None = None) -> None:
    parser = Parser("report.py", "write a page about a run, or compare runs in the terminal")
    runs = "a run, or a directory of seeds; a page of several lies beside the first"
    parser.add_argument("runs", nargs="*", metavar="RUN", help=runs)
    out = "where the page goes (default: report.html in RUN, or NAME-against-OTHER.html beside it)"
    parser.add_argument("--out", type=Path, metavar="FILE", help=out)
    compared = "print what differs between runs, or between files of evaluate.py --out"
    parser.add_argument("--compare", action="store_true", help=compared)
    parser.add_argument(
        "--list", action="store_true", help="print the runs under RUN (default: runs)"
    )
    parser.add_argument("--open", action="store_true", help="open the page in a browser")
    args = parser.parse_args(sys.argv[1:] if argv is None else argv)
    try:
        if args.list:
            print(list_runs(*args.runs or ["runs"]))
            return
        if not args.runs:
            raise ValueError("name a run, as runs/NAME; --list shows those that there are")
        if args.compare:
            print(compare_runs(args.runs))
            return
        if args.out:
            if args.out.exists() and not args.out.is_file():  # the page is renamed into its place
                raise ValueError(f"--out {args.out} is no file; name another")
            refuse_unwritable_file("--out", args.out)
        written = page.write_page(args.runs[0], args.out, args.runs[1:])
        print(*seeds.describe_seed_groups(seeds.load_seed_groups(args.runs)), written, sep="\n")
        if args.open:
            page.open_page(written)
    except DAMAGE as error:
        exit_with_error(f"{' or '.join(args.runs)} is damaged ({format_error(error)})")


if __name__ == "__main__":
    main()
