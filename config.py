"""
Every setting of a run, declared once: a field is a flag, a key in YAML, a range, and says which runs use it.

Settings are frozen. Where their values come from, and whether they fit together, is in settings/; what they mean to the
algorithm is in the files that use them. Imports only the standard library and flags.py.
"""

import dataclasses
from collections.abc import Iterator
from typing import Any, Literal, NamedTuple, get_args

from flags import Setting, setting, stop_text

Target = Literal["qkv_proj", "o_proj", "in_proj", "out_proj", "gate_up_proj", "down_proj"]
Tracker = Literal["wandb", "swanlab"]
TARGETS = get_args(Target)
# In `flag`: `key` is the setting's name where it is not that of its field; `of` names the runs that use it, else that
# of its class (default: all): "rollouts" those that sample, "grpo" those with advantages, "distill". `later`: a resumed
# run may change it. `first`: --help shows it. `file`: may name files, `own`: a function (`settings.sources.located`).


@dataclasses.dataclass(frozen=True)
class ModelSettings:
    """Model and adapters"""

    name: str = setting(
        "", "hub id, directory, GGUF file, `smollm2`, `demo`, `demo:rg` or `demo:tools`; without a GPU demo",
        key="model", first=True, file=True,
    )  # fmt: skip
    lora_rank: int = setting(
        16, "rank of the adapters; 0 trains all weights", low=0, high=2**12, first=True
    )
    lora_scale: float = setting(
        2.0, "factor of the adapters' output, as in mlx_lm", low=1e-6, high=1e4
    )
    lora_targets: list[Target] = setting(
        lambda: list(TARGETS),
        "projections that get adapters, also q_proj k_proj v_proj or all-linear",
        metavar="NAME",
    )
    init_adapter: str = setting(
        "", "a run, or an adapter of mlx_lm or PEFT, that training begins with", file=True
    )


@dataclasses.dataclass(frozen=True)
class DataSettings:
    """Prompts and rewards"""

    of = "rollouts"
    task: str = setting(
        "", "data, rewards and evaluation in one: demo, values, gsm8k, math, ifeval, rg:NAME=WEIGHT, own with --data",
        of=None, first=True,
    )  # fmt: skip
    task_config: str = setting(
        "", "YAML with sizes, levels and held-out number of rg:NAME's problems", file=True
    )
    path: str = setting(
        "", "your prompts: JSONL, CSV, TXT, parquet, Arrow, `datasets` on disk or the hub; TRAIN,HELD_OUT are two",
        key="data", of=None, first=True, file=True,
    )  # fmt: skip
    columns: str = setting(
        "", "names of the data's columns, as prompt=question,answer=solution", of=None
    )
    verifier: str = setting(
        "",
        "comparison of answers: auto, json, number, choice, math, exact, marked or FILE.py:fn",
        first=True,
        own=True,
    )
    rubric: str = setting("", "rubric YAML, in place of the task's", first=True, file=True)
    reward: list[str] = setting(list, "reward functions FILE.py:fn,fn", first=True, file=True)
    reward_weights: dict[str, float] = setting(
        dict, "weights of rewards, as correct=1,rubric=0.5", first=True
    )
    reward_gate: Literal["off", "form"] = setting(
        "off", "form: rewards above 0 count only for finished answers that neither repeat nor copy"
    )


@dataclasses.dataclass(frozen=True)
class SamplingSettings:
    """Rollouts"""

    of = "rollouts"
    batch: int = setting(4, "B, prompts per step", low=1, high=2**16, of=None, first=True)
    groups: int = setting(
        8, "G, completions per prompt; 1 where a teacher trains", low=1, high=2**16, first=True
    )
    rollout_batch_size: int | None = setting(
        None,
        "rows decoded at once; auto: what a GPU's memory holds, else up to 64",
        low=1,
        later=True,
        first=True,
    )
    max_tokens: int = setting(256, "most tokens per completion", low=1, first=True)
    stop: list[str] = setting(
        list,
        r"texts that end a completion, \n is a line end; rewards and judge get what is before",
        metavar="TEXT",
        parse=stop_text,
    )
    end_tokens: list[str] = setting(
        list,
        "tokens that end a completion beside the model's own, as <|im_end|> or an id",
        metavar="TOKEN",
        parse=str,
    )
    temp: float = setting(1.0, "sampling temperature", low=0, first=True)
    top_p: float = setting(
        1.0, "nucleus sampling; the update uses the same tokens", low=1e-06, high=1.0
    )
    top_k: int = setting(0, "sample from the k likeliest tokens; 0: from all", low=0)
    min_p: float = setting(
        0.0, "least probability relative to the likeliest token", low=0, high=1.0
    )
    thinking: bool = setting(False, "use the chat template's thinking mode", of=None)
    seed: int = setting(0, "seed of prompts, sampling and adapters", low=0, of=None, first=True)


