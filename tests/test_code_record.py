"""What a run records of its code: arguments of functions, the user's files, and changes to Gwen."""

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


def scaled(tokens, objective, scale=1.0, name="a"):
    """A loss with two settings of its own."""
    each = -scale * tokens.advantages * tokens.logprobs * tokens.mask
    return grpo.Loss(each.sum() / tokens.num_items, {})


def test_the_arguments_of_a_partial_function_are_part_of_its_name():
    partial = functools.partial(scaled, scale=2.5, name="b:(c, d)")
    spec = functions.spec_of_function(partial)
    assert spec == f"{__file__}:scaled(scale=2.5, name='b:(c, d)')"
    name, loaded = functions.load_function("--loss-type", spec)
    assert name == "scaled" and loaded.func is scaled and loaded.keywords == partial.keywords
    assert functions.file_of_spec(spec) == __file__
    assert f"{__file__}:" in functions.file_and_line_suffix(loaded)
    assert functions.find_place_of_functions({"loss_type": spec}) == ""
    positional = functools.partial(scaled, 1)
    assert functions.load_function("--x", functions.spec_of_function(positional))[1].args == (1,)


def test_the_path_in_a_specification_with_arguments_is_found():
    spec = f"{__file__}:scaled(scale=2.5, name='b')"
    assert places.list_existing_paths({"loss_type": spec}) == [__file__]
    moved = places.replace_paths(spec, {__file__: "/new/a.py"}.get)
    assert moved == "/new/a.py:scaled(scale=2.5, name='b')"
    gone = "/gone/a.py:scaled(scale=2.5, name='b')"
    assert list(sources.find_missing_files({"loss_type": gone})) == [("--loss-type", "/gone/a.py")]
    assert function_specs.split_off_arguments("/a (b)/x.py:f") == ("/a (b)/x.py:f", "")


def test_arguments_that_are_no_literals_leave_a_function_without_a_name():
    for value in (np.ones(2), scaled, float("inf")):
        spec = functions.spec_of_function(functools.partial(scaled, scale=value))
        assert spec.startswith(f"{functions.NAMELESS}:scaled"), spec


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("(scale=)", "write literal values"),
        ("(scale=open('x'))", "write literal values"),
        ("(**{'scale': 1})", "write literal values"),
        ("(scal=1)", "unexpected keyword argument 'scal'"),
    ],
)
def test_wrong_arguments_of_a_function_are_refused_in_one_line(arguments, words):
    message = catch_message(functions.load_function, "--loss-type", f"{__file__}:scaled{arguments}")
    assert words in message and arguments in message and "\n" not in message


def test_a_run_keeps_its_code_and_a_comparison_shows_the_difference(tmp_path, monkeypatch):
    (tmp_path / "helper.py").write_text("SCALE = 2\n")
    (tmp_path / "mine.py").write_text(
        "import grpo, helper\n"
        "def plain(tokens, objective, scale=1.0):\n"
        "    each = -scale * tokens.advantages * tokens.logprobs * tokens.mask\n"
        "    return grpo.Loss(each.sum() / tokens.num_items, {})\n"
    )
    monkeypatch.setattr(code_record, "read_uncommitted_changes", lambda: "diff --git a/x b/x\n")
    runs = [str(tmp_path / name) for name in "ab"]
    for run, scale in zip(runs, (1.0, 2.0), strict=True):
        loss = f"{tmp_path}/mine.py:plain(scale={scale})"
        Trainer.start(loss_type=loss, steps=1, run_dir=run, **SMALL).fit()
    kept = tmp_path / "a" / "code" / "step-000000"
    files = json.loads((kept / "files.json").read_text())
    for name in ("mine.py", "helper.py"):
        origin = str(tmp_path / name)
        [copy] = [copy for copy, path in files["files"].items() if path == origin]
        assert (kept / copy).read_text() == (tmp_path / name).read_text()
    assert (kept / "gwen.diff").read_text() == "diff --git a/x b/x\n"
    table = report.format_run_comparison(runs)
    assert "plain(scale=1.0)" in table and "plain(scale=2.0)" in table
    assert "commit of Gwen" not in table

    monkeypatch.setattr(code_record, "read_uncommitted_changes", lambda: "")
    trainer = Trainer.resume(runs[1], steps=2)
    trainer.fit()
    assert (tmp_path / "b" / "code" / "step-000001" / "files.json").is_file()
    assert "commit of Gwen" in report.format_run_comparison(runs)
    Trainer.resume(runs[1], steps=3)  # the code is the same as before
    assert len(list((tmp_path / "b" / "code").iterdir())) == 2


def test_changes_to_gwen_are_what_git_says(monkeypatch, tmp_path):
    def run(*command):
        subprocess.run(["git", *command], cwd=tmp_path, check=True, capture_output=True)

    (tmp_path / "grpo.py").write_text("a = 1\n")
    run("init", "-q")
    run("add", ".")
    run("-c", "user.name=a", "-c", "user.email=a@b", "commit", "-q", "-m", "a")
    monkeypatch.setattr(code_record, "HOME", tmp_path)
    assert code_record.digest_of_uncommitted_changes() is None
    (tmp_path / "grpo.py").write_text("a = 2\n")
    assert "+a = 2" in code_record.read_uncommitted_changes()
    assert len(code_record.digest_of_uncommitted_changes()) == 12
    (tmp_path / "mine.py").write_text("b = 1\n")
    assert tmp_path / "grpo.py" not in code_record.read_code_in_use([tmp_path / "grpo.py"]).files
    assert tmp_path / "mine.py" in code_record.read_code_in_use([tmp_path / "mine.py"]).files
