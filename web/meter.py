"""The line under the state: what it is read as, and how many of the allowed tokens the request uses."""

from html import escape

from web.draft import Meter


def meter_html(words: str, meter: Meter | None, max_tokens: int) -> str:
    """One line with a thin bar.

    Args:
        words: what the state is read as; plain text.
        meter: `None` when no tokenizer is at hand.
    """
    reading = f'<span class="reading">{escape(words)}</span>'
    if meter is None:
        return f'<div class="meter">{reading}</div>'
    if meter.count is None:
        tokens, parts = meter.state_tokens, "state alone; the questions are not complete yet"
    else:
        tokens = meter.count.total
        parts = f"state {meter.count.state:,} · questions {meter.count.questions:,}"
        if meter.count.media:
            parts += f" · images {meter.count.media:,}"
    share = min(1.0, tokens / max_tokens)
    style = "meter over" if tokens > max_tokens else "meter"
    return (
        f'<div class="{style}">{reading}'
        f'<span class="tokens" title="{parts}"><b>{tokens:,}</b> of {max_tokens:,} tokens</span>'
        f'<div class="meter-track" aria-hidden="true"><i style="width:{100 * share:.2f}%"></i></div>'
        f'<span class="meter-parts">{parts}</span></div>'
    )
