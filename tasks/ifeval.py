"""
Written instructions: prompts without end, of topics times instructions, and the field's own verifiers.

`ifeval:NAME,NAME` asks for kinds of IFEval's instructions (arXiv:2311.07911), one in three prompts of four, two in the
others. Topics, keywords and wordings of the held-out side occur in no training prompt. `ifbench` has kinds of IFBench
(arXiv:2507.02833) in the benchmark's own words, on held-out topics only: what of the training carries over.
if-verifiable, an extra, verifies; its workers are sealed, since completions are hostile and its patterns search them.

Keywords are whole words, where the benchmark takes "honesty" for "honest". Sentences are counted by the splitter that
IFEval brings, where it takes punkt: left out is what needs nltk's data, which no package index has, and so
`change_case:capital_word_frequency`, `words:start_verb`, `words:words_position`, `words:keywords_specific_position`,
`ratio:stop_words` and `format:title_case` are not asked.
"""

import importlib.util
import os
import random
import sys
import types
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from problems import form
from problems.examples import Example, nearest, prompt_key
from problems.workers import Pool
from tasks import rg

INSTALL = "if-verifiable is not installed; begin the command with: uv run --extra ifeval"
VERIFIERS, LIMIT = 2, 5.0  # processes at most, of 90 MB each, and seconds for one completion
HELD_OUT = 256
PAIRS = 0.25  # share of prompts with two instructions

PLURALS = {"s": "", "oes": "o", "xes": "x", "ies": "y", "ves": "f"}  # of topics: their ends, and those of one

Sides = tuple[list[str], list[str]]  # train, held out

TOPICS: Sides = (
    (
        "water, bread, the moon, honey, bicycles, rain, music, trees, coffee, cats, the sea, snow, clocks, paper, "
        "salt, elephants, gardens, trains, books, the sun, cheese, rivers, mirrors, apples, sleep, glass, horses, "
        "maps, tea, bridges, volcanoes, soap, shoes, dogs, the wind, chess, wool, islands, rice, letters, whales, "
        "markets, fire, potatoes, owls, kites, ships, spoons, lightning, bees, winter, pencils, deserts, lemons, "
        "drums, windows, ants, castles, sugar, football, turtles, candles, mountains, chairs, onions, rainbows, "
        "farms, money, wolves, pianos, hospitals, sand, keys, airplanes, milk, stars, spiders, roads, dancing, "
        "umbrellas, iron, penguins, libraries, tomatoes, caves, painting, buttons, forests, robots, grapes, storms, "
        "beds, swimming, gold, frogs, schools, pepper, towers, cameras, ice, lakes, goats, hats, silk, tunnels, "
        "carrots, dreams, bears, coins, boats"
    ).split(", "),
    (
        "the telephone, butter, lions, earthquakes, gloves, violins, clouds, pigeons, chocolate, museums, sharks, "
        "string, autumn, wheels, garlic, lighthouses, foxes, newspapers, waterfalls, eggs, batteries, camels, "
        "carpets, thunder"
    ).split(", "),
)
ASKS: Sides = (
    [
        "Describe {}.",
        "Tell me about {}.",
        "What do you know about {}?",
        "Write something about {}.",
        "Tell a child about {}.",
        "Why do people care about {}?",
        "Write a short text about {}.",
        "What should everybody know about {}?",
    ],
    ["Say what comes to mind about {}.", "Give me a description of {}.", "I would like to hear about {}."],
)
WORDS: Sides = (
    (
        "green river happy window simple morning friend small yellow great journey quiet letter strong summer doctor "
        "market silver gentle garden number travel winter bright story family kitchen music paper clever story animal "
        "blue orange village teacher mountain sister bottle minute corner player farmer engine dinner"
    ).split(),
    "purple forest captain honest basket lucky pocket evening sailor copper moment brother velvet island".split(),
)
OPENINGS: Sides = (
    "Well Today Once Clearly Sometimes Many Everybody Imagine Here Because Indeed People".split(),
    "Often Perhaps Usually Nobody Look Finally".split(),
)
ENDINGS: Sides = (
    ["That is all.", "Is there anything else?", "I hope this helps.", "Thank you for asking.", "So it goes."],
    ["That was my answer.", "Ask me for more.", "This is the end."],
)
LETTERS: Sides = ("a e o s t".split(), "i n r".split())


class Kind(NamedTuple):
    """A kind of instruction: its verifier, its arguments drawn for a side, and its wordings."""

    verifier: str  # IFEval's name
    draw: Callable[[random.Random, int], dict[str, Any]]  # side: 0 train, 1 held out
    wordings: Sides  # of the arguments, by name


