"""
Samples the answers of a model that runs on a server.

Each sample takes one request. Replies are written to a file as they arrive, so that the user never
pays for the same reply twice. The server itself applies the chat template and samples the answers.
This file does not cover the HTTP client (judging/server.py) or the rewards
(evaluation/measures.py).
"""

import contextlib
import os
import sys
from pathlib import Path
from typing import Any

from tqdm.auto import tqdm

from disk import hub, model_choice
from disk.checkpoint import digest_of_reprs
from disk.run_files import JsonLines, read_log
from evaluation.score_task import EvalParams
from flags import escape_invisible
from judging.server import TEMPLATE_SETTINGS, ChatReply, Endpoint, ServerSettingNames
from machine import alive
from prompts import chat_template
from prompts.examples import Example
from rewards.statements import open_thought_text
from step.generation import PROMPT_END
from step.sample import Sample, new_samples

FLAGS = ServerSettingNames("--url", "--url-model", "URL_API_KEY", "--max-tokens")
RETRIES = 2  # the number of times that a failed request is repeated

# Parameters for sampling from the model's unmodified distribution; servers have other defaults.
UNFILTERED: dict[str, Any] = {"top_p": 1.0, "top_k": 0, "min_p": 0.0}


class ServedPolicy:
    """
    A model that answers problems on the server at `--url`.

    name: the name under which the server knows the model. model: the model that the server runs, in
    the form that `gwen.load` accepts; prompts and answers are encoded with this model's tokenizer.
    folder: the directory that keeps the replies until all replies have arrived. variables: chat
    template variables, which are sent with every request.
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
        directory = hub.find_model_directory(model, hub.TOKENIZER_FILES)
        self.tokenizer = hub.load_tokenizer(directory)
        self.facts = model_choice.copy_with_all_end_tokens(
            hub.load_config(directory), self.tokenizer, model
        )
        self.folder = folder
        self.variables = variables

    def answer_problems(
        self, problems: list[Example], params: EvalParams
    ) -> tuple[list[Sample], list[Sample]]:
        """
        Returns K samples of each problem, and one greedy sample of each problem.

        Raises ValueError if an answer does not arrive. The answers that arrived are kept on disk.
        """
        context = self.facts.max_position_embeddings
        prompts = params.encode_prompts(self.tokenizer, context, problems)
        sampled = new_samples(problems, prompts, params.samples)
        greedy = new_samples(problems, prompts, 1)
        requests = [
            self.make_request(sample.example, params, params.temperature) for sample in sampled
        ]
        requests += [self.make_request(sample.example, params, 0.0) for sample in greedy]

        samples = sampled + greedy
        replies = self.fetch_replies(requests, [sample.prompt for sample in samples])
        answered = [
            self.sample_with_reply(sample, reply)
            for sample, reply in zip(samples, replies, strict=True)
        ]
        return answered[: len(sampled)], answered[len(sampled) :]

    def sample_with_reply(self, sample: Sample, reply: ChatReply) -> Sample:
        """Returns a copy of a sample with the text and token ids of the server's reply."""
        text = self.tagged_thought(sample, reply) + reply.text.strip()
        ids = self.tokenizer.encode(text, add_special_tokens=False)
        if reply.finish_reason == "stop":
            ids += self.facts.eos_ids[:1]
        return sample._replace(
            response_ids=ids,
            loss_positions=range(len(ids)),
            finish_reason=reply.finish_reason,
            text=text,
        )

    def tagged_thought(self, sample: Sample, reply: ChatReply) -> str:
        """Returns the model's thought inside <think> tags, or "" if the reply has no thought."""
        if reply.thought:
            opened = f"<think>\n{reply.thought}\n"
            return f"{opened}</think>\n\n" if reply.text else opened
        if reply.finish_reason != "length":
            return ""
        # the reply may have been cut off inside a thought that began in the prompt
        prompt_end = self.tokenizer.decode(sample.prompt[-PROMPT_END:], skip_special_tokens=False)
        return open_thought_text(prompt_end)

    def make_request(
        self, problem: Example, params: EvalParams, temperature: float
    ) -> dict[str, Any]:
        """
        Returns the request for one answer to a problem.

        The request has no seed, because mlx_lm's server does not batch requests with a seed. The
        request asks for a single answer, because mlx_lm's server ignores the parameter `n`.
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
    ) -> list[ChatReply]:
        """
        Returns the server's reply to each request, in the order of the requests.

        Raises ValueError if some replies do not arrive. The error message names the file with the
        replies that arrived.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        digest = digest_of_reprs(self.server.url, self.server.model, *requests)
        self.log = JsonLines(self.folder / f"served-{digest}.jsonl")
        self.log.truncate_after(0)  # this removes an incomplete last line
        replies: dict[int, ChatReply] = {}  # by the index of the request
        for record in read_log(self.log.path, ("place", *ChatReply._fields)):
            fields = [record[name] for name in ChatReply._fields]
            replies[record["place"]] = ChatReply(*fields)
        if replies:
            note = f"continuing with the {len(replies)} answers in {self.log.path}"
            tqdm.write(escape_invisible(note), file=sys.stderr)
        try:
            self.fetch_missing(requests, prompts, replies)
        except ValueError as error:
            if not replies:
                self.log.path.unlink()
                raise
            raise ValueError(
                f"{error}; {len(replies)} of {len(requests)} answers are in {self.log.path}; run "
                "the same command again to fetch the rest"
            ) from error
        return [replies[place] for place in range(len(requests))]

    def fetch_missing(
        self,
        requests: list[dict[str, Any]],
        prompts: list[list[int]],
        replies: dict[int, ChatReply],
    ) -> None:
        """
        Fetches the replies that are missing from `replies`, and adds them to it.

        Requests that got no reply are sent again, until a round of requests brings no reply at all.
        """
        has_warned = False
        with alive.Bar(
            total=len(requests), initial=len(replies), desc="asking", unit="answer"
        ) as bar:
            while len(replies) < len(requests):
                missing = [place for place in range(len(requests)) if place not in replies]
                arriving = self.server.send_chat_requests([requests[place] for place in missing])
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
                            self.warn_of_other_token_count(prompts[place], reply.prompt_tokens)
                if not replies.keys() & missing:
                    raise ValueError(f"--url {self.server.url}: {problem}")

    def warn_of_other_token_count(self, prompt: list[int], served_length: int | None) -> None:
        """Warns that a prompt has more or fewer tokens on the server than it had in training."""
        ending = self.tokenizer.decode(prompt)[-60:]
        warning = (
            f"WARNING: the server encoded a prompt as {served_length} tokens, but training encoded "
            f"it as {len(prompt)} tokens, which end with {ending!r}. The answers will differ from "
            "those of the trained model. Serve a model written by export.py --fuse, whose chat "
            "template renders prompts as in training, or try --no-thinking."
        )
        tqdm.write(escape_invisible(warning), file=sys.stderr)
