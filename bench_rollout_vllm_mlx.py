"""
Compares the speed of rollouts by Gwen and by vllm-mlx on the same work.

To run this comparison, install vllm-mlx with `uv sync --extra vllm`, then call
`uv run bench_rollout_vllm_mlx.py` with the flags of `bench_rollout.py`.

vllm-mlx runs mlx_lm's model with mlx_lm's batch generator and a scheduler of its own. As in
vllm-mlx's function `generate_batch_sync`, the scheduler runs in the main thread without a server.
The scheduler decodes as many rows at once as Gwen does. vllm-mlx runs both with and without its
prefix cache, and the faster of these two configurations is compared with Gwen.

With the prefix cache, the beginnings that several prompts share are first run as separate prompts,
so that the rows find the beginnings in the cache. vllm-mlx ignores a cached prefix that is a whole
prompt or that has fewer than 128 tokens. The cache is empty at the start of every run, as it must
be in training, where the weights change between rollouts.

vllm-mlx returns no log-probabilities, and always decodes token ids to text while it generates. The
`prefill_ms` of vllm-mlx is the time spent in scheduler steps that returned no token.

This file does not cover how the times are measured and reported (bench/rollout.py).
"""

import functools
import importlib.util
import logging
import time
from pathlib import Path
from typing import Any

import cpu_blas  # noqa: F401  (before mlx)
import mlx.core as mx

from bench import judging, rollout
from bench.rollout import Rival, RolloutWork, TimedRollout
from disk import hub
from flags import exit_with_error


def time_vllm_mlx_rollout(
    work: RolloutWork, *, peer: Any, tokenizer: Any, prefix_cache: bool
) -> TimedRollout:
    """
    Does the work with vllm-mlx's scheduler, and times the work.

    The measured time includes filling the prefix cache.
    """
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
        prefixes = [
            tuple(rollout.concatenate_parts(parts[:-1])) for parts in work.prompt_parts_by_row
        ]
        primers = [list(prefix) for prefix in dict.fromkeys(prefixes) if prefix]
        generate_and_time_steps_without_tokens(scheduler, work, primers, [1] * len(primers))
    priming_s = time.perf_counter() - begin
    completions, prefill_s = generate_and_time_steps_without_tokens(
        scheduler, work, work.prompt_ids_by_row, work.limits
    )
    decode_s = time.perf_counter() - begin - priming_s - prefill_s
    scheduler.reset()  # otherwise a prefix cache would keep every completion in memory
    return TimedRollout(completions, [], priming_s + prefill_s, decode_s)


def generate_and_time_steps_without_tokens(
    scheduler: Any, work: RolloutWork, prompts: list[list[int]], limits: list[int]
) -> tuple[list[list[int]], float]:
    """Returns the completion of each prompt, and the seconds of steps that returned no token."""
    from vllm_mlx.request import Request, SamplingParams

    for row, (prompt, limit) in enumerate(zip(prompts, limits, strict=True)):
        params = SamplingParams(
            max_tokens=limit,
            temperature=work.temperature,
            top_p=1.0,  # the default of 0.9 would sort the vocabulary at every step
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
            assert reason in (None, "stop", "length"), f"vllm-mlx ended a row because of {reason}"
            completions[int(output.request_id)] += output.new_token_ids
    for row in range(len(prompts)):
        scheduler.remove_finished_request(str(row))
    return completions, silent_s


def make_vllm_mlx_rival(peer: Any, directory: Path) -> Rival:
    """Returns vllm-mlx in two configurations, with and without its prefix cache."""
    # suppress vllm-mlx's warnings about hooks that this version of mlx_lm does not have
    logging.getLogger("vllm_mlx").setLevel(logging.ERROR)
    tokenizer = hub.load_tokenizer(directory)
    tokenizer.eos_token = None  # otherwise this token would end rows even if `eos_ids` lacks it
    run = functools.partial(time_vllm_mlx_rollout, peer=peer, tokenizer=tokenizer)
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
    description = "Compare the speed of rollouts by Gwen and by vllm-mlx."
    rollout.main(
        argv, program, description, make_vllm_mlx_rival, judging.benchmark_and_print_judging
    )


if __name__ == "__main__":
    main()
