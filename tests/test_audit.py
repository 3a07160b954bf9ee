"""The audit, and the completions that bundled rewards and the rewards on the pages pay for."""

import re
import time
from pathlib import Path

import pytest
from conftest import ROOT, catch_message
from extras import needs

import gwen
import preflight
import tasks
import train
from disk import model_choice
from rewards import audit, built_in, rewards, verifiers
from tasks import demo as sums

PRODUCTS = [{"prompt": f"What is {n} times 7?", "answer": str(7 * n)} for n in (6, 3, 9, 12)]
IN_TEXT = "def score(completions, answer, **_): return [float(right in text) for text, right in zip(completions, answer)]"


def load_rewards(tmp_path, *names):
    """The rewards with these names in mine.py, by name."""
    return dict(rewards.load_reward(f"{tmp_path}/mine.py:{name}") for name in names)


def audit_code(tmp_path, code, examples=PRODUCTS):
    """Audits the reward `score` that this Python code defines."""
    (tmp_path / "mine.py").write_text(code)
    return audit.audit_reward(*rewards.load_reward(f"{tmp_path}/mine.py:score"), examples)


def line_names(lines):
    return {line.name for line in lines}


def lines_by_name(result):
    return {line.name: line for line in result.lines}


# ---- rewards that pass the audit


@pytest.mark.parametrize("page", ["README.md", "docs/data.md"])
@pytest.mark.parametrize("form", ["prompt", "messages"])
def test_the_rewards_on_the_pages_pass_the_audit_on_texts_and_conversations(tmp_path, page, form):
    (code,) = re.findall(r"```python\n(.*?def score.*?)```", (ROOT / page).read_text(), re.DOTALL)
    examples = PRODUCTS
    if form == "messages":
        examples = [
            row | {"prompt": [{"role": "user", "content": row["prompt"]}]} for row in PRODUCTS
        ]
    result = audit_code(tmp_path, code, examples)
    assert result.form == audit.SENTENCE
    assert result.surprises == []
    assert len(result.lines) > 12


@pytest.mark.parametrize("task", ["demo", "math"])
def test_a_bundled_verifier_pays_for_no_cheat(task):
    if task == "demo":
        verifier = sums.correct
        examples = tasks.load_task("demo").held_out
        # The verifier of the demo demands that every statement is true.
        unpaid_right_answers = {"after its work", "explained afterwards", "boxed working before"}
    else:
        verifier = verifiers.math_correct
        examples = PRODUCTS
        unpaid_right_answers = set()
    result = audit.audit_reward("correct", verifier, examples)
    assert result.form == audit.SENTENCE
    assert line_names(result.surprises) == unpaid_right_answers


@needs("reasoning_gym")
def test_no_cheat_is_paid_although_reasoning_gym_gives_partial_credit(tmp_path):
    (tmp_path / "few.yaml").write_text("held_out: 6")
    flags = {"task": "rg:chain_sum", "model": "demo", "task_config": f"{tmp_path}/few.yaml"}
    choose_model = model_choice.choose_model_and_reason
    config, _ = preflight.resolve_settings(flags, None, None, choose_model)
    task = tasks.make_task(config)
    reward = task.rewards["correct"]
    result = audit.audit_reward("correct", reward, task.held_out)
    assert result.form == "<answer>%s</answer>"
    assert all(line.is_honest for line in result.surprises)

    columns = {name: [task.held_out[0][name]] for name in ("answer", "category", "entry")}
    (answer,) = columns["answer"]
    assert reward([f"<answer>{answer}</answer>"], **columns) == [1]
    assert reward([f"<answer>not {answer}</answer>"], **columns) == [0]
    assert reward([f"<answer>1{answer}</answer>"], **columns) == [0]


# ---- the audit


NEAR_MISSES = [  # an answer, and the values of a reward that also pays for nearly right answers
    ("2025-09-01", "[right[:7] in text for text, right in zip(completions, answer)]"),
    ('{"label": "bug", "priority": 3}', "['bug' in text for text in completions]"),
    ("AB-1234", "[set(right) <= set(text) for text, right in zip(completions, answer)]"),
]


