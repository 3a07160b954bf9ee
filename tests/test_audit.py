"""What rewards pay for: the pages' and the bundled ones, and the audit itself."""

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


def audited(tmp_path, body, examples=PRODUCTS):
    (tmp_path / "mine.py").write_text(body)
    return audit.audit_reward(*rewards.load_reward(f"{tmp_path / 'mine.py'}:score"), examples)


def names(lines):
    return {line.name for line in lines}


# ---- rewards that hold


@pytest.mark.parametrize("page", ["README.md", "docs/data.md"])
@pytest.mark.parametrize("rows", ["prompt", "messages"])
def test_the_rewards_of_the_pages_pass_the_audit_on_text_and_on_chat(tmp_path, page, rows):
    (body,) = re.findall(r"```python\n(.*?def score.*?)```", (ROOT / page).read_text(), re.DOTALL)
    chats = [row | {"prompt": [{"role": "user", "content": row["prompt"]}]} for row in PRODUCTS]
    found = audited(tmp_path, body, PRODUCTS if rows == "prompt" else chats)
    assert found.form == audit.SENTENCE and found.surprises == [] and len(found.lines) > 12


@pytest.mark.parametrize("task", ["demo", "math"])
def test_no_cheat_is_paid_by_a_bundled_verifier(task):
    verifier = sums.correct if task == "demo" else verifiers.math_correct
    examples = tasks.load_task("demo").held_out if task == "demo" else PRODUCTS
    found = audit.audit_reward("correct", verifier, examples)
    said_more = {
        "after its work",
        "explained afterwards",
        "boxed working before",
    }  # to the demo all must be true
    missed = said_more if task == "demo" else set()
    assert found.form == audit.SENTENCE and names(found.surprises) == missed


@needs("reasoning_gym")
def test_no_cheat_is_paid_where_reasoning_gym_pays_for_parts(tmp_path):
    (tmp_path / "few.yaml").write_text("held_out: 6")
    flags = {"task": "rg:chain_sum", "model": "demo", "task_config": f"{tmp_path}/few.yaml"}
    task = tasks.make_task(
        preflight.resolve_settings(flags, None, None, model_choice.choose_model_and_reason)[0]
    )
    found = audit.audit_reward("correct", task.rewards["correct"], task.held_out)
    assert found.form == "<answer>%s</answer>" and all(line.is_honest for line in found.surprises)
    row = {name: [task.held_out[0][name]] for name in ("answer", "category", "entry")}
    replies = [f"<answer>{text}{row['answer'][0]}</answer>" for text in ("", "not ", "1")]
    assert [task.rewards["correct"]([reply], **row)[0] for reply in replies] == [1, 0, 0]


# ---- the audit


NEAR = [  # an answer, the verifier that pays what is nearly right, what else it pays
    ("2025-09-01", "[right[:7] in text for text, right in zip(completions, answer)]"),
    ('{"label": "bug", "priority": 3}', "['bug' in text for text in completions]"),
    ("AB-1234", "[set(right) <= set(text) for text, right in zip(completions, answer)]"),
]


def surprises_of(rewards, examples, judged=False, **task):
    weights, rubric = dict.fromkeys(rewards, 1.0), Path("rubric.yaml") if judged else None
    return list(
        audit.audit_user_rewards(
            tasks.Task("own", rewards, weights, train=examples, rubric=rubric, **task)
        )
    )


@pytest.mark.parametrize(
    "value", ["float(right in text)", "5 * (right in text) - len(text) / 1000"]
)
def test_a_reward_that_looks_for_the_answer_is_found_to_pay_three_cheats(tmp_path, value):
    found = audited(tmp_path, IN_TEXT.replace("float(right in text)", value))
    dishonest = {line.name for line in found.surprises if not line.is_honest}
    assert {"denied", "two guesses", "thought, not said"} <= dishonest
    (line,) = surprises_of({"score": rewards.load_reward(f"{tmp_path}/mine.py:score")[1]}, PRODUCTS)
    assert (
        "mine.py:1) on " in line
        and "and the answers of 4 rows: it pays for 'The answer is def" in line
    )


@pytest.mark.parametrize(("answer", "paid"), NEAR)
def test_a_reward_that_pays_near_misses_is_told_and_no_verifier_pays_them(tmp_path, answer, paid):
    examples = [{"prompt": "?", "answer": answer}] + [
        {"prompt": "?", "answer": "{}"[:n] + "0"} for n in (0, 1)
    ]
    found = audited(
        tmp_path, f"def score(completions, answer, **_): return list(map(float, {paid}))", examples
    )
    near = audit.near_misses_by_fault(answer)
    assert near.keys() & names(found.surprises), names(found.surprises)
    (line,) = surprises_of(
        {}, examples, verifier=rewards.load_reward(f"{tmp_path}/mine.py:score")[1]
    )
    assert line.startswith("audit of the verifier: it pays for ")


