"""
What a step costs on a GPU, phase by phase, counted without one: launches, bytes, FLOPs, command buffers, and the time
that a machine's roofline gives: `uv run python -m bench.ledger --model random:0.6b`.

Each phase is traced (`launches.py`) with one period of layers (one layer, or those between two of a kind that comes
seldom) and with a few, and the rest of the layers are as these. Its time is
the sum over launches of the longer of two: the time to move their bytes, and that to compute their FLOPs, at the
published peaks of a chip. No machine reaches either, and waits between launches come on top, so a measured time is
longer. The least bytes of a phase are those that no program could leave away: weights, caches, masters and gradients.

Left out: rewards, tokenizing, what the host does beside building graphs.

Axes: B prompts, G completions of each, N = B * G rows, P prompt and T completion positions, M rows of a micro-batch,
L layers, V vocabulary, J criteria.
"""

import contextlib
import dataclasses
import json
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import cpu_blas  # noqa: F401  (before mlx)
import mlx.core as mx
import mlx.optimizers as optim
from mlx.utils import tree_flatten, tree_unflatten

import gwen
import lora
import preflight
import sampler
import update
from bench import harness, launches
from bench.launches import Launch
from config import Config, Sizes
from disk import hub
from flags import Parser, fail
from judging.prompt_tree import at_ends
from kv_cache import KVCache, SlotCache
from layers import attention, softmax
from layers.delta_state import DeltaState
from layers.tree_cache import TreeCache
from machine import gpu
from step import micro_batch, policy

JUDGE_HEAD, JUDGE_CRITERION, NUM_CRITERIA = 120, 24, 3  # tokens of a rubric's preamble and of a criterion; criteria
REACHED = 0.8  # of a peak: mlx_lm's published prefill and decode of Qwen3-4B on an M4 Max, 81% and 80%
FEW = 4  # layers, at least two periods, that a phase is traced with beside one period


class Machine(NamedTuple):
    """What a machine can do at most."""

    bandwidth: float  # bytes a second
    flops: dict[mx.Dtype, float]  # of matmuls, a second
    limits: tuple[int, int] = (40, 40)  # of a command buffer: operations, and 2**20 elements
    cores: int = 1  # of which a custom kernel's launch uses no more than it has threadgroups


def _chip(bandwidth: float, cores: int, clock: float, limit: int, matrix: int = 256) -> Machine:
    """GB/s, GPU cores, GHz, the limit of a command buffer, and FLOPs of 16-bit matmuls a core and cycle."""
    rates = {mx.float32: 256, mx.float16: matrix, mx.bfloat16: matrix}
    flops = {dtype: cores * clock * 1e9 * rate for dtype, rate in rates.items()}
    return Machine(bandwidth * 1e9, flops, (limit, limit), cores=cores)


# Bandwidths are Apple's, from the technical specifications of each machine at support.apple.com, for the largest GPU.
# A core has 128 FP32 ALUs, of two operations a cycle, and is no faster in 16 bits (github.com/philipturner/
# metal-benchmarks); M5's has matrix units with 1,024 16-bit operations a cycle (tzakharko.github.io/
# apple-neural-accelerators-benchmark). Apple publishes no clocks: 1.278 GHz of M1 and 1.398 GHz of M2 are from
# metal-benchmarks, those of M3 and M4 from hmc-tech.com/gpu, M5's 1.578 GHz from michaelstinkerings.org/
# apple-m5-gpu-roofline-analysis, which measured 122 GB/s and 3.76 TFLOPS of its float32; M5 Pro and Max are taken to
# have it too. Limits: see `launches.command_buffers`.
MACHINES = {
    "M1": _chip(68.25, 8, 1.278, 40),
    "M1 Pro": _chip(200, 16, 1.296, 50),
    "M1 Max": _chip(400, 32, 1.296, 50),
    "M2": _chip(100, 10, 1.398, 40),
    "M2 Pro": _chip(200, 19, 1.398, 50),
    "M2 Max": _chip(400, 38, 1.398, 50),
    "M3": _chip(100, 10, 1.398, 40),
    "M3 Pro": _chip(150, 18, 1.398, 50),
    "M3 Max": _chip(400, 40, 1.398, 50),
    "M4": _chip(120, 10, 1.470, 40),
    "M4 Pro": _chip(273, 20, 1.578, 50),
    "M4 Max": _chip(546, 40, 1.678, 50),
    "M5": _chip(153, 10, 1.578, 40, 1024),
    "M5 Pro": _chip(307, 20, 1.578, 50, 1024),
    "M5 Max": _chip(614, 40, 1.578, 50, 1024),
}


