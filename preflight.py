"""
The memory that a run will need, from its settings and the model's configuration alone: `uv run preflight.py --model M`.

A step needs what stays (weights, adapters, the optimizer's state) and then, in turn, what a rollout or what an update
holds; the larger of the two decides. The longest prompts and completions of `--max-tokens` are assumed, so a step
may need less. The constants are measured on MLX's CPU backend, where the figure is within 25% of the peak, by a test;
on a GPU they are counted in traces, where attention keeps no scores but those that its gradient holds at a time. What
is not in it: a judge's own model, Python.

Axes: M rows of a micro-batch, P prompt and T completion positions, S keys, V vocabulary, C hidden, H query heads,
K kv heads, D head dim, F mlp width.
"""

import dataclasses
import itertools
import sys
from typing import Any, NamedTuple

import cpu_blas  # noqa: F401  (before mlx)
import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten

import dispatch
import gpu
import gwen
import hub
import lora
import micro_batch
import world
from config import Config, given, parse, resolve
from flags import Parser, check_least, fail
from kv_cache import round_up
from layers import attention, lm_head

LAPTOP = 10_700_000_000  # bytes that macOS recommends for the working set of a GPU with 16 GB
# Positions of a micro-batch. On a CPU 8192 took as long for random:2m and 1.5 times as long for random:30m as 1024.
BUDGET, GPU_BUDGET = 1024, 2048
# What a gradient holds beside the layers it keeps, in layers: measured 1.5 to 1.8 and 2.5 to 3.1 over seven shapes.
WORKING_LAYERS, WORKING_LAYERS_CHECKPOINTED = 1.7, 2.9
# The same on a GPU: counted 0.3 to 0.5 and 1.3 to 1.5 in traces of four shapes; MLX runs some launches ahead.
GPU_WORKING_LAYERS, GPU_WORKING_LAYERS_CHECKPOINTED = 1.0, 2.0
DISK = 2e9  # bytes a second; an assumption: Apple's laptops read about 1.5 to 6 GB/s
TILES_IN_FLIGHT = 8  # of log-probabilities, those that MLX runs ahead with


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
    teacher: int = 0  # its weights, or its head where it stays on disk, and what it says of a step's completions
    teaching: int = 0  # of a teacher on disk: two of its layers, its embeddings, and two arrays per position of a step
    reading: int = 0  # bytes that a step reads from disk, which are held nowhere

    @property
    def resident(self) -> int:
        return self.weights + self.adapters + self.optimizer + self.teacher

    @property
    def rollout(self) -> int:
        return self.cache + self.decoding

    @property
    def update(self) -> int:
        return max(self.gradients + self.activations + max(self.working, self.logprobs), self.stepping)

    @property
    def total(self) -> int:
        return self.resident + max(self.rollout, self.teaching, self.update)


def layer_bytes(model: hub.ModelConfig, dtype: mx.Dtype, keys: float) -> float:
    """
    What one position keeps of one layer for the gradient, with `keys` keys to each query.

    Found by doubling each width in turn: measured on a CPU, where in 16 bits it is 2 to 8% less, since softmax and
    swiglu compute in float32; and on a GPU with kernels counted in the trace of an update (bench/launches.py).
    """
    num_queries, num_kv = (n * model.head_dim for n in (model.num_attention_heads, model.num_key_value_heads))
    scores = 0 if attention.is_fused(model.head_dim) else 4 * model.num_attention_heads * keys
    if has_kernels():
        widths = 3 * model.intermediate_size + 4 * model.hidden_size + 4 * num_queries + 3 * num_kv
        return dtype.size * widths + scores
    return 24 * model.intermediate_size + 17 * model.hidden_size + 18 * num_queries + 10 * num_kv + scores


def has_kernels() -> bool:
    """Whether a layer runs on a GPU's kernels, which keep what they read in the weights' type and nothing else."""
    return gpu.on_gpu() and gpu.is_wanted()


def estimate(
    model: hub.ModelConfig, dtype: mx.Dtype, config: Config, prompt_lengths: list[int], checkpoint_layers: int
) -> Need:
    """
    What a run needs at most, when its prompts, or the conversations of --loss-type sft, have these lengths.

    A teacher that does not fit beside it stays on disk.
    """
    demand = (model, dtype, config, prompt_lengths, checkpoint_layers)
    need = _estimate(*demand, False)
    return _estimate(*demand, True) if need.total > gpu.memory_size() and has_files(config.teacher) else need


def has_files(teacher: str) -> bool:
    """Whether a teacher can be read from disk as it is needed."""
    return bool(teacher) and teacher != "self" and not teacher.startswith("random:")


