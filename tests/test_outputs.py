"""Where results go: what cannot be written is refused before the work, and an error of the system names its file."""

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
def limited(size):
    """Makes every file of this process stop growing at `size` bytes, as a full disk would."""
    _, most = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, most))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))


@pytest.fixture
def full_disk(monkeypatch):
    usage = namedtuple("usage", "total used free")  # as shutil's
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(10**9, 10**9, 100))


@pytest.fixture
def no_work(golden, monkeypatch):
    """Whatever a command would do after its flags were read fails the test."""
    golden("grpo")  # made before its own work is refused

    def work(*_, **__):
        pytest.fail("the work has begun")

    for module, name in (
        (export, "write_merged_model"),
        (export, "write_peft_adapter"),
        (export, "write_gguf_and_modelfile"),
    ):
        monkeypatch.setattr(module, name, work)
    monkeypatch.setattr(evaluate, "evaluate_task", work)
    monkeypatch.setattr(report.page, "write_page", work)


def refused(capsys, main, *words):
    """The one line with which a command refuses its flags."""
    with pytest.raises(SystemExit) as ended:
        main(list(map(str, words)))
    assert ended.value.code == 2
    line = capsys.readouterr().err.splitlines()[-1]
    assert line.startswith("error: ")
    return line


# ---- directories


@pytest.mark.slow
@pytest.mark.parametrize("words", EXPORTS, ids=lambda words: words[-1])
def test_an_empty_directory_a_link_to_one_and_the_current_one_are_written_into(
    golden, tmp_path, monkeypatch, words
):
    run = [*words, "--run", str(golden("grpo"))]
    export.main([*run, "--out", str(tmp_path / "new")])
    names = {path.name.replace("new", "*") for path in (tmp_path / "new").iterdir()}
    for name in ("empty", "target", "current"):
        (tmp_path / name).mkdir()
    (tmp_path / "link").symlink_to("target")
    (tmp_path / "dangling").symlink_to("later")
    inode = (tmp_path / "current").stat().st_ino
    monkeypatch.chdir(tmp_path / "current")
    for out, written in {
        tmp_path / "empty": "empty",
        tmp_path / "link": "target",
        tmp_path / "dangling": "later",
        ".": "current",
    }.items():
        export.main([*run, "--out", str(out)])
        assert {path.name.replace(written, "*") for path in (tmp_path / written).iterdir()} == names
    assert (tmp_path / "link").is_symlink() and (tmp_path / "current").stat().st_ino == inode
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]


@pytest.mark.parametrize("words", EXPORTS, ids=lambda words: words[-1])
def test_a_model_for_which_the_disk_has_no_room_is_refused_before_the_work(
    golden, tmp_path, capsys, full_disk, no_work, words
):
    for out in (tmp_path / "new", tmp_path):
        line = refused(capsys, export.main, *words, "--run", golden("grpo"), "--out", out)
        assert f"--out {out}" in line and "MB" in line
    assert not list(tmp_path.iterdir())


def test_a_directory_that_is_taken_or_lies_below_a_file_is_refused_before_the_work(
    golden, tmp_path, capsys, no_work
):
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to(tmp_path)
    run = ["--fuse", "--run", golden("grpo"), "--out"]
    for out in (tmp_path, tmp_path / "file", tmp_path / "link", tmp_path / "file" / "new"):
        assert f"--out {out}" in refused(capsys, export.main, *run, out)


@pytest.mark.slow
@pytest.mark.parametrize("words", EXPORTS, ids=lambda words: words[-1])
def test_a_disk_that_becomes_full_during_the_work_is_told_with_out_and_nothing_is_left(
    golden, tmp_path, capsys, words
):
    with limited(100_000):
        line = refused(
            capsys, export.main, *words, "--run", golden("grpo"), "--out", tmp_path / "new"
        )
    assert f"--out {tmp_path / 'new'}" in line and not list(tmp_path.iterdir())


def test_the_least_that_is_written_is_never_more_than_what_is_written(golden, tmp_path):
    run = golden("grpo")
    for words, bits in ((["--fuse"], 16), (["--export", "peft"], 16), (["--export", "gguf"], 16)):
        out = tmp_path / words[-1]
        export.main([*words, "--run", str(run), "--out", str(out)])
        size = sum(path.stat().st_size for path in out.iterdir())
        least = export.least_bytes_to_write(
            "demo", str(run), words[1] if len(words) > 1 else None, bits
        )
        assert size / 3 < least <= size


