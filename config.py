"""
Every setting of a run, declared once: a field is a flag, a key in YAML, a check, and says which runs use it.

Precedence: flag, environment, recipe, default. Settings are frozen and are checked here, before a model is loaded. Left
out: what they mean to the algorithm, which is in the files that use them. Imports only the standard library, YAML and
flags.py.
"""

import argparse
import dataclasses
import os
import re
import reprlib
from collections.abc import Callable, Collection, Iterable, Iterator
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

import yaml

from flags import Parser, Setting, add_flags, check_values, flag, flag_of, hint, load_yaml, no_run, seeds, size, weights

Switch = Literal["auto", "on", "off"]
Target = Literal["qkv_proj", "o_proj", "in_proj", "out_proj", "gate_up_proj", "down_proj"]
Tracker = Literal["trackio", "tensorboard", "wandb"]
MOST_ROWS = 2**16  # completions a step: on a laptop hours of sampling
TARGETS = get_args(Target)
PARTS = {  # of a checkpoint
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "in_proj": ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a"),
    "gate_up_proj": ("gate_proj", "up_proj"),
}

# In `flag`: `key` is the setting's name where it is not that of its field; `of` names the runs that use it (default:
# all): "rollouts" those that sample, "grpo" those with advantages, "distill", "sft". `later`: a resumed run may change
# it. `first`: --help shows it. `file`: it may name files, see `located`.


@dataclasses.dataclass(frozen=True)
class ModelSettings:
    """Model and adapters"""

    name: str = flag(
        "",
        "hub id, directory, GGUF file, `smollm2`, `demo`, `demo:rg` or `demo:tools`; without a GPU demo",
        key="model",
        first=True,
        file=True,
    )
    lora_rank: int = flag(16, "rank of the adapters; 0 trains all weights", low=0, high=2**12, first=True)
    lora_scale: float = flag(2.0, "factor of the adapters' output, as in mlx_lm", low=1e-6, high=1e4)
    lora_targets: list[Target] = flag(
        lambda: list(TARGETS), "projections that get adapters, also as q_proj k_proj v_proj or all-linear", nargs="+",
        metavar="NAME",
    )  # fmt: skip
    init_adapter: str = flag("", "a run, or an adapter of mlx_lm or PEFT, that training begins with", file=True)


@dataclasses.dataclass(frozen=True)
class DataSettings:
    """Prompts and rewards"""

    task: str = flag(
        "", "data, rewards and evaluation in one: demo, values, gsm8k, math, ifeval, rg:NAME=WEIGHT, own with --data",
        first=True,
    )  # fmt: skip
    task_config: str = flag(
        "", "YAML with sizes, levels and held-out number of rg:NAME's problems", of="rollouts", file=True
    )
    path: str = flag(
        "", "your prompts: JSONL, CSV, parquet, Arrow, directory of `datasets` or hub dataset; TRAIN,HELD_OUT are two",
        key="data", first=True, file=True,
    )  # fmt: skip
    columns: str = flag("", "names of the data's columns, as prompt=question,answer=solution")
    rubric: str = flag("", "rubric YAML, in place of the task's", of="rollouts", first=True, file=True)
    reward: list[str] = flag(list, "reward functions FILE.py:fn", nargs="+", of="rollouts", first=True, file=True)
    reward_weights: dict[str, float] = flag(
        dict, "weights of rewards, as correct=1,rubric=0.5", parse=weights, of="rollouts", first=True
    )
    reward_gate: Literal["off", "form"] = flag(
        "off", "form: rewards above 0 count only for finished answers that neither repeat nor copy", of="rollouts"
    )
    reward_format: Literal["text", "messages"] = flag(
        "text", "how reward functions get prompts and completions; messages: as in TRL", of="rollouts"
    )
    reward_workers: int = flag(
        0, "processes that call rewards row by row; 0: one call for all rows", low=0, high=2**10, of="rollouts"
    )


