"""A worker for tests: the real one with the real engine, except that marked states misbehave.

    python tests/marked_worker.py VARIANT...
    python tests/marked_worker.py --supervise VARIANT...

A forward with "SLOW" in a state takes 0.3 s longer, one with "CRASH" kills the process as the system would, and
one with "HANG" never ends.
"""

import contextlib
import os
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

from clef_core.encoding import Record
from clef_core.engine import Engine
from worker.serve import load_engine, serve
from worker.settings import Settings, load_settings
from worker.supervise import Supervisor


class MarkedEngine(Engine):
    def run(self, records: Sequence[Record], *args: Any) -> Iterator[Any]:
        states = [str(record.request.state) for record in records]
        for step in super().run(records, *args):
            seen = [states[index] for index, _ in step]
            if any("SLOW" in state for state in seen):
                time.sleep(0.3)
            if any("CRASH" in state for state in seen):
                os.kill(os.getpid(), signal.SIGKILL)
            if any("HANG" in state for state in seen):
                time.sleep(3600)
            yield step


def load_marked_engine(settings: Settings, variant: str, beside: Engine | None) -> Engine:
    engine = load_engine(settings, variant, beside)
    return MarkedEngine(
        engine.release, max_tokens=engine.max_tokens, max_batch_tokens=engine.max_batch_tokens, variant=variant
    )


def marked_command(variant: str) -> list[str]:
    return [sys.executable, __file__, variant]


def main(arguments: Sequence[str]) -> None:
    if arguments[0] != "--supervise":
        serve(load_settings(), arguments, load_marked_engine)
        return
    signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored where a shell started the tests with `&`
    with Supervisor(load_settings(), arguments[1:], marked_command), contextlib.suppress(KeyboardInterrupt):
        signal.pause()


if __name__ == "__main__":
    main(sys.argv[1:])
