"""
Tasks: prompts, verifiable rewards, rubrics and held-out problems. Each task has its own file.

`make_task` puts the user's own data, reward functions, rubric and tools in place of the task's.
This file uses no model. A user's mistake raises a ValueError with one line that names the value and
the fix. This file does not cover reading data (prompts/data.py) and reward functions
(rewards/rewards.py).
"""

import importlib
import json
import re
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

from config import Config
from flags import flag_of
from judging import rubrics
from prompts import chats
from prompts.examples import (
    Example,
    first_answer,
    prompt_key,
    prompt_text,
    spread_evenly,
    suggest_nearest,
)
from prompts.held_out import load_sides
from rewards.functions import load_functions
from rewards.rewards import Reward, load_reward, reward_argument_names, reward_columns
from settings.checks import check_settings
from settings.sources import BUNDLED_TASKS, load_recipe
from tasks import own
from tasks.task import DATA, Sides, Task
from tools import calls

# the advantage settings that environments with `reward_per_turn` allow
TURN_SETTINGS = {
    "advantage": ["group"],
    "scale_rewards": ["group", "none"],
    "combine_rewards": ["sum"],
    "reward_gate": ["off"],
}
# the tasks, besides rg:NAME and ifeval
NAMES = ("demo", "values", "gsm8k", "math", "own", "calculator", "guess", "env")
HELD_OUT = "held_out.json"  # file in a run directory: the keys of the run's held-out prompts


# ---- tasks by name


def _import_task(name: str) -> Any:
    """
    The module of a task.

    The module has `TASK`, `load_examples` for the two sides, and maybe `read` for a record of
    --data. The module of a task with parts in its name has `make_task` instead.
    """
    module = "guess" if name == "env" else name
    return importlib.import_module(f"tasks.{module}")


def bare_task(name: str) -> Task:
    """The task of this name, without examples."""
    task: Task = _import_task(name).TASK
    return task._replace(name="env", environments={}) if name == "env" else task


def load_task(
    name: str,
    *,
    data: str | None = None,
    held_out: str | None = None,
    columns: str | None = None,
    held_out_keys: Collection[str] = (),
) -> Task:
    """
    The task of this name with its own examples, or with the examples of `data` (see `load_sides`).

    held_out: a source for the held-out side; evaluations give it without `data`. held_out_keys: see
    `split_examples`.
    Raises ValueError if the task is unknown, or if its data are missing or wrong.
    """
    if name not in NAMES:
        raise ValueError(
            f"--task {name!r} is unknown{suggest_nearest(name, NAMES)}; "
            f"the tasks are {', '.join(NAMES)}, ifeval and rg:NAME"
        )
    task = bare_task(name)
    module = _import_task(name)
    if data is None and held_out is None:
        train, test = module.load_examples()
        return task._replace(train=train, held_out=test)

    read = getattr(module, "read", None)
    train, test, notes = load_sides(data, held_out, columns, read, held_out_keys=held_out_keys)
    if read is None and task.verifier and not _can_verify(task.verifier, test):
        task = task._replace(verifier=None)
    return task._replace(train=train, held_out=test, notes=notes)


def _can_verify(verifier: Reward, examples: list[Example]) -> bool:
    """Whether a verifier accepts some answer of the data, which shows that it can read them."""
    verdicts = verifier(
        prompts=[example["prompt"] for example in examples],
        completions=[first_answer(example) for example in examples],
        answer=[example.get("answer") for example in examples],
    )
    return any(verdicts)


# ---- the task of a run


