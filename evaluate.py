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
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import cpu_blas  # noqa: F401  (before mlx)
import mlx.core as mx
import numpy as np

import gwen
import judge
import lora
import sampler
import tasks
from config import JUDGE, SETTINGS, TOOLS, Config
from disk import adapters, run_files
from flags import Parser, add_flags, check_least, fail, flag_of, visible
from judging.rubrics import Grader, Judgement
from layers import lm_head
from machine import alive, memory, world
from problems import chat_template, episodes
from problems.episodes import Toolbox, ended
from problems.examples import Example, prompt_key, prompt_text, spread
from problems.form import is_degenerate, is_refusal, repeated
from problems.rewards import Logged, Reward, call_rewards, reward_arguments, reward_columns
from problems.stop import Stop
from settings.checks import checked
from settings.sources import given, load_recipe, moved, of_task, resolve
from step.batch import cut, hidden
from step.policy import Reader
from step.rows import ROOM, rollout_bytes, rows_at_once
from step.sample import Sample, answered, asked, by_group, columns, table

if TYPE_CHECKING:
    from step.served import Served

KEY = 1 << 96  # RNG key of evaluations; training keys are smaller
REFERENCE_TOKENS = 2048  # positions in one batch of the reference model


def pass_at_k(num_samples: int, num_right: int, k: int) -> float:
    """
    Unbiased estimate of the chance that at least one of k completions is right.

    Source: Chen et al., arXiv:2107.03374, eq. 1.
    """
    return 1 - math.comb(num_samples - num_right, k) / math.comb(num_samples, k)


# ---- completions and their rewards


def call(
    rewards: dict[str, Reward], samples: list[Sample], weights: dict[str, float] | None = None
) -> tuple[dict[str, np.ndarray], Logged]:
    """The values of each completion, (N,), by each reward or verifier, and what these logged."""
    examples, texts = [one.example for one in samples], [one.text for one in samples]
    called, logged = call_rewards(rewards, examples, texts, columns(samples), weights)
    return {name: np.array(values) for name, values in called.items()}, logged


def judged(grader: Grader, samples: list[Sample]) -> Judgement:
    """The judge's scores of each completion."""
    return grader.score([prompt_text(one.example["prompt"]) for one in samples], [one.text for one in samples])


class Earned(NamedTuple):
    """Values of N completions; nan where the judge was unreadable."""

    values: np.ndarray  # (N,): 1 for a right answer, nan where none is known; or the weighted sum of the rewards
    rewards: dict[str, np.ndarray]  # (N,) each, before weighting
    scores: np.ndarray | None  # (N, J), the judge's, 1..5
    total: np.ndarray | None = None  # (N,), weighted sum of the rewards beside a verifier's values, if all are known
    logged: Logged = Logged({}, {})


def earn(task: tasks.Task, grader: Grader | None, samples: list[Sample]) -> Earned:
    """
    Calls each reward once and computes the reported value of each completion.

    As in training, an unreadable score of the judge counts as the mean of the others, and what a function gave None for
    does not count; a completion without any value has none.
    """
    rewards, logged = call(task.rewards, samples, task.reward_weights)
    scores = None
    if grader is not None:
        judgement = judged(grader, samples)
        rewards["rubric"], scores = judgement.rewards, judgement.scores
    counted = {name: values for name, values in rewards.items() if task.reward_weights[name]}
    total = None
    if counted:
        filled = {name: run_files.mean(values) or 0.0 if name == "rubric" else 0.0 for name, values in counted.items()}
        parts = [task.reward_weights[name] * np.nan_to_num(counted[name], nan=filled[name]) for name in counted]
        total = np.where(np.isnan(list(counted.values())).all(0), np.nan, np.sum(parts, 0))
    if task.verifier is not None:
        is_whole = grader is not None or task.rubric is None
        is_other = any(reward is not task.verifier for reward in task.counted.values())
        right = call({"correct": task.verifier}, samples)[0]["correct"]
        return Earned(right, rewards, scores, total if is_whole and is_other else None, logged)
    # without rewards: a task of prompts alone, which a teacher scores
    return Earned(np.full(len(samples), np.nan) if total is None else total, rewards, scores, None, logged)


