"""The documentation is what the code says: generated pages are fresh, code blocks run, links lead somewhere."""

from __future__ import annotations

import importlib.util
import inspect
import json
import re
import struct
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from milepost.encoding import Info, catalogue

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
PAGES = sorted(path for path in DOCS.rglob("*.md") if path.parent.name not in ("families", "doctor"))
SYSTEMS = json.loads((Path(__file__).parent / "data" / "systems.json").read_text())


def blocks(text: str, language: str = "python") -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


@pytest.fixture(scope="module")
def builder() -> ModuleType:
    spec = importlib.util.spec_from_file_location("docs_build", DOCS / "build.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["docs_build"] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def made(builder: ModuleType) -> dict[Path, str]:
    texts: dict[Path, str] = builder.texts()
    return texts


# ---- generated pages ------------------------------------------------------------------------------------------------


def test_generated_texts_are_fresh(made: dict[Path, str]) -> None:
    stale = [name_of(path) for path, text in made.items() if not path.exists() or path.read_text("utf-8") != text]
    assert not stale, f"run `make docs`: {', '.join(stale)} would change"


def test_no_page_is_left_over(builder: ModuleType, made: dict[Path, str]) -> None:
    assert {path for path in (DOCS / "encodings").iterdir()} <= set(made)
    assert {path.stem for path in (DOCS / "families").iterdir()} == set(builder.PAGES)
    assert {path.stem for path in (DOCS / "pictures").iterdir()} >= {entry.name for entry in catalogue()}


def test_every_system_stands_in_the_readme_and_on_one_page(made: dict[Path, str]) -> None:
    promised = {name for group, systems in SYSTEMS.items() if group != "note" for name in systems.values()}
    readme = made[ROOT / "README.md"]
    pages = "".join(text for path, text in made.items() if path.parent.name == "encodings" and path.name != "README.md")
    for name in promised | {entry.name for entry in catalogue()}:
        assert readme.count(f"\n| [`{name}`](") == 1, name
        assert len(re.findall(rf"^## .* `{re.escape(name)}`$", pages, re.MULTILINE)) == 1, name


@pytest.mark.parametrize("entry", catalogue(), ids=lambda entry: entry.name)
def test_a_section_says_what_the_class_says(builder: ModuleType, made: dict[Path, str], entry: Info) -> None:
    page = made[DOCS / "encodings" / f"{builder.page_of(entry)}.md"]
    section = page.split(f"\n## {builder.heading(entry)}\n")[1].split("\n## ")[0]
    assert entry.summary in section and entry.source in section and f"../pictures/{entry.name}.png" in section
    assert ("learned" if entry.learnable else "fixed") in section and entry.manifestation in section
    texts = builder.option_texts(entry.cls.Config, entry.cls.__module__)
    for option in inspect.signature(entry.cls.Config).parameters:
        assert texts.get(option), f"{entry.name} has an option {option!r} that no docstring explains"
    rows = re.findall(r"^\| `(\w+)` \| ", section, re.MULTILINE)
    if "| option |" in section:
        assert rows == list(inspect.signature(entry.cls.Config).parameters)
    assert "``" not in section.replace("```", "") and ":class:" not in section


@pytest.mark.parametrize("entry", catalogue(), ids=lambda entry: entry.name)
def test_pictures_are_small(entry: Info) -> None:
    data = (DOCS / "pictures" / f"{entry.name}.png").read_bytes()
    width, height = struct.unpack(">II", data[16:24])
    assert data[:8] == b"\x89PNG\r\n\x1a\n" and len(data) <= 25_000 and 600 <= width <= 800 and height >= 300


def test_text_between_markers_is_replaced_and_nothing_else(builder: ModuleType) -> None:
    text = "before\n<!-- x -->\nold\n<!-- /x -->\nafter"
    assert builder.between(text, "x", "new") == "before\n<!-- x -->\nnew\n<!-- /x -->\nafter"
    with pytest.raises(ValueError, match="each once"):
        builder.between("nothing", "x", "new")


# ---- what the pages contain -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", [path for path in PAGES if blocks(path.read_text("utf-8"))], ids=name_of)
def test_python_blocks_run(path: Path, builder: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    text, space = path.read_text("utf-8"), {"__name__": "docs"}
    for number, block in enumerate(blocks(text)):
        space.pop("encoding", None) if block.startswith("encoding = ") else None
        exec(compile(block, f"{name_of(path)}, block {number}", "exec"), space)  # the page's own code, in order
        if block.startswith("encoding = "):
            check_built(builder, block, space["encoding"])


def check_built(builder: ModuleType, block: str, encoding: Any) -> None:
    """A `build(...)` line gives the encoding of its section, and one that works."""
    assert encoding.name == re.match(r'encoding = build\("([^"]+)"', block)[1]  # type: ignore[index]
    builder.use(encoding)


def anchors(path: Path) -> set[str]:
    headings = re.findall(r"^#+ (.*)$", path.read_text("utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("path", [*PAGES, ROOT / "README.md", ROOT / "CONTRIBUTING.md"], ids=name_of)
def test_links_lead_somewhere(path: Path) -> None:
    text = re.sub(r"^```.*?^```$", "", path.read_text("utf-8"), flags=re.DOTALL | re.MULTILINE)
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if target.startswith("http"):
            continue
        file, _, fragment = target.partition("#")
        found = (path.parent / file).resolve() if file else path
        assert found.exists(), f"{name_of(path)} links to {target}, which does not exist"
        assert not fragment or fragment in anchors(found), f"{name_of(path)} links to {target}: no such heading"


def test_every_page_can_be_reached_from_the_readme() -> None:
    seen: set[Path] = set()
    queue = [ROOT / "README.md"]
    while queue:
        path = queue.pop()
        if path in seen:
            continue
        seen.add(path)
        for target in re.findall(r"\]\(([^)\s#]+\.md)[^)]*\)", path.read_text("utf-8")):
            if not target.startswith("http"):
                queue.append((path.parent / target).resolve())
    assert not set(PAGES) - seen
