"""What the loss sees, and what an update changes, on the bundled model."""

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten
from small_run import make_config, make_run, sample, update_once

import grpo
import train
import update

# ---- what the loss sees


@pytest.mark.parametrize(
    "flags", [(), ("--temp", "0.7"), ("--top-p", "0.8"), ("--top-k", "4", "--temp", "1.3"), ("--min-p", "0.05")]
)
@pytest.mark.parametrize("budget", [1, 150, 100_000])
def test_the_trainer_scores_the_recorded_ids_as_the_sampler_did(tmp_path, flags, budget):
    """Temperature, support, positions, padding and prompt are all in these numbers: any mistake in one shows."""
    run = make_run(tmp_path, *flags)
    _, rows, rollout = sample(run)
    seen = []
    for batch in update.micro_batches(rows, rollout, budget):
        logprobs, _ = update.completion_logprobs(run.model, batch, run.config)
        gap = mx.abs(logprobs - batch.sampled_logprobs) * batch.mask
        assert gap.max().item() < 1e-4
        seen += batch.rows.tolist()
    assert sorted(seen) == list(range(12))


def test_the_loss_sees_each_completion_after_its_own_prompt(tmp_path):
    run = make_run(tmp_path)
    _, rows, rollout = sample(run)
    (whole,) = update.micro_batches(rows, rollout, 100_000)
    (other,) = update.micro_batches(rows[4:] + rows[:4], rollout, 100_000)
    ours, _ = update.completion_logprobs(run.model, whole, run.config)
    theirs, _ = update.completion_logprobs(run.model, other, run.config)
    ours, theirs = ours[mx.argsort(whole.rows)], theirs[mx.argsort(other.rows)]
    assert (mx.abs(ours - theirs)[:, 1:].max(axis=1) > 1e-3).all().item()


def test_the_end_token_is_trained_and_truncated_rows_get_none(tmp_path):
    run = make_run(tmp_path, "--max-tokens", "7")
    _, rows, rollout = sample(run)
    assert {"stop", "length"} == set(rollout.finish_reasons)
    for batch in update.micro_batches(rows, rollout, 100_000):
        for row, ids, mask in zip(
            batch.rows.tolist(), np.array(batch.completion_ids), np.array(batch.mask), strict=True
        ):
            last = int(ids[int(mask.sum()) - 1])
            assert (last in run.model.config.eos_ids) == (rollout.finish_reasons[row] == "stop")


def test_what_the_model_reads_is_the_prompt_and_the_ids_that_were_drawn(tmp_path):
    run = make_run(tmp_path)
    _, rows, rollout = sample(run)
    for batch in update.micro_batches(rows, rollout, 150):
        for index, row in enumerate(batch.rows.tolist()):
            length = int(batch.mask[index].sum().item())
            drawn = rollout.completion_ids[row].tolist()[:length]
            whole = rows[row] + drawn
            assert batch.tokens[index].tolist()[: len(whole) - 1] == whole[:-1]
            assert batch.completion_ids[index].tolist()[:length] == drawn
            assert batch.positions[index].tolist()[:length] == list(range(len(rows[row]) - 1, len(whole) - 1))


# ---- what an update changes


def loss_by_hand(run, batches, num_tokens, advantages, ref_logprobs):
    """The loss of a step from `grpo` alone, as the settings name it; the old policy is the one that was recorded."""
    config, total = run.config, 0.0
    for batch in batches:
        logprobs, _ = update.completion_logprobs(run.model, batch, config)
        loss, _ = grpo.policy_loss(
            logprobs,
            batch.sampled_logprobs,
            advantages[batch.rows],
            batch.mask,
            ref_logprobs=None if ref_logprobs is None else ref_logprobs[batch.rows, : logprobs.shape[1]],
            loss=config.loss,
            level=config.level,
            clip_low=config.clip_low,
            clip_high=config.clip_high,
            kl_coef=config.kl_coef,
            max_tokens=config.max_tokens,
            num_items=num_tokens,
        )
        total += loss.item() * grpo.micro_batch_weight(config.loss, len(batch.rows), len(advantages))
    return total


@pytest.mark.parametrize(
    "flags",
    [
        (),
        ("--level", "sequence"),
        ("--clip-low", "0.05", "--clip-high", "0.4"),
        ("--loss", "dr_grpo"),
        ("--loss", "grpo", "--level", "sequence", "--kl-coef", "0.5"),
    ],
)
def test_the_update_minimizes_the_objective_that_the_settings_name(tmp_path, flags):
    """With an old policy that is not the new one, as here, each of these settings changes the loss."""
    run = make_run(tmp_path, "--old-logprobs", "sampler", *flags)
    _, rows, rollout = sample(run)
    shift = mx.random.normal(rollout.logprobs.shape, key=mx.random.key(0)) * 0.5
    rollout = rollout._replace(logprobs=(rollout.logprobs + shift) * rollout.mask)
    advantages = mx.random.normal((12,), key=mx.random.key(1))
    batches = update.micro_batches(rows, rollout, 150)
    ref_logprobs = rollout.logprobs - 0.5 if run.config.kl_coef else None
    expected = loss_by_hand(run, batches, rollout.stats.num_tokens, advantages, ref_logprobs)
    result = update.update(
        run.learner, batches, rollout, advantages, ref_logprobs, update.learning_rate(run.config, run.step)
    )
    assert result.loss == pytest.approx(expected, abs=1e-5)
    assert result.means["clip_frac"] > 0


