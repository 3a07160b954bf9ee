"""
The memory that a run will need, from its settings and the model's configuration alone: `uv run preflight.py --model M`.

A step needs what stays (weights, adapters, the optimizer's state, Python) and then, in turn, what a rollout, the judge
or an update holds; the largest of them decides. The longest prompts and completions of `--max-tokens` are assumed, so a
step may need less. The constants are measured on MLX's CPU backend, where the figure is within 10% of the peak, by a
test.

Axes: M rows of a micro-batch, P prompt and T completion positions, S keys, V vocabulary, C hidden, H query heads,
K kv heads, D head dim, F mlp width.
"""

import itertools
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import cpu_blas  # noqa: F401  (before mlx)
import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten

import gwen
import lora
from config import Config, Sizes, Switch
from disk import checkpoint, hub
from disk.run_files import read_log
from flags import Parser, check_least, fail, flag_of, visible
from judging import rubrics
from kv_cache import round_up
from layers import attention, delta, lm_head
from machine import alive, chips, gpu, world
from problems.examples import prompt_text, short
from settings.sources import given, parse, resolve
from step import batch, dispatch
from turns.episodes import context_of

LAPTOP = 2 * 2**34 // 3  # bytes that macOS recommends for a GPU's working set on 16 GB, 11.45e9
PYTHON = 300_000_000  # bytes: 118 MB with a small tokenizer, 105 more for 151,643 tokens, 30 for reading data
# Positions of a micro-batch. On a CPU 8192 took as long for random:2m and 1.5 times as long for random:30m as 1024.
BUDGET, GPU_BUDGET = 1024, 2048
# What a gradient holds beside the layers it keeps, in layers: measured 1.5 to 1.8 and 2.5 to 3.1 over seven shapes.
WORKING_LAYERS, WORKING_LAYERS_CHECKPOINTED = 1.7, 2.9
# The same on a GPU: counted 0.3 to 0.5 and 1.3 to 1.5 in traces of four shapes; MLX runs some launches ahead.
GPU_WORKING_LAYERS, GPU_WORKING_LAYERS_CHECKPOINTED = 1.0, 2.0
# The same of gated delta nets, of one level of a tree, which are computed one after the other; and what a forward pass
# takes of what it would keep for a gradient
LINEAR_WORKING_LAYERS, LINEAR_WORKING_LAYERS_CHECKPOINTED, LINEAR_SHARE = 1.1, 2.2, 0.47
DISK = 2e9  # bytes a second; an assumption: Apple's laptops read about 1.5 to 6 GB/s
TEMPLATE = 30  # tokens that a chat template and a judge's tags add to a text; four characters of which are a token
TILES_IN_FLIGHT = 9  # of log-probabilities, those that MLX runs ahead with


class Need(NamedTuple):
    """Bytes."""

    weights: int
    adapters: int  # and their copies in 16 bits; or the float32 masters of a model whose own weights are trained
    optimizer: int
    cache: int  # of a rollout: keys and values
    decoding: int  # of a rollout: prefill and logits
    gradients: int  # of an update: those of the micro-batches so far
    activations: int  # of an update: what layers keep for the gradient
    working: int  # of an update: what one layer's gradient takes beside that
    logprobs: int  # of an update: what log-probabilities take, while no layer is at work
    stepping: int  # of an update: the gradient, and what AdamW makes of it while old tensors go
    judge: int = 0  # weights of a judge that is not the policy without its adapters; of a KL term's reference too
    judging: int = 0  # the judge's cache and forward pass
    teacher: int = 0  # its weights, or its head where it stays on disk, and what it says of a step's completions
    teaching: int = 0  # of a teacher on disk: two of its layers, its embeddings, and two arrays per position of a step
    reading: int = 0  # bytes that a step reads from disk, which are held nowhere
    python: int = PYTHON

    @property
    def resident(self) -> int:
        return self.weights + self.adapters + self.optimizer + self.teacher + self.judge + self.python

    @property
    def rollout(self) -> int:
        return self.cache + self.decoding

    @property
    def update(self) -> int:
        return max(self.gradients + self.activations + max(self.working, self.logprobs), self.stepping)

    @property
    def total(self) -> int:
        return self.resident + max(self.rollout, self.judging, self.teaching, self.update)


