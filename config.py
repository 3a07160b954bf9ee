"""
Declares every setting of a run: each field defines a flag, a YAML key, a range and a help text.

The classes are frozen, so that settings do not change during a run. The files in settings/ read and
check the values of settings. The files that use a setting define what the setting does. This file
imports only the standard library and flags.py.
"""

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any, Literal, NamedTuple, get_args

from flags import Setting, parse_stop_text_and_print_notes, setting

Target = Literal["qkv_proj", "o_proj", "in_proj", "out_proj", "gate_up_proj", "down_proj"]
Tracker = Literal["wandb", "swanlab"]
TARGETS = get_args(Target)
MOST_BATCH = 2**16

# `flags.setting` documents the metadata that every setting may have. The settings in this file may
# also have these metadata:
#   key       the name of the setting, if it differs from the name of the field
#   used_by   the runs that use the setting: "rollouts" for runs that sample completions, "grpo" for
#             runs that compute advantages, "distill" for runs with a teacher, None for all runs.
#             The default is the `used_by` of the class.
#   later     whether a resumed run may change the setting. The default is the `later` of the class.
#   first     whether --help shows the flag; --help-all shows every flag
#   file      whether the value may name files
#   function  whether the value may name a function of the user (FILE.py:function)
#   also      other names for the flag


@dataclasses.dataclass(frozen=True)
class ModelSettings:
    """Model and adapters"""

    name: str = setting(
        "",
        "the model: a hub id, a directory, a GGUF file, `smollm2`, `demo`, `demo:rg` or "
        "`demo:tools`; the default is the model in the recipe or else, on a GPU, Qwen/Qwen3-0.6B, "
        "and without a GPU, `demo`",
        key="model",
        first=True,
        file=True,
    )
    lora_rank: int = setting(
        16,
        "rank of the LoRA adapters; 0 trains all weights instead of adapters",
        low=0,
        high=2**12,
        first=True,
    )
    lora_scale: float = setting(
        2.0,
        "factor by which the output of each adapter is multiplied, like `scale` in mlx_lm",
        low=1e-6,
        high=1e4,
    )
    lora_targets: list[Target] = setting(
        lambda: list(TARGETS),
        "projections that get adapters; `all-linear` and the names q_proj k_proj v_proj also work",
        metavar="NAME",
    )
    lora_layers: int | None = setting(
        None,
        "number of upper layers that get adapters; the backward pass ends at the lowest of them; "
        "auto: all layers",
        low=1,
    )
    init_adapter: str = setting(
        "", "adapter to start from: the directory of a run, or an mlx_lm or PEFT adapter", file=True
    )


@dataclasses.dataclass(frozen=True)
class DataAndRewardSettings:
    """Prompts and rewards"""

    used_by = "rollouts"
    task: str = setting(
        "",
        "task, which determines the data, the rewards and the evaluation: demo, values, gsm8k, "
        "math, ifeval, calculator, guess, or rg:NAME=WEIGHT; the default is `own` with --data; "
        "otherwise `env` with an environment, a bundled model's own task, or `values`",
        used_by=None,
        first=True,
    )
    task_config: str = setting(
        "",
        "YAML file with the options of an rg:NAME task: the sizes and levels of its problems, "
        "and the number of held-out problems",
        file=True,
    )
    path: str = setting(
        "",
        "your prompts: a JSONL, CSV, TXT, Parquet or Arrow file, or a data set of the library "
        "`datasets`, on disk or on the hub; TRAIN,HELD_OUT names two files",
        key="data",
        used_by=None,
        first=True,
        file=True,
    )
    columns: str = setting(
        "",
        "names of the columns in your data; for example, prompt=question,answer=solution reads "
        "the prompts from the column `question` and the answers from the column `solution`",
        used_by=None,
    )
    verifier: str = setting(
        "",
        "how a completion is compared with the correct answer: auto, json, number, choice, math, "
        "exact, marked, or your own function as FILE.py:fn; if a run with --loss-type sft has a "
        "verifier, the model also answers the held-out prompts in each evaluation",
        first=True,
        function=True,
    )
    rubric: str = setting(
        "",
        "YAML file with the judge's rubric; this rubric replaces the task's rubric",
        first=True,
        file=True,
    )
    reward: list[str] = setting(
        list,
        "rewards to use instead of the task's rewards: your own functions as FILE.py:fn,fn, or "
        "built-in rewards by name, such as length:200; a run with --loss-type sft uses them only "
        "in evaluations",
        first=True,
        file=True,
    )
    reward_weights: dict[str, float] = setting(
        dict,
        "weights of the rewards, for example correct=1,rubric=0.5; a reward that is not listed "
        "keeps the weight that it has in the task, or else the weight 1",
        first=True,
    )
    reward_gate: Literal["off", "form"] = setting(
        "off",
        "`form`: a completion keeps a reward above 0 only if it ends before --max-tokens, has at "
        "least four words, does not repeat itself and does not copy the prompt; `off`: every "
        "completion keeps its reward",
    )


