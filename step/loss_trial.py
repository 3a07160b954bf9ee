"""
Tries a loss function on made-up tokens, and finds out what it depends on.

step/objectives.py refuses a user's loss that fails the trial. step/loss.py asks whether a loss
needs the samples whose advantage is 0.

Axes: M rows of made-up tokens, T tokens in a row.
"""

import functools
from typing import Any, NamedTuple

import cpu_blas  # noqa: F401  (before mlx)
import mlx.core as mx
import numpy as np

import grpo

# the fields of grpo.Tokens that depend on the policy; a loss trains the policy only through these
POLICY_FIELDS = ("logprobs", "entropies", "divergences")
# the fields of grpo.Tokens on which a loss may depend
TOKEN_FIELDS = (
    "logprobs",
    "entropies",
    "divergences",
    "advantages",
    "old_logprobs",
    "ref_logprobs",
    "sampled_logprobs",
)
# The sizes of the random changes to a field. The small change gives a finite difference. The large
# change is needed for a loss that only compares the field with a threshold.
CHANGES = (1e-2, 1.0)


class TokenFieldUse(NamedTuple):
    """How a loss uses one field of its tokens."""

    has_effect: bool  # whether a change to the field changes the loss
    has_gradient: bool  # whether the loss has a gradient with respect to the field


def make_fixed_tokens(has_reference: bool) -> grpo.Tokens:
    """Makes two rows of three tokens each. The last token of the second row is padding."""
    logprobs = mx.array([[-0.5, -1.5, -1.0], [-2.0, -0.1, 7.0]])
    return grpo.Tokens(
        logprobs,
        old_logprobs=logprobs + 0.1,
        advantages=mx.array([[1.0], [-0.5]]),
        mask=mx.array([[1.0, 1, 1], [1, 1, 0]]),
        ref_logprobs=logprobs - 0.2 if has_reference else None,
        weights=mx.ones((2, 1)),
        entropies=-logprobs,
        sampled_logprobs=logprobs + 0.05,
        num_items=5,
        num_rows=2,
    )


@functools.cache
def make_random_tokens(seed: int, has_reference: bool, has_teacher: bool = False) -> grpo.Tokens:
    """
    Makes four rows of up to six random tokens. The values at padding are 7.

    has_teacher: whether the tokens have divergences from a teacher.
    """
    rng = np.random.default_rng(seed)
    shape = (4, 6)
    mask = np.arange(6) < np.array([[6], [4], [5], [1]])
    logprobs = -rng.uniform(0.05, 3.0, shape)

    def array_with_7_at_padding(values: np.ndarray) -> mx.array:
        """The values as an array, with 7 at padding."""
        return mx.array(np.where(mask, values, 7.0).astype(np.float32))

    return grpo.Tokens(
        array_with_7_at_padding(logprobs),
        old_logprobs=array_with_7_at_padding(logprobs + rng.normal(0, 0.2, shape)),
        advantages=mx.array(rng.normal(size=(4, 1)).astype(np.float32)),
        mask=mx.array(mask.astype(np.float32)),
        ref_logprobs=array_with_7_at_padding(logprobs + rng.normal(0, 0.2, shape))
        if has_reference
        else None,
        divergences=array_with_7_at_padding(rng.uniform(0.1, 1.0, shape)) if has_teacher else None,
        weights=mx.ones((4, 1)),
        entropies=array_with_7_at_padding(rng.uniform(0.1, 3.0, shape)),
        sampled_logprobs=array_with_7_at_padding(logprobs + rng.normal(0, 0.1, shape)),
        num_items=int(mask.sum()),
        num_rows=4,
    )


def loss_gradients_by_token_field(
    loss_function: grpo.LossFunction, tokens: grpo.Tokens, objective: grpo.Objective
) -> dict[str, mx.array]:
    """The gradient of the loss with respect to each field that the tokens have."""
    names = [name for name in TOKEN_FIELDS if getattr(tokens, name) is not None]

    def trial_loss_at(values: list[mx.array]) -> mx.array:
        changes: dict[str, Any] = dict(zip(names, values, strict=True))
        return loss_function(tokens._replace(**changes), objective).value

    gradients = mx.grad(trial_loss_at)([getattr(tokens, name) for name in names])
    return dict(zip(names, gradients, strict=True))


