"""Teach the tower of clef-nano to read large print: first letters, then what a receipt's total and payment say.

The tower starts anew, with a patch embedding that whitens: the first principal components of drawn pictures' patches,
each scaled to the same variance. With that, and with Muon in place of AdamW, it needs a fifth of the steps.
"""

import math
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor, nn
from transformers.models.qwen2_vl.image_processing_qwen2_vl import Qwen2VLImageProcessor
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5VisionModel

from scripts.draw_receipts import BANDS
from training.architecture import HIDDEN
from training.letters import FACTS, LETTERS, NUM_CLASSES, PATCHES_PER_TOKEN, Paper, box_targets, receipt_paper, sheet
from training.pictures import Pictures, drawn_receipt
from training.trainee import WEIGHT_DECAY, adamw, change

MUON_RATE, ADAMW_RATE = 0.02, 2e-3
WARM_UP_STEPS = 50
SHEET_SHARE = 0.8
WHITENING_EPSILON = 1e-3
FIRST_BIAS = -4.0
"""Of every letter: most patches have none."""

FACT_RATE, FACT_WEIGHT = 0.01, 10.0
NEW_RECEIPTS = 2
"""How many of the receipts at hand are drawn anew at each step."""

TOKEN_NORM = 4.0
"""Of an image token where the language model gets it; a text token's embedding has 1."""


@dataclass(frozen=True)
class Amounts:
    """How many papers the lessons take.

    papers: drawn once for the letters, and then met cut at other edges. receipts: at hand for the facts.
    together: in a batch. held_out: to measure letters, and three times as many for facts. whitened: pictures whose
    patches the tower's embedding whitens. log_every: steps.
    """

    papers: int = 1_200
    receipts: int = 400
    together: int = 8
    held_out: int = 32
    whitened: int = 60
    log_every: int = 500


AMOUNTS = Amounts()


