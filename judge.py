"""
Rubric judging: a judge scores each completion from 1 to 5 on each criterion.

The reward is the weighted sum of the scores. `uv run judge.py --rubric R --labels FILE` compares
a judge with labelled answers. A judge has two modes:

    logits   takes the expected score under the probabilities of the tokens "1" to "5" at the first
             answer position; this needs no decoding and is finer than a digit
    decode   reads the score in a greedy reply (judging/replies.py), after thinking if allowed

The prompts of a call form a tree of preamble, questions, answers and criteria. Shared parts are
computed once (judging/prompt_tree.py). If the judge puts less than half of its probability mass on
the scores, or writes no score, the score is nan and not a neutral value.

A judge on a server is in judging/remote_judge.py.

Axes: N completions or prompts, J criteria, M rows of a batch, L positions of a level, C hidden,
V vocabulary.
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
from disk import model_choice
from flags import Parser, add_flags, report_mistakes
from judging import rubrics
from judging.prompt_tree import Prompt, PromptTree, select_ends
from judging.rubrics import Evaluation, Grader, Question, Rubric
from layers import softmax
from layers.tree_cache import TreeCache
from machine import alive
from machine.output import guard_output
from settings.checks import check_settings
from settings.sources import given_settings, read_environment
from text.printable import escape_invisible


class Judge(Grader):
    """
    Answers the questions of `Grader.score` with a local model whose adapters are disabled.

    The model's other weights must not change.

    chunk_size: the most evaluations at once. It is halved when memory runs out, and grows back
    slowly.
    mode: "logits" or "decode".
    think: the most tokens of a thought before a decoded reply; 0 for no thought.

    Raises ValueError if the tokenizer lacks something that the mode needs.
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
        self.model = model
        self.tokenizer = tokenizer
        self.mode = mode
        self.think = think
        self.prompts = rubrics.PromptBuilder(tokenizer, self.rubric, thinking=think > 0)
        self.score_ids = rubrics.score_token_ids(tokenizer) if mode == "logits" else []
        self.end_of_thought = tokenizer.convert_tokens_to_ids("</think>") if think else None
        if think and self.end_of_thought in (None, tokenizer.unk_token_id):
            raise ValueError(
                f"--judge-think {think}: the judge's tokenizer has no </think>, so it cannot think"
            )

        reply_tokens = rubrics.REPLY_TOKENS + think if mode == "decode" else 0
        # the most tokens that a prompt may have
        self.room = model.config.max_position_embeddings - reply_tokens
        self._check_room({"": []})
        self.tree = PromptTree(model, self.prompts.head, chunk_size, "judge")
        self._identity = ""

    def identity(self) -> str:
        """
        A digest of the prompts, the settings and the model.

        It tells models apart by their logits after the preamble.
        """
        if not self._identity:
            with lora.disable_adapters(self.model):
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

    def score_questions(
        self, questions: list[Question]
    ) -> Generator[tuple[int, Evaluation], None, None]:
        """Yields the place and the evaluation of each question, in any order."""
        question_ids = {}
        for prompt in dict.fromkeys(question.prompt for question in questions):
            question_ids[prompt] = self.prompts.encode_question(prompt)
        answer_ids = {}
        for completion in dict.fromkeys(question.completion for question in questions):
            answer_ids[completion] = self.prompts.encode_answer(completion)
        self._check_room(question_ids)

        prompts: dict[int, Prompt] = {}  # by the place of their question
        for place, (prompt, completion, column) in enumerate(questions):
            runs = (
                question_ids[prompt],
                answer_ids[completion],
                self.prompts.criterion_tails[column],
            )
            length = len(self.prompts.head) + sum(map(len, runs))
            if length <= self.room:
                prompts[place] = tuple(map(tuple, runs))
            else:
                context = self.model.config.max_position_embeddings
                reply = (
                    f"(nothing, as the answer does not fit into its context of {context} tokens)"
                )
                yield place, Evaluation(math.nan, 0.0, reply)

        with (
            lora.disable_adapters(self.model),
            alive.Bar(total=len(prompts), desc="judging", unit="evaluation") as progress,
        ):
            for place_and_evaluation in self.tree.walk(prompts, self._read_evaluations):
                progress.update()
                yield place_and_evaluation

    def _check_room(self, question_ids: dict[str, list[int]]) -> None:
        """Raises ValueError if a prompt is too long even without an answer."""
        preamble_length = len(self.prompts.head)
        criterion_length = max(map(len, self.prompts.tails))
        longest = max(question_ids, key=lambda prompt: len(question_ids[prompt]))
        question_length = len(question_ids[longest])
        if preamble_length + question_length + criterion_length > self.room:
            raise ValueError(
                "a judge's context has no room for an answer: "
                f"beside the reply (--judge-think {self.think}) it has {self.room} tokens, "
                f"of which the rubric's preamble takes {preamble_length}, "
                f"its longest criterion {criterion_length} "
                f"and the question {longest[:60]!r} {question_length}; shorten the longest"
            )

    def _read_evaluations(self, hidden: mx.array, cache: TreeCache) -> list[Evaluation]:
        """The evaluations of M prompts, from the hidden states at their ends, (M, C)."""
        logits = hidden @ self.model.head_weight.T  # (M, V)
        if self.mode == "decode":
            return self._read_replies(logits, cache)

        logprobs = softmax.log_softmax(logits)
        columns = [mx.exp(logprobs[:, mx.array(ids)]).sum(-1) for ids in self.score_ids]
        by_score = mx.stack(columns, axis=-1)  # (M, 5)
        mass = by_score.sum(-1)
        expected = (by_score * mx.arange(1, 6)).sum(-1) / mx.maximum(mass, 1e-30)
        is_readable = np.array(mass).astype(float) >= rubrics.MIN_MASS
        scores = np.where(is_readable, np.array(expected), math.nan)
        likeliest_ids = np.array(logprobs.argmax(-1)).tolist()
        likeliest = [self.tokenizer.decode([token]) for token in likeliest_ids]
        return list(map(Evaluation, scores.tolist(), np.array(mass).tolist(), likeliest))

    def _read_replies(self, logits: mx.array, cache: TreeCache) -> list[Evaluation]:
        """The evaluations in greedy replies, from the logits of their first tokens, (M, V)."""
        eos_ids = list(self.model.config.end_ids)
        replies: dict[int, list[int]] = {}
        rows = list(range(len(logits)))  # the rows that still have to answer
        if self.think:
            thoughts = self._think(logits, cache)
            # A row that reached eos while thinking is finished. The others get a closed thought.
            replies = {row: ids for row, ids in enumerate(thoughts) if ids[-1] in eos_ids}
            rows = [row for row in rows if row not in replies]
            if rows:
                tails = [self._close_thought(thoughts[row]) for row in rows]
                lengths = [len(tail) for tail in tails]
                cache = cache.extend(lengths, rows)
                hidden = select_ends(self.tree.forward(cache, tails), lengths)
                logits = hidden @ self.model.head_weight.T
        if rows:
            answers = sampler.continue_greedily(
                self.model, cache.to_flat_cache(), logits, rubrics.REPLY_TOKENS, eos_ids
            )
            replies |= dict(zip(rows, answers, strict=True))

        evaluations = []
        for row in range(len(replies)):
            ids = replies[row]
            was_cut = ids[-1] not in eos_ids
            text = self.tokenizer.decode(ids if was_cut else ids[:-1])
            thought_was_closed = self.think and row in rows
            is_in_thought = self.prompts.opens_thought and not thought_was_closed
            reply = f"<think>{text}" if is_in_thought else text
            evaluation = rubrics.evaluation_from_reply(reply, was_cut)
            evaluations.append(evaluation._replace(reply=text))
        return evaluations

    def _think(self, logits: mx.array, cache: TreeCache) -> list[list[int]]:
        """The ids of each row's thought, up to </think>, an end token or the limit."""
        assert self.end_of_thought is not None
        ends = [*self.model.config.end_ids, self.end_of_thought]
        return sampler.continue_greedily(
            self.model, cache.to_flat_cache(), logits, self.think, ends
        )

    def _close_thought(self, thought: list[int]) -> list[int]:
        """The ids of a thought, followed by those of </think>."""
        close = self.prompts.encode_trusted("\n</think>\n\n")
        return [token for token in thought if token != self.end_of_thought] + close


