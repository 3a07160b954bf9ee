"""
Before the first step, finds the loss settings of a run that do not change its training.

To find out whether a setting changes the training, the gradient of the loss on made-up tokens is
computed with the setting and without it. So this file needs no list of the settings that each loss
uses, and it also works for a user's own loss.

With one update per rollout, the importance ratio is 1, except for samples of earlier steps that
`Trainer.on_samples` adds. At a ratio of 1, no clip range has an effect, and some of the losses
have the same gradient as each other.

Axes: M rows, T tokens of a row.
"""

from collections.abc import Iterator
from typing import Any

import cpu_blas  # noqa: F401  (before mlx)
import mlx.core as mx
import numpy as np

import grpo
from config import SETTINGS, Config, is_user_function
from flags import flag_of
from step.loss import make_objective

# for each setting of a loss, a value at which the setting changes nothing
NEUTRAL: dict[str, Any] = {
    "epsilon": 1e9,
    "epsilon_high": 1e9,
    "importance_sampling_level": "token",
    "importance_sampling_correction": "off",
}
TOLERANCE = 1e-5  # a smaller relative difference between two gradients is rounding
# The importance ratios of the made-up tokens range from e^-8 to e^8, so that they exceed any usual
# clip range.
MOST_LOG_RATIO = 8.0
NUM_ROWS = 16
NUM_TOKENS = 6


def describe_loss_settings_without_effect(
    config: Config,
    own_loss: grpo.LossFunction | None = None,
    *,
    may_replay: bool = False,
) -> list[str]:
    """
    Returns a line for each loss setting that is not at its default, but has no effect on training.

    own_loss: the user's own loss function; None if --loss-type names one of Gwen's losses.
    may_replay: whether `Trainer.on_samples` is set. This hook may add samples of earlier steps.
    Without --importance-sampling-correction, their importance ratios are not 1, so the lines name
    only settings that have no effect at any ratio.
    """
    if config.objective.loss_type in ("sft", "distill"):
        return []  # settings/checks.py refuses the settings that these losses cannot use
    loss = own_loss or grpo.LOSSES[config.objective.loss_type]
    # with the correction, the ratios of replayed samples are 1 in the first update too
    has_correction = config.objective.importance_sampling_correction != "off"
    may_differ_from_one = may_replay and not has_correction
    are_ratios_one = has_one_update_per_rollout(config) and not may_differ_from_one
    lines = list(_describe_unused_loss_settings(config, loss, are_ratios_one, may_replay))
    if are_ratios_one:
        lines += _describe_loss_with_equal_gradient(config, loss)
    lines += _describe_unused_reference(config, loss)
    return lines


def describe_settings_affecting_only_replay(
    config: Config, own_loss: grpo.LossFunction | None = None
) -> list[str]:
    """
    Returns lines about the loss settings that affect only samples of earlier steps.

    The first line names these settings; if there are none, the list is empty. The lines are for a
    run with `Trainer.on_samples`, which may add samples of earlier steps. The importance ratios of
    all other samples are 1 if each rollout gets one update. A second line follows if the user's own
    loss ignores the weights that --importance-sampling-correction gives to the added samples.
    """
    lines_without_replay = describe_loss_settings_without_effect(config, own_loss)
    lines_at_any_ratio = describe_loss_settings_without_effect(config, own_loss, may_replay=True)
    clauses = []
    for line in lines_without_replay:
        if line in lines_at_any_ratio:
            continue
        setting, _, reason = line.partition(" has no effect")
        if reason:
            clauses.append(f"{setting} has an effect")
        else:
            loss_type, _, other = line.partition(" trains exactly like ")
            clauses.append(f"{loss_type} differs from {other.partition(',')[0]}")
    if not clauses:
        return []
    lines = [
        f"{' and '.join(clauses)} only on samples of earlier steps that on_samples adds, because "
        "each rollout gets one update (--num-iterations 1, --mini-batches 1), so the importance "
        "ratio of all other samples is 1"
    ]
    has_correction = config.objective.importance_sampling_correction != "off"
    if own_loss and has_correction and not _uses_sampled_logprobs(config, own_loss):
        lines.append(
            f"--loss-type {config.objective.loss_type} does not use the weights of the correction, "
            "so samples of earlier steps train as if the current policy had sampled them: multiply "
            "the loss of each token by grpo.sampler_weights(tokens, objective), or set "
            "--importance-sampling-correction off"
        )
    return lines