# ---- other measurements


def divergence(reference: gwen.Model, samples: list[Sample], temperature: float) -> float:
    """
    KL(sampling policy, `reference` before training) in nats per token; see `lora.before_training`.

    The mean over completion tokens of k3, exp(d) - d - 1 with d = log reference - log policy, in float64.
    Source: see `grpo.kl_term`.
    """
    found, batches = dict[int, np.ndarray](), cut(samples, REFERENCE_TOKENS, "off")
    with lora.before_training(reference):
        for batch in alive.Bar([batch for batch in batches if batch.is_mine], desc="reference", unit="part"):
            states, head_weight, ids = hidden(reference, batch), reference.head_weight, batch.completion_ids
            new = lm_head.token_logprobs(states, head_weight, ids, temperature=temperature, gradient=False)[0]
            found |= {row: its for row, its in zip(batch.rows, np.array(new * batch.mask), strict=True)}  # wait
    policy = table([one.logprobs for one in samples if one.logprobs is not None])
    difference = table([its[: len(one.own)] for one, its in zip(samples, world.collect(found), strict=True)]) - policy
    return float((np.expm1(difference) - difference).sum() / sum(len(one.own) for one in samples))


def replies(model: gwen.Model, reader: Reader, samples: list[Sample], token_budget: int) -> dict[str, Any]:
    """
    The record of `eval.jsonl` without `step`: loss, nats per token, and perplexity of held-out replies.

    The 95% interval is that of a ratio of two sums over groups, the conversations.
    """
    begin, num = time.perf_counter(), len(by_group(samples))
    sums = np.zeros((3, num))  # negative log-probabilities, entropies, tokens
    for batch in cut(samples, token_budget):
        if batch.is_mine:
            logprobs, entropy = reader.logprobs(model, batch)
            parts = np.array(mx.stack([-logprobs * batch.mask, entropy * batch.mask, batch.mask]), np.float64).sum(-1)
            for place, row in enumerate(batch.rows):
                sums[:, samples[row].group] += parts[:, place]
    losses, entropies, tokens = sum(world.share(sums))
    total = tokens.sum()
    loss = losses.sum() / total
    reach = None
    if num > 1:
        reach = 1.96 * math.sqrt(((losses - loss * tokens) ** 2).sum() * num / (num - 1)) / total
    record = {
        "eval/loss": float(loss),
        "eval/loss_ci95": reach,
        "eval/perplexity": math.exp(min(loss, 700.0)),  # of more there is no float
        "eval/entropy": float(entropies.sum() / total),
        "eval/tokens": float(total / num),
        "eval/num": num,
        "eval/s": time.perf_counter() - begin,
    }
    return run_files.finite(record)


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


Answer = Callable[[list[Example], EvalParams], tuple[list[Sample], list[Sample]]]  # see `answer_both`


