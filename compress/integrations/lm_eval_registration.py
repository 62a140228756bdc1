"""Makes ``--model smelt`` known to lm-eval."""

from __future__ import annotations

import sys


def register() -> None:
    """Add our model to lm-eval's registry; it is imported only when used."""
    # lm-eval adds its own models only while the registry is empty, so they go first.
    import lm_eval.models  # noqa: F401
    from lm_eval.api.registry import model_registry

    if "smelt" not in model_registry:
        model_registry.register("smelt", target="smelt.compress.integrations.lm_eval:SmeltLM")


def register_when_lm_eval_starts() -> None:
    """Called by torch as it is imported; lm-eval imports torch, and no release of it asks for models by entry point.

    It does nothing in a process that has not imported lm-eval, and no error here may stop torch.
    """
    if "lm_eval" in sys.modules:
        try:
            register()
        except Exception as error:  # e.g. another version of lm-eval, with another registry
            print(f"smelt: --model smelt is not available in this lm-eval ({error})", file=sys.stderr)
