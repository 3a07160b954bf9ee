"""
Every setting of a run, declared once: each field is a flag, a key in YAML, and a check.

Precedence: flag, environment, recipe, default. Settings are checked here, before a model is loaded. Left out: what they
mean to the algorithm, which is in the files that use them. Imports only the standard library, YAML and flags.py.
"""

import argparse
import dataclasses
import difflib
import os
import re
import reprlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

from flags import RENAMED, Parser, add_flags, check_values, flag, flag_of, load_yaml, size, weights

TARGETS = ("qkv_proj", "o_proj", "gate_up_proj", "down_proj")
TRACKERS = ("trackio", "tensorboard", "wandb")
# all that --loss-type sft has a use for; every other setting is refused there
SFT = set(
    "model task data columns thinking batch steps learning_rate lr_schedule warmup_steps weight_decay max_grad_norm "
    "loss_type train_turns train_token_budget checkpoint_layers lora_rank lora_scale lora_targets init_adapter "
    "eval_every eval_limit early_stopping save_every keep seed report_every report_to".split()
)

# ---- the judge's


@dataclasses.dataclass
class JudgeSettings:
    """Settings of the judge."""

    judge_model: str = flag("", "a judge other than the frozen base model; with --judge-url its name there")
    judge_mode: str = flag(
        "logits",
        "how a score is read: from the first token's probabilities, or from a decoded reply",
        choices=("logits", "decode"),
    )
    judge_think: int = flag(0, "maximum thinking tokens before a decoded reply; 0: none", low=0)
    judge_min_mass: float = flag(0.5, "least probability on 1 to 5; below it a score is unreadable", low=1e-9, high=1.0)
    judge_chunk_size: int = flag(24, "evaluations per batch; RUBRIC_JUDGE_BATCH_SIZE is its default", low=1)
    judge_url: str = flag("", "OpenAI-compatible server to ask, as http://127.0.0.1:8080/v1; key in JUDGE_API_KEY")
    judge_concurrency: int = flag(8, "requests to --judge-url at once", low=1, high=2**10)
    judge_timeout: float = flag(60.0, "seconds for one request to --judge-url", low=1e-3, high=1e6)
    judge_retries: int = flag(5, "retries per failed request to --judge-url", low=0, high=100)


def check_judge(settings: JudgeSettings) -> None:
    """Raises ValueError naming a judge flag that is invalid or conflicts with another."""
    check_values(JudgeSettings, vars(settings))
    if (think := settings.judge_think) and settings.judge_mode != "decode":
        raise ValueError(f"--judge-think {think} needs --judge-mode decode: logits are read before any thought")
    if settings.judge_url and not settings.judge_model:
        raise ValueError(f"--judge-url {settings.judge_url} serves models by name; name one with --judge-model")


def judge_of_flags(args: argparse.Namespace) -> JudgeSettings:
    """The checked settings of the judge: flag, else environment, else default."""
    names = [field.name for field in dataclasses.fields(JudgeSettings)]
    given = {name: getattr(args, name) for name in names if getattr(args, name) is not None}
    settings = JudgeSettings(**of_environment() | given)
    check_judge(settings)
    return settings


def of_environment() -> dict[str, int]:
    """The judge's chunk size if `RUBRIC_JUDGE_BATCH_SIZE` is set; empty means unset. Raises ValueError if invalid."""
    text = os.environ.get("RUBRIC_JUDGE_BATCH_SIZE")
    if not text:
        return {}
    if not re.fullmatch("[1-9][0-9]{0,8}", text):
        raise ValueError(f"RUBRIC_JUDGE_BATCH_SIZE={text!r:.60}: it must be a whole number from 1 to 999999999")
    return {"judge_chunk_size": int(text)}


# ---- a run's


