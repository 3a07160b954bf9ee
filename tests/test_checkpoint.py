"""Checkpoints appear whole or not at all, and a damaged one gives way to the one before."""

import contextlib
import itertools
import os
import shutil
from pathlib import Path

import mlx.core as mx
import pytest
from conftest import catch_message, read_tree
from mlx.utils import tree_flatten

import gwen
import lora
from disk import checkpoint, run_files


@pytest.fixture(scope="module")
def model(checkpoints):
    """A model with adapters; `save` gives them the values of a step."""
    model = gwen.load_model(checkpoints["qwen3"])
    lora.apply(model, 2, 2.0)
    return model


def state(model, step):
    names = [name for name, _ in tree_flatten(model.trainable_parameters())]
    shapes = [array.shape for _, array in tree_flatten(model.trainable_parameters())]
    keys = mx.random.split(mx.random.key(step), len(names))
    masters = {
        name: mx.random.normal(shape, key=key)
        for name, shape, key in zip(names, shapes, keys, strict=True)
    }
    optimizer = {"step": mx.array(step, mx.uint64)} | {
        f"{name}.m": 0.1 * array for name, array in masters.items()
    }
    return checkpoint.TrainingState(
        step, masters, optimizer, {"loss_scale": {"value": 2.0**15}, "best_step": step}
    )


def save(run, model, step, **changes):
    """Saves the state of a step, of which the model holds the masters."""
    saved = state(model, step)._replace(**changes)
    model.load_weights(list(saved.trainable.items()), strict=False)
    checkpoint.save_and_remove_old(
        run, saved, lambda to: lora.save_adapter_or_full_weights(model, to, "tiny")
    )
    return saved


def same(a, b):
    arrays = all(
        mx.array_equal(x[name], y[name]).item() and x[name].dtype == y[name].dtype
        for x, y in ((a.trainable, b.trainable), (a.optimizer, b.optimizer))
        for name in x.keys() | y.keys()
    )
    return arrays and (a.step, a.extra) == (b.step, b.extra)


def test_what_is_saved_is_loaded_bit_for_bit(tmp_path, model):
    save(tmp_path, model, 50)
    loaded = checkpoint.load(tmp_path)
    assert same(loaded, state(model, 50)) and list(loaded.trainable) == sorted(loaded.trainable)
    tensors = mx.load(str(tmp_path / "checkpoints" / "step-000050" / "state.safetensors"))
    assert all(
        name.startswith("optimizer/") for name in tensors
    )  # the masters are the adapter's, and there only


def test_masters_of_a_model_that_is_trained_whole_are_kept_beside_its_16_bit_weights(
    tmp_path, checkpoints
):
    whole = gwen.load_model(checkpoints["qwen3"], mx.float16)
    masters = {
        name: mx.random.normal(array.shape) for name, array in tree_flatten(whole.parameters())
    }
    whole.load_weights([(name, array.astype(mx.float16)) for name, array in masters.items()])
    saved = checkpoint.TrainingState(
        1, masters, {"step": mx.array(1)}, {"loss_scale": {"value": 1.0}, "best_step": None}
    )
    checkpoint.save_and_remove_old(
        tmp_path, saved, lambda to: lora.save_adapter_or_full_weights(whole, to, "tiny")
    )
    assert same(checkpoint.load(tmp_path), saved)
    loaded = gwen.load_model(
        checkpoints["qwen3"], mx.float16, checkpoint.checkpoint_path(tmp_path, 1)
    )
    assert mx.array_equal(loaded.norm.weight, masters["norm.weight"].astype(mx.float16))


def test_the_newest_is_loaded_and_three_are_kept(tmp_path, model):
    for step in (1, 2, 3, 20, 100):
        save(tmp_path, model, step)
    assert same(checkpoint.load(tmp_path), state(model, 100))
    names = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    assert names == ["step-000003", "step-000020", "step-000100"]


def test_a_model_whose_weights_differ_by_one_bit_has_another_digest(checkpoints):
    for dtype in (mx.float32, mx.float16, mx.bfloat16):
        model = gwen.load_model(checkpoints["qwen3"], dtype)
        before = checkpoint.digest_of_model_weights(model)
        assert before == checkpoint.digest_of_model_weights(
            gwen.load_model(checkpoints["qwen3"], dtype)
        )
        weight = model.layers[1].mlp.down_proj.weight
        words = mx.view(weight, mx.uint32 if dtype == mx.float32 else mx.uint16)
        words[3, 5] = words[3, 5] ^ 1
        model.layers[1].mlp.down_proj.weight = mx.view(words, dtype)
        assert checkpoint.digest_of_model_weights(model) != before


def test_a_digest_of_what_has_an_address_is_the_same_wherever_it_lies():
    assert checkpoint.digest_of_reprs({"picture": object()}) == checkpoint.digest_of_reprs(
        {"picture": object()}
    )
    assert (
        checkpoint.digest_of_reprs({"a": 1}, "b")
        != checkpoint.digest_of_reprs({"a": 1, "b": 1})
        != checkpoint.digest_of_reprs({"a": 2}, "b")
    )


