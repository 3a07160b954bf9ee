"""The optimizer of a run: its settings, custom optimizers, and a resume with another optimizer."""

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

CUSTOM_OPTIMIZERS = """
import mlx.optimizers as optim

def make_muon(learning_rate):
    return optim.Muon(learning_rate, momentum=0.9)

def make_both(learning_rate):
    return optim.MultiOptimizer(
        [optim.Muon(learning_rate), optim.Lion(learning_rate)], [lambda name, weight: "q" in name]
    )

def other_rate(learning_rate):
    return optim.Muon(0.02)

def with_schedule(learning_rate):
    return optim.SGD(optim.cosine_decay(learning_rate, 100))

def no_rate(learning_rate):
    return optim.Adafactor()

def no_optimizer(learning_rate):
    return learning_rate

def raises(learning_rate):
    return optim.Muon(learning_rate, momentun=0.9)

SHARED = optim.SGD(1e-4)

def shared_object(learning_rate):
    return SHARED

class Infinite(optim.SGD):
    def apply_single(self, gradient, parameter, state):
        return parameter / 0

def infinite(learning_rate):
    return Infinite(learning_rate)

class Forgetful(optim.SGD):
    def apply_single(self, gradient, parameter, state):
        parameter - self.learning_rate * gradient

class FixedStep(optim.SGD):
    def apply_single(self, gradient, parameter, state):
        return parameter - 1e-3 * gradient

class Ascent(optim.SGD):
    def apply_single(self, gradient, parameter, state):
        return parameter + self.learning_rate * gradient

class OtherName(optim.Optimizer):
    def __init__(self, learning_rate):
        super().__init__()
        self.rate = learning_rate
"""
DEMO_FLAGS = [*SMALL_FLAGS, "--task", "demo", "--eval-every", "0"]


@pytest.fixture
def custom_file(tmp_path):
    (tmp_path / "own.py").write_text(CUSTOM_OPTIMIZERS)
    return str(tmp_path / "own.py")


# ---- settings


def test_the_settings_of_adamw_reach_the_optimizer(tmp_path):
    flags = "--adam-beta1 0.8 --adam-beta2 0.95 --adam-epsilon 1e-6 --weight-decay 0.1".split()
    optimizer = make_run(tmp_path, *flags).learner.optimizer
    assert isinstance(optimizer, optim.AdamW)
    assert (optimizer.betas, optimizer.eps, optimizer.weight_decay) == ([0.8, 0.95], 1e-6, 0.1)


def test_weight_decay_makes_the_weights_smaller(tmp_path):
    def norm_after_update(*flags):
        run = make_run(tmp_path, *flags, "--target-kl", "0")
        update_once(run)
        squares = [(array**2).sum().item() for array in run.learner.trainable.values()]
        return math.sqrt(sum(squares))

    assert norm_after_update("--weight-decay", "100") < norm_after_update()


def test_a_constant_schedule_stays_at_the_peak_after_the_warm_up():
    config = Config.from_flags(steps=50, warmup_steps=4, lr_scheduler_type="constant")
    rates = [update.scheduled_learning_rate(config, step) for step in range(50)]
    np.testing.assert_allclose(rates[:4], 1e-4 * np.array([0.25, 0.5, 0.75, 1.0]))
    assert set(rates[4:]) == {1e-4}
    cosine = config.copy_with_settings(lr_scheduler_type="cosine")
    assert update.scheduled_learning_rate(cosine, 49) < 2e-5


