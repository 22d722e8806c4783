"""Write docs/encodings, the pictures and the README's table of encodings from the catalogue.

    python docs/build.py              texts, and the pictures that do not exist yet
    python docs/build.py --pictures   all pictures again
    python docs/build.py --texts      texts only
    python docs/build.py --demo demo  the README's picture and output from a finished `make demo`

Every sentence about an encoding comes from its docstring, its options from its configuration, its properties from
`milepost.catalogue()`; the introduction of a page is docs/families/<page>.md. Texts are the same on every machine.
"""

from __future__ import annotations

import argparse
import dataclasses
import inspect
import itertools
import re
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import torch

from milepost.encoding import Encoding, Info, build, catalogue, from_spec
from milepost.encodings.frequencies import Clex, Dynamic, LogN, LongRope, Resonance
from milepost.extend.doctor import pages as doctor_pages
from milepost.positions import Positions

DOCS = Path(__file__).resolve().parent
ROOT = DOCS.parent
GEOMETRY = {
    "num_heads": 8, "head_dim": 64, "width": 512, "num_layers": 1, "vocab_size": 258, "trained_length": 512,
}  # fmt: skip
"""What pictures and examples are made for: the defaults of `milepost show`."""

LARGEST_PICTURE = 25_000
"""Bytes."""

PAGES = {
    "absolute": "Absolute encodings",
    "relative": "Relative vectors",
    "bias": "Relative biases",
    "content": "Content-dependent encodings",
    "rotary": "Rotary encodings",
    "frequencies": "Rotary frequencies, stretched",
    "relative-maps": "Relative maps",
    "maps": "Position maps",
    "none": "No encoding",
}
"""One page a family, in the order of the README."""

PICTURED_AS = {
    "window": "window:size=64",
    "nope-llama4": "nope-llama4:floor_scale=512",
}
"""Catalogue name -> what its picture shows, where the bare name shows nothing."""

HEAT_MAPS = ("randomized-sinusoidal", "randomized-learned")
"""Encodings of other pages that are drawn as heat maps, like the absolute ones."""

METHODS = {"longrope": LongRope, "clex": Clex, "dynamic-ntk": Dynamic, "resonance-rope": Resonance, "log-n": LogN}
"""The frequency methods of encodings that are not simply RoPE with one of them."""

WORDS = {
    "initial": "into the first layer",
    "every": "into every layer",
    "none": "nowhere",
    "add": "added",
    "multiply": "multiplied",
}

OPTIONS = {
    "num_heads": "number of attention heads.",
    "head_dim": "width of one head.",
    "width": "width of the model.",
    "num_layers": "number of layers.",
    "vocab_size": "number of token ids.",
    "trained_length": "the length a checkpoint was trained at.",
    "factor": "how many times longer than the trained length.",
    "mixed_b": "1 or 0.75: Su's variants \"fixed\" and \"mixed\"; None: the plain method.",
    "new_base": "base of the ladder that is used.",
    "alpha": "turns in training below which a pair is divided by the factor.",
    "beta": "turns in training above which a pair is kept.",
    "ramp": "how pairs between are blended: linear in `\"rotations\"` (paper) or in the pair's `\"index\"` (engines).",
    "truncate": "round the ends of the index ramp outwards to whole pairs.",
    "gamma": "turns between which the second ramp blends.",
    "attention_factor": "multiplies cosines and sines; None: by the method's rule.",
    "mscale": "strength of the temperature in the attention factor's numerator.",
    "mscale_all_dim": "the same in its denominator; also sets the softmax factor.",
    "mscale_rule": "which code's rule reads the two: `\"transformers\"` or `\"reference\"` (DeepSeek's).",
    "scale_softmax": "apply the softmax factor that follows from mscale_all_dim.",
    "low_freq_factor": "pairs with fewer turns in training are divided by the factor.",
    "high_freq_factor": "pairs with more turns in training are kept.",
    "a": "frequencies up to it stop; None: from the trained length.",
    "b": "frequencies from it on are kept; None: from the trained length.",
    "rho": "frequency of the pairs between; None: from the trained length.",
    "exponent": "power of a pair's place in the ladder.",
    "base": "base of the frequencies.",
    "max_length": "the target length, for the attention factor and `growth=\"dynamic\"`.",
    "short_mscale": "replaces the attention factor up to the trained length (vLLM's key).",
    "long_mscale": "replaces the attention factor beyond it (vLLM's key).",
    "growth": "`\"switch\"`: by the row's length; `\"dynamic\"`: the long list grows with it; or one list always.",
}  # fmt: skip
"""What an option means where no configuration says it: names of the field, and of the frequency methods."""


