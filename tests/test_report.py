"""The page of a run: what it shows equals the run's files, what it quotes cannot act, and a browser opens it."""

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

HOSTILE = (
    *("</script><script>window.pwned=1</script>", "<img src=x onerror=window.pwned=1>"),
    *('" onmouseover="window.pwned=1', "<svg/onload=window.pwned=1>", "javascript:window.pwned=1"),
    *("{{ 7 * 7 }}{% raw %}", "<!--<script>", "]]>", "-->"),
    *(
        "</bdi></article>",
        "&lt;script&gt;",
        "\u202e txet",
        "\u2066\u2067",
        "\ud800",
        "\udfff",
        "\x00\x1b[2J",
        "\x85",
    ),
    *(
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
    ),
    *(
        "z\u0300\u0301\u0302" * 20,
        "\u05e9\u05dc\u05d5\u05dd",
        "\U0001f468\u200d\U0001f469",
        "</title>",
        "</svg>",
    ),
)


@pytest.mark.parametrize("low", [0.0, 1.0, -3e-9, 2.7, 1e9])
@pytest.mark.parametrize("more", [0.0, 1e-7, 0.3, 1e3])
def test_ticks_are_some_and_enclose_values_that_differ_by_rounding_too(low, more):
    ticks = charts.choose_round_axis_ticks(low, low + more)
    assert 2 <= len(ticks) <= 6 and ticks[0] < ticks[-1]
    slack = 1e-6 * (abs(low) + more)
    assert ticks[0] <= low + slack and low + more <= ticks[-1] + slack


@functools.cache
def demo_tokenizer():
    return Tokenizer.from_file(str(hub.DEMO / "tokenizer.json"))


def step_record(step):
    figures = {"reward/std": 0.5, "reward/zero_std_frac": 0.25, "reward/none": 0, "kl": None}
    figures |= {
        "reward/s": 0.1,
        "rollout/s": 2.0,
        "judge/s": 0.0,
        "update/s": 0.5,
        "other/s": 0.0,
        "step/s": 1.6,
    }
    figures |= {
        "grad_norm": 0.3,
        "completion/mean_tokens": 5.0,
        "completion/truncated_frac": 0.0,
        "mem/peak_gb": 0.25,
    }
    moving = {
        "reward/mean": step / 10,
        "reward/correct": step / 20,
        "entropy": 1.0 / step,
        "rollout/tok_s": 18.5,
    }
    return {"step": step} | moving | figures


def eval_record(step, accuracy):
    return {
        "step": step,
        "eval/accuracy": accuracy,
        "eval/accuracy_ci95": 0.125,
        "eval/num": 8,
        "eval/s": 2.0,
    }


def answer_record(step, problem, text, value, reward=None):
    earned = [value if reward is None else reward]
    rewards = {"correct": earned}
    return {
        "step": step,
        "problem": problem,
        "prompt": f"Problem {problem}?",
        "answer": "five",
        "category": None,
        "completions": [text],
        "values": [value],
        "reward": earned,
        "rewards": rewards,
    }


def completion_record(step, group, member, text):
    ids = demo_tokenizer().encode(text, add_special_tokens=False).ids
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


def drawn(*runs):
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
    (folder / "env.json").write_text(
        json.dumps({"machine": "a laptop", "device": "cpu", "commit": "abc"})
    )
    write_log(folder / "metrics.jsonl", [step_record(step) for step in range(1, 5)])
    write_log(folder / "eval.jsonl", [eval_record(0, 0.25), eval_record(4, 0.75)])
    before = [answer_record(0, problem, "Two plus three is six.", 0.0) for problem in range(4)]
    after = [answer_record(4, problem, "Two plus three is five.", 1.0) for problem in range(3)]
    write_log(
        folder / "eval_answers.jsonl",
        [*before, *after, answer_record(4, 3, "Nine is five.", 0.0, 1.0)],
    )
    texts = ["Two plus three is five.", "Twenty-two", "Forty plus one is nine.", "Six."]
    rows = [
        (step, group, member) for step in range(1, 5) for group in range(2) for member in range(4)
    ]
    write_log(folder / "rollouts.jsonl", [completion_record(*row, texts[row[2]]) for row in rows])
    write_log(
        folder / "warnings.jsonl",
        [{"step": 3, "name": "entropy", "text": "It fell. Try a higher --temp"}],
    )
    return folder


