"""
The memory and the time that a run will need, from its settings and the model's configuration alone: `uv run
preflight.py --model M`.

A step needs what stays (weights, adapters, the optimizer's state, Python) and then, in turn, what a rollout, the judge
or an update takes; the largest of them decides. The longest prompts and completions of `--max-tokens` are assumed.
Weights, moments, caches and logits are counted; what layers keep for the gradient is one constant times their widths,
measured on a CPU: a test holds the figure to 5% under the peak at most and 30% over it. `--try` takes some steps,
`--fits` says what the machine can train.

Axes: M rows of a micro-batch, P prompt and T completion positions, S keys, V vocabulary, C hidden, H query heads,
K kv heads, D head dim, F mlp width.
"""

import argparse
import dataclasses
import math
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import cpu_blas  # noqa: F401  (before mlx)
import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten

import gwen
import tasks
from config import SETTINGS, Config, ModelSettings, Sizes
from disk import checkpoint, hub
from disk.run_files import read_log
from flags import Parser, check_least, escape_invisible, parse_setting, report_mistakes
from judging import rubrics
from kv_cache import round_up
from layers import attention, lm_head
from machine import alive, chips, gpu, link, memory, world
from machine.output import guard_output
from problems import audit, chat_template, episodes, form
from problems.data import warn_of_few_held_out
from problems.examples import Example, prompt_key, prompt_text, shorten_value, spread_evenly
from settings.sources import (
    command_line,
    given_settings,
    merge_settings,
    parse_flags,
    resolve_settings,
    to_yaml,
)
from step import batch
from step.rows import (
    ROOM,
    USUAL_ROWS,
    choose_rollout_rows,
    column_bytes,
    forward_bytes,
    layer_bytes,
    rollout_bytes,
    state_bytes,
    uses_kernels,
)


def gpu_memory_limit(memory_bytes: int) -> int:
    """Bytes that macOS recommends for a GPU's working set: of 16 GB 11.45e9."""
    return 2 * memory_bytes // 3


LAPTOP = gpu_memory_limit(2**34)
PYTHON, OF_TOKEN = (
    170_000_000,
    700,
)  # bytes of Python, 30 MB for reading data included, and of a tokenizer by token
# Positions of a micro-batch. On a CPU 8192 took as long for random:2m and 1.5 times as long for random:30m as 1024.
BUDGET, GPU_BUDGET = 1024, 2048
# Layers while one's gradient is computed: of one that is kept beside all that are, and of one that is computed again,
# by whether prompts are shared. A gated delta net computes the levels of a tree one after the other.
WORKING, LINEAR_WORKING = 1.7, 1.1
AGAIN, LINEAR_AGAIN = (2.4, 2.0), 1.6
TEMPLATE = 30  # tokens that a chat template and a judge's tags add to a text; four characters of which are a token
TILES_IN_FLIGHT = 9  # of log-probabilities, those that MLX runs ahead with


class MemoryNeed(NamedTuple):
    """Bytes by name: of what stays, and of each phase beside it."""

    resident: dict[str, int]
    phases: dict[str, int]

    @property
    def total(self) -> int:
        return sum(self.resident.values()) + max(self.phases.values())


class RunDemand(NamedTuple):
    """What decides the memory of a run, besides `Sizes`."""

    model: hub.ModelConfig
    dtype: mx.Dtype
    config: Config
    prompt_lengths: list[int]  # or of the conversations of --loss-type sft
    rubric: Path | None = None  # of the judge

    @property
    def longest(self) -> list[int]:
        """The lengths of a step's longest prompts."""
        return sorted(self.prompt_lengths)[-self.config.sampling.batch :]

    @property
    def judge(self) -> hub.ModelConfig | None:
        """The model that judges, if one does here."""
        if self.rubric is None or self.config.judge.url:
            return None
        with gwen.blame_flag("--judge-model"):
            return (
                self.model
                if self.config.judges_itself
                else gwen.load_config(self.config.judge.model)
            )


class ParameterCounts(NamedTuple):
    """How many numbers a model has: all weights, those of its layers' matmuls, and those that are trained."""

    weights: int
    matmuls: int
    trained: int


def count_parameters(
    model: hub.ModelConfig, adapters: ModelSettings | None = None
) -> ParameterCounts:
    """Counted of one layer of each kind, whose arrays are lazy: nothing is computed. adapters: None where none are."""
    kinds = tuple(dict.fromkeys(model.layer_kinds))
    shapes = gwen.Model(dataclasses.replace(model, layer_kinds=kinds))
    rank, targets = (adapters.lora_rank, adapters.lora_targets) if adapters else (0, [])
    weights = matmuls = columns = 0
    for name, array in tree_flatten(shapes.parameters()):
        parts = name.split(".")
        times = model.layer_kinds.count(kinds[int(parts[1])]) if parts[0] == "layers" else 1
        weights += times * array.size
        if parts[0] == "layers" and array.ndim == 2:
            matmuls += times * array.size
            columns += times * sum(array.shape) * (parts[-2] in targets)
    return ParameterCounts(weights, matmuls, rank * columns if rank else weights)


