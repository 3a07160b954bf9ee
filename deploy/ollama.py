"""
A Modelfile for Ollama: how to sample, where answers stop, and the chat template in Go.

Ollama does not render Jinja. If it has a template of its own that nearly equals the one in the GGUF
file, it uses its own; otherwise it joins the messages without roles. So the chat template is
rendered here with marks in place of the texts, and the pieces between the marks become a template
in the syntax of Go's text/template.

Not supported are tools, dates other than today's, and templates that strip the spaces around a text
or the thoughts in it.

Source: https://github.com/ollama/ollama, template/template.go and parser/parser.go.
"""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from config import Config
from deploy.gguf_writer import prompts_begin_with_bos
from disk.ends import end_of_reply_id
from prompts import chat_template

# By default, Ollama samples at temperature 0.8, cuts off unlikely tokens and penalizes repetition.
MODELFILE = """\
FROM ./{file}
# Greedy, as --temp 0. To draw as training did, write the run's --temp, by default 1.
PARAMETER temperature 0
PARAMETER top_k 0
PARAMETER top_p 1
PARAMETER repeat_penalty 1
"""
SHOTS = (
    "# Ollama puts these before every talk. Who sends them too, as evaluate.py --url does, "
    "removes them here.\n"
)
# `@name@` stands for a field of `TemplatePieces`.
GO_TEMPLATE = """\
{{ range $i, $one := .Messages }}{{ $last := eq (len (slice $.Messages $i)) 1 }}\
{{ if eq $one.Role "system" }}@system@{{ $one.Content }}@after_system@\
{{ else if eq $one.Role "user" }}{{ if eq $i 0 }}@first@{{ end }}@user@{{ $one.Content }}\
{{ if $last }}@prompt@{{ else }}@reply@{{ end }}\
{{ else if eq $one.Role "assistant" }}{{ $one.Content }}{{ if not $last }}@after_reply@{{ end }}\
{{ end }}{{ end }}"""
MARKS = ["first mark", "second mark", "third mark"]
# The pieces are checked on a conversation of these texts.
TEXTS = [
    "{{ .Role }}",
    'one "two"\n\n`three\'',
    "\u00e9\U0001f642 <b>",
    "</s> \\n",
    "5",
]


# ---- the chat template


class TemplatePieces(NamedTuple):
    """The text that a chat template writes around the texts of a conversation."""

    first: str  # before a conversation that begins with the user
    system: str
    after_system: str
    user: str
    reply: str  # between user and assistant, in a conversation that continues
    after_reply: str
    prompt: str  # between the last user message and the answer to write


def template_pieces(tokenizer: Any) -> TemplatePieces | None:
    """The pieces of a chat template; None if joining them does not give what it renders."""
    try:
        pieces = find_pieces(tokenizer)
        for num_texts in (1, 3, 5):
            texts = TEXTS[:num_texts]
            for system in (None, TEXTS[1]):
                rendered = render_texts(tokenizer, texts, system)
                if join_pieces(pieces, texts, system) != rendered:
                    return None
    except ValueError:  # the template refuses a conversation, such as one with a system message
        return None
    return pieces


def find_pieces(tokenizer: Any) -> TemplatePieces:
    """The pieces of a chat template, found by rendering conversations whose texts are marks."""
    first, prompt = split_at_marks(tokenizer, MARKS[:1])
    _, reply, between_turns, _ = split_at_marks(tokenizer, MARKS)
    system, after_system, _ = split_at_marks(tokenizer, MARKS[:1], "system mark")
    end_of_reply_text = split_at_marks(tokenizer, MARKS[:2], opened=False)[-1]

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


def render_texts(
    tokenizer: Any, texts: Sequence[str], system: str | None = None, opened: bool = True
) -> str:
    """
    The chat template's rendering of texts, which the user and the assistant write in turn.

    The beginning-of-text token is left out if llama.cpp will add it.
    """
    roles = ("user", "assistant")
    turns = [{"role": roles[index % 2], "content": text} for index, text in enumerate(texts)]
    messages = chat_template.make_messages(turns, system)
    text = chat_template.render_chat(tokenizer, messages, None, opened=opened)
    if prompts_begin_with_bos(tokenizer):
        text = text.removeprefix(tokenizer.bos_token)
    return text


