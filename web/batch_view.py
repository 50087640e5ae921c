"""The panels of the Batch screen as HTML: preview, dry run, progress, failures, first answers, recent batches.

Takes plain data; knows no Gradio and no database. All cells, ids and names of a file are escaped here.
"""

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from clef_core.errors import count
from clef_core.tokens import render_value
from db.store_failures import Failure
from db.views import BatchProgress, BatchView, DecisionView, HistoryItem, ResultRow
from web.bars import format_probability, variant_label
from web.batch_form import PreviewRow
from web.frame import Fact, empty_html, facts_html, problems_html, time_html
from web.results import problem_of
from worker.progress import describe_duration, rows_done
from worker.tables import Plan, RowNote, Table

MAX_CELL_CHARS = 160
STATUS_WORDS = {
    "queued": "waiting",
    "running": "running",
    "done": "done",
    "failed": "failed",
    "cancelled": "cancelled",
}
EMPTY_PREVIEW = empty_html(
    "No file yet",
    "Upload a CSV or JSONL file, or take the example. The first rows appear here as the model would read them, "
    "with their tokens, and a dry run says what a run would cost.",
)


# ---- before a run --------------------------------------------------------------------------------------------------


def table_html(table: Table) -> str:
    """One line about the uploaded file."""
    bad = f", {table.num_bad_rows:,} of them unreadable" if table.num_bad_rows else ""
    return (
        f'<p class="hint"><b>{escape(table.path.name)}</b>: {count(table.num_rows, "row")}{bad}, '
        f"{count(len(table.columns), 'column')}</p>"
    )


def preview_html(rows: Sequence[PreviewRow], table: Table) -> str:
    """The first rows, each folded to one line; unfolded it shows the prompt."""
    items = "".join(_preview_row(row, is_open=place == 0) for place, row in enumerate(rows))
    return (
        f'<section class="panel"><h3 class="panel-title">First {count(len(rows), "row")} of {table.num_rows:,}, '
        f"as the model reads them</h3>{items}</section>"
    )


def _preview_row(preview: PreviewRow, *, is_open: bool) -> str:
    row = preview.row
    if row.submission is None:
        return (
            f'<div class="prow prow-bad"><div class="prow-head">{_row_name(row.number, row.external_id)}</div>'
            f"{problems_html(row.problems)}</div>"
        )
    images = len(row.submission.images)
    facts = [f"{preview.tokens:,} tokens" if preview.tokens is not None else "tokens unknown"]
    if images:
        facts.append(count(images, "image"))
    facts += [f"{question}: {label}" for question, label in (row.labels or {}).items()]
    prompt = f"<pre>{escape(preview.prompt)}</pre>" if preview.prompt is not None else ""
    return (
        f'<details class="prow"{" open" if is_open else ""}><summary><span class="prow-head">'
        f"{_row_name(row.number, row.external_id)}<span>{escape(' · '.join(facts))}</span></span>"
        f'<span class="prow-state">{escape(_short(row.submission.request.state))}</span></summary>{prompt}</details>'
    )


def _row_name(number: int | None, external_id: str | None) -> str:
    own = f' <span class="row-id">{escape(_short(external_id))}</span>' if external_id else ""
    return f"<b>Row {number}</b>{own}"


def plan_html(plan: Plan, warnings: Sequence[RowNote]) -> str:
    """What a run would do, in five numbers, and the rows that need a look."""
    unlike = f"{plan.num_distinct:,} different" if plan.num_distinct != plan.num_answerable else "all different"
    longest = f"in row {plan.longest_row}" if plan.longest_row is not None else ""
    time = describe_duration(plan.estimated_s) if plan.estimated_s is not None else "unknown"
    time_note = "per variant, side by side" if plan.estimated_s is not None else "until the first rows have run"
    facts = [
        Fact("Rows", f"{plan.num_answerable:,}", unlike),
        Fact("Bad rows", f"{plan.num_bad:,}", "get an error", plan.num_bad > 0),
        Fact("Too long", f"{plan.num_too_long:,}", f"over {plan.max_tokens:,} tokens", plan.num_too_long > 0),
        Fact("Longest", f"{plan.longest_tokens:,}", f"tokens, {longest}" if longest else "tokens"),
        Fact("Time", time, time_note),
    ]
    notes = [*plan.bad, *plan.too_long]
    return (
        f'<section class="panel"><h3 class="panel-title">Dry run</h3>{facts_html(facts)}'
        f"{_notes('These rows cannot be answered', notes)}{_notes('These labels fit no option', warnings)}</section>"
    )


