"""
Judges completions by a rubric: each completion gets a score from 1 to 5 on each criterion.

The reward is a weighted sum of the scores. `uv run judge.py --rubric R --labels FILE` compares a
judge's scores with human labels.

In the mode `logits`, a judge computes the expected score from the probabilities that its reply
begins with the token "1", "2", "3", "4" or "5". This mode needs no decoding and gives fractional
scores. In the mode `decode`, the judge may think first. It then writes a reply, which is decoded
greedily, and the score is read from the reply (judging/replies.py).

The prompts that are judged together form a tree of preamble, questions, answers and criteria.
Shared parts are computed once (judging/prompt_tree.py). If the judge puts less than half of its
probability mass on the tokens "1" to "5", or writes no score, the score is nan rather than a
neutral value.

A judge on a server is in judging/remote_judge.py.

Axes: N completions or prompts, J criteria, M rows of a batch, L positions of a level of the tree,
C hidden, V vocabulary.
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
from flags import Parser, add_flags, exit_on_mistakes
from judging import evaluations, judge_prompts, rubrics
from judging.evaluations import CriterionEvaluation, CriterionQuestion
from judging.grader import Grader, digest_of
from judging.prompt_tree import Prompt, PromptTree, select_last_hidden
from judging.rubrics import Rubric
from layers import softmax
from layers.tree_cache import TreeCache
from machine import alive
from machine.output import guard_output
from settings.checks import check_settings
from settings.sources import read_judge_chunk_size_from_environment, settings_from_flags
from text.printable import escape_invisible


class Judge(Grader):
    """
    A judge that runs a local model with its adapters disabled.

    The weights outside the adapters must not change during the judge's lifetime.

    chunk_size: the maximum number of evaluations at once. If memory runs out, this number is
    halved, and then grows back slowly.
    mode: "logits" or "decode".
    think: the maximum number of tokens that the judge may think before a decoded reply; 0 turns
    thinking off.

    Raises ValueError if the tokenizer lacks a chat template or a token that the mode needs.
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
        self.prompts = judge_prompts.JudgePromptEncoder(tokenizer, self.rubric, thinking=think > 0)
        self.score_ids = evaluations.token_ids_by_score(tokenizer) if mode == "logits" else []
        self.end_of_thought = tokenizer.convert_tokens_to_ids("</think>") if think else None
        if think and self.end_of_thought in (None, tokenizer.unk_token_id):
            raise ValueError(
                f"--judge-think {think}: the judge's tokenizer has no </think>, so the judge "
                "cannot think; set --judge-think 0"
            )

        reply_tokens = evaluations.REPLY_TOKENS + think if mode == "decode" else 0
        # the maximum number of tokens in a prompt
        self.room = model.config.max_position_embeddings - reply_tokens
        self._check_room_for_answers({"": []})
        self.tree = PromptTree(model, self.prompts.head, chunk_size, "judge")
        self._scoring_digest = ""

    def scoring_digest(self) -> str:
        """
        A digest of the rubric's prompts, the settings and the model.

        In the digest, the model's logits after the preamble, which differ between models, stand for
        the model.
        """
        if not self._scoring_digest:
            with lora.without_adapters_and_gradients(self.model):
                logits = self.tree.head_cache_and_last_hidden[1] @ self.model.head_weight.T
            settings = (
                self.prompts.head,
                self.prompts.middle,
                self.prompts.tails,
                self.mode,
                self.think,
            )
            values = np.array(logits.astype(mx.float32)).tobytes()
            self._scoring_digest = digest_of(settings, str(logits.dtype), values)
        return self._scoring_digest

    def score_questions(
        self, questions: list[CriterionQuestion]
    ) -> Generator[tuple[int, CriterionEvaluation], None, None]:
        """Yields the index and the evaluation of each question, in any order."""
        question_ids = {}
        for prompt in dict.fromkeys(question.prompt for question in questions):
            question_ids[prompt] = self.prompts.encode_question_segment(prompt)
        answer_ids = {}
        for completion in dict.fromkeys(question.completion for question in questions):
            answer_ids[completion] = self.prompts.encode_answer_segment(completion)
        self._check_room_for_answers(question_ids)

        prompts: dict[int, Prompt] = {}  # a question's index -> its prompt
        for index, (prompt, completion, column) in enumerate(questions):
            runs = (
                question_ids[prompt],
                answer_ids[completion],
                self.prompts.criterion_tails[column],
            )
            length = len(self.prompts.head) + sum(map(len, runs))
            if length <= self.room:
                prompts[index] = tuple(map(tuple, runs))
            else:
                context = self.model.config.max_position_embeddings
                reply = (
                    f"(nothing: the answer does not fit into the judge's context of {context} "
                    "tokens)"
                )
                yield index, CriterionEvaluation(math.nan, 0.0, reply)

        with (
            lora.without_adapters_and_gradients(self.model),
            alive.Bar(total=len(prompts), desc="judging", unit="evaluation") as progress,
        ):
            for index_and_evaluation in self.tree.yield_values_at_ends(
                prompts, self._evaluate_by_first_token_or_reply
            ):
                progress.update()
                yield index_and_evaluation

    def _check_room_for_answers(self, question_ids: dict[str, list[int]]) -> None:
        """
        Raises ValueError if a question leaves no room for an answer in the judge's context.

        question_ids: the token ids of each question.
        """
        preamble_length = len(self.prompts.head)
        criterion_length = max(map(len, self.prompts.tails))
        longest = max(question_ids, key=lambda prompt: len(question_ids[prompt]))
        question_length = len(question_ids[longest])
        if preamble_length + question_length + criterion_length > self.room:
            context = self.model.config.max_position_embeddings
            raise ValueError(
                f"the judge's context of {context} tokens has no room for an answer: "
                f"the reply takes {context - self.room} (--judge-think {self.think}), "
                f"the rubric's preamble takes {preamble_length}, "
                f"its longest criterion takes {criterion_length}, "
                f"and the question {longest[:60]!r} takes {question_length}; "
                "shorten the longest of these"
            )

    def _evaluate_by_first_token_or_reply(
        self, hidden: mx.array, cache: TreeCache
    ) -> list[CriterionEvaluation]:
        """The evaluations of M prompts, computed from the hidden states at their ends, (M, C)."""
        logits = hidden @ self.model.head_weight.T  # (M, V)
        if self.mode == "decode":
            return self._decode_and_read_replies(logits, cache)

        logprobs = softmax.log_softmax(logits)
        columns = [mx.exp(logprobs[:, mx.array(ids)]).sum(-1) for ids in self.score_ids]
        by_score = mx.stack(columns, axis=-1)  # (M, 5)
        mass = by_score.sum(-1)
        expected = (by_score * mx.arange(1, 6)).sum(-1) / mx.maximum(mass, 1e-30)
        is_readable = np.array(mass).astype(float) >= evaluations.MIN_MASS
        scores = np.where(is_readable, np.array(expected), math.nan)
        likeliest_ids = np.array(logprobs.argmax(-1)).tolist()
        likeliest = [self.tokenizer.decode([token]) for token in likeliest_ids]
        return list(map(CriterionEvaluation, scores.tolist(), np.array(mass).tolist(), likeliest))

    def _decode_and_read_replies(
        self, logits: mx.array, cache: TreeCache
    ) -> list[CriterionEvaluation]:
        """
        Decodes M replies greedily and returns their evaluations.

        logits: the logits of each reply's first token, (M, V).
        """
        eos_ids = list(self.model.config.end_ids)
        replies: dict[int, list[int]] = {}
        rows = list(range(len(logits)))  # rows that have no answer yet
        if self.think:
            thoughts = self._decode_thoughts(logits, cache)
            # A row that reached an end token while thinking is finished. In all other rows,
            # </think> is appended to the thought.
            replies = {row: ids for row, ids in enumerate(thoughts) if ids[-1] in eos_ids}
            rows = [row for row in rows if row not in replies]
            if rows:
                tails = [self._with_end_of_thought(thoughts[row]) for row in rows]
                lengths = [len(tail) for tail in tails]
                cache = cache.with_new_level(lengths, rows)
                hidden = select_last_hidden(self.tree.compute_padded_hidden(cache, tails), lengths)
                logits = hidden @ self.model.head_weight.T
        if rows:
            answers = sampler.continue_greedily(
                self.model, cache.to_flat_cache(), logits, evaluations.REPLY_TOKENS, eos_ids
            )
            replies |= dict(zip(rows, answers, strict=True))

        row_evaluations = []
        for row in range(len(replies)):
            ids = replies[row]
            was_cut = ids[-1] not in eos_ids
            text = self.tokenizer.decode(ids if was_cut else ids[:-1])
            thought_was_closed = self.think and row in rows
            is_in_thought = self.prompts.opens_thought and not thought_was_closed
            reply = f"<think>{text}" if is_in_thought else text
            evaluation = evaluations.evaluation_from_reply(reply, was_cut)
            row_evaluations.append(evaluation._replace(reply=text))
        return row_evaluations

    def _decode_thoughts(self, logits: mx.array, cache: TreeCache) -> list[list[int]]:
        """Returns each row's thought, decoded up to </think>, an end token or the token limit."""
        assert self.end_of_thought is not None
        ends = [*self.model.config.end_ids, self.end_of_thought]
        return sampler.continue_greedily(
            self.model, cache.to_flat_cache(), logits, self.think, ends
        )

    def _with_end_of_thought(self, thought_ids: list[int]) -> list[int]:
        """Returns the ids of a thought, followed by the ids of </think>."""
        close = self.prompts.encode_trusted("\n</think>\n\n")
        return [token for token in thought_ids if token != self.end_of_thought] + close


