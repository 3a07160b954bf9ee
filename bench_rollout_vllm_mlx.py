"""
Rollouts against vllm-mlx on the same work: `uv sync --extra vllm`, then `uv run bench_rollout_vllm_mlx.py` with the
flags of `bench_rollout.py`, whose work, checks and report these are.

vllm-mlx schedules mlx_lm's batch generator on mlx_lm's model. It runs here as its `generate_batch_sync` does, the
scheduler in this thread and without a server, with as many rows at once as ours, with its prefix cache off and on; the
better of the two counts. With the cache on, each prompt less its last token is generated from first, so that the rows
find it: vllm-mlx drops a match of a whole prompt, and one of fewer than 128 tokens. It starts empty in every run, as it
must in training, where the weights change between rollouts. vllm-mlx gives no log-probabilities, and turns ids into
text as it goes, which it cannot be kept from. `prefill_ms` of vllm-mlx is that of the scheduler's steps that gave no
token. Judging (`--benchmark-judge`) has its default batch sizes.
"""

import argparse
import functools
import importlib.util
import logging
import sys
import time
from pathlib import Path
from typing import Any

import cpu_blas  # noqa: F401  (before mlx)
import mlx.core as mx

import bench_judge
import gwen
import hub
import telemetry
from bench_rollout import (
    Disagreement,
    Engine,
    Run,
    Work,
    check_agreement,
    load_peer,
    make_work,
    measure,
    model_directory,
    our_engine,
    parse,
    print_engine,
    print_json,
    print_phases,
    print_roofline,
    print_rounds,
    print_settings,
    print_unequal,
    settle_size,
    summary,
    verdict,
)


def run_vllm_mlx(work: Work, *, peer: Any, tokenizer: Any, prefix_cache: bool) -> Run:
    """The work done by vllm-mlx's scheduler; with the prefix cache, after each prompt has been put into it."""
    from vllm_mlx.scheduler import Scheduler, SchedulerConfig

    size = work.batch_size
    config = SchedulerConfig(prefill_batch_size=size, completion_batch_size=size, enable_prefix_cache=prefix_cache)
    scheduler = Scheduler(peer, tokenizer, config)
    mx.random.seed(work.seed)
    begin = time.perf_counter()
    if prefix_cache:
        primers = [prompt[:-1] for prompt in work.prompts if len(prompt) > 1]
        generate(scheduler, work, primers, [1] * len(primers))
    priming_s = time.perf_counter() - begin
    completions, prefill_s = generate(scheduler, work, work.rows, work.limits)
    decode_s = time.perf_counter() - begin - priming_s - prefill_s
    scheduler.reset()  # a prefix cache holds every completion until then
    return Run(completions, [], priming_s + prefill_s, decode_s)


def generate(scheduler: Any, work: Work, prompts: list[list[int]], limits: list[int]) -> tuple[list[list[int]], float]:
    """The completion of each prompt, and the seconds of the steps that gave no token."""
    from vllm_mlx.request import Request, SamplingParams

    for row, (prompt, limit) in enumerate(zip(prompts, limits, strict=True)):
        params = SamplingParams(
            max_tokens=limit,
            temperature=work.temperature,
            top_p=1.0,  # its default of 0.9 sorts the vocabulary at every step
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
            assert output.finish_reason in (None, "stop", "length"), f"vllm-mlx ended a row with {output.finish_reason}"
            completions[int(output.request_id)] += output.new_token_ids
    for row in range(len(prompts)):
        scheduler.remove_finished_request(str(row))
    return completions, silent_s


def judge_rival(work: Work, peer: Any, tokenizer: Any, prefix_cache: bool) -> bench_judge.Generate:
    """Greedy replies of vllm-mlx to the judge's prompts; with the prefix cache, each finds what an earlier one left."""
    from vllm_mlx.scheduler import Scheduler, SchedulerConfig

    def replies(prompts: list[list[int]], limit: int) -> list[list[int]]:
        config = SchedulerConfig(enable_prefix_cache=prefix_cache)
        scheduler = Scheduler(peer, tokenizer, config)
        completions, _ = generate(scheduler, work._replace(temperature=0.0), prompts, [limit] * len(prompts))
        scheduler.reset()
        return completions

    return replies


def compare(args: argparse.Namespace, directory: Path) -> None:
    """Checks, measures and reports ours and vllm-mlx on the model of a directory."""
    logging.getLogger("vllm_mlx").setLevel(logging.ERROR)  # it warns of hooks that this mlx_lm has not
    model, tokenizer = gwen.load_model(directory), hub.load_tokenizer(directory)
    tokenizer.eos_token = None  # it would end rows at this token too, whatever the work says
    why = settle_size(args, model)
    peer = load_peer(directory, model.head_weight.dtype)
    work = make_work(args, model.config)
    vllm_mlx = functools.partial(run_vllm_mlx, peer=peer, tokenizer=tokenizer)
    engines: dict[str, Engine] = {
        "ours": our_engine(args, model),
        "off": functools.partial(vllm_mlx, prefix_cache=False),
        "on": functools.partial(vllm_mlx, prefix_cache=True),
    }
    check_agreement(model, engines, work)
    print_settings(args, model, why)
    samples = measure(engines, work, args.warmup, args.runs)
    entries: dict[str, Any] = {name: summary(samples[name], model) for name in engines}
    off, on = entries.pop("off"), entries.pop("on")
    better = "on" if on["mean_ms"] < off["mean_ms"] else "off"
    entries["vllm_mlx"] = (on if better == "on" else off) | {"prefix_cache": better}
    for name, entry in entries.items():
        print_engine(name, 10, entry)
    print_phases(entries)
    print_unequal(entries)
    print(f"Prefix cache of vllm_mlx: off {off['mean_ms']:.1f} ms, on {on['mean_ms']:.1f} ms")
    print_rounds("vllm_mlx", samples["ours"], samples[better])
    roofline_frac = print_roofline(model, work, samples["ours"], args.share_prefix is not False)
    ratio = entries["vllm_mlx"]["mean_ms"] / entries["ours"]["mean_ms"]
    print(f"Result vs vllm_mlx: ours is {verdict(ratio)} on this rollout workload.")
    judging = None
    if args.benchmark_judge:
        rivals = {name: judge_rival(work, peer, tokenizer, name == "on") for name in ("off", "on")}
        judging = bench_judge.benchmark(args, model, hub.load_tokenizer(directory), "vllm_mlx", rivals)
    print_json(args, entries, ratio, roofline_frac, judging, "vllm-mlx")


def main(argv: list[str] | None = None) -> None:
    try:
        args = parse(argv, "bench_rollout_vllm_mlx.py", "Time rollouts against vllm-mlx's.")
        if importlib.util.find_spec("vllm_mlx") is None:
            raise ValueError("vllm-mlx is not installed; install it with: uv sync --extra vllm")
        with model_directory(args.model) as directory:
            compare(args, directory)
    except (ValueError, OSError) as error:
        telemetry.fail(error)
    except Disagreement as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