def _notes(title: str, notes: Sequence[RowNote]) -> str:
    if not notes:
        return ""
    items = "".join(f"<li><b>Row {note.number}</b> {escape(note.message)}</li>" for note in notes[:10])
    more = f"<li>and {len(notes) - 10} more</li>" if len(notes) > 10 else ""
    return f'<details class="more"><summary>{escape(title)}</summary><ul class="notes">{items}{more}</ul></details>'


# ---- a run ---------------------------------------------------------------------------------------------------------


def batch_head_html(batch: BatchView) -> str:
    """What this batch is."""
    variants = " and ".join(variant_label(variant) for variant in batch.variants)
    questions = ", ".join(batch.questions) if batch.questions else "of the rows themselves"
    return (
        f'<div class="batch-head"><h2>{escape(batch.name)}</h2>'
        f"<p>Batch {batch.id} · {escape(variants)} · questions: {escape(_short(questions))} · "
        f"{time_html(batch.created_at)}</p></div>"
    )


def progress_html(batch: BatchView, progress: BatchProgress) -> str:
    """Bar and numbers. With several variants a row has several answers, and they are not made in step."""
    done, total = progress.done + progress.failed, progress.num_decisions
    share = 100 * done / total if total else 0.0
    word, note = _stage(batch, progress)
    num_variants = len(batch.variants)
    noun = "Answers" if num_variants > 1 else "Rows"
    of = f"of {total:,}" + (f" ({progress.num_rows:,} rows, {num_variants} variants)" if num_variants > 1 else "")
    facts = [
        Fact(noun, f"{done:,}", of),
        *(_end_facts(batch, progress) if progress.is_finished else _running_facts(progress)),
        Fact("Failed", f"{progress.failed:,}", noun.lower(), progress.failed > 0),
    ]
    style = "bar-done" if word == "Done" else "bar-stopped" if word == "Cancelled" else ""
    bar = (
        f'<div class="progress-track {style}" role="progressbar" aria-label="{noun}" aria-valuemin="0" '
        f'aria-valuemax="{total}" aria-valuenow="{done}"><i style="width:{share:.2f}%"></i></div>'
    )
    return (
        f'<section class="panel progress" aria-live="polite"><div class="progress-head"><strong>{escape(word)}</strong>'
        f"<span>{escape(note)}</span><b>{share:.0f} %</b></div>{bar}{facts_html(facts)}</section>"
    )


def _running_facts(progress: BatchProgress) -> list[Fact]:
    rate = f"{progress.rows_per_s:.3g}" if progress.rows_per_s else "–"
    left = describe_duration(progress.eta_s) if progress.eta_s is not None else "–"
    return [Fact("Speed", rate, "rows per second"), Fact("Time left", left, "at this speed")]


def _end_facts(batch: BatchView, progress: BatchProgress) -> list[Fact]:
    seconds = (batch.finished_at - batch.created_at).total_seconds() if batch.finished_at else 0.0
    rows = rows_done(progress)
    rate = f"{rows / seconds:.3g}" if seconds else "–"
    return [Fact("Speed", rate, "rows per second, overall"), Fact("Time", describe_duration(seconds), "in all")]


def _stage(batch: BatchView, progress: BatchProgress) -> tuple[str, str]:
    if progress.is_cancelled:
        if progress.running:
            return "Stopping", f"{count(progress.running, 'answer')} under way will be kept"
        return "Cancelled", f"{count(progress.cancelled, 'answer')} not made; Resume goes on where it stopped"
    if progress.is_finished:
        return "Done", "every row has its answer" if not progress.failed else "some rows failed, see below"
    if batch.stored_at is None:
        return "Running", "rows are still being stored"
    if not progress.running and not progress.done and not progress.failed:
        return "Waiting", "no worker has taken a row yet"
    return "Running", ""