def _uses_sampled_logprobs(config: Config, loss: grpo.LossFunction) -> bool:
    """Whether the gradient of a loss depends on the sampler's log-probabilities."""
    objective = make_objective(config)
    tokens = make_varied_tokens(config, are_ratios_one=True)
    assert tokens.sampled_logprobs is not None
    shifted = tokens._replace(sampled_logprobs=tokens.sampled_logprobs - 0.5)
    return not have_equal_gradients(loss, objective, loss, objective, tokens, shifted)


def _describe_unused_loss_settings(
    config: Config, loss: grpo.LossFunction, are_ratios_one: bool, may_replay: bool
) -> Iterator[str]:
    """Yields a line for each setting in NEUTRAL that is not at its default, but has no effect."""
    objective = make_objective(config)
    values = config.to_flags()
    defaults = Config.from_flags().to_flags()
    tokens = make_varied_tokens(config, are_ratios_one)
    tokens_of_later_updates = make_varied_tokens(config, are_ratios_one=False)
    for name, neutral_value in NEUTRAL.items():
        assert name in SETTINGS, name
        if values[name] == defaults[name]:
            continue
        without = objective._replace(**{name: neutral_value})
        if not have_equal_gradients(loss, objective, loss, without, tokens):
            continue
        if may_replay and name == "importance_sampling_correction":
            # without the correction, the old log-probabilities of replayed samples are the sampled
            # ones
            assert tokens.sampled_logprobs is not None
            replayed = tokens._replace(old_logprobs=tokens.sampled_logprobs)
            if not have_equal_gradients(loss, objective, loss, without, tokens, replayed):
                continue
        setting = f"{flag_of(name)} {values[name]}"
        if have_equal_gradients(loss, objective, loss, without, tokens_of_later_updates):
            loss_type = config.objective.loss_type
            yield f"{setting} has no effect, because --loss-type {loss_type} does not use it"
        else:
            yield f"{setting} has no effect, because {_explain_why_ratio_is_one()}"


def _describe_loss_with_equal_gradient(config: Config, loss: grpo.LossFunction) -> Iterator[str]:
    """Yields a line if the loss trains exactly like a loss that grpo.LOSSES lists before it."""
    loss_type = config.objective.loss_type
    objective = make_objective(config)
    tokens = make_varied_tokens(config, are_ratios_one=True)
    for name, other in grpo.LOSSES.items():
        if name in (loss_type, "sft", "distill"):
            return
        # --epsilon-high has a different meaning in cispo, so the other loss gets a value that clips
        # nothing
        other_objective = objective._replace(loss_type=name, epsilon_high=NEUTRAL["epsilon_high"])
        if have_equal_gradients(loss, objective, other, other_objective, tokens):
            yield (
                f"--loss-type {loss_type} trains exactly like --loss-type {name}, because "
                f"{_explain_why_ratio_is_one()}"
            )
            return


def _describe_unused_reference(config: Config, loss: grpo.LossFunction) -> Iterator[str]:
    """Yields a line if --beta needs reference log-probabilities that the user's loss ignores."""
    settings = config.objective
    if not settings.beta or not is_user_function(settings.loss_type):
        return
    objective = make_objective(config)
    tokens = make_varied_tokens(config, has_one_update_per_rollout(config))
    assert tokens.ref_logprobs is not None
    other = tokens._replace(ref_logprobs=tokens.ref_logprobs - 0.5)
    if not _are_gradients_close(
        _gradient_of_logprobs(loss, objective, tokens),
        _gradient_of_logprobs(loss, objective, other),
    ):
        return

    fact = (
        f"the gradient of --loss-type {settings.loss_type} does not depend on tokens.ref_logprobs"
    )
    has_same_sums = _compute_loss_sums(loss, objective, tokens) == _compute_loss_sums(
        loss, objective, other
    )
    if not has_same_sums:
        yield f"--beta {settings.beta:g} affects only a metric, because {fact}"
        return
    yield (
        f"--beta {settings.beta:g} adds a reference pass to every step, but nothing uses its "
        f"result, because {fact}; set --beta 0"
    )


