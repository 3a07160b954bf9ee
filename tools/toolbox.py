"""
A run's toolbox: its tools and environments, with their schemas and their threads.

The toolbox also encodes prompts, because the chat template lists the tools in the prompt. This file
does not cover conversations (tools/episodes.py), or how calls are parsed (tools/calls.py).
"""

from typing import Any

from config import Config, ToolSettings
from machine import world
from prompts import chat_template
from prompts.examples import Example, last_user_text, shorten_value
from tools.calls import (
    Tool,
    TurnCodec,
    choose_call_parser,
    make_environment_schemas,
    make_tool_schemas,
)
from tools.tool_workers import ToolWorker

CONTEXT = 4096  # the maximum number of tokens in a conversation if --max-context is not set


def max_conversation_tokens(settings: ToolSettings, model_limit: int) -> int:
    """
    The maximum number of tokens in a conversation with tools.

    model_limit: the model's own maximum.
    """
    return min(settings.max_context or CONTEXT, model_limit)


class Toolbox:
    """
    The tools and environments of a run, with the threads that call them.

    Later rollouts reuse the threads.
    """

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

        environments: the environments' classes, by their names in the column `environment`. If
        there is only one class, its name is "".
        model: a `gwen.ModelConfig`.

        Raises ValueError if no schema can be made for a tool, or if the model's chat template does
        not support tools.
        """
        self.settings = config.tools
        self.environments = environments
        self.tokenizer = tokenizer
        self.thinking = config.sampling.thinking
        self.context = max_conversation_tokens(config.tools, model.max_position_embeddings)
        self.parse_call = choose_call_parser(tokenizer.chat_template)
        self.codec = TurnCodec(tokenizer, model.end_ids, thinking=self.thinking)
        self.functions = tools

        function_schemas = make_tool_schemas("--tools", tools)
        # each environment's schemas by its name; "" is also the name for rows without an
        # environment
        self.schemas = {"": function_schemas}
        for name, kind in environments.items():
            self.schemas[name] = function_schemas | make_environment_schemas(kind)
        self.workers: dict[tuple[str, int], ToolWorker] = {}

    @property
    def tool_names(self) -> list[str]:
        """The names of the tools of all environments, in alphabetical order."""
        return sorted({name for schemas in self.schemas.values() for name in schemas})

    def get_or_make_worker(self, environment_name: str, row: int) -> ToolWorker:
        """
        Returns the thread for a row and an environment.

        The first call makes the thread and the environment.
        """
        if (environment_name, row) not in self.workers:
            worker = ToolWorker(self.settings.tool_timeout)
            self.workers[environment_name, row] = worker
            kind = self.environments.get(environment_name)
            if kind:
                worker.instance = worker.run_or_raise(f"environment {kind.__name__}", kind)
        return self.workers[environment_name, row]

    def replace_worker(self, environment_name: str, row: int) -> ToolWorker:
        """
        Replaces a row's thread and environment with new ones and returns the new thread.

        This is needed if a call hangs in the old thread.
        """
        self.workers.pop((environment_name, row)).end_after_current_job()
        return self.get_or_make_worker(environment_name, row)

    def find_environment_name(self, example: Example) -> str:
        """
        The name of an example's environment; "" if the run has at most one environment.

        Raises ValueError if --env does not name this environment.
        """
        name = ""
        if self.environments and "" not in self.environments:
            name = str(example.get("environment"))
        if name not in self.schemas:
            names = ", ".join(self.environments)
            raise ValueError(
                f"the column environment contains {shorten_value(name)}, but the environments in "
                f"--env are {names}; write one of these names"
            )
        return name

    def encode_prompt(self, example: Example) -> list[int]:
        """
        The token ids of an example's prompt, which includes the schemas of the example's tools.

        Raises ValueError if the prompt leaves no room for the model's turns in the conversation.
        """
        tools = list(self.schemas[self.find_environment_name(example)].values())
        ids = chat_template.encode_chat(
            self.tokenizer,
            example["prompt"],
            system=example.get("system"),
            thinking=self.thinking,
            tools=tools,
        )
        if len(ids) >= self.context:
            raise ValueError(
                f"the prompt {shorten_value(last_user_text(example['prompt']))} has {len(ids)} "
                f"tokens, but a conversation may have only {self.context}; "
                "shorten the prompt or raise --max-context"
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
    Makes the toolbox of a run. Returns None if the run has neither tools nor environments.

    Raises ValueError if the model cannot call tools, or if there are several machines.
    """
    if not tools and not environments:
        return None
    if world.size() > 1:
        raise ValueError(
            "--tools and --env work only on a single machine; start the run on one machine"
        )
    return Toolbox(config, tools, environments, tokenizer, model)
