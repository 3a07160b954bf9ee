"""
Makes the task of a run, which combines prompts, rewards, a rubric and held-out problems.

Each built-in task has its own file. `make_task` replaces the data, reward functions, rubric and
tools of a task with the user's. A user's mistake raises a ValueError with one line, which names the
wrong value and says how to correct it. This file uses no model, and does not cover how data is read
(prompts/data.py) or how reward functions are called (rewards/rewards.py).
"""

import importlib
import importlib.util
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
    did_you_mean,
    first_answer,
    hash_prompt_without_system,
    last_user_text,
    pick_evenly_spaced,
)
from prompts.held_out import load_training_and_held_out
from rewards.functions import load_functions
from rewards.rewards import Reward, load_reward, reward_argument_names, select_argument_names
from settings.checks import check_settings
from settings.sources import BUNDLED_TASKS, load_recipe
from tasks import own
from tasks.task import DATA, Sides, Task
from text.commands import advice_to_install_extra
from tools import calls

# with an environment that has `reward_per_turn`, these settings may have only these values
TURN_SETTINGS = {
    "advantage": ["group"],
    "scale_rewards": ["group", "none"],
    "combine_rewards": ["sum"],
    "reward_gate": ["off"],
}
# the names of all tasks except rg:NAME and ifeval
NAMES = ("demo", "values", "gsm8k", "math", "own", "calculator", "guess", "env")
HELD_OUT = "held_out.json"  # the file in a run directory that records the held-out prompts


# ---- tasks by name


def _import_task_module(name: str) -> Any:
    """
    The Python module that defines a task.

    The module has `TASK`, and a function `load_examples` that loads the training and held-out
    examples. The module may also have a function `read_record` that reads a record of --data. A
    module for many tasks, such as tasks/rg.py for rg:NAME, has the function `make_task` instead.
    """
    module = "guess" if name == "env" else name
    return importlib.import_module(f"tasks.{module}")


def load_task_without_examples(name: str) -> Task:
    """The task with the given name, without its examples."""
    task: Task = _import_task_module(name).TASK
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
    The task with the given name, with its own examples or those in `data`.

    data: a source of examples; see `spec` in `prompts.held_out.load_training_and_held_out`.
    held_out: a source of held-out examples; evaluations may pass it without `data`.
    held_out_keys: the keys of prompts to hold out; see `split_examples`.

    Raises ValueError if the task is unknown, or if its data is missing or wrong.
    """
    if name not in NAMES:
        raise ValueError(
            f"--task is {name!r}, but the tasks are {', '.join(NAMES)}, ifeval and rg:NAME"
            f"{did_you_mean(name, NAMES)}"
        )
    task = load_task_without_examples(name)
    module = _import_task_module(name)
    if data is None and held_out is None:
        train, test = module.load_examples()
        return task._replace(train=train, held_out=test)

    read = getattr(module, "read_record", None)
    train, test, notes = load_training_and_held_out(
        data, held_out, columns, read, held_out_keys=held_out_keys
    )
    if read is None and task.verifier and not _accepts_some_answer_of_examples(task.verifier, test):
        task = task._replace(verifier=None)
    return task._replace(train=train, held_out=test, notes=notes)


def _accepts_some_answer_of_examples(verifier: Reward, examples: list[Example]) -> bool:
    """Whether a verifier accepts the right answer of at least one example as a completion."""
    verdicts = verifier(
        prompts=[example["prompt"] for example in examples],
        completions=[first_answer(example) for example in examples],
        answer=[example.get("answer") for example in examples],
    )
    return any(verdicts)


# ---- the task of a run


def make_task_without_user_rewards(
    config: Config, held_out: str | None = None, held_out_keys: Collection[str] = ()
) -> Task:
    """
    The task of a run with its problems and its verifier, but without the user's rewards and tools.

    This works even if the files with the user's rewards no longer exist. The parameters have the
    same meaning as in `make_task`.
    """
    data = config.data
    kind = data.task.partition(":")[0]
    source = data.path or held_out
    if kind in ("rg", "ifeval") and source:
        raise ValueError(
            f"--data is {source}, but --task {data.task} makes its own problems; "
            "leave out one of the two flags"
        )
    if data.columns and not source:
        raise ValueError(
            f"--columns {data.columns} renames columns of --data, but --data is missing; add --data"
        )
    if config.tools.env_server:
        return _load_harness_task(config, source)

    is_reasoning_gym = kind == "rg" and ":" in data.task
    if data.task_config and not is_reasoning_gym:
        raise ValueError(
            f"--task-config {data.task_config} is for --task rg:NAME, but --task is {data.task}; "
            "leave out one of the two flags"
        )

    if is_reasoning_gym:
        task = _import_task_module("rg").make_task(data.task, data.task_config or None)
    elif kind == "ifeval":
        task = _import_task_module("ifeval").make_task(data.task)
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
            f"--verifier is {data.verifier}, but --task {data.task} has a verifier of its own; "
            "leave out --verifier, or use --task own to train on your own data"
        )
    return task


def _load_harness_task(config: Config, source: str | None) -> Task:
    """The task of --env-server. source: the user's data, which the harness cannot use."""
    command = config.tools.env_server
    others = {
        "--data": source,
        "--env": config.tools.env,
        "--tools": " ".join(config.tools.tools),
        "--verifier": config.data.verifier,
        "--task-config": config.data.task_config,
    }
    for flag, value in others.items():
        if value:
            raise ValueError(
                f"{flag} {value} does not work with --env-server, whose harness has its own "
                f"examples, tools and environments; leave out {flag}"
            )
    if config.data.task != "env":
        raise ValueError(
            f"--env-server {command} is for --task env, but --task is {config.data.task}; leave "
            "out --task"
        )
    if importlib.util.find_spec("aiohttp") is None:
        raise ValueError(
            f"--env-server {command} needs the package aiohttp, which is not installed; "
            f"{advice_to_install_extra('env')}"
        )
    from tasks.harness import load_harness_task  # here: other tasks need no HTTP server

    task = load_task_without_examples("env")
    return load_harness_task(task, command, config.tools.env_timeout)