def test_the_old_policy_is_the_one_that_updates_and_not_the_reference(tmp_path):
    """Once the policy has left its reference, a KL weight of next to nothing must change next to nothing."""
    results = []
    for kl_coef in ("0", "1e-9"):
        run = make_run(tmp_path, "--kl-coef", kl_coef, "--lr", "0.02", "--warmup-steps", "0")
        update_once(run)
        results.append(update_once(run))
    assert results[1].means["kl"] > 0.01
    assert results[1].grad_norm == pytest.approx(results[0].grad_norm, rel=1e-4)
    assert results[1].means["clip_frac"] == 0


def test_an_update_makes_the_better_completions_likelier_and_the_worse_ones_less(tmp_path):
    run = make_run(tmp_path, "--lr", "0.003", "--warmup-steps", "0")
    _, rows, rollout = sample(run)
    advantages = mx.random.normal((12,), key=mx.random.key(3))
    batches = update.micro_batches(rows, rollout, 150)

    def gain():
        total = 0.0
        for batch in batches:
            logprobs, _ = update.completion_logprobs(run.model, batch, run.config)
            total += (logprobs * batch.mask * advantages[batch.rows][:, None]).sum().item()
        return total

    before = gain()
    update.update(run.learner, batches, rollout, advantages, None, update.learning_rate(run.config, run.step))
    assert gain() > before + 1


def test_the_gradient_that_the_optimizer_sees_has_at_most_the_given_norm(tmp_path):
    run = make_run(tmp_path, "--max-grad-norm", "0.01")
    assert update_once(run).grad_norm > 0.05
    moments = [a for name, a in tree_flatten(run.learner.optimizer.state) if name.endswith(".m")]
    assert sum((m**2).sum().item() for m in moments) ** 0.5 == pytest.approx(0.1 * 0.01, rel=1e-3)  # 1 - beta_1 = 0.1


@pytest.mark.parametrize("loss", grpo.LOSSES)
def test_a_step_does_not_depend_on_how_its_rows_are_cut(tmp_path, loss):
    weights, norms = [], []
    for budget in (1, 150, 100_000):
        run = make_run(tmp_path, "--loss", loss)
        norms.append(update_once(run, budget).grad_norm)
        weights.append(run.learner.trainable)
    assert norms == pytest.approx([norms[0]] * 3, rel=1e-5)
    for name, array in weights[0].items():
        for other in weights[1:]:
            np.testing.assert_allclose(np.array(array), np.array(other[name]), atol=2e-5)


def test_every_adapter_moves_and_the_base_does_not(tmp_path):
    run = make_run(tmp_path)
    before = dict(tree_flatten(run.model.parameters()))
    for _ in range(2):  # B is zero at first, so A moves from the second step on
        update_once(run)
    for name, array in tree_flatten(run.model.parameters()):
        assert mx.array_equal(array, before[name]).item() == (".lora_" not in name), name


def test_equal_rewards_change_nothing(tmp_path):
    run = make_run(tmp_path)
    before = dict(run.learner.trainable)
    result = update_once(run, advantages=mx.zeros((12,)))
    assert result.grad_norm == 0
    assert all(mx.array_equal(array, before[name]).item() for name, array in run.learner.trainable.items())


@pytest.mark.parametrize("flags", [(), ("--temp", "0.7"), ("--top-p", "0.8"), ("--top-k", "4")])
def test_the_kl_term_changes_nothing_while_policy_and_reference_agree(tmp_path, flags):
    """The reference is read at the policy's temperature and on its support, or they would not agree."""
    norms = []
    for kl_coef in ("0", "5"):
        run = make_run(tmp_path, "--kl-coef", kl_coef, *flags)
        result = update_once(run)
        norms.append(result.grad_norm)
        assert result.means["kl"] == pytest.approx(0, abs=1e-6)
    assert norms[0] == pytest.approx(norms[1], rel=1e-4)


def test_the_reference_is_the_model_without_its_adapters_and_not_the_old_policy(tmp_path):
    run = make_run(tmp_path, "--kl-coef", "0.1", "--lr", "0.01")
    update_once(run)
    _, rows, rollout = sample(run)
    batches = update.micro_batches(rows, rollout, 100_000)
    ref = update.reference_logprobs(run.learner, batches, rollout)
    base = train.Run(run.config, tmp_path)
    expected = update.reference_logprobs(base.learner, batches, rollout)
    np.testing.assert_allclose(np.array(ref), np.array(expected), atol=1e-5)
    assert (mx.abs(ref - rollout.logprobs) * rollout.mask).max().item() > 1e-3


