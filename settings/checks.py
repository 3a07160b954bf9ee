"""
Whether settings that are each in range make a run: what it has no use for, and what contradicts itself.

Left out: the settings and their ranges (config.py).
"""

import os
import re
from collections.abc import Collection, Iterator
from typing import Any

from config import SETTINGS, TARGETS, Config, is_user_function
from flags import flag_of, parse_setting

MOST_ROWS = 2**16  # completions a step: on a laptop hours of sampling
PARTS = {  # of a checkpoint
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "in_proj": ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a"),
    "gate_up_proj": ("gate_proj", "up_proj"),
}
USED = {
    "sft": (None,),
    "distill": (None, "rollouts", "distill"),
}  # by loss: whose settings (`of`) it uses
FOR = {
    "rollouts": "what samples",
    "grpo": "losses with advantages",
    "distill": "--loss-type distill",
}


def check_settings(settings: dict[str, Any], flags: Collection[str] = ()) -> Config:
    """
    The settings, each of the right type and in range, without contradiction. Raises ValueError otherwise.

    flags: the names of those given as flags. `eval_data`, a flag and a key of recipes, is the held-out side of `data`.
    """
    if "eval_data" in settings:
        settings = join_data_sides(**settings)
    if type(settings.get("checkpoint_layers")) is int:  # as YAML reads it
        settings = settings | {"checkpoint_layers": str(settings["checkpoint_layers"])}
    if isinstance(asked := settings.get("lora_targets"), str | list):
        settings = settings | {
            "lora_targets": resolve_lora_targets([asked] if isinstance(asked, str) else asked)
        }
    if isinstance(weights := settings.get("reward_weights"), list) and isinstance(
        settings.get("reward"), list
    ):
        settings = settings | {"reward_weights": name_reward_weights(settings["reward"], weights)}
    config = Config.from_flags(
        **{key: parse_setting(SETTINGS[key], value) for key, value in settings.items()}
    )
    refuse_unused(config, flags)
    for mistake in find_mistakes(config):
        raise ValueError(mistake)
    return config


def name_reward_weights(rewards: list[Any], weights: list[Any]) -> Any:
    """TRL's weights, in the order of the rewards FILE.py:function, by name; others as they are."""
    names = [str(one).rpartition(":")[2] for one in rewards]
    ok = {*map(type, weights)} <= {int, float} and len({*filter(str.isidentifier, names)}) == len(
        names
    ) == len(weights)
    return dict(zip(names, weights, strict=True)) if ok else weights


def join_data_sides(eval_data: Any, data: Any = None, **others: Any) -> dict[str, Any]:
    """Settings with both sides of the data as one."""
    if not data:
        raise ValueError(
            f"--eval-data {eval_data} goes with --data FILE, which is trained on; give both"
        )
    train = str(data) if os.path.exists(str(data)) else str(data).rsplit(",", 1)[0]
    return others | {"data": f"{train},{eval_data}"}


def resolve_lora_targets(asked: list[Any]) -> list[Any]:
    """
    The projections that adapters are put on, by names of theirs, of a checkpoint, or `all-linear`; in order.

    Raises ValueError for a part without its neighbours: one adapter serves the rows of all.
    """
    if asked == ["all-linear"]:
        return list(TARGETS)
    fused = list(asked)
    for whole, parts in PARTS.items():
        named = [part for part in parts if part in asked]
        if lacking := [part for part in parts if part not in asked] if named else []:
            raise ValueError(
                f"--lora-targets {named[0]}: one adapter serves {', '.join(parts)} together, in {whole}; "
                f"name {' and '.join(lacking)} too, or {whole}"
            )
        fused = [one for one in fused if one not in parts] + (
            [whole] if named and whole not in asked else []
        )
    return sorted(fused, key=TARGETS.index) if all(one in TARGETS for one in fused) else fused


def refuse_unused(config: Config, flags: Collection[str]) -> None:
    """
    Raises ValueError naming settings that were set and that this run has no use for.

    A default counts as not set, as a run's `config.yaml` holds all of them; but not as a flag for --loss-type sft.
    """
    loss, values, defaults = (
        config.objective.loss_type,
        config.to_flags(),
        Config.from_flags().to_flags(),
    )
    unused = [
        key
        for key, one in SETTINGS.items()
        if one.of not in USED.get(loss, (None, "rollouts", "grpo"))
    ]
    if said := [
        f"{flag_of(key)} {values[key]!s:.60} is for {FOR[str(SETTINGS[key].of)]}"
        for key in unused
        if values[key] != defaults[key] or (loss == "sft" and key in flags)
    ]:
        raise ValueError(f"{', '.join(said)}; --loss-type {loss} has no use for that, leave it out")


