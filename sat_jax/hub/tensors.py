"""What a Hugging Face folder holds, tensor by tensor: names, shapes and the bytes behind them."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open

from sat_jax.hub.config import read_json
from sat_jax.model.config import ModelConfig
from sat_jax.model.parameters import Parameter

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
_FLOATS = {"F64", "F32", "F16", "BF16"}
_BUFFERS = (".rotary_emb.inv_freq",)  # derived tables that old exports carried along


class Checkpoint:
    """The weights of a folder: where every hub tensor lies, with its shape and dtype; opens each file once."""

    def __init__(self, folder: Path) -> None:
        if not folder.is_dir():
            raise FileNotFoundError(f"{folder} is not a folder: give a Hugging Face model folder")
        self.folder = folder
        self.files: dict[str, str] = {}
        self._open: dict[str, Any] = {}
        index = folder / INDEX
        if index.is_file():
            self.files = dict(read_json(index).get("weight_map", {}))
        elif (folder / SINGLE).is_file():
            self.files = dict.fromkeys(self._file(SINGLE).keys(), SINGLE)
        else:
            raise FileNotFoundError(
                f"{folder} has neither {SINGLE} nor {INDEX}: the folder is half written; fetch it again"
            )
        present = {file: set(self._file(file).keys()) for file in sorted(set(self.files.values()))}
        absent = sorted(name for name, file in self.files.items() if name not in present[file])
        if absent:
            raise ValueError(
                f"{index} promises {absent[0]!r} in {self.files[absent[0]]}, which lacks it: fetch the folder again"
            )
        # The index decides: a shard may still hold a superseded copy. What it does not name, `check` finds left over.
        for file, names in present.items():
            self.files = dict.fromkeys(names, file) | self.files

    def _file(self, name: str) -> Any:
        if name not in self._open:
            path = self.folder / name
            if not path.is_file():
                raise FileNotFoundError(
                    f"{path} is missing although {INDEX} names it: the folder is half written; fetch it again"
                )
            try:
                self._open[name] = safe_open(path, framework="numpy")
            except SafetensorError as error:
                raise ValueError(f"{path} is truncated or damaged ({error}): fetch it again") from error
        return self._open[name]

    def unread(self, name: str) -> Any:
        """A tensor that stays where it is: ``get_shape()``, ``get_dtype()``, and indexing reads."""
        return self._file(self.files[name]).get_slice(name)

    def read(self, name: str, *where: slice) -> np.ndarray:
        """A tensor, or the part of it that ``where`` says, in its stored dtype; nothing else is brought into memory.
        ``ValueError`` where it holds NaN or infinity."""
        tensor: np.ndarray = self.unread(name)[where] if where else self._file(self.files[name]).get_tensor(name)
        if not np.isfinite(tensor).all():
            raise ValueError(
                f"{name} in {self.folder / self.files[name]} holds NaN or infinity: fetch the checkpoint again"
            )
        return tensor

    def part(self, p: Parameter, position: tuple[int, ...], span: tuple[tuple[int, int], ...]) -> np.ndarray:
        """``span`` (first and last of every axis) of a parameter's one tensor, as it is stored here. ``position``:
        layer and expert, as far as it is stacked over them, counted from the parameter's first."""
        sizes, axes = single_shape(p), hub_axes(p)
        # An axis of the hub runs over several of ours: cut along the first, the others are read whole and cut here.
        where, lengths = [], list(sizes)
        for first, *inner in axes:
            one = math.prod(sizes[axis] for axis in inner)
            where.append(slice(span[first][0] * one, span[first][1] * one))
            lengths[first] = span[first][1] - span[first][0]
        layer = layers_of(p)[position[0] if position else 0]
        fused = self.fused(p, layer)
        if fused is not None:
            above = hub_shape(p)[0] if p.path[-1] == "up" else 0  # gate and up lie above one another
            rows = slice(where[0].start + above, where[0].stop + above)
            tensor = self.read(fused, slice(position[1], position[1] + 1), rows, where[1])[0]
        else:
            tensor = self.read(hub_names(p, layer)[position[1] if len(position) > 1 else 0], *where)
        value = (tensor.T if p.matrix else tensor).reshape(lengths)
        cut = {first for first, *_ in axes}
        return value[tuple(slice(None) if axis in cut else slice(*ends) for axis, ends in enumerate(span))]

    def _equal(self, a: str, b: str) -> bool:
        """Whether two tensors hold the same numbers, a thousand rows in memory at a time."""
        shape = self.unread(a).get_shape()
        if shape != self.unread(b).get_shape():
            return False
        blocks = (slice(first, min(first + 1024, shape[0])) for first in range(0, shape[0], 1024))
        return all(np.array_equal(self.read(a, rows), self.read(b, rows)) for rows in blocks)

    def fused(self, p: Parameter, layer: int) -> str | None:
        """Name of the tensor that holds this parameter's experts together, where the checkpoint is laid out so."""
        if "{expert}" not in p.hub:
            return None
        kind = "down_proj" if p.path[-1] == "down" else "gate_up_proj"
        name = f"model.layers.{layer}.mlp.experts.{kind}"
        return name if name in self.files else None

    def check(self, cfg: ModelConfig, table: tuple[Parameter, ...]) -> None:
        """Raises ``ValueError`` where tensors are missing, left over, of another shape or no floats."""
        expected: dict[str, tuple[int, ...]] = {}
        for p in table:
            for layer in layers_of(p):
                fused = self.fused(p, layer)
                if fused is not None:
                    E, rows, columns = p.shape[1], *hub_shape(p)
                    expected[fused] = (E, rows if p.path[-1] == "down" else 2 * rows, columns)
                else:
                    expected.update(dict.fromkeys(hub_names(p, layer), hub_shape(p)))
        spare = {name for name in self.files if name.endswith(_BUFFERS)}
        if cfg.tie_word_embeddings and "lm_head.weight" in self.files:
            if not self._equal("lm_head.weight", "model.embed_tokens.weight"):
                raise ValueError(
                    f"{self.folder}: tie_word_embeddings is true but lm_head.weight differs from the embedding: "
                    "set it to false in config.json"
                )
            spare.add("lm_head.weight")
        missing = sorted(set(expected) - set(self.files))
        surplus = sorted(set(self.files) - set(expected) - spare)
        if missing or surplus:
            raise ValueError(
                f"{self.folder} does not hold the tensors that its config.json describes: missing {some(missing)}; "
                f"left over {some(surplus)}: config and weights are of different models, or the folder is half written"
            )
        for name, shape in expected.items():
            found = self.unread(name)
            if tuple(found.get_shape()) != shape:
                raise ValueError(
                    f"{name} has shape {tuple(found.get_shape())}, expected {shape}: config.json and weights differ"
                )
            if found.get_dtype() not in _FLOATS:
                raise ValueError(
                    f"{name} is stored as {found.get_dtype()}, expected one of {sorted(_FLOATS)}: dequantize it first"
                )


