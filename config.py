"""
Every setting of a run, declared once: a field defines a flag, a YAML key, a range and a help text.

Settings are frozen. This file does not cover where their values come from and whether they fit
together (settings/), or what they mean to the algorithm (the files that use them). It imports
only the standard library and flags.py.
"""

import dataclasses
from collections.abc import Iterator
from typing import Any, Literal, NamedTuple, get_args

from flags import Setting, setting, stop_text

Target = Literal["qkv_proj", "o_proj", "in_proj", "out_proj", "gate_up_proj", "down_proj"]
Tracker = Literal["wandb", "swanlab"]
TARGETS = get_args(Target)
MOST_BATCH = 2**16

# The meaning of a field's metadata, in addition to those that `setting` describes:
#   key       the setting's name, if it differs from the field's
#   used_by   the runs that use it: "rollouts" means runs that sample, "grpo" runs with advantages,
#             "distill" runs with a teacher, None all runs. The default is the class's `used_by`.
#   later     whether a resumed run may change it. The default is the class's `later`.
#   first     whether --help shows its flag; --help-all shows every flag
#   file      whether it may name files
#   function  whether it may name a user's function (`settings.sources.make_paths_absolute`)
#   also      other names for its flag


@dataclasses.dataclass(frozen=True)
class ModelSettings:
    """Model and adapters"""

    name: str = setting(
        "",
        "hub id, directory, GGUF file, `smollm2`, `demo`, `demo:rg` or `demo:tools`; "
        "without a GPU the default is demo",
        key="model",
        first=True,
        file=True,
    )
    lora_rank: int = setting(
        16, "rank of the adapters; 0 means training all weights", low=0, high=2**12, first=True
    )
    lora_scale: float = setting(
        2.0, "factor by which the adapters' output is multiplied, as in mlx_lm", low=1e-6, high=1e4
    )
    lora_targets: list[Target] = setting(
        lambda: list(TARGETS),
        "projections that get adapters; q_proj k_proj v_proj and all-linear also work",
        metavar="NAME",
    )
    init_adapter: str = setting(
        "", "adapter to start from: a run, or an mlx_lm or PEFT adapter", file=True
    )


@dataclasses.dataclass(frozen=True)
class DataSettings:
    """Prompts and rewards"""

    used_by = "rollouts"
    task: str = setting(
        "",
        "name that selects data, rewards and evaluation: demo, values, gsm8k, math, ifeval, "
        "or rg:NAME=WEIGHT; with --data the default is own",
        used_by=None,
        first=True,
    )
    task_config: str = setting(
        "",
        "YAML file with the sizes, levels and number of held-out problems for rg:NAME",
        file=True,
    )
    path: str = setting(
        "",
        "your prompts: JSONL, CSV, TXT, parquet, Arrow, or a `datasets` data set on disk or on the "
        "hub; TRAIN,HELD_OUT names two files",
        key="data",
        used_by=None,
        first=True,
        file=True,
    )
    columns: str = setting(
        "",
        "names of the columns in the data, for example prompt=question,answer=solution",
        used_by=None,
    )
    verifier: str = setting(
        "",
        "how answers are compared: auto, json, number, choice, math, exact, marked or FILE.py:fn",
        first=True,
        function=True,
    )
    rubric: str = setting("", "rubric YAML file; replaces the task's rubric", first=True, file=True)
    reward: list[str] = setting(list, "reward functions FILE.py:fn,fn", first=True, file=True)
    reward_weights: dict[str, float] = setting(
        dict, "weights of the rewards, for example correct=1,rubric=0.5", first=True
    )
    reward_gate: Literal["off", "form"] = setting(
        "off",
        "form: an answer keeps a reward above 0 only if it is finished and neither repeats itself "
        "nor copies the prompt",
    )


