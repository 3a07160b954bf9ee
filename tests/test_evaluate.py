"""Held-out evaluation: unbiased pass@k, the same problems every time, and no training prompt among them."""

import functools
import json
import math
import re
import sys

import mlx.core as mx
import numpy as np
import pytest
from conftest import mark_readable, read_log, write_log
from test_docs import EVALUATION_METRICS, without_meaning

import chat
import evaluate
import export
import gwen
import judge
import lora
import sampler
import tasks
import train
from disk import eval_record, run_files, statistics
from evaluate import main as evaluate_main
from evaluation.score_task import KEY, EvalParams, answer_sampled_and_greedy, evaluate_task
from judging import rubrics
from judging.evaluations import CriterionEvaluation
from judging.grader import Grader
from machine import memory
from prompts import chat_template
from prompts.examples import pick_evenly_spaced
from rewards import form
from tasks import demo as sums


@pytest.fixture(scope="module")
def demo():
    return gwen.load("demo")


def evaluated(demo, task, params, **graders):
    return evaluate_task(
        functools.partial(answer_sampled_and_greedy, *demo), task, params, **graders
    )


def run(demo, **settings):
    params = EvalParams(12, memory.BatchSize(64), limit=24)._replace(**settings)
    return evaluated(demo, tasks.load_task("demo"), params)


@pytest.mark.parametrize("samples", [1, 4])
def test_figures_are_of_all_answers_with_intervals_over_problems(demo, samples):
    record, details = run(demo, samples=samples)
    values = np.array([detail["values"] for detail in details])
    assert values.shape == (24, samples) and record["eval/num"] == 24
    assert (
        record["eval/kl"] is None and record["eval/witness"] is None
    )  # without a reference and a witness
    expected = dict.fromkeys(("accuracy", "mean_at_k", "pass_at_1"), values) | {
        f"pass_at_{samples}": values.max(1)
    }
    assert {name: record[f"eval/{name}"] for name in expected} == pytest.approx(
        {name: column.mean() for name, column in expected.items()}
    )
    if samples > 1:
        half = statistics.student_t_quantile(23) * values.mean(1).std(ddof=1) / math.sqrt(24)
        assert record["eval/accuracy_ci95"] == record["eval/pass_at_1_ci95"] == pytest.approx(half)
        assert eval_record.format_evaluation_line(record).endswith(
            "| 24 problems, 4 answers to each"
        )
    for detail in details:
        asked = {"prompts": [detail["prompt"]] * samples, "answer": [detail["answer"]] * samples}
        assert detail["values"] == sums.correct(completions=detail["completions"], **asked)
        assert (
            detail["greedy_value"]
            == sums.correct(completions=[detail["greedy"]] * samples, **asked)[0]
        )


