"""
Samples of a policy that a server runs: one request each, written down as they arrive, so that nothing is paid twice.

The server renders the messages and draws. Left out: its client (judging/server.py), rewards (evaluate.py).
"""

import contextlib
import os
import sys
from pathlib import Path
from typing import Any

from tqdm.auto import tqdm

import gwen
from disk import hub
from disk.checkpoint import digest_of
from disk.run_files import JsonLines, read_log
from flags import escape_invisible
from judging.server import TEMPLATE, Endpoint, Flags, Reply
from machine import alive
from problems import chat_template
from problems.examples import Example
from problems.statements import opened_thought
from step.generation import PROMPT_END
from step.sample import Sample, new_samples

FLAGS = Flags("--url", "--url-model", "URL_API_KEY", "--max-tokens")
RETRIES = 2  # further tries of a request
PLAIN: dict[str, Any] = {
    "top_p": 1.0,
    "top_k": 0,
    "min_p": 0.0,
}  # the model's own distribution: servers have defaults


class ServedPolicy:
    """
    A policy on the server at `--url`, which names it `name`.

    model: what it runs, as `gwen.load` takes it, of which prompts' ids and texts' tokens are. folder: for answers until
    all have come. variables: what the server's template gets with every request.
    """

    def __init__(
        self,
        url: str,
        name: str,
        model: str,
        max_tokens: int,
        folder: Path,
        variables: dict[str, Any],
    ):
        self.server = Endpoint(FLAGS, url, name, os.environ.get(FLAGS.key), max_tokens)
        self.server.retries = RETRIES
        directory = hub.find_model(model, hub.TOKENIZER_FILES)
        self.tokenizer = hub.load_tokenizer(directory)
        self.facts = gwen.with_ends(hub.load_config(directory), self.tokenizer, model)
        self.folder, self.variables = folder, variables

    def answer_problems(
        self, problems: list[Example], params: Any
    ) -> tuple[list[Sample], list[Sample]]:
        """As `evaluate.answer_both`. Raises ValueError where an answer does not come; those that did are kept."""
        prompts = params.render_prompts(
            self.tokenizer, self.facts.max_position_embeddings, problems
        )
        sampled, greedy = (
            new_samples(problems, prompts, params.samples),
            new_samples(problems, prompts, 1),
        )
        bodies = [self.make_request(one.example, params, params.temperature) for one in sampled]
        bodies += [self.make_request(one.example, params, 0.0) for one in greedy]
        samples = sampled + greedy
        for row, reply in enumerate(self.fetch_replies(bodies, [one.prompt for one in samples])):
            thought = (
                f"<think>\n{reply.thought}\n" + "</think>\n\n" * bool(reply.text)
                if reply.thought
                else ""
            )
            if (
                not thought and reply.finish_reason == "length"
            ):  # it may have been cut off inside a thought
                ending = self.tokenizer.decode(
                    samples[row].prompt[-PROMPT_END:], skip_special_tokens=False
                )
                thought = opened_thought(ending)
            text = thought + reply.text.strip()
            ids = self.tokenizer.encode(text, add_special_tokens=False)
            ids += self.facts.eos_ids[:1] if reply.finish_reason == "stop" else []
            about: dict[str, Any] = {"finish_reason": reply.finish_reason, "text": text}
            samples[row] = samples[row]._replace(
                response_ids=ids, loss_positions=range(len(ids)), **about
            )
        return samples[: len(sampled)], samples[len(sampled) :]

    def make_request(self, problem: Example, params: Any, temperature: float) -> dict[str, Any]:
        """A request for one answer: several at once is what mlx_lm's server ignores, and a seed ends its batching."""
        messages = chat_template.make_messages(problem["prompt"], problem.get("system"))
        body = {
            "messages": messages,
            "temperature": temperature,
            "max_tokens": params.max_tokens,
        } | PLAIN
        body |= {"stop": list(params.stop)} if params.stop else {}
        variables = self.variables | (problem.get("chat_template_kwargs") or {})
        return body | ({TEMPLATE: variables} if variables else {})

    def fetch_replies(self, bodies: list[dict[str, Any]], prompts: list[list[int]]) -> list[Reply]:
        """The reply to each request. ValueError where some do not come; it says where the others are."""
        self.folder.mkdir(parents=True, exist_ok=True)
        self.log = JsonLines(
            self.folder / f"served-{digest_of(self.server.url, self.server.model, *bodies)}.jsonl"
        )
        self.log.truncate_after(0)  # a line that was being written
        records = list(read_log(self.log.path, ("place", *Reply._fields)))
        known = {
            record["place"]: Reply(*(record[name] for name in Reply._fields)) for record in records
        }
        if known:
            tqdm.write(
                escape_invisible(f"going on with {len(known)} answers of {self.log.path}"),
                file=sys.stderr,
            )
        try:
            self.fetch_missing(bodies, prompts, known)
        except ValueError as error:
            if not known:
                self.log.path.unlink()
                raise
            kept = f"{len(known)} of {len(bodies)} answers are in {self.log.path}, and the same command goes on"
            raise ValueError(f"{error}; {kept}") from error
        return [known[place] for place in range(len(bodies))]

    def fetch_missing(
        self, bodies: list[dict[str, Any]], prompts: list[list[int]], known: dict[int, Reply]
    ) -> None:
        """Adds the replies that are not known. What is no reply is asked for again, as long as that brings any."""
        is_warned = False
        with alive.Bar(total=len(bodies), initial=len(known), desc="asking", unit="answer") as bar:
            while left := [place for place in range(len(bodies)) if place not in known]:
                with contextlib.closing(
                    self.server.chat([bodies[place] for place in left])
                ) as arriving:
                    for number, reply in arriving:
                        place = left[number]
                        if reply.problem:
                            problem = reply.problem
                            continue
                        self.log.write({"step": 0, "place": place} | reply._asdict())
                        known[place] = reply
                        bar.update()
                        if reply.prompt_tokens not in (None, len(prompts[place])) and not is_warned:
                            is_warned = True
                            self.warn_of_tokenization(prompts[place], reply.prompt_tokens)
                if not known.keys() & left:
                    raise ValueError(f"--url {self.server.url}: {problem}")

    def warn_of_tokenization(self, prompt: list[int], length: int | None) -> None:
        """Warns that the server makes other tokens of a prompt than training, `length` of them."""
        ending = self.tokenizer.decode(prompt)[-60:]
        said = f"the server makes {length} tokens of a prompt; training made {len(prompt)}, which end {ending!r}"
        fix = "Serve what lora.py --fuse wrote, whose template says what training said, or try --no-thinking"
        tqdm.write(
            escape_invisible(f"WARNING: {said}. Answers will differ. {fix}."), file=sys.stderr
        )