# ---- what the catalogue says ----------------------------------------------------------------------------------------


def page_of(entry: Info) -> str:
    """The page that describes an encoding."""
    module = entry.cls.__module__.rpartition(".")[2]
    if module == "scaled":
        return "frequencies"
    if module in ("relmaps", "remapped"):
        return "relative-maps"
    return {"map": "maps", "schedule": "rotary"}.get(entry.family, entry.family)


def anchor(entry: Info) -> str:
    """GitHub's anchor of the section of an encoding."""
    return re.sub(r"[^a-z0-9 _-]", "", heading(entry).lower()).replace(" ", "-")


def heading(entry: Info) -> str:
    return f"{entry.title} `{entry.name}`"


def paragraphs(text: str) -> list[str]:
    """A docstring as Markdown paragraphs; lines that begin with a label are paragraphs of their own."""
    found: list[str] = []
    fresh = True
    labels = r"(?:Formula|Source|Shapes|Parameters?): |Raises \w+Error "
    text = re.sub(rf"(?<=\.) (?={labels})", "\n", text)
    for line in text.splitlines():
        if not line.strip():
            fresh = True
        elif fresh or re.match(labels, line) or line.startswith("- "):
            found.append(line.strip())
            fresh = False
        else:
            found[-1] += " " + line.strip()
    return [markdown(paragraph) for paragraph in found]


def markdown(text: str) -> str:
    """reStructuredText roles and literals as Markdown."""
    text = re.sub(r":\w+:`~?([\w.]+)`", lambda match: f"`{match[1].rpartition('.')[2]}`", text)
    text = re.sub(r"``(.+?)``", lambda match: f"`{match[1]}`", text)
    return re.sub(r"^(Formula|Source|Shapes|Parameters?|Raises)\b(:?)", r"**\1**\2", text)


def option_texts(config: type, module: str) -> dict[str, str]:
    """Option -> what it means, from the docstrings of a configuration, its bases and the classes they refer to."""
    texts: dict[str, str] = {}
    known = {field.name for field in dataclasses.fields(config)}
    queue: list[Any] = list(config.__mro__)
    while queue:
        source = queue.pop(0)
        doc = inspect.cleandoc(source.__dict__.get("__doc__") or "")
        if not dataclasses.is_dataclass(source) or not doc:
            continue
        for names, text in attributes(doc, known):
            for name in names:
                texts.setdefault(name, text)
        for name in re.findall(r":class:`(\w+)`", doc):
            other = getattr(sys.modules[module], name, None)
            if inspect.isclass(other) and issubclass(getattr(other, "Config", object), object):
                referred = getattr(other, "Config", None)
                if referred is not None and referred not in (config, source):
                    queue.append(referred)
    return {name: markdown(text) for name, text in {**OPTIONS, **texts}.items()}


def attributes(doc: str, known: set[str]) -> Iterable[tuple[list[str], str]]:
    """The entries of a docstring's "Attributes" section; several may share a line ("a, b: ..." or "a: .... b: ...")."""
    _, _, section = doc.partition("Attributes:\n")
    entries: list[str] = []
    for line in section.splitlines():
        if re.match(r" {4}\S", line):
            entries.append(line.strip())
        elif entries and line.strip():
            entries[-1] += " " + line.strip()
    for entry in entries:
        names = "|".join(map(re.escape, sorted(known)))
        pieces = re.split(rf"(?:(?<=\.) |; )(?=`{{0,2}}(?:{names})`{{0,2}}: )", entry)
        for piece in pieces:
            before, colon, text = piece.partition(": ")
            if colon:
                yield [name.strip("` ") for name in before.split(",")], text.rstrip(";")


def type_text(kind: Any, config: type) -> str:
    """A type as it would be written, with the choices behind a name such as `Layout`."""
    if not isinstance(kind, str):
        kind = kind.__name__ if inspect.isclass(kind) else str(kind).replace("typing.", "")
    for word in set(re.findall(r"\b[A-Z]\w+", kind)) - {"Literal", "None", "Any"}:
        kind = re.sub(rf"\b{word}\b", alias_text(word, config), kind)
    return re.sub(r"Literal\[(.*?)\]", lambda match: match[1].replace("'", '"').replace(", ", " | "), kind)


def alias_text(name: str, config: type) -> str:
    """The choices behind a name in the module of a configuration or its bases; the name where there are none."""
    own = [sys.modules[base.__module__] for base in config.__mro__]
    for module in [*own, *(module for key, module in sorted(sys.modules.items()) if key.startswith("milepost."))]:
        alias = getattr(module, name, None)
        if get_origin(alias) is Literal:
            return " | ".join(f'"{choice}"' for choice in get_args(alias))
    return name


