"""
Recognizes units of measure, and reads texts such as "m/s^2" or "square metres per hour".

Units are compared by name, so "m" equals "metres", but 1,000 m does not equal 1 km. This file does
not cover the conversion of units.
"""

import functools
import re
from typing import NamedTuple

# Each line contains the name of a unit, its symbols and its other names. Units with a star take the
# prefixes in `_PREFIXES`. Plurals need no entry. A spelling that is in several lines may mean any
# of the units that these lines name.
_SPELLINGS = """
*metre: m, meter
*gram: g, gramme, gm
*second: s, sec
*litre: L, l, liter, ltr
*newton: N
*volt: V
*watt: W
*joule: J
*ampere: A, amp
*pascal: Pa
*hertz: Hz
*ohm: \u03a9, \u2126, \\Omega
*farad: F
*henry: H
*tesla: T
*coulomb: C
*mole: mol
*calorie: cal
*electronvolt: eV, electron volt
*byte:
*bit:
kilobyte: KB, kB
megabyte: MB
gigabyte: GB
terabyte: TB
micrometre: micron
kilogram: kilo
kelvin: K
celsius: \u00b0C, degree celsius, degree C, deg C, C, centigrade, degree centigrade, degree, \
\u00b0, deg
fahrenheit: \u00b0F, degree fahrenheit, degree F, deg F, F, degree, \u00b0, deg
degree of angle: degree, \u00b0, deg
minute of angle: arcminute, '
second of angle: arcsecond, "
radian: rad
percent: %, per cent, pct, percentage
per mille: \u2030, permille
percentage point:
minute: min
hour: h, hr
day: d
week: wk
month: mo
year: yr
decade:
century: centuries
inch: in, ", inches
foot: ft, feet, '
yard: yd
mile: mi
nautical mile: nmi
light year: ly, lightyear, light-year
astronomical unit: AU
acre: ac
hectare: ha
pound of mass: lb, pound, lbm
ounce of mass: oz, ounce
fluid ounce: fl oz, oz, ounce
stone:
ton: ton
tonne: t, tonne, metric ton, ton
short ton:
long ton:
carat: ct
pint: pt
quart: qt
gallon: gal
cup:
teaspoon: tsp
tablespoon: tbsp
barrel: bbl
bar:
atmosphere: atm
horsepower: hp
decibel: dB
lumen: lm
lux: lx
candela: cd
becquerel: Bq
knot: kn, kt
dozen:
revolution: rev
dollar: $, USD, US$, buck
cent: \u00a2, ct
euro: \u20ac, EUR
pound sterling: \u00a3, GBP, pound, quid
pence: penny, pennies
rupee: \u20b9, INR, Rs, Rs.
yen: \u00a5, JPY
yuan: \u00a5, CNY, RMB
ruble: \u20bd, RUB, rouble
won: \u20a9, KRW
franc: CHF
peso: MXN
"""
_PREFIXES = {
    "nano": "n",
    "micro": "\u03bc u \u00b5 \\mu",
    "milli": "m",
    "centi": "c",
    "deci": "d",
    "hecto": "h",
    "kilo": "k",
    "mega": "M",
    "giga": "G",
    "tera": "T",
}
_COMPOUNDS = {  # compound units that are spelled as one word
    "mph": "mile/hour",
    "kph": "kilometre/hour",
    "kmh": "kilometre/hour",
    "kmph": "kilometre/hour",
    "mps": "metre/second",
    "rpm": "revolution/minute",
    "kWh": "kilowatt hour",
    "Wh": "watt hour",
    "MWh": "megawatt hour",
    "GWh": "gigawatt hour",
    "mAh": "milliampere hour",
    "Ah": "ampere hour",
    "Nm": "newton metre",
    "cc": "centimetre^3",
    "sqm": "metre^2",
    "sqft": "foot^2",
}
_POWERS = {"square": 2, "sq": 2, "sq.": 2, "cubic": 3, "cu": 3, "cu.": 3}
_POWERS_BEHIND = {"squared": 2, "cubed": 3, "square": 2, "cube": 3}

PossibleUnits = frozenset[str]  # the names of all units that one spelling may mean


class UnitsAndWords(NamedTuple):
    """
    The units after a number, each with its power, and the words after the units.

    For example, the units in m/s^2 are metre to the power 1 and second to the power -2.
    """

    powers: tuple[tuple[PossibleUnits, int], ...]
    words: tuple[str, ...]

    def __bool__(self) -> bool:
        return bool(self.powers or self.words)


