"""The pages: the reference agrees with the code; links, flags and files exist."""

import ast
import functools
import re

import pytest
from conftest import ROOT
from test_layout import FILES, parse

from docs import reference

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]

TEXTS = [path for path in FILES if path.suffix in (".md", ".py") or path.name == "pyproject.toml"]
# Flags of uv, pytest, ruff, argparse, mlx.launch, mlx_lm, rsync, TensorBoard, vLLM, llama.cpp,
# Chromium and TRL.
FOREIGN_FLAGS = set(
    "--extra --group --with --no-deps --ignore --dist --maxprocesses --strict-config "
    "--strict-markers --check --help "
    "--backend --hostfile --adapter-path --exclude --logdir --enable-lora --lora-modules --dump-dom "
    "--no-sync --rounds --lora-alpha --data-path --mlx-path --port --project --overrides "
    "--editable".split()
)
INTERNAL_FLAGS = {"--train-one"}  # bench/sooner.py gives this flag to the processes that it starts
USER_FILES = {"FILE.py", "mine.py", "/home/me/mine.py", "last_number.py"}
LLAMA_CPP_FILES = {"convert_hf_to_gguf.py", "llama.cpp/convert_hf_to_gguf.py"}
FOREIGN_FILES = USER_FILES | LLAMA_CPP_FILES


def read_meanings(title):
    """The meanings in the table of one section of the reference, by key."""
    page = reference.PAGE.read_text(encoding="utf-8")
    section = page.partition(f"## {title}\n")[2].partition("\n## ")[0]
    return dict(re.findall(r"^\| `(.+?)` \| (.+) \|$", section, re.M))


METRICS = read_meanings("metrics.jsonl")
EVALUATION_METRICS = read_meanings("eval.jsonl")


def undocumented_keys(record, entries):
    """The keys of a record that no entry names. Capitals in an entry stand for any name."""
    patterns = [re.sub(r"\b[A-Z]+\b", "[^/]+", name).replace("_K", "_[0-9]+") for name in entries]
    keys = {key.removesuffix("_ci95") for key in record}

    def has_meaning(key):
        return any(re.fullmatch(pattern, key) for pattern in patterns)

    return sorted(key for key in keys if not has_meaning(key))


def required_metrics():
    """
    The keys that every step has in metrics.jsonl, whatever the method.

    The value is null if the method does not measure it.
    """
    only_with = ("tools/", "episodes/", "replay/")  # tools, an outside harness, replayed samples
    return {
        name
        for name, meaning in METRICS.items()
        if name == name.lower()
        and not name.startswith(only_with)
        and not meaning.startswith("[Several machines]")
    }


def test_the_generated_tables_of_flags_trl_names_and_memory_are_up_to_date():
    pages = {
        reference.PAGE: reference.flags_page_text,
        reference.TRL: reference.trl_page_text,
        reference.MEMORY: reference.memory_page_text,
    }
    for path, page_text in pages.items():
        is_up_to_date = path.read_text(encoding="utf-8") == page_text()
        assert is_up_to_date, "run `uv run python -m docs.reference`"


def is_text_constant(node):
    return isinstance(node, ast.Constant) and isinstance(node.value, str)


@functools.cache
def known_flags():
    """
    Every flag of every command.

    The reference has the flags of the settings. The other flags are arguments of `add_argument`.
    The benchmarks also make flags of names in loops, so every name in their code may be a flag.
    """
    pattern = r"(?:^\| `|this flag is the same as )(--[a-z-]+)"
    flags = set(re.findall(pattern, reference.flags_page_text(), re.M))
    for path in FILES:
        if path.suffix != ".py":
            continue
        for node in ast.walk(parse(path)):
            if isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "add_argument":
                flags |= {argument.value for argument in node.args if is_text_constant(argument)}
            if path.parent.name == "bench" and is_text_constant(node) and node.value.isidentifier():
                flags.add(f"--{node.value.replace('_', '-')}")
    return flags


def checked_text(path):
    """The text of a page, all string constants of a module, or the docstrings of a test module."""
    if path.suffix != ".py":
        return path.read_text(encoding="utf-8")
    nodes = list(ast.walk(parse(path)))
    if "tests" in path.parts:
        documented = [
            node for node in nodes if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef))
        ]
        return "\n".join(ast.get_docstring(node) or "" for node in documented)
    return "\n".join(node.value for node in nodes if is_text_constant(node))


NAMES = [f"/{path.relative_to(ROOT).as_posix()}" for path in FILES]
FOLDERS = "|".join(sorted({name.split("/")[1] for name in NAMES if name.count("/") > 1} - {"docs"}))


def missing_flags(text):
    flags = set(re.findall(r"(?<![\w-])--[a-z][a-z-]*[a-z]", text))
    existing = known_flags() | FOREIGN_FLAGS | INTERNAL_FLAGS
    return {flag for flag in flags - existing if flag.replace("--no-", "--") not in existing}


def missing_files(text):
    pattern = rf"[\w./-]*\w\.py\b|\b(?:{FOLDERS})/[\w./-]*\w\.\w+"
    files = set(re.findall(pattern, text)) - FOREIGN_FILES

    def exists(file):
        return any(name.endswith(f"/{file}") for name in NAMES)

    return {file for file in files if not exists(file)}


def missing_flags_and_files(text):
    """
    The flags and files that a text names and that do not exist.

    `COMMIT:path` and `COMMIT:--flag` name files and flags of an older commit.
    """
    text = re.sub(r"\b(COMMIT|[0-9a-f]{7}):[\w./-]+|\.\./", "", text)
    return sorted(missing_flags(text) | missing_files(text))


def test_every_flag_and_file_that_a_text_names_exists():
    missing = []
    for path in TEXTS:
        for name in missing_flags_and_files(checked_text(path)):
            missing.append(f"{path.relative_to(ROOT)}: {name}")
    assert not missing, "\n".join(missing)


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_every_link_between_pages_leads_to_an_existing_page_and_heading(path):
    links = re.findall(r"\]\((?!http)([^)#]*)#?([^)]*)\)", path.read_text(encoding="utf-8"))
    for target, anchor in links:
        page = path.parent / target if target else path
        assert page.exists(), f"{path.name} links to {target}, which does not exist"
        if anchor:
            titles = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.M)
            anchors = {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}
            message = f"{path.name} links to {target}#{anchor}, which does not exist"
            assert anchor in anchors, message


def test_the_readme_has_at_most_150_lines():
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= 150
