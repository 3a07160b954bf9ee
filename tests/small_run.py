"""A run on the bundled model that is small enough for a test, and one update of it."""

import mlx.core as mx
import mlx.optimizers as optim
import numpy as np
from mlx.utils import tree_flatten

import grpo
import sampler
import update
from disk import model_choice
from run import GrpoRun
from settings import sources
from settings.sources import parse_flags, settings_from_flags
from step.batch import Batch, make_batches
from step.generation import rollout_fields
from step.sample import new_samples
from tasks.draws import epoch_indices

SMALL_FLAGS = "--model demo --batch 3 --groups 4 --max-tokens 12 --eval-limit 16".split()
# The settings of a run that `Trainer.start` makes; further settings are added with |.
SMALL_SETTINGS = {
    "model": "demo",
    "task": "demo",
    "batch": 2,
    "groups": 2,
    "max_tokens": 4,
    "reward_weights": {"rubric": 0},
}
ADVANTAGES = np.random.default_rng(3).normal(size=12)


# ---- a run


def resolve_settings(settings, recipe=None, resume=None):
    """The settings, and the line about the model, as `train.py` resolves them."""
    return sources.resolve_settings(settings, recipe, resume, model_choice.choose_model_and_reason)


def make_config(*flags):
    args = parse_flags([*SMALL_FLAGS, *flags])
    return resolve_settings(settings_from_flags(args), args.config, args.resume)[0]


# The prompt ids of earlier runs. A key has all inputs of the encoding.
PROMPT_IDS = {}


class SmallRun(GrpoRun):
    """A run that, without tools, reuses prompt ids of earlier runs, since encoding is slow."""

    def encode_prompts(self, examples, kind="training prompt"):
        examples = list(examples)
        if self.toolbox:
            return super().encode_prompts(examples, kind)
        tokenizer = self.tokenizer
        template = tokenizer.name_or_path, tokenizer.chat_template, len(tokenizer)
        context = self.model.config.max_position_embeddings
        key = repr((examples, kind, self.config.sampling, template, context))
        if key not in PROMPT_IDS:
            PROMPT_IDS[key] = super().encode_prompts(examples, kind)
        return [list(ids) for ids in PROMPT_IDS[key]]


def make_run(run_dir, *flags):
    run = SmallRun(make_config(*flags), run_dir)
    run.open_logs_and_save_inputs_for_resume()
    return run


# ---- samples


def sample_first_prompts(run, advantages=None, key=1):
    """Samples of the prompts of the run's first step, with these advantages, (N,)."""
    sampling = run.config.sampling
    indices = epoch_indices(len(run.task.train), sampling.batch, 0, 0)
    examples = [run.task.train[index] for index in indices]
    prompts = [run.prompt_ids[index] for index in indices]
    rollout = sampler.rollout(run.model, prompts, run.sampling, group_size=sampling.groups, key=key)
    texts = sampler.decode_texts(run.tokenizer, rollout, run.model.config.eos_ids)
    samples = samples_from_rollout(prompts, rollout, examples, texts)
    return set_advantages(samples, ADVANTAGES if advantages is None else advantages)


def samples_from_rollout(prompts, rollout, examples=None, texts=None):
    """The samples of a rollout. examples: one per prompt, or None for empty examples."""
    group_size = len(rollout.finish_reasons) // len(prompts)
    empty_samples = new_samples(examples or [{}] * len(prompts), prompts, group_size)
    fields_of_rows = rollout_fields(rollout, texts)
    return [
        sample._replace(**fields)
        for sample, fields in zip(empty_samples, fields_of_rows, strict=True)
    ]


def set_advantages(samples, advantages):
    """The samples with these advantages, (N,) or (B, G)."""
    return [
        sample._replace(advantage=float(advantage))
        for sample, advantage in zip(samples, np.ravel(advantages), strict=True)
    ]


def shift_logprobs(samples, scale):
    """The samples with normal noise on their logprobs, as if another policy had sampled them."""
    rng = np.random.default_rng(0)
    shifted_samples = []
    for sample in samples:
        noise = rng.normal(size=len(sample.loss_positions))
        shifted_samples.append(sample._replace(logprobs=sample.logprobs + scale * noise))
    return shifted_samples


def stack_logprobs(samples):
    """The log-probabilities that the sampler recorded, (N, T), 0 outside the mask; the mask."""
    widths = [len(sample.loss_positions) for sample in samples]
    mask = np.arange(max(widths)) < np.array(widths)[:, None]
    logprobs = np.zeros(mask.shape)
    logprobs[mask] = np.concatenate([sample.logprobs for sample in samples])
    return logprobs, mask


# ---- batches


def add_column(batches, field, values):
    """The batches with one more column, (M, T) in each, from the values of all rows, (N, T)."""
    values = mx.array(values, mx.float32)
    is_loss_column = field in grpo.Tokens._fields and field not in Batch._fields
    widened_batches = []
    for batch in batches:
        column = values[mx.array(batch.rows), : batch.mask.shape[1]]
        if is_loss_column:
            batch = batch._replace(columns=batch.columns | {field: column})
        else:
            batch = batch._replace(**{field: column})
        widened_batches.append(batch)
    return widened_batches


def compute_logprobs(run, batches, num_rows=12):
    """Log-probabilities of all rows under the policy, (N, T) float64, 0 outside the mask."""
    width = max(batch.mask.shape[1] for batch in batches)
    all_logprobs = np.zeros((num_rows, width))
    for batch in batches:
        logprobs, _ = run.learner.loss.logprobs_and_entropies(run.model, batch)
        all_logprobs[batch.rows, : batch.mask.shape[1]] = np.array(logprobs * batch.mask)
    return all_logprobs


# ---- updates


def update_once(run, budget=100_000, advantages=None):
    """Samples the first prompts and updates the policy with them; returns the update's result."""
    if advantages is None:
        shape = run.config.sampling.batch, run.config.sampling.groups
        advantages = grpo.group_advantages(np.random.default_rng(3).normal(size=shape))
    batches = make_batches(sample_first_prompts(run, advantages), budget, "off")
    if run.config.objective.beta:
        batches = update.add_reference_logprobs(run.learner, batches)
    scheduled_learning_rate = update.scheduled_learning_rate(run.config, run.step)
    result = update.run_optimizer_steps(run.learner, batches, scheduled_learning_rate)
    run.mark_step_complete_and_keep_state()
    return result


def use_sgd(run):
    """
    Makes updates descend along the gradient itself.

    AdamW's first step is g / (|g| + 1e-8). Where g is almost 0, its rounding is a whole step.
    """
    run.learner.optimizer = optim.SGD(0.0)  # an update sets the learning rate


class GradientRecorder:
    """An optimizer that records its gradients and changes no weight."""

    def __init__(self):
        self.state = {}
        self.learning_rate = 0.0
        self.step = mx.array(0)
        self.grads = []

    def apply_gradients(self, grads, masters):
        self.grads.append(dict(tree_flatten(grads)))
        return masters


def record_gradient(run, batches):
    """The result of an update that changes no weight, and the gradient that it computed."""
    recorder = GradientRecorder()
    run.learner.optimizer = recorder
    result = update.run_optimizer_steps(run.learner, batches, 1e-3)
    return result, recorder.grads[-1]
