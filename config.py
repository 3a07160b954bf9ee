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
from collections.abc import Callable, Collection, Iterable, Iterator
from pathlib import Path
from typing import Any, Literal, get_args

import yaml

from flags import RENAMED, Parser, add_flags, check_values, flag, flag_of, load_yaml, size, weights

Switch = Literal["auto", "on", "off"]
Target = Literal["qkv_proj", "o_proj", "gate_up_proj", "down_proj"]
Tracker = Literal["trackio", "tensorboard", "wandb"]
MOST_ROWS = 2**16  # completions a step: on a laptop hours of sampling
TARGETS, TRACKERS = get_args(Target), get_args(Tracker)

# ---- the judge's


@dataclasses.dataclass
class JudgeSettings:
    """Settings of the judge. Raises ValueError naming one that is invalid or conflicts with another."""

    judge_model: str = flag("", "a judge other than the frozen base model; with --judge-url its name there")
    judge_mode: Literal["logits", "decode"] = flag("logits", "score by first-token probabilities or by a decoded reply")
    judge_think: int = flag(0, "maximum thinking tokens before a decoded reply; 0: none", low=0)
    judge_min_mass: float = flag(0.5, "least probability on 1 to 5; below it a score is unreadable", low=1e-9, high=1.0)
    judge_chunk_size: int = flag(24, "evaluations per batch; RUBRIC_JUDGE_BATCH_SIZE is its default", low=1)
    judge_url: str = flag("", "OpenAI-compatible server to ask, as http://127.0.0.1:8080/v1; key in JUDGE_API_KEY")
    judge_concurrency: int = flag(8, "requests to --judge-url at once", low=1, high=2**10)
    judge_timeout: float = flag(60.0, "seconds for one request to --judge-url", low=1e-3, high=1e6)
    judge_retries: int = flag(5, "retries per failed request to --judge-url", low=0, high=100)

    def __post_init__(self) -> None:
        check_values(JudgeSettings, vars(self))
        if re.match("[a-z]+://[^/]*@", self.judge_url, re.IGNORECASE):
            raise ValueError("--judge-url holds a password, which logs would show; put the key into JUDGE_API_KEY")
        if self.judge_think and self.judge_mode != "decode":
            raise ValueError(f"--judge-think {self.judge_think} needs --judge-mode decode: logits come before thoughts")
        if self.judge_url and not self.judge_model:
            raise ValueError(f"--judge-url {self.judge_url} serves models by name; name one with --judge-model")


# ---- a run's


