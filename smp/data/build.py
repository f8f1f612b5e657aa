"""From the data settings to the training, validation and test samples."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import NamedTuple

from smp.config.blend import BlendPart, data_parts, is_remote, is_text, parse_split
from smp.config.command_line.credentials import without_credentials
from smp.config.schema import ConfigError, DataConfig
from smp.data.blend import BlendedDataset, Source, integer_weights
from smp.data.cache import NodeCache
from smp.data.contents import Contents, check_integers, check_vocabulary, contents_of
from smp.data.files.remote import RemoteDataset
from smp.data.gpt_dataset import GPTDataset, split_documents
from smp.data.indexed_dataset import IndexedDataset
from smp.data.mock_dataset import MockDataset
from smp.data.online import tokenized
from smp.data.packed_dataset import PackedDataset


class Datasets(NamedTuple):
    """The samples of a run."""

    train: BlendedDataset
    valid: BlendedDataset | None
    test: BlendedDataset | None


def build_datasets(data: DataConfig, vocab_size: int, seed: int) -> Datasets:
    """Samples of each part, keyed by ``seed``.

    Every process of a node may call it at once: what takes time is done once and kept in the cache folder.

    Args:
        data: ``seq_length`` is resolved (not None).
        vocab_size: unpadded; token ids from here on are refused.

    Returns:
        ``valid`` and ``test`` are None where there is nothing, or less than one sample.

    Raises:
        ConfigError: neither or both of --data-path and --mock-data are given, or the cache cannot be written.
        ValueError: the files are missing or damaged, a token id is outside of the vocabulary, or a training part has
            too few tokens for one sample.
    """
    assert data.seq_length is not None
    parts = data_parts(data)
    if data.mock_data == bool(parts):
        raise ConfigError(
            f"give one of --data-path and --mock-data (data path {data.data_path}, mock {data.mock_data})"
        )
    if data.mock_data:
        # Streams keep the draws of training and validation apart.
        return Datasets(_mock(data, vocab_size, seed, 0), _mock(data, vocab_size, seed, 1), None)
    if "--train-data-path" in parts:
        flags = ("--train-data-path", "--valid-data-path", "--test-data-path")
        corpora = [[_Corpus(part, data, vocab_size, seed) for part in parts.get(flag, [])] for flag in flags]
        # Here a file is one part as a whole; below --split divides each.
        train, valid, test = (_blend(group, [range(c.dataset.num_documents) for c in group]) for group in corpora)
    else:
        (named,) = parts.values()
        group = [_Corpus(part, data, vocab_size, seed) for part in named]
        fractions = parse_split(data.split)
        ranges = [split_documents(corpus.dataset.num_documents, fractions) for corpus in group]
        train, valid = (_blend(group, [split[i] for split in ranges], required=i == 0) for i in range(2))
        corpora, test = [group], None  # the third part of --split is left for after training
    assert train is not None
    # Once, whatever number of parts are of one file.
    train.notes[:0] = dict.fromkeys(line for group in corpora for corpus in group for line in corpus.notes)
    return Datasets(train, valid, test)


def _mock(data: DataConfig, vocab_size: int, seed: int, stream: int) -> BlendedDataset:
    assert data.seq_length is not None
    samples = MockDataset(vocab_size, data.seq_length, seed, stream)
    key = f"mock vocabulary {vocab_size} length {data.seq_length} seed {seed}"
    return BlendedDataset([Source("mock data", key, samples)], [1])


class _Corpus:
    """One data set of a blend: opened, tokenized first if it is text, and checked."""

    def __init__(self, part: BlendPart, data: DataConfig, vocab_size: int, seed: int) -> None:
        self.part, self.data, self.seed = part, data, seed
        self.notes: list[str] = []
        self.dataset: IndexedDataset
        self.contents: Contents
        self.cache = NodeCache(data.data_cache_path or Path(part.path).parent / "cache")
        # A tokenized remote data set; remote text is tokenized into the cache.
        if is_remote(part.path) and not is_text(part.path):
            remote = RemoteDataset(part.path, vocab_size, self.cache)
            check_integers(remote)
            self.dataset, self.contents, self.notes = remote, remote.contents(), remote.notes
            return
        prefix: Path | str = part.path
        if is_text(part.path):
            prefix, self.notes = tokenized(part.path, data, self.cache)
        self.dataset = IndexedDataset(prefix)
        self.contents = contents_of(self.dataset, self.cache)
        check_vocabulary(self.dataset, self.contents, vocab_size)

    def source(self, documents: range) -> Source:
        """The samples of some of its documents, as a source of a blend."""
        kind: Callable[..., GPTDataset | PackedDataset] = PackedDataset
        if self.data.packing == "stream":
            kind = partial(GPTDataset, mask_ends=self.data.eod_mask_loss)
        key = self.contents.key
        samples = kind(self.dataset, documents, self.data.seq_length, self.seed, cache=self.cache, key=key)
        return Source(without_credentials(self.part.path), f"{self.contents.key} {samples.order_key}", samples)


def _blend(corpora: Sequence[_Corpus], ranges: Sequence[range], required: bool = True) -> BlendedDataset | None:
    """Ranges of documents of several corpora as one blend; None when there is nothing. Unless ``required``, corpora too
    small for a sample are left out."""
    sources, shares, notes = [], [], []
    for corpus, documents in zip(corpora, ranges, strict=True):
        source = corpus.source(documents)
        if required:
            source.data.check_not_empty()  # type: ignore[attr-defined]
        size = source.data.samples_per_epoch or 0
        if not size:
            notes.append(f"note: {source.name} is left out of validation: it has less than one sample there")
            continue
        sources.append(source)
        # Without weights: in proportion to their sizes.
        shares.append(corpus.part.weight or Fraction(size))
        if isinstance(source.data, PackedDataset):
            notes.append(f"{source.name}: {size} sequences per epoch, {100 * source.data.filled:.2f} % of them filled")
    if not sources:
        return None
    names: dict[str, str] = {}
    for source in sources:
        if source.key in names:  # each of them would be read twice
            raise ValueError(f"{names[source.key]} and {source.name} hold the same data: name it once, with its weight")
        names[source.key] = source.name
    weights = integer_weights(shares)
    # Cross-multiplied, to compare proportions without fractions.
    if [weight * sum(shares) for weight in weights] != [share * sum(weights) for share in shares]:
        notes.append(f"note: weights are rounded to multiples of 1/{sum(weights)}: {', '.join(map(str, weights))}")
    blend = BlendedDataset(sources, weights, corpora[0].cache)
    blend.notes = notes
    return blend