def layers_of(p: Parameter) -> range:
    """Layer numbers that a parameter is stacked over; ``range(1)`` where it belongs to no layer."""
    return range(p.first_layer, p.first_layer + p.shape[0]) if p.axes[0] == "layers" else range(1)


def hub_names(p: Parameter, layer: int) -> list[str]:
    """The hub tensors of one layer's parameter: one, or one an expert."""
    if "{expert}" not in p.hub:
        return [p.hub.format(layer=layer)]
    return [p.hub.format(layer=layer, expert=expert) for expert in range(p.shape[1])]


def single_shape(p: Parameter) -> tuple[int, ...]:
    """Shape, as stored here, of what one hub tensor holds."""
    return tuple(size for size, axis in zip(p.shape, p.axes, strict=True) if axis not in ("layers", "expert"))


def hub_axes(p: Parameter) -> tuple[tuple[int, ...], ...]:
    """Which axes of ``single_shape`` each axis of the parameter's hub tensors runs over."""
    n = len(single_shape(p))
    if p.matrix:
        inputs = 2 if p.path[-1] == "out" else 1  # the output projection contracts heads and head_dim
        return tuple(range(inputs, n)), tuple(range(inputs))
    flat = "head_dim" in p.axes and n > 1  # a bias of all heads
    return (tuple(range(n)),) if flat else tuple((axis,) for axis in range(n))


def hub_shape(p: Parameter) -> tuple[int, ...]:
    """Shape of each of the parameter's hub tensors; a matrix is ``(out, in)``."""
    shape = single_shape(p)
    return tuple(math.prod(shape[axis] for axis in axes) for axes in hub_axes(p))


def some(names: list[str], limit: int = 8) -> str:
    """The first few of ``names``, for a message."""
    shown = ", ".join(names[:limit]) or "none"
    return f"{shown} and {len(names) - limit} more" if len(names) > limit else shown
