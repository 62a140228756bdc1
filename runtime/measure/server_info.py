"""What a server says of itself: which program it is, and which model it serves."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from ...system.errors import RuntimeProblem
from .server_client import ServerClient, ServerProblem

# By what /v1/models says.
_PROGRAMS = {
    "smelt": "Smelt",
    "vllm": "vLLM",
    "llamacpp": "llama.cpp",
    "sglang": "SGLang",
    "library": "Ollama",
}
# Where servers say their version, and under which name.
_VERSIONS = (
    ("/version", "version"),
    ("/props", "build_info"),
    ("/get_server_info", "version"),
    ("/api/version", "version"),
)


@dataclass(frozen=True)
class ServerInfo:
    """A server and one of its models.

    Attributes:
        url: without ``/v1``.
        program: such as vLLM.
        version: of the program; None if it does not say.
        model: what requests call the model.
        root: what the model was loaded from, if the server says so.
        longest: the most tokens of a prompt and its output; None if it does not say.
    """

    url: str
    program: str
    version: str | None
    model: str
    root: str | None
    longest: int | None

    @property
    def full_name(self) -> str:
        """The program and its version."""
        return f"{self.program} {self.version}" if self.version else f"{self.program} of unknown version"

    @classmethod
    async def ask(cls, client: ServerClient, model: str | None = None) -> ServerInfo:
        """Ask a server.

        Args:
            client: of it.
            model: one of its models; may be left out if there is only one.

        Raises:
            ServerProblem: it cannot be reached, refuses the key, or is no server with OpenAI's API.
            RuntimeProblem: it does not serve the model, or several.
        """
        models = await _models(client)
        if model is None and len(models) > 1:
            raise RuntimeProblem(f"{client.url}: serves {', '.join(models)}; choose one with --model")
        chosen = model or next(iter(models))
        if chosen not in models:
            raise RuntimeProblem(f"{client.url}: serves no model {chosen!r}; it serves {', '.join(models)}")
        entry = models[chosen]
        owner = str(entry.get("owned_by") or "an unknown program")
        root, longest = entry.get("root"), entry.get("max_model_len")
        return cls(
            client.url,
            _PROGRAMS.get(owner, owner),
            await _version(client),
            chosen,
            root if isinstance(root, str) else None,
            longest if isinstance(longest, int) and longest > 0 else None,
        )


async def _models(client: ServerClient) -> dict[str, dict[str, Any]]:
    try:
        listed = await client.get("/v1/models")
    except ServerProblem as problem:
        if problem.status not in (404, 405):
            raise
        listed = None
    entries = listed.get("data") if isinstance(listed, dict) else None
    if not isinstance(entries, list):
        raise ServerProblem(f"{client.url}: has no /v1/models; give the address of a server with OpenAI's API")
    found = {str(entry["id"]): entry for entry in entries if isinstance(entry, dict) and "id" in entry}
    if not found:
        raise ServerProblem(f"{client.url}: serves no model; load one there")
    return found


async def _version(client: ServerClient) -> str | None:
    for path, name in _VERSIONS:
        with suppress(ServerProblem):
            said = await client.get(path)
            if isinstance(said, dict) and isinstance(said.get(name), str):
                return str(said[name])
    return None
