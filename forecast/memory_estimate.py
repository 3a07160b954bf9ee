"""
An estimate of the memory that a run needs, from its settings and its model's configuration alone.

Some things stay in memory: weights, adapters, the optimizer's state and Python. In addition, a step
needs memory for its three phases, which follow one another: rollout, judging and update. The
largest phase decides the peak. The estimate assumes that every completion is as long as allowed and
that a step has the longest prompts.

The bytes of weights, moments, caches and logits are counted. The bytes that a layer keeps for its
gradient are one constant, measured on a CPU, times the layer's widths. A test checks that the
estimate is between 5% below and 30% above the measured peak. This file does not cover the bytes of
one position or one row (step/rows.py), the machine's memory (machine/memory.py) and the time of a
step (forecast/time_estimate.py).

Axes: M rows of a micro-batch, P prompt and T completion positions, S keys, V vocabulary, C hidden,
H query heads, K kv heads, D head dim, F mlp width.
"""

import dataclasses
from pathlib import Path
from typing import NamedTuple

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten

import gwen
from config import Config, ModelSettings, Sizes
from disk import checkpoint, hub, model_choice
from judging import rubrics
from kv_cache import round_up
from layers import attention, lm_head
from machine import gpu, memory, world
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
    """The bytes that macOS recommends for a GPU's working set, such as 11.45e9 of 16 GB."""
    return 2 * memory_bytes // 3


LAPTOP = gpu_memory_limit(2**34)
PYTHON_BYTES = 170_000_000  # 30 MB of them are for reading data
TOKENIZER_BYTES = 700  # bytes for each token of the vocabulary
# Positions of a micro-batch. On a CPU an update with 8192 positions took as long as with 1024 for
# random:2m, and 1.5 times as long for random:30m.
BUDGET = 1024
GPU_BUDGET = 2048
# The memory of a layer while its gradient is computed, as a multiple of the intermediate results
# that the layer keeps. LINEAR_: the same for a gated delta net, which needs less because it
# computes the levels of a prompt tree one after the other.
WORKING = 1.7  # in addition to what all layers keep
LINEAR_WORKING = 1.1
RECOMPUTED = 2.4  # for a layer whose intermediate results are computed again
RECOMPUTED_SHARED = 2.0  # the same, if rows share their prompts
LINEAR_RECOMPUTED = 1.6
TEMPLATE_TOKENS = 30  # tokens that a chat template and a judge's tags add to a text
TOKEN_CHARACTERS = 4
TILES_IN_FLIGHT = 9  # tiles of log-probabilities that are in memory because MLX computes ahead


class MemoryNeed(NamedTuple):
    """The bytes that stay in memory, by name, and the additional bytes of each phase."""

    resident: dict[str, int]
    phases: dict[str, int]

    @property
    def total(self) -> int:
        return sum(self.resident.values()) + max(self.phases.values())


class RunDemand(NamedTuple):
    """The facts that decide the memory of a run, together with its `Sizes`."""

    model: hub.ModelConfig
    dtype: mx.Dtype
    config: Config
    prompt_lengths: list[int]  # for --loss-type sft: the lengths of conversations
    rubric: Path | None = None  # the judge's rubric
    response_length: int | None = None  # the most tokens after a prompt; None: max_tokens

    @property
    def longest_prompts(self) -> list[int]:
        """The lengths of a step's prompts, ascending, if the step has the longest prompts."""
        return sorted(self.prompt_lengths)[-self.config.sampling.batch :]

    @property
    def longest_response(self) -> int:
        """The most tokens that follow a prompt."""
        return self.response_length or self.config.sampling.max_tokens

    @property
    def is_sft(self) -> bool:
        """Whether the run trains on given replies and samples nothing."""
        return self.config.objective.loss_type == "sft"

    @property
    def group_size(self) -> int:
        """The number of completions of a prompt; 1 if replies are given, one for each prompt."""
        return 1 if self.is_sft else self.config.sampling.groups

    @property
    def completion_tokens(self) -> int:
        """The most tokens of a completion; 1 if replies are given, as they count as prompts."""
        return 1 if self.is_sft else self.longest_response

    @property
    def judge(self) -> hub.ModelConfig | None:
        """The model that judges on this machine, if any."""
        if self.rubric is None or self.config.judge.url:
            return None
        with model_choice.blame_flag("--judge-model"):
            if self.config.judges_itself:
                return self.model
            return model_choice.load_config(self.config.judge.model)


# ---- parameters


class ParameterCounts(NamedTuple):
    """Numbers of parameters: all, those in the matrices of layers, and those that are trained."""

    weights: int
    matmuls: int
    trained: int


