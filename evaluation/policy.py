"""
The model that an evaluation or a chat uses, and the settings of the run that trained it.

A policy on a server is in evaluation/served_policy.py.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import gwen
import lora
from config import Config
from disk import adapters, model_choice, run_files
from prompts import chat_template
from settings.checks import check_settings
from settings.sources import load_recipe


def load_policy(
    name: str, adapter: str | None, start: str | None = None, end_tokens: Sequence[str] = ()
) -> tuple[gwen.Model, Any, bool]:
    """
    The model with its adapter, the tokenizer, and whether the model contains its initial weights.

    It contains them if they come back when the adapter is switched off. start: the adapter before
    training.
    """
    if adapter is None or adapters.is_full_weights(adapter):
        model, tokenizer = gwen.load(name, adapter=adapter, end_tokens=end_tokens)
        return model, tokenizer, adapter is None

    model_choice.warn_of_other_base(adapter, name)
    model, tokenizer = gwen.load(name, end_tokens=end_tokens)
    lora.attach_adapter(model, adapter, start)
    return model, tokenizer, True


def load_run_config(run: str, flags: dict[str, Any], data: str | None = None) -> Config:
    """
    The settings of the run in the directory `run`, overridden by flags.

    After this call chat templates use the day on which the run started. A run of --loss-type sft is
    treated as a run that samples answers: to the problems of `data`, if given, else to those of its
    task, which has none if it is own.

    Raises ValueError if the directory contains no run.
    """
    settings = load_recipe(run_files.config_file(run))
    chat_template.set_template_date(run_files.start_date(Path(run)))
    if settings.get("loss_type") == "sft":
        names = [name for name in ("model", "task", "thinking") if name in settings]
        settings = {name: settings[name] for name in names}
        if data:
            settings["task"] = "own"
    return check_settings(settings | flags)