def test_a_gradient_is_clipped_to_the_maximal_norm_but_not_if_it_is_0():
    gradient = {"weight": mx.array([3.0, 4.0])}
    for max_norm, expected in ((1.0, 1.0), (2.5, 2.5), (10.0, 5.0), (0.0, 5.0)):
        clipped, norm = update.clip_gradient(gradient, max_norm)
        assert norm.item() == 5
        assert mx.linalg.norm(clipped["weight"]).item() == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize(
    ("flags", "expected_text"),
    [
        ("--adam-beta2 0.9 --optimizer sgd --lora-rank 0", "--adam-beta2 0.9 is for --optimizer"),
        ("--weight-decay 0.1 --optimizer own.py:f", "set it in own.py:f instead"),
        ("--optimizer adam", "one of adamw, sgd, FILE.py:function"),
        ("--adam-beta1 1", "--adam-beta1 is 1"),
        ("--lr-scheduler-type linear", "one of cosine, constant"),
    ],
)
def test_a_setting_that_the_optimizer_cannot_use_is_refused(flags, expected_text, check_refusal):
    check_refusal(train.main, [*DEMO_FLAGS, *flags.split()], expected_text)


def test_settings_of_the_optimizer_in_trl_are_converted(tmp_path, capsys):
    (tmp_path / "trl.yaml").write_text(
        "num_generations: 4\nadam_beta2: 0.95\nweight_decay: 0.0\nmax_grad_norm: 0.2\n"
        "lr_scheduler_type: constant_with_warmup\n"
    )
    train.main(["--from-trl", str(tmp_path / "trl.yaml")])
    recipe = yaml.safe_load(capsys.readouterr().out)
    assert recipe["adam_beta2"] == 0.95
    assert recipe["weight_decay"] == 0
    assert recipe["max_grad_norm"] == 0.2
    assert recipe["lr_scheduler_type"] == "constant"


# ---- custom optimizers

PYTHON_SETTINGS = dict(model="demo", task="demo", batch=2, groups=4, max_tokens=8, eval_every=0)


def recorded_optimizer(run_dir):
    return yaml.safe_load((run_dir / "config.yaml").read_text())["optimizer"]


@pytest.mark.parametrize("name", ["make_muon", "make_both"])
def test_a_run_records_a_custom_optimizer_and_resumes_bit_for_bit(tmp_path, custom_file, name):
    flags = [*DEMO_FLAGS, "--optimizer", f"{custom_file}:{name}", "--learning-rate", "0.01"]
    uninterrupted = tmp_path / "uninterrupted"
    train.main([*flags, "--steps", "3", "--run-dir", str(uninterrupted)])
    assert recorded_optimizer(uninterrupted).endswith(name)

    resumed = tmp_path / "resumed"
    train.main([*flags, "--steps", "3", "--save-every", "2", "--run-dir", str(resumed)])
    shutil.rmtree(resumed / "checkpoints/step-000003")
    train.main(["--resume", str(resumed)])

    adapter = "adapter/adapters.safetensors"
    assert (resumed / adapter).read_bytes() == (uninterrupted / adapter).read_bytes()


def test_an_optimizer_from_python_is_a_function_or_a_class(tmp_path):
    run_dir = tmp_path / "run"
    trainer = train.Trainer.start(
        optimizer=optim.Muon, steps=1, run_dir=str(run_dir), learning_rate=0.01, **PYTHON_SETTINGS
    )
    trainer.fit()
    assert isinstance(trainer.run.learner.optimizer, optim.Muon)
    assert recorded_optimizer(run_dir).endswith(":Muon")

    resumed = train.Trainer.resume(str(run_dir), steps=2)
    assert isinstance(resumed.run.learner.optimizer, optim.Muon)
    assert resumed.run.learner.optimizer.step.item() == 1

    with pytest.raises(ValueError, match=r"def make_optimizer\(learning_rate\)") as error_info:
        train.Trainer.start(optimizer=optim.Muon(0.01), **PYTHON_SETTINGS)
    assert "optimizer is a Muon object" in str(error_info.value)


