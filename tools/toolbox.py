"""
The toolbox of a run: its tools, its environments, their schemas and their threads.

It also encodes prompts, because the chat template lists the tools in the prompt. This file does not
cover conversations (tools/episodes.py) and the parsing of calls (tools/calls.py).
"""

from typing import Any

from config import Config, ToolSettings
from machine import world
from prompts import chat_template
from prompts.examples import Example, prompt_text, shorten_value
from tools.calls import (
    Tool,
    TurnCodec,
    choose_call_reader,
    environment_schemas,
    tool_schemas,
)
from tools.tool_workers import Worker

CONTEXT = 4096  # the most tokens of a conversation without --max-context


def conversation_limit(settings: ToolSettings, model_limit: int) -> int:
    """The most positions of a conversation with tools. model_limit: the most of the model."""
    return min(settings.max_context or CONTEXT, model_limit)


class Toolbox:
    """The tools and environments of a run, ready to be called. The workers outlive a rollout."""

    def __init__(
        self,
        config: Config,
        tools: dict[str, Tool],
        environments: dict[str, type],
        tokenizer: Any,
        model: Any,
    ):
        """
        Makes the schemas of all tools.

        environments: the classes by their name in the column `environment`; the name is "" if there
        is only one.
        model: a `gwen.ModelConfig`.

        Raises ValueError if a tool has no schema, or the model's chat template has no tools.
        """
        self.settings = config.tools
        self.environments = environments
        self.tokenizer = tokenizer
        self.thinking = config.sampling.thinking
        self.context = conversation_limit(config.tools, model.max_position_embeddings)
        self.read_call = choose_call_reader(tokenizer.chat_template)
        self.codec = TurnCodec(tokenizer, model.end_ids, thinking=self.thinking)
        self.functions = tools

        function_schemas = tool_schemas("--tools", tools)
        # by the name of the environment; "" also stands for rows without one
        self.schemas = {"": function_schemas}
        for name, kind in environments.items():
            self.schemas[name] = function_schemas | environment_schemas(kind)
        self.workers: dict[tuple[str, int], Worker] = {}

    def get_worker(self, name: str, row: int) -> Worker:
        """The row's thread with its environment. The first call makes both."""
        if (name, row) not in self.workers:
            worker = Worker(self.settings.tool_timeout)
            self.workers[name, row] = worker
            kind = self.environments.get(name)
            if kind:
                worker.instance = worker.run_or_raise(f"environment {kind.__name__}", kind)
        return self.workers[name, row]

    def replace_worker(self, name: str, row: int) -> Worker:
        """Gives a row a new thread and environment, because a call hangs in the old thread."""
        self.workers.pop((name, row)).release()
        return self.get_worker(name, row)

    def environment_name(self, example: Example) -> str:
        """
        The name of an example's environment, "" if the run has one or none.

        Raises ValueError if --env does not name the environment.
        """
        name = ""
        if self.environments and "" not in self.environments:
            name = str(example.get("environment"))
        if name not in self.schemas:
            names = ", ".join(self.environments)
            raise ValueError(
                f"column environment holds {shorten_value(name)}; "
                f"the environments of --env are {names}"
            )
        return name

    def encode_prompt(self, example: Example) -> list[int]:
        """
        The token ids of an example's prompt, which lists the tools that its row may call.

        Raises ValueError if the prompt fills the whole conversation.
        """
        tools = list(self.schemas[self.environment_name(example)].values())
        ids = chat_template.encode_chat(
            self.tokenizer,
            example["prompt"],
            system=example.get("system"),
            thinking=self.thinking,
            tools=tools,
        )
        if len(ids) >= self.context:
            raise ValueError(
                f"the prompt {shorten_value(prompt_text(example['prompt']))} has {len(ids)} "
                f"tokens, a conversation {self.context}; shorten it or raise --max-context"
            )
        return ids


def make_toolbox(
    config: Config,
    tools: dict[str, Tool],
    environments: dict[str, type],
    tokenizer: Any,
    model: Any,
) -> Toolbox | None:
    """
    Makes the toolbox of a run, None for a run without tools.

    Raises ValueError if the model cannot call tools, or if there are several machines.
    """
    if not tools and not environments:
        return None
    if world.size() > 1:
        raise ValueError("--tools and --env are for one machine; start the run on one")
    return Toolbox(config, tools, environments, tokenizer, model)
