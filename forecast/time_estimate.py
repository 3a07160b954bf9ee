"""
Estimates of a step's time and of the models that a machine can train. Nothing is run for them.

This file counts the bytes and FLOPs of each phase. machine/chips.py converts them to seconds. The
memory of a run is estimated in forecast/memory_estimate.py.
"""

from collections.abc import Iterable, Iterator

import mlx.core as mx

import gwen
from config import Sizes
from disk import model_choice
from forecast.memory_estimate import (
    CHANGE,
    TEMPLATE_TOKENS,
    TOKEN_CHARACTERS,
    TOO_LARGE,
    RunDemand,
    choose_sizes,
    count_parameters,
    estimate,
    gpu_memory_limit,
    plan_micro_batches,
)
from judging import rubrics
from machine import chips, gpu, memory
from settings.sources import command_line, merge_settings
from step.rows import column_bytes, state_bytes

PROMPT = 256  # assumed tokens of each prompt, for the table
STEPS = 100  # assumed steps of a run, for the table
PATIENCE = 3600.0  # the most seconds that a first run should take


def phase_costs(demand: RunDemand, sizes: Sizes) -> dict[str, chips.Cost]:
    """The bytes and FLOPs of each phase of a step. A group computes its prompt only once."""
    model = demand.model
    dtype = demand.dtype
    prompts = demand.longest_prompts
    length = demand.completion_tokens
    matmuls = count_parameters(model).matmuls
    weights = matmuls * dtype.size
    head = model.vocab_size * model.hidden_size
    num_rows = len(prompts) * demand.group_size
    num_prompt_tokens = sum(prompts)

    # FLOPs of one query with one key, in all layers
    num_attention_layers = sum(kind != "linear_attention" for kind in model.layer_kinds)
    pair = 4 * model.num_attention_heads * model.head_dim * num_attention_layers
    width = max(prompts) + length / 2  # the number of keys when half of a completion is done

    prefill_flops = 2 * matmuls * num_prompt_tokens + pair * num_prompt_tokens * max(prompts) / 2

    rows_at_once = min(sizes.rollout_batch_size, num_rows)
    num_decode_steps = length * num_rows / rows_at_once
    columns_read = max(prompts) / demand.group_size + length / 2
    cache_bytes = columns_read * column_bytes(model, dtype) + 2 * state_bytes(model, dtype)
    decode_bytes = num_decode_steps * (weights + head * dtype.size + rows_at_once * cache_bytes)
    decode_flops = num_decode_steps * rows_at_once * (2 * (matmuls + head) + pair * width)

    num_micro_batches = len(plan_micro_batches(demand, sizes))
    update_flops = count_update_flops(demand, sizes, matmuls, head, pair * width)

    costs = {
        "prefill": chips.Cost(weights, prefill_flops),
        "decode": chips.Cost(decode_bytes, decode_flops),
        "update": chips.Cost(num_micro_batches * weights, update_flops / chips.UPDATE_FRACTION),
    }
    judge = demand.judge
    if judge and demand.rubric:
        criteria = rubrics.load_rubric(demand.rubric).criteria
        criteria_tokens = sum(
            TEMPLATE_TOKENS + len(criterion.text) // TOKEN_CHARACTERS for criterion in criteria
        )
        num_judged_tokens = num_prompt_tokens + num_rows * (length + criteria_tokens)
        judge_matmuls = count_parameters(judge).matmuls
        judge_flops = (2 * judge_matmuls + pair * width) * num_judged_tokens
        costs["judge"] = chips.Cost(judge_matmuls * dtype.size, judge_flops)
    return costs


def count_update_flops(
    demand: RunDemand, sizes: Sizes, matmuls: int, head: int, attention: float
) -> float:
    """
    The FLOPs of an update, for all its iterations together.

    matmuls: the number of parameters in the layers' matrices. head: the same for the head.
    attention: the FLOPs of one query in all layers.
    """
    config = demand.config
    num_prompt_tokens = sum(demand.longest_prompts)
    num_rows = len(demand.longest_prompts) * demand.group_size
    num_response_tokens = num_rows * demand.completion_tokens

    # a backward pass computes the gradient of inputs and, without adapters, the gradient of weights
    num_backward = 1 if config.model.lora_rank else 2
    recomputed = sizes.checkpoint_layers / demand.model.num_hidden_layers
    num_passes = config.optimizer.num_iterations * (1 + recomputed + num_backward)
    num_passes += bool(config.objective.beta)
    num_passes += bool(config.objective.teacher)
    layer_flops: float = num_passes * 2 * matmuls * (num_prompt_tokens + num_response_tokens)
    # logits and attention, with their gradients
    return layer_flops + (4 * head + 3.5 * attention) * num_response_tokens


