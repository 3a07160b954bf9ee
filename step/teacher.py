"""
On-policy distillation: a student learns from a teacher's predictions for the student's completions.

The loss is the divergence between the teacher's and the student's distributions at each token
(layers/divergence.py). The teacher is another model with the same tokenizer or, for --teacher self,
the model before training. The teacher may see an extra prompt before the student's prompt.

Axes: M rows of a batch, T tokens that the policy wrote in a row, D the teacher's hidden width.
"""

import re
from collections.abc import Iterable
from typing import Any

import cpu_blas  # noqa: F401  (before mlx)
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
    """The teacher model, and the extra prompt that only the teacher sees."""

    def __init__(
        self,
        config: Config,
        student: gwen.Model,
        tokenizer: Any,
        base: gwen.Model | None,
        token_budget: int,
    ):
        """
        Loads the teacher model and the teacher's extra prompt.

        base: the model before training; None if disabling the student's adapters restores it.
        token_budget: the maximum number of positions in a batch.

        Raises ValueError if the teacher cannot be loaded, has a different tokenizer, or lacks some
        of the student's token ids, or if the teacher's extra prompt cannot be read or is empty.
        """
        self.config = config
        self.tokenizer = tokenizer
        self.token_budget = token_budget
        # the output weights of a larger teacher may have additional rows that belong to no token
        self.num_ids = len(student.head_weight)
        self.extra_prompt: str | None = None
        path = config.objective.teacher_prompt
        if path:
            self.extra_prompt = read_text(path, f"--teacher-prompt {path}", 1).strip()
            if not self.extra_prompt:
                raise ValueError(
                    f"--teacher-prompt {path} is empty; write the prompt for the teacher "
                    "into this file"
                )

        name = config.objective.teacher
        if name == "self":
            self.model = base or student
            self.model_config = student.config
            return
        with model_choice.replace_flag_in_errors("--teacher"):
            self.model, teacher_tokenizer = gwen.load(name, frozen=True)
        self.model_config = self.model.config
        check_tokenizers_are_equal(name, tokenizer, teacher_tokenizer)
        if self.model_config.vocab_size < self.num_ids:
            raise ValueError(
                f"--teacher {name} has {self.model_config.vocab_size} token ids, but "
                f"{config.model.name} has {self.num_ids}; use a teacher with at least "
                f"{self.num_ids} token ids"
            )

    def encode_teacher_prompts(self, examples: Iterable[Example]) -> list[list[int]]:
        """
        The token ids of each example's prompt as the teacher sees it, with the extra prompt.

        Raises ValueError if a prompt leaves no room for its completion.
        """
        if self.extra_prompt is not None:
            examples = [
                prepend_to_system_message(self.extra_prompt, example) for example in examples
            ]
        return chat_template.encode_prompts(
            self.tokenizer,
            examples,
            max_tokens=self.config.sampling.max_tokens,
            context=self.model_config.max_position_embeddings,
            thinking=self.config.sampling.thinking,
            kind="the teacher's prompt",
        )

    def refuse_prompts_unfit_for_teacher(
        self, examples: list[Example], student_prompt_ids: list[list[int]]
    ) -> None:
        """
        Checks that the teacher can read every prompt of the student.

        Raises ValueError if a prompt is too long for the teacher, or if the chat template drops the
        teacher's extra prompt.
        """
        settings = self.config.objective
        context = self.model_config.max_position_embeddings
        longest = max(map(len, student_prompt_ids)) + self.config.sampling.max_tokens
        if longest > context:
            raise ValueError(
                f"--teacher {settings.teacher} can read {context} tokens, but the longest prompt "
                f"and its completion may have {longest}; shorten the prompt or lower --max-tokens"
            )
        if self.extra_prompt is None:
            return
        if self.encode_teacher_prompts(examples) == student_prompt_ids:
            raise ValueError(
                f"--teacher-prompt {settings.teacher_prompt}: the chat template of "
                f"{self.config.model.name} drops system messages, so the teacher would see the "
                "same prompt as the student; use another model"
            )

    def add_teacher_states_and_head(
        self, samples: list[Sample], batches: list[Batch]
    ) -> list[Batch]:
        """
        Copies of the batches, in which the field `lesson` is set.

        This field contains the teacher's hidden states and output weights.
        """
        head_weight = self.model.head_weight[: self.num_ids]
        completed: list[Batch] = []
        with lora.use_initial_weights(self.model):
            for batch in batches:
                if batch.is_local:
                    if self.extra_prompt is None:
                        states = completion_hidden_states(self.model, batch)
                    else:
                        states = self._hidden_states_with_extra_prompt(samples, batch)
                    mx.eval(states)  # wait, so that the next batch can reuse this batch's memory
                    lesson = divergence.TeacherStatesAndHead(states, head_weight)
                    batch = batch._replace(lesson=lesson)
                completed.append(batch)
        return completed

    def _hidden_states_with_extra_prompt(self, samples: list[Sample], batch: Batch) -> mx.array:
        """
        The teacher's hidden states for a batch, (M, T, D), computed with the extra prompt.

        The prompts with the extra prompt are longer, so they are put into batches of their own.
        """
        rows = [samples[row] for row in batch.rows]
        # a replayed sample may have the same group number as samples with another prompt
        keys = [(sample.group, tuple(sample.prompt)) for sample in rows]
        examples = {key: sample.example for key, sample in zip(keys, rows, strict=True)}
        prompts = self.encode_teacher_prompts(examples.values())
        prompt_by_key = dict(zip(examples, prompts, strict=True))
        teacher_rows = [
            sample._replace(prompt=prompt_by_key[key])
            for key, sample in zip(keys, rows, strict=True)
        ]

        shape = (*batch.mask.shape, self.model_config.hidden_size)
        all_states = mx.zeros(shape, self.model.head_weight.dtype)
        for part in make_batches(teacher_rows, self.token_budget):
            states = completion_hidden_states(self.model, part)
            all_states[mx.array(part.rows), : states.shape[1]] = states
            mx.eval(all_states)  # wait, so that the next batch can reuse this batch's memory
        return all_states


