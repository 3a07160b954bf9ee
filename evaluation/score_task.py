"""
Evaluates a model on the held-out problems of a task, both during a run and for `evaluate.py`.

The model answers each held-out problem with K completions at temperature 1, sampled with a fixed
seed, and with one greedy completion. If the task has right answers, the evaluation reports the
accuracy, which the task's verifier measures and the training rewards do not affect. The evaluation
of any other task reports the weighted sum of the task's rewards. If a judge gives one of these
rewards, a witness can also score the answers. A witness is a judge with a second rubric that
training never uses.

The individual measurements are in evaluation/measures.py. evaluation/policy.py loads the model.

Axes: P problems, K samples of each, N = P * K completions in the order of their problems, T
completion positions, J criteria.
"""

import math
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import cpu_blas  # noqa: F401  (before mlx)
import mlx.core as mx
import numpy as np

import gwen
import sampler
import tasks
from config import Config
from disk import run_files, statistics
from evaluation.measures import (
    assign_rewards_and_verify,
    compute_figures_per_problem,
    mean_kl_to_reference,
    mean_over_samples,
    mean_token_entropy,
    measure_length_refusal_and_repetition,
    rewards_or_nan_if_unreadable,
    round_with_none_for_nan,
    split_accuracy_and_judge_by_category,
)
from forecast.row_memory import ROOM, choose_rollout_rows, rollout_bytes
from judging.grader import Grader
from machine import memory, world
from prompts import chat_template
from prompts.chats import TrainingRow
from prompts.examples import Example, pick_evenly_spaced
from rewards.rewards import LoggedValues, reward_argument_names, select_argument_names
from step.batch import make_batches
from step.generation import Player, generate_completions
from step.loss import StepLoss
from step.sample import Sample, new_samples, sample_from_conversation
from step.scoring import judge_samples
from tools.episodes import Toolbox

KEY = 1 << 96  # the key of the random numbers in evaluations; training uses smaller keys


class EvalParams(NamedTuple):
    """How a model answers held-out problems: sampling parameters and numbers of answers."""

    max_tokens: int
    # the number of sequences decoded at once; None: as many as fit into memory
    batch_size: memory.BatchSize | None = None
    samples: int = 1  # the number of completions sampled per problem
    limit: int | None = None  # answer at most this many problems, evenly spread
    thinking: bool = False
    temperature: float = 1.0
    seed: int = 0
    stop: Sequence[str] = ()  # texts that end a completion
    toolbox: Toolbox | None = None
    player: Player | None = None  # an outside harness that plays episodes in place of the toolbox

    @classmethod
    def from_config(cls, config: Config, **changes: Any) -> "EvalParams":
        """Returns the parameters that follow from a run's settings, after applying `changes`."""
        params = cls(
            config.sampling.max_tokens,
            thinking=config.sampling.thinking,
            stop=config.sampling.stop,
            limit=config.evaluation.limit or None,
        )
        return params._replace(**changes)

    def encode_prompts(
        self,
        tokenizer: Any,
        context: int,
        examples: Iterable[Example],
        kind: str = "held-out prompt",
    ) -> list[list[int]]:
        """
        Returns the token ids of the prompt of each example.

        Raises ValueError if a prompt leaves no room for its completion in the model's context.

        context: the maximum number of tokens that the model can process.
        kind: the words that error messages use for a prompt.
        """
        encoder = self.toolbox or self.player
        if encoder:
            return [encoder.encode_prompt(example) for example in examples]
        return chat_template.encode_prompts(
            tokenizer,
            examples,
            max_tokens=self.max_tokens,
            context=context,
            thinking=self.thinking,
            kind=kind,
        )


# A function such as `answer_sampled_and_greedy`, which returns N samples and P greedy samples.
AnswerFunction = Callable[[list[Example], EvalParams], tuple[list[Sample], list[Sample]]]


