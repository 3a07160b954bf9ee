"""What a completion states: its answer, and not its thoughts, its working or its explanation."""

import re
from pathlib import Path
from types import SimpleNamespace

import mlx.core as mx
import numpy as np
import pytest
import yaml
from conftest import ROOT

import sampler
from rewards import audit, rewards, statements, verifiers
from step import generation, sample, scoring

TESTS = Path(__file__).parent
TABLE = yaml.safe_load((TESTS / "statements.yaml").read_text(encoding="utf-8"))
CHOICES = {
    "letters": list("ABCD"),
    "yes or no": ["yes", "no"],
    "sentiments": ["positive", "negative", "neutral"],
    "inference": ["entailment", "contradiction", "neutral"],
    "true or false": ["true", "false"],
    "mail": ["spam", "ham", "newsletter"],
}


def values_of(kind, row, texts):
    answers = CHOICES.get(kind, []) * 3 or [row["answer"]]
    _, verify = verifiers.choose_verifier("auto", answers)
    return verify(completions=texts, answer=[row["answer"]] * len(texts))


@pytest.mark.parametrize("kind", TABLE)
def test_an_answer_may_be_explained_and_an_explanation_is_no_answer(kind):
    for row in TABLE[kind]:
        rights = values_of(kind, row, row["right"])
        wrongs = values_of(kind, row, row["wrong"])
        missed = [text for text, value in zip(row["right"], rights, strict=True) if not value]
        paid = [text for text, value in zip(row["wrong"], wrongs, strict=True) if value]
        assert (missed, paid) == ([], []), row["answer"]


def test_each_rule_of_the_page_holds_for_its_example():
    page = (ROOT / "docs" / "data.md").read_text(encoding="utf-8")
    rules = re.findall(r"^\| ([^|]+) \| `` (.+?) `` \| (nothing|`[^`]+`) \|$", page, re.MULTILINE)
    assert len(rules) >= 15
    for rule, example, stated in rules:
        answers = answers_of_kind(example)
        _, verify = verifiers.choose_verifier("auto", answers)
        text = example.replace("\u23ce", "\n")
        right = [
            answer
            for answer in dict.fromkeys(answers)
            if verify(completions=[text], answer=[answer]) == [1]
        ]
        assert right == ([] if stated == "nothing" else [stated.strip("`")]), rule


def answers_of_kind(example):
    """The answers of the data set that an example of the page is about."""
    if '{"' in example:
        return ['{"team": "web"}']
    if "Paris" in example:
        return ["Paris"]
    return ["42", "41", "6"] if re.search("[0-9]", example) else list("ABCD") * 3


# ---- thoughts

OPENED = [
    "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n<think>\n",
    "<\uff5cUser\uff5c>Hi<\uff5cAssistant\uff5c><think>\n",
    "[INST]Hi[/INST][THINK]",
    "<|im_start|>assistant\n<think>\nLet me see.",
]
NOT_OPENED = [
    "<|im_start|>user\nWhat does <think> mean?<|im_end|>\n<|im_start|>assistant\n",
    "<|im_start|>assistant\n<think>\n\n</think>\n\n",
    "User: use <think> tags\nAssistant:",
    "",
]


@pytest.mark.parametrize("prompt", OPENED)
def test_a_prompt_that_ends_inside_a_thought_opens_it(prompt):
    opening = statements.unclosed_thought_in_prompt(prompt)
    assert opening and prompt.endswith(opening)
    assert statements.strip_thoughts(f"{opening}The answer is 42.") == ""


@pytest.mark.parametrize("prompt", NOT_OPENED)
def test_a_prompt_that_only_names_or_closes_a_thought_opens_none(prompt):
    assert statements.unclosed_thought_in_prompt(prompt) == ""


PAIRS = "<think> <thinking> <thought> <reasoning> [THINK] \u25c1think\u25b7 <Think> <seed:think> <|thinking|>".split()


@pytest.mark.parametrize("opening", PAIRS)
def test_a_thought_states_nothing_to_any_verifier(opening):
    closing = opening.replace("<|", "<|/") if "|" in opening else opening[0] + "/" + opening[1:]
    said = [
        f"{opening}The answer is 42.",
        f"{opening}\\boxed{{42}}{closing}",
        f"{opening}\\boxed{{41}}{closing}\\boxed{{42}}",
    ]
    for name in ("number", "exact", "marked"):
        _, verify = verifiers.choose_verifier(name, ["42"])
        assert verify(completions=said, answer=["42"] * 3) == [0, 0, 1], name


class Tokenizer:
    """Ids are characters, but for 0, an end."""

    def decode(self, ids, skip_special_tokens=True):
        return "".join(chr(token) for token in ids)


