"""Supervised fine-tuning: the loss, the ids of conversations, the run; and runs that begin with an adapter."""

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
# Qwen3's rule: only a reply after the last question keeps its thought, be it empty
REWRITING = (
    "{%- set ns = namespace(last=0) %}{%- for m in messages %}{%- if m.role == 'user' %}"
    "{%- set ns.last = loop.index0 %}{%- endif %}{%- endfor %}"
    "{%- for m in messages %}{{- '<|im_start|>' + m.role + '\\n' }}"
    "{%- if m.role == 'assistant' and loop.index0 > ns.last and '<think>' not in m.content %}"
    "{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}{{- m.content + '<|im_end|>\\n' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- if enable_thinking is false %}"
    "{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}{%- endif %}"
)


def random_rows(vocab, num=6):
    """Rows of random ids and lengths, whose trained tokens lie in two runs."""
    rng, rows = np.random.default_rng(3), []
    for _ in range(num):
        length = int(rng.integers(8, 20))
        begin, end = sorted(int(x) for x in rng.choice(np.arange(1, length - 3), 2, replace=False))
        places = [*range(begin, end), length - 2, length - 1]
        rows.append(TrainingRow(rng.integers(3, vocab, length).tolist(), places))
    return rows


def batches_of(rows, token_budget):
    return make_batches([sample_from_conversation(*row) for row in rows], token_budget)


def count(rows):
    return sum(len(row.places) for row in rows)


def render(tokenizer, record, thinking=False, context=1000):
    end_ids = {tokenizer.eos_token_id}
    return chats.encode_conversation(
        tokenizer,
        chats.read_conversation_example(record),
        thinking=thinking,
        end_ids=end_ids,
        context=context,
    )


def trained(tokenizer, row):
    """The texts of the runs of trained tokens."""
    runs = np.split(np.array(row.places), np.flatnonzero(np.diff(row.places) > 1) + 1)
    return [tokenizer.decode([row.ids[place] for place in run]) for run in runs]


# ---- conversations


def test_a_reply_is_trained_up_to_its_end_token_after_the_ids_that_it_would_be_sampled_after(
    tokenizer,
):
    (row,) = render(tokenizer, {"prompt": "What is one and two?", "completion": "It is three."})
    prompt = chat_template.encode_chat(tokenizer, "What is one and two?")
    assert row.ids[: row.places[0]] == prompt and row.places == list(
        range(len(prompt), len(row.ids))
    )
    assert trained(tokenizer, row) == ["It is three.<|im_end|>"]


def test_messages_and_prompt_with_completion_say_the_same(tokenizer):
    (of_strings,) = render(
        tokenizer, {"prompt": TALK[0]["content"], "completion": TALK[1]["content"]}
    )
    assert render(tokenizer, {"messages": TALK[:2]}) == [of_strings]
    assert render(tokenizer, {"prompt": TALK[:1], "completion": TALK[1:2]}) == [of_strings]
    assert render(tokenizer, {"messages": TALK[:3]}) == [
        of_strings
    ]  # nobody answered the last question


def test_all_replies_of_a_completion_are_trained_and_none_of_a_prompt(tokenizer):
    (row,) = render(tokenizer, {"messages": TALK}, thinking=True)
    assert trained(tokenizer, row) == ["It is three.<|im_end|>", "Four.<|im_end|>"]
    text = chat_template.render_chat(
        tokenizer, TALK, True, add_generation_prompt=False
    ).removesuffix("\n")
    assert row.ids == tokenizer.encode(text, add_special_tokens=False)
    (last,) = render(tokenizer, {"prompt": TALK[:3], "completion": TALK[3:]}, thinking=True)
    assert last.ids == row.ids and trained(tokenizer, last) == ["Four.<|im_end|>"]


