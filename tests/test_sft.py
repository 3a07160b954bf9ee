"""Supervised fine-tuning: loss, ids of conversations, runs; and runs with an initial adapter."""

import copy
import json
import math
import shutil

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from conftest import catch_message, read_log, read_untimed_log, write_log
from mlx.utils import tree_flatten
from mlx_lm.utils import load_model as mlx_lm_load_model
from small_run import resolve_settings

import evaluate
import gwen
import report
import train
import update
from config import Config, MemoryDependentSizes
from disk import hub, run_files
from evaluation.score_task import evaluate_loss_on_replies
from prompts import chat_template, chats
from prompts.chats import TrainingRow
from run import make_run
from settings.sources import parse_flags, settings_from_flags
from step.batch import make_batches
from step.loss import StepLoss
from step.sample import sample_from_conversation

SIZES = MemoryDependentSizes(1, 1024, 0)
TALK = [
    {"role": "user", "content": "What is one and two?"},
    {"role": "assistant", "content": "It is three."},
    {"role": "user", "content": "And two and two?"},
    {"role": "assistant", "content": "Four."},
]
# Qwen3's rule: only a reply after the last question keeps its thought, even an empty one
REWRITING_TEMPLATE = (
    "{%- set ns = namespace(last=0) %}{%- for m in messages %}{%- if m.role == 'user' %}"
    "{%- set ns.last = loop.index0 %}{%- endif %}{%- endfor %}"
    "{%- for m in messages %}{{- '<|im_start|>' + m.role + '\\n' }}"
    "{%- if m.role == 'assistant' and loop.index0 > ns.last and '<think>' not in m.content %}"
    "{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}"
    "{{- m.content + '<|im_end|>\\n' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}"
    "{%- if enable_thinking is false %}"
    "{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}{%- endif %}"
)


def random_rows(vocab, num=6):
    """Rows of random ids and lengths, each with two spans of trained tokens."""
    rng = np.random.default_rng(3)
    rows = []
    for _ in range(num):
        length = int(rng.integers(8, 20))
        begin, end = sorted(int(x) for x in rng.choice(np.arange(1, length - 3), 2, replace=False))
        places = [*range(begin, end), length - 2, length - 1]
        rows.append(TrainingRow(rng.integers(3, vocab, length).tolist(), places))
    return rows


def make_row_batches(rows, token_budget):
    return make_batches([sample_from_conversation(*row) for row in rows], token_budget)


def count_trained_tokens(rows):
    return sum(len(row.places) for row in rows)


def encode_record(tokenizer, record, thinking=False, context=1000):
    end_ids = {tokenizer.eos_token_id}
    return chats.encode_conversation(
        tokenizer,
        chats.read_conversation_example(record),
        thinking=thinking,
        end_ids=end_ids,
        context=context,
    )


def decode_trained_spans(tokenizer, row):
    """The texts of the spans of trained tokens."""
    spans = np.split(np.array(row.places), np.flatnonzero(np.diff(row.places) > 1) + 1)
    ids = np.array(row.ids)
    return [tokenizer.decode(ids[span].tolist()) for span in spans]


# ---- conversations


def test_a_reply_is_trained_up_to_the_end_token_after_the_ids_of_the_sampled_prompt(tokenizer):
    record = {"prompt": "What is one and two?", "completion": "It is three."}
    (row,) = encode_record(tokenizer, record)
    prompt = chat_template.encode_chat(tokenizer, "What is one and two?")
    assert row.ids[: row.places[0]] == prompt
    assert row.places == list(range(len(prompt), len(row.ids)))
    assert decode_trained_spans(tokenizer, row) == ["It is three.<|im_end|>"]


def test_messages_and_prompt_with_completion_give_the_same_row(tokenizer):
    text_record = {"prompt": TALK[0]["content"], "completion": TALK[1]["content"]}
    (row,) = encode_record(tokenizer, text_record)
    assert encode_record(tokenizer, {"messages": TALK[:2]}) == [row]
    assert encode_record(tokenizer, {"prompt": TALK[:1], "completion": TALK[1:2]}) == [row]

    # The last message is a question without an answer.
    assert encode_record(tokenizer, {"messages": TALK[:3]}) == [row]