def data_of(markup):
    return json.loads(
        re.search(r'<script type="application/json" id="data">(.*?)</script>', markup, re.S)[1]
    )


def test_the_page_tells_the_figures_the_answers_and_the_warnings_of_the_files(run):
    markup = page.write_page(run).read_text()
    text = re.sub(r"\s+", " ", html.unescape(re.sub("<[^>]+>", "", markup)))
    marked = re.findall(r"<mark>(.*?)</mark>", markup)  # what changed since before training
    assert "five" in marked and "Two" not in marked
    for words in (
        "0.250 \u00b1 0.125",
        "0.750 \u00b1 0.125",
        "4 of 6",
        "0.25 GB",
        "148",
        "a laptop",
        "became right",
    ):
        assert words in text, words
    for words in (
        "Two plus three is six.",
        "Nine is five.",
        "It fell. Try a higher --temp",
        "learning_rate",
    ):
        assert words in text, words
    assert f"uv run train.py --config {run}/config.yaml --run-dir {run}-again" in text


def test_wrong_answers_that_a_reward_pays_most_for_are_counted(run):
    answers = page.held_out_answers_for_page(history.load_history(run))
    assert (
        verdict.reach_verdict(history.load_history(run)).signs[0]
        == f"{answer_changes.CHEATED}: 0 -> 1 answers"
    )
    assert answers["counts"] == {"became right": 3, answer_changes.CHEATED: 1}
    assert answers["first"][-1]["cells"][-1]["text"] == "Nine is five."


def test_the_page_has_of_each_completion_what_it_earned(run):
    completions = data_of(page.write_page(run).read_text())["completions"]
    assert completions["of"] == len(completions["groups"]) == 8 and completions["criteria"] == [
        "correct",
        "working",
        "sentence",
    ]
    shown = {
        (row["text"], row["reward"], *row["scores"])
        for group in completions["groups"]
        for row in group["rows"]
    }
    written = read_log(run / "rollouts.jsonl")
    assert shown == {
        (line["completion"], line["reward"], *line["judge_scores"]) for line in written
    }
    assert all(
        row["unreadable"] == (None in row["scores"])
        for group in completions["groups"]
        for row in group["rows"]
    )


def test_values_of_a_curve_are_those_of_the_metrics(run):
    shown = drawn(run)
    reward = shown["Reward"]["series"][0]
    assert (reward["x"], reward["y"]) == ([1, 2, 3, 4], [0.1, 0.2, 0.3, 0.4])
    assert shown["Held-out"]["series"][0]["y"] == [0.25, 0.75]
    assert [series["label"] for series in shown["Reward by component"]["series"]] == ["correct"]
    assert [series["label"] for series in shown["Seconds"]["series"]] == [
        "rollout",
        "reward",
        "update",
    ]
    assert [mark["step"] for mark in shown["Entropy"]["marks"]] == [3]


def test_the_page_has_a_curve_of_the_rate_if_target_kl_has_held_it(run):
    assert charts.RATE not in drawn(run)
    steps = [record | {"update/rate": 0.5} for record in read_log(run / "metrics.jsonl")]
    write_log(run / "metrics.jsonl", steps)
    assert drawn(run)[charts.RATE]["series"][0]["y"] == [0.5] * 4