@dataclasses.dataclass(frozen=True)
class SamplingSettings:
    """Rollouts"""

    batch: int = flag(4, "B, prompts per step", low=1, high=2**16, first=True)
    groups: int = flag(
        8, "G, completions per prompt; 1 where a teacher alone trains", low=1, high=2**16, of="rollouts", first=True
    )
    rollout_batch_size: int | None = flag(
        None, "rows decoded at once; auto: measured on a GPU, else up to 64", low=1, parse=size, of="rollouts",
        later=True, first=True,
    )  # fmt: skip
    share_prefix: Switch = flag(
        "auto", "hold a prompt's cache once for its group; auto: measured on a GPU, else by length", of="rollouts"
    )
    max_tokens: int = flag(256, "most tokens per completion", low=1, of="rollouts", first=True)
    stop: list[str] = flag(
        list, "texts that end a completion, as its end token does; rewards and judge get what is before", nargs="+",
        metavar="TEXT", parse=str, of="rollouts",
    )  # fmt: skip
    temp: float = flag(1.0, "sampling temperature", low=0, of="rollouts", first=True)
    top_p: float = flag(1.0, "nucleus sampling; the update uses the same tokens", low=1e-06, high=1.0, of="rollouts")
    top_k: int = flag(0, "sample from the k likeliest tokens; 0: from all", low=0, of="rollouts")
    min_p: float = flag(0.0, "least probability relative to the likeliest token", low=0, high=1.0, of="rollouts")
    thinking: bool = flag(False, "use the chat template's thinking mode")
    dynamic_sampling: bool = flag(False, "draw more prompts until the rewards of --batch groups differ", of="grpo")
    curriculum: bool = flag(False, "draw prompts in proportion to the signal that their rewards promise", of="grpo")
    seed: int = flag(0, "seed of prompts, sampling and adapters", low=0, first=True)


@dataclasses.dataclass(frozen=True)
class ObjectiveSettings:
    """Objective"""

    loss_type: Literal["grpo", "dr_grpo", "dapo", "cispo", "sapo", "distill", "sft"] = flag(
        "dapo", "the loss, also as --loss; sft: cross-entropy on the replies in --data; or your own, FILE.py:fn",
        own=True, also=("loss",), first=True, file=True,
    )  # fmt: skip
    importance_sampling_level: Literal["token", "sequence"] = flag("token", "ratio per token or sequence", of="grpo")
    advantage: Literal["group", "rloo", "reinforce"] = flag(
        "group", "what a reward is compared with: the mean of its group, of its others, of the step; or FILE.py:fn",
        own=True, of="grpo", file=True,
    )  # fmt: skip
    scale_rewards: Literal["group", "batch", "mean", "none"] = flag(
        "group", "what divides advantages: the deviation in the group or the batch, or the group's mean", of="grpo"
    )
    combine_rewards: Literal["sum", "normalize"] = flag(
        "sum", "sum several rewards, or normalize each first", of="grpo"
    )
    epsilon: float = flag(0.2, "the ratio is clipped at 1 - this", low=0, of="grpo")
    epsilon_high: float | None = flag(
        None, "and at 1 + this; default: --epsilon; for cispo the cap on the ratio", low=0, of="grpo"
    )
    beta: float = flag(0.0, "weight of the KL term against the model before training", low=0, of="grpo", first=True)
    truncated: Literal["keep", "mask", "punish"] = flag(
        "keep", "train, leave out or punish what --max-tokens cut off", of="rollouts"
    )
    teacher: str = flag(
        "",
        "model that scores the student's completions: hub id, directory, or `self` before training",
        of="rollouts",
        file=True,
    )
    teacher_prompt: str = flag(
        "",
        "text file, a system message for the teacher alone; {answer} is the column's value",
        of="rollouts",
        file=True,
    )
    distill_beta: float = flag(
        0.5, "divergence: 0 forward KL, 1 reverse KL, between a Jensen-Shannon", low=0, high=1.0, of="distill"
    )
    distill_coef: float = flag(
        0.0, "with other losses, add this times log teacher - log student to advantages", low=0, of="grpo"
    )
    train_turns: Literal["all", "last"] = flag("all", "replies of a conversation that are trained", of="sft")


