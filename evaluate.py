"""
Held-out evaluation: `uv run evaluate.py --run runs/NAME [--step N]`, or `--model M [--adapter DIR] --task T`; with
`--url` of the same model as a server runs it.

Each held-out problem gets `samples` completions at temperature 1 from a fixed seed, and one greedy completion. A task
with a right answer reports its verifier's accuracy, which training rewards cannot bend. Other tasks report the weighted
sum of their rewards. If a judge scores them, a witness does too: a second rubric that training never sees.
A run evaluates with the same function, so `--run` repeats its figures to the digit.

Left out: training problems. Axes: P problems, K samples of each, N = P * K completions, problem-major;
T completion positions, J criteria.
"""

import functools
import json
import math
import sys
import time
from argparse import Namespace
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import cpu_blas  # noqa: F401  (before mlx)
import mlx.core as mx
import numpy as np

import grpo
import gwen
import judge
import lora
import sampler
import tasks
from config import JUDGE, SETTINGS, TOOLS, Config, Sizes
from disk import adapters, run_files
from flags import (
    Parser,
    add_flags,
    check_least,
    escape_invisible,
    flag_of,
    names_path,
    refuse_unwritable_file,
    report_mistakes,
)
from judging.rubrics import Grader
from layers import lm_head
from machine import alive, memory, world
from machine.output import guard_output
from problems import chat_template, episodes
from problems.chats import Row, render_conversations
from problems.episodes import Toolbox, end_tools
from problems.examples import Example, prompt_key, prompt_text, spread_evenly
from problems.form import is_degenerate, is_refusal, repetition
from problems.rewards import Logged, reward_arguments, reward_columns
from settings.checks import check_settings
from settings.sources import given_settings, load_recipe, load_task_defaults, resolve_settings
from step.batch import completion_hidden_states, make_batches
from step.generation import generate_completions
from step.loss import StepLoss
from step.rows import ROOM, choose_rollout_rows, rollout_bytes
from step.sample import Sample, new_samples, pad_rows, sample_of_reply
from step.scoring import assign_rewards, compute_rewards, judge_samples

if TYPE_CHECKING:
    from step.served import ServedPolicy

KEY = 1 << 96  # RNG key of evaluations; training keys are smaller
REFERENCE_TOKENS = 2048  # positions in one batch of the reference model


# ---- completions and their rewards


def grade(
    task: tasks.Task, grader: Grader | None, samples: list[Sample]
) -> tuple[list[Sample], np.ndarray, Logged]:
    """
    The samples with their rewards, the reported value of each, (N,), and what rewards logged.

    The value is 1 for a right answer; without a verifier the weighted sum of the rewards, as in training, where an
    unreadable score of the judge counts as the mean of the others. nan: it is not known.
    """
    components, logged = compute_rewards(task.rewards, samples, task.reward_weights)
    scores = None
    if grader is not None:
        judgement = judge_samples(grader, samples)
        components["rubric"], scores = judgement.rewards, judgement.scores
    samples = assign_rewards(
        samples, components, task.reward_weights, scores, compares_whole_step=True
    )
    if task.verifier is None:
        return samples, np.array([one.logged_reward for one in samples]), logged
    return samples, compute_rewards({"correct": task.verifier}, samples)[0]["correct"], logged


# ---- other measurements


def measure_divergence(reference: gwen.Model, samples: list[Sample], temperature: float) -> float:
    """
    KL(sampling policy, `reference` before training) in nats per token; see `lora.with_initial_weights`.

    The mean over completion tokens of k3, exp(d) - d - 1 with d = log reference - log policy, in float64, at most
    `grpo.LARGEST_KL_LOG_RATIO`.
    Source: see `grpo.kl_term`.
    """
    found, batches = dict[int, np.ndarray](), make_batches(samples, REFERENCE_TOKENS, "off")
    with lora.with_initial_weights(reference):
        for batch in alive.Bar(
            [batch for batch in batches if batch.is_local], desc="reference", unit="part"
        ):
            states, head_weight, ids = (
                completion_hidden_states(reference, batch),
                reference.head_weight,
                batch.completion_ids,
            )
            new = lm_head.token_logprobs(
                states, head_weight, ids, temperature=temperature, gradient=False
            )[0]
            found |= {
                row: its for row, its in zip(batch.rows, np.array(new * batch.mask), strict=True)
            }  # wait
    policy = pad_rows([one.logprobs for one in samples if one.logprobs is not None])
    difference = (
        pad_rows(
            [
                its[: len(one.loss_positions)]
                for one, its in zip(samples, world.gather_by_number(found), strict=True)
            ]
        )
        - policy
    )
    difference = np.minimum(difference, grpo.LARGEST_KL_LOG_RATIO)
    return float(
        (np.expm1(difference) - difference).sum() / sum(len(one.loss_positions) for one in samples)
    )


