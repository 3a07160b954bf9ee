"""
Estimates the memory of a run, using only its settings and its model's configuration.

Weights, adapters, the optimizer state and Python stay in memory during the whole run. Each step
also needs memory for three phases: rollout, judging and update. The phases follow one another, so
the largest phase determines the peak. The estimate assumes that every completion is as long as
the settings allow, and that a step contains the longest prompts.

The bytes of weights, moments, caches and logits are counted exactly. The bytes that a layer keeps
for its gradient are estimated as the sum of the widths of the layer's arrays, times a constant that
was measured on a CPU. A test checks that the whole estimate is at most 5% below and at most 30%
above the measured peak. row_memory.py estimates the bytes of one position or one completion,
time_estimate.py estimates the time of a step, and machine/memory.py measures the memory of this
machine.

Axes: M rows of a micro-batch, P prompt and T completion positions, S keys, V vocabulary, C hidden,
H query heads, K kv heads, D head dim, F mlp width.
"""

import dataclasses
from pathlib import Path
from typing import NamedTuple

import cpu_blas  # noqa: F401  (before mlx)
import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten

import gwen
from config import Config, MemoryDependentSizes, ModelSettings, evaluations_sample_answers
from disk import checkpoint, hub, model_choice
from forecast.row_memory import (
    ROOM,
    USUAL_ROWS,
    cache_bytes_per_token,
    choose_rollout_rows,
    delta_state_bytes_per_row,
    forward_bytes_per_position,
    layer_backward_bytes_per_position,
    rollout_bytes,
    uses_kernels,
)
from judging import rubrics
from judging.evaluations import REPLY_TOKENS
from kv_cache import round_up_to_chunk
from layers import attention, lm_head
from machine import gpu, memory, world
from step import batch


def gpu_memory_limit(memory_bytes: int) -> int:
    """The bytes that macOS lets the GPU use, for example 11.45e9 on a Mac with 16 GB of memory."""
    return 2 * memory_bytes // 3


LAPTOP = gpu_memory_limit(2**34)  # the GPU memory of a laptop with 16 GB
PYTHON_BYTES = 170_000_000  # including 30 MB for reading data
TOKENIZER_BYTES = 700  # bytes per token in the vocabulary

# The maximum number of positions in a micro-batch. On a CPU, an update with 8192 positions per
# micro-batch took as long as with 1024 for random:2m, and 1.5 times as long for random:30m.
BUDGET = 1024
GPU_BUDGET = 2048
# The next five numbers give the memory of a layer while its gradient is computed, as a multiple of
# the layer's intermediate results. A gated delta net (LINEAR_) needs less memory, because it
# computes the levels of a prompt tree one after the other.
WORKING = 1.7  # in addition to the intermediate results that all layers keep
LINEAR_WORKING = 1.1
RECOMPUTED = 2.4  # for a layer whose intermediate results are computed again
RECOMPUTED_SHARED = 2.0  # for such a layer if completions share their prompts
LINEAR_RECOMPUTED = 1.6
TEMPLATE_TOKENS = 30  # the number of tokens that a chat template or a judge prompt adds to a text
TOKEN_CHARACTERS = 4  # the assumed number of characters per token
# MLX computes ahead, so up to this many tiles of log-probabilities are in memory at the same time.
TILES_IN_FLIGHT = 9


class MemoryNeed(NamedTuple):
    """The bytes of memory that a run needs."""

    resident: dict[str, int]  # what stays in memory during the whole run, by name
    phases: dict[str, int]  # what each phase of a step needs in addition, by the phase's name

    @property
    def peak_bytes(self) -> int:
        """The bytes in memory during the phase that needs the most."""
        return sum(self.resident.values()) + max(self.phases.values())


