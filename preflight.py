"""
The memory that a run will need, from its settings and the model's configuration alone: `uv run preflight.py --model M`.

A step needs what stays (weights, adapters, the optimizer's state, Python) and then, in turn, what a rollout, the judge
or an update takes; the largest of them decides. The longest prompts and completions of `--max-tokens` are assumed.
Weights, moments, caches and logits are counted; what layers keep for the gradient is one constant times their widths,
measured on a CPU: a test holds the figure to 5% under the peak at most and 30% over it. `--try` takes some steps.

Axes: M rows of a micro-batch, P prompt and T completion positions, S keys, V vocabulary, C hidden, H query heads,
K kv heads, D head dim, F mlp width.
"""

import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import cpu_blas  # noqa: F401  (before mlx)
import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten

import gwen
import lora
from config import Config, Sizes
from disk import checkpoint, hub
from disk.run_files import read_log
from flags import Parser, check_least, fail, visible
from judging import rubrics
from kv_cache import round_up
from layers import attention, lm_head
from machine import alive, gpu, memory, world
from problems.examples import prompt_text, short
from settings.sources import OWN_TASK, given, parse, resolve
from step import batch
from step.rows import (
    ROOM,
    USUAL_ROWS,
    column_bytes,
    forward_bytes,
    has_kernels,
    layer_bytes,
    rollout_bytes,
    rows_at_once,
    state_bytes,
)
from turns.episodes import context_of

if TYPE_CHECKING:
    from machine import chips

LAPTOP = 2 * 2**34 // 3  # bytes that macOS recommends for a GPU's working set on 16 GB, 11.45e9
PYTHON = 300_000_000  # bytes: 118 MB with a small tokenizer, 105 more for 151,643 tokens, 30 for reading data
# Positions of a micro-batch. On a CPU 8192 took as long for random:2m and 1.5 times as long for random:30m as 1024.
BUDGET, GPU_BUDGET = 1024, 2048
# Layers, beside those that are kept, while one's gradient is computed: where all are kept, and where some are not. A
# gated delta net computes the levels of a tree one after the other.
WORKING, LINEAR_WORKING = (1.7, 3.3), (1.1, 1.8)
TEMPLATE = 30  # tokens that a chat template and a judge's tags add to a text; four characters of which are a token
TILES_IN_FLIGHT = 9  # of log-probabilities, those that MLX runs ahead with


class Need(NamedTuple):
    """Bytes: of what stays, and of each phase beside it."""

    weights: int
    adapters: int  # and their copies in 16 bits; or the float32 masters of a model whose own weights are trained
    optimizer: int
    rollout: int  # keys and values, prefill and logits
    update: int
    judge: int = 0  # weights of a judge that is not the policy without its adapters; of a KL term's reference too
    judging: int = 0  # the judge's cache and forward pass
    teacher: int = 0  # its weights, and what it says of a step's completions
    cache: int = 0  # of a rollout: keys and values alone
    python: int = PYTHON

    @property
    def resident(self) -> int:
        return self.weights + self.adapters + self.optimizer + self.teacher + self.judge + self.python

    @property
    def total(self) -> int:
        return self.resident + max(self.rollout, self.judging, self.update)


class Demand(NamedTuple):
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


def estimate(demand: Demand, sizes: Sizes) -> Need:
    """What a run needs at most."""
    model, dtype, config, _, _ = demand
    samples = config.objective.loss_type != "sft"
    if not samples:
        config = config.but(groups=1, max_tokens=1)
        demand = demand._replace(config=config)
    shapes = gwen.Model(model)  # lazy: nothing of it is ever computed
    weights = _num_weights(shapes) * dtype.size
    if config.model.lora_rank:
        lora.apply(shapes, config.model.lora_rank, config.model.lora_scale, config.model.lora_targets)
    trained = sum(array.size for _, array in tree_flatten(shapes.trainable_parameters()))
    # float32 weights are their own masters
    masters = trained if config.model.lora_rank or dtype != mx.float32 else 0
    cache, decoding = 0, 0
    if samples:
        cache, decoding = rollout_bytes(
            *(model, dtype, demand.longest, config.sampling.groups, config.sampling.max_tokens),
            *(sizes.rollout_batch_size, sizes.sharing),
        )
    num_batches, update = _update(demand, sizes)
    return Need(
        weights=weights,
        adapters=(4 + (dtype.size if config.model.lora_rank and dtype != mx.float32 else 0)) * masters,
        optimizer=8 * trained,
        cache=cache,
        rollout=cache + decoding,
        # at last the gradient, and what AdamW makes of it while old tensors go; measured: 5 to 7
        update=max(update + 4 * trained * (num_batches > 1 or sizes.checkpoint_layers > 0), 7 * trained),
        **_judge(demand),
        **(_teacher(model, dtype, config) if config.objective.teacher else {}),
    )


