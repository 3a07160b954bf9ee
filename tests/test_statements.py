"""A completion states an answer; thoughts, working and explanations state nothing."""

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


def score_with_auto_verifier(kind, row, completions):
    answers = CHOICES.get(kind, []) * 3 or [row["answer"]]
    _, verify = verifiers.choose_verifier("auto", answers)
    return verify(completions=completions, answer=[row["answer"]] * len(completions))


@pytest.mark.parametrize("kind", TABLE)
def test_an_explained_answer_is_rewarded_and_an_explanation_alone_is_not(kind):
    for row in TABLE[kind]:
        values = score_with_auto_verifier(kind, row, row["right"])
        missed = [text for text, value in zip(row["right"], values, strict=True) if not value]
        assert missed == [], row["answer"]

        values = score_with_auto_verifier(kind, row, row["wrong"])
        rewarded = [text for text, value in zip(row["wrong"], values, strict=True) if value]
        assert rewarded == [], row["answer"]


def test_each_rule_on_the_page_about_data_holds_for_the_example_beside_it():
    page = (ROOT / "docs" / "data.md").read_text(encoding="utf-8")
    rules = re.findall(r"^\| ([^|]+) \| `` (.+?) `` \| (nothing|`[^`]+`) \|$", page, re.MULTILINE)
    assert len(rules) >= 15
    for rule, example, stated_answer in rules:
        answers = answers_of_kind(example)
        _, verify = verifiers.choose_verifier("auto", answers)
        completion = example.replace("\u23ce", "\n")
        right_answers = []
        for answer in dict.fromkeys(answers):
            if verify(completions=[completion], answer=[answer]) == [1]:
                right_answers.append(answer)
        expected = [] if stated_answer == "nothing" else [stated_answer.strip("`")]
        assert right_answers == expected, rule


def answers_of_kind(example):
    """The answers of a data set to which an example on the page belongs."""
    if '{"' in example:
        return ['{"team": "web"}']
    if "Paris" in example:
        return ["Paris"]
    return ["42", "41", "6"] if re.search("[0-9]", example) else list("ABCD") * 3


# ---- thoughts

PROMPTS_INSIDE_A_THOUGHT = [
    "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n<think>\n",
    "<\uff5cUser\uff5c>Hi<\uff5cAssistant\uff5c><think>\n",
    "[INST]Hi[/INST][THINK]",
    "<|im_start|>assistant\n<think>\nLet me see.",
]
PROMPTS_OUTSIDE_A_THOUGHT = [
    "<|im_start|>user\nWhat does <think> mean?<|im_end|>\n<|im_start|>assistant\n",
    "<|im_start|>assistant\n<think>\n\n</think>\n\n",
    "User: use <think> tags\nAssistant:",
    "",
]


@pytest.mark.parametrize("prompt", PROMPTS_INSIDE_A_THOUGHT)
def test_the_opening_tag_of_a_prompt_that_ends_inside_a_thought_is_found(prompt):
    opening = statements.unclosed_thought_in_prompt(prompt)
    assert opening
    assert prompt.endswith(opening)
    assert statements.strip_thoughts(f"{opening}The answer is 42.") == ""


@pytest.mark.parametrize("prompt", PROMPTS_OUTSIDE_A_THOUGHT)
def test_a_prompt_that_mentions_or_closes_a_thought_does_not_end_inside_one(prompt):
    assert statements.unclosed_thought_in_prompt(prompt) == ""


OPENING_TAGS = "<think> <thinking> <thought> <reasoning> [THINK] \u25c1think\u25b7 <Think> <seed:think> <|thinking|>".split()


@pytest.mark.parametrize("opening", OPENING_TAGS)
def test_a_thought_states_nothing_to_any_verifier(opening):
    closing = opening.replace("<|", "<|/") if "|" in opening else opening[0] + "/" + opening[1:]
    completions = [
        f"{opening}The answer is 42.",
        f"{opening}\\boxed{{42}}{closing}",
        f"{opening}\\boxed{{41}}{closing}\\boxed{{42}}",
    ]
    for name in ("number", "exact", "marked"):
        _, verify = verifiers.choose_verifier(name, ["42"])
        assert verify(completions=completions, answer=["42"] * 3) == [0, 0, 1], name


class Tokenizer:
    """A tokenizer whose ids are code points. Id 0 ends a completion."""

    def decode(self, ids, skip_special_tokens=True):
        return "".join(chr(token) for token in ids)


def encode(text):
    """The ids of a text: its code points."""
    return [ord(character) for character in text]


def make_rollout(texts, **turns):
    """A rollout with these completions."""
    rows = [[*encode(text), 0] for text in texts]
    length = max(map(len, rows))
    ids = np.zeros((len(rows), length), np.int32)
    mask = np.zeros((len(rows), length), np.float32)
    for place, row in enumerate(rows):
        ids[place, : len(row)] = row
        mask[place, : len(row)] = 1
    stats = sampler.RolloutStats(0.0, 0.0, 0)
    logprobs = mx.zeros(mask.shape)
    finish_reasons = ["stop"] * len(rows)
    return sampler.Rollout(mx.array(ids), logprobs, mx.array(mask), finish_reasons, stats, **turns)