def default_text(entry: Info, field: dataclasses.Field[Any]) -> str:
    preset = dict(entry.preset)
    if field.name in preset:
        return f"`{preset[field.name]!r}` (by this name)"
    if field.default is not dataclasses.MISSING:
        return f"`{field.default!r}`"
    if field.default_factory is not dataclasses.MISSING:
        return f"`{field.default_factory()!r}`"
    return "needed"


def options_table(entry: Info) -> list[str]:
    texts = option_texts(entry.cls.Config, entry.cls.__module__)
    rows = []
    for field in dataclasses.fields(entry.cls.Config):
        kind = f"`{type_text(field.type, entry.cls.Config)}`"
        rows.append((f"`{field.name}`", kind, default_text(entry, field), texts.get(field.name, "")))
    if not rows:
        return ["It has no options."]
    return table(("option", "type", "default", "meaning"), rows)


def table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> list[str]:
    cells = [[cell.replace("|", "\\|") for cell in row] for row in rows]
    heads = list(head)
    return [line(heads), line(["---"] * len(heads)), *map(line, cells)]


def line(cells: Iterable[str]) -> str:
    return "| " + " | ".join(cells) + " |"


# ---- how to build one -----------------------------------------------------------------------------------------------


def example(entry: Info) -> str:
    """The shortest `build(...)` line that gives an encoding which works."""
    fields = {f.name: f for f in dataclasses.fields(entry.cls.Config) if f.name not in dict(entry.preset)}
    needed = [name for name, f in fields.items() if f.default is f.default_factory is dataclasses.MISSING]
    optional = [name for name in GEOMETRY if name in fields and name not in needed]
    for count in range(len(optional) + 1):
        for more in itertools.combinations(optional, count):
            options = {name: GEOMETRY[name] for name in [*needed, *more]}
            try:
                use(build(entry.name, **options))
            except (ValueError, TypeError):
                continue
            arguments = "".join(f", {name}={value!r}" for name, value in options.items())
            return f'encoding = build("{entry.name}"{arguments})'
    raise ValueError(f"no combination of {', '.join(GEOMETRY)} gives a {entry.name} that works")


def use(encoding: Encoding, length: int = 8) -> None:
    """Ask an encoding for everything it has at `length` positions."""
    tokens = torch.arange(length)[None] + 97 if encoding.needs_tokens else None
    positions = Positions.full(length)
    layer = encoding.for_layer(0)
    terms = layer(positions, tokens)
    if terms.bias is not None:
        terms.bias.dense()
    width = getattr(encoding.config, "width", None) or GEOMETRY["width"]
    encoding.embed(torch.zeros(1, length, width), positions, tokens)


# ---- the pages ------------------------------------------------------------------------------------------------------


def properties(entry: Info) -> str:
    """The four properties of the survey, and what a model needs to know, in one line."""
    row = f' (row "{entry.survey}" of its Table 1)' if entry.survey else ""
    words = [
        f"manifests as {entry.manifestation}" if entry.manifestation != "none" else "manifests as nothing",
        "learned" if entry.learnable else "fixed",
        f"integration: {WORDS.get(entry.integration, entry.integration) if entry.integration != 'none' else 'none'}",
        f"injection: {WORDS[entry.injection]}",
    ]
    shared = "one set serves all layers" if entry.shared else "each layer has its own"
    return f"Survey{row}: {'; '.join(words)}. As published {shared}."


def section(entry: Info, first: dict[type, Info]) -> list[str]:
    """The section of one encoding."""
    out = [f"## {heading(entry)}", "", entry.summary, ""]
    if (DOCS / "pictures" / f"{entry.name}.png").exists():
        out += [f"![{entry.title}](../pictures/{entry.name}.png)", ""]
    out += ["```python", example(entry), "```", ""]
    original = first[entry.cls]
    if original is entry:
        for paragraph in paragraphs(inspect.getdoc(entry.cls) or ""):
            out += [paragraph, ""]
        method = METHODS.get(entry.name, getattr(entry.cls, "method_type", None))
        if method is not None:
            out += [f"The frequencies alone are `milepost.encodings.frequencies.{method.__name__}`:", ""]
            out += [f"> {paragraph}\n>" for paragraph in paragraphs(inspect.getdoc(method) or "")]
            out[-1] = out[-1].removesuffix("\n>")
            out += [""]
        out += [properties(entry), "", f"Paper: {entry.source}.", "", *options_table(entry), ""]
    else:
        fixed = ", ".join(f"`{name}={value!r}`" for name, value in entry.preset)
        out += [
            f"The encoding of [{original.title}](#{anchor(original)}), which has the formula and the options, "
            f"with {fixed or 'its defaults'}.",
            "",
            properties(entry),
            "",
            f"Paper: {entry.source}.",
            "",
        ]
    return out