def test_all_replies_of_a_completion_are_trained_and_no_replies_of_a_prompt(tokenizer):
    (row,) = encode_record(tokenizer, {"messages": TALK}, thinking=True)
    spans = decode_trained_spans(tokenizer, row)
    assert spans == ["It is three.<|im_end|>", "Four.<|im_end|>"]
    text = chat_template.render_chat(tokenizer, TALK, True, add_generation_prompt=False)
    assert row.ids == tokenizer.encode(text.removesuffix("\n"), add_special_tokens=False)

    record = {"prompt": TALK[:3], "completion": TALK[3:]}
    (last_row,) = encode_record(tokenizer, record, thinking=True)
    assert last_row.ids == row.ids
    assert decode_trained_spans(tokenizer, last_row) == ["Four.<|im_end|>"]


def test_each_reply_becomes_a_row_if_a_template_rewrites_earlier_messages(tokenizer):
    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.chat_template = REWRITING_TEMPLATE
    rows = encode_record(tokenizer, {"messages": TALK})
    spans_of_rows = [decode_trained_spans(tokenizer, row) for row in rows]
    assert spans_of_rows == [["It is three.<|im_end|>"], ["Four.<|im_end|>"]]
    for row, messages in zip(rows, (TALK[:1], TALK[:3]), strict=True):
        assert row.ids[: row.places[0]] == chat_template.encode_chat(tokenizer, messages)


@pytest.mark.parametrize(
    ("record", "expected_text"),
    [
        ({"prompt": "Hi", "completion": "<think>one</think>two"}, "--thinking"),
        ({"prompt": "Hi", "completion": "two!\n" * 400}, "context has 1000"),
        ({"prompt": "Hi"}, "['prompt']"),
        ({"messages": TALK[:1]}, "assistant"),
        ({"messages": [TALK[1]]}, "message 1 of the conversation has the role 'assistant'"),
        (
            {"messages": [*TALK[:1], {"role": "tool", "content": "1"}, TALK[1]]},
            "message 2 of the conversation",
        ),
        (
            {"messages": [*TALK[:1], {"role": "assistant", "content": " "}]},
            "content of message 2 of the conversation",
        ),
        (
            {"messages": TALK, "chat_template_kwargs": ["x"]},
            "chat_template_kwargs ['x'] is a list",
        ),
        ({"messages": TALK, "tools": ["x"]}, "column tools contains 'x'"),
        ({"prompt": 3, "completion": "x"}, "prompt 3 has the type int"),
        (
            {"system": "s", "messages": [{"role": "system", "content": "t"}, *TALK]},
            "system",
        ),
    ],
)
def test_a_conversation_that_does_not_say_what_to_train_is_refused(
    tokenizer, record, expected_text
):
    assert expected_text in catch_message(encode_record, tokenizer, record)


@pytest.mark.parametrize(
    ("completion", "expected_text"),
    [
        ({"item": "caf\u00e9", "count": 5}, '{"item": "caf\u00e9", "count": 5}'),
        (42, "42"),
        ({"role": "assistant", "content": "Two."}, "Two."),
    ],
    ids=["object", "number", "message"],
)
def test_a_completion_that_is_an_object_or_a_number_is_read_as_an_answer_is(
    completion, expected_text
):
    conversation = chats.read_conversation_example({"prompt": "Hi", "completion": completion})
    assert conversation["completion"] == [{"role": "assistant", "content": expected_text}]


def test_a_template_that_drops_a_part_of_a_reply_or_renders_its_past_in_two_ways_is_refused(
    tokenizer,
):
    record = {"messages": TALK[:2]}
    template = tokenizer.chat_template
    tokenizer = copy.deepcopy(tokenizer)

    tokenizer.chat_template = template.replace("+ message.content", "+ message.content[:5]")
    assert "drops a part of" in catch_message(encode_record, tokenizer, record)

    prefix = "{%- if not add_generation_prompt %}{{- 'x' }}{%- endif %}"
    tokenizer.chat_template = prefix + template
    assert "renders the messages before" in catch_message(encode_record, tokenizer, record)