def make_sample(text, **example):
    return sample.Sample([], [], (), 0, example={"prompt": "?"} | example, text=text)


def test_the_text_of_a_completion_begins_with_the_tag_that_the_prompt_opened():
    prompt_inside = encode(PROMPTS_INSIDE_A_THOUGHT[0])
    prompt_outside = encode(PROMPTS_OUTSIDE_A_THOUGHT[0])
    cut_off = "So the answer is 42."
    closed = "It is 41.\n</think>\n\n42"
    texts = generation.decode_with_opening_think_tags(
        Tokenizer(),
        make_rollout([cut_off, closed, cut_off]),
        [prompt_inside, prompt_inside, prompt_outside],
        [0],
    )
    assert texts == [f"<think>\n{cut_off}", f"<think>\n{closed}", cut_off]

    samples = [make_sample(text, answer="42") for text in texts]
    components, _ = scoring.compute_rewards({"correct": verifiers.math_correct}, samples)
    assert components["correct"].tolist() == [0, 1, 1]


def test_the_text_of_each_turn_after_a_tool_result_begins_with_the_tag():
    first_turn = "Let me call.</think>\n<call>"
    tool_result = "[result]"
    second_turn = "The answer is 42."
    sequence = [*encode(first_turn), 0, *encode(tool_result), *encode(second_turn), 0]
    begin_of_second = len(first_turn) + 1 + len(tool_result)
    places = [*range(len(first_turn) + 1), *range(begin_of_second, len(sequence))]
    rollout = make_rollout([first_turn + second_turn], sequences=[sequence], places=[places])
    prompt = encode(PROMPTS_INSIDE_A_THOUGHT[0])
    (text,) = generation.decode_with_opening_think_tags(Tokenizer(), rollout, [prompt], [0])
    assert text == f"<think>\n{first_turn}\n<think>\n{second_turn}"
    assert statements.strip_thoughts(text) == "<call>"


def test_a_judge_and_built_in_rewards_get_no_thoughts_but_own_rewards_get_them(tmp_path):
    judged_texts = []
    grader = SimpleNamespace(score=lambda prompts, completions: judged_texts.extend(completions))
    texts = ["<think>\nIt is 42.", "<think>\nIt is 41.\n</think>\n\n42", "42"]
    samples = [make_sample(text) for text in texts]
    scoring.judge_samples(grader, samples)
    assert judged_texts == ["", "42", "42"]

    def built_in_reward(completions, **_):
        return [len(text) for text in completions]

    (tmp_path / "mine.py").write_text(
        "def own(completions, **_): return [len(text) for text in completions]"
    )
    name, own_reward = rewards.load_reward(f"{tmp_path}/mine.py:own")
    components, _ = scoring.compute_rewards(
        {"built_in": built_in_reward, name: own_reward}, samples
    )
    assert components["built_in"].tolist() == [0, 2, 2]
    assert components["own"].tolist() == [len(text) for text in texts]


# ---- several right answers


def test_each_member_of_a_list_of_answers_is_a_right_answer():
    # cities
    cities = [["NYC", "New York"], ["LA", "Los Angeles"]]
    name, verify = verifiers.choose_verifier("auto", cities)
    assert name == "exact"
    completions = ["It is New York.", "NYC\n\nIt is the largest.", "LA", "NYC or LA"]
    assert verify(completions=completions, answer=[cities[0]] * 4) == [1, 1, 0, 0]

    # numbers
    numbers = ["42", "43"]
    _, verify = verifiers.choose_verifier("number", [numbers])
    assert verify(completions=["43", "44"], answer=[numbers] * 2) == [1, 0]

    # letters
    name, verify = verifiers.choose_verifier("auto", [["A", "C"], ["B"]] * 6)
    assert name == "choice"
    completions = ["C. Because", "A", "B", "A or C"]
    assert verify(completions=completions, answer=[["A", "C"]] * 4) == [1, 1, 0, 0]
    assert verify(completions=["A", "A"], answer=[[], None]) == [None, None]

    # a list with prose
    prose = "It depends on the weather, on the season and on you."
    assert verifiers.is_comparable_answer([prose, "Paris"])


def test_the_audit_accepts_lists_of_answers():
    examples = []
    for n in (6, 3, 9):
        examples.append({"prompt": f"{n} * 7?", "answer": [str(7 * n), f"{7 * n} pears"]})
    _, verify = verifiers.choose_verifier("auto", [example["answer"] for example in examples])
    result = audit.audit_reward("correct", verify, examples)
    assert result.form == audit.SENTENCE
    assert result.surprises == []
    honest_names = {line.name for line in result.lines if line.is_honest}
    assert {"explained afterwards", "boxed working before"} <= honest_names
