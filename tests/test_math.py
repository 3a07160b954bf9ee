"""Answers that are formulas: a table read by math-verify and by our reader; 300 answers meant to hang or fool them."""

import json
import random
import time
from types import SimpleNamespace

import pytest
from conftest import message_of
from extras import needs
from test_tasks import HOSTILE, SCORED

import tasks
from problems import rewards
from problems.workers import Answer

library = needs("math_verify", "tasks")

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


@library
@pytest.mark.slow
def test_a_table_of_200_answers_is_read_right_and_the_readers_agree_on_most_of_it(capsys, monkeypatch):
    check = rewards.make_math_checker()  # here: workers are tested below
    here = SimpleNamespace(ask=lambda pairs: [Answer(check(pair)) for pair in pairs])
    monkeypatch.setattr(rewards, "_math_pool", lambda: here)
    table = [(f"So it is \\boxed{{{said}}}.", gold, right) for said, gold, right in FORMULAS]
    table += [(text, gold, right) for text, gold, right in SCORED if len(text) < 1000]
    assert len(table) >= 200
    completions, golds, rights = (list(column) for column in zip(*table, strict=True))
    both = rewards.math_correct(completions=completions, answer=golds)
    wrong = [(row[:2], found) for row, found, right in zip(table, both, rights, strict=True) if found != right]
    ours = tasks.gsm8k_correct(completions=completions, answer=golds)
    pairs = [(gold, rewards.extract_answer(text) or "") for text, gold, _ in table]
    theirs = [answer.value is True for answer in rewards._math_pool().ask(pairs)]
    agree = sum(bool(a) == b for a, b in zip(ours, theirs, strict=True))
    alone = [sum(bool(a) == right for a, right in zip(found, rights, strict=True)) for found in (ours, theirs)]
    with capsys.disabled():
        print(f"\n{len(table)} answers, read by ours {alone[0]}, by math-verify {alone[1]}, by both alike {agree}")
    assert not wrong and alone[0] > 150 and alone[1] > 190 and agree > 140


def hostile_answers() -> list[str]:
    """300 answers: towers, nests, long sums, calls, half-finished LaTeX."""
    rng = random.Random(0)
    parts = [
        "10^{",
        "9**(",
        "2^{2^{",
        "\\frac{1}{",
        "\\sqrt{",
        "\\int_0^{",
        "\\sum_{n=1}^{",
        "\\left(",
        "\\begin{matrix}",
    ]
    parts += [
        "(",
        "[",
        "{",
        "\\binom{10^9}{",
        "\\prod_{k=1}^{10^8}{",
        "\\lim_{x\\to",
        "|",
        "f(",
        "\\log_{",
        "-",
        "\\cdot",
    ]
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


@library
@pytest.mark.slow
def test_300_hostile_answers_end_within_the_limit_and_none_is_right(monkeypatch):
    monkeypatch.setattr(rewards, "MATH_LIMIT", 1.0)
    rewards._math_pool.cache_clear()
    texts = [*HOSTILE, *(f"\\boxed{{{said}}}" for said in hostile_answers()), *hostile_answers()[::6]]
    assert len(texts) > 300
    for text in texts:
        begin = time.process_time()
        assert tasks.gsm8k_correct(completions=[text], answer=["42"]) == [0]
        assert time.process_time() - begin < 2, "100,000 characters"
    assert rewards.math_correct(completions=texts, answer=["42"] * len(texts)) == [0] * len(texts)
    rewards._math_pool.cache_clear()


@library
def test_the_limit_holds_in_a_thread_too():
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(1) as threads:
        told = threads.submit(rewards.math_correct, ["\\boxed{\\frac{84}{2}}"], ["42"]).result()
    assert told == [1]


# ---- the task


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


@library
def test_math_reads_problems_with_an_answer_or_with_a_boxed_solution(tmp_path):
    rows = [{"problem": f"{n}?", "answer": f"\\frac{{{n}}}{{3}}", "split": "train"} for n in range(3)]
    rows.append({"problem": "last?", "solution": "We get \\boxed{1}, no, \\boxed{\\frac{2}{4}}.", "split": "test"})
    task = tasks.load("math", data=write(tmp_path / "math.jsonl", rows))
    assert [example["answer"] for example in task.held_out] == [r"\frac{2}{4}"] and task.metric == "accuracy"
    assert task.train[0]["system"] == tasks.GSM8K_SYSTEM
    asked = {"answer": [task.held_out[0]["answer"]] * 2}
    assert task.verifier(completions=["\\boxed{0.5}", "\\boxed{0.6}"], **asked) == [1, 0]
    path = write(tmp_path / "none.jsonl", [{"problem": "p?", "solution": "no box"}])
    assert "line 1: no answer" in message_of(tasks.load, "math", data=path)
    assert "--data FILE.jsonl" in message_of(tasks.load, "math")


@library
def test_gsm8k_is_verified_by_both_readers_where_the_library_is_installed(tmp_path):
    rows = [{"question": f"{n}?", "answer": f"#### {n}"} for n in range(20)]
    task = tasks.load("gsm8k", data=write(tmp_path / "gsm8k.jsonl", rows))
    assert task.verifier is rewards.math_correct and task.rewards["correct"] is rewards.math_correct


def test_without_the_library_mathematics_says_how_to_install_it_and_gsm8k_reads_numbers(monkeypatch, tmp_path):
    monkeypatch.setattr(tasks, "has_math_verify", lambda: False)
    monkeypatch.setattr(rewards, "has_math_verify", lambda: False)
    assert "uv run --extra tasks" in message_of(tasks.load, "math")
    assert "uv run --extra tasks" in message_of(rewards.load_reward, "math_verify")
    rows = [{"question": f"{n}?", "answer": f"#### {n}"} for n in range(20)]
    assert tasks.load("gsm8k", data=write(tmp_path / "gsm8k.jsonl", rows)).verifier is tasks.gsm8k_correct