@dataclasses.dataclass
class Training:
    """Settings of training: model, data, method."""

    model: str = flag("", "hub id, Hugging Face directory, `demo` or `demo:rg` (default: demo without a GPU)")
    task: str = flag(
        "", "demo, values, gsm8k, math or rg:NAME,NAME=WEIGHT (--list-tasks): data, rewards and evaluation in one name"
    )
    task_config: str = flag("", "YAML with sizes, levels and held-out number of the problems of --task rg:NAME")
    data: str = flag("", "JSONL, parquet, CSV or hub dataset with a `prompt` column, instead of the task's prompts")
    columns: str = flag("", "names of the data's columns, as prompt=question,answer=answer")
    rubric: str = flag("", "rubric YAML, instead of the task's")
    reward: list[str] = flag(list, "reward functions FILE.py:fn, instead of the task's and of its rubric", nargs="+")
    reward_weights: dict[str, float] = flag(dict, "weights as correct=1,rubric=0.5, over the task's", parse=weights)
    reward_format: str = flag(
        "auto",
        "how reward functions get prompts and completions; auto: as messages where the data's prompts are messages",
        choices=("auto", "text", "messages"),
    )
    reward_workers: int = flag(0, "processes calling rewards row by row; 0: one call for all", low=0, high=2**10)
    reward_timeout: float = flag(
        60.0,
        "seconds for one row in --reward-workers; beyond it a row gets the call's lowest reward",
        low=1e-3,
        high=1e6,
    )
    batch: int = flag(4, "B, prompts per step", low=1, high=2**16)
    groups: int = flag(8, "G, completions per prompt; 1 where a teacher alone trains", low=1, high=2**16)
    rollout_batch_size: int = flag(
        0, "rows decoded at once; auto: measured on a GPU, else at most 64", low=1, parse=size
    )
    share_prefix: str = flag(
        "auto",
        "hold a prompt's cache once for its group; auto: measured on a GPU, else by the length of the prompt",
        choices=("auto", "on", "off"),
    )
    max_tokens: int = flag(256, "maximum tokens per completion", low=1)
    temp: float = flag(1.0, "sampling temperature", low=0)
    top_p: float = flag(1.0, "nucleus sampling; the update uses the same support", low=1e-06, high=1.0)
    top_k: int = flag(0, "sample from the k most likely tokens; 0: from all", low=0)
    min_p: float = flag(0.0, "minimum probability relative to the likeliest token", low=0, high=1.0)
    thinking: bool = flag(False, "enable the chat template's thinking mode")
    steps: int = flag(100, "rollouts, each with --num-iterations optimizer steps", low=1)
    learning_rate: float = flag(1e-4, "peak learning rate (default with --lora-rank 0: a tenth of the recipe's)", low=0)
    lr_schedule: str = flag("cosine", "after the warm-up", choices=("cosine", "constant"))
    warmup_steps: int = flag(5, "steps of linear warm-up", low=0)
    weight_decay: float = flag(0.0, "AdamW's weight decay", low=0)
    target_kl: float = flag(0.02, "maximum KL of one update, nats per token; 0: no limit", low=0)
    max_grad_norm: float = flag(1.0, "clip the gradient to this norm", low=1e-09)
    loss_type: str = flag(
        "dapo",
        "term and average of the token losses; sft: cross-entropy on the replies in --data",
        choices=("grpo", "bnpo", "dr_grpo", "dapo", "cispo", "sapo", "distill", "sft"),
    )
    teacher: str = flag("", "model that scores the student's completions: hub id, directory or `self`, before training")
    teacher_prompt: str = flag("", "text file, a system message for the teacher alone; {answer} is the column's value")
    distill_beta: float = flag(
        0.5, "divergence of --loss-type distill: 0 forward KL, 1 reverse KL, between a Jensen-Shannon", low=0, high=1.0
    )
    distill_coef: float = flag(
        0.0, "with another loss, add this times log teacher - log student to each token's advantage", low=0
    )
    train_turns: str = flag("all", "replies of a conversation that --loss-type sft trains", choices=("all", "last"))
    importance_sampling_level: str = flag(
        "token", "importance ratio per token or per sequence", choices=("token", "sequence")
    )
    advantage: str = flag(
        "group",
        "what a reward is compared with: the mean of its group, of the others in it, of the step",
        choices=("group", "rloo", "reinforce"),
    )
    scale_rewards: str = flag("group", "deviation that advantages are divided by", choices=("group", "batch", "none"))
    combine_rewards: str = flag(
        "sum", "sum several rewards first, or normalize each first", choices=("sum", "normalize")
    )
    signal_floor: float = flag(
        0.01, "a group with a smaller range, as a share of the step's deviation, is noise", low=0
    )
    epsilon: float = flag(0.2, "the ratio is clipped at 1 - this", low=0)
    epsilon_high: float | None = flag(None, "and at 1 + this (default: --epsilon); for cispo the cap on it", low=0)
    delta: float = flag(0.0, "upper bound on the ratio for negative advantages; 0: none", low=0)
    beta: float = flag(0.0, "weight of the KL term against the model before training", low=0)
    kl_estimator: str = flag("k3", "estimator of the KL term", choices=("k2", "k3", "k3_corrected"))
    entropy_coef: float = flag(0.0, "weight of an entropy bonus", low=0)
    top_entropy_quantile: float = flag(1.0, "train only this share of tokens, of highest entropy", low=0, high=1.0)
    num_iterations: int = flag(1, "optimizer steps per rollout", low=1, high=2**10)
    old_logprobs: str = flag(
        "step",
        "take old log-probabilities from the update's forward pass or from the sampler",
        choices=("step", "sampler"),
    )
    mismatch: str = flag(
        "off",
        "correction where trainer and sampler disagree",
        choices=("off", "token_truncate", "token_mask", "sequence_truncate", "sequence_mask"),
    )
    mismatch_cap: float = flag(3.0, "largest trusted ratio of trainer to sampler", low=1.0)
    truncated: str = flag(
        "keep",
        "completions cut off at --max-tokens: train them, leave them out, or punish them",
        choices=("keep", "mask", "punish"),
    )
    dynamic_sampling: bool = flag(False, "draw more prompts until --batch groups have rewards that differ")
    dynamic_sampling_cap: int = flag(4, "maximum batches of prompts drawn per step", low=2, high=2**10)
    train_token_budget: int = flag(
        0,
        "maximum positions per micro-batch, padding included; auto: 1024, on a GPU 2048 where memory allows",
        low=1,
        parse=size,
    )
    train_share_prefix: str = flag(
        "auto",
        "compute a group's prompt once in the update; auto: on a CPU where it saves enough positions",
        choices=("auto", "on", "off"),
    )
    checkpoint_layers: str = flag(
        "auto", "layers recomputed in the backward: on, off, a number; auto: as memory requires"
    )
    lora_rank: int = flag(16, "adapter rank; 0: train all weights", low=0, high=2**12)
    lora_scale: float = flag(2.0, "factor of the adapter's output, as in mlx_lm")
    lora_targets: list[str] = flag(lambda: list(TARGETS), "adapted projections", nargs="+", choices=TARGETS)
    init_adapter: str = flag("", "a run, or an adapter of mlx_lm or PEFT, that training begins with")


