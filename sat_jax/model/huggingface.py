"""Hugging Face folders in and out: sharded safetensors, hub names, per-expert and fused (transformers 5) layouts."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from sat_jax.model.config import ModelConfig, config_to_hf, read_config, read_json
from sat_jax.model.parameters import Parameter, Params, flatten, parameter_table, unflatten

_STAGING_BYTES = 256 * 2**20
_FLOATS = {"F64", "F32", "F16", "BF16"}
_SINGLE, _INDEX = "model.safetensors", "model.safetensors.index.json"
_BUFFERS = (".rotary_emb.inv_freq",)  # derived tables that old exports carried along
_WITH_WEIGHTS = {"config.json", _INDEX}


def load_params(
    hf_dir: str | Path, cfg: ModelConfig | None = None, dtype: DTypeLike = "float32", shardings: Params | None = None
) -> Params:
    """The parameters of a Hugging Face folder.

    Names, shapes and dtypes of every tensor are checked before the first one is read. Tensors are read one at a time;
    host memory holds one layer of one parameter (or up to 256 MiB of small ones), never the model.

    Args:
        hf_dir: folder with ``model.safetensors``, or shards and ``model.safetensors.index.json``.
        cfg: as ``read_config`` gives it; None reads it.
        dtype: of the result; stored values are cast.
        shardings: ``param_shardings``: each device receives its own part only. None: the default device.

    Raises:
        FileNotFoundError: no folder, no weights, or a shard that the index names is missing.
        ValueError: a truncated shard; tensors missing, left over, of the wrong shape or dtype (all listed); NaN or
            infinity.
    """
    folder = Path(hf_dir)
    cfg = read_config(folder) if cfg is None else cfg
    checkpoint = Checkpoint(folder)
    table = parameter_table(cfg, dtype)
    checkpoint.check(cfg, table)
    where = flatten(shardings) if shardings is not None else {}
    default = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    return unflatten({p.path: _load(checkpoint, p, where.get(p.path, default)) for p in table})


def save_hf(
    hf_dir: str | Path,
    cfg: ModelConfig,
    params: Params,
    source: str | Path | None = None,
    max_shard_bytes: int = 2 * 2**30,
) -> Path:
    """Writes ``hf_dir``: hub-named shards, index, ``config.json``, ``generation_config.json`` and the tokenizer's
    files.

    Values keep their dtype, so that loading gives back the same bits. The folder appears whole or not at all: it is
    written beside its place and renamed.

    Args:
        hf_dir: must not exist, or be empty.
        cfg: the model.
        params: its parameters.
        source: folder whose other small files (tokenizer, generation config, licence) are copied; None copies nothing.
        max_shard_bytes: a shard is closed before it grows past this; also the host memory that is used.

    Raises:
        FileExistsError: ``hf_dir`` holds something.
        ValueError: ``params`` do not fit ``cfg``.
    """
    table = parameter_table(cfg, flatten(params)[("embed",)].dtype)
    _check_tree(table, params)
    tensors = _hub_tensors(table, flatten(params))
    return write_folder(hf_dir, cfg, tensors, str(table[0].dtype), source, max_shard_bytes)


def write_folder(
    hf_dir: str | Path,
    cfg: ModelConfig,
    tensors: Iterator[tuple[str, np.ndarray]],
    dtype: str,
    source: str | Path | None = None,
    max_shard_bytes: int = 2 * 2**30,
) -> Path:
    """``save_hf`` of a stream of hub-named tensors, all of type ``dtype``: no model has to exist anywhere.

    Raises:
        FileExistsError: ``hf_dir`` holds something.
    """
    target = Path(hf_dir)
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise FileExistsError(f"{target} exists and is not empty: nothing is overwritten; choose another folder")
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    try:
        _copy_side_files(source, partial)
        _write_json(partial / "config.json", config_to_hf(cfg, dtype))
        if not (partial / "generation_config.json").exists():
            ids = {
                "bos_token_id": cfg.bos_token_id,
                "eos_token_id": list(cfg.eos_token_id),
                "pad_token_id": cfg.pad_token_id,
            }
            _write_json(partial / "generation_config.json", {k: v for k, v in ids.items() if v not in (None, [])})
        _write_shards(partial, tensors, max_shard_bytes)
        partial.chmod(0o777 & ~_umask())  # mkdtemp made it private
        os.replace(partial, target)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return target


class Checkpoint:
    """The weights of a folder: where every hub tensor lies, with its shape and dtype; opens each file once."""

    def __init__(self, folder: Path) -> None:
        if not folder.is_dir():
            raise FileNotFoundError(f"{folder} is not a folder: give a Hugging Face model folder")
        self.folder = folder
        self.files: dict[str, str] = {}
        self._open: dict[str, Any] = {}
        index = folder / _INDEX
        if index.is_file():
            self.files = dict(read_json(index).get("weight_map", {}))
        elif (folder / _SINGLE).is_file():
            self.files = dict.fromkeys(self._file(_SINGLE).keys(), _SINGLE)
        else:
            raise FileNotFoundError(
                f"{folder} has neither {_SINGLE} nor {_INDEX}: the folder is half written; fetch it again"
            )
        present: dict[str, set[str]] = {f: set(self._file(f).keys()) for f in set(self.files.values())}
        absent = sorted(name for name, file in self.files.items() if name not in present[file])
        if absent:
            raise ValueError(
                f"{index} promises {absent[0]!r} in {self.files[absent[0]]}, which lacks it: fetch the folder again"
            )
        for file, names in present.items():
            self.files.update(dict.fromkeys(names, file))

    def _file(self, name: str) -> Any:
        if name not in self._open:
            path = self.folder / name
            if not path.is_file():
                raise FileNotFoundError(
                    f"{path} is missing although {_INDEX} names it: the folder is half written; fetch it again"
                )
            try:
                self._open[name] = safe_open(path, framework="numpy")
            except SafetensorError as error:
                raise ValueError(f"{path} is truncated or damaged ({error}): fetch it again") from error
        return self._open[name]

    def slice(self, name: str) -> Any:
        """A tensor's header, unread: ``get_shape()``, ``get_dtype()``."""
        return self._file(self.files[name]).get_slice(name)

    def read(self, name: str) -> np.ndarray:
        """A tensor in its stored dtype; ``ValueError`` where it holds NaN or infinity."""
        tensor: np.ndarray = self._file(self.files[name]).get_tensor(name)
        if not np.isfinite(tensor).all():
            raise ValueError(
                f"{name} in {self.folder / self.files[name]} holds NaN or infinity: fetch the checkpoint again"
            )
        return tensor

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
            if not np.array_equal(self.read("lm_head.weight"), self.read("model.embed_tokens.weight")):
                raise ValueError(
                    f"{self.folder}: tie_word_embeddings is true but lm_head.weight differs from the embedding: "
                    "set it to false in config.json"
                )
            spare.add("lm_head.weight")
        missing = sorted(set(expected) - set(self.files))
        surplus = sorted(set(self.files) - set(expected) - spare)
        if missing or surplus:
            raise ValueError(
                f"{self.folder} does not hold the tensors that its config.json describes: missing {_some(missing)}; "
                f"left over {_some(surplus)}: config and weights are of different models, or the folder is half written"
            )
        for name, shape in expected.items():
            found = self.slice(name)
            if tuple(found.get_shape()) != shape:
                raise ValueError(
                    f"{name} has shape {tuple(found.get_shape())}, expected {shape}: config.json and weights differ"
                )
            if found.get_dtype() not in _FLOATS:
                raise ValueError(
                    f"{name} is stored as {found.get_dtype()}, expected one of {sorted(_FLOATS)}: dequantize it first"
                )


