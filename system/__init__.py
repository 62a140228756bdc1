"""What concerns this machine and this process: files and errors. This room knows nothing of models."""

from __future__ import annotations