def test_samples_are_drawn_at_temperature_1_and_greedy_is_greedy_whatever_was_trained(demo):
    model, tokenizer = demo
    _, details = run(demo, samples=2)
    held_out = tasks.load_task("demo").held_out
    problems = [
        held_out[place * len(held_out) // 24] for place in range(24)
    ]  # spread over all of them
    assert [(d["prompt"], d["answer"]) for d in details] == [
        (p["prompt"], p["answer"]) for p in problems
    ]
    params = sampler.SamplingParams(12, eos_ids=model.config.eos_ids)
    prompts = [chat_template.encode_chat(tokenizer, problem["prompt"]) for problem in problems]
    for group_size, temperature, key in ((2, 1.0, "completions"), (1, 0.0, "greedy")):
        group_params = params._replace(temperature=temperature)
        rollout = sampler.rollout(model, prompts, group_params, group_size=group_size, key=KEY)
        recorded_texts = [
            text for d in details for text in (d[key] if isinstance(d[key], list) else [d[key]])
        ]
        assert recorded_texts == sampler.decode_texts(tokenizer, rollout, model.config.eos_ids)
    assert any(detail["greedy"] != detail["completions"][0] for detail in details)


def test_an_evaluation_repeats_itself_whatever_the_batch_size(demo):
    first, _ = run(demo, limit=12)
    second, _ = run(demo, limit=12, batch_size=memory.BatchSize(5))
    for record in (first, second):
        record.pop("eval/s")
    entropies = [
        record.pop("eval/entropy") for record in (first, second)
    ]  # a sum, which another cut rounds otherwise
    assert first == second
    assert entropies[0] == pytest.approx(entropies[1], rel=1e-5)


def test_a_task_without_right_answers_is_scored_by_criterion_and_category(demo):
    task = tasks.load_task("demo")._replace(verifier=None)
    problems = [
        problem | {"category": "carry" if problem["carry"] else "plain"}
        for problem in task.held_out
    ]
    problems[0]["category"] = None
    task = task._replace(held_out=problems)
    grader = judge.Judge(*demo, rubrics.load_rubric(task.rubric))
    record, _ = evaluated(demo, task, EvalParams(12, samples=2, limit=24), grader=grader)
    criteria = [criterion.name for criterion in grader.rubric.criteria]
    for name in criteria:
        assert {
            f"eval/judge/{name}",
            f"eval/judge/{name}/carry",
            f"eval/judge/{name}/plain",
        } <= set(record)
    means = np.array([record[f"eval/judge/{name}"] for name in criteria])
    weights = np.array([criterion.weight for criterion in grader.rubric.criteria])
    assert record["eval/reward/rubric"] == pytest.approx(
        (weights * (means - 3) / 2).sum(), abs=1e-6
    )
    assert record["eval/score"] == pytest.approx(
        record["eval/reward/correct"] + 0.5 * record["eval/reward/rubric"]
    )
    assert not any("None" in key or key.startswith("eval/accuracy") for key in record)


class Scripted(Grader):
    """A judge that gives an answer what a function says, nan where it cannot be read."""

    mode = "logits"

    def __init__(self, rubric, score):
        super().__init__(rubrics.load_rubric(rubric))
        self.warn, self.score_of = str, score

    def scoring_digest(self):
        return f"{self.score_of}{self.rubric}"

    def score_questions(self, questions):
        for place, question in enumerate(questions):
            score = self.score_of(question.completion)
            yield place, CriterionEvaluation(score, float(not math.isnan(score)), "5")


@pytest.mark.parametrize("length", [0, 2])
def test_a_score_is_that_of_what_can_be_read_and_what_cannot_is_told(demo, length):
    """Answers of an even length are read, or none."""
    task = tasks.load_task("demo")._replace(verifier=None)
    grader = Scripted(
        task.rubric, lambda text: 5.0 if length and len(text) % length == 0 else math.nan
    )
    record, details = evaluated(demo, task, EvalParams(12, limit=24), grader=mark_readable(grader))
    rubric = 0.5 * sum(criterion.weight for criterion in grader.rubric.criteria) if length else 0.0
    for detail in details:  # an unreadable rubric counts as the mean of the others
        assert detail["values"][0] == pytest.approx(detail["rewards"]["correct"][0] + rubric)
    assert record["eval/score"] == pytest.approx(record["eval/reward/correct"] + rubric)
    lost = record["eval/unparsed_frac"]
    assert (
        lost == np.mean([detail["rewards"]["rubric"][0] is None for detail in details]) and lost > 0
    )
    assert eval_record.format_evaluation_line(record).endswith(
        f"{lost:.0%} of the judge's scores were unreadable"
    )


def test_a_judge_that_says_yes_to_everything_is_seen_by_the_witness(demo):
    task = tasks.load_task("values")
    grader, witness = (Scripted(rubric, lambda text: 5.0) for rubric in (task.rubric, task.witness))
    record, details = evaluated(demo, task, EvalParams(4, limit=4), grader=grader, witness=witness)
    assert record["eval/score"] == 3 and record["eval/witness"] == 0
    assert record["eval/witness/credulity"] == record["eval/judge/scrutiny"] == 5
    assert without_meaning(record, EVALUATION_METRICS) == []
    assert details[0]["witness_scores"] == [[5.0] * 6] and details[0]["judge_scores"] == [[5.0] * 3]


# ---- intervals


@pytest.mark.parametrize(("right", "num"), [(0, 6), (6, 6), (4, 6), (243, 512)])
def test_the_interval_of_a_share_is_the_farther_end_of_wilson_s_and_never_nothing(right, num):
    share, z = right / num, 1.96
    # Wilson's ends are where the share lies z standard errors away, the error being that of the end itself
    ends = np.roots([1 + z**2 / num, -(2 * share + z**2 / num), share**2])
    half = statistics.confidence_half_width(np.array([1.0] * right + [0.0] * (num - right)))
    assert half == pytest.approx(np.abs(ends - share).max()) and half > 0


def test_the_interval_of_other_values_is_student_s_and_one_problem_or_equal_ones_have_none():
    values = np.array([0.2, -1.5, 3.0, np.nan])
    assert statistics.confidence_half_width(values) == pytest.approx(
        4.303 * values[:3].std(ddof=1) / 3**0.5
    )
    assert (
        statistics.confidence_half_width(np.array([0.5, 0.5, 0.5, 0.5])) is None
    )  # of four problems nothing is known to 0.000
    assert statistics.confidence_half_width(np.array([1.0, np.nan])) is None


# ---- what stands beside


def test_the_divergence_is_k3_in_float64_and_nothing_before_training(demo):
    model, tokenizer = gwen.load("demo")
    lora.apply(model, 4, 2.0)
    task, params = tasks.load_task("demo"), EvalParams(12, limit=12)
    record, _ = evaluated((model, tokenizer), task, params, reference=model)
    assert 0 <= record["eval/kl"] < 1e-10
    for index, (_, layer) in enumerate(lora.adapted_layers(model)):
        layer.lora_b = mx.random.normal(layer.lora_b.shape, key=mx.random.key(index)) * 0.3
    params = params._replace(samples=2, temperature=0.8)
    record, _ = evaluated((model, tokenizer), task, params, reference=model)
    problems = pick_evenly_spaced(task.held_out, 12)
    prompts = [
        chat_template.encode_chat(tokenizer, problem["prompt"])
        for problem in problems
        for _ in range(2)
    ]
    params = sampler.SamplingParams(12, 0.8, eos_ids=model.config.eos_ids)
    rollout = sampler.rollout(model, prompts[::2], params, group_size=2, key=KEY)
    terms, entropies = [], []
    for prompt, ids, mask in zip(
        prompts, np.array(rollout.completion_ids), np.array(rollout.mask), strict=True
    ):
        ids = ids[mask > 0].tolist()
        row, both = mx.array([prompt + ids]), []
        for other_model in (model, demo[0]):  # the second one never had adapters
            logits = np.array(other_model(row)[0, len(prompt) - 1 : -1], np.float64) / 0.8
            both.append(logits - np.log(np.exp(logits).sum(-1, keepdims=True)))
        entropies += (-(np.exp(both[0]) * both[0]).sum(-1)).tolist()
        policy, base = (logprobs[np.arange(len(ids)), ids] for logprobs in both)
        terms += (np.exp(base - policy) - (base - policy) - 1).tolist()
    assert np.mean(terms) > 0.01
    assert record["eval/kl"] == pytest.approx(np.mean(terms), rel=1e-3)
    assert record["eval/entropy"] == pytest.approx(np.mean(entropies), rel=1e-3)
    assert record["eval/tokens"] == pytest.approx(len(terms) / 24)


REFUSALS = "I can't help with that.|I can\u2019t do that.|I cannot say.|I'm sorry, but no.|Sorry, but that is private."
REFUSALS += '|Unfortunately, I am unable to help.|"I won\'t."'
ANSWERS = (
    "One can't know, but here is how to test it.|Fifteen. I cannot add more.|I canter on my horse.|"
)


def test_a_refusal_is_told_by_how_an_answer_opens_and_repetition_by_runs_of_four_words():
    assert all(map(form.opens_with_refusal, REFUSALS.split("|"))) and not any(
        map(form.opens_with_refusal, ANSWERS.split("|"))
    )
    assert (
        form.repeated_4gram_fraction("one two three four")
        == form.repeated_4gram_fraction("no no no")
        == 0
    )
    assert form.repeated_4gram_fraction("a b c d A B C D") == pytest.approx(1 / 5)
    assert form.repeated_4gram_fraction("ha " * 20) == pytest.approx(16 / 17)


# ---- `--run`: the run's own figure, to the digit

SMALL = "--model demo --batch 2 --groups 4 --steps 2 --eval-every 2 --eval-limit 4 --max-tokens 8".split()
SMALL += ["--learning-rate", "0.01"]


@pytest.fixture(scope="module")
def runs(golden, tmp_path_factory):
    """A run of the demo with a judge, and one on a user's data and reward."""
    root = tmp_path_factory.mktemp("runs")
    (root / "mine.py").write_text(
        "def short(completions, **_): return [-len(text) / 10 for text in completions]"
    )
    lines = [
        {"question": f"What is {n} plus one?", "kind": "odd" if n % 2 else None} for n in range(30)
    ]
    write_log(root / "mine.jsonl", lines)
    (root / "witness.yaml").write_text(
        'criteria: [{name: brief, weight: 1.0, text: "Is it brief?"}, '
        '{name: rambling, weight: 1.0, reverse: true, text: "Does it ramble?"}]'
    )
    own = f"--task demo --data {root}/mine.jsonl --columns prompt=question,category=kind --reward {root}/mine.py:short"
    own += f" --eval-rubric {root}/witness.yaml"
    train.main([*SMALL, *own.split(), "--run-dir", str(root / "own")])
    (root / "demo").symlink_to(golden("kl"))
    return root


def told(capsys, *flags):
    capsys.readouterr()
    evaluate_main(list(map(str, flags)))
    return json.loads(capsys.readouterr().out)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "step"), [("demo", None), ("demo", 0), ("demo", 2), ("own", None)]
)
def test_the_command_repeats_a_run_s_evaluations_to_the_digit(runs, capsys, name, step, tmp_path):
    at = [] if step is None else ["--step", step]
    record = told(capsys, "--run", runs / name, *at, "--out", tmp_path / "out.jsonl")
    expected = [
        each_record
        for each_record in read_log(runs / name / "eval.jsonl")
        if step in (None, each_record["step"])
    ][-1]
    step = expected.pop("step")
    for each_record in (record, expected):
        assert each_record.pop("eval/s") > 0
    for total in ("time/s", "tokens/total"):  # what the run has cost until then
        assert (expected.pop(total) == 0) == (step == 0)
    assert record == expected and (
        step == 0 or record["eval/kl"] > 1e-9
    )  # before training it is 1e-13
    answers = [
        line for line in read_log(runs / name / "eval_answers.jsonl") if line.pop("step") == step
    ]
    assert answers == read_log(tmp_path / "out.jsonl")
    assert read_log(
        runs / name / "judge_scores.jsonl"
    )  # of a witness without a judge beside it too


