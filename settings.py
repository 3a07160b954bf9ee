"""
Every setting of a run, in one table: a flag wins over the environment, that over the recipe, that over the default.

Whatever they come from, settings are checked here before a model is loaded. What is left out: what they mean to the
algorithm, which is in the files that use them.
"""

import argparse
import dataclasses
import difflib
import itertools
import json
import reprlib
import time
from pathlib import Path
from typing import Any

import cpu_blas  # before mlx
import yaml

import dispatch
import gpu
import grpo
import gwen
import lora
import micro_batch
import run_files
import telemetry
from config import JudgeSettings, add_flags, check_judge, check_values, load_yaml, of_environment
from config import flag as _flag


def _weights(text: str) -> dict[str, float]:
    """ "correct=1,rubric=0.5" as a dictionary."""
    weights = {}
    for part in text.split(","):
        name, _, value = part.partition("=")
        try:
            weights[name.strip()] = float(value)
        except ValueError as error:
            raise argparse.ArgumentTypeError(f"{part!r} is not NAME=NUMBER; write correct=1,rubric=0.5") from error
    return weights


# what may change where a run is resumed: how long it goes on, how often it looks and saves, the memory it takes, and
# who judges
CHANGEABLE = {
    *("steps", "save_every", "keep", "eval_every", "eval_limit"),
    *("rollout_batch_size", "train_token_budget", "checkpoint_layers"),
    *(field.name for field in dataclasses.fields(JudgeSettings)),
}


@dataclasses.dataclass
class Training:
    """What is trained, on what, and how."""

    model: str = _flag("", "hub id, Hugging Face directory or `demo` (default: demo without a GPU)")
    task: str = _flag("", "demo, values or gsm8k: data, rewards and evaluation in one name")
    data: str = _flag("", "JSONL, parquet, CSV or hub dataset with a `prompt` column, instead of the task's prompts")
    columns: str = _flag("", "names of the data's columns, as prompt=question,answer=answer")
    rubric: str = _flag("", "rubric YAML, instead of the task's")
    reward: list[str] = _flag(list, "reward functions FILE.py:fn, instead of the task's and of its rubric", nargs="+")
    reward_weights: dict[str, float] = _flag(dict, "weights as correct=1,rubric=0.5, over the task's", parse=_weights)
    batch: int = _flag(4, "B, prompts a step", low=1, high=2**16)
    groups: int = _flag(8, "G, completions a prompt", low=2, high=2**16)
    rollout_batch_size: int = _flag(
        0,
        "rows decoded at once; auto: measured on a GPU, else all of a step, at most 64",
        low=1,
        parse=dispatch.parse_size,
    )
    share_prefix: str = _flag(
        "auto",
        "hold a prompt's cache once for its group; auto: measured on a GPU, else by the length of the prompt",
        choices=("auto", "on", "off"),
    )
    max_tokens: int = _flag(256, "most tokens of a completion", low=1)
    temp: float = _flag(1.0, "sampling temperature", low=0)
    top_p: float = _flag(1.0, "nucleus; the update uses the same support", low=1e-06, high=1.0)
    top_k: int = _flag(0, "most likely tokens kept; 0 keeps all", low=0)
    min_p: float = _flag(0.0, "least probability relative to the likeliest token", low=0, high=1.0)
    thinking: bool = _flag(False, "let models that can think before they answer")
    steps: int = _flag(100, "rollouts, each with --epochs-per-rollout optimizer steps", low=1)
    lr: float = _flag(1e-4, "peak learning rate; unless given, a tenth of the recipe's for --lora-rank 0", low=0)
    lr_schedule: str = _flag("cosine", "after the warm-up", choices=("cosine", "constant"))
    warmup_steps: int = _flag(5, "steps of linear warm-up", low=0)
    weight_decay: float = _flag(0.0, "AdamW's weight decay", low=0)
    target_kl: float = _flag(
        0.02, "how far an update may move the policy, KL in nats a token; 0: as far as --lr takes it", low=0
    )
    max_grad_norm: float = _flag(1.0, "the gradient is scaled down to this norm", low=1e-09)
    loss: str = _flag("dapo", "aggregation of the token losses", choices=grpo.LOSS_TYPES)
    level: str = _flag("token", "importance ratio per token or per sequence", choices=grpo.LEVELS)
    advantage: str = _flag(
        "group", "the baseline: mean of the group, of its others, of the step", choices=grpo.BASELINES
    )
    scale_rewards: str = _flag("group", "what advantages are divided by", choices=grpo.SCALES)
    combine_rewards: str = _flag(
        "sum", "several rewards: summed then normalized, or normalized then summed", choices=("sum", "normalize")
    )
    signal_floor: float = _flag(
        0.01, "a group whose rewards lie within this share of the step's deviation is noise; 0: no group is", low=0
    )
    clip_low: float = _flag(0.2, "the ratio is clipped at 1 - this", low=0)
    clip_high: float = _flag(0.2, "the ratio is clipped at 1 + this; for cispo its weight is capped at this", low=0)
    delta: float = _flag(0.0, "most that a ratio counts for a negative advantage; 0 is no bound", low=0)
    kl_coef: float = _flag(0.0, "weight of the KL term against the model before training", low=0)
    kl_estimator: str = _flag("k3", "how the KL term is estimated", choices=grpo.KL_ESTIMATORS)
    entropy_coef: float = _flag(0.0, "weight of an entropy bonus", low=0)
    top_entropy: float = _flag(1.0, "share of tokens, those of highest entropy, that are trained", low=0, high=1.0)
    epochs_per_rollout: int = _flag(1, "optimizer steps on each rollout", low=1, high=2**10)
    old_logprobs: str = _flag(
        "step", "of the update's own forward pass, or of the sampler", choices=("step", "sampler")
    )
    mismatch: str = _flag("off", "correction where trainer and sampler disagree", choices=grpo.CORRECTIONS)
    mismatch_cap: float = _flag(3.0, "the largest ratio of trainer to sampler that is trusted", low=1.0)
    truncated: str = _flag(
        "keep",
        "completions cut off at --max-tokens: trained, left out, or punished",
        choices=("keep", "mask", "punish"),
    )
    dynamic_sampling: bool = _flag(False, "draw more prompts until --batch groups have rewards that differ")
    dynamic_sampling_cap: int = _flag(4, "most batches of prompts that a step draws for that", low=2, high=2**10)
    train_token_budget: int = _flag(
        0,
        "most positions in one micro-batch, with padding; auto: 1024; on a GPU 2048 where memory allows",
        low=1,
        parse=dispatch.parse_size,
    )
    train_share_prefix: str = _flag(
        "auto",
        "compute a group's prompt once in the update; auto: on a CPU where it saves enough positions",
        choices=micro_batch.SHARING,
    )
    checkpoint_layers: str = _flag(
        "auto", "layers computed again for the gradient: on, off or how many; auto: as many as memory asks for"
    )
    lora_rank: int = _flag(16, "0 trains all weights", low=0, high=2**12)
    lora_scale: float = _flag(2.0, "factor of the adapter's output, as in mlx_lm")
    lora_targets: list[str] = _flag(lambda: list(lora.TARGETS), "adapted projections", nargs="+", choices=lora.TARGETS)