def frozen_bytes(name: str, shape: hub.ModelConfig, dtype: mx.Dtype) -> int:
    """Bytes of the weights of a judge or teacher; on a GPU those of few bits stay packed."""
    if not (shape.packing and gpu.on_gpu()):
        return count_parameters(shape).weights * dtype.size
    model = gwen.load_model(hub.find_model(name), dtype, packed=True, lazy=True)
    return sum(array.nbytes for _, array in tree_flatten(model.parameters()))


def sampling_of(config: Config) -> tuple[int, int, int]:
    """Prompts, samples of each and their tokens in a step; of given replies, one sample that is its prompt."""
    s = config.sampling
    return (
        (s.batch, 1, 1)
        if config.objective.loss_type == "sft"
        else (s.batch, s.groups, s.max_tokens)
    )


def estimate(demand: RunDemand, sizes: Sizes) -> MemoryNeed:
    """What a run needs at most."""
    phases = {
        "rollout": sampled_bytes(demand, sizes.rollout_batch_size),
        "judging": judging_bytes(demand),
    }
    return MemoryNeed(resident_bytes(demand), phases | {"update": update_bytes(demand, sizes)})


def sampled_bytes(demand: RunDemand, rows: int) -> int:
    """What a rollout of so many rows at once takes: caches, and what is computed."""
    _, groups, length = sampling_of(demand.config)
    is_given = demand.config.objective.loss_type == "sft"
    return (
        0
        if is_given
        else sum(rollout_bytes(demand.model, demand.dtype, demand.longest, groups, length, rows))
    )


def resident_bytes(demand: RunDemand) -> dict[str, int]:
    """What is there in every phase."""
    (model, dtype, config, *_), judge, teacher = (
        demand,
        demand.judge,
        demand.config.objective.teacher,
    )
    rank, (num, _, trained) = config.model.lora_rank, count_parameters(model, config.model)
    weights = num * dtype.size
    copies = dtype.size if rank and dtype != mx.float32 else 0  # of adapters in 16 bits
    masters = trained if rank or dtype != mx.float32 else 0  # float32 weights are their own
    has_base = (
        not rank
        and teacher != "self"
        and (config.objective.beta or (judge and config.judges_itself))
    )
    moments = 0 if config.optimizer.kind == "sgd" else 8 * trained
    found = {
        "weights": weights,
        "adapters" if rank else "masters": (4 + copies) * masters,
        "optimizer": moments,
    }
    if teacher:  # what it says are the hidden states of all completions
        with gwen.blame_flag("--teacher"):
            shape = model if teacher == "self" else gwen.load_config(teacher)
        own = frozen_bytes(teacher, shape, dtype) if teacher != "self" or not rank else 0
        found["teacher"] = own + int(np.prod(sampling_of(config))) * shape.hidden_size * dtype.size
    if judge and not config.judges_itself:
        found["judge"] = frozen_bytes(config.judge.model, judge, dtype)
    found["base"] = weights if has_base else 0  # frozen, beside what trains
    return found | {"Python": PYTHON + OF_TOKEN * model.vocab_size}