@dataclasses.dataclass(frozen=True)
class SamplingSettings:
    """Rollouts"""

    used_by = "rollouts"
    batch: int = setting(
        4, "prompts per step (B)", low=1, high=MOST_BATCH, used_by=None, first=True
    )
    groups: int = setting(
        8,
        "completions per prompt (G); 1 is allowed with a teacher",
        low=1,
        high=MOST_BATCH,
        first=True,
    )
    rollout_batch_size: int | None = setting(
        None,
        "number of rows decoded at once; auto: as many as fit in the GPU's memory, or up to 64 on "
        "a CPU",
        low=1,
        later=True,
        first=True,
    )
    max_tokens: int = setting(256, "maximum number of tokens per completion", low=1, first=True)
    stop: list[str] = setting(
        list,
        r"texts that end a completion (\n means a line end); rewards and judge see only the text "
        "before them",
        metavar="TEXT",
        parse=stop_text,
    )
    end_tokens: list[str] = setting(
        list,
        "tokens that end a completion, in addition to the model's own; each is a token such as "
        "<|im_end|> or an id",
        metavar="TOKEN",
        parse=str,
    )
    temp: float = setting(1.0, "sampling temperature", low=0, first=True)
    top_p: float = setting(
        1.0,
        "nucleus sampling: sample from the likeliest tokens that reach this total probability; the "
        "update uses the same tokens",
        low=1e-06,
        high=1.0,
    )
    top_k: int = setting(0, "sample from the k likeliest tokens; 0: from all tokens", low=0)
    min_p: float = setting(
        0.0,
        "minimum probability of a token, relative to that of the likeliest token",
        low=0,
        high=1.0,
    )
    thinking: bool = setting(False, "use the chat template's thinking mode", used_by=None)
    seed: int = setting(
        0, "random seed for prompts, sampling and adapters", low=0, used_by=None, first=True
    )


@dataclasses.dataclass(frozen=True)
class ObjectiveSettings:
    """Objective"""

    used_by = "grpo"
    loss_type: Literal["grpo", "dr_grpo", "dapo", "cispo", "sapo", "distill", "sft"] = setting(
        "dapo",
        "the loss (also as --loss); sft: cross-entropy on the replies in --data",
        used_by=None,
        function=True,
        also=("loss",),
        first=True,
    )
    importance_sampling_level: Literal["token", "sequence"] = setting(
        "token", "compute the importance ratio per token or per sequence"
    )
    advantage: Literal["group", "rloo", "reinforce"] = setting(
        "group",
        "the baseline of a reward: the mean of its group (group), of the rest of its group (rloo), "
        "or of the step (reinforce)",
        function=True,
    )
    scale_rewards: Literal["group", "batch", "mean", "none"] = setting(
        "group",
        "the divisor of advantages: the standard deviation of the group (group) or step (batch), "
        "the mean of the group (mean), or none",
    )
    combine_rewards: Literal["sum", "normalize"] = setting(
        "sum", "sum: add rewards as they are; normalize: normalize each one first"
    )
    epsilon: float = setting(0.2, "the importance ratio is clipped below at 1 - epsilon", low=0)
    epsilon_high: float | None = setting(
        None,
        "the importance ratio is clipped above at 1 + this value; the default is --epsilon; "
        "for cispo the value itself is the upper limit of the ratio",
        low=0,
    )
    beta: float = setting(
        0.0, "weight of the KL divergence from the model before training", low=0, first=True
    )
    truncated: Literal["keep", "mask", "punish"] = setting(
        "keep",
        "answers that --max-tokens cut off: train on them (keep), leave them out (mask), or "
        "punish them",
        used_by="rollouts",
    )
    teacher: str = setting(
        "",
        "model that scores the student's completions: hub id, directory, or `self` for the model "
        "before training",
        used_by="distill",
        file=True,
    )
    teacher_prompt: str = setting(
        "",
        "text file with a system message that only the teacher gets; {answer} stands for the value "
        "in the column `answer`, and so on for other columns",
        used_by="distill",
        file=True,
    )
    distill_beta: float = setting(
        0.5,
        "the kind of divergence: 0 is forward KL, 1 is reverse KL, and values in between are "
        "Jensen-Shannon",
        low=0,
        high=1.0,
        used_by="distill",
    )