def less(name: str, low: int, high: int) -> Callable[[random.Random, int], dict[str, Any]]:
    return lambda rng, _: {name: rng.randint(low, high), "relation": "less than"}


def exactly(name: str, *values: int) -> Callable[[random.Random, int], dict[str, Any]]:
    return lambda rng, _: {name: rng.choice(values)}


def one_of(name: str, known: Sides) -> Callable[[random.Random, int], dict[str, Any]]:
    return lambda rng, side: {name: rng.choice(known[side])}


def nothing(_: random.Random, __: int) -> dict[str, Any]:
    return {}


KINDS: dict[str, Kind] = {
    "words": Kind(
        "length_constraints:number_words",
        less("num_words", 10, 24),
        (
            ["Use fewer than {num_words} words.", "Answer with less than {num_words} words.",
             "Your answer must have fewer than {num_words} words."],
            ["Stay below {num_words} words.", "Do it in less than {num_words} words."],
        ),
    ),
    "opening": Kind(
        "length_constraints:nth_paragraph_first_word",
        lambda rng, side: {"num_paragraphs": 1, "nth_paragraph": 1, "first_word": rng.choice(OPENINGS[side])},
        (
            ["Write one paragraph that starts with the word {first_word}.",
             "Start your answer with the word {first_word}, in a single paragraph."],
            ["Begin with the word {first_word} and write just one paragraph."],
        ),
    ),
    "keyword": Kind(
        "keywords:existence",
        lambda rng, side: {"keywords": [rng.choice(WORDS[side])]},
        (
            ["Use the word {keywords[0]}.", "Include the word {keywords[0]} in your answer.",
             "The word {keywords[0]} must occur."],
            ["Make sure that the word {keywords[0]} is in it.", "Your answer should contain the word {keywords[0]}."],
        ),
    ),
    "sentences": Kind(
        "length_constraints:number_sentences",
        less("num_sentences", 2, 3),
        (
            ["Write less than {num_sentences} sentences.", "Answer in fewer than {num_sentences} sentences."],
            ["Your response must have fewer than {num_sentences} sentences."],
        ),
    ),
    "no_comma": Kind(
        "punctuation:no_comma",
        nothing,
        (
            ["Do not use any commas.", "Write without commas.", "Your answer must not contain a comma."],
            ["Refrain from the use of commas.", "Avoid commas altogether."],
        ),
    ),
    "more_words": Kind(
        "length_constraints:number_words",
        lambda rng, _: {"num_words": rng.randint(20, 30), "relation": "at least"},
        (["Use at least {num_words} words.", "Write {num_words} words or more."], ["At least {num_words} words."]),
    ),
    "frequency": Kind(
        "keywords:frequency",
        lambda rng, side: {"keyword": rng.choice(WORDS[side]), "frequency": 2, "relation": "at least"},
        (["Use the word {keyword} at least twice."], ["The word {keyword} should appear two times or more."]),
    ),
    "forbidden": Kind(
        "keywords:forbidden_words",
        lambda rng, _: {"forbidden_words": rng.sample(["is", "the", "a", "and", "of", "it", "are"], 2)},
        (
            ["Do not use the words {forbidden_words[0]} and {forbidden_words[1]}."],
            ["Avoid the words {forbidden_words[0]} and {forbidden_words[1]}."],
        ),
    ),
    "letter": Kind(
        "keywords:letter_frequency",
        lambda rng, side: {"letter": rng.choice(LETTERS[side]), "let_frequency": 4, "let_relation": "less than"},
        (["Use the letter {letter} less than 4 times."], ["The letter {letter} should appear fewer than 4 times."]),
    ),
    "ending": Kind(
        "startend:end_checker",
        one_of("end_phrase", ENDINGS),
        (
            ["Finish with exactly this phrase: {end_phrase}", "End your answer with: {end_phrase}"],
            ["The last words must be: {end_phrase}"],
        ),
    ),
    "quotation": Kind(
        "startend:quotation",
        nothing,
        (["Wrap your whole answer in double quotation marks."], ["Put double quotation marks around it all."]),
    ),
    "lowercase": Kind(
        "change_case:english_lowercase",
        nothing,
        (["Write in lowercase letters only.", "Use no capital letters."], ["All letters must be lowercase."]),
    ),
    "capitals": Kind(
        "change_case:english_capital",
        nothing,
        (["Write in capital letters only.", "USE CAPITAL LETTERS."], ["All letters must be capitals."]),
    ),
    "bullets": Kind(
        "detectable_format:number_bullet_lists",
        exactly("num_bullets", 2, 3),
        (
            ["Answer in exactly {num_bullets} bullet points, each a line that starts with *."],
            ["Give a list of exactly {num_bullets} points, each on a line that starts with *."],
        ),
    ),
    "title": Kind(
        "detectable_format:title",
        nothing,
        (["Give it a title in double angular brackets, as <<title>>."], ["Put a title before it, like <<title>>."]),
    ),
    "highlight": Kind(
        "detectable_format:number_highlighted_sections",
        exactly("num_highlights", 1, 2),
        (["Highlight at least {num_highlights} part of it, as *part*."], ["Mark {num_highlights} words as *word*."]),
    ),
    "placeholders": Kind(
        "detectable_content:number_placeholders",
        exactly("num_placeholders", 1, 2),
        (["Use at least {num_placeholders} placeholder in square brackets, as [name]."],
         ["It needs {num_placeholders} or more gaps in square brackets, as [name]."]),
    ),
    "postscript": Kind(
        "detectable_content:postscript",
        lambda _, __: {"postscript_marker": "P.S."},
        (["At the end add a postscript that starts with P.S."], ["Close with a postscript, beginning with P.S."]),
    ),
    "json": Kind(
        "detectable_format:json_format",
        nothing,
        (["Give the whole answer in JSON format."], ["The entire output should be JSON."]),
    ),
}  # fmt: skip
USUAL = ("words", "opening", "keyword", "sentences", "no_comma")  # which a model of 135 million parameters can learn
APART = [  # kinds of which an answer that follows one cannot follow the other, or hardly
    {"words", "more_words"}, {"lowercase", "capitals"}, {"lowercase", "opening"}, {"capitals", "opening"},
    {"sentences", "bullets"}, {"lowercase", "postscript"}, {"quotation", "opening"}, {"ending", "quotation"},
    {"ending", "capitals"}, {"ending", "lowercase"}, {"title", "opening"}, {"ending", "postscript"},
]  # fmt: skip
IFBENCH: dict[str, dict[str, Any]] = {  # kinds that short answers can follow, with their arguments
    "count:word_count_range": {"min_words": 15, "max_words": 30},
    "count:unique_word_count": {"N": 15},
    "count:conjunctions": {"small_n": 2},
    "count:numbers": {"N": 2},
    "count:pronouns": {"N": 3},
    "count:punctuation": {},
    "format:emoji": {},
    "format:newline": {},
    "format:no_whitespace": {},
    "format:parentheses": {},
    "format:quotes": {},
    "ratio:sentence_balance": {},
    "sentence:increment": {"small_n": 2},
    "sentence:keyword": {"word": "purple", "N": 1},
    "words:consonants": {},
    "words:no_consecutive": {},
    "words:repeats": {"small_n": 1},
    "words:vowel": {},
}