def audit_lines(rewards, examples, judged=False, **fields):
    """The lines that a run prints about the rewards of a task."""
    weights = dict.fromkeys(rewards, 1.0)
    rubric = Path("rubric.yaml") if judged else None
    task = tasks.Task("own", rewards, weights, train=examples, rubric=rubric, **fields)
    return list(audit.audit_user_rewards_and_verifier(task))


@pytest.mark.parametrize(
    "value", ["float(right in text)", "5 * (right in text) - len(text) / 1000"]
)
def test_the_audit_finds_that_a_search_for_the_answer_pays_for_three_cheats(tmp_path, value):
    result = audit_code(tmp_path, IN_TEXT.replace("float(right in text)", value))
    cheats = {line.name for line in result.surprises if not line.is_honest}
    assert cheats >= {"denied", "two guesses", "thought, not said"}

    (line,) = audit_lines(load_rewards(tmp_path, "score"), PRODUCTS)
    assert "mine.py:1) on " in line
    assert "and the answers of 4 rows: it pays for 'The answer is def" in line


@pytest.mark.parametrize(("answer", "values"), NEAR_MISSES)
def test_the_audit_reports_rewards_and_verifiers_that_pay_for_near_misses(tmp_path, answer, values):
    examples = [{"prompt": "?", "answer": text} for text in (answer, "0", "{0")]
    code = f"def score(completions, answer, **_): return list(map(float, {values}))"
    result = audit_code(tmp_path, code, examples)
    near_misses = audit.near_misses_by_fault(answer)
    assert near_misses.keys() & line_names(result.surprises), line_names(result.surprises)

    verifier = load_rewards(tmp_path, "score")["score"]
    (line,) = audit_lines({}, examples, verifier=verifier)
    assert line.startswith("audit of the verifier: it pays for ")


def test_the_audit_makes_a_near_miss_of_one_long_word_quickly():
    begin = time.process_time()
    word = "ACGT" * 300
    assert audit.near_misses_by_fault(word) == {"a letter more": f"{word}x"}
    assert time.process_time() - begin < 2  # it took 4 s
    assert audit.near_misses_by_fault("one two, 3 four")["words swapped"] == "four two, 3 one"


@pytest.mark.parametrize("kind", verifiers.VERIFIERS)
def test_each_verifier_pays_for_right_answers_and_for_no_near_miss_of_its_kind(kind):
    answers_by_kind = {
        "json": ['{"a": {"b": 1}, "c": [1]}', "[1, 2]"],
        "number": ["42", "3.50", "12 km"],
        "choice": ["spam", "ham"],
        "math": ["x^2+1", "(1, 2)", "2\\sqrt{3}"],
        "exact": ["2025-09-01", "10:30", "Marie Curie", "AB-12", "3-2"],
    }
    answers = answers_by_kind.get(kind, answers_by_kind["math"]) * 3
    _, verify = verifiers.choose_verifier(kind, answers)

    for answer in answers:
        texts = [f"<answer>{text}</answer>" for text in audit.near_misses_by_fault(answer).values()]
        assert not any(verify(completions=texts, answer=[answer] * len(texts)))
    right_texts = [f"<answer>{answer}</answer>" for answer in answers]
    assert all(verify(completions=right_texts, answer=answers))

    examples = [{"prompt": "?", "answer": answer} for answer in answers]
    assert not audit_lines({}, examples, verifier=verify)


@pytest.mark.parametrize("form", audit.FORMS)
def test_the_audit_finds_the_form_of_answer_that_a_reward_takes(tmp_path, form):
    code = (
        "def score(completions, answer, **_):\n"
        f"    return [text.strip().endswith({form!r} % right) * 2 - 1\n"
        "            for text, right in zip(completions, answer)]"
    )
    result = audit_code(tmp_path, code)
    if form == "%s":
        # The form "#### %s" also ends with the answer alone.
        assert result.form in ("%s", "#### %s")
    else:
        assert result.form == form

    lines = lines_by_name(result)
    assert lines["right"].num_paid == 3
    assert lines["wrong"].num_paid == 0
    assert lines["very long, an order"].num_paid == 0

    # The summary shows the form of the answer unless the form is a sentence.
    summary = audit.summarize_audit(result)
    if form == audit.SENTENCE:
        assert "it pays for answers in the form" not in summary
    else:
        assert "it pays for answers in the form" in summary
        assert repr(result.form % PRODUCTS[0]["answer"]) in summary


