"""
The samples of a policy that runs on a server.

Each sample is one request. Replies are written to a file as they arrive, so that no reply is paid
for twice. The server itself renders the messages and draws the answers. This file does not cover
the client of the server (judging/server.py) and the rewards (evaluation/measures.py).
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
RETRIES = 2  # how often a failed request is sent again
# the model's own distribution; servers have other defaults
UNFILTERED: dict[str, Any] = {"top_p": 1.0, "top_k": 0, "min_p": 0.0}


class ServedPolicy:
    """
    A policy on the server at `--url`.

    name: the policy's name on the server. model: the model that the server runs, as `gwen.load`
    takes it; the model's tokenizer encodes prompts and answers. folder: keeps the replies until all
    have arrived. variables: chat template variables, which are sent with every request.
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
        self.facts = model_choice.with_all_end_tokens(
            hub.load_config(directory), self.tokenizer, model
        )
        self.folder = folder
        self.variables = variables

    def answer_problems(
        self, problems: list[Example], params: EvalParams
    ) -> tuple[list[Sample], list[Sample]]:
        """
        K samples of each problem and one greedy sample, as from `evaluation.evaluate.answer_both`.

        Raises ValueError if an answer does not arrive. The other answers are kept.
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
            self.with_reply(sample, reply) for sample, reply in zip(samples, replies, strict=True)
        ]
        return answered[: len(sampled)], answered[len(sampled) :]

    def with_reply(self, sample: Sample, reply: Reply) -> Sample:
        """The sample with the text and the token ids of a reply."""
        text = self.thought_text(sample, reply) + reply.text.strip()
        ids = self.tokenizer.encode(text, add_special_tokens=False)
        if reply.finish_reason == "stop":
            ids += self.facts.eos_ids[:1]
        return sample._replace(
            response_ids=ids,
            loss_positions=range(len(ids)),
            finish_reason=reply.finish_reason,
            text=text,
        )

    def thought_text(self, sample: Sample, reply: Reply) -> str:
        """The thought before the reply's text, with the tags of a thought; "" if there is none."""
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

        mlx_lm's server ignores the parameter `n`, and does not batch requests that have a seed.
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

        Raises ValueError if some replies do not arrive. The message names the file that has the
        others.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        digest = digest_of(self.server.url, self.server.model, *requests)
        self.log = JsonLines(self.folder / f"served-{digest}.jsonl")
        self.log.truncate_after(0)  # removes a line that was only half written
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

        Requests without a reply are sent again, as long as each round brings at least one reply.
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
        """Warns that a prompt has `length` tokens on the server, but another number in training."""
        ending = self.tokenizer.decode(prompt)[-60:]
        warning = (
            f"WARNING: the server makes {length} tokens of a prompt; training made {len(prompt)}, "
            f"which end {ending!r}. Answers will differ. Serve what export.py --fuse wrote, whose "
            "template renders prompts as training did, or try --no-thinking."
        )
        tqdm.write(escape_invisible(warning), file=sys.stderr)