def evaluate_replies(
    model: gwen.Model, step_loss: StepLoss, talks: list[list[Row]], token_budget: int
) -> dict[str, Any]:
    """The record of `eval.jsonl` without `step`: loss, nats per token, and perplexity of held-out replies."""
    begin, num = time.perf_counter(), len(talks)
    samples = [sample_of_reply(*row, group) for group, rows in enumerate(talks) for row in rows]
    sums = np.zeros((3, num))  # negative log-probabilities, entropies, tokens
    for batch in make_batches(samples, token_budget):
        if batch.is_local:
            logprobs, entropy = step_loss.logprobs(model, batch)
            parts = np.array(
                mx.stack([-logprobs * batch.mask, entropy * batch.mask, batch.mask]), np.float64
            ).sum(-1)
            for place, row in enumerate(batch.rows):
                sums[:, samples[row].group] += parts[:, place]
    losses, entropies, tokens = sum(world.all_gather(sums))
    total = tokens.sum()
    loss = losses.sum() / total
    reach = None  # half of the 95% interval of a ratio of two sums over conversations, each with its rows
    if num > 1:
        reach = 1.96 * math.sqrt(((losses - loss * tokens) ** 2).sum() * num / (num - 1)) / total
    record = {
        "eval/loss": float(loss),
        "eval/loss_ci95": reach,
        "eval/perplexity": math.exp(min(loss, 700.0)),  # of more there is no float
        "eval/entropy": float(entropies.sum() / total),
        "eval/tokens": float(total / num),
        "eval/losses": np.stack([losses.round(4), tokens], 1).tolist()
        if math.isfinite(loss)
        else None,
        "eval/num": num,
        "eval/s": time.perf_counter() - begin,
    }
    return run_files.without_infinities(record)


# ---- an evaluation


class EvalParams(NamedTuple):
    """How to answer held-out problems."""

    max_tokens: int
    batch_size: memory.BatchSize | None = None  # None: as `rows_at_once`
    samples: int = 1  # completions per problem
    limit: int | None = None  # most problems, evenly spread
    thinking: bool = False
    temperature: float = 1.0
    seed: int = 0
    stop: Sequence[str] = ()  # texts that end a completion
    toolbox: Toolbox | None = None

    @classmethod
    def from_config(cls, config: Config, **more: Any) -> "EvalParams":
        """As a run of these settings evaluates, but for `more`."""
        settings, limit = config.sampling, config.evaluation.limit or None
        how: dict[str, Any] = {"thinking": settings.thinking, "stop": settings.stop, "limit": limit}
        return cls(settings.max_tokens, **how | more)

    def render_prompts(
        self,
        tokenizer: Any,
        context: int,
        examples: Iterable[Example],
        kind: str = "held-out prompt",
    ) -> list[list[int]]:
        """The ids of every prompt. ValueError names one that leaves no room for its completion in a model's context."""
        if self.toolbox:
            return list(map(self.toolbox.prompt, examples))
        how: dict[str, Any] = {"max_tokens": self.max_tokens, "thinking": self.thinking}
        return chat_template.encode_prompts(tokenizer, examples, context=context, kind=kind, **how)


Answer = Callable[
    [list[Example], EvalParams], tuple[list[Sample], list[Sample]]
]  # see `answer_both`