@dataclasses.dataclass
class Training:
    """Settings of training: model, data, method."""

    model: str = flag("", "hub id, Hugging Face directory, `demo` or `demo:rg` (default: demo without a GPU)")
    task: str = flag("", "demo, values, gsm8k, math or rg:NAME,NAME=WEIGHT (--list-tasks): data, rewards, evaluation")
    task_config: str = flag("", "YAML with sizes, levels and held-out number of the problems of --task rg:NAME")
    data: str = flag("", "JSONL, parquet, CSV or hub dataset with a `prompt` column, instead of the task's prompts")
    columns: str = flag("", "names of the data's columns, as prompt=question,answer=answer")
    rubric: str = flag("", "rubric YAML, instead of the task's")
    reward: list[str] = flag(list, "reward functions FILE.py:fn, instead of the task's and of its rubric", nargs="+")
    reward_weights: dict[str, float] = flag(dict, "weights as correct=1,rubric=0.5, over the task's", parse=weights)
    reward_format: Literal["auto", "text", "messages"] = flag(
        "auto", "how reward functions get prompts and completions; auto: as messages where the data's prompts are"
    )
    reward_workers: int = flag(0, "processes calling rewards row by row; 0: one call for all", low=0, high=2**10)
    reward_timeout: float = flag(
        60.0, "seconds per row in --reward-workers; beyond it a row gets the call's lowest reward", low=1e-3, high=1e6
    )
    batch: int = flag(4, "B, prompts per step", low=1, high=2**16)
    groups: int = flag(8, "G, completions per prompt; 1 where a teacher alone trains", low=1, high=2**16)
    rollout_batch_size: int = flag(0, "rows decoded at once; auto: measured on a GPU, else up to 64", low=1, parse=size)
    share_prefix: Switch = flag("auto", "hold a prompt's cache once for its group; auto: measured (GPU) or by length")
    max_tokens: int = flag(256, "maximum tokens per completion", low=1)
    temp: float = flag(1.0, "sampling temperature", low=0)
    top_p: float = flag(1.0, "nucleus sampling; the update uses the same support", low=1e-06, high=1.0)
    top_k: int = flag(0, "sample from the k most likely tokens; 0: from all", low=0)
    min_p: float = flag(0.0, "minimum probability relative to the likeliest token", low=0, high=1.0)
    thinking: bool = flag(False, "enable the chat template's thinking mode")
    steps: int = flag(100, "rollouts, each with --num-iterations optimizer steps", low=1)
    learning_rate: float = flag(1e-4, "peak learning rate (default with --lora-rank 0: a tenth of the recipe's)", low=0)
    lr_schedule: Literal["cosine", "constant"] = flag("cosine", "after the warm-up")
    warmup_steps: int = flag(5, "steps of linear warm-up", low=0)
    weight_decay: float = flag(0.0, "AdamW's weight decay", low=0)
    target_kl: float = flag(0.02, "maximum KL of one update, nats per token; 0: no limit", low=0)
    max_grad_norm: float = flag(1.0, "clip the gradient to this norm", low=1e-09)
    loss_type: Literal["grpo", "bnpo", "dr_grpo", "dapo", "cispo", "sapo", "distill", "sft"] = flag(
        "dapo", "term and average of the token losses; sft: cross-entropy on the replies in --data"
    )
    teacher: str = flag("", "model that scores the student's completions: hub id, directory or `self`, before training")
    teacher_prompt: str = flag("", "text file, a system message for the teacher alone; {answer} is the column's value")
    distill_beta: float = flag(0.5, "divergence: 0 forward KL, 1 reverse KL, between a Jensen-Shannon", low=0, high=1.0)
    distill_coef: float = flag(0.0, "with other losses, add this times log teacher - log student to advantages", low=0)
    train_turns: Literal["all", "last"] = flag("all", "replies of a conversation that --loss-type sft trains")
    importance_sampling_level: Literal["token", "sequence"] = flag("token", "importance ratio per token or sequence")
    advantage: Literal["group", "rloo", "reinforce"] = flag(
        "group", "what a reward is compared with: the mean of its group, of the others in it, of the step"
    )
    scale_rewards: Literal["group", "batch", "none"] = flag("group", "deviation that advantages are divided by")
    combine_rewards: Literal["sum", "normalize"] = flag("sum", "sum several rewards first, or normalize each first")
    signal_floor: float = flag(0.01, "a group is noise if its range is below this share of the step's deviation", low=0)
    epsilon: float = flag(0.2, "the ratio is clipped at 1 - this", low=0)
    epsilon_high: float | None = flag(None, "and at 1 + this (default: --epsilon); for cispo the cap on it", low=0)
    delta: float = flag(0.0, "upper bound on the ratio for negative advantages; 0: none", low=0)
    beta: float = flag(0.0, "weight of the KL term against the model before training", low=0)
    kl_estimator: Literal["k2", "k3", "k3_corrected"] = flag("k3", "estimator of the KL term")
    entropy_coef: float = flag(0.0, "weight of an entropy bonus", low=0)
    top_entropy_quantile: float = flag(1.0, "train only this share of tokens, of highest entropy", low=0, high=1.0)
    num_iterations: int = flag(1, "optimizer steps per rollout", low=1, high=2**10)
    old_logprobs: Literal["step", "sampler"] = flag("step", "old log-probabilities: from the update or the sampler")
    mismatch: Literal["off", "token_truncate", "token_mask", "sequence_truncate", "sequence_mask"] = flag(
        "off", "correction where trainer and sampler disagree"
    )
    mismatch_cap: float = flag(3.0, "largest trusted ratio of trainer to sampler", low=1.0)
    truncated: Literal["keep", "mask", "punish"] = flag("keep", "train, leave out or punish what --max-tokens cut off")
    dynamic_sampling: bool = flag(False, "draw more prompts until --batch groups have rewards that differ")
    dynamic_sampling_cap: int = flag(4, "maximum batches of prompts drawn per step", low=2, high=2**10)
    train_token_budget: int = flag(
        0, "positions per micro-batch, with padding; auto: 1024, on a GPU 2048 where memory allows", low=1, parse=size
    )
    train_share_prefix: Switch = flag("auto", "compute a group's prompt once in the update; auto: on a CPU if it pays")
    checkpoint_layers: str = flag("auto", "layers recomputed in the backward: on, off, a number; auto: as memory needs")
    lora_rank: int = flag(16, "adapter rank; 0: train all weights", low=0, high=2**12)
    lora_scale: float = flag(2.0, "factor of the adapter's output, as in mlx_lm")
    lora_targets: list[Target] = flag(lambda: list(TARGETS), "adapted projections", nargs="+")
    init_adapter: str = flag("", "a run, or an adapter of mlx_lm or PEFT, that training begins with")