@dataclasses.dataclass
class Config(JudgeSettings, Training):
    """Every setting of a run: each field is a flag, and `config.yaml` holds them all, those of training first."""

    eval_rubric: str = _flag("", "rubric YAML that only evaluations ask, as the witness of a judge")
    eval_judge_model: str = _flag("", "the witness's judge, instead of --judge-model")
    eval_every: int = _flag(20, "steps between evaluations; 0 never evaluates", low=0)
    eval_limit: int = _flag(0, "most held-out problems, evenly spread over them; 0 takes all", low=0)
    save_every: int = _flag(20, "steps between checkpoints", low=1)
    keep: int = _flag(3, "newest checkpoints that stay on disk", low=1)
    seed: int = _flag(0, "of prompts, sampling and adapters", low=0)

    @property
    def support(self) -> dict[str, Any]:
        """The truncations of the sampling distribution that are switched on."""
        off = {"top_p": 1.0, "top_k": 0, "min_p": 0.0}
        return {name: getattr(self, name) for name, value in off.items() if getattr(self, name) != value}

    @property
    def sharing(self) -> bool | None:
        """`share_prefix` as `sampler.rollout` takes it."""
        return {"auto": None, "on": True, "off": False}[self.share_prefix]

    def num_checkpointed(self, num_layers: int) -> int:
        """How many layers `checkpoint_layers` means; none for an `auto` that is not settled yet."""
        named = {"auto": 0, "off": 0, "on": num_layers}
        return named[self.checkpoint_layers] if self.checkpoint_layers in named else int(self.checkpoint_layers)


# where 0 stands for auto
AUTOMATIC = {field.name for field in dataclasses.fields(Config) if field.metadata.get("parse") is dispatch.parse_size}


def parse(argv: list[str]) -> argparse.Namespace:
    """The flags of a command line; those that are settings are None where they were not given."""
    parser = telemetry.Parser("train.py", str(__doc__).split("\n")[1])
    parser.add_argument(
        "--config", metavar="FILE", help="recipe, instead of the task's; a run's `config.yaml` repeats it"
    )
    parser.add_argument("--run-dir", metavar="DIR", help="where the run is recorded (default: runs/TASK-TIME)")
    parser.add_argument("--print-config", action="store_true", help="prints every setting as YAML and ends")
    parser.add_argument("--resume", metavar="DIR", help="goes on with the run in DIR from its newest checkpoint")
    add_flags(parser, Config)
    return parser.parse_args(argv)


