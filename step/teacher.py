"""
On-policy distillation: a teacher scores each token of the student's own completions.

The loss is the divergence of the two distributions at each token (layers/divergence.py). The teacher is another model
of the same tokenizer, or with `self` the model before training; a prompt that only the teacher sees may stand in front
of what the student sees. Left out: sampling, rewards, the optimizer.

Axes: M rows of a batch, T own tokens, V vocabulary, C hidden of the student, D hidden of the teacher.
"""

import re
from collections.abc import Iterable
from typing import Any

import mlx.core as mx

import gwen
import lora
from config import Config
from flags import read_text
from layers import divergence
from problems import chat_template
from problems.examples import Example, shorten_value
from step.batch import Batch, make_batches
from step.batch import completion_hidden_states as batch_hidden
from step.sample import Sample


class Teacher:
    """The model that teaches, and the prompt that it alone sees."""

    def __init__(
        self,
        config: Config,
        student: gwen.Model,
        tokenizer: Any,
        base: gwen.Model | None,
        token_budget: int,
    ):
        """
        base: the model before training, where `student` without its adapters is not that. token_budget: positions of a
        batch.

        Raises ValueError where the teacher cannot be loaded, has another tokenizer, or has no rows for the student's
        ids, and where the file of its prompt cannot be read.
        """
        self.config, self.tokenizer, self.token_budget = config, tokenizer, token_budget
        self.num_ids = len(student.head_weight)  # a larger model may have more, of no token
        self.text: str | None = None
        if path := config.objective.teacher_prompt:
            self.text = read_text(path, f"--teacher-prompt {path}", 1).strip()
            if not self.text:
                raise ValueError(
                    f"--teacher-prompt {path} is empty; write what the teacher shall know"
                )
        name = config.objective.teacher
        if name == "self":
            self.model, self.shape = base or student, student.config
            return
        with gwen.blame_flag("--teacher"):
            self.model, its_own = gwen.load(name, frozen=True)
        self.shape = self.model.config
        refuse_other_tokenizer(name, tokenizer, its_own)
        if self.shape.vocab_size < self.num_ids:
            said = f"--teacher {name} scores {self.shape.vocab_size} ids, {config.model.name} has {self.num_ids}"
            raise ValueError(f"{said}; take a teacher that scores all of them")

    def render_prompts(self, examples: Iterable[Example]) -> list[list[int]]:
        """The ids of each prompt as the teacher sees it. Raises ValueError where its completion would not fit."""
        seen = (
            examples
            if self.text is None
            else (prepend_text(self.text, example) for example in examples)
        )
        sampling, context = self.config.sampling, self.shape.max_position_embeddings
        how: Any = {
            "max_tokens": sampling.max_tokens,
            "thinking": sampling.thinking,
            "kind": "the teacher's prompt",
        }
        return chat_template.encode_prompts(self.tokenizer, seen, context=context, **how)

    def check_prompts(self, examples: list[Example], student_ids: list[list[int]]) -> None:
        """Raises ValueError where a prompt does not fit, or where the chat template drops the teacher's text."""
        room, longest = (
            self.shape.max_position_embeddings,
            max(map(len, student_ids)) + self.config.sampling.max_tokens,
        )
        settings, name = self.config.objective, self.config.model.name
        if longest > room:
            said = f"--teacher {settings.teacher} reads {room} tokens, a prompt and its completion have {longest}"
            raise ValueError(f"{said}; shorten the prompt or lower --max-tokens")
        if self.text is not None and self.render_prompts(examples) == student_ids:
            said = f"--teacher-prompt {settings.teacher_prompt}: the chat template of {name} leaves system messages out"
            raise ValueError(f"{said}, so teacher and student see the same; take another model")

    def add_lessons(self, samples: list[Sample], batches: list[Batch]) -> list[Batch]:
        """The batches with its hidden states of their tokens, and its head for the student's ids."""
        head_weight, taught = self.model.head_weight[: self.num_ids], list[Batch]()
        with lora.with_initial_weights(self.model):
            for batch in batches:
                if batch.is_local:
                    states = (
                        batch_hidden(self.model, batch)
                        if self.text is None
                        else self._prompted_hidden_states(samples, batch)
                    )
                    mx.eval(states)  # wait: the next batch may use this one's memory
                    batch = batch._replace(lesson=divergence.Lesson(states, head_weight))
                taught.append(batch)
        return taught

    def _prompted_hidden_states(self, samples: list[Sample], batch: Batch) -> mx.array:
        """The hidden states of a batch, (M, T, D), where the teacher sees another prompt: in batches of its own."""
        its = [samples[row] for row in batch.rows]
        groups = {sample.group: sample.example for sample in its}
        prompts = dict(zip(groups, self.render_prompts(groups.values()), strict=True))
        found = mx.zeros((*batch.mask.shape, self.shape.hidden_size), self.model.head_weight.dtype)
        for part in make_batches(
            [sample._replace(prompt=prompts[sample.group]) for sample in its], self.token_budget
        ):
            states = batch_hidden(self.model, part)
            found[mx.array(part.rows), : states.shape[1]] = states
            mx.eval(found)  # wait, as above
        return found


def refuse_other_tokenizer(name: str, ours: Any, theirs: Any) -> None:
    """Raises ValueError naming the first id that means something else to the teacher called `name`."""
    tables = [
        {id_: token for token, id_ in tokenizer.get_vocab().items()} for tokenizer in (ours, theirs)
    ]
    for id_ in sorted(tables[0].keys() | tables[1].keys()):
        our_token, their_token = (table.get(id_) for table in tables)
        if our_token != their_token:
            said = f"id {id_} is {shorten_value(their_token)} there and {shorten_value(our_token)} in the student's tokenizer"
            raise ValueError(f"--teacher {name}: {said}; take a teacher with the same tokenizer")
    special = [sorted(set(tokenizer.all_special_ids)) for tokenizer in (ours, theirs)]
    if special[0] != special[1]:
        said = f"its special tokens are {special[1]}, the student's {special[0]}"
        raise ValueError(f"--teacher {name}: {said}; take a teacher with the same tokenizer")


def _shown(value: Any) -> str:
    """A column's value as a text; of several right answers all."""
    return " or ".join(map(str, value)) if isinstance(value, list) else str(value)


def prepend_text(text: str, example: Example) -> Example:
    """The example with a text before all else, in its system message, where `{answer}` is its column of that name."""
    prompt = example["prompt"]
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
    if example.get("system") is not None:
        messages = [{"role": "system", "content": example["system"]}, *messages]
    said = re.sub(r"\{(\w+)\}", lambda found: _shown(example.get(found[1], found[0])), text)
    if messages[0]["role"] == "system":
        said, messages = f"{said}\n\n{messages[0]['content']}", messages[1:]
    return example | {"prompt": [{"role": "system", "content": said}, *messages], "system": None}