@dataclasses.dataclass(frozen=True)
class SamplingSettings:
    """Rollouts"""

    used_by = "rollouts"
    batch: int = setting(
        4, "number of prompts per step (B)", low=1, high=MOST_BATCH, used_by=None, first=True
    )
    groups: int = setting(
        8,
        "number of completions per prompt (G); 1 is allowed only with --teacher",
        low=1,
        high=MOST_BATCH,
        first=True,
    )
    rollout_batch_size: int | None = setting(
        None,
        "maximum number of completions sampled at the same time; auto: as many as fit in GPU "
        "memory, or up to 64 on a CPU",
        low=1,
        later=True,
        first=True,
    )
    max_tokens: int = setting(256, "maximum number of tokens per completion", low=1, first=True)
    stop: list[str] = setting(
        list,
        r"stop texts, which end a completion (\n is a line break); rewards and the judge see only "
        "what comes before the stop text",
        metavar="TEXT",
        parse=parse_stop_text_and_print_notes,
    )
    end_tokens: list[str] = setting(
        list,
        "tokens that end a completion, in addition to the model's own end tokens; each is "
        "given as text, such as <|im_end|>, or as a token id",
        metavar="TOKEN",
        parse=str,
    )
    temp: float = setting(
        1.0, "sampling temperature; 0: always take the likeliest token", low=0, first=True
    )
    top_p: float = setting(
        1.0,
        "nucleus sampling: sample only from the likeliest tokens whose probabilities add up "
        "to this value; the update also computes probabilities over these tokens only; 1: sample "
        "from all tokens",
        low=1e-06,
        high=1.0,
    )
    top_k: int = setting(
        0, "top-k sampling: sample only from the k likeliest tokens; 0: from all tokens", low=0
    )
    min_p: float = setting(
        0.0,
        "sample only tokens whose probability is at least this fraction of the likeliest "
        "token's probability",
        low=0,
        high=1.0,
    )
    thinking: bool = setting(
        False, "turn on the thinking mode of the model's chat template", used_by=None
    )
    seed: int = setting(
        0,
        "seed of the random order of prompts, of sampling and of the initial adapters",
        low=0,
        used_by=None,
        first=True,
    )


