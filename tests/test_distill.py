"""Distillation on the bundled model: the teacher's predictions, the loss, runs and mistakes."""

import types
import warnings

import mlx.core as mx
import numpy as np
import pytest
from conftest import read_log, write_log
from mlx.utils import tree_flatten
from small_run import SMALL_FLAGS, make_config, make_run, sample_first_prompts
from test_divergence import (
    exact_divergence,
    gradient_by_logits,
    log_softmax,
    relative_error,
)

import config
import gwen
import lora
import train
import update
from disk import hub
from forecast import memory_estimate
from machine import memory
from prompts import chat_template
from step import loss
from step import teacher as distill
from step.batch import completion_hidden_states, make_batches

pytestmark = pytest.mark.slow
DISTILL = ("--loss-type", "distill", "--teacher")


@pytest.fixture(scope="module")
def teacher(tmp_path_factory):
    """The directory of a model that differs from the bundled one in every weight."""
    path = tmp_path_factory.mktemp("teacher") / "model"
    model, tokenizer = gwen.load("demo")
    keys = mx.random.split(mx.random.key(5), 1000)
    weights = []
    for (name, array), key in zip(sorted(tree_flatten(model.parameters())), keys, strict=False):
        noise = mx.random.normal(array.shape, key=key)
        weights.append((name, array * (1 + 0.1 * noise)))
    model.load_weights(weights, strict=False)
    gwen.save(model, path, tokenizer)
    return str(path)


@pytest.fixture
def prompt(tmp_path):
    path = tmp_path / "prompt.txt"
    path.write_text("Carry the one: it is {answer}.\n")
    return str(path)


def change_adapters(run):
    """Gives the adapters of a run random weights, which change the model; returns the run."""
    for number, (_, layer) in enumerate(lora.adapted_layers(run.model)):
        layer.lora_b = 0.05 * mx.random.normal(layer.lora_b.shape, key=mx.random.key(number))
    run.learner = update.Learner(run.model, run.config, run.learner.loss, run.base)
    return run


def make_samples_and_batches(run, budget=150, sharing="off"):
    """Returns samples, and their batches with the teacher's hidden states."""
    samples = sample_first_prompts(run, np.zeros(12))
    batches = make_batches(samples, budget, sharing)
    return samples, run.teacher.add_teacher_states_and_head(samples, batches)


def num_tokens(samples):
    return sum(len(sample.loss_positions) for sample in samples)


def compute_logprobs(model, ids, completion, temperature=1.0):
    """
    Returns float64 log-probabilities over the vocabulary at each token of a completion, (T, V).

    One forward pass for this completion alone computes them.
    """
    logits = model(mx.array([ids + completion]))[0, len(ids) - 1 : -1]
    return log_softmax(np.array(logits, np.float64) / temperature)


# ---- the loss


@pytest.mark.parametrize("sharing", ["off", "on"])
@pytest.mark.parametrize("beta", [0, 0.3, 1])
def test_the_loss_and_its_gradient_equal_float64_results(
    tmp_path, monkeypatch, teacher, beta, sharing
):
    flags = [*DISTILL, teacher, "--distill-beta", str(beta), "--temp", "0.9"]
    run = change_adapters(make_run(tmp_path, *flags))
    samples, batches = make_samples_and_batches(run, sharing=sharing)
    assert len(batches) > 1
    assert (batches[0].prefix is not None) == (sharing == "on")

    step_loss = run.learner.loss
    head = np.array(run.model.head_weight, np.float64)
    teacher_head = np.array(run.teacher.model.head_weight, np.float64)
    total = 0.0
    for batch in batches:
        hidden = completion_hidden_states(run.model, batch)
        teacher_hidden = completion_hidden_states(run.teacher.model, batch)

        def batch_loss(hidden, batch=batch):
            monkeypatch.setattr(loss, "completion_hidden_states", lambda *_: hidden)
            return step_loss.compute_batch_loss(run.model, batch)

        (value, _, sums), d_hidden = mx.value_and_grad(batch_loss)(hidden)

        logits = np.array(hidden, np.float64) @ head.T / 0.9
        teacher_logits = np.array(teacher_hidden, np.float64) @ teacher_head.T / 0.9
        weights = np.array(batch.mask, np.float64) / num_tokens(samples)
        exact = (weights * exact_divergence(logits, teacher_logits, beta)).sum()
        # float32 logits of up to 20 allow no smaller tolerance
        assert abs(value.item() - exact) < 2e-5 * exact
        assert sums["distill/kl"].item() == pytest.approx(exact * num_tokens(samples), rel=2e-5)
        d_logits = weights[..., None] * gradient_by_logits(logits, teacher_logits, beta) / 0.9
        assert relative_error(d_hidden, d_logits @ head) < 1e-4
        total += value.item()
    assert total > 1e-3


# ---- the teacher's input


