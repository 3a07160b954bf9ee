"""
Tasks: prompts in, chat ids out, and rewards that a program can verify. A file a task.

A task names its training prompts, its held-out problems, its rubric and its verifier, and what its prompts look like.
`make` puts in their place what a user brings: data, reward functions, a rubric. No model is known here. Whatever a
user got wrong is a ValueError of one line that names the value and the fix. Left out: reading data
(problems/data.py) and reward functions (problems/rewards.py).
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
from problems import calls, chats
from problems.data import load_sides
from problems.examples import (
    Example,
    first_answer,
    prompt_key,
    prompt_text,
    spread_evenly,
    suggest_nearest,
)
from problems.functions import load_functions
from problems.rewards import Reward, load_reward, reward_arguments, reward_columns
from settings.checks import check_settings
from settings.sources import OWN_TASK, load_recipe
from tasks import own
from tasks.task import DATA, Sides, Task

# settings of advantages that turns may have
OF_TURNS = {
    "advantage": ["group"],
    "scale_rewards": ["group", "none"],
    "combine_rewards": ["sum"],
    "reward_gate": ["off"],
}
NAMES = (
    "demo",
    "values",
    "gsm8k",
    "math",
    "own",
    "calculator",
    "guess",
    "env",
)  # beside rg:NAME and ifeval


def _import_task(name: str) -> Any:
    """The file of a task: `TASK`, `bundled` for its sides, maybe `read` for --data; or `make_task` for its names."""
    return importlib.import_module(f"tasks.{'guess' if name == 'env' else name}")


def plain_name(name: str) -> Task:
    task: Task = _import_task(name).TASK
    return task._replace(name="env", environments={}) if name == "env" else task


def load_task(
    name: str,
    *,
    data: str | None = None,
    held_out: str | None = None,
    columns: str | None = None,
    begun: Collection[str] = (),
) -> Task:
    """
    The task of that name, on its own data, or with both sides of `data`, see `load_sides`.

    held_out: that side only; alone, for evaluations. begun: see `split_examples`. ValueError when the task is
    unknown, or its data missing or wrong.
    """
    if name not in NAMES:
        known = f"the tasks are {', '.join(NAMES)}, ifeval and rg:NAME"
        raise ValueError(f"--task {name!r} is unknown{suggest_nearest(name, NAMES)}; {known}")
    task, module = plain_name(name), _import_task(name)
    read = getattr(module, "read", None)
    if data is None and held_out is None:
        train, test = module.bundled()
        return task._replace(train=train, held_out=test)
    train, test, notes = load_sides(data, held_out, columns, read, begun=begun)
    answers, verifier = [example.get("answer") for example in test], task.verifier
    said, asked = (
        [first_answer(example) for example in test],
        [example["prompt"] for example in test],
    )
    if (
        read is None
        and verifier
        and not any(verifier(prompts=asked, completions=said, answer=answers))
    ):
        task = task._replace(verifier=None)  # a user's data without answers that it can read
    return task._replace(train=train, held_out=test, notes=notes)


def make_unrewarded_task(
    config: Config, held_out: str | None = None, begun: Collection[str] = ()
) -> Task:
    """The task of `make` with its problems and verifier, before rewards and tools, whose files may be gone."""
    data = config.data
    kind = data.task.partition(":")[0]
    if kind in ("rg", "ifeval") and (given := data.path or held_out):
        raise ValueError(
            f"--data {given} and --task {data.task}, which makes its own problems; leave one of them out"
        )
    if data.columns and not (data.path or held_out):
        raise ValueError(
            f"--columns {data.columns} renames columns of --data, which is not given; give both"
        )
    if kind == "rg" and ":" in data.task:
        task = _import_task("rg").make_task(data.task, data.task_config or None)
    elif data.task_config:
        raise ValueError(
            f"--task-config {data.task_config} is for --task rg:NAME, not for --task {data.task}"
        )
    elif kind == "ifeval":
        task = _import_task("ifeval").make_task(data.task)
    else:
        sources: dict[str, Any] = {
            "data": data.path or None,
            "held_out": held_out,
            "columns": data.columns or None,
        }
        task = load_task(data.task, **sources, begun=begun)
    if data.task in ("own", "gsm8k", "math") and (data.verifier or data.task == "own"):
        task = own.add_verifier(task, data.verifier, bool(data.reward))
    elif data.verifier:
        fix = f"--task {data.task} has its own; leave it out, or take --task own"
        raise ValueError(
            f"--verifier {data.verifier} compares with the answers of your own data, and {fix}"
        )
    return task


def make_task(config: Config, held_out: str | None = None, begun: Collection[str] = ()) -> Task:
    """
    The task that a run's settings name, with what they put in place of its own; held_out: evaluation data, whole.

    begun: keys of the prompts that the run holds out, if it has begun. Raises ValueError, naming the flag, for what is
    wrong with data, rewards or rubrics: before a model is loaded.
    """
    data, task = config.data, make_unrewarded_task(config, held_out, begun)
    if data.rubric:
        task = task._replace(rubric=Path(data.rubric), witness=None)
    elif (
        data.reward and "rubric" not in data.reward_weights
    ) or config.objective.loss_type == "distill":
        task = task._replace(
            rubric=None
        )  # what nobody asked for would outweigh the user's reward, or look on
    if data.reward:
        task = _with_own_rewards(task, config)
    task = _with_tools(task, config)
    if config.objective.truncated == "punish":
        if "soft_overlong" in task.rewards:
            raise ValueError(
                "--truncated punish is the reward soft_overlong, which is given already; leave one out"
            )
        most = config.sampling.max_tokens
        task = task.with_reward(*load_reward(f"soft_overlong:{most}:{max(most // 5, 1)}"))
    if data.task == own.TASK.name and not (task.rewards or task.rubric or config.objective.teacher):
        own.refuse_unrewardable(task, data.path or held_out)
    task = _apply_weights(task, config)
    if config.evaluation.rubric:
        task = task._replace(witness=Path(config.evaluation.rubric))
    elif not task.rubric:
        task = task._replace(witness=None)  # no judge in the reward that would need one
    if data.task == own.TASK.name:
        task = own.describe_own_task(task)
    if data.path or held_out:
        hints = Path(config.objective.teacher_prompt)
        hint = hints.read_text(encoding="utf-8", errors="replace") if hints.is_file() else ""
        task = task._replace(notes=[*task.notes, *own.unread(task, data.columns, hint)])
    gate = "--reward-gate form: training pays only finished answers of a form; evaluations have no gate"
    gates = [gate] if data.reward_gate == "form" else []
    task = task._replace(notes=[*task.notes, *gates, *_judge_notes(config, task)])
    if config.evaluation.every and not task.held_out:
        raise ValueError(
            f"--data {data.path} holds out no prompt to evaluate; add prompts or set --eval-every 0"
        )
    return task


def load_train_and_held_out(config: Config, run_dir: Path | None = None) -> Sides:
    """
    What a run trains on and holds out, of replies their conversations; its own rewards' files may be gone.

    run_dir: of the run, which tells what it has held out from its beginning.
    """
    data = config.data
    begun = read_held_out(run_dir) if run_dir else []
    if config.objective.loss_type == "sft":
        return chats.load_chats(data.path, data.columns, begun)[:2]
    task = (
        make_unrewarded_task(config, begun=begun) if data.reward else make_task(config, begun=begun)
    )
    return task.train, task.held_out


HELD_OUT = "held_out.json"  # of a run directory: the keys of the prompts that the run holds out


def write_held_out(run_dir: Path, held_out: Sequence[Example]) -> None:
    """Notes what a run holds out, so that it keeps its sides though its data grow."""
    file = run_dir / HELD_OUT
    if not file.is_file():
        file.write_text(json.dumps(sorted(map(prompt_key, held_out))), encoding="utf-8")


def read_held_out(run_dir: str | Path) -> list[str]:
    """The keys of what a run holds out, none of one that has not begun."""
    file = Path(run_dir) / HELD_OUT
    return list(json.loads(file.read_text(encoding="utf-8"))) if file.is_file() else []


def warn_of_contamination(
    config: Config, train: list[Example], held_out: list[Example]
) -> list[str]:
    """
    A line where the run that --init-adapter names, or a checkpoint of, was trained on prompts held out here.

    Their last user messages are compared; those that this run trains on itself say nothing. No line without a run, or
    where its data cannot be read.
    """
    begun = Path(config.model.init_adapter)
    runs = [one for one in (begun, *begun.parents[:3]) if (one / "metrics.jsonl").is_file()]
    if not config.model.init_adapter or not runs:
        return []
    try:
        theirs, _ = load_train_and_held_out(
            check_settings(load_recipe(runs[0] / "config.yaml")), runs[0]
        )
    except ValueError:
        return []
    known, own = ({prompt_text(example["prompt"]) for example in side} for side in (theirs, train))
    num = sum(
        (asked := prompt_text(example["prompt"])) in known and asked not in own
        for example in held_out
    )
    told = f"{num} of {len(held_out)} held-out prompts are among those that {runs[0]} was trained on, and prove little"
    return [f"WARNING: {told}: hold the same rows out in both, by a column split"] if num else []


def _with_own_rewards(task: Task, config: Config) -> Task:
    """The task with the rewards of --reward, each of weight 1, instead of its own; rubrics and metrics stay."""
    data = config.data
    parts = [spec.rpartition(":") for spec in data.reward]
    specs = [file + colon + name for file, colon, names in parts for name in names.split(",")]
    loaded = list(map(load_reward, specs))
    own = dict(loaded)
    if len(own) < len(loaded):
        raise ValueError(f"--reward {' '.join(data.reward)}: two rewards have the same name")
    if taken := sorted(own.keys() & {"mean", "std", "zero_std_frac", "s", "none"}):
        raise ValueError(
            f"--reward {taken[0]}: reward/{taken[0]} is a metric of its own; rename the function"
        )
    rubric = {"rubric": task.reward_weights.get("rubric", 1.0)} if task.rubric else {}
    metrics = {name: one for name, one in task.rewards.items() if not task.reward_weights[name]}
    weights = dict.fromkeys(metrics, 0.0) | dict.fromkeys(own, 1.0) | rubric
    return task._replace(rewards=metrics | own, reward_weights=weights)


def _with_tools(task: Task, config: Config) -> Task:
    """The task with the functions of --tools and the environments of --env; what these give is a reward of weight 1."""
    tools, environments = load_tools(config)
    task = task._replace(tools=tools, environments=environments)
    if config.tools.env:
        if not task.held_out:  # one prompt in all rows: what differs is what the environment draws
            task = task._replace(
                held_out=spread_evenly(task.train, _import_task("guess").NUM_HELD_OUT)
            )
        if not config.data.reward and not config.data.rubric:
            task = task._replace(rewards={}, reward_weights={}, rubric=None, verifier=None)
    schemas = calls.schemas_of("--tools", task.tools)
    for kind in task.environments.values():
        if both := sorted(schemas.keys() & calls.schemas_in(kind)):
            raise ValueError(
                f"--env: {kind.__name__} and --tools both have a tool {both[0]}; rename one of them"
            )
        if hasattr(kind, "get_reward"):
            task = task.with_reward(kind.__name__, environment_reward(kind))
    if task.name == "env" and not task.environments:
        raise ValueError("--task env talks with an environment; name it: --env FILE.py:Class")
    if not task.environments and not all(
        example["prompt"] for example in task.train + task.held_out
    ):
        raise ValueError(
            f"--data {config.data.path} has rows without a prompt; name who gives it: --env FILE.py:Class"
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
        for name, fitting in OF_TURNS.items():
            if (value := config.to_flags()[name]) not in fitting:
                which = f"{flag_of(name)} {value} is of whole conversations, and {kind.__name__} has reward_per_turn"
                raise ValueError(f"{which}; take {flag_of(name)} {fitting[0]}, or leave that out")
    if task.tools or task.environments:
        first = [
            example for side in (task.train, task.held_out) for example in side[:1]
        ]  # of a side all have its keys
        for given, what in (
            (
                any("chat_template_kwargs" in example for example in first),
                "column chat_template_kwargs",
            ),
            (config.objective.teacher_prompt, "--teacher-prompt"),
            (config.sampling.stop, "--stop"),
        ):
            if given:
                raise ValueError(
                    f"{what} is for completions without tools; leave it out, or --tools and --env"
                )
    return task


def load_tools(config: Config) -> tuple[dict[str, calls.Tool], dict[str, type]]:
    """What a model may call: the functions of --tools and the environments of --env, or the task's own."""
    task, specs = (
        plain_name(config.data.task) if config.data.task in NAMES else Task("", {}, {}),
        config.tools.tools,
    )
    named = [pair for spec in specs for pair in load_functions("--tools", spec).items()]
    functions = {getattr(tool, "__name__", name): tool for name, tool in named}
    if len(functions) < len(named):
        fix = "rename one; a decorator keeps a function's name with functools.wraps"
        raise ValueError(f"--tools {' '.join(specs)}: two tools have the same name; {fix}")
    environments: dict[str, Any] = {}  # by their names, "" for the only one
    for part in re.split(r",(?=\w+=)", config.tools.env) if config.tools.env else []:
        name, _, spec = part.rpartition("=")
        if name in environments or (environments and not name) or "," in spec or "" in environments:
            several = "several environments have a name each, as a=mine.py:A,b=mine.py:B"
            raise ValueError(f"--env {config.tools.env}: {several}")
        (environments[name],) = load_functions("--env", spec, kind="class").values()
    return functions or task.tools, environments or task.environments


