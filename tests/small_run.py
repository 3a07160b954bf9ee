"""A run on the bundled model that is small enough for a test, and one update of it."""

import mlx.core as mx
import mlx.optimizers as optim
import numpy as np
from mlx.utils import tree_flatten

import grpo
import gwen
import sampler
import train
import update
from problems import chat_template
from problems.examples import epoch_indices
from settings import sources
from settings.sources import given, parse
from step import micro_batch

RENDERED = {}
chat_ids = chat_template.chat_ids


def chat_ids_once(tokenizer, prompt, *, system=None, thinking=False, tools=None, variables=None):
    """`chat_template.chat_ids`, whose 2,000 calls are most of what it takes to make a run on the bundled model."""
    key = (
        tokenizer.name_or_path,
        tokenizer.chat_template,
        len(tokenizer),
        str(prompt),
        system,
        thinking,
        str((tools, variables)),
    )
    if key not in RENDERED:
        RENDERED[key] = chat_ids(tokenizer, prompt, system=system, thinking=thinking, tools=tools, variables=variables)
    return list(RENDERED[key])


chat_template.chat_ids = chat_ids_once
SMALL = ["--model", "demo", "--batch", "3", "--groups", "4", "--max-tokens", "12", "--eval-limit", "16"]


def make_config(*flags):
    args = parse([*SMALL, *flags])
    return resolve(given(args), args.config, args.resume)[0]


def resolve(flags, recipe=None, resume=None):
    """Settings and the line about the model, as `train.py` finds them."""
    return sources.resolve(flags, recipe, resume, gwen.choose_model)


def make_run(tmp_path, *flags):
    run = train.GrpoRun(make_config(*flags), tmp_path)
    run.open()
    return run


def sample(run, key=1):
    """Examples, prompts of every row, and completions of them."""
    config = run.config
    indices = epoch_indices(len(run.task.train), config.sampling.batch, 0, 0)
    prompts = [run.prompt_ids[index] for index in indices]
    rollout = sampler.rollout(
        run.model,
        prompts,
        run.sampling,
        group_size=config.sampling.groups,
        key=key,
    )
    rows = [prompt for prompt in prompts for _ in range(config.sampling.groups)]
    return [run.task.train[index] for index in indices], rows, rollout


def take_step(run, batches, rollout, advantages, lr, ref_logprobs=None, lesson=None):
    targets = update.targets_of(run.learner, batches, rollout, advantages, ref_logprobs, lesson)
    return update.update(run.learner, batches, targets, lr)


def update_once(run, budget=100_000, advantages=None):
    _, rows, rollout = sample(run)
    if advantages is None:
        rewards = np.array(
            mx.random.normal((run.config.sampling.batch, run.config.sampling.groups), key=mx.random.key(3)), np.float64
        )
        advantages = mx.array(grpo.group_advantages(rewards).reshape(-1))
    batches = micro_batch.micro_batches(rows, rollout, budget)
    ref = update.reference_logprobs(run.learner, batches, rollout) if run.config.objective.beta else None
    result = take_step(run, batches, rollout, advantages, update.learning_rate(run.config, run.step), ref)
    run.end_step()
    return result


def descend_plainly(run):
    """
    In AdamW's place: a step is the learning rate times the gradient, so weights can be compared.

    AdamW's first step is g / (|g| + 1e-8): where g is almost 0, a rounding of it is a whole step.
    """
    run.learner.optimizer = optim.SGD(0.0)  # an update sets its rate


class Recorder:
    """An optimizer that keeps the gradients it is given, and changes nothing."""

    def __init__(self):
        self.state, self.learning_rate, self.step, self.grads = {}, 0.0, mx.array(0), []

    def apply_gradients(self, grads, masters):
        self.grads.append(dict(tree_flatten(grads)))
        return masters


def gradient_of_update(run, batches, rollout, advantages, ref_logprobs=None):
    """The result of an update that changes nothing, and the gradient it would have taken."""
    run.learner.optimizer = Recorder()
    result = take_step(run, batches, rollout, advantages, 1e-3, ref_logprobs)
    return result, run.learner.optimizer.grads[-1]
