"""
Rollouts: samples completions of prompts, and returns them with their log-probabilities.

Each distinct prompt is prefilled once. The rows that continue it share or copy its cache, and all
rows are decoded together. A rollout holds the sampled ids, their float32 log-probabilities under
the sampling distribution, and a mask that includes the end token.

A `Decoder` does the step that all decode loops share: it samples a token for each row and appends
it. A `SlotDecoder` does this for many rows in the slots of a cache. The loops only decide when rows
end and when slots are reused. The loop for rows without turns is `decode`, the loop for rows with
turns is in layers/turns.py, and the loop that streams an answer is in chat.py.

Randomness depends only on (key, row, position). So a completion does not depend on the rows that
are decoded with it. If memory runs out, the lost rows are sampled again with the same result.

A completion has turns if tools or an environment reply to the model. Then an end token ends only
one turn, and the reply to that turn is prefilled before the next turn. The conversion of prompts to
ids is in prompts/chat_template.py.

Axes: N rows, prompt-major; T completion positions; V vocabulary.
"""

import itertools
import shlex
import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import cpu_blas  # noqa: F401  (before mlx)
import mlx.core as mx
import numpy as np
from tqdm.auto import tqdm

import gwen
from kv_cache import REFILL, SHRINK, Cache, KVCache, SlotCache
from layers import attention, softmax
from machine import alive, gpu, memory

if TYPE_CHECKING:
    from layers.turns import RowEpisodes

LOOK_EVERY = 4  # steps between two checks for ended rows; a check costs one wait


# ---- what goes in and what comes out


class StopTexts(NamedTuple):
    """The texts of --stop. A completion ends at the token that completes one of these texts."""

    texts: Sequence[str]
    tokenizer: Any

    def num_ids_through_stop(self, ids: list[int], num_searched: int) -> int | None:
        """
        The number of ids up to and including the one that completes a stop text.

        The first `num_searched` ids are known to complete no stop text. Returns None if no later id
        completes one.
        """
        # A token has at least one byte. The 4 additional tokens cover a character that is split
        # between tokens, and a space that decoders strip.
        width = max(len(text.encode()) for text in self.texts) + 4
        if not self._occurs_in(ids[max(num_searched + 1 - width, 0) :]):
            return None
        for end in range(num_searched + 1, len(ids) + 1):
            if self._occurs_in(ids[max(end - width, 0) : end]):
                return end
        return None

    def _occurs_in(self, ids: list[int]) -> bool:
        decoded = self.tokenizer.decode(ids)
        return any(text in decoded for text in self.texts)

    def trim(self, text: str) -> str:
        """The text before the first stop text in it."""
        positions = [text.find(stop_text) for stop_text in self.texts]
        end = min((position for position in positions if position >= 0), default=None)
        return text[:end]


class SamplingParams(NamedTuple):
    """
    The settings for sampling completions and for ending them.

    Top-p is off at 1. Top-k and min-p are off at 0.
    """

    max_tokens: int | Sequence[int] = 256  # one limit for all completions, or one per row
    temperature: float = 1.0  # 0 is greedy
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    eos_ids: Sequence[int] = ()  # each ends a completion
    pad_id: int = 0
    entropy: bool = False  # record the entropy of each token's distribution
    stop: StopTexts | None = None  # for rows without turns

    @property
    def support(self) -> softmax.TruncationSettings | None:
        """The restriction of the distribution; None if every token may be sampled."""
        return softmax.TruncationSettings.from_settings(self.top_p, self.top_k, self.min_p)

    def max_tokens_per_row(self, num_rows: int) -> list[int]:
        """The maximum number of tokens for each of `num_rows` rows."""
        if isinstance(self.max_tokens, int):
            limits = [self.max_tokens] * num_rows
        else:
            limits = list(self.max_tokens)
        has_each_row = len(limits) == num_rows
        assert has_each_row, f"max_tokens: {len(limits)} limits for {num_rows} rows"
        assert min(limits) >= 1, f"max_tokens: {min(limits)}"
        return limits


