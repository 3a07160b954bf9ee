"""
What a run looks at before it loads a model: its data and rewards are read and tried, and what it is made of is noted.

Left out: the tasks (tasks/__init__.py), what a reward pays for that it should not (problems/audit.py).
"""

from pathlib import Path

import tasks
from config import Config
from disk import checkpoint
from machine import alive, world
from problems import audit, rewards
from tasks.task import Task


def take(config: Config) -> tuple[Task, list[str]]:
    """The task of a run, and lines on it, its verifier and the user's rewards."""
    with alive.doing("reading the data"):
        task = tasks.make(config)
    if not task.train and task.problems is None:
        raise ValueError(f"--task {task.name} has nothing to train on; it is for evaluate.py")

    with alive.doing("trying the rewards"):
        lines = world.first(lambda: list(audit.first_surprises(task)))
    return task, [*task.notes, *lines]


def digests(config: Config, task: Task) -> dict[str, str]:
    """Of the examples, and of the files that reward, judge and teach: what a resumed run compares."""
    environments = [part.rpartition("=")[2] for part in config.tools.env.split(",")]
    specs = [config.data.verifier, *config.data.reward, *config.tools.tools, *environments]
    specs += [config.objective.loss_type, config.objective.advantage]
    names = [*map(rewards.file_of, specs), config.objective.teacher_prompt]
    rubrics = {
        config.data.rubric or "task's rubric": task.rubric,
        config.evaluation.rubric or "witness's rubric": task.witness,
    }
    files = {name: Path(name) for name in names} | rubrics
    found = {name: checkpoint.digest(path.read_bytes()) for name, path in files.items() if path and path.is_file()}
    mix = task.problems and task.problems.mix
    examples = checkpoint.digest(mix, *task.train, "held out", *task.held_out)
    return found | {config.data.path or "task's examples": examples}