def make_task(
    config: Config, held_out: str | None = None, held_out_keys: Collection[str] = ()
) -> Task:
    """
    The task of a run, with the user's data, rewards, rubrics and tools.

    held_out: a source of evaluation data, all of which is held out.
    held_out_keys: the keys of the prompts that the run already holds out.

    Raises ValueError for mistakes in data, rewards or rubrics; the message names the flag. Mistakes
    are found before a model is loaded.
    """
    data = config.data
    task = make_task_without_user_rewards(config, held_out, held_out_keys)
    is_own = data.task == own.TASK.name
    source = data.path or held_out

    task = _choose_or_drop_rubric(task, config)
    if data.reward:
        task = _with_user_rewards_instead(task, config)
    task = _with_tools_environments_and_rewards(task, config)
    if task.harness is not None:
        task = _with_harness_reward(task)
    if config.objective.truncated == "punish":
        task = _with_length_penalty(task, config.sampling.max_tokens)
    if is_own and not (task.rewards or task.rubric or config.objective.teacher):
        own.refuse_unrewardable(task, source)
    task = _set_weights_and_drop_unusable_rewards(task, config)
    if config.evaluation.rubric:
        task = task._replace(witness=Path(config.evaluation.rubric))
    elif not task.rubric:
        # a second rubric is needed only if a judge gives a reward
        task = task._replace(witness=None)

    if is_own:
        task = own.drop_unscorable_and_add_note(task)
    notes = list(task.notes)
    if source:
        teacher_prompt = _read_teacher_prompt_or_empty(config.objective.teacher_prompt)
        notes += own.note_unread_columns(task, data.columns, teacher_prompt)
    if data.reward_gate == "form":
        notes.append(
            "--reward-gate form: in training, only finished and well-formed answers earn a reward; "
            "evaluations use no gate"
        )
    notes += _warnings_of_criteria_unknown_to_judge(config, task)
    if config.evaluation.every and not task.held_out and task.harness is not None:
        raise ValueError(
            f"the harness of --env-server {config.tools.env_server} lists no held-out examples for "
            "evaluations; let it list some, or set --eval-every 0"
        )
    if config.evaluation.every and not task.held_out:
        raise ValueError(
            f"no prompt of --data {data.path} is held out for evaluations; "
            "add prompts, or set --eval-every 0"
        )
    return task._replace(notes=notes)


def _choose_or_drop_rubric(task: Task, config: Config) -> Task:
    """
    The task with the rubric that --rubric names, if any.

    Without --rubric, the task's own rubric is removed if the user's rewards or a teacher replace
    it.
    """
    data = config.data
    if data.rubric:
        return task._replace(rubric=Path(data.rubric), witness=None)
    # the task's own rubric could outweigh the user's reward, and is not needed with a teacher
    has_own_reward = bool(data.reward) and "rubric" not in data.reward_weights
    if has_own_reward or config.objective.loss_type == "distill":
        return task._replace(rubric=None)
    return task


