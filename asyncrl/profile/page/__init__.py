"""The page that shows a run: HTML, style and scripts beside this file, put together into one that needs no network.

A report carries its document; the dashboard's page fetches it and follows its events. The charts are drawn by Apache
ECharts (``vendor/``, the "common" build of 6.1.0, Apache-2.0).
"""

from __future__ import annotations

import html
import json
from collections.abc import Mapping
from importlib.resources import files
from typing import Any

__all__ = ["render"]


def render(document: Mapping[str, Any] | None, *, title: str) -> str:
    """The whole page as HTML.

    Args:
        document: What `asyncrl.profile.report.report_document` returns; None makes a page that asks for
            ``document.json`` beside it, and for a newer one at each of the server's ``events``.
        title: Of the window.
    """
    folder = files(__name__)
    # A "<" inside a string of JSON could end the script element that carries it.
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