def _num_weights(model: gwen.Model) -> int:
    return sum(array.size for _, array in tree_flatten(model.parameters()))


def _frozen(name: str, shape: hub.ModelConfig, dtype: mx.Dtype) -> int:
    """Bytes of the weights of a judge or teacher; on a GPU those of few bits stay packed."""
    if not (shape.packing and gpu.on_gpu()):
        return _num_weights(gwen.Model(shape)) * dtype.size
    opened = gwen.open_model(hub.find(name), dtype, packed=True)  # still on disk
    return sum(array.nbytes for _, array in tree_flatten(opened.parameters()))


def _judge(demand: Demand) -> dict[str, int]:
    """A judge's fields of `Need`. Its prompts are a tree (judge.py): questions, answers, criteria."""
    (model, dtype, config, _, rubric), prompts = demand, demand.longest
    judged = rubric is not None and not config.judge.url
    other = judged and not config.judges_itself
    with gwen.named_by("--judge-model"):
        shape = gwen.load_config(config.judge.model) if other else model
    is_copied = not config.model.lora_rank and config.objective.teacher != "self"  # the model before training
    has_own = other or (is_copied and (judged or config.objective.beta))
    weights = _frozen(config.judge.model if other else "", shape, dtype) if has_own else 0
    if not judged or rubric is None:
        return {"judge": weights}
    preamble, criteria = rubrics.load_rubric(rubric)
    head, criterion = (TEMPLATE + len(text) // 4 for text in (preamble, max((c.text for c in criteria), key=len)))
    rows = config.judge.chunk_size
    answers = max(rows // len(criteria), 1)
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
    return {"judge": weights, "judging": int(kept + working)}


def _teacher(model: hub.ModelConfig, dtype: mx.Dtype, config: Config) -> dict[str, int]:
    """
    A teacher's fields of `Need`. What it says are the hidden states of all completions.

    The model's own base, which teaches a run that trains all weights, is a copy.
    """
    other = config.objective.teacher != "self"
    with gwen.named_by("--teacher"):
        shape = gwen.load_config(config.objective.teacher) if other else model
    hidden = config.sampling.batch * config.sampling.groups * config.sampling.max_tokens * shape.hidden_size
    weights = _frozen(config.objective.teacher, shape, dtype) if other or not config.model.lora_rank else 0
    return {"teacher": weights + hidden * dtype.size}


def _update(demand: Demand, sizes: Sizes) -> tuple[int, int]:
    """Number of micro-batches when all completions are as long as allowed, and bytes that the largest of them takes."""
    (model, dtype, config, *_), prompts = demand, demand.longest
    width, length, layers = model.hidden_size, config.sampling.max_tokens, model.num_hidden_layers
    kinds = model.layer_kinds[sizes.checkpoint_layers :]  # of the layers that are kept
    is_again = len(kinds) < layers
    rows = [row for place, num in enumerate(prompts) for row in [[place] * num] * config.sampling.groups]
    shared, cut = batch.plan(rows, np.full(len(rows), length), sizes.train_token_budget, "auto")
    most = 0
    for part, positions in cut:
        longest = max(len(rows[row]) for row in part)
        keys, columns = float(longest + length - 1), longest + length - 1
        if shared:  # the prompt's own positions see the prompt alone
            of_completions = len(part) * (length - 1)
            keys = (of_completions * keys + (positions - of_completions) * longest) / positions
        of_kind = {kind: positions * layer_bytes(model, dtype, keys, kind) for kind in set(model.layer_kinds)}
        kept = sum(of_kind[kind] for kind in kinds)
        # of those that are computed again: inputs, keys and values
        kept += positions * (dtype.size * width + column_bytes(model, dtype) / layers) * (layers - len(kinds))
        kept += len(part) * state_bytes(model, dtype) * shared
        backward = max(
            size * (LINEAR_WORKING if kind == "linear_attention" else WORKING)[is_again]
            for kind, size in of_kind.items()
        )
        if gpu.on_gpu():
            kept += len(part) * longest * column_bytes(model, dtype) * shared  # of prompts' keys and values, joined
            backward += attention.gradient_bytes(
                (len(part), model.num_attention_heads, length - 1 if shared else columns, model.head_dim),
                (len(part), model.num_key_value_heads, columns, model.head_dim),
                dtype,
            )
        num_tokens = positions if config.objective.loss_type == "sft" else len(part) * length
        logprobs = num_tokens * width * (8 + 2 * dtype.size)
        if has_kernels():  # logits of some rows, and their gradient
            logprobs += 2 * dtype.size * min(lm_head.ROWS_AT_ONCE, num_tokens) * model.vocab_size
        else:
            tiles = 4 * min(TILES_IN_FLIGHT * lm_head.LOGPROB_TILE, 4 * num_tokens * model.vocab_size)
            head = 0 if config.model.lora_rank else 4 * model.vocab_size * width
            logprobs += max(tiles + head, 2 * head)  # the head's gradient: in tiles, and joined
        most = max(most, int(kept + max(backward, logprobs)))
    return len(cut), most


def settle(demand: Demand, most_rows: int = USUAL_ROWS) -> Sizes:
    """
    Decides each `auto`. most_rows: that a rollout, or an evaluation, has.

    Micro-batches are cut smaller first, then as few layers as possible are computed again, which costs a third of the
    update. To fit is to need nine tenths of what a GPU offers, and without a GPU of what a laptop's would, so that a
    run on a CPU does not depend on the machine.
    """
    sampling, optimizer, layers = demand.config.sampling, demand.config.optimizer, demand.model.num_hidden_layers
    room = ROOM * (memory.memory_size() if gpu.on_gpu() else LAPTOP)
    budgets = [optimizer.train_token_budget or (GPU_BUDGET if gpu.on_gpu() else BUDGET)]
    if not optimizer.train_token_budget and gpu.on_gpu():
        budgets.append(BUDGET)
    named = {"off": [0], "on": [layers], "auto": list(range(layers + 1))}
    counts = named.get(optimizer.checkpoint_layers) or [int(optimizer.checkpoint_layers)]
    options = [(budget, counts[0]) for budget in budgets] + [(budgets[-1], count) for count in counts[1:]]
    for budget, count in options:
        sizes = Sizes(sampling.rollout_batch_size or most_rows, sampling.share_prefix, budget, count)
        need = estimate(demand, sizes)
        if need.resident + need.update <= room:
            break

    def fits(rows: int) -> bool:
        need = estimate(demand, sizes._replace(rollout_batch_size=rows))
        return need.resident + need.rollout <= room

    return sizes if sampling.rollout_batch_size else sizes._replace(rollout_batch_size=rows_at_once(fits, most_rows))


def agree(sizes: Sizes) -> Sizes:
    """What several machines computed, each for itself: the least of all."""
    rows, sharing, budgets, counts = zip(*world.share(list(sizes)), strict=True)
    return Sizes(min(rows), min(sharing), min(budgets), max(counts))  # "auto", "off", "on"


LESS = {  # what makes a phase smaller
    "rollout": "--rollout-batch-size or --max-tokens",
    "judging": "--judge-chunk-size",
    "update": "--train-token-budget, or set --checkpoint-layers on",
}


def advice(config: Config, need: Need, room: int) -> str:
    """What to lower where a run does not fit."""
    if need.resident > room:
        if need.teacher > need.weights:
            return "take a smaller --teacher"
        smaller = f"take a smaller {'model' if config.judges_itself or not need.judge else '--judge-model'}"
        return smaller if config.model.lora_rank else f"set --lora-rank 16, or {smaller}"
    return "; ".join(f"lower {flag}" for phase, flag in LESS.items() if need.resident + getattr(need, phase) > room)


def step_of(demand: Demand, sizes: Sizes) -> "chips.Step":
    """What a step of a run computes; prompts are computed once for a group."""
    from machine import chips

    model, dtype, config, _, rubric = demand
    sampling, weights = config.sampling, matmuls_of(model)
    num_rows, prompts = sampling.batch * sampling.groups, demand.longest
    judged = 0.0
    if rubric is not None and not config.judge.url:
        judge = model if config.judges_itself else gwen.load_config(config.judge.model)
        texts = sum(TEMPLATE + len(criterion.text) // 4 for criterion in rubrics.load_rubric(rubric).criteria)
        judged = (sum(prompts) + num_rows * (sampling.max_tokens + texts)) * matmuls_of(judge) / weights
    forward = 1 + bool(config.objective.beta) + bool(config.objective.teacher)
    backward = (1 if config.model.lora_rank else 2) + sizes.checkpoint_layers / model.num_hidden_layers
    return chips.Step(
        layers=model.num_hidden_layers,
        weights=weights,
        head=model.vocab_size * model.hidden_size,
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
        batches=_update(demand, sizes)[0],
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
    room = memory.memory_size()
    stays = {
        "weights": need.weights,
        "adapters" if config.model.lora_rank else "masters": need.adapters,
        "optimizer": need.optimizer,
        "teacher": need.teacher,
        "judge": need.judge,
        "Python": need.python,
    }
    phases = {f"rollout ({_gb(need.cache)} cache)": need.rollout, "judging": need.judging, "update": need.update}
    staying, passing = ([f"{_gb(size)} {name}" for name, size in part.items() if size] for part in (stays, phases))
    return (
        f"memory: {_gb(need.total)} of {_gb(room)} GB = {' + '.join(staying)} + "
        f"{'the largest of ' * (len(passing) > 1)}{', '.join(passing)} "
        f"at --train-token-budget {sizes.train_token_budget} "
        f"--checkpoint-layers {sizes.settings()['checkpoint_layers']}"
        + (f"; it does not fit: {advice(config, need, room)}" if need.total > room else "")
    )


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
    for one in audits:
        print(*audit.table(one), sep="\n", flush=True)


TRY_STEPS, TRY_SECONDS = 4, 120.0  # steps of the trial; no further one begins after so long
FEW_SIGNALS, MANY_CUT, MANY_DEGENERATE = 0.25, 0.5, 0.1  # shares of groups, of answers, of answers
SHOWN = 5  # answers
LONG = 300.0  # seconds of a run that ends where its first steps have no signal


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

    yield from [f"reward {one.name}: {audit.surprise(one)}" for one in audits_of(config)]
    yield from verdict(config, steps, answers)


def hopeless(config: Config, steps: list[dict[str, Any]], evaluation_s: float, run: Path) -> str:
    """
    What to change before a run goes on whose first steps, as many as a trial has, showed no signal; else "".

    It is said once, of a run that will last longer than LONG, or of a bundled model at what it was not made for.
    evaluation_s: seconds of an evaluation.
    """
    seconds, every, num = [step["step/s"] for step in steps], config.evaluation.every, config.optimizer.steps
    is_due = len(steps) == TRY_STEPS or sum(seconds[:-1]) <= TRY_SECONDS < sum(seconds)
    left = min(seconds) * (num - len(steps)) + (evaluation_s * (num // every) if every else 0.0)
    its_task = OWN_TASK.get(config.model.name)
    is_strange = its_task is not None and config.data.task not in (its_task, "own") and len(steps) < num
    if not (config.compares_rewards and is_due and (left > LONG or is_strange)):
        return ""
    if any(step["sampling/signal_groups"] != 0 for step in steps):
        return ""
    if is_strange:
        return f"--model {config.model.name} knows only --task {its_task}; take --model smollm2 or Qwen/Qwen3-0.6B"
    *_, advice = verdict(config, steps, [record for _, record in read_log(run / "rollouts.jsonl")])
    return advice.removeprefix("change: ")


def verdict(config: Config, steps: list[dict[str, Any]], answers: list[dict[str, Any]]) -> Iterator[str]:
    """What steps and answers of the model before training say of a run, the advice last."""

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
        fix = "take another --judge-model, see docs/judge.md"
        changes.append(f"{unread:.0%} of the judge's scores cannot be read: {fix}")
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
            for text in try_out(rest, config):
                print(visible(text), flush=True)
            return
        dtype = gwen.DTYPES[own.dtype] if own.dtype else gwen.default_dtype()
        gwen.refuse_packed(config.model.name)
        model = gwen.load_config(config.model.name)
        lengths = [own.prompt_tokens] * config.sampling.batch
        if config.tools.tools or config.tools.env:
            context = context_of(config.tools, model.max_position_embeddings)
            config = config.but(max_tokens=max(context - own.prompt_tokens, 1))
        demand = Demand(model, dtype, config, lengths, rubric_of(config))
        print(f"{choice}; {own.prompt_tokens} prompt tokens")
        sizes = settle(demand)
        print(line(demand, sizes))
        from machine import chips

        here = str(mx.device_info().get("device_name", "")).removeprefix("Apple ")
        print(chips.line(step_of(demand, sizes), estimate(demand, sizes).total, here))
    except (ValueError, OSError) as error:
        fail(error)


if __name__ == "__main__":
    main()
