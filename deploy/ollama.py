"""
Writes a Modelfile for Ollama, with sampling settings, stop texts and a chat template.

Ollama does not render Jinja templates. If Ollama has a template of its own that is nearly equal to
the template in the GGUF file, Ollama uses its own template. Otherwise, Ollama joins the messages
without their roles. So the chat template is rendered here with marker texts in place of the
messages, and the pieces between the markers become a template in the syntax of Go's text/template.

This file does not support tools, or dates other than today's. It does not support templates that
remove the spaces around a message, or that remove the thoughts in a message.

Source: https://github.com/ollama/ollama, template/template.go and parser/parser.go.
"""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from config import Config
from deploy.gguf_writer import prompts_begin_with_bos
from disk.ends import find_end_of_reply_id
from prompts import chat_template

# By default, Ollama samples at temperature 0.8, excludes unlikely tokens and penalizes repetition.
MODELFILE = """\
FROM ./{file}
# Greedy sampling, as with --temp 0. To sample as in training, set the run's --temp (by default 1).
PARAMETER temperature 0
PARAMETER top_k 0
PARAMETER top_p 1
PARAMETER repeat_penalty 1
"""
SHOTS = (
    "# Ollama starts every conversation with these messages. Remove them here if your program "
    "sends them too, as evaluate.py --url does.\n"
)
# Each `@name@` is replaced by the field of `TemplatePieces` with that name.
GO_TEMPLATE = """\
{{ range $i, $one := .Messages }}{{ $last := eq (len (slice $.Messages $i)) 1 }}\
{{ if eq $one.Role "system" }}@system@{{ $one.Content }}@after_system@\
{{ else if eq $one.Role "user" }}{{ if eq $i 0 }}@first@{{ end }}@user@{{ $one.Content }}\
{{ if $last }}@prompt@{{ else }}@reply@{{ end }}\
{{ else if eq $one.Role "assistant" }}{{ $one.Content }}{{ if not $last }}@after_reply@{{ end }}\
{{ end }}{{ end }}"""
MARKS = ["first mark", "second mark", "third mark"]
# The pieces of a template are checked on conversations that consist of these texts.
TEXTS = [
    "{{ .Role }}",
    'one "two"\n\n`three\'',
    "\u00e9\U0001f642 <b>",
    "</s> \\n",
    "5",
]


# ---- the chat template


class TemplatePieces(NamedTuple):
    """The pieces of text that a chat template writes around the messages of a conversation."""

    first: str  # before the first message, if there is no system prompt
    system: str
    after_system: str
    user: str
    reply: str  # between a user message and an assistant message that has already been written
    after_reply: str
    prompt: str  # between the last user message and the answer that the model will write


def extract_checked_pieces(tokenizer: Any) -> TemplatePieces | None:
    """
    The pieces of a chat template.

    Returns None if joining the pieces does not give the same text as rendering the template.
    """
    try:
        pieces = extract_pieces(tokenizer)
        for num_texts in (1, 3, 5):
            texts = TEXTS[:num_texts]
            for system in (None, TEXTS[1]):
                rendered = render_without_added_bos(tokenizer, texts, system)
                if render_with_pieces(pieces, texts, system) != rendered:
                    return None
    except ValueError:  # for example, if the template does not allow a system prompt
        return None
    return pieces


def extract_pieces(tokenizer: Any) -> TemplatePieces:
    """The pieces of a chat template, found by rendering conversations of marker texts."""
    first, prompt = render_and_split_at_marks(tokenizer, MARKS[:1])
    _, reply, between_turns, _ = render_and_split_at_marks(tokenizer, MARKS)
    system, after_system, _ = render_and_split_at_marks(tokenizer, MARKS[:1], "system mark")
    end_of_reply_text = render_and_split_at_marks(tokenizer, MARKS[:2], opened=False)[-1]

    user = between_turns.removeprefix(end_of_reply_text)
    if not (first.endswith(user) and after_system.endswith(user)):
        user = ""
    return TemplatePieces(
        first=first.removesuffix(user),
        system=system,
        after_system=after_system.removesuffix(user),
        user=user,
        reply=reply,
        after_reply=between_turns.removesuffix(user),
        prompt=prompt,
    )


def render_without_added_bos(
    tokenizer: Any, alternating_texts: Sequence[str], system: str | None = None, opened: bool = True
) -> str:
    """
    Returns the chat template's text for messages that the user and the assistant write in turn.

    If llama.cpp will add a beginning-of-text token, this token is omitted here.
    """
    roles = ("user", "assistant")
    turns = [
        {"role": roles[index % 2], "content": text} for index, text in enumerate(alternating_texts)
    ]
    messages = chat_template.make_messages(turns, system)
    text = chat_template.render_chat(tokenizer, messages, None, add_generation_prompt=opened)
    if prompts_begin_with_bos(tokenizer):
        text = text.removeprefix(tokenizer.bos_token)
    return text


