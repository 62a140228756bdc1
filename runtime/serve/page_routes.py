"""The live page at ``/``, and its files."""

from __future__ import annotations

from pathlib import Path

from fastapi import FastAPI
from starlette.responses import Response

from .http.errors import ApiError

_FOLDER = Path(__file__).parent / "page"
_TYPES = {
    ".css": "text/css; charset=utf-8",
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
_HEADERS = {
    # Nothing from elsewhere, nothing inline, and no text of a model can become markup.
    "Content-Security-Policy": "default-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none';"
    " object-src 'none'; require-trusted-types-for 'script'; trusted-types 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    # The files of a newer server are used at once.
    "Cache-Control": "no-cache",
}


def add_page(app: FastAPI) -> None:
    """Serve the page. Its files are read now: what a request names is looked up among them, never on disk."""
    files = {path.name: (path.read_bytes(), _TYPES[path.suffix]) for path in _FOLDER.iterdir() if path.suffix in _TYPES}

    @app.get("/", include_in_schema=False)
    async def page() -> Response:
        return _response(*files["index.html"])

    @app.get("/static/{name}", include_in_schema=False)
    async def file(name: str) -> Response:
        if name not in files:
            raise ApiError(404, f"The page has no file {name!r}; it is at /.")
        return _response(*files[name])


def _response(content: bytes, kind: str) -> Response:
    return Response(content, headers={**_HEADERS, "Content-Type": kind})