@dataclasses.dataclass(frozen=True)
class ObjectiveSettings:
    """Objective"""

    used_by = "grpo"
    loss_type: Literal["grpo", "dr_grpo", "dapo", "cispo", "sapo", "distill", "sft"] = setting(
        "dapo",
        "loss function; grpo, dr_grpo, dapo, cispo and sapo train on rewards, distill trains on "
        "the scores of --teacher, and sft trains on the replies in --data; this flag is the same "
        "as --loss",
        used_by=None,
        function=True,
        also=("loss",),
        first=True,
    )
    importance_sampling_level: Literal["token", "sequence"] = setting(
        "token", "whether the importance ratio is computed per token or per sequence"
    )
    importance_sampling_correction: Literal["off", "token", "sequence"] = setting(
        "off",
        "off-policy correction: multiply the loss by the ratio of two probabilities: that under "
        "the policy before the update, and that recorded by the sampler; `token` computes the "
        "ratio for each token, `sequence` for each completion, and `off` does not correct the loss",
    )
    importance_sampling_cap: float = setting(
        3.0, "largest weight of --importance-sampling-correction", low=1.0, high=1e6
    )
    advantage: Literal["group", "rloo", "reinforce"] = setting(
        "group",
        "baseline that is subtracted from a reward: the mean reward of its group (group), of "
        "the other completions in its group (rloo), or of the whole step (reinforce)",
        function=True,
    )
    scale_rewards: Literal["group", "batch", "mean", "none"] = setting(
        "group",
        "divisor of the advantages: the standard deviation of the rewards in the group (group) or "
        "in the step (batch), the mean reward of the group, or a G-th of the range of its rewards "
        "if that is larger (mean), or no divisor (none)",
    )
    combine_rewards: Literal["sum", "normalize"] = setting(
        "sum",
        "how several rewards are added: as they are (sum), or after each reward is normalized "
        "(normalize)",
    )
    epsilon: float = setting(
        0.2,
        "lower clip range: the importance ratio is clipped to at least 1 - this value",
        low=0,
    )
    epsilon_high: float | None = setting(
        None,
        "upper clip range: the importance ratio is clipped to at most 1 + this value (default: "
        "the value of --epsilon); with --loss-type cispo, it is clipped to at most this value",
        low=0,
    )
    beta: float = setting(
        0.0,
        "weight of the KL term, which keeps the model close to the model before training; 0: no KL "
        "term",
        low=0,
        first=True,
    )
    entropy_coef: float = setting(
        0.0,
        "weight of the entropy bonus: this value times the entropy of the next-token distribution "
        "is subtracted from the loss of each token, so that answers stay varied; useful values lie "
        "between 0.001 and 0.01; 0: no bonus",
        low=0,
    )
    train_completions: int | None = setting(
        None,
        "number of completions per prompt that the update trains on; Gwen chooses the completions "
        "whose rewards have the largest variance; auto: all completions",
        low=2,
        first=True,
    )
    truncated: Literal["keep", "mask", "punish"] = setting(
        "keep",
        "what to do with completions that --max-tokens cut off: train on them (keep) or leave them "
        "out of the update (mask); punish: subtract a penalty from the rewards of long "
        "completions, which grows from 0 to 1 over the last fifth of --max-tokens",
        used_by="rollouts",
    )
    teacher: str = setting(
        "",
        "teacher model, which scores the completions of the trained model: a hub id, a "
        "directory, or `self` for the model before training",
        used_by="distill",
        file=True,
    )
    teacher_prompt: str = setting(
        "",
        "text file with a system message that only the teacher sees; {answer} is replaced by "
        "the value in the column `answer`, and any other {NAME} by the value in the column NAME",
        used_by="distill",
        file=True,
    )
    distill_beta: float = setting(
        0.5,
        "kind of divergence from the teacher: 0 is forward KL, 1 is reverse KL, and values in "
        "between are generalized Jensen-Shannon divergences",
        low=0,
        high=1.0,
        used_by="distill",
    )


@dataclasses.dataclass(frozen=True)
class ToolSettings:
    """Tools"""

    used_by = "rollouts"
    tools: list[str] = setting(
        list, "Python functions that the model may call, as FILE.py:fn,fn", file=True
    )
    env: str = setting(
        "",
        "environment that the model interacts with, as FILE.py:Class, or several "
        "environments, as NAME=FILE.py:Class,...",
        file=True,
    )
    env_server: str = setting(
        "",
        "command that starts an outside harness, which plays the episodes of its own environment",
    )
    env_timeout: float = setting(
        600.0,
        "number of seconds after which an episode of --env-server fails if the harness sends "
        "neither a request nor a message about it",
        low=0.1,
        high=1e6,
        later=True,
    )
    max_turns: int = setting(8, "maximum number of turns in a conversation with tools", low=1)
    max_context: int | None = setting(
        None,
        "maximum number of tokens in a conversation with tools; auto: 4096, or less if the "
        "model's context is shorter",
        low=16,
    )
    tool_timeout: float = setting(
        60.0, "maximum number of seconds that a tool call may take", low=0.01, high=1e6
    )