@dataclasses.dataclass(frozen=True)
class ToolSettings:
    """Tools"""

    tools: list[str] = flag(
        list, "functions that the model may call, FILE.py:fn,fn", nargs="+", of="rollouts", file=True
    )
    env: str = flag(
        "", "environment that it talks with, FILE.py:Class, or NAME=FILE.py:Class,...", of="rollouts", file=True
    )
    max_turns: int = flag(8, "most turns of a conversation with tools", low=1, of="rollouts")
    max_context: int | None = flag(
        None, "most tokens of a conversation with tools; auto: 4096, or the model's context", low=16, parse=size,
        of="rollouts",
    )  # fmt: skip
    max_observation: int = flag(1024, "most tokens of a tool's result; the rest is cut", low=1, of="rollouts")
    tool_timeout: float = flag(60.0, "seconds after which a call is given up", low=0.01, high=1e6, of="rollouts")


@dataclasses.dataclass(frozen=True)
class OptimizerSettings:
    """Update"""

    steps: int = flag(100, "rollouts, each with --num-iterations optimizer steps", low=1, later=True, first=True)
    learning_rate: float = flag(
        1e-4, "peak learning rate; with --lora-rank 0 a tenth of the recipe's", low=0, first=True
    )
    warmup_steps: int = flag(5, "steps of linear warm-up, before a cosine to a tenth", low=0)
    target_kl: float = flag(0.02, "largest KL of one update, nats per token; 0: no limit", low=0, of="rollouts")
    num_iterations: int = flag(1, "optimizer steps per rollout", low=1, high=2**10, of="rollouts")
    train_token_budget: int | None = flag(
        None, "positions per micro-batch; auto: 1024, on a GPU 2048 where memory allows", low=1, parse=size, later=True
    )
    checkpoint_layers: str = flag(
        "auto", "layers computed again in the backward pass: on, off, a number; auto: as memory needs", later=True
    )


@dataclasses.dataclass(frozen=True)
class JudgeSettings:
    """Judge"""

    prefix = "judge_"
    model: str = flag(
        "", "another judge than the frozen base model; with --judge-url its name there", of="rollouts", later=True,
        first=True, file=True,
    )  # fmt: skip
    mode: Literal["logits", "decode"] = flag(
        "logits", "score by first-token probabilities or by a decoded reply", of="rollouts", later=True
    )
    think: int = flag(0, "most thinking tokens before a decoded reply", low=0, of="rollouts", later=True)
    chunk_size: int = flag(
        24, "evaluations per batch; the environment's RUBRIC_JUDGE_BATCH_SIZE is its default", low=1, of="rollouts",
        later=True,
    )  # fmt: skip
    url: str = flag(
        "", "OpenAI-compatible server to ask, as http://127.0.0.1:8080/v1; its key in JUDGE_API_KEY", of="rollouts",
        later=True,
    )  # fmt: skip

    def __post_init__(self) -> None:
        if re.match("[a-z]+://[^/]*@", self.url, re.IGNORECASE):
            raise ValueError("--judge-url holds a password, which logs would show; put the key into JUDGE_API_KEY")
        if self.think and self.mode != "decode":
            raise ValueError(f"--judge-think {self.think} needs --judge-mode decode: logits come before thoughts")
        if self.url and not self.model:
            raise ValueError(f"--judge-url {self.url} serves models by name; name one with --judge-model")


@dataclasses.dataclass(frozen=True)
class EvaluationSettings:
    """Evaluation"""

    prefix = "eval_"
    every: int = flag(20, "steps between evaluations; 0: none", low=0, later=True, first=True)
    limit: int = flag(0, "most held-out problems, evenly spread; 0: all", low=0, later=True)
    rubric: str = flag("", "rubric YAML for evaluations only, as the witness of a judge", of="rollouts", file=True)
    early_stopping: int = flag(
        0, "stop after N evaluations without a lower loss; 0: never", low=0, of="sft", later=True, key="early_stopping"
    )


@dataclasses.dataclass(frozen=True)
class RecordSettings:
    """Records"""

    save_every: int = flag(20, "steps between checkpoints", low=1, later=True, first=True)
    keep: int = flag(3, "checkpoints to keep", low=1, later=True)
    report_to: list[Tracker] = flag(list, "trackers that get the figures, each an extra", nargs="*", later=True)


