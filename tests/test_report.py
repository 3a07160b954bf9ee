"""The page of a run shows what the files of the run hold. A browser opens it, and no quoted text acts as code."""

import base64
import functools
import html
import json
import random
import re
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
import yaml
from conftest import read_log, write_log
from tokenizers import Tokenizer

import report
from disk import hub, run_files
from reporting import answer_changes, charts, history, page, seeds, verdict

HOSTILE = [
    "</script><script>window.pwned=1</script>",
    "<img src=x onerror=window.pwned=1>",
    '" onmouseover="window.pwned=1',
    "<svg/onload=window.pwned=1>",
    "javascript:window.pwned=1",
    "{{ 7 * 7 }}{% raw %}",
    "<!--<script>",
    "]]>",
    "-->",
    "</bdi></article>",
    "&lt;script&gt;",
    "\u202e txet",
    "\u2066\u2067",
    "\ud800",
    "\udfff",
    "\x00\x1b[2J",
    "\x85",
    "\u2028",
    "\u2029",
    "\r\n",
    "\ufeff",
    "\U000e0041",
    "\t",
    "'",
    "\\",
    "\\u003cscript\\u003e",
    "</style>",
    "<",
    "z\u0300\u0301\u0302" * 20,
    "\u05e9\u05dc\u05d5\u05dd",
    "\U0001f468\u200d\U0001f469",
    "</title>",
    "</svg>",
]


@pytest.mark.parametrize("low", [0.0, 1.0, -3e-9, 2.7, 1e9])
@pytest.mark.parametrize("width", [0.0, 1e-7, 0.3, 1e3])
def test_axis_ticks_enclose_the_values_even_if_these_differ_only_by_rounding(low, width):
    ticks = charts.choose_round_axis_ticks(low, low + width)
    assert 2 <= len(ticks) <= 6
    assert ticks[0] < ticks[-1]
    slack = 1e-6 * (abs(low) + width)
    assert ticks[0] <= low + slack
    assert low + width <= ticks[-1] + slack


@functools.cache
def load_demo_tokenizer():
    return Tokenizer.from_file(str(hub.DEMO / "tokenizer.json"))


def step_record(step):
    return {
        "step": step,
        "reward/mean": step / 10,
        "reward/correct": step / 20,
        "entropy": 1.0 / step,
        "rollout/tok_s": 18.5,
        "reward/std": 0.5,
        "reward/zero_std_frac": 0.25,
        "reward/none": 0,
        "kl": None,
        "reward/s": 0.1,
        "rollout/s": 2.0,
        "judge/s": 0.0,
        "update/s": 0.5,
        "other/s": 0.0,
        "step/s": 1.6,
        "grad_norm": 0.3,
        "completion/mean_tokens": 5.0,
        "completion/truncated_frac": 0.0,
        "mem/peak_gb": 0.25,
    }


def eval_record(step, accuracy):
    return {
        "step": step,
        "eval/accuracy": accuracy,
        "eval/accuracy_ci95": 0.125,
        "eval/num": 8,
        "eval/s": 2.0,
    }


def answer_record(step, problem, text, value, reward=None):
    rewards = [value if reward is None else reward]
    return {
        "step": step,
        "problem": problem,
        "prompt": f"Problem {problem}?",
        "answer": "five",
        "category": None,
        "completions": [text],
        "values": [value],
        "reward": rewards,
        "rewards": {"correct": rewards},
    }


def completion_record(step, group, member, text):
    ids = load_demo_tokenizer().encode(text, add_special_tokens=False).ids
    logprobs = np.linspace(-2, -0.5, len(ids)).astype("<f2")
    return {
        "step": step,
        "group": group,
        "prompt": f"Prompt {group}?",
        "answer": "five",
        "category": "sums",
        "completion": text,
        "ids": ids,
        "logprobs": base64.b64encode(logprobs.tobytes()).decode(),
        "reward": member / 4,
        "rewards": {"correct": member / 4},
        "advantage": member - 1.5,
        "judge_scores": [member + 1.0, None if member == 0 else 3.0, 5.0],
        "finish_reason": "length" if member == 1 else "stop",
    }


