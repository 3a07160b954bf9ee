"""Answers that are formulas, answers that are none, and 300 that are meant to hang or fool their readers."""

import random
import time
from collections.abc import Callable
from typing import NamedTuple

import pytest
from conftest import message_of, write_log
from test_tasks import HOSTILE, SCORED

import tasks
from problems import rewards
from problems.workers import Answer
from tasks import gsm8k

FORMULAS = [  # what stands in the box, the right answer, whether it is right
    (r"\frac{1}{2}", "0.5", True),
    (r"\frac12", "0.5", True),
    (r"\dfrac{3}{4}", r"\frac{3}{4}", True),
    (r"\tfrac{3}{4}", "0.75", True),
    (r"\frac{6}{8}", r"\frac{3}{4}", True),
    (r"-\frac{1}{2}", r"\frac{-1}{2}", True),
    (r"\frac{1}{-2}", r"-\frac{1}{2}", True),
    (r"1\frac{1}{2}", r"\frac{3}{2}", True),
    (r"\frac{1}{3}", "0.3", False),
    (r"\frac{2}{3}", r"\frac{3}{2}", False),
    (r"\frac{\pi}{2}", r"\frac12 \pi", True),
    (r"0.5\pi", r"\frac{\pi}{2}", True),
    (r"\pi", "3.14", False),
    (r"2\pi", r"\pi", False),
    (r"\sqrt{8}", r"2\sqrt{2}", True),
    (r"2\sqrt2", r"\sqrt{8}", True),
    (r"\sqrt{2}", r"\sqrt{3}", False),
    (r"\frac{1}{\sqrt{2}}", r"\frac{\sqrt{2}}{2}", True),
    (r"\sqrt[3]{8}", "2", True),
    (r"\sqrt{16}", "4", True),
    (r"\sqrt{15}", "4", False),
    (r"\frac{1+\sqrt{5}}{2}", r"\frac{\sqrt{5}+1}{2}", True),
    (r"\frac{1-\sqrt{5}}{2}", r"\frac{\sqrt{5}+1}{2}", False),
    (r"3+2\sqrt{2}", r"(1+\sqrt{2})^2", True),
    ("2^{10}", "1024", True),
    ("2^{10}", "1000", False),
    ("2^3 \\cdot 3^2", "72", True),
    (r"1.2 \times 10^{3}", "1200", True),
    (r"5 \cdot 10^{-1}", "0.5", True),
    ("10^{-3}", "0.001", True),
    ("x+1", "1+x", True),
    ("x+1", "x-1", False),
    ("x^2+2x+1", "(x+1)^2", True),
    ("x^2-1", "(x-1)(x+1)", True),
    ("x^2+1", "(x-1)(x+1)", False),
    ("2x+3y", "3y+2x", True),
    ("2x+3y", "3x+2y", False),
    ("6x^2-5x+1", "(2x-1)(3x-1)", True),
    (r"\frac{x^2-1}{x-1}", "x+1", True),
    ("a^2b", "ba^2", True),
    ("xy", "yx", True),
    ("x", "y", False),
    ("x = 5", "5", True),
    ("x=5", "x=5", True),
    ("x=5", "6", False),
    ("y = 2x + 1", "y=1+2x", True),
    ("y = 2x + 1", "y=2x-1", False),
    (r"\{1, 2, 3\}", r"\{3, 2, 1\}", True),
    (r"\{1, 2\}", r"\{1, 2, 3\}", False),
    (r"\{1,2,3\}", r"\{1,2,4\}", False),
    ("(1, 2)", "(1,2)", True),
    ("(1, 2)", "(2,1)", False),
    ("(1, 2, 3)", "(1,2)", False),
    (r"\left(1, 2\right)", "(1,2)", True),
    (r"\left( 3, \frac{\pi}{2} \right)", r"(3,\frac{\pi}{2})", True),
    (r"\left( 3, \frac{\pi}{3} \right)", r"(3,\frac{\pi}{2})", False),
    ("[1, 2]", "[1,2]", True),
    ("[1, 2)", "[1,2)", True),
    ("[1, 2)", "[1,2]", False),
    ("[1, 3]", "[1,2]", False),
    (r"(-\infty, 0)", r"(-\infty,0)", True),
    (r"(-\infty, 0) \cup (1, \infty)", r"(-\infty,0)\cup(1,\infty)", True),
    (r"(-\infty, 0) \cup (2, \infty)", r"(-\infty,0)\cup(1,\infty)", False),
    (r"(0, \infty)", r"(-\infty,0)", False),
    (r"\infty", r"\infty", True),
    (r"\infty", "5", False),
    (r"-\infty", r"\infty", False),
    (r"\sin x", r"\sin(x)", True),
    (r"\sin x", r"\cos x", False),
    (r"\sin^2 x + \cos^2 x", "1", True),
    (r"\cos 60^\circ", r"\frac{1}{2}", False),  # it is, but math-verify takes the 60 for radians
    (r"\log_2 8", "3", True),
    (r"\log_2 8", "4", False),
    (r"\ln e", "1", True),
    ("e^2", "e^2", True),
    ("e^2", "e^3", False),
    ("3!", "6", True),
    ("4!", "6", False),
    (r"\binom{5}{2}", "10", True),
    (r"\binom{5}{2}", "20", False),
    ("|-3|", "3", True),
    ("3+4i", "4i+3", True),
    ("3+4i", "3-4i", False),
    (r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}", r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}", True),
    (r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}", r"\begin{pmatrix} 2 \\ 1 \end{pmatrix}", False),
    (r"\begin{pmatrix} 1 & 0 \\ 0 & 1 \end{pmatrix}", r"\begin{pmatrix} 1 & 0 \\ 0 & 1 \end{pmatrix}", True),
    (r"\begin{pmatrix} 1 & 0 \\ 0 & 1 \end{pmatrix}", r"\begin{pmatrix} 0 & 1 \\ 1 & 0 \end{pmatrix}", False),
    (r"12\text{ cm}", "12", True),
    (r"12\text{ cm}", r"12 \text{ cm}", True),
    (r"12\text{ cm}", r"13 \text{ cm}", False),
    (r"90^\circ", "90", True),
    (r"\$18", "18", True),
    (r"50\%", "50", True),
    (r"10\%", r"10\%", True),
    ("1,234", "1234", True),
    ("0.333", r"\frac{1}{3}", False),
    ("3.0", "3", True),
    (r"\text{Evelyn}", r"\text{Evelyn}", True),
    (r"\text{Evelyn}", r"\text{Debra}", False),
    (r"\text{(B)}", r"\text{(B)}", True),
    (r"\text{(A)}", r"\text{(B)}", False),
    (r"\text{even}", r"\text{odd}", False),
    ("1 \\le x \\le 2", "1 \\leq x \\leq 2", True),
    ("x > 3", "x>3", True),
    ("x > 3", "x<3", False),
    ("x \\geq 3", "x \\geq 4", False),
    ("2, 3", "3,2", True),
    ("2, 3", "2,4", False),
    (r"2 \text{ or } 3", "2", False),
    ("2, 3", "3", False),
    (r"\frac{a}{b}", r"\frac{b}{a}", False),
    ("a/b", r"\frac{a}{b}", True),
    ("(a+b)/c", r"\frac{a+b}{c}", True),
    ("", "5", False),
    (r"\text{no solution}", "5", False),
]