def make_unrewarded_task(
    config: Config, held_out: str | None = None, held_out_keys: Collection[str] = ()
) -> Task:
    """
    The task of a run with its problems and its verifier, but without the user's rewards and tools.

    It can be made even if the files of the user's rewards are gone. The parameters are those of
    `make_task`.
    """
    data = config.data
    kind = data.task.partition(":")[0]
    source = data.path or held_out
    if kind in ("rg", "ifeval") and source:
        raise ValueError(
            f"--data {source} and --task {data.task}, which makes its own problems; "
            "leave one of them out"
        )
    if data.columns and not source:
        raise ValueError(
            f"--columns {data.columns} renames columns of --data, which is not given; give both"
        )
    is_reasoning_gym = kind == "rg" and ":" in data.task
    if data.task_config and not is_reasoning_gym:
        raise ValueError(
            f"--task-config {data.task_config} is for --task rg:NAME, not for --task {data.task}"
        )

    if is_reasoning_gym:
        task = _import_task("rg").make_task(data.task, data.task_config or None)
    elif kind == "ifeval":
        task = _import_task("ifeval").make_task(data.task)
    else:
        task = load_task(
            data.task,
            data=data.path or None,
            held_out=held_out,
            columns=data.columns or None,
            held_out_keys=held_out_keys,
        )

    if data.task in ("own", "gsm8k", "math") and (data.verifier or data.task == "own"):
        task = own.with_verifier(task, data.verifier, bool(data.reward))
    elif data.verifier:
        raise ValueError(
            f"--verifier {data.verifier} compares with the answers of your own data, and "
            f"--task {data.task} has its own; leave it out, or take --task own"
        )
    return task


def make_task(
    config: Config, held_out: str | None = None, held_out_keys: Collection[str] = ()
) -> Task:
    """
    The task of a run, with the user's data, rewards, rubrics and tools.

    held_out: a source of evaluation data, all of which are held out. held_out_keys: keys of the
    prompts that the run already holds out.
    Raises ValueError with the name of the flag for mistakes in data, rewards or rubrics. All this
    happens before a model is loaded.
    """
    data = config.data
    task = make_unrewarded_task(config, held_out, held_out_keys)
    is_own = data.task == own.TASK.name
    source = data.path or held_out

    task = _choose_rubric(task, config)
    if data.reward:
        task = _replace_rewards(task, config)
    task = _with_tools(task, config)
    if config.objective.truncated == "punish":
        task = _with_length_penalty(task, config.sampling.max_tokens)
    if is_own and not (task.rewards or task.rubric or config.objective.teacher):
        own.refuse_unrewardable(task, source)
    task = _with_weights(task, config)
    if config.evaluation.rubric:
        task = task._replace(witness=Path(config.evaluation.rubric))
    elif not task.rubric:
        task = task._replace(witness=None)  # no judge gives a reward, so no witness is needed

    if is_own:
        task = own.describe_own_task(task)
    notes = list(task.notes)
    if source:
        hint = _read_teacher_prompt(config.objective.teacher_prompt)
        notes += own.note_unread_columns(task, data.columns, hint)
    if data.reward_gate == "form":
        notes.append(
            "--reward-gate form: training pays only finished answers of a form; "
            "evaluations have no gate"
        )
    notes += _judge_notes(config, task)
    if config.evaluation.every and not task.held_out:
        raise ValueError(
            f"--data {data.path} holds out no prompt to evaluate; add prompts or set --eval-every 0"
        )
    return task._replace(notes=notes)


def _choose_rubric(task: Task, config: Config) -> Task:
    """The task with the rubric of --rubric, or without a rubric that nobody asked for."""
    data = config.data
    if data.rubric:
        return task._replace(rubric=Path(data.rubric), witness=None)
    # the task's own rubric could outweigh the user's reward, and with a teacher only cost time
    has_own_reward = bool(data.reward) and "rubric" not in data.reward_weights
    if has_own_reward or config.objective.loss_type == "distill":
        return task._replace(rubric=None)
    return task


def _with_length_penalty(task: Task, max_tokens: int) -> Task:
    """The task with the reward of --truncated punish, lower for completions near the limit."""
    if "soft_overlong" in task.rewards:
        raise ValueError(
            "--truncated punish is the reward soft_overlong, which is given already; leave one out"
        )
    name, reward = load_reward(f"soft_overlong:{max_tokens}:{max(max_tokens // 5, 1)}")
    return task.with_reward(name, reward)