def make_charts_by_title(*runs):
    return {chart["title"]: chart for chart in charts.make_charts(seeds.load_seed_groups(runs))}


@pytest.fixture
def run(tmp_path):
    """A run of four steps and two evaluations, without any training."""
    return make_run(tmp_path / "runs" / "small")


def make_run(folder):
    folder.mkdir(parents=True)
    settings = {
        "model": "demo",
        "task": "demo",
        "batch": 2,
        "groups": 4,
        "steps": 6,
        "learning_rate": 0.004,
    }
    (folder / "config.yaml").write_text(yaml.safe_dump(settings))
    environment = {"machine": "a laptop", "device": "cpu", "commit": "abc"}
    (folder / "env.json").write_text(json.dumps(environment))
    write_log(folder / "metrics.jsonl", [step_record(step) for step in range(1, 5)])
    write_log(folder / "eval.jsonl", [eval_record(0, 0.25), eval_record(4, 0.75)])

    before = [answer_record(0, problem, "Two plus three is six.", 0.0) for problem in range(4)]
    after = [answer_record(4, problem, "Two plus three is five.", 1.0) for problem in range(3)]
    wrong_with_reward = answer_record(4, 3, "Nine is five.", 0.0, 1.0)
    write_log(folder / "eval_answers.jsonl", [*before, *after, wrong_with_reward])

    texts = ["Two plus three is five.", "Twenty-two", "Forty plus one is nine.", "Six."]
    records = []
    for step in range(1, 5):
        for group in range(2):
            for member, text in enumerate(texts):
                records.append(completion_record(step, group, member, text))
    write_log(folder / "rollouts.jsonl", records)

    warning = {"step": 3, "name": "entropy", "text": "It fell. Try a higher --temp"}
    write_log(folder / "warnings.jsonl", [warning])
    return folder


def page_data(markup):
    pattern = r'<script type="application/json" id="data">(.*?)</script>'
    return json.loads(re.search(pattern, markup, re.S)[1])


def remove_tags(markup):
    return re.sub("<[^>]+>", "", markup)


def edit_settings(folder, **settings):
    """Change settings in the recorded settings of a run."""
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump(yaml.safe_load(path.read_text()) | settings))


def test_the_page_shows_the_figures_the_answers_and_the_warnings_of_the_files(run):
    markup = page.write_page(run).read_text()
    changed_words = re.findall(r"<mark>(.*?)</mark>", markup)  # changed since before training
    assert "five" in changed_words
    assert "Two" not in changed_words

    text = re.sub(r"\s+", " ", html.unescape(remove_tags(markup)))
    for expected_text in (
        "0.250 \u00b1 0.125",
        "0.750 \u00b1 0.125",
        "4 of 6",
        "0.25 GB",
        "148",
        "a laptop",
        "became right",
        "Two plus three is six.",
        "Nine is five.",
        "It fell. Try a higher --temp",
        "learning_rate",
    ):
        assert expected_text in text, expected_text
    assert f"uv run train.py --config {run}/config.yaml --run-dir {run}-again" in text


def test_wrong_answers_with_the_highest_reward_are_counted(run):
    first_sign = verdict.reach_verdict_on_held_out_change(history.load_history(run)).signs[0]
    assert first_sign == f"{answer_changes.CHEATED}: 0 -> 1 answers"

    answers = page.held_out_answers_for_page(history.load_history(run))
    assert answers["counts"] == {"became right": 3, answer_changes.CHEATED: 1}
    assert answers["first"][-1]["cells"][-1]["text"] == "Nine is five."