def _make_unit_table() -> dict[str, PossibleUnits]:
    table: dict[str, set[str]] = {}
    for line in _SPELLINGS.strip().splitlines():
        name, _, joined_spellings = line.partition(":")
        takes_prefixes = name.startswith("*")
        name = name.lstrip("*")
        spellings = [
            spelling.strip() for spelling in joined_spellings.split(",") if spelling.strip()
        ]
        for spelling in [name, *spellings]:
            table.setdefault(spelling, set()).add(name)
        if not takes_prefixes:
            continue
        for prefix, symbols in _PREFIXES.items():
            for spelling in [name, *spellings]:
                is_symbol = len(spelling) <= 2 or spelling in ("mol", "cal", "\\Omega")
                prefix_spellings = symbols.split() if is_symbol else [prefix]
                for prefix_spelling in prefix_spellings:
                    table.setdefault(prefix_spelling + spelling, set()).add(prefix + name)

    return {spelling: frozenset(names) for spelling, names in table.items()}


_TABLE = _make_unit_table()
_FOLDED: dict[str, PossibleUnits] = {}
for _spelling, _names in _TABLE.items():
    _FOLDED[_spelling.casefold()] = _FOLDED.get(_spelling.casefold(), frozenset()) | _names


@functools.lru_cache(maxsize=2**12)
def possible_units_of_spelling(word: str) -> PossibleUnits | None:
    """
    The names of the units that a word may mean; None if it means no unit.

    The plural of a word means the same units. The case of letters matters where it distinguishes
    units, as in mW and MW.
    """
    for table, spelling in ((_TABLE, word), (_FOLDED, word.casefold())):
        singulars = [spelling]
        if len(spelling) > 2 and spelling.endswith(("s", "S")):
            singulars.append(spelling[:-1])
        if len(spelling) > 4 and spelling.endswith(("es", "ES")):
            singulars.append(spelling[:-2])
        for singular in singulars:
            if singular in table:
                return table[singular]
    return None


_TOKEN = re.compile(
    r"\s*(\\?[^\W\d_]+\.?|\u00b0[CF](?![A-Za-z])|"
    r"[%\u2030\u00b0$\u20ac\u00a3\u00a2\u20b9\u00a5\u20bd\u20a9'\"/*()-]|"
    r"\^ ?[-+]?[0-9](?![0-9]))"
)


def read_units_and_words(text_after_number: str, currency_sign: str | None = None) -> UnitsAndWords:
    """
    The units at the beginning of the text after a number, and the words after the units.

    A slash or "per" means division by the next unit, or by all units in the next bracket. The words
    "square" and "cubic" raise the next unit to a power.
    currency_sign: the currency sign before the number, if any.
    """
    reader = _UnitReader(_read_leading_tokens(text_after_number))
    if currency_sign:
        currency = possible_units_of_spelling(currency_sign) or frozenset([currency_sign])
        reader.multiply_by_unit(currency, 1)
    while reader.read_operator() or reader.read_unit():
        pass
    powers = tuple((unit, power) for unit, power in reader.powers.items() if power)
    words = tuple(
        _singular(token.casefold()) for token in reader.remaining_tokens if token[0].isalpha()
    )
    return UnitsAndWords(powers, words)


class _UnitReader:
    """A reader that goes through tokens and collects the units with their powers."""

    def __init__(self, tokens: list[str]):
        self.tokens = tokens
        self.place = 0
        self.powers: dict[PossibleUnits, int] = {}
        self.is_divided = False  # whether the next unit is a divisor
        self.is_in_divisor = False  # whether the next unit is in a bracket that is a divisor
        self.power = 1  # the power of the next unit

    @property
    def remaining_tokens(self) -> list[str]:
        return self.tokens[self.place :]

    def multiply_by_unit(self, unit: PossibleUnits, power: int) -> None:
        self.powers[unit] = self.powers.get(unit, 0) + power

    def read_operator(self) -> bool:
        """
        Reads the next token if it changes or joins units, as "/", "per", "*" and "square" do.

        If the token does neither, returns False and leaves the token unread.
        """
        if not self.remaining_tokens:
            return False
        word = self.remaining_tokens[0].casefold()
        has_unit_behind = _unit_and_num_tokens_at(self.tokens, self.place + 1)[0] is not None
        if self._is_division_word(word):
            self.is_divided = True
        elif word == "(" and self.is_divided:
            self.is_in_divisor = True
        elif word == ")" and self.is_in_divisor:
            self.is_divided = self.is_in_divisor = False
        elif word in _POWERS and has_unit_behind:
            self.power = _POWERS[word]
        elif not (word in ("*", "-") and self.powers and has_unit_behind):
            return False
        self.place += 1
        return True

    def _is_division_word(self, word: str) -> bool:
        if len(self.remaining_tokens) < 2:
            return False
        if word in ("a", "an"):  # miles an hour
            return bool(self.powers) and _is_time_unit_at(self.tokens, self.place + 1)
        is_per_cent = _unit_and_num_tokens_at(self.tokens, self.place)[0] is not None
        return word == "/" or (word == "per" and not is_per_cent)

    def read_unit(self) -> bool:
        """
        Reads the next unit and its power. Returns False if the units end here.

        An unknown word after "per", as in "5 m per lap", is read as the last unit.
        """
        if not self.remaining_tokens:
            return False
        unit, num_tokens = _unit_and_num_tokens_at(self.tokens, self.place)
        if unit is None:
            if self.is_divided and self.remaining_tokens[0][0].isalpha():  # as in 5 m per lap
                self.multiply_by_unit(
                    frozenset([_singular(self.remaining_tokens[0].casefold())]), -1
                )
                self.place += 1
            return False
        self.place += num_tokens
        exponent, num_tokens = _power_and_num_tokens_at(self.tokens, self.place)
        self.place += num_tokens
        sign = -1 if self.is_divided else 1
        for name, inner_power in _units_and_powers_in(unit):
            self.multiply_by_unit(name, sign * self.power * exponent * inner_power)
        self.power = 1
        self.is_divided = self.is_in_divisor
        return True


