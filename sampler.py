"""
Rollouts: prompts in, sampled completions and log-probabilities out. `uv run sampler.py --prompt "Hi"` shows one.

Each distinct prompt is prefilled once. The rows that continue it share or copy its cache and are decoded together. A
rollout has the drawn ids, their float32 log-probabilities under the sampling distribution, and a mask that includes the
end token. Randomness depends only on (key, row, position): a completion does not depend on the rows decoded with it,
and a row lost when memory ran out is drawn again unchanged. `problems/chat_template.py` renders prompts to ids.
Where a completion has turns, an end token ends one of them, and what the row is told before the next is prefilled.

Axes: N rows, prompt-major; T completion positions; V vocabulary.
"""

import itertools
import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import cpu_blas  # noqa: F401  (before mlx)
import mlx.core as mx
import numpy as np
from tqdm.auto import tqdm

import gwen
from kv_cache import REFILL, SHRINK, KVCache, SlotCache
from layers import attention, softmax
from machine import alive, gpu, memory

if TYPE_CHECKING:
    from problems.episodes import Episodes

LOOK_EVERY = 4  # positions between two checks for rows that have ended; a check costs one wait


class Stop(NamedTuple):
    """Texts that end a completion, at the token that completes one."""

    texts: Sequence[str]
    tokenizer: Any

    def find_end(self, ids: list[int], start: int) -> int | None:
        """How many of the ids, more than `start`, it takes to complete a text; None if they hold none."""
        # A token has at least one byte. Four more hold a character in parts, or a space that decoders strip.
        width = max(len(text.encode()) for text in self.texts) + 4
        if not self._in(ids[max(start + 1 - width, 0) :]):
            return None
        return next(
            (
                end
                for end in range(start + 1, len(ids) + 1)
                if self._in(ids[max(end - width, 0) : end])
            ),
            None,
        )

    def _in(self, ids: list[int]) -> bool:
        decoded = self.tokenizer.decode(ids)
        return any(text in decoded for text in self.texts)

    def trim(self, text: str) -> str:
        """A text up to where the first of these begins."""
        return text[
            : min((place for one in self.texts if (place := text.find(one)) >= 0), default=None)
        ]


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
    stop: Stop | None = None  # where rows have no turns

    @property
    def support(self) -> softmax.Support | None:
        """The restriction of the distribution; None if every token may be drawn."""
        return softmax.Support.from_settings(self.top_p, self.top_k, self.min_p)

    def limits(self, num_rows: int) -> list[int]:
        """`max_tokens` of each row."""
        limits = (
            [self.max_tokens] * num_rows
            if isinstance(self.max_tokens, int)
            else list(self.max_tokens)
        )
        assert len(limits) == num_rows and min(limits) >= 1, (
            f"max_tokens: {len(limits)} limits for {num_rows} rows"
        )
        return limits


class RolloutStats(NamedTuple):
    """The cost of a rollout."""

    prefill_s: float  # wall-clock seconds
    decode_s: float  # the rest
    cache_bytes: int  # of the largest cache
    wait_s: float = 0.0  # waited for what rows are told
    speeds: Sequence[float] = ()  # completion tokens a second of each machine, by rank


class Rollout(NamedTuple):
    """Sampled completions, rows prompt-major."""

    completion_ids: mx.array  # (N, T) int32, pad_id after the end
    logprobs: mx.array  # (N, T) float32 nats, 0 after the end
    mask: mx.array  # (N, T) float32, 1 up to and including the end token
    finish_reasons: list[
        str
    ]  # "stop" at an end token or text, "length" at max_tokens; of turns see `layers.turns`
    stats: RolloutStats
    entropy: mx.array | None = (
        None  # (N, T) float32 nats, of each token's distribution, 0 after the end
    )
    sequences: list[list[int]] | None = (
        None  # N, where rows have turns: all ids after the prompt, also what was told
    )
    places: list[list[int]] | None = None  # N, the place in its sequence of each of a row's tokens
    stop: Stop | None = None  # of the sampling parameters

    @property
    def lengths(self) -> np.ndarray:
        """Tokens of each row, the end token included, (N,)."""
        return np.array(self.mask).sum(-1).astype(int)

    @property
    def ids(self) -> list[list[int]]:
        """The tokens of each row, the end token included."""
        return [
            ids[:length]
            for ids, length in zip(
                np.array(self.completion_ids).tolist(), self.lengths, strict=True
            )
        ]


