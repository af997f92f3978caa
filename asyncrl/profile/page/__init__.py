"""Renders the page of a run as one file without external links. Apache ECharts (``vendor/``) draws the charts."""

from __future__ import annotations

import html
import json
from collections.abc import Mapping
from importlib.resources import files
from typing import Any

__all__ = ["render"]


def render(document: Mapping[str, Any] | None, *, title: str) -> str:
    """Return the page with the report of a run, as one HTML text.

    Args:
        document: The content of the report, from `asyncrl.profile.report.RunReport.document`. With None, the page
            fetches ``document.json`` when it opens and after each server-sent event.
        title: Title of the window.
    """
    folder = files(__name__)
    # Escape each "<", because "</script>" inside a JSON string would end the script element.
    embedded = json.dumps(document, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")
    parts = {
        "title": html.escape(title),
        "connect": "'self'" if document is None else "'none'",
        "style": folder.joinpath("page.css").read_text(),
        "charts": folder.joinpath("charts.js").read_text(),
        "script": folder.joinpath("page.js").read_text(),
        "document": embedded,
        "echarts": folder.joinpath("vendor/echarts.common.min.js").read_text(),
    }
    template = folder.joinpath("page.html").read_text()
    first, *pieces = template.split("{{")
    return first + "".join(parts[name] + rest for name, _, rest in (piece.partition("}}") for piece in pieces))