def test_a_near_miss_of_one_long_word_is_made_at_once():
    begin, word = time.process_time(), "ACGT" * 300
    assert (
        audit.near_misses_by_fault(word) == {"a letter more": f"{word}x"}
        and time.process_time() - begin < 2
    )  # it took 4 s
    assert audit.near_misses_by_fault("one two, 3 four")["words swapped"] == "four two, 3 one"


@pytest.mark.parametrize("kind", verifiers.VERIFIERS)
def test_each_verifier_pays_right_answers_and_no_near_miss_of_its_own_kind(kind):
    golds = {
        "json": ['{"a": {"b": 1}, "c": [1]}', "[1, 2]"],
        "number": ["42", "3.50", "12 km"],
        "choice": ["spam", "ham"],
        "math": ["x^2+1", "(1, 2)", "2\\sqrt{3}"],
        "exact": ["2025-09-01", "10:30", "Marie Curie", "AB-12", "3-2"],
    }
    answers = golds.get(kind, golds["math"]) * 3
    _, verify = verifiers.choose_verifier(kind, answers)
    pairs = [
        (gold, f"<answer>{near}</answer>")
        for gold in answers
        for near in audit.near_misses_by_fault(gold).values()
    ]
    assert not any(
        verify(completions=[text for _, text in pairs], answer=[gold for gold, _ in pairs])
    )
    assert all(verify(completions=[f"<answer>{gold}</answer>" for gold in answers], answer=answers))
    assert not surprises_of(
        {}, [{"prompt": "?", "answer": gold} for gold in answers], verifier=verify
    )


@pytest.mark.parametrize("form", audit.FORMS)
def test_a_reward_that_takes_one_form_is_audited_in_it(tmp_path, form):
    body = f"def score(completions, answer, **_):\n return [text.strip().endswith({form!r} % right) * 2 - 1 "
    found = audited(tmp_path, body + "for text, right in zip(completions, answer)]")
    assert found.form == form or (
        form == "%s" and found.form == "#### %s"
    )  # whose end is the answer alone
    own = {line.name: line for line in found.lines}
    assert (
        own["right"].num_paid == 3
        and own["wrong"].num_paid == 0 == own["very long, an order"].num_paid
    )
    told = audit.summarize_audit(found)  # the form that is asked for, where a sentence is none
    assert ("it pays for answers in the form" in told) == (form != audit.SENTENCE)
    assert form == audit.SENTENCE or repr(found.form % PRODUCTS[0]["answer"]) in told


