"""The commands of docs/use.md print the output that the page shows."""

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
# the name of a command, its flags, its output
COMMANDS_ON_PAGE = re.findall(
    r"^\$ uv run (?:--extra gguf )?(\w+)\.py (.*)\n((?:(?!\$ |```).*\n)*)", PAGE, re.M
)
# `--fuse --bits` is slow, because it measures the loss of accuracy: see tests/test_deploy.py.
QUICK_COMMANDS = [row for row in COMMANDS_ON_PAGE if "--fuse --bits" not in row[1]]
# parts of the page that differ for a run of few steps, and the patterns that match them
VARIABLE_PARTS = {"\u2026": ".*", "BASE": r"\S+", "forty-seven": r"[\w-]+"}
MAIN_FUNCTIONS = {"export": export.main, "chat": chat.main}


@pytest.mark.parametrize(("name", "flags", "output_on_page"), QUICK_COMMANDS)
def test_a_command_prints_the_output_on_the_page(
    golden, tmp_path, monkeypatch, capsys, name, flags, output_on_page
):
    shutil.copytree(golden("grpo"), tmp_path / "runs" / "NAME")
    monkeypatch.chdir(tmp_path)
    if "--chat" in flags:
        question = output_on_page.splitlines()[0].removeprefix("> ")
        monkeypatch.setattr(sys, "stdin", io.StringIO(question))
    MAIN_FUNCTIONS[name](shlex.split(flags))
    pattern = re.escape(output_on_page)
    for part, part_pattern in VARIABLE_PARTS.items():
        pattern = pattern.replace(re.escape(part), part_pattern)
    assert re.match(pattern, capsys.readouterr().out), pattern


def test_an_empty_line_between_piped_lines_begins_a_new_conversation(golden, monkeypatch, capsys):
    assert "an empty line begins a new conversation" in PAGE
    flags = ["--run", str(golden("grpo")), "--temp", "0", "--max-tokens", "6"]
    question = "What is twenty-nine plus eighteen?"
    chat.main([*flags, "--prompt", question])
    expected_answer = capsys.readouterr().out.strip()

    num_resets = 0
    reset = chat.ChatModel.reset

    def count_reset(self):
        nonlocal num_resets
        num_resets += 1
        return reset(self)

    monkeypatch.setattr(chat.ChatModel, "reset", count_reset)

    monkeypatch.setattr(sys, "stdin", io.StringIO(f"{question}\n\n{question}\n"))
    chat.main([*flags, "--chat"])
    answers = re.findall(r"^> .*\n(.*)$", capsys.readouterr().out, re.M)
    assert answers == [expected_answer, expected_answer]
    num_resets_with_empty_line = num_resets

    # Without the empty line, the second line continues the conversation.
    num_resets = 0
    monkeypatch.setattr(sys, "stdin", io.StringIO(f"{question}\n{question}\n"))
    chat.main([*flags, "--chat"])
    assert num_resets == num_resets_with_empty_line - 1


def test_the_page_shows_the_output_of_five_commands():
    assert len(COMMANDS_ON_PAGE) == 5


@pytest.mark.parametrize(
    ("library", "new_command"), [("sampler.py", "chat.py"), ("lora.py", "export.py")]
)
def test_an_old_command_names_the_new_one_with_its_arguments(library, new_command):
    process = run_command(str(ROOT / library), "--run", "runs/my run", "--num", "3")
    assert process.returncode == 2
    assert process.stdout == ""
    assert process.stderr.strip().endswith(f"uv run {new_command} --run 'runs/my run' --num 3")
    assert len(process.stderr.splitlines()) == 1


def test_no_message_recommends_a_command_that_is_now_a_library():
    old_command = re.compile(r"^(?:sampler|lora)\.py$|\b(?:sampler|lora)\.py -")
    num_texts = 0
    for path in sorted(ROOT.rglob("*.py")):
        if {".venv", "tests"} & set(path.relative_to(ROOT).parts):
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                num_texts += 1
                assert not old_command.search(node.value), f"{path}:{node.lineno}"
    assert num_texts > 1000
