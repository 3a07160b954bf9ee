"""
Times rollouts against vllm-mlx on the same work: `uv sync --extra vllm`, then
`uv run bench_rollout_vllm_mlx.py` with the flags of `bench_rollout.py`.

vllm-mlx schedules mlx_lm's batch generator on mlx_lm's model. Here it runs as in its function
`generate_batch_sync`: the scheduler runs in this thread and without a server, with as many rows at
once as Gwen. It runs with its prefix cache on and off, and the faster of the two counts.

With the cache on, the beginnings that rows share are first run as prompts of their own, so that the
rows find them in the cache. vllm-mlx ignores a match of a whole prompt, and a match of fewer than
128 tokens. The cache starts empty in every run, as it must in training, where the weights change
between rollouts.

vllm-mlx returns no log-probabilities. It always turns ids into text as it generates. Its
`prefill_ms` is the time of the scheduler's steps that returned no token.

This file does not cover the measurement and the report (bench/rollout.py).
"""

import functools
import importlib.util
import logging
import time
from pathlib import Path
from typing import Any

import cpu_blas  # noqa: F401  (before mlx)
import mlx.core as mx

from bench import rollout
from bench.rollout import Rival, Timing, Work
from disk import hub
from flags import exit_with_error


def run_vllm_mlx(work: Work, *, peer: Any, tokenizer: Any, prefix_cache: bool) -> Timing:
    """Does the work with vllm-mlx's scheduler. With a prefix cache, fills the cache first."""
    from vllm_mlx.scheduler import Scheduler, SchedulerConfig

    config = SchedulerConfig(
        prefill_batch_size=work.batch_size,
        completion_batch_size=work.batch_size,
        enable_prefix_cache=prefix_cache,
    )
    scheduler = Scheduler(peer, tokenizer, config)
    mx.random.seed(work.seed)
    begin = time.perf_counter()
    if prefix_cache:
        prefixes = [tuple(rollout.join_runs(runs[:-1])) for runs in work.runs]
        primers = [list(prefix) for prefix in dict.fromkeys(prefixes) if prefix]
        generate(scheduler, work, primers, [1] * len(primers))
    priming_s = time.perf_counter() - begin
    completions, prefill_s = generate(scheduler, work, work.rows, work.limits)
    decode_s = time.perf_counter() - begin - priming_s - prefill_s
    scheduler.reset()  # a prefix cache holds every completion until then
    return Timing(completions, [], priming_s + prefill_s, decode_s)


def generate(
    scheduler: Any, work: Work, prompts: list[list[int]], limits: list[int]
) -> tuple[list[list[int]], float]:
    """The completion of each prompt, and the seconds of the steps that returned no token."""
    from vllm_mlx.request import Request, SamplingParams

    for row, (prompt, limit) in enumerate(zip(prompts, limits, strict=True)):
        params = SamplingParams(
            max_tokens=limit,
            temperature=work.temperature,
            top_p=1.0,  # the default of 0.9 sorts the vocabulary at every step
            stop_token_ids=list(work.eos_ids),
        )
        scheduler.add_request(Request(request_id=str(row), prompt=prompt, sampling_params=params))
    completions: list[list[int]] = [[] for _ in prompts]
    silent_s = 0.0
    while scheduler.has_requests():
        begin = time.perf_counter()
        outputs = scheduler.step().outputs
        if not outputs:
            silent_s += time.perf_counter() - begin
        for output in outputs:
            reason = output.finish_reason
            assert reason in (None, "stop", "length"), f"vllm-mlx ended a row with {reason}"
            completions[int(output.request_id)] += output.new_token_ids
    for row in range(len(prompts)):
        scheduler.remove_finished_request(str(row))
    return completions, silent_s


def make_rival(peer: Any, directory: Path) -> Rival:
    """vllm-mlx with its prefix cache and without."""
    # vllm-mlx warns of hooks that this mlx_lm does not have
    logging.getLogger("vllm_mlx").setLevel(logging.ERROR)
    tokenizer = hub.load_tokenizer(directory)
    tokenizer.eos_token = (
        None  # otherwise rows would also end at this token, against `work.eos_ids`
    )
    run = functools.partial(run_vllm_mlx, peer=peer, tokenizer=tokenizer)
    return Rival(
        name="vllm_mlx",
        result="Result vs vllm_mlx: ours is {} on this rollout workload.",
        engines={
            "vllm_mlx": functools.partial(run, prefix_cache=True),
            "vllm_mlx_uncached": functools.partial(run, prefix_cache=False),
        },
    )


def main(argv: list[str] | None = None) -> None:
    if importlib.util.find_spec("vllm_mlx") is None:
        exit_with_error("vllm-mlx is not installed; install it with: uv sync --extra vllm")
    program = "bench_rollout_vllm_mlx.py"
    rollout.main(argv, program, "Time rollouts against vllm-mlx's.", make_rival)


if __name__ == "__main__":
    main()
