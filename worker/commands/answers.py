"""Answers for a person at a terminal: per question its options with a bar and a number for each variant.

Surprising: texts of users (ids, options) are printed as plain text, never as rich's markup or as control characters.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from clef_core.schema import AnyQuestion
from db.views import DecisionView

BAR_CELLS = 24
MAX_OPTIONS = 8  # of one question; a choice may have 255
MAX_OPTION_CHARS = 40
_EIGHTHS = " ▏▎▍▌▋▊▉"


def print_answers(questions: Mapping[str, AnyQuestion], decisions: Sequence[DecisionView]) -> None:
    """Print the decisions that have an answer, side by side."""
    answered = [decision for decision in decisions if decision.log_probs is not None]
    console = Console(highlight=False)
    for question_id, question in questions.items():
        if answered:
            console.print(_heading(question_id, question, answered))
            console.print(_options(question_id, answered))
            console.print()
    for decision in answered:
        tokens = f"{decision.input_tokens:,} tokens"
        console.print(
            f"{decision.variant}: decision {decision.id}, {tokens}, {decision.latency_ms:.0f} ms", style="dim"
        )


def _heading(question_id: str, question: AnyQuestion, decisions: Sequence[DecisionView]) -> Text:
    heading = Text(printable(question_id), style="bold")
    for decision in decisions:
        answer = (decision.answers or {})[question_id]
        value = answer[answer["type"]]
        name = f"{decision.variant} " if len(decisions) > 1 else ""
        confidence = f", confidence {answer['confidence']:.3f}" if "confidence" in answer else ""
        heading.append(f"  {name}", style="not bold dim")
        heading.append(printable(value) if isinstance(value, str) else f"{value:.4g}", style="bold cyan")
        heading.append(f" ({question.type}{confidence})", style="not bold dim")
    return heading


def _options(question_id: str, decisions: Sequence[DecisionView]) -> Table:
    probabilities = [
        {option: math.exp(value) for option, value in (decision.log_probs or {})[question_id].items()}
        for decision in decisions
    ]
    best = sorted(probabilities[0], key=lambda option: -max(of[option] for of in probabilities))
    shown = set(best[:MAX_OPTIONS])
    table = Table.grid(padding=(0, 2))
    if len(decisions) > 1:
        table.add_row("", *(Text(decision.variant, style="dim") for decision in decisions))
    for option in probabilities[0]:
        if option in shown:
            cells = [Text(f"{_bar(of[option])} {of[option]:.3f}") for of in probabilities]
            table.add_row(Text("  " + printable(option)), *cells)
    if len(best) > len(shown):
        table.add_row(Text(f"  … and {len(best) - len(shown)} less likely options", style="dim"))
    return table


def _bar(share: float) -> str:
    eighths = round(share * BAR_CELLS * 8)
    full, rest = divmod(eighths, 8)
    return ("█" * full + (_EIGHTHS[rest] if rest else "")).ljust(BAR_CELLS)


def printable(text: str) -> str:
    """A text of users as it may be shown in a terminal: no control characters, and not too long."""
    kept = "".join(character if character.isprintable() else "\N{REPLACEMENT CHARACTER}" for character in text)
    return kept if len(kept) <= MAX_OPTION_CHARS else kept[:MAX_OPTION_CHARS] + "…"
