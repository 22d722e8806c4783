"""The rules of the doctor, as data: reports, checks and the pages of docs/doctor are all made from this table."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Severity = Literal["error", "warning", "note"]


@dataclass(frozen=True, kw_only=True)
class Rule:
    """One thing that can be wrong: its id, how bad it is, what it means, an example and its cure.

    ``error``: an engine stops, or computes other frequencies than the file means. ``warning``: right today under
    conditions that the text names. ``note``: nothing is wrong; worth knowing.
    """

    id: str
    severity: Severity
    title: str
    why: str
    wrong: str
    right: str


def _rule(id: str, severity: Severity, title: str, why: str, wrong: str, right: str) -> Rule:
    return Rule(id=id, severity=severity, title=title, why=why, wrong=wrong, right=right)


_YARN = '"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768'

RULES: dict[str, Rule] = {
    rule.id: rule
    for rule in (
        _rule(
            "not-json",
            "error",
            "The file is not JSON",
            "Nothing can be read from it. Single quotes, a trailing comma, a byte order mark, or a block that passed "
            "through a shell are the usual causes.",
            "{'rope_theta': 10000}",
            '{"rope_theta": 10000}',
        ),
        _rule(
            "not-an-object",
            "error",
            "The document is not a JSON object",
            "A config.json, a rope block and an override are objects: keys with values.",
            "[1, 2]",
            '{"rope_theta": 10000.0}',
        ),
        _rule(
            "block-not-an-object",
            "error",
            "The rope block is not a JSON object",
            "transformers and vLLM read keys from it. A block given as text was quoted once too often.",
            '"rope_scaling": "{\\"rope_type\\": \\"linear\\", \\"factor\\": 2.0}"',
            '"rope_scaling": {"rope_type": "linear", "factor": 2.0}',
        ),
        _rule(
            "two-blocks",
            "error",
            "rope_scaling and rope_parameters say different things",
            "transformers 5 takes rope_scaling and forgets rope_parameters, base included; transformers 4 never reads "
            "rope_parameters.",
            '"rope_scaling": {"rope_type": "linear", "factor": 2.0}, "rope_parameters": {"rope_type": "default", '
            '"rope_theta": 1000000.0}',
            '"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1000000.0}',
        ),
        _rule(
            "duplicate-key",
            "error",
            "A key stands twice with two values",
            "JSON parsers keep one and drop the other without a word: Python the last, some others the first.",
            '"rope_theta": 10000.0, "rope_theta": 1000000.0',
            '"rope_theta": 1000000.0',
        ),
        _rule(
            "block-not-read",
            "error",
            "The block stands where the model does not read it",
            "A model with a text_config reads its rope block there. Classes with blocks per layer type do not read a "
            "flat rope_parameters, classes with one block do not read blocks per layer type. The scaling is lost "
            "without a word, or the model stops with an AttributeError or a KeyError.",
            f'{_YARN}}}, "text_config": {{"model_type": "qwen2", "rope_theta": 1000000.0}}',
            f'"text_config": {{"model_type": "qwen2", "rope_theta": 1000000.0, {_YARN}}}}}',
        ),
        _rule(
            "type-not-for-class",
            "error",
            "This model class does not know the type by that name",
            "su is the old name of longrope and mrope of default with an mrope_section: only the classes that once "
            "wrote them still read them, phi3 only with the original length inside the block. phi3 takes yarn for "
            "longrope. vLLM renames su and mrope in a file.",
            '"model_type": "qwen2", "rope_scaling": {"rope_type": "mrope", "mrope_section": [16, 24, 24]}',
            '"model_type": "qwen2", "rope_scaling": {"rope_type": "default", "mrope_section": [16, 24, 24]}',
        ),
        _rule(
            "null-value",
            "error",
            "A key of the block is null",
            "transformers fills in what is missing, and keeps what is there: a null base, type, share or original "
            "length reaches the computation and stops it.",
            '"rope_theta": 1000000.0, "rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": null}',
            '"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1000000.0}',
        ),
        _rule(
            "truncate-not-boolean",
            "error",
            "truncate is neither true nor false",
            "Engines ask whether it is empty: the text \"false\" counts as true.",
            f'{_YARN}, "truncate": "false"}}',
            f'{_YARN}, "truncate": false}}',
        ),
        _rule(
            "head-dim-null",
            "error",
            "head_dim is null",
            "Classes without a head_dim of their own keep the null, and yarn, dynamic and longrope multiply it in "
            "transformers 5.24. Files that transformers saved itself contain it.",
            f'"model_type": "qwen2", "head_dim": null, {_YARN}}}',
            f'"model_type": "qwen2", "head_dim": 128, {_YARN}}}',
        ),
        _rule(
            "mrope-sections",
            "error",
            "The sections of M-RoPE do not add up to the pairs that rotate",
            "Each pair belongs to time, height or width; the sections count pairs, half the rotary dimension.",
            '"head_dim": 128, "rope_scaling": {"rope_type": "default", "mrope_section": [32, 48, 48]}',
            '"head_dim": 128, "rope_scaling": {"rope_type": "default", "mrope_section": [16, 24, 24]}',
        ),
        _rule(
            "partial-disagrees",
            "error",
            "Two different rotated shares",
            "transformers 5 takes the block's, transformers 4 and other readers the one at the top level.",
            '"partial_rotary_factor": 0.4, "rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}',
            '"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}',
        ),
        _rule(
            "lists-swapped",
            "warning",
            "LongRoPE's long list stretches less than its short list",
            "The long list is for longer input; published ones divide by more in every pair.",
            '"rope_scaling": {"rope_type": "longrope", "short_factor": [2.0, 4.0], "long_factor": [1.0, 1.0], '
            '"original_max_position_embeddings": 4096}',
            '"rope_scaling": {"rope_type": "longrope", "short_factor": [1.0, 1.0], "long_factor": [2.0, 4.0], '
            '"original_max_position_embeddings": 4096}',
        ),
        _rule(
            "factor-integer",
            "warning",
            "vLLM's linear type stops at an integer factor",
            "transformers takes 4 and 4.0 alike; vLLM 0.33 asks whether the factor is a float and takes anything else "
            "for a list of factors.",
            '"rope_scaling": {"rope_type": "linear", "factor": 4}',
            '"rope_scaling": {"rope_type": "linear", "factor": 4.0}',
        ),
        _rule(
            "nested-mixed",
            "error",
            "Some keys of the block are layer types and some are not",
            "A block is either flat or holds one block for each layer type. In a mixture the flat keys are never read.",
            '"rope_parameters": {"full_attention": {"rope_type": "default"}, "factor": 2.0}',
            '"rope_parameters": {"full_attention": {"rope_type": "linear", "factor": 2.0}}',
        ),
        _rule(
            "nested-unknown-layer",
            "error",
            "A block is given for a layer type that the model does not have",
            "transformers treats the block as nested only for names in layer_types; a misspelt one is never read.",
            '"layer_types": ["full_attention"], "rope_parameters": {"full_atention": {"rope_type": "default"}}',
            '"layer_types": ["full_attention"], "rope_parameters": {"full_attention": {"rope_type": "default"}}',
        ),
        _rule(
            "rope-type-missing",
            "error",
            "The scaling names no type, so nothing is scaled",
            "transformers 5 takes type default and drops the factor with a log line; transformers 4 stops.",
            '"rope_scaling": {"factor": 4.0}',
            '"rope_scaling": {"rope_type": "linear", "factor": 4.0}',
        ),
        _rule(
            "rope-type-case",
            "error",
            "Rope types are lower case",
            "Every engine compares the name letter by letter: a capital makes it an unknown type.",
            '"rope_scaling": {"rope_type": "YaRN", "factor": 4.0}',
            '"rope_scaling": {"rope_type": "yarn", "factor": 4.0}',
        ),
        _rule(
            "rope-type-unknown",
            "error",
            "No engine knows this rope type",
            "transformers accepts the file with a warning and dies with a KeyError when the model is built. NTK-aware "
            "scaling has no type in transformers: it is a larger rope_theta. Methods of milepost become types after "
            "`milepost.register_rope_types()`.",
            '"rope_scaling": {"rope_type": "yran", "factor": 4.0}',
            '"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}',
        ),
        _rule(
            "rope-type-one-engine",
            "warning",
            "Only one engine knows this rope type",
            "vLLM knows types that transformers does not (ntk, deepseek_yarn ...), and its ntk without mixed_b "
            "slows the first pair too, which NTK-aware scaling does not.",
            '"rope_scaling": {"rope_type": "ntk", "factor": 4.0}',
            '"rope_theta": 40889.94',
        ),
        _rule(
            "type-disagrees",
            "error",
            "type and rope_type disagree",
            "transformers takes rope_type without a word; older code takes type; vLLM stops.",
            '"rope_scaling": {"rope_type": "linear", "type": "dynamic", "factor": 2.0}',
            '"rope_scaling": {"rope_type": "linear", "factor": 2.0}',
        ),
        _rule(
            "legacy-type-key",
            "note",
            "type is the old name of rope_type",
            "It still works in transformers 5 and vLLM; new files should say rope_type.",
            '"rope_scaling": {"type": "linear", "factor": 2.0}',
            '"rope_scaling": {"rope_type": "linear", "factor": 2.0}',
        ),
        _rule(
            "not-a-number",
            "error",
            "A number is not a number",
            "Text in quotes, true, null, NaN and infinity are not numbers. transformers warns and fails deep inside "
            "(TypeError between str and int), or computes with it.",
            '"rope_scaling": {"rope_type": "linear", "factor": "4.0"}',
            '"rope_scaling": {"rope_type": "linear", "factor": 4.0}',
        ),
        _rule(
            "number-out-of-range",
            "error",
            "A number is outside the range in which it means something",
            "Lengths and sizes are whole numbers above 0, rope_theta is above 1, partial_rotary_factor lies in (0, 1], "
            "an attention factor and every LongRoPE divisor are above 0.",
            '"rope_theta": 1',
            '"rope_theta": 10000.0',
        ),
        _rule(
            "factor-below-one",
            "error",
            "The factor is inverted",
            "factor is how many times longer the input gets: at least 1. llama.cpp's rope-freq-scale is its inverse.",
            '"rope_scaling": {"rope_type": "linear", "factor": 0.25}',
            '"rope_scaling": {"rope_type": "linear", "factor": 4.0}',
        ),
        _rule(
            "key-missing",
            "error",
            "A key that this type needs is missing",
            "transformers stops with a KeyError when it validates the file.",
            '"rope_scaling": {"rope_type": "linear"}',
            '"rope_scaling": {"rope_type": "linear", "factor": 4.0}',
        ),
        _rule(
            "unknown-key",
            "error",
            "A key is not one that this type reads",
            "transformers drops it with a log line that nobody sees. The nearest known key is named.",
            f'{_YARN}, "betafast": 32}}',
            f'{_YARN}, "beta_fast": 32}}',
        ),
        _rule(
            "attn-factor",
            "error",
            "attn_factor is not attention_factor",
            "In llama.cpp and older vLLM attn_factor multiplies YaRN's own 0.1 ln s + 1; attention_factor of "
            "transformers and newer vLLM replaces it. transformers drops attn_factor and uses 0.1 ln s + 1.",
            f'{_YARN}, "attn_factor": 0.8782488562869419}}',
            f'{_YARN}, "attention_factor": 1.0}}',
        ),
        _rule(
            "attention-factor-unusual",
            "warning",
            "The attention factor is far from anything trained",
            "It multiplies cosine and sine of queries and keys, so logits carry its square, at every length. Published "
            "values lie between 0.5 and 2.",
            f'{_YARN}, "attention_factor": 8.0}}',
            f'{_YARN}, "attention_factor": 1.1386}}',
        ),
        _rule(
            "original-length-missing",
            "error",
            "The length before scaling is missing",
            "yarn, llama3 and longrope measure each pair against it. transformers 5 silently takes "
            "max_position_embeddings, which is usually the stretched length: middle pairs are then hardly stretched.",
            '"max_position_embeddings": 131072, "rope_scaling": {"rope_type": "yarn", "factor": 4.0}',
            f'"max_position_embeddings": 131072, {_YARN}}}',
        ),
        _rule(
            "original-lengths-disagree",
            "error",
            "Two different original lengths",
            "transformers takes the one at the top level without a word, and so does vLLM, which reads files through "
            "it; converters for llama.cpp take the block's. phi3's class has one of its own, 4096.",
            f'"original_max_position_embeddings": 4096, {_YARN}}}',
            f"{_YARN}}}",
        ),
        _rule(
            "length-mismatch",
            "warning",
            "max_position_embeddings is not factor x original length",
            "The scaling reaches one length and the file declares another. Servers cut or allow input by the declared "
            "one; older transformers took the ratio instead of the factor.",
            f'"max_position_embeddings": 40960, {_YARN}}}',
            f'"max_position_embeddings": 131072, {_YARN}}}',
        ),
        _rule(
            "llama3-length",
            "warning",
            "The original length is not below max_position_embeddings",
            "llama3 scaling carries the true length in max_position_embeddings; with the original length there nothing "
            "would be gained.",
            '"max_position_embeddings": 8192, "rope_scaling": {"rope_type": "llama3", "factor": 8.0, '
            '"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}',
            '"max_position_embeddings": 131072, "rope_scaling": {"rope_type": "llama3", "factor": 8.0, '
            '"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}',
        ),
        _rule(
            "range-backwards",
            "error",
            "The blending range runs backwards",
            "beta_fast and high_freq_factor count the turns above which a pair is kept, beta_slow and low_freq_factor "
            "those below which it is stretched fully. Swapped, the slow pairs are not stretched at all.",
            f'{_YARN}, "beta_fast": 1, "beta_slow": 32}}',
            f'{_YARN}, "beta_fast": 32, "beta_slow": 1}}',
        ),
        _rule(
            "list-length",
            "error",
            "A LongRoPE list does not have one number a pair",
            "short_factor and long_factor need rotary_dim / 2 numbers, rotary_dim being head_dim times "
            "partial_rotary_factor. transformers warns and stops with a bare size mismatch.",
            '"head_dim": 128, "rope_scaling": {"rope_type": "longrope", "short_factor": [1.0], "long_factor": [2.0], '
            '"original_max_position_embeddings": 4096}',
            "both lists from the original checkpoint, 64 numbers each",
        ),
        _rule(
            "theta-missing",
            "warning",
            "rope_theta is not stated",
            "transformers takes the class's default, 10000 in most, and other readers take their own. Many models were "
            "trained with another base; with the wrong one they fail from the first hundred tokens on.",
            '"max_position_embeddings": 4096',
            '"max_position_embeddings": 4096, "rope_theta": 10000.0',
        ),
        _rule(
            "theta-disagrees",
            "error",
            "Two different bases",
            "transformers 5 takes the block's, transformers 4 and other readers the one at the top level.",
            '"rope_theta": 10000.0, "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0}',
            '"rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0}',
        ),
        _rule(
            "theta-lost",
            "error",
            "The override loses rope_theta",
            "An override replaces the whole block. transformers 5 keeps the base inside it, so a block without "
            "rope_theta falls back to 10000 (vLLM 0.33, silently) or to None (NoneType ** Tensor). Only inside "
            "text_config does vLLM merge key by key.",
            '--hf-overrides \'{"rope_parameters": {"rope_type": "yarn", "factor": 4.0, '
            '"original_max_position_embeddings": 32768}}\'',
            '--hf-overrides \'{"rope_parameters": {"rope_type": "yarn", "factor": 4.0, '
            '"original_max_position_embeddings": 32768, "rope_theta": 1000000.0}}\'',
        ),
        _rule(
            "theta-lowered",
            "error",
            "The override lowers the base",
            "A larger base slows the pairs, which is one way to stretch; a smaller one makes every pair but the first "
            "turn faster than in training, from the first token on. Usually a block copied from another model.",
            '"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0} on a base of 1000000',
            '"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1000000.0}',
        ),
        _rule(
            "override-not-read",
            "error",
            "The override writes rope_theta where it is not read",
            "The checkpoint keeps its base inside rope_parameters, which wins over rope_theta at the top level.",
            "--hf-overrides '{\"rope_theta\": 5000000.0}'",
            '--hf-overrides \'{"rope_parameters": {"rope_type": "default", "rope_theta": 5000000.0}}\'',
        ),
        _rule(
            "trained-scaling-replaced",
            "error",
            "A scaling that the model was trained with is replaced",
            "The weights fit the frequencies of the checkpoint. A user's report: perplexity rose from 10 to over 100 "
            "past 65k after linear scaling took the place of llama3. Compose on top of the trained frequencies, or "
            "pass the flag that says you mean it.",
            '"rope_scaling": {"type": "linear", "factor": 2.0} on a checkpoint with rope_type llama3',
            "the checkpoint's own block with a larger factor",
        ),
        _rule(
            "partial-ignored",
            "error",
            "This model class ignores partial_rotary_factor",
            "transformers' class rotates the whole head without a word for the default type, and crashes on the sizes "
            "for scaled types.",
            '"model_type": "llama", "partial_rotary_factor": 0.5',
            "a class that honours it (gpt_neox, phi, stablelm, glm ...), or the whole head rotated",
        ),
        _rule(
            "share-missing",
            "warning",
            "proportional without partial_rotary_factor rotates everything",
            "p-RoPE is the share of pairs that rotate; without it transformers takes 1, which is plain RoPE.",
            '"rope_parameters": {"rope_type": "proportional", "rope_theta": 1000000.0}',
            '"rope_parameters": {"rope_type": "proportional", "rope_theta": 1000000.0, "partial_rotary_factor": 0.25}',
        ),
        _rule(
            "rotary-dim-odd",
            "error",
            "The rotated part of a head has an odd width",
            "Channels rotate in pairs.",
            '"head_dim": 15',
            '"head_dim": 16',
        ),
        _rule(
            "dynamic-length",
            "error",
            "dynamic scaling is switched off by the declared length",
            "It measures growth against max_position_embeddings, not against original_max_position_embeddings, which "
            "is not read: set to the wished length, nothing is scaled below it.",
            '"max_position_embeddings": 16384, "rope_scaling": {"rope_type": "dynamic", "factor": 4.0, '
            '"original_max_position_embeddings": 4096}',
            '"max_position_embeddings": 4096, "rope_scaling": {"rope_type": "dynamic", "factor": 4.0}',
        ),
        _rule(
            "dynamic-cache",
            "warning",
            "Frequencies change while the cache keeps keys rotated with the old ones",
            "transformers caches rotated keys: past the trained length, token-by-token decoding differs from one full "
            "pass, a call of exactly the trained length after a longer one uses stale frequencies, and the longest row "
            "of a batch decides for all. vLLM 0.33 has one static base instead, unscaled unless the block says "
            "max_trained_positions; llama.cpp has no such type. "
            "`milepost.attach` caches raw keys and reads each row's own length.",
            '"rope_scaling": {"rope_type": "dynamic", "factor": 4.0}',
            "milepost.attach(model, method, length='fixed')",
        ),
        _rule(
            "longrope-switch",
            "warning",
            "The LongRoPE lists change in the middle of a generation",
            "transformers changes lists when the longest row passes the trained length, with a cache full of keys of "
            "the other list. vLLM and llama.cpp take the long list for everything if the configured context is longer.",
            '"short_factor" and "long_factor" that differ',
            "one list, or a context that stays on one side of the trained length",
        ),
        _rule(
            "mscale-alone",
            "warning",
            "mscale without mscale_all_dim is ignored by transformers",
            "DeepSeek's reference code takes a missing mscale_all_dim as 0 and uses mscale; transformers uses "
            "0.1 ln s + 1 unless both are given and not 0. Write attention_factor to mean one thing everywhere.",
            f'{_YARN}, "mscale": 0.5}}',
            f'{_YARN}, "attention_factor": 1.0693}}',
        ),
        _rule(
            "nested-truncate",
            "warning",
            "truncate in a nested block is not read by transformers 5.24",
            "It looks for the key one level higher, so the range is rounded although the file says not to: up to 76 % "
            "off in single pairs on gpt-oss's numbers. `milepost.register_rope_types(override=True)` honours it.",
            '"rope_parameters": {"full_attention": {"rope_type": "yarn", "truncate": false}}',
            "a flat block, where every layer has the same one",
        ),
        _rule(
            "layout-mismatch",
            "error",
            "The weights are laid out for the other kind of pairs",
            "Pairs are channels (p, p + d/2) in most transformers classes and (2p, 2p + 1) in Meta's, GPT-J's and "
            "Cohere's weights. Trained projections couple only true pairs; loaded into the wrong class every score is "
            "wrong and no error is raised.",
            "Meta's own weights in a llama class of transformers, not permuted",
            "rows of the query and key projections permuted within each head",
        ),
        _rule(
            "phases-half",
            "error",
            "inv_freq is held in half precision",
            "model.to(torch.bfloat16) and .half() cast the buffer: phases are off by radians after a few thousand "
            "positions. from_pretrained(dtype=...) keeps it in float32.",
            "model.to(torch.bfloat16)",
            "AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16)",
        ),
        _rule(
            "inv-freq-wrong",
            "error",
            "The loaded model does not use the frequencies of its configuration",
            "A scaling named in the file was dropped or computed otherwise on the way into the model.",
            "a llama3 checkpoint whose inv_freq is the plain ladder",
            "inv_freq equal to what the block asks for",
        ),
        _rule(
            "half-precision-note",
            "note",
            "The file asks for half precision",
            "Loading with dtype= keeps the frequencies in float32; casting the model afterwards does not.",
            '"torch_dtype": "bfloat16"',
            '"torch_dtype": "bfloat16"',
        ),
        _rule(
            "gguf-base-missing",
            "error",
            "The GGUF file does not state rope.freq_base",
            "llama.cpp takes 10000. At a base of 1e6, pair 32 of 64 then turns 10 times too fast.",
            "no {arch}.rope.freq_base",
            "{arch}.rope.freq_base = 1000000.0",
        ),
        _rule(
            "gguf-scaling-incomplete",
            "error",
            "The GGUF file names a scaling and not its numbers",
            "Without rope.scaling.factor nothing is stretched; without rope.scaling.original_context_length YaRN "
            "measures against the file's own context length, the stretched one.",
            "{arch}.rope.scaling.type = yarn",
            "... and {arch}.rope.scaling.factor, {arch}.rope.scaling.original_context_length",
        ),
        _rule(
            "gguf-scaling-unknown",
            "error",
            "llama.cpp does not know this scaling type",
            "It knows none, linear, yarn and longrope; llama3 is stored as the tensor rope_freqs.weight.",
            "{arch}.rope.scaling.type = dynamic",
            "{arch}.rope.scaling.type = yarn",
        ),
        _rule(
            "gguf-config-disagree",
            "error",
            "The GGUF file and config.json disagree",
            "One of the two engines computes other frequencies than the model was trained with.",
            "rope.freq_base 10000 beside rope_theta 1000000",
            "equal numbers in both",
        ),
        _rule(
            "size-implausible",
            "error",
            "A size is too large to be one",
            "No head has more than 65536 channels.",
            '"head_dim": 100000000',
            '"head_dim": 128',
        ),
    )
}


def page(rule: Rule) -> str:
    """The documentation page of a rule, Markdown."""
    return (
        f"# {rule.id}\n\n**{rule.severity}**: {rule.title}.\n\n{rule.why}\n\n"
        f"Wrong:\n\n```\n{rule.wrong}\n```\n\nRight:\n\n```\n{rule.right}\n```\n\n[All rules](README.md)\n"
    )


def index() -> str:
    """The list of all rules, Markdown."""
    lines = [
        "# What `milepost doctor` looks for",
        "",
        "Every finding carries the id of its rule. Errors make the exit code 1; warnings and notes do not.",
        "These pages are made from the rules themselves (`python scripts/doctor_docs.py`), and a test compares them.",
        "",
        "| id | | meaning |",
        "|---|---|---|",
    ]
    lines += [f"| [{rule.id}]({rule.id}.md) | {rule.severity} | {rule.title} |" for rule in RULES.values()]
    return "\n".join(lines) + "\n"


def pages() -> dict[str, str]:
    """Every page of docs/doctor by file name."""
    return {"README.md": index(), **{f"{rule.id}.md": page(rule) for rule in RULES.values()}}