def resolve(flags: dict[str, Any], config_path: str | None, resume: str | None) -> tuple[Config, str]:
    """
    Default < recipe < environment < flag, checked, and a line that says which model was taken and why.

    A resumed run keeps its settings, but for those in CHANGEABLE.
    """
    if resume:
        if config_path:
            raise ValueError(f"--config {config_path} cannot change a resumed run; start a new one")
        if not (Path(resume) / "config.yaml").is_file():
            raise ValueError(f"--resume {resume}: no config.yaml there; give the directory of a run")
        if fixed := flags.keys() - CHANGEABLE:
            raise ValueError(f"--{sorted(fixed)[0].replace('_', '-')} cannot change in a resumed run; start a new one")
        config = _checked(load_recipe(Path(resume) / "config.yaml") | flags)
        return config, f"model: {config.model}, as before; task: {config.task}"
    recipe = load_recipe(Path(config_path)) if config_path else _task_recipe(flags.get("task"))
    _checked(recipe | of_environment() | flags)  # before a model is chosen, which may take a download
    model, why = gwen.choose_model((recipe | flags).get("model"))
    task = (recipe | flags).get("task") or ("demo" if model == "demo" else "values")
    if not config_path:
        recipe = _task_recipe(task)
    rate = _rate_of_all_weights(recipe, flags)
    config = _checked(recipe | of_environment() | rate | flags | {"model": model, "task": task})
    return config, f"model: {model}, {why}; task: {task}"


def of_run(run: str, flags: dict[str, Any]) -> Config:
    """The settings of the run in a directory, with those that flags replace. ValueError where there is no run."""
    return _checked(load_recipe(run_files.config_file(run)) | flags)


def _task_recipe(task: str | None) -> dict[str, Any]:
    """The defaults of a task, from `recipes/`; none for no task and for one that does not exist."""
    path = Path(__file__).parent / "recipes" / f"{task}.yaml"
    return load_recipe(path) if path.is_file() else {}


def _rate_of_all_weights(recipe: dict[str, Any], flags: dict[str, Any]) -> dict[str, float]:
    """The learning rate where `--lora-rank 0` makes a recipe for adapters one for all weights, which bear a tenth."""
    if flags.get("lora_rank") != 0 or recipe.get("lora_rank") == 0:
        return {}
    return {"lr": recipe.get("lr", Config.lr) / 10}


def load_recipe(path: Path) -> dict[str, Any]:
    """The settings of a YAML file. ValueError names an unknown key with the nearest known one."""
    held = load_yaml(path, f"--config {path}")
    if not isinstance(held, dict):
        raise ValueError(f"--config {path} holds no settings; it needs lines like `batch: 8`")
    names = [field.name for field in dataclasses.fields(Config)]
    for key in held:
        if key not in names:
            near = difflib.get_close_matches(str(key)[:40], names, 1, 0.0)[0]
            raise ValueError(f"--config {path}: unknown setting {reprlib.repr(key)}; did you mean {near!r}?")
    return held


def _checked(settings: dict[str, Any]) -> Config:
    """A configuration whose every value has the right type and lies in its range."""
    settings = {name: value for name, value in settings.items() if name not in AUTOMATIC or value != "auto"}
    if type(settings.get("checkpoint_layers")) is int:  # as YAML reads it
        settings["checkpoint_layers"] = str(settings["checkpoint_layers"])
    check_values(Config, settings)
    config = Config(**settings)
    if not gpu.on_gpu():  # there `auto` waits for the model, which is then measured
        usual = min(config.batch * config.groups, dispatch.USUAL_ROWS)
        config.rollout_batch_size = config.rollout_batch_size or usual
    check_judge(config)
    if config.temp == 0:
        raise ValueError("--temp is 0; training needs completions that differ, so it must be more than 0")
    if 0 < config.target_kl < 1e-3:
        raise ValueError(
            f"--target-kl is {config.target_kl:g}; below 0.001 it is rounding; give more, or 0 for no bound"
        )
    _check_objective(config)
    if config.checkpoint_layers not in ("auto", "on", "off") and not config.checkpoint_layers.isdecimal():
        raise ValueError(f"--checkpoint-layers is {config.checkpoint_layers!r}; it must be auto, on, off or a number")
    if config.lora_rank and not config.lora_targets:
        raise ValueError(f"--lora-targets is empty; name some of {', '.join(lora.TARGETS)}, or set --lora-rank 0")
    return config


