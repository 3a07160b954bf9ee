"""
Gets the answers of a model that runs on a server.

Each answer takes one request. Replies are written to a file as they arrive. If an evaluation is
interrupted and then repeated, the saved replies are loaded from this file, so that the user never
pays for the same reply twice. The server applies the chat template and samples the answers.

The HTTP client is in judging/server.py, and the rewards are in evaluation/measures.py.
"""

import contextlib
import os
import sys
from pathlib import Path
from typing import Any

from tqdm.auto import tqdm

from disk import hub, model_choice
from disk.checkpoint import digest_of_reprs
from disk.run_files import JsonLinesLog, read_log
from evaluation.score_task import EvalParams
from flags import escape_invisible
from judging.server import TEMPLATE_SETTINGS, ChatReplyOrProblem, Endpoint, ServerSettingNames
from machine import alive
from prompts import chat_template
from prompts.examples import Example
from rewards.statements import unclosed_thought_in_prompt
from step.generation import PROMPT_END
from step.sample import Sample, new_samples

FLAGS = ServerSettingNames("--url", "--url-model", "URL_API_KEY", "--max-tokens")
RETRIES = 2  # the number of times that a failed request is repeated

# These parameters switch truncation off. Without them, servers use other defaults.
UNFILTERED: dict[str, Any] = {"top_p": 1.0, "top_k": 0, "min_p": 0.0}


class ServedPolicy:
    """
    A model that answers problems on the server at `--url`.

    name: the name under which the server knows the model.
    model: the name under which `gwen.load` finds the same model. Its tokenizer encodes the prompts
        and the replies.
    folder: the directory in which replies are saved until evaluate.py has printed the result.
    variables: chat template variables that every request contains.
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
        self.facts = model_choice.add_and_print_missing_end_tokens(
            hub.load_config(directory), self.tokenizer, model
        )
        self.folder = folder
        self.variables = variables

    def answer_problems(
        self, problems: list[Example], params: EvalParams
    ) -> tuple[list[Sample], list[Sample]]:
        """
        Returns two lists: K samples of each problem, and one greedy sample of each.

        Raises ValueError if an answer does not arrive. Answers that did arrive are kept on disk.
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
        replies = self.load_saved_and_fetch_replies(requests, [sample.prompt for sample in samples])
        answered = [
            self.sample_with_reply(sample, reply)
            for sample, reply in zip(samples, replies, strict=True)
        ]
        return answered[: len(sampled)], answered[len(sampled) :]

    def sample_with_reply(self, sample: Sample, reply: ChatReplyOrProblem) -> Sample:
        """Returns a copy of a sample with the text and token ids of the server's reply."""
        text = self.thought_in_think_tags(sample, reply) + reply.text.strip()
        ids = self.tokenizer.encode(text, add_special_tokens=False)
        if reply.finish_reason == "stop":
            ids += self.facts.eos_ids[:1]
        return sample._replace(
            response_ids=ids,
            loss_positions=range(len(ids)),
            finish_reason=reply.finish_reason,
            text=text,
        )

    def thought_in_think_tags(self, sample: Sample, reply: ChatReplyOrProblem) -> str:
        """
        Returns the thought to put before a reply's text, enclosed in <think> tags.

        Returns "" if the reply has no thought.
        """
        if reply.thought:
            opened = f"<think>\n{reply.thought}\n"
            return f"{opened}</think>\n\n" if reply.text else opened
        if reply.finish_reason != "length":
            return ""
        # the reply may have been cut off inside a thought that began in the prompt
        prompt_end = self.tokenizer.decode(sample.prompt[-PROMPT_END:], skip_special_tokens=False)
        return unclosed_thought_in_prompt(prompt_end)

    def make_request(
        self, problem: Example, params: EvalParams, temperature: float
    ) -> dict[str, Any]:
        """
        Returns the request for one answer to a problem.

        The request has no seed, because mlx_lm's server does not batch requests that have a
        seed. The request asks for a single answer, because mlx_lm's server ignores the parameter
        `n`.
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

    def load_saved_and_fetch_replies(
        self, requests: list[dict[str, Any]], prompts: list[list[int]]
    ) -> list[ChatReplyOrProblem]:
        """
        Returns the server's reply to each request, in the order of the requests.

        Replies that an interrupted evaluation saved are loaded, and the other replies are fetched.

        Raises ValueError if some replies do not arrive. The error message names the file with the
        saved replies.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        digest = digest_of_reprs(self.server.url, self.server.model, *requests)
        self.log = JsonLinesLog(self.folder / f"served-{digest}.jsonl")
        self.log.truncate_after(0)  # this removes an incomplete last line
        replies: dict[int, ChatReplyOrProblem] = {}  # by the index of the request
        for record in read_log(self.log.path, ("place", *ChatReplyOrProblem._fields)):
            fields = [record[name] for name in ChatReplyOrProblem._fields]
            replies[record["place"]] = ChatReplyOrProblem(*fields)
        if replies:
            note = f"reusing the {len(replies)} answers in {self.log.path}"
            tqdm.write(escape_invisible(note), file=sys.stderr)
        try:
            self.fetch_and_save_missing_replies(requests, prompts, replies)
        except ValueError as error:
            if not replies:
                self.log.path.unlink()
                raise
            raise ValueError(
                f"{error}; {len(replies)} of {len(requests)} answers are in {self.log.path}; run "
                "the same command again to fetch the rest"
            ) from error
        return [replies[index] for index in range(len(requests))]

    def fetch_and_save_missing_replies(
        self,
        requests: list[dict[str, Any]],
        prompts: list[list[int]],
        replies: dict[int, ChatReplyOrProblem],
    ) -> None:
        """
        Fetches the missing replies, adds them to `replies`, and saves them.

        All requests without a reply are sent in one round. Such rounds are repeated until every
        request has a reply.

        Raises ValueError if a round brings no reply at all.
        """
        has_warned = False
        with alive.Bar(
            total=len(requests), initial=len(replies), desc="asking", unit="answer"
        ) as bar:
            while len(replies) < len(requests):
                missing = [index for index in range(len(requests)) if index not in replies]
                arriving = self.server.send_chat_requests([requests[index] for index in missing])
                with contextlib.closing(arriving):
                    for number, reply in arriving:
                        index = missing[number]
                        if reply.problem:
                            last_problem = reply.problem
                            continue
                        self.log.write({"step": 0, "place": index} | reply._asdict())
                        replies[index] = reply
                        bar.update()
                        has_same_length = reply.prompt_tokens in (None, len(prompts[index]))
                        if not has_same_length and not has_warned:
                            has_warned = True
                            self.print_token_count_warning(prompts[index], reply.prompt_tokens)
                if not replies.keys() & missing:
                    raise ValueError(f"--url {self.server.url}: {last_problem}")

    def print_token_count_warning(self, prompt: list[int], served_length: int | None) -> None:
        """Prints a warning that the server encodes a prompt in another way than training did."""
        ending = self.tokenizer.decode(prompt)[-60:]
        warning = (
            f"WARNING: the server encoded a prompt as {served_length} tokens, but training encoded "
            f"it as {len(prompt)} tokens, which end with {ending!r}. The answers will differ from "
            "those of the trained model. Serve a model that export.py --fuse wrote, because its "
            "chat template renders prompts as in training, or try --no-thinking."
        )
        tqdm.write(escape_invisible(warning), file=sys.stderr)
