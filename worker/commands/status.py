"""`status`: which workers run, what waits, and how the batches stand."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from worker.commands.terminal import errors_on_one_line

if TYPE_CHECKING:
    from db.session import Database
    from worker.settings import Settings

MAX_BATCHES = 10


@errors_on_one_line
def status(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
    num_batches: Annotated[int, typer.Option("--batches", min=0, help="How many of the newest batches to list.")] = (
        MAX_BATCHES
    ),
) -> None:
    """Show the workers, how much waits for each variant, and the newest batches."""
    from worker.commands.connect import open_database

    with open_database() as (settings, database):
        facts = _collect(settings, database, num_batches)
    if as_json:
        import json

        typer.echo(json.dumps(facts, ensure_ascii=False, indent=2))
    else:
        _print(facts)


def _collect(settings: Settings, database: Database, num_batches: int) -> dict[str, Any]:
    from datetime import UTC, datetime

    from db import store
    from db.store_rates import count_waiting
    from worker.progress import describe_progress, rows_done

    with database.read() as session:
        workers = store.live_workers(session)
        waiting = count_waiting(session)
        history = store.list_history(session, kind="batch", limit=num_batches)
        progress = {item.id: store.batch_progress(session, item.id) for item in history}
    now = datetime.now(UTC)
    return {
        "workers": [
            {
                "name": worker.name,
                "variants": list(worker.variants),
                "state": worker.state,
                "message": worker.message,
                "device": worker.device,
                "pid": worker.pid,
                "heard_s_ago": round((now - worker.heartbeat_at).total_seconds(), 1),
                "releases": worker.releases,
            }
            for worker in workers
        ],
        "queues": {variant: waiting.get(variant, 0) for variant in dict.fromkeys([*settings.variants, *waiting])},
        "batches": [
            {
                "id": item.id,
                "name": item.title,
                "variants": list(item.variants),
                "created_at": item.created_at.isoformat(timespec="seconds"),
                "num_rows": progress[item.id].num_rows,
                "rows_done": rows_done(progress[item.id]),
                "failed": progress[item.id].failed,
                "is_finished": progress[item.id].is_finished,
                "is_cancelled": progress[item.id].is_cancelled,
                "progress": describe_progress(progress[item.id]),
            }
            for item in history
        ],
    }


def _print(facts: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console(highlight=False)

    def show(title: str, columns: list[str], rows: list[list[str]], empty: str) -> None:
        console.print(title, style="bold")
        if not rows:
            console.print(f"  {empty}", style="dim")
        else:
            table = Table(*columns, box=None, header_style="dim", pad_edge=True)
            for row in rows:
                table.add_row(*(Text(cell) for cell in row))
            console.print(table)
        console.print()

    workers = [
        [
            ", ".join(worker["variants"]),
            worker["state"],
            worker["device"],
            str(worker["pid"]),
            f"{worker['heard_s_ago']:.0f} s ago",
            worker["message"] or ("random weights" if _is_random(worker) else ""),
        ]
        for worker in facts["workers"]
    ]
    show("Workers", ["variants", "state", "device", "pid", "heard of", ""], workers, "none: the app is not running")
    show("Waiting", ["variant", "decisions"], [[name, f"{n:,}"] for name, n in facts["queues"].items()], "nothing")
    batches = [
        [str(batch["id"]), batch["name"], ", ".join(batch["variants"]), batch["created_at"], batch["progress"]]
        for batch in facts["batches"]
    ]
    show("Batches", ["id", "name", "variants", "created", "progress"], batches, "none")


def _is_random(worker: dict[str, Any]) -> bool:
    return any(release.get("is_random") for release in worker["releases"].values())
