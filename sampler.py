"""
Rollouts: prompts in, sampled completions and log-probabilities out. `uv run sampler.py --prompt "Hi"` shows one.

Each distinct prompt is prefilled once. The rows that continue it share or copy its cache and are decoded together. The
record is exact: the drawn ids, their float32 log-probabilities under the sampling distribution, and a mask that
includes the end token. Randomness depends only on (key, row, position): a completion does not depend on the rows
decoded with it, and a row lost when memory ran out is drawn again unchanged. Left out: text; the caller renders prompts
to ids.

Axes: N rows, prompt-major; T completion positions; V vocabulary.
"""

import argparse
import itertools
import sys
import time
import zlib
from collections import deque
from collections.abc import Sequence
from typing import Any, NamedTuple

import cpu_blas  # noqa: F401  (before mlx)
import mlx.core as mx
import numpy as np
from tqdm import tqdm

import gpu
import gwen
import run_files
import tasks
import world
from config import Config
from flags import Parser, check_least, fail
from kv_cache import KVCache, SlotCache
from layers import attention, softmax
from problems.examples import check_text

LOOK_EVERY = 4  # positions between two checks for rows that have ended; a check costs one wait
SHARE_FROM = 2048  # prompt columns of all slots together; measured in LOG.md


class SamplingParams(NamedTuple):
    """How to draw and end completions. Top-p, top-k and min-p are off at 1, 0 and 0."""

    max_tokens: int | Sequence[int] = 256  # of all completions, or one limit per row
    temperature: float = 1.0  # 0 is greedy
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    eos_ids: Sequence[int] = ()  # each ends a completion
    pad_id: int = 0
    entropy: bool = False  # record the entropy of each token's distribution

    @property
    def support(self) -> softmax.Support | None:
        """The restriction of the distribution; None if every token may be drawn."""
        return softmax.Support.of(self.top_p, self.top_k, self.min_p)

    def limits(self, num_rows: int) -> list[int]:
        """`max_tokens` of each row."""
        limits = [self.max_tokens] * num_rows if isinstance(self.max_tokens, int) else list(self.max_tokens)
        assert len(limits) == num_rows and min(limits) >= 1, f"max_tokens: {len(limits)} limits for {num_rows} rows"
        return limits


def params_of(config: Config, eos_ids: Sequence[int] = (), pad_id: int = 0) -> SamplingParams:
    """The sampling parameters of a run's settings."""
    return SamplingParams(config.max_tokens, config.temp, config.top_p, config.top_k, config.min_p, eos_ids, pad_id)


class Stats(NamedTuple):
    """The cost of a rollout, in wall-clock seconds and completion tokens."""

    prefill_s: float
    decode_s: float  # the rest
    num_tokens: int
    num_prompt_tokens: int  # prefilled, each distinct prompt once
    cache_bytes: int  # of the largest cache
    peak_bytes: int  # MLX's peak since `mx.reset_peak_memory`, weights included
    batch_size: int  # final rows at once; fewer than requested if memory ran out
    speeds: tuple[float, ...] = ()  # completion tokens a second of each machine, by rank


class Rollout(NamedTuple):
    """Sampled completions, rows prompt-major."""

    completion_ids: mx.array  # (N, T) int32, pad_id after the end
    logprobs: mx.array  # (N, T) float32 nats, 0 after the end
    mask: mx.array  # (N, T) float32, 1 up to and including the end token
    finish_reasons: list[str]  # "stop" at an end token, "length" at max_tokens
    stats: Stats
    entropy: mx.array | None = None  # (N, T) float32 nats, of each token's distribution, 0 after the end


