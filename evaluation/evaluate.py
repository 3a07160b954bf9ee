"""
The evaluation of held-out problems. Runs and the command `evaluate.py` use the same functions.

The model answers each held-out problem with K completions at temperature 1, sampled with a fixed
seed, and with one greedy completion. If a task has right answers, its evaluation reports the
accuracy by the task's verifier, on which training rewards have no influence. Other tasks report the
weighted sum of their rewards. If a judge gives such a reward, a witness scores the answers too. The
witness is a judge with a second rubric, which training never uses.

This file does not cover training problems, the single measurements (evaluation/measures.py) and
the choice of the model that answers (evaluation/policy.py).

Axes: P problems, K samples of each, N = P * K completions, problem-major; T completion positions,
J criteria.
"""

import math
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np

import gwen
import sampler
import tasks
from config import Config
from disk import run_files, statistics
from evaluation.measures import (
    compute_figures,
    grade,
    logged_rewards,
    mean_by_problem,
    mean_entropy,
    measure_divergence,
    measure_form,
    round_for_json,
    split_by_category,
)
from judging.rubrics import Grader
from machine import memory, world
from prompts import chat_template
from prompts.chats import Row
from prompts.examples import Example, spread_evenly
from rewards.rewards import Logged, reward_argument_names, reward_columns
from step.batch import make_batches
from step.generation import generate_completions
from step.loss import StepLoss
from step.rows import ROOM, choose_rollout_rows, rollout_bytes
from step.sample import Sample, new_samples, sample_from_conversation
from step.scoring import judge_samples
from tools.episodes import Toolbox

KEY = 1 << 96  # RNG key of evaluations; training keys are smaller


class EvalParams(NamedTuple):
    """How to answer held-out problems."""

    max_tokens: int
    # rows decoded at once; None: as many as fit into memory
    batch_size: memory.BatchSize | None = None
    samples: int = 1  # completions per problem
    limit: int | None = None  # the most problems, which are evenly spread
    thinking: bool = False
    temperature: float = 1.0
    seed: int = 0
    stop: Sequence[str] = ()  # texts that end a completion
    toolbox: Toolbox | None = None

    @classmethod
    def from_config(cls, config: Config, **changes: Any) -> "EvalParams":
        """The parameters that a run with these settings uses, with `changes`."""
        params = cls(
            config.sampling.max_tokens,
            thinking=config.sampling.thinking,
            stop=config.sampling.stop,
            limit=config.evaluation.limit or None,
        )
        return params._replace(**changes)

    def render_prompts(
        self,
        tokenizer: Any,
        context: int,
        examples: Iterable[Example],
        kind: str = "held-out prompt",
    ) -> list[list[int]]:
        """
        The token ids of every prompt.

        Raises ValueError if a prompt leaves no room for its completion in the model's context.
        """
        if self.toolbox:
            return [self.toolbox.encode_prompt(example) for example in examples]
        return chat_template.encode_prompts(
            tokenizer,
            examples,
            max_tokens=self.max_tokens,
            context=context,
            thinking=self.thinking,
            kind=kind,
        )


# a function that returns K samples and one greedy sample of each problem, as `answer_both` does
AnswerFunction = Callable[[list[Example], EvalParams], tuple[list[Sample], list[Sample]]]