class RunDemand(NamedTuple):
    """The facts that, together with the MemoryDependentSizes, determine the memory of a run."""

    model: hub.ModelConfig
    dtype: mx.Dtype
    config: Config
    prompt_lengths: list[int]  # in tokens; for --loss-type sft, the lengths of whole conversations
    rubric: Path | None = None  # the judge's rubric
    response_length: int | None = None  # maximum number of tokens after a prompt; None: max_tokens

    @property
    def longest_prompt_lengths(self) -> list[int]:
        """The lengths of the longest prompts, as many as one step has, in ascending order."""
        return sorted(self.prompt_lengths)[-self.config.sampling.batch :]

    @property
    def max_tokens_after_prompt(self) -> int:
        """The maximum number of tokens after a prompt, including the results of tools."""
        return self.response_length or self.config.sampling.max_tokens

    @property
    def is_sft(self) -> bool:
        """Whether the run trains on given replies and does not sample completions."""
        return self.config.objective.loss_type == "sft"

    @property
    def group_size(self) -> int:
        """The number of completions per prompt, or 1 if the run trains on given replies."""
        return 1 if self.is_sft else self.config.sampling.groups

    @property
    def trained_group_size(self) -> int:
        """How many completions of each prompt an update trains on."""
        return min(self.config.objective.train_completions or self.group_size, self.group_size)

    @property
    def max_completion_tokens(self) -> int:
        """
        The maximum number of tokens in a completion.

        The number is 1 if the run trains on given replies, because their tokens count as prompt
        tokens.
        """
        return 1 if self.is_sft else self.max_tokens_after_prompt

    @property
    def judge_config(self) -> hub.ModelConfig | None:
        """The configuration of the judge model, or None if no judge runs on this machine."""
        if self.rubric is None or self.config.judge.url:
            return None
        with model_choice.replace_flag_in_errors("--judge-model"):
            if self.config.judges_with_base_model:
                return self.model
            return model_choice.load_config(self.config.judge.model)


# ---- parameters


class ParameterCounts(NamedTuple):
    """The numbers of parameters in a model."""

    weights: int  # all parameters of the model, without adapters
    matmuls: int  # the parameters in the matrices of layers
    trained: int  # the parameters that are trained, such as those of adapters


def count_parameters(
    model: hub.ModelConfig, adapters: ModelSettings | None = None
) -> ParameterCounts:
    """
    Count the parameters of a model without loading or computing any weights.

    This is fast, because only one layer of each kind is built.

    adapters: the settings of adapters; None means that all weights are trained.
    """
    kinds = tuple(dict.fromkeys(model.layer_kinds))
    small_model = gwen.Model(dataclasses.replace(model, layer_kinds=kinds))
    rank = adapters.lora_rank if adapters else 0
    targets = adapters.lora_targets if adapters else []
    adapted_kinds = trained_layer_kinds(model, adapters) if adapters else ()

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
                num_adapted = adapted_kinds.count(kinds[int(parts[1])])
                adapted_widths += num_adapted * sum(array.shape)
    return ParameterCounts(weights, matmuls, rank * adapted_widths if rank else weights)


def trained_layer_kinds(model: hub.ModelConfig, settings: ModelSettings) -> tuple[str, ...]:
    """The kinds of the layers in the backward pass, from the lowest trained layer upward."""
    if settings.lora_layers is None:
        return model.layer_kinds
    return model.layer_kinds[-settings.lora_layers :]


def frozen_model_bytes(name: str, model: hub.ModelConfig, dtype: mx.Dtype) -> int:
    """
    Return how many bytes a model's weights take if the model is frozen, like a judge or a teacher.

    On a GPU, quantized weights stay quantized.
    """
    if not (model.packing and gpu.on_gpu()):
        return count_parameters(model).weights * dtype.size
    packed_model = gwen.load_model(hub.find_model_directory(name), dtype, packed=True, lazy=True)
    return sum(array.nbytes for _, array in tree_flatten(packed_model.parameters()))


# ---- bytes of the parts of a run


def estimate_memory(demand: RunDemand, sizes: MemoryDependentSizes) -> MemoryNeed:
    """Estimate the maximum memory that a run needs."""
    phases = {
        "rollout": bytes_added_by_rollout(demand, sizes.rollout_batch_size),
        "judging": bytes_added_by_judging(demand),
        "update": update_phase_bytes(demand, sizes),
    }
    return MemoryNeed(resident_bytes(demand), phases)