class BatchSize:
    """
    The most rows to decode at once: permanently halved when memory runs out.

    All rollouts of a run share one object, so later ones keep the reduced size.
    """

    def __init__(self, rows: int):
        assert rows >= 1, rows
        self.rows = rows

    def halve(self, num_rows: int) -> None:
        """Halves the number of rows tried, at most `num_rows`."""
        self.rows = max(min(self.rows, num_rows) // 2, 1)


def uniforms(key: int, rows: Sequence[int], num_positions: int) -> mx.array:
    """
    Four numbers in [0, 1) for each (row, position), (len(rows), num_positions, 4) float32.

    A counter-based generator (Philox) with the row in its counter, so rows and positions are independent.
    Source: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC11.
    """
    streams = (np.random.Generator(np.random.Philox(key=key, counter=[0, 0, 0, row])) for row in rows)
    return mx.array(np.stack([stream.random((num_positions, 4), dtype=np.float32) for stream in streams]))


def choose_token(logits: mx.array, uniforms: mx.array, params: SamplingParams) -> tuple[mx.array, mx.array, mx.array]:
    """
    A token, its log-probability and the entropy of its distribution for each row of (N, V) logits.

    Temperature 0 takes the likeliest token and reports the other two at temperature 1. Lazy: an unused entropy is never
    computed.
    """
    temperature, support = params.temperature, params.support
    if temperature == 0:
        token = logits.argmax(-1)
        held = softmax.row_logprobs(logits, token)
        return token.astype(mx.int32), held.logprobs, held.entropies
    if support:
        logits = softmax.truncate_logits(logits.astype(mx.float32) / temperature, support)
        temperature = 1.0
    return softmax.sample_token(logits, uniforms, temperature)


def prefill_tokens() -> int:
    """Positions per forward pass of a prefill, padding included; measured in LOG.md."""
    return 2048 if gpu.on_gpu() else 256


def prefill(model: gwen.Model, prompts: list[list[int]], pad_id: int) -> tuple[KVCache, mx.array]:
    """
    The cache of a batch of right-aligned prompts, and the logits after each, (len(prompts), V).

    Columns are computed from left to right, `prefill_tokens()` positions at once, so memory beside the cache does not
    grow with the prompts. Raises ValueError if the logits are not finite, a sign of float16 overflow.
    """
    length = max(len(prompt) for prompt in prompts)
    padding = [length - len(prompt) for prompt in prompts]
    tokens = mx.array([[pad_id] * pad + prompt for pad, prompt in zip(padding, prompts, strict=True)])
    cache = KVCache(len(model.layers), length, mx.array(padding) if any(padding) else None)
    num_columns = max(prefill_tokens() // len(prompts), 1)
    for begin in range(0, length - num_columns, num_columns):
        model.hidden(tokens[:, begin : begin + num_columns], cache)
        mx.eval(cache.arrays())  # wait: the next columns may use the memory of these
    logits = model.hidden(tokens[:, cache.length :], cache)[:, -1] @ model.head_weight.T
    mx.eval(logits, cache.arrays())
    if not mx.isfinite(logits).all().item():
        raise ValueError(
            f"the model's first logits are not finite in {logits.dtype}; start again with GWEN_DTYPE=bfloat16"
        )
    return cache, logits


class NotFinite(ValueError):
    """
    A drawn token has a log-probability that is not finite, for example after float16 overflow.

    prompt: its index among the given prompts.
    """

    def __init__(self, prompt: int, position: int, dtype: mx.Dtype):
        super().__init__(
            f"token {position + 1} of a completion of prompt {prompt + 1} has a log-probability that is not finite in "
            f"{dtype}; start again with GWEN_DTYPE=bfloat16, or with float32"
        )
        self.prompt = prompt


class Job(NamedTuple):
    """A row to sample."""

    row: int
    prompt: int  # its index in the prefilled batch
    limit: int  # most tokens


class Record:
    """A rollout's rows on the host: their sampling parameters, what was drawn, and which are complete."""

    def __init__(self, num_rows: int, params: SamplingParams, key: int, progress: Any = None):
        self.params, self.key = params, key
        self.limits = params.limits(num_rows)
        shape = (num_rows, max(self.limits))
        self.ids = np.full(shape, params.pad_id, np.int32)
        self.logprobs = np.zeros(shape, np.float32)
        self.entropies = np.zeros(shape, np.float32) if params.entropy else None
        self.done = np.zeros(num_rows, bool)
        self.progress, self.num_drawn = progress, 0

    @property
    def columns(self) -> list[np.ndarray]:
        """The arrays that receive one value per token."""
        return [self.ids, self.logprobs] + ([] if self.entropies is None else [self.entropies])

    def write(self, jobs: list[Job], starts: list[int], step: int, drawn: list[tuple[mx.array, ...]]) -> None:
        """Adds the slots' draws from `step` on; drops those past a row's limit."""
        new = [np.stack([np.array(x) for x in column], axis=1) for column in zip(*drawn, strict=True)]  # wait
        for slot, (job, start) in enumerate(zip(jobs, starts, strict=True)):
            begin, end = step - start, min(step - start + len(drawn), job.limit)
            if begin < end:
                for out, column in zip(self.columns, new, strict=True):
                    out[job.row, begin:end] = column[slot, : end - begin]

    def tick(self, num_tokens: int) -> None:
        """Counts new tokens, for the progress bar only."""
        self.num_drawn += num_tokens
        if self.progress is not None and not self.progress.disable:
            speed = self.num_drawn / self.progress.format_dict["elapsed"]
            self.progress.set_postfix_str(f"{speed:,.0f} tok/s", refresh=False)
            self.progress.update(0)

    def complete(self, jobs: list[Job]) -> None:
        """Marks rows as ended and written."""
        self.done[[job.row for job in jobs]] = True
        if self.progress is not None:
            self.progress.update(len(jobs))

    def bring_together(
        self, mine: list[int], seconds: float, prompts: list[list[int]]
    ) -> list[tuple[list[int], float]]:
        """
        Adds the rows that other machines sampled; returns the rows of each, and the seconds that they took it.

        mine: the rows of this machine. Raises ValueError if the machines have other prompts.
        """
        if world.size() == 1:
            return [(mine, seconds)]
        about = f"rollout of the prompts {zlib.crc32(repr(prompts).encode()):x}"
        parts = world.share((mine, seconds, [column[mine] for column in self.columns]), about)
        for rows, _, columns in parts:
            for out, column in zip(self.columns, columns, strict=True):
                out[rows] = column
        return [(rows, its_seconds) for rows, its_seconds, _ in parts]


class Slots:
    """Rows decoded together: each slot's job and the step it began at, the jobs that wait, the draws of these steps."""

    def __init__(self, cache: SlotCache, jobs: Sequence[Job], record: Record, num_slots: int):
        self.cache, self.record = cache, record
        table = uniforms(record.key, [job.row for job in jobs], max(job.limit for job in jobs))
        self.first_uniform = {job.row: index * table.shape[1] for index, job in enumerate(jobs)}
        self.table = table.reshape(-1, 4)
        self.waiting = deque(jobs)
        self.running = [self.waiting.popleft() for _ in range(min(num_slots, len(jobs)))]
        self.starts = [0] * len(self.running)
        self.drawn: list[tuple[mx.array, ...]] = []  # per unrecorded step: ids, logprobs and optionally entropies
        self.num_recorded = self.num_idle = 0  # steps recorded, and slots idle at the last check
        self.assign()

    @property
    def prompts(self) -> list[int]:
        return [job.prompt for job in self.running]

    def assign(self) -> None:
        """Tells the cache who runs; finds each slot's place in the table and its last step."""
        self.cache.assign(self.prompts, self.starts)
        last = [start + job.limit - 1 for job, start in zip(self.running, self.starts, strict=True)]
        places = [self.first_uniform[job.row] - start for job, start in zip(self.running, self.starts, strict=True)]
        self.places, self.last, self.last_of_all = mx.array(places), mx.array(last), max(last)

    def uniforms(self, step: int) -> mx.array:
        """Four numbers for each slot's draw at this step."""
        return self.table[mx.minimum(self.places + step, len(self.table) - 1)]

    def write(self, finished: Sequence[int]) -> None:
        """Records the draws since the last time, and the finished slots' rows as complete."""
        self.record.write(self.running, self.starts, self.num_recorded, self.drawn)
        self.record.complete([self.running[slot] for slot in finished])
        self.num_recorded, self.drawn = self.num_recorded + len(self.drawn), []

    def hand_on(self, idle: list[int]) -> tuple[list[int], list[int]]:
        """
        Gives idle slots to waiting jobs once they are a sixteenth of all; if no job waits, drops a quarter or more.

        Returns the slots that have a new job, and those that are kept.
        """
        self.record.tick(LOOK_EVERY * (len(self.running) - (self.num_idle + len(idle)) // 2))
        handed = idle[: len(self.waiting)] if len(idle) >= len(self.running) / 16 else []
        dropped = idle if not self.waiting and 4 * len(idle) >= len(self.running) else []
        kept = [slot for slot in range(len(self.running)) if slot not in set(dropped)]
        self.num_idle = len(idle) - len(handed + dropped)
        if not handed + dropped:
            return [], kept
        self.write(handed + dropped)
        for slot in handed:
            self.running[slot], self.starts[slot] = self.waiting.popleft(), self.num_recorded
        self.running, self.starts = [self.running[slot] for slot in kept], [self.starts[slot] for slot in kept]
        if dropped:
            self.cache.keep(kept)
        self.assign()
        return handed, kept


def decode(
    model: gwen.Model,
    cache: SlotCache,
    prompt_logits: mx.array,
    jobs: Sequence[Job],
    record: Record,
    num_slots: int,
) -> None:
    """
    Samples every job, at most `num_slots` at once; a slot whose row has ended takes the next job.

    Step t + 1 is queued before anything of step t is read. The only wait is the check, every LOOK_EVERY steps, for rows
    that ended one step earlier.
    """
    params, eos_ids = record.params, mx.array(list(record.params.eos_ids) or [-1])
    slots = Slots(cache, jobs, record, num_slots)
    logits, ended = prompt_logits[mx.array(slots.prompts)], mx.zeros((len(slots.running),), dtype=mx.bool_)
    for step in itertools.count():
        token, *others = choose_token(logits, slots.uniforms(step), params)
        token, ended_before = mx.where(ended, params.pad_id, token), ended
        ended = ended | (token[:, None] == eos_ids).any(-1) | (slots.last <= step)
        slots.drawn.append((token, *others)[: len(record.columns)])
        if step == slots.last_of_all and not slots.waiting:
            break
        logits = model.hidden(token[:, None], cache)[:, -1] @ model.head_weight.T
        mx.async_eval(slots.drawn[-1], ended, logits)
        if step % LOOK_EVERY < LOOK_EVERY - 1:
            continue
        idle = np.flatnonzero(np.array(ended_before)).tolist()  # wait
        if len(idle) == len(slots.running) and not slots.waiting:
            break
        handed, kept = slots.hand_on(idle)
        if handed:
            fresh = mx.array(np.isin(np.arange(len(ended)), handed))
            begun = prompt_logits[mx.array(slots.prompts)]
            logits, ended = mx.where(fresh[:, None], begun, logits), ended & ~fresh
        if len(kept) < len(ended):
            logits, ended = logits[mx.array(kept)], ended[mx.array(kept)]
    slots.write(range(len(slots.running)))


def shares_prefix(num_rows: int, prompt_lengths: list[int], batch_size: int, dtype: mx.Dtype) -> bool:
    """
    Whether holding each prompt once should be faster than copying it to every row that continues it.

    On a CPU, sharing pays from SHARE_FROM copied columns; below, splitting the attention in two costs more than it
    saves. On a GPU, it pays if a kernel reads prompts in place. If memory is scarce, or to be sure on a GPU, set it
    explicitly in `rollout`.
    """
    if num_rows == len(prompt_lengths):
        return False  # nothing to share
    if gpu.on_gpu():  # MLX's kernel reads one buffer in 16 bits; sharing would hand it float32 copies
        return attention.slot_attention.runs(dtype)
    return min(num_rows, batch_size) * max(prompt_lengths) >= SHARE_FROM


def sample_batch(
    model: gwen.Model,
    rows_of: dict[tuple[int, ...], list[int]],
    record: Record,
    batch_size: int,
    share_prefix: bool | None,
) -> tuple[float, int]:
    """
    Prefills prompts and samples the rows of each into the record.

    Returns the seconds of the prefill and the bytes of the largest cache. All memory allocated here is free after the
    call, whether it returns or fails.
    """
    begin = time.perf_counter()
    prompt_cache, prompt_logits = prefill(model, [list(prompt) for prompt in rows_of], record.params.pad_id)
    prefill_s = time.perf_counter() - begin
    jobs = [Job(row, place, record.limits[row]) for place, rows in enumerate(rows_of.values()) for row in rows]
    lengths = [len(prompt) for prompt in rows_of]
    if share_prefix is None:
        share_prefix = shares_prefix(len(jobs), lengths, batch_size, prompt_logits.dtype)
    cache = SlotCache(prompt_cache, lengths, max(job.limit for job in jobs), share_prefix)
    decode(model, cache, prompt_logits, jobs, record, batch_size)
    return prefill_s, cache.most_bytes


def rollout(
    model: gwen.Model,
    prompts: list[list[int]],
    params: SamplingParams,
    *,
    group_size: int,
    key: int,
    batch_size: int | BatchSize = 64,
    share_prefix: bool | None = None,
) -> Rollout:
    """
    `group_size` completions of each prompt; row b * group_size + g is completion g of prompt b.

    prompts: token ids of any lengths. key: all randomness comes from (key, row, position). batch_size: most rows to
    decode at once; halved when memory runs out, and lost rows are drawn again. share_prefix: hold a prompt's cache once
    for its group instead of copying it to each row; None lets `shares_prefix` decide. The last two affect speed and
    memory only.
    Log-probabilities are those of the sampling distribution, with its support restricted by `params`.
    Raises ValueError for an empty prompt, for non-finite logits or log-probabilities, and if memory is too small for
    one row.
    """
    num_rows = len(prompts) * group_size
    if not prompts or not all(prompts):
        raise ValueError("a prompt has no tokens")
    size = batch_size if isinstance(batch_size, BatchSize) else BatchSize(batch_size)

    rows_of: dict[tuple[int, ...], list[int]] = {}  # distinct prompt -> its rows
    for index, prompt in enumerate(prompts):
        rows_of.setdefault(tuple(prompt), []).extend(range(index * group_size, (index + 1) * group_size))
    waiting = sorted(rows_of, key=len)  # neighbours have similar lengths, so little padding
    waiting = [waiting[number] for number in world.part([len(rows_of[prompt]) for prompt in waiting])]
    mine = sorted(row for prompt in waiting for row in rows_of[prompt])

    begin, prefill_s, cache_bytes = time.perf_counter(), 0.0, 0
    with tqdm(total=len(mine), desc="sampling", unit="row", leave=False, disable=None, miniters=0) as progress:
        record = Record(num_rows, params, key, progress)
        while waiting:
            # enough prompts for two rows per slot: slots stay busy, and memory stays bounded
            most_prompts = max((2 if size.rows > 1 else 1) * size.rows // group_size, 1)
            prompts_now = waiting[: len(waiting) // -(-len(waiting) // most_prompts)]  # batches of about one size
            todo = {prompt: [row for row in rows_of[prompt] if not record.done[row]] for prompt in prompts_now}
            num_todo, failed = sum(map(len, todo.values())), False
            try:
                seconds, num_bytes = sample_batch(model, todo, record, size.rows, share_prefix)
            except (RuntimeError, MemoryError) as error:
                if not gpu.is_out_of_memory(error):
                    raise
                if min(size.rows, num_todo) == 1:
                    length = max(map(len, todo)) + max(record.limits)
                    raise ValueError(
                        f"memory does not suffice for one row of {length} tokens; free some, or start again with a "
                        "lower --max-tokens"
                    ) from error
                failed = True
            mx.synchronize()  # wait: a queued step holds the caches of this batch
            if failed:  # not in the handler: the traceback holds every array of the attempt
                mx.clear_cache()
                size.halve(num_todo)
                tqdm.write(f"sampling: out of memory, going on with {size.rows} rows at once", file=sys.stderr)
                waiting = [prompt for prompt in waiting if not record.done[rows_of[prompt]].all()]
                continue
            prefill_s, cache_bytes = prefill_s + seconds, max(cache_bytes, num_bytes)
            waiting = waiting[len(prompts_now) :]
    decode_s = time.perf_counter() - begin - prefill_s
    parts = record.bring_together(mine, prefill_s + decode_s, prompts)
    limits = np.array(record.limits)
    is_end: np.ndarray = np.isin(record.ids, list(params.eos_ids)) & (np.arange(limits.max()) < limits[:, None])
    ended = np.asarray(is_end.any(-1))
    lengths_of = np.where(ended, is_end.argmax(-1) + 1, limits)
    width = int(lengths_of.max())
    mask = np.arange(width) < lengths_of[:, None]
    for row, position in np.argwhere(mask & ~np.isfinite(record.logprobs[:, :width])).tolist()[:1]:
        raise NotFinite(row // group_size, position, model.head_weight.dtype)
    logprobs, *entropies = (mx.array(np.where(mask, x[:, :width], np.float32(0))) for x in record.columns[1:])
    return Rollout(
        mx.array(np.where(mask, record.ids[:, :width], params.pad_id)),
        logprobs,
        mx.array(mask.astype(np.float32)),
        ["stop" if ended[row] else "length" for row in range(num_rows)],
        Stats(
            prefill_s=prefill_s,
            decode_s=decode_s,
            num_tokens=int(lengths_of.sum()),
            num_prompt_tokens=sum(map(len, rows_of)),
            cache_bytes=cache_bytes,
            peak_bytes=mx.get_peak_memory(),
            batch_size=size.rows,
            speeds=tuple(float(lengths_of[rows].sum()) / seconds if rows else 0.0 for rows, seconds in parts),
        ),
        entropies[0] if params.entropy else None,
    )


def columns(rollout: Rollout) -> dict[str, list[Any]]:
    """Each row's columns for rewards: its token ids without padding, and their number."""
    lengths = np.array(rollout.mask).sum(-1).astype(int).tolist()
    ids = np.array(rollout.completion_ids).tolist()
    return {"completion_ids": [row[:num] for row, num in zip(ids, lengths, strict=True)], "num_tokens": lengths}


def texts(tokenizer: Any, result: Rollout, eos_ids: Sequence[int]) -> list[str]:
    """The text of each row, without its end token and other control tokens."""
    rows = zip(np.array(result.completion_ids), np.array(result.mask), strict=True)
    kept = ([i for i in ids[mask > 0].tolist() if i not in eos_ids] for ids, mask in rows)
    return [tokenizer.decode(ids, skip_special_tokens=True) for ids in kept]


def main(argv: list[str] | None = None) -> None:
    parser = Parser("sampler.py", "Sample completions of one prompt.")
    run_files.add_flags(parser)
    parser.add_argument("--model", help="demo, a Hugging Face directory or a hub id (default: the run's or adapter's)")
    parser.add_argument("--adapter", metavar="DIR", help="a run, its checkpoint, or an adapter in mlx_lm's layout")
    parser.add_argument("--prompt", required=True, help="what the user says")
    parser.add_argument("--system", help="what stands before it")
    parser.add_argument("--num", type=int, default=1, help="completions")
    parser.add_argument("--max-tokens", type=int, help="default: the run's, else 256")
    parser.add_argument("--temp", type=float, default=1.0, help="0 is greedy")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--thinking", action=argparse.BooleanOptionalAction, help="default: the run's, else off")
    args = parser.parse_args(argv)
    try:
        run_files.check(args.run, args.step, args.adapter)
        held, adapter = {"max_tokens": 256, "thinking": False}, args.adapter
        if args.run:
            held, adapter = run_files.settings_of(args.run), run_files.adapter_of(args.run, args.step)
        for name in ("model", "max_tokens", "thinking"):
            if getattr(args, name) is None:
                setattr(args, name, held.get(name))
        check_least(args, num=1, max_tokens=1, temp=0, seed=0)
        for flag, text in (("--prompt", args.prompt), ("--system", args.system)):
            if text is not None:
                check_text(flag, text)
        name, why = gwen.choose_model(args.model, adapter)
        model, tokenizer = gwen.load(name, adapter=adapter)
        prompts = tasks.render(
            tokenizer,
            [{"prompt": args.prompt, "system": args.system}],
            max_tokens=args.max_tokens,
            context=model.config.max_position_embeddings,
            thinking=args.thinking,
            kind="prompt",
        )
        print(f"model: {name}, {why}", file=sys.stderr)
        params = SamplingParams(args.max_tokens, args.temp, eos_ids=model.config.eos_ids)
        result = rollout(model, prompts, params, group_size=args.num, key=args.seed)
    except (ValueError, OSError) as error:
        fail(error)
    print("\n".join(texts(tokenizer, result, model.config.eos_ids)))


if __name__ == "__main__":
    main()