# ---- a run's judge, and the command that compares a judge's scores with human labels


def make_judge(
    settings: JudgeSettings, rubric: Rubric, load: Callable[[], tuple[gwen.Model, Any]]
) -> Grader:
    """
    The judge of these settings.

    load: returns a local judge's model and tokenizer. It is called only for a local judge.
    """
    if settings.url:
        from judging.remote_judge import RemoteJudge

        return RemoteJudge(settings, rubric, os.environ.get("JUDGE_API_KEY"))
    model, tokenizer = load()
    return Judge(model, tokenizer, rubric, settings.chunk_size, settings.mode, settings.think)


def load_judge_model(name: str) -> tuple[gwen.Model, Any]:
    """Loads a judge's model and tokenizer. Raises a ValueError that names --judge-model."""
    with model_choice.blame_flag("--judge-model"):
        return gwen.load(name, frozen=True)


def make_graders(
    config: Config,
    rubric: Any,
    witness_rubric: Any,
    base: gwen.Model | None = None,
    tokenizer: Any = None,
) -> tuple[Grader | None, Grader | None]:
    """
    The judge, and the witness, which only evaluations use. Each is None if it has no rubric.

    base: the model before training, which is the default model of both. If None, it is loaded.
    The judge and the witness share their cache of scores.
    """

    @functools.cache
    def load() -> tuple[gwen.Model, Any]:
        if base is not None and config.judges_itself:
            return base, tokenizer
        return load_judge_model(config.judge.model or config.model.name)

    grader = witness = None
    if rubric:
        grader = make_judge(config.judge, rubrics.load_rubric(rubric), load)
    if witness_rubric:
        witness = make_judge(config.judge, rubrics.load_rubric(witness_rubric), load)
    if grader is not None and witness is not None:
        witness.cache = grader.cache  # keys depend on the rubric, so the scores of both stay apart
    return grader, witness


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
        flags = read_environment() | given_settings(args, JUDGE)
        settings = check_settings(flags).judge
        rubric = rubrics.load_rubric(args.rubric)
        labelled_answers = labels.load_labels(args.labels, rubric)
        name = settings.model
        reason = settings.url
        if not settings.url:
            name, reason = model_choice.choose_model(settings.model)
        print(f"judge: {name}, {reason}; mode {settings.mode}", file=sys.stderr)
        grader = make_judge(settings, rubric, lambda: load_judge_model(name))
        print(escape_invisible(labels.judge_labels(grader, labelled_answers)))


if __name__ == "__main__":
    main()