@dataclasses.dataclass(frozen=True)
class ObjectiveSettings:
    """Objective"""

    of = "grpo"
    loss_type: Literal["grpo", "dr_grpo", "dapo", "cispo", "sapo", "distill", "sft"] = setting(
        "dapo", "the loss, also as --loss; sft: cross-entropy on the replies in --data",
        of=None, own=True, also=("loss",), first=True,
    )  # fmt: skip
    importance_sampling_level: Literal["token", "sequence"] = setting(
        "token", "ratio per token or sequence"
    )
    advantage: Literal["group", "rloo", "reinforce"] = setting(
        "group",
        "what a reward is compared with: the mean of its group, of its others, of the step",
        own=True,
    )
    scale_rewards: Literal["group", "batch", "mean", "none"] = setting(
        "group",
        "what divides advantages: the deviation in the group or the batch, or the group's mean",
    )
    combine_rewards: Literal["sum", "normalize"] = setting(
        "sum", "sum several rewards, or normalize each first"
    )
    epsilon: float = setting(0.2, "the ratio is clipped at 1 - this", low=0)
    epsilon_high: float | None = setting(
        None,
        "the ratio is clipped at 1 + this; default: --epsilon; for cispo the cap on the ratio",
        low=0,
    )
    beta: float = setting(
        0.0, "weight of the KL term against the model before training", low=0, first=True
    )
    truncated: Literal["keep", "mask", "punish"] = setting(
        "keep", "train, leave out or punish what --max-tokens cut off", of="rollouts"
    )
    teacher: str = setting(
        "",
        "scores the student's completions: hub id, directory, or `self` before training",
        of="distill",
        file=True,
    )
    teacher_prompt: str = setting(
        "",
        "text file, a system message for the teacher alone; {answer} is the column's value",
        of="distill",
        file=True,
    )
    distill_beta: float = setting(
        0.5,
        "divergence: 0 forward KL, 1 reverse KL, between a Jensen-Shannon",
        low=0,
        high=1.0,
        of="distill",
    )


@dataclasses.dataclass(frozen=True)
class ToolSettings:
    """Tools"""

    of = "rollouts"
    tools: list[str] = setting(list, "functions that the model may call, FILE.py:fn,fn", file=True)
    env: str = setting(
        "", "environment that it talks with, FILE.py:Class, or NAME=FILE.py:Class,...", file=True
    )
    max_turns: int = setting(8, "most turns of a conversation with tools", low=1)
    max_context: int | None = setting(
        None, "most tokens of a conversation with tools; auto: 4096, or the model's context", low=16
    )
    tool_timeout: float = setting(
        60.0, "seconds after which a call is given up", low=0.01, high=1e6
    )


@dataclasses.dataclass(frozen=True)
class OptimizerSettings:
    """Update"""

    kind: Literal["adamw", "sgd"] = setting(
        "adamw", "sgd: for all weights, without AdamW's 8 bytes a weight; --target-kl alone finds its rate",
        key="optimizer", of="rollouts",
    )  # fmt: skip
    steps: int = setting(
        100, "rollouts, of --num-iterations * --mini-batches updates", low=1, later=True, first=True
    )
    learning_rate: float = setting(
        1e-4, "peak rate; with --lora-rank 0 a tenth of the recipe's", low=0, first=True
    )
    warmup_steps: int = setting(5, "steps of linear warm-up, before a cosine to a tenth", low=0)
    target_kl: float = setting(
        0.02, "largest KL of one update, nats per token; 0: no limit", low=0, of="rollouts"
    )
    num_iterations: int = setting(
        1, "times that a rollout is trained on", low=1, high=2**10, of="rollouts"
    )
    mini_batches: int = setting(
        1, "optimizer steps each time, by parts of --batch", low=1, high=2**10, of="rollouts"
    )
    train_token_budget: int | None = setting(
        None,
        "positions per micro-batch; auto: 1024, on a GPU 2048 where memory allows",
        low=1,
        later=True,
    )
    checkpoint_layers: str = setting(
        "auto",
        "layers computed again in the backward pass: on, off, a number; auto: as memory needs",
        later=True,
    )
    over_memory: bool = setting(
        False, "train though the estimate passes this machine's memory", later=True
    )


