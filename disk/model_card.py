"""
The model card: a README for a run's adapter or merged model.

It names the model that training began with, the training data, the held-out figures, and the
messages to send before a conversation. This file does not cover how the model is written (deploy/).
"""

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from disk.eval_record import format_with_interval
from disk.run_files import JsonLines, load_settings, saved_steps

METHODS = {"sft": "SFT", "distill": "distillation"}  # by loss; every other loss is GRPO
FIGURES = ("accuracy", "score", "witness", "greedy", "loss", "perplexity")
TABLE_HEAD = ("| held-out figure | after steps | value (95%) | problems |", "|---|---|---|---|")


def make_model_card(
    run: str, step: int | None, library: str = "mlx", opening: Sequence[dict[str, Any]] = ()
) -> str:
    """
    Return the README of a run's model.

    step: the step whose weights are described; None for the newest.
    opening: the messages that began every training prompt.
    """
    settings = load_settings(run)
    model = public_name(settings["model"])
    method = METHODS.get(str(settings.get("loss_type")), "GRPO")

    lines = ["---"]
    if "/" in model:  # a hub id
        base_model = model.partition("@")[0]
        lines.append(f"base_model: {base_model}")
    lines += [f"library_name: {library}", f"tags: [{method.lower()}, gwen]", "---", ""]
    lines += [f"# {Path(run).name}", ""]
    lines.append(
        f"{model}{describe_start(settings)}, trained with {method} by Gwen on "
        f"{_describe_source(settings)}{_describe_step(run, step, settings)}."
    )
    lines.append("")

    rows = _figure_rows(run, step)
    if rows:
        lines += [*TABLE_HEAD, *rows]
    if opening:
        messages = json.dumps(opening, indent=2, ensure_ascii=False)
        lines.append("\nTraining's prompts begin with these messages; send them before yours.")
        lines.append(f"\n```json\n{messages}\n```")
    return "\n".join(lines) + "\n"


def _describe_source(settings: dict[str, Any]) -> str:
    """The data or task that a run trained on, and its teacher."""
    data, _, held_out = str(settings.get("data") or "").partition(",")
    if data:
        text = public_name(data)
        if held_out:
            text += f", held out {public_name(held_out)}"
    else:
        task = settings.get("task")
        text = f"the task {task}"
    if settings.get("teacher"):
        teacher = public_name(settings["teacher"])
        text += f", by the teacher {teacher}"
    return text


def _describe_step(run: str, step: int | None, settings: dict[str, Any]) -> str:
    """How far the training went: ", 50 of 100 steps"; "" if nothing was saved."""
    if step is None:
        step = max(saved_steps(run), default=None)
    if step is None:
        return ""
    num_steps = settings["steps"]
    return f", {step} of {num_steps} steps"


def _figure_rows(run: str, step: int | None) -> list[str]:
    """The table rows of a run's first and last evaluations up to `step`."""
    evaluations = []
    for record in JsonLines(Path(run) / "eval.jsonl").read():
        if step is None or record["step"] <= step:
            evaluations.append(record)

    rows = []
    for record in evaluations[:1] + evaluations[1:][-1:]:
        after = record["step"]
        num_problems = record["eval/num"]
        for name in FIGURES:
            if record.get(f"eval/{name}") is not None:
                figure = format_with_interval(record, name)
                rows.append(f"| {name} | {after} | {figure} | {num_problems} |")
    return rows


def public_name(name: Any) -> str:
    """A setting's value in the form that is published: only the last part of a local path."""
    is_id = re.fullmatch(r"[\w-][\w.-]*/[\w-][\w.-]*([@:].*)?", str(name)) is not None
    return str(name) if is_id and not Path(name).exists() else Path(name).name


def describe_start(settings: dict[str, Any]) -> str:
    """Text about a run's initial adapter, as ", with the adapter warm"; "" if it had none."""
    adapter = settings.get("init_adapter")
    return f", with the adapter {public_name(adapter)}" if adapter else ""
