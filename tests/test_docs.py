"""The pages: the reference agrees with the code, links, flags and files exist, the README stays short."""

import ast
import functools
import re

import pytest
from conftest import ROOT
from test_layout import FILES, parse

from docs import reference

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]

TEXTS = [path for path in FILES if path.suffix in (".md", ".py") or path.name == "pyproject.toml"]
# What uv, pytest, ruff, argparse, mlx.launch, mlx_lm, rsync, TensorBoard, vLLM, llama.cpp, Chromium and TRL understand.
FOREIGN_FLAGS = set(
    "--extra --group --with --no-deps --ignore --dist --maxprocesses --strict-config --strict-markers --check --help "
    "--backend --hostfile --adapter-path --exclude --logdir --enable-lora --lora-modules --dump-dom "
    "--no-sync --rounds --lora-alpha --data-path --mlx-path --port --project --overrides --editable".split()
)
OWN_FLAGS = {"--train-one"}  # bench/sooner.py gives this flag to its own processes
FOREIGN_FILES = {"FILE.py", "mine.py", "/home/me/mine.py", "last_number.py"}  # a user's
FOREIGN_FILES |= {"convert_hf_to_gguf.py", "llama.cpp/convert_hf_to_gguf.py"}  # llama.cpp's


def explained(title):
    """The meanings in the table of one section of the reference, by key."""
    section = (
        reference.PAGE.read_text(encoding="utf-8")
        .partition(f"## {title}\n")[2]
        .partition("\n## ")[0]
    )
    return dict(re.findall(r"^\| `(.+?)` \| (.+) \|$", section, re.M))


METRICS, EVALUATION_METRICS = explained("metrics.jsonl"), explained("eval.jsonl")


def without_meaning(record, known):
    """The keys of a record that no entry names; what is in capitals there stands for any name."""
    patterns = [re.sub(r"\b[A-Z]+\b", "[^/]+", name).replace("_K", "_[0-9]+") for name in known]
    keys = {key.removesuffix("_ci95") for key in record}
    return sorted(
        key for key in keys if not any(re.fullmatch(pattern, key) for pattern in patterns)
    )


def always_there():
    """The keys of metrics.jsonl that every step has, whatever the method; null where it does not measure them."""
    sometimes = {
        name for name, meaning in METRICS.items() if meaning.startswith("[Several machines]")
    }
    only_with = ("tools/", "episodes/", "replay/")  # tools, an outside harness, replayed samples
    return {
        name for name in METRICS if name == name.lower() and not name.startswith(only_with)
    } - sometimes


def test_the_tables_of_flags_of_trl_s_names_and_of_what_fits_are_up_to_date():
    pages = {
        reference.PAGE: reference.flags_page_text,
        reference.TRL: reference.trl_page_text,
        reference.MEMORY: reference.memory_page_text,
    }
    for path, make in pages.items():
        assert path.read_text(encoding="utf-8") == make(), "run `uv run python -m docs.reference`"


@functools.cache
def known_flags():
    """Every flag of every command: the settings' stand in the reference, the rest in calls of `add_argument`."""
    calls = (node for path in FILES if path.suffix == ".py" for node in ast.walk(parse(path)))
    named = (
        node for path in FILES if path.parent.name == "bench" for node in ast.walk(parse(path))
    )
    looped = {
        f"--{node.value.replace('_', '-')}"
        for node in named
        if isinstance(node, ast.Constant)
        and isinstance(node.value, str)
        and node.value.isidentifier()
    }
    return (
        looped
        | set(
            re.findall(
                r"(?:^\| `|this flag is the same as )(--[a-z-]+)", reference.flags_page_text(), re.M
            )
        )
        | {
            flag.value
            for call in calls
            if isinstance(call, ast.Call) and getattr(call.func, "attr", "") == "add_argument"
            for flag in call.args
            if isinstance(flag, ast.Constant)
        }
    )


def prose(path):
    """A page, or what a module says in docstrings, helps and errors; of a test its docstrings alone."""
    if path.suffix != ".py":
        return path.read_text(encoding="utf-8")
    nodes = list(ast.walk(parse(path)))
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef)
    if "tests" in path.parts:
        return "\n".join(
            ast.get_docstring(node) or "" for node in nodes if isinstance(node, documented)
        )
    return "\n".join(
        node.value
        for node in nodes
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    )


NAMES = [f"/{path.relative_to(ROOT).as_posix()}" for path in FILES]
FOLDERS = "|".join(sorted({name.split("/")[1] for name in NAMES if name.count("/") > 1} - {"docs"}))


def missing(text):
    """The flags and files that a text names and nobody has; `COMMIT:path` and `COMMIT:--flag` name what is gone."""
    text = re.sub(r"\b(COMMIT|[0-9a-f]{7}):[\w./-]+|\.\./", "", text)
    flags = set(re.findall(r"(?<![\w-])--[a-z][a-z-]*[a-z]", text))
    known = known_flags() | FOREIGN_FLAGS | OWN_FLAGS
    unknown = {
        flag for flag in flags if flag not in known and flag.replace("--no-", "--") not in known
    }
    files = (
        set(re.findall(rf"[\w./-]*\w\.py\b|\b(?:{FOLDERS})/[\w./-]*\w\.\w+", text)) - FOREIGN_FILES
    )
    return sorted(
        unknown | {file for file in files if not any(name.endswith(f"/{file}") for name in NAMES)}
    )


def test_every_flag_and_file_that_a_text_names_exists():
    missing_words = [
        f"{path.relative_to(ROOT)}: {word}" for path in TEXTS for word in missing(prose(path))
    ]
    assert not missing_words, "\n".join(missing_words)


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_every_link_between_pages_leads_somewhere(path):
    for target, anchor in re.findall(
        r"\]\((?!http)([^)#]*)#?([^)]*)\)", path.read_text(encoding="utf-8")
    ):
        page = path.parent / target if target else path
        assert page.exists(), f"{path.name} links to {target}, which does not exist"
        if anchor:
            titles = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.M)
            anchors = {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}
            assert anchor in anchors, (
                f"{path.name} links to {target}#{anchor}, which does not exist"
            )


def test_the_readme_fits_on_a_few_screens():
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= 150
