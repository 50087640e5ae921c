"""How clef-nano's tower learns to read: papers whose letters are known, and that their places are the tower's own."""

import random
from dataclasses import replace
from itertools import groupby

import numpy as np
import pytest
import torch
from PIL import Image, ImageChops
from torch import Tensor
from transformers.models.qwen2_vl.image_processing_qwen2_vl import Qwen2VLImageProcessor
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5VisionModel

from scripts.draw_receipts import RECEIPTS, Receipt, draw_receipt, lay_out
from training.architecture import PATCH, make_backbone, make_processor
from training.letters import FACTS, LETTERS, NUM_CLASSES, Paper, box_targets, receipt_paper, sheet
from training.reading import TOKEN_NORM, Amounts, learn_facts, learn_letters, linear_patches, scale_tokens, start_anew
from training.vocabulary import train_tokenizer

FLAT = [replace(receipt, tilt_degrees=0.0) for receipt in RECEIPTS]
ROWS, COLUMNS = 26, 18
"""Patches of a receipt where the model sees it."""

FEW = Amounts(papers=2, receipts=2, together=2, held_out=2, whitened=6, log_every=10)
TOKENIZER = train_tokenizer(["a receipt"])


@pytest.fixture(scope="module")
def processor() -> Qwen2VLImageProcessor:
    return make_processor(TOKENIZER).image_processor


@pytest.fixture
def tower() -> Qwen3_5VisionModel:
    torch.manual_seed(0)
    return make_backbone(TOKENIZER).model.visual


def across(boxes: Image.Image, y: float) -> list[int]:
    """The boxes that a line meets from left to right."""
    row = np.asarray(boxes)[round(y)].tolist()
    return [value for value, _ in groupby(row) if value]


@pytest.mark.parametrize("receipt", FLAT, ids=lambda receipt: receipt.shop)
def test_the_boxes_of_a_receipt_spell_its_total_and_tell_its_band_and_payment(receipt: Receipt) -> None:
    paper = receipt_paper(receipt)
    assert paper.letters.size == paper.facts.size == paper.picture.size
    total = next(one for one in lay_out(receipt).prints if one.text == f"{receipt.total:.2f}")
    top = (paper.picture.height - lay_out(receipt).height) // 2
    spelt = [LETTERS[value - 1] for value in across(paper.letters, top + total.y + 15)]
    spelt_once = [letter for letter, _ in groupby(f"totaleur{receipt.total:.2f}")]  # boxes of a letter twice touch
    assert spelt == spelt_once
    band = "under_20" if receipt.total < 20 else "20_to_50" if receipt.total <= 50 else "over_50"
    payment = "card" if receipt.paid_by.startswith("CARD") else "cash"
    met = sorted({FACTS[value - 1] for value in np.unique(np.asarray(paper.facts)).tolist() if value})
    assert met == sorted((band, payment))


@pytest.mark.parametrize("receipt", RECEIPTS, ids=lambda receipt: receipt.shop)
def test_boxes_lie_where_letters_are_drawn_also_on_a_tilted_paper(receipt: Receipt) -> None:
    picture, boxes = np.asarray(draw_receipt(receipt).convert("L")), np.asarray(receipt_paper(receipt).letters)
    is_ink = picture < 120
    in_boxes, elsewhere = is_ink[boxes > 0].mean(), is_ink[boxes == 0].mean()
    assert in_boxes > 0.15
    assert in_boxes > 5 * elsewhere  # small print, rules, bars


def test_a_sheet_holds_many_times_a_receipts_letters() -> None:
    def num(paper: Paper) -> float:
        return float(box_targets(paper.letters, NUM_CLASSES, ROWS, COLUMNS).sum())

    paper = sheet(random.Random(1))
    assert num(paper) > 3 * num(receipt_paper(RECEIPTS[0]))
    assert float(box_targets(paper.facts, len(FACTS), ROWS, COLUMNS).sum()) == 0


def test_a_cut_takes_the_same_edges_from_picture_and_boxes() -> None:
    paper = receipt_paper(RECEIPTS[1])
    boxes = Paper(paper.letters, paper.letters, paper.letters).cut(random.Random(4))
    assert boxes.picture.size < paper.picture.size
    assert ImageChops.difference(boxes.picture, boxes.facts).getbbox() is None


