"""Signatures that minisign 0.11 made, and that it makes if it is installed."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
from huggingface_hub.utils import filter_repo_objects
from smelt.compress.verification.signature import SIGNATURE, check_signature
from smelt.models.directory.find import _HUB_FILES
from smelt.system.errors import SmeltError
from smelt.system.storage.new_directory import RECORD

pytest.importorskip("cryptography")

KEY = "RWSJf4bKRran3t3/BHGu0cThac//o8moWVbX0rEK5WY6QSeoJedvUACA"
OTHER = "RWQf6LRCGA9i53mlYecO4IzT51TGPpvWucNSCh1CBM0QTaLn73Y7GFO3"
SIGNED = '{"claims": {}}\n'
# `minisign -S -m smelt.json`, and with -l, as versions before 0.10 signed.
HASHED = """untrusted comment: signature from minisign secret key
RUSJf4bKRran3iA6qOwMWEyjjRQ6uiG9TrTR2eu3IvW3/nTveRgWvKsNIAMIOVA/KeR6RO+Cxk5ew9DZiysQ2IO89LDtCl6EBAA=
trusted comment: timestamp:1795660501	file:smelt.json	hashed
99zyWjGVbAcD7D/Cr23JSgZI2iFGG3+jQdEV5pfypkSeFDK5uflYLpB+ehby9vUvrQkW1srhhAZxReWDMVGeAQ==
"""
LEGACY = """untrusted comment: signature from minisign secret key
RWSJf4bKRran3hYRwRV1TJvwIUZUPe9MKfiDI/0CeHfd8RLEbO/upXqp77pHBLZsyKfgJLwUCYBvOXRY9dyjI4B4M950vYCAmgQ=
trusted comment: timestamp:1795660501	file:old.json
NHmFGQoKbAeTvcEMSjkLo+wEfB8YQDVlGp0MabLxALGnw3ncJpensWc+s9l9Zud68MDYMRflJsj/MBK6NiO0Dg==
"""


@pytest.mark.parametrize("signature", [HASHED, LEGACY])
def test_a_signature_holds_for_its_record_only(signature: str, tmp_path: Path) -> None:
    (tmp_path / SIGNATURE).write_text(signature)
    (tmp_path / RECORD).write_text(SIGNED)
    found = check_signature(tmp_path, RECORD, KEY)
    assert found is not None
    assert found.verdict == "confirmed"
    assert "DEA7B646CA867F89" in found.why, "as minisign names the key"
    (tmp_path / "key.pub").write_text(f"untrusted comment: minisign public key\n{KEY}\n")
    assert check_signature(tmp_path, RECORD, str(tmp_path / "key.pub")) == found

    (tmp_path / RECORD).write_text(SIGNED.replace("{}", "{ }"))
    assert _why(tmp_path, KEY) == "the record was changed after it was signed"


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (("timestamp:1795660501", "timestamp:1795660502"), "trusted comment was changed"),
        (("RUSJf4bKRran3iA6", "RUSJf4bKRran3iB6"), "the record was changed"),
        (("RUSJf4bK", "RUSJf4bL"), "another key"),
        (("RUSJ", "%%%%"), "not in minisign's format"),
        (("trusted comment: timestamp", "comment: timestamp"), "not in minisign's format"),
        (("==\n", "\n"), "not in minisign's format"),
    ],
)
def test_a_changed_signature_is_not_confirmed(change: tuple[str, str], sentence: str, tmp_path: Path) -> None:
    assert change[0] in HASHED
    (tmp_path / SIGNATURE).write_text(HASHED.replace(*change))
    (tmp_path / RECORD).write_text(SIGNED)
    assert sentence in _why(tmp_path, KEY)


def test_a_signature_is_fetched_from_the_hub_with_its_record() -> None:
    files = ["smelt.json", SIGNATURE, "model.safetensors", "config.json", "tokenizer.json", "pytorch_model.bin", "x.py"]
    assert list(filter_repo_objects(files, allow_patterns=_HUB_FILES)) == files[:5]


def test_a_missing_signature_or_key(tmp_path: Path) -> None:
    (tmp_path / RECORD).write_text(SIGNED)
    assert check_signature(tmp_path, RECORD, None) is None
    assert _why(tmp_path, KEY) == f"there is no {SIGNATURE}"
    (tmp_path / SIGNATURE).write_text(HASHED)
    found = check_signature(tmp_path, RECORD, None)
    assert found is not None
    assert found.verdict == "not measurable here"
    assert "another key" in _why(tmp_path, OTHER)
    for bad in ("nowhere.pub", KEY[:-1], "RW" + "A" * 54):
        with pytest.raises(SmeltError, match="--public-key"):
            check_signature(tmp_path, RECORD, bad)


@pytest.mark.skipif(shutil.which("minisign") is None, reason="minisign is not installed")
def test_minisign_signs_what_is_verified(tmp_path: Path) -> None:
    (tmp_path / RECORD).write_text(SIGNED * 1000)
    keys = ["-p", str(tmp_path / "a.pub"), "-s", str(tmp_path / "a.key")]
    subprocess.run(["minisign", "-G", "-W", *keys], check=True, capture_output=True)
    subprocess.run(["minisign", "-S", *keys[2:], "-m", str(tmp_path / RECORD)], check=True, capture_output=True)
    found = check_signature(tmp_path, RECORD, str(tmp_path / "a.pub"))
    assert found is not None
    assert found.verdict == "confirmed"


def _why(checkpoint: Path, key: str) -> str:
    found = check_signature(checkpoint, RECORD, key)
    assert found is not None
    assert found.verdict == "not confirmed"
    return found.why
