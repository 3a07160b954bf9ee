"""
Rubric judging: a judge scores each completion from 1 to 5 on each criterion; the weighted scores are the reward.
`uv run judge.py --rubric R --labels FILE` compares a judge with labelled answers.

    logits   the expected score under the probabilities of the tokens "1" to "5" at the first answer position: needs no
             decoding and is finer than a digit
    decode   the last digit of a greedy reply, after thinking if allowed

The prompts of a call form a tree of preamble, questions, answers and criteria, whose shared parts are computed once. A
score is nan, never neutral, if the judge puts less than half of its mass on the scores or writes none. A judge on a
server is `judging/remote_judge.py`.

Axes: N completions or prompts, J criteria, M rows of a batch, L positions of a level, C hidden, V vocabulary.
"""

import math
import os
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import cpu_blas  # noqa: F401  (before mlx)
import mlx.core as mx
import numpy as np
from tqdm.auto import tqdm

import gwen
import lora
import sampler
from config import JUDGE, SETTINGS, JudgeSettings
from flags import Parser, add_flags, fail, visible
from judging import labels, rubrics
from judging.remote_judge import RemoteJudge
from judging.rubrics import Evaluation, Grader, Question, Tell
from kv_cache import TreeCache
from layers import softmax
from machine import alive, gpu
from settings.checks import checked
from settings.sources import given, of_environment

MOST_PADDING = 0.1  # of a level's batch; a row that would add more waits for a later batch

Prompt = tuple[tuple[int, ...], ...]  # runs of ids
Read = Callable[
    [list[int], mx.array, TreeCache], None
]  # places of M prompts, hidden states (M, C) at their ends, cache


