"""Settings of removing tokens."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from ...system.settings.recipe_model import PathText
from ...system.settings.variants import Needed
from .base import PruneBase


class PruneVocabulary(PruneBase):
    """Remove tokens that a text does not use."""

    decides: ClassVar = "keeps the tokens of its corpus"

    structure: Literal["vocabulary"] = Field(description="What to remove: tokens of the vocabulary.")
    corpus: Annotated[PathText, Needed("structure vocabulary needs a corpus, whose tokens are kept")] = Field(
        description="Text whose tokens are kept: `builtin`, a .txt or .jsonl file, or a Hugging Face dataset."
    )
