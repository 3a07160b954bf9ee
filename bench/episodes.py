"""
Times conversations that an outside harness plays: `uv run python -m bench.episodes`.

The same conversations are played inside, by `sampler.rollout` with an environment in this process,
and outside, by a harness in another process that asks Gwen's endpoint for each turn. Both
environments return nothing but random tokens, and each turn has a fixed length, so the model does
the same computation in both. The table shows the median processor seconds that this process uses
inside and outside. It also shows how many times as many processor seconds this process uses outside
as inside: the median and the range over all rounds.
"""

import argparse
import asyncio
import json
import os
import shlex
import statistics
import sys
import time
from typing import Any

import cpu_blas  # noqa: F401  (before mlx)
import numpy as np

import gwen
import sampler
from bench import harness
from flags import Parser, exit_on_mistakes
from machine.memory import BatchSize
from machine.output import guard_output
from serving.episodes import ServedEpisodes
from serving.harness import Harness, close_harnesses

TIMEOUT = 600.0  # an episode fails after this many seconds without a sign from the harness
CONTEXT_MARGIN = 16


def random_ids(rng: np.random.Generator, number: int) -> list[int]:
    """Returns random token ids that exist in every model's vocabulary."""
    return rng.integers(10, 300, number).tolist()


def make_conversations(args: argparse.Namespace) -> tuple[list[list[int]], list[list[int]]]:
    """
    Makes the prompt of each conversation, and the environment's replies to the model's turns.

    The replies of one conversation are joined into one list of token ids.
    """
    rng = np.random.default_rng(args.seed)
    prompts = [random_ids(rng, args.prompt_tokens) for _ in range(args.conversations)]
    replies = [
        random_ids(rng, args.reply_tokens * (args.turns - 1)) for _ in range(args.conversations)
    ]
    return prompts, replies


class InsideConversations:
    """An environment in this process, which implements `layers.turns.RowEpisodes`."""

    wait_s = 0.0

    def __init__(self, args: argparse.Namespace, context: int, replies: list[list[int]]):
        self.args = args
        self.context = context
        self.replies = replies
        self.num_turns = [0] * len(replies)
        self.ready: dict[int, list[int] | str] = {}

    def begin_or_restart_decoding(self, rows: list[int]) -> None:
        """Does nothing, because there is nothing to prepare."""

    def max_tokens_of_next_turn(self, row: int) -> int:
        return int(self.args.turn_tokens)

    def end_turn(self, row: int, ids: list[int], logprobs: np.ndarray) -> None:
        size = self.args.reply_tokens
        begin = self.num_turns[row] * size
        self.num_turns[row] += 1
        is_over = self.num_turns[row] == self.args.turns
        self.ready[row] = "stop" if is_over else self.replies[row][begin : begin + size]

    def receive_unfinished_turn(
        self, row: int, ids: list[int], logprobs: np.ndarray, reason: str
    ) -> None:
        """Does nothing, because a turn that reaches the row's limit needs no reply."""

    def take_replies(self, wait: bool) -> dict[int, list[int] | str]:
        ready, self.ready = self.ready, {}
        return ready


def play_inside(
    args: argparse.Namespace, model: gwen.Model, params: sampler.SamplingParams, context: int
) -> list[list[int]]:
    """Plays the conversations with an environment in this process. Returns all ids."""
    prompts, replies = make_conversations(args)
    result = sampler.rollout(
        model,
        prompts,
        params,
        group_size=1,
        key=args.seed,
        batch_size=BatchSize(args.conversations),
        episodes=InsideConversations(args, context, replies),
    )
    assert result.sequences is not None
    return result.sequences


def play_outside(
    args: argparse.Namespace,
    model: gwen.Model,
    params: sampler.SamplingParams,
    context: int,
    outside: Harness,
) -> list[list[int]]:
    """Plays the conversations with a harness in another process. Returns all ids."""
    episodes = ServedEpisodes(
        outside,
        args.conversations,
        params,
        context=context,
        vocabulary_size=model.config.vocab_size,
        timeout=TIMEOUT,
    )
    for number, episode in enumerate(episodes.episodes):
        outside.send({"type": "play", "episode": episode.number, "example": number})
    wave = episodes.gather_wave()
    assert len(wave) == args.conversations, f"only {len(wave)} conversations began together"
    sampler.rollout(
        model,
        [episode.prompt for episode in wave],
        params,
        group_size=1,
        key=args.seed,
        batch_size=BatchSize(args.conversations),
        episodes=episodes,
    )
    episodes.wait_for_results()
    episodes.cancel_episodes_and_refuse_requests()
    errors = [episode.error for episode in episodes.episodes if episode.error]
    assert not errors, errors[0]
    return [episode.conversation_ids[len(episode.prompt) :] for episode in episodes.episodes]


