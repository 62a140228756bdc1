"""From the name of a model to the directory that holds it."""

from __future__ import annotations

from pathlib import Path

from ...system.errors import SmeltError, first_line, nearest_name
from ...system.storage.paths import named_path
from .directory import ModelDirectory

_BUILTIN = Path(__file__).parents[1] / "builtin"
_HUB_FILES = [
    "*.safetensors",
    "*.json",
    "*.txt",
    "*.model",
    "*.jinja",
    "*.tiktoken",
    "tokenizer*",
    "LICENSE*",
    "NOTICE*",
    "README.md",
    "*.minisig",
]
# Nothing of other folders than additional_chat_templates.
_NOT_FROM_HUB = ["consolidated*", "[!a]*/*", "a[!d]*/*", "ad[!d]*/*"]


def find_model(name: str, *, revision: str | None = None, trust_remote_code: bool = False) -> ModelDirectory:
    """Find a model by directory, hub name or ``builtin:`` name.

    Raises:
        SmeltError: it is not found, or cannot be downloaded.
    """
    if name.startswith("builtin:"):
        known = sorted(p.name for p in _BUILTIN.iterdir() if (p / "config.json").exists())
        short = name.removeprefix("builtin:")
        if short not in known:
            raise SmeltError(
                f"model {name}: no such builtin model; available: {', '.join('builtin:' + k for k in known)}"
            )
        return ModelDirectory(name, _BUILTIN / short)
    path = named_path(name)
    if path.is_dir():
        return ModelDirectory(name, path, trust_remote_code)
    if path.exists():
        raise SmeltError(f"model {name}: is a file; give the directory that holds config.json and the weights")
    if name.startswith((".", "/", "~")) or name.count("/") > 1 or "\\" in name:
        if path.with_name(f"{path.name}.partial").is_dir():
            raise SmeltError(f"model {name}: the run that writes it has not finished; run its command again")
        raise SmeltError(f"model {name}: directory not found{nearest_name(path.name, _models_in(path.parent))}")
    return ModelDirectory(name, _fetch(name, revision, trust_remote_code), trust_remote_code)


def _models_in(parent: Path) -> list[str]:
    """Directories to suggest for a misspelled name: neither hidden nor half-written."""
    if not parent.is_dir():
        return []
    names = [place.name for place in parent.iterdir() if place.is_dir()]
    return [name for name in names if not name.startswith(".") and not name.endswith((".partial", ".replaced"))]


def find_configuration(name: str) -> ModelDirectory:
    """Like :func:`find_checkpoint`; of a hub's model only its configuration is downloaded."""
    if not _is_on_hub(name):
        return find_checkpoint(name)
    return ModelDirectory(name, _fetch(name, None, trust_remote_code=False, patterns=["config.json"]))


def find_tokenizer(name: str, *, trust_remote_code: bool = False) -> ModelDirectory:
    """Like :func:`find_checkpoint`; of a hub's model all but the weights is downloaded."""
    if not _is_on_hub(name):
        return find_checkpoint(name, trust_remote_code=trust_remote_code)
    patterns = [pattern for pattern in _HUB_FILES if pattern != "*.safetensors"]
    found = _fetch(name, None, trust_remote_code, [*patterns, "*.py"] if trust_remote_code else patterns)
    return ModelDirectory(name, found, trust_remote_code)


def _is_on_hub(name: str) -> bool:
    is_path = name.startswith(("builtin:", ".", "/", "~")) or name.count("/") != 1
    return not is_path and not named_path(name).exists()


def find_checkpoint(name: str, *, trust_remote_code: bool = False) -> ModelDirectory:
    """Like :func:`find_model`; a run's output directory resolves to the checkpoint in it."""
    place = named_path(name)
    inside = place / "checkpoint"
    held = (inside / "config.json").is_file() and not (place / "config.json").exists()
    return find_model(str(inside) if held else name, trust_remote_code=trust_remote_code)


def _fetch(name: str, revision: str | None, trust_remote_code: bool, patterns: list[str] | None = None) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError

    try:
        wanted = patterns or ([*_HUB_FILES, "*.py"] if trust_remote_code else _HUB_FILES)
        return Path(snapshot_download(name, revision=revision, allow_patterns=wanted, ignore_patterns=_NOT_FROM_HUB))
    except HFValidationError:
        raise SmeltError(f"model {name}: is neither a local directory nor a hub name (owner/name)") from None
    except Exception as error:  # the hub's client raises from several HTTP libraries
        raise SmeltError(
            f"model {name}: is not a local directory, and the download from the hub failed ({first_line(error)});"
            " check the name and the network, or download it and give the directory"
        ) from None
