"""`Trainer.save_model`, `Trainer.push_to_hub`, and many runs in one process."""

import json
import subprocess
import sys

import huggingface_hub
import mlx.core as mx
import numpy as np
import pytest
from conftest import ROOT, catch_message
from huggingface_hub import errors

import gwen
import lora
from train import Trainer

SMALL = dict(
    model="demo",
    task="demo",
    batch=2,
    groups=2,
    max_tokens=4,
    steps=1,
    eval_every=0,
    reward_weights={"rubric": 0},
)


def start(tmp_path, **changes):
    return Trainer.start(run_dir=str(tmp_path / "run"), **SMALL | changes)


def compute_logits(model):
    return np.array(model(mx.array([[1, 2, 3]])))


def test_save_model_saves_the_current_adapter_in_peft_format(tmp_path):
    trainer = start(tmp_path)
    for _, layer in lora.adapted_layers(trainer.model):
        layer.lora_b = mx.random.normal(layer.lora_b.shape, key=mx.random.key(1)) / 10

    out = tmp_path / "out"
    out.mkdir()
    (out / "notes.txt").write_text("kept")
    trainer.save_model(out)
    trainer.save_model(str(out))  # a second call replaces the files, as in TRL

    config = json.loads((out / "adapter_config.json").read_text())
    assert config["peft_type"] == "LORA"
    assert config["base_model_name_or_path"].endswith("demo/model")
    assert (out / "notes.txt").read_text() == "kept"
    assert (out / "tokenizer.json").is_file()
    assert "library_name: peft" in (out / "README.md").read_text()

    model, _ = gwen.load("demo")
    lora.attach_saved_adapter(model, str(out))
    np.testing.assert_allclose(compute_logits(model), compute_logits(trainer.model), atol=1e-4)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "run"]


def test_a_run_that_trains_all_weights_saves_the_whole_model(tmp_path):
    trainer = start(tmp_path, lora_rank=0)
    trainer.save_model(tmp_path / "out")
    model, _ = gwen.load(str(tmp_path / "out"))
    np.testing.assert_allclose(compute_logits(model), compute_logits(trainer.model), atol=1e-5)


def test_push_to_hub_uploads_the_model_to_a_private_repository(tmp_path, monkeypatch, capsys):
    created = []
    uploads = []

    class Address(str):
        repo_id = "me/mine"

    class Hub:
        def create_repo(self, repo_id, **options):
            created.append((repo_id, options))
            return Address(f"hub/{repo_id}")

        def upload_folder(self, *, folder_path, repo_id, commit_message):
            assert created
            names = subprocess.run(["ls", folder_path], capture_output=True, text=True).stdout
            uploads.append((repo_id, names.split(), commit_message))

    monkeypatch.setattr(huggingface_hub, "HfApi", Hub)
    trainer = start(tmp_path, lora_rank=0)
    assert trainer.push_to_hub("me/mine") == "hub/me/mine"
    assert created == [("me/mine", {"private": True, "exist_ok": True})]

    repo_id, names, commit_message = uploads[0]
    assert repo_id == "me/mine"
    assert "model.safetensors" in names
    assert commit_message == "End of training"
    assert "uploaded to hub/me/mine" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("error", "expected_text"),
    [
        (errors.HFValidationError("bad"), "'me/mine' is not a valid name of a repository"),
        (ConnectionError("no route\nto host"), "failed (no route); log in with `hf auth login`"),
    ],
)
def test_an_upload_that_fails_gives_an_error_of_one_line(
    tmp_path, monkeypatch, error, expected_text
):
    class Hub:
        def create_repo(self, repo_id, **options):
            raise error

    monkeypatch.setattr(huggingface_hub, "HfApi", Hub)
    message = catch_message(start(tmp_path, lora_rank=0).push_to_hub, "me/mine")
    assert expected_text in message
    assert "\n" not in message


def test_push_to_hub_refuses_an_adapter_for_a_base_model_that_is_not_on_the_hub(tmp_path):
    message = catch_message(start(tmp_path).push_to_hub, "me/mine")
    assert "the base model demo is not on the hub" in message
    assert "export.py --fuse" in message


SWEEP = """
import sys
sys.path.insert(0, sys.argv[1])
from train import Trainer

def resident_mb():
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) / 1024 for line in file if line.startswith("VmRSS"))

for number in range(1, 21):
    trainer = Trainer.start(
        model="demo", task="demo", batch=2, groups=2, max_tokens=4, steps=1, eval_every=1,
        eval_limit=4, reward_weights={"rubric": 0}, learning_rate=number * 1e-5,
        run_dir=f"{sys.argv[2]}/{number}",
    )
    trainer.fit()
    if number in (2, 20):
        print(resident_mb(), file=sys.stderr)
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_twenty_runs_in_one_process_need_no_more_memory_than_two(tmp_path):
    command = [sys.executable, "-c", SWEEP, str(ROOT), str(tmp_path)]
    process = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert process.returncode == 0, process.stderr
    numbers = [line for line in process.stderr.splitlines() if line.replace(".", "").isdigit()]
    after_two, after_twenty = map(float, numbers)
    assert after_twenty < 1.1 * after_two, numbers