# ---- the loss


def sum_losses(model, rows):
    """The sum of -log softmax of the model's logits at the trained tokens, in float64."""
    total = 0.0
    for row in rows:
        logits = np.array(model(mx.array([row.ids]))[0]).astype(np.float64)
        for place in row.places:
            scores = logits[place - 1]
            log_normalizer = np.log(np.exp(scores - scores.max()).sum()) + scores.max()
            total += log_normalizer - scores[row.ids[place]]
    return total


@pytest.mark.parametrize("name", ["qwen2.5", "qwen3"])
def test_loss_and_gradient_equal_those_of_mlx_lm_for_all_micro_batch_sizes(checkpoints, name):
    mlx_lm_model, _ = mlx_lm_load_model(checkpoints[name])
    mlx_lm_model.set_dtype(mx.float32)
    rows = random_rows(320)
    num_tokens = count_trained_tokens(rows)

    def mean_loss(model):
        total = mx.array(0.0)
        for row in rows:
            ids = mx.array(row.ids)
            places = mx.array(row.places)
            logits = model(ids[None])[0]
            total += nn.losses.cross_entropy(logits[places - 1], ids[places]).sum()
        return total / num_tokens

    _, mlx_lm_gradients = nn.value_and_grad(mlx_lm_model, mean_loss)(mlx_lm_model)
    expected_gradients = dict(tree_flatten(mlx_lm_gradients))
    expected_loss = sum_losses(mlx_lm_model, rows) / num_tokens

    model = gwen.load_model(checkpoints[name])
    config = Config.from_flags(loss_type="sft", lora_rank=0)
    learner = update.Learner(model, config, StepLoss(config, SIZES))
    for budget, num_batches in ((1, 6), (40, 3), (10_000, 1)):
        batches = make_row_batches(rows, budget)
        assert len(batches) == num_batches
        gradient_tree, _, stats = update.compute_gradient(learner, batches)
        assert stats["loss"] == pytest.approx(expected_loss, rel=1e-5)
        gradients = hub.unfuse_weights(dict(tree_flatten(gradient_tree)), model.config)
        assert set(gradients) == set(expected_gradients)
        for weight, expected in expected_gradients.items():
            error = mx.linalg.norm(gradients[weight] - expected) / mx.linalg.norm(expected)
            assert error.item() < 1e-5, weight


def test_the_held_out_loss_is_the_mean_of_all_trained_tokens_with_the_interval_of_a_ratio(
    checkpoints,
):
    model = gwen.load_model(checkpoints["qwen3"])
    rows = random_rows(320)
    conversations = [rows[:2], rows[2:3], rows[3:]]
    step_loss = StepLoss(Config.from_flags(loss_type="sft"), SIZES)

    record = evaluate_loss_on_replies(model, step_loss, conversations, 40)

    token_counts = np.array([count_trained_tokens(part) for part in conversations])
    loss_sums = np.array([sum_losses(model, part) for part in conversations])
    num_tokens = count_trained_tokens(rows)
    loss = loss_sums.sum() / num_tokens
    assert record["eval/loss"] == pytest.approx(loss, rel=1e-5)
    assert record["eval/perplexity"] == pytest.approx(math.exp(loss), rel=1e-5)
    assert record["eval/num"] == 3
    assert record["eval/tokens"] == num_tokens / 3

    residuals = loss_sums - loss * token_counts
    half_width = 1.96 * np.std(residuals, ddof=1) * 3**0.5 / num_tokens
    assert record["eval/loss_ci95"] == pytest.approx(half_width, rel=1e-4)


# ---- settings


def sft_settings(flags):
    return settings_from_flags(
        parse_flags(["--model", "demo", "--loss-type", "sft", *flags.split()])
    )


