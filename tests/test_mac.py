"""A Mac that is not there: its memory, errors of its GPU that come in pairs, a night's training, the first commands."""

import os
import re
import shlex
from pathlib import Path
from types import SimpleNamespace

import cpu_blas
import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten

import config
import gwen
import preflight
import run
import sampler
import train
from bench import launches, ledger
from config import Config, Sizes, given, parse
from disk import checkpoint
from judging import prompt_tree
from machine import gpu, power
from reporting import journal
from step import dispatch

ROOT = Path(gwen.__file__).parent
GIB = 2**30
NO_MEMORY = (
    "[METAL] Command buffer execution failed: Insufficient Memory (00000008:kIOGPUCommandBufferCallbackError...)"
)
VICTIM = (
    "[METAL] Command buffer execution failed: Discarded (victim of GPU error/recovery) "
    "(00000005:kIOGPUCommandBufferCallbackErrorInnocentVictim)"
)
BIG = gwen.random_config("random:0.6b")


def recommended(gigabytes):
    """What macOS recommends for a GPU's working set."""
    return 2 * gigabytes * GIB // 3


@pytest.fixture
def mac(monkeypatch):
    """A Mac of 16 GB; its `told` are the limits that MLX was given."""
    told = {}
    monkeypatch.setattr(mx, "default_device", lambda: mx.Device(mx.gpu))
    monkeypatch.setattr(mx, "device_info", lambda: {"max_recommended_working_set_size": recommended(16)})
    for name in ("set_wired_limit", "set_cache_limit"):
        monkeypatch.setattr(mx, name, lambda size, name=name: told.update({name: size}))
    return told


# ---- memory


