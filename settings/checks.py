"""
Checks the settings of a run: the run must be able to use each setting, and no two may conflict.

The settings and their ranges are declared in config.py.
"""

import os
import re
from collections.abc import Collection, Iterator
from typing import Any

from config import SETTINGS, TARGETS, Config, is_used_by_sft, is_user_function
from flags import flag_of, parse_setting
from text.commands import command_prefix

MOST_ROWS = 2**16  # completions per step; a laptop needs hours to sample this many
LEAST_TARGET_KL = 1e-3  # nats per token; a smaller KL divergence is only rounding error

ADAMW_SETTINGS = ("adam_beta1", "adam_beta2", "adam_epsilon", "weight_decay")

# Gwen fuses some projections of a checkpoint into one. The parts of each fused projection:
PARTS = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "in_proj": ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a"),
    "gate_up_proj": ("gate_proj", "up_proj"),
}
# A run with one of these losses can use the settings whose `used_by` is in the tuple.
USED = {
    "sft": (None,),
    "distill": (None, "rollouts", "distill"),
}
USED_BY_OTHERS = (None, "rollouts", "grpo")
RUN_KINDS = {
    "rollouts": "runs that sample completions",
    "grpo": "losses that use advantages",
    "distill": "--loss-type distill",
}


def check_settings(settings: dict[str, Any], flags: Collection[str] = ()) -> Config:
    """
    Convert settings to their types, check them, and return them as a Config.

    settings: values by name. `eval_data`, which names the held-out prompts, is also allowed.
    flags: the names of the settings that were given as flags.

    Raises ValueError if a setting has the wrong type or is out of range, or if two settings
    contradict each other.
    """
    if "eval_data" in settings:
        settings = join_train_and_eval_data(**settings)
    settings = dict(settings)

    layers = settings.get("checkpoint_layers")
    if type(layers) is int:  # YAML reads a number as an int
        settings["checkpoint_layers"] = str(layers)

    targets = settings.get("lora_targets")
    if isinstance(targets, str):
        targets = [targets]
    if isinstance(targets, list):
        settings["lora_targets"] = map_lora_targets_to_projections(targets)

    rewards = settings.get("reward")
    weights = settings.get("reward_weights")
    if isinstance(weights, list) and isinstance(rewards, list):
        settings["reward_weights"] = name_reward_weights(rewards, weights)

    parsed = {key: parse_setting(SETTINGS[key], value) for key, value in settings.items()}
    config = Config.from_flags(**parsed)
    refuse_unused_settings(config, flags)
    for mistake in find_mistakes(config):
        raise ValueError(mistake)
    return config


def name_reward_weights(rewards: list[Any], weights: list[Any]) -> dict[str, Any] | list[Any]:
    """
    Return a dictionary with the weight of each reward function, by the function's name.

    This converts the weights of TRL, which are a list.

    rewards: the reward functions, each as FILE.py:function.
    weights: the weights in the same order.

    Returns `weights` unchanged if a weight is not a number, if two functions have the same name, or
    if the lists differ in length.
    """
    names = [str(reward).rpartition(":")[2] for reward in rewards]
    are_numbers = all(type(weight) in (int, float) for weight in weights)
    distinct_names = {name for name in names if name.isidentifier()}
    if are_numbers and len(distinct_names) == len(names) == len(weights):
        return dict(zip(names, weights, strict=True))
    return weights


def join_train_and_eval_data(eval_data: Any, data: Any = None, **settings: Any) -> dict[str, Any]:
    """
    Return the settings without `eval_data`, but with the value "DATA,EVAL_DATA" for `data`.

    Raises ValueError if `data` is not set.
    """
    if not data:
        raise ValueError(
            f"--eval-data {eval_data} needs --data FILE with the prompts to train on; give both"
        )
    train = str(data)
    if not os.path.exists(train):
        train = train.rsplit(",", 1)[0]
    return settings | {"data": f"{train},{eval_data}"}


def map_lora_targets_to_projections(names: list[Any]) -> list[Any]:
    """
    Return the names of the projections that get adapters, in the order of TARGETS.

    names: the projections in TARGETS, the projections of a checkpoint (PARTS), or `all-linear`.
        Unknown names are returned unchanged.

    Raises ValueError if the names include only some parts of a fused projection, because a fused
    projection has a single adapter.
    """
    if names == ["all-linear"]:
        return list(TARGETS)
    targets = list(names)
    for projection, parts in PARTS.items():
        named = [part for part in parts if part in names]
        if not named:
            continue
        missing = [part for part in parts if part not in names]
        if missing:
            all_parts = ", ".join(parts)
            missing_parts = " and ".join(missing)
            raise ValueError(
                f"--lora-targets names {named[0]} but not {missing_parts}, and {all_parts} share "
                f"one adapter; add {missing_parts}, or name {projection} instead"
            )
        targets = [name for name in targets if name not in parts]
        if projection not in names:
            targets.append(projection)
    are_known = all(name in TARGETS for name in targets)
    return sorted(targets, key=TARGETS.index) if are_known else targets


