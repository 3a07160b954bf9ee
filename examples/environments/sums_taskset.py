"""
A taskset of verifiers with a tool: arithmetic with a calculator.

    PYTHONPATH=examples/environments uv run --no-project --with verifiers==0.4.0 \
        python serving/adapters/verifiers_harness.py sums_taskset

This file runs in the environment of the harness (docs/environments.md), and not in that of Gwen.
"""

import random
import re
from collections.abc import Iterator

import verifiers.v1 as vf


class Calculator(vf.Toolset[vf.SharedToolsetConfig, vf.State]):
    """One server for all episodes."""

    TOOL_PREFIX = None

    @vf.tool
    def calculator(self, expression: str) -> str:
        """Computes an expression of integers, + - and *, for example 12 * 34 - 5."""
        if not re.fullmatch(r"[-+* 0-9]{1,60}", expression) or "**" in expression.replace(" ", ""):
            return "error: only integers, + - and * are allowed"
        try:
            return str(eval(expression, {"__builtins__": {}}))
        except SyntaxError as error:
            return f"error: {error.msg}"


class SumData(vf.TaskData):
    answer: str


class SumTask(vf.Task[SumData, vf.State, vf.TaskConfig]):
    @vf.reward
    async def right_answer(self, trace: vf.Trace) -> float:
        """1 if the last line of the last turn has the answer and no other number."""
        last_line = trace.last_reply.rpartition("\n")[2]
        return float(re.findall(r"-?\d+", last_line) == [self.data.answer])


class SumsTaskset(vf.Taskset[SumTask, vf.TasksetConfig]):
    INFINITE = True

    @classmethod
    def toolsets(cls, config: vf.TasksetConfig) -> list[vf.Toolset]:
        return [Calculator(vf.SharedToolsetConfig())]

    def load(self) -> Iterator[SumTask]:
        rng = random.Random(0)
        while True:
            a, b, c = rng.randrange(11, 100), rng.randrange(11, 100), rng.randrange(100, 1000)
            sign = rng.choice("+-")
            answer = a * b + (c if sign == "+" else -c)
            data = SumData(prompt=f"What is {a} * {b} {sign} {c}?", answer=str(answer))
            yield SumTask(data, self.config.task)


__all__ = ["SumsTaskset"]

if __name__ == "__main__":
    Calculator.run()  # verifiers starts the tool's server with `python -m sums_taskset`
