"""Which way to cut rollouts is chosen: what is timed, when measuring ends, what is remembered, and who uses it."""

import argparse
import os
from types import SimpleNamespace

import mlx.core as mx
import pytest
import yaml
from small_run import resolve

import evaluate
import gwen
import sampler
import tasks
import train
from disk import checkpoint, run_files
from layers import attention
from settings.sources import as_yaml, parse
from step import dispatch
from step.dispatch import Kind, Trial

KIND = Kind("machine", "model", "float32", 4, 32, 16)
WORK = dict(max_tokens=12, group_size=4, most_rows=16)
NO_MEMORY = "[malloc_or_wait] Unable to allocate 99999999999 bytes."


@pytest.fixture(scope="module")
def model(checkpoints):
    return gwen.load_model(checkpoints["qwen3"])


@pytest.fixture(autouse=True)
def store(tmp_path, monkeypatch):
    """The file of measurements of one test."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "gwen" / "rollouts.json"


@pytest.fixture
def timed(monkeypatch):
    """Stands for the machine: speed by (rows, share_prefix), 100 bytes a row; notes what was timed."""
    speeds, calls = {}, []

    def time_work(model, kind, rows, modes):
        calls.append((rows, list(modes)))
        if isinstance(speeds.get(rows), str):
            raise RuntimeError(speeds[rows])
        return [Trial(rows, s, float(speeds.get((rows, s), speeds.get(rows, rows))), 100 * rows) for s in modes]

    monkeypatch.setattr(dispatch, "time_work", time_work)
    return argparse.Namespace(speeds=speeds, calls=calls)


# ---- measuring


def test_a_real_measurement_gives_speeds_and_memory_of_every_way(model):
    trials = dispatch.measure(model, KIND, [], (4, 16), 1e9)
    assert [(trial.rows, trial.share_prefix) for trial in trials] == [(4, False), (4, True), (16, False), (16, True)]
    peak = {(trial.rows, trial.share_prefix): trial.peak_bytes for trial in trials}
    assert all(10 < trial.tok_s < 1e6 for trial in trials)
    config = model.config
    column = 2 * 4 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim
    assert peak[16, False] >= 16 * (32 + 16) * column and peak[16, True] >= (4 * 32 + 16 * 16) * column
    assert peak[16, False] > peak[4, False] and peak[16, False] > peak[16, True]


def test_steps_are_timed_in_the_middle_of_completions(model, monkeypatch):
    widths, original = [], attention.attend

    def noting(queries, parts, layout):
        widths.extend(part[0].shape for part in parts[1:])  # of the slots' own keys; a prefill has one part
        return original(queries, parts, layout)

    monkeypatch.setattr(attention, "attend", noting)
    dispatch.time_work(model, KIND._replace(max_tokens=1024), 4, [True])
    assert {shape[0] for shape in widths} == {4}
    assert min(shape[2] for shape in widths) > 500 and max(shape[2] for shape in widths) < 525


def test_slower_steps_and_slower_prefills_give_lower_speeds(model, monkeypatch):
    clock = [0.0]
    monkeypatch.setattr(dispatch.time, "perf_counter", lambda: clock[0])
    cost = {"prefill": 0.0, "step": 0.0}
    prefill, hidden = sampler.prefill, gwen.Model.hidden

    def slow_prefill(*args, **how):
        clock[0] += cost["prefill"]
        return prefill(*args, **how)

    def slow_hidden(self, *args):
        clock[0] += cost["step"]
        return hidden(self, *args)

    monkeypatch.setattr(sampler, "prefill", slow_prefill)
    monkeypatch.setattr(gwen.Model, "hidden", slow_hidden)
    cost.update(prefill=0.0, step=0.5)
    (steps_alone,) = dispatch.time_work(model, KIND, 8, [True])
    # prefill is one forward pass; a row's first token needs no other, so 16 tokens take 0.5 + 15 * 0.5 seconds
    assert steps_alone.tok_s == pytest.approx(8 * 16 / (16 * 0.5), rel=0.05)
    cost.update(prefill=8.0, step=0.5)
    (both,) = dispatch.time_work(model, KIND, 8, [True])
    assert both.tok_s == pytest.approx(8 * 16 / (8 + 16 * 0.5), rel=0.05)


UNEVEN = {4: 100, 8: 200, 16: 150, 32: 300, 64: 305, 128: 310, 256: 9999}


@pytest.mark.parametrize(
    ("speeds", "memory", "timed_rows"),
    [
        ({}, 1e9, dispatch.ROW_COUNTS),  # speed rises
        (UNEVEN, 1e9, (4, 8, 16, 32, 64, 128)),  # two counts in a row gained nothing
        ({}, 3200, (4, 8, 16, 32)),  # 32 rows are predicted to need all of it
        ({16: NO_MEMORY}, 1e9, (4, 8, 16)),
    ],
    ids=["rises", "gains nothing", "needs all", "needs more"],
)
def test_measuring_goes_on_while_speed_rises_and_memory_suffices(timed, speeds, memory, timed_rows):
    timed.speeds.update(speeds)
    trials = dispatch.measure(None, KIND, [], dispatch.ROW_COUNTS, memory)
    assert timed.calls == [(rows, [True, False]) for rows in timed_rows]
    assert {trial.rows for trial in trials} == {rows for rows in timed_rows if speeds.get(rows) != NO_MEMORY}


def test_only_the_way_that_still_fits_is_measured_on(timed, monkeypatch):
    def time_work(model, kind, rows, modes):
        timed.calls.append((rows, list(modes)))
        return [Trial(rows, share, float(rows), (50 if share else 100) * rows) for share in modes]

    monkeypatch.setattr(dispatch, "time_work", time_work)
    dispatch.measure(None, KIND, [], (4, 8, 16, 32), 1600)
    assert timed.calls == [(4, [True, False]), (8, [True, False]), (16, [True, False]), (32, [True])]


def test_another_error_is_not_swallowed(timed):
    timed.speeds[8] = "[matmul] shapes do not fit"
    with pytest.raises(RuntimeError, match="shapes do not fit"):
        dispatch.measure(None, KIND, [], dispatch.ROW_COUNTS, 1e9)


def test_no_larger_count_is_begun_once_time_is_up(timed, monkeypatch):
    clock = iter(range(0, 10_000, 25))
    monkeypatch.setattr(dispatch.time, "perf_counter", lambda: next(clock))
    dispatch.measure(None, KIND, [], dispatch.ROW_COUNTS, 1e9)
    assert [rows for rows, _ in timed.calls] == [4, 8]


def test_where_nothing_can_be_shared_only_copies_are_measured(timed):
    dispatch.measure(None, KIND._replace(group_size=1), [], (4, 8), 1e9)
    assert timed.calls == [(4, [False]), (8, [False])]


# ---- choosing


def test_the_fewest_rows_that_are_about_as_fast_as_any_are_taken_in_their_faster_mode():
    speeds = {(8, False): 100.0, (16, True): 196.0, (16, False): 190.0, (32, True): 200.0}
    trials = [Trial(rows, share, speed, rows) for (rows, share), speed in speeds.items()]
    assert dispatch.pick(trials, 1e9) == trials[1]
    assert dispatch.pick([*trials, Trial(64, False, 300.0, 64)], 1e9).rows == 64
    assert dispatch.pick([*trials, Trial(64, False, 300.0, 64)], 63) == trials[1]  # it needs more than there is
    assert dispatch.pick(trials, 15) == trials[0]
    assert dispatch.pick(trials, 1) == trials[0]  # nothing fits: the least


def test_kinds_are_told_apart_by_what_changes_the_speed(model):
    kind = dispatch.kind_of(model, [100, 120, 128], 64, 8)
    assert (kind.prompt_tokens, kind.max_tokens, kind.group_size, kind.dtype) == (128, 64, 8, "float32")
    assert dispatch.kind_of(model, [65], 33, 8) == kind
    assert dispatch.kind_of(model, [100] * 99 + [4000], 64, 8) == kind  # one long prompt does not make it another kind
    assert dispatch.kind_of(model, [1], 1, 8)[-2:] == (16, 16)
    others = [dispatch.kind_of(model, [129], 64, 8), dispatch.kind_of(model, [128], 65, 8)]
    others += [dispatch.kind_of(model, [128], 64, 4), dispatch.kind_of(gwen.random_model("random:2m"), [128], 64, 8)]
    assert len({kind, *others}) == 5


def test_what_was_measured_once_is_remembered(model, timed, store):
    timed.speeds.update({4: 100, 8: 200, (16, True): 390, (16, False): 400})
    chosen, why = dispatch.choose(model, [30], **WORK)
    assert chosen == Trial(16, False, 400.0, 1600)
    tried = "16 copied 400 tok/s (against 4 shared 100 tok/s, 8 shared 200 tok/s, 16 shared 390 tok/s)"
    assert f"rollouts: rows at once {tried} for 32 + 16 tokens in groups of 4, " in why and "\n" not in why
    assert why.endswith(f"measured now and kept in {store}")
    num_timed = len(timed.calls)
    again, why = dispatch.choose(model, [30], **WORK)
    assert again == chosen and len(timed.calls) == num_timed and f"as measured before, in {store}" in why
    dispatch.choose(model, [300], **WORK)  # another kind
    assert len(timed.calls) == 2 * num_timed
    assert dispatch.choose(model, [30], **WORK)[0] == chosen and len(timed.calls) == 2 * num_timed


@pytest.mark.parametrize("most_rows", [1, 2, 3])
def test_work_of_fewer_rows_than_are_ever_tried_takes_the_least(model, timed, most_rows):
    assert dispatch.choose(model, [30], **WORK | {"most_rows": most_rows})[0].rows == 4


def test_larger_work_adds_to_what_was_measured_for_smaller(model, timed):
    dispatch.choose(model, [30], **WORK | {"most_rows": 9})
    assert [rows for rows, _ in timed.calls] == [4, 8, 16]
    assert dispatch.choose(model, [30], **WORK | {"most_rows": 64})[0].rows == 64
    assert [rows for rows, _ in timed.calls] == [4, 8, 16, 32, 64]
    assert dispatch.choose(model, [30], **WORK | {"most_rows": 5})[0].rows == 8
    assert len(timed.calls) == 5


def test_with_the_rows_given_only_sharing_is_left_to_choose(model, timed):
    timed.speeds.update({(24, True): 300, (24, False): 200})
    assert dispatch.choose(model, [30], **WORK, rows=24)[0] == Trial(24, True, 300.0, 2400)
    assert timed.calls == [(24, [True, False])]


def test_what_was_measured_with_more_memory_is_chosen_among_by_what_fits_now(model, timed, monkeypatch):
    monkeypatch.setattr(dispatch.gpu, "memory_at_hand", lambda: 10**9)
    assert dispatch.choose(model, [30], **WORK)[0].rows == 16
    monkeypatch.setattr(dispatch.gpu, "memory_at_hand", lambda: 800 / dispatch.ROOM)
    assert dispatch.choose(model, [30], **WORK)[0].rows == 8


def test_memory_that_never_sufficed_is_said(model, timed, store):
    timed.speeds[4] = NO_MEMORY
    chosen, why = dispatch.choose(model, [30], **WORK)
    assert chosen.rows == 4 and "memory is short" in why
    assert not store.exists()


# ---- the file


DAMAGED = ["", "{", "[]", "null", '{"format 2": [1]}', "\udcff\udcfe", '{"format 1": {"KEY": [[16, true, 1.0, 1]]}}']
DAMAGED += ['{"format 2": {"KEY": 7}}', '{"format 2": {"KEY": [[16]]}}']


def key_of(kind):
    return " | ".join(f"{name} {value}" for name, value in kind._asdict().items())


@pytest.mark.parametrize("text", DAMAGED)
def test_a_damaged_file_is_measured_over(model, timed, store, text):
    store.parent.mkdir(parents=True)
    key = key_of(dispatch.kind_of(model, [30], 12, 4))
    store.write_bytes(text.replace("KEY", key).encode(errors="surrogateescape"))
    chosen, why = dispatch.choose(model, [30], **WORK)
    assert chosen.tok_s == 16.0 and "measured now and kept" in why
    assert [rows for rows, _ in timed.calls] == [4, 8, 16]
    assert dispatch.load(store)[key] and dispatch.choose(model, [30], **WORK)[1].count("measured before") == 1


def test_a_file_that_cannot_be_written_costs_only_the_memory_of_it(model, timed, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    chosen, why = dispatch.choose(model, [30], **WORK)
    assert chosen.rows == 16 and "measured now and not kept: Not a directory" in why


def test_what_other_kinds_have_in_the_file_stays(model, timed, store):
    dispatch.save(store, {"another": [Trial(8, True, 5.0, 7)]})
    dispatch.choose(model, [30], **WORK)
    held = dispatch.load(store)
    assert held["another"] == [Trial(8, True, 5.0, 7)] and len(held) == 2
    assert os.listdir(store.parent) == [store.name]


# ---- who uses it


def no_measuring(*args, **how):
    raise AssertionError("measured")


SMALL = {"model": "demo", "batch": 3, "groups": 4, "max_tokens": 12, "eval_limit": 16}


@pytest.mark.slow
def test_without_a_gpu_training_and_evaluation_measure_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(dispatch, "choose", no_measuring)
    its = train.GrpoRun(resolve(SMALL, None, None)[0], tmp_path)
    assert its.batch_size.rows == its.sizes.rollout_batch_size == 16 and its.sizes.sharing is None
    task = tasks.load("demo")
    evaluate.evaluate(its.model, its.tokenizer, task, evaluate.EvalParams(4, limit=2))


@pytest.mark.slow
def test_on_a_gpu_training_measures_before_the_first_step_and_records_what_it_chose(tmp_path, monkeypatch, capsys):
    asked = []

    def choose(model, lengths, **how):
        assert how.pop("fits")(1, True)
        asked.append((len(lengths), how))
        return Trial(256, True, 1.0, 1), "rollouts: as they are"

    monkeypatch.setattr(dispatch, "choose", choose)
    monkeypatch.setattr(dispatch, "gpu", SimpleNamespace(on_gpu=lambda: True))
    config = resolve(SMALL, None, None)[0]
    assert "rollout_batch_size: auto\n" in as_yaml(config)
    its = train.GrpoRun(config, tmp_path)
    run_files.write(as_yaml(config, its.sizes), tmp_path)
    ((num_prompts, how),) = asked
    assert num_prompts == len(its.task.train)
    assert how == {"max_tokens": 12, "group_size": 4, "most_rows": 16, "rows": 0}  # 16 held-out problems
    assert "rollouts: as they are\n" in capsys.readouterr().out
    held = yaml.safe_load((tmp_path / "config.yaml").read_text())
    assert (held["rollout_batch_size"], held["share_prefix"]) == (256, "on")
    resumed = resolve({}, None, str(tmp_path))[0]
    monkeypatch.setattr(dispatch, "choose", no_measuring)
    again = train.GrpoRun(resumed, tmp_path)
    assert again.batch_size.rows == 256 and again.sizes.sharing is True


@pytest.mark.slow
def test_a_size_that_memory_forced_lasts_through_evaluation_and_resume(tmp_path, monkeypatch, capsys):
    its = train.GrpoRun(resolve(SMALL | {"steps": 1, "eval_every": 1}, None, None)[0], tmp_path)
    run_files.write(as_yaml(its.config, its.sizes), tmp_path)
    its.open()
    sizes, failed = [], []
    decode = sampler.decode

    def failing(*args, **how):
        sizes.append(args[1].num_slots)
        if not failed:
            failed.append(True)
            raise RuntimeError(NO_MEMORY)
        return decode(*args, **how)

    monkeypatch.setattr(sampler, "decode", failing)
    list(train.train(its))
    assert sizes[0] == 16 and set(sizes[1:]) == {8}
    state = checkpoint.load(tmp_path)
    assert state.extra["rollout_batch_size"] == 8
    resumed = train.GrpoRun(resolve({"steps": 2}, None, str(tmp_path))[0], tmp_path)
    assert resumed.batch_size.rows == 16
    resumed.restore(state)
    assert resumed.batch_size.rows == 8


@pytest.mark.parametrize("text", ["many", "1.5", ""])
def test_a_size_is_a_number_or_auto(text, capsys):
    with pytest.raises(SystemExit):
        parse(["--rollout-batch-size", text])
    assert capsys.readouterr().err.startswith("error: --rollout-batch-size: ")
    assert parse(["--rollout-batch-size", "auto"]).rollout_batch_size == "auto"
    assert parse(["--rollout-batch-size", "7"]).rollout_batch_size == 7


def test_nothing_of_a_measurement_stays_in_memory(model):
    held = mx.get_active_memory()
    dispatch.measure(model, KIND, [], (4, 16), 1e9)
    assert mx.get_active_memory() - held < 1e5
