"""The tables that `evaluate` prints: the model card's columns with intervals and floor, and the card's own numbers.

Pure: takes reports and gives Markdown. Surprising: the card's numbers are of other weights and another machine, so they
stand in a table of their own and are never subtracted from ours.
"""

from collections.abc import Mapping

from clef_core.card import CARD_CONDITIONS, CARD_EXAMPLE, CARD_PERPLEXITY, CARD_RESULTS
from clef_core.comparison_report import Report, SummaryNumbers
from clef_core.tasks import TASKS
from db.comparison_views import ComparisonView
from worker.comparison_tables import accuracy, escape, interval, markdown_table, percent, plus_minus, verdict

NONE = "–"


def evaluation_markdown(results: Mapping[str, tuple[ComparisonView, Report]]) -> str:
    """Both tables for the tasks that were run.

    Args:
        results: task name → its comparison, all of the same two variants.
    """
    if not results:
        return ""
    first = next(iter(results.values()))[0]
    left, right = escape(first.left_variant), escape(first.right_variant)
    parts = [
        _measured(results, left, right),
        _conditions(results),
        f"The model card's own numbers ({CARD_CONDITIONS}); theirs, not measured here:",
        _cards(list(results)),
    ]
    return "\n\n".join(parts) + "\n"


def _measured(results: Mapping[str, tuple[ComparisonView, Report]], left: str, right: str) -> str:
    header = [
        "task", "n", f"{left} accuracy (95 % CI)", f"{right} accuracy (95 % CI)", "top-1 agreement (95 % CI)",
        f"mean KL({left}‖{right})", f"floor: {left} against itself", "floor: mean KL", "difference",
    ]  # fmt: skip
    return markdown_table(
        header, [_measured_row(TASKS[name].title, report.overall) for name, (_, report) in results.items()]
    )


def _measured_row(title: str, found: SummaryNumbers) -> list[str]:
    labelled, floor = found.labelled, found.floor
    return [
        title,
        f"{found.n:,}",
        NONE if labelled is None else accuracy(labelled.left),
        NONE if labelled is None else accuracy(labelled.right),
        f"{percent(found.agreement)} ({interval(found.agreement_low, found.agreement_high)})",
        plus_minus(found.kl_mean, found.kl_se),
        NONE if floor is None else percent(floor.agreement),
        NONE if floor is None else plus_minus(floor.kl_mean, floor.kl_se),
        verdict(found),
    ]


def _conditions(results: Mapping[str, tuple[ComparisonView, Report]]) -> str:
    view = next(iter(results.values()))[0]
    lines = []
    for run in (view.left_run, view.right_run):
        if run is not None:
            threads = f", {run.threads} threads" if run.threads else ""
            lines.append(f"- {run.variant}: release {run.release_checksum[:12]}, {run.dtype}, {run.device}{threads}")
    lines += [f"- {TASKS[name].title}: {TASKS[name].source}; {of.name}" for name, (of, _) in results.items()]
    lines.append("- n counts answers (records × questions); KL in nats, mean ± standard error; intervals are Wilson's")
    if random := view.parameters.get("random_releases"):
        lines.append(f"- random weights, the figures say nothing about Clef: {', '.join(random)}")
    return "\n".join(lines)


def _cards(names: list[str]) -> str:
    header = ["task", "BF16", "MXFP4", "top-1 agreement", "mean KL(BF16‖MXFP4)"]
    rows = []
    for name in names:
        if (card := CARD_RESULTS.get(name)) is not None:
            shares = [NONE if s is None else percent(s) for s in (card.left_accuracy, card.right_accuracy)]
            rows.append([card.title, *shares, f"{100 * card.agreement:.3g} %", f"{card.kl:g}"])
    if "card" in names:
        rows += [
            [
                f"card example: p({one.option_id}) of {one.question_id}",
                f"{one.left:.3f}",
                f"{one.right:.3f}",
                NONE,
                NONE,
            ]
            for one in CARD_EXAMPLE
        ]
    bf16, mxfp4 = CARD_PERPLEXITY
    rows.append(["WikiText-2 perplexity, 64 × 1,024 tokens (vLLM 0.21)", f"{bf16:.3f}", f"{mxfp4:.3f}", NONE, NONE])
    return markdown_table(header, rows)