def _read_teacher_prompt(path: str) -> str:
    """The content of the file --teacher-prompt; "" if there is no such file."""
    file = Path(path)
    return file.read_text(encoding="utf-8", errors="replace") if file.is_file() else ""


# ---- the held-out side of a run


def load_train_and_held_out(config: Config, run_dir: Path | None = None) -> Sides:
    """
    The training and held-out examples of a run, or its conversations if the run is SFT.

    They can be loaded even if the files of the run's own rewards are gone. run_dir: the run's
    directory, which records the run's held-out prompts.
    """
    data = config.data
    held_out_keys = read_held_out(run_dir) if run_dir else []
    if config.objective.loss_type == "sft":
        train, held_out, _ = chats.load_chats(data.path, data.columns, held_out_keys)
        return train, held_out
    if data.reward:
        task = make_unrewarded_task(config, held_out_keys=held_out_keys)
    else:
        task = make_task(config, held_out_keys=held_out_keys)
    return task.train, task.held_out


def record_held_out_keys(run_dir: Path, held_out: Sequence[Example]) -> None:
    """Records a run's held-out prompts, so that both sides stay the same even if its data grow."""
    file = run_dir / HELD_OUT
    if not file.is_file():
        file.write_text(json.dumps(sorted(map(prompt_key, held_out))), encoding="utf-8")


def read_held_out(run_dir: str | Path) -> list[str]:
    """The keys of a run's held-out prompts; [] if the run has not begun."""
    file = Path(run_dir) / HELD_OUT
    return list(json.loads(file.read_text(encoding="utf-8"))) if file.is_file() else []


def warm_start_contamination_warnings(
    config: Config, train: list[Example], held_out: list[Example]
) -> list[str]:
    """
    A warning if the run of --init-adapter was trained on prompts that are held out here.

    --init-adapter may also name a checkpoint of that run. The last user messages are compared, but
    not messages that this run trains on too. Returns [] without such a run, or if the data of that
    run cannot be read.
    """
    adapter = Path(config.model.init_adapter)
    directories = (adapter, *adapter.parents[:3])
    runs = [directory for directory in directories if (directory / "metrics.jsonl").is_file()]
    if not config.model.init_adapter or not runs:
        return []
    try:
        earlier_config = check_settings(load_recipe(runs[0] / "config.yaml"))
        earlier_train, _ = load_train_and_held_out(earlier_config, runs[0])
    except ValueError:
        return []
    earlier_texts = {prompt_text(example["prompt"]) for example in earlier_train}
    train_texts = {prompt_text(example["prompt"]) for example in train}
    held_out_texts = [prompt_text(example["prompt"]) for example in held_out]
    num = sum(text in earlier_texts and text not in train_texts for text in held_out_texts)
    if not num:
        return []
    return [
        f"WARNING: {num} of {len(held_out)} held-out prompts are among those that {runs[0]} was "
        "trained on, and prove little: hold the same rows out in both, by a column split"
    ]


# ---- rewards


def _replace_rewards(task: Task, config: Config) -> Task:
    """
    The task with the rewards of --reward, each with weight 1, instead of the task's own rewards.

    The task's rubric and metrics stay.
    """
    specs = []
    for spec in config.data.reward:
        file, colon, names = spec.rpartition(":")
        specs += [file + colon + name for name in names.split(",")]
    loaded = list(map(load_reward, specs))
    rewards = dict(loaded)
    if len(rewards) < len(loaded):
        raise ValueError(f"--reward {' '.join(config.data.reward)}: two rewards have the same name")
    reserved = sorted(rewards.keys() & {"mean", "std", "zero_std_frac", "s", "none"})
    if reserved:
        raise ValueError(
            f"--reward {reserved[0]}: reward/{reserved[0]} is a metric of its own; "
            "rename the function"
        )
    metrics = {
        name: reward for name, reward in task.rewards.items() if not task.reward_weights[name]
    }
    weights = dict.fromkeys(metrics, 0.0) | dict.fromkeys(rewards, 1.0)
    if task.rubric:
        weights["rubric"] = task.reward_weights.get("rubric", 1.0)
    return task._replace(rewards=metrics | rewards, reward_weights=weights)