@dataclasses.dataclass(frozen=True)
class Config:
    """Every setting of a run. `config.yaml` holds them flat, by the names of their flags."""

    model: ModelSettings
    data: DataSettings
    sampling: SamplingSettings
    tools: ToolSettings
    objective: ObjectiveSettings
    optimizer: OptimizerSettings
    judge: JudgeSettings
    evaluation: EvaluationSettings
    records: RecordSettings

    @classmethod
    def of(cls, **values: Any) -> "Config":
        """The defaults with these values, by the names of their flags; unchecked."""
        parts: dict[str, dict[str, Any]] = {group.name: {} for group in dataclasses.fields(cls)}
        for key, value in values.items():
            parts[SETTINGS[key].group][SETTINGS[key].field.name] = value
        return cls(**{group.name: _class_of(group)(**parts[group.name]) for group in dataclasses.fields(cls)})

    def but(self, **values: Any) -> "Config":
        """These settings with other values."""
        return Config.of(**self.flat() | values)

    def flat(self, sizes: "Sizes | None" = None) -> dict[str, Any]:
        """Every setting by the name of its flag. sizes: what they decide, as far as this run uses it."""
        decided = sizes.settings() if sizes else {}
        if self.objective.loss_type == "sft":
            decided = {key: value for key, value in decided.items() if SETTINGS[key].is_for("sft")}
        return {key: getattr(getattr(self, one.group), one.field.name) for key, one in SETTINGS.items()} | decided

    @property
    def judges_itself(self) -> bool:
        """Whether the judge is the model before training."""
        return not self.judge.url and self.judge.model in ("", self.model.name)

    @property
    def compares_rewards(self) -> bool:
        """Whether rewards are compared within groups; else they are only looked at."""
        return self.objective.loss_type != "distill" and self.sampling.groups > 1


def _class_of(group: dataclasses.Field[Any]) -> Any:
    return group.type


def _settings() -> Iterator[tuple[str, Setting]]:
    for group in dataclasses.fields(Config):
        kind = _class_of(group)
        for field in dataclasses.fields(kind):
            key = field.metadata.get("key", getattr(kind, "prefix", "") + field.name)
            yield key, Setting(key, group.name, str(kind.__doc__), field)


SETTINGS: dict[str, Setting] = dict(_settings())


def is_own(value: str) -> bool:
    """Whether a setting with choices names a user's function instead."""
    return ":" in value


JUDGE, TOOLS = ([key for key, one in SETTINGS.items() if one.group == group] for group in ("judge", "tools"))


class Sizes(NamedTuple):
    """What memory and timing decide, once, before the first step; `config.yaml` keeps it."""

    rollout_batch_size: int  # rows decoded at once
    share_prefix: Switch  # auto: the sampler decides by length
    train_token_budget: int  # positions per micro-batch
    checkpoint_layers: int  # layers computed again in the backward pass

    @property
    def sharing(self) -> bool | None:
        """`share_prefix` as an argument of `sampler.rollout`."""
        return {"auto": None, "on": True, "off": False}[self.share_prefix]

    def settings(self) -> dict[str, Any]:
        """As settings, so that a repeated or resumed run decides the same."""
        return self._asdict() | {"checkpoint_layers": str(self.checkpoint_layers) if self.checkpoint_layers else "off"}