@dataclasses.dataclass(frozen=True)
class OptimizerSettings:
    """Update"""

    kind: Literal["adamw", "sgd"] = setting(
        "adamw",
        "optimizer; sgd saves the 8 bytes of memory that AdamW needs per trained weight, but works "
        "only with --lora-rank 0, and --target-kl determines the size of its steps; your own "
        "function takes the learning rate and returns an mlx.optimizers.Optimizer",
        key="optimizer",
        function=True,
    )
    adam_beta1: float = setting(
        0.9, "decay rate per step of AdamW's mean of the gradients", low=0, high=0.99999
    )
    adam_beta2: float = setting(
        0.999, "decay rate per step of AdamW's mean of the squared gradients", low=0, high=0.99999
    )
    adam_epsilon: float = setting(
        1e-8, "value that AdamW adds to the divisor of its steps", low=1e-16, high=1.0
    )
    weight_decay: float = setting(
        0.0,
        "weight decay of AdamW: each step multiplies the trained weights by 1 - learning rate * "
        "this value",
        low=0,
    )
    max_grad_norm: float = setting(
        1.0,
        "a gradient with a larger norm is scaled down to this norm before each optimizer step; "
        "0: no maximum",
        low=0,
    )
    steps: int = setting(
        100,
        "number of training steps; each step is one rollout, followed by "
        "--num-iterations * --mini-batches updates",
        low=1,
        later=True,
        first=True,
    )
    learning_rate: float = setting(
        1e-4,
        "peak learning rate; with --lora-rank 0, the default is a tenth of the value in the "
        "recipe, or 1 with --optimizer sgd",
        low=0,
        first=True,
    )
    warmup_steps: int = setting(
        5,
        "number of steps in which the learning rate rises linearly to its peak; after these "
        "steps, the rate follows --lr-scheduler-type",
        low=0,
    )
    lr_scheduler_type: Literal["cosine", "constant"] = setting(
        "cosine",
        "learning rate after the warm-up: it falls along a cosine to a tenth of its peak at the "
        "last step (cosine), or it stays at its peak (constant)",
    )
    target_kl: float = setting(
        0.02,
        "KL divergence by which one update may change the policy, in nats per token; a step that "
        "exceeds 1.5 times this value is shortened; 0: no limit",
        low=0,
        used_by="rollouts",
    )
    num_iterations: int = setting(
        1, "number of training passes over each rollout", low=1, high=2**10, used_by="rollouts"
    )
    mini_batches: int = setting(
        1,
        "number of optimizer steps per pass over a rollout; each step trains on an equal "
        "share of the --batch prompts",
        low=1,
        high=2**10,
        used_by="rollouts",
    )
    train_token_budget: int | None = setting(
        None,
        "maximum number of token positions in a micro-batch; auto: 1024, or 2048 on a GPU "
        "with enough memory",
        low=1,
        later=True,
    )
    checkpoint_layers: str = setting(
        "auto",
        "number of layers whose activations the backward pass computes again to save memory; "
        "on: all layers; off: none; auto: as few layers as the memory allows",
        later=True,
    )
    over_memory: bool = setting(
        False,
        "train even if the estimated memory use exceeds the memory of this machine",
        later=True,
    )


@dataclasses.dataclass(frozen=True)
class JudgeSettings:
    """Judge"""

    prefix = "judge_"
    used_by = "rollouts"
    later = True
    model: str = setting(
        "",
        "judge model; the default is the model before training; with --judge-url, this is the "
        "model's name on the server",
        first=True,
        file=True,
    )
    mode: Literal["logits", "decode"] = setting(
        "logits",
        "how the judge's score is obtained: from the probabilities of the first token of its "
        "reply (logits), or from a complete decoded reply (decode)",
    )
    think: int = setting(
        0,
        "maximum number of tokens that the judge may think before it replies; needs "
        "--judge-mode decode",
        low=0,
    )
    chunk_size: int = setting(
        24,
        "number of completions that are judged in one batch; the environment variable "
        "RUBRIC_JUDGE_BATCH_SIZE changes the default",
        low=1,
    )
    url: str = setting(
        "",
        "address of an OpenAI-compatible server that runs the judge, for example "
        "http://127.0.0.1:8080/v1; the server's key is read from the environment variable "
        "JUDGE_API_KEY",
    )


@dataclasses.dataclass(frozen=True)
class EvaluationSettings:
    """Evaluation"""

    prefix = "eval_"
    later = True
    every: int = setting(
        20, "number of steps between evaluations; 0: no evaluations", low=0, first=True
    )
    limit: int = setting(
        0,
        "maximum number of held-out problems in an evaluation, chosen at even intervals; "
        "0: all held-out problems",
        low=0,
    )
    rubric: str = setting(
        "",
        "YAML file with a second rubric, the witness, by which the judge scores only the answers "
        "in evaluations; if the score of the first rubric rises without that of the witness, the "
        "model has probably learned only to please the judge",
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
        "number of steps between checkpoints; the first checkpoint is saved within five minutes",
        low=1,
        first=True,
    )
    report_to: list[Tracker] = setting(
        list,
        "experiment trackers to which metrics are sent; each needs the extra of its name, "
        "for example `uv run --extra wandb train.py`",
    )


