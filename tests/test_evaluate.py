"""
A held-out evaluation gives unbiased figures of the same problems each time.

It warns if a training prompt is among these problems.
"""

import functools
import json
import math
import re
import sys

import mlx.core as mx
import numpy as np
import pytest
from conftest import mark_readable, read_log, write_log
from test_docs import EVALUATION_METRICS, undocumented_keys

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
from text import printable


@pytest.fixture(scope="module")
def demo():
    return gwen.load("demo")


def evaluate_samples(demo, task, params, **graders):
    answer = functools.partial(answer_sampled_and_greedy, *demo)
    return evaluate_task(answer, task, params, **graders)


def evaluate_demo_task(demo, **settings):
    params = EvalParams(12, memory.BatchSize(64), limit=24)._replace(**settings)
    return evaluate_samples(demo, tasks.load_task("demo"), params)


@pytest.mark.parametrize("samples", [1, 4])
def test_figures_are_means_over_all_answers_with_intervals_over_problems(demo, samples):
    record, details = evaluate_demo_task(demo, samples=samples)
    values = np.array([detail["values"] for detail in details])
    assert values.shape == (24, samples)
    assert record["eval/num"] == 24
    assert record["eval/kl"] is None  # there is no reference
    assert record["eval/witness"] is None

    for name in ("accuracy", "mean_at_k", "pass_at_1"):
        assert record[f"eval/{name}"] == pytest.approx(values.mean())
    assert record[f"eval/pass_at_{samples}"] == pytest.approx(values.max(axis=1).mean())
    if samples > 1:
        spread = values.mean(axis=1).std(ddof=1)
        half_width = statistics.student_t_quantile(23) * spread / math.sqrt(24)
        assert record["eval/accuracy_ci95"] == pytest.approx(half_width)
        assert record["eval/pass_at_1_ci95"] == record["eval/accuracy_ci95"]
        line = eval_record.format_evaluation_line(record)
        assert line.endswith("| 24 problems, 4 answers to each")

    for detail in details:
        prompts = [detail["prompt"]] * samples
        answers = [detail["answer"]] * samples
        completions = detail["completions"]
        expected = sums.correct(completions=completions, prompts=prompts, answer=answers)
        assert detail["values"] == expected
        greedy_completions = [detail["greedy"]] * samples
        expected = sums.correct(completions=greedy_completions, prompts=prompts, answer=answers)
        assert detail["greedy_value"] == expected[0]