def count_parameters(
    model: hub.ModelConfig, adapters: ModelSettings | None = None
) -> ParameterCounts:
    """
    Counts a model's parameters. It multiplies one layer of each kind by the number of such layers.

    The arrays are lazy, so nothing is computed. adapters: None for a model without adapters.
    """
    kinds = tuple(dict.fromkeys(model.layer_kinds))
    small_model = gwen.Model(dataclasses.replace(model, layer_kinds=kinds))
    rank = adapters.lora_rank if adapters else 0
    targets = adapters.lora_targets if adapters else []

    weights = 0
    matmuls = 0
    adapted_widths = 0
    for name, array in tree_flatten(small_model.parameters()):
        parts = name.split(".")
        if parts[0] != "layers":
            weights += array.size
            continue

        num_layers = model.layer_kinds.count(kinds[int(parts[1])])
        weights += num_layers * array.size
        if array.ndim == 2:
            matmuls += num_layers * array.size
            if parts[-2] in targets:
                adapted_widths += num_layers * sum(array.shape)
    return ParameterCounts(weights, matmuls, rank * adapted_widths if rank else weights)


def frozen_bytes(name: str, model: hub.ModelConfig, dtype: mx.Dtype) -> int:
    """The bytes of the weights of a judge or teacher. Weights of few bits stay packed on a GPU."""
    if not (model.packing and gpu.on_gpu()):
        return count_parameters(model).weights * dtype.size
    packed_model = gwen.load_model(hub.find_model(name), dtype, packed=True, lazy=True)
    return sum(array.nbytes for _, array in tree_flatten(packed_model.parameters()))


# ---- bytes of the parts of a run


def estimate(demand: RunDemand, sizes: Sizes) -> MemoryNeed:
    """The most memory that a run needs."""
    phases = {
        "rollout": rollout_phase_bytes(demand, sizes.rollout_batch_size),
        "judging": judging_bytes(demand),
        "update": update_bytes(demand, sizes),
    }
    return MemoryNeed(resident_bytes(demand), phases)


def resident_bytes(demand: RunDemand) -> dict[str, int]:
    """The bytes that stay in memory in every phase, by name."""
    model = demand.model
    dtype = demand.dtype
    config = demand.config
    rank = config.model.lora_rank
    teacher = config.objective.teacher
    counts = count_parameters(model, config.model)
    weights = counts.weights * dtype.size

    # float32 weights that are trained need no masters; 16-bit adapters are copies of masters
    num_masters = counts.trained if rank or dtype != mx.float32 else 0
    copy_size = dtype.size if rank and dtype != mx.float32 else 0
    resident = {"weights": weights}
    resident["adapters" if rank else "masters"] = (4 + copy_size) * num_masters
    resident["optimizer"] = 0 if config.optimizer.kind == "sgd" else 8 * counts.trained

    if teacher:
        with model_choice.blame_flag("--teacher"):
            teacher_model = model if teacher == "self" else model_choice.load_config(teacher)
        shares_weights = teacher == "self" and rank
        teacher_weights = 0 if shares_weights else frozen_bytes(teacher, teacher_model, dtype)
        num_completions = config.sampling.batch * demand.group_size
        # the teacher keeps the hidden states of all completions for the update
        num_states = num_completions * demand.completion_tokens * teacher_model.hidden_size
        resident["teacher"] = teacher_weights + num_states * dtype.size

    judge = demand.judge
    if judge and not config.judges_itself:
        resident["judge"] = frozen_bytes(config.judge.model, judge, dtype)

    # a frozen copy of the model, in addition to the weights that are trained
    is_reference = bool(config.objective.beta) or (judge is not None and config.judges_itself)
    has_base = not rank and teacher != "self" and is_reference
    resident["base"] = weights if has_base else 0
    resident["Python"] = PYTHON_BYTES + TOKENIZER_BYTES * model.vocab_size
    return resident


def rollout_phase_bytes(demand: RunDemand, rows: int) -> int:
    """The bytes of a rollout with `rows` rows at once, for caches and intermediate results."""
    if demand.is_sft:
        return 0
    cache_bytes, working_bytes = rollout_bytes(
        demand.model,
        demand.dtype,
        demand.longest_prompts,
        demand.group_size,
        demand.completion_tokens,
        rows,
    )
    return cache_bytes + working_bytes