NO_ANSWERS = r"""
The answer is 40, 41, or 42. | The answer is 42 or 43. | The answer is 42, 43, or 44.
The answer is between 42 and 43. | 41, 42 | 42, 43 | 42 or 41 | It could be 41 or 42. | It could be 42 or 41.
The possible answers are 41 and 42. | \boxed{41, 42} | \boxed{42 \text{ or } 43} | \boxed{not 42} | \boxed{\neq 42}
\boxed{42?} | 1 2 3 4 5 6 7 8 9 10 40 41 42 | The answer is not 42. | The answer isn't 42.
The answer is definitely not 42. | The answer can't be 42. | 42 is wrong. | 42 is not the answer.
The answer 42 is wrong. | It is anything but 42. | I doubt that it is 42. | We can rule out 42.
It is impossible that the answer is 42. | It is false that the answer is 42. | Nobody would say 42. | No, it's not 42!
I'm sorry, but I can't help with that. 42 | I cannot answer this. The number is 42. | I am unable to say 42.
What is 42? | Could the answer be 42? | What is 40 + 2? 42? | 40 + 2 | 6*7 | \boxed{6 \times 7} | 6 x 7
\boxed{84/2 + 0} | The answer is 43. Not 42. | 42? No, 43. | The answer is 43, not 42.
The answer is 43 rather than 42. | <think>42</think>43 | <think>42</think> | <think>The answer is 42.
<answer>42</answer><answer>43</answer> | 142 | 421 | 4.2 | 42.5 | -42 | 0.42 | x42 | 42x | 4 2 | 42e1 | 42! | 42^2
42/5 | 420 | 42 million | minus 42 | The answer is 42\pi | The answer is $\sqrt{42}$. | The answer is \sqrt{42} meters
\boxed{} | #### | Answer: | The answer is | \geq 42 | \boxed{42\\43} | <answer>41, 42</answer>
<answer>40 or 42</answer>
"""
ANSWERS = r"""
42 | 42. | **42** | $42$ | $$42$$ | \(42\) | (42) | +42 | 42.0 | 042 | forty-two | The answer is forty-two. | x = 42
The answer is 42! | **Answer:** 42 | The final answer is **42**. | Final Answer: \(\boxed{42}\) | So the total is $42.
So she has 42 apples left. | Therefore, 6 * 7 = 42. | Thus $x=42$. | The answer is $6 \times 7 = 42$.
The product is **42**. | <think>41?</think>42 | <think>hm</think> <answer>42</answer> | He has 42 apples and no pears.
The answer is 42, not 43. | 42 dollars | \boxed{42} Let me know if you have 3 more questions!
The answer is 42. Do you have another question? | \boxed{\text{42 apples}} | 84/2 | \frac{84}{2} | \boxed{\sqrt{1764}}
4.2e1 | 4.2 \times 10^1 | That makes 42 in all. | Let's see. 6 and 7. The answer must be 42.
The answer is 42 because 6*7 = 42. | The answer is 42 (forty-two). | The answer is approximately 42. | = 42
Hence 42. | She did not sell any. So 42 remain. | The answer isn't 41. The answer is 42.
"""
WORDS = [  # the right answer, what is said, whether it is right
    ("yes", "Yes.", True),
    ("Yes", "no", False),
    ("Paris", "The capital is paris.", True),
    ("Paris", "It is not Paris.", False),
    ("Paris", "Paris or Rome", False),
    ("silent", "listen", False),
    ("A", "The answer is (a).", True),
    ("A", "The answer is A or B.", False),
    ("false", "The answer is false.", True),
    ("5 meters", "5", True),
    ("5 meters", "5 feet", False),
    ("-5", "- 5", True),
    ("5", "negative 5", False),
    ("1/3", "0.333333", True),
    ("12345678", "12345679.000001", False),
    ("1000000.5", "\\boxed{1000000.9999999}", False),
    ("1000000/3", "333333.333333", True),
    ("7", "seven hundred", False),
    ("700", "seven hundred", True),
    ("700", "7 hundred", True),
    ("5 cm", "5 m", False),
    ("5 cm", "\\boxed{5\\text{ m}}", False),
    ("5 m", "5 m", True),
    ("55", "\\boxed{\\sum_{n=1}^{10} n}", False),
    ("42", "\\boxed{\\int_0^{42} 1 dx}", False),
    ("42", "\\boxed{\\lim_{x\\to 42} x}", False),
    ("42", "\\boxed{\\max(41,42)}", False),
    ("\\int x dx", "\\int x dx", True),
    ("sixteen", "16", True),
    ("sixteen", "It could be fifteen, sixteen or seventeen.", False),
    ("3", "The answer is $\\frac{\\sqrt{3}}{2}$.", False),
    ("1", "The answer is x+1.", False),
    ("[1, 2)", "(1,2]", False),
    ("\\boxed{42}", "42", True),
    ("The answer is 42.", "42", True),
    ("42", "<answer>42</answer>, since 6 * 7", True),
    (None, "None", False),
]