def _load(checkpoint: Checkpoint, p: Parameter, sharding: jax.sharding.Sharding) -> jax.Array:
    """One parameter, assembled on each device from its own part of every layer."""
    layers = layers_of(p)
    stacked = p.axes[0] == "layers"
    indices = sharding.addressable_devices_indices_map(p.shape)
    per_layer = int(np.prod(p.shape)) * p.dtype.itemsize // len(layers)
    step = max(1, min(len(layers), _STAGING_BYTES // max(per_layer, 1)))
    parts: dict[jax.Device, jax.Array] = {}
    for first in range(0, len(layers), step):
        chunk = layers[first : first + step]
        if stacked:
            host = np.empty((len(chunk), *p.shape[1:]), p.dtype)
            for i, layer in enumerate(chunk):
                _fill_layer(checkpoint, p, layer, host[i])
        else:
            host = np.array(_from_hub(p, checkpoint.read(p.hub)), p.dtype)
        for device, index in indices.items():
            # The layers axis is never split: it is scanned over.
            local = host[(slice(None), *(index or ())[1:])] if stacked else host[index or ...]
            piece = jax.device_put(local, device)
            if step >= len(layers):
                parts[device] = piece
            else:
                if device not in parts:
                    parts[device] = jnp.zeros((len(layers), *local.shape[1:]), p.dtype, device=device)
                parts[device] = _insert(parts[device], piece, first)
    return jax.make_array_from_single_device_arrays(p.shape, sharding, list(parts.values()))


def _insert_rows(whole: jax.Array, part: jax.Array, first: int) -> jax.Array:
    return jax.lax.dynamic_update_slice_in_dim(whole, part, first, axis=0)


_insert = jax.jit(_insert_rows, donate_argnums=0)


def _fill_layer(checkpoint: Checkpoint, p: Parameter, layer: int, out: np.ndarray) -> None:
    fused = checkpoint.fused(p, layer)
    if fused is not None:
        tensor = checkpoint.read(fused)
        F = hub_shape(p)[0]
        rows = {"gate": slice(0, F), "up": slice(F, 2 * F), "down": slice(None)}[p.path[-1]]
        out[...] = tensor[:, rows].swapaxes(1, 2)
    elif "{expert}" in p.hub:
        for expert, name in enumerate(hub_names(p, layer)):
            out[expert] = _from_hub(p, checkpoint.read(name))
    else:
        out[...] = _from_hub(p, checkpoint.read(hub_names(p, layer)[0]))


def layers_of(p: Parameter) -> range:
    """Layer numbers that a parameter is stacked over; ``range(1)`` where it belongs to no layer."""
    return range(p.first_layer, p.first_layer + p.shape[0]) if p.axes[0] == "layers" else range(1)


def hub_names(p: Parameter, layer: int) -> list[str]:
    """The hub tensors of one layer's parameter: one, or one an expert."""
    if "{expert}" not in p.hub:
        return [p.hub.format(layer=layer)]
    return [p.hub.format(layer=layer, expert=expert) for expert in range(p.shape[1])]


def _single_shape(p: Parameter) -> tuple[int, ...]:
    """Shape, as stored here, of what one hub tensor holds."""
    return tuple(size for size, axis in zip(p.shape, p.axes, strict=True) if axis not in ("layers", "expert"))


def hub_shape(p: Parameter) -> tuple[int, ...]:
    """Shape of each of the parameter's hub tensors; a matrix is ``(out, in)``."""
    shape = _single_shape(p)
    if not p.matrix:
        return shape if "head_dim" not in p.axes or len(shape) == 1 else (int(np.prod(shape)),)
    inputs = 2 if p.path[-1] == "out" else 1  # the output projection contracts heads and head_dim
    return int(np.prod(shape[inputs:])), int(np.prod(shape[:inputs]))


def _from_hub(p: Parameter, tensor: np.ndarray) -> np.ndarray:
    return (tensor.T if p.matrix else tensor).reshape(_single_shape(p))


def _to_hub(p: Parameter, value: np.ndarray) -> np.ndarray:
    rows, *columns = hub_shape(p)
    return np.ascontiguousarray(value.reshape(*columns, rows).T if p.matrix else value.reshape(rows, *columns))


def _hub_tensors(
    table: tuple[Parameter, ...], leaves: Mapping[tuple[str, ...], Any]
) -> Iterator[tuple[str, np.ndarray]]:
    """Every hub tensor, one at a time; host memory holds one layer of one parameter."""
    for p in table:
        leaf = leaves[p.path]
        for i, layer in enumerate(layers_of(p)):
            value = np.asarray(leaf if p.axes[0] != "layers" else jax.lax.dynamic_index_in_dim(leaf, i, keepdims=False))
            names = hub_names(p, layer)
            if "{expert}" in p.hub:
                yield from ((name, _to_hub(p, value[e])) for e, name in enumerate(names))
            else:
                yield names[0], _to_hub(p, value)


def _write_shards(folder: Path, tensors: Iterator[tuple[str, np.ndarray]], limit: int) -> None:
    shards: list[list[str]] = []
    pending: dict[str, np.ndarray] = {}
    size = total = 0

    def flush() -> None:
        nonlocal size
        file = folder / f"shard-{len(shards)}"
        save_file(pending, file, metadata={"format": "pt"})
        file.chmod(0o666 & ~_umask())  # safetensors makes it private
        shards.append(list(pending))
        pending.clear()
        size = 0

    for name, tensor in tensors:
        if pending and size + tensor.nbytes > limit:
            flush()
        pending[name] = tensor
        size, total = size + tensor.nbytes, total + tensor.nbytes
    flush()
    if len(shards) == 1:
        os.replace(folder / "shard-0", folder / _SINGLE)
        return
    weight_map = {}
    for i, names in enumerate(shards):
        file = f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors"
        os.replace(folder / f"shard-{i}", folder / file)
        weight_map.update(dict.fromkeys(names, file))
    _write_json(folder / _INDEX, {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))})


def _copy_side_files(source: str | Path | None, target: Path) -> None:
    if source is None:
        return
    for file in sorted(Path(source).iterdir()):
        if (
            file.is_file()
            and file.suffix in (".json", ".txt", ".jinja", ".model", ".md")
            and file.name not in _WITH_WEIGHTS
        ):
            shutil.copyfile(file, target / file.name)


def _check_tree(table: tuple[Parameter, ...], params: Params) -> None:
    leaves = flatten(params)
    paths = {p.path for p in table}
    if set(leaves) != paths:
        odd = [".".join(path) for path in sorted(set(leaves) ^ paths)]
        raise ValueError(
            f"parameters do not fit the configuration: {_some(odd)} missing or left over; pass the right config"
        )
    for p in table:
        if leaves[p.path].shape != p.shape:
            raise ValueError(
                f"{p.name} has shape {leaves[p.path].shape}, expected {p.shape}: pass the config it was made with"
            )


def _some(names: list[str], limit: int = 8) -> str:
    shown = ", ".join(names[:limit]) or "none"
    return f"{shown} and {len(names) - limit} more" if len(names) > limit else shown


def _write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def _umask() -> int:
    current = os.umask(0)
    os.umask(current)
    return current