def _read_leading_tokens(text: str) -> list[str]:
    """
    The words and signs at the beginning of a text, as a list of tokens.

    The list ends before the first character that belongs to no word or sign, or before the full
    stop of a sentence.
    """
    tokens = []
    place = 0
    while match := _TOKEN.match(text, place):
        token = match[1]
        place = match.end()
        if token.endswith("."):
            is_last = (
                possible_units_of_spelling(token[:-1]) is None and token.casefold() not in _POWERS
            )
            tokens.append(token[:-1] if token.casefold() not in _POWERS else token)
            if is_last:
                break
            continue
        tokens.append(token)
    return tokens


def _unit_and_num_tokens_at(
    tokens: list[str], index: int
) -> tuple[str | PossibleUnits | None, int]:
    """
    The unit that begins at a token, and the number of tokens that spell the unit.

    A compound unit such as "mph" is returned as its spelling. Any other unit is returned as the set
    of unit names that its spelling may mean. The result is None and 0 if no unit begins at the
    token.
    """
    for num in (2, 1):
        if index + num > len(tokens):
            continue
        *first_words, last_word = tokens[index : index + num]
        spelling = " ".join([*map(_singular, first_words), last_word])
        if (
            num == 1
            and spelling.casefold() == "in"
            and _is_in_a_preposition_not_inch(tokens, index)
        ):
            return None, 0
        compound = spelling if spelling in _COMPOUNDS else spelling.casefold()
        if compound in _COMPOUNDS:
            return compound, num
        unit = possible_units_of_spelling(spelling)
        if unit:
            return unit, num
    return None, 0


def _is_in_a_preposition_not_inch(tokens: list[str], index: int) -> bool:
    """
    Whether the token "in" is a preposition before a word, as in "42 in total".

    Before "per" or "squared", the token "in" means inch.
    """
    following = tokens[index + 1 : index + 2]
    if not following or following[0] in {"per", *_POWERS_BEHIND}:
        return False
    return following[0][0].isalpha()


def _is_time_unit_at(tokens: list[str], index: int) -> bool:
    unit, _ = _unit_and_num_tokens_at(tokens, index)
    times = {"second", "minute", "hour", "day", "week", "month", "year"}
    return isinstance(unit, frozenset) and bool(unit & times)


def _power_and_num_tokens_at(tokens: list[str], index: int) -> tuple[int, int]:
    """The power that begins at a token, and its number of tokens; (1, 0) if there is no power."""
    if index >= len(tokens):
        return 1, 0
    token = tokens[index]
    if token.startswith("^"):
        return int(token[1:]), 1
    if token.casefold() in _POWERS_BEHIND and _unit_and_num_tokens_at(tokens, index + 1)[0] is None:
        return _POWERS_BEHIND[token.casefold()], 1
    return 1, 0


def _units_and_powers_in(unit: str | PossibleUnits) -> list[tuple[PossibleUnits, int]]:
    if not isinstance(unit, str):
        return [(unit, 1)]
    parts = []
    for part in re.findall(r"/?[a-z]+(?:\^3|\^2)?", _COMPOUNDS[unit]):
        name, _, exponent = part.lstrip("/").partition("^")
        sign = -1 if part.startswith("/") else 1
        parts.append((_TABLE[name], sign * int(exponent or 1)))
    return parts


def _singular(word: str) -> str:
    return word[:-1] if len(word) > 3 and word.endswith("s") else word


def units_and_words_agree(right: UnitsAndWords, stated: UnitsAndWords) -> bool:
    """
    Whether the units and words after two numbers agree.

    They also agree if one of the numbers has neither units nor words.

    The stated words must begin with the words of the right answer: if "3 apples" is right, then
    "3 apples left" is right too, and "3 pears" is wrong.
    """
    if not right or not stated:
        return True
    if len(right.powers) != len(stated.powers):
        return False
    stated_powers = list(stated.powers)
    for unit, power in right.powers:
        matches = [pair for pair in stated_powers if pair[1] == power and pair[0] & unit]
        if not matches:
            return False
        stated_powers.remove(matches[0])
    if right.powers and not stated.words:
        return True
    return stated.words[: len(right.words)] == right.words
