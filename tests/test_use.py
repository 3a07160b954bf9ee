"""docs/use.md: its commands run in its order on a run, and print what the page shows."""

import ast
import io
import re
import shlex
import shutil
import sys

import pytest
from conftest import ROOT, run_command

import chat
import export

PAGE = (ROOT / "docs" / "use.md").read_text(encoding="utf-8")
SHOWN = re.findall(
    r"^\$ uv run (?:--extra gguf )?(\w+)\.py (.*)\n((?:(?!\$ |```).*\n)*)", PAGE, re.M
)
# `--fuse --bits` measures its cost: tests/test_deploy.py
QUICK = [row for row in SHOWN if "--fuse --bits" not in row[1]]
# parts of the page that differ for a run of few steps, and the patterns that match them
VARIABLE_PARTS = {"\u2026": ".*", "BASE": r"\S+", "forty-seven": r"[\w-]+"}
COMMANDS = {"export": export.main, "chat": chat.main}


@pytest.mark.parametrize(("name", "flags", "printed"), QUICK)
def test_a_command_of_the_page_prints_what_it_shows(
    golden, tmp_path, monkeypatch, capsys, name, flags, printed
):
    shutil.copytree(golden("grpo"), tmp_path / "runs" / "NAME")
    monkeypatch.chdir(tmp_path)
    if "--chat" in flags:
        question = printed.splitlines()[0].removeprefix("> ")
        monkeypatch.setattr(sys, "stdin", io.StringIO(question))
    COMMANDS[name](shlex.split(flags))
    pattern = re.escape(printed)
    for part, part_pattern in VARIABLE_PARTS.items():
        pattern = pattern.replace(re.escape(part), part_pattern)
    assert re.match(pattern, capsys.readouterr().out), pattern


def test_piped_lines_form_one_conversation_and_an_empty_line_begins_another_as_the_page_says(
    golden, monkeypatch, capsys
):
    assert "an empty line begins a new one" in PAGE
    command = ["--run", str(golden("grpo")), "--temp", "0", "--max-tokens", "6"]
    question = "What is twenty-nine plus eighteen?"
    chat.main([*command, "--prompt", question])
    alone = capsys.readouterr().out.strip()
    turns = []
    monkeypatch.setattr(
        chat.ChatModel,
        "reset",
        lambda self, reset=chat.ChatModel.reset: (turns.append("new"), reset(self)),
    )
    monkeypatch.setattr(sys, "stdin", io.StringIO(f"{question}\n\n{question}\n"))
    chat.main([*command, "--chat"])
    answers = re.findall(r"^> .*\n(.*)$", capsys.readouterr().out, re.M)
    assert answers == [alone, alone]
    num_resets = len(turns)
    monkeypatch.setattr(sys, "stdin", io.StringIO(f"{question}\n{question}\n"))
    chat.main([*command, "--chat"])
    assert len(turns) - num_resets == num_resets - 1, "the second line continued the first"


def test_the_page_shows_what_five_commands_print():
    assert len(SHOWN) == 5


@pytest.mark.parametrize(
    ("library", "new_command"), [("sampler.py", "chat.py"), ("lora.py", "export.py")]
)
def test_an_old_command_names_the_new_one_with_its_arguments(library, new_command):
    done = run_command(str(ROOT / library), "--run", "runs/my run", "--num", "3")
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.strip().endswith(f"uv run {new_command} --run 'runs/my run' --num 3")
    assert len(done.stderr.splitlines()) == 1


def test_no_message_sends_a_user_to_a_command_that_is_now_a_library():
    shown_as_command = re.compile(r"^(?:sampler|lora)\.py$|\b(?:sampler|lora)\.py -")
    texts = {
        f"{path}:{node.lineno}": node.value
        for path in sorted(ROOT.rglob("*.py"))
        if not {".venv", "tests"} & set(path.relative_to(ROOT).parts)
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    }
    assert len(texts) > 1000
    assert [place for place, text in texts.items() if shown_as_command.search(text)] == []
