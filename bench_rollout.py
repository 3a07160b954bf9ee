"""
Times rollouts against mlx_lm on the same work:
`uv run bench_rollout.py --batch 8 --groups 8 --prompt-tokens 128`.

mlx_lm runs in three configurations. "mlx_lm" prefills the prompt of every row, with as many rows at
once as Gwen. "mlx_lm_default" does the same with mlx_lm's default batch sizes. "mlx_lm_shared"
prefills beginnings that rows share only once, and gives the cache to each of these rows. All three
read the log-probabilities of the sampled tokens, which training needs and judging does not.

This file does not cover the measurement and the report (bench/rollout.py).
"""

import copy
import functools
import time
from pathlib import Path
from typing import Any

import cpu_blas  # noqa: F401  (before mlx)
import mlx.core as mx

from bench import rollout
from bench.rollout import Rival, Timing, Work


def run_mlx_lm(
    work: Work, *, peer: Any, use_default_sizes: bool = False, share_prefixes: bool = False
) -> Timing:
    """
    Does the work with mlx_lm's BatchGenerator.

    The generator runs as many rows at once as Gwen, or has its default batch sizes. Its
    log-probabilities are those at temperature 1, whatever the sampling temperature. They are read
    once a step for all rows; mlx_lm's `batch_generate` reads them one by one, which costs more.
    """
    from mlx_lm.generate import BatchGenerator
    from mlx_lm.sample_utils import make_sampler

    stop_tokens = [[eos_id] for eos_id in work.eos_ids]
    sample = make_sampler(work.temperature)
    mx.random.seed(work.seed)
    begin = time.perf_counter()
    prompts = work.rows
    caches = None
    if share_prefixes:
        prompts = [runs[-1] for runs in work.runs]
        caches = prefill_prefixes(work, peer)
    prefixes_s = time.perf_counter() - begin

    if use_default_sizes:
        generator = BatchGenerator(peer, stop_tokens=stop_tokens, sampler=sample)
    else:
        generator = BatchGenerator(
            peer,
            stop_tokens=stop_tokens,
            sampler=sample,
            completion_batch_size=work.batch_size,
            prefill_batch_size=work.batch_size,
        )
    uids = generator.insert(prompts, work.limits, caches)
    row_of_uid = {uid: row for row, uid in enumerate(uids)}
    completions: list[list[int]] = [[] for _ in row_of_uid]
    logprobs: list[list[float]] = [[] for _ in row_of_uid if work.with_logprobs]
    with generator.stats() as stats:
        while responses := generator.next_generated():
            for response in responses:
                completions[row_of_uid[response.uid]].append(response.token)
            if work.with_logprobs:
                chosen = [response.logprobs[response.token] for response in responses]
                values: Any = mx.stack(chosen).tolist()
                for response, value in zip(responses, values, strict=True):
                    logprobs[row_of_uid[response.uid]].append(value)
    generator.close()
    prefill_s = prefixes_s + stats.prompt_time
    decode_s = time.perf_counter() - begin - prefill_s
    return Timing(completions, logprobs, prefill_s, decode_s)


def prefill_prefixes(work: Work, peer: Any) -> list[Any]:
    """
    For each row, mlx_lm's caches after all runs of ids but the last; None for a row of one run.

    Rows with equal beginnings share caches, because the generator copies a cache to continue it.
    """
    from mlx_lm.models.cache import make_prompt_cache

    @functools.cache
    def prefill(*runs: tuple[int, ...]) -> Any:
        if not runs:
            return None
        caches = copy.deepcopy(prefill(*runs[:-1])) or make_prompt_cache(peer)
        peer(mx.array([runs[-1]]), caches)
        mx.eval([cache.state[:2] for cache in caches])
        return caches

    row_caches = []
    for runs in work.runs:
        prefix_runs = [tuple(run) for run in runs[:-1] if run]
        row_caches.append(prefill(*prefix_runs))
    return row_caches


def make_rival(peer: Any, directory: Path) -> Rival:
    """mlx_lm in its three configurations."""
    run = functools.partial(run_mlx_lm, peer=peer)
    return Rival(
        name="mlx_lm",
        result="Result: ours is {} than mlx_lm on this rollout workload.",
        engines={
            "mlx_lm": run,
            "mlx_lm_default": functools.partial(run, use_default_sizes=True),
            "mlx_lm_shared": functools.partial(run, share_prefixes=True),
        },
    )


def main(argv: list[str] | None = None) -> None:
    rollout.main(argv, "bench_rollout.py", "Time rollouts against mlx_lm's.", make_rival)


if __name__ == "__main__":
    main()