def _with_length_penalty(task: Task, max_tokens: int) -> Task:
    """The task with a reward that punishes completions whose length is close to --max-tokens."""
    if "soft_overlong" in task.rewards:
        raise ValueError(
            "--truncated punish adds the reward soft_overlong, which --reward names already; "
            "leave out one of the two"
        )
    name, reward = load_reward(f"soft_overlong:{max_tokens}:{max(max_tokens // 5, 1)}")
    return task.with_reward(name, reward)


def _read_teacher_prompt_or_empty(path: str) -> str:
    """The content of the file that --teacher-prompt names; "" if the file does not exist."""
    file = Path(path)
    return file.read_text(encoding="utf-8", errors="replace") if file.is_file() else ""


# ---- the held-out side of a run


def load_train_and_held_out(config: Config, run_dir: Path | None = None) -> Sides:
    """
    The training examples and the held-out examples of a run; for SFT, these are conversations.

    The examples can be loaded even if the files with the user's rewards no longer exist.
    run_dir: the directory of the run, in which the held-out prompts are recorded.
    """
    data = config.data
    held_out_keys = read_held_out_keys(run_dir) if run_dir else []
    if config.objective.loss_type == "sft":
        train, held_out, _ = chats.load_conversations(data.path, data.columns, held_out_keys)
        return train, held_out
    if data.reward:
        task = make_task_without_user_rewards(config, held_out_keys=held_out_keys)
    else:
        task = make_task(config, held_out_keys=held_out_keys)
    return task.train, task.held_out


def record_held_out_keys_once(run_dir: Path, held_out: Sequence[Example]) -> None:
    """
    Records which prompts a run holds out, so that they stay held out even if the data grows.

    Does nothing if the run has already recorded them.
    """
    file = run_dir / HELD_OUT
    if not file.is_file():
        file.write_text(
            json.dumps(sorted(map(hash_prompt_without_system, held_out))), encoding="utf-8"
        )


def read_held_out_keys(run_dir: str | Path) -> list[str]:
    """The keys of the prompts that a run holds out; [] if the run has not recorded any."""
    file = Path(run_dir) / HELD_OUT
    return list(json.loads(file.read_text(encoding="utf-8"))) if file.is_file() else []