@pytest.mark.parametrize(
    ("flags", "expected_text"),
    [
        (
            "--groups 8 --temp 1",
            "--groups 8 is for runs that sample completions, --temp 1.0 is for runs that sample "
            "completions; --loss-type sft",
        ),
        (
            "--target-kl 0.01",
            "--target-kl 0.01 is for runs that sample completions; --loss-type sft",
        ),
        (
            "--init-adapter x --lora-rank 0",
            "--init-adapter x cannot be combined with --lora-rank 0",
        ),
    ],
)
def test_flags_that_sft_cannot_use_are_refused_by_name(flags, expected_text):
    settings = sft_settings(f"--data x.jsonl {flags}")
    assert expected_text in catch_message(resolve_settings, settings)


def test_sft_needs_data_and_the_line_about_the_model_names_data_and_recipe():
    assert "--loss-type sft needs --data" in catch_message(resolve_settings, sft_settings(""))
    _, line = resolve_settings(sft_settings("--data x.jsonl"))
    assert line.startswith("model: demo, ")
    assert "; replies: x.jsonl; task: own, with recipes/demo.yaml: --batch 8 --steps" in line


def test_sft_ignores_the_settings_for_sampling_of_the_environment_and_of_recipes(monkeypatch):
    monkeypatch.setenv("RUBRIC_JUDGE_BATCH_SIZE", "7")
    config, _ = resolve_settings(sft_settings("--data x.jsonl"))
    assert config.sampling.max_tokens == 256
    assert config.judge.chunk_size == 24
    assert config.optimizer.learning_rate == 0.004, "the recipe sets the learning rate"


# ---- runs; test_golden.py checks one more


@pytest.mark.slow
def test_a_run_lowers_the_held_out_loss_and_reports_include_it(golden, tmp_path, capsys):
    run_dir = shutil.copytree(golden("sft"), tmp_path / "run")
    evaluations = read_log(run_dir / "eval.jsonl")
    assert evaluations[-1]["eval/loss"] < 0.9 * evaluations[0]["eval/loss"]
    first_step = read_log(run_dir / "metrics.jsonl")[0]
    assert first_step["reward/mean"] is None
    assert first_step["grad_norm"] > 0

    report.main(["--compare", str(run_dir), str(run_dir)])
    report.main(["--list", str(tmp_path)])
    output = capsys.readouterr().out
    assert "held-out loss before" in output
    assert "tokens trained" in output


@pytest.mark.slow
def test_the_initial_adapter_of_a_run_is_the_reference_also_after_a_resume(golden, tmp_path):
    source = shutil.copytree(golden("sft") / "adapter", tmp_path / "source")
    run_dir = tmp_path / "run"
    flags = "--model demo --batch 2 --groups 2 --max-tokens 12 --eval-limit 8 --eval-every 1"
    run_flags = f"--beta 0.1 --steps 2 --save-every 1 --init-adapter {source} --run-dir {run_dir}"
    train.main([*flags.split(), *run_flags.split()])
    steps = read_untimed_log(run_dir / "metrics.jsonl")
    evaluations = read_untimed_log(run_dir / "eval.jsonl")

    # The KL is measured from the initial adapter, not from the base model.
    assert abs(steps[0]["kl"]) < 1e-6
    assert abs(evaluations[0]["eval/kl"]) < 1e-6
    assert evaluations[-1]["eval/kl"] > 1e-6

    # The run keeps a copy of the adapter.
    copy_dir = run_dir / run_files.START
    weights = mx.load(str(source / "adapters.safetensors"))
    copied_weights = mx.load(str(copy_dir / "adapters.safetensors"))
    for name, array in weights.items():
        assert mx.array_equal(array, copied_weights[name]), name
    # A resumed run needs only the copy.
    shutil.rmtree(source)
    shutil.rmtree(run_dir / "checkpoints" / "step-000002")
    train.main(["--resume", str(run_dir)])
    assert read_untimed_log(run_dir / "metrics.jsonl") == steps
    assert read_untimed_log(run_dir / "eval.jsonl") == evaluations
    assert run_files.adapter_path_at_step(str(run_dir), 0) == str(copy_dir)