def test_a_gradient_that_is_not_finite_changes_nothing_and_halves_the_loss_scale(tmp_path):
    run = make_run(tmp_path)
    run.learner.loss_scale = update.LossScale(1024.0, dynamic=True)
    before = dict(run.learner.trainable)
    result = update_once(run, advantages=mx.full((12,), mx.inf))
    assert result.skipped
    assert run.learner.loss_scale.value == 512
    assert all(mx.array_equal(array, before[name]).item() for name, array in run.learner.trainable.items())


def test_the_loss_scale_does_not_change_the_step_and_grows_after_good_ones(tmp_path):
    norms = []
    for value in (1.0, 4096.0):
        run = make_run(tmp_path)
        run.learner.loss_scale = update.LossScale(value, dynamic=True, good_steps=199)
        norms.append(update_once(run).grad_norm)
        assert run.learner.loss_scale == update.LossScale(value * 2, 0, True)
    assert norms[0] == pytest.approx(norms[1], rel=1e-5)


def test_with_rank_0_all_weights_train_from_float32_masters_of_a_16_bit_model(tmp_path, monkeypatch):
    monkeypatch.setenv("GWEN_DTYPE", "float16")
    run = make_run(tmp_path, "--lora-rank", "0", "--lr", "1e-6", "--warmup-steps", "0", "--kl-coef", "0.1")
    assert run.base is not None and run.judge.model is run.base
    assert run.learner.loss_scale.dynamic
    assert {array.dtype for array in run.learner.trainable.values()} == {mx.float32}
    masters = dict(run.learner.trainable)
    result = update_once(run)
    assert result.grad_norm > 0 and not result.skipped
    moved = [name for name, array in run.learner.trainable.items() if not mx.array_equal(array, masters[name])]
    assert set(moved) == set(masters)
    weights = dict(tree_flatten(run.model.parameters()))
    assert {array.dtype for array in weights.values()} == {mx.float16}
    for (
        name,
        array,
    ) in run.learner.trainable.items():  # a step of 1e-6 is lost in most float16 weights, never in the master
        np.testing.assert_array_equal(np.array(weights[name]), np.array(array.astype(mx.float16)))


@pytest.mark.parametrize(("warmup_steps", "lr"), [(0, 0.001), (4, 0.00025)])
def test_the_first_adam_step_has_the_size_of_the_learning_rate(tmp_path, warmup_steps, lr):
    """Without bias correction it would be 3.2 times too large."""
    run = make_run(tmp_path, "--lr", "0.001", "--warmup-steps", f"{warmup_steps}", "--max-grad-norm", "1e9")
    before = dict(run.learner.trainable)
    assert update_once(run).lr == lr
    steps = [mx.abs(run.learner.trainable[n] - before[n]).max().item() for n in before if n.endswith("lora_b")]
    assert max(steps) == pytest.approx(lr, rel=0.02)


def test_with_rank_0_the_head_gets_its_gradient_too(tmp_path):
    """The head is the embedding: through the prompts alone only the rows of their tokens would move."""
    run = make_run(tmp_path, "--lora-rank", "0", "--warmup-steps", "0")
    before = run.learner.trainable["embed_tokens.weight"]
    update_once(run)
    assert (mx.abs(run.learner.trainable["embed_tokens.weight"] - before).max(axis=1) > 0).all().item()


def test_the_learning_rate_warms_up_and_decays():
    config = make_config("--lr", "1.0", "--warmup-steps", "4", "--steps", "14")
    rates = [update.learning_rate(config, step) for step in range(14)]
    assert rates[:5] == [0.25, 0.5, 0.75, 1.0, 1.0]
    assert rates[4:] == sorted(rates[4:], reverse=True)
    assert 0.1 < rates[-1] < 0.2
    constant = make_config("--lr", "1.0", "--lr-schedule", "constant", "--warmup-steps", "4", "--steps", "14")
    assert update.learning_rate(constant, 13) == 1.0


def test_masters_of_a_gradient_too_small_for_float16_still_move(tmp_path, monkeypatch):
    """Scaled by 2^15 the backward pass keeps what float16 alone would round to zero."""
    monkeypatch.setenv("GWEN_DTYPE", "float16")
    tiny = mx.full((12,), 1e-6) * mx.array([1.0, -1.0] * 6)
    norms = {}
    for name, scale in (("scaled", update.LossScale(2.0**15, dynamic=True)), ("plain", update.LossScale())):
        run = make_run(tmp_path)
        run.learner.loss_scale = scale
        norms[name] = update_once(run, advantages=tiny).grad_norm
    monkeypatch.setenv("GWEN_DTYPE", "float32")
    exact = update_once(make_run(tmp_path), advantages=tiny).grad_norm
    assert norms["scaled"] == pytest.approx(exact, rel=0.05)
    assert norms["plain"] < 0.5 * exact
