"""
Writes the model card, which is a README for the adapter or the merged model of a run.

The card names the model before training and the training data. It shows the figures of held-out
evaluations, and the messages with which a conversation should begin. deploy/ writes the model
itself.
"""

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from disk.eval_record import format_figure_with_interval
from disk.run_files import JsonLinesLog, list_saved_steps, load_settings

METHODS = {"sft": "SFT", "distill": "distillation"}  # by loss type; all other losses are "GRPO"
FIGURES = ("accuracy", "score", "witness", "greedy", "loss", "perplexity")
TABLE_HEAD = ("| held-out figure | after steps | value (95%) | problems |", "|---|---|---|---|")


def make_model_card(
    run: str, step: int | None, library: str = "mlx", opening: Sequence[dict[str, Any]] = ()
) -> str:
    """
    Return the README for the model of a run.

    run: the directory of the run.
    step: the step after which the weights were saved; None means the newest step.
    library: the value of `library_name` in the README.
    opening: the messages at the beginning of every training prompt.
    """
    settings = load_settings(run)
    model = publishable_name(settings["model"])
    method = METHODS.get(str(settings.get("loss_type")), "GRPO")

    lines = ["---"]
    if "/" in model:  # a hub id
        base_model = model.partition("@")[0]
        lines.append(f"base_model: {base_model}")
    lines += [f"library_name: {library}", f"tags: [{method.lower()}, gwen]", "---", ""]
    lines += [f"# {Path(run).name}", ""]
    lines.append(
        f"{model}{describe_initial_adapter(settings)}, trained with {method} by Gwen on "
        f"{_describe_data_and_teacher(settings)}{_describe_training_length(run, step, settings)}."
    )
    lines.append("")

    rows = _first_and_last_evaluation_rows(run, step)
    if rows:
        lines += [*TABLE_HEAD, *rows]
    if opening:
        messages = json.dumps(opening, indent=2, ensure_ascii=False)
        lines.append(
            "\nThe prompts in training began with these messages; send them before your own."
        )
        lines.append(f"\n```json\n{messages}\n```")
    return "\n".join(lines) + "\n"


def _describe_data_and_teacher(settings: dict[str, Any]) -> str:
    """Return text that names a run's data or task, and its teacher if there was one."""
    data, _, held_out = str(settings.get("data") or "").partition(",")
    if data:
        text = publishable_name(data)
        if held_out:
            text += f", held out {publishable_name(held_out)}"
    else:
        task = settings.get("task")
        text = f"the task {task}"
    if settings.get("teacher"):
        teacher = publishable_name(settings["teacher"])
        text += f", by the teacher {teacher}"
    return text


def _describe_training_length(run: str, step: int | None, settings: dict[str, Any]) -> str:
    """Return text such as ", 50 of 100 steps", or "" if no step was saved."""
    if step is None:
        step = max(list_saved_steps(run), default=None)
    if step is None:
        return ""
    num_steps = settings["steps"]
    return f", {step} of {num_steps} steps"


def _first_and_last_evaluation_rows(run: str, step: int | None) -> list[str]:
    """Return rows of a Markdown table with the first and the last evaluation up to a step."""
    evaluations = []
    for record in JsonLinesLog(Path(run) / "eval.jsonl").read():
        if step is None or record["step"] <= step:
            evaluations.append(record)

    rows = []
    for record in evaluations[:1] + evaluations[1:][-1:]:
        after = record["step"]
        num_problems = record["eval/num"]
        for name in FIGURES:
            if record.get(f"eval/{name}") is not None:
                figure = format_figure_with_interval(record, name)
                rows.append(f"| {name} | {after} | {figure} | {num_problems} |")
    return rows


def publishable_name(name: Any) -> str:
    """Return a hub id unchanged, and only the last part of a local path, which may be private."""
    is_id = re.fullmatch(r"[\w-][\w.-]*/[\w-][\w.-]*([@:].*)?", str(name)) is not None
    return str(name) if is_id and not Path(name).exists() else Path(name).name


def describe_initial_adapter(settings: dict[str, Any]) -> str:
    """Return text about a run's initial adapter: ", with the adapter NAME", or "" without one."""
    adapter = settings.get("init_adapter")
    return f", with the adapter {publishable_name(adapter)}" if adapter else ""