class RolloutStats(NamedTuple):
    """The cost of a rollout."""

    prefill_s: float  # wall-clock seconds
    decode_s: float  # wall-clock seconds of the rest of the rollout
    cache_bytes: int  # the size of the largest cache
    wait_s: float = 0.0  # seconds spent waiting for tools and environments
    speeds: Sequence[float] = ()  # completion tokens per second of each rank
    # the reason for each failed episode of an outside harness; None if there is no such harness
    failures: Sequence[str] | None = None


class Rollout(NamedTuple):
    """Sampled completions. The rows of a prompt are next to each other."""

    completion_ids: mx.array  # (N, T) int32, pad_id after the end
    logprobs: mx.array  # (N, T) float32 nats, 0 after the end
    mask: mx.array  # (N, T) float32, 1 up to and including the end token
    # why each row ended: "stop" at an end token or stop text, or "length" at max_tokens;
    # `layers.turns` lists the reasons for rows with turns
    finish_reasons: list[str]
    stats: RolloutStats
    # (N, T) float32 nats, the entropy of each token's distribution, 0 after the end
    entropy: mx.array | None = None
    # N lists, for rows with turns: all ids after the prompt, including the replies to the row
    sequences: list[list[int]] | None = None
    # N lists, for rows with turns: the position in `sequences` of each sampled token
    places: list[list[int]] | None = None
    stop: StopTexts | None = None  # the stop texts in the sampling parameters

    @property
    def lengths(self) -> np.ndarray:
        """The number of tokens of each row, including the end token, (N,)."""
        return np.array(self.mask).sum(-1).astype(int)

    @property
    def ids(self) -> list[list[int]]:
        """The tokens of each row, including the end token."""
        rows = np.array(self.completion_ids).tolist()
        return [ids[:length] for ids, length in zip(rows, self.lengths, strict=True)]


# ---- one token


def four_uniforms_per_position(
    key: int, row_numbers: Sequence[int], num_positions: int
) -> np.ndarray:
    """
    Four numbers in [0, 1) for each (row, position), (len(row_numbers), num_positions, 4) float32.

    The generator (Philox) is counter-based and has the row in its counter, so rows and positions
    are independent.
    Source: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC11.
    """
    shape = (num_positions, 4)
    values = []
    for row_number in row_numbers:
        counter = [0, 0, 0, row_number]
        generator = np.random.Generator(np.random.Philox(key=key, counter=counter))
        values.append(generator.random(shape, dtype=np.float32))
    return np.stack(values)


def choose_token(
    logits: mx.array, uniforms: mx.array, params: SamplingParams
) -> tuple[mx.array, mx.array, mx.array]:
    """
    Samples a token for each row of (N, V) logits.

    Returns the token, its log-probability and the entropy of its distribution, (N,) each. MLX
    computes the entropy only if the caller uses it. At temperature 0, the token is the likeliest
    one, and the log-probability and the entropy are those at temperature 1.
    """
    temperature = params.temperature
    if temperature == 0:
        token = logits.argmax(-1)
        logprob, entropy = softmax.row_logprobs(logits, token)
        return token.astype(mx.int32), logprob, entropy

    support = params.support
    if support:
        scaled = logits.astype(mx.float32) / temperature
        logits = softmax.truncate_logits(scaled, support)
        temperature = 1.0
    return softmax.sample_token(logits, uniforms, temperature)


# ---- prompts


