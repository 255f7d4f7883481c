"""Hugging Face folders in and out: safetensors to and from (sharded) device arrays, a tensor at a time."""

from __future__ import annotations

import functools
import itertools
import json
import math
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
from safetensors.numpy import save_file

from sat_jax.hub.config import config_to_hf, read_config
from sat_jax.hub.tensors import INDEX, SINGLE, Checkpoint, hub_names, hub_shape, layers_of, some
from sat_jax.model.config import ModelConfig
from sat_jax.model.parameters import Parameter, Params, flatten, parameter_table, unflatten

STAGING_BYTES = 16 * 2**20
"""Host memory in which small tensors are gathered, and large ones cut up, on their way to the device."""
SHARD_BYTES = 2 * 2**30
"""A shard is closed before it grows past this, which is also the host memory that writing takes."""


def load_params(
    hf_dir: str | Path, cfg: ModelConfig | None = None, dtype: DTypeLike = "float32", shardings: Params | None = None
) -> Params:
    """The parameters of a Hugging Face folder.

    Names, shapes and dtypes of every tensor are checked before the first one is read. Every device is given its own
    part straight from the files, in pieces: host memory holds 16 MiB of the result at a time, and what they are cast
    from, whatever the size of the model and of its largest tensor.

    Args:
        hf_dir: folder with ``model.safetensors``, or shards and ``model.safetensors.index.json``.
        cfg: None: ``read_config`` reads it.
        dtype: of the result; stored values are cast.
        shardings: ``param_shardings``. None: the default device.

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
    where = flatten(shardings or {})
    default = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    return unflatten({p.path: _load(checkpoint, p, where.get(p.path, default)) for p in table})


def save_hf(hf_dir: str | Path, cfg: ModelConfig, params: Params, source: str | Path | None = None) -> Path:
    """Writes ``hf_dir``: hub-named shards, index, ``config.json``, ``generation_config.json``, and the other small
    files (tokenizer, generation config, licence) of the folder ``source``.

    Values keep their dtype, so that loading gives back the same bits. The folder appears whole or not at all: it is
    written beside its place and renamed. ``FileExistsError`` where ``hf_dir`` holds something.
    """
    table = parameter_table(cfg, flatten(params)[("embed",)].dtype)
    _check_tree(table, params)
    tensors = _hub_tensors(table, flatten(params))
    return write_folder(hf_dir, cfg, tensors, str(table[0].dtype), source)


def write_folder(
    hf_dir: str | Path,
    cfg: ModelConfig,
    tensors: Iterator[tuple[str, np.ndarray]],
    dtype: str,
    source: str | Path | None = None,
) -> Path:
    """``save_hf`` of a stream of hub-named tensors, all of type ``dtype``: no model has to exist anywhere."""
    target = Path(hf_dir)
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise FileExistsError(f"{target} exists and is not empty: nothing is overwritten; choose another folder")
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    try:
        _copy_side_files(source, partial)
        _write_json(partial / "config.json", config_to_hf(cfg, dtype))
        if not (partial / "generation_config.json").exists():
            names = ("bos_token_id", "eos_token_id", "pad_token_id")
            ids = {name: value for name in names if (value := getattr(cfg, name)) not in (None, ())}
            _write_json(partial / "generation_config.json", ids)
        _write_shards(partial, tensors)
        partial.chmod(0o777 & ~_umask())  # mkdtemp made it private
        os.replace(partial, target)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return target


def _load(checkpoint: Checkpoint, p: Parameter, sharding: jax.sharding.Sharding) -> jax.Array:
    """One parameter, assembled on each device from its own part of the hub's tensors."""
    holders: dict[tuple[tuple[int, int], ...], list[jax.Device]] = {}
    for device, index in sharding.addressable_devices_indices_map(p.shape).items():
        spans = (s.indices(n)[:2] for s, n in zip(index or (slice(None),) * len(p.shape), p.shape, strict=True))
        holders.setdefault(tuple(spans), []).append(device)
    parts = [array for part, devices in holders.items() for array in _fill(checkpoint, p, part, devices)]
    return jax.make_array_from_single_device_arrays(p.shape, sharding, parts)


