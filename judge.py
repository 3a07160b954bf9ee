"""
Rubric judging: a judge scores each completion from 1 to 5 on each criterion; the weighted scores are the reward.
`uv run judge.py --rubric R --labels FILE` compares a judge with labelled answers.

    logits   the expected score under the probabilities of the tokens "1" to "5" at the first answer position: needs no
             decoding and is finer than a digit
    decode   the score in a greedy reply (judging/replies.py), after thinking if allowed

The prompts of a call form a tree of preamble, questions, answers and criteria, whose shared parts are computed once. A
score is nan, never neutral, if the judge puts less than half of its mass on the scores or writes none. A judge on a
server is `judging/remote_judge.py`.

Axes: N completions or prompts, J criteria, M rows of a batch, L positions of a level, C hidden, V vocabulary.
"""

import functools
import math
import os
import sys
from collections.abc import Callable, Generator
from typing import Any

import cpu_blas  # noqa: F401  (before mlx)
import mlx.core as mx
import numpy as np

import gwen
import lora
import sampler
from config import JUDGE, SETTINGS, Config, JudgeSettings
from flags import Parser, add_flags, escape_invisible, report_mistakes
from judging import rubrics
from judging.prompt_tree import Prompt, PromptTree, select_ends
from judging.rubrics import Evaluation, Grader, Question, Rubric
from layers import softmax
from layers.tree_cache import TreeCache
from machine import alive
from machine.output import guard_output
from settings.checks import check_settings
from settings.sources import given_settings, read_environment


class Judge(Grader):
    """
    Answers the questions of `Grader.score`, using a local model with its adapters switched off.

    The model's other weights must not change. chunk_size: evaluations at once, halved when memory runs out and slowly
    grown back. mode: "logits" or "decode". think: most tokens of thought before a decoded reply.
    Raises ValueError if the tokenizer lacks what the mode needs.
    """

    def __init__(
        self,
        model: gwen.Model,
        tokenizer: Any,
        rubric: rubrics.Source,
        chunk_size: int = 24,
        mode: str = "logits",
        think: int = 0,
    ):
        super().__init__(rubric)
        assert mode == "decode" or (mode == "logits" and not think), f"mode {mode!r}, think {think}"
        self.model, self.tokenizer, self.mode, self.think = model, tokenizer, mode, think
        self.prompts = rubrics.PromptBuilder(tokenizer, self.rubric, thinking=think > 0)
        self.score_ids = rubrics.score_token_ids(tokenizer) if mode == "logits" else []
        self.end_of_thought = tokenizer.convert_tokens_to_ids("</think>") if think else None
        if think and self.end_of_thought in (None, tokenizer.unk_token_id):
            raise ValueError(
                f"--judge-think {think}: the judge's tokenizer has no </think>, so it cannot think"
            )
        reply_room = rubrics.REPLY_TOKENS + think if mode == "decode" else 0
        self.room = model.config.max_position_embeddings - reply_room  # for a prompt, in tokens
        self._check_room({"": []})
        self.tree = PromptTree(model, self.prompts.head, chunk_size, "judge")
        self._identity = ""

    def identity(self) -> str:
        """A digest of prompts and settings, and of the logits after the preamble, which tell models apart."""
        if not self._identity:
            with lora.disabled(self.model):
                logits = self.tree.root[1] @ self.model.head_weight.T
            settings = (
                self.prompts.head,
                self.prompts.middle,
                self.prompts.tails,
                self.mode,
                self.think,
            )
            values = np.array(logits.astype(mx.float32)).tobytes()
            self._identity = rubrics.digest_of(settings, str(logits.dtype), values)
        return self._identity

    def evaluate(self, questions: list[Question]) -> Generator[tuple[int, Evaluation], None, None]:
        texts = {
            prompt: self.prompts.encode_question(prompt)
            for prompt in dict.fromkeys(q.prompt for q in questions)
        }
        answers = {
            text: self.prompts.encode_answer(text)
            for text in dict.fromkeys(q.completion for q in questions)
        }
        self._check_room(texts)
        prompts: dict[int, Prompt] = {}  # by index of their question
        for place, (prompt, completion, column) in enumerate(questions):
            runs = texts[prompt], answers[completion], self.prompts.own[column]
            if len(self.prompts.head) + sum(map(len, runs)) <= self.room:
                prompts[place] = tuple(map(tuple, runs))
            else:
                context = self.model.config.max_position_embeddings
                reply = (
                    f"(nothing, as the answer does not fit into its context of {context} tokens)"
                )
                yield place, Evaluation(math.nan, 0.0, reply)
        with (
            lora.disabled(self.model),
            alive.Bar(total=len(prompts), desc="judging", unit="evaluation") as progress,
        ):
            for place_and_evaluation in self.tree.walk(prompts, self._read_evaluations):
                progress.update()
                yield place_and_evaluation

    def _check_room(self, questions: dict[str, list[int]]) -> None:
        """Raises ValueError if a prompt is too long even without an answer."""
        head, tail = len(self.prompts.head), max(map(len, self.prompts.tails))
        prompt = max(questions, key=lambda prompt: len(questions[prompt]))
        if head + len(questions[prompt]) + tail > self.room:
            room = f"beside the reply (--judge-think {self.think}) it has {self.room} tokens"
            said = f"the rubric's preamble takes {head}, its longest criterion {tail} and the question {prompt[:60]!r}"
            said = f"a judge's context has no room for an answer: {room}, of which {said} {len(questions[prompt])}"
            raise ValueError(f"{said}; shorten the longest")

    def _read_evaluations(self, hidden: mx.array, cache: TreeCache) -> list[Evaluation]:
        """The evaluations at the ends of M prompts, from hidden states (M, C)."""
        logits = hidden @ self.model.head_weight.T  # (M, V)
        if self.mode == "decode":
            return self._read_replies(logits, cache)
        logprobs = softmax.log_softmax(logits)
        by_score = mx.stack(
            [mx.exp(logprobs[:, mx.array(ids)]).sum(-1) for ids in self.score_ids], axis=-1
        )  # (M, 5)
        mass = by_score.sum(-1)
        expected = (by_score * mx.arange(1, 6)).sum(-1) / mx.maximum(mass, 1e-30)
        scores = np.where(
            np.array(mass).astype(float) >= rubrics.MIN_MASS, np.array(expected), math.nan
        )
        likeliest = [
            self.tokenizer.decode([token]) for token in np.array(logprobs.argmax(-1)).tolist()
        ]
        return list(map(Evaluation, scores.tolist(), np.array(mass).tolist(), likeliest))

    def _read_replies(self, logits: mx.array, cache: TreeCache) -> list[Evaluation]:
        """The scores of greedy replies, from logits (M, V) of their first tokens."""
        eos = list(self.model.config.end_ids)
        replies: dict[int, list[int]] = {}
        rows = list(range(len(logits)))
        if self.think:
            assert self.end_of_thought is not None
            ends = [*eos, self.end_of_thought]
            thoughts = sampler.continue_greedily(
                self.model, cache.to_flat_cache(), logits, self.think, ends
            )
            # A row that reached eos while thinking is finished; the others get their thoughts closed.
            replies = {row: ids for row, ids in enumerate(thoughts) if ids[-1] in eos}
            rows = [row for row in rows if row not in replies]
            close = self.prompts.encode_trusted("\n</think>\n\n")
            tails = [[i for i in thoughts[row] if i != self.end_of_thought] + close for row in rows]
            if rows:
                lengths = list(map(len, tails))
                cache = cache.extend(lengths, rows)
                logits = (
                    select_ends(self.tree.forward(cache, tails), lengths) @ self.model.head_weight.T
                )
        if rows:
            answers = sampler.continue_greedily(
                self.model, cache.to_flat_cache(), logits, rubrics.REPLY_TOKENS, eos
            )
            replies |= dict(zip(rows, answers, strict=True))

        evaluations = []
        for row in range(len(replies)):
            ids = replies[row]
            was_cut = ids[-1] not in eos
            text = self.tokenizer.decode(ids if was_cut else ids[:-1])
            is_in_thought = self.prompts.opens_thought and not (self.think and row in rows)
            evaluation = rubrics.evaluation_from_reply(
                f"<think>{text}" if is_in_thought else text, was_cut
            )
            evaluations.append(evaluation._replace(reply=text))
        return evaluations