def time_line(demand: RunDemand, sizes: Sizes) -> str:
    """
    A line with the bytes that a step reads, the FLOPs that it computes, and its time.

    On a GPU this is the time on this machine. Otherwise the line gives the times in 16 bits on all
    chips that are sold with enough memory.
    """
    if gpu.on_gpu():
        all_chips = [chips.this_chip()]
        fitting_chips = all_chips
    else:
        demand = demand._replace(dtype=mx.float16)
        sizes = choose_sizes(demand)
        need = estimate(demand, sizes).total
        all_chips = chips.load_chips()
        fitting_chips = [
            chip for chip in all_chips if gpu_memory_limit(max(chip.memory) << 30) >= need
        ]

    costs = phase_costs(demand, sizes)
    num_bytes = sum(cost.bytes for cost in costs.values())
    flops = sum(cost.flops for cost in costs.values())
    times = []
    for chip in fitting_chips:
        seconds = round_to_two_digits(chips.estimate_seconds(costs, chip))
        times.append(f"{chip.name} {seconds} s")
    times_text = ", ".join(times) or "no chip has the memory"
    note = "an estimate: nobody has measured this on a Mac"
    if len(fitting_chips) < len(all_chips):
        note += "; other chips have less memory"
    return (
        f"a step in {8 * demand.dtype.size} bits: {num_bytes / 1e9:.0f} GB of weights and caches "
        f"read, {flops / 1e12:.1f} TFLOP: {times_text} ({note})"
    )


def round_to_two_digits(value: float) -> str:
    rounded = float(f"{value:.2g}")
    return f"{rounded:g}"


def format_range(ends: Iterable[str]) -> str:
    """Both ends of a range as "A to B", or one text if the ends have the same text."""
    return " to ".join(dict.fromkeys(ends))


# ---- what a machine can train


def models_that_fit(
    room: float, chip: chips.Chip, dtype: mx.Dtype
) -> Iterator[tuple[str, int, float]]:
    """
    The models that can be trained in `room` bytes, with own data and the recipe of each model.

    Yields a model's name, the bytes that it needs, and the seconds of a step.
    """
    names = [name for name in model_choice.load_known_models() if not name.startswith("random:")]
    for name in ["demo", *names]:
        config = merge_settings({"model": name, "task": "own"}, None)
        demand = RunDemand(
            model_choice.load_config(name), dtype, config, [PROMPT] * config.sampling.batch
        )
        sizes = choose_sizes(demand, room=room)
        need = estimate(demand, sizes).total
        if need <= room:
            yield name, need, chips.estimate_seconds(phase_costs(demand, sizes), chip)


def describe_fitting_models() -> Iterator[str]:
    """The lines of a table of models that this machine can train, and a command to start with."""
    models = list(models_that_fit(memory.memory_size(), chips.this_chip(), gwen.default_dtype()))
    yield (
        f"what fits, for prompts of {PROMPT} tokens "
        "(time is an estimate, measured on no Mac, of steps alone):"
    )
    yield f"{'model':28}    GB  s a step  min for {STEPS}"
    for name, need, seconds in models:
        step_text = format_time(seconds)
        run_text = format_time(seconds * STEPS / 60)
        yield f"{name:28}{need / 1e9:6.1f}{step_text:>10}{run_text:>13}"
    if not models:
        yield f"{CHANGE}{TOO_LARGE}: no model of this table; take a machine with more memory"
        return

    quick_models = [(need, name) for name, need, seconds in models if STEPS * seconds < PATIENCE]
    _, largest = max(quick_models, default=(0, "demo"))
    settings = merge_settings({"model": largest}, None).to_flags()
    line = f"start with: {command_line(settings)} --model {largest}"
    if largest != "demo":  # README.md shows examples of both files
        line += " --data mine.jsonl --reward mine.py:score"
    yield line


def format_time(value: float) -> str:
    """Seconds or minutes to two digits; "<1" if Python would take most of the time."""
    return round_to_two_digits(value) if value >= 1 else "<1"