@pytest.mark.slow
def test_a_flag_wins_over_the_run_and_its_own_data_is_taken_whole(runs, capsys, tmp_path):
    write_log(
        tmp_path / "other.jsonl",
        [{"prompt": f"What is two plus {word}?"} for word in ("one", "two", "four")],
    )
    record = told(
        capsys,
        "--run",
        runs / "own",
        "--data",
        tmp_path / "other.jsonl",
        "--max-tokens",
        3,
        "--samples",
        2,
    )
    assert (record["eval/num"], record["eval/samples"]) == (3, 2)
    assert record["eval/tokens"] <= 3 and record["eval/score"] == pytest.approx(
        record["eval/reward/short"]
    )
    assert {
        "eval/witness/brief",
        "eval/witness/rambling",
    } <= record.keys() and "eval/accuracy" not in record


@pytest.mark.slow
def test_prompts_that_the_run_was_trained_on_are_warned_of_and_so_is_it_where_nobody_knows(
    runs, capsys, tmp_path
):
    (tmp_path / "own").mkdir()
    for file in (runs / "own").iterdir():
        (tmp_path / "own" / file.name).symlink_to(file)
    flags = [
        "--run",
        tmp_path / "own",
        "--data",
        runs / "mine.jsonl",
        "--columns",
        "prompt=question",
    ]
    flags = [*map(str, flags), "--max-tokens", "1", "--limit", "1"]
    evaluate_main(flags)
    assert "27 of the 30 prompts" in capsys.readouterr().err
    (tmp_path / "own" / "config.yaml").unlink()
    settings = (
        (runs / "own" / "config.yaml")
        .read_text()
        .replace(f"{runs}/mine.jsonl", f"{tmp_path}/gone.jsonl")
    )
    (tmp_path / "own" / "config.yaml").write_text(settings)
    evaluate_main(flags)
    message = capsys.readouterr().err
    assert f"cannot tell whether {tmp_path}/own was trained" in message
    assert f"--data {runs}/mine.jsonl" in message and f"--data {tmp_path}/gone.jsonl" in message