@dataclasses.dataclass(frozen=True)
class ToolSettings:
    """Tools"""

    used_by = "rollouts"
    tools: list[str] = setting(list, "functions that the model may call, FILE.py:fn,fn", file=True)
    env: str = setting(
        "",
        "environment that the model interacts with: FILE.py:Class, or NAME=FILE.py:Class,...",
        file=True,
    )
    max_turns: int = setting(8, "maximum number of turns of a conversation with tools", low=1)
    max_context: int | None = setting(
        None,
        "maximum number of tokens of a conversation with tools; auto: 4096, "
        "or less if the model's context is shorter",
        low=16,
    )
    tool_timeout: float = setting(60.0, "seconds that a tool call may take", low=0.01, high=1e6)


@dataclasses.dataclass(frozen=True)
class OptimizerSettings:
    """Update"""

    kind: Literal["adamw", "sgd"] = setting(
        "adamw",
        "sgd: for training all weights without AdamW's 8 bytes per weight; "
        "--target-kl sets the size of its steps",
        key="optimizer",
        used_by="rollouts",
    )
    steps: int = setting(
        100,
        "number of steps; each consists of a rollout and --num-iterations * --mini-batches updates",
        low=1,
        later=True,
        first=True,
    )
    learning_rate: float = setting(
        1e-4,
        "peak learning rate; with --lora-rank 0 the default is a tenth of the recipe's value",
        low=0,
        first=True,
    )
    warmup_steps: int = setting(
        5,
        "number of steps of linear warm-up; after them a cosine lowers the rate to a tenth",
        low=0,
    )
    target_kl: float = setting(
        0.02, "maximum KL of one update, in nats per token; 0: no limit", low=0, used_by="rollouts"
    )
    num_iterations: int = setting(
        1, "number of passes over a rollout", low=1, high=2**10, used_by="rollouts"
    )
    mini_batches: int = setting(
        1,
        "optimizer steps per pass; each takes an equal part of --batch",
        low=1,
        high=2**10,
        used_by="rollouts",
    )
    train_token_budget: int | None = setting(
        None,
        "positions per micro-batch; auto: 1024, or 2048 on a GPU with enough memory",
        low=1,
        later=True,
    )
    checkpoint_layers: str = setting(
        "auto",
        "layers that the backward pass computes again to save memory: on, off or a number; "
        "auto: as few as memory allows",
        later=True,
    )
    over_memory: bool = setting(
        False, "train even if the estimate exceeds this machine's memory", later=True
    )


@dataclasses.dataclass(frozen=True)
class JudgeSettings:
    """Judge"""

    prefix = "judge_"
    used_by = "rollouts"
    later = True
    model: str = setting(
        "",
        "judge model; the default is the base model; with --judge-url, its name on the server",
        first=True,
        file=True,
    )
    mode: Literal["logits", "decode"] = setting(
        "logits",
        "logits: read the score from the probabilities of the first token; decode: from a reply",
    )
    think: int = setting(
        0, "maximum number of tokens that the judge may think before a decoded reply", low=0
    )
    chunk_size: int = setting(
        24,
        "number of completions judged per batch; the environment variable RUBRIC_JUDGE_BATCH_SIZE "
        "changes the default",
        low=1,
    )
    url: str = setting(
        "",
        "OpenAI-compatible server that judges, for example http://127.0.0.1:8080/v1; "
        "the environment variable JUDGE_API_KEY holds its key",
    )


@dataclasses.dataclass(frozen=True)
class EvaluationSettings:
    """Evaluation"""

    prefix = "eval_"
    later = True
    every: int = setting(
        20, "number of steps between evaluations; 0: no evaluation", low=0, first=True
    )
    limit: int = setting(
        0, "maximum number of held-out problems, chosen at even intervals; 0: all of them", low=0
    )
    rubric: str = setting(
        "",
        "rubric YAML file for evaluations only; a check on what the judge rewards",
        used_by="rollouts",
        later=False,
        file=True,
    )