def prefill_and_get_last_logits(model: gwen.Model, tokens: mx.array, cache: KVCache) -> mx.array:
    """
    Appends (N, L) tokens to the rows of a cache; returns the logits after the last tokens, (N, V).

    The model reads `gpu.prefill_tokens_per_pass()` tokens at a time, from left to right. So the
    memory that the prefill needs besides the cache does not grow with L.
    """
    num_rows, length = tokens.shape
    num_columns = max(gpu.prefill_tokens_per_pass() // num_rows, 1)
    begin = 0
    while length - begin > num_columns:
        model.hidden(tokens[:, begin : begin + num_columns], cache)
        mx.eval(cache.arrays())  # wait: frees the memory of these columns for the next ones
        begin += num_columns
    logits = model.hidden(tokens[:, begin:], cache)[:, -1] @ model.head_weight.T
    mx.eval(logits, cache.arrays())
    return logits


@gpu.without_gradients()
def prefill(model: gwen.Model, prompts: list[list[int]], pad_id: int) -> tuple[KVCache, mx.array]:
    """
    Returns the cache of a batch of right-aligned prompts, and the logits after each prompt,
    (len(prompts), V).

    Raises ValueError if the logits are not finite, for example after float16 overflow.
    """
    length = max(len(prompt) for prompt in prompts)
    padding = [length - len(prompt) for prompt in prompts]
    padded = [[pad_id] * pad + prompt for pad, prompt in zip(padding, prompts, strict=True)]
    cache = KVCache(model.config.layer_kinds, length, mx.array(padding) if any(padding) else None)
    logits = prefill_and_get_last_logits(model, mx.array(padded), cache)
    if not mx.isfinite(logits).all().item():
        raise ValueError(
            f"the first logits are not finite in {logits.dtype}; "
            "start again with GWEN_DTYPE=bfloat16"
        )
    return cache, logits


# ---- decoding


class NonFiniteLogprob(ValueError):
    """A sampled token's log-probability is not finite, for example after float16 overflow."""

    def __init__(self, row: int, position: int, dtype: mx.Dtype):
        super().__init__(
            f"token {position + 1} of completion {row + 1} has a log-probability that is not "
            f"finite in {dtype}; start again with GWEN_DTYPE=bfloat16, or with float32"
        )
        self.row = row


class DecodeState:
    """
    The state of a rollout's rows, in host memory.

    It holds the sampling parameters, the tokens sampled so far, the ends of the rows and the cost.
    """

    progress: alive.Bar | None = None
    episodes: "RowEpisodes | None" = None  # replies to the turns; None for rows without turns

    def __init__(
        self,
        num_rows: int,
        params: SamplingParams,
        key: int,
        row_numbers: Sequence[int] | None = None,
    ):
        """
        row_numbers: each row's number, which determines its randomness. None stands for the numbers
        from 0 on.
        """
        self.params = params
        self.key = key
        self.row_numbers = row_numbers or range(num_rows)
        self.eos_ids = np.array(params.eos_ids, np.int32)
        self.max_tokens = np.array(params.max_tokens_per_row(num_rows))
        # the most tokens that each row may have; in rows with turns, the context may allow fewer
        self.limits = self.max_tokens.copy()
        self.lengths = np.zeros(num_rows, int)  # sampled tokens
        self.ended = np.zeros(num_rows, bool)
        self.at_stop_text = np.zeros(num_rows, bool)
        self.num_searched = np.zeros(num_rows, int)  # tokens searched for a stop text

        # for each token, its id, its log-probability and, if requested, its entropy
        shape = (num_rows, self.limits.max())
        self.ids = np.full(shape, params.pad_id, np.int32)
        self.columns = [self.ids, *np.zeros((1 + params.entropy, *shape), np.float32)]

        self.prefill_s = 0.0
        self.cache_bytes = 0

        # For rows with turns: all ids after the prompt, the positions of sampled tokens among them,
        # and why the row ended: "length" at --max-tokens, "context" at the limit of the context, or
        # the reason that its conversation gives.
        self.sequences: list[list[int]] = [[] for _ in range(num_rows)]
        self.places: list[list[int]] = [[] for _ in range(num_rows)]
        self.reasons = [""] * num_rows

    def is_at_end_token_or_stop(self, rows: np.ndarray) -> np.ndarray:
        """Whether each row's newest token is an end token or completes a stop text."""
        newest_ids = self.ids[rows, self.lengths[rows] - 1]
        is_end_token = (newest_ids[:, None] == self.eos_ids).any(-1)
        return is_end_token | self.at_stop_text[rows]

    def is_over(self, row: int) -> bool:
        """Whether the row gets no more tokens."""
        if self.episodes:
            return bool(self.reasons[row])
        return bool(self.ended[row])

    def drop_all_tokens(self, rows: Sequence[int]) -> None:
        """Drops all tokens of these rows, so that they can begin again after memory ran out."""
        self.lengths[rows] = 0
        self.num_searched[rows] = 0

    def append_unless_ended(self, rows: np.ndarray, sampled: Sequence[mx.array]) -> None:
        """Appends a sampled token to each of these rows, unless the row has ended."""
        values = [np.array(column) for column in sampled]  # wait
        is_going = ~self.ended[rows]
        rows = rows[is_going]
        for column, row_values in zip(self.columns, values, strict=True):
            column[rows, self.lengths[rows]] = row_values[is_going]
        self.lengths[rows] += 1
        is_full = self.lengths[rows] == self.limits[rows]
        self.ended[rows] = self.is_at_end_token_or_stop(rows) | is_full

    def cut_at_stop(self, rows: np.ndarray) -> None:
        """Ends rows at the token that completes a stop text, and drops the tokens after it."""
        if self.params.stop is None:
            return
        for row in rows[self.lengths[rows] > self.num_searched[rows]]:
            ids = self.ids[row, : self.lengths[row]].tolist()
            length = self.params.stop.num_ids_through_stop(ids, self.num_searched[row])
            if length:
                self.lengths[row] = length
                self.at_stop_text[row] = True
                self.ended[row] = True
            self.num_searched[row] = self.lengths[row]

    def show_progress(self) -> None:
        if self.progress is None:
            return
        num_over = int(self.ended.sum())
        if self.episodes:
            num_over = sum(map(bool, self.reasons))
        self.progress.set_count_and_show_speed(num_over, self.lengths.sum(), "tok")

    def uniforms_for_all_tokens(self, rows: Sequence[int]) -> np.ndarray:
        """The random numbers for all tokens of these rows, (len(rows), tokens, 4)."""
        row_numbers = [self.row_numbers[row] for row in rows]
        num_positions = self.max_tokens[list(rows)].max()
        return four_uniforms_per_position(self.key, row_numbers, num_positions)


class Decoder:
    """
    Continues the rows of a cache. Each step samples a token for every row and appends it.

    `sample` and `append_and_update_logits` queue work on the device and do not wait for it. So a
    caller can queue the next step before it reads the tokens of this step.
    """

    logits: mx.array  # the logits of each row's next token, (N, V)

    def __init__(self, model: gwen.Model, cache: Cache, params: SamplingParams):
        self.model = model
        self.cache = cache
        self.params = params
        self.forward = gwen.make_decode_to_hidden_step(model)

    def sample(self, uniforms: np.ndarray) -> tuple[mx.array, ...]:
        """
        Samples each row's next token with its random numbers, (N, 4).

        Returns the tokens, their log-probabilities and, if requested, the entropies, (N,) each.
        """
        values = choose_token(self.logits, mx.array(uniforms), self.params)
        return values if self.params.entropy else values[:2]

    def append_and_update_logits(self, sampled: tuple[mx.array, ...]) -> None:
        """Appends the tokens in `sampled`, and updates `logits` to those after these tokens."""
        tokens = sampled[0]
        hidden = self.forward(tokens[:, None], self.cache)[:, -1]
        self.logits = hidden @ self.model.head_weight.T
        mx.async_eval(sampled, self.logits)


class SlotDecoder(Decoder):
    """
    Continues rows in the slots of a cache. When rows have ended, waiting rows can take their slots.

    Each step samples a token for every slot. A token of an ended row is dropped when it is read.
    """

    cache: SlotCache

    def __init__(
        self,
        model: gwen.Model,
        cache: SlotCache,
        prompt_logits: mx.array,
        prompt_of: dict[int, int],
        state: DecodeState,
    ):
        """
        Begins as many rows as the cache has slots. If an earlier attempt ran out of memory, its
        rows begin again, without their earlier tokens.

        prompt_logits: the logits after each prompt, (prompts, V).
        prompt_of: the index of each row's prompt, by row, in the order in which the rows begin.
        """
        super().__init__(model, cache, state.params)
        self.prompt_logits = prompt_logits
        self.prompt_of = prompt_of
        self.state = state
        self.waiting_rows = list(prompt_of)  # rows that have not begun
        state.drop_all_tokens(self.waiting_rows)
        self.uniforms = state.uniforms_for_all_tokens(self.waiting_rows)
        self.uniforms_index = np.zeros(len(state.limits), int)  # by row
        self.uniforms_index[self.waiting_rows] = np.arange(len(prompt_of))
        # tokens sampled for each row, including those that have not been read
        self.num_sampled = np.zeros(len(state.limits), int)
        # the rows and the sampled values of each step that has not been read
        self.unread_steps: list[tuple[np.ndarray, tuple[mx.array, ...]]] = []

        num_slots = cache.num_slots
        self.rows = np.zeros(num_slots, int)  # the row of each slot
        self.logits = mx.zeros((num_slots, prompt_logits.shape[1]), prompt_logits.dtype)
        self._assign_waiting_rows_to_slots(list(range(num_slots)))

    def sample_into_unread_steps(self) -> tuple[mx.array, ...]:
        """Samples each slot's next token as `sample` does, and adds it to `unread_steps`."""
        last_position = self.uniforms.shape[1] - 1
        positions = np.minimum(self.num_sampled[self.rows], last_position)
        sampled = self.sample(self.uniforms[self.uniforms_index[self.rows], positions])
        self.unread_steps.append((self.rows.copy(), sampled))
        self.num_sampled[self.rows] += 1
        return sampled

    def append_and_update_logits(self, sampled: tuple[mx.array, ...]) -> None:
        self.cache.plan_writes()
        super().append_and_update_logits(sampled)

    def queue_step(self) -> None:
        """Samples a token for each slot and appends it to the row in this slot."""
        self.append_and_update_logits(self.sample_into_unread_steps())

    def read_all_but_newest(self, num_newest: int) -> None:
        """Writes the tokens of all unread steps but the newest `num_newest` to the state."""
        while len(self.unread_steps) > num_newest:
            self.state.append_unless_ended(*self.unread_steps.pop(0))  # wait

    def append_ids_and_update_logits(self, ids_by_slot: dict[int, list[int]]) -> None:
        """
        Appends ids to some slots, and updates their `logits` to those after the last ids.

        ids_by_slot: the ids to append, by slot; each slot may get a different number of ids.
        """
        slots = list(ids_by_slot)
        lengths = [len(ids) for ids in ids_by_slot.values()]
        width = max(lengths)
        self.cache.plan_writes(dict(zip(slots, lengths, strict=True)))
        tokens = mx.array([ids + [0] * (width - len(ids)) for ids in ids_by_slot.values()])
        last_places = mx.arange(len(slots)), mx.array(lengths) - 1
        last_hidden = self.model.hidden(tokens, self.cache)[last_places]
        self.logits[mx.array(slots)] = last_hidden @ self.model.head_weight.T
        mx.eval(self.logits, self.cache.arrays())  # wait: the next ids may use this memory

    def is_refill_or_drop_worthwhile(self, num_idle: int) -> bool:
        """Whether this many idle slots are worth the cost of `refill_or_drop_slots`."""
        least = REFILL if self.waiting_rows else SHRINK
        return num_idle >= least * len(self.rows)

    def refill_or_drop_slots(self, idle_slots: list[int]) -> None:
        """
        Gives idle slots to waiting rows, or drops the idle slots if no row waits.

        If no row waits and all slots are idle, nothing changes.
        """
        if self.waiting_rows:
            self._assign_waiting_rows_to_slots(idle_slots[: len(self.waiting_rows)])
            return
        busy = [slot for slot in range(len(self.rows)) if slot not in idle_slots]
        if busy:
            self.cache.keep_only_slots(busy)
            self.rows = self.rows[busy]
            self.logits = self.logits[mx.array(busy)]

    def _assign_waiting_rows_to_slots(self, slots: list[int]) -> None:
        """Begins the next waiting rows in these slots, each after its prompt."""
        self.rows[slots] = self.waiting_rows[: len(slots)]
        self.waiting_rows = self.waiting_rows[len(slots) :]
        prompts = [self.prompt_of[row] for row in self.rows.tolist()]
        self.cache.assign_prompts(prompts, slots)
        new_prompts = [prompts[slot] for slot in slots]
        self.logits[mx.array(slots)] = self.prompt_logits[mx.array(new_prompts)]


@gpu.without_gradients()
def decode(decoder: SlotDecoder) -> None:
    """
    Samples all rows of a decoder up to their ends. The rows have no turns.

    The loop waits only every `LOOK_EVERY` steps. Then it reads all sampled tokens except the
    newest, so that the device always has a step to compute.
    """
    state = decoder.state
    cache = decoder.cache
    all_rows = np.array(list(decoder.prompt_of))
    last_column = decoder.uniforms.shape[1] - 1

    for step in itertools.count():
        # Tokens of an ended row are sampled until its end is read, but take up no more columns.
        np.minimum(cache.lengths, last_column, out=cache.lengths)
        sampled = decoder.sample_into_unread_steps()
        is_full = decoder.num_sampled[decoder.rows] >= state.limits[decoder.rows]
        if is_full.all() and not decoder.waiting_rows:
            break

        decoder.append_and_update_logits(sampled)
        if step % LOOK_EVERY < LOOK_EVERY - 1:
            continue

        decoder.read_all_but_newest(num_newest=1)
        state.cut_at_stop(all_rows)
        state.show_progress()

        ended = state.ended[decoder.rows]
        if ended.all() and not decoder.waiting_rows:
            break
        if decoder.is_refill_or_drop_worthwhile(ended.sum()):
            decoder.refill_or_drop_slots(np.flatnonzero(ended).tolist())

    decoder.read_all_but_newest(num_newest=0)
    state.cut_at_stop(all_rows)
    state.show_progress()
    mx.synchronize()  # wait: a queued step keeps the cache in memory


def continue_greedily(
    model: gwen.Model, past: KVCache, logits: mx.array, max_tokens: int, end_ids: Sequence[int]
) -> list[list[int]]:
    """
    Returns the likeliest ids after each row of a cache, up to the first end id or to `max_tokens`.

    logits: the logits of each row's first token, (N, V).
    """
    num_rows = len(logits)
    params = SamplingParams(max_tokens, 0.0, eos_ids=end_ids)
    state = DecodeState(num_rows, params, key=0)
    cache = SlotCache(past, num_rows, max_tokens, attention.can_read_prompts_in_place(logits.dtype))
    prompt_of = {row: row for row in range(num_rows)}
    decode(SlotDecoder(model, cache, logits, prompt_of, state))
    rows = zip(state.ids.tolist(), state.lengths, strict=True)
    return [ids[:length] for ids, length in rows]


# ---- batches of rows that fit into memory


# each distinct prompt -> the rows that continue it
RowsByPrompt = dict[tuple[int, ...], list[int]]


def prefill_and_sample_batch(
    model: gwen.Model,
    rows_by_prompt: RowsByPrompt,
    state: DecodeState,
    batch_size: int,
    share_prefix: bool | None,
) -> None:
    """Prefills prompts and samples their rows. The caches are freed when this call ends."""
    begin = time.perf_counter()
    prompts = [list(prompt) for prompt in rows_by_prompt]
    prompt_cache, prompt_logits = prefill(model, prompts, state.params.pad_id)
    state.prefill_s += time.perf_counter() - begin

    prompt_of = {row: index for index, rows in enumerate(rows_by_prompt.values()) for row in rows}
    num_rows = len(prompt_of)
    if share_prefix is None:
        lengths = [len(prompt) for prompt in prompts]
        share_prefix = attention.should_share_prefix(
            num_rows, lengths, batch_size, prompt_logits.dtype
        )
    width = 0 if state.episodes else int(state.limits[list(prompt_of)].max())
    cache = SlotCache(prompt_cache, min(batch_size, num_rows), width, share_prefix)
    decoder = SlotDecoder(model, cache, prompt_logits, prompt_of, state)
    if state.episodes:
        # imported here, since rows without turns do not need it
        from layers.turns import TurnScheduler

        prompt_lengths = {row: len(prompts[index]) for row, index in prompt_of.items()}
        TurnScheduler(decoder, prompt_lengths).decode()
    else:
        decode(decoder)
    state.cache_bytes = max(state.cache_bytes, cache.most_bytes)


def select_unfinished(rows_by_prompt: RowsByPrompt, state: DecodeState) -> RowsByPrompt:
    """The rows that still get tokens, by their prompts. Prompts without such rows are left out."""
    unfinished = {}
    for prompt, rows in rows_by_prompt.items():
        unfinished_rows = [row for row in rows if not state.is_over(row)]
        if unfinished_rows:
            unfinished[prompt] = unfinished_rows
    return unfinished


def sample_with_retries(
    model: gwen.Model,
    rows_by_prompt: RowsByPrompt,
    state: DecodeState,
    size: memory.BatchSize,
    share_prefix: bool | None,
) -> None:
    """
    Samples the rows of all prompts in batches. If memory runs out, retries with smaller batches.

    Raises ValueError if memory is too small for one row.
    """
    num_rows = sum(len(rows) for rows in rows_by_prompt.values())
    rows_per_prompt = -(-num_rows // len(rows_by_prompt))  # on average, rounded up
    while unfinished := select_unfinished(rows_by_prompt, state):
        # enough prompts for two rows per slot: slots stay busy, and memory stays bounded
        rows_at_once = (2 if size.rows > 1 else 1) * size.rows
        most_prompts = max(rows_at_once // rows_per_prompt, 1)
        num_batches = -(-len(unfinished) // most_prompts)
        num_prompts = len(unfinished) // num_batches  # batches of about the same size
        batch = dict(itertools.islice(unfinished.items(), num_prompts))
        rows = list(itertools.chain(*batch.values()))

        if memory.try_within_memory(
            prefill_and_sample_batch, model, batch, state, size.rows, share_prefix
        ):
            assert all(map(state.is_over, rows)), f"some of {len(rows)} rows did not end"
        if all(map(state.is_over, rows)):
            continue
        if min(size.rows, len(rows)) == 1:
            length = max(map(len, batch)) + state.limits.max()
            raise ValueError(
                f"there is not enough memory for one row of {length} tokens; "
                "free some memory, or start again with a lower --max-tokens"
            )
        size.halve(len(rows))
        line = f"sampling: out of memory; continuing with {size.rows} rows at once"
        tqdm.write(line, file=sys.stderr)


def make_rollout(state: DecodeState, dtype: mx.Dtype, stats: RolloutStats) -> Rollout:
    """
    The rollout of rows that have all ended.

    Raises `NonFiniteLogprob` if the log-probability of a token is not finite.
    """
    width = int(state.lengths.max())
    mask = np.arange(width) < state.lengths[:, None]
    is_wrong = mask & ~np.isfinite(state.columns[1][:, :width])
    if is_wrong.any():
        row, position = np.argwhere(is_wrong).tolist()[0]
        raise NonFiniteLogprob(row, position, dtype)

    arrays = []
    for column, fill in zip(state.columns, (state.params.pad_id, 0, 0), strict=False):
        arrays.append(mx.array(np.where(mask, column[:, :width], fill)))
    has_ended = state.is_at_end_token_or_stop(np.arange(len(mask)))
    finish_reasons = ["stop" if ended else "length" for ended in has_ended]
    result = Rollout(
        completion_ids=arrays[0],
        logprobs=arrays[1],
        mask=mx.array(mask.astype(np.float32)),
        finish_reasons=finish_reasons,
        stats=stats,
        entropy=arrays[2] if len(arrays) > 2 else None,
        stop=state.params.stop,
    )
    if state.episodes is None:
        return result
    return result._replace(
        finish_reasons=state.reasons, sequences=state.sequences, places=state.places
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
    episodes: "RowEpisodes | None" = None,
) -> Rollout:
    """
    Samples `group_size` completions of each prompt.

    Row b * group_size + g is completion g of prompt b. Log-probabilities are those of the sampling
    distribution, whose support `params` restricts.

    prompts: the token ids of each prompt.
    key: the seed of the rollout. Each random number is determined by (key, row, position).
    rows: the row numbers, if these rows are part of a larger rollout. None stands for the numbers
    from 0 on.
    batch_size: the maximum number of rows to decode at once. It is halved when memory runs out.
    share_prefix: whether a group shares one cache of its prompt, instead of a copy for each row;
    None lets `attention.should_share_prefix` decide.
    batch_size and share_prefix affect only speed and memory.
    episodes: tools or environments that reply between turns. An end token then ends a turn,
    `max_tokens` counts all turns, and the `context` of the episodes limits the tokens of a row.

    Raises ValueError for an empty prompt, for logits that are not finite, and if memory is too
    small for one row.
    """
    if not prompts or not all(prompts):
        raise ValueError("rollout needs at least one prompt, and at least one token per prompt")
    assert episodes is None or not params.stop, "rows with turns cannot have stop texts"
    size = batch_size if isinstance(batch_size, memory.BatchSize) else memory.BatchSize(batch_size)

    num_rows = len(prompts) * group_size
    rows_by_prompt = RowsByPrompt()
    for index, prompt in enumerate(prompts):
        group_rows = range(index * group_size, (index + 1) * group_size)
        rows_by_prompt.setdefault(tuple(prompt), []).extend(group_rows)
    # ascending lengths, so that batches have little padding
    by_length = dict(sorted(rows_by_prompt.items(), key=lambda item: len(item[0])))

    begin = time.perf_counter()
    activity = "sampling" if params.temperature else "answering greedily"
    with alive.Bar(total=num_rows, desc=activity, unit="row") as progress:
        state = DecodeState(num_rows, params, key, rows)
        # the rows of a batch are decoded at the same time, so the first to end tell little
        progress.fewest_for_estimate = max(num_rows // 4, 1)
        state.progress = progress
        state.episodes = episodes
        sample_with_retries(model, by_length, state, size, share_prefix)

    stats = RolloutStats(
        prefill_s=state.prefill_s,
        decode_s=time.perf_counter() - begin - state.prefill_s,
        cache_bytes=state.cache_bytes,
        wait_s=episodes.wait_s if episodes else 0.0,
    )
    return make_rollout(state, model.head_weight.dtype, stats)


def decode_texts(tokenizer: Any, result: Rollout, eos_ids: Sequence[int]) -> list[str]:
    """
    The text of each row, without control tokens, and with a newline between turns.

    As in vLLM, a text ends before its stop text.
    """
    ends = set(eos_ids)
    texts = []
    for row in result.ids:
        runs = itertools.groupby(row, ends.__contains__)
        turns = [list(turn) for is_end, turn in runs if not is_end]
        turn_texts = [tokenizer.decode(turn, skip_special_tokens=True) for turn in turns]
        texts.append("\n".join(turn_texts))
    if result.stop:
        texts = [result.stop.trim(text) for text in texts]
    return texts


if __name__ == "__main__":
    command = shlex.join(["uv", "run", "chat.py", *sys.argv[1:]])
    print(f"sampler.py is a library; the command is now: {command}", file=sys.stderr)
    sys.exit(2)
