"""
Builds a judge's prompts, as token ids for a local judge or as chat messages for a server.

A local judge's prompt consists of segments that are encoded separately. Shared segments come first,
so that a tree of prompts (judging/prompt_tree.py) computes each shared token only once. A question
or an answer cannot close its own section of the prompt or imitate another role.
"""

import re
import sys
from collections.abc import Sequence
from typing import Any

from tqdm.auto import tqdm

from judging.rubrics import Criterion, Rubric
from prompts import chat_template

# private-use characters that mark where the question, the answer and the criterion go
_QUESTION = "\ue000"
_ANSWER = "\ue001"
_CRITERION = "\ue002"
_MARKS = (_QUESTION, _ANSWER, _CRITERION)
LAYOUT = (
    f"<question>\n{_QUESTION}\n</question>\n<answer>\n{_ANSWER}\n</answer>\n{_CRITERION}\n"
    "Reply with one digit from 1 to 5."
)
_TAG = re.compile(r"<(?=\s*+/?+\s*+(?:question|answer)\b)", re.IGNORECASE)
# matches the beginning of "<|im_end|>", "</s>", "<think>", "[INST]" or "<<SYS>>"
_MAYBE_CONTROL = re.compile(r"[<\[](?=[|/\w<\uff5c])")


def render_prompt_with_marks(tokenizer: Any, preamble: str, thinking: bool) -> str:
    """
    Renders a judge's prompt with marks in place of the question, the answer and the criterion.

    If the chat template refuses or drops a system message, the preamble goes at the beginning of
    the user's message, and a line on stderr says so.

    Raises ValueError if the template also refuses a prompt without a system message.
    """
    messages = [{"role": "system", "content": preamble}, {"role": "user", "content": LAYOUT}]
    text = ""
    refusal = ""
    try:
        text = chat_template.render_chat(tokenizer, messages, thinking)
    except ValueError as error:
        refusal = str(error)
    if not refusal and preamble in text:
        return text

    user_message = {"role": "user", "content": f"{preamble}\n\n{LAYOUT}"}
    try:
        merged_text = chat_template.render_chat(tokenizer, [user_message], thinking)
    except ValueError as error:
        raise ValueError(refusal or str(error)) from error
    if preamble in merged_text:
        tqdm.write(
            "The judge's chat template takes no system message, "
            "so the user's message begins with the rubric's preamble.",
            file=sys.stderr,
        )
        return merged_text
    return text or merged_text


class JudgePromptEncoder:
    """
    Encodes a judge's prompts in four segments: preamble, question, answer and criterion.

    All prompts share the preamble. The prompts of one group share the question, and the prompts of
    one completion share the answer. A question or an answer cannot close its own section: control
    tokens in it are encoded as plain text, and tags are broken up by a space.

    thinking: whether the judge thinks before it answers, if its chat template supports thinking.

    Raises ValueError if the tokenizer has no chat template, or if the template does not render the
    user's message exactly once.
    """

    def __init__(self, tokenizer: Any, rubric: Rubric, thinking: bool = False):
        self.tokenizer = tokenizer
        if getattr(tokenizer, "chat_template", None) is None:
            raise ValueError(
                "the judge's tokenizer has no chat template; use an instruction-tuned model"
            )
        text = render_prompt_with_marks(tokenizer, rubric.preamble, thinking)
        if any(text.count(mark) != 1 for mark in _MARKS):
            raise ValueError(
                "the judge's chat template does not render the user's message exactly once; "
                "use another model"
            )
        head, _, rest = text.partition(_QUESTION)
        middle, _, rest = rest.partition(_ANSWER)
        before, _, after = rest.partition(_CRITERION)
        # whether the prompt opens a thought, so that a reply begins inside the thought
        self.opens_thought = "<think>" in after.rpartition("</think>")[2]

        # Token ids that untrusted text must not contain. The tokenizer recognizes added tokens in
        # any text, even added tokens that are not special.
        self.control = {
            token_id: token
            for token, token_id in tokenizer.get_added_vocab().items()
            if not token.isspace()
        }
        # `head` is the text before the question, `middle` is the text between question and answer,
        # and `tails` has, for each criterion, the text after the answer
        self.head = self.encode_trusted(head)
        self.middle = self.encode_trusted(middle)
        self.tails = [
            self.encode_trusted(before + criterion.text + after) for criterion in rubric.criteria
        ]
        num_shared = shared_proper_prefix_length(self.tails)
        self.shared_tail = self.tails[0][:num_shared]
        self.criterion_tails = [tail[num_shared:] for tail in self.tails]

    def encode_trusted(self, text: str) -> list[int]:
        """
        The token ids of a text that Gwen or the rubric's author wrote.

        Control tokens in the text keep their meaning.
        """
        return self.tokenizer.encode(text, add_special_tokens=False)

    def _encode_special_tokens_as_text(self, text: str) -> list[int]:
        """The token ids of a text in which special tokens are encoded as plain text."""
        return self.tokenizer.encode(text, add_special_tokens=False, split_special_tokens=True)

    def encode_untrusted(self, text: str) -> list[int]:
        """
        The token ids of a text that a model or a user wrote.

        Control tokens such as "<|im_end|>", and tags such as "</answer>", become plain characters.
        """
        text = _TAG.sub("< ", text)
        ids = self._encode_special_tokens_as_text(text)
        unmarked_ids = self.control.keys() & set(ids)  # control tokens that are not special
        if unmarked_ids:
            for token in {self.control[token_id] for token_id in unmarked_ids}:
                text = text.replace(token, f"{token[0]} {token[1:]}")
            ids = self._encode_special_tokens_as_text(text)
        # drop control tokens that the tokenizer recognizes in other spellings
        return [token_id for token_id in ids if token_id not in self.control]

    def encode_question_segment(self, question: str) -> list[int]:
        """The token ids of the question and of the text between question and answer."""
        return self.encode_untrusted(question) + self.middle

    def encode_answer_segment(self, answer: str) -> list[int]:
        """The token ids of the answer and of the text after it that all criteria share."""
        return self.encode_untrusted(answer) + self.shared_tail


def shared_proper_prefix_length(token_rows: Sequence[Sequence[int]]) -> int:
    """The number of leading ids that all rows share, always less than the length of any row."""
    most = max(0, min(map(len, token_rows)) - 1)
    for length in range(most):
        if len({row[length] for row in token_rows}) > 1:
            return length
    return most


def make_judge_messages(
    rubric: Rubric, prompt: str, completion: str, criterion: Criterion
) -> list[dict[str, str]]:
    """
    A judge's prompt as chat messages, for a server whose tokenizer is unknown.

    A space breaks up text that could be a control token, such as "[INST]".
    """
    texts = {
        _QUESTION: _break_up_control_tokens(prompt),
        _ANSWER: _break_up_control_tokens(completion),
        _CRITERION: criterion.text,
    }
    parts = re.split(f"([{''.join(_MARKS)}])", LAYOUT)
    content = "".join(texts.get(part, part) for part in parts)
    return [{"role": "system", "content": rubric.preamble}, {"role": "user", "content": content}]


def _break_up_control_tokens(text: str) -> str:
    return _MAYBE_CONTROL.sub(r"\g<0> ", _TAG.sub("< ", text))
