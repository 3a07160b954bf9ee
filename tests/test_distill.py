"""What a teacher says of the student's completions, and what becomes of it, on the bundled model."""

import types
import warnings

import mlx.core as mx
import numpy as np
import pytest
from conftest import read_log, write_log
from mlx.utils import tree_flatten
from small_run import SMALL_FLAGS, make_config, make_run, sample_first_prompts
from test_divergence import error, gradient_by_logits, log_softmax, written_out

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
    changed = [
        (name, array * (1 + 0.1 * mx.random.normal(array.shape, key=key)))
        for (name, array), key in zip(sorted(tree_flatten(model.parameters())), keys, strict=False)
    ]
    model.load_weights(changed, strict=False)
    gwen.save(model, path, tokenizer)
    return str(path)


@pytest.fixture
def prompt(tmp_path):
    path = tmp_path / "prompt.txt"
    path.write_text("Carry the one: it is {answer}.\n")
    return str(path)


def moved(run):
    """The run, once its adapters have changed the model."""
    for number, (_, layer) in enumerate(lora.adapted_layers(run.model)):
        layer.lora_b = 0.05 * mx.random.normal(layer.lora_b.shape, key=mx.random.key(number))
    run.learner = update.Learner(run.model, run.config, run.learner.loss, run.base)
    return run


def lesson_of(run, budget=150, sharing="off"):
    """Samples and their batches, with what the teacher says of them."""
    samples = sample_first_prompts(run, np.zeros(12))
    return samples, run.teacher.add_teacher_hidden_states(
        samples, make_batches(samples, budget, sharing)
    )


def num_items(samples):
    return sum(len(sample.loss_positions) for sample in samples)


def scored_alone(model, ids, completion, temperature=1.0):
    """float64 log-probabilities over the vocabulary at each token of a completion, (T, V), by a plain forward pass."""
    logits = model(mx.array([ids + completion]))[0, len(ids) - 1 : -1]
    return log_softmax(np.array(logits, np.float64) / temperature)


# ---- the loss


@pytest.mark.parametrize("sharing", ["off", "on"])
@pytest.mark.parametrize("beta", [0, 0.3, 1])
def test_the_loss_and_its_gradient_are_those_of_float64(
    tmp_path, monkeypatch, teacher, beta, sharing
):
    run = moved(make_run(tmp_path, *DISTILL, teacher, "--distill-beta", str(beta), "--temp", "0.9"))
    samples, batches = lesson_of(run, sharing=sharing)
    assert len(batches) > 1 and (batches[0].prefix is not None) == (sharing == "on")
    step_loss = run.learner.loss
    head, its_head = (
        np.array(w, np.float64) for w in (run.model.head_weight, run.teacher.model.head_weight)
    )
    total = 0.0
    for batch in batches:
        states, teacher_hidden = (
            completion_hidden_states(m, batch) for m in (run.model, run.teacher.model)
        )

        def share(states, batch=batch):
            monkeypatch.setattr(loss, "completion_hidden_states", lambda *_: states)
            return step_loss.compute_batch_loss(run.model, batch)

        (value, _, sums), d_hidden = mx.value_and_grad(lambda h: share(h))(states)
        logits, teacher_logits = (
            np.array(states, np.float64) @ head.T / 0.9,
            np.array(teacher_hidden, np.float64) @ its_head.T / 0.9,
        )
        weights = np.array(batch.mask, np.float64) / num_items(samples)
        exact = (weights * written_out(logits, teacher_logits, beta)).sum()
        assert (
            abs(value.item() - exact) < 2e-5 * exact
        )  # float32 logits of up to 20 allow no better
        assert sums["distill/kl"].item() == pytest.approx(exact * num_items(samples), rel=2e-5)
        d_logits = weights[..., None] * gradient_by_logits(logits, teacher_logits, beta) / 0.9
        assert error(d_hidden, d_logits @ head) < 1e-4
        total += value.item()
    assert total > 1e-3


# ---- what the teacher reads


