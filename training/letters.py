"""Drawn papers, and what stands where on them: what teaches the tower to read print.

A picture's answers are a few bits; its letters are hundreds, each told at its place. So the tower first learns to say
which letters lie in each of its patches, then what the total and the line of payment say, and only then does the whole
model learn to answer. Small print is left out: where the model sees it, a letter is 5 pixels wide.
"""

import random
import string
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from PIL import Image, ImageDraw
from torch import Tensor

from scripts.draw_receipts import (
    BANDS,
    INK,
    PAPER,
    TOTAL_SIZE,
    Print,
    Receipt,
    band_place,
    draw_receipt,
    font_of,
    is_card,
    lay_out,
    on_desk,
)
from training.architecture import MERGE, PATCH

LETTERS = string.digits + string.ascii_lowercase + ".*%"
"""Told apart, capital or not; all others are one class more."""

NUM_CLASSES = len(LETTERS) + 1
FACTS = (*BANDS, "cash", "card")
"""What a receipt's total and its line of payment say, each told at its place."""

PATCHES_PER_TOKEN = MERGE * MERGE
LEAST_PIXELS = 14
"""Pixels of a patch that a letter's box must cover to be in it; a digit of the total has about 100."""

LEAST_SIZE = 17
"""Of the font, in the pixels of the drawn picture: the smallest print that is read."""

SHEET = (440, 640)
SHEET_SIZES = (17, 27, 27)
SHEET_WORDS = ("TOTAL", "TOTAL EUR", "CASH", "CARD", "CARD ****")
SUMS = ((1, 10), (10, 100), (100, 200))
MOST_CUT = 36
"""Pixels at most that are cut from each side of a paper, so that its letters meet the patches in another way."""


@dataclass(frozen=True)
class Paper:
    """A picture and, of its size and mode L, the boxes of its letters and facts: 0, or 1 plus a place among them."""

    picture: Image.Image
    letters: Image.Image
    facts: Image.Image

    def cut(self, rng: random.Random) -> "Paper":
        left, top, right, bottom = (rng.randrange(MOST_CUT) for _ in range(4))
        box = (left, top, self.picture.width - right, self.picture.height - bottom)
        return Paper(*(image.crop(box) for image in (self.picture, self.letters, self.facts)))


def receipt_paper(receipt: Receipt) -> Paper:
    layout = lay_out(receipt)

    def on_paper(box: Callable[[ImageDraw.ImageDraw, Print], None]) -> Image.Image:
        boxes = Image.new("L", layout.size)
        pen = ImageDraw.Draw(boxes)
        for one in layout.prints:
            if one.size >= LEAST_SIZE:
                box(pen, one)
        tilted = boxes.rotate(receipt.tilt_degrees, Image.Resampling.NEAREST, expand=True)
        desk, at = on_desk(tilted, layout, "L", 0)
        desk.paste(tilted, at)
        return desk

    def box_fact(pen: ImageDraw.ImageDraw, one: Print) -> None:
        if one.text == receipt.paid_by:
            fact = "card" if is_card(receipt) else "cash"
        elif one.size == TOTAL_SIZE and one.text == f"{receipt.total:.2f}":
            fact = FACTS[band_place(receipt.total)]
        else:
            return
        left, top, right, bottom = font_of(one.size).getbbox(one.text, anchor=one.anchor)
        pen.rectangle((one.x + left, one.y + top, one.x + right - 1, one.y + bottom - 1), fill=1 + FACTS.index(fact))

    return Paper(draw_receipt(receipt), on_paper(_box_letters), on_paper(box_fact))


def sheet(rng: random.Random) -> Paper:
    """A paper full of sums, the words of receipts and meaningless ones: many times a receipt's letters."""
    picture, boxes = Image.new("RGB", SHEET, PAPER), Image.new("L", SHEET)
    picture_pen, boxes_pen = ImageDraw.Draw(picture), ImageDraw.Draw(boxes)
    y = rng.randrange(4, 20)
    while y < SHEET[1]:
        size = rng.choice(SHEET_SIZES)
        words: list[str] = []
        while sum(map(len, words)) + len(words) < 800 // size:
            words.append(_word(rng))
        one = Print(" ".join(words), rng.randrange(24), y, size, "la")
        picture_pen.text((one.x, one.y), one.text, font=font_of(size), fill=INK, anchor=one.anchor)
        _box_letters(boxes_pen, one)
        y += size + rng.randrange(3, 14)
    tilt = rng.uniform(-2, 2)
    return Paper(
        picture.rotate(tilt, Image.Resampling.BICUBIC, fillcolor=PAPER),
        boxes.rotate(tilt, Image.Resampling.NEAREST),
        Image.new("L", SHEET),
    )


def _word(rng: random.Random) -> str:
    kind = rng.random()
    if kind < 0.55:
        return f"{rng.uniform(*rng.choice(SUMS)):.2f}"
    if kind < 0.7:
        return rng.choice(SHEET_WORDS)
    return "".join(rng.choices(string.ascii_letters + string.digits, k=rng.randrange(3, 8)))


def _box_letters(pen: ImageDraw.ImageDraw, one: Print) -> None:
    """Fill each letter's box; all are as tall as a digit, as a full stop's own would be too small to see."""
    font = font_of(one.size)
    ends = [font.getlength(one.text[:end]) for end in range(len(one.text) + 1)]
    start = one.x - ends[-1] * {"l": 0.0, "m": 0.5, "r": 1.0}[one.anchor[0]]
    _, top, _, bottom = font.getbbox("0", anchor="la")
    for letter, left, right in zip(one.text.lower(), ends, ends[1:], strict=False):
        if letter != " ":
            value = 1 + (LETTERS.index(letter) if letter in LETTERS else len(LETTERS))
            pen.rectangle((start + left, one.y + top, start + right - 1, one.y + bottom - 1), fill=value)


def box_targets(boxes: Image.Image, num_classes: int, rows: int, columns: int) -> Tensor:
    """What the patches of each image token hold.

    Args:
        boxes: a paper's letters or facts.
        num_classes: how many there are.
        rows, columns: of patches that the picture is resized to.

    Returns:
        float32 (tokens, PATCHES_PER_TOKEN, num_classes), 0 or 1, in the order of the tower's output.
    """
    resized = boxes.resize((columns * PATCH, rows * PATCH), Image.Resampling.NEAREST)
    pixels = torch.from_numpy(np.asarray(resized, dtype=np.int64))
    blocks = pixels.view(rows // MERGE, MERGE, PATCH, columns // MERGE, MERGE, PATCH)
    patches = blocks.permute(0, 3, 1, 4, 2, 5).reshape(-1, PATCH * PATCH)
    counts = torch.zeros(len(patches), 1 + num_classes).scatter_add_(1, patches, torch.ones(patches.shape))
    return (counts[:, 1:] >= LEAST_PIXELS).float().view(-1, PATCHES_PER_TOKEN, num_classes)