def parse(argv: list[str]) -> argparse.Namespace:
    """Parses the flags of train.py; omitted settings are None."""
    everything = "--help-all" in argv
    parser = Parser("train.py", "GRPO: sample groups of completions, reward them, make the better ones likelier.")
    parser.add_argument("--help-all", action="help", help="show every flag and exit")
    parser.add_argument("--config", metavar="FILE", help="recipe, in place of the task's; a run's `config.yaml` is one")
    parser.add_argument("--eval-data", metavar="FILE", help="held-out prompts for --data, in place of a tenth of it")
    parser.add_argument("--run-dir", metavar="DIR", help="where the run is recorded (default: runs/TASK-TIME)")
    parser.add_argument(
        "--seeds",
        type=seeds,
        metavar="N",
        help="run N seeds from --seed on, or a list of them as 1,2,5, into one directory",
    )
    parser.add_argument("--print-config", action="store_true", help="print every setting as YAML and exit")
    parser.add_argument(
        "--resume", nargs="?", const=True, metavar="DIR", help="go on with the run in DIR, or the newest unfinished one"
    )
    parser.add_argument("--let-sleep", action="store_true", help="let a Mac go to sleep while it trains")
    parser.add_argument("--wired-limit", metavar="GB", help="memory that macOS must not page out (default: none)")
    parser.add_argument(
        "--allow-changes", action="store_true", help="--resume though its data, rewards or files changed"
    )
    parser.add_argument("--open", action="store_true", help="open the run's page in a browser at the end")
    add_flags(parser, SETTINGS.values(), everything)
    return parser.parse_args(argv)


def given(args: argparse.Namespace, names: Iterable[str] = SETTINGS) -> dict[str, Any]:
    """The settings in `names` among the given flags; --eval-data joins --data."""
    found = {name: value for name in names if (value := getattr(args, name)) is not None}
    if (held_out := getattr(args, "eval_data", None)) is not None:
        found["data"] = joined(found.get("data"), held_out)
    return found


def joined(data: str | None, held_out: str) -> str:
    """Both sides of a run's data as one setting."""
    if data is None:
        raise ValueError(f"--eval-data {held_out} goes with --data FILE, which is trained on; give both")
    return f"{data},{held_out}"


# ---- where settings come from

# of the bundled models
OWN_TASK = {"demo": "demo", "demo:rg": "rg:chain_sum,leg_counting", "demo:tools": "calculator"}
RECIPES = {("demo:rg", "rg"): "demo-rg", ("demo:rg", "own"): "demo-rg", ("demo", "own"): "demo"}  # of model and task


def located(settings: dict[str, Any], *folders: Path) -> dict[str, Any]:
    """
    Settings with absolute paths, so that a run finds its files from any directory.

    A relative path is one from the working directory, else from the first of `folders` that has it. What names no file
    stays as it is: a hub id, a bundled model, a mistake.
    """

    def find(text: str) -> str:
        for folder in (Path(), *folders):
            if text and os.path.exists(path := os.path.abspath(folder / text)):
                return path
        if "," in text:
            return ",".join(map(find, text.split(",")))
        if "=" in text:  # a name before it
            return "=".join([text.partition("=")[0], find(text.partition("=")[2])])
        file, _, name = text.rpartition(":")  # a function in a file, a split in a directory
        return f"{path}:{name}" if file and (path := find(file)) != file else text

    def locate(key: str, value: Any) -> Any:
        metadata = SETTINGS[key].field.metadata
        if isinstance(value, list):
            return [locate(key, one) for one in value]
        if not isinstance(value, str) or not metadata.get("file") or (metadata.get("own") and not is_own(value)):
            return value
        is_name = value in ("self", *OWN_TASK) or (key == "judge_model" and settings.get("judge_url"))
        return value if is_name else find(value)

    return {key: locate(key, value) for key, value in settings.items()}


