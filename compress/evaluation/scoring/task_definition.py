"""What decides a task's results besides the model, as a digest: the same in every process, and another after any edit."""

from __future__ import annotations

import dataclasses
import hashlib
import inspect
import re
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from ....system.storage.digests import digest

# Where its data is, which is compared by itself, and names.
_NO_MATTER = (
    "metadata", "tag", "task_alias", "dataset_path", "dataset_name", "dataset_kwargs",
    "training_split", "validation_split", "test_split", "fewshot_split",
)  # fmt: skip
_ADDRESS = re.compile(r" at 0x[0-9a-f]+")


def definition_of(task: Any) -> str:
    """A digest of a task's prompts, answers, examples and metrics; its items are not part of it.

    Args:
        task: lm-eval's, loaded.
    """
    shots = task.get_config("num_fewshot") or 0
    examples: list[str] = []
    with suppress(Exception):  # not every task has any
        examples = [str(doc) for doc in task.fewshot_docs()] if shots else []
    config = {name: value for name, value in vars(task.config).items() if name not in _NO_MATTER}
    code = [] if type(task).__module__.startswith("lm_eval.api.") else [_code(type(task))]
    return digest([str(task.VERSION), _plain(config), examples, code])


def _plain(value: Any) -> Any:
    """Data with code as its name and the hash of its file, which has what it calls, too."""
    if isinstance(value, dict):
        return {str(key): _plain(part) for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(part) for part in value]
    if isinstance(value, (set, frozenset)):
        return sorted(map(str, value))
    if value is None or isinstance(value, (str, int, float, bool)):
        return value
    if isinstance(value, partial):
        return ["partial", _plain(value.func), _plain(value.args), _plain(value.keywords)]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return [type(value).__qualname__, _plain(vars(value))]
    if callable(value):
        return _code(value)
    return _ADDRESS.sub("", str(value))


def _code(value: Any) -> list[str]:
    named = value if hasattr(value, "__qualname__") else type(value)
    file, content = "", b""
    with suppress(TypeError, OSError):  # what is built in has no file
        path = Path(inspect.getfile(inspect.unwrap(named)))
        file, content = path.name, path.read_bytes()
    return [str(named.__qualname__), file, hashlib.sha256(content).hexdigest()]
