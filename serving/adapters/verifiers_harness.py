"""
A harness for `train.py --env-server` that plays the environments of verifiers 0.4.

    uv run --no-project --with 'verifiers[ta]==0.4.0' python serving/adapters/verifiers_harness.py \
        textarena taskset.game=Hangman-v0 player.max_turns=8

The first argument is the id of a taskset. Each further argument NAME=VALUE sets a value of the
environment's configuration; VALUE is a text or JSON. This script runs in the environment's own
Python and imports nothing from Gwen. It uses the protocol in serving/harness.py: it lists the
examples, plays the episodes that Gwen asks for, and reports the token ids and the reward of each
episode.

Every agent plays with the harness "null" in the runtime "subprocess", unless a value says
otherwise. In this runtime, verifiers starts a program for each episode. The flag --at-once
therefore limits the number of episodes that are played at the same time.

Gwen can train on an episode only if the episode has a single agent and a single conversation. Each
turn must add messages to this conversation, and must not change or remove any.
"""

import argparse
import asyncio
import itertools
import json
import os
import sys
from typing import Any

from renderers import RenderedTokens
from renderers.configs import CustomRendererConfig, DefaultRendererConfig
from renderers.default import DefaultRenderer
from verifiers.v1.clients import ModelContext, TrainClientConfig
from verifiers.v1.configs.agent import agent_config_fields
from verifiers.v1.dialects.chat import message_to_wire
from verifiers.v1.utils.loaders import load_environment, resolve_env_config

MESSAGES = os.fdopen(os.dup(sys.stdout.fileno()), "w")
os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # libraries' output must not mix with messages
EXCHANGE = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]


class IdKeepingTemplateRenderer(DefaultRenderer):
    """Renders with the tokenizer's chat template, and keeps the ids of earlier turns."""

    config_class = DefaultRendererConfig

    def bridge_to_next_turn(
        self,
        previous_prompt_ids: list[int],
        previous_completion_ids: list[int],
        new_messages: list[Any],
        *,
        tools: list[Any] | None = None,
    ) -> RenderedTokens:
        """The ids of the conversation so far, and the template's ids for the new messages."""
        end_id = self.get_stop_token_ids()[0]
        previous = [*previous_prompt_ids, *previous_completion_ids]
        if previous_completion_ids[-1] != end_id:
            previous.append(end_id)
        before = self._apply(EXCHANGE, tools=tools)
        after = self._apply([*EXCHANGE, *new_messages], tools=tools, add_generation_prompt=True)
        last_end = len(before) - before[::-1].index(end_id)
        tail = after[last_end:]
        indices = [-1] * len(previous) + [0] * len(tail)
        return RenderedTokens(
            token_ids=previous + tail,
            message_indices=indices,
            message_roles=[message["role"] for message in new_messages],
        )


def send(**message: Any) -> None:
    MESSAGES.write(json.dumps(message) + "\n")
    MESSAGES.flush()


def parse_values(pairs: list[str]) -> dict[str, Any]:
    """The values in arguments of the form NAME.NAME=VALUE, as a nested dictionary."""
    values: dict[str, Any] = {}
    for pair in pairs:
        name, equals, text = pair.partition("=")
        if not equals:
            sys.exit(f"{pair} is not NAME=VALUE")
        try:
            value = json.loads(text)
        except ValueError:
            value = text
        *path, last = name.split(".")
        place = values
        for part in path:
            place = place.setdefault(part, {})
        place[last] = value
    return values


def make_environment(taskset: str, values: dict[str, Any]) -> Any:
    """The environment, whose agents play in subprocesses unless `values` says otherwise."""
    values.setdefault("taskset", {})["id"] = taskset
    for name in agent_config_fields(resolve_env_config(values)):
        agent = values.setdefault(name, {})
        agent.setdefault("harness", {}).setdefault("id", "null")
        agent.setdefault("runtime", {}).setdefault("type", "subprocess")
    return load_environment(resolve_env_config(values))


def describe_task(task: Any) -> dict[str, Any]:
    """A task as an example in the list that the harness sends to Gwen."""
    data = task.data
    prompt = data.prompt
    if isinstance(prompt, list):
        prompt = [message_to_wire(message) for message in prompt]
        if not any(message["role"] == "user" for message in prompt):
            prompt = None  # the user's messages come from the environment
    return {
        "prompt": prompt or data.description or data.name or f"task {data.idx}",
        "system": data.system_prompt,
        "name": data.name,
    }