@pytest.mark.parametrize(
    ("body", "examples", "expected_text"),
    [
        (
            "return [-float(len(text)) for text in completions]",
            PRODUCTS,
            "right answers earn no more than wrong answers",
        ),
        (
            "return [float(text == 'Hi') for text in completions]",
            [{"prompt": "Hi"}],
            "; it gives 0 to an empty text, 1 to the prompt, 0 to very long",
        ),
        (
            "return [1.0 if answer[0] else None] * len(completions)",
            PRODUCTS,
            "the reward is 1 for every",
        ),
    ],
)
def test_the_audit_reports_a_reward_that_does_not_distinguish_right_and_wrong_answers(
    tmp_path, body, examples, expected_text
):
    other = IN_TEXT.replace("score", "other")
    (tmp_path / "mine.py").write_text(f"def score(completions, answer=[1], **_): {body}\n{other}")
    both = load_rewards(tmp_path, "score", "other")
    score_alone = {"score": both["score"]}

    (line,) = audit_lines(score_alone, examples, judged=False)
    column = "answers" if examples == PRODUCTS else "prompts"
    assert expected_text in line
    assert f" and the {column} of {len(examples)} rows" in line

    # Another reward, or a judge, may distinguish them.
    advice = "; another reward or the judge may tell right answers from wrong ones"
    (line,) = audit_lines(score_alone, examples, judged=True)
    assert expected_text in line
    if examples == PRODUCTS:
        assert line.endswith(advice)
        assert audit_lines(both, examples)[0].endswith(advice)
    else:
        assert line.endswith("1 to the prompt, 0 to very long")


def test_a_surprise_shows_a_paid_text_and_the_audit_respects_the_gate(tmp_path):
    """
    Only the prompt of the second row is paid, and the gate refuses a bare answer.

    The prompt of the first row contains "or", which the reward does not allow.
    """
    examples = [
        {"prompt": "I need tea or jam.", "answer": "tea"},
        {"prompt": "Only some jam.", "answer": "jam"},
    ]
    code = IN_TEXT.replace("in text", "in text and 'or' not in text")
    result = audit_code(tmp_path, code, examples)
    texts = {line.name: line.text for line in result.surprises}
    assert texts["the prompt"] == "Only some jam."
    assert lines_by_name(result)["the answer alone"].num_paid == 2

    reward = rewards.load_reward(f"{tmp_path}/mine.py:score")
    gated = audit.audit_reward(*reward, examples, "form")
    assert lines_by_name(gated)["the answer alone"].num_paid == 0
    assert "through --reward-gate form: " in next(audit.audit_table_lines(gated))


def test_the_line_of_an_unpaid_right_answer_shows_the_first_unpaid_text(tmp_path):
    code = IN_TEXT.replace("float(right in text)", "float(right in text and right != '14')")
    examples = [{"prompt": f"What is {n} times 7?", "answer": str(7 * n)} for n in (6, 2, 9)]
    lines = lines_by_name(audit_code(tmp_path, code, examples))
    assert lines["right"].text == "The answer is 14."
    assert lines["bold"].text == "The answer is **14**."


