"""Checkpoints are written completely or not at all, and a run falls back from a damaged one."""

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
    """A model with adapters. `save_step` sets their values."""
    model = gwen.load_model(checkpoints["qwen3"])
    lora.apply(model, 2, 2.0)
    return model


def make_state(model, step):
    """A training state whose values depend on the step."""
    shapes = {name: array.shape for name, array in tree_flatten(model.trainable_parameters())}
    keys = mx.random.split(mx.random.key(step), len(shapes))
    masters = {
        name: mx.random.normal(shape, key=key)
        for (name, shape), key in zip(shapes.items(), keys, strict=True)
    }
    optimizer = {"step": mx.array(step, mx.uint64)}
    optimizer |= {f"{name}.m": 0.1 * array for name, array in masters.items()}
    extra = {"loss_scale": {"value": 2.0**15}, "best_step": step}
    return checkpoint.TrainingState(step, masters, optimizer, extra)


def save_state(run, state, model, weights):
    """Saves a checkpoint of a model that has these weights."""
    model.load_weights(list(weights.items()), strict=False)

    def save_model(directory):
        return lora.save_adapter_or_full_weights(model, directory, "tiny")

    checkpoint.save_and_remove_old(run, state, save_model)


def save_step(run, model, step):
    """Saves the state of a step, after the model has received the masters; returns the state."""
    state = make_state(model, step)
    save_state(run, state, model, state.trainable)
    return state


def are_equal_arrays(arrays, other_arrays):
    """Whether two dictionaries have the same names, types and values."""
    if arrays.keys() != other_arrays.keys():
        return False
    return all(
        array.dtype == other_arrays[name].dtype and mx.array_equal(array, other_arrays[name]).item()
        for name, array in arrays.items()
    )


def are_equal_states(state, other):
    return (
        are_equal_arrays(state.trainable, other.trainable)
        and are_equal_arrays(state.optimizer, other.optimizer)
        and (state.step, state.extra) == (other.step, other.extra)
    )


def test_a_checkpoint_loads_bit_for_bit_as_it_was_saved(tmp_path, model):
    save_step(tmp_path, model, 50)
    loaded = checkpoint.load(tmp_path)
    assert are_equal_states(loaded, make_state(model, 50))
    assert list(loaded.trainable) == sorted(loaded.trainable)

    # Only the adapter's file contains the masters.
    tensors = mx.load(str(tmp_path / "checkpoints" / "step-000050" / "state.safetensors"))
    assert all(name.startswith("optimizer/") for name in tensors)


def test_a_checkpoint_of_all_weights_has_float32_masters_and_16_bit_weights(tmp_path, checkpoints):
    model = gwen.load_model(checkpoints["qwen3"], mx.float16)
    masters = {
        name: mx.random.normal(array.shape) for name, array in tree_flatten(model.parameters())
    }
    weights = {name: array.astype(mx.float16) for name, array in masters.items()}
    extra = {"loss_scale": {"value": 1.0}, "best_step": None}
    state = checkpoint.TrainingState(1, masters, {"step": mx.array(1)}, extra)
    save_state(tmp_path, state, model, weights)
    assert are_equal_states(checkpoint.load(tmp_path), state)

    path = checkpoint.checkpoint_path(tmp_path, 1)
    loaded = gwen.load_model(checkpoints["qwen3"], mx.float16, path)
    assert mx.array_equal(loaded.norm.weight, weights["norm.weight"])


def test_the_newest_checkpoint_is_loaded_and_three_are_kept(tmp_path, model):
    for step in (1, 2, 3, 20, 100):
        save_step(tmp_path, model, step)
    assert are_equal_states(checkpoint.load(tmp_path), make_state(model, 100))
    names = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    assert names == ["step-000003", "step-000020", "step-000100"]


def test_the_digest_of_a_model_changes_with_one_bit_of_a_weight(checkpoints):
    for dtype in (mx.float32, mx.float16, mx.bfloat16):
        model = gwen.load_model(checkpoints["qwen3"], dtype)
        same_model = gwen.load_model(checkpoints["qwen3"], dtype)
        digest = checkpoint.digest_of_config_and_weights(model)
        assert digest == checkpoint.digest_of_config_and_weights(same_model)

        projection = model.layers[1].mlp.down_proj
        bits = mx.view(projection.weight, mx.uint32 if dtype == mx.float32 else mx.uint16)
        bits[3, 5] = bits[3, 5] ^ 1
        projection.weight = mx.view(bits, dtype)
        assert checkpoint.digest_of_config_and_weights(model) != digest


def test_a_digest_ignores_addresses_of_objects_but_not_values():
    first = checkpoint.digest_of_reprs({"picture": object()})
    assert first == checkpoint.digest_of_reprs({"picture": object()})

    one_key_each = checkpoint.digest_of_reprs({"a": 1}, "b")
    both_keys = checkpoint.digest_of_reprs({"a": 1, "b": 1})
    other_value = checkpoint.digest_of_reprs({"a": 2}, "b")
    assert one_key_each != both_keys
    assert both_keys != other_value


def make_run_directory(directory, name, newest, age, steps=10):
    """
    Makes a run directory that is `age` seconds old.

    newest: the step of its newest checkpoint; None: there is none.
    """
    run = directory / "runs" / name
    run.mkdir(parents=True)
    (run / "config.yaml").write_text(f"model: demo\nsteps: {steps}\n")
    start_time = 10**9 - age
    os.utime(run / "config.yaml", (start_time, start_time))
    if newest is not None:
        checkpoint.checkpoint_path(run, newest).mkdir(parents=True)


