"""
Rollouts against mlx_lm on the same work: `uv run bench_rollout.py --batch 8 --groups 8 --prompt-tokens 128`.

mlx_lm is run in every way that it can be: "mlx_lm" prefills the prompt of every row, with as many rows at once as ours,
"mlx_lm_default" with its own batch sizes; "mlx_lm_shared" prefills each prompt once and hands its cache to the rows of
its group. All read the log-probabilities of the drawn tokens, which training needs. The judge's prompts are prefilled
whole or segment by segment, and answered by a reply or by one token.
"""

import functools
import time
from pathlib import Path
from typing import Any

import cpu_blas  # noqa: F401  (before mlx)
import mlx.core as mx

from bench import rollout
from bench.judging import Replies, Segments
from bench.rollout import Rival, Timing, Work
from disk import hub


def generate(
    peer: Any, prompts: list[list[int]], limits: list[int], read: bool, caches: list[Any] | None = None, **how: Any
) -> tuple[list[list[int]], list[list[float]], float]:
    """
    Completions of mlx_lm's BatchGenerator, the log-probabilities of their tokens if they are read, and its prefill's
    seconds.

    Its log-probabilities are those at temperature 1, whatever it samples at; they are read once a step for all rows,
    which costs less than one by one as its own `batch_generate` reads them.
    """
    from mlx_lm.generate import BatchGenerator

    generator = BatchGenerator(peer, **how)
    row_of = {uid: row for row, uid in enumerate(generator.insert(prompts, limits, caches))}
    completions: list[list[int]] = [[] for _ in row_of]
    logprobs: list[list[float]] = [[] for _ in row_of]
    with generator.stats() as stats:
        while responses := generator.next_generated():
            for response in responses:
                completions[row_of[response.uid]].append(response.token)
            if read:
                chosen: Any = mx.stack([response.logprobs[response.token] for response in responses]).tolist()
                for response, logprob in zip(responses, chosen, strict=True):
                    logprobs[row_of[response.uid]].append(logprob)
    generator.close()
    return completions, logprobs if read else [], stats.prompt_time


def prefilled(peer: Any, caches: Any, ids: list[int]) -> Any:
    """mlx_lm's caches of a row, None before its first token, after more ids; those given stay as they are."""
    from mlx_lm.models.cache import make_prompt_cache

    grown = make_prompt_cache(peer)
    for new, old in zip(grown, caches or [], strict=False):
        new.state = (*(array[..., : old.offset, :] for array in (old.keys, old.values)), old.offset)
    peer(mx.array([ids]), grown)
    mx.eval([cache.state[:2] for cache in grown])
    return grown


def run_mlx_lm(work: Work, *, peer: Any, own_sizes: bool = False, shared: bool = False) -> Timing:
    """The work done by mlx_lm, with as many rows at once as ours or with its own batch sizes."""
    from mlx_lm.sample_utils import make_sampler

    size = work.batch_size
    how: Any = {} if own_sizes else {"completion_batch_size": size, "prefill_batch_size": size}
    how |= {"stop_tokens": [[eos_id] for eos_id in work.eos_ids], "sampler": make_sampler(work.temperature)}
    mx.random.seed(work.seed)
    begin = time.perf_counter()
    rows, caches = work.rows, None
    if shared and len(rows[0]) > 1:
        of_prompts = [prefilled(peer, None, prompt[:-1]) for prompt in work.prompts]
        caches = [cache for cache in of_prompts for _ in range(work.group_size)]
        rows = [prompt[-1:] for prompt in rows]
    shared_s = time.perf_counter() - begin
    completions, logprobs, prefill_s = generate(peer, rows, work.limits, True, caches, **how)
    prefill_s += shared_s
    return Timing(completions, logprobs, prefill_s, time.perf_counter() - begin - prefill_s)


def replies(prompts: list[Segments], limit: int, *, peer: Any, eos_ids: tuple[int, ...], shared: bool) -> Any:
    """Greedy replies to the judge's prompts, 24 at once; shared: what prompts begin with is prefilled once."""
    rows, caches = [[token for segment in prompt for token in segment] for prompt in prompts], None
    if shared:
        known: dict[tuple[int, ...], Any] = {(): None}
        caches = []
        for *begins, _ in prompts:
            path: tuple[int, ...] = ()
            for segment in begins:
                before, path = path, (*path, *segment)
                if path not in known:
                    known[path] = prefilled(peer, known[before], segment)
            caches.append(known[path])
        rows = [prompt[-1] for prompt in prompts]
    how: Any = {"completion_batch_size": 24, "prefill_batch_size": 24, "stop_tokens": [[i] for i in eos_ids]}
    completions, _, _ = generate(peer, rows, [limit] * len(rows), False, caches, **how)
    return [reply[:-1] if reply[-1] in eos_ids else reply for reply in completions]


def rival(peer: Any, directory: Path) -> Rival:
    """mlx_lm in every way that it can be run."""
    ways: dict[str, dict[str, Any]] = {
        "mlx_lm": {},
        "mlx_lm_default": {"own_sizes": True},
        "mlx_lm_shared": {"shared": True},
    }
    engines = {name: functools.partial(run_mlx_lm, peer=peer, **way) for name, way in ways.items()}
    judge = functools.partial(replies, peer=peer, eos_ids=hub.load_config(directory).eos_ids)
    whole, shared = functools.partial(judge, shared=False), functools.partial(judge, shared=True)
    judges = {"mlx_lm": Replies(whole), "mlx_lm_shared": Replies(shared), "mlx_lm_one_token": Replies(shared, 1)}
    return Rival("mlx_lm", "Result: ours is {} than mlx_lm on this rollout workload.", {**engines}, judges, [])


def main(argv: list[str] | None = None) -> None:
    rollout.main(argv, "bench_rollout.py", "Time rollouts against mlx_lm's.", rival)


if __name__ == "__main__":
    main()
