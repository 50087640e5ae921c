"""Draw the example receipts: three invented shops, and one picture that is no receipt.

Writes PNG files, `receipts.csv`, `receipts.zip`, `receipt_questions.json` and `receipt_request.json` into `examples/`.
Shops, streets, goods and prices are made up. Every file comes out the same on every run: no clock, no random numbers
without a seed, and the zip's entries carry a fixed date. The letters are those of Pillow's own font: no font has to be
installed.
"""

from __future__ import annotations

import argparse
import base64
import csv
import io
import json
import random
import zipfile
from dataclasses import dataclass
from decimal import Decimal
from functools import cache
from pathlib import Path

from PIL import Image, ImageDraw, ImageFilter, ImageFont

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
PAPER = (252, 251, 246)
INK = (38, 38, 44)
DESK = (176, 160, 140)
ZIP_DATE = (2026, 1, 1, 0, 0, 0)
PAPER_WIDTH, MARGIN = 340, 22
TOTAL_SIZE = 27
BANDS = ("under_20", "20_to_50", "over_50")
NUM_COLOURS = 32  # a palette keeps each file far under 60 kB


@dataclass(frozen=True)
class Line:
    """One bought thing: what, how many, and the price of one."""

    name: str
    quantity: int
    price: Decimal

    @property
    def amount(self) -> Decimal:
        return self.quantity * self.price


@dataclass(frozen=True)
class Receipt:
    """All that is printed on one receipt."""

    file: str
    shop: str
    address: tuple[str, str]
    when: str
    number: str
    lines: tuple[Line, ...]
    tax_percent: int
    paid_by: str
    farewell: str
    tilt_degrees: float

    @property
    def total(self) -> Decimal:
        return sum((line.amount for line in self.lines), Decimal("0.00"))

    @property
    def tax(self) -> Decimal:
        """The tax inside the total, rounded to cents."""
        return (self.total * self.tax_percent / (100 + self.tax_percent)).quantize(Decimal("0.01"))


@dataclass(frozen=True)
class Print:
    """A piece of text on the paper; x, y: of its anchor, in pixels. size: of Pillow's own font."""

    text: str
    x: float
    y: int
    size: int
    anchor: str


@dataclass(frozen=True)
class Layout:
    """What is where on the paper. rules, barcode: y of the dashed lines and the bars' top; height: all in pixels."""

    prints: tuple[Print, ...]
    rules: tuple[int, ...]
    barcode: int
    height: int

    @property
    def size(self) -> tuple[int, int]:
        return PAPER_WIDTH, self.height


def item(name: str, quantity: int, price: str) -> Line:
    return Line(name, quantity, Decimal(price))


RECEIPTS = (
    Receipt(
        file="receipt_bakery.png",
        shop="MARIGOLD BAKERY",
        address=("4 Mill Lane", "Westerby"),
        when="2026-03-14  08:12",
        number="No. 001734",
        lines=(item("Rye loaf 750 g", 1, "4.60"), item("Poppy roll", 4, "0.85"), item("Apple slice", 2, "2.40")),
        tax_percent=7,
        paid_by="CASH",
        farewell="Fresh from five o'clock",
        tilt_degrees=1.2,
    ),
    Receipt(
        file="receipt_hardware.png",
        shop="Harbour Hardware",
        address=("118 Quay Street", "Port Ansel"),
        when="2026-04-02  16:47",
        number="Till 3  Receipt 58021",
        lines=(
            item("Wood screws 4x40, 200", 1, "7.95"),
            item("Exterior paint 2.5 l", 2, "31.50"),
            item("Brush 50 mm", 2, "4.25"),
            item("Sandpaper set", 1, "6.80"),
            item("Masking tape 50 m", 3, "3.10"),
        ),
        tax_percent=19,
        paid_by="CARD **** 4410",
        farewell="Returns within 30 days",
        tilt_degrees=-1.6,
    ),
    Receipt(
        file="receipt_cafe.png",
        shop="Kettle & Crumb",
        address=("Station Square 1", "Lower Finch"),
        when="2026-05-21  13:05",
        number="Table 9  #20447",
        lines=(
            item("Lentil soup", 2, "6.90"),
            item("Cheese toast", 1, "5.50"),
            item("Flat white", 2, "3.60"),
            item("Lemon tart", 1, "4.20"),
        ),
        tax_percent=10,
        paid_by="CARD **** 0782",
        farewell="See you soon!",
        tilt_degrees=0.5,
    ),
)
NOT_A_RECEIPT = "not_a_receipt.png"