def _check_objective(config: Config) -> None:
    """ValueError for settings of the update that contradict each other, or that would have no effect."""
    if config.advantage == "reinforce" and config.scale_rewards == "group":
        raise ValueError("--advantage reinforce measures from the whole step; set --scale-rewards batch or none")
    if config.advantage == "reinforce" and config.dynamic_sampling:
        raise ValueError("--dynamic-sampling has no use for --advantage reinforce, to which equal rewards are a signal")
    if config.combine_rewards == "normalize" and (config.advantage, config.scale_rewards) != ("group", "group"):
        raise ValueError(
            "--combine-rewards normalize normalizes within groups; leave --advantage and --scale-rewards at group"
        )
    if config.loss == "cispo" and config.clip_high < 1:
        raise ValueError(
            f"--clip-high is {config.clip_high}; with --loss cispo it bounds the weight itself: at least 1, usually 5"
        )
    if config.delta and config.loss in ("cispo", "sapo"):
        raise ValueError(f"--delta is {config.delta}; --loss {config.loss} does not clip, so leave it out")
    if config.delta and config.delta <= 1 + config.clip_high:
        raise ValueError(f"--delta is {config.delta}; it must be more than 1 + --clip-high, {1 + config.clip_high:g}")
    if config.mismatch != "off" and config.old_logprobs == "sampler":
        raise ValueError("--mismatch compares the trainer's old policy with the sampler's; set --old-logprobs step")
    if config.mismatch.endswith("mask") and config.mismatch_cap <= 1:
        raise ValueError(
            f"--mismatch-cap is {config.mismatch_cap:g}; --mismatch {config.mismatch} would leave out "
            "tokens for their rounding alone: more than 1, usually 2 or 3"
        )


def choose_run_dir(config: Config, asked: str | None) -> Path:
    """Where a new run is to be recorded. ValueError when something is there that was asked for."""
    path = Path(asked or Path("runs") / f"{config.task}-{time.strftime('%Y%m%d-%H%M%S')}")
    if asked and path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise ValueError(_exists(path))
    return path


def _exists(path: Path) -> str:
    return f"--run-dir {path} exists; give another" + (", or --resume it" if (path / "config.yaml").is_file() else "")


def make_run_dir(config: Config, chosen: Path, asked: str | None) -> Path:
    """
    Makes the directory of a new run, with its settings; the run that creates `config.yaml` has it, and no other.

    A name that was not asked for and that a run of the same second has already is followed by -2, -3 and so on.
    ValueError when the one that was asked for is taken, and when it cannot be written.
    """
    for number in itertools.count(1):
        path = chosen if number == 1 else chosen.with_name(f"{chosen.name}-{number}")
        try:
            path.mkdir(parents=True, exist_ok=True)
            (path / "config.yaml").touch(exist_ok=False)
            break
        except FileExistsError as error:
            if asked:
                raise ValueError(_exists(path)) from error
        except OSError as error:
            raise ValueError(_unwritable(path, error)) from error
    try:
        write(config, path)
    except (ValueError, KeyboardInterrupt):
        (path / "config.yaml").unlink(missing_ok=True)  # so that the same name can be asked for again
        raise
    return path


def as_yaml(config: Config) -> str:
    """Every setting; a size that is still to be measured is "auto"."""
    held = dataclasses.asdict(config)
    return yaml.safe_dump(
        {name: "auto" if name in AUTOMATIC and not value else value for name, value in held.items()}, sort_keys=False
    )


def write(config: Config, run_dir: Path) -> None:
    """Writes `config.yaml` and `env.json` of a run. ValueError when they cannot be written."""
    environment = json.dumps(telemetry.environment(cpu_blas.description), indent=2)
    try:
        telemetry.replace_text(run_dir / "config.yaml", as_yaml(config))
        telemetry.replace_text(run_dir / "env.json", environment + "\n")
    except OSError as error:
        raise ValueError(_unwritable(run_dir, error)) from error


def record_changes(config: Config, run_dir: Path, step: int) -> None:
    """Adds to `changes.jsonl`, and prints, what differs from `config.yaml` of a run that goes on after `step`."""
    before, after = load_recipe(run_dir / "config.yaml"), yaml.safe_load(as_yaml(config))
    for name in sorted(CHANGEABLE):
        if name in before and (was := before[name]) != (now := after[name]):
            telemetry.JsonLines(run_dir / "changes.jsonl").write({"step": step, "setting": name, "was": was, "is": now})
            print(f"from step {step + 1} on: --{name.replace('_', '-')} {now} (was {was!r})", flush=True)


def _unwritable(run_dir: Path, error: OSError) -> str:
    return f"the run directory {run_dir} cannot be written ({error.strerror}); make room there or choose another"