def test_the_page_shows_greedy_answers_below_sampled_ones(run):
    log = run / "eval_answers.jsonl"
    records = read_log(log)
    for record in records:
        if record["problem"] != 0:
            record |= {"greedy": record["completions"][0], "greedy_value": 1.0}
        elif record["step"] == records[-1]["step"]:
            record |= {"greedy": "It is <b>ten</b>.", "greedy_value": 0.0}
    write_log(log, records)

    answers = page.held_out_answers_for_page(history.load_history(run))
    row, *other_rows = answers["rows"]
    assert [cell["greedy"] for cell in row["cells"]] == [
        None,
        {"text": "It is <b>ten</b>.", "right": False, "value": ""},
    ]
    for other_row in other_rows:
        assert other_row["cells"][-1]["greedy"] == {"text": None, "right": True, "value": ""}

    text = page.write_page(run).read_text()
    assert 'greedy answer: <bdi class="text">It is &lt;b&gt;ten&lt;/b&gt;.</bdi>' in text
    assert "greedy answer: the same" in text


def test_the_page_holds_the_reward_and_the_judge_scores_of_each_completion(run):
    completions = page_data(page.write_page(run).read_text())["completions"]
    assert completions["of"] == len(completions["groups"]) == 8
    assert completions["criteria"] == ["correct", "working", "sentence"]

    page_rows = [row for group in completions["groups"] for row in group["rows"]]
    page_values = {(row["text"], row["reward"], *row["scores"]) for row in page_rows}
    records = read_log(run / "rollouts.jsonl")
    assert page_values == {
        (record["completion"], record["reward"], *record["judge_scores"]) for record in records
    }
    for row in page_rows:
        assert row["unreadable"] == (None in row["scores"])


def test_the_curves_have_the_values_of_the_metrics(run):
    charts_by_title = make_charts_by_title(run)
    reward = charts_by_title["Reward"]["series"][0]
    assert reward["x"] == [1, 2, 3, 4]
    assert reward["y"] == [0.1, 0.2, 0.3, 0.4]
    assert charts_by_title["Held-out"]["series"][0]["y"] == [0.25, 0.75]

    components = charts_by_title["Reward by component"]["series"]
    assert [series["label"] for series in components] == ["correct"]
    phases = charts_by_title["Seconds"]["series"]
    assert [series["label"] for series in phases] == ["rollout", "reward", "update"]
    assert [mark["step"] for mark in charts_by_title["Entropy"]["marks"]] == [3]


def test_a_run_has_a_curve_of_the_learning_rate_if_target_kl_lowered_it(run):
    assert charts.RATE not in make_charts_by_title(run)
    records = [record | {"update/rate": 0.5} for record in read_log(run / "metrics.jsonl")]
    write_log(run / "metrics.jsonl", records)
    assert make_charts_by_title(run)[charts.RATE]["series"][0]["y"] == [0.5] * 4


def test_a_page_of_several_runs_draws_them_in_the_same_charts(run):
    other = make_run(run.parent / "other")
    entropy_series = make_charts_by_title(run, other)["Entropy"]["series"]
    labels = [series["label"] for series in entropy_series]
    assert labels == ["small: entropy", "other: entropy"]

    page_of_one = page.write_page(run)
    markup = page_of_one.read_text()
    time_before = page_of_one.stat().st_mtime_ns
    page_of_both = page.write_page(run, other_runs=[str(other)])
    assert page_of_both == run.parent / "small-against-other.html"
    assert "small against other" in page_of_both.read_text()
    assert page_of_one.stat().st_mtime_ns == time_before
    assert page_of_one.read_text() == markup


# ---- seeds

ACCURACIES = {"low": (0.5, 0.6, 0.75), "high": (0.625, 0.65, 0.9)}