def test_an_error_about_another_file_is_not_one_about_out(tmp_path):
    for path, is_out in {
        "new": True,
        "new/a": True,
        ".new-x7/made/a": True,
        "model/a": False,
        "newer": False,
    }.items():
        assert export.is_in_out_or_scratch(tmp_path / path, tmp_path / "new") == is_out
    assert not export.is_in_out_or_scratch("/etc/passwd", tmp_path / "new")


# ---- files


@pytest.mark.parametrize(
    ("main", "words"), [(evaluate.main, ["--model", "demo"]), (report.main, None)]
)
def test_a_file_that_cannot_be_written_is_refused_before_the_work(
    golden, tmp_path, capsys, no_work, main, words
):
    words = words or [golden("grpo")]
    (tmp_path / "file").touch()
    places = [tmp_path, tmp_path / "none" / "out", tmp_path / "file" / "out"]
    if os.path.exists("/dev/full"):  # on Linux
        places.append("/dev/full")
    for out in places:
        assert f"--out {out}" in refused(capsys, main, *words, "--out", out)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_a_file_on_a_full_disk_is_refused_before_the_work_and_a_file_that_is_there_stays(
    golden, tmp_path, capsys, full_disk, no_work
):
    (tmp_path / "old").write_text("results")
    for name in ("old", "new"):
        line = refused(capsys, evaluate.main, "--model", "demo", "--out", tmp_path / name)
        assert f"--out {tmp_path / name}" in line
    assert [path.name for path in tmp_path.iterdir()] == ["old"]
    assert (tmp_path / "old").read_text() == "results"


def test_what_is_tried_before_the_work_changes_no_file_and_makes_none(tmp_path):
    (tmp_path / "old").write_text("results")
    reading, writing = os.pipe()
    for path in (tmp_path / "old", tmp_path / "new", f"/dev/fd/{writing}"):
        flags.refuse_unwritable_file("--out", type(tmp_path)(path))
    os.close(writing)
    assert os.read(reading, 9) == b""
    os.close(reading)
    assert [path.name for path in tmp_path.iterdir()] == ["old"]
    assert (tmp_path / "old").read_text() == "results"


# ---- errors of the system


def saved_state(run):
    """A checkpoint of step 1 with an adapter whose configuration is long."""
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
        path.parent, saved_state(path.parent)
    ),
}


@pytest.mark.parametrize("name", WRITERS)
def test_a_write_that_the_disk_does_not_take_names_its_file(name, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with limited(100), pytest.raises(OSError) as failed:
        WRITERS[name](tmp_path / name)
    assert failed.value.errno == errno.EFBIG and str(failed.value.filename).startswith(
        str(tmp_path)
    )
    assert str(tmp_path) in flags.message_with_advice(failed.value)


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (OSError(errno.ENOSPC, "No space left on device", "/a/b"), ["/a/b", "make room"]),
        (OSError(errno.EACCES, "Permission denied", "/a/b"), ["/a/b", "permissions"]),
        (OSError(errno.EXDEV, "Invalid cross-device link", "/a/b", None, "/c/d"), ["/c/d"]),
        (OSError("said by us"), ["said by us"]),
        (ValueError("a mistake"), ["a mistake"]),
    ],
)
def test_the_line_of_an_error_has_its_path_and_what_to_do(error, words):
    line = flags.message_with_advice(error)
    assert all(word in line for word in words) and "Errno" not in line


def test_a_name_that_an_error_has_is_kept():
    def write():
        with flags.add_path_to_os_errors("/outer"):
            raise OSError(errno.ENOSPC, "No space left on device", "/inner")

    with pytest.raises(OSError, match="/inner"):
        write()


def test_an_exception_of_a_rust_library_that_ends_in_an_os_error_names_its_file():
    def write(message):
        with flags.add_path_to_os_errors("/outer"):
            raise Exception(message)

    with pytest.raises(OSError) as failed:
        write("No space left on device (os error 28)")
    assert (failed.value.errno, failed.value.filename) == (errno.ENOSPC, "/outer")
    with pytest.raises(Exception, match="a bug"):
        write("a bug")