@pytest.mark.parametrize("other", [False, True])
def test_the_teacher_alone_sees_its_prompt_and_has_no_adapters(tmp_path, teacher, prompt, other):
    run = moved(
        make_run(tmp_path, *DISTILL, teacher if other else "self", "--teacher-prompt", prompt)
    )
    samples, batches = lesson_of(run)
    plain = run.teacher.model if other else gwen.load("demo")[0]
    for batch in batches:
        for row, states in zip(batch.rows, batch.lesson.hidden, strict=True):
            example, ids = samples[row].example, samples[row].response_ids
            teacher_prompt = f"Carry the one: it is {example['answer']}."
            seen = chat_template.encode_chat(
                run.tokenizer, example["prompt"], system=teacher_prompt, thinking=False
            )
            assert len(seen) > len(samples[row].prompt)
            logits = np.array(states[: len(ids)] @ batch.lesson.head_weight.T, np.float64)
            np.testing.assert_allclose(
                log_softmax(logits), scored_alone(plain, seen, ids), atol=2e-4
            )
    share = run.learner.loss.compute_batch_loss(run.model, batches[0])
    drawn = np.array(
        batches[0].sampled_logprobs
    )  # the student saw its own prompt, through its adapters
    assert np.abs(np.array(share.logprobs) - drawn)[np.array(batches[0].mask) > 0].max() < 1e-4


def test_a_replayed_sample_may_have_the_group_of_another_prompt(tmp_path, prompt):
    run = make_run(tmp_path, *DISTILL, "self", "--teacher-prompt", prompt)
    samples = sample_first_prompts(run, np.zeros(12))
    assert len({tuple(sample.prompt) for sample in samples}) > 1
    in_one_group = [sample._replace(group=0) for sample in samples]
    batches = make_batches(samples, 150)
    shown, same = (
        run.teacher.add_teacher_hidden_states(rows, batches) for rows in (samples, in_one_group)
    )
    for batch, other in zip(shown, same, strict=True):
        mask = np.array(batch.mask)[..., None]
        np.testing.assert_allclose(
            np.array(other.lesson.hidden) * mask, np.array(batch.lesson.hidden) * mask, atol=1e-4
        )


def test_all_weights_are_trained_beside_a_copy_of_them_that_teaches(tmp_path, prompt):
    run = make_run(tmp_path, *DISTILL, "self", "--teacher-prompt", prompt, "--lora-rank", "0")
    assert run.teacher.model is run.base is not run.model


def test_what_stands_in_front_keeps_the_system_message_and_names_of_no_column():
    text = "It is {answer}, not {other}."
    plain = {"prompt": "How many?", "answer": 7}
    system_message = {"role": "system", "content": "It is 7, not {other}."}
    user = {"role": "user", "content": "How many?"}
    assert distill.prepend_to_system_message(text, plain)["prompt"] == [system_message, user]
    both = {"role": "system", "content": "It is 7, not {other}.\n\nBe brief."}
    assert distill.prepend_to_system_message(text, plain | {"system": "Be brief."})["prompt"] == [
        both,
        user,
    ]
    chat = [{"role": "system", "content": "Be brief."}, user]
    example = distill.prepend_to_system_message(text, plain | {"prompt": chat})
    assert (
        example["prompt"] == [both, user]
        and example["system"] is None
        and chat[0]["content"] == "Be brief."
    )


# ---- a run


def test_prompts_alone_are_enough(tmp_path, teacher, capsys):
    data = write_log(
        tmp_path / "prompts.jsonl", [{"prompt": f"What is {n} plus one?"} for n in range(20)]
    )
    flags = [
        "--data",
        data,
        "--eval-every",
        "1",
        "--steps",
        "2",
        "--run-dir",
        str(tmp_path / "run"),
    ]
    train.main([*SMALL_FLAGS, *DISTILL, teacher, *flags])
    metrics = read_log(tmp_path / "run" / "metrics.jsonl")
    for record in metrics:
        assert (
            record["loss"] == pytest.approx(record["distill/kl"], rel=1e-5)
            and record["teacher/s"] > 0
        )
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
        warnings.simplefilter("error")  # as of a deviation of one number
        train.main([*flags, "--run-dir", str(tmp_path / "run")])
    metrics = read_log(tmp_path / "run" / "metrics.jsonl")[0]
    empty = ("reward/std", "reward/zero_std_frac", "sampling/signal_groups")
    assert [metrics[name] for name in empty] == [None] * 3 and metrics["distill/kl"]
    assert [record["advantage"] for record in read_log(tmp_path / "run" / "rollouts.jsonl")] == [
        0.0
    ] * 3