def layer_bytes(model: hub.ModelConfig, dtype: mx.Dtype, keys: float, kind: str) -> float:
    """
    What one position keeps of one layer of a kind for the gradient, with `keys` keys to each query.

    Found by doubling each width in turn: measured on a CPU, where in 16 bits it is 2 to 8% less, since softmax and
    swiglu compute in float32; and on a GPU with kernels counted in the trace of an update (`c148fd6:bench/launches.py`).
    """
    if kind == "linear_attention":
        assert model.delta is not None
        _, num_heads, key_dim, value_dim, _ = model.delta
        channels, values = sum(model.delta.widths), model.delta.widths[-1]
        if has_kernels():
            widths = 3 * model.intermediate_size + 4 * model.hidden_size + 3 * channels + 2 * values
            return dtype.size * widths + 12 * channels + 16 * values
        of_chunks = num_heads * (34 * delta.CHUNK + 4 * key_dim * value_dim / delta.CHUNK + 28 * key_dim)
        return 24 * model.intermediate_size + 17 * model.hidden_size + 20 * channels + 41 * values + of_chunks
    num_queries, num_kv = (n * model.head_dim for n in (model.num_attention_heads, model.num_key_value_heads))
    num_queries *= 1 + model.family.output_gate
    scores = 0 if attention.is_fused(model.head_dim) else 4 * model.num_attention_heads * keys
    if has_kernels():
        widths = 3 * model.intermediate_size + 4 * model.hidden_size + 4 * num_queries + 3 * num_kv
        return dtype.size * widths + scores
    return 24 * model.intermediate_size + 17 * model.hidden_size + 18 * num_queries + 10 * num_kv + scores


def forward_bytes(model: hub.ModelConfig, dtype: mx.Dtype, keys: float) -> float:
    """What one position takes of a layer without a gradient, of the kind that takes the most."""
    loops = 0.0 if has_kernels() else 8 * model.num_attention_heads * keys  # arrays between the loops of cpu.exp
    return loops + max(
        layer_bytes(model, dtype, keys, kind) * (LINEAR_SHARE if kind == "linear_attention" else 1)
        for kind in set(model.layer_kinds)
    )


def has_kernels() -> bool:
    """Whether a layer runs on a GPU's kernels, which keep what they read in the weights' type and nothing else."""
    return gpu.on_gpu() and gpu.is_wanted()


class Demand(NamedTuple):
    """What decides the memory of a run, besides `Sizes`."""

    model: hub.ModelConfig
    dtype: mx.Dtype
    config: Config
    prompt_lengths: list[int]  # or of the conversations of --loss-type sft
    rubric: Path | None = None  # of the judge


def estimate(demand: Demand, sizes: Sizes) -> Need:
    """What a run needs at most. A teacher that does not fit beside it stays on disk."""
    need = _estimate(demand, sizes, False)
    if need.total > gpu.memory_size() and has_files(demand.config.objective.teacher):
        return _estimate(demand, sizes, True)
    return need


def has_files(teacher: str) -> bool:
    """Whether a teacher can be read from disk as it is needed."""
    return bool(teacher) and teacher != "self" and not teacher.startswith("random:")


def _estimate(demand: Demand, sizes: Sizes, teacher_on_disk: bool) -> Need:
    model, dtype, config, prompt_lengths, _ = demand
    samples = config.objective.loss_type != "sft"
    if not samples:
        config = config.but(groups=1, max_tokens=1)
    shapes = gwen.Model(model)  # lazy: nothing of it is ever computed
    all_weights = sum(array.size for _, array in tree_flatten(shapes.parameters()))
    if config.model.lora_rank:
        lora.apply(shapes, config.model.lora_rank, config.model.lora_scale, config.model.lora_targets)
    trained = sum(array.size for _, array in tree_flatten(shapes.trainable_parameters()))
    # float32 weights are their own masters
    masters = trained if config.model.lora_rank or dtype != mx.float32 else 0
    longest = sorted(prompt_lengths)[-config.sampling.batch :]
    num_batches, activations, working, logprobs = _update(model, dtype, config, sizes, longest)
    cache, decoding = _rollout(model, dtype, config, sizes, longest) if samples else (0, 0)
    return Need(
        weights=all_weights * dtype.size,
        adapters=(4 + (dtype.size if config.model.lora_rank and dtype != mx.float32 else 0)) * masters,
        optimizer=8 * trained,
        cache=cache,
        decoding=decoding,
        gradients=4 * trained * (num_batches > 1),
        activations=activations,
        working=working,
        logprobs=logprobs,
        stepping=7 * trained,  # measured: 5 to 7
        **_judge(demand, longest),
        **(_teacher(model, dtype, config, longest, teacher_on_disk) if config.objective.teacher else {}),
    )


