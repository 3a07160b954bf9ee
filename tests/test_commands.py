"""Messages advise commands that fit the way in which the user started the program."""

import json
import sys
from unittest import mock

import pytest

from text import commands


@pytest.fixture
def write_receipt(tmp_path, monkeypatch):
    """Make Gwen an installed program. Returns a function that writes the receipt of `uv tool install`."""
    monkeypatch.setattr(commands, "HOME", tmp_path / "lib" / "site-packages")
    monkeypatch.setattr(sys, "prefix", str(tmp_path))

    def write_receipt(requirement):
        requirements = f'[{{ name = "other" }}, {{ name = "gwen", {requirement} }}]'
        (tmp_path / "uv-receipt.toml").write_text(f"[tool]\nrequirements = {requirements}\n")

    return write_receipt


def test_in_a_checkout_the_advice_adds_a_missing_extra_to_uv_run():
    advice = commands.advice_to_install_extra("smollm")
    assert advice == "begin the command with: uv run --extra smollm"


def test_the_advice_is_to_reinstall_an_installed_gwen_with_all_extras(write_receipt):
    write_receipt('extras = ["gguf", "wandb"], directory = "/my code/gwen"')
    assert commands.command_prefix() == "gwen train"
    assert commands.advice_to_install_extra("smollm") == (
        "install Gwen again with: uv tool install --overrides '/my code/gwen/deploy/overrides.txt' "
        "'/my code/gwen[gguf,wandb,smollm]'"
    )


def test_the_advice_is_to_reinstall_a_gwen_of_unknown_origin_from_a_checkout(write_receipt):
    advice = (
        "go to the checkout of Gwen and install it again with: "
        "uv tool install --overrides deploy/overrides.txt '.[smollm]'"
    )
    assert commands.advice_to_install_extra("smollm") == advice
    write_receipt('git = "https://example.org/gwen"')
    assert commands.advice_to_install_extra("smollm") == advice


def test_the_advice_for_an_editable_installation_names_the_program_gwen(
    write_receipt, monkeypatch, tmp_path
):
    """The program `gwen` then runs the checkout, but `uv run --extra` does not reach it."""
    checkout = tmp_path / "checkout"
    checkout.mkdir()
    (checkout / "pyproject.toml").touch()
    monkeypatch.setattr(commands, "HOME", checkout)
    assert commands.is_run_from_checkout()

    distribution = mock.Mock()
    monkeypatch.setattr(commands.importlib.metadata, "distribution", lambda name: distribution)
    origin = {"url": checkout.as_uri(), "dir_info": {"editable": True}}
    distribution.read_text.return_value = json.dumps(origin)
    write_receipt(f'editable = "{checkout}"')
    assert not commands.is_run_from_checkout()
    assert commands.command_prefix("chat.py --chat") == "gwen chat"
    assert commands.advice_to_install_extra("gguf") == (
        f"install Gwen again with: uv tool install --overrides {checkout}/deploy/overrides.txt "
        f"--editable '{checkout}[gguf]'"
    )

    distribution.read_text.return_value = json.dumps(origin | {"url": "file:///elsewhere"})
    assert commands.is_run_from_checkout(), "another checkout is installed"