@pytest.mark.parametrize(
    ("body", "examples", "said"),
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
def test_a_reward_that_cannot_tell_right_from_wrong_is_said_to_and_whether_another_may(
    tmp_path, body, examples, said
):
    other = IN_TEXT.replace("score", "other")
    (tmp_path / "mine.py").write_text(f"def score(completions, answer=[1], **_): {body}\n{other}")
    own = dict(rewards.load_reward(f"{tmp_path}/mine.py:{name}") for name in ("score", "other"))
    (line,) = surprises_of({"score": own["score"]}, examples, False)
    named = "answers" if examples == PRODUCTS else "prompts"
    assert said in line and f" and the {named} of {len(examples)} rows" in line
    (line,) = surprises_of({"score": own["score"]}, examples, True)
    others = "; another reward or the judge may tell right answers from wrong ones"
    assert said in line and line.endswith(
        others if examples == PRODUCTS else "1 to the prompt, 0 to very long"
    )
    if examples == PRODUCTS:
        assert surprises_of(own, examples)[0].endswith(others)


def test_the_text_of_a_surprise_is_one_that_is_paid_and_a_gate_is_counted(tmp_path):
    """The second row's prompt alone is what that row asks for, and a bare answer is too short for the gate."""
    examples = [
        {"prompt": "I need tea or jam.", "answer": "tea"},
        {"prompt": "Only some jam.", "answer": "jam"},
    ]
    found = audited(tmp_path, IN_TEXT.replace("in text", "in text and 'or' not in text"), examples)
    assert {line.name: line.text for line in found.surprises}["the prompt"] == "Only some jam."
    gated = audit.audit_reward(*rewards.load_reward(f"{tmp_path}/mine.py:score"), examples, "form")
    paid = [
        {line.name: line.num_paid for line in one.lines}["the answer alone"]
        for one in (found, gated)
    ]
    assert paid == [2, 0] and "through --reward-gate form: " in next(audit.audit_table_lines(gated))


def test_the_text_of_an_unpaid_right_answer_is_the_first_that_is_not_paid(tmp_path):
    body = IN_TEXT.replace("float(right in text)", "float(right in text and right != '14')")
    examples = [{"prompt": f"What is {n} times 7?", "answer": str(7 * n)} for n in (6, 2, 9)]
    texts = {line.name: line.text for line in audited(tmp_path, body, examples).lines}
    assert texts["right"] == "The answer is 14." and texts["bold"] == "The answer is **14**."


def test_what_earns_a_fifth_of_the_best_paid_right_form_is_not_paid(tmp_path):
    examples = [
        {"prompt": f"{label}? It is one.", "answer": f'{{"label": "{label}"}}'}
        for label in ("bug", "praise")
    ]
    body = "def score(completions, answer, **_):\n return [1 if text == right else 0.2 * (text[0:4] != 'The ' or right "
    body += "in text) * ('is' in text) for text, right in zip(completions, answer)]"
    found = audited(tmp_path, body, examples)
    paid = {line.name: (line.mean_text, line.num_paid) for line in found.lines}
    assert (
        found.form == audit.ALONE and paid["right"] == ("1", 2) and paid["a sentence"] == ("0.2", 0)
    )
    assert paid["the prompt"] == ("0.2", 0) and all(line.is_honest for line in found.surprises)


def test_rows_are_taken_by_their_answers_which_may_be_numbers_or_missing():
    examples = [{"prompt": "?", "answer": answer} for answer in (None, "", 0, "Zero", "zero", 0)]
    assert [(row.right, row.wrong) for row in audit.choose_varied_examples(examples)] == [
        ("0", "zero"),
        ("zero", "0"),
    ]
    assert [row.right for row in audit.choose_varied_examples(examples[:2])] == ["", ""]


# ---- in the commands


def data_file(tmp_path):
    (tmp_path / "mine.py").write_text(IN_TEXT)
    (tmp_path / "mine.csv").write_text(
        "prompt,answer\n" + "".join(f"{n} times 7?,{7 * n}\n" for n in range(4, 9))
    )
    flags = "--model demo --task values --data {0}/mine.csv --reward {0}/mine.py:score"
    return flags.format(tmp_path).split()


def test_preflight_shows_the_whole_table_and_asks_no_judge(tmp_path, capsys):
    preflight.main(["--audit", *data_file(tmp_path)])
    head, *lines = capsys.readouterr().out.splitlines()
    assert head.startswith("reward score (") and "for 3 rows" in head and "memory:" not in head
    assert any(
        re.match(r"  cheat  denied +1  3 of 3 paid .*not \d+\.'  <- surprise", line)
        for line in lines
    )
    assert lines[-1].startswith("  A surprise: correct the reward, or leave out a gate")


def test_a_run_tells_its_first_surprise_before_a_model_is_loaded(tmp_path, capsys, monkeypatch):
    def load(*_, **__):
        raise ValueError("no model yet")

    monkeypatch.setattr(gwen, "load", load)
    with pytest.raises(SystemExit):
        train.main([*data_file(tmp_path), "--run-dir", str(tmp_path / "run")])
    shown = capsys.readouterr()
    assert (
        shown.out.count("audit of the reward score") == 1
        and "(denied)" in shown.out
        and "no model yet" in shown.err
    )
    assert not (tmp_path / "run").exists()


def test_a_reward_without_any_number_for_a_step_ends_it_unless_each_row_has_another_s(tmp_path):
    (tmp_path / "mine.py").write_text(
        "def some(completions, **_): return [1.0 if 'a' in text else None for text in completions]\n"
        "def others(completions, **_): return [None if 'a' in text else 2.0 for text in completions]\n"
    )
    both = dict(rewards.load_reward(f"{tmp_path}/mine.py:{name}") for name in ("some", "others"))
    asked = [PRODUCTS[:2], ["b", "c"], {}]
    assert rewards.call_rewards(both, *asked)[0]["others"] == [2, 2]
    earned = {
        name: tasks.make_environment_reward(type(name, (), {})) for name in ("Door", "Well")
    }  # of two environments
    assert rewards.call_rewards(earned, *asked[:2], {"earned": [("Well", 2.0)] * 2})[0]["Well"] == [
        2,
        2,
    ]
    alone = {"some": both["some"], "length": built_in.make_built_in_reward("length:9")}
    asked[2] = {"num_tokens": [1, 1]}
    assert "reward some returned None for all 2 completions" in catch_message(
        rewards.call_rewards, alone, *asked
    )