@pytest.mark.parametrize("has_other_teacher", [False, True])
def test_only_the_teacher_sees_the_teacher_prompt_and_the_teacher_has_no_adapters(
    tmp_path, teacher, prompt, has_other_teacher
):
    name = teacher if has_other_teacher else "self"
    run = change_adapters(make_run(tmp_path, *DISTILL, name, "--teacher-prompt", prompt))
    samples, batches = make_samples_and_batches(run)
    without_adapters = run.teacher.model if has_other_teacher else gwen.load("demo")[0]
    for batch in batches:
        for row, states in zip(batch.rows, batch.lesson.hidden, strict=True):
            example = samples[row].example
            ids = samples[row].response_ids
            teacher_prompt = f"Carry the one: it is {example['answer']}."
            prompt_ids = chat_template.encode_chat(
                run.tokenizer, example["prompt"], system=teacher_prompt, thinking=False
            )
            assert len(prompt_ids) > len(samples[row].prompt)
            logits = np.array(states[: len(ids)] @ batch.lesson.head_weight.T, np.float64)
            expected = compute_logprobs(without_adapters, prompt_ids, ids)
            np.testing.assert_allclose(log_softmax(logits), expected, atol=2e-4)

    # the student saw the prompt of the example, and used the adapters
    batch = batches[0]
    logprobs = run.learner.loss.compute_batch_loss(run.model, batch).logprobs
    differences = np.abs(np.array(logprobs) - np.array(batch.sampled_logprobs))
    assert differences[np.array(batch.mask) > 0].max() < 1e-4


def test_a_replayed_sample_may_have_the_group_of_another_prompt(tmp_path, prompt):
    run = make_run(tmp_path, *DISTILL, "self", "--teacher-prompt", prompt)
    samples = sample_first_prompts(run, np.zeros(12))
    assert len({tuple(sample.prompt) for sample in samples}) > 1
    in_one_group = [sample._replace(group=0) for sample in samples]
    batches = make_batches(samples, 150)

    expected = run.teacher.add_teacher_states_and_head(samples, batches)
    regrouped = run.teacher.add_teacher_states_and_head(in_one_group, batches)

    for batch, other in zip(expected, regrouped, strict=True):
        mask = np.array(batch.mask)[..., None]
        np.testing.assert_allclose(
            np.array(other.lesson.hidden) * mask, np.array(batch.lesson.hidden) * mask, atol=1e-4
        )


def test_a_copy_of_the_model_teaches_if_all_weights_are_trained(tmp_path, prompt):
    run = make_run(tmp_path, *DISTILL, "self", "--teacher-prompt", prompt, "--lora-rank", "0")
    assert run.teacher.model is run.base
    assert run.base is not run.model


def test_the_teacher_prompt_precedes_the_system_message_and_keeps_unknown_names():
    text = "It is {answer}, not {other}."
    example = {"prompt": "How many?", "answer": 7}
    teacher_message = {"role": "system", "content": "It is 7, not {other}."}
    user = {"role": "user", "content": "How many?"}
    result = distill.prepend_to_system_message(text, example)
    assert result["prompt"] == [teacher_message, user]

    both = {"role": "system", "content": "It is 7, not {other}.\n\nBe brief."}
    result = distill.prepend_to_system_message(text, example | {"system": "Be brief."})
    assert result["prompt"] == [both, user]

    chat = [{"role": "system", "content": "Be brief."}, user]
    result = distill.prepend_to_system_message(text, example | {"prompt": chat})
    assert result["prompt"] == [both, user]
    assert result["system"] is None
    assert chat[0]["content"] == "Be brief."  # the chat of the example has not changed


# ---- a run


def test_prompts_without_answers_are_enough(tmp_path, teacher, capsys):
    data = write_log(
        tmp_path / "prompts.jsonl", [{"prompt": f"What is {n} plus one?"} for n in range(20)]
    )
    flags = [
        "--data",
        data,
        "--run-dir",
        str(tmp_path / "run"),
        *"--eval-every 1 --steps 2".split(),
    ]
    train.main([*SMALL_FLAGS, *DISTILL, teacher, *flags])

    metrics = read_log(tmp_path / "run" / "metrics.jsonl")
    for record in metrics:
        assert record["loss"] == pytest.approx(record["distill/kl"], rel=1e-5)
        assert record["teacher/s"] > 0
    empty = {
        "reward/mean",
        "reward/std",
        "reward/zero_std_frac",
        "sampling/signal_groups",
        "kl",
        "clip_frac",
    }
    empty |= {
        f"judge/{name}" for name in ("crit_eval_s", "unparsed", "unparsed_frac", "mass", "cached")
    }
    assert {name for name, value in metrics[0].items() if value is None} == empty
    assert all(record["eval/score"] is None for record in read_log(tmp_path / "run" / "eval.jsonl"))
    assert "step 2/2 | loss" in capsys.readouterr().out
    assert (tmp_path / "run" / "report.html").is_file()


