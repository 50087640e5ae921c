"""Records whose state is an object: orders, machines and tickets with fields to look up and numbers to compare."""

import random

from clef_core.schema import Json
from training.examples import Asked, Example, choice, example_of, noul
from training.phrases import load

STATUSES = ("open", "paid", "shipped", "delivered", "cancelled", "returned")
FLAGS = {
    "paid": ("Has it been paid?", "Is the order paid?"),
    "shipped": ("Has it been shipped?", "Is it on its way?"),
    "urgent": ("Is it marked as urgent?", "Is it urgent?"),
    "repaired": ("Has it been repaired?", "Is the repair done?"),
    "cleaned": ("Has it been cleaned?", "Was it cleaned?"),
    "locked": ("Is it locked?", "Has it been locked?"),
    "vip": ("Is this an important customer?", "Is the customer a VIP?"),
    "in_stock": ("Is it in stock?", "Can it be had at once?"),
    "checked": ("Has it been checked?", "Did somebody check it?"),
}


def object_record(rng: random.Random) -> Example:
    """An object with two to five fields and one or two questions about them."""
    slots = load("slots")
    flags = {name: rng.random() < 0.5 for name in rng.sample(list(FLAGS), rng.choice((1, 2)))}
    status = rng.choice(STATUSES)
    amount = rng.choice((rng.randrange(1, 20), rng.randrange(20, 300), rng.randrange(300, 5_000)))
    state: dict[str, Json] = {"item": rng.choice(slots["thing"]), **flags}
    asked: dict[str, Asked] = {}
    for name, value in flags.items():
        asked[name] = noul(rng.choice(FLAGS[name]), is_true=value)
    if rng.random() < 0.5:
        state["status"] = status
        others = rng.sample([one for one in STATUSES if one != status], rng.randint(1, 4))
        asked["status"] = choice(status, others, {}, rng.choice(("What is the status?", None)), rng)
    if rng.random() < 0.5:
        state["amount"] = amount
        limit = rng.choice((20, 100, 500))
        is_above = rng.random() < 0.5
        question = f"Is the amount {'above' if is_above else 'below'} {limit}?"
        asked["limit"] = noul(question, is_true=(amount > limit) if is_above else (amount < limit))
    if rng.random() < 0.3:
        state["city"] = rng.choice(slots["city"])
    keys = rng.sample(list(state), len(state))
    kept = rng.sample(list(asked), min(len(asked), rng.choice((1, 2, 3))))
    return example_of({key: state[key] for key in keys}, {id: asked[id] for id in kept}, rng)