# ---- making judges, and the command that compares a judge's scores with human labels


def make_judge(
    settings: JudgeSettings, rubric: Rubric, load_local_model: Callable[[], tuple[gwen.Model, Any]]
) -> Grader:
    """
    Makes a judge on a server if the settings have a URL, and a local judge otherwise.

    load_local_model: a function that returns the model and the tokenizer of a local judge. It is
    called only for a local judge.
    """
    if settings.url:
        from judging.remote_judge import RemoteJudge

        return RemoteJudge(settings, rubric, os.environ.get("JUDGE_API_KEY"))
    model, tokenizer = load_local_model()
    return Judge(model, tokenizer, rubric, settings.chunk_size, settings.mode, settings.think)


def load_judge_model(model_name: str) -> tuple[gwen.Model, Any]:
    """
    Loads a judge's model and tokenizer. If loading fails, the error message names --judge-model.
    """
    with model_choice.replace_flag_in_errors("--judge-model"):
        return gwen.load(model_name, frozen=True)


def make_judge_and_witness(
    config: Config,
    rubric: rubrics.Source | None,
    witness_rubric: rubrics.Source | None,
    base: gwen.Model | None = None,
    tokenizer: Any = None,
) -> tuple[Grader | None, Grader | None]:
    """
    Returns a run's judge and its witness, a second judge that only evaluations use.

    The judge is None if `rubric` is None, and the witness is None if `witness_rubric` is None. The
    two share one cache of scores.

    base, tokenizer: the model before training, and its tokenizer. This model is both judge and
    witness unless --judge-model names another model. If base is None, a model is loaded.
    """

    @functools.cache
    def load_base_or_judge_model() -> tuple[gwen.Model, Any]:
        if base is not None and config.judges_with_base_model:
            return base, tokenizer
        return load_judge_model(config.judge.model or config.model.name)

    grader = witness = None
    if rubric:
        grader = make_judge(config.judge, rubrics.load_rubric(rubric), load_base_or_judge_model)
    if witness_rubric:
        witness = make_judge(
            config.judge, rubrics.load_rubric(witness_rubric), load_base_or_judge_model
        )
    if grader is not None and witness is not None:
        # cache keys depend on the rubric, so the two rubrics' scores do not mix
        witness.cache = grader.cache
    return grader, witness


@guard_output()
def main(argv: list[str] | None = None) -> None:
    from judging import labels

    parser = Parser("judge.py", "Compare a judge's scores with human labels.")
    parser.add_argument("--rubric", required=True, help="the rubric: a YAML file with the criteria")
    parser.add_argument(
        "--labels",
        required=True,
        metavar="FILE",
        help="a JSONL file of human labels; each line has prompt, completion, criterion and score",
    )
    add_flags(parser, [SETTINGS[key] for key in JUDGE])
    args = parser.parse_args(argv)
    with exit_on_mistakes():
        flags = read_judge_chunk_size_from_environment() | settings_from_flags(args, JUDGE)
        settings = check_settings(flags).judge
        rubric = rubrics.load_rubric(args.rubric)
        labelled_answers = labels.load_labels(args.labels, rubric)
        name = settings.model
        reason = settings.url
        if not settings.url:
            name, reason = model_choice.choose_model_and_reason(settings.model)
        print(f"judge: {name}, {reason}; mode {settings.mode}", file=sys.stderr)
        grader = make_judge(settings, rubric, lambda: load_judge_model(name))
        print(escape_invisible(labels.judge_and_report_agreement(grader, labelled_answers)))


if __name__ == "__main__":
    main()