@dataclasses.dataclass
class Config(JudgeSettings, Training):
    """Every setting of a run: each field is a flag, and `config.yaml` holds them all, training's first."""

    eval_rubric: str = flag("", "rubric YAML for evaluations only, as the witness of a judge")
    eval_judge_model: str = flag("", "the witness's judge, instead of --judge-model")
    eval_every: int = flag(20, "steps between evaluations; 0: none", low=0)
    eval_limit: int = flag(0, "maximum held-out problems, evenly spread; 0: all", low=0)
    early_stopping: int = flag(0, "--loss-type sft: stop after N evaluations without a lower loss; 0: never", low=0)
    save_every: int = flag(20, "steps between checkpoints", low=1)
    keep: int = flag(3, "checkpoints to keep", low=1)
    curriculum: bool = flag(False, "draw prompts in proportion to the signal that their rewards promise")
    seed: int = flag(0, "seed for prompts, sampling and adapters", low=0)
    report_every: int | None = flag(None, "steps between two pages; 0: never (default: with each evaluation)", low=0)
    record_tokens: int = flag(3500, "tokens per step whose entropy and change are recorded for the page", low=0)
    report_to: list[Tracker] = flag(list, "trackers that get the run's figures, each an extra", nargs="*")

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


NAMES = [field.name for field in dataclasses.fields(Config)]
JUDGE = [field.name for field in dataclasses.fields(JudgeSettings)]
AUTOMATIC = {field.name for field in dataclasses.fields(Config) if field.metadata.get("parse") is size}  # 0: auto

# what may change where a run is resumed: how long it goes on, how often it looks and saves, the memory it takes, and
# who judges
CHANGEABLE = {
    *("steps", "save_every", "keep", "eval_every", "eval_limit", "early_stopping", "report_every", "report_to"),
    *("rollout_batch_size", "train_token_budget", "checkpoint_layers"),
    *JUDGE,
}


def parse(argv: list[str]) -> argparse.Namespace:
    """Parses the flags of train.py; omitted settings are None."""
    parser = Parser("train.py", "GRPO: sample groups of completions, reward them, make the better ones likelier.")
    parser.add_argument("--config", metavar="FILE", help="recipe, instead of the task's; a run's `config.yaml` is one")
    parser.add_argument("--run-dir", metavar="DIR", help="where the run is recorded (default: runs/TASK-TIME)")
    parser.add_argument("--print-config", action="store_true", help="print every setting as YAML and exit")
    parser.add_argument("--list-tasks", action="store_true", help="print the tasks of reasoning-gym and exit")
    parser.add_argument("--resume", metavar="DIR", help="go on with the run in DIR from its newest checkpoint")
    parser.add_argument("--open", action="store_true", help="open the run's page in a browser at the end")
    add_flags(parser, Config)
    return parser.parse_args(argv)


def given(args: argparse.Namespace, names: Iterable[str] = NAMES) -> dict[str, Any]:
    """The settings in `names` among the given flags."""
    return {name: value for name in names if (value := getattr(args, name)) is not None}


# ---- where settings come from

OWN_TASK = {"demo": "demo", "demo:rg": "rg:chain_sum,leg_counting"}  # of the bundled models


def resolve(
    flags: dict[str, Any],
    config_path: str | None,
    resume: str | None,
    choose_model: Callable[[str | None], tuple[str, str]],
) -> tuple[Config, str]:
    """
    The checked settings, and a line that says which model was chosen and why.

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
        config = checked(load_recipe(Path(resume) / "config.yaml") | flags, flags)
        return config, f"model: {config.model}, as before; task: {config.task}"
    recipe = load_recipe(Path(config_path)) if config_path else None
    asked = merged(flags, recipe)  # a mistake is told before a model is downloaded
    model, why = choose_model(asked.model)
    task = asked.task or OWN_TASK.get(model, "values")
    return merged(flags | {"model": model, "task": task}, recipe), f"model: {model}, {why}; task: {task}"


def merged(flags: dict[str, Any], recipe: dict[str, Any] | None) -> Config:
    """The checked settings: flag, else environment, else recipe, else default. recipe: None for that of the task."""
    asked = recipe or {}
    unasked = (of_task(flags.get("task", ""), flags.get("model", "")) if recipe is None else {}) | of_environment()
    if (asked | flags).get("loss_type") == "sft":  # it goes without what it has no use for
        unasked = {name: value for name, value in unasked.items() if name in SFT}
    config = checked(asked | unasked | flags, flags)
    its_rate = "learning_rate" in flags or ("learning_rate" in asked and asked.get("lora_rank") == 0)
    if config.lora_rank == 0 and not its_rate:
        config.learning_rate /= 10  # the recipe's or the default is one for adapters
    return config


def of_environment() -> dict[str, int]:
    """The judge's chunk size if `RUBRIC_JUDGE_BATCH_SIZE` is set; empty means unset. Raises ValueError if invalid."""
    text = os.environ.get("RUBRIC_JUDGE_BATCH_SIZE", "")
    if text and not re.fullmatch("[1-9][0-9]{0,8}", text):
        raise ValueError(f"RUBRIC_JUDGE_BATCH_SIZE={text!r:.60}: it must be a whole number from 1 to 999999999")
    return {"judge_chunk_size": int(text)} if text else {}


