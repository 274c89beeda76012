"""A log line is a fixed phrase plus fields, and carries the bound context."""

import json
import logging

from deltawire.service.logging import JsonFormatter, TextFormatter, bound


def _record(**fields: object) -> logging.LogRecord:
    record = logging.LogRecord("x", logging.INFO, "f", 1, "version committed", (), None)
    vars(record).update(fields)
    return record


def test_a_json_line_holds_event_fields_and_context() -> None:
    with bound(run="r1", version=4):
        line = json.loads(JsonFormatter("trainer").format(_record(bytes=981)))
    assert line["event"] == "version committed"
    assert (line["run"], line["version"], line["bytes"]) == ("r1", 4, 981)
    assert line["service"] == "trainer"


def test_context_ends_with_its_block() -> None:
    with bound(run="r1"):
        pass
    assert "run" not in json.loads(JsonFormatter("t").format(_record()))


def test_a_text_line_is_readable() -> None:
    line = TextFormatter("trainer").format(_record(version=4, upload_s=0.123456))
    assert line.endswith("trainer  version committed  version=4 upload_s=0.1235")
