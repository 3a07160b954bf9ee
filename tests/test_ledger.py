"""What a GPU would do, counted: bytes, FLOPs, buffers and gradients by hand, and the ledger of a step."""

import dataclasses
import json
from collections import Counter
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten

import gwen
import kv_cache
import lora
import preflight
import sampler
import update
from bench import launches, ledger
from config import Sizes
from layers import attention
from settings.sources import resolve
from step import micro_batch, policy

X = mx.zeros((4, 6), mx.float16)


LARGE = {"batch": 8, "groups": 8, "max_tokens": 256, "train_token_budget": 2048}


def work_of(model: str, prompt_tokens: int = 16, **flags: Any) -> ledger.StepWork:
    given = {"model": model, "task": "demo", "checkpoint_layers": "off", "lora_rank": 16} | flags
    config = resolve(given, None, None, gwen.choose_model)[0]
    return ledger.StepWork(gwen.load_config(model), mx.float16, config, prompt_tokens)


def launch(*buffers: tuple[str, int], made: tuple[tuple[str, int], ...] = ()) -> launches.Launch:
    return launches.Launch("elementwise", "Add", 0, 0, 0, buffers, made)


def traced(maker: Any, work: ledger.StepWork, num_layers: int) -> list[launches.Launch]:
    with launches.as_on_a_gpu():
        function, inputs = maker(work, num_layers)
        return launches.trace(function, *inputs)


@pytest.mark.parametrize(
    ("function", "read", "written", "flops"),
    [
        (lambda x: x + x[:1], 2 * 24 + 2 * 6, 2 * 24, 0),  # what is broadcast is read once
        (lambda x: x[:2] * x[2:], 2 * 12 + 2 * 12, 2 * 12, 0),
        (lambda x: x @ x.T, 2 * 24 + 2 * 24, 2 * 16, 2 * 4 * 4 * 6),
        (lambda x: x[mx.array([1, 2, 2])], 2 * 18 + 4 * 3, 2 * 18, 0),  # rows, and their indices
        (lambda x: x.astype(mx.float32), 2 * 24, 4 * 24, 0),
        (lambda x: x.T.reshape(24), 2 * 24, 2 * 24, 0),
    ],
)
def test_bytes_and_operations_are_those_counted_by_hand(function, read, written, flops):
    (launch,) = launches.trace(function, X)
    assert (launch.read, launch.written, launch.flops) == (read, written, flops)


def test_a_slice_that_is_written_in_place_costs_what_is_written():
    def write(buffer: mx.array, new: mx.array) -> mx.array:
        buffer[:, 3:4] = new
        return buffer

    (launch,) = launches.trace(write, mx.zeros((2, 100)), mx.zeros((2, 1)))
    assert (launch.kind, launch.read, launch.written) == ("copy", 8, 8)


@pytest.mark.parametrize(("mask", "pairs"), [(None, 5 * 9), ("causal", 5 + 6 + 7 + 8 + 9)])
def test_attention_counts_the_pairs_that_it_sees(mask, pairs):
    def attend(q: mx.array, k: mx.array, v: mx.array) -> mx.array:
        return mx.fast.scaled_dot_product_attention(q, k, v, scale=1.0, mask=mask)

    q, k, v = mx.zeros((2, 4, 5, 64)), mx.zeros((2, 2, 9, 64)), mx.zeros((2, 2, 9, 64))
    (launch,) = launches.trace(attend, q, k, v)
    assert launch.flops == 2 * 4 * pairs * (2 * 64 + 2 * 64)
    assert launch.read == 4 * (q.size + k.size + v.size)


def test_a_gradient_of_ones_own_is_in_the_trace_and_its_forward_pass_only_once():
    @mx.custom_function
    def own(x: mx.array) -> mx.array:
        return mx.exp(x)

    @own.vjp
    def backward(x: Any, d: Any, y: Any) -> mx.array:
        return mx.sin(mx.exp(x)) * d  # which computes the exponential again

    def gradient(x: mx.array) -> mx.array:
        return mx.vjp(lambda x: own(mx.tanh(x)).sum(), [x], [mx.array(1.0, mx.float16)])[1][0]

    names = Counter(launch.name for launch in launches.trace(gradient, X))
    assert (names["Tanh"], names["Exp"], names["Sin"]) == (1, 1, 1)  # the first exponential has no use


