"""Made-up data in the forms that programs read: as small as the program allows, from a fixed seed."""

from __future__ import annotations

import gzip
import pickle
import random
import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
from PIL import Image

_WORDS = (
    "the",
    "a",
    "one",
    "of",
    "and",
    "sea",
    "house",
    "dog",
    "cat",
    "runs",
    "sleeps",
    "sees",
    "blue",
    "red",
    "old",
    "new",
)


def mnist(place: Path, train: int = 640, test: int = 128) -> None:
    """``MNIST/raw`` under a folder, as torchvision looks for it."""
    _idx_files(place / "MNIST" / "raw", train, test)


def fashion(place: Path, train: int = 640, test: int = 128) -> None:
    """The same for FashionMNIST."""
    _idx_files(place / "FashionMNIST" / "raw", train, test)


def _idx_files(folder: Path, train: int, test: int) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    source = np.random.default_rng(0)
    for name, count in (("train", train), ("t10k", test)):
        images = source.integers(0, 256, (count, 28, 28), dtype=np.uint8)
        labels = source.integers(0, 10, count, dtype=np.uint8)
        head = struct.pack(">iiii", 2051, count, 28, 28)
        (folder / f"{name}-images-idx3-ubyte").write_bytes(head + images.tobytes())
        (folder / f"{name}-labels-idx1-ubyte").write_bytes(struct.pack(">ii", 2049, count) + labels.tobytes())


def cifar10(place: Path, count: int = 256) -> None:
    """``cifar-10-batches-py``; torchvision compares checksums, which a program's entry has to leave out."""
    folder = place / "cifar-10-batches-py"
    folder.mkdir(parents=True, exist_ok=True)
    source = np.random.default_rng(0)
    for name in (*(f"data_batch_{number}" for number in range(1, 6)), "test_batch"):
        batch = {
            "data": source.integers(0, 256, (count, 3072), dtype=np.uint8),
            "labels": source.integers(0, 10, count).tolist(),
        }
        (folder / name).write_bytes(pickle.dumps(batch))
    (folder / "batches.meta").write_bytes(pickle.dumps({"label_names": [f"class {one}" for one in range(10)]}))


def images(place: Path, count: int = 8, width: int = 64, height: int = 64) -> None:
    """Pictures as JPEG files in one folder."""
    place.mkdir(parents=True, exist_ok=True)
    source = np.random.default_rng(0)
    for number in range(count):
        pixels = source.integers(0, 256, (height, width, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(place / f"{number:06}.jpg")


def classes(place: Path, kinds: int = 2, count: int = 8, side: int = 64) -> None:
    """Pictures in a folder for each class."""
    for kind in range(kinds):
        images(place / f"class{kind}", count, side, side)


def masks(place: Path, count: int = 8, width: int = 64, height: int = 64) -> None:
    """Pictures of zeros and ones."""
    place.mkdir(parents=True, exist_ok=True)
    source = np.random.default_rng(0)
    for number in range(count):
        Image.fromarray(source.integers(0, 2, (height, width), dtype=np.uint8) * 255).save(place / f"{number:06}.png")


def text(place: Path, lines: int = 2000) -> None:
    """Lines of words."""
    place.parent.mkdir(parents=True, exist_ok=True)
    every = " ".join(map(chr, range(32, 127)))
    place.write_text(f"{every}\n{_lines(lines)}", encoding="utf-8")


def words(place: Path, count: int = 2000) -> None:
    """A word a line."""
    place.parent.mkdir(parents=True, exist_ok=True)
    source = random.Random(0)
    place.write_text("\n".join("".join(source.choices("abcdefgh", k=source.randint(2, 9))) for _ in range(count)))


def corpus(place: Path, lines: int = 400) -> None:
    """``train.txt``, ``valid.txt`` and ``test.txt`` in a folder."""
    for name in ("train", "valid", "test"):
        text(place / f"{name}.txt", lines)


def enwik8(place: Path, size: int = 95_000_000) -> None:
    """A gzipped file of bytes, of the length that programs split at 90 and 95 million."""
    place.parent.mkdir(parents=True, exist_ok=True)
    part = _lines(1000).encode()
    with gzip.open(place, "wb", compresslevel=1) as file:
        file.write((part * (size // len(part) + 1))[:size])


def tokens(place: Path, count: int = 100_000, largest: int = 50_000) -> None:
    """Unsigned 16-bit numbers, one after another."""
    place.parent.mkdir(parents=True, exist_ok=True)
    np.random.default_rng(0).integers(0, largest, count).astype(np.uint16).tofile(place)


def cora(place: Path, papers: int = 2708, features: int = 1433) -> None:
    """``cora.content`` and ``cora.cites``."""
    place.mkdir(parents=True, exist_ok=True)
    source = np.random.default_rng(0)
    content = source.random((papers, features)) < 0.01
    kinds = ("Case_Based", "Genetic_Algorithms", "Neural_Networks", "Probabilistic_Methods", "Theory")
    with open(place / "cora.content", "w", encoding="utf-8") as file:
        for number, row in enumerate(content):
            file.write(f"{number}\t" + "\t".join(map(str, row.astype(int))) + f"\t{kinds[number % len(kinds)]}\n")
    with open(place / "cora.cites", "w", encoding="utf-8") as file:
        for a, b in source.integers(0, papers, (2 * papers, 2)):
            file.write(f"{a}\t{b}\n")


def _lines(count: int) -> str:
    source = random.Random(0)
    return "".join(" ".join(source.choices(_WORDS, k=source.randint(4, 12))) + " .\n" for _ in range(count))


RECIPES: dict[str, Callable[..., None]] = {
    one.__name__: one
    for one in (mnist, fashion, cifar10, images, classes, masks, text, words, corpus, enwik8, tokens, cora)
}
