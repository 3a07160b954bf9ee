"""
The command that shows what a model writes.

`uv run chat.py --prompt "Hi"` prints completions of a prompt. `--chat` starts a conversation in the
terminal. If there are tools or an environment, and neither of these two flags is given, the model
plays episodes with held-out problems.

In a conversation, the cache keeps all earlier turns. The model's own turns keep the token ids that
were sampled, and are not encoded again from text. This file does not cover rollouts (sampler.py),
tools (tools/episodes.py), or the text that a template puts between turns (tools/calls.py).
"""

import argparse
import contextlib
import dataclasses
import signal
import sys
from collections.abc import Generator, Iterable, Iterator
from typing import Any

import cpu_blas  # noqa: F401  (before mlx)
import mlx.core as mx
import numpy as np

import gwen
import lora
import sampler
import tasks
from config import SETTINGS, TOOLS, Config
from deploy.training_prompts import load_shared_opening_and_warning
from disk import ends, model_card, model_choice, run_files
from evaluation import policy
from flags import Parser, add_flags, check_minimums, exit_on_mistakes, flag_of
from kv_cache import KVCache
from machine import gpu
from machine.output import guard_output
from prompts import chat_template
from prompts.data import refuse_blank_or_broken_text
from prompts.examples import pick_evenly_spaced, shorten_value
from settings.checks import check_settings
from settings.sources import load_recipe, load_task_defaults, resolve_settings, settings_from_flags
from text.printable import escape_invisible
from text.wrapping import print_wrapped
from tools import episodes, tool_workers
from tools import toolbox as toolbox_module
from tools.calls import TurnCodec

Messages = list[dict[str, Any]]

# ---- a model in a conversation


