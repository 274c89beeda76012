"""How other commands find the services of a run on this machine: two files in its folder.

`services.json` names them, `token` opens them. The token is readable by its owner alone, and gone
when the run has ended.
"""

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from pydantic import SecretStr

from deltawire.protocol.errors import SettingsError

SERVICES, TOKEN = "services.json", "token"


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalRun:
    """Where a run's services listen, and what opens them."""

    urls: list[str]
    token: SecretStr


@contextmanager
def findable(folder: Path, services: Mapping[str, str], token: SecretStr) -> Iterator[None]:
    """For the length of the block, `services` (name -> URL) can be found by `find_run`."""
    (folder / SERVICES).write_text(json.dumps(dict(services), indent=1) + "\n")
    secret = folder / TOKEN
    with os.fdopen(os.open(secret, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
        file.write(token.get_secret_value())
    try:
        yield
    finally:
        secret.unlink(missing_ok=True)


def find_run(runs: Path, name: str) -> LocalRun:
    """The services of `runs/<name>`. Raises SettingsError when it is not running here."""
    folder = runs / name
    if not folder.is_dir():
        raise SettingsError(
            f"no run {folder}; start one with `deltawire run JOB`, choose another with --run, or "
            "name the URLs of services"
        )
    try:
        token = (folder / TOKEN).read_text().strip()
        services = json.loads((folder / SERVICES).read_text())
    except FileNotFoundError:
        summary = folder / "summary.json"
        seen = f"; {summary} tells how it went" if summary.exists() else ""
        raise SettingsError(f"run {folder.resolve().name} is not running{seen}") from None
    except (OSError, ValueError) as error:
        raise SettingsError(f"{folder}: its services cannot be found: {error}") from error
    return LocalRun(urls=[str(url) for url in services.values()], token=SecretStr(token))