def test_gradients_pulled_through_by_hand_are_those_of_mlx():
    config = work_of("random:2m", batch=2, groups=2, max_tokens=6, lora_rank=4).config
    model = gwen.random_model("random:2m")
    lora.apply(model, 4, 2.0)
    for _, layer in lora.layers(model):
        layer.lora_b = mx.random.normal(layer.lora_b.shape) * 0.1
    learner = update.Learner(model, config, policy.Reader(config, Sizes(4, "auto", 64, 2)))
    prompts = [[1, 2, 3, 4], [5, 6, 7, 8, 9]]
    rollout = sampler.rollout(model, prompts, sampler.SamplingParams(6), group_size=2, key=1)
    rows = [prompt for prompt in prompts for _ in range(2)]
    (batch,) = micro_batch.micro_batches(rows, rollout, 64, "off")
    targets = policy.Targets(4, 24, advantages=mx.array([1.0, -1.0, 0.5, -0.5]))

    def gradients() -> dict[str, mx.array]:
        return dict(tree_flatten(update.share_and_gradient(learner, batch, targets)[1]))

    expected = gradients()
    mx.eval(expected)
    with launches.exportable():
        found = gradients()
    for name, array in expected.items():
        assert mx.any(array != 0).item(), name
        np.testing.assert_allclose(np.array(found[name]), np.array(array), rtol=1e-4, atol=1e-7, err_msg=name)


def test_a_command_buffer_ends_after_its_operations_or_its_elements():
    small = [launch((f"x{place}", 1)) for place in range(100)]
    assert [len(held) for held in launches.command_buffers(small)] == [41, 41, 18]
    large = [launch(("weight", 41 << 20)), launch(("x", 1)), launch(("other", 30 << 20)), launch(("third", 11 << 20))]
    assert [len(held) for held in launches.command_buffers(large)] == [1, 3]
    again = [launch(("weight", 30 << 20))] * 5
    assert len(launches.command_buffers(again)) == 1, "a buffer that is bound again counts once"


@pytest.mark.parametrize(("chip", "tflops"), [("M1", 2.6), ("M1 Pro", 5.2), ("M1 Max", 10.4), ("M2", 3.6)])
def test_peaks_are_those_that_apple_names(chip, tflops):
    """In its press releases of November 2020, October 2021 and June 2022."""
    assert ledger.MACHINES[chip].flops[mx.float32] == pytest.approx(tflops * 1e12, rel=0.03)


def test_a_phase_takes_the_longer_of_moving_and_computing():
    machine = ledger.Machine(100.0, {mx.float16: 10.0})
    moving = launches.Launch("elementwise", "Add", 300, 200, 0, ())
    computing = launches.Launch("matmul", "Matmul", 50, 50, 40, ())
    assert ledger.roofline([moving, computing], machine, mx.float16) == 5.0 + 4.0


def test_a_kernel_has_the_cores_that_it_has_threadgroups_for_and_no_matrix_units():
    machine = ledger.Machine(1e9, {mx.float16: 40.0, mx.float32: 10.0}, cores=8)
    kernel = launches.Launch("kernel", "group_attention", 0, 0, 30, (), threadgroups=20, effort=2.0)
    assert ledger.roofline([kernel], machine, mx.float16) == 6.0
    assert ledger.roofline([kernel._replace(threadgroups=2)], machine, mx.float16) == 24.0
    assert ledger.roofline([kernel._replace(kind="matmul", effort=1.0)], machine, mx.float16) == 0.75


