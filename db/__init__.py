"""Tables, sessions and every query. Plain data in and out; knows nothing of queues, models or pages."""

from db.upgrade import migrate

__all__ = ["migrate"]