@dataclasses.dataclass
class Config(JudgeSettings, Training):
    """Every setting of a run: each field is a flag, and `config.yaml` holds them all, training's first."""

    eval_rubric: str = flag("", "rubric YAML for evaluations only, as the witness of a judge")
    eval_judge_model: str = flag("", "the witness's judge, instead of --judge-model")
    eval_every: int = flag(20, "steps between evaluations; 0: none", low=0)
    eval_limit: int = flag(0, "maximum held-out problems, evenly spread; 0: all", low=0)
    early_stopping: int = flag(
        0, "--loss-type sft: stop after this many evaluations in a row without a lower loss; 0: never", low=0
    )
    save_every: int = flag(20, "steps between checkpoints", low=1)
    keep: int = flag(3, "checkpoints to keep", low=1)
    curriculum: bool = flag(False, "draw prompts in proportion to the signal that their rewards promise")
    seed: int = flag(0, "seed for prompts, sampling and adapters", low=0)
    report_every: int | None = flag(None, "steps between two pages; 0: never (default: with each evaluation)", low=0)
    record_tokens: int = flag(3500, "tokens per step whose entropy and change are recorded for the page", low=0)
    report_to: list[str] = flag(list, "trackers that get the run's figures, each an extra", nargs="*", choices=TRACKERS)

    @property
    def compares_rewards(self) -> bool:
        """Whether rewards are compared within groups; else they are only looked at."""
        return self.loss_type != "distill" and self.groups > 1

    @property
    def sharing(self) -> bool | None:
        """`share_prefix` as an argument of `sampler.rollout`."""
        return {"auto": None, "on": True, "off": False}[self.share_prefix]

    def num_checkpointed(self, num_layers: int) -> int:
        """The number of layers in `checkpoint_layers`; 0 while `auto` is undecided."""
        named = {"auto": 0, "off": 0, "on": num_layers}
        return named[self.checkpoint_layers] if self.checkpoint_layers in named else int(self.checkpoint_layers)


AUTOMATIC = {field.name for field in dataclasses.fields(Config) if field.metadata.get("parse") is size}  # 0: auto

