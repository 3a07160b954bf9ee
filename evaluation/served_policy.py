"""
The samples of a policy that a server runs.

Each sample is one request. Replies are written to a file as they arrive, so that nothing is paid
for twice. The server renders the messages and samples. This file does not cover the server's client
(judging/server.py) and the rewards (evaluation/measures.py).
"""

import contextlib
import os
import sys
from pathlib import Path
from typing import Any

from tqdm.auto import tqdm

from disk import hub, model_choice
from disk.checkpoint import digest_of
from disk.run_files import JsonLines, read_log
from evaluation.evaluate import EvalParams
from flags import escape_invisible
from judging.server import TEMPLATE_SETTINGS, Endpoint, FlagNames, Reply
from machine import alive
from prompts import chat_template
from prompts.examples import Example
from rewards.statements import open_thought_text
from step.generation import PROMPT_END
from step.sample import Sample, new_samples

FLAGS = FlagNames("--url", "--url-model", "URL_API_KEY", "--max-tokens")
RETRIES = 2  # further tries of a request
# the model's own distribution; servers have other defaults
UNFILTERED: dict[str, Any] = {"top_p": 1.0, "top_k": 0, "min_p": 0.0}


class ServedPolicy:
    """
    A policy on the server at `--url`, which calls it `name`.

    model: the model that the server runs, as `gwen.load` takes it; its tokenizer makes the ids of
    prompts and answers. folder: for replies until all have arrived. variables: for the server's
    chat template, with every request.
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
        self.facts = model_choice.complete_end_tokens(
            hub.load_config(directory), self.tokenizer, model
        )
        self.folder = folder
        self.variables = variables

    def answer_problems(
        self, problems: list[Example], params: EvalParams
    ) -> tuple[list[Sample], list[Sample]]:
        """
        K samples of each problem and one greedy sample, as `evaluation.evaluate.answer_both`.

        Raises ValueError if an answer does not come; the others are kept.
        """
        context = self.facts.max_position_embeddings
        prompts = params.render_prompts(self.tokenizer, context, problems)
        sampled = new_samples(problems, prompts, params.samples)
        greedy = new_samples(problems, prompts, 1)
        requests = [
            self.make_request(sample.example, params, params.temperature) for sample in sampled
        ]
        requests += [self.make_request(sample.example, params, 0.0) for sample in greedy]

        samples = sampled + greedy
        replies = self.fetch_replies(requests, [sample.prompt for sample in samples])
        answered = [
            self.add_reply(sample, reply) for sample, reply in zip(samples, replies, strict=True)
        ]
        return answered[: len(sampled)], answered[len(sampled) :]

    def add_reply(self, sample: Sample, reply: Reply) -> Sample:
        """The sample with the text and the ids of a reply."""
        text = self.write_thought(sample, reply) + reply.text.strip()
        ids = self.tokenizer.encode(text, add_special_tokens=False)
        if reply.finish_reason == "stop":
            ids += self.facts.eos_ids[:1]
        return sample._replace(
            response_ids=ids,
            loss_positions=range(len(ids)),
            finish_reason=reply.finish_reason,
            text=text,
        )

    def write_thought(self, sample: Sample, reply: Reply) -> str:
        """The thought before a reply's text, with its tags; "" if there is none."""
        if reply.thought:
            opened = f"<think>\n{reply.thought}\n"
            return f"{opened}</think>\n\n" if reply.text else opened
        if reply.finish_reason != "length":
            return ""
        # the reply may have been cut off inside a thought that the prompt opened
        prompt_end = self.tokenizer.decode(sample.prompt[-PROMPT_END:], skip_special_tokens=False)
        return open_thought_text(prompt_end)

    def make_request(
        self, problem: Example, params: EvalParams, temperature: float
    ) -> dict[str, Any]:
        """
        A request for one answer, without a seed.

        mlx_lm's server ignores a number of answers, and a seed ends its batching.
        """
        request: dict[str, Any] = {
            "messages": chat_template.make_messages(problem["prompt"], problem.get("system")),
            "temperature": temperature,
            "max_tokens": params.max_tokens,
        }
        request |= UNFILTERED
        if params.stop:
            request["stop"] = list(params.stop)
        variables = self.variables | (problem.get("chat_template_kwargs") or {})
        if variables:
            request[TEMPLATE_SETTINGS] = variables
        return request

    # ---- requests and replies

    def fetch_replies(
        self, requests: list[dict[str, Any]], prompts: list[list[int]]
    ) -> list[Reply]:
        """
        The reply to each request.

        Raises ValueError if some do not come, and names the file with the others.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        digest = digest_of(self.server.url, self.server.model, *requests)
        self.log = JsonLines(self.folder / f"served-{digest}.jsonl")
        self.log.truncate_after(0)  # drops a line that was being written
        replies: dict[int, Reply] = {}  # by the number of the request
        for record in read_log(self.log.path, ("place", *Reply._fields)):
            fields = [record[name] for name in Reply._fields]
            replies[record["place"]] = Reply(*fields)
        if replies:
            note = f"going on with {len(replies)} answers of {self.log.path}"
            tqdm.write(escape_invisible(note), file=sys.stderr)
        try:
            self.fetch_missing(requests, prompts, replies)
        except ValueError as error:
            if not replies:
                self.log.path.unlink()
                raise
            raise ValueError(
                f"{error}; {len(replies)} of {len(requests)} answers are in {self.log.path}, "
                "and the same command goes on"
            ) from error
        return [replies[place] for place in range(len(requests))]

    def fetch_missing(
        self, requests: list[dict[str, Any]], prompts: list[list[int]], replies: dict[int, Reply]
    ) -> None:
        """
        Adds the missing replies to `replies`.

        It asks again for what is no reply, as long as each round brings at least one.
        """
        has_warned = False
        with alive.Bar(
            total=len(requests), initial=len(replies), desc="asking", unit="answer"
        ) as bar:
            while len(replies) < len(requests):
                missing = [place for place in range(len(requests)) if place not in replies]
                arriving = self.server.chat([requests[place] for place in missing])
                with contextlib.closing(arriving):
                    for number, reply in arriving:
                        place = missing[number]
                        if reply.problem:
                            problem = reply.problem
                            continue
                        self.log.write({"step": 0, "place": place} | reply._asdict())
                        replies[place] = reply
                        bar.update()
                        is_alike = reply.prompt_tokens in (None, len(prompts[place]))
                        if not is_alike and not has_warned:
                            has_warned = True
                            self.warn_of_tokenization(prompts[place], reply.prompt_tokens)
                if not replies.keys() & missing:
                    raise ValueError(f"--url {self.server.url}: {problem}")

    def warn_of_tokenization(self, prompt: list[int], length: int | None) -> None:
        """Warns that the server makes `length` tokens of a prompt, and training another number."""
        ending = self.tokenizer.decode(prompt)[-60:]
        warning = (
            f"WARNING: the server makes {length} tokens of a prompt; training made {len(prompt)}, "
            f"which end {ending!r}. Answers will differ. Serve what export.py --fuse wrote, whose "
            "template renders prompts as training did, or try --no-thinking."
        )
        tqdm.write(escape_invisible(warning), file=sys.stderr)