class Reader(nn.Linear):
    """Says from an image token what its patches hold; thrown away once the tower has learnt to tell it."""

    def __init__(self, class_weights: Tensor) -> None:
        super().__init__(HIDDEN, PATCHES_PER_TOKEN * len(class_weights))
        nn.init.constant_(self.bias, FIRST_BIAS)
        self.class_weights = class_weights

    def loss(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Weighted binary cross-entropy of all classes of a token's patches, the mean over tokens."""
        mean = F.binary_cross_entropy_with_logits(logits, targets, self.class_weights)
        return mean * logits.shape[1:].numel()


def tower_optimizers(tower: nn.Module, muon_rate: float, others: Sequence[nn.Parameter]) -> list[torch.optim.Optimizer]:
    """Muon for the tower's matrices, AdamW for its other parameters and those of its reader."""
    matrices = {name: one for name, one in tower.named_parameters() if one.dim() == 2 and "embed" not in name}
    rest = [one for name, one in tower.named_parameters() if name not in matrices]
    return [muon(matrices.values(), muon_rate), adamw([([*rest, *others], ADAMW_RATE, WEIGHT_DECAY)])]


def muon(matrices: Iterable[nn.Parameter], rate: float) -> torch.optim.Optimizer:
    groups = [{"params": list(matrices), "share": rate}]
    return torch.optim.Muon(groups, lr=rate, weight_decay=WEIGHT_DECAY, momentum=0.95)


def rate_share(step: int, steps: int) -> float:
    """The share of the optimizers' rates: linear warm-up, then a cosine down to nothing."""
    return min(1.0, (step + 1) / WARM_UP_STEPS) * 0.5 * (1 + math.cos(math.pi * step / steps))


@contextmanager
def linear_patches(tower: Qwen3_5VisionModel) -> Iterator[None]:
    """Embed patches by a matrix product, which is what that convolution is: its gradient took most of a step."""
    embedding = tower.patch_embed
    original = embedding.forward

    def embed(patches: Tensor) -> Tensor:
        weight = embedding.proj.weight.flatten(1)
        return F.linear(patches.view(-1, weight.shape[1]), weight, embedding.proj.bias)

    embedding.forward = embed
    try:
        yield
    finally:
        embedding.forward = original


@torch.no_grad()
def start_anew(tower: Qwen3_5VisionModel, pixels: Tensor) -> None:
    """Give the tower fresh weights, and a patch embedding that whitens `pixels`, float32 (patches, values)."""
    for name, parameter in tower.named_parameters():
        if "pos_embed" in name:
            parameter.normal_(0.0, 0.02)
        elif parameter.dim() >= 2:
            parameter.normal_(0.0, parameter[0].numel() ** -0.5)
        else:
            parameter.fill_(0.0 if name.endswith("bias") else 1.0)
    weight = tower.patch_embed.proj.weight  # (out, colours, frames, rows, columns); a picture is its own second frame
    frame = pixels.view(-1, *weight.shape[1:])[:, :, 0].flatten(1)
    mean = frame.mean(0)
    variances, components = torch.linalg.eigh((frame - mean).T.cov())
    kept = slice(-weight.shape[0], None)
    whitening = (components[:, kept] / (variances[kept] + WHITENING_EPSILON).sqrt()).T
    shape = (weight.shape[0], weight.shape[1], 1, *weight.shape[3:])
    weight.copy_(whitening.view(shape).expand_as(weight) / weight.shape[2])
    tower.patch_embed.proj.bias.copy_(-whitening @ mean)


@dataclass(frozen=True)
class Batch:
    """Pixel values (patches, values) of some papers, their grids (papers, 3), and what their tokens' patches hold."""

    pixels: Tensor
    grid: Tensor
    targets: Tensor


@torch.no_grad()
def scale_tokens(
    tower: Qwen3_5VisionModel, processor: Qwen2VLImageProcessor, seed: int, amounts: Amounts = AMOUNTS
) -> None:
    """Bring the tower's tokens to `TOKEN_NORM`: letters leave them so long that no later layer can add much."""
    batch = _batch(_receipts(f"{seed} scaled", amounts.held_out), processor, has_facts=False)
    factor = TOKEN_NORM / tower(batch.pixels, grid_thw=batch.grid).pooler_output.norm(dim=-1).mean()
    tower.merger.linear_fc2.weight.mul_(factor)
    tower.merger.linear_fc2.bias.mul_(factor)


Log = Callable[[int, Mapping[str, float]], None]


def learn_letters(
    tower: Qwen3_5VisionModel,
    processor: Qwen2VLImageProcessor,
    seed: int,
    steps: int,
    log: Log,
    amounts: Amounts = AMOUNTS,
) -> None:
    """Train the tower from fresh weights on papers whose letters are known; whole, as it takes half an hour."""
    rng = random.Random(f"{seed} letters")
    torch.manual_seed(seed)
    pictures = Pictures(f"{seed} whitened")
    seen = [sheet(rng).picture for _ in range(amounts.whitened // 3)]
    seen += [image for _ in range(2 * amounts.whitened // 3) for image in pictures.draw().record.images]
    start_anew(tower, _pixels(processor, seen)[0])
    reader = Reader(torch.ones(NUM_CLASSES))
    measured = _batch(_receipts(f"{seed} held-out letters", amounts.held_out), processor, has_facts=False)
    papers = [_paper(rng) for _ in range(amounts.papers)]

    def batches() -> Iterator[Batch]:
        while True:
            cut = [rng.choice(papers).cut(rng) for _ in range(amounts.together)]
            yield _batch(cut, processor, has_facts=False)

    @torch.no_grad()
    def logged(step: int, loss: float) -> None:
        log(step, {"letter_loss": loss, **_letter_score(_logits(tower, reader, measured), measured)})

    _learn(tower, reader, batches(), steps, MUON_RATE, amounts.log_every, logged)


def learn_facts(
    tower: Qwen3_5VisionModel,
    processor: Qwen2VLImageProcessor,
    seed: int,
    steps: int,
    log: Log,
    amounts: Amounts = AMOUNTS,
    *,
    letter_weight: float,
) -> None:
    """Go on with receipts alone, whose total and payment are known, at their places.

    With letters of weight 1 they are read ever better; with letters of none, the facts come to fill the tokens, and the
    language model finds them there within tens of steps instead of hundreds.
    """
    rng = random.Random(f"{seed} facts")
    torch.manual_seed(seed)
    reader = Reader(torch.tensor([letter_weight] * NUM_CLASSES + [FACT_WEIGHT] * len(FACTS)))
    measured = _batch(_receipts(f"{seed} held-out facts", 3 * amounts.held_out), processor, has_facts=True)
    papers = [receipt_paper(drawn_receipt(rng)) for _ in range(amounts.receipts)]

    def batches() -> Iterator[Batch]:
        while True:
            for _ in range(NEW_RECEIPTS):
                papers[rng.randrange(amounts.receipts)] = receipt_paper(drawn_receipt(rng))
            cut = [paper.cut(rng) for paper in rng.sample(papers, amounts.together)]
            yield _batch(cut, processor, has_facts=True)

    @torch.no_grad()
    def logged(step: int, loss: float) -> None:
        logits = _logits(tower, reader, measured)
        log(step, {"fact_loss": loss, **_letter_score(logits, measured), **_fact_score(logits, measured)})

    _learn(tower, reader, batches(), steps, FACT_RATE, amounts.log_every, logged)


def _learn(
    tower: Qwen3_5VisionModel,
    reader: Reader,
    batches: Iterator[Batch],
    steps: int,
    muon_rate: float,
    log_every: int,
    log: Callable[[int, float], None],
) -> None:
    parameters = [*tower.parameters(), *reader.parameters()]
    optimizers = tower_optimizers(tower, muon_rate, list(reader.parameters()))
    losses: list[float] = []
    with linear_patches(tower):
        for step, batch in zip(range(steps), batches, strict=False):
            logits = _logits(tower, reader, batch)
            loss = reader.loss(logits, batch.targets)
            torch.autograd.backward(loss)
            change(parameters, optimizers, rate_share(step, steps))
            losses.append(loss.item())
            if len(losses) == log_every or step + 1 == steps:
                log(step + 1, round(sum(losses) / len(losses), 4))
                losses.clear()


def _receipts(seed: str, num: int) -> list[Paper]:
    rng = random.Random(seed)
    return [receipt_paper(drawn_receipt(rng)) for _ in range(num)]


def _paper(rng: random.Random) -> Paper:
    return sheet(rng) if rng.random() < SHEET_SHARE else receipt_paper(drawn_receipt(rng))


def _pixels(processor: Qwen2VLImageProcessor, pictures: Sequence[Image.Image]) -> tuple[Tensor, Tensor]:
    processed = processor(images=list(pictures), return_tensors="pt")
    return processed["pixel_values"], processed["image_grid_thw"]


def _batch(papers: Sequence[Paper], processor: Qwen2VLImageProcessor, *, has_facts: bool) -> Batch:
    """`has_facts`: the targets end with the facts' classes."""
    pixels, grid = _pixels(processor, [paper.picture for paper in papers])
    targets = []
    for paper, (rows, columns) in zip(papers, grid[:, 1:].tolist(), strict=True):
        parts = [box_targets(paper.letters, NUM_CLASSES, rows, columns)]
        if has_facts:
            parts.append(box_targets(paper.facts, len(FACTS), rows, columns))
        targets.append(torch.cat(parts, -1))
    return Batch(pixels, grid, torch.cat(targets))


def _logits(tower: Qwen3_5VisionModel, reader: Reader, batch: Batch) -> Tensor:
    """float32 (tokens, PATCHES_PER_TOKEN, classes)."""
    with torch.autocast("cpu", torch.bfloat16):
        logits: Tensor = reader(tower(batch.pixels, grid_thw=batch.grid).pooler_output)
    return logits.float().view(len(logits), PATCHES_PER_TOKEN, -1)


def _letter_score(logits: Tensor, batch: Batch) -> dict[str, float]:
    """F1 of all letters and of digits."""
    said, true = logits > 0, batch.targets > 0
    result = {}
    for name, num in (("letters_f1", NUM_CLASSES), ("digits_f1", LETTERS.index("a"))):
        right = int((said & true)[..., :num].sum())
        result[name] = round(2 * right / max(1, int(said[..., :num].sum()) + int(true[..., :num].sum())), 4)
    return result


def _fact_score(logits: Tensor, batch: Batch) -> dict[str, float]:
    """Share of receipts whose band and whose payment is the one said most surely anywhere."""
    lengths = (batch.grid.prod(-1) // PATCHES_PER_TOKEN).tolist()
    said, true = (
        torch.stack([one.amax((0, 1)) for one in torch.split(of_tokens[..., NUM_CLASSES:], lengths)])
        for of_tokens in (logits, batch.targets)
    )
    parts = {"bands": slice(0, len(BANDS)), "payments": slice(len(BANDS), None)}
    return {
        name: round((said[:, part].argmax(-1) == true[:, part].argmax(-1)).float().mean().item(), 4)
        for name, part in parts.items()
    }