def names_of(topic: str) -> set[str]:
    """The words that name a topic: of wolves also wolf, of the sea also seas."""
    word = topic.removeprefix("the ")
    singular = [word.removesuffix(end) + new for end, new in PLURALS.items() if word.endswith(end)]
    return {word, *singular} if singular else {word, word + "s"}


def parse_kinds(task: str) -> tuple[str, ...]:
    """The kinds of `ifeval` or `ifeval:words,title`. Raises ValueError naming one that is unknown or comes twice."""
    _, colon, names = task.partition(":")
    kinds = tuple(name.strip() for name in names.split(",")) if colon else USUAL
    for name in kinds:
        if name not in KINDS or kinds.count(name) > 1:
            known = f"the kinds are {', '.join(KINDS)}"
            raise ValueError(f"--task {task}: {name!r} is unknown or comes twice{nearest(name, KINDS)}; {known}")
    return kinds


class Problems:
    """Prompts of these kinds. ValueError where if-verifiable is missing."""

    def __init__(self, kinds: Iterable[str]):
        if importlib.util.find_spec("if_verifiable") is None:
            raise ValueError(f"--task ifeval: {INSTALL}")
        self.mix = rg.Mix(dict.fromkeys(kinds, 1.0), {}, {}, None, HELD_OUT, "")
        self.num_levels: dict[str, int] = {}
        num = min(VERIFIERS, os.cpu_count() or 1)
        self.verifiers = Pool(f"{__name__}:make_verifier", (), num=num, limit=LIMIT, sealed=True)
        made = (self._example(place, f"held out {place}", 1) for place in range(2 * HELD_OUT))
        self.held_out = list({prompt_key(example): example for example in made}.values())[:HELD_OUT]

    def make(self, places: Sequence[int], seed: int, levels: dict[str, int]) -> list[Example]:
        """The examples at these places of a seed's order; there are no levels."""
        return [self._example(place, f"{seed} {place}", 0) for place in places]

    def _example(self, place: int, seed: str, side: int) -> Example:
        """An example of a side; kinds take turns."""
        rng, kinds = random.Random(seed), list(self.mix.weights)
        first = kinds[place % len(kinds)]
        others = [kind for kind in kinds if kind != first and {kind, first} not in APART]
        chosen = [first, rng.choice(others)] if others and rng.random() < PAIRS else [first]
        said, asked = [], []
        for name in chosen:
            arguments = KINDS[name].draw(rng, side)
            said.append(rng.choice(KINDS[name].wordings[side]).format(**arguments))
            asked.append([KINDS[name].verifier, arguments])
        ask, topic = rng.choice(ASKS[side]), rng.choice(TOPICS[side])
        category = first if len(chosen) == 1 else "two"
        prompt = " ".join([ask.format(topic), *said])
        return {"prompt": prompt, "category": category, "instructions": asked, "topic": topic}

    def followed(
        self, prompts: Sequence[str], completions: Sequence[str], instructions: Sequence[Any], **_: Any
    ) -> list[float]:
        """The share of its instructions that each completion follows, by the strict verifiers."""
        questions = [list(row) for row in zip(instructions, prompts, completions, strict=True)]
        return [rg.earned(answer) for answer in self.verifiers.ask(questions)]

    def on_topic(self, completions: Sequence[str], topic: Sequence[str], **_: Any) -> list[float]:
        """1 for a completion that names the topic that its prompt asks about, else 0."""
        words = [set(form.words_of(text)) for text in completions]
        return [float(bool(its & names_of(one))) for its, one in zip(words, topic, strict=True)]

    def followed_all(self, **columns: Any) -> list[float]:
        """1 for a completion that follows all of its instructions, else 0."""
        return [float(share >= 1) for share in self.followed(**columns)]


