"""What runs at the moment: `GET /v1/models` and `GET /healthz`, read from the rows that workers keep of themselves."""

from collections.abc import Sequence
from typing import Any, Literal

from fastapi.responses import JSONResponse
from redis.exceptions import RedisError
from sqlalchemy.exc import SQLAlchemyError

from db import store
from db.views import WorkerView
from worker.submit import Submitter

VariantState = Literal["ready", "loading", "failed", "absent"]


class StatusRoutes:
    """The two routes, and what they read."""

    def __init__(self, submitter: Submitter) -> None:
        self.submitter = submitter

    def models(self) -> dict[str, Any]:
        """Every name that `model` may take, and what the workers say of the release behind it."""
        settings = self.submitter.settings
        with self.submitter.database.read() as session:
            workers = store.live_workers(session)
        return {
            "default_variant": settings.default_variant,
            "models": [
                {
                    "id": f"clef-{variant}",
                    "variant": variant,
                    "aliases": ["clef", "jev-latest"] if variant == settings.default_variant else [],
                    **variant_state(variant, workers),
                    **variant_facts(variant, workers),
                }
                for variant in settings.variants
            ],
        }

    def health(self) -> JSONResponse:
        """200 when a request would be answered, 503 when not, with the part that is missing."""
        try:
            with self.submitter.database.read() as session:
                workers = store.live_workers(session)
                queued = {variant: store.queue_depth(session, variant) for variant in self.submitter.settings.variants}
        except SQLAlchemyError:
            return JSONResponse({"status": "unhealthy", "database": "unreachable"}, 503)
        variants = {variant: {**variant_state(variant, workers), "queued": queued[variant]} for variant in queued}
        is_redis_up = self.is_redis_up()
        states = {facts["state"] for facts in variants.values()}
        status = "ok"
        if not is_redis_up or not states <= {"ready", "loading"}:
            status = "unhealthy"
        elif "loading" in states:
            status = "starting"
        body = {
            "status": status,
            "database": "ok",
            "redis": "ok" if is_redis_up else "unreachable",
            "variants": variants,
        }
        return JSONResponse(body, 200 if status == "ok" else 503)

    def is_redis_up(self) -> bool:
        try:
            return bool(self.submitter.redis.ping())
        except (RedisError, OSError):
            return False


def variant_state(variant: str, workers: Sequence[WorkerView]) -> dict[str, Any]:
    """What a variant can do at the moment, and how many workers are ready to."""
    states = [worker.state for worker in workers if variant in worker.variants]
    ready = sum(worker.is_ready for worker in workers if variant in worker.variants)
    state: VariantState = "absent"
    if ready:
        state = "ready"
    elif "starting" in states:
        state = "loading"
    elif "failed" in states:
        state = "failed"
    return {"state": state, "workers": ready}


def variant_facts(variant: str, workers: Sequence[WorkerView]) -> dict[str, Any]:
    """The release that the workers have loaded, and what the last one that failed said."""
    own = [worker for worker in workers if variant in worker.variants]
    return {
        "release": next((worker.releases[variant] for worker in own if variant in worker.releases), None),
        "message": next((worker.message for worker in reversed(own) if worker.message), None),
    }
