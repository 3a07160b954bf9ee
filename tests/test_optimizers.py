"""The optimizer of a run: its settings, a user's own one, and a resume with another one's state."""

import math
import shutil

import mlx.core as mx
import mlx.optimizers as optim
import numpy as np
import pytest
import yaml
from mlx.utils import tree_flatten

import train
import update
from config import Config
from step import optimizers
from tests.small_run import SMALL_FLAGS, make_run, update_once

OWN = """
import mlx.optimizers as optim

def make_muon(learning_rate):
    return optim.Muon(learning_rate, momentum=0.9)

def make_both(learning_rate):
    return optim.MultiOptimizer(
        [optim.Muon(learning_rate), optim.Lion(learning_rate)], [lambda name, weight: "q" in name]
    )

def own_rate(learning_rate):
    return optim.Muon(0.02)

def own_schedule(learning_rate):
    return optim.SGD(optim.cosine_decay(learning_rate, 100))

def no_rate(learning_rate):
    return optim.Adafactor()

def no_optimizer(learning_rate):
    return learning_rate

def raises(learning_rate):
    return optim.Muon(learning_rate, momentun=0.9)

ONE = optim.SGD(1e-4)

def always_the_same(learning_rate):
    return ONE

class Infinite(optim.SGD):
    def apply_single(self, gradient, parameter, state):
        return parameter / 0

def infinite(learning_rate):
    return Infinite(learning_rate)
"""
DEMO = [*SMALL_FLAGS, "--task", "demo", "--eval-every", "0"]


@pytest.fixture
def own(tmp_path):
    (tmp_path / "own.py").write_text(OWN)
    return str(tmp_path / "own.py")


def moment_names(run):
    return {name.rpartition(".")[2] for name, _ in tree_flatten(run.learner.optimizer.state)}


# ---- settings


def test_the_settings_of_adamw_reach_the_optimizer(tmp_path):
    flags = "--adam-beta1 0.8 --adam-beta2 0.95 --adam-epsilon 1e-6 --weight-decay 0.1".split()
    optimizer = make_run(tmp_path, *flags).learner.optimizer
    assert isinstance(optimizer, optim.AdamW)
    assert (optimizer.betas, optimizer.eps, optimizer.weight_decay) == ([0.8, 0.95], 1e-6, 0.1)


def test_weight_decay_makes_the_weights_smaller(tmp_path):
    norms = []
    for flags in ([], ["--weight-decay", "100"]):
        run = make_run(tmp_path, *flags, "--target-kl", "0")
        update_once(run)
        squares = [(array**2).sum().item() for array in run.learner.trainable.values()]
        norms.append(math.sqrt(sum(squares)))
    assert norms[1] < norms[0]


def test_a_constant_schedule_stays_at_the_peak_after_the_warm_up():
    config = Config.from_flags(steps=50, warmup_steps=4, lr_scheduler_type="constant")
    rates = [update.scheduled_learning_rate(config, step) for step in range(50)]
    np.testing.assert_allclose(rates[:4], 1e-4 * np.array([0.25, 0.5, 0.75, 1.0]))
    assert set(rates[4:]) == {1e-4}
    cosine = config.copy_with_settings(lr_scheduler_type="cosine")
    assert update.scheduled_learning_rate(cosine, 49) < 2e-5


def test_a_gradient_is_clipped_to_the_given_norm_and_to_none_at_0():
    gradient = {"weight": mx.array([3.0, 4.0])}
    for max_norm, expected in ((1.0, 1.0), (2.5, 2.5), (10.0, 5.0), (0.0, 5.0)):
        clipped, norm = update.clip_gradient(gradient, max_norm)
        assert norm.item() == 5
        assert mx.linalg.norm(clipped["weight"]).item() == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--adam-beta2 0.9 --optimizer sgd --lora-rank 0", "--adam-beta2 0.9 is for --optimizer"),
        ("--weight-decay 0.1 --optimizer own.py:f", "set it in own.py:f instead"),
        ("--optimizer adam", "one of adamw, sgd, FILE.py:function"),
        ("--adam-beta1 1", "--adam-beta1 is 1"),
        ("--lr-scheduler-type linear", "one of cosine, constant"),
    ],
)
def test_a_setting_that_the_optimizer_cannot_use_is_refused(flags, words, check_refusal):
    check_refusal(train.main, [*DEMO, *flags.split()], words)


def test_the_names_of_trl_are_understood(tmp_path, capsys):
    (tmp_path / "trl.yaml").write_text(
        "num_generations: 4\nadam_beta2: 0.95\nweight_decay: 0.0\nmax_grad_norm: 0.2\n"
        "lr_scheduler_type: constant_with_warmup\n"
    )
    train.main(["--from-trl", str(tmp_path / "trl.yaml")])
    recipe = yaml.safe_load(capsys.readouterr().out)
    assert recipe["adam_beta2"] == 0.95 and recipe["weight_decay"] == 0
    assert recipe["max_grad_norm"] == 0.2 and recipe["lr_scheduler_type"] == "constant"


# ---- an own optimizer