def test_where_a_template_rewrites_what_came_before_each_reply_is_a_row_as_it_would_be_sampled(
    tokenizer,
):
    rewriting = copy.deepcopy(tokenizer)
    rewriting.chat_template = REWRITING
    rows = render(rewriting, {"messages": TALK})
    assert [trained(rewriting, row) for row in rows] == [
        ["It is three.<|im_end|>"],
        ["Four.<|im_end|>"],
    ]
    for row, messages in zip(rows, (TALK[:1], TALK[:3]), strict=True):
        assert row.ids[: row.places[0]] == chat_template.encode_chat(rewriting, messages)


@pytest.mark.parametrize(
    ("record", "message"),
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
def test_a_conversation_that_leaves_open_what_to_train_is_refused(tokenizer, record, message):
    assert message in catch_message(render, tokenizer, record)


def test_a_template_that_drops_a_part_of_a_reply_or_renders_its_past_in_two_ways_is_refused(
    tokenizer,
):
    other = copy.deepcopy(tokenizer)
    other.chat_template = tokenizer.chat_template.replace(
        "+ message.content", "+ message.content[:5]"
    )
    assert "drops a part of" in catch_message(render, other, {"messages": TALK[:2]})
    other.chat_template = (
        "{%- if not add_generation_prompt %}{{- 'x' }}{%- endif %}" + tokenizer.chat_template
    )
    assert "renders the messages before" in catch_message(render, other, {"messages": TALK[:2]})


# ---- the loss


def oracle(logits, rows):
    """The mean of -log softmax at the trained tokens, float64, from each row's logits (L, V)."""
    losses = []
    for row, of_row in zip(rows, logits, strict=True):
        for place in row.places:
            scores = np.array(of_row[place - 1], np.float64)
            losses.append(
                np.log(np.exp(scores - scores.max()).sum()) + scores.max() - scores[row.ids[place]]
            )
    return np.mean(losses)


@pytest.mark.parametrize("name", ["qwen2.5", "qwen3"])
def test_loss_and_gradient_equal_those_of_mlx_lm_s_model_whatever_the_micro_batches(
    checkpoints, name
):
    theirs, _ = mlx_lm_load_model(checkpoints[name])
    theirs.set_dtype(mx.float32)
    rows = random_rows(320)

    def loss_of(model):
        total = mx.array(0.0)
        for row in rows:
            logits, places = model(mx.array([row.ids]))[0], mx.array(row.places)
            total += nn.losses.cross_entropy(logits[places - 1], mx.array(row.ids)[places]).sum()
        return total / count(rows)

    expected = dict(tree_flatten(nn.value_and_grad(theirs, loss_of)(theirs)[1]))
    right = oracle([np.array(theirs(mx.array([row.ids])))[0] for row in rows], rows)
    model, config = (
        gwen.load_model(checkpoints[name]),
        Config.from_flags(loss_type="sft", lora_rank=0),
    )
    learner = update.Learner(model, config, StepLoss(config, SIZES))
    for budget in (1, 40, 10_000):
        batches = batches_of(rows, budget)
        assert len(batches) == {1: 6, 40: 3, 10_000: 1}[budget]
        grads, _, measured = update.compute_gradient(learner, batches)
        assert measured["loss"] == pytest.approx(right, rel=1e-5)
        ours = hub.unfuse_weights(dict(tree_flatten(grads)), model.config)
        assert set(ours) == set(expected)
        for key, value in expected.items():
            error = mx.linalg.norm(ours[key] - value) / mx.linalg.norm(value)
            assert error.item() < 1e-5, key


def test_the_held_out_loss_is_that_of_all_trained_tokens_with_the_interval_of_a_ratio(checkpoints):
    model, rows = gwen.load_model(checkpoints["qwen3"]), random_rows(320)
    conversations = [rows[:2], rows[2:3], rows[3:]]
    record = evaluate_loss_on_replies(
        model, StepLoss(Config.from_flags(loss_type="sft"), SIZES), conversations, 40
    )
    logits = [[np.array(model(mx.array([row.ids])))[0] for row in part] for part in conversations]
    parts = [
        oracle(of_part, part) * count(part)
        for of_part, part in zip(logits, conversations, strict=True)
    ]
    loss = sum(parts) / count(rows)
    assert record["eval/loss"] == pytest.approx(loss, rel=1e-5)
    assert record["eval/perplexity"] == pytest.approx(math.exp(loss), rel=1e-5)
    assert (record["eval/num"], record["eval/tokens"]) == (3, count(rows) / 3)
    off = [part - loss * count(of) for part, of in zip(parts, conversations, strict=True)]
    assert record["eval/loss_ci95"] == pytest.approx(
        1.96 * np.std(off, ddof=1) * 3**0.5 / count(rows), rel=1e-4
    )


# ---- settings


def given_with(flags):
    return settings_from_flags(
        parse_flags(["--model", "demo", "--loss-type", "sft", *flags.split()])
    )


@pytest.mark.parametrize(
    ("flags", "message"),
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
def test_flags_that_make_no_sense_with_sft_are_refused_by_name(flags, message):
    assert message in catch_message(resolve_settings, given_with(f"--data x.jsonl {flags}"))


def test_sft_needs_data_and_its_first_line_names_the_replies_and_the_recipe():
    assert "--loss-type sft needs --data" in catch_message(resolve_settings, given_with(""))
    line = resolve_settings(given_with("--data x.jsonl"))[1]
    assert line.startswith("model: demo, ")
    assert "; replies: x.jsonl; task: own, with recipes/demo.yaml: --batch 8 --steps" in line


def test_the_environment_and_a_task_s_recipe_set_nothing_that_sft_has_not(monkeypatch):
    monkeypatch.setenv("RUBRIC_JUDGE_BATCH_SIZE", "7")
    config, _ = resolve_settings(given_with("--data x.jsonl"))
    assert (config.sampling.max_tokens, config.judge.chunk_size) == (256, 24)
    assert config.optimizer.learning_rate == 0.004  # the recipe's


# ---- runs, beside what test_golden.py says of one


@pytest.mark.slow
def test_a_run_lowers_the_held_out_loss_and_is_shown_like_any_run(golden, tmp_path, capsys):
    run = shutil.copytree(golden("sft"), tmp_path / "run")
    steps, evals = read_log(run / "metrics.jsonl"), read_log(run / "eval.jsonl")
    assert evals[-1]["eval/loss"] < 0.9 * evals[0]["eval/loss"]
    assert steps[0]["reward/mean"] is None and steps[0]["grad_norm"] > 0
    report.main(["--compare", str(run), str(run)])
    report.main(["--list", str(tmp_path)])
    shown = capsys.readouterr().out
    assert "held-out loss before" in shown and "tokens trained" in shown


@pytest.mark.slow
def test_a_run_that_begins_with_an_adapter_has_it_as_its_reference_even_when_resumed(
    golden, tmp_path
):
    source, directory = (
        shutil.copytree(golden("sft") / "adapter", tmp_path / "source"),
        tmp_path / "run",
    )
    flags = "--model demo --batch 2 --groups 2 --max-tokens 12 --eval-limit 8 --beta 0.1 --steps 2 --save-every 1"
    flags = [
        *flags.split(),
        "--eval-every",
        "1",
        "--init-adapter",
        str(source),
        "--run-dir",
        str(directory),
    ]
    train.main(flags)
    steps, evals = (
        read_untimed_log(directory / "metrics.jsonl"),
        read_untimed_log(directory / "eval.jsonl"),
    )
    assert (
        abs(steps[0]["kl"]) < 1e-6 and abs(evals[0]["eval/kl"]) < 1e-6
    )  # not the distance to the base
    assert evals[-1]["eval/kl"] > 1e-6
    theirs, kept = (
        dict(mx.load(str(path / "adapters.safetensors")))
        for path in (source, directory / run_files.START)
    )
    assert all(mx.array_equal(theirs[key], kept[key]).item() for key in theirs)
    shutil.rmtree(source)
    shutil.rmtree(directory / "checkpoints" / "step-000002")
    train.main(["--resume", str(directory)])
    assert (
        read_untimed_log(directory / "metrics.jsonl") == steps
        and read_untimed_log(directory / "eval.jsonl") == evals
    )
    assert run_files.saved_or_initial_adapter_path(str(directory), 0) == str(
        directory / run_files.START
    )


@pytest.mark.slow
def test_held_out_prompts_that_the_run_before_was_trained_on_are_told_of_at_the_start(
    golden, tmp_path, capsys
):
    def rows_of(held_out, *before):
        asked = [
            [*before, {"role": "user", "content": f"What is {n} plus {n}?"}] for n in range(12)
        ]
        rows = [
            {"prompt": one if before else one[0]["content"], "completion": "Two."} for one in asked
        ]
        return [row | {"split": "test" if n in held_out else "train"} for n, row in enumerate(rows)]

    def warnings_at_start(before, flags, rows):
        words = f"--model demo --init-adapter {before} --data {write_log(tmp_path / 'now.jsonl', rows)} {flags}"
        make_run(
            resolve_settings(settings_from_flags(parse_flags(words.split())))[0], tmp_path / "now"
        )
        return [line for line in capsys.readouterr().out.splitlines() if "trained on" in line]

    of_replies, by_rewards, system = (
        golden("sft"),
        tmp_path / "before",
        {"role": "system", "content": "Be brief."},
    )
    (line,) = warnings_at_start(
        of_replies / "adapter", "--reward length:9", rows_of(range(6), system)
    )
    assert line.startswith(f"WARNING: {of_replies} was trained on 6 of the 6 held-out prompts, ")
    assert "hold out the same rows in both runs" in line and "split" in line
    shutil.copytree(of_replies, by_rewards)
    data = write_log(tmp_path / "before.jsonl", rows_of(range(4)))
    (by_rewards / "config.yaml").write_text(
        f"model: demo\ntask: own\ndata: {data}\nreward: ['gone.py:score']\n"
    )
    for flags in ("--loss-type sft", "--reward length:9"):
        (line,) = warnings_at_start(by_rewards, flags, rows_of(range(6), system))
        assert line.startswith(f"WARNING: {by_rewards} was trained on 2 of the 6 held-out prompts")
        assert not warnings_at_start(by_rewards, flags, rows_of(range(4)))
    (tmp_path / "before.jsonl").unlink()  # now nobody knows
    assert not warnings_at_start(by_rewards, "--loss-type sft", rows_of(range(6)))


@pytest.mark.slow
def test_a_run_is_evaluated_on_its_replies_or_on_the_problems_of_a_task_that_was_named(
    golden, tmp_path, capsys, check_refusal
):
    source = golden("sft")
    evaluate.main(["--run", str(source)])
    record = json.loads(capsys.readouterr().out.splitlines()[-1])
    expected = read_log(source / "eval.jsonl")[-1]
    for total in ("time/s", "tokens/total"):  # what the run has cost until then
        assert expected.pop(total) > 0
    assert record | {"step": 3, "eval/s": 0} == expected | {"eval/s": 0}
    check_refusal(
        evaluate.main,
        ["--run", source, "--samples", "2"],
        "--samples 2 has no effect on the loss of",
    )
    run = shutil.copytree(source, tmp_path / "run")
    settings = (run / "config.yaml").read_text()
    (run / "config.yaml").write_text(
        settings.replace("task: own", "task: demo")
    )  # as older runs have it
    evaluate.main(["--run", str(run), "--limit", "4", "--max-tokens", "12"])
    record = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert record["eval/num"] == 4 and "eval/accuracy" in record
    rows = [{"prompt": f"What is {n} plus {n}?", "answer": "4"} for n in range(40)]
    asked = write_log(tmp_path / "asked.jsonl", rows)
    evaluate.main(["--run", str(source), "--data", asked, "--limit", "2", "--max-tokens", "4"])
    assert "36 of the 40 prompts in --data" in capsys.readouterr().err
