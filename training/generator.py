"""Records in Clef's format, drawn from our phrases and from the intent data: an endless stream that a seed decides.

Each record is consistent by construction: a message is put together from sentences whose meaning is known (what it is
about, how urgent, in which mood, what it states), and only such questions are asked whose answer follows from them.
"""

import random
from collections.abc import Callable, Mapping, Sequence

from clef_core.schema import Json
from clef_core.tasks import INTENT, INTENT_INSTRUCTIONS, OUT_OF_SCOPE, humanise
from training.examples import Asked, Example, choice, example_of, noul, wrapped
from training.intents import IntentData
from training.object_records import object_record
from training.phrases import fill, load
from training.word_records import WordRecords
from training.wordnet import WordNet

WHICH_INTENT = (
    INTENT_INSTRUCTIONS, INTENT_INSTRUCTIONS, "What does the writer want?", "What is the request?", None,
    "Which intent fits the message?", "Classify the message.", "What is this message about?",
)  # fmt: skip
WHICH_TEAM = (
    "Which team should handle the message?", "Who should deal with this?", "Which department is responsible?",
    "Where should the message be sent?", "Who can help the writer?", "Route the message.", None,
)  # fmt: skip
WHICH_TOPIC = (
    "What is the text about?", "Which topic does the text belong to?", "What is the subject?", "Which section fits?",
    "Choose the theme of the text.", None,
)  # fmt: skip
WHICH_MOOD = (
    "What is the mood of the text?", "How does the writer feel?", "Which sentiment does the message express?",
    "Is the review good or bad?", "What is the tone?", None,
)  # fmt: skip
HOW_URGENT = (
    "How urgent is this?", "How soon must somebody answer?", "How quickly must we act?", "When should this be done?",
    None, "Rate the urgency.", "What priority does the message have?",
)  # fmt: skip
URGENCY_SCALES = (
    ("Can wait", "This week", "Today"), ("Not urgent", "Soon", "Urgent"), ("Low", "Medium", "High"),
    ("No hurry", "Within a few days", "At once"), ("Some time", "In the next days", "Immediately"),
    ("Low priority", "Normal priority", "Emergency"), ("Later", "Before the weekend", "Now"),
)  # fmt: skip
MOOD_WORDS = (
    {"positive": "The writer is happy", "neutral": "No feeling is shown", "negative": "The writer is unhappy"},
    {"positive": "Praise", "neutral": "Only facts", "negative": "Complaint"},
    {"positive": "Pleased or thankful", "neutral": "Plain information", "negative": "Annoyed or disappointed"},
    {"positive": "good", "neutral": "neither good nor bad", "negative": "bad"},
)
MOOD_SCALES = (("Negative", "Neutral", "Positive"), ("Unhappy", "Neither", "Happy"), ("Bad", "Neutral", "Good"))
IDS = {"team": ("department", "team", "route", "q1"), "urgency": ("urgency", "priority", "urgent", "q2"),
       "mood": ("mood", "sentiment", "tone", "q3"), "topic": ("topic", "subject", "theme", "q4"),
       "fact": ("answer", "check", "fact", "q5"), "outage": ("outage", "down", "q6")}  # fmt: skip


STATEMENTS = (
    ("Is the message about {}?", True), ("Does the writer ask about {}?", True), ("The topic is {}.", True),
    ("Is the message about {}?", True), ("Is the message about something else than {}?", False),
)  # fmt: skip


URGENT = (
    ("Is it urgent?", True), ("Must we act at once?", True), ("Is this an emergency?", True),
    ("Should somebody look at this today?", True), ("Can it wait?", False), ("Is there plenty of time?", False),
)  # fmt: skip
PLEASED = (
    ("Is the writer happy?", "positive"), ("Is it praise?", "positive"), ("Does the writer like it?", "positive"),
    ("Is the writer unhappy?", "negative"), ("Is it a complaint?", "negative"), ("Is the text negative?", "negative"),
    ("Is the review positive?", "positive"), ("Is the customer annoyed?", "negative"),
)  # fmt: skip
FELT = ("The {subject} was {adjective}.", "I found the {subject} {adjective}.", "The {subject} is {adjective}!",
        "{subject} {adjective}, {subject2} {adjective2}.", "I {verb} the {subject}.", "We {verb} this {subject}.",
        "Honestly, the {subject} was {adjective} and the {subject2} {adjective2}.", "The {subject}: {adjective}.",
        "My sister says the {subject} is {adjective}.", "All of us {verb} the {subject}.")  # fmt: skip
URGENT_TEAMS = ("emergency", "security", "police", "fraud", "guards", "operations", "vet", "electricians")
"""Teams whose messages are urgent by themselves."""