def refuse_unused_settings(config: Config, flags: Collection[str]) -> None:
    """
    Raise ValueError if a setting that this run cannot use has been set.

    A setting with its default value does not count as set, because the `config.yaml` of a run
    contains all defaults. With --loss-type sft, a default value counts as set if it was given as a
    flag.
    """
    loss = config.objective.loss_type
    used = USED.get(loss, USED_BY_OTHERS)
    values = config.to_flags()
    defaults = Config.from_flags().to_flags()

    complaints = []
    for key, setting in SETTINGS.items():
        is_set = values[key] != defaults[key] or (loss == "sft" and key in flags)
        is_used = setting.used_by in used or (loss == "sft" and is_used_by_sft(key, values))
        if not is_used and is_set:
            kind = RUN_KINDS[str(setting.used_by)]
            complaints.append(f"{flag_of(key)} {values[key]!s:.60} is for {kind}")
    if complaints:
        all_complaints = ", ".join(complaints)
        advice = "this setting: leave it out"
        if len(complaints) > 1:
            advice = "these settings: leave them out"
        raise ValueError(f"{all_complaints}; --loss-type {loss} cannot use {advice}")


def find_mistakes(config: Config) -> Iterator[str]:
    """Yield an error message for each contradiction between settings."""
    yield from _find_judge_mistakes(config)
    yield from _find_sampling_mistakes(config)
    yield from _find_optimizer_mistakes(config)
    yield from _find_sft_and_teacher_mistakes(config)
    yield from _find_objective_mistakes(config)
    yield from _find_model_mistakes(config)


def _find_judge_mistakes(config: Config) -> Iterator[str]:
    judge = config.judge
    if re.match("[a-z]+://[^/]*@", judge.url, re.IGNORECASE):
        yield (
            "--judge-url contains a password, which would appear in logs; set the environment "
            "variable JUDGE_API_KEY to the key instead"
        )
    if judge.think and judge.mode != "decode":
        yield (
            f"--judge-think {judge.think} needs --judge-mode decode, because with "
            f"--judge-mode {judge.mode} the judge does not think"
        )
    if judge.url and not judge.model:
        yield (
            f"--judge-url {judge.url} needs --judge-model with the name of the model on that server"
        )


def _find_sampling_mistakes(config: Config) -> Iterator[str]:
    sampling = config.sampling
    num_rows = sampling.batch * sampling.groups
    if num_rows > MOST_ROWS:
        yield (
            f"--batch {sampling.batch} times --groups {sampling.groups} is {num_rows} completions "
            f"per step; lower one of them, so that there are at most {MOST_ROWS}"
        )
    mini_batches = config.optimizer.mini_batches
    if sampling.batch % mini_batches:
        yield (
            f"--mini-batches {mini_batches} must divide --batch {sampling.batch}, because each "
            "mini-batch gets the same number of prompts"
        )
    if "" in sampling.stop:
        yield "--stop has an empty text, which would end every completion at once; remove that text"
    if sampling.temp == 0:
        yield (
            "--temp is 0, which makes all completions of a prompt equal; "
            "training needs a --temp above 0"
        )


def _find_optimizer_mistakes(config: Config) -> Iterator[str]:
    optimizer = config.optimizer
    if optimizer.kind == "sgd" and config.model.lora_rank:
        yield (
            "--optimizer sgd hardly changes adapters, because they start at 0; "
            "add --lora-rank 0 to train all weights"
        )
    if optimizer.kind == "sgd" and not optimizer.target_kl:
        yield (
            "--optimizer sgd needs a --target-kl above 0, "
            "because --target-kl determines the size of each step"
        )
    if optimizer.kind == "sgd" and config.objective.loss_type == "sft":
        yield (
            "--optimizer sgd needs --target-kl, which --loss-type sft cannot use; "
            "leave --optimizer out"
        )
    yield from _find_adamw_settings_without_adamw(config)
    if 0 < optimizer.target_kl < LEAST_TARGET_KL:
        yield (
            f"--target-kl is {optimizer.target_kl:g}, but a KL divergence below 0.001 is only "
            "rounding error; use at least 0.001, or 0 for no maximum"
        )
    layers = optimizer.checkpoint_layers
    if layers not in ("auto", "on", "off") and not layers.isdecimal():
        yield f"--checkpoint-layers is {layers!r}; it must be auto, on, off or a number"