def time_and_print_inside_and_outside(args: argparse.Namespace) -> None:
    """Times playing inside and playing outside in alternation, and prints the table."""
    model = gwen.load_model(args.model) if os.path.isdir(args.model) else gwen.load(args.model)[0]
    num_tokens = args.turns * args.turn_tokens
    params = sampler.SamplingParams(num_tokens + 1)
    context = args.prompt_tokens + num_tokens + args.turns * args.reply_tokens + CONTEXT_MARGIN
    settings = json.dumps(vars(args))
    command = [sys.executable, "-m", "bench.episodes", "as-harness", settings]
    outside = Harness(shlex.join(command))
    outside.take_event(TIMEOUT)  # wait for the event "ready"
    outside.send({"type": "policy", "url": outside.endpoint.url})

    seconds: dict[str, list[float]] = {"inside": [], "outside": []}
    for number in range(args.rounds + 1):
        ids = {}
        for name in ("inside", "outside") if number % 2 else ("outside", "inside"):
            begin = time.process_time()
            if name == "inside":
                ids[name] = play_inside(args, model, params, context)
            else:
                ids[name] = play_outside(args, model, params, context, outside)
            if number:  # the first round is a warm-up
                seconds[name].append(time.process_time() - begin)
        assert ids["inside"] == ids["outside"], "the conversations differ"
    ratios = [b / a for a, b in zip(seconds["inside"], seconds["outside"], strict=True)]
    print(f"{args.conversations} conversations of {args.turns} turns, {args.model}")
    for name, values in seconds.items():
        print(f"{name:8} {statistics.median(values):6.2f} processor s, median of {len(values)}")
    print(f"outside / inside {statistics.median(ratios):.3f}, {min(ratios):.3f}-{max(ratios):.3f}")


# ---- the harness, in a process of its own


async def play_and_report_conversation(
    session: Any, url: str, args: argparse.Namespace, number: int, example: int
) -> None:
    """Plays one conversation, and reports its token ids to Gwen."""
    prompts, replies = make_conversations(args)
    name = str(number)
    ids = list(prompts[example])
    own: list[int] = []
    write_message({"type": "session", "episode": number, "session": name})
    for turn in range(args.turns):
        body = {"token_ids": ids, "sampling_params": {"max_tokens": args.turn_tokens}}
        async with session.post(url, json=body, headers={"X-Session-ID": name}) as response:
            choice = (await response.json())["choices"][0]
        own += range(len(ids), len(ids) + len(choice["token_ids"]))
        ids += choice["token_ids"]
        if turn < args.turns - 1:
            ids += replies[example][turn * args.reply_tokens : (turn + 1) * args.reply_tokens]
    result = {"token_ids": ids, "own": own, "reward": 0.0}
    write_message({"type": "result", "episode": number} | result)


def write_message(message: dict[str, Any]) -> None:
    print(json.dumps(message), flush=True)


async def serve_as_harness(args: argparse.Namespace) -> None:
    """Plays the conversations that Gwen asks for, until standard input is closed."""
    import aiohttp

    loop = asyncio.get_running_loop()
    write_message({"type": "ready"})
    headers = {"Authorization": f"Bearer {os.environ['GWEN_ENV_TOKEN']}"}
    connector = aiohttp.TCPConnector(limit=0)
    playing = set()
    async with aiohttp.ClientSession(headers=headers, connector=connector) as session:
        while line := await loop.run_in_executor(None, sys.stdin.readline):
            message = json.loads(line)
            if message["type"] == "policy":
                url = message["url"].removesuffix("/v1") + "/inference/v1/generate"
            elif message["type"] == "play":
                number, example = message["episode"], message["example"]
                task = asyncio.create_task(
                    play_and_report_conversation(session, url, args, number, example)
                )
                playing.add(task)
                task.add_done_callback(playing.discard)


@guard_output()
@exit_on_mistakes()
def main(argv: list[str] | None = None) -> None:
    arguments = sys.argv[1:] if argv is None else argv
    if arguments[:1] == ["as-harness"]:
        asyncio.run(serve_as_harness(argparse.Namespace(**json.loads(arguments[1]))))
        return
    parser = Parser("bench.episodes", "Time conversations that an outside harness plays.")
    parser.add_argument("--model", default="random:30m", help="the model (default: random:30m)")
    numbers: harness.Numbers = {
        "conversations": (64, 1, "number of conversations"),
        "turns": (4, 1, "turns of each conversation"),
        "turn_tokens": (32, 1, "tokens of each turn"),
        "reply_tokens": (16, 1, "tokens of the environment between two turns"),
        "prompt_tokens": (128, 1, "tokens of each prompt"),
        "rounds": (8, 1, "timed rounds, after a warm-up"),
        "seed": (0, 0, "seed of all random numbers"),
    }
    args = harness.add_number_flags_and_parse(parser, argv, numbers)
    try:
        time_and_print_inside_and_outside(args)
    finally:
        close_harnesses()


if __name__ == "__main__":
    main()
