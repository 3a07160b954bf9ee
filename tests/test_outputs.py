"""Unwritable outputs are refused before the work, and an error of the system names its file."""

import contextlib
import errno
import os
import resource
import shutil
from collections import namedtuple

import pytest

import evaluate
import export
import flags
import report
from disk import checkpoint, run_files
from prompts import data

EXPORTS = [["--fuse"], ["--export", "peft"], ["--export", "gguf"]]


@contextlib.contextmanager
def limit_file_size(size):
    """Stops every file of this process from growing beyond `size` bytes, like a full disk."""
    _, hard_limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard_limit))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (hard_limit, hard_limit))


@pytest.fixture
def full_disk(monkeypatch):
    usage = namedtuple("usage", "total used free")  # the fields of shutil's result
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(10**9, 10**9, 100))


@pytest.fixture
def no_work(golden, monkeypatch):
    """The test fails if a command does anything after it has read its flags."""
    golden("grpo")  # trains the run before its functions are replaced

    def work(*_, **__):
        pytest.fail("the work has begun")

    for name in (
        "write_merged_model_and_return_summary",
        "write_peft_adapter_and_return_summary",
        "write_gguf_modelfile_and_return_summary",
    ):
        monkeypatch.setattr(export, name, work)
    monkeypatch.setattr(evaluate, "evaluate_task", work)
    monkeypatch.setattr(report.page, "write_page", work)


def catch_error_line(capsys, main, *arguments):
    """The line with which a command refuses its flags."""
    with pytest.raises(SystemExit) as exit_info:
        main(list(map(str, arguments)))
    assert exit_info.value.code == 2
    line = capsys.readouterr().err.splitlines()[-1]
    assert line.startswith("error: ")
    return line


def file_names(directory):
    return [path.name for path in directory.iterdir()]


# ---- directories


@pytest.mark.slow
@pytest.mark.parametrize("arguments", EXPORTS, ids=lambda arguments: arguments[-1])
def test_export_writes_into_an_empty_directory_a_link_to_one_and_the_current_one(
    golden, tmp_path, monkeypatch, arguments
):
    def names_with_placeholder(directory):
        """The names of the files, with * in place of the directory's name."""
        return {name.replace(directory.name, "*") for name in file_names(directory)}

    run = [*arguments, "--run", str(golden("grpo"))]
    export.main([*run, "--out", str(tmp_path / "new")])
    expected_names = names_with_placeholder(tmp_path / "new")

    for name in ("empty", "target", "current"):
        (tmp_path / name).mkdir()
    (tmp_path / "link").symlink_to("target")
    (tmp_path / "dangling").symlink_to("later")
    inode = (tmp_path / "current").stat().st_ino
    monkeypatch.chdir(tmp_path / "current")
    directory_by_out = {
        tmp_path / "empty": "empty",
        tmp_path / "link": "target",
        tmp_path / "dangling": "later",
        ".": "current",
    }
    for out, directory in directory_by_out.items():
        export.main([*run, "--out", str(out)])
        assert names_with_placeholder(tmp_path / directory) == expected_names
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "current").stat().st_ino == inode
    assert not [name for name in file_names(tmp_path) if name.startswith(".")]


@pytest.mark.parametrize("arguments", EXPORTS, ids=lambda arguments: arguments[-1])
def test_a_model_that_does_not_fit_on_the_disk_is_refused_before_the_work(
    golden, tmp_path, capsys, full_disk, no_work, arguments
):
    for out in (tmp_path / "new", tmp_path):
        run = ["--run", golden("grpo"), "--out", out]
        line = catch_error_line(capsys, export.main, *arguments, *run)
        assert f"--out {out}" in line
        assert "MB" in line
    assert not list(tmp_path.iterdir())


def test_a_directory_that_has_files_or_lies_below_a_file_is_refused_before_the_work(
    golden, tmp_path, capsys, no_work
):
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to(tmp_path)
    run = ["--fuse", "--run", golden("grpo"), "--out"]
    for out in (tmp_path, tmp_path / "file", tmp_path / "link", tmp_path / "file" / "new"):
        assert f"--out {out}" in catch_error_line(capsys, export.main, *run, out)


@pytest.mark.slow
@pytest.mark.parametrize("arguments", EXPORTS, ids=lambda arguments: arguments[-1])
def test_an_export_to_a_disk_that_fills_up_ends_in_an_error_about_out_and_leaves_no_files(
    golden, tmp_path, capsys, arguments
):
    out = tmp_path / "new"
    with limit_file_size(100_000):
        run = ["--run", golden("grpo"), "--out", out]
        line = catch_error_line(capsys, export.main, *arguments, *run)
    assert f"--out {out}" in line
    assert not list(tmp_path.iterdir())


def test_the_least_size_of_an_export_is_never_more_than_the_written_size(golden, tmp_path):
    run = str(golden("grpo"))
    for arguments, export_format in zip(EXPORTS, (None, "peft", "gguf"), strict=True):
        out = tmp_path / arguments[-1]
        export.main([*arguments, "--run", run, "--out", str(out)])
        size = sum(path.stat().st_size for path in out.iterdir())
        least_size = export.least_bytes_to_write("demo", run, export_format, 16)
        assert size / 3 < least_size <= size


