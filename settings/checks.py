"""
Checks that settings fit together: that the run can use each of them, and that none contradict.

This file does not cover the settings themselves and their ranges (config.py).
"""

import os
import re
from collections.abc import Collection, Iterator
from typing import Any

from config import SETTINGS, TARGETS, Config, is_user_function
from flags import flag_of, parse_setting

MOST_ROWS = 2**16  # completions per step; on a laptop these take hours to sample
LEAST_TARGET_KL = 1e-3  # nats per token; a smaller KL is only rounding error
PARTS = {  # for each of our projections, the checkpoint's projections that it joins
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "in_proj": ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a"),
    "gate_up_proj": ("gate_proj", "up_proj"),
}
USED = {  # for each loss, the `used_by` values of the settings that it uses
    "sft": (None,),
    "distill": (None, "rollouts", "distill"),
}
USED_BY_OTHERS = (None, "rollouts", "grpo")
RUN_KINDS = {
    "rollouts": "what samples",
    "grpo": "losses with advantages",
    "distill": "--loss-type distill",
}


def check_settings(settings: dict[str, Any], flags: Collection[str] = ()) -> Config:
    """
    Return the settings as a Config.

    flags: the names of the settings that were given as flags. `eval_data`, which flags and recipes
        may set, is the held-out side of `data`.

    Raises ValueError if a setting has the wrong type or is out of range, or if two settings
    contradict each other.
    """
    if "eval_data" in settings:
        settings = join_data_sides(**settings)
    settings = dict(settings)

    layers = settings.get("checkpoint_layers")
    if type(layers) is int:  # as YAML reads it
        settings["checkpoint_layers"] = str(layers)

    targets = settings.get("lora_targets")
    if isinstance(targets, str):
        targets = [targets]
    if isinstance(targets, list):
        settings["lora_targets"] = resolve_lora_targets(targets)

    rewards = settings.get("reward")
    weights = settings.get("reward_weights")
    if isinstance(weights, list) and isinstance(rewards, list):
        settings["reward_weights"] = name_reward_weights(rewards, weights)

    parsed = {key: parse_setting(SETTINGS[key], value) for key, value in settings.items()}
    config = Config.from_flags(**parsed)
    refuse_unused(config, flags)
    for mistake in find_mistakes(config):
        raise ValueError(mistake)
    return config


def name_reward_weights(rewards: list[Any], weights: list[Any]) -> Any:
    """
    Return TRL's weights by name. TRL lists them in the order of the rewards, FILE.py:function.

    Returns the weights unchanged if they are not numbers, or if names and weights do not match.
    """
    names = [str(reward).rpartition(":")[2] for reward in rewards]
    are_numbers = all(type(weight) in (int, float) for weight in weights)
    distinct_names = {name for name in names if name.isidentifier()}
    if are_numbers and len(distinct_names) == len(names) == len(weights):
        return dict(zip(names, weights, strict=True))
    return weights


def join_data_sides(eval_data: Any, data: Any = None, **settings: Any) -> dict[str, Any]:
    """Return settings in which `data` names both sides of the data, "TRAIN,HELD_OUT"."""
    if not data:
        raise ValueError(
            f"--eval-data {eval_data} goes with --data FILE, which is trained on; give both"
        )
    train = str(data)
    if not os.path.exists(train):
        train = train.rsplit(",", 1)[0]
    return settings | {"data": f"{train},{eval_data}"}