@pytest.mark.parametrize(("row", "column"), [(0, 0), (1, 0), (0, 1), (5, 2), (25, 17)])
def test_targets_are_in_the_order_of_the_processors_patches(
    processor: Qwen2VLImageProcessor, row: int, column: int
) -> None:
    size = (COLUMNS * PATCH, ROWS * PATCH)
    square = (column * PATCH, row * PATCH, (column + 1) * PATCH - 1, (row + 1) * PATCH - 1)
    picture, boxes = Image.new("RGB", size), Image.new("L", size)
    picture.paste((255, 255, 255), (square[0], square[1], square[2] + 1, square[3] + 1))
    boxes.paste(3, (square[0], square[1], square[2] + 1, square[3] + 1))
    processed = processor(images=[picture], return_tensors="pt")
    assert processed["image_grid_thw"].tolist() == [[1, ROWS, COLUMNS]]
    brightest = int(processed["pixel_values"].sum(-1).argmax())
    targets = box_targets(boxes, NUM_CLASSES, ROWS, COLUMNS).flatten(0, 1)
    assert targets.nonzero().tolist() == [[brightest, 2]]


def pixels_of(processor: Qwen2VLImageProcessor) -> tuple[Tensor, Tensor]:
    processed = processor(images=[draw_receipt(receipt) for receipt in RECEIPTS], return_tensors="pt")
    return processed["pixel_values"], processed["image_grid_thw"]


@torch.no_grad()
def test_the_patch_embedding_starts_white(processor: Qwen2VLImageProcessor, tower: Qwen3_5VisionModel) -> None:
    pixels, _ = pixels_of(processor)
    start_anew(tower, pixels)
    embedded = tower.patch_embed(pixels)
    torch.testing.assert_close(embedded.mean(0), torch.zeros(embedded.shape[1]), atol=1e-3, rtol=0)
    covariance = embedded.T.cov()
    assert (covariance - covariance.diag().diag()).abs().max() < 1e-3
    assert 0.9 < covariance.diag().max() < 1.01


@torch.no_grad()
def test_patches_are_embedded_alike_by_a_product(processor: Qwen2VLImageProcessor, tower: Qwen3_5VisionModel) -> None:
    pixels, grid = pixels_of(processor)
    expected = tower(pixels, grid_thw=grid).pooler_output
    with linear_patches(tower):
        torch.testing.assert_close(tower(pixels, grid_thw=grid).pooler_output, expected, rtol=1e-3, atol=1e-4)
    assert torch.equal(tower(pixels, grid_thw=grid).pooler_output, expected)


@torch.no_grad()
def test_tokens_are_scaled_alike(processor: Qwen2VLImageProcessor, tower: Qwen3_5VisionModel) -> None:
    pixels, grid = pixels_of(processor)
    before = tower(pixels, grid_thw=grid).pooler_output
    scale_tokens(tower, processor, 0, FEW)
    after = tower(pixels, grid_thw=grid).pooler_output
    assert float(after.norm(dim=-1).mean()) == pytest.approx(TOKEN_NORM, rel=0.1)
    torch.testing.assert_close(after / after.norm(), before / before.norm())


def test_letters_and_facts_are_learnt_alike_from_the_same_seed(processor: Qwen2VLImageProcessor) -> None:
    def learn() -> tuple[list[dict[str, float]], Tensor]:
        tower, logged = make_backbone(TOKENIZER).model.visual, []
        learn_letters(tower, processor, 3, 10, lambda _, values: logged.append(dict(values)), FEW)
        learn_facts(tower, processor, 3, 10, lambda _, values: logged.append(dict(values)), FEW, letter_weight=1.0)
        return logged, tower.merger.linear_fc2.weight.detach()

    (logged, weight), (again, same) = learn(), learn()
    assert logged == again
    assert torch.equal(weight, same)
    assert set(logged[0]) == {"letter_loss", "letters_f1", "digits_f1"}
    assert set(logged[1]) == {"fact_loss", "letters_f1", "digits_f1", "bands", "payments"}


def test_reading_gets_better(processor: Qwen2VLImageProcessor, tower: Qwen3_5VisionModel) -> None:
    losses: list[float] = []
    learn_letters(tower, processor, 0, 40, lambda _, values: losses.append(values["letter_loss"]), FEW)
    assert losses[-1] < 0.9 * losses[0]
