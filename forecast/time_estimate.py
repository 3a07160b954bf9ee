"""
Estimates the time of a step, and lists the models that a machine can train.

No model is run for this. This file counts the bytes and FLOPs of each phase, and machine/chips.py
converts both to seconds.
memory_estimate.py estimates the memory of a run.
"""

import math
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import cpu_blas  # noqa: F401  (before mlx)
import mlx.core as mx

import gwen
from config import Config, MemoryDependentSizes
from disk import hub, model_choice
from forecast.memory_estimate import (
    CHANGE,
    TEMPLATE_TOKENS,
    TOKEN_CHARACTERS,
    TOO_LARGE,
    RunDemand,
    choose_sizes,
    count_parameters,
    estimate_memory,
    gpu_memory_limit,
    plan_micro_batches_at_max_length,
    trained_layer_kinds,
)
from forecast.row_memory import cache_bytes_per_token, delta_state_bytes_per_row
from judging import rubrics
from machine import chips, gpu, memory
from settings.sources import command_prefix_with_extras, merge_settings
from step.advantages import MEASURED_OF

PROMPT = 256  # the number of tokens per prompt that the table of models assumes
STEPS = 100  # the number of steps per run that the table of models assumes
PATIENCE = 3600.0  # the maximum number of seconds that a first run should take


class UpdateTokenCounts(NamedTuple):
    """How many tokens an update processes as prompts, for training, and only for statistics."""

    prompt_tokens: float
    trained_tokens: float  # in completions on which the update trains
    measured_tokens: float  # in completions that are computed only for statistics

    @classmethod
    def from_demand(cls, demand: RunDemand) -> "UpdateTokenCounts":
        """The token counts of a step in which the rewards differ within every group."""
        num_prompts = len(demand.longest_prompt_lengths)
        num_trained = num_prompts * demand.trained_group_size
        num_left_out = num_prompts * demand.group_size - num_trained
        num_measured = math.ceil(num_left_out / MEASURED_OF)
        length = demand.max_completion_tokens
        return cls(sum(demand.longest_prompt_lengths), num_trained * length, num_measured * length)


def estimate_phase_costs(
    demand: RunDemand, sizes: MemoryDependentSizes, token_counts: UpdateTokenCounts | None = None
) -> dict[str, chips.PhaseCost]:
    """
    Estimate the bytes and FLOPs of each phase of a step: prefill, decoding, update and judging.

    The prompt of a group is prefilled only once.

    token_counts: the numbers of tokens in the update; None means those of a step in which the
        rewards differ within every group.
    """
    token_counts = token_counts or UpdateTokenCounts.from_demand(demand)
    model = demand.model
    dtype = demand.dtype
    prompts = demand.longest_prompt_lengths
    length = demand.max_completion_tokens
    matmuls = count_parameters(model).matmuls
    weights = matmuls * dtype.size
    head = model.vocab_size * model.hidden_size
    num_rows = len(prompts) * demand.group_size
    num_prompt_tokens = sum(prompts)

    pair = count_attention_flops_per_pair(model)
    num_keys = max(prompts) + length / 2  # the mean number over the tokens of a completion

    prefill_flops = 2 * matmuls * num_prompt_tokens + pair * num_prompt_tokens * max(prompts) / 2

    rows_at_once = min(sizes.rollout_batch_size, num_rows)
    num_decode_steps = length * num_rows / rows_at_once
    columns_read = max(prompts) / demand.group_size + length / 2
    cache_bytes = columns_read * cache_bytes_per_token(
        model, dtype
    ) + 2 * delta_state_bytes_per_row(model, dtype)
    decode_bytes = num_decode_steps * (weights + head * dtype.size + rows_at_once * cache_bytes)
    decode_flops = num_decode_steps * rows_at_once * (2 * (matmuls + head) + pair * num_keys)

    num_micro_batches = len(plan_micro_batches_at_max_length(demand, sizes))
    update_flops = count_update_flops(demand, sizes, token_counts, matmuls, head, pair * num_keys)

    costs = {
        "prefill": chips.PhaseCost(weights, prefill_flops),
        "decode": chips.PhaseCost(decode_bytes, decode_flops),
        "update": chips.PhaseCost(
            num_micro_batches * weights, update_flops / chips.UPDATE_FRACTION
        ),
    }
    judge = demand.judge_config
    if judge and demand.rubric:
        criteria = rubrics.load_rubric(demand.rubric).criteria
        criteria_tokens = sum(
            TEMPLATE_TOKENS + len(criterion.text) // TOKEN_CHARACTERS for criterion in criteria
        )
        num_judged_tokens = num_prompt_tokens + num_rows * (length + criteria_tokens)
        judge_matmuls = count_parameters(judge).matmuls
        judge_pair = count_attention_flops_per_pair(judge)
        judge_flops = (2 * judge_matmuls + judge_pair * num_keys) * num_judged_tokens
        costs["judge"] = chips.PhaseCost(judge_matmuls * dtype.size, judge_flops)
    return costs