def environment_reward(kind: type) -> Reward:
    """What an environment's `get_reward` gave; None in others."""

    def earned(earned: Sequence[tuple[str, Any]], **_: Any) -> list[Any]:
        return [value if name == kind.__name__ else None for name, value in earned]

    return earned


def _apply_weights(task: Task, config: Config) -> Task:
    """
    The task with the weights of --reward-weights.

    A reward of weight 0 is a metric. A rubric of weight 0 is left out: nobody pays for judging without use. No reward
    may be left where a teacher says enough. A task's own reward that lacks a column is left out where it pays nothing,
    else a ValueError.
    """
    given, known = config.data.reward_weights, [*task.rewards, *(["rubric"] if task.rubric else [])]
    if unknown := [name for name in given if name not in known]:
        raise ValueError(f"--reward-weights {unknown[0]}: the rewards are {', '.join(known)}")
    weights = {name: given.get(name, task.reward_weights.get(name, 1.0)) for name in known}
    task = task._replace(
        reward_weights=weights, rubric=task.rubric if weights.get("rubric") else None
    )
    if not task.counted_rewards and task.rubric is None and not config.objective.teacher:
        raise ValueError("--reward-weights leave no reward; give one of them a weight other than 0")
    columns, served = (
        reward_arguments(task.train or task.held_out, bool(task.environments)),
        dict[str, Reward](),
    )
    for name, reward in task.rewards.items():
        try:
            reward_columns(name, reward, columns)
            served[name] = reward
        except ValueError as error:
            if config.data.reward:
                raise
            if (
                weights[name] and config.objective.loss_type != "distill"
            ):  # the user may never have named this reward
                way = "give --reward, or --task values for a rubric alone"
                raise ValueError(
                    f"{error}; {name} is a reward of --task {task.name}: {way}"
                ) from error
    return task._replace(rewards=served)


def _judge_notes(config: Config, task: Task) -> Iterator[str]:
    """What should be known of the rubrics and their judge. ValueError for a rubric that cannot be read."""
    asked = [rubrics.load_rubric(path) for path in (task.rubric, task.witness) if path]
    judge = config.judge.model or config.model.name
    if not config.judge.url and judge in OWN_TASK:
        learned = rubrics.load_rubric(DATA / "demo_rubric.yaml").criteria if judge == "demo" else []
        taught = {criterion.text for criterion in learned}
        if strange := [
            one.name for rubric in asked for one in rubric.criteria if one.text not in taught
        ]:
            knows = "only the criteria of data/demo_rubric.yaml" if taught else "no criteria"
            noise = f"its scores of {', '.join(strange)} are noise; name another with --judge-model"
            yield f"WARNING: the judge {judge} has learned {knows}: {noise}"
