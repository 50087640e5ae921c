"""From log-probabilities to the answers a caller reads, in the SystemOne response shape.

Rounding happens here and only here (to 4 decimals, unless a caller asks for none); what is stored and compared stays
unrounded. Knows nothing of the model: it takes natural log-probabilities per question and option.

Surprising: a choice's probabilities come back in the order of the request, although the model reads its options
sorted, and of options with equal probability the first of the request is chosen.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from clef_core.errors import EngineError
from clef_core.schema import AnyQuestion, ChoiceQuestion, NoulQuestion, options

PROBABILITY_DECIMALS = 4

Confidence = Literal["top", "typesafe"]


def build_answers(
    questions: Mapping[str, AnyQuestion],
    log_probs: Mapping[str, Mapping[str, float]],
    confidence: Confidence = "top",
    *,
    decimals: int | None = PROBABILITY_DECIMALS,
) -> dict[str, dict[str, Any]]:
    """Answer every question from its options' natural log-probabilities.

    Args:
        confidence: `top` is the largest probability, `typesafe` TypeSafe's: it is 0 for a uniform distribution.
        decimals: to round numbers to; None keeps them as they are, for files that have their own rounding.

    Raises:
        EngineError: an option has no log-probability, or one that is not finite.
    """
    return {
        id: _build_answer(question, _probabilities(id, question, log_probs), confidence, decimals)
        for id, question in questions.items()
    }


def build_response(
    model: str,
    variant: str | None,
    questions: Mapping[str, AnyQuestion],
    log_probs: Mapping[str, Mapping[str, float]],
    input_tokens: int,
    truncated_tokens: int = 0,
    confidence: Confidence = "top",
) -> dict[str, Any]:
    """The whole response body: `model` is echoed as asked, `x_variant` says which variant answered.

    Raises:
        EngineError: as `build_answers`.
    """
    response: dict[str, Any] = {
        "model": model,
        "answers": build_answers(questions, log_probs, confidence),
        "usage": {"input_tokens": input_tokens, "output_tokens": 0},
    }
    if variant is not None:
        response["x_variant"] = variant
    if truncated_tokens > 0:
        response["x_truncated_tokens"] = truncated_tokens
    return response


def _probabilities(id: str, question: AnyQuestion, log_probs: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
    """The probabilities by option id, in the order of the request."""
    of_question = log_probs.get(id, {})
    ids = list(question.criteria) if isinstance(question, ChoiceQuestion) else [o.id for o in options(question)]
    if of_question.keys() != set(ids):
        raise EngineError(f"The model answered {len(of_question)} options of question {id!r}, which has {len(ids)}.")
    if not all(math.isfinite(of_question[option_id]) for option_id in ids):
        raise EngineError(f"The model's answer to question {id!r} is not a number.")
    return {option_id: math.exp(of_question[option_id]) for option_id in ids}


def _build_answer(
    question: AnyQuestion, probabilities: Mapping[str, float], confidence: Confidence, decimals: int | None
) -> dict[str, Any]:
    def rounded(value: float) -> float:
        return value if decimals is None else round(value, decimals)

    if isinstance(question, NoulQuestion):
        return {"type": "noul", "noul": rounded(probabilities["true"])}
    shown = {option_id: rounded(p) for option_id, p in probabilities.items()}
    values = list(probabilities.values())
    top = values.index(max(values))
    if isinstance(question, ChoiceQuestion):
        return {
            "type": "choice",
            "choice": list(probabilities)[top],
            "confidence": rounded(values[top] if confidence == "top" else _choice_confidence(values)),
            "probabilities": shown,
        }
    return {
        "type": "score",
        "score": rounded(sum(level * p for level, p in enumerate(values))),
        "confidence": rounded(values[top] if confidence == "top" else _score_confidence(values, top)),
        "legend": {str(level): meaning for level, meaning in enumerate(question.criteria)},
        "probabilities": shown,
    }


def _choice_confidence(values: Sequence[float]) -> float:
    uniform = 1 / len(values)
    return (max(values) - uniform) / (1 - uniform)


def _score_confidence(values: Sequence[float], mode: int) -> float:
    distance = sum(abs(level - mode) * p for level, p in enumerate(values))
    uniform_distance = sum(abs(level - mode) for level in range(len(values))) / len(values)
    return 1 - distance / uniform_distance