def rollout_of(texts, turns=None):
    rows = [[*map(ord, text), 0] for text in texts]
    width = max(map(len, rows))
    ids = np.zeros((len(rows), width), np.int32)
    mask = np.zeros((len(rows), width), np.float32)
    for place, row in enumerate(rows):
        ids[place, : len(row)] = row
        mask[place, : len(row)] = 1
    stats = sampler.RolloutStats(0.0, 0.0, 0)
    arrays = mx.array(ids), mx.array(mask) * 0, mx.array(mask)
    return sampler.Rollout(*arrays, ["stop"] * len(rows), stats, **(turns or {}))


def test_a_completion_of_a_prompt_that_opens_a_thought_begins_with_its_tag():
    opens, plain = ([*map(ord, prompt)] for prompt in (OPENED[0], NOT_OPENED[0]))
    cut_off, closed = "So the answer is 42.", "It is 41.\n</think>\n\n42"
    texts = generation.decode_with_opening_think_tags(
        Tokenizer(), rollout_of([cut_off, closed, cut_off]), [opens, opens, plain], [0]
    )
    assert texts == [f"<think>\n{cut_off}", f"<think>\n{closed}", cut_off]
    samples = [
        sample.Sample([], [], (), 0, example={"prompt": "?", "answer": "42"}, text=text)
        for text in texts
    ]
    components, _ = scoring.compute_rewards({"correct": verifiers.math_correct}, samples)
    assert components["correct"].tolist() == [0, 1, 1]


def test_each_turn_after_a_tool_begins_with_the_tag():
    first, told, second = "Let me call.</think>\n<call>", "[result]", "The answer is 42."
    sequence = [*map(ord, first), 0, *map(ord, told), *map(ord, second), 0]
    places = [*range(len(first) + 1), *range(len(first) + 1 + len(told), len(sequence))]
    rollout = rollout_of([first + second], {"sequences": [sequence], "places": [places]})
    (text,) = generation.decode_with_opening_think_tags(
        Tokenizer(), rollout, [[*map(ord, OPENED[0])]], [0]
    )
    assert text == f"<think>\n{first}\n<think>\n{second}"
    assert statements.strip_thoughts(text) == "<call>"


def test_a_judge_reads_what_follows_a_thought_and_our_rewards_too(tmp_path):
    judged = []
    grader = SimpleNamespace(score=lambda prompts, completions: judged.extend(completions))
    texts = ["<think>\nIt is 42.", "<think>\nIt is 41.\n</think>\n\n42", "42"]
    samples = [sample.Sample([], [], (), 0, example={"prompt": "?"}, text=text) for text in texts]
    scoring.judge_samples(grader, samples)
    assert judged == ["", "42", "42"]

    (tmp_path / "mine.py").write_text(
        "def seen(completions, **_): return [len(text) for text in completions]"
    )
    name, users = rewards.load_reward(f"{tmp_path}/mine.py:seen")
    heard = {"ours": lambda completions, **_: [len(text) for text in completions], name: users}
    values, _ = scoring.compute_rewards(heard, samples)
    assert values["ours"].tolist() == [0, 2, 2]
    assert values["seen"].tolist() == list(map(len, texts))


# ---- several right answers


def test_any_member_of_a_list_is_a_right_answer():
    cities = [["NYC", "New York"], ["LA", "Los Angeles"]]
    name, verify = verifiers.choose_verifier("auto", cities)
    assert name == "exact"
    said = ["It is New York.", "NYC\n\nIt is the largest.", "LA", "NYC or LA"]
    assert verify(completions=said, answer=[cities[0]] * 4) == [1, 1, 0, 0]
    assert verifiers.choose_verifier("number", [["42", "43"]])[1](
        completions=["43", "44"], answer=[["42", "43"]] * 2
    ) == [1, 0]
    letters = [["A", "C"], ["B"]] * 6
    name, verify = verifiers.choose_verifier("auto", letters)
    assert name == "choice"
    assert verify(completions=["C. Because", "A", "B", "A or C"], answer=[["A", "C"]] * 4) == [
        1,
        1,
        0,
        0,
    ]
    assert verify(completions=["A", "A"], answer=[[], None]) == [None, None]
    assert verifiers.is_comparable_answer(
        ["It depends on the weather, on the season and on you.", "Paris"]
    )


def test_the_audit_takes_lists_of_answers():
    examples = [
        {"prompt": f"{n} * 7?", "answer": [str(7 * n), f"{7 * n} pears"]} for n in (6, 3, 9)
    ]
    _, verify = verifiers.choose_verifier("auto", [example["answer"] for example in examples])
    found = audit.audit_reward("correct", verify, examples)
    assert found.form == audit.SENTENCE
    assert found.surprises == []
    assert {"explained afterwards", "boxed working before"} <= {
        line.name for line in found.lines if line.is_honest
    }