@dataclasses.dataclass(frozen=True)
class RecordSettings:
    """Records"""

    later = True
    save_every: int = setting(
        20,
        "number of steps between checkpoints; the first one is saved within five minutes",
        low=1,
        first=True,
    )
    report_to: list[Tracker] = setting(
        list, "trackers that get the metrics; each needs its extra installed"
    )


@dataclasses.dataclass(frozen=True)
class Config:
    """Every setting of a run. `config.yaml` lists them without groups, by their flags' names."""

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
    def from_flags(cls, **values: Any) -> "Config":
        """The defaults, replaced by `values`, which are named like flags. Checks nothing."""
        group_classes: dict[str, Any] = {
            group.name: group.type for group in dataclasses.fields(cls)
        }
        fields: dict[str, dict[str, Any]] = {name: {} for name in group_classes}
        for key, value in values.items():
            declared = SETTINGS[key]
            fields[declared.group][declared.field.name] = value
        groups = {name: make(**fields[name]) for name, make in group_classes.items()}
        return cls(**groups)

    def with_settings(self, **values: Any) -> "Config":
        """A copy of these settings in which `values` replace the old ones."""
        return Config.from_flags(**self.to_flags() | values)

    def to_flags(self, sizes: "Sizes | None" = None) -> dict[str, Any]:
        """
        Every setting, by the name of its flag.

        sizes: these replace the settings that they decide, if this run uses those.
        """
        values = {}
        for key, declared in SETTINGS.items():
            group = getattr(self, declared.group)
            values[key] = getattr(group, declared.field.name)

        sizes_as_settings = sizes.as_settings() if sizes else {}
        for key, value in sizes_as_settings.items():
            if self.objective.loss_type != "sft" or SETTINGS[key].used_by is None:
                values[key] = value
        return values

    @property
    def judges_itself(self) -> bool:
        """Whether the judge is the model before training."""
        return not self.judge.url and self.judge.model in ("", self.model.name)

    @property
    def compares_within_groups(self) -> bool:
        """Whether rewards are compared within groups. Otherwise they are only reported."""
        return self.objective.loss_type != "distill" and self.sampling.groups > 1


def _list_settings() -> Iterator[Setting]:
    """Every field in every group, in the order of declaration."""
    for group in dataclasses.fields(Config):
        group_class: Any = group.type
        prefix = getattr(group_class, "prefix", "")
        for field in dataclasses.fields(group_class):
            metadata = field.metadata
            key = metadata.get("key", prefix + field.name)
            used_by = metadata.get("used_by", getattr(group_class, "used_by", None))
            later = metadata.get("later", getattr(group_class, "later", False))
            title = str(group_class.__doc__)
            yield Setting(key, group.name, title, field, used_by, later)


SETTINGS: dict[str, Setting] = {setting.key: setting for setting in _list_settings()}
JUDGE = [key for key, setting in SETTINGS.items() if setting.group == "judge"]
TOOLS = [key for key, setting in SETTINGS.items() if setting.group == "tools"]


def is_user_function(value: str) -> bool:
    """Whether the value of a setting with choices names a user's function instead."""
    return ":" in value


class Sizes(NamedTuple):
    """The sizes that memory decides once, before the first step. `config.yaml` keeps them."""

    rollout_batch_size: int  # number of rows decoded at once
    train_token_budget: int  # positions per micro-batch
    checkpoint_layers: int  # number of layers that the backward pass computes again

    def as_settings(self) -> dict[str, Any]:
        """The sizes as settings, so that a repeated or resumed run uses the same ones."""
        layers = str(self.checkpoint_layers) if self.checkpoint_layers else "off"
        return self._asdict() | {"checkpoint_layers": layers}
