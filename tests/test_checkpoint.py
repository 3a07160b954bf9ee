"""Checkpoints appear whole or not at all, and a damaged one gives way to the one before."""

import mlx.core as mx
import pytest

import checkpoint
import gwen
import lora


def state(step):
    return checkpoint.State(
        step,
        {"layers.0.lora_a": mx.random.normal((3, 2), key=mx.random.key(step))},
        {"step": mx.array(step, mx.uint64), "layers.0.lora_a.m": mx.full((3, 2), step * 0.1)},
        {"loss_scale": {"value": 2.0**15}},
    )


def same(a, b):
    arrays = all(
        mx.array_equal(x[name], y[name]).item() and x[name].dtype == y[name].dtype
        for x, y in ((a.trainable, b.trainable), (a.optimizer, b.optimizer))
        for name in x.keys() | y.keys()
    )
    return arrays and (a.step, a.extra) == (b.step, b.extra)


def test_what_is_saved_is_loaded_bit_for_bit(tmp_path):
    checkpoint.save(tmp_path, state(50))
    assert same(checkpoint.load(tmp_path), state(50))
    assert (tmp_path / "checkpoints" / "step-000050").is_dir()


def test_the_newest_is_loaded_and_only_a_few_are_kept(tmp_path):
    for step in (1, 2, 3, 20, 100):
        checkpoint.save(tmp_path, state(step))
    assert same(checkpoint.load(tmp_path), state(100))
    names = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    assert names == ["step-000003", "step-000020", "step-000100"]


def test_saving_a_step_again_replaces_it(tmp_path):
    checkpoint.save(tmp_path, state(5)._replace(extra={"old": 1}))
    checkpoint.save(tmp_path, state(5))
    assert same(checkpoint.load(tmp_path), state(5))


@pytest.mark.parametrize("damage", ["truncate", "flip", "no json", "bad json", "no tensors"])
def test_a_damaged_checkpoint_gives_way_to_the_one_before(tmp_path, capsys, damage):
    for step in (1, 2):
        checkpoint.save(tmp_path, state(step))
    folder = tmp_path / "checkpoints" / "step-000002"
    tensors = folder / "state.safetensors"
    if damage == "truncate":
        tensors.write_bytes(tensors.read_bytes()[:-5])
    elif damage == "flip":
        tensors.write_bytes(tensors.read_bytes()[:-1] + b"\x77")
    elif damage == "no json":
        (folder / "state.json").unlink()
    elif damage == "bad json":
        (folder / "state.json").write_text("{")
    else:
        tensors.unlink()
    assert same(checkpoint.load(tmp_path), state(1))
    assert "step-000002 is damaged" in capsys.readouterr().err


def test_nothing_to_load_is_said_in_one_line(tmp_path):
    with pytest.raises(ValueError, match="no whole checkpoint"):
        checkpoint.load(tmp_path)


def test_a_disk_that_fills_while_saving_leaves_the_earlier_checkpoint_good(tmp_path, monkeypatch):
    checkpoint.save(tmp_path, state(1))

    def full(path, arrays, metadata=None):
        path.write_bytes(b"half of")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoint, "save_tensors", full)
    with pytest.raises(OSError, match="No space"):
        checkpoint.save(tmp_path, state(2))
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-000001"]
    assert same(checkpoint.load(tmp_path), state(1))


def test_a_disk_that_fills_while_the_adapter_is_written_leaves_the_earlier_one_good(tmp_path, monkeypatch, checkpoints):
    model = gwen.load_model(checkpoints["qwen3"])
    lora.apply(model, 2, 2.0)
    checkpoint.save_adapter(model, tmp_path, "tiny")
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}

    def full(path, arrays, metadata=None):
        path.write_bytes(b"half of")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoint, "save_tensors", full)
    lora.apply(model := gwen.load_model(checkpoints["qwen3"]), 4, 3.0)
    with pytest.raises(OSError, match="No space"):
        checkpoint.save_adapter(model, tmp_path, "tiny")
    assert {name: (tmp_path / name).read_bytes() for name in before} == before


def test_an_unfinished_checkpoint_of_a_killed_process_is_ignored_and_overwritten(tmp_path):
    checkpoint.save(tmp_path, state(1))
    left_over = tmp_path / "checkpoints" / ".step-000002.partial"
    left_over.mkdir()
    (left_over / "state.safetensors").write_bytes(b"half")
    assert same(checkpoint.load(tmp_path), state(1))
    checkpoint.save(tmp_path, state(2))
    assert same(checkpoint.load(tmp_path), state(2))
    assert not left_over.exists()