def resident_bytes(demand: RunDemand) -> dict[str, int]:
    """Return the bytes of each part, such as "weights", that is in memory during all phases."""
    model = demand.model
    dtype = demand.dtype
    config = demand.config
    rank = config.model.lora_rank
    teacher = config.objective.teacher
    counts = count_parameters(model, config.model)
    weights = counts.weights * dtype.size

    # If all weights are trained and have float32, they need no float32 copies (masters). Adapters
    # are trained in float32, and also have a 16-bit copy if the model has 16 bits.
    num_masters = counts.trained if rank or dtype != mx.float32 else 0
    copy_size = dtype.size if rank and dtype != mx.float32 else 0
    resident = {"weights": weights}
    resident["adapters" if rank else "masters"] = (4 + copy_size) * num_masters
    resident["optimizer"] = 0 if config.optimizer.kind == "sgd" else 8 * counts.trained

    if teacher:
        with model_choice.replace_flag_in_errors("--teacher"):
            teacher_model = model if teacher == "self" else model_choice.load_config(teacher)
        shares_weights = teacher == "self" and rank
        teacher_weights = 0 if shares_weights else frozen_model_bytes(teacher, teacher_model, dtype)
        num_completions = config.sampling.batch * demand.group_size
        # The teacher's hidden states for all completions are kept until the update.
        num_states = num_completions * demand.max_completion_tokens * teacher_model.hidden_size
        resident["teacher"] = teacher_weights + num_states * dtype.size

    judge = demand.judge_config
    if judge and not config.judges_with_base_model:
        resident["judge"] = frozen_model_bytes(config.judge.model, judge, dtype)

    # If all weights are trained, the reference and the judge need a frozen copy of the model.
    needs_base = bool(config.objective.beta) or (
        judge is not None and config.judges_with_base_model
    )
    has_base_copy = not rank and teacher != "self" and needs_base
    resident["base"] = weights if has_base_copy else 0
    resident["Python"] = PYTHON_BYTES + TOKENIZER_BYTES * model.vocab_size
    return resident


def bytes_added_by_rollout(demand: RunDemand, rows_at_once: int) -> int:
    """
    Return the bytes that a rollout needs for caches and intermediate results.

    rows_at_once: the number of completions that are sampled at the same time.
    """
    if demand.is_sft:
        return _sft_held_out_sampling_bytes(demand, rows_at_once)
    cache_bytes, working_bytes = rollout_bytes(
        demand.model,
        demand.dtype,
        demand.longest_prompt_lengths,
        demand.group_size,
        demand.max_completion_tokens,
        rows_at_once,
    )
    return cache_bytes + working_bytes


def _sft_held_out_sampling_bytes(demand: RunDemand, rows_at_once: int) -> int:
    """
    Return the bytes that a run with --loss-type sft needs for sampling held-out answers.

    Returns 0 if the run's evaluations do not sample answers.

    As prompt lengths, the estimate uses the lengths of whole conversations, which are longer.
    """
    config = demand.config
    if not evaluations_sample_answers(config.to_flags()) or not config.evaluation.every:
        return 0
    max_tokens = config.sampling.max_tokens
    lengths = demand.prompt_lengths
    return sum(rollout_bytes(demand.model, demand.dtype, lengths, 1, max_tokens, rows_at_once))