@pytest.fixture
def seed_dirs(tmp_path):
    """Two directories of three seeds, whose learning rates differ."""
    for name, accuracies in ACCURACIES.items():
        for seed, accuracy in enumerate(accuracies):
            folder = make_run(tmp_path / name / f"seed-{seed}")
            edit_settings(
                folder, seed=seed, learning_rate=len(name) / 1e3, rollout_batch_size=8 + seed
            )
            if seed == 1:
                edit_settings(folder, curriculum=False)  # a setting that no longer exists
            write_log(folder / "eval.jsonl", [eval_record(0, 0.25), eval_record(4, accuracy)])
    return [str(tmp_path / name) for name in ACCURACIES]


def describe_seeds(directories):
    return seeds.describe_spreads_and_differences(seeds.load_seed_groups(directories))


def test_seed_groups_have_means_and_spreads_and_a_paired_difference(seed_dirs):
    """By hand: the differences are 0.125, 0.05, 0.15; t at 97.5% with 2 degrees of freedom is 4.303."""
    low_line, high_line, difference_line = describe_seeds(seed_dirs)
    low = np.array(ACCURACIES["low"])
    high = np.array(ACCURACIES["high"])
    assert (
        f"low: accuracy {low.mean():.3f}, std {low.std(ddof=1):.3f} over 3 seeds (0.500 to 0.750) after 4 s"
        in low_line
    )
    assert f"high: accuracy {high.mean():.3f}, std {high.std(ddof=1):.3f} over 3 seeds" in high_line

    differences = np.array([0.125, 0.05, 0.15])
    half_width = 4.303 * differences.std(ddof=1) / 3**0.5
    start = f"high - low: {differences.mean():+.3f} \u00b1 {half_width:.3f} (95%"
    assert difference_line.startswith(start)
    assert difference_line.endswith("over 3 pairs: +0.125 +0.050 +0.150")

    # No difference is formed if the numbers of held-out problems differ.
    for seed in range(3):
        evaluations = [eval_record(0, 0.25), eval_record(4, 0.5) | {"eval/num": 7}]
        write_log(Path(seed_dirs[1]) / f"seed-{seed}" / "eval.jsonl", evaluations)
    num = eval_record(4, 0.5)["eval/num"]
    last_line = describe_seeds(seed_dirs)[-1]
    assert last_line.endswith(f" 7 and {num} held-out problems, respectively")


def test_seeds_of_equal_settings_form_a_group_in_any_directory_but_repetitions_do_not(
    run, seed_dirs
):
    folders = [f"{folder}/seed-{seed}" for seed in (2, 0) for folder in seed_dirs]
    for group in seeds.load_seed_groups(folders):
        assert [member.settings["seed"] for member in group.runs] == [0, 2]
    assert len(seeds.load_seed_groups(folders)) == 2

    repetition = make_run(run.parent / "again")
    groups = seeds.load_seed_groups([run, repetition])
    assert [len(group.runs) for group in groups] == [1, 1]

    last_line = describe_seeds([seed_dirs[0], run])[-1]
    assert "fewer than two seeds have an evaluation" in last_line

    # The evaluations of the other group have a score but no accuracy. The first seed has none.
    for seed in range(3):
        path = Path(seed_dirs[1]) / f"seed-{seed}" / "eval.jsonl"
        evaluation = {"step": 4, "eval/score": 3.0, "eval/num": 4}
        write_log(path, [evaluation] if seed > 0 else [])
    high_line, _, difference_line = describe_seeds(seed_dirs[::-1])
    assert high_line.startswith("high: score 3.000, std 0.000 over 2 seeds")
    assert "have an evaluation of the score" in difference_line
    assert "have an evaluation of the accuracy" in describe_seeds(seed_dirs)[-1]


def test_a_step_that_one_seed_did_not_measure_is_missing_from_the_curve_of_the_seeds(seed_dirs):
    records = [step_record(step) | {"entropy": 1.0} for step in (1, 3, 4)]
    write_log(Path(seed_dirs[0]) / "seed-1" / "metrics.jsonl", records)
    (series,) = make_charts_by_title(seed_dirs[0])["Entropy"]["series"]
    assert series["x"] == [1, 3, 4]