def check_tokenizers_are_equal(
    teacher_name: str, student_tokenizer: Any, teacher_tokenizer: Any
) -> None:
    """Raises ValueError, which names the first difference, if the two tokenizers differ."""
    student_tokens = {id_: token for token, id_ in student_tokenizer.get_vocab().items()}
    teacher_tokens = {id_: token for token, id_ in teacher_tokenizer.get_vocab().items()}
    for id_ in sorted(student_tokens.keys() | teacher_tokens.keys()):
        student_token = student_tokens.get(id_)
        teacher_token = teacher_tokens.get(id_)
        if student_token != teacher_token:
            raise ValueError(
                f"--teacher {teacher_name}: the token with the id {id_} is "
                f"{shorten_value(teacher_token)} in the teacher's tokenizer and "
                f"{shorten_value(student_token)} in the student's tokenizer; use a teacher with "
                "the same tokenizer"
            )

    student_special = sorted(set(student_tokenizer.all_special_ids))
    teacher_special = sorted(set(teacher_tokenizer.all_special_ids))
    if student_special != teacher_special:
        raise ValueError(
            f"--teacher {teacher_name}: the ids of the special tokens are {teacher_special} for "
            f"the teacher and {student_special} for the student; use a teacher with the same "
            "tokenizer"
        )


def prepend_to_system_message(template: str, example: Example) -> Example:
    """
    A copy of the example with the filled-in template at the beginning of the system message.

    In the template, `{answer}` is replaced by the value in the example's column `answer`. The same
    holds for every other column.
    """
    prompt = example["prompt"]
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
    if example.get("system") is not None:
        messages = [{"role": "system", "content": example["system"]}, *messages]

    def column_text_for_placeholder(match: re.Match[str]) -> str:
        """The text of the column; the placeholder itself if the example lacks the column."""
        column = match[1]
        return _join_column_items_with_or(example.get(column, match[0]))

    system = re.sub(r"\{(\w+)\}", column_text_for_placeholder, template)
    if messages[0]["role"] == "system":
        system = f"{system}\n\n{messages[0]['content']}"
        messages = messages[1:]
    return example | {"prompt": [{"role": "system", "content": system}, *messages], "system": None}


def _join_column_items_with_or(value: Any) -> str:
    """The value of a column as text. The items of a list are joined with "or"."""
    if isinstance(value, list):
        return " or ".join(map(str, value))
    return str(value)
