"""Drawn pictures with questions: receipts of invented shops, and coloured shapes, charts and landscapes.

Nothing is downloaded or photographed; Pillow draws everything. Receipts are drawn by `scripts/draw_receipts.py`, as the
page's examples are, with other shops, goods, prices and tills.
"""

import random
from collections.abc import Callable, Mapping
from decimal import Decimal

from PIL import Image, ImageDraw

from clef_core.schema import Json
from scripts.draw_receipts import Line, Receipt, band_place, draw_receipt, is_card
from training.examples import Asked, Example, choice, example_of, noul

COLOURS = {
    "red": (205, 45, 45), "green": (50, 150, 70), "blue": (50, 90, 200), "yellow": (240, 210, 60),
    "black": (25, 25, 28), "white": (250, 250, 250), "orange": (240, 140, 40), "purple": (130, 60, 160),
}  # fmt: skip
SHAPES = ("circle", "square", "triangle")
SHOPS = (
    "Bakery",
    "Hardware",
    "Kiosk",
    "Pharmacy",
    "Books",
    "Market",
    "Cafe",
    "Grill",
    "Flowers",
    "Toys",
    "Deli",
    "Inn",
)
NAMES = ("Ivy", "Hill", "Old Town", "Lakeside", "Corner", "Sunny", "North", "Golden", "Smith's", "Park", "River", "Oak")
GOODS = (
    "Bread",
    "Coffee", "Tea", "Paint 1 l", "Nails 50", "Notebook", "Roses", "Soup", "Salad", "Puzzle", "Milk 1 l", "Pasta",
    "Cake slice", "Batteries", "Soap", "Candle", "Hammer", "Map", "Pencils", "Apple juice", "Rope 10 m", "Bulb 60 W",
)  # fmt: skip
BANDS = (
    {"under_20": "Total below 20", "20_to_50": "Total from 20 to 50", "over_50": "Total above 50"},
    {"low": "under 20", "middle": "20 to 50", "high": "more than 50"},
)
STATES = ("Picture sent with an expense claim.", "A picture.", "Answer each question about the attached picture.", "")
IS_RECEIPT = ("Is the picture a shop or restaurant receipt?", "Is this a receipt?", "Does the picture show a receipt?",
              "Is this a shop receipt?")  # fmt: skip
IS_OTHER = ("Is this something else than a receipt?",)
BY_CARD = ("Was the bill paid by card?", "Did the customer pay by card?", "Is it a card payment?")
BY_CASH = ("Was the bill paid in cash?", "Did the customer pay cash?")
HOW_PAID = ("How was the bill paid?", "How did the customer pay?", "Paid with?")
PAYMENTS = ("card", "cash", "cheque", "voucher")
THRESHOLDS = (10, 20, 30, 40, 50, 60, 80, 100)
ABOVE = ("Is the total above {}?", "Is the total more than {}?", "Was more than {} paid?")
BELOW = ("Is the total below {}?", "Is the total under {}?", "Was less than {} paid?")
READ_WEIGHTS = {"is_receipt": 0.4, "paid_by_card": 1.0, "total_band": 1.3, "threshold": 0.5, "payment": 0.5}
"""How often a receipt's questions are asked once the tower can read."""

WHICH_BAND = ("Which band holds the total?", "How much is the total?", None)


