"""The environment that tests run in, and the fixtures they share."""

import os
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # before torch is imported: spinning threads starve each other
os.environ.setdefault("GRADIO_ANALYTICS_ENABLED", "False")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import pytest
from paths import SHARED

pytest_plugins = ["database_fixtures"]


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """BANKING77, CLINC150, receipts: beside the project on the developers' machines, absent in a fresh clone."""
    data = SHARED / "data"
    if not data.is_dir():
        pytest.skip(f"{data} is not here: public data sets are not part of the project")
    return data
