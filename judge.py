"""
Rubric judging: each completion is scored from 1 to 5 by each criterion, and the weighted scores are its reward.
`uv run judge.py --rubric R --labels FILE` compares a judge with labelled answers.

    logits   the expectation over the probabilities of the tokens "1" to "5" at the first answer position: no decoding,
             and a finer signal than a digit
    decode   the last digit of a greedy reply, after thinking if that is allowed

All prompts of a call form a tree: the preamble, under it the questions, under these their answers, under these the
criteria. Every run of tokens in it goes through the model once, level by level, and the preamble once for as long as
the judge's weights are the same. Where the judge puts less than half of its mass on the scores, or writes none, the
score is nan, never neutral. `RemoteJudge` asks a server instead.

Axes: N completions, J criteria.
"""

import math
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import cpu_blas  # noqa: F401  (before mlx)
import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten
from tqdm import tqdm

import calibration
import endpoint
import gpu
import grader
import gwen
import lora
import memory
import rubrics
import sampler
import softmax
import telemetry
from grader import Evaluation, Grader, Judgement, Question, Stats, Tell
from kv_cache import SlotCache, TreeCache

__all__ = ["Grader", "Judge", "Judgement", "RemoteJudge", "Stats"]  # what others take from here

MODES = ("logits", "decode")
REPLY_TOKENS = 16  # of a decoded reply, thoughts not counted
GROW_AFTER = 32  # chunks that fit, before a chunk that was halved grows by a quarter
MOST_PADDING = 0.1  # of a level's batch; beyond that a row waits for a batch of its own length
PART = 2**24  # numbers of which a checksum is made at once: no second copy of a large embedding is held
TOP_LOGPROBS = 10  # asked of a server, the most that servers of this protocol agree on; five digits in two spellings


class _Node(NamedTuple):
    """A run of tokens in the tree of prompts; a leaf, which ends one prompt, has that question's place."""

    ids: list[int]
    children: list["_Node"]
    place: int | None = None