# what may change where a run is resumed: how long it goes on, how often it looks and saves, the memory it takes, and
# who judges
CHANGEABLE = {
    *("steps", "save_every", "keep", "eval_every", "eval_limit", "early_stopping", "report_every", "report_to"),
    *("rollout_batch_size", "train_token_budget", "checkpoint_layers"),
    *(field.name for field in dataclasses.fields(JudgeSettings)),
}


def parse(argv: list[str]) -> argparse.Namespace:
    """Parses the flags of train.py; omitted settings are None."""
    parser = Parser("train.py", "GRPO: sample groups of completions, reward them, make the better ones likelier.")
    parser.add_argument(
        "--config", metavar="FILE", help="recipe, instead of the task's; a run's `config.yaml` repeats it"
    )
    parser.add_argument("--run-dir", metavar="DIR", help="where the run is recorded (default: runs/TASK-TIME)")
    parser.add_argument("--print-config", action="store_true", help="print every setting as YAML and exit")
    parser.add_argument("--list-tasks", action="store_true", help="print the tasks of reasoning-gym and exit")
    parser.add_argument("--resume", metavar="DIR", help="go on with the run in DIR from its newest checkpoint")
    parser.add_argument("--open", action="store_true", help="open the run's page in a browser at the end")
    add_flags(parser, Config)
    return parser.parse_args(argv)


def given(args: argparse.Namespace) -> dict[str, Any]:
    """The settings among the given flags."""
    named = {field.name: getattr(args, field.name, None) for field in dataclasses.fields(Config)}
    return {name: value for name, value in named.items() if value is not None}


OWN_TASK = {"demo": "demo", "demo:rg": "rg:chain_sum,leg_counting"}  # of the bundled models


def resolve(
    flags: dict[str, Any],
    config_path: str | None,
    resume: str | None,
    choose_model: Callable[[str | None], tuple[str, str]],
) -> tuple[Config, str]:
    """
    The checked settings (default < recipe < environment < flag), and a line that says which model was chosen and why.

    choose_model: requested model -> chosen model, and the reason. A resumed run keeps its settings except those in
    CHANGEABLE.
    """
    if resume:
        if config_path:
            raise ValueError(f"--config {config_path} cannot change a resumed run; start a new one")
        if not (Path(resume) / "config.yaml").is_file():
            raise ValueError(f"--resume {resume}: no config.yaml there; give the directory of a run")
        if fixed := flags.keys() - CHANGEABLE:
            raise ValueError(f"{flag_of(min(fixed))} cannot change in a resumed run; start a new one")
        config = checked(load_recipe(Path(resume) / "config.yaml") | flags)
        _refuse_for_sft(config, flags)
        return config, f"model: {config.model}, as before; task: {config.task}"
    recipe = load_recipe(Path(config_path)) if config_path else _task_recipe(flags)
    _refuse_for_sft(checked(recipe | _environment_of(recipe | flags) | flags), flags)  # before a model is downloaded
    model, why = choose_model((recipe | flags).get("model"))
    task = (recipe | flags).get("task") or OWN_TASK.get(model, "values")
    if not config_path:
        recipe = _task_recipe(flags | {"model": model, "task": task})
    rate = _rate_of_all_weights(recipe, flags)
    environment = _environment_of(recipe | flags)
    config = checked(recipe | environment | rate | flags | {"model": model, "task": task})
    return config, f"model: {model}, {why}; task: {task}"


def _task_recipe(flags: dict[str, Any]) -> dict[str, Any]:
    """The defaults of the flags' task from `recipes/`, or of demo:rg's for rg:NAME; empty where there are none."""
    task, model = flags.get("task"), flags.get("model")
    kind = f"{task and task.partition(':')[0]}"
    path = Path(__file__).parent / "recipes" / f"{'demo-rg' if (model, kind) == ('demo:rg', 'rg') else kind}.yaml"
    recipe = load_recipe(path) if path.is_file() else {}
    return {name: recipe[name] for name in recipe if flags.get("loss_type") != "sft" or name in SFT}


def _environment_of(settings: dict[str, Any]) -> dict[str, int]:
    """What the environment sets of such a run; nothing without a judge."""
    return {} if settings.get("loss_type") == "sft" else of_environment()


def _refuse_for_sft(config: Config, flags: dict[str, Any]) -> None:
    """Raises ValueError naming the flags that --loss-type sft has no use for, whatever their value."""
    if config.loss_type == "sft" and (unused := sorted(flags.keys() - SFT)):
        raise ValueError(_unused(unused))


