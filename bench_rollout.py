"""
Compares the speed of rollouts by Gwen and by mlx_lm on the same work:
`uv run bench_rollout.py --batch 8 --groups 8 --prompt-tokens 128`.

mlx_lm runs in three configurations. "mlx_lm" prefills the prompt of every row, and decodes as many
rows at once as Gwen does. "mlx_lm_default" does the same with mlx_lm's default batch sizes.
"mlx_lm_shared" prefills the common beginning of several prompts only once, and copies the resulting
cache for each row. In rollouts, but not in judging, all three configurations also return the
log-probabilities of the sampled tokens, which training needs.

This file does not cover how the times are measured and reported (bench/rollout.py).
"""

import copy
import functools
import time
from pathlib import Path
from typing import Any

import cpu_blas  # noqa: F401  (before mlx)
import mlx.core as mx

from bench import judging, rollout
from bench.rollout import Rival, RolloutWork, TimedRollout


def time_mlx_lm_rollout(
    work: RolloutWork, *, peer: Any, use_default_sizes: bool = False, share_prefixes: bool = False
) -> TimedRollout:
    """
    Does the rollout with mlx_lm's BatchGenerator, and times it.

    The generator decodes as many rows at once as Gwen does, or uses its own default batch sizes if
    `use_default_sizes` is set. The log-probabilities are those at temperature 1, whatever the
    sampling temperature is. At each step, they are read for all rows at once, because reading them
    row by row, as mlx_lm's `batch_generate` does, takes longer.
    """
    from mlx_lm.generate import BatchGenerator
    from mlx_lm.sample_utils import make_sampler

    stop_tokens = [[eos_id] for eos_id in work.eos_ids]
    sample = make_sampler(work.temperature)
    mx.random.seed(work.seed)
    begin = time.perf_counter()
    prompts = work.prompt_ids_by_row
    caches = None
    if share_prefixes:
        prompts = [parts[-1] for parts in work.prompt_parts_by_row]
        caches = prefill_prefix_caches_by_row(work, peer)
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
                chosen_logprobs: Any = mx.stack(chosen).tolist()
                for response, logprob in zip(responses, chosen_logprobs, strict=True):
                    logprobs[row_of_uid[response.uid]].append(logprob)
    generator.close()
    prefill_s = prefixes_s + stats.prompt_time
    decode_s = time.perf_counter() - begin - prefill_s
    return TimedRollout(completions, logprobs, prefill_s, decode_s)


def prefill_prefix_caches_by_row(work: RolloutWork, peer: Any) -> list[Any]:
    """
    Returns, for each row, mlx_lm's caches for all parts of the row's prompt except the last part.

    The caches are None for a row whose prompt has only one part. Rows with the same beginning get
    the same caches, because the generator copies a cache before extending it.
    """
    from mlx_lm.models.cache import make_prompt_cache

    @functools.cache
    def prefill_parts(*id_parts: tuple[int, ...]) -> Any:
        if not id_parts:
            return None
        caches = copy.deepcopy(prefill_parts(*id_parts[:-1])) or make_prompt_cache(peer)
        peer(mx.array([id_parts[-1]]), caches)
        mx.eval([cache.state[:2] for cache in caches])
        return caches

    row_caches = []
    for parts in work.prompt_parts_by_row:
        prefix_parts = [tuple(part) for part in parts[:-1] if part]
        row_caches.append(prefill_parts(*prefix_parts))
    return row_caches


def make_mlx_lm_rival(peer: Any, directory: Path) -> Rival:
    """Returns mlx_lm in its three configurations."""
    run = functools.partial(time_mlx_lm_rollout, peer=peer)
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
    rollout.main(
        argv,
        "bench_rollout.py",
        "Compare the speed of rollouts by Gwen and by mlx_lm.",
        make_mlx_lm_rival,
        judging.benchmark_and_print_judging,
    )


if __name__ == "__main__":
    main()
