"""A script for a launcher: runs the recipes of a JSON file, and at last a file's from the command line."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from smelt.compress import Recipe, run
from smelt.compress.cli import main

if __name__ == "__main__":
    _, recipes, last = sys.argv
    for data in json.loads(Path(recipes).read_text()):
        run(Recipe.model_validate(data), progress=False)
    sys.argv = ["smelt", "run", last]
    main()