def test_samples_have_temperature_1_and_the_greedy_answer_has_temperature_0(demo):
    model, tokenizer = demo
    _, details = evaluate_demo_task(demo, samples=2)
    held_out = tasks.load_task("demo").held_out
    indices = [place * len(held_out) // 24 for place in range(24)]  # evenly spaced
    problems = [held_out[index] for index in indices]
    evaluated_pairs = [(detail["prompt"], detail["answer"]) for detail in details]
    assert evaluated_pairs == [(problem["prompt"], problem["answer"]) for problem in problems]

    params = sampler.SamplingParams(12, eos_ids=model.config.eos_ids)
    prompts = [chat_template.encode_chat(tokenizer, problem["prompt"]) for problem in problems]

    def sample_texts(temperature, group_size):
        rollout = sampler.rollout(
            model,
            prompts,
            params._replace(temperature=temperature),
            group_size=group_size,
            key=KEY,
        )
        return sampler.decode_texts(tokenizer, rollout, model.config.eos_ids)

    completions = [text for detail in details for text in detail["completions"]]
    assert completions == sample_texts(temperature=1.0, group_size=2)
    greedy_completions = [detail["greedy"] for detail in details]
    assert greedy_completions == sample_texts(temperature=0.0, group_size=1)
    assert any(detail["greedy"] != detail["completions"][0] for detail in details)


def test_an_evaluation_gives_the_same_record_at_any_batch_size(demo):
    first, _ = evaluate_demo_task(demo, limit=12)
    second, _ = evaluate_demo_task(demo, limit=12, batch_size=memory.BatchSize(5))
    for record in (first, second):
        record.pop("eval/s")
    # The entropy is a sum, whose rounding depends on the batches.
    entropies = [record.pop("eval/entropy") for record in (first, second)]
    assert first == second
    assert entropies[0] == pytest.approx(entropies[1], rel=1e-5)


def test_a_task_without_a_verifier_gets_scores_by_criterion_and_category(demo):
    task = tasks.load_task("demo")._replace(verifier=None)
    problems = []
    for problem in task.held_out:
        category = "carry" if problem["carry"] else "plain"
        problems.append(problem | {"category": category})
    problems[0]["category"] = None
    task = task._replace(held_out=problems)
    grader = judge.Judge(*demo, rubrics.load_rubric(task.rubric))
    record, _ = evaluate_samples(demo, task, EvalParams(12, samples=2, limit=24), grader=grader)

    names = [criterion.name for criterion in grader.rubric.criteria]
    for name in names:
        assert f"eval/judge/{name}" in record
        assert f"eval/judge/{name}/carry" in record
        assert f"eval/judge/{name}/plain" in record
    means = np.array([record[f"eval/judge/{name}"] for name in names])
    weights = np.array([criterion.weight for criterion in grader.rubric.criteria])
    rubric_reward = (weights * (means - 3) / 2).sum()
    assert record["eval/reward/rubric"] == pytest.approx(rubric_reward, abs=1e-6)
    score = record["eval/reward/correct"] + 0.5 * record["eval/reward/rubric"]
    assert record["eval/score"] == pytest.approx(score)
    assert not any("None" in key or key.startswith("eval/accuracy") for key in record)


class ScriptedGrader(Grader):
    """A judge whose scores a function of the completion gives; nan means an unreadable score."""

    mode = "logits"

    def __init__(self, rubric, score):
        super().__init__(rubrics.load_rubric(rubric))
        self.warn = str
        self.score_of = score

    def scoring_digest(self):
        return f"{self.score_of}{self.rubric}"

    def score_questions(self, questions):
        for place, question in enumerate(questions):
            score = self.score_of(question.completion)
            yield place, CriterionEvaluation(score, float(not math.isnan(score)), "5")


@pytest.mark.parametrize("length", [0, 2])
def test_a_score_counts_only_readable_answers_and_a_line_counts_the_others(demo, length):
    """Length 2: the scores of answers of even length are readable. Length 0: no score is readable."""

    def score(text):
        is_readable = length and len(text) % length == 0
        return 5.0 if is_readable else math.nan

    task = tasks.load_task("demo")._replace(verifier=None)
    grader = ScriptedGrader(task.rubric, score)
    record, details = evaluate_samples(
        demo, task, EvalParams(12, limit=24), grader=mark_readable(grader)
    )

    rubric_reward = 0.0
    if length:
        rubric_reward = 0.5 * sum(criterion.weight for criterion in grader.rubric.criteria)
    for detail in details:  # an unreadable rubric counts as the mean of the others
        correct = detail["rewards"]["correct"][0]
        assert detail["values"][0] == pytest.approx(correct + rubric_reward)
    assert record["eval/score"] == pytest.approx(record["eval/reward/correct"] + rubric_reward)

    unreadable_fraction = record["eval/unparsed_frac"]
    is_unreadable = [detail["rewards"]["rubric"][0] is None for detail in details]
    assert unreadable_fraction == np.mean(is_unreadable)
    assert unreadable_fraction > 0
    line = eval_record.format_evaluation_line(record)
    assert line.endswith(f"{unreadable_fraction:.0%} of the judge's scores were unreadable")


def test_a_witness_exposes_a_judge_that_gives_every_answer_the_highest_score(demo):
    task = tasks.load_task("values")
    grader = ScriptedGrader(task.rubric, lambda text: 5.0)
    witness = ScriptedGrader(task.witness, lambda text: 5.0)
    record, details = evaluate_samples(
        demo, task, EvalParams(4, limit=4), grader=grader, witness=witness
    )
    assert record["eval/score"] == 3
    assert record["eval/witness"] == 0
    assert record["eval/witness/credulity"] == 5
    assert record["eval/judge/scrutiny"] == 5
    assert undocumented_keys(record, EVALUATION_METRICS) == []
    assert details[0]["witness_scores"] == [[5.0] * 6]
    assert details[0]["judge_scores"] == [[5.0] * 3]


# ---- intervals


@pytest.mark.parametrize(("right", "num"), [(0, 6), (6, 6), (4, 6), (243, 512)])
def test_the_interval_of_a_fraction_reaches_the_farther_end_of_the_wilson_interval(right, num):
    fraction = right / num
    z = 1.96
    # An end of Wilson's interval lies z standard errors from the fraction. The end determines the error.
    ends = np.roots([1 + z**2 / num, -(2 * fraction + z**2 / num), fraction**2])
    half_width = statistics.confidence_half_width(np.array([1.0] * right + [0.0] * (num - right)))
    assert half_width == pytest.approx(np.abs(ends - fraction).max())
    assert half_width > 0


def test_other_values_have_a_student_interval_but_one_value_or_equal_values_have_no_interval():
    values = np.array([0.2, -1.5, 3.0, np.nan])
    half_width = 4.303 * values[:3].std(ddof=1) / 3**0.5
    assert statistics.confidence_half_width(values) == pytest.approx(half_width)
    # Four equal values do not show that the error is 0.
    assert statistics.confidence_half_width(np.array([0.5, 0.5, 0.5, 0.5])) is None
    assert statistics.confidence_half_width(np.array([1.0, np.nan])) is None


# ---- further figures


def test_the_kl_is_the_k3_estimate_in_float64_and_0_before_training(demo):
    model, tokenizer = gwen.load("demo")
    lora.apply(model, 4, 2.0)
    task = tasks.load_task("demo")
    params = EvalParams(12, limit=12)
    record, _ = evaluate_samples((model, tokenizer), task, params, reference=model)
    assert 0 <= record["eval/kl"] < 1e-10

    for index, (_, layer) in enumerate(lora.adapted_layers(model)):
        layer.lora_b = mx.random.normal(layer.lora_b.shape, key=mx.random.key(index)) * 0.3
    params = params._replace(samples=2, temperature=0.8)
    record, _ = evaluate_samples((model, tokenizer), task, params, reference=model)

    prompts = []
    for problem in pick_evenly_spaced(task.held_out, 12):
        prompts.append(chat_template.encode_chat(tokenizer, problem["prompt"]))
    params = sampler.SamplingParams(12, 0.8, eos_ids=model.config.eos_ids)
    rollout = sampler.rollout(model, prompts, params, group_size=2, key=KEY)
    reference_model = demo[0]  # it never had adapters

    def compute_logprobs(any_model, prompt, ids):
        """(T, V) log-probabilities in float64 of all tokens at the positions of the completion."""
        row = mx.array([prompt + ids])
        logits = np.array(any_model(row)[0, len(prompt) - 1 : -1], np.float64) / 0.8
        return logits - np.log(np.exp(logits).sum(-1, keepdims=True))

    kl_terms = []
    entropies = []
    for row, (ids, mask) in enumerate(
        zip(np.array(rollout.completion_ids), np.array(rollout.mask), strict=True)
    ):
        ids = ids[mask > 0].tolist()
        prompt = prompts[row // 2]
        all_logprobs = compute_logprobs(model, prompt, ids)
        all_reference_logprobs = compute_logprobs(reference_model, prompt, ids)
        entropies += (-(np.exp(all_logprobs) * all_logprobs).sum(-1)).tolist()
        logprobs = all_logprobs[np.arange(len(ids)), ids]
        reference_logprobs = all_reference_logprobs[np.arange(len(ids)), ids]
        log_ratio = reference_logprobs - logprobs
        kl_terms += (np.exp(log_ratio) - log_ratio - 1).tolist()

    assert np.mean(kl_terms) > 0.01
    assert record["eval/kl"] == pytest.approx(np.mean(kl_terms), rel=1e-3)
    assert record["eval/entropy"] == pytest.approx(np.mean(entropies), rel=1e-3)
    assert record["eval/tokens"] == pytest.approx(len(kl_terms) / 24)


REFUSALS = [
    "I can't help with that.",
    "I can\u2019t do that.",
    "I cannot say.",
    "I'm sorry, but no.",
    "Sorry, but that is private.",
    "Unfortunately, I am unable to help.",
    '"I won\'t."',
]
ANSWERS = [
    "One can't know, but here is how to test it.",
    "Fifteen. I cannot add more.",
    "I canter on my horse.",
    "",
]


def test_the_opening_of_an_answer_marks_a_refusal_and_repeated_4grams_mark_repetition():
    for text in REFUSALS:
        assert form.opens_with_refusal(text), text
    for text in ANSWERS:
        assert not form.opens_with_refusal(text), text

    assert form.repeated_4gram_fraction("one two three four") == 0
    assert form.repeated_4gram_fraction("no no no") == 0
    assert form.repeated_4gram_fraction("a b c d A B C D") == pytest.approx(1 / 5)
    assert form.repeated_4gram_fraction("ha " * 20) == pytest.approx(16 / 17)


# ---- `--run`: the same figures as in the run, to the digit

SMALL = "--model demo --batch 2 --groups 4 --steps 2 --eval-every 2 --eval-limit 4".split()
SMALL += "--max-tokens 8 --learning-rate 0.01".split()


@pytest.fixture(scope="module")
def runs(golden, tmp_path_factory):
    """The directory of two runs: of the demo with a judge, and of the data and reward of a user."""
    root = tmp_path_factory.mktemp("runs")
    (root / "mine.py").write_text(
        "def short(completions, **_): return [-len(text) / 10 for text in completions]"
    )
    rows = []
    for n in range(30):
        rows.append({"question": f"What is {n} plus one?", "kind": "odd" if n % 2 else None})
    write_log(root / "mine.jsonl", rows)
    (root / "witness.yaml").write_text(
        'criteria: [{name: brief, weight: 1.0, text: "Is it brief?"}, '
        '{name: rambling, weight: 1.0, reverse: true, text: "Does it ramble?"}]'
    )
    own_flags = f"--task demo --data {root}/mine.jsonl --columns prompt=question,category=kind"
    own_flags += f" --reward {root}/mine.py:short --eval-rubric {root}/witness.yaml"
    train.main([*SMALL, *own_flags.split(), "--run-dir", str(root / "own")])
    (root / "demo").symlink_to(golden("kl"))
    return root


def run_command_and_read_record(capsys, *flags):
    capsys.readouterr()
    evaluate_main(list(map(str, flags)))
    return json.loads(capsys.readouterr().out)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "step"), [("demo", None), ("demo", 0), ("demo", 2), ("own", None)]
)
def test_the_command_repeats_the_evaluations_of_a_run_to_the_digit(
    runs, capsys, name, step, tmp_path
):
    step_flags = [] if step is None else ["--step", step]
    record = run_command_and_read_record(
        capsys, "--run", runs / name, *step_flags, "--out", tmp_path / "out.jsonl"
    )

    evaluations = read_log(runs / name / "eval.jsonl")
    if step is not None:
        evaluations = [evaluation for evaluation in evaluations if evaluation["step"] == step]
    expected = evaluations[-1]
    step = expected.pop("step")
    assert record.pop("eval/s") > 0
    assert expected.pop("eval/s") > 0
    for total in ("time/s", "tokens/total"):  # the cost of the run up to the step
        assert (expected.pop(total) == 0) == (step == 0)
    assert record == expected
    if step > 0:
        assert record["eval/kl"] > 1e-9  # before training it is 1e-13

    answers = read_log(runs / name / "eval_answers.jsonl")
    answers = [answer for answer in answers if answer.pop("step") == step]
    assert answers == read_log(tmp_path / "out.jsonl")
    # A witness without a judge has scores too.
    assert read_log(runs / name / "judge_scores.jsonl")