def test_only_an_error_about_out_or_its_scratch_directory_is_an_error_about_out(tmp_path):
    paths = {"new": True, "new/a": True, ".new-x7/made/a": True, "model/a": False, "newer": False}
    for path, is_in_out in paths.items():
        assert export.is_in_out_or_scratch(tmp_path / path, tmp_path / "new") == is_in_out
    assert not export.is_in_out_or_scratch("/etc/passwd", tmp_path / "new")


# ---- files


@pytest.mark.parametrize(
    ("main", "arguments"), [(evaluate.main, ["--model", "demo"]), (report.main, None)]
)
def test_an_output_file_that_cannot_be_written_is_refused_before_the_work(
    golden, tmp_path, capsys, no_work, main, arguments
):
    arguments = arguments or [golden("grpo")]
    (tmp_path / "file").touch()
    paths = [tmp_path, tmp_path / "none" / "out", tmp_path / "file" / "out"]
    if os.path.exists("/dev/full"):  # on Linux
        paths.append("/dev/full")
    for out in paths:
        assert f"--out {out}" in catch_error_line(capsys, main, *arguments, "--out", out)
    assert file_names(tmp_path) == ["file"]


def test_an_output_file_on_a_full_disk_is_refused_and_an_existing_file_is_unchanged(
    golden, tmp_path, capsys, full_disk, no_work
):
    (tmp_path / "old").write_text("results")
    for name in ("old", "new"):
        out = tmp_path / name
        line = catch_error_line(capsys, evaluate.main, "--model", "demo", "--out", out)
        assert f"--out {out}" in line
    assert file_names(tmp_path) == ["old"]
    assert (tmp_path / "old").read_text() == "results"


def test_the_check_before_the_work_changes_no_file_and_creates_none(tmp_path):
    (tmp_path / "old").write_text("results")
    reading, writing = os.pipe()
    for path in (tmp_path / "old", tmp_path / "new", f"/dev/fd/{writing}"):
        flags.refuse_unwritable_file("--out", type(tmp_path)(path))
    os.close(writing)
    assert os.read(reading, 9) == b""
    os.close(reading)
    assert file_names(tmp_path) == ["old"]
    assert (tmp_path / "old").read_text() == "results"


# ---- errors of the system


def make_saved_state(run):
    """Makes a checkpoint of step 1 with an adapter whose configuration is long."""
    adapter = checkpoint.checkpoint_path(run, 1) / "adapter"
    adapter.mkdir(parents=True)
    os.symlink(flags.__file__, adapter / "adapter_config.json")  # the limit is for writes
    return checkpoint.TrainingState(1, {}, {}, {"best_step": None})


WRITERS = {
    "rows.jsonl": lambda path: data.write_rows_to_cache_file([{"prompt": "x" * 1000}]),
    "metrics.jsonl": lambda path: run_files.JsonLinesLog(path).write(
        {"step": 1, "text": "x" * 1000}
    ),
    "page.html": lambda path: run_files.write_text_atomically(path, "x" * 1000),
    "state.json": lambda path: checkpoint.write_synced_json(path, {"text": "x" * 1000}),
    "adapter_config.json": lambda path: checkpoint.copy_adapter_and_update_best(
        path.parent, make_saved_state(path.parent)
    ),
}


@pytest.mark.parametrize("name", WRITERS)
def test_the_error_of_a_failed_write_names_the_file(name, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with limit_file_size(100), pytest.raises(OSError) as error:
        WRITERS[name](tmp_path / name)
    assert error.value.errno == errno.EFBIG
    assert str(error.value.filename).startswith(str(tmp_path))
    assert str(tmp_path) in flags.message_with_advice(error.value)


@pytest.mark.parametrize(
    ("error", "expected_texts"),
    [
        (OSError(errno.ENOSPC, "No space left on device", "/a/b"), ["/a/b", "make room"]),
        (OSError(errno.EACCES, "Permission denied", "/a/b"), ["/a/b", "permissions"]),
        (OSError(errno.EXDEV, "Invalid cross-device link", "/a/b", None, "/c/d"), ["/c/d"]),
        (OSError("said by us"), ["said by us"]),
        (ValueError("a mistake"), ["a mistake"]),
    ],
)
def test_the_message_of_an_error_has_the_path_and_advice(error, expected_texts):
    message = flags.message_with_advice(error)
    for text in expected_texts:
        assert text in message
    assert "Errno" not in message


def test_an_error_that_already_has_a_file_name_keeps_the_name():
    def write():
        with flags.add_path_to_os_errors("/outer"):
            raise OSError(errno.ENOSPC, "No space left on device", "/inner")

    with pytest.raises(OSError, match="/inner"):
        write()


def test_an_exception_of_a_rust_library_that_ends_in_an_os_error_gets_the_file_name():
    def write(message):
        with flags.add_path_to_os_errors("/outer"):
            raise Exception(message)

    with pytest.raises(OSError) as error:
        write("No space left on device (os error 28)")
    assert error.value.errno == errno.ENOSPC
    assert error.value.filename == "/outer"
    with pytest.raises(Exception, match="a bug"):
        write("a bug")
