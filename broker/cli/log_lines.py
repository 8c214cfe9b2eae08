"""The log of long-running processes: lines of text, or one JSON object per line with `log_format = "json"`."""

from __future__ import annotations

import json
import logging
import time

from broker.config import Config, has_json_logs

TEXT = "%(asctime)s %(levelname)s %(message)s"


class JsonLines(logging.Formatter):
    """Format a record as one line: time (UTC), level, logger, message, the fields of `about`, and the stack trace."""

    def format(self, record: logging.LogRecord) -> str:
        stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        fields: dict[str, object] = {
            "time": f"{stamp}.{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **getattr(record, "about", {}),  # such as {"job": "7"}
        }
        if record.exc_info:
            fields["error"] = self.formatException(record.exc_info)
        return json.dumps(fields)


def start_log(config: Config, *, level: int = logging.INFO) -> None:
    """Write `level` and above to standard error. Raises UsageError for an unknown `log_format`."""
    write_log(is_json=has_json_logs(config), level=level)


def write_log(*, is_json: bool, level: int = logging.INFO) -> None:
    """Write `level` and above to standard error, in this format."""
    handler = logging.StreamHandler()
    handler.setFormatter(JsonLines() if is_json else logging.Formatter(TEXT))
    logging.basicConfig(level=level, handlers=[handler])