@pytest.mark.slow
@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--run {at}/nowhere", "--run {at}/nowhere: there is no such directory"),
        ("--step 3", "--step 3 needs a run"),
        (
            "--run {at}/demo --step 7",
            "--step 7 was not saved; the saved steps in {at}/demo are 0, 1, 2, 3",
        ),
        (
            "--run {at}/demo --adapter {at}/demo",
            "--adapter {at}/demo and --run {at}/demo both name an adapter",
        ),
    ],
)
def test_what_is_wrong_with_a_run_is_said_in_one_line_by_every_command(
    runs, check_refusal, tmp_path, flags, message
):
    flags = flags.format(at=runs).split()
    pattern = "^error: " + re.escape(message.format(at=runs))
    for main, more in (
        (evaluate_main, []),
        (chat.main, ["--prompt", "Hi"]),
        (export.main, ["--fuse", "--out", f"{tmp_path}/out"]),
    ):
        check_refusal(main, [*flags, *more], pattern)


@pytest.mark.slow
def test_chat_and_export_take_model_and_adapter_from_the_run(runs, capsys, tmp_path):
    prompt = ["--prompt", "What is one plus two?", "--temp", "0"]
    chat.main(["--run", str(runs / "demo"), *prompt])
    ours = capsys.readouterr().out
    export.main(["--fuse", "--run", str(runs / "demo"), "--out", str(tmp_path / "merged")])
    capsys.readouterr()
    chat.main(["--model", str(tmp_path / "merged"), "--max-tokens", "8", *prompt])
    assert capsys.readouterr().out == ours
    assert run_files.saved_or_initial_adapter_path(str(runs / "demo"), 0) is None


@pytest.mark.slow
@pytest.mark.parametrize(("limit", "is_told"), [(3, True), (64, False)])
def test_an_evaluation_warns_where_most_answers_are_cut_off(capsys, limit, is_told):
    evaluate_main(["--model", "demo", "--task", "demo", "--limit", "4", "--max-tokens", str(limit)])
    assert (f"cut off at --max-tokens {limit}" in capsys.readouterr().err) == is_told


def test_a_terminal_shows_the_record_as_json_only_if_asked_and_a_pipe_always(monkeypatch, capsys):
    record = {"eval/accuracy": 0.5, "eval/num": 8}
    evaluate.print_json_or_hint(record, as_json=False)
    assert json.loads(capsys.readouterr().out) == record
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    evaluate.print_json_or_hint(record, as_json=False)
    assert capsys.readouterr().out == "all figures as JSON: add --json\n"
    evaluate.print_json_or_hint(record, as_json=True)
    assert json.loads(capsys.readouterr().out) == record