def test_a_text_that_earns_a_fifth_of_a_right_answer_counts_as_unpaid(tmp_path):
    examples = [
        {"prompt": f"{label}? It is one.", "answer": f'{{"label": "{label}"}}'}
        for label in ("bug", "praise")
    ]
    code = (
        "def value(text, right):\n"
        "    if text == right:\n"
        "        return 1\n"
        "    return 0.2 * (text[0:4] != 'The ' or right in text) * ('is' in text)\n"
        "def score(completions, answer, **_):\n"
        "    return list(map(value, completions, answer))"
    )
    result = audit_code(tmp_path, code, examples)
    assert result.form == audit.ALONE
    assert all(line.is_honest for line in result.surprises)

    lines = lines_by_name(result)
    assert (lines["right"].mean_text, lines["right"].num_paid) == ("1", 2)
    assert (lines["a sentence"].mean_text, lines["a sentence"].num_paid) == ("0.2", 0)
    assert (lines["the prompt"].mean_text, lines["the prompt"].num_paid) == ("0.2", 0)


def test_the_audit_chooses_rows_with_different_answers_even_if_answers_are_missing():
    answers = (None, "", 0, "Zero", "zero", 0)
    examples = [{"prompt": "?", "answer": answer} for answer in answers]
    rows = audit.choose_varied_examples(examples)
    assert [(row.right, row.wrong) for row in rows] == [("0", "zero"), ("zero", "0")]
    rows = audit.choose_varied_examples(examples[:2])
    assert [row.right for row in rows] == ["", ""]


# ---- in the commands


def write_data_and_make_flags(tmp_path):
    """Writes data and a reward; returns the flags of a run with them."""
    (tmp_path / "mine.py").write_text(IN_TEXT)
    lines = "".join(f"{n} times 7?,{7 * n}\n" for n in range(4, 9))
    (tmp_path / "mine.csv").write_text("prompt,answer\n" + lines)
    flags = "--model demo --task values --data {0}/mine.csv --reward {0}/mine.py:score"
    return flags.format(tmp_path).split()


def test_preflight_prints_the_whole_table_and_asks_no_judge(tmp_path, capsys):
    preflight.main(["--audit", *write_data_and_make_flags(tmp_path)])
    head, *lines = capsys.readouterr().out.splitlines()
    assert head.startswith("reward score (")
    assert "for 3 rows" in head
    assert "memory:" not in head
    surprise = re.compile(r"  cheat  denied +1  3 of 3 paid .*not \d+\.'  <- surprise")
    assert any(surprise.match(line) for line in lines)
    assert lines[-1].startswith("  A surprise: correct the reward, or leave out a gate")


def test_a_run_prints_the_first_surprise_before_it_loads_a_model(tmp_path, capsys, monkeypatch):
    def fail_to_load(*_, **__):
        raise ValueError("no model yet")

    monkeypatch.setattr(gwen, "load", fail_to_load)
    with pytest.raises(SystemExit):
        train.main([*write_data_and_make_flags(tmp_path), "--run-dir", str(tmp_path / "run")])
    printed = capsys.readouterr()
    assert printed.out.count("audit of the reward score") == 1
    assert "(denied)" in printed.out
    assert "no model yet" in printed.err
    assert not (tmp_path / "run").exists()


def test_a_step_ends_if_a_reward_returns_only_none_and_no_other_covers_each_row(tmp_path):
    (tmp_path / "mine.py").write_text(
        "def some(completions, **_): return [1.0 if 'a' in text else None for text in completions]\n"
        "def others(completions, **_): return [None if 'a' in text else 2.0 for text in completions]\n"
    )
    examples = PRODUCTS[:2]
    completions = ["b", "c"]
    both = load_rewards(tmp_path, "some", "others")
    values, *_ = rewards.call_rewards(both, examples, completions, {})
    assert values["others"] == [2, 2]

    # Of two environments, one rewards both rows.
    environments = {
        name: tasks.make_environment_reward(type(name, (), {})) for name in ("Door", "Well")
    }
    earned = {"earned": [("Well", 2.0)] * 2}
    values, *_ = rewards.call_rewards(environments, examples, completions, earned)
    assert values["Well"] == [2, 2]

    alone = {"some": both["some"], "length": built_in.make_built_in_reward("length:9")}
    columns = {"num_tokens": [1, 1]}
    message = catch_message(rewards.call_rewards, alone, examples, completions, columns)
    assert "reward some returned None for all 2 completions" in message