def evaluate(
    answer: Answer,
    task: tasks.Task,
    params: EvalParams,
    *,
    grader: Grader | None = None,
    witness: Grader | None = None,
    reference: gwen.Model | None = None,
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """
    The record of `eval.jsonl` (without `step`) and one record per held-out problem.

    Figures are means over problems, each the mean of its completions.

    answer: `answer_both` of a model, or a server's. grader: the judge whose score is the reward "rubric". witness: a
    judge that training never uses. reference: the model before training, or one that `lora.with_initial_weights` makes it;
    None if unavailable.
    Raises ValueError before decoding if there are no problems, a prompt is too long or a reward lacks a column.
    """
    begin = time.perf_counter()
    numbers = spread_evenly(list(range(len(task.held_out))), params.limit)
    problems = [task.held_out[number] for number in numbers]
    if not problems:
        raise ValueError(
            "no prompt is held out, so there is nothing to evaluate; give --data HELD_OUT.jsonl"
        )
    for name, reward in task.rewards.items():
        reward_columns(name, reward, reward_arguments(problems, bool(task.environments)))
    sampled, greedy = answer(problems, params)
    sampled, values, logged = grade(task, grader, sampled)
    others = (
        (task._replace(rewards={}), None) if task.verifier else (task, grader)
    )  # a verifier needs no rewards
    greedy_values, samples = grade(*others, greedy)[1], params.samples
    earned = np.array([one.logged_reward for one in sampled])

    columns = {
        f"reward/{name}": np.array([one.reward_components[name] for one in sampled])
        for name in sampled[0].reward_components
    }
    columns |= measure_form(sampled)
    scores: dict[str, np.ndarray] = {}  # (N, J) each, by who gave them
    if grader is not None:
        scores["judge"] = np.array([one.scores for one in sampled])
    if witness is not None:
        columns["witness"], scores["witness"], *_ = judge_samples(witness, sampled)
    for kind, by in (("judge", grader), ("witness", witness)):
        for place, criterion in enumerate(by.rubric.criteria if by else []):
            columns[f"{kind}/{criterion.name}"] = scores[kind][:, place]
    figures = compute_figures(task, sampled, values, samples) | {
        "greedy": greedy_values,
        "witness": np.full(1, np.nan),
    }
    figures |= {name: mean_by_problem(column, samples) for name, column in columns.items()}
    categories = np.array([one.example.get("category") for one in sampled[::samples]], object)
    if len(kinds := sorted({*categories} - {None})) > 1:
        split = [name for name in figures if name == "accuracy" or name.startswith("judge/")]
        figures |= {
            f"{name}/{kind}": figures[name][categories == kind] for name in split for kind in kinds
        }
    record: dict[str, Any] = {}
    for name, column in figures.items():
        record |= {
            f"eval/{name}": run_files.mean(column),
            f"eval/{name}_ci95": run_files.half_width(column),
        }
    entropies = [
        one.entropies for one in sampled if one.entropies is not None
    ]  # a server tells none
    record |= {
        "eval/kl": None
        if reference is None
        else measure_divergence(reference, sampled, params.temperature or 1.0),
        "eval/entropy": float(pad_rows(entropies).sum() / sum(map(len, entropies)))
        if entropies
        else None,
        **{f"eval/metric/{name}": float(np.mean(its)) for name, its in logged.metrics.items()},
        "eval/unparsed_frac": float(np.isnan(scores["judge"]).mean()) if grader else None,
        "eval/num": len(problems),
        "eval/known": int((~np.isnan(figures[task.metric])).sum()),
        "eval/samples": samples,
        "eval/s": time.perf_counter() - begin,
    }
    details: list[dict[str, Any]] = []
    for place, (number, one, value) in enumerate(zip(numbers, greedy, greedy_values, strict=True)):
        rows = slice(place * samples, (place + 1) * samples)
        several = sampled[rows]
        talks = [its.conversation["messages"] for its in several if its.conversation]
        details.append(
            {"problem": number}
            | {name: several[0].example.get(name) for name in ("prompt", "answer", "category")}
            | {"completions": [its.text for its in several], "values": round_for_json(values[rows])}
            | ({"reward": round_for_json(earned[rows])} if task.verifier else {})
            | {
                "rewards": {
                    name: round_for_json(columns[f"reward/{name}"][rows])
                    for name in several[0].reward_components
                }
            }
            | {
                f"{by}_scores": round_for_json(scores[by][rows]) if by in scores else None
                for by in ("judge", "witness")
            }
            | {"greedy": one.text, "greedy_value": round_for_json(value)}
            | ({"messages": talks} if talks else {})
        )
    return run_files.without_infinities(record), details


def answer_both(
    model: gwen.Model, tokenizer: Any, problems: list[Example], params: EvalParams
) -> tuple[list[Sample], list[Sample]]:
    """Each problem's samples with their entropies, and one greedy completion."""
    prompts = params.render_prompts(tokenizer, model.config.max_position_embeddings, problems)
    lengths, dtype, samples = list(map(len, prompts)), model.head_weight.dtype, params.samples

    def fits(rows: int) -> bool:
        work = model.config, dtype, lengths, samples, params.max_tokens, rows
        return sum(rollout_bytes(*work)) <= ROOM * (memory.memory_size() - mx.get_active_memory())

    # both calls share one object, and so what it learns about memory
    size = params.batch_size or memory.BatchSize(choose_rollout_rows(fits, len(prompts) * samples))
    stop, ends = sampler.Stop(params.stop, tokenizer) if params.stop else None, model.config.end_ids
    sampling = sampler.SamplingParams(
        params.max_tokens, params.temperature, eos_ids=ends, stop=stop, entropy=True
    )
    how: dict[str, Any] = {
        "key": KEY + params.seed,
        "batch_size": size,
        "toolbox": params.toolbox,
        "seed": "held out",
    }
    sampled, _ = generate_completions(
        model, tokenizer, new_samples(problems, prompts, samples), sampling, **how
    )
    sampling = sampling._replace(temperature=0.0, entropy=False)
    greedy, _ = generate_completions(
        model, tokenizer, new_samples(problems, prompts, 1), sampling, **how
    )
    return sampled, greedy


def round_for_json(values: np.ndarray) -> Any:
    """Values for JSON, to four digits; None where unreadable."""
    return np.where(np.isnan(values), np.array(None), values.round(4).astype(object)).tolist()


def mean_by_problem(column: np.ndarray, samples: int) -> np.ndarray:
    """Means over each problem's samples, (N,) -> (P,); nan where none is readable."""
    return np.array(
        [run_files.mean(row) for row in column.reshape(-1, samples)], np.float64
    )  # None becomes nan


def measure_form(samples: list[Sample]) -> dict[str, np.ndarray]:
    """What tells of answers that are none, and their lengths, each (N,)."""
    forms: dict[str, list[float]] = {
        "tokens": [len(one.loss_positions) for one in samples],
        "truncated_frac": [one.finish_reason == "length" for one in samples],
        "refusals": [is_refusal(one.text) for one in samples],
        "repeated": [repetition(one.text) for one in samples],
        "degenerate": [
            is_degenerate(one.text, prompt_text(one.example["prompt"])) for one in samples
        ],
    }
    return {name: np.array(values, np.float64) for name, values in forms.items()}


def compute_figures(
    task: tasks.Task, sampled: list[Sample], values: np.ndarray, samples: int
) -> dict[str, np.ndarray]:
    """The figures of the reported values, each (P,); with a verifier more."""
    figures = dict.fromkeys((task.metric, "mean_at_k"), mean_by_problem(values, samples))
    if task.verifier is None:
        return figures
    rows = values.reshape(-1, samples)  # of all K samples the unbiased estimates are these
    figures |= {"pass_at_1": rows.mean(1), f"pass_at_{samples}": rows.max(1)}
    is_whole = sampled[0].scores is not None or task.rubric is None
    if is_whole and any(reward is not task.verifier for reward in task.counted_rewards.values()):
        figures["score"] = mean_by_problem(
            np.array([one.logged_reward for one in sampled]), samples
        )
    return figures


# ---- the command

# settings that `--run` reads from the run and flags override
TAKEN = (
    *("model", "task", "task_config", "columns", "rubric", "eval_rubric"),
    *("verifier", "reward", "reward_weights"),
    *("max_tokens", "stop", "end_tokens", "rollout_batch_size", "thinking", *TOOLS, *JUDGE),
)


def load_policy(
    name: str, adapter: str | None, start: str | None = None, end_tokens: Sequence[str] = ()
) -> tuple[gwen.Model, Any, bool]:
    """Model with adapter, tokenizer, and whether switching adapters restores the untrained one; start: its adapter."""
    if adapter is None or adapters.is_full_weights(adapter):
        return *gwen.load(name, adapter=adapter, end_tokens=end_tokens), adapter is None
    gwen.warn_of_other_base(adapter, name)
    model, tokenizer = gwen.load(name, end_tokens=end_tokens)
    lora.attach_adapter(model, adapter, start)
    return model, tokenizer, True


def connect_served_policy(
    args: Namespace, config: Config, task: tasks.Task, variables: dict[str, Any]
) -> "ServedPolicy":
    """The policy at --url. Raises ValueError for what only a model here has, and where nothing tells its tokenizer."""
    from step.served import ServedPolicy

    for name in ("adapter", "step", "seed", "rollout_batch_size", "end_tokens"):
        if (value := getattr(args, name)) is not None:
            raise ValueError(
                f"{flag_of(name)} {value} is for a model here, and --url asks a server; leave it out"
            )
    if not args.run and not args.model:
        raise ValueError(
            "--url does not tell the tokenizer: name what the server runs with --model, or --run"
        )
    if task.tools or task.environments:
        raise ValueError(
            "--url asks for single answers, and this has tools; leave it out to play here"
        )
    how = config.model.name, config.sampling.max_tokens, Path(args.run or "runs")
    return ServedPolicy(args.url, args.url_model, *how, variables)


def load_run_config(run: str, flags: dict[str, Any], data: str | None = None) -> Config:
    """
    The settings of the run in a directory, overridden by flags; its first day is that of templates from now on. Raises
    ValueError if there is no run.

    A run of --loss-type sft is taken for one of its task, which has the problems to answer unless it is own, or for one
    on this `data`.
    """
    settings = load_recipe(run_files.config_file(run))
    chat_template.set_template_date(run_files.start_date(Path(run)))
    if settings.get("loss_type") == "sft":
        settings = {
            name: settings[name] for name in ("model", "task", "thinking") if name in settings
        }
        settings |= {"task": "own"} if data else {}
    return check_settings(settings | flags)


def evaluate_sft_run(
    args: Namespace, parser: Parser, adapter: str | None, start: str | None
) -> dict[str, Any]:
    """The record of a run of --loss-type sft on its held-out replies, as it has it itself."""
    for name, value in vars(args).items():
        if value != parser.get_default(name) and name not in ("run", "step", "limit"):
            fix = "leave it out, or add --data FILE with problems to answer"
            raise ValueError(
                f"{flag_of(name)} {value} changes nothing in the loss of {args.run}'s replies; {fix}"
            )
    config = check_settings(load_recipe(run_files.config_file(args.run)))
    _, held_out = tasks.load_train_and_held_out(config, Path(args.run))
    model, tokenizer, _ = load_policy(config.model.name, adapter, start, config.sampling.end_tokens)
    some = spread_evenly(held_out, args.limit or config.evaluation.limit)
    talks = render_conversations(
        some, "held-out", tokenizer, model.config, config.sampling.thinking
    )
    budget = config.optimizer.train_token_budget or REFERENCE_TOKENS
    return evaluate_replies(model, StepLoss(config, Sizes(1, budget, 0)), talks, budget)


@guard_output()
def main(argv: list[str] | None = None) -> None:
    parser = Parser("evaluate.py", "Evaluate a model on held-out problems.")
    run_files.add_adapter_flags(parser)
    parser.add_argument(
        "--url",
        help="ask the OpenAI-compatible server there, whose model is that of --run or --model",
    )
    parser.add_argument(
        "--url-model",
        default="default_model",
        metavar="NAME",
        help="its name there (mlx_lm: default)",
    )
    parser.add_argument(
        "--data", help="held-out problems from a file or hub dataset, instead of the task's"
    )
    parser.add_argument("--limit", type=int, help="only N of the problems, evenly spread")
    parser.add_argument("--samples", type=int, default=1, help="K completions a problem")
    parser.add_argument(
        "--temp", type=float, default=1.0, help="of the samples; a run's evaluations have 1"
    )
    parser.add_argument(
        "--seed", type=int, help="of the samples (default: 0, as of a run's evaluations)"
    )
    add_flags(parser, [SETTINGS[name] for name in TAKEN])
    parser.add_argument("--out", type=Path, help="a JSON line for each problem goes to this file")
    args = parser.parse_args(argv)
    flags = given_settings(args, TAKEN)
    with report_mistakes():
        check_least(args, limit=1, samples=1, temp=0, seed=0)
        if args.out:
            refuse_unwritable_file("--out", args.out)
        adapter = run_files.adapter_from_flags(args)
        if args.run:
            config, start = (
                load_run_config(args.run, flags, args.data),
                run_files.adapter_path(args.run, 0),
            )
            what = (
                f"run: {args.run}, {'newest adapter' if args.step is None else f'step {args.step}'}"
            )
        else:
            name, why = gwen.choose_model(
                args.model, args.adapter, load_task_defaults(args.task or "", "").get("model")
            )
            if args.data:
                flags = {"task": "own"} | flags
            config, start = resolve_settings(flags, None, None, lambda _: (name, why))[0], None
            what = f"model: {name}, {why}"
        if config.data.task == "own" and not config.data.path and args.run and not args.data:
            record = evaluate_sft_run(args, parser, adapter, start)
            print(escape_invisible(f"{what}\n{run_files.evaluation_line(record)}"), file=sys.stderr)
            print(json.dumps(record), flush=True)
            return
        if args.data:
            config = config.with_settings(data="", columns=args.columns or "")
        begun = tasks.read_held_out(args.run) if args.run else []
        task, trained = tasks.make_task(config, args.data, begun), set[str]()
        if args.run and args.data:
            try:
                past = check_settings(load_recipe(run_files.config_file(args.run)))
                trained = set(
                    map(prompt_key, tasks.load_train_and_held_out(past, Path(args.run))[0])
                )
            except ValueError as error:  # of a run whose data or rewards are gone
                said = f"WARNING: whether it was trained on prompts of --data {args.data} is unknown: {error}"
                print(escape_invisible(said), file=sys.stderr)
        if seen := sum(prompt_key(example) in trained for example in task.held_out):
            theirs = f"{seen} of the {len(task.held_out)} prompts of --data {args.data}"
            print(
                escape_invisible(f"WARNING: {theirs} are among those it was trained on."),
                file=sys.stderr,
            )
        base: gwen.Model | None = None
        if args.url:
            served = connect_served_policy(
                args,
                config,
                task,
                {"enable_thinking": args.thinking} if "thinking" in flags else {},
            )
            answer, tokenizer, facts, is_base = (
                served.answer_problems,
                served.tokenizer,
                served.facts,
                False,
            )
            what += f"; as {args.url_model} at {args.url}"
        else:
            base, tokenizer, is_base = load_policy(
                config.model.name, adapter, start, config.sampling.end_tokens
            )
            answer, facts = functools.partial(answer_both, base, tokenizer), base.config
        scored = task.rubric is not None and task.verifier is None
        if not is_base and config.judges_itself and (scored or task.witness is not None):
            base, is_base = gwen.load(config.model.name)[0], True
        grader, witness = judge.make_graders(
            config, task.rubric if scored else None, task.witness, base, tokenizer
        )
        if args.run and (its := grader or witness):  # they share what they know
            its.load_scores(list(run_files.read_log(Path(args.run) / "judge_scores.jsonl")))
        notes = escape_invisible("\n".join([f"{what}; task: {task.name}", *task.notes]))
        print(alive.wrap_for_terminal(notes, sys.stderr), file=sys.stderr)
        rows = (
            config.sampling.rollout_batch_size
            if args.run or args.rollout_batch_size not in (None, "auto")
            else 0
        )
        how: dict[str, Any] = {
            "samples": args.samples,
            "temperature": args.temp,
            "seed": args.seed or 0,
        }
        how |= {"batch_size": memory.BatchSize(rows) if rows else None} | (
            {"limit": args.limit} if args.limit else {}
        )
        toolbox = episodes.make_toolbox(config, task.tools, task.environments, tokenizer, facts)
        params = EvalParams.from_config(config, toolbox=toolbox, **how)
        reference = base if is_base and (adapter or args.run) and not args.url else None
        record, answers = evaluate(
            answer, task, params, grader=grader, witness=witness, reference=reference
        )
        print(
            alive.wrap_for_terminal(
                escape_invisible(run_files.evaluation_line(record)), sys.stderr
            ),
            file=sys.stderr,
            flush=True,
        )
        if cut := run_files.cut_off_message(record["eval/truncated_frac"], config.to_flags()):
            print(f"WARNING: {cut}.", file=sys.stderr, flush=True)
        try:
            if args.out:
                lines = [json.dumps(answer, default=str) + "\n" for answer in answers]
                with names_path(f"--out {args.out}"):
                    args.out.write_text("".join(lines), encoding="utf-8")
        finally:  # the disk may be too full for the file
            print(json.dumps(record), flush=True)
        if args.url:
            served.log.path.unlink()


if __name__ == "__main__":
    with end_tools():
        main()