@dataclasses.dataclass(frozen=True)
class JudgeSettings:
    """Judge"""

    prefix, of, later = "judge_", "rollouts", True
    model: str = setting(
        "", "judge in place of the base model; its name at --judge-url", first=True, file=True
    )
    mode: Literal["logits", "decode"] = setting(
        "logits", "score by first-token probabilities or by a decoded reply"
    )
    think: int = setting(0, "most thinking tokens before a decoded reply", low=0)
    chunk_size: int = setting(
        24, "evaluations per batch; the environment's RUBRIC_JUDGE_BATCH_SIZE is its default", low=1
    )
    url: str = setting(
        "", "OpenAI-compatible server to ask, as http://127.0.0.1:8080/v1; its key in JUDGE_API_KEY"
    )


@dataclasses.dataclass(frozen=True)
class EvaluationSettings:
    """Evaluation"""

    prefix, later = "eval_", True
    every: int = setting(20, "steps between evaluations; 0: none", low=0, first=True)
    limit: int = setting(0, "most held-out problems, evenly spread; 0: all", low=0)
    rubric: str = setting(
        "", "rubric YAML of evaluations, a judge's witness", of="rollouts", later=False, file=True
    )


@dataclasses.dataclass(frozen=True)
class RecordSettings:
    """Records"""

    later = True
    save_every: int = setting(
        20, "steps between checkpoints; the first one comes within five minutes", low=1, first=True
    )
    report_to: list[Tracker] = setting(list, "trackers that get the figures, each an extra")


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
    def from_flags(cls, **values: Any) -> "Config":
        """The defaults with these values, by the names of their flags; unchecked."""
        groups: dict[str, Any] = {group.name: group.type for group in dataclasses.fields(cls)}
        parts: dict[str, dict[str, Any]] = {name: {} for name in groups}
        for key, value in values.items():
            parts[SETTINGS[key].group][SETTINGS[key].field.name] = value
        return cls(**{name: make(**parts[name]) for name, make in groups.items()})

    def with_settings(self, **values: Any) -> "Config":
        """These settings with other values."""
        return Config.from_flags(**self.to_flags() | values)

    def to_flags(self, sizes: "Sizes | None" = None) -> dict[str, Any]:
        """Every setting by the name of its flag. sizes: what they decide, as far as this run uses it."""
        decided = sizes.as_settings() if sizes else {}
        if self.objective.loss_type == "sft":
            decided = {key: value for key, value in decided.items() if SETTINGS[key].of is None}
        return {
            key: getattr(getattr(self, one.group), one.field.name) for key, one in SETTINGS.items()
        } | decided

    @property
    def judges_itself(self) -> bool:
        """Whether the judge is the model before training."""
        return not self.judge.url and self.judge.model in ("", self.model.name)

    @property
    def compares_within_groups(self) -> bool:
        """Whether rewards are compared within groups; else they are only looked at."""
        return self.objective.loss_type != "distill" and self.sampling.groups > 1


def _settings() -> Iterator[tuple[str, Setting]]:
    for group in dataclasses.fields(Config):
        kind: Any = group.type
        for field in dataclasses.fields(kind):
            key = field.metadata.get("key", getattr(kind, "prefix", "") + field.name)
            of, later = (
                field.metadata.get(name, getattr(kind, name, None)) for name in ("of", "later")
            )
            yield key, Setting(key, group.name, str(kind.__doc__), field, of, bool(later))


SETTINGS: dict[str, Setting] = dict(_settings())


def is_user_function(value: str) -> bool:
    """Whether a setting with choices names a user's function instead."""
    return ":" in value


JUDGE, TOOLS = (
    [key for key, one in SETTINGS.items() if one.group == group] for group in ("judge", "tools")
)


class Sizes(NamedTuple):
    """What memory decides, once, before the first step; `config.yaml` keeps it."""

    rollout_batch_size: int  # rows decoded at once
    train_token_budget: int  # positions per micro-batch
    checkpoint_layers: int  # layers computed again in the backward pass

    def as_settings(self) -> dict[str, Any]:
        """As settings, so that a repeated or resumed run decides the same."""
        return self._asdict() | {
            "checkpoint_layers": str(self.checkpoint_layers) if self.checkpoint_layers else "off"
        }