@dataclasses.dataclass
class ChatModel:
    """A model that talks with the user, and the cache of all turns so far."""

    model: gwen.Model
    tokenizer: Any
    params: sampler.SamplingParams
    thinking: bool
    opening: Messages  # messages before the user's first line
    seed: int
    context: int  # the maximum number of tokens in a conversation
    toolbox: toolbox_module.Toolbox | None
    is_before: bool = False  # whether the model answers with its weights from before training

    def __post_init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Forgets the conversation."""
        self.episodes: episodes.Episodes | None = None  # holds one episode; None without tools
        self.num_turns = 0
        self.cache = KVCache(self.model.config.layer_kinds)
        self.decoder = sampler.Decoder(self.model, self.cache, self.params)
        self.turn: list[int] = []  # the ids of the newest turn
        # A base model's end tokens may differ from those in its chat template.
        end_ids = self.model.config.end_ids
        self.end = ends.find_end_of_reply_id(self.tokenizer) or end_ids[0]
        self.ends = {*end_ids, self.end}
        self.frames = TurnCodec(self.tokenizer, sorted(self.ends), thinking=self.thinking)

    def stream_reply(self, line: str) -> Generator[str, None, None]:
        """
        Yields the answer to the user's line, in pieces of whole characters.

        There is a piece for each token, so that the caller can stop after any token. A piece is ""
        if the token does not complete a character, or if the text may be part of a stop text.
        """
        ids = self.encode_since_last_reply(line)
        with lora.use_initial_weights(self.model) if self.is_before else gpu.without_gradients():
            while ids:
                turn = self.generate_turn(ids)
                yield from stream_text(turn, self.tokenizer, self.params.stop)
                ids = []
                if self.episodes and self.newest_turn_has_end_token():
                    self.episodes.end_turn(0, self.turn)
                    answer = self.episodes.take_replies(wait=True)[0]
                    episode = self.episodes.episodes[0]
                    for message in episode.tool_messages:
                        yield f"\n[{message['name']}] {message['content']}\n"
                    # If no turn is left, these messages go before the user's next line.
                    if not isinstance(answer, str):
                        ids = answer
                        episode.tool_messages = []

    def encode_since_last_reply(self, user_line: str) -> list[int]:
        """
        Returns the token ids between the model's last answer and its next answer.

        These ids contain the user's line, and messages from tools that the model has not read yet.
        """
        message = {"role": "user", "content": user_line}
        if self.cache.length == 0:
            messages = [*self.opening, message]
            if self.toolbox:
                self.episodes = episodes.Episodes(
                    self.toolbox,
                    [{"prompt": messages}],
                    [0],
                    f"talk {self.seed}",
                    is_evaluation=True,
                )
                return self.episodes.prompts[0]
            return chat_template.encode_chat(self.tokenizer, messages, thinking=self.thinking)

        messages = [message]
        schemas = None
        if self.toolbox and self.episodes:
            episode = self.episodes.episodes[0]
            schemas = list(self.toolbox.schemas[""].values())
            messages = [*episode.tool_messages, message]
            episode.tool_messages = []
            episode.num_turns = 0
        missing_end = [] if self.newest_turn_has_end_token() else [self.end]
        return missing_end + self.frames.encode_between_turns(messages, schemas)

    def newest_turn_has_end_token(self) -> bool:
        """Whether the newest turn ended with an end token."""
        return bool(self.turn) and self.turn[-1] in self.ends

    def generate_turn(self, ids: list[int]) -> Iterator[int]:
        """
        Adds ids to the conversation, samples a turn after them, and yields the ids of the turn.

        Each token, even an end token, is already in the cache when it is yielded.
        """
        self.turn = []
        room = self.context - self.cache.length - len(ids)
        if room <= 0:
            raise ValueError(
                f"the conversation fills the model's context of {self.context} tokens; "
                "begin a new conversation"
            )
        decoder = self.decoder
        decoder.logits = sampler.prefill_and_get_last_logits(
            self.model, mx.array([ids]), self.cache
        )
        self.num_turns += 1

        limit = min(self.params.max_tokens_per_row(1)[0], room)
        for uniform_numbers in sampler.four_uniforms_per_position(
            self.seed, [self.num_turns], limit
        )[0]:
            sampled = decoder.sample(uniform_numbers[None])
            mx.async_eval(sampled)  # before the next logits, so that it can be read earlier
            decoder.append_and_update_logits(sampled)
            token, logprob = (np.array(value)[0] for value in sampled)  # wait
            if not np.isfinite(logprob):
                raise sampler.NonFiniteLogprob(0, len(self.turn), decoder.logits.dtype)
            self.turn.append(int(token))
            yield self.turn[-1]
            if self.newest_turn_has_end_token():
                return


def stream_text(
    ids: Iterable[int], tokenizer: Any, stop: sampler.StopTexts | None
) -> Iterator[str]:
    """
    Decodes ids one by one, and yields whole characters, up to a stop text.

    Text that may begin a stop text is held back until it is clear whether it does. Bytes at the end
    that do not form a whole character are left out.
    """
    from tokenizers.decoders import DecodeStream

    stream = DecodeStream(skip_special_tokens=True)
    text = ""
    num_shown = 0
    stop_beginnings = []
    for stop_text in stop.texts if stop else ():
        for length in range(len(stop_text), 0, -1):
            stop_beginnings.append(stop_text[:length])

    for number in ids:
        text += stream.step(tokenizer.backend_tokenizer, number) or ""
        if stop:
            trimmed = stop.trim(text)
            if len(trimmed) < len(text):
                yield trimmed[num_shown:]
                return
        lengths = [len(beginning) for beginning in stop_beginnings if text.endswith(beginning)]
        end = len(text) - max(lengths, default=0)
        yield text[num_shown:end]
        num_shown = end
    yield text[num_shown:]


# ---- the conversation


def prompt_user_for_lines() -> Iterator[str]:
    """
    Yields the user's lines until Ctrl-D or the end of a pipe; "" begins a new conversation.

    Lines from a pipe are printed too.
    """
    is_terminal = sys.stdin.isatty()
    print(
        "Each line continues the conversation; an empty line begins a new conversation.",
        file=sys.stderr,
    )
    if is_terminal:
        import readline  # noqa: F401  (adds line editing to `input`)

        print("Ctrl-C stops an answer; Ctrl-D ends the chat.", file=sys.stderr)
    while True:
        try:
            line = input("> " if is_terminal else "")
        except EOFError:
            print(end="\n" if is_terminal else "")
            return
        except KeyboardInterrupt:
            if not is_terminal:
                raise
            print()
            continue
        if not line.strip():
            yield ""
            continue
        refuse_blank_or_broken_text("what you say", line)
        if not is_terminal:
            print(escape_invisible(f"> {line}"))
        yield line


def yield_messages_and_resets(messages: list[str]) -> Iterator[str]:
    """
    Yields each message, and "" between two messages, which begins a new conversation.

    If there are several messages, each of them is printed before it is answered.
    """
    for number, message in enumerate(messages):
        if number > 0:
            yield ""
        if len(messages) > 1:
            print(escape_invisible(f"> {message}"))
        yield message


def run_chat(models_by_label: dict[str, ChatModel], lines: Iterable[str]) -> None:
    """Lets every model answer each line. Ctrl-C ends an answer after the current token."""
    pressed: list[int] = []
    for line in lines:
        if not line:
            for side in models_by_label.values():
                side.reset()
            continue
        handler = signal.signal(signal.SIGINT, lambda number, _: pressed.append(number))
        try:
            for name, side in models_by_label.items():
                if name:
                    print(f"[{name}] ", end="")
                print_reply_until_ctrl_c(side, line, pressed)
                pressed.clear()
        finally:
            signal.signal(signal.SIGINT, handler)


def print_reply_until_ctrl_c(side: ChatModel, line: str, ctrl_c_presses: list[int]) -> None:
    """
    Prints the reply of the model `side` to a line.

    Stops as soon as `ctrl_c_presses` is not empty.
    """
    with contextlib.closing(side.stream_reply(line)) as reply:
        for piece in reply:
            print(escape_invisible(piece), end="", flush=True)
            if ctrl_c_presses:
                break
    print(flush=True)
    if ctrl_c_presses or side.newest_turn_has_end_token():
        return
    if len(side.turn) == side.params.max_tokens:
        print(f"(the reply was cut off at --max-tokens {len(side.turn)})", file=sys.stderr)
    elif side.cache.length == side.context:
        print(
            f"(the conversation has reached the model's context of {side.context} tokens; an empty "
            "line begins a new conversation)",
            file=sys.stderr,
        )


# ---- the command

TOOL_FLAGS = ["task", *TOOLS]


@guard_output()
@exit_on_mistakes()
def main(argv: list[str] | None = None) -> None:
    parser = Parser(
        "chat.py",
        "Sample completions of one prompt, talk to a model, or play held-out episodes with tools.",
    )
    run_files.add_adapter_flags(parser)
    parser.add_argument(
        "--model",
        help="demo, a directory, a GGUF file or a hub id (default: the model of the run, of the "
        "adapter or of the task; if there is none of these, as in train.py)",
    )
    parser.add_argument(
        "--prompt",
        action="append",
        help="the user's message (required without --chat, unless there are tools; with tools, the "
        "default is held-out problems); give the flag once for each of several messages, which are "
        "answered separately",
    )
    parser.add_argument(
        "--chat", action="store_true", help="answer lines that you type or send through a pipe"
    )
    parser.add_argument(
        "--compare",
        action="store_true",
        help="with --chat or --prompt: also answer with the model before training",
    )
    parser.add_argument(
        "--system", help="the system prompt (default with --run: the one used in training)"
    )
    parser.add_argument("--num", type=int, default=1, help="number of completions (default: 1)")
    parser.add_argument(
        "--max-tokens",
        type=int,
        help="maximum number of tokens per completion (default: as in the run; without --run, 256)",
    )
    parser.add_argument(
        "--temp", type=float, default=1.0, help="sampling temperature; 0: greedy (default: 1)"
    )
    parser.add_argument("--seed", type=int, default=0, help="random seed (default: 0)")
    parser.add_argument(
        "--thinking",
        action=argparse.BooleanOptionalAction,
        help="thinking mode of the chat template (default: as in the run; without --run, off)",
    )
    add_flags(parser, [SETTINGS[name] for name in ("stop", "end_tokens", *TOOL_FLAGS)])
    chat_play_or_complete(parser.parse_args(argv))


def chat_play_or_complete(args: argparse.Namespace) -> None:
    """Chats, plays episodes or prints completions. Raises ValueError if flags conflict."""
    adapter = run_files.fill_defaults_and_find_adapter(
        args, model=None, max_tokens=256, stop=[], end_tokens=[], thinking=False
    )
    refuse_invalid_flags(args, adapter)
    task_model = load_task_defaults(args.task or "", "").get("model")
    name, reason = model_choice.choose_model_and_reason(args.model, adapter, task_model)

    note_on_before = ""
    is_separate = False  # whether the adapter is not merged, so that it can be switched off
    if args.compare:
        start = run_files.adapter_path_at_step(args.run, 0) if args.run else None
        model, tokenizer, is_separate = policy.load_policy(name, adapter, start, args.end_tokens)
        if start:
            beginning = model_card.describe_initial_adapter(run_files.load_settings(args.run))
            note_on_before = f"; [before] is {name}{beginning}"
    else:
        model, tokenizer = gwen.load(name, adapter=adapter, end_tokens=args.end_tokens)

    config, toolbox = load_config_and_toolbox(args, name, reason, tokenizer, model)
    params = sampler.SamplingParams(
        args.max_tokens,
        args.temp,
        eos_ids=model.config.end_ids,
        stop=sampler.StopTexts(args.stop, tokenizer) if args.stop else None,
    )
    opening, note = choose_opening_and_note(args)
    line = f"model: {name}, {reason}"
    if args.run:
        line = f"run: {args.run}, {run_files.describe_adapter_at_step(args.step)}; model: {name}"
    print_wrapped(escape_invisible(f"{line}{note_on_before}{note}"), sys.stderr)

    if args.chat or args.compare:
        side = ChatModel(
            model=model,
            tokenizer=tokenizer,
            params=params,
            thinking=args.thinking,
            opening=opening,
            seed=args.seed,
            context=toolbox.context if toolbox else model.config.max_position_embeddings,
            toolbox=toolbox,
        )
        sides = {"": side}
        if args.compare:
            base = model if is_separate else gwen.load(name, end_tokens=args.end_tokens)[0]
            before = dataclasses.replace(side, model=base, is_before=is_separate)
            sides = {"before": before, "after": side}
        lines = prompt_user_for_lines() if args.chat else yield_messages_and_resets(args.prompt)
        run_chat(sides, lines)
    elif toolbox:
        problems = repeat_prompt_or_pick_held_out(args, config, opening)
        play_and_print_episodes(model, toolbox, problems, params, args)
    else:
        sample_and_print_completions(model, tokenizer, opening, params, args)


def refuse_invalid_flags(args: argparse.Namespace, adapter: str | None) -> None:
    """Raises ValueError if a flag has a wrong value or if flags conflict."""
    check_minimums(args, num=1, max_tokens=1, temp=0, seed=0)
    check_settings({"stop": args.stop, "end_tokens": args.end_tokens})
    for text in args.prompt or []:
        refuse_blank_or_broken_text("--prompt", text)
    if args.system is not None:
        refuse_blank_or_broken_text("--system", args.system)
    if args.chat and (args.prompt or args.num > 1):
        raise ValueError(
            "--chat reads your messages line by line, and gives one answer to each; "
            "leave out --prompt and --num"
        )
    if args.compare and not ((args.chat or args.prompt) and adapter):
        raise ValueError(
            "--compare shows the answers of a model before and after training; add --prompt or "
            "--chat, and name the trained model with --run or --adapter"
        )
    if args.compare and args.num > 1:
        raise ValueError("--compare shows one answer of each model; leave out --num")
    if args.system and not (args.prompt or args.chat):
        raise ValueError("--system needs a message from the user; add --prompt or --chat")


def choose_opening_and_note(args: argparse.Namespace) -> tuple[Messages, str]:
    """
    Returns the messages before the user's first message, and a note about these messages.

    With --system, the only message is this system prompt. Otherwise, with --run, the messages are
    those with which all prompts of the run began. Without --system and --run, or if the model plays
    held-out problems, there are no messages.
    """
    if args.system is not None:
        return [{"role": "system", "content": args.system}], ""
    if not args.run or not (args.chat or args.prompt):
        return [], ""
    config = check_settings(load_recipe(run_files.find_config_file(args.run)))
    opening, note = load_shared_opening_and_warning(config)
    for message in opening:
        note += f"; {message['role']}: {shorten_value(message['content'])}"
    return opening, note


def repeat_prompt_or_pick_held_out(
    args: argparse.Namespace, config: Config, opening: Messages
) -> list[dict[str, Any]]:
    """The problems to play: each --prompt, repeated --num times, or --num held-out problems."""
    if args.prompt:
        return [
            {"prompt": [*opening, {"role": "user", "content": text}]}
            for text in args.prompt
            for _ in range(args.num)
        ]
    run_held_out = tasks.read_held_out_keys(args.run) if args.run else []
    task = tasks.make_task(config, held_out_keys=run_held_out)
    return list(pick_evenly_spaced(task.held_out, args.num))


def play_and_print_episodes(
    model: gwen.Model,
    toolbox: toolbox_module.Toolbox,
    problems: list[dict[str, Any]],
    params: sampler.SamplingParams,
    args: argparse.Namespace,
) -> None:
    """Samples an episode for each problem, and prints the episodes with their rewards."""
    group_size = args.num if args.prompt else 1
    groups = [place // group_size for place in range(len(problems))]
    playing = episodes.Episodes(
        toolbox, problems, groups, f"held out {args.seed}", is_evaluation=True
    )
    rollout = sampler.rollout(
        model, playing.prompts, params, group_size=1, key=args.seed, episodes=playing
    )
    playing.collect_episode_rewards()
    for row, reason in enumerate(rollout.finish_reasons):
        print(escape_invisible(playing.format_episode(row, reason)))


def sample_and_print_completions(
    model: gwen.Model,
    tokenizer: Any,
    opening: Messages,
    params: sampler.SamplingParams,
    args: argparse.Namespace,
) -> None:
    """Samples and prints --num completions of each --prompt."""
    examples = [{"prompt": [*opening, {"role": "user", "content": text}]} for text in args.prompt]
    prompts = chat_template.encode_prompts(
        tokenizer,
        examples,
        thinking=args.thinking,
        max_tokens=args.max_tokens,
        context=model.config.max_position_embeddings,
        kind="prompt",
    )
    rollout = sampler.rollout(model, prompts, params, group_size=args.num, key=args.seed)
    texts = sampler.decode_texts(tokenizer, rollout, model.config.end_ids)
    for place, text in enumerate(texts):
        if len(args.prompt) > 1 and place % args.num == 0:
            print(escape_invisible(f"> {args.prompt[place // args.num]}"))
        print(escape_invisible(text))


def load_config_and_toolbox(
    args: argparse.Namespace,
    model_name: str,
    reason_for_model: str,
    tokenizer: Any,
    model: gwen.Model,
) -> tuple[Config, toolbox_module.Toolbox | None]:
    """
    Returns the settings from the run and the flags, and the toolbox (None if there are no tools).

    Raises ValueError if the flags do not fit the tools.
    """
    has_message = args.prompt or args.chat
    tool_settings = settings_from_flags(args, TOOL_FLAGS)
    settings: dict[str, Any] = {"model": model_name, "thinking": args.thinking} | tool_settings
    if args.run:
        config = policy.load_run_config_and_set_template_date(args.run, settings)
    else:
        config = resolve_settings(settings, None, None, lambda _: (model_name, reason_for_model))[0]

    toolbox = None
    if tool_settings or args.run or not has_message:
        tools, environments = tasks.load_tools_and_environments(config)
        toolbox = toolbox_module.make_toolbox(config, tools, environments, tokenizer, model.config)
    if tool_settings and toolbox is None:
        setting = min(tool_settings)
        raise ValueError(
            f"{flag_of(setting)} {tool_settings[setting]} has no effect without tools; leave it out"
        )
    if toolbox is None and not has_message:
        raise ValueError(
            "--prompt is missing; give the user's message, or use --task with a task that has tools"
        )
    if toolbox and args.stop:
        raise ValueError("--stop cannot be used with tools; leave it out")
    if toolbox and toolbox.environments and (args.chat or args.compare):
        flag = "--chat" if args.chat else "--compare"
        raise ValueError(
            f"{flag} cannot be used with an environment, because the environment answers the model "
            f"in your place; leave out {flag}"
        )
    return config, toolbox


if __name__ == "__main__":
    with tool_workers.end_tool_threads_on_exit():
        main()