class Judge(Grader):
    """
    Scores completions by a rubric, using a local model with its adapters switched off.

    The model's other weights must not change. rubric: a path to YAML, or its content. chunk_size: evaluations at once,
    halved when memory runs out and slowly grown back. mode: "logits" or "decode". think: most tokens of thought before
    a decoded reply.
    Raises ValueError if the tokenizer lacks what the mode needs.
    """

    def __init__(
        self,
        model: gwen.Model,
        tokenizer: Any,
        rubric: str | Path | dict[str, Any] | rubrics.Rubric,
        chunk_size: int = 24,
        mode: str = "logits",
        *,
        think: int = 0,
    ):
        super().__init__(rubric)
        assert mode == "decode" or (mode == "logits" and not think), f"mode {mode!r}, think {think}"
        self.model, self.tokenizer, self.mode, self.think = model, tokenizer, mode, think
        self.prompts = rubrics.PromptBuilder(tokenizer, self.rubric, thinking=think > 0)
        self.score_ids = rubrics.score_token_ids(tokenizer) if mode == "logits" else []
        self.end_of_thought = tokenizer.convert_tokens_to_ids("</think>") if think else None
        if think and self.end_of_thought in (None, tokenizer.unk_token_id):
            raise ValueError(f"--judge-think {think}: the judge's tokenizer has no </think>, so it cannot think")
        reply_room = rubrics.REPLY_TOKENS + think if mode == "decode" else 0
        self.room = model.config.max_position_embeddings - reply_room  # for a prompt, in tokens
        self._check_room({"": []})
        self.tree = PromptTree(model, self.prompts.head, chunk_size, "judge")
        self._identity = ""

    def state(self) -> dict[str, int]:
        return {"chunk_size": self.tree.chunk.rows, "good_chunks": self.tree.chunk.num_good}

    def restore(self, state: dict[str, int]) -> None:
        if state:
            chunk = self.tree.chunk
            chunk.rows, chunk.num_good = min(chunk.rows, state["chunk_size"]), state["good_chunks"]

    def identity(self) -> str:
        """A digest of prompts and settings, and of the logits after the preamble, which tell models apart."""
        if not self._identity:
            with lora.disabled(self.model):
                logits = self.tree.root()[1] @ self.model.head_weight.T
            asked = (self.prompts.head, self.prompts.middle, self.prompts.tails, self.mode, self.think)
            said = np.array(logits.astype(mx.float32)).tobytes()
            self._identity = rubrics.digest(asked, str(logits.dtype), said)
        return self._identity

    def ask(self, questions: list[Question], tell: Tell) -> None:
        texts = {prompt: self.prompts.question(prompt) for prompt in dict.fromkeys(q.prompt for q in questions)}
        answers = {text: self.prompts.answer(text) for text in dict.fromkeys(q.completion for q in questions)}
        self._check_room(texts)
        prompts: dict[int, Prompt] = {}  # by index of their question
        for place, (prompt, completion, column) in enumerate(questions):
            own = self.prompts.tails[column][self.prompts.num_common :]
            prompts[place] = (tuple(texts[prompt]), tuple(answers[completion]), tuple(own))
            if len(self.prompts.head) + sum(map(len, prompts[place])) > self.room:
                del prompts[place]
                context = self.model.config.max_position_embeddings
                said = f"(nothing, as the answer does not fit into its context of {context} tokens)"
                tell(place, Evaluation(math.nan, 0.0, said))
        place_of = list(prompts)
        with lora.disabled(self.model), alive.Bar(total=len(prompts), desc="judging", unit="evaluation") as progress:

            def read(ends: list[int], hidden: mx.array, cache: TreeCache) -> None:
                logits = hidden @ self.model.head_weight.T
                found = self._read_logits(logits) if self.mode == "logits" else self._read_replies(logits, cache)
                for end, evaluation in zip(ends, found, strict=True):
                    tell(place_of[end], evaluation)
                progress.update(len(ends))

            self.tree.walk(list(prompts.values()), read)
        self.num_tokens, self.tree.num_tokens = self.tree.num_tokens, 0

    def _check_room(self, questions: dict[str, list[int]]) -> None:
        """Raises ValueError if a prompt is too long even without an answer."""
        head, tails = len(self.prompts.head), [len(tail) for tail in self.prompts.tails]
        prompt = max(questions, key=lambda prompt: len(questions[prompt]))
        if (length := head + len(questions[prompt]) + max(tails)) > self.room:
            parts = {
                "the rubric's preamble": head,
                f"the question {prompt[:60]!r}": len(questions[prompt]),
                f"the criterion {self.rubric.criteria[int(np.argmax(tails))].name!r}": max(tails),
                "--judge-think": self.think,
            }
            longest = max(parts, key=lambda part: parts[part])
            raise ValueError(
                f"a judge's prompt has {length} tokens before any answer, and its context has room for {self.room}; "
                f"the longest part is {longest} with {parts[longest]}, shorten it"
            )

    def _read_logits(self, logits: mx.array) -> list[Evaluation]:
        """Expected scores at the first answer position, from logits (M, V)."""
        logprobs = softmax.log_softmax(logits)
        values, mass = from_logprobs(logprobs, self.score_ids)
        likeliest = [self.tokenizer.decode([token]) for token in np.array(logprobs.argmax(-1)).tolist()]
        return list(map(Evaluation, values, mass, likeliest))

    def _read_replies(self, logits: mx.array, cache: TreeCache) -> list[Evaluation]:
        """The last digits of greedy replies, from logits (M, V) of their first tokens."""
        eos = list(self.model.config.eos_ids)
        replies: dict[int, list[int]] = {}
        rows = list(range(len(logits)))
        if self.think:
            assert self.end_of_thought is not None
            ends = [*eos, self.end_of_thought]
            thoughts = sampler.continue_greedily(self.model, cache, logits, self.think, ends)
            # A row that reached eos while thinking is finished; the others get their thoughts closed.
            replies = {row: ids[:-1] for row, ids in enumerate(thoughts) if ids[-1] in eos}
            rows = [row for row in rows if row not in replies]
            close = self.prompts.trusted("\n</think>\n\n")
            tails = [[i for i in thoughts[row] if i != self.end_of_thought] + close for row in rows]
            if rows:
                cache = cache.child([len(tail) for tail in tails], rows)
                hidden = at_ends(self.tree.forward(cache, tails), [len(tail) for tail in tails])
                logits = hidden @ self.model.head_weight.T
        if rows:
            said = sampler.continue_greedily(self.model, cache, logits, rubrics.REPLY_TOKENS, eos)
            for row, ids in zip(rows, said, strict=True):
                replies[row] = ids[:-1] if ids[-1] in eos else ids
        return [rubrics.from_reply(self.tokenizer.decode(replies[row])) for row in range(len(replies))]