def moved(settings: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """The settings, and the files that they name by an absolute path where none is. A run keeps its --init-adapter."""
    for key in settings.keys() - {"init_adapter"}:
        value = settings[key] if SETTINGS[key].field.metadata.get("file") else ""
        for text in value if isinstance(value, list) else [value]:
            for part in [text] if os.path.exists(str(text)) else str(text).split(","):
                path = part if os.path.exists(part) else re.sub(":[^:/]*$", "", part)
                if os.path.isabs(path) and not os.path.exists(path):
                    yield key, path


def resolve(
    flags: dict[str, Any],
    config_path: str | None,
    resume: str | None,
    choose_model: Callable[[str | None], tuple[str, str]],
) -> tuple[Config, str]:
    """
    The checked settings, and a line that says which model was chosen and why.

    choose_model: requested model -> chosen model, and the reason. A resumed run keeps its settings except those marked
    `later`.
    """
    if resume:
        anew = f"start a new one, from these weights with --init-adapter {resume}"
        if config_path:
            raise ValueError(f"--config {config_path} cannot change a resumed run; {anew}")
        if not (Path(resume) / "config.yaml").is_file():
            raise ValueError(f"--resume {resume}: {no_run(resume)}")
        if fixed := sorted(key for key in flags if not may_change(key)):
            raise ValueError(f"{flag_of(fixed[0])} cannot change in a resumed run; {anew}")
        settings = load_recipe(Path(resume) / "config.yaml") | flags
        for key, path in moved(settings):
            fix = f"put it back, or write its new place into {resume}/config.yaml and add --allow-changes"
            raise ValueError(f"--resume {resume}: {flag_of(key)} {path} is no longer there; {fix}")
        config = checked(settings, flags)
        return config, f"model: {config.model.name}, as before; task: {config.data.task}"
    recipe, flags = load_recipe(Path(config_path)) if config_path else None, located(flags)
    asked = merged(flags, recipe)  # a mistake is told before a model is downloaded
    model, why = choose_model(asked.model.name)
    is_own = asked.data.path and asked.objective.loss_type != "sft"  # which needs no task but for evaluations
    usual = "env" if asked.tools.env else OWN_TASK.get(model, "values")
    task = asked.data.task or ("own" if is_own else usual)
    config = merged(flags | {"model": model, "task": task}, recipe)
    said = f"model: {model}, {why}; task: {task}"
    if task == "own" and recipe is None and is_own:
        values = config.flat()
        said += f", at {' '.join(f'{flag_of(key)} {values[key]:g}' for key in of_task(task, model))}"
    return config, said


def may_change(key: str) -> bool:
    """Whether a resumed run may change a setting."""
    return bool(SETTINGS[key].field.metadata.get("later"))


def merged(flags: dict[str, Any], recipe: dict[str, Any] | None) -> Config:
    """The checked settings: flag, else environment, else recipe, else default. recipe: None for that of the task."""
    asked = recipe or {}
    unasked = (of_task(flags.get("task", ""), flags.get("model", "")) if recipe is None else {}) | of_environment()
    if (asked | flags).get("loss_type") == "sft":  # it goes without what it has no use for
        unasked = {name: value for name, value in unasked.items() if SETTINGS[name].is_for("sft")}
    config = checked(asked | unasked | flags, flags)
    its_rate = "learning_rate" in flags or ("learning_rate" in asked and asked.get("lora_rank") == 0)
    if config.model.lora_rank == 0 and not its_rate:  # the recipe's or the default is one for adapters
        return config.but(learning_rate=config.optimizer.learning_rate / 10)
    return config


def of_environment() -> dict[str, int]:
    """The judge's chunk size if `RUBRIC_JUDGE_BATCH_SIZE` is set; empty means unset. Raises ValueError if invalid."""
    text = os.environ.get("RUBRIC_JUDGE_BATCH_SIZE", "")
    if text and not re.fullmatch("[1-9][0-9]{0,8}", text):
        raise ValueError(f"RUBRIC_JUDGE_BATCH_SIZE={text!r:.60}: it must be a whole number from 1 to 999999999")
    return {"judge_chunk_size": int(text)} if text else {}


def of_task(task: str, model: str) -> dict[str, Any]:
    """
    The task's defaults from `recipes/`: for rg:NAME those of the model demo:rg, and none for another model; for own
    data with a bundled model those of the model's own task.
    """
    kind = task.partition(":")[0]
    name = RECIPES.get((model, kind), kind)
    paths = {path.stem: path for path in (Path(__file__).parent / "recipes").glob("*.yaml")}
    held = load_recipe(paths[name]) if name in paths else {}
    return {key: held[key] for key in held if kind != "own" or key not in ("model", "task", "task_config")}


def load_recipe(path: Path) -> dict[str, Any]:
    """The settings in a YAML file. Raises ValueError naming an unknown key and the nearest known one."""
    held = load_yaml(path, f"--config {path}")
    if not isinstance(held, dict):
        raise ValueError(f"--config {path} holds no settings; it needs lines like `batch: 8`")
    refuse_unknown(held, f"--config {path}: ")
    return located(held, path.parent)


def refuse_unknown(settings: Iterable[Any], where: str = "") -> None:
    """Raises ValueError naming a setting that does not exist, and what it is here."""
    for key in settings:
        if key not in SETTINGS:
            said = hint(str(key)[:40], SETTINGS, repr) or "train.py --help-all lists them"
            raise ValueError(f"{where}unknown setting {reprlib.repr(key)}; {said}")


def as_yaml(config: Config, sizes: Sizes | None = None) -> str:
    """Every setting as YAML, with the sizes once they are decided."""
    automatic = {key for key, one in SETTINGS.items() if one.is_automatic}
    return yaml.safe_dump(
        {key: "auto" if key in automatic and value is None else value for key, value in config.flat(sizes).items()},
        sort_keys=False,
    )


# ---- which settings a run takes


def checked(settings: dict[str, Any], flags: Collection[str] = ()) -> Config:
    """
    The settings, each of the right type and in range, without contradiction. Raises ValueError otherwise.

    flags: the names of those given as flags.
    """
    automatic = {key for key, value in settings.items() if value == "auto" and SETTINGS[key].is_automatic}
    settings = {key: value for key, value in settings.items() if key not in automatic}
    if type(settings.get("checkpoint_layers")) is int:  # as YAML reads it
        settings["checkpoint_layers"] = str(settings["checkpoint_layers"])
    if isinstance(asked := settings.get("lora_targets"), list):
        settings["lora_targets"] = fused_targets(asked)
    check_values(SETTINGS, settings)
    config = Config.of(**settings)
    refuse_unused(config, flags)
    for mistake in mistakes(config):
        raise ValueError(mistake)
    return config


def fused_targets(asked: list[Any]) -> list[Any]:
    """
    The projections that adapters are put on, by names of theirs, of a checkpoint, or `all-linear`; in order.

    Raises ValueError for a part without its neighbours: one adapter serves the rows of all.
    """
    if asked == ["all-linear"]:
        return list(TARGETS)
    found = list(asked)
    for whole, parts in PARTS.items():
        named = [part for part in parts if part in asked]
        if lacking := [part for part in parts if part not in asked] if named else []:
            raise ValueError(
                f"--lora-targets {named[0]}: one adapter serves {', '.join(parts)} together, in {whole}; "
                f"name {' and '.join(lacking)} too, or {whole}"
            )
        found = [one for one in found if one not in parts] + ([whole] if named and whole not in asked else [])
    return sorted(found, key=TARGETS.index) if set(found) <= set(TARGETS) else found


def refuse_unused(config: Config, flags: Collection[str]) -> None:
    """
    Raises ValueError naming settings that were set and that this run has no use for.

    A default counts as not set, as a run's `config.yaml` holds all of them; but not as a flag for --loss-type sft.
    """
    values, defaults = config.flat(), Config.of().flat()
    changed = {key for key, default in defaults.items() if values[key] != default}
    if config.objective.loss_type == "sft":
        changed |= set(flags)
    for keys, why in unused(config):
        if found := sorted(changed & keys):
            said = (f"{flag_of(key)} {values[key]!s:.60}" for key in found)
            raise ValueError(f"{', '.join(said)}: {why}")


def unused(config: Config) -> Iterator[tuple[set[str], str]]:
    """Settings that would mislead, since this run has no use for them; why, and what to do instead."""
    objective = config.objective

    def only(*kinds: str) -> set[str]:
        return {key for key, one in SETTINGS.items() if one.field.metadata.get("of") in kinds}

    if objective.loss_type == "sft":
        yield only("rollouts", "grpo", "distill"), "--loss-type sft samples and judges nothing; leave that out"
    else:
        yield only("sft"), "only for --loss-type sft; leave that out"
    if objective.loss_type == "distill":
        yield {"distill_coef"}, "only for losses on advantages; leave that out, or --loss-type distill"
        yield only("grpo"), "--loss-type distill has no advantages; leave that out"
    else:
        yield only("distill"), "only for --loss-type distill; leave that out, or choose that loss"
    if objective.teacher:
        yield {"top_p", "top_k", "min_p"}, f"--teacher {objective.teacher} scores the whole vocabulary; leave that out"
    else:
        yield {"teacher_prompt", "distill_coef"}, "there is no teacher; name one with --teacher"
    if objective.advantage == "reinforce":
        yield {"dynamic_sampling"}, "to --advantage reinforce equal rewards are a signal; leave that out"
    if config.sampling.groups == 1:
        yield {"dynamic_sampling", "curriculum"}, "in groups of one no rewards differ; set --groups 2 or more"
    if not config.evaluation.every:
        yield {"early_stopping"}, "there are no evaluations; set --eval-every"
    if not config.model.lora_rank:
        merge = "merge it into a model first: uv run lora.py --fuse --adapter DIR --out MODEL"
        yield {"init_adapter"}, f"--lora-rank 0 trains no adapter; {merge}"


def mistakes(config: Config) -> Iterator[str]:
    """What is wrong with settings that each are in range."""
    objective, optimizer, sampling = config.objective, config.optimizer, config.sampling
    groups = sampling.groups
    if (num_rows := sampling.batch * groups) > MOST_ROWS:
        yield f"--batch {sampling.batch} times --groups {groups} is {num_rows}; it must be at most {MOST_ROWS}"
    if "" in sampling.stop:
        yield "--stop has an empty text, which every completion holds; remove it"
    if sampling.stop and (config.tools.tools or config.tools.env):
        yield f"--stop {sampling.stop[0]!r:.60} ends completions; with --tools or --env they have turns, leave it out"
    if sampling.temp == 0:
        yield "--temp is 0; training needs completions that differ, so it must be more than 0"
    if 0 < optimizer.target_kl < 1e-3:
        yield f"--target-kl is {optimizer.target_kl:g}; below 0.001 it is rounding; give more, or 0 for no bound"
    if objective.loss_type == "sft" and not config.data.path:
        yield "--loss-type sft needs --data FILE, with columns messages, or prompt and completion"
    if objective.loss_type == "distill" and not objective.teacher:
        yield "--loss-type distill learns from a teacher; name one with --teacher"
    if objective.loss_type == "distill" and objective.truncated == "punish":
        yield "--truncated punish is a reward, and --loss-type distill learns from none; set keep or mask"
    if objective.teacher and objective.loss_type != "distill" and not objective.distill_coef:
        yield f"--teacher {objective.teacher} is not asked anything; set --loss-type distill, or --distill-coef 1"
    if objective.teacher == "self" and not objective.teacher_prompt:
        yield "--teacher self knows no more than the student; give it a --teacher-prompt"
    if groups == 1 and not objective.teacher:  # with one, see `tasks.refuse_useless_rewards`
        yield "--groups is 1; it must be at least 2, since rewards are compared within a group"
    if is_own(objective.advantage) and objective.scale_rewards != "group":
        yield f"--scale-rewards {objective.scale_rewards} is for our advantages; --advantage is yours, leave it out"
    if objective.advantage == "reinforce" and objective.scale_rewards in ("group", "mean"):
        yield "--advantage reinforce measures from the whole step; set --scale-rewards batch or none"
    by_group = (objective.advantage, objective.scale_rewards) == ("group", "group")
    if objective.combine_rewards == "normalize" and not by_group:
        yield "--combine-rewards normalize normalizes within groups; leave --advantage and --scale-rewards at group"
    upper = objective.epsilon if objective.epsilon_high is None else objective.epsilon_high
    if objective.loss_type == "cispo" and upper < 1:
        yield f"--epsilon-high is {upper}; with --loss-type cispo it caps the ratio itself: at least 1, usually 5"
    if optimizer.checkpoint_layers not in ("auto", "on", "off") and not optimizer.checkpoint_layers.isdecimal():
        yield f"--checkpoint-layers is {optimizer.checkpoint_layers!r}; it must be auto, on, off or a number"
    if config.model.lora_rank and not config.model.lora_targets:
        yield f"--lora-targets is empty; name some of {', '.join(TARGETS)}, or set --lora-rank 0"