def find_mistakes(config: Config) -> Iterator[str]:
    """What is wrong with settings that each are in range."""
    objective, optimizer, sampling, judge = (
        config.objective,
        config.optimizer,
        config.sampling,
        config.judge,
    )
    groups = sampling.groups
    if re.match("[a-z]+://[^/]*@", judge.url, re.IGNORECASE):
        yield "--judge-url holds a password, which logs would show; put the key into JUDGE_API_KEY"
    if judge.think and judge.mode != "decode":
        yield f"--judge-think {judge.think} needs --judge-mode decode: logits come before thoughts"
    if judge.url and not judge.model:
        yield f"--judge-url {judge.url} serves models by name; name one with --judge-model"
    if (num_rows := sampling.batch * groups) > MOST_ROWS:
        yield f"--batch {sampling.batch} times --groups {groups} is {num_rows}; it must be at most {MOST_ROWS}"
    if sampling.batch % optimizer.mini_batches:
        yield f"--mini-batches {optimizer.mini_batches} must divide --batch {sampling.batch}: a part has whole groups"
    if "" in sampling.stop:
        yield "--stop has an empty text, which every completion holds; remove it"
    if sampling.temp == 0:
        yield "--temp is 0; training needs completions that differ, so it must be more than 0"
    if optimizer.kind == "sgd" and config.model.lora_rank:
        yield "--optimizer sgd hardly moves adapters, which begin at 0; it is for all weights: --lora-rank 0"
    if optimizer.kind == "sgd" and not optimizer.target_kl:
        yield "--optimizer sgd needs a --target-kl above 0, which finds its learning rate"
    if 0 < optimizer.target_kl < 1e-3:
        yield f"--target-kl is {optimizer.target_kl:g}; below 0.001 it is rounding; give more, or 0 for no bound"
    if objective.loss_type == "sft" and not config.data.path:
        yield "--loss-type sft needs --data FILE, with columns messages, or prompt and completion"
    if objective.loss_type == "distill" and not objective.teacher:
        yield "--loss-type distill learns from a teacher; name one with --teacher"
    if objective.loss_type == "distill" and objective.truncated == "punish":
        yield "--truncated punish is a reward, and --loss-type distill learns from none; set keep or mask"
    if objective.loss_type == "distill" and (
        sampling.top_p < 1 or sampling.top_k or sampling.min_p
    ):
        yield "--top-p, --top-k and --min-p: --teacher scores the whole vocabulary; leave them out"
    if config.model.init_adapter and not config.model.lora_rank:
        merge = "merge it into a model first: uv run lora.py --fuse --adapter DIR --out MODEL"
        yield f"--init-adapter {config.model.init_adapter}: --lora-rank 0 trains no adapter; {merge}"
    if objective.teacher == "self" and not objective.teacher_prompt:
        yield "--teacher self knows no more than the student; give it a --teacher-prompt"
    if groups == 1 and not objective.teacher:
        yield "--groups is 1; it must be at least 2, since rewards are compared within a group"
    if is_user_function(objective.advantage) and objective.scale_rewards != "group":
        yield f"--scale-rewards {objective.scale_rewards} is for our advantages; --advantage is yours, leave it out"
    if objective.advantage == "reinforce" and objective.scale_rewards in ("group", "mean"):
        yield "--advantage reinforce measures from the whole step; set --scale-rewards batch or none"
    by_group = (objective.advantage, objective.scale_rewards) == ("group", "group")
    if objective.combine_rewards == "normalize" and not by_group:
        yield "--combine-rewards normalize normalizes within groups; leave --advantage and --scale-rewards at group"
    upper = objective.epsilon if objective.epsilon_high is None else objective.epsilon_high
    if objective.loss_type == "cispo" and upper < 1:
        yield f"--epsilon-high is {upper}; with --loss-type cispo it caps the ratio itself: at least 1, usually 5"
    if (
        optimizer.checkpoint_layers not in ("auto", "on", "off")
        and not optimizer.checkpoint_layers.isdecimal()
    ):
        yield f"--checkpoint-layers is {optimizer.checkpoint_layers!r}; it must be auto, on, off or a number"
    if config.model.lora_rank and not config.model.lora_targets:
        yield f"--lora-targets is empty; name some of {', '.join(TARGETS)}, or set --lora-rank 0"
