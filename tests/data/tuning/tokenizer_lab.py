"""Thirty small tokenizers of every kind that models come with, trained on the spot: what they have in common with the
originals is how they cut and mark words, not their vocabulary."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

SPECIAL = ["<s>", "</s>", "<|user|>", "<|assistant|>", "<|im_start|>", "<|im_end|>", "<|eot|>", "<sep>"]
"""Special tokens of all of them; ``</s>`` ends a text."""
WORDS = (
    "the answer is four two plus two what is it? be brief! 2+2=4 and 42 USER: ASSISTANT: ### Response: [INST] [/INST] "
    "user assistant system model code: def f(x):\n    return x + 1\n\nÜber schön naïve é 漢字 emoji 😀 🙃 { don't"
)
CORPUS = [WORDS, *WORDS.split("\n"), "four two plus", "  two  spaces ", "\ttabs\n\n"] * 8
_GPT2 = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_CL100K = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_O200K = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_WORD_THEN_LINES = r"\s*[\r\n]+| ?[^\s]+|\s+"


@dataclass(frozen=True)
class Kind:
    """One kind of tokenizer.

    Attributes:
        write: puts its files into a folder.
        plain: ids of any text decode to it.
        special: and so they do where special tokens stand in it; not where each stretch between them gets a blank in
            front, in transformers as well.
        given: keyword arguments of ``write``.
    """

    write: Callable[..., None]
    plain: bool = True
    special: bool = True
    given: dict[str, Any] = field(default_factory=dict)

    def make(self, folder: Path) -> Path:
        """The folder, or the sentencepiece model in it."""
        folder.mkdir(parents=True, exist_ok=True)
        self.write(folder, **self.given)
        return folder if (folder / "tokenizer.json").is_file() else folder / "tokenizer.model"


def _save(folder: Path, tokenizer: Any) -> None:
    tokenizer.add_special_tokens([token for token in SPECIAL if tokenizer.token_to_id(token) is None])
    tokenizer.add_special_tokens(SPECIAL)
    tokenizer.save(str(folder / "tokenizer.json"))
    names = {"bos_token": "<s>", "eos_token": "</s>", "sep_token": "<sep>"}
    (folder / "tokenizer_config.json").write_text(
        json.dumps({**names, "tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False})
    )


def byte_level(
    folder: Path, regex: str | None = None, prefix: bool = False, digits: bool = False, nfc: bool = False, **more: Any
) -> None:
    """GPT-2's; with a ``regex`` as those that came from tiktoken (Llama 3, Qwen, GPT-OSS)."""
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

    tokenizer = Tokenizer(models.BPE(ignore_merges=more.get("ignore_merges", False)))
    level = pre_tokenizers.ByteLevel(add_prefix_space=prefix, use_regex=regex is None)
    parts: list[Any] = [] if regex is None else [pre_tokenizers.Split(Regex(regex), "isolated")]
    parts = [pre_tokenizers.Digits(individual_digits=True), *parts] if digits else parts
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*parts, level])
    tokenizer.decoder = decoders.ByteLevel()
    if nfc:
        tokenizer.normalizer = normalizers.NFC()
    if "trim" in more:
        tokenizer.post_processor = processors.ByteLevel(trim_offsets=more["trim"], add_prefix_space=prefix)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=420, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    _save(folder, tokenizer)


def metaspace(folder: Path, prepend: str, split: bool = True, unigram: bool = False) -> None:
    """A blank is a mark on the word behind it: T5, XLNet, and Llama 2 in the form of transformers 5."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    unknown = ["<unk>", *SPECIAL]
    alphabet = sorted(set("".join(CORPUS)) | set(map(chr, range(33, 127))) | {"▁", "\n", "\t"})
    if unigram:
        tokenizer = Tokenizer(models.Unigram())
        trainer: Any = trainers.UnigramTrainer(
            vocab_size=300, special_tokens=unknown, unk_token="<unk>", initial_alphabet=alphabet, show_progress=False
        )
    else:
        tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
        trainer = trainers.BpeTrainer(
            vocab_size=300, special_tokens=unknown, initial_alphabet=alphabet, show_progress=False
        )
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=prepend, split=split)
    tokenizer.decoder = decoders.Metaspace(prepend_scheme=prepend, split=split)
    if not split:  # as transformers writes Llama's: the other decoder loses every blank of the first token
        back: list[Any] = [decoders.Replace("▁", " "), decoders.Fuse()]
        tokenizer.decoder = decoders.Sequence(back if prepend == "never" else [*back, decoders.Strip(" ", 1, 0)])
    tokenizer.train_from_iterator(CORPUS, trainer)
    _save(folder, tokenizer)


def llama(folder: Path, prepend: bool = True) -> None:
    """Llama 2's and Mistral's tokenizer.json: the mark is made by a normalizer, unknown characters are bytes."""
    from tokenizers import Tokenizer, decoders, models, normalizers, trainers

    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    replace = normalizers.Replace(" ", "▁")
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), replace]) if prepend else replace
    back: list[Any] = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*back, decoders.Strip(" ", 1, 0)] if prepend else back)
    trainer = trainers.BpeTrainer(
        vocab_size=560,
        special_tokens=["<unk>", *SPECIAL, *(f"<0x{byte:02X}>" for byte in range(256))],
        initial_alphabet=sorted(map(chr, range(33, 127))),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    # Bytes are pieces of the model, no added tokens, or their names in a text would be taken for them.
    content = json.loads(tokenizer.to_str())
    content["added_tokens"] = [token for token in content["added_tokens"] if not token["content"].startswith("<0x")]
    _save(folder, Tokenizer.from_str(json.dumps(content)))


def word_piece(folder: Path, lower: bool) -> None:
    """BERT's, which gives no blank back as it was."""
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=lower)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece(cleanup=False)
    tokenizer.train_from_iterator(
        CORPUS,
        trainers.WordPieceTrainer(
            vocab_size=400,
            special_tokens=["[UNK]", *SPECIAL],
            initial_alphabet=sorted(map(chr, range(33, 127))),
            show_progress=False,
        ),
    )
    _save(folder, tokenizer)