@pytest.mark.slow
def test_a_run_warns_about_held_out_prompts_that_the_run_of_the_initial_adapter_trained_on(
    golden, tmp_path, capsys
):
    def make_rows(held_out, system=None):
        rows = []
        for number in range(12):
            prompt = f"What is {number} plus {number}?"
            if system:
                prompt = [
                    {"role": "system", "content": system},
                    {"role": "user", "content": prompt},
                ]
            split = "test" if number in held_out else "train"
            rows.append({"prompt": prompt, "completion": "Two.", "split": split})
        return rows

    def warnings_at_start(adapter_or_run, flags, rows):
        data = write_log(tmp_path / "now.jsonl", rows)
        all_flags = f"--model demo --init-adapter {adapter_or_run} --data {data} {flags}"
        config, _ = resolve_settings(settings_from_flags(parse_flags(all_flags.split())))
        make_run(config, tmp_path / "now")
        return [line for line in capsys.readouterr().out.splitlines() if "trained on" in line]

    # an earlier run with sft
    sft_run = golden("sft")
    rows = make_rows(range(6), "Be brief.")
    (warning,) = warnings_at_start(sft_run / "adapter", "--reward length:9", rows)
    assert warning.startswith(f"WARNING: {sft_run} was trained on 6 of the 6 held-out prompts, ")
    assert "hold out the same rows in both runs" in warning
    assert "split" in warning

    # an earlier run with rewards
    reward_run = shutil.copytree(sft_run, tmp_path / "before")
    data = write_log(tmp_path / "before.jsonl", make_rows(range(4)))
    (reward_run / "config.yaml").write_text(
        f"model: demo\ntask: own\ndata: {data}\nreward: ['gone.py:score']\n"
    )
    expected_text = f"WARNING: {reward_run} was trained on 2 of the 6 held-out prompts"
    for flags in ("--loss-type sft", "--reward length:9"):
        (warning,) = warnings_at_start(reward_run, flags, rows)
        assert warning.startswith(expected_text)
        assert not warnings_at_start(reward_run, flags, make_rows(range(4)))

    # Without the data of the earlier run, its prompts are unknown.
    (tmp_path / "before.jsonl").unlink()
    assert not warnings_at_start(reward_run, "--loss-type sft", make_rows(range(6)))


@pytest.mark.slow
def test_evaluate_uses_the_replies_of_a_run_or_the_problems_of_another_task(
    golden, tmp_path, capsys, check_refusal
):
    def take_last_record():
        return json.loads(capsys.readouterr().out.splitlines()[-1])

    # the replies
    source = golden("sft")
    evaluate.main(["--run", str(source)])
    record = take_last_record()
    expected = read_log(source / "eval.jsonl")[-1]
    for cost in ("time/s", "tokens/total"):
        assert expected.pop(cost) > 0
    assert record | {"step": 3, "eval/s": 0} == expected | {"eval/s": 0}
    check_refusal(
        evaluate.main,
        ["--run", source, "--samples", "2"],
        "--samples 2 has no effect on the loss of",
    )

    # a task, which older runs have in their settings
    run_dir = shutil.copytree(source, tmp_path / "run")
    settings = (run_dir / "config.yaml").read_text()
    (run_dir / "config.yaml").write_text(settings.replace("task: own", "task: demo"))
    evaluate.main(["--run", str(run_dir), "--limit", "4", "--max-tokens", "12"])
    record = take_last_record()
    assert record["eval/num"] == 4
    assert "eval/accuracy" in record

    # other data
    rows = [{"prompt": f"What is {n} plus {n}?", "answer": "4"} for n in range(40)]
    data = write_log(tmp_path / "problems.jsonl", rows)
    evaluate.main(["--run", str(source), "--data", data, "--limit", "2", "--max-tokens", "4"])
    assert "36 of the 40 prompts in --data" in capsys.readouterr().err