def test_report_writes_a_page_of_seeds_into_their_directory(seed_dirs, capsys):
    report.main([seed_dirs[0]])
    lines = capsys.readouterr().out.splitlines()
    assert lines == [*describe_seeds(seed_dirs[:1]), f"{seed_dirs[0]}/report.html"]
    markup = (Path(seed_dirs[0]) / "report.html").read_text()
    assert lines[0] in markup
    assert "are from <bdi>" in markup

    report.main(["--compare", *seed_dirs])
    table = capsys.readouterr().out.splitlines()
    expected_head = [f"{name}/seed-{seed}" for name in ("low", "high") for seed in range(3)]
    assert table[0].split() == expected_head
    assert table[-2].startswith("high - low: +0.108")
    assert table[-1].startswith("high - low, by problem: ")

    report.main(["--list", str(Path(seed_dirs[0]).parent)])
    output = capsys.readouterr().out
    assert len(output.splitlines()) == 2 + 6
    assert "4 of 6, stopped  0.250 \u00b1 0.125  0.500 \u00b1 0.125" in output


def test_control_characters_become_visible_codes_and_the_middle_of_a_long_text_is_cut():
    for text in ("plain text", "two\nlines\tand a tab", "\u5b57 \xa0 \U0001f468\u200d\U0001f469"):
        assert history.escape_invisible_and_cut_middle(text) == text

    codes = "\u27e8U+0000\u27e9\u27e8U+000D\u27e9\u27e8U+2028\u27e9\u27e8U+202E\u27e9ab\u27e8U+D800\u27e9"
    assert history.escape_invisible_and_cut_middle("\x00\r\u2028\u202eab\ud800") == codes

    shortened = history.escape_invisible_and_cut_middle("a" * 50_000 + "b" * 50_000)
    assert len(shortened) < 1.01 * history.MOST_TEXT
    assert shortened.startswith("a")
    assert shortened.endswith("b")
    assert "80,000 characters are not shown" in shortened


