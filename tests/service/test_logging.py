"""A log line is a fixed phrase plus fields."""

import json
import logging

from deltawire.service.logging import JsonFormatter, TextFormatter


def _record(**fields: object) -> logging.LogRecord:
    record = logging.LogRecord("x", logging.INFO, "f", 1, "version committed", (), None)
    vars(record).update(fields)
    return record


def test_a_json_line_holds_event_and_fields() -> None:
    line = json.loads(JsonFormatter("trainer").format(_record(bytes=981)))
    assert (line["event"], line["bytes"]) == ("version committed", 981)
    assert line["service"] == "trainer"


def test_a_text_line_is_readable() -> None:
    line = TextFormatter("trainer").format(_record(version=4, upload_s=0.123456))
    assert line.endswith("trainer  version committed  version=4 upload_s=0.1235")