def _with_weights(task: Task, config: Config) -> Task:
    """
    The task with the weights of --reward-weights.

    A reward of weight 0 is a metric. A rubric of weight 0 is removed, because its judge would cost
    time to no purpose. With a teacher no reward is needed. A reward of the task itself that reads a
    missing column is removed if its weight is 0.
    Raises ValueError if the data lack a column that a reward with a weight reads.
    """
    given_weights = config.data.reward_weights
    names = list(task.rewards)
    if task.rubric:
        names.append("rubric")
    unknown = [name for name in given_weights if name not in names]
    if unknown:
        raise ValueError(f"--reward-weights {unknown[0]}: the rewards are {', '.join(names)}")
    weights = {name: given_weights.get(name, task.reward_weights.get(name, 1.0)) for name in names}
    rubric = task.rubric if weights.get("rubric") else None
    task = task._replace(reward_weights=weights, rubric=rubric)
    if not task.counted_rewards and task.rubric is None and not config.objective.teacher:
        raise ValueError("--reward-weights leave no reward; give one of them a weight other than 0")

    columns = reward_argument_names(task.train or task.held_out, bool(task.environments))
    usable = dict[str, Reward]()
    for name, reward in task.rewards.items():
        try:
            reward_columns(name, reward, columns)
        except ValueError as error:
            if config.data.reward:
                raise
            # this is a reward of the task, which the user may never have named
            if weights[name] and config.objective.loss_type != "distill":
                raise ValueError(
                    f"{error}; {name} is a reward of --task {task.name}: "
                    "give --reward, or --task values for a rubric alone"
                ) from error
            continue
        usable[name] = reward
    return task._replace(rewards=usable)


def environment_reward(kind: type) -> Reward:
    """A reward function: the value of the environment's `get_reward`; None for other rows."""

    def select_rewards(earned: Sequence[tuple[str, Any]], **_: Any) -> list[Any]:
        return [value if name == kind.__name__ else None for name, value in earned]

    return select_rewards


# ---- tools and environments


def load_tools(config: Config) -> tuple[dict[str, calls.Tool], dict[str, type]]:
    """
    The functions of --tools and the environments of --env, or those of the task.

    The keys of the environments are their names; "" if there is only one environment.
    """
    task = bare_task(config.data.task) if config.data.task in NAMES else Task("", {}, {})
    specs = config.tools.tools
    loaded = list[tuple[str, Any]]()
    for spec in specs:
        loaded += load_functions("--tools", spec).items()
    functions = {getattr(tool, "__name__", name): tool for name, tool in loaded}
    if len(functions) < len(loaded):
        raise ValueError(
            f"--tools {' '.join(specs)}: two tools have the same name; "
            "rename one; a decorator keeps a function's name with functools.wraps"
        )
    return functions or task.tools, _load_environments(config.tools.env) or task.environments


def _load_environments(env: str) -> dict[str, Any]:
    """The classes of --env, by name. env: FILE.py:Class, or a list of NAME=FILE.py:Class."""
    environments: dict[str, Any] = {}
    for part in re.split(r",(?=\w+=)", env) if env else []:
        name, _, spec = part.rpartition("=")
        is_second_unnamed = bool(environments) and not name
        if name in environments or is_second_unnamed or "," in spec or "" in environments:
            raise ValueError(
                f"--env {env}: several environments have a name each, as a=mine.py:A,b=mine.py:B"
            )
        (environments[name],) = load_functions("--env", spec, kind="class").values()
    return environments