def warm_start_contamination_warnings(
    config: Config, train: list[Example], held_out: list[Example]
) -> list[str]:
    """
    A warning if the run that --init-adapter names was trained on prompts that are held out here.

    The flag --init-adapter may name a run or a checkpoint of a run. Two prompts count as the same
    if their last user messages are equal. A held-out prompt that this run also trains on causes no
    warning here. Returns [] if the earlier run did not train on any held-out prompt, if the flag
    names no run, or if the data of the earlier run cannot be read.
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
    earlier_texts = {last_user_text(example["prompt"]) for example in earlier_train}
    train_texts = {last_user_text(example["prompt"]) for example in train}
    held_out_texts = [last_user_text(example["prompt"]) for example in held_out]
    num_seen = sum(text in earlier_texts and text not in train_texts for text in held_out_texts)
    if not num_seen:
        return []
    return [
        f"WARNING: {runs[0]} was trained on {num_seen} of the {len(held_out)} held-out prompts, so "
        "an evaluation on these prompts proves little; add a column named split to the data, to "
        "hold out the same rows in both runs"
    ]


# ---- rewards


def set_user_rewards_and_weights(task: Task, config: Config) -> Task:
    """The task with the rewards of --reward, if there are any, and with --reward-weights."""
    if config.data.reward:
        task = _with_user_rewards_instead(task, config)
    return _set_weights_and_drop_unusable_rewards(task, config)


def _with_user_rewards_instead(task: Task, config: Config) -> Task:
    """
    A copy of the task, in which the rewards of --reward replace the task's own rewards.

    Each reward of --reward has weight 1. The rubric and the metrics of the task are kept.
    """
    specs = []
    for spec in config.data.reward:
        file, colon, names = spec.rpartition(":")
        specs += [file + colon + name for name in names.split(",")]
    loaded = list(map(load_reward, specs))
    rewards = dict(loaded)
    if len(rewards) < len(loaded):
        raise ValueError(
            f"--reward {' '.join(config.data.reward)}: two rewards have the same name; rename one"
        )
    reserved = sorted(rewards.keys() & {"mean", "std", "zero_std_frac", "s", "none"})
    if reserved:
        raise ValueError(
            f"--reward {reserved[0]}: the name is reserved for the metric reward/{reserved[0]}; "
            "rename the function"
        )
    metrics = {
        name: reward for name, reward in task.rewards.items() if not task.reward_weights[name]
    }
    weights = dict.fromkeys(metrics, 0.0) | dict.fromkeys(rewards, 1.0)
    if task.rubric:
        weights["rubric"] = task.reward_weights.get("rubric", 1.0)
    return task._replace(rewards=metrics | rewards, reward_weights=weights)


def _set_weights_and_drop_unusable_rewards(task: Task, config: Config) -> Task:
    """
    The task with the weights of --reward-weights.

    A reward with weight 0 is only a metric. A rubric with weight 0 is removed, because its judge
    would take time for nothing. Without --reward, a reward of the task is removed if the data lacks
    a column that the reward reads, and the weight is 0 or the run uses --loss-type distill.

    Raises ValueError if any other reward reads a column that the data lacks, if --reward-weights
    names an unknown reward, or if no reward is left in a run without a teacher.
    """
    given_weights = config.data.reward_weights
    names = list(task.rewards)
    if task.rubric:
        names.append("rubric")
    unknown = [name for name in given_weights if name not in names]
    if unknown:
        raise ValueError(
            f"--reward-weights names {unknown[0]}, but the rewards are {', '.join(names)}"
        )
    weights = {name: given_weights.get(name, task.reward_weights.get(name, 1.0)) for name in names}
    rubric = task.rubric if weights.get("rubric") else None
    task = task._replace(reward_weights=weights, rubric=rubric)
    if (
        not task.rewards_with_nonzero_weight
        and task.rubric is None
        and not config.objective.teacher
    ):
        raise ValueError(
            "--reward-weights leaves no reward; give at least one reward a weight other than 0"
        )

    columns = reward_argument_names(task.train or task.held_out, task.has_environments_or_harness)
    usable = dict[str, Reward]()
    for name, reward in task.rewards.items():
        try:
            select_argument_names(name, reward, columns)
        except ValueError as error:
            if config.data.reward:
                raise
            # the reward belongs to the task, and the user may not know it
            if weights[name] and config.objective.loss_type != "distill":
                raise ValueError(
                    f"{error}; {name} is a reward of --task {task.name}; to replace it, add "
                    "--reward, or use --task values to train with only a rubric"
                ) from error
            continue
        usable[name] = reward
    return task._replace(rewards=usable)


def make_environment_reward(environment_class: type) -> Reward:
    """
    Makes the reward function that returns the value of an environment's `get_reward`.

    The function returns None for rows with another environment.
    """
    environment_name = environment_class.__name__

    def rewards_of_environment(earned: Sequence[tuple[str, Any]], **_: Any) -> list[Any]:
        return [value if name == environment_name else None for name, value in earned]

    return rewards_of_environment


# ---- tools and environments


def load_tools_and_environments(config: Config) -> tuple[dict[str, calls.Tool], dict[str, type]]:
    """
    The functions of --tools and the environments of --env, by name.

    If one of the flags is not set, the task's own functions or environments are returned.
    If there is only one environment, its name may be "".
    """
    task = (
        load_task_without_examples(config.data.task)
        if config.data.task in NAMES
        else Task("", {}, {})
    )
    specs = config.tools.tools
    loaded = list[tuple[str, Any]]()
    for spec in specs:
        loaded += load_functions("--tools", spec).items()
    functions = {getattr(tool, "__name__", name): tool for name, tool in loaded}
    if len(functions) < len(loaded):
        raise ValueError(
            f"--tools {' '.join(specs)}: two tools have the same name; "
            "rename one of them; if they are decorated, functools.wraps preserves their names"
        )
    return functions or task.tools, _load_environment_classes(config.tools.env) or task.environments


def _load_environment_classes(env_flag: str) -> dict[str, Any]:
    """
    The environment classes of --env, by name.

    env_flag: the value of --env, which is FILE.py:Class or a list of NAME=FILE.py:Class.
    """
    environments: dict[str, Any] = {}
    for part in re.split(r",(?=\w+=)", env_flag) if env_flag else []:
        name, _, spec = part.rpartition("=")
        is_second_unnamed = bool(environments) and not name
        if name in environments or is_second_unnamed or "," in spec or "" in environments:
            raise ValueError(
                f"--env is {env_flag}; give each of several environments a different name, "
                "as in a=mine.py:A,b=mine.py:B"
            )
        (environments[name],) = load_functions("--env", spec, kind="class").values()
    return environments


def _with_tools_environments_and_rewards(task: Task, config: Config) -> Task:
    """
    The task with the tools of --tools and the environments of --env.

    The method `get_reward` of each environment becomes a reward with weight 1.
    """
    tools, environments = load_tools_and_environments(config)
    task = task._replace(tools=tools, environments=environments)
    if config.tools.env:
        if not task.held_out:
            # a prompt may be both trained on and held out, because the environment decides the
            # problem
            num_held_out = _import_task_module("guess").NUM_HELD_OUT
            task = task._replace(held_out=pick_evenly_spaced(task.train, num_held_out))
        if not config.data.reward and not config.data.rubric:
            task = task._replace(rewards={}, reward_weights={}, rubric=None, verifier=None)

    schemas = calls.make_tool_schemas("--tools", task.tools)
    for kind in environments.values():
        shared = sorted(schemas.keys() & calls.make_environment_schemas(kind))
        if shared:
            raise ValueError(
                f"the environment {kind.__name__} of --env and the functions of --tools both have "
                f"a tool {shared[0]}; rename one of them"
            )
        if hasattr(kind, "get_reward"):
            task = task.with_reward(kind.__name__, make_environment_reward(kind))
    _raise_if_environments_do_not_fit(task, config)
    if task.tools or task.has_environments_or_harness:
        _refuse_settings_unfit_for_tools(task, config)
    return task


def _with_harness_reward(task: Task) -> Task:
    """The task with the reward that its harness computes, in addition to the user's rewards."""
    from tasks.harness import REWARD_NAME, make_harness_reward

    if REWARD_NAME in task.rewards:
        raise ValueError(
            f"--reward {REWARD_NAME}: the harness of --env-server already has a reward with this "
            "name; rename the function"
        )
    return task.with_reward(REWARD_NAME, make_harness_reward())


