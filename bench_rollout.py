"""
Rollouts against mlx_lm on the same work: `uv run bench_rollout.py --batch 8 --groups 8 --prompt-tokens 128`.

mlx_lm is run in every way that it can be: "mlx_lm" prefills the prompt of every row, with as many rows at once as ours,
"mlx_lm_default" with its own batch sizes; "mlx_lm_shared" prefills once what rows begin with and hands its cache to
them. All read the log-probabilities of the drawn tokens, which training needs and judging does not.
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


def run_mlx_lm(work: Work, *, peer: Any, own_sizes: bool = False, shared: bool = False) -> Timing:
    """
    The work done by mlx_lm's BatchGenerator, with as many rows at once as ours or with its own batch sizes.

    Its log-probabilities are those at temperature 1, whatever it samples at; they are read once a step for all rows,
    which costs less than one by one as its own `batch_generate` reads them.
    """
    from mlx_lm.generate import BatchGenerator
    from mlx_lm.models.cache import make_prompt_cache
    from mlx_lm.sample_utils import make_sampler

    @functools.cache
    def after(*runs: tuple[int, ...]) -> Any:
        """The caches of a row after runs of ids, None before its first; whoever goes on with them copies them."""
        if not runs:
            return None
        grown = copy.deepcopy(after(*runs[:-1])) or make_prompt_cache(peer)
        peer(mx.array([runs[-1]]), grown)
        mx.eval([cache.state[:2] for cache in grown])
        return grown

    size = work.batch_size
    how: Any = {} if own_sizes else {"completion_batch_size": size, "prefill_batch_size": size}
    how |= {
        "stop_tokens": [[eos_id] for eos_id in work.eos_ids],
        "sampler": make_sampler(work.temperature),
    }
    mx.random.seed(work.seed)
    begin = time.perf_counter()
    rows, caches = work.rows, None
    if shared:
        rows = [runs[-1] for runs in work.runs]
        caches = [after(*(tuple(run) for run in runs[:-1] if run)) for runs in work.runs]
    shared_s = time.perf_counter() - begin
    generator = BatchGenerator(peer, **how)
    row_of = {uid: row for row, uid in enumerate(generator.insert(rows, work.limits, caches))}
    completions: list[list[int]] = [[] for _ in row_of]
    logprobs: list[list[float]] = [[] for _ in row_of if work.with_logprobs]
    with generator.stats() as stats:
        while responses := generator.next_generated():
            for response in responses:
                completions[row_of[response.uid]].append(response.token)
            if work.with_logprobs:
                chosen: Any = mx.stack(
                    [response.logprobs[response.token] for response in responses]
                ).tolist()
                for response, logprob in zip(responses, chosen, strict=True):
                    logprobs[row_of[response.uid]].append(logprob)
    generator.close()
    prefill_s = shared_s + stats.prompt_time
    return Timing(completions, logprobs, prefill_s, time.perf_counter() - begin - prefill_s)


def rival(peer: Any, directory: Path) -> Rival:
    """mlx_lm in every way that it can be run."""
    ways: Any = {
        "mlx_lm": {},
        "mlx_lm_default": {"own_sizes": True},
        "mlx_lm_shared": {"shared": True},
    }
    engines: Any = {
        name: functools.partial(run_mlx_lm, peer=peer, **way) for name, way in ways.items()
    }
    return Rival("mlx_lm", "Result: ours is {} than mlx_lm on this rollout workload.", engines)


def main(argv: list[str] | None = None) -> None:
    rollout.main(argv, "bench_rollout.py", "Time rollouts against mlx_lm's.", rival)


if __name__ == "__main__":
    main()