class StepWork(NamedTuple):
    """A step: the model's shape and type, and the settings of the run."""

    model: hub.ModelConfig
    dtype: mx.Dtype
    config: Config  # batch, groups, max_tokens, lora_rank, train_token_budget and the rest
    prompt_tokens: int
    on_gpu: bool = True
    sharing: str = "auto"  # of an update's prompts, see `micro_batch.plan`

    @property
    def num_rows(self) -> int:
        return self.config.sampling.batch * self.config.sampling.groups

    @property
    def sizes(self) -> Sizes:
        lengths = [self.prompt_tokens] * self.config.sampling.batch
        return preflight.settle(preflight.Demand(self.model, self.dtype, self.config, lengths))

    @property
    def period(self) -> int:
        """After how many layers their kinds come again."""
        kinds = self.model.layer_kinds
        return next(n for n in range(1, len(kinds) + 1) if kinds[:n] * (len(kinds) // n) == kinds)

    def learner(self, model: gwen.Model) -> update.Learner:
        return update.Learner(model, self.config, policy.Reader(self.config, self.sizes))


class Phase(NamedTuple):
    """One phase, traced with one period of layers and with a few."""

    name: str
    times: float  # a step
    least_bytes: float  # each time
    one: list[Launch]
    few: list[Launch]
    extra: float  # layers beyond those of `one`, in units of those that `few` has more
    build_s: float  # to build its graph in Python, each time
    live: float  # buffers that exist at once, at most; of a backward pass with those of the forward pass

    def total(self, measure: Callable[[Sequence[Launch]], float]) -> float:
        """What a measure gives for all layers."""
        one = measure(self.one)
        return one + self.extra * (measure(self.few) - one)

    @property
    def num_bytes(self) -> float:
        return self.total(lambda held: sum(launch.read + launch.written for launch in held))

    @property
    def flops(self) -> float:
        return self.total(lambda held: sum(launch.flops for launch in held))

    @property
    def kinds(self) -> dict[str, int]:
        """Launches by kind."""
        one, few = (Counter(launch.kind for launch in held) for held in (self.one, self.few))
        return {kind: round(one[kind] + self.extra * (few[kind] - one[kind])) for kind in few}

    def buffers(self, machine: Machine) -> float:
        return self.total(lambda held: len(launches.command_buffers(held, *machine.limits)))

    def seconds(self, machine: Machine, dtype: mx.Dtype) -> float:
        return self.total(lambda held: roofline(held, machine, dtype))

    def longest_buffer(self, machine: Machine, dtype: mx.Dtype) -> float:
        """Seconds of the command buffer that takes the longest."""
        return max(roofline(held, machine, dtype) for held in launches.command_buffers(self.few, *machine.limits))


def roofline(held: Sequence[Launch], machine: Machine, dtype: mx.Dtype) -> float:
    """Seconds that launches take at a machine's peaks, one after the other."""
    return sum(
        max((launch.read + launch.written) / machine.bandwidth, computing(launch, machine, dtype)) for launch in held
    )


def computing(launch: Launch, machine: Machine, dtype: mx.Dtype) -> float:
    """Seconds of arithmetic. Custom kernels know no matrix units, and each core runs threadgroups of its own."""
    if launch.kind != "kernel":
        return launch.flops / machine.flops[dtype]
    busy = min(launch.threadgroups / machine.cores, 1.0)
    return launch.flops * launch.effort / min(machine.flops.values()) / busy


# ---- phases: each gives a function of arrays, and the arrays


Traced = tuple[Callable[..., Any], list[mx.array]]


def make_model(work: StepWork, num_layers: int) -> gwen.Model:
    """The model with fewer layers; nothing of it is ever computed."""
    model = gwen.Model(dataclasses.replace(work.model, layer_kinds=work.model.layer_kinds[:num_layers]))
    model.set_dtype(work.dtype)
    if work.config.model.lora_rank:
        lora.apply(model, work.config.model.lora_rank, work.config.model.lora_scale, work.config.model.lora_targets)
    return model


def closed(model: gwen.Model, run: Callable[..., Any], given: Sequence[mx.array], *, learns: bool = False) -> Traced:
    """
    `run` as a function of the model's weights and of what is given.

    learns: adapters are among the weights; else they are fixed, with the copies that they make of themselves.
    """
    if not learns:
        fixed = [layer for _, layer in lora.layers(model)]
        mx.eval([(layer.lora_a, layer.lora_b) for layer in fixed])
        mx.eval([layer.rounded(model.head_weight.dtype) for layer in fixed])
    parameters = [(n, array) for n, array in tree_flatten(model.parameters()) if learns or "lora_" not in n]
    names, weights = (list(column) for column in zip(*parameters, strict=True))

    def function(*arrays: mx.array) -> Any:
        model.update(tree_unflatten(list(zip(names, arrays[: len(names)], strict=True))))
        return run(*arrays[len(names) :])

    return function, [*weights, *given]


def empty_state(work: StepWork, num_rows: int) -> tuple[mx.array, mx.array]:
    """What a gated delta net keeps of so many rows."""
    assert work.model.delta is not None
    return work.model.delta.empty_state(num_rows, work.dtype)


def prefill(work: StepWork, num_layers: int) -> Traced:
    """All prompts of a step, as `sampler.prefill` takes them."""
    model, num_prompts = make_model(work, num_layers), work.config.sampling.batch
    columns = max(gpu.prefill_tokens() // num_prompts, 1)

    @gpu.without_gradients()
    def run(tokens: mx.array) -> list[mx.array]:
        cache = KVCache(work.model.layer_kinds[:num_layers], work.prompt_tokens)
        for begin in range(0, work.prompt_tokens, columns):
            hidden = model.hidden(tokens[:, begin : begin + columns], cache)
        return [hidden[:, -1] @ model.head_weight.T, *cache.arrays()]

    return closed(model, run, [mx.zeros((num_prompts, work.prompt_tokens), mx.int32)])


def decode(work: StepWork, num_layers: int) -> Traced:
    """A step in the middle of completions: a token of every row is drawn, and the next one's logits are made."""
    model, config, num_rows, length = make_model(work, num_layers), work.model, work.num_rows, work.prompt_tokens
    lengths = [length] * work.config.sampling.batch
    prompts = KVCache(config.layer_kinds[:num_layers], length)
    for layer in prompts.layers:
        if isinstance(layer, DeltaState):
            layer.update(*empty_state(work, len(lengths)))
            continue
        shape = (len(lengths), config.num_key_value_heads, layer.capacity, config.head_dim)
        layer.length, layer.keys = length, mx.zeros(shape, work.dtype)
        layer.values = layer.keys
    prompts.advance(length)
    share = attention.shares_prefix(num_rows, lengths, num_rows, work.dtype)
    cache = SlotCache(prompts, num_rows, work.config.sampling.max_tokens, share)
    cache.skip(work.config.sampling.max_tokens // 2)
    cache.assign([row // work.config.sampling.groups for row in range(num_rows)], [0] * num_rows)
    for layer in cache.layers:
        if isinstance(layer, DeltaState):
            layer.update(*empty_state(work, num_rows))
    layers = [*prompts.layers, *cache.layers]
    places = [(one, n) for one in layers for n in vars(one) if n in ("keys", "values", "inputs", "memory")]
    mx.eval(cache.first_position, [array for array in cache.readers[:2] if array is not None] if share else [])
    params = sampler.SamplingParams(work.config.sampling.max_tokens)

    steps: list[gwen.Step] = []

    @gpu.without_gradients()
    def run(logits: mx.array, numbers: mx.array, *held: mx.array) -> list[mx.array]:
        for (layer, name), array in zip(places, held, strict=True):
            setattr(layer, name, array)
        drawn = sampler.choose_token(logits, numbers, params)
        if not steps:  # with the weights that are given
            steps.append(gwen.decode_step(model))
        hidden = steps[0](drawn[0][:, None], cache)
        return [*drawn[:2], hidden[:, -1] @ model.head_weight.T, *cache.arrays()]

    given = [mx.zeros((num_rows, config.vocab_size), work.dtype), mx.zeros((num_rows, 4))]
    return closed(model, run, [*given, *(getattr(*place) for place in places)])


def judge(work: StepWork, num_layers: int) -> Traced:
    """A chunk of evaluations by logits: answers under their question, and criteria under each, adapters off."""
    model, config = make_model(work, num_layers), work.model
    num_criteria = max(work.config.judge.chunk_size // NUM_CRITERIA, 1) * NUM_CRITERIA
    num_answers = num_criteria // NUM_CRITERIA
    num_questions = max(num_answers // work.config.sampling.groups, 1)
    kinds, roots = config.layer_kinds[:num_layers], [0] * num_questions
    above = [(1, JUDGE_HEAD, None), (num_questions, work.prompt_tokens, roots)]  # levels: rows, tokens, parents
    levels: list[mx.array] = []  # of each level and layer two: keys and values, or what a gated delta net keeps
    for num_rows, length, _ in above:
        keys = mx.zeros((num_rows, config.num_key_value_heads, length, config.head_dim), work.dtype)
        for kind in kinds:
            levels += empty_state(work, num_rows) if kind == "linear_attention" else (keys, keys)

    def run(answers: mx.array, criteria: mx.array, *levels: mx.array) -> mx.array:
        cache, held = TreeCache(kinds), iter(zip(levels[::2], levels[1::2], strict=True))
        for num_rows, length, parents in above:  # as if these had been computed
            cache = cache.child([length] * num_rows, parents)
            for layer in cache.layers:
                layer.update(*next(held))
            cache.advance(length)
        asked = [row * num_questions // num_answers for row in range(num_answers)]
        cache = cache.child([work.config.sampling.max_tokens] * num_answers, asked)
        with lora.disabled(model):
            model.hidden(answers, cache)
            cache = cache.child([JUDGE_CRITERION] * num_criteria, [row // NUM_CRITERIA for row in range(num_criteria)])
            ends = at_ends(model.hidden(criteria, cache), [JUDGE_CRITERION] * num_criteria)
        return softmax.log_softmax(ends @ model.head_weight.T)

    tokens = [(num_answers, work.config.sampling.max_tokens), (num_criteria, JUDGE_CRITERION)]
    return closed(model, run, [*(mx.zeros(shape, mx.int32) for shape in tokens), *levels])


def step_of(work: StepWork) -> tuple[list[micro_batch.MicroBatch], policy.Targets]:
    """The micro-batches of a step whose completions all have the most tokens, and their targets."""
    shape, config = (work.num_rows, work.config.sampling.max_tokens), work.config
    empty = sampler.Rollout(mx.zeros(shape, mx.int32), mx.zeros(shape), mx.ones(shape), [], None)  # type: ignore[arg-type]
    prompts = [[row // config.sampling.groups] * work.prompt_tokens for row in range(work.num_rows)]
    made = micro_batch.micro_batches(prompts, empty, work.sizes.train_token_budget, work.sharing)
    advantages, num_items = mx.zeros((work.num_rows,)), work.num_rows * config.sampling.max_tokens
    mx.eval(made, advantages, empty.mask)
    return made, policy.Targets(work.num_rows, num_items, advantages)


def forward(work: StepWork, num_layers: int) -> Traced:
    """The loss of a micro-batch, without its gradient."""
    model = make_model(work, num_layers)
    learner, (batches, targets) = work.learner(model), step_of(work)

    def run() -> list[mx.array]:
        loss, logprobs, sums = learner.reader.share(model, batches[0], targets)
        return [loss * learner.loss_scale.value, logprobs, *sums.values()]

    return closed(model, run, [], learns=True)


def gradient(work: StepWork, num_layers: int) -> Traced:
    """The loss of a micro-batch and its gradient, added to what the step has so far."""
    model = make_model(work, num_layers)
    learner, (batches, targets) = work.learner(model), step_of(work)
    so_far = [mx.zeros(array.shape) for _, array in tree_flatten(model.trainable_parameters())]

    def run(*so_far: mx.array) -> list[mx.array]:
        (loss, logprobs, sums), part = update.share_and_gradient(learner, batches[0], targets)
        flat = [array.astype(mx.float32) / learner.loss_scale.value for _, array in tree_flatten(part)]
        joined = flat if len(batches) == 1 else [a + b for a, b in zip(so_far, flat, strict=True)]
        # as the chain of gradients runs, from the last layer
        return [loss, logprobs, *sums.values(), *reversed(joined)]

    return closed(model, run, so_far, learns=True)


def optimizer(work: StepWork, num_layers: int) -> Traced:
    """Clipping, AdamW on the masters, and the masters into the model."""
    model = make_model(work, num_layers)
    learner = work.learner(model)
    names, masters = (list(column) for column in zip(*learner.trainable.items(), strict=True))
    state_names, state = (list(column) for column in zip(*tree_flatten(learner.optimizer.state), strict=True))

    def run(*arrays: mx.array) -> list[mx.array]:
        num = len(names)
        grads, held, states = arrays[:num], arrays[num : 2 * num], arrays[2 * num :]
        learner.optimizer.state = tree_unflatten(list(zip(state_names, states, strict=True)))
        clipped, norm = optim.clip_grad_norm(tree_unflatten(list(zip(names, grads, strict=True))), 1.0)
        changed = learner.optimizer.apply_gradients(clipped, tree_unflatten(list(zip(names, held, strict=True))))
        update.install(model, dict(tree_flatten(changed)))
        made = [array for _, array in tree_flatten([changed, learner.optimizer.state, model.trainable_parameters()])]
        return [norm, *made]

    gradients = [mx.zeros(array.shape) for array in masters]
    return closed(model, run, [*gradients, *masters, *state], learns=True)


# ---- the ledger


def least_bytes(work: StepWork) -> dict[str, float]:
    """Of each phase, what no program could leave away."""
    shapes = tree_flatten(make_model(work, work.model.num_hidden_layers).parameters())
    weights = sum(array.nbytes for name, array in shapes if work.model.tie_word_embeddings or "embed" not in name)
    adapters = sum(array.nbytes for name, array in shapes if "lora_" in name)
    config, size = work.config, work.dtype.size
    column, state = preflight.column_bytes(work.model, work.dtype), preflight.state_bytes(work.model, work.dtype)
    share = attention.shares_prefix(
        work.num_rows, [work.prompt_tokens] * config.sampling.batch, work.num_rows, work.dtype
    )
    prompts = column * work.prompt_tokens * (config.sampling.batch if share else work.num_rows)
    own = column * work.num_rows * config.sampling.max_tokens / 2
    answers = max(config.judge.chunk_size // NUM_CRITERIA, 1)
    judged = column * (JUDGE_HEAD + work.prompt_tokens * max(answers // config.sampling.groups, 1))
    batch = step_of(work)[0][0]
    kept = size * batch.num_positions * work.model.hidden_size * work.model.num_hidden_layers
    masters = adapters if config.model.lora_rank else 4 * weights / size
    return {
        "prefill": weights + (column * work.prompt_tokens + state) * config.sampling.batch,
        "decode": weights + prompts + own + (column + 2 * state) * work.num_rows,
        "judge": weights - adapters + judged,
        "forward": weights,
        "backward": weights + 2 * kept + masters,  # one array a layer is kept, the gradient of the weights written
        "optimizer": 7 * masters,  # the gradient, masters and two moments read, these three written
    }


def make(work: StepWork) -> list[Phase]:
    """The ledger of a step."""
    with launches.as_on_a_gpu() if work.on_gpu else contextlib.nullcontext():
        least, num_batches = least_bytes(work), len(step_of(work)[0])
    chunks = work.num_rows * NUM_CRITERIA / max(work.config.judge.chunk_size // NUM_CRITERIA, 1) / NUM_CRITERIA
    times = {"prefill": 1, "decode": work.config.sampling.max_tokens - 1, "judge": chunks}
    makers = {"prefill": prefill, "decode": decode, "judge": judge, "forward": forward, "gradient": gradient}
    made = {}
    for name, maker in (makers | {"optimizer": optimizer}).items():
        made[name] = phase_of(work, name, maker, times.get(name, num_batches), least.get(name, 0.0))
    made["optimizer"] = made["optimizer"]._replace(times=1)
    backward = made["gradient"]
    made["gradient"] = backward._replace(
        name="backward",
        least_bytes=least["backward"],
        one=_without(backward.one, made["forward"].one),
        few=_without(backward.few, made["forward"].few),
        build_s=backward.build_s - made["forward"].build_s,
    )
    return list(made.values())


def phase_of(work: StepWork, name: str, maker: Callable[[StepWork, int], Traced], times: float, least: float) -> Phase:
    num_layers = work.model.num_hidden_layers
    traces: list[list[Launch]] = []
    one = work.period
    few = min(max(FEW, 2 * one), num_layers)
    with launches.as_on_a_gpu() if work.on_gpu else contextlib.nullcontext():
        for count in (one, few):
            function, inputs = maker(work, count)
            traces.append(launches.trace(function, *inputs, on_gpu=work.on_gpu))
        function, inputs = maker(work, num_layers)
        build_s = launches.build_seconds(function, *inputs, on_gpu=work.on_gpu)
    extra = (num_layers - one) / (few - one) if few > one else 0.0
    one_live, few_live = (launches.peaks(held)[1] for held in traces)
    return Phase(name, times, least, traces[0], traces[1], extra, build_s, one_live + extra * (few_live - one_live))


def _without(held: Sequence[Launch], others: Sequence[Launch]) -> list[Launch]:
    """What is left of launches when others are taken away, of which each does the same as one of them."""
    gone = Counter(launch[:5] for launch in others)
    left = []
    for launch in held:
        if gone[launch[:5]]:
            gone[launch[:5]] -= 1
        else:
            left.append(launch)
    return left


def record(work: StepWork, phases: Sequence[Phase], machines: dict[str, Machine]) -> dict[str, dict[str, Any]]:
    """What each phase does, each time, and how long it takes where."""
    base, dtype = next(iter(machines.values())), work.dtype
    return {
        phase.name: {
            "times": phase.times,
            "launches": phase.kinds,
            "bytes": round(phase.num_bytes),
            "least_bytes": round(phase.least_bytes),
            "flops": round(phase.flops),
            "command_buffers": round(phase.buffers(base)),
            "build_ms": round(phase.build_s * 1e3, 2),
            "live_buffers": round(phase.live),
            "roofline_ms": {name: round(phase.seconds(m, dtype) * 1e3, 3) for name, m in machines.items()},
            "longest_buffer_ms": {name: round(phase.longest_buffer(m, dtype) * 1e3, 3) for name, m in machines.items()},
        }
        for phase in phases
    }


def lines(held: dict[str, dict[str, Any]], tokens: int) -> Iterator[str]:
    """The record as two tables; tokens: that a step trains."""
    yield (
        f"{'phase':<10} {'a step':>7} {'launches':>9} {'matmul':>7} {'kernel':>7} {'fast':>5} {'elem.':>6} {'copy':>5} "
        f"{'other':>6} {'MB':>9} {'least MB':>9} {'ratio':>6} {'GFLOP':>8} {'buffers':>8} {'build ms':>9} {'live':>7}"
    )
    for name, phase in held.items():
        named = [phase["launches"].get(kind, 0) for kind in ("matmul", "kernel", "fast", "elementwise", "copy")]
        total, moved, least = sum(phase["launches"].values()), phase["bytes"] / 1e6, phase["least_bytes"] / 1e6
        yield (
            f"{name:<10} {phase['times']:>7.4g} {total:>9} {named[0]:>7} {named[1]:>7} {named[2]:>5} {named[3]:>6} "
            f"{named[4]:>5} {total - sum(named):>6} {moved:>9.1f} {least:>9.1f} {moved / least:>6.2f} "
            f"{phase['flops'] / 1e9:>8.1f} {phase['command_buffers']:>8} {phase['build_ms']:>9.1f} "
            f"{phase['live_buffers']:>7}"
        )
    yield f"live: buffers that exist at once; Metal lets a process hold {launches.MOST_BUFFERS:,}"
    yield ""
    names = "".join(f"{name + ' ms':>13}" for name in held)
    yield f"{'roofline':<8}{names} {'step s':>8} {'at 80%':>8} {'tok/s':>7} longest buffer ms"
    for name in held["decode"]["roofline_ms"]:
        each = [phase["roofline_ms"][name] for phase in held.values()]
        step = sum(one * phase["times"] for one, phase in zip(each, held.values(), strict=True)) / 1e3
        longest = max(phase["longest_buffer_ms"][name] for phase in held.values())
        yield (
            f"{name:<8}{''.join(f'{one:>13.2f}' for one in each)} {step:>8.2f} {step / REACHED:>8.2f} "
            f"{tokens / step:>7.0f} {longest:>17.1f}"
        )


def main(argv: list[str] | None = None) -> None:
    parser = Parser("bench.ledger", "Count what a GPU would do in one step, and run nothing.")
    least = harness.add_step(parser)
    parser.add_argument("--machine", nargs="+", choices=tuple(MACHINES), default=list(MACHINES), help="(default: all)")
    parser.add_argument("--dtype", choices=tuple(gwen.DTYPES), default="float16", help="of the weights")
    try:
        args = harness.parse(parser, argv, least)
        config = harness.settings(args, args.model)
        budget = args.token_budget or preflight.GPU_BUDGET
        config = config.but(train_token_budget=budget, checkpoint_layers="off")
        shape, dtype = gwen.load_config(args.model), gwen.DTYPES[args.dtype]
        work = StepWork(shape, dtype, config, args.prompt_tokens, sharing=args.share_prefix)
        held = record(work, make(work), {name: MACHINES[name] for name in args.machine})
        print(f"Ledger: {harness.describe(args)} in {args.dtype}, {budget} positions a micro-batch")
        for line in lines(held, work.num_rows * args.max_tokens):
            print(line)
        print(json.dumps({"config": vars(args), "ledger": held}))
    except (ValueError, OSError) as error:
        fail(error)


if __name__ == "__main__":
    main()