def from_logprobs(logprobs: mx.array, ids: list[list[int]]) -> tuple[list[float], list[float]]:
    """
    Expected scores over the tokens `ids`, and the mass of these, from log-probabilities (M, V).

    The score is nan in rows with less mass than MIN_MASS.
    """
    by_score = mx.stack([mx.exp(logprobs[:, mx.array(one)]).sum(-1) for one in ids], axis=-1)  # (M, 5)
    mass = by_score.sum(-1)
    expected = (by_score * mx.arange(1, 6)).sum(-1) / mx.maximum(mass, 1e-30)
    shares = np.array(mass)
    return np.where(shares.astype(float) >= rubrics.MIN_MASS, np.array(expected), math.nan).tolist(), shares.tolist()


# ---- prompts that share their beginnings


class Node(NamedTuple):
    """A run of tokens and the runs that follow it; the last run of a prompt has the prompt's index as `place`."""

    ids: tuple[int, ...]
    below: list["Node"]
    place: int = -1


def tree_of(prompts: dict[int, Prompt]) -> list[Node]:
    """The tree's top nodes, from prompts by index. Equal runs become one node, unless they end a prompt."""
    shared: dict[tuple[int, ...], dict[int, Prompt]] = {}
    for place, runs in prompts.items():
        if len(runs) > 1:
            shared.setdefault(runs[0], {})[place] = runs[1:]
    last = [Node(runs[0], [], place) for place, runs in prompts.items() if len(runs) == 1]
    return last + [Node(ids, tree_of(rest)) for ids, rest in shared.items()]