def test_several_runs_stand_over_each_other(run):
    other = make_run(run.parent / "other")
    assert [s["label"] for s in drawn(run, other)["Entropy"]["series"]] == [
        "small: entropy",
        "other: entropy",
    ]
    alone = page.write_page(run)
    markup = alone.read_text()
    before = alone.stat().st_mtime_ns
    both = page.write_page(run, other_runs=[str(other)])
    assert (
        both == run.parent / "small-against-other.html"
        and "small against other" in both.read_text()
    )
    assert (alone.stat().st_mtime_ns, alone.read_text()) == (before, markup)


# ---- seeds

ACCURACIES = {"low": (0.5, 0.6, 0.75), "high": (0.625, 0.65, 0.9)}


@pytest.fixture
def both(tmp_path):
    """Two directories of three seeds, whose learning rates differ."""
    for name, accuracies in ACCURACIES.items():
        for seed, accuracy in enumerate(accuracies):
            folder = make_run(tmp_path / name / f"seed-{seed}")
            settings = yaml.safe_load((folder / "config.yaml").read_text())
            more = {"seed": seed, "learning_rate": len(name) / 1e3, "rollout_batch_size": 8 + seed}
            older = {"curriculum": False} if seed == 1 else {}  # a setting that is gone
            (folder / "config.yaml").write_text(yaml.safe_dump(settings | more | older))
            write_log(folder / "eval.jsonl", [eval_record(0, 0.25), eval_record(4, accuracy)])
    return [str(tmp_path / name) for name in ACCURACIES]


def test_seeds_have_mean_and_spread_and_settings_paired_differences(both):
    """By hand: the differences are 0.125, 0.05, 0.15; t at 97.5% with 2 degrees of freedom is 4.303."""
    low_line, high_line, paired = seeds.describe_spreads_and_differences(
        seeds.load_seed_groups(both)
    )
    low = np.array(ACCURACIES["low"])
    high = np.array(ACCURACIES["high"])
    pairs = np.array([0.125, 0.05, 0.15])
    assert (
        f"low: accuracy {low.mean():.3f}, std {low.std(ddof=1):.3f} over 3 seeds (0.500 to 0.750) after 4 s"
        in low_line
    )
    assert f"high: accuracy {high.mean():.3f}, std {high.std(ddof=1):.3f} over 3 seeds" in high_line
    half = 4.303 * pairs.std(ddof=1) / 3**0.5
    assert paired.startswith(f"high - low: {pairs.mean():+.3f} \u00b1 {half:.3f} (95%")
    assert paired.endswith("over 3 pairs: +0.125 +0.050 +0.150")
    for seed in range(3):
        fewer = [eval_record(0, 0.25), eval_record(4, 0.5) | {"eval/num": 7}]
        write_log(Path(both[1]) / f"seed-{seed}" / "eval.jsonl", fewer)
    num = eval_record(4, 0.5)["eval/num"]
    assert seeds.describe_spreads_and_differences(seeds.load_seed_groups(both))[-1].endswith(
        f" 7 and {num} held-out problems, respectively"
    )


def test_seeds_in_any_directory_are_one_setting_and_repetitions_are_not(run, both):
    loose = [f"{folder}/seed-{seed}" for seed in (2, 0) for folder in both]
    assert [
        [member.settings["seed"] for member in setting.runs]
        for setting in seeds.load_seed_groups(loose)
    ] == [[0, 2], [0, 2]]
    assert [
        len(setting.runs)
        for setting in seeds.load_seed_groups([run, make_run(run.parent / "again")])
    ] == [1, 1]
    assert (
        "fewer than two seeds have an evaluation"
        in seeds.describe_spreads_and_differences(seeds.load_seed_groups([both[0], run]))[-1]
    )
    for seed in range(3):  # another figure, which no difference is made of
        score = [{"step": 4, "eval/score": 3.0, "eval/num": 4}] * (
            seed > 0
        )  # the first has none yet
        write_log(Path(both[1]) / f"seed-{seed}" / "eval.jsonl", score)
    high, _, paired = seeds.describe_spreads_and_differences(seeds.load_seed_groups(both[::-1]))
    assert (
        high.startswith("high: score 3.000, std 0.000 over 2 seeds")
        and "have an evaluation of the score" in paired
    )
    assert (
        "have an evaluation of the accuracy"
        in seeds.describe_spreads_and_differences(seeds.load_seed_groups(both))[-1]
    )


