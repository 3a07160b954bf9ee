"""
Settings as fields of dataclasses: each is declared once, and from there it is a flag, a key in YAML, and a check.

What is left out: what a setting means. Nothing but the standard library and YAML is known here.
"""

import argparse
import dataclasses
import os
import re
import reprlib
from collections.abc import Container
from pathlib import Path
from typing import Any

import yaml


class _Loader(yaml.SafeLoader):
    """YAML in which no key stands twice: where a list's dash is forgotten, the later entry would replace the other."""

    def construct_mapping(self, node: Any, deep: bool = False) -> Any:
        if isinstance(node, yaml.MappingNode):
            seen = set()
            for key, _ in node.value:
                if isinstance(key, yaml.ScalarNode) and (key.tag, key.value) in seen:
                    problem = f"the key {key.value!r:.60} stands twice in one entry"
                    raise yaml.constructor.ConstructorError(None, None, problem, key.start_mark)
                seen.add((key.tag, str(key.value)))
        return super().construct_mapping(node, deep)


def load_yaml(path: str | Path, where: str) -> Any:
    """What a user's YAML file holds. ValueError, beginning with `where`, when it cannot be read or is not YAML."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise ValueError(f"{where} cannot be read: {error}") from error
    try:
        return yaml.load(text, _Loader)
    except Exception as error:  # PyYAML lets through what an impossible date, a bad tag or deep nesting raises
        mark, problem = getattr(error, "problem_mark", None), getattr(error, "problem", None)
        line = f", line {mark.line + 1}" if mark else ""
        problem = problem or str(error).partition("\n")[0] or type(error).__name__
        raise ValueError(f"{where} is not YAML{line}: {problem}; correct it") from error


def flag(default: Any, text: str, **metadata: Any) -> Any:
    """A field with its help, and perhaps `low`, `high`, `choices`, `nargs`, and `parse`, which reads a flag's text."""
    metadata = {"help": text, **metadata}
    if callable(default):
        return dataclasses.field(default_factory=default, metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


def add_flags(parser: argparse.ArgumentParser, settings: type, names: Container[str] | None = None) -> None:
    """Each field, or those of these names, as a flag, `judge_mode` as `--judge-mode`; one that is not given is None."""
    for field in dataclasses.fields(settings):
        if names is not None and field.name not in names:
            continue
        options: dict[str, Any] = {"help": field.metadata["help"], "default": None}
        if field.type is bool:
            options["action"] = argparse.BooleanOptionalAction
        else:
            options["type"] = field.metadata.get("parse", field.type if field.type in (int, float) else None)
        options |= {key: field.metadata[key] for key in ("choices", "nargs") if key in field.metadata}
        parser.add_argument("--" + field.name.replace("_", "-"), **options)


def check_values(settings: type, values: dict[str, Any]) -> None:
    """ValueError names the flag whose value is of the wrong type, out of range or no choice."""
    words: dict[Any, str] = {
        int: "a whole number",
        float: "a finite number (in YAML 1.0e-4, not 1e-4)",
        str: "a text",
        bool: "true or false",
        list[str]: "a list of texts",
        dict[str, float]: "finite numbers by name",
    }
    for field in dataclasses.fields(settings):
        if field.name not in values:
            continue
        value, name = values[field.name], "--" + field.name.replace("_", "-")
        if not _is_a(value, field.type):
            raise ValueError(f"{name} is {reprlib.repr(value)}; it must be {words[field.type]}")
        low, high = field.metadata.get("low"), field.metadata.get("high", 2**31 if field.type is int else None)
        if low is not None and value < low:
            raise ValueError(f"{name} is {value}; it must be at least {low}")
        if high is not None and value > high:
            raise ValueError(f"{name} is {reprlib.repr(value)}; it must be at most {high}")
        choices = field.metadata.get("choices")
        for one in value if isinstance(value, list) else [value]:
            if choices and one not in choices:
                raise ValueError(f"{name} is {one!r:.60}; it must be one of {', '.join(choices)}")


def _is_a(value: Any, kind: Any) -> bool:
    """Whether a setting has the type of its field. A bool is no number here, and numbers are finite."""
    if kind is float:
        return type(value) in (int, float) and abs(value) < 1e300  # so written, it refuses nan and huge integers
    if kind == list[str]:
        return isinstance(value, list) and all(isinstance(one, str) for one in value)
    if kind == dict[str, float]:
        return isinstance(value, dict) and all(isinstance(k, str) and _is_a(v, float) for k, v in value.items())
    return type(value) is kind


# ---- the judge's


@dataclasses.dataclass
class JudgeSettings:
    """Who judges, and how."""

    judge_model: str = flag("", "another judge than the frozen base; with --judge-url its name there")
    judge_mode: str = flag(
        "logits",
        "how a score is read: from the first token's probabilities, or from a decoded reply",
        choices=("logits", "decode"),
    )
    judge_think: int = flag(0, "most tokens of thought before a decoded reply; 0 lets the judge not think", low=0)
    judge_min_mass: float = flag(
        0.5, "least probability on 1 to 5 at the first token; below it there is no score", low=1e-9, high=1.0
    )
    judge_chunk_size: int = flag(24, "evaluations at once; RUBRIC_JUDGE_BATCH_SIZE is its default", low=1)
    judge_url: str = flag(
        "", "an OpenAI-compatible server to ask instead, as http://127.0.0.1:8080/v1; its key in JUDGE_API_KEY"
    )
    judge_concurrency: int = flag(8, "requests to --judge-url at once", low=1, high=2**10)
    judge_timeout: float = flag(60.0, "seconds for one request to --judge-url", low=1e-3, high=1e6)
    judge_retries: int = flag(5, "tries after a request to --judge-url failed", low=0, high=100)


def check_judge(settings: JudgeSettings) -> None:
    """ValueError names the judge's flag that is wrong, or that does not go together with another."""
    check_values(JudgeSettings, vars(settings))
    if (think := settings.judge_think) and settings.judge_mode != "decode":
        raise ValueError(f"--judge-think {think} needs --judge-mode decode: logits are read before any thought")
    if settings.judge_url and not settings.judge_model:
        raise ValueError(f"--judge-url {settings.judge_url} serves models by name; name one with --judge-model")


def judge_of_flags(args: argparse.Namespace) -> JudgeSettings:
    """The judge's settings: flag, else environment, else default, checked."""
    names = [field.name for field in dataclasses.fields(JudgeSettings)]
    given = {name: getattr(args, name) for name in names if getattr(args, name) is not None}
    settings = JudgeSettings(**of_environment() | given)
    check_judge(settings)
    return settings


def of_environment() -> dict[str, int]:
    """The judge's chunk size where `RUBRIC_JUDGE_BATCH_SIZE` sets it; empty counts as unset. ValueError for no size."""
    text = os.environ.get("RUBRIC_JUDGE_BATCH_SIZE")
    if not text:
        return {}
    if not re.fullmatch("[1-9][0-9]{0,8}", text):
        raise ValueError(f"RUBRIC_JUDGE_BATCH_SIZE={text!r:.60}: it must be a whole number from 1 to 999999999")
    return {"judge_chunk_size": int(text)}