def _unused(names: list[str]) -> str:
    return f"{', '.join(map(flag_of, names))}: --loss-type sft samples and judges nothing; leave that out"


def _rate_of_all_weights(recipe: dict[str, Any], flags: dict[str, Any]) -> dict[str, float]:
    """A tenth of an adapter recipe's learning rate, if `--lora-rank 0` applies it to all weights."""
    if flags.get("lora_rank") != 0 or recipe.get("lora_rank") == 0:
        return {}
    return {"learning_rate": recipe.get("learning_rate", Config.learning_rate) / 10}


def load_recipe(path: Path) -> dict[str, Any]:
    """The settings in a YAML file. Raises ValueError naming an unknown key and the nearest known one."""
    held = load_yaml(path, f"--config {path}")
    if not isinstance(held, dict):
        raise ValueError(f"--config {path} holds no settings; it needs lines like `batch: 8`")
    names = [field.name for field in dataclasses.fields(Config)]
    for key in held:
        if key in RENAMED:
            raise ValueError(f"--config {path}: the setting {key} is called {RENAMED[key]} now")
        if key not in names:
            near = difflib.get_close_matches(str(key)[:40], names, 1, 0.0)[0]
            raise ValueError(f"--config {path}: unknown setting {reprlib.repr(key)}; did you mean {near!r}?")
    return held


def as_yaml(config: Config) -> str:
    """Every setting as YAML; sizes not yet measured are "auto"."""
    held = dataclasses.asdict(config)
    return yaml.safe_dump(
        {name: "auto" if name in AUTOMATIC and not value else value for name, value in held.items()}, sort_keys=False
    )


def checked(settings: dict[str, Any]) -> Config:
    """A configuration in which every value has the right type and range. Raises ValueError otherwise."""
    settings = {name: value for name, value in settings.items() if name not in AUTOMATIC or value != "auto"}
    if type(settings.get("checkpoint_layers")) is int:  # as YAML reads it
        settings["checkpoint_layers"] = str(settings["checkpoint_layers"])
    check_values(Config, settings)
    config = Config(**settings)
    check_judge(config)
    _check_sft(config)
    if config.temp == 0:
        raise ValueError("--temp is 0; training needs completions that differ, so it must be more than 0")
    if 0 < config.target_kl < 1e-3:
        raise ValueError(
            f"--target-kl is {config.target_kl:g}; below 0.001 it is rounding; give more, or 0 for no bound"
        )
    _check_objective(config)
    _check_distillation(config)
    _check_groups(config)
    if config.checkpoint_layers not in ("auto", "on", "off") and not config.checkpoint_layers.isdecimal():
        raise ValueError(f"--checkpoint-layers is {config.checkpoint_layers!r}; it must be auto, on, off or a number")
    if config.lora_rank and not config.lora_targets:
        raise ValueError(f"--lora-targets is empty; name some of {', '.join(TARGETS)}, or set --lora-rank 0")
    return config


# the settings of losses on advantages, and the support of a sampler that is not the whole vocabulary
ON_ADVANTAGES = (
    *("importance_sampling_level", "advantage", "scale_rewards", "combine_rewards", "signal_floor", "epsilon"),
    *("epsilon_high", "delta", "beta", "kl_estimator", "entropy_coef", "top_entropy_quantile", "old_logprobs"),
    *("mismatch", "dynamic_sampling", "curriculum"),
)
SUPPORT = ("top_p", "top_k", "min_p")