def make_hostile_run(folder):
    """Make a run of 800 completions in which every text is hostile."""
    make_run(folder)
    rng = random.Random(0)
    texts = ["".join(rng.choices(HOSTILE, k=rng.randrange(1, 6))) for _ in range(800)]
    texts[0] += "x" * 100_000

    record = completion_record(1, 0, 0, "Six.")
    records = []
    for number, text in enumerate(texts):
        place = {"step": 1 + number // 80, "group": number // 8 % 10}
        keys = ("prompt", "answer", "category", "completion", "finish_reason")
        hostile_fields = dict.fromkeys(keys, text) | {"rewards": {text: 1.0}}
        records.append(record | place | hostile_fields)
    write_log(folder / "rollouts.jsonl", records)

    answers = []
    for step, shift in ((0, 0), (4, 1)):
        for number, text in enumerate(texts):
            hostile_fields = {
                "prompt": text,
                "answer": text,
                "category": text,
                "rewards": {HOSTILE[0]: [1.0]},
            }
            answer = answer_record(step, number, texts[number - shift], float(shift))
            answers.append(answer | hostile_fields)
    write_log(folder / "eval_answers.jsonl", answers)

    warnings = [{"step": 1, "name": text, "text": text} for text in HOSTILE]
    write_log(folder / "warnings.jsonl", warnings)
    environment = {"machine": "".join(HOSTILE), "device": HOSTILE[0]}
    (folder / "env.json").write_text(json.dumps(environment))
    hostile_metric = {f"reward/{HOSTILE[0]}": 1.0}
    metrics = [step_record(step) | hostile_metric for step in range(1, 5)]
    write_log(folder / "metrics.jsonl", metrics)
    edit_settings(folder, model=f"/nowhere/{HOSTILE[0]}", task=HOSTILE[1], data=HOSTILE[2])


def test_a_page_that_would_be_too_large_holds_some_groups_of_all_steps_and_counts_them(
    run, monkeypatch
):
    monkeypatch.setattr(page, "MOST_COMPLETIONS", 4000)
    markup = page.write_page(run).read_text()
    completions = page_data(markup)["completions"]
    assert len(json.dumps(completions["groups"])) <= 4000
    assert {group["step"] for group in completions["groups"]} >= {1, 3}
    assert f"{len(completions['groups'])} of 8 groups are on this page" in markup


def test_the_page_of_a_run_says_whether_the_run_is_done_stopped_or_running(run, capsys):
    def read_page(**options):
        return page.write_page(run, **options).read_text()

    # A killed run leaves incomplete lines.
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 5, "rew')
    with (run / "rollouts.jsonl").open("a") as file:
        file.write('{"step": 5, "group": 0, "pro')
    stopped = "<b>stopped</b> step 4 of 6"
    assert stopped in read_page()

    with run_files.unlock_run_dirs_after_block():
        run_files.lock_run_dir(run)
        assert "<b>running</b> step 4 of 6, about 5 s left" in read_page()
        assert stopped in read_page(ended=True)  # the last page of an interrupted run

    settings = (run / "config.yaml").read_text().replace("steps: 6", "steps: 4")
    (run / "config.yaml").write_text(settings)
    assert "<b>done</b> step 4 of 4" in read_page()

    write_log(run / "eval.jsonl", [eval_record(0, 0.25)])  # the run was stopped while it evaluated
    assert "<b>stopped</b> step 4 of 4 without the last evaluation" in read_page()
    report.main(["--list", str(run.parent)])
    assert "4 of 4 without the last evaluation, stopped" in capsys.readouterr().out

    (run / "config.yaml").write_text(settings + "eval_every: 0\n")
    assert "<b>done</b> step 4 of 4" in read_page()

    for path in run.glob("*.jsonl"):
        path.write_text("")
    assert "No evaluation has been written." in read_page()


def test_a_page_that_cannot_be_written_causes_one_warning_and_no_error(run):
    warnings = []
    (run / "eval.jsonl").write_text("not JSON\n")
    live = page.LivePage(run, warnings.append)
    for _ in range(3):
        live.write_if_due(at_the_end=True)
    assert len(warnings) == 1
    assert "eval.jsonl, line 1" in warnings[0]


def test_a_live_page_is_written_at_the_first_call_and_at_the_end_but_not_at_every_call(run):
    live = page.LivePage(run, pytest.fail)
    path = run / "report.html"
    for options, is_due in (({}, True), ({}, False), ({"at_the_end": True}, True)):
        path.unlink(missing_ok=True)
        live.write_if_due(**options)
        assert path.exists() == is_due


def test_compare_prints_the_settings_that_differ_and_the_figures(run, capsys):
    other = make_run(run.parent / "other")
    edit_settings(other, learning_rate=0.002)
    report.main(["--compare", str(run), str(other)])
    rows = {line.split("  ")[0]: line.split()[-2:] for line in capsys.readouterr().out.splitlines()}
    assert rows["--learning-rate"] == ["0.004", "0.002"]
    assert "--batch" not in rows
    assert rows["tokens sampled"] == ["148", "148"]  # 37 a step, whatever --batch and --groups say
    assert rows["held-out accuracy after"] == ["\u00b1", "0.125"]


def test_the_refusal_of_a_damaged_record_names_file_and_line(run, check_refusal):
    for log, line in (
        ("eval", "not JSON"),
        ("eval", "[]"),
        ("eval", "{}"),
        ("warnings", '{"step": 3}'),
    ):
        path = run / f"{log}.jsonl"
        intact_text = path.read_text()
        path.write_text(intact_text + line + "\n")
        line_number = intact_text.count("\n") + 1
        check_refusal(report.main, [run], f"error: {path}, line {line_number} is damaged")
        path.write_text(intact_text)


# ---- in a browser


@pytest.fixture
def browse(tmp_path):
    """
    A function that opens a page in headless Chromium.

    It returns the document after the scripts of the page ran, and the messages on the console.
    """
    browser = (
        shutil.which("chromium")
        or shutil.which("chromium-browser")
        or shutil.which("google-chrome")
    )
    if browser is None:
        pytest.skip("no Chromium is installed: apt-get install chromium, as .ci/run does")

    def browse(markup, program="", width=800):
        path = tmp_path / "page.html"
        if program:  # the script of a test, which the policy of the page would refuse
            markup = re.sub(r"script-src 'sha256-[^']+'", "script-src 'unsafe-inline'", markup)
            markup = markup.replace("</body>", f"<script>{program}</script></body>")
        path.write_text(markup)
        flags = [
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            "--no-first-run",
            "--disable-background-networking",
            "--enable-logging=stderr",
            "--virtual-time-budget=2000",
            f"--user-data-dir={tmp_path / 'profile'}",
            f"--window-size={width},844",
        ]
        command = [browser, *flags, "--dump-dom", path.as_uri()]
        process = subprocess.run(command, capture_output=True, text=True, timeout=600)
        messages = [line for line in process.stderr.splitlines() if "CONSOLE" in line]
        return process.stdout, messages

    return browse


def read_title(document):
    """The title, into which the program of a test writes its result."""
    return html.unescape(re.search("<title>(.*?)</title>", document)[1])


@pytest.mark.slow
def test_a_browser_shows_the_page_filters_it_and_searches_it_without_an_error(
    run, tmp_path, browse
):
    """The policy of the page refuses every network request, which would be an error on the console."""
    markup = page.write_page(run).read_text()
    program = """
        const texts = groups.map((group, i) => {
            choose(i);
            const cards = [...document.querySelectorAll("#shown .row")];
            return cards.map((card) => card.querySelector("bdi.text").textContent);
        });
        const answers = [...document.querySelectorAll("#held-out .problem")].map(
            (problem) => [...problem.querySelectorAll(".said")].map((said) => said.textContent));
        const results = [];
        const count = () => results.push(document.querySelectorAll("#shown .row").length);
        const change = (name, set) => {
            set(form.elements[name]); form.dispatchEvent(new Event("input", {bubbles: true})); count();
        };
        change("text", (input) => input.value = "TWENTY-TWO");
        change("truncated", (input) => input.checked = true);
        change("text", (input) => input.value = "Six.");
        change("truncated", (input) => input.checked = false);
        change("high", (input) => input.value = "0.3");
        document.querySelector(".chart svg").dispatchEvent(new KeyboardEvent("keydown", {key: "ArrowRight"}));
        results.push(document.querySelector(".chart output").textContent);
        filter.elements.kind.value = "wrong with the highest reward";
        filter.dispatchEvent(new Event("input", {bubbles: true}));
        results.push(document.getElementById("found").textContent);
        document.title = JSON.stringify([texts, answers, results]);
    """
    document, errors = browse(markup, program)
    assert errors == []
    texts, answers, results = json.loads(read_title(document))

    records = read_log(run / "rollouts.jsonl")
    records.sort(key=lambda record: -record["advantage"])
    texts_by_group = {}
    for record in records:
        group = (record["step"], record["group"])
        texts_by_group.setdefault(group, []).append(record["completion"])
    assert texts == [texts_by_group[group] for group in sorted(texts_by_group)]

    answers_by_problem = {}
    for record in read_log(run / "eval_answers.jsonl"):
        answers_by_problem.setdefault(record["problem"], []).append(record["completions"][0])
    assert answers == [answers_by_problem[problem] for problem in sorted(answers_by_problem)]

    assert results == [8, 8, 0, 8, 0, "0.25 (step 0)", "1 of 4"]


@pytest.mark.slow
def test_a_phone_shows_all_links_and_puts_the_answers_below_each_other(run, browse):
    program = """
        const cells = [...document.querySelectorAll("#answers .cell")];
        const [before, after] = cells.map((cell) => cell.getBoundingClientRect());
        if (after.top < before.bottom || after.width < 0.8 * innerWidth) throw "two columns";
        for (const label of document.querySelectorAll("#answers .when")) if (!label.offsetHeight) throw "no label";
        const right = [...document.querySelectorAll("nav a")].map((link) => link.getBoundingClientRect().right);
        document.title = [innerWidth, right.length, Math.max(...right), document.documentElement.scrollWidth].join(" ");
    """
    document, errors = browse(page.write_page(run).read_text(), program, width=390)
    assert errors == []
    width, num_links, right, page_width = map(float, read_title(document).split())
    assert width < 640
    assert num_links == 6
    assert right <= width
    assert page_width <= width


@pytest.mark.slow
def test_a_page_reloads_itself_only_while_the_run_goes_on(run, browse):
    """After two loads, a reader opens a part of the page. This ends the reloads."""
    program = """
        window.name = document.title = +window.name + 1;
        if (window.name === "2") document.querySelector("details").open = true;
    """
    with run_files.unlock_run_dirs_after_block():
        run_files.lock_run_dir(run)
        markup_while_running = page.write_page(run).read_text()
    markup_with_fast_reload = markup_while_running.replace("RELOAD = 15;", "RELOAD = 0.1;")
    document, _ = browse(markup_with_fast_reload, program)
    assert read_title(document) == "2"
    assert "data-running" in markup_while_running
    assert "data-running" not in page.write_page(run).read_text()


@pytest.mark.slow
def test_no_hostile_string_in_any_place_runs_or_breaks_the_layout(tmp_path, monkeypatch, browse):
    monkeypatch.setattr(page, "MOST_COMPLETIONS", 10**8)
    monkeypatch.setattr(page, "MOST_ANSWERS", 10**8)
    folder = tmp_path / "a<img src=x onerror=window.pwned=1>"
    make_hostile_run(folder)
    program = """
        for (const folded of document.querySelectorAll("details")) folded.open = true;
        let seen = 0;
        const look = () => {
            seen += document.querySelectorAll("#shown .row").length;
            if (document.documentElement.scrollWidth > innerWidth) document.title = "wide";
        };
        const search = (value) => {
            form.elements.text.value = value; form.dispatchEvent(new Event("input", {bubbles: true})); look();
        };
        groups.forEach((group, i) => { choose(i); look(); });
        search("pwned"); search("<"); search("&");
        const problems = document.querySelectorAll("#held-out .problem").length;
        const strange = document.querySelectorAll("img, [onload], [onerror], [onmouseover], [src]").length;
        if (document.title !== "wide") document.title = `${window.pwned} ${strange} ${seen} ${problems}`;
    """
    markup = page.write_page(folder, other_runs=[str(folder)]).read_text()
    assert not re.search(
        "[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ufeff]", markup
    )
    document, errors = browse(markup, program)
    assert errors == []
    assert read_title(document) == f"undefined 0 {800 + 3 * 60} 800"


def test_the_page_of_two_runs_has_the_answers_and_the_verdict_of_both(run):
    other = make_run(run.parent / "other")
    answers = read_log(other / "eval_answers.jsonl")
    for record in answers:
        record["completions"] = [f"Elsewhere: {record['completions'][0]}"]
    write_log(other / "eval_answers.jsonl", answers)
    write_log(other / "eval.jsonl", [eval_record(0, 0.5), eval_record(4, 0.125)])

    markup = page.write_page(run, None, [str(other)]).read_text()
    assert "<h2><bdi>small</bdi>: too few" in markup
    assert "<h2><bdi>other</bdi>: too few" in markup
    assert "accuracy 0.250 -&gt; 0.750" in markup
    assert "accuracy 0.500 -&gt; 0.125" in markup

    markup_above_curves = markup.split('<section id="curves">')[0]
    text = remove_tags(markup_above_curves)
    assert text.count("Elsewhere: Two plus three is five.") == 3
    assert text.count("Two plus three is five.") == 6