def _estimate(
    model: hub.ModelConfig,
    dtype: mx.Dtype,
    config: Config,
    prompt_lengths: list[int],
    checkpoint_layers: int,
    teacher_on_disk: bool,
) -> Need:
    samples = config.loss_type != "sft"
    if not samples:
        config = dataclasses.replace(config, groups=1, max_tokens=1)
    shapes = gwen.Model(model)  # lazy: nothing of it is ever computed
    all_weights = sum(array.size for _, array in tree_flatten(shapes.parameters()))
    if config.lora_rank:
        lora.apply(shapes, config.lora_rank, config.lora_scale, config.lora_targets)
    trained = sum(array.size for _, array in tree_flatten(shapes.trainable_parameters()))
    # float32 weights are their own masters
    masters = trained if config.lora_rank or dtype != mx.float32 else 0
    longest = sorted(prompt_lengths)[-config.batch :]
    num_batches, activations, working, logprobs = _update(model, dtype, config, longest, checkpoint_layers)
    cache, decoding = _rollout(model, dtype, config, longest) if samples else (0, 0)
    return Need(
        weights=all_weights * dtype.size,
        adapters=(4 + (dtype.size if config.lora_rank and dtype != mx.float32 else 0)) * masters,
        optimizer=8 * trained,
        cache=cache,
        decoding=decoding,
        gradients=4 * trained * (num_batches > 1),
        activations=activations,
        working=working,
        logprobs=logprobs,
        stepping=7 * trained,  # measured: 5 to 7
        **(_teacher(model, dtype, config, longest, teacher_on_disk) if config.teacher else {}),
    )


def _teacher(
    model: hub.ModelConfig, dtype: mx.Dtype, config: Config, prompts: list[int], on_disk: bool
) -> dict[str, int]:
    """
    A teacher's fields of `Need`. What it says are the hidden states of all completions, or a number for each token.

    The model's own base, which teaches a run that trains all weights, is a copy.
    """
    other = config.teacher != "self"
    with gwen.named_by("--teacher"):
        shape = gwen.load_config(config.teacher) if other else model
    held, num_tokens = 0, config.batch * config.groups * config.max_tokens
    said = num_tokens * (dtype.size * shape.hidden_size if config.loss_type == "distill" else 4)
    teacher = gwen.Model(shape)  # lazy: nothing of it is ever computed
    if other or not config.lora_rank:
        held = sum(array.size for _, array in tree_flatten(teacher.parameters())) * dtype.size
    if not on_disk:
        return {"teacher": held + said}
    layer = sum(array.size for _, array in tree_flatten(teacher.layers[0].parameters())) * dtype.size
    head, positions = teacher.head_weight.size * dtype.size, config.groups * sum(prompts) + num_tokens
    streams = 2 * dtype.size * shape.hidden_size * positions
    embeddings = 0 if shape.tie_word_embeddings else head
    return {"teacher": head + said, "teaching": 2 * layer + embeddings + 2 * streams, "reading": held}


def _update(
    model: hub.ModelConfig, dtype: mx.Dtype, config: Config, prompts: list[int], checkpoint_layers: int
) -> tuple[int, int, int, int]:
    """
    Number of micro-batches when all completions are as long as allowed, and bytes of what the largest of them keeps, of
    its backward pass, and of its log-probabilities.
    """
    width, length, layers = model.hidden_size, config.max_tokens, model.num_hidden_layers
    kept = max(layers - checkpoint_layers, 0)
    counts = WORKING_LAYERS, WORKING_LAYERS_CHECKPOINTED
    if has_kernels():
        counts = GPU_WORKING_LAYERS, GPU_WORKING_LAYERS_CHECKPOINTED
    working = counts[kept < layers]
    rows = [[place] * prompts[place] for place in range(len(prompts)) for _ in range(config.groups)]
    lengths = np.full(len(rows), length)
    shared, cut = micro_batch.plan(rows, lengths, config.train_token_budget, config.train_share_prefix)
    most = (0, 0, 0)
    for part, num_positions in cut:
        longest = max(len(rows[row]) for row in part)
        keys = float(longest + length - 1)
        if shared:  # the prompt's own positions see the prompt alone
            of_completions = len(part) * (length - 1)
            keys = (of_completions * keys + (num_positions - of_completions) * longest) / num_positions
        one_layer = num_positions * layer_bytes(model, dtype, keys)
        copies = len(part) * longest if shared and gpu.on_gpu() else 0  # of prompts' keys and values, joined
        inputs = num_positions * dtype.size * width * (layers - kept)  # of the layers that are computed again
        inputs += 2 * dtype.size * model.num_key_value_heads * model.head_dim * copies * kept
        num_tokens = num_positions if config.loss_type == "sft" else len(part) * length
        logprobs = num_tokens * width * (4 * (3 if config.entropy_coef else 2) + 2 * dtype.size)
        if has_kernels():  # logits of some rows, and their gradient
            logprobs += 2 * dtype.size * min(lm_head.ROWS_AT_ONCE, num_tokens) * model.vocab_size
        else:
            logprobs += 4 * min(TILES_IN_FLIGHT * lm_head.LOGPROB_TILE, 3 * num_tokens * model.vocab_size)
        logprobs += 0 if config.lora_rank else 2 * 4 * model.vocab_size * width  # in tiles, and joined
        gradient = int(one_layer * working)
        if gpu.on_gpu():
            columns = longest + length - 1
            scores = attention.gradient_bytes(
                (len(part), model.num_attention_heads, length - 1 if shared else columns, model.head_dim),
                (len(part), model.num_key_value_heads, columns, model.head_dim),
                dtype,
            )
            gradient = max(gradient, scores + int(one_layer * (working - 1)))  # by then the MLP's gradient is past
        one = (int(one_layer * kept + inputs), gradient, logprobs)
        most = max(most, one, key=lambda sizes: sizes[0] + max(sizes[1:]))
    return len(cut), *most