class GradedAnswers(NamedTuple):
    """The answers of an evaluation, with their rewards and scores."""

    sampled: list[Sample]  # N
    values: np.ndarray  # (N,) the reported value of each sample
    logged: Logged  # what the reward functions logged about the samples
    greedy: list[Sample]  # P
    greedy_values: np.ndarray  # (P,)
    # rewards, measurements of form, and scores, by name; (N,) each
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
    The record for `eval.jsonl`, without `step`, and one record per held-out problem.

    Figures are means over problems. A problem's figure is the mean over its completions.

    answer: the function that answers, `answer_both` with a model or the method of a served policy.
    grader: the judge whose score is the reward "rubric". witness: a judge that training never uses.
    reference: the model before training, or a model that `lora.with_initial_weights` turns into it;
    None if there is neither.

    Raises ValueError before decoding if there are no problems, if a prompt is too long, or if a
    reward reads a missing column.
    """
    begin = time.perf_counter()
    numbers = spread_evenly(list(range(len(task.held_out))), params.limit)
    problems = [task.held_out[number] for number in numbers]
    if not problems:
        raise ValueError(
            "no prompt is held out, so there is nothing to evaluate; give --data HELD_OUT.jsonl"
        )
    for name, reward in task.rewards.items():
        arguments = reward_argument_names(problems, bool(task.environments))
        reward_columns(name, reward, arguments)

    sampled, greedy = answer(problems, params)
    answers = grade_answers(task, sampled, greedy, grader, witness)
    figures = collect_figures(task, answers, params.samples)
    record: dict[str, Any] = {}
    for name, column in figures.items():
        record[f"eval/{name}"] = statistics.mean(column)
        record[f"eval/{name}_ci95"] = statistics.half_width(column)

    record["eval/kl"] = None
    if reference is not None:
        temperature = params.temperature or 1.0
        record["eval/kl"] = measure_divergence(reference, answers.sampled, temperature)
    record["eval/entropy"] = mean_entropy(answers.sampled)
    for name, values in answers.logged.metrics.items():
        record[f"eval/metric/{name}"] = float(np.mean(values))
    record["eval/unparsed_frac"] = None
    if grader:
        record["eval/unparsed_frac"] = float(np.isnan(answers.scores["judge"]).mean())
    record["eval/num"] = len(problems)
    record["eval/known"] = int((~np.isnan(figures[task.metric])).sum())
    record["eval/samples"] = params.samples
    record["eval/s"] = time.perf_counter() - begin

    details = describe_problems(numbers, answers, params.samples, has_verifier=bool(task.verifier))
    return run_files.without_infinities(record), details


def grade_answers(
    task: tasks.Task,
    sampled: list[Sample],
    greedy: list[Sample],
    grader: Grader | None,
    witness: Grader | None,
) -> GradedAnswers:
    """Calls the rewards, the verifier and the judges, and measures the form of the answers."""
    sampled, values, logged = grade(task, grader, sampled)
    if task.verifier:  # it needs no rewards
        _, greedy_values, _ = grade(task._replace(rewards={}), None, greedy)
    else:
        _, greedy_values, _ = grade(task, grader, greedy)

    columns: dict[str, np.ndarray] = {}
    for name in sampled[0].reward_components:
        components = [sample.reward_components[name] for sample in sampled]
        columns[f"reward/{name}"] = np.array(components)
    columns |= measure_form(sampled)

    scores: dict[str, np.ndarray] = {}
    if grader is not None:
        scores["judge"] = np.array([sample.scores for sample in sampled])
    if witness is not None:
        judgement = judge_samples(witness, sampled)
        columns["witness"] = judgement.rewards
        scores["witness"] = judgement.scores
    for kind, judge in (("judge", grader), ("witness", witness)):
        if judge:
            for place, criterion in enumerate(judge.rubric.criteria):
                columns[f"{kind}/{criterion.name}"] = scores[kind][:, place]
    return GradedAnswers(sampled, values, logged, greedy, greedy_values, columns, scores)


def collect_figures(
    task: tasks.Task, answers: GradedAnswers, num_samples: int
) -> dict[str, np.ndarray]:
    """Every figure of an evaluation by name. Each is (P,), or shorter for a category."""
    figures = compute_figures(task, answers.sampled, answers.values, num_samples)
    figures["greedy"] = answers.greedy_values
    figures["witness"] = np.full(1, np.nan)  # replaced below if a witness scored
    for name, column in answers.columns.items():
        figures[name] = mean_by_problem(column, num_samples)
    categories = [sample.example.get("category") for sample in answers.sampled[::num_samples]]
    return figures | split_by_category(figures, categories)


def describe_problems(
    numbers: list[int], answers: GradedAnswers, num_samples: int, *, has_verifier: bool
) -> list[dict[str, Any]]:
    """A record of each problem, its answers and their values. numbers: the problems' numbers."""
    rewards = logged_rewards(answers.sampled)
    details = []
    for place, number in enumerate(numbers):
        rows = slice(place * num_samples, (place + 1) * num_samples)
        samples = answers.sampled[rows]
        example = samples[0].example
        detail: dict[str, Any] = {"problem": number}
        for name in ("prompt", "answer", "category"):
            detail[name] = example.get(name)
        detail["completions"] = [sample.text for sample in samples]
        detail["values"] = round_for_json(answers.values[rows])
        if has_verifier:
            detail["reward"] = round_for_json(rewards[rows])
        detail["rewards"] = {
            name: round_for_json(answers.columns[f"reward/{name}"][rows])
            for name in samples[0].reward_components
        }
        for judge in ("judge", "witness"):
            detail[f"{judge}_scores"] = None
            if judge in answers.scores:
                detail[f"{judge}_scores"] = round_for_json(answers.scores[judge][rows])
        detail["greedy"] = answers.greedy[place].text
        detail["greedy_value"] = round_for_json(answers.greedy_values[place])
        conversations = [
            sample.conversation["messages"] for sample in samples if sample.conversation
        ]
        if conversations:
            detail["messages"] = conversations
        details.append(detail)
    return details


