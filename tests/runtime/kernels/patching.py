"""Triton's interpreter, made faster: it replaces its language's functions once for each launch and module.

By itself it looks through the whole language again at every call of a device function, which takes about as long as
all the rest. What it would replace has been replaced by the launch, or by the first call into the same module.
"""

from __future__ import annotations

from typing import Any


def patch_once_a_launch() -> None:
    """From here on, in this process."""
    from triton.runtime import interpreter  # which systems other than Linux do not have

    patch, launch = interpreter._patch_lang, interpreter.GridExecutor.__call__
    patched: dict[int, Any] = {}  # by the identity of a module's names

    def patch_once(function: Any) -> Any:
        names = id(function.__globals__)
        if names not in patched:
            patched[names] = patch(function)
        return patched[names]

    def launch_anew(executor: Any, *arguments: Any, **options: Any) -> None:
        patched.clear()  # the launch before has taken back what it replaced
        launch(executor, *arguments, **options)

    interpreter._patch_lang = patch_once
    interpreter.GridExecutor.__call__ = launch_anew