def of_task(task: str, model: str) -> dict[str, Any]:
    """The task's defaults from `recipes/`: for rg:NAME those of the model demo:rg, and none for another model."""
    kind = task.partition(":")[0]
    paths = {path.stem: path for path in (Path(__file__).parent / "recipes").glob("*.yaml")}
    path = paths.get("demo-rg" if (model, kind) == ("demo:rg", "rg") else kind)
    return load_recipe(path) if path else {}


def load_recipe(path: Path) -> dict[str, Any]:
    """The settings in a YAML file. Raises ValueError naming an unknown key and the nearest known one."""
    held = load_yaml(path, f"--config {path}")
    if not isinstance(held, dict):
        raise ValueError(f"--config {path} holds no settings; it needs lines like `batch: 8`")
    for key in held:
        if key in RENAMED:
            raise ValueError(f"--config {path}: the setting {key} is called {RENAMED[key]} now")
        if key not in NAMES:
            near = difflib.get_close_matches(str(key)[:40], NAMES, 1, 0.0)[0]
            raise ValueError(f"--config {path}: unknown setting {reprlib.repr(key)}; did you mean {near!r}?")
    return held


def as_yaml(config: Config) -> str:
    """Every setting as YAML; sizes not yet measured are "auto"."""
    held = dataclasses.asdict(config)
    return yaml.safe_dump(
        {name: "auto" if name in AUTOMATIC and not value else value for name, value in held.items()}, sort_keys=False
    )


# ---- which settings a run takes

SFT_ALONE = {"train_turns", "early_stopping"}
SFT = SFT_ALONE | set(
    "model task data columns thinking batch steps learning_rate lr_schedule warmup_steps weight_decay max_grad_norm "
    "loss_type train_token_budget checkpoint_layers lora_rank lora_scale lora_targets init_adapter eval_every "
    "eval_limit save_every keep seed report_every report_to".split()
)
SUPPORT = {"top_p", "top_k", "min_p"}  # of a sampler: less than the whole vocabulary
ON_ADVANTAGES = set(
    "importance_sampling_level advantage scale_rewards combine_rewards signal_floor epsilon epsilon_high delta beta "
    "kl_estimator entropy_coef top_entropy_quantile old_logprobs mismatch dynamic_sampling curriculum".split()
)


def checked(settings: dict[str, Any], flags: Collection[str] = ()) -> Config:
    """
    The settings, each of the right type and in range, without contradiction. Raises ValueError otherwise.

    flags: the names of those given as flags.
    """
    settings = {name: value for name, value in settings.items() if name not in AUTOMATIC or value != "auto"}
    if type(settings.get("checkpoint_layers")) is int:  # as YAML reads it
        settings["checkpoint_layers"] = str(settings["checkpoint_layers"])
    check_values(Config, settings)
    config = Config(**settings)
    refuse_unused(config, flags)
    for mistake in mistakes(config):
        raise ValueError(mistake)
    return config


def refuse_unused(config: Config, flags: Collection[str]) -> None:
    """
    Raises ValueError naming settings that were set and that this run has no use for.

    A default counts as not set, as a run's `config.yaml` holds all of them; but not as a flag for --loss-type sft.
    """
    changed = {name for name, default in vars(Config()).items() if getattr(config, name) != default}
    if config.loss_type == "sft":
        changed |= set(flags) - SFT
    for names, why in unused(config):
        if found := sorted(changed & names):
            said = (f"{flag_of(name)} {getattr(config, name)!s:.60}" for name in found)
            raise ValueError(f"{', '.join(said)}: {why}")


