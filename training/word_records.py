"""Records about words in general, made of WordNet: what a text describes, which kind or field it belongs to, opposites.

They widen what the model knows beyond our own phrases. Every answer follows from WordNet's own relations.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from clef_core.schema import Json
from training.examples import Asked, Example, choice, example_of, noul, wrapped
from training.wordnet import Sense, WordNet

WHICH_WORD = (
    "Which word is described?", "What is meant?", "Which word fits the text?", "What does the text describe?",
    "Choose the word with this meaning.", None,
)  # fmt: skip
WHICH_KIND = (
    "What kind of thing is it?", "To which group does it belong?", "What is the text about?", "Which category fits?",
    "Sort the text into a category.", None,
)  # fmt: skip
WHICH_FIELD = (
    "Which field is the text about?", "Which topic does the text belong to?", "What is the subject?",
    "Choose the theme of the text.", "What is the text about?", "Which section fits?", None,
)  # fmt: skip
ABOUT = (
    ("Is the text about {}?", True), ("Does it describe {}?", True), ("Is this about {}?", True),
    ("The topic is {}.", True), ("Does the text deal with {}?", True), ("Is it about something else than {}?", False),
)  # fmt: skip
STATED = (
    ("The {noun} is {word}.", "Is the {noun} {word}?", "It is said that the {noun} is {word}."),
    ("Our {noun} was {word}.", "Was the {noun} {word}?", "The text says that the {noun} was {word}."),
    ("I think that the {noun} looks {word}.", "Does the {noun} look {word}?", "The {noun} looks {word}."),
    ("We found a {word} {noun}.", "Is the {noun} {word}?", "Was the {noun} {word}?"),
    ("They have a very {word} {noun}.", "Is their {noun} {word}?", "Do they have a {word} {noun}?"),
)  # fmt: skip
DENIED = ("The {noun} is not {word}.", "The {noun} is no longer {word}.", "Nobody can say that the {noun} is {word}.",
          "The {noun} isn't {word} at all.")  # fmt: skip
COMPARED = (
    ("Are there more than {} {noun}s?", 1), ("Is the number of {noun}s above {}?", 1),
    ("Are there fewer than {} {noun}s?", -1), ("Are there less than {} {noun}s?", -1),
)  # fmt: skip
COUNTED = ("There are {} {noun}s.", "We have {} {noun}s.", "I ordered {} {noun}s.", "They counted {} {noun}s.")


@dataclass(frozen=True)
class Described:
    """A text, a question about it, and the right answer among words."""

    text: str
    instructions: str | None
    word: str


class WordRecords:
    """Draws examples from WordNet; `rng` is shared with whoever draws the others."""

    def __init__(self, wordnet: WordNet, rng: random.Random) -> None:
        self.wordnet = wordnet
        self.rng = rng
        self.nouns = tuple(sense.words[0] for sense in wordnet.senses if sense.is_concrete)
        self._in_fields = [sense for senses in wordnet.fields.values() for sense in senses]
        self._with_kinds = [sense for sense in wordnet.senses if sense.kinds]

    def described(self) -> Described:
        """What a summary is held against: a word, a kind or a field."""
        rng = self.rng
        share = rng.random()
        if share < 0.5:
            sense = rng.choice(self.wordnet.senses)
            return Described(self._text(sense, 0.15), rng.choice(WHICH_WORD), sense.words[0])
        if share < 0.75:
            sense = rng.choice(self._with_kinds)
            return Described(self._text(sense, 0.3), rng.choice(WHICH_KIND), rng.choice(sense.kinds))
        sense = rng.choice(self._in_fields)
        return Described(self._text(sense, 0.4), rng.choice(WHICH_FIELD), str(sense.field))

    def other_words(self, num: int) -> list[str]:
        """Words, kinds and fields that nothing is known of."""
        rng = self.rng
        words = [sense.words[0] for sense in rng.choices(self.wordnet.senses, k=num // 2)]
        return [*words, *rng.choices(self.wordnet.kinds, k=num - len(words))]

    def word(self, max_options: int) -> Example:
        """The word with a meaning, or the meaning of a word in use."""
        rng = self.rng
        sense, *others = rng.choices(self.wordnet.senses, k=rng.randint(2, max(2, max_options)))
        ids = {one.words[0]: one for one in (sense, *others)}
        descriptions = {id: one.gloss for id, one in ids.items()} if len(ids) < 8 and rng.random() < 0.25 else {}
        text = rng.choice(sense.examples or (sense.gloss,)) if descriptions else self._text(sense, 0.15)
        return self._among(text, sense.words[0], list(ids), rng.choice(WHICH_WORD), descriptions)

    def kind(self, max_options: int) -> Example:
        rng = self.rng
        sense = rng.choice(self._with_kinds)
        others = [kind for kind in rng.choices(self.wordnet.kinds, k=min(max_options, 12)) if kind not in sense.kinds]
        text = self._text(sense, 0.3)
        return self._among(text, rng.choice(sense.kinds), others, rng.choice(WHICH_KIND), {})

    def field(self, max_options: int) -> Example:
        rng = self.rng
        field = rng.choice(list(self.wordnet.fields))
        others = [one for one in rng.choices(list(self.wordnet.fields), k=min(max_options, 16)) if one != field]
        sense = rng.choice(self.wordnet.fields[field])
        return self._among(self._text(sense, 0.4), field, others, rng.choice(WHICH_FIELD), {})

    def about(self, _: int) -> Example:
        """One to three statements about what a text is about."""
        rng = self.rng
        asked = {}
        sense = rng.choice(self._in_fields if rng.random() < 0.5 else self._with_kinds)
        rights = [sense.field] if sense.field is not None else list(sense.kinds)
        for number in range(rng.choice((1, 1, 2, 3))):
            is_so = rng.random() < 0.5
            other = rng.choice(list(self.wordnet.fields) if sense.field is not None else self.wordnet.kinds)
            name = rng.choice(rights) if is_so else other
            template, is_plain = rng.choice(ABOUT)
            asked[f"about{number or ''}"] = noul(template.format(name), is_true=(name in rights) == is_plain)
        return example_of(wrapped(self._text(sense, 0.4), rng), asked, rng)

    def stated(self, _: int) -> Example:
        """One to three stated things with their properties or numbers, and one to three questions about them."""
        rng = self.rng
        nouns = rng.sample(self.nouns, rng.choice((1, 1, 2, 3)))
        sentences, questions = zip(*(self._count(n) if rng.random() < 0.2 else self._state(n) for n in nouns),
                                   strict=True)  # fmt: skip
        kinds: Sequence[Callable[[], Asked]] = questions
        asked = {f"q{number}": rng.choice(kinds)() for number in range(1, rng.choice((2, 2, 3, 4)))}
        return example_of(wrapped(" ".join(sentences), rng), asked, rng)

    def _state(self, noun: str) -> tuple[str, Callable[[], Asked]]:
        rng = self.rng
        pair = rng.choice(self.wordnet.opposites)
        word, opposite = rng.sample(pair, 2)
        statement, *questions = rng.choice(STATED)
        is_denied = rng.random() < 0.3
        text = (rng.choice(DENIED) if is_denied else statement).format(noun=noun, word=word)

        def ask() -> Asked:
            asks_word = is_denied or rng.random() < 0.5
            question = rng.choice(questions).format(noun=noun, word=word if asks_word else opposite)
            return noul(question, is_true=asks_word and not is_denied)

        return text, ask

    def _count(self, noun: str) -> tuple[str, Callable[[], Asked]]:
        rng = self.rng
        number = rng.randrange(2, 100)

        def ask() -> Asked:
            question, sign = rng.choice(COMPARED)
            limit = rng.choice([one for one in (5, 10, 20, 50, 80) if one != number])
            return noul(question.format(limit, noun=noun), is_true=(number - limit) * sign > 0)

        return rng.choice(COUNTED).format(number, noun=noun), ask

    def _text(self, sense: Sense, example_share: float) -> str:
        return self.rng.choice(sense.examples) if sense.examples and self.rng.random() < example_share else sense.gloss

    def _among(self, text: str, right: str, names: Sequence[str], instructions: str | None,
               descriptions: dict[str, str]) -> Example:  # fmt: skip
        others = [name for name in dict.fromkeys(names) if name != right] or ["nothing of the kind"]
        asked = choice(right, others, descriptions, instructions, self.rng)
        state: Json = wrapped(text, self.rng)
        return example_of(state, {self.rng.choice(("word", "category", "topic", "q1")): asked}, self.rng)