def answer_both(
    model: gwen.Model, tokenizer: Any, problems: list[Example], params: EvalParams
) -> tuple[list[Sample], list[Sample]]:
    """K samples of each problem with their entropies, and one greedy sample of each problem."""
    prompts = params.render_prompts(tokenizer, model.config.max_position_embeddings, problems)
    lengths = [len(prompt) for prompt in prompts]

    def fits(rows: int) -> bool:
        num_bytes = rollout_bytes(
            model.config,
            model.head_weight.dtype,
            lengths,
            params.samples,
            params.max_tokens,
            rows,
        )
        return sum(num_bytes) <= ROOM * (memory.memory_size() - mx.get_active_memory())

    batch_size = params.batch_size
    if batch_size is None:
        batch_size = memory.BatchSize(choose_rollout_rows(fits, len(prompts) * params.samples))
    sampling = sampler.SamplingParams(
        params.max_tokens,
        params.temperature,
        eos_ids=model.config.end_ids,
        stop=sampler.Stop(params.stop, tokenizer) if params.stop else None,
        entropy=True,
    )

    def generate(num_samples: int, sampling: sampler.SamplingParams) -> list[Sample]:
        samples, _ = generate_completions(
            model,
            tokenizer,
            new_samples(problems, prompts, num_samples),
            sampling,
            key=KEY + params.seed,
            # both calls share this object, so the second call keeps a size that memory reduced
            batch_size=batch_size,
            toolbox=params.toolbox,
            seed="held out",
        )
        return samples

    sampled = generate(params.samples, sampling)
    greedy = generate(1, sampling._replace(temperature=0.0, entropy=False))
    return sampled, greedy


# ---- the evaluation of given replies


def evaluate_replies(
    model: gwen.Model, step_loss: StepLoss, conversations: list[list[Row]], token_budget: int
) -> dict[str, Any]:
    """
    The record for `eval.jsonl`, without `step`, of an evaluation on held-out replies.

    Its figures are the loss in nats per token and the perplexity. conversations: for each
    conversation its rows.
    """
    begin = time.perf_counter()
    samples = []
    for group, rows in enumerate(conversations):
        samples += [sample_from_conversation(*row, group) for row in rows]

    num = len(conversations)
    sums = np.zeros((3, num))  # negative log-probabilities, entropies, tokens
    for batch in make_batches(samples, token_budget):
        if batch.is_local:
            logprobs, entropy = step_loss.logprobs(model, batch)
            stacked = mx.stack([-logprobs * batch.mask, entropy * batch.mask, batch.mask])
            row_sums = np.array(stacked, np.float64).sum(-1)
            for place, row in enumerate(batch.rows):
                sums[:, samples[row].group] += row_sums[:, place]

    losses, entropies, tokens = sum(world.all_gather(sums))
    num_tokens = tokens.sum()
    loss = losses.sum() / num_tokens
    # half of the 95% interval of the loss, a ratio of two sums over conversations
    half_width = None
    if num > 1:
        squares = ((losses - loss * tokens) ** 2).sum()
        half_width = 1.96 * math.sqrt(squares * num / (num - 1)) / num_tokens
    loss_by_conversation = None
    if math.isfinite(loss):
        loss_by_conversation = np.stack([losses.round(4), tokens], 1).tolist()
    record = {
        "eval/loss": float(loss),
        "eval/loss_ci95": half_width,
        "eval/perplexity": math.exp(min(loss, 700.0)),  # a loss above 700 would overflow the float
        "eval/entropy": float(entropies.sum() / num_tokens),
        "eval/tokens": float(num_tokens / num),
        "eval/losses": loss_by_conversation,
        "eval/num": num,
        "eval/s": time.perf_counter() - begin,
    }
    return run_files.without_infinities(record)