class Pictures:
    """Draws examples with one picture each."""

    def __init__(self, seed: int | str) -> None:
        self.rng = random.Random(seed)

    def draw(self, *, can_read: bool = False) -> Example:
        receipts: dict[Callable[[], Example], float] = {self.read_receipt: 10} if can_read else {self.receipt: 6}
        kinds = {**receipts, self.shape: 2, self.scene: 1.5, self.chart: 1}
        (kind,) = self.rng.choices(list(kinds), list(kinds.values()))
        return kind()

    def receipt(self) -> Example:
        rng = self.rng
        receipt = drawn_receipt(rng)
        asked = self._asked_of(receipt)
        return self._example(draw_receipt(receipt), asked)

    def read_receipt(self) -> Example:
        """A receipt with more questions about what is printed on it."""
        rng = self.rng
        receipt = drawn_receipt(rng)
        paid = "card" if is_card(receipt) else "cash"
        threshold, is_above = rng.choice(THRESHOLDS), rng.random() < 0.5
        words = rng.choice(ABOVE if is_above else BELOW).format(threshold)
        is_true = receipt.total > threshold if is_above else receipt.total < threshold
        asked = {
            **self._asked_of(receipt),
            "threshold": noul(words, is_true=is_true),
            "payment": _among(paid, PAYMENTS, rng.choice(HOW_PAID), rng),
        }
        keys = {id: rng.random() ** (1 / READ_WEIGHTS[id]) for id in asked}
        kept = sorted(asked, key=keys.__getitem__)[-rng.choice((1, 2, 3, 3)) :]
        return example_of(self._state(), {id: asked[id] for id in kept}, rng, [draw_receipt(receipt)])

    def _asked_of(self, receipt: Receipt) -> dict[str, Asked]:
        rng = self.rng
        asked_cash = rng.random() < 0.2
        return {
            "is_receipt": self._is_receipt(is_true=True),
            "paid_by_card": noul(
                rng.choice(BY_CASH if asked_cash else BY_CARD), is_true=is_card(receipt) != asked_cash
            ),
            "total_band": self._band(band_place(receipt.total)),
        }

    def shape(self) -> Example:
        """One shape of one colour on a plain ground."""
        rng = self.rng
        shape, (colour, ground) = rng.choice(SHAPES), rng.sample(list(COLOURS), 2)
        picture = Image.new("RGB", (rng.randrange(200, 400), rng.randrange(200, 400)), COLOURS[ground])
        pen = ImageDraw.Draw(picture)
        size = rng.randrange(60, 150)
        x, y = rng.randrange(0, picture.width - size), rng.randrange(0, picture.height - size)
        if shape == "circle":
            pen.ellipse((x, y, x + size, y + size), fill=COLOURS[colour])
        elif shape == "square":
            pen.rectangle((x, y, x + size, y + size), fill=COLOURS[colour])
        else:
            pen.polygon([(x, y + size), (x + size, y + size), (x + size / 2, y)], fill=COLOURS[colour])
        asked = {
            "is_receipt": self._is_receipt(is_true=False),
            "shape": _among(shape, SHAPES, "Which shape does the picture show?", rng),
            "colour": _among(colour, COLOURS, f"Which colour is the {shape}?", rng),
            "background": _among(ground, COLOURS, "Which colour is the background?", rng),
        }
        return self._example(picture, asked)

    def scene(self) -> Example:
        """A landscape: sky, hills, water or a meadow, sometimes a sun and a house."""
        rng = self.rng
        width, height = rng.randrange(300, 640), rng.randrange(300, 640)
        has_water, has_sun = rng.random() < 0.5, rng.random() < 0.5
        picture = Image.new("RGB", (width, height), (rng.randrange(130, 190), rng.randrange(180, 220), 232))
        pen = ImageDraw.Draw(picture)
        horizon = rng.randrange(height // 2, 3 * height // 4)
        if has_sun:
            x, y, size = rng.randrange(width - 60), rng.randrange(height // 5), rng.randrange(50, 90)
            pen.ellipse((x, y, x + size, y + size), fill=(250, 219, 100))
        points = [(x, horizon - rng.randrange(20, height // 3)) for x in range(0, width + 60, 60)]
        pen.polygon(
            [(0, horizon), *points, (width, horizon)], fill=(rng.randrange(60, 120), rng.randrange(110, 150), 95)
        )
        pen.rectangle((0, horizon, width, height), fill=(66, 128, 170) if has_water else (96, 160, 80))
        for _ in range(40 if has_water else 0):
            x, y = rng.randrange(width), rng.randrange(horizon, height)
            pen.line((x, y, x + rng.randrange(14, 50), y), fill=(110, 165, 200), width=2)
        if rng.random() < 0.6:
            x, size = rng.randrange(width // 2), rng.randrange(60, 140)
            top = rng.randrange(horizon - size // 2, max(horizon, height - size - 40))
            pen.rectangle((x, top, x + size, top + size // 2), fill=rng.choice(list(COLOURS.values())))
            pen.polygon([(x, top), (x + size, top), (x + size // 2, top - size // 2)], fill=(150, 60, 50))
        asked = {
            "is_receipt": self._is_receipt(is_true=False),
            "total_band": self._band(None),
            "water": noul("Does the picture show water?", is_true=has_water),
            "sun": noul("Is the sun in the picture?", is_true=has_sun),
        }
        return self._example(picture, asked)

    def chart(self) -> Example:
        """Bars that rise or fall."""
        rng = self.rng
        count, rises = rng.randrange(4, 9), rng.random() < 0.5
        heights = sorted(rng.sample(range(30, 260), count), reverse=not rises)
        picture = Image.new("RGB", (60 + 50 * count, 320), (252, 252, 252))
        pen = ImageDraw.Draw(picture)
        colour = rng.choice([one for name, one in COLOURS.items() if name != "white"])
        for place, tall in enumerate(heights):
            pen.rectangle((40 + 50 * place, 290 - tall, 75 + 50 * place, 290), fill=colour)
        pen.line((30, 20, 30, 290, picture.width - 10, 290), fill=(20, 20, 20), width=3)
        asked = {
            "is_receipt": self._is_receipt(is_true=False),
            "total_band": self._band(None),
            "chart": noul("Does the picture show a bar chart?", is_true=True),
            "rises": noul("Do the bars rise from left to right?", is_true=rises),
        }
        return self._example(picture, asked)

    def _example(self, picture: Image.Image, asked: Mapping[str, Asked]) -> Example:
        rng = self.rng
        kept = rng.sample(list(asked), rng.choice((1, 2, 3, 3)))
        return example_of(self._state(), {id: asked[id] for id in kept}, rng, [picture])

    def _state(self) -> Json:
        return self.rng.choice(STATES) or {"kind": "picture"}

    def _is_receipt(self, *, is_true: bool) -> Asked:
        if self.rng.random() < 0.15:
            return noul(self.rng.choice(IS_OTHER), is_true=not is_true)
        return noul(self.rng.choice(IS_RECEIPT), is_true=is_true)

    def _band(self, band: int | None) -> Asked:
        """Which band the total is in; None where the picture has no total."""
        words = dict(self.rng.choice(BANDS))
        right = "none" if band is None else list(words)[band]
        if band is None or self.rng.random() < 0.6:
            words["none"] = "No total is visible"
        criteria: dict[str, Json] = dict(words)
        question: dict[str, Json] = {"type": "choice", "criteria": criteria}
        instructions = self.rng.choice(WHICH_BAND)
        return Asked(question if instructions is None else {**question, "instructions": instructions}, right)


def drawn_receipt(rng: random.Random) -> Receipt:
    """An invented purchase; its total is drawn first by band, so that all three are met equally often."""
    low, high = rng.choice(((3, 20), (20, 50), (50, 130)))
    for _ in range(200):
        lines = tuple(
            Line(good, rng.choice((1, 1, 1, 2, 3)), Decimal(rng.randrange(60, 200 + 16 * high)) / 100)
            for good in rng.sample(GOODS, rng.choice((2, 3, 3, 4, 4, 5, 6)))
        )
        if low <= sum(line.amount for line in lines) < high:
            break
    minute = rng.randrange(60)
    shop = f"{rng.choice(NAMES)} {rng.choice(SHOPS)}"
    return Receipt(
        file="",
        shop=shop.upper() if rng.random() < 0.4 else shop,
        address=(f"{rng.randrange(1, 200)} {rng.choice(NAMES)} Street", rng.choice(("Eastham", "Millport", "Nordby"))),
        when=f"2026-{rng.randrange(1, 13):02}-{rng.randrange(1, 29):02}  {rng.randrange(7, 22):02}:{minute:02}",
        number=rng.choice(
            (f"No. {rng.randrange(999_999):06}", f"Till {rng.randrange(9)}  Receipt {rng.randrange(99_999)}")
        ),
        lines=lines,
        tax_percent=rng.choice((5, 7, 10, 19, 20)),
        paid_by=rng.choice(("CASH", f"CARD **** {rng.randrange(1_000, 9_999)}")),
        farewell=rng.choice(("Thank you!", "See you soon!", "Returns within 30 days", "Have a nice day", "Come again")),
        tilt_degrees=rng.uniform(-2, 2),
    )


def _among(right: str, names: Mapping[str, object] | tuple[str, ...], instructions: str, rng: random.Random) -> Asked:
    others = rng.sample([name for name in names if name != right], rng.randint(1, min(4, len(names) - 1)))
    return choice(right, others, {}, instructions, rng)