def page(name: str) -> str:
    """The page of a family, as Markdown."""
    entries = [entry for entry in catalogue() if page_of(entry) == name]
    first: dict[type, Info] = {}
    for entry in entries:
        first.setdefault(entry.cls, entry)
    out = [
        "<!-- Written by docs/build.py; the introduction is in docs/families. -->",
        f"# {PAGES[name]}",
        "",
        (DOCS / "families" / f"{name}.md").read_text(encoding="utf-8").strip(),
        "",
        *table(("name", "what it does"), ((f"[`{e.name}`](#{anchor(e)})", e.summary) for e in entries)),
        "",
        "Names are what `build`, `milepost show`, `milepost compare --methods` and `attach` take. Positions i (query)",
        "and j (key) count from 0, d is their distance i - j unless it is a width, H the number of heads, and L the",
        "trained length.",
        "",
        "```python",
        "from milepost import build",
        "```",
        "",
    ]
    for entry in entries:
        out += section(entry, first)
    return "\n".join(out).rstrip() + "\n"


def index() -> str:
    """The list of all encodings with the survey's properties."""
    out = [
        "<!-- Written by docs/build.py. -->",
        "# All encodings",
        "",
        f"{len(catalogue())} names, one page a family. The columns in the middle are the four properties by which the",
        "survey of Zhao et al. 2023 (arXiv 2312.17044) sorts encodings: how the position shows, whether it is learned,",
        "how it meets the content, and which layers receive it.",
        "",
    ]
    for name, title in PAGES.items():
        rows = [
            (
                f"[`{e.name}`]({name}.md#{anchor(e)})", e.title, e.manifestation, "yes" if e.learnable else "no",
                e.integration, e.injection, e.source,
            )
            for e in catalogue()
            if page_of(e) == name
        ]  # fmt: skip
        heads = ("name", "encoding", "manifests as", "learned", "integration", "injection", "paper")
        out += [f"## [{title}]({name}.md)", "", *table(heads, rows), ""]
    return "\n".join(out).rstrip() + "\n"


def readme_table() -> str:
    """The table of encodings in the README."""
    rows = []
    for name, title in PAGES.items():
        entries = [entry for entry in catalogue() if page_of(entry) == name]
        rows.append((f"**[{title}](docs/encodings/{name}.md)**", "", ""))
        rows += [
            (f"[`{e.name}`](docs/encodings/{name}.md#{anchor(e)})", e.summary, "learned" if e.learnable else "")
            for e in entries
        ]
    return "\n".join(table(("name", "what it does", ""), rows))


def presets_table() -> str:
    """What the presets set: every value of quick, and what the others change."""
    from milepost.compare.settings import PRESETS, Settings

    rows = []
    for field in dataclasses.fields(Settings):
        changed = [PRESETS[name].get(field.name) for name in PRESETS if name != "quick"]
        values = [field.default, *changed]
        texts = [setting_text(value, first=place == 0) for place, value in enumerate(values)]
        rows.append((f"`--{field.name.replace('_', '-')}`", *texts))
    return "\n".join(table(("flag", *(f"`{name}`" for name in ("quick", *(n for n in PRESETS if n != "quick")))), rows))


def setting_text(value: Any, *, first: bool) -> str:
    if value is None and not first:
        return ""
    if isinstance(value, tuple):
        return ", ".join(f"`{item}`" if isinstance(item, str) else str(item) for item in value)
    return f"`{value}`" if isinstance(value, str) else str(value)


def texts() -> dict[Path, str]:
    """Every file that this script writes, and what stands in it."""
    made = {DOCS / "encodings" / f"{name}.md": page(name) for name in PAGES}
    made[DOCS / "encodings" / "README.md"] = index()
    made.update({DOCS / "doctor" / name: text for name, text in doctor_pages().items()})
    reproduce = DOCS / "reproduce.md"
    made[reproduce] = between(reproduce.read_text(encoding="utf-8"), "presets", presets_table())
    readme = ROOT / "README.md"
    made[readme] = between(readme.read_text(encoding="utf-8"), "encodings", readme_table())
    return made