QUESTIONS = {
    "is_receipt": {"type": "noul", "instructions": "Is the picture a shop or restaurant receipt?"},
    "paid_by_card": {"type": "noul", "instructions": "Was the bill paid by card?"},
    "total_band": {
        "type": "choice",
        "instructions": "Which band holds the total?",
        "criteria": {
            "under_20": "Total below 20",
            "20_to_50": "Total from 20 to 50",
            "over_50": "Total above 50",
            "none": "No total is visible",
        },
    },
}


@cache
def font_of(size: int) -> ImageFont.FreeTypeFont | ImageFont.ImageFont:
    return ImageFont.load_default(size)


def lay_out(receipt: Receipt) -> Layout:
    """Return what is printed where on the paper, in reading order."""
    prints: list[Print] = []
    rules: list[int] = []
    y = 24

    def centre(text: str, size: int, step: int) -> None:
        nonlocal y
        prints.append(Print(text, PAPER_WIDTH / 2, y, size, "ma"))
        y += step

    def pair(left: str, right: str, size: int = 17, step: int = 25) -> None:
        nonlocal y
        prints.append(Print(left, MARGIN, y, size, "la"))
        prints.append(Print(right, PAPER_WIDTH - MARGIN, y, size, "ra"))
        y += step

    def rule() -> None:
        nonlocal y
        rules.append(y + 5)
        y += 16

    centre(receipt.shop, 27, 40)
    for part in receipt.address:
        centre(part, 17, 22)
    y += 8
    pair(receipt.when, "", 14)
    pair(receipt.number, "", 14)
    rule()
    for line in receipt.lines:
        pair(line.name, f"{line.amount:.2f}")
        if line.quantity > 1:
            pair(f"   {line.quantity} x {line.price:.2f}", "", 14, 21)
    rule()
    pair("TOTAL EUR", f"{receipt.total:.2f}", TOTAL_SIZE, 42)
    pair(f"incl. tax {receipt.tax_percent} %", f"{receipt.tax:.2f}", 14)
    pair(receipt.paid_by, f"{receipt.total:.2f}")
    rule()
    centre(receipt.farewell, 17, 32)
    return Layout(tuple(prints), tuple(rules), barcode=y, height=y + 76)


def draw_receipt(receipt: Receipt) -> Image.Image:
    """Return the receipt as printed paper on a desk, RGB, 440 pixels wide and about 700 high."""
    layout = lay_out(receipt)
    paper = Image.new("RGB", layout.size, PAPER)
    pen = ImageDraw.Draw(paper)
    for one in layout.prints:
        pen.text((one.x, one.y), one.text, font=font_of(one.size), fill=INK, anchor=one.anchor)
    for y in layout.rules:
        for x in range(MARGIN, PAPER_WIDTH - MARGIN, 9):
            pen.line((x, y, x + 4, y), fill=INK)
    _draw_barcode(pen, layout.barcode, PAPER_WIDTH, receipt.number)
    tilted = paper.convert("RGBA").rotate(receipt.tilt_degrees, Image.Resampling.BICUBIC, expand=True)
    desk, at = on_desk(tilted, layout, "RGB", DESK)
    shadow = Image.new("L", desk.size, 0)
    shadow.paste(110, (at[0] + 6, at[1] + 8), tilted.getchannel("A"))
    desk.paste((70, 60, 50), mask=shadow.filter(ImageFilter.GaussianBlur(6)))
    desk.paste(tilted, at, tilted)
    return desk