def count_attention_flops_per_pair(model: hub.ModelConfig) -> float:
    """Return the FLOPs of attention for one pair of a query and a key, in all layers."""
    num_attention_layers = sum(kind != "linear_attention" for kind in model.layer_kinds)
    return 4 * model.num_attention_heads * model.head_dim * num_attention_layers


def count_update_flops(
    demand: RunDemand,
    sizes: MemoryDependentSizes,
    token_counts: UpdateTokenCounts,
    matmul_parameters: int,
    head_parameters: int,
    attention_flops: float,
) -> float:
    """
    Return the FLOPs of an update, including all its iterations.

    matmul_parameters: the number of parameters in the matrices of layers.
    head_parameters: the number of parameters in the output head.
    attention_flops: the FLOPs that attention needs for one query and all its keys, in all layers.
    """
    config = demand.config
    # A backward pass computes the gradients of inputs, and without adapters also those of weights.
    num_layers = demand.model.num_hidden_layers
    trained = len(trained_layer_kinds(demand.model, config.model)) / num_layers
    num_backward = trained * (1 if config.model.lora_rank else 2)
    recomputed = sizes.checkpoint_layers / num_layers
    num_other_passes = bool(config.objective.beta) + bool(config.objective.teacher)
    num_passes = config.optimizer.num_iterations * (1 + recomputed + num_backward)
    num_passes += num_other_passes
    num_layer_tokens = token_counts.prompt_tokens + token_counts.trained_tokens
    layer_flops = num_passes * 2 * matmul_parameters * num_layer_tokens
    # These FLOPs are for logits and attention, including their gradients.
    attention_passes = 1 + 2.5 * trained
    flops_per_token = 4 * head_parameters + attention_passes * attention_flops
    head_flops = flops_per_token * token_counts.trained_tokens

    num_measured_passes = config.optimizer.num_iterations + num_other_passes
    flops_per_measured_token = 2 * (matmul_parameters + head_parameters) + attention_flops
    measured_flops = flops_per_measured_token * token_counts.measured_tokens
    return layer_flops + head_flops + num_measured_passes * measured_flops


def format_step_cost_and_time_line(demand: RunDemand, sizes: MemoryDependentSizes) -> str:
    """
    Return a line with the bytes that a step reads, its FLOPs, and its estimated time.

    With a GPU, the time is for this machine. Without a GPU, the weights have 16 bits, and the line
    contains one time for each of Apple's base chips (such as M4, but not M4 Pro) that is sold with
    enough memory. If no base chip has enough, the line contains one time for each other chip that
    has enough.
    """
    if gpu.on_gpu():
        fitting_chips = [chips.look_up_or_measure_chip()]
        note = "an estimate that nobody has checked on a Mac; other chips: --all-chips"
    else:
        demand, sizes, fitting_chips = _find_chips_with_memory_for_16_bits(demand)
        note = "an estimate that nobody has checked on a Mac; all chips: --all-chips"
        fitting_chips = [chip for chip in fitting_chips if chip.is_base] or fitting_chips

    costs = estimate_phase_costs(demand, sizes)
    num_bytes = sum(cost.bytes for cost in costs.values())
    flops = sum(cost.flops for cost in costs.values())
    times = []
    for chip in fitting_chips:
        seconds = format_two_digits(chips.estimate_step_seconds(costs, chip))
        times.append(f"{chip.name} {seconds} s")
    times_text = ", ".join(times) or "no chip has enough memory"
    return (
        f"a step in {8 * demand.dtype.size} bits: {num_bytes / 1e9:.0f} GB of weights and caches "
        f"read, {flops / 1e12:.1f} TFLOP: {times_text} ({note})"
    )


def list_chip_lines(demand: RunDemand) -> Iterator[str]:
    """Yield a table with each of Apple's chips and its estimated time for a step in 16 bits."""
    demand, sizes, fitting_chips = _find_chips_with_memory_for_16_bits(demand)
    costs = estimate_phase_costs(demand, sizes)
    yield f"{'chip':8}  seconds a step in 16 bits"
    for chip in chips.load_chips():
        text = "not sold with enough memory"
        if chip in fitting_chips:
            text = format_two_digits(chips.estimate_step_seconds(costs, chip))
        yield f"{chip.name:8}  {text}"


def _find_chips_with_memory_for_16_bits(
    demand: RunDemand,
) -> tuple[RunDemand, MemoryDependentSizes, list[chips.Chip]]:
    """Return the demand with 16-bit weights, its sizes, and the chips with enough memory."""
    demand = demand._replace(dtype=mx.float16)
    sizes = choose_sizes(demand)
    need = estimate_memory(demand, sizes).peak_bytes
    fitting_chips = [
        chip for chip in chips.load_chips() if gpu_memory_limit(max(chip.memory) << 30) >= need
    ]
    return demand, sizes, fitting_chips


