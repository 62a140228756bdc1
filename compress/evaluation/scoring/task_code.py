"""Python code run by a task's YAML: allowed for tasks that ship with lm-eval or Smelt, for others only if trusted."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

BUILTIN = Path(__file__).parents[1] / "builtin_tasks"


class UntrustedCodeError(Exception):
    """A task names Python of its own; the text says which."""


@contextmanager
def only_shipped_code(*, scripts: bool) -> Iterator[None]:
    """Within it, lm-eval imports no function named by a task's YAML (or its includes), unless the YAML is shipped.

    lm-eval imports such functions as it reads the file, so this hooks in there, which covers included files,
    groups and members of groups alike.

    Args:
        scripts: whether metrics may be scripts of the `evaluate` library, as those of some shipped tasks are.

    Raises:
        UntrustedCodeError: a task names such a function.
    """
    from lm_eval.api import task
    from lm_eval.tasks import _yaml_loader as loader

    import_function, get_metric = loader._import_func_in_yml, task.get_metric

    def import_shipped(name: str, folder: Path) -> Any:
        if not _is_shipped(folder):
            module, _, function = name.rpartition(".")
            file = folder / f"{module.replace('.', '/')}.py"
            raise UntrustedCodeError(f"{function} of {file if file.exists() else f'the module {module}'}")
        return import_function(name, folder)

    def get_known(name: str, script: bool = False) -> Any:
        from lm_eval.api.registry import metric_registry

        if not script and name in metric_registry:
            return get_metric(name)
        if script or Path(name).exists():
            raise UntrustedCodeError(f"the script of the metric {name!r}")
        raise KeyError(f"metric {name}")

    with patch.object(loader, "_import_func_in_yml", import_shipped):
        if scripts:
            yield
        else:
            with patch.object(task, "get_metric", get_known):
                yield


def sandbox_templates() -> None:
    """Restrict prompt templates to the items they are filled with."""
    import lm_eval.utils
    from jinja2.sandbox import SandboxedEnvironment

    plain = lm_eval.utils.env
    if not isinstance(plain, SandboxedEnvironment):
        sandboxed = SandboxedEnvironment(
            loader=plain.loader, undefined=plain.undefined, keep_trailing_newline=plain.keep_trailing_newline
        )
        sandboxed.filters |= plain.filters
        lm_eval.utils.env = sandboxed


def _is_shipped(folder: Path) -> bool:
    import lm_eval.tasks

    shipped = (Path(lm_eval.tasks.__file__).parent, BUILTIN)
    return any(folder.resolve().is_relative_to(each.resolve()) for each in shipped)