def resolve_lora_targets(names: list[Any]) -> list[Any]:
    """
    Return the projections that get adapters, in the order of TARGETS.

    names: our projections, a checkpoint's projections, or `all-linear`. Unknown names are kept.

    Raises ValueError if only some parts of a projection are named, because one adapter serves all
    of its parts.
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
                f"--lora-targets {named[0]}: one adapter serves {all_parts} together, in "
                f"{projection}; name {missing_parts} too, or {projection}"
            )
        targets = [name for name in targets if name not in parts]
        if projection not in names:
            targets.append(projection)
    are_known = all(name in TARGETS for name in targets)
    return sorted(targets, key=TARGETS.index) if are_known else targets


def refuse_unused(config: Config, flags: Collection[str]) -> None:
    """
    Raise ValueError that names the settings that were set although this run cannot use them.

    A default value counts as not set, because a run's `config.yaml` holds all defaults. For
    --loss-type sft, a default value that was given as a flag counts as set.
    """
    loss = config.objective.loss_type
    used = USED.get(loss, USED_BY_OTHERS)
    values = config.to_flags()
    defaults = Config.from_flags().to_flags()

    complaints = []
    for key, setting in SETTINGS.items():
        is_set = values[key] != defaults[key] or (loss == "sft" and key in flags)
        if setting.used_by not in used and is_set:
            kind = RUN_KINDS[str(setting.used_by)]
            complaints.append(f"{flag_of(key)} {values[key]!s:.60} is for {kind}")
    if complaints:
        all_complaints = ", ".join(complaints)
        raise ValueError(f"{all_complaints}; --loss-type {loss} cannot use that, leave it out")


def find_mistakes(config: Config) -> Iterator[str]:
    """Yield a description of each contradiction between settings that are valid on their own."""
    yield from _find_judge_mistakes(config)
    yield from _find_sampling_mistakes(config)
    yield from _find_optimizer_mistakes(config)
    yield from _find_source_mistakes(config)
    yield from _find_objective_mistakes(config)
    yield from _find_model_mistakes(config)


def _find_judge_mistakes(config: Config) -> Iterator[str]:
    judge = config.judge
    if re.match("[a-z]+://[^/]*@", judge.url, re.IGNORECASE):
        yield "--judge-url holds a password, which logs would show; put the key into JUDGE_API_KEY"
    if judge.think and judge.mode != "decode":
        yield (
            f"--judge-think {judge.think} needs --judge-mode decode: "
            "logits are read before any thought"
        )
    if judge.url and not judge.model:
        yield f"--judge-url {judge.url} serves models by name; name one with --judge-model"


def _find_sampling_mistakes(config: Config) -> Iterator[str]:
    sampling = config.sampling
    num_rows = sampling.batch * sampling.groups
    if num_rows > MOST_ROWS:
        yield (
            f"--batch {sampling.batch} times --groups {sampling.groups} is {num_rows}; "
            f"it must be at most {MOST_ROWS}"
        )
    mini_batches = config.optimizer.mini_batches
    if sampling.batch % mini_batches:
        yield (
            f"--mini-batches {mini_batches} must divide --batch {sampling.batch}: "
            "groups are not split"
        )
    if "" in sampling.stop:
        yield "--stop has an empty text, which every completion holds; remove it"
    if sampling.temp == 0:
        yield "--temp is 0; training needs completions that differ, so it must be more than 0"


def _find_optimizer_mistakes(config: Config) -> Iterator[str]:
    optimizer = config.optimizer
    if optimizer.kind == "sgd" and config.model.lora_rank:
        yield (
            "--optimizer sgd hardly moves adapters, which begin at 0; "
            "it is for all weights: --lora-rank 0"
        )
    if optimizer.kind == "sgd" and not optimizer.target_kl:
        yield "--optimizer sgd needs a --target-kl above 0, which finds its learning rate"
    if 0 < optimizer.target_kl < LEAST_TARGET_KL:
        yield (
            f"--target-kl is {optimizer.target_kl:g}; below 0.001 it is rounding; "
            "give more, or 0 for no bound"
        )
    layers = optimizer.checkpoint_layers
    if layers not in ("auto", "on", "off") and not layers.isdecimal():
        yield f"--checkpoint-layers is {layers!r}; it must be auto, on, off or a number"


def _find_source_mistakes(config: Config) -> Iterator[str]:
    """Mistakes about the source that a run learns from: replies, a teacher or an adapter."""
    objective = config.objective
    sampling = config.sampling
    if objective.loss_type == "sft" and not config.data.path:
        yield "--loss-type sft needs --data FILE, with columns messages, or prompt and completion"
    if objective.loss_type == "distill":
        if not objective.teacher:
            yield "--loss-type distill learns from a teacher; name one with --teacher"
        if objective.truncated == "punish":
            yield (
                "--truncated punish is a reward, and --loss-type distill learns from none; "
                "set keep or mask"
            )
        if sampling.top_p < 1 or sampling.top_k or sampling.min_p:
            yield (
                "--top-p, --top-k and --min-p: --teacher scores the whole vocabulary; "
                "leave them out"
            )
    if objective.teacher == "self" and not objective.teacher_prompt:
        yield "--teacher self knows no more than the student; give it a --teacher-prompt"
    adapter = config.model.init_adapter
    if adapter and not config.model.lora_rank:
        yield (
            f"--init-adapter {adapter}: --lora-rank 0 trains no adapter; merge it into a model "
            "first: uv run export.py --fuse --adapter DIR --out MODEL"
        )


def _find_objective_mistakes(config: Config) -> Iterator[str]:
    objective = config.objective
    if config.sampling.groups == 1 and not objective.teacher:
        yield "--groups is 1; it must be at least 2, since rewards are compared within a group"
    if is_user_function(objective.advantage) and objective.scale_rewards != "group":
        yield (
            f"--scale-rewards {objective.scale_rewards} is for our advantages; "
            "--advantage is yours, leave it out"
        )
    if objective.advantage == "reinforce" and objective.scale_rewards in ("group", "mean"):
        yield (
            "--advantage reinforce compares with the whole step; set --scale-rewards batch or none"
        )
    is_by_group = objective.advantage == "group" and objective.scale_rewards == "group"
    if objective.combine_rewards == "normalize" and not is_by_group:
        yield (
            "--combine-rewards normalize normalizes within groups; "
            "leave --advantage and --scale-rewards at group"
        )
    upper = objective.epsilon if objective.epsilon_high is None else objective.epsilon_high
    if objective.loss_type == "cispo" and upper < 1:
        yield (
            f"--epsilon-high is {upper}; with --loss-type cispo it caps the ratio itself: "
            "at least 1, usually 5"
        )


def _find_model_mistakes(config: Config) -> Iterator[str]:
    if config.model.lora_rank and not config.model.lora_targets:
        targets = ", ".join(TARGETS)
        yield f"--lora-targets is empty; name some of {targets}, or set --lora-rank 0"
