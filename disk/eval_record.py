"""
Describes the record of an evaluation in words, and warns if too many answers were cut off.

evaluate.py and statistics.py compute the figures, and run_files.py reads and writes the log of
records.
"""

from collections.abc import Mapping
from typing import Any

from disk.statistics import FEWEST_FOR_INTERVAL

FIGURES = ("accuracy", "score", "loss", "perplexity", "greedy")
MAX_CUT_OFF = 0.5  # If a larger fraction of the answers is cut off, the other figures mean little.


def format_figure_with_interval(record: dict[str, Any], name: str) -> str:
    """
    A figure and its 95% confidence interval as text, such as "0.475 \u00b1 0.043".

    The interval is left out if the record contains none, or if there are too few problems for a
    useful interval.
    """
    value = record.get(f"eval/{name}")
    half = record.get(f"eval/{name}_ci95")
    if value is None:
        return "unreadable"
    num_problems = record.get("eval/known", record.get("eval/num", FEWEST_FOR_INTERVAL))
    if half is None or num_problems < FEWEST_FOR_INTERVAL:
        return f"{value:.3f}"
    return f"{value:.3f} \u00b1 {half:.3f}"


def format_evaluation_line(record: dict[str, Any]) -> str:
    """
    Return a line with the main figures of an evaluation and the number of its problems.

    If 12 of 512 problems have no figure, the line contains "500 of 512 problems".
    """
    names = [name for name in FIGURES if f"eval/{name}" in record]
    if record.get("eval/witness") is not None:
        names.insert(1, "witness")
    figures = " | ".join(f"{name} {format_figure_with_interval(record, name)}" for name in names)
    line = f"eval/{figures} | {_describe_problem_count(record)}"

    unreadable = record.get("eval/unparsed_frac")
    if unreadable:
        line += f" | {unreadable:.0%} of the judge's scores were unreadable"
    return line


def _describe_problem_count(record: dict[str, Any]) -> str:
    """The number of problems in an evaluation, and the number of answers to each, as text."""
    num_problems = record["eval/num"]
    # an evaluation that also sampled answers reports how many problems it answered
    has_only_loss = "eval/loss" in record and "eval/known" not in record
    noun = "conversation" if has_only_loss else "problem"
    if num_problems != 1:
        noun += "s"
    text = f"{num_problems} {noun}"

    num_readable = record.get("eval/known", num_problems)
    if num_readable != num_problems:
        text = f"{num_readable} of {text}"

    num_samples = record.get("eval/samples", 1)
    if num_samples > 1:
        text += f", {num_samples} answers to each"
    return text


def flags_limiting_answer_length(settings: Mapping[str, Any]) -> str:
    """The flags that limit the length of an answer, such as "--max-tokens 8"."""
    max_tokens = settings.get("max_tokens")
    limit = f"--max-tokens {max_tokens}" if max_tokens else "--max-tokens"
    has_turns = settings.get("tools") or settings.get("env")
    return f"{limit} or --max-context" if has_turns else limit


def cut_off_warning(fraction: float | None, settings: Mapping[str, Any]) -> str:
    """
    A warning that too many answers were cut off, with advice.

    Returns "" if the fraction is at most MAX_CUT_OFF.

    fraction: the fraction of the answers that were cut off.
    settings: the settings of the run, by name.
    """
    if fraction is None or fraction <= MAX_CUT_OFF:
        return ""
    limit = flags_limiting_answer_length(settings)
    return (
        f"{fraction:.0%} of the answers are cut off at {limit}: "
        "raise this limit, or ask for shorter answers in the prompt"
    )
