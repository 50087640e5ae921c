"""A running app and a Chromium that looks at it. The app is started once, as a person would start it."""

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.request import urlopen

import pytest
from browser.steps import PROJECT, Watched, open_batch, open_decide
from playwright.sync_api import Browser, BrowserContext, Page, expect, sync_playwright

START_TIMEOUT_S = 120
EXPECT_TIMEOUT_MS = 30_000  # a busy machine of two cores takes its time
CHROMIUM_FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-dev-shm-usage",
]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.browser)


@pytest.fixture(scope="session")
def app_log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the app writes to its terminal."""
    return tmp_path_factory.mktemp("app") / "log"


@pytest.fixture(scope="session")
def app_url(app_log: Path) -> Iterator[str]:
    """The address of `python app.py` with the small releases that ship, on an empty data folder."""
    folder = app_log.parent
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    own = {"CLEF_DATA_DIR": str(folder / "data"), "CLEF_PORT": str(port), "OMP_WAIT_POLICY": "PASSIVE"}
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("CLEF_", "GRADIO_"))}
    for name in ("REDIS_URL", "DATABASE_URL"):
        inherited.pop(name, None)
    with app_log.open("w") as log:
        app = subprocess.Popen([sys.executable, "app.py"], cwd=PROJECT, env=inherited | own, stdout=log, stderr=log)
    url = f"http://127.0.0.1:{port}"
    try:
        _wait_until_ready(app, url, app_log)
        yield url
    finally:
        app.send_signal(signal.SIGINT)
        try:
            app.wait(30)
        except subprocess.TimeoutExpired:
            app.kill()
            app.wait()


def _wait_until_ready(app: "subprocess.Popen[bytes]", url: str, log: Path) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline:
        if app.poll() is not None:
            pytest.fail(f"the app ended with {app.returncode}:\n{log.read_text()[-3000:]}")
        try:
            with urlopen(f"{url}/healthz", timeout=5) as answer:
                if answer.status == 200:
                    return
        except OSError:
            pass
        time.sleep(0.2)
    pytest.fail(f"the app was not ready in {START_TIMEOUT_S} s:\n{log.read_text()[-3000:]}")


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    chromium = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if chromium is None:
        pytest.skip("no Chromium is installed (make test installs it where apt may)")
    expect.set_options(timeout=EXPECT_TIMEOUT_MS)
    with sync_playwright() as playwright:
        launched = playwright.chromium.launch(executable_path=chromium, args=CHROMIUM_FLAGS)
        yield launched
        launched.close()


@pytest.fixture
def context(browser: Browser) -> Iterator[BrowserContext]:
    """A browser without memory: no local storage of another test."""
    fresh = browser.new_context(viewport={"width": 1400, "height": 1000}, accept_downloads=True)
    yield fresh
    fresh.close()


@pytest.fixture
def page(context: BrowserContext, app_url: str, app_log: Path) -> Iterator[Page]:
    """A tab. Whatever a test does in it: no error in the console, no request to another machine."""
    tab = context.new_page()
    tab.set_default_timeout(EXPECT_TIMEOUT_MS)
    watched = Watched()
    watched.attach(tab)
    yield tab
    foreign = [url for url in watched.requests if not url.startswith((app_url, "data:", "blob:"))]
    assert foreign == [], "the page asked another machine"
    assert watched.errors == [], f"the app said:\n{app_log.read_text()[-6000:]}"


@pytest.fixture
def decide(page: Page, app_url: str) -> Page:
    """The Decide screen, ready to be used."""
    open_decide(page, app_url)
    return page


@pytest.fixture
def batch(page: Page, app_url: str) -> Iterator[Page]:
    """The Batch screen, ready to be used."""
    open_batch(page, f"{app_url}/batch")
    yield page
    if page.locator("#cancel").is_visible():  # the next test's rows would wait for these
        page.locator("#cancel").click()
        expect(page.locator("#cancel")).to_be_hidden()