def _raise_if_environments_do_not_fit(task: Task, config: Config) -> None:
    """Raises ValueError if the prompts, rewards or settings do not fit the environments."""
    if task.name == "env" and not task.has_environments_or_harness:
        raise ValueError(
            "--task env needs an environment; name it with --env FILE.py:Class, or start a harness "
            "with --env-server COMMAND"
        )
    examples = task.train + task.held_out
    if not task.environments and not all(example["prompt"] for example in examples):
        raise ValueError(
            f"--data {config.data.path} has rows without a prompt; add a prompt to each row, "
            "or name an environment that makes the prompts with --env FILE.py:Class"
        )
    if task.environments and not task.rewards and not task.rubric:
        raise ValueError(
            f"no environment in --env {config.tools.env} has a method get_reward, and --reward is "
            "not given; add one of the two"
        )
    for kind in filter(calls.rewards_each_turn, task.environments.values()):
        if not callable(getattr(kind, "get_reward", None)):
            raise ValueError(
                f"the environment {kind.__name__} of --env has reward_per_turn, but no method "
                "get_reward; add the method"
            )
        for name, allowed in TURN_SETTINGS.items():
            value = config.to_flags()[name]
            if value not in allowed:
                flag = flag_of(name)
                raise ValueError(
                    f"{flag} {value} needs one reward per conversation, but {kind.__name__} has "
                    f"reward_per_turn; use {flag} {allowed[0]}, or remove reward_per_turn"
                )


def _refuse_settings_unfit_for_tools(task: Task, config: Config) -> None:
    """Raises ValueError if one of the settings or columns does not work with tools."""
    # all examples on a side have the same keys as the first example on that side
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
            f"{unfit[0]} does not work with tools; leave it out, or leave out --tools, --env and "
            "--env-server"
        )


# ---- the judge


def _warnings_of_criteria_unknown_to_judge(config: Config, task: Task) -> Iterator[str]:
    """
    Yields a warning if a bundled judge has not learned the criteria of the rubrics.

    Raises ValueError if a rubric cannot be read.
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
    unlearned = [criterion.name for criterion in criteria if criterion.text not in learned]
    if unlearned:
        yield (
            f"WARNING: the judge {judge} has learned {knowledge}, so its scores for "
            f"{', '.join(unlearned)} are noise; name another judge with --judge-model"
        )