# ---- a run's judge, and the command that compares a judge's scores with human labels


def make_judge(
    settings: JudgeSettings, rubric: Rubric, load: Callable[[], tuple[gwen.Model, Any]]
) -> Grader:
    """The judge of these settings; `load` returns its model and tokenizer and runs only for a local judge."""
    if settings.url:
        from judging.remote_judge import RemoteJudge

        return RemoteJudge(settings, rubric, os.environ.get("JUDGE_API_KEY"))
    return Judge(*load(), rubric, settings.chunk_size, settings.mode, settings.think)


def load_judge_model(name: str) -> tuple[gwen.Model, Any]:
    """A judge's model and tokenizer. ValueError, of the flag that names it, where there is none."""
    with gwen.blame_flag("--judge-model"):
        return gwen.load(name, frozen=True)


def make_graders(
    config: Config, rubric: Any, witness: Any, base: gwen.Model | None = None, tokenizer: Any = None
) -> tuple[Grader | None, Grader | None]:
    """
    The judge by `rubric`, and the witness, which only evaluations use, by its own; None without a rubric.

    base: the model before training, the default judge of both; None: it is loaded. They share their cache of scores.
    """

    @functools.cache
    def load() -> tuple[gwen.Model, Any]:
        if base is not None and config.judges_itself:
            return base, tokenizer
        return load_judge_model(config.judge.model or config.model.name)

    grader, second = (
        make_judge(config.judge, rubrics.load_rubric(one), load) if one else None
        for one in (rubric, witness)
    )
    if grader is not None and second is not None:
        second.known = grader.known  # a key covers the rubric
    return grader, second


@guard_output()
def main(argv: list[str] | None = None) -> None:
    from judging import labels

    parser = Parser("judge.py", "Compare a judge with labelled answers.")
    parser.add_argument("--rubric", required=True, help="YAML with the criteria")
    parser.add_argument(
        "--labels",
        required=True,
        metavar="FILE",
        help="JSONL: prompt, completion, criterion, score",
    )
    add_flags(parser, [SETTINGS[key] for key in JUDGE])
    args = parser.parse_args(argv)
    with report_mistakes():
        settings = check_settings(read_environment() | given_settings(args, JUDGE)).judge
        rubric = rubrics.load_rubric(args.rubric)
        known = labels.load_labels(args.labels, rubric)
        name, why = settings.model, settings.url
        if not settings.url:
            name, why = gwen.choose_model(settings.model)
        print(f"judge: {name}, {why}; mode {settings.mode}", file=sys.stderr)
        print(
            escape_invisible(
                labels.judge_labels(
                    make_judge(settings, rubric, lambda: load_judge_model(name)), known
                )
            )
        )


if __name__ == "__main__":
    main()
