"""Logs: a fixed phrase plus fields. JSON lines for machines, readable lines on a terminal.

Fields are named alike in all services, so that one version can be followed through three of them by
one filter.
"""

import json
import logging
import sys
import time
from typing import Any

_STANDARD = frozenset(
    vars(logging.LogRecord("", 0, "", 0, "", (), None)).keys() | {"message", "asctime", "taskName"}
)


def _fields(record: logging.LogRecord) -> dict[str, Any]:
    return {key: value for key, value in vars(record).items() if key not in _STANDARD}


class JsonFormatter(logging.Formatter):
    """One JSON object a line."""

    def __init__(self, service: str) -> None:
        super().__init__()
        self._service = service

    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": record.created,
            "level": record.levelname.lower(),
            "service": self._service,
            "event": record.getMessage(),
            **_fields(record),
        }
        if record.exc_info:
            line["error"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


class TextFormatter(logging.Formatter):
    """`12:01:33 trainer  version committed  version=4 bytes=981223`."""

    def __init__(self, service: str) -> None:
        super().__init__()
        self._service = service

    def format(self, record: logging.LogRecord) -> str:
        clock = time.strftime("%H:%M:%S", time.localtime(record.created))
        fields = " ".join(f"{key}={_short(value)}" for key, value in _fields(record).items())
        level = "" if record.levelno <= logging.INFO else f"{record.levelname} "
        line = f"{clock} {self._service}  {level}{record.getMessage()}  {fields}".rstrip()
        if record.exc_info:
            line += "\n" + self.formatException(record.exc_info)
        return line


def _short(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def configure_logging(*, service: str, level: str, style: str) -> None:
    """Send the root logger to stderr. `style` is json, text or auto (text on a terminal)."""
    text = style == "text" or (style == "auto" and sys.stderr.isatty())
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(TextFormatter(service) if text else JsonFormatter(service))
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    for noisy in ("httpx", "httpx2", "httpcore", "uvicorn", "websockets", "urllib3", "botocore"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