def failures_html(failures: Sequence[Failure], num_failed: int) -> str:
    """The first failures with their reasons."""
    if not failures:
        return ""
    items = "".join(
        f'<li><a href="/?request={failure.request_id}">Row {failure.row_number}</a> '
        f'<span class="v-small">{escape(variant_label(failure.variant))}</span> '
        f"{escape('; '.join(str(problem_of(item)) for item in failure.error or []))}</li>"
        for failure in failures
    )
    more = f"<li>and {num_failed - len(failures):,} more in the download</li>" if num_failed > len(failures) else ""
    title = '<h3 class="panel-title">Failures so far</h3>'
    return f'<section class="panel">{title}<ul class="notes">{items}{more}</ul></section>'


def answers_table_html(rows: Sequence[ResultRow], variants: Sequence[str]) -> str:
    """The first rows with their answers; a row opens as a decision with its bars."""
    if not rows:
        return ""
    questions = list(dict.fromkeys(question for row in rows for question in row.request.questions))
    head = "".join(f'<th scope="col">{escape(_short(question))}</th>' for question in questions)
    body = "".join(
        f'<tr><th scope="row"><a href="/?request={row.request.id}">{row.request.row_number}</a></th>'
        f'<td class="cell-state">{escape(_short(row.request.state))}</td>'
        f"{''.join(_answer_cell(row, question, variants) for question in questions)}</tr>"
        for row in rows
    )
    return (
        f'<section class="panel"><h3 class="panel-title">First {count(len(rows), "row")}</h3>'
        f'<div class="table-scroll" tabindex="0"><table class="plain"><thead><tr><th scope="col">Row</th>'
        f'<th scope="col">State</th>{head}</tr></thead><tbody>{body}</tbody></table></div></section>'
    )


def _answer_cell(row: ResultRow, question: str, variants: Sequence[str]) -> str:
    answers = [
        (variant, answer)
        for variant in variants
        if (answer := ((_decision(row, variant) or _NO_ANSWERS) or {}).get(question)) is not None
    ]
    if not answers:
        failed = any(decision.status == "failed" for decision in row.decisions.values())
        return f'<td class="{"cell-failed" if failed else "cell-none"}">{"failed" if failed else "–"}</td>'
    texts = [_answer_text(answer) for _, answer in answers]
    if len({text for text, _ in texts}) == 1:
        text, sure = texts[0]
        return f'<td>{escape(text)} <span class="sure">{sure}</span></td>'
    parts = "".join(
        f'<div><span class="v-small">{escape(variant_label(variant))}</span> {escape(text)} '
        f'<span class="sure">{sure}</span></div>'
        for (variant, _), (text, sure) in zip(answers, texts, strict=True)
    )
    return f'<td class="cell-differs">{parts}</td>'


_NO_ANSWERS: Mapping[str, Any] = {}


def _decision(row: ResultRow, variant: str) -> Mapping[str, Any] | None:
    decision: DecisionView | None = row.decisions.get(variant)
    return decision.answers if decision is not None else None


def _answer_text(answer: Mapping[str, Any]) -> tuple[str, str]:
    """The answer in a word, and how sure; the second is markup."""
    if answer["type"] == "choice":
        return answer["choice"], format_probability(answer["confidence"])
    if answer["type"] == "noul":
        return ("true" if answer["noul"] >= 0.5 else "false"), format_probability(answer["noul"])
    probabilities: Mapping[str, float] = answer["probabilities"]
    return max(probabilities, key=probabilities.__getitem__), f"expected {answer['score']:.2f}"


# ---- lists ---------------------------------------------------------------------------------------------------------


def recent_html(items: Sequence[HistoryItem]) -> str:
    """Recent batches as links."""
    if not items:
        return empty_html("No batch yet", "Every batch you run stays here, with its results.")
    rows = "".join(
        f'<li><a href="/batch?batch={item.id}"><span class="h-title">{escape(_short(item.title))}</span>'
        f'<span class="h-meta">{escape(item.summary)}</span>{status_html(item.status)}'
        f"{time_html(item.created_at)}</a></li>"
        for item in items
    )
    return f'<h3 class="panel-title">Recent batches</h3><ul class="links">{rows}</ul>'


def status_html(status: str) -> str:
    """A status as a small coloured word."""
    return f'<span class="status status-{escape(status)}">{escape(STATUS_WORDS.get(status, status))}</span>'


def _short(value: Any) -> str:
    text = " ".join(("" if value is None else render_value(value)).split())
    return text if len(text) <= MAX_CELL_CHARS else text[:MAX_CELL_CHARS] + "…"
