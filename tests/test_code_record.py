"""The code record of a run: arguments of functions, the user's files, and changes to Gwen."""

import functools
import json
import subprocess

import numpy as np
import pytest
from conftest import catch_message
from small_run import SMALL_SETTINGS

import grpo
import report
from disk import code_record, places
from rewards import functions
from settings import sources
from text import function_specs
from train import Trainer

SMALL = SMALL_SETTINGS | {"eval_every": 0}


def scaled_loss(tokens, objective, scale=1.0, name="a"):
    """A loss with two additional settings."""
    terms = -scale * tokens.advantages * tokens.logprobs * tokens.mask
    return grpo.Loss(terms.sum() / tokens.num_items, {})


def test_the_specification_of_a_partial_function_contains_the_arguments():
    partial = functools.partial(scaled_loss, scale=2.5, name="b:(c, d)")
    spec = functions.spec_of_function(partial)
    assert spec == f"{__file__}:scaled_loss(scale=2.5, name='b:(c, d)')"

    name, loaded = functions.load_function("--loss-type", spec)
    assert name == "scaled_loss"
    assert loaded.func is scaled_loss
    assert loaded.keywords == partial.keywords
    assert functions.file_that_defines_function(spec) == __file__
    assert f"{__file__}:" in functions.file_and_line_suffix(loaded)
    assert functions.only_place_that_has_functions({"loss_type": spec}) == ""

    spec = functions.spec_of_function(functools.partial(scaled_loss, 1))
    _, loaded = functions.load_function("--x", spec)
    assert loaded.args == (1,)


def test_the_path_in_a_specification_with_arguments_is_found():
    spec = f"{__file__}:scaled_loss(scale=2.5, name='b')"
    assert places.list_existing_paths({"loss_type": spec}) == [__file__]
    moved = places.replace_paths(spec, {__file__: "/new/a.py"}.get)
    assert moved == "/new/a.py:scaled_loss(scale=2.5, name='b')"

    missing = "/gone/a.py:scaled_loss(scale=2.5, name='b')"
    missing_files = list(sources.find_missing_files({"loss_type": missing}))
    assert missing_files == [("--loss-type", "/gone/a.py")]
    assert function_specs.split_off_arguments("/a (b)/x.py:f") == ("/a (b)/x.py:f", "")


def test_a_function_with_an_argument_that_is_not_a_literal_has_no_loadable_name():
    for value in (np.ones(2), scaled_loss, float("inf")):
        spec = functions.spec_of_function(functools.partial(scaled_loss, scale=value))
        assert spec.startswith(f"{functions.NAMELESS}:scaled_loss"), spec


@pytest.mark.parametrize(
    ("arguments", "expected_text"),
    [
        ("(scale=)", "write literal values"),
        ("(scale=open('x'))", "write literal values"),
        ("(**{'scale': 1})", "write literal values"),
        ("(scal=1)", "unexpected keyword argument 'scal'"),
    ],
)
def test_wrong_arguments_of_a_function_are_refused_in_one_line(arguments, expected_text):
    spec = f"{__file__}:scaled_loss{arguments}"
    message = catch_message(functions.load_function, "--loss-type", spec)
    assert expected_text in message
    assert arguments in message
    assert "\n" not in message


def test_a_run_keeps_a_copy_of_the_code_and_a_comparison_shows_differences(tmp_path, monkeypatch):
    (tmp_path / "helper.py").write_text("SCALE = 2\n")
    (tmp_path / "mine.py").write_text(
        "import grpo, helper\n"
        "def plain(tokens, objective, scale=1.0):\n"
        "    terms = -scale * tokens.advantages * tokens.logprobs * tokens.mask\n"
        "    return grpo.Loss(terms.sum() / tokens.num_items, {})\n"
    )
    monkeypatch.setattr(code_record, "read_uncommitted_changes", lambda: "diff --git a/x b/x\n")
    runs = [str(tmp_path / name) for name in "ab"]
    for run, scale in zip(runs, (1.0, 2.0), strict=True):
        loss = f"{tmp_path}/mine.py:plain(scale={scale})"
        Trainer.start(loss_type=loss, steps=1, run_dir=run, **SMALL).fit()

    # The copies of the files.
    code_directory = tmp_path / "a" / "code" / "step-000000"
    paths_by_copy = json.loads((code_directory / "files.json").read_text())["files"]
    for name in ("mine.py", "helper.py"):
        original = tmp_path / name
        [copy] = [copy for copy, path in paths_by_copy.items() if path == str(original)]
        assert (code_directory / copy).read_text() == original.read_text()
    assert (code_directory / "gwen.diff").read_text() == "diff --git a/x b/x\n"

    # The comparison.
    table = report.format_run_comparison(runs)
    assert "plain(scale=1.0)" in table
    assert "plain(scale=2.0)" in table
    assert "commit of Gwen" not in table

    # A resume with changed code makes another copy.
    monkeypatch.setattr(code_record, "read_uncommitted_changes", lambda: "")
    trainer = Trainer.resume(runs[1], steps=2)
    trainer.fit()
    assert (tmp_path / "b" / "code" / "step-000001" / "files.json").is_file()
    assert "commit of Gwen" in report.format_run_comparison(runs)

    # A resume with the same code does not.
    Trainer.resume(runs[1], steps=3)
    assert len(list((tmp_path / "b" / "code").iterdir())) == 2


def test_changes_to_gwen_are_the_uncommitted_changes_of_git(monkeypatch, tmp_path):
    def run_git(*arguments):
        subprocess.run(["git", *arguments], cwd=tmp_path, check=True, capture_output=True)

    tracked_file = tmp_path / "grpo.py"
    tracked_file.write_text("a = 1\n")
    run_git("init", "-q")
    run_git("add", ".")
    run_git("-c", "user.name=a", "-c", "user.email=a@b", "commit", "-q", "-m", "a")
    monkeypatch.setattr(code_record, "HOME", tmp_path)
    assert code_record.digest_of_uncommitted_changes() is None

    tracked_file.write_text("a = 2\n")
    assert "+a = 2" in code_record.read_uncommitted_changes()
    assert len(code_record.digest_of_uncommitted_changes()) == 12

    untracked_file = tmp_path / "mine.py"
    untracked_file.write_text("b = 1\n")
    assert tracked_file not in code_record.read_code_in_use([tracked_file]).files
    assert untracked_file in code_record.read_code_in_use([untracked_file]).files
