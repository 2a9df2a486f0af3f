"""An access line has no query; probes that went well have no line."""

from __future__ import annotations

import logging

import pytest

from quire.server.logs import WithoutQuery, log_config


@pytest.mark.parametrize(
    ("path", "status", "kept"),
    [
        ("/v1/models?api_key=secret", 200, True),
        ("/health?x=1", 200, False),
        ("/llm/metrics", 200, False),
        ("/health", 503, True),
        ("/metrics", 401, True),
    ],
)
def test_a_query_is_cut_off_and_probes_are_left_out(path: str, status: int, kept: bool) -> None:
    args = ("127.0.0.1:9", "GET", path, "1.1", status)
    record = logging.LogRecord("uvicorn.access", 20, "", 0, '%s "%s %s %s" %d', args, None)
    assert WithoutQuery().filter(record) is kept
    assert "?" not in record.getMessage()


def test_other_lines_pass_as_they_are() -> None:
    record = logging.LogRecord("uvicorn.access", 20, "", 0, "what? %s", ("?",), None)
    assert WithoutQuery().filter(record)
    assert record.getMessage() == "what? ?"


@pytest.mark.parametrize("level", ["critical", "error", "warning", "info", "debug", "trace"])
def test_every_level_of_uvicorn_is_known(level: str) -> None:
    loggers = log_config(level)["loggers"]
    assert loggers["quire"]["level"] == level.upper()
    assert loggers["uvicorn"]["level"] >= logging.WARNING
    assert loggers["uvicorn.error"]["filters"] == ["without_cut_offs"]