def test_rewards_are_only_looked_at_and_nobody_is_asked_to_judge(tmp_path, teacher):
    run = make_run(tmp_path, *DISTILL, teacher)
    assert list(run.task.rewards) == ["correct"] and run.judge is None
    run = make_run(tmp_path, *DISTILL, teacher, "--rubric", "data/demo_rubric.yaml")
    assert run.judge is not None


# ---- mistakes


def test_a_teacher_that_is_not_there_is_named_with_its_own_flag(tmp_path):
    with pytest.raises(ValueError, match=r"^--teacher \./nobody is neither an existing directory"):
        make_run(tmp_path, *DISTILL, "./nobody")


def tokenizer_with(vocab, special=(0,)):
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
def test_another_tokenizer_is_refused_with_its_first_difference(vocab, special, message):
    ours = tokenizer_with({"a": 0, "b": 1})
    distill.check_tokenizers_are_equal("T", ours, tokenizer_with({"b": 1, "a": 0}))
    with pytest.raises(
        ValueError, match=f"^--teacher T: .*{message}.*; use a teacher with the same tokenizer$"
    ):
        distill.check_tokenizers_are_equal("T", ours, tokenizer_with(vocab, special))


def test_a_template_without_system_messages_cannot_set_the_teacher_apart(
    tmp_path, monkeypatch, prompt
):
    chat_ids = chat_template.encode_chat

    def without_system(tokenizer, messages, **settings):
        if not isinstance(messages, str):
            messages = [message for message in messages if message["role"] != "system"]
        return chat_ids(tokenizer, messages, **settings)

    monkeypatch.setattr(chat_template, "encode_chat", without_system)
    with pytest.raises(
        ValueError,
        match=r"^--teacher-prompt .*: the chat template of demo .*system messages",
    ):
        make_run(tmp_path, *DISTILL, "self", "--teacher-prompt", prompt)


def test_a_prompt_file_must_be_there_and_say_something(tmp_path):
    for path, message in (
        (tmp_path / "nothing.txt", "cannot be read"),
        (tmp_path / "empty.txt", "is empty"),
    ):
        if message == "is empty":
            path.write_text(" \n")
        with pytest.raises(ValueError, match=f"^--teacher-prompt {path} {message}"):
            make_run(tmp_path, *DISTILL, "self", "--teacher-prompt", str(path))


# ---- memory


def test_a_teacher_that_does_not_fit_is_told_so_before_it_is_asked(monkeypatch, teacher):
    shape, sizes = hub.load_config(hub.DEMO), config.MemoryDependentSizes(12, 1024, 0)
    teachers = {"demo": teacher, "large": "random:0.6b"}
    lines, needs = {}, {}
    for name, model in teachers.items():
        demand = memory_estimate.RunDemand(
            shape, mx.float32, make_config(*DISTILL, model), [80] * 3
        )
        needs[name] = memory_estimate.estimate_memory(demand, sizes)
        monkeypatch.setattr(memory, "usable_memory_bytes", lambda: 1_000_000_000)
        lines[name] = memory_estimate.format_memory_line(demand, sizes)
    weights = sum(array.nbytes for _, array in tree_flatten(gwen.Model(shape).parameters()))
    assert needs["demo"].resident["teacher"] == weights + 4 * shape.hidden_size * 12 * 12
    assert "fit" not in lines["demo"] and lines["large"].endswith(
        "; it does not fit: use a smaller --teacher"
    )