def judging_bytes(demand: RunDemand) -> int:
    """The judge's cache and forward pass. Its prompts are a tree (judge.py): questions, answers, criteria."""
    (_, dtype, config, _, rubric), model, prompts = demand, demand.judge, demand.longest
    if model is None or rubric is None:
        return 0
    preamble, criteria = rubrics.load_rubric(rubric)
    head, criterion = (
        TEMPLATE + len(text) // 4 for text in (preamble, max((c.text for c in criteria), key=len))
    )
    rows = config.judge.chunk_size
    answers = max(rows // len(criteria), 1)
    questions = prompts[-answers:]
    longest, length = max(questions), config.sampling.max_tokens
    keys = head + longest + length + criterion
    columns = head + len(questions) * longest + answers * length + rows * criterion
    if config.judge.mode == "decode":
        columns += rows * (round_up(keys) + round_up(config.judge.think + rubrics.REPLY_TOKENS))
    positions = max(len(questions) * longest, answers * length, rows * criterion)
    working = 1.1 * positions * forward_bytes(model, dtype, keys) + 4 * 4 * rows * model.vocab_size
    nodes = 1 + len(questions) + answers + rows  # each keeps a state
    return int(column_bytes(model, dtype) * columns + state_bytes(model, dtype) * nodes + working)


def micro_batches(demand: RunDemand, sizes: Sizes) -> tuple[list[list[int]], bool, batch.BatchPlan]:
    """Rows, whether they share their prompts, and how they are cut where all completions are as long as allowed."""
    _, groups, length = sampling_of(demand.config)
    rows = [row for place, num in enumerate(demand.longest) for row in [[place] * num] * groups]
    return rows, *batch.plan_batches(
        rows, np.full(len(rows), length), sizes.train_token_budget, "auto"
    )


def update_bytes(demand: RunDemand, sizes: Sizes) -> int:
    """What the largest micro-batch takes, and the gradient."""
    trained = count_parameters(demand.model, demand.config.model).trained
    (model, dtype, config, *_), (rows, shared, cut) = demand, micro_batches(demand, sizes)
    width, layers, (*_, length) = model.hidden_size, model.num_hidden_layers, sampling_of(config)
    num_again, most = sizes.checkpoint_layers, 0
    again, kinds = (
        model.layer_kinds[:num_again],
        model.layer_kinds[num_again:],
    )  # of the layers that are kept
    for part, positions in cut:
        longest = max(len(rows[row]) for row in part)
        keys = longest + length - 1
        of_kind = {
            kind: positions * layer_bytes(model, dtype, keys, kind)
            for kind in set(model.layer_kinds)
        }
        # of those that are computed again: inputs, and what rows that share a prompt see of it
        inputs = (
            positions
            * (dtype.size * width + shared * column_bytes(model, dtype) / layers)
            * num_again
        )
        inputs += len(part) * state_bytes(model, dtype) * shared
        factors = {kind: (WORKING, AGAIN[shared]) for kind in of_kind}
        factors |= {"linear_attention": (LINEAR_WORKING, LINEAR_AGAIN)}
        kept = sum(of_kind[kind] for kind in kinds)
        backward = max((of_kind[kind] * factors[kind][0] for kind in kinds), default=0.0)
        recomputed = max((of_kind[kind] * factors[kind][1] for kind in again), default=0.0)
        if gpu.on_gpu():
            inputs += (
                len(part) * longest * column_bytes(model, dtype) * shared
            )  # of prompts' keys and values, joined
            scores = (4 + 3 * dtype.size) * attention.MOST_SCORES  # of attention's gradient
            backward, recomputed = backward + scores, recomputed + scores
        num_tokens = positions if config.objective.loss_type == "sft" else len(part) * length
        logprobs = num_tokens * width * (8 + 2 * dtype.size)
        if uses_kernels():  # logits of some rows, and their gradient
            logprobs += 2 * dtype.size * min(lm_head.ROWS_AT_ONCE, num_tokens) * model.vocab_size
        else:
            tiles = 4 * min(
                TILES_IN_FLIGHT * lm_head.LOGPROB_TILE, 4 * num_tokens * model.vocab_size
            )
            head = 0 if config.model.lora_rank else 4 * model.vocab_size * width
            logprobs += max(tiles + head, 2 * head)  # the head's gradient: in tiles, and joined
        most = max(most, int(inputs + max(kept + max(backward, logprobs), recomputed)))
    # at last the gradient, and what the optimizer makes of it while old tensors go; measured: 5 to 7
    return max(most + 4 * trained * (len(cut) > 1 or num_again > 0), 7 * trained)


def choose_sizes(
    demand: RunDemand, most_rows: int = USUAL_ROWS, room: float | None = None
) -> Sizes:
    """
    Decides each `auto`. most_rows: that a rollout, or an evaluation, has. room: bytes; None: this machine's.

    Micro-batches are cut smaller first, then as few layers as possible are computed again, which costs a third of the
    update. To fit is to need nine tenths of what a GPU offers, and without a GPU of what a laptop's would, so that a
    run on a CPU does not depend on the machine.
    """
    sampling, optimizer, layers = (
        demand.config.sampling,
        demand.config.optimizer,
        demand.model.num_hidden_layers,
    )
    room = ROOM * (room or (memory.memory_size() if gpu.on_gpu() else LAPTOP)) - sum(
        resident_bytes(demand).values()
    )
    usual = [GPU_BUDGET, BUDGET] if gpu.on_gpu() else [BUDGET]
    budgets = [optimizer.train_token_budget] if optimizer.train_token_budget else usual
    named = {"off": [0], "on": [layers], "auto": list(range(layers + 1))}
    counts = named.get(optimizer.checkpoint_layers) or [int(optimizer.checkpoint_layers)]
    rows = sampling.rollout_batch_size or most_rows
    for budget, count in [(budget, counts[0]) for budget in budgets] + [
        (budgets[-1], one) for one in counts[1:]
    ]:
        sizes = Sizes(rows, budget, count)
        if update_bytes(demand, sizes) <= room:
            break
    if not sampling.rollout_batch_size:
        rows = choose_rollout_rows(lambda rows: sampled_bytes(demand, rows) <= room, most_rows)
    return sizes._replace(rollout_batch_size=rows)


def agree_on_sizes(sizes: Sizes) -> Sizes:
    """What several machines computed, each for itself: the least of all."""
    rows, budgets, counts = zip(*world.all_gather(list(sizes)), strict=True)
    return Sizes(min(rows), min(budgets), max(counts))


def rubric_of(config: Config) -> Path | None:
    """The rubric that a run is judged by, as far as that is known without its data."""
    data, bundled = config.data, Path(__file__).parent / "data" / f"{config.data.task}_rubric.yaml"
    unasked = config.objective.loss_type in ("sft", "distill") or (
        data.reward and "rubric" not in data.reward_weights
    )
    path = (
        Path(data.rubric) if data.rubric else None if unasked or not bundled.is_file() else bundled
    )
    return None if data.reward_weights.get("rubric") == 0 else path


LESS = dict.fromkeys(
    ("masters", "optimizer", "base"), "set --lora-rank 16"
) | {  # what makes a part smaller
    "weights": "take a smaller --model",
    "teacher": "take a smaller --teacher",
    "judge": "take a smaller --judge-model",
    "rollout": "lower --rollout-batch-size or --max-tokens",
    "judging": "lower --judge-chunk-size",
    "update": "lower --train-token-budget, or set --checkpoint-layers on",
}


def memory_line(demand: RunDemand, sizes: Sizes) -> str:
    """What a run needs, phase by phase, against what the machine has, and the flag to turn where it does not fit."""
    need, room = estimate(demand, sizes), memory.memory_size()
    staying, passing = (
        [f"{size / 1e9:.2f} {name}" for name, size in part.items() if size] for part in need
    )
    said = (
        f"memory: {need.total / 1e9:.2f} of {room / 1e9:.2f} GB = {' + '.join(staying)} + "
        f"{'the largest of ' * (len(passing) > 1)}{', '.join(passing)} "
        f"at --train-token-budget {sizes.train_token_budget} "
        f"--checkpoint-layers {sizes.as_settings()['checkpoint_layers']}"
    )
    if (
        not demand.config.model.lora_rank
    ):  # a checkpoint has masters and moments, and its adapter is all weights
        each, weights = (
            4 * count_parameters(demand.model).weights + need.resident["optimizer"],
            need.resident["weights"],
        )
        disk = (checkpoint.KEPT + 1) * (
            each + weights
        ) + 2 * weights  # one more while it is saved, and two adapters
        said += f"; checkpoints take up to {disk / 1e9:.1f} GB of disk"
    return said if need.total <= room else f"{said}; it does not fit: {way_to_fit(need, room)}"


def way_to_fit(need: MemoryNeed, room: int) -> str:
    """The flag that makes the largest part smaller, where a run needs more than `room` bytes."""
    if need.resident["Python"] >= room:
        return "Python and MLX alone need more; take a machine with more memory"
    parts = need.phases if sum(need.resident.values()) <= room else need.resident
    largest = max(LESS.keys() & parts.keys(), key=parts.__getitem__)
    return LESS[largest]


TOO_LARGE = "it does not fit"


def explain_misfit(demand: RunDemand, sizes: Sizes) -> str:
    """Why a run does not fit into this machine's memory, and what to change; "" where it fits."""
    need = estimate(demand, sizes)
    room = memory.memory_size()
    if need.total <= room:
        return ""
    sizes_text = f"it needs about {need.total / 1e9:.2f} GB, and this machine has {room / 1e9:.2f}"
    return f"{TOO_LARGE}: {sizes_text}; {way_to_fit(need, room)}"


# ---- the time


def phase_costs(demand: RunDemand, sizes: Sizes) -> dict[str, chips.Cost]:
    """What each phase of a step moves and computes; prompts are computed once for a group."""
    (model, dtype, config, _, rubric), judge, prompts = demand, demand.judge, demand.longest
    (_, groups, length), matmuls = sampling_of(config), count_parameters(model).matmuls
    num_rows, num_prompts, head = (
        len(prompts) * groups,
        sum(prompts),
        model.vocab_size * model.hidden_size,
    )
    rows, weights = min(sizes.rollout_batch_size, num_rows), matmuls * dtype.size
    num_steps, width = (
        length * num_rows / rows,
        max(prompts) + length / 2,
    )  # of an answer that is half done
    # FLOPs of a query and a key in all layers
    pair = (
        4
        * model.num_attention_heads
        * model.head_dim
        * sum(k != "linear_attention" for k in model.layer_kinds)
    )
    cached = (max(prompts) / groups + length / 2) * column_bytes(model, dtype) + 2 * state_bytes(
        model, dtype
    )
    again = sizes.checkpoint_layers / model.num_hidden_layers
    passes = config.optimizer.num_iterations * (1 + again + (1 if config.model.lora_rank else 2))
    passes += bool(config.objective.beta) + bool(config.objective.teacher)
    trained: float = passes * 2 * matmuls * (num_prompts + num_rows * length)
    trained += (
        (4 * head + 3.5 * pair * width) * num_rows * length
    )  # logits, and attention, with their gradients
    found = {
        "prefill": chips.Cost(
            weights, 2 * matmuls * num_prompts + pair * num_prompts * max(prompts) / 2
        ),
        "decode": chips.Cost(
            num_steps * (weights + head * dtype.size + rows * cached),
            num_steps * rows * (2 * (matmuls + head) + pair * width),
        ),
        "update": chips.Cost(
            len(micro_batches(demand, sizes)[-1]) * weights, trained / chips.UPDATE_FRACTION
        ),
    }
    if judge and rubric:
        texts = sum(
            TEMPLATE + len(criterion.text) // 4
            for criterion in rubrics.load_rubric(rubric).criteria
        )
        judged, its = num_prompts + num_rows * (length + texts), count_parameters(judge).matmuls
        found["judge"] = chips.Cost(its * dtype.size, (2 * its + pair * width) * judged)
    return found


def round_to_two_digits(value: float) -> str:
    return f"{float(f'{value:.2g}'):g}"


def format_range(ends: Iterable[str]) -> str:
    """From one end to the other, which may read alike."""
    return " to ".join(dict.fromkeys(ends))


def time_line(demand: RunDemand, sizes: Sizes) -> str:
    """What a step moves, computes and takes: here, or in 16 bits on each chip that is sold with enough memory."""
    if gpu.on_gpu():
        known = fit = [chips.this_chip()]
    else:
        sizes = choose_sizes(demand := demand._replace(dtype=mx.float16))
        known, need = chips.load_chips(), estimate(demand, sizes).total
        fit = [one for one in known if gpu_memory_limit(max(one.memory) << 30) >= need]
    found = phase_costs(demand, sizes)
    times = [
        f"{chip.name} {round_to_two_digits(chips.estimate_seconds(found, chip))} s" for chip in fit
    ] or ["no chip has the memory"]
    moved, computed = map(sum, zip(*found.values(), strict=True))
    return (
        f"a step in {8 * demand.dtype.size} bits: {moved / 1e9:.0f} GB of weights and caches read, "
        f"{computed / 1e12:.1f} TFLOP: {', '.join(times)} "
        f"(an estimate: nobody has measured this on a Mac{'; other chips have less memory' * (len(fit) < len(known))})"
    )


# ---- what a machine can train

PROMPT = 256  # tokens of the prompts assumed
STEPS, PATIENCE = 100, 3600.0  # of a run, and the seconds that those of a start should take at most


def models_that_fit(
    room: float, chip: chips.Chip, dtype: mx.Dtype
) -> Iterator[tuple[str, int, float]]:
    """Models that `room` bytes can train, as a run on own data by its recipe; the bytes needed, and seconds a step."""
    for name in [
        "demo",
        *(one for one in gwen.load_known_models() if not one.startswith("random:")),
    ]:
        config = merge_settings({"model": name, "task": "own"}, None)
        demand = RunDemand(gwen.load_config(name), dtype, config, [PROMPT] * config.sampling.batch)
        sizes = choose_sizes(demand, room=room)
        if (need := estimate(demand, sizes).total) <= room:
            yield name, need, chips.estimate_seconds(phase_costs(demand, sizes), chip)


def describe_fitting_models() -> Iterator[str]:
    """What this machine can train, as lines of a table, and what to start with."""
    found = list(models_that_fit(memory.memory_size(), chips.this_chip(), gwen.default_dtype()))
    yield f"what fits, for prompts of {PROMPT} tokens (time is an estimate, measured on no Mac, of steps alone):"
    yield f"{'model':28}    GB  s a step  min for {STEPS}"
    for name, need, seconds in found:  # below a second Python takes most of a step
        times = (
            round_to_two_digits(one) if one >= 1 else "<1"
            for one in (seconds, seconds * STEPS / 60)
        )
        yield "{:28}{:6.1f}{:>10}{:>13}".format(name, need / 1e9, *times)
    if not found:
        yield f"{CHANGE}{TOO_LARGE}: no model of this table; take a machine with more memory"
        return
    _, best = max(
        [(need, name) for name, need, seconds in found if STEPS * seconds < PATIENCE],
        default=(0, "demo"),
    )
    own = (
        "" if best == "demo" else " --data mine.jsonl --reward mine.py:score"
    )  # README.md shows both
    yield f"start with: {command_line(merge_settings({'model': best}, None).to_flags())} --model {best}{own}"


# ---- the command


def audit_rewards(task: tasks.Task, gate: str) -> Iterator[tuple[str, audit.Audit]]:
    """What each reward function of a run pays for, by its name; judges and environments are not asked."""
    for name, reward in task.counted_rewards.items():
        if not audit.needs_episodes(reward):
            with alive.show_activity(f"trying {name}"):
                yield name, audit.audit(name, reward, task.train or task.held_out, gate)


def verify_answers(task: tasks.Task, answers: list[dict[str, Any]]) -> list[float]:
    """What the verifier, if there is one, gives each of a run's answers whose problem has a column `answer`."""
    known = {
        (prompt_key(one), str(one["answer"])): one
        for one in task.train
        if one.get("answer") is not None
    }
    rows = [(known.get((prompt_key(one), one["answer"])), one["completion"]) for one in answers]
    told = [(audit.Row(example), text) for example, text in rows if example]
    return audit.call_on_texts("correct", task.verifier, told) if task.verifier else []


TRY_STEPS, TRY_SECONDS = 4, 120.0  # steps of the trial; no further one begins after so long
FEW_SIGNALS, MANY_CUT, MANY_DEGENERATE = 0.25, 0.5, 0.1  # shares of groups, of answers, of answers
FEW_RIGHT = 0.2  # of the rewards' range, where their mean stands
SHOWN = 5  # answers
WARM = "a warm start (docs/warm-start.md)"
NONE_RIGHT = "; it may learn what the reward pays, but none is right yet: show it answers first (docs/warm-start.md)"
LONG = 300.0  # seconds of a run that ends where its first steps have no signal
CHANGE = "change: "  # begins the last line where something should change
MOST_RENDERED = 256  # prompts, the longest in characters, whose tokens are counted


def demand_of(config: Config, task: tasks.Task) -> tuple[RunDemand, Sizes]:
    """What a run of this task demands, as train.py estimates it, and its sizes. No weights are read."""
    model = gwen.load_config(config.model.name)
    is_random = config.model.name.startswith("random:")
    tokenizer = hub.load_tokenizer(hub.DEMO if is_random else hub.find_model(config.model.name))
    toolbox = episodes.make_toolbox(config, task.tools, task.environments, tokenizer, model)

    def count_tokens(example: Example) -> int:
        if toolbox:
            return len(toolbox.prompt(example))
        ids = chat_template.encode_prompts(
            tokenizer,
            [example],
            max_tokens=config.sampling.max_tokens,
            context=model.max_position_embeddings,
            thinking=config.sampling.thinking,
            kind="training prompt",
        )
        return len(ids[0])

    examples = task.train or task.held_out
    longest = sorted(examples, key=lambda example: len(prompt_text(example["prompt"])))[
        -MOST_RENDERED:
    ]
    lengths = list(map(count_tokens, longest))
    if toolbox:  # what follows a prompt is more than what the model writes
        config = config.with_settings(max_tokens=toolbox.context - max(lengths))

    held_out = (
        spread_evenly(task.held_out, config.evaluation.limit) if config.evaluation.every else []
    )
    rubric = task.rubric or (task.witness if held_out else None)
    demand = RunDemand(model, gwen.default_dtype(), config, lengths, rubric)
    most_rows = max(config.sampling.batch * config.sampling.groups, len(held_out))
    return demand, choose_sizes(demand, most_rows)


def try_out(config: Config) -> Iterator[str]:
    """
    What the first steps of a run show, and whether to go on with it; lines.

    They are steps of train.py, with a learning rate of 0: everything is measured where it will happen, and all answers
    are those of the model before training. A run that does not fit is not tried, unless --over-memory says so. Raises
    ValueError where train.py ends with a mistake, which it has told.
    """
    task = tasks.make_task(config)
    demand, sizes = demand_of(config, task)
    yield memory_line(demand, sizes)
    too_large = explain_misfit(demand, sizes)
    if too_large and not config.optimizer.over_memory:
        yield f"{CHANGE}{too_large}; with --over-memory it is tried all the same"
        return

    with tempfile.TemporaryDirectory() as directory:
        run, recipe = Path(directory) / "trial", Path(directory) / "recipe.yaml"
        own = {
            "steps": TRY_STEPS,
            "learning_rate": 0.0,
            "eval_every": 0,
            "save_every": 1000,
            "report_to": [],
        }
        recipe.write_text(to_yaml(config.with_settings(**own)), encoding="utf-8")
        train = str(Path(__file__).parent / "train.py")
        command = [sys.executable, train, "--config", str(recipe), "--run-dir", str(run)]
        # by themselves they would end this process, and not the trial
        before = {
            number: signal.signal(number, link.raise_interrupt)
            for number in link.ending_signals()[1:]
        }
        trial = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        try:
            deadline = time.monotonic() + TRY_SECONDS
            while trial.poll() is None and not (
                time.monotonic() > deadline and any(read_log(run / "metrics.jsonl"))
            ):
                time.sleep(0.2)
        finally:
            trial.kill()  # past the deadline it is in the middle of a step, and nothing of it is kept
            status = trial.wait()
            for number, handler in before.items():
                signal.signal(number, handler)
            if sys.stderr.isatty():  # where its bars would stand for ever
                print("\r\x1b[J", end="", file=sys.stderr, flush=True)
        steps, answers = (list(read_log(run / f"{name}.jsonl")) for name in ("metrics", "rollouts"))
    if not steps:
        raise ValueError(f"--try: train.py ended with status {status} before its first step")
    for name, one in audit_rewards(task, config.data.reward_gate):
        seen = {answer["rewards"].get(name) for answer in answers} - {None}
        if not one.only or seen <= one.only:  # else the trial saw it pay otherwise
            yield f"reward {one.name}: {audit.describe_surprise(one)}"
    if config.evaluation.every:
        values = [answer["reward"] for answer in answers if answer["reward"] is not None] or [0.0]
        within = sum(step["reward/std"] or 0.0 for step in steps) / len(steps)
        deviation = (
            within / (max(values) - min(values)) if within and task.metric == "score" else 0.0
        )
        held_out = spread_evenly(task.held_out, config.evaluation.limit)
        yield from warn_of_few_held_out(len(held_out), config.to_flags(), deviation)
        yield from tasks.warn_of_contamination(config, task.train, held_out)
    yield from trial_verdict(config, steps, answers, verify_answers(task, answers), too_large)


def explain_hopeless(
    config: Config, steps: list[dict[str, Any]], evaluation_s: float, run: Path
) -> str:
    """
    What to change before a run goes on whose first steps, as many as a trial has, showed no signal; else "".

    It is said once, of a run that will last longer than LONG. evaluation_s: seconds of an evaluation.
    """
    seconds, every, num = (
        [step["step/s"] for step in steps],
        config.evaluation.every,
        config.optimizer.steps,
    )
    is_due = len(steps) == TRY_STEPS or sum(seconds[:-1]) <= TRY_SECONDS < sum(seconds)
    left = min(seconds) * (num - len(steps)) + (evaluation_s * (num // every) if every else 0.0)
    has_signal = not config.compares_within_groups or any(
        step["sampling/signal_groups"] != 0 for step in steps
    )
    if has_signal or not is_due or left <= LONG:
        return ""
    *_, advice = trial_verdict(config, steps, list(read_log(run / "rollouts.jsonl")))
    return advice.removeprefix(CHANGE)


def trial_verdict(
    config: Config,
    steps: list[dict[str, Any]],
    answers: list[dict[str, Any]],
    right: Sequence[float] = (),
    too_large: str = "",
) -> Iterator[str]:
    """
    What steps and answers of the model before training say of a run, the advice last.

    right: see `right_of`. too_large: see `misfit`.
    """
    figures = "completion/truncated_frac completion/degenerate_frac judge/unparsed_frac reward/mean reward/std".split()
    means = (sum(step.get(figure) or 0.0 for step in steps) / len(steps) for figure in figures)
    cut, degenerate, unread, reward, deviation = means
    num_groups = config.sampling.batch * len(steps)
    signals = sum(step["sampling/signal_groups"] or 0 for step in steps) / num_groups
    rewards = [answer["reward"] for answer in answers if answer["reward"] is not None] or [0.0]
    low, high = min(rewards), max(rewards)
    middle = (sum(rewards) / len(rewards) - low) / (high - low) if high > low else 0.0
    times = [step["step/s"] for step in steps[1:] or steps]  # the first one warms up
    for answer in answers[:: max(len(answers) // SHOWN, 1)][:SHOWN]:
        earned = "unreadable" if answer["reward"] is None else f"{answer['reward']:.3g}"
        yield f"  {earned}  {shorten_value(prompt_text(answer['prompt']))} -> {shorten_value(answer['completion'])}"
    likely = [
        (share * num_groups + 1) / (num_groups + 2) for share in (signals, cut)
    ]  # 0 of few is not none
    around = max(1.96 * math.sqrt(share * (1 - share) / num_groups) for share in likely)
    yield f"the next shares are those of {num_groups} groups before training, within {around:.0%}; learning moves them"
    yield (
        f"{len(steps)} step{'s' * (len(steps) != 1)}, {len(answers)} answers: {signals:.0%} of the groups have a "
        f"signal, {cut:.0%} of the answers are cut off, {degenerate:.0%} repeat or copy"
    )
    num_right = sum(value >= 1 for value in right)  # as the page has it; less is no right answer
    if right:
        yield f"right by the answers: {num_right} of {len(right)}"
    yield f"rewards {format_range(f'{end:.3g}' for end in (low, high))}, mean {reward:.3g}, which training raises"
    yield f"deviation in a group {deviation:.3g}: what it learns from, 0 where all its answers earn alike"
    num, peak = config.optimizer.steps, max(step["mem/peak_gb"] for step in steps)
    ends = min(times), max(times)
    pace, lasts = (
        format_range(f"{end:.1f}" for end in ends),
        format_range(alive.format_duration(num * end) for end in ends),
    )
    yield f"{pace} s a step, {num} in {lasts} without evaluations, {peak:.2f} GB"
    changes, is_gated, is_payable = (
        [],
        config.data.reward_gate == "form",
        all(map(form.keeps_own_answer, answers)),
    )
    if unread > rubrics.LOUD:
        fix = "take another --judge-model, see docs/judge.md"
        changes.append(f"{unread:.0%} of the judge's scores cannot be read: {fix}")
    if config.compares_within_groups and signals < FEW_SIGNALS:
        kept = [
            form.passes_gate(one["completion"], prompt_text(one["prompt"]), one["finish_reason"])
            for one in answers
        ]
        if is_gated and not (any(kept) and is_payable):
            off = (
                "; it pays some right answers alone nothing: leave it out, or ask for sentences"
                * (not is_payable)
            )
            share = f"{sum(kept) / len(kept):.0%} of the answers pass"
            changes.append(f"{share} --reward-gate form: to be paid, one {form.NEEDED}{off}")
        elif high == low:
            fix = f"take {f'{WARM}, ' * (high <= 0)}a reward that tells answers apart, or other prompts"
            changes.insert(0, f"every answer earns {low:.3g}: {fix}")
        elif middle < FEW_RIGHT:
            changes.insert(0, f"nearly all fail: take {WARM}, easier prompts, or more --groups")
        elif middle > 0.8:
            changes.append("nearly all succeed: take harder prompts")
        else:
            changes.append("answers to one prompt earn alike: try a higher --temp or more --groups")
    if degenerate > MANY_DEGENERATE and not is_gated and is_payable:
        changes.append("set --reward-gate form")
    if cut > MANY_CUT:  # first: it may be why the others are as they are
        is_warm_start_named = any(WARM in change for change in changes)
        warm = "" if is_warm_start_named else f"take {WARM}, "
        changes.insert(
            0,
            f"ask for shorter answers, {warm}or raise --max-tokens above {config.sampling.max_tokens}",
        )
    room = memory.memory_size() / 1e9
    if not too_large and peak > room:
        too_large = f"{TOO_LARGE}: a step took {peak:.2f} GB, and this machine has {room:.2f}"
    if too_large:
        changes.insert(0, too_large)
    enough = f": a signal in {signals:.0%} of the groups, where {FEW_SIGNALS:.0%} are enough, however low the mean"
    last = (
        f"{CHANGE}{'; '.join(changes)}"
        if changes
        else "go" + enough * config.compares_within_groups
    )
    is_lost = (
        config.compares_within_groups
        and right
        and not any(value > 0 for value in right)
        and "warm start" not in last
    )
    yield last + NONE_RIGHT * bool(is_lost)


@guard_output()
def main(argv: list[str] | None = None) -> None:
    parser = Parser(
        "preflight.py",
        "What memory a run needs, or what its rewards pay for. Flags of train.py, and:",
    )
    parser.add_argument(
        "--try",
        action="store_true",
        dest="trial",
        help="take four steps first and say what they show",
    )
    parser.add_argument(
        "--prompt-tokens", type=int, default=256, help="length of the longest prompts"
    )
    parser.add_argument(
        "--audit", action="store_true", help="show instead what the reward functions pay for"
    )
    parser.add_argument(
        "--fits", action="store_true", help="show instead what this machine can train"
    )
    own, rest = parser.parse_known_args(sys.argv[1:] if argv is None else argv)
    with report_mistakes():
        check_least(own, prompt_tokens=1)
        text = ""
        for text in describe_fitting_models() if own.fits else describe_run(own, rest):
            print(alive.wrap_for_terminal(text), flush=True)
        if text.startswith(CHANGE + TOO_LARGE):
            sys.exit(1)


def describe_run(own: argparse.Namespace, rest: list[str]) -> Iterator[str]:
    """The lines about one run. rest: the flags of train.py."""
    args = parse_flags(rest)
    if args.resume is True:
        args.resume = checkpoint.newest_unfinished(
            parse_setting(SETTINGS["steps"], args.steps) if args.steps else None
        )
    config, choice = resolve_settings(
        given_settings(args), args.config, args.resume, gwen.choose_model
    )
    if config.objective.loss_type == "sft" and (own.trial or own.audit):
        flag = "--try" if own.trial else "--audit"
        raise ValueError(
            f"{flag} looks at sampled answers and rewards, and --loss-type sft has none; leave it out"
        )
    if own.audit:
        audits = audit_rewards(tasks.make_task(config), config.data.reward_gate)
        said = [text for _, one in audits for text in audit.audit_table(one)]
        if not said:
            judged = "only a judge or an environment, which are not asked"
            raise ValueError(f"--audit: --task {config.data.task} has no reward function, {judged}")
        yield from said
        return
    if own.trial:
        yield choice
        yield from map(escape_invisible, try_out(config))
        return
    gwen.refuse_packed(config.model.name)
    model = gwen.load_config(config.model.name)
    if config.tools.tools or config.tools.env:
        context = episodes.conversation_limit(config.tools, model.max_position_embeddings)
        config = config.with_settings(max_tokens=max(context - own.prompt_tokens, 1))
    demand = RunDemand(
        model,
        gwen.default_dtype(),
        config,
        [own.prompt_tokens] * config.sampling.batch,
        rubric_of(config),
    )
    witness = (
        Path(config.evaluation.rubric)
        if config.evaluation.rubric and config.evaluation.every
        else None
    )
    most = demand._replace(rubric=demand.rubric or witness)  # a step asks no witness
    sizes = choose_sizes(most)
    yield f"{choice}; {own.prompt_tokens} prompt tokens"
    yield memory_line(most, sizes)
    yield time_line(demand, sizes)
    if too_large := explain_misfit(most, sizes):
        yield CHANGE + too_large


if __name__ == "__main__":
    main()