def evaluate(
    model: gwen.Model, tokenizer: Any, task: tasks.Task, params: EvalParams, **graders: Any
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """`examine` of a model that runs here."""
    return examine(functools.partial(answer_both, model, tokenizer), task, params, **graders)


def examine(
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

    Accuracy (or score) counts each problem's first completion. The other figures average all completions;
    `eval/pass_at_1` is unbiased.

    grader: the judge whose score is the reward "rubric". witness: a judge that training never uses. reference: the
    model before training, or one that `lora.before_training` makes it; None if unavailable.
    Raises ValueError before decoding if there are no problems, a prompt is too long or a reward lacks a column.
    """
    begin = time.perf_counter()
    numbers = spread(list(range(len(task.held_out))), params.limit)
    problems = [task.held_out[number] for number in numbers]
    if not problems:
        raise ValueError("no prompt is held out, so there is nothing to evaluate; give --data more prompts")
    for name, reward in task.rewards.items():
        reward_columns(name, reward, reward_arguments(problems, bool(task.environments)))
    sampled, greedy = answer(problems, params)
    asked = [one.example for one in sampled]
    earned = earn(task, grader, sampled)
    verified = task._replace(rewards={}) if task.verifier is not None else task  # a verifier needs no rewards
    greedy_values = earn(verified, grader if task.verifier is None else None, greedy).values
    witnessed = None if witness is None else judged(witness, sampled)

    samples = params.samples
    measured = measure(task, sampled, earned, samples) | {"greedy": greedy_values}
    if grader is not None and earned.scores is not None:
        measured |= by_criterion("judge", earned.scores, grader, asked, samples)
    measured["witness"] = np.full(1, np.nan)
    if witness is not None and witnessed is not None:
        measured |= by_criterion("witness", witnessed.scores, witness, asked, samples)
        measured["witness"] = by_problem(witnessed.rewards, samples)
    record: dict[str, Any] = {}
    for name, values in measured.items():
        record |= {f"eval/{name}": run_files.mean(values), f"eval/{name}_ci95": run_files.half_width(values)}
    entropies = [one.entropies for one in sampled if one.entropies is not None]  # a server tells none
    record |= {
        "eval/kl": None if reference is None else divergence(reference, sampled, params.temperature or 1.0),
        "eval/entropy": float(table(entropies).sum() / sum(map(len, entropies))) if entropies else None,
        **{f"eval/metric/{name}": float(np.mean(values)) for name, values in earned.logged.metrics.items()},
        "eval/unparsed_frac": None if earned.scores is None else float(np.isnan(earned.scores).mean()),
        "eval/num": len(problems),
        "eval/known": int((~np.isnan(measured[task.metric])).sum()),
        "eval/samples": samples,
        "eval/s": time.perf_counter() - begin,
    }
    record = run_files.finite(record)
    scores = {"judge_scores": earned.scores, "witness_scores": None if witnessed is None else witnessed.scores}
    texts, greedily = [one.text for one in sampled], zip([one.text for one in greedy], greedy_values, strict=True)
    talks = [one.conversation["messages"] for one in sampled if one.conversation]
    details = [
        {"problem": number}
        | {name: one.example.get(name) for name in ("prompt", "answer", "category")}  # with what an environment says
        | {"completions": texts[place : place + samples], "values": listed(earned.values, place, samples)}
        | {"rewards": {name: listed(values, place, samples) for name, values in earned.rewards.items()}}
        | {name: None if its is None else listed(its, place, samples) for name, its in scores.items()}
        | {"greedy": text, "greedy_value": None if math.isnan(value) else float(value)}
        | ({"messages": talks[place : place + samples]} if talks else {})
        for place, number, one, (text, value) in zip(
            range(0, len(texts), samples), numbers, sampled[::samples], greedily, strict=True
        )
    ]
    return record, details


def answer_both(
    model: gwen.Model, tokenizer: Any, problems: list[Example], params: EvalParams
) -> tuple[list[Sample], list[Sample]]:
    """Each problem's samples with their entropies, and one greedy completion."""
    if params.toolbox:
        prompts = [params.toolbox.prompt(problem) for problem in problems]
    else:
        render: dict[str, Any] = {"max_tokens": params.max_tokens, "context": model.config.max_position_embeddings}
        render |= {"thinking": params.thinking, "kind": "held-out prompt"}
        prompts = chat_template.encode_prompts(tokenizer, problems, **render)
    lengths, dtype, samples = list(map(len, prompts)), model.head_weight.dtype, params.samples

    def fits(rows: int) -> bool:
        work = model.config, dtype, lengths, samples, params.max_tokens, rows, None
        return sum(rollout_bytes(*work)) <= ROOM * memory.memory_at_hand()

    # both calls share one object, and so what it learns about memory
    size = params.batch_size or memory.BatchSize(rows_at_once(fits, len(prompts) * samples))
    how: dict[str, Any] = {"key": KEY + params.seed, "batch_size": size}
    how |= {"toolbox": params.toolbox, "seed": "held out"}
    several, one = (asked(problems, prompts, size) for size in (samples, 1))
    ends: dict[str, Any] = {"eos_ids": model.config.eos_ids, "stop": Stop.of(params.stop, tokenizer)}
    sampling = sampler.SamplingParams(params.max_tokens, params.temperature, entropy=True, **ends)
    greedy = sampling._replace(temperature=0.0, entropy=False)
    return (
        answered(model, tokenizer, several, sampling, **how)[0],
        answered(model, tokenizer, one, greedy, **how)[0],
    )


def listed(values: np.ndarray, place: int, samples: int) -> list[Any]:
    """The values of one problem's completions, starting at `place`; None where unreadable."""
    its = values[place : place + samples]
    return np.where(np.isnan(its), np.array(None), its.round(4).astype(object)).tolist()


def by_problem(values: np.ndarray, samples: int) -> np.ndarray:
    """Means over each problem's samples, (N,) -> (P,); nan where none is readable."""
    return np.array([np.nan if (m := run_files.mean(row)) is None else m for row in values.reshape(-1, samples)])


def measure(task: tasks.Task, sampled: list[Sample], earned: Earned, samples: int) -> dict[str, np.ndarray]:
    """Figures by name, each (P,): one value per problem."""
    values = earned.values.reshape(-1, samples)
    measured = {task.metric: values[:, 0], "mean_at_k": by_problem(earned.values, samples)}
    if task.verifier is not None:
        measured |= by_category(task.metric, values[:, 0], [one.example for one in sampled[::samples]])
        num_right = values.sum(-1)
        for k in sorted({1, samples}):
            chances = [math.nan if math.isnan(num) else pass_at_k(samples, int(num), k) for num in num_right]
            measured[f"pass_at_{k}"] = np.array(chances)
    if earned.total is not None:
        measured["score"] = earned.total.reshape(-1, samples)[:, 0]
    each = {f"reward/{name}": rewards for name, rewards in earned.rewards.items()} | {
        "tokens": np.array([float(len(one.own)) for one in sampled]),
        "truncated_frac": np.array([float(one.finish_reason == "length") for one in sampled]),
        "refusals": np.array([float(is_refusal(one.text)) for one in sampled]),
        "repeated": np.array([repeated(one.text) for one in sampled]),
        "degenerate": np.array([float(is_degenerate(one.text, prompt_text(one.example["prompt"]))) for one in sampled]),
    }
    return measured | {name: by_problem(column, samples) for name, column in each.items()}


def by_category(name: str, values: np.ndarray, problems: list[Example]) -> dict[str, np.ndarray]:
    """The values of each category, (P,) -> {"accuracy/lcm": (...)}; empty with a single category."""
    categories = np.array([problem.get("category") for problem in problems], object)
    known = sorted({category for category in categories if category is not None})
    return {f"{name}/{category}": values[categories == category] for category in known if len(known) > 1}


def by_criterion(
    kind: str, scores: np.ndarray, grader: Grader, problems: list[Example], samples: int
) -> dict[str, np.ndarray]:
    """Each problem's mean score by criterion, for the judge also by category; 5 is bad if the criterion is reversed."""
    measured: dict[str, np.ndarray] = {}
    for criterion, column in zip(grader.rubric.criteria, scores.T, strict=True):
        name, values = f"{kind}/{criterion.name}", by_problem(column, samples)
        measured |= {name: values} | (by_category(name, values, problems[::samples]) if kind == "judge" else {})
    return measured


def make_graders(
    config: Config, rubric: Any, witness: Any, base: gwen.Model | None, tokenizer: Any
) -> tuple[Grader | None, Grader | None]:
    """
    The judge by `rubric`, and the witness, which only evaluations use, by its own; None without a rubric.

    base: the model before training, the default judge of both. They share their cache of scores.
    """

    @functools.cache
    def load() -> tuple[gwen.Model, Any]:
        if base is not None and config.judges_itself:
            return base, tokenizer
        return gwen.load(config.judge.model, frozen=True)

    grader, second = (None if one is None else judge.make(config.judge, one, load) for one in (rubric, witness))
    if grader is not None and second is not None:
        second.cache = grader.cache  # a key covers the rubric
    return grader, second


# ---- the command

# settings that `--run` reads from the run and flags override
TAKEN = (
    *("model", "task", "task_config", "columns", "rubric", "eval_rubric"),
    *("verifier", "reward", "reward_weights", "reward_workers"),
    *("max_tokens", "stop", "rollout_batch_size", "thinking", *TOOLS, *JUDGE),
)


def load_policy(name: str, adapter: str | None, start: str | None = None) -> tuple[gwen.Model, Any, bool]:
    """
    A model with its adapter, its tokenizer, and whether switching adapters restores the model before training.

    start: the adapter that training began with.
    """
    if adapter is None or adapters.kind_of(adapters.find(adapter)) == "full":
        return *gwen.load(name, adapter=adapter), adapter is None
    model, tokenizer = gwen.load(name)
    lora.attach(model, adapter, start)
    return model, tokenizer, True


def ask(args: Namespace, config: Config, task: tasks.Task, variables: dict[str, Any]) -> "Served":
    """The policy at --url. Raises ValueError for what only a model here has, and where nothing tells its tokenizer."""
    from step.served import Served

    for name in ("adapter", "step", "seed", "rollout_batch_size"):
        if (value := getattr(args, name)) is not None:
            raise ValueError(f"{flag_of(name)} {value} is for a model here, and --url asks a server; leave it out")
    if not args.run and not args.model:
        raise ValueError("--url does not tell the tokenizer: name what the server runs with --model, or --run")
    if task.tools or task.environments:
        raise ValueError("--url asks for single answers, and this has tools; leave it out to play here")
    how = config.model.name, config.sampling.max_tokens, Path(args.run or "runs")
    return Served(args.url, args.url_model, *how, variables)


def remember(log: run_files.JsonLines, grader: Grader) -> None:
    """Writes the judge's new scores."""
    for record in grader.cache.take_fresh():
        log.write({"step": 0} | record)


def of_run(run: str, flags: dict[str, Any], data: str | None = None) -> Config:
    """
    The settings of the run in a directory, overridden by flags. Raises ValueError if there is no run.

    A run of --loss-type sft is taken for one of its task, which has the problems to answer, or for one on this `data`.
    """
    settings = load_recipe(run_files.config_file(run))
    if settings.get("loss_type") == "sft":
        settings = {name: settings[name] for name in ("model", "task", "thinking") if name in settings}
        settings |= {"task": "own"} if data else {}
    return checked(settings | flags)


def trained_on(config: Config) -> set[str]:
    """Keys of the prompts that a run was trained on; none where a task makes them, or where their file is gone."""
    data = config.data
    is_made = data.task.partition(":")[0] in ("rg", "ifeval")
    if is_made or (data.task == "own" and not data.path) or any(moved({"data": data.path})):
        return set()
    task = tasks.load(data.task, data=data.path or None, columns=data.columns or None)
    return {prompt_key(example) for example in task.train}


def main(argv: list[str] | None = None) -> None:
    parser = Parser("evaluate.py", "Evaluate a model on held-out problems.")
    run_files.add_flags(parser)
    parser.add_argument("--url", help="ask the OpenAI-compatible server there, whose model is that of --run or --model")
    parser.add_argument(
        "--url-model", default="default_model", metavar="NAME", help="its name for it (mlx_lm: default)"
    )
    parser.add_argument("--data", help="held-out problems from a file or hub dataset, instead of the task's")
    parser.add_argument("--limit", type=int, help="only N of the problems, evenly spread")
    parser.add_argument("--samples", type=int, default=1, help="K completions a problem")
    parser.add_argument("--temp", type=float, default=1.0, help="of the samples; a run's evaluations have 1")
    parser.add_argument("--seed", type=int, help="of the samples (default: 0, as of a run's evaluations)")
    add_flags(parser, [SETTINGS[name] for name in TAKEN])
    parser.add_argument("--judge-cache", type=Path, metavar="FILE", help="scores to know and to add to, as a run's")
    parser.add_argument("--out", type=Path, help="a JSON line for each problem goes to this file")
    args = parser.parse_args(argv)
    flags = given(args, TAKEN)
    try:
        check_least(args, limit=1, samples=1, temp=0, seed=0)
        for flag, path in (("--out", args.out), ("--judge-cache", args.judge_cache)):
            if path and (path.is_dir() or not path.absolute().parent.is_dir()):
                raise ValueError(f"{flag} {path} is no file in an existing directory; make the directory first")
        adapter = run_files.settle(args)
        if args.run:
            chat_template.keep_date(run_files.begun(Path(args.run)))
            config = of_run(args.run, flags, args.data)
            start = run_files.adapter_of(args.run, 0)
            what = f"run: {args.run}, {'newest adapter' if args.step is None else f'step {args.step}'}"
        else:
            name, why = gwen.choose_model(args.model, args.adapter, of_task(args.task or "", "").get("model"))
            if args.data:
                flags = {"task": "own"} | flags
            config, start = resolve(flags, None, None, lambda _: (name, why))[0], None
            what = f"model: {name}, {why}"
        trained = trained_on(of_run(args.run, {}, args.data)) if args.run and args.data else set()
        if args.data:
            config = config.but(data="", columns=args.columns or "")
        task = tasks.make(config, args.data)
        if seen := sum(prompt_key(example) in trained for example in task.held_out):
            theirs = f"{seen} of the {len(task.held_out)} prompts of --data {args.data}"
            print(visible(f"WARNING: {theirs} are among those it was trained on."), file=sys.stderr)
        base: gwen.Model | None = None
        if args.url:
            served = ask(args, config, task, {"enable_thinking": args.thinking} if "thinking" in flags else {})
            answer, tokenizer, facts, is_base = served.answer, served.tokenizer, served.facts, False
            what += f"; as {args.url_model} at {args.url}"
        else:
            base, tokenizer, is_base = load_policy(config.model.name, adapter, start)
            answer, facts = functools.partial(answer_both, base, tokenizer), base.config
        scored = task.rubric is not None and task.verifier is None
        if not is_base and config.judges_itself and (scored or task.witness is not None):
            base, is_base = gwen.load(config.model.name)[0], True
        grader, witness = make_graders(config, task.rubric if scored else None, task.witness, base, tokenizer)
        cache = next((one.cache for one in (grader, witness) if one is not None), None)
        known = args.judge_cache or (Path(args.run) / "judge_scores.jsonl" if args.run else None)
        if cache and known:
            cache.load(known)
        if cache and args.judge_cache:
            log = run_files.JsonLines(args.judge_cache)
            for one in filter(None, (grader, witness)):
                one.on_score = functools.partial(remember, log, one)
        print(visible("\n".join([f"{what}; task: {task.name}", *task.notes])), file=sys.stderr)
        rows = config.sampling.rollout_batch_size if args.run or args.rollout_batch_size not in (None, "auto") else 0
        params = EvalParams(
            config.sampling.max_tokens,
            memory.BatchSize(rows) if rows else None,
            samples=args.samples,
            limit=args.limit or config.evaluation.limit or None,
            thinking=config.sampling.thinking,
            temperature=args.temp,
            seed=args.seed or 0,
            stop=config.sampling.stop,
            toolbox=episodes.make(config, task.tools, task.environments, tokenizer, facts),
        )
        reference = base if is_base and (adapter or args.run) and not args.url else None
        graders = {"grader": grader, "witness": witness}
        record, answers = examine(answer, task, params, **graders, reference=reference)
        print(visible(run_files.evaluation_line(record)), file=sys.stderr, flush=True)
        print(json.dumps(record), flush=True)  # before the file: the disk may be too full for it
        if args.out:
            args.out.write_text("".join(json.dumps(answer, default=str) + "\n" for answer in answers))
        if args.url:
            served.log.path.unlink()
    except (ValueError, OSError) as error:
        fail(error)


if __name__ == "__main__":
    with ended():
        main()
