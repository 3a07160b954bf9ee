"""
An evaluation's record in words: its headline, and a message if too many answers are cut off.

This file does not cover how the figures are computed (evaluate.py, statistics.py), or the log that
holds the records (run_files.py).
"""

from collections.abc import Mapping
from typing import Any

FIGURES = ("accuracy", "score", "loss", "perplexity", "greedy")
MOST_CUT_OFF = 0.5  # a fraction of the answers, above which no other figure means much


def format_with_interval(record: dict[str, Any], name: str) -> str:
    """A figure with its 95% confidence interval, if there is one: "0.475 \u00b1 0.043"."""
    value = record.get(f"eval/{name}")
    half = record.get(f"eval/{name}_ci95")
    if value is None:
        return "unreadable"
    return f"{value:.3f}" if half is None else f"{value:.3f} \u00b1 {half:.3f}"


def evaluation_line(record: dict[str, Any]) -> str:
    """
    The headline of an evaluation.

    It says "500 of 512 problems" if 12 problems have no figure.
    """
    names = [name for name in FIGURES if f"eval/{name}" in record]
    if record.get("eval/witness") is not None:
        names.insert(1, "witness")
    figures = " | ".join(f"{name} {format_with_interval(record, name)}" for name in names)
    line = f"eval/{figures} | {_describe_problems(record)}"

    unreadable = record.get("eval/unparsed_frac")
    if unreadable:
        line += f" | {unreadable:.0%} of the judge's scores unreadable"
    return line


def _describe_problems(record: dict[str, Any]) -> str:
    """How many problems an evaluation had, and how many answers to each."""
    num_problems = record["eval/num"]
    noun = "conversation" if "eval/loss" in record else "problem"
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


def token_limit(settings: Mapping[str, Any]) -> str:
    """The flags that limit an answer's length, such as "--max-tokens 8"."""
    max_tokens = settings.get("max_tokens")
    limit = f"--max-tokens {max_tokens}" if max_tokens else "--max-tokens"
    has_turns = settings.get("tools") or settings.get("env")
    return f"{limit} or --max-context" if has_turns else limit


def cut_off_message(fraction: float | None, settings: Mapping[str, Any]) -> str:
    """A warning that this fraction of the answers is cut off, with a fix; "" if it is small."""
    if fraction is None or fraction <= MOST_CUT_OFF:
        return ""
    limit = token_limit(settings)
    return (
        f"{fraction:.0%} of the answers are cut off at {limit}: "
        "raise it, or ask for shorter answers in the prompt"
    )