@pytest.fixture
def in_process(monkeypatch):
    """math-verify without its workers, which have tests of their own."""
    check = rewards.make_math_checker()
    monkeypatch.setattr(rewards, "_math_pool", lambda: Here(check))


class Here(NamedTuple):
    check: Callable

    def ask(self, pairs):
        return [Answer(self.check(pair)) for pair in pairs]


def test_a_guess_a_denial_a_question_and_a_sum_left_undone_state_no_answer(in_process):
    texts = [text for line in NO_ANSWERS.strip().splitlines() for text in line.split(" | ")]
    told = rewards.math_correct(completions=texts, answer=["42"] * len(texts))
    assert not [text for text, value in zip(texts, told, strict=True) if value]


def test_an_answer_counts_in_the_words_that_people_use(in_process):
    texts = [text for line in ANSWERS.strip().splitlines() for text in line.split(" | ")]
    told = rewards.math_correct(completions=texts, answer=["42"] * len(texts))
    assert not [text for text, value in zip(texts, told, strict=True) if not value]


@pytest.mark.parametrize(("right", "said", "is_right"), WORDS)
def test_words_and_units_are_compared_as_such(in_process, right, said, is_right):
    assert rewards.math_correct(completions=[said], answer=[right]) == [is_right]


@pytest.mark.slow
def test_a_table_of_200_answers_is_read_right(in_process):
    table = [(f"So it is \\boxed{{{said}}}.", gold, right) for said, gold, right in FORMULAS]
    table += [(said, gold, right) for said, gold, right in FORMULAS]
    table += [(text, gold, right) for text, gold, right in SCORED if len(text) < 1000]
    completions, golds, _ = (list(column) for column in zip(*table, strict=True))
    told = rewards.math_correct(completions=completions, answer=golds)
    assert not [row for row, found in zip(table, told, strict=True) if found != row[2]]