class GradedAnswers(NamedTuple):
    """The answers in an evaluation, with their rewards, grades and scores."""

    sampled: list[Sample]  # N
    values: np.ndarray  # (N,) the verifier's grade of each sample, or else its weighted reward
    logged: LoggedValues  # the values that the reward functions logged
    greedy: list[Sample]  # P
    greedy_values: np.ndarray  # (P,)

    # the rewards, lengths and other measurements of the samples, by name; (N,) each
    columns: dict[str, np.ndarray]
    scores: dict[str, np.ndarray]  # keys "judge" and "witness"; (N, J) each


# ---- the evaluation of answers


def evaluate_task(
    answer: AnswerFunction,
    task: tasks.Task,
    params: EvalParams,
    *,
    grader: Grader | None = None,
    witness: Grader | None = None,
    reference: gwen.Model | None = None,
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """
    Returns the record for `eval.jsonl`, without the step, and a record for each problem.

    Each figure is a mean over problems, and the figure of a problem is the mean over its samples.

    answer: a function that samples the answers of a model on this machine or on a server.
    grader: the judge whose score is the reward "rubric". witness: a judge that training never uses.
    reference: the model before training, or a model that `lora.use_initial_weights` turns into
    that model; without a reference, the record has no KL divergence.

    Raises ValueError, before any answer is sampled, if there are no problems, if a prompt is too
    long, or if a reward reads a column that the problems lack.
    """
    begin = time.perf_counter()
    numbers = pick_evenly_spaced(list(range(len(task.held_out))), params.limit)
    problems = [task.held_out[number] for number in numbers]
    if not problems:
        raise ValueError(
            "no problem is held out, so there is nothing to evaluate; supply held-out problems "
            "with --data HELD_OUT.jsonl"
        )
    for name, reward in task.rewards.items():
        arguments = reward_argument_names(problems, task.has_environments_or_harness)
        select_argument_names(name, reward, arguments)

    sampled, greedy = answer(problems, params)
    answers = grade_and_measure_answers(task, sampled, greedy, grader, witness)
    figures = collect_all_figures_per_problem(task, answers, params.samples)
    record: dict[str, Any] = {}
    for name, column in figures.items():
        record[f"eval/{name}"] = statistics.mean_ignoring_nan(column)
        record[f"eval/{name}_ci95"] = statistics.confidence_half_width(column)

    record["eval/kl"] = None
    if reference is not None:
        temperature = params.temperature or 1.0
        record["eval/kl"] = mean_kl_to_reference(reference, answers.sampled, temperature)
    record["eval/entropy"] = mean_token_entropy(answers.sampled)
    for name, values in answers.logged.metrics.items():
        record[f"eval/metric/{name}"] = float(np.mean(values))
    record["eval/unparsed_frac"] = None
    if grader:
        record["eval/unparsed_frac"] = float(np.isnan(answers.scores["judge"]).mean())
    record["eval/num"] = len(problems)
    record["eval/known"] = int((~np.isnan(figures[task.metric])).sum())
    record["eval/samples"] = params.samples
    record["eval/s"] = time.perf_counter() - begin

    details = make_problem_records(
        numbers, answers, params.samples, has_verifier=bool(task.verifier)
    )
    return run_files.replace_nonfinite_by_none(record), details


def grade_and_measure_answers(
    task: tasks.Task,
    sampled: list[Sample],
    greedy: list[Sample],
    grader: Grader | None,
    witness: Grader | None,
) -> GradedAnswers:
    """Rewards, verifies and judges the answers, and measures their lengths and repetition."""
    sampled, values, logged = assign_rewards_and_verify(task, grader, sampled)
    if task.verifier:  # skip the rewards, because the verifier alone gives the values
        _, greedy_values, _ = assign_rewards_and_verify(task._replace(rewards={}), None, greedy)
    else:
        _, greedy_values, _ = assign_rewards_and_verify(task, grader, greedy)

    columns: dict[str, np.ndarray] = {}
    for name in sampled[0].reward_components:
        components = [sample.reward_components[name] for sample in sampled]
        columns[f"reward/{name}"] = np.array(components)
    columns |= measure_length_refusal_and_repetition(sampled)

    scores: dict[str, np.ndarray] = {}
    if grader is not None:
        scores["judge"] = np.array([sample.scores for sample in sampled])
    if witness is not None:
        judgement = judge_samples(witness, sampled)
        columns["witness"] = judgement.rewards
        scores["witness"] = judgement.scores
    for kind, judge in (("judge", grader), ("witness", witness)):
        if judge:
            for index, criterion in enumerate(judge.rubric.criteria):
                columns[f"{kind}/{criterion.name}"] = scores[kind][:, index]
    return GradedAnswers(sampled, values, logged, greedy, greedy_values, columns, scores)


def collect_all_figures_per_problem(
    task: tasks.Task, answers: GradedAnswers, num_samples: int
) -> dict[str, np.ndarray]:
    """
    Returns all figures of an evaluation by name, with one value per problem, (P,).

    The figures of a category have values only for the problems in the category.
    """
    figures = compute_figures_per_problem(task, answers.sampled, answers.values, num_samples)
    figures["greedy"] = answers.greedy_values
    figures["witness"] = np.full(1, np.nan)  # replaced below if a witness gave scores
    for name, column in answers.columns.items():
        figures[name] = mean_over_samples(column, num_samples)
    categories = [sample.example.get("category") for sample in answers.sampled[::num_samples]]
    return figures | split_accuracy_and_judge_by_category(figures, categories)


def make_problem_records(
    numbers: list[int], answers: GradedAnswers, num_samples: int, *, has_verifier: bool
) -> list[dict[str, Any]]:
    """
    Returns a record of each problem, with its answers and their values.

    numbers: the index of each problem in the whole held-out data.
    """
    rewards = rewards_or_nan_if_unreadable(answers.sampled)
    details = []
    for index, number in enumerate(numbers):
        rows = slice(index * num_samples, (index + 1) * num_samples)
        samples = answers.sampled[rows]
        example = samples[0].example
        detail: dict[str, Any] = {"problem": number}
        for name in ("prompt", "answer", "category"):
            detail[name] = example.get(name)
        detail["completions"] = [sample.text for sample in samples]
        detail["values"] = round_with_none_for_nan(answers.values[rows])
        if has_verifier:
            detail["reward"] = round_with_none_for_nan(rewards[rows])
        detail["rewards"] = {
            name: round_with_none_for_nan(answers.columns[f"reward/{name}"][rows])
            for name in samples[0].reward_components
        }
        for judge in ("judge", "witness"):
            detail[f"{judge}_scores"] = None
            if judge in answers.scores:
                detail[f"{judge}_scores"] = round_with_none_for_nan(answers.scores[judge][rows])
        detail["greedy"] = answers.greedy[index].text
        detail["greedy_value"] = round_with_none_for_nan(answers.greedy_values[index])
        conversations = [
            sample.conversation["messages"] for sample in samples if sample.conversation
        ]
        if conversations:
            detail["messages"] = conversations
        details.append(detail)
    return details


def answer_sampled_and_greedy(
    model: gwen.Model, tokenizer: Any, problems: list[Example], params: EvalParams
) -> tuple[list[Sample], list[Sample]]:
    """
    Returns two lists: K samples for each problem, and one greedy sample for each problem.

    Only the samples in the first list have entropies.
    """
    prompts = params.encode_prompts(tokenizer, model.config.max_position_embeddings, problems)
    lengths = [len(prompt) for prompt in prompts]

    def rows_fit_in_memory(num_rows: int) -> bool:
        num_bytes = rollout_bytes(
            model.config,
            model.head_weight.dtype,
            lengths,
            params.samples,
            params.max_tokens,
            num_rows,
        )
        return sum(num_bytes) <= ROOM * (memory.usable_memory_bytes() - mx.get_active_memory())

    batch_size = params.batch_size
    if batch_size is None:
        batch_size = memory.BatchSize(
            choose_rollout_rows(rows_fit_in_memory, len(prompts) * params.samples)
        )
    sampling = sampler.SamplingParams(
        params.max_tokens,
        params.temperature,
        eos_ids=model.config.end_ids,
        stop=sampler.StopTexts(params.stop, tokenizer) if params.stop else None,
        entropy=True,
    )

    def generate_samples(num_samples: int, sampling: sampler.SamplingParams) -> list[Sample]:
        samples, _ = generate_completions(
            model,
            tokenizer,
            new_samples(problems, prompts, num_samples),
            sampling,
            key=KEY + params.seed,
            # both calls share this object, so a size reduced to save memory stays reduced
            batch_size=batch_size,
            toolbox=params.toolbox,
            player=params.player,
            environment_seed="held out",
            is_evaluation=True,
        )
        return samples

    sampled = generate_samples(params.samples, sampling)
    greedy = generate_samples(1, sampling._replace(temperature=0.0, entropy=False))
    return sampled, greedy


# ---- the evaluation of given replies

# the figures of `evaluate_loss_on_replies` that a record of sampled answers does not replace
LOSS_FIGURES = ("eval/loss", "eval/loss_ci95", "eval/perplexity", "eval/losses")


def join_loss_and_answers(
    loss_record: dict[str, Any], answers_record: dict[str, Any]
) -> dict[str, Any]:
    """
    Joins the records of `evaluate_loss_on_replies` and `evaluate_task` for one evaluation.

    If both records have a figure, such as the entropy, the figure of the sampled answers is kept.
    `eval/s` is the sum of both durations.
    """
    losses = {name: loss_record[name] for name in LOSS_FIGURES}
    seconds = loss_record["eval/s"] + answers_record["eval/s"]
    return answers_record | losses | {"eval/s": seconds}


def evaluate_loss_on_replies(
    model: gwen.Model,
    step_loss: StepLoss,
    conversations: list[list[TrainingRow]],
    token_budget: int,
) -> dict[str, Any]:
    """
    Evaluates the loss on held-out replies. Returns the record for `eval.jsonl`, without the step.

    The loss is in nats per token.

    conversations: for each conversation, the rows of tokens into which it is divided.
    token_budget: the maximum number of token positions in a batch.
    """
    begin = time.perf_counter()
    samples = []
    for group, rows in enumerate(conversations):
        samples += [sample_from_conversation(*row, group) for row in rows]

    num = len(conversations)
    sums = np.zeros((3, num))  # negative log-probabilities, entropies, tokens
    for batch in make_batches(samples, token_budget):
        if batch.is_local:
            logprobs, entropy = step_loss.logprobs_and_entropies(model, batch)
            stacked = mx.stack([-logprobs * batch.mask, entropy * batch.mask, batch.mask])
            row_sums = np.array(stacked, np.float64).sum(-1)
            for index, row in enumerate(batch.rows):
                sums[:, samples[row].group] += row_sums[:, index]

    losses, entropies, tokens = sum(world.all_gather(sums))
    num_tokens = tokens.sum()
    loss = losses.sum() / num_tokens
    # half the width of the 95% interval of the loss, which is a ratio of sums over conversations
    confidence_half_width = None
    if num > 1:
        squares = ((losses - loss * tokens) ** 2).sum()
        confidence_half_width = 1.96 * math.sqrt(squares * num / (num - 1)) / num_tokens
    loss_by_conversation = None
    if math.isfinite(loss):
        loss_by_conversation = np.stack([losses.round(4), tokens], 1).tolist()
    record = {
        "eval/loss": float(loss),
        "eval/loss_ci95": confidence_half_width,
        "eval/perplexity": math.exp(min(loss, 700.0)),  # a larger exponent would overflow
        "eval/entropy": float(entropies.sum() / num_tokens),
        "eval/tokens": float(num_tokens / num),
        "eval/losses": loss_by_conversation,
        "eval/num": num,
        "eval/s": time.perf_counter() - begin,
    }
    return run_files.replace_nonfinite_by_none(record)