def _check_distillation(config: Config) -> None:
    """Raises ValueError for settings of a teacher that lack another, or that have no effect beside it."""
    default, teacher = Config(), f"--teacher {config.teacher}"
    distilled = config.loss_type == "distill"
    changed = {name for name in vars(default) if getattr(config, name) != getattr(default, name)}

    def said(name: str) -> str:
        return f"{flag_of(name)} {getattr(config, name)}"

    if not config.teacher:
        if distilled:
            raise ValueError("--loss-type distill learns from a teacher; name one with --teacher")
        for name in ("teacher_prompt", "distill_coef"):
            if name in changed:
                raise ValueError(f"{said(name)} needs a teacher; name one with --teacher")
    if not distilled and "distill_beta" in changed:
        raise ValueError(f"{said('distill_beta')} is for --loss-type distill; leave it out, or set that")
    if not config.teacher:
        return
    if distilled and config.distill_coef:
        raise ValueError(f"{said('distill_coef')} is for losses on advantages; leave it out, or --loss-type distill")
    if not distilled and not config.distill_coef:
        raise ValueError(f"{teacher} is not asked anything; set --loss-type distill, or --distill-coef 1")
    if config.teacher == "self" and not config.teacher_prompt:
        raise ValueError(f"{teacher} knows no more than the student; give it a --teacher-prompt")
    for name in (*SUPPORT, *(ON_ADVANTAGES if distilled else ())):
        if name in changed:
            why = (
                f"{teacher} scores the whole vocabulary" if name in SUPPORT else "--loss-type distill has no advantages"
            )
            raise ValueError(f"{said(name)}: {why}; leave it out")
    if distilled and config.truncated == "punish":
        raise ValueError("--truncated punish is a reward, and --loss-type distill learns from none; set keep or mask")


def _check_groups(config: Config) -> None:
    """Raises ValueError where groups of one completion leave nothing to learn from; see `tasks.refuse_lone_rewards`."""
    if config.groups > 1:
        return
    if not config.teacher and config.loss_type != "sft":
        raise ValueError("--groups is 1; it must be at least 2, since rewards are compared within a group")
    for name in ("dynamic_sampling", "curriculum"):
        if getattr(config, name):
            raise ValueError(f"{flag_of(name)} goes by rewards that differ within a group; set --groups 2 or more")


def _check_sft(config: Config) -> None:
    """Raises ValueError for settings that only --loss-type sft has, or has not, and for an adapter without a place."""
    if config.loss_type == "sft":
        default = Config()
        names = (field.name for field in dataclasses.fields(Config))
        if unused := [name for name in names if name not in SFT and getattr(config, name) != getattr(default, name)]:
            raise ValueError(_unused(unused))
        if not config.data:
            raise ValueError("--loss-type sft needs --data FILE, with columns messages, or prompt and completion")
    elif config.early_stopping:
        raise ValueError(f"--early-stopping {config.early_stopping} is for --loss-type sft; leave it out")
    elif config.train_turns != "all":
        raise ValueError(f"--train-turns {config.train_turns} is for --loss-type sft; leave it out")
    if config.early_stopping and not config.eval_every:
        raise ValueError(f"--early-stopping {config.early_stopping} needs evaluations; set --eval-every")
    if config.init_adapter and not config.lora_rank:
        raise ValueError(
            f"--init-adapter {config.init_adapter} has no place with --lora-rank 0; merge it into a model first: "
            "uv run lora.py --fuse --adapter DIR --out MODEL"
        )


def _check_objective(config: Config) -> None:
    """Raises ValueError for settings of the update that conflict or would have no effect."""
    if config.advantage == "reinforce" and config.scale_rewards == "group":
        raise ValueError("--advantage reinforce measures from the whole step; set --scale-rewards batch or none")
    if config.advantage == "reinforce" and config.dynamic_sampling:
        raise ValueError("--dynamic-sampling has no use for --advantage reinforce, to which equal rewards are a signal")
    if config.combine_rewards == "normalize" and (config.advantage, config.scale_rewards) != ("group", "group"):
        raise ValueError(
            "--combine-rewards normalize normalizes within groups; leave --advantage and --scale-rewards at group"
        )
    upper = config.epsilon if config.epsilon_high is None else config.epsilon_high
    if config.loss_type == "cispo" and upper < 1:
        raise ValueError(
            f"--epsilon-high is {upper}; with --loss-type cispo it caps the ratio itself: at least 1, usually 5"
        )
    if config.delta and config.loss_type in ("cispo", "sapo"):
        raise ValueError(f"--delta is {config.delta}; --loss-type {config.loss_type} does not clip, so leave it out")
    if config.delta and config.delta <= 1 + upper:
        raise ValueError(f"--delta is {config.delta}; it must be more than 1 + --epsilon-high, {1 + upper:g}")
    if config.mismatch != "off" and config.old_logprobs == "sampler":
        raise ValueError("--mismatch compares the trainer's old policy with the sampler's; set --old-logprobs step")
    if config.mismatch.endswith("mask") and config.mismatch_cap <= 1:
        raise ValueError(
            f"--mismatch-cap is {config.mismatch_cap:g}; --mismatch {config.mismatch} would leave out "
            "tokens for their rounding alone: more than 1, usually 2 or 3"
        )