OUT_OF_SCOPE_SHARE = 0.12
"""Texts of no intent among those of a data set that has such: more than its training split's, as in real use."""


class Generator:
    """Draws examples. `max_options` bounds the options of a choice; training lets it grow."""

    def __init__(self, intent_data: Sequence[IntentData], wordnet: WordNet, seed: int | str) -> None:
        self.intent_data = intent_data
        self.rng = random.Random(seed)
        self.words = WordRecords(wordnet, self.rng)
        self._unrelated = {data.name: [row for row in data.train if row[1] == OUT_OF_SCOPE] for data in intent_data}

    def draw(self, max_options: int, own_share: float) -> Example:
        """One record: with `own_share` of a kind of our own, else an intent of the data sets."""
        return self.draw_own(max_options) if self.rng.random() < own_share else self.intent(max_options)

    def draw_own(self, max_options: int) -> Example:
        kinds: dict[Callable[[int], Example], float] = {
            self.intent_statement: 1.5, self.support: 2.6, self.organisation: 1.6, self.topic: 1.4, self.mood: 1.8,
            self.urgency: 1.6, self.fact: 2.8, self.object: 1.0, self.words.word: 0.8, self.words.kind: 1.0,
            self.words.field: 1.2, self.words.about: 1.2, self.words.stated: 1.8,
        }  # fmt: skip
        (kind,) = self.rng.choices(list(kinds), list(kinds.values()))
        return kind(max_options)

    def intent(self, max_options: int) -> Example:
        data = self.intent_source()
        return self.intent_among(data, self.intent_row(data), self.rng.randint(2, max(2, max_options)))

    def intent_source(self) -> IntentData:
        """A data set, the more often the more labels it has."""
        (data,) = self.rng.choices(self.intent_data, [len(data.labels) for data in self.intent_data])
        return data

    def intent_row(self, data: IntentData) -> tuple[str, str]:
        """A text of its training split with its label, or a question of ours that has none of its intents."""
        rng = self.rng
        if not self._unrelated[data.name] or rng.random() >= OUT_OF_SCOPE_SHARE:
            return rng.choice(data.train)
        if rng.random() < 0.6:
            return rng.choice(self._unrelated[data.name])
        first, second = rng.sample(self.words.nouns, 2)
        return fill(rng.choice(load("unrelated")), rng, {"noun": first, "noun2": second}), OUT_OF_SCOPE

    def intent_among(self, data: IntentData, row: tuple[str, str], num_options: int) -> Example:
        """The label of a text among drawn others; with every label shown, the benchmark's own question."""
        text, label = row
        others = [other for other in data.labels if other != label]
        if num_options < len(data.labels):
            others = self.rng.sample(others, num_options - 1)
        if num_options >= len(data.labels) or self.rng.random() < 0.5:
            criteria: dict[str, Json] = {name: humanise(name) for name in (label, *others)}
            asked = Asked({"type": "choice", "instructions": INTENT_INSTRUCTIONS, "criteria": criteria}, label)
            return example_of(text, {INTENT: asked}, self.rng, pool=(data.name, label))
        asked = choice(label, others, {}, self.rng.choice(WHICH_INTENT), self.rng)
        return example_of(wrapped(text, self.rng), {INTENT: asked}, self.rng, pool=(data.name, label))

    def intent_statement(self, _: int) -> Example:
        """One to three statements about what a message is about; at most one of the labels is right."""
        rng = self.rng
        data = rng.choice(self.intent_data)
        text, label = rng.choice(data.train)
        named = rng.sample([other for other in data.labels if other != label], rng.choice((1, 1, 2, 3)))
        if rng.random() < 0.6:
            named[rng.randrange(len(named))] = label
        asked = {}
        for number, name in enumerate(named):
            template, is_plain = rng.choice(STATEMENTS)
            asked[f"{self._id('fact')}{number or ''}"] = noul(
                template.format(humanise(name)), is_true=(name == label) == is_plain
            )
        return example_of(wrapped(text, rng), asked, rng)

    def support(self, max_options: int) -> Example:
        """A message to a company, with one to four questions."""
        rng = self.rng
        intents = load("intents")
        asks_outage = rng.random() < 0.4
        name = "report_outage" if asks_outage and rng.random() < 0.5 else rng.choice(list(intents))
        intent = intents[name]
        words: dict[str, str] = {}
        parts = [fill(rng.choice(intent["sentences"]), rng, words)]
        urgency, mood = intent["urgency"], intent["mood"]
        if urgency < 2 and rng.random() < 0.5:
            urgency = rng.randrange(3)
            parts.append(self._deadline(urgency))
        elif urgency == 2 and rng.random() < 0.4:
            parts.append(rng.choice(load("urgency")["2"]))
        if mood == "negative" and rng.random() < 0.3:
            parts.append(fill(rng.choice(load("moods")["negative"]), rng, words))
        if rng.random() < 0.2:
            parts.insert(0, rng.choice(("Hello,", "Hi,", "Dear team,", "Good morning.")))
        asked = {
            self._id("team"): self._team(intent["department"], max_options),
            self._id("urgency"): self._urgency(urgency),
            "intent": self._support_intent(name, max_options),
        }
        kept = {id: asked[id] for id in rng.sample(list(asked), rng.choice((1, 1, 2, 3)))}
        if rng.random() < 0.15:
            kept["is_urgent"] = self._is_urgent(urgency) if urgency != 1 else self._urgency(urgency)
        if asks_outage:
            question = rng.choice(load("facts")[0]["questions"])
            kept[self._id("outage")] = noul(question, is_true=name == "report_outage")
        return example_of(wrapped(" ".join(parts), rng), kept, rng)

    def organisation(self, max_options: int) -> Example:
        """A message to a zoo, a school or the like, and which of its teams should see to it."""
        rng = self.rng
        organisations: Mapping[str, Mapping[str, tuple[str, Sequence[str]]]] = load("organisations")
        name = rng.choice(list(organisations))
        teams = {team: value[0] for team, value in organisations[name].items()}
        others = {
            team: value[0]
            for one in rng.sample(list(organisations), 3) if one != name
            for team, value in organisations[one].items() if rng.random() < 0.3 and team not in teams
        }  # fmt: skip
        right = rng.choice(list(teams))
        names = [team for team in teams if team != right]
        wrong = rng.sample(names, rng.randint(1, min(len(names), max(1, max_options - 1))))
        if max_options > 8 and rng.random() < 0.4:
            wrong += others
        text = rng.choice(organisations[name][right][1])
        if rng.random() < 0.3:
            urgency = 2 if right in URGENT_TEAMS else rng.randrange(3)
            asked = {self._id("urgency"): self._urgency(urgency)}
            text = f"{text} {self._deadline(urgency)}"
        else:
            asked = {}
        asked[self._id("team")] = choice(right, wrong, {**teams, **others}, rng.choice(WHICH_TEAM), rng)
        if rng.random() < 0.2:
            named = rng.choice([right, rng.choice(names)])
            asked["is_for"] = noul(f"Is this for the team {humanise(named)}?", is_true=named == right)
        return example_of(wrapped(text, rng), asked, rng)

    def topic(self, max_options: int) -> Example:
        rng = self.rng
        topics = load("topics")
        right = rng.choice(list(topics))
        others = rng.sample([topic for topic in topics if topic != right], rng.randint(1, min(max_options, 12) - 1))
        sentences = rng.sample(topics[right]["sentences"], rng.choice((1, 1, 2)))
        descriptions = {name: rng.choice(topics[name]["descriptions"]) for name in (right, *others)}
        asked = {self._id("topic"): choice(right, others, descriptions, rng.choice(WHICH_TOPIC), rng)}
        if rng.random() < 0.2:
            is_true = rng.random() < 0.5
            asked["about"] = noul(f"Is the text about {right if is_true else others[0]}?", is_true=is_true)
        return example_of(wrapped(" ".join(fill(s, rng) for s in sentences), rng), asked, rng)

    def mood(self, _: int) -> Example:
        rng = self.rng
        moods = load("moods")
        mood = rng.choice(list(moods))
        sentences = [self._feeling(mood) if rng.random() < 0.6 else fill(rng.choice(moods[mood]), rng)
                     for _ in range(rng.choice((1, 1, 2, 3)))]  # fmt: skip
        text = " ".join(dict.fromkeys(sentences))
        if mood != "neutral" and rng.random() < 0.15:
            text = f"{self._feeling('neutral')} {text}"
        if rng.random() < 0.25:
            question, true_of = rng.choice(PLEASED)
            asked = noul(question, is_true=mood == true_of)
        elif rng.random() < 0.3:
            scale = rng.choice(MOOD_SCALES)
            level = ("negative", "neutral", "positive").index(mood)
            asked = _score(scale, level, rng.choice(WHICH_MOOD), is_reversed=rng.random() < 0.2)
        else:
            words = rng.choice(MOOD_WORDS)
            others = [other for other in moods if other != mood]
            asked = choice(mood, others[: rng.choice((1, 2, 2))], words, rng.choice(WHICH_MOOD), rng)
        return example_of(wrapped(text, rng), {self._id("mood"): asked}, rng)

    def urgency(self, _: int) -> Example:
        rng = self.rng
        level = rng.randrange(3)
        if level == 2 and rng.random() < 0.4:
            parts = [fill(rng.choice(load("emergencies")), rng)]
        else:
            topic = rng.choice(list(load("topics").values()))
            calm = [one for one in load("intents").values() if one["urgency"] < 2]
            body = rng.choice((topic, rng.choice(calm)))["sentences"]
            if rng.random() < 0.4:
                teams = rng.choice(list(load("organisations").values()))
                body = teams[rng.choice([team for team in teams if team not in URGENT_TEAMS])][1]
            parts = rng.sample([fill(rng.choice(body), rng), self._deadline(level)], 2)
        return example_of(wrapped(" ".join(parts), rng), {self._id("urgency"): self._urgency(level)}, rng)

    def fact(self, _: int) -> Example:
        """A stated fact and a question about it, often asked the other way round."""
        rng = self.rng
        fact = rng.choice(load("facts"))
        is_so = rng.random() < 0.5
        words: dict[str, str] = {}
        text = fill(rng.choice(fact["yes" if is_so else "no"]), rng, words)
        plain, negated = fact["questions"], fact["negated"]
        asked = {}
        for number in range(rng.choice((1, 1, 2, 3))):
            is_negated = bool(negated) and rng.random() < 0.35
            question = fill(rng.choice(negated if is_negated else plain), rng, words)
            asked[f"{self._id('fact')}{number or ''}"] = noul(question, is_true=is_so != is_negated)
        if rng.random() < 0.25:
            text = f"{fill(rng.choice(load('moods')['neutral']), rng)} {text}"
        return example_of(wrapped(text, rng), asked, rng)

    def object(self, _: int) -> Example:
        return object_record(self.rng)

    def _feeling(self, mood: str) -> str:
        """A sentence that praises, blames or does neither."""
        rng = self.rng
        feelings = load("feelings")
        if rng.random() < 0.3:
            return str(rng.choice(feelings[mood]["remarks"]))
        (subject, subject2), (adjective, adjective2) = (
            rng.sample(words, 2) for words in (feelings["subjects"], feelings[mood]["adjectives"])
        )
        words = {"subject": subject, "subject2": subject2, "adjective": adjective, "adjective2": adjective2,
                 "verb": rng.choice(feelings[mood]["verbs"])}  # fmt: skip
        return fill(rng.choice(FELT), rng, words)

    def _deadline(self, level: int) -> str:
        return fill(self.rng.choice(load(self.rng.choice(("urgency", "deadlines")))[str(level)]), self.rng)

    def _is_urgent(self, level: int) -> Asked:
        question, is_plain = self.rng.choice(URGENT)
        return noul(question, is_true=(level == 2) == is_plain)

    def _id(self, kind: str) -> str:
        return self.rng.choice(IDS[kind])

    def _team(self, right: str, max_options: int) -> Asked:
        departments: Mapping[str, Sequence[str]] = load("departments")
        others = [name for name in departments if name != right]
        others = self.rng.sample(others, self.rng.randint(1, min(max_options, 9) - 1))
        descriptions = {name: self.rng.choice(departments[name]) for name in (right, *others)}
        return choice(right, others, descriptions, self.rng.choice(WHICH_TEAM), self.rng)

    def _support_intent(self, right: str, max_options: int) -> Asked:
        intents = load("intents")
        others = self.rng.sample(
            [name for name in intents if name != right], self.rng.randint(1, min(max_options, 16) - 1)
        )
        descriptions = {name: self.rng.choice(intents[name]["descriptions"]) for name in (right, *others)}
        if len(others) > 3 and self.rng.random() < 0.3:
            descriptions["other"] = "anything else"
            others = [*others, "other"]
        return choice(right, others, descriptions, self.rng.choice(WHICH_INTENT), self.rng)

    def _urgency(self, level: int) -> Asked:
        scale = self.rng.choice(URGENCY_SCALES)
        instructions = self.rng.choice(HOW_URGENT)
        if level != 1 and self.rng.random() < 0.2:
            return self._is_urgent(level)
        return _score(scale, level, instructions, is_reversed=self.rng.random() < 0.1)


def _score(scale: Sequence[str], level: int, instructions: str | None, *, is_reversed: bool) -> Asked:
    levels: list[Json] = list(reversed(scale)) if is_reversed else list(scale)
    question: dict[str, Json] = {"type": "score", "criteria": levels}
    if instructions is not None:
        question["instructions"] = instructions
    return Asked(question, str(len(scale) - 1 - level if is_reversed else level))