def format_phase_times_and_advice(demand: RunDemand) -> str:
    """
    Format the estimated seconds of a step's phases, and name settings that shorten the update.

    With a GPU, the seconds are for this machine. Without a GPU, they are for a base M4 that
    computes in 16 bits.
    """
    if gpu.on_gpu():
        chip = chips.look_up_or_measure_chip()
        machine = chip.name
    else:
        demand = demand._replace(dtype=mx.float16)
        chip = next(chip for chip in chips.load_chips() if chip.name == "M4")
        machine = f"a Mac with {chip.name}, not on this machine"
    now = estimate_step_seconds_by_activity(demand, chip)
    parts = [f"{name} {format_two_digits(seconds)} s" for name, seconds in now.items()]
    line = f"estimated step on {machine}: {', '.join(parts)}"

    options = []
    for flag, value, config in settings_that_shorten_update(demand):
        seconds = estimate_step_seconds_by_activity(demand._replace(config=config), chip)
        options.append(f"{format_two_digits(seconds['update'])} s with {flag} {value}")
    if options:
        line += f"; the update would take {', '.join(options)}"
    return line


def estimate_step_seconds_by_activity(demand: RunDemand, chip: chips.Chip) -> dict[str, float]:
    """
    The estimated seconds of a step's rollout, judging and update.

    An activity that the run does not have is left out.
    """
    costs = estimate_phase_costs(demand, choose_sizes(demand))
    seconds = chips.estimate_phase_seconds(costs, chip)
    if demand.is_sft:
        return {"update": seconds["update"]}
    activities = {"rollout": seconds["prefill"] + seconds["decode"]}
    if "judge" in seconds:
        activities["judging"] = seconds["judge"]
    activities["update"] = seconds["update"]
    return activities


def settings_that_shorten_update(demand: RunDemand) -> Iterator[tuple[str, int, Config]]:
    """Yield a flag, a value and the resulting settings for each way to shorten the update."""
    config = demand.config
    has_advantages = config.objective.loss_type not in ("sft", "distill")
    for divisor in (2, 4):
        num_chosen = demand.group_size // divisor
        if has_advantages and 2 <= num_chosen < demand.trained_group_size:
            yield (
                "--train-completions",
                num_chosen,
                config.copy_with_settings(train_completions=num_chosen),
            )
    num_layers = len(trained_layer_kinds(demand.model, config.model))
    if config.model.lora_rank and num_layers == demand.model.num_hidden_layers > 1:
        half = num_layers // 2
        yield "--lora-layers", half, config.copy_with_settings(lora_layers=half)


def format_two_digits(value: float) -> str:
    rounded = float(f"{value:.2g}")
    return f"{rounded:g}"


def format_range(ends: Iterable[str]) -> str:
    """Return the ends of a range as "A to B", or only "A" if both are the same text."""
    return " to ".join(dict.fromkeys(ends))


# ---- what a machine can train


def find_models_that_fit(
    available_bytes: float, chip: chips.Chip, dtype: mx.Dtype
) -> Iterator[tuple[str, int, float]]:
    """
    Yield the name, the needed bytes and the seconds per step of each model that fits into memory.

    The estimates are for `--data FILE` and the default settings.
    """
    names = [name for name in model_choice.load_known_models() if not name.startswith("random:")]
    for name in ["demo", *names]:
        config = merge_settings({"model": name, "task": "own"}, None)
        demand = RunDemand(
            model_choice.load_config(name), dtype, config, [PROMPT] * config.sampling.batch
        )
        sizes = choose_sizes(demand, available_bytes=available_bytes)
        need = estimate_memory(demand, sizes).peak_bytes
        if need <= available_bytes:
            yield name, need, chips.estimate_step_seconds(estimate_phase_costs(demand, sizes), chip)


def list_fitting_model_lines() -> Iterator[str]:
    """Yield a table of the models that this machine can train, and a command for a first run."""
    models = list(
        find_models_that_fit(
            memory.usable_memory_bytes(),
            chips.look_up_or_measure_chip(),
            gwen.dtype_from_env_or_device(),
        )
    )
    yield (
        f"what fits, for prompts of {PROMPT} tokens (the times are estimates that nobody has "
        "checked on a Mac, and do not include evaluations):"
    )
    yield f"{'model':28}    GB  s a step  min for {STEPS}"
    for name, need, seconds in models:
        step_text = format_two_digits_or_below_1(seconds)
        run_text = format_two_digits_or_below_1(seconds * STEPS / 60)
        yield f"{name:28}{need / 1e9:6.1f}{step_text:>10}{run_text:>13}"
    if not models:
        yield (
            f"{CHANGE}{TOO_LARGE}: this machine can train no model in this table; "
            "use a machine with more memory"
        )
        return

    quick_models = [(need, name) for name, need, seconds in models if STEPS * seconds < PATIENCE]
    _, largest = max(quick_models, default=(0, "demo"))
    settings = merge_settings({"model": largest}, None).to_flags()
    line = f"start with: {command_prefix_with_extras(settings)} --model {largest}"
    if largest != "demo":  # README.md has examples of both files
        line += " --data mine.jsonl --reward mine.py:score"
    yield line


def format_two_digits_or_below_1(value: float) -> str:
    """Format a number with two significant digits, or as "<1" if it is below 1."""
    return format_two_digits(value) if value >= 1 else "<1"