def word_end(folder: Path) -> None:
    """BPE with a mark at the end of words, as the first GPT's."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", end_of_word_suffix="</w>"))
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.BPEDecoder("</w>")
    tokenizer.train_from_iterator(
        CORPUS,
        trainers.BpeTrainer(
            vocab_size=400,
            special_tokens=["<unk>", *SPECIAL],
            end_of_word_suffix="</w>",
            initial_alphabet=sorted(map(chr, range(33, 127))),
            show_progress=False,
        ),
    )
    _save(folder, tokenizer)


def pieces(folder: Path, **given: Any) -> None:
    """A sentencepiece model alone."""
    import sentencepiece

    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter([line for text in CORPUS for line in text.split("\n") if line]),
        model_writer=model,
        unk_id=0,
        bos_id=1,
        eos_id=2,
        pad_id=-1,
        hard_vocab_limit=False,
        minloglevel=2,
        **{"vocab_size": 400, "byte_fallback": True, "normalization_rule_name": "identity"} | given,
    )
    (folder / "tokenizer.model").write_bytes(model.getvalue())


_KEPT: dict[str, Any] = {"remove_extra_whitespaces": False, "allow_whitespace_only_pieces": True}
_BARE: dict[str, Any] = {**_KEPT, "add_dummy_prefix": False}
KINDS: dict[str, Kind] = {
    "gpt2": Kind(byte_level),
    "gpt2-prefix": Kind(byte_level, plain=False, special=False, given={"prefix": True}),
    "gpt2-trimmed": Kind(byte_level, given={"trim": True}),
    "roberta": Kind(byte_level, plain=False, special=False, given={"prefix": True, "trim": True}),
    "roberta-whole": Kind(byte_level, plain=False, special=False, given={"prefix": True, "trim": False}),
    "digits": Kind(byte_level, given={"digits": True}),
    "tiktoken-gpt2": Kind(byte_level, given={"regex": _GPT2}),
    "tiktoken-cl100k": Kind(byte_level, given={"regex": _CL100K}),
    "tiktoken-llama3": Kind(byte_level, given={"regex": _CL100K, "ignore_merges": True, "trim": False}),
    "tiktoken-qwen": Kind(byte_level, given={"regex": _CL100K, "nfc": True, "trim": False}),
    "tiktoken-o200k": Kind(byte_level, given={"regex": _O200K}),
    "blank-with-word": Kind(byte_level, given={"regex": _WORD_THEN_LINES}),
    "metaspace-first": Kind(metaspace, given={"prepend": "first"}),
    "metaspace-always": Kind(metaspace, special=False, given={"prepend": "always"}),
    "metaspace-never": Kind(metaspace, given={"prepend": "never"}),
    "metaspace-first-whole": Kind(metaspace, given={"prepend": "first", "split": False}),
    "metaspace-always-whole": Kind(metaspace, special=False, given={"prepend": "always", "split": False}),
    "metaspace-never-whole": Kind(metaspace, given={"prepend": "never", "split": False}),
    "unigram-first": Kind(metaspace, given={"prepend": "first", "unigram": True}),
    "unigram-always": Kind(metaspace, special=False, given={"prepend": "always", "unigram": True}),
    "llama": Kind(llama, special=False),
    "llama-bare": Kind(llama, given={"prepend": False}),
    "bert-uncased": Kind(word_piece, plain=False, special=False, given={"lower": True}),
    "bert-cased": Kind(word_piece, plain=False, special=False, given={"lower": False}),
    "word-end": Kind(word_end, plain=False, special=False),
    "pieces-bpe": Kind(pieces, given={"model_type": "bpe", **_KEPT}),
    "pieces-bpe-bare": Kind(pieces, given={"model_type": "bpe", **_BARE}),
    "pieces-unigram": Kind(pieces, given={"model_type": "unigram", **_KEPT}),
    "pieces-unigram-bare": Kind(pieces, given={"model_type": "unigram", **_BARE}),
    "pieces-t5": Kind(
        pieces,
        plain=False,
        special=False,
        given={"model_type": "unigram", "normalization_rule_name": "nmt_nfkc", "byte_fallback": False},
    ),
}


def untrimmed(folder: Path) -> Path:
    """A copy of a tokenizer whose spans hold the blanks of their tokens."""
    copy = folder / "untrimmed"
    copy.mkdir()
    for file in folder.glob("*.json"):
        (copy / file.name).write_text(file.read_text().replace('"trim_offsets": true', '"trim_offsets": false'))
    return copy