def split_at_marks(
    tokenizer: Any, marks: list[str], system: str | None = None, opened: bool = True
) -> list[str]:
    """The rendered text before each mark and after the last one. A system mark comes first."""
    rest = render_texts(tokenizer, marks, system, opened)
    if system:
        marks = [system, *marks]
    pieces = []
    for mark in marks:
        before, _, rest = rest.partition(mark)
        pieces.append(before)
    return [*pieces, rest]


def join_pieces(pieces: TemplatePieces, texts: Sequence[str], system: str | None) -> str:
    """The text that `GO_TEMPLATE` renders with these pieces."""
    text = pieces.first
    if system is not None:
        text = pieces.system + system + pieces.after_system
    for user_text, answer in zip(texts[:-1:2], texts[1::2], strict=True):
        text += pieces.user + user_text + pieces.reply + answer + pieces.after_reply
    return text + pieces.user + texts[-1] + pieces.prompt


# ---- the syntax of a Modelfile


def escape_for_go(text: str) -> str:
    """
    Escapes a text for a Go template that is in triple quotes in a Modelfile.

    Go codes replace three kinds of characters: those that begin an action, those that end the
    quotes, and those that Ollama would drop as unprintable.
    """
    special = set()
    for character in text:
        is_dropped = character > "\uffff" or not (character.isprintable() or character == "\n")
        if character == "{" or is_dropped:
            special.add(character)
    codes = {ord(character): go_code(character) for character in special}
    return text.translate(codes).replace('"""', go_code('"') * 3)


def go_code(character: str) -> str:
    """A Go action that prints a character."""
    return f'{{{{ "\\U{ord(character):08x}" }}}}'


def quote_messages(shots: list[dict[str, Any]]) -> str:
    """
    Messages as lines of a Modelfile; "" if Ollama would change the messages.

    Ollama joins consecutive messages with the same role, ends a text at triple quotes at the end of
    a line, and drops characters that it considers unprintable.
    """
    turns = [(message["role"], message.get("tool_calls")) for message in shots]
    num_pairs = len(shots) // 2
    if turns != [("user", None), ("assistant", None)] * num_pairs:
        return ""
    lines = []
    for message in shots:
        text = message["content"]
        ends_early = re.search(r'"""\s*[\r\n]', text)
        if ends_early or not re.sub(r"[\t\r\n]", "", text).isprintable():
            return ""
        lines.append(f'MESSAGE {message["role"]} """{text}"""\n')
    return "".join(lines)


def write_modelfile(
    folder: Path,
    tokenizer: Any,
    end_ids: Sequence[int],
    trained: Config | None,
    shots: list[dict[str, Any]],
) -> str:
    """
    Writes a Modelfile beside the folder's GGUF file.

    end_ids: ids that end an answer.
    trained: a run's settings, whose limits become Ollama's; None without a run.
    shots: the messages that every conversation begins with.

    Returns a note for the user about the messages, and about a missing template.
    """
    (file,) = folder.glob("*.gguf")
    lines = MODELFILE.format(file=file.name)

    reply_end = end_of_reply_id(tokenizer)
    stop_ids = [*end_ids] if reply_end is None else [*end_ids, reply_end]
    stops = [tokenizer.decode([number]) for number in dict.fromkeys(stop_ids)]
    if trained:
        stops += trained.sampling.stop
        if trained.objective.loss_type != "sft":  # SFT's replies may be longer
            lines += f"PARAMETER num_predict {trained.sampling.max_tokens}\n"
    for text in stops:
        marks = '"""' if '"' in text else '"'
        lines += f"PARAMETER stop {marks}{text}{marks}\n"

    note = ""
    if shots:
        messages = quote_messages(shots)
        if messages:
            lines += SHOTS + messages
            note = f" that sends {len(shots)} messages first"
        else:
            note = " without MESSAGE: Ollama would change them"

    pieces = template_pieces(tokenizer)
    if pieces:
        template = fill_template(pieces)
        lines += f'TEMPLATE """{template}"""\n'
    else:
        note += (
            " without TEMPLATE, as the chat template is irregular: "
            "Ollama may join texts without roles"
        )
    (folder / "Modelfile").write_text(lines, encoding="utf-8")
    return note


def fill_template(pieces: TemplatePieces) -> str:
    """`GO_TEMPLATE` with these pieces in it."""

    def replace(match: re.Match[str]) -> str:
        return escape_for_go(getattr(pieces, match[1]))

    return re.sub("@(.*?)@", replace, GO_TEMPLATE)