def choose_renderer(policy: dict[str, Any]) -> CustomRendererConfig:
    """The renderer with the policy's chat template, and with the parser of its tool calls."""
    template = policy["chat_template"]
    tool_parser = None
    if "<function=" in template:
        tool_parser = "qwen3.5"
    elif "<tool_call>" in template:
        tool_parser = "qwen3"
    return CustomRendererConfig(
        import_path=f"{os.path.abspath(__file__)}:IdKeepingTemplateRenderer",
        tool_parser=tool_parser,
        enable_thinking=policy["thinking"],
    )


def make_context(policy: dict[str, Any]) -> ModelContext:
    """The context that tells agents how to reach the policy."""
    client = TrainClientConfig(
        base_url=policy["url"],
        api_key_var="GWEN_ENV_TOKEN",
        renderer=choose_renderer(policy),
        renderer_model_name=policy["tokenizer"],
    )
    return ModelContext(model=policy["model"], client=client)


def make_result(episode: Any) -> dict[str, Any]:
    """The result of an episode that has ended, in the form in which Gwen reads it."""
    errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
    if not episode.ok:
        return {"error": f"{errors[-1].type}: {errors[-1].message}" if errors else "it failed"}
    if len(episode.traces) != 1 or len(episode.traces[0].branches) != 1:
        branches = sum(len(trace.branches) for trace in episode.traces)
        return {"error": f"it has {len(episode.traces)} agents and {branches} branches, not one"}
    [trace] = episode.traces
    [branch] = trace.branches
    own = [place for place, is_own in enumerate(branch.sampled_mask) if is_own]
    messages = [message_to_wire(message) for message in branch.messages]
    first = next((i for i, m in enumerate(messages) if m["role"] == "assistant"), len(messages))
    metrics = {name: value for name, value in trace.metrics.items() if value is not None}
    rewards = {name: reward.score for name, reward in trace.rewards.items() if reward is not None}
    return {
        "token_ids": branch.token_ids,
        "own": own,
        "logprobs": [branch.logprobs[place] for place in own],
        "reward": trace.reward,
        "metrics": rewards | metrics,
        "messages": messages[first:],
    }


async def play(environment: Any, task: Any, context: ModelContext, number: int) -> None:
    """Plays one episode, and reports its result."""

    def announce(trace: Any) -> None:
        send(type="session", episode=number, session=trace.id)

    try:
        episode = await environment.run_episode(task, context, on_trace=announce)
        result = make_result(episode)
    except Exception as error:
        result = {"error": f"{type(error).__name__}: {error}"}
    send(type="result", episode=number, **result)


async def serve(environment: Any, tasks: dict[str, list[Any]]) -> None:
    """Carries out Gwen's requests until standard input is closed."""
    loop = asyncio.get_running_loop()
    running: dict[int, asyncio.Task[None]] = {}
    context = None
    async with environment.serving():
        while line := await loop.run_in_executor(None, sys.stdin.readline):
            message = json.loads(line)
            if message["type"] == "policy":
                context = make_context(message)
            elif message["type"] == "play":
                assert context is not None, "play before policy"
                number = message["episode"]
                task = tasks[message["split"]][message["example"]]
                episode = asyncio.create_task(play(environment, task, context, number))
                running = {key: other for key, other in running.items() if not other.done()}
                running[number] = episode
            elif message["type"] == "cancel" and message["episode"] in running:
                running[message["episode"]].cancel()


def main() -> None:
    parser = argparse.ArgumentParser(description="Play environments of verifiers for Gwen.")
    parser.add_argument("taskset", help="id of the taskset")
    parser.add_argument("values", nargs="*", metavar="NAME=VALUE", help="configuration")
    parser.add_argument("--num-train", type=int, default=256, help="number of examples to train on")
    parser.add_argument("--num-held-out", type=int, default=64, help="number of examples held out")
    parser.add_argument(
        "--at-once",
        type=int,
        default=4 * (os.cpu_count() or 1),
        help="number of episodes to play at the same time (default: four per processor core)",
    )
    args = parser.parse_args()
    if args.at_once < 1:
        parser.error("--at-once must be positive")

    environment = make_environment(args.taskset, parse_values(args.values))
    listed = list(itertools.islice(environment.taskset, args.num_held_out + args.num_train))
    tasks = {"held_out": listed[: args.num_held_out], "train": listed[args.num_held_out :]}
    if not tasks["train"]:
        sys.exit(f"the taskset has {len(listed)} examples; lower --num-held-out")
    examples = {split: list(map(describe_task, rows)) for split, rows in tasks.items()}
    send(type="ready", at_once=args.at_once, **examples)
    asyncio.run(serve(environment, tasks))


if __name__ == "__main__":
    main()
