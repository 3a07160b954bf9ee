"""
Loads the model that an evaluation or a chat uses, and the settings of the run that trained it.

The client for a model on a server is in evaluation/served_policy.py.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import gwen
import lora
from config import Config
from disk import adapters, model_choice, run_files
from prompts import chat_template
from settings.checks import check_settings
from settings.sources import load_recipe


class LoadedPolicy(NamedTuple):
    model: gwen.Model
    tokenizer: Any
    contains_base: bool  # whether switching the adapter off restores the model before training


def load_policy(
    name: str,
    adapter: str | None,
    initial_adapter: str | None = None,
    end_tokens: Sequence[str] = (),
) -> LoadedPolicy:
    """
    Loads a model with its adapter and its tokenizer.

    adapter: the adapter's directory, or None to load the model without an adapter. initial_adapter:
    the directory of the adapter with which training started.
    """
    if adapter is None or adapters.is_full_weight_adapter(adapter):
        model, tokenizer = gwen.load(name, adapter=adapter, end_tokens=end_tokens)
        return LoadedPolicy(model, tokenizer, adapter is None)

    model_choice.warn_of_different_base(adapter, name)
    model, tokenizer = gwen.load(name, end_tokens=end_tokens)
    lora.attach_saved_adapter(model, adapter, initial_adapter)
    return LoadedPolicy(model, tokenizer, True)


def load_run_config_and_set_template_date(
    run: str, flags: dict[str, Any], data: str | None = None
) -> Config:
    """
    Returns the settings of the run in the directory `run`, overridden by flags.

    After this call, chat templates use the date on which the run started as today's date.

    If the run has --loss-type sft, only its model, task and thinking mode are kept, because its
    training used neither sampling nor rewards. If `data` is given, the task of such a run becomes
    "own".

    Raises ValueError if the directory does not contain a run.
    """
    settings = load_recipe(run_files.find_config_file(run))
    chat_template.set_template_date(run_files.start_date_or_today(Path(run)))
    if settings.get("loss_type") == "sft":
        names = [name for name in ("model", "task", "thinking") if name in settings]
        settings = {name: settings[name] for name in names}
        if data:
            settings["task"] = "own"
    return check_settings(settings | flags)