def _judge(demand: Demand, prompts: list[int]) -> dict[str, int]:
    """A judge's fields of `Need`. Its prompts are a tree (judge.py): questions, answers, criteria."""
    model, dtype, config, _, rubric = demand
    judged = rubric is not None and not config.judge.url
    other = judged and not config.judges_itself
    with gwen.named_by("--judge-model"):
        shape = gwen.load_config(config.judge.model) if other else model
    is_copied = not config.model.lora_rank and config.objective.teacher != "self"  # the model before training
    held = 0
    if other or (is_copied and (judged or config.objective.beta)):
        held = sum(array.size for _, array in tree_flatten(gwen.Model(shape).parameters())) * dtype.size
    if not judged or rubric is None:
        return {"judge": held}
    asked = rubrics.load_rubric(rubric)
    head, criterion = (
        TEMPLATE + len(text) // 4 for text in (asked.preamble, max((c.text for c in asked.criteria), key=len))
    )
    rows = config.judge.chunk_size
    answers = max(rows // len(asked.criteria), 1)
    questions = prompts[-answers:]
    longest, length = max(questions), config.sampling.max_tokens
    keys = head + longest + length + criterion
    columns = head + len(questions) * longest + answers * length + rows * criterion
    if config.judge.mode == "decode":
        columns += rows * (round_up(keys) + round_up(config.judge.think + rubrics.REPLY_TOKENS))
    positions = max(len(questions) * longest, answers * length, rows * criterion)
    working = 1.1 * positions * forward_bytes(shape, dtype, keys) + 4 * 4 * rows * shape.vocab_size
    nodes = 1 + len(questions) + answers + rows  # each keeps a state
    kept = column_bytes(shape, dtype) * columns + state_bytes(shape, dtype) * nodes
    return {"judge": held, "judging": int(kept + working)}


def _teacher(
    model: hub.ModelConfig, dtype: mx.Dtype, config: Config, prompts: list[int], on_disk: bool
) -> dict[str, int]:
    """
    A teacher's fields of `Need`. What it says are the hidden states of all completions.

    The model's own base, which teaches a run that trains all weights, is a copy.
    """
    other = config.objective.teacher != "self"
    with gwen.named_by("--teacher"):
        shape = gwen.load_config(config.objective.teacher) if other else model
    held, num_tokens = 0, config.sampling.batch * config.sampling.groups * config.sampling.max_tokens
    said = num_tokens * dtype.size * shape.hidden_size
    teacher = gwen.Model(shape)  # lazy: nothing of it is ever computed
    if other or not config.model.lora_rank:
        held = sum(array.size for _, array in tree_flatten(teacher.parameters())) * dtype.size
    if not on_disk:
        return {"teacher": held + said}
    layer = max(sum(array.size for _, array in tree_flatten(one.parameters())) for one in teacher.layers) * dtype.size
    head, positions = teacher.head_weight.size * dtype.size, config.sampling.groups * sum(prompts) + num_tokens
    streams = 2 * dtype.size * shape.hidden_size * positions
    embeddings = 0 if shape.tie_word_embeddings else head
    return {"teacher": head + said, "teaching": 2 * layer + embeddings + 2 * streams, "reading": held}


def _update(
    model: hub.ModelConfig, dtype: mx.Dtype, config: Config, sizes: Sizes, prompts: list[int]
) -> tuple[int, int, int, int]:
    """
    Number of micro-batches when all completions are as long as allowed, and bytes of what the largest of them keeps, of
    its backward pass, and of its log-probabilities.
    """
    width, length, layers = model.hidden_size, config.sampling.max_tokens, model.num_hidden_layers
    kinds = model.layer_kinds[sizes.checkpoint_layers :]  # of the layers that are kept
    kept, attentions = len(kinds), sum(kind != "linear_attention" for kind in kinds)
    counts = WORKING_LAYERS, WORKING_LAYERS_CHECKPOINTED
    if has_kernels():
        counts = GPU_WORKING_LAYERS, GPU_WORKING_LAYERS_CHECKPOINTED
    linear_counts = LINEAR_WORKING_LAYERS, LINEAR_WORKING_LAYERS_CHECKPOINTED
    working, linear_working = counts[kept < layers], linear_counts[kept < layers]
    rows = [row for place, num in enumerate(prompts) for row in [[place] * num] * config.sampling.groups]
    lengths = np.full(len(rows), length)
    shared, cut = batch.plan(rows, lengths, sizes.train_token_budget, "auto")
    most = (0, 0, 0)
    for part, num_positions in cut:
        longest = max(len(rows[row]) for row in part)
        keys, at_once = float(longest + length - 1), num_positions
        if shared:  # the prompt's own positions see the prompt alone
            of_completions = len(part) * (length - 1)
            keys = (of_completions * keys + (num_positions - of_completions) * longest) / num_positions
            at_once = max(of_completions, num_positions - of_completions)
        one_layer = num_positions * layer_bytes(model, dtype, keys, "full_attention")
        linear = at_once * layer_bytes(model, dtype, keys, "linear_attention") if model.delta else 0
        kept_bytes = num_positions * sum(layer_bytes(model, dtype, keys, kind) for kind in kinds)
        copies = len(part) * longest if shared and gpu.on_gpu() else 0  # of prompts' keys and values, joined
        inputs = num_positions * dtype.size * width * (layers - kept)  # of the layers that are computed again
        inputs += 2 * dtype.size * model.num_key_value_heads * model.head_dim * copies * attentions
        inputs += len(part) * state_bytes(model, dtype) if shared else 0
        num_tokens = num_positions if config.objective.loss_type == "sft" else len(part) * length
        logprobs = num_tokens * width * (8 + 2 * dtype.size)
        if has_kernels():  # logits of some rows, and their gradient
            logprobs += 2 * dtype.size * min(lm_head.ROWS_AT_ONCE, num_tokens) * model.vocab_size
        else:
            tiles = 4 * min(TILES_IN_FLIGHT * lm_head.LOGPROB_TILE, 4 * num_tokens * model.vocab_size)
            head = 0 if config.model.lora_rank else 4 * model.vocab_size * width
            logprobs += max(tiles + head, 2 * head)  # the head's gradient: in tiles, and joined
        gradient = int(max(one_layer * working, linear * linear_working))
        if gpu.on_gpu():
            columns = longest + length - 1
            scores = attention.gradient_bytes(
                (len(part), model.num_attention_heads, length - 1 if shared else columns, model.head_dim),
                (len(part), model.num_key_value_heads, columns, model.head_dim),
                dtype,
            )
            gradient = max(gradient, scores + int(one_layer * (working - 1)))  # by then the MLP's gradient is past
        one = (int(kept_bytes + inputs), gradient, logprobs)
        most = max(most, one, key=lambda sizes: sizes[0] + max(sizes[1:]))
    return len(cut), *most


def column_bytes(model: hub.ModelConfig, dtype: mx.Dtype) -> int:
    """Keys and values of one token."""
    num_layers = sum(kind != "linear_attention" for kind in model.layer_kinds)
    return 2 * num_layers * model.num_key_value_heads * model.head_dim * dtype.size


def state_bytes(model: hub.ModelConfig, dtype: mx.Dtype) -> int:
    """What gated delta nets keep of one row, however long it is."""
    if model.delta is None:
        return 0
    one = sum(array.nbytes for array in model.delta.empty_state(1, dtype))
    return one * model.layer_kinds.count("linear_attention")


def _rollout(
    model: hub.ModelConfig, dtype: mx.Dtype, config: Config, sizes: Sizes, prompts: list[int]
) -> tuple[int, int]:
    """Bytes of keys and values, and of the rest, when the longest prompts are prefilled together."""
    batch_size, groups = sizes.rollout_batch_size, config.sampling.groups
    slots = min(batch_size, len(prompts) * groups)
    together = sorted(prompts)[-max(2 * batch_size // groups, 1) :]
    longest = max(together)
    width, own = round_up(longest), round_up(config.sampling.max_tokens)
    share = sizes.share_prefix == "on"
    if sizes.share_prefix == "auto":
        share = has_kernels() or (not gpu.on_gpu() and attention.shares_prefix(slots, together, batch_size, dtype))
    column, copied = column_bytes(model, dtype), 0 if share else slots * longest
    prefilled = min(max(gpu.prefill_tokens() // len(together), 1), longest) * len(together)
    logits = 4 * 4 * slots * model.vocab_size  # and weights, sums and the next step's
    logits += 2 * model.num_key_value_heads * model.head_dim * dtype.size * copied  # on its way
    decoding = int(max(prefilled * forward_bytes(model, dtype, longest), logits))
    states = state_bytes(model, dtype) * (len(together) + slots)
    return column * (len(together) * width + slots * own + copied) + states, decoding


def settle(demand: Demand, rows: int | None = None, share_prefix: Switch | None = None) -> Sizes:
    """
    Decides each `auto`. rows, share_prefix: as `dispatch.settle` has measured them.

    Micro-batches are cut smaller first, then as few layers as possible are computed again, which costs a third of the
    update; last of all a teacher stays on disk. To fit is to need nine tenths of what a GPU offers, and without a GPU
    of what a laptop's would, so that a run on a CPU does not depend on the machine.
    """
    sampling, optimizer, layers = demand.config.sampling, demand.config.optimizer, demand.model.num_hidden_layers
    room = 0.9 * (gpu.memory_size() if gpu.on_gpu() else LAPTOP)
    budgets = [optimizer.train_token_budget or (GPU_BUDGET if gpu.on_gpu() else BUDGET)]
    if not optimizer.train_token_budget and gpu.on_gpu():
        budgets.append(BUDGET)
    named = {"off": [0], "on": [layers], "auto": list(range(layers + 1))}
    counts = named.get(optimizer.checkpoint_layers) or [int(optimizer.checkpoint_layers)]
    options = [(budget, counts[0]) for budget in budgets] + [(budgets[-1], count) for count in counts[1:]]
    rows = rows or sampling.rollout_batch_size or dispatch.USUAL_ROWS
    has_teacher = has_files(demand.config.objective.teacher)
    for on_disk, (budget, count) in itertools.product((False, True)[: 1 + has_teacher], options):
        sizes = Sizes(rows, share_prefix or sampling.share_prefix, budget, count)
        need = _estimate(demand, sizes, on_disk)
        if need.resident + need.update <= room:  # a rollout has flags of its own
            break
    return sizes


def agree(sizes: Sizes) -> Sizes:
    """What several machines measured or computed, each for itself: the least of all."""
    rows, sharing, budgets, counts = zip(*world.share(list(sizes)), strict=True)
    return Sizes(min(rows), min(sharing), min(budgets), max(counts))  # "auto", "off", "on"


def fits(demand: Demand, rows: int, share_prefix: bool) -> bool:
    """Whether a rollout of so many rows at once fits beside what stays."""
    layers = demand.model.num_hidden_layers
    need = estimate(demand, Sizes(rows, "on" if share_prefix else "off", BUDGET, layers))
    return need.resident + need.rollout <= gpu.memory_size()


LESS = [  # which phase a flag makes smaller, and its least value; in the order in which they are turned
    ("rollout", "rollout_batch_size", 1),
    ("judging", "judge_chunk_size", 1),
    ("update", "checkpoint_layers", 0),
    ("update", "train_token_budget", 64),
    ("teaching", "batch", 1),
    *((phase, "max_tokens", 16) for phase in ("rollout", "judging", "update", "teaching")),
]


def advice(demand: Demand, sizes: Sizes, room: int) -> str:
    """The flags that make a run fit which does not."""
    need, flags = estimate(demand, sizes), dict[str, Any]()
    if need.resident > room:
        smaller = f"take a smaller {'model' if demand.config.judges_itself or not need.judge else '--judge-model'}"
        return smaller if demand.config.model.lora_rank else f"set --lora-rank 16, or {smaller}"
    for phase, key, least in LESS:
        while need.resident + getattr(need, phase) > room:
            value = (demand.config.flat() | sizes._asdict())[key]
            lower = demand.model.num_hidden_layers if key == "checkpoint_layers" else max(value // 2, least)
            if lower == value:
                break
            flags[key] = "on" if key == "checkpoint_layers" else lower
            if key in Sizes._fields:
                sizes = Sizes(**sizes._asdict() | {key: lower})
            else:
                demand = demand._replace(config=demand.config.but(**{key: lower}))
            need = estimate(demand, sizes)
    if need.total > room:
        return "take a smaller model"
    return f"set {' '.join(f'{flag_of(key)} {value}' for key, value in flags.items())}"


def step_of(demand: Demand, sizes: Sizes) -> chips.Step:
    """The numbers of a step of a run; prompts are computed once for a group."""
    model, dtype, config, lengths, rubric = demand
    sampling, head = config.sampling, model.vocab_size * model.hidden_size
    weights = matmuls_of(model)
    num_rows, prompts = sampling.batch * sampling.groups, sorted(lengths)[-sampling.batch :]
    judged = 0.0
    if rubric is not None and not config.judge.url:
        judge = model if config.judges_itself else gwen.load_config(config.judge.model)
        texts = sum(TEMPLATE + len(criterion.text) // 4 for criterion in rubrics.load_rubric(rubric).criteria)
        judged = (sum(prompts) + num_rows * (sampling.max_tokens + texts)) * matmuls_of(judge) / weights
    forward = 1 + bool(config.objective.beta) + bool(config.objective.teacher)
    again = sizes.checkpoint_layers / model.num_hidden_layers
    backward = (1 if config.model.lora_rank else 2) + again
    return chips.Step(
        layers=model.num_hidden_layers,
        weights=weights,
        head=head,
        pair=4 * model.num_attention_heads * model.head_dim * sum(k != "linear_attention" for k in model.layer_kinds),
        column=column_bytes(model, dtype),
        state=state_bytes(model, dtype),
        itemsize=dtype.size,
        batch=sampling.batch,
        groups=sampling.groups,
        prompt=max(prompts),
        answer=sampling.max_tokens,
        rows=sizes.rollout_batch_size,
        judged=int(judged),
        batches=_update(model, dtype, config, sizes, prompts)[0],
        passes=forward + config.optimizer.num_iterations * backward,
    )


def matmuls_of(model: hub.ModelConfig) -> int:
    """Weights of all layers' matmuls."""
    layers = gwen.Model(model).layers  # lazy: nothing of it is ever computed
    return sum(array.size for layer in layers for _, array in tree_flatten(layer.parameters()) if array.ndim == 2)


def rubric_of(config: Config) -> Path | None:
    """The rubric that a run is judged by, as far as that is known without its data."""
    data, bundled = config.data, Path(__file__).parent / "data" / f"{config.data.task}_rubric.yaml"
    unasked = config.objective.loss_type in ("sft", "distill") or (data.reward and "rubric" not in data.reward_weights)
    return Path(data.rubric) if data.rubric else None if unasked or not bundled.is_file() else bundled


def line(demand: Demand, sizes: Sizes) -> str:
    """What a run needs, phase by phase, against what the machine has, and the flag to turn where it does not fit."""
    config, need = demand.config, estimate(demand, sizes)
    room = gpu.memory_size()
    stays = {
        "weights": need.weights,
        "adapters" if config.model.lora_rank else "masters": need.adapters,
        "optimizer": need.optimizer,
        "teacher": need.teacher,
        "judge": need.judge,
        "Python": need.python,
    }
    phases = {
        f"rollout ({_gb(need.cache)} cache)": need.rollout,
        "judging": need.judging,
        "teaching": need.teaching,
        f"update ({_gb(need.gradients)} gradients, {_gb(need.activations)} activations, "
        f"then {_gb(need.logprobs)} logprobs or {_gb(need.working)} backward)": need.update,
    }
    held, passing = ([f"{_gb(size)} {name}" for name, size in part.items() if size] for part in (stays, phases))
    said = (
        f"memory: {_gb(need.total)} of {_gb(room)} GB = {' + '.join(held)} + "
        f"{'the largest of ' * (len(passing) > 1)}{', '.join(passing)} "
        f"at --train-token-budget {sizes.train_token_budget} "
        f"--checkpoint-layers {sizes.settings()['checkpoint_layers']}"
    )
    if need.reading:
        said += (
            f"; the teacher stays on disk: a step reads its {_gb(need.reading)} GB layer by layer, "
            f"{need.reading / DISK:.1f} s at {DISK / 1e9:g} GB/s"
        )
    if need.total <= room:
        return said
    return f"{said}; it does not fit: {advice(demand, sizes, room)}"


def _gb(size: float) -> str:
    return f"{size / 1e9:.2f}"


# ---- the command


def audits_of(config: Config) -> Iterator[Any]:
    """What each reward function of a run pays for, as `audit.Audit`s; judges and environments are not asked."""
    import tasks
    from problems import audit

    task = tasks.make(config)
    for name, reward in task.counted.items():
        if not audit.looks_at_episodes(reward):
            with alive.doing(f"trying {name}"):
                yield audit.audit(name, reward, task.train or task.held_out)


def show_audit(config: Config) -> None:
    """Prints what each reward function of a run pays for. ValueError where there is none."""
    from problems import audit

    audits = list(audits_of(config))
    if not audits:
        judged = "only a judge or an environment, which are not asked"
        raise ValueError(f"--audit: --task {config.data.task} has no reward function, {judged}")
    for found in audits:
        print(*audit.table(found), sep="\n", flush=True)


TRY_STEPS, TRY_SECONDS = 4, 120.0  # steps of the trial; no further one begins after so long
FEW_SIGNALS, MANY_CUT, MANY_DEGENERATE = 0.25, 0.5, 0.1  # shares of groups, of answers, of answers
SHOWN = 5  # answers


def try_out(flags: list[str], config: Config) -> Iterator[str]:
    """
    What the first steps of a run show, and whether to go on with it; lines.

    They are steps of train.py, with a learning rate of 0: everything is measured where it will happen, and all answers
    are those of the model before training. Raises ValueError where train.py ends with a mistake, which it has told.
    """
    if config.objective.loss_type == "sft":
        raise ValueError("--try looks at sampled answers, and --loss-type sft samples none; leave it out")
    with tempfile.TemporaryDirectory() as directory:
        run = Path(directory) / "trial"
        own = ["--steps", str(TRY_STEPS), "--learning-rate", "0", "--eval-every", "0", "--save-every", "1000"]
        own += ["--allow-unreadable"]  # the verdict says it
        command = [sys.executable, str(Path(__file__).parent / "train.py"), *flags, *own, "--run-dir", str(run)]
        trial = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        try:
            deadline = time.monotonic() + TRY_SECONDS
            while trial.poll() is None and not (time.monotonic() > deadline and any(read_log(run / "metrics.jsonl"))):
                time.sleep(0.2)
        finally:
            trial.terminate()
            status = trial.wait()
        steps, answers = ([record for _, record in read_log(run / f"{name}.jsonl")] for name in ("metrics", "rollouts"))
    if not steps:
        raise ValueError(f"--try: train.py ended with status {status} before its first step")
    from problems import audit

    audits = list(audits_of(config))
    yield from (f"reward {found.name}: {audit.surprise(found)}" for found in audits)
    yield from verdict(config, steps, answers, [found.name for found in audits if found.num_changed])


def verdict(
    config: Config, steps: list[dict[str, Any]], answers: list[dict[str, Any]], by_chance: Sequence[str] = ()
) -> Iterator[str]:
    """
    What steps and answers of the model before training say of a run, the advice last.

    by_chance: rewards that pay the same completion otherwise when they are asked again.
    """

    def mean(key: str) -> float:
        return sum(step.get(key) or 0.0 for step in steps) / len(steps)

    num_groups = config.sampling.batch * sum(step["sampling/draws"] for step in steps)
    signals = sum(step["sampling/signal_groups"] or 0 for step in steps) / num_groups
    rewards = [answer["reward"] for answer in answers if answer["reward"] is not None] or [0.0]
    low, high = min(rewards), max(rewards)
    middle = (sum(rewards) / len(rewards) - low) / (high - low) if high > low else 0.0
    cut, degenerate = mean("completion/truncated_frac"), mean("completion/degenerate_frac")
    pace = min(step["step/s"] for step in steps)  # the first one warms up
    for answer in answers[:: max(len(answers) // SHOWN, 1)][:SHOWN]:
        reward = "unreadable" if answer["reward"] is None else f"{answer['reward']:.3g}"
        yield f"  {reward}  {short(prompt_text(answer['prompt']))} -> {short(answer['completion'])}"
    yield (
        f"{len(steps)} steps, {len(answers)} answers: {signals:.0%} of the groups have a signal, {cut:.0%} of the "
        f"answers are cut off, {degenerate:.0%} repeat or copy"
    )
    spread = f"deviation in a group {mean('reward/std'):.3g}"
    yield f"rewards {low:.3g} to {high:.3g}, mean {mean('reward/mean'):.3g}, {spread}"
    num, whole = config.optimizer.steps, pace * config.optimizer.steps
    peak = max(step["mem/peak_gb"] for step in steps)
    yield f"{pace:.1f} s a step, {num} in {whole:.0f} s or {whole / 60:.0f} minutes without evaluations, {peak:.2f} GB"
    changes = []
    if (unread := mean("judge/unparsed_frac")) > rubrics.LOUD:
        changes.append(
            f"{unread:.0%} of the judge's scores cannot be read: take another --judge-model, see docs/judge.md"
        )
    if by_chance:
        changes.append(f"reward {' and '.join(by_chance)} pays by chance, not for what an answer says: take another")
    if cut > MANY_CUT:
        changes.append(f"raise --max-tokens above {config.sampling.max_tokens}, or ask for shorter answers")
    if config.compares_rewards and signals < FEW_SIGNALS:
        if high == low:
            changes.append(f"every answer earns {low:.3g}: take a reward that tells answers apart, or other prompts")
        elif middle < 0.2:
            changes.append("nearly all fail: take easier prompts, more --groups, or a warm start with --loss-type sft")
        elif middle > 0.8:
            changes.append("nearly all succeed: take harder prompts")
        else:
            changes.append("answers to one prompt earn alike: try a higher --temp or more --groups")
    if degenerate > MANY_DEGENERATE and config.data.reward_gate == "off":
        changes.append("set --reward-gate form")
    yield f"change: {'; '.join(changes)}" if changes else "go"


def main(argv: list[str] | None = None) -> None:
    parser = Parser(
        "preflight.py", "Say what memory a run would need, or what its rewards pay for. All flags of train.py, and:"
    )
    parser.add_argument("--try", action="store_true", dest="trial", help="take four steps first and say what they show")
    parser.add_argument("--prompt-tokens", type=int, default=256, help="length of the longest prompts")
    parser.add_argument("--audit", action="store_true", help="show instead what the reward functions pay for")
    parser.add_argument("--dtype", choices=tuple(gwen.DTYPES), help="of the weights (default: as train.py takes it)")
    own, rest = parser.parse_known_args(sys.argv[1:] if argv is None else argv)
    try:
        args = parse(rest)
        if args.resume is True:
            args.resume = checkpoint.newest_unfinished(args.steps)
        config, choice = resolve(given(args), args.config, args.resume, gwen.choose_model)
        check_least(own, prompt_tokens=1)
        if own.audit:
            show_audit(config)
            return
        if own.trial:
            print(choice)
            for said in try_out(rest, config):
                print(visible(said), flush=True)
            return
        dtype = gwen.DTYPES[own.dtype] if own.dtype else gwen.default_dtype()
        model = gwen.load_config(config.model.name)
        lengths = [own.prompt_tokens] * config.sampling.batch
        if config.tools.tools or config.tools.env:
            context = context_of(config.tools, model.max_position_embeddings)
            config = config.but(max_tokens=max(context - own.prompt_tokens, 1))
        demand = Demand(model, dtype, config, lengths, rubric_of(config))
        print(f"{choice}; {own.prompt_tokens} prompt tokens")
        sizes = settle(demand)
        print(line(demand, sizes))
        here = str(mx.device_info().get("device_name", "")).removeprefix("Apple ")
        print(chips.line(step_of(demand, sizes), estimate(demand, sizes).total, here))
    except (ValueError, OSError) as error:
        fail(error)


if __name__ == "__main__":
    main()