class OtherKinds(Problems):
    """IFBench's kinds on held-out topics, to evaluate with."""

    def __init__(self) -> None:
        super().__init__(IFBENCH)

    def _example(self, place: int, seed: str, side: int) -> Example:
        rng, names = random.Random(f"ifbench {seed}"), list(IFBENCH)
        name = names[place % len(names)]
        ask, topic = rng.choice(ASKS[1]), rng.choice(TOPICS[1])
        prompt = f"{ask.format(topic)} {self._wording(name)}"
        return {"prompt": prompt, "category": name, "instructions": [[name, IFBENCH[name]]], "topic": topic}

    def _wording(self, name: str) -> str:
        """The benchmark's own words."""
        answer = self.verifiers.ask([[[[name, IFBENCH[name]]], None, ""]])[0]
        assert not answer.error, answer.error
        return str(answer.value)


# ---- in a worker


def make_verifier() -> Callable[[tuple[list[tuple[str, dict[str, Any]]], str | None, str]], Any]:
    """
    What a sealed worker does: of instructions, a prompt and a completion the share that is followed; without a prompt
    the benchmark's words for the first instruction.
    """
    spec = importlib.util.find_spec("if_verifiable")
    assert spec is not None and spec.submodule_search_locations is not None
    bare = types.ModuleType("if_verifiable")  # in place of its __init__, which imports what downloads prompts: 120 MB
    bare.__path__ = list(spec.submodule_search_locations)
    sys.modules["if_verifiable"] = bare
    import nltk

    nltk.download = lambda *_, **__: False  # which ifbench would call: nothing is fetched here
    import langdetect
    from if_verifiable.common import evaluate_instructions
    from if_verifiable.ifbench import instructions_registry as ifbench
    from if_verifiable.ifeval import instructions_registry as ifeval
    from if_verifiable.ifeval import instructions_util

    instructions_util.count_sentences = lambda text: len(instructions_util.split_into_sentences(text))
    langdetect.DetectorFactory.seed = 0  # else it guesses
    langdetect.detect("It reads its profiles once.")
    registry = ifeval.INSTRUCTION_DICT | ifbench.INSTRUCTION_DICT

    def verify(question: tuple[list[tuple[str, dict[str, Any]]], str | None, str]) -> Any:
        instructions, prompt, text = question
        names, arguments = [name for name, _ in instructions], [whole_words(given) for _, given in instructions]
        if prompt is None:
            return registry[names[0]](names[0]).build_description(**arguments[0])
        return evaluate_instructions(text, names, arguments, prompt, registry)[1].partial_strict

    return verify


def whole_words(arguments: dict[str, Any]) -> dict[str, Any]:
    """The arguments with words as patterns: to the verifiers "honesty" has the word "honest", and _honest_ has not."""
    patterns = {
        "keywords": [rf"\b_*{word}_*\b" for word in arguments.get("keywords", [])],
        "keyword": rf"\b_*{arguments.get('keyword')}_*\b",
        "forbidden_words": [f"_*{word}_*" for word in arguments.get("forbidden_words", [])],
    }
    return arguments | {name: pattern for name, pattern in patterns.items() if name in arguments}