@pytest.mark.parametrize("name", ["make_muon", "make_both"])
def test_an_own_optimizer_trains_is_recorded_and_resumes_bit_for_bit(tmp_path, own, name):
    flags = [*DEMO, "--optimizer", f"{own}:{name}", "--learning-rate", "0.01"]
    train.main([*flags, "--steps", "2", "--run-dir", str(tmp_path / "a")])
    assert yaml.safe_load((tmp_path / "a/config.yaml").read_text())["optimizer"].endswith(name)
    train.main([*flags, "--steps", "3", "--save-every", "2", "--run-dir", str(tmp_path / "b")])
    shutil.rmtree(tmp_path / "b/checkpoints/step-000003")
    train.main(["--resume", str(tmp_path / "b")])
    train.main([*flags, "--steps", "3", "--run-dir", str(tmp_path / "c")])
    adapters = [tmp_path / run / "adapter/adapters.safetensors" for run in "bc"]
    assert adapters[0].read_bytes() == adapters[1].read_bytes()


def test_an_optimizer_from_python_is_a_function_or_a_class(tmp_path):
    settings = dict(model="demo", task="demo", batch=2, groups=4, max_tokens=8, eval_every=0)
    run_dir = str(tmp_path / "run")
    started = train.Trainer.start(
        optimizer=optim.Muon, steps=1, run_dir=run_dir, learning_rate=0.01, **settings
    )
    started.fit()
    assert isinstance(started.run.learner.optimizer, optim.Muon)
    assert yaml.safe_load((tmp_path / "run/config.yaml").read_text())["optimizer"].endswith(":Muon")
    resumed = train.Trainer.resume(run_dir, steps=2)
    assert isinstance(resumed.run.learner.optimizer, optim.Muon)
    assert resumed.run.learner.optimizer.step.item() == 1

    with pytest.raises(ValueError, match=r"def make_optimizer\(learning_rate\)") as caught:
        train.Trainer.start(optimizer=optim.Muon(0.01), **settings)
    assert "optimizer is a Muon object" in str(caught.value)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("own_rate", "has the learning rate 0.02, but the run has --learning-rate 0.0001"),
        ("own_schedule", "has a schedule of its own"),
        ("no_rate", "has no learning rate"),
        ("no_optimizer", "returned 0.0001; return an mlx.optimizers.Optimizer"),
        ("raises", "momentun"),
        ("always_the_same", "returned the same object twice"),
        ("infinite", "made a weight inf or nan"),
    ],
)
def test_a_bad_optimizer_is_one_line_before_a_model_is_loaded(own, name, words, check_refusal):
    flags = [*DEMO, "--learning-rate", "1e-4", "--optimizer", f"{own}:{name}"]
    line = check_refusal(train.main, flags, words)
    assert f"--optimizer {own}:{name}" in line


def test_sft_takes_an_own_optimizer(tmp_path, own, golden):
    chats = golden("sft").parent / "chats.jsonl"
    flags = f"--model demo --loss-type sft --data {chats} --steps 1 --eval-every 0".split()
    train.main([*flags, "--optimizer", f"{own}:make_muon", "--run-dir", str(tmp_path / "run")])


# ---- a resume with another optimizer


def test_a_resume_with_another_optimizer_is_refused_in_one_line(tmp_path, own, check_refusal):
    run = str(tmp_path / "run")
    train.main([*DEMO, "--steps", "1", "--run-dir", run])
    change = ["--resume", run, "--steps", "2", "--optimizer", f"{own}:make_muon"]
    check_refusal(train.main, change, "optimizer .* changed since step 1")
    with pytest.raises(ValueError, match="state of the optimizer AdamW") as caught:
        train.Trainer.resume(run, steps=2, optimizer=f"{own}:make_muon", allow_changes=True)
    assert "but this run uses Muon" in str(caught.value)
    assert f"--init-adapter {run}" in str(caught.value)


def test_an_optimizer_that_was_only_assigned_is_warned_of_and_refused_at_the_resume(
    tmp_path, capsys, check_refusal
):
    run_dir = str(tmp_path / "run")
    settings = dict(model="demo", task="demo", batch=2, groups=4, max_tokens=8, eval_every=0)
    started = train.Trainer.start(steps=1, run_dir=run_dir, **settings)
    started.run.learner.optimizer = optim.Muon(1e-4)
    started.fit()
    warning = " ".join(capsys.readouterr().err.split())
    assert "the optimizer was replaced by Muon" in warning and "optimizer=" in warning
    line = check_refusal(
        train.main, ["--resume", run_dir, "--steps", "2"], "state of the optimizer Muon"
    )
    assert "but this run uses AdamW" in line


def test_the_state_of_adamw_from_an_older_checkpoint_still_fits(tmp_path):
    """Older checkpoints do not name their optimizer; then the names of its tensors decide."""
    run = make_run(tmp_path)
    update_once(run)
    moments = dict(tree_flatten(run.learner.optimizer.state))
    optimizers.refuse_other_optimizer_state(run.learner.optimizer, moments, None, run.dir)
    with pytest.raises(ValueError, match="another optimizer"):
        others = {name: value for name, value in moments.items() if not name.endswith(".m")}
        optimizers.refuse_other_optimizer_state(run.learner.optimizer, others, None, run.dir)
