"""Text to token ids and back, from the files of a Hugging Face folder, through the ``tokenizers`` package alone."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from sat_jax.data import chat


class Tokenizer:
    """A ``tokenizer.json`` with its special tokens, end-of-sequence ids and chat template.

    Attributes:
        eos_ids: every id that ends a response, the preferred one first: ``eos_token_id`` of ``generation_config.json``
            (else of ``config.json``), then the ``eos_token`` of ``tokenizer_config.json``.
        pad_id: what padding is filled with; never trained on, so any valid id would do.
        bos_id: beginning-of-sequence id, or None.
        special_tokens: ``bos_token``, ``eos_token``, ... as text, the variables that chat templates read.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        eos_ids: Sequence[int] = (),
        pad_id: int | None = None,
        special_tokens: Mapping[str, str] | None = None,
        template: str | None = None,
        name: str = "tokenizer",
    ) -> None:
        backend.no_padding()
        backend.no_truncation()
        self._backend = backend
        self.name = name
        self.special_tokens = dict(special_tokens or {})
        self.eos_ids = tuple(dict.fromkeys(eos_ids))
        self.bos_id = self._special_id("bos_token")
        self.pad_id = next((i for i in (pad_id, self._special_id("pad_token"), *self.eos_ids) if i is not None), 0)
        self._template = template

    @classmethod
    def from_folder(cls, folder: str | Path) -> Tokenizer:
        """Load ``tokenizer.json`` and what stands beside it. ``ValueError`` where it is missing or malformed, or an
        added token of ``tokenizer_config.json`` cannot get the id that it claims."""
        folder = Path(folder)
        path = folder / "tokenizer.json"
        if not path.is_file():
            has = ", ".join(sorted(p.name for p in folder.iterdir())[:8]) if folder.is_dir() else "no such folder"
            raise ValueError(
                f"{path} is missing ({has}): give a Hugging Face folder with a fast tokenizer, saved by save_pretrained"
            )
        try:
            backend = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the Rust side raises a bare Exception for every kind of malformed file
            raise ValueError(f"{path} is no readable tokenizer ({error}): copy or download the folder again") from error
        config = _read_json(folder / "tokenizer_config.json")
        generation = _read_json(folder / "generation_config.json")
        model = _read_json(folder / "config.json")
        _add_declared_tokens(backend, config, folder)
        special = {
            key: value["content"] if isinstance(value, dict) else value
            for key, value in (_read_json(folder / "special_tokens_map.json") | config).items()
            if key.endswith("_token") and (isinstance(value, str) or (isinstance(value, dict) and "content" in value))
        }
        declared = generation.get("eos_token_id", model.get("eos_token_id"))
        eos_ids = list(declared) if isinstance(declared, list) else [] if declared is None else [declared]
        own_eos = backend.token_to_id(special["eos_token"]) if "eos_token" in special else None
        if own_eos is not None:
            eos_ids.append(own_eos)
        return cls(
            backend,
            eos_ids=eos_ids,
            pad_id=None if "pad_token" in special else generation.get("pad_token_id", model.get("pad_token_id")),
            special_tokens=special,
            template=chat.find_template(folder, config),
            name=str(folder),
        )

    @classmethod
    def of_bytes(cls) -> Tokenizer:
        """One token per UTF-8 byte, and an end-of-sequence token (256): for looking at data before there is a model."""
        alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
        backend = tokenizers.Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        backend.decoder = decoders.ByteLevel()
        backend.add_special_tokens(["<eos>"])
        return cls(backend, eos_ids=[len(alphabet)], special_tokens={"eos_token": "<eos>"}, name="bytes")

    def _special_id(self, key: str) -> int | None:
        text = self.special_tokens.get(key)
        return None if text is None else self._backend.token_to_id(text)

    @property
    def vocab_size(self) -> int:
        """One more than the largest id: what an embedding table needs at least."""
        return 1 + max(self._backend.get_vocab(with_added_tokens=True).values(), default=-1)

    def check_vocabulary(self, vocab_size: int) -> None:
        """Raise ``ValueError`` where this tokenizer makes ids that a model of ``vocab_size`` rows cannot embed."""
        if self.vocab_size > vocab_size:
            raise ValueError(
                f"{self.name} makes ids up to {self.vocab_size - 1}, but the model's vocabulary has {vocab_size} rows: "
                "use the tokenizer that belongs to the model"
            )
        if bad := [i for i in self.eos_ids if not 0 <= i < vocab_size]:
            raise ValueError(
                f"eos_token_id {bad[0]} of {self.name} lies outside the model's vocabulary of {vocab_size}: "
                "correct eos_token_id in generation_config.json"
            )

    def encode(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
        """Ids of ``text``; special tokens spelt in it are recognised.

        With ``add_special_tokens`` the tokenizer's own post-processor adds BOS and the like; a BOS that the text
        already spells out is not added a second time.
        """
        return self.encode_batch([text], add_special_tokens=add_special_tokens)[0]

    def encode_batch(self, texts: Sequence[str], *, add_special_tokens: bool = False) -> list[list[int]]:
        """``encode`` of many texts, in parallel on the Rust side."""
        rows = [e.ids for e in self._backend.encode_batch(list(texts), add_special_tokens=add_special_tokens)]
        if add_special_tokens and self.bos_id is not None:
            twice = [self.bos_id, self.bos_id]
            return [ids[1:] if ids[:2] == twice else ids for ids in rows]
        return rows

    def decode(self, ids: Iterable[int], *, skip_special_tokens: bool = True) -> str:
        """Text of ``ids``; special tokens left out unless asked for, bytes that are no UTF-8 shown as U+FFFD."""
        return self._backend.decode([int(i) for i in ids], skip_special_tokens=skip_special_tokens)

    def token(self, token_id: int) -> str | None:
        """The vocabulary's own spelling of one id, or None where it has none."""
        return self._backend.id_to_token(int(token_id))

    @property
    def has_chat_template(self) -> bool:
        """True where ``render_chat`` has a template to work with."""
        return self._template is not None

    def render_chat(self, messages: chat.Messages, **variables: Any) -> str:
        """The text of ``messages`` under the folder's chat template; see ``chat.render``.

        ``encode`` it without special tokens: whether a prompt starts with BOS is the template's decision.
        """
        if self._template is None:
            raise ValueError(f"{self.name} has no chat template: add chat_template.jinja to it, or use plain prompts")
        return chat.render(self._template, messages, **(self.special_tokens | variables))


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ValueError(f"{path} is not valid JSON ({error}): copy or download the folder again") from error
    if not isinstance(value, dict):
        raise ValueError(f"{path} holds a {type(value).__name__}: a JSON object is expected")
    return value


def _add_declared_tokens(backend: tokenizers.Tokenizer, config: Mapping[str, Any], folder: Path) -> None:
    """Tokens that only ``tokenizer_config.json`` knows of: loaders honour them, so sampled ids may mean them."""
    for key, spec in sorted(config.get("added_tokens_decoder", {}).items(), key=lambda item: int(item[0])):
        text = spec["content"]
        if backend.token_to_id(text) is None:
            flags = {name: bool(spec.get(name, False)) for name in ("lstrip", "rstrip", "single_word", "normalized")}
            token = tokenizers.AddedToken(text, special=bool(spec.get("special", False)), **flags)
            add = backend.add_special_tokens if spec.get("special") else backend.add_tokens
            add([token])
        if backend.token_to_id(text) != int(key):
            raise ValueError(
                f"{folder / 'tokenizer_config.json'} gives token {text!r} the id {key}, but tokenizer.json makes it "
                f"{backend.token_to_id(text)}: the two files belong to different tokenizers; download the folder again"
            )
