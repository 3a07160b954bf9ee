"""
`uv run sampler.py --prompt "Hi"` shows completions, `--chat` talks in the terminal, and what has tools plays.

A talk goes on in the cache of all that was said: a turn continues from the last, and what the model wrote stays as it
was drawn. Left out: rollouts (sampler.py), tools (problems/episodes.py), what stands between turns (problems/calls.py).
"""

import argparse
import contextlib
import dataclasses
import signal
import sys
from collections.abc import Callable, Generator, Iterable, Iterator
from typing import Any

import mlx.core as mx
import numpy as np

import evaluate
import gwen
import lora
import sampler
import tasks
from config import SETTINGS, TOOLS, Config
from deploy import command
from disk import ends, run_files
from flags import Parser, add_flags, check_least, escape_invisible, flag_of, report_mistakes
from kv_cache import KVCache
from machine import gpu
from machine.output import guard_output
from problems import chat_template, episodes
from problems.calls import Frames
from problems.data import check_text
from problems.examples import shorten_value, spread_evenly
from settings.checks import check_settings
from settings.sources import given_settings, load_recipe, load_task_defaults, resolve_settings

# ---- one side of a talk


@dataclasses.dataclass
class ChatModel:
    """A model in a talk, with the cache of what it was told and wrote."""

    model: gwen.Model
    tokenizer: Any
    params: sampler.SamplingParams
    thinking: bool
    opening: list[dict[str, Any]]  # messages before what the user says
    seed: int
    context: int  # tokens of a talk
    box: episodes.Toolbox | None
    is_before: bool = False  # it answers as before training, see `lora.with_initial_weights`

    def __post_init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Forgets the talk."""
        self.playing: episodes.Episodes | None = None
        self.num_turns, eos_ids = 0, self.model.config.end_ids
        self.cache = KVCache(self.model.config.layer_kinds)
        self.forward: Callable[..., mx.array] = gwen.decode_step(self.model)
        self.turn: list[int] = []  # the ids of its newest turn
        self.end = ends.end_of_reply(self.tokenizer) or eos_ids[0]
        self.ends = {*eos_ids, self.end}  # a base model has others than its template
        self.frames = Frames(self.tokenizer, sorted(self.ends), thinking=self.thinking)

    def reply(self, line: str) -> Generator[str, None, None]:
        """What it answers to the user, in pieces of whole characters; "" now and then, so that it can be left."""
        told = self.encode_turn(line)
        with lora.with_initial_weights(self.model) if self.is_before else gpu.without_gradients():
            while told:
                yield from stream_text(self.generate_turn(told), self.tokenizer, self.params.stop)
                told = []
                if self.playing and self.is_over():
                    self.playing.end_turn(0, self.turn)
                    answer, episode = self.playing.take_replies(wait=True)[0], self.playing.rows[0]
                    for message in episode.told:
                        yield f"\n[{message['name']}] {message['content']}\n"
                    if not isinstance(
                        answer, str
                    ):  # else what it was told comes with what the user says next
                        told, episode.told = answer, []

    def encode_turn(self, line: str) -> list[int]:
        """The ids of what the user says, up to where the answer begins."""
        if self.cache.length == 0:
            said = [*self.opening, {"role": "user", "content": line}]
            if self.box:
                self.playing = episodes.Episodes(
                    self.box, [{"prompt": said}], [0], f"talk {self.seed}"
                )
                return self.playing.prompts[0]
            return chat_template.encode_chat(self.tokenizer, said, thinking=self.thinking)
        message, schemas = {"role": "user", "content": line}, None
        messages = [message]
        if self.box and self.playing:
            episode, schemas = self.playing.rows[0], list(self.box.schemas[""].values())
            messages, episode.told, episode.num_turns = [*episode.told, message], [], 0
        return [self.end] * (not self.is_over()) + self.frames.encode_between_turns(
            messages, schemas
        )

    def is_over(self) -> bool:
        """Whether its newest turn has ended by itself."""
        return bool(self.turn) and self.turn[-1] in self.ends

    def generate_turn(self, told: list[int]) -> Iterator[int]:
        """Reads what it is told and draws a turn. Each token is in the cache when it comes, also an end token."""
        model, params, self.turn = self.model, self.params, []
        room = self.context - self.cache.length - len(told)
        if room <= 0:
            raise ValueError(
                f"the talk fills the {self.context} tokens that the model can read; begin another"
            )
        width = gpu.prefill_tokens()
        for begin in range(0, len(told), width):
            hidden = model.hidden(mx.array([told[begin : begin + width]]), self.cache)[:, -1]
            mx.eval(
                hidden, self.cache.arrays()
            )  # wait: the next part may use the memory of this one
        logits, self.num_turns = hidden @ model.head_weight.T, self.num_turns + 1
        limit = min(params.limits(1)[0], room)
        for numbers in sampler.uniforms(self.seed, [self.num_turns], limit)[0]:
            token, logprob, _ = sampler.choose_token(logits, mx.array(numbers[None]), params)
            mx.async_eval(
                token, logprob
            )  # apart from the next step, so that they can be read while it goes on
            logits = self.forward(token[:, None], self.cache)[:, -1] @ model.head_weight.T
            mx.async_eval(logits)
            if not np.isfinite(np.array(logprob)).all():  # wait
                raise sampler.NotFinite(0, len(self.turn), logits.dtype)
            self.turn.append(int(np.array(token)[0]))
            yield self.turn[-1]
            if self.is_over():
                return


def stream_text(ids: Iterable[int], tokenizer: Any, stop: sampler.Stop | None) -> Iterator[str]:
    """
    The text of ids as they come, in whole characters, up to a stop text; what may begin one waits until it does not.

    Bytes that are no character when the ids end are left out.
    """
    from tokenizers.decoders import DecodeStream

    stream, text, num_shown = DecodeStream(skip_special_tokens=True), "", 0
    starts = [
        one[:length] for one in (stop.texts if stop else ()) for length in range(len(one), 0, -1)
    ]
    for one in ids:
        text += stream.step(tokenizer.backend_tokenizer, one) or ""
        if stop and len(cut := stop.trim(text)) < len(text):
            yield cut[num_shown:]
            return
        num_held = max((len(start) for start in starts if text.endswith(start)), default=0)
        yield text[num_shown : len(text) - num_held]
        num_shown = len(text) - num_held
    yield text[num_shown:]


# ---- the talk


def read_lines() -> Iterator[str]:
    """What the user says, line by line, until Ctrl-D or the end of a pipe, whose lines are shown; "" begins anew."""
    print("A line goes on with the talk, an empty one begins another.", file=sys.stderr)
    if sys.stdin.isatty():
        import readline  # noqa: F401  (`input` edits lines by it)

        print("Ctrl-C ends an answer, Ctrl-D the talk.", file=sys.stderr)
    while True:
        try:
            line = input("> " if sys.stdin.isatty() else "")
        except EOFError:
            print(end="\n" if sys.stdin.isatty() else "")
            return
        except KeyboardInterrupt:
            if not sys.stdin.isatty():
                raise
            print()
            continue
        if line := line.strip() and line:
            check_text("what you say", line)
            if not sys.stdin.isatty():
                print(escape_invisible(f"> {line}"))
        yield line


def run_chat(sides: dict[str, ChatModel], said: Iterable[str]) -> None:
    """Every side answers every line; Ctrl-C ends an answer, after a whole token."""
    pressed: list[int] = []
    for line in said:
        if not line:
            for side in sides.values():
                side.reset()
            continue
        before = signal.signal(signal.SIGINT, lambda number, _: pressed.append(number))
        try:
            for name, side in sides.items():
                print(f"[{name}] " if name else "", end="")
                with contextlib.closing(side.reply(line)) as reply:
                    for piece in reply:
                        print(escape_invisible(piece), end="", flush=True)
                        if pressed:
                            break
                print(flush=True)
                pressed.clear()
                if len(side.turn) == side.params.max_tokens and not side.is_over():
                    print(f"(--max-tokens {len(side.turn)} ends it there)", file=sys.stderr)
        finally:
            signal.signal(signal.SIGINT, before)


# ---- the command

PLAYED = ["task", *TOOLS]


@guard_output()
@report_mistakes()
def main(argv: list[str] | None = None) -> None:
    parser = Parser(
        "sampler.py",
        "Sample completions of one prompt, talk, or play held-out episodes with tools.",
    )
    run_files.add_adapter_flags(parser)
    parser.add_argument(
        "--model",
        help="demo, a Hugging Face directory or a hub id (default: the run's or adapter's)",
    )
    parser.add_argument(
        "--prompt", help="what the user says (default: held-out problems, where there are tools)"
    )
    parser.add_argument(
        "--chat", action="store_true", help="talk: answers to lines that you write, or pipe in"
    )
    parser.add_argument(
        "--compare", action="store_true", help="in a talk, the model before training answers too"
    )
    parser.add_argument(
        "--system", help="what stands before it (default: with a run, what training had)"
    )
    parser.add_argument("--num", type=int, default=1, help="completions")
    parser.add_argument("--max-tokens", type=int, help="default: the run's, else 256")
    parser.add_argument("--temp", type=float, default=1.0, help="0 is greedy (default: 1)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--thinking", action=argparse.BooleanOptionalAction, help="default: the run's, else off"
    )
    add_flags(parser, [SETTINGS[name] for name in ("stop", "end_tokens", *PLAYED)])
    answer_prompts(parser.parse_args(argv))


def answer_prompts(args: argparse.Namespace) -> None:
    """Does what the flags ask for. Raises ValueError where they do not fit together."""
    adapter = run_files.adapter_from_flags(
        args, model=None, max_tokens=256, stop=[], end_tokens=[], thinking=False
    )
    check_least(args, num=1, max_tokens=1, temp=0, seed=0)
    check_settings({"stop": args.stop, "end_tokens": args.end_tokens})
    for flag, text in (("--prompt", args.prompt), ("--system", args.system)):
        if text is not None:
            check_text(flag, text)
    if args.chat and (args.prompt or args.num > 1):
        raise ValueError(
            "--chat reads what you say line by line, and answers once; leave out --prompt and --num"
        )
    if args.compare and not (args.chat and adapter):
        raise ValueError(
            "--compare is for --chat with the --run or --adapter whose model is compared"
        )
    if args.system and not (args.prompt or args.chat):
        raise ValueError("--system stands before what the user says; give --prompt too")
    name, why = gwen.choose_model(
        args.model, adapter, load_task_defaults(args.task or "", "").get("model")
    )
    if args.compare:
        start = run_files.adapter_path(args.run, 0) if args.run else None
        model, tokenizer, is_beside = evaluate.load_policy(name, adapter, start, args.end_tokens)
        why += (
            f"; [before] is {name}{run_files.describe_start(run_files.load_settings(args.run))}"
            if start
            else ""
        )
    else:
        model, tokenizer = gwen.load(name, adapter=adapter, end_tokens=args.end_tokens)
    config, box = toolbox(args, name, why, tokenizer, model)
    end_ids, stop = model.config.end_ids, sampler.Stop(args.stop, tokenizer) if args.stop else None
    params, note = (
        sampler.SamplingParams(args.max_tokens, args.temp, eos_ids=end_ids, stop=stop),
        "",
    )
    opening = [] if args.system is None else [{"role": "system", "content": args.system}]
    if (args.chat or args.prompt) and args.run and args.system is None:
        opening, note = command.shared_opening(
            check_settings(load_recipe(run_files.config_file(args.run)))
        )
        note += "".join(f"; {one['role']}: {shorten_value(one['content'])}" for one in opening)
    print(escape_invisible(f"model: {name}, {why}{note}"), file=sys.stderr)
    problems, size = [{"prompt": [*opening, {"role": "user", "content": args.prompt}]}], args.num
    context = box.context if box else model.config.max_position_embeddings
    if args.chat:
        how = (tokenizer, params, args.thinking, opening, args.seed, context, box)
        sides = {"after" if args.compare else "": ChatModel(model, *how)}
        if args.compare:
            before = model if is_beside else gwen.load(name, end_tokens=args.end_tokens)[0]
            sides = {"before": ChatModel(before, *how, is_before=is_beside)} | sides
        run_chat(sides, read_lines())
    elif box:
        if not args.prompt:
            begun = tasks.read_held_out(args.run) if args.run else []
            problems, size = (
                spread_evenly(tasks.make_task(config, begun=begun).held_out, args.num),
                1,
            )
        problems = [problem for problem in problems for _ in range(size)]
        groups = [row // size for row in range(len(problems))]
        play = episodes.Episodes(box, problems, groups, f"held out {args.seed}")
        done = sampler.rollout(model, play.prompts, params, group_size=1, key=args.seed, talk=play)
        play.request_rewards()
        print(
            escape_invisible(
                "\n".join(
                    play.describe(row, reason) for row, reason in enumerate(done.finish_reasons)
                )
            )
        )
    else:
        limits: dict[str, Any] = {
            "max_tokens": args.max_tokens,
            "context": context,
            "kind": "prompt",
        }
        prompts = chat_template.encode_prompts(
            tokenizer, problems, thinking=args.thinking, **limits
        )
        result = sampler.rollout(model, prompts, params, group_size=size, key=args.seed)
        print(escape_invisible("\n".join(sampler.decode_texts(tokenizer, result, end_ids))))


def toolbox(
    args: argparse.Namespace, name: str, why: str, tokenizer: Any, model: gwen.Model
) -> tuple[Config, episodes.Toolbox | None]:
    """The settings of what is sampled, a run's or as asked for, and its tools, None where it has none."""
    asked, is_said = given_settings(args, PLAYED), args.prompt or args.chat
    settings: dict[str, Any] = {"model": name, "thinking": args.thinking}
    if args.run:
        config = evaluate.load_run_config(args.run, settings | asked)
    else:
        config = resolve_settings(settings | asked, None, None, lambda _: (name, why))[0]
    box = None
    if asked or args.run or not is_said:
        box = episodes.make_toolbox(config, *tasks.load_tools(config), tokenizer, model.config)
    if asked and box is None:
        flag = min(asked)
        raise ValueError(
            f"{flag_of(flag)} {asked[flag]} is for what has tools, and nothing here has; leave it out"
        )
    if box is None and not is_said:
        raise ValueError(
            "--prompt is missing: what the user says; only what has tools asks by itself"
        )
    if box and args.stop:
        raise ValueError("--stop is for completions without tools; leave it out")
    if box and box.environments and args.chat:
        raise ValueError(
            "--chat has tools and no environment, which plays by itself; leave --chat out"
        )
    return config, box