def unused(config: Config) -> Iterator[tuple[set[str], str]]:
    """Settings that would mislead, since this run has no use for them; why, and what to do instead."""
    if config.loss_type == "sft":
        yield set(NAMES) - SFT, "--loss-type sft samples and judges nothing; leave that out"
    else:
        yield SFT_ALONE, "only for --loss-type sft; leave that out"
    if config.loss_type == "distill":
        yield {"distill_coef"}, "only for losses on advantages; leave that out, or --loss-type distill"
        yield ON_ADVANTAGES, "--loss-type distill has no advantages; leave that out"
    else:
        yield {"distill_beta"}, "only for --loss-type distill; leave that out, or choose that loss"
    if config.teacher:
        yield SUPPORT, f"--teacher {config.teacher} scores the whole vocabulary; leave that out"
    else:
        yield {"teacher_prompt", "distill_coef"}, "there is no teacher; name one with --teacher"
    if config.loss_type in ("cispo", "sapo"):
        yield {"delta"}, f"--loss-type {config.loss_type} does not clip; leave that out"
    if config.old_logprobs == "sampler":
        yield {"mismatch"}, "--old-logprobs sampler leaves the trainer's out; set --old-logprobs step"
    if config.advantage == "reinforce":
        yield {"dynamic_sampling"}, "to --advantage reinforce equal rewards are a signal; leave that out"
    if config.groups == 1:
        yield {"dynamic_sampling", "curriculum"}, "in groups of one no rewards differ; set --groups 2 or more"
    if not config.eval_every:
        yield {"early_stopping"}, "there are no evaluations; set --eval-every"
    if not config.lora_rank:
        merge = "merge it into a model first: uv run lora.py --fuse --adapter DIR --out MODEL"
        yield {"init_adapter"}, f"--lora-rank 0 trains no adapter; {merge}"


def mistakes(config: Config) -> Iterator[str]:
    """What is wrong with settings that each are in range."""
    if (num_rows := config.batch * config.groups) > MOST_ROWS:
        yield f"--batch {config.batch} times --groups {config.groups} is {num_rows}; it must be at most {MOST_ROWS}"
    if config.temp == 0:
        yield "--temp is 0; training needs completions that differ, so it must be more than 0"
    if 0 < config.target_kl < 1e-3:
        yield f"--target-kl is {config.target_kl:g}; below 0.001 it is rounding; give more, or 0 for no bound"
    if config.loss_type == "sft" and not config.data:
        yield "--loss-type sft needs --data FILE, with columns messages, or prompt and completion"
    if config.loss_type == "distill" and not config.teacher:
        yield "--loss-type distill learns from a teacher; name one with --teacher"
    if config.loss_type == "distill" and config.truncated == "punish":
        yield "--truncated punish is a reward, and --loss-type distill learns from none; set keep or mask"
    if config.teacher and config.loss_type != "distill" and not config.distill_coef:
        yield f"--teacher {config.teacher} is not asked anything; set --loss-type distill, or --distill-coef 1"
    if config.teacher == "self" and not config.teacher_prompt:
        yield "--teacher self knows no more than the student; give it a --teacher-prompt"
    if config.groups == 1 and not config.teacher:  # with one, see `tasks.refuse_useless_rewards`
        yield "--groups is 1; it must be at least 2, since rewards are compared within a group"
    if config.advantage == "reinforce" and config.scale_rewards == "group":
        yield "--advantage reinforce measures from the whole step; set --scale-rewards batch or none"
    if config.combine_rewards == "normalize" and (config.advantage, config.scale_rewards) != ("group", "group"):
        yield "--combine-rewards normalize normalizes within groups; leave --advantage and --scale-rewards at group"
    upper = config.epsilon if config.epsilon_high is None else config.epsilon_high
    if config.loss_type == "cispo" and upper < 1:
        yield f"--epsilon-high is {upper}; with --loss-type cispo it caps the ratio itself: at least 1, usually 5"
    if config.delta and config.delta <= 1 + upper:
        yield f"--delta is {config.delta}; it must be more than 1 + --epsilon-high, {1 + upper:g}"
    if config.mismatch.endswith("mask") and config.mismatch_cap <= 1:
        why = f"--mismatch {config.mismatch} would leave out tokens for their rounding alone"
        yield f"--mismatch-cap is {config.mismatch_cap:g}; {why}: more than 1, usually 2 or 3"
    if config.checkpoint_layers not in ("auto", "on", "off") and not config.checkpoint_layers.isdecimal():
        yield f"--checkpoint-layers is {config.checkpoint_layers!r}; it must be auto, on, off or a number"
    if config.lora_rank and not config.lora_targets:
        yield f"--lora-targets is empty; name some of {', '.join(TARGETS)}, or set --lora-rank 0"
