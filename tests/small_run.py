"""A run on the bundled model that is small enough for a test, and one update of it."""

import copy
import functools
import types

import mlx.core as mx
import mlx.optimizers as optim
import numpy as np
import yaml
from mlx.utils import tree_flatten

import flags
import grpo
import sampler
import update
from disk import model_choice
from prompts import chat_template
from run import GrpoRun
from settings import sources
from settings.sources import given_settings, parse_flags
from step.batch import Batch, make_batches
from step.generation import rollout_fields
from step.sample import new_samples
from tasks import demo
from tasks.draws import epoch_indices

RENDERED = {}
encode_prompts = chat_template.encode_prompts


def encode_prompts_once(tokenizer, examples, **how):
    """`chat_template.encode_prompts`, which is most of what it takes to make a run on the bundled model's 2,000."""
    examples = list(examples)
    told = [(one["prompt"], one.get("system"), one.get("chat_template_kwargs")) for one in examples]
    what = (tokenizer.name_or_path, tokenizer.chat_template, len(tokenizer), told, how["thinking"])
    key = chat_template.encode_chat, repr(what)
    longest = max(map(len, RENDERED.get(key, ())), default=0)
    if key not in RENDERED or longest + how["max_tokens"] > how["context"]:  # which it refuses
        RENDERED[key] = encode_prompts(tokenizer, examples, **how)
    return [list(ids) for ids in RENDERED[key]]


chat_template.encode_prompts = encode_prompts_once
yaml_once = functools.cache(yaml.load)
copied = {"load": lambda *text: copy.deepcopy(yaml_once(*text))}
flags.yaml = types.SimpleNamespace(
    **vars(yaml) | copied
)  # each run reads a recipe, and its rubric four times
problems_once = functools.cache(demo.examples)
demo.examples = lambda held_out, num: [one.copy() for one in problems_once(held_out, num)]
SMALL = [
    "--model",
    "demo",
    "--batch",
    "3",
    "--groups",
    "4",
    "--max-tokens",
    "12",
    "--eval-limit",
    "16",
]


def make_config(*flags):
    args = parse_flags([*SMALL, *flags])
    return resolve(given_settings(args), args.config, args.resume)[0]


def resolve(flags, recipe=None, resume=None):
    """Settings and the line about the model, as `train.py` finds them."""
    return sources.resolve_settings(flags, recipe, resume, model_choice.choose_model)


def make_run(tmp_path, *flags):
    run = GrpoRun(make_config(*flags), tmp_path)
    run.open()
    return run


ADVANTAGES = np.random.default_rng(3).normal(size=12)


def sample(run, advantages=None, key=1):
    """Samples of the run's first prompts; their advantages, N."""
    config = run.config
    indices = epoch_indices(len(run.task.train), config.sampling.batch, 0, 0)
    examples, prompts = (
        [held[index] for index in indices] for held in (run.task.train, run.prompt_ids)
    )
    rollout = sampler.rollout(
        run.model, prompts, run.sampling, group_size=config.sampling.groups, key=key
    )
    texts = sampler.decode_texts(run.tokenizer, rollout, run.model.config.eos_ids)
    return advanced(
        of_rollout(prompts, rollout, examples, texts),
        ADVANTAGES if advantages is None else advantages,
    )


def of_rollout(prompts, rollout, examples=None, texts=None):
    size = len(rollout.finish_reasons) // len(prompts)
    found = zip(
        new_samples(examples or [{}] * len(prompts), prompts, size),
        rollout_fields(rollout, texts),
        strict=True,
    )
    return [one._replace(**its) for one, its in found]


def advanced(samples, advantages):
    return [
        one._replace(advantage=float(its))
        for one, its in zip(samples, np.ravel(advantages), strict=True)
    ]


def shifted(samples, scale):
    """The samples as another policy would have recorded them."""
    rng = np.random.default_rng(0)
    return [
        one._replace(logprobs=one.logprobs + scale * rng.normal(size=len(one.loss_positions)))
        for one in samples
    ]


def recorded(samples):
    """What the sampler recorded, (N, T), and the mask."""
    widths = [len(one.loss_positions) for one in samples]
    mask = np.arange(max(widths)) < np.array(widths)[:, None]
    logprobs = np.zeros(mask.shape)
    logprobs[mask] = np.concatenate([one.logprobs for one in samples])
    return logprobs, mask


def told(batches, field, rows):
    """The batches with a column, (M, T) of each, from values of all rows, (N, T)."""
    rows = mx.array(rows, mx.float32)
    columns = [rows[mx.array(one.rows), : one.mask.shape[1]] for one in batches]
    if field in grpo.Tokens._fields and field not in Batch._fields:
        pairs = zip(batches, columns, strict=True)
        return [one._replace(columns=one.columns | {field: column}) for one, column in pairs]
    return [one._replace(**{field: column}) for one, column in zip(batches, columns, strict=True)]


def logprobs_of(run, batches, num_rows=12):
    """Log-probabilities under the policy of all rows, (N, T) float64, 0 outside the mask."""
    found = np.zeros((num_rows, max(batch.mask.shape[1] for batch in batches)))
    for batch in batches:
        logprobs, _ = run.learner.loss.logprobs(run.model, batch)
        found[batch.rows, : batch.mask.shape[1]] = np.array(logprobs * batch.mask)
    return found


def update_once(run, budget=100_000, advantages=None):
    if advantages is None:
        shape = run.config.sampling.batch, run.config.sampling.groups
        advantages = grpo.group_advantages(np.random.default_rng(3).normal(size=shape))
    batches = make_batches(sample(run, advantages), budget, "off")
    batches = (
        update.add_reference_logprobs(run.learner, batches)
        if run.config.objective.beta
        else batches
    )
    result = update.run_optimizer_steps(
        run.learner, batches, update.learning_rate(run.config, run.step)
    )
    run.end_step()
    return result


def descend_plainly(run):
    """Not by AdamW, whose first step is g / (|g| + 1e-8): where g is almost 0, a rounding of it is a whole step."""
    run.learner.optimizer = optim.SGD(0.0)  # an update sets its rate


class Recorder:
    """An optimizer that keeps the gradients it is given, and changes nothing."""

    def __init__(self):
        self.state, self.learning_rate, self.step, self.grads = {}, 0.0, mx.array(0), []

    def apply_gradients(self, grads, masters):
        self.grads.append(dict(tree_flatten(grads)))
        return masters


def gradient_of_update(run, batches):
    """The result of an update that changes nothing, and the gradient it would have taken."""
    run.learner.optimizer = Recorder()
    result = update.run_optimizer_steps(run.learner, batches, 1e-3)
    return result, run.learner.optimizer.grads[-1]