def judging_bytes(demand: RunDemand) -> int:
    """
    The bytes of the judge's cache and forward pass.

    The judge's prompts are a tree (judging/prompt_tree.py). Its levels are the rubric's preamble,
    the questions, the answers and the criteria.
    """
    model = demand.judge
    if model is None or demand.rubric is None:
        return 0
    dtype = demand.dtype
    settings = demand.config.judge
    preamble, criteria = rubrics.load_rubric(demand.rubric)
    longest_criterion = max((criterion.text for criterion in criteria), key=len)
    preamble_tokens = TEMPLATE_TOKENS + len(preamble) // TOKEN_CHARACTERS
    criterion_tokens = TEMPLATE_TOKENS + len(longest_criterion) // TOKEN_CHARACTERS
    answer_tokens = demand.longest_response

    rows = settings.chunk_size
    num_answers = max(rows // len(criteria), 1)
    questions = demand.longest_prompts[-num_answers:]
    question_tokens = max(questions)
    keys = preamble_tokens + question_tokens + answer_tokens + criterion_tokens

    # the positions of each level of the tree
    question_positions = len(questions) * question_tokens
    answer_positions = num_answers * answer_tokens
    criterion_positions = rows * criterion_tokens
    columns = preamble_tokens + question_positions + answer_positions + criterion_positions
    if settings.mode == "decode":
        reply_columns = round_up(settings.think + rubrics.REPLY_TOKENS)
        columns += rows * (round_up(keys) + reply_columns)

    positions = max(question_positions, answer_positions, criterion_positions)
    logits = 4 * 4 * rows * model.vocab_size
    working = 1.1 * positions * forward_bytes(model, dtype, keys) + logits
    num_nodes = 1 + len(questions) + num_answers + rows  # each node keeps a state
    cache = column_bytes(model, dtype) * columns + state_bytes(model, dtype) * num_nodes
    return int(cache + working)


# ---- the update


class MicroBatch(NamedTuple):
    """The sizes of a micro-batch whose completions are all as long as allowed."""

    num_rows: int
    num_positions: int  # positions that layers compute
    longest_prompt: int
    shares_prompts: bool  # whether rows with the same prompt compute it only once


def plan_micro_batches(demand: RunDemand, sizes: Sizes) -> list[MicroBatch]:
    """The micro-batches of a step whose completions are all as long as allowed."""
    prompts: list[list[int]] = []
    for number, length in enumerate(demand.longest_prompts):
        prompt = [number] * length  # its ids differ from those of every other prompt
        prompts += [prompt] * demand.group_size
    lengths = np.full(len(prompts), demand.completion_tokens)
    shares_prompts, plan = batch.plan_batches(prompts, lengths, sizes.train_token_budget, "auto")

    micro_batches = []
    for rows, num_positions in plan:
        longest_prompt = max(len(prompts[row]) for row in rows)
        micro_batches.append(MicroBatch(len(rows), num_positions, longest_prompt, shares_prompts))
    return micro_batches


def update_bytes(demand: RunDemand, sizes: Sizes) -> int:
    """The bytes of an update: those of its largest micro-batch and of the gradient."""
    trained = count_parameters(demand.model, demand.config.model).trained
    micro_batches = plan_micro_batches(demand, sizes)
    largest = 0
    for micro_batch in micro_batches:
        num_bytes = micro_batch_bytes(demand, sizes.checkpoint_layers, micro_batch)
        largest = max(largest, num_bytes)
    if len(micro_batches) > 1 or sizes.checkpoint_layers > 0:
        largest += 4 * trained  # the sum of the gradients so far
    # At the end there are the gradient and the optimizer's new tensors before old ones are freed:
    # measurements gave 5 to 7 bytes a parameter.
    return max(largest, 7 * trained)


def micro_batch_bytes(demand: RunDemand, num_recomputed: int, micro_batch: MicroBatch) -> int:
    """
    The bytes of a micro-batch's forward and backward pass.

    num_recomputed: the number of first layers whose intermediate results are computed again.
    """
    model = demand.model
    dtype = demand.dtype
    recomputed_kinds = model.layer_kinds[:num_recomputed]
    kept_kinds = model.layer_kinds[num_recomputed:]
    keys = micro_batch.longest_prompt + demand.completion_tokens - 1
    bytes_of_kind = {
        kind: micro_batch.num_positions * layer_bytes(model, dtype, keys, kind)
        for kind in set(model.layer_kinds)
    }

    kept = sum(bytes_of_kind[kind] for kind in kept_kinds)
    backward = 0.0  # bytes of the largest layer that keeps its intermediate results
    for kind in kept_kinds:
        factor = LINEAR_WORKING if kind == "linear_attention" else WORKING
        backward = max(backward, bytes_of_kind[kind] * factor)
    recomputed = 0.0  # bytes of the largest layer that is computed again
    for kind in recomputed_kinds:
        factor = RECOMPUTED_SHARED if micro_batch.shares_prompts else RECOMPUTED
        if kind == "linear_attention":
            factor = LINEAR_RECOMPUTED
        recomputed = max(recomputed, bytes_of_kind[kind] * factor)
    if gpu.on_gpu():
        scores = (4 + 3 * dtype.size) * attention.MOST_SCORES  # scores in attention's gradient
        backward += scores
        recomputed += scores

    inputs = recomputed_input_bytes(demand, num_recomputed, micro_batch)
    logprobs = logprob_bytes(demand, micro_batch)
    return int(inputs + max(kept + max(backward, logprobs), recomputed))


def recomputed_input_bytes(
    demand: RunDemand, num_recomputed: int, micro_batch: MicroBatch
) -> float:
    """The bytes of the inputs that layers keep in order to be computed again."""
    model = demand.model
    column = column_bytes(model, demand.dtype)
    position_bytes: float = demand.dtype.size * model.hidden_size
    if not micro_batch.shares_prompts:
        return micro_batch.num_positions * position_bytes * num_recomputed

    # layers also keep the prompts' keys, values and states for the rows that share a prompt
    position_bytes += column / model.num_hidden_layers
    inputs = micro_batch.num_positions * position_bytes * num_recomputed
    inputs += micro_batch.num_rows * state_bytes(model, demand.dtype)
    if gpu.on_gpu():  # the keys and values of all prompts, joined
        inputs += micro_batch.num_rows * micro_batch.longest_prompt * column
    return inputs


def logprob_bytes(demand: RunDemand, micro_batch: MicroBatch) -> int:
    """The bytes of a micro-batch's log-probabilities and of their gradient."""
    width = demand.model.hidden_size
    vocabulary = demand.model.vocab_size
    num_tokens = micro_batch.num_rows * demand.completion_tokens
    if demand.is_sft:
        num_tokens = micro_batch.num_positions

    hidden_states = num_tokens * width * (8 + 2 * demand.dtype.size)
    if uses_kernels():  # the logits of some rows, and their gradient
        num_rows = min(lm_head.ROWS_AT_ONCE, num_tokens)
        return hidden_states + 2 * demand.dtype.size * num_rows * vocabulary
    num_logits = min(TILES_IN_FLIGHT * lm_head.LOGPROB_TILE, 4 * num_tokens * vocabulary)
    tiles = 4 * num_logits
    # the gradient of the head is computed in tiles, which are joined at the end
    head = 0 if demand.config.model.lora_rank else 4 * vocabulary * width
    return hidden_states + max(tiles + head, 2 * head)


# ---- sizes that fit


def choose_sizes(
    demand: RunDemand, most_rows: int = USUAL_ROWS, room: float | None = None
) -> Sizes:
    """
    Chooses a value for each size whose setting is `auto`.

    If a run does not fit, this function first makes the micro-batches smaller. If that is not
    enough, as few layers as possible compute their intermediate results again, which costs up to a
    third of the update. A run fits if it needs at most nine tenths of the GPU's memory. Without a
    GPU the memory of a laptop's GPU is the limit, so that the sizes do not depend on the machine.

    most_rows: the rows of the largest rollout or evaluation. room: bytes; None means the memory of
    this machine.
    """
    sampling = demand.config.sampling
    if not room:
        room = memory.memory_size() if gpu.on_gpu() else LAPTOP
    free_bytes = ROOM * room - sum(resident_bytes(demand).values())

    rows = sampling.rollout_batch_size or most_rows
    for token_budget, num_recomputed in update_choices(demand):
        sizes = Sizes(rows, token_budget, num_recomputed)
        if update_bytes(demand, sizes) <= free_bytes:
            break

    if not sampling.rollout_batch_size:
        rows = choose_rollout_rows(
            lambda rows: rollout_phase_bytes(demand, rows) <= free_bytes, most_rows
        )
    return sizes._replace(rollout_batch_size=rows)


def update_choices(demand: RunDemand) -> list[tuple[int, int]]:
    """Allowed pairs of a token budget and a number of recomputed layers, the fastest first."""
    optimizer = demand.config.optimizer
    num_layers = demand.model.num_hidden_layers
    if optimizer.train_token_budget:
        budgets = [optimizer.train_token_budget]
    elif gpu.on_gpu():
        budgets = [GPU_BUDGET, BUDGET]
    else:
        budgets = [BUDGET]

    named_counts = {"off": [0], "on": [num_layers], "auto": list(range(num_layers + 1))}
    counts = named_counts.get(optimizer.checkpoint_layers)
    if counts is None:
        counts = [int(optimizer.checkpoint_layers)]

    choices = [(budget, counts[0]) for budget in budgets]
    choices += [(budgets[-1], count) for count in counts[1:]]
    return choices


def agree_on_sizes(sizes: Sizes) -> Sizes:
    """The sizes for which every rank has the memory."""
    all_sizes = [Sizes(*values) for values in world.all_gather(list(sizes))]
    return Sizes(
        min(sizes.rollout_batch_size for sizes in all_sizes),
        min(sizes.train_token_budget for sizes in all_sizes),
        max(sizes.checkpoint_layers for sizes in all_sizes),
    )


def rubric_path(config: Config) -> Path | None:
    """The rubric of a run's judge, found from the settings alone, without reading data."""
    data = config.data
    if data.reward_weights.get("rubric") == 0:
        return None
    if data.rubric:
        return Path(data.rubric)

    replaces_rubric = bool(data.reward) and "rubric" not in data.reward_weights
    if config.objective.loss_type in ("sft", "distill") or replaces_rubric:
        return None
    bundled = Path(__file__).parents[1] / "data" / f"{data.task}_rubric.yaml"
    return bundled if bundled.is_file() else None


# ---- lines for the console

TOO_LARGE = "it does not fit"
CHANGE = "change: "  # begins the last line if the user should change something
REMEDIES = {  # part of the memory -> what makes it smaller
    "masters": "set --lora-rank 16",
    "optimizer": "set --lora-rank 16",
    "base": "set --lora-rank 16",
    "weights": "take a smaller --model",
    "teacher": "take a smaller --teacher",
    "judge": "take a smaller --judge-model",
    "rollout": "lower --rollout-batch-size or --max-tokens",
    "judging": "lower --judge-chunk-size",
    "update": "lower --train-token-budget, or set --checkpoint-layers on",
}


def memory_line(demand: RunDemand, sizes: Sizes) -> str:
    """
    A line with the memory that a run needs, by its parts, and with the memory of the machine.

    If the run does not fit, the line names the flag to change.
    """
    need = estimate(demand, sizes)
    room = memory.memory_size()
    resident = list_gigabytes(need.resident)
    phases = list_gigabytes(need.phases)
    phase_text = ", ".join(phases)
    if len(phases) > 1:
        phase_text = f"the largest of {phase_text}"
    checkpoint_layers = sizes.as_settings()["checkpoint_layers"]
    line = (
        f"memory: {need.total / 1e9:.2f} of {room / 1e9:.2f} GB = {' + '.join(resident)} + "
        f"{phase_text} at --train-token-budget {sizes.train_token_budget} "
        f"--checkpoint-layers {checkpoint_layers}"
    )

    if not demand.config.model.lora_rank:
        disk_bytes = most_checkpoint_bytes(demand, need)
        line += f"; checkpoints take up to {disk_bytes / 1e9:.1f} GB of disk"
    if need.total > room:
        line += f"; {TOO_LARGE}: {suggest_remedy(need, room)}"
    return line


def list_gigabytes(sizes: dict[str, int]) -> list[str]:
    """For each size that is not 0 a text with the size in GB and its name."""
    return [f"{size / 1e9:.2f} {name}" for name, size in sizes.items() if size]


def most_checkpoint_bytes(demand: RunDemand, need: MemoryNeed) -> int:
    """The most bytes that the checkpoints take on disk in a run that trains all weights."""
    weights = need.resident["weights"]
    masters = 4 * count_parameters(demand.model).weights
    checkpoint_bytes = masters + need.resident["optimizer"] + weights
    # one more checkpoint while it is saved, and two adapters, which are all weights
    return (checkpoint.KEPT + 1) * checkpoint_bytes + 2 * weights


def suggest_remedy(need: MemoryNeed, room: int) -> str:
    """How to make the largest part smaller in a run that needs more than `room` bytes."""
    if need.resident["Python"] >= room:
        return "Python and MLX alone need more; take a machine with more memory"
    parts = need.phases if sum(need.resident.values()) <= room else need.resident
    largest = max(REMEDIES.keys() & parts.keys(), key=parts.__getitem__)
    return REMEDIES[largest]


def explain_misfit(demand: RunDemand, sizes: Sizes) -> str:
    """Why the run exceeds this machine's memory, and what to change; "" if it fits."""
    need = estimate(demand, sizes)
    room = memory.memory_size()
    if need.total <= room:
        return ""
    sizes_text = f"it needs about {need.total / 1e9:.2f} GB, and this machine has {room / 1e9:.2f}"
    return f"{TOO_LARGE}: {sizes_text}; {suggest_remedy(need, room)}"