@pytest.mark.parametrize(
    ("name", "expected_text"),
    [
        ("other_rate", "has the learning rate 0.02, but the run has --learning-rate 0.0001"),
        ("with_schedule", "has a schedule of its own"),
        ("no_rate", "has no learning rate"),
        ("no_optimizer", "returned 0.0001; return an mlx.optimizers.Optimizer"),
        ("raises", "momentun"),
        ("shared_object", "returned the same object twice"),
        ("infinite", "made a weight inf or nan"),
        ("Forgetful", "replaced a weight by None; return the new weight from apply_single"),
        ("FixedStep", "takes the same step with half of the learning rate"),
        ("OtherName", r"own.py:\d+\) has no learning rate that the run can set"),
    ],
)
def test_a_bad_optimizer_is_refused_in_one_line_before_a_model_is_loaded(
    custom_file, name, expected_text, check_refusal
):
    flags = [*DEMO_FLAGS, "--learning-rate", "1e-4", "--optimizer", f"{custom_file}:{name}"]
    line = check_refusal(train.main, flags, expected_text)
    assert f"--optimizer {custom_file}:{name}" in line


def test_an_optimizer_that_makes_the_loss_larger_causes_one_line(custom_file, capsys):
    for name, num_lines in (("make_muon", 0), ("make_both", 0), ("Ascent", 1)):
        config = Config.from_flags(optimizer=f"{custom_file}:{name}", learning_rate=1e-4)
        optimizers.try_own_optimizer(config)
        assert capsys.readouterr().err.count("reverse the sign of the step") == num_lines


def test_sft_accepts_a_custom_optimizer(tmp_path, custom_file, golden):
    data = golden("sft").parent / "chats.jsonl"
    flags = f"--model demo --loss-type sft --data {data} --steps 1 --eval-every 0".split()
    optimizer = f"{custom_file}:make_muon"
    train.main([*flags, "--optimizer", optimizer, "--run-dir", str(tmp_path / "run")])


# ---- a resume with another optimizer


def test_a_resume_with_another_optimizer_is_refused_in_one_line(
    tmp_path, custom_file, check_refusal
):
    run_dir = str(tmp_path / "run")
    optimizer = f"{custom_file}:make_muon"
    train.main([*DEMO_FLAGS, "--steps", "1", "--run-dir", run_dir])
    flags = ["--resume", run_dir, "--steps", "2", "--optimizer", optimizer]
    check_refusal(train.main, flags, "optimizer .* changed since step 1")

    with pytest.raises(ValueError, match="state of the optimizer AdamW") as error_info:
        train.Trainer.resume(run_dir, steps=2, optimizer=optimizer, allow_changes=True)
    assert "but this run uses Muon" in str(error_info.value)
    assert f"--init-adapter {run_dir}" in str(error_info.value)


def test_an_optimizer_that_a_program_assigns_causes_a_warning_and_an_error_at_the_resume(
    tmp_path, capsys, check_refusal
):
    run_dir = str(tmp_path / "run")
    trainer = train.Trainer.start(steps=1, run_dir=run_dir, **PYTHON_SETTINGS)
    trainer.run.learner.optimizer = optim.Muon(1e-4)
    trainer.fit()
    warning = " ".join(capsys.readouterr().err.split())
    assert "the optimizer was replaced by Muon" in warning
    assert "optimizer=" in warning

    flags = ["--resume", run_dir, "--steps", "2"]
    line = check_refusal(train.main, flags, "state of the optimizer Muon")
    assert "but this run uses AdamW" in line


def test_the_state_of_adamw_from_an_older_checkpoint_still_fits(tmp_path):
    """Older checkpoints do not name the optimizer, so the names of the tensors decide."""
    run = make_run(tmp_path)
    update_once(run)
    optimizer = run.learner.optimizer
    moments = dict(tree_flatten(optimizer.state))
    optimizers.refuse_other_optimizer_state(optimizer, moments, None, run.dir)

    second_moments = {name: value for name, value in moments.items() if not name.endswith(".m")}
    with pytest.raises(ValueError, match="another optimizer"):
        optimizers.refuse_other_optimizer_state(optimizer, second_moments, None, run.dir)