def _fill(
    checkpoint: Checkpoint, p: Parameter, part: tuple[tuple[int, int], ...], devices: list[jax.Device]
) -> list[jax.Array]:
    """The same part of a parameter on several devices, read once, in pieces of at most ``STAGING_BYTES``."""
    # The part is a block of a stack [layers, experts, rows, *columns] (either of the first two may be missing), and the
    # hub keeps one tensor for each (layer, expert). Seen as [tensors * rows, *columns] it is filled from the top: a
    # piece is some whole tensors where they are small, or some rows of one where they are large. Each goes to the
    # devices, which write it into their array in place, before the next one is read. A part that fits into one piece
    # needs no such array.
    shape = tuple(stop - start for start, stop in part)
    positions = list(itertools.product(*(range(*span) for span in part[: p.stacked])))  # of hub tensors
    within, (rows, *columns) = part[p.stacked :], shape[p.stacked :]
    fit = max(1, STAGING_BYTES // (math.prod(columns) * p.dtype.itemsize))
    step = max(1, fit // rows)
    whole: list[jax.Array] = []
    for first in range(0, len(positions), step):
        tensors = positions[first : first + step]
        for start in range(0, rows, fit):
            stop = min(start + fit, rows)
            span = ((within[0][0] + start, within[0][0] + stop), *within[1:])
            piece = np.empty((len(tensors), stop - start, *columns), p.dtype)
            for i, position in enumerate(tensors):
                piece[i] = checkpoint.part(p, position, span)
            if len(tensors) == len(positions) and stop - start == rows:
                return [jax.device_put(piece.reshape(shape), device) for device in devices]
            whole = whole or [jnp.zeros(shape, p.dtype, device=device) for device in devices]
            at = first * rows + start
            whole = [
                _insert(x, jax.device_put(piece.reshape(-1, *columns), d), at)
                for x, d in zip(whole, devices, strict=True)
            ]
            jax.block_until_ready(whole)  # or pieces would pile up behind the device
    return whole


@functools.partial(jax.jit, donate_argnums=0)
def _insert(whole: jax.Array, piece: jax.Array, at: int) -> jax.Array:
    flat = whole.reshape(-1, *piece.shape[1:])
    return jax.lax.dynamic_update_slice_in_dim(flat, piece, at, axis=0).reshape(whole.shape)


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


def _write_shards(folder: Path, tensors: Iterator[tuple[str, np.ndarray]]) -> None:
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
        if pending and size + tensor.nbytes > SHARD_BYTES:
            flush()
        pending[name] = tensor
        size, total = size + tensor.nbytes, total + tensor.nbytes
    flush()
    if len(shards) == 1:
        os.replace(folder / "shard-0", folder / SINGLE)
        return
    weight_map = {}
    for i, names in enumerate(shards):
        file = f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors"
        os.replace(folder / f"shard-{i}", folder / file)
        weight_map.update(dict.fromkeys(names, file))
    _write_json(folder / INDEX, {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))})


def _copy_side_files(source: str | Path | None, target: Path) -> None:
    for file in Path(source).iterdir() if source is not None else ():
        small = file.is_file() and file.suffix in (".json", ".txt", ".jinja", ".model", ".md")
        if small and file.name not in ("config.json", INDEX):
            shutil.copyfile(file, target / file.name)


def _check_tree(table: tuple[Parameter, ...], params: Params) -> None:
    leaves = flatten(params)
    paths = {p.path for p in table}
    if set(leaves) != paths:
        odd = [".".join(path) for path in sorted(set(leaves) ^ paths)]
        raise ValueError(
            f"parameters do not fit the configuration: {some(odd)} missing or left over; pass the right config"
        )
    for p in table:
        if leaves[p.path].shape != p.shape:
            raise ValueError(
                f"{p.name} has shape {leaves[p.path].shape}, expected {p.shape}: pass the config it was made with"
            )


def _write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def _umask() -> int:
    current = os.umask(0)
    os.umask(current)
    return current