def between(text: str, marker: str, inside: str) -> str:
    """`text` with `inside` between the comments `<!-- marker -->` and `<!-- /marker -->`.

    Raises ValueError where they do not both stand once.
    """
    begin, end = f"<!-- {marker} -->", f"<!-- /{marker} -->"
    if text.count(begin) != 1 or text.count(end) != 1:
        raise ValueError(f"the text needs {begin} and {end}, each once")
    before, _, rest = text.partition(begin)
    _, _, after = rest.partition(end)
    return f"{before}{begin}\n{inside}\n{end}{after}"


# ---- pictures -------------------------------------------------------------------------------------------------------


def picture_of(entry: Info) -> bytes:
    """The picture of an encoding as a small PNG: what `milepost show NAME --out NAME.png` draws, smaller."""
    import io

    from PIL import Image

    from milepost.report import picture

    geometry, length = GEOMETRY, 4096
    if page_of(entry) == "absolute" or entry.name in HEAT_MAPS:  # fewer channels and positions
        geometry, length = {**GEOMETRY, "head_dim": 8, "width": 64}, 512
    torch.manual_seed(0)
    encoding = from_spec(PICTURED_AS.get(entry.name, entry.name), geometry)
    figure = picture(encoding, geometry, length=length, title=entry.title)
    drawn = io.BytesIO()
    figure.savefig(drawn, format="png", dpi=760 / figure.get_figwidth())
    image = Image.open(drawn).convert("RGB")
    return small_png(image)


def small_png(image: Any, largest: int = LARGEST_PICTURE) -> bytes:
    """A picture with as many colours as fit into `largest` bytes."""
    import io

    from PIL import Image

    for colors in (256, 128, 64, 32, 16):
        out = io.BytesIO()
        palette = image.quantize(colors, method=Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE)
        palette.save(out, "png", optimize=True)
        if out.tell() <= largest:
            break
    return out.getvalue()


def pictures(*, again: bool) -> int:
    """Draw the pictures that do not exist (or all), and drop those of names that are gone."""
    folder = DOCS / "pictures"
    folder.mkdir(exist_ok=True)
    count = 0
    for entry in catalogue():
        path = folder / f"{entry.name}.png"
        if again or not path.exists():
            path.write_bytes(picture_of(entry))
            count += 1
    return count


def take_demo(folder: Path) -> None:
    """The picture and the output of a finished `milepost compare --preset quick --out demo`, into the README.

    What is left out of the output is marked by an ellipsis.
    """
    import io
    import json

    from PIL import Image
    from rich.console import Console

    from milepost.report import tables

    drawn = Image.open(folder / "perplexity.png").convert("RGB")
    width = 1100
    drawn = drawn.resize((width, round(drawn.height * width / drawn.width)), Image.Resampling.LANCZOS)
    (DOCS / "pictures" / "demo-perplexity.png").write_bytes(small_png(drawn, 60_000))
    results = json.loads((folder / "results.json").read_text(encoding="utf-8"))
    shown = []
    for made in tables(results):
        if made.name in ("perplexity-windows", "passkey"):
            out = io.StringIO()
            console = Console(file=out, width=160, highlight=False)  # a table may be a little wider than asked
            console.print(made.to_rich(120))
            shown.append("\n".join(line.rstrip() for line in out.getvalue().strip("\n").splitlines()))
    text = "\n…\n".join(shown) + "\n…\nreport: demo/report.html"
    readme = ROOT / "README.md"
    page = readme.read_text(encoding="utf-8")
    alt = "Perplexity against length, for models trained at 128 tokens"
    page = between(page, "demo-picture", f"![{alt}](docs/pictures/demo-perplexity.png)")
    page = between(page, "demo-output", f"```console\n$ milepost compare --preset quick --out demo\n{text}\n```")
    readme.write_text(page, encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--pictures", action="store_true", help="draw all pictures again")
    which.add_argument("--texts", action="store_true", help="texts only")
    which.add_argument("--demo", type=Path, metavar="FOLDER", help="take the README's picture and output from it")
    arguments = parser.parse_args()
    if arguments.demo is not None:
        take_demo(arguments.demo)
        return
    if not arguments.texts:
        print(f"{pictures(again=arguments.pictures)} pictures drawn")
    changed = 0
    for path, text in texts().items():
        path.parent.mkdir(exist_ok=True)
        if not path.exists() or path.read_text(encoding="utf-8") != text:
            path.write_text(text, encoding="utf-8")
            changed += 1
    print(f"{changed} texts changed")


if __name__ == "__main__":
    main()