def _with_tools(task: Task, config: Config) -> Task:
    """The task with --tools and --env. Each environment's `get_reward` is a reward of weight 1."""
    tools, environments = load_tools(config)
    task = task._replace(tools=tools, environments=environments)
    if config.tools.env:
        if not task.held_out:
            # all rows may have one prompt, because the environment draws different tasks
            num_held_out = _import_task("guess").NUM_HELD_OUT
            task = task._replace(held_out=spread_evenly(task.train, num_held_out))
        if not config.data.reward and not config.data.rubric:
            task = task._replace(rewards={}, reward_weights={}, rubric=None, verifier=None)

    schemas = calls.tool_schemas("--tools", task.tools)
    for kind in environments.values():
        shared = sorted(schemas.keys() & calls.environment_schemas(kind))
        if shared:
            raise ValueError(
                f"--env: {kind.__name__} and --tools both have a tool {shared[0]}; "
                "rename one of them"
            )
        if hasattr(kind, "get_reward"):
            task = task.with_reward(kind.__name__, environment_reward(kind))
    _check_environments(task, config)
    if task.tools or task.environments:
        _refuse_completion_settings(task, config)
    return task


def _check_environments(task: Task, config: Config) -> None:
    """Raises ValueError if prompts, rewards or settings do not fit the environments."""
    if task.name == "env" and not task.environments:
        raise ValueError("--task env talks with an environment; name it: --env FILE.py:Class")
    examples = task.train + task.held_out
    if not task.environments and not all(example["prompt"] for example in examples):
        raise ValueError(
            f"--data {config.data.path} has rows without a prompt; "
            "name the environment that gives it: --env FILE.py:Class"
        )
    if task.environments and not task.rewards and not task.rubric:
        raise ValueError(
            f"--env {config.tools.env} has no method get_reward, and there is no --reward; add one"
        )
    for kind in filter(calls.rewards_turns, task.environments.values()):
        if not callable(getattr(kind, "get_reward", None)):
            raise ValueError(
                f"--env: {kind.__name__} has reward_per_turn and no method get_reward; add it"
            )
        for name, allowed in TURN_SETTINGS.items():
            value = config.to_flags()[name]
            if value not in allowed:
                flag = flag_of(name)
                raise ValueError(
                    f"{flag} {value} is for whole conversations, and {kind.__name__} has "
                    f"reward_per_turn; take {flag} {allowed[0]}, or leave that out"
                )


def _refuse_completion_settings(task: Task, config: Config) -> None:
    """Raises ValueError for settings and columns that conversations with tools cannot use."""
    # all examples of a side have the same keys as its first example
    first_examples = task.train[:1] + task.held_out[:1]
    unfit = []
    if any("chat_template_kwargs" in example for example in first_examples):
        unfit.append("column chat_template_kwargs")
    if config.objective.teacher_prompt:
        unfit.append("--teacher-prompt")
    if config.sampling.stop:
        unfit.append("--stop")
    if unfit:
        raise ValueError(
            f"{unfit[0]} is for completions without tools; leave it out, or --tools and --env"
        )


# ---- the judge


def _judge_notes(config: Config, task: Task) -> Iterator[str]:
    """
    A warning if a bundled judge has not learned the criteria of the rubrics.

    Raises ValueError for a rubric that cannot be read.
    """
    loaded = [rubrics.load_rubric(path) for path in (task.rubric, task.witness) if path]
    judge = config.judge.model or config.model.name
    if config.judge.url or judge not in BUNDLED_TASKS:
        return
    learned = set[str]()
    knowledge = "no criteria"
    if judge == "demo":
        demo_rubric = rubrics.load_rubric(DATA / "demo_rubric.yaml")
        learned = {criterion.text for criterion in demo_rubric.criteria}
        knowledge = "only the criteria of data/demo_rubric.yaml"
    criteria = [criterion for rubric in loaded for criterion in rubric.criteria]
    strange = [criterion.name for criterion in criteria if criterion.text not in learned]
    if strange:
        yield (
            f"WARNING: the judge {judge} has learned {knowledge}: its scores of "
            f"{', '.join(strange)} are noise; name another with --judge-model"
        )
