"""Settings: read from the environment, wrong ones named all at once, handed to children unchanged."""

from pathlib import Path

import pytest

from clef_core.errors import SettingsError
from worker.settings import PROJECT_DIR, Settings, UnknownModelError, load_settings


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in Settings.model_fields:
        monkeypatch.delenv(f"CLEF_{name.upper()}", raising=False)
    for name in ("REDIS_URL", "DATABASE_URL"):
        monkeypatch.delenv(name, raising=False)


def test_the_defaults_serve_both_small_releases_on_this_machine_only() -> None:
    settings = load_settings()
    assert settings.variants == {
        "bf16": str(PROJECT_DIR / "checkpoints/nano-bf16"),
        "mxfp4": str(PROJECT_DIR / "checkpoints/nano-mxfp4"),
    }
    assert (settings.host, settings.port, settings.default_variant) == ("127.0.0.1", 7860, "mxfp4")
    assert settings.data_dir == PROJECT_DIR / "data"
    assert settings.database_url == f"sqlite:///{PROJECT_DIR}/data/clef.sqlite3"
    assert settings.images_url == f"file://{PROJECT_DIR}/data/images"
    assert settings.redis_url is None


def test_the_environment_is_read(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name, value in {
        "CLEF_BF16": "Cloudflare/clef",
        "CLEF_MXFP4": "",
        "CLEF_VARIANTS": '{"int8": "/models/int8"}',
        "CLEF_DEFAULT_VARIANT": "int8",
        "CLEF_PORT": "8000",
        "CLEF_DATA_DIR": str(tmp_path),
        "CLEF_ALLOWED_HOSTS": "a.example, b.example",
        "CLEF_ALLOW_ANONYMOUS": "1",
        "REDIS_URL": "redis://cache:6379/1",
        "DATABASE_URL": "postgresql+psycopg://u:p@db/clef",
    }.items():
        monkeypatch.setenv(name, value)
    settings = load_settings()
    assert settings.variants == {"bf16": "Cloudflare/clef", "int8": "/models/int8"}
    assert settings.allowed_hosts == ("a.example", "b.example")
    assert (settings.port, settings.data_dir, settings.allow_anonymous) == (8000, tmp_path, True)
    assert settings.redis_url == "redis://cache:6379/1"
    assert settings.database_url == "postgresql+psycopg://u:p@db/clef"


def test_overrides_go_before_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REDIS_URL", "redis://cache")
    monkeypatch.setenv("DATABASE_URL", "postgresql://db/clef")
    monkeypatch.setenv("CLEF_PORT", "8000")
    settings = load_settings(redis_url=None, database_url="sqlite:////tmp/x", port=9000)
    assert (settings.redis_url, settings.database_url, settings.port) == (None, "sqlite:////tmp/x", 9000)


def test_every_mistake_is_named_at_once_by_its_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {
        "CLEF_PORT": "seventy",
        "CLEF_VARIANTS": "{not json",
        "CLEF_AUTH": "no-password",
        "CLEF_API_KEY": "short",
        "CLEF_CONFIDENCE": "maximum",
        "CLEF_THREADS": "0",
        "REDIS_URL": "http://cache",
        "DATABASE_URL": "mysql://db",
    }.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(SettingsError) as caught:
        load_settings()
    assert {line.split(":")[0] for line in str(caught.value).splitlines()} == {
        "CLEF_VARIANTS",
        "CLEF_API_KEY",
        "CLEF_AUTH",
        "REDIS_URL",
        "DATABASE_URL",
        "CLEF_THREADS",
        "CLEF_CONFIDENCE",
        "CLEF_PORT",
    }


def test_a_secret_is_not_shown_in_a_message_or_repr(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CLEF_API_KEY", "hunter2")
    with pytest.raises(SettingsError) as caught:
        load_settings()
    assert "hunter2" not in str(caught.value)
    assert "long-secret" not in repr(load_settings(api_key="long-secret", auth="user:long-secret"))


@pytest.mark.parametrize(
    ("overrides", "culprit"),
    [
        ({"default_variant": "int8"}, "CLEF_DEFAULT_VARIANT: 'int8' is not among the variants: bf16, mxfp4"),
        ({"bf16": "", "mxfp4": ""}, "CLEF_VARIANTS: no variant is configured"),
        ({"variants": {"a b": "/x"}}, "CLEF_VARIANTS: 'a b' is no variant name"),
    ],
)
def test_variants_that_cannot_be_served_are_refused(overrides: dict[str, object], culprit: str) -> None:
    with pytest.raises(SettingsError, match=culprit.replace("(", r"\(")):
        load_settings(**overrides)


@pytest.mark.parametrize(
    ("model", "variant"), [("clef", "mxfp4"), ("jev-latest", "mxfp4"), ("clef-bf16", "bf16"), ("clef-mxfp4", "mxfp4")]
)
def test_a_model_name_means_a_variant(model: str, variant: str) -> None:
    assert load_settings().variant_of(model) == variant


@pytest.mark.parametrize("model", ["", "bf16", "clef-", "clef-int8", "CLEF", "gpt-4", "clef-clef-bf16"])
def test_another_model_name_is_refused_with_the_known_ones(model: str) -> None:
    with pytest.raises(UnknownModelError, match="Known: clef, jev-latest, clef-bf16, clef-mxfp4"):
        load_settings().variant_of(model)


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.8.8", "localhost", "::1", "[::1]"])
def test_a_loopback_address_needs_no_key(host: str) -> None:
    load_settings(host=host).check_doors()


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.1.5", "clef.example", ""])
@pytest.mark.parametrize(
    ("doors", "missing"),
    [
        ({}, "CLEF_API_KEY and CLEF_AUTH are"),
        ({"api_key": "long-enough"}, "CLEF_AUTH is"),
        ({"auth": "user:password"}, "CLEF_API_KEY is"),
    ],
)
def test_an_address_that_others_reach_needs_key_and_login(host: str, doors: dict[str, str], missing: str) -> None:
    with pytest.raises(SettingsError, match=f"{missing} not set"):
        load_settings(host=host, **doors).check_doors()


@pytest.mark.parametrize("doors", [{"api_key": "long-enough", "auth": "user:password"}, {"allow_anonymous": True}])
def test_key_and_login_or_the_operators_word_open_the_door(doors: dict[str, object]) -> None:
    load_settings(host="0.0.0.0", **doors).check_doors()


def test_a_child_process_gets_the_same_settings(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    parent = load_settings(
        data_dir=tmp_path,
        bf16="",
        variants={"int8": "/models/int8"},
        default_variant="int8",
        allowed_hosts=("a.example", "b.example"),
        redis_url="unix:///tmp/x.sock",
        threads=3,
        allow_anonymous=True,
        api_key="long-enough",
        max_batch_tokens=4096,
    )
    for name, value in parent.to_environment().items():
        monkeypatch.setenv(name, value)
    assert load_settings() == parent


def test_a_relative_release_becomes_absolute_and_a_hub_id_stays(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "mine").mkdir()
    monkeypatch.chdir(tmp_path)
    settings = load_settings(bf16="mine", mxfp4="EliovpAI/clef-MXFP4")
    assert settings.variants == {"bf16": str(tmp_path / "mine"), "mxfp4": "EliovpAI/clef-MXFP4"}


def test_a_dotenv_file_is_not_read(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / ".env").write_text("CLEF_PORT=1234\n")
    monkeypatch.chdir(tmp_path)
    assert load_settings().port == 7860