def on_desk(
    tilted: Image.Image, layout: Layout, mode: str, ground: int | tuple[int, int, int]
) -> tuple[Image.Image, tuple[int, int]]:
    """Return an empty desk, and where on it the tilted paper lies."""
    desk = Image.new(mode, (440, max(640, layout.height + 70)), ground)
    return desk, ((desk.width - tilted.width) // 2, (desk.height - tilted.height) // 2)


def _draw_barcode(pen: ImageDraw.ImageDraw, y: int, width: int, seed: str) -> None:
    bars = random.Random(seed)
    x = 70
    while x < width - 70:
        thickness = bars.choice((1, 1, 2, 3))
        pen.rectangle((x, y, x + thickness - 1, y + 44), fill=INK)
        x += thickness + bars.choice((1, 2, 2, 3))


def draw_not_a_receipt() -> Image.Image:
    """Return a boat on a lake before hills, RGB, 600 by 640 pixels."""
    picture = Image.new("RGB", (600, 640), (158, 205, 232))
    pen = ImageDraw.Draw(picture)
    pen.ellipse((440, 60, 530, 150), fill=(250, 219, 106))
    pen.polygon(
        [(0, 330), (130, 170), (250, 300), (360, 140), (520, 310), (600, 230), (600, 400), (0, 400)], (104, 140, 116)
    )
    pen.polygon([(0, 360), (180, 270), (330, 370), (470, 300), (600, 370), (600, 420), (0, 420)], fill=(72, 112, 84))
    pen.rectangle((0, 400, 600, 640), fill=(66, 128, 170))
    waves = random.Random(3)
    for _ in range(60):
        x, y = waves.randrange(0, 600), waves.randrange(415, 635)
        pen.line((x, y, x + waves.randrange(14, 50), y), fill=(110, 165, 200), width=2)
    pen.polygon([(200, 480), (400, 480), (360, 530), (235, 530)], fill=(142, 74, 48))
    pen.line((300, 480, 300, 300), fill=(80, 50, 36), width=6)
    pen.polygon([(306, 305), (306, 465), (395, 465)], fill=(246, 240, 226))
    pen.polygon([(294, 330), (294, 465), (225, 465)], fill=(226, 96, 76))
    return picture


def to_png(picture: Image.Image) -> bytes:
    """Encode with a small palette, so that the file stays small."""
    out = io.BytesIO()
    picture.quantize(NUM_COLOURS, dither=Image.Dither.NONE).save(out, format="PNG", optimize=True)
    return out.getvalue()


def band_place(total: Decimal) -> int:
    """The place of the total's band among `BANDS`."""
    return 0 if total < 20 else 1 if total <= 50 else 2


def is_card(receipt: Receipt) -> bool:
    return receipt.paid_by.startswith("CARD")


def write_zip(path: Path, pictures: dict[str, bytes]) -> None:
    """Write the pictures uncompressed (PNG is compressed already), with a fixed date."""
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in pictures.items():
            archive.writestr(zipfile.ZipInfo(name, ZIP_DATE), data)


def write_csv(path: Path) -> None:
    """Write one row per picture, with the right answers as labels."""
    labels = [("true", str(is_card(r)).lower(), BANDS[band_place(r.total)]) for r in RECEIPTS]
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["id", "note", "image", *(f"label:{question}" for question in QUESTIONS)])
        for number, (receipt, row) in enumerate(zip(RECEIPTS, labels, strict=True), start=1):
            writer.writerow([f"r{number}", "Picture sent with an expense claim.", receipt.file, *row])
        writer.writerow(["r4", "Picture sent with an expense claim.", NOT_A_RECEIPT, "false", "", "none"])


def write_request(path: Path, picture: bytes) -> None:
    """Write one whole SystemOne request with the picture inside it."""
    url = "data:image/png;base64," + base64.b64encode(picture).decode("ascii")
    state = "Picture sent with an expense claim."
    body = {"model": "clef", "state": state, "questions": QUESTIONS, "images": [url]}
    path.write_text(json.dumps(body, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description="Draw the example receipts again.")
    parser.add_argument("--output", type=Path, default=EXAMPLES, help="folder to write into (default: examples/)")
    output: Path = parser.parse_args().output
    output.mkdir(parents=True, exist_ok=True)
    pictures = {receipt.file: to_png(draw_receipt(receipt)) for receipt in RECEIPTS}
    pictures[NOT_A_RECEIPT] = to_png(draw_not_a_receipt())
    for name, data in pictures.items():
        (output / name).write_bytes(data)
        print(f"{name}: {len(data) / 1000:.1f} kB")
    write_zip(output / "receipts.zip", pictures)
    write_csv(output / "receipts.csv")
    questions = json.dumps(QUESTIONS, indent=2, ensure_ascii=False) + "\n"
    (output / "receipt_questions.json").write_text(questions, encoding="utf-8")
    write_request(output / "receipt_request.json", pictures[RECEIPTS[0].file])


if __name__ == "__main__":
    main()
