"""The line above every screen that says when a release is random or small."""

from pathlib import Path

from paths import PROJECT
from web_app import open_app

from web.frame import nano_notice, random_notice


def test_random_weights_are_named_in_plain_words(tmp_path: Path) -> None:
    with open_app(tmp_path) as app:
        assert "These answers mean nothing.</strong> BF16 runs on random weights" in random_notice(app.submitter, [])


def test_the_small_model_is_named_with_the_variants_that_run_on_it() -> None:
    nano = str(PROJECT / "checkpoints" / "nano-mxfp4")
    notice = nano_notice({"bf16": "/models/clef", "mxfp4": nano})
    assert "This is clef-nano, not Clef.</strong> MXFP4 runs on" in notice
    assert nano_notice({"bf16": "/models/clef"}) == ""


def test_the_shipped_variants_get_one_line_together() -> None:
    sources = {kind: str(PROJECT / "checkpoints" / f"nano-{kind}") for kind in ("bf16", "mxfp4")}
    assert "BF16 and MXFP4 run on" in nano_notice(sources)
