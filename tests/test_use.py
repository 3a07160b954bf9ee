"""docs/use.md: its commands run on a run in its order, and print what it shows."""

import io
import re
import shlex
import shutil
import sys

import pytest
from conftest import ROOT

import lora
import sampler

PAGE = (ROOT / "docs" / "use.md").read_text(encoding="utf-8")
SHOWN = re.findall(
    r"^\$ uv run (?:--extra gguf )?(\w+)\.py (.*)\n((?:(?!\$ |```).*\n)*)", PAGE, re.M
)
QUICK = [
    one for one in SHOWN if "--fuse --bits" not in one[1]
]  # which measures: tests/test_deploy.py


@pytest.mark.parametrize(("command", "flags", "printed"), QUICK)
def test_a_command_of_the_page_prints_what_it_shows(
    golden, tmp_path, monkeypatch, capsys, command, flags, printed
):
    shutil.copytree(golden("grpo"), tmp_path / "runs" / "NAME")
    monkeypatch.chdir(tmp_path)
    if "--chat" in flags:
        monkeypatch.setattr(sys, "stdin", io.StringIO(printed.splitlines()[0].removeprefix("> ")))
    {"lora": lora, "sampler": sampler}[command].main(shlex.split(flags))
    words = {
        re.escape("\u2026"): ".*",
        "BASE": r"\S+",
        re.escape("forty-seven"): r"[\w-]+",
    }  # a run of few steps
    pattern = re.sub(
        "|".join(map(re.escape, words)), lambda found: words[found[0]], re.escape(printed)
    )
    assert re.match(pattern, capsys.readouterr().out), pattern


def test_the_page_shows_what_five_commands_print():
    assert len(SHOWN) == 5