@pytest.mark.slow
def test_a_flag_overrides_the_setting_of_the_run_and_all_rows_of_data_are_evaluated(
    runs, capsys, tmp_path
):
    rows = [{"prompt": f"What is two plus {word}?"} for word in ("one", "two", "four")]
    path = write_log(tmp_path / "other.jsonl", rows)
    flags = "--max-tokens 3 --samples 2".split()
    record = run_command_and_read_record(capsys, "--run", runs / "own", "--data", path, *flags)
    assert record["eval/num"] == 3
    assert record["eval/samples"] == 2
    assert record["eval/tokens"] <= 3
    assert record["eval/score"] == pytest.approx(record["eval/reward/short"])
    assert {"eval/witness/brief", "eval/witness/rambling"} <= record.keys()
    assert "eval/accuracy" not in record


@pytest.mark.slow
def test_a_warning_counts_training_prompts_or_says_that_they_are_unknown(runs, capsys, tmp_path):
    (tmp_path / "own").mkdir()
    for file in (runs / "own").iterdir():
        (tmp_path / "own" / file.name).symlink_to(file)
    flags = f"--run {tmp_path}/own --data {runs}/mine.jsonl --columns prompt=question"
    flags = [*flags.split(), "--max-tokens", "1", "--limit", "1"]
    evaluate_main(flags)
    assert "27 of the 30 prompts" in capsys.readouterr().err

    # The settings of the run now name data that no longer exist.
    (tmp_path / "own" / "config.yaml").unlink()
    settings = (runs / "own" / "config.yaml").read_text()
    settings = settings.replace(f"{runs}/mine.jsonl", f"{tmp_path}/gone.jsonl")
    (tmp_path / "own" / "config.yaml").write_text(settings)
    evaluate_main(flags)
    message = capsys.readouterr().err
    assert f"cannot tell whether {tmp_path}/own was trained" in message
    assert f"--data {runs}/mine.jsonl" in message
    assert f"--data {tmp_path}/gone.jsonl" in message


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
def test_every_command_reports_a_wrong_run_or_step_in_one_line(
    runs, check_refusal, tmp_path, flags, message
):
    flags = flags.format(at=runs).split()
    pattern = "^error: " + re.escape(message.format(at=runs))
    for main, further_flags in (
        (evaluate_main, []),
        (chat.main, ["--prompt", "Hi"]),
        (export.main, ["--fuse", "--out", f"{tmp_path}/out"]),
    ):
        check_refusal(main, [*flags, *further_flags], pattern)


