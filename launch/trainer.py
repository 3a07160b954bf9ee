"""
A run from Python. `train.Trainer` is the one to import: it knows the loops.

Left out: the loops (train.py), what a run holds (run.py).
"""

from collections.abc import Callable, Generator, Iterator, Sequence
from pathlib import Path
from typing import Any

import gwen
import sampler
from config import Config
from disk import run_files
from launch.begin import Begun, as_settings, begin, make_dir
from launch.stop import stoppable
from machine import world
from problems import chat_template
from reporting.console import say

Steps = Iterator[dict[str, Any]]  # the figures of each


class Trainer:
    """
    A run from Python, as in a notebook. `start` and `resume` make one; settings go by the names of their flags.

        trainer = Trainer.start(task="demo", steps=20, reward=my_reward)
        for figures in trainer.steps():
            print(figures["step"], figures["reward/mean"])

    A break or an interrupt ends the loop after a whole step, which is saved; `steps` or `fit` goes on from there.
    """

    config: Config
    dir: Path  # where it is recorded
    model: gwen.Model  # as it is now, with its adapters
    make: Callable[[Config, Path], Any]  # run.py's
    loop: Callable[[Any], Steps]  # train.py's

    def __init__(self, begun: Begun):
        """Raises ValueError in one line for what the user got wrong; no directory is left then."""
        config, state, path = begun.config, begun.state, begun.path
        run = self.run = self.make(config, Path(path))
        if state:
            run.restore(state)
            if "rollout_batch_size" in begun.flags:  # may exceed what the checkpoint had backed off to
                run.batch_size.rows = run.sizes.rollout_batch_size
            state = state._replace(trainable={}, optimizer={})  # the old masters would stay for the whole run
        # only after everything has loaded, so that a user's mistake leaves no directory behind
        run.dir = Path(world.first(lambda: make_dir(run, begun._replace(state=state))))
        self.config, self.dir, self.model = run.config, run.dir, run.model
        self._is_owner = True  # until the loop ends
        run.open()
        print(f"run: {run.dir}, {sum(a.size for a in run.learner.trainable.values()):,} trainable parameters")
        print(run.memory)
        print(run.legend, flush=True)

    @classmethod
    def start(cls, recipe: str | None = None, *, run_dir: str | None = None, **settings: Any) -> "Trainer":
        """
        A new run. recipe: YAML of settings, in place of the task's.

        `data` and `eval_data` may be rows as dictionaries, `reward` a function or a list of them, `loss_type` and
        `advantage` a function: one at the top level of a notebook or module, which a resumed run finds there again.
        """
        return cls(begin(as_settings(settings), recipe, run_dir=run_dir))

    @classmethod
    def resume(cls, run_dir: str | Path, *, allow_changes: bool = False, **settings: Any) -> "Trainer":
        """Goes on with a run; allow_changes: though its data, rewards or files changed."""
        return cls(begin(as_settings(settings), resume=str(run_dir), allow_changes=allow_changes))

    def steps(self) -> Generator[dict[str, Any], None, None]:
        """Trains, and yields each step's figures, as in `metrics.jsonl`."""
        if not self._is_owner and world.is_first():
            run_files.own(self.dir)
        try:
            with self.run.shown(), stoppable(self.run):
                yield from self.loop(self.run)
        except GeneratorExit:
            self.save()
            say(f"saved after step {self.run.step}: {self.dir}")
            raise
        finally:
            run_files.let_go(self.dir)
            self._is_owner = False

    def fit(self) -> "Trainer":
        """Trains to the last step."""
        for _ in self.steps():
            pass
        return self

    def save(self) -> None:
        """Saves a checkpoint and the adapter."""
        self.run.save()

    def evaluate(self) -> dict[str, Any]:
        """The figures on what is held out, as in `eval.jsonl`; prints none of them."""
        journal = self.run.journal
        if not journal.evaluations or journal.evaluations[-1]["step"] != self.run.step:
            self.run.evaluate()
        return journal.evaluations[-1]

    def sample(self, prompts: Sequence[Any], n: int = 1, *, temp: float | None = None) -> list[list[str]]:
        """`n` completions of each prompt, a text or chat messages, drawn as in training; temp 0: greedily."""
        run, settings = self.run, self.config.sampling
        prompts = [prompts] if isinstance(prompts, str) else prompts
        ids = [chat_template.chat_ids(run.tokenizer, prompt, thinking=settings.thinking) for prompt in prompts]
        temperature = settings.temp if temp is None else temp
        params = run.sampling._replace(temperature=temperature)
        rollout = sampler.rollout(run.model, ids, params, group_size=n, key=settings.seed)
        texts = sampler.texts(run.tokenizer, rollout, run.model.config.eos_ids)
        return [texts[first : first + n] for first in range(0, len(texts), n)]