@pytest.mark.parametrize(
    ("gigabytes", "cache"), [(8, recommended(8) // 8), (16, recommended(16) // 8), (64, 2 * 10**9)]
)
def test_nothing_is_wired_and_at_most_two_gb_of_freed_buffers_stay(mac, monkeypatch, gigabytes, cache):
    monkeypatch.setattr(gpu, "memory_size", lambda: recommended(gigabytes))
    gpu.hold_memory()
    assert mac == {"set_cache_limit": cache}


def test_what_the_environment_asks_for_is_wired(mac, monkeypatch):
    monkeypatch.setenv("GWEN_WIRED_LIMIT", "4.5")
    gpu.hold_memory()
    assert mac["set_wired_limit"] == 4_500_000_000


@pytest.mark.parametrize("text", ["-1", "12", "all", "nan"])
def test_a_wired_limit_that_no_mac_has_is_refused_in_one_line(mac, text, capsys):
    with pytest.raises(SystemExit) as ended:
        train.main(["--model", "demo", "--let-sleep", "--wired-limit", text])
    os.environ.pop("GWEN_WIRED_LIMIT")
    assert ended.value.code == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert last == f"error: --wired-limit or GWEN_WIRED_LIMIT is '{text}'; it must be GB from 0 to 11.45"


def make_config(**flags):
    asked = {"model": "random:0.6b", "task": "gsm8k", "batch": 8, "groups": 8} | flags
    return config.resolve(asked, None, None, gwen.choose_model)[0]


def demand_of(prompt_tokens=128, rubric=None, model=BIG, **flags):
    settings = make_config(**flags)
    return preflight.Demand(model, mx.float16, settings, [prompt_tokens] * settings.sampling.batch, rubric)


def test_prompts_that_are_shared_are_counted_once(mac):
    demand = demand_of(1024, batch=16, max_tokens=512)
    sizes = Sizes(64, "on", 2048, 0)
    column = 2 * 28 * 8 * 128 * 2
    shared = preflight.estimate(demand, sizes).cache
    assert shared == column * (16 * 1024 + 64 * 512)  # 5.6 GB
    assert preflight.estimate(demand, sizes._replace(share_prefix="off")).cache == shared + column * 64 * 1024


def test_the_judge_and_python_are_counted(mac, monkeypatch):
    rubric, sizes = ROOT / "data" / "values_rubric.yaml", Sizes(64, "on", 2048, 0)

    def need(rubric=rubric, **flags):
        return preflight.estimate(demand_of(rubric=rubric, **flags), sizes)

    alone, judged = need(None), need()
    assert alone.resident == alone.weights + alone.adapters + alone.optimizer + preflight.PYTHON
    assert alone.judging == alone.judge == judged.judge == 0 < judged.judging
    assert need(judge_chunk_size=96).judging > 3 * judged.judging
    other = gwen.Model(gwen.random_config("random:30m")).parameters()
    assert need(judge_model="random:30m").judge == 2 * sum(array.size for _, array in tree_flatten(other))
    assert need(judge_model="x", judge_url="http://127.0.0.1:1/v1").judging == 0
    assert need(lora_rank=0).judge == judged.weights  # the copy that training leaves alone


def test_a_size_that_does_not_fit_is_never_measured(mac, monkeypatch, tmp_path):
    tried = []
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(dispatch, "kind_of", lambda *_: dispatch.Kind("some", "model", "float16", 8, 128, 8192))

    def time_work(model, kind, rows, modes):
        tried.extend((rows, share) for share in modes)
        return [dispatch.Trial(rows, share, float(rows), rows) for share in modes]

    monkeypatch.setattr(dispatch, "time_work", time_work)
    demand = demand_of(max_tokens=8192, batch=64, rollout_batch_size="auto")
    chosen, _ = dispatch.settle(
        None, demand.config, demand.prompt_lengths, 0, lambda *way: preflight.fits(demand, *way)
    )
    assert (4, True) in tried and chosen < 64
    assert all(
        preflight.estimate(demand, Sizes(rows, "on" if s else "off", 1024, 28)).rollout < 10.5e9 for rows, s in tried
    )
    assert not preflight.fits(demand, 64, True)


@pytest.mark.parametrize(
    "flags",
    [
        {"max_tokens": 4096, "batch": 16},
        {"judge_chunk_size": 512, "max_tokens": 1024},
        {"train_token_budget": 2**16, "checkpoint_layers": "off", "batch": 64},
    ],
    ids=str,
)
def test_on_8_gb_the_line_says_what_to_lower_and_then_it_fits(mac, monkeypatch, flags):
    monkeypatch.setattr(gpu, "memory_size", lambda: recommended(8))
    demand = demand_of(rubric=ROOT / "data" / "values_rubric.yaml", rollout_batch_size=64, **flags)
    said = preflight.line(demand, preflight.settle(demand))
    assert "of 5.73 GB" in said
    words = said.partition("it does not fit: set ")[2].split()
    assert words and len(words) % 2 == 0, said
    changed = {name[2:].replace("-", "_"): value for name, value in zip(words[::2], words[1::2], strict=True)}
    changed = {name: value if name == "checkpoint_layers" else int(value) for name, value in changed.items()}
    demand = demand._replace(config=demand.config.but(**changed))
    assert "does not fit" not in preflight.line(demand, preflight.settle(demand))


def test_live_buffers_and_what_machines_reach_are_in_the_ledger():
    def launch(binds, makes):
        return launches.Launch("elementwise", "Add", 10**9, 0, 0, ((binds, 1), (makes, 1)), ((makes, 10),))

    chain = [launch("given", "a"), launch("a", "b"), launch("b", "c"), launch("a", "d")]
    assert launches.peaks(chain) == (30, 4)  # a, b and c; and what was given
    work = ledger.StepWork(BIG, mx.float16, make_config(), 8)
    phase = ledger.Phase("decode", 1e3, 1.0, chain[:1], chain, 1.0, 0.1, 1234.0)
    _, first, limit, _, titles, m1 = ledger.lines(work, [phase], {"M1": ledger.MACHINES["M1"]})
    assert first.endswith(" 1234") and "499,000" in limit
    assert "step s   at 80%   tok/s" in titles
    _, _, step, reached, *_ = m1.split()
    assert float(reached) == pytest.approx(float(step) / 0.8, rel=0.01)


# ---- errors of the GPU, which come in pairs


@pytest.mark.parametrize(
    "kind",
    [
        "Caused GPU Hang Error (00000003:kIOGPUCommandBufferCallbackErrorHang)",
        "Ignored (for causing prior GPU errors) (00000004:kIOGPUCommandBufferCallbackErrorSubmissionsIgnored)",
        VICTIM,
    ],
)
def test_hangs_and_what_follows_them_are_known_as_the_watchdogs(kind):
    assert gpu.is_watchdog(RuntimeError(f"[METAL] Command buffer execution failed: {kind}."))
    assert not gpu.is_watchdog(ValueError("The prompt: 'a victim hangs'"))


class Broken:
    """A GPU with errors in flight, of which each wait throws one, as MLX does."""

    def __init__(self, monkeypatch, num_errors):
        self.left = num_errors
        synchronize, self.save = mx.synchronize, mx.save_safetensors
        monkeypatch.setattr(mx, "synchronize", lambda: (self.throw(), synchronize()))
        monkeypatch.setattr(mx, "save_safetensors", lambda *args, **kwargs: (self.throw(), self.save(*args, **kwargs)))

    def throw(self):
        if self.left:
            self.left -= 1
            raise RuntimeError(NO_MEMORY if self.left % 2 else VICTIM)


ERRORS = [2, 5, float("inf")]


@pytest.mark.parametrize("num_errors", ERRORS)
def test_a_rollout_survives_errors_in_flight_and_samples_the_same(monkeypatch, capsys, num_errors):
    model, params = gwen.random_model("random:2m"), sampler.SamplingParams(6)
    expected = sampler.rollout(model, [[1, 2], [3]], params, group_size=4, key=0)
    broken, decode = Broken(monkeypatch, num_errors), sampler.decode

    def failing(*args):
        broken.throw()
        return decode(*args)

    monkeypatch.setattr(sampler, "decode", failing)
    if num_errors == float("inf"):
        with pytest.raises(ValueError, match="memory does not suffice for one row"):
            sampler.rollout(model, [[1, 2], [3]], params, group_size=4, key=0)
        return
    found = sampler.rollout(model, [[1, 2], [3]], params, group_size=4, key=0)
    assert mx.array_equal(found.completion_ids, expected.completion_ids)
    assert capsys.readouterr().err.count("out of memory, going on with 4 rows") == 1


@pytest.mark.parametrize("num_errors", ERRORS)
def test_a_judge_survives_errors_in_flight_and_reads_the_same(monkeypatch, num_errors):
    model, prompts = gwen.random_model("random:2m"), [((1, 2), (3, 4 + row)) for row in range(6)]

    def walk(tree):
        found = {}
        tree.walk(prompts, lambda places, hidden, _: found.update(zip(places, np.array(hidden), strict=True)))
        return found

    expected, tree = (
        walk(prompt_tree.PromptTree(model, [5], 4, "judge")),
        prompt_tree.PromptTree(model, [5], 4, "judge"),
    )
    tree.root()
    broken, forward = Broken(monkeypatch, num_errors), prompt_tree.PromptTree.forward
    monkeypatch.setattr(prompt_tree.PromptTree, "forward", lambda *args: (broken.throw(), forward(*args))[1])
    if num_errors == float("inf"):
        with pytest.raises(ValueError, match="memory does not suffice for one prompt"):
            walk(tree)
        return
    found = walk(tree)
    assert found.keys() == expected.keys() and tree.chunk.rows == 2
    for place, hidden in expected.items():
        np.testing.assert_allclose(found[place], hidden, atol=1e-4)


@pytest.fixture
def stopped(tmp_path):
    """What `stoppable` needs of a run that has saved its second step and done its third."""
    (tmp_path / "checkpoints" / "step-000002").mkdir(parents=True)
    saved = SimpleNamespace(is_whole=True, stopping=False, step=3, boundary=(3, 3), dir=tmp_path, longest=10)
    saved.model = SimpleNamespace(config=SimpleNamespace(num_hidden_layers=4))
    saved.sizes, saved.go_back = Sizes(8, "off", 1024, 0), lambda: None
    saved.save = lambda: checkpoint.save_tensors(tmp_path / "state.safetensors", {"x": mx.ones(3) * 2})
    return saved


@pytest.mark.parametrize("num_errors", ERRORS)
def test_an_update_that_ends_in_errors_is_saved_and_is_one_line(stopped, monkeypatch, num_errors):
    broken, save = Broken(monkeypatch, num_errors), mx.save_safetensors

    def on_cpu_only(*args, **kwargs):  # where a GPU's errors do not reach
        assert not broken.left or num_errors == float("inf"), "not all in flight were waited for"
        broken.left = 0
        save(*args, **kwargs)

    monkeypatch.setattr(mx, "save_safetensors", on_cpu_only)
    with pytest.raises(ValueError) as caught, run.stoppable(stopped):
        broken.throw()
    said = str(caught.value)
    assert "\n" not in said and "saved after step 3, continue with: uv run train.py --resume" in said
    assert mx.load(str(stopped.dir / "state.safetensors"))["x"].tolist() == [2, 2, 2]


@pytest.mark.parametrize("num_errors", ERRORS)
def test_a_save_repeats_itself_through_errors_in_flight(stopped, monkeypatch, num_errors):
    Broken(monkeypatch, num_errors)
    if num_errors == float("inf"):
        with pytest.raises(OSError) as caught, run.stoppable(stopped):
            stopped.save()
        said = str(caught.value)
        assert "\n" not in said and "step 3 could not be saved" in said
        assert "step-000002 is intact, continue with: uv run train.py --resume" in said
        return
    with run.stoppable(stopped):
        stopped.save()
    assert mx.load(str(stopped.dir / "state.safetensors"))["x"].tolist() == [2, 2, 2]


def test_what_is_saved_is_computed_on_the_cpus_stream(tmp_path, monkeypatch):
    devices, save = [], mx.save_safetensors
    stream = mx.stream
    monkeypatch.setattr(mx, "stream", lambda device: (devices.append(device), stream(device))[1])
    monkeypatch.setattr(mx, "save_safetensors", lambda *args, **kwargs: (devices.append("save"), save(*args, **kwargs)))
    checkpoint.save_tensors(tmp_path / "x.safetensors", {"x": mx.ones(3)})
    assert devices == [mx.cpu, "save"]


# ---- the night


@pytest.fixture
def begun(monkeypatch):
    """Programs that were started; models are not."""
    programs = []
    monkeypatch.setattr(power.subprocess, "Popen", lambda program, **_: programs.append(program))
    monkeypatch.setattr(power.platform, "system", lambda: "Darwin")

    def no_run(*_):
        raise ValueError("that far")

    monkeypatch.setattr(train, "GrpoRun", no_run)
    return programs


@pytest.mark.parametrize("flags", [[], ["--let-sleep"]])
def test_a_mac_that_trains_stays_awake_unless_told_otherwise(begun, flags, tmp_path):
    with pytest.raises(SystemExit):
        train.main(["--model", "demo", "--run-dir", str(tmp_path / "run"), *flags])
    assert begun == [["/usr/bin/caffeinate", "-i", "-w", str(os.getpid())]] * (not flags)


def test_only_a_mac_is_kept_awake(begun, monkeypatch):
    monkeypatch.setattr(power.platform, "system", lambda: "Linux")
    power.keep_awake()
    assert not begun and not power.pressure()


def test_the_warning_says_what_macos_says_of_memory_heat_and_power(monkeypatch, tmp_path, capsys):
    said = {
        "sysctl": "kern.memorystatus_vm_pressure_level: 2\nvm.swapusage: total = 8192.00M  used = 7033.50M\n",
        "pmset": " lowpowermode         1\n\tCPU_Speed_Limit \t= 62\n",
    }
    monkeypatch.setattr(power.platform, "system", lambda: "Darwin")
    monkeypatch.setattr(
        power.subprocess, "run", lambda command, **_: SimpleNamespace(stdout=said[Path(command[0]).name])
    )
    log = journal.Journal(Config.of(), tmp_path, "score", 0, keep_scores=False)
    for _ in range(2):
        log.steps = [{"step/s": seconds} for seconds in [10.0] * 6 + [40.0] * 3]
        log.warn(9)
    (line,) = capsys.readouterr().err.splitlines()
    assert "took 4.0 times as long a token as usual" in line
    assert "memory pressure (1 normal, 2 high, 4 critical) 2, swap used 7033.50M, processor speed in % 62" in line
    assert "low power mode 1" in line


def make_run(directory, name, newest, age):
    path = directory / "runs" / name
    (path / "checkpoints" / f"step-{newest:06d}").mkdir(parents=True)
    (path / "config.yaml").write_text("model: demo\nsteps: 10\n")
    os.utime(path / "checkpoints" / f"step-{newest:06d}", (10**9 - age, 10**9 - age))


def test_resume_without_a_name_takes_the_newest_unfinished_run(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert parse(["--resume"]).resume is True and parse(["--resume", "runs/x"]).resume == "runs/x"
    with pytest.raises(SystemExit) as ended:
        train.main(["--resume"])
    assert ended.value.code == 2 and "no run in runs/ has a checkpoint" in capsys.readouterr().err
    make_run(tmp_path, "finished", 10, age=0)
    assert checkpoint.newest_unfinished() == "runs/finished"
    make_run(tmp_path, "older", 9, age=7)
    make_run(tmp_path, "newer", 3, age=5)
    (tmp_path / "runs" / "began").mkdir()
    assert checkpoint.newest_unfinished() == "runs/newer"


# ---- the first command


def readme_commands():
    """The commands of README's "Try it" that train, each with the lines that it is said to print."""
    part = (ROOT / "README.md").read_text("utf-8").partition("## Try it")[2].partition("\n## ")[0]
    found = re.findall(r"^\$ uv run train\.py (.*)\n((?:(?!\$ |```).*\n)*)", part, re.MULTILINE)
    assert len(found) == 3
    return found


@pytest.mark.parametrize(("command", "printed"), readme_commands(), ids=["demo", "real", "own"])
def test_the_readmes_first_commands_do_on_a_mac_what_they_show(mac, monkeypatch, tmp_path, command, printed):
    monkeypatch.chdir(tmp_path)
    settings, choice = config.resolve(given(parse(shlex.split(command))), None, None, gwen.choose_model)
    assert choice == printed.splitlines()[0]
    shape = BIG if settings.model.name.startswith("Qwen/") else gwen.load_config(settings.model.name)
    demand = preflight.Demand(
        shape, mx.float16, settings, [48] * settings.sampling.batch, preflight.rubric_of(settings)
    )
    with launches.as_on_a_gpu():
        said = preflight.line(demand, preflight.settle(demand))
    shown = [line for line in printed.splitlines() if line.startswith("memory: ")]
    assert all(said.startswith(line.partition("…")[0]) for line in shown), said
    assert bool(shown) == (settings.model.name != "demo")


@pytest.mark.parametrize(
    ("found", "refused"),
    [
        (("14.0", ("", "", ""), "arm64"), False),
        (("26.1", ("", "", ""), "arm64"), False),
        (("13.6.1", ("", "", ""), "arm64"), True),
        (("15.2", ("", "", ""), "x86_64"), True),  # an Intel Mac, or Rosetta
        (("", ("", "", ""), ""), False),
    ],
)
def test_a_mac_that_mlx_does_not_run_on_is_refused_in_one_line(found, refused, monkeypatch, capsys):
    monkeypatch.setattr(cpu_blas.platform, "mac_ver", lambda: found)
    if not refused:
        cpu_blas._refuse_other_macs()
        return
    with pytest.raises(SystemExit) as ended:
        cpu_blas._refuse_other_macs()
    said = capsys.readouterr().err
    assert ended.value.code == 2 and said.count("\n") == 1 and f"macOS {found[0]}" in said and found[2] in said


def test_git_is_asked_only_where_there_is_a_repository(monkeypatch, tmp_path):
    monkeypatch.setattr(gpu, "__file__", str(tmp_path / "machine" / "gpu.py"))
    monkeypatch.setattr(gpu, "subprocess", SimpleNamespace(run=lambda *_, **__: pytest.fail("git was asked")))
    monkeypatch.setattr(gpu.shutil, "which", lambda _: "/usr/bin/git")
    assert gpu.environment("")["commit"] is None
