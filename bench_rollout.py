"""
Rollouts against mlx_lm on the same work: `uv run bench_rollout.py --batch 8 --groups 8 --prompt-tokens 128`.

mlx_lm records the log-probability of every drawn token, as ours does; its second line has its default batch sizes.
What is compared and how is in `bench/harness.py`.
"""

import functools
import time
from pathlib import Path
from typing import Any

import cpu_blas  # noqa: F401  (before mlx)
import mlx.core as mx

import hub
from bench import harness
from bench.harness import Generate, Rival, Timing, Work


def run_mlx_lm(work: Work, *, peer: Any, whole_batches: bool) -> Timing:
    """
    The work done by mlx_lm's BatchGenerator, with as many rows at once as ours or with its default sizes.

    Its log-probabilities are those at temperature 1, whatever it samples at; they are read once a step for all rows,
    which costs less than one by one as its own `batch_generate` reads them.
    """
    from mlx_lm.generate import BatchGenerator
    from mlx_lm.sample_utils import make_sampler

    size = work.batch_size
    sizes: Any = {"completion_batch_size": size, "prefill_batch_size": size} if whole_batches else {}
    mx.random.seed(work.seed)
    begin = time.perf_counter()
    stop_tokens = [[eos_id] for eos_id in work.eos_ids]
    generator = BatchGenerator(peer, stop_tokens=stop_tokens, sampler=make_sampler(work.temperature), **sizes)
    row_of = {uid: row for row, uid in enumerate(generator.insert(work.rows, work.limits))}
    completions: list[list[int]] = [[] for _ in row_of]
    logprobs: list[list[float]] = [[] for _ in row_of]
    with generator.stats() as stats:
        while responses := generator.next_generated():
            chosen: Any = mx.stack([response.logprobs[response.token] for response in responses]).tolist()
            for response, logprob in zip(responses, chosen, strict=True):
                completions[row_of[response.uid]].append(response.token)
                logprobs[row_of[response.uid]].append(logprob)
    generator.close()
    seconds = time.perf_counter() - begin
    return Timing(completions, logprobs, stats.prompt_time, seconds - stats.prompt_time)


def judges(peer: Any, eos_ids: tuple[int, ...]) -> dict[str, Generate]:
    """Greedy replies of mlx_lm's batch generator, with its default sizes and with 24 rows at once."""

    def generate(prompts: list[list[int]], limit: int, sizes: dict[str, int]) -> list[list[int]]:
        from mlx_lm.generate import BatchGenerator

        generator = BatchGenerator(peer, stop_tokens=[[i] for i in eos_ids], **sizes)  # type: ignore[arg-type]
        row_of = {uid: row for row, uid in enumerate(generator.insert(prompts, [limit] * len(prompts)))}
        replies: list[list[int]] = [[] for _ in prompts]
        while responses := generator.next_generated():
            for response in responses:
                if response.finish_reason != "stop":
                    replies[row_of[response.uid]].append(response.token)
        generator.close()
        return replies

    sizes = {"default": {}, "24 rows": {"completion_batch_size": 24, "prefill_batch_size": 24}}
    return {name: functools.partial(generate, sizes=chosen) for name, chosen in sizes.items()}


def rival(peer: Any, directory: Path) -> Rival:
    """mlx_lm with as many rows at once as ours, and with its default sizes."""
    engines: dict[str, harness.Engine] = {
        "mlx_lm": functools.partial(run_mlx_lm, peer=peer, whole_batches=True),
        "mlx_lm_default": functools.partial(run_mlx_lm, peer=peer, whole_batches=False),
    }
    result = "Result: ours is {} than mlx_lm on this rollout workload."
    return Rival("mlx_lm", result, engines, judges(peer, hub.load_config(directory).eos_ids), [])


def main(argv: list[str] | None = None) -> None:
    harness.main(argv, "bench_rollout.py", "Time rollouts against mlx_lm's.", rival)


if __name__ == "__main__":
    main()