def _find_adamw_settings_without_adamw(config: Config) -> Iterator[str]:
    kind = config.optimizer.kind
    if kind == "adamw":
        return
    advice = f"set it in {kind} instead" if is_user_function(kind) else "leave it out"
    values = config.to_flags()
    for name in ADAMW_SETTINGS:
        if values[name] != SETTINGS[name].default:
            yield (
                f"{flag_of(name)} {values[name]:g} is for --optimizer adamw, but --optimizer is "
                f"{kind}; {advice}"
            )


def _find_sft_and_teacher_mistakes(config: Config) -> Iterator[str]:
    objective = config.objective
    sampling = config.sampling
    if objective.loss_type == "sft" and not config.data.path:
        yield (
            "--loss-type sft needs --data FILE, with a column `messages`, "
            "or the columns `prompt` and `completion`"
        )
    if objective.loss_type == "distill":
        if not objective.teacher:
            yield "--loss-type distill needs a teacher model; name a model with --teacher"
        if objective.truncated == "punish":
            yield (
                "--truncated punish lowers rewards, but --loss-type distill uses no rewards; "
                "set --truncated keep or --truncated mask"
            )
        if sampling.top_p < 1 or sampling.top_k or sampling.min_p:
            yield (
                "--top-p, --top-k and --min-p restrict the vocabulary, but --teacher scores the "
                "whole vocabulary; leave them out"
            )
    if objective.teacher == "self" and not objective.teacher_prompt:
        yield (
            "--teacher self knows no more than the trained model; "
            "give the teacher more information with --teacher-prompt FILE"
        )


def _find_objective_mistakes(config: Config) -> Iterator[str]:
    objective = config.objective
    if config.sampling.groups == 1 and not objective.teacher:
        yield (
            "--groups is 1, but training compares the completions of a group; use at least 2 "
            "completions per prompt"
        )
    cap = objective.importance_sampling_cap
    has_cap = cap != SETTINGS["importance_sampling_cap"].default
    if has_cap and objective.importance_sampling_correction == "off":
        yield (
            f"--importance-sampling-cap {cap:g} bounds the weights of "
            "--importance-sampling-correction, which is off; add "
            "--importance-sampling-correction token, or leave the cap out"
        )
    num_chosen = objective.train_completions
    if num_chosen is not None and num_chosen > config.sampling.groups:
        yield (
            f"--train-completions is {num_chosen}, but a group has {config.sampling.groups} "
            "completions (--groups); set it to at most that number"
        )
    if is_user_function(objective.advantage) and objective.scale_rewards != "group":
        yield (
            f"--scale-rewards {objective.scale_rewards} is for built-in advantages, but "
            f"--advantage {objective.advantage} is your own function; leave --scale-rewards out"
        )
    if objective.advantage == "reinforce" and objective.scale_rewards in ("group", "mean"):
        yield (
            "--advantage reinforce compares a completion with the whole step, not with its "
            f"group, so --scale-rewards {objective.scale_rewards} is not possible; set "
            "--scale-rewards batch or --scale-rewards none"
        )
    is_by_group = objective.advantage == "group" and objective.scale_rewards == "group"
    if objective.combine_rewards == "normalize" and not is_by_group:
        yield (
            "--combine-rewards normalize normalizes rewards within each group; "
            "use it only with --advantage group and --scale-rewards group"
        )
    upper = objective.epsilon if objective.epsilon_high is None else objective.epsilon_high
    if objective.loss_type == "cispo" and upper < 1:
        yield (
            f"--epsilon-high is {upper}, but with --loss-type cispo it is the upper limit of the "
            "importance ratio; set --epsilon-high to at least 1, usually 5"
        )


def _find_model_mistakes(config: Config) -> Iterator[str]:
    adapter = config.model.init_adapter
    if adapter and not config.model.lora_rank:
        export = command_prefix("export.py --fuse")
        yield (
            f"--init-adapter {adapter} cannot be combined with --lora-rank 0, which trains no "
            f"adapter; merge the adapter into a model first: {export} --adapter DIR "
            "--out MODEL"
        )
    if config.model.lora_rank and not config.model.lora_targets:
        targets = ", ".join(TARGETS)
        yield f"--lora-targets is empty; name one or more of {targets}, or set --lora-rank 0"
    if config.model.lora_layers and not config.model.lora_rank:
        yield (
            f"--lora-layers {config.model.lora_layers} chooses layers for adapters, but "
            "--lora-rank 0 trains all weights without adapters; leave out one of the two"
        )