def bytes_added_by_judging(demand: RunDemand) -> int:
    """
    Return the bytes that the judge needs for its cache and its forward pass.

    The judge prompts form a tree (judging/prompt_tree.py), whose levels are the preamble of the
    rubric, the questions, the answers and the criteria.
    """
    model = demand.judge_config
    if model is None or demand.rubric is None:
        return 0
    dtype = demand.dtype
    settings = demand.config.judge
    preamble, criteria = rubrics.load_rubric(demand.rubric)
    longest_criterion = max((criterion.text for criterion in criteria), key=len)
    preamble_tokens = TEMPLATE_TOKENS + len(preamble) // TOKEN_CHARACTERS
    criterion_tokens = TEMPLATE_TOKENS + len(longest_criterion) // TOKEN_CHARACTERS
    answer_tokens = demand.max_tokens_after_prompt

    rows = settings.chunk_size
    num_answers = max(rows // len(criteria), 1)
    questions = demand.longest_prompt_lengths[-num_answers:]
    question_tokens = max(questions)
    keys = preamble_tokens + question_tokens + answer_tokens + criterion_tokens

    # the number of positions in each level of the tree
    question_positions = len(questions) * question_tokens
    answer_positions = num_answers * answer_tokens
    criterion_positions = rows * criterion_tokens
    columns = preamble_tokens + question_positions + answer_positions + criterion_positions
    if settings.mode == "decode":
        reply_columns = round_up_to_chunk(settings.think + REPLY_TOKENS)
        columns += rows * (round_up_to_chunk(keys) + reply_columns)

    positions = max(question_positions, answer_positions, criterion_positions)
    logits = 4 * 4 * rows * model.vocab_size
    working = 1.1 * positions * forward_bytes_per_position(model, dtype, keys) + logits
    num_nodes = 1 + len(questions) + num_answers + rows  # Each node keeps a state.
    cache = (
        cache_bytes_per_token(model, dtype) * columns
        + delta_state_bytes_per_row(model, dtype) * num_nodes
    )
    return int(cache + working)


# ---- the update


class MicroBatchSizes(NamedTuple):
    """The sizes of a micro-batch in which all completions have the maximum length."""

    num_rows: int
    num_positions: int  # the number of positions that layers compute
    longest_prompt: int  # the number of tokens in the longest prompt
    shares_prompts: bool  # whether a prompt is computed only once for all its completions


def plan_micro_batches_at_max_length(
    demand: RunDemand, sizes: MemoryDependentSizes
) -> list[MicroBatchSizes]:
    """Divide a step into micro-batches, as if all completions had the maximum length."""
    prompts: list[list[int]] = []
    for number, length in enumerate(demand.longest_prompt_lengths):
        prompt = [number] * length  # No two prompts share ids.
        prompts += [prompt] * demand.trained_group_size
    lengths = np.full(len(prompts), demand.max_completion_tokens)
    shares_prompts, plan = batch.plan_batches_and_sharing(
        prompts, lengths, sizes.train_token_budget, "auto"
    )

    micro_batches = []
    for rows, num_positions in plan:
        longest_prompt = max(len(prompts[row]) for row in rows)
        micro_batches.append(
            MicroBatchSizes(len(rows), num_positions, longest_prompt, shares_prompts)
        )
    return micro_batches


def update_phase_bytes(demand: RunDemand, sizes: MemoryDependentSizes) -> int:
    """Return the bytes that an update needs for its largest micro-batch and the gradient."""
    trained = count_parameters(demand.model, demand.config.model).trained
    micro_batches = plan_micro_batches_at_max_length(demand, sizes)
    largest = 0
    for micro_batch in micro_batches:
        num_bytes = micro_batch_bytes(demand, sizes.checkpoint_layers, micro_batch)
        largest = max(largest, num_bytes)
    if len(micro_batches) > 1 or sizes.checkpoint_layers > 0:
        largest += 4 * trained  # the sum of the gradients so far

    # At the end of an update, the gradient and new optimizer tensors are in memory before the old
    # tensors are freed. Measurements showed 5 to 7 bytes per parameter.
    return max(largest, 7 * trained)


def micro_batch_bytes(demand: RunDemand, num_recomputed: int, micro_batch: MicroBatchSizes) -> int:
    """
    Return the bytes that the forward and backward passes of a micro-batch need.

    num_recomputed: the number of layers, counted from the first trained layer, whose intermediate
        results are not kept, but computed again in the backward pass.
    """
    model = demand.model
    dtype = demand.dtype
    trained_kinds = trained_layer_kinds(model, demand.config.model)
    recomputed_kinds = trained_kinds[:num_recomputed]
    kept_kinds = trained_kinds[num_recomputed:]
    keys = micro_batch.longest_prompt + demand.max_completion_tokens - 1
    bytes_of_kind = {
        kind: micro_batch.num_positions
        * layer_backward_bytes_per_position(model, dtype, keys, kind)
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
        # the scores in the gradient of attention
        scores = (4 + 3 * dtype.size) * attention.MOST_SCORES
        backward += scores
        recomputed += scores

    inputs = recomputed_input_bytes(demand, num_recomputed, micro_batch)
    logprobs = logprob_bytes(demand, micro_batch)
    return int(inputs + max(kept + max(backward, logprobs), recomputed))


def recomputed_input_bytes(
    demand: RunDemand, num_recomputed: int, micro_batch: MicroBatchSizes
) -> float:
    """Return the bytes of the inputs from which the backward pass computes layers again."""
    model = demand.model
    column = cache_bytes_per_token(model, demand.dtype)
    position_bytes: float = demand.dtype.size * model.hidden_size
    if not micro_batch.shares_prompts:
        return micro_batch.num_positions * position_bytes * num_recomputed

    # Layers also keep the keys, values and states of prompts that completions share.
    position_bytes += column / model.num_hidden_layers
    inputs = micro_batch.num_positions * position_bytes * num_recomputed
    inputs += micro_batch.num_rows * delta_state_bytes_per_row(model, demand.dtype)
    if gpu.on_gpu():  # the keys and values of all prompts are joined in one array
        inputs += micro_batch.num_rows * micro_batch.longest_prompt * column
    return inputs


def logprob_bytes(demand: RunDemand, micro_batch: MicroBatchSizes) -> int:
    """Return the bytes that a micro-batch's log-probabilities and their gradient need."""
    width = demand.model.hidden_size
    vocabulary = demand.model.vocab_size
    num_tokens = micro_batch.num_rows * demand.max_completion_tokens
    if demand.is_sft:
        num_tokens = micro_batch.num_positions

    hidden_states = num_tokens * width * (8 + 2 * demand.dtype.size)
    if uses_kernels():  # only the logits of some rows and their gradient are in memory
        num_rows = min(lm_head.ROWS_AT_ONCE, num_tokens)
        return hidden_states + 2 * demand.dtype.size * num_rows * vocabulary
    num_logits = min(TILES_IN_FLIGHT * lm_head.LOGPROB_TILE, 4 * num_tokens * vocabulary)
    tiles = 4 * num_logits
    # The gradient of the head is computed in tiles, which are joined at the end.
    head = 0 if demand.config.model.lora_rank else 4 * vocabulary * width
    return hidden_states + max(tiles + head, 2 * head)


# ---- sizes that fit


def choose_sizes(
    demand: RunDemand, max_rows: int = USUAL_ROWS, available_bytes: float | None = None
) -> MemoryDependentSizes:
    """
    Choose a value for each size whose setting is `auto`.

    If a run does not fit, this function first makes the micro-batches smaller. If that is not
    enough, as few layers as possible compute their intermediate results again in the backward pass,
    which makes an update up to a third slower. A run fits if it needs at most nine tenths of the
    available memory.

    max_rows: the number of completions in the largest rollout or evaluation.
    available_bytes: the available memory; None stands for the memory that the GPU may use. Without
        a GPU, None stands for the GPU memory of a laptop with 16 GB, so that the sizes do not
        depend on the machine.
    """
    sampling = demand.config.sampling
    if not available_bytes:
        available_bytes = memory.usable_memory_bytes() if gpu.on_gpu() else LAPTOP
    free_bytes = ROOM * available_bytes - sum(resident_bytes(demand).values())

    rows = sampling.rollout_batch_size or max_rows
    for token_budget, num_recomputed in list_budget_and_recompute_pairs(demand):
        sizes = MemoryDependentSizes(rows, token_budget, num_recomputed)
        if update_phase_bytes(demand, sizes) <= free_bytes:
            break

    if not sampling.rollout_batch_size:
        rows = choose_rollout_rows(
            lambda rows: bytes_added_by_rollout(demand, rows) <= free_bytes, max_rows
        )
    return sizes._replace(rollout_batch_size=rows)


def list_budget_and_recompute_pairs(demand: RunDemand) -> list[tuple[int, int]]:
    """
    List the pairs of a token budget and a number of recomputed layers that the settings allow.

    The pairs are in the order in which they should be tried: the fastest update comes first.
    """
    optimizer = demand.config.optimizer
    num_layers = len(trained_layer_kinds(demand.model, demand.config.model))
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


def agree_on_sizes_across_ranks(local_sizes: MemoryDependentSizes) -> MemoryDependentSizes:
    """Gather the sizes of all ranks, and return sizes that fit into the memory of every rank."""
    all_sizes = [MemoryDependentSizes(*values) for values in world.all_gather(list(local_sizes))]
    return MemoryDependentSizes(
        min(sizes.rollout_batch_size for sizes in all_sizes),
        min(sizes.train_token_budget for sizes in all_sizes),
        max(sizes.checkpoint_layers for sizes in all_sizes),
    )


def find_rubric_path(config: Config) -> Path | None:
    """Return the path of the rubric for a run's judge, or None if the run needs no judge."""
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


# ---- lines that are printed

TOO_LARGE = "it does not fit"
CHANGE = "change: "  # the last line begins with this word if the user should change a setting
REMEDIES = {  # the name of a part of the memory -> what to do if this part is too large
    "masters": "set --lora-rank 16",
    "optimizer": "set --lora-rank 16",
    "base": "set --lora-rank 16",
    "weights": "use a smaller --model",
    "teacher": "use a smaller --teacher",
    "judge": "use a smaller --judge-model",
    "rollout": "lower --rollout-batch-size or --max-tokens",
    "judging": "lower --judge-chunk-size",
    "update": "lower --train-token-budget, or set --checkpoint-layers on",
}


def format_memory_line(demand: RunDemand, sizes: MemoryDependentSizes) -> str:
    """
    Return a line with the memory that a run needs, in total and by part, and the machine's memory.

    If the run does not fit, the line also says which setting to change.
    """
    need = estimate_memory(demand, sizes)
    room = memory.usable_memory_bytes()
    resident = format_gigabytes(need.resident)
    phases = format_gigabytes(need.phases)
    phase_text = ", ".join(phases)
    if len(phases) > 1:
        phase_text = f"the largest of {phase_text}"
    checkpoint_layers = sizes.as_settings()["checkpoint_layers"]
    line = (
        f"memory: {need.peak_bytes / 1e9:.2f} of {room / 1e9:.2f} GB = {' + '.join(resident)} + "
        f"{phase_text} at --train-token-budget {sizes.train_token_budget} "
        f"--checkpoint-layers {checkpoint_layers}"
    )

    if not demand.config.model.lora_rank:
        disk_bytes = max_disk_bytes_of_checkpoints(demand, need)
        line += f"; checkpoints need up to {disk_bytes / 1e9:.1f} GB of disk space"
    if need.peak_bytes > room:
        line += f"; {TOO_LARGE}: {suggest_memory_remedy(need, room)}"
    return line


def format_gigabytes(sizes: dict[str, int]) -> list[str]:
    """Return a text such as "0.52 weights" (in GB) for each size that is not 0."""
    return [f"{size / 1e9:.2f} {name}" for name, size in sizes.items() if size]


def max_disk_bytes_of_checkpoints(demand: RunDemand, need: MemoryNeed) -> int:
    """Return the maximum disk space for the checkpoints of a run that trains all weights."""
    weights = need.resident["weights"]
    masters = 4 * count_parameters(demand.model).weights
    checkpoint_bytes = masters + need.resident["optimizer"] + weights
    # While a checkpoint is saved, the disk holds one checkpoint more than usual. `adapter` and
    # `adapter-best` are two more copies of the weights.
    return (checkpoint.MAX_CHECKPOINTS + 1) * checkpoint_bytes + 2 * weights


def suggest_memory_remedy(need: MemoryNeed, available_bytes: int) -> str:
    """Advise how to make the largest part smaller if a run needs too much memory."""
    if need.resident["Python"] >= available_bytes:
        return (
            "Python and MLX alone need more memory than this machine has; "
            "use a machine with more memory"
        )
    parts = need.phases if sum(need.resident.values()) <= available_bytes else need.resident
    largest = max(REMEDIES.keys() & parts.keys(), key=parts.__getitem__)
    return REMEDIES[largest]


def explain_memory_misfit(demand: RunDemand, sizes: MemoryDependentSizes) -> str:
    """Explain why a run does not fit into memory, and advise what to change; "" if it fits."""
    need = estimate_memory(demand, sizes)
    room = memory.usable_memory_bytes()
    if need.peak_bytes <= room:
        return ""
    sizes_text = (
        f"it needs about {need.peak_bytes / 1e9:.2f} GB, but this machine has {room / 1e9:.2f} GB"
    )
    return f"{TOO_LARGE}: {sizes_text}; {suggest_memory_remedy(need, room)}"
