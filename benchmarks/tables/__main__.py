"""Writes the tables of README and docs from ``benchmarks/results``, so that no number is copied by hand.

    python -m benchmarks.tables [--check]

Between ``<!-- results: NAME -->`` and ``<!-- results end -->`` a document gets the table of that name, with the command,
the machine and the date of its results file.
"""

from .documents import main

if __name__ == "__main__":
    main(__doc__)
