"""Write docs/doctor from the doctor's rules: one page a rule and their list."""

from __future__ import annotations

from pathlib import Path

from milepost.extend.doctor import pages


def main() -> None:
    folder = Path(__file__).parents[1] / "docs" / "doctor"
    folder.mkdir(parents=True, exist_ok=True)
    wanted = pages()
    for path in folder.glob("*.md"):
        if path.name not in wanted:
            path.unlink()
    for name, text in wanted.items():
        (folder / name).write_text(text, encoding="utf-8")
    print(f"{len(wanted)} pages in {folder.name}")


if __name__ == "__main__":
    main()