def test_a_step_without_a_figure_in_one_seed_is_missing_from_the_band_and_ends_it_not(both):
    write_log(
        Path(both[0]) / "seed-1" / "metrics.jsonl",
        [step_record(n) | {"entropy": 1.0} for n in (1, 3, 4)],
    )
    (series,) = drawn(both[0])["Entropy"]["series"]
    assert series["x"] == [1, 3, 4]


def test_report_writes_a_page_of_seeds_into_their_directory(both, capsys):
    report.main([both[0]])
    lines = capsys.readouterr().out.splitlines()
    assert lines == [
        *seeds.describe_spreads_and_differences(seeds.load_seed_groups(both[:1])),
        f"{both[0]}/report.html",
    ]
    markup = (Path(both[0]) / "report.html").read_text()
    assert lines[0] in markup and "are from <bdi>" in markup
    report.main(["--compare", *both])
    table = capsys.readouterr().out.splitlines()
    assert table[0].split() == [
        f"{name}/seed-{seed}" for name in ("low", "high") for seed in range(3)
    ]
    assert table[-2].startswith("high - low: +0.108")
    assert table[-1].startswith("high - low, by problem: ")
    report.main(["--list", str(Path(both[0]).parent)])
    listed = capsys.readouterr().out
    assert len(listed.splitlines()) == 2 + 6
    assert "4 of 6, stopped  0.250 \u00b1 0.125  0.500 \u00b1 0.125" in listed


def test_what_a_browser_would_obey_is_shown_as_its_code_and_a_line_of_100_kb_is_folded():
    for text in ("plain text", "two\nlines\tand a tab", "\u5b57 \xa0 \U0001f468\u200d\U0001f469"):
        assert history.escape_invisible_and_cut_middle(text) == text
    codes = "\u27e8U+0000\u27e9\u27e8U+000D\u27e9\u27e8U+2028\u27e9\u27e8U+202E\u27e9ab\u27e8U+D800\u27e9"
    assert history.escape_invisible_and_cut_middle("\x00\r\u2028\u202eab\ud800") == codes
    folded = history.escape_invisible_and_cut_middle("a" * 50_000 + "b" * 50_000)
    assert len(folded) < 1.01 * history.MOST_TEXT
    assert (
        folded.startswith("a")
        and folded.endswith("b")
        and "80,000 characters are not shown" in folded
    )


