"""The pages: the reference agrees with the code, links lead somewhere, the README stays short."""

import dataclasses
import json
import re
from pathlib import Path

import pytest
from small_run import make_run

import train
from docs import reference

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def records(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def without_meaning(record, known):
    """The keys of a record that no entry names; what is in capitals there stands for any name."""
    patterns = [re.sub(r"\b[A-Z]+\b", "[^/]+", name).replace("_K", "_[0-9]+") for name in known]
    keys = {key.removesuffix("_ci95") for key in record}
    return sorted(key for key in keys if not any(re.fullmatch(pattern, key) for pattern in patterns))


def always_there():
    """The keys of metrics.jsonl that every step has, whatever the method; null where it does not measure them."""
    sometimes = {name for name, meaning in reference.METRICS.items() if meaning.startswith("[Several machines]")}
    fixed = {name for name in reference.METRICS if name == name.lower() and not name.startswith("curriculum/")}
    return fixed - sometimes


def test_the_reference_is_up_to_date():
    assert reference.PAGE.read_text(encoding="utf-8") == reference.page(), "run `uv run python -m docs.reference`"


def test_the_reference_has_every_flag():
    page = reference.page()
    names = [field.name.replace("_", "-") for field in dataclasses.fields(reference.Config)]
    assert [name for name in names if f"| `--{name}` |" not in page] == []


def test_a_key_that_nobody_explained_is_found():
    known = ["eval/pass_at_K", "eval/judge/CRITERION"]
    assert without_meaning({"eval/pass_at_8_ci95": 1, "eval/judge/tone": 1, "eval/judge/tone/x": 1}, known) == [
        "eval/judge/tone/x"
    ]


@pytest.mark.slow
def test_every_metric_of_a_run_has_a_meaning(tmp_path):
    run = make_run(tmp_path, "--steps", "1", "--eval-every", "1", "--eval-rubric", "data/demo_rubric.yaml")
    train.train(run.config, run)
    metrics, evaluations = records(tmp_path / "metrics.jsonl"), records(tmp_path / "eval.jsonl")
    assert len(metrics) == 1 and len(evaluations) == 2
    assert without_meaning(metrics[0], reference.METRICS) == []
    assert always_there() <= metrics[0].keys()
    assert without_meaning(evaluations[-1], reference.EVALUATION_METRICS) == []


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_every_link_between_pages_leads_somewhere(path):
    for target, anchor in re.findall(r"\]\((?!http)([^)#]*)#?([^)]*)\)", path.read_text(encoding="utf-8")):
        page = path.parent / target if target else path
        assert page.exists(), f"{path.name} links to {target}, which does not exist"
        if anchor:
            titles = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.M)
            anchors = {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}
            assert anchor in anchors, f"{path.name} links to {target}#{anchor}, which does not exist"


def test_the_readme_fits_on_a_few_screens():
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= 150
