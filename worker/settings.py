"""Settings from the environment, read once at the edge and passed in.

Variables have the prefix `CLEF_`; `REDIS_URL` and `DATABASE_URL` are read without it. All mistakes are reported at
once, by the names of the variables. A `.env` file is not read.
"""

import ipaddress
import json
import re
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AliasChoices, Field, ValidationError, ValidationInfo, field_validator
from pydantic_settings import BaseSettings, NoDecode, SettingsConfigDict

from clef_core.errors import Problem, RequestError, SettingsError

PROJECT_DIR = Path(__file__).resolve().parent.parent
DEFAULT_MODELS = ("clef", "jev-latest")
"""Model names that mean the default variant."""

_VARIANT_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,49}")
_DATABASES = ("sqlite:///", "postgresql://", "postgresql+psycopg://")


class UnknownModelError(RequestError):
    """The request asks a model that is not configured."""


class Settings(BaseSettings):
    """What the operator may choose. `variants` maps a name to a release directory or hub id, built-in ones too."""

    model_config = SettingsConfigDict(
        env_prefix="CLEF_", frozen=True, extra="forbid", populate_by_name=True, validate_default=True
    )

    bf16: str = str(PROJECT_DIR / "checkpoints" / "nano-bf16")
    mxfp4: str = str(PROJECT_DIR / "checkpoints" / "nano-mxfp4")
    variants: Annotated[dict[str, str], NoDecode] = {}
    default_variant: str = "mxfp4"

    host: str = "127.0.0.1"
    port: int = Field(7860, ge=1, le=65535)
    api_key: str | None = Field(None, min_length=8, repr=False)
    auth: str | None = Field(None, repr=False)
    allow_anonymous: bool = False
    allowed_hosts: Annotated[tuple[str, ...], NoDecode] = ()

    data_dir: Path = PROJECT_DIR / "data"
    redis_url: str | None = Field(None, validation_alias=AliasChoices("REDIS_URL", "CLEF_REDIS_URL"), repr=False)
    database_url: str = Field("", validation_alias=AliasChoices("DATABASE_URL", "CLEF_DATABASE_URL"), repr=False)
    images_url: str = ""

    device: str = "auto"
    dtype: Literal["bfloat16", "float32"] | None = None
    linear_mode: Literal["packed", "expanded", "int8", "fp8"] | None = None
    threads: int | None = Field(None, ge=1)
    confidence: Literal["top", "typesafe"] = "top"
    max_tokens: int = Field(16384, ge=64)
    max_batch_tokens: int | None = Field(None, ge=64)
    forward_timeout_s: float = Field(600.0, gt=0)

    max_queue: int = Field(2000, ge=1)
    answer_timeout_s: float = Field(60.0, gt=0)
    max_upload_bytes: int = Field(200_000_000, ge=1)
    max_rows: int = Field(1_000_000, ge=1)
    log_level: Literal["DEBUG", "INFO", "WARNING", "ERROR"] = "INFO"
    supervisor_pid: int | None = None

    @field_validator("variants", mode="before")
    @classmethod
    def _read_variants(cls, value: Any) -> Any:
        if not isinstance(value, str):
            return value
        try:
            return json.loads(value)
        except ValueError as error:
            raise ValueError(
                f'must be a JSON object of name to release, such as {{"int8": "/path"}}: {error}'
            ) from None

    @field_validator("variants", mode="after")
    @classmethod
    def _join_variants(cls, value: dict[str, str], info: ValidationInfo) -> dict[str, str]:
        built_in = {name: info.data.get(name, "") for name in ("bf16", "mxfp4")}
        joined = {name: source for name, source in (built_in | value).items() if source}
        for name in joined:
            if not _VARIANT_NAME.fullmatch(name):
                raise ValueError(f"{name!r} is no variant name: letters, digits, '_', '.' and '-', at most 50")
        if not joined:
            raise ValueError("no variant is configured")
        return {name: _absolute_source(source) for name, source in joined.items()}

    @field_validator("default_variant", mode="after")
    @classmethod
    def _check_default(cls, value: str, info: ValidationInfo) -> str:
        names = info.data.get("variants")
        if names is not None and value not in names:
            raise ValueError(f"{value!r} is not among the variants: {', '.join(names)}")
        return value

    @field_validator("auth", mode="after")
    @classmethod
    def _check_auth(cls, value: str | None) -> str | None:
        if value is not None and not all(value.partition(":")):
            raise ValueError("must be user:password")
        return value

    @field_validator("allowed_hosts", mode="before")
    @classmethod
    def _read_hosts(cls, value: Any) -> Any:
        return tuple(host.strip() for host in value.split(",") if host.strip()) if isinstance(value, str) else value

    @field_validator("data_dir", mode="after")
    @classmethod
    def _absolute_data_dir(cls, value: Path) -> Path:
        return value.expanduser().resolve()

    @field_validator("redis_url", mode="after")
    @classmethod
    def _check_redis_url(cls, value: str | None) -> str | None:
        if value and not value.startswith(("redis://", "rediss://", "unix://")):
            raise ValueError("must begin with redis://, rediss:// or unix://")
        return value or None

    @field_validator("database_url", mode="after")
    @classmethod
    def _default_database_url(cls, value: str, info: ValidationInfo) -> str:
        if not value:
            return f"sqlite:///{info.data.get('data_dir', PROJECT_DIR / 'data')}/clef.sqlite3"
        if not value.startswith(_DATABASES):
            raise ValueError(f"must begin with one of {', '.join(_DATABASES)}")
        return value

    @field_validator("images_url", mode="after")
    @classmethod
    def _default_images_url(cls, value: str, info: ValidationInfo) -> str:
        return value or f"file://{info.data.get('data_dir', PROJECT_DIR / 'data')}/images"

    def variant_of(self, model: str) -> str:
        """The variant that a request's `model` names.

        Raises:
            UnknownModelError: none of that name is configured.
        """
        if model in DEFAULT_MODELS:
            return self.default_variant
        name = model.removeprefix("clef-")
        if name != model and name in self.variants:
            return name
        known = ", ".join([*DEFAULT_MODELS, *(f"clef-{variant}" for variant in self.variants)])
        raise UnknownModelError(
            (Problem(("model",), f"There is no model {model[:60]!r}. Known: {known}.", "unknown_model"),)
        )

    def check_doors(self) -> None:
        """Refuse an address that others can reach, unless key and login are set or anonymous use is allowed.

        Raises:
            SettingsError: the doors would stand open.
        """
        if _is_loopback(self.host) or self.allow_anonymous:
            return
        missing = [name for name, value in (("CLEF_API_KEY", self.api_key), ("CLEF_AUTH", self.auth)) if not value]
        if missing:
            raise SettingsError(
                f"CLEF_HOST={self.host} can be reached from other machines, and {' and '.join(missing)} "
                f"{'is' if len(missing) == 1 else 'are'} not set. Set both (History shows everyone's states and "
                "images), or say CLEF_ALLOW_ANONYMOUS=1."
            )

    def to_environment(self) -> dict[str, str]:
        """These settings as environment variables, for a child process that must have the same ones."""
        environment = {}
        for name, value in self.model_dump(mode="json", exclude_none=True).items():
            if isinstance(value, dict):
                text = json.dumps(value)
            elif isinstance(value, list):
                text = ",".join(value)
            else:
                text = str(value)
            environment[_variable_of(name)] = text
        return environment


def load_settings(**overrides: Any) -> Settings:
    """Read the environment; overrides go before it.

    Raises:
        SettingsError: lists every mistake by the name of its variable.
    """
    try:
        return Settings(**overrides)
    except ValidationError as error:
        lines = [
            f"{_variable_of(str(mistake['loc'][0]))}: {mistake['msg'].removeprefix('Value error, ')}"
            for mistake in error.errors()
        ]
        raise SettingsError("\n".join(lines)) from None


def _variable_of(field: str) -> str:
    known = {"redis_url": "REDIS_URL", "database_url": "DATABASE_URL"}
    return known.get(field, field if field in known.values() else f"CLEF_{field.upper()}")


def _absolute_source(source: str) -> str:
    """A directory becomes an absolute path, so that a child started elsewhere finds it; a hub id stays."""
    path = Path(source).expanduser()
    return str(path.resolve()) if path.is_dir() else source


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False