def hostile_run(folder):
    """A run whose every text is hostile, and the 800 strings."""
    make_run(folder)
    rng = random.Random(0)
    texts = ["".join(rng.choices(HOSTILE, k=rng.randrange(1, 6))) for _ in range(800)]
    texts[0] += "x" * 100_000
    line = completion_record(1, 0, 0, "Six.")
    lines = []
    for number, text in enumerate(texts):
        place = {"step": 1 + number // 80, "group": number // 8 % 10}
        named = {
            "prompt": text,
            "answer": text,
            "category": text,
            "completion": text,
            "finish_reason": text,
        }
        lines.append(line | place | named | {"rewards": {text: 1.0}})
    write_log(folder / "rollouts.jsonl", lines)
    details = []
    for step, shift in ((0, 0), (4, 1)):
        for number, text in enumerate(texts):
            named = {
                "prompt": text,
                "answer": text,
                "category": text,
                "rewards": {HOSTILE[0]: [1.0]},
            }
            details.append(answer_record(step, number, texts[number - shift], float(shift)) | named)
    write_log(folder / "eval_answers.jsonl", details)
    write_log(
        folder / "warnings.jsonl", [{"step": 1, "name": text, "text": text} for text in HOSTILE]
    )
    (folder / "env.json").write_text(
        json.dumps({"machine": "".join(HOSTILE), "device": HOSTILE[0]})
    )
    write_log(
        folder / "metrics.jsonl",
        [step_record(step) | {f"reward/{HOSTILE[0]}": 1.0} for step in range(1, 5)],
    )
    settings = yaml.safe_load((folder / "config.yaml").read_text())
    hostile_settings = {"model": f"/nowhere/{HOSTILE[0]}", "task": HOSTILE[1], "data": HOSTILE[2]}
    (folder / "config.yaml").write_text(yaml.safe_dump(settings | hostile_settings))
    return texts


def test_a_page_that_would_be_too_large_holds_groups_of_all_steps_and_says_how_many(
    run, monkeypatch
):
    monkeypatch.setattr(page, "MOST_COMPLETIONS", 4000)
    markup = page.write_page(run).read_text()
    completions = data_of(markup)["completions"]
    assert len(json.dumps(completions["groups"])) <= 4000
    assert {group["step"] for group in completions["groups"]} >= {1, 3}
    assert f"{len(completions['groups'])} of 8 groups are on this page" in markup


def test_a_run_that_was_killed_or_has_only_begun_has_a_page_too(run, capsys):
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 5, "rew')
    with (run / "rollouts.jsonl").open("a") as file:
        file.write('{"step": 5, "group": 0, "pro')
    stopped = "<b>stopped</b> step 4 of 6"
    running = "<b>running</b> step 4 of 6, about 5 s left"
    assert stopped in page.write_page(run).read_text()
    with run_files.unlock_run_dirs_after_block():
        run_files.lock_run_dir(run)
        assert running in page.write_page(run).read_text()
        assert (
            stopped in page.write_page(run, ended=True).read_text()
        )  # the last one of an interrupted run
    settings = (run / "config.yaml").read_text()
    (run / "config.yaml").write_text(settings.replace("steps: 6", "steps: 4"))
    assert "<b>done</b> step 4 of 4" in page.write_page(run).read_text()
    write_log(run / "eval.jsonl", [eval_record(0, 0.25)])  # it was stopped while it evaluated
    assert (
        "<b>stopped</b> step 4 of 4 without the last evaluation" in page.write_page(run).read_text()
    )
    report.main(["--list", str(run.parent)])
    assert "4 of 4 without the last evaluation, stopped" in capsys.readouterr().out
    (run / "config.yaml").write_text(settings.replace("steps: 6", "steps: 4") + "eval_every: 0\n")
    assert "<b>done</b> step 4 of 4" in page.write_page(run).read_text()
    for path in run.glob("*.jsonl"):
        path.write_text("")
    assert "No evaluation has been written." in page.write_page(run).read_text()


def test_a_page_that_cannot_be_written_is_told_of_once_and_stops_nothing(run):
    warnings = []
    (run / "eval.jsonl").write_text("not JSON\n")
    live = page.LivePage(run, warnings.append)
    for _ in range(3):
        live.write_if_due(at_the_end=True)
    assert len(warnings) == 1 and "eval.jsonl, line 1" in warnings[0]


def test_a_page_is_written_again_when_that_is_cheap_and_at_the_end(run):
    live = page.LivePage(run, pytest.fail)
    written = run / "report.html"
    for flags, is_due in (({}, True), ({}, False), ({"at_the_end": True}, True)):
        written.unlink(missing_ok=True)
        live.write_if_due(**flags)
        assert written.exists() == is_due


def test_compare_prints_the_settings_that_differ_and_the_figures(run, capsys):
    other = make_run(run.parent / "other")
    settings = yaml.safe_load((other / "config.yaml").read_text())
    (other / "config.yaml").write_text(yaml.safe_dump(settings | {"learning_rate": 0.002}))
    report.main(["--compare", str(run), str(other)])
    rows = {line.split("  ")[0]: line.split()[-2:] for line in capsys.readouterr().out.splitlines()}
    assert rows["--learning-rate"] == ["0.004", "0.002"]
    assert "--batch" not in rows
    assert rows["tokens sampled"] == ["148", "148"]  # 37 a step, whatever --batch and --groups say
    assert rows["held-out accuracy after"] == ["\u00b1", "0.125"]


def test_a_broken_record_is_named_by_file_and_line(run, check_refusal):
    for log, line in (
        ("eval", "not JSON"),
        ("eval", "[]"),
        ("eval", "{}"),
        ("warnings", '{"step": 3}'),
    ):
        good = (run / f"{log}.jsonl").read_text()
        (run / f"{log}.jsonl").write_text(good + line + "\n")
        check_refusal(
            report.main,
            [run],
            f"error: {run / log}.jsonl, line {good.count(chr(10)) + 1} is damaged",
        )
        (run / f"{log}.jsonl").write_text(good)


# ---- in a browser


@pytest.fixture
def browse(tmp_path):
    """A function that opens a page in headless Chromium: the document after its scripts ran, what its console said."""
    browser = (
        shutil.which("chromium")
        or shutil.which("chromium-browser")
        or shutil.which("google-chrome")
    )
    if browser is None:
        pytest.skip("no Chromium is installed: apt-get install chromium, as .ci/run does")

    def browse(markup, program="", width=800):
        path = tmp_path / "page.html"
        if program:  # a test's own script, which the page's policy would refuse
            markup = re.sub(r"script-src 'sha256-[^']+'", "script-src 'unsafe-inline'", markup)
            markup = markup.replace("</body>", f"<script>{program}</script></body>")
        path.write_text(markup)
        flags = [
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            "--no-first-run",
            "--disable-background-networking",
        ]
        flags += [
            "--enable-logging=stderr",
            "--virtual-time-budget=2000",
            f"--user-data-dir={tmp_path / 'profile'}",
        ]
        flags += [f"--window-size={width},844"]
        command = [browser, *flags, "--dump-dom", path.as_uri()]
        done = subprocess.run(command, capture_output=True, text=True, timeout=600)
        return done.stdout, [line for line in done.stderr.splitlines() if "CONSOLE" in line]

    return browse


def title_of(shown):
    """What a program of a test says in the title."""
    return html.unescape(re.search("<title>(.*?)</title>", shown)[1])


@pytest.mark.slow
def test_a_browser_shows_filters_and_searches_the_page_and_nothing_hostile_runs(
    run, tmp_path, browse
):
    """A request to a network would be an error on the console: the page's policy refuses every one."""
    markup = page.write_page(run).read_text()
    program = """
        const texts = groups.map((group, i) => {
            choose(i);
            const cards = [...document.querySelectorAll("#shown .row")];
            return cards.map((card) => card.querySelector("bdi.text").textContent);
        });
        const answers = [...document.querySelectorAll("#held-out .problem")].map(
            (problem) => [...problem.querySelectorAll(".said")].map((said) => said.textContent));
        const found = [];
        const count = () => found.push(document.querySelectorAll("#shown .row").length);
        const change = (name, set) => {
            set(form.elements[name]); form.dispatchEvent(new Event("input", {bubbles: true})); count();
        };
        change("text", (input) => input.value = "TWENTY-TWO");
        change("truncated", (input) => input.checked = true);
        change("text", (input) => input.value = "Six.");
        change("truncated", (input) => input.checked = false);
        change("high", (input) => input.value = "0.3");
        document.querySelector(".chart svg").dispatchEvent(new KeyboardEvent("keydown", {key: "ArrowRight"}));
        found.push(document.querySelector(".chart output").textContent);
        filter.elements.kind.value = "wrong with the highest reward";
        filter.dispatchEvent(new Event("input", {bubbles: true}));
        found.push(document.getElementById("found").textContent);
        document.title = JSON.stringify([texts, answers, found]);
    """
    shown, errors = browse(markup, program)
    assert errors == []
    texts, answers, found = json.loads(title_of(shown))
    groups = {}
    problems = {}
    for line in sorted(read_log(run / "rollouts.jsonl"), key=lambda line: -line["advantage"]):
        groups.setdefault((line["step"], line["group"]), []).append(line["completion"])
    for line in read_log(run / "eval_answers.jsonl"):
        problems.setdefault(line["problem"], []).append(line["completions"][0])
    assert texts == [groups[place] for place in sorted(groups)]
    assert answers == [problems[problem] for problem in sorted(problems)]
    assert found == [8, 8, 0, 8, 0, "0.25 (step 0)", "1 of 4"]


@pytest.mark.slow
def test_on_a_phone_all_links_are_seen_and_answers_stand_below_each_other(run, browse):
    program = """
        const cells = [...document.querySelectorAll("#answers .cell")];
        const [before, after] = cells.map((cell) => cell.getBoundingClientRect());
        if (after.top < before.bottom || after.width < 0.8 * innerWidth) throw "two columns";
        for (const label of document.querySelectorAll("#answers .when")) if (!label.offsetHeight) throw "no label";
        const right = [...document.querySelectorAll("nav a")].map((link) => link.getBoundingClientRect().right);
        document.title = [innerWidth, right.length, Math.max(...right), document.documentElement.scrollWidth].join(" ");
    """
    shown, errors = browse(page.write_page(run).read_text(), program, width=390)
    assert errors == []
    width, num_links, right, scrolled = map(float, title_of(shown).split())
    assert width < 640 and num_links == 6 and right <= width and scrolled <= width


@pytest.mark.slow
def test_a_page_loads_itself_again_while_the_run_goes_and_only_then(run, browse):
    """Once it has been loaded twice, somebody opens a part of it, and is left in peace."""
    program = "window.name = document.title = +window.name + 1;"
    program += 'if (window.name === "2") document.querySelector("details").open = true;'
    with run_files.unlock_run_dirs_after_block():
        run_files.lock_run_dir(run)
        running = page.write_page(run).read_text().replace("RELOAD = 15;", "RELOAD = 0.1;")
    assert title_of(browse(running, program)[0]) == "2"
    assert "data-running" in running and "data-running" not in page.write_page(run).read_text()


@pytest.mark.slow
def test_of_800_hostile_strings_in_every_place_none_runs_and_none_breaks_the_layout(
    tmp_path, monkeypatch, browse
):
    monkeypatch.setattr(page, "MOST_COMPLETIONS", 10**8)
    monkeypatch.setattr(page, "MOST_ANSWERS", 10**8)
    folder = tmp_path / "a<img src=x onerror=window.pwned=1>"
    hostile_run(folder)
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
    shown, errors = browse(markup, program)
    assert errors == []
    assert title_of(shown) == f"undefined 0 {800 + 3 * 60} 800"


def test_the_page_of_two_runs_has_the_answers_and_the_verdict_of_both(run):
    other = make_run(run.parent / "other")
    answers = read_log(other / "eval_answers.jsonl")
    for record in answers:
        record["completions"] = [f"Elsewhere: {record['completions'][0]}"]
    write_log(other / "eval_answers.jsonl", answers)
    write_log(other / "eval.jsonl", [eval_record(0, 0.5), eval_record(4, 0.125)])
    markup = page.write_page(run, None, [str(other)]).read_text()
    assert "<h2><bdi>small</bdi>: too few" in markup and "<h2><bdi>other</bdi>: too few" in markup
    assert "accuracy 0.250 -&gt; 0.750" in markup and "accuracy 0.500 -&gt; 0.125" in markup
    texts = [re.sub("<[^>]+>", "", part) for part in markup.split('<section id="curves">')[:1]]
    assert texts[0].count("Elsewhere: Two plus three is five.") == 3
    assert texts[0].count("Two plus three is five.") == 6
