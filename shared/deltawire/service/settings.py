"""The base of every service's settings: one class per service, built in its __main__, passed down.

A service subclasses ServiceSettings with its `env_prefix`. Each variable `X` may instead be given
as a file through `X_FILE` (secrets mounted by Docker or Kubernetes).
"""

import json
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, TypeVar

from pydantic import Field, SecretStr, ValidationError
from pydantic_settings import BaseSettings, SettingsConfigDict

from deltawire.protocol.errors import SettingsError

Port = Annotated[int, Field(ge=0, le=65535)]


class ServiceSettings(BaseSettings):
    """What every service can be told."""

    model_config = SettingsConfigDict(frozen=True, extra="ignore", env_ignore_empty=True)

    host: str = "127.0.0.1"
    """Address to bind. Loopback unless told."""
    port: Port = 7860
    """Port to bind; 0 takes a free one."""
    token: SecretStr | None = None
    """Bearer token of the control plane. Without one, only loopback may be bound."""
    run_id: str = "default"
    """Names the run's keys and streams."""
    log_level: str = "INFO"
    """DEBUG, INFO, WARNING or ERROR."""
    log_format: str = "auto"
    """json, text, or auto: text on a terminal."""


Settings = TypeVar("Settings", bound=ServiceSettings)


def load_settings(
    kind: type[Settings], argv: Sequence[str], environ: Mapping[str, str] = os.environ
) -> Settings:
    """Settings from the environment; `--print-settings` shows them, secrets masked, and exits.

    Raises SettingsError with one line per wrong variable.
    """
    prefix = kind.model_config.get("env_prefix", "")
    try:
        settings = kind(**_from_files(kind, prefix, environ))
    except ValidationError as error:
        lines = [
            f"{prefix}{'__'.join(str(part) for part in item['loc']).upper()}: {item['msg']}"
            for item in error.errors(include_url=False, include_input=False)
        ]
        raise SettingsError("; ".join(lines)) from None
    if settings.token is None and settings.host not in ("127.0.0.1", "localhost", "::1"):
        raise SettingsError(
            f"{prefix}HOST={settings.host} would open the control plane to the network without a "
            f"token: set {prefix}TOKEN, or bind 127.0.0.1"
        )
    if "--print-settings" in argv:
        sys.stdout.write(json.dumps(settings.model_dump(mode="json"), indent=2) + "\n")
        raise SystemExit(0)
    return settings


def _from_files(
    kind: type[ServiceSettings], prefix: str, environ: Mapping[str, str]
) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name in kind.model_fields:
        path = environ.get(f"{prefix}{name.upper()}_FILE")
        if path and not environ.get(f"{prefix}{name.upper()}"):
            found[name] = _said_in(Path(path), f"{prefix}{name.upper()}_FILE")
    return found


def _said_in(path: Path, variable: str) -> str:
    try:
        said = path.read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise SettingsError(f"{variable}: {error}") from error
    if not said:  # an empty token would let everybody in
        raise SettingsError(f"{variable}: {path} is empty; write the value into it")
    return said