def measure_token_field_uses(
    loss_function: grpo.LossFunction, trials: list[grpo.Tokens], objective: grpo.Objective
) -> dict[str, TokenFieldUse]:
    """
    Finds out how the loss uses each field of the tokens.

    A field has an effect if small changes of its values change the loss. The gradient of the loss
    with respect to the field shows whether the field trains the policy.
    """
    uses: dict[str, TokenFieldUse] = {}
    rng = np.random.default_rng(0)
    for tokens in trials:
        before = loss_function(tokens, objective).value.item()
        gradients = loss_gradients_by_token_field(loss_function, tokens, objective)
        for name, gradient in gradients.items():
            value = getattr(tokens, name)
            has_effect = False
            for size in CHANGES:
                change = mx.array(rng.normal(0, size, value.shape).astype(np.float32))
                changed = tokens._replace(**{name: value + change})
                has_effect |= loss_function(changed, objective).value.item() != before
            has_gradient = bool((gradient != 0).any().item())
            old = uses.get(name, TokenFieldUse(False, False))
            uses[name] = TokenFieldUse(
                has_effect or old.has_effect, has_gradient or old.has_gradient
            )
    return uses


def describe_token_field_uses(uses: dict[str, TokenFieldUse]) -> str:
    """Sentences on the fields through which a loss trains, and on the fields that it ignores."""
    trained = [name for name in POLICY_FIELDS if name in uses and uses[name].has_gradient]
    without_gradient = [
        name
        for name in POLICY_FIELDS
        if name in uses and uses[name].has_effect and not uses[name].has_gradient
    ]
    others = [
        name
        for name in TOKEN_FIELDS
        if name not in POLICY_FIELDS and name in uses and uses[name].has_effect
    ]
    ignored = [name for name in TOKEN_FIELDS if name in uses and not uses[name].has_effect]
    sentences = [f"The loss has a gradient through {_join_with_tokens_prefix(trained)}."]
    if without_gradient:
        sentences.append(
            f"It depends on {_join_with_tokens_prefix(without_gradient)}, but has no gradient "
            "through them, so it does not train them."
        )
    if others:
        sentences.append(f"It depends on {_join_with_tokens_prefix(others)}.")
    if ignored:
        sentences.append(f"It ignores {_join_with_tokens_prefix(ignored)}.")
    if "advantages" in ignored:
        sentences.append("So the rewards do not change what it trains.")
    return " ".join(sentences)


def _join_with_tokens_prefix(names: list[str]) -> str:
    """The names of fields as a phrase, such as "tokens.logprobs and tokens.entropies"."""
    dotted = [f"tokens.{name}" for name in names]
    if len(dotted) == 1:
        return dotted[0]
    return f"{', '.join(dotted[:-1])} and {dotted[-1]}"


def has_gradient_at_zero_advantage(
    loss_function: grpo.LossFunction, objective: grpo.Objective
) -> bool:
    """
    Whether the loss has a gradient at tokens whose advantage is 0.

    The answer comes from the gradients at made-up tokens, so a new loss needs no entry in a list.
    """
    for seed in range(3):
        tokens = make_random_tokens(seed, has_reference=bool(objective.beta), has_teacher=True)
        tokens = tokens._replace(advantages=mx.zeros_like(tokens.advantages))
        gradients = loss_gradients_by_token_field(loss_function, tokens, objective)
        for name in POLICY_FIELDS:
            if (gradients[name] != 0).any().item():
                return True
    return False


# ---- whether the loss of several rows is the sum of the losses of the single rows


def select_rows(tokens: grpo.Tokens, rows: list[int]) -> grpo.Tokens:
    """The tokens of some rows, (M, T). `num_items` and `num_rows` still describe the whole step."""
    fields = []
    for value in tokens:
        if isinstance(value, mx.array):
            value = value[mx.array(rows)]
        fields.append(value)
    return grpo.Tokens._make(fields)


def repeat_rows(tokens: grpo.Tokens) -> grpo.Tokens:
    """The tokens of a step with each row twice, (2M, T). `num_items` and `num_rows` are doubled."""
    assert tokens.num_items is not None and tokens.num_rows is not None
    repeated = select_rows(tokens, 2 * list(range(len(tokens.mask))))
    return repeated._replace(num_items=2 * tokens.num_items, num_rows=2 * tokens.num_rows)


def losses_of_single_rows(
    loss_function: grpo.LossFunction, tokens: grpo.Tokens, objective: grpo.Objective
) -> list[grpo.Loss]:
    """For each row, the loss of a micro-batch that contains only this row."""
    return [loss_function(select_rows(tokens, [row]), objective) for row in range(len(tokens.mask))]


def divides_by_micro_batch_size(
    loss_function: grpo.LossFunction, tokens: grpo.Tokens, objective: grpo.Objective
) -> bool:
    """
    Whether the loss of two copies of a row equals the loss of one copy, and is not 0.

    A loss that divides by the size of the micro-batch has this property. A loss that compares rows
    with each other, for example with a quantile or a mean, does not have it.
    """
    for row in range(len(tokens.mask)):
        single = loss_function(select_rows(tokens, [row]), objective).value
        double = loss_function(select_rows(tokens, [row, row]), objective).value
        is_unchanged = mx.abs(double - single) <= 1e-4 * mx.abs(single)
        if not (is_unchanged & (single != 0)).item():
            return False
    return True
