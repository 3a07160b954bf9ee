"""
A Modelfile for Ollama: how a model answers there, where it stops, and its chat template in Go's text/template.

Ollama renders no Jinja. It takes one of its own templates for a file's where few characters differ, else it joins what
was said, without roles. So a template is rendered with marks for texts, and what stands between them written down.
Left out: tools, dates other than today's, spaces around a text or thoughts in it, which a template may strip.

Source: https://github.com/ollama/ollama, template/template.go and parser/parser.go.
"""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from config import Config
from deploy.gguf_writer import prompts_begin_with_bos
from disk.ends import end_of_reply
from problems import chat_template

# Ollama's defaults draw at temperature 0.8, cut the tail and punish repetition.
MODELFILE = """\
FROM ./{file}
# Greedy, as --temp 0. To draw as training did, write the run's --temp, by default 1.
PARAMETER temperature 0
PARAMETER top_k 0
PARAMETER top_p 1
PARAMETER repeat_penalty 1
"""
SHOTS = "# Ollama puts these before every talk. Who sends them too, as evaluate.py --url does, removes them here.\n"
GO_TEMPLATE = """\
{{ range $i, $one := .Messages }}{{ $last := eq (len (slice $.Messages $i)) 1 }}\
{{ if eq $one.Role "system" }}@system@{{ $one.Content }}@after_system@\
{{ else if eq $one.Role "user" }}{{ if eq $i 0 }}@first@{{ end }}@user@{{ $one.Content }}\
{{ if $last }}@prompt@{{ else }}@reply@{{ end }}\
{{ else if eq $one.Role "assistant" }}{{ $one.Content }}{{ if not $last }}@after_reply@{{ end }}\
{{ end }}{{ end }}"""
MARKS = ["first mark", "second mark", "third mark"]
TEXTS = [
    "{{ .Role }}",
    'one "two"\n\n`three\'',
    "\u00e9\U0001f642 <b>",
    "</s> \\n",
    "5",
]  # of a talk that is tried


class TemplatePieces(NamedTuple):
    """What a chat template puts around the texts of a talk."""

    first: str  # in front of a talk that begins with the user
    system: str
    after_system: str
    user: str
    reply: str  # between user and assistant, in a talk that goes on
    after_reply: str
    prompt: str  # between the last user and what is to be written


def template_pieces(tokenizer: Any) -> TemplatePieces | None:
    """Those of a tokenizer's chat template, or None where they do not make up what it renders."""
    try:
        (first, prompt), (_, reply, later, _) = (
            split_at_marks(tokenizer, MARKS[:1]),
            split_at_marks(tokenizer, MARKS),
        )
        system, told, _ = split_at_marks(tokenizer, MARKS[:1], "system mark")
        user = later.removeprefix(
            split_at_marks(tokenizer, MARKS[:2], opened=False)[-1]
        )  # behind the end of a reply
        if not (first.endswith(user) and told.endswith(user)):
            user = ""
        first, told, later = (one.removesuffix(user) for one in (first, told, later))
        found = TemplatePieces(first, system, told, user, reply, later, prompt)
        tried = [(TEXTS[:num], its) for num in (1, 3, 5) for its in (None, TEXTS[1])]
        return (
            found
            if all(join_pieces(found, *one) == render_texts(tokenizer, *one) for one in tried)
            else None
        )
    except ValueError:  # it refuses a talk, as one with a system message
        return None


def render_texts(
    tokenizer: Any, texts: Sequence[str], system: str | None = None, opened: bool = True
) -> str:
    """What the template makes of texts, the user's and the assistant's in turn, but for what llama.cpp begins with."""
    said = [
        {"role": ("user", "assistant")[place % 2], "content": text}
        for place, text in enumerate(texts)
    ]
    text = chat_template.render_chat(
        tokenizer, chat_template.make_messages(said, system), None, opened=opened
    )
    return text.removeprefix(tokenizer.bos_token) if prompts_begin_with_bos(tokenizer) else text


def split_at_marks(
    tokenizer: Any, marks: list[str], system: str | None = None, opened: bool = True
) -> list[str]:
    """What a talk's template has before each mark, and behind the last."""
    text, found = render_texts(tokenizer, marks, system, opened), []
    for mark in ([system] if system else []) + marks:
        before, _, text = text.partition(mark)
        found.append(before)
    return [*found, text]


def join_pieces(its: TemplatePieces, texts: Sequence[str], system: str | None) -> str:
    """What `GO_TEMPLATE` of these pieces renders."""
    text = its.first if system is None else its.system + system + its.after_system
    for asked, answer in zip(texts[:-1:2], texts[1::2], strict=True):
        text += its.user + asked + its.reply + answer + its.after_reply
    return text + its.user + texts[-1] + its.prompt


def escape_for_go(text: str) -> str:
    """
    A text in a Go template inside three quotes of a Modelfile, where it stands for itself.

    As codes: what begins an action, ends the quotes, or may be no printable character for Ollama, which drops these.
    """
    odd = {
        one
        for one in text
        if one == "{" or one > "\uffff" or not (one.isprintable() or one == "\n")
    }
    codes = {ord(one): f'{{{{ "\\U{ord(one):08x}" }}}}' for one in {*odd, '"'}}
    quotes = codes.pop(ord('"')) * 3
    return text.translate(codes).replace('"""', quotes)


def quote_messages(shots: list[dict[str, Any]]) -> str:
    """
    Messages as lines of a Modelfile, or "" where Ollama would change them.

    It joins neighbours of one role, ends a text at three quotes that end a line, and drops what it holds unprintable.
    """
    turns = [(one["role"], one.get("tool_calls")) for one in shots]
    is_kept = turns == [("user", None), ("assistant", None)] * (len(shots) // 2)
    for text in (one["content"] for one in shots):
        is_kept &= (
            not re.search(r'"""\s*[\r\n]', text) and re.sub(r"[\t\r\n]", "", text).isprintable()
        )
    return (
        "".join(f'MESSAGE {one["role"]} """{one["content"]}"""\n' for one in shots)
        if is_kept
        else ""
    )


def write_modelfile(
    folder: Path, tokenizer: Any, ends: Sequence[int], trained: Config | None, shots: list[Any]
) -> str:
    """
    Writes it beside the folder's GGUF file; returns what to say of its messages, and where it has no template.

    ends: ids that end an answer. trained: a run, whose limits it keeps. shots: what a talk begins with.
    """
    (file,) = folder.glob("*.gguf")
    lines, end = MODELFILE.format(file=file.name), end_of_reply(tokenizer)
    stops = [
        tokenizer.decode([one]) for one in dict.fromkeys([*ends, *([] if end is None else [end])])
    ]
    if trained:
        stops += trained.sampling.stop
        if trained.objective.loss_type != "sft":  # whose replies may be longer
            lines += f"PARAMETER num_predict {trained.sampling.max_tokens}\n"
    for text in stops:
        marks = '"""' if '"' in text else '"'
        lines += f"PARAMETER stop {marks}{text}{marks}\n"
    said = ""
    if shots:
        lines += (told := quote_messages(shots)) and SHOTS + told
        said = (
            f" that sends {len(shots)} messages first"
            if told
            else " without MESSAGE: Ollama would change them"
        )
    if its := template_pieces(tokenizer):
        lines += f'TEMPLATE """{re.sub("@(.*?)@", lambda match: escape_for_go(getattr(its, match[1])), GO_TEMPLATE)}"""\n'
    (folder / "Modelfile").write_text(lines, encoding="utf-8")
    none = (
        " without TEMPLATE, as the chat template is irregular: Ollama may join texts without roles"
    )
    return said + ("" if its else none)