def hostile_answers() -> list[str]:
    """300 answers: towers, nests, long sums, calls, half-finished LaTeX."""
    rng = random.Random(0)
    parts = "10^{ 9**( 2^{2^{ \\frac{1}{ \\sqrt{ \\int_0^{ \\sum_{n=1}^{ \\left( \\begin{matrix}".split()
    parts += "( [ { \\binom{10^9}{ \\prod_{k=1}^{10^8}{ \\lim_{x\\to | f( \\log_{ - \\cdot".split()
    ends = ["", "}", ")", "1", "x", "10^{10^{10}}", "99999999!", "\\infty", "\\", "\\end{matrix}", "&", "\0", "\ud800"]
    found = [
        "10^{10^{10}}",
        "9^{9^{9^9}}",
        "99999!!",
        "1" * 100_000,
        "2^{99999999}",
        "\\int " * 5000,
        "__import__('os')",
    ]
    found += [part * size + end for part in parts for size in (3, 40, 10_000) for end in ends[:4]]
    while len(found) < 300:
        found.append("".join(rng.choice(parts + ends) for _ in range(rng.randint(1, 25))))
    return found


@pytest.mark.slow
def test_300_hostile_answers_end_within_the_limit_and_none_is_right(monkeypatch):
    monkeypatch.setattr(rewards, "MATH_LIMIT", 1.0)
    rewards._math_pool.cache_clear()
    texts = [*HOSTILE, *(f"\\boxed{{{said}}}" for said in hostile_answers()), *hostile_answers()[::6]]
    assert len(texts) > 300
    for text in texts:
        begin = time.process_time()
        assert rewards._read_plainly("42", rewards.extract_answer(text)) is not True
        assert time.process_time() - begin < 2, "100,000 characters"
    assert rewards.math_correct(completions=texts, answer=["42"] * len(texts)) == [0] * len(texts)
    rewards._math_pool.cache_clear()


def test_the_limit_holds_in_a_thread_too():
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(1) as threads:
        told = threads.submit(rewards.math_correct, ["\\boxed{\\frac{84}{2}}"], ["42"]).result()
    assert told == [1]


# ---- the task


def test_math_reads_problems_with_an_answer_or_with_a_boxed_solution(tmp_path):
    rows = [{"problem": f"{n}?", "answer": f"\\frac{{{n}}}{{3}}", "split": "train"} for n in range(3)]
    rows.append({"problem": "last?", "solution": "We get \\boxed{1}, no, \\boxed{\\frac{2}{4}}.", "split": "test"})
    task = tasks.load("math", data=write_log(tmp_path / "math.jsonl", rows))
    assert [example["answer"] for example in task.held_out] == [r"\frac{2}{4}"] and task.metric == "accuracy"
    assert task.train[0]["system"] == gsm8k.SYSTEM
    asked = {"answer": [task.held_out[0]["answer"]] * 2}
    assert task.verifier(completions=["\\boxed{0.5}", "\\boxed{0.6}"], **asked) == [1, 0]
    path = write_log(tmp_path / "none.jsonl", [{"problem": "p?", "solution": "no box"}])
    assert "line 1: no answer" in message_of(tasks.load, "math", data=path)
    assert "--data FILE.jsonl" in message_of(tasks.load, "math")