def uniforms(key: int, rows: Sequence[int], num_positions: int) -> np.ndarray:
    """
    Four numbers in [0, 1) for each (row, position), (len(rows), num_positions, 4) float32.

    A counter-based generator (Philox) with the row in its counter, so rows and positions are independent.
    Source: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC11.
    """
    streams = (
        np.random.Generator(np.random.Philox(key=key, counter=[0, 0, 0, row])) for row in rows
    )
    return np.stack([stream.random((num_positions, 4), dtype=np.float32) for stream in streams])


def choose_token(
    logits: mx.array, uniforms: mx.array, params: SamplingParams
) -> tuple[mx.array, mx.array, mx.array]:
    """
    A token, its log-probability and the entropy of its distribution for each row of (N, V) logits.

    Temperature 0 takes the likeliest token, with the other two at temperature 1. An unused entropy is never computed.
    """
    temperature, support = params.temperature, params.support
    if temperature == 0:
        token = logits.argmax(-1)
        return token.astype(mx.int32), *softmax.row_logprobs(logits, token)
    if support:
        logits = softmax.truncate_logits(logits.astype(mx.float32) / temperature, support)
        temperature = 1.0
    return softmax.sample_token(logits, uniforms, temperature)


@gpu.without_gradients()
def prefill(model: gwen.Model, prompts: list[list[int]], pad_id: int) -> tuple[KVCache, mx.array]:
    """
    The cache of a batch of right-aligned prompts, and the logits after each, (len(prompts), V).

    Computes `gpu.prefill_tokens()` positions at once, from left to right, so memory beside the cache does not grow with
    the prompts. Raises ValueError if the logits are not finite, a sign of float16 overflow.
    """
    length = max(len(prompt) for prompt in prompts)
    padding = [length - len(prompt) for prompt in prompts]
    tokens = mx.array(
        [[pad_id] * pad + prompt for pad, prompt in zip(padding, prompts, strict=True)]
    )
    cache = KVCache(model.config.layer_kinds, length, mx.array(padding) if any(padding) else None)
    num_columns = max(gpu.prefill_tokens() // len(prompts), 1)
    for begin in range(0, length - num_columns, num_columns):
        model.hidden(tokens[:, begin : begin + num_columns], cache)
        mx.eval(cache.arrays())  # wait: the next columns may use the memory of these
    logits = model.hidden(tokens[:, cache.length :], cache)[:, -1] @ model.head_weight.T
    mx.eval(logits, cache.arrays())
    if not mx.isfinite(logits).all().item():
        raise ValueError(
            f"the first logits are not finite in {logits.dtype}; start again with GWEN_DTYPE=bfloat16"
        )
    return cache, logits


class NotFinite(ValueError):
    """A drawn token has a log-probability that is not finite, for example after float16 overflow."""

    def __init__(self, row: int, position: int, dtype: mx.Dtype):
        super().__init__(
            f"token {position + 1} of completion {row + 1} has a log-probability that is not finite in {dtype}; "
            "start again with GWEN_DTYPE=bfloat16, or with float32"
        )
        self.row = row


class DecodeState:
    """A rollout's rows on the host: sampling parameters, drawn tokens, ended rows and the cost so far."""

    progress: alive.Bar | None = None
    conversation: "Episodes | None" = None  # where rows have turns: what they are told

    def __init__(
        self, num_rows: int, params: SamplingParams, key: int, numbers: Sequence[int] | None = None
    ):
        """numbers: of the rows, for their random numbers; None: in order."""
        self.params, self.key, self.numbers = params, key, numbers or range(num_rows)
        self.most, self.eos_ids = (
            np.array(params.limits(num_rows)),
            np.array(params.eos_ids, np.int32),
        )
        self.limits = self.most.copy()  # tokens; in turns, where a row's context ends first
        self.lengths = np.zeros(num_rows, int)  # tokens drawn
        self.ended = np.zeros(num_rows, bool)
        self.stopped, self.searched = (
            np.zeros(num_rows, bool),
            np.zeros(num_rows, int),
        )  # at a text; tokens looked at
        shape = num_rows, self.limits.max()
        self.ids = np.full(shape, params.pad_id, np.int32)
        # of each token: id, log-probability and, if asked for, entropy
        self.columns = [self.ids, *np.zeros((1 + params.entropy, *shape), np.float32)]
        self.prefill_s, self.cache_bytes = 0.0, 0  # for `RolloutStats`
        # where rows have turns: all ids after the prompt, the places of own tokens in them, and why there are no more:
        # "length": --max-tokens; "context"; or what the talk says
        self.sequences: list[list[int]] = [[] for _ in range(num_rows)]
        self.places: list[list[int]] = [[] for _ in range(num_rows)]
        self.reasons = [""] * num_rows

    def has_ended(self, rows: np.ndarray) -> np.ndarray:
        """Whether the newest token of each of the rows is an end token, or completes a text that ends it."""
        return (self.ids[rows, self.lengths[rows] - 1][:, None] == self.eos_ids).any(
            -1
        ) | self.stopped[rows]

    def is_over(self, row: int) -> bool:
        return bool(self.reasons[row] if self.conversation else self.ended[row])

    def draw(self, logits: mx.array, uniforms: mx.array) -> tuple[mx.array, ...]:
        """The values of `columns` for a token of each row."""
        return choose_token(logits, uniforms, self.params)[: len(self.columns)]

    def write(self, rows: np.ndarray, drawn: Sequence[mx.array]) -> None:
        """Adds a token to those of the rows that have not ended."""
        values, going = [np.array(column) for column in drawn], ~self.ended[rows]  # wait
        rows = rows[going]
        for out, column in zip(self.columns, values, strict=True):
            out[rows, self.lengths[rows]] = column[going]
        self.lengths[rows] += 1
        self.ended[rows] = self.has_ended(rows) | (self.lengths[rows] == self.limits[rows])

    def cut_at_stop(self, rows: np.ndarray) -> None:
        """Ends rows at the token that completes a stop text, though more were drawn."""
        if self.params.stop is None:
            return
        for row in rows[self.lengths[rows] > self.searched[rows]]:
            if end := self.params.stop.find_end(
                self.ids[row, : self.lengths[row]].tolist(), self.searched[row]
            ):
                self.lengths[row], self.stopped[row], self.ended[row] = end, True, True
            self.searched[row] = self.lengths[row]

    def show_progress(self) -> None:
        if self.progress is not None:
            num_over = sum(map(bool, self.reasons)) if self.conversation else int(self.ended.sum())
            self.progress.show(num_over, self.lengths.sum(), "tok")

    def uniforms(self, rows: Sequence[int]) -> np.ndarray:
        """The random numbers of rows, (len(rows), tokens, 4)."""
        return uniforms(self.key, [self.numbers[row] for row in rows], self.most[list(rows)].max())


@gpu.without_gradients()
def decode(
    model: gwen.Model,
    cache: SlotCache,
    prompt_logits: mx.array,
    prompt_of: dict[int, int],
    record: DecodeState,
) -> None:
    """
    Samples rows in the slots of a cache; when a slot's row has ended, the slot takes the next row.

    prompt_of: rows in the order in which they begin, each with the index of its prompt in the prefilled batch.
    Queues step t + 1 before it reads anything of step t. It waits only every LOOK_EVERY steps, to read all draws but
    the newest.
    """
    rows, prompts = np.array(list(prompt_of)), np.array(list(prompt_of.values()))
    record.lengths[rows] = record.searched[rows] = (
        0  # drop the draws of an attempt that ran out of memory
    )
    table = record.uniforms(rows.tolist())
    slots = np.arange(cache.num_slots)  # index in `rows` of the row that each slot samples
    num_begun, forward = len(slots), gwen.decode_step(model)
    cache.assign(prompts[slots].tolist())
    logits = prompt_logits[mx.array(prompts[slots])]
    queued: list[
        tuple[np.ndarray, tuple[mx.array, ...]]
    ] = []  # rows and draws of each step that was not read yet
    for step in itertools.count():
        np.minimum(
            cache.lengths, table.shape[1] - 1, out=cache.lengths
        )  # an ended row runs on until its end is read
        drawn = record.draw(logits, mx.array(table[slots, cache.lengths]))
        queued.append((rows[slots], drawn))
        if num_begun == len(rows) and (cache.lengths + 1 >= record.limits[rows[slots]]).all():
            break
        cache.plan_writes()
        logits = forward(drawn[0][:, None], cache)[:, -1] @ model.head_weight.T
        mx.async_eval(drawn, logits)
        if step % LOOK_EVERY < LOOK_EVERY - 1:
            continue
        while len(queued) > 1:
            record.write(*queued.pop(0))  # wait
        record.cut_at_stop(rows)
        record.show_progress()
        ended = record.ended[rows[slots]]
        idle, num_waiting = np.flatnonzero(ended), len(rows) - num_begun
        if num_waiting and len(idle) >= REFILL * len(slots):
            idle = idle[:num_waiting]
            slots[idle] = np.arange(num_begun, num_begun + len(idle))
            num_begun += len(idle)
            cache.assign(prompts[slots].tolist(), idle.tolist())
            logits[mx.array(idle)] = prompt_logits[mx.array(prompts[slots[idle]])]
        elif not num_waiting and len(idle) >= SHRINK * len(slots):
            kept = np.flatnonzero(~ended)
            if not len(kept):
                break
            cache.select_slots(kept.tolist())
            slots, logits = slots[kept], logits[mx.array(kept)]
    for step_rows, drawn in queued:
        record.write(step_rows, drawn)
    record.cut_at_stop(rows)
    record.show_progress()
    mx.synchronize()  # wait: a queued step holds the cache


def continue_greedily(
    model: gwen.Model, past: KVCache, logits: mx.array, limit: int, ends: Sequence[int]
) -> list[list[int]]:
    """Greedy continuations of a cache's rows, from first logits (N, V), up to the first id in `ends` or `limit` ids."""
    num_rows = len(logits)
    record = DecodeState(num_rows, SamplingParams(limit, 0.0, eos_ids=ends), key=0)
    cache = SlotCache(past, num_rows, limit, attention.can_read_in_place(logits.dtype))
    decode(model, cache, logits, {row: row for row in range(num_rows)}, record)
    return [ids[:length] for ids, length in zip(record.ids.tolist(), record.lengths, strict=True)]


RowsOf = dict[tuple[int, ...], list[int]]  # a distinct prompt -> the rows that continue it


def sample_batch(
    model: gwen.Model, rows_of: RowsOf, record: DecodeState, batch_size: int, share: bool | None
) -> None:
    """Prefills prompts and samples their rows. Its memory is free afterwards, also on failure."""
    begin = time.perf_counter()
    prompt_cache, prompt_logits = prefill(
        model, [list(prompt) for prompt in rows_of], record.params.pad_id
    )
    record.prefill_s += time.perf_counter() - begin
    prompt_of = {row: place for place, rows in enumerate(rows_of.values()) for row in rows}
    if share is None:
        share = attention.should_share_prefix(
            len(prompt_of), list(map(len, rows_of)), batch_size, prompt_logits.dtype
        )
    width = 0 if record.conversation else int(record.limits[list(prompt_of)].max())
    cache = SlotCache(prompt_cache, min(batch_size, len(prompt_of)), width, share)
    if record.conversation:
        from layers.turns import TurnScheduler  # here: rows without turns do without it

        TurnScheduler(
            record, model, gwen.decode_step(model), cache, prompt_logits, rows_of
        ).decode()
    else:
        decode(model, cache, prompt_logits, prompt_of, record)
    record.cache_bytes = max(record.cache_bytes, cache.most_bytes)


def sample_with_retries(
    model: gwen.Model,
    rows_of: RowsOf,
    record: DecodeState,
    size: memory.BatchSize,
    share: bool | None,
) -> None:
    """Samples prompts' rows in batches, again where memory ran out. ValueError if it is too small for one row."""
    of_one = -(-sum(map(len, rows_of.values())) // len(rows_of))  # rows of a prompt, on average
    while left := {
        p: rest
        for p, rows in rows_of.items()
        if (rest := [r for r in rows if not record.is_over(r)])
    }:
        # enough prompts for two rows per slot: slots stay busy, and memory stays bounded
        most_prompts = max((2 if size.rows > 1 else 1) * size.rows // of_one, 1)
        num_prompts = len(left) // -(-len(left) // most_prompts)  # batches of about one size
        batch = dict(itertools.islice(left.items(), num_prompts))
        rows = [row for rows in batch.values() for row in rows]
        if memory.try_within_memory(sample_batch, model, batch, record, size.rows, share):
            assert all(map(record.is_over, rows)), f"some of {len(rows)} rows did not end"
        if all(map(record.is_over, rows)):
            continue
        if min(size.rows, len(rows)) == 1:
            length = max(map(len, batch)) + record.limits.max()
            fix = "free some, or start again with a lower --max-tokens"
            raise ValueError(f"memory does not suffice for one row of {length} tokens; {fix}")
        size.halve(len(rows))
        tqdm.write(
            f"sampling: out of memory, going on with {size.rows} rows at once", file=sys.stderr
        )


def make_rollout(record: DecodeState, dtype: mx.Dtype, stats: RolloutStats) -> Rollout:
    """The rollout of a record whose rows have all ended. Raises NotFinite."""
    width = int(record.lengths.max())
    mask = np.arange(width) < record.lengths[:, None]
    for row, position in np.argwhere(mask & ~np.isfinite(record.columns[1][:, :width])).tolist()[
        :1
    ]:
        raise NotFinite(row, position, dtype)
    ids, logprobs, *entropies = (
        mx.array(np.where(mask, column[:, :width], fill))
        for column, fill in zip(record.columns, (record.params.pad_id, 0, 0), strict=False)
    )
    reasons = ["stop" if ended else "length" for ended in record.has_ended(np.arange(len(mask)))]
    entropy = entropies[0] if entropies else None
    found = Rollout(
        ids,
        logprobs,
        mx.array(mask.astype(np.float32)),
        reasons,
        stats,
        entropy,
        stop=record.params.stop,
    )
    if record.conversation is None:
        return found
    return found._replace(
        finish_reasons=record.reasons, sequences=record.sequences, places=record.places
    )


def rollout(
    model: gwen.Model,
    prompts: list[list[int]],
    params: SamplingParams,
    *,
    group_size: int,
    key: int,
    rows: Sequence[int] | None = None,
    batch_size: int | memory.BatchSize = 64,
    share_prefix: bool | None = None,
    talk: "Episodes | None" = None,
) -> Rollout:
    """
    `group_size` completions of each prompt; row b * group_size + g is completion g of prompt b.

    prompts: token ids of any lengths. key: all randomness comes from (key, row, position). rows: the numbers of the
    rows in a larger rollout of which these are a part. batch_size: most rows to decode at once; halved when memory runs
    out. share_prefix: hold a prompt's cache once for its group instead of copying it to each row; None: where
    `attention.should_share_prefix`. These two affect speed and memory only. talk: what rows are told between turns, which end
    tokens end; `max_tokens` is of all turns, the talk's `context` is the most that a row has.
    Log-probabilities are those of the sampling distribution, with its support restricted by `params`.
    Raises ValueError for an empty prompt, for logits that are not finite, and if memory is too small for one row.
    """
    if not prompts or not all(prompts):
        raise ValueError("a prompt has no tokens")
    assert talk is None or not params.stop, "stop texts for rows in turns"
    size = batch_size if isinstance(batch_size, memory.BatchSize) else memory.BatchSize(batch_size)
    rows_of, num_rows = RowsOf(), len(prompts) * group_size
    for place, prompt in enumerate(prompts):
        rows_of.setdefault(tuple(prompt), []).extend(
            range(place * group_size, (place + 1) * group_size)
        )
    begin = time.perf_counter()
    what = "sampling" if params.temperature else "answering greedily"
    with alive.Bar(total=num_rows, desc=what, unit="row") as progress:
        record = DecodeState(num_rows, params, key, rows)
        record.progress, record.conversation = progress, talk
        in_order = dict(
            sorted(rows_of.items(), key=lambda item: len(item[0]))
        )  # so that batches have little padding
        sample_with_retries(model, in_order, record, size, share_prefix)
    decode_s, wait_s = time.perf_counter() - begin - record.prefill_s, talk.wait_s if talk else 0.0
    stats = RolloutStats(record.prefill_s, decode_s, record.cache_bytes, wait_s)
    return make_rollout(record, model.head_weight.dtype, stats)


def decode_texts(tokenizer: Any, result: Rollout, eos_ids: Sequence[int]) -> list[str]:
    """The text of each row, without control tokens, a line end between turns; as in vLLM it ends before a stop text."""
    ends = set(eos_ids)
    found = []
    for row in result.ids:
        turns = [
            list(turn) for is_end, turn in itertools.groupby(row, ends.__contains__) if not is_end
        ]
        found.append("\n".join(tokenizer.decode(turn, skip_special_tokens=True) for turn in turns))
    return [result.stop.trim(text) for text in found] if result.stop else found


def main(argv: list[str] | None = None) -> None:
    from deploy import chat  # which stands above this module

    chat.main(argv)


if __name__ == "__main__":
    from problems.episodes import end_tools

    with end_tools():
        main()