@pytest.mark.slow
def test_chat_and_export_load_model_and_adapter_from_the_run(runs, capsys, tmp_path):
    prompt = ["--prompt", "What is one plus two?", "--temp", "0"]
    chat.main(["--run", str(runs / "demo"), *prompt])
    completion_of_run, line = capsys.readouterr()
    line = " ".join(line.split())
    assert line.startswith(f"run: {runs / 'demo'}, newest adapter; model: demo")
    export.main(["--fuse", "--run", str(runs / "demo"), "--out", str(tmp_path / "merged")])
    capsys.readouterr()
    chat.main(["--model", str(tmp_path / "merged"), "--max-tokens", "8", *prompt])
    assert capsys.readouterr().out == completion_of_run
    assert run_files.adapter_path_at_step(str(runs / "demo"), 0) is None


@pytest.mark.slow
@pytest.mark.parametrize(("limit", "warns"), [(3, True), (64, False)])
def test_an_evaluation_warns_if_most_answers_are_cut_off(capsys, limit, warns):
    evaluate_main(["--model", "demo", "--task", "demo", "--limit", "4", "--max-tokens", str(limit)])
    assert (f"cut off at --max-tokens {limit}" in capsys.readouterr().err) == warns


def test_a_terminal_shows_the_record_as_json_only_with_the_flag_and_a_pipe_shows_it_always(
    monkeypatch, capsys
):
    record = {"eval/accuracy": 0.5, "eval/num": 8}
    evaluate.print_json_or_hint(record, as_json=False)
    assert json.loads(capsys.readouterr().out) == record
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    evaluate.print_json_or_hint(record, as_json=False)
    assert capsys.readouterr().out == "all figures as JSON: add --json\n"
    evaluate.print_json_or_hint(record, as_json=True)
    assert json.loads(capsys.readouterr().out) == record


@pytest.mark.parametrize(("value", "is_told"), [(1.0, False), (0.25, True), (None, False)])
def test_a_verifier_with_values_between_0_and_1_is_told_what_accuracy_means(
    tmp_path, capsys, value, is_told
):
    printable.print_once.cache_clear()
    rows = [{"prompt": f"What is one plus {word}?", "answer": word} for word in ("two", "six")]
    data = write_log(tmp_path / "mine.jsonl", rows)
    (tmp_path / "mine.py").write_text(
        f"def right(completions, **_):\n    return [{value}] + [0] * (len(completions) - 1)\n"
    )
    flags = ["--model", "demo", "--max-tokens", "4", "--verifier", f"{tmp_path}/mine.py:right"]
    evaluate.main([*flags, "--data", str(data)])
    assert ("values other than 0 and 1" in capsys.readouterr().err) == is_told