def render_and_split_at_marks(
    tokenizer: Any, marks: list[str], system: str | None = None, opened: bool = True
) -> list[str]:
    """
    The pieces of rendered text before each marker and after the last marker.

    If there is a marker for the system prompt, this marker comes first.
    """
    rest = render_without_added_bos(tokenizer, marks, system, opened)
    if system:
        marks = [system, *marks]
    pieces = []
    for mark in marks:
        before, _, rest = rest.partition(mark)
        pieces.append(before)
    return [*pieces, rest]


def render_with_pieces(pieces: TemplatePieces, texts: Sequence[str], system: str | None) -> str:
    """The text of a conversation, rendered by `GO_TEMPLATE` with the given pieces."""
    text = pieces.first
    if system is not None:
        text = pieces.system + system + pieces.after_system
    for user_text, answer in zip(texts[:-1:2], texts[1::2], strict=True):
        text += pieces.user + user_text + pieces.reply + answer + pieces.after_reply
    return text + pieces.user + texts[-1] + pieces.prompt


# ---- the syntax of a Modelfile


def escape_for_modelfile_template(text: str) -> str:
    """
    The text, escaped for a Go template in triple quotes in a Modelfile.

    Go actions replace the characters that begin an action, the characters that end the triple
    quotes, and the characters that Ollama would drop as unprintable.
    """
    special = set()
    for character in text:
        is_dropped = character > "\uffff" or not (character.isprintable() or character == "\n")
        if character == "{" or is_dropped:
            special.add(character)
    codes = {ord(character): go_print_action(character) for character in special}
    return text.translate(codes).replace('"""', go_print_action('"') * 3)


def go_print_action(character: str) -> str:
    """A Go template action that prints the given character."""
    return f'{{{{ "\\U{ord(character):08x}" }}}}'


def format_modelfile_messages_or_empty(messages: list[dict[str, Any]]) -> str:
    """
    The messages as lines of a Modelfile, or "" if Ollama would change the messages.

    Ollama joins consecutive messages with the same role. If a line in a message ends with triple
    quotes, Ollama ends the message there. Ollama also drops characters that it considers
    unprintable.
    """
    turns = [(message["role"], message.get("tool_calls")) for message in messages]
    num_pairs = len(messages) // 2
    if turns != [("user", None), ("assistant", None)] * num_pairs:
        return ""
    lines = []
    for message in messages:
        text = message["content"]
        ends_early = re.search(r'"""\s*[\r\n]', text)
        if ends_early or not re.sub(r"[\t\r\n]", "", text).isprintable():
            return ""
        lines.append(f'MESSAGE {message["role"]} """{text}"""\n')
    return "".join(lines)


def write_modelfile_and_return_note(
    folder: Path,
    tokenizer: Any,
    end_ids: Sequence[int],
    run_config: Config | None,
    shots: list[dict[str, Any]],
) -> str:
    """
    Writes a Modelfile into the folder that contains the GGUF file.

    end_ids: the token ids that end an answer.
    run_config: the settings of the run, whose length limit and stop texts Ollama will use; None if
        there is no run.
    shots: the messages with which every conversation begins.

    Returns a note for the user about the messages, and about the template if it is missing.
    """
    (file,) = folder.glob("*.gguf")
    lines = MODELFILE.format(file=file.name)

    reply_end = find_end_of_reply_id(tokenizer)
    stop_ids = [*end_ids] if reply_end is None else [*end_ids, reply_end]
    stops = [tokenizer.decode([number]) for number in dict.fromkeys(stop_ids)]
    if run_config:
        stops += run_config.sampling.stop
        # after SFT, replies may be longer than this limit
        if run_config.objective.loss_type != "sft":
            lines += f"PARAMETER num_predict {run_config.sampling.max_tokens}\n"
    for text in stops:
        marks = '"""' if '"' in text else '"'
        lines += f"PARAMETER stop {marks}{text}{marks}\n"

    note = ""
    if shots:
        messages = format_modelfile_messages_or_empty(shots)
        if messages:
            lines += SHOTS + messages
            note = f" that sends {len(shots)} messages first"
        else:
            note = " without MESSAGE lines, because Ollama would change the messages"

    pieces = extract_checked_pieces(tokenizer)
    if pieces:
        template = fill_go_template(pieces)
        lines += f'TEMPLATE """{template}"""\n'
    else:
        note += (
            " without TEMPLATE, because the chat template is irregular, so Ollama may join "
            "messages without their roles"
        )
    (folder / "Modelfile").write_text(lines, encoding="utf-8")
    return note


def fill_go_template(pieces: TemplatePieces) -> str:
    """`GO_TEMPLATE`, with its placeholders replaced by the given pieces."""

    def escaped_piece(placeholder: re.Match[str]) -> str:
        return escape_for_modelfile_template(getattr(pieces, placeholder[1]))

    return re.sub("@(.*?)@", escaped_piece, GO_TEMPLATE)