def test_a_teacher_needs_no_groups(tmp_path, teacher):
    flags = [*SMALL_FLAGS, "--groups", "1", *DISTILL, teacher, "--eval-every", "0", "--steps", "1"]
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # numpy warns of the standard deviation of a single number
        train.main([*flags, "--run-dir", str(tmp_path / "run")])
    metrics = read_log(tmp_path / "run" / "metrics.jsonl")[0]
    empty = ("reward/std", "reward/zero_std_frac", "sampling/signal_groups")
    assert [metrics[name] for name in empty] == [None] * 3
    assert metrics["distill/kl"]
    rollouts = read_log(tmp_path / "run" / "rollouts.jsonl")
    assert [record["advantage"] for record in rollouts] == [0.0] * 3


def test_rewards_are_computed_but_a_judge_is_loaded_only_if_a_rubric_is_set(tmp_path, teacher):
    run = make_run(tmp_path, *DISTILL, teacher)
    assert list(run.task.rewards) == ["correct"]
    assert run.judge is None
    run = make_run(tmp_path, *DISTILL, teacher, "--rubric", "data/demo_rubric.yaml")
    assert run.judge is not None


# ---- mistakes


def test_the_error_for_a_missing_teacher_names_the_teacher_flag(tmp_path):
    with pytest.raises(ValueError, match=r"^--teacher \./nobody is neither an existing directory"):
        make_run(tmp_path, *DISTILL, "./nobody")


def make_tokenizer(vocab, special=(0,)):
    return types.SimpleNamespace(get_vocab=lambda: vocab, all_special_ids=list(special))


@pytest.mark.parametrize(
    "vocab, special, message",
    [
        ({"a": 0, "c": 1}, (0,), "id 1 is 'c' .* and 'b' in the student's"),
        ({"a": 0}, (0,), "id 1 is None .* and 'b'"),
        ({"a": 0, "b": 1, "c": 7}, (0,), "id 7 is 'c' .* and None"),
        ({"a": 0, "b": 1}, (0, 1), "special tokens are \\[0, 1\\] .* \\[0\\]"),
    ],
)
def test_the_error_for_another_tokenizer_names_the_first_difference(vocab, special, message):
    student = make_tokenizer({"a": 0, "b": 1})
    distill.check_tokenizers_are_equal("T", student, make_tokenizer({"b": 1, "a": 0}))
    with pytest.raises(
        ValueError, match=f"^--teacher T: .*{message}.*; use a teacher with the same tokenizer$"
    ):
        distill.check_tokenizers_are_equal("T", student, make_tokenizer(vocab, special))


def test_a_teacher_prompt_needs_a_chat_template_with_system_messages(tmp_path, monkeypatch, prompt):
    encode_chat = chat_template.encode_chat

    def encode_without_system(tokenizer, messages, **settings):
        if not isinstance(messages, str):
            messages = [message for message in messages if message["role"] != "system"]
        return encode_chat(tokenizer, messages, **settings)

    monkeypatch.setattr(chat_template, "encode_chat", encode_without_system)
    with pytest.raises(
        ValueError,
        match=r"^--teacher-prompt .*: the chat template of demo .*system messages",
    ):
        make_run(tmp_path, *DISTILL, "self", "--teacher-prompt", prompt)


def test_the_file_of_the_teacher_prompt_must_exist_and_contain_text(tmp_path):
    missing = tmp_path / "nothing.txt"
    empty = tmp_path / "empty.txt"
    empty.write_text(" \n")
    for path, message in ((missing, "cannot be read"), (empty, "is empty")):
        with pytest.raises(ValueError, match=f"^--teacher-prompt {path} {message}"):
            make_run(tmp_path, *DISTILL, "self", "--teacher-prompt", str(path))


# ---- memory


def test_the_memory_line_says_that_a_large_teacher_does_not_fit(monkeypatch, teacher):
    shape = hub.load_config(hub.DEMO)
    sizes = config.MemoryDependentSizes(12, 1024, 0)
    teachers = {"demo": teacher, "large": "random:0.6b"}
    lines = {}
    estimates = {}
    for name, model in teachers.items():
        demand = memory_estimate.RunDemand(
            shape, mx.float32, make_config(*DISTILL, model), [80] * 3
        )
        estimates[name] = memory_estimate.estimate_memory(demand, sizes)
        monkeypatch.setattr(memory, "usable_memory_bytes", lambda: 1_000_000_000)
        lines[name] = memory_estimate.format_memory_line(demand, sizes)
    weights = sum(array.nbytes for _, array in tree_flatten(gwen.Model(shape).parameters()))
    assert estimates["demo"].resident["teacher"] == weights + 4 * shape.hidden_size * 12 * 12
    assert "fit" not in lines["demo"]
    assert lines["large"].endswith("; it does not fit: use a smaller --teacher")
