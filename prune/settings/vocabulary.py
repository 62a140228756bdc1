"""Settings of removing tokens."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from ...system.settings import PathText
from ...system.variants import Needed
from .base import PruneBase


class PruneVocabulary(PruneBase):
    """Take tokens away that a text does not use."""

    decides: ClassVar = "keeps what its corpus uses"

    structure: Literal["vocabulary"] = Field(description="What is taken away: tokens of the vocabulary.")
    corpus: Annotated[PathText, Needed("structure vocabulary needs a corpus, whose tokens are to stay")] = Field(
        description="The tokens of this text stay. `builtin`, a .txt or .jsonl file, or a Hugging Face dataset."
    )