def test_resume_without_a_name_prefers_the_newest_unfinished_run_that_no_process_uses(
    tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    choose_run = checkpoint.choose_and_print_run_to_resume
    make_run_directory(tmp_path, "killed", None, age=1)
    (tmp_path / "runs" / "of somebody else").mkdir()
    message = catch_message(choose_run)
    assert message.startswith("--resume: no run in runs/ can be resumed")

    make_run_directory(tmp_path, "finished", 10, age=3)
    assert choose_run() == "runs/finished"

    make_run_directory(tmp_path, "older", 9, age=7)
    make_run_directory(tmp_path, "newer/seed-1", 3, age=5)
    make_run_directory(tmp_path, "trained", 3, age=2)
    with run_files.unlock_run_dirs_after_block():
        run_files.lock_run_dir(tmp_path / "runs" / "trained")
        assert choose_run() == "runs/newer/seed-1"
        assert capsys.readouterr().err.endswith("--resume continues the run runs/newer/seed-1\n")
        assert choose_run(num_steps=11) == "runs/finished"
    assert choose_run() == "runs/trained"


def test_a_full_disk_leaves_earlier_checkpoints_unchanged(tmp_path, model, monkeypatch):
    for step in (1, 2):
        save_step(tmp_path, model, step)
    checkpoint.copy_adapter_and_update_best(tmp_path, make_state(model, 1))
    tree_before = read_tree(tmp_path)

    def write_half_and_fail(path, target, *_):
        written_path = target if isinstance(target, Path) else path
        written_path.write_bytes(b"half of")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoint, "save_tensors", write_half_and_fail)
    monkeypatch.setattr(shutil, "copyfile", write_half_and_fail)
    for write in (
        lambda: save_step(tmp_path, model, 3),
        lambda: checkpoint.copy_adapter_and_update_best(tmp_path, make_state(model, 2)),
    ):
        with pytest.raises(OSError, match="No space"):
            write()
        assert read_tree(tmp_path) == tree_before

    # An adapter that is there already needs no space.
    checkpoint.copy_adapter_and_update_best(tmp_path, make_state(model, 1))


class Killed(BaseException):
    """Simulates the end of a process at any place."""


@contextlib.contextmanager
def kill_at_write(kill_number):
    """
    Kills the block at the write of this number, counted from 0.

    That write is done by half. Later writes fail, so that handlers cannot clean up.
    """
    numbers = itertools.count()

    def make_mortal(write, write_half):
        def write_or_die(*args, **options):
            number = next(numbers)
            if number < kill_number:
                return write(*args, **options)
            if number == kill_number:
                write_half(*args)
            raise Killed

        return write_or_die

    def remove_first_file(path):
        files = sorted(file for file in Path(path).rglob("*") if file.is_file())
        for file in files[:1]:
            os.unlink(file)

    with pytest.MonkeyPatch.context() as patch, contextlib.suppress(Killed):
        for owner, name, write_half in (
            (mx, "save_safetensors", lambda path, _: Path(path).write_bytes(b"half")),
            (Path, "write_text", lambda path, _: path.write_bytes(b"{")),
            (shutil, "copyfile", lambda _, target: target.write_bytes(b"half")),
            (shutil, "rmtree", remove_first_file),
            (os, "replace", lambda *_: None),
            (Path, "unlink", lambda _: None),
        ):
            patch.setattr(owner, name, make_mortal(getattr(owner, name), write_half))
        yield


def save_step_and_update_best(run, model, step):
    checkpoint.copy_adapter_and_update_best(run, save_step(run, model, step))


def read_run(run):
    """The contents of the files of a run by relative path."""
    return {path.removeprefix(str(run)): content for path, content in read_tree(run).items()}


@pytest.mark.parametrize(
    ("step", "max_checkpoints"),
    [(2, 3), (2, 1), (1, 1)],
    ids=["next", "next of one", "again"],
)
def test_a_run_can_continue_after_a_kill_between_any_two_writes_of_a_save(
    tmp_path, model, capsys, monkeypatch, step, max_checkpoints
):
    monkeypatch.setattr(checkpoint, "MAX_CHECKPOINTS", max_checkpoints)
    before = tmp_path / "before"
    save_step_and_update_best(before, model, 1)
    complete = tmp_path / "whole"
    shutil.copytree(before, complete)
    save_step_and_update_best(complete, model, step)

    loaded_steps = []
    for kill_number in itertools.count():
        run = tmp_path / str(kill_number)
        shutil.copytree(before, run)
        with kill_at_write(kill_number):
            save_step_and_update_best(run, model, step)
            break  # the save has no more writes

        # The newest intact checkpoint is the old or the new one.
        loaded = checkpoint.load(run)
        assert are_equal_states(loaded, make_state(model, loaded.step))
        assert loaded.step in (1, step)
        loaded_steps.append(loaded.step)

        checkpoint.copy_adapter_and_update_best(run, loaded)
        adapter = checkpoint.checkpoint_path(run, loaded.step) / "adapter"
        for name in ("adapter", "adapter-best"):
            for file in adapter.iterdir():
                assert (run / name / file.name).read_bytes() == file.read_bytes()

        # Saving again gives the files of a run without a kill.
        save_step_and_update_best(run, model, step)
        assert read_run(run) == read_run(complete)

    assert len(loaded_steps) > 8
    assert loaded_steps == sorted(loaded_steps)
    assert set(loaded_steps) == {1, step}
    assert capsys.readouterr().err == ""