class Judge(Grader):
    """
    Scores completions by a rubric with a model whose adapters, if it has any, are switched off while it judges.

    rubric: a path to YAML, or what such a file holds. chunk_size: evaluations at once; halved when memory runs out,
    and slowly grown again. mode: "logits" or "decode". think: most tokens of thought before a decoded reply.
    min_mass: of the probability that must lie on the scores, else the score is nan.
    Raises ValueError when the tokenizer cannot do what the mode needs.
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
        min_mass: float = 0.5,
    ):
        super().__init__(rubric)
        check(Options(mode=mode, think=think, min_mass=min_mass, chunk_size=chunk_size))
        self.model, self.tokenizer, self.mode, self.think, self.min_mass = model, tokenizer, mode, think, min_mass
        self.chunk_size = self.most_chunk_size = chunk_size
        self.good_chunks = 0  # since the chunk last changed
        self.prompts = rubrics.PromptBuilder(tokenizer, self.rubric, thinking=think > 0)
        self.score_ids = rubrics.score_token_ids(tokenizer) if mode == "logits" else []
        self.end_of_thought = tokenizer.convert_tokens_to_ids("</think>") if think else None
        if think and self.end_of_thought in (None, tokenizer.unk_token_id):
            raise ValueError(f"--judge-think {think}: the judge's tokenizer has no </think>, so it cannot think")
        self._check_room({"": []})
        self._weights: list[mx.array] = []  # those that the next two were made with
        self._preamble: TreeCache | None = None
        self._identity = ""
        self._in_flight = 0

    def state(self) -> dict[str, int]:
        """What memory has forced upon this judge; small JSON values."""
        return {"chunk_size": self.chunk_size, "good_chunks": self.good_chunks}

    def restore(self, state: dict[str, int]) -> None:
        if state:  # a judge elsewhere, which this one has replaced, had none
            self.chunk_size, self.good_chunks = min(self.chunk_size, state["chunk_size"]), state["good_chunks"]

    def identity(self) -> str:
        self._refresh()
        return self._identity

    def _refresh(self) -> None:
        """Forgets what was made with other weights than the model has now; adapters are no part of them."""
        named = {
            name.replace(".linear.", "."): array
            for name, array in tree_flatten(self.model.parameters())
            if not name.endswith(("lora_a", "lora_b"))
        }
        weights = [named[name] for name in sorted(named)]
        if len(weights) == len(self._weights) and all(a is b for a, b in zip(weights, self._weights, strict=True)):
            return
        self._weights, self._preamble = weights, None
        sums = [checksum(array) for array in weights]
        kinds = [(name, str(named[name].dtype), named[name].shape) for name in sorted(named)]
        prompts = (self.prompts.head, self.prompts.middle, self.prompts.tails)
        self._identity = grader.digest(repr((sums, kinds, prompts, self.mode, self.think, self.min_mass)))

    # ---- the tree of prompts

    def ask(self, questions: list[Question], tell: Tell) -> None:
        texts = {prompt: self.prompts.question(prompt) for prompt in dict.fromkeys(q.prompt for q in questions)}
        answers = {pair: self.prompts.answer(pair[1]) for pair in dict.fromkeys(q[:2] for q in questions)}
        own = [tail[self.prompts.num_common :] for tail in self.prompts.tails]
        self._check_room(texts)
        context, head, self.num_tokens = self.model.config.max_position_embeddings, len(self.prompts.head), 0
        left = dict(enumerate(questions))
        for place, (prompt, completion, column) in enumerate(questions):
            length = head + len(texts[prompt]) + len(answers[prompt, completion]) + len(own[column])
            if length + self._reply_room() > context:
                said = f"(nothing, as the answer does not fit into its context of {context} tokens)"
                tell(place, Evaluation(math.nan, 0.0, said))
                del left[place]
        num_left = len(left)
        with lora.disabled(self.model), tqdm(total=num_left, desc="judge", leave=False, disable=None) as progress:

            def finish(leaves: list[_Node], hidden: mx.array, cache: TreeCache) -> None:
                read = self._read_logits if self.mode == "logits" else self._read_replies
                for leaf, evaluation in zip(leaves, read(hidden, cache), strict=True):
                    assert leaf.place is not None
                    del left[leaf.place]
                    tell(leaf.place, evaluation)
                progress.update(len(leaves))

            while left:
                below: dict[str, dict[str, _Node]] = {prompt: {} for prompt in texts}
                for place, (prompt, completion, column) in left.items():
                    answer = below[prompt].setdefault(completion, _Node(answers[prompt, completion], []))
                    answer.children.append(_Node(own[column], [], place))
                try:
                    nodes = [(0, _Node(texts[p], list(b.values()))) for p, b in below.items() if b]
                    self._walk(self._root(), nodes, finish)
                except RuntimeError as error:
                    if not memory.is_out_of_memory(error):
                        raise
                else:
                    break
                self._shrink()  # here, where the exception no longer holds the arrays of the frames that it left

    def _reply_room(self) -> int:
        return REPLY_TOKENS + self.think if self.mode == "decode" else 0

    def _check_room(self, questions: dict[str, list[int]]) -> None:
        """ValueError where a prompt would be too long without any answer; an answer that is too long is unreadable."""
        room = self.model.config.max_position_embeddings - self._reply_room()
        head, tails = len(self.prompts.head), [len(tail) for tail in self.prompts.tails]
        prompt = max(questions, key=lambda prompt: len(questions[prompt]))
        if (length := head + len(questions[prompt]) + max(tails)) > room:
            parts = {
                "the rubric's preamble": head,
                f"the question {prompt[:60]!r}": len(questions[prompt]),
                f"the criterion {self.rubric.criteria[int(np.argmax(tails))].name!r}": max(tails),
                "--judge-think": self.think,
            }
            longest = max(parts, key=lambda part: parts[part])
            raise ValueError(
                f"a judge's prompt has {length} tokens before any answer, and its context has room for {room}; "
                f"the longest part is {longest} with {parts[longest]}, shorten it"
            )

    def _root(self) -> TreeCache:
        """The preamble's cache, made once for as long as the weights are the same."""
        self._refresh()
        if self._preamble is None:
            cache = TreeCache(len(self.model.layers)).child([len(self.prompts.head)])
            self._forward(cache, [self.prompts.head])
            mx.eval(cache.arrays())
            self._preamble = cache
        return self._preamble

    def _walk(
        self,
        cache: TreeCache,
        nodes: list[tuple[int, _Node]],
        finish: Callable[[list[_Node], mx.array, TreeCache], None],
    ) -> None:
        """
        Takes nodes of one level, each with its parent's row in `cache`, and all that is below them through the model.

        As many rows at once as make no more than a chunk of evaluations, of similar lengths.
        """
        waiting = sorted(nodes, key=lambda item: len(item[1].ids))
        is_last = waiting[0][1].place is not None
        while waiting:
            each = 1 if is_last else len(self.rubric.criteria)  # evaluations of a row, at least
            size = batch_size([len(node.ids) for _, node in waiting], max(1, self.chunk_size // each))
            batch, waiting = waiting[:size], waiting[size:]
            self._in_flight = size * each
            child = cache.child([len(node.ids) for _, node in batch], [parent for parent, _ in batch])
            hidden = self._forward(child, [node.ids for _, node in batch])
            if is_last:
                ends = mx.array([len(node.ids) - 1 for _, node in batch])
                finish([node for _, node in batch], mx.take_along_axis(hidden, ends[:, None, None], 1)[:, 0], child)
                self._grow()
            else:
                # `hidden` is never evaluated, so in the last layer only keys and values are computed
                mx.eval(child.arrays())
                self._walk(child, [(row, c) for row, (_, node) in enumerate(batch) for c in node.children], finish)

    def _forward(self, cache: TreeCache, rows: list[list[int]]) -> mx.array:
        """Hidden states of a level's rows, padded on the right, (M, L, C)."""
        length = max(1, *map(len, rows))
        self.num_tokens += len(rows) * length
        return self.model.hidden(mx.array([row + [0] * (length - len(row)) for row in rows]), cache)

    def _shrink(self) -> None:
        """Halves the chunk after memory ran out. ValueError when there is nothing to halve."""
        if self.chunk_size == 1:
            raise ValueError(
                "the judge runs out of memory with one evaluation at once; free some, or name a smaller --judge-model"
            )
        self.chunk_size, self.good_chunks = max(1, min(self.chunk_size, self._in_flight) // 2), 0
        mx.clear_cache()
        tqdm.write(f"judge: out of memory, going on with chunks of {self.chunk_size}", file=sys.stderr)

    def _grow(self) -> None:
        """Counts a chunk that fitted; after enough of them a chunk that was halved may be larger again."""
        self.good_chunks += 1
        if self.chunk_size < self.most_chunk_size and self.good_chunks >= GROW_AFTER:
            self.chunk_size, self.good_chunks = min(self.most_chunk_size, -(-self.chunk_size * 5 // 4)), 0

    # ---- what is read at the end of a prompt; each gives score, mass and what stood there, by row

    def _read_logits(self, hidden: mx.array, _: TreeCache) -> list[Evaluation]:
        """Expectations over the score tokens at the first answer position."""
        logprobs = softmax.log_softmax(hidden @ self.model.head_weight.T)
        by_score = mx.stack([mx.exp(logprobs[:, mx.array(ids)]).sum(-1) for ids in self.score_ids], axis=-1)  # (M, 5)
        mass = by_score.sum(-1)
        expected = (by_score * mx.arange(1, 6)).sum(-1) / mx.maximum(mass, 1e-30)
        shares: list[float] = np.array(mass).tolist()
        scores: list[float] = np.where(np.array(shares) >= self.min_mass, np.array(expected), math.nan).tolist()
        likeliest = [self.tokenizer.decode([token]) for token in np.array(logprobs.argmax(-1)).tolist()]
        return list(map(Evaluation, scores, shares, likeliest))

    def _read_replies(self, hidden: mx.array, cache: TreeCache) -> list[Evaluation]:
        """The last digit of greedy replies."""
        logits = hidden @ self.model.head_weight.T
        eos = list(self.model.config.eos_ids)
        replies: dict[int, list[int]] = {}
        rows = list(range(len(logits)))
        if self.think:
            assert self.end_of_thought is not None
            thoughts = self._continue(cache, logits, self.think, [*eos, self.end_of_thought])
            # A row that ended without closing its thoughts has said all it will; the others' are closed for them.
            replies = {row: ids[:-1] for row, ids in enumerate(thoughts) if ids[-1] in eos}
            rows = [row for row in rows if row not in replies]
            close = self.prompts.trusted("\n</think>\n\n")
            tails = [[i for i in thoughts[row] if i != self.end_of_thought] + close for row in rows]
            if rows:
                cache = cache.child([len(tail) for tail in tails], rows)
                ends = mx.array([len(tail) - 1 for tail in tails])
                hidden = mx.take_along_axis(self._forward(cache, tails), ends[:, None, None], 1)[:, 0]
                logits = hidden @ self.model.head_weight.T
        if rows:
            for row, ids in zip(rows, self._continue(cache, logits, REPLY_TOKENS, eos), strict=True):
                replies[row] = ids[:-1] if ids[-1] in eos else ids
        texts = [self.tokenizer.decode(replies[row]) for row in range(len(replies))]
        scores = [rubrics.read_score(text) for text in texts]
        return [
            Evaluation(score, float(not math.isnan(score)), text) for score, text in zip(scores, texts, strict=True)
        ]

    def _continue(self, cache: TreeCache, logits: mx.array, limit: int, ends: list[int]) -> list[list[int]]:
        """The greedy continuation of each row of the newest level: `limit` ids, or up to and with one of `ends`."""
        num_rows = logits.shape[0]
        flat, lengths = cache.flat()
        # On a GPU a copy, for which MLX has a kernel; else read where it lies.
        slots = SlotCache(flat, lengths, limit, share=not gpu.on_gpu())
        greedy = sampler.SamplingParams(limit, 0.0, eos_ids=ends)
        record = sampler.Record(num_rows, greedy, key=0)
        jobs = [sampler.Job(row, row, limit) for row in range(num_rows)]
        sampler.decode(self.model, slots, logits, jobs, record, num_rows)
        out = []
        for ids in record.ids.tolist():
            end = next((place for place, i in enumerate(ids) if i in ends), limit - 1)
            out.append(ids[: end + 1])
        return out


def batch_size(lengths: list[int], most: int) -> int:
    """How many of the shortest rows go together, of ascending lengths: at most `most`, little of it padding."""
    total = 0
    for size, length in enumerate(lengths[:most], 1):
        total += length
        if size * length > total * (1 + MOST_PADDING) and size > 1:
            return size - 1
    return min(most, len(lengths))


def checksum(array: mx.array) -> int:
    """A sum over all bits of an array and their places, modulo 2^32; exact, so the same on every device."""
    words, total = array.reshape(-1).view(mx.uint16 if array.itemsize == 2 else mx.uint32), 0
    for begin in range(0, words.size, PART):
        part = words[begin : begin + PART].astype(mx.uint32)
        places = mx.arange(begin, begin + part.size, dtype=mx.uint32) * 2654435761 + 1  # Knuth's multiplicative hash
        total += int(np.array(((part ^ (part >> 15)) * (places | 1)).sum()))
    return total % 2**32


class RemoteJudge(Grader):
    """The same rubric, asked of an OpenAI-compatible server; what a score depends on is the model's name there."""

    is_paid = True

    def __init__(
        self,
        server: endpoint.Endpoint,
        rubric: str | Path | dict[str, Any] | rubrics.Rubric,
        mode: str = "logits",
        *,
        think: int = 0,
        min_mass: float = 0.5,
    ):
        super().__init__(rubric)
        self.server, self.mode, self.think, self.min_mass = server, mode, think, min_mass

    def state(self) -> dict[str, int]:
        return {}

    def restore(self, state: dict[str, int]) -> None:
        pass

    def identity(self) -> str:
        what = (self.server.url, self.server.model, self.mode, self.think, self.min_mass, self.rubric)
        return grader.digest(repr(what))

    def ask(self, questions: list[Question], tell: Tell) -> None:
        criteria, nothing_known = self.rubric.criteria, not self.cache.held
        asked = [rubrics.messages(self.rubric, q.prompt, q.completion, criteria[q.criterion]) for q in questions]
        if self.mode == "logits":
            replies = self.server.chat(asked, max_tokens=1, top_logprobs=TOP_LOGPROBS)
        else:
            replies = self.server.chat(asked, max_tokens=REPLY_TOKENS + self.think, thinking=self.think > 0)
        problem, silent = "", True
        for place, reply in tqdm(replies, total=len(asked), desc="judge", leave=False, disable=None):
            tell(place, Evaluation(*self._read(reply), reply.text or reply.problem))
            silent, problem = silent and not (reply.first or reply.text), problem or reply.problem
        if silent and problem and nothing_known:  # and never before: no answer is to blame
            raise ValueError(
                f"--judge-url {self.server.url}: no prompt fits into its context ({problem}); "
                "lower --judge-think, or give its model more"
            )

    def _read(self, reply: endpoint.Reply) -> tuple[float, float]:
        """Score and mass of one reply."""
        if self.mode == "decode":
            score = rubrics.read_score(reply.text)
            return score, float(not math.isnan(score))
        if not reply.first and not reply.text:  # the judge ended at once, or a filter took what it said
            return math.nan, 0.0
        if not reply.first:
            raise ValueError(f"--judge-url {self.server.url} gives no log-probabilities; set --judge-mode decode")
        by_score = np.zeros(6)
        for token, logprob in reply.first.items():
            by_score[rubrics.digit_of(token) or 0] += math.exp(logprob)
        mass = by_score[1:].sum()
        return float(by_score[1:] @ np.arange(1, 6) / mass) if mass >= self.min_mass else math.nan, float(mass)


# ---- settings, and the command


class Options(NamedTuple):
    """The settings of a judge, wherever they come from."""

    model: str = ""
    mode: str = "logits"
    think: int = 0
    min_mass: float = 0.5
    chunk_size: int = 24
    url: str = ""
    concurrency: int = 8
    timeout: float = 60.0
    retries: int = 5


HELP = {
    "model": "another judge than the frozen base; with --judge-url its name there",
    "mode": "how a score is read: from the first token's probabilities, or from a decoded reply",
    "think": "most tokens of thought before a decoded reply; 0 lets the judge not think",
    "min_mass": "least probability on 1 to 5 at the first token; below it there is no score",
    "chunk_size": "evaluations at once; RUBRIC_JUDGE_BATCH_SIZE is its default",
    "url": "an OpenAI-compatible server to ask instead, as http://127.0.0.1:8080/v1; its key in JUDGE_API_KEY",
    "concurrency": "requests to --judge-url at once",
    "timeout": "seconds for one request to --judge-url",
    "retries": "tries after a request to --judge-url failed",
}


def check(options: Options) -> None:
    """ValueError in one line that names the flag when the settings do not go together."""
    if options.mode not in MODES:
        raise ValueError(f"--judge-mode is {options.mode!r:.60}; it must be one of {', '.join(MODES)}")
    if not 0 < options.min_mass <= 1:
        raise ValueError(f"--judge-min-mass is {options.min_mass}; it must be more than 0 and at most 1")
    for flag, low in (("think", 0), ("chunk_size", 1), ("concurrency", 1), ("retries", 0)):
        if (value := getattr(options, flag)) < low:
            raise ValueError(f"--judge-{flag.replace('_', '-')} is {value}; it must be at least {low}")
    if not 0 < options.timeout < 1e6:
        raise ValueError(f"--judge-timeout is {options.timeout}; it must be more than 0")
    if options.think and options.mode != "decode":
        raise ValueError(f"--judge-think {options.think} needs --judge-mode decode: logits are read before any thought")
    if options.url and not options.model:
        raise ValueError(f"--judge-url {options.url} serves models by name; name one with --judge-model")


def make(
    options: Options,
    rubric: str | Path | dict[str, Any] | rubrics.Rubric,
    load: Callable[[], tuple[gwen.Model, Any]],
) -> Judge | RemoteJudge:
    """The judge of these settings; `load` gives its model and tokenizer, and is called for a local one only."""
    check(options)
    if options.url:
        server = endpoint.Endpoint(
            options.url,
            options.model,
            key=os.environ.get("JUDGE_API_KEY"),
            concurrency=options.concurrency,
            timeout=options.timeout,
            retries=options.retries,
        )
        return RemoteJudge(server, rubric, options.mode, think=options.think, min_mass=options.min_mass)
    model, tokenizer = load()
    return Judge(
        model,
        tokenizer,
        rubric,
        options.chunk_size,
        options.mode,
        think=options.think,
        min_mass=options.min_mass,
    )


def chunk_size_of_environment() -> int | None:
    """What `RUBRIC_JUDGE_BATCH_SIZE` says, None where it is not set or empty. ValueError when it is no size."""
    text = os.environ.get("RUBRIC_JUDGE_BATCH_SIZE")
    if not text:
        return None
    if not re.fullmatch("[1-9][0-9]{0,8}", text):
        raise ValueError(f"RUBRIC_JUDGE_BATCH_SIZE={text!r:.60}: it must be a whole number from 1 to 999999999")
    return int(text)


def add_flags(parser: telemetry.Parser) -> None:
    """The settings of a judge as flags, `--judge-mode` and so on."""
    for name, default in Options()._asdict().items():
        options: dict[str, Any] = {} if isinstance(default, str) else {"type": type(default)}
        if name == "mode":
            options["choices"] = MODES
        parser.add_argument("--judge-" + name.replace("_", "-"), help=HELP[name], **options)


def options_of(args: Any) -> Options:
    """What those flags say: flag, else environment, else default."""
    given = {name: getattr(args, f"judge_{name}") for name in Options._fields}
    if given["chunk_size"] is None:
        given["chunk_size"] = chunk_size_of_environment()
    options = Options(**{name: value for name, value in given.items() if value is not None})
    check(options)
    return options


def main(argv: list[str] | None = None) -> None:
    parser = telemetry.Parser("judge.py", "Compare a judge with labelled answers.")
    parser.add_argument("--rubric", required=True, help="YAML with the criteria")
    parser.add_argument(
        "--labels", required=True, metavar="FILE", help="JSONL with prompt, completion, criterion and score"
    )
    add_flags(parser)
    args = parser.parse_args(argv)
    try:
        options = options_of(args)
        rubric = rubrics.load_rubric(args.rubric)
        labels = calibration.load_labels(args.labels, rubric)
        name, why = (options.model, options.url) if options.url else gwen.choose_model(options.model)
        print(f"judge: {name}, {why}; mode {options.mode}", file=sys.stderr)
        its = make(options, rubric, lambda: gwen.load(name))
        judged = its.score([label.prompt for label in labels], [label.completion for label in labels])
    except (ValueError, OSError) as error:
        telemetry.fail(error)
    columns = [criterion.name for criterion in rubric.criteria]
    given = [judged.scores[row, columns.index(label.criterion)] for row, label in enumerate(labels)]
    print(calibration.table(labels, np.array(given)))


if __name__ == "__main__":
    main()
