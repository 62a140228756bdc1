"""Digests of a checkpoint's files, and what has changed in them since."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path

from ...system.errors import SmeltError
from ...system.storage.files import check_regular
from ...system.storage.new_directory import RECORD
from ...system.storage.tensor_files import SafetensorsFile
from .claims import FileClaim
from .finding import Finding
from .signature import SIGNATURE

_WEIGHTS = ".safetensors"
# People and the hub change these, and nothing computes with them.
_OTHERS = (RECORD, SIGNATURE, "README.md", ".gitattributes")


def digests(checkpoint: Path) -> dict[str, FileClaim]:
    """The digests of all files of a checkpoint that decide what it computes.

    Args:
        checkpoint: its directory.
    """
    found = {}
    for path in sorted(checkpoint.iterdir()):
        if path.is_file() and path.name not in _OTHERS:
            whole, tensors = _digests(path) if path.suffix == _WEIGHTS else (_digest(path), {})
            found[path.name] = FileClaim(sha256=whole, bytes=path.stat().st_size, tensors=tensors)
    return found


def check_files(checkpoint: Path, claimed: dict[str, FileClaim], *, has_code: bool = True) -> Iterator[Finding]:
    """Compare a checkpoint's files with their digests; where one differs, its tensors are named that do.

    Args:
        checkpoint: its directory.
        claimed: by the files' names.
        has_code: whether Python files were fetched, too, from where it was.
    """
    changed = []
    for name, claim in claimed.items():
        path, what = checkpoint / name, f"the file {name}"
        try:
            if not path.exists():
                unfetched = path.suffix == ".py" and not has_code
                why = "was not fetched, as it is code; pass --trust-remote-code" if unfetched else "is missing"
                changed.append(Finding(what, "not measurable here" if unfetched else "not confirmed", why))
                continue
            check_regular(path)
            if _digest(path) != claim.sha256:
                changed.append(Finding(what, "not confirmed", _where(path, claim)))
        except (SmeltError, OSError) as error:
            changed.append(Finding(what, "not confirmed", str(error)))
    known = {*claimed, *_OTHERS}
    # Directories such as .git and .cache are of what fetched it.
    added = sorted(p.name for p in checkpoint.iterdir() if p.name not in known and not p.name.startswith("."))
    changed += [
        Finding(f"the file {name}", "not confirmed", "was added after the checkpoint was written") for name in added
    ]
    if changed:
        yield from changed
    elif claimed:
        size = sum(claim.bytes for claim in claimed.values())
        yield Finding("the files", "confirmed", f"all {len(claimed)} have their digests ({size / 1e6:,.1f} MB)")


def _where(path: Path, claim: FileClaim) -> str:
    size = path.stat().st_size
    if size != claim.bytes:
        return f"has {size:,} bytes instead of {claim.bytes:,}"
    if path.suffix != _WEIGHTS:
        return "was changed"
    try:
        _, tensors = _digests(path)
    except SmeltError as error:
        return f"was changed: {error}"
    other = [name for name in claim.tensors if tensors.get(name) != claim.tensors[name]]
    if not other:
        return "was changed in its header; all tensors are the same"
    more = f" and {len(other) - 3} more" if len(other) > 3 else ""
    return f"was changed in {', '.join(other[:3])}{more}"


def _digests(path: Path) -> tuple[str, dict[str, str]]:
    """The file's digest, and each tensor's, over its dtype, shape and bytes."""
    file, whole = SafetensorsFile(path), hashlib.sha256()
    of_tensors = {
        name: hashlib.sha256(f"{str(info.dtype).removeprefix('torch.')} {list(info.shape)}".encode())
        for name, info in file.tensors.items()
    }
    for name, piece in file.pieces():
        whole.update(piece)
        if name:
            of_tensors[name].update(piece)
    return whole.hexdigest(), {name: digest.hexdigest() for name, digest in of_tensors.items()}


def _digest(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