@dataclasses.dataclass(frozen=True)
class Config:
    """
    All settings of a run, in groups.

    `config.yaml` lists the same settings without groups; its keys are the names of the flags.
    """

    model: ModelSettings
    data: DataAndRewardSettings
    sampling: SamplingSettings
    tools: ToolSettings
    objective: ObjectiveSettings
    optimizer: OptimizerSettings
    judge: JudgeSettings
    evaluation: EvaluationSettings
    records: RecordSettings

    @classmethod
    def from_flags(cls, **unchecked_values: Any) -> "Config":
        """
        Return a Config with the given values. Every other setting has its default value.

        This method neither converts nor checks the values; settings/checks.py does.

        unchecked_values: settings by name, such as `max_tokens`.
        """
        group_classes: dict[str, Any] = {
            group.name: group.type for group in dataclasses.fields(cls)
        }
        fields: dict[str, dict[str, Any]] = {name: {} for name in group_classes}
        for key, value in unchecked_values.items():
            declared = SETTINGS[key]
            fields[declared.group][declared.field.name] = value
        groups = {name: make(**fields[name]) for name, make in group_classes.items()}
        return cls(**groups)

    def copy_with_settings(self, **values: Any) -> "Config":
        """Return a copy of this Config in which the given values replace the old values."""
        return Config.from_flags(**self.to_flags() | values)

    def to_flags(self, sizes: "MemoryDependentSizes | None" = None) -> dict[str, Any]:
        """
        Return the values of all settings by name, such as `max_tokens`.

        sizes: sizes that replace the settings of the same name, if this run uses those settings.
        """
        values = {}
        for key, declared in SETTINGS.items():
            group = getattr(self, declared.group)
            values[key] = getattr(group, declared.field.name)

        sizes_as_settings = sizes.as_settings() if sizes else {}
        for key, value in sizes_as_settings.items():
            if self.objective.loss_type != "sft" or is_used_by_sft(key, values):
                values[key] = value
        return values

    @property
    def judges_with_base_model(self) -> bool:
        """Whether the model before training is also the judge."""
        return not self.judge.url and self.judge.model in ("", self.model.name)

    @property
    def compares_rewards_within_groups(self) -> bool:
        """Whether training compares the rewards in a group. If not, rewards are only reported."""
        return self.objective.loss_type != "distill" and self.sampling.groups > 1


def _list_settings() -> Iterator[Setting]:
    """Yield a Setting for each field of each group, in the order of declaration."""
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


# The settings that --loss-type sft uses only if evaluations sample answers.
ANSWER_SETTINGS = (
    *("verifier", "reward", "reward_weights"),
    *("max_tokens", "stop", "end_tokens", "rollout_batch_size"),
)


def evaluations_sample_answers(settings: Mapping[str, Any]) -> bool:
    """
    Whether the evaluations of a run sample answers to the held-out prompts.

    With --loss-type sft, they do so only if --verifier or --reward says how to score the answers.
    """
    if settings.get("loss_type") != "sft":
        return True
    return bool(settings.get("verifier") or settings.get("reward"))


def is_used_by_sft(key: str, settings: Mapping[str, Any]) -> bool:
    """Whether a run with --loss-type sft and these settings uses the setting named `key`."""
    if SETTINGS[key].used_by is None:
        return True
    return key in ANSWER_SETTINGS and evaluations_sample_answers(settings)


def is_user_function(setting_value: str) -> bool:
    """Whether a value names a user's own function (FILE.py:function), not a built-in choice."""
    return ":" in setting_value


class MemoryDependentSizes(NamedTuple):
    """
    Sizes that are fitted to the available memory once, before the first step.

    The sizes are saved in `config.yaml`.
    """

    rollout_batch_size: int  # maximum number of completions sampled at the same time
    train_token_budget: int  # maximum number of token positions in a micro-batch
    checkpoint_layers: int  # number of layers whose activations the backward pass computes again

    def as_settings(self) -> dict[str, Any]:
        """The sizes as settings by name, so that a repeated or resumed run uses the same sizes."""
        layers = str(self.checkpoint_layers) if self.checkpoint_layers else "off"
        return self._asdict() | {"checkpoint_layers": layers}