class PromptTree:
    """
    Prompts that all begin with `head`, which is computed once, so the model's weights must not change.

    chunk_size: most prompts whose ends are computed together. name: prefix of messages about memory.
    """

    def __init__(self, model: gwen.Model, head: Sequence[int], chunk_size: int, name: str):
        self.model, self.head, self.name = model, tuple(head), name
        self.chunk = gpu.BatchSize(chunk_size)
        self.in_flight = chunk_size  # prompts of the batch being computed
        self.num_tokens = 0  # positions processed by the model, with padding
        self._root: tuple[TreeCache, mx.array] | None = None

    def root(self) -> tuple[TreeCache, mx.array]:
        """The head's cache and the hidden state at its end, (C,). Raises ValueError if memory is too small."""
        if self._root is None:
            if not (made := gpu.attempt(self._compute_root)):
                raise self._too_little()
            (self._root,) = made
        return self._root

    def _compute_root(self) -> tuple[TreeCache, mx.array]:
        cache = TreeCache(self.model.config.layer_kinds).child([len(self.head)])
        end = self.forward(cache, [self.head])[0, -1]
        mx.eval(end, cache.arrays())
        return cache, end

    def walk(self, prompts: Sequence[Prompt], read: Read) -> None:
        """
        Runs N prompts through the model and calls `read` once for each.

        prompts: without the head, all with the same number of runs. If memory runs out, the chunks of the remaining
        prompts are smaller. Raises ValueError if memory is too small for one prompt.
        """
        left = dict(enumerate(prompts))

        def finish(places: list[int], hidden: mx.array, cache: TreeCache) -> None:
            read(places, hidden, cache)
            for place in places:
                del left[place]

        while left:
            ends_of_a_row = max(Counter(prompt[:-1] for prompt in left.values()).values())
            nodes = [(0, node) for node in tree_of(left)]
            if gpu.attempt(self._level, self.root()[0], nodes, ends_of_a_row, finish):
                assert not left, f"{len(left)} prompts were not read"
                break
            if self.chunk.rows == 1:
                raise self._too_little()
            self.chunk.halve(self.in_flight)
            tqdm.write(f"{self.name}: out of memory, going on with chunks of {self.chunk.rows}", file=sys.stderr)

    def _too_little(self) -> ValueError:
        return ValueError(f"{self.name}: memory does not suffice for one prompt; free some, or take a smaller model")

    def _level(self, cache: TreeCache, nodes: list[tuple[int, Node]], ends_of_a_row: int, read: Read) -> None:
        """
        Computes the nodes of a level and everything below them; each comes with its parent's row in `cache`.

        A batch has rows of similar lengths, with at most one chunk of ends below them.
        """
        waiting = sorted(nodes, key=lambda item: len(item[1].ids))
        is_last = not waiting[0][1].below
        ends = 1 if is_last else ends_of_a_row
        while waiting:
            size = batch_size([len(node.ids) for _, node in waiting], max(1, self.chunk.rows // ends))
            batch, waiting = waiting[:size], waiting[size:]
            self.in_flight = size * ends
            child = cache.child([len(node.ids) for _, node in batch], [parent for parent, _ in batch])
            hidden = self.forward(child, [node.ids for _, node in batch])
            if is_last:
                read([node.place for _, node in batch], at_ends(hidden, [len(node.ids) for _, node in batch]), child)
                self.chunk.fitted()
            else:
                # `hidden` is never evaluated, so the last layer computes only keys and values
                mx.eval(child.arrays())
                below = [(row, node) for row, (_, parent) in enumerate(batch) for node in parent.below]
                self._level(child, below, ends_of_a_row, read)

    def forward(self, cache: TreeCache, rows: Sequence[Sequence[int]]) -> mx.array:
        """Hidden states of a level's rows, padded on the right, (M, L, C)."""
        length = max(1, *map(len, rows))
        self.num_tokens += len(rows) * length
        return self.model.hidden(mx.array([[*row] + [0] * (length - len(row)) for row in rows]), cache)


def at_ends(hidden: mx.array, lengths: list[int]) -> mx.array:
    """The value at each row's last token, (M, L, C) -> (M, C)."""
    return mx.take_along_axis(hidden, mx.array(lengths)[:, None, None] - 1, 1)[:, 0]


def batch_size(lengths: list[int], most: int) -> int:
    """How many of the shortest rows to batch, at most `most`, with little padding; lengths ascend."""
    total = 0
    for size, length in enumerate(lengths[:most], 1):
        total += length
        if size * length > total * (1 + MOST_PADDING) and size > 1:
            return size - 1
    return min(most, len(lengths))


# ---- a run's judge, and the command that compares a judge's scores with human labels


def make(
    settings: JudgeSettings,
    rubric: str | Path | dict[str, Any] | rubrics.Rubric,
    load: Callable[[], tuple[gwen.Model, Any]],
) -> Judge | RemoteJudge:
    """The judge of these settings; `load` returns its model and tokenizer and runs only for a local judge."""
    if settings.url:
        return RemoteJudge(settings, rubric, os.environ.get("JUDGE_API_KEY"))
    model, tokenizer = load()
    return Judge(
        model,
        tokenizer,
        rubric,
        settings.chunk_size,
        settings.mode,
        think=settings.think,
    )


def main(argv: list[str] | None = None) -> None:
    parser = Parser("judge.py", "Compare a judge with labelled answers.")
    parser.add_argument("--rubric", required=True, help="YAML with the criteria")
    parser.add_argument(
        "--labels", required=True, metavar="FILE", help="JSONL with prompt, completion, criterion and score"
    )
    add_flags(parser, [SETTINGS[key] for key in JUDGE])
    args = parser.parse_args(argv)
    try:
        settings = checked(of_environment() | given(args, JUDGE)).judge
        rubric = rubrics.load_rubric(args.rubric)
        known = labels.load(args.labels, rubric)
        name, why = settings.model, settings.url
        if not settings.url:
            name, why = gwen.choose_model(settings.model)
        print(f"judge: {name}, {why}; mode {settings.mode}", file=sys.stderr)
        print(visible(labels.compare(make(settings, rubric, lambda: gwen.load(name)), known)))
    except (ValueError, OSError) as error:
        fail(error)


if __name__ == "__main__":
    main()