def has_one_update_per_rollout(config: Config) -> bool:
    """Whether each rollout gets a single update, so that every importance ratio is 1."""
    return config.optimizer.num_iterations == config.optimizer.mini_batches == 1


def _explain_why_ratio_is_one() -> str:
    return (
        "each rollout gets one update (--num-iterations 1, --mini-batches 1), so the importance "
        "ratio is always 1"
    )


# ---- gradients on made-up tokens


def make_varied_tokens(config: Config, are_ratios_one: bool) -> grpo.Tokens:
    """
    Makes made-up tokens. Their importance ratios are either all 1 or far apart.

    The tokens of a row have the same advantage, unless an environment may reward turns.
    """
    rng = np.random.default_rng(0)
    shape = (NUM_ROWS, NUM_TOKENS)
    logprobs = -rng.gamma(1, 1, shape)
    log_ratios = rng.uniform(-MOST_LOG_RATIO, MOST_LOG_RATIO, shape)
    lengths = rng.integers(1, NUM_TOKENS + 1, NUM_ROWS)
    mask = np.arange(NUM_TOKENS) < lengths[:, None]
    advantages = rng.normal(size=shape if config.tools.env else (NUM_ROWS, 1))
    reference = logprobs + rng.normal(0, 0.3, shape) if config.objective.beta else None
    return grpo.Tokens(
        _to_float32(logprobs),
        _to_float32(logprobs if are_ratios_one else logprobs - log_ratios),
        _to_float32(advantages),
        _to_float32(mask),
        ref_logprobs=None if reference is None else _to_float32(reference),
        num_items=int(mask.sum()),
        num_rows=NUM_ROWS,
        weights=mx.ones((NUM_ROWS, 1)),
        entropies=_to_float32(rng.gamma(2, 1, shape)),
        sampled_logprobs=_to_float32(logprobs + rng.normal(0, 0.3, shape)),
    )


def _to_float32(values: np.ndarray) -> mx.array:
    return mx.array(values.astype(np.float32))


def have_equal_gradients(
    loss: grpo.LossFunction,
    objective: grpo.Objective,
    other_loss: grpo.LossFunction,
    other_objective: grpo.Objective,
    tokens: grpo.Tokens,
    other_tokens: grpo.Tokens | None = None,
) -> bool:
    """
    Whether two losses have the same gradient on the tokens, apart from rounding.

    other_tokens: the tokens of the other loss; None for the same tokens.
    """
    gradient = _gradient_of_logprobs(loss, objective, tokens)
    return _are_gradients_close(
        gradient, _gradient_of_logprobs(other_loss, other_objective, other_tokens or tokens)
    )


def _gradient_of_logprobs(
    loss: grpo.LossFunction, objective: grpo.Objective, tokens: grpo.Tokens
) -> np.ndarray:
    """The gradient of the loss with respect to the log-probabilities, (M, T)."""

    def trial_loss_at(logprobs: mx.array) -> mx.array:
        return loss(tokens._replace(logprobs=logprobs), objective).value

    return np.array(mx.grad(trial_loss_at)(tokens.logprobs))


def _are_gradients_close(gradient: np.ndarray, other_gradient: np.ndarray) -> bool:
    scale = np.abs(gradient).max()
    return bool(
        np.abs(gradient - other_gradient).max() <= TOLERANCE * scale
    )  # False if a value is nan


def _compute_loss_sums(
    loss: grpo.LossFunction, objective: grpo.Objective, tokens: grpo.Tokens
) -> dict[str, Any]:
    """The statistics that the loss returns."""
    sums = loss(tokens, objective).sums
    return {name: value.item() for name, value in sums.items()}
