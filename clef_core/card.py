"""The numbers that the model card gives for the 27B. They are the card's, not measured by this program.

One MI355X, n = 300 with seed 0, Transformers 5.8.1, Quark 0.13; perplexity with vLLM 0.21.
"""

from dataclasses import dataclass

CARD_CONDITIONS = "27B, one MI355X, n = 300 with seed 0, Transformers 5.8.1, Quark 0.13"


@dataclass(frozen=True)
class CardResult:
    """One row of the card's table: shares between 0 and 1, KL(BF16‖MXFP4) in nats; None where the card has none."""

    title: str
    left_accuracy: float | None
    right_accuracy: float | None
    agreement: float
    kl: float


CARD_RESULTS: dict[str, CardResult] = {
    "banking77": CardResult("BANKING77 test, 77-way choice", 0.940, 0.933, 0.980, 0.022),
    "clinc150": CardResult("CLINC150 plus test, 151-way choice with out-of-scope", 0.967, 0.967, 0.987, 0.018),
    "receipts": CardResult("receipt image, 2 noul + one 3-way choice", None, None, 1.0, 0.0008),
}


@dataclass(frozen=True)
class CardProbability:
    """One answer of the card's example: the probability of the right option in both variants."""

    question_id: str
    option_id: str
    left: float
    right: float


CARD_EXAMPLE = (
    CardProbability("department", "technical", 0.917, 0.918),
    CardProbability("urgency", "2", 0.862, 0.920),
    CardProbability("outage", "true", 0.895, 0.841),
)

CARD_PERPLEXITY = (9.974, 10.505)
"""WikiText-2, 64 windows of 1,024 tokens, BF16 and MXFP4; vLLM 0.21."""