def _rollout(model: hub.ModelConfig, dtype: mx.Dtype, config: Config, prompts: list[int]) -> tuple[int, int]:
    """Bytes of keys and values, and of the rest, when the longest prompts are prefilled together."""
    batch_size = config.rollout_batch_size or dispatch.USUAL_ROWS
    slots = min(batch_size, config.batch * config.groups)
    together = sorted(prompts)[-max(2 * batch_size // config.groups, 1) :]
    column = 2 * model.num_hidden_layers * model.num_key_value_heads * model.head_dim * dtype.size
    width = round_up(max(together))
    own = round_up(config.max_tokens) + (width if gpu.on_gpu() else 0)
    prefill = len(together) * max(together) * layer_bytes(model, dtype, max(together))
    logits = 4 * 4 * slots * model.vocab_size  # and weights, sums and the next step's
    return column * (len(together) * width + slots * own), int(max(prefill, logits))


def settle(model: hub.ModelConfig, dtype: mx.Dtype, config: Config, prompt_lengths: list[int]) -> None:
    """
    Replaces `auto` in `train_token_budget` and `checkpoint_layers` by what lets the run fit, in place.

    Micro-batches are cut smaller first, then as few layers as possible are computed again, which costs a third of the
    update; last of all a teacher stays on disk. To fit is to need nine tenths of what a GPU offers, and without a GPU
    of what a laptop's would, so that a run on a CPU does not depend on the machine.
    """
    room, layers = 0.9 * (gpu.memory_size() if gpu.on_gpu() else LAPTOP), model.num_hidden_layers
    budgets = [config.train_token_budget or (GPU_BUDGET if gpu.on_gpu() else BUDGET)]
    if not config.train_token_budget and gpu.on_gpu():
        budgets.append(BUDGET)
    counts = list(range(layers + 1)) if config.checkpoint_layers == "auto" else [config.num_checkpointed(layers)]
    options = [(budget, counts[0]) for budget in budgets] + [(budgets[-1], count) for count in counts[1:]]
    for on_disk, (budget, count) in itertools.product((False, True)[: 1 + has_files(config.teacher)], options):
        config.train_token_budget = budget
        config.checkpoint_layers = {0: "off", layers: "on"}.get(count, str(count))
        need = _estimate(model, dtype, config, prompt_lengths, count, on_disk)
        if need.resident + need.update <= room:  # a rollout has flags of its own
            return


def agree(config: Config, num_layers: int) -> None:
    """Settles what each of several machines measured or computed for itself by the least of all, in place."""
    names = ("rollout_batch_size", "train_token_budget", "share_prefix", "checkpoint_layers")
    rows, budgets, sharing, counts = zip(*world.share([getattr(config, name) for name in names]), strict=True)
    config.rollout_batch_size, config.train_token_budget = min(rows), min(budgets)
    config.share_prefix = min(sharing)  # "auto", "off", "on"
    config.checkpoint_layers = max(
        counts, key=lambda count: dataclasses.replace(config, checkpoint_layers=count).num_checkpointed(num_layers)
    )


def limit_cache(model: hub.ModelConfig, dtype: mx.Dtype, config: Config, prompt_lengths: list[int]) -> None:
    """Lets MLX keep as many freed buffers as the run leaves free of a GPU's memory."""
    layers = config.num_checkpointed(model.num_hidden_layers)
    gpu.limit_cache(estimate(model, dtype, config, prompt_lengths, layers).total)


def advice(model: hub.ModelConfig, dtype: mx.Dtype, config: Config, prompt_lengths: list[int], room: int) -> str:
    """The flags that make a run fit which does not, or as far as flags can."""

    def need(**changed: Any) -> Need:
        other = dataclasses.replace(config, **changed)
        return estimate(model, dtype, other, prompt_lengths, other.num_checkpointed(model.num_hidden_layers))

    resident, flags = need().resident, []
    if resident > room:
        return "take a smaller model" if config.lora_rank else "set --lora-rank 16, or take a smaller model"
    if resident + need().rollout > room:
        rows = config.rollout_batch_size or dispatch.USUAL_ROWS
        while rows > 1 and resident + need(rollout_batch_size=rows).rollout > room:
            rows //= 2
        flags.append(f"--rollout-batch-size {rows}")
    if resident + need().update > room:
        budget = config.train_token_budget
        while budget > 64 and resident + need(train_token_budget=budget, checkpoint_layers="on").update > room:
            budget //= 2
        flags.append(
            "--checkpoint-layers on" + (f" --train-token-budget {budget}" * (budget < config.train_token_budget))
        )
    if resident + need().teaching > room:
        batch = config.batch
        while batch > 1 and resident + need(batch=batch).teaching > room:
            batch //= 2
        flags.append(f"--batch {batch}")
    return f"set {' '.join(flags)}"


def line(model: hub.ModelConfig, dtype: mx.Dtype, config: Config, prompt_lengths: list[int]) -> str:
    """What a run needs, phase by phase, against what the machine has, and the flag to turn where it does not fit."""
    need = estimate(model, dtype, config, prompt_lengths, config.num_checkpointed(model.num_hidden_layers))
    room = gpu.memory_size()
    rollout = f"the larger of {_gb(need.rollout)} rollout ({_gb(need.cache)} cache) and " if need.rollout else ""
    said = (
        f"memory: {_gb(need.total)} of {_gb(room)} GB = {_gb(need.weights)} weights + {_gb(need.adapters)} "
        f"{'adapters' if config.lora_rank else 'masters'} + {_gb(need.optimizer)} optimizer + "
        f"{f'{_gb(need.teacher)} teacher + ' if config.teacher else ''}{rollout}"
        f"{f'{_gb(need.teaching)} teaching and ' if need.teaching else ''}{_gb(need.update)} update "
        f"({_gb(need.gradients)} gradients, {_gb(need.activations)} activations, then {_gb(need.logprobs)} logprobs or "
        f"{_gb(need.working)} backward) "
        f"at --train-token-budget {config.train_token_budget} --checkpoint-layers {config.checkpoint_layers}"
    )
    if need.reading:
        said += (
            f"; the teacher stays on disk: a step reads its {_gb(need.reading)} GB layer by layer, "
            f"{need.reading / DISK:.1f} s at {DISK / 1e9:g} GB/s"
        )
    if need.total <= room:
        return said
    return f"{said}; it does not fit: {advice(model, dtype, config, prompt_lengths, room)}"


def _gb(size: float) -> str:
    return f"{size / 1e9:.2f}"


# ---- the command


def main(argv: list[str] | None = None) -> None:
    parser = Parser("preflight.py", "Say what a run would need. All flags of train.py, and:")
    parser.add_argument("--prompt-tokens", type=int, default=256, help="length of the longest prompts")
    parser.add_argument("--dtype", choices=tuple(gwen.DTYPES), help="of the weights (default: as train.py takes it)")
    own, rest = parser.parse_known_args(sys.argv[1:] if argv is None else argv)
    try:
        args = parse(rest)
        config, choice = resolve(given(args), args.config, args.resume, gwen.choose_model)
        check_least(own, prompt_tokens=1)
        dtype = gwen.DTYPES[own.dtype] if own.dtype else gwen.default_dtype()
        model = gwen.load_config(config.model)
        lengths = [own.prompt_tokens] * config.batch
        settle(model, dtype, config, lengths)
        print(f"{choice}; {own.prompt_tokens} prompt tokens")
        print(line(model, dtype, config, lengths))
    except (ValueError, OSError) as error:
        fail(error)


if __name__ == "__main__":
    main()