def begin(directory, name, newest, age, steps=10):
    """A run directory, begun `age` seconds ago, with a checkpoint of step `newest` if there is one."""
    run = directory / "runs" / name
    run.mkdir(parents=True)
    (run / "config.yaml").write_text(f"model: demo\nsteps: {steps}\n")
    os.utime(run / "config.yaml", (10**9 - age, 10**9 - age))
    if newest is not None:
        checkpoint.checkpoint_path(run, newest).mkdir(parents=True)


def test_resume_without_a_name_takes_the_newest_run_that_is_unfinished_and_else_finished(
    tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    begin(tmp_path, "killed", None, age=1)
    (tmp_path / "runs" / "of somebody else").mkdir()
    message = catch_message(checkpoint.choose_and_print_run_to_resume)
    assert message.startswith("--resume: no run in runs/ can be resumed")
    begin(tmp_path, "finished", 10, age=3)
    assert checkpoint.choose_and_print_run_to_resume() == "runs/finished"
    begin(tmp_path, "older", 9, age=7)
    begin(tmp_path, "newer/seed-1", 3, age=5)
    begin(tmp_path, "trained", 3, age=2)
    with run_files.unlock_run_dirs_after_block():
        run_files.lock_run_dir(tmp_path / "runs" / "trained")
        assert checkpoint.choose_and_print_run_to_resume() == "runs/newer/seed-1"
        assert capsys.readouterr().err.endswith("--resume continues the run runs/newer/seed-1\n")
        assert checkpoint.choose_and_print_run_to_resume(num_steps=11) == "runs/finished"
    assert checkpoint.choose_and_print_run_to_resume() == "runs/trained"


def test_a_disk_that_fills_leaves_what_was_saved_earlier_good(tmp_path, model, monkeypatch):
    for step in (1, 2):
        save(tmp_path, model, step)
    checkpoint.copy_adapter_and_update_best(tmp_path, state(model, 1))
    before = read_tree(tmp_path)

    def full(path, target, *_):
        (target if isinstance(target, Path) else path).write_bytes(b"half of")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoint, "save_tensors", full)
    monkeypatch.setattr(shutil, "copyfile", full)
    for fills in (
        lambda: save(tmp_path, model, 3),
        lambda: checkpoint.copy_adapter_and_update_best(tmp_path, state(model, 2)),
    ):
        with pytest.raises(OSError, match="No space"):
            fills()
        assert read_tree(tmp_path) == before
    checkpoint.copy_adapter_and_update_best(
        tmp_path, state(model, 1)
    )  # what is the same already asks for no room


class Killed(BaseException):
    """Ends a process in the middle of what it does."""


@contextlib.contextmanager
def killed_at(number):
    """Inside, the write of that number is done by half, and none after it: not even the clearing up of a handler."""
    writes = itertools.count()

    def dying(whole, half):
        def write(*args, **settings):
            if (this := next(writes)) < number:
                return whole(*args, **settings)
            if this == number:
                half(*args)
            raise Killed

        return write

    def half_removed(path):
        for file in sorted(file for file in Path(path).rglob("*") if file.is_file())[:1]:
            os.unlink(file)

    with pytest.MonkeyPatch.context() as patch, contextlib.suppress(Killed):
        for owner, name, half in (
            (mx, "save_safetensors", lambda path, _: Path(path).write_bytes(b"half")),
            (Path, "write_text", lambda path, _: path.write_bytes(b"{")),
            (shutil, "copyfile", lambda _, target: target.write_bytes(b"half")),
            (shutil, "rmtree", half_removed),
            (os, "replace", lambda *_: None),
            (Path, "unlink", lambda _: None),
        ):
            patch.setattr(owner, name, dying(getattr(owner, name), half))
        yield


def published(run, model, step):
    checkpoint.copy_adapter_and_update_best(run, save(run, model, step))


def files(run):
    return {path.removeprefix(str(run)): content for path, content in read_tree(run).items()}


@pytest.mark.parametrize(
    ("step", "kept"), [(2, 3), (2, 1), (1, 1)], ids=["next", "next of one", "again"]
)
def test_a_process_that_is_killed_between_any_two_writes_of_a_save_leaves_a_run_that_goes_on(
    tmp_path, model, capsys, monkeypatch, step, kept
):
    monkeypatch.setattr(checkpoint, "MAX_CHECKPOINTS", kept)
    before, whole = tmp_path / "before", tmp_path / "whole"
    published(before, model, 1)
    shutil.copytree(before, whole)
    published(whole, model, step)
    survived = []
    for number in itertools.count():
        run = tmp_path / str(number)
        shutil.copytree(before, run)
        with killed_at(number):
            published(run, model, step)
            break
        loaded = checkpoint.load(run)
        assert same(loaded, state(model, loaded.step)) and loaded.step in (1, step)
        survived.append(loaded.step)
        checkpoint.copy_adapter_and_update_best(run, loaded)
        for name in ("adapter", "adapter-best"):
            for file in checkpoint.checkpoint_path(run, loaded.step).joinpath("adapter").iterdir():
                assert (run / name / file.name).read_bytes() == file.read_bytes()
        published(run, model, step)
        assert files(run) == files(whole)
    assert len(survived) > 8 and survived == sorted(survived) and set(survived) == {1, step}
    assert capsys.readouterr().err == ""