@pytest.mark.parametrize(
    ("rows", "prompts", "heads", "kv_heads", "size", "length", "width"),
    [
        (8, 1, 16, 8, 128, 1024, 128),
        (8, 1, 16, 8, 128, 4096, 128),
        (64, 8, 16, 8, 128, 1024, 256),
        (64, 8, 16, 8, 128, 4096, 256),
        (8, 1, 32, 8, 128, 4096, 256),
        (64, 8, 14, 2, 64, 1024, 128),
        (16, 16, 14, 2, 64, 1024, 128),
        (64, 8, 28, 4, 128, 2048, 256),
    ],
)
def test_prompts_are_read_by_groups_where_the_ledger_has_that_faster(
    rows, prompts, heads, kv_heads, size, length, width
):
    readers = kv_cache.make_group([row * prompts // rows for row in range(rows)], prompts, None)
    layout = kv_cache.Layout([readers, kv_cache.Group()])
    queries = mx.zeros((rows, heads, 1, size), mx.float16)
    shapes = [(prompts, kv_heads, length, size), (rows, kv_heads, width, size)]
    keys = [mx.zeros(shape, mx.float16) for shape in shapes]

    def seconds(op: Any) -> float:
        def call(queries: mx.array, *keys: mx.array) -> mx.array:
            return op(queries, [(part, part) for part in keys], layout)

        return ledger.roofline(launches.trace(call, queries, *keys), ledger.MACHINES["M4 Pro"], mx.float16)

    with launches.as_on_a_gpu():
        chosen = attention.group_pays(queries, [(part, part) for part in keys])
    assert chosen == (seconds(attention.group_attention) < seconds(attention.slot_attention))


@pytest.mark.parametrize(
    ("rows", "length", "chosen"), [(1, 1024, True), (3, 1000, True), (4, 1024, False), (3, 800, False)]
)
def test_few_threadgroups_take_a_long_prompt_in_pieces(rows, length, chosen):
    queries, keys = mx.zeros((rows, 16, 1, 128)), mx.zeros((1, 8, length, 128))
    own = mx.zeros((rows, 8, 128, 128))
    with launches.as_on_a_gpu():
        assert attention.group_pays(queries, [(keys, keys), (own, own)]) == chosen
    assert not attention.group_pays(queries, [(keys, keys), (own, own)]), "a CPU has no kernels"


def test_layers_that_are_not_traced_are_as_those_that_are():
    work = work_of("random:2m", batch=2, groups=2, max_tokens=8)
    phase = ledger.phase_of(work, "decode", ledger.decode, 7, 1.0)
    whole = traced(ledger.decode, work, work.model.num_hidden_layers)
    assert work.model.num_hidden_layers > ledger.FEW
    assert phase.kinds == Counter(launch.kind for launch in whole)
    assert phase.num_bytes == sum(launch.read + launch.written for launch in whole)
    assert phase.flops == sum(launch.flops for launch in whole)


@pytest.mark.parametrize(
    ("length", "names"), [(128, ["slot_attention"]), (1024, [*["group_attention"] * 2, "group_attention_merge"])]
)
def test_a_decode_step_of_a_long_prompt_reads_it_by_groups(length, names):
    work = work_of("random:2m", prompt_tokens=length, batch=1, groups=4, max_tokens=64)
    found = [launch.name.partition("__")[0] for launch in traced(ledger.decode, work, 1)]
    assert [name for name in found if "attention" in name] == names


@pytest.mark.slow
def test_the_ledger_of_qwen3_06b_holds():
    """
    B=8 G=8 P=128 T=256, float16, rank 16. Bytes of an update's micro-batch were 68.3 GB with float32 adapters, those of
    a judge's chunk 45.3 GB with float32 scores. Those of the gradient of attention count since it is our own: 9.7 GB
    with float32 scores of the columns that a block sees; MLX's moves at least 5.9 GB of 16-bit ones.

    These bounds are for lowering: a change that raises one makes a Mac slower, or says why it does not.
    """
    phases = ledger.make(work_of("random:0.6b", 128, **LARGE)._replace(sharing="off"))
    held = {phase.name: phase for phase in phases}
    most_launches = {"prefill": 510, "decode": 540, "judge": 950, "forward": 935, "backward": 2750, "optimizer": 4050}
    most_ratios = {"prefill": 4.6, "decode": 1.15, "judge": 11.5, "forward": 11.9, "backward": 20.6, "optimizer": 5.3}
    for name, phase in held.items():
        assert sum(phase.kinds.values()) <= most_launches[name], name
        assert 1 <= phase.num_bytes / phase.least_bytes <= most_ratios[name], name
    assert held["forward"].num_bytes + held["backward"].num_bytes < 0.85 * 68.3e9


@pytest.mark.slow
def test_a_micro_batch_with_a_shared_prompt_moves_little_more_than_one_without():
    """B=8 G=8 P=512 T=256: 129 GB with float32 scores. The plain one has fewer positions, 1,534 for 2,042."""
    moved = {}
    for sharing in ("on", "off"):
        work = work_of("random:0.6b", 512, **LARGE)._replace(sharing=sharing)
        phase = ledger.phase_of(work, "gradient", ledger.gradient, 1, 1.0)
        with launches.as_on_a_gpu():
            moved[sharing] = phase.num_bytes / ledger.step_of(work)[0][0].num_positions
    assert moved["on"] < 1.25 * moved["off"]


SHAPES: dict[str, dict[str, Any]] = {
    "Qwen3-0.6B": {},
    "Qwen3-4B": {"hidden_size": 2560, "intermediate_size": 9728, "num_attention_heads": 32},
    "Qwen2.5-0.5B": {
        **{"hidden_size": 896, "intermediate_size": 4864},
        **{"num_attention_heads": 14, "num_key_value_heads": 2, "head_dim": 64},
    },
    "hybrid": {},
}
SLOW = [pytest.param(name, 128, marks=pytest.mark.slow) for name in ("Qwen3-4B", "Qwen2.5-0.5B", "hybrid")]
SLOW += [pytest.param(name, 512, marks=pytest.mark.slow) for name in ("Qwen3-4B", "Qwen2.5-0.5B")]


@pytest.mark.parametrize("layers_again", ["off", "on"])
@pytest.mark.parametrize(("name", "prompt"), [("Qwen3-0.6B", 128), ("Qwen3-0.6B", 512), *SLOW])
def test_what_the_preflight_says_of_an_update_on_a_gpu_is_what_its_trace_holds(name, prompt, layers_again):
    model, num_layers = ("random:0.8b", 4) if name == "hybrid" else ("random:0.6b", 3)
    work = work_of(model, prompt, **LARGE, checkpoint_layers=layers_again)
    kinds = work.model.layer_kinds[:num_layers]
    work = work._replace(model=dataclasses.replace(work.model, layer_kinds=kinds, **SHAPES[name]))
    with launches.as_on_a_gpu():
        need = preflight.estimate(preflight.Demand(work.model, work.dtype, work.config, [prompt] * 8), work.sizes)
    held = launches.peaks(traced(ledger.gradient, work, num_layers))[0]
    assert 0.95 * held < need.activations + max(need.working, need.logprobs) < 1.6 * held


@pytest.mark.slow
def test_the_ledger_of_a_hybrid_counts_a_period_of_layers_and_reads_and_writes_its_states():
    work = work_of("random:0.8b", batch=2, groups=4, max_tokens=8, train_token_budget=2048)
    assert work.period == 4
    whole = ledger.phase_of(work, "decode", ledger.decode, 1, 1.0)
    half = whole._replace(extra=(12 - 4) / (8 - 4))
    moved = sum(one.read + one.written for one in traced(ledger.decode, work, 12))
    assert half.num_bytes == pytest.approx(moved, rel=1e-3)
    state = preflight.state_bytes(work.model, work.dtype)
    assert state == 18 * (16 * 128 * 128 * 4 + 3 * 3 * 16 * 128 * 2)
    with launches.as_on_a_gpu():
        assert whole.num_bytes > ledger.least_bytes(work)["decode"] > 2 * 8 * state


def test_a_result_is_held_until_the_last_launch_that_binds_it():
    chain = [
        launch((binds, 1), (makes, 1), made=((makes, size),))
        for binds, makes, size in (("given", "a", 10), ("a", "b", 20), ("b", "c", 5), ("a", "d", 1))
    ]
    assert launches.peaks(chain)[0] == 35  # a, b and c
    assert launches.peaks(chain[:3])[0] == 30  # a and b: a goes before c is made


def test_the_command_prints_every_phase_and_machine_and_one_object(capsys):
    flags = ["--batch", "2", "--groups", "2", "--prompt-tokens", "6", "--max-tokens", "3", "--share-prefix", "off"]
    flags += ["--token-budget", "9"]
    ledger.main(["--model", "random:2m", *flags, "--machine", "M4 Pro"])
    lines = capsys.readouterr().out.splitlines()
    record = json.loads(lines[-1])["ledger"]
    assert [line.split()[0] for line in lines[2:8]] == list(record)
    assert set(record["decode"]["roofline_ms"]) == {"M4 Pro"}
    assert record["optimizer"]["times"] == 1 and record["forward"]["times"] == 4  # one row each
