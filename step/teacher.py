"""
On-policy distillation: a teacher scores each token of the student's own completions.

The loss is the divergence between the two distributions at each token (layers/divergence.py). The
teacher is another model with the same tokenizer or, for --teacher self, the model before training.
A prompt that only the teacher sees may precede the student's prompt. This file does not cover
sampling, rewards or the optimizer.

Axes: M rows of a batch, T tokens that the policy wrote in a row, V vocabulary, C the student's
hidden width, D the teacher's hidden width.
"""

import re
from collections.abc import Iterable
from typing import Any

import mlx.core as mx

import gwen
import lora
from config import Config
from disk import model_choice
from layers import divergence
from prompts import chat_template
from prompts.examples import Example, shorten_value
from step.batch import Batch, completion_hidden_states, make_batches
from step.sample import Sample
from text.documents import read_text


class Teacher:
    """The teacher model, and the prompt that only the teacher sees."""

    def __init__(
        self,
        config: Config,
        student: gwen.Model,
        tokenizer: Any,
        base: gwen.Model | None,
        token_budget: int,
    ):
        """
        Loads the teacher and its prompt.

        base: the model before training, if disabling the student's adapters does not restore it.
        token_budget: the maximum number of positions in a batch.

        Raises ValueError if the teacher does not load, has a different tokenizer, or lacks some of
        the student's ids, or if the teacher's prompt cannot be read or is empty.
        """
        self.config = config
        self.tokenizer = tokenizer
        self.token_budget = token_budget
        self.num_ids = len(student.head_weight)  # a larger model may have extra rows without tokens
        self.extra_prompt: str | None = None
        path = config.objective.teacher_prompt
        if path:
            self.extra_prompt = read_text(path, f"--teacher-prompt {path}", 1).strip()
            if not self.extra_prompt:
                raise ValueError(
                    f"--teacher-prompt {path} is empty; write into it what the teacher shall know"
                )

        name = config.objective.teacher
        if name == "self":
            self.model = base or student
            self.model_config = student.config
            return
        with model_choice.blame_flag("--teacher"):
            self.model, teacher_tokenizer = gwen.load(name, frozen=True)
        self.model_config = self.model.config
        refuse_other_tokenizer(name, tokenizer, teacher_tokenizer)
        if self.model_config.vocab_size < self.num_ids:
            raise ValueError(
                f"--teacher {name} scores {self.model_config.vocab_size} ids, but "
                f"{config.model.name} has {self.num_ids}; take a teacher that scores all of them"
            )

    def render_prompts(self, examples: Iterable[Example]) -> list[list[int]]:
        """
        The ids of each prompt as the teacher sees it.

        Raises ValueError if a prompt leaves no room for its completion.
        """
        if self.extra_prompt is not None:
            examples = [prepend_text(self.extra_prompt, example) for example in examples]
        return chat_template.encode_prompts(
            self.tokenizer,
            examples,
            max_tokens=self.config.sampling.max_tokens,
            context=self.model_config.max_position_embeddings,
            thinking=self.config.sampling.thinking,
            kind="the teacher's prompt",
        )

    def check_prompts(self, examples: list[Example], student_ids: list[list[int]]) -> None:
        """Raises ValueError if a prompt is too long, or if the template drops the extra prompt."""
        settings = self.config.objective
        context = self.model_config.max_position_embeddings
        longest = max(map(len, student_ids)) + self.config.sampling.max_tokens
        if longest > context:
            raise ValueError(
                f"--teacher {settings.teacher} reads {context} tokens, but a prompt and its "
                f"completion have {longest}; shorten the prompt or lower --max-tokens"
            )
        if self.extra_prompt is not None and self.render_prompts(examples) == student_ids:
            raise ValueError(
                f"--teacher-prompt {settings.teacher_prompt}: the chat template of "
                f"{self.config.model.name} leaves system messages out, so teacher and student see "
                "the same prompt; take another model"
            )

    def add_lessons(self, samples: list[Sample], batches: list[Batch]) -> list[Batch]:
        """The batches, with the teacher's hidden states and its head for our ids added."""
        head_weight = self.model.head_weight[: self.num_ids]
        completed: list[Batch] = []
        with lora.with_initial_weights(self.model):
            for batch in batches:
                if batch.is_local:
                    if self.extra_prompt is None:
                        states = completion_hidden_states(self.model, batch)
                    else:
                        states = self._hidden_states_with_extra_prompt(samples, batch)
                    mx.eval(states)  # wait, so that the next batch can reuse this one's memory
                    batch = batch._replace(lesson=divergence.Lesson(states, head_weight))
                completed.append(batch)
        return completed

    def _hidden_states_with_extra_prompt(self, samples: list[Sample], batch: Batch) -> mx.array:
        """
        The teacher's hidden states of a batch, (M, T, D), if the teacher sees a longer prompt.

        The longer prompts need batches of their own.
        """
        rows = [samples[row] for row in batch.rows]
        examples = {sample.group: sample.example for sample in rows}
        prompts = self.render_prompts(examples.values())
        group_prompts = dict(zip(examples, prompts, strict=True))
        teacher_rows = [sample._replace(prompt=group_prompts[sample.group]) for sample in rows]

        shape = (*batch.mask.shape, self.model_config.hidden_size)
        all_states = mx.zeros(shape, self.model.head_weight.dtype)
        for part in make_batches(teacher_rows, self.token_budget):
            states = completion_hidden_states(self.model, part)
            all_states[mx.array(part.rows), : states.shape[1]] = states
            mx.eval(all_states)  # wait, as above
        return all_states


def refuse_other_tokenizer(name: str, student: Any, teacher: Any) -> None:
    """
    Raises ValueError if the tokenizers differ. It names the first id whose tokens differ.

    name: the teacher's name.
    """
    student_tokens = {id_: token for token, id_ in student.get_vocab().items()}
    teacher_tokens = {id_: token for token, id_ in teacher.get_vocab().items()}
    for id_ in sorted(student_tokens.keys() | teacher_tokens.keys()):
        student_token = student_tokens.get(id_)
        teacher_token = teacher_tokens.get(id_)
        if student_token != teacher_token:
            raise ValueError(
                f"--teacher {name}: id {id_} is {shorten_value(teacher_token)} there and "
                f"{shorten_value(student_token)} in the student's tokenizer; take a teacher with "
                "the same tokenizer"
            )

    student_special = sorted(set(student.all_special_ids))
    teacher_special = sorted(set(teacher.all_special_ids))
    if student_special != teacher_special:
        raise ValueError(
            f"--teacher {name}: its special tokens are {teacher_special}, the student's "
            f"{student_special}; take a teacher with the same tokenizer"
        )


def prepend_text(text: str, example: Example) -> Example:
    """
    A copy of the example with a text at the beginning of its system message.

    In the text, `{answer}` stands for the value in the example's column `answer`. Other columns
    work in the same way.
    """
    prompt = example["prompt"]
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
    if example.get("system") is not None:
        messages = [{"role": "system", "content": example["system"]}, *messages]

    def fill_column(match: re.Match[str]) -> str:
        column = match[1]
        return _column_text(example.get(column, match[0]))

    system = re.sub(r"\{(\w+)\}", fill_column, text)
    if messages[0]["role"] == "system":
        system = f"{system}\n\n{messages[0]['content']}"
        messages = messages[1:]
    return example | {"prompt": [{"role": "system", "content": system}, *messages], "system": None}


def _column_text(value: Any) -> str:
    """A column's value as a text; a list of right answers is joined with "or"."""
    if isinstance(value, list):
        return " or ".join(map(str, value))
    return str(value)
